"""Faults and wrong input: each ends in one line and exit status 2, spoils nothing, and is not met by a traceback or a hang."""

import argparse
import contextlib
import importlib
import io
import os
import pickle
import resource
import shutil
import signal
import socket
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

EVALUATIONS = runs.EVALUATIONS
folder, _narrow = runs.folder, runs._narrow  # 68 + 32 patterns of 16 px; small heads
FLAGS = [*runs.TINY, "--device", "cpu"]
QUIET = ["--knn-every", "0"]
EVALUATE = {"eval_knn": ["--k", "5"], "eval_linear": ["--epochs", "1"]}


def attempt(script, argv):
    """(what ended it, what it wrote to stderr) of a script in this process: "done", an exit status or an exception."""
    module, error, handlers = importlib.import_module(script), io.StringIO(), [signal.SIGTERM, signal.SIGINT]
    before = {number: signal.getsignal(number) for number in handlers}
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
            module.main(module.parse_args([str(a) for a in argv]))
        end = "done"
    except SystemExit as stop:
        end = stop.code
    except Exception as exception:  # what a user would see as a traceback
        end = f"{type(exception).__name__}: {exception}"[:200]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
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
            runs.run(method, folder, self[method], "--device", "cpu", *QUIET, "--max-steps", "5")
            return self[method]

    return Begun()


def evaluate(script, checkpoint, folder, *more):
    return [checkpoint, "--data-dir", folder, "--dataset", "patterns", "--device", "cpu", "--no-floors", *EVALUATE[script], *more]


# ---------------------------------------------------------------------- files


