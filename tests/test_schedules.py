"""Tests the schedules against formulas that are written out here, and what each step of a run gets from them."""

import numpy as np
import pytest
import tiny
from conftest import EACH_MODEL, WITH_MIN_LR, slow_but
from torch.optim.optimizer import register_optimizer_step_pre_hook

CASES = [*EACH_MODEL, ("moco_jointcrop", "--milestones 0.5 0.8"), ("logo", "--milestones 0.5 0.8")]
CASES += [("moco_jointcrop", "--moco v1 --milestones")]  # no milestones: a cosine


def between(first, last, done):
    """Return a value on half a cosine from `first` to `last`. done: the fraction of the way."""
    return last + (first - last) * 0.5 * (1 + np.cos(np.pi * done))


@pytest.mark.parametrize("warmup", [5, 2.5, 0.2, 0])
@pytest.mark.parametrize("method, flags", CASES)
def test_learning_rate(method, module, flags, warmup):
    """A linear warmup, of at most a quarter of the run, precedes a cosine or milestones. The batch size is 2 x 256."""
    milestones, last = "milestones 0" in flags, 0.0
    flags = [*flags.split(), *f"--epochs 10 --lr 0.3 --batch-size 512 --warmup {warmup}".split()]
    if method in WITH_MIN_LR and not milestones:
        flags, last = [*flags, "--min-lr", "0.01"], 0.02
    args = module.parse_args(flags)
    warmup = min(warmup, 2.5)
    assert args.warmup == warmup  # so a run prints this value
    for epoch in (step / 7 for step in range(71)):
        if epoch < warmup:
            expected = 0.6 * epoch / warmup
        elif milestones:
            expected = 0.6 * (1 if epoch < 5 else 0.1 if epoch < 8 else 0.01)
        else:
            expected = between(0.6, last, (epoch - warmup) / (10 - warmup))
        assert module.learning_rate(args, epoch) == pytest.approx(expected, rel=1e-12), f"epoch {epoch}"


@pytest.mark.parametrize("method, flags", slow_but(EACH_MODEL[3:], EACH_MODEL))
def test_what_each_step_is_given(method, module, flags, _tiny, tmp_path, monkeypatch, request):
    given, momenta, simsiam = {}, [], flags == "--base simsiam"
    scheduled = {name for name, default in vars(module.parse_args([])).items() if isinstance(default, list)}
    flags += " --lr 0.3 --warmup 0.4 --knn-every 0 --weight-decay 0.02" + " 0.2" * ("weight_decay" in scheduled)
    flags += " --momentum 0.9" * (not simsiam) + " 1" * ("momentum" in scheduled)
    flags += " --min-lr 0.01" * (method in WITH_MIN_LR)
    flags += {"clim": " --clim-start 0", "moco_jointcrop": " --arch resnet_nano"}.get(method, "")
    for model in [kind for kind in vars(module).values() if isinstance(kind, type) and "update" in vars(kind)]:
        monkeypatch.setattr(model, "update", lambda self, m, move=model.update: (momenta.append(m), move(self, m)))

    def note(optimizer, *_):
        values = [group[name] for group in optimizer.param_groups for name in ("lr", "weight_decay")]
        given.setdefault(optimizer, []).append(values)

    request.addfinalizer(register_optimizer_step_pre_hook(note).remove)
    tiny.run(method, tmp_path, *flags.split())
    args, steps = module.parse_args([*tiny.FLAGS, *flags.split()]), np.arange(2 * tiny.STEPS) / (2 * tiny.STEPS)
    lr, none = [module.learning_rate(args, 2 * done) for done in steps], 0 * steps
    first_and_last = [np.ravel(value)[[0, -1]] for value in (args.weight_decay, args.momentum or 0)]
    decay, momentum = ([between(*pair, done) for done in steps] for pair in first_and_last)
    groups = len([*given.values()][-1][0]) // 2
    expected = [[lr, none] * (groups - 1) + [lr, decay]]  # the first of two groups has no decay
    if method == "logo":  # first the affinity, at the peak, then the encoder by its second optimizer
        affinity = args.lr * args.batch_size / 256 + 0 * steps
        expected = [[affinity, decay], *([] if simsiam else [[lr, none]]), *expected]
    for ours, theirs in zip(given.values(), expected, strict=True):
        np.testing.assert_allclose(np.transpose(ours), theirs, rtol=1e-12)
    assert momenta == ([] if simsiam else pytest.approx(momentum, rel=1e-12))  # SimSiam has no momentum encoder
    *_, last = tiny.records(tmp_path)
    assert last["lr"] == lr[-1] and last.get("momentum") in (None, *momenta[-1:])
