"""Data, views and evaluation: what the method files and the evaluations share.

    1. data        load_images -> ImageSet (patterns, cifar10, ..., imagenet, folder, one's own); uniform, generator
    2. views       View declares one; ViewDataset draws and cuts in the loader; colour_views works on the device
    3. evaluation  extract_features, knn_predict, embedding_health; what both evaluations share
    4. encoders    build_backbone, load_backbone, load_published
    5. processes   start; fail, log, progress; join_processes, until_stopped
    6. flags       parse: the command line, by tables of values
    7. files       claim_folder; write_whole, write_file; load_checkpoint, others' files too

Conventions: images are RGB. Loaders give uint8 (N, 3, H, W). On the device images are float in [0, 1], then normalised.
Boxes are (top, left, height, width) in pixels. A label of -1 means "none".
"""

import argparse
import atexit
import contextlib
import copy
import ctypes
import datetime
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import zipfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_convert
from torchvision.transforms.functional import rgb_to_grayscale, solarize, to_pil_image

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


# ---------------------------------------------------------------------- 1. data


def _mix(x):
    """SplitMix64's finaliser: a bijection of uint64. Each bit of its output depends on all bits of its input."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(*keys):
    """Hash integers, or integer arrays of the same or of broadcast shapes, into one uint64 array."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _mix(state + np.asarray(key).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return state


STREAM_ORDER = 1  # what a random stream is for: a key of `generator`, so that no two draws share one


def uniform(seed, epoch, index, count):
    """Return (n, count) float64 in [0, 1), each a pure function of (seed, epoch, index, position). index: (n,) ints."""
    start = _hash(seed, 0, epoch, np.asarray(index))[:, None]  # the 0 stays, so that the numbers stay
    bits = _mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)) * 2.0**-53


def generator(*keys):
    """Return a torch CPU generator that is seeded by a hash of integer keys, for example (seed, step, stream)."""
    return torch.Generator().manual_seed(int(_hash(*keys)[0] >> np.uint64(1)))


