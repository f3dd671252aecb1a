"""Data, views and evaluation: what the method files and the evaluations share.

    1. data        load_images -> ImageSet (patterns, cifar10, ..., imagenet, folder, own); uniform, generator
    2. views       View declares one; ViewDataset draws and cuts in the loader; colour_views works on the device
    3. evaluation  extract_features, knn_predict, embedding_health; what both evaluations share
    4. encoders    build_backbone, load_backbone, load_published
    5. processes   start; fail, say, progress; join_processes, signals_noted
    6. flags       ArgumentParser, number; parse: recipe and command line
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
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
import zipfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np
import PIL
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_convert
from torchvision.transforms.functional import rgb_to_grayscale, solarize, to_pil_image

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


STREAM_ORDER = 1  # what a random stream is for: a key of `generator`, so that no two draws share one


def uniform(seed, epoch, index, count):
    """Uniform numbers for images: (n, count) float64 in [0, 1). index: (n,) ints.

    Each is a pure function of (seed, epoch, index, position), whatever batch, worker or process asks for it.
    """
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
PARTS = "train", "val", "test", "unlabeled"  # the names of the folders in a data set's folder
SPLITS = "train", "training", "val", "valid", "validation", "test", "testing"  # a tree with these is no single set


IN_MEMORY = 4 * 2**30  # bytes: small images that take more are read when they are needed
AT_ONCE = 4  # images whose views are drawn together where images are read when needed; twice as many are kept


class ImageSet:
    """Images with labels: of one uint8 array, of files, or of a user's own map-style Dataset. images[i]: (H, W, 3).

    array: (n, H, W, 3). paths: (n,) bytes below the folder `root`, in one array, which loader workers share as they
    would not share strings. data: the Dataset. An item of it is an image, PIL's, a uint8 array (H, W[, 3]) or a uint8
    tensor (C, H, W), or a tuple (image, label, ...). Files and items are read when they are asked for, never before.
    labels: (n,) int64, -1 where there is none. classes: their names. reads_labels: where labels are -1, they are read
    with the items. owner: what an error calls the images. rows: (n,) which of array, paths or data these images are.
    Reading raises BadImage if an image or its label cannot be used.
    """

    def __init__(self, name, labels, classes, array=None, paths=None, root="", data=None, owner=None):
        self.name, self.owner, self.root = name, owner or name, root
        self.array, self.paths, self.data, self.reads_labels = array, paths, data, False
        self.labels, self.classes = np.asarray(labels, np.int64), list(classes)
        self.rows = np.arange(len(self.labels))

    def __len__(self):
        return len(self.labels)

    def __str__(self):
        place = f"{self.name} in {self.root}" if self.root else self.owner
        memory = "read when needed" if self.array is None else f"{self.array.nbytes / 2**20:.0f} MiB decoded"
        labels = f"{len(self.classes)} classes" if self.classes else "labels in the items" * self.reads_labels
        return f"{place}: {len(self)} images ({memory}), {labels or 'no classes'}"

    def __getitem__(self, i):
        return self.read(i) if self.array is not None else _recent(self, int(i))

    def read(self, i):
        """Return an image, decoded now."""
        if self.array is not None:
            return self.array[self.rows[i]]
        return read_image(self.path(i)) if self.data is None else self.item_image(self.own_item(i), i)

    def own_item(self, i):
        """Return an item of the user's Dataset."""
        with named(self.where(i)):
            return with_patience(lambda: self.data[int(self.rows[i])])

    def item(self, i):
        """Return (image, label)."""
        if not self.reads_labels or self.labels[i] >= 0:
            return self[i], int(self.labels[i])
        item = self.own_item(i)
        with named(f"the label of {self.where(i)}"):
            if not isinstance(item, (tuple, list)) or len(item) < 2:
                raise TypeError(f"found {type(item).__name__}, but an evaluation needs items (image, label)")
            label = int(np.int64(operator.index(item[1])))
        return self.item_image(item, i), label

    def item_image(self, item, i):
        """Return the image of a user's item as uint8 (H, W, 3)."""
        image = item[0] if isinstance(item, (tuple, list)) and len(item) else item
        with named(self.where(i)):
            if isinstance(image, (np.ndarray, torch.Tensor)) and "uint8" in str(image.dtype) and image.ndim in (2, 3):
                channels = image.shape[2:] if isinstance(image, np.ndarray) else image.shape[:-2]
                image = to_pil_image(image) if tuple(channels) in ((), (1,), (3,)) else image
            if isinstance(image, Image.Image):
                return to_rgb(image)
            kind = [type(image).__name__, *(str(getattr(image, x)) for x in ("dtype", "shape") if hasattr(image, x))]
            wanted = "PIL images, uint8 arrays (H, W, 3) or uint8 tensors (3, H, W), alone or as (image, label)"
            raise TypeError(f"found {' '.join(kind)}, but items are {wanted}")

    def path(self, i):
        return os.path.join(self.root, os.fsdecode(self.paths[self.rows[i]]))

    def where(self, i):
        """Return what an error message calls an image."""
        return self.path(i) if self.paths is not None else f"image {self.rows[i]} of {self.owner}"

    def sizes(self, index):
        """Return (n, 2) int64 heights and widths. An image in a file has to be decoded for it."""
        return np.array([self[i].shape[:2] for i in index])

    def subset(self, index):
        """Return the images of the given rows, in that order. No image is copied."""
        part = copy.copy(self)
        part.labels, part.rows = self.labels[index], self.rows[index]
        return part

    def labelled(self):
        """Return those of the images that are not known to be without a label."""
        known = self.labels >= 0
        return self if self.reads_labels or known.all() else self.subset(np.flatnonzero(known))

    def checksum(self):
        """Return 16 hexadecimal digits that tell whether two image sets are the same. It takes seconds.

        They depend on the labels; of files on all names below the data set's folder, and on the contents of 100; of an
        array on its shape, and on 1,000 images; of a user's own Dataset on its length only.
        """
        digest = hashlib.sha256(self.labels.astype("<i8").tobytes())
        count = min(len(self), 1000 if self.paths is None else 100)
        spread = np.linspace(0, len(self) - 1, count).round().astype(np.int64)
        if self.paths is not None:
            digest.update(b"\0".join(self.paths[self.rows].tolist()))
            for path in map(self.path, spread):
                with named(f"cannot read the image {path}"):
                    digest.update(hashlib.sha256(with_patience(Path(path).read_bytes)).digest())
        elif self.array is not None:
            shape = len(self), *self.array.shape[1:]
            digest.update(repr(shape).encode() + self.array[self.rows[spread]].tobytes())
        return digest.hexdigest()[:16]


@functools.lru_cache(2 * AT_ONCE)  # small: a photograph of 12 megapixels is 36 MB
def _recent(images, i):
    return images.read(i)


class BadImage(Exception):
    """An image that cannot be used. The message is one line, names it and says why."""


@contextlib.contextmanager
def named(where, advice=""):
    """Inside, every error becomes a BadImage that says where it happened, in the error's own words."""
    try:
        yield
    except Exception as error:  # a damaged image may raise anything
        raise BadImage(f"{where}: {str(error) or type(error).__name__}{advice}".replace("\n", "\\n")) from error


def with_patience(act):
    """Return act(). If the disk answers with an error, as a network's may, it is tried twice more, a second apart."""
    for last in (False, False, True):
        try:
            return act()
        except OSError as error:  # Pillow's own, of damaged images, have no number
            if last or error.errno in (None, errno.ENOENT, errno.EACCES):
                raise
            time.sleep(1)


def to_rgb(image):
    """Return a PIL image of any mode with 8 bits per channel as uint8 (H, W, 3)."""
    if image.mode.startswith(("I", "F")):  # `convert` would clip them
        raise ValueError(f"values of mode {image.mode} have no known white: convert it to 8 bits per channel")
    return np.asarray(image.convert("RGB"))


def read_image(path):
    """Return an image file as uint8 (H, W, 3), turned as its EXIF says. Raises BadImage if Pillow cannot read it."""

    def read():
        with Image.open(path) as image:
            image.load()
            with contextlib.suppress(Exception):  # an orientation that cannot be read counts as none
                ImageOps.exif_transpose(image, in_place=True)
            return to_rgb(image)

    with named(f"cannot read the image {path}", ". tests/tools/check_images.py DIR lists all such images"):
        return with_patience(read)


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

    Scale, angle, phase, a warp, sign, contrast, a gradient of light, two muted colours and a little noise are random.
    So neither colour nor single pixels tell the kind: an encoder has to learn the shape.
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


