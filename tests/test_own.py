"""A user's own images and encoder through main(args, train=..., test=..., encoder=...)."""

import importlib

import numpy as np
import pytest
import tiny
import torch
from conftest import JCL_AT_ONCE, METHODS
from PIL import Image
from tiny import load, records, run
from torch import nn

import common

_tiny = tiny._tiny
pytestmark = pytest.mark.usefixtures("_tiny")


def own_images(count):
    """Random images of three classes, of more pixels than a view has."""
    array = np.random.default_rng(count).integers(0, 256, (count, 20, 20, 3), np.uint8)
    return common.ImageSet(array, np.arange(count) % 3)


class Encoder(nn.Module):
    """One parameter is frozen, one is not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.net[1].bias.requires_grad_(False)
        self.net[1].eval()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.net(x)


KINDS = {
    "plain": Encoder,
    "compiled": lambda: torch.compile(Encoder(), backend="eager"),
    "TorchScript": lambda: torch.jit.script(Encoder()),
}
CASES = [*((method, "plain") for method in METHODS), ("jcl", "compiled"), ("logo", "TorchScript")]


def state(module):
    """All that a training could change in a module."""
    modes = [part.training for part in module.modules()]
    gradients = [p.grad is None for p in module.parameters()], [p.requires_grad for p in module.parameters()]
    return {name: value.clone() for name, value in module.state_dict().items()}, modes, gradients, type(module)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("method, kind", CASES)
def test_own_encoder(method, kind, group_of_one, tmp_path, monkeypatch):
    """A copy of it is trained, here in a process group of one. Images without labels are not judged."""
    monkeypatch.chdir(tmp_path)
    module, given, images = importlib.import_module(method), KINDS[kind](), common.ImageSet(own_images(68).array)
    before = state(given)
    module.main(module.parse_args([*tiny.FLAGS, "--epochs", "1"]), train=images, encoder=given)
    assert tiny.unequal(before, state(given)) == []
    (out,) = (tmp_path / "runs").iterdir()
    assert out.name.startswith(f"{method}-custom-custom-s0") and not any("knn20_top1" in r for r in records(out))
    saved, encoder = load(out / "backbone.pt"), KINDS[kind]()
    encoder.load_state_dict(saved["state_dict"])
    changed = tiny.unequal(dict(before[0]), dict(encoder.state_dict()))
    weight, bias = (next(name for name in before[0] if name.endswith(end)) for end in ("0.weight", "1.bias"))
    assert saved["stem"] == "custom" and f"/{weight}" in changed and f"/{bias}" not in changed


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_own_images(method, tmp_path, capsys):
    """An array and files give the same run, which goes on after a stop. Each epoch is judged. Others are refused."""
    train, test = own_images(68), own_images(24)
    run(method, tmp_path / "a", train=train, test=test)
    paths = [tmp_path / f"{i:02}.png" for i in range(68)]
    for image, path in zip(train.array, paths, strict=True):
        Image.fromarray(image).save(path)
    for stop in ("3", "8"):
        run(method, tmp_path / "b", "--max-steps", stop, train=common.ImageSet(paths, train.labels), test=test)
    ends = [load(tmp_path / name / "last.pt") for name in "ab"]
    assert tiny.unequal(ends[0]["model"], ends[1]["model"]) == []
    scores = [[record["knn20_top1"] for record in records(tmp_path / name)] for name in "ab"]
    assert scores[0] == scores[1] and len(scores[0]) == 2
    other = common.ImageSet(train.array, 2 - train.labels)
    tiny.refused(capsys, run, method, tmp_path / "a", train=other, test=test)
