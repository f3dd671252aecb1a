"""Runs that are stopped, killed and continued end as undisturbed ones: the same last.pt and records, bit for bit."""

import itertools
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tiny
from tiny import FLAGS, STEPS, assert_same_run, contents, life, load, processes, records

import common

_tiny = tiny._tiny

CONFIGS = {  # name: (script, flags)
    "jcl": ("jcl", "--arch resnet_nano"),
    "moco_jointcrop": ("moco_jointcrop", ""),
    "moco_jointcrop --moco v3": ("moco_jointcrop", "--moco v3"),
    "clim": ("clim", "--clim-start 1 --refresh-every 1 --num-clusters 4"),
    "logo": ("logo", "--arch resnet_nano"),
    "logo --base simsiam": ("logo", "--base simsiam"),
    "patchmix": ("patchmix", ""),
    "eval_linear": ("eval_linear", ""),
}
# Flags of all calls, and the calls before the last: (more flags, "SIGNAL PLACE how many-eth", exit status, step of
# last.pt afterwards, or ... if it depends on the script). A save calls torch.save twice or, of eval_linear.py, once.
SCENARIOS = {
    "straight, and once more": ("", [("", "", 0, 12)]),
    "max-steps in mid-epoch": ("", [("--max-steps 6", "", 0, 6), ("--max-steps 6", "", 0, 6)]),
    "max-steps at an epoch's end": ("", [("--max-steps 4", "", 0, 4), ("--max-steps 8", "", 0, 8)]),
    "SIGTERM in mid-epoch": ("", [("", "TERM step 1", 75, 1), ("", "TERM step 5", 75, 6)]),
    "SIGINT in mid-epoch": ("", [("", "INT step 6", 75, 6)]),
    "SIGHUP in mid-epoch": ("", [("", "HUP step 6", 75, 6)]),
    "SIGTERM in an epoch's last step": ("", [("", "TERM step 4", 75, 4), ("", "TERM step 4", 75, 8)]),
    "SIGTERM in the run's last step": ("", [("", "TERM step 12", 75, 12)]),
    "SIGTERM at max-steps": ("", [("--max-steps 6", "TERM step 6", 75, 6)]),
    "SIGTERM in saves": ("", [("", "TERM save 1", -15, None), ("", "TERM save 3", ..., ...)]),
    "SIGKILL in mid-epoch": ("", [("", "KILL step 6", -9, 4)]),
    "SIGKILL in saves": (
        "",
        [("", f"KILL save {n}", -9 if n < 6 else ..., ... if n > 1 else None) for n in (1, 2, 3, 4, 6)],
    ),
    "SIGKILL while judged": (
        "",
        [("", f"KILL judging {n}", -9, step) for n, step in ((1, 4), (1, 4), (2, 8), (2, 12), (1, 12))],
    ),
    "SIGTERM while judged": ("", [("", "TERM judging 1", -15, 4), ("", "TERM judging 3", -15, 12)]),
    "SIGHUP while judged": ("", [("", "HUP judging 1", -1, 4), ("", "HUP judging 3", -1, 12)]),
    "Ctrl-C while judged": ("", [("", "INT judging 1", 130, 4), ("", "INT judging 3", 130, 12)]),
    "max-steps, and judged in between": ("", [("--max-steps 4", "KILL judging 1", -9, 4), ("--max-steps 4", "", 0, 4)]),
    "keep-every 2": ("--keep-every 2", [("", "TERM step 8", 75, 8)]),
    "keep-every 2, SIGKILL in saves": ("--keep-every 2", [("", "KILL save 12", -9, 8), ("", "KILL save 2", -9, 8)]),
    "two workers": ("--workers 2", [("", "TERM step 6", 75, 6)]),
    "ended in CLIM's choice": (
        "--knn-every 0",
        [("", "INT choice 1", 130, 4), ("", "TERM choice 1", -15, 4), ("", "KILL choice 2", -9, 8)],
    ),
}
HARD = [
    ("--max-steps 2", "", 0, 2),
    ("", "TERM step 2", 75, 4),
    ("", "KILL judging 2", -9, 8),
    ("", "INT step 2", 75, 10),
]