def entries(folder, above=()):
    """Yield (name, kind) of all in a folder, by name. kind: "folder", "image", or what it is that is passed over.

    above: the folders in which this one is being listed. A link to one of them, or to a folder that holds it, is not
    followed. Only regular files are images, or a named pipe would be waited for.
    """
    inside = [os.path.join(os.path.realpath(path), "") for path in (folder, *above)]
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name[0] == "." or entry.name == "@eaDir":  # a NAS's thumbnails
            kind = "hidden"
        elif entry.is_file():
            kind = "image" if entry.name.lower().endswith(EXTENSIONS) else "no image"
        elif entry.is_dir():
            target = os.path.join(os.path.realpath(entry.path), "")
            kind = "link back" if any(path.startswith(target) for path in inside) else "folder"
        else:
            kind = "no regular file" if os.path.exists(entry.path) else "link to nowhere"
        yield entry.name, kind


def visible(folder, above=()):
    """Return the names of the folders and of the images in a folder, sorted; see `entries`.

    Exits with an error message if it has a link that leads nowhere, as one to a disk that is not mounted.
    """
    names = {"folder": [], "image": []}
    for name, kind in entries(folder, above):
        if kind == "link to nowhere":
            fail(f"{os.path.join(folder, name)} is a link that leads nowhere: mount its disk, or remove the link")
        names.setdefault(kind, []).append(name)
    return names["folder"], names["image"]


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
    shape = images.read(0).shape
    array = np.empty((len(images), *shape), np.uint8)
    starts = range(0, len(images), 1000)

    def decode(start):
        for i in range(start, min(start + starts.step, len(images))):
            if (image := images.read(i)).shape != shape:
                return False
            array[i] = image
        return True

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start, fits in zip(starts, pool.map(decode, starts), strict=True):
            if not fits:
                pool.shutdown(cancel_futures=True)
                return None
            if start:
                progress(f"reading images: {start} of {len(images)}")
    return array


def read_folder(name, root, part="", cache=True, unlabeled=False):
    """Return the images of root/part as an ImageSet, see `list_folder`. The first process lists the files for all.

    cache: images of one size of up to 96 px are decoded at once, if they take no more than IN_MEMORY.
    """
    root = os.fspath(root)
    try:
        paths, labels, classes = from_first(lambda: list_folder(name, root, part, unlabeled))
        images = ImageSet(name, labels, classes, None, paths, root)
        if cache and max((first := images.read(0)).shape) <= 96 and len(images) * first.nbytes <= IN_MEMORY:
            images.array = decode_all(images)
    except (BadImage, OSError) as error:
        fail(str(error))
    return images


def load_images(name, data_dir=None, train=True, size=32, cache=True, unlabeled=False):
    """Return a data set by name, or any data_dir with train/ (and val/ or test/), one folder per class.

    size: of `patterns` only, which is generated; unlabeled: also return images without labels, for pre-training.
    Returns an ImageSet, or None where train is False and there is no test set. Downloads only into the folder data/, an
    empty folder, or one with torchvision's files.
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


def own_images(train, test):
    """Return a user's Datasets as ImageSets; their labels are asked for if there is a test set, which may be None.

    No item is read here: a Dataset that opens a file would share one position in it between the workers of a loader.
    Exits with an error message if they are no map-style Datasets.
    """
    sets = []
    for data, owner in ((train, "your training data set"), (test, "your test data set")):
        if data is None and sets:
            return sets[0], None
        kind = type(data)
        is_stream = isinstance(data, torch.utils.data.IterableDataset)
        if is_stream or not hasattr(kind, "__len__") or not hasattr(kind, "__getitem__"):
            fail(f"{owner} is of type {kind.__name__}: give a map-style Dataset, with __len__ and __getitem__")
        if not len(data):
            fail(f"{owner} is empty: its length is 0")
        names = getattr(data, "classes", ()) if test is not None else ()
        names = names if isinstance(names, Collection) else ()  # it may be a number
        images = ImageSet("own", np.full(len(data), -1), names, data=data, owner=owner)
        images.reads_labels = test is not None
        sets.append(images)
    train, test = sets
    if train.classes and test.classes and train.classes != test.classes:
        fail("your training and test data sets have different `classes`: the names and their order have to be the same")
    return train, test


def demo(args, images):
    """Return the line that a training on generated images begins and ends with: how to train on others. "" on others.

    The line is for images that were generated, with which a script can be tried without data.
    """
    if images.name != "patterns" or images.root:
        return ""
    command = f"python {args.method}.py --dataset cifar10"
    paper = f"torchrun --nproc_per_node=8 {args.method}.py --dataset imagenet --data-dir DIR"
    what = "DEMO: these images are generated, to try the script without data."
    return f"{what} One GPU, CIFAR-10 (downloaded): {command}. The paper's own run: {paper}"


def open_images(args, train=None, test=None):
    """Return the images that the flags name, or a user's own: (training images, test images or None).

    Exits with an error message if there are none, or too few for one batch.
    """
    if train is not None or test is not None:
        train, test = own_images(train, test)
    else:
        options = dict(size=args.image_size, cache=not args.no_cache)
        train = load_images(args.dataset, args.data_dir, True, unlabeled=True, **options)
        test = load_images(args.dataset, args.data_dir, False, **options) if len(train.classes) > 1 else None
    if len(train) < args.batch_size:
        fail(f"{len(train)} images are fewer than one batch: give --batch-size {len(train)} or less")
    if line := demo(args, train):
        say(line)
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
    """Return the boxes of random crops, as torchvision's RandomResizedCrop draws them: (n, 4) int64.

    sizes: (n, 2) heights and widths. area, aspect: (n, tries) random shares of the image's area, and random widths /
    heights. position: (n, 2) uniform in [0, 1): of the top and the left. The first try that fits is taken. If none
    fits, it is the centre crop whose aspect ratio is nearest to `ratio` (lowest, highest) or, with `whole`, the whole
    image.
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

    view: a View. sizes: (n, 2) heights and widths. draws: (n, VIEW_DRAWS) uniform in [0, 1). `colour` takes the
    parameters. Where nothing is changed, factors are 1, and the rest is 0. The method's own values take the place of
    drawn ones, where they are not NaN: area, sigma: (n,); position: (n, 2), and blur_coin: (n,), uniform numbers.
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

    views: list of View. Each is drawn from numbers of its own, or by `draw`, if views depend on each other:
    draw(index, sizes, draws) -> (cuts, colours), with index (n,) the rows of the images, sizes (n, 2) their heights
    and widths, draws (n, len(views) * VIEW_DRAWS + extra_draws) uniform in [0, 1); cuts: list over views of (rows (n,)
    of the images to cut from, boxes (n, 4), output size); colours: list over views of (n, 9) parameters.
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
        count = AT_ONCE if self.images.array is None else len(index)
        parts = [self.cut_views(index[i : i + count], draws[i : i + count]) for i in range(0, len(index), count)]
        views, colours = zip(*parts, strict=True)
        views = [torch.from_numpy(np.concatenate(view)).permute(0, 3, 1, 2) for view in zip(*views, strict=True)]
        colours = np.concatenate([np.stack(colour, 1) for colour in colours])
        return {"views": views, "colour": torch.from_numpy(colours), "index": torch.from_numpy(index)}

    def cut_views(self, index, draws):
        """Return the views of some images: ([uint8 (n, S, S, 3), ...], [colours (n, 9), ...])."""
        cuts, colours = self.draw(index, self.images.sizes(index), draws)
        views = []
        for rows, boxes, size in cuts:
            images = map(self.images.__getitem__, rows.tolist())
            squares = [cut(*pair, size, self.interpolation) for pair in zip(images, boxes, strict=True)]
            views.append(np.stack(squares))
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
    """A DataLoader that raises BadImage, with a message of one line, if an image cannot be used or no batch comes.

    waited: seconds that the loop over it has waited for batches; began: when that loop began (time.perf_counter).
    """

    def __init__(self, data, device, workers=0, **options):
        if workers:
            if len(tempfile.gettempdir()) > 70:  # workers would wait for ever: a socket's path has at most 107 bytes
                fail(
                    f"TMPDIR {tempfile.gettempdir()} is too long for loader workers: give a shorter one, or --workers 0"
                )
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
            raise BadImage(str(error).strip().splitlines()[-1].removeprefix("common.BadImage: ")) from None
        except RuntimeError as error:
            if not str(error).startswith("DataLoader "):  # that a worker was killed, perhaps for its memory, or waits
                raise
            reason = str(error).splitlines()[0]
            raise BadImage(f"no batch from the loader ({reason}): give fewer --workers, or more memory") from error


