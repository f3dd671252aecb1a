"""What only a GPU can show, in one command: PASS, FAIL or SKIP per check, a verdict, and exit status 1 if one failed.

    python tests/tools/gpu_check.py [--seconds 480] [--only numbers waits]
    python tests/tools/gpu_check.py --device cpu                             tries the script itself

Each section is a process of its own, which may take what is left of the time. The cheapest come first.
"""

import argparse
import collections
import contextlib
import gc
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from bench import watched  # which puts the project's root on the path

import common
import jcl

# fmt: off
FLAGS = "--epochs 2 --batch-size 32 --knn-every 1".split()
CASES = {
    "MoCo v2": "moco_jointcrop --queue 64", "MoCo v3": "moco_jointcrop --moco v3", "JCL": "jcl --queue 64",
    "CLIM": "clim --queue 64 --clim-start 1 --num-clusters 4", "LoGo": "logo --queue 64",
    "LoGo on SimSiam": "logo --base simsiam", "PatchMix": "patchmix --mix-slices 2",
}
WHOLE_BATCH = ("MoCo v3", "LoGo on SimSiam", "PatchMix")  # batch norm over processes is torch's, for GPUs only
EVALUATIONS = {
    "kNN": "eval_knn", "linear probe": "eval_linear --no-baselines",
    "MoCo's linear protocol": "eval_linear --protocol moco --epochs 2 --batch-size 32",
    "fine-tuning": "eval_linear --finetune --epochs 2 --batch-size 32",
}
RECIPES = {  # ImageNet's, as one of eight GPUs has them: images, and GB by tests/README.md
    "moco_jointcrop --bn-groups 1": (32, 1.9), "jcl --bn-groups 1": (64, 5.9), "logo --bn-groups 1": (32, 4.1),
    "clim --bn-groups 2 --clim-start 0 --num-clusters 16": (64, 4.8), "logo --base simsiam": (32, 3.8),
    "patchmix --mix-slices 1": (128, 9.6), "moco_jointcrop --moco v3": (512, 45),
}
# fmt: on


def make_few_patterns():
    """From now on the images of patterns are few: 3 steps per epoch."""
    make, few = common.make_patterns, {4096: 96, 1024: 32}
    common.make_patterns = lambda count, *more, **named: make(few.get(count, count), *more, **named)


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def train(case, out, *flags, **own):
    """The records of a run in this process. own: its images."""
    script, *more = case.split()
    module = importlib.import_module(script)
    module.main(module.parse_args([*FLAGS, *more, "--out", str(out), *flags]), **own)
    return records(out)


def evaluate(case, out, run, *flags):
    """The scores of a run's encoder."""
    script, *more = case.split()
    module, out = importlib.import_module(script), ["--out", str(out)] * ("--epochs" in more)
    return module.main(module.parse_args([str(run), *more, *out, *flags]))["encoder"]


def train_until(step, *words):
    """A run that Ctrl-C ends in this step. words: of `train`."""
    effects = [*[mock.DEFAULT] * (step - 1), KeyboardInterrupt]
    ended = mock.patch.object(common, "color_views", wraps=common.color_views, side_effect=effects)
    with ended, contextlib.suppress(KeyboardInterrupt):
        train(*words)


def differ(one, other, rounding, names=("loss", "grad_norm", "std")):
    """What of two epochs' records differs by more than rounding, in words."""
    pairs = [(name, one[name], other[name]) for name in names]
    return [f"{name} {x:.5g}, not {y:.5g}" for name, x, y in pairs if not abs(x - y) <= rounding * abs(y) + 1e-3]


# --------------------- the sections: each yields (what, what is wrong, a list); None: the device is too small for it


def loader(device, folder):
    """Workers that are forked after CUDA has begun; pinned batches; how fast they come."""
    args = jcl.parse_args("--batch-size 64 --workers 4".split())
    device = torch.ones(8, device=device).device  # CUDA has begun
    images = common.ImageSet(common.make_patterns(4000, 32, seed=0)[0])
    batches = common.make_loader(args, images, [*jcl.augmentation(args).values()], device)
    began, wrong = time.time(), []
    for batch in batches:
        wrong += ["a batch is not pinned"] * (device.type == "cuda" and not batch["views"][0].is_pinned())
        common.color_views(batch, device)
    yield f"{len(images) / (time.time() - began):.0f} images/s by 4 workers", wrong[:1]


