"""Measures the processor's time of a training step, on one thread of the CPU, by hand.

    python tests/tools/bench.py steps [--methods jcl clim] [--arch recipe micro]
    python tests/tools/bench.py steps --methods clim --flags "--local-crops 2" --over-flags ""

With --over-flags (instead of --flags) or --against CHECKOUT (by its files) two kinds of steps take turns: A, B; B, A.
Their ratio means more than times, because other programs may use the machine, too.
"""

import argparse
import contextlib
import importlib
import io
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
from torch.utils.data import DataLoader

ROOT = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, sys.argv[2] if sys.argv[1:2] == ["serve"] else ROOT)
import common  # noqa: E402

METHODS = ("moco_jointcrop", "jcl", "clim", "logo", "logo --base simsiam", "patchmix")


@contextlib.contextmanager
def watched(before, after):
    """Inside, before() and after() are called around each training step with its bookkeeping, without the loading.

    `after` is called when the training loop asks for the next batch, or ends. Loaders of evaluations are left alone.
    """
    begin = DataLoader.__iter__

    def batches(loader):
        if not hasattr(loader.batch_sampler, "epoch"):
            return (yield from begin(loader))
        for batch in begin(loader):
            before()
            try:
                yield batch
            finally:
                after()

    with mock.patch.object(DataLoader, "__iter__", batches):
        yield


def serve(house, count, method, *flags):
    """Train by the files of the checkout `house`, a step for each line of stdin, and answer with its seconds."""
    began, answer = [], sys.stdout

    def before():
        if not sys.stdin.readline():
            raise SystemExit
        began.append(time.process_time())

    def after():
        print(time.process_time() - began.pop(), file=answer, flush=True)

    module, noise = importlib.import_module(method), np.random.default_rng(0)
    images = common.ImageSet(noise.integers(0, 256, (int(count), 32, 32, 3), np.uint8))
    with watched(before, after), contextlib.redirect_stdout(io.StringIO()):
        common.start(lambda args: module.main(args, train=images), lambda: module.parse_args(flags))


def step(process):
    """The seconds of a step of a process of `serve`."""
    print(file=process.stdin, flush=True)
    return float(process.stdout.readline())  # no number, if it has ended and said why


def measure(commands, rounds):
    """What each command's step takes, in words: the median over the rounds, and that of the ratio within a round."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    environment, found = os.environ | {"OMP_NUM_THREADS": "1"}, []
    sides = [subprocess.Popen(command, env=environment, **pipes) for command in commands]
    for turn in range(rounds + 1):
        order = slice(None, None, (-1) ** turn)  # it turns round, so that a slow spell of the machine meets both
        found.append([step(side) for side in sides[order]][order])
    for side in sides:
        side.communicate()
    found = np.array(found[1:])  # (rounds, sides)
    words = " over ".join(f"{1000 * seconds:.4g} ms" for seconds in np.median(found, 0))
    return words + (f": ratio {np.median(found[:, 0] / found[:, 1]):.3g}" if len(sides) > 1 else "")


def main():
    parser = argparse.ArgumentParser("bench.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("what", choices=["steps"])
    add("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="NAME", help=", ".join(METHODS))
    add("--arch", nargs="+", default=["recipe", "micro"], metavar="NAME", help="CIFAR-10's, micro, an encoder's name")
    add("--flags", default="", metavar="TEXT", help="more of the scripts'")
    add("--over-flags", metavar="TEXT", help="over the same step with these instead of --flags")
    add("--against", metavar="CHECKOUT", help="over the same step by these files")
    add("--batch-size", type=int, default=32, metavar="N")
    add("--rounds", type=int, default=10, metavar="N")
    args = parser.parse_args()
    print(f"torch {common.versions()['torch']}, one of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    count = (args.rounds + 4) * args.batch_size  # images: one epoch, so that no save comes between
    flags = f"--dataset cifar10 --device cpu --epochs 1000 --knn-every 0 --workers 0 --batch-size {args.batch_size}"
    for kind, method in itertools.product(args.arch, args.methods):
        own = f"{count} {method} {flags}" + " --clim-start 0" * (method == "clim")
        micro = "vit_micro" if method == "patchmix" else "resnet_micro"
        own += f" --arch {micro if kind == 'micro' else kind}" * (kind != "recipe")
        commands, sides = [], [(ROOT, args.flags)]
        if args.against or args.over_flags is not None:
            sides.append((args.against or ROOT, args.flags if args.over_flags is None else args.over_flags))
        with tempfile.TemporaryDirectory() as folder:
            for number, (house, more) in enumerate(sides):
                words = [*own.split(), *shlex.split(more), "--out", f"{folder}/{number}"]
                commands.append([sys.executable, __file__, "serve", house, *words])
            print(f"{method}, {kind}: {measure(commands, args.rounds)}", flush=True)


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1:2] == ["serve"] else main()
