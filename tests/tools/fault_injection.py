"""Whole runs killed at random moments, by hand, on Linux: nothing of a run may be lost.

python tests/tools/fault_injection.py [--kills 50] [--seed 0] [--methods clim] [--no-distributed] [--out DIR]

For each method, on one process and on two (torchrun), a run of a few short epochs is the reference. The same command
then runs into another folder, is killed by SIGTERM, SIGINT or SIGKILL, goes on with another number of loader workers,
is killed again, and at last ends: weights, optimizer, counters and metrics must be the reference's, bit for bit (but
the means of an epoch that went on in the middle), and after each kill the folder's files must be whole. A quarter of
the kills come at any moment from the start of Python on, half at any moment of training, a quarter while an epoch is
saved and evaluated. Two faults of torchrun follow: a worker that dies, so that torchrun starts all again, and a run
shared out over two agents. Exit status 1 if anything differs, with the reason.
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
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402

METHODS = ("moco_jointcrop", "jcl", "clim", "logo", "patchmix")
EPOCHS, STEPS = 6, 12  # 100 images in batches of 8
FLAGS = f"--dataset patterns --batch-size 8 --epochs {EPOCHS} --knn-every 1 --device cpu".split()
MORE = {"clim": ["--clim-start", "1", "--refresh-every", "1"]}  # positives are chosen between any two epochs
WAYS = {1: ("TERM", "INT", "KILL"), 2: ("TERM", "INT", "KILL one", "KILL all")}  # by the number of processes
PLACES = ("start-up", "in the first epoch", "in an epoch", "at an epoch's end")
KILLS_A_RUN = 5
SAVE = 0.2  # seconds that the files of an epoch, its evaluation and its record take, about
LIMIT = 600  # seconds after which a run hangs
MAY_DIFFER = {"images_per_s", "data_wait"}
OF_ITS_END = {"epoch", "step", "lr", "momentum", "std", "rank", "knn20_top1", "knn200_top1"}  # of an epoch; not means


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
        launcher = (
            ["-m", "torch.distributed.run", *torchrun, "--redirects=3", f"--log-dir={self.logs}"] if world > 1 else []
        )
        own = [*FLAGS, *MORE.get(method, []), "--data-dir", str(out.parent / "data"), "--out", str(out)]
        command = [sys.executable, *launcher, str(ROOT / self.script), *own, "--workers", str(workers)]
        streams = {stream: open(self.logs / f"{stream}.log", "w") for stream in ("stdout", "stderr")}
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process, self.began = (
            subprocess.Popen(command, env=environment, start_new_session=True, **streams),
            time.time(),
        )

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

    def kill(self, way, chance):
        """SIGINT goes to the group, as from a terminal. TERM and INT meet torchrun alone, which hands them on."""
        ranks = self.ranks()
        if way in ("TERM", "INT"):
            os.killpg(self.process.pid, signal.SIGINT) if way == "INT" else self.process.terminate()
        else:
            self.victims = [chance.choice(ranks)] if way == "KILL one" and ranks else [self.process.pid, *ranks]
            for victim in self.victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)

    def end(self):
        """The exit status; "hangs" if there was none."""
        try:
            status = self.process.wait(max(0, LIMIT - self.age()))
        except subprocess.TimeoutExpired:
            self.kill("KILL all", random)
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


def make_data(root):
    """100 + 40 patterns as PNG files in train/ and val/, one folder a class."""
    for split, count, seed in (("train", 100, 0), ("val", 40, 1)):
        for i, (image, label) in enumerate(zip(*common.make_patterns(count, 32, seed), strict=True)):
            path = root / split / f"kind{label % 4}" / f"{i:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)


def flat(state, name=""):
    """{path: value, of a tensor its bits} of a nested state."""
    if isinstance(state, (dict, list, tuple)):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, value in pairs for k, v in flat(value, f"{name}/{key}").items()}
    return {name: (str(state.dtype), state.shape, state.numpy().tobytes()) if torch.is_tensor(state) else state}


def records_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def differences(reference, out, interrupted=()):
    """How a finished run differs from the reference, in words. interrupted: epochs that went on in the middle."""
    found = []
    try:
        for name in ("last.pt", "backbone.pt"):
            a, b = (flat(torch.load(folder / name, weights_only=True)) for folder in (reference, out))
            names = sorted(k for k in (a.keys() | b.keys()) if not k.startswith(("/config/", "/records/")))
            if wrong := [k for k in names if k not in a or k not in b or a[k] != b[k]]:
                found.append(f"{name}: {len(wrong)} of {len(names)} values differ, {', '.join(wrong[:3])} first")
        records = [records_of(folder) for folder in (reference, out)]
        if torch.load(out / "last.pt", weights_only=True)["records"] != records[1]:
            found.append("metrics.jsonl has not the records of last.pt")
    except (OSError, ValueError, RuntimeError) as error:
        return [f"the end is not whole: {error}"]
    steps, expected = ([r["step"] for r in one] for one in records)
    if steps != expected:
        return [*found, f"metrics.jsonl has the steps {expected}, not {steps}"]
    for r, s in zip(*records, strict=True):
        names = r.keys() & OF_ITS_END if r["epoch"] in interrupted else (r.keys() | s.keys()) - MAY_DIFFER
        if wrong := [k for k in sorted(names) if k not in r or k not in s or r[k] != s[k]]:
            found.append(f"metrics.jsonl, step {r['step']}: {', '.join(wrong)}")
    return found


def is_saving(out):
    """Whether files are being written, or an epoch has no score yet."""
    with contextlib.suppress(OSError):
        recorded = (out / "metrics.jsonl").stat().st_mtime
        writes = any(path.stat().st_mtime > recorded for path in (*out.glob("*.tmp"), *out.glob("*.pt")))
        return writes or any("knn20_top1" not in record for record in records_of(out))
    return False


def survey(out):
    """(step of the checkpoint, last step in metrics.jsonl) of a run that was killed; raises if a file is not whole."""
    if (out / "config.json").exists():
        json.loads((out / "config.json").read_text())
    recorded = max((r["step"] for r in records_of(out)), default=0) if (out / "metrics.jsonl").exists() else 0
    return common.load_checkpoint(out / "last.pt")["step"] if (out / "last.pt").exists() else 0, recorded


# ----------------------------------------------------------------------- runs


def wait_for_moment(life, out, timing, before, left, chance):
    """Waits as the lines at the top say; the share of training that it takes leaves some for the kills `left`."""
    when, until = chance.choice(("anywhere", "training", "training", "save")), chance.random() * sum(timing)
    if when != "anywhere" and life.wait_until(life.trains):
        remaining = timing[1] * (1 - before / (EPOCHS * STEPS))
        until = life.age() + chance.random() * remaining * min(1, 2 / (left + 1))
        if when == "save" and life.wait_until(lambda: is_saving(out)):  # the evaluation and the record follow
            until = life.age() + chance.random() * SAVE
    life.wait_until(lambda: life.age() >= until)


def judge(life, out, kill, trained, status):
    """Completes what is known of a kill by what it left behind; returns what is wrong, in words."""
    way, problems = kill["signal"], []
    try:
        step, recorded = survey(out)
    except (ValueError, KeyError, SystemExit) as error:
        return [f"files are not whole: {type(error).__name__} {error}"]
    kill.update(status=status, after=step)
    if trained and is_saving(out):
        kill["place"] = PLACES[3]
    if step < max(kill["before"], recorded):
        problems.append(f"the checkpoint went back to step {step} from {max(kill['before'], recorded)}")
    # A request that comes while steps are made ends the run with 75, elsewhere as it ends any Python program
    right = {75, 130, -signal.Signals[f"SIG{way.split()[0]}"]}
    if status == "hangs" or (life.world == 1 and status not in right):
        problems.append(f"exit status {status}")
    if status == 75 and "stopped on request (exit status 75)" not in life.said():
        problems.append(f"exit status 75, but said {life.said()[-200:]}")
    if status == 75 and "Traceback" in life.said("stderr"):
        problems.append(f"traceback: {life.said('stderr')[-400:]}")
    return [f"{way} {kill['place']}: {problem}" for problem in problems]


def disturbed_run(row, reference, out, timing, count, ways, chance):
    """Starts a run until it ends, with at most `count` kills; adds what happened to `row`."""
    before, interrupted, row["runs"] = 0, set(), row["runs"] + 1
    for left, workers in zip(range(count, -1, -1), itertools.cycle((1, 0, 2))):  # noqa: B905
        life = Life(row["method"], row["processes"], out, workers, f"log{count - left}")
        row["attempts"] += 1
        if left:
            wait_for_moment(life, out, timing, before, left, chance)
        struck = left and life.process.poll() is None
        if struck:
            trained = life.trains() or any(words in life.said() for words in ("  loss ", "going on from"))
            saved = trained and bool(records_of(out))
            place = 0 if not trained else 3 if is_saving(out) else 2 if saved else 1
            kill = dict(signal=next(ways), place=PLACES[place], before=before)
            life.kill(kill["signal"], chance)
        status = life.end()
        if status == 0 or "finished. Judge" in life.said():  # by itself: a kill came too late
            row["problems"] += differences(reference, out, interrupted)
            return
        if not struck:
            row["problems"].append(f"not killed, exit status {status}: {life.said('stderr')[-400:]}")
            return
        row["kills"].append(kill)
        row["problems"] += judge(life, out, kill, trained, status)
        before = kill.setdefault("after", before)
        interrupted |= {before // STEPS + 1} if before % STEPS else set()


def restarted_by_torchrun(method, out, training, chance):
    """A worker dies in training, some epochs after the first checkpoint, and torchrun starts all workers again."""
    life = Life(method, 2, out, torchrun=("--standalone", "--nproc_per_node=2", "--max-restarts=2"))
    epoch = chance.randint(1, EPOCHS - 2)
    life.wait_until(lambda: (out / "metrics.jsonl").exists() and len(records_of(out)) >= epoch)
    time.sleep(chance.random() * training / EPOCHS)
    life.kill("KILL one", chance)
    status = life.end()
    return [] if status == 0 and "going on from" in life.said() else [f"status {status}: {life.said('stderr')[-400:]}"]


def two_agents(method, out, training, chance):
    """Two nodes of one process each, that meet on this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    node = (
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=two",
    )
    lives = [Life(method, 2, out, name=f"log{i}", torchrun=node) for i in (0, 1)]
    statuses = [life.end() for life in lives]
    return [] if statuses == [0, 0] else [f"statuses {statuses}: {lives[0].said('stderr')[-400:]}"]


