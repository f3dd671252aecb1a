"""Measures time and memory, by hand; the tests never do. Each section prints one table, and with --json the same as data.

python tests/bench.py steps                  a whole training step over the bare forward and backward of its networks
python tests/bench.py input                  a view from the loader against torchvision's transforms, image by image
python tests/bench.py losses                 the losses against their plain forms, at the papers' sizes
python tests/bench.py ema                    the momentum update against a loop over the parameters
python tests/bench.py positives              CLIM's neighbours and k-means against the number of images (and against faiss)
python tests/bench.py knn                    the kNN vote against a plain one; feature extraction against bare inference
python tests/bench.py modes                  --compile, --amp bf16 and weights not in channels_last, relative to plain float32
python tests/bench.py processes              two processes of one thread each against one process of two
python tests/bench.py memory                 peak memory, and what --grad-checkpoint and bf16 save
python tests/bench.py flat [--steps 2000]    memory and open files of each method over a run of many steps

Networks are those of the CIFAR recipes, or with --arch micro small ones. What is compared runs in turn, A, B, A, B, and the
table has medians: the ratios mean more than the times.
"""

import argparse
import collections
import contextlib
import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision.transforms as T
from PIL import Image, ImageFilter
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import clim  # noqa: E402
import common  # noqa: E402
import jcl  # noqa: E402
import patchmix  # noqa: E402

METHODS = ("moco_jointcrop", "jcl", "clim", "logo moco", "logo simsiam", "patchmix")

# ----------------------------------------------------------------- instruments


def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def interleaved(repeats, *functions, clock=now):
    """Median seconds of each function, called in turn, so that a slow spell of the machine meets all; one call before."""
    seconds = []
    for _ in range(repeats + 1):
        marks = [clock()] + [(function(), clock())[1] for function in functions]
        seconds.append(np.diff(marks))
    return np.median(seconds[1:], axis=0).tolist()


