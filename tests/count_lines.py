"""Code lines of the files, without blanks, comments, docstrings and tables of plain data: `python tests/count_lines.py`"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLES = ("COMMON", "MOCO", "CIFAR", "IMAGENET", "RELEASED", "RECIPES", "IMAGENET100", "NORMS", "ARCHS")


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


if __name__ == "__main__":
    for file in sorted(ROOT.glob("*.py")):
        print(f"{file.name:20} {code_lines(file)[0]:4} code lines, longest function {code_lines(file)[1]}")