def life(script, argv, die, limit, environment, memory=0, spoil=None):
    """A script in a process of its own. die: the image at which a loader's worker is killed; limit: of bytes in a file; memory:
    bytes that it gets besides what it has after its imports; spoil: the process whose images are no numbers."""
    os.environ |= environment
    module, get, parent, count = importlib.import_module(script), common.ImageSet.__getitem__, os.getpid(), [0]
    if script in METHODS:
        runs.narrow(module, drop_path=0.2)
    if limit:  # as a full disk: a write stops in the middle
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    if spoil is not None and spoil == int(os.environ.get("RANK", 0)):
        normalize = common.normalize
        common.normalize = lambda *args: normalize(*args) * float("nan")
    if memory:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)

    def mortal(self, i):
        count[0] += 1
        if os.getpid() != parent and count[0] == die:
            os.kill(os.getpid(), signal.SIGKILL)
        return get(self, i)

    common.ImageSet.__getitem__ = mortal
    try:
        module.main(module.parse_args(argv))
    except Exception:  # as the interpreter does, and multiprocessing does not
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def processes(script, each, log, die=0, limit=0, memory=0, spoil=None, seconds=240):
    """[(exit status, stdout, stderr)] of a script in processes of their own, one for each list of arguments; several make a
    group. None is the status of one that does not end."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    group, started = dict(WORLD_SIZE=str(len(each)), MASTER_ADDR="127.0.0.1", MASTER_PORT=port), []
    for rank, argv in enumerate(each):
        environment = group | dict(RANK=str(rank)) if len(each) > 1 else {}
        args = (life, f"{log}{rank}", script, [str(a) for a in argv], die, limit, environment, memory, spoil)
        started.append(runs.CHILDREN.Process(target=runs._redirected, args=args))
        started[-1].start()
    ends, until = [], time.monotonic() + seconds
    for rank, process in enumerate(started):
        process.join(max(0, until - time.monotonic()))
        ends.append((process.exitcode, *(Path(f"{log}{rank}.{name}").read_text() for name in ("out", "err"))))
        process.kill()
    return ends


def test_a_full_disk_is_one_line_and_costs_nothing(begun, folder, tmp_path):
    """A write that fails in the middle leaves the last checkpoint as it was, and the run goes on from it, bit for bit."""
    for name in ("full", "whole"):
        shutil.copytree(begun["jcl"], tmp_path / name)
    out = tmp_path / "full"
    argv = [*FLAGS, *QUIET, "--data-dir", folder, "--out", out]
    before = runs.contents(out)
    limit = (out / "last.pt").stat().st_size // 2
    ((status, _, error),) = processes("jcl", [argv], tmp_path / "log", limit=limit)
    assert is_one_line(status, error) and "last.pt" in error, error
    after = runs.contents(out)
    changed = {n.name for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
    assert changed <= {"backbone.pt", "metrics.jsonl"}  # what is written before last.pt may be newer, but is whole
    for name in ("full", "whole"):
        runs.run("jcl", folder, tmp_path / name, *QUIET)
    runs.assert_same_run(tmp_path / "full", tmp_path / "whole")


@pytest.mark.parametrize("kind", ["a folder", "a full disk"])
@pytest.mark.parametrize("method", METHODS)
def test_metrics_that_cannot_be_written_are_one_line(begun, folder, tmp_path, monkeypatch, kind, method):
    out, fsync = tmp_path / "run", os.fsync
    shutil.copytree(begun[method], out)
    last = (out / "last.pt").read_bytes()
    if kind == "a folder":
        (out / "metrics.jsonl").unlink()
        (out / "metrics.jsonl").mkdir()

    def full(file):
        if os.readlink(f"/proc/self/fd/{file}").endswith("metrics.jsonl"):
            raise OSError(28, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    refuse(method, [*FLAGS, *QUIET, "--data-dir", folder, "--out", out], "metrics.jsonl")
    assert (out / "last.pt").read_bytes() == last and not list(out.glob("*.tmp"))


RUBBISH = [b"\xff\xfe\x00\n", b"[1]\n5\nnull\n", b'{"step": "a"}\n{"step": null}\n{"loss": [', None]


@pytest.mark.parametrize("content", RUBBISH)
@pytest.mark.parametrize("script", ["jcl", "eval_linear"])
def test_rubbish_in_metrics_is_left_out_or_refused(begun, folder, tmp_path, script, content):
    """Before it goes on and after its end; None: a folder."""
    out = tmp_path / "run"
    argv = [*FLAGS, *QUIET, "--data-dir", folder, "--out", out]
    if script == "eval_linear":
        argv = evaluate(script, begun["jcl"], folder, "--protocol", "moco", "--batch-size", 16, "--out", out)
    for more in (["--max-steps", "3"], [], []):
        end, error = attempt(script, [*argv, *more])
        assert (end, error) == ("done", "") or (content is None and is_one_line(end, error)), (end, error)
        path = out / "metrics.jsonl"
        if more == [] and content is not None:
            steps = [r.get("step") for r in common.read_metrics(path)]
            assert steps == ([0, 4, 8] if script == "jcl" else [0, 4])
        if content is not None:
            path.write_bytes(path.read_bytes() + content)
        elif not more and path.is_file():
            path.unlink()
            path.mkdir()


def test_names_that_no_terminal_can_show(begun, folder, tmp_path, monkeypatch):
    """Line breaks, bytes that are no text, and letters that the terminal's code lacks."""
    shutil.copytree(folder, tmp_path / "data")
    first, second, *_ = sorted((tmp_path / "data" / "train").rglob("*.png"))
    newline, odd = first.with_name("a\nb.png"), os.fsencode(second.parent) + b"/\xff.png"
    first.rename(newline), os.rename(second, odd)
    for part in ("train", "test"):
        os.rename(tmp_path / "data" / part / "kind1", os.fsencode(tmp_path / "data" / part) + b"/gr\xc3\xbcn\xff")
    argv = [*FLAGS, *QUIET, "--max-steps", "1", "--data-dir", tmp_path / "data", "--out"]
    assert attempt("jcl", [*argv, tmp_path / "good"]) == ("done", "")
    newline.write_bytes(b"")
    refuse("jcl", [*argv, tmp_path / "bad"], "a\\nb.png")
    with open(odd, "wb"):
        pass
    for code in ("ascii", "utf-8", "latin-1"):
        shown = io.TextIOWrapper(io.BytesIO(), code)
        monkeypatch.setattr(sys, "stdout", shown)
        monkeypatch.setattr(contextlib, "redirect_stdout", lambda _: contextlib.nullcontext())
        assert attempt("jcl", [*argv, tmp_path / code, "--skip-bad-images"]) == ("done", "")
        assert attempt("eval_knn", evaluate("eval_knn", begun["jcl"], tmp_path / "data", "--skip-bad-images")) == ("done", "")
        monkeypatch.undo()
        shown.flush()
        assert b"2 of 68 images" in shown.buffer.getvalue()


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
@pytest.mark.parametrize("script", METHODS + EVALUATIONS)
def test_a_hostile_checkpoint_is_not_run_by_any_script(begun, folder, tmp_path, script, save):
    marker, out, file = tmp_path / "marker", tmp_path / "run", tmp_path / "file.pt"
    method = script if script in METHODS else "jcl"
    shutil.copytree(begun[method], out)
    state = runs.load(out / "last.pt") | {"model": Hostile(marker)}
    for path in (file, out / "last.pt", out / "backbone.pt"):
        SAVES[save](state, path)
    for previous in out.glob("*.prev.pt"):
        previous.unlink()
    if script in METHODS:
        ways = [["--out", out], ["--out", tmp_path / "new", "--resume", file]]
        ways = [[*FLAGS, *QUIET, "--data-dir", folder, *way] for way in ways]
    else:
        ways = [evaluate(script, *way) for way in ((file, folder), (out, folder), (out / "last.pt", folder))]
        ways += [evaluate(script, out, folder, "--encoder", "momentum")]
    for argv in ways:
        refuse(script, argv, ".pt")
    assert not marker.exists() and not (tmp_path / "new").exists()


WRONG = [[1, 2], "text", None, torch.zeros(3), -5, 1.5]


def wrong_states(state):
    """(words, a checkpoint that looks right but lacks a part or has one of a wrong type)."""
    parts = [k for k in ("config", "model", "optimizer", "step", "images", "log", "l2l", "positives") if k in state]
    for part in parts:
        yield f"without {part}", {k: v for k, v in state.items() if k != part}
        for value in WRONG:
            allowed = (part == "log" and value is None) or (part == "positives" and torch.is_tensor(value))  # another run's table
            if not allowed:
                yield f"{part} = {value!r}", state | {part: value}
    for part in ("config", "model", "optimizer", "l2l"):
        if part in state:
            yield f"{part} empty", state | {part: {}}
    for name, value in (("sums", None), ("steps", "3"), ("pairs", 1)):
        yield f"log {name}", state | {"log": state["log"] | {name: value}}
    optimizer = state["optimizer"]
    yield "groups", state | {"optimizer": optimizer | {"param_groups": None}}
    yield "states", state | {"optimizer": optimizer | {"state": [1]}}
    yield "tensors that are none", state | {"model": dict.fromkeys(state["model"], "x")}


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_with_parts_missing_or_wrong_is_one_line(begun, folder, tmp_path, method):
    state, path, wrong = runs.load(begun[method] / "last.pt"), tmp_path / "last.pt", {}
    for words, changed in wrong_states(state):
        torch.save(changed, path)
        end, error = attempt(method, [*FLAGS, *QUIET, "--data-dir", folder, "--out", tmp_path / "new", "--resume", path])
        if not is_one_line(end, error) or (tmp_path / "new").exists():
            wrong[words] = end, error[:200]
            shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert wrong == {}


