"""Runs handle writes that fail, values that are not finite, processes that disagree, and damaged images."""

import argparse
import io
import os
import shutil
import sys
from unittest.mock import Mock

import pytest
import tiny
import torch
from conftest import JCL_AT_ONCE
from tiny import FLAGS, assert_same_run, contents, epochs_of, load, processes, records, refused, run, unequal

import common
import jcl

pytestmark = pytest.mark.usefixtures("_tiny")
QUIET, SLOW = ["--knn-every", "0"], pytest.param("save 5", OSError, marks=pytest.mark.slow)


def assert_ends_alike(method, begun, out):
    """Assert that a run and its copy `out`, which has had a fault since, are identical once both are resumed."""
    straight = shutil.copytree(begun, out.with_name("straight"))
    for folder in (straight, out):
        run(method, folder, *QUIET)
    assert_same_run(straight, out)


@pytest.mark.parametrize("moment, error", [("save 3", RuntimeError), ("save 4", OSError), SLOW])
def test_a_write_that_fails_is_one_line_and_costs_an_epoch(begun, tmp_path, capsys, moment, error):
    """A write fails midway (where torch raises), at its flush or its rename. The run then resumes from last.pt."""
    out = shutil.copytree(begun("jcl"), tmp_path / "run")
    before = load(out / "last.pt")
    with pytest.MonkeyPatch.context() as patch:
        tiny.strike(patch, moment, Mock(side_effect=error("No space left on device")))
        assert f"cannot write {out}" in refused(capsys, run, "jcl", out, *QUIET)
    assert unequal(load(out / "last.pt"), before) == [] and not list(out.glob(".*"))
    assert_ends_alike("jcl", begun("jcl"), out)


@pytest.mark.parametrize("what", ["loss", "model", "optimizer"])
@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_what_is_not_finite_is_never_saved(begun, tmp_path, monkeypatch, method, what):
    """If the loss, a weight or a number of the optimizer becomes infinite, the last saved epoch is kept."""
    out, update, save_run = shutil.copytree(begun(method), tmp_path / "run"), common.Meter.update, common.save_run
    before = contents(out)

    def spoiled(out, config, info, state, *more):
        weight = state["optimizer"].param_groups[-1]["params"][0]
        numbers = [x for x in state["optimizer"].state[weight].values() if torch.is_tensor(x) and x.dim()]
        (numbers[-1] if what == "optimizer" else weight.data).view(-1)[0] = torch.inf
        save_run(out, config, info, state, *more)

    with monkeypatch.context() as patch, pytest.raises(FloatingPointError, match=rf"^{what}\b.* not finite"):
        if what == "loss":
            patch.setattr(common.Meter, "update", lambda meter, m: update(meter, m | {"loss": torch.tensor(torch.inf)}))
        else:
            patch.setattr(common, "save_run", spoiled)
        run(method, out, *QUIET)
    after = contents(out)
    assert {path.name for path in before if after.pop(path) != before[path]} <= {"config.json"} and not after
    assert_ends_alike(method, begun(method), out)


@pytest.mark.parametrize("error", [OSError("No space left on device"), UnicodeError()])
def test_a_log_that_cannot_be_written_does_not_end_a_training(error, tmp_path, monkeypatch):
    args = jcl.parse_args([*FLAGS, *QUIET, "--out", str(tmp_path)])
    monkeypatch.setattr("sys.stdout", Mock(write=Mock(side_effect=error)))
    jcl.main(args)
    assert epochs_of(tmp_path) == 2


def elsewhere(folder, argv):
    os.chdir(folder)
    tiny.play("jcl", argv)


@pytest.mark.slow
@pytest.mark.parametrize("flags, change, words", [
    ("--out run", "--lr 0.5", "lr was"), ("--out run", "", "differ"), ("--out new", "--lr 0.5", "differ"),
    ("--dataset folder --data-dir data", "--data-dir other", "differ"),
    ("--dataset folder --data-dir data", "--data-dir missing", "missing"),
])  # fmt: skip
def test_processes_that_disagree_end_in_one_line(begun, tmp_path, flags, change, words):
    """Processes with different flags, images or --out print one error message. If one is left waiting, it is killed."""
    shutil.copytree(begun("jcl"), tmp_path / "run")
    for root, count in (("data", 20), ("other", 21)):
        tiny.write_tree(tmp_path / root, ["train"], count, (16, 16))
    first, second = [*FLAGS, *QUIET, "--patch-size", "8", *flags.split()], tmp_path / ("" if change else "data")
    ends = processes(tmp_path / "log", elsewhere, [(tmp_path, first), (second, [*first, *change.split()])])
    lines = {line for _, _, error in ends for line in error.splitlines() if line.startswith("error: ")}
    assert len(lines) == 1 and words in lines.pop() and 2 in [status for status, *_ in ends], ends


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_damaged_image_costs_an_epoch_at_most(tmp_path, part, workers):
    """The error names the image. If kNN finds it, the epoch is already saved. Once it is repaired, the run resumes."""
    tiny.write_tree(tmp_path / "data", ["train/a", "train/b", "test/a", "test/b"], 8, (16, 16))
    path, out = tmp_path / "data" / part / "b" / "1.png", tmp_path / "run"
    words = f"--dataset folder --batch-size 4 --patch-size 8 --workers {workers} --data-dir {tmp_path}/data".split()
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(OSError, match=str(path)):
        run("jcl", out, *words)
    assert epochs_of(out) == (1 if part == "test" else None)
    path.write_bytes(whole)
    assert ("after epoch 1" in run("jcl", out, *words)) == (part == "test")
    assert ["knn20_top1" in record for record in records(out)] == [part == "train", True]


def test_a_name_that_the_terminal_cannot_encode_is_escaped(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    common.start(lambda args: common.log("finished: été"), argparse.Namespace)
    assert sys.stdout.buffer.getvalue() == b"finished: \\xe9t\\xe9\n"
