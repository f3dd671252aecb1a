"""Checkpoints of others: each usual form, with its real names, is evaluated, and trained from (--init)."""

import argparse
import datetime
from pathlib import Path

import numpy as np
import pytest
import test_eval
import timm
import torch
import torchvision
from conftest import EACH_MODEL
from safetensors.torch import save_file
from tiny import FLAGS, epochs_of, life, load, refused, run

import common
import eval_knn

places = test_eval.places
VIT = dict(arch="vit_micro", image_size=32, patch_size=8)
RESNET = dict(arch="resnet_mini", image_size=96)

FORMS = {  # how timm builds it; of the query and of the momentum encoder the entry and what stands before its names
    "MoCo v2": (RESNET, "state_dict", "module.encoder_q.", "state_dict", "module.encoder_k."),
    "PatchMix": (VIT, "model", "base_encoder.", "model", "momentum_encoder."),
    "DINO": (VIT, "teacher", "backbone.", "student", "module.backbone."),
}
# What stands beside them; plain data is allowed where torch.load would refuse it.
HEADS = ("fc.0.weight", "fc.weight", "head.weight", "head.0.bias", "head.mlp.0.weight")
HEADS += ("mask_token", "decoder_pos_embed", "decoder_embed.weight", "decoder_blocks.0.norm1.weight")  # MAE's
PLAIN = argparse.Namespace(lr=np.float64(1), at=datetime.datetime(2026, 1, 2), out=Path("x"), scores=np.ones(2))
OPTIMIZER = {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.03}]}


def under(prefix, encoder):
    """An encoder's state_dict, and a classifier or projector, with a prefix before their names."""
    weights = encoder.state_dict() | {name: torch.ones(2) for name in HEADS}
    return {prefix + name: value for name, value in weights.items()}


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
    """One of its encoders has to be chosen."""
    how, *where = FORMS[form]
    file = {"epoch": 3, "args": PLAIN, "best": np.float32(3), "optimizer": OPTIMIZER}
    file |= {entry: {"module.queue": torch.ones(2, 8)} for entry in where[::2]}
    encoders = {}
    for entry, prefix in zip(where[::2], where[1::2], strict=True):
        encoders[f"{entry}.{prefix}"] = encoder = make_encoder(**how)
        file[entry] |= under(prefix, encoder)
    torch.save(file, tmp_path / "model.pth.tar")
    line = refused(capsys, common.load_published, tmp_path / "model.pth.tar", **how)
    assert "--prefix" in line and all(repr(prefix) in line for prefix in encoders)
    for prefix, encoder in encoders.items():
        read, info = common.load_published(tmp_path / "model.pth.tar", **how, prefix=prefix)
        assert same(read, encoder, how["image_size"]) and not read.training
        assert (info["method"], info["encoder"]) == ("model.pth.tar", prefix.rstrip("."))
        assert info["mean"] == common.NORMS["imagenet"][0] and info["image_size"] == how["image_size"]


def test_the_only_encoder_needs_no_prefix(tmp_path):
    """In a file of torch's old form, from before batch norms counted batches, with numpy's arrays in a list."""
    encoder, path = make_encoder(**RESNET), tmp_path / "file.pth"
    file = {"nets": [1, {name: x.numpy() for name, x in under("", encoder).items() if "num_batches" not in name}]}
    torch.save(file, path, _use_new_zipfile_serialization=False)
    read, info = common.load_published(path, **RESNET)
    assert same(read, encoder, 96) and info["encoder"] == "nets.1"


@pytest.mark.parametrize("kernel, size", [(7, 64), (3, 32)])
def test_a_resnet_of_others_has_the_stem_of_its_conv1(kernel, size, tmp_path):
    """Timm's, also for small images; 3 x 3 only if it is so in the file."""
    encoder = make_encoder("resnet18", 96 if kernel == 7 else 32)
    torch.save({"state_dict": under("module.encoder_q.", encoder)}, tmp_path / "file.pth")
    read, info = common.load_published(tmp_path / "file.pth", "resnet18", size)
    assert same(read, encoder, size) and read.conv1.kernel_size == (kernel, kernel)
    assert info["stem"] == ("timm" if kernel == 7 else "3x3")