@pytest.mark.parametrize("script", EVALUATIONS)
def test_an_encoder_file_with_parts_missing_or_wrong_is_one_line(begun, folder, tmp_path, script):
    last, encoder = (runs.load(begun["jcl"] / name) for name in ("last.pt", "backbone.pt"))
    path, wrong, cases = tmp_path / "file.pt", {}, {}
    for part in encoder:
        cases[f"without {part}"] = {k: v for k, v in encoder.items() if k != part}
    for part in ("timm_name", "create_kwargs", "image_size", "mean", "std", "state_dict"):
        cases |= {f"{part} = {value!r}": encoder | {part: value} for value in (None, "text", torch.zeros(2))}
    for part in ("model", "backbone"):
        cases |= {f"last.pt, {part} = {value!r}": last | {part: value} for value in (None, "text", [1], {})}
    cases["last.pt without model"] = {k: v for k, v in last.items() if k != "model"}
    for words, state in cases.items():
        torch.save(state, path)
        end, error = attempt(script, evaluate(script, path, folder))
        if not is_one_line(end, error):
            wrong[words] = end, error[:200]
    assert wrong == {}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"dataset": 5, "data_dir": 1}'])
@pytest.mark.parametrize("script", EVALUATIONS)
def test_an_unreadable_config_beside_an_encoder_is_one_line(begun, tmp_path, script, content):
    shutil.copy(begun["jcl"] / "backbone.pt", tmp_path)
    (tmp_path / "config.json").write_text(content)
    refuse(script, [tmp_path, "--device", "cpu", *EVALUATE[script]], "data set")


# -------------------------------------------------------------- two processes


def assert_one_line_of_all(ends, words):
    """One ends with status 2 and says why; another may be left waiting for it, and says that it is."""
    statuses, lines = {status for status, _, _ in ends}, [line for _, _, error in ends for line in error.splitlines()]
    said = [line for line in lines if "another process of this run has ended" not in line]
    assert 2 in statuses <= {1, 2} and len(said) == 1 and is_one_line(2, said[0] + "\n") and words in said[0], ends


