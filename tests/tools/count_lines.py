"""Code lines of each file by section, where the paper's own function begins, and how far two methods differ.

    python tests/tools/count_lines.py

A code line has code: no blanks, comments or docstrings. Top-level tables do not count either: recipes, flags and other
assignments of literals, in which only dict(), tuple() and functions of common.py are called, as common.number(int, 1).
"""

import ast
import difflib
import itertools
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAPER = dict(  # the function or class by which each paper is known
    jcl="jcl_loss", patchmix="patch_mix", moco_jointcrop="joint_from_uniform", clim="clim_loss", logo="affinity_loss"
)
NOT_CODE = ("ENCODING", "COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
LITERAL = (ast.Constant, ast.Name, ast.Attribute, ast.Load, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.keyword)
LITERAL += (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Starred, ast.Call)


def is_table(node):
    """Whether a top-level statement assigns a table."""
    if not isinstance(node, ast.Assign):
        return False
    parts = list(ast.walk(node.value))
    called = [ast.unparse(part.func) for part in parts if isinstance(part, ast.Call)]
    plain = all(name in ("dict", "tuple") or name.startswith("common.") for name in called)
    return plain and all(isinstance(part, LITERAL) for part in parts)


def code_lines(path):
    """The numbers of the lines of a Python file that have code."""
    tree, lines = ast.parse(Path(path).read_text()), set()
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            if tokenize.tok_name[token.type] not in NOT_CODE:
                lines |= set(range(token.start[0], token.end[0] + 1))
    for node in [*ast.walk(tree)]:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for node in tree.body:
        if is_table(node):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def sections(path):
    """{section: code lines}, by the file's numbered banners; what stands before the first is 'imports'."""
    counted, found, section = code_lines(path), {}, "imports"
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if banner := re.fullmatch(r"# [-=]{3,} \d\. ([^(]+?)( \(.+)?", line):
            section = banner[1]
        found[section] = found.get(section, 0) + (number in counted)
    return found


def function_lines(path, name):
    """Code lines of a top-level function or class, and the line where it begins."""
    node = next(n for n in ast.parse(Path(path).read_text()).body if getattr(n, "name", None) == name)
    return len(code_lines(path) & set(range(node.lineno, node.end_lineno + 1))), node.lineno


def differing(first, second):
    """Lines that `diff` would print of two files."""
    pair = (Path(path).read_text().splitlines() for path in (first, second))
    changes = difflib.unified_diff(*pair, n=0, lineterm="")
    return sum(line[0] in "+-" and line[:3] not in ("+++", "---") for line in changes)


if __name__ == "__main__":
    total = 0
    for file in sorted(ROOT.glob("*.py")):
        lines, code = len(file.read_text().splitlines()), len(code_lines(file))
        total += code
        print(f"{file.name:20}{lines:6}{code:6}  {', '.join(f'{k} {n}' for k, n in sections(file).items())}")
        if file.stem in PAPER:
            main, paper = function_lines(file, "main")[0], PAPER[file.stem]
            print(f"{'':34}main {main}, {paper} from line {function_lines(file, paper)[1]}")
    print(f"{'all':26}{total:6}")
    for pair in itertools.combinations(PAPER, 2):
        print(f"diff {pair[0]}.py {pair[1]}.py: {differing(*(ROOT / f'{name}.py' for name in pair))} lines")
