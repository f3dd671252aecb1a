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
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("two"), "-m torch.distributed.run --standalone --nproc_per_node=2")


def test_the_simulation_sees_what_is_wrong(one):
    seen = one["noticed"]
    assert "aten.add.Tensor on tensors of both devices" in seen["mixed"][0]
    assert len(seen) == 6 and all(len(lines) == 1 for lines in seen.values()), seen


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_on_a_device(one, two, case):
    assert one[case]["waits"] == {}
    assert 20 < one[case]["launches"] <= 60  # to color a view: a GPU starts some 100,000 operations per second
    for found in (one[case], two[case]):
        cpu, sim = found["cpu"], found["sim"]
        assert [record["epoch"] for record in sim] == [1, 2]
        assert sim[0]["grad_norm"] == pytest.approx(cpu[0]["grad_norm"], rel=1e-2, abs=1e-3)  # later, see gpu_check.py
        for name in ("loss", "std", "rank"):
            assert sim[0][name] == pytest.approx(cpu[0][name], rel=1e-2, abs=1e-3)
            assert sim[1][name] == pytest.approx(cpu[1][name], rel=5e-2, abs=1e-3)


@pytest.mark.parametrize("case", EVALUATIONS)
def test_an_evaluation_is_the_same_on_a_device(one, two, case):
    assert one[case]["waits"] == {}  # kNN and the probe in seconds have no steps that could wait
    for found in (one[case], two[case]):
        assert found["sim"] == pytest.approx(found["cpu"], abs=7)  # two of 32 images may turn by rounding
