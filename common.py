"""Code that the methods and the evaluations share. Nothing here trains.

    1. data          open_data, load_dataset, ImageFiles, Views      5. processes  start, init_distributed, gather_rows
    2. augmentation  color_jitter, gaussian_blur, ..., of a batch    6. printing   log, Meter, log_epoch
    3. encoders      backbone_info, build_backbone, load_backbone    7. flags      parse_args
    4. evaluation    extract_features, knn_predict, embedding_health 8. runs       open_run, save_run

Images are RGB: PIL images in a dataset, uint8 (3, H, W) from `Views`, and floats in [0, 1] on the device until they are
normalized. An image without a label has the label -1.
"""

import argparse
import collections
import contextlib
import copy
import datetime
import functools
import hashlib
import json
import math
import os
import re
import socket
import sys
import textwrap
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import rgb_to_grayscale


class UsageError(ValueError):
    """A user's mistake in a data folder, a run's folder or a checkpoint. `start` prints it as one line."""


# ====================================================================== 1. data

DATASETS = ("patterns", "cifar10", "cifar100", "stl10", "imagenet100", "imagenet", "folder")
NORMS = {  # name: (mean, standard deviation)
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "patterns": ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
# The 100 classes of JCL's appendix D, with entries 75 and 88 corrected (a missing digit, two transposed ones).
IMAGENET100 = """
02869837 01749939 02488291 02107142 13037406 02091831 04517823 04589890 03062245 01773797 01735189 07831146 07753275
03085013 04485082 02105505 01983481 02788148 03530642 04435653 02086910 02859443 13040303 03594734 02085620 02099849
01558993 04493381 02109047 04111531 02877765 04429376 02009229 01978455 02106550 01820546 01692333 07714571 02974003
02114855 03785016 03764736 03775546 02087046 07836838 04099969 04592741 03891251 02701002 03379051 02259212 07715103
03947888 04026417 02326432 03637318 01980166 02113799 02086240 03903868 02483362 04127249 02089973 03017168 02093428
02804414 02396427 04418357 02172182 01729322 02113978 03787032 02089867 02119022 03777754 04238763 02231487 03032252
02138441 02104029 03837869 03494278 04136333 03794056 03492542 02018207 04067472 03930630 03584829 02123045 04229816
02100583 03642806 04336792 03259280 02116738 02108089 03424325 01855672 02090622"""
IMAGENET100 = sorted(f"n{number}" for number in IMAGENET100.split())

EXTENSIONS = {*torchvision.datasets.folder.IMG_EXTENSIONS, ".avif", ".gif", ".jfif"}  # of files that are read
SYSTEM_FOLDERS = "@eaDir @Recycle @Recently-Snapshot #recycle #snapshot $RECYCLE.BIN lost+found".split()


def to_rgb(image):
    """Convert a PIL image to RGB. Raises ValueError for other types, and for most images of over 8 bits per channel."""
    if not isinstance(image, Image.Image):
        raise ValueError(f"expected a PIL image, not {type(image).__name__}")
    tile = getattr(image, "tile", None)  # how an opened file will be decoded, for example from "RGB;16B"
    if image.mode.startswith(("I", "F")) or (tile and re.search(";16[BLN]", str(tile[0]))):  # Pillow loses bits
        raise ValueError("it has more than 8 bits per channel: convert it")
    return image if image.mode == "RGB" else image.convert("RGB")


def load_image(path):
    """Load an RGB PIL image, with its EXIF orientation applied. Raises an OSError that names the file."""
    try:
        with Image.open(path) as file:
            image = to_rgb(file).copy()  # decodes it
        with contextlib.suppress(Exception):  # damaged EXIF data
            ImageOps.exif_transpose(image, in_place=True)
        return image
    except Exception as error:  # Pillow raises many types
        raise OSError(f"cannot read the image {path}: {error} (tests/tools/check_images.py lists all)") from error


class ImageFiles(Dataset):
    """Image files with items (RGB PIL image, label), like torchvision's ImageFolder. names: relative to `root`."""

    def __init__(self, root, names, targets, classes):
        self.root, self.classes = os.fspath(root), classes
        # Loader workers share arrays. Lists would be copied into each worker
        self.names = np.array([os.fsencode(name) for name in names])
        self.targets = np.array(targets, np.int64)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return load_image(os.path.join(self.root, os.fsdecode(self.names[index]))), int(self.targets[index])

    @property
    def samples(self):
        """List of (path, label), as in torchvision.datasets.ImageFolder."""
        paths = [os.path.join(self.root, os.fsdecode(name)) for name in self.names]
        return list(zip(paths, self.targets.tolist(), strict=True))


class Subset(torch.utils.data.Subset):
    """torch.utils.data.Subset with the targets and classes of the dataset and, for image files, its samples."""

    def __init__(self, dataset, indices):
        super().__init__(dataset, indices)
        self.targets, self.classes = labels_of(dataset)[indices], getattr(dataset, "classes", ())

    @property
    def samples(self):
        samples = self.dataset.samples
        return [samples[i] for i in self.indices]


def labels_of(dataset):
    """Return the `targets` of a dataset as an array (n,) int64, all -1 if the dataset has no `targets`."""
    targets = np.asarray(getattr(dataset, "targets", np.full(len(dataset), -1)))
    are_integers = targets.dtype.kind in "biuf" and (targets == targets.astype(np.int64)).all()  # b, i, u, f: numbers
    if targets.shape != (len(dataset),) or not are_integers:
        what = f"the targets of {len(dataset)} images have the shape {targets.shape} and the type {targets.dtype}"
        raise UsageError(f"{what}: expected one integer per image")
    return targets.astype(np.int64)


def with_labels(dataset):
    """Return the subset of the images that have a label."""
    rows = np.flatnonzero(labels_of(dataset) >= 0)
    return dataset if len(rows) == len(dataset) else Subset(dataset, rows.tolist())


def describe(dataset):
    """Return the numbers of images and classes as text."""
    unlabeled = ", without labels" if labels_of(dataset).max(initial=-1) < 0 else ""
    return f"{len(dataset)} images of {len(getattr(dataset, 'classes', ())) or 'no'} classes{unlabeled}"


def fingerprint(dataset):
    """Return the numbers of images and classes, and a hash of labels and relative file names, but not of pixels."""
    digest = hashlib.sha256(f"{len(dataset)} images".encode())
    digest.update(labels_of(dataset).tobytes())
    if isinstance(dataset, ImageFiles):
        digest.update(b"\0".join(dataset.names.tolist()))
    elif isinstance(dataset, torch.utils.data.Subset):
        digest.update(np.asarray(dataset.indices, np.int64).tobytes() + fingerprint(dataset.dataset).encode())
    elif isinstance(dataset, torchvision.datasets.DatasetFolder):  # for example an ImageFolder
        names = [os.path.relpath(path, dataset.root) for path, _ in dataset.samples]
        digest.update(os.fsencode("\0".join(names)))
    return f"{describe(dataset)}, {digest.hexdigest()[:16]}"


def visible_entries(folder):
    """Return the sorted entries of a folder, without hidden files and system folders, such as .DS_Store and @eaDir."""
    entries = [e for e in os.scandir(folder) if not e.name.startswith(".") and e.name not in SYSTEM_FOLDERS]
    return sorted(entries, key=lambda entry: entry.name)


def list_files(folder, parents=()):
    """Yield the sorted paths of the non-hidden files below a folder. parents: real paths of the folders above it."""
    parents = {*parents, os.path.realpath(folder)}
    for entry in visible_entries(folder):
        if entry.is_file():
            yield entry.path
        elif entry.is_dir():
            if os.path.realpath(entry.path) in parents:
                raise UsageError(f"{entry.path} is a link to a folder that contains it: remove the link")
            yield from list_files(entry.path, parents)
        elif entry.is_symlink():
            raise UsageError(f"{entry.path} is a broken link: mount its disk, or remove the link")


def list_images(root, folder=""):
    """Return the file names, relative to `root`, of the images below root/folder. Log the number of other files."""
    prefix, folder = os.path.join(root, ""), os.path.join(root, folder)
    files = [(path.removeprefix(prefix), os.path.splitext(path)[1].lower()) for path in list_files(folder)]
    names = [name for name, suffix in files if suffix in EXTENSIONS]
    if not names:
        raise UsageError(f"no images in {folder}")
    skipped = collections.Counter(suffix or "without an extension" for _, suffix in files if suffix not in EXTENSIONS)
    if skipped:
        log(f"skipped files in {folder}: {', '.join(f'{count} {suffix}' for suffix, count in skipped.items())}")
    return names


def load_dataset(name, root=None, train=True, image_size=32):
    """Load the training or the test images of a dataset, with items (PIL image, label), `targets` and `classes`.

    name: one of DATASETS. root: a folder with train/, and val/, validation/ or test/, each with one folder per class.
    "folder" also takes any tree of images, without labels. CIFAR and STL-10 also take torchvision's download folder,
    data/ by default. The training images include those of root/unlabeled/, or STL-10's unlabeled ones. image_size: that
    of "patterns". Returns None if there are no test images. Raises UsageError for other layouts.
    """
    if name == "patterns":
        if root is not None:
            raise UsageError(f"--data-dir needs --dataset, which chooses the recipe: {', '.join(DATASETS[1:])}")
        return Patterns(4096, image_size, seed=0) if train else Patterns(1024, image_size, seed=1)
    try:
        entries = [entry.name for entry in visible_entries(root)] if root is not None else []
        if "train" in entries:
            parts = ("train",) if train else ("val", "validation", "test")
            part = next((part for part in parts if part in entries), None)
            return None if part is None else load_split(name, root, part)
        if name in ("cifar10", "cifar100", "stl10"):
            return load_torchvision(name, root or "data", entries, train)
        if root is None:
            raise UsageError(f"--dataset {name} needs --data-dir, with train/, and val/ or test/ (folder: any images)")
        if name != "folder":
            raise UsageError(f"no train/ in --data-dir {root}; --dataset folder takes any folder of images")
        usual = ("train", "training", "val", "validation", "test", "testing")
        if found := sorted(entry for entry in entries if entry.lower() in usual):
            raise UsageError(f"expected train/ in --data-dir {root}, which has {', '.join(found)}/")
        if not train:
            return None
        names = list_images(root)
    except (OSError, RuntimeError) as error:  # torchvision raises RuntimeErrors
        raise UsageError(f"cannot load --dataset {name} from {root or 'data/'}: {error}") from error
    log(f"{root} has no train/, so its {len(names)} images are read without labels")
    return ImageFiles(root, names, [-1] * len(names), [])


def load_split(name, root, part):
    """Load root/PART and, if that is train/, root/unlabeled/. See `load_dataset`."""
    entries = {entry.name for entry in visible_entries(root)}
    for other in entries - {"train", "val", "validation", "test", "unlabeled"}:
        with contextlib.suppress(OSError):  # a file, or a folder that cannot be read
            files = os.listdir(os.path.join(root, other))
            if any(os.path.splitext(file)[1].lower() in EXTENSIONS for file in files):
                raise UsageError(f"{root} has images in {other}/ next to train/, which would not be read")
    names = list_images(root, part)
    found = {file.split(os.sep)[1] for file in names}  # CLASS in PART/CLASS/FILE, or FILE in PART/FILE
    classes = [entry.name for entry in visible_entries(os.path.join(root, part)) if entry.is_dir()]
    if classes and (wrong := sorted(found ^ {*classes})):
        raise UsageError(f"{root}/{part}/{wrong[0]} is a class folder without images, or an image in no class folder")
    if name == "imagenet100" and classes:
        if missing := sorted({*IMAGENET100} - {*classes}):
            raise UsageError(f"{root}/{part} has no {missing[0]} of ImageNet-100; for others, pass --dataset imagenet")
        classes = IMAGENET100
        names = [file for file in names if file.split(os.sep)[1] in classes]
    label = {folder: i for i, folder in enumerate(classes)}
    targets = [label.get(file.split(os.sep)[1], -1) for file in names]
    if part == "train" and "unlabeled" in entries:
        names += list_images(root, "unlabeled")
        targets += [-1] * (len(names) - len(targets))
    return ImageFiles(root, names, targets, classes)


def load_torchvision(name, root, entries, train):
    """Load torchvision's CIFAR10, CIFAR100 or STL10, which one process per node downloads. See `load_dataset`."""
    if entries and not any(entry.startswith(("cifar", "stl10")) for entry in entries):
        raise UsageError(f"--data-dir {root} has no train/ and no files of {name}; to download, pass an empty folder")
    which = dict(split="train+unlabeled" if train else "test") if name == "stl10" else dict(train=train)
    dataset = getattr(torchvision.datasets, name.upper())
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the first process of each node
        try:
            dataset(root, **which)
        except RuntimeError:  # torchvision's, if files are missing
            import fcntl  # not on Windows

            os.makedirs(root, exist_ok=True)
            with open(os.path.join(root, ".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # wait while another run downloads
                dataset(root, download=True, **which)
    if dist.is_initialized():
        dist.barrier()
    images = dataset(root, **which)
    if name == "stl10":
        images.targets = images.labels
    return images


def open_data(name, root=None, image_size=32, train=None, test=None):
    """Load the images of a run: (training images, test images for the kNN monitor, or None).

    name, root, image_size: see `load_dataset`. train, test: datasets to use instead. If only `train` is given, there
    are no test images. There is no kNN monitor unless both have labels of the same classes. Raises UsageError if the
    processes have different test images.
    """
    if train is None:
        train = load_dataset(name, root, True, image_size)
        test = load_dataset(name, root, False, image_size) if test is None else test
    require_equal("their test images", fingerprint(test or []))
    problem = "there are no test images" if test is None else class_mismatch(train, test)
    if problem:
        log(f"no kNN during training: {problem}")
    return train, (None if problem else test)


def class_mismatch(train, test):
    """Return "" if both datasets have labels of the same classes, two or more, in the same order; else what differs."""
    one, two = ([*getattr(images, "classes", ())] for images in (train, test))
    highest = [labels_of(images).max(initial=-1) for images in (train, test)]  # -1: no image has a label
    if min(highest) >= 0 and len(one) > 1 and one == two:
        fit = max(highest) < len(one)
        return "" if fit else f"labels of {len(one)} classes must be below {len(one)}, but one is {max(highest)}"
    differ = ascii(sorted({*map(str, one)} ^ {*map(str, two)})[:3])  # ascii: letters that look alike may differ
    what = f"train: {describe(train)}; test: {describe(test)}; classes that are not in both: {differ}"
    return f"training and test images need labels of the same classes, at least two, in the same order ({what})"


PATTERNS = {  # ten classes; u, v: rotated coordinates; r, t: radius and angle around a point; all in radians
    "stripes": lambda u, v, r, t: np.tanh(np.sin(u) / 0.15),
    "checks": lambda u, v, r, t: np.tanh(np.sin(u) / 0.15) * np.tanh(np.sin(v) / 0.15),
    "dots": lambda u, v, r, t: np.tanh((np.cos(u) + np.cos(v) - 0.7) / 0.2),
    "rings": lambda u, v, r, t: np.tanh(np.sin(r) / 0.15),
    "grid": lambda u, v, r, t: np.tanh((np.maximum(np.cos(u), np.cos(v)) - 0.8) / 0.1),
    "waves": lambda u, v, r, t: np.tanh(np.sin(u + 1.8 * np.sin(v)) / 0.15),
    "triangles": lambda u, v, r, t: np.tanh(((u / (2 * np.pi)) % 1 + (v / (2 * np.pi)) % 1 - 1) / 0.1),
    "crosses": lambda u, v, r, t: (
        np.tanh((np.minimum(abs(np.sin(u / 2)), abs(np.sin(v / 2))) - 0.3) / 0.1)
        * np.tanh((np.maximum(abs(np.sin(u / 2)), abs(np.sin(v / 2))) - 0.8) / 0.1)
    ),
    "spokes": lambda u, v, r, t: np.tanh(np.sin(t) / 0.15),
    "bricks": lambda u, v, r, t: np.tanh(
        (np.maximum(np.cos(u), 2 * np.cos((v + np.pi * (np.cos(u / 2) > 0)) / 2) ** 8 - 1) - 0.75) / 0.1
    ),
}


def draw_patterns(pattern, n, size, rng):
    """Draw n images of a class of PATTERNS: (n, size, size, 3) uint8. rng: numpy's random generator."""
    x0 = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
    y0 = x0[:, None]
    angle, p1, p2, w1, w2, w3, w4, light = 2 * np.pi * rng.random((8, n, 1, 1), np.float32)
    scale, offset = rng.random((2, n, 1, 1), np.float32)
    x = x0 + 0.12 * np.sin(5 * (np.cos(w1) * x0 + np.sin(w1) * y0) + w2)  # warped
    y = y0 + 0.12 * np.sin(5 * (np.cos(w3) * x0 + np.sin(w3) * y0) + w4)
    cycles = 1.8 * 2 ** (0.7 * scale)
    u = 2 * np.pi * cycles * (np.cos(angle) * x + np.sin(angle) * y) + p1
    v = 2 * np.pi * cycles * (np.cos(angle) * y - np.sin(angle) * x) + p2
    dx, dy = x - offset / 2 * np.cos(p1), y - offset / 2 * np.sin(p1)
    r, t = 2 * np.pi * cycles * np.hypot(dx, dy) + p2, np.round(1.6 * cycles) * np.arctan2(dy, dx) + p2
    value = pattern(u, v, r, t)[..., None]
    value -= value.mean((1, 2, 3), keepdims=True)  # no class is brighter than another
    value *= rng.choice(np.float32([-1, 1]), (n, 1, 1, 1))
    shade = 0.3 * rng.standard_normal((n, 1, 1), np.float32) * (np.cos(light) * x0 + np.sin(light) * y0)
    colors = 0.5 + 0.03 * rng.standard_normal((2, n, 1, 1, 3), np.float32)
    contrast = rng.uniform(0.1, 0.28, (n, 1, 1, 1)).astype(np.float32)
    images = colors.mean(0) + shade[..., None] + value * ((colors[0] - colors[1]) / 4 + contrast)
    images += 0.03 * rng.standard_normal(images.shape, np.float32)
    return (images.clip(0, 1) * 255 + 0.5).astype(np.uint8)


class Patterns(Dataset):
    """Synthetic images of ten classes. Neither color nor single pixels reveal the class: shapes have to be learned."""

    classes = list(PATTERNS)

    def __init__(self, count, size, seed):
        rng = np.random.default_rng(seed)
        self.targets = rng.permutation(np.arange(count) % len(PATTERNS))
        self.images = np.empty((count, size, size, 3), np.uint8)
        for label, pattern in enumerate(PATTERNS.values()):
            rows = np.flatnonzero(self.targets == label)
            self.images[rows] = draw_patterns(pattern, len(rows), size, rng)
        self.pictures = [Image.fromarray(image) for image in self.images]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.pictures[index], int(self.targets[index])


class Views(Dataset):
    """Views of the images of a dataset, with items ([uint8 (3, H, W), ...], index).

    images: a dataset with items (PIL image, ...). transforms: functions, RGB PIL image -> PIL image or list of them.
    """

    def __init__(self, images, transforms):
        self.images, self.transforms = images, transforms

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = to_rgb(self.images[index][0])  # first, as Pillow resizes images with a palette or alpha differently
        views = []
        for transform in self.transforms:
            view = transform(image)
            views += view if isinstance(view, list) else [view]
        return [to_tensor(view) for view in views], index


def to_tensor(image):
    """Convert an RGB PIL image to a uint8 tensor (3, H, W), like torchvision's pil_to_tensor, in half the time."""
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


def loader_options(workers, device):
    """Return the DataLoader arguments that depend on the machine, {name: value}."""
    # Forked workers share the dataset. Python 3.14's default would copy it into each
    context = "fork" if workers and sys.platform == "linux" else None
    return dict(num_workers=workers, multiprocessing_context=context, pin_memory=device.type == "cuda")


def split_batch(batch_size, num_images, world, parts=1, flag="--batch-size", smallest=2):
    """Return the number of equal parts, at least one, into which each process splits its rows of a batch.

    parts: number of parts of the global batch, as given by `flag`. Raises UsageError if there are fewer images than in
    a batch, or if the batch cannot be split over the processes into equal parts of at least `smallest` images.
    """
    if batch_size > num_images:
        raise UsageError(f"--batch-size {batch_size} is larger than the training set of {num_images} images: reduce it")
    total = max(parts, world)
    if total % world:
        raise UsageError(f"{flag} {parts} cannot be split over {world} processes: pass a multiple of {world}")
    if batch_size % total or batch_size < smallest * total:
        what = f"--batch-size {batch_size} cannot be split into {total} equal parts of {smallest} images or more"
        why = f"{flag} {parts}, {world} processes" if parts > 1 else f"{world} processes"
        raise UsageError(f"{what} ({why}): pass a multiple of {total}, at least {smallest * total}")
    return total // world


def queue_length(length, batch_size, num_images):
    """Return the length of a queue: `length` or, if None, a tenth of the images, from a batch up to 65,536.

    Log a warning if it is more than a quarter of the images.
    """
    length = length or min(65536, max(batch_size, num_images // 10))
    if length > num_images / 4:
        log(f"warning: a queue of {length} for {num_images} images can hold the query's own image: reduce --queue")
    return length


# ============================================================== 2. augmentation
# These functions take a batch of float32 images in [0, 1], (n, 3, H, W), on any device, and do not change it in place.
# They do what torchvision's ColorJitter, RandomGrayscale, RandomSolarize, RandomHorizontalFlip and GaussianBlur do, but
# draw random numbers for each image. They draw on the CPU, so that the CPU need not wait for the GPU. Call them outside
# autocast, which would blur in half precision.


def color_jitter(x, brightness, contrast, saturation, hue, p=1.0):
    """Jitter the colors of each float image in [0, 1], (n, 3, H, W), with probability p.

    Brightness, contrast and saturation are multiplied by a factor from [max(0, 1 - v), 1 + v], where v is the argument.
    The hue is rotated by up to `hue` turns, 0.5 or less, in both directions. The four are applied in random order,
    which is drawn per batch, as in kornia; torchvision draws it per image. Copy it with the four functions below.
    """
    rows = (torch.rand(len(x)) < p).nonzero().flatten()
    operations = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    ranges = [(max(0, 1 - v), 1 + v) for v in (brightness, contrast, saturation)] + [(-hue, hue)]
    factors = torch.stack([torch.empty(len(rows), 1, 1, 1).uniform_(low, high) for low, high in ranges])
    rows, factors = rows.to(x.device, non_blocking=True), factors.to(x.device, x.dtype, non_blocking=True)
    y = x[rows]
    for i in torch.randperm(len(operations)).tolist():
        y = operations[i](y, factors[i])
    return x.index_copy(0, rows, y)


def adjust_brightness(x, factor):
    return (x * factor).clamp_(0, 1)


def adjust_contrast(x, factor):
    return torch.lerp(rgb_to_grayscale(x).mean((1, 2, 3), keepdim=True), x, factor).clamp_(0, 1)


def adjust_saturation(x, factor):
    return torch.lerp(rgb_to_grayscale(x), x, factor).clamp_(0, 1)


def adjust_hue(x, factor):
    """Rotate the hue of each image by its factor, in turns from -0.5 to 0.5. Value and saturation do not change."""
    r, g, b = x.split(1, dim=1)
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    sixths = torch.where(value == g, 2 * chroma + b - r, 4 * chroma + r - g)  # still times chroma
    smallest = max(1e-8, torch.finfo(x.dtype).tiny)  # 1e-8 is 0 in float16
    sixths = torch.where(value == r, g - b, sixths) / chroma.clamp_min(smallest)
    # A channel is value - chroma * clamp(min(k, 4 - k), 0, 1), where k = (offset + sixths + 6 * factor) mod 6
    offsets = torch.tensor([5.0, 3.0, 1.0], dtype=x.dtype).view(1, 3, 1, 1) + 6  # + 6: non-negative
    k = (sixths / 6 + factor + (offsets / 6).to(x.device, non_blocking=True)).frac_().mul_(6)
    return value - chroma * torch.minimum(k, 4 - k).clamp_(0, 1)


def grayscale(x, p):
    """Convert each image to gray with probability p."""
    rows = (torch.rand(len(x)) < p).nonzero().flatten().to(x.device, non_blocking=True)
    return x.index_copy(0, rows, rgb_to_grayscale(x[rows], 3))


def solarize(x, p):
    """Invert the values at or above 0.5 in each image, with probability p."""
    chosen = (torch.rand(len(x), 1, 1, 1) < p).to(x.device, non_blocking=True)
    return torch.where(chosen & (x >= 0.5), 1 - x, x)


def horizontal_flip(x, p=0.5):
    """Flip each image with probability p."""
    chosen = (torch.rand(len(x), 1, 1, 1) < p).to(x.device, non_blocking=True)
    return torch.where(chosen, x.flip(-1), x)


def gaussian_blur(x, sigma, p=1.0):
    """Blur each image (n, C, H, W) with probability p by a Gaussian kernel, truncated at 4 times the largest sigma.

    sigma: in pixels, above 0; a range (low, high) to draw it from, or a tensor (n,) on the CPU. p: a number, or such a
    tensor; an image whose p is 0 needs no sigma. Borders are mirrored.
    """
    rows = (torch.rand(len(x)) < p).nonzero().flatten()
    if len(rows) == 0:
        return x
    sigma = sigma if torch.is_tensor(sigma) else torch.empty(len(x)).uniform_(*sigma)
    radius = min(math.ceil(4 * sigma[rows].max()), x.shape[2] - 1, x.shape[3] - 1)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sigma[rows, None]) ** 2)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(x.shape[1], 0)  # one row per image and channel
    kernel, rows = kernel.to(x.device, x.dtype, non_blocking=True), rows.to(x.device, non_blocking=True)
    y = F.pad(x[rows].flatten(0, 1)[None], (radius,) * 4, mode="reflect")
    y = F.conv2d(y, kernel[:, None, :, None], groups=len(kernel))
    y = F.conv2d(y, kernel[:, None, None, :], groups=len(kernel))
    return x.index_copy(0, rows, y.view(len(rows), *x.shape[1:]).to(x.dtype))


def normalize(x, mean, std):
    """Subtract the mean and divide by the standard deviation, three numbers each."""
    mean, std = torch.tensor([mean, std], dtype=x.dtype).view(2, 3, 1, 1).to(x.device, non_blocking=True)
    return (x - mean) / std  # torchvision's synchronizes with the host


def save_views(path, views, names, norm):
    """Write a picture with a row of twelve images per view. views: list of (n, 3, H, W), normalized by `norm`."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in NORMS[norm])
    side = max(96, *(view.shape[-1] for view in views))
    rows = [F.interpolate(view[:12].float().cpu() * std + mean, side) for view in views]
    grid = torchvision.utils.make_grid(torch.cat(rows), nrow=len(rows[0]), pad_value=1.0)
    write_file(path, lambda file: torchvision.utils.save_image(grid, file, "PNG"))
    log(f"{path}: the rows are {', '.join(names)}")


# ================================================================== 3. encoders

MINI = dict(layers=(1, 1, 1, 1), channels=(16, 32, 64, 128))
ARCHS = {  # our name: (timm's name, arguments of timm.create_model)
    "vit_micro": ("vit_tiny_patch16_224", dict(embed_dim=64, depth=3, num_heads=2)),
    "vit_tiny": ("vit_tiny_patch16_224", {}),
    "vit_small": ("vit_small_patch16_224", {}),
    "vit_base": ("vit_base_patch16_224", {}),
    "resnet_micro": ("resnet18", dict(MINI, stem_type="deep", stem_width=8)),
    "resnet_mini": ("resnet18", MINI),
}


def is_from(name, *modules):
    """Whether a model is from one of these modules of timm, and not from a user's own file of the same name."""
    found = timm.models.is_model_in_modules(name, modules)
    return found and timm.models.model_entrypoint(name).__module__.startswith("timm.")


def is_vit(arch):
    """Whether an architecture is one of timm's plain ViTs, which take images and patches of any size."""
    return is_from(ARCHS.get(arch, (arch,))[0], "vision_transformer", "deit")


def backbone_info(arch, image_size, patch_size=16, norm="imagenet", interpolation="bilinear", **kwargs):
    """Return the metadata to rebuild an encoder, as stored in backbone.pt: timm's arguments, and its image format.

    arch: a name in ARCHS, or any timm model. norm: a name in NORMS. kwargs: further arguments of timm.create_model,
    such as num_heads. Plain ResNets have a 3 x 3 stem for images of up to 64 px (with stride 2 in resnet_mini), except
    for resnet_micro. Raises UsageError if timm does not have the model, or if the patches do not fit.
    """
    name, arguments = ARCHS.get(arch, (arch, {}))
    if not timm.is_model(name):
        raise UsageError(f"unknown --arch {arch}: choose {', '.join(ARCHS)}, or a timm model such as resnet50")
    if arch in ARCHS and timm.is_model(arch):
        raise UsageError(f"--arch {arch} is a name of this project: register your own encoder under another name")
    kwargs, stem = arguments | kwargs | dict(num_classes=0), "timm"
    if is_vit(arch):
        fixed = re.search(r"patch(\d+)", arch)
        if image_size % patch_size or (fixed and int(fixed[1]) != patch_size):
            raise UsageError(f"--patch-size {patch_size} does not fit --arch {arch} and images of {image_size} px")
        kwargs |= dict(img_size=image_size, patch_size=patch_size, dynamic_img_size=True, weight_init="moco")
    elif is_from(name, "resnet"):
        kwargs |= dict(zero_init_last=False)  # initialize residual branches as torchvision and MoCo do
        is_plain = name.split(".")[0].removeprefix("resnet").isdigit() and arch != "resnet_micro"  # not resnet26d
        if is_plain and image_size <= 64:
            stem = "3x3-s2" if arch == "resnet_mini" else "3x3"
    mean, std = NORMS[norm]
    images = dict(image_size=image_size, mean=mean, std=std, interpolation=interpolation)
    return dict(timm_name=name, create_kwargs=kwargs, stem=stem, arch=arch) | images


def build_backbone(info, zero_init=False, **kwargs):
    """Build the untrained timm model that `info` describes, without a classifier: (N, 3, H, W) -> (N, width).

    The patch embedding of ViTs is initialized as in MoCo v3. zero_init: initialize the residual branches of ResNets at
    zero, as in MoCo v3 and SimSiam. kwargs: further arguments of timm.create_model.
    """
    try:
        backbone = timm.create_model(info["timm_name"], **info["create_kwargs"], **kwargs)
    except (AssertionError, RuntimeError, TypeError) as error:  # for example, a ResNet has no --num-heads
        raise UsageError(f"--arch {info['arch']}: {error}") from error
    if info["stem"] != "timm":  # no 7 x 7 convolution and no max-pooling, as is usual on CIFAR
        stride = 2 if info["stem"] == "3x3-s2" else 1
        backbone.conv1 = nn.Conv2d(3, backbone.conv1.out_channels, 3, stride, padding=1, bias=False)
        backbone.maxpool = nn.Identity()
    if info["create_kwargs"].get("weight_init") == "moco":  # timm initializes the other layers
        nn.init.xavier_uniform_(backbone.patch_embed.proj.weight.flatten(1))
        if backbone.patch_embed.proj.bias is not None:  # CLIP's has none
            nn.init.zeros_(backbone.patch_embed.proj.bias)
    if zero_init:
        for block in backbone.modules():
            if hasattr(block, "zero_init_last"):
                block.zero_init_last()
    return backbone


@torch.no_grad()
def feature_width(backbone, *sizes):
    """Return the width of an encoder's features. Raises UsageError unless images of all sizes give (n, width)."""
    backbone, width = copy.deepcopy(backbone).eval(), None
    for size in sizes:
        try:
            shape = backbone(torch.zeros(1, 3, size, size)).shape
        except Exception as error:  # each encoder raises its own
            reason = (str(error) or repr(error)).splitlines()[0]
            raise UsageError(f"the encoder fails on images of {size} px: {reason}") from error
        if len(shape) != 2 or width not in (None, shape[1]):
            raise UsageError(f"the encoder maps images of {size} px to {[*shape]}, not (n, {width or 'width'})")
        width = shape[1]
    return width


def load_checkpoint(path):
    """Load a checkpoint of tensors and plain data onto the CPU. Raises UsageError if that fails."""
    try:
        with open(path, "rb") as file:
            first_bytes = file.read(40)  # they reveal an HTML page, a Git LFS pointer or an empty file
        if str(path).endswith(".safetensors"):
            return timm.models.load_state_dict(path)
        if zipfile.is_zipfile(path):  # torch notices neither a wrong checksum nor an entry marked as a folder
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() or any(entry.external_attr & 16 for entry in archive.infolist()):
                    raise zipfile.BadZipFile
        with torch.serialization.safe_globals([argparse.Namespace]):  # MoCo v3, MAE and DINO save their args
            return dict(torch.load(path, map_location="cpu", weights_only=True))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # damaged files raise many types
        reason = f"it is truncated, damaged, or not a saved state_dict; it begins with {first_bytes!r}"
        if found := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            reason = f"it holds objects of {found[1]}, which would run code: save only its state_dict"
        raise UsageError(f"cannot load {path} as a checkpoint: {reason}") from error


def load_backbone(path, encoder=None):
    """Load a pre-trained encoder of this project: (module in evaluation mode, info).

    path: a run's folder, last.pt or backbone.pt. encoder: "query" or "momentum", which is read from last.pt; if None,
    that of backbone.pt. info: see `backbone_info`. Raises UsageError if there is no such encoder.
    """
    path = Path(path, "last.pt" if encoder else "backbone.pt") if os.path.isdir(path) else Path(path)
    saved = load_checkpoint(path)
    info = saved.get("backbone") or saved  # of last.pt, which has both encoders; backbone.pt has one
    if "timm_name" not in info:
        raise UsageError(f"{path} has no encoder of this project; for third-party weights pass --arch")
    if encoder and "backbone" in saved and info["encoder"] != "fine-tuned":  # whose last.pt has one encoder
        info["encoder"] = encoder
    weights = info.pop("state_dict", None) or encoder_weights(saved.get("model", {}), info["encoder"])
    if encoder not in (None, info["encoder"]) or not weights:
        raise UsageError(f"{path} does not hold the {encoder or info['encoder']} encoder")
    info["data_dir"] = saved_data_dir(path.parent)  # backbone.pt has no paths
    if not timm.is_model(info["timm_name"]):
        raise UsageError(f"{path}: {info['timm_name']} is not registered: call eval_knn.main where you register it")
    backbone = build_backbone(info)
    backbone.load_state_dict(weights)
    return backbone.eval(), info


def encoder_weights(model_state, encoder):
    """Return the momentum encoder's weights if encoder is "momentum", else the query encoder's, from a state_dict."""
    prefix = "momentum_backbone." if encoder == "momentum" else "backbone."
    return {k.removeprefix(prefix): x.cpu().contiguous() for k, x in model_state.items() if k.startswith(prefix)}


# What a third-party checkpoint may hold besides the encoder; the last two are MAE's
HEADS = ("fc", "head", "classifier", "projector", "projection_head", "predictor", "prototypes", "mask_token", "decoder")


def tensors_by_name(state, name=""):
    """Return the tensors of nested dictionaries, {"outer.inner": tensor}."""
    if torch.is_tensor(state):
        return {name: state}
    items = state.items() if isinstance(state, dict) else ()
    return {k: x for key, value in items for k, x in tensors_by_name(value, f"{name}.{key}".lstrip(".")).items()}


def load_weights(encoder, path, prefix=""):
    """Load the weights of a checkpoint into an encoder, strictly.

    prefix: prefix of the encoder's keys in the state_dict, for example "module.encoder_q." in MoCo's. The position
    embedding of a ViT is resampled. Raises UsageError unless the file has every tensor of the encoder in the same
    shape, all finite, and no other tensors with the prefix except those of heads.
    """
    saved = load_checkpoint(path)
    usual, all_tensors = tensors_by_name(saved.get("state_dict", saved.get("model"))), tensors_by_name(saved)
    with_prefix = (tensors for tensors in (usual, all_tensors) if any(name.startswith(prefix) for name in tensors))
    found = next(with_prefix, usual or all_tensors)  # if none has it, those that the error will show
    expected = encoder.state_dict()
    weights = {name.removeprefix(prefix): x for name, x in found.items() if name.startswith(prefix)}
    weights = {name: x for name, x in weights.items() if name in expected or not name.startswith(HEADS)}
    if hasattr(encoder, "no_embed_class") and "pos_embed" in weights:
        tokens = 0 if encoder.no_embed_class else encoder.num_prefix_tokens
        with contextlib.suppress(RuntimeError):  # it has other tokens, which the next call reports
            given, size = weights["pos_embed"], encoder.patch_embed.grid_size
            weights["pos_embed"] = timm.layers.resample_abs_pos_embed(given, size, num_prefix_tokens=tokens)
    try:
        encoder.load_state_dict(weights)  # it adds num_batches_tracked, which files of 2018 do not have
    except RuntimeError as error:
        what = "; ".join(line.strip()[:100] for line in str(error).splitlines()[1:4])
        names = [name for name, _ in encoder.named_parameters()]
        prefixes = {name.removesuffix(names[0]) for name in found if name.endswith(names[0])}
        prefixes = sorted(repr(other) for other in prefixes - {prefix} if other + names[-1] in found)
        has = f"it has encoders with the prefixes {', '.join(prefixes)}" if prefixes else f"it has {[*found][:3]}"
        if "size mismatch for conv1.weight" in str(error):
            has += "; ResNets have a 3 x 3 stem for images of up to 64 px (--image-size)"
        raise UsageError(f"{path} with the prefix {prefix!r} does not fit the encoder: {what}; {has}") from error
    if not all(x.isfinite().all() for x in encoder.state_dict().values()):
        raise UsageError(f"{path} has weights that are not finite")


# ================================================================ 4. evaluation


def center_crop(image, size, interpolation="bilinear"):
    """Resize the shorter side of a PIL image to 256/224 of `size` and crop its center; keep it if it is size x size."""
    if image.size == (size, size):
        return image
    image = v2.functional.resize(image, [size * 256 // 224], v2.InterpolationMode(interpolation))
    return v2.functional.center_crop(image, [size])


@torch.no_grad()
@torch.random.fork_rng(devices=[])  # the loader would advance the caller's random numbers
def extract_features(encoder, images, info, device, batch_size=256, workers=0, amp=False):
    """Compute the features of this process's images (see `local_rows`): (n, width) float32 on the CPU.

    encoder: (N, 3, H, W) -> (N, width). A copy of it is used, in evaluation mode and not compiled. info: see
    `backbone_info`. batch_size: per process. amp: encode in bf16. Raises UsageError if a feature of any process is not
    finite. To get the features of all images, call `gather_rows` on the result.
    """
    rows = local_rows(torch.arange(len(images))).tolist()
    crop = functools.partial(center_crop, size=info["image_size"], interpolation=info["interpolation"])
    crops = torch.utils.data.Subset(Views(images, [crop]), rows or [0])  # without rows, one image gives the width
    loader = DataLoader(crops, batch_size, **loader_options(workers, device))
    features, encoder = None, copy.deepcopy(encoder).eval()
    for i, ((batch,), _) in enumerate(loader):
        x = normalize(batch.to(device, non_blocking=True) / 255, info["mean"], info["std"])
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            part = encoder(x).float().cpu()
        features = part.new_empty(len(crops), part.shape[1]) if features is None else features
        features[i * batch_size :][: len(part)] = part  # a list of parts would need twice the memory
        progress(f"features: {min((i + 1) * batch_size, len(crops))}/{len(crops)} images")
    if not all(all_gather_object(bool(features.isfinite().all()))):
        raise UsageError("the encoder's features are not all finite")
    return features[: len(rows)]


@torch.no_grad()
def knn_predict(train_x, train_y, test_x, k, temperature, num_classes):
    """Classify by weighted k-nearest neighbors (Wu et al., arXiv 1805.01978): (len(k), m) int64 on the CPU.

    A neighbor votes for its class with the weight exp(cosine similarity / temperature).
    train_x: (n, d) and train_y: (n,), this process's rows of the training images. test_x: (m, d), the same on every
    process. Features are L2-normalized here; float16 and bfloat16 are converted to float32. k: list of numbers of
    neighbors. If one exceeds the number of training images, all of these vote. Each process finds the nearest of its
    own rows, and the nearest are then chosen from what all processes have found.
    Copy it with gather_rows, all_gather_object and rank_and_world.
    """
    train_x, test_x = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (train_x, test_x))
    bank, queries, train_y = F.normalize(train_x, dim=1), F.normalize(test_x, dim=1), train_y.to(train_x.device)
    most = max(all_gather_object(len(bank)))  # the same on every process, so that all take the same chunks
    predicted = []
    for chunk in queries.split(max(1, 2**26 // max(most, num_classes))):  # at most 256 MB of similarities
        with torch.autocast(bank.device.type, enabled=False):  # whatever the caller's mode is
            similarity, row = (chunk @ bank.T).topk(min(max(k), len(bank)), dim=1)
        similarity, label = gather_rows(similarity.T).T, gather_rows(train_y[row].T).T  # append all processes' columns
        similarity, column = similarity.topk(min(max(k), similarity.shape[1]), dim=1)
        label = label.gather(1, column)
        vote = ((similarity - similarity[:, :1]) / temperature).exp()  # 1 for the nearest, so that none overflows
        no_votes = vote.new_zeros(len(chunk), num_classes)
        votes = [no_votes.scatter_add(1, label[:, :count], vote[:, :count]) for count in k]
        predicted.append(torch.stack(votes).argmax(2).cpu())
    return torch.cat(predicted, 1)


def knn_accuracy(encoder, info, train, test, device, workers, amp=False, batch_size=256, k=(20, 200), temperature=0.07):
    """Return an encoder's accuracy by `knn_predict` on the labeled images, {"knn20_top1": percent, ...}."""
    train, test = with_labels(train), with_labels(test)
    train_x = extract_features(encoder, train, info, device, batch_size, workers, amp)
    test_x = gather_rows(extract_features(encoder, test, info, device, batch_size, workers, amp))
    train_y, test_y = local_rows(torch.from_numpy(labels_of(train))), torch.from_numpy(labels_of(test))
    predicted = knn_predict(train_x.to(device), train_y, test_x.to(device), k, temperature, len(train.classes))
    accuracy = 100 * (predicted == test_y).double().mean(1)
    return {f"knn{count}_top1": percent for count, percent in zip(k, accuracy.tolist(), strict=True)}


@torch.no_grad()
def embedding_health(q):
    """Return two label-free measures of collapse, over the rows of all processes: {"std": float, "rank": float}.

    q: (n, d), this process's embeddings, which are L2-normalized here. std: the standard deviation, averaged over the
    dimensions, times sqrt(d): 1 if uniform on the sphere, 0 if all are equal. rank: the effective rank, exp of the
    entropy of the singular values, at most min(N - 1, d) for N rows in all (Roy and Vetterli, EUSIPCO 2007). Copy it
    with gather_rows, all_gather_object and rank_and_world.
    """
    q = F.normalize(gather_rows(q).float(), dim=1)
    std = q.std(0, correction=0).mean() * q.shape[1] ** 0.5
    spectrum = torch.linalg.svdvals(q - q.mean(0))
    spectrum = spectrum / spectrum.sum().clamp_min(1e-12)
    return {"std": std.item(), "rank": torch.special.entr(spectrum).sum().exp().item()}


def open_encoder(args):
    """Load the encoder that the arguments of `add_evaluation_arguments` name: (module in evaluation mode, info)."""
    names = "image_size", "patch_size", "norm", "num_heads", "prefix"
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.arch is None:
        if given:
            raise UsageError(f"--{next(iter(given)).replace('_', '-')} is only valid with --arch")
        return load_backbone(args.checkpoint, args.encoder)
    if args.encoder is not None:
        raise UsageError("--encoder is for runs of this project; for third-party weights pass --prefix")
    saved = load_checkpoint(args.checkpoint)
    if "timm_name" in (saved.get("backbone") or saved):  # it has its own heads, mean and interpolation
        raise UsageError(f"--arch is for third-party files: leave it out for {args.checkpoint}")
    if args.patch_size is not None and not is_vit(args.arch):
        raise UsageError("--patch-size needs a ViT (--arch)")
    prefix = given.pop("prefix", "")
    info = backbone_info(args.arch, **(dict(image_size=224) | given))
    backbone = build_backbone(info)
    if args.norm is None and "." in args.arch:  # timm's, of the weights NAME.TAG
        info |= {name: backbone.pretrained_cfg[name] for name in ("mean", "std")}
    feature_width(backbone, info["image_size"])
    load_weights(backbone, args.checkpoint, prefix)
    return backbone.eval(), info | dict(method=Path(args.checkpoint).name, encoder=prefix or "only")


def open_evaluation_data(name, root, info, check=True, train=None, test=None):
    """Load the images of an evaluation, log what is evaluated, and return (training images, test images, info).

    name: see `load_dataset`; if None, the dataset that the encoder was trained on. train, test: datasets to use
    instead. info: see `backbone_info`; returned with the dataset's name, folder and fingerprint. check: require labels
    of the same classes in both, and drop the images without a label. Raises UsageError if the classes or the
    processes' images differ, or if `name` is None and the images are not those that the encoder was trained on.
    """
    as_trained = name is None and train is None
    if as_trained:
        if info.get("dataset") is None:
            raise UsageError("the checkpoint does not name its dataset: pass --dataset")
        name, root = info["dataset"], root or info.get("data_dir")
    if train is None:
        train = load_dataset(name, root, True, info["image_size"])
        test = load_dataset(name, root, False, info["image_size"]) if test is None else test
    images = fingerprint(train)
    require_equal("their images", (images, fingerprint(test or [])))
    if as_trained and images != info["images"]:
        raise UsageError(f"the encoder was trained on other images; to use these, pass --dataset {name} --data-dir DIR")
    if check:
        if problem := class_mismatch(train, test or []):
            raise UsageError(problem)
        train, test = with_labels(train), with_labels(test)
    names = "encoder", "arch", "method", "image_size", "interpolation", "mean", "std"
    log_values("features", {name: info[name] for name in names})
    log(f"{'images':10}train: {describe(train)}; test: {describe(test or [])}")
    return train, test, info | dict(dataset=name, data_dir=root, images=images)


def baselines(info, seed, num_images):
    """Return the baselines of an evaluation, {name: encoder}: raw pixels (of few images) and the untrained encoder."""
    torch.default_generator.manual_seed(seed)  # the CPU's: no other is used
    pixels = nn.Sequential(nn.AdaptiveAvgPool2d(min(32, info["image_size"])), nn.Flatten())
    few = num_images <= 200_000  # raw pixels of more would need tens of GB
    return ({"raw pixels": pixels} if few else {}) | {"untrained": build_backbone(info)}


# ================================================================= 5. processes


def start(main, parse_args, paper_flags=None):
    """Run main(parse_args()). A mistake exits with an error message and status 2. paper_flags: see `log_demo`."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None if it is closed
    if hasattr(sys.stdout, "reconfigure"):  # else `log` would drop a line with a name that the terminal cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    torch.set_flush_denormal(True)  # denormal numbers make a CPU several times slower
    torch.backends.cudnn.benchmark = True
    warnings.filterwarnings("ignore", ".*Grad strides do not match")  # DistributedDataParallel's, about speed
    try:
        args = parse_args()
        if getattr(args, "dataset", None) == "patterns":
            torch.set_num_threads(1)  # fast beside other programs, and the same digits on any number of cores
        log_demo(args, paper_flags)
        main(args)
        log_demo(args, paper_flags, finished=True)
    except KeyboardInterrupt:
        log("interrupted: the same command resumes a training run after its last saved epoch")
        raise SystemExit(130) from None
    except (UsageError, FloatingPointError) as error:
        progress("")  # clear it
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(5)  # usually all processes find the error, and torchrun stops them once the first has exited
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    if dist.is_initialized():
        dist.destroy_process_group()


def init_distributed(device="auto", timeout=datetime.timedelta(hours=1)):
    """Choose the device and join torchrun's process group, if there is one. Return (device, rank, world size).

    device: "auto" (a GPU if there is one), "cuda" or "cpu". timeout: how long a process waits for the others.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if processes > gpus:
            raise UsageError(f"processes: {processes}, GPUs: {gpus}; start one process per GPU, or pass --device cpu")
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # one node's store survives a restart, with the old addresses
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return torch.device(device), *rank_and_world()


def rank_and_world():
    """Return (this process's rank, the number of processes)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_gather_object(value):
    """Like torch's all_gather_object: the values of all processes, in rank order. Tensors must be on the CPU."""
    values = [value] * rank_and_world()[1]
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def require_equal(what, value):
    """Raise UsageError unless all processes have the same value. what: its name in the message."""
    if any(other != value for other in all_gather_object(value)):
        raise UsageError(f"the processes differ in {what}")


def local_rows(x):
    """Inverse of `gather_rows`: return this process's rows of a tensor (n, ...), which are consecutive."""
    rank, world = rank_and_world()
    return x.tensor_split(world)[rank]


def gather_rows(x, to_first=False):
    """Concatenate tensors (n, ...) of all processes in rank order, where n may differ and be 0. No gradient.

    to_first: only on the first process. The others return None, and need no memory for it.
    """
    x = x.detach().contiguous()
    counts, rank = all_gather_object(len(x)), rank_and_world()[0]
    if len(counts) == 1:
        return x
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


# ================================================================== 6. printing


def log(text, end="\n"):
    """Print a line from the first process only. On a terminal it replaces the progress line."""
    if rank_and_world()[0] == 0:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or a full disk must not end a training
            print(("\r\x1b[K" if sys.stdout.isatty() else "") + text, end=end, flush=True)


def progress(text):
    """Show a progress line on a terminal, from the first process only. Nothing is written to a log file."""
    if sys.stdout.isatty():
        log(text, end="")


def log_demo(args, paper_flags, finished=False):
    """If this is the demo, print how to train on real data or, if finished, only the command with the paper's flags."""
    if not paper_flags or args.dataset != "patterns" or args.show_views or os.environ.get("RANK", "0") != "0":
        return
    if not finished:
        log("Demo on synthetic images. For real data pass --dataset cifar10, or folder or imagenet with --data-dir DIR")
        what = "learning rate, patch size, heads" if is_vit(args.arch) else "learning rate, image size"
        log(f"The demo's {what} and other values are not the paper's.")
    log(f"At full scale: torchrun --nproc_per_node=8 {args.method}.py {paper_flags}")


class Meter:
    """The averages of an epoch's metrics, and its progress line. epoch: counted from 0. batch_size: the global one."""

    def __init__(self, epoch, epochs, steps, batch_size):
        self.epoch, self.epochs, self.steps, self.batch_size = epoch, epochs, steps, batch_size
        self.count, self.sums = 0, {}
        self.began = self.shown = time.perf_counter()

    def update(self, metrics):
        """Add the metrics of a step, {name: 0-d tensor}, with a "loss", which is read when a progress line is due."""
        self.count += 1
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach()
        now = time.perf_counter()
        show, seconds_apart = (progress, 0.5) if sys.stdout.isatty() else (log, 60)
        if rank_and_world()[0] == 0 and now - self.shown > seconds_apart:
            self.shown = now
            seconds = (now - self.began) / self.count
            left = (self.epochs - self.epoch) * self.steps - self.count
            text = f"epoch {self.epoch + 1}/{self.epochs}  step {self.count}/{self.steps}  loss {metrics['loss']:.3f}  "
            show(f"{text}{self.batch_size / seconds:.0f} images/s  {left * seconds / 60:.1f} min left")

    def averages(self):
        """Return averages over steps and processes, {name: float}. Raises FloatingPointError if one is not finite."""
        values = torch.stack([*self.sums.values()]).double().cpu() / self.count
        values = torch.stack(all_gather_object(values)).mean(0).tolist()
        averages = dict(zip(self.sums, values, strict=True))
        if bad := [name for name, value in averages.items() if not math.isfinite(value)]:
            keep = ", a new --out, and --resume to keep the earlier epochs" if self.epoch else ""
            raise FloatingPointError(f"{', '.join(bad)} not finite in epoch {self.epoch + 1}: pass a lower --lr{keep}")
        return averages | dict(images_per_s=self.batch_size * self.count / (time.perf_counter() - self.began))


def log_values(title, values):
    """Print {name: value} after a title, in lines of up to 120 characters."""
    words = [f"{name} {format_value(value)}" for name, value in values.items() if value not in (None, "")]
    text = f"{title:10}" + "  ".join(word.replace(" ", "\xa0") for word in words)  # lines are broken between the words
    log(textwrap.fill(text, 120, subsequent_indent=" " * 10, break_on_hyphens=False).replace("\xa0", " "))


def log_epoch(title, records, names=()):
    """Print the last record's scores and the values of these names. With names, also `warn_of_collapse`."""
    scores = [name for name in records[-1] if re.fullmatch(r"(knn\d+|linear|finetune)_(top1|top5|per_class)", name)]
    log("  ".join([title, *(f"{name} {format_value(records[-1][name])}" for name in [*names, *scores])]))
    if names:
        warn_of_collapse([record.get("std", 1) for record in records])


def warn_of_collapse(stds):
    """Print a warning after the third epoch in a row with a `std` below 0.1. stds: that of each epoch so far."""
    if [std < 0.1 for std in [1, *stds][-4:]] == [False, True, True, True]:
        log("warning: std has been below 0.1 for three epochs: all embeddings are nearly equal. If it does not rise,")
        log("this is a collapse: try --warmup, or check --lr (too high?), --temperature, --queue and --momentum")


def format_value(value):
    """Return a value as text, for example 1.333, or "0.75 1.333" for a list."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(format_value, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ===================================================================== 7. flags


def bounded(what, kind, is_valid):
    """Return a `type` for argparse that accepts valid numbers of a kind, int or float. what: describes them."""

    def convert(text):
        with contextlib.suppress(ValueError):
            if is_valid(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return convert


positive_int = bounded("a positive integer", int, lambda x: x > 0)
nonnegative_int = bounded("a non-negative integer", int, lambda x: x >= 0)
positive_float = bounded("a positive number", float, lambda x: 0 < x < math.inf)
nonnegative_float = bounded("a non-negative number", float, lambda x: 0 <= x < math.inf)
fraction = bounded("a number from 0 to 1", float, lambda x: 0 <= x <= 1)
concentration = bounded("a number >= 0.01", float, lambda x: 0.01 <= x < math.inf)  # smaller Beta draws underflow


class AreaRange(argparse.Action):
    """An argparse action for a range of areas, as fractions of the image: two positive numbers, the smaller first."""

    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, dest, nargs=2, type=fraction, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        if not 0 < values[0] <= values[1]:
            raise argparse.ArgumentError(self, "expected two positive numbers, the smaller one first")
        setattr(namespace, self.dest, values)


class FractionPair(argparse.Action):
    """An argparse action for one or two numbers from 0 to 1, which are stored as two: 0.99 as [0.99, 0.99]."""

    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, dest, nargs="+", type=fraction, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        if len(values) > 2:
            raise argparse.ArgumentError(self, "expected one or two numbers")
        setattr(namespace, self.dest, [values[0], values[-1]])


# Arguments that may change when a run is resumed. With another number of workers the random numbers differ.
NOT_IN_CONFIG = ("data_dir", "out", "resume", "keep_every", "knn_every", "device", "compile", "workers", "show_views")


def add_shared_arguments(parser, add):
    """Add all scripts' arguments, forbid abbreviations, show defaults in --help. add: `add_argument` of a group."""
    parser.allow_abbrev, parser.formatter_class = False, argparse.ArgumentDefaultsHelpFormatter
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # not on macOS
    workers = min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))) if torch.cuda.is_available() else 0
    seed = bounded("an integer from 0 to 2^32 - 1", int, lambda x: 0 <= x < 2**32)
    add("--seed", type=seed, default=0, help="random seed")
    add("--workers", type=nonnegative_int, default=workers, help="data loading workers per process")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if there is one")
    add("--amp", choices=("auto", "off"), default="auto", help="auto: bf16 on GPUs that support it; off: float32")


def use_bf16(amp, device):
    """Whether networks compute in bf16: on GPUs that support it, unless --amp is "off"."""
    return amp == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def add_evaluation_arguments(parser):
    """Add the arguments shared by both evaluations."""
    parser.usage = "%(prog)s RUN [options]"
    add = parser.add_argument_group("what is evaluated").add_argument
    add("checkpoint", metavar="RUN", help="a run's folder, last.pt or backbone.pt; or a third-party FILE, with --arch")
    add("--dataset", choices=DATASETS, help="dataset; if None, the one that the encoder was trained on")
    add("--data-dir", type=os.path.abspath, metavar="DIR", help="its folder; without --dataset, that used in training")
    add("--encoder", choices=("query", "momentum"), help="encoder; if None, backbone.pt's (PatchMix: --key-encoder)")
    add("--no-baselines", action="store_true", help="do not evaluate raw pixels or the untrained encoder")
    add_shared_arguments(parser, add)
    add = parser.add_argument_group("the encoder in a third-party FILE").add_argument
    add("--arch", help="vit_tiny, resnet18, ..., or any timm model")
    add("--prefix", help="prefix of the encoder's keys in the state_dict, for example module.encoder_q.")
    add("--image-size", type=positive_int, metavar="N", help="image size; if None, 224")
    add("--patch-size", type=positive_int, metavar="N", help="patch size of a ViT; if None, 16")
    add("--num-heads", type=positive_int, metavar="N", help="attention heads of a ViT; if None, timm's")
    add("--norm", choices=NORMS, help="normalization statistics; if None, imagenet, or timm's for an --arch NAME.TAG")


def parse_args(parser, argv, recipe):
    """Add the arguments shared by all training scripts, parse argv (if None, sys.argv), and return the arguments.

    parser: has --arch; its prog, the name of a script, is the method. recipe(args) returns the defaults, {name: value},
    of the chosen dataset, encoder and method. The default of --out is named after the values that are not defaults.
    Exits with an error if arguments contradict each other.
    """
    parser.usage = "%(prog)s [options]"
    parser.set_defaults(method=parser.prog.removesuffix(".py"))
    add = parser.add_argument_group("run").add_argument
    add("--dataset", choices=DATASETS, default="patterns", help="dataset, which also selects the recipe")
    add("--data-dir", type=os.path.abspath, metavar="DIR", help="folder with train/, and val/ or test/")
    add("--norm", choices=NORMS, help="dataset statistics used for normalization")
    add("--init", type=os.path.abspath, metavar="FILE", help="initial weights of the encoder; pass it again to resume")
    add("--init-prefix", default="", metavar="PREFIX", help="prefix of the encoder's keys in FILE")
    add("--out", type=os.path.abspath, metavar="DIR", help="folder, by default in runs/; an existing run is resumed")
    add("--resume", metavar="FILE", help="last.pt of another run, or its folder, to resume from in a new --out")
    add("--keep-every", type=nonnegative_int, default=0, metavar="N", help="keep a checkpoint every N epochs; 0: never")
    add("--knn-every", type=nonnegative_int, metavar="N", help="evaluate by kNN every N epochs; 0: never")
    add("--show-views", type=os.path.abspath, metavar="FILE.png", help="write a picture of the views, and exit")
    add_shared_arguments(parser, add)
    add("--compile", action="store_true", help="compile the encoders: a slow first step, then faster ones")

    argv = sys.argv[1:] if argv is None else argv  # parsed twice, first for what chooses the defaults
    chosen, _ = parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])
    parser.set_defaults(norm=chosen.dataset if chosen.dataset in NORMS else "imagenet")
    parser.set_defaults(knn_every=50 if chosen.dataset == "imagenet" else 10)  # ImageNet's kNN takes minutes
    parser.set_defaults(**recipe(chosen))  # before --help shows them
    parser.epilog = f"Defaults are for --dataset {chosen.dataset}. Pass another one with --help to see its defaults. "
    parser.epilog += "(D1), (D2), ... are listed at the end of the script."
    args = parser.parse_args(argv)

    if args.show_views and (not args.show_views.endswith(".png") or os.path.exists(args.show_views)):
        parser.error(f"--show-views {args.show_views}: expected the name of a new file that ends in .png")
    if "." in args.arch:
        parser.error(f"--arch {args.arch}: weights are not downloaded: pass {args.arch.split('.')[0]}, and --init FILE")
    needs(parser, args, ["init_prefix"], args.init, "--init")

    if args.out is None:
        where = args.dataset if args.dataset != "folder" else f"folder-{os.path.basename(args.data_dir or '')}"
        unnamed = ("dataset", "arch", "seed", *NOT_IN_CONFIG)
        changed = {k: x for k, x in vars(args).items() if k not in unnamed and x != parser.get_default(k)}
        changed = [name + format_value(value) for name, value in changed.items()]
        args.out = run_folder([args.method, where, args.arch, f"s{args.seed}", *changed])
    return args


def needs(parser, args, names, condition, what):
    """Exit with an error if one of these arguments is not its default though the condition, `what`, is not met."""
    for name in names:
        if not condition and name in args and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} has no effect here: it needs {what}")


