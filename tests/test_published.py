"""Checkpoints of others: each form of file, with its real names, is judged, and trained from (--init)."""

import argparse
import datetime
import zipfile
from pathlib import Path

import numpy as np
import pytest
import test_eval
import timm
import tiny
import torch
import torchvision
from conftest import METHODS
from safetensors.torch import save_file
from tiny import load, refused

import common
import eval_knn
import eval_linear

_tiny, judged = tiny._tiny, test_eval.tiny
VIT = dict(arch="vit_micro", image_size=32, patch_size=8)
RESNET = dict(arch="resnet_mini", image_size=96)
BASE, SLOW = "state_dict.module.base_encoder.", "state_dict.module.momentum_encoder."


def under(prefix, encoder, *heads):
    """An encoder's state_dict with a prefix before its names, and one tensor for each head."""
    weights = {prefix + name: value for name, value in encoder.state_dict().items()}
    return weights | {prefix + name: torch.ones(2) for name in heads}


def moco_v3(q, k, *heads):
    weights = under("module.base_encoder.", q, *heads) | under("module.momentum_encoder.", k, *heads)
    return {"epoch": 300, "arch": "x", "state_dict": weights | under("module.predictor.", torch.nn.Linear(2, 2))}


def moco_v2(q, k):
    weights = under("module.encoder_q.", q, "fc.0.weight", "fc.2.weight") | under("module.encoder_k.", k, "fc.0.weight")
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.03}]}
    queue = {"module.queue": torch.ones(2, 8), "module.queue_ptr": torch.zeros(1)}
    return {"epoch": 200, "arch": "resnet50", "state_dict": queue | weights, "optimizer": optimizer}


def old(q, k):
    """A state_dict from before batch norms counted batches."""
    return {name: x for name, x in under("", q, "fc.weight", "fc.bias").items() if "num_batches" not in name}


def patchmix(q, k):
    return {"model": under("base_encoder.", q, "head.weight") | under("momentum_encoder.", k)}


def dino(q, k):
    return {"student": under("module.backbone.", k), "teacher": under("backbone.", q) | {"head": torch.ones(2)}}


def solo_learn(q, k):
    return {"state_dict": under("momentum_backbone.", k) | under("backbone.", q) | {"queue": torch.ones(2)}}


# name: how timm builds it; the file of a query and a momentum encoder; the prefix of the one that is taken, and of the
# other; how many tensors are left over
FORMS = {
    "MoCo v2": (RESNET, moco_v2, "state_dict.module.encoder_q.", "state_dict.module.encoder_k.", 4),
    "JointCrop": (RESNET, lambda q, k: moco_v3(q, k, "fc.0.weight"), BASE, SLOW, 3),
    "MoCo v3 ViT": (VIT, lambda q, k: moco_v3(q, k, "head.0.weight"), BASE, SLOW, 3),
    "PatchMix": (VIT, patchmix, "model.base_encoder.", "momentum_encoder.", 1),
    "DINO": (VIT, dino, "teacher.backbone.", "student.module.backbone.", 1),
    "solo-learn": (RESNET, solo_learn, "state_dict.backbone.", "momentum_backbone.", 1),
    "torchvision": (RESNET, old, "the file itself", None, 2),
    "timm": (VIT, lambda q, k: under("", q, "head.weight", "head.bias"), "the file itself", None, 2),
}


def make_encoder(arch, image_size, patch_size=16):
    """An encoder with weights and statistics that no other has."""
    encoder = common.build_backbone(common.backbone_info(arch, image_size, patch_size))
    for value in encoder.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) / 10 + 0.1 * value)
    return encoder.eval()


def same(one, two, size):
    x = torch.randn(2, 3, size, size)
    return torch.equal(one(x), two(x)) and not torch.allclose(*one(x))


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read(form, tmp_path, capsys):
    how, make, taken, other, left = FORMS[form]
    query, momentum = make_encoder(**how), make_encoder(**how)
    path = tmp_path / "model.pth.tar"
    torch.save(make(query, momentum), path, _use_new_zipfile_serialization=form != "torchvision")  # theirs is old
    encoder, info = common.load_backbone(path, **how)
    said = capsys.readouterr().out
    assert same(encoder, query, how["image_size"]) and not encoder.training
    assert f"the encoder is {taken}" in said and f"left out: {left} tensor(s)" in said
    assert (info["image_size"], info["method"]) == (how["image_size"], path.name)
    assert info["mean"] == common.NORMS["imagenet"][0]
    if other:
        assert other in said and same(common.load_backbone(path, **how, prefix=other)[0], momentum, how["image_size"])


