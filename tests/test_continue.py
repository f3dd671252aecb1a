"""Runs that are stopped, killed and continued end as undisturbed ones: the same last.pt and records, bit for bit."""

import importlib
import itertools
import json
import random
import signal
import subprocess
import sys
import weakref

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from tiny import FLAGS, STEPS, assert_same_run, contents, life, load, processes, records, run

import common

_tiny = tiny._tiny

CONFIGS = {  # name: (script, flags)
    "jcl": ("jcl", "--arch resnet_nano"),
    "moco_jointcrop": ("moco_jointcrop", ""),
    "moco_jointcrop --moco v3": ("moco_jointcrop", "--moco v3"),
    "clim": ("clim", "--clim-start 1 --refresh-every 1 --num-clusters 4"),
    "logo": ("logo", ""),
    "logo --base simsiam": ("logo", "--base simsiam"),
    "patchmix": ("patchmix", ""),
    "eval_linear": ("eval_linear", ""),
}
# Flags of all calls, and the calls before the last: (more flags, "SIGNAL PLACE how many-eth", exit status, step of
# last.pt afterwards, or ... if it depends on the script). A save calls torch.save twice or, of eval_linear.py, once.
STRUCK = [(n, -9 if n < 6 else ..., ... if n > 1 else None) for n in (1, 2, 3, 4, 6)]
JUDGED = [(1, 4), (1, 4), (2, 8), (2, 12), (1, 12)]
SCENARIOS = {
    "straight, and once more": ("", [("", "", 0, 12)]),
    "max-steps": ("", [
        ("--max-steps 4", "KILL judging 1", -9, 4), ("--max-steps 6", "", 0, 6), ("--max-steps 6", "", 0, 6),
        ("--max-steps 8", "", 0, 8),
    ]),
    "asked in mid-epoch": ("", [("", "TERM step 1", 75, 1), ("", "INT step 5", 75, 6), ("", "HUP step 1", 75, 7)]),
    "asked in last steps": ("", [
        ("", "TERM step 4", 75, 4), ("--max-steps 6", "TERM step 2", 75, 6), ("", "TERM step 6", 75, 12),
    ]),
    "killed in mid-epoch": ("", [("", "KILL step 6", -9, 4)]),
    "killed in saves": ("", [("", f"KILL save {n}", status, step) for n, status, step in STRUCK]),
    "killed while judged": ("", [("", f"KILL judging {n}", -9, step) for n, step in JUDGED]),
    "asked while judged": ("", [
        ("", "TERM judging 1", -15, 4), ("", "HUP judging 1", -1, 4), ("", "INT judging 1", 130, 4),
    ]),
    "keep-every 2": ("--keep-every 2", [
        ("", "KILL save 12", -9, 8), ("", "KILL save 2", -9, 8), ("", "TERM step 4", 75, 12),
    ]),
    "two workers": ("--workers 2", [("", "TERM step 6", 75, 6)]),
    "ended in CLIM's choice": ("--knn-every 0", [
        ("", "INT choice 1", 130, 4), ("", "TERM choice 1", -15, 4), ("", "KILL choice 2", -9, 8),
    ]),
}  # fmt: skip
AT_ONCE = "asked in mid-epoch", "killed in saves"  # of jcl, without --slow


@pytest.fixture(scope="module")
def encoder(_tiny, tmp_path_factory):
    """The folder of a run, for eval_linear.py."""
    out = tmp_path_factory.mktemp("encoder") / "run"
    run("jcl", out, "--arch", "resnet_nano", "--max-steps", "1")
    return out


@pytest.fixture(scope="module")
def command(encoder):
    """A function: (name of a configuration, flags) -> (script, words of its command)."""

    def words(name, flags=""):
        script, own = CONFIGS[name]
        if script == "eval_linear":
            judged = [encoder, *"--protocol moco --batch-size 16 --epochs 3 --eval-every 1 --device cpu".split()]
            return script, [*judged, *flags.replace("--knn-every", "--eval-every").split()]
        return script, [*FLAGS, "--epochs", "3", *own.split(), *flags.split()]

    return words


@pytest.fixture(scope="module")
def straight(command, tmp_path_factory):
    """A function: (name of a configuration, flags) -> the folder of the undisturbed run, made once."""
    made = {}

    def folder(name, flags=""):
        if (name, flags) not in made:
            made[name, flags] = tmp_path_factory.mktemp("straight") / "run"
            script, words = command(name, flags)
            assert life(script, [*words, "--out", made[name, flags]])[0] == 0
        return made[name, flags]

    return folder


def step_of(out):
    return load(out / "last.pt")["step"] if (out / "last.pt").exists() else None


