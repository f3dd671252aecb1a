"""Checks that need a GPU. Prints PASS, FAIL or SKIP for each, and exits with status 1 if one fails.

    python tests/tools/gpu_check.py [--seconds 480] [--only numbers waits]
    python tests/tools/gpu_check.py --device cpu                             only tests this script

The first three sections run in one process. The longest section runs last.
"""

import argparse
import collections
import contextlib
import functools
import gc
import importlib
import io
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from bench import parse, records, training_batches, watched  # which puts the project's root on the path
from PIL import Image
from torch.utils._pytree import tree_leaves

import common

# fmt: off
FLAGS = "--epochs 2 --batch-size 32 --knn-every 1 --workers 0".split()
CASES = {
    "MoCo v2": "moco_jointcrop --queue 64", "MoCo v3": "moco_jointcrop --moco v3", "JCL": "jcl --queue 64",
    "CLIM": "clim --queue 64 --clim-start 1 --num-clusters 4", "LoGo": "logo --queue 64",
    "LoGo on SimSiam": "logo --base simsiam", "PatchMix": "patchmix --mix-slices 2",
}
EVALUATIONS = {
    "kNN": "eval_knn", "linear probe": "eval_linear --no-baselines",
    "MoCo's linear protocol": "eval_linear --protocol moco --epochs 2 --batch-size 32",
    "fine-tuning": "eval_linear --finetune --epochs 2 --batch-size 32",
}
RECIPES = {  # of ImageNet, for one of eight GPUs: (images, memory in GB as in tests/running.md)
    "moco_jointcrop --bn-groups 1": (32, 2.3), "jcl --bn-groups 1": (64, 5.7), "logo --bn-groups 1": (32, 4.4),
    "clim --bn-groups 2 --clim-start 0 --num-clusters 16": (64, 5.6), "logo --base simsiam": (32, 4.1),
    "patchmix --mix-slices 1": (128, 10.2), "moco_jointcrop --moco v3": (512, 48.9),
}
# fmt: on


def make_few_patterns():
    """Reduce the demo's images for the rest of this process, to three steps per epoch."""
    make, few = functools.cache(common.Patterns), {4096: 96, 1024: 32}
    common.Patterns = lambda count, size, seed: make(few.get(count, count), size, seed)


def train(case, out, *flags, **own):
    """Train in this process, and return the records of the epochs. own: datasets to use instead, by name."""
    module, args = parse(case, *FLAGS, "--out", out, *flags)
    module.main(args, **own)
    return records(out)


def evaluate(case, out, run, *flags):
    """Evaluate the encoder of a run, and return the scores."""
    module, args = parse(case, run, *["--out", out] * ("--epochs" in case), "--workers", "0", *flags)
    return module.main(args)["encoder"]


def train_until(step, *words):
    """Train until Ctrl-C before a step, counted from 1. words: see `train`."""
    begin = mock.Mock(side_effect=[None] * (step - 1) + [KeyboardInterrupt])
    with watched(begin, mock.Mock()), contextlib.suppress(KeyboardInterrupt):
        train(*words)


@contextlib.contextmanager
def drawn_on_the_cpu():
    """Inside, `augment`, torch.randperm and torch.randn run on the CPU, because GPUs draw other random numbers."""

    def moved(function):
        return lambda *size, device=None, **more: function(*size, **more).to(device or "cpu")

    def on_cpu(function):
        return lambda x, *more: function(x.cpu(), *more).to(x.device)

    with contextlib.ExitStack() as stack:
        for name in ("randperm", "randn"):
            stack.enter_context(mock.patch.object(torch, name, moved(getattr(torch, name))))
        for module in map(importlib.import_module, {case.split()[0] for case in CASES.values()}):
            stack.enter_context(mock.patch.object(module, "augment", on_cpu(module.augment)))
        yield


# Compared in the second epoch. The gradient's norm is not, because rounding changes it too much. With a relative noise
# of 1e-6 in the initial weights (on a CPU in float64), it changed by 17% in the sixth step of LoGo, and by 28% in that
# of MoCo v2. The loss changed by 0.1% and 0.4%, and std by 0.6% and 0.1%.
STEADY = ("loss", "std")


