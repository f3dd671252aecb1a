"""Measures time, by hand. Each section prints a table, its command and the machine.

    python tests/tools/bench.py steps     a training step
    python tests/tools/bench.py knn       the kNN vote over a plain one

With --against CHECKOUT they are compared with the same work there, too, and with --over-flags a step with a step that
has other flags. What is compared runs in turn: A, B, C; C, B, A. Ratios mean more than times, because other programs
may use the machine, too: ratio is that by the clock, cpu_ratio that of the processor's time, which others disturb less.
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]
FOUR = "--bn-groups 4 "  # slices of the batch; another checkout may choose their number otherwise, if it is not given
METHODS = {"moco_jointcrop": FOUR, "jcl": FOUR, "clim": FOUR + "--clim-start 0 --refresh-every 1000", "logo": FOUR}
METHODS |= {"logo --base simsiam": "", "patchmix": "--mix-slices 4"}


# ------------------------------------------------ the work, in a process of its own


def now():
    return np.array([time.perf_counter(), time.process_time()])


def serve(house, section, *words):
    """Do the work of a section by the files of the checkout `house`, and time it: `Served` says what, on stdin."""
    sys.path.insert(0, house)
    common, answer = importlib.import_module("common"), sys.stdout

    def tell(began):
        print(*(now() - began), file=answer, flush=True)

    with contextlib.redirect_stdout(sys.stderr):
        if section == "steps":
            return serve_steps(tell, *words)
        functions = knn_functions(common, *words)

        def work(_):
            for line in sys.stdin:
                began = now()
                functions[line.strip()]()
                tell(began)

        # `start` also sets what a script sets for its process
        common.start(work, lambda: argparse.Namespace(device="cpu", arch=None))


class Served:
    """`serve` in a process of its own. A call does a piece of work there: [seconds by the clock, of the processor]."""

    def __init__(self, house, threads, *words):
        command = [sys.executable, __file__, "serve", str(house), *words]
        self.log = tempfile.TemporaryFile("w+")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, **pipes)

    def __call__(self, word):
        with contextlib.suppress(BrokenPipeError):
            print(word, file=self.process.stdin, flush=True)
        if answer := self.process.stdout.readline():
            return [float(t) for t in answer.split()]
        self.log.seek(0)
        raise SystemExit(f"{' '.join(self.process.args)} ended:\n{self.log.read()[-2000:]}")

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def compare(rounds, sides, word, plain=None):
    """Return a row of the work `word` of one or two Served: its time, its ratio to the work `plain`, and to the other.

    The order turns round from round to round, so that a slow spell of the machine meets all. A ratio is the median over
    the rounds of the ratio within a round. One round before these is left out.
    """
    calls, found = [(side, word) for side in sides] + [(sides[0], plain)] * (plain is not None), []
    for turn in range(rounds + 1):
        order = list(enumerate(calls))[:: (-1) ** turn]
        seconds = {i: side(what) for i, (side, what) in order}
        found.append([seconds[i] for i in range(len(calls))])
    found = np.array(found[1:])  # (rounds, calls, clock and processor)
    ms, ratios = 1000 * np.median(found, 0), np.median(found[:, :1] / found[:, 1:], 0)
    row = dict(ms=ms[0, 0])
    if plain:
        row["over_plain"] = ratios[-1, 0]
    if len(sides) > 1:
        row |= dict(there_ms=ms[1, 0], ratio=ratios[0, 0], cpu_ratio=ratios[0, 1])
    return row


# ----------------------------------------------------------------------- steps


def watched(begin, before, after):
    """A replacement of DataLoader.__iter__, `begin`, that calls before(batch) and after(batch) of training batches.

    `after` is called when the training loop asks for the next batch, or ends. So what happens between the two calls is
    a training step with its bookkeeping, without the loading. Loaders of evaluations are left alone.
    """

    def batches(loader):
        if not hasattr(loader.batch_sampler, "epoch"):
            yield from begin(loader)
            return
        for batch in begin(loader):
            before(batch)
            try:
                yield batch
            finally:
                after(batch)

    return batches


def serve_steps(tell, method, *flags):
    """Run a method, and time a step for each line of stdin."""
    module, began = importlib.import_module(method), []

    def before(_):
        if not sys.stdin.readline():
            raise SystemExit
        began.append(now())

    DataLoader.__iter__ = watched(DataLoader.__iter__, before, lambda _: tell(began.pop()))
    module.common.start(module.main, lambda: module.parse_args(flags))


def make_folder(folder, count, part="train", seed=0):
    """Patterns as PNG files in FOLDER/PART, one folder per class."""
    for i, (image, label) in enumerate(zip(*common.make_patterns(count, 32, seed), strict=True)):
        path = Path(folder, part, f"kind{label}", f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def steps(args, houses):
    """Yield (one or two Served, [(row, word), ...]), a row per method and encoder: see `compare`."""
    flags = f"--dataset cifar10 --device cpu --amp off --batch-size {args.batch_size} --epochs 1000 --knn-every 0"
    own = [args.flags, args.flags if args.over_flags is None else args.over_flags]
    for kind, method in itertools.product(args.arch, args.methods):
        arch = ("vit_micro" if method == "patchmix" else "resnet_micro") if kind == "micro" else kind
        words = f"{method} {METHODS[method]} {flags} --workers 0 " + f"--arch {arch} " * (kind != "recipe")
        with tempfile.TemporaryDirectory() as folder:
            make_folder(folder, (args.rounds + 4) * args.batch_size)  # of one epoch, so that no save comes between
            sides = []
            for number, (house, more) in enumerate(zip(houses, own, strict=False)):
                where = ["--data-dir", folder, "--out", f"{folder}/{number}"]
                sides.append(Served(house, args.threads, "steps", *shlex.split(words + more), *where))
            yield sides, [(dict(method=method, arch=kind, batch=args.batch_size), "step")]


# ------------------------------------------------------------------------- kNN


def plain_knn(train_x, train_y, test_x, k, temperature, num_classes):
    """Instance Discrimination's vote, a hundred images at a time, with one-hot labels of the neighbours."""
    train_x, test_x = F.normalize(train_x, dim=1), F.normalize(test_x, dim=1)
    predicted = []
    for part in test_x.split(100):
        similarity, nearest = (part @ train_x.T).topk(k, 1)
        votes = F.one_hot(train_y[nearest], num_classes) * (similarity / temperature).exp()[..., None]
        predicted.append(votes.sum(1).sort(1, descending=True).indices[:, 0])
    return torch.cat(predicted)


