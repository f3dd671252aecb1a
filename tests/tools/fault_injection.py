"""Whole runs killed at random moments, by hand, on Linux: a kill costs an epoch at most, and changes no number.

    python tests/tools/fault_injection.py [--kills 5] [--methods clim]

For each method, on one process and on two (torchrun), a run of a few short epochs is the reference. The same command
then runs into another folder, is killed by SIGTERM, SIGINT or SIGKILL, starts again, and so on until it ends: weights,
optimizer and records must be the reference's, bit for bit. Only kNN scores may be missing, of epochs that were killed
in it. After each kill the files must be complete, and hold each epoch that was said to be done. Two faults of
torchrun follow: a worker that dies, so that torchrun starts all again, and a run on two agents. Exit status 1 if
anything differs; then the runs are kept. Needs pytest.
"""

import argparse
import contextlib
import functools
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import METHODS, ROOT
from tiny import assert_same_run, free_port, records, write_tree

import common

EPOCHS = 6  # of 12 steps: 100 images in batches of 8
FLAGS = f"--dataset cifar10 --batch-size 8 --epochs {EPOCHS} --knn-every 1 --device cpu "
OWN = dict.fromkeys(METHODS, FLAGS + "--arch resnet_micro --queue 64 --bn-groups 2 ")
OWN["clim"] += "--clim-start 1 --refresh-every 1 --num-clusters 8"  # positives are chosen between any two epochs
OWN["patchmix"] = FLAGS + "--arch vit_micro --patch-size 8 --mix-slices 2"
TWO = ["--standalone", "--nproc_per_node=2"]  # torchrun's words
WAYS = {1: ("TERM", "INT", "KILL"), 2: ("TERM", "INT", "KILL one", "KILL all")}  # by number of processes
LIMIT = 600  # seconds after which a run hangs


def about(process, name):
    """A file of /proc, empty once the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/{name}").read_text()
    return ""


class Life:
    """One start of a run's command. What it says goes to the file OUT-NAME. torchrun: its words, or []."""

    def __init__(self, method, out, torchrun, name="log"):
        self.method, self.torchrun, self.out, self.log = method, torchrun, out, Path(f"{out}-{name}")
        launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
        own = f"{OWN[method]} --workers {0 if torchrun else 1} --data-dir {out.parent}/data --out {out}"
        command = [sys.executable, *launcher, f"{ROOT}/{method}.py", *own.split()]
        how = dict(stdout=open(self.log, "w"), stderr=subprocess.STDOUT, start_new_session=True)
        self.began, self.victims = time.time(), []
        self.process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **how)

    def age(self):
        return time.time() - self.began

    def said(self):
        return self.log.read_text(errors="replace")

    def trains(self):
        return "\nderived " in self.said()  # of the table of values

    def wait_until(self, condition):
        """Wait for a condition, or the run's end."""
        while self.process.poll() is None and self.age() < LIMIT and not condition():
            time.sleep(0.003)

    def kill(self, way):
        """End the run. Return whether it had not ended.

        SIGINT goes to the group, as from a terminal. TERM meets torchrun alone, which hands it on.
        """
        if self.process.poll() is not None:
            return False
        children = about(self.process.pid, f"task/{self.process.pid}/children").split() if self.torchrun else []
        # The training processes, without their loaders' workers and torchrun's forks that are not Python yet
        lines, script = {int(child): about(child, "cmdline") for child in children}, f"{self.method}.py"
        ranks = [child for child, line in lines.items() if script in line and "distributed.run" not in line]
        if way == "INT":
            os.killpg(self.process.pid, signal.SIGINT)
        elif way == "TERM":
            self.process.terminate()
        else:
            self.victims = [random.choice(ranks)] if way == "KILL one" and ranks else [self.process.pid, *ranks]
        for victim in self.victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        return True

    def end(self):
        """The exit status. A run that hangs is killed, and raises."""
        try:
            return self.process.wait(max(0, LIMIT - self.age()))
        finally:
            self.kill("KILL all")  # if it has not ended
            while any(about(victim, "cmdline") for victim in self.victims):  # or it could still write
                time.sleep(0.01)


