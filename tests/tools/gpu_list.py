"""What a GPU that is lent for some minutes measures, in this order: `results.py gpu` does what is not kept yet.

1. speed: a step of the five scripts, of the network alone, with color, and of the whole loop, with and without
   --compile. All start at once, and are timed one after another.
2. gpu_check.py, beside the first trainings.
3. ARMS, some at once: trainings on CIFAR-10 in memory, each with its kNN and its linear probe; then with another seed.

Each leaves one JSON file. A training that the time has cut is kept as far as it came, and goes on in the next call on
the same machine, where its folder in runs/gpu still is. On another machine it begins anew.
"""

import contextlib
import fcntl
import importlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from bench import ROOT, training_batches  # which puts the project's root on the path
from PIL import Image

import common
import eval_knn
import eval_linear

RUNS = ROOT / "runs" / "gpu"
VIT = "patchmix.py --arch vit_tiny --patch-size 4"
ARMS = {  # name: (how tables call it, its script with flags, the published kNN)
    "moco-demo": ("MoCo's demo", "moco_jointcrop.py --moco v1 --joint none", "82.6"),  # k 200, temperature 0.1
    "moco": ("MoCo v2", "moco_jointcrop.py --joint none", ""),
    "jointcrop": ("J-Crop(0)", "moco_jointcrop.py", ""),
    "jcl": ("JCL", "jcl.py", ""),
    "clim": ("CLIM", "clim.py", ""),
    "logo": ("LoGo on MoCo", "logo.py", ""),
    "moco-symmetric": ("MoCo, both views as queries", "logo.py --local-crops 0", ""),
    "patchmix": ("PatchMix, M = 3", f"{VIT} --num-mix 3", ""),
    "patchmix-released": ("PatchMix, M = 3, released", f"{VIT} --num-mix 3 --variant released", ""),
    "mocov3": ("MoCo v3", f"{VIT} --num-mix 1 --terms oto,mto", ""),
}
SPEEDS = ("moco_jointcrop.py", "jcl.py", "clim.py --clim-start 0", "logo.py", VIT)
DRY = "--device cpu --batch-size 32"  # of --dry-run


class InMemory(torch.utils.data.Dataset):
    """Images in memory: items (PIL image, label). images: (n, H, W, 3) uint8."""

    def __init__(self, images, targets, classes):
        self.images, self.targets, self.classes = images, [int(target) for target in targets], list(classes)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return Image.fromarray(self.images[index]), self.targets[index]


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def unpack(archive):
    """Decode the files train/CLASS/NAME.jpg and test/CLASS/NAME.jpg of an archive, once, into runs/gpu/images.npz."""
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar if member.name.endswith(".jpg")}
    names = sorted(files)
    with multiprocessing.Pool() as pool:
        images = np.stack(pool.map(pixels, [files[name] for name in names], chunksize=256))
    np.savez(RUNS / "images.npz", images=images, parts=[name.split("/")[-3:-1] for name in names])


def load(dry):
    """The training and the test images that `unpack` has left; dry: few of them."""
    saved = np.load(RUNS / "images.npz")
    images, (split, label) = saved["images"], saved["parts"].T
    classes, step = np.unique(label), 200 if dry else 1
    rows = (np.flatnonzero(split == part)[::step] for part in ("train", "test"))
    return [InMemory(images[r], np.searchsorted(classes, label[r]), classes) for r in rows]


def parse(line, out, dry, *more):
    """The module and the arguments of a command line; dry: with a small encoder, on the CPU."""
    script, *words = line.split()
    arch = ["--arch", "vit_micro" if script == "patchmix.py" else "resnet_mini"]
    words += ["--dataset", "cifar10", "--out", str(out), *more, *(arch + DRY.split() if dry else [])]
    module = importlib.import_module(script.removesuffix(".py"))
    return module, module.parse_args(words)


