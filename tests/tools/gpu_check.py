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
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tools")]
from bench import watched  # noqa: E402

import common  # noqa: E402

# fmt: off
FEW = {4096: 96, 1024: 32}  # images of patterns: 3 steps per epoch
FLAGS = "--epochs 2 --batch-size 32 --knn-every 1".split()
CASES = {
    "MoCo v2": "moco_jointcrop --queue 64", "MoCo v3": "moco_jointcrop --moco v3", "JCL": "jcl --queue 64",
    "CLIM": "clim --queue 64 --clim-start 1 --num-clusters 4", "LoGo": "logo --queue 64",
    "LoGo on SimSiam": "logo --base simsiam", "PatchMix": "patchmix --mix-slices 2",
}
WHOLE_BATCH = ("MoCo v3", "LoGo on SimSiam", "PatchMix")  # batch norm over processes is torch's, for GPUs only
EVALUATIONS = (
    "eval_knn", "eval_linear --no-baselines", "eval_linear --protocol moco --epochs 2 --batch-size 32",
    "eval_linear --finetune --epochs 2 --batch-size 32 --drop-path 0 --erase 0",  # these two draw on the device
)
RECIPES = {  # ImageNet's, as one of eight GPUs has them: images, and GB by tests/README.md
    "moco_jointcrop --bn-groups 1": (32, 1.9), "jcl --bn-groups 1": (64, 5.9), "logo --bn-groups 1": (32, 4.1),
    "clim --bn-groups 2 --clim-start 0 --num-clusters 16": (64, 4.8), "logo --base simsiam": (32, 3.8),
    "patchmix --mix-slices 1": (128, 9.6), "moco_jointcrop --moco v3": (512, 45),
}
# fmt: on


def read_records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def run(case, out, *flags, **own):
    """The records of a run in this process. own: its images."""
    script, *more = case.split()
    module = importlib.import_module(script)
    module.main(module.parse_args([*FLAGS, *more, "--out", str(out), *flags]), **own)
    return read_records(out)


def differ(one, other, rounding, names=("loss", "grad_norm", "std")):
    """What of two epochs' records differs by more than rounding, in words."""
    pairs = [(name, one[name], other[name]) for name in names]
    return [f"{name} {x:.5g}, not {y:.5g}" for name, x, y in pairs if not abs(x - y) <= rounding * abs(y) + 1e-3]


# --------------------- the sections: each yields (what, what is wrong, a list); None: the device is too small for it


def loader(device, folder):
    """Workers that are forked after CUDA has begun; pinned batches; how fast they come."""
    import jcl

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
    from jcl import gather

    device, rank, world = common.join_processes(device)
    even, uneven = torch.full((2,), rank, device=device), torch.full((rank, 3), rank, device=device)  # 0, 1, ... rows
    each, of_first = torch.arange(world), torch.tensor([rank])
    dist.broadcast(of_first, 0)
    right = dict(gather=gather(even).cpu().equal(each.repeat_interleave(2)), broadcast=of_first.item() == 0)
    right["gather_uneven"] = common.gather_uneven(uneven)[:, 0].cpu().equal(each.repeat_interleave(each))
    dist.all_reduce(even)
    right |= dict(all_reduce=even.tolist() == [sum(range(world))] * 2, from_all=common.from_all(rank) == each.tolist())
    yield f"of {world} process(es)", [name for name in right if not right[name]]


def numbers(device, folder):
    """In float32 the GPU computes what the CPU does; in bf16 about; a run that was ended goes on, there or here."""
    there, here = ["--device", device, "--workers", "2"], "--device cpu --workers 0 --amp off".split()
    for name, case in CASES.items():
        cpu = run(case, folder / f"{name} cpu", *here)
        exact = run(case, folder / f"{name} exact", *there, "--amp", "off")
        yield f"{name}, as on the CPU", differ(exact[0], cpu[0], 1e-2) + differ(exact[1], cpu[1], 5e-2)
        yield f"{name}, bf16", differ(run(case, folder / f"{name} auto", *there)[0], cpu[0], 0.1, ("loss", "std"))
        color, steps, ended = common.color_views, itertools.count(1), folder / f"{name} ended"

        def struck(*args, color=color, steps=steps):
            if next(steps) == 5:  # the second step of the second epoch
                raise KeyboardInterrupt
            return color(*args)

        with mock.patch.object(common, "color_views", struck), contextlib.suppress(KeyboardInterrupt):
            run(case, ended, *there, "--amp", "off")
        copied = shutil.copytree(ended, folder / f"{name} copied")
        again = run(case, ended, *there, "--amp", "off")
        yield f"{name}, ended and gone on", differ(again[0], exact[0], 1e-2) + differ(again[1], exact[1], 2e-2)
        yield f"{name}, gone on with a CPU", differ(run(case, copied, *here)[1], cpu[1], 5e-2)


def evaluations(device, folder):
    """The scores are the CPU's, but for one or two of 32 images, which rounding may turn."""
    run(CASES["PatchMix"], folder / "evaluated", "--device", "cpu")
    for case in EVALUATIONS:
        script, *flags = case.split()
        module, found = importlib.import_module(script), {}
        for where in ("cpu", device):
            out = ["--out", str(folder / f"{case} {where}")] * ("epochs" in case)
            args = module.parse_args([str(folder / "evaluated"), "--amp", "off", "--device", where, *flags, *out])
            found[where] = module.main(args)["encoder"]
        pairs = [(name, value, found["cpu"][name]) for name, value in found[device].items()]
        yield case, [f"{name} {x:.1f}, not {y:.1f}" for name, x, y in pairs if abs(x - y) > 7]