def alone(prepare, *arguments, small=None):
    """(seconds, MiB by which the process grew at its peak) of the function that prepare(*arguments) returns, in a fresh process.

    small: arguments for a run before, whose cost is what the first call alone costs. On CUDA, memory is the device's.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (prepare, arguments, small))


def _measured(prepare, arguments, small):
    torch.set_flush_denormal(True)
    if small:
        prepare(*small)()
    function = prepare(*arguments)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, began = peak(), now()
    function()
    return now() - began, peak() - before


def peak():
    """The greatest memory so far, MiB. (getrusage would begin with that of the parent.)"""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


class Training:
    """A method's model, optimiser and loader, made as its main makes them, on generated images of CIFAR's size."""

    def __init__(self, method, arch, batch_size, *flags):
        name, _, base = method.partition(" ")
        self.module = module = importlib.import_module(name)
        arch = {None: [], "micro": ["--arch", "vit_micro" if name == "patchmix" else "resnet_micro"]}.get(arch, ["--arch", arch])
        flags = [*flags, *arch, *(["--base", base] if base else [])]
        self.args = args = module.parse_args(["--dataset", "cifar10", "--batch-size", str(batch_size), *flags])
        self.device, args.steps = module.init_distributed(args), 1000
        array, labels = common.make_patterns(4 * batch_size, 32, 0)
        images, more = common.ImageSet("cifar10", labels, common.PATTERNS, array), ()
        if name == "clim":  # positives, as from the sixth epoch on
            more = images, torch.randint(len(images), (len(images), args.num_positives), dtype=torch.int32)
        self.sampler = common.EpochSampler(len(images), batch_size, 0)
        views = common.Views(images, *module.make_sample(args, *more), 0, args.interpolation)
        self.loader = common.make_loader(views, self.sampler, 0, self.device)
        self.batch = next(iter(self.loader))

        self.info = common.backbone_info(args.arch, args.image_size, args.patch_size, args.norm, args.interpolation)
        kind = {"moco_jointcrop": "MoCo", "jcl": "JCL", "clim": "CLIM", "patchmix": "PatchMix", "logo": "MoCo"}[name]
        self.model = getattr(module, "SimSiam" if base == "simsiam" else kind)(args, self.info).to(self.device)
        if name != "patchmix":
            self.model.to(memory_format=torch.channels_last)
        if args.grad_checkpoint:
            self.model.backbone.set_grad_checkpointing()
        if args.compile:
            for encoder in {"backbone", "momentum_backbone"} & dict(self.model.named_children()).keys():
                getattr(self.model, encoder).compile()
        if name == "patchmix":
            self.optimizer = torch.optim.AdamW(module.parameter_groups(self.model, skip_vectors=True), lr=0.0, fused=True)
        else:
            self.optimizer = module.make_optimizer(args, self.model)
        self.l2l = [module.LocalToLocal(args, self.model, self.device)] if name == "logo" else []
        options = dict(broadcast_buffers=False, gradient_as_bucket_view=True)
        self.wrapped = DistributedDataParallel(self.model, **options) if dist.is_initialized() else self.model
        self.log, self.count, self.calls = module.EpochLog(), 0, []

    def step(self):
        self.count += 1
        common_part = self.args, self.model, self.wrapped, self.optimizer, *self.l2l, self.batch
        metrics = self.module.train_step(*common_part, self.count, 1000, self.device)
        self.log.add(metrics, self.count, images_left=self.log.last)

    def batches(self):
        """Load batch after batch."""
        while True:
            for batch in self.loader:
                self.batch = batch
                yield
            self.sampler.epoch += 1

    def record(self):
        """One step, in which every call of the networks is noted for `bare`."""

        def noting(function):
            def call(x):
                self.calls += [(function, x)] * (not busy)
                busy.append(1)  # `local` of LoGo may call `project`
                y = function(x)
                busy.pop()
                return y

            return call

        busy = []
        with contextlib.ExitStack() as stack:
            for name in {"query", "key", "local", "project"} & set(dir(self.model)):
                stack.enter_context(mock.patch.object(self.model, name, noting(getattr(self.model, name))))
            self.step()
        self.calls = [(function, x.detach()) for function, x in self.calls]

    def bare(self):
        """Forward and backward of the same networks on the same inputs, and nothing else."""
        self.model.zero_grad(set_to_none=True)
        outputs = [function(x) for function, x in self.calls if function.__name__ != "key"]
        with torch.no_grad():
            for function, x in self.calls:
                if function.__name__ == "key":
                    function(x)
        torch.autograd.backward(outputs, [torch.ones_like(y).cumsum(1) for y in outputs])

    def parts(self):
        """Seconds of the parts of one step (forward only)."""
        seconds = collections.Counter()

        def timing(part, function):
            @functools.wraps(function)
            def call(*args, **kwargs):
                began = now()
                result = function(*args, **kwargs)
                seconds[part] += now() - began
                return result

            return call

        owners = {
            "colour": [(common, "colour"), (common, "normalize")],
            "mix": [(self.module, name) for name in ("mix_slices", "cutmix", "resize")],
            "loss": [(self.module, name) for name in ("info_nce", "jcl_loss", "clim_loss", "soft_info_nce")],
            "affinity": [(owner, "dissimilarity") for owner in self.l2l],
            "optimiser": [(self.optimizer, "step")] + [(owner.second, "step") for owner in self.l2l],
            "ema": [(self.model, "update_momentum_encoder")],
            "grad_norm": [(self.module, "finite_gradient")],
            "log": [(self.log, "add")],
        }
        with contextlib.ExitStack() as stack:
            for part, places in owners.items():
                for owner, name in places:
                    if hasattr(owner, name):
                        stack.enter_context(mock.patch.object(owner, name, timing(part, getattr(owner, name))))
            self.step()
        return {part: seconds[part] for part in owners}


# ------------------------------------------------------------------ plain forms


def plain_info_nce(q, k, queue, temperature):
    """MoCo's Algorithm 1, with its copy of the queue."""
    positive = torch.einsum("nc,nc->n", q, k)[:, None]
    logits = torch.cat([positive, torch.einsum("nc,ck->nk", q, queue.T.clone())], 1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64, device=q.device))


def plain_jcl_loss(q, k, queue, temperature, lam):
    """JCL's Eq. 8 with the covariance matrix of each image's keys."""
    mean = k.mean(1)
    centred = k - mean[:, None]
    covariance = centred.transpose(1, 2) @ centred / k.shape[1]  # (N, C, C)
    spread = torch.einsum("nc,ncd,nd->n", q, covariance, q)
    positive = (q * mean).sum(1) / temperature
    above = (positive + lam / (2 * temperature**2) * spread).exp()
    return ((above + (q @ queue.T / temperature).exp().sum(1)).log() - positive).mean()


