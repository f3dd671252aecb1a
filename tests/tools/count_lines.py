"""Lines and code lines of each file, by section: python tests/tools/count_lines.py

A code line has code: no blanks, comments or docstrings.
"""

import ast
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAPER = dict(  # the function or class by which each paper is known
    jcl="jcl_loss", patchmix="patch_mix", moco_jointcrop="joint_from_uniform", clim="clim_loss", logo="affinity_loss"
)
NOT_CODE = ("ENCODING", "COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")


def code_lines(path):
    """The numbers of the lines of a Python file that have code."""
    lines = set()
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            if tokenize.tok_name[token.type] not in NOT_CODE:
                lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def sections(path):
    """{section: code lines}, by the file's numbered banners; what stands before the first is 'imports'."""
    counted, found, section = code_lines(path), {}, "imports"
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if banner := re.fullmatch(r"# [-=]{3,} \d\. ([^(]+?)( \(.+)?", line):
            section = banner[1]
        found[section] = found.get(section, 0) + (number in counted)
    return found


if __name__ == "__main__":
    for file in sorted(ROOT.glob("*.py")):
        found = sections(file)
        words = ", ".join(f"{name} {count}" for name, count in found.items())
        print(f"{file.name:20}{len(file.read_text().splitlines()):6}{sum(found.values()):6}  {words}")
