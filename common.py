"""Data, views and evaluation: what the method files and the evaluations share.

    1. data        load_images -> ImageSet (patterns, cifar10, ..., imagenet, folder, one's own); uniform, generator
    2. views       View declares one; ViewDataset draws and cuts in the loader; color_views works on the device
    3. evaluation  extract_features, knn_predict, embedding_health; what both evaluations share
    4. encoders    build_backbone, load_backbone, load_published; load_checkpoint
    5. processes   start; join_processes, from_all, shard; fail, log, progress; means, log_table, log_epoch
    6. flags       parse: the command line, by tables of values; RUN, EVALUATION
    7. files       open_run, save_run, load_run; write_file

Conventions: images are RGB. Loaders give uint8 (N, 3, H, W). On the device images are float in [0, 1], then normalised.
Boxes are (top, left, height, width) in pixels. A label of -1 means "none".
"""

import argparse
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
import os
import re
import shutil
import subprocess
import sys
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
from PIL import Image, ImageOps
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_convert
from torchvision.transforms.functional import rgb_to_grayscale, solarize, to_pil_image

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


DEMO = "DEMO: these images are generated. Give --dataset cifar10 (downloaded), or --dataset imagenet --data-dir DIR"
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
        labels = np.full(len(images), -1) if labels is None else np.asarray(labels)
        are_images = not in_memory or (images.dtype == np.uint8 and images.shape[3:] == (3,))
        if not are_images or labels.shape != (len(images),) or labels.dtype.kind not in "iu":
            found = f"{images.dtype} {images.shape}" if in_memory else f"{len(images)} paths"
            right = "a uint8 array (n, H, W, 3) or n paths, and n whole numbers as labels"
            fail(f"an ImageSet has {right}, not {found} and labels {labels.dtype} {labels.shape}")
        self.array = images if in_memory else None
        self.paths = None if in_memory else np.array([os.fsencode(path) for path in images])
        self.name, self.root, self.labels = name, os.fspath(root), labels.astype(np.int64)
        most = self.labels.max(initial=-1)
        self.classes = list(range(most + 1)) if classes is None else list(classes)
        if most >= len(self.classes):
            fail(f"an ImageSet has labels up to {most}, and {len(self.classes)} classes")

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
    paths, labels, classes = list_folder(name, os.fspath(root), part, unlabeled)
    images = ImageSet(paths, labels, classes, name, root)
    if max((first := images[0]).shape) <= 96 and len(images) * first.nbytes <= IN_MEMORY:
        images.array = decode_all(images)
    return images


def load_images(name, data_dir=None, train=True, size=32, unlabeled=False):
    """Return a data set by name, or any data_dir with train/, and val/ or test/; None if there is no test set.

    size: of `patterns`, which is generated. unlabeled: also return images without labels, for pre-training. Downloads
    only into the folder data/, an empty folder, or one with torchvision's files.
    """
    if name == "patterns" and data_dir is not None:
        fail(f"--data-dir needs --dataset, which chooses recipe and normalisation: {', '.join(DATASETS[1:])}")
    try:
        there = os.scandir(data_dir) if data_dir is not None else ()
    except OSError as error:
        fail(f"--data-dir {data_dir}: {error.strerror}")
    # A link that leads nowhere counts as a folder, so that it is an error when it is to be read
    names = sorted(entry.name for entry in there if entry.is_dir() or not os.path.exists(entry.path))
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
    if name in ("imagenet", "imagenet100"):
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
        fail(f"evaluation needs a training and a test set with labels of two classes: {layout}")
    if train.classes != test.classes:
        odd = sorted(map(repr, {*train.classes} ^ {*test.classes})) or ["another order"]
        fail(f"the classes of {train} and of {test} are not the same: {', '.join(odd[:5])}")


def open_images(args, train=None, test=None):
    """Return a training's images, the flags' or a user's own: (training images, test images or None if unlabelled)."""
    if train is None and test is None:
        train = load_images(args.dataset, args.data_dir, True, args.image_size, unlabeled=True)
        test = load_images(args.dataset, args.data_dir, False, args.image_size) if len(train.classes) > 1 else None
    if test is not None:
        check_labels(train, test)
    if train.name == "patterns":
        log(DEMO)
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
    whole: bool = False  # what is cut where none of ten boxes fits: a center crop, or, if True, the whole image


def random_resized_crop(sizes, area, aspect, position, ratio, whole=False):
    """Return the boxes of random crops, as torchvision's RandomResizedCrop draws them: (n, 4) int64.

    sizes: (n, 2) heights and widths. area, aspect: (n, tries) random shares of the area, and widths / heights: the
    first that fits is taken. position: (n, 2) uniform in [0, 1), of top and left. If none fits, it is the center crop
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
    center = np.stack([(height - h0) // 2, (width - w0) // 2, h0, w0], 1)
    return np.where(fits.any(1)[:, None], box, center).astype(np.int64)


def name_draws(draws):
    """Return a view's uniform numbers (n, VIEW_DRAWS) by the names of DRAWS: {"area": (n, 10), ..., "sigma": (n,)}."""
    columns = np.split(draws, np.cumsum([*DRAWS.values()])[:-1], axis=1)
    return {name: x[:, 0] if x.shape[1] == 1 else x for name, x in zip(DRAWS, columns, strict=True)}


def between(low, high, share):
    return low + (high - low) * share


def draw_boxes(view, sizes, draws, area=None, position=None):
    """Draw what one view of n images shows: (n, 4) int64 boxes.

    sizes: (n, 2) heights and widths. draws: (n, VIEW_DRAWS) uniform in [0, 1). area: (n,), and position: (n, 2) uniform
    in [0, 1): a method's own, instead of those of `draws`.
    """
    draw = name_draws(draws)
    area = between(*view.area, draw["area"]) if area is None else np.asarray(area)[:, None]
    aspect = np.exp(between(*np.log(view.ratio), draw["aspect"]))
    position = draw["position"] if position is None else position
    return random_resized_crop(sizes, area, aspect, position, view.ratio, view.whole)