def run_folder(words):
    """Return the default of --out, made of words."""
    name = re.sub(r"[^\w.-]+", ",", "-".join(words))
    return f"runs/{name if len(name) < 160 else name[:150] + hashlib.sha256(name.encode()).hexdigest()[:8]}"


# ====================================================================== 8. runs

TEMPORARY = ".being-written-"  # how the names of temporary files begin; `open_run` removes those of killed runs


def write_file(path, write):
    """Write a file atomically on the first process, by write(file). A UsageError leaves the old file as it was."""
    if rank_and_world()[0] > 0:
        return
    temporary = Path(path).with_name(f"{TEMPORARY}{socket.gethostname()}-{os.getpid()}-{Path(path).name}")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises a RuntimeError if the disk is full
        if os.path.exists(temporary):
            temporary.unlink()
        raise UsageError(f"cannot write {path}: {error}") from error


def find_checkpoint(out, resume):
    """Return the path of last.pt in `out`, else `resume`. Raises UsageError if `out` is neither empty nor a run."""
    files = [entry.name for entry in visible_entries(out)] if os.path.isdir(out) else []
    if "last.pt" in files:
        if Path(resume or "").name.startswith("epoch-") and Path(resume).resolve().parent == Path(out).resolve():
            raise UsageError(f"--resume {resume} is in --out, which resumes from last.pt: pass another --out")
        return os.path.join(out, "last.pt")
    if {*files} - {"config.json"}:  # left by a run that was killed before its first save
        raise UsageError(f"--out {out} is neither empty nor a run: {', '.join(files[:3])}")
    return os.path.join(resume, "last.pt") if resume and os.path.isdir(resume) else resume


