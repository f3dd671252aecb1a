"""Checkpoints of others: each form of file, with its real names, is judged, and trained from (--init)."""

import argparse

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


# name: how timm builds it; the file of a query and a momentum encoder; the prefix of the one that is taken, and of the
# other; how many tensors are left over
FORMS = {
    "MoCo v2": (RESNET, moco_v2, "state_dict.module.encoder_q.", "state_dict.module.encoder_k.", 4),
    "JointCrop": (RESNET, lambda q, k: moco_v3(q, k, "fc.0.weight"), BASE, SLOW, 3),
    "MoCo v3 ViT": (VIT, lambda q, k: moco_v3(q, k, "head.0.weight"), BASE, SLOW, 3),
    "PatchMix": (
        VIT,
        lambda q, k: {"model": under("base_encoder.", q, "head.weight") | under("momentum_encoder.", k)},
        "model.base_encoder.",
        "momentum_encoder.",
        1,
    ),
    "DINO": (
        VIT,
        lambda q, k: {
            "student": under("module.backbone.", k),
            "teacher": under("backbone.", q) | {"head": torch.ones(2)},
        },
        "teacher.backbone.",
        "student.module.backbone.",
        1,
    ),
    "solo-learn": (
        RESNET,
        lambda q, k: {"state_dict": under("momentum_backbone.", k) | under("backbone.", q) | {"queue": torch.ones(2)}},
        "state_dict.backbone.",
        "momentum_backbone.",
        1,
    ),
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
    assert (info["image_size"], info["mean"], info["method"]) == (
        how["image_size"],
        common.NORMS["imagenet"][0],
        path.name,
    )
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
    assert "16 patches, is resampled to 6 x 6" in capsys.readouterr().out
    timms = common.build_backbone(info).eval()
    timms.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(theirs.state_dict(), timms))
    assert same(encoder, timms, 48)


def write_hostile(path):
    torch.save({"state_dict": {}, "args": argparse.Namespace(lr=1)}, path)


ERRORS = [  # what is written, how it is read, words of the line
    (None, VIT, "no checkpoint at"),
    (lambda path: path.write_text("notes"), VIT, "cannot be read as a checkpoint"),
    (write_hostile, VIT, "holds more than tensors (argparse.Namespace)"),
    (lambda path: torch.save([1, 2], path), VIT, "0 of its 42 names are there"),
    ("vit_micro", VIT | {"prefix": "encoder_k."}, "--prefix encoder_k.: the encoders of"),
    ("vit_micro", VIT | {"patch_size": 4}, "patch_embed.proj.weight is (64, 3, 8, 8), not (64, 3, 4, 4)"),
    (
        "vit_micro",
        VIT | {"arch": "vit_tiny"},
        "cls_token is (1, 1, 64), not (1, 1, 192); pos_embed is (1, 17, 64), not",
    ),
    ("vit_micro", RESNET, "0 of its 65 names are there; nearest misses: conv1.weight ("),
    ("vit_micro", VIT | {"encoder": "query"}, "a prefix chooses"),
]


@pytest.mark.parametrize("write, how, words", ERRORS)
def test_what_does_not_fit_is_one_line(write, how, words, tmp_path, capsys):
    path = tmp_path / "file.pth"
    if callable(write):
        write(path)
    elif write:
        torch.save({"net": under("a.", make_encoder(**VIT)) | under("b.", make_encoder(**VIT))}, path)
    assert words in refused(capsys, common.load_backbone, path, **how)


def test_the_lines_that_make_a_plain_file_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    teacher = make_encoder(**VIT)
    torch.save({"teacher": under("backbone.", teacher), "args": argparse.Namespace(lr=1)}, "dino.pth")
    exec(refused(capsys, common.load_backbone, "dino.pth", **VIT).partition("plain file of it: ")[2])
    assert same(common.load_backbone("plain.pt", **VIT)[0], teacher, 32)


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
    assert "going on at step 1" in tiny.run(method, out, *flags, "--init", path, "--max-steps", 2)
    assert "init was" in refused(capsys, tiny.run, method, out, *flags)
    module = __import__(method)
    assert module.parse_args(["--init", "a/moco.pth"]).changes == "-initmoco.pth"


def test_an_untrained_encoder_whose_tag_names_weights_says_so(_tiny, tmp_path):
    said = tiny.run("jcl", tmp_path / "run", "--arch", "resnet10t.c3_in1k", "--max-steps", 1)
    assert "starts untrained, not from the weights that its tag names" in said
    assert "starts" not in tiny.run("jcl", tmp_path / "other", "--max-steps", 1)