DATASETS = ("patterns", "cifar10", "cifar100", "stl10", "imagenet100", "imagenet", "folder")
NORMS = {  # name: (mean, standard deviation)
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
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
PARTS = ("train", "val", "test", "unlabeled")  # the folders of a data set
IN_MEMORY = 4 * 2**30  # bytes: small images that take more are read when they are needed
AT_ONCE = 4  # images whose views are drawn together where images are read when needed; twice as many are kept


class ImageSet:
    """Images in memory, or in files that are read when they are asked for. images[i]: uint8 (H, W, 3).

    images: a uint8 array (n, H, W, 3), or n paths, relative to the folder `root`. labels: n places in `classes`, or -1
    for none; None: no labels. classes: names; None: the numbers from 0 to the largest label. name: for messages.
    array: the images, or None if they are in files. paths: (n,) bytes in one array, which loader workers share.
    """

    def __init__(self, images, labels=None, classes=None, name="custom", root=""):
        in_memory = isinstance(images, np.ndarray) and images.ndim > 1
        self.array = images if in_memory else None
        self.paths = None if in_memory else np.array([os.fsencode(path) for path in images])
        self.name, self.root = name, os.fspath(root)
        labels = np.full(len(images), -1) if labels is None else np.asarray(labels)
        self.labels = labels.astype(np.int64, casting="same_kind")
        most = self.labels.max(initial=-1)
        self.classes = list(range(most + 1)) if classes is None else list(classes)
        are_images = not in_memory or (images.dtype == np.uint8 and images.shape[3:] == (3,))
        if not are_images or len(labels) != len(images) or most >= len(self.classes):
            fail("an ImageSet has a uint8 array (n, H, W, 3) or n paths, and n labels below the number of classes")

    def __len__(self):
        return len(self.labels)

    def __str__(self):
        return f"{self.name} {self.root}".rstrip() + f", {len(self)} images of {len(self.classes) or 'no'} classes"

    def __getitem__(self, i):
        return _recent(self, int(i)) if self.array is None else self.array[i]

    def path(self, i):
        return os.path.join(self.root, os.fsdecode(self.paths[i]))

    def sizes(self, index):
        """Return (n, 2) int64 heights and widths. An image in a file has to be decoded for it."""
        return np.array([self[i].shape[:2] for i in index])

    def subset(self, index):
        """Return the images of the given rows, in that order."""
        part = copy.copy(self)
        part.array, part.paths = (None if x is None else x[index] for x in (self.array, self.paths))
        part.labels = self.labels[index]
        return part

    def labelled(self):
        """Return those of the images that have a label."""
        return self if (self.labels >= 0).all() else self.subset(np.flatnonzero(self.labels >= 0))

    def checksum(self):
        """Return a hash of the labels and, of files, all names and the contents of 100; of an array, 1,000 images."""
        digest = hashlib.sha256(self.labels.astype("<i8").tobytes())
        count = min(len(self), 1000 if self.paths is None else 100)
        spread = np.linspace(0, len(self) - 1, count).round().astype(np.int64)
        if self.paths is None:
            digest.update(repr(self.array.shape).encode() + self.array[spread].tobytes())
        else:
            digest.update(b"\0".join(self.paths.tolist()))
            for path in map(self.path, spread):
                with reading(path):
                    digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
        return digest.hexdigest()[:16]


class BadImage(Exception):
    """An image that cannot be used. The message is one line, names it and says why."""


@contextlib.contextmanager
def reading(path):
    """Inside, every error becomes a BadImage that names the file, in the error's own words."""
    try:
        yield
    except Exception as error:  # a damaged image may raise anything
        message = f"cannot read the image {path}: {str(error) or type(error).__name__}"
        raise BadImage(message.replace("\n", "\\n")) from error


@functools.lru_cache(2 * AT_ONCE)  # small: a photograph of 12 megapixels is 36 MB
def _recent(images, i):
    return read_image(images.path(i))


def read_image(path):
    """Return an image file as uint8 (H, W, 3), turned as its EXIF says. Raises BadImage if it cannot be read."""
    with reading(path), Image.open(path) as image:
        image.load()
        with contextlib.suppress(Exception):  # an orientation that cannot be read counts as none
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith(("I", "F")):  # `convert` would clip them
            raise ValueError(f"values of mode {image.mode} have no known white: convert it to 8 bits per channel")
        return np.asarray(image.convert("RGB"))


def _square(x):
    return np.tanh(np.sin(x) / 0.15)  # a soft square wave


def _bumps(x, threshold, softness=0.1):
    return np.tanh((x - threshold) / softness)


# Ten kinds: u, v are rotated coordinates in radians; r, t polar ones; c the cycles an image; p a phase.
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
    """Return the data set `patterns`: uint8 images (count, size, size, 3) and labels (count,).

    Neither color nor single pixels tell the kind: an encoder has to learn the shape.
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
        colors = 0.5 + 0.03 * rng.standard_normal((2, len(where), 1, 1, 3), np.float32)
        contrast = rng.uniform(0.1, 0.28, (len(where), 1, 1, 1)).astype(np.float32)
        image = colors.mean(0) + shade[..., None] + sign * value * ((colors[0] - colors[1]) / 4 + contrast)
        image += 0.03 * rng.standard_normal(image.shape, np.float32)
        images[where] = (image.clip(0, 1) * 255 + 0.5).astype(np.uint8)
    return images, labels


def find_images(folder, above=()):
    """Yield the paths of all images below a folder: its own first, then those of its folders, by name.

    Hidden names and a NAS's thumbnails (@eaDir) are passed over. A link to a folder that holds it is not followed.
    above: the real paths of the folders in which this one is being listed.
    """
    above, folders = (*above, Path(folder).resolve()), []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name[0] == "." or entry.name == "@eaDir":
            continue
        if entry.is_dir():
            target = Path(entry.path).resolve() if entry.is_symlink() else None
            if target is None or not any(path.is_relative_to(target) for path in above):
                folders.append(entry.path)
        elif entry.is_file():  # not a named pipe, which would be waited for
            if entry.name.lower().endswith(EXTENSIONS):
                yield entry.path
        elif not os.path.exists(entry.path):  # a class on a disk that is not mounted would be left out in silence
            fail(f"{entry.path} is a link that leads nowhere: mount its disk, or remove the link")
    for path in folders:
        yield from find_images(path, above)


def list_folder(name, root, part, unlabeled):
    """Return the images of root/part: (paths below root, labels, names of the classes, which are its folders).

    part: train, val, test, or "" for all images of root, without labels. unlabeled: add those of root/unlabeled.
    """
    top = os.path.join(root, part, "")
    found = [path[len(top) :] for path in find_images(top)]
    folders = [path.split(os.sep)[0] if part and os.sep in path else "" for path in found]
    classes = sorted({*folders} - {""})
    if not found or (classes and "" in folders):
        fail(f"{top} needs one folder per class, or only images: {' '.join(EXTENSIONS)}")
    if name == "imagenet100" and len(classes) not in (0, 100):
        if lacking := sorted({*IMAGENET100} - {*classes}):
            fail(f"{root}: {len(classes)} classes, without {lacking[0]}: imagenet100 needs its classes, or 100 others")
        classes = sorted(IMAGENET100)
    number = {folder: label for label, folder in enumerate(classes)} or {"": -1}
    paths = [os.path.join(part, path) for path, folder in zip(found, folders, strict=True) if folder in number]
    labels = [number[folder] for folder in folders if folder in number]
    if unlabeled:
        paths += [path[len(os.path.join(root, "")) :] for path in find_images(os.path.join(root, "unlabeled"))]
        labels += [-1] * (len(paths) - len(labels))
    return paths, labels, classes


def at_most_images(batch_size, root):
    """Return a batch size, or the number of a folder's training images, if there are fewer: as many on each process."""
    parts = [os.path.join(root, part) for part in ("train", "unlabeled")]
    folders = [part for part in parts if os.path.isdir(part)] if os.path.isdir(parts[0]) else [root]
    found = itertools.islice(itertools.chain(*map(find_images, folders)), batch_size)
    count, world = len([*found]), rank_and_world()[1]
    return count - count % world if 0 < count < batch_size else batch_size  # 0: torchvision's files, or an error later


def decode_all(images):
    """Return the images as one array (n, H, W, 3), or None if they are not all of one size."""
    array = np.empty((len(images), *images[0].shape), np.uint8)
    for i in range(len(images)):
        if (image := images[i]).shape != array.shape[1:]:
            return None
        array[i] = image
        if (i + 1) % 1000 == 0 or i + 1 == len(images):
            progress(f"reading images: {i + 1} of {len(images)}")
    return array


def read_folder(name, root, part="", unlabeled=False):
    """Return `list_folder`'s images. Those of one size of up to 96 px are decoded at once, up to IN_MEMORY."""
    paths, labels, classes = from_first(lambda: list_folder(name, os.fspath(root), part, unlabeled))
    images = ImageSet(paths, labels, classes, name, root)
    if max((first := images[0]).shape) <= 96 and len(images) * first.nbytes <= IN_MEMORY:
        images.array = decode_all(images)
    return images


def load_images(name, data_dir=None, train=True, size=32, unlabeled=False):
    """Return a data set by name, or any data_dir with train/, and val/ or test/; None if there is no test set.

    size: of `patterns`, which is generated. unlabeled: also return images without labels, for pre-training. Downloads
    only into the folder data/, an empty folder, or one with torchvision's files.
    """
    if data_dir is not None and not os.path.isdir(data_dir):
        fail(f"--data-dir {data_dir} {'is not a folder' if os.path.exists(data_dir) else 'does not exist'}")
    # A link that leads nowhere counts as a folder, so that it is an error when it is to be read
    there = os.scandir(data_dir) if data_dir else ()
    names = [entry.name for entry in there if entry.is_dir() or not os.path.exists(entry.path)]
    if "train" in names:
        others = [n for n in names if n not in PARTS and n[0] != "." and next(find_images(Path(data_dir, n)), None)]
        if others:
            fail(f"{data_dir} has images in {', '.join(others)}: beside train/ only val/, test/, unlabeled/ are read")
        part = "train" if train else "val" if "val" in names else "test"
        more = unlabeled and train and "unlabeled" in names
        return read_folder(name, data_dir, part, more) if part in names else None
    if data_dir and name == "folder":
        if odd := [n for n in names if n.lower() in ("train", "training", "val", "validation", "test", "testing")]:
            fail(f"{data_dir} has {', '.join(odd)}: name them train/, and val/ or test/ beside it")
        return read_folder(name, data_dir) if train else None
    if name == "folder":
        fail("--dataset folder: give --data-dir DIR, any tree of images")
    if name in ("imagenet", "imagenet100") or (data_dir and name == "patterns"):
        fail(f"--dataset {name}: give --data-dir DIR with train/, and val/ or test/; or --dataset folder")
    if name == "patterns":
        array, labels = make_patterns(4096, size, seed=0) if train else make_patterns(1024, size, seed=1)
        return ImageSet(array, labels, PATTERNS, name)
    return _load_torchvision(name, data_dir or "data", train, unlabeled)


def _load_torchvision(name, root, train, unlabeled):
    there = [entry for entry in os.listdir(root) if entry[0] != "."] if os.path.isdir(root) else []
    if there and root != "data" and not any(entry.startswith(("cifar", "stl10")) for entry in there):
        fail(f"--data-dir {root} has neither train/ nor torchvision's files of {name}: give an empty folder to fill")
    split = {"train": train}
    if name == "stl10":
        split = {"split": ("train+unlabeled" if unlabeled else "train") if train else "test"}
    try:
        for turn in range(3):  # the first process of all downloads, then each node's first; the others find the files
            if turn == sum(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK")):
                data = getattr(torchvision.datasets, name.upper())(root, download=True, **split)
            if dist.is_initialized():
                dist.barrier()
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        fail(f"cannot get {name} into {root} ({reason}): connect, or give --data-dir with train/ and test/ folders")
    if name == "stl10":
        return ImageSet(data.data.transpose(0, 2, 3, 1), data.labels, data.classes, name)
    return ImageSet(data.data, data.targets, data.classes, name)


def check_labels(train, test):
    """Exit with an error message unless both sets have labels, of the same classes, two of them at least."""
    trained = np.unique(train.labels[train.labels >= 0])
    if test is None or len(trained) < 2 or not np.isin(trained, test.labels).any():
        layout = "--data-dir with train/ and val/ or test/, each with one folder per class"
        fail(f"judging needs a training and a test set with labels of two classes: {layout}")
    if train.classes != test.classes:
        odd = sorted({*map(str, train.classes)} ^ {*map(str, test.classes)})
        fail(f"the classes of {train} and of {test} are not the same: {', '.join(odd[:5])}")


def open_images(args, train=None, test=None):
    """Return a training's images, the flags' or a user's own: (training images, test images or None if unlabelled)."""
    if train is None and test is None:
        train = load_images(args.dataset, args.data_dir, True, args.image_size, unlabeled=True)
        test = load_images(args.dataset, args.data_dir, False, args.image_size) if len(train.classes) > 1 else None
    if test is not None:
        check_labels(train, test)
    if train.name == "patterns" and not train.root:
        gpu = f"python {args.method}.py --dataset cifar10"
        paper = f"torchrun --nproc_per_node=8 {args.method}.py --dataset imagenet --data-dir DIR"
        log(f"DEMO: these images are generated. One GPU, CIFAR-10 (downloaded): {gpu}. The paper's own run: {paper}")
    return train, test


# --------------------------------------------------------------------- 2. views

# The uniform numbers that one view takes per image: what each is for, and how many
DRAWS = dict(area=10, aspect=10, position=2, jitter_coin=1, brightness=1, contrast=1, saturation=1, hue=1, order=1)
DRAWS |= dict(gray_coin=1, blur_coin=1, sigma=1, solarize_coin=1, flip_coin=1)
VIEW_DRAWS = sum(DRAWS.values())
COLOR = ("brightness", "contrast", "saturation", "hue", "order", "gray", "sigma", "solarize", "flip")
ORDERS = torch.tensor(list(itertools.permutations(range(4))))  # of brightness, contrast, saturation, hue
RESAMPLE = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class View(NamedTuple):
    """One view of an image as a method file declares it: a random resized crop, then color changes, then a flip."""

    size: int  # pixels of the square that is cut
    area: tuple  # (lowest, highest) share of the image that is cut
    ratio: tuple  # (lowest, highest) width / height of what is cut
    jitter: tuple  # largest change of (brightness, contrast, saturation, hue), as torchvision's ColorJitter has them
    jitter_p: float  # the probability of that
    gray_p: float  # the probability of a gray image
    blur_p: float  # the probability of a Gaussian blur
    blur_sigma: tuple  # (lowest, highest) sigma of the blur, in pixels
    solarize_p: float  # the probability of inverting all values above one half
    flip_p: float  # the probability of a horizontal flip
    whole: bool = False  # what is cut where none of ten boxes fits: a centre crop, or, if True, the whole image


def random_resized_crop(sizes, area, aspect, position, ratio, whole=False):
    """Return the boxes of random crops, as torchvision's RandomResizedCrop draws them: (n, 4) int64.

    sizes: (n, 2) heights and widths. area, aspect: (n, tries) random shares of the area, and widths / heights: the
    first that fits is taken. position: (n, 2) uniform in [0, 1), of top and left. If none fits, it is the centre crop
    whose aspect ratio is nearest to `ratio` (lowest, highest) or, with `whole`, the whole image.
    """
    height, width = sizes.astype(np.float64).T
    target = area * (height * width)[:, None]
    w, h = np.rint(np.sqrt(target * aspect)), np.rint(np.sqrt(target / aspect))
    fits = (w > 0) & (h > 0) & (w <= width[:, None]) & (h <= height[:, None])
    first, rows = fits.argmax(1), np.arange(len(sizes))
    w, h = w[rows, first], h[rows, first]
    top, left = np.floor(position[:, 0] * (height - h + 1)), np.floor(position[:, 1] * (width - w + 1))
    w0 = np.where((width / height > ratio[1]) & (not whole), np.rint(height * ratio[1]), width)  # if none fits
    h0 = np.where((width / height < ratio[0]) & (not whole), np.rint(width / ratio[0]), height)
    box = np.stack([top, left, h, w], 1)
    centre = np.stack([(height - h0) // 2, (width - w0) // 2, h0, w0], 1)
    return np.where(fits.any(1)[:, None], box, centre).astype(np.int64)


def name_draws(draws):
    """Return a view's uniform numbers (n, VIEW_DRAWS) by the names of DRAWS: {"area": (n, 10), ..., "sigma": (n,)}."""
    columns = np.split(draws, np.cumsum([*DRAWS.values()])[:-1], axis=1)
    return {name: x[:, 0] if x.shape[1] == 1 else x for name, x in zip(DRAWS, columns, strict=True)}


def draw_view(view, sizes, draws, area=None, position=None, sigma=None, blur_coin=None):
    """Draw one view of n images. Return ((n, 4) int64 boxes, (n, 9) float32 color parameters with columns as COLOR).

    sizes: (n, 2) heights and widths. draws: (n, VIEW_DRAWS) uniform in [0, 1). The method's own values take the place
    of drawn ones, where they are not NaN: area, sigma: (n,); position: (n, 2), and blur_coin: (n,), uniform numbers.
    """
    draw = name_draws(draws)

    def choose(given, drawn):
        return drawn if given is None else np.where(np.isnan(given), drawn, given)

    def between(low, high, share):
        return low + (high - low) * share

    areas = choose(None if area is None else np.asarray(area)[:, None], between(*view.area, draw["area"]))
    aspects = np.exp(between(*np.log(view.ratio), draw["aspect"]))
    boxes = random_resized_crop(sizes, areas, aspects, choose(position, draw["position"]), view.ratio, view.whole)

    jittered, (*most, most_hue) = draw["jitter_coin"] < view.jitter_p, view.jitter
    factors = [
        np.where(jittered, between(max(0, 1 - m), 1 + m, draw[name]), 1)
        for name, m in zip(("brightness", "contrast", "saturation"), most, strict=True)
    ]
    hue = np.where(jittered, most_hue * (2 * draw["hue"] - 1), 0)
    blurred = choose(blur_coin, draw["blur_coin"]) < view.blur_p
    sigmas = np.where(blurred, choose(sigma, between(*view.blur_sigma, draw["sigma"])), 0)
    gray, solarized = draw["gray_coin"] < view.gray_p, draw["solarize_coin"] < view.solarize_p
    columns = *factors, hue, np.floor(draw["order"] * 24), gray, sigmas, solarized, draw["flip_coin"] < view.flip_p
    return boxes, np.stack(columns, 1).astype(np.float32)


def cut(image, box, size, interpolation="bilinear"):
    """Cut a box from a uint8 image (H, W, 3) and resize it with antialiasing to uint8 (size, size, 3)."""
    top, left, height, width = (float(v) for v in box)
    y, x = int(top), int(left)  # resize alone would also see the pixels around the box
    image = Image.fromarray(image[y : math.ceil(top + height), x : math.ceil(left + width)])
    box = (left - x, top - y, left - x + width, top - y + height)
    return np.asarray(image.resize((size, size), RESAMPLE[interpolation], box=box))


class ViewDataset(Dataset):
    """Cuts the views of images in the loader's workers. It is asked for a whole batch of (epoch, index) keys at once.

    views: list of View. Each is drawn from numbers of its own, or by `draw`, if views depend on each other:
    draw(index, sizes, draws) -> (cuts, colors), with index (n,) the rows of the images, sizes (n, 2) their heights
    and widths, draws (n, len(views) * VIEW_DRAWS + extra_draws) uniform in [0, 1); cuts: list over views of (rows (n,)
    of the images to cut from, boxes (n, 4), output size); colors: list over views of (n, 9) parameters.
    A batch is {'views': [uint8 (n, 3, S, S), ...], 'color': (n, views, 9), 'index': (n,)}.
    """

    def __init__(self, images, views, seed, interpolation="bilinear", draw=None, extra_draws=0):
        self.images, self.views, self.seed, self.interpolation = images, views, seed, interpolation
        self.draw = draw or self.draw_independently
        self.num_draws = len(views) * VIEW_DRAWS + extra_draws

    def draw_independently(self, index, sizes, draws):
        cuts, colors = [], []
        for view, view_draws in zip(self.views, np.split(draws, len(self.views), axis=1), strict=True):
            boxes, color = draw_view(view, sizes, view_draws)
            cuts.append((index, boxes, view.size))
            colors.append(color)
        return cuts, colors

    def __getitems__(self, keys):
        epochs, index = np.array(keys).T
        draws = uniform(self.seed, epochs, index, self.num_draws)
        count = AT_ONCE if self.images.array is None else len(index)
        parts = [self.cut_views(index[i : i + count], draws[i : i + count]) for i in range(0, len(index), count)]
        views, colors = zip(*parts, strict=True)
        views = [torch.from_numpy(np.concatenate(view)).permute(0, 3, 1, 2) for view in zip(*views, strict=True)]
        return {"views": views, "color": torch.from_numpy(np.concatenate(colors)), "index": torch.from_numpy(index)}

    def cut_views(self, index, draws):
        """Return the views of some images: ([uint8 (n, S, S, 3), ...], colors (n, views, 9))."""
        cuts, colors = self.draw(index, self.images.sizes(index), draws)
        views = []
        for rows, boxes, size in cuts:
            squares = [cut(self.images[i], box, size, self.interpolation) for i, box in zip(rows, boxes, strict=True)]
            views.append(np.stack(squares))
        return views, np.stack(colors, 1)


class EpochSampler:
    """Batches of (epoch, index) keys: one permutation per (seed, epoch), whole batches, this process's rows of each."""

    def __init__(self, length, batch_size, seed):
        if length < batch_size:
            fail(f"{length} images are fewer than one batch: give --batch-size {length} or less")
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.set_epoch(0)

    def set_epoch(self, epoch, first_step=0, last_step=math.inf):
        """Choose the epoch, from 0. Of the whole run first_step steps are made already, and it ends after last_step."""
        self.epoch, self.first_step, self.last_step = epoch, first_step, last_step

    def __iter__(self):
        rank, world = rank_and_world()
        epoch, local, steps = self.epoch, self.batch_size // world, self.length // self.batch_size
        order = torch.randperm(self.length, generator=generator(self.seed, epoch, STREAM_ORDER)).tolist()
        for i in range(steps):
            if self.first_step <= epoch * steps + i < self.last_step:
                begin = i * self.batch_size + rank * local
                yield [(epoch, row) for row in order[begin : begin + local]]


def workers_of(args, device):
    """--workers, or what suits: none beside a CPU that trains; for a GPU its process's share of the cores, up to 24."""
    if args.workers is not None or device.type != "cuda" or sys.platform != "linux":  # there workers are not forked
        return args.workers or 0
    return min(24, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _start_worker(_):
    for number in (signal.SIGINT, signal.SIGTERM):  # the training process finishes its step and ends its workers
        signal.signal(number, signal.SIG_IGN)


def end_workers():
    """Kill the loader workers at once. They ignore SIGTERM, by which Python would end its daemonic children."""
    if sys.platform == "linux":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or torch would report their end, after what was the error
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


class Loader(DataLoader):
    """A DataLoader that raises BadImage, with a message of one line, if an image cannot be used or no batch comes."""

    def __init__(self, data, device, workers=0, **options):
        if workers:
            atexit.register(end_workers)
            method = "fork" if sys.platform == "linux" else None  # forked workers share the decoded images
            options |= dict(num_workers=workers, multiprocessing_context=method, worker_init_fn=_start_worker)
            options["timeout"] = PATIENCE.total_seconds()  # a worker that cannot send a batch is an error, not a wait
        super().__init__(data, pin_memory=device.type == "cuda", **options)

    def speed(self, images):
        """Return how fast the loop over so many images was, and the share of its time that it waited for batches."""
        seconds = time.perf_counter() - self.began
        return dict(images_per_s=images / seconds, data_wait=self.waited / seconds)

    def __iter__(self):
        self.began = asked = time.perf_counter()
        self.waited = 0.0
        try:
            for batch in super().__iter__():
                self.waited += time.perf_counter() - asked
                yield batch
                asked = time.perf_counter()
        except BadImage as error:  # from a worker, with its traceback before the message
            raise BadImage(str(error).strip().splitlines()[-1].removeprefix("common.BadImage: ")) from None
        except (RuntimeError, OSError, EOFError) as error:  # a worker was killed, perhaps for its memory, or waits
            if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader "):
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise BadImage(f"no batch from the loader ({reason}): give fewer --workers, or more memory") from error


def make_loader(args, images, views, device, draw=None, extra_draws=0):
    """Return batches of views. draw, extra_draws: see `ViewDataset`. `batch_sampler.set_epoch` chooses the epoch."""
    data = ViewDataset(images, views, args.seed, args.interpolation, draw, extra_draws)
    sampler, workers = EpochSampler(len(images), args.batch_size, args.seed), workers_of(args, device)
    options = dict(batch_sampler=sampler, collate_fn=default_convert, persistent_workers=workers > 0)
    return Loader(data, device, workers, **options)


ADJUSTMENTS = {  # of images x by factors f (N, 1, 1, 1): multiply x, or blend it with its mean gray, or with its gray
    "brightness": lambda x, f: x * f,
    "contrast": lambda x, f: torch.lerp(rgb_to_grayscale(x).mean((1, 2, 3), keepdim=True), x, f),
    "saturation": lambda x, f: torch.lerp(rgb_to_grayscale(x), x, f),
}


def adjust(name, x, factor):
    """Change the brightness, contrast or saturation of each image by its factor (N,). Values are clamped to [0, 1]."""
    return ADJUSTMENTS[name](x, factor.view(-1, 1, 1, 1)).clamp_(0, 1)


def adjust_hue(x, factor):
    """Rotate each image's hue by its factor (N,) in [-0.5, 0.5] turns. Value and saturation stay."""
    value, low = x.amax(1), x.amin(1)
    chroma = value - low
    r, g, b = x.unbind(1)
    safe = torch.where(chroma > 0, chroma, 1)
    sixth = torch.where(value == r, (g - b) / safe, torch.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe))
    sixth = sixth + 6 * factor.view(-1, 1, 1)
    # A channel is value - chroma * clamp(min(k, 4 - k), 0, 1), k = (offset + sixths of a turn) mod 6.
    k = (sixth.unsqueeze(1) + torch.arange(5, 0, -2, dtype=x.dtype, device=x.device).view(1, 3, 1, 1)) % 6
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(k, 4 - k).clamp_(0, 1)


def gaussian_blur(x, sigma, largest=2.0):
    """Blur each image by a Gaussian of its sigma (N,), in pixels, with reflected borders. 0 leaves an image as it is.

    largest: of all sigmas. Kernels reach 5 of it, and at least 10 pixels, to each side, or as far as can be mirrored.
    """
    sigma = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).clamp_min(1e-3).view(-1, 1)
    reach = min(math.ceil(5 * max(2, largest)), x.shape[2] - 1, x.shape[3] - 1)
    weight = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device) / sigma) ** 2)
    weight = (weight / weight.sum(1, keepdim=True)).repeat_interleave(x.shape[1], 0)[:, None]  # a channel's own
    y = F.pad(x.flatten(0, 1)[None], (reach,) * 4, mode="reflect")
    y = F.conv2d(y, weight.unsqueeze(3), groups=len(weight))
    return F.conv2d(y, weight.unsqueeze(2), groups=len(weight)).view_as(x)


