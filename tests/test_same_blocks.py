"""The law of the house: equal blocks, common.py for all, and an optimiser for every parameter that is trained."""

import ast
import importlib
import re

import pytest
from conftest import METHODS, ROOT, VARIANTS

SCRIPTS = sorted(ROOT.glob("*.py"))
BLOCK = re.compile(r"^# --+ ([^\n]+\(the same in [^\n]+\))\n(.*?)(?=^# (?:--+|==+) |\Z)", re.M | re.S)


def blocks(path):
    """{banner's words: what follows, to the next banner}, of blocks that are elsewhere, too."""
    found = BLOCK.findall(path.read_text())
    assert len(dict(found)) == len(found), f"{path.name} has a block twice"
    return {name: text.rstrip() for name, text in found}


BLOCKS = {path.stem: blocks(path) for path in SCRIPTS}
NAMES = sorted({name for found in BLOCKS.values() for name in found})


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_the_same(name):
    """Byte for byte, in exactly the files that the banner names."""
    copies = {file: found[name] for file, found in BLOCKS.items() if name in found}
    named = re.search(r"\(the same in (.+)\)", name)[1]
    assert set(copies) == set(METHODS if named == "all five files" else re.split(r", | and ", named))
    assert len(set(copies.values())) == 1, f"'{name}' differs between {', '.join(copies)}"


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


def test_common_holds_what_the_evaluations_need():
    """What follows data, views, evaluation and encoders is used by these, or by an evaluation, perhaps through another.

    So nothing there is only a training's: no optimiser, schedule, loss or backward.
    """
    source = (ROOT / "common.py").read_text()
    body, end = ast.parse(source).body, source[: source.index(" 5. processes\n")].count("\n")
    uses = {name: names_in(node) for node in body for name in names_of(node)}
    found = {name for node in body if node.lineno <= end for name in names_of(node)}
    assert 50 < len(found) < len(uses)
    for evaluation in ("eval_knn.py", "eval_linear.py"):
        found |= names_in(ast.parse((ROOT / evaluation).read_text()))
    reached = set()
    while todo := found - reached:
        reached |= todo
        found = set().union(*(uses.get(name, ()) for name in todo))
    assert uses.keys() - reached == set()
    assert not names_in(ast.parse(source)) & {"backward", "zero_grad", "optim", "cross_entropy", "autograd", "schedule"}


@pytest.mark.parametrize("method, variant", VARIANTS)
def test_every_trained_parameter_is_in_one_group_of_its_optimiser(method, variant, few_patterns, tmp_path, monkeypatch):
    """Caught where main restores them. LoGo trains an affinity, too."""

    class Caught(Exception):
        pass

    def catch(args, images, models, optimizers, *_):
        raise Caught(models, optimizers)

    module = importlib.import_module(method)
    monkeypatch.setattr(module, "restore", catch)
    with pytest.raises(Caught) as caught:
        module.main(module.parse_args([*variant.split(), "--batch-size", "16", "--out", str(tmp_path)]))
    models, optimizers = caught.value.args
    pairs = [(models, optimizers)]
    if method == "logo":
        pairs = [(models[name], optimizers[f"{name}_optimizer".removeprefix("model_")]) for name in models]
    for model, optimizer in pairs:
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        trained = {p for p in model.parameters() if p.requires_grad}
        assert len(set(grouped)) == len(grouped) > 0 and set(grouped) == trained
