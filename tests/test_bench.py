"""tests/bench.py: every section makes its table, and its plain form is the project's function; no time is looked at."""

import bench
import pytest
import torch

import common

QUICK = ["--rounds", "1", "--batch-size", "16"]
SMALL = {"loader": [], "positives": ["--sizes", "300", "400"], "knn": ["--sizes", "300"]}


def rows_of(section, *flags):
    rows = bench.main([section, *QUICK, *flags])
    assert all(row.keys() == rows[0].keys() for row in rows)
    numbers = [v for row in rows for v in row.values() if isinstance(v, float)]
    assert numbers and torch.tensor(numbers).isfinite().all() and min(numbers) > 0
    return rows


@pytest.mark.parametrize("section", SMALL)
def test_sections(section, capsys):
    rows = rows_of(section, *SMALL[section])
    assert capsys.readouterr().out.count("\n") == 4 + len(rows)


@pytest.mark.slow
def test_steps():
    """Of two checkouts, here twice the same."""
    rows = rows_of("steps", "--arch", "micro", "--against", str(bench.ROOT))
    assert [row["method"] for row in rows] == [*bench.METHODS]


@pytest.mark.slow
def test_processes(tmp_path):
    bench.make_folder(tmp_path, 64)
    own = f"--dataset folder --data-dir {tmp_path} --arch resnet_micro --image-size 32"
    assert [row["method"] for row in rows_of("processes", "--methods", "jcl", f"--flags={own}")] == ["jcl"]


def test_plain_knn():
    draws = torch.Generator().manual_seed(0)
    x, y, queries = torch.randn(300, 8, generator=draws), torch.arange(300) % 3, torch.randn(250, 8, generator=draws)
    for k in (1, 20, 300):
        expected = common.knn_predict(x, y, queries, k, 0.07, 3)
        assert torch.equal(bench.plain_knn(x, y, queries, k, 0.07, 3), expected)