@functools.cache
def _constant(values, dtype, device):  # made once per device, which is then never waited for
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)


def normalize(x, mean, std):
    """Normalise images (N, 3, H, W): subtract `mean` and divide by `std`, each three numbers."""
    return (x - _constant(tuple(mean), x.dtype, x.device)) / _constant(tuple(std), x.dtype, x.device)


def _on(x, which, function, *parameters):
    """Apply a function to the images for which `which` (N,) is not 0, in place. If these are all, nothing is copied."""
    rows = torch.nonzero(which).flatten()
    if len(rows) == len(x):
        return function(x, *parameters)
    if len(rows):
        rows = rows.to(x.device, non_blocking=True)
        x.index_copy_(0, rows, function(x.index_select(0, rows), *(p.index_select(0, rows) for p in parameters)))
    return x


def color(x, parameters):
    """Color images: jitter in each image's own order, then grayscale, blur, solarize, flip. Returns float in [0, 1].

    x: uint8 (N, 3, H, W) on the device. parameters: (N, 9) on the CPU, with columns as COLOR, see `draw_view`. The CPU
    decides which images an operation touches, so the device is never waited for.
    """
    x, moved = x.float().div_(255), parameters.to(x.device, non_blocking=True).float()
    p, on = (dict(zip(COLOR, table.float().unbind(1), strict=True)) for table in (parameters, moved))
    jittered = (parameters[:, :4] != torch.tensor([1.0, 1, 1, 0])).any(1)
    order = ORDERS[p["order"].long()]  # (N, 4): which of the four comes first, second, ...
    functions = *(functools.partial(adjust, name) for name in ADJUSTMENTS), adjust_hue
    for turn, (step, function) in itertools.product(range(4), enumerate(functions)):
        x = _on(x, jittered & (order[:, turn] == step), function, on[COLOR[step]])
    x = _on(x, p["gray"], lambda v: rgb_to_grayscale(v).repeat(1, 3, 1, 1))
    x = _on(x, p["sigma"], functools.partial(gaussian_blur, largest=p["sigma"].max().item()), on["sigma"])
    x = _on(x, p["solarize"], lambda v: solarize(v, 0.5))
    return _on(x, p["flip"], lambda v: v.flip(-1))