def plain_soft_info_nce(q, k, index, weight, temperature):
    """PatchMix's Eq. 13 with a dense matrix of targets."""
    target = torch.zeros(len(q), len(k), device=q.device).scatter_add_(1, index, weight.expand(index.shape))
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / temperature
    return -(target * logits.log_softmax(1)).sum(1).mean()


def plain_knn(train_x, train_y, test_x, k, temperature, num_classes):
    """Instance Discrimination's vote, a hundred images at a time, with one-hot labels of the neighbours."""
    train_x, test_x = F.normalize(train_x, dim=1), F.normalize(test_x, dim=1)
    predicted = []
    for part in test_x.split(100):
        similarity, nearest = (part @ train_x.T).topk(k, 1)
        votes = F.one_hot(train_y[nearest], num_classes) * (similarity / temperature).exp()[..., None]
        predicted.append(votes.sum(1).sort(1, descending=True).indices[:, 0])
    return torch.cat(predicted)


def plain_ema(slow, fast, m):
    for s, f in zip(slow, fast, strict=True):
        s.mul_(m).add_(f, alpha=1 - m)


# --------------------------------------------------------------------- sections


def steps(args):
    """One row a method: seconds of a step and of its networks alone, their ratio, and the parts' shares of the step in percent
    (of the loss, the forward pass; its backward pass is in the rest).
    """
    rows = []
    for method in args.methods:
        training = Training(method, args.arch, args.batch_size, *args.flags)
        training.record()
        parts = []
        step, bare = interleaved(args.repeats, lambda: parts.append(training.parts()), training.bare)  # noqa: B023
        shares = {f"{name}_%": 100 * np.median([p[name] for p in parts[1:]]).item() / step for name in parts[0]}
        rest = 100 * (1 - bare / step) - sum(shares.values())
        rows.append(dict(method=method, step_s=step, bare_s=bare, ratio=step / bare) | shares | {"rest_%": rest})
    return rows


def usual_transform(size, mean, std):
    """The papers' pipeline for one PIL image."""
    blur = T.Lambda(lambda image: image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2))))
    jitter = [T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8), T.RandomGrayscale(0.2), T.RandomApply([blur], 0.5)]
    last = [T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)]
    return T.Compose([T.RandomResizedCrop(size, (0.2, 1)), *jitter, *last])


def input_runs(size, count, folder):
    """What `input` measures, {name: function}: decoded images at 32 px, else JPEG files of 500 x 375; two views of each."""
    module = importlib.import_module("moco_jointcrop")
    flags = ["--joint", "none", "--blur-prob", "0.5", "0.5", "--image-size", str(size)]
    options = module.parse_args(["--dataset", "cifar10", *flags])
    array, paths = common.make_patterns(count, 32 if size == 32 else 500, 0)[0], [f"{folder}/{i}.jpg" for i in range(count)]
    for path, image in zip(paths, array, strict=True):
        Image.fromarray(image[:375]).save(path, quality=90)
    images = common.ImageSet("", [0] * count, ["0"], **(dict(array=array) if size == 32 else dict(paths=paths)))
    views, transform = common.Views(images, *module.make_sample(options), 0), usual_transform(size, *options.norm)
    keys = [(0, i) for i in range(count)]
    batch = views.__getitems__(keys)

    def colour():
        for view in common.colour_views(batch, torch.device("cpu")):
            common.normalize(view, *options.norm)

    def usual():
        for image in map(Image.fromarray, images):
            torch.stack([transform(image), transform(image)])

    def draft():
        for path in paths:
            with Image.open(path) as image:
                image.draft("RGB", (size, size))
                image.load()

    runs = dict(loader=lambda: views.__getitems__(keys), colour=colour, usual=usual)
    return runs if size == 32 else runs | dict(decode=lambda: list(images), draft=draft)