DISAGREEMENTS = {  # what the second process gets, and a word of the line
    "flags": (["--lr", "0.5"], "different flags"),
    "another number of images": (["--data-dir", "fewer"], "numbers of images"),
    "fewer images than a batch": (["--data-dir", "few"], ""),
    "no data": (["--data-dir", "missing"], "missing"),
    "a bad image": (["--data-dir", "bad"], "bad"),
    "another checkpoint": (["--out", "new"], "checkpoints"),
    "another configuration of a run": (["--out", "old", "--lr", "0.5"], ""),
    "--skip-bad-images": (["--skip-bad-images"], "different flags"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_processes_that_disagree_end_in_one_line(begun, folder, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    for name, keep in (("fewer", 67), ("few", 12), ("bad", 68)):
        shutil.copytree(folder, name)
        for path in sorted((tmp_path / name / "train").rglob("*.png"), key=lambda p: p.name)[keep:]:
            path.unlink()
    next((tmp_path / "bad" / "train").rglob("*.png")).write_bytes(b"")
    shutil.copytree(begun["jcl"], "old")
    change, words = DISAGREEMENTS[what]
    out = "old" if "--out" in change else "run"
    first = [*FLAGS, *QUIET, "--data-dir", folder, "--out", out]
    assert_one_line_of_all(processes("jcl", [first, [*first, *change]], tmp_path / "log"), words)


def test_processes_agree_on_stopping_within_ten_steps(monkeypatch):
    """All ask at the same steps, at least every tenth, and none stops alone in between, where the others would wait for it."""
    stop, others, asked = common.StopRequest.__new__(common.StopRequest), [0.0], []

    def all_reduce(flag, op):
        asked.append(step)
        flag.fill_(max(flag.item(), others[0]))

    monkeypatch.setattr(common, "rank_and_world", lambda: (0, 2))
    monkeypatch.setattr(common.dist, "all_reduce", all_reduce)
    for stop.requested, others[0] in ((False, 0.0), (True, 0.0), (False, 1.0)):
        asked.clear()
        stops = []
        for step in range(1, 101):
            stops += [step] * stop.agreed(step)
        assert max(np.diff([0, *asked])) <= 10 and stops == (asked if stop.requested or others[0] else [])


def test_a_run_goes_on_with_as_many_processes_as_its_groups_allow(begun, folder, tmp_path):
    shutil.copytree(begun["jcl"], tmp_path / "run")
    argv = [*FLAGS, *QUIET, "--data-dir", folder, "--out", tmp_path / "run", "--max-steps", "6"]
    ends = processes("jcl", [argv] * 2, tmp_path / "log")
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert "going on at step 5" in ends[0][1] and runs.load(tmp_path / "run" / "last.pt")["step"] == 6


def test_a_run_refuses_in_words_more_processes_than_its_groups_allow(folder, tmp_path, monkeypatch):
    """Three groups cannot be halved: the numbers would be another run's."""
    jcl = importlib.import_module("jcl")
    monkeypatch.setitem(jcl.RECIPES["patterns"], "bn_groups", 3)
    argv = [*FLAGS, *QUIET, "--batch-size", "18", "--data-dir", folder, "--out", tmp_path / "run", "--max-steps"]
    assert attempt("jcl", [*argv, "1"]) == ("done", "")
    with monkeypatch.context() as patch:  # as each of two processes would find out
        patch.setattr(common, "rank_and_world", lambda: (0, 2))
        patch.setattr(jcl, "require_agreement", lambda *_: None)
        refuse("jcl", [*argv, "2"], "bn_groups was 3")


# ---------------------------------------------------------------------- kills


def struck(argv, module, name, number, nth):
    """A run of CLIM that gets a signal in the middle of a refresh or an evaluation: in the n-th call of a function."""
    runs.narrow(importlib.import_module("clim"), drop_path=0.2)
    module, count = importlib.import_module(module), [0]
    function = getattr(module, name)

    def wrapped(*args, **kwargs):
        count[0] += 1
        if count[0] == nth:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    setattr(module, name, wrapped)
    clim = importlib.import_module("clim")
    clim.main(clim.parse_args(argv))


@pytest.mark.parametrize("module, name, nth", [("clim", "choose_positives", 2), ("common", "knn_scores", 3)])
def test_killed_in_a_refresh_or_an_evaluation(folder, tmp_path, module, name, nth):
    """By SIGKILL or on request: it goes on from the epoch before, or the one after, and ends the same, bit for bit."""
    flags = [*runs.TINY, "--device", "cpu", "--clim-start", "0", "--refresh-every", "1", "--data-dir", str(folder), "--out"]
    assert attempt("clim", [*flags, tmp_path / "whole"]) == ("done", "")
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)):
        argv = [*flags, str(tmp_path / f"run{status}")]
        assert runs.child(struck, tmp_path / "log", argv, module, name, number, nth) == status
        assert attempt("clim", argv) == ("done", "")
        runs.assert_same_run(tmp_path / "whole", tmp_path / f"run{status}")


# ---------------------------------------------------------- not finite numbers


POISONED = [(method, ()) for method in METHODS]
POISONED += [("logo", ("--l2l-weighting", "lambda")), ("logo", ("--affinity-form", "linear")), ("logo", ("--base", "simsiam"))]
POISONED += [("moco_jointcrop", ("--moco", "v3")), ("jcl", ("--arch", "resnet_nano"))]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method, flags", POISONED)
def test_a_step_that_is_not_finite_reaches_no_weight(folder, tmp_path, monkeypatch, method, flags, value):
    """One image spoils one step: no parameter of encoder, momentum encoder or affinity ever holds it, and nothing is saved."""
    module, bad, seen, spoil = importlib.import_module(method), 5, [], [False]
    train_step, normalize = module.train_step, common.normalize
    argv = [*FLAGS, *QUIET, *flags, "--data-dir", folder, "--out", tmp_path]
    assert attempt(method, [*argv, "--max-steps", "4"]) == ("done", "")
    before = runs.contents(tmp_path)

    def spoiled(x, mean, std):
        x = normalize(x, mean, std)
        return torch.cat([x[:1] * value, x[1:]]) if spoil[0] else x

    def watched(args, model, *rest):
        step = rest[-3]
        spoil[0] = step == bad
        metrics = train_step(args, model, *rest)
        spoil[0] = False
        modules = [model, *(part.affinity for part in rest if type(part).__name__ == "LocalToLocal")]
        seen.append((step, all(p.isfinite().all() for m in modules for p in m.parameters())))
        return metrics

    monkeypatch.setattr(common, "normalize", spoiled)
    monkeypatch.setattr(module, "train_step", watched)
    images = common.EpochSampler(68, 16, 0).batch(bad)[:3]
    refuse(method, argv, f"not finite since step {bad} (images {', '.join(map(str, images))},")
    assert [step for step, _ in seen] == [4, 5, 6, 7] and all(finite for _, finite in seen)
    assert {k: v for k, v in runs.contents(tmp_path).items() if k.suffix == ".pt"} == {
        k: v for k, v in before.items() if k.suffix == ".pt"
    }


@pytest.mark.parametrize("method", METHODS)
def test_a_finite_gradient_is_left_as_it_is_and_another_becomes_zero(method):
    finite = importlib.import_module(method).finite_gradient
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2,))]
    for i, p in enumerate(parameters[:2]):  # the third has no gradient
        p.grad = torch.randn(p.shape, generator=common.generator(i)) * 1e-30**i
    before = [p.grad.clone() for p in parameters[:2]]
    assert torch.equal(finite(iter(parameters)), torch.nn.utils.get_total_norm(before))
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=False)) and parameters[2].grad is None
    for value in (float("nan"), float("inf"), -float("inf")):
        parameters[0].grad[1, 2] = value
        assert not finite(parameters).isfinite()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in parameters[:2])


