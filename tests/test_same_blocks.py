"""What the files promise of each other: equal blocks, the loop in main, independence, safe loading, names."""

import ast
import importlib
import re

import count_lines
import pytest
import torch
from conftest import METHODS, ROOT, VARIANTS

import common

FIVE = ("moco_jointcrop", "jcl", "clim", "logo", "patchmix")
SCRIPTS = sorted(ROOT.glob("*.py"))
SOURCES = SCRIPTS + sorted((ROOT / "tests").rglob("*.py"))
BANNER = re.compile(r"# (-{2,}|={2,}) (.+)")
# What other projects copy from a file (and tests/tools/figures.py uses), whether the file itself calls it or not.
OFFERED = {"main", "parse_args", "sample_joint", "knn_predict"}
OF_LIBRARIES = {"forward", "_check_input_dim", "Process", "_get_help_string"}  # torch and others call them


def tree_of(path):
    return ast.parse(path.read_text())


def calls(node, name=""):
    """The calls in a syntax tree whose function's text ends with a name."""
    return [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(name)]


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
    expected = FIVE if named == "all five files" else re.split(r", | and ", named)
    assert set(copies) == set(expected)
    assert len(set(copies.values())) == 1, f"'{name}' differs between {', '.join(copies)}"
    assert len(next(iter(copies.values())).splitlines()) > 5


def test_there_are_blocks_in_every_method():
    assert len(NAMES) >= 4 and all(BLOCKS[method] for method in METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_sections(method):
    expected = ["imports", "recipes", "the paper", "augmentation", "model", "training", "machinery"]
    assert [*count_lines.sections(ROOT / f"{method}.py")] == expected


@pytest.mark.parametrize("method", METHODS)
def test_the_paper_comes_early(method):
    assert count_lines.function_lines(ROOT / f"{method}.py", count_lines.PAPER[method])[1] < 150


@pytest.mark.parametrize("method", METHODS)
def test_the_training_loop_stands_in_main(method):
    """The loop over the loader with loss, gradient and step; what is saved and judged; and no other place has it."""
    path = ROOT / f"{method}.py"
    tree = tree_of(path)
    (main,) = (node for node in tree.body if getattr(node, "name", None) == "main")
    loops = [n for n in ast.walk(main) if isinstance(n, ast.For) and ast.unparse(n.iter) == "loader"]
    assert len(loops) == 1
    for text in ("schedule", "common.colour_views", "ddp", ".backward", "optimizer.step", "run.count", "stop.agreed"):
        assert calls(loops[0], text), text
    for text in ("run.load", "run.save", "run.write", "run.summary", "common.knn_record", "set_epoch"):
        assert calls(main, text), text
    elsewhere = [node for node in tree.body if node is not main and getattr(node, "name", None) != "descend"]
    for node in elsewhere:  # LoGo's descend makes the steps that do not pass DDP
        assert not [text for text in (".backward", "optimizer.step", ".zero_grad") if calls(node, text)], node.name
    assert len([n for n in ast.walk(main) if isinstance(n, (ast.FunctionDef, ast.Lambda))]) == 1


def test_common_has_nothing_of_training():
    """No optimiser, schedule, loss or backward; the only loop over a loader is that of features."""
    tree = tree_of(ROOT / "common.py")
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    forbidden = {"backward", "zero_grad", "optim", "cross_entropy", "lr_scheduler", "DistributedDataParallel"}
    assert not names & (forbidden | {"autograd", "logsumexp", "schedule"})
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            loops = [n for n in ast.walk(node) if isinstance(n, ast.For)]
            found = [n for n in loops if re.search(r"\bloader\b|Loader", ast.unparse(n.iter))]
            assert not found or node.name == "extract_features", node.name


def references(tree):
    """{name: how often it is used} in a syntax tree, as a name or an attribute."""
    found = {}
    for n in ast.walk(tree):
        if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load):
            name = n.id if isinstance(n, ast.Name) else n.attr
            found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_nothing_is_dead(path):
    """Each function, class, method and constant is used outside of itself: in its file, of common.py in any."""
    tree = tree_of(path)
    users = [tree_of(p) for p in SCRIPTS] if path.stem == "common" else [tree]
    used = [references(user) for user in users]
    unused = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names, own = [node.name], references(node)
        elif isinstance(node, ast.Assign) and node in tree.body:
            targets = [n for target in node.targets for n in ast.walk(target)]
            names, own = [n.id for n in targets if isinstance(n, ast.Name)], {}
        else:
            continue
        for name in names:
            if sum(u.get(name, 0) for u in used) <= own.get(name, 0) and not name.startswith("__"):
                unused.append(name)
    assert set(unused) - OFFERED - OF_LIBRARIES == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_lines_are_short(path):
    assert max(map(len, path.read_text().splitlines())) <= 120


