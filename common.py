"""Data, evaluation and the files of a run: what the method files share, and nothing of training.

    1. data        load_images -> ImageSet (patterns, cifar10, ..., imagenet, folder); OwnImages; uniform, generator
    2. views       View declares one; ViewDataset draws and cuts in the loader; colour_views works on the device
    3. evaluation  extract_features, knn_predict, embedding_health; what both evaluations share
    4. encoders    build_backbone, load_backbone, load_published
    5. processes   fail, say, progress; join_processes, StopRequest
    6. flags       run_parser, evaluation_parser; parse: recipe and command line; settle
    7. run         Run: the folder, checkpoints and records of a run

Conventions: images are RGB. Loaders give uint8 (N, 3, H, W). On the device images are float in [0, 1], then normalised.
Boxes are (top, left, height, width) in pixels. A label of -1 means "none".
"""

import argparse
import atexit
import contextlib
import copy
import ctypes
import datetime
import difflib
import errno
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, Dataset, default_convert
from torchvision.transforms.functional import rgb_to_grayscale, solarize, to_pil_image
from torchvision.transforms.v2.functional import to_image

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


# ---------------------------------------------------------------------- 1. data
# Random numbers as a pure function of what is being made; data sets by name, by folder, or a user's own.


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


# What a random stream is for: a key of `generator`, so that no two draws share one. The numbers never change.
STREAM_STEP, STREAM_ORDER = 0, 1


def uniform(seed, epoch, index, count):
    """Uniform numbers for images: (n, count) float64 in [0, 1).

    index: (n,) ints. A number is a pure function of (seed, epoch, index, position). So an image gets the same
    numbers whatever batch, worker or process asks for them.
    """
    start = _hash(seed, 0, epoch, np.asarray(index))[:, None]  # the 0 stays, so that the numbers stay
    bits = _mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)) * 2.0**-53


def generator(*keys):
    """Return a torch CPU generator that is seeded by a hash of integer keys, for example (seed, step, stream)."""
    return torch.Generator().manual_seed(int(_hash(*keys)[0] >> np.uint64(1)))


def seed_step(seed, step):
    """Seed the global generator by (seed, step, rank). Drop-path draws from it."""
    torch.manual_seed(generator(seed, step, STREAM_STEP, rank_and_world()[0]).initial_seed())


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
PARTS = "train", "val", "test", "unlabeled"  # the names of the folders in a data set's folder
SPLITS = "train", "training", "val", "valid", "validation", "test", "testing"  # a tree with these is no single set


class ImageSet:
    """Images with labels, either decoded (one uint8 array) or as paths that are decoded when asked for.

    labels (n,) int64, -1 where there is none; classes: names; paths (n,) bytes below the folder `root`, in one array,
    which loader workers share as they would not share strings; images[i] -> uint8 array (H, W, 3).
    """

    def __init__(self, name, labels, classes, array=None, paths=None, root=""):
        self.name = self.owner = name
        self.array, self.paths, self.root = array, paths, root
        self.labels, self.classes = np.asarray(labels, np.int64), list(classes)
        self.rows, self.held = np.arange(len(self.labels)), {}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.held.pop(i) if i in self.held else self.read(i)

    def read(self, i):
        """Return the image, decoded now."""
        return self.array[i] if self.array is not None else read_image(self.path(i))

    def item(self, i):
        """(image, label)."""
        return self[i], int(self.labels[i])

    def path(self, i):
        return os.path.join(self.root, os.fsdecode(self.paths[i]))

    def where(self, i):
        """What an error message calls an image."""
        return self.path(i) if self.paths is not None else f"image {self.rows[i]} of {self.owner}"

    def sizes(self, index):
        """(n, 2) int64 heights and widths. What has to be decoded for it is held until it is asked for."""
        if self.array is not None:
            return np.array([self.array.shape[1:3]] * len(index))
        self.held |= {i: self[i] for i in map(int, index)}
        return np.array([self.held[i].shape[:2] for i in map(int, index)])

    def subset(self, index):
        """Return the images of the given rows, in that order."""
        part = copy.copy(self)
        part.labels, part.rows, part.held = self.labels[index], self.rows[index], {}
        part.array, part.paths = (None if rows is None else rows[index] for rows in (self.array, self.paths))
        return part

    def labelled(self):
        """Those of the images that are not known to be without a label."""
        return self.subset(np.flatnonzero(self.labels >= 0)) if (self.labels < 0).any() else self

    def checksum(self):
        """16 hexadecimal digits that tell whether two image sets are the same. They take seconds.

        They depend on the labels; of files on all names below the data set's folder, and on 1,000 byte sizes; of an
        array on its shape, and on 1,000 images; of a user's own Dataset on its length only.
        """
        digest = hashlib.sha256(self.labels.astype("<i8").tobytes())
        spread = np.linspace(0, len(self) - 1, min(1000, len(self))).round().astype(np.int64)
        if self.paths is not None:
            files = [self.path(i) for i in spread]
            sizes = [os.path.getsize(file) if os.path.exists(file) else -1 for file in files]
            digest.update(b"\0".join(self.paths.tolist()) + repr(sizes).encode())
        elif self.array is not None:
            digest.update(repr(self.array.shape).encode() + self.array[spread].tobytes())
        return digest.hexdigest()[:16]


def described(images):
    """Return what lines of text call a set of images: its name and, if there is one, its folder."""
    return f"{images.name} in {images.root}" if images.root else images.name


class OwnImages(ImageSet):
    """A user's own map-style Dataset as an ImageSet. Its items are read when they are asked for, never before.

    An item is an image, PIL's, a uint8 array (H, W[, 3]) or a uint8 tensor (C, H, W), or a tuple (image, label, ...).
    labelled: its labels are to be read with the images, by `item`; `labels` are -1.
    owner: what an error calls the data.
    """

    def __init__(self, data, labelled=False, owner="your data set"):
        own, stream = type(data), isinstance(data, torch.utils.data.IterableDataset)
        if stream or not hasattr(own, "__len__") or not hasattr(own, "__getitem__"):
            fail(f"{owner} is of type {own.__name__}: give a map-style Dataset, with __len__ and __getitem__")
        if not (count := len(data)):
            fail(f"{owner} is empty: its length is 0")
        names = getattr(data, "classes", None) if labelled else None
        super().__init__("own", np.full(count, -1), () if names is None else names)
        self.owner, self.data, self.asked = owner, data, labelled

    def labelled(self):
        return self

    def read(self, i):
        return self.to_image(self.data[int(self.rows[i])], i)

    def item(self, i):
        """(image, label). Raises BadImage if a label is asked for and the item has none, or no integer."""
        item = self.data[int(self.rows[i])]
        label = int(self.labels[i])
        if self.asked and label < 0:
            with named(f"the label of {self.where(i)}"):
                if not isinstance(item, (tuple, list)) or len(item) < 2:
                    raise TypeError(f"found {type(item).__name__}, but an evaluation needs items (image, label)")
                label = int(np.int64(operator.index(item[1])))
        return self.to_image(item, i), label

    def to_image(self, item, i):
        """Return the image of an item as uint8 (H, W, 3). Raises BadImage if it is of another kind."""
        image = item[0] if isinstance(item, (tuple, list)) and len(item) else item
        with named(self.where(i)):
            if isinstance(image, Image.Image):
                return to_rgb(image)
            if isinstance(image, (np.ndarray, torch.Tensor)) and "uint8" in str(image.dtype) and image.ndim in (2, 3):
                found = to_image(np.ascontiguousarray(image) if isinstance(image, np.ndarray) else image)
                if len(found) in (1, 3):
                    return found.expand(3, -1, -1).permute(1, 2, 0).numpy()
            kind = [type(image).__name__, *(str(getattr(image, x)) for x in ("dtype", "shape") if hasattr(image, x))]
            wanted = "PIL images, uint8 arrays (H, W, 3) or uint8 tensors (3, H, W), alone or as (image, label)"
            raise TypeError(f"found {' '.join(kind)}, but items are {wanted}")


class BadImage(Exception):
    """An image that cannot be used. The message is one line, names it and says why."""


def fail_at_image(error):
    """Exit with an error message about an image that cannot be used."""
    fail(f"{error}. A training script with --check-images lists all such images")


@contextlib.contextmanager
def named(where):
    """Inside, every error becomes a BadImage that says where it happened, in the error's own words."""
    try:
        yield
    except Exception as error:  # a damaged image may raise anything
        raise BadImage(f"{where}: {error or type(error).__name__}".replace("\n", "\\n")) from error


def to_rgb(image):
    """Return a PIL image of any mode with 8 bits per channel as uint8 (H, W, 3)."""
    if image.mode.startswith(("I", "F")):  # `convert` would clip them
        raise ValueError(f"values of mode {image.mode} have no known white: convert it to 8 bits per channel")
    return np.asarray(image.convert("RGB"))


def read_image(path):
    """Return an image file as uint8 (H, W, 3), turned as its EXIF says. Raises BadImage if Pillow cannot read it."""
    with named(f"cannot read the image {path}"), Image.open(path) as image:
        image.load()
        with contextlib.suppress(Exception):  # an orientation that cannot be read counts as none
            ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image)


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
    """Return the data set `patterns`, by its arguments alone: uint8 images (count, size, size, 3) and labels (count,).

    Scale, angle, phase, a warp, sign, contrast, a gradient of light and two muted colours are random, with a little
    noise, so that neither colour nor single pixels tell the kind: an encoder has to learn the shape.
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


def visible(folder, above=()):
    """Return the names of the folders and of the images in a folder, sorted. Hidden ones are passed over.

    So is a link to a folder that is being listed: to this one or one of `above`, or to one that holds them.
    """
    inside = [os.path.join(os.path.realpath(path), "") for path in (folder, *above)]
    folders, images = [], []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name[0] == "." or entry.name == "@eaDir":  # a NAS's thumbnails
            continue
        if not entry.is_dir():
            images += [entry.name] if entry.name.lower().endswith(EXTENSIONS) else []
        elif not any(path.startswith(os.path.join(os.path.realpath(entry.path), "")) for path in inside):
            folders.append(entry.name)
    return folders, images


def list_images(folder, above=()):
    """Yield the paths of all images below a folder: its own first. above: the folders in which it is being listed."""
    folders, images = visible(folder, above)
    yield from (os.path.join(folder, name) for name in images)
    for name in folders:
        yield from list_images(os.path.join(folder, name), (folder, *above))


def class_folders(folder):
    """Return the names of the class folders; none in a folder of images. Exits with an error message if it has both."""
    folders, images = visible(folder)
    if folders and images:
        found = f"the folder {folders[0]!a} beside the image {images[0]!a}"
        fail(f"{folder} has {found}: give one folder per class, or only images, which are then without labels")
    return folders


def list_folder(name, root, part, unlabeled):
    """Return the images of root/part: (paths (n,) bytes below root, labels (n,) int64, class names).

    part: train, val or test, with the same class folders as train/ or, without labels, with none; or "" for all of root
    without labels. unlabeled: add the images of root/unlabeled. Exits with an error message if the folders are others.
    """
    named = visible(root)[0]
    if odd := [p for p in named if (p.lower() in PARTS and p not in PARTS) or (not part and p.lower() in SPLITS)]:
        fail(f"{root} has {'/, '.join(odd)}/: name them train/, and val/ or test/ beside it, in small letters")
    folder = os.path.join(root, part) if part else root
    classes, trained = (class_folders(f) if part else [] for f in (folder, os.path.join(root, "train")))
    if name == "imagenet100" and set(IMAGENET100) <= set(trained):
        classes, trained = ([c for c in names if c in IMAGENET100] for names in (classes, trained))
    if odd := sorted(set(classes) ^ set(trained)):
        counts = [f"{len(names) or 'no'} class folders in" for names in (trained, classes)]
        found = f"{counts[0]} {root}/train, {counts[1]} {folder}; not in both: {', '.join(map(ascii, odd[:5]))}"
        fail(f"{found}. Give both one folder per class, by the same names")
    trees = [(label, os.path.join(folder, c)) for label, c in enumerate(classes)] or [(-1, folder)]
    if unlabeled and "unlabeled" in named:
        trees.append((-1, os.path.join(root, "unlabeled")))
    paths, labels = [], []
    for label, tree in trees:
        found = [os.fsencode(path[len(os.path.join(root, "")) :]) for path in list_images(tree, (folder,))]
        if not found:
            fail(f"no image in {tree}: an image's name ends in one of {' '.join(EXTENSIONS)}")
        paths += found
        labels += [label] * len(found)
    return np.array(paths), np.array(labels), classes


def decode_all(images):
    """Return the images as one array (n, H, W, 3), or None if they are not all of one size."""
    decoded = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for image in pool.map(images.read, range(len(images))):
            decoded.append(image)
            if image.shape != decoded[0].shape:
                return None
            if len(decoded) % 1000 == 0:
                progress(f"reading images: {len(decoded)} of {len(images)}")
    return np.stack(decoded)


def read_folder(name, root, part="", cache=True, unlabeled=False):
    """Return the images of root/part as an ImageSet, see `list_folder`. The first process lists the files for all.

    cache: images of one size of up to 96 px are decoded at once. Exits with an error message if there are none.
    """
    root = os.fspath(root)
    try:
        paths, labels, classes = from_first(lambda: list_folder(name, root, part, unlabeled))
        images = ImageSet(name, labels, classes, None, paths, root)
        if cache and max(images[0].shape) <= 96:
            images.array = decode_all(images)
    except BadImage as error:
        fail_at_image(error)
    except OSError as error:
        fail(str(error))
    return images


def load_images(name, data_dir=None, train=True, size=32, cache=True, unlabeled=False):
    """Return a data set by name, or any data_dir with train/ (and val/ or test/), one folder per class.

    size: of `patterns` only, which is generated; unlabeled: also return images without labels, for pre-training.
    Returns an ImageSet, or None where train is False and there is no test set. Exits with an error message if there is
    no data. Downloads only into the folder data/, an empty folder, or one with torchvision's files.
    """
    root = Path(data_dir or "data")
    if data_dir is None and name in ("imagenet", "imagenet100", "folder"):
        fail(f"--dataset {name} needs --data-dir DIR. For labels, DIR has train/ and val/, with one folder per class")
    if data_dir is not None:
        if not root.is_dir():
            fail(f"--data-dir {data_dir} {'is not a folder' if root.exists() else 'does not exist'}")
        if (root / "train").is_dir():
            part = next((p for p in (("train",) if train else ("val", "test")) if (root / p).is_dir()), None)
            return read_folder(name, root, part, cache, unlabeled and train) if part else None
        if name == "folder":
            return read_folder(name, root, "", cache) if train else None
        if name in ("patterns", "imagenet", "imagenet100"):
            fail(f"--data-dir {data_dir} has no train/ with one folder per class: --dataset folder takes any images")
        if not _may_download(root):
            fail(f"--data-dir {data_dir} has neither train/ nor torchvision's files of {name}: give an empty folder")
    if name == "patterns":
        array, labels = make_patterns(4096, size, seed=0) if train else make_patterns(1024, size, seed=1)
        return ImageSet(name, labels, PATTERNS, array)
    return _load_torchvision(name, root, train, unlabeled)


def _may_download(root):
    """True for the default folder, an empty one (but for hidden files), and one with files of torchvision's."""
    names = {path.name for path in root.iterdir() if path.name[0] != "."}
    known = torchvision.datasets.CIFAR10, torchvision.datasets.CIFAR100, torchvision.datasets.STL10
    return root == Path("data") or not names or any({d.base_folder, d.filename} & names for d in known)