# The DINO's have further tokens, and no embedding of positions or one without the class token.
PUBLIC = "resnet18 convnextv2_atto vit_tiny_patch16_224 vit_small_patch14_reg4_dinov2 vit_small_patch16_dinov3".split()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_encoders_are_read_by_timms_name(name, tmp_path, monkeypatch):
    """With their classifier and, after a point, what names the weights; torchvision's own ResNet."""
    size, patch_size = (56, 14) if "patch14" in name else (96, 16)
    less = dict(depth=2) if common.is_vit(name) else {}  # of its 12 blocks, to save time
    monkeypatch.setitem(common.ARCHS, name, (name, less))
    more = less | (dict(img_size=size, dynamic_img_size=True) if less else {})
    theirs = torchvision.models.resnet18() if name == "resnet18" else timm.create_model(name, num_classes=5, **more)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    if name == "resnet18":
        theirs.fc = torch.nn.Identity()
    else:
        theirs.reset_classifier(0)
    known = timm.get_pretrained_cfg(name)  # of the weights that are timm's default
    how = dict(arch=f"{name}.{known.tag}", image_size=size, patch_size=patch_size)
    read, info = common.load_published(tmp_path / "model.safetensors", **how)
    assert same(read, theirs.eval(), size)
    assert [info[key] for key in ("mean", "std", "interpolation")] == [known.mean, known.std, known.interpolation]
    info = common.load_published(tmp_path / "model.safetensors", **how, norm="cifar10")[1]
    assert (info["mean"], info["std"]) == common.NORMS["cifar10"]


def test_position_embeddings_of_another_grid_are_resampled_as_timm_does(tmp_path):
    theirs = make_encoder(**VIT)
    torch.save({"model": theirs.state_dict()}, tmp_path / "vit.pth")
    encoder, info = common.load_published(tmp_path / "vit.pth", **VIT | {"image_size": 48})
    timms = common.build_backbone(info).eval()
    timms.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(theirs.state_dict(), timms))
    assert same(encoder, timms, 48)


UNFIT = {  # what is saved of a ResNet's state_dict; how it is read; words of the line
    "another stem": (lambda state: state | {"conv1.weight": torch.ones(16, 3, 7, 7)}, {}, "conv1.weight"),
    "whole numbers": (lambda state: state | {"bn1.weight": torch.ones(64, dtype=torch.int8)}, {}, "bn1.weight"),
    "not finite": (lambda state: state | {"bn1.weight": torch.full((64,), torch.nan)}, {}, "not finite"),
    "parts lack": (lambda state: {"conv1.weight": state["conv1.weight"]}, {}, "bn1.weight"),
    "another prefix": (dict, dict(prefix="encoder_k."), "--prefix"),
    "no known head": (lambda state: state | {"attn_pool.latent": torch.ones(3)}, {}, "attn_pool.latent"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_does_not_fit_is_refused(what, tmp_path, capsys):
    make, how, words = UNFIT[what]
    torch.save(make(make_encoder(**RESNET).state_dict()), tmp_path / "file.pth")
    assert words in refused(capsys, common.load_published, tmp_path / "file.pth", **RESNET | how)
    assert "give --arch NAME" in refused(capsys, common.load_backbone, tmp_path / "file.pth")


def test_a_file_of_others_is_evaluated_as_a_run(places, tmp_path, capsys):
    """A run's own folder is refused as such a file, or its normalisation would be lost in silence."""
    torch.save(under("encoder.", common.load_backbone(places["VIT"])[0]), tmp_path / "others.pth")
    how = "--arch vit_micro --image-size 16 --patch-size 8 --norm patterns --dataset folder --data-dir".split()
    how.append(places["DATA"])
    expected = test_eval.run(eval_knn, places["VIT"], "--k", 3)
    assert test_eval.run(eval_knn, tmp_path / "others.pth", "--k", 3, *how) == expected
    assert "leave out --arch" in refused(capsys, test_eval.run, eval_knn, places["VIT"], *how)


@pytest.mark.slow
@pytest.mark.parametrize("method, variant", EACH_MODEL)
def test_training_starts_from_init_and_goes_on_without_the_file(method, variant, _tiny, tmp_path):
    """Here with a learning rate that leaves the weights as they are. safetensors takes those of its backbone.pt."""
    query, momentum = (make_encoder("resnet_nano", 16) for _ in range(2))
    path, out = tmp_path / "moco.pth", tmp_path / "run"
    torch.save({"state_dict": under("encoder_q.", query) | under("encoder_k.", momentum)}, path)
    flags = [*f"--arch resnet_nano --lr 1e-9 --weight-decay 0{' 0' * (method == 'patchmix')}".split(), *variant.split()]
    flags += ["--min-lr", 0, "--init", path, "--init-prefix", "state_dict.encoder_q."]
    life(method, [*FLAGS, *flags, "--out", out], "step 6")
    saved = load(out / "last.pt")["model"]
    for name, value in query.named_parameters():
        for prefix in ("backbone.", "momentum_backbone.")[: 1 if "simsiam" in variant else 2]:
            torch.testing.assert_close(saved[prefix + name], value.detach(), rtol=0, atol=1e-6)
    save_file(load(out / "backbone.pt")["state_dict"], tmp_path / "backbone.safetensors")
    path.unlink()
    assert "after epoch 1" in run(method, out, *flags) and epochs_of(out) == 2