def examine(method, world, count, ways, root, chance):
    """The reference and the disturbed runs: (what happened, the reference's folder, its seconds of training)."""
    reference, row = root / f"{method}-{world}", dict(method=method, processes=world)
    row |= dict(kills=[], runs=0, attempts=0, problems=[])
    life = Life(method, world, reference)
    life.wait_until(life.trains)
    begins = life.age()
    if status := life.end():
        raise SystemExit(
            f"error: the undisturbed run {reference} ended with status {status}: {life.said('stderr')[-2000:]}"
        )
    timing = begins, life.age() - begins
    while (todo := count - len(row["kills"])) > 0 and row["runs"] < 2 + count and not row["problems"]:
        out = root / f"{reference.name}-disturbed{row['runs']}"
        disturbed_run(row, reference, out, timing, min(KILLS_A_RUN, todo), ways, chance)
    if todo > 0 and not row["problems"]:
        row["problems"].append(f"{todo} of {count} kills came too late")
    return row, reference, timing[1]


def table(rows, faults):
    """What happened, in Markdown; of two processes, SIGKILL meets one or all."""
    ways = list(dict.fromkeys(itertools.chain(*WAYS.values())))
    lines = [["method", "processes", *ways, *PLACES, "runs", "attempts", "bit-identical"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        by_way, by_place = (Counter(kill[name] for kill in row["kills"]) for name in ("signal", "place"))
        counts = [*(by_way[way] for way in ways), *(by_place[place] for place in PLACES), row["runs"], row["attempts"]]
        lines.append([row["method"], row["processes"], *counts, "no" if row["problems"] else "yes"])
    lines.append(["all", "", *(sum(line[i] for line in lines[2:]) for i in range(2, len(lines[0]) - 1)), ""])
    if faults:
        lines += [[], ["method", "fault", "bit-identical"], ["---"] * 3]
        lines += [[f["method"], f["fault"].replace("_", " "), "no" if f["problems"] else "yes"] for f in faults]
    return "\n" + "\n".join(f"| {' | '.join(map(str, line))} |" if line else "" for line in lines)


def main():
    parser = argparse.ArgumentParser("tests/tools/fault_injection.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=50, metavar="N", help="in all, shared out over methods and processes"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--no-distributed", action="store_true", help="without the two faults of torchrun")
    parser.add_argument("--out", metavar="DIR", help="new folder for the runs (one that is removed if all is well)")
    parser.add_argument("--json", metavar="FILE", help="write the results as data, too")
    args = parser.parse_args()
    root, chance = Path(args.out or tempfile.mkdtemp()).absolute(), random.Random(args.seed)
    make_data(root / "data")
    rows, faults, ways = [], [], {world: itertools.cycle(names) for world, names in WAYS.items()}
    cases = list(itertools.product(args.methods, WAYS))
    for i, (method, world) in enumerate(cases):
        began, count = time.time(), args.kills * (i + 1) // len(cases) - args.kills * i // len(cases)
        row, reference, training = examine(method, world, count, ways[world], root, chance)
        rows.append(row)
        counts = f"{len(row['kills'])} kills, {row['attempts']} attempts, {time.time() - began:.0f} s"
        print(
            f"{reference.name}: {counts}: {'; '.join(row['problems']) or 'as the reference, bit for bit'}", flush=True
        )
        for fault in () if args.no_distributed or world == 1 else (restarted_by_torchrun, two_agents):
            out = root / f"{method}-{fault.__name__}"
            problems = fault(method, out, training, chance) or differences(reference, out)
            faults.append(dict(method=method, fault=fault.__name__, problems=problems))
            print(f"{out.name}: {'; '.join(problems) or 'as the reference, bit for bit'}", flush=True)
    print(table(rows, faults))
    if args.json:
        Path(args.json).write_text(json.dumps(dict(arguments=vars(args), runs=rows, faults=faults), indent=1) + "\n")
    if any(found["problems"] for found in rows + faults):
        raise SystemExit(f"something differed: the runs are in {root}")
    if not args.out:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