def examine(life, status, before=0, killed=None):
    """Look at a run after a life, and return how many epochs its last.pt has. Anything wrong raises.

    before: how many it had. killed: how, if it was.
    """
    files, after = {path.name: path for path in life.out.glob("*")}, f"after {killed or 'no kill'}"
    saved = {name: common.load_checkpoint(path) for name, path in files.items() if path.suffix == ".pt"}  # or raises
    recorded = [record["epoch"] for record in records(life.out)] if "metrics.jsonl" in files else []
    json.loads(files["config.json"].read_text() if "config.json" in files else "{}")
    epochs = len(saved["last.pt"]["records"]) if "last.pt" in saved else 0
    made = [int(number) for number in re.findall(rf"^epoch (\d+)/{EPOCHS}  loss", life.said(), re.M)]
    # Each epoch is made once, but for one that a kill met; and a kill may come between an epoch's save and its line
    once = made == sorted({*made} - {*range(before + 1)}) and 0 <= epochs - before - len(made) <= (killed is not None)
    assert once, f"{after}: it had {before} epochs, made {made}, and has {epochs}"
    in_order = recorded == [*range(1, len(recorded) + 1)] and len(recorded) - epochs in (0, 1)  # last.pt is last
    assert in_order, f"{after}: {epochs} epochs are saved, and the records are those of {recorded}"
    right = {-signal.Signals[f"SIG{killed.split()[0]}"], 130 * (killed == "INT")} if killed else {0}
    assert status in right or (killed and life.torchrun), f"{after}: exit status {status}, see {life.log}"
    return epochs


def compare(reference, out, killed_after=range(EPOCHS + 1)):
    """Assert that two runs are the same bit for bit, but for lost kNN scores of epochs after which one was killed."""
    lost = {record["epoch"] for record in records(out) if "knn20_top1" not in record}
    assert lost <= {*killed_after}, f"no kNN after the epochs {lost}, but killed after {killed_after}"
    assert_same_run(reference.out, out, lost)


def disturbed_run(reference, ways):
    """Start a run until it ends, with a kill by each of `ways`, unless one comes too late: it ends as the reference.

    One kill in four comes at the start.
    """
    out, epochs, killed_after = Path(f"{reference.out}-killed"), 0, []
    for number, way in enumerate([*ways, None]):
        life = Life(reference.method, out, reference.torchrun, f"log{number}")
        if way and random.random() < 0.25:
            time.sleep(random.random() * reference.start)
        elif way:  # the part of the training that it may take leaves some for the other kills
            life.wait_until(life.trains)
            part = (1 - epochs / EPOCHS) * min(1, 2 / (len(ways) - number + 1))
            time.sleep(random.random() * reference.training * part)
        in_time = way and life.kill(way)
        status = life.end()
        epochs = examine(life, status, epochs, way if in_time else None)
        if status == 0:
            print(f"{len(killed_after)} of {len(ways)} kills came in time", flush=True)
            return compare(reference, out, killed_after)
        killed_after.append(epochs)
    raise AssertionError("it does not end")


def restarted_by_torchrun(reference):
    """A worker dies in training, some epochs after the first checkpoint, and torchrun starts all workers again."""
    out, epoch = Path(f"{reference.out}-restarted"), random.randint(1, EPOCHS - 2)
    life = Life(reference.method, out, [*TWO, "--max-restarts=2"])
    life.wait_until(lambda: f"\nepoch {epoch}/" in life.said())
    time.sleep(random.random() * reference.training / EPOCHS)
    life.kill("KILL one")
    assert life.end() == 0 and "resumed from" in life.said(), f"not restarted, see {life.log}"
    examine(life, 0, killed="KILL one")
    compare(reference, out)


def two_agents(reference):
    """Two nodes of one process each, that meet on this machine."""
    meet = f"--rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} --rdzv-id=two"
    out, nodes = Path(f"{reference.out}-agents"), f"--nnodes=2 --nproc_per_node=1 {meet}".split()
    lives = [Life(reference.method, out, nodes, f"log{i}") for i in (0, 1)]
    assert [life.end() for life in lives] == [0, 0], f"see {lives[0].log}"
    assert_same_run(reference.out, out)


def main():
    parser = argparse.ArgumentParser("tests/tools/fault_injection.py", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="of each method, on one process and on two")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    args = parser.parse_args()
    root, failed = Path(tempfile.mkdtemp()), False
    for part, count in (("train", 10), ("val", 4)):
        write_tree(root / "data" / part, [f"kind{i}" for i in range(10)], count, (32, 32))
    for method, world in itertools.product(args.methods, WAYS):
        reference = Life(method, root / f"{method}-{world}", TWO * (world == 2))
        reference.wait_until(reference.trains)
        reference.start = reference.age()
        examine(reference, reference.end())
        reference.training = reference.age() - reference.start
        ways = random.choices(WAYS[world], k=args.kills)
        cases = {f"kills by {', '.join(ways)}": functools.partial(disturbed_run, ways=ways)}
        if world == 2:
            cases |= {"a restart by torchrun": restarted_by_torchrun, "two agents": two_agents}
        for name, case in cases.items():
            try:
                case(reference)
                found = "as the reference, bit for bit"
            except (Exception, SystemExit) as error:
                failed, found = True, f"{type(error).__name__} {error}"
            print(f"{method}, {world} process(es), {name}: {found}", flush=True)
    if failed:
        raise SystemExit(f"something differed: the runs are in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
