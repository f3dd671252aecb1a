"""Data, evaluation and the files of a run: what the method files share, and nothing of training.

    1. messages        fail, memory_in_words, say, progress, StopRequest
    2. randomness      uniform, generator: pure functions of what is being made
    3. data sets       load_images -> ImageSet (patterns, cifar10, cifar100, stl10, imagenet100, imagenet, folder)
    4. views           random_resized_crop and random_colour draw; Views cuts in the loader; colour_views on the device
    5. evaluation      extract_features, knn_scores, knn_predict, embedding_health, load_backbone
    6. files of a run  open_run, begin_run, save_run, load_run, write_metrics, save_checkpoint, load_checkpoint, save_grid

Conventions: images are RGB. Loaders give uint8 (N, 3, H, W); everything on the device is float in [0, 1] until `normalize`.
Boxes are (top, left, height, width) in pixels. A label of -1 means "none".
"""

import argparse
import atexit
import contextlib
import ctypes
import datetime
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageDraw, ImageOps
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_convert
from torchvision.transforms.functional import rgb_to_grayscale, solarize

# ---------------------------------------------------------------- 1. messages


def fail(message):
    """A mistake of the user or the world: one line on stderr, from one process, and exit status 2."""
    if lacks_memory(sys.exc_info()[1]):  # this is why, and `memory_in_words` says it
        raise
    first = os.environ.get("RANK", "0") == "0"
    if dist.is_initialized():  # perhaps only one process has found it: the first to come here says it
        with contextlib.suppress(RuntimeError):
            first = dist.distributed_c10d._get_default_store().add("failed", 1) == 1
    if first:
        line = message.replace("\n", "\\n")  # a file's name may have one
        print(f"error: {line}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        time.sleep(1)  # the others may have to ask the store, which can end with this process
    raise SystemExit(2)


def end_without_peer(kind, error, trace):
    """sys.excepthook of several processes: one that waits for another, which has ended, need not show where it waited."""
    if issubclass(kind, RuntimeError) and ("closed by peer" in str(error) or "reset by peer" in str(error)):
        print("error: another process of this run has ended; its own message says why", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def lacks_memory(error):
    """What an exception says of too little memory, the CPU's or a GPU's; None if it says nothing of it."""
    words = ("out of memory", "allocate memory", "unable to allocate", "bad_alloc", "alloc_failed", "memoryerror")
    found = [line for line in f"{error}\n{type(error).__name__}".splitlines() if any(w in line.lower() for w in words)]
    return found[0].strip() if found and isinstance(error, (MemoryError, RuntimeError, OSError)) else None


def memory_in_words(main):
    """For a script's main(args): too little memory ends it in a line that says which flags need less."""

    @functools.wraps(main)
    def explained(args):
        try:
            return main(args)
        except (MemoryError, RuntimeError, OSError) as error:
            if not (reason := lacks_memory(error)):
                raise
        advice = "give a lower --batch-size, or --amp"
        if hasattr(args, "grad_checkpoint"):
            advice = "the same command with --grad-checkpoint, --amp bf16 or fewer --workers goes on from the last save; a lower "
            advice += "--batch-size (it is of all processes together) or --queue needs a new --out"
        fail(f"too little memory ({reason.split(' Of the allocated')[0]}): {advice}")

    return explained


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are one line, as every other mistake's."""

    def error(self, message):
        fail(f"{message} (see python {self.prog} --help)")


def say(text="", end="\n"):
    """Print from the first process only; on a terminal, over the progress line."""
    if os.environ.get("RANK", "0") == "0":
        code = getattr(sys.stdout, "encoding", None) or "utf-8"
        text = text.encode(code, "backslashreplace").decode(code)  # a name may have what the terminal cannot show
        print(("\r\x1b[K" if sys.stdout.isatty() else "") + text, end=end, flush=True)


def progress(text, last=[0.0]):  # noqa: B006  (the list keeps the time of the last line)
    """One line that rewrites itself on a terminal, and a plain line every 30 s in a log file."""
    if sys.stdout.isatty() or time.monotonic() - last[0] > 30:
        say(text, end="" if sys.stdout.isatty() else "\n")
        last[0] = time.monotonic()


PATIENCE = datetime.timedelta(minutes=30)  # of processes that wait for others: the first of a node may be downloading


def rank_and_world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def keep_memory():
    """Let the C library keep what is freed: to map large tensors anew costs a CPU up to a quarter of a step. (glibc only.)"""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block, however large, is mapped on its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the top of the heap stays


def collective_device():
    """Where tensors have to be that the processes exchange."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


class StopRequest:
    """SIGTERM and SIGINT ask a run to finish its step, save and end; a second one ends it at once."""

    def __init__(self):
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number, frame):
        self.requested = True
        signal.signal(number, signal.SIG_DFL)

    def agreed(self, step=0, every=10):
        """Whether any process was asked; several processes compare notes at every tenth step only."""
        world = rank_and_world()[1]
        if world == 1 or step % every:
            return self.requested and world == 1
        flag = torch.tensor(float(self.requested), device=collective_device())
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag.item() > 0


# -------------------------------------------------------------- 2. randomness


def _mix(x):
    """SplitMix64's finaliser: a bijection of uint64 whose output bits each depend on all input bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(*keys):
    """Chain integers or integer arrays (broadcast) into a uint64 array."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            state = _mix(state + np.asarray(key).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return state


def uniform(seed, epoch, index, count, purpose=0):
    """Counter-based uniform draws: the same for an image whatever batch, worker or process asks.

    index (n,) ints -> (n, count) float64 in [0, 1), a pure function of (seed, purpose, epoch, index, position).
    """
    start = _hash(seed, purpose, epoch, np.asarray(index))[:, None]
    with np.errstate(over="ignore"):
        bits = _mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)) * 2.0**-53


def generator(*keys):
    """A torch CPU generator seeded by a hash of integer keys, e.g. (seed, step, purpose, slice)."""
    return torch.Generator().manual_seed(int(_hash(*keys)[0] >> np.uint64(1)))


# --------------------------------------------------------------- 3. data sets

DATASETS = ("patterns", "cifar10", "cifar100", "stl10", "imagenet100", "imagenet", "folder")
IMAGENET_NORM = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NORMS = {
    "patterns": ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
# The 100 classes of JCL's appendix D, with entries 75 and 88 mended (a missing digit, two transposed ones).
IMAGENET100 = """
02869837 01749939 02488291 02107142 13037406 02091831 04517823 04589890 03062245 01773797 01735189 07831146 07753275
03085013 04485082 02105505 01983481 02788148 03530642 04435653 02086910 02859443 13040303 03594734 02085620 02099849
01558993 04493381 02109047 04111531 02877765 04429376 02009229 01978455 02106550 01820546 01692333 07714571 02974003
02114855 03785016 03764736 03775546 02087046 07836838 04099969 04592741 03891251 02701002 03379051 02259212 07715103
03947888 04026417 02326432 03637318 01980166 02113799 02086240 03903868 02483362 04127249 02089973 03017168 02093428
02804414 02396427 04418357 02172182 01729322 02113978 03787032 02089867 02119022 03777754 04238763 02231487 03032252
02138441 02104029 03837869 03494278 04136333 03794056 03492542 02018207 04067472 03930630 03584829 02123045 04229816
02100583 03642806 04336792 03259280 02116738 02108089 03424325 01855672 02090622"""
IMAGENET100 = tuple(f"n{i}" for i in IMAGENET100.split())


class ImageSet:
    """Images with labels, either decoded (one uint8 array) or as paths that are decoded when asked for.

    labels (n,) int64, -1 where there is none; classes: names; images[i] -> uint8 array (H, W, 3).
    """

    def __init__(self, name, labels, classes, array=None, paths=None):
        self.name, self.array, self.paths = name, array, paths
        self.labels, self.classes = np.asarray(labels, np.int64), list(classes)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.array[i] if self.array is not None else read_image(self.paths[i])

    def sizes(self, index):
        """(n, 2) int64 heights and widths, from the array or the files' headers."""
        if self.array is not None:
            return np.tile(np.array(self.array.shape[1:3]), (len(index), 1))
        return np.array([image_size(self.paths[i]) for i in index])

    def memory(self):
        return "read from files" if self.array is None else f"{self.array.nbytes / 2**20:.0f} MiB decoded"

    def subset(self, index):
        """The images of the given rows, in that order."""
        array = self.array[index] if self.array is not None else None
        paths = [self.paths[i] for i in index] if self.paths is not None else None
        return ImageSet(self.name, self.labels[index], self.classes, array, paths)

    def of_classes(self, keep):
        """The images of the given classes, renumbered in that order; what has no label is left out."""
        part, number = self.subset(np.flatnonzero(np.isin(self.labels, keep))), {label: i for i, label in enumerate(keep)}
        labels = [number[label] for label in part.labels.tolist()]
        return ImageSet(self.name, labels, [self.classes[i] for i in keep], part.array, part.paths)

    def labelled(self):
        return self if (self.labels >= 0).all() else self.of_classes(list(range(len(self.classes))))


REPLACE = "put a readable one in its place, or begin a run with --skip-bad-images"


class BadImage(Exception):
    """An image file that cannot be decoded; the message names it."""


@contextlib.contextmanager
def open_image(path):
    """PIL's Image.open, whose errors name the file."""
    try:
        with Image.open(path) as image:
            yield image
    except MemoryError as error:  # the file may be good: it must not be left out
        raise MemoryError(f"MemoryError while reading {path}") from error
    except Exception as error:  # a damaged file may raise anything
        raise BadImage(f"cannot read the image {path}: {error or type(error).__name__}") from error


def read_image(path):
    """Any JPEG, PNG, ... of any mode (gray, palette, CMYK, alpha, EXIF-rotated) as uint8 (H, W, 3)."""
    with open_image(path) as file:
        image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I"):  # 16 bits of gray, which convert would clip at 255
            return (np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)[:, :, None].repeat(3, 2)
        return np.asarray(image.convert("RGB"))


def image_size(path):
    """(height, width) from the header, after EXIF rotation."""
    with open_image(path) as image:
        width, height = image.size
        return (width, height) if image.getexif().get(0x0112, 1) >= 5 else (height, width)


def _square(x):
    return np.tanh(np.sin(x) / 0.15)  # a soft square wave


def _bumps(x, threshold, softness=0.1):
    return np.tanh((x - threshold) / softness)


# Ten kinds: u, v are rotated coordinates in radians; r, t polar ones; c the cycles an image; p a phase. Values in [-1, 1].
PATTERNS = {
    "stripes": lambda u, v, r, t, c, p: _square(u),
    "checks": lambda u, v, r, t, c, p: _square(u) * _square(v),
    "dots": lambda u, v, r, t, c, p: _bumps(np.cos(u) + np.cos(v), 0.7, 0.2),
    "rings": lambda u, v, r, t, c, p: _square(2 * np.pi * c * r + p),
    "grid": lambda u, v, r, t, c, p: _bumps(np.maximum(np.cos(u), np.cos(v)), 0.8),
    "waves": lambda u, v, r, t, c, p: _square(u + 1.8 * np.sin(v)),
    "triangles": lambda u, v, r, t, c, p: _bumps((u / (2 * np.pi)) % 1 + (v / (2 * np.pi)) % 1, 1),
    "crosses": lambda u, v, r, t, c, p: (
        _bumps(np.minimum(abs(np.sin(u / 2)), abs(np.sin(v / 2))), 0.3)
        * _bumps(np.maximum(abs(np.sin(u / 2)), abs(np.sin(v / 2))), 0.8)
    ),
    "spokes": lambda u, v, r, t, c, p: _square(np.round(1.6 * c) * t + p),
    "bricks": lambda u, v, r, t, c, p: _bumps(
        np.maximum(np.cos(u), 2 * np.cos((v + np.pi * (np.cos(u / 2) > 0)) / 2) ** 8 - 1), 0.75
    ),
}


def make_patterns(count, size, seed):
    """The data set `patterns`: uint8 images (count, size, size, 3) and labels (count,), a pure function of its arguments.

    Scale, angle, phase, a warp, sign, contrast, a gradient of light and two muted colours are random, with a little noise,
    so that neither colour nor single pixels tell the kind: an encoder has to learn the shape.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % len(PATTERNS))
    images = np.empty((count, size, size, 3), np.uint8)
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
    x0, y0 = axis[None, None, :], axis[None, :, None]
    turn = np.float32(2 * np.pi)
    for kind, pattern in enumerate(PATTERNS.values()):
        where = np.flatnonzero(labels == kind)
        angle, p1, p2, w1, w2, w3, w4, light = turn * rng.random((8, len(where), 1, 1), np.float32)
        x = x0 + 0.12 * np.sin(5 * (np.cos(w1) * x0 + np.sin(w1) * y0) + w2)  # the warp
        y = y0 + 0.12 * np.sin(5 * (np.cos(w3) * x0 + np.sin(w3) * y0) + w4)
        scale, offset = rng.random((2, len(where), 1, 1), np.float32)
        cycles = 1.8 * 2 ** (0.7 * scale)
        u = turn * cycles * (np.cos(angle) * x + np.sin(angle) * y) + p1
        v = turn * cycles * (np.cos(angle) * y - np.sin(angle) * x) + p2
        dx, dy = x - offset / 2 * np.cos(p1), y - offset / 2 * np.sin(p1)
        value = pattern(u, v, np.hypot(dx, dy), np.arctan2(dy, dx), cycles, p2)[..., None]
        value -= value.mean((1, 2, 3), keepdims=True)  # no kind is brighter than another
        sign = rng.choice(np.float32([-1, 1]), (len(where), 1, 1, 1))
        shade = 0.3 * rng.standard_normal((len(where), 1, 1), np.float32) * (np.cos(light) * x0 + np.sin(light) * y0)
        colours = 0.5 + 0.03 * rng.standard_normal((2, len(where), 1, 1, 3), np.float32)
        contrast = rng.uniform(0.1, 0.28, (len(where), 1, 1, 1)).astype(np.float32)
        image = colours.mean(0) + shade[..., None] + sign * value * ((colours[0] - colours[1]) / 4 + contrast)
        image += 0.03 * rng.standard_normal(image.shape, np.float32)
        images[where] = (image.clip(0, 1) * 255 + 0.5).astype(np.uint8)
    return images, labels


def _readable(paths):
    """(n,) bool: which files can be decoded. Each process reads its share of them."""
    rank, world = rank_and_world()

    def is_readable(path):
        try:
            return read_image(path) is not None
        except BadImage:
            return False

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(is_readable, np.array_split(np.array(paths), world)[rank].tolist()))
    return gather_uneven(torch.tensor(found, dtype=torch.uint8, device=collective_device())).bool().tolist()


def read_folder(name, folder, classes, cache, unlabeled=None, skip_bad=False):
    """A folder a class (classes: their names) and any tree `unlabeled`; without classes, `folder` is such a tree."""
    trees = [(folder / c, i) for i, c in enumerate(classes)] or [(folder, -1)]
    trees += [(unlabeled, -1)] if unlabeled else []
    paths, labels = [], []
    for tree, label in trees:
        found = sorted(str(p) for p in tree.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
        paths, labels = paths + found, labels + [label] * len(found)
    if skip_bad and not all(good := _readable(paths)):
        bad = list(itertools.compress(paths, np.logical_not(good)))
        say(f"{len(bad)} of {len(paths)} images in {folder} cannot be read and are left out: {', '.join(bad[:5])}")
        paths, labels = (list(itertools.compress(values, good)) for values in (paths, labels))
    for tree, label in trees:
        if label not in labels:
            fail(f"no {'readable ' * skip_bad}images ({', '.join(EXTENSIONS)}) in {tree}")
    array = None
    try:
        size = image_size(paths[0])
        if cache and max(size) <= 96:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                same = all(other == size for other in pool.map(image_size, paths))
                array = np.stack(list(pool.map(read_image, paths))) if same else None
    except BadImage as error:
        fail(f"{error}; {REPLACE}")
    return ImageSet(name, labels, classes, array, paths)


def load_images(name, data_dir=None, train=True, size=32, cache=True, unlabeled=False, skip_bad=False):
    """A data set by name, or any data_dir with train/ (and val/ or test/), one folder a class.

    size: of `patterns` only, which is generated; unlabeled: also return images without labels, for pre-training; skip_bad:
    read all files first, and leave out those that cannot be decoded.
    Returns an ImageSet, or None where train is False and there is no test set. Exits with a line if there is no data.
    """
    if name not in DATASETS:
        fail(f"unknown data set '{name}': choose one of {', '.join(DATASETS)}")
    if data_dir is not None and not os.path.isdir(data_dir):
        if name in ("imagenet", "imagenet100", "folder") or os.path.exists(data_dir) or len(Path(data_dir).name) > 255:
            fail(f"--data-dir {data_dir} is not a folder")
    root = Path(data_dir or "data")
    if data_dir is not None and os.path.isdir(root / "train"):
        return _load_layout(name, root, train, cache, unlabeled, skip_bad)
    if name == "patterns":
        if data_dir is not None:
            fail(f"--data-dir {data_dir} has no train/, and patterns are generated: leave it out, or give --dataset folder")
        count, seed = (4096, 0) if train else (1024, 1)
        array, labels = make_patterns(count, size, seed)
        return ImageSet(name, labels, PATTERNS, array)
    if name in ("imagenet", "imagenet100", "folder"):
        if name == "folder" and data_dir is not None:
            return read_folder(name, root, (), cache, skip_bad=skip_bad) if train else None
        fail(f"--dataset {name} needs --data-dir DIR with train/ and val/, one folder a class")
    return _load_torchvision(name, root, train, unlabeled)


def _load_layout(name, root, train, cache, unlabeled, skip_bad):
    """train/ and val/ or test/, one folder a class (or none: no labels), and unlabeled/."""
    folder = next((root / s for s in (("train",) if train else ("val", "test")) if (root / s).is_dir()), None)
    if folder is None:
        return None
    classes, have = (sorted(p.name for p in d.iterdir() if p.is_dir() and p.name[0] != ".") for d in (root / "train", folder))
    if name == "imagenet100" and set(IMAGENET100) <= set(classes):
        classes, have = sorted(IMAGENET100), [c for c in have if c in IMAGENET100]
    if odd := sorted(set(have) ^ set(classes)):
        fail(f"{folder} and {root / 'train'} have different class folders: {', '.join(odd[:5])}")
    more = root / "unlabeled"
    return read_folder(name, folder, classes, cache, more if unlabeled and train and more.is_dir() else None, skip_bad)


def _load_torchvision(name, root, train, unlabeled):
    split = {"train": train}
    if name == "stl10":
        split = {"split": ("train+unlabeled" if unlabeled else "train") if train else "test"}
    try:
        for turn in (True, False):  # the first process of a node downloads, the others then find the files
            if turn == (int(os.environ.get("LOCAL_RANK", 0)) == 0):
                with contextlib.redirect_stdout(sys.stderr):
                    data = getattr(torchvision.datasets, name.upper())(str(root), download=True, **split)
            if dist.is_initialized():
                dist.barrier()
    except (OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        fail(f"cannot get {name} into {root} ({reason}): connect, or give --data-dir with train/ and test/ folders")
    array = data.data.transpose(0, 2, 3, 1) if name == "stl10" else data.data
    return ImageSet(name, data.labels if name == "stl10" else data.targets, data.classes, np.ascontiguousarray(array))


# ------------------------------------------------------------------- 4. views

CROP_DRAWS, COLOUR_DRAWS = 22, 11
COLOUR = ("brightness", "contrast", "saturation", "hue", "order", "gray", "sigma", "solarize", "flip")
ORDERS = torch.tensor(list(itertools.permutations(range(4))))  # of brightness, contrast, saturation, hue
RESAMPLE = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def random_resized_crop(sizes, draws, scale, ratio=(3 / 4, 4 / 3), area=None, whole=False):
    """torchvision's RandomResizedCrop for many images at once: ten tries, then the centre crop of nearest aspect.

    sizes (n, 2) heights and widths; draws (n, 22) uniform in [0, 1): ten areas, ten aspects, top, left.
    scale: range of the area fraction; area (n,): a given fraction instead of ten drawn ones; whole: if ten tries fail, the
    whole image.
    Returns (n, 4) int64 boxes (top, left, height, width) inside the image.
    """
    height, width = (sizes[:, i].astype(np.float64) for i in (0, 1))
    fraction = scale[0] + (scale[1] - scale[0]) * draws[:, :10] if area is None else np.asarray(area)[:, None]
    aspect = np.exp(np.log(ratio[0]) + (np.log(ratio[1]) - np.log(ratio[0])) * draws[:, 10:20])
    target = fraction * (height * width)[:, None]
    w, h = np.rint(np.sqrt(target * aspect)), np.rint(np.sqrt(target / aspect))
    fits = (w > 0) & (h > 0) & (w <= width[:, None]) & (h <= height[:, None])
    first, rows = fits.argmax(1), np.arange(len(sizes))
    w, h = w[rows, first], h[rows, first]
    top, left = np.floor(draws[:, 20] * (height - h + 1)), np.floor(draws[:, 21] * (width - w + 1))
    w0 = np.where((width / height > ratio[1]) & (not whole), np.rint(height * ratio[1]), width)  # the fallback
    h0 = np.where((width / height < ratio[0]) & (not whole), np.rint(width / ratio[0]), height)
    box = np.stack([top, left, h, w], 1)
    centre = np.stack([(height - h0) // 2, (width - w0) // 2, h0, w0], 1)
    return np.where(fits.any(1)[:, None], box, centre).astype(np.int64)


def random_colour(draws, jitter=(0, 0, 0, 0), jitter_p=0.0, gray_p=0.0, blur_p=0.0, sigma=(0.1, 2.0), solarize_p=0.0, flip_p=0.5):
    """Colour parameters of one view, for `colour`: draws (n, 11) uniform -> (n, 9) float32, columns as COLOUR.

    jitter: torchvision ColorJitter's (brightness, contrast, saturation, hue); the rest are probabilities, and the range
    of the blur's sigma in pixels. Identity values: factors 1, hue 0, gray 0, sigma 0, solarize 0, flip 0.
    """
    coin, b, c, s, h, order, gray, blur, sig, sol, flip = draws.T
    on = coin < jitter_p
    low, high = np.maximum(0, 1 - np.array(jitter[:3])), 1 + np.array(jitter[:3])
    factors = [np.where(on, lo + (hi - lo) * d, 1) for lo, hi, d in zip(low, high, (b, c, s), strict=True)]
    hue, blurred = np.where(on, jitter[3] * (2 * h - 1), 0), np.where(blur < blur_p, sigma[0] + (sigma[1] - sigma[0]) * sig, 0)
    columns = *factors, hue, np.floor(order * 24), gray < gray_p, blurred, sol < solarize_p, flip < flip_p
    return np.stack(columns, 1).astype(np.float32)


def cut(image, box, size, interpolation="bilinear"):
    """Cut a box (top, left, height, width) from a uint8 image (H, W, 3) and resize it, antialiased: (size, size, 3)."""
    top, left, height, width = (float(v) for v in box)
    y, x = int(top), int(left)  # resize alone would also see the pixels around the box
    image = Image.fromarray(image[y : math.ceil(top + height), x : math.ceil(left + width)])
    box = (left - x, top - y, left - x + width, top - y + height)
    return np.asarray(image.resize((size, size), RESAMPLE[interpolation], box=box))


class Views(Dataset):
    """Cuts views in the loader's workers; asked for a whole batch of (epoch, index) keys at once.

    sample(index, sizes, draws) -> (cuts, colour) is the method's: cuts is a list over views of
    (image index (n,), boxes (n, 4), output size), colour is (n, views, 9) float32 as `random_colour` gives.
    A batch is {'views': [uint8 (n, 3, S, S), ...], 'colour': (n, views, 9), 'index': (n,)}.
    """

    def __init__(self, images, sample, num_draws, seed, interpolation="bilinear"):
        self.images, self.sample, self.num_draws, self.seed, self.interpolation = images, sample, num_draws, seed, interpolation

    def __getitems__(self, keys):
        epochs, index = np.array(keys).T
        draws = uniform(self.seed, epochs, index, self.num_draws)
        cuts, colour_parameters = self.sample(index, self.images.sizes(index), draws)
        views = [np.empty((len(index), size, size, 3), np.uint8) for _, _, size in cuts]
        for row in range(len(index)):
            read = functools.cache(self.images.__getitem__)  # an image that several views use is decoded once
            for view, (image_index, boxes, size) in zip(views, cuts, strict=True):
                view[row] = cut(read(image_index[row].item()), boxes[row], size, self.interpolation)
        views = [torch.from_numpy(view).permute(0, 3, 1, 2) for view in views]
        return {"views": views, "colour": torch.from_numpy(colour_parameters), "index": torch.from_numpy(index)}


class EpochSampler:
    """Batches of (epoch, index) keys: a permutation per (seed, epoch), whole batches, this process's slice of each.

    `epoch` and `start` (the first batch, for a resumed epoch) are set before iterating.
    """

    def __init__(self, length, batch_size, seed):
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.epoch = self.start = 0

    def order(self, epoch):
        return torch.randperm(self.length, generator=generator(self.seed, epoch, 1)).tolist()

    def batch(self, step):
        """The image indices of the global batch of a step, counted over all epochs."""
        epoch, step = divmod(step, self.length // self.batch_size)
        return self.order(epoch)[step * self.batch_size : (step + 1) * self.batch_size]

    def __iter__(self):
        rank, world = rank_and_world()
        epoch, order, local = self.epoch, self.order(self.epoch), self.batch_size // world
        for step in range(self.start, self.length // self.batch_size):
            begin = step * self.batch_size + rank * local
            yield [(epoch, i) for i in order[begin : begin + local]]


def default_workers(device):
    """Loader processes for each training process: the CPU is busy enough without; a GPU gets up to 12."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return min(12, len(os.sched_getaffinity(0)) // local) if device.type == "cuda" else 0


FORK = "fork" if sys.platform == "linux" else None  # workers share the decoded images instead of copying them


def _start_worker(_):
    for number in (signal.SIGINT, signal.SIGTERM):  # the training process finishes its step and ends its workers
        signal.signal(number, signal.SIG_IGN)


def _end_workers():
    for child in multiprocessing.active_children():
        child.kill()


class Loader(DataLoader):
    """A DataLoader that says in a line what its workers died of."""

    def __iter__(self):
        try:
            batches = super().__iter__()
            if self.num_workers:  # torch's handler would raise wherever the training process is just then
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            yield from batches
        except BadImage as error:  # from a worker, with its traceback before the message
            _end_workers()
            fail(f"{str(error).strip().splitlines()[-1].removeprefix('common.BadImage: ')}; {REPLACE}")
        except RuntimeError as error:
            if "DataLoader worker (pid" not in str(error):
                raise
            _end_workers()
            reason = "out of memory, or of shared memory (/dev/shm)?"
            fail(f"{error}: {reason} The same command goes on from the last save; try fewer --workers")


def make_loader(dataset, sampler, workers, device):
    """A DataLoader over batches of keys; its workers live as long as the run."""
    options = dict(collate_fn=default_convert, pin_memory=device.type == "cuda", worker_init_fn=_start_worker)
    if workers:
        atexit.register(_end_workers)  # they ignore SIGTERM, by which Python ends its children: it would wait for ever
        options |= dict(num_workers=workers, persistent_workers=True, multiprocessing_context=FORK)
    return Loader(dataset, batch_sampler=sampler, **options)


def _per_image(value, x):
    return torch.as_tensor(value, dtype=x.dtype, device=x.device).reshape(-1, 1, 1, 1)


def adjust_brightness(x, brightness_factor):
    """Each image times its factor (N,), clamped to [0, 1]."""
    return (x * _per_image(brightness_factor, x)).clamp_(0, 1)


def adjust_contrast(x, contrast_factor):
    """Blend with the image's mean gray; factor (N,)."""
    mean = rgb_to_grayscale(x).mean((1, 2, 3), keepdim=True)
    return torch.lerp(mean, x, _per_image(contrast_factor, x)).clamp_(0, 1)


def adjust_saturation(x, saturation_factor):
    """Blend with the image's gray version; factor (N,)."""
    return torch.lerp(rgb_to_grayscale(x), x, _per_image(saturation_factor, x)).clamp_(0, 1)


def adjust_hue(x, hue_factor):
    """Rotate the hue by factor (N,) in [-0.5, 0.5] turns, value and saturation kept."""
    value, low = x.amax(1), x.amin(1)
    chroma = value - low
    r, g, b = x.unbind(1)
    safe = torch.where(chroma > 0, chroma, 1)
    sixth = torch.where(value == r, (g - b) / safe, torch.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe))
    sixth = sixth + 6 * _per_image(hue_factor, x)[:, 0]
    # A channel is value - chroma * clamp(min(k, 4 - k), 0, 1), k = (offset + sixths of a turn) mod 6.
    k = (sixth.unsqueeze(1) + torch.arange(5, 0, -2, dtype=x.dtype, device=x.device).view(1, 3, 1, 1)) % 6
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(k, 4 - k).clamp_(0, 1)


def gaussian_blur(x, sigma):
    """A true Gaussian with reflected borders; sigma (N,) in pixels, 0 leaves an image as it is.

    Blurring a row is a product with an (W, W) matrix that already holds the reflections, so a batch with a different
    sigma for each image is two batched matrix products.
    """

    def matrix(n):
        i = torch.arange(n, dtype=x.dtype, device=x.device)
        d = i[:, None] - i
        mirrored = torch.stack([i[:, None] + i, 2 * (n - 1) - i[:, None] - i])
        edge = torch.stack([i == 0, i == n - 1])[:, None, :]  # an edge pixel is not repeated
        scale = -0.5 / torch.as_tensor(sigma, dtype=x.dtype, device=x.device).clamp_min(1e-3).reshape(-1, 1, 1) ** 2
        weight = torch.exp(scale * d**2) + (torch.exp(scale.unsqueeze(1) * mirrored**2) * ~edge).sum(1)
        return (weight / weight.sum(-1, keepdim=True)).unsqueeze(1)

    return matrix(x.shape[2]) @ x @ matrix(x.shape[3]).transpose(-1, -2)


@functools.cache
def _constant(values, dtype, device):  # once on the device, which is then never waited for
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)


