"""What a machine does to a run: writes that fail, two runs at once, numbers that are not finite, damaged images."""

import errno
import itertools
import os
import shutil
import signal
import time

import pytest
import tiny
import torch
from conftest import JCL_AT_ONCE, METHODS
from tiny import FLAGS, assert_same_run, contents, load, processes, records, refused, run, unequal
from torch.optim.optimizer import register_optimizer_step_post_hook

import common

_tiny, begun = tiny._tiny, tiny.begun
pytestmark = pytest.mark.usefixtures("_tiny")
QUIET = ["--knn-every", "0"]


@pytest.fixture
def copies(begun, tmp_path):
    """A function: method -> two copies of its run, one to be disturbed and one to be compared with."""
    return lambda method: [shutil.copytree(begun(method), tmp_path / name) for name in ("run", "whole")]


def saved(out):
    return {name: value for name, value in load(out / "last.pt").items() if name != "config"}


# ---------------------------------------------------------------------- writes


@pytest.mark.slow
@pytest.mark.parametrize("name, number", [("save", 1), ("save", 2), ("fsync", 3), ("fsync", 5), ("replace", 4)])
def test_a_write_that_fails_is_one_line_and_costs_nothing(copies, monkeypatch, capsys, name, number):
    """In the middle, or when it is flushed or renamed. The run goes on from what is there."""
    out, whole = copies("jcl")
    target, calls = torch if name == "save" else os, itertools.count(1)
    original, before = getattr(target, name), saved(out)

    def failing(*args, **options):
        if next(calls) >= number:
            if name == "save":
                args[1].write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, failing)
        line = refused(capsys, run, "jcl", out, *QUIET)
    assert "cannot write" in line and "No space left" in line and saved(out)["step"] in (before["step"], 8)
    for folder in (out, whole):
        run("jcl", folder, *QUIET)
    assert_same_run(whole, out)


# ----------------------------------------------------------------------- locks


@pytest.mark.skipif(common.fcntl is None, reason="no such locks here")
def test_two_runs_at_once_in_one_folder(tmp_path, capsys):
    """The lock ends with the process, however that ends."""
    fork = torch.multiprocessing.get_context("fork")
    ready = fork.Event()
    other = fork.Process(target=lambda: [common.claim_folder(tmp_path), ready.set(), time.sleep(60)])
    other.start()
    assert ready.wait(60)
    before = contents(tmp_path)
    assert "another run is at work" in refused(capsys, run, "jcl", tmp_path, "--max-steps", "1")
    assert contents(tmp_path) == before
    other.kill()
    other.join()
    assert "stopped at step 1" in run("jcl", tmp_path, "--max-steps", "1")


# ---------------------------------------------------------- not finite numbers


