"""Two processes compute what one computes: an epoch of every method and variant, in float64. Batch norm in groups."""

import argparse
import copy
import importlib

import pytest
import tiny
import torch
import torch.distributed as dist
from conftest import METHODS, NANO
from global_batch_norm import synchronize
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import common

SMALL = "--image-size 16 --batch-size 16 --epochs 1 --dim 16 --patch-size 8 --knn-every 0 --device cpu".split()
CLIM = "--clim-start 0 --num-clusters 4 --knn-k 8"
CASES = [  # method and flags
    "moco_jointcrop --joint both",
    "moco_jointcrop --moco v3 --hidden 16 --local-crops 2 --local-size 8",
    "jcl",
    "jcl --vanilla --bn-groups 4",
    f"clim {CLIM} --resolutions 16 12 --bn-groups 4",
    f"clim {CLIM} --selection random --mix none",
    f"clim {CLIM} --selection kmeans --local-crops 2 --local-size 8",
    "logo --local-size 8 --bn-groups 4",
    "logo --local-size 8 --variant paper --lam 0.5",
    "logo --local-crops 0 --one-way",
    "logo --local-size 8 --pairs all",
    "logo --local-size 8 --base simsiam --hidden 16 --lam 0.5",
    "patchmix --mix-slices 2 --hidden 16",
    "patchmix --mix-slices 4 --hidden 16 --variant released --image-size 32 --local-crops 2 --local-size 16",
]


def process(world, folder):
    common.ARCHS["nano"] = ("resnet18", dict(NANO, zero_init_last=False))
    torch.set_default_dtype(torch.float64)  # so that a difference is an error and not rounding
    torch.Tensor.float = torch.Tensor.double
    dist.destroy_process_group = lambda: None  # one group for all
    for method in METHODS if world > 1 else ():  # batch norms over all processes: on CPUs each has its own
        importlib.import_module(method).DistributedDataParallel = lambda model, **how: DDP(synchronize(model), **how)
    for number, case in enumerate(CASES):
        method, *flags = case.split()
        module = importlib.import_module(method)
        arch = ["--drop-path", "0"] if method == "patchmix" else ["--arch", "nano"]
        module.main(module.parse_args([*SMALL, *arch, *flags, "--out", f"{folder}/{world}-{number}"]))


def load(out):
    """All that a run has saved, as {path: tensor}, and the means of its epoch."""
    saved = torch.load(out / "last.pt", weights_only=True)
    (epoch,) = saved["records"]
    record = {name: value for name, value in epoch.items() if name not in tiny.TIMING}
    return {k: x for k, x in tiny.flat(saved).items() if torch.is_tensor(x) and "num_batches" not in k}, record


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    for world in (1, 2):
        tiny.succeed(folder / "log", process, [(world, str(folder))] * world, seconds=600)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(folder, case):
    """The loss, gradients (in the optimiser's state), weights, statistics, queue and positives."""
    (one, means), (two, others) = (load(folder / f"{world}-{CASES.index(case)}") for world in (1, 2))
    assert two.keys() == one.keys() and others == pytest.approx(means, rel=1e-7, abs=1e-9)
    assert others["loss"] == pytest.approx(means["loss"], rel=1e-9)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind, shape", [(nn.BatchNorm1d, (8, 3)), (nn.BatchNorm2d, (8, 3, 2, 5))])
def test_batch_norm_in_groups_is_one_for_each_slice(kind, shape):
    """Output, gradient and running statistics, of an input whose slices have other means and variances."""
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64, generator=g) for _ in range(2))
    rows = torch.arange(8).view(-1, *[1] * (len(shape) - 1))
    x = (x * (1 + rows) + rows).requires_grad_()
    norm = nn.Sequential(kind(3)).double()
    nn.init.normal_(norm[0].weight, generator=g)
    slices = [copy.deepcopy(norm) for _ in range(4)]
    ours = importlib.import_module("jcl").split_batch_norms(norm, 4)(x)
    theirs = torch.cat([one(part) for one, part in zip(slices, x.chunk(4), strict=True)])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad((y * weight).sum(), x) for y in (ours, theirs)))
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norm[0], name), sum(getattr(one[0], name) for one in slices) / 4)


@pytest.mark.parametrize("given, world, each", [  # each None: not equal slices of two images or more, as many on each
    (2, 1, 2), (8, 4, 2), (2, 6, 1), (1, 1, 1), (5, 1, None), (24, 1, None), (3, 2, None), (1, 5, None), (1, 16, None)
])  # fmt: skip
def test_slices_of_24_images_are_as_given_and_one_per_process_at_least(given, world, each, monkeypatch, capsys):
    monkeypatch.setattr(common, "rank_and_world", lambda: (0, world))
    args = argparse.Namespace(batch_size=24, bn_groups=given)
    if each is None:
        line = tiny.refused(capsys, common.slices_per_process, args, "bn_groups")
        assert "--batch-size 24" in line and f"--bn-groups {given}" in line and f"{world} process" in line
    else:
        assert common.slices_per_process(args, "bn_groups") == each and args.bn_groups == given
