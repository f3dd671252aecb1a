"""Whole runs killed at random moments, by hand, on Linux: a kill costs an epoch at most, and changes no number.

    python tests/tools/fault_injection.py [--kills 50] [--methods clim]

For each method, on one process and on two (torchrun), a run of a few short epochs is the reference. The same command
then runs into another folder, is killed by SIGTERM, SIGINT or SIGKILL, starts again with another number of loader
workers, is killed again, and at last ends: weights, optimizer and records must be the reference's, bit for bit. After
each kill the files must be whole, and hold each epoch that was said to be done: so only the one at work is made again.
Two faults of torchrun follow: a worker that dies, so that torchrun starts all again, and a run shared out over two
agents. Exit status 1 if anything differs, with the reason; then the runs are kept. Needs pytest.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from bench import make_folder  # noqa: E402
from conftest import METHODS  # noqa: E402
from tiny import assert_same_run, free_port, records  # noqa: E402

import common  # noqa: E402

EPOCHS = 6  # of 12 steps: 100 images in batches of 8
FLAGS = f"--dataset cifar10 --batch-size 8 --epochs {EPOCHS} --knn-every 1 --device cpu "
OWN = dict.fromkeys(METHODS, FLAGS + "--arch resnet_micro --queue 64 --bn-groups 2 ")
OWN["clim"] += "--clim-start 1 --refresh-every 1 --num-clusters 8"  # positives are chosen between any two epochs
OWN["patchmix"] = FLAGS + "--arch vit_micro --patch-size 8 --mix-slices 2"
TWO = ["--standalone", "--nproc_per_node=2"]  # torchrun's words
WAYS = {1: itertools.cycle(("TERM", "INT", "KILL")), 2: itertools.cycle(("TERM", "INT", "KILL one", "KILL all"))}
KILLS_A_RUN = 5
SAVE = 0.3  # seconds that the files of an epoch and its kNN take, about
LIMIT = 600  # seconds after which a run hangs


def about(process, name):
    """A file of /proc, empty once the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/{name}").read_text()
    return ""


class Life:
    """One start of a run's command. What it says goes to files in the folder OUT-NAME."""

    def __init__(self, method, out, torchrun, workers=0, name="log"):
        self.script, self.torchrun, self.out, self.logs = f"{method}.py", torchrun, out, Path(f"{out}-{name}")
        self.logs.mkdir()
        launcher = ["-m", "torch.distributed.run", *torchrun, "--redirects=3", f"--log-dir={self.logs}"]
        own = [*OWN[method].split(), "--workers", str(workers), "--data-dir", str(out.parent / "data")]
        command = [sys.executable, *(launcher if torchrun else []), str(ROOT / self.script), *own, "--out", str(out)]
        streams = {stream: open(self.logs / f"{stream}.log", "w") for stream in ("stdout", "stderr")}
        self.began, self.victims, environment = time.time(), [], os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)

    def age(self):
        return time.time() - self.began

    def said(self, stream="stdout"):
        """What the training processes wrote, without torchrun's own words."""
        files = sorted(self.logs.rglob(f"*/{stream}.log")) if self.torchrun else [self.logs / f"{stream}.log"]
        return "".join(path.read_text(errors="replace") for path in files)

    def trains(self):
        return "\nversions " in self.said()  # the last line of the table

    def saves(self):
        """Whether files are being written, or the last epoch has no score yet."""
        with contextlib.suppress(OSError, ValueError):
            return any(self.out.glob("*.tmp")) or "knn20_top1" not in records(self.out)[-1]
        return False

    def wait_until(self, condition):
        """Whether it came true before the run ended."""
        while self.process.poll() is None and self.age() < LIMIT:
            if condition():
                return True
            time.sleep(0.003)
        return False

    def wait_for_moment(self, start, training):
        """A quarter of the kills come at the start, a quarter in a save or kNN, half at any moment of training."""
        when, begin, seconds = random.choice(("start", "save", "training", "training")), 0, start
        if when != "start" and self.wait_until(self.trains):
            if when == "save":
                self.wait_until(self.saves)
            begin, seconds = self.age(), SAVE if when == "save" else training
        until = begin + random.random() * seconds
        self.wait_until(lambda: self.age() >= until)

    def kill(self, way):
        """End the run, if it has not ended, and return what it was doing, in words.

        SIGINT goes to the group, as from a terminal. TERM and INT meet torchrun alone, which hands them on.
        """
        if self.process.poll() is not None:
            return None
        doing = "at the start" if not self.trains() else "in a save or kNN" if self.saves() else "within an epoch"
        children = about(self.process.pid, f"task/{self.process.pid}/children").split() if self.torchrun else []
        # The training processes, without their loaders' workers and torchrun's forks that are not Python yet
        lines = {int(child): about(child, "cmdline") for child in children}
        ranks = [child for child, line in lines.items() if self.script in line and "distributed.run" not in line]
        if way == "INT":
            os.killpg(self.process.pid, signal.SIGINT)
        elif way == "TERM":
            self.process.terminate()
        else:
            self.victims = [random.choice(ranks)] if way == "KILL one" and ranks else [self.process.pid, *ranks]
        for victim in self.victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        return doing

    def end(self):
        """The exit status; "hangs" if there was none."""
        try:
            status = self.process.wait(max(0, LIMIT - self.age()))
        except subprocess.TimeoutExpired:
            self.kill("KILL all")
            status = "hangs"
        while any(about(victim, "cmdline") for victim in self.victims):  # or it could still write
            time.sleep(0.01)
        return status