@pytest.mark.parametrize("what, more", [
    ("loss", ""), ("loss", "a request"), ("loss", "--max-steps 6"), ("weights", "--max-steps 6")
])  # fmt: skip
@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_what_is_not_finite_is_never_saved(copies, monkeypatch, capsys, method, what, more):
    """Whatever comes next: an epoch's end, a stop. The run goes on from before that step.

    A step with a finite loss and gradient can throw the weights out of range. Only the next loss would show it.
    """
    out, whole = copies(method)
    normalize, before, calls = common.normalize, saved(out), itertools.count(1)

    def spoiled(*args):
        if more == "a request" and next(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        return normalize(*args) * float("nan")

    def thrown(optimizer, *_):
        optimizer.param_groups[0]["params"][0].data.view(-1)[0] = float("inf")

    with monkeypatch.context() as patch:
        if what == "loss":
            patch.setattr(common, "normalize", spoiled)
        hook = register_optimizer_step_post_hook(thrown if what == "weights" else lambda *_: None)
        try:
            flags = more.split() if more.startswith("--") else []
            assert "not finite" in refused(capsys, run, method, out, *QUIET, *flags)
        finally:
            hook.remove()
    assert unequal(saved(out), before) == []
    if method == "jcl":
        for folder in (out, whole):
            run(method, folder, *QUIET)
        assert_same_run(whole, out)


# -------------------------------------------------------------- two processes


def assert_one_line_of_all(ends, words):
    """One process ends with status 2 and says why. Another may be left waiting for it, and is ended."""
    lines = [line for _, _, error in ends for line in error.splitlines() if line.startswith("error: ")]
    assert 2 in [status for status, _, _ in ends] and len(lines) == 1 and words in lines[0], ends


@pytest.mark.slow
@pytest.mark.parametrize("change, word", [
    ("--lr 0.5", "--lr"), ("--data-dir missing --dataset patterns", "missing"), ("--max-steps 2", "differ"),
    ("--out new", "differ"),
])  # fmt: skip
def test_processes_that_disagree_end_in_one_line(copies, tmp_path, monkeypatch, change, word):
    monkeypatch.chdir(tmp_path)
    first = [*FLAGS, *QUIET, "--out", str(copies("jcl")[0])]
    ends = processes(tmp_path / "log", tiny.play, [("jcl", first), ("jcl", [*first, *change.split()])])
    assert_one_line_of_all(ends, word)


def damaged_play(script, argv):
    """As `tiny.play`, but the second process meets an image that cannot be used in its third batch."""
    make, batches = common.ViewDataset.__getitems__, []

    def damaged(self, keys):
        batches.append(keys)
        if len(batches) == 3 and common.rank_and_world()[0] == 1:
            raise common.BadImage("cannot read the image x.jpg")
        return make(self, keys)

    common.ViewDataset.__getitems__ = damaged
    tiny.play(script, argv)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_bad_image_of_one_process_costs_no_step(method, tmp_path):
    """All processes stop before the step that lacks it, and what was made is saved."""
    args = (method, [*FLAGS, *QUIET, "--out", str(tmp_path / "run")])
    ends = processes(tmp_path / "log", damaged_play, [args] * 2)
    assert_one_line_of_all(ends, "x.jpg")
    assert [status for status, _, _ in ends] == [2, 2]
    assert load(tmp_path / "run" / "last.pt")["step"] == 2


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(copies, tmp_path):
    out, _ = copies("jcl")
    argv = [*FLAGS, *QUIET, "--out", str(out)]
    ends = processes(tmp_path / "log", tiny.play, [("jcl", [*argv, "--max-steps", "6"])] * 2)
    assert [status for status, _, _ in ends] == [0, 0] and "at step 5" in ends[0][1], ends
    assert load(out / "last.pt")["step"] == 6
    run("jcl", out, *QUIET)
    assert [r["step"] for r in records(out)] == [4, 8]


# -------------------------------------------------------------- damaged images


@pytest.mark.parametrize("part, i, flags, left", [  # left: bytes of the file
    ("train", 9, "", -200), ("train", 9, "--workers 0", 30), ("test", 3, "--workers 0", 0),
    pytest.param("train", 9, "--workers 2", -200, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_damaged_image_stops_a_run_in_one_line(tmp_path, monkeypatch, capsys, part, i, flags, left):
    """At the start, where images are decoded at once; else when it is met, by a worker, too."""
    tiny.write_tree(tmp_path / "data", ["train/a", "train/b", "test/a", "test/b"], 8, (16, 16))
    if flags:
        monkeypatch.setattr(common, "IN_MEMORY", 0)
    path = sorted((tmp_path / "data" / part).rglob("*.png"))[i]
    path.write_bytes(path.read_bytes()[:left])
    words = ["--dataset", "patterns", "--data-dir", tmp_path / "data", *flags.split(), "--out", tmp_path / "run"]
    capsys.readouterr()
    assert tiny.life("jcl", [*FLAGS, "--batch-size", "4", *words])[0] == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and str(path) in error
    assert (tmp_path / "run").exists() == bool(flags)
    if flags:  # the steps before it are saved
        batches = [[row for _, row in batch] for batch in common.EpochSampler(16, 4, 0)]
        step = len(batches) if part == "test" else next(n for n, rows in enumerate(batches) if i in rows)
        assert load(tmp_path / "run" / "last.pt")["step"] == step