def test_counting(tmp_path):
    """Tables do not count, with calls of common's or without; other assignments do."""
    path = tmp_path / "file.py"
    path.write_text(
        '"""Doc."""\n\nimport a  # 1\n\nT = dict(\n    x=1,\n    y=common.number(int, 1),\n)\n'
        'U = f(1)\n# ==== 1. recipes\n\n\ndef main():\n    """Doc."""\n    # no\n    b(\n        1\n    )\n'
    )
    assert sorted(count_lines.code_lines(path)) == [3, 9, 13, 16, 17, 18]
    assert count_lines.sections(path) == {"imports": 2, "recipes": 4}
    assert count_lines.function_lines(path, "main") == (4, 13)


def test_top_level_names():
    allowed = {"README.md", "LICENSE", "requirements.txt", "common.py", "eval_linear.py", "eval_knn.py", "tests"}
    allowed |= {f"{m}.py" for m in FIVE}
    ignored = {line.strip().strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    names = {p.name for p in ROOT.iterdir() if p.name[0] != "."}
    assert names - allowed - ignored == set() and "common.py" in names and len(METHODS) > 0


@pytest.mark.parametrize("path", [p for p in SOURCES if not p.name.startswith("test_")], ids=lambda p: p.name)
def test_loading_is_safe(path):
    """Checkpoints are read as tensors and plain data only."""
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    loads = [ast.unparse(n) for n in calls if ast.unparse(n.func) == "torch.load"]
    assert [c for c in loads if "weights_only=True" not in c] == [] and (loads or path.name != "common.py")
    assert not {ast.unparse(n.func) for n in calls} & {"pickle.load", "pickle.loads", "torch.jit.load", "exec", "eval"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_imports(path):
    """A method or an evaluation imports common and packages; common imports no other file, and names no method."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = {a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    ours = imported & {p.stem for p in SCRIPTS}
    assert ours == (set() if path.stem == "common" else {"common"})
    if path.stem == "common":
        names = {n.id for n in nodes if isinstance(n, ast.Name)}
        names |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        assert not names & set(FIVE) and not [t for t in texts if t in FIVE]


@pytest.mark.parametrize("method, variant", VARIANTS)
def test_every_trained_parameter_is_in_one_group_of_its_optimiser(method, variant, tmp_path, monkeypatch):
    """Caught where main hands its parts to the run."""

    class Caught(Exception):
        pass

    def load(self, images, **parts):
        found.update(parts)
        raise Caught

    found, module = {}, importlib.import_module(method)
    monkeypatch.setattr(common.Run, "load", load)
    flags = f"{variant} --image-size 16 --batch-size 16 --device cpu --out {tmp_path / 'run'}".split()
    flags += ["--arch", "vit_micro", "--patch-size", "8"] if "--arch" not in variant else []
    with pytest.raises(Caught):
        module.main(module.parse_args(flags))
    modules = [name for name, part in found.items() if isinstance(part, torch.nn.Module)]
    assert "model" in modules
    for name in modules:  # LoGo trains an affinity, too; its second optimizer is of some of the model's parameters
        optimizer = found["optimizer" if name == "model" else f"{name}_optimizer"]
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        trained = {p for p in found[name].parameters() if p.requires_grad}
        assert len(set(grouped)) == len(grouped) > 0 and set(grouped) == trained


def test_no_paths_of_a_machine():
    """No file points into somebody's computer."""
    folders = "|".join(("tmp", "work", "home", "root", "mnt", "Users", "var"))
    pattern = re.compile(rf"(?<![\w.:/])/({folders})/")
    texts = [p for p in ROOT.iterdir() if p.is_file() and p.suffix in (".md", ".txt", ".toml", "") and p.name != ".git"]
    files = [*SOURCES, *texts]
    found = [
        f"{p.name}:{i + 1}" for p in files for i, line in enumerate(p.read_text().splitlines()) if pattern.search(line)
    ]
    assert found == [] and len(files) > 5 and pattern.search("see /" + "home/me")