def colour_views(batch, device, memory_format=torch.channels_last, norm=None):
    """Return a batch's views, moved to the device and colored: a list of (n, 3, H, W) float.

    batch: of `ViewDataset`. norm: (mean, std), by which they are normalised; without it they are in [0, 1].
    Views of one size are colored in one pass, which costs a GPU fewer launches.
    """
    views = [v.to(device, non_blocking=True) for v in batch["views"]]
    for size in {v.shape[-1] for v in views}:
        same = [i for i, v in enumerate(views) if v.shape[-1] == size]
        x = color(torch.cat([views[i] for i in same]), batch["color"][:, same].transpose(0, 1).flatten(0, 1))
        x = x if norm is None else normalize(x, *norm)
        for i, view in zip(same, x.chunk(len(same)), strict=True):
            views[i] = view.contiguous(memory_format=memory_format)
    return views


def save_views(path, views, names):
    """Write --show-views' picture: a row per view, with its name and its first twelve images (n, 3, H, W) in [0, 1]."""
    side, font = max(96, *(view.shape[-1] for view in views)), ImageFont.load_default(12)
    rows = [F.interpolate(view[:12].float().cpu(), side) for view in views]
    grid = to_pil_image(torchvision.utils.make_grid(torch.cat(rows), len(rows[0]), pad_value=1.0))
    left = 12 + int(max(map(font.getlength, names)))  # the names stand in a column before the rows
    sheet = Image.new("RGB", (left + grid.width, grid.height), "white")
    sheet.paste(grid, (left, 0))
    for i, name in enumerate(names):
        ImageDraw.Draw(sheet).text((6, (i + 0.5) * grid.height / len(names)), name, "black", font, "lm")
    write_whole(path, lambda temporary: sheet.save(temporary, "PNG"))
    log(f"picture written to {path}")


# ---------------------------------------------------------------- 3. evaluation


@contextlib.contextmanager
def exact_products():
    """Inside, products of float32 are not made in TF32: its 10 bits are too few for neighbours and classifiers."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


class CentreCrops(Dataset):
    """Uint8 (3, size, size). Images of another size: the shorter side becomes 256/224 of it, and the centre is cut."""

    def __init__(self, images, size, interpolation="bilinear"):
        self.images, self.size, self.interpolation = images, size, interpolation

    def __getitem__(self, i):
        image = self.images[i]
        height, width = image.shape[:2]
        if (height, width) != (self.size, self.size):
            side = min(height, width) * 224 / 256
            image = cut(image, ((height - side) / 2, (width - side) / 2, side, side), self.size, self.interpolation)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@torch.no_grad()
def extract_features(encoder, images, info, device, batch_size=256, workers=0, amp=False, whole=True, what="features"):
    """Return the features of all images in order, (n, width) float32 on the CPU.

    encoder: maps (N, 3, H, W) to (N, width); it is used in evaluation mode. info: image_size, mean, std, interpolation,
    as in backbone.pt. batch_size: of each process. amp: encode in bf16. whole: all rows on every process, or only this
    one's (`shard`). what: for the progress line. No gradient. Exits with an error message if one is not finite.
    """
    mine = shard(torch.arange(len(images)))
    crops = CentreCrops(images, info["image_size"], info["interpolation"])
    crops = torch.utils.data.Subset(crops, mine.tolist() or [0])  # a process without images encodes one, for the width
    features = []
    with evaluation_mode(encoder):
        for i, batch in enumerate(Loader(crops, device, workers, batch_size=batch_size)):
            x = normalize(batch.to(device, non_blocking=True).float().div_(255), info["mean"], info["std"])
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                features.append(encoder(x).flatten(1).float().cpu())
            done = min((i + 1) * batch_size * rank_and_world()[1], len(images))  # processes are about equally fast
            progress(f"{what}: {done} of {len(images)} images so far")
    features = torch.cat(features)[: len(mine)]
    if not all(from_all(bool(features.isfinite().all()))):
        fail(f"the encoder's features of {images} are not all finite")
    return gather_uneven(features) if whole else features


@torch.no_grad()
@exact_products()
def knn_predict(train_x, train_y, test_x, k, temperature, num_classes):
    """Classify by weighted k-nearest neighbours: (m,) int64 on the CPU, on every process; (len(k), m) for several k.

    A neighbour votes for its class with exp(cosine / temperature) (Wu et al., arXiv 1805.01978).
    train_x: (n, d) and train_y: (n,) int64 in [0, num_classes): this process's rows of the bank, perhaps none. test_x:
    (m, d), the same and whole on every process. Both are L2-normalised here. A k above the bank's size counts all of
    it. Each process finds its nearest rows for a chunk of test images, and the nearest of these are the bank's. No
    gradient.
    """
    bank, queries = (F.normalize(x.float(), dim=1) for x in (train_x, test_x))
    train_y, ks = train_y.to(bank.device), [k] if isinstance(k, int) else k
    longest = max(from_all(len(bank)))  # all processes take the same chunks
    predicted, done = [], 0
    for chunk in queries.split(max(1, 2**26 // max(longest, num_classes))):
        similarity, row = (chunk @ bank.T).topk(min(max(ks), len(bank)), dim=1)
        similarity, label = (gather_uneven(x.T).T for x in (similarity, train_y[row]))
        similarity, column = similarity.topk(min(max(ks), similarity.shape[1]), dim=1)
        label, vote = label.gather(1, column), ((similarity - similarity[:, :1]) / temperature).exp()
        no_votes = torch.zeros(len(chunk), num_classes, device=bank.device)
        scores = [no_votes.scatter_add(1, label[:, :k], vote[:, :k]) for k in ks]
        predicted.append(torch.stack([score.argmax(1).cpu() for score in scores]))
        done += len(chunk)
        progress(f"neighbours: found for {done} of {len(queries)} images")
    predicted = torch.cat(predicted, 1)
    return predicted[0] if isinstance(k, int) else predicted


def knn_scores(train_x, train, test_x, test, ks, temperature):
    """Return {"knn20_top1": percent, ...} for each k. train_x: this process's rows (`shard`); see `knn_predict`."""
    train_y, test_y = shard(torch.from_numpy(train.labels)), torch.from_numpy(test.labels)
    predicted = knn_predict(train_x, train_y, test_x, ks, temperature, len(train.classes))
    right = (predicted == test_y).sum(1).tolist()
    return {f"knn{k}_top1": 100 * number / len(test_y) for k, number in zip(ks, right, strict=True)}


def knn_record(args, encoder, train, test, device):
    """Return `knn_scores` of a method's encoder. The bank is the labelled training images, without augmentation."""
    train, test = train.labelled(), test.labelled()
    options = dict(info=encoder_info(args), device=device, workers=workers_of(args, device), amp=args.amp == "bf16")
    train_x = extract_features(encoder, train, whole=False, what="features, train", **options)
    test_x = extract_features(encoder, test, what="features, test", **options)
    return knn_scores(train_x.to(device), train, test_x.to(device), test, (20, 200), 0.07)


@torch.no_grad()
def embedding_health(q):
    """Return two label-free figures that show collapse, {"std": float, "rank": float}, over all processes' rows.

    q: (n, d), this process's embeddings, which are L2-normalised here. std: the mean standard deviation of a dimension,
    times sqrt(d): 1 on a uniform sphere, 0 if all are equal. rank: the effective rank, exp of the singular values'
    entropy, at most min(n, d) (Roy and Vetterli, EUSIPCO 2007). No gradient.
    """
    q = F.normalize(gather_uneven(q).float(), dim=1)
    share = torch.linalg.svdvals(q - q.mean(0))
    share = share / share.sum().clamp_min(1e-12)
    std = q.std(0, correction=0).mean() * q.shape[1] ** 0.5
    return {"std": std.item(), "rank": torch.special.entr(share).sum().exp().item()}


def open_encoder(args, module=None):
    """Return (device, the encoder to judge, info), and join torchrun's process group. Fills in args.workers, args.amp.

    module: a user's own encoder. A copy of it gets the checkpoint's weights, or else those of the first process.
    """
    if (args.checkpoint or module) is None or (args.random_init and module is not None):
        fail("give RUN, a run's folder; with --random-init its encoder, one of timm's, is judged untrained")
    device, module = join_processes(args.device), copy_module(module)
    args.workers = workers_of(args, device)
    names = "image_size", "patch_size", "num_heads", "norm", "prefix"
    of_others = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.checkpoint is None:
        size, norm = args.image_size or 32, args.norm or "imagenet"
        encoder, info = module, backbone_info(None, size, None, norm, method="no run", encoder="given")
        if rank_and_world()[1] > 1:
            encoder.load_state_dict(from_first(encoder.cpu().state_dict))
    elif args.arch is None:
        if of_others:
            fail(f"{option(min(of_others))} goes with --arch: a run says its own")
        encoder, info = load_backbone(args.checkpoint, args.encoder, module)
    else:
        if args.encoder is not None or module is not None:
            fail(f"--arch {args.arch} is for a file of others: --prefix chooses its encoder, and timm builds it")
        encoder, info = load_published(args.checkpoint, args.arch, **of_others)
    if args.random_init:
        torch.manual_seed(args.seed)
        encoder, info = build_backbone(info), info | dict(encoder="untrained")
    args.amp = "bf16" if use_bf16(args.amp, device, arch_name(info), [info["image_size"]]) else "off"
    encoder = encoder.eval().to(device)
    output_width(encoder, info["image_size"])  # exits if it does not take images of this size
    return device, encoder, info


def run_folder(checkpoint):
    """Return the folder of the run that a checkpoint is of: itself, or where its file is."""
    path = Path(checkpoint)
    return path if path.is_dir() else path.parent