def card():
    """What a measurement was made with."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "not a git checkout"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return dict(device=name, torch=torch.__version__, cuda=torch.version.cuda, commit=commit)


def write(file, record):
    common.write_file(file, lambda f: f.write((json.dumps(record, indent=1) + "\n").encode()))


# ------------------------------------------------- each in a process of its own


def speed(name, out, dry):
    """Time a step of a script: the network alone on views that are on the device, with color, and the whole loop."""
    line = name.replace("+", " ")
    module, args = parse(line.removesuffix(" --compile"), RUNS / "speed" / f"{os.getpid()}", dry, "--knn-every", "0")
    args.compile, args.epochs = line.endswith(" --compile"), 10
    warm, timed = (1, 2) if dry else (10, 30)
    views, found, color, began = {}, {}, module.augment, time.perf_counter()
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def augment(x, *more):
        if "network" in found:
            return color(x, *more)
        if x.data_ptr() not in views:
            views[x.data_ptr()] = color(x, *more)
        return views[x.data_ptr()]

    def batches(loaded):
        device = "cpu" if dry else "cuda"
        first = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), next(loaded))
        yield first
        wait()
        found["first_step_s"] = round(time.perf_counter() - began, 1)
        fcntl.flock(open(RUNS / "lock", "w"), fcntl.LOCK_EX)  # until the process ends
        for mode in ("network", "color", "loop"):
            for step in range(warm + timed):
                if step == warm:
                    wait()
                    start = time.perf_counter()
                yield next(loaded) if mode == "loop" else first
            wait()
            found[mode] = round(1000 * (time.perf_counter() - start) / timed, 2)
        raise KeyboardInterrupt

    with (
        training_batches(batches),
        mock.patch.object(module, "augment", augment),
        contextlib.suppress(KeyboardInterrupt),
    ):
        module.main(args, load(dry)[0])
    memory = torch.cuda.max_memory_allocated() / 1e9 if not dry else 0
    write(f"{out}/speed-{name}.json", dict(command=line, batch=args.batch_size, GB=round(memory, 1), ms=found) | card())


def record(name, line, folder):
    """What is kept of a training, as far as it has come."""
    epochs = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((folder / "config.json").read_text())
    known = ("epoch", "loss", "std", "rank", "grad_norm", "images_per_s", "knn20_top1", "knn200_top1")
    speeds = [r["images_per_s"] for r in epochs]
    found = dict(command=line, of_epochs=config["epochs"], images_per_s=round(float(np.median(speeds))))
    found |= dict(
        seconds=round(sum(50000 / x for x in speeds)), epochs=[{k: r[k] for k in known if k in r} for r in epochs]
    )
    return found | card()


def train(name, out, dry, epochs, workers):
    """Train an arm, evaluate it, and write its JSON."""
    arm, seed = name.rsplit("-s", 1)
    line, folder = f"{ARMS[arm][1]} --epochs {epochs} --seed {seed}", RUNS / name
    images = load(dry)
    module, args = parse(line, folder, dry, "--knn-every", "50", "--workers", workers)
    module.main(args, *images)
    found, words = record(name, line, folder), [str(folder), "--no-baselines", *DRY.split()[:2] * dry]
    for temperature in ("0.07", "0.1") if arm == "moco-demo" else ("0.07",):
        options = ["--k", "20", "200", "--temperature", temperature]
        found[f"knn, T {temperature}"] = eval_knn.main(eval_knn.parse_args(words + options), *images)["encoder"]
    found["linear"] = eval_linear.main(eval_linear.parse_args(words), *images)["encoder"]
    write(f"{out}/{name}.json", found)


# --------------------------------------------------------------- the whole list


def finished(folder):
    """The names of what a folder has, without trainings that the time has cut: {name: what is kept}."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))}
    return {name: kept for name, kept in found.items() if "linear" in kept or "ms" in kept}


def run(args):
    """Do what is not kept yet in args.kept or args.out, until args.minutes are over."""
    end, out = time.time() + 60 * args.minutes, Path(args.out or args.kept).resolve()
    for folder in (RUNS, out):
        folder.mkdir(parents=True, exist_ok=True)
    if not (RUNS / "images.npz").exists():
        unpack(args.archive)
    done = {name for where in (out, Path(args.kept)) for name in finished(where)}
    dry, running = ["--dry-run"] * args.dry_run, {}

    def start(name, *words):
        log = open(RUNS / f"{name}.log", "a")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        running[name] = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=environment, cwd=ROOT)

    def collect(until, at_most=0):
        """Wait until at most so many processes run. Those that still run at a time are ended."""
        while len(running) > at_most:
            for name, process in list(running.items()):
                if time.time() > until:
                    process.terminate()
                    process.wait()
                if process.poll() is not None:
                    print(f"{name}: exit status {running.pop(name).returncode}", flush=True)
            time.sleep(0.5)

    for line in [text + more for more in ("", " --compile") for text in SPEEDS]:
        if f"speed-{(name := line.replace(' ', '+'))}" not in done:
            start(f"speed-{name}", __file__, "speed", name, str(out), *dry)
    collect(end)
    check = [str(ROOT / "tests/tools/gpu_check.py"), "--seconds", str(max(1, end - time.time()))]
    if not (out / "gpu_check.log").exists():
        start("gpu_check", *check, *("--device cpu --only collectives".split() if args.dry_run else []))
    arms = [name for seed in (0, 1) for name in (f"{arm}-s{seed}" for arm in ARMS) if name not in done]
    for name in arms:
        collect(end, args.at_once - 1)
        if time.time() < end:
            start(name, __file__, "train", name, str(out), args.epochs, str(os.cpu_count() // args.at_once), *dry)
    collect(end)
    for name in arms:
        if name not in finished(out) and (RUNS / name / "metrics.jsonl").exists():
            arm, seed = name.rsplit("-s", 1)
            write(
                out / f"{name}.json", record(name, f"{ARMS[arm][1]} --epochs {args.epochs} --seed {seed}", RUNS / name)
            )
    for log in RUNS.glob("*.log"):
        (out / log.name).write_bytes(log.read_bytes())


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    torch.backends.cudnn.benchmark = True
    action, *words = [word for word in sys.argv[1:] if word != "--dry-run"]
    dict(speed=speed, train=train)[action](*words[:2], "--dry-run" in sys.argv, *words[2:])
