"""The measurements on a GPU. `results.py gpu` makes those that tests/results/gpu does not have, within a time limit.

1. gpu_check.py. Meanwhile, the scripts of the next item start and compile.
2. speed: the time per step of the five scripts, with and without --compile, of the network alone, with color, and of
   the whole loop. When all scripts have done their first step, they are timed one after another.
3. ARMS: trainings on CIFAR-10, with the images in memory, a few at a time. After each, its encoder is evaluated by kNN
   and a linear probe, while the next one trains.

Each script of `speed` and each training has a JSON file. If the time limit stops a training, the file has its complete
epochs. The next call on the same machine resumes the training from its folder in runs/gpu. On another machine, the
training starts again. --arms selects from the list: gpu_check, speed, or arms with a seed, such as moco-s0.
"""

import contextlib
import fcntl
import io
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from unittest import mock

import numpy as np
import torch
from bench import ROOT, parse, records, training_batches  # which puts the project's root on the path
from PIL import Image
from torch.utils._pytree import tree_map_only

import common
import eval_knn
import eval_linear

RUNS, KEPT = ROOT / "runs" / "gpu", ROOT / "tests" / "results" / "gpu"
VIT = "patchmix.py --arch vit_tiny --patch-size 4"
FROM_008 = "--crop-scale 0.08 1"  # as in MoCo's demo
SMALL_VIEWS = "--arch resnet_mini --clim-start 1 --image-size 28 20"  # `results.py begin` trains it for 48 steps
ARMS = {  # name: (title in the tables, script with flags)
    "moco-demo": ("MoCo's demo", "moco_jointcrop.py --moco v1 --joint none"),
    "moco": ("MoCo v2", "moco_jointcrop.py --joint none"),
    "jointcrop": ("J-Crop(0)", "moco_jointcrop.py"),
    "moco-008": ("MoCo v2, crops from 0.08", f"moco_jointcrop.py --joint none {FROM_008}"),
    "jointcrop-008": ("J-Crop(0), crops from 0.08", f"moco_jointcrop.py {FROM_008}"),
    "jcl": ("JCL", "jcl.py"),
    "jcl-008": ("JCL, crops from 0.08", f"jcl.py {FROM_008}"),
    "clim": ("CLIM", "clim.py"),
    "logo": ("LoGo on MoCo", "logo.py"),
    "moco-symmetric": ("MoCo, both views as queries", "logo.py --local-crops 0"),
    "logo-simsiam": ("LoGo on SimSiam", "logo.py --base simsiam"),
    "simsiam": ("SimSiam", "logo.py --base simsiam --local-crops 0"),
    "patchmix": ("PatchMix", VIT),
    "patchmix-released": ("PatchMix, released, M = 3", f"{VIT} --num-mix 3 --variant released"),
    "mocov3": ("MoCo v3", f"{VIT} --num-mix 1 --terms oto,mto"),
    "moco-jitter": ("moco-008, the jitter's order per image", f"moco_jointcrop.py --joint none {FROM_008}"),
    "clim-imagenet": ("CLIM, recipe of ImageNet", f"clim.py --dataset imagenet {SMALL_VIEWS}"),
}
SPEEDS = dict(moco="moco_jointcrop.py", jcl="jcl.py", clim="clim.py --clim-start 0", logo="logo.py", patchmix=VIT)
SPEEDS |= {f"{name}-compiled": f"{line} --compile" for name, line in SPEEDS.items()}
CHOICES = ["gpu_check", "speed"] + [f"{arm}-s{seed}" for seed in (0, 1) for arm in ARMS]
SPEED_SECONDS = 300  # time limit of `speed`, so that compilation leaves time for the trainings
CHECKS = "numbers evaluations waits group compiled".split()  # without `recipes`, which needs much memory
ON_CPU = ["--device", "cpu"]  # for --dry-run


