"""Prints a unified diff of two methods' `main`s, without docstrings, comments and blank lines.

python tests/tools/diff_mains.py moco_jointcrop.py jcl.py [--loop]
"""

import argparse
import ast
import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main_of(file, loop):
    """The lines of the body of a file's `main`, or of its loop over epochs."""
    text = (ROOT / file).read_text()
    (main,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "main")
    begin = next(node for node in main.body[1:] if isinstance(node, ast.For) or not loop)  # the first is the docstring
    lines = text.splitlines()[begin.lineno - 1 : main.end_lineno]
    lines = [re.sub(r"(^ *|  )# .*", "", line) for line in lines]
    return [line for line in lines if line]


def difference(one, other, loop=False):
    """The unified diff of two files' `main`s, a list of lines."""
    return list(difflib.unified_diff(main_of(one, loop), main_of(other, loop), one, other, n=1, lineterm=""))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs=2, metavar="FILE")
    parser.add_argument("--loop", action="store_true", help="only from `for epoch` on")
    args = parser.parse_args()
    print("\n".join(difference(*args.files, args.loop)))