def normalize(x, mean, std):
    """Subtract mean and divide by std, each three numbers."""
    return (x - _constant(tuple(mean), x.dtype, x.device)) / _constant(tuple(std), x.dtype, x.device)


def _on(x, rows, function, *parameters):
    """Apply a function to the given rows of a batch in place (all rows: without the copies)."""
    if len(rows) == len(x):
        return function(x, *parameters)
    if len(rows):
        rows = rows.to(x.device, non_blocking=True)
        x.index_copy_(0, rows, function(x.index_select(0, rows), *(p.index_select(0, rows) for p in parameters)))
    return x


def colour(x, parameters):
    """Colour images: jitter in each one's own order, then grayscale, blur, solarize, flip.

    x uint8 (N, 3, H, W) on the device; parameters (N, 9) on the CPU, columns as COLOUR (see `random_colour`). Never
    draws; which images an operation touches is decided on the CPU, so the device is never waited for. Returns float
    in [0, 1].
    """
    x, moved = x.float().div_(255), parameters.to(x.device, non_blocking=True).float()
    p, on = (dict(zip(COLOUR, table.float().unbind(1), strict=True)) for table in (parameters, moved))
    jittered = (parameters[:, :4] != torch.tensor([1.0, 1, 1, 0])).any(1, keepdim=True)
    steps = ORDERS[p["order"].long()]  # (N, 4): which of the four comes first, second, ...
    # Hue costs most, so all are turned at once, in turn 0; turns below 0 are what comes before it in an image's order.
    turns = torch.arange(4) - (steps == 3).long().argmax(1, keepdim=True)
    functions = adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue
    for turn, (step, function) in itertools.product(range(-3, 4), enumerate(functions)):
        rows = torch.nonzero((jittered & (steps == step) & (turns == turn)).any(1)).flatten()
        x = _on(x, rows, function, on[COLOUR[step]])
    x = _on(x, torch.nonzero(p["gray"]).flatten(), lambda v: rgb_to_grayscale(v).repeat(1, 3, 1, 1))
    x = _on(x, torch.nonzero(p["sigma"]).flatten(), gaussian_blur, on["sigma"])
    x = _on(x, torch.nonzero(p["solarize"]).flatten(), lambda v: solarize(v, 0.5))
    return _on(x, torch.nonzero(p["flip"]).flatten(), lambda v: v.flip(-1))


