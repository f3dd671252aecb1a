"""Runs that are stopped, killed and continued end as undisturbed ones: the same last.pt and records, bit for bit."""

import functools
import itertools
import subprocess
import sys

import numpy as np
import pytest
import tiny
from conftest import EACH_MODEL, QUEUES, slow_but
from tiny import FLAGS, assert_same_run, contents, epochs_of, life, load, processes, records, refused, run

import common

pytestmark = pytest.mark.usefixtures("_tiny")

JCL = [*FLAGS, *"--epochs 3 --arch resnet_nano".split()]
MORE = dict(jcl=" --arch resnet_nano", clim=" --clim-start 1 --refresh-every 2 --num-clusters 4")
CASES = [f"{method} {flags}".strip() + MORE.get(method, "") for method, flags in EACH_MODEL]
SCENARIOS = {  # flags of all calls; then of each but the last its end (see tiny.strike) and the epochs of last.pt then
    "in an epoch": ("", [("step 2", None), ("step 6", 1), ("step 4", 1), ("step 5", 2)]),
    "in its kNN": ("", [("knn 1", 1), ("knn 1", 1), ("knn 2", 2), ("knn 2", 3), ("knn 1", 3)]),
    "two workers": ("--workers 2", [("step 6", 1)]),
    "in CLIM's choice": ("--knn-every 0", [("choice 1", 1), ("choice 1", 1)]),
}
DISTURBED = [pair for pair in itertools.product(CASES, SCENARIOS) if "CLIM" not in pair[1] or "clim" in pair[0]]
QUICK = [("jcl --arch resnet_nano", "in an epoch"), ("jcl --arch resnet_nano", "in its kNN")]


@pytest.fixture(scope="module")
def straight(_tiny, tmp_path_factory):
    """A function: words -> the folder of the undisturbed run of three epochs, made once."""

    @functools.cache
    def folder(words="jcl --arch resnet_nano"):
        (method, *flags), out = words.split(), tmp_path_factory.mktemp("straight") / "run"
        run(method, out, "--epochs", 3, *flags)
        return out

    return folder


@pytest.mark.parametrize("case, scenario", slow_but(QUICK, DISTURBED))
def test_a_disturbed_run_ends_as_an_undisturbed_one(straight, tmp_path, case, scenario):
    (flags, ends), (method, *more) = SCENARIOS[scenario], case.split()
    words = [*FLAGS, "--epochs", "3", *more, *flags.split(), "--out", tmp_path]
    for moment, epochs in ends:
        status, said = life(method, words, moment)
        assert (status, epochs_of(tmp_path)) == (130, epochs), said
    assert life(method, words)[0] == 0
    assert_same_run(straight(f"{case} {flags}".replace("--workers 2", "").strip()), tmp_path)


def test_ended_at_each_moment_in_turn(straight, tmp_path):
    """The n-th life ends at its n-th step, write, flush, renaming or kNN, until one lasts. last.pt is always whole."""
    for number in itertools.count(1):
        status, said = life("jcl", [*JCL, "--out", tmp_path], f"anything {number}")
        if status == 0:
            break
        assert status == 130 and epochs_of(tmp_path) in (None, 1, 2, 3), said
    assert number > 15  # all moments of a first epoch
    assert_same_run(straight(), tmp_path)


def lives(out, method, world, moment=""):
    """Run a method in some processes, of which the first is killed at a moment. Return their exit statuses."""
    each = [(method, [*FLAGS, "--out", out], moment if rank == 0 else "") for rank in range(world)]
    return [status for status, *_ in processes(f"{out}-log", tiny.play, each)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["jcl", "clim", "patchmix"])
@pytest.mark.parametrize("world", [1, 2])
def test_killed(tmp_path, method, world):
    assert lives(tmp_path / "straight", method, world) == [0] * world
    for moment in ("step 6", "save 8"):
        assert lives(tmp_path / "run", method, world, moment)[0] == -9 and epochs_of(tmp_path / "run") == 1
    assert lives(tmp_path / "run", method, world) == [0] * world
    assert_same_run(tmp_path / "straight", tmp_path / "run")


