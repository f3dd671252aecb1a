"""Faults and wrong input: each ends in one line and exit status 2, and spoils nothing; no traceback, no hang."""

import argparse
import contextlib
import importlib
import io
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import test_runs as runs
import torch
from conftest import METHODS
from PIL import Image

import common

ONE = runs.ONE  # where only common.py is meant
folder, _narrow = runs.folder, runs._narrow  # 68 + 32 patterns of 16 px; small heads
FLAGS = runs.TINY
QUIET = ["--knn-every", "0"]


def attempt(script, argv):
    """(what ended it, what it wrote to stderr) of a script in this process: "done", an exit status or an exception."""
    module, error = importlib.import_module(script), io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
            module.main(module.parse_args([str(a) for a in argv]))
        end = "done"
    except SystemExit as stop:
        end = stop.code
    except Exception as exception:  # what a user would see as a traceback
        end = f"{type(exception).__name__}: {exception}"[:200]
    return end, error.getvalue()


def is_one_line(end, error):
    return end == 2 and error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n")


def refuse(script, argv, *words):
    """The script must end with status 2 and one line that has all the words."""
    end, error = attempt(script, argv)
    assert is_one_line(end, error) and all(str(word) in error for word in words), (end, error)
    return error


@pytest.fixture(scope="module")
def begun(folder, tmp_path_factory):
    """{method: the folder of a run that stopped in its second epoch}, made when asked for; never changed."""

    class Begun(dict):
        def __missing__(self, method):
            self[method] = tmp_path_factory.mktemp(method) / "run"
            runs.run(method, folder, self[method], *QUIET, "--max-steps", "5")
            return self[method]

    return Begun()


# ---------------------------------------------------------------------- files


def life(script, argv, limit, environment, spoil):
    """A script in a process of its own. limit: of bytes in a file; spoil: the process whose images are no numbers."""
    os.environ |= environment
    module = importlib.import_module(script)
    runs.narrow(module, drop_path=0.2)
    if limit:  # as a full disk: a write stops in the middle
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if spoil is not None and spoil == int(os.environ.get("RANK", 0)):
        normalize = common.normalize
        common.normalize = lambda *args: normalize(*args) * float("nan")
    module.main(module.parse_args(argv))