def open_data(args, info, train=None, test=None, labels=True):
    """Return the images of an evaluation that have labels: (training images, test images or None).

    train, test: a user's own ImageSets. Without these, --dataset and --data-dir they are the run's, and have to be the
    images that it was trained on. args gets their name and place. labels: False if there need not be any.
    """
    trained_on = None
    if train is not None or test is not None:
        args.dataset, args.data_dir = train.name, None
    else:
        if args.dataset is None and args.checkpoint:
            file = run_folder(args.checkpoint) / "config.json"
            config = json.loads(file.read_text()) if file.exists() else {}
            if "dataset" not in config:
                fail("there is no run's config.json beside the checkpoint to tell its data set: give --dataset")
            trained_on = config.get("images", {}).get("checksum") if args.data_dir is None else None
            args.dataset, args.data_dir = config["dataset"], args.data_dir or config.get("data_dir")
        args.dataset = args.dataset or "patterns"
        options = dict(size=info["image_size"], unlabeled=trained_on is not None)  # the run's own images had them, too
        train, test = (load_images(args.dataset, args.data_dir, part, **options) for part in (True, False))
        if trained_on not in (None, train.checksum()):
            fail(f"{train} are not the images that the run was trained on: give --dataset and --data-dir")
    if labels:
        check_labels(train, test)
    train, test = (x.labelled() if x is not None and x.classes else x for x in (train, test))
    return train, test


def floor_encoders(args, info, device, count):
    """Return what a trained encoder has to beat, {name: encoder}: raw pixels, and the same encoder untrained."""
    if not args.floors:
        return {}
    torch.manual_seed(args.seed)
    pixels = nn.Sequential(nn.AdaptiveAvgPool2d(min(32, info["image_size"])), nn.Flatten())
    floors = {"raw pixels": pixels} if count <= 200_000 else {}  # of training images
    if info["timm_name"] and not args.random_init:
        floors["untrained"] = build_backbone(info).to(device)
    return floors


def log_end(args, step, total_steps):
    """Say how a training that has ended goes on, or how its encoder is judged."""
    if step < total_steps:
        log(f"stopped at step {step} of {total_steps}: give a larger --max-steps, or none, to go on")
    else:
        log(f"finished. Judge it with labels: python eval_knn.py {args.out}; python eval_linear.py {args.out}")


def protocol(args, info, train, test):
    """Return what an evaluation's numbers depend on, as lines of text."""
    precision = "TF32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
    precision = "bf16" if args.amp == "bf16" else precision
    return (
        f"{info['encoder']} encoder {arch_name(info)} of {info['method']}, {precision}, features before the projector\n"
        f"train: {train}; test: {test}\n{info['image_size']} px; others: shorter side 256/224 of it, "
        f"{info['interpolation']}, centre crop; mean {tuple(info['mean'])}, std {tuple(info['std'])}"
    )


# ------------------------------------------------------------------ 4. encoders

PLAIN = dict(zero_init_last=False)  # residual branches start as torchvision's and MoCo's do
MINI = dict(PLAIN, layers=(1, 1, 1, 1), channels=(16, 32, 64, 128))
ARCHS = {  # short name: (timm name, what differs from it)
    "vit_micro": ("vit_tiny_patch16_224", dict(embed_dim=64, depth=3, num_heads=2)),
    "vit_tiny": ("vit_tiny_patch16_224", {}),
    "vit_small": ("vit_small_patch16_224", {}),
    "vit_base": ("vit_base_patch16_224", {}),
    "resnet_micro": ("resnet18", dict(MINI, stem_type="deep", stem_width=8)),
    "resnet_mini": ("resnet18", MINI),
    "resnet18": ("resnet18", PLAIN),
    "resnet34": ("resnet34", PLAIN),
    "resnet50": ("resnet50", PLAIN),
}


def is_vit(arch):
    """Return True if an architecture's name, one of ARCHS or timm's, is a ViT's."""
    return arch.startswith(("vit_", "deit"))


def named_patch(arch):
    """Return the patch size that timm's name of an encoder tells, or None."""
    found = re.search(r"patch(\d+)", arch or "")
    return int(found[1]) if found else None


def backbone_info(arch, image_size, patch_size, norm="imagenet", interpolation="bilinear", num_heads=None, **more):
    """What backbone.pt says of an encoder besides its weights: how timm builds it, and what its images are like.

    arch: a name of ARCHS, any timm model, or None for a user's own module. num_heads: of a ViT; None: timm's number.
    Plain ResNets get a 3 x 3 stem for images of up to 64 px; resnet_mini's has stride 2, and resnet_micro keeps timm's.
    timm's own ViTs get MoCo v3's initialisation, except of the patch embedding, which timm leaves out.
    """
    mean, std = NORMS[norm]
    like = dict(image_size=image_size, mean=mean, std=std, interpolation=interpolation, **more)
    if arch is None:
        return dict(timm_name=None, create_kwargs={}, stem="custom", **like)
    arch = arch.split(".")[0]  # what timm's names have after a point says whose weights they are
    if arch not in ARCHS and not timm.is_model(arch):
        fail(f"unknown --arch {arch}: give {', '.join(ARCHS)}, or a timm model")
    name, kwargs = ARCHS.get(arch, (arch, {}))
    kwargs = {**kwargs, "num_classes": 0}
    if is_vit(name):
        if image_size % patch_size:
            fail(f"--patch-size {patch_size} does not divide --image-size {image_size}")
        kwargs |= dict(img_size=image_size, patch_size=patch_size, dynamic_img_size=True)
        if timm.models.is_model_in_modules(name, ["vision_transformer", "vision_transformer_hybrid", "deit"]):
            kwargs |= dict(weight_init="moco")
    kwargs |= {} if num_heads is None else {"num_heads": num_heads}
    plain = name.removeprefix("resnet").isdigit()  # resnet26d, resnetv2_50, ... have stems of their own
    small = plain and image_size <= 64 and arch != "resnet_micro"
    stem = "timm" if not small else "3x3-s2" if arch == "resnet_mini" else "3x3"
    return dict(timm_name=name, create_kwargs=kwargs, stem=stem, **like)


def encoder_info(args):
    """Return `backbone_info` of a training's encoder, which args.evaluated says to be the query or momentum encoder."""
    arch = None if args.arch == "custom" else args.arch
    heads = getattr(args, "num_heads", "auto")
    described = dict(num_heads=None if heads == "auto" else heads, method=args.method, encoder=args.evaluated)
    return backbone_info(arch, args.image_size, args.patch_size, args.norm, args.interpolation, **described)


def arch_name(info):
    """Return the name by which --arch calls an encoder that `backbone_info` describes."""
    name, given = info["timm_name"], info["create_kwargs"].items()
    fitting = (short for short, (timm_name, more) in ARCHS.items() if timm_name == name and more.items() <= given)
    return next(fitting, name or "custom encoder")


def build_backbone(info, **more):
    """Return the untrained timm model without classifier that `info` describes: it maps (N, 3, H, W) to (N, width).

    more: further arguments for timm. Exits with an error message if the model does not take them.
    """
    try:
        backbone = timm.create_model(info["timm_name"], **info["create_kwargs"], **more)
    except (TypeError, AssertionError, RuntimeError) as error:
        fail(f"timm does not build {info['timm_name']} with {info['create_kwargs']}: {error}")
    if info["stem"] != "timm":  # no 7 x 7 convolution and no max-pool, as CIFAR work has it
        stride = 2 if info["stem"] == "3x3-s2" else 1
        backbone.conv1 = nn.Conv2d(3, backbone.conv1.out_channels, 3, stride, padding=1, bias=False)
        backbone.maxpool = nn.Identity()
    output_width(backbone, info["image_size"])
    return backbone


def load_backbone(path, encoder=None, module=None):
    """Load a pre-trained backbone from a run's folder, a last.pt or a backbone.pt: (module in evaluation mode, info).

    encoder: 'query' or 'momentum'; None: the one that the method's authors evaluate, which backbone.pt holds. module:
    gets the weights, instead of what timm builds; a user's own encoder has to be given. info: see `backbone_info`.
    """
    path = Path(path, "backbone.pt" if encoder is None else "last.pt") if Path(path).is_dir() else Path(path)
    state = load_checkpoint(path)
    info = state.get("backbone", state) if isinstance(state, dict) else {}
    if "timm_name" not in info:
        fail(f"{path} is not a checkpoint of this project: for others' give --arch NAME, say resnet50, vit_base, ...")
    if "backbone" in state:  # last.pt holds both encoders
        info = dict(info, encoder=encoder or info["encoder"])
        prefix = {"query": "backbone.", "momentum": "momentum_backbone."}[info["encoder"]]
        weights = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
    else:
        info, weights = {k: v for k, v in state.items() if k != "state_dict"}, state["state_dict"]
    if encoder not in (None, info["encoder"]) or not weights:
        fail(f"{path} does not hold the {encoder} encoder: last.pt has both, if there are two")
    if module is None and info["timm_name"] is None:
        fail(f"{path} holds a user's own encoder: give it, too, as eval_knn.main(args, encoder=MODULE)")
    backbone = build_backbone(info) if module is None else module
    with fitting(path):
        backbone.load_state_dict(weights)
    return backbone.eval(), info


def load_published(path, arch, image_size=224, patch_size=None, norm=None, num_heads=None, prefix=None):
    """Load an encoder from a checkpoint of others, as `load_backbone` returns it: (module in evaluation mode, info).

    The further arguments are those of `backbone_info` and `fitting_weights`. patch_size: None for the one in timm's
    name, or 16. norm: None for what timm knows of the weights that its name tells (....augreg_in1k), or ImageNet's.
    """
    if os.path.isdir(path):  # its own normalisation would be lost in silence
        fail(f"{path} is a folder. A run's folder says its encoder itself: leave out --arch; or give others' FILE")
    patch_size = patch_size or named_patch(arch) or 16
    info = backbone_info(arch, image_size, patch_size, norm or "imagenet", num_heads=num_heads, method=Path(path).name)
    if norm is None and "." in arch:
        try:
            known = timm.get_pretrained_cfg(arch)
        except RuntimeError:
            fail(f"timm knows no weights {arch}: leave out what stands after the point, and give --norm")
        info |= dict(mean=known.mean, std=known.std, interpolation=known.interpolation)
    backbone = build_backbone(info)
    weights, taken = fitting_weights(path, backbone, prefix, "--prefix")
    backbone.load_state_dict(weights)
    return backbone.eval(), info | {"encoder": taken.rstrip(".") or "only"}