def draw_colors(view, draws):
    """Draw how one view of n images is colored: (n, 9) float32 with columns as COLOR. draws: as in `draw_boxes`."""
    draw = name_draws(draws)
    jittered, (*most, most_hue) = draw["jitter_coin"] < view.jitter_p, view.jitter
    factors = [
        np.where(jittered, between(max(0, 1 - m), 1 + m, draw[name]), 1)
        for name, m in zip(("brightness", "contrast", "saturation"), most, strict=True)
    ]
    hue = np.where(jittered, most_hue * (2 * draw["hue"] - 1), 0)
    sigma = np.where(draw["blur_coin"] < view.blur_p, between(*view.blur_sigma, draw["sigma"]), 0)
    gray, solarized = draw["gray_coin"] < view.gray_p, draw["solarize_coin"] < view.solarize_p
    columns = *factors, hue, np.floor(draw["order"] * 24), gray, sigma, solarized, draw["flip_coin"] < view.flip_p
    return np.stack(columns, 1).astype(np.float32)


def draw_view(view, sizes, draws):
    """Draw one view of n images: (boxes, colors) of `draw_boxes` and `draw_colors`."""
    return draw_boxes(view, sizes, draws), draw_colors(view, draws)


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
        world = rank_and_world()[1]
        if length < batch_size or batch_size % world:
            fail(f"{length} images make no batches of --batch-size {batch_size} over {world} process(es): give another")
        self.length, self.batch_size, self.seed, self.epoch = length, batch_size, seed, 0

    def __len__(self):
        return self.length // self.batch_size

    def __iter__(self):
        order = torch.randperm(self.length, generator=generator(self.seed, self.epoch, STREAM_ORDER))
        for batch in order.split(self.batch_size)[: len(self)]:
            yield [(self.epoch, row) for row in shard(batch).tolist()]