@pytest.mark.parametrize("end", ["an epoch's end", "--max-steps", "a request", "one of two processes"])
def test_nothing_of_a_step_that_is_not_finite_is_ever_saved(begun, folder, tmp_path, monkeypatch, end):
    """Whatever comes next. Batch norm, queue and momentum encoder take that step up, but go on from before it, bit for bit."""
    argv = [*FLAGS, *QUIET, "--arch", "resnet_nano", "--data-dir", folder, "--out", tmp_path / "run"]
    assert attempt("jcl", [*argv, "--max-steps", "5"]) == ("done", "")
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    before = runs.contents(tmp_path / "run")
    if end == "one of two processes":
        assert_one_line_of_all(processes("jcl", [argv] * 2, tmp_path / "log", spoil=1), "not finite since step 5")
    else:
        normalize, calls = common.normalize, []

        def spoiled(*args):
            calls.append(0)
            if end == "a request" and len(calls) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return normalize(*args) * float("nan")

        with monkeypatch.context() as patch:
            patch.setattr(common, "normalize", spoiled)
            refuse("jcl", [*argv, *(["--max-steps", "6"] if end == "--max-steps" else [])], "not finite since step 5")
        assert (len(calls) > 4) == (end == "an epoch's end")
    assert runs.contents(tmp_path / "run") == before
    for out in ("run", "whole"):
        assert attempt("jcl", [*argv[:-1], tmp_path / out]) == ("done", "")
    runs.assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_not_finite_are_never_saved(begun, folder, tmp_path, monkeypatch, method, which):
    """A step whose loss and gradient are finite can throw them out of range; only the next loss would show it."""
    module, out, train_step = importlib.import_module(method), tmp_path / "run", importlib.import_module(method).train_step

    def thrown(args, model, *rest):
        metrics = train_step(args, model, *rest)
        [v for v in model.state_dict().values() if v.is_floating_point()][which].view(-1)[0] = float("inf")
        return metrics

    shutil.copytree(begun[method], out)
    monkeypatch.setattr(module, "train_step", thrown)
    before = {path: content for path, content in runs.contents(out).items() if path.suffix == ".pt"}
    for more in (["--max-steps", "6"], []):  # the first step, and an epoch's end
        refuse(method, [*FLAGS, *QUIET, "--data-dir", folder, "--out", out, *more], "not finite")
        assert before.items() <= runs.contents(out).items()


# -------------------------------------------------------------------- workers


@pytest.mark.parametrize("script", ["jcl", "eval_knn"])
def test_a_killed_worker_is_one_line(begun, folder, tmp_path, script):
    """As the kernel does when memory is short."""
    argv = [*FLAGS, *QUIET, "--data-dir", folder, "--out", tmp_path / "run"]
    argv = argv if script == "jcl" else evaluate(script, begun["jcl"], folder)
    ((status, _, error),) = processes(script, [[*argv, "--workers", "2"]], tmp_path / "log", die=9)
    assert is_one_line(status, error) and "worker" in error, error


# --------------------------------------------------------------------- memory


def what_lacks_memory():
    """Kinds of exceptions, as torch, numpy, Python and a loader's worker raise them."""
    yield torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory ...")
    yield RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    yield RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    yield RuntimeError("std::bad_alloc")
    yield MemoryError()
    yield MemoryError("Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback:\n  File ...\nMemoryError")
    yield RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: can't allocate memory: you ...")
    yield OSError(12, "Cannot allocate memory")


MEMORY = {method: ("--grad-checkpoint", "--amp bf16", "--batch-size") for method in METHODS}
MEMORY |= {script: ("--batch-size", "--amp") for script in EVALUATIONS}


@pytest.mark.parametrize("script", MEMORY)
def test_too_little_memory_is_one_line_and_costs_nothing(begun, folder, tmp_path, monkeypatch, script):
    """While encoding, training, building the network, reading a checkpoint or writing one."""
    out = tmp_path / "run"
    shutil.copytree(begun[script if script in METHODS else "jcl"], out)
    argv = [*FLAGS, *QUIET, "--data-dir", folder, "--out", out] if script in METHODS else evaluate(script, out, folder)
    before = {path: content for path, content in runs.contents(out).items() if path.name not in ("metrics.jsonl", "backbone.pt")}
    places = [(common, "colour"), (torch, "save"), (torch.optim.Optimizer, "load_state_dict")] if script in METHODS else []
    for target, name in [*places, (common, "normalize"), (torch, "load"), (common.timm, "create_model")]:
        for error in what_lacks_memory() if name == "normalize" else [MemoryError(), next(what_lacks_memory())]:

            def short(*_, error=error, **__):
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(target, name, short)
                line = refuse(script, argv, "too little memory", *MEMORY[script])
            assert ("--grad-checkpoint" in line) == (script in METHODS)
            after = runs.contents(out)
            assert {path: after[path] for path in before} == before and not list(out.glob("*.tmp"))
    assert attempt(script, argv) == ("done", "")


@pytest.mark.parametrize("script", MEMORY)
def test_memory_that_runs_out_is_one_line(script, folder, tmp_path):
    """An allocation that truly fails: images of 2048 px, in 400 MiB."""
    argv = ["--data-dir", folder, "--arch", "resnet_micro", "--image-size", "2048", "--device", "cpu"]
    if script in METHODS:
        argv += ["--batch-size", "32", "--patch-size", "8", *QUIET, "--out", tmp_path / "run"]
    else:
        argv += ["--random-init", "--no-floors"]
    ((status, _, error),) = processes(script, [argv], tmp_path / "log", memory=400 * 2**20)
    assert is_one_line(status, error) and "too little memory" in error and not list(tmp_path.glob("run/*.pt")), error


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error, words", [(MemoryError(), "MemoryError"), (RuntimeError("a mistake in the code"), None)])
def test_an_error_in_a_worker_is_told_as_what_it_is(monkeypatch, folder, tmp_path, workers, error, words):
    def wrong(*_):
        raise error

    monkeypatch.setattr(common, "cut", wrong)
    argv = [*FLAGS, *QUIET, "--workers", workers, "--data-dir", folder, "--out", tmp_path]
    if words:
        refuse("jcl", argv, "too little memory", words)
    else:
        end, line = attempt("jcl", argv)
        assert end.startswith("RuntimeError: ") and line == ""  # a traceback is right