def processes(script, each, log, limit=0, spoil=None, seconds=240):
    """[(exit status, stdout, stderr)] of a script in processes of their own, one for each list of arguments; several
    make a group. What waits for a process that has ended is ended, as by torchrun; None is the status of one that
    hangs.
    """
    group, started = dict(WORLD_SIZE=str(len(each)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(runs.free_port())), []
    for rank, argv in enumerate(each):
        environment = group | dict(RANK=str(rank)) if len(each) > 1 else {}
        args = (life, f"{log}{rank}", script, [str(a) for a in argv], limit, environment, spoil)
        started.append(runs.CHILDREN.Process(target=runs._redirected, args=args))
        started[-1].start()
    until = time.monotonic() + seconds
    while all(p.exitcode in (None, 0) for p in started) and any(p.is_alive() for p in started):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    ends = []
    for rank, process in enumerate(started):
        if process.is_alive() and time.monotonic() < until:
            process.terminate()
            process.join(30)
        ends.append((process.exitcode, *(Path(f"{log}{rank}.{name}").read_text() for name in ("out", "err"))))
        process.kill()
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("method", ONE)
def test_a_full_disk_is_one_line_and_costs_nothing(begun, folder, tmp_path, method):
    """A write that fails in the middle leaves the last checkpoint as it was, and the run goes on from it."""
    for name in ("full", "whole"):
        shutil.copytree(begun[method], tmp_path / name)
    out = tmp_path / "full"
    argv = [*FLAGS, *QUIET, "--data-dir", folder, "--out", out]
    before = runs.contents(out)
    limit = (out / "last.pt").stat().st_size // 2
    ((status, _, error),) = processes(method, [argv], tmp_path / "log", limit=limit)
    assert is_one_line(status, error) and ".pt" in error, error
    after = runs.contents(out)
    changed = {n.name for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
    assert changed <= {
        "backbone.pt",
        "metrics.jsonl",
        "config.json",
    }  # what is written before last.pt may be newer, but is whole
    for name in ("full", "whole"):
        runs.run(method, folder, tmp_path / name, *QUIET)
    runs.assert_same_run(tmp_path / "full", tmp_path / "whole")


@pytest.mark.parametrize("method", ONE)
def test_a_run_cleans_up_after_kills_and_mends_its_metrics(begun, folder, tmp_path, method):
    """Unfinished files are removed; what is no record, of the epoch that is made again or not, is left out."""
    out = tmp_path / "run"
    shutil.copytree(begun[method], out)
    (out / "last.pt.99999.tmp").write_bytes(b"half")
    metrics = out / "metrics.jsonl"
    for rubbish in (b"\xff\xfe\x00\n[1]\n5\nnull\n", b'{"step": "a"}\n{"epoch": 2, "step": 8}\n{"loss": ['):
        metrics.write_bytes(metrics.read_bytes() + rubbish)
        assert attempt(method, [*FLAGS, *QUIET, "--data-dir", folder, "--out", out, "--max-steps", "6"]) == ("done", "")
    assert attempt(method, [*FLAGS, *QUIET, "--data-dir", folder, "--out", out]) == ("done", "")
    assert [r.get("step") for r in runs.records(out)] == [0, 4, 8] and not list(out.glob("*.tmp"))


@pytest.mark.parametrize("method", ONE)
def test_names_that_no_terminal_can_show(folder, tmp_path, monkeypatch, method):
    """Line breaks, bytes that are no text, and letters that the terminal's code lacks."""
    shutil.copytree(folder, tmp_path / "data")
    first, second, *_ = sorted((tmp_path / "data" / "train").rglob("*.png"))
    newline, odd = first.with_name("a\nb.png"), os.fsencode(second.parent) + b"/\xff.png"
    first.rename(newline), os.rename(second, odd)
    for part in ("train", "test"):
        os.rename(tmp_path / "data" / part / "kind1", os.fsencode(tmp_path / "data" / part) + b"/gr\xc3\xbcn\xff")
    argv = [*FLAGS, *QUIET, "--max-steps", "1", "--data-dir", tmp_path / "data", "--out"]
    assert attempt(method, [*argv, tmp_path / "good"]) == ("done", "")
    newline.write_bytes(b"")
    refuse(method, [*argv, tmp_path / "bad"], "a\\nb.png")
    newline.unlink()
    shown = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(contextlib, "redirect_stdout", lambda _: contextlib.nullcontext())
    assert attempt(method, [*argv, tmp_path / "grün"]) == ("done", "")
    monkeypatch.undo()
    shown.flush()
    assert b"gr\\xfcn" in shown.buffer.getvalue()


class Hostile:
    """A pickle that would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


SAVES = {
    "torch": torch.save,
    "old torch": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "pickle": lambda state, path: path.write_bytes(pickle.dumps(state, 2)),
}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("method", ONE)
def test_a_hostile_checkpoint_is_not_run(begun, folder, tmp_path, method, save):
    marker, out, file = tmp_path / "marker", tmp_path / "run", tmp_path / "file.pt"
    shutil.copytree(begun[method], out)
    state = runs.load(out / "last.pt") | {"model": Hostile(marker)}
    for path in (file, out / "last.pt"):
        SAVES[save](state, path)
    (out / "last.prev.pt").unlink()
    for way in (["--out", out], ["--out", tmp_path / "new", "--resume", file]):
        refuse(method, [*FLAGS, *QUIET, "--data-dir", folder, *way], ".pt")
    assert not marker.exists() and not (tmp_path / "new").exists()


def wrong_states(state):
    """(words, a checkpoint that looks right but lacks a part, or whose part is another model's)."""
    parts = set(state) - {"backbone"}
    yield from ((f"without {part}", {k: v for k, v in state.items() if k != part}) for part in sorted(parts))
    for part in sorted(parts - {"config", "step", "images", "record", "log"}):
        if isinstance(state[part], dict):
            yield f"{part} empty", state | {part: {}}
    yield "another width", state | {"model": {k: v[..., None] for k, v in state["model"].items()}}
    optimizer = state["optimizer"]
    yield "another optimiser", state | {"optimizer": optimizer | {"param_groups": optimizer["param_groups"] * 9}}
    yield "no state at all", {"step": 3}
    yield "a list", [state]


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_with_parts_missing_or_wrong_is_one_line(begun, folder, tmp_path, method):
    state, path, wrong = runs.load(begun[method] / "last.pt"), tmp_path / "last.pt", {}
    for words, changed in wrong_states(state):
        torch.save(changed, path)
        flags = [*FLAGS, *QUIET, "--data-dir", folder, "--out", tmp_path / "new", "--resume", path]
        end, error = attempt(method, flags)
        if not is_one_line(end, error) or (tmp_path / "new").exists():
            wrong[words] = end, error[:200]
            shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert wrong == {}


# -------------------------------------------------------------- two processes


def assert_one_line_of_all(ends, words):
    """One ends with status 2 and says why; another may be left waiting for it, and is ended."""
    lines = [line for _, _, error in ends for line in error.splitlines() if line.startswith("error: ")]
    assert 2 in {status for status, _, _ in ends} and None not in {status for status, _, _ in ends}, ends
    assert len(lines) == 1 and words in lines[0], ends


DISAGREEMENTS = {  # what the second process gets, and a word of the line
    "flags": (["--lr", "0.5"], "processes differ"),
    "no data": (["--data-dir", "missing"], "missing"),
    "when to stop": (["--max-steps", "2"], "processes differ"),
    "another checkpoint": (["--out", "new"], "processes differ"),
    "another configuration of a run": (["--out", "old", "--lr", "0.5"], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ONE)
def test_processes_that_disagree_end_in_one_line(begun, folder, tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(begun[method], "old")
    for what, (change, words) in DISAGREEMENTS.items():
        out = "old" if "--out" in change else f"run-{what}"
        first = [*FLAGS, *QUIET, "--data-dir", folder, "--out", out]
        assert_one_line_of_all(processes(method, [first, [*first, *change]], tmp_path / "log"), words)


@pytest.mark.slow
@pytest.mark.parametrize("method", ONE)
def test_a_run_goes_on_with_another_number_of_processes(begun, folder, tmp_path, method):
    shutil.copytree(begun[method], tmp_path / "run")
    argv = [*FLAGS, *QUIET, "--data-dir", folder, "--out", tmp_path / "run", "--max-steps"]
    ends = processes(method, [[*argv, "6"]] * 2, tmp_path / "log")
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert "going on at step 5" in ends[0][1] and runs.load(tmp_path / "run" / "last.pt")["step"] == 6
    assert attempt(method, argv[:-1]) == ("done", "") and len(runs.records(tmp_path / "run")) == 3


# ---------------------------------------------------------- not finite numbers


@pytest.mark.parametrize("method", ONE)
@pytest.mark.parametrize("end", ["an epoch's end", "--max-steps", "a request"])
def test_nothing_of_a_step_that_is_not_finite_is_ever_saved(begun, folder, tmp_path, monkeypatch, method, end):
    """Whatever comes next. Weights, queue and momentum encoder take that step up; the run goes on from before it."""
    for name in ("run", "whole"):
        shutil.copytree(begun[method], tmp_path / name)
    argv = [*FLAGS, *QUIET, "--data-dir", folder, "--out", tmp_path / "run"]
    normalize, calls = common.normalize, []

    def spoiled(*args):
        calls.append(0)
        if end == "a request" and len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return normalize(*args) * float("nan")

    before = {path: content for path, content in runs.contents(tmp_path / "run").items() if path.suffix == ".pt"}
    with monkeypatch.context() as patch:
        patch.setattr(common, "normalize", spoiled)
        refuse(method, [*argv, *(["--max-steps", "6"] if end == "--max-steps" else [])], "not finite")
    assert before.items() <= runs.contents(tmp_path / "run").items()
    for out in ("run", "whole"):
        assert attempt(method, [*argv[:-1], tmp_path / out]) == ("done", "")
    runs.assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("method", ONE)
def test_one_of_two_processes_that_is_not_finite_ends_both_in_one_line(begun, folder, tmp_path, method):
    shutil.copytree(begun[method], tmp_path / "run")
    argv = [*FLAGS, *QUIET, "--data-dir", folder, "--out", tmp_path / "run"]
    assert_one_line_of_all(processes(method, [argv] * 2, tmp_path / "log", spoil=1), "not finite")
    assert runs.load(tmp_path / "run" / "last.pt")["step"] == 5


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_not_finite_are_never_saved(begun, folder, tmp_path, monkeypatch, method):
    """A step whose loss and gradient are finite can throw them out of range; only the next loss would show it."""
    module, out = importlib.import_module(method), tmp_path / "run"
    norm = module.gradient_norm

    def thrown(model):
        [v for v in model.state_dict().values() if v.is_floating_point()][0].view(-1)[0] = float("inf")
        return norm(model)

    shutil.copytree(begun[method], out)
    monkeypatch.setattr(module, "gradient_norm", thrown)
    before = {path: content for path, content in runs.contents(out).items() if path.suffix == ".pt"}
    refuse(method, [*FLAGS, *QUIET, "--data-dir", folder, "--out", out, "--max-steps", "6"], "not finite")
    assert before.items() <= runs.contents(out).items()


# ------------------------------------------------------------------- bad data


def png(width, height):
    """A file of a few bytes that says it is a picture of that size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b"")
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg():
    data = io.BytesIO()
    Image.fromarray(common.make_patterns(1, 16, 0)[0][0]).save(data, "JPEG")
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
def test_a_bad_image_is_named_in_one_line(tmp_path, name):
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


WHERE = [("train", 0, []), ("train", 20, []), ("train", 20, ["--no-cache"]), ("test", 3, ["--no-cache"])]


@pytest.mark.parametrize("method", ONE)
@pytest.mark.parametrize("part, i, flags", [*WHERE, ("train", 20, ["--no-cache", "--workers", "2"])])
def test_a_bad_image_stops_a_run_in_one_line(folder, tmp_path, method, part, i, flags):
    """At the start, where images are decoded at once, else when it is met, by a worker too."""
    shutil.copytree(folder, tmp_path / "data")
    path = sorted((tmp_path / "data" / part).rglob("*.png"))[i]
    path.write_bytes(BAD["truncated.jpg"])
    refuse(method, [*FLAGS, *flags, "--data-dir", tmp_path / "data", "--out", tmp_path / "run"], path)
    assert flags or not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", METHODS)
def test_fewer_images_than_a_batch_are_refused_in_words(tmp_path, method):
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.fromarray(common.make_patterns(1, 16, 0)[0][0]).save(tmp_path / part / "a" / "0.png")
    refuse(method, [*FLAGS, "--data-dir", tmp_path, "--out", tmp_path / "run"], "1 images are fewer", "--batch-size 1")
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------- wrong command lines

NUMBERS = {
    int: ["text", "", "1.5", "nan", "-1", "0", "9" * 30],
    float: ["text", "", "nan", "inf", "-inf", "-1", "1e999"],
}


def parsed(script, argv):
    """(what ended it, its stderr) of a command line that is parsed only."""
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()) as out:
            importlib.import_module(script).parse_args([str(a) for a in argv])
        return "done", error.getvalue()
    except SystemExit as stop:
        return stop.code, error.getvalue() or out.getvalue()
    except Exception as exception:
        return f"{type(exception).__name__}: {exception}"[:200], error.getvalue()


def options(script):
    """The options of a script's parser."""
    with pytest.MonkeyPatch.context() as patch:
        found = []
        patch.setattr(common.ArgumentParser, "parse_args", lambda self, *_: found.append(self) or sys.exit(0))
        with contextlib.suppress(SystemExit):
            importlib.import_module(script).parse_args([])
    return [action for action in found[0]._actions if not isinstance(action, argparse._HelpAction)]


@pytest.mark.parametrize("method", METHODS)
def test_wrong_values_of_every_option_are_one_line_that_names_it(method, monkeypatch):
    """What is no number, out of range, not a choice, too few or too many; no abbreviations."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrong, refused = {}, 0
    for action in options(method):
        flag = action.option_strings[0]
        numbers = NUMBERS[float if "float" in action.type.__name__ else int] if action.type else []
        values = [f"{flag}={value}" for value in (["text"] if action.choices else numbers)]
        cases = [[value] for value in (values if action.nargs is None else [])]
        cases += [[flag]] if action.nargs not in (0, "*") else []
        cases += [[f"{flag}=yes"]] if action.nargs == 0 else []
        if isinstance(action.nargs, int) and action.nargs > 1:
            cases += [[flag, *["0.5"] * (action.nargs - 1), "nan"], [flag, *["0.5"] * (action.nargs - 1)]]
        cases += [[flag[:-1], *([] if action.nargs == 0 else ["1"])]]
        for case in cases:
            end, error = parsed(method, case)
            refused += end == 2
            zero = case[0].endswith(("=0", "=-1")) or case[0].endswith("9" * 9)  # within some flags' range
            if not is_one_line(end, error) and not (zero and end == "done"):
                wrong[" ".join(case)] = end, error
            elif end == 2 and flag.strip("-") not in error and case[0].split("=")[0] not in error:
                wrong[" ".join(case)] = end, error
    assert wrong == {} and refused > 60


COMBINATIONS = [  # flags, a word of the line; None: goes well
    ("--batch-size 128", "68 images"),
    ("--image-size 1", "--patch-size 8"),
    ("--patch-size 32", "--patch-size 32"),
    ("--arch resnet_nano --image-size 16 --batch-size 4", None),
    ("--queue 1", None),
    ("--arch nonsense", "nonsense"),
]


@pytest.mark.parametrize("method", ONE)
@pytest.mark.parametrize("flags, words", COMBINATIONS)
def test_flags_that_do_not_fit_together_are_one_line(folder, tmp_path, monkeypatch, method, flags, words):
    monkeypatch.chdir(tmp_path)
    argv = [*FLAGS, *QUIET, "--max-steps", "1", "--data-dir", folder, "--out", "run", *flags.split()]
    if words is None:
        assert attempt(method, argv) == ("done", "")
    else:
        refuse(method, argv, words)
        assert not list(tmp_path.iterdir())
