"""Every script on a simulated device: nothing mixes devices, no step waits for it, and the numbers are the CPU's."""

import json
import os
import subprocess
import sys

import pytest
import simulated_device
import torch
from gpu_check import EVALUATIONS
from simulated_device import CASES

DEVICES = hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DEVICES, reason="this torch has no devices made of Python")]


def simulate(folder, launch=""):
    """What simulated_device.py found, in one process or, with torchrun's words, two."""
    command = [sys.executable, *launch.split(), simulated_device.__file__, str(folder)]
    how = dict(env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1200)
    done = subprocess.run(command, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("two"), "-m torch.distributed.run --standalone --nproc_per_node=2")


def epoch(records, number):
    names = ["loss", "std", "rank"] + ["grad_norm"] * (number == 0)  # later, rounding moves it far: see gpu_check.py
    return {name: records[number][name] for name in names}


def test_the_simulation_sees_what_is_wrong(one):
    seen = one["noticed"]
    assert "aten.add.Tensor on tensors of both devices" in seen["mixed"][0]
    assert len(seen) == 6 and all(len(lines) == 1 for lines in seen.values()), seen


@pytest.mark.parametrize("case", CASES | EVALUATIONS)
def test_no_step_waits_for_the_device(one, case):
    assert one[case]["waits"] == {}  # kNN and the probe in seconds have no such steps


@pytest.mark.parametrize("case", CASES)
def test_few_operations_color_a_view(one, case):
    """A GPU starts some 100,000 per second, and each view of a step needs its own."""
    assert 20 < one[case]["launches"] <= 60


@pytest.mark.parametrize("processes", ["one", "two"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_on_a_device(request, processes, case):
    found = request.getfixturevalue(processes)[case]
    assert [r["epoch"] for r in found["sim"]] == [1, 2]
    for number, rounding in ((0, 1e-2), (1, 5e-2)):
        assert epoch(found["sim"], number) == pytest.approx(epoch(found["cpu"], number), rel=rounding, abs=1e-3)


@pytest.mark.parametrize("processes", ["one", "two"])
@pytest.mark.parametrize("case", EVALUATIONS)
def test_an_evaluation_is_the_same_on_a_device(request, processes, case):
    found = request.getfixturevalue(processes)[case]
    for name, values in found["cpu"].items():
        assert found["sim"][name] == pytest.approx(values, abs=7)  # two of 32 images may turn by rounding