def test_files_of_libraries_are_read(tmp_path):
    """Torchvision's own ResNet, and timm's own ViT as safetensors."""
    theirs = torchvision.models.resnet18()
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    theirs.fc = torch.nn.Identity()
    assert same(common.load_backbone(tmp_path / "resnet18.pth", arch="resnet18")[0], theirs.eval(), 64)
    theirs = timm.create_model("vit_tiny_patch16_224")
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    theirs.reset_classifier(0)
    assert same(common.load_backbone(tmp_path / "model.safetensors", arch="vit_tiny")[0], theirs.eval(), 224)


def test_position_embeddings_of_another_grid_are_resampled_as_timm_does(tmp_path, capsys):
    theirs = make_encoder(**VIT)
    torch.save({"model": theirs.state_dict()}, tmp_path / "vit.pth")
    encoder, info = common.load_backbone(tmp_path / "vit.pth", **VIT | {"image_size": 48})
    assert "resampled from 17 rows to 37" in capsys.readouterr().out
    timms = common.build_backbone(info).eval()
    timms.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(theirs.state_dict(), timms))
    assert same(encoder, timms, 48)


ERRORS = [  # how a file of two ViTs is read, words of the line
    (VIT | {"prefix": "encoder_k."}, "--prefix encoder_k.: the encoders of"),
    (VIT | {"patch_size": 4}, "patch_embed.proj.weight is (64, 3, 8, 8), not (64, 3, 4, 4)"),
    (VIT | {"arch": "vit_tiny"}, "cls_token is (1, 1, 64), not (1, 1, 192); pos_embed is (1, 17, 64), not"),
    (RESNET, "does not fit the encoder: conv1.weight ("),
    (VIT | {"encoder": "query"}, "a prefix chooses"),
]


@pytest.mark.parametrize("how, words", ERRORS)
def test_what_does_not_fit_is_one_line(how, words, tmp_path, capsys):
    path = tmp_path / "file.pth"
    torch.save({"net": under("a.", make_encoder(**VIT)) | under("b.", make_encoder(**VIT))}, path)
    assert words in refused(capsys, common.load_backbone, path, **how)
    torch.save([1, 2], path)
    line = "does not fit the encoder: cls_token (1, 1, 64) is not there. The file has 0 tensors"
    assert line.partition(". ")[0] in refused(capsys, common.load_backbone, path, **VIT)


def tensors_of(name, **more):
    """The tensors, whose values do not matter, of one of timm's encoders that is built without drawing weights."""
    with torch.device("meta"):
        encoder = timm.create_model(name, num_classes=0, **more)
    return {name: torch.ones(()).to(x.dtype).expand(x.shape) for name, x in encoder.state_dict().items()}


TINY = "vit_tiny_patch16_224"
RICHER = [  # the encoder of a file, what differs from timm's, how it is read, words of the line
    ("resnet34", {}, dict(arch="resnet18"), "it fits --arch resnet34: "),
    ("seresnet50", {}, dict(arch="resnet50"), "it fits --arch seresnet50: "),
    ("resnet50d", {}, dict(arch="resnet50"), "it fits --arch resnet50d: "),
    (TINY, dict(depth=15), dict(arch="vit_tiny"), "it has no place for 36 tensors, blocks.12"),
    (TINY, dict(qk_norm=True), dict(arch="vit_tiny"), "no place for 48 tensors, blocks.0.attn.q_norm.weight"),
    (TINY, dict(pre_norm=True), dict(arch="vit_tiny"), "patch_embed.proj.bias (192,) is not there"),
    (TINY, dict(no_embed_class=True), dict(arch="vit_tiny"), "pos_embed is (1, 16, 192), not (1, 50, 192)"),
    (TINY, dict(reg_tokens=4), dict(arch="vit_tiny"), "pos_embed is (1, 21, 192), not"),
    ("vit_small_patch14_dinov2", {}, dict(arch="vit_small", patch_size=14), "fits --arch vit_small_patch14_dinov2"),
    ("deit_tiny_distilled_patch16_224", {}, dict(arch="vit_tiny"), "fits --arch deit_tiny_distilled_patch16_224"),
    ("deit3_small_patch16_224", {}, dict(arch="resnet50"), "fits --arch deit3_small_patch16_224"),
    ("resnet18", {}, dict(arch="resnet18", image_size=32), "sizes up to 64 px choose a ResNet's 3 x 3 stem"),
]


@pytest.mark.parametrize("name, more, how, words", RICHER)
def test_a_file_of_another_encoder_is_refused(name, more, how, words, tmp_path, capsys):
    """Not judged as the smaller encoder that its names hold, too. A fitting encoder of timm's is named."""
    found = tensors_of(name, **(more | dict(img_size=64) if more else {}))
    torch.save({"state_dict": {f"module.{key}": x for key, x in found.items()}}, tmp_path / "file.pth")
    line = refused(capsys, common.load_backbone, tmp_path / "file.pth", **{"image_size": 112} | how)
    assert words in line and "file.pth" in line