def test_a_checkpoint_is_not_passed_over_because_memory_is_short(begun, folder, tmp_path, monkeypatch):
    """The one before it would cost an epoch."""
    shutil.copytree(begun["jcl"], tmp_path / "run")
    assert (tmp_path / "run" / "last.prev.pt").exists()
    errors, torch_load = [MemoryError()], torch.load

    def short(*args, **kwargs):
        if errors:
            raise errors.pop()
        return torch_load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", short)
    refuse("jcl", [*FLAGS, *QUIET, "--data-dir", folder, "--out", tmp_path / "run"], "too little memory")


def test_an_image_is_not_bad_because_memory_is_short(folder, tmp_path, monkeypatch):
    """Otherwise --skip-bad-images would leave good images out."""

    def short(*_):
        raise MemoryError

    monkeypatch.setattr(Image.Image, "convert", short)
    refuse("jcl", [*FLAGS, "--data-dir", folder, "--skip-bad-images", "--out", tmp_path / "run"], "too little memory", ".png")


# ------------------------------------------------------------------- bad data


def png(width, height):
    """A file of a few bytes that says it is a picture of that size."""
    chunks = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b"")
    parts = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks)
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


def test_palettes_and_floats_are_read_as_what_they_show(tmp_path):
    """Transparency in bytes or as a colour; a TIFF of floats in 0 to 255."""
    image = Image.fromarray(common.make_patterns(1, 16, 0)[0][0])
    palette, expected = image.convert("P"), np.asarray(image.convert("P").convert("RGB"))
    palette.save(tmp_path / "bytes.png", transparency=bytes(range(200)))
    palette.save(tmp_path / "colour.png", transparency=3)
    for name in ("bytes.png", "colour.png"):
        assert np.array_equal(common.read_image(tmp_path / name), expected)
    image.convert("L").convert("F").save(tmp_path / "float.tif")
    assert np.array_equal(common.read_image(tmp_path / "float.tif"), np.asarray(image.convert("L").convert("RGB")))


@pytest.fixture(scope="module")
def spoiled(folder, tmp_path_factory):
    """(a copy of the data with bad images, another without them, their paths): three in training, one in the test set."""
    root = tmp_path_factory.mktemp("spoiled")
    for name in ("bad", "without"):
        shutil.copytree(folder, root / name)
    files = [sorted((root / "bad" / part).rglob("*.png")) for part in ("train", "test")]
    bad = [files[0][0], files[0][20], files[0][41], files[1][3]]
    for path, content in zip(bad, BAD.values(), strict=False):
        path.write_bytes(content)
        (root / "without" / path.relative_to(root / "bad")).unlink()
    return root / "bad", root / "without", bad


def only(spoiled, folder, tmp_path, i):
    """A copy of the good data with only the i-th bad image."""
    shutil.copytree(folder, tmp_path / "data")
    path = tmp_path / "data" / spoiled[2][i].relative_to(spoiled[0])
    path.write_bytes(spoiled[2][i].read_bytes())
    return tmp_path / "data", path


@pytest.mark.parametrize("i, flags", [(1, []), (1, ["--no-cache"]), (0, ["--no-cache"]), (3, ["--no-cache", "--knn-every", "1"])])
@pytest.mark.parametrize("method", METHODS)
def test_a_bad_image_stops_a_run_in_one_line(spoiled, folder, tmp_path, method, i, flags):
    """At the start, where images are decoded at once, else when it is met: by then the run has its folder."""
    data, path = only(spoiled, folder, tmp_path, i)
    refuse(method, [*FLAGS, *QUIET, *flags, "--data-dir", data, "--out", tmp_path / "run"], path, "--skip-bad-images")
    assert not list(tmp_path.glob("run/*.pt")) and (flags or not (tmp_path / "run").exists())


def test_a_bad_image_met_by_a_worker_stops_the_run_in_one_line(spoiled, folder, tmp_path):
    data, path = only(spoiled, folder, tmp_path, 1)
    argv = [*FLAGS, *QUIET, "--no-cache", "--workers", "2", "--data-dir", data, "--out", tmp_path / "run"]
    ((status, _, error),) = processes("jcl", [argv], tmp_path / "log")
    assert is_one_line(status, error) and str(path) in error, error


@pytest.mark.parametrize("method", METHODS)
def test_skipping_bad_images_is_training_without_them(spoiled, tmp_path, method):
    """Bit for bit, decoded at once or when asked for; it says how many and which."""
    bad, without, paths = spoiled
    said = runs.run(method, bad, tmp_path / "skipped", "--device", "cpu", "--skip-bad-images")
    runs.run(method, without, tmp_path / "without", "--device", "cpu")
    runs.assert_same_run(tmp_path / "skipped", tmp_path / "without")
    assert "3 of 68 images" in said and "1 of 32 images" in said and all(str(p) in said for p in paths)


def test_two_processes_skip_the_same_images(spoiled, tmp_path):
    bad, without, _ = spoiled
    for name, data, flag in (("skipped", bad, ["--skip-bad-images"]), ("without", without, [])):
        argv = [*FLAGS, *QUIET, "--epochs", "1", "--data-dir", data, "--out", tmp_path / name, *flag]
        ends = processes("jcl", [argv] * 2, tmp_path / "log")
        assert [status for status, _, _ in ends] == [0, 0], ends
    states = [runs.load(tmp_path / name / "last.pt") for name in ("skipped", "without")]
    runs.assert_equal(*({k: v for k, v in state.items() if k != "config"} for state in states))


