"""Code lines of the files, without blanks, comments, docstrings and tables of plain data, and how far the queue files differ.

python tests/count_lines.py
"""

import ast
import difflib
import io
import itertools
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLES = (
    "COMMON",
    "MOCO",
    "CIFAR",
    "IMAGENET",
    "RELEASED",
    "SIMSIAM",
    "BY",
    "RECIPES",
    "IMAGENET100",
    "NORMS",
    "PLAIN",
    "ARCHS",
    "FLAGS",
)


def code_lines(path):
    """(code lines, length of the longest function in lines) of a Python file."""
    text = Path(path).read_text()
    tree = ast.parse(text)
    skipped, longest = set(), 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                skipped |= set(range(first.lineno, first.end_lineno + 1))
        if isinstance(node, ast.FunctionDef):
            longest = max(longest, node.end_lineno - node.lineno + 1)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in TABLES:
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - skipped), longest


METHOD = ("docstring", "1. arguments", "2. views", "4. loss", "positives", "5. model")  # sections that are a paper's own


def sections(path):
    """{section: its lines}: the docstring, the imports, and what stands below each banner, but MoCo v3's block."""
    text = Path(path).read_text()
    end = ast.parse(text).body[0].end_lineno
    lines = text.splitlines()
    found = {"docstring": lines[:end], "imports": []}
    name = "imports"
    for line in lines[end:]:
        if banner := re.fullmatch(r"# [-=]{3,} (.+)", line):
            name = next((m for m in METHOD if banner[1].startswith(m)), banner[1])
            found[name] = []
        elif line.startswith("# MoCo v3: projector and predictor"):
            name = "MoCo v3"
            found[name] = []
        found[name].append(line)
    found.pop("MoCo v3", None)
    return found


def differing(a, b):
    """(lines that differ between two files: removed + added, those of them outside the sections that are a paper's own)."""
    a, b = sections(a), sections(b)
    counts = {}
    for name in a.keys() | b.keys():
        pair = difflib.unified_diff(a.get(name, []), b.get(name, []), n=0, lineterm="")
        counts[name] = sum(line[0] in "+-" and line[:3] not in ("+++", "---") for line in pair)
    return sum(counts.values()), sum(n for name, n in counts.items() if name not in METHOD)


if __name__ == "__main__":
    for file in sorted(ROOT.glob("*.py")):
        print(f"{file.name:20} {code_lines(file)[0]:4} code lines, longest function {code_lines(file)[1]}")
    for first, second in itertools.combinations(("moco_jointcrop.py", "jcl.py", "clim.py", "logo.py"), 2):
        if (ROOT / first).exists() and (ROOT / second).exists():
            total, other = differing(ROOT / first, ROOT / second)
            print(f"diff {first} {second}: {total} lines, {other} of them outside docstring, arguments, views, loss and model")
