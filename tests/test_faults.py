"""What a machine does to a run: writes that fail, two runs at once, numbers that are not finite, damaged images."""

import errno
import importlib
import io
import itertools
import os
import shutil
import signal
import struct
import zlib

import numpy as np
import pytest
import tiny
import torch
from conftest import METHODS
from PIL import Image
from tiny import FLAGS, assert_same_run, contents, load, processes, records, refused, run, unequal

import common

_tiny = tiny._tiny
pytestmark = pytest.mark.usefixtures("_tiny")
QUIET = ["--knn-every", "0"]


@pytest.fixture(scope="module")
def begun(_tiny, tmp_path_factory):
    """A function: method -> the folder of its run that stopped in the second epoch, made once."""
    made = {}

    def folder(method):
        if method not in made:
            made[method] = tmp_path_factory.mktemp(method) / "run"
            run(method, made[method], *QUIET, "--max-steps", "5")
        return made[method]

    return folder


@pytest.fixture
def copies(begun, tmp_path):
    """A function: method -> two copies of its run, one to be disturbed and one to be compared with."""
    return lambda method: [shutil.copytree(begun(method), tmp_path / name) for name in ("run", "whole")]


def saved(out):
    return {name: value for name, value in load(out / "last.pt").items() if name != "config"}


# ---------------------------------------------------------------------- writes


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
    assert "cannot write" in line and "No space left" in line
    assert saved(out)["step"] in (before["step"], 8) and not list(out.glob("*.tmp"))
    for folder in (out, whole):
        run("jcl", folder, *QUIET)
    assert_same_run(whole, out)


# ----------------------------------------------------------------------- locks


def hold(folder, ready, end):
    lock = common.claim_folder(folder)
    ready.set()
    end.wait(60)
    lock.close()


@pytest.mark.skipif(common.fcntl is None, reason="no such locks here")
def test_two_runs_at_once_in_one_folder(tmp_path, capsys):
    """The lock ends with the process, however that ends."""
    fork = torch.multiprocessing.get_context("fork")  # the child only locks and waits
    ready, end = fork.Event(), fork.Event()
    other = fork.Process(target=hold, args=(tmp_path, ready, end))
    other.start()
    assert ready.wait(60)
    before = contents(tmp_path)
    assert "another run is at work" in refused(capsys, run, "jcl", tmp_path, "--max-steps", "1")
    assert contents(tmp_path) == before
    other.kill()
    other.join()
    assert "stopped at step 1" in run("jcl", tmp_path, "--max-steps", "1")


@pytest.mark.skipif(common.fcntl is None, reason="no such locks here")
def test_a_lock_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "lock").mkdir()  # as good as another user's file, which the superuser could write
    assert f"cannot write {tmp_path / 'lock'}" in refused(capsys, common.claim_folder, tmp_path)


# ---------------------------------------------------------- not finite numbers


@pytest.mark.parametrize("end", ["an epoch's end", "--max-steps 6", "a request"])
def test_nothing_of_a_step_that_is_not_finite_is_saved(copies, monkeypatch, capsys, end):
    """Whatever comes next. Weights, queue and momentum encoder take that step up. The run goes on from before it."""
    out, whole = copies("jcl")
    normalize, before, calls = common.normalize, saved(out), itertools.count(1)

    def spoiled(*args):
        if end == "a request" and next(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        return normalize(*args) * float("nan")

    with monkeypatch.context() as patch:
        patch.setattr(common, "normalize", spoiled)
        more = end.split() if end.startswith("--") else []
        assert "not finite" in refused(capsys, run, "jcl", out, *QUIET, *more)
    assert unequal(saved(out), before) == []
    for folder in (out, whole):
        run("jcl", folder, *QUIET)
    assert_same_run(whole, out)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("what", ["loss", "weights"])
def test_not_finite_numbers_are_never_saved(copies, monkeypatch, capsys, method, what):
    """A step with a finite loss and gradient can throw the weights out of range. Only the next loss would show it."""
    out, _ = copies(method)
    module, colour, before = importlib.import_module(method), common.colour, saved(out)
    norm = module.gradient_norm

    def thrown(model):
        next(v for v in model.state_dict().values() if v.is_floating_point()).view(-1)[0] = float("inf")
        return norm(model)

    if what == "loss":
        monkeypatch.setattr(common, "colour", lambda x, parameters: colour(x, parameters) * float("nan"))
    else:
        monkeypatch.setattr(module, "gradient_norm", thrown)
    assert "not finite" in refused(capsys, run, method, out, *QUIET, "--max-steps", "6")
    assert unequal(saved(out), before) == []


def test_a_loss_that_is_not_finite_ends_the_run_before_the_epoch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "normalize", lambda x, *_: x * float("nan"))
    flags = "--batch-size 4 --bn-groups 1 --epochs 1".split()
    assert "not finite at step 10" in refused(capsys, run, "jcl", tmp_path, *QUIET, *flags)


