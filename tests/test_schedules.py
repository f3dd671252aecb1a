"""The schedules, by formulas written out here, and what each step of a run is given of them."""

import math

import numpy as np
import pytest
import tiny
import torch
from conftest import EACH_MODEL, table
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import common
import moco_jointcrop

FLAGS = "--epochs 10 --lr 0.3 --lr-batch 64 --batch-size 128 --min-lr 0.01".split()
CASES = [*EACH_MODEL, ("moco_jointcrop", "--milestones 0.5 0.8"), ("logo", "--milestones 0.5 0.8")]
CASES += [("moco_jointcrop", "--moco v1 --milestones")]  # without any: the cosine


def between(first, last, done):
    """Half a cosine from the first value to the last."""
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * done))


@pytest.mark.parametrize("warmup", [5, 2.5, 0.2, 0])
@pytest.mark.parametrize("method, flags", CASES)
def test_learning_rate(module, flags, warmup):
    """Linear warm-up from 0, of a quarter of the run at most; then a cosine, or milestones. All are scaled by two."""
    args = module.parse_args([*FLAGS, "--warmup", str(warmup), *flags.split()])
    assert args.warmup == warmup  # as given: the schedule alone shortens it
    warmup = min(warmup, 2.5)
    for epoch in (step / 7 for step in range(71)):
        if epoch < warmup:
            expected = 0.6 * epoch / warmup
        elif "milestones 0" in flags:
            expected = 0.6 * (1 if epoch < 5 else 0.1 if epoch < 8 else 0.01)
        else:
            expected = between(0.6, 0.02, (epoch - warmup) / (10 - warmup))
        assert module.learning_rate(args, epoch) == pytest.approx(expected, rel=1e-12), f"epoch {epoch}"


@pytest.mark.parametrize("method, flags", EACH_MODEL)
def test_what_each_step_is_given(method, module, flags, _tiny, tmp_path, monkeypatch, request):
    """Learning rate, weight decay and the EMA's momentum, each step's own. No random numbers are drawn twice."""
    given, momenta, keys, generator = {}, [], [], common.generator
    decays = [0.02, 0.2] if isinstance(table(method)["weight_decay"][0], tuple) else [0.02]  # first and last
    words = f"{flags} --lr 0.3 --min-lr 0.01 --warmup 0.4 --knn-every 0 --weight-decay".split() + [*map(str, decays)]
    monkeypatch.setattr(common, "generator", lambda *key: keys.append(key) or generator(*key))
    for model in [kind for kind in vars(module).values() if isinstance(kind, type) and "update" in vars(kind)]:
        move = model.update
        monkeypatch.setattr(model, "update", lambda self, m, move=move: (momenta.append(m), move(self, m)))

    def note(optimizer, *_):
        values = [group[name] for group in optimizer.param_groups for name in ("lr", "weight_decay")]
        given.setdefault(optimizer, []).append(values)

    request.addfinalizer(register_optimizer_step_pre_hook(note).remove)
    tiny.run(method, tmp_path, *words)
    args, steps = module.parse_args([*tiny.FLAGS, *words]), [i / (2 * tiny.STEPS) for i in range(2 * tiny.STEPS)]
    lr, none = [module.learning_rate(args, 2 * done) for done in steps], [0.0] * len(steps)
    decay = [between(decays[0], decays[-1], done) for done in steps]
    groups = len([*given.values()][-1][0]) // 2
    expected = [[lr, none] * (groups - 1) + [lr, decay]]  # of two groups the first has no decay
    if hasattr(module, "Affinity"):  # it moves first, by the peak, and then the encoder by its second optimizer
        affinity = [args.lr * args.batch_size / args.lr_batch] * len(steps)
        expected = [[affinity, decay], *([[lr, none]] if args.l2l_weighting == "clip" else []), *expected]
    for ours, theirs in zip(given.values(), expected, strict=True):
        np.testing.assert_allclose(np.transpose(ours), theirs, rtol=1e-12)
    if args.momentum is None:  # no momentum encoder
        assert momenta == []
    else:
        first, last = args.momentum if isinstance(args.momentum, tuple) else [args.momentum] * 2
        assert momenta == pytest.approx([between(first, last, done) for done in steps], rel=1e-12)
    assert len(keys) == len(set(keys)) >= len(steps)


def test_lars_adapts_without_weight_decay_too():
    moved = []
    for decay in ("0", "1e-30"):
        weight, args = nn.Parameter(torch.ones(3, 4)), ["--moco", "v3", "--weight-decay", decay]
        weight.grad = torch.arange(12.0).view(3, 4)
        moco_jointcrop.make_optimizer(moco_jointcrop.parse_args(args), nn.ParameterList([weight])).step()
        moved.append(weight.detach() - 1)
    torch.testing.assert_close(*moved)