@pytest.mark.parametrize("script", EVALUATIONS)
def test_evaluations_skip_bad_images_too(begun, spoiled, script):
    bad, without, paths = spoiled
    refuse(script, evaluate(script, begun["jcl"], bad), paths[0], "--skip-bad-images")
    module = importlib.import_module(script)
    torch.set_num_threads(1)
    argv = [evaluate(script, begun["jcl"], bad, "--skip-bad-images"), evaluate(script, begun["jcl"], without)]
    first, second = (module.main(module.parse_args([str(a) for a in one])) for one in argv)
    assert first == second


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("script", ["jcl", *EVALUATIONS])
def test_a_class_of_bad_images_only_is_refused_in_words(begun, folder, tmp_path, script, part):
    shutil.copytree(folder, tmp_path / "data")
    for path in (tmp_path / "data" / part / "kind2").iterdir():
        path.write_bytes(b"")
    argv = [*FLAGS, "--data-dir", tmp_path / "data", "--out", tmp_path / "run"]
    argv = argv if script == "jcl" else evaluate(script, begun["jcl"], tmp_path / "data")
    refuse(script, [*argv, "--skip-bad-images"], "no readable images", tmp_path / "data" / part / "kind2")


def one_image(root):
    for part in ("train", "test"):
        (root / part / "a").mkdir(parents=True)
        Image.fromarray(common.make_patterns(1, 16, 0)[0][0]).save(root / part / "a" / "0.png")
    return root


@pytest.mark.parametrize("method", METHODS)
def test_fewer_images_than_a_batch_are_refused_in_words(tmp_path, method):
    refuse(method, [*FLAGS, "--data-dir", one_image(tmp_path), "--out", tmp_path / "run"], "1 images are fewer", "--batch-size 1")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", EVALUATIONS)
def test_one_image_of_one_class_is_judged_or_refused_in_words(begun, tmp_path, script):
    end, error = attempt(script, evaluate(script, begun["jcl"], one_image(tmp_path)))
    assert (end, error) == ("done", "") or is_one_line(end, error), (end, error)


@pytest.mark.parametrize("script", EVALUATIONS)
def test_an_evaluation_needs_labels(begun, folder, script):
    argv = evaluate(script, begun["jcl"], folder / "train")
    argv[argv.index("patterns")] = "folder"
    refuse(script, argv, "labels")


# -------------------------------------------------------- wrong command lines

HUGE, LONG = "9" * 30, "x" * 300
NUMBERS = {int: ["text", "", "1.5", "nan", "inf", "-1", "0", "1e999", HUGE], float: ["text", "", "nan", "inf", "-inf", "-1", "0"]}
NUMBERS[float] += ["1e999", "1e300"]
COUNTS = "of what never comes: a run just ends before"
ALL = "more than there are means all"
ZERO = "nought is a value"
NOTHING = "as if it were not given"
MADE = "a folder that is not there is made"
FINITE = "any finite number; the run itself stops in words if it cannot live with it"
ACCEPTED = {  # generated values that are right: option: {value: the reason}
    "--seed": {"0": ZERO, "-1": "evaluations take any integer of 64 bits"},
    "--workers": {"0": ZERO},
    "--keep-every": {"0": "never", HUGE: COUNTS},
    "--knn-every": {"0": "never", HUGE: COUNTS},
    "--save-every": {HUGE: COUNTS},
    "--epochs": {HUGE: COUNTS},
    "--max-steps": {HUGE: COUNTS},
    "--refresh-every": {HUGE: COUNTS},
    "--clim-start": {"0": ZERO, HUGE: COUNTS},
    "--num-clusters": {HUGE: ALL},
    "--knn-k": {HUGE: ALL},
    "--k": {HUGE: ALL},
    "--batch-size": {HUGE: ALL},  # of an evaluation
    "--image-size": {HUGE: "evaluations: with --random-init only"},
    "--patch-size": {HUGE: "evaluations: with --random-init only"},
    "--lr": {"1e300": FINITE},
    "--lrs": {"1e300": FINITE},
    "--lam": {"0": ZERO, "1e300": FINITE},
    "--clip-ratio": {"0": ZERO, "1e300": FINITE},
    "--beta": {"0": ZERO, "-1": FINITE, "1e300": FINITE},
    "--joint-prob": {"0": ZERO},
    "--blur-prob": {"0": ZERO},
    "--css-alpha": {"1e300": FINITE},
    "--alpha": {"1e300": FINITE},
    "--temperature": {"1e300": FINITE},
    "--out": {"": NOTHING, "missing/x": MADE},
    "--show-views": {"": NOTHING, "missing/x": MADE},
    "--pictures": {"": NOTHING, "missing/x": MADE},
    "--attention": {"": NOTHING, "missing/x": MADE},
    "--similarities": {"": NOTHING, "missing/x": MADE},
    "--dump": {"": NOTHING, "missing/x": MADE},
    "--label-files": {"": NOTHING},
    "--data-dir": {"": NOTHING},
}


def options(script):
    """The options of a script's parser."""
    with pytest.MonkeyPatch.context() as patch:
        found = []
        patch.setattr(common.ArgumentParser, "parse_args", lambda self, argv=None: found.append(self) or sys.exit(0))
        with contextlib.suppress(SystemExit):
            importlib.import_module(script).parse_args([])
    return [action for action in found[0]._actions if not isinstance(action, argparse._HelpAction)]


