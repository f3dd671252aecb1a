"""Measures time and memory, by hand. Each section prints a table, its command and the machine.

    python tests/tools/bench.py steps        a training step, over the bare forward and backward of its networks; with
                                             --against CHECKOUT over the same step of another checkout,
                                             with --over-flags over the step with other flags
    python tests/tools/bench.py loader       a view from the loader, over torchvision's transforms image by image
    python tests/tools/bench.py positives    CLIM's neighbours and k-means
    python tests/tools/bench.py knn          the kNN vote over a plain one; features over bare inference
    python tests/tools/bench.py processes    whole runs: two processes of one thread over one process of two
    python tests/tools/bench.py needs        what training on ImageNet needs of eight GPUs, computed on a CPU

What is compared runs in turn: A, B, B, A. It has one thread unless said otherwise. The tables have medians of
time.perf_counter. Ratios mean more than times, because other programs may use the machine, too.
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import os
import random
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchvision.transforms as T
from PIL import Image, ImageFilter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[2]
METHODS = ("moco_jointcrop", "jcl", "clim", "logo", "logo --base simsiam", "patchmix")


def in_turn(rounds, *functions):
    """What each function returns in each round, (rounds, functions, ...). The order turns round from round to round.

    So a slow spell of the machine meets all functions. One round before these is left out.
    """
    found = []
    for turn in range(rounds + 1):
        order = list(enumerate(functions))[:: (-1) ** turn]
        answers = {i: function() for i, function in order}
        found.append([answers[i] for i in range(len(functions))])
    return np.array(found[1:])


def seconds_of(function):
    def call():
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    return call


def interleaved(rounds, *functions):
    """Median seconds of each function."""
    return np.median(in_turn(rounds, *map(seconds_of, functions)), axis=0).tolist()


# ----------------------------------------------------------------------- steps


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


NETWORKS = {"query", "key", "local", "project"}  # what the models call the functions that run their networks


def serve(house, method, flags):
    """Run a method of the checkout `house`; each step waits for a word on stdin and answers with its seconds.

    "step": the next step. "bare": forward and backward of the same networks on the same inputs, and nothing else. The
    answer has the seconds by the clock and of the processor.
    """
    sys.path.insert(0, house)
    module, answer, calls, busy = importlib.import_module(method), sys.stdout, [], []
    in_parallel, models = module.in_parallel, []

    def noting(function, name):
        def call(x):
            calls.extend([(function, name, x.detach())] * (not busy))
            busy.append(1)  # one of these functions may call another
            y = function(x)
            busy.pop()
            return y

        return call

    def remember(args, model):
        models.append(model)
        for name in NETWORKS & set(dir(model)):
            setattr(model, name, noting(getattr(model, name), name))
        return in_parallel(args, model)

    def bare():
        models[0].zero_grad(set_to_none=True)
        outputs = [function(x) for function, name, x in calls if name != "key"]
        with torch.no_grad():
            for function, name, x in calls:
                if name == "key":
                    function(x)
        torch.autograd.backward(outputs, [torch.ones_like(y).cumsum(1) for y in outputs])

    def tell(began):
        print(time.perf_counter() - began[0], time.process_time() - began[1], file=answer, flush=True)

    def before(_):
        while (word := sys.stdin.readline().strip()) == "bare":
            began.append((time.perf_counter(), time.process_time()))
            bare()
            tell(began.pop())
        if not word:
            raise SystemExit
        began.append((time.perf_counter(), time.process_time()))

    def after(_):
        tell(began.pop())
        for name in NETWORKS & set(vars(models[0])):  # the first step has told what the networks are fed
            delattr(models[0], name)

    began = []
    module.in_parallel = remember
    loader = module.common.Loader
    loader.__iter__ = watched(loader.__iter__, before, after)
    with contextlib.redirect_stdout(sys.stderr):
        module.common.start(module.main, lambda: module.parse_args(flags))  # what a script sets for its process, too


class Served:
    """`serve` in a process of its own."""

    def __init__(self, house, method, flags, threads):
        command = [sys.executable, __file__, "serve", str(house), method, *flags]
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


def make_folder(folder, count, part="train", seed=0):
    """Patterns as PNG files in FOLDER/PART, one folder per class."""
    for i, (image, label) in enumerate(zip(*common.make_patterns(count, 32, seed), strict=True)):
        path = Path(folder, part, f"kind{label}", f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def steps(args):
    """One row per method and encoder: the milliseconds of a step, and its ratios to its networks alone and to the step
    of another checkout or with other flags, by the clock and by the processor's time, which others disturb less.

    A ratio is the median over the rounds of the ratio within a round.
    """
    rows = []
    for kind, method in itertools.product(args.arch, args.methods):
        script, *flags = method.split()
        micro = "vit_micro" if script == "patchmix" else "resnet_micro"
        flags += [] if kind == "recipe" else ["--arch", micro if kind == "micro" else kind]
        flags += ["--clim-start", "0", "--refresh-every", "1000"] if script == "clim" else []
        flags += f"--dataset cifar10 --device cpu --amp off --batch-size {args.batch_size}".split()
        flags += "--epochs 1000 --knn-every 0 --workers 0".split()
        with tempfile.TemporaryDirectory() as folder:
            make_folder(folder, (args.rounds + 4) * args.batch_size)  # of one epoch, so that no save comes between
            sides = [(ROOT, args.flags)]
            if args.against or args.over_flags is not None:
                sides.append((args.against or ROOT, args.flags if args.over_flags is None else args.over_flags))
            runs = []
            for number, (house, own) in enumerate(sides):
                where = ["--data-dir", folder, "--out", f"{folder}/{number}"]
                runs.append(Served(house, script, flags + shlex.split(own) + where, args.threads))
            words = [functools.partial(run, "step") for run in runs] + [functools.partial(runs[0], "bare")]
            seconds = in_turn(args.rounds, *words)  # (rounds, checkouts and bare, clock and processor)
            for run in runs:
                run.end()
        ms = 1000 * np.median(seconds, axis=0)
        ratios = np.median(seconds[:, :1] / seconds[:, 1:], axis=0)  # of the first to each of the others
        row = dict(method=method, arch=kind, batch=args.batch_size, ms=ms[0, 0], over_bare=ratios[-1, 0])
        if len(sides) > 1:
            row |= dict(there_ms=ms[1, 0], ratio=ratios[0, 0], cpu_ratio=ratios[0, 1])
        rows.append(row)
    return rows


# ---------------------------------------------------------------------- loader


def usual_transform(size, mean, std):
    """The papers' pipeline for one PIL image."""
    blur = T.Lambda(lambda image: image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2))))
    jitter = T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8)
    first = [T.RandomResizedCrop(size, (0.2, 1)), jitter, T.RandomGrayscale(0.2), T.RandomApply([blur], 0.5)]
    return T.Compose([*first, T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)])


