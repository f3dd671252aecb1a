"""Whole runs killed at random moments, by hand, on Linux: nothing of a run may be lost.

    python tests/tools/fault_injection.py [--kills 50] [--methods clim]

For each method, on one process and on two (torchrun), a run of a few short epochs is the reference. The same command
then runs into another folder, is killed by SIGTERM, SIGINT or SIGKILL, goes on with another number of loader workers,
is killed again, and at last ends: weights, optimizer, counters and metrics must be the reference's, bit for bit (but
the means of an epoch that went on in the middle), and after each kill the folder's files must be whole. Two faults of
torchrun follow: a worker that dies, so that torchrun starts all again, and a run shared out over two agents. Exit
status 1 if anything differs, with the reason; then the runs are kept. Needs pytest.
"""

import argparse
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
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from bench import make_folder  # noqa: E402
from conftest import METHODS  # noqa: E402
from tiny import assert_same_run, free_port, records  # noqa: E402

import common  # noqa: E402

EPOCHS, STEPS = 6, 12  # 100 images in batches of 8
FLAGS = f"--dataset patterns --batch-size 8 --epochs {EPOCHS} --knn-every 1 --device cpu".split()
CLIM = ["--clim-start", "1", "--refresh-every", "1"]  # positives are chosen between any two epochs
WAYS = {1: ("TERM", "INT", "KILL"), 2: ("TERM", "INT", "KILL one", "KILL all")}  # by the number of processes
KILLS_A_RUN = 5
SAVE = 0.2  # seconds that the files of an epoch, its evaluation and its record take, about
LIMIT = 600  # seconds after which a run hangs


# ------------------------------------------------------------------ processes


def about(process, name):
    """A file of /proc, empty once the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/{name}").read_text()
    return ""


def listens(process):
    """Whether a process handles SIGTERM, as a run does while it makes steps and saves them."""
    caught = re.search(r"SigCgt:\s*(\w+)", about(process, "status"))
    return bool(caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


class Life:
    """One start of a run's command; what it says goes to files in OUT-NAME."""

    def __init__(self, method, world, out, workers=0, name="log", torchrun=("--standalone", "--nproc_per_node=2")):
        self.script, self.world, self.logs, self.victims = f"{method}.py", world, Path(f"{out}-{name}"), []
        self.logs.mkdir()
        launcher = ["-m", "torch.distributed.run", *torchrun, "--redirects=3", f"--log-dir={self.logs}"]
        own = [*FLAGS, *CLIM * (method == "clim"), "--data-dir", str(out.parent / "data"), "--out", str(out)]
        command = [sys.executable, *launcher * (world > 1), str(ROOT / self.script), *own, "--workers", str(workers)]
        streams = {stream: open(self.logs / f"{stream}.log", "w") for stream in ("stdout", "stderr")}
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.began = time.time()
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)

    def age(self):
        return time.time() - self.began

    def ranks(self):
        """The training processes, without their loaders' workers and torchrun's forks that are not Python yet."""
        if self.world == 1:
            return [self.process.pid]
        children = about(self.process.pid, f"task/{self.process.pid}/children").split()
        lines = {int(child): about(child, "cmdline") for child in children}
        return [child for child, line in lines.items() if self.script in line and "torch.distributed.run" not in line]

    def trains(self):
        ranks = self.ranks()
        return bool(ranks) and all(listens(rank) for rank in ranks)

    def wait_until(self, condition):
        """Whether it came true before the run ended."""
        while self.process.poll() is None and self.age() < LIMIT:
            if condition():
                return True
            time.sleep(0.01)
        return False

    def kill(self, way):
        """SIGINT goes to the group, as from a terminal. TERM and INT meet torchrun alone, which hands them on."""
        ranks = self.ranks()
        if way in ("TERM", "INT"):
            os.killpg(self.process.pid, signal.SIGINT) if way == "INT" else self.process.terminate()
        else:
            self.victims = [random.choice(ranks)] if way == "KILL one" and ranks else [self.process.pid, *ranks]
            for victim in self.victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)

    def end(self):
        """The exit status; "hangs" if there was none."""
        try:
            status = self.process.wait(max(0, LIMIT - self.age()))
        except subprocess.TimeoutExpired:
            self.kill("KILL all")
            self.process.wait()
            status = "hangs"
        while any(about(victim, "cmdline") for victim in self.victims):  # or it could still write
            time.sleep(0.01)
        return status

    def said(self, stream="stdout"):
        """What the training processes wrote, without torchrun's own words."""
        files = self.logs.rglob(f"*/{stream}.log") if self.world > 1 else [self.logs / f"{stream}.log"]
        return "".join(path.read_text(errors="replace") for path in files)