def make_loader(args, images, views, device, draw=None, extra_draws=0):
    """Batches of views of `images`, as --batch-size, --seed and --workers say. Arguments as `ViewDataset`.

    `loader.batch_sampler.set_epoch` chooses the epoch. The workers live as long as the run.
    """
    if device.type == "cpu" and not args.arch.endswith(("_micro", "_mini", "own")):
        say(f"note: {args.arch} is an encoder for GPUs, slow on a CPU. README, Run it, has commands for a laptop")
    data = ViewDataset(images, views, args.seed, args.interpolation, draw, extra_draws)
    sampler = EpochSampler(len(images), args.batch_size, args.seed)
    workers = workers_of(args, device)
    options = dict(batch_sampler=sampler, collate_fn=default_convert, persistent_workers=workers > 0)
    return Loader(data, device, workers, **options)


def _per_image(value, x):
    return torch.as_tensor(value, dtype=x.dtype, device=x.device).reshape(-1, 1, 1, 1)


ADJUSTMENTS = {  # of images x by factors f (N, 1, 1, 1): multiply x, or blend it with its mean gray, or with its gray
    "brightness": lambda x, f: x * f,
    "contrast": lambda x, f: torch.lerp(rgb_to_grayscale(x).mean((1, 2, 3), keepdim=True), x, f),
    "saturation": lambda x, f: torch.lerp(rgb_to_grayscale(x), x, f),
}


def adjust(name, x, factor):
    """Change the brightness, contrast or saturation of each image by its factor (N,). Values are clamped to [0, 1]."""
    return ADJUSTMENTS[name](x, _per_image(factor, x)).clamp_(0, 1)


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

    largest: the largest of all sigmas. Kernels reach 5 sigma to each side, or as far as can be mirrored. That is at
    least 10 pixels, so that an image's result does not depend on the rest of its batch.
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
    functions = *(functools.partial(adjust, name) for name in ADJUSTMENTS), adjust_hue
    for turn, (step, function) in itertools.product(range(-3, 4), enumerate(functions)):
        rows = torch.nonzero((jittered & (steps == step) & (turns == turn)).any(1)).flatten()
        x = _on(x, rows, function, on[COLOUR[step]])
    x = _on(x, torch.nonzero(p["gray"]).flatten(), lambda v: rgb_to_grayscale(v).repeat(1, 3, 1, 1))
    blur = functools.partial(gaussian_blur, largest=p["sigma"].max().item())
    x = _on(x, torch.nonzero(p["sigma"]).flatten(), blur, on["sigma"])
    x = _on(x, torch.nonzero(p["solarize"]).flatten(), lambda v: solarize(v, 0.5))
    return _on(x, torch.nonzero(p["flip"]).flatten(), lambda v: v.flip(-1))


def colour_views(batch, device, memory_format=torch.channels_last, norm=None):
    """Return a batch's views, moved to the device and coloured: a list of (n, 3, H, W) float.

    batch: of `ViewDataset`. norm: (mean, std), by which they are normalised; without it they are in [0, 1].
    Views of one size are coloured in one pass, which costs a GPU fewer launches.
    """
    views = [v.to(device, non_blocking=True) for v in batch["views"]]
    for size in {v.shape[-1] for v in views}:
        same = [i for i, v in enumerate(views) if v.shape[-1] == size]
        x = colour(torch.cat([views[i] for i in same]), batch["colour"][:, same].transpose(0, 1).flatten(0, 1))
        x = x if norm is None else normalize(x, *norm)
        for i, view in zip(same, x.chunk(len(same)), strict=True):
            views[i] = view.contiguous(memory_format=memory_format)
    return views


def check_picture(path):
    """Return `path`, if a picture may be written there: to a new name in .png, or over another PNG.

    Exits with an error message otherwise. It may be the type of a flag.
    """
    is_png = Path(path).is_file() and Path(path).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    if Path(path).suffix.lower() != ".png" or (Path(path).exists() and not is_png):
        fail(f"{path} is no place for a picture: give a new name that ends in .png, or that of a PNG")
    return path


def save_grid(path, rows, labels):
    """Write rows of images as one PNG. rows: list of (n, 3, H, H) float in [0, 1]; labels: a text per row."""
    check_picture(path)
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


# ---------------------------------------------------------------- 3. evaluation
# Features of frozen encoders, nearest neighbours, signs of collapse; and what both evaluations share.


@contextlib.contextmanager
def exact_products():
    """Inside, products of float32 matrices are computed in float32. It is a decorator, too.

    TF32 keeps 10 of the 23 bits of each factor. To compare neighbours, or to fit a classifier, these are too few.
    """
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


class CentreCrops(Dataset):
    """Images as an evaluation sees them: (uint8 (3, size, size), label).

    An image of another size is resized until its shorter side is 256/224 of `size`, and its centre is cut.
    """

    def __init__(self, images, size, interpolation="bilinear"):
        self.images, self.size, self.interpolation = images, size, interpolation

    def __getitem__(self, i):
        image, label = self.images.item(i)
        height, width = image.shape[:2]
        if (height, width) != (self.size, self.size):
            side = min(height, width) * 224 / 256
            image = cut(image, ((height - side) / 2, (width - side) / 2, side, side), self.size, self.interpolation)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), label


@torch.no_grad()
def extract_features(encoder, images, info, device, batch_size=256, workers=0, amp=False, whole=True, what="features"):
    """Return features and labels of all images, ((n, width) float32, (n,) int64), in order, on the CPU.

    encoder: maps (N, 3, H, W) to (N, width), and is on the device; it is used in evaluation mode. images: an ImageSet.
    info: image_size, mean, std and interpolation, as in backbone.pt. batch_size: of each process. amp: encode in bf16.
    whole: all rows on every process; False: the rows only that this process encodes (`own_rows`). what: what the
    progress line calls it. A label is -1 where there is none.
    No gradient. Exits with an error message if a feature is not finite.
    """
    mine = own_rows(torch.arange(len(images)))
    crops = CentreCrops(images, info["image_size"], info["interpolation"])
    crops = torch.utils.data.Subset(crops, mine.tolist() or [0])  # a process without images encodes one, for the width
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

    A neighbour votes for its class with exp(cosine / temperature), scaled so that the nearest one's vote is 1.
    train_x: (n, d), the bank, and train_y: (n,) int64 in [0, num_classes). Each process gives its rows of the bank,
    which may be none. test_x: (m, d), the same and whole on every process. Both are L2-normalised here. k: a number or
    several; one above the size of the bank counts all of it. Equally near neighbours come in any order.
    Each process finds the nearest of its rows for a chunk of test images, and the nearest of these are the bank's. So
    memory is bounded. No gradient. Source: Wu et al., arXiv 1805.01978.
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


def check_labels(train_y, test_y):
    """Exit with an error message if labels (n,) of training and (m,) of test images are of fewer than two classes.

    -1 means no label. If no test image is of a class that was trained, that is an error, too.
    """
    known = train_y[train_y != -1].unique()
    if len(known) < 2 or not torch.isin(test_y, known).any():
        fail("an evaluation needs labels of two classes to train on, and of these to test on; -1 means no label")


def knn_accuracy(train_x, train_y, test_x, test_y, ks, temperature):
    """Return the top-1 accuracy in percent of several k: {k: float}.

    train_y (n,), test_y (m,): int64, any labels; -1 does not vote and is not counted. The rest is as in `knn_predict`.
    Exits with an error message as `check_labels` does.
    """
    voting, counted = train_y != -1, test_y != -1
    classes = gather_uneven(train_y[voting].unique()).unique()
    check_labels(classes, test_y)
    train_x, train_y = train_x[voting.to(train_x.device)], torch.searchsorted(classes, train_y[voting])
    predicted = knn_predict(train_x, train_y, test_x, ks, temperature, len(classes))
    right = (classes[predicted] == test_y)[:, counted].sum(1).tolist()
    return {k: 100 * number / int(counted.sum()) for k, number in zip(ks, right, strict=True)}