def test_whole_numbers_and_what_is_left_of_a_layer_are_refused(tmp_path, capsys):
    encoder = make_encoder(**RESNET)
    state = encoder.state_dict()
    torch.save(state | {"layer1.0.conv1.weight": state["layer1.0.conv1.weight"].char()}, tmp_path / "int8.pth")
    assert "conv1.weight is torch.int8, not" in refused(capsys, common.load_backbone, tmp_path / "int8.pth", **RESNET)
    torch.save(state | {"layer1.0.conv1.scale": torch.ones(1)}, tmp_path / "scale.pth")
    assert "layer1.0.conv1.scale" in refused(capsys, common.fitting_weights, tmp_path / "scale.pth", encoder)


PUBLIC = "resnet18 convnextv2_atto vit_tiny_patch16_224 vit_small_patch14_reg4_dinov2 vit_small_patch16_dinov3".split()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_encoders_are_read_by_the_right_name(name, tmp_path):
    size = 56 if "patch14" in name else 96  # the patch size is in the name
    more = dict(img_size=size, dynamic_img_size=True) if common.is_vit(name) else {}
    theirs = timm.create_model(name, num_classes=0, **more).eval()
    torch.save({"teacher": under("backbone.", theirs, "fc.weight")}, tmp_path / "dino.pth")
    read = common.load_backbone(tmp_path / "dino.pth", arch=name, image_size=size)[0]
    assert same(read, theirs, size)


def test_lightlys_names_are_read(tmp_path, capsys):
    """Its encoder is nn.Sequential(*resnet.children()), so its layers have numbers."""
    theirs = torchvision.models.resnet18()
    theirs = torch.nn.Sequential(*list(theirs.children())[:-1], torch.nn.Flatten()).eval()
    torch.save({"state_dict": under("backbone.", theirs) | under("head.", torch.nn.Linear(2, 2))}, tmp_path / "l.ckpt")
    encoder, _ = common.load_backbone(tmp_path / "l.ckpt", arch="resnet18")
    assert "the encoder is state_dict.backbone.; left out: 2" in capsys.readouterr().out and same(encoder, theirs, 64)
    assert "fits --arch resnet18" in refused(capsys, common.load_backbone, tmp_path / "l.ckpt", arch="resnet34")


NOT_CHECKPOINTS = {
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "web page": b"\n<!DOCTYPE html><html></html>",
    "empty": b"",
    "compressed archive": b"\x1f\x8b\x08",
    "cut off": b"PK\x03\x04" + bytes(100),
    "no file of torch.save's": b"notes",
}


@pytest.mark.parametrize("kind", NOT_CHECKPOINTS)
def test_what_is_no_checkpoint_is_said_as_what_it_is(kind, tmp_path, capsys):
    for name in ("model.pth", "model.safetensors"):
        (tmp_path / name).write_bytes(NOT_CHECKPOINTS[kind])
        for how in ({}, VIT):
            line = refused(capsys, common.load_backbone, tmp_path / name, **how)
            assert kind in line and "weights_only" not in line


def test_the_first_bytes_of_safetensors_are_a_number(tmp_path):
    """It may be spelled as an archive's: PK."""
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'.ljust(int.from_bytes(b"PK", "little"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + np.ones(2, np.float32).tobytes())
    assert file.read_bytes().startswith(b"PK") and common.read_tensors(file)["w"].tolist() == [1, 1]


