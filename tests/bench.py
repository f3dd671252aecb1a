"""Measures time, by hand; the tests only look whether it runs. A section prints a table, its command and the machine.

python tests/bench.py steps [--against PATH]   a training step over the bare forward and backward of its networks, and
                                               over the same step of another checkout
python tests/bench.py loader                   a view from the loader against torchvision's transforms, image by image
python tests/bench.py positives                CLIM's neighbours and k-means, and faiss's where it is installed
python tests/bench.py knn                      the kNN vote against a plain one; features against bare inference
python tests/bench.py processes                whole runs: two processes of one thread against one process of two

What is compared runs in turn, A, B, B, A, by one thread unless said otherwise, and the tables have medians of
time.perf_counter: the ratios mean more than the times.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import torchvision.transforms as T
from PIL import Image, ImageFilter

ROOT = Path(__file__).parent.parent
METHODS = ("moco_jointcrop", "jcl", "clim", "logo", "logo --base simsiam", "patchmix")


def in_turn(rounds, *functions):
    """Medians of what each function returns, called in turn, so that a slow spell of the machine meets all; one call
    before.
    """
    found = [[] for _ in functions]
    for turn in range(rounds + 1):
        for i, function in list(enumerate(functions))[:: (-1) ** turn]:
            found[i].append(function())
    return np.median(np.array(found)[:, 1:], axis=1).tolist()


def seconds_of(function):
    def call():
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    return call


def interleaved(rounds, *functions):
    """Median seconds of each function."""
    return in_turn(rounds, *map(seconds_of, functions))


# ----------------------------------------------------------------------- steps


def serve(house, method, flags):
    """A run of a method of the checkout `house` whose every step waits for a word on stdin, and answers with its
    seconds by the clock and of the processor.

    "step": the next step. "bare": forward and backward of the same networks on the same inputs, and nothing else. What
    it knows of the house: `main`, `parse_args`, `train_step`, and the names of the model's networks.
    """
    sys.path.insert(0, house)
    module = importlib.import_module(method)
    train_step, answer, calls, busy = module.train_step, sys.stdout, [], []

    def noting(function):
        def call(x):
            calls.extend([(function, x.detach())] * (not busy))
            busy.append(1)  # `local` of LoGo may call `project`
            y = function(x)
            busy.pop()
            return y

        return call

    def bare(model):
        model.zero_grad(set_to_none=True)
        outputs = [function(x) for function, x in calls if function.__name__ != "key"]
        with torch.no_grad():
            for function, x in calls:
                if function.__name__ == "key":
                    function(x)
        torch.autograd.backward(outputs, [torch.ones_like(y).cumsum(1) for y in outputs])

    def waiting(args, model, *others):
        while word := sys.stdin.readline().strip():
            began = time.perf_counter(), time.process_time()
            if word == "bare":
                bare(model)
            else:
                with contextlib.ExitStack() as stack:
                    for name in {"query", "key", "local", "project"} & set(dir(model)) if not calls else ():
                        stack.enter_context(mock.patch.object(model, name, noting(getattr(model, name))))
                    metrics = train_step(args, model, *others)
            print(time.perf_counter() - began[0], time.process_time() - began[1], file=answer, flush=True)
            if word == "step":
                return metrics
        raise SystemExit

    module.train_step = waiting
    with contextlib.redirect_stdout(sys.stderr):
        module.main(module.parse_args(flags))


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


def make_folder(folder, count):
    """Patterns as PNG files in train/, one folder a class."""
    for i, (image, label) in enumerate(zip(*common.make_patterns(count, 32, 0), strict=True)):
        path = Path(folder, "train", f"kind{label}", f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def steps(args):
    """One row a method and encoder: milliseconds of a step, over its networks alone, over the other checkout's step by
    the clock and by the processor's time, which other programs disturb less.
    """
    rows = []
    for kind, method in itertools.product(args.arch, args.methods):
        script, *flags = method.split()
        micro = "vit_micro" if script == "patchmix" else "resnet_micro"
        flags += [] if kind == "recipe" else ["--arch", micro if kind == "micro" else kind]
        flags += ["--clim-start", "0", "--refresh-every", "1000"] if script == "clim" else []
        flags += f"--dataset cifar10 --device cpu --amp off --batch-size {args.batch_size}".split()
        flags += "--epochs 1000 --save-every 1000 --knn-every 0 --workers 0".split() + shlex.split(args.flags)
        with tempfile.TemporaryDirectory() as folder:
            make_folder(folder, 8 * args.batch_size)
            houses = dict(here=ROOT, there=args.against) if args.against else dict(here=ROOT)
            where = {name: ["--data-dir", folder, "--out", f"{folder}/{name}"] for name in houses}
            runs = [Served(house, script, flags + where[name], args.threads) for name, house in houses.items()]
            words = [functools.partial(run, "step") for run in runs] + [functools.partial(runs[0], "bare")]
            step, *other, bare = in_turn(args.rounds, *words)
            for run in runs:
                run.end()
        rows.append(
            dict(method=method, arch=kind, batch=args.batch_size, ms=1000 * step[0], over_bare=step[0] / bare[0])
        )
        for there in other:
            rows[-1] |= dict(there_ms=1000 * there[0], ratio=step[0] / there[0], cpu_ratio=step[1] / there[1])
    return rows


# ---------------------------------------------------------------------- loader


def usual_transform(size, mean, std):
    """The papers' pipeline for one PIL image."""
    blur = T.Lambda(lambda image: image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2))))
    jitter = T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8)
    first = [T.RandomResizedCrop(size, (0.2, 1)), jitter, T.RandomGrayscale(0.2), T.RandomApply([blur], 0.5)]
    return T.Compose([*first, T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)])


