"""The tools that other pages or users rely on; test_results, test_device and test_readme have the others."""

import subprocess
import sys

import bench
import check_images
import gpu_check
import pytest
from tiny import write_tree


def test_bad_images_are_listed(tmp_path, capsys):
    write_tree(tmp_path, ["train/a", "train/b", "val/a"], count=2)
    for name in ("train/b/1.png", "val/a/0.png"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:40])
    with pytest.raises(SystemExit) as stop:
        check_images.main(str(tmp_path))
    *lines, summary = capsys.readouterr().out.splitlines()
    assert stop.value.code == 1 and summary == "6 images, 2 cannot be read"
    for line, name in zip(lines, ("train/b/1.png", "val/a/0.png"), strict=True):
        assert str(tmp_path / name) in line


def lines_of(tool, words):
    """What a tool prints in a process of its own, without the first line."""
    done = subprocess.run([sys.executable, tool.__file__, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[1:]


@pytest.mark.slow
def test_a_step_is_measured():
    lines = lines_of(bench, "steps --methods jcl --steps 2")
    speed = {line[:35].strip(): float(line[35:].split()[0]) for line in lines}
    assert 0 < speed["jcl: whole step"] < speed["jcl: loading"]


@pytest.mark.slow
def test_operations_of_a_step_are_counted():
    """JCL has every part but mixing. test_device.py bounds those of color. SGD is fused, not a loop over parameters."""
    rows = {line[:35].strip(): line[35:].split(" and ") for line in lines_of(bench, "device --methods jcl")[1:]}
    counts = {name: [int(word.replace(",", "")) for word in words] for name, words in rows.items()}
    *parts, whole, on_gpus = counts
    assert counts[whole] == counts[on_gpus] == [sum(counts[name][i] for name in parts) for i in (0, 1)]
    assert all(counts[name][0] > 0 for name in parts if name != "mix")


@pytest.mark.slow
def test_the_check_for_gpus_runs_on_a_cpu():
    lines = lines_of(gpu_check, "--device cpu --seconds 900")
    verdicts = {line.split(":")[0] for line in lines if line[0] != " "}
    passed = {f"PASS {name}" for name in ("numbers", "evaluations", "group")}
    skipped = {f"SKIP {name}" for name in ("waits", "recipes", "compiled")}
    assert verdicts == passed | skipped | {"VERDICT"}