def knn_record(args, encoder, train, test, device):
    """Return the accuracies of a method's encoder as an epoch's record has them: {"knn20_top1": percent, ...}.

    The bank is the labelled training images, without augmentation.
    """
    options = dict(info=encoder_info(args), device=device, workers=workers_of(args, device), amp=args.amp == "bf16")
    x, y = extract_features(encoder, train.labelled(), whole=False, what="features, train", **options)
    test_x, test_y = extract_features(encoder, test.labelled(), what="features, test", **options)
    found = knn_accuracy(x.to(device), y, test_x.to(device), test_y, (20, 200), 0.07)
    return {f"knn{k}_top1": percent for k, percent in found.items()}


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
    """Return (device, the encoder to judge, in evaluation mode, info). Joins torchrun's process group, if any.

    module: a user's own encoder. It gets the checkpoint's weights; without a checkpoint, those of the first process.
    Fills in args.workers and args.amp. Exits with an error message if flags do not go together, or the encoder does
    not take the images.
    """
    if (args.checkpoint is None and module is None) or (args.random_init and module is not None):
        fail("give RUN, a run's folder; with --random-init its encoder, one of timm's, is judged untrained")
    device = join_processes(args.device)
    args.workers = workers_of(args, device)
    if args.checkpoint is None:
        like = dict(norm=args.norm or "imagenet", method="no run", encoder="given")
        encoder, info = module, backbone_info(None, args.image_size or 32, None, **like)
        if rank_and_world()[1] > 1:
            encoder.load_state_dict(from_first(encoder.cpu().state_dict))
    else:
        names = "image_size", "patch_size", "num_heads", "norm", "prefix"
        of_others = {name: value for name in names if (value := getattr(args, name)) is not None}
        encoder, info = load_backbone(args.checkpoint, args.encoder, module, args.arch, **of_others)
    if args.random_init:
        torch.manual_seed(args.seed)
        encoder, info = build_backbone(info), info | dict(encoder="untrained")
    args.amp = "bf16" if use_bf16(args.amp, device, arch_name(info), [info["image_size"]]) else "off"
    encoder = encoder.eval().to(device)
    output_width(encoder, info["image_size"])  # exits if it does not take images of this size
    return device, encoder, info


def how_to_judge(args, images):
    """Return the last words of a training: how to judge its encoder. images: those that it was trained on."""
    words = f"python eval_knn.py {args.out}; python eval_linear.py {args.out}"
    if args.arch == "own":
        words = f"eval_knn.main(eval_knn.parse_args([{args.out!r}]), encoder=ENCODER, train=IMAGES, test=IMAGES)"
    elif len(images.classes) < 2:
        words = f"python eval_knn.py {args.out} --data-dir DIR, with DIR/train/ and DIR/test/ of one folder per class"
    return f"finished. Judge it: {words}\n{demo(args, images)}".rstrip()


def run_folder(checkpoint):
    """Return the folder of the run that a checkpoint is of: itself, or where its file is."""
    path = Path(checkpoint)
    return path if path.is_dir() else path.parent


def open_data(args, info, train=None, test=None, labels=True):
    """Return the images of an evaluation that have labels: (training images, test images or None).

    train, test: a user's own Datasets, instead of --dataset's. Own training images have labels if there is a test set.
    Without --dataset these are the run's data, and args gets their name and place. Without --data-dir, too, they have
    to be the images that the run was trained on. labels: whether a test set and two classes are needed.
    """
    trained_on = None
    if train is not None or test is not None:
        args.dataset, args.data_dir = "own", None
        train, test = own_images(train, test)
    else:
        if args.dataset is None and args.checkpoint:
            config = read_config(run_folder(args.checkpoint))
            if "dataset" not in config:
                fail("there is no readable config.json beside the checkpoint to tell its data set: give --dataset")
            if args.data_dir is None:
                trained_on = config.get("images", {}).get("checksum")
            args.dataset, args.data_dir = config["dataset"], args.data_dir or config.get("data_dir")
        args.dataset = args.dataset or "patterns"
        options = dict(size=info["image_size"], unlabeled=trained_on is not None)  # the run's own images had them, too
        train, test = (load_images(args.dataset, args.data_dir, part, **options) for part in (True, False))
    if trained_on and trained_on != train.checksum():
        fail(f"--dataset {args.dataset} has other images than the run was trained on: give --dataset and --data-dir")
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
    encoder = f"encoder {arch_name(info)} of {info['method']}, the {info['encoder']} encoder, evaluation mode"
    features = "features: before the projector, after the last norm and pooling; the encoder computes in"
    float32 = "float32 with products in TF32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
    size = f"if not of {info['image_size']} px: shorter side 256/224 of it, centre crop, {info['interpolation']}"
    if train.array is not None and train.array.shape[1:3] == (info["image_size"],) * 2:
        size = "no resize"
    images = f"training images {train}; test images {test or 'none'}; {size}"
    norm = f"mean {tuple(info['mean'])}, std {tuple(info['std'])}"
    return f"{encoder}; {features} {'bf16' if args.amp == 'bf16' else float32}\n{images}; {norm}"