def loader_runs(size, count, folder):
    """What `loader` measures, {name: function}: two views of images, decoded at 32 px, else JPEG files of 500 x 375."""
    jcl = importlib.import_module("jcl")
    options = jcl.parse_args(["--dataset", "cifar10", "--num-keys", "1", "--image-size", str(size)])
    options.blur_p = 0.5
    array = common.make_patterns(count, 32 if size == 32 else 500, 0)[0]
    paths = [f"{folder}/{i}.jpg" for i in range(count)]
    for path, image in zip(paths, array, strict=True):
        Image.fromarray(image[:375]).save(path, quality=90)
    source = dict(array=array) if size == 32 else dict(paths=np.array([os.fsencode(path) for path in paths]))
    images = common.ImageSet("", [0] * count, ["0"], **source)
    views, transform = common.Views(images, *jcl.make_sample(options), 0), usual_transform(size, *options.norm)
    keys = [(0, i) for i in range(count)]
    batch = views.__getitems__(keys)

    def colour():
        for view in common.colour_views(batch, torch.device("cpu")):
            common.normalize(view, *options.norm)

    def usual():
        for i in range(count):
            image = Image.fromarray(images[i])
            torch.stack([transform(image), transform(image)])

    runs = dict(loader=lambda: views.__getitems__(keys), colour=colour, usual=usual)
    return runs if size == 32 else runs | dict(decode=lambda: [images[i] for i in range(count)])