def open_run(args, train, state, derived, overrides=None):
    """Start a run in args.out, or resume the one there: (configuration, records of its epochs). Print its values.

    The configuration, {name: value}, has the arguments that are not in NOT_IN_CONFIG, with the values of overrides, if
    given, and the images' fingerprint.
    state: {name: module, optimizer or tensor}, with a "model"; they are loaded in place. derived: further values to
    print. With --resume, a new run starts from the state of another one, except for tensors with a row per image.
    Raises UsageError if the run in args.out has another configuration, or if the processes differ in theirs.
    """
    config = {k: x for k, x in vars(args).items() if k not in NOT_IN_CONFIG} | (overrides or {})
    config["images"] = fingerprint(train)
    config = json.loads(json.dumps(config, default=str))  # plain numbers and strings, which any checkpoint can hold
    machine = torch.cuda.get_device_name() if torch.cuda.is_initialized() else f"CPU, {torch.get_num_threads()} threads"
    rank, world = rank_and_world()
    derived = derived | dict(processes=world, workers=args.workers, machine=machine, torch=torch.__version__)
    log_values("values", config)
    log_values("derived", derived)
    path = all_gather_object(find_checkpoint(args.out, args.resume) if rank == 0 else None)[0]  # rank 0's, for all
    saved = {} if path is None else load_run(path, args, config, state)
    records = saved.get("records", [])
    what = "flags, images or epoch: --out and --data-dir must be on shared disks"
    require_equal(what, (config, str(args.out), len(records)))
    if rank == 0:
        for file in Path(args.out).glob(f"{TEMPORARY}*"):
            file.unlink()
    if path == os.path.join(args.out, "last.pt"):
        export_run(args.out, saved, vars(args).get("keep_every"))  # in case the last save was interrupted
    if len(records) < args.epochs:
        text = json.dumps(vars(args) | config | derived, indent=1, default=str)
        write_file(os.path.join(args.out, "config.json"), lambda file: file.write(text.encode()))
    return config, records


