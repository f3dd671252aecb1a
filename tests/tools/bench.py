"""Measures the CPU time of training steps and of loading, on one thread, by hand; counts operations.

    python tests/tools/bench.py steps [--methods jcl clim] [--against COMMIT]
    python tests/tools/bench.py device           the operations that a step of the CIFAR recipes gives to a GPU, counted
    python tests/tools/bench.py views            from JPEG files to views of 224 px, without the model

`steps` are the demo's. `views` has the ImageNet recipe with the photographs of .github, and a small encoder. --against:
over the same by the files of a commit. Then both sides run at once, and take turns: A, B; B, A. Their ratio of times
means more than the times, because other programs may use the machine, too.

`device` needs no GPU and no idle machine. It counts the operations that compute (not views, not allocations) and the
copies from the host, in float32 and with 16 images, on whose number the counts do not depend. What the CPU draws for
itself is not counted. On a GPU in bf16 casts are added, and some operations are several kernels.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, sys.argv[3] if sys.argv[1:2] == ["serve"] else str(ROOT))

METHODS = ("moco_jointcrop", "jcl", "clim", "logo", "logo --base simsiam", "patchmix")
KINDS = {  # methods, rounds, batch size, flags
    "steps": (METHODS, 20, 64, ""),
    "views": (("jcl", "clim"), 5, 32, "--dataset imagenet --arch resnet_micro"),
    "device": (METHODS, 1, 16, "--dataset cifar10"),
}


def parse(line, *more):
    """The module and the arguments of a script's command line. more: words."""
    script, *words = line.split()
    module = importlib.import_module(script.removesuffix(".py"))
    return module, module.parse_args([*words, *map(str, more)])


def records(out):
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def training_batches(load):
    """Inside, a training loop gets what load(iterator of a loader) yields. Loaders of evaluations are left alone."""
    begin = DataLoader.__iter__

    def batches(loader):
        in_training = isinstance(loader.sampler, DistributedSampler)
        return load(begin(loader)) if in_training else begin(loader)

    with mock.patch.object(DataLoader, "__iter__", batches):
        yield


def watched(before, after):
    """Inside, before() and after() are called around each training step, without the loading."""

    def load(batches):
        for batch in batches:
            before()
            try:
                yield batch
            finally:
                after()

    return training_batches(load)


# ------------------------------------------------------- the process that is measured


def serve(what, house, method, *flags):
    """Train with the files of the checkout `house`. Print an empty line, then a step's times for each line of stdin."""
    answer, clock = sys.stdout, []  # of a step: when it began, was loaded, was colored, ended

    def in_turns(batches):
        print(file=answer, flush=True)
        while sys.stdin.readline():
            clock[:] = [time.process_time()]
            batch = next(batches)
            clock.append(time.process_time())
            yield batch
            clock.append(time.process_time())
            print(*np.diff(clock), file=answer, flush=True)
        raise SystemExit

    def on_forward(module, inputs):  # the first module of a step takes the colored views
        if len(clock) == 2:
            clock.append(time.process_time())

    torch.nn.modules.module.register_module_forward_pre_hook(on_forward)
    with contextlib.redirect_stdout(io.StringIO()):
        module, args = parse(method, *flags)
        if what == "device":
            return print(json.dumps(importlib.import_module("simulated_device").count(module, args)), file=answer)
        with training_batches(in_turns):
            importlib.import_module("common").start(module.main, lambda: args)


# ------------------------------------------------------------------- the measurements


def measure(commands, rounds):
    """Return the times of each side in each round, (rounds, sides, parts of a step)."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    environment, found = os.environ | {"OMP_NUM_THREADS": "1"}, []
    sides = [subprocess.Popen(command, env=environment, **pipes) for command in commands]
    for side in sides:
        side.stdout.readline()  # it is ready
    for turn in range(rounds):
        answers = [None] * len(sides)
        for i in range(len(sides))[:: (-1) ** turn]:  # in both orders, so that a slow spell meets both sides
            print(file=sides[i].stdin, flush=True)
            answers[i] = [float(number) for number in sides[i].stdout.readline().split()]
        found.append(answers)
    for side in sides:
        side.communicate()
    return np.array(found)


def report(name, seconds, images):
    """Print a part of a step, (rounds, sides): median speeds, and the median of the times' ratio within a round."""
    text = " over ".join(f"{images / x:.4g} images/s" for x in np.median(seconds, 0))
    if seconds.shape[1] > 1:
        text += f": ratio {np.median(seconds[:, 0] / seconds[:, 1]):.3f} of the time"
    print(f"{name:35} {text}", flush=True)


def show_counts(method, commands):
    """Print how many operations and copies a step gives to a device, of each side, and the operations' ratio."""
    sides = [json.loads(subprocess.run(c, stdout=subprocess.PIPE, check=True).stdout) for c in commands]
    for how in sides[0]:
        operations, copies = ([side[how][what] for side in sides] for what in ("operations", "copies"))
        text = " over ".join(f"{n:,} and {m:,} copies" for n, m in zip(operations, copies, strict=True))
        ratio = f": ratio {operations[0] / operations[1]:.3f}" if len(sides) > 1 else ""
        print(f"{f'{method}, SGD {how}':35} {text}{ratio}", flush=True)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench.py", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("what", choices=KINDS)
    add("--methods", nargs="+", choices=METHODS, metavar="NAME", help=", ".join(METHODS))
    add("--against", metavar="COMMIT", help="over the same by the files of a commit")
    add("--rounds", type=int, metavar="N", help="steps of each side: by default 20, for views 5")
    args = parser.parse_args()
    methods, rounds, batch, flags = KINDS[args.what]
    print(f"torch {torch.__version__}, one of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        houses = [str(ROOT)]
        if args.against:
            houses.append(f"{folder}/before")
            os.mkdir(houses[1])
            archive = subprocess.run(["git", "archive", args.against], cwd=ROOT, capture_output=True, check=True).stdout
            subprocess.run(["tar", "-x", "-C", houses[1]], input=archive, check=True)
        os.makedirs(f"{folder}/images/train")
        for i, photo in enumerate(80 * sorted(ROOT.glob(".github/photos/*.jpg"))):
            os.symlink(photo, f"{folder}/images/train/{i}.jpg")
        for method in args.methods or methods:
            own = f"{method} --device cpu --knn-every 0 --workers 0 --batch-size {batch} {flags}"
            own += " --clim-start 0" * (method == "clim")
            own += " --num-clusters 4" * (method == "clim" and args.what != "steps")
            own += " --arch vit_tiny --patch-size 4" * (method == "patchmix" and args.what == "device")
            own += f" --data-dir {folder}/images" * (args.what == "views")
            side, out = [sys.executable, __file__, "serve", args.what], f"{folder}/{method}"
            commands = [[*side, house, *own.split(), "--out", f"{out}{i}"] for i, house in enumerate(houses)]
            if args.what == "device":
                show_counts(method, commands)
                continue
            found = measure(commands, 1 + (args.rounds or rounds))[1:]  # without the first step
            loading, color, rest = np.moveaxis(found, 2, 0)
            report(f"{method}: loading", loading, batch)
            report(f"{method}: color on the CPU", color, batch)
            report(f"{method}: loading and color", loading + color, batch)
            if args.what == "steps":
                report(f"{method}: whole step", loading + color + rest, batch)


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1:2] == ["serve"] else main()