@pytest.mark.slow
def test_torchrun_restarts_what_is_killed(tmp_path):
    lives(tmp_path / "straight", "jcl", 2)
    launch = "-m torch.distributed.run --standalone --nproc_per_node=2 --max-restarts=1".split()
    line = [sys.executable, *launch, tiny.__file__, "jcl", "step 6", *FLAGS, "--out", str(tmp_path / "run")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "after epoch 1" in done.stdout, done.stderr
    assert_same_run(tmp_path / "straight", tmp_path / "run")


def test_what_a_run_left_before_its_first_epoch_was_saved(straight, tmp_path, capsys):
    """The same command begins anew and removes *.tmp. Another one is refused."""
    life("jcl", [*JCL, "--out", tmp_path], "save 8")
    assert {"backbone.pt", "config.json", "metrics.jsonl"} < {path.name for path in tmp_path.iterdir()}
    (tmp_path / "last.pt.1.tmp").write_bytes(b"half")  # of another process
    assert epochs_of(tmp_path) is None
    assert "no last.pt" in refused(capsys, run, "jcl", tmp_path, *JCL, "--lr", "0.5")
    run("jcl", tmp_path, *JCL)
    assert not list(tmp_path.glob("*.tmp"))
    assert_same_run(straight(), tmp_path)


def test_a_damaged_checkpoint_is_told_and_left_alone(straight, tmp_path, capsys):
    """One that was kept takes its place. What is lost or spoilt beside it is written anew, and a finished run stays."""
    life("jcl", [*JCL, "--keep-every", 1, "--out", tmp_path], "step 6")
    last, data = tmp_path / "last.pt", bytearray((tmp_path / "last.pt").read_bytes())
    data[len(data) // 2] ^= 1  # a bit of a weight
    last.write_bytes(data)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\x00\n[1]\nnull\n")
    (tmp_path / "backbone.pt").unlink()
    before = contents(tmp_path)
    assert str(last) in refused(capsys, run, "jcl", tmp_path, *JCL) and contents(tmp_path) == before
    (tmp_path / "epoch-0001.pt").rename(last)
    assert "after epoch 1" in run("jcl", tmp_path, *JCL)
    assert_same_run(straight(), tmp_path)
    before = contents(tmp_path)
    assert "finished" in run("jcl", tmp_path, *JCL) and contents(tmp_path) == before


def test_resume_begins_another_folder(straight, tmp_path):
    """With --resume FILE: the same weights and records. The same command again goes on in --out."""
    source = straight("jcl --arch resnet_nano --keep-every 1")
    before, words = contents(source), [*JCL, "--resume", source / "epoch-0001.pt", "--out", tmp_path]
    for moment, epochs in (("step 2", None), ("step 6", 2), ("", 3)):
        life("jcl", words, moment)
        assert epochs_of(tmp_path) == epochs
    assert contents(source) == before
    assert_same_run(straight(), tmp_path)


@pytest.mark.parametrize("method", slow_but(["clim", "logo"], QUEUES))
def test_resume_with_other_images(method, begun, tmp_path, capsys):
    """And more epochs. An optimizer's flags hold over those of the other run, CLIM's positives are chosen anew."""
    words = ["--sgd-momentum", 0.5, "--resume", begun(method) / "last.pt", "--epochs"]
    assert "--epochs 1" in refused(capsys, run, method, tmp_path, *words, 1)
    images = common.ImageSet(np.random.default_rng(0).integers(0, 256, (52, 16, 16, 3), np.uint8))
    run(method, tmp_path, *words, 2, train=images)
    (first, second), state = records(tmp_path), load(tmp_path / "last.pt")
    assert [first] == records(begun(method)) and second["epoch"] == 2
    assert state["optimizer"]["param_groups"][0]["momentum"] == 0.5
    if method == "clim":
        assert state["positives"].shape[0] == 52 > state["positives"].max() and state["positives"].min() >= 0