def saved_data_dir(folder):
    """Return the folder of the images of the run in `folder`. It is None for own datasets, or without a config.json."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads(Path(folder, "config.json").read_text()).get("data_dir")


def load_run(path, args, config, state):
    """Load a run's last.pt into `state`, in place, and return what it holds. For the parameters see `open_run`."""
    saved = load_checkpoint(path)
    old, records = saved.get("config", {}), saved.get("records", [])
    if old.get("method") != config["method"]:
        raise UsageError(f"{path} is not the last.pt of a run of {config['method']}")
    differences = [f"{k} was {old.get(k)}, is {config.get(k)}" for k in old | config if old.get(k) != config.get(k)]
    resumes_other = path != os.path.join(args.out, "last.pt")
    if differences and not resumes_other:
        what = f"{args.out} is a run with other values ({'; '.join(differences)})"
        raise UsageError(f"{what}: pass another --out, with --resume {path} to start from its state")
    if not resumes_other and (before := saved_data_dir(args.out)) not in (None, args.data_dir):
        log(f"images: from {before} before, from {args.data_dir} now, with the same names and labels")
    if resumes_other and len(records) >= args.epochs:
        raise UsageError(f"{path} already has {len(records)} epochs: pass a larger --epochs")
    try:
        for name, part in state.items():
            if isinstance(part, torch.optim.Optimizer):  # its buffers; the learning rate is this run's
                part.load_state_dict(part.state_dict() | dict(state=saved[name]["state"]))
            elif isinstance(part, nn.Module):
                part.load_state_dict(saved[name])
            elif part.dim() == 0 or not resumes_other:  # a row per image is not taken from another run
                part.copy_(saved[name])
    except (KeyError, RuntimeError, ValueError) as error:
        reasons = [*differences, (str(error) or repr(error)).splitlines()[-1].strip()[:200]]  # names a tensor
        raise UsageError(f"{path} does not fit this run: {'; '.join(reasons)}") from error
    log("; ".join([f"resumed from {path}, after epoch {len(records)}", *differences]))
    world = rank_and_world()[1]
    if saved.get("processes") != world and len(records) < args.epochs:
        why = "random numbers differ, as may batch-norm groups and other derived values"
        log(f"processes: {saved.get('processes')} before, {world} now: {why}")
    return saved