# ------------------------------------------------------------------ 4. encoders
# timm's encoders as this project builds, saves and loads them; files of others; a user's own modules.

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

    arch: a name of ARCHS, any timm model, or None for a user's own module. norm: a name of NORMS. num_heads: of a ViT;
    None: timm's number. more: more entries.
    Plain ResNets get a 3 x 3 stem for images of up to 64 px. resnet_mini's has stride 2, and resnet_micro keeps timm's,
    as they are to be fast on a CPU. timm's own ViTs get MoCo v3's initialisation, except of the patch embedding, which
    timm leaves out. Their position embedding is interpolated for other image sizes.
    """
    mean, std = NORMS[norm]
    like = dict(image_size=image_size, mean=mean, std=std, interpolation=interpolation, **more)
    if arch is None:
        return dict(timm_name=None, create_kwargs={}, stem="own", **like)
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
    arch = None if args.arch == "own" else args.arch
    heads = getattr(args, "num_heads", "auto")
    described = dict(num_heads=None if heads == "auto" else heads, method=args.method, encoder=args.evaluated)
    return backbone_info(arch, args.image_size, args.patch_size, args.norm, args.interpolation, **described)


def arch_name(info):
    """Return the name by which --arch calls an encoder that `backbone_info` describes."""
    name, given = info["timm_name"], info["create_kwargs"].items()
    fitting = (short for short, (timm_name, more) in ARCHS.items() if timm_name == name and more.items() <= given)
    return next(fitting, name or "own encoder")


def build_backbone(info, sizes=(), **more):
    """Return the untrained timm model without classifier that `info` describes: it maps (N, 3, H, W) to (N, width).

    sizes: further sizes of images that it will see. more: further arguments for timm. Exits with an error message if
    the model does not take them.
    """
    sizes = sorted({info["image_size"], *sizes})
    try:
        backbone = timm.create_model(info["timm_name"], **info["create_kwargs"], **more)
        if info["stem"] != "timm":  # no 7 x 7 convolution and no max-pool, as CIFAR work has it
            stride = 2 if info["stem"] == "3x3-s2" else 1
            backbone.conv1 = nn.Conv2d(3, backbone.conv1.out_channels, 3, stride, padding=1, bias=False)
            backbone.maxpool = nn.Identity()
        for size in sizes:
            encode_zeros(backbone, size)
    except (TypeError, AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        fail(f"timm's {info['timm_name']} does not work with images of {', '.join(map(str, sizes))} px: {reason}")
    return backbone


def load_backbone(path, encoder=None, module=None, arch=None, **published):
    """Load a pre-trained backbone from a run's folder, a last.pt or a backbone.pt: (module in evaluation mode, info).

    encoder: 'query' or 'momentum'; None: the one that the method's authors evaluate, which backbone.pt holds. module:
    gets the weights, instead of what timm builds; a user's own encoder has to be given. arch: of a file of others,
    which is read by `load_published`, with its further arguments. info: see `backbone_info`. Exits with an error
    message if a key does not match.
    """
    path = Path(path)
    if arch is not None:
        if encoder is not None or module is not None:
            fail(f"{path} is read as a file of others, since an arch is given: a prefix chooses, and timm builds it")
        return load_published(path, arch, **published)
    if published:
        fail("--image-size, --patch-size, --num-heads, --norm, --prefix go with --arch; a run says its own")
    if path.is_dir():
        path = path / ("backbone.pt" if encoder is None else "last.pt")
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
        if module is None and info["timm_name"] is None:
            fail(f"{path} holds a user's own encoder: give it, too, as eval_knn.main(args, encoder=MODULE)")
        backbone = build_backbone(info) if module is None else module
        backbone.load_state_dict(weights)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:600]}"
        others = "for others' give --arch NAME, say resnet50, vit_base, ..."
        others = others if module is None else "load others' into your encoder, and leave the file out"
        fail(f"{path} is not a checkpoint of this project ({others}), or does not fit its encoder: {reason}")
    return backbone.eval(), info


def load_published(path, arch, image_size=224, patch_size=None, norm="imagenet", num_heads=None, prefix=None):
    """Load an encoder from a checkpoint of others, as `load_backbone` returns it: (module in evaluation mode, info).

    The further arguments are what the file does not say, as in `backbone_info`. patch_size: None for the one in timm's
    name, or 16. prefix: as in `fitting_weights`.
    """
    if Path(path).is_dir():
        fail(f"{path} is a folder. A run's folder says its encoder itself: leave out --arch; or give others' FILE")
    patch_size = patch_size or named_patch(arch) or 16
    info = backbone_info(arch, image_size, patch_size, norm, num_heads=num_heads, method=Path(path).name)
    backbone = build_backbone(info)
    weights, taken = fitting_weights(path, backbone, prefix, "--prefix")
    backbone.load_state_dict(weights)
    return backbone.eval(), info | {"encoder": taken.rstrip(".") or "only"}


def read_tensors(path):
    """Return the tensors of a checkpoint of others by name: {"state_dict.module.encoder_q.conv1.weight": tensor, ...}.

    The names of nested entries, and the numbers of a list's, are joined by dots. Of a run's folder it is the
    backbone.pt. Exits with an error message as `load_checkpoint` does.
    """

    def flat(state, prefix=""):
        if isinstance(state, np.ndarray):
            with contextlib.suppress(TypeError):  # it is not of numbers, or of such as torch does not have
                state = torch.from_numpy(state)
        if torch.is_tensor(state):
            return {prefix.removesuffix("."): state}
        if isinstance(state, (list, tuple)):
            state = {str(i): entry for i, entry in enumerate(state)}
        entries = state.items() if isinstance(state, dict) else ()
        inner = [flat(x, f"{prefix}{name}.") for name, x in entries if isinstance(name, str)]  # an optimiser's: numbers
        return {name: x for found in inner for name, x in found.items()}

    return flat(load_checkpoint(Path(path) / "backbone.pt" if Path(path).is_dir() else path))


def encoders_in(found, encoder):
    """Return the tensors of a checkpoint that may be an encoder's: {prefix in the file: {the encoder's name: tensor}}.

    found: of `read_tensors`. Layers may have numbers, as lightly's have: nn.Sequential(*encoder.children()) saves
    those. The position embedding of a ViT is resampled, if its rows are those that the encoder has before its patches'
    and a square grid's.
    """
    first, places = next(iter(encoder.state_dict())), {}
    numbers = {str(number): part for number, (part, _) in enumerate(encoder.named_children())}
    starts = {}  # {prefix: the names of what has numbers there}
    for name, names in ((f"0.{first.partition('.')[2]}", numbers), (first, {})):
        starts |= {key.removesuffix(name): names for key in found if f".{key}".endswith(f".{name}")}
    for start, names in (starts or {"": {}}).items():
        theirs = {}
        for key, x in found.items():
            if key.startswith(start):
                part, dot, rest = key.removeprefix(start).partition(".")
                theirs[names.get(part, part) + dot + rest] = x
        with contextlib.suppress(AttributeError, IndexError, KeyError, ValueError, RuntimeError):  # it is no such ViT's
            grid, rows = encoder.patch_embed.grid_size, encoder.pos_embed.shape[1]
            how = dict(new_size=grid, num_prefix_tokens=rows - math.prod(grid))
            theirs["pos_embed"] = timm.layers.resample_abs_pos_embed(theirs["pos_embed"], **how)
        places[start] = theirs
    return places


# Top-level names of what changes the features, and what an encoder without it would leave out
CHANGES_FEATURES = {"cls_token", "dist_token", "reg_token", "register_tokens", "storage_tokens", "prompt_embeddings"}
CHANGES_FEATURES |= {"pos_embed", "rel_pos_bias", "rope", "norm_pre", "ln_pre", "norm_post", "fc_norm", "attn_pool"}
CHANGES_FEATURES |= {"attnpool", "global_pool", "final_conv", "act1", "layer5"}


def misfits(theirs, encoder):
    """Return why tensors, {name: tensor}, are not an encoder's, as a list of texts. It is empty if they are.

    Each parameter and statistic needs a tensor of its shape. And each tensor below the encoder's own top-level parts
    needs a place in it: otherwise the file is of a deeper or richer encoder.
    """
    own, wrong = encoder.state_dict(), []
    for name, x in own.items():
        if name.endswith("num_batches_tracked"):  # old files have none
            continue
        if name not in theirs:
            wrong.append(f"{name} {tuple(x.shape)} is not there")
        elif theirs[name].shape != x.shape:
            wrong.append(f"{name} is {tuple(theirs[name].shape)}, not {tuple(x.shape)}")
        elif theirs[name].is_floating_point() != x.is_floating_point():
            wrong.append(f"{name} is {theirs[name].dtype}, not {x.dtype}")
    parts = {name.split(".")[0] for name in own} | CHANGES_FEATURES
    classifier = ("num_batches_tracked", "head.fc.weight", "head.fc.bias")  # the latter are ConvNeXt's
    left = [n for n in theirs if n not in own and n.split(".")[0] in parts and not n.endswith(classifier)]
    if left and not wrong:
        wrong.append(f"it has no place for {len(left)} tensors, {', '.join(left[:4])}")
    return wrong


# Encoders that are tried where a file does not fit, so that the message can name the right one.
USUAL = [*(f"resnet{depth}" for depth in (18, 34, 50, 101, 152, "26d", "50d")), "wide_resnet50_2", "resnext50_32x4d"]
USUAL += ["seresnet50", "convnext_tiny", "convnext_small", "convnext_base"]
USUAL_VITS = ("vit_{}_patch16_224", "deit3_{}_patch16_224", "deit_{}_distilled_patch16_224")
USUAL_VITS += ("vit_{}_patch14_dinov2", "vit_{}_patch14_reg4_dinov2", "vit_{}_patch16_dinov3")
VIT_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large"}  # by width


def usual_name(found):
    """Return ": it fits --arch NAME" with a usual encoder that a checkpoint of others fits, or ""."""
    names, patch_size = USUAL, 16
    size = 32 if any(x.shape[1:] == (3, 3, 3) for x in found.values()) else 224  # of a 3 x 3 stem
    for patches in (x for name, x in found.items() if name.endswith("patch_embed.proj.weight")):
        names = [name.format(VIT_SIZES.get(len(patches))) for name in USUAL_VITS]
        patch_size, size = patches.shape[-1], 16 * patches.shape[-1]
    for name in filter(timm.is_model, names):
        with torch.device("meta"):  # without weights
            encoder = build_backbone(backbone_info(name, size, patch_size))
        if not all(misfits(theirs, encoder) for theirs in encoders_in(found, encoder).values()):
            flag = "" if named_patch(name) in (None, patch_size) else f" --patch-size {patch_size}"
            return f": it fits --arch {name}{flag}"
    return ""


def fitting_weights(path, backbone, prefix=None, flag="--init-prefix"):
    """Return (a state_dict for an encoder from a checkpoint of others, the prefix of its names in the file).

    The prefix is one after which the encoder fits (see `misfits`). Of several encoders it is a teacher (DINO's), or
    else the first that is no momentum encoder, nor an optimiser's. prefix: the end of another's. flag: what a message
    calls it. Exits with an error message if none fits, or a weight is not finite.
    """
    found, own = read_tensors(path), backbone.state_dict()
    places = encoders_in(found, backbone)
    wrong = {start: misfits(theirs, backbone) for start, theirs in places.items()}
    fitting = [start for start in places if not wrong[start]]
    if not fitting:
        start = min(places, key=lambda start: len(wrong[start]))
        if len(own.keys() & places[start].keys()) < len(own) / 10:  # a name fits by chance
            start, wrong[""] = "", misfits(found, backbone)
        reasons = (f"after {start}, " if start else "") + "; ".join(wrong[start][:3])
        if "conv1.weight is (64, 3, " in reasons:
            reasons += " (sizes up to 64 px choose a ResNet's 3 x 3 stem, larger ones 7 x 7: give another --image-size)"
        first = "".join(f", {name} {tuple(x.shape)}" for name, x in itertools.islice(found.items(), 2))
        reasons += f". The file has {len(found)} tensors{first}"
        fail(f"{path} does not fit the encoder{usual_name(found)}: {reasons}")
    chosen = [start for start in fitting if start.endswith(prefix or "")]
    if not chosen:
        names = " and ".join(start or "without prefix" for start in fitting)
        fail(f"{flag} {prefix}: the encoders of {path} are {names}")
    slow, no_weights = ("momentum", "encoder_k", "key_", "target", "ema"), ("optim", "exp_avg", "grad", "init")

    def rank(start):
        is_slow, is_none = (any(word in start for word in words) for words in (slow, no_weights))
        return 2 * ("teacher" in start) - is_slow - 4 * is_none

    start = max(chosen, key=rank)
    theirs, others = places[start], tuple(other for other in fitting if other not in ("", start))
    choice = f" (also there: {', '.join(others)}; {flag} chooses)" if others else ""
    left = [start + name for name in theirs if name not in own and not (start + name).startswith(others)]
    left += [name for name in found if not name.startswith(tuple(fitting))]
    listed = "".join(f", {name}" for name in left[:4]) + (", ..." if left[4:] else "")
    say(f"{path}: the encoder is {start or 'the file itself'}{choice}; left out: {len(left)} tensor(s){listed}")
    if "pos_embed" in own and len(old := found[f"{start}pos_embed"][0]) != (rows := own["pos_embed"].shape[1]):
        say(f"its position embedding is resampled from {len(old)} rows to {rows}")
    weights = {name: x if name.endswith("num_batches_tracked") else theirs[name] for name, x in own.items()}
    if not all(x.isfinite().all() for x in weights.values()):
        fail(f"{path} has weights that are not finite")
    return weights, start


def copy_module(module, frozen=False):
    """Return a copy of a module, to be trained, or None for None. frozen: none of its parameters gets gradients.

    A module that is in evaluation mode as a whole, as `load_backbone` returns it, is copied in training mode.
    copy.deepcopy alone gives TorchScript's modules parameters that cannot be trained.
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
    name, widths = f"the encoder, of type {type(module).__name__},", set()
    for size in sizes:
        image = f"images (1, 3, {size}, {size})"
        try:
            shape = tuple(encode_zeros(module, size).shape)
        except Exception as error:  # a user's own module may raise anything
            advice = f"Give --image-size N that it takes, or an encoder for {size} px"
            fail(f"{name} does not map {image} to features (1, width): {' '.join(str(error).split())[:300]}. {advice}")
        if len(shape) != 2:  # for example, a ResNet without its last layer gives (1, width, 1, 1)
            fail(f"{name} maps {image} to {shape}, not (1, width): end it with torch.nn.Flatten()")
        widths.add(shape[1])
    if len(widths) > 1:
        fail(f"{name} gives other numbers of features for other sizes of images: give one that pools them")
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
# How a script starts, what is said and by whom, torchrun's process group, and signals.

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


def say(text="", end="\n"):
    """Print from the first process only. On a terminal the text replaces the progress line."""
    if rank_and_world()[0] == 0:
        print_anywhere(("\r\x1b[K" if on_terminal() else "") + text, end)


def progress(text, last=[0.0]):  # noqa: B006  (the list keeps the time of the last line)
    """Show how far long work has come: on a terminal a line that rewrites itself, in a log file a line every 30 s."""
    if on_terminal() or time.monotonic() - last[0] > 30:
        say(text, end="" if on_terminal() else "\n")
        last[0] = time.monotonic()


def show_progress(args, loader, history, step, total_steps):
    """Show how far a training has come. Exits with an error message if the loss or its gradient is not finite.

    loader: `Loader`, which has begun an epoch. history: {name: 0-d tensor} of each step since then, with `loss`.
    """
    last, seconds = history[-1], (time.perf_counter() - loader.began) / len(history)
    if not (last["loss"] + last.get("grad_norm", 0)).isfinite():
        advice = "go on without bf16, or with a lower --lr in a new --out"
        fail(f"the loss or its gradient is not finite at step {step}; last.pt is from before: {advice}")
    where = f"epoch {math.ceil(step * args.epochs / total_steps)}/{args.epochs}  step {step}/{total_steps}"
    speed = f"{args.batch_size / seconds:.0f} images/s  {seconds * (total_steps - step) / 60:.1f} min left"
    progress(f"{where}  loss {last['loss'].item():.3f}  {speed}")


def tell(args, record, writer=None):
    """Say what matters most of an epoch's record. TensorBoard's writer, if there is one, gets all of it."""
    gap = record.get("below_chance")
    distance = "" if gap is None else f" ({abs(gap):.2f} {'below' if gap >= 0 else 'above'} chance)"
    figures = [f"{name} {value:.1f} %" for name, value in record.items() if name.endswith("_top1")]
    figures += [f"std {record['std']:.2f}"] if "std" in record else []
    words = "  ".join([f"loss {record['loss']:.4f}{distance}", *figures, f"{record['images_per_s']:.0f} images/s"])
    say(f"epoch {record['epoch']}/{args.epochs}  {words}")
    if writer is not None:
        for name, value in record.items():
            writer.add_scalar(name, value, record["step"])
        writer.flush()


def start(main, parse_args):
    """Run a script. Only here is set what concerns a whole process; `main` and an import leave it as it is.

    Ctrl-C, and an image that cannot be used, end the script with a line and not a traceback.
    """
    for package, oldest in ((torch, "2.11"), (torchvision, "0.26"), (timm, "1.0.20"), (PIL, "10.1")):
        if TorchVersion(package.__version__) < oldest:
            fail(f"{package.__name__} {package.__version__} is too old: it has to be {oldest} or newer")
    torch.set_flush_denormal(True)  # denormal numbers make a CPU several times slower
    keep_memory()
    # These are about speed and names only.
    warnings.filterwarnings("ignore", ".*(broadcast_buffers|Grad strides do not match|all_gather_into_tensor).*")
    try:
        args = parse_args()
        device = own_device(getattr(args, "device", "cpu"))  # a tool may have no such flag
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # The same GPUs have TF32 and bf16.
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = has_bf16(device)
            torch.backends.cudnn.benchmark = True
        elif (getattr(args, "arch", None) or "").endswith(("_micro", "_mini")) and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # a second one gives 15 %, and takes two thirds when another program wants a core
        main(args)
    except BadImage as error:
        fail(str(error))
    except KeyboardInterrupt:
        say("stopped by Ctrl-C (exit status 130); what was saved is kept")
        raise SystemExit(130) from None


def keep_memory():
    """Let glibc keep freed memory. Mapping large tensors anew would cost a CPU up to a quarter of a step."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block, however large, is mapped on its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the top of the heap stays


@contextlib.contextmanager
def own_generators():
    """Inside, the global generators may be seeded. Afterwards they are as before. It is a decorator, too."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


GROUPS = itertools.count()  # process groups that this program has made
PATIENCE = datetime.timedelta(minutes=30)  # how long a process waits for others: one of them may be downloading


def own_device(name):
    """Return this process's device. name: auto, cuda or cpu."""
    if name == "cpu" or not torch.cuda.is_available():
        if name == "cuda":
            fail("--device cuda: torch sees no CUDA device; use --device cpu")
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))