def read_tensors(path):
    """Return the tensors of a checkpoint of others by name: {"state_dict.module.encoder_q.conv1.weight": tensor, ...}.

    The names of nested entries, and the numbers of a list's, are joined by dots. A run's folder has its backbone.pt.
    """

    def flat(name, entry):
        if isinstance(entry, np.ndarray) and entry.dtype.kind in "fiu":
            entry = torch.from_numpy(entry)
        if torch.is_tensor(entry):
            return {name: entry}
        pairs = entry.items() if isinstance(entry, dict) else enumerate(entry) if isinstance(entry, list) else ()
        return {k: x for key, part in pairs for k, x in flat(f"{name}.{key}" if name else f"{key}", part).items()}

    return flat("", load_checkpoint(Path(path, "backbone.pt") if Path(path).is_dir() else path))


# Top-level names of what changes the features, and what an encoder without it would leave out
CHANGES_FEATURES = {"cls_token", "dist_token", "reg_token", "register_tokens", "storage_tokens", "prompt_embeddings"}
CHANGES_FEATURES |= {"pos_embed", "rel_pos_bias", "rope", "norm_pre", "ln_pre", "norm_post", "fc_norm", "attn_pool"}
CHANGES_FEATURES |= {"attnpool", "global_pool", "final_conv", "act1", "layer5"}


def fitting_weights(path, encoder, prefix=None, flag="--init-prefix"):
    """Return (a state_dict for an encoder from a checkpoint of others, what stands before its names there).

    prefix: which of several encoders. flag: what a message calls it. A ViT's position embedding is resampled. Exits
    with an error message unless each tensor of the encoder is there in its shape and none is left over that would
    change the features: below the encoder's own top-level parts, or of CHANGES_FEATURES.
    """
    found, needed = read_tensors(path), encoder.state_dict()
    first = next(iter(needed))
    starts = [name.removesuffix(first) for name in found if f".{name}".endswith(f".{first}")]
    fitting = {start: sum(start + name in found for name in needed) for start in starts}
    prefixes = [start for start in starts if fitting[start] == max(fitting.values())]
    chosen = prefixes if prefix is None else [start for start in prefixes if start == prefix]
    if len(chosen) != 1:
        there = f"before {first} stands {' or '.join(map(repr, prefixes))}; {flag} chooses one"
        fail(f"{path}: {there if prefixes else f'none of its {len(found)} tensors, {[*found][:3]}, ..., is {first}'}")
    (start,) = chosen
    theirs = {name.removeprefix(start): x for name, x in found.items() if name.startswith(start)}
    theirs |= {name: x for name, x in needed.items() if name.endswith("num_batches_tracked")}  # old files have none
    if "pos_embed" in needed and "pos_embed" in theirs:
        grid, (old, new) = encoder.patch_embed.grid_size, (x["pos_embed"].shape[1] for x in (theirs, needed))
        tokens = new - math.prod(grid)  # those without a place in the grid
        if old != new and math.isqrt(max(0, old - tokens)) ** 2 == old - tokens:
            resampled = timm.layers.resample_abs_pos_embed(theirs["pos_embed"], grid, num_prefix_tokens=tokens)
            theirs["pos_embed"] = resampled
            log(f"the position embedding of {path} is resampled from {old} rows to {new}")
    kinds = {name: (x.shape, x.is_floating_point()) for name, x in theirs.items()}
    lacking = [f"{n} {[*x.shape]}" for n, x in needed.items() if kinds.get(n) != (x.shape, x.is_floating_point())]
    parts = {name.split(".")[0] for name in needed} | CHANGES_FEATURES
    unused = ("num_batches_tracked", "head.fc.weight", "head.fc.bias")  # the latter are ConvNeXt's classifier
    left = [n for n in theirs if n not in needed and n.split(".")[0] in parts and not n.endswith(unused)]
    if lacking or left:
        words = f"{len(lacking)} tensors lack, or differ in shape or type, {lacking[:3]}; left over are {left[:3]}"
        fail(f"{path} is not of this encoder: after {start!r} {words}. Try another --arch, --image-size, --patch-size")
    if not all(theirs[name].isfinite().all() for name in needed):
        fail(f"{path} has weights that are not finite")
    log(f"{path}: the encoder is {start or 'the file itself'}")
    return {name: theirs[name] for name in needed}, start


def copy_module(module, frozen=False):
    """Return a copy of a module, to be trained, or None for None. frozen: none of its parameters gets gradients.

    A module in evaluation mode is copied in training mode. deepcopy alone freezes the parameters of TorchScript.
    """
    with torch.no_grad():
        copied = copy.deepcopy(module)
    if module is not None:
        for new, old in zip(copied.parameters(), module.parameters(), strict=True):
            new.requires_grad_(old.requires_grad and not frozen)
        if not copied.training:
            copied.train()
    return copied


@contextlib.contextmanager
def evaluation_mode(module):
    """Inside, the module is in evaluation mode. Afterwards each of its parts is in the mode in which it was."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield module.eval()
    finally:
        for part, training in modes:
            part.training = training


@torch.no_grad()
def output_width(module, *sizes):
    """Return the width of an encoder, (N, 3, H, W) -> (N, width), by images of zeros of all sizes that it will see."""
    device, shapes = next((p.device for p in module.parameters()), "cpu"), []
    for size in sizes:
        try:
            with evaluation_mode(module):
                shapes.append(tuple(module(torch.zeros(1, 3, size, size, device=device)).shape))
        except Exception as error:  # a user's own module may raise anything
            fail(f"the encoder does not take images (1, 3, {size}, {size}): {' '.join(str(error).split())[:300]}")
    if len(shapes[0]) != 2 or len({*shapes}) > 1:  # for example, a ResNet without its last layer gives (1, width, 1, 1)
        fail(f"the encoder gives {shapes} for images of {sizes} px, not (1, width): end it with pooling and Flatten")
    return shapes[0][1]


def memory_format(device, arch):
    """Return the memory format of a training: channels_last, on CPUs for the encoders of ARCHS only.

    Others may crash there (torch 2.11 to 2.15): 1 x 1 convolutions of stride 2 with fewer than 8 channels, as RepVGG's.
    """
    return torch.channels_last if device.type == "cuda" or arch in ARCHS else torch.contiguous_format


def has_bf16(device):
    """Return True if the device is a GPU that computes bf16 natively. On CPUs float32 gives the same numbers on all."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def use_bf16(amp, device, arch, sizes):
    """Return True if the encoders compute in bf16: amp is 'auto', 'bf16' or 'off'; sizes: of the images, in pixels."""
    chosen = amp == "bf16" or (amp == "auto" and has_bf16(device))
    if chosen and device.type == "cpu" and min(sizes) <= 16 and not is_vit(arch):
        fail("--amp bf16 on a CPU: at 16 px and below torch's gradients of convolutions are wrong: give --amp off")
    return chosen


# ----------------------------------------------------------------- 5. processes

PATIENCE = datetime.timedelta(minutes=30)  # how long a process waits for others: one of them may be downloading
GROUPS = itertools.count()  # process groups that this program has made