def differ(one, other, rounding, names=("loss", "grad_norm", "std")):
    """Return, as texts, the values that differ between the records of two epochs by more than the ratio `rounding`."""
    pairs = [(name, one[name], other[name]) for name in names if name in other]
    return [f"{name} {x:.5g}, not {y:.5g}" for name, x, y in pairs if not abs(x - y) <= rounding * abs(y) + 1e-3]


# ------------- the sections: each yields (check, list of errors), or (check, None) if the GPU has too little memory


def numbers(device, folder):
    """Runs in float32 agree with the CPU's, those in bf16 roughly. A stopped run resumes on the GPU or on the CPU."""
    there, here = ["--device", device], "--device cpu --amp off".split()
    for name, case in CASES.items():
        with drawn_on_the_cpu():
            cpu = train(case, folder / f"{name} cpu", *here)
            exact = train(case, folder / f"{name} exact", *there, "--amp", "off")
            yield f"{name}, as on the CPU", differ(exact[0], cpu[0], 1e-2) + differ(exact[1], cpu[1], 5e-2, STEADY)
            bf16 = train(case, folder / f"{name} auto", *there)
            yield f"{name}, bf16", differ(bf16[0], cpu[0], 0.1, STEADY)
            ended = folder / f"{name} ended"
            train_until(5, case, ended, *there, "--amp", "off")  # the second step of the second epoch
            copied = shutil.copytree(ended, folder / f"{name} copied")
            resumed = train(case, ended, *there, "--amp", "off")
            yield f"{name}, ended and resumed", differ(resumed[1], exact[1], 5e-2, STEADY)
            yield f"{name}, resumed on a CPU", differ(train(case, copied, *here)[1], cpu[1], 5e-2, STEADY)


def evaluations(device, folder):
    """Scores agree with the CPU's, except for one or two of 32 images, whose predictions rounding may change."""
    train(CASES["PatchMix"], folder / "evaluated", "--device", "cpu")
    for name, case in EVALUATIONS.items():
        flags = ["--amp", "off"] + "--drop-path 0 --erase 0".split() * (name == "fine-tuning")  # draw on the device
        where, run = ("cpu", device), folder / "evaluated"
        cpu, gpu = (evaluate(case, folder / f"{name} {d}", run, *flags, "--device", d) for d in where)
        yield name, [f"{x} {gpu[x]:.1f}, not {cpu[x]:.1f}" for x in gpu if abs(gpu[x] - cpu[x]) > 7]


def waits(device, folder):
    """No step waits for the GPU, according to torch's sync debug mode. The first step may, while libraries start.

    Two workers, which are forked after CUDA has started, load the batches, and these are in pinned memory.
    """
    mode = torch.cuda.set_sync_debug_mode

    def look(batches):
        for batch in batches:
            pinned.extend(x.is_pinned() for x in tree_leaves(batch))
            yield batch

    for name, case in CASES.items():
        pinned, steps = [], itertools.chain(["default"], itertools.repeat("warn"))
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            with watched(lambda steps=steps: mode(next(steps)), lambda: mode("default")), training_batches(look):
                train(case, folder / f"{name} waits", "--device", device, "--knn-every", "0", "--workers", "2")
        lines = [f"{Path(w.filename).name}:{w.lineno}" for w in noted if "called a synchronizing" in str(w.message)]
        wrong = [f"{line} x {count}" for line, count in collections.Counter(lines).items()]
        yield name, wrong + ["batches are not pinned"] * (not all(pinned))


def group(device, folder):
    """With NCCL, all processes end with the same model: ShuffleBN and, with several GPUs, DDP and SyncBatchNorm."""
    device = common.init_distributed(device)[0]
    if not dist.is_initialized():  # one process
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    world = dist.get_world_size()

    def note(out, config, info, state, *more):
        sums.append([x.double().sum().item() for x in state["model"].state_dict().values()])
        return save_run(out, config, info, state, *more)

    save_run = common.save_run
    for name, case in CASES.items():
        sums = []
        with mock.patch.object(common, "save_run", note):
            train(case, folder / f"{name} {world}", "--amp", "off", "--device", device.type)
        same = all(other == sums for other in common.all_gather_object(sums))
        yield f"{name}, {world} process(es)", [] if same and sums else ["the processes end with different models"]