def join_processes(name):
    """Join torchrun's process group, if there is one. Return this process's device. name: auto, cuda or cpu."""
    device = own_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if all(os.environ.get(name) for name in LAUNCHED_BY) and not dist.is_initialized():
        store, rank, world = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # a restart's store still holds dead workers' addresses
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        store = dist.PrefixStore(f"group {next(GROUPS)}", store)  # nor may a second group find the first one's
        backend = "nccl" if device.type == "cuda" else "gloo"
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


# {process group: the gloo group of its processes}. One that has ended must not be kept: its threads could not end
ON_CPUS = weakref.WeakKeyDictionary()


def _group_on_cpus():
    """The gloo group of all processes: what it passes on need not wait for a GPU."""
    world = dist.group.WORLD
    if world not in ON_CPUS:
        ON_CPUS[world] = dist.new_group(backend="gloo")
    return ON_CPUS[world]


@contextlib.contextmanager
def signals_noted():
    """Inside, SIGTERM, SIGHUP and Ctrl-C (SIGINT) are noted, not obeyed. Yields `stopped`.

    stopped(here=False) -> True if any process has had a signal, or gives `here`, a reason of its own. All processes
    have to call it. Once it is True, it stays so. A second signal, three seconds or more after the first, acts at once,
    so that what hangs can be ended. A signal that is ignored stays so (SIGHUP under nohup). Outside the main thread,
    where Python handles no signals, none is noted.
    """
    noted, previous, decided = [], {}, False

    def note(number, _):
        if noted and time.monotonic() > noted[0] + 3:  # earlier, it is the same request: a scheduler's, and torchrun's
            signal.signal(number, previous[number])
            signal.raise_signal(number)
        noted.append(time.monotonic())

    def stopped(here=False):
        nonlocal decided
        if not decided:  # afterwards the others are not asked: one of them may have ended
            any_noted = torch.tensor(here or len(noted) > 0, dtype=torch.float)
            if dist.is_initialized():
                dist.all_reduce(any_noted, dist.ReduceOp.MAX, group=_group_on_cpus())
            decided = any_noted.item() > 0
        return decided

    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
        heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        previous |= {number: signal.signal(number, note) for number in heard}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# --------------------------------------------------------------------- 6. flags
