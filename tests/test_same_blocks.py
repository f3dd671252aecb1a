"""The law of the house: equal blocks, models that work alone, common.py for all, each parameter in one optimizer."""

import ast
import functools
import importlib
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

SCRIPTS = sorted(ROOT.glob("*.py"))
BLOCK = re.compile(r"^# --+ ([^\n]+) \(shared block\)\n(.*?)(?=^# (?:--+|==+) |^if __name__|\Z)", re.M | re.S)


def shared_blocks(sources):
    """{banner's words: {file: what follows, to the next banner}}. sources: {file: text}."""
    found = defaultdict(dict)
    for file, text in sources.items():
        for name, block in BLOCK.findall(text):
            assert file not in found[name], f"{file} has the block '{name}' twice"
            found[name][file] = block.rstrip()
    return found


SOURCES = {path.name: path.read_text() for path in SCRIPTS}


@pytest.mark.parametrize("name", shared_blocks(SOURCES))
def test_shared_blocks_are_the_same(name):
    """Byte for byte, in all files that have a block of this name."""
    copies = shared_blocks(SOURCES)[name]
    assert len(copies) > 1, f"'{name}' is in {[*copies]} alone"
    assert len(set(copies.values())) == 1, f"'{name}' differs between {', '.join(copies)}"


def test_a_difference_in_a_new_file_is_found():
    """Of one byte in each of its shared blocks. Which files have them is read from the banners."""
    changed = BLOCK.sub(lambda found: found[0].rstrip() + " #\n\n\n", SOURCES["jcl.py"])
    found = shared_blocks(SOURCES | {"sixth.py": changed})
    assert len(found) > 3 and all(len(set(found[name].values())) > 1 for name in shared_blocks({"": changed}))


def names_in(tree):
    """What a syntax tree uses: names and attributes."""
    used = (n for n in ast.walk(tree) if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load))
    return {n.id if isinstance(n, ast.Name) else n.attr for n in used}


def names_of(node):
    """What a top-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


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
    """Models, and the functions of the paper, read neither `common` nor `args`."""
    for method in METHODS:
        source = SOURCES[f"{method}.py"]
        paper = source[source.index("= 2. the paper\n") : source.index("\n# ===", source.index("= 2. the paper"))]
        models = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        for node in [*models, *ast.parse(paper[paper.index("\n") :]).body]:
            assert not {"common", "args"} & names_in(node), node.name


def test_common_trains_nothing():
    """And nothing in it is unused."""
    used = {name for text in SOURCES.values() for name in names_in(ast.parse(text))}
    body = ast.parse(SOURCES["common.py"])
    defined = {name for node in body.body for name in names_of(node)}
    assert len(defined) > 90 and defined - used == set()
    trains = {"backward", "zero_grad", "cross_entropy", "log_softmax", "SGD", "AdamW"}
    assert not names_in(body) & trains


@pytest.mark.parametrize("method, variant", VARIANTS)
def test_every_trained_parameter_is_in_one_group_of_its_optimizer(method, variant):
    """LoGo trains an affinity, too."""
    state = state_of(importlib.import_module(method), f"{variant} --batch-size 16")
    pairs = [(state["model"], state["optimizer"])]
    if method == "logo":
        pairs += [(state["affinity"], state["affinity_optimizer"])]
    for model, optimizer in pairs:
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        trained = {p for p in model.parameters() if p.requires_grad}
        assert len(set(grouped)) == len(grouped) and trained and trained <= {*grouped}