# ---------------------------------------------------------------------- files


def differences(reference, out, interrupted=()):
    """How a finished run differs from the reference, in words. interrupted: epochs that went on in the middle."""
    try:
        assert_same_run(reference, out, interrupted)
    except (AssertionError, OSError, ValueError, RuntimeError) as error:
        return [f"differs from the reference: {type(error).__name__} {error}"]
    return []


def is_saving(out):
    """Whether files are being written, or an epoch has no score yet."""
    with contextlib.suppress(OSError):
        recorded = (out / "metrics.jsonl").stat().st_mtime
        writes = any(path.stat().st_mtime > recorded for path in (*out.glob("*.tmp"), *out.glob("*.pt")))
        return writes or any("knn20_top1" not in record for record in records(out))
    return False


# ----------------------------------------------------------------------- runs


def wait_for_moment(life, out, timing, before, left):
    """A quarter of the kills come at any moment from the start of Python on, a quarter while an epoch is saved and
    evaluated, half at any moment of training. The share of training that it takes leaves some for the kills `left`.
    """
    when, until = random.choice(("anywhere", "training", "training", "save")), random.random() * sum(timing)
    if when != "anywhere" and life.wait_until(life.trains):
        remaining = timing[1] * (1 - before / (EPOCHS * STEPS))
        until = life.age() + random.random() * remaining * min(1, 2 / (left + 1))
        if when == "save" and life.wait_until(lambda: is_saving(out)):  # the evaluation and the record follow
            until = life.age() + random.random() * SAVE
    life.wait_until(lambda: life.age() >= until)


def judge(life, out, way, before, status):
    """(what is wrong after a kill, in words; the step of the checkpoint that it left)."""
    try:  # files that are not whole raise
        if (out / "config.json").exists():
            json.loads((out / "config.json").read_text())
        recorded = [r["step"] for r in records(out)] if (out / "metrics.jsonl").exists() else []
        step = common.load_checkpoint(out / "last.pt")["step"] if (out / "last.pt").exists() else 0
    except (ValueError, KeyError, SystemExit) as error:
        return [f"files are not whole: {type(error).__name__} {error}"], before
    problems = []
    if step < max([before, *recorded]):
        problems.append(f"the checkpoint went back to step {step} from {max([before, *recorded])}")
    # A request that comes while steps are made ends the run with 75, elsewhere as it ends any Python program
    right = {75, 130, -signal.Signals[f"SIG{way.split()[0]}"]}
    if status == "hangs" or (life.world == 1 and status not in right):
        problems.append(f"exit status {status}")
    if status == 75 and ("stopped on request" not in life.said() or "Traceback" in life.said("stderr")):
        problems.append(f"exit status 75, but said {life.said()[-200:]} {life.said('stderr')[-400:]}")
    return problems, step


def place_of(life, out):
    """Where a run is, in words."""
    if not life.trains() and not any(words in life.said() for words in ("  loss ", "going on from")):
        return "at the start"
    if not records(out):
        return "in the first epoch"
    return "while an epoch was saved or judged" if is_saving(out) else "in a later epoch"