def examine(life, status, before=0, killed=None):
    """Look at a run after a life: (how many epochs its last.pt has, what is wrong, in words).

    before: how many it had. killed: how, if it was.
    """
    try:  # files that are not whole raise
        files = {path.name: path for path in life.out.glob("*")}
        saved = {name: common.load_checkpoint(path) for name, path in files.items() if path.suffix == ".pt"}
        recorded = [record["epoch"] for record in records(life.out)] if "metrics.jsonl" in files else []
        json.loads(files["config.json"].read_text() if "config.json" in files else "{}")
    except (ValueError, KeyError, SystemExit) as error:
        return before, [f"after {killed}, files are not whole: {type(error).__name__} {error}"]
    epochs, wrong = len(saved["last.pt"]["records"]) if "last.pt" in saved else 0, []
    made = [int(number) for number in re.findall(rf"^epoch (\d+)/{EPOCHS} ", life.said(), re.M)]
    # Each epoch is made once, but for one that a kill met; and a kill may come between an epoch's save and its line
    if made != sorted({*made} - {*range(before + 1)}) or not 0 <= epochs - before - len(made) <= (killed is not None):
        wrong.append(f"it had {before} epochs, made {made}, and has {epochs}")
    if recorded != [*range(1, len(recorded) + 1)] or len(recorded) - epochs not in (0, 1):  # last.pt is written last
        wrong.append(f"{epochs} epochs are saved, and the records are those of {recorded}")
    right = {-signal.Signals[f"SIG{killed.split()[0]}"], 130 * (killed == "INT")} if killed else {0}
    if status not in right and (status == "hangs" or not (killed and life.torchrun)):
        wrong.append(f"exit status {status}: {life.said('stderr')[-400:]}")
    return epochs, [f"after {killed or 'no kill'}, {words}" for words in wrong]


def differences(reference, out):
    """How a finished run differs from the reference, in words."""
    try:
        return assert_same_run(reference, out) or []
    except (AssertionError, OSError, ValueError, RuntimeError) as error:
        return [f"differs from the reference: {type(error).__name__} {error}"]


def disturbed_run(method, reference, torchrun, start, training, ways):
    """Start a run until it ends, with a kill by each of `ways`, unless one comes too late.

    start, training: seconds that the reference took. Returns ([each kill's way and place, ...], what is wrong).
    """
    out, kills, epochs = Path(tempfile.mkdtemp(dir=reference.parent)) / "run", [], 0
    (out.parent / "data").symlink_to(reference.parent / "data")
    for number, way in enumerate([*ways, None]):
        life = Life(method, out, torchrun, (1, 0, 2)[number % 3], f"log{number}")
        if way:  # the share of training that it may take leaves some for the other kills
            life.wait_for_moment(start, training * (1 - epochs / EPOCHS) * min(1, 2 / (len(ways) - number + 1)))
        doing = life.kill(way) if way else None
        status = life.end()
        epochs, wrong = examine(life, status, epochs, way if doing else None)
        if wrong or status == 0:
            return kills, wrong or differences(reference, out)
        kills.append((way, doing))
    return kills, ["it does not end"]


def restarted_by_torchrun(method, out, training):
    """A worker dies in training, some epochs after the first checkpoint, and torchrun starts all workers again."""
    life, epoch = Life(method, out, [*TWO, "--max-restarts=2"]), random.randint(1, EPOCHS - 2)
    life.wait_until(lambda: f"\nepoch {epoch}/" in life.said())
    time.sleep(random.random() * training / EPOCHS)
    life.kill("KILL one")
    status = life.end()
    _, wrong = examine(life, 0, killed="KILL one")
    return wrong + [f"status {status}, not restarted"] * (status != 0 or "going on from" not in life.said())


def two_agents(method, out, _):
    """Two nodes of one process each, that meet on this machine."""
    meet = f"--rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} --rdzv-id=two"
    lives = [Life(method, out, f"--nnodes=2 --nproc_per_node=1 {meet}".split(), name=f"log{i}") for i in (0, 1)]
    return [f"exit status {status}" for status in [life.end() for life in lives] if status != 0]


def main():
    parser = argparse.ArgumentParser("tests/tools/fault_injection.py", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="in all")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    args = parser.parse_args()
    root, counts, failed = Path(tempfile.mkdtemp()), collections.Counter(), False
    make_folder(root / "data", 100)
    make_folder(root / "data", 40, "val", seed=1)
    worlds = list(itertools.product(args.methods, WAYS))
    for i, (method, world) in enumerate(worlds):
        reference, torchrun, kills = root / f"{method}-{world}", TWO * (world == 2), []
        life = Life(method, reference, torchrun)
        life.wait_until(life.trains)
        start = life.age()
        _, wrong = examine(life, life.end())
        training = life.age() - start
        number = args.kills * (i + 1) // len(worlds) - args.kills * i // len(worlds)
        for begin in range(0, 0 if wrong else number, KILLS_A_RUN):
            ways = itertools.islice(WAYS[world], min(KILLS_A_RUN, number - begin))
            more, found = disturbed_run(method, reference, torchrun, start, training, list(ways))
            kills, wrong = kills + more, wrong + found
        counts.update(itertools.chain(*kills))
        cases = {f"{method}, {world} process(es), {len(kills)} of {number} kills came in time": wrong}
        for fault in (restarted_by_torchrun, two_agents) if world == 2 and not wrong else ():
            out = root / f"{method}-{fault.__name__}"
            cases[out.name] = fault(method, out, training) or differences(reference, out)
        for name, wrong in cases.items():
            print(f"{name}: {'; '.join(wrong) or 'as the reference, bit for bit'}", flush=True)
            failed |= bool(wrong)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    if failed:
        raise SystemExit(f"something differed: the runs are in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
