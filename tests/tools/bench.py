"""Times a training step on the CPU, by hand, alone or over the same step with other flags.

    python tests/tools/bench.py [--methods clim] [--flags "--local-crops 2"] [--over-flags ""]

The two steps run in turn: A, B; B, A. Their ratio means more than their times, because other programs may use the
machine, too: that of the processor's time is disturbed less than that by the clock.
"""

import argparse
import contextlib
import importlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402

METHODS = ("moco_jointcrop", "jcl", "clim", "logo", "logo --base simsiam", "patchmix")


# ------------------------------------------------ the work, in a process of its own


def watched(begin, before, after):
    """A replacement of common.Loader.__iter__ that calls before(batch) and after(batch) of each batch for training.

    begin: common.Loader.__iter__. `after` is called when the training loop asks for the next batch, or ends. So what
    happens between the two calls is a training step with its bookkeeping, without the loading. Loaders of evaluations
    are left alone.
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


def serve(method, *flags):
    """Run a method, and make a step for each line of stdin. Its seconds go to stdout, as `Served` returns them."""
    module, began, answer = importlib.import_module(method), [], sys.stdout

    def now():
        return np.array([time.perf_counter(), time.process_time()])

    def before(_):
        if not sys.stdin.readline():
            raise SystemExit
        began.append(now())

    def after(_):
        print(*(now() - began.pop()), file=answer, flush=True)

    common.Loader.__iter__ = watched(common.Loader.__iter__, before, after)
    with contextlib.redirect_stdout(sys.stderr):
        common.start(module.main, lambda: module.parse_args(flags))


class Served:
    """`serve` in a process of its own. A call makes a step there: [seconds by the clock, of the processor]."""

    def __init__(self, *words):
        command, environment = [sys.executable, __file__, "serve", *words], os.environ | {"OMP_NUM_THREADS": "1"}
        self.log = tempfile.TemporaryFile("w+")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def __call__(self):
        with contextlib.suppress(BrokenPipeError):
            print(file=self.process.stdin, flush=True)
        if answer := self.process.stdout.readline():
            return [float(t) for t in answer.split()]
        self.log.seek(0)
        raise SystemExit(f"{' '.join(self.process.args)} ended:\n{self.log.read()[-2000:]}")

    def end(self):
        self.process.stdin.close()
        self.process.wait()


# ------------------------------------------------------------------------ main


def make_folder(folder, count, part="train", seed=0):
    """Patterns as PNG files in FOLDER/PART, one folder per class."""
    for i, (image, label) in enumerate(zip(*common.make_patterns(count, 32, seed), strict=True)):
        path = Path(folder, part, f"kind{label}", f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def compare(rounds, sides):
    """What one or two Served take, in words. A ratio is the median over the rounds of the ratio within a round.

    One round before these is left out.
    """
    found = []
    for turn in range(rounds + 1):
        order = list(enumerate(sides))[:: (-1) ** turn]
        found.append([seconds for _, seconds in sorted((i, side()) for i, side in order)])
    found = np.array(found[1:])  # (rounds, sides, clock and processor)
    words = f"{1000 * np.median(found[:, 0, 0]):.4g} ms"
    if len(sides) > 1:
        clock, processor = np.median(found[:, 0] / found[:, 1], 0)
        words += f", over the other step {clock:.4g} by the clock, {processor:.4g} of the processor"
    return words


def main():
    parser = argparse.ArgumentParser("bench.py", description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="NAME", help=str(METHODS))
    parser.add_argument("--flags", default="", metavar="TEXT", help="more of the scripts' (else CIFAR-10's recipe)")
    parser.add_argument("--over-flags", metavar="TEXT", help="over the same step with these instead of --flags")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=10, metavar="N")
    args = parser.parse_args()
    print(f"python tests/tools/bench.py {shlex.join(sys.argv[1:])}")
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    for method in args.methods:
        usual = f"{method} --dataset cifar10 --device cpu --amp off --batch-size {args.batch_size}".split()
        usual += "--epochs 1000 --knn-every 0 --workers 0".split()
        usual += ["--clim-start", "0", "--refresh-every", "1000"] if method == "clim" else []
        with tempfile.TemporaryDirectory() as folder:
            make_folder(folder, (args.rounds + 4) * args.batch_size)  # of one epoch, so that no save comes between
            sides = []
            for flags in (args.flags, args.over_flags):
                if flags is not None:
                    where = ["--data-dir", folder, "--out", f"{folder}/{len(sides)}"]
                    sides.append(Served(*usual, *shlex.split(flags), *where))
            print(f"{method}: {compare(args.rounds, sides)}", flush=True)
            for side in sides:
                side.end()


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1:2] == ["serve"] else main()