def loader(args):
    """One row a kind of image: milliseconds a view. `decode` is part of `loader` and of `usual`."""
    rows, some = [], max(2, args.batch_size // 8)
    for size, source, count in ((32, "decoded", args.batch_size), (224, "JPEG, 500 x 375", some)):
        with tempfile.TemporaryDirectory() as folder:
            runs = loader_runs(size, count, folder)
            seconds = interleaved(args.rounds, *runs.values())
        ms = dict.fromkeys(("loader", "colour", "usual", "decode"), "")
        ms |= {name: 1000 * t / (2 * count) for name, t in zip(runs, seconds, strict=True)}
        ratios = dict(ours_over_usual=(ms["loader"] + ms["colour"]) / ms["usual"])
        rows.append(dict(px=size, source=source) | {f"{name}_ms": value for name, value in ms.items()} | ratios)
    return rows


# ------------------------------------------------------------- positives and kNN


def embeddings(count):
    """Unit vectors (count, 128) about 100 directions, as an encoder's embeddings of a hundred kinds of images are."""
    draws = torch.Generator().manual_seed(0)
    kinds = torch.randn(100, 128, generator=draws)[torch.randint(100, (count,), generator=draws)]
    return F.normalize(kinds + torch.randn(count, 128, generator=draws), dim=1)


def positives(args):
    """One row a number of images: seconds of the 40 nearest neighbours, and of k-means with 128 images a cluster; the
    same with faiss, where it is installed: an exact index, its k-means with as many clusters and iterations.
    """
    clim, rows = importlib.import_module("clim"), []
    for count in args.sizes:
        x, clusters = embeddings(count), max(1, count // 128)
        runs = dict(neighbors=functools.partial(clim.nearest_neighbors, x, 40))
        runs["kmeans"] = functools.partial(clim.kmeans, x, clusters)
        if importlib.util.find_spec("faiss"):
            import faiss

            options = dict(niter=20, max_points_per_centroid=count, seed=1)
            index, means = faiss.IndexFlatIP(128), faiss.Kmeans(128, clusters, **options)

            def exact(x=x, index=index):
                index.reset()
                index.add(x.numpy())
                index.search(x.numpy(), 41)

            def lloyd(x=x, means=means):
                means.train(x.numpy())
                means.index.search(x.numpy(), 1)

            runs |= dict(faiss_neighbors=exact, faiss_kmeans=lloyd)
        seconds = interleaved(args.rounds, *runs.values())
        rows.append(dict(images=count) | {f"{name}_s": s for name, s in zip(runs, seconds, strict=True)})
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
        return common.read_metrics(f"{out}/run/metrics.jsonl")[-1]["images_per_s"]


def processes(args):
    """One row a method: images/s, loading included, of one process of two threads, of two of one each; their ratio."""
    flags = ["--epochs", "2", "--knn-every", "0", "--batch-size", str(args.batch_size), *shlex.split(args.flags)]
    rows = []
    for method in args.methods:
        runs = [[images_per_s(method, flags, world) for world in (1, 2)] for _ in range(args.rounds)]
        one, two = np.median(runs, axis=0).tolist()
        rows.append(dict(method=method, one_process=one, two_processes=two, ratio=two / one))
    return rows


# ------------------------------------------------------------------------ main


def table(rows):
    """Markdown of a list of equal dictionaries."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---:|" * len(rows[0])]
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


SECTIONS = dict(steps=steps, loader=loader, positives=positives, knn=knn, processes=processes)


def machine():
    """Kind and number of the processors."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")
    return f"{os.cpu_count()} x {name}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"


def main(argv=None):
    parser = argparse.ArgumentParser("bench.py", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=SECTIONS)
    parser.add_argument("--against", metavar="PATH", help="another checkout, for steps")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="NAME", help=str(METHODS))
    kinds = "for steps: recipe (CIFAR-10's), micro, or an encoder's name"
    parser.add_argument("--arch", nargs="+", default=["recipe", "micro"], metavar="NAME", help=kinds)
    parser.add_argument("--flags", default="", metavar="TEXT", help="more of the scripts', for steps and processes")
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
    print(f"python tests/bench.py {command}\n{machine()}, {args.threads} thread(s)\n{table(rows)}")
    return rows


if __name__ == "__main__" and sys.argv[1:2] == ["serve"]:
    serve(sys.argv[2], sys.argv[3], sys.argv[4:])
else:
    sys.path.insert(0, str(ROOT))
    import common

    if __name__ == "__main__":
        main()