def recipes(device, folder):
    """Peak memory and speed of the ImageNet recipes, measured over six steps without the loading."""
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True  # as in the scripts
    times = []

    def note():
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        if len(times) == 2:  # the first step has tried convolutions, which needs more memory
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    for case, (batch, expected) in RECIPES.items():
        if torch.cuda.get_device_properties(0).total_memory < 1.3e9 * expected:
            yield case, None
            continue
        times.clear()
        gc.collect()
        torch.cuda.empty_cache()
        flags = f"--dataset imagenet --batch-size {batch} --epochs 1 --knn-every 0 --workers 8".split()
        images = [(Image.effect_noise((256, 256), 100).convert("RGB"), -1)] * 6 * batch
        with watched(note, note):
            train(case, folder / case, *flags, train=images)
        peak, step = torch.cuda.max_memory_allocated() / 1e9, np.median(np.diff(times)[4::2])
        said = f"{case}: {peak:.1f} GB (tests/running.md: {expected}), {batch / step:.0f} images/s"
        yield said, ["more memory than expected"] * (peak > 1.3 * expected)


def compiled(device, folder):
    """Runs with and without --compile agree."""
    flags = ["--device", device, "--amp", "off", "--knn-every", "0"]
    plain, other = (train(CASES["JCL"], folder / f"JCL{more}", *flags, *more) for more in ([], ["--compile"]))
    yield "JCL", differ(other[0], plain[0], 2e-2)


SECTIONS = {f.__name__: f for f in (numbers, evaluations, waits, group, recipes, compiled)}
# (sections, number of torchrun's processes or 0)
PLAN = ("numbers evaluations waits", 0), ("group", 1), ("group", 2), ("recipes", 0), ("compiled", 0)


def verdict(section, what, wrong):
    """Return the result of a check as a line of text."""
    word = "SKIP" if wrong is None else "FAIL" if wrong else "PASS"
    return f"{word} {section}: {what}  {'; '.join(wrong or [])}".rstrip()


def make_checks(device, folder, *sections):
    """Run sections in this process, and exit with status 1 if a check fails."""
    make_few_patterns()
    torch.backends.cudnn.allow_tf32 = False  # numbers are compared with the CPU's
    answer, failed = sys.stdout, False

    def say(line):
        if os.environ.get("RANK", "0") == "0" or line.startswith("FAIL"):
            print(line, file=answer, flush=True)

    for section in sections:
        began, checks = time.time(), SECTIONS[section](device, Path(folder))
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                for what, wrong in checks:
                    say(verdict(section, what, wrong))
                    failed |= bool(wrong)
            except Exception:
                say(verdict(section, "", [traceback.format_exc()]))
                failed = True
        say(f"     {section}: {time.time() - began:.0f} s")
    if dist.is_initialized():
        dist.destroy_process_group()
    raise SystemExit(failed)


def main():
    parser = argparse.ArgumentParser("tests/tools/gpu_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=SECTIONS, metavar="NAME", help=str([*SECTIONS]))
    args, gpus = parser.parse_args(), torch.cuda.device_count()
    name = torch.cuda.get_device_name() if gpus else "no GPU"
    print(f"{gpus} x {name}; torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    if not gpus and args.device == "cuda":
        raise SystemExit("FAIL: torch sees no GPU; nvidia-smi and the driver's version say why")
    end, failed = time.time() + args.seconds, []
    with tempfile.TemporaryDirectory() as folder:
        for sections, processes in PLAN:
            names, words = [name for name in sections.split() if name in args.only], []
            for name in [*names]:
                if processes > gpus if args.device == "cuda" else name in ("waits", "recipes", "compiled"):
                    print(verdict(name, f"it needs {max(1, processes)} GPU(s)", None), flush=True)
                    names.remove(name)
            if processes:
                words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
            limit = ["timeout", str(max(1, end - time.time())), sys.executable]
            words = [*limit, *words, __file__, "sections", args.device, folder, *names]
            if names and (status := subprocess.run(words, env={"OMP_NUM_THREADS": "1"} | os.environ).returncode):
                failed.append(f"{' '.join(names)}: exit status {status}" + " (no time left)" * (status == 124))
    print("VERDICT: " + (f"something failed ({'; '.join(failed)})" if failed else "all that ran is right"))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    make_checks(*sys.argv[2:]) if sys.argv[1:2] == ["sections"] else main()