def colour_views(batch, device):
    """A batch of `Views` -> list of its views (n, 3, H, W), moved to the device and coloured, float in [0, 1].

    Views of one size are coloured in one pass, which costs a GPU fewer launches.
    """
    views = [v.to(device, non_blocking=True) for v in batch["views"]]
    for size in {v.shape[-1] for v in views}:
        same = [i for i, v in enumerate(views) if v.shape[-1] == size]
        x = colour(torch.cat([views[i] for i in same]), batch["colour"][:, same].transpose(0, 1).flatten(0, 1))
        for i, view in zip(same, x.chunk(len(same)), strict=True):
            views[i] = view
    return views


# -------------------------------------------------------------- 5. evaluation


class CentreCrops(Dataset):
    """Images as an evaluation sees them: as they are where the size fits, else 256/224 of it and its centre crop."""

    def __init__(self, images, size, interpolation="bilinear"):
        self.images, self.size, self.interpolation = images, size, interpolation

    def __getitem__(self, i):
        image = self.images[i]
        height, width = image.shape[:2]
        if (height, width) != (self.size, self.size):
            side = min(height, width) * 224 / 256  # the centre that a resize to 256/224 and a centre crop leave
            image = cut(image, ((height - side) / 2, (width - side) / 2, side, side), self.size, self.interpolation)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def gather_uneven(x):
    """Concatenate a tensor over the processes, in rank order, where each may hold another number of rows."""
    _, world = rank_and_world()
    if world == 1:
        return x
    count = torch.tensor([len(x)], device=x.device)
    counts = [torch.zeros_like(count) for _ in range(world)]
    dist.all_gather(counts, count)
    padded = torch.cat([x, x.new_zeros(int(max(counts)) - len(x), *x.shape[1:])])
    gathered = padded.new_empty(world, *padded.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), padded)
    return torch.cat([part[: int(n)] for part, n in zip(gathered, counts, strict=True)])


