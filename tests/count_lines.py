"""Code lines of each file by room, where its mathematics begins, and how far two methods differ.

    python tests/count_lines.py

A code line has code: no blanks, comments, docstrings, and no top-level tables that are literals (numbers, names,
strings, no calls but dict() and tuple()). The method is the recipes, the paper's functions, views, model, step and
main; the rest is machine: imports and the machine room.
"""

import ast
import difflib
import itertools
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
MATHEMATICS = dict(
    jcl="jcl_loss",
    patchmix="patch_mix",
    moco_jointcrop="joint_from_uniform",
    clim=("clim_loss", "select_positives"),
    logo=("affinity_loss", "Affinity"),
)
LITERAL = (
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.keyword,
    ast.BinOp,
    ast.UnaryOp,
)
LITERAL += (ast.operator, ast.unaryop, ast.Starred)


def is_table(node):
    """Whether a top-level statement assigns a literal."""
    if not isinstance(node, ast.Assign):
        return False
    parts = list(ast.walk(node.value))
    calls = [part for part in parts if isinstance(part, ast.Call)]
    plain = all(isinstance(call.func, ast.Name) and call.func.id in ("dict", "tuple") for call in calls)
    return plain and all(isinstance(part, (*LITERAL, ast.Call)) for part in parts)


def code_lines(path):
    """The numbers of the lines of a Python file that have code."""
    tree, lines = ast.parse(Path(path).read_text()), set()
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            name = tokenize.tok_name[token.type]
            if name not in ("ENCODING", "COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"):
                lines |= set(range(token.start[0], token.end[0] + 1))
    for node in [*ast.walk(tree)]:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for node in tree.body:
        if is_table(node):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def rooms(path):
    """{room: code lines}, by the file's numbered banners; what stands before the first is 'imports'."""
    counted, found, room = code_lines(path), {}, "imports"
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if banner := re.fullmatch(r"# [-=]{3,} \d\. ([^(]+?)( \(.+)?", line):
            room = banner[1]
        found[room] = found.get(room, 0) + (number in counted)
    return found


def function_lines(path, name):
    """Code lines of a top-level function or class, and the line where it begins."""
    node = next(n for n in ast.parse(Path(path).read_text()).body if getattr(n, "name", None) == name)
    return len(code_lines(path) & set(range(node.lineno, node.end_lineno + 1))), node.lineno


def mathematics(path):
    """The line where the paper's own function begins."""
    names = MATHEMATICS[Path(path).stem]
    return min(function_lines(path, name)[1] for name in ((names,) if isinstance(names, str) else names))


def differing(first, second):
    """Lines that `diff` would print of two files."""
    pair = (Path(path).read_text().splitlines() for path in (first, second))
    return sum(
        line[0] in "+-" and line[:3] not in ("+++", "---") for line in difflib.unified_diff(*pair, n=0, lineterm="")
    )


if __name__ == "__main__":
    for file in sorted(ROOT.glob("*.py")):
        print(f"{file.name:20}{len(code_lines(file)):5}  {', '.join(f'{k} {n}' for k, n in rooms(file).items())}")
        if file.stem in MATHEMATICS:
            machine = rooms(file)["machine room"]
            method = len(code_lines(file)) - machine - rooms(file)["imports"]
            share = 100 * method / len(code_lines(file))
            main = function_lines(file, "main")[0]
            print(f"{'':27}method {method} ({share:.0f} %), main {main}, mathematics from line {mathematics(file)}")
    for pair in itertools.combinations(MATHEMATICS, 2):
        print(f"diff {pair[0]}.py {pair[1]}.py: {differing(*(ROOT / f'{name}.py' for name in pair))} lines")