@pytest.fixture(scope="module")
def encoder(_tiny, tmp_path_factory):
    """The folder of a run, for eval_linear.py."""
    out = tmp_path_factory.mktemp("encoder") / "run"
    tiny.run("jcl", out, "--arch", "resnet_nano", "--max-steps", "1")
    return out


@pytest.fixture(scope="module")
def command(encoder):
    """A function: (name of a configuration, flags) -> (script, words of its command)."""

    def words(name, flags):
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
    pytest.param(name, scenario, marks=[] if name == "jcl" or "CLIM" in scenario else pytest.mark.slow)
    for name, scenario in itertools.product(CONFIGS, SCENARIOS)
    if not ("CLIM" in scenario and name != "clim" or "keep" in scenario and name == "eval_linear")
]


@pytest.mark.parametrize("name, scenario", CASES)
def test_a_disturbed_run_ends_as_an_undisturbed_one(command, straight, tmp_path, name, scenario):
    flags, calls = SCENARIOS[scenario]
    check(*command(name, flags), calls, straight(name, flags), tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hard_life_of_every_loop(command, straight, tmp_path, name):
    check(*command(name, ""), HARD, straight(name), tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_finished_run_stays_as_it_is(command, straight, name):
    """The same command repeats its result."""
    out, (script, words) = straight(name), command(name, "")
    before, state = contents(out), load(out / "last.pt")
    status, said = life(script, [*words, "--out", out])
    assert status == 0 and "epoch 3/3  loss" in said and tiny.unequal(state, load(out / "last.pt")) == []
    assert {name for name, content in contents(out).items() if content != before[name]} <= {Path("last.pt")}


def test_killed_at_each_moment_in_turn(command, straight, tmp_path):
    """The n-th life ends at its n-th step, write, flush, renaming or judging, until one lasts."""
    script, words = command("jcl", "")
    for number in itertools.count(1):
        status, said = life(script, [*words, "--out", tmp_path], f"KILL anything {number}")
        if status == 0:
            break
        assert status == -9, said
    assert number > 20
    assert_same_run(straight("jcl"), tmp_path)


def test_sighup_under_nohup_is_ignored(command, straight, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        check(*command("jcl", ""), [("", "HUP step 6", 0, 12)], straight("jcl"), tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize("moment, status", [("TERM judging 1", -15), ("INT judging 1", 130), ("KILL save 4", -9)])
def test_real_signals(command, straight, tmp_path, moment, status):
    script, words = command("jcl", "")
    args = (script, [*words, "--out", tmp_path / "run"], moment)
    ((found, _, error),) = processes(tmp_path / "log", tiny.play, [args])
    assert (found, error) == (status, "") and step_of(tmp_path / "run") == 4
    check(script, words, [], straight("jcl"), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jcl", "clim", "patchmix", "eval_linear"])
def test_two_processes(command, tmp_path, name):
    """Both stop if one is asked; both are killed while they judge."""
    script, words = command(name, "")

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
    script, words = command("jcl", "")
    for out, moment in (("straight", ""), ("run", "TERM step 6"), ("run", "")):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tiny.__file__]
        line = [*launch, script, moment, *words, "--out", str(tmp_path / out)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300)
        assert (done.returncode != 0) == bool(moment) == ("stopped on request" in done.stdout), done.stderr
        assert done.stdout.count("stopped on request") <= 1
    assert_same_run(tmp_path / "straight", tmp_path / "run", {2})


# --------------------------------------------------------------- the last.pt itself


def test_a_damaged_checkpoint_is_told_and_left_alone(command, tmp_path, capsys):
    """One that was kept takes its place."""
    script, words = command("jcl", "--keep-every 1")
    words += ["--out", tmp_path]
    life(script, words, "TERM step 6")
    last = tmp_path / "last.pt"
    last.write_bytes(last.read_bytes()[:-5000])
    before = contents(tmp_path)
    assert life(script, words)[0] == 2 and f"{last} is damaged or cut off" in capsys.readouterr().err
    assert contents(tmp_path) == before
    (tmp_path / "epoch-0001.pt").rename(last)
    assert "going on from" in life(script, words)[1] and step_of(tmp_path) == 12


def test_an_optimisers_flags_hold_over_those_of_another_run(command, tmp_path):
    script, words = command("jcl", "")
    life(script, [*words, "--out", tmp_path / "a", "--max-steps", "2"])
    more = ["--sgd-momentum", "0.5", "--resume", tmp_path / "a" / "last.pt", "--out", tmp_path / "b"]
    assert life(script, [*words, *more, "--max-steps", "3"])[0] == 0
    (group,) = load(tmp_path / "b" / "last.pt")["optimizer"]["param_groups"]
    assert group["momentum"] == 0.5


def test_resume_from_another_folder(command, straight, tmp_path, capsys):
    """--resume PATH: the same weights and records. The same command again goes on in --out."""
    script, words = command("jcl", "--keep-every 1")
    life(script, [*words, "--out", tmp_path / "a"], "TERM step 6")
    before = contents(tmp_path / "a")
    more = [*words, "--resume", tmp_path / "a" / "last.pt", "--out", tmp_path / "b"]
    life(script, more, "TERM step 1")
    said = life(script, more)[1]
    assert f"going on from {tmp_path / 'b' / 'last.pt'}, at step 7" in said and contents(tmp_path / "a") == before
    (tmp_path / "b" / "epoch-0001.pt").write_bytes((tmp_path / "a" / "epoch-0001.pt").read_bytes())
    assert_same_run(straight("jcl", "--keep-every 1"), tmp_path / "b", {2})
    life(script, [*words, "--resume", tmp_path / "a" / "epoch-0001.pt", "--out", tmp_path / "c"], "TERM step 1")
    assert step_of(tmp_path / "c") == 5 and [r["step"] for r in records(tmp_path / "c")] == [4]
    few = [*words, "--epochs", "1", "--resume", tmp_path / "a" / "last.pt", "--out", tmp_path / "d"]
    assert life(script, few)[0] == 2 and "more than --epochs 1 has" in capsys.readouterr().err


def test_what_is_made_of_last_pt_is_mended(command, straight, tmp_path):
    """Files that were lost or spoilt are written anew, and unfinished ones are removed."""
    script, words = command("jcl", "")
    (tmp_path / "last.pt.99999.tmp").write_bytes(b"half")
    life(script, [*words, "--out", tmp_path], "TERM step 8")
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\x00\n[1]\nnull\n")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "backbone.pt").unlink()
    check(script, words, [("--max-steps 8", "", 0, 8)], straight("jcl"), tmp_path)
    assert common.read_config(tmp_path)["lr"] == 0.06 and not list(tmp_path.glob("*.tmp"))


# ----------------------------------------------------------------------- signals

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_not_obeyed(number):
    """An error passes through, and handlers are put back."""
    before = handlers()
    with pytest.raises(ZeroDivisionError), common.signals_noted() as stopped:
        assert not stopped() and not set(handlers()) & set(before)
        signal.raise_signal(number)
        assert stopped()
        raise ZeroDivisionError
    assert stopped() and handlers() == before


def test_a_second_signal_acts_at_once_if_it_is_not_the_same_request(monkeypatch):
    """A scheduler and torchrun may both send the first. Who asks again later means it."""
    now = [100.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    with pytest.raises(KeyboardInterrupt), common.signals_noted() as stopped:
        for now[0] in (100.0, 101.0, 102.9):  # noqa: B020
            signal.raise_signal(signal.SIGINT)
        assert stopped()
        now[0] = 104.0
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second request was not answered")


def test_outside_the_main_thread_no_signal_is_handled():
    found, before = [], handlers()

    def work():
        with common.signals_noted() as stopped:
            found.append((stopped(), handlers()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, before)]