def loader_runs(size, count, folder):
    """What `loader` measures: two views of images, decoded at 32 px, else JPEG files of 500 x 375; their colours; the
    usual way. Returns three functions.
    """
    jcl = importlib.import_module("jcl")
    options = jcl.parse_args(f"--dataset cifar10 --num-keys 1 --image-size {size} --blur-p 0.5".split())
    array = common.make_patterns(count, 32 if size == 32 else 500, 0)[0]
    paths = [f"{folder}/{i}.jpg" for i in range(count)]
    for path, image in zip(paths, array, strict=True):
        Image.fromarray(image[:375]).save(path, quality=90)
    source = dict(array=array) if size == 32 else dict(paths=np.array([os.fsencode(path) for path in paths]))
    images = common.ImageSet("", [0] * count, ["0"], **source)
    mean, std = common.NORMS[options.norm]
    views, transform = common.ViewDataset(images, jcl.augmentation(options), 0), usual_transform(size, mean, std)
    keys = [(0, i) for i in range(count)]
    batch = views.__getitems__(keys)

    def colour():
        for view in common.colour_views(batch, torch.device("cpu")):
            common.normalize(view, mean, std)

    def usual():
        for i in range(count):
            image = Image.fromarray(images[i])
            torch.stack([transform(image), transform(image)])

    return lambda: views.__getitems__(keys), colour, usual


