"""Measures the CPU time of training steps and of loading, on one thread, by hand; counts operations.

    python tests/tools/bench.py steps [--methods jcl clim] [--against COMMIT]
    python tests/tools/bench.py device           the operations that a step of the CIFAR recipes gives to a GPU, counted
    python tests/tools/bench.py views            from JPEG files to views of 224 px, without the model

`steps` are the demo's. `views` has the ImageNet recipe with the photographs of .github, and a small encoder. With
--against, the same is measured with the files of that commit, at the same time, and the ratio is printed. It means more
than the times themselves, because other programs may use the machine, too.

`device` needs no GPU and no idle machine. It counts, by the part of a step, the operations that compute (not views, not
allocations) and the copies from the host, in float32 and with 16 images, on whose number the counts do not depend. What
the CPU draws for itself is not counted. On a GPU in bf16 casts are added, and some operations are several kernels.
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
KINDS = {  # methods, steps, batch size, flags
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


def serve(what, house, steps, method, *flags):
    """Train with the files of the checkout `house`. Print each step's time of loading and whole time, or counts."""
    answer = sys.stdout

    def timed(batches):
        for _ in range(int(steps)):
            began = time.process_time()
            if (batch := next(batches, None)) is None:  # an epoch has 64 steps
                break
            loaded = time.process_time() - began
            yield batch
            print(loaded, time.process_time() - began, file=answer)
        raise SystemExit

    with contextlib.redirect_stdout(io.StringIO()):
        module, args = parse(method, *flags)
        if what == "device":
            return print(json.dumps(importlib.import_module("simulated_device").count(module, args)), file=answer)
        with training_batches(timed):
            importlib.import_module("common").start(module.main, lambda: args)


# ------------------------------------------------------------------- the measurements


def measure(commands):
    """Return the lines that each side prints. They run at once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    sides = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, text=True) for c in commands]
    return [side.communicate()[0].splitlines() for side in sides]


def report(name, seconds, images):
    """Print a part of a step, (steps, sides): median speeds, and the median of the times' ratio."""
    text = " over ".join(f"{images / x:.4g} images/s" for x in np.median(seconds, 0))
    if seconds.shape[1] > 1:
        text += f": ratio {np.median(seconds[:, 0] / seconds[:, 1]):.3f} of the time"
    print(f"{name:35} {text}", flush=True)


def report_counts(method, sides):
    """Print what a step gives to a device, {part: [operations, copies]} of each side, and the ratios of the whole."""
    rows = {part: [side[part] for side in sides] for part in sides[0]}
    rows["whole step"] = [np.sum([*side.values()], 0).tolist() for side in sides]
    print(f"{method}: operations and copies that a step gives to a device")
    for part, counts in rows.items():
        text = " over ".join(f"{operations:,} and {copies:,}" for operations, copies in counts)
        is_compared = len(sides) > 1 and part == "whole step"
        print(f"  {part:33} {text}" + (f": ratio {counts[0][0] / counts[1][0]:.3f}" if is_compared else ""), flush=True)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench.py", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("what", choices=KINDS)
    add("--methods", nargs="+", choices=METHODS, metavar="NAME", help=", ".join(METHODS))
    add("--against", metavar="COMMIT", help="over the same by the files of a commit")
    add("--steps", type=int, metavar="N", help="of each side: by default 20, for views 5")
    args = parser.parse_args()
    methods, steps, batch, flags = KINDS[args.what]
    steps = args.steps or steps
    print(f"torch {torch.__version__}, one of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        houses = [str(ROOT)]
        if args.against:
            houses.append(f"{folder}/before")
            os.mkdir(houses[1])
            subprocess.run(f"git archive {args.against} | tar -x -C {houses[1]}", cwd=ROOT, shell=True, check=True)
        os.makedirs(f"{folder}/images/train")
        for i, photo in enumerate(80 * sorted(ROOT.glob(".github/photos/*.jpg"))):
            os.symlink(photo, f"{folder}/images/train/{i}.jpg")
        for method in args.methods or methods:
            own = f"{method} --device cpu --knn-every 0 --workers 0 --batch-size {batch} {flags}"
            own += " --clim-start 0 --num-clusters 4" * (method == "clim")
            own += " --arch vit_tiny --patch-size 4" * (method == "patchmix" and args.what == "device")
            own += f" --data-dir {folder}/images" * (args.what == "views")
            sides = [[sys.executable, __file__, "serve", args.what, house, str(1 + steps)] for house in houses]
            found = measure([[*side, *own.split(), "--out", f"{folder}/{method}{i}"] for i, side in enumerate(sides)])
            if args.what == "device":
                report_counts(method, [json.loads(line) for (line,) in found])
                continue
            loading, whole = np.stack([np.loadtxt(lines)[1:] for lines in found], 1).T  # without the first step
            report(f"{method}: loading", loading.T, batch)
            if args.what == "steps":
                report(f"{method}: whole step", whole.T, batch)


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1:2] == ["serve"] else main()
