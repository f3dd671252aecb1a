"""The schedules of rate, weight decay and momentum, step by step, by formulas written out here; what they act on."""

import argparse
import copy
import importlib
import math

import pytest
import tiny
import torch
from conftest import METHODS
from torch import nn

import common

_tiny = tiny._tiny

STEPS = 7  # per epoch
FLAGS = "--epochs 10 --lr 0.3 --lr-batch 64 --batch-size 128 --min-lr 0.01".split()
CASES = [
    *((method, "") for method in METHODS),
    ("moco_jointcrop", "--moco v3"),
    ("logo", "--base simsiam"),
    ("moco_jointcrop", "--milestones 0.5 0.8"),
    ("moco_jointcrop", "--moco v1 --milestones"),  # none: the cosine
    ("logo", "--milestones 0.5 0.8"),
]


def between(first, last, done):
    """Half a cosine from the first value to the last."""
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * done))


@pytest.mark.parametrize("warmup", [2.5, 0.2, 0])
@pytest.mark.parametrize("method, flags", CASES)
def test_every_step_of_the_schedule(method, flags, warmup):
    """Linear warm-up to twice --lr, as the batch is twice --lr-batch; then a cosine, or milestones."""
    module = importlib.import_module(method)
    args = module.parse_args([*FLAGS, "--warmup", str(warmup), *flags.split()])
    for step in range(10 * STEPS + 1):
        epoch = step / STEPS
        if epoch < warmup:
            rate = 0.6 * epoch / warmup
        elif "milestones 0" in flags:
            rate = 0.6 * (1 if epoch < 5 else 0.1 if epoch < 8 else 0.01)
        else:
            rate = between(0.6, 0.01, (epoch - warmup) / (10 - warmup))
        found = module.schedule(args, step, STEPS)
        values = [getattr(args, name) for name in ("weight_decay", "momentum") if hasattr(args, name)]
        values = [between(*x, epoch / 10) if isinstance(x, tuple) else x for x in values]
        if "simsiam" in flags:  # it has no momentum encoder
            values = [args.weight_decay, 0.0]
        assert found == pytest.approx((rate, *values), rel=1e-12), f"step {step}"


@pytest.mark.parametrize("method", METHODS)
def test_a_warm_up_of_less_than_a_step_is_none(method):
    """A run of one step would have no rate otherwise."""
    module = importlib.import_module(method)
    args = module.parse_args(["--epochs", "1"])
    assert 0 < args.warmup < 1 and module.schedule(args, 0, 1)[0] == common.peak_rate(args)
    assert module.schedule(args, 0, 100)[0] == 0


def test_lars_adapts_without_weight_decay_too():
    module, model, moved = importlib.import_module("moco_jointcrop"), nn.Linear(4, 3), []
    for decay in ("0", "1e-30"):
        copied = copy.deepcopy(model)
        optimizer = module.make_optimizer(module.parse_args(["--moco", "v3", "--weight-decay", decay]), copied)
        copied(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        moved.append(copied.weight.detach() - model.weight.detach())
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize("method, flags", [("moco_jointcrop", "--moco v3"), ("patchmix", "--weight-decay 0 0.4")])
def test_both_groups_have_what_the_schedule_says(method, flags, _tiny, tmp_path):
    """Weight decay that begins at 0, too; biases and norms have none."""
    tiny.run(method, tmp_path, *flags.split(), "--max-steps", 3)
    saved, module = tiny.load(tmp_path / "last.pt"), importlib.import_module(method)
    rate, decay, _ = module.schedule(argparse.Namespace(**saved["config"]), 2, tiny.STEPS)
    groups = [(group["lr"], group["weight_decay"]) for group in saved["optimizer"]["param_groups"]]
    assert groups == [(rate, 0.0), (rate, decay)] and decay > 0
