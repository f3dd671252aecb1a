"""A user's own data and encoder through main(args, train=..., test=..., encoder=...)."""

import importlib

import numpy as np
import pytest
import timm
import tiny
import torch
import torch.distributed as dist
from conftest import METHODS
from PIL import Image
from tiny import assert_same_run, load, records, run
from torch import nn

import common

_tiny = tiny._tiny
pytestmark = pytest.mark.usefixtures("_tiny")


class Own(torch.utils.data.Dataset):
    """Items (image, label), three kinds."""

    def __init__(self, count):
        self.images = np.random.default_rng(count).integers(0, 256, (count, 20, 20, 3), np.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return Image.fromarray(self.images[i]), i % 3


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.net[1].bias.requires_grad_(False)  # a user may freeze what is to stay
        self.net[1].eval()

    def forward(self, x):
        return self.net(x)


class WithLength(Encoder):
    """False where a truth value is asked for."""

    def __len__(self):
        return 0


KINDS = {
    "plain": Encoder,
    "compiled": lambda: torch.compile(Encoder(), backend="eager"),
    "length 0": WithLength,
    "TorchScript": lambda: torch.jit.script(Encoder()),
}


def state(module):
    """All that a training could change in a module."""
    modes = [part.training for part in module.modules()]
    gradients = [p.grad is None for p in module.parameters()], [p.requires_grad for p in module.parameters()]
    return {name: value.clone() for name, value in module.state_dict().items()}, modes, gradients, type(module)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_own_encoder(method, kind, tmp_path, monkeypatch):
    """A copy of it is trained. Without test images nothing is judged. The run's name says own."""
    monkeypatch.chdir(tmp_path)
    module, given = importlib.import_module(method), KINDS[kind]()
    before = state(given)
    module.main(module.parse_args([*tiny.FLAGS, "--epochs", "1"]), train=Own(68), encoder=given)
    assert tiny.unequal(before, state(given)) == []
    (out,) = (tmp_path / "runs").iterdir()
    assert out.name.startswith(f"{method}-own-own-s0") and not any("knn20_top1" in r for r in records(out))
    saved, encoder = load(out / "backbone.pt"), KINDS[kind]()
    encoder.load_state_dict(saved["state_dict"])
    changed = tiny.unequal(dict(before[0]), dict(encoder.state_dict()))
    weight, bias = (next(name for name in before[0] if name.endswith(end)) for end in ("0.weight", "1.bias"))
    assert saved["stem"] == "own" and f"/{weight}" in changed and f"/{bias}" not in changed


@pytest.mark.parametrize("method", METHODS)
def test_own_data(method, tmp_path, capsys):
    """Each epoch is judged by them. A run that was stopped goes on. Another number of images is refused."""
    own = dict(train=Own(68), test=Own(24), encoder=Encoder())
    run(method, tmp_path / "a", **own)
    assert all(0 <= r["knn20_top1"] <= 100 for r in records(tmp_path / "a"))
    for stop in ("3", "8"):
        run(method, tmp_path / "b", "--max-steps", stop, **own)
    assert_same_run(tmp_path / "a", tmp_path / "b", interrupted=(1,))
    other = own | dict(train=Own(70))
    line = tiny.refused(capsys, run, method, tmp_path / "a", **other)
    assert "other images" in line and "number was 68, is 70" in line


@pytest.mark.parametrize("method", ["jcl", "logo"])
def test_an_own_encoder_may_leave_parameters_unused(method, tmp_path, monkeypatch):
    """Under DDP, here of one process, too."""
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(common, "rendezvous", lambda _: iter([(dist.HashStore(), 0, 1)]))
    encoder = Encoder()
    encoder.unused = nn.Parameter(torch.ones(3))
    run(method, tmp_path, "--max-steps", "3", train=Own(68), encoder=encoder)
    assert load(tmp_path / "last.pt")["step"] == 3


MISTAKES = [  # a user's encoder, flags, words
    (lambda: Encoder().net[:-1], "", "(1, 8, 1, 1)"),  # as a ResNet without its last layer does
    (Encoder, "--grad-checkpoint", "--grad-checkpoint"),
]


@pytest.mark.parametrize("make, flags, words", MISTAKES)
@pytest.mark.parametrize("method", METHODS)
def test_an_own_encoder_that_does_not_fit_is_one_line(method, make, flags, words, tmp_path, capsys):
    out = tmp_path / "run"
    assert words in tiny.refused(capsys, run, method, out, *flags.split(), train=Own(68), encoder=make())
    assert not out.exists()


@pytest.mark.parametrize("method", sorted({*METHODS} - {"jcl"}))
def test_an_own_encoder_of_one_size_has_no_local_crops_of_another(method, tmp_path, capsys):
    vit = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=2)
    flags = "--local-crops 2 --local-size 8".split() + (["--patch-size", "4"] if method == "patchmix" else [])
    line = tiny.refused(capsys, run, method, tmp_path / "run", *flags, train=Own(68), encoder=vit)
    assert "does not map images (1, 3, 8, 8)" in line and not (tmp_path / "run").exists()
