"""The tools that other pages or users rely on; test_figures, test_results and test_device have the others."""

import subprocess
import sys

import check_images
import diff_mains
import gpu_check
import numpy as np
import pytest
from conftest import ROOT
from PIL import Image


def test_readme_shows_the_diff_of_two_loops():
    _, _, rest = (ROOT / "README.md").read_text().partition("<!-- tests/tools/diff_mains.py -->\n")
    lines = diff_mains.difference("moco_jointcrop.py", "jcl.py", loop=True)
    assert rest.partition("<!-- end -->")[0].split("\n")[:-1] == ["```diff", *lines, "```"]


def test_a_diff_is_of_code_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(diff_mains, "ROOT", tmp_path)
    for name, step, remark in (("one.py", "a()", "# one"), ("two.py", "b('#')", "# another")):
        loop = f"    for epoch in range(2):  {remark}\n        {remark}\n\n        {step}  {remark}\n"
        (tmp_path / name).write_text(f'def main():\n    """{name}\n\n    differs.\n    """\n    x = "{name}"\n{loop}')
    heads = ["--- one.py", "+++ two.py"]
    of_loop = [*heads, "@@ -1,2 +1,2 @@", "     for epoch in range(2):", "-        a()", "+        b('#')"]
    assert diff_mains.difference("one.py", "two.py", loop=True) == of_loop
    assert len(diff_mains.difference("one.py", "two.py")) == len([*of_loop, "def main", "-", "+"])
    assert diff_mains.difference("one.py", "one.py") == []


def test_bad_images_are_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_images.py", str(tmp_path)])
    for name in ("good.png", "bad.png"):
        Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "bad.png").write_bytes((tmp_path / "bad.png").read_bytes()[:40])
    with pytest.raises(SystemExit) as stop:
        check_images.main(check_images.parse_args())
    said = capsys.readouterr().out
    assert stop.value.code == 1 and str(tmp_path / "bad.png") in said and "good.png" not in said


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [600, 1])
def test_the_check_for_gpus_runs_on_a_cpu(seconds):
    """With time, all checks are right but those that need a GPU; without, it says that nothing is known."""
    command = [sys.executable, gpu_check.__file__, "--device", "cpu", "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    verdicts = {line.split(":")[0] for line in done.stdout.splitlines()[1:] if line[0] != " "}
    passed = {f"PASS {name}" for name in ("loader", "collectives", "numbers", "evaluations", "group")}
    without = {f"SKIP {name}" for name in ("waits", "recipes", "compiled")} | {"VERDICT"}
    expected = passed | without if seconds > 1 else {name.replace("PASS", "FAIL") for name in passed} | without
    assert (done.returncode, verdicts) == (int(seconds == 1), expected), done.stdout + done.stderr