# The command lines: types of flags, errors of one line, and how a recipe sets the defaults.

# What may differ between two calls of one run; an evaluation's, too
OPERATING = {
    *("out", "resume", "max_steps", "keep_every", "knn_every", "eval_every", "device", "amp", "compile", "changes"),
    *("grad_checkpoint", "workers", "tensorboard", "show_views", "data_dir", "no_cache"),
}

PATHS = {"checkpoint", "data_dir", "dump", "init", "label_files", "out", "resume", "show_views"}


def number(kind, least, most=10**9, word=None):
    """Return an argparse type: an int or a float from `least` to `most`, or a word, such as auto."""

    def parse_number(text):
        if text == word:
            return text
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least:g} to {most:g}")
        return value

    parse_number.__name__ = kind.__name__ if word is None else f"{word} or {kind.__name__}"  # argparse's word for it
    return parse_number


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that there are."""

    def _get_help_string(self, action):
        has_default = action.default not in (None, False, argparse.SUPPRESS)
        return super()._get_help_string(action) if has_default else action.help

    def _get_default_metavar_for_optional(self, action):
        return "X"


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are one line, as every other mistake's, without abbreviations.

    script: its file's name. doc: its docstring, whose first line says what it does; None under `python -OO`.
    """

    def __init__(self, script, doc, usage="[flags]", **options):
        description = (doc or "").partition("\n")[0]
        options |= dict(formatter_class=Help, allow_abbrev=False)
        super().__init__(script, f"python {script} {usage}", description, **options)

    def error(self, message):
        fail(f"{message} (see python {self.prog} --help)")

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0].replace("_", "-")
            close = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + "".join(f": did you mean {x}?" for x in close))
        return parsed


def evaluation_parser(script, doc):
    """Return the parser of an evaluation, with the flags that both have. doc: its first line says what it does."""
    parser = ArgumentParser(script, doc, usage="[RUN | FILE --arch NAME] [flags]")
    whole = number(int, 1)
    add = parser.add_argument_group("what is judged").add_argument
    add("checkpoint", nargs="?", metavar="RUN", help="a run's folder, last.pt, backbone.pt; or others' FILE")
    add("--encoder", choices=("query", "momentum"), help="default: the one that the method's authors evaluate")
    add("--random-init", action="store_true", help="judge the encoder of RUN as it was before training")
    add("--no-floors", action="store_true", help="leave out raw pixels and the untrained encoder")
    add = parser.add_argument_group("encoder, of a FILE of others").add_argument
    add("--arch", metavar="NAME", help="vit_tiny, resnet18, ..., or any timm model")
    add("--image-size", type=whole, metavar="N", help="side of the images (default: 224; own encoder: 32)")
    add("--patch-size", type=whole, metavar="N", help="of a ViT (default: as in its name, or 16)")
    add("--num-heads", type=whole, metavar="N", help="of a ViT (default: timm's number)")
    add("--norm", choices=NORMS, help="whose mean and standard deviation normalise the images (default: imagenet)")
    add("--prefix", metavar="P", help="which encoder of a FILE: the end of what stands before its names")
    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=DATASETS, help="default: what the encoder was trained on, or patterns")
    add("--data-dir", metavar="DIR", help="its folder (default: where the run had it)")
    add = parser.add_argument_group("operation").add_argument
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N", help="seed of what is drawn")
    workers = "loader processes (default: up to 12 for a GPU, else none)"
    add("--workers", type=number(int, 0, 1024), metavar="N", help=workers)
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU where there is one")
    add("--amp", choices=("auto", "bf16", "off"), default="auto", help="auto: bf16 on GPUs that have it")
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


def parse(parser, argv, recipe=None):
    """Return (args, typed): a namespace with every value, and the set of the names that the command line has.

    recipe(chosen) -> {name: value}, the defaults of these flags. `chosen` is a namespace of what is typed, where the
    rest has its default or is None. What is typed holds, also where it equals a default. args.changes: what a run's
    name says of the typed values. A path may begin with ~.
    """
    untyped = object()
    plain = vars(parser.parse_args([]))
    found = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(plain, untyped))))
    typed = {name: tuple(x) if isinstance(x, list) else x for name, x in found.items() if x not in (untyped, None)}
    typed |= {name: os.path.expanduser(typed[name]) for name in typed.keys() & PATHS}
    typed |= {name: os.path.abspath(typed[name]) for name in typed.keys() & {"data_dir", "init"}}  # to be read later
    values = recipe(argparse.Namespace(**plain | typed)) if recipe else {}
    if "patch_size" in values and (patch_size := named_patch(typed.get("arch"))):
        values = values | {"patch_size": patch_size}  # what timm's name of an encoder says comes before the recipe's
    if typed.pop("help", False):
        parser.set_defaults(**{name: shown(value) for name, value in values.items()})
        parser.print_help()
        raise SystemExit(0)
    args = argparse.Namespace(**plain | values | typed)
    vars(args).pop("help", None)
    of_every_run = OPERATING | {"dataset", "variant", "seed", "init", "init_prefix"}
    if recipe and (idle := typed.keys() - values.keys() - of_every_run):
        fail(f"{option(min(idle))} has no effect: the recipe of these choices has no such value")
    for action in parser._actions:
        pair = getattr(args, action.dest, None)
        if action.metavar == ("LO", "HI") and pair is not None and pair[0] > pair[1]:
            fail(f"{option(action.dest)} {shown(pair)}: give the smaller number first")
    if recipe and "data_dir" in typed and "dataset" not in typed:
        fail(f"--data-dir needs --dataset, which chooses the recipe and the normalisation: {', '.join(DATASETS[1:])}")
    if recipe:
        backbone_info(args.arch, args.image_size, args.patch_size)  # exits if there is no such encoder
    if "show_views" in typed:
        check_picture(args.show_views)
    if "tensorboard" in typed and importlib.util.find_spec("tensorboard") is None:
        fail("--tensorboard needs a package: pip install tensorboard")
    args.changes = describe_changes(args, typed.keys() - OPERATING - {"dataset", "seed", "arch"})
    return args, set(typed)