def test_programs_and_zip_archives_are_told_apart(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.writestr("model.pth", b"")
    assert "zip archive of other files" in refused(capsys, common.read_tensors, "a.zip")
    torch.jit.script(torch.nn.Linear(2, 3)).save("program.pt")
    exec(refused(capsys, common.read_tensors, "program.pt").partition("can be imported: ")[2], {})
    assert common.read_tensors("plain.pt").keys() == {"weight", "bias"}


PLAIN = argparse.Namespace(lr=np.float64(1), at=datetime.datetime(2026, 1, 2), out=Path("x"), scores=np.ones(2))


@pytest.mark.parametrize("zipped", [True, False])
def test_plain_data_beside_tensors_is_loaded_at_once(zipped, tmp_path):
    state = {"models": [{"w": torch.ones(2)}], "args": PLAIN, "best": np.float32(3), "lr": {"a": {"b": PLAIN}}}
    torch.save(state, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    assert common.read_tensors(tmp_path / "a.pth").keys() == {"models.0.w"}


class Odd:
    """Something that no checkpoint should need."""


@pytest.mark.parametrize("whole", [True, False])
def test_the_lines_that_make_a_plain_file_do(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    teacher = make_encoder(**VIT)
    torch.save(teacher if whole else {"deep": {"er": [under("x.", teacher)]}, "odd": [Odd()]}, "theirs.pth")
    line = refused(capsys, common.load_backbone, "theirs.pth", **VIT)
    assert f"a whole pickled module ({'timm.' if whole else 'test_published.Odd)'}" in line
    exec(line.partition("plain file of it where their code can be imported: ")[2], {})
    assert same(common.load_backbone("plain.pt", **VIT)[0], teacher, 32)


def test_folders_and_files_are_told_apart(judged, tmp_path, capsys):
    """A run's folder for --init is its backbone.pt. Beside --arch it, and without --arch others' file, are told."""
    run, _ = judged
    encoder = common.load_backbone(run)[0]
    weights, _ = common.fitting_weights(run, encoder)
    assert all(torch.equal(x, weights[name]) for name, x in encoder.state_dict().items())
    assert "leave out --arch" in refused(capsys, common.load_backbone, run, **VIT)
    torch.save(under("encoder.", encoder), tmp_path / "others.pth")
    assert "give --arch NAME" in refused(capsys, common.load_backbone, tmp_path / "others.pth")


MODES = [(eval_knn, "--k 3"), *((eval_linear, flags) for flags in ("", "--solver lbfgs --strengths 1"))]
LONG = "--batch-size 16 --epochs 1 --out OUT"
MODES += [(eval_linear, f"{flags} {LONG}") for flags in ("--protocol moco", "--finetune --protocol patchmix")]


@pytest.mark.parametrize("script, flags", MODES)
def test_all_evaluations_judge_a_file_of_others_as_a_run(script, flags, judged, tmp_path):
    run, data = judged
    encoder = common.load_backbone(run)[0]
    torch.save(under("encoder.", encoder, "fc.weight"), tmp_path / "others.pth")
    how = "--arch vit_micro --image-size 16 --patch-size 8 --norm patterns --dataset folder --data-dir".split()
    results = []
    for words in ([run], [tmp_path / "others.pth", *how, data]):
        more = flags.replace("OUT", str(tmp_path / f"out{len(results)}")).split()
        results.append(test_eval.run(script, *words, *more))
    assert results[0] == results[1] and results[0]["encoder"]


def test_runs_on_files_of_others_have_names_of_their_own(judged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, data = judged
    encoder = common.load_backbone(run)[0]
    torch.save(under("a.", encoder) | under("b.", encoder), "others.pth")
    flags = "others.pth --arch vit_micro --image-size 16 --patch-size 8 --protocol moco --dataset folder --data-dir"
    flags = [*flags.split(), data, *"--batch-size 16 --epochs 1".split()]
    for prefix in ([], ["--prefix", "b."]):
        test_eval.run(eval_linear, *flags, *prefix)
    names = sorted(path.name.split("-s0")[0] for path in (tmp_path / "runs").iterdir())
    assert names == [f"linear-moco-folder-others-vit_micro{prefix}" for prefix in ("", "-b.")]


INIT = [*((method, "") for method in METHODS), ("moco_jointcrop", "--moco v3"), ("logo", "--base simsiam")]


@pytest.mark.parametrize("method, variant", INIT)
def test_training_starts_from_init_and_goes_on_without_the_file(method, variant, _tiny, tmp_path, capsys):
    """The rate is so small that the weights stay; MoCo v3 and SimSiam would zero some of an untrained encoder's."""
    query, momentum = (make_encoder("resnet_nano", 16) for _ in range(2))
    path, out = tmp_path / "moco.pth", tmp_path / "run"
    torch.save(moco_v2(query, momentum), path)
    flags = [*f"--arch resnet_nano --lr 1e-9 --weight-decay 0{' 0' * (method == 'patchmix')}".split(), *variant.split()]
    said = tiny.run(method, out, *flags, "--init", path, "--max-steps", 1)
    assert "the encoder is state_dict.module.encoder_q." in said and f"starts from {path}" in said
    saved = load(out / "last.pt")["model"]
    for name, value in query.named_parameters():
        for prefix in ("backbone.", "momentum_backbone.")[: 1 if "simsiam" in variant else 2]:
            torch.testing.assert_close(saved[prefix + name], value.detach(), rtol=0, atol=1e-6)
    path.unlink()
    assert "last.pt, at step 1" in tiny.run(method, out, *flags, "--init", path, "--max-steps", 2)
    assert "init was" in refused(capsys, tiny.run, method, out, *flags)
    module = __import__(method)
    assert module.parse_args(["--init", "a/moco.pth"]).changes == "-initmoco.pth"


def test_an_encoder_whose_tag_names_weights_starts_untrained_and_says_so(_tiny, tmp_path):
    assert "starts from random weights" in tiny.run("jcl", tmp_path, "--arch", "resnet10t.c3_in1k", "--max-steps", 1)