def loader(args):
    """One row per kind of image: milliseconds per view. `loader` and `usual` decode files."""
    rows, some = [], max(2, args.batch_size // 8)
    for size, source, count in ((32, "decoded", args.batch_size), (224, "JPEG, 500 x 375", some)):
        with tempfile.TemporaryDirectory() as folder:
            runs = loader_runs(size, count, folder)
            loader, colour, usual = (1000 * t / (2 * count) for t in interleaved(args.rounds, *runs))
        row = dict(px=size, source=source, loader_ms=loader, colour_ms=colour, usual_ms=usual)
        rows.append(row | dict(ours_over_usual=(loader + colour) / usual))
    return rows


# ------------------------------------------------------------- positives and kNN


def embeddings(count):
    """Unit vectors (count, 128) about 100 directions, as an encoder's embeddings of a hundred kinds of images are."""
    draws = torch.Generator().manual_seed(0)
    kinds = torch.randn(100, 128, generator=draws)[torch.randint(100, (count,), generator=draws)]
    return F.normalize(kinds + torch.randn(count, 128, generator=draws), dim=1)


def positives(args):
    """One row per number of images: seconds of the 40 nearest neighbours, and of k-means (128 images per cluster)."""
    clim, rows = importlib.import_module("clim"), []
    for count in args.sizes:
        x, clusters = embeddings(count), max(1, count // 128)
        runs = functools.partial(clim.nearest_neighbors, x, 40), functools.partial(clim.kmeans, x, clusters)
        neighbors, kmeans = interleaved(args.rounds, *runs)
        rows.append(dict(images=count, neighbors_s=neighbors, kmeans_s=kmeans))
    return rows


def plain_knn(train_x, train_y, test_x, k, temperature, num_classes):
    """Instance Discrimination's vote, a hundred images at a time, with one-hot labels of the neighbours."""
    train_x, test_x = F.normalize(train_x, dim=1), F.normalize(test_x, dim=1)
    predicted = []
    for part in test_x.split(100):
        similarity, nearest = (part @ train_x.T).topk(k, 1)
        votes = F.one_hot(train_y[nearest], num_classes) * (similarity / temperature).exp()[..., None]
        predicted.append(votes.sum(1).sort(1, descending=True).indices[:, 0])
    return torch.cat(predicted)


def knn(args):
    """Seconds of the kNN vote and of a plain one (k = 200), then of feature extraction and of the encoder alone."""
    draws = torch.Generator().manual_seed(0)
    bank, queries = (torch.randn(n, 512, generator=draws) for n in (max(args.sizes), max(args.sizes) // 5))
    arguments = bank, torch.randint(10, (len(bank),), generator=draws), queries, min(200, len(bank)), 0.07, 10
    pair = functools.partial(common.knn_predict, *arguments), functools.partial(plain_knn, *arguments)
    found = {f"{len(bank)} x {len(queries)} x 512, k 200": interleaved(args.rounds, *pair)}
    for arch, count in dict(resnet_micro=1024, vit_micro=1024, resnet18=128, vit_tiny=128).items():
        info = common.backbone_info(arch, 32, 2 if arch == "vit_tiny" else 8)
        encoder, count = common.build_backbone(info).eval(), min(count, max(args.sizes))  # noqa: PLW2901
        array, labels = common.make_patterns(count, 32, 0)
        images = common.ImageSet("", labels, common.PATTERNS, array)
        x = common.normalize(torch.from_numpy(array).permute(0, 3, 1, 2).float().div_(255), info["mean"], info["std"])
        bare = torch.no_grad()(lambda: [encoder(part) for part in x.split(256)])  # noqa: B023
        extract = functools.partial(common.extract_features, encoder, images, info, torch.device("cpu"))
        found[f"features, {arch}, {len(images)} images"] = interleaved(args.rounds, extract, bare)
    return [dict(what=what, s=ours, plain_s=plain, ratio=ours / plain) for what, (ours, plain) in found.items()]


# ------------------------------------------------------------------- processes


def images_per_s(method, flags, world):
    """Of the second epoch of a run on `world` processes of 2 / world threads."""
    script, *more = method.split()
    torchrun = "-m torch.distributed.run --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0".split()
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *torchrun * (world - 1), ROOT / f"{script}.py", *more, *flags, "--out", f"{out}/run"]
        environment = os.environ | {"OMP_NUM_THREADS": str(2 // world)}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        return json.loads(Path(out, "run", "metrics.jsonl").read_text().splitlines()[-1])["images_per_s"]


def processes(args):
    """One row a method: images/s, loading included, of one process of two threads, of two of one each; their ratio."""
    flags = ["--epochs", "2", "--knn-every", "0", "--batch-size", str(args.batch_size), *shlex.split(args.flags)]
    rows = []
    for method in args.methods:
        runs = [[images_per_s(method, flags, world) for world in (1, 2)] for _ in range(args.rounds)]
        one, two = np.median(runs, axis=0).tolist()
        rows.append(dict(method=method, one_process=one, two_processes=two, ratio=two / one))
    return rows


# ----------------------------------------------------------------------- needs

NEEDS = (*METHODS[:1], "moco_jointcrop --moco v3", *METHODS[1:])  # the scripts' ImageNet recipes
GPUS, IMAGENET = 8, 1_281_167  # GPUs of a run; training images of ImageNet-1K
RATES = {"A100": 312e12, "H100": 989e12}  # bf16 operations per second by the data sheets, without sparsity
SHARES = {"ResNet": 0.2, "ViT": 0.4}  # of these rates that training is taken to reach
PROBES = 4, 8  # batch sizes of the two steps that are measured; what grows between them is per image
STEP_FLAGS = "--dataset imagenet --device cpu --amp bf16 --epochs 1 --max-steps 1 --knn-every 0 --workers 0"


def attention(q, k, v, *_, **__):
    return flop_counter.sdpa_flop_count(q, k, v)


def attention_backward(grad, q, k, v, *_, **__):
    return flop_counter.sdpa_backward_flop_count(grad, q, k, v)


ATTENTION = {  # the CPU's kernels, which flop_counter does not know
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


class LiveTensors(TorchDispatchMode):
    """Adds up the bytes of the tensors that are made while it is on, as long as they live; `peak` is the most."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage()) not in self.known:  # views share one
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.remove, storage.nbytes())
        return result

    def remove(self, count):
        self.now -= count


def probe(method, flags):
    """Run one training step of a method and print as JSON what it took.

    operations: those of matrix products, convolutions and attention, a multiplication and an addition being two.
    live: bytes of all tensors of the step at its peak, before the optimiser's step, which needs little of a large
    batch's memory. grown: by how many bytes the process's memory grew until then. cut_s: seconds of the processor that
    making the batch took. weights, queue, gradients, optimizer, gathered: bytes.
    """
    sys.path.insert(0, str(ROOT))
    module, found, answer = importlib.import_module(method), {}, sys.stdout
    in_parallel, gather, models = module.in_parallel, module.gather, []
    live, memory, stack = LiveTensors(), [], contextlib.ExitStack()
    operations = flop_counter.FlopCounterMode(display=False, custom_mapping=ATTENTION)

    def remember(args, model):
        models.append(model)
        return in_parallel(args, model)

    def cut(dataset, keys):
        began = time.process_time()
        batch = make_batch(dataset, keys)
        found["cut_s"] = time.process_time() - began
        return batch

    def gathered(x):
        found["gathered"] = found.get("gathered", 0) + x.numel() * x.element_size()
        return gather(x)

    def size(tensors):
        return sum(x.numel() * x.element_size() for x in tensors)

    def begin_step(optimizer, *_):
        first = next(models[0].parameters())
        if any(p is first for group in optimizer.param_groups for p in group["params"]):  # not LoGo's affinity's
            found["live"] = live.peak
            found["grown"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory[0])

    def end_step(optimizer, *_):
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        found["gradients"] = found.get("gradients", 0) + size(p.grad for p in tensors if p.grad is not None)
        state = [x for values in optimizer.state.values() for x in values.values() if torch.is_tensor(x)]
        found["optimizer"] = found.get("optimizer", 0) + size(state)

    def before(batch):
        model = models[0]
        found["queue"] = size([model.queue.keys]) if hasattr(model, "queue") else 0
        found["weights"] = size([*model.parameters(), *model.buffers()]) - found["queue"]
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        stack.enter_context(operations)
        stack.enter_context(live)

    def after(_):
        stack.close()
        found["operations"] = operations.get_total_flops()

    module.in_parallel, module.gather = remember, gathered
    make_batch, module.common.ViewDataset.__getitems__ = module.common.ViewDataset.__getitems__, cut
    register_optimizer_step_pre_hook(begin_step)
    register_optimizer_step_post_hook(end_step)
    loader = module.common.Loader
    loader.__iter__ = watched(loader.__iter__, before, after)
    with contextlib.redirect_stdout(sys.stderr):
        module.common.start(module.main, lambda: module.parse_args(flags))  # what a script sets for its process, too
    print(json.dumps(found), file=answer)


def needs_of(method):
    """What a method's ImageNet recipe needs: a dictionary with bytes, operations and seconds, per image or in all.

    A slope between two steps of different batch sizes gives what is per image.
    """
    script, *flags = method.split()
    flags += ["--clim-start", "0"] if script == "clim" else []  # with its positives
    options = importlib.import_module(script).parse_args(["--dataset", "imagenet", *flags])
    for name, few in (("mix_slices", "1"), ("bn_groups", "2")):  # so few images have no eight slices or groups
        flags += [common.option(name), few] if getattr(options, name, None) else []
    environment, found = os.environ | {"OMP_NUM_THREADS": "1"}, []
    for count in PROBES:
        with tempfile.TemporaryDirectory() as folder:
            photographs = sorted((ROOT / ".github" / "photos").glob("*.jpg"))[:count]
            for i, photograph in enumerate(photographs):
                path = Path(folder, "train", f"kind{i % 2}", f"{i}.jpg")
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.open(photograph).resize((500, 375)).save(path, quality=90)
            words = [*flags, *STEP_FLAGS.split(), "--batch-size", str(count), "--data-dir", folder]
            command = [sys.executable, __file__, "probe", script, *words, "--out", f"{folder}/run"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} ended:\n{done.stderr[-2000:]}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
    few, many = found
    per_image = {k: (many[k] - few[k]) / (PROBES[1] - PROBES[0]) for k in ("operations", "live", "grown")}
    per_image |= dict(cut_s=many["cut_s"] / PROBES[1], gathered=many.get("gathered", 0) / PROBES[1])
    return per_image | {k: many[k] for k in ("weights", "gradients", "optimizer", "queue")}


def needs(args):
    """One row per script: what 8 GPUs need for its ImageNet recipe in bf16. Computed, not measured on a GPU.

    The memory of a GPU is that of the weights with their gradients and the optimiser's state, of the queue and the
    gathered keys of the whole batch, and of what an image needs at the peak of a step times the images per GPU.
    """
    rows = []
    for method in NEEDS:
        script, *flags = method.split()
        options = importlib.import_module(script).parse_args(["--dataset", "imagenet", *flags])
        found, per_gpu = needs_of(method), options.batch_size // GPUS
        keys = found["queue"] + found["gathered"] * options.batch_size
        fixed = found["weights"] + found["gradients"] + found["optimizer"] + keys
        row = {"script": f"`{' '.join([f'{script}.py', *flags])}`", "encoder": options.arch, "epochs": options.epochs}
        row |= {"images per GPU": per_gpu, "fixed, GB": fixed / 1e9, "peak per image, MB": found["live"] / 1e6}
        row |= {"grown over peak": found["grown"] / found["live"]}
        row |= {"memory per GPU, GB": (fixed + found["live"] * per_gpu) / 1e9}
        row |= {"GFLOP per image": found["operations"] / 1e9, "loading, ms per image and core": 1000 * found["cut_s"]}
        share = SHARES["ViT" if common.is_vit(options.arch) else "ResNet"]
        for name, rate in RATES.items():
            images_per_s = GPUS * rate * share / found["operations"]
            row |= {f"hours, 8 {name}": options.epochs * IMAGENET / images_per_s / 3600}
            row |= {f"cores, 8 {name}": images_per_s * found["cut_s"]}
        rows.append({name: float(f"{v:.2g}") if isinstance(v, float) else v for name, v in row.items()})
    return rows


# ------------------------------------------------------------------------ main


def table(rows):
    """Markdown of a list of equal dictionaries."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---:|" * len(rows[0])]
    cells = [[f"{float(f'{v:.4g}'):g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


SECTIONS = dict(steps=steps, loader=loader, positives=positives, knn=knn, processes=processes, needs=needs)


def machine():
    """Kind and number of the processors."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")
    return f"{os.cpu_count()} x {name}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"


def main(argv=None):
    parser = argparse.ArgumentParser("bench.py", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=SECTIONS)
    parser.add_argument("--against", metavar="CHECKOUT", help="steps: over the same step there")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="NAME", help=str(METHODS))
    kinds = "for steps: recipe (CIFAR-10's), micro, or an encoder's name"
    parser.add_argument("--arch", nargs="+", default=["recipe", "micro"], metavar="NAME", help=kinds)
    parser.add_argument("--flags", default="", metavar="TEXT", help="more of the scripts', for steps and processes")
    parser.add_argument("--over-flags", metavar="TEXT", help="steps: over the same step with these instead of --flags")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=10, metavar="N")
    parser.add_argument("--sizes", type=int, nargs="+", default=[12_500, 50_000], metavar="N", help="positives, knn")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    common.keep_memory()  # as the scripts do
    rows = SECTIONS[args.what](args)
    command = shlex.join(argv or sys.argv[1:])
    print(f"python tests/tools/bench.py {command}\n{machine()}, {args.threads} thread(s)\n{table(rows)}")
    return rows


if __name__ == "__main__" and sys.argv[1:2] == ["serve"]:
    serve(sys.argv[2], sys.argv[3], sys.argv[4:])
elif __name__ == "__main__" and sys.argv[1:2] == ["probe"]:
    probe(sys.argv[2], sys.argv[3:])
else:
    sys.path.insert(0, str(ROOT))
    import common

    if __name__ == "__main__":
        main()