def start(main, parse_args):
    """Run a script. Only here is set what concerns a whole process; `main` and an import leave it as it is."""
    torch.set_flush_denormal(True)  # denormal numbers make a CPU several times slower
    # These are about speed and names only
    warnings.filterwarnings("ignore", ".*(broadcast_buffers|Grad strides do not match|all_gather_into_tensor).*")
    try:
        args = parse_args()
        device = local_device(getattr(args, "device", "cpu"))  # a tool may have no such flag
        if device.type == "cuda":
            # The same GPUs have TF32 and bf16
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = has_bf16(device)
            torch.backends.cudnn.benchmark = True
        else:
            keep_memory()
            is_small = (getattr(args, "arch", None) or "").endswith(("_micro", "_mini"))
            if is_small and "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(1)  # a second one gives 15 %, and takes two thirds from another program
        main(args)
    except (BadImage, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        log("stopped by Ctrl-C (exit status 130); what was saved is kept")
        raise SystemExit(130) from None


def keep_memory():
    """Let glibc keep freed memory. Mapping large tensors anew would cost a CPU up to a quarter of a step."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block, however large, is mapped on its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the top of the heap stays


class Stopped(Exception):
    """A run was asked to stop, and everything is saved."""


def leaves_no_trace(main):
    """A decorator of `main`: a caller's random numbers go on as before, and only the caller's process group stays.

    A run that was asked to stop ends as others do, with status 75. After another exception the process group stays: the
    traceback holds DDP, and in torch 2.11 a DDP that is deleted after its group can hang for ever.
    """

    @functools.wraps(main)
    def run(*args, **kwargs):
        makes_group, result, status = not dist.is_initialized(), None, 0
        of_python, of_numpy = random.getstate(), np.random.get_state()
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        try:
            with torch.random.fork_rng(devices):
                result = main(*args, **kwargs)
        except Stopped:
            status = 75
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
        if makes_group and dist.is_initialized():
            dist.destroy_process_group()
        if status:
            raise SystemExit(status)
        return result

    return run


def rank_and_world():
    """Return (this process's rank, the number of processes): of the process group or, before it, of torchrun."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local_device(name):
    """Make this process's GPU the current one, if it is to have one. Return the device. name: auto, cuda or cpu."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        fail("--device cuda: torch sees no CUDA device; use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.index >= torch.cuda.device_count():
        fail(f"torch sees {torch.cuda.device_count()} GPUs: start as many processes per machine")
    torch.cuda.set_device(device)
    return device


def join_processes(name):
    """Join torchrun's process group, if there is one. Return this process's device. name: auto, cuda or cpu."""
    device = local_device(name)
    if "RANK" in os.environ and not dist.is_initialized():
        store, rank, world = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # a restart's store still holds dead workers' addresses
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        store = dist.PrefixStore(f"group {next(GROUPS)}", store)  # nor may a second group find the first one's
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # gloo: for what need not wait for a GPU
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    return device


def from_all(value):
    """Return the values of all processes as a list in rank order, on every process. Tensors must be on the CPU."""
    found = [value] * rank_and_world()[1]
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found


def from_first(make):
    """What make() returns on the main process, on every process. The others do not call it."""
    made = [make() if rank_and_world()[0] == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(made)
    return made[0]


def shard(x, dim=0):
    """This process's rows of what belongs to all processes: they share dimension `dim` out in rank order."""
    rank, world = rank_and_world()
    return x.tensor_split(world, dim)[rank]


def gather_uneven(x):
    """Concatenate a tensor (n, ...) over the processes, in rank order, where n may differ and be 0. No gradient."""
    return torch.cat([part.to(x.device) for part in from_all(x.cpu())])


@contextlib.contextmanager
def until_stopped(loader):
    """Yield the loader's batches: until they end, or a process is asked to stop, or one meets a bad image.

    Inside, SIGTERM, SIGHUP and SIGINT are noted, so that a step is made and saved first. All processes leave the loop
    at the same step, and raise BadImage or Stopped at the end of the block. A second signal, three seconds or more
    after the first, acts at once, so that what hangs can be ended. An ignored signal stays so (SIGHUP under nohup). A
    caller's process group has to take tensors on the CPU, as "cpu:gloo,cuda:nccl" does.
    """
    noted, handlers, errors = [], {}, []

    def note(number, _):
        if noted and time.monotonic() > noted[0] + 3:  # earlier, it is the same request: a scheduler's, and torchrun's
            signal.signal(number, handlers[number])
            signal.raise_signal(number)
        noted.append(time.monotonic())

    def any_has_to_stop():
        here = torch.tensor(float(len(noted + errors) > 0))
        if dist.is_initialized():
            dist.all_reduce(here, dist.ReduceOp.MAX)
        return here.item() > 0

    def batches():
        iterator = iter(loader)
        while True:
            batch = None
            try:
                batch = next(iterator, None)
            except BadImage as error:
                errors.append(str(error))
            if any_has_to_stop() or batch is None:
                return
            yield batch

    if threading.current_thread() is threading.main_thread():  # Python handles signals there only
        for number in (getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)):
            if signal.getsignal(number) != signal.SIG_IGN:
                handlers[number] = signal.signal(number, note)
    try:
        yield batches()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if any_has_to_stop():
        for error in itertools.chain(*from_all(errors)):
            raise BadImage(error)
        log("stopped on request (exit status 75); everything is saved, and the same command goes on")
        raise Stopped


def fail(message):
    """Answer a mistake of the user: print one line on stderr, from one process, and exit with status 2."""
    first = rank_and_world()[0] == 0
    if dist.is_initialized():  # perhaps only one process has found the mistake: the first to come here says it
        with contextlib.suppress(RuntimeError):  # the store is gone: another process has said why
            first = dist.distributed_c10d._get_default_store().add("failed", 1) == 1
    if first:
        print("error: " + message.replace("\n", "\\n"), file=sys.stderr, flush=True)  # a file's name may have one
    raise SystemExit(2)


def log(text="", end="\n"):
    """Print from the main process only. On a terminal the text replaces the progress line."""
    if rank_and_world()[0] == 0:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or the log's disk is full: go on
            print(("\r\x1b[K" if sys.stdout.isatty() else "") + text, end=end, flush=True)


def log_values(group, values):
    """Print a row of a run's table: a group's name, then names and values, but for those that are None."""
    pairs = [f"{name} {shown(value)}" for name, value in values.items() if value is not None]
    words = "  ".join(pair.replace(" ", "\xa0") for pair in pairs)  # no line ends within a pair
    if words:
        how = dict(initial_indent=f"{group:14}", subsequent_indent=" " * 14, break_on_hyphens=False)
        log(textwrap.fill(words, 120, **how).replace("\xa0", " "))


def progress(text, last=[0.0]):  # noqa: B006  (the list keeps the time of the last line)
    """Show how far long work has come: on a terminal a line that rewrites itself, in a log file a line every 30 s."""
    on_terminal = sys.stdout.isatty()
    if on_terminal or time.monotonic() - last[0] > 30:
        log(text, end="" if on_terminal else "\n")
        last[0] = time.monotonic()


def show_progress(args, loader, history, step, total_steps):
    """Show how far a training has come. All processes call it. Exits with an error message if a value is not finite."""
    last, seconds = history[-1], (time.perf_counter() - loader.began) / len(history)
    losses, norms = zip(*from_all((last["loss"].item(), float(last.get("grad_norm", 0)))), strict=True)
    loss = sum(losses) / len(losses)
    if not math.isfinite(loss + sum(norms)):
        advice = "begin another --out by --resume, with a lower --lr"
        fail(f"the loss or its gradient is not finite at step {step}; last.pt is from before: {advice}")
    where = f"epoch {math.ceil(step * args.epochs / total_steps)}/{args.epochs}  step {step}/{total_steps}"
    speed = f"{args.batch_size / seconds:.0f} images/s  {seconds * (total_steps - step) / 60:.1f} min left"
    progress(f"{where}  loss {loss:.3f}  {speed}")


WRITERS = {}  # {folder: TensorBoard's writer}


def log_epoch(args, record):
    """Say what matters most of an epoch's record. With --tensorboard, all of it is written for TensorBoard."""
    gap = record.get("below_chance")
    distance = "" if gap is None else f" ({abs(gap):.2f} {'below' if gap >= 0 else 'above'} chance)"
    figures = [f"{name} {value:.1f} %" for name, value in record.items() if name.endswith("_top1")]
    figures += [f"std {record['std']:.2f}"] if "std" in record else []
    words = "  ".join([f"loss {record['loss']:.4f}{distance}", *figures, f"{record['images_per_s']:.0f} images/s"])
    log(f"epoch {record['epoch']}/{args.epochs}  {words}")
    if getattr(args, "tensorboard", False) and rank_and_world()[0] == 0:
        from torch.utils.tensorboard import SummaryWriter

        if args.out not in WRITERS:
            WRITERS[args.out] = SummaryWriter(args.out, purge_step=record["step"])  # what a restart makes again
        for name, value in record.items():
            WRITERS[args.out].add_scalar(name, value, record["step"])
        WRITERS[args.out].flush()


# --------------------------------------------------------------------- 6. flags
# The command lines follow from tables, {group: {name: (value, what it is, limits)}}: each name is a flag.

# What may differ between two calls of one run; an evaluation's, too
OPERATING = {
    *("out", "resume", "max_steps", "keep_every", "knn_every", "eval_every", "device", "compile", "changes"),
    *("workers", "tensorboard", "show_views", "data_dir", "checkpoint"),
}
RANGES = {"crop_scale", "crop_ratio", "blur_sigma", "global_scale", "local_scale"}  # pairs: the smaller number first


def number(kind, least=0, most=math.inf, word=None):
    """Return an argparse type: an int or a float from `least` to `most`, or a word, such as auto."""

    def parse_number(text):
        if text == word:
            return text
        value = kind(text)
        if not (math.isfinite(value) and least <= value <= most):
            allowed = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {allowed}")
        return value

    parse_number.__name__ = kind.__name__ if word is None else f"{word} or {kind.__name__}"  # argparse's word for it
    return parse_number


def argument(name, value, what, limits=None):
    """Return what argparse's add_argument needs of a row of a table, (its names, its options).

    The type is that of the value, or of limits where the value is a word or None. A tuple is as many numbers, a list
    any number of them. limits: (least, most), perhaps with a word that stands for a number; or words to choose from.
    Without limits, a number is not below 0. A bool is a pair of flags, --vanilla and --no-vanilla.
    """
    options = dict(help=what if value is None or value is False else f"{what} (default: %(default)s)")
    names = [name] if name == "checkpoint" else [option(name)]  # the only argument without a name
    if isinstance(value, bool):
        return names, options | dict(action=argparse.BooleanOptionalAction)
    first = next(iter(value), None) if isinstance(value, (tuple, list)) else value
    is_number = isinstance(first, (int, float))
    if limits is None and is_number:
        limits = 0, math.inf
    if isinstance(limits, tuple) and not isinstance(limits[0], str):
        kind = type(first if is_number else limits[0])
        options |= dict(type=number(kind, *limits), metavar="X" if kind is float else "N")
    elif limits is not None:
        options |= dict(choices=limits, type=type(value) if is_number else str)
    if isinstance(value, (tuple, list)):
        some = "*" if name == "milestones" else "+"  # without any, the rate falls by a cosine
        options |= dict(nargs=some if isinstance(value, list) else len(value))
    if name == "checkpoint":
        options |= dict(nargs="?", metavar="RUN")
    return names, options


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message):
        fail(f"{message} (see python {self.prog} --help)")


def defaults(table):
    """Return the values of a table, {name: value}."""
    return {name: value for group in table.values() for name, (value, *_) in group.items()}


def parse(script, doc, argv, table, run, recipe=None):
    """Return (args, typed): a namespace with every value, and the set of the names that the command line has.

    The defaults of `run` are in it. Those of `table` are what recipe(chosen) returns, or None; a flag for which it has
    no value is refused. chosen: what is typed, the defaults of `run`, and None for the rest. What is typed holds, also
    where it equals a default. args.changes: what a run's name says of the typed values.
    """
    flags = table | run
    usage = f"python {script}{' [RUN | FILE --arch NAME]' if 'checkpoint' in defaults(flags) else ''} [flags]"
    what, _, more = (doc or "").partition("\n")  # None: python -OO
    what += f" D1, D2, ... are explained at the top of {script}." if " D1 " in more else ""
    options = dict(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    parser = ArgumentParser(script, usage, what, **options)
    for group, rows in flags.items():
        add = parser.add_argument_group(group).add_argument
        for name, row in rows.items():
            names, options = argument(name, *row)
            add(*names, **options)
    parser.add_argument("-h", "--help", action="store_true", help="show this, with the defaults of --dataset")
    typed = vars(parser.parse_args(argv))
    wants_help = typed.pop("help", False)
    typed |= {name: os.path.abspath(typed[name]) for name in typed.keys() & {"data_dir", "init"}}  # to be read later
    chosen = dict.fromkeys(defaults(table)) | defaults(run) | typed
    values = defaults(run) | (recipe(argparse.Namespace(**chosen)) if recipe else dict.fromkeys(defaults(table)))
    if "patch_size" in values and (patch_size := named_patch(typed.get("arch"))):
        values["patch_size"] = patch_size  # what timm's name of an encoder says comes before the recipe's
    if wants_help:
        unused = dict.fromkeys(defaults(table), "has no effect here")
        known = {name: "the protocol's" if value is None else shown(value) for name, value in values.items()}
        parser.set_defaults(**unused | known)
        parser.print_help()
        raise SystemExit(0)
    if idle := typed.keys() - values.keys():
        fail(f"{option(min(idle))} has no effect: the recipe of these choices has no such value")
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in (values | typed).items()}
    for name in sorted(RANGES & values.keys()):
        if values[name] is not None and values[name][0] > values[name][1]:
            fail(f"{option(name)} {shown(values[name])}: give the smaller number first")
    if recipe and "batch_size" not in typed and os.path.isdir(values["data_dir"] or ""):
        values["batch_size"] = at_most_images(values["batch_size"], values["data_dir"])
    args = argparse.Namespace(**values)
    if recipe:
        if "data_dir" in typed and "dataset" not in typed:
            fail(f"--data-dir needs --dataset, which chooses recipe and normalisation: {', '.join(DATASETS[1:])}")
        backbone_info(args.arch, args.image_size, args.patch_size)  # exits if there is no such encoder
        usual = argparse.Namespace(**recipe(args))
        if "warmup" not in typed:
            args.warmup *= min(1, args.epochs / usual.epochs)  # a shorter run has a shorter warm-up
        if "min_lr" not in typed:
            args.min_lr *= peak_rate(args) / peak_rate(usual)  # the last rate is scaled as the peak rate is
    if "show_views" in typed and not args.show_views.lower().endswith(".png"):
        fail(f"--show-views {args.show_views}: give a name that ends in .png")
    if "tensorboard" in typed and importlib.util.find_spec("tensorboard") is None:
        fail("--tensorboard needs a package: pip install tensorboard")
    args.changes = describe_changes(args, typed.keys() - OPERATING - {"dataset", "seed", "arch"})
    return args, set(typed)