def waits(device, folder):
    """No line of a step waits for the GPU, by CUDA's own account; but the first step loads constants."""
    for name, case in CASES.items():
        modes = itertools.chain(["default"], itertools.repeat("warn"))

        def begin(_, modes=modes):
            torch.cuda.set_sync_debug_mode(next(modes))

        patch = watched(DataLoader.__iter__, begin, lambda _: torch.cuda.set_sync_debug_mode("default"))
        with mock.patch.object(DataLoader, "__iter__", patch), warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            run(case, folder / f"{name} waits", "--device", device, "--knn-every", "0")
        lines = [f"{Path(w.filename).name}:{w.lineno}" for w in noted if "called a synchronizing" in str(w.message)]
        yield name, [f"{line} x {count}" for line, count in collections.Counter(lines).items()]


def group(device, folder):
    """In torchrun's group, by NCCL: DDP, ShuffleBN, SyncBatchNorm. Two processes compute what one computes."""
    device, rank, world = common.join_processes(device)
    for name, case in CASES.items():
        records, wrong = run(case, folder / f"{name} {world}", "--amp", "off", "--device", device.type), []
        if world > 1 and not (device.type == "cpu" and name in WHOLE_BATCH):
            wrong = differ(records[0], read_records(folder / f"{name} 1")[0], 1e-2)
        yield f"{name}, {world} process(es)", wrong


def recipes(device, folder):
    """Peak memory and speed of the ImageNet recipes, by four steps without the loading."""
    for case, (batch, expected) in RECIPES.items():
        if torch.cuda.get_device_properties(0).total_memory < 1.3e9 * expected:
            yield case, None
            continue
        images, times = np.random.default_rng(0).integers(0, 256, (4 * batch, 256, 256, 3), np.uint8), []

        def note(_, times=times):
            torch.cuda.synchronize()
            times.append(time.perf_counter())

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        flags = f"--dataset imagenet --batch-size {batch} --epochs 1 --knn-every 0 --workers 8".split()
        with mock.patch.object(DataLoader, "__iter__", watched(DataLoader.__iter__, note, note)):
            run(case, folder / case, *flags, train=common.ImageSet(images))
        peak, step = torch.cuda.max_memory_allocated() / 1e9, np.median(np.diff(times)[::2])
        said = f"{case}: {peak:.1f} GB (tests/README.md: {expected}), {batch / step:.0f} images/s"
        yield said, ["more memory than there"] * (peak > 1.3 * expected)


def compiled(device, folder):
    """--compile changes no number by more than rounding."""
    for name in ("JCL", "PatchMix"):
        flags = ["--device", device, "--amp", "off"]
        plain, other = (run(CASES[name], folder / f"{name}{more}", *flags, *more) for more in ([], ["--compile"]))
        yield name, differ(other[0], plain[0], 2e-2)


# ----------------------------------------------------------------------- all of it

PLAN = [(loader, 0), (collectives, 1), (numbers, 0), (evaluations, 0), (waits, 0), (group, 1), (collectives, 2)]
PLAN += [(group, 2), (recipes, 0), (compiled, 0)]  # section, torchrun's processes
SECTIONS = {section.__name__: section for section, _ in PLAN}


def make_checks(section, device, folder):
    """Make the checks of a section, in this process."""
    make = common.make_patterns
    common.make_patterns = lambda count, *more, **named: make(FEW.get(count, count), *more, **named)
    torch.backends.cudnn.allow_tf32 = section == "recipes"  # elsewhere numbers are compared with the CPU's
    for check in SECTIONS[section](device, Path(folder)):
        if os.environ.get("RANK", "0") == "0":
            print("CHECK", json.dumps(check), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def start(section, processes, device, folder, seconds):
    """Start `make_checks` in a process of its own. Return its checks, and one that failed if it did not end well."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    words, pipes = [__file__, "section", section, device, folder], dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    environment = dict(OMP_NUM_THREADS="1") | os.environ
    process = subprocess.Popen([sys.executable, *launcher, *words], env=environment, text=True, **pipes)
    try:
        out, error = process.communicate(timeout=seconds)
        late = [f"exit status {process.returncode}: {error[-1500:]}"] * (process.returncode != 0)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes
        out, late = process.communicate()[0], ["not finished in time"]
    return [json.loads(line[6:]) for line in out.splitlines() if line.startswith("CHECK ")] + [("", late)] * bool(late)


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
            if args.device == "cpu" and section in ("waits", "recipes", "compiled"):
                checks = [("it needs a GPU", None)]
            elif args.device == "cuda" and processes > gpus:
                checks = [(f"{processes} processes need as many GPUs", None)]
            else:
                checks = start(section, processes, args.device, folder, max(1, end - began))
            for what, wrong in checks:
                verdict = "SKIP" if wrong is None else "FAIL" if wrong else "PASS"
                print(f"{verdict} {section}: {what}  {'; '.join(wrong or [])}".rstrip(), flush=True)
                failed += verdict == "FAIL"
            print(f"     {section}: {time.time() - began:.0f} s", flush=True)
    print("VERDICT: " + (f"{failed} checks failed or did not end" if failed else "all that ran is right"))
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    make_checks(*sys.argv[2:]) if sys.argv[1:2] == ["section"] else main()