def collectives(device, folder):
    """What the scripts ask of the process group, by tensors of the device and of the CPU."""
    device, rank, world = common.join_processes(device)
    even, uneven = torch.full((2,), rank, device=device), torch.full((rank, 3), rank, device=device)  # 0, 1, ... rows
    each, of_first = torch.arange(world), torch.tensor([rank])
    dist.broadcast(of_first, 0)
    right = dict(gather=jcl.gather(even).cpu().equal(each.repeat_interleave(2)), broadcast=of_first.item() == 0)
    right["gather_uneven"] = common.gather_uneven(uneven)[:, 0].cpu().equal(each.repeat_interleave(each))
    dist.all_reduce(even)
    right |= dict(all_reduce=even.tolist() == [sum(range(world))] * 2, from_all=common.from_all(rank) == each.tolist())
    yield f"of {world} process(es)", [name for name in right if not right[name]]


def numbers(device, folder):
    """In float32 the GPU computes what the CPU does; in bf16 about; a run that was ended goes on, there or here."""
    there, here = ["--device", device, "--workers", "2"], "--device cpu --workers 0 --amp off".split()
    for name, case in CASES.items():
        cpu = train(case, folder / f"{name} cpu", *here)
        exact = train(case, folder / f"{name} exact", *there, "--amp", "off")
        yield f"{name}, as on the CPU", differ(exact[0], cpu[0], 1e-2) + differ(exact[1], cpu[1], 5e-2)
        yield f"{name}, bf16", differ(train(case, folder / f"{name} auto", *there)[0], cpu[0], 0.1, ("loss", "std"))
        ended = folder / f"{name} ended"
        train_until(5, case, ended, *there, "--amp", "off")  # the second step of the second epoch
        copied = shutil.copytree(ended, folder / f"{name} copied")
        again = train(case, ended, *there, "--amp", "off")
        yield f"{name}, ended and gone on", differ(again[0], exact[0], 1e-2) + differ(again[1], exact[1], 2e-2)
        yield f"{name}, gone on with a CPU", differ(train(case, copied, *here)[1], cpu[1], 5e-2)


def evaluations(device, folder):
    """The scores are the CPU's, but for one or two of 32 images, which rounding may turn."""
    train(CASES["PatchMix"], folder / "evaluated", "--device", "cpu")
    for name, case in EVALUATIONS.items():
        flags = ["--amp", "off"] + "--drop-path 0 --erase 0".split() * (name == "fine-tuning")  # draw on the device
        where = ["cpu", device]
        cpu, gpu = (evaluate(case, folder / f"{name} {d}", folder / "evaluated", *flags, "--device", d) for d in where)
        pairs = [(measure, value, cpu[measure]) for measure, value in gpu.items()]
        yield name, [f"{measure} {x:.1f}, not {y:.1f}" for measure, x, y in pairs if abs(x - y) > 7]


def waits(device, folder):
    """No line of a step waits for the GPU, by CUDA's own account; but the first step loads constants."""
    mode = torch.cuda.set_sync_debug_mode
    for name, case in CASES.items():
        steps = itertools.chain(["default"], itertools.repeat("warn"))
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            with watched(lambda steps=steps: mode(next(steps)), lambda: mode("default")):
                train(case, folder / f"{name} waits", "--device", device, "--knn-every", "0")
        lines = [f"{Path(w.filename).name}:{w.lineno}" for w in noted if "called a synchronizing" in str(w.message)]
        yield name, [f"{line} x {count}" for line, count in collections.Counter(lines).items()]


def group(device, folder):
    """In torchrun's group, by NCCL: DDP, ShuffleBN, SyncBatchNorm. Two processes compute what one computes."""
    device, rank, world = common.join_processes(device)
    for name, case in CASES.items():
        found, wrong = train(case, folder / f"{name} {world}", "--amp", "off", "--device", device.type), []
        if world > 1 and not (device.type == "cpu" and name in WHOLE_BATCH):
            wrong = differ(found[0], records(folder / f"{name} 1")[0], 1e-2)
        yield f"{name}, {world} process(es)", wrong