def describe_changes(args, names):
    """Return what a run's name says of the values of these names, for example "-lam2-num_keys4"."""
    values = {name: os.path.basename(shown(getattr(args, name))) for name in sorted(names)}  # --init's is a path
    changes = "".join(f"-{name}{value}" for name, value in values.items()).replace(" ", ",")
    if len(changes) > 120:
        changes = f"{changes[:100]}-{hashlib.sha256(changes.encode()).hexdigest()[:8]}"
    return "".join(c if c.isalnum() or c in "-_.," else "+" for c in changes)


def differences(old, new, names=None):
    """What a configuration changes in another, as a list of 'NAME was X, is Y'. names: None for all but OPERATING."""
    names = sorted(old.keys() | new.keys()) if names is None else names
    both = ((name, old.get(name), new.get(name)) for name in names if name not in OPERATING)
    return [f"{name.replace('_', '-')} was {shown(was)}, is {shown(now)}" for name, was, now in both if was != now]


def check_schedule(args):
    """Exit with an error message if batch size, warm-up or last rate of a training do not go together."""
    world = rank_and_world()[1]
    if args.batch_size % world or args.batch_size < 2 * world:  # batch norm needs two
        fail(f"--batch-size {args.batch_size} (global) cannot be shared out over {world} processes, two or more each")
    if args.warmup > args.epochs:
        fail(f"--warmup {args.warmup:g} is longer than the run, --epochs {args.epochs}")
    peak = args.lr * args.batch_size / args.lr_batch
    if args.min_lr > peak:
        fail(f"--min-lr {args.min_lr:g} is above the learning rate's peak, {peak:g}")


# --------------------------------------------------------------------- 7. files
# Files that are written whole or not at all, and read as data only.


# Names of files of a run that `write_whole` was writing when it was killed
UNFINISHED = re.compile(r"(.+\.pt|config\.json|metrics\.jsonl)\.\d+\.tmp")


def claim_folder(out):
    """Lock a run's folder for this process. Returns the open file that holds the lock until it is closed.

    All processes wait until the first one has it. What a process that was killed has left half written is removed.
    Exits with an error message if the folder has files that are not a run's, if another process has the lock, or if it
    cannot be written. Where the file system has no locks, none is taken.
    """
    folder = Path(out)
    found = sorted(p.name for p in folder.glob("*") if p.name != "lock" and not UNFINISHED.fullmatch(p.name))
    if found and "last.pt" not in found:
        fail(f"--out {out} is not empty ({', '.join(found[:3])}), and has no last.pt: give another")
    first = rank_and_world()[0] == 0
    try:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock" if first else os.devnull, "a")
    except OSError as error:  # for example, the file is another user's
        fail(f"cannot write {folder / 'lock'} ({error}): give another --out")
    if first:
        try:
            if fcntl is not None:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, forked workers do not inherit it
        except (BlockingIOError, PermissionError):
            fail(f"another run is at work in --out {folder}: wait for it, stop it, or give another --out")
        except OSError:
            pass  # a file system without locks
        for path in folder.glob("*.tmp"):
            if UNFINISHED.fullmatch(path.name):
                path.unlink()
    from_all(None)
    return lock


def write_whole(path, write):
    """Call write(temporary path), flush it to the disk and put it in place in one step: whole or not at all.

    An error of the disk is tried again, see `with_patience`. Exits with an error message if it stays.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")

    def attempt():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
        except RuntimeError as error:  # torch's writer turns an OSError into one
            raise OSError(errno.EIO, str(error)) from error
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)

    try:
        with_patience(attempt)
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f"; free on its disk: {shutil.disk_usage(path.parent).free / 2**20:.0f} MiB"  # torch may not say it
            temporary.unlink()
        fail(f"cannot write {path} ({error}{free}): nothing that was there is lost; the same command goes on from it")


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
NOT_CHECKPOINTS = (  # the first bytes of what is often taken for a checkpoint
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: `git lfs pull` fetches that"),
    (b"<", "a web page (HTML or XML), not a checkpoint: download the file itself"),
    ((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"\x28\xb5\x2f\xfd"), "a compressed archive: unpack it"),
    (b"PK", "damaged or cut off, or a zip archive of other files"),
    (b"", "damaged, cut off or empty, or no file of torch.save's nor of safetensors"),
)
PLAIN_FILE = (  # run by a user who trusts a file: all its tensors, without what else it holds
    "import torch; keep = lambda x: x if torch.is_tensor(x) else keep(x.state_dict()) if hasattr(x, 'state_dict') else "
    "{{name: keep(part) for name, part in x.items()}} if hasattr(x, 'items') else "
    "[keep(part) for part in x] if isinstance(x, (list, tuple)) else None; "
    "torch.save(keep(torch.load({path!r}, map_location='cpu', weights_only=False)), 'plain.pt')"
)


def load_checkpoint(path):
    """Return what is in a checkpoint, on the CPU: tensors and plain data only, never code.

    Exits with an error message that says what the file is, if it cannot be loaded so.
    """
    path = Path(path)
    if not (path.is_file() and os.access(path, os.R_OK)):
        fail(f"no checkpoint at {path} that can be read: give a run's folder or a file")
    try:
        if path.suffix == ".safetensors":
            return timm.models.load_state_dict(path)
        if zipfile.is_zipfile(path) and not is_intact(path):
            raise ValueError("some bytes are not those that were written")
        with torch.serialization.safe_globals(PLAIN_DATA):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file from elsewhere may raise anything, and torch's advice is to load it unsafely
        reason = str(error)
    with open(path, "rb") as file:
        start = file.read(64).lstrip()
    found = re.search(r"(?:GLOBAL |but got <class ')([\w.]+)|TorchScript", reason)
    if found is None or not start.startswith((b"PK", b"\x80")):
        fail(f"{path} is {next(kind for beginning, kind in NOT_CHECKPOINTS if start.startswith(beginning))}")
    what = f"more than tensors and plain data, or a whole pickled module ({found[1] or 'TorchScript'})"
    advice = "If you trust its authors, make a plain file of it where their code can be imported"
    fail(f"{path} holds {what}. {advice}: {PLAIN_FILE.format(path=str(path))}")


def load_state(path):
    """Return what a last.pt has, on the CPU. Exits with an error message if it is none."""
    state = load_checkpoint(path)
    if lacking := {"step", "records", "config", "images"} - (state.keys() if isinstance(state, dict) else set()):
        fail(f"{path} is not a last.pt of this version: it has no {min(lacking)}")
    return state


def load_run(args, images, resume=None):
    """Return (path, state) of a run that goes on: of last.pt in --out, else of `resume`. A new run has step 0.

    args: the configuration, which has to be the same, OPERATING flags apart. images: number and checksum, which have to
    be the same. resume: another run's folder or last.pt; only method, encoder and batch size have to be the same.
    A run that has made no step yet begins anew, perhaps with other flags. Exits with an error message if the run is
    another one, or if the processes have different flags, images or states.
    """
    last, path, state = Path(args.out, "last.pt"), None, {"step": 0, "records": []}
    if last.exists():
        path, state = last, load_state(last)
    if resume is not None and state["step"] == 0:
        path = Path(resume, "last.pt") if Path(resume).is_dir() else Path(resume)
        state = load_state(path)
    if state["step"] > 0:
        must_match = None if path == last else ("method", "arch", "batch_size")  # with these its steps count alike
        if different := "; ".join(differences(state["config"], vars(args), must_match)[:5]):
            fail(f"{path} is of another configuration ({different}): give another --out")
        if others := "; ".join(differences(state["images"], images)):
            fail(f"{path} is of other images ({others}): give another --out")
        say(f"going on from {path}, at step {state['step']}")
    elif path is not None:
        say(f"{path} has made no step: the run begins anew")
    marks = from_all((vars(args), images, state["step"]))
    if any(mark != marks[0] for mark in marks):
        fail("the processes differ in flags, images or checkpoint: --data-dir and --out must be on shared disks")
    return path, state


def read_config(folder):
    """Return the config.json of a run's folder; {} if there is none that can be read."""
    try:
        return {**json.loads((Path(folder) / "config.json").read_text())}
    except (OSError, ValueError, TypeError):
        return {}


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
