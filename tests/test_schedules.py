"""The schedules, by formulas written out here, and what each step of a run is given of them."""

import copy
import importlib
import math

import numpy as np
import pytest
import tiny
import torch
from conftest import METHODS
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import common

_tiny = tiny._tiny

FLAGS = "--epochs 10 --lr 0.3 --lr-batch 64 --batch-size 128 --min-lr 0.01".split()
CASES = [*((method, "") for method in METHODS), ("moco_jointcrop", "--milestones 0.5 0.8")]
CASES += [("moco_jointcrop", "--moco v1 --milestones"), ("logo", "--milestones 0.5 0.8")]  # v1 without any: the cosine


def between(first, last, done):
    """Half a cosine from the first value to the last."""
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * done))


@pytest.mark.parametrize("warmup", [5, 2.5, 0.2, 0])
@pytest.mark.parametrize("method, flags", CASES)
def test_learning_rate(method, flags, warmup):
    """Linear warm-up from 0, of a quarter of the run at most; then a cosine, or milestones.

    The batch is twice --lr-batch, so the peak is twice --lr, and the last learning rate twice --min-lr.
    """
    module = importlib.import_module(method)
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


FORMS = [*CASES[:5], ("moco_jointcrop", "--moco v3"), ("logo", "--base simsiam")]


@pytest.mark.parametrize("method, flags", FORMS)
def test_what_each_step_is_given(method, flags, _tiny, tmp_path, monkeypatch, request):
    """Learning rate, weight decay and the EMA's momentum of all steps of a run: the step's own, not a neighbor's.

    LoGo's affinity has the peak of the learning rate throughout. No random numbers are drawn twice.
    """
    module, given, momenta, keys, generator = importlib.import_module(method), {}, [], [], common.generator
    words = f"{flags} --lr 0.3 --min-lr 0.01 --warmup 0.4 --knn-every 0 --weight-decay 0.02".split()
    words += ["0.2"] if method == "patchmix" else ["--selection", "none"] if method == "clim" else []
    monkeypatch.setattr(common, "generator", lambda *key: keys.append(key) or generator(*key))
    for model in {getattr(module, name) for name in ("JCL", "CLIM", "MoCo", "PatchMix") if hasattr(module, name)}:
        move = model.update
        monkeypatch.setattr(model, "update", lambda self, m, move=move: (momenta.append(m), move(self, m)))

    def note(optimizer, *_):
        values = [group[name] for group in optimizer.param_groups for name in ("lr", "weight_decay")]
        given.setdefault(optimizer, []).append(values)

    request.addfinalizer(register_optimizer_step_pre_hook(note).remove)
    tiny.run(method, tmp_path, *words)
    args, steps = module.parse_args([*tiny.FLAGS, *words]), [i / (2 * tiny.STEPS) for i in range(2 * tiny.STEPS)]
    lr, none = [module.learning_rate(args, 2 * done) for done in steps], [0.0] * len(steps)
    decay = [between(0.02, 0.2, done) if method == "patchmix" else 0.02 for done in steps]
    expected = [[lr, decay]]
    if "v3" in flags or method == "patchmix":  # biases and batch norms first
        expected = [[lr, none, lr, decay]]
    if method == "logo":  # the affinity first, and the second optimizer of the encoder
        affinity = [args.lr * args.batch_size / args.lr_batch] * len(steps)
        expected = [[affinity, decay], *([] if "simsiam" in flags else [[lr, none]]), [lr, decay]]
    for ours, theirs in zip(given.values(), expected, strict=True):
        np.testing.assert_allclose(np.transpose(ours), theirs, rtol=1e-12)
    if "simsiam" in flags:  # it has no momentum encoder
        assert momenta == []
    else:
        first, last = args.momentum if isinstance(args.momentum, tuple) else [args.momentum] * 2
        assert momenta == pytest.approx([between(first, last, done) for done in steps], rel=1e-12)
    assert len(keys) == len(set(keys)) >= len(steps)


def test_lars_adapts_without_weight_decay_too():
    module, model, moved = importlib.import_module("moco_jointcrop"), nn.Linear(4, 3), []
    for decay in ("0", "1e-30"):
        copied = copy.deepcopy(model)
        optimizer = module.make_optimizer(module.parse_args(["--moco", "v3", "--weight-decay", decay]), copied)
        copied(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        moved.append(copied.weight.detach() - model.weight.detach())
    torch.testing.assert_close(*moved)
