"""Tests that third-party checkpoints in each usual form, with its real names, can be evaluated and passed to --init."""

import argparse
import functools

import pytest
import test_eval
import timm
import torch
import torchvision
from conftest import EACH_MODEL, WITH_MIN_LR, slow_but
from safetensors.torch import save_file
from tiny import FLAGS, epochs_of, evaluate, life, load, refused, run

import common
import eval_knn

places = test_eval.places
VIT = dict(arch="vit_micro", image_size=32, patch_size=8, num_heads=4)
RESNET = dict(arch="resnet_mini", image_size=96)

FORMS = {  # name: (encoder, entry of the file, prefixes of its query encoder and of its momentum encoder)
    "MoCo v2": (RESNET, "state_dict", "module.encoder_q.", "module.encoder_k."),
    "PatchMix": (VIT, "model", "base_encoder.", "momentum_encoder."),
    "DINO": (VIT, None, "student.module.backbone.", "teacher.backbone."),  # each has its own entry
}
# What else such files hold. They may also hold an argparse.Namespace, which torch.load alone would reject.
HEADS = ("fc.0.weight", "fc.weight", "head.weight", "head.0.bias", "head.mlp.0.weight")
HEADS += ("mask_token", "decoder_pos_embed", "decoder_embed.weight", "decoder_blocks.0.norm1.weight")  # MAE's
OPTIMIZER = {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.03}]}


def under(prefix, encoder):
    """Return an encoder's state_dict with tensors of heads, and with a prefix before all names."""
    weights = encoder.state_dict() | {name: torch.ones(2) for name in HEADS}
    return {prefix + name: value for name, value in weights.items()}


def make_encoder(arch, image_size, patch_size=16, **heads):
    """Return an encoder with weights and running statistics unlike any other's."""
    encoder = common.build_backbone(common.backbone_info(arch, image_size, patch_size, **heads))
    for value in encoder.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) / 10 + 0.1 * value)
    return encoder.eval()


def same(one, two, size):
    x = torch.randn(2, 3, size, size)
    return torch.equal(one(x), two(x)) and not torch.allclose(*one(x))


