"""Scripts on a simulated device: nothing mixes devices, no step waits, the numbers are the CPU's. Also GPU tools."""

import collections
import contextlib
import importlib
import json
import os
import subprocess
import sys
from unittest import mock

import bench
import gpu_check
import pytest
import tiny
import torch
from simulated_device import DEVICE, launches, simulated, waits

import common

pytestmark = pytest.mark.slow
CASES = gpu_check.CASES | {
    "JointBlur, local crops": "moco_jointcrop --queue 64 --joint both --local-crops 2",
    "CLIM, two sizes": "clim --queue 64 --image-size 32 24 --clim-start 1 --num-clusters 4",
    "LoGo, paper": "logo --queue 64 --variant paper",
}


def lines_of(tool, *words):
    """What a tool prints in a process of its own, without the first line."""
    command, environment = [sys.executable, tool.__file__, *words], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()[1:]


def on_both(name, case, folder):
    """The records of a run or the scores of an evaluation, on the device and on the CPU.

    Also what the steps wait for, and the numbers of operations that augment a view. One process ends its run in the
    second epoch, and resumes it.
    """
    module, found = importlib.import_module(case.split()[0]), dict(waits=collections.Counter(), launches=[])
    augment = getattr(module, "augment", None)  # evaluations have none

    def counted(*words):
        launches.clear()
        views = augment(*words)
        found["launches"].append(launches.total())
        return views

    for device, place in ("device", simulated()), ("cpu", contextlib.nullcontext()):
        counting = mock.patch.object(module, "augment", counted, create=True)
        words = case, folder / f"{name} {device}"
        with place, counting, bench.watched(waits.clear, lambda: found["waits"].update(waits)):
            if name in gpu_check.EVALUATIONS:
                found[device] = gpu_check.evaluate(*words, folder / "PatchMix device", "--device", "cpu")
                continue
            if common.rank_and_world()[1] == 1:
                gpu_check.train_until(4, *words, "--device", "cpu")  # the second step of the second epoch
            found[device] = gpu_check.train(*words, "--device", "cpu")
    return found


def all_on_both(folder):
    """Print what `on_both` finds, by name, as one of several processes."""
    common.init_distributed("cpu")
    cases = CASES | gpu_check.EVALUATIONS
    print(json.dumps({name: on_both(name, case, folder) for name, case in cases.items()}))


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """What `all_on_both` prints in one process, and in two."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    said = [tiny.succeed(f / "log", all_on_both, [(f,)] * world, seconds=1200) for world, f in enumerate(folders, 1)]
    return [json.loads(lines[0].splitlines()[-1]) for lines in said]


@pytest.mark.parametrize("what, wrong", [
    ("aten._local_scalar_dense.default", lambda x: x.sum().item()),
    ("aten.nonzero.default", lambda x: x.nonzero()),
    ("an index of the CPU, or a mask", lambda x: x[x > 0]),
    ("a copy that blocks", lambda x: x.cpu()),
    ("a copy that blocks", lambda x: torch.ones(3).to(DEVICE)),
    ("a copy that blocks", lambda x: torch.tensor([1.0], device=DEVICE)),
])  # fmt: skip
def test_the_simulation_sees_what_waits(what, wrong):
    with simulated():
        x = torch.ones(3).to(DEVICE, non_blocking=True)
        waits.clear()
        wrong(x)
    assert waits == {what: 1}


def test_the_simulation_sees_mixed_devices():
    with simulated(), pytest.raises(RuntimeError, match="aten.add.Tensor on tensors of both devices"):
        torch.ones(3).to(DEVICE) + torch.ones(3)


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_on_a_device(one_and_two, case):
    one, two = (found[case] for found in one_and_two)
    assert one["waits"] == {}
    assert 20 < max(one["launches"]) <= 60  # to augment a view: a GPU starts some 100,000 operations per second
    for (first, second), (expected_first, expected_second) in ((found["device"], found["cpu"]) for found in (one, two)):
        assert gpu_check.differ(first, expected_first, 1e-2, ("loss", "grad_norm", "std", "rank")) == []
        assert gpu_check.differ(second, expected_second, 5e-2, ("loss", "std", "rank")) == []


@pytest.mark.parametrize("case", gpu_check.EVALUATIONS)
def test_an_evaluation_is_the_same_on_a_device(one_and_two, case):
    one, two = (found[case] for found in one_and_two)
    assert one["waits"] == {}  # kNN and the linear probe have no steps that could wait
    for found in (one, two):
        assert found["device"] == pytest.approx(found["cpu"], abs=7)  # two of 32 images may change by rounding


def test_a_step_is_measured():
    lines = lines_of(bench, *"steps --methods jcl --steps 2".split())
    speed = {line[:35].strip(): float(line[35:].split()[0]) for line in lines}
    assert 0 < speed["jcl: whole step"] < speed["jcl: loading"]


def test_operations_of_a_step_are_counted():
    """JCL has all parts except mixing. SGD is fused, without a loop over parameters."""
    lines = [line.strip() for line in lines_of(bench, "device", "--methods", "jcl")[1:]]
    counts = {line[:33].strip(): [int(word.replace(",", "")) for word in line[33:].split(" and ")] for line in lines}
    whole = counts.pop("whole step")
    assert whole == [sum(count) for count in zip(*counts.values(), strict=True)]
    assert all(counts[name][0] > 0 for name in counts if name != "mix") and counts["optimizer"] == [1, 0]


def test_the_check_for_gpus_runs_on_a_cpu():
    lines = lines_of(gpu_check, *"--device cpu --seconds 900".split())
    verdicts = {line.split(":")[0] for line in lines if line[0] not in " ["}  # torch 2.8 prints "[Gloo] ..."
    expected = "PASS numbers, PASS evaluations, PASS group, SKIP waits, SKIP recipes, SKIP compiled, VERDICT"
    assert verdicts == {*expected.split(", ")}
