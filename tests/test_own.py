"""A user's own images and encoder through main(args, train=..., test=..., encoder=...)."""

import os

import numpy as np
import pytest
import torch
from conftest import JCL_AT_ONCE, METHODS, slow_but
from PIL import Image
from tiny import assert_same_run, load, records, refused, run, succeed, unequal
from torch import nn

import common

pytestmark = pytest.mark.usefixtures("_tiny")


def own_images(count):
    array = np.random.default_rng(count).integers(0, 256, (count, 20, 20, 3), np.uint8)
    return common.ImageSet(array, np.arange(count) % 3)


class Encoder(nn.Module):
    """One parameter is frozen, one is not used."""

    def __init__(self, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.net[1].running_mean.normal_()
        self.net[1].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.net(x)


KINDS = {"evaluation mode": lambda: Encoder().eval(), "compiled": lambda: torch.compile(Encoder(), backend="eager")}
CASES = [("jcl", "compiled"), *((method, "evaluation mode") for method in METHODS)]


def state(module):
    """All that a training could change in a module."""
    modes = [part.training for part in module.modules()]
    gradients = [p.grad is None for p in module.parameters()], [p.requires_grad for p in module.parameters()]
    return {name: value.clone() for name, value in module.state_dict().items()}, modes, gradients, type(module)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("method, kind", slow_but([("jcl", kind) for kind in KINDS], CASES))
def test_own_encoder(method, kind, group_of_one, tmp_path):
    """A copy of it is trained, in training mode, here in a process group of one. Without labels there is no kNN."""
    given, images = KINDS[kind](), common.ImageSet(own_images(68).array)
    before = state(given)
    run(method, tmp_path, "--epochs", 1, train=images, encoder=given)
    assert unequal(before, state(given)) == [] and not any("knn20_top1" in r for r in records(tmp_path))
    saved, encoder = load(tmp_path / "backbone.pt"), KINDS[kind]()
    encoder.load_state_dict(saved["state_dict"])
    changed = {name.rpartition("net.")[2] for name in unequal(dict(before[0]), dict(encoder.state_dict()))}
    assert saved["stem"] == "custom"
    assert {"0.weight", "1.weight", "1.running_mean"} <= changed and "1.bias" not in changed


def train_own(out, same):
    """Train each method's encoder, which the processes are given in different states unless `same`."""
    for method in METHODS:
        encoder = Encoder(0 if same else int(os.environ["RANK"]))
        run(method, out / method, "--epochs", 1, train=own_images(68), encoder=encoder)


@pytest.mark.slow
def test_the_first_processs_encoder_is_that_of_all(tmp_path):
    for name, same in (("same", True), ("other", False)):
        succeed(tmp_path / "log", train_own, [(tmp_path / name, same)] * 2)
    for method in METHODS:
        assert_same_run(tmp_path / "same" / method, tmp_path / "other" / method)


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_own_images(method, tmp_path, capsys):
    """An array and files give the same run, with kNN. It does not go on with others."""
    train, test = own_images(68), own_images(24)
    paths = [tmp_path / f"{i:02}.png" for i in range(68)]
    for image, path in zip(train.array, paths, strict=True):
        Image.fromarray(image).save(path)
    for name, images in (("array", train), ("files", common.ImageSet(paths, train.labels))):
        run(method, tmp_path / name, train=images, test=test)
    assert_same_run(tmp_path / "array", tmp_path / "files")
    assert all("knn20_top1" in record for record in records(tmp_path / "array"))
    other = common.ImageSet(train.array, 2 - train.labels)
    assert "images was" in refused(capsys, run, method, tmp_path / "array", train=other, test=test)
