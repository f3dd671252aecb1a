"""The tools that other pages or users rely on; test_figures, test_results, test_device, test_readme have the others."""

import subprocess
import sys

import check_images
import gpu_check
import numpy as np
import pytest
from PIL import Image


def test_bad_images_are_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_images.py", str(tmp_path)])
    for name in ("good.png", "bad.png"):
        Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "bad.png").write_bytes((tmp_path / "bad.png").read_bytes()[:40])
    with pytest.raises(SystemExit) as stop:
        check_images.main()
    said = capsys.readouterr().out
    assert stop.value.code == 1 and str(tmp_path / "bad.png") in said and "good.png" not in said


@pytest.mark.slow
def test_the_check_for_gpus_runs_on_a_cpu():
    command = [sys.executable, gpu_check.__file__, "--device", "cpu", "--seconds", "600"]
    done = subprocess.run(command, capture_output=True, text=True)
    verdicts = {line.split(":")[0] for line in done.stdout.splitlines()[1:] if line[0] != " "}
    passed = {f"PASS {name}" for name in ("loader", "collectives", "numbers", "evaluations", "group")}
    skipped = {f"SKIP {name}" for name in ("waits", "recipes", "compiled")}
    assert done.returncode == 0 and verdicts == passed | skipped | {"VERDICT"}, done.stdout + done.stderr