def input_(args):
    """One row a kind of image: CPU milliseconds a view, with one thread, as in a loader's worker. `decode` is part of `loader`
    and `usual`; `draft` is PIL's faster decoding, which halves an image as long as that leaves 224 px.
    """
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for size, source, count in ((32, "decoded", args.batch_size), (224, "JPEG, 500 x 375", args.batch_size // 8)):
        with tempfile.TemporaryDirectory() as folder:
            runs = input_runs(size, count, folder)
            seconds = interleaved(args.repeats, *runs.values(), clock=time.process_time)
        ms = dict.fromkeys(("loader", "colour", "usual", "decode", "draft"), "")
        ms |= {name: 1000 * t / (2 * count) for name, t in zip(runs, seconds, strict=True)}
        ratios = ms["usual"] / ms["loader"], ms["usual"] / (ms["loader"] + ms["colour"])
        row = dict(px=size, source=source) | {f"{name}_ms": value for name, value in ms.items()}
        rows.append(row | dict(usual_over_loader=ratios[0], usual_over_both=ratios[1]))
    torch.set_num_threads(threads)
    return rows


LOSSES = {  # name: (ours, plain), the paper's (batch, keys)
    "InfoNCE, batch 256, queue 65,536": (clim.info_nce, plain_info_nce, 256, 65536),
    "jcl_loss, batch 512, 5 keys, queue 65,536": (jcl.jcl_loss, plain_jcl_loss, 512, 65536),
    "soft_info_nce, batch 1,024, M = 3": (patchmix.soft_info_nce, plain_soft_info_nce, 1024, 1024),
}


def loss_run(name, plain, scale):
    """Forward and backward of a loss, or of its plain form, on random unit vectors; sizes divided by scale."""
    ours, other, n, keys = LOSSES[name]
    n, keys, draws = n // scale, keys // scale, torch.Generator().manual_seed(0)

    def unit(*shape):
        x = F.normalize(torch.randn(*shape, generator=draws), dim=-1)
        return x.cuda() if torch.cuda.is_available() else x

    if ours is jcl.jcl_loss:
        q, *rest = unit(n, 128), unit(n, 5, 128), unit(keys, 128), 0.2, 4.0
    elif ours is clim.info_nce:
        q, *rest = unit(n, 128), unit(n, 128), unit(keys, 128), 0.2
    else:
        _, _, index, weight = patchmix.mix_targets(n, 3)
        q, *rest = unit(n, 256), unit(keys, 256), index, weight, 0.2
        rest[1:3] = (x.to(q.device) for x in rest[1:3])
    q.requires_grad_()

    def run():
        q.grad = None
        loss = (other if plain else ours)(q, *rest)
        loss.backward()
        return loss.item(), q.grad

    return run


def losses(args):
    """One row a loss: milliseconds of forward and backward, and MiB that they take, ours and plain."""
    rows = []
    for name in LOSSES:
        ours, plain = interleaved(args.repeats, *(loss_run(name, plain, args.scale) for plain in (False, True)))
        small = (name, False, 64 * args.scale)
        mib = [alone(loss_run, name, plain, args.scale, small=small)[1] for plain in (False, True)]
        row = dict(loss=name, ms=1000 * ours, plain_ms=1000 * plain, ratio=ours / plain)
        rows.append(row | dict(mib=mib[0], plain_mib=mib[1]))
    return rows


def ema(args):
    """One row a method: milliseconds of the momentum update, of a loop over the parameters, and of a step."""
    rows = []
    for method in args.methods:
        if method == "logo simsiam":  # has no momentum encoder
            continue
        training = Training(method, args.arch, args.batch_size)
        model, pairs = training.model, ("backbone", "projector")
        slow, fast = ([p for n in pairs for p in getattr(model, prefix + n).parameters()] for prefix in ("momentum_", ""))
        functions = functools.partial(model.update_momentum_encoder, 0.99), torch.no_grad()(lambda: plain_ema(slow, fast, 0.99))  # noqa: B023
        ours, loop = interleaved(10 * args.repeats, *functions)
        (step,) = interleaved(1, training.step)
        row = dict(method=method, tensors=len(slow), ms=1000 * ours, loop_ms=1000 * loop, ratio=ours / loop)
        rows.append(row | {"step_ms": 1000 * step, "share_%": 100 * ours / step})
    return rows


def embeddings(count):
    """Unit vectors (count, 128) about 100 directions, as an encoder's embeddings of a hundred kinds of images are."""
    draws = torch.Generator().manual_seed(0)
    kinds = torch.randn(100, 128, generator=draws)[torch.randint(100, (count,), generator=draws)]
    return F.normalize(kinds + torch.randn(count, 128, generator=draws), dim=1)


def neighbors(count):
    common.keep_memory()
    x = embeddings(count)
    return lambda: clim.nearest_neighbors(x, 40)


def clusters(count):
    common.keep_memory()
    x = embeddings(count)
    return lambda: clim.kmeans(x, max(1, count // 128), generator=torch.Generator().manual_seed(0))


def faiss_neighbors(count):
    import faiss

    x = embeddings(count).numpy()

    def run():
        index = faiss.IndexFlatIP(x.shape[1])
        index.add(x)
        index.search(x, 41)  # one of them is the image

    return run


def faiss_clusters(count):
    import faiss

    x = embeddings(count).numpy()
    options = dict(niter=20, max_points_per_centroid=count, seed=1)

    def run():
        means = faiss.Kmeans(x.shape[1], max(1, count // 128), **options)
        means.train(x)
        means.index.search(x, 1)

    return run


def positives(args):
    """One row a number of images: seconds and MiB of the 40 nearest neighbours, and of k-means with 128 images a cluster; the
    same with faiss, where it is installed: an exact index, its k-means with as many clusters and iterations.
    """
    found = dict(neighbors=neighbors, kmeans=clusters)
    if importlib.util.find_spec("faiss"):
        found |= dict(faiss_neighbors=faiss_neighbors, faiss_kmeans=faiss_clusters)
    rows = []
    for count in args.sizes:
        turns = [[alone(f, count, small=(min(count, 256),)) for f in found.values()] for _ in range(args.repeats)]
        seconds, mib = np.median(turns, axis=0).T.tolist()
        rows.append(dict(images=count))
        for name, t, m in zip(found, seconds, mib, strict=True):
            rows[-1] |= {f"{name}_s": t, f"{name}_mib": m}
    return rows


def knn(args):
    """Seconds of the kNN vote and of a plain one (k = 200), then of feature extraction and of the encoder alone."""
    draws = torch.Generator().manual_seed(0)
    bank, queries = (torch.randn(n // args.scale, 512, generator=draws) for n in (50_000, 10_000))
    labels = torch.randint(10, (len(bank),), generator=draws)
    arguments = bank, labels, queries, min(200, len(bank)), 0.07, 10
    ours, plain = interleaved(1, lambda: common.knn_predict(*arguments), lambda: plain_knn(*arguments))
    rows = [dict(what=f"{len(bank)} x {len(queries)} x 512, k 200", s=ours, plain_s=plain, ratio=ours / plain)]
    for arch in ("resnet_micro", "vit_micro", *args.encoders):
        info = common.backbone_info(arch, 32, 2 if arch == "vit_tiny" else 8)
        encoder, count = common.build_backbone(info).eval(), 2048 if "micro" in arch else 256
        array, labels = common.make_patterns(max(16, count // args.scale), 32, 0)
        images = common.ImageSet("", labels, common.PATTERNS, array)
        x = common.normalize(torch.from_numpy(array).permute(0, 3, 1, 2).float().div_(255), info["mean"], info["std"])
        bare = torch.no_grad()(lambda: [encoder(part) for part in x.split(256)])  # noqa: B023
        extract = functools.partial(common.extract_features, encoder, images, info, torch.device("cpu"))
        ours, plain = interleaved(args.repeats, extract, bare)
        rows.append(dict(what=f"features, {arch}, {len(images)} images", s=ours, plain_s=plain, ratio=ours / plain))
    return rows


MODES = {"compile": ["--compile"], "bf16": ["--amp", "bf16"], "both": ["--compile", "--amp", "bf16"], "nchw": []}


def modes(args):
    """One row a method: seconds of a step in float32, and other modes' share of that time."""
    rows = []
    for method in args.methods:
        trainings = [Training(method, args.arch, args.batch_size, "--amp", "off")]
        trainings += [Training(method, args.arch, args.batch_size, *flags) for flags in MODES.values()]
        trainings[-1].model.to(memory_format=torch.contiguous_format)
        for training in trainings:
            training.step()  # compiles
        times = interleaved(args.repeats, *(training.step for training in trainings))
        rows.append(dict(method=method, float32_s=times[0]) | {m: t / times[0] for m, t in zip(MODES, times[1:], strict=True)})
    return rows


def pace(args):
    """One row a method: images/s of training, loading included, in this process or process group."""
    rows = []
    for method in args.methods:
        training = Training(method, args.arch, args.batch_size)
        batches = training.batches()
        (seconds,) = interleaved(args.repeats, lambda: (next(batches), training.step()))  # noqa: B023
        rows.append(dict(method=method, images_per_s=args.batch_size / seconds))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return rows


def processes(args):
    """One row a method: images/s of one process with two threads, of two with one each, and their ratio; medians."""
    found = collections.defaultdict(list)
    command = [__file__, "pace", "--batch-size", str(args.batch_size), "--repeats", str(args.repeats), "--methods", *args.methods]
    command += ["--arch", args.arch] if args.arch else []
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        for _, world in itertools.product(range(args.rounds), (1, 2)):
            environment = os.environ | {"OMP_NUM_THREADS": str(2 // world)}
            begin = launch if world == 2 else [sys.executable]
            subprocess.run([*begin, *command, "--json", out], env=environment, stdout=subprocess.DEVNULL, check=True)
            for row in json.loads(out.read_text()):
                found[row["method"], world].append(row["images_per_s"])
    pairs = [(m, *(float(np.median(found[m, world])) for world in (1, 2))) for m in args.methods]
    return [dict(method=m, one_process=one, two_processes=two, ratio=two / one) for m, one, two in pairs]


SAVINGS = {"": ["--amp", "off"], "_checkpointed": ["--amp", "off", "--grad-checkpoint"], "_bf16": ["--amp", "bf16"]}


def two_steps(*arguments):
    def run():
        training = Training(*arguments)
        training.step()
        training.step()

    return run


def memory(args):
    """One row a method: MiB at the peak of training, weights and optimiser included, and the seconds that it took."""
    rows = []
    for method in args.methods:
        rows.append(dict(method=method, batch=args.batch_size))
        for name, flags in SAVINGS.items():
            seconds, mib = alone(two_steps, method, args.arch, args.batch_size, *flags)
            rows[-1] |= {f"mib{name}": mib, f"s{name}": seconds}
    return rows


def resident(pid):
    """(memory in MiB, open files) of a process and its loader's workers."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    pages = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in pids)
    return pages * resource.getpagesize() / 2**20, sum(len(list(Path(f"/proc/{p}/fd").iterdir())) for p in pids)


def flat(args):
    """One row a method: memory and open files in the second and in the last quarter of a run of tiny batches, medians."""
    rows = []
    for method in dict.fromkeys(name.split()[0] for name in args.methods):
        with tempfile.TemporaryDirectory() as out:
            flags = ["--batch-size", "4", "--knn-every", "1", "--workers", "1", "--max-steps", str(args.steps), "--out", out]
            flags += ["--clim-start", "0", "--refresh-every", "1"] if method == "clim" else []
            run = subprocess.Popen([sys.executable, ROOT / f"{method}.py", *flags], stdout=subprocess.DEVNULL)
            samples = []
            while run.poll() is None:
                time.sleep(0.5)
                if Path(out, "metrics.jsonl").exists():  # training has begun
                    with contextlib.suppress(OSError):  # it ended meanwhile
                        samples.append(resident(run.pid))
            if run.returncode:
                raise SystemExit(f"{method}.py ended with status {run.returncode}")
        n = len(samples) // 4
        (early, early_files), (late, late_files) = (np.median(part, axis=0) for part in (samples[n : 2 * n], samples[-n:]))
        rows.append(dict(method=method, mib=early, mib_at_the_end=late, files=int(early_files), files_at_the_end=int(late_files)))
    return rows


def table(rows):
    """Markdown of a list of equal dictionaries."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---:|" * len(rows[0])]
    lines += ["| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()) + " |" for row in rows]
    return "\n".join(lines)


SECTIONS = dict(steps=steps, input=input_, losses=losses, ema=ema, positives=positives, knn=knn, modes=modes)
SECTIONS |= dict(processes=processes, pace=pace, memory=memory, flat=flat)


def main(argv=None):
    parser = argparse.ArgumentParser("bench.py", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=SECTIONS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="NAME", help=", ".join(METHODS))
    parser.add_argument("--arch", help="micro: small networks, or an encoder's name; by default the CIFAR recipe's")
    parser.add_argument("--batch-size", type=int, default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of processes")
    parser.add_argument("--sizes", type=int, nargs="+", default=[12_500, 25_000, 50_000, 100_000], metavar="N")
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="divide the sizes of losses and knn")
    parser.add_argument("--encoders", nargs="*", default=["resnet18", "vit_tiny"], metavar="NAME", help="more of them for knn")
    parser.add_argument("--flags", nargs="*", default=[], help="of the scripts, for steps")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="of flat")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    torch.set_flush_denormal(True)
    common.keep_memory()  # as the scripts do
    rows = SECTIONS[args.what](args)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n{table(rows)}")
    if args.json and os.environ.get("RANK", "0") == "0":
        Path(args.json).write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