class InMemory(list):
    """A dataset in memory, with items (PIL image, label). images: (n, H, W, 3) uint8."""

    def __init__(self, images, targets, classes):
        self.targets, self.classes = [int(target) for target in targets], list(classes)
        super().__init__(zip(map(Image.fromarray, images), self.targets, strict=True))


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def unpack(archives):
    """Decode the images train/CLASS/NAME and test/CLASS/NAME of tar archives, and save them in runs/gpu/images.npz.

    As lossless WebP files, the images of CIFAR-10 fit into two archives of 54 MB.
    """
    files = {}
    for archive in archives:
        with tarfile.open(archive) as tar:
            files |= {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
    names = sorted(files)
    with multiprocessing.Pool() as pool:
        images = np.stack(pool.map(pixels, [files[name] for name in names], chunksize=256))
    np.savez(RUNS / "images.npz", images=images, parts=[name.split("/")[-3:-1] for name in names])


def load(dry):
    """Load the training and the test images that `unpack` has saved. dry: only every 200th."""
    saved = np.load(RUNS / "images.npz")
    images, (split, label) = saved["images"], saved["parts"].T
    classes, step = np.unique(label), 200 if dry else 1
    rows = (np.flatnonzero(split == part)[::step] for part in ("train", "test"))
    return [InMemory(images[r], np.searchsorted(classes, label[r]), classes) for r in rows]


def opened(line, out, dry, *more):
    """Return the module and the arguments of a command line. dry: with a small encoder, on the CPU."""
    small = ["--arch", "vit_micro" if "patchmix" in line else "resnet_mini", *ON_CPU, "--batch-size", "32"]
    return parse(line.replace(".py", ".py --dataset cifar10"), "--out", out, *more, *small * dry)


def card():
    """Return the device and the versions of a measurement."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return dict(device=name, torch=torch.__version__, cuda=torch.version.cuda, commit=os.environ.get("COMMIT"))


def columns(epochs):
    """Return the records of epochs as {name: [value per epoch]}, or {name: {epoch: value}} if some epochs lack it."""
    found = {}
    for name in dict.fromkeys(itertools.chain(*epochs)):
        values = {str(epoch["epoch"]): epoch[name] for epoch in epochs if name in epoch}
        found[name] = [*values.values()] if len(values) == len(epochs) else values
    return found


def write(file, record):
    """Write a JSON object with one entry per line. Numbers are rounded to five digits."""
    record = json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.5g}"))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
    common.write_file(file, lambda f: f.write(f"{{\n{lines}\n}}\n".encode()))


# ------------------------------------------------- each in its own process


def speed(name, out, dry):
    """Time a step of a script: the network alone, on augmented views; with color; and the whole loop with loading."""
    line, (workers, warm, timed) = SPEEDS[name], (0, 1, 2) if dry else (8, 5, 20)
    module, args = opened(line, RUNS / f"speed/{os.getpid()}", dry, "--knn-every", 0, "--workers", workers)
    views, ms, color, began = {}, {}, module.augment, time.perf_counter()
    found, lock = dict(command=line, batch=args.batch_size), open(RUNS / "lock", "w")
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def augment(x, *more):
        if "network" in ms:
            return color(x, *more)
        if x.data_ptr() not in views:
            views[x.data_ptr()] = color(x, *more)
        return views[x.data_ptr()]

    def batches(loaded):
        first = tree_map_only(torch.Tensor, lambda x: x if dry or x.dim() < 4 else x.cuda(), next(loaded))
        yield first
        synchronize()
        found["first_step_s"] = round(time.perf_counter() - began, 1)
        (RUNS / "speed" / f"{name}.ready").touch()
        while not (RUNS / "speed" / "go").exists():
            time.sleep(0.1)
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the process ends, so that one script is timed at a time
        for mode in ("network", "color", "loop"):
            for step in range(warm + timed):
                if step == warm:
                    synchronize()
                    start = time.perf_counter()
                yield next(loaded) if mode == "loop" else first
            synchronize()
            ms[mode] = round(1000 * (time.perf_counter() - start) / timed, 2)
        keep()
        with torch.profiler.profile() as profiler:  # the kernels of a step, with color
            for _ in range(5):
                yield first
            synchronize()
        events = [event for event in profiler.events() if not event.is_user_annotation]
        kernels = [event for event in events if event.device_type.name == "CUDA"]
        ms["kernels"] = round(sum(event.self_device_time_total for event in kernels) / 5000, 2)
        keep(kernels_per_step=len(kernels) // 5)
        raise KeyboardInterrupt

    def keep(**more):
        memory = round(torch.cuda.max_memory_allocated() / 1e9, 1)  # 0 without a GPU
        write(f"{out}/speed-{name}.json", found | dict(ms=ms, GB=memory) | more | card())

    ended, patched = contextlib.suppress(KeyboardInterrupt), mock.patch.object(module, "augment", augment)
    with ended, patched, training_batches(batches):
        module.main(args, load(dry)[0])


def record(name, flags):
    """Return the record of an arm's training up to its last complete epoch. flags: added to those of ARMS."""
    arm, seed = name.rsplit("-s", 1)
    images = int(json.loads((RUNS / name / "config.json").read_text())["images"].split()[0])
    epochs = records(RUNS / name)
    speeds = [epoch["images_per_s"] for epoch in epochs]
    found = dict(title=ARMS[arm][0], command=f"{ARMS[arm][1]} {flags} --seed {seed}")
    found |= dict(seconds=round(sum(images / np.array(speeds))), images_per_s=round(float(np.median(speeds))))
    return found | dict(epochs=columns(epochs)) | card()


def jitter_per_image(x, *values, p, jitter=common.color_jitter):
    """common.color_jitter with a random order of the four changes per image, as in torchvision."""
    orders = list(itertools.permutations(range(4)))
    drawn, y = torch.randint(len(orders), (len(x),)), x.clone()
    for i, order in enumerate(orders):
        rows = (drawn == i).nonzero().flatten().to(x.device)
        with mock.patch.object(torch, "randperm", lambda n, order=order: torch.tensor(order)):
            y[rows] = jitter(x[rows], *values, p=p)
    return y


def train(name, out, dry, flags, workers):
    """Train an arm."""
    arm, seed = name.rsplit("-s", 1)
    if arm == "moco-jitter":
        common.color_jitter = jitter_per_image
    module, args = opened(ARMS[arm][1], RUNS / name, dry, *flags.split(), "--seed", seed, "--workers", workers)
    module.main(args, *load(dry))


def evaluate(name, out, dry, flags, workers):
    """Evaluate a trained arm, and write its JSON file."""
    images, words = load(dry), [str(RUNS / name), "--no-baselines", "--workers", workers, *ON_CPU * dry]
    found = record(name, flags) | dict(kNN={})
    for temperature in ("0.07", "0.1") if name.startswith("moco-demo") else ("0.07",):  # the demo has 0.1
        args = eval_knn.parse_args([*words, "--k", "20", "200", "--temperature", temperature])
        found["kNN"][temperature] = eval_knn.main(args, *images)["encoder"]
    if name.startswith("moco-demo"):  # its notebook may classify by the embeddings, not the features
        state, (encoder, info) = common.load_checkpoint(RUNS / name / "last.pt")["model"], common.open_encoder(args)
        head = torch.nn.Linear(*state["projector.0.weight"].shape[::-1])
        head.load_state_dict(dict(weight=state["projector.0.weight"], bias=state["projector.0.bias"]))
        device, *_ = common.init_distributed(args.device)
        options = dict(workers=args.workers, amp=common.use_bf16(args.amp, device), temperature=0.1)
        model = torch.nn.Sequential(encoder, head).to(device)
        found["kNN"]["0.1, embeddings"] = common.knn_accuracy(model, info, *images, device, **options)
    write(f"{out}/{name}.json", found)  # the time limit may stop the linear probe
    found["linear"] = eval_linear.main(eval_linear.parse_args(words), *images)["encoder"]
    write(f"{out}/{name}.json", found)


# --------------------------------------------------------------- the whole list


def finished(folder):
    """Return the names of the measurements in a folder, without trainings that the time limit has stopped."""
    found = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    return {name for name, measured in found.items() if "kNN" in measured or "ms" in measured}


def run(args):
    """Make the measurements that tests/results/gpu and args.out do not have, within args.minutes."""
    end, out, dry = time.time() + 60 * args.minutes, args.out.resolve(), ["--dry-run"] * args.dry_run
    for folder in (RUNS, out):
        folder.mkdir(parents=True, exist_ok=True)
    if not (RUNS / "images.npz").exists():
        unpack(args.archive)
    done = finished(out) | finished(KEPT)
    wanted = [name for name in args.arms or CHOICES if name not in done]
    began = time.time()

    def work(name, *words, until=end):
        """Run Python with these words, at most until a time, and return the exit status."""
        limit = ["timeout", "--foreground", str(max(1, until - time.time()))]  # in the foreground, Ctrl-C stops it, too
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COMMIT": args.commit}
        how = dict(env=environment, cwd=ROOT, stderr=subprocess.STDOUT)
        with open(RUNS / f"{name}.log", "a") as log:
            status = subprocess.run([*limit, sys.executable, *words], stdout=log, **how).returncode
        print(f"{time.time() - began:.0f} s: {name}, exit status {status}", flush=True)
        return status

    def time_a_step(name):
        until = end if args.dry_run else min(end, began + SPEED_SECONDS)
        work(name, __file__, "speed", name, str(out), *dry, until=until)

    def train_and_evaluate(name):
        words = [name, str(out), *dry, args.flags, str(args.workers)]
        if time.time() < end and work(name, __file__, "train", *words) == 0:
            started.append(beside.submit(work, f"{name} evaluated", __file__, "evaluate", *words))

    arms, started = [name for name in wanted if name.rsplit("-s", 1)[0] in ARMS], []
    with ThreadPoolExecutor(32) as beside:
        if "gpu_check" in wanted:
            sections = ["group", "--device", "cpu"] if args.dry_run else CHECKS
            words = [f"{ROOT}/tests/tools/gpu_check.py", "--seconds", str(max(1, end - time.time())), "--only"]
            started.append(beside.submit(work, "gpu_check", *words, *sections))
        if "speed" in wanted:
            shutil.rmtree(RUNS / "speed", ignore_errors=True)
            (RUNS / "speed").mkdir()
            timed = {name: beside.submit(time_a_step, name) for name in SPEEDS if f"speed-{name}" not in done}
            while not all(job.done() or (RUNS / "speed" / f"{name}.ready").exists() for name, job in timed.items()):
                time.sleep(0.1)
            wait(started)
            (RUNS / "speed" / "go").touch()
            wait(timed.values())
        with ThreadPoolExecutor(args.at_once) as at_once:
            list(at_once.map(train_and_evaluate, arms))
    for job in started:
        job.result()  # raises the job's exception, if any
    for name in arms:
        if name not in finished(out) and (RUNS / name / "metrics.jsonl").exists():
            write(out / f"{name}.json", record(name, args.flags))
    for log in RUNS.glob("*.log"):
        (out / log.name).write_bytes(log.read_bytes())


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    torch.backends.cudnn.benchmark = True
    action, *words = [word for word in sys.argv[1:] if word != "--dry-run"]
    dict(speed=speed, train=train, evaluate=evaluate)[action](*words[:2], "--dry-run" in sys.argv, *words[2:])
