"""The runs behind the tables, and the tables."""

import importlib
import re

import pytest
import results
from conftest import ROOT


@pytest.mark.parametrize("arm", results.ARMS)
def test_every_arm_is_a_command_that_its_script_takes(arm):
    script, *words = results.command(arm, seed=0).split()
    args = importlib.import_module(script.removesuffix(".py")).parse_args(words)
    assert (args.dataset, args.seed, args.batch_size) == ("cifar10", 0, 128)


@pytest.mark.parametrize("page", results.PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables(page):
    """The tables are what tests/tools/results.py makes of tests/results/*.json, and none is empty."""
    text = page.read_text()
    assert results.with_tables(text) == text
    rows = re.findall(r"<!-- tests/tools/results.py: .* -->\n\| .*\n\| ---.*\n(.*)", text)
    assert len(rows) == text.count("<!-- tests/tools/results.py: ") and all(row.startswith("| ") for row in rows)


def test_results_say_how_they_were_made():
    """Each kept run has the command that results.py would start for it, and the last epoch's kNN."""
    for arm in results.ARMS:
        for seed, record in results.kept(arm).items():
            assert record["command"] == results.command(arm, seed)
            if asked := re.search(r"--epochs (\d+)", record["command"]):
                assert record["epochs"][-1]["epoch"] == int(asked[1])


def test_gain_is_paired(tmp_path, monkeypatch):
    """A gain compares runs of the same seed only, and its spread is that of the differences."""
    monkeypatch.setattr(results, "KEPT", tmp_path)
    for arm, values in {"moco": {0: 40, 1: 50, 5: 99}, "jcl": {0: 42, 1: 54, 2: 10}}.items():
        for seed, value in values.items():
            epochs = [dict(epoch=6, knn20_top1=value, knn200_top1=value, std=0.5)]
            record = dict(command="", epochs=epochs, linear_top1=value - 1, minutes=10 + seed)
            results.keep_run(arm, seed, record)
    assert "| 2 | 45.0 → 48.0 | +3.0 ± 1.4 | 44.0 → 47.0 | +3.0 ± 1.4 | x 2 |" in results.front()
    assert "| JCL beats MoCo v2 | +3.0 ± 1.4 | +3.0 ± 1.4 | 2 |" in results.claims()
    assert "| JCL, `jcl.py` | 3 | 35.3 ± 22.7 |" in results.table()


@pytest.mark.parametrize(
    ("gains", "said"),
    [([0.6, 2.0], "shown"), ([0.6, 0.4], "not shown"), ([-0.6, -3.0], "the opposite"), ([-3.0, 0.6], "not shown")],
)
def test_a_verdict_follows_from_all_gains(gains, said):
    assert results.verdict(gains) == said