def knn_functions(common, *sizes):
    """The vote of a bank of so many features for a fifth as many."""
    draws, functions = torch.Generator().manual_seed(0), {}
    for size in map(int, sizes):
        bank, queries = (torch.randn(n, 512, generator=draws) for n in (size, size // 5))
        given = bank, torch.randint(10, (size,), generator=draws), queries, min(200, size), 0.07, 10
        functions[f"vote {size}"] = functools.partial(common.knn_predict, *given)
        functions[f"plain {size}"] = functools.partial(plain_knn, *given)
    return functions


def knn(args, houses):
    """Yield (one or two Served, [(row, word, plain), ...]), a row per size: see `compare`."""
    sides = [Served(house, args.threads, "knn", *map(str, args.sizes)) for house in houses]
    shapes = {size: dict(vote=f"{size} x {size // 5} x 512, k 200") for size in args.sizes}
    yield sides, [(row, f"vote {size}", f"plain {size}") for size, row in shapes.items()]


# ------------------------------------------------------------------------ main


def table(rows):
    """Markdown of a list of equal dictionaries."""
    cells = [[f"{float(f'{v:.4g}'):g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [rows[0], ["---:"] * len(rows[0]), *cells])


def main():
    sections = dict(steps=steps, knn=knn)
    parser = argparse.ArgumentParser("bench.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("what", choices=sections)
    add("--against", metavar="CHECKOUT", help="compare with the same work by these files")
    add("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="NAME", help=", ".join(METHODS))
    kinds = "for steps: recipe (CIFAR-10's), micro, or an encoder's name"
    add("--arch", nargs="+", default=["recipe", "micro"], metavar="NAME", help=kinds)
    add("--flags", default="", metavar="TEXT", help="more of the scripts', for steps")
    add("--over-flags", metavar="TEXT", help="steps: over the same step with these instead of --flags")
    add("--batch-size", type=int, default=32, metavar="N", help="for steps")
    add("--rounds", type=int, default=10, metavar="N")
    add("--sizes", type=int, nargs="+", default=[50_000], metavar="N", help="of knn's bank")
    add("--threads", type=int, default=1, metavar="N")
    args = parser.parse_args()
    rows, houses = [], [ROOT] + [args.against or ROOT] * (args.against is not None or args.over_flags is not None)
    for sides, works in sections[args.what](args, houses):
        rows += [row | compare(args.rounds, sides, *work) for row, *work in works]
        for side in sides:
            side.end()
    about = Path("/proc/cpuinfo")
    processor = re.search(r"model name\s*: (.*)|$", about.read_text() if about.exists() else "")[1]
    print(f"python tests/tools/bench.py {shlex.join(sys.argv[1:])}\n{os.cpu_count()} x {processor}, ", end="")
    print(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {args.threads} thread(s)\n{table(rows)}")


if __name__ == "__main__" and sys.argv[1:2] == ["serve"]:
    serve(*sys.argv[2:])
else:
    sys.path.insert(0, str(ROOT))
    import common

    if __name__ == "__main__":
        main()
