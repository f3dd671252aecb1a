"""Prints a unified diff of two methods' `main`s, without docstrings, comments and blank lines.

    python tests/tools/diff_mains.py moco_jointcrop.py jcl.py [--loop]
    python tests/tools/diff_mains.py --count

--loop: only from `for epoch` on. --count: how many lines differ between jcl.py and each other file, indentation apart.
"""

import argparse
import ast
import difflib
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAIRS = [(file, "jcl.py") for file in ("moco_jointcrop.py", "clim.py", "logo.py", "patchmix.py")]


def main_of(file, loop=False):
    """Return the lines of a file's `main`, or of its loop over epochs, without docstring, comments and blank lines."""
    text = (ROOT / file).read_text()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    (main,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "main")
    docstring, begin = main.body[0], main
    lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
    if loop:
        begin = next(node for node in main.body if isinstance(node, ast.For))
    return [line for line in lines[begin.lineno - 1 : main.end_lineno] if line.strip()]


def difference(one, other, loop=False, strip=False):
    """Return the unified diff of two files' `main`s, a list of lines. strip: without their indentation."""
    lines = [[line.strip() if strip else line for line in main_of(file, loop)] for file in (one, other)]
    return list(difflib.unified_diff(*lines, one, other, n=1, lineterm=""))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--loop", action="store_true", help="only from `for epoch` on")
    parser.add_argument("--count", action="store_true", help="count the lines that are removed and added")
    args = parser.parse_args()
    if not args.count and len(args.files) != 2:
        parser.error("give two files, or --count")
    for pair in PAIRS if args.count else [args.files]:
        lines = difference(*pair, args.loop, strip=args.count)
        if args.count:
            removed, added = (sum(line.startswith(sign) for line in lines[2:]) for sign in "-+")
            lines = [f"{' '.join(pair)}: {removed + added} lines, {removed} removed and {added} added"]
        print("\n".join(lines))