def option(name):
    """Return the flag of a value: crop_scale -> --crop-scale."""
    return "--" + name.replace("_", "-")


def shown(value):
    """Return a value as one would type it after its flag."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(shown, value)) or "none"
    return str(value).removesuffix(".0")


def short(text, most=120):
    """Return a text as a part of a file's name: what is over `most` letters is a hash of all, and odd ones are +."""
    if len(text) > most:
        text = f"{text[: most - 20]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.,") else "+" for c in text)


def describe_changes(args, names):
    """Return what a run's name says of the values of these names, for example "-lam2-num_keys4"."""
    values = {name: os.path.basename(shown(getattr(args, name))) for name in sorted(names)}  # --init's is a path
    return short("".join(f"-{name}{value}" for name, value in values.items()).replace(" ", ","))


def peak_rate(args):
    """Return the learning rate after the warm-up: --lr, scaled linearly with the batch size."""
    return args.lr * args.batch_size / args.lr_batch


def check_schedule(args):
    """Exit with an error message if batch size, warm-up or last rate of a training do not go together."""
    world = rank_and_world()[1]
    if args.batch_size % world or args.batch_size < 2 * world:  # batch norm needs two
        fail(f"--batch-size {args.batch_size} (global) cannot be shared out over {world} processes, two or more each")
    if args.warmup > args.epochs:
        fail(f"--warmup {args.warmup:g} is longer than the run, --epochs {args.epochs}")
    if args.min_lr > peak_rate(args):
        fail(f"--min-lr {args.min_lr:g} is above the learning rate's peak, {peak_rate(args):g}")


EVALUATION = {  # the flags that both evaluations have
    "what is judged": dict(
        checkpoint=(None, "a run's folder, last.pt, backbone.pt; or others' FILE"),
        dataset=(None, "default: what the encoder was trained on, or patterns", DATASETS),
        data_dir=(None, "its folder (default: where the run had it)"),
        encoder=(None, "default: the one that the method's authors evaluate", ("query", "momentum")),
        random_init=(False, "judge the encoder of RUN as it was before training"),
        floors=(True, "judge raw pixels and the untrained encoder, too"),
    ),
    "encoder, of a FILE of others": dict(
        arch=(None, "vit_tiny, resnet18, ..., or any timm model"),
        image_size=(None, "side of the images (default: 224; custom encoder: 32)", (1, math.inf)),
        patch_size=(None, "of a ViT (default: as in its name, or 16)", (1, math.inf)),
        num_heads=(None, "of a ViT (default: timm's number)", (1, math.inf)),
        norm=(None, "whose mean and deviation normalise images (default: imagenet, or as a tag of timm's says)", NORMS),
        prefix=(None, "which encoder of a FILE: what stands before its names"),
    ),
    "operation": dict(
        seed=(0, "seed of what is drawn", (0, 2**63 - 1)),
        workers=(None, "loader processes (default: for a GPU as many as cores, at most 24; else none)", (0, 1024)),
        device=("auto", "auto: a GPU where there is one", ("auto", "cuda", "cpu")),
        amp=("auto", "auto: bf16 on GPUs that have it", ("auto", "bf16", "off")),
    ),
}


# --------------------------------------------------------------------- 7. files


def claim_folder(out):
    """Lock a run's folder. Returns the open file that holds the lock until it is closed.

    Exits with an error message if the folder has files that are not a run's, or if another process has the lock.
    """
    folder, first = Path(out), rank_and_world()[0] == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(p.name for p in folder.iterdir() if p.name != "lock" and p.suffix != ".tmp")
        if found and "last.pt" not in found:
            fail(f"--out {out} is not empty ({', '.join(found[:3])}), and has no last.pt: give another")
    lock = open(folder / "lock" if first else os.devnull, "a")
    if first and fcntl is not None:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, forked workers do not inherit it
        except (BlockingIOError, PermissionError):
            fail(f"another run is at work in --out {folder}: wait for it, stop it, or give another --out")
        except OSError:
            pass  # a file system without locks
    from_all(None)
    return lock


def write_whole(path, write):
    """On the main process call write(temporary path), flush it to the disk, put it in place: whole or not at all."""
    if rank_and_world()[0] != 0:
        return
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer turns an OSError into a RuntimeError
        fail(f"cannot write {path} ({error}): nothing that was there is lost; the same command goes on from it")


def write_file(path, content):
    """Write a text, or a state by torch.save: whole or not at all. Exits with an error if a value is not finite."""
    if isinstance(content, str):
        return write_whole(path, lambda temporary: temporary.write_text(content))
    if not all(x.isfinite().all() for x in tree_leaves(content) if torch.is_tensor(x)):
        fail(f"weights are not finite, so {path} stays as it was: give a lower --lr, a new --out")
    write_whole(path, lambda temporary: torch.save(content, temporary))


def is_intact(path):
    """Return True if a checkpoint's archive is whole: torch.load alone would take flipped bits for weights."""
    with zipfile.ZipFile(path) as archive:
        # testzip reads past these attributes, which are 0 in torch's files.
        return archive.testzip() is None and not any(entry.external_attr for entry in archive.infolist())


PLAIN_DATA = [  # what checkpoints hold beside tensors, and what cannot act: torch.load may build these, too
    *(argparse.Namespace, datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(np.dtype, np.ndarray, *(getattr(np.dtypes, name) for name in np.dtypes.__all__)),
]
for _core, _name in itertools.product(("core", "_core"), ("scalar", "_reconstruct")):  # numpy 1 and 2
    PLAIN_DATA.append((getattr(np._core.multiarray, _name), f"numpy.{_core}.multiarray.{_name}"))
for _module, _pure in itertools.product(("pathlib", "pathlib._local"), ("", "Pure")):  # before Python 3.13, and from it
    PLAIN_DATA += [(PurePosixPath, f"{_module}.{_pure}PosixPath"), (PureWindowsPath, f"{_module}.{_pure}WindowsPath")]


def load_checkpoint(path):
    """Return what is in a checkpoint, on the CPU: tensors and plain data, never code. Else exits with a message."""
    try:
        if Path(path).suffix == ".safetensors":
            return timm.models.load_state_dict(path)
        if zipfile.is_zipfile(path) and not is_intact(path):
            raise ValueError("damaged: some bytes are not those that were written")
        with torch.serialization.safe_globals(PLAIN_DATA):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file from elsewhere may raise anything, and torch's advice is to load it unsafely
        fail(f"cannot read {path} as a checkpoint of tensors and plain data: {str(error).partition('. ')[0][:300]}")


@contextlib.contextmanager
def fitting(path):
    """Inside, what torch says of a checkpoint that does not fit a module or an optimiser becomes an error message."""
    try:
        yield
    except (RuntimeError, KeyError) as error:
        fail(f"{path} does not fit: {' '.join(str(error).split())[:300]}")


def load_state(path):
    """Return what a last.pt has, on the CPU. Exits with an error message if it is none."""
    state = load_checkpoint(path)
    if lacking := {"step", "records", "config", "images"} - (state.keys() if isinstance(state, dict) else set()):
        fail(f"{path} is not a last.pt of this version: it has no {min(lacking)}")
    return state


def load_run(args, images, resume=None):
    """Return (path, state) of a run that goes on: of last.pt in --out, else of `resume`. A new run has step 0.

    Exits with an error message if the run has another configuration, OPERATING flags apart, or other images, or if the
    processes differ. Of `resume`, another run's last.pt, only method, encoder and batch size have to be the same. A run
    that has made no step yet begins anew, perhaps with other flags.
    """
    path, new, state = Path(args.out, "last.pt"), vars(args), dict(step=0, records=[])
    must_match = new.keys() - OPERATING
    if path.exists():
        state = load_state(path)
    if resume is not None and state["step"] == 0:
        path, state = resume, load_state(resume)
        must_match = {"method", "arch", "batch_size"}  # with these, its steps count alike
    if state["step"] > 0:
        old = state["config"]
        must_match |= old.keys() - OPERATING if path != resume else set()  # also what this version does not have
        in_order = sorted(must_match, key=lambda name: (name not in ("dataset", "arch"), name))
        differ = [name for name in in_order if old.get(name) != new.get(name)]
        words = [f"{option(name)} was {shown(old.get(name))}, is {shown(new.get(name))}" for name in differ[:5]]
        if state["images"] != images:
            words.insert(0, f"other images: {state['images']}, here {images}")
        if words:
            advice = "give what was" if path == resume else "give what was, or another --out"
            if "epochs" in differ and hasattr(args, "resume"):
                advice += f", with --resume {path} for more epochs of the same run"
            fail(f"{path} is of another configuration ({'; '.join(words)}): {advice}")
        if path == resume and state["step"] >= args.epochs * (images["number"] // args.batch_size):
            fail(f"{path} has made {state['step']} steps, and --epochs {args.epochs} has no more: give more epochs")
        log(f"going on from {path}, at step {state['step']}")
    marks = from_all((new, images, state["step"]))
    if any(mark != marks[0] for mark in marks):
        fail("the processes differ in flags, images or checkpoint: --data-dir and --out must be on shared disks")
    return path, state


@functools.cache
def versions(device):
    """Versions, machine and commit. device: cuda or cpu."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = None
    with contextlib.suppress(OSError):
        commit = subprocess.run(git, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or None
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    packages = {module.__name__: str(module.__version__) for module in (torch, torchvision, timm, np)}
    return {"python": sys.version.split()[0], **packages, "machine": name, "commit": commit}