# -------------------------------------------------------------- two processes


def spoiled_play(script, argv):
    """A run whose second process has no finite numbers."""
    if os.environ["RANK"] == "1":
        normalize = common.normalize
        common.normalize = lambda *args: normalize(*args) * float("nan")
    tiny.play(script, argv)


def assert_one_line_of_all(ends, words):
    """One process ends with status 2 and says why. Another may be left waiting for it, and is ended."""
    lines = [line for _, _, error in ends for line in error.splitlines() if line.startswith("error: ")]
    assert 2 in {status for status, _, _ in ends} and len(lines) == 1 and words in lines[0], ends


DISAGREEMENTS = {  # what the second process gets besides, and words of the line
    "flags": (["--lr", "0.5"], "lr was 0.06, is 0.5"),
    "data": (["--dataset", "patterns", "--data-dir", "missing"], "missing"),
    "when to stop": (["--max-steps", "2"], "processes differ"),
    "checkpoint": (["--out", "new"], "processes differ"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_processes_that_disagree_end_in_one_line(copies, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    change, words = DISAGREEMENTS[what]
    first = [*FLAGS, *QUIET, "--out", str(copies("jcl")[0])]
    ends = processes(tmp_path / "log", tiny.play, [("jcl", first), ("jcl", [*first, *change])])
    assert_one_line_of_all(ends, words)


@pytest.mark.slow
def test_one_of_two_processes_that_is_not_finite_ends_both_in_one_line(copies, tmp_path):
    out, _ = copies("jcl")
    args = ("jcl", [*FLAGS, *QUIET, "--out", str(out)])
    assert_one_line_of_all(processes(tmp_path / "log", spoiled_play, [args] * 2), "not finite")
    assert load(out / "last.pt")["step"] == 5


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
    assert_one_line_of_all(processes(tmp_path / "log", damaged_play, [args] * 2), "x.jpg")
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


def png(width, height):
    """A file of a few bytes that says it is a picture of that size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b"")
    parts = (struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg():
    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)).save(data, "JPEG")
    return data.getvalue()


BAD = {
    "truncated.jpg": jpeg()[:-200],
    "header only.jpg": jpeg()[:300],
    "empty.png": b"",
    "text.png": b"not an image\n" * 9,
    "bomb.png": png(60000, 60000),
    "large.png": png(12000, 12000),
    "no pixels.png": png(0, 5),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_image_is_named_in_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(BAD[name])
    with pytest.raises(common.BadImage, match=name) as error:
        common.read_image(tmp_path / name)
    assert "\n" not in str(error.value)


def test_palettes_are_read_as_what_they_show(tmp_path):
    """Transparency in bytes or as a colour."""
    image = Image.fromarray(common.make_patterns(1, 16, 0)[0][0])
    palette, expected = image.convert("P"), np.asarray(image.convert("P").convert("RGB"))
    palette.save(tmp_path / "bytes.png", transparency=bytes(range(200)))
    palette.save(tmp_path / "colour.png", transparency=3)
    for name in ("bytes.png", "colour.png"):
        assert np.array_equal(common.read_image(tmp_path / name), expected)


CACHED, UNCACHED, LOADED = "", "--no-cache", "--no-cache --workers 2"


@pytest.mark.parametrize("part, i, flags", [
    ("train", 0, CACHED), ("train", 9, CACHED), ("train", 9, UNCACHED), ("test", 3, UNCACHED),
    pytest.param("train", 9, LOADED, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_damaged_image_stops_a_run_in_one_line(tmp_path, capsys, part, i, flags):
    """At the start, where images are decoded at once; else when it is met, by a worker, too."""
    for split, kind, number in itertools.product(("train", "test"), "ab", range(8)):
        folder = tmp_path / "data" / split / kind
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(jpeg())
    path = sorted((tmp_path / "data" / part).rglob("*.jpg"))[i]
    path.write_bytes(BAD["truncated.jpg"])
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
