"""The law of the house: equal blocks, the paper first, the loop in main, and nothing that nobody uses."""

import ast
import importlib
import re

import count_lines
import pytest
from conftest import METHODS, ROOT, VARIANTS

SCRIPTS = sorted(ROOT.glob("*.py"))
SOURCES = SCRIPTS + sorted((ROOT / "tests").rglob("*.py"))
BANNER = re.compile(r"# (-{2,}|={2,}) (.+)")
# What other projects copy from a file (and tests/tools uses), whether the file itself calls it or not; and what torch
# and others call.
OFFERED = {"main", "parse_args", "sample_joint", "knn_predict", "forward", "_check_input_dim"}
SECTIONS = ["imports", "hyper-parameters", "the paper", "augmentation", "model", "training", "machinery"]


def tree_of(path):
    return ast.parse(path.read_text())


def blocks(path):
    """{banner's words: the block's lines with the banner, to the next banner}, of blocks that are elsewhere, too."""
    found, lines = {}, None
    for line in path.read_text().splitlines():
        if match := BANNER.fullmatch(line):
            lines = []
            if "(the same in " in line:
                assert match[2] not in found, f"{path.name} has '{match[2]}' twice"
                found[match[2]] = lines
        if lines is not None:
            lines.append(line)
    return {name: "\n".join(lines).rstrip() for name, lines in found.items()}


BLOCKS = {path.stem: blocks(path) for path in SCRIPTS}
NAMES = sorted({name for found in BLOCKS.values() for name in found})


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_the_same(name):
    """Byte for byte, in exactly the files that the banner names."""
    copies = {file: found[name] for file, found in BLOCKS.items() if name in found}
    named = re.search(r"\(the same in (.+)\)", name)[1]
    assert set(copies) == set(METHODS if named == "all five files" else re.split(r", | and ", named))
    assert len(set(copies.values())) == 1, f"'{name}' differs between {', '.join(copies)}"


def calls(node):
    """The names of what is called in a syntax tree."""
    return {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}


@pytest.mark.parametrize("method", METHODS)
def test_the_paper_stands_first_and_the_training_loop_in_main(method):
    """Loss, gradient and step are lines of main's loop over the batches, and no other place has them."""
    path = ROOT / f"{method}.py"
    body = tree_of(path).body
    assert [*count_lines.sections(path)] == SECTIONS
    names = [n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    assert names[:2] == ["recipe", count_lines.PAPER[method]]
    (main,) = (node for node in body if getattr(node, "name", None) == "main")
    loops = {ast.unparse(n.target): n for n in ast.walk(main) if isinstance(n, ast.For)}
    assert ast.unparse(loops["epoch"].iter).startswith("range(") and ast.unparse(loops["batch"].iter) == "batches"
    backward = "objective.backward" if method == "logo" else "loss.backward"
    steps = {"schedule", "common.colour_views", "ddp", "optimizer.zero_grad", backward, "optimizer.step"}
    assert calls(loops["batch"]) >= steps
    assert calls(main) >= {"restore", "save", "means", "introduce", "common.until_stopped", "common.knn_record"}
    assert not [n for n in ast.walk(main) if isinstance(n, (ast.While, ast.Try, ast.Lambda))]
    for node in body:
        if getattr(node, "name", None) not in ("main", "descend"):  # LoGo's descend makes steps that do not pass DDP
            assert not [c for c in calls(node) if c.endswith((".backward", "optimizer.step", "zero_grad"))], node.name


def names_of(node):
    """What a top-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def references(tree):
    """{name: how often it is used} in a syntax tree, as a name or an attribute."""
    found = {}
    for n in ast.walk(tree):
        if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load):
            name = n.id if isinstance(n, ast.Name) else n.attr
            found[name] = found.get(name, 0) + 1
    return found


def test_common_holds_what_the_evaluations_need():
    """Outside the rooms data, views, evaluation and encoders: these, or an evaluation, use it, perhaps through another.

    Law 1 of the house. So nothing there is only a training's: no optimiser, schedule, loss or backward.
    """
    tree = tree_of(ROOT / "common.py")
    rooms = [(n, match[1]) for n, line in enumerate((ROOT / "common.py").read_text().splitlines(), 1)
             if (match := re.fullmatch(r"# -+ \d\. (\w+)", line))]  # fmt: skip
    uses, known = {}, set()
    for node in tree.body:
        room = next((name for line, name in reversed(rooms) if line <= node.lineno), None)
        for name in names_of(node):
            uses[name] = set(references(node))
            known |= {name} if room in ("data", "views", "evaluation", "encoders") else set()
    assert len(known) > 50 and len(uses) > len(known)
    found = set().union(*(references(tree_of(ROOT / f"{script}.py")) for script in ("eval_knn", "eval_linear")), known)
    reached = set()
    while todo := found - reached:
        reached |= todo
        found = {name for one in todo for name in uses.get(one, ())}
    assert uses.keys() - reached == set()
    words = {getattr(n, "id", getattr(n, "attr", getattr(n, "value", None))) for n in ast.walk(tree)}
    words = {word for word in words if isinstance(word, str)}
    assert not words & {"backward", "zero_grad", "optim", "cross_entropy", "autograd", "logsumexp", "schedule"}
    assert not words & set(METHODS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_nothing_is_dead(path):
    """Each function, class, method and constant is used outside of itself: in its file, of common.py in any."""
    tree, unused = tree_of(path), set()
    used = [references(tree_of(p)) for p in SCRIPTS if p == path or path.stem == "common"]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names, own = [node.name], references(node)
        elif isinstance(node, ast.Assign) and node in tree.body:
            names, own = names_of(node), {}
        else:
            continue
        for name in names:
            if sum(u.get(name, 0) for u in used) <= own.get(name, 0) and not name.startswith("__"):
                unused.add(name)
    assert unused - OFFERED == set()


def test_top_level_names():
    allowed = {"README.md", "LICENSE", "requirements.txt", "common.py", "eval_linear.py", "eval_knn.py", "tests"}
    ignored = {line.strip().strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert {p.name for p in ROOT.iterdir() if p.name[0] != "."} <= allowed | {f"{m}.py" for m in METHODS} | ignored


@pytest.mark.parametrize("path", [p for p in SOURCES if not p.name.startswith("test_")], ids=lambda p: p.name)
def test_loading_is_safe(path):
    """Checkpoints are read as tensors and plain data only."""
    tree = tree_of(path)
    loads = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.load"]
    assert all("weights_only=True" in load for load in loads)
    assert not calls(tree) & {"pickle.load", "pickle.loads", "torch.jit.load", "exec", "eval"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_imports(path):
    """A method or an evaluation imports common and packages; common imports no other file."""
    nodes = list(ast.walk(tree_of(path)))
    imported = {a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    assert imported & {p.stem for p in SCRIPTS} == (set() if path.stem == "common" else {"common"})


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


def test_no_paths_of_a_machine():
    """No file points into somebody's computer."""
    pattern = re.compile(r"(?<![\w.:/])/(tmp|work|home|root|mnt|Users|var)/")
    texts = [*SOURCES, *ROOT.glob("*.md"), *ROOT.glob("*.txt"), *ROOT.glob("*.toml"), ROOT / "LICENSE"]
    assert [p.name for p in texts if pattern.search(p.read_text())] == []
