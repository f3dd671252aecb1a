"""The schedules, by formulas written out here; what they act on, step by step; EMA and queue after the update."""

import copy
import importlib
import math

import numpy as np
import pytest
import tiny
import torch
from conftest import METHODS, state_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import common

_tiny = tiny._tiny

FLAGS = "--epochs 10 --lr 0.3 --lr-batch 64 --batch-size 128 --min-lr 0.01".split()
FORMS = [(method, "--selection none" if method == "clim" else "") for method in METHODS]
FORMS += [("moco_jointcrop", "--moco v3"), ("logo", "--base simsiam")]
CASES = [
    *FORMS,
    ("moco_jointcrop", "--milestones 0.5 0.8"),
    ("moco_jointcrop", "--moco v1 --milestones"),  # none: the cosine
    ("logo", "--milestones 0.5 0.8"),
]


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


@pytest.mark.parametrize("method", METHODS)
def test_a_last_learning_rate_above_the_peak_is_an_error(method, capsys):
    parse = importlib.import_module(method).parse_args
    assert parse("--lr 0.3 --min-lr 0.3".split()).min_lr == 0.3
    error = tiny.refused(capsys, parse, "--lr 0.3 --min-lr 0.31".split())
    assert "--min-lr" in error and "--lr " in error


@pytest.mark.parametrize("method, flags", FORMS)
def test_what_each_step_is_given(method, flags, _tiny, tmp_path, monkeypatch, request):
    """Learning rate, weight decay and the EMA's momentum of all steps of a run: the step's own, not a neighbor's.

    LoGo's affinity has the peak of the learning rate throughout.
    """
    module, given, momenta = importlib.import_module(method), {}, []
    words = f"{flags} --lr 0.3 --min-lr 0.01 --warmup 0.4 --knn-every 0".split()
    words += "--weight-decay 0.02 0.2".split() if method == "patchmix" else "--weight-decay 0.02".split()
    for model in {getattr(module, name) for name in ("JCL", "CLIM", "MoCo", "PatchMix") if hasattr(module, name)}:
        move = model.update
        monkeypatch.setattr(model, "update", lambda self, m, move=move: (momenta.append(m), move(self, m)))

    def note(optimizer, *_):
        values = [group[name] for group in optimizer.param_groups for name in ("lr", "weight_decay")]
        given.setdefault(optimizer, []).append(values)

    request.addfinalizer(register_optimizer_step_pre_hook(note).remove)
    tiny.run(method, tmp_path, *words)
    args, steps = module.parse_args([*tiny.FLAGS, *words]), [i / (2 * tiny.STEPS) for i in range(2 * tiny.STEPS)]
    lr = [module.learning_rate(args, 2 * done) for done in steps]
    decay = [between(0.02, 0.2, done) if method == "patchmix" else 0.02 for done in steps]
    expected, none = [[lr, decay]], [0.0] * len(steps)
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


@pytest.mark.parametrize("method, flags", [("moco_jointcrop", "--moco v3"), ("patchmix", "")])
def test_biases_and_norms_have_no_weight_decay(method, flags, _tiny):
    """All that has one dimension; what has more decays."""
    state = state_of(importlib.import_module(method), f"--batch-size 16 {flags}")
    names = {p: name for name, p in state["model"].named_parameters()}
    for group, decays in zip(state["optimizer"].param_groups, (False, True), strict=True):
        found = [(names[p], p.dim()) for p in group["params"]]
        assert found and all((dims > 1) == decays for _, dims in found), found


def test_lars_adapts_without_weight_decay_too():
    module, model, moved = importlib.import_module("moco_jointcrop"), nn.Linear(4, 3), []
    for decay in ("0", "1e-30"):
        copied = copy.deepcopy(model)
        optimizer = module.make_optimizer(module.parse_args(["--moco", "v3", "--weight-decay", decay]), copied)
        copied(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        moved.append(copied.weight.detach() - model.weight.detach())
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize("method, flags", [form for form in FORMS if "simsiam" not in form[1]])
def test_the_ema_comes_after_the_optimizers_step(method, flags, _tiny, tmp_path):
    """After one step theta_k is m times what both encoders were, plus 1 - m times the new query encoder."""
    module, images = importlib.import_module(method), common.ImageSet(common.make_patterns(16, 16, 0)[0][:16])
    words = f"{flags} --epochs 1 --knn-every 0 --warmup 0 --momentum 0.7"
    words += " 0.7" if method in ("moco_jointcrop", "patchmix") else ""  # its first and last value
    before = state_of(module, f"{' '.join(tiny.FLAGS)} {words}", train=images)["model"]
    tiny.run(method, tmp_path, *words.split(), train=images)
    after = tiny.load(tmp_path / "last.pt")["model"]
    slow = {name: p for name, p in before.named_parameters() if name.startswith("momentum_")}
    for name, p in slow.items():
        torch.testing.assert_close(after[name], 0.7 * p + 0.3 * after[name.removeprefix("momentum_")])
    assert sum(not torch.equal(after[name], p) for name, p in slow.items()) > len(slow) / 2
