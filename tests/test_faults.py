"""What a machine does to a run: writes that fail, values that are not finite, processes that differ, damaged images."""

import contextlib
import errno
import itertools
import os
import shutil

import numpy as np
import pytest
import tiny
import torch
from conftest import JCL_AT_ONCE
from tiny import FLAGS, assert_same_run, contents, epochs_of, load, processes, records, refused, run, unequal
from torch.optim.optimizer import register_optimizer_step_post_hook

import common

pytestmark = pytest.mark.usefixtures("_tiny")
QUIET = ["--knn-every", "0"]


@pytest.fixture
def copies(begun, tmp_path):
    """A function: method -> two copies of its run, one to be disturbed and one to be compared with."""
    return lambda method: [shutil.copytree(begun(method), tmp_path / name) for name in ("run", "whole")]


def assert_it_goes_on(method, out, whole):
    for folder in (out, whole):
        run(method, folder, *QUIET)
    assert_same_run(whole, out)


@pytest.mark.parametrize("name, number", [("save", 1), ("save", 2), ("fsync", 3), ("replace", 2)])
def test_a_write_that_fails_is_one_line_and_costs_an_epoch(copies, monkeypatch, capsys, name, number):
    """In the middle, or when it is flushed or renamed. last.pt stays, and the run goes on from it."""
    out, whole = copies("jcl")
    target, calls = torch if name == "save" else os, itertools.count(1)
    original, before = getattr(target, name), load(out / "last.pt")

    def failing(*args):
        if next(calls) < number:
            return original(*args)
        if name == "save":
            original(args[0], "/dev/full")  # torch's writer makes a RuntimeError of what follows
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(target, name, failing)
        line = refused(capsys, run, "jcl", out, *QUIET)
    assert f"cannot write {out}" in line
    assert unequal(load(out / "last.pt"), before) == [] and not list(out.glob("*.tmp"))
    assert_it_goes_on("jcl", out, whole)


@pytest.mark.parametrize("what", ["loss", "weights"])
@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_what_is_not_finite_is_never_saved(copies, monkeypatch, capsys, method, what):
    """The last epoch that was saved stays. The last step with a finite loss can throw the weights out of range."""
    out, whole = copies(method)
    color_views, before, steps = common.color_views, contents(out), itertools.count(1)

    def spoiled(*args):
        return [x * (float("nan") if next(steps) > 1 else 1) for x in color_views(*args)]

    def thrown(optimizer, *_):
        if next(steps) >= tiny.STEPS:
            optimizer.param_groups[0]["params"][0].data.view(-1)[0] = float("inf")

    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        if what == "loss":
            patch.setattr(common, "color_views", spoiled)
        else:
            stack.callback(register_optimizer_step_post_hook(thrown).remove)
        assert "not finite" in refused(capsys, run, method, out, *QUIET)
    assert contents(out) == before
    assert_it_goes_on(method, out, whole)


@pytest.mark.slow
@pytest.mark.parametrize("change, word", [
    ("--lr 0.5", "--lr"), ("--data-dir missing --dataset cifar10", "missing"), ("--out new", "differ"),
])  # fmt: skip
def test_processes_that_disagree_end_in_one_line(copies, tmp_path, monkeypatch, change, word):
    """One process ends with status 2 and says why. Another may be left waiting for it, and is ended."""
    monkeypatch.chdir(tmp_path)
    first = [*FLAGS, *QUIET, "--out", str(copies("jcl")[0])]
    ends = processes(tmp_path / "log", tiny.play, [("jcl", first), ("jcl", [*first, *change.split()])])
    (line,) = [line for _, _, error in ends for line in error.splitlines() if line.startswith("error: ")]
    assert 2 in [status for status, _, _ in ends] and word in line, ends


@pytest.mark.slow
@pytest.mark.parametrize("method", ["jcl", "patchmix"])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, method):
    """An epoch of one, one of two, one of one: the configuration is the same, and jcl.py's losses are those of one."""
    run(method, tmp_path / "whole", *QUIET, "--epochs", 3)
    for epoch, world in enumerate((1, 2, 1), 1):
        words, moment = [*FLAGS, *QUIET, "--epochs", 3, "--out", tmp_path / "run"], f"step {tiny.STEPS + 1}"
        ends = processes(tmp_path / "log", tiny.play, [(method, words, moment if epoch < 3 else "")] * world)
        assert epochs_of(tmp_path / "run") == epoch, ends
    found, wanted = ([r["loss"] for r in records(tmp_path / name)] for name in ("run", "whole"))
    assert np.isfinite(found).all() and (method == "patchmix" or found == pytest.approx(wanted, rel=5e-4))


@pytest.mark.parametrize("part, i, flags, left", [  # left: bytes of the file
    ("train", 9, "", -200), ("train", 9, "--workers 0", 30), ("test", 3, "--workers 0", 0),
    pytest.param("train", 9, "--workers 2", -200, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_damaged_image_is_one_line(tmp_path, monkeypatch, capsys, part, i, flags, left):
    """At the start, or when it is met. If the kNN meets it, the epoch is kept. Once it is mended, its kNN is made."""
    tiny.write_tree(tmp_path / "data", ["train/a", "train/b", "test/a", "test/b"], 8, (16, 16))
    if flags:
        monkeypatch.setattr(common, "IN_MEMORY", 0)
    path, out = sorted((tmp_path / "data" / part).rglob("*.png"))[i], tmp_path / "run"
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    words = [*FLAGS, *f"--batch-size 4 --patch-size 8 --dataset folder {flags} --data-dir".split(), tmp_path / "data"]
    for _ in range(2 if part == "test" else 1):
        assert str(path) in refused(capsys, tiny.play, "jcl", [*words, "--out", out])
        assert epochs_of(out) == (1 if part == "test" else None)
    path.write_bytes(whole)
    tiny.play("jcl", [*words, "--out", out])
    assert ["knn20_top1" in record for record in records(out)] == [True, True]
