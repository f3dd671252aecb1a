"""Scripts on a simulated device: nothing mixes devices, no step waits, the numbers are the CPU's. Also GPU tools."""

import json
import os
import subprocess
import sys

import bench
import gpu_check
import pytest
import simulated_device
import torch

DEVICES = hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")
pytestmark = pytest.mark.slow
on_devices = pytest.mark.skipif(not DEVICES, reason="this torch has no devices made of Python")


def lines_of(tool, *words, launch=""):
    """What a tool prints in a process of its own or, with torchrun's words, two; without the first line."""
    command = [sys.executable, *launch.split(), tool.__file__, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()[1:]


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """What simulated_device.py finds in one process, and in two."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    lines_of(simulated_device, folders[0])
    lines_of(simulated_device, folders[1], launch="-m torch.distributed.run --standalone --nproc_per_node=2")
    return [json.loads((folder / "found.json").read_text()) for folder in folders]


@on_devices
def test_the_simulation_sees_what_is_wrong(one_and_two):
    seen = one_and_two[0]["noticed"]
    assert "aten.add.Tensor on tensors of both devices" in seen["mixed"][0]
    assert len(seen) == 6 and all(len(lines) == 1 for lines in seen.values()), seen


@on_devices
@pytest.mark.parametrize("case", simulated_device.CASES)
def test_a_run_is_the_same_on_a_device(one_and_two, case):
    one, two = (found[case] for found in one_and_two)
    assert one["waits"] == {}
    assert 20 < one["launches"] <= 60  # to color a view: a GPU starts some 100,000 operations per second
    for found in (one, two):
        cpu, sim = found["cpu"], found["sim"]
        assert [record["epoch"] for record in sim] == [1, 2]
        assert sim[0]["grad_norm"] == pytest.approx(cpu[0]["grad_norm"], rel=1e-2, abs=1e-3)  # later, see gpu_check.py
        for name in ("loss", "std", "rank"):
            assert sim[0][name] == pytest.approx(cpu[0][name], rel=1e-2, abs=1e-3)
            assert sim[1][name] == pytest.approx(cpu[1][name], rel=5e-2, abs=1e-3)


@on_devices
@pytest.mark.parametrize("case", gpu_check.EVALUATIONS)
def test_an_evaluation_is_the_same_on_a_device(one_and_two, case):
    one, two = (found[case] for found in one_and_two)
    assert one["waits"] == {}  # kNN and the probe in seconds have no steps that could wait
    for found in (one, two):
        assert found["sim"] == pytest.approx(found["cpu"], abs=7)  # two of 32 images may turn by rounding


def test_a_step_is_measured():
    lines = lines_of(bench, *"steps --methods jcl --steps 2".split())
    speed = {line[:35].strip(): float(line[35:].split()[0]) for line in lines}
    assert 0 < speed["jcl: whole step"] < speed["jcl: loading"]


@on_devices
def test_operations_of_a_step_are_counted():
    """JCL has every part but mixing. The test of runs bounds those of color. SGD is fused, no loop over parameters."""
    rows = {line[:35].strip(): line[35:].split(" and ") for line in lines_of(bench, "device", "--methods", "jcl")[1:]}
    counts = {name: [int(word.replace(",", "")) for word in words] for name, words in rows.items()}
    *parts, whole, on_gpus = counts
    assert counts[whole] == counts[on_gpus] == [sum(counts[name][i] for name in parts) for i in (0, 1)]
    assert all(counts[name][0] > 0 for name in parts if name != "mix")


def test_the_check_for_gpus_runs_on_a_cpu():
    lines = lines_of(gpu_check, *"--device cpu --seconds 900".split())
    verdicts = {line.split(":")[0] for line in lines if line[0] not in " ["}  # torch 2.8 prints "[Gloo] ..."
    expected = "PASS numbers, PASS evaluations, PASS group, SKIP waits, SKIP recipes, SKIP compiled, VERDICT"
    assert verdicts == {*expected.split(", ")}