@torch.no_grad()
def extract_features(encoder, images, info, device, batch_size=256, workers=0, amp=False):
    """Features of every image in evaluation mode: (n, d) float32 on the CPU, in order, on every process.

    info: image_size, mean, std, interpolation, as in backbone.pt. Each process encodes its part. The encoder's weights
    and statistics are compared before and after.
    """
    rank, world = rank_and_world()
    before, training = {k: v.clone() for k, v in encoder.state_dict().items()}, encoder.training
    encoder.eval()
    part = torch.arange(len(images)).tensor_split(world)[rank]
    rows = part.tolist() or [0]  # a process without images encodes one for the rows' width, and drops it
    data = torch.utils.data.Subset(CentreCrops(images, info["image_size"], info["interpolation"]), rows)
    atexit.register(_end_workers)
    options = dict(num_workers=workers, multiprocessing_context=FORK if workers else None, worker_init_fn=_start_worker)
    loader = Loader(data, batch_size, pin_memory=device.type == "cuda", **options)
    features = []
    for batch in loader:
        x = normalize(batch.to(device, non_blocking=True).float().div_(255), info["mean"], info["std"])
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            features.append(encoder(x).flatten(1).float())
    features = torch.cat(features)[: len(part)]
    encoder.train(training)
    for key, value in encoder.state_dict().items():
        if not torch.equal(before[key].nan_to_num(), value.nan_to_num()):
            raise RuntimeError(f"evaluation changed the frozen encoder: {key}")
    return gather_uneven(features).cpu()