def data_loader(data, device, workers, **options):
    """Return torch's DataLoader. workers: None for what suits: none for a CPU; for a GPU its share of the cores."""
    is_linux = sys.platform == "linux"  # elsewhere workers are not forked
    if workers is None and device.type == "cuda" and is_linux:
        workers = min(24, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if workers:
        context = "fork" if is_linux else None  # forked workers share the decoded images
        options |= dict(num_workers=workers, persistent_workers=True, multiprocessing_context=context)
    mine = torch.Generator()  # of worker seeds, which nothing uses: else each start would move the global generator
    return DataLoader(data, pin_memory=device.type == "cuda", generator=mine, **options)


def make_loader(args, images, views, device, draw=None, extra_draws=0):
    """Return batches of views. draw, extra_draws: see `ViewDataset`. `batch_sampler.epoch` is the epoch, from 0."""
    data = ViewDataset(images, views, args.seed, args.interpolation, draw, extra_draws)
    sampler = EpochSampler(len(images), args.batch_size, args.seed)
    return data_loader(data, device, args.workers, batch_sampler=sampler, collate_fn=default_convert)


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

    x: uint8 (N, 3, H, W) on the device. parameters: (N, 9) on the CPU, with columns as COLOR, see `draw_colors`. The
    CPU decides which images an operation touches, so the device is never waited for.
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


def color_views(batch, device, memory_format=torch.channels_last, norm=None):
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
    """Write --show-views' picture: a row per view, of its first twelve images (n, 3, H, W) in [0, 1]."""
    side = max(96, *(view.shape[-1] for view in views))
    rows = [F.interpolate(view[:12].float().cpu(), side) for view in views]
    picture = to_pil_image(torchvision.utils.make_grid(torch.cat(rows), len(rows[0]), pad_value=1.0))
    write_file(path, lambda file: picture.save(file, "PNG"))
    log(f"picture written to {path}; its rows: {', '.join(names)}")


# ---------------------------------------------------------------- 3. evaluation


class CenterCrops(Dataset):
    """Uint8 (3, size, size). Images of another size: the shorter side becomes 256/224 of it, and the center is cut."""

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
    one's (`shard`), which need no more memory than they take. what: for the progress line. No gradient. Exits with an
    error message if one is not finite.
    """
    mine = shard(torch.arange(len(images)))
    crops = CenterCrops(images, info["image_size"], info["interpolation"])
    crops = torch.utils.data.Subset(crops, mine.tolist() or [0])  # a process without images encodes one, for the width
    features = None
    with evaluation_mode(encoder):
        for i, batch in enumerate(data_loader(crops, device, workers, batch_size=batch_size)):
            x = normalize(batch.to(device, non_blocking=True).float().div_(255), info["mean"], info["std"])
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                part = encoder(x).flatten(1).float()
            features = torch.empty(len(mine), part.shape[1]) if features is None else features
            features[i * batch_size :][: len(part)] = part[: len(mine)]
            done = min((i + 1) * batch_size * rank_and_world()[1], len(images))  # processes are about equally fast
            progress(f"{what}: {done} of {len(images)} images so far")
    if not all(from_all(all(bool(rows.isfinite().all()) for rows in features.split(4096)))):  # in parts: less memory
        fail(f"the encoder's features of {images} are not all finite")
    return gather_uneven(features) if whole else features


@torch.no_grad()
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
    """Return {"knn20_top1": percent, ...} for each k. train_x: this process's rows (`shard`); see `knn_predict`.

    Images without a label are left out.
    """
    pairs = (train_x, shard(torch.from_numpy(train.labels))), (test_x, torch.from_numpy(test.labels))
    (train_x, train_y), (test_x, test_y) = ((x, y) if (y >= 0).all() else (x[y >= 0], y[y >= 0]) for x, y in pairs)
    predicted = knn_predict(train_x, train_y, test_x, ks, temperature, len(train.classes))
    right = (predicted == test_y).sum(1).tolist()
    return {f"knn{k}_top1": 100 * number / len(test_y) for k, number in zip(ks, right, strict=True)}


def knn_record(encoder, info, train, test, device, workers=None, amp=False):
    """Return `knn_scores` of a method's encoder. The bank is the labelled training images, without augmentation."""
    train, test = train.labelled(), test.labelled()
    options = dict(info=info, device=device, workers=workers, amp=amp)
    train_x = extract_features(encoder, train, whole=False, what="features, train", **options)
    test_x = extract_features(encoder, test, what="features, test", **options)
    return knn_scores(train_x.to(device), train, test_x.to(device), test, (20, 200), 0.07)


def add_knn(args, config, info, state, records, encoder, train, test, device, amp):
    """Add kNN's scores to the record of the last epoch, if they are due and not in it, and save the run again."""
    epoch = len(records)
    due = args.knn_every and (epoch % args.knn_every == 0 or epoch == args.epochs)
    if test is not None and due and records and "knn20_top1" not in records[-1]:
        records[-1] |= knn_record(encoder, info, train, test, device, args.workers, amp)
        save_run(args, config, info, state, records)


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
    """Return (device, the encoder to evaluate, info), and join torchrun's process group. Fills in args.amp.

    module: a user's own encoder. A copy of it gets the checkpoint's weights, if there is one.
    """
    if (args.checkpoint or module) is None or (args.random_init and module is not None):
        fail("give RUN, a run's folder; with --random-init its encoder, one of timm's, is evaluated untrained")
    patience = datetime.timedelta(days=1)  # the first process fits alone
    (device, *_), module = join_processes(args.device, patience), None if module is None else copy_module(module)
    names = "image_size", "patch_size", "num_heads", "norm", "prefix"
    of_others = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.checkpoint is None:
        size, norm = args.image_size or 32, args.norm or "imagenet"
        encoder, info = module, backbone_info("custom", size, None, norm, method="no run", encoder="given")
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
    """Return the images of an evaluation, those that have labels: (training images, test images or None).

    train, test: a user's own ImageSets. Without these, --dataset and --data-dir they are the run's, and have to be the
    images that it was trained on. args gets their name and place. labels: False for all images, also without labels.
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
            trained_on = config.get("images") if args.data_dir is None else None
            args.dataset, args.data_dir = config["dataset"], args.data_dir or config.get("data_dir")
        args.dataset = args.dataset or "patterns"
        options = dict(size=info["image_size"], unlabeled=trained_on is not None)  # the run's own images had them, too
        train, test = (load_images(args.dataset, args.data_dir, part, **options) for part in (True, False))
        if trained_on not in (None, train.checksum()):
            fail(f"{train} are not the images that the run was trained on: give --dataset and --data-dir")
    if not labels:
        return train, test
    check_labels(train, test)
    return train.labelled(), test.labelled()


def baseline_encoders(args, info, device, count):
    """Return what a trained encoder has to beat, {name: encoder}: raw pixels, and the same encoder untrained."""
    if not args.baselines:
        return {}
    torch.manual_seed(args.seed)
    pixels = nn.Sequential(nn.AdaptiveAvgPool2d(min(32, info["image_size"])), nn.Flatten())
    baselines = {"raw pixels": pixels} if count <= 200_000 else {}  # of training images
    if info["timm_name"] and not args.random_init:
        baselines["untrained"] = build_backbone(info).to(device)
    return baselines


def protocol(args, info, train, test):
    """Return what an evaluation's numbers depend on, as lines of text."""
    return (
        f"{info['encoder']} encoder {arch_name(info)} of {info['method']}, amp {args.amp}, "
        f"features before the projector\ntrain: {train}; test: {test}\n"
        f"{info['image_size']} px; others: shorter side 256/224 of it, "
        f"{info['interpolation']}, center crop; mean {tuple(info['mean'])}, std {tuple(info['std'])}"
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


def backbone_info(arch, image_size, patch_size, norm="imagenet", interpolation="bilinear", num_heads=None, **more):
    """What backbone.pt says of an encoder besides its weights: how timm builds it, and what its images are like.

    arch: a name of ARCHS, any timm model, or custom, a user's own module. num_heads: of a ViT; None: timm's number.
    Plain ResNets get a 3 x 3 stem for images of up to 64 px; resnet_mini's has stride 2, and resnet_micro keeps timm's.
    timm's own ViTs get MoCo v3's initialisation, except of the patch embedding, which timm leaves out.
    """
    mean, std = NORMS[norm]
    like = dict(image_size=image_size, mean=mean, std=std, interpolation=interpolation, **more)
    if arch == "custom":
        return dict(timm_name=None, create_kwargs={}, stem="custom", **like)
    arch = arch.split(".")[0]  # what timm's names have after a point says whose weights they are
    if arch not in ARCHS and not timm.is_model(arch):
        fail(f"unknown --arch {arch}: give {', '.join(ARCHS)}, or a timm model")
    name, kwargs = ARCHS.get(arch, (arch, {}))
    kwargs = {**kwargs, "num_classes": 0}
    if is_vit(name):
        if (named := re.search(r"patch(\d+)", arch)) and int(named[1]) != patch_size:
            fail(f"--arch {arch} has patches of {named[1]} pixels: give --patch-size {named[1]}")
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


def encoder_info(args, method, encoder):
    """Return `backbone_info` of a training's encoder. encoder: the one that is evaluated, query or momentum."""
    heads = getattr(args, "num_heads", None)
    like = args.image_size, args.patch_size, args.norm, args.interpolation
    return backbone_info(args.arch, *like, heads, method=method, encoder=encoder)


def arch_name(info):
    """Return the name by which --arch calls an encoder that `backbone_info` describes."""
    name, given = info["timm_name"], info["create_kwargs"].items()
    fitting = (short for short, (timm_name, more) in ARCHS.items() if timm_name == name and more.items() <= given)
    return next(fitting, name or "custom encoder")


def build_backbone(info, zero_init=False, **more):
    """Return the untrained timm model without classifier that `info` describes: it maps (N, 3, H, W) to (N, width).

    zero_init: residual branches start at zero, as MoCo v3's and SimSiam's do. more: further arguments for timm. Exits
    with an error message if the model does not take them.
    """
    try:
        backbone = timm.create_model(info["timm_name"], **info["create_kwargs"], **more)
    except (TypeError, AssertionError, RuntimeError) as error:
        fail(f"timm does not build {info['timm_name']} with {info['create_kwargs']}: {error}")
    if info["stem"] != "timm":  # no 7 x 7 convolution and no max-pool, as CIFAR work has it
        stride = 2 if info["stem"] == "3x3-s2" else 1
        backbone.conv1 = nn.Conv2d(3, backbone.conv1.out_channels, 3, stride, padding=1, bias=False)
        backbone.maxpool = nn.Identity()
    for block in backbone.modules() if zero_init else ():
        if hasattr(block, "zero_init_last"):
            block.zero_init_last()
    output_width(backbone, info["image_size"])
    return backbone


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
        if zipfile.is_zipfile(path):  # torch.load would take flipped bits for weights
            archive = zipfile.ZipFile(path)
            if archive.testzip() or any(entry.external_attr for entry in archive.infolist()):  # 0 in torch's files
                raise ValueError("it is damaged")
        with torch.serialization.safe_globals(PLAIN_DATA):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file from elsewhere may raise anything, and torch's advice is to load it unsafely
        why = re.split(r"\. |\n", str(error).rpartition("WeightsUnpickler error: ")[2].strip())[0]  # it names the class
        fail(f"cannot read {path} as a checkpoint of tensors and plain data: {why[:300]}")


@contextlib.contextmanager
def fitting(path):
    """Inside, what torch says of a checkpoint that does not fit a module or an optimizer becomes an error message."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        fail(f"{path} does not fit ({type(error).__name__}): {' '.join(str(error).split())[:300]}")


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
        weights = encoder_weights(state["model"], info["encoder"])
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


def encoder_weights(model_state, encoder):
    """Return the query or momentum encoder's part of a method's state_dict, as plain tensors (no channels_last)."""
    prefix = {"query": "backbone.", "momentum": "momentum_backbone."}[encoder]
    return {k.removeprefix(prefix): v.contiguous() for k, v in model_state.items() if k.startswith(prefix)}


def load_published(path, arch, image_size=224, patch_size=16, norm=None, num_heads=None, prefix=None):
    """Load an encoder from a checkpoint of others, as `load_backbone` returns it: (module in evaluation mode, info).

    The further arguments are those of `backbone_info` and `fitting_weights`. norm: None for what timm knows of the
    weights that its name tells (....augreg_in1k), or ImageNet's. A ResNet has timm's stem, whatever the size of the
    images, unless its conv1 is 3 x 3.
    """
    if os.path.isdir(path):  # its own normalisation would be lost in silence
        fail(f"{path} is a folder. A run's folder says its encoder itself: leave out --arch; or give others' FILE")
    info = backbone_info(arch, image_size, patch_size, norm or "imagenet", num_heads=num_heads, method=Path(path).name)
    if norm is None and "." in arch:
        try:
            known = timm.get_pretrained_cfg(arch)
        except RuntimeError:
            fail(f"timm knows no weights {arch}: leave out what stands after the point, and give --norm")
        info |= dict(mean=known.mean, std=known.std, interpolation=known.interpolation)
    if info["stem"] != "timm":
        small = (x.shape[1:] == (3, 3, 3) for name, x in read_tensors(path).items() if name.endswith("conv1.weight"))
        info |= {} if any(small) else dict(stem="timm")
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


# What an encoder may leave unread in a checkpoint of others: heads, and what only pre-training uses
HEADS = {"fc", "head", "heads", "head_dist", "aux_head", "projection_head", "classifier", "classif", "last_linear"}
HEADS |= {"projector", "predictor", "prototypes", "mask_token"}
HEADS |= {f"decoder_{part}" for part in ("embed", "pos_embed", "blocks", "norm", "pred")}  # MAE's


def fitting_weights(path, encoder, prefix=None, flag="--init-prefix"):
    """Return (a state_dict for an encoder from a checkpoint of others, what stands before its names there).

    prefix: which of several encoders. flag: what a message calls it. A ViT's position embedding is resampled. Exits
    with an error message unless each tensor of the encoder is there in its shape, and nothing is left over but HEADS.
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
    left = [n for n in theirs if n not in needed and n.split(".")[0] not in HEADS and "num_batches" not in n]
    if lacking or left:
        words = f"{len(lacking)} tensors lack, or differ in shape or type, {lacking[:3]}; left over are {left[:3]}"
        fail(f"{path} is not of this encoder: after {start!r} {words}. Try another --arch, --image-size, --patch-size")
    if not all(theirs[name].isfinite().all() for name in needed):
        fail(f"{path} has weights that are not finite")
    log(f"{path}: the encoder is {start or 'the file itself'}")
    return {name: theirs[name] for name in needed}, start


def copy_module(module):
    """Return a copy of a user's module, to be trained: a module in evaluation mode is copied in training mode."""
    copied = copy.deepcopy(module)
    return copied if copied.training else copied.train()


@contextlib.contextmanager
def evaluation_mode(module):
    """Inside, the module is in evaluation mode. Afterwards each of its parts is in the mode in which it was."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield module.eval()
    finally:
        for part, training in modes:
            part.training = training


def output_width(module, *sizes, check_gradient=False):
    """Return the width of an encoder, (N, 3, H, W) -> (N, width), by images of zeros of all sizes that it will see.

    check_gradient: also exit with an error message if no gradient reaches a parameter.
    """
    device, shapes = next((p.device for p in module.parameters()), "cpu"), []
    for size in sizes:
        try:
            with evaluation_mode(module), torch.set_grad_enabled(check_gradient):
                y = module(torch.zeros(1, 3, size, size, device=device))
                shapes.append(tuple(y.shape))
        except Exception as error:  # a user's own module may raise anything
            fail(f"the encoder does not take images (1, 3, {size}, {size}): {' '.join(str(error).split())[:300]}")
    if len(shapes[0]) != 2 or len({*shapes}) > 1:  # for example, a ResNet without its last layer gives (1, width, 1, 1)
        fail(f"the encoder gives {shapes} for images of {sizes} px, not (1, width): end it with pooling and Flatten")
    own = [p for p in module.parameters() if check_gradient and p.requires_grad]
    reached = torch.autograd.grad(y.sum(), own, allow_unused=True) if own and y.requires_grad else ()
    if check_gradient and all(gradient is None for gradient in reached):
        fail("no gradient reaches the encoder: its parameters are frozen, or its forward is under no_grad or another's")
    return shapes[0][1]


def memory_format(device, arch):
    """Return the memory format of a training: channels_last, on CPUs for the encoders of ARCHS only.

    Others may crash there (torch 2.8 to 2.15): 1 x 1 convolutions of stride 2 with fewer than 8 channels, as RepVGG's.
    """
    return torch.channels_last if device.type == "cuda" or arch in ARCHS else torch.contiguous_format


def use_bf16(amp, device, arch, sizes):
    """Return True if the encoders compute in bf16. amp: auto, on GPUs that have it; bf16; off. sizes: of the images."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    chosen = amp == "bf16" or (amp == "auto" and has_bf16)
    if chosen and device.type == "cpu" and min(sizes) <= 16 and not is_vit(arch):
        fail("--amp bf16 on a CPU: at 16 px and below torch's gradients of convolutions are wrong: give --amp off")
    return chosen


# ----------------------------------------------------------------- 5. processes


def start(main, parse_args):
    """Run a script: a mistake, a bad image and Ctrl-C are one line. Here is set what concerns the whole process."""
    torch.set_flush_denormal(True)  # denormal numbers make a CPU several times slower
    torch.backends.cudnn.benchmark = True
    warnings.filterwarnings("ignore", ".*Grad strides do not match.*")  # which is about speed
    try:
        args = parse_args()
        if args.device == "cpu" or not torch.cuda.is_available():
            if (args.arch or "").endswith(("_micro", "_mini")) and "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(1)  # a second one gives 15 %, and takes two thirds from another program
            with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library than glibc
                ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX: mapping tensors anew costs up to a quarter of a step
                ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the top of the heap stays
        main(args)
    except (BadImage, OSError) as error:  # from a loader worker, its traceback stands before the message
        message = str(error).strip().rpartition("common.BadImage: ")[2]
        if isinstance(error, BadImage):
            message += "; tests/tools/check_images.py DIR lists all such; a training goes on without by --resume, --out"
        fail(message)
    except KeyboardInterrupt:
        log("stopped by Ctrl-C: the same command goes on after the last epoch that was saved")
        raise SystemExit(130) from None
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_and_world():
    """Return (this process's rank, the number of processes): of the process group or, before it, of torchrun."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def join_processes(name, patience=datetime.timedelta(hours=1)):
    """Choose a device, auto, cuda or cpu, and join torchrun's process group. Return (device, rank, world size).

    patience: how long a process waits for others.
    """
    device = torch.device("cpu")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if local > gpus:  # all processes of the machine find this, and its first says it
            fail(f"--device {name}: torch sees {gpus} GPUs for {local} process(es): start fewer, or give --device cpu")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # gloo: for what need not wait for a GPU
        store, rank, world = next(dist.rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # a restart's store still holds the dead workers' addresses
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    return device, *rank_and_world()


def from_all(value):
    """Return the values of all processes as a list in rank order, on every process. Tensors must be on the CPU."""
    found = [value] * rank_and_world()[1]
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found


def shard(x, dim=0):
    """This process's rows of what belongs to all processes: they share dimension `dim` out in rank order."""
    rank, world = rank_and_world()
    return x.tensor_split(world, dim)[rank]


def slices_per_process(args, name):
    """Return how many of --NAME's equal slices of the batch each process has: as given, and at least one."""
    given, world = getattr(args, name), rank_and_world()[1]
    slices = max(given, world)
    if slices % world or args.batch_size % slices or args.batch_size < 2 * slices:
        fail(f"--batch-size {args.batch_size} has no {slices} equal slices ({option(name)} {given}, {world} processes)")
    return slices // world


def gather_uneven(x, to_first=False):
    """Concatenate a tensor (n, ...) over the processes, in rank order, where n may differ and be 0. No gradient.

    It is whole on every process or, with to_first, on the first one: the others get None and need no more memory.
    """
    counts, (rank, world) = from_all(len(x)), rank_and_world()
    if world == 1:
        return x
    x = x.detach().contiguous()
    if to_first and rank > 0:
        return dist.send(x, 0)
    whole = x.new_empty(sum(counts), *x.shape[1:])
    for source, part in enumerate(whole.split(counts)):
        if source == rank:
            part.copy_(x)
        if not to_first:
            dist.broadcast(part, source)
        elif source > 0:
            dist.recv(part, source)
    return whole


def fail(message):
    """Answer a mistake of the user: one line on stderr, though all processes find it, and exit status 2."""
    says = os.environ.get("LOCAL_RANK", "0") == "0"
    if dist.is_initialized():  # perhaps one process has found it: the first that comes here says it
        says = False
        with contextlib.suppress(RuntimeError):  # the store is gone: another process has said why
            says = dist.distributed_c10d._get_default_store().add(f"said {message}", 1) == 1
    if says:
        print("error: " + message.replace("\n", "\\n"), file=sys.stderr, flush=True)
    raise SystemExit(2)


def log(text="", end="\n"):
    """Print from the main process only. On a terminal the text replaces the progress line."""
    if rank_and_world()[0] == 0:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or the log's disk is full: go on
            print(("\r\x1b[K" if sys.stdout.isatty() else "") + text, end=end, flush=True)


def progress(text, last=[0.0]):  # noqa: B006  (the list keeps the time of the last line)
    """Show how far long work has come: on a terminal a line that rewrites itself, in a log file a line every 30 s."""
    if sys.stdout.isatty() or time.monotonic() - last[0] > 30:
        log(text, end="" if sys.stdout.isatty() else "\n")
        last[0] = time.monotonic()


def show_progress(args, history, began, step, total_steps):
    """Show how far a training has come. history: a dict per step of the epoch, {name: 0-d tensor}. began: its time."""
    seconds = (time.perf_counter() - began) / len(history)
    speed = f"{args.batch_size / seconds:.0f} images/s  {seconds * (total_steps - step) / 60:.1f} min left"
    progress(f"step {step}/{total_steps}  loss {history[-1]['loss'].item():.3f}  {speed}")


def means(args, history, began):
    """Return the means of an epoch's metrics over steps and processes, {name: float}, and its speed."""
    sums = sum(torch.stack([*metrics.values()]).double() for metrics in history)
    values = (gather_uneven(sums[None]).mean(0) / len(history)).tolist()
    if not all(map(math.isfinite, values)):
        fail("the loss or its gradient is not finite; last.pt is of the epoch before: give a lower --lr, a new --out")
    speed = args.batch_size * len(history) / (time.perf_counter() - began)
    return dict(zip(history[0], values, strict=True), images_per_s=speed)


def log_table(args, tables, **facts):
    """Print all values of a run, a line per group of its tables, and facts that follow from them."""
    rows = {group: {name: getattr(args, name, None) for name in table} for group, table in tables.items()}
    facts |= dict(processes=rank_and_world()[1], peak_lr=args.lr * args.batch_size / args.lr_batch)
    for group, values in (rows | dict(facts=facts, versions=versions())).items():
        words = [f"{name} {shown(value)}" for name, value in values.items() if value is not None]
        if words:
            log(f"{group:14}" + "  ".join(words))


def shown(value):
    """Return a value as a table shows it: 1.333, or 0.75 1.333 for several."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(shown, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def log_epoch(args, record):
    """Print what matters most of an epoch's record. With --tensorboard all of it is written for TensorBoard."""
    words = [f"{k} {v:.4g}" for k, v in record.items() if k in ("loss", "std", "images_per_s") or k.endswith("_top1")]
    log("  ".join([f"epoch {record['epoch']}/{args.epochs}", *words]))
    if args.tensorboard and rank_and_world()[0] == 0:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(args.out) as writer:
            for name, value in record.items():
                writer.add_scalar(name, value, record["epoch"])


def log_end(args, train):
    """Say that a run is finished, where it is, and what its images were if these are the demo's."""
    log(f"finished: {args.out}" + (f"\n{DEMO}" if train.name == "patterns" else ""))


# --------------------------------------------------------------------- 6. flags
# The command lines follow from tables, {group: {name: (value, what it is, limits)}}: each name is a flag. limits: words
# to choose from, or (least, most), perhaps with a word for a special number. Without limits a number is not below 0.
# A value of None, or an empty list, has the type of its limits.

FOLDER = dict(  # the flags of what `save_run`, `load_run` and `log_epoch` write and read
    out=(None, "folder of the run; one that has begun goes on"),
    resume=(None, "begin a new --out with another run's last.pt, for more --epochs"),
    keep_every=(0, "keep a copy of last.pt every N epochs; 0: none"),
    tensorboard=(False, "also write the metrics for TensorBoard"),
)
RUN = dict(
    run=dict(  # with a method's own table, all that the numbers of a run depend on
        dataset=("patterns", "data set; it also chooses the recipe", DATASETS),
        seed=(0, "seed of all random numbers", (0, 2**63 - 1)),
        init=(None, "start the encoder from a checkpoint, of this project or another"),
        init_prefix=(None, "prefix of the encoder's names in --init's file, if it has several"),
        amp=("auto", "auto: bf16 on GPUs that have it; off: float32", ("auto", "bf16", "off")),
    ),
    operation=dict(  # may differ between two calls of one run
        data_dir=(None, "its folder, with train/, and val/ or test/; for `folder` any tree of images"),
        **FOLDER,
        knn_every=(10, "evaluate by kNN every N epochs; 0: never"),
        device=("auto", "auto: a GPU where there is one", ("auto", "cuda", "cpu")),
        compile=(False, "compile the encoders: minutes at the start, then faster steps"),
        workers=(None, "processes that load images, per training process", (0, 1024)),
        show_views=(None, "write a picture of the inputs, a .png, and exit"),
    ),
)
EVALUATION = {  # the flags that both evaluations have
    "what is evaluated": dict(
        checkpoint=(None, "a run's folder, last.pt, backbone.pt; or others' FILE"),
        dataset=(None, "default: what the encoder was trained on, or patterns", DATASETS),
        data_dir=(None, "its folder (default: where the run had it)"),
        encoder=(None, "default: the one that the method's authors evaluate", ("query", "momentum")),
        random_init=(False, "evaluate the encoder of RUN as it was before training"),
        baselines=(True, "evaluate raw pixels and the untrained encoder, too"),
    ),
    "encoder, of a FILE of others": dict(
        arch=(None, "vit_tiny, resnet18, ..., or any timm model"),
        image_size=(None, "side of the images (default: 224; custom encoder: 32)", (1, math.inf)),
        patch_size=(None, "of a ViT (default: 16)", (1, math.inf)),
        num_heads=(None, "of a ViT (default: timm's number)", (1, math.inf)),
        norm=(None, "whose mean and deviation normalise images (default: imagenet, or as a tag of timm's says)", NORMS),
        prefix=(None, "which encoder of a FILE: what stands before its names"),
    ),
    "operation": {name: (RUN["run"] | RUN["operation"])[name] for name in ("seed", "workers", "device", "amp")},
}


def argument(value, what, limits=()):
    """Return argparse's options for a row. A list is any number of values, a bool a pair of flags, --x and --no-x."""
    options = dict(help=what if value is None or value is False else f"{what} (default: %(default)s)")
    if isinstance(value, bool):
        return options | dict(action=argparse.BooleanOptionalAction)
    if isinstance(value, (tuple, list)):
        options |= dict(nargs=len(value) if isinstance(value, tuple) else "*")
    words = [x for x in limits if isinstance(x, str)]
    kind = next((type(x) for x in (*tree_leaves(value), *limits) if isinstance(x, (int, float))), str)
    if kind is str:
        return options | (dict(choices=words) if words else {})

    def number(text):
        return text if text in words else kind(text)

    number.__name__ = kind.__name__  # for argparse's message
    return options | dict(type=number, metavar="N" if kind is int else "X")


def option(name):
    """Return the flag of a value: crop_scale -> --crop-scale."""
    return "--" + name.replace("_", "-")


def defaults(tables):
    """Return the values of tables, {name: value}, lists as tuples."""
    pairs = [(name, value) for table in tables.values() for name, (value, *_) in table.items()]
    return {name: tuple(value) if isinstance(value, list) else value for name, value in pairs}


def default_folder(*parts):
    """Return a run's default --out, which is named after what it is."""
    name = re.sub(r"[^\w.-]+", ",", "-".join(parts))
    return f"runs/{name if len(name) < 160 else name[:150] + hashlib.sha256(name.encode()).hexdigest()[:8]}"


def check_given(given, values, rows):
    """Exit with an error message if a value that is given has no effect, or is outside of its row's limits.

    given: {name: value}. values: those of the recipe. rows: {name: row of a table}.
    """
    for name, value in given.items():
        if name not in values:
            fail(f"{option(name)} has no effect: the recipe of these choices has no such value")
        limits = [x for x in (*rows[name], ())[2] if not isinstance(x, str)]
        least, most = limits or (0, math.inf)
        numbers = [x for x in tree_leaves(value) if isinstance(x, (int, float))]
        if not all(least <= x <= most for x in numbers):
            fail(f"{option(name)} {value}: give {least} to {most}")
        if name.endswith(("_scale", "_ratio", "_sigma")) and numbers[0] > numbers[-1]:
            fail(f"{option(name)} {value}: give the smaller number first")


def parse(script, doc, argv, tables, recipe=None):
    """Return a namespace with the value of each name of the tables: what is given, else the recipe's or the table's.

    recipe: a function of a namespace, what is given and None for the rest; it returns {name: value}.
    """
    how = dict(description=(doc or "").partition("\n")[0], argument_default=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(f"{script}.py", allow_abbrev=False, add_help=False, **how)
    parser.error = lambda message: fail(f"{message} (see python {script}.py --help)")
    rows = {name: row for table in tables.values() for name, row in table.items()}
    for group, table in tables.items():
        add = parser.add_argument_group(group).add_argument
        for name, row in table.items():
            alone = dict(nargs="?", metavar="RUN") if name == "checkpoint" else {}  # the only one without a flag
            add(name if alone else option(name), **argument(*row), **alone)
    given, values = vars(parser.parse_known_args(argv)[0]), defaults(tables)
    if recipe:
        run = {name: values[name] for name in defaults(RUN) if name in values}
        values = run | recipe(argparse.Namespace(**dict.fromkeys(values) | run | given))
    parser.add_argument("-h", "--help", action="help", help="show this, with the defaults of --dataset")
    parser.set_defaults(**dict.fromkeys(rows) | values)
    args = vars(parser.parse_args(argv))
    check_given(given, values, rows)
    args |= {name: os.path.abspath(args[name]) for name in given.keys() & {"data_dir", "init"}}  # to be read later
    args = argparse.Namespace(**{name: tuple(x) if isinstance(x, list) else x for name, x in args.items()})
    if given.get("tensorboard") and importlib.util.find_spec("tensorboard") is None:
        fail("--tensorboard needs a package: pip install tensorboard")
    if "knn_every" in values:  # a training
        if args.show_views and not args.show_views.lower().endswith(".png"):
            fail(f"--show-views {args.show_views}: give a name that ends in .png")
        if args.min_lr > args.lr:
            fail(f"--min-lr {args.min_lr} is above --lr {args.lr}, the peak of the learning rate")
        if args.out is None:
            changed = sorted(given.keys() - RUN["operation"].keys() - {"dataset", "arch", "seed"})
            changed = [f"{name}{shown(given[name])}" for name in changed]
            place = f"folder-{os.path.basename(args.data_dir or '')}" if args.dataset == "folder" else args.dataset
            args.out = default_folder(script, place, args.arch, f"s{args.seed}", *changed)
    return args


# --------------------------------------------------------------------- 7. files


def write_file(path, write):
    """On the main process call write(binary file), flush it to the disk, put it in place: whole or not at all."""
    if rank_and_world()[0] == 0:
        temporary = Path(f"{path}.{os.getpid()}.tmp")  # two runs in one folder do not mix their bytes
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:  # torch's writer turns an OSError into a RuntimeError
            reason = str(error)
            if temporary.exists():
                size, free = temporary.stat().st_size / 1e6, shutil.disk_usage(temporary.parent).free / 1e6
                reason += f"; {size:.1f} MB of it were written, {free:.1f} MB of the disk are free"
                temporary.unlink()
            fail(f"cannot write {path} ({reason}): what was there is kept, and the same command goes on from it")


def open_run(args, images):
    """Look at --out before the work, and write its config.json. Return all values that a run's numbers depend on."""
    config = {k: x for k, x in vars(args).items() if k not in RUN["operation"]} | {"images": images.checksum()}
    out = Path(args.out)
    found = sorted(path.name for path in out.iterdir() if path.suffix != ".tmp") if out.is_dir() else []
    if found and not os.access(out, os.W_OK):
        fail(f"--out {out} cannot be written")
    if found and "last.pt" not in found:  # but for what a first epoch left: this run's, or config.json alone
        old = json.loads((out / "config.json").read_text()) if "config.json" in found else {}
        is_this = json.loads(json.dumps(config, default=str)).items() <= old.items()
        if not is_this and (found != ["config.json"] or "images" not in old):
            fail(f"--out {out} is not empty ({', '.join(found[:3])}), and has no last.pt of this run: give another")
    if rank_and_world()[0] == 0:
        for path in out.glob("*.tmp"):  # what a killed save left
            path.unlink()
    if "last.pt" not in found:
        about = json.dumps(vars(args) | config | versions(), default=str)
        write_file(out / "config.json", lambda file: file.write(about.encode()))
    return config


def save_run(args, config, info, state, records):
    """Write a run's folder at the end of an epoch. last.pt is all that it needs to go on, and is written last.

    info: of the encoder in backbone.pt, see `backbone_info`; None: no backbone.pt. state: {name: module, optimizer or
    tensor}, with a "model".
    """
    state = {name: part if torch.is_tensor(part) else part.state_dict() for name, part in state.items()}
    state |= dict(records=records, config=config) | (dict(backbone=info) if info else {})
    if not all(x.isfinite().all() for x in tree_leaves(state) if torch.is_tensor(x)):
        fail(f"weights are not finite, so {args.out} stays as it was: give a lower --lr, a new --out")
    out, epoch = Path(args.out), records[-1]["epoch"]
    metrics = "".join(json.dumps(record, default=float) + "\n" for record in records)
    if info:
        backbone = info | {"state_dict": encoder_weights(state["model"], info["encoder"])}
        write_file(out / "backbone.pt", lambda file: torch.save(backbone, file))
    write_file(out / "metrics.jsonl", lambda file: file.write(metrics.encode()))
    if args.keep_every and epoch % args.keep_every == 0:
        write_file(out / f"epoch-{epoch:04d}.pt", lambda file: torch.save(state, file))
    write_file(out / "last.pt", lambda file: torch.save(state, file))


def load_run(args, config, state):
    """Load the run in --out or, if that is new, --resume's, or --init's encoder. Return the records of its epochs.

    state: as in `save_run`; its parts are changed in place.
    """
    own, records = Path(args.out, "last.pt"), []
    if path := own if own.exists() else args.resume:
        saved = load_checkpoint(path)
        with fitting(path):
            old, records = saved["config"], saved["records"]
            differ = [f"{option(k)} was {old.get(k)}, is {x}" for k, x in config.items() if old.get(k) != x]
            if path == own and differ:
                advice = f"give what was, or another --out, with --resume {path} for more epochs or other images"
                fail(f"{path} is of another configuration ({'; '.join(differ)}): {advice}")
            same_images = old.get("images") == config["images"]
            for name, part in state.items():
                if torch.is_tensor(part):  # for other images it stays as it begins
                    part.copy_(saved[name] if same_images else part)
                elif isinstance(part, torch.optim.Optimizer):  # its buffers: learning rate, weight decay are this run's
                    part.load_state_dict(part.state_dict() | dict(state=saved[name]["state"]))
                else:
                    part.load_state_dict(saved[name])
        if path != own and len(records) >= args.epochs:
            fail(f"{path} has made {len(records)} epochs, and --epochs {args.epochs} has no more: give more")
        log(f"going on from {path}, after epoch {len(records)}")
    elif getattr(args, "init", None):
        model = state["model"]
        weights, _ = fitting_weights(args.init, model.backbone, args.init_prefix)
        for encoder in {model.backbone, getattr(model, "momentum_backbone", model.backbone)}:
            encoder.load_state_dict(weights)
    if any(mark != (config, len(records)) for mark in from_all((config, len(records)))):
        fail("the processes differ in flags, images or epoch: --data-dir and --out must be on disks that all share")
    return records


def versions():
    """Versions, machine and commit."""
    commit = None
    with contextlib.suppress(OSError):
        git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    name = torch.cuda.get_device_name() if torch.cuda.is_initialized() else f"CPU, {torch.get_num_threads()} thread(s)"
    packages = {module.__name__: str(module.__version__) for module in (torch, torchvision, timm, np)}
    return {"python": sys.version.split()[0], **packages, "machine": name, "commit": commit}