def read(path, **how):
    """Return the encoder that an evaluation with these flags loads: (module, info)."""
    flags = [word for name, value in how.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return common.open_encoder(eval_knn.parse_args([str(path), *flags]))


@pytest.mark.parametrize("form", slow_but(["MoCo v2", "PatchMix"], FORMS))
def test_each_form_is_read(form, tmp_path, capsys):
    """Each encoder needs its prefix, which is not guessed. The message about a wrong one names those in the file."""
    how, entry, *prefixes = FORMS[form]
    file = {"epoch": 3, "args": argparse.Namespace(lr=1.0), "optimizer": OPTIMIZER}
    encoders = {prefix: make_encoder(**how) for prefix in prefixes}
    for prefix, encoder in encoders.items():
        outer, inner = (entry, prefix) if entry else prefix.split(".", 1)
        file[outer] = {"module.queue": torch.ones(2, 8)} | file.get(outer, {}) | under(inner, encoder)
    torch.save(file, tmp_path / "model.pth.tar")
    for wrong in ({}, dict(prefix="encoder_x.")):
        line = refused(capsys, read, tmp_path / "model.pth.tar", **how, **wrong)
        assert all(repr(prefix) in line for prefix in encoders)
    for prefix, encoder in encoders.items():
        found, info = read(tmp_path / "model.pth.tar", **how, prefix=prefix)
        assert same(found, encoder, how["image_size"]) and not found.training
        assert (info["method"], info["encoder"]) == ("model.pth.tar", prefix)
        assert info["mean"] == common.NORMS["imagenet"][0] and info["image_size"] == how["image_size"]


def test_a_plain_state_dict_needs_no_prefix(tmp_path):
    """The file has torch's old format, from before batch norms counted batches."""
    encoder, path = make_encoder(**RESNET), tmp_path / "file.pth"
    state = {name: x for name, x in under("", encoder).items() if "num_batches" not in name}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert same(read(path, **RESNET)[0], encoder, 96)
    assert read(path, arch="resnet_mini")[1]["image_size"] == 224


# DINOv2 and v3 have extra tokens, and a position embedding without the class token, or none. CaiT's is not resampled.
PUBLIC = """vit_tiny_patch16_224 vit_small_patch14_reg4_dinov2
    resnet18 convnextv2_atto cait_xxs24_224 vit_small_patch16_dinov3""".split()


@pytest.mark.parametrize("name", slow_but(PUBLIC[:2], PUBLIC))
def test_public_encoders_are_read_by_timms_name(name, tmp_path, monkeypatch):
    """A file may have a classifier, and a name a tag after a dot. Position embeddings are resampled as in timm."""
    options = dict(depth=2) if name.startswith(("vit_", "cait_")) else {}  # instead of 12 or 24 blocks, to save time
    monkeypatch.setattr(timm, "create_model", functools.partial(timm.create_model, **options))
    size, any_size = (112, dict(dynamic_img_size=True)) if name.startswith("vit_") else (224, {})
    theirs = torchvision.models.resnet18() if name == "resnet18" else timm.create_model(name, num_classes=5, **any_size)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    if name == "resnet18":
        theirs.fc = torch.nn.Identity()
    else:
        theirs.reset_classifier(0)
    known = timm.get_pretrained_cfg(name)  # of timm's default weights
    how = dict(arch=f"{name}.{known.tag}", image_size=size) | (dict(patch_size=14) if "patch14" in name else {})
    found, info = read(tmp_path / "model.safetensors", **how)
    assert same(found, theirs.eval(), size) and (info["mean"], info["std"]) == (known.mean, known.std)
    info = read(tmp_path / "model.safetensors", **how, norm="cifar10")[1]
    assert (info["mean"], info["std"]) == common.NORMS["cifar10"]


@pytest.mark.parametrize("entry, prefix", [("model_ema", "model_ema."), ("teacher", "teacher."), ("model", "")])
def test_a_file_of_several_entries(entry, prefix, tmp_path):
    """An entry that is not the usual one is found by its name. Others may hold no tensors."""
    encoder, other = make_encoder(**VIT), dict(backbone=None, model="vit_tiny", head={"x": torch.ones(2)})
    torch.save(other | {entry: encoder.state_dict()}, tmp_path / "file.pth")
    assert same(read(tmp_path / "file.pth", **VIT, prefix=prefix)[0], encoder, 32)
    if entry == "model_ema":
        torch.save(dict(model=make_encoder(**VIT).state_dict(), model_ema=encoder.state_dict()), tmp_path / "file.pth")
        assert same(read(tmp_path / "file.pth", **VIT, prefix=prefix)[0], encoder, 32)


UNFIT = {  # (what is saved of a ResNet's state_dict, how it is read, words of the message)
    "another stem": (lambda state: state | {"conv1.weight": torch.ones(16, 3, 7, 7)}, {}, "3 x 3 stem"),
    "not a number": (lambda state: state | {"bn1.weight": state["bn1.weight"] * torch.nan}, {}, "not finite"),
    "parts are missing": (lambda state: {"conv1.weight": state["conv1.weight"]}, {}, "Missing key"),
    "no known head": (lambda state: state | {"attn_pool.latent": torch.ones(3)}, {}, "attn_pool.latent"),
    "no patches": (dict, dict(patch_size=8), "--patch-size needs a ViT"),
    "no third-party file": (dict, dict(encoder="momentum"), "--encoder"),
    "no such tag": (dict, dict(arch="resnet50.foo"), "--arch resnet50.foo"),
    "another token": (lambda _: {"pos_embed": torch.ones(1, 38, 192)}, dict(arch="vit_tiny"), "mismatch for pos_embed"),
}


@pytest.mark.parametrize("make, how, words", UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_refused(make, how, words, tmp_path, capsys):
    torch.save(make(make_encoder(**RESNET).state_dict()), tmp_path / "file.pth")
    assert words in refused(capsys, read, tmp_path / "file.pth", **RESNET | how)
    assert "pass --arch" in refused(capsys, common.load_backbone, tmp_path / "file.pth")


def test_files_that_are_no_checkpoints_are_refused(tmp_path, capsys):
    """The message says what is wrong with a file, and never suggests loading it unsafely."""
    assert "Is a directory" in refused(capsys, read, tmp_path, **RESNET)
    torch.save([torch.ones(1)], tmp_path / "file.pth")
    whole, pointer = (tmp_path / "file.pth").read_bytes(), b"version https://git-lfs.github.com/spec/v1"
    wrong = [("file.pth", whole, "saved state_dict"), ("file.pth", whole[:-30], "truncated"), ("file.pth", b"", "b''")]
    wrong += [("file.pth", pointer, "version https://git-lfs"), ("file.safetensors", b"neither", "damaged")]
    for name, data, words in wrong:
        (tmp_path / name).write_bytes(data)
        line = refused(capsys, read, tmp_path / name, **RESNET)
        assert str(tmp_path / name) in line and words in line and "weights_only" not in line


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_is_not_run(here, zipped, capsys):
    class Hostile:  # unpickling it writes a file
        def __reduce__(self):
            return open, ("victim", "w")

    torch.save({"state_dict": Hostile()}, "backbone.pt", _use_new_zipfile_serialization=zipped)
    assert "open, which would run code" in refused(capsys, common.load_checkpoint, "backbone.pt")
    assert [path.name for path in here.iterdir()] == ["backbone.pt"]


@pytest.mark.parametrize("script, flags", slow_but(test_eval.SCRIPTS[:1], test_eval.SCRIPTS))
def test_a_file_of_third_parties_is_evaluated_as_a_run(script, flags, places, tmp_path):
    torch.save(under("encoder.", common.load_backbone(places["VIT"])[0]), tmp_path / "model.pth")
    how = "--arch vit_micro --image-size 16 --patch-size 8 --norm patterns --dataset folder --data-dir"
    how = [*how.split(), places["DATA"], *flags.split()]
    expected = evaluate(script, places["VIT"], *flags.split())
    assert evaluate(script, tmp_path / "model.pth", *how, "--prefix", "encoder.") == expected


@pytest.mark.slow
@pytest.mark.parametrize("method, variant", EACH_MODEL)
def test_training_starts_from_init_and_is_resumed(method, variant, _tiny, tmp_path):
    """A tiny learning rate leaves the weights as they are. safetensors can save those in backbone.pt."""
    query, momentum = (make_encoder("resnet_nano", 16) for _ in range(2))
    path, out = tmp_path / "moco.pth", tmp_path / "run"
    torch.save({"state_dict": under("encoder_q.", query) | under("encoder_k.", momentum)}, path)
    flags = [*variant.split(), "--arch", "resnet_nano", "--lr", 1e-9, *["--min-lr", 0] * (method in WITH_MIN_LR)]
    flags += ["--init", path, "--init-prefix", "encoder_q."]
    assert life(method, [*FLAGS, *flags, "--out", out], "step 6")[0] == 130
    saved = load(out / "last.pt")["model"]
    for name, value in query.named_parameters():
        for key in {f"backbone.{name}", f"momentum_backbone.{name}"} & saved.keys():  # SimSiam has no momentum encoder
            torch.testing.assert_close(saved[key], value.detach(), rtol=0, atol=1e-6)
    save_file(load(out / "backbone.pt")["state_dict"], tmp_path / "backbone.safetensors")
    assert "after epoch 1" in run(method, out, *flags) and epochs_of(out) == 2
