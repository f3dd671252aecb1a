"""README keeps its word: links lead somewhere, commands parse, tables are those of tests/results."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import results
from count_lines import ROOT, code_lines

README = (ROOT / "README.md").read_text()
COMMAND = re.compile(r"(?:python|torchrun(?: -\S+)*) (?:\w+)\.py(?: [^`\n#]*)?")


def commands():
    """Every command line of README that starts one of the seven scripts, in blocks and in the text."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.S))
    blocks = [line for block in re.findall(r"```bash[^\n]*\n(.*?)```", README, re.S) for line in block.splitlines()]
    found = [c.strip() for text in inline + blocks for c in COMMAND.findall(text)]
    return sorted({c for c in found if "SCRIPT" not in c and "..." not in c})


def test_links():
    headings = [re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.M)]
    targets = re.findall(r"\]\(([^)\s]+)\)", README)
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("https://arxiv.org/abs/"):
            assert (ROOT / target).exists(), target
    assert len(targets) > 20


@pytest.mark.parametrize("line", commands())
def test_commands(line, monkeypatch, tmp_path):
    """Each script takes the flags that README gives it."""
    words = shlex.split(line)
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    monkeypatch.chdir(tmp_path)
    importlib.import_module(words[script][:-3]).parse_args(words[script + 1 :])


def test_there_are_commands_of_every_script():
    scripts = {p.stem for p in ROOT.glob("*.py")} - {"common"}
    assert {re.search(r"(\w+)\.py", c)[1] for c in commands()} == scripts and len(commands()) > 15


def test_tables():
    """README's tables are what tests/results.py makes of tests/results/*.json, and it has all of the chosen marks."""
    assert results.with_tables(README) == README
    assert "<!-- tests/results.py: cpu, tier 1 -->\n| arm |" in README


def test_results_say_how_they_were_made():
    """Each kept run has the command that results.py would start for it, the last epoch's kNN, and its probe."""
    files = sorted(p for p in results.KEPT.glob("*.json") if p.stem.split("-", 1)[1] in results.ARMS)
    assert files
    for file in files:
        budget, arm = file.stem.split("-", 1)
        for seed, record in results.kept_runs(budget, arm).items():
            assert record["command"] == results.command(budget, arm, seed)
            if asked := re.search(r"--epochs (\d+)", record["command"]):
                assert record["epochs"][-1]["epoch"] == int(asked[1])
            assert all(0 < value < 100 for value in results.scores(record).values())


def test_gain_is_paired(tmp_path, monkeypatch):
    """A gain compares runs of the same seed only, and its spread is that of the differences."""
    monkeypatch.setattr(results, "KEPT", tmp_path)
    for arm, values in {"moco": {0: 40, 1: 50, 5: 99}, "jcl": {0: 42, 1: 54, 2: 10}}.items():
        for seed, value in values.items():
            epochs = [dict(epoch=6, knn20_top1=value, knn200_top1=value, std=0.5)]
            results.keep("cpu", arm, seed, dict(command="", epochs=epochs, linear_top1=value - 1))
    assert "| 2 | 45.0 → 48.0 | +3.0 ± 1.4 | 44.0 → 47.0 | +3.0 ± 1.4 |" in results.front("cpu")
    (row,) = (line for line in results.table("cpu", 1).splitlines() if "| JCL," in line)
    assert "| 3 | 35.3 ± 22.7 |" in row and row.count("+3.0 ± 1.4") == 2
    text = "a\n<!-- tests/results.py: cpu, front -->\nold\n<!-- end -->\nb"
    assert results.with_tables(text) == text.replace("old", results.front("cpu"))


def test_code_lines():
    for name, lines in re.findall(r"`(\w+\.py)` (\d+)[,.]", README.split("Code lines:")[1].split("\n")[0]):
        assert code_lines(Path(ROOT, name))[0] == int(lines), name