@torch.no_grad()
def knn_scores(train_x, train_y, test_x, ks, temperature, num_classes):
    """Weighted k-nearest-neighbour class scores for several k at once.

    train_x (n, d) and test_x (m, d) are L2-normalised here; train_y (n,) int64. A neighbour votes for its class with
    exp(cosine / temperature), scaled so that the nearest one's vote is 1. k above n counts all. Exact but
    for the rounding of matrix products (TF32 on a GPU while training), in chunks of bounded memory; the test images are shared
    out over the processes. Returns {k: (m, num_classes) float32, CPU}.
    """
    rank, world = rank_and_world()
    device, ks = train_x.device, tuple(dict.fromkeys(ks))
    bank = F.normalize(train_x.float(), dim=1).T
    largest = min(max(ks), len(train_x))
    queries = F.normalize(test_x.float(), dim=1).tensor_split(world)[rank]
    scores = {k: [torch.zeros(0, num_classes, device=device)] for k in ks}
    for chunk in queries.split(max(1, 2**26 // max(1, len(train_x)))):
        similarity, nearest = (chunk @ bank).topk(largest, dim=1)
        vote = ((similarity - similarity[:, :1]) / temperature).exp()
        label = train_y.to(device)[nearest]
        for k in ks:
            score = torch.zeros(len(chunk), num_classes, device=device)
            scores[k].append(score.scatter_add_(1, label[:, :k], vote[:, :k]))
    return {k: gather_uneven(torch.cat(parts)).cpu() for k, parts in scores.items()}


def knn_predict(train_x, train_y, test_x, k, temperature, num_classes):
    """The class with the highest weighted k-nearest-neighbour score: (m,) int64. Arguments as `knn_scores`."""
    return knn_scores(train_x, train_y, test_x, (k,), temperature, num_classes)[k].argmax(1)


def knn_accuracy(encoder, train, test, info, device, ks=(20, 200), temperature=0.07, workers=0, amp=False):
    """Top-1 accuracy in percent for each k: {k: float}. The bank is the labelled training set, augmented by nothing."""
    train, truth = train.labelled(), torch.from_numpy(test.labels)
    train_x, test_x = (extract_features(encoder, part, info, device, 256, workers, amp).to(device) for part in (train, test))
    scores = knn_scores(train_x, torch.from_numpy(train.labels), test_x, ks, temperature, len(train.classes))
    return {k: 100 * (s.argmax(1) == truth).float().mean().item() for k, s in scores.items()}


def knn_floors(encoder, train, test, info, device, **options):
    """What a trained encoder has to beat: kNN (k = 20) of raw pixels and of the given untrained encoder."""
    pixels = nn.AvgPool2d(max(1, info["image_size"] // 32))
    found = [knn_accuracy(e, train, test, info, device, **options)[20] for e in (pixels, encoder)]
    say(f"floors, kNN (k = 20): raw pixels {found[0]:.1f} %, this encoder untrained {found[1]:.1f} %")
    return dict(zip(("knn20_top1_pixels", "knn20_top1_untrained"), found, strict=True))


@torch.no_grad()
def embedding_health(q, k):
    """Label-free figures that show collapse, of unit embeddings q and their positives k, both (n, d).

    std: mean per-dimension standard deviation times sqrt(d), 1 on a uniform sphere, 0 collapsed; rank: effective rank,
    exp of the singular values' entropy, at most min(n, d); alignment: mean squared distance of positives; uniformity:
    log mean exp(-2 squared distance) of pairs, -4 at best and 0 collapsed.
    """
    q, k = F.normalize(q.float(), dim=1), F.normalize(k.float(), dim=1)
    share = torch.linalg.svdvals(q - q.mean(0))
    share = share / share.sum().clamp_min(1e-12)
    pairs = torch.pdist(q) if len(q) > 1 else q.new_zeros(1)
    std, rank = (q.std(0, correction=0).mean() * q.shape[1] ** 0.5).item(), torch.special.entr(share).sum().exp().item()
    uniformity = pairs.square().mul(-2).exp().mean().log().item()
    return dict(std=std, rank=rank, alignment=(q - k).square().sum(1).mean().item(), uniformity=uniformity)


PLAIN = dict(zero_init_last=False)  # residual branches start as torchvision's and MoCo's do
ARCHS = {  # short name: (timm name, what differs from it)
    "vit_micro": ("vit_tiny_patch16_224", dict(embed_dim=64, depth=3, num_heads=2)),
    "vit_tiny": ("vit_tiny_patch16_224", {}),
    "vit_small": ("vit_small_patch16_224", {}),
    "vit_base": ("vit_base_patch16_224", {}),
    "resnet_micro": ("resnet18", dict(PLAIN, layers=(1, 1, 1, 1), channels=(16, 32, 64, 128), stem_type="deep", stem_width=8)),
    "resnet18": ("resnet18", PLAIN),
    "resnet34": ("resnet34", PLAIN),
    "resnet50": ("resnet50", PLAIN),
}


def backbone_info(arch, image_size, patch_size, norm=IMAGENET_NORM, interpolation="bilinear", **more):
    """What backbone.pt says of an encoder besides its weights: how timm builds it, and what its images are like.

    arch: a name of ARCHS or any timm model. Plain ResNets get the 3 x 3 stem for images of up to 64 px (except resnet_micro,
    which is to be fast on a CPU); ViTs the given patch, MoCo v3's initialisation (except of the patch embedding, which timm
    leaves out), and a position embedding that is interpolated for other image sizes.
    """
    if arch not in ARCHS and not timm.is_model(arch):
        fail(f"unknown --arch {arch}: give {', '.join(ARCHS)}, or a timm model")
    name, kwargs = ARCHS.get(arch, (arch, {}))
    kwargs = {**kwargs, "num_classes": 0}
    if name.startswith(("vit_", "deit")):
        if image_size % patch_size:
            fail(f"--patch-size {patch_size} does not divide --image-size {image_size}")
        kwargs |= dict(img_size=image_size, patch_size=patch_size, weight_init="moco", dynamic_img_size=True)
    plain = name.removeprefix("resnet").isdigit()  # resnet26d, resnetv2_50, ... have stems of their own
    stem = "3x3" if plain and image_size <= 64 and arch != "resnet_micro" else "timm"
    info = dict(timm_name=name, create_kwargs=kwargs, stem=stem, image_size=image_size, mean=norm[0], std=norm[1])
    return {**info, "interpolation": interpolation, **more}


def build_backbone(info, **more):
    """The untrained timm model without classifier that `info` describes, (N, 3, H, W) -> (N, width); more: for timm."""
    try:
        backbone = timm.create_model(info["timm_name"], **info["create_kwargs"], **more).eval()
        with torch.no_grad():
            backbone(torch.zeros(1, 3, info["image_size"], info["image_size"]))
    except (TypeError, AssertionError, RuntimeError) as error:
        fail(f"timm's {info['timm_name']} does not work with these arguments and image size: {' '.join(str(error).split())}")
    backbone.train()
    if info["stem"] == "3x3":  # no 7 x 7 convolution and no max-pool, as CIFAR work has it
        backbone.conv1 = nn.Conv2d(3, backbone.conv1.out_channels, 3, padding=1, bias=False)
        backbone.maxpool = nn.Identity()
    return backbone


def load_backbone(path, encoder=None):
    """Load a pre-trained backbone from a run folder, a last.pt or a backbone.pt.

    encoder: 'query' or 'momentum'; by default the one the method's authors evaluate, which is what backbone.pt holds.
    Returns (module in evaluation mode, info); info has image_size, mean, std, interpolation, method, encoder, timm_name,
    create_kwargs, stem. Every key must match. Exits with a line if the file does not fit.
    """
    path = Path(path) / ("backbone.pt" if encoder is None else "last.pt") if os.path.isdir(path) else Path(path)
    if not os.path.isfile(path):
        fail(f"no checkpoint at {path}: give a run folder, a last.pt or a backbone.pt")
    state = load_checkpoint(path)
    try:
        if "backbone" in state:  # last.pt holds both encoders
            info = dict(state["backbone"], encoder=encoder or state["backbone"]["encoder"])
            prefix = {"query": "backbone.", "momentum": "momentum_backbone."}[info["encoder"]]
            weights = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
        else:
            info, weights = {k: v for k, v in state.items() if k != "state_dict"}, state["state_dict"]
            if encoder not in (None, info["encoder"]):
                fail(f"{path} holds the {info['encoder']} encoder only: give last.pt for the {encoder} encoder")
        [float(v) for v in (*info["mean"], *info["std"])]  # numbers, or an error
        known = info["interpolation"] in RESAMPLE and isinstance(info["timm_name"], str) and isinstance(info["method"], str)
        if len(info["mean"]) != 3 or len(info["std"]) != 3 or not known:
            raise ValueError("a value is of the wrong kind")
        backbone = build_backbone(info)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        fail(f"{path} is not a checkpoint of this project: {type(error).__name__} {error}")
    try:
        backbone.load_state_dict(weights, strict=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        fail(f"{path} does not fit {info['timm_name']}: {' '.join(str(error).split())[:600]}")
    return backbone.eval(), info


# --------------------------------------------------------- 6. files of a run

# Flags that may change when a run goes on.
OPERATING = "data_dir no_cache max_steps out resume save_every keep_every knn_every device amp bf16 compile workers".split()
OPERATING += ["grad_checkpoint", "tensorboard", "show_views"]


def cannot_write(path, error):
    reason = " ".join(str(error).split())
    fail(f"cannot write {path} ({reason}): is the disk full? Nothing that was there is lost; the same command goes on from it")


def write_whole(path, write):
    """Call write(temporary path), flush it to the disk and put it in place in one step: whole or not at all."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, (OSError, RuntimeError)):  # torch's writer turns one into the other
            cannot_write(path, error)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name, too, has to reach the disk
    os.fsync(folder)
    os.close(folder)


def _digest(path, length):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while length > 0 and (block := file.read(min(length, 2**24))):
            digest.update(block)
            length -= len(block)
    return digest.hexdigest().encode()


def _intact(path):
    """Whether the checksum at the end of a checkpoint fits; None for a file that has none (one that was cut off, say)."""
    body = os.path.getsize(path) - 66
    with open(path, "rb") as file:
        file.seek(max(0, body))
        tail = file.read()
    return tail[2:] == _digest(path, body) if tail[:2] == struct.pack("<H", 64) else None


def save_checkpoint(path, state, keep_previous=False):
    """torch.save with a checksum: a SHA-256 as the zip archive's comment, so any torch.load still reads the file.

    keep_previous: the file that was there becomes NAME.prev.pt.
    """
    path = Path(path)

    def write(temporary):
        torch.save(state, temporary)
        body = temporary.stat().st_size - 2  # a zip ends with the length of its comment, which is 0 so far
        comment = _digest(temporary, body)
        with open(temporary, "rb+") as file:
            file.seek(body)
            file.write(struct.pack("<H", len(comment)) + comment)
        if keep_previous and path.exists() and _intact(path):
            os.replace(path, path.with_name(path.stem + ".prev" + path.suffix))

    write_whole(path, write)


def read_checkpoint(path):
    """The state in a file, or a RuntimeError that says in words why it cannot be used. Loads tensors and plain data only."""
    if _intact(path) is False:
        raise RuntimeError(f"{path} is damaged: its checksum does not fit")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise RuntimeError(f"{path} cannot be read as a checkpoint: {reason[0] if reason else type(error).__name__}") from error
    if not isinstance(state, dict):
        raise RuntimeError(f"{path} is not a checkpoint of this project")
    return state


def load_checkpoint(path):
    """`read_checkpoint`, falling back with a line to NAME.prev.pt; exits with a line if neither can be used."""
    path = Path(path)
    previous = path.with_name(path.stem + ".prev" + path.suffix)
    for candidate in (path, previous):
        try:
            return read_checkpoint(candidate)
        except (RuntimeError, OSError) as error:
            if candidate == previous or not previous.exists() or lacks_memory(error):
                fail(str(error))
            say(f"warning: {error}; going on from {previous}")


def read_metrics(path):
    """The records of a metrics.jsonl; what is none, as a last line that was cut off, is left out."""
    records = []
    for line in Path(path).read_text(errors="replace").splitlines() if Path(path).is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [r for r in records if isinstance(r, dict) and isinstance(r.get("step", 0), int)]


def write_metrics(out, record, epochs, tensorboard=False):
    """Add one JSON object to metrics.jsonl, flushed to the disk, and say an epoch's line; from the first process."""
    if rank_and_world()[0]:
        return
    try:
        with open(Path(out) / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        cannot_write(file.name, error)
    if "epoch" in record:
        shown = "  ".join(f"{k} {v:.4g}" for k, v in record.items() if k not in ("epoch", "step"))
        say(f"epoch {record['epoch']}/{epochs}  {shown}")
    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(out) as writer:
            for name in (k for k, v in record.items() if isinstance(v, float)):
                writer.add_scalar(name, record[name], record["step"])


def open_run(out, config, resume="auto"):
    """Find out, before any work, what to do with --out: the checkpoint to go on from, or None for a new run.

    A folder with the same configuration (OPERATING flags apart) goes on; another configuration, or files that are not a
    run's, end with a line. Nothing is written.
    """
    out = Path(out)
    config = json.loads(json.dumps(config))
    last = next((out / n for n in ("last.pt", "last.prev.pt") if os.path.exists(out / n)), None)
    if resume not in ("auto", "none") and not os.path.isfile(resume):
        fail(f"--resume {resume}: no such file; give auto, none or a last.pt")
    parent = next(p for p in (out, *out.absolute().parents) if os.path.exists(p))
    if not parent.is_dir() or not os.access(parent, os.W_OK) or max(len(os.fsencode(p)) for p in out.parts or ".") > 255:
        fail(f"--out {out} cannot be written: {parent} is not a folder that you may write to, or a name is too long")
    if os.path.exists(out) and any(p.suffix != ".tmp" for p in out.iterdir()):  # a kill may leave an unfinished file
        if resume == "none":
            fail(f"--out {out} is not empty: --resume none needs a new or empty folder")
        try:
            old = {**json.loads((out / "config.json").read_text())}  # an object, or a TypeError
        except (OSError, ValueError, TypeError):
            fail(f"--out {out} is not empty and has no readable config.json: give a new folder")
        names = sorted((set(old) | set(config)) - set(OPERATING))
        different = [f"{n} was {old.get(n)}, is {config.get(n)}" for n in names if old.get(n) != config.get(n)]
        if different:
            fail(f"--out {out} holds another configuration ({'; '.join(different)}): give another --out, or the same flags")
    elsewhere = Path(resume).resolve().parent != out.resolve()  # the same command again: --out has gone on since
    return {"auto": last, "none": None}.get(resume, last if last and elsewhere else Path(resume))


def begin_run(out, config, checkpoint, step):
    """Make the run's folder (a Path), from the first process; drop the metrics that a run which goes on will write again."""
    if rank_and_world()[0] == 0:
        if not (out / "config.json").exists():
            write_whole(out / "config.json", lambda temporary: temporary.write_text(json.dumps(config, indent=1)))
        try:
            kept = [r for r in read_metrics(out / "metrics.jsonl") if checkpoint and r.get("step", 0) <= step]
        except OSError as error:
            cannot_write(out / "metrics.jsonl", error)
        write_whole(out / "metrics.jsonl", lambda t: t.write_text("".join(json.dumps(r) + "\n" for r in kept)))


def is_finite(state):
    """Whether all numbers in the tensors of a nested state are finite."""
    if torch.is_tensor(state):
        return state.isfinite().all().item()
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return all(map(is_finite, parts))


def save_run(out, state, weights, keep=None):
    """Write backbone.pt, keep (a third name) and last.pt, from the first process; the last.pt before becomes last.prev.pt.

    last.pt comes last: a run that was killed before it writes all of them again. Weights that the last step, whose loss and
    gradient were finite, threw out of range are not saved.
    """
    if rank_and_world()[0] == 0:
        if not is_finite([value for name, value in state.items() if name != "log"]):
            fail(f"the weights are not finite after step {state['step']}, which is not saved: give a lower --lr and a new --out")
        save_checkpoint(out / "backbone.pt", state["backbone"] | {"state_dict": weights})
        if keep:
            save_checkpoint(out / keep, state)
        save_checkpoint(out / "last.pt", state, keep_previous=True)


def load_run(path, config, images):
    """The state in a last.pt; exits with a line if it is not one, or another method's, encoder's or data set's."""
    state = load_checkpoint(path)
    parts = dict.fromkeys(("config", "model", "optimizer", "log"), dict) | dict.fromkeys(("step", "images"), int)
    if not all(isinstance(state.get(name), kind) for name, kind in parts.items()) or min(state["step"], state["images"]) < 0:
        fail(f"{path} is not a last.pt of this project")
    for name in ("method", "arch", "image_size", "batch_size"):
        if state["config"].get(name) != config.get(name):
            fail(f"{path} is of {name} {state['config'].get(name)}, not {config.get(name)}")
    say(f"going on at step {state['step']}")
    if state["images"] != images:
        fail(f"{path} was trained on {state['images']} images, here are {images}: check --data-dir")
    return state


def environment(device):
    """Versions, machine and commit, for the first line of a run."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or None
    except OSError:
        commit = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {module.__name__: str(module.__version__) for module in (torch, torchvision, timm, np)}
    return {"python": platform.python_version(), **versions, "device": name, "commit": commit}


def save_grid(path, rows, labels, border=None):
    """Write rows of images as one PNG. rows: list of (n, 3, H, W) float in [0, 1]; labels: a text per row.

    border: list per row of n colours ('green', 'red', ...) or None. Small images are enlarged without smoothing.
    """
    size, gap = max(row.shape[-1] for row in rows), 6
    side, left = size * max(1, 96 // size), gap + max(8 * len(text) for text in labels)
    sheet = Image.new("RGB", (left + max(len(r) for r in rows) * (side + gap), gap + len(rows) * (side + gap)), "white")
    draw = ImageDraw.Draw(sheet)
    for r, row in enumerate(rows):
        top = gap + r * (side + gap)
        draw.text((gap, top + side // 2 - 6), labels[r], fill="black", font_size=12)
        for c, image in enumerate(row.detach().cpu().clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).numpy()):
            x = left + c * (side + gap)
            if border and border[r] and border[r][c]:
                draw.rectangle((x - 3, top - 3, x + side + 2, top + side + 2), fill=border[r][c])
            sheet.paste(Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST), (x, top))
    if rank_and_world()[0] == 0:
        write_whole(path, lambda temporary: sheet.save(temporary, "PNG"))