def _load_torchvision(name, root, train, unlabeled):
    split = {"train": train}
    if name == "stl10":
        split = {"split": ("train+unlabeled" if unlabeled else "train") if train else "test"}
    try:
        for turn in range(3):  # the first process of all downloads, then each node's first; the others find the files
            if turn == sum(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK")):
                with contextlib.redirect_stdout(sys.stderr):
                    data = getattr(torchvision.datasets, name.upper())(str(root), download=True, **split)
            if dist.is_initialized():
                dist.barrier()
    except (OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        fail(f"cannot get {name} into {root} ({reason}): connect, or give --data-dir with train/ and test/ folders")
    array = data.data.transpose(0, 2, 3, 1) if name == "stl10" else data.data
    return ImageSet(name, data.labels if name == "stl10" else data.targets, data.classes, np.ascontiguousarray(array))


def own_images(train, test, workers=0):
    """Return a user's Datasets as ImageSets; their labels are asked for if there is a test set, which may be None.

    workers: of the loaders to come. Only without any are first items tried here: a Dataset that opens a file then would
    share one position in that file between the workers. Exits with an error message if the data sets cannot be used.
    """
    if train is None:
        fail("a data set of your own to test on needs one to train on, too")
    train = OwnImages(train, labelled=test is not None, owner="your training data set")
    test = None if test is None else OwnImages(test, labelled=True, owner="your test data set")
    if test is not None and train.classes and test.classes and train.classes != test.classes:
        fail("your training and test data sets have different `classes`: the names and their order have to be the same")
    if workers == 0:
        try:
            for images in (train,) if test is None else (train, test):
                images[0]
        except BadImage as error:
            fail_at_image(error)
    return train, test


class Problems(Dataset):
    """What is wrong with each image of a set, as text. It is empty if the image can be used."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        try:
            self.images.item(i)
        except BadImage as error:
            return str(error)
        return ""


def check_images(sets):
    """Read every image of some ImageSets once, on all cores. List what cannot be used, and end the program."""
    if rank_and_world()[1] > 1:
        fail("--check-images takes all cores by itself: start one process, without torchrun")
    workers = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
    done, bad, total = 0, 0, sum(map(len, sets))
    for images in sets:
        for batch in Loader(Problems(images), torch.device("cpu"), workers, batch_size=64, collate_fn=list):
            found = [problem for problem in batch if problem]
            done, bad = done + len(batch), bad + len(found)
            for problem in found:
                say(problem)
            progress(f"checking images: {done} of {total}, {bad} cannot be used")
    if bad:
        fail(f"{bad} of {total} images cannot be used. Mend or remove them; a run with other images begins anew")
    say(f"all {total} images can be used")
    raise SystemExit(0)


def open_images(args, train=None, test=None):
    """(training images, test images or None) that the flags name, or a user's own.

    Exits with an error message if there are none, or too few for one batch.
    """
    if train is not None or test is not None:
        train, test = own_images(train, test, args.workers)
    else:
        options = dict(size=args.image_size, cache=not (args.no_cache or args.check_images))
        train = load_images(args.dataset, args.data_dir, True, unlabeled=True, **options)
        test = load_images(args.dataset, args.data_dir, False, **options) if len(train.classes) > 1 else None
    if args.check_images:
        check_images([train] if test is None else [train, test])
    if len(train) < args.batch_size:
        fail(f"{len(train)} images are fewer than one batch: give --batch-size {len(train)} or less")
    return train, test


# --------------------------------------------------------------------- 2. views
# A method file declares its views. They are drawn and cut in the loader, and coloured on the device.

# The uniform numbers that one view takes per image: what each is for, and how many
DRAWS = dict(area=10, aspect=10, position=2, jitter_coin=1, brightness=1, contrast=1, saturation=1, hue=1, order=1)
DRAWS |= dict(gray_coin=1, blur_coin=1, sigma=1, solarize_coin=1, flip_coin=1)
VIEW_DRAWS = sum(DRAWS.values())
COLOUR = ("brightness", "contrast", "saturation", "hue", "order", "gray", "sigma", "solarize", "flip")
ORDERS = torch.tensor(list(itertools.permutations(range(4))))  # of brightness, contrast, saturation, hue
RESAMPLE = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class View(NamedTuple):
    """One view of an image as a method file declares it: a random resized crop, then colour changes, then a flip."""

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
    """Return the boxes of random crops, as torchvision's RandomResizedCrop draws them, for many images at once.

    sizes: (n, 2) heights and widths. area, aspect: (n, tries) random shares of the image's area, and random widths /
    heights. position: (n, 2) uniform in [0, 1): of the top and the left. The first try that fits is taken. If none
    fits, it is the centre crop whose aspect ratio is nearest to `ratio` (lowest, highest) or, with `whole`, the whole
    image. The boxes are (n, 4) int64 (top, left, height, width) inside the image.
    """
    height, width = (sizes[:, i].astype(np.float64) for i in (0, 1))
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
    """Draw one view of n images. Return ((n, 4) int64 boxes, (n, 9) float32 colour parameters with columns as COLOUR).

    view: a View. sizes: (n, 2) heights and widths. draws: (n, VIEW_DRAWS) uniform in [0, 1). Boxes are as in
    `random_resized_crop`. `colour` takes the parameters. Where nothing is changed, factors are 1, and the rest is 0.
    area, sigma: (n,) values of the method's own; NaN, or None: drawn as the view says. position: (n, 2), and blur_coin:
    (n,), uniform numbers of the method's own; NaN, or None: those of `draws`.
    """
    own = name_draws(draws)

    def choose(given, drawn):
        return drawn if given is None else np.where(np.isnan(given), drawn, given)

    def between(low, high, draw):
        return low + (high - low) * draw

    areas = choose(None if area is None else np.asarray(area)[:, None], between(*view.area, own["area"]))
    aspects = np.exp(between(*np.log(view.ratio), own["aspect"]))
    boxes = random_resized_crop(sizes, areas, aspects, choose(position, own["position"]), view.ratio, view.whole)

    jittered = own["jitter_coin"] < view.jitter_p
    factors = [
        np.where(jittered, between(max(0, 1 - most), 1 + most, own[name]), 1)
        for name, most in zip(("brightness", "contrast", "saturation"), view.jitter, strict=False)
    ]
    hue = np.where(jittered, view.jitter[3] * (2 * own["hue"] - 1), 0)
    blurred = choose(blur_coin, own["blur_coin"]) < view.blur_p
    sigmas = np.where(blurred, choose(sigma, between(*view.blur_sigma, own["sigma"])), 0)
    gray, solarized = own["gray_coin"] < view.gray_p, own["solarize_coin"] < view.solarize_p
    columns = *factors, hue, np.floor(own["order"] * 24), gray, sigmas, solarized, own["flip_coin"] < view.flip_p
    return boxes, np.stack(columns, 1).astype(np.float32)


def cut(image, box, size, interpolation="bilinear"):
    """Cut a box (top, left, height, width) from a uint8 image (H, W, 3) and resize it with antialiasing.

    Returns uint8 (size, size, 3). interpolation: a name of RESAMPLE.
    """
    top, left, height, width = (float(v) for v in box)
    y, x = int(top), int(left)  # resize alone would also see the pixels around the box
    image = Image.fromarray(image[y : math.ceil(top + height), x : math.ceil(left + width)])
    box = (left - x, top - y, left - x + width, top - y + height)
    return np.asarray(image.resize((size, size), RESAMPLE[interpolation], box=box))


class ViewDataset(Dataset):
    """Cuts the views of images in the loader's workers. It is asked for a whole batch of (epoch, index) keys at once.

    views: list of View. By default each is drawn from numbers of its own. A method whose views depend on each other
    gives `draw`: draw(index, sizes, draws) -> (cuts, colours), with index (n,) the rows of the images, sizes (n, 2)
    their heights and widths, draws (n, len(views) * VIEW_DRAWS + extra_draws) uniform in [0, 1); cuts: list over views
    of (rows (n,) of the images to cut from, boxes (n, 4), output size); colours: list over views of (n, 9) parameters.
    A batch is {'views': [uint8 (n, 3, S, S), ...], 'colour': (n, views, 9), 'index': (n,)}.
    """

    def __init__(self, images, views, seed, interpolation="bilinear", draw=None, extra_draws=0):
        self.images, self.views, self.seed, self.interpolation = images, views, seed, interpolation
        self.draw = draw or self.draw_independently
        self.num_draws = len(views) * VIEW_DRAWS + extra_draws

    def draw_independently(self, index, sizes, draws):
        cuts, colours = [], []
        for view, own in zip(self.views, np.split(draws, len(self.views), axis=1), strict=True):
            boxes, colour = draw_view(view, sizes, own)
            cuts.append((index, boxes, view.size))
            colours.append(colour)
        return cuts, colours

    def __getitems__(self, keys):
        epochs, index = np.array(keys).T
        draws = uniform(self.seed, epochs, index, self.num_draws)
        count = 16 if self.images.array is None else len(index)  # images that are decoded at once
        parts = [self.cut_views(index[i : i + count], draws[i : i + count]) for i in range(0, len(index), count)]
        views, colours = zip(*parts, strict=True)
        views = [torch.from_numpy(np.concatenate(view)).permute(0, 3, 1, 2) for view in zip(*views, strict=True)]
        colours = np.concatenate([np.stack(colour, 1) for colour in colours])
        return {"views": views, "colour": torch.from_numpy(colours), "index": torch.from_numpy(index)}

    def cut_views(self, index, draws):
        """Return the views of some images: ([uint8 (n, S, S, 3), ...], [colours (n, 9), ...])."""
        cuts, colours = self.draw(index, self.images.sizes(index), draws)
        views = [np.empty((len(index), size, size, 3), np.uint8) for _, _, size in cuts]
        for row in range(len(index)):
            read = functools.cache(self.images.__getitem__)  # an image that several views use is decoded once
            for view, (image_index, boxes, size) in zip(views, cuts, strict=True):
                view[row] = cut(read(image_index[row].item()), boxes[row], size, self.interpolation)
        return views, colours


class EpochSampler:
    """Batches of (epoch, index) keys: one permutation per (seed, epoch), whole batches, this process's rows of each."""

    def __init__(self, length, batch_size, seed):
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.set_epoch(0)

    def set_epoch(self, epoch, first_step=0, last_step=math.inf):
        """Choose the epoch, counted from 0, and which of its batches are left out.

        Both steps are counted over the whole run: first_step are made already, and it ends when last_step are made.
        """
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
    """--workers, or what suits: none beside a CPU that trains; up to 12 per training process for a GPU."""
    if args.workers is not None or device.type != "cuda" or sys.platform != "linux":  # there workers are not forked
        return args.workers or 0
    return min(12, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


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
    """A DataLoader that exits with an error message, naming the image, if one cannot be read.

    waited: seconds that the loop over it has waited for batches; began: when that loop began (time.perf_counter).
    """

    def __init__(self, data, device, workers=0, **options):
        if workers:
            atexit.register(end_workers)
            method = "fork" if sys.platform == "linux" else None  # forked workers share the decoded images
            options |= dict(num_workers=workers, multiprocessing_context=method, worker_init_fn=_start_worker)
            options["timeout"] = PATIENCE.total_seconds()  # a worker that cannot send a batch is an error, not a wait
        super().__init__(data, pin_memory=device.type == "cuda", **options)

    def __iter__(self):
        self.began = asked = time.perf_counter()
        self.waited = 0.0
        try:
            for batch in super().__iter__():
                self.waited += time.perf_counter() - asked
                yield batch
                asked = time.perf_counter()
        except BadImage as error:  # from a worker, with its traceback before the message
            fail_at_image(str(error).strip().splitlines()[-1].removeprefix("common.BadImage: "))


def make_loader(args, images, views, device, draw=None, extra_draws=0):
    """Batches of views of `images`, as --batch-size, --seed and --workers say. Arguments as `ViewDataset`.

    `loader.batch_sampler.set_epoch` chooses the epoch. The workers live as long as the run.
    """
    data = ViewDataset(images, views, args.seed, args.interpolation, draw, extra_draws)
    sampler = EpochSampler(len(images), args.batch_size, args.seed)
    workers = workers_of(args, device)
    options = dict(batch_sampler=sampler, collate_fn=default_convert, persistent_workers=workers > 0)
    return Loader(data, device, workers, **options)


def _per_image(value, x):
    return torch.as_tensor(value, dtype=x.dtype, device=x.device).reshape(-1, 1, 1, 1)


def adjust_brightness(x, brightness_factor):
    """Multiply each image by its factor (N,), and clamp it to [0, 1]."""
    return (x * _per_image(brightness_factor, x)).clamp_(0, 1)


def adjust_contrast(x, contrast_factor):
    """Blend each image with its mean gray value by its factor (N,)."""
    mean = rgb_to_grayscale(x).mean((1, 2, 3), keepdim=True)
    return torch.lerp(mean, x, _per_image(contrast_factor, x)).clamp_(0, 1)


def adjust_saturation(x, saturation_factor):
    """Blend each image with its gray version by its factor (N,)."""
    return torch.lerp(rgb_to_grayscale(x), x, _per_image(saturation_factor, x)).clamp_(0, 1)


def adjust_hue(x, hue_factor):
    """Rotate each image's hue by its factor (N,) in [-0.5, 0.5] turns. Value and saturation stay."""
    value, low = x.amax(1), x.amin(1)
    chroma = value - low
    r, g, b = x.unbind(1)
    safe = torch.where(chroma > 0, chroma, 1)
    sixth = torch.where(value == r, (g - b) / safe, torch.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe))
    sixth = sixth + 6 * _per_image(hue_factor, x)[:, 0]
    # A channel is value - chroma * clamp(min(k, 4 - k), 0, 1), k = (offset + sixths of a turn) mod 6.
    k = (sixth.unsqueeze(1) + torch.arange(5, 0, -2, dtype=x.dtype, device=x.device).view(1, 3, 1, 1)) % 6
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(k, 4 - k).clamp_(0, 1)


def gaussian_blur(x, sigma, largest=2.0):
    """Blur each image by a Gaussian of its sigma (N,), in pixels, with reflected borders. 0 leaves an image as it is.

    largest: the largest of all sigmas. The kernels reach 5 sigma to each side, which holds all but 6e-7 of a Gaussian;
    in smaller images they reach as far as can be mirrored. They are equally wide for all sigmas up to 2, so that an
    image's result does not depend on the rest of its batch.
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


def _on(x, rows, function, *parameters):
    """Apply a function to the given rows of a batch, in place. If these are all rows, nothing is copied."""
    if len(rows) == len(x):
        return function(x, *parameters)
    if len(rows):
        rows = rows.to(x.device, non_blocking=True)
        x.index_copy_(0, rows, function(x.index_select(0, rows), *(p.index_select(0, rows) for p in parameters)))
    return x


def colour(x, parameters):
    """Colour images: jitter in each image's own order, then grayscale, blur, solarize, flip. Returns float in [0, 1].

    x: uint8 (N, 3, H, W) on the device. parameters: (N, 9) on the CPU, with columns as COLOUR, see `draw_view`.
    Nothing is drawn here. The CPU decides which images an operation touches, so the device is never waited for.
    """
    x, moved = x.float().div_(255), parameters.to(x.device, non_blocking=True).float()
    p, on = (dict(zip(COLOUR, table.float().unbind(1), strict=True)) for table in (parameters, moved))
    jittered = (parameters[:, :4] != torch.tensor([1.0, 1, 1, 0])).any(1, keepdim=True)
    steps = ORDERS[p["order"].long()]  # (N, 4): which of the four comes first, second, ...
    # Hue costs most, so it is changed for all images at once, in turn 0. What comes before it has turns below 0.
    turns = torch.arange(4) - (steps == 3).long().argmax(1, keepdim=True)
    functions = adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue
    for turn, (step, function) in itertools.product(range(-3, 4), enumerate(functions)):
        rows = torch.nonzero((jittered & (steps == step) & (turns == turn)).any(1)).flatten()
        x = _on(x, rows, function, on[COLOUR[step]])
    x = _on(x, torch.nonzero(p["gray"]).flatten(), lambda v: rgb_to_grayscale(v).repeat(1, 3, 1, 1))
    blur = functools.partial(gaussian_blur, largest=p["sigma"].max().item())
    x = _on(x, torch.nonzero(p["sigma"]).flatten(), blur, on["sigma"])
    x = _on(x, torch.nonzero(p["solarize"]).flatten(), lambda v: solarize(v, 0.5))
    return _on(x, torch.nonzero(p["flip"]).flatten(), lambda v: v.flip(-1))


def colour_views(batch, device, memory_format=torch.channels_last):
    """Return a batch's views, moved to the device and coloured: a list of (n, 3, H, W), float in [0, 1].

    batch: of `ViewDataset`.

    memory_format: of the views. Views of one size are coloured in one pass, which costs a GPU fewer launches.
    """
    views = [v.to(device, non_blocking=True) for v in batch["views"]]
    for size in {v.shape[-1] for v in views}:
        same = [i for i, v in enumerate(views) if v.shape[-1] == size]
        x = colour(torch.cat([views[i] for i in same]), batch["colour"][:, same].transpose(0, 1).flatten(0, 1))
        for i, view in zip(same, x.chunk(len(same)), strict=True):
            views[i] = view.contiguous(memory_format=memory_format)
    return views


# ---------------------------------------------------------------- 3. evaluation
# Features of frozen encoders, nearest neighbours, signs of collapse; and what both evaluations share.


@contextlib.contextmanager
def exact_products():
    """Inside, products of float32 matrices are computed in float32, never in TF32. It is a decorator, too.

    TF32 keeps 10 of the 23 bits of each factor. That is enough to encode images. It is too few to compare neighbours,
    or to fit a classifier to a tolerance.
    """
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


class CentreCrops(Dataset):
    """Images as an evaluation sees them: (uint8 (3, size, size), label).

    An image that has this size is taken as it is. Of any other image it is the centre crop, after a resize that makes
    the shorter side 256/224 of `size`.
    """

    def __init__(self, images, size, interpolation="bilinear"):
        self.images, self.size, self.interpolation = images, size, interpolation

    def __getitem__(self, i):
        image, label = self.images.item(i)
        height, width = image.shape[:2]
        if (height, width) != (self.size, self.size):
            side = min(height, width) * 224 / 256  # the centre that a resize to 256/224 and a centre crop leave
            image = cut(image, ((height - side) / 2, (width - side) / 2, side, side), self.size, self.interpolation)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), label


@torch.no_grad()
def extract_features(encoder, images, info, device, batch_size=256, workers=0, amp=False, whole=True, what="features"):
    """Return the features and labels of all images, ((n, width) float32, (n,) int64), in order, on every process.

    Both are on the CPU.

    encoder: maps (N, 3, H, W) to (N, width), and is on the device; it is used in evaluation mode. images: an ImageSet.
    info: image_size, mean, std and interpolation, as in backbone.pt. batch_size: of each process. amp: encode in bf16.
    whole: False returns this process's rows only (`own_rows`), which it encodes. what: what the progress line calls it.
    A label is -1 where there is none.
    No gradient. Exits with an error message if a feature is not finite.
    """
    mine = own_rows(torch.arange(len(images)))
    crops = CentreCrops(images, info["image_size"], info["interpolation"])
    # A process without images encodes one for the features' width, and drops it.
    crops = torch.utils.data.Subset(crops, mine.tolist() or [0])
    features, labels = [], []
    with evaluation_mode(encoder):
        for i, (batch, label) in enumerate(Loader(crops, device, workers, batch_size=batch_size)):
            done = min(i * batch_size * rank_and_world()[1], len(images))  # by all processes, which are about as fast
            progress(f"{what}: {done} of {len(images)} images")
            x = normalize(batch.to(device, non_blocking=True).float().div_(255), info["mean"], info["std"])
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                features.append(encoder(x).flatten(1).float().cpu())
            labels.append(label)
    features, labels = (torch.cat(parts)[: len(mine)] for parts in (features, labels))
    odd = mine[~features.isfinite().all(1)].tolist()
    first = min(from_all(odd[0] if odd else len(images)))
    if first < len(images):
        fail(f"the encoder's features of {images.where(first)} are not finite")
    return (gather_uneven(features), gather_uneven(labels)) if whole else (features, labels)


@torch.no_grad()
@exact_products()
def knn_predict(train_x, train_y, test_x, k, temperature, num_classes):
    """Classify by weighted k-nearest neighbours: (m,) int64 on the CPU, on every process; (len(k), m) for several k.

    A neighbour votes for its class with exp(cosine / temperature). Votes are scaled so that the nearest one's is 1.
    train_x: (n, d), the bank, and train_y: (n,) int64 in [0, num_classes). In a process group each process gives its
    rows of the bank, which may be none. test_x: (m, d), the same and whole on every process. train_x and test_x are
    L2-normalised here. k: a number or several; one above the size of the bank counts all of it.
    Each process finds the nearest of its rows for a chunk of test images. The nearest of these are the nearest in the
    bank. So the result is exact but for the rounding of matrix products, and the memory is bounded. Neighbours that are
    equally near come in any order. No gradient. Source: Wu et al., arXiv 1805.01978.
    """
    bank, queries = (F.normalize(x.float(), dim=1) for x in (train_x, test_x))
    train_y, ks = train_y.to(bank.device), [k] if isinstance(k, int) else k
    longest = int(gather_uneven(torch.tensor([len(bank)])).max())  # all processes take the same chunks
    predicted, done = [], 0
    for chunk in queries.split(max(1, 2**26 // max(longest, num_classes))):
        progress(f"neighbours: found for {done} of {len(queries)} images")
        done += len(chunk)
        similarity, row = (chunk @ bank.T).topk(min(max(ks), len(bank)), dim=1)
        similarity, label = (gather_uneven(x.T).T for x in (similarity, train_y[row]))
        similarity, column = similarity.topk(min(max(ks), similarity.shape[1]), dim=1)
        label, vote = label.gather(1, column), ((similarity - similarity[:, :1]) / temperature).exp()
        no_votes = torch.zeros(len(chunk), num_classes, device=bank.device)
        scores = [no_votes.scatter_add(1, label[:, :k], vote[:, :k]) for k in ks]
        predicted.append(torch.stack([score.argmax(1).cpu() for score in scores]))
    predicted = torch.cat(predicted, 1)
    return predicted[0] if isinstance(k, int) else predicted


def knn_accuracy(train_x, train_y, test_x, test_y, ks, temperature):
    """Return the top-1 accuracy in percent of several k: {k: float}.

    train_y (n,), test_y (m,): int64, any labels; -1 does not vote and is not counted. The rest is as in `knn_predict`.
    Exits with an error message if there are no labels of two classes, or none to test on.
    """
    voting, counted = train_y != -1, test_y != -1
    classes = gather_uneven(train_y[voting].unique()).unique()
    if len(classes) < 2 or not counted.any():
        fail("kNN needs labels of two classes to train on, and labels to test on; -1 means no label")
    train_x, train_y = train_x[voting.to(train_x.device)], torch.searchsorted(classes, train_y[voting])
    predicted = knn_predict(train_x, train_y, test_x, ks, temperature, len(classes))
    right = (classes[predicted] == test_y)[:, counted].sum(1).tolist()
    return {k: 100 * number / int(counted.sum()) for k, number in zip(ks, right, strict=True)}


def knn_record(args, encoder, train, test, device):
    """Return the accuracies of a method's encoder as an epoch's record has them: {"knn20_top1": percent, ...}.

    The bank is the labelled training images, without augmentation.
    """
    info, options = encoder_info(args), dict(workers=workers_of(args, device), amp=args.amp == "bf16")
    encode = functools.partial(extract_features, encoder, info=info, device=device, **options)
    x, y = encode(train.labelled(), whole=False, what="features, train")
    test_x, test_y = encode(test.labelled(), what="features, test")
    found = knn_accuracy(x.to(device), y, test_x.to(device), test_y, (20, 200), 0.07)
    return {f"knn{k}_top1": percent for k, percent in found.items()}


@torch.no_grad()
def embedding_health(q):
    """Return two label-free figures that show collapse, {"std": float, "rank": float}, over all processes' rows.

    q: (n, d), this process's embeddings, which are L2-normalised here.
    std: the mean over the dimensions of the standard deviation, times sqrt(d). It is 1 on a uniform sphere, and 0 if
    all embeddings are equal. rank: the effective rank, exp of the singular values' entropy, at most min(n, d).
    No gradient. Source of the effective rank: Roy and Vetterli, EUSIPCO 2007.
    """
    q = F.normalize(gather_uneven(q).float(), dim=1)
    share = torch.linalg.svdvals(q - q.mean(0))
    share = share / share.sum().clamp_min(1e-12)
    std = q.std(0, correction=0).mean() * q.shape[1] ** 0.5
    return {"std": std.item(), "rank": torch.special.entr(share).sum().exp().item()}


def open_encoder(args, module=None):
    """Return (device, the encoder to judge, in evaluation mode, info). Joins torchrun's process group, if any.

    module: a user's own encoder. It gets the checkpoint's weights. Without a checkpoint it is judged as it is on the
    first process. With --random-init the encoder is built as the checkpoint says, and its weights are left out.
    Fills in args.workers and args.bf16. Exits with an error message if flags do not go together, or if the encoder does
    not take the images' size.
    """
    if (args.checkpoint is None and module is None) or (args.random_init and module is not None):
        fail("give RUN, a run's folder; with --random-init its encoder, one of timm's, is judged untrained")
    of_others = args.patch_size, args.num_heads, args.norm, args.prefix
    if not args.arch and (any(of_others) or (args.checkpoint and args.image_size)):
        fail("--image-size, --patch-size, --num-heads, --norm, --prefix go with --arch; a run says its own")
    device = join_processes(args)
    args.workers = workers_of(args, device)
    if args.checkpoint is None:
        encoder, info = module, backbone_info(None, args.image_size or 32, None, method="no run", encoder="given")
        if rank_and_world()[1] > 1:
            encoder.load_state_dict(from_first(encoder.cpu().state_dict))
    else:
        patch_size = args.patch_size or named_patch(args.arch) or 16
        published = dict(arch=args.arch, image_size=args.image_size or 224, patch_size=patch_size)
        published |= dict(norm=args.norm or "imagenet", num_heads=args.num_heads, prefix=args.prefix)
        encoder, info = load_backbone(args.checkpoint, args.encoder, module, **(published if args.arch else {}))
    if args.random_init:
        torch.manual_seed(args.seed)
        encoder, info = build_backbone(info), info | dict(encoder="untrained")
    args.bf16 = use_bf16(args.amp, device, arch_name(info), [info["image_size"]])
    encoder = encoder.eval().to(device)
    output_width(encoder, info["image_size"])  # exits if it does not take images of this size
    return device, encoder, info


def run_folder(checkpoint):
    """Return the folder of the run that a checkpoint is of: itself, or where its file is."""
    path = Path(checkpoint)
    return path if path.is_dir() else path.parent


def open_data(args, info, train=None, test=None, labels=True):
    """Return the images of an evaluation that have labels: (training images, test images or None).

    train, test: a user's own Datasets, instead of --dataset's. Own training images have labels if there is a test set.
    Without --dataset these are the run's data, and args gets their name and place. Without --data-dir, too, they have
    to be the images that the run was trained on.
    labels: True exits with an error message if there is no test set, or only one class of a data set by name.
    """
    if train is None and test is None:
        trained_on = None
        if args.dataset is None and args.checkpoint:
            config = read_config(run_folder(args.checkpoint))
            if "dataset" not in config:
                fail("there is no readable config.json beside the checkpoint to tell its data set: give --dataset")
            if args.data_dir is None:
                trained_on = config.get("images", {}).get("checksum")
            args.dataset, args.data_dir = config["dataset"], args.data_dir or config.get("data_dir")
        args.dataset = args.dataset or "patterns"
        train, test = (load_images(args.dataset, args.data_dir, t, size=info["image_size"]) for t in (True, False))
        if trained_on and trained_on != train.checksum():
            others = "give --dataset and --data-dir, or your own train= and test="
            fail(f"--dataset {args.dataset} has other images than the run was trained on: {others}")
    else:
        args.dataset, args.data_dir = "own", None
        train, test = own_images(train, test, args.workers)
    if labels and (test is None or (len(train.classes) < 2 and args.dataset != "own")):
        layout = "--data-dir with train/ and val/ or test/, each with one folder per class"
        fail(f"an evaluation needs a test set and labels of two classes: {layout}")
    return train.labelled() if train.classes else train, None if test is None else test.labelled()


def floor_encoders(args, info, device, count):
    """Return what a trained encoder has to beat, {name: encoder}: raw pixels, and the same encoder untrained.

    count: of the training images. Above 200,000 the raw pixels are left out.
    """
    if args.no_floors:
        return {}
    torch.manual_seed(args.seed)
    pixels = nn.Sequential(nn.AvgPool2d(max(1, info["image_size"] // 32)), nn.Flatten())  # at most 63 x 63 of them
    floors = {"raw pixels": pixels} if count <= 200_000 else {}
    if info["timm_name"] and not args.random_init:
        floors["untrained"] = build_backbone(info).to(device)
    return floors


def protocol(args, info, train, test):
    """Return what an evaluation's numbers depend on, as lines of text."""
    classes = f", {len(train.classes)} classes" if train.classes else ""
    scale = f"if not of {info['image_size']} px: shorter side 256/224 of it, centre crop, {info['interpolation']}"
    same = train.array is not None and train.array.shape[1:3] == (info["image_size"],) * 2
    tf32 = torch.backends.cuda.matmul.allow_tf32
    precision = "bf16" if args.bf16 else "float32 with products in TF32" if tf32 else "float32"
    return f"""encoder {arch_name(info)} of {info["method"]}, the {info["encoder"]} encoder, evaluation mode; \
features: before the projector, after the last norm and pooling; the encoder computes in {precision}
data {described(train)}: {len(train)} training and {0 if test is None else len(test)} test images{classes}; \
{"no resize" if same else scale}; mean {tuple(info["mean"])}, std {tuple(info["std"])}"""


# ------------------------------------------------------------------ 4. encoders
# timm's encoders as this project builds, saves and loads them; files of others; a user's own modules.

PLAIN = dict(zero_init_last=False)  # residual branches start as torchvision's and MoCo's do
ARCHS = {  # short name: (timm name, what differs from it)
    "vit_micro": ("vit_tiny_patch16_224", dict(embed_dim=64, depth=3, num_heads=2)),
    "vit_tiny": ("vit_tiny_patch16_224", {}),
    "vit_small": ("vit_small_patch16_224", {}),
    "vit_base": ("vit_base_patch16_224", {}),
    "resnet_micro": (
        "resnet18",
        dict(PLAIN, layers=(1, 1, 1, 1), channels=(16, 32, 64, 128), stem_type="deep", stem_width=8),
    ),
    "resnet_mini": ("resnet18", dict(PLAIN, layers=(1, 1, 1, 1), channels=(16, 32, 64, 128))),
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

    arch: a name of ARCHS, any timm model, or None for a user's own module. norm: a name of NORMS. num_heads: of a ViT;
    None: timm's number. more: more entries.
    Plain ResNets get a 3 x 3 stem for images of up to 64 px. resnet_mini's has stride 2, and resnet_micro keeps timm's,
    as they are to be fast on a CPU. ViTs get the given patch size and MoCo v3's initialisation, except of the patch
    embedding, which timm leaves out. Their position embedding is interpolated for other image sizes.
    Exits with an error message if timm has no such model, or if the patches do not fit the images.
    """
    mean, std = NORMS[norm]
    like = dict(image_size=image_size, mean=mean, std=std, interpolation=interpolation, **more)
    if arch is None:
        return dict(timm_name=None, create_kwargs={}, stem="own", **like)
    if arch not in ARCHS and not timm.is_model(arch):
        fail(f"unknown --arch {arch}: give {', '.join(ARCHS)}, or a timm model")
    name, kwargs = ARCHS.get(arch, (arch, {}))
    kwargs = {**kwargs, "num_classes": 0}
    if is_vit(name):
        if image_size % patch_size:
            fail(f"--patch-size {patch_size} does not divide --image-size {image_size}")
        kwargs |= dict(img_size=image_size, patch_size=patch_size, dynamic_img_size=True)
        kwargs |= {} if "dinov3" in name else dict(weight_init="moco")  # timm's class for DINOv3 does not know it
    kwargs |= {} if num_heads is None else {"num_heads": num_heads}
    plain = name.removeprefix("resnet").isdigit()  # resnet26d, resnetv2_50, ... have stems of their own
    small = plain and image_size <= 64 and arch != "resnet_micro"
    stem = "timm" if not small else "3x3-s2" if arch == "resnet_mini" else "3x3"
    return dict(timm_name=name, create_kwargs=kwargs, stem=stem, **like)


def encoder_info(args):
    """Return `backbone_info` of a training's encoder, which args.evaluated says to be the query or momentum encoder."""
    arch = None if args.arch == "own" else args.arch
    heads = getattr(args, "num_heads", "auto")
    described = dict(num_heads=None if heads == "auto" else heads, method=args.method, encoder=args.evaluated)
    return backbone_info(arch, args.image_size, args.patch_size, args.norm, args.interpolation, **described)


def arch_name(info):
    """Return the name by which --arch calls an encoder that `backbone_info` describes."""
    name, given = info["timm_name"], info["create_kwargs"].items()
    fitting = (short for short, (timm_name, more) in ARCHS.items() if timm_name == name and more.items() <= given)
    return next(fitting, name or "own encoder")


def create_backbone(info, **more):
    """Return timm's model that `info` describes, without classifier and with its stem. more: arguments for timm."""
    backbone = timm.create_model(info["timm_name"], **info["create_kwargs"], **more)
    if info["stem"] in ("3x3", "3x3-s2"):  # no 7 x 7 convolution and no max-pool, as CIFAR work has it
        stride = 2 if info["stem"] == "3x3-s2" else 1
        backbone.conv1 = nn.Conv2d(3, backbone.conv1.out_channels, 3, stride, padding=1, bias=False)
        backbone.maxpool = nn.Identity()
    return backbone


def build_backbone(info, sizes=(), **more):
    """Return the untrained timm model without classifier that `info` describes: it maps (N, 3, H, W) to (N, width).

    sizes: further sizes of images that it will see. more: further arguments for timm. Exits with an error message if
    the model does not take them.
    """
    sizes = sorted({info["image_size"], *sizes})
    try:
        backbone = create_backbone(info, **more)
        for size in sizes:
            encode_zeros(backbone, size)
    except (TypeError, AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        fail(f"timm's {info['timm_name']} does not work with images of {', '.join(map(str, sizes))} px: {reason}")
    return backbone


def load_backbone(path, encoder=None, module=None, arch=None, **published):
    """Load a pre-trained backbone from a run's folder, a last.pt or a backbone.pt: (module in evaluation mode, info).

    encoder: 'query' or 'momentum'. By default it is the one that the method's authors evaluate, which backbone.pt
    holds. module: gets the weights. Without it timm builds what the file names; a user's own encoder has to be given.
    arch: of a file of others, which is read by `load_published`. published: its further arguments.
    info has image_size, mean, std, interpolation, method, encoder, timm_name, create_kwargs and stem.
    Every key must match. Exits with an error message if the file does not fit.
    """
    path = Path(path)
    if arch is not None:
        if encoder is not None or module is not None:
            fail(f"{path} is read as a file of others, since an arch is given: a prefix chooses, and timm builds it")
        return load_published(path, arch, **published)
    if path.is_dir():
        path = path / ("backbone.pt" if encoder is None else "last.pt")
    state = read_state(path)
    if not isinstance(state, dict) or not ("timm_name" in state or "backbone" in state):
        fail(f"{path} is not a checkpoint of this project: for others' give --arch NAME, say resnet50, vit_base, ...")
    try:
        if "backbone" in state:  # last.pt holds both encoders
            info = dict(state["backbone"], encoder=encoder or state["backbone"]["encoder"])
            prefix = {"query": "backbone.", "momentum": "momentum_backbone."}[info["encoder"]]
            weights = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
        else:
            info, weights = {k: v for k, v in state.items() if k != "state_dict"}, state["state_dict"]
        if encoder not in (None, info["encoder"]):
            fail(f"{path} holds the {info['encoder']} encoder only: give last.pt for the {encoder} encoder")
        if module is None and info["timm_name"] is None:
            fail(f"{path} holds a user's own encoder: give it, too, as eval_knn.main(args, encoder=MODULE)")
        backbone = build_backbone(info) if module is None else module
        backbone.load_state_dict(weights)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:600]}"
        fail(f"{path} is not a checkpoint of this project (others' need --arch), or does not fit its encoder: {reason}")
    return backbone.eval(), info


def load_published(path, arch, image_size=224, patch_size=16, norm="imagenet", num_heads=None, prefix=None):
    """Load an encoder from a checkpoint of others, as `load_backbone` returns it: (module in evaluation mode, info).

    arch, image_size, patch_size, norm, num_heads: what the file does not say, as in `backbone_info`. prefix: as in
    `fitting_weights`. Exits with an error message if the file does not fit.
    """
    if Path(path).is_dir():
        fail(f"{path} is a folder. A run's folder says its encoder itself: leave out --arch; or give others' FILE")
    info = backbone_info(arch, image_size, patch_size, norm, num_heads=num_heads, method=Path(path).name)
    backbone = build_backbone(info)
    weights, taken = fitting_weights(path, backbone, prefix, "--prefix")
    backbone.load_state_dict(weights)
    return backbone.eval(), info | {"encoder": taken.rstrip(".") or "only"}


NOT_CHECKPOINTS = {  # the first bytes of what is often taken for a checkpoint
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: `git lfs pull` fetches that",
    b"<": "a web page (HTML or XML), not a checkpoint: download the file itself",
}
for _bytes in (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"\x28\xb5\x2f\xfd"):  # gzip, bzip2, xz, 7z, zstandard
    NOT_CHECKPOINTS[_bytes] = "a compressed archive: unpack it"
PLAIN_DATA = [  # what checkpoints hold beside tensors, and what cannot act: torch.load may build these, too
    *(argparse.Namespace, datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(np.dtype, np.ndarray, *(getattr(np.dtypes, name) for name in np.dtypes.__all__)),
]
for _name, _core in itertools.product(("scalar", "_reconstruct"), ("core", "_core")):  # numpy 1 and 2
    PLAIN_DATA.append((getattr(np._core.multiarray, _name), f"numpy.{_core}.multiarray.{_name}"))
for _module, _pure in itertools.product(("pathlib", "pathlib._local"), ("", "Pure")):  # before Python 3.13, and from it
    PLAIN_DATA += [(PurePosixPath, f"{_module}.{_pure}PosixPath"), (PureWindowsPath, f"{_module}.{_pure}WindowsPath")]
PLAIN_FILE = (  # run by a user who trusts a file: all its tensors, without what else it holds
    "import torch; keep = lambda x: keep(x.state_dict()) if hasattr(x, 'state_dict') else {{k: keep(v) for k, v in "
    "x.items()}} if isinstance(x, dict) else [keep(v) for v in x] if isinstance(x, (list, tuple)) else x if "
    "torch.is_tensor(x) else None; torch.save(keep(torch.load({path!r}, map_location='cpu', weights_only=False)), "
    "'plain.pt')"
)


def read_state(path):
    """Return what is in a checkpoint, on the CPU: tensors and plain data only, never code.

    Exits with an error message that says what the file is, if it cannot be loaded so.
    """
    path = Path(path)
    if not path.is_file():
        fail(f"no checkpoint at {path}: give a run's folder or a file")
    try:
        with open(path, "rb") as file:
            start = file.read(64).lstrip()
        members = zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else ()
    except (OSError, zipfile.BadZipFile) as error:
        fail(f"cannot read {path} ({error})")
    kind = next((kind for beginning, kind in NOT_CHECKPOINTS.items() if start.startswith(beginning)), None)
    if not start:
        kind = "empty: get it again"
    elif start.startswith(b"PK") and not members:
        kind = "cut off: its end is missing. Get it again"
    elif any(name.endswith("/constants.pkl") for name in members):
        code = f"import torch; torch.save(torch.jit.load({str(path)!r}, 'cpu').state_dict(), 'plain.pt')"
        kind = f"a TorchScript program. If you trust its authors, make a plain file of it: {code}"
    elif members and not any(name.endswith("data.pkl") for name in members):
        kind = "a zip archive of other files: unpack it"
    elif members and not is_intact(path):
        kind = "damaged: some bytes are not those that were written. Get it again"
    if kind:
        fail(f"{path} is {kind}")
    try:
        if path.suffix == ".safetensors":
            return timm.models.load_state_dict(path)
        with torch.serialization.safe_globals(PLAIN_DATA):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file from elsewhere may raise anything, and torch's advice is to load it unsafely
        needed = re.search(r"(?:GLOBAL |but got <class ')([\w.]+)", str(error))
        if path.suffix == ".safetensors" or not start.startswith((b"PK", b"\x80")) or needed is None:
            reason = type(error).__name__
            fail(f"{path} is damaged or cut off, or no file of torch.save's nor of safetensors ({reason})")
    names = {needed[1]}
    with contextlib.suppress(ValueError):  # of files of old versions torch does not tell the others
        names |= set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    is_module = any(name.startswith("torch.nn.modules.") for name in names)
    what = "a whole pickled module, not only its weights" if is_module else "more than tensors and plain data"
    advice = "If you trust its authors, make a plain file of it where their code can be imported"
    fail(f"{path} holds {what} ({', '.join(sorted(names)[:3])}). {advice}: {PLAIN_FILE.format(path=str(path))}")


def read_tensors(path):
    """Return the tensors of a checkpoint of others by name: {"state_dict.module.encoder_q.conv1.weight": tensor, ...}.

    The names of nested entries, and the numbers of a list's, are joined by dots. Of a run's folder it is the
    backbone.pt. Exits with an error message as `read_state` does.
    """

    def flat(state, prefix=""):
        if torch.is_tensor(state):
            return {prefix.removesuffix("."): state}
        if isinstance(state, (list, tuple)):
            state = {str(i): entry for i, entry in enumerate(state)}
        found = {}
        for name, entry in state.items() if isinstance(state, dict) else ():
            if isinstance(name, str):  # those of an optimiser's entries are numbers
                found |= flat(entry, f"{prefix}{name}.")
        return found

    return flat(read_state(Path(path) / "backbone.pt" if Path(path).is_dir() else path))


# Encoders that are tried where a file does not fit, so that the message can name the right one.
USUAL = [f"resnet{depth}" for depth in (18, 34, 50, 101, 152, "26d", "50d")]
USUAL += ["wide_resnet50_2", "resnext50_32x4d", "seresnet50", "convnext_tiny", "convnext_small", "convnext_base"]
USUAL_VITS = ("vit_{}_patch16_224", "deit3_{}_patch16_224", "deit_{}_distilled_patch16_224")
USUAL_VITS += ("vit_{}_patch14_dinov2", "vit_{}_patch14_reg4_dinov2", "vit_{}_patch16_dinov3")
VIT_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large"}  # by width
# Top-level names of ViTs that change the features, and that an encoder without them would leave out.
OF_VITS = {"cls_token", "dist_token", "reg_token", "register_tokens", "pos_embed", "norm_pre", "fc_norm"}


def resampled(embedding, encoder):
    """Return a ViT's position embedding (1, rows, width), resampled to the grid of patches of an encoder like it.

    None, if its rows are not those that the encoder has before its patches', and a square grid's.
    """
    own, grid = getattr(encoder, "pos_embed", None), getattr(getattr(encoder, "patch_embed", None), "grid_size", None)
    if own is None or grid is None or embedding.ndim != 3 or embedding.shape[::2] != own.shape[::2]:
        return None
    before = own.shape[1] - math.prod(grid)
    patches = embedding.shape[1] - before
    if patches < 1 or math.isqrt(patches) ** 2 != patches:
        return None
    return timm.layers.resample_abs_pos_embed(embedding, grid, num_prefix_tokens=before)


def misfits(found, start, encoder):
    """Return why a checkpoint's tensors are not an encoder's, as a list of texts. It is empty if they are.

    found: of `read_tensors`. start: what stands before the encoder's names there. Each parameter and statistic needs a
    tensor of its shape. Only a position embedding may be of another square grid. And each tensor below the encoder's
    own top-level parts needs a place in it: otherwise the file is of a deeper or richer encoder.
    """
    own, missing = encoder.state_dict(), []
    for name, x in own.items():
        theirs = found.get(start + name)
        if name.endswith("num_batches_tracked"):  # old files have none
            continue
        if theirs is None:
            missing.append(f"{name} {tuple(x.shape)} is not there")
        elif theirs.is_floating_point() != x.is_floating_point():
            missing.append(f"{name} is {theirs.dtype}, not {x.dtype}")
        elif theirs.shape != x.shape and (name != "pos_embed" or resampled(theirs, encoder) is None):
            missing.append(f"{name} is {tuple(theirs.shape)}, not {tuple(x.shape)}")
    parts = {name.split(".")[0] for name in own} | OF_VITS
    below = (key.removeprefix(start) for key in found if key.startswith(start) and key.removeprefix(start) not in own)
    passed_over = ("num_batches_tracked", "head.fc.weight", "head.fc.bias")  # the latter: ConvNeXt's classifier
    left = [name for name in below if name.split(".")[0] in parts and not name.endswith(passed_over)]
    return missing or [f"it has no place for {len(left)} tensors, {', '.join(left[:4])}"] * bool(left)


def forms_of(encoder):
    """Return [encoder], and with it nn.Sequential(*its children) if that has all its weights: lightly saves those."""
    numbered = nn.Sequential(*encoder.children())
    return [encoder, numbered] if len(numbered.state_dict()) == len(encoder.state_dict()) else [encoder]


def usual_name(found, start):
    """Return ": it fits --arch NAME" with a usual encoder that a checkpoint of others fits, or ""."""
    stem = found.get(start + "conv1.weight", found.get(start + "0.weight"))
    patches = found.get(start + "patch_embed.proj.weight")
    names, patch_size, size = USUAL, 16, 32 if stem is not None and stem.shape[-1] == 3 else 224
    if patches is not None:
        names = [name.format(VIT_SIZES.get(len(patches))) for name in USUAL_VITS]
        patch_size, size = patches.shape[-1], 16 * patches.shape[-1]
    for name in filter(timm.is_model, names):
        with torch.device("meta"):  # without weights
            encoder = create_backbone(backbone_info(name, size, patch_size))
        if not all(misfits(found, start, form) for form in forms_of(encoder)):
            flag = "" if patches is None or named_patch(name) == patch_size else f" --patch-size {patch_size}"
            return f": it fits --arch {name}{flag}"
    return ""


def fitting_weights(path, backbone, prefix=None, flag="--init-prefix"):
    """Return (a state_dict for an encoder from a checkpoint of others, the prefix of its names in the file).

    The prefix is found by looking: after it, the encoder fits (see `misfits`). Its names may also be those of
    nn.Sequential(*encoder.children()), as lightly's are. If several encoders fit, a teacher (DINO's) is taken, or else
    the first that is no momentum encoder. prefix: the end of another's. flag: what a message calls it.
    Exits with an error message if nothing fits.
    """
    found, own = read_tensors(path), backbone.state_dict()
    named = ((form, name) for form in forms_of(backbone) for name in form.state_dict())
    counts = Counter((key.removesuffix(name), form) for form, name in named for key in found if key.endswith(name))
    fitting = {start: form for start, form in counts if not misfits(found, start, form)}
    chosen = [start for start in fitting if start.endswith(prefix or "")]
    if fitting and not chosen:
        fail(f"{flag} {prefix}: the encoders of {path} are {' and '.join(fitting) or 'without prefix'}")
    if not chosen:
        near = [key for key, count in counts.items() if key[1] is backbone or count > 20]  # a few fit by chance
        start, form = max(near, key=counts.get, default=("", backbone))
        wrong, wanted = misfits(found, start, form), form.state_dict()
        there = sum(start + name in found for name in wanted)
        first = "".join(f", {name} {tuple(x.shape)}" for name, x in itertools.islice(found.items(), 2))
        hint = ""
        if any(text.startswith("conv1.weight is (") for text in wrong):
            hint = " (sizes up to 64 px choose a ResNet's 3 x 3 stem, larger ones 7 x 7: give another --image-size)"
        fail(
            f"{path} does not fit the encoder{usual_name(found, start)}: {there} of its {len(wanted)} names are there"
            f"{start and f', after {start}'}; {'; '.join(wrong[:3])}{hint}. The file has {len(found)} tensors{first}"
        )
    slow = ("momentum", "encoder_k", "target")
    start = max(chosen, key=lambda start: ("teacher" in start) - any(word in start for word in slow))
    names = [start + name for name in fitting[start].state_dict()]
    others = [other for other in fitting if other != start]
    left = [key for key in found if key not in names and not key.startswith(tuple(others))]
    choice = f" (also there: {', '.join(others)}; {flag} chooses)" if others else ""
    listed = "".join(f", {name}" for name in left[:4]) + (", ..." if left[4:] else "")
    say(f"{path}: the encoder is {start or 'the file itself'}{choice}; left out: {len(left)} tensor(s){listed}")
    weights = {name: found.get(theirs, own[name]) for name, theirs in zip(own, names, strict=True)}
    if (old := weights.get("pos_embed")) is not None and old.shape != own["pos_embed"].shape:
        weights["pos_embed"] = resampled(old, backbone)
        say(f"its position embedding is resampled from {old.shape[1]} rows to {weights['pos_embed'].shape[1]}")
    return weights, start


def copy_module(module, frozen=False):
    """Return a copy of a module, or None for None. frozen: none of its parameters gets gradients.

    copy.deepcopy alone gives TorchScript's modules parameters that cannot be trained.
    """
    with torch.no_grad():
        copied = copy.deepcopy(module)
    if module is not None:
        for new, old in zip(copied.parameters(), module.parameters(), strict=True):
            new.requires_grad_(old.requires_grad and not frozen)
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
def encode_zeros(module, image_size):
    """What an encoder makes of one image of zeros."""
    device = next((p.device for p in module.parameters()), "cpu")
    with evaluation_mode(module):
        return module(torch.zeros(1, 3, image_size, image_size, device=device))


def output_width(module, *sizes):
    """Return how many numbers an encoder, (N, 3, H, W) -> (N, width), gives per image. Images of zeros are encoded.

    sizes: of all images that it will see, in pixels. Exits with an error message if the encoder does not take one of
    them, gives anything but (N, width), or gives another width for another size.
    """
    name, widths = f"the encoder, of type {type(module).__name__},", {}
    for size in sizes:
        image = f"images (1, 3, {size}, {size})"
        try:
            shape = tuple(encode_zeros(module, size).shape)
        except Exception as error:  # a user's own module may raise anything
            advice = f"Give --image-size N that it takes, or an encoder for {size} px"
            fail(f"{name} does not map {image} to features (1, width): {' '.join(str(error).split())[:300]}. {advice}")
        if len(shape) != 2:  # for example, a ResNet without its last layer gives (1, width, 1, 1)
            fail(f"{name} maps {image} to {shape}, not (1, width): end it with torch.nn.Flatten()")
        widths[shape[1]] = size
    if len(widths) > 1:
        found = ", ".join(f"{width} for {size} px" for width, size in widths.items())
        fail(f"{name} gives other numbers of features for other sizes of images ({found}): give one that pools them")
    return shape[1]


def memory_format(device, arch):
    """Return the memory format of views and encoder in training: channels_last, on CPUs for the encoders of ARCHS only.

    In torch 2.11 to 2.15, on CPUs without AVX-512, the gradient of a 1 x 1 convolution of stride 2 crashes in
    channels_last if it has fewer than 8 channels. Some of timm's encoders have one, for example RepVGG.
    """
    return torch.channels_last if device.type == "cuda" or arch in ARCHS else torch.contiguous_format


def has_bf16(device):
    """Return True if the device is a GPU that computes bf16 natively: there `--amp auto` takes it.

    On CPUs auto stays float32, so that all of them give the same numbers. Those with AMX are faster in bf16.
    """
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def use_bf16(amp, device, arch, sizes):
    """Return True if the encoders compute in bf16: amp is 'auto', 'bf16' or 'off'; sizes: of the images, in pixels."""
    chosen = amp == "bf16" or (amp == "auto" and has_bf16(device))
    if chosen and device.type == "cpu" and min(sizes) <= 16 and not is_vit(arch):
        fail("--amp bf16 on a CPU: at 16 px and below torch's gradients of convolutions are wrong: give --amp off")
    return chosen


# ----------------------------------------------------------------- 5. processes
# What is said and by whom, torchrun's process group, and signals.

LAUNCHED_BY = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # variables that torchrun sets, all of them


def rank_and_world():
    """Return (this process's rank, the number of processes): of the process group, or of torchrun before it is joined.

    Without torchrun they are (0, 1). A launcher's variables that are set in part mean nothing.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if all(os.environ.get(name) for name in LAUNCHED_BY):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def print_anywhere(text, end="\n", to="stdout"):
    """Print to sys.stdout or sys.stderr. If that cannot be written any more, what is said is dropped from then on.

    It may be closed, or its reader gone (`| head`), or the disk behind a log full.
    """
    stream = getattr(sys, to)
    code = getattr(stream, "encoding", None) or "utf-8"
    try:
        # a name may have what the terminal cannot show
        print(text.encode(code, "backslashreplace").decode(code), end=end, file=stream, flush=True)
    except (OSError, ValueError):
        setattr(sys, to, open(os.devnull, "w"))


def on_terminal():
    """Return True if sys.stdout is a terminal. It may be None, closed, or without isatty."""
    with contextlib.suppress(AttributeError, ValueError):
        return sys.stdout.isatty()
    return False


def fail(message):
    """Answer a mistake of the user: print one line on stderr, from one process, and exit with status 2."""
    first = rank_and_world()[0] == 0
    if dist.is_initialized():  # perhaps only one process has found the mistake: the first to come here says it
        with contextlib.suppress(RuntimeError):  # the store is gone: another process has said why
            first = dist.distributed_c10d._get_default_store().add("failed", 1) == 1
    if first:
        print_anywhere("error: " + message.replace("\n", "\\n"), to="stderr")  # a file's name may have one
    raise SystemExit(2)


for _package, _oldest in ((torch, "2.11"), (torchvision, "0.26"), (timm, "1.0.20")):  # as requirements.txt
    if TorchVersion(_package.__version__) < _oldest:
        fail(f"{_package.__name__} {_package.__version__} is too old: see requirements.txt")


def say(text="", end="\n"):
    """Print from the first process only. On a terminal the text replaces the progress line."""
    if rank_and_world()[0] == 0:
        print_anywhere(("\r\x1b[K" if on_terminal() else "") + text, end)


def start(main, parse_args):
    """Run a script. Ctrl-C ends it with a line, not a traceback."""
    try:
        main(parse_args())
    except KeyboardInterrupt:
        say("stopped by Ctrl-C (exit status 130); what was saved is kept")
        raise SystemExit(130) from None


def progress(text, last=[0.0]):  # noqa: B006  (the list keeps the time of the last line)
    """Show how far long work has come: on a terminal a line that rewrites itself, in a log file a line every 30 s."""
    if on_terminal() or time.monotonic() - last[0] > 30:
        say(text, end="" if on_terminal() else "\n")
        last[0] = time.monotonic()


GROUPS = itertools.count()  # process groups that this program has made
PATIENCE = datetime.timedelta(minutes=30)  # how long a process waits for others: one of them may be downloading


def keep_memory():
    """Let glibc keep freed memory. Mapping large tensors anew would cost a CPU up to a quarter of a step."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block, however large, is mapped on its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the top of the heap stays


def join_processes(args):
    """Join torchrun's process group, if there is one. Returns this process's device."""
    torch.set_flush_denormal(True)  # denormal numbers make a CPU several times slower
    keep_memory()
    # These are about speed and names only.
    warnings.filterwarnings("ignore", ".*(broadcast_buffers|Grad strides do not match|all_gather_into_tensor).*")
    cuda = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        fail("--device cuda: torch sees no CUDA device; use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0)) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        # The same GPUs have TF32 and bf16.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = has_bf16(device)
        torch.backends.cudnn.benchmark = True
    elif args.arch and args.arch.endswith(("_micro", "_mini")) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # a second one gives 15 %, and takes two thirds when another program wants a core
    if all(os.environ.get(name) for name in LAUNCHED_BY) and not dist.is_initialized():
        store, rank, world = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # a restart's store still holds dead workers' addresses
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        store = dist.PrefixStore(f"group {next(GROUPS)}", store)  # nor may a second group find the first one's
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    return device


def from_all(value):
    """Return the values of all processes as a list in rank order, on every process. Tensors must be on the CPU."""
    found = [value] * rank_and_world()[1]
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found


def from_first(make):
    """What make() returns on the first process, on every process. The others do not call it."""
    made = [make() if rank_and_world()[0] == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(made)
    return made[0]


def own_rows(x, dim=0):
    """This process's rows of what belongs to all processes: they share dimension `dim` out in rank order."""
    rank, world = rank_and_world()
    return x.tensor_split(world, dim)[rank]


def gather_uneven(x):
    """Concatenate a tensor (n, ...) over the processes, in rank order, where n may differ and be 0. No gradient."""
    return torch.cat([part.to(x.device) for part in from_all(x.cpu())])


class StopRequest:
    """Makes SIGTERM, SIGHUP and Ctrl-C (SIGINT) wait while steps are made and saved.

        stop = StopRequest()
        with stop:
            ...                    # make a step
            if stop.agreed():      # after each step: leave the loop and save
                break

    At its end the block ends the program with exit status 75 if there was a signal. Outside of it signals act as in any
    Python program. A second signal, three seconds or more after the first, acts at once. A signal that is ignored stays
    so (SIGHUP under nohup). Outside the main thread Python handles no signals. There only other processes are asked.
    """

    def __init__(self):
        several = rank_and_world()[1] > 1
        self.group = dist.new_group(backend="gloo") if several else None  # the device need not wait for it
        self.requested_at, self.previous = None, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
            numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
            self.previous = {number: signal.signal(number, self._handle) for number in numbers}

    def __exit__(self, error, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if error is None and self.agreed():
            say("stopped on request (exit status 75); everything is saved, and the same command goes on")
            raise SystemExit(75)

    def _handle(self, number, frame):
        now = time.monotonic()
        if self.requested_at is None:
            self.requested_at = now
        elif now > self.requested_at + 3:  # earlier, it is the same request: a scheduler's to all, and torchrun's
            signal.signal(number, self.previous[number])
            signal.raise_signal(number)

    def agreed(self):
        """Return True if any process has received a signal. Costs one small all-reduce per call."""
        requested = torch.tensor(float(self.requested_at is not None))
        if self.group is not None:
            dist.all_reduce(requested, dist.ReduceOp.MAX, group=self.group)
        return requested.item() > 0


# --------------------------------------------------------------------- 6. flags
# The command lines: flags of every run and of both evaluations, and how a recipe sets the defaults.


def number(kind, least, most=10**9):
    """Return an argparse type: an int or a float from `least` to `most`."""

    def parse(text):
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least:g} to {most:g}")
        return value

    parse.__name__ = kind.__name__  # argparse's word for a text that is no number
    return parse


def auto_or(kind):
    """Return an argparse type: the word auto, or what `kind` takes."""

    def parse(text):
        return text if text == "auto" else kind(text)

    parse.__name__ = f"auto or {kind.__name__}"
    return parse


NATURAL, COUNT, AT_LEAST_TWO = number(int, 0), number(int, 1), number(int, 2)
NOT_NEGATIVE, POSITIVE = number(float, 0), number(float, 1e-9)
SHARE, POSITIVE_SHARE, SEED = number(float, 0, 1), number(float, 1e-9, 1), number(int, 0, 2**63 - 1)
COUNT_OR_AUTO, WORKERS = auto_or(COUNT), number(int, 0, 1024)
# What may differ between two calls of one run; an evaluation's, too.
OPERATING = {
    *("out", "resume", "max_steps", "save_every", "keep_every", "knn_every", "eval_every", "device", "amp", "compile"),
    *("grad_checkpoint", "workers", "tensorboard", "show_views", "check_images", "data_dir", "no_cache"),
    "changes",
}


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that there are."""

    def _get_help_string(self, action):
        has_default = action.default not in (None, False, argparse.SUPPRESS)
        return super()._get_help_string(action) if has_default else action.help

    def _get_default_metavar_for_optional(self, action):
        return "X"


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are one line, as every other mistake's, without abbreviations."""

    def __init__(self, prog, description, **options):
        super().__init__(prog, description=description, formatter_class=Help, allow_abbrev=False, **options)

    def error(self, message):
        fail(f"{message} (see python {self.prog} --help)")

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0]
            close = difflib.get_close_matches(flag.replace("_", "-"), self._option_string_actions, n=1)
            self.error(f"unknown argument {unknown[0]}" + (f": did you mean {close[0]}?" if close else ""))
        return parsed


def evaluation_parser(script, doc):
    """Return the parser of an evaluation, with the flags that both have. doc: its first line says what it does."""
    about = (doc or "").partition("\n")[0]  # python -OO leaves docstrings out
    parser = ArgumentParser(script, about, usage=f"python {script} [RUN | FILE --arch NAME] [flags]")
    add = parser.add_argument_group("what is judged").add_argument
    path = os.path.expanduser  # a shell leaves the ~ of --data-dir=~/data as it is
    add("checkpoint", nargs="?", type=path, metavar="RUN", help="a run's folder, last.pt, backbone.pt; or others' FILE")
    add("--encoder", choices=("query", "momentum"), help="default: the one that the method's authors evaluate")
    add("--random-init", action="store_true", help="judge the encoder of RUN as it was before training")
    add("--no-floors", action="store_true", help="leave out raw pixels and the untrained encoder")
    add = parser.add_argument_group("encoder, of a FILE of others").add_argument
    add("--arch", metavar="NAME", help="vit_tiny, resnet18, ..., or any timm model")
    add("--image-size", type=COUNT, metavar="N", help="side of the images (default: 224; of an own encoder 32)")
    add("--patch-size", type=COUNT, metavar="N", help="of a ViT (default: as in its name, or 16)")
    add("--num-heads", type=COUNT, metavar="N", help="of a ViT (default: timm's number)")
    add("--norm", choices=NORMS, help="whose mean and standard deviation normalise the images (default: imagenet)")
    add("--prefix", metavar="P", help="which encoder of a FILE: the end of what stands before its names")
    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=DATASETS, help="default: what the encoder was trained on, or patterns")
    add("--data-dir", type=path, metavar="DIR", help="its folder (default: where the run had it)")
    add = parser.add_argument_group("operation").add_argument
    add("--seed", type=SEED, default=0, metavar="N", help="seed of what is drawn")
    add("--workers", type=WORKERS, metavar="N", help="loader processes (default: up to 12 for a GPU, else 0)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU where there is one")
    add("--amp", choices=("auto", "bf16", "off"), default="auto", help="auto: bf16 on GPUs that have it; off: float32")
    return parser


def option(name):
    """Return the flag of a value: crop_scale -> --crop-scale."""
    return "--" + name.replace("_", "-")


def shown(value):
    """Return a value as one would type it after its flag."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(shown, value)) or "none"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if math.isclose(float(short), value, rel_tol=1e-12) else repr(value)
    return str(value)


def run_parser(script, doc, evaluated="query"):
    """Return the parser of a training script, with the flags of every run. The script adds those of its recipe.

    evaluated: the encoder, query or momentum, that the method's authors evaluate.
    """
    about = "The defaults are those of --dataset patterns; --dataset imagenet --help shows ImageNet's."
    parser = ArgumentParser(script, f"{doc.splitlines()[0]} {about}", usage=f"python {script} [flags]", add_help=False)
    parser.set_defaults(method=script.removesuffix(".py"), evaluated=evaluated)
    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=DATASETS, default="patterns", help="data set; it also chooses the recipe")
    add("--data-dir", metavar="DIR", help="its folder, with train/, and val/ or test/")
    add("--no-cache", action="store_true", help="do not keep decoded small images in memory")
    add = parser.add_argument_group("run").add_argument
    add("--variant", choices=("paper", "released"), default="paper", help="follow the paper, or the authors' code")
    add("--seed", type=SEED, default=0, metavar="N", help="seed of all random numbers")
    add("--init", metavar="FILE", help="start the encoder from a checkpoint, of others or of this project")
    add = parser.add_argument_group("operation").add_argument
    add("--out", metavar="DIR", help="folder of the run (default: runs/METHOD-DATASET-ARCH-sSEED...)")
    add("--resume", default="auto", metavar="auto|PATH|none", help="auto: continue --out; PATH: continue a last.pt")
    add("--max-steps", type=COUNT, metavar="N", help="save and stop when the run has made N steps in all")
    add("--save-every", type=COUNT, default=1, metavar="N", help="epochs between saves")
    add("--keep-every", type=NATURAL, default=0, metavar="N", help="epochs between checkpoints that stay; 0: none")
    add("--knn-every", type=NATURAL, default=10, metavar="N", help="epochs between evaluations by kNN; 0: never")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU where there is one")
    add("--amp", choices=("auto", "bf16", "off"), default="auto", help="auto: bf16 on GPUs that have it; off: float32")
    add("--compile", action="store_true", help="compile the encoders: minutes at the start, then faster steps")
    add("--grad-checkpoint", action="store_true", help="less memory, more time; batch norm's averages move twice")
    add("--workers", type=WORKERS, metavar="N", help="processes that load images, per training process")
    add("--tensorboard", action="store_true", help="also write the metrics for TensorBoard")
    add("--show-views", metavar="PNG", help="write a picture of the network's inputs, and exit")
    add("--check-images", action="store_true", help="read every image once, list all that cannot be used, and exit")
    add("-h", "--help", action="store_true", help="show this and exit")
    return parser


def parse(parser, argv, recipe):
    """Return (args, given): the command line with every value of the recipe, and the names of the flags that it has.

    recipe: a function that returns {name: value} for a namespace of what is typed, where the rest has its default or is
    None. Its values are the defaults of their flags. But a patch size in timm's name of an encoder comes before the
    recipe's. Exits with an error message on a mistake.
    """
    plain, given = parser.parse_args([]), typed_values(parser, argv)
    values = recipe(argparse.Namespace(**vars(plain) | given))
    if patch_size := named_patch(given.get("arch")):
        values = values | {"patch_size": patch_size}
    if "help" in given:
        parser.set_defaults(**{name: shown(value) for name, value in values.items()})
        parser.print_help()
        raise SystemExit(0)
    args = argparse.Namespace(**vars(plain) | values | given)
    del args.help
    of_every_run = OPERATING | {"dataset", "variant", "seed", "init"}
    if idle := given.keys() - values.keys() - of_every_run:
        fail(f"{option(min(idle))} has no effect: the recipe of these choices has no such value")
    args.changes = describe_changes(args, given.keys() & (values.keys() | {"variant", "init"}) - {"arch"} - OPERATING)
    check_flags(args, given)
    return args, set(given)


def typed_values(parser, argv):
    """Return the values that a command line has, {name: value}. Those that have their defaults are left out."""
    missing = object()
    found = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([])), missing)))
    return {name: as_tuple(value) for name, value in vars(found).items() if value is not missing}


def as_tuple(value):
    """Return a list as a tuple, and any other value as it is."""
    return tuple(value) if isinstance(value, list) else value


def describe_changes(args, names):
    """Return what a run's name says of values that were typed, for example "-lam2-num_keys4"."""
    values = {name: os.path.basename(shown(getattr(args, name))) for name in sorted(names)}  # --init's is a path
    changes = "".join(f"-{name}{value}" for name, value in values.items()).replace(" ", ",")
    if len(changes) > 120:
        changes = f"{changes[:100]}-{hashlib.sha256(changes.encode()).hexdigest()[:8]}"
    return "".join(c if c.isalnum() or c in "-_.," else "+" for c in changes)


def check_flags(args, given):
    """Exit with an error message if values do not go together, with each other or with this machine."""
    if args.data_dir is not None and "dataset" not in given:
        fail(f"--data-dir needs --dataset, which chooses the recipe and the normalisation: {', '.join(DATASETS[1:])}")
    if args.batch_size % (world := rank_and_world()[1]):
        fail(f"--batch-size {args.batch_size} (global) cannot be shared out over {world} processes")
    for name in ("crop_scale", "global_scale", "local_scale", "crop_ratio", "blur_sigma"):
        low, high = getattr(args, name, None) or (0, 1)
        if low > high:
            fail(f"{option(name)} {low:g} {high:g}: give the smaller number first")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        fail("--tensorboard needs a package: pip install tensorboard")
    encoder_info(args)  # exits if there is no such encoder


def settle(args, device, train=None, encoder=None):
    """Return a copy of args with what is known only when training begins: --out, --amp, and the arch of own encoders.

    train, encoder: a user's own data set and module, or None. The names of their runs say "own".
    """
    args = copy.copy(args)
    if encoder is not None:
        args.arch = "own"
        if args.grad_checkpoint and not hasattr(encoder, "set_grad_checkpointing"):
            fail("--grad-checkpoint needs an encoder with timm's set_grad_checkpointing, which yours has not")
        output_width(encoder, args.image_size)  # exits if it does not take images of this size
    dataset = args.dataset if train is None else "own"
    args.out = args.out or f"runs/{args.method}-{dataset}-{args.arch}-s{args.seed}{args.changes}"
    args.data_dir = args.data_dir and os.path.abspath(args.data_dir)  # so that evaluations find it from anywhere
    args.init = args.init and os.path.abspath(args.init)
    sizes = [getattr(args, "local_size", args.image_size), *getattr(args, "resolutions", ()), args.image_size]
    args.amp = "bf16" if use_bf16(args.amp, device, args.arch, sizes) else "off"
    return args


# ----------------------------------------------------------------------- 7. run
# The files of a run: its folder, checkpoints and records. All writes are whole or not at all.


class Run:
    """The files of a run: its folder, checkpoints and records.

    run = Run(args, device, train, model.backbone, model=model, optimizer=optimizer)   # continues from last.pt, if any
    run.begin(introduction)                # writes config.json and the first record
    for epoch in range(run.epoch, run.last_epoch):
        run.count(step, metrics)           # after each step: adds up the metrics, shows the progress
        record = run.save(loader)          # after the steps: writes last.pt; returns the record of a whole epoch
        run.write(record)                  # after the record is judged: adds it to metrics.jsonl
    run.finish()

    images: the training images, which must be those that the run began with. encoder: what backbone.pt holds. parts:
    what is saved, by name: tensors, or objects with state_dict and load_state_dict. In a new run, the encoders of the
    part `model` get --init's weights.
    step: steps that are made. epoch: the first whose record is not yet written. last_step, last_epoch: where this call
    ends. Exits with an error message if --out has another run, or if last.pt does not fit.
    """

    def __init__(self, args, device, images, encoder=None, **parts):
        self.args, self.device, self.encoder, self.parts, self.out = args, device, encoder, parts, Path(args.out)
        self.config = json.loads(json.dumps(vars(args)))
        self.images = {"number": len(images), "checksum": images.checksum()}
        self.has_labels = len(images.classes) > 1
        self.is_demo = encoder is not None and images.name == "patterns" and args.data_dir is None  # not an evaluation
        self.steps_per_epoch = len(images) // args.batch_size
        self.total_steps = args.epochs * self.steps_per_epoch
        self.last_step = min(args.max_steps or self.total_steps, self.total_steps)
        self.last_epoch = math.ceil(self.last_step / self.steps_per_epoch)
        self.step, self.record, self.records, self.saved_step = 0, None, [], None  # record: not yet written
        self.start_epoch()
        if checkpoint := find_checkpoint(self.out, self.config, args.resume):
            self.restore(checkpoint)
        elif args.init:
            model = parts["model"]
            weights, _ = fitting_weights(args.init, model.backbone)
            for backbone in {model.backbone, getattr(model, "momentum_backbone", model.backbone)}:
                backbone.load_state_dict(weights)
        self.epoch = self.step // self.steps_per_epoch - (self.record is not None)
        self.first_step = self.step
        together = {"max_steps", "save_every", "keep_every", "knn_every", "eval_every"}  # all have to act together
        flags = {name: value for name, value in self.config.items() if name not in OPERATING - together}
        marks = from_all((flags, self.images, self.step))
        if any(mark != marks[0] for mark in marks):
            fail("the processes differ in flags, images or checkpoint: --data-dir and --out must be on shared disks")

    def start_epoch(self):
        """Begin the sums of an epoch anew."""
        self.names, self.sums, self.steps_counted = [], None, 0  # of the metrics that are averaged
        self.last_values, self.embeddings = {}, None  # of the other metrics; the last step's embeddings
        self.checked = 0, 0.0  # at the last check: the steps counted, and the sum of their gradients' norms

    def restore(self, checkpoint):
        """Take over the state of a last.pt."""
        rank, world = rank_and_world()
        state = load_checkpoint(checkpoint)
        try:
            for name in ("method", "arch", "image_size", "batch_size"):
                if self.config.get(name) != state["config"].get(name):
                    fail(f"{checkpoint} is of {name} {state['config'].get(name)}, not {self.config.get(name)}")
            if self.images != state["images"]:
                counts = f"{state['images']['number']} images, now {self.images['number']}"
                fail(
                    f"{checkpoint} was trained on other images ({counts}, or other files): "
                    "with these the run begins anew. Give each data set, or fold of a cross-validation, its own --out"
                )
            for name, part in self.parts.items():
                part.copy_(state[name]) if torch.is_tensor(part) else part.load_state_dict(state[name])
            self.step, self.record, log = state["step"], state["record"], state["log"]
            self.names, self.steps_counted, sums = log["names"], log["count"], log["sums"]
            if self.steps_counted:
                self.sums = (sums[rank] if len(sums) == world else sums.mean(0)).to(self.device)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__} {' '.join(str(error).split())[:300]}"
            fail(f"{checkpoint} is not a last.pt of this method, or does not fit its model: {reason}")
        say(f"going on at step {self.step}")
        self.saved_step = self.step
        self.records = [r for r in read_metrics(self.out / "metrics.jsonl") if r.get("step", 0) <= self.step]
        written = [r["epoch"] for r in self.records if "epoch" in r]
        if self.record and (not self.records or self.record["epoch"] in written):
            self.record = None  # it is written already, or the records are in another folder

    def begin(self, introduction, chance=None):
        """Claim the folder, say what the run's numbers depend on, and write config.json and the first record.

        chance: the loss at equal logits. A run that has nothing left to do is left as it is.
        """
        self.chance, self.began = chance, time.perf_counter()
        if self.step >= self.last_step and not self.record:
            return
        environment = versions(self.device)
        self.say_demo()
        say(", ".join(f"{k} {v}" for k, v in environment.items()))
        say(introduction)
        first = dict(step=self.step, **environment, arguments=self.config, images=self.images, chance=chance)
        if rank_and_world()[0] == 0:
            self.lock = lock_folder(self.out)  # held as long as the file is open
            for unfinished in self.out.glob("*.tmp"):  # of a process that was killed in a write
                unfinished.unlink()
            lines = "".join(json.dumps(record) + "\n" for record in self.records or [first])
            write_whole(self.out / "config.json", lambda path: path.write_text(json.dumps(self.config, indent=1)))
            write_whole(self.out / "metrics.jsonl", lambda path: path.write_text(lines))

    def count(self, step, metrics, embeddings=None):
        """Add up the metrics of a step, and show the progress every ten steps.

        step: the number of steps that have been made. metrics: 0-d tensors, which are averaged over the epoch and the
        processes, and numbers, of which the last is kept. embeddings: (q, k), see `embedding_health`.
        """
        tensors = {name: value.detach().double() for name, value in metrics.items() if torch.is_tensor(value)}
        self.last_values = {name: value for name, value in metrics.items() if name not in tensors}
        self.step, self.embeddings = step, embeddings
        values = torch.stack([*tensors.values()])
        if self.names != [*tensors]:  # the first step, or another kind of epoch (CLIM's positives have come)
            self.names, self.sums, self.steps_counted = [*tensors], torch.zeros_like(values), 0
        self.sums = self.sums + values
        self.steps_counted += 1
        if step % 10 == 0:
            self.check(step)
            pace = (time.perf_counter() - self.began) / (step - self.first_step)  # seconds per step, judging included
            epoch = math.ceil(step / self.steps_per_epoch)
            where = f"epoch {epoch}/{self.args.epochs}  step {step}/{self.total_steps}"
            speed = f"{self.args.batch_size / pace:.0f} images/s  {pace * (self.last_step - step) / 60:.1f} min left"
            progress(f"{where}  loss {metrics['loss'].item():.3f}  {speed}")

    def check(self, step):
        """Exit with an error message if a loss or gradient was not finite. Warn if the gradient's norm has jumped."""
        if self.steps_counted and not self.sums.isfinite().all():
            advice = "go on without bf16, or with a lower --lr in a new --out (and --resume PATH)"
            fail(f"the loss or its gradient is not finite by step {step}; last.pt is from before: {advice}")
        total = self.sums[self.names.index("grad_norm")].item() if "grad_norm" in self.names else 0.0
        (steps, before), self.checked = self.checked, (self.steps_counted, total)
        if steps and total - before > 1000 * before / steps:  # ten steps' norms, and their mean before
            say(f"warning: before step {step} the gradient's norm has jumped to over a hundred times its mean")

    def summarize(self, loader):
        """Return the record of the epoch that ends here: means, last values, speed, health. Begin the sums anew."""
        self.check(self.step)
        mean = gather_uneven(self.sums[None]).mean(0) / self.steps_counted  # over the steps and the processes
        record = dict(epoch=self.step // self.steps_per_epoch, step=self.step)
        record |= dict(zip(self.names, mean.tolist(), strict=True)) | self.last_values
        if self.chance is not None:
            record["below_chance"] = self.chance - record["loss"]
        seconds = time.perf_counter() - loader.began
        steps = min(self.steps_counted, self.step - self.first_step)  # those of this call
        record |= dict(data_wait=loader.waited / seconds, images_per_s=self.args.batch_size * steps / seconds)
        if self.embeddings is not None:
            record |= embedding_health(self.embeddings[0])
        self.start_epoch()
        return record

    def save(self, loader, now=False):
        """Write what is due after the steps of an epoch. Return its record, or None if the epoch is not whole.

        last.pt is written after every --save-every epochs, before what takes long (judging), where the run ends, and if
        `now` is True. Every --keep-every epochs there is a copy that stays. Exits with an error message if weights are
        not finite: they are not saved.
        """
        epoch, rest = divmod(self.step, self.steps_per_epoch)
        if rest == 0 and self.steps_counted:
            self.record = self.summarize(loader)
        due = any(is_due(epoch, every, self.args.epochs) for every in (self.args.save_every, self.args.knn_every))
        keep = rest == 0 and self.args.keep_every > 0 and epoch % self.args.keep_every == 0
        if (now or rest or due or keep or self.step == self.last_step) and self.step != self.saved_step:
            self.write_checkpoints(f"epoch-{epoch:04d}.pt" if keep else None)
        return self.record

    def write_checkpoints(self, keep):
        """Write backbone.pt, a copy named `keep`, and last.pt, from the first process. last.pt becomes last.prev.pt.

        last.pt comes last, so that a run that was killed before it writes all of them again.
        """
        sums = gather_uneven(self.sums[None]).cpu() if self.steps_counted else None
        state = {name: part if torch.is_tensor(part) else part.state_dict() for name, part in self.parts.items()}
        if not is_finite(state):
            fail(f"weights are not finite after step {self.step}, which is not saved: give a lower --lr, a new --out")
        log = dict(names=self.names, count=self.steps_counted, sums=sums)
        state |= dict(step=self.step, record=self.record, log=log, config=self.config, images=self.images)
        if rank_and_world()[0] == 0:
            if self.encoder is not None:
                state["backbone"] = encoder_info(self.args)
                weights = {"state_dict": self.encoder.state_dict()}
                save_checkpoint(self.out / "backbone.pt", state["backbone"] | weights)
            if keep:
                save_checkpoint(self.out / keep, state)
            save_checkpoint(self.out / "last.pt", state, keep_previous=True)
        self.saved_step = self.step

    def write(self, record):
        """Add the record of an epoch to metrics.jsonl, and say what matters most of it."""
        write_metrics(self.out, record, self.args.epochs, self.args.tensorboard)
        self.record = None
        if record["epoch"] >= 3 and record.get("std", 1) < 0.1:
            say("warning: std is below 0.1 (1: spread over the sphere): the embeddings have collapsed")

    def say_demo(self):
        """Say that the images are a demo, if they are, and how to train on others."""
        if self.is_demo:
            command = f"python {self.args.method}.py --dataset"
            say(
                "DEMO: these images are generated, to try the script without data. One GPU, CIFAR-10 (downloaded): "
                f"{command} cifar10. The paper's own run: torchrun --nproc_per_node=8 {self.args.method}.py "
                "--dataset imagenet --data-dir DIR"
            )

    def finish(self):
        """Say how the run has ended, and leave the process group."""
        if self.step < self.total_steps:
            say(f"stopped at step {self.step} of {self.total_steps}: give a larger --max-steps, or none, to go on")
        elif self.step == self.first_step and self.epoch == self.last_epoch:
            last = last_record(self.out)
            said = {k: v for k, v in last.items() if k in ("epoch", "loss", "std") or k.endswith("_top1")}
            shown_values = ", ".join(f"{k} {shown(v)}" for k, v in said.items())
            say(f"{self.out} is finished already. Its last epoch: {shown_values}")
        elif self.encoder is not None:
            more = "" if self.has_labels else " --data-dir DIR"
            on = "" if self.has_labels else " on labelled images, DIR/train/ and DIR/test/ with one folder per class"
            say(f"finished. Judge it{on}: python eval_knn.py {self.out}{more}; python eval_linear.py {self.out}{more}")
        self.say_demo()
        if dist.is_initialized():
            dist.destroy_process_group()


def last_record(folder):
    """Return the last epoch's record in a run's folder, as a dict; {} if there is none."""
    return next((r for r in reversed(read_metrics(Path(folder) / "metrics.jsonl")) if "loss" in r), {})


def is_due(epoch, every, epochs):
    """True after every `every`-th epoch, counted from 1, and after the last; never if `every` is 0."""
    return every > 0 and (epoch % every == 0 or epoch == epochs)


def introduction(args, encoder, train, test, chance, about):
    """Return the first lines of a method's run: all that its numbers depend on. about: the method's own words."""
    world, size = rank_and_world()[1], sum(p.numel() for p in encoder.parameters()) / 1e6
    memory = "read when needed" if train.array is None else f"{train.array.nbytes / 2**20:.0f} MiB decoded"
    queue = getattr(args, "queue", None)
    share = f"; the queue is {100 * queue / len(train):.1f} % of the images" if queue else ""
    share += ", much above the usual tenth: --queue" if queue and queue > len(train) / 5 else ""
    mean, std = NORMS[args.norm]
    precision = "bf16" if args.amp == "bf16" else "TF32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
    several_cpus = world > 1 and next(encoder.parameters()).device.type == "cpu"
    all_processes = "each process's own (torch has batch norm over processes on GPUs only)" if several_cpus else "one"
    groups = getattr(args, "bn_groups", None) or all_processes
    start = f"; starts from {args.init}" if args.init else ""
    if "." in args.arch and not args.init:
        start = "; starts untrained, not from the weights that its tag names: --init FILE takes such"
    values = {"momentum encoder": args.momentum, "temperature": args.temperature}  # SimSiam has neither
    more = "".join(f", {name} {shown(value)}" for name, value in values.items() if value is not None)
    size_of_views = f"{args.image_size} px" + (f" in patches of {args.patch_size} px" if is_vit(args.arch) else "")
    return f"""{args.method}, {about}; variant {args.variant}; chance level of the loss {chance:.3f}{share}
encoder {args.arch}, {size:.2f} M parameters, {size_of_views}; evaluated: the {args.evaluated} encoder{start}
data {described(train)}: {len(train)} training images ({memory}), {"no" if test is None else len(test)} test images, \
{len(train.classes) or "no"} classes; mean {mean}, std {std}
batch {args.batch_size} over {world} process(es), {args.batch_size // world} each; \
{len(train) // args.batch_size} steps per epoch, {args.epochs} epochs; {precision}; batch-norm groups: {groups}
rate {args.lr:g} at batch {args.lr_batch}, scaled linearly to {args.lr * args.batch_size / args.lr_batch:g}; \
weight decay {shown(args.weight_decay)}{more}"""


def lock_folder(folder):
    """Lock the file `lock` in a folder for this process; returns the open file, which holds the lock.

    Exits with an error message if another process has it, or if it cannot be written. The lock ends with the process.
    Where the file system has no locks, none is taken.
    """
    if fcntl is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "w")
    except OSError as error:  # for example, the file is another user's
        fail(f"cannot write {folder / 'lock'} ({error}): give another --out")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, forked workers do not inherit it
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            fail(f"another run is at work in --out {folder}: wait for it, stop it, or give another --out")
    return file


def read_config(folder):
    """Return the config.json of a run's folder; {} if there is none that can be read."""
    try:
        return {**json.loads((Path(folder) / "config.json").read_text())}
    except (OSError, ValueError, TypeError):
        return {}


def write_whole(path, write):
    """Call write(temporary path), flush it to the disk and put it in place in one step: whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer turns one into the other
        free = ""
        with contextlib.suppress(OSError):
            free = f"; free on its disk: {shutil.disk_usage(path.parent).free / 2**20:.0f} MiB"
            temporary.unlink()
        fail(f"cannot write {path} ({error}{free}): nothing that was there is lost; the same command goes on from it")
    with contextlib.suppress(OSError):  # the new name, too, has to reach the disk, where a folder can be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def is_intact(path):
    """Return True if a checkpoint's archive is whole: torch.load alone would take flipped bits for weights."""
    try:
        with zipfile.ZipFile(path) as archive:
            # testzip reads past these attributes, which are 0 in torch's files.
            return archive.testzip() is None and not any(entry.external_attr for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, zlib.error):
        return False


def save_checkpoint(path, state, keep_previous=False):
    """torch.save, whole or not at all. keep_previous: the file that was there, if intact, becomes NAME.prev.pt."""
    path = Path(path)

    def write(temporary):
        torch.save(state, temporary)
        if keep_previous and path.exists() and is_intact(path):
            os.replace(path, path.with_name(path.stem + ".prev" + path.suffix))

    write_whole(path, write)


def load_checkpoint(path):
    """Return the state in a file or, if that is damaged, in NAME.prev.pt beside it, which it says.

    Exits with an error message if neither can be used.

    Loads tensors and plain data only.
    """
    path = Path(path)
    previous = path.with_name(path.stem + ".prev" + path.suffix)
    for candidate in (path, previous):
        with contextlib.suppress(Exception):  # of a file from elsewhere; torch's advice is to load it unsafely
            state = torch.load(candidate, map_location="cpu", weights_only=True) if is_intact(candidate) else None
            if isinstance(state, dict):
                if candidate == previous:
                    say(f"warning: {path} is damaged; going on from {previous}")
                return state
    others = "others' are read with --arch, or --init"
    fail(f"{path} is damaged, or not a checkpoint of this project ({others}), and there is no intact {previous.name}")


def read_metrics(path):
    """Return the records of a metrics.jsonl; what is not JSON, as a last line that was cut off, is left out."""
    records = []
    for line in Path(path).read_text(errors="replace").splitlines() if Path(path).is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [r for r in records if isinstance(r, dict) and isinstance(r.get("step", 0), int)]


def write_metrics(out, record, epochs=0, tensorboard=False):
    """Add one JSON object to metrics.jsonl, flushed to the disk, and say what matters most; from the first process."""
    if rank_and_world()[0]:
        return
    try:
        with open(Path(out) / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fail(f"cannot write {Path(out) / 'metrics.jsonl'} ({error}): the same command goes on from the last save")
    if "epoch" in record:
        below = f" ({record['below_chance']:.2f} below chance)" if "below_chance" in record else ""
        scores = [f"{name} {value:.1f} %" for name, value in record.items() if name.endswith("_top1")]
        scores += [f"std {record['std']:.2f}"] if "std" in record else []
        shown = "  ".join([f"loss {record['loss']:.4f}{below}", *scores, f"{record['images_per_s']:.0f} images/s"])
        say(f"epoch {record['epoch']}/{epochs}  {shown}")
    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(out) as writer:
            for name in (k for k, v in record.items() if isinstance(v, float)):
                writer.add_scalar(name, record[name], record["step"])


def find_checkpoint(out, config, resume="auto"):
    """Return the checkpoint (a Path) from which a run in the folder `out` goes on, or None. Writes nothing.

    A folder with the same configuration (OPERATING flags apart) goes on. A folder without a checkpoint, in which a run
    has failed before its first save, is taken over. Another configuration, or files that are not a run's, exit with an
    error message.
    """
    last = next((p for p in (out / "last.pt", out / "last.prev.pt") if p.exists()), None)
    if resume not in ("auto", "none") and not os.path.isfile(resume):
        fail(f"--resume {resume}: no such file; give auto, none or a last.pt")
    files = [p for p in out.iterdir() if p.suffix != ".tmp" and p.name != "lock"] if out.is_dir() else []
    if files:
        if resume == "none":
            fail(f"--out {out} is not empty: --resume none needs a new or empty folder")
        old = read_config(out)
        if not old:
            names = ", ".join(sorted(p.name for p in files)[:3])
            fail(f"--out {out} is not empty ({names}) and has no readable config.json: give a new folder")
        if different := "; ".join(differences(old, config)[:5]):
            if any(p.suffix == ".pt" for p in files):
                fail(f"--out {out} is of another configuration ({different}): give another --out")
            say(f"{out} has no checkpoint: it is taken over, although its run was another ({different})")
    if resume in ("auto", "none"):
        return last
    if last and Path(resume).resolve().parent == out.resolve() and not os.path.samefile(resume, last):
        fail(f"--resume {resume} would overwrite {last}, which is newer: give a new --out")
    return last or Path(resume)  # the same command again: --out has gone on since


def differences(old, new):
    """What a configuration changes in another, as a list of 'NAME was X, is Y'; OPERATING flags do not count."""
    names = sorted((set(old) | set(new)) - OPERATING)
    both = ((name, old.get(name), new.get(name)) for name in names)
    return [f"{name.replace('_', '-')} was {shown(was)}, is {shown(now)}" for name, was, now in both if was != now]


def is_finite(state):
    """Return True if all numbers in the tensors of a nested state are finite."""
    if torch.is_tensor(state):
        return state.isfinite().all().item()
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return all(map(is_finite, parts))


def versions(device):
    """Versions, machine and commit, for the first line of a run."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = None
    with contextlib.suppress(OSError):
        commit = subprocess.run(git, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    packages = {module.__name__: str(module.__version__) for module in (torch, torchvision, timm, np)}
    return {"python": sys.version.split()[0], **packages, "device": name, "commit": commit}


def save_grid(path, rows, labels):
    """Write rows of images as one PNG. rows: list of (n, 3, H, H) float in [0, 1]; labels: a text per row.

    Small images are enlarged without smoothing.
    """
    size, gap = max(row.shape[-1] for row in rows), 6
    side = size * max(1, 96 // size)
    font = ImageFont.load_default(12)
    left = 2 * gap + int(max(map(font.getlength, labels)))
    width = left + max(len(row) for row in rows) * (side + gap)
    sheet = Image.new("RGB", (width, gap + len(rows) * (side + gap)), "white")
    draw = ImageDraw.Draw(sheet)
    for r, row in enumerate(rows):
        top = gap + r * (side + gap)
        draw.text((gap, top + side // 2), labels[r], "black", font, "lm")
        for c, image in enumerate(row):
            picture = to_pil_image(image.detach().cpu().clamp(0, 1).mul(255).round().byte())
            sheet.paste(picture.resize((side, side), Image.Resampling.NEAREST), (left + c * (side + gap), top))
    if rank_and_world()[0] == 0:
        write_whole(path, lambda temporary: sheet.save(temporary, "PNG"))
    say(f"picture written to {path}")


def save_views(path, views, labels):
    """Write --show-views' picture: a row per view, with its first twelve images (n, 3, H, W) in [0, 1]."""
    save_grid(path, [view[:12] for view in views], labels)
