"""bench.py: every section makes its table. No time is judged."""

import bench
import pytest
import torch

QUICK = ["--rounds", "1", "--batch-size", "16"]
SECTIONS = {"loader": "", "positives": "--sizes 300 400", "knn": "--sizes 20"}


def rows_of(section, *flags):
    rows = bench.main([section, *QUICK, *flags])
    numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert numbers and torch.tensor(numbers).isfinite().all() and min(numbers) > 0
    return rows


@pytest.mark.parametrize("section", SECTIONS)
def test_sections(section, capsys):
    rows = rows_of(section, *SECTIONS[section].split())
    page = capsys.readouterr().out.splitlines()[-4 - len(rows) :]  # the command, the machine, and a table with its head
    assert page[0].startswith(f"python tests/tools/bench.py {section}") and page[3].count("|") == page[4].count("|")


@pytest.mark.slow
def test_steps():
    """Of two checkouts and flags, here twice the same."""
    rows = rows_of("steps", "--arch", "micro", "--against", str(bench.ROOT), "--over-flags", "")
    assert [row["method"] for row in rows] == [*bench.METHODS]


@pytest.mark.slow
def test_processes(tmp_path):
    bench.make_folder(tmp_path, 64)
    own = f"--dataset folder --data-dir {tmp_path} --arch resnet_micro --image-size 32"
    assert [row["method"] for row in rows_of("processes", "--methods", "jcl", f"--flags={own}")] == ["jcl"]


@pytest.mark.slow
def test_needs():
    found = bench.needs_of("jcl --arch resnet_micro --image-size 32 --num-keys 3 --queue 64")
    assert found["live"] > 4 * 3 * 32 * 32 * 4 and found["operations"] > 0  # its views alone take as much
    assert found["optimizer"] == found["gradients"] and found["weights"] == pytest.approx(
        2 * found["gradients"], rel=0.05
    )
    assert found["queue"] == 64 * 128 * 4
