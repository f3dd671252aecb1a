"""Equal blocks, models that work alone, a common.py that trains nothing, and each parameter in one optimizer."""

import functools
import re
from collections import defaultdict

import pytest
import torch
from conftest import METHODS, ROOT, VARIANTS, state_of
from torch import nn

import clim
import jcl
import logo
import moco_jointcrop
import patchmix

SOURCES = {path.name: path.read_text() for path in sorted(ROOT.glob("*.py"))}
BLOCK = re.compile(r"^# --+ ([^\n]+) \(shared block\)\n(.*?)(?=^# (?:--+|==+) |^if __name__|\Z)", re.M | re.S)
BLOCKS = defaultdict(list)  # {the words of a banner: what follows it, to the next banner, in each file that has it}
for text in SOURCES.values():
    for name, block in BLOCK.findall(text):
        BLOCKS[name].append(block.rstrip())


@pytest.mark.parametrize("name", BLOCKS)
def test_shared_blocks_are_the_same(name):
    """Byte for byte, in all files that have a block of this name."""
    assert len(BLOCKS) > 3 and len(BLOCKS[name]) > 1 and len(set(BLOCKS[name])) == 1


X = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
PAIRS, SMALL = ([(0, 1), (1, 0)], [(2, 0)]), dict(width=8, dim=8)
MODELS = {  # model of an encoder; what forward takes, of a generator, or None
    "jcl": (functools.partial(jcl.JCL, queue=8), lambda g: (X, 4.0, g)),
    "clim": (functools.partial(clim.CLIM, sizes=(8, 8), queue=8), lambda g: (X[0], X[1:3], 0.5, (), g and [g] * 2)),
    "moco": (functools.partial(moco_jointcrop.MoCo, queue=8), lambda g: (X[:2], g)),
    "moco v3": (functools.partial(moco_jointcrop.MoCoV3, hidden=8), lambda g: (X, g)),
    "logo": (functools.partial(logo.MoCo, queue=8), lambda g: (X, *PAIRS, "mean", g and [g] * 2)),
    "simsiam": (functools.partial(logo.SimSiam, hidden=8), lambda g: (X, *PAIRS)),
    "patchmix": (
        functools.partial(patchmix.PatchMix, hidden=8),
        lambda g: (X[:2], patchmix.mix_views(X[:2], 3, 4, generators=g and [g] * 2)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_works_alone(name):
    """By tensors and numbers. Without a generator torch's global one shuffles the keys, or patches."""
    (build, given), losses = MODELS[name], []
    for seed, generator in ((3, torch.Generator().manual_seed(3)), (3, None), (4, None)):
        torch.manual_seed(0)
        model = build(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8)), **SMALL)
        jcl.split_batch_norms(model, 2)  # so that the shuffle matters
        torch.manual_seed(seed)
        loss, keys, q, metrics = model(*given(generator))
        loss.backward()
        assert metrics["loss"] == loss and all(p.grad is not None for p in model.parameters() if p.requires_grad)
        if hasattr(model, "update"):
            model.update(0.9)
        if keys is not None:
            model.queue.enqueue(keys)
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert (losses[1] != losses[2]) == (name not in ("moco v3", "simsiam"))


def test_what_is_copied_needs_no_other_file():
    """Models, and the functions of the paper, read neither `common` nor `args`. And `common` trains nothing."""
    for method in METHODS:
        source = SOURCES[f"{method}.py"]
        paper = source.split("= 2. the paper\n")[1].split("\n# ===")[0]
        for part in [paper, *re.findall(r"^class .*?(?=^\S)", source, re.M | re.S)]:
            assert part.strip() and not re.search(r"\bcommon\.|\bargs\b", part)
    assert not re.search(r"\b(backward|zero_grad|cross_entropy|log_softmax|SGD|AdamW)\b", SOURCES["common.py"])


@pytest.mark.parametrize("method, variant", VARIANTS)
def test_every_trained_parameter_is_in_one_group_of_its_optimizer(method, module, variant):
    """LoGo trains an affinity, too. Of two groups the first, without weight decay, has all that has one dimension."""
    state = state_of(module, f"{variant} --batch-size 16")
    pairs = [(state["model"], state["optimizer"])]
    if method == "logo":
        pairs += [(state["affinity"], state["affinity_optimizer"])]
    for model, optimizer in pairs:
        groups = [group["params"] for group in optimizer.param_groups]
        trained, grouped = {p for p in model.parameters() if p.requires_grad}, sum(groups, [])
        assert len(set(grouped)) == len(grouped) and trained and trained <= {*grouped}
        assert len(groups) == 1 or [{p.dim() > 1 for p in group} for group in groups] == [{False}, {True}]