def check(script, words, calls, reference, out):
    """Make the calls of a command, then one that ends by itself: it must end as the reference."""
    interrupted = set()
    for more, moment, status, step in calls:
        found, said = life(script, [*words, *more.split(), "--out", out], moment)
        assert status in (..., found) and step in (..., step_of(out)), f"{found}, step {step_of(out)}: {said}"
        interrupted |= {(step_of(out) or 0) // STEPS + 1} if (step_of(out) or 0) % STEPS else set()
    assert life(script, [*words, "--out", out])[0] == 0
    assert_same_run(reference, out, interrupted)


CASES = [
    pytest.param(name, scenario, marks=[] if name == "jcl" and scenario in AT_ONCE else pytest.mark.slow)
    for name, scenario in itertools.product(CONFIGS, SCENARIOS)
    if not ("CLIM" in scenario and name != "clim" or "keep" in scenario and name == "eval_linear")
]


@pytest.mark.parametrize("name, scenario", CASES)
def test_a_disturbed_run_ends_as_an_undisturbed_one(command, straight, tmp_path, name, scenario):
    flags, calls = SCENARIOS[scenario]
    check(*command(name, flags), calls, straight(name, flags), tmp_path)


def test_killed_at_each_moment_in_turn(command, straight, tmp_path):
    """The n-th life ends at its n-th step, write, flush, renaming or judging, until one lasts."""
    script, words = command("jcl")
    for number in itertools.count(1):
        status, said = life(script, [*words, "--out", tmp_path], f"KILL anything {number}")
        if status == 0:
            break
        assert status == -9, said
    assert number > 20
    assert_same_run(straight("jcl"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jcl", "clim", "patchmix", "eval_linear"])
def test_two_processes(command, tmp_path, name):
    """Both stop if one is asked; both are killed while they judge."""
    script, words = command(name)

    def both(out, *moments):
        return processes(tmp_path / "log", tiny.play, [(script, [*words, "--out", tmp_path / out], m) for m in moments])

    for out, first, second, status, step in (
        ("straight", "", "", 0, 12),
        ("run", "", "TERM step 6", 75, 6),
        ("run", "TERM judging 1", "TERM judging 1", -15, 8),
        ("run", "INT step 1", "INT step 1", 75, 9),
        ("run", "", "", 0, 12),
    ):
        ends = both(out, first, second)
        assert [end[0] for end in ends] == [status] * 2 and step_of(tmp_path / out) == step, ends
    assert_same_run(tmp_path / "straight", tmp_path / "run", {2, 3})


@pytest.mark.slow
def test_torchrun(command, tmp_path):
    """SIGTERM to torchrun, which hands it on: one line of ours, and the same run in the end."""
    script, words = command("jcl")
    for out, moment in (("straight", ""), ("run", "TERM step 6"), ("run", "")):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tiny.__file__]
        line = [*launch, script, moment, *words, "--out", str(tmp_path / out)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300)
        assert (done.returncode != 0) == bool(moment) == ("stopped on request" in done.stdout), done.stderr
        assert done.stdout.count("stopped on request") <= 1
    assert_same_run(tmp_path / "straight", tmp_path / "run", {2})


# --------------------------------------------------- what a stop leaves to a caller


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stop_leaves_no_group_and_no_ddp_and_the_callers_draws(name, command, group_of_one, tmp_path, monkeypatch):
    """Exit status 75. DDP is freed before its group: torch may hang otherwise."""
    script, words = command(name)
    module, models, freed = importlib.import_module(script), [], []
    wrap, destroy = module.DistributedDataParallel, dist.destroy_process_group

    def watched(*args, **options):
        ddp = wrap(*args, **options)
        models.append(weakref.ref(ddp))
        return ddp

    monkeypatch.setattr(module, "DistributedDataParallel", watched)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: freed.append(models[0]() is None) or destroy())
    before = generators()
    with pytest.raises(SystemExit) as stop:
        tiny.strike(monkeypatch, "TERM step 2", signal.raise_signal)
        module.main(module.parse_args([*map(str, words), "--out", str(tmp_path)]))
    assert stop.value.code == 75 and step_of(tmp_path) == 2
    assert freed == [True] and not dist.is_initialized() and generators() == before


# --------------------------------------------------------------- the last.pt itself


def test_a_damaged_checkpoint_is_told_and_left_alone(command, tmp_path, capsys):
    """One that was kept takes its place."""
    script, words = command("jcl", "--keep-every 1")
    words += ["--out", tmp_path]
    life(script, words, "TERM step 6")
    last = tmp_path / "last.pt"
    last.write_bytes(last.read_bytes()[:-5000])
    before = contents(tmp_path)
    assert life(script, words)[0] == 2 and str(last) in capsys.readouterr().err and contents(tmp_path) == before
    (tmp_path / "epoch-0001.pt").rename(last)
    assert "at step 4" in life(script, words)[1] and step_of(tmp_path) == 12


def test_resume_from_another_folder(command, straight, tmp_path):
    """--resume FILE: the same weights and records. The same command again goes on in --out."""
    script, words = command("jcl", "--keep-every 1")
    life(script, [*words, "--out", tmp_path / "a"], "TERM step 6")
    before = contents(tmp_path / "a")
    more = [*words, "--resume", tmp_path / "a" / "last.pt", "--out", tmp_path / "b"]
    life(script, more, "TERM step 1")
    assert step_of(tmp_path / "b") == 7 and life(script, more)[0] == 0 and contents(tmp_path / "a") == before
    (tmp_path / "b" / "epoch-0001.pt").write_bytes((tmp_path / "a" / "epoch-0001.pt").read_bytes())
    assert_same_run(straight("jcl", "--keep-every 1"), tmp_path / "b", {2})
    life(script, [*words, "--resume", tmp_path / "a" / "epoch-0001.pt", "--out", tmp_path / "c"], "TERM step 1")
    assert step_of(tmp_path / "c") == 5 and [r["step"] for r in records(tmp_path / "c")] == [4]


@pytest.mark.parametrize("method", ["jcl", "logo"])
def test_an_optimisers_flags_hold_over_those_of_another_run(method, _tiny, tmp_path):
    run(method, tmp_path / "a", "--max-steps", "2")
    run(method, tmp_path / "b", *"--max-steps 3 --sgd-momentum 0.5 --resume".split(), tmp_path / "a" / "last.pt")
    optimizers = [part for name, part in load(tmp_path / "b" / "last.pt").items() if name.endswith("optimizer")]
    assert {group["momentum"] for part in optimizers for group in part["param_groups"]} == {0.5}


def test_clim_without_selection_leaves_the_positives_of_another_run(_tiny, tmp_path):
    run("clim", tmp_path / "a", *"--clim-start 0 --num-clusters 4 --knn-k 8 --max-steps 2".split())
    assert load(tmp_path / "a" / "last.pt")["positives"].min() >= 0
    run("clim", tmp_path / "b", "--selection", "none", "--resume", tmp_path / "a" / "last.pt")
    assert load(tmp_path / "b" / "last.pt")["positives"].max() == -1


def test_a_run_that_has_made_no_step_is_begun_anew(_tiny, tmp_path, monkeypatch):
    """It may have lacked the memory. The next call may have other flags."""
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(importlib.import_module("jcl"), "schedule", lambda *_: 1 / 0)
        run("jcl", tmp_path, "--bn-groups", "4")
    assert step_of(tmp_path) == 0
    run("jcl", tmp_path, *"--batch-size 8 --max-steps 1".split())
    assert step_of(tmp_path) == 1 and json.loads((tmp_path / "config.json").read_text())["batch_size"] == 8


def test_what_is_made_of_last_pt_is_mended(command, straight, tmp_path):
    """Files that were lost, spoilt or not finished are written anew."""
    script, words = command("jcl")
    (tmp_path / "last.pt.tmp").write_bytes(b"half")
    life(script, [*words, "--out", tmp_path], "TERM step 8")
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\x00\n[1]\nnull\n")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "backbone.pt").unlink()
    check(script, words, [("--max-steps 8", "", 0, 8)], straight("jcl"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == 0.06 and not list(tmp_path.glob("*.tmp"))


# ----------------------------------------------------------------------- signals


def test_nohup_holds_and_handlers_are_put_back():
    """What nohup ignores is no request."""
    before, done = signal.getsignal(signal.SIGHUP), []
    with pytest.raises(ZeroDivisionError), common.until_stopped("abc"):
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGHUP) == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with common.until_stopped("abc") as batches:
        for batch in batches:
            signal.raise_signal(signal.SIGHUP)
            done.append(batch)
    signal.signal(signal.SIGHUP, before)
    assert done == ["a", "b", "c"]


def test_a_second_signal_acts_at_once_if_it_is_not_the_same_request(monkeypatch):
    """A scheduler and torchrun may both send the first. Who asks again later means it."""
    now = [100.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    with pytest.raises(KeyboardInterrupt), common.until_stopped("abc"):
        for now[0] in (100.0, 101.0, 102.9):  # noqa: B020
            signal.raise_signal(signal.SIGINT)
        now[0] = 104.0
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second request was not answered")