def save_run(out, config, info, state, records, keep_every=0):
    """Write last.pt, which has all that is needed to resume, backbone.pt and metrics.jsonl to a run's folder.

    config: from `open_run`. info: from `backbone_info`, and the encoder that is evaluated, "query" (model.backbone) or
    "momentum" (model.momentum_backbone); None: no backbone.pt. state: see `open_run`. records: a dict per epoch.
    keep_every: keep a copy of last.pt every so many epochs. Raises FloatingPointError, and writes nothing, if a tensor
    of the state is not finite.
    """
    state = {name: part if torch.is_tensor(part) else part.state_dict() for name, part in state.items()}
    if bad := [name for name, x in tensors_by_name(state).items() if not x.isfinite().all()]:
        raise FloatingPointError(f"{bad[0]} is not finite, so nothing was written to {out}: pass a lower --lr")
    last = state | dict(config=config, records=records, processes=rank_and_world()[1])
    if info is not None:
        last["backbone"] = {name: config[name] for name in ("method", "dataset", "images")} | info
    write_file(os.path.join(out, "last.pt"), lambda file: torch.save(last, file))
    export_run(out, last, keep_every)


def export_run(out, last, keep_every):
    """Write the files that follow from `last`, the contents of last.pt, unless they are up to date."""
    records, path = last["records"], Path(out, "metrics.jsonl")
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    if rank_and_world()[0] > 0 or (path.is_file() and path.read_bytes().startswith(lines)):
        return  # metrics.jsonl is written last
    if info := last.get("backbone"):
        backbone = info | dict(state_dict=encoder_weights(last["model"], info["encoder"]))
        write_file(os.path.join(out, "backbone.pt"), lambda file: torch.save(backbone, file))
    if keep_every and len(records) % keep_every == 0:
        write_file(os.path.join(out, f"epoch-{len(records):04d}.pt"), lambda file: torch.save(last, file))
    write_file(path, lambda file: file.write(lines))