def disturbed_run(method, world, reference, timing, count, ways, number):
    """Start a run until it ends, with at most `count` kills: ([(way, place) of each kill], what is wrong, in words)."""
    out = Path(f"{reference}-disturbed{number}")
    kills, problems, before, interrupted = [], [], 0, set()
    for left, workers in zip(range(count, -1, -1), itertools.cycle((1, 0, 2))):  # noqa: B905
        life = Life(method, world, out, workers, f"log{count - left}")
        if left:
            wait_for_moment(life, out, timing, before, left)
        struck = left and life.process.poll() is None
        if struck:
            kill = next(ways), place_of(life, out)
            life.kill(kill[0])
        status = life.end()
        if status == 0 or "finished. Judge" in life.said():  # by itself: a kill came too late
            return kills, problems + differences(reference, out, interrupted)
        if not struck:
            return kills, [*problems, f"not killed, exit status {status}: {life.said('stderr')[-400:]}"]
        kills.append(kill)
        wrong, before = judge(life, out, kill[0], before, status)
        problems += [f"{' '.join(kill)}: {words}" for words in wrong]
        interrupted |= {before // STEPS + 1} if before % STEPS else set()


def restarted_by_torchrun(method, out, training):
    """A worker dies in training, some epochs after the first checkpoint, and torchrun starts all workers again."""
    life = Life(method, 2, out, torchrun=("--standalone", "--nproc_per_node=2", "--max-restarts=2"))
    epoch = random.randint(1, EPOCHS - 2)
    life.wait_until(lambda: (out / "metrics.jsonl").exists() and len(records(out)) >= epoch)
    time.sleep(random.random() * training / EPOCHS)
    life.kill("KILL one")
    status = life.end()
    return [] if status == 0 and "going on from" in life.said() else [f"status {status}: {life.said('stderr')[-400:]}"]


def two_agents(method, out, training):
    """Two nodes of one process each, that meet on this machine."""
    meet = f"--rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} --rdzv-id=two"
    node = f"--nnodes=2 --nproc_per_node=1 {meet}".split()
    lives = [Life(method, 2, out, name=f"log{i}", torchrun=node) for i in (0, 1)]
    statuses = [life.end() for life in lives]
    return [] if statuses == [0, 0] else [f"statuses {statuses}: {lives[0].said('stderr')[-400:]}"]


def examine(method, world, count, ways, root):
    """Make the reference and the disturbed runs: (kills, what is wrong, the reference, its seconds of training)."""
    reference, kills, problems = root / f"{method}-{world}", [], []
    life = Life(method, world, reference)
    life.wait_until(life.trains)
    begins = life.age()
    if status := life.end():
        words = life.said("stderr")[-2000:]
        raise SystemExit(f"error: the undisturbed run {reference} ended with status {status}: {words}")
    timing = begins, life.age() - begins
    for number in range(2 + count):
        if len(kills) == count or problems:
            break
        most = min(KILLS_A_RUN, count - len(kills))
        more, problems = disturbed_run(method, world, reference, timing, most, ways, number)
        kills += more
    if len(kills) < count and not problems:
        problems = [f"{count - len(kills)} of {count} kills came too late"]
    return kills, problems, reference, timing[1]


def main():
    parser = argparse.ArgumentParser("tests/tools/fault_injection.py", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="in all")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    make_folder(root / "data", 100)
    make_folder(root / "data", 40, "val", seed=1)
    kills, wrong, ways = [], [], {world: itertools.cycle(names) for world, names in WAYS.items()}

    def tell(name, problems):
        wrong.extend(problems)
        print(f"{name}: {'; '.join(problems) or 'as the reference, bit for bit'}", flush=True)

    cases = list(itertools.product(args.methods, WAYS))
    for i, (method, world) in enumerate(cases):
        count = args.kills * (i + 1) // len(cases) - args.kills * i // len(cases)
        more, problems, reference, training = examine(method, world, count, ways[world], root)
        kills += more
        tell(f"{method}, {world} process(es), {len(more)} kills", problems)
        for fault in (restarted_by_torchrun, two_agents) if world > 1 else ():
            out = root / f"{method}-{fault.__name__}"
            tell(out.name, fault(method, out, training) or differences(reference, out))
    for what in zip(*kills, strict=True):  # ways, places
        print(", ".join(f"{name} {count}" for name, count in Counter(what).items()))
    if wrong:
        raise SystemExit(f"something differed: the runs are in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
