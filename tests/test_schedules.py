"""The schedules of rate, weight decay and momentum, step by step, against formulas that are written out here."""

import importlib
import math

import pytest
from conftest import METHODS

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


@pytest.mark.parametrize("warmup", [2.5, 0])
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
    assert 0 < args.warmup < 1 and module.schedule(args, 0, 1)[0] == module.peak_rate(args)
    assert module.schedule(args, 0, 100)[0] == 0