def recipes(device, folder):
    """Peak memory and speed of the ImageNet recipes, by four steps without the loading."""
    times, noise = [], np.random.default_rng(0)

    def note():
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    for case, (batch, expected) in RECIPES.items():
        if torch.cuda.get_device_properties(0).total_memory < 1.3e9 * expected:
            yield case, None
            continue
        images = common.ImageSet(noise.integers(0, 256, (4 * batch, 256, 256, 3), np.uint8))
        times.clear()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        flags = f"--dataset imagenet --batch-size {batch} --epochs 1 --knn-every 0 --workers 8".split()
        with watched(note, note):
            train(case, folder / case, *flags, train=images)
        peak, step = torch.cuda.max_memory_allocated() / 1e9, np.median(np.diff(times)[::2])
        said = f"{case}: {peak:.1f} GB (tests/README.md: {expected}), {batch / step:.0f} images/s"
        yield said, ["more memory than there"] * (peak > 1.3 * expected)


def compiled(device, folder):
    """--compile changes no number by more than rounding."""
    for name in ("JCL", "PatchMix"):
        flags = ["--device", device, "--amp", "off"]
        plain, other = (train(CASES[name], folder / f"{name}{more}", *flags, *more) for more in ([], ["--compile"]))
        yield name, differ(other[0], plain[0], 2e-2)


PLAN = [(loader, 0), (collectives, 1), (numbers, 0), (evaluations, 0), (waits, 0), (group, 1), (collectives, 2)]
PLAN += [(group, 2), (recipes, 0), (compiled, 0)]  # section, torchrun's processes
SECTIONS = {section.__name__: section for section, _ in PLAN}


def verdict(section, what, wrong):
    """A check in words."""
    word = "SKIP" if wrong is None else "FAIL" if wrong else "PASS"
    return f"{word} {section}: {what}  {'; '.join(wrong or [])}".rstrip()


def make_checks(section, device, folder):
    """Make the checks of a section, in this process."""
    make_few_patterns()
    torch.backends.cudnn.allow_tf32 = section == "recipes"  # elsewhere numbers are compared with the CPU's
    for check in SECTIONS[section](device, Path(folder)):
        common.log(verdict(section, *check))
    if dist.is_initialized():
        dist.destroy_process_group()


def start(section, processes, device, folder, seconds):
    """Make the checks of a section in a process of its own. Return them in words, and that it ended badly."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    words = [sys.executable, *launcher, __file__, "section", section, device, folder]
    environment = dict(OMP_NUM_THREADS="1") | os.environ
    done = subprocess.run(["timeout", str(seconds), *words], env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("PASS ", "FAIL ", "SKIP "))]
    if done.returncode:
        lines.append(verdict(section, "", [f"exit status {done.returncode} (124: no time left) {done.stderr[-1500:]}"]))
    return lines


def main():
    parser = argparse.ArgumentParser("tests/tools/gpu_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=SECTIONS, metavar="NAME", help=str([*SECTIONS]))
    args, gpus = parser.parse_args(), torch.cuda.device_count()
    name = torch.cuda.get_device_name() if gpus else "no GPU"
    print(f"{gpus} x {name}; python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    if not gpus and args.device == "cuda":
        raise SystemExit("FAIL: torch sees no GPU; nvidia-smi and the driver's version say why")
    end, failed = time.time() + args.seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        for section, processes in [(function.__name__, n) for function, n in PLAN if function.__name__ in args.only]:
            began = time.time()
            no_gpu = processes > gpus if args.device == "cuda" else section in ("waits", "recipes", "compiled")
            if no_gpu:
                lines = [verdict(section, "it needs a GPU for each process", None)]
            else:
                lines = start(section, processes, args.device, folder, max(1, end - began))
            print("\n".join([*lines, f"     {section}: {time.time() - began:.0f} s"]), flush=True)
            failed += sum(line.startswith("FAIL") for line in lines)
    print("VERDICT: " + (f"{failed} checks failed or did not end" if failed else "all that ran is right"))
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    make_checks(*sys.argv[2:]) if sys.argv[1:2] == ["section"] else main()