def wrong_values(action):
    """(value, the arguments that give it) of one option: by its type, its number of values and its choices."""
    flag = action.option_strings[0] if action.option_strings else None
    if action.nargs == 0:
        return [("yes", [f"{flag}=yes"])]
    values = ["text", ""] if action.choices else NUMBERS.get(action.type, ["", LONG, "missing/x", "/dev/null/x"])
    if flag is None:
        return [(value, [value]) for value in values]
    few = [("too few", [flag])]
    if action.nargs == 2:
        few += [("too few", [flag, "0.5"]), ("too many", [flag, "0.5", "0.6", "0.7"])]
        few += [("reversed", [flag, "1", "0.2"])] if "scale" in flag else []  # two probabilities have no order
        return few + [(v, [flag, *pair]) for v in values for pair in ((v, "0.5"), ("0.5", v), (v, v))]
    return few + [(value, [flag, value] if action.nargs else [f"{flag}={value}"]) for value in values]


def command(script, action, begun, folder):
    """A right command line, for a step or so, to which the wrong value is added."""
    if script in METHODS:
        return [*FLAGS, *QUIET, "--data-dir", folder, "--out", "run"], ["--max-steps", "1"]
    checkpoint = [] if not action.option_strings else [begun["jcl"]]
    return [*checkpoint, *evaluate(script, None, folder)[1:]], []


@pytest.mark.parametrize("script", METHODS + EVALUATIONS)
def test_every_wrong_value_of_every_option_is_one_line(begun, folder, tmp_path, monkeypatch, script):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrong, accepted = {}, 0
    for action in options(script):
        flag = action.option_strings[0] if action.option_strings else "checkpoint"
        for value, added in wrong_values(action):
            if (script, flag, value) == ("eval_linear", "--epochs", HUGE):
                continue  # right, but it would train for ever
            before, after = command(script, action, begun, folder)
            line = [*before, *(after if flag != "--max-steps" else [])]
            end, error = attempt(script, [*line, *added] if action.option_strings else [*added, *line])
            written = sorted(p.name for p in tmp_path.iterdir())
            for path in tmp_path.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if value in ACCEPTED.get(flag, ()) and (end == "done" or is_one_line(end, error)):
                accepted += end == "done"
                continue
            named = any(name in error for name in (flag, flag[2:].replace("-", " "), value or "give", "unrecognized"))
            if not is_one_line(end, error) or written or not named:
                wrong[" ".join(added)[:60]] = end, error[:200], written
    assert wrong == {} and (accepted or script not in METHODS)


COMBINATIONS = [  # script, flags, a word of the line; None: goes well
    *((m, "--batch-size 2 --arch resnet_micro", "--batch-size") for m in METHODS if m != "patchmix"),
    *((m, "--batch-size 2 --arch resnet_nano --image-size 8", "--batch-size") for m in METHODS if m != "patchmix"),
    ("moco_jointcrop", "--moco v3 --batch-size 1", "--batch-size"),
    ("logo", "--base simsiam --batch-size 1", "--batch-size"),
    ("patchmix", "--num-mix 1 --batch-size 1", "--batch-size"),
    *((m, "--image-size 1", "--patch-size 8") for m in METHODS),
    *((m, "--arch resnet_micro --image-size 1", None) for m in METHODS if m != "patchmix"),
    *((m, "--arch resnet_micro --image-size 8", None) for m in METHODS if m != "patchmix"),
    ("patchmix", "--arch resnet_micro --image-size 8", "--num-mix"),
    *((m, "--patch-size 32", "--patch-size 32") for m in METHODS),
    *((m, "--queue 1", None) for m in METHODS if m != "patchmix"),
    ("patchmix", "--queue 1", "--queue"),
    *((m, "--queue 1000000000000000", "--queue") for m in METHODS if m != "patchmix"),
    ("patchmix", "--batch-size 4 --mix-slices 4", "--num-mix"),
    ("patchmix", "--num-mix 5", "--num-mix 5"),
    ("patchmix", "--mix-slices 32", "--mix-slices"),
    ("clim", "--num-clusters 1000 --clim-start 0", None),
    ("clim", "--resolutions 0", "--resolutions"),
    ("clim", "--resolutions 16 12", "--resolutions"),
    ("clim", "--resolutions 8", "--resolutions"),
    ("clim", "--knn-k 0", "--knn-k"),
    ("clim", "--num-positives 1000000000000000", "--num-positives"),
    ("jcl", "--num-keys 1000000000000", "--num-keys"),
    ("moco_jointcrop", "--crop-scale 1 0.2", "--crop-scale"),
    ("moco_jointcrop", "--css-alpha inf", "--css-alpha"),
    ("moco_jointcrop", "--moco v3 --queue 8", "--queue"),
    ("logo", "--local-scale 0.4 0.08", "--local-scale"),
    ("logo", "--global-scale 1 0.4", "--global-scale"),
    ("logo", "--one-way", "--local-crops 0"),
]


@pytest.mark.parametrize("method, flags, words", COMBINATIONS)
def test_flags_that_do_not_fit_together_are_one_line(folder, tmp_path, monkeypatch, method, flags, words):
    monkeypatch.chdir(tmp_path)
    argv = [*FLAGS, *QUIET, "--max-steps", "1", "--data-dir", folder, "--out", "run", *flags.split()]
    if words is None:
        assert attempt(method, argv) == ("done", "")
    else:
        refuse(method, argv, words)
        assert not list(tmp_path.iterdir())
