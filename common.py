"""Data, evaluation and the life of a run: what the method files share, and nothing of training.

    1. messages    fail, say, progress; join_processes, from_all, StopRequest
    2. randomness  uniform, generator: pure functions of what is being made
    3. data sets   load_images -> ImageSet (patterns, cifar10, ..., imagenet, folder); OwnImages; open_images
    4. views       random_resized_crop, random_colour draw; Views cuts in the loader; colour_views on the device
    5. evaluation  extract_features, knn_scores, knn_predict, embedding_health, load_backbone
    6. flags       run_parser, parse_run: what operates every run, and a recipe's values as defaults
    7. run         Run: the folder, going on, what is said and logged, stopping, saving

Conventions: images are RGB. Loaders give uint8 (N, 3, H, W); everything on the device is float in [0, 1] until
`normalize`. Boxes are (top, left, height, width) in pixels. A label of -1 means "none".
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
import io
import itertools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageDraw, UnidentifiedImageError
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, Dataset, default_convert
from torchvision.datasets.folder import make_dataset
from torchvision.transforms.functional import rgb_to_grayscale, solarize
from torchvision.transforms.v2.functional import to_image

# ---------------------------------------------------------------- 1. messages


def tell_torchrun(line):
    """Leave a process's last words where torchrun looks for them: it ends its own report with them."""
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        found = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(report).write_text(json.dumps({"message": found}))


def fail(message):
    """A mistake of the user: one line on stderr, from one process, and exit status 2."""
    first = os.environ.get("RANK", "0") == "0"
    if dist.is_initialized():  # perhaps only one process has found it: the first to come here says it
        with contextlib.suppress(RuntimeError):  # the store is gone: somebody has said why
            first = dist.distributed_c10d._get_default_store().add("failed", 1) == 1
    line = "error: " + message.replace("\n", "\\n")  # a file's name may have one
    if first:
        print(line, file=sys.stderr, flush=True)
    tell_torchrun(line)
    raise SystemExit(2)


for _package, _oldest in ((torch, "2.11"), (torchvision, "0.26"), (timm, "1.0.20")):  # as requirements.txt
    if TorchVersion(_package.__version__) < _oldest:
        fail(f"{_package.__name__} {_package.__version__} is too old: see requirements.txt")


def say(text="", end="\n"):
    """Print from the first process only; on a terminal, over the progress line."""
    if os.environ.get("RANK", "0") == "0":
        code = getattr(sys.stdout, "encoding", None) or "utf-8"
        text = text.encode(code, "backslashreplace").decode(code)  # a name may have what the terminal cannot show
        print(("\r\x1b[K" if sys.stdout.isatty() else "") + text, end=end, flush=True)


def last_words(line):
    say(line)
    tell_torchrun(line)


def progress(text, last=[0.0]):  # noqa: B006  (the list keeps the time of the last line)
    """One line that rewrites itself on a terminal, and a plain line every 30 s in a log file."""
    if sys.stdout.isatty() or time.monotonic() - last[0] > 30:
        say(text, end="" if sys.stdout.isatty() else "\n")
        last[0] = time.monotonic()


GROUPS = itertools.count()  # process groups that this program has made
PATIENCE = datetime.timedelta(minutes=30)  # of processes that wait for others: the first of a node may be downloading


def rank_and_world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def keep_memory():
    """Let glibc keep what is freed: to map large tensors anew costs a CPU up to a quarter of a step."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block, however large, is mapped on its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the top of the heap stays


def join_processes(args):
    """Join torchrun's process group, if there is one; returns this process's device. Sets args.bf16."""
    torch.set_flush_denormal(True)  # denormal numbers make a CPU several times slower
    keep_memory()
    warnings.filterwarnings("ignore", ".*(broadcast_buffers|Grad strides do not match).*")  # about speed and names only
    cuda = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        fail("--device cuda: torch sees no CUDA device; use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    native = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    args.bf16 = args.amp == "bf16" or (args.amp == "auto" and native)
    sizes = [getattr(args, name, 32) for name in ("image_size", "local_size")] + [*getattr(args, "resolutions", ())]
    if args.bf16 and not cuda and min(sizes) <= 16 and not args.arch.startswith(("vit_", "deit")):
        fail("--amp bf16 on a CPU: at 16 px and below torch's gradients of convolutions are wrong: give --amp off")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = native  # the same GPUs have both
        torch.backends.cudnn.benchmark = True
    elif args.arch and args.arch.endswith(("_micro", "_mini")) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # a second one gives 15 %, and takes two thirds when another program wants a core
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        store, rank, world = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # a restart's store still holds dead workers' addresses
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        store = dist.PrefixStore(f"group {next(GROUPS)}", store)  # nor may a second one find the first's
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    return device


def from_all(value):
    """[what each process has], on all of them, in rank order. Tensors have to be the CPU's."""
    found = [value] * rank_and_world()[1]
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found


def from_first(make):
    """What make() returns on the first process, on all of them."""
    made = [make() if rank_and_world()[0] == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(made)
    return made[0]


class StopRequest:
    """SIGTERM and SIGINT ask a run to finish its step, save and end with exit status 75; after 3 s, another ends it."""

    def __init__(self):
        self.requested, self.at_once, self.next_note = 0.0, False, 0  # requested: when
        self.before = {n: signal.signal(n, self._handle) for n in (signal.SIGTERM, signal.SIGINT)}
        world = rank_and_world()[1]
        self.group = dist.new_group(backend="gloo") if world > 1 else None  # notes are compared without the device

    def _handle(self, number, frame):
        now = time.monotonic()
        if not self.requested:
            self.requested = now
            self.leave(number)
        elif now > self.requested + 3:  # before, it is the same request: a scheduler's to all, and torchrun's
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def leave(self, number=None):
        """In an evaluation, when everything is saved, the program ends where it is."""
        if self.requested and self.at_once:
            last_words("stopped on request (exit status 75) in an evaluation; the same command makes up for it")
            if number == signal.SIGTERM:  # at once: to take torch down takes seconds, and a callback loses exceptions
                _end_workers()
                os._exit(75)
            raise SystemExit(75)

    def agreed(self, step=None, pace=0.0):
        """Whether any process was asked; several compare notes after a step, of fast ones (pace: s) twice a second."""
        if self.group is None:
            return self.requested > 0
        if step is not None and step < self.next_note:
            return False
        note = torch.tensor([self.requested > 0, pace], dtype=torch.float64)
        dist.all_reduce(note, dist.ReduceOp.MAX, group=self.group)
        if step is not None:
            self.next_note = step + max(1, int(0.5 / max(note[1].item(), 1e-3)))
        return note[0].item() > 0


# -------------------------------------------------------------- 2. randomness


def _mix(x):
    """SplitMix64's finaliser: a bijection of uint64 whose output bits each depend on all input bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(*keys):
    """Chain integers or integer arrays (broadcast) into a uint64 array."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _mix(state + np.asarray(key).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return state


def uniform(seed, epoch, index, count, purpose=0):
    """Counter-based uniform draws: the same for an image whatever batch, worker or process asks.

    index (n,) ints -> (n, count) float64 in [0, 1), a pure function of (seed, purpose, epoch, index, position).
    """
    start = _hash(seed, purpose, epoch, np.asarray(index))[:, None]
    bits = _mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)) * 2.0**-53


def generator(*keys):
    """A torch CPU generator seeded by a hash of integer keys, e.g. (seed, step, purpose, slice)."""
    return torch.Generator().manual_seed(int(_hash(*keys)[0] >> np.uint64(1)))


def seed_step(seed, step):
    """Seed the global generator, from which drop-path draws, by (seed, step, rank)."""
    torch.manual_seed(generator(seed, step, 0, rank_and_world()[0]).initial_seed())


# --------------------------------------------------------------- 3. data sets

DATASETS = ("patterns", "cifar10", "cifar100", "stl10", "imagenet100", "imagenet", "folder")
IMAGENET_NORM = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NORMS = {
    "imagenet": IMAGENET_NORM,
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

    labels (n,) int64, -1 where there is none; classes: names; paths (n,) bytes in one array, which loader workers share
    as they would not share strings; folders: bytes, what stands before the relative names in the paths;
    images[i] -> uint8 array (H, W, 3).
    """

    def __init__(self, name, labels, classes, array=None, paths=None, folders=()):
        self.name, self.array, self.paths, self.folders = name, array, paths, folders
        self.labels, self.classes = np.asarray(labels, np.int64), list(classes)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.array[i] if self.array is not None else read_image(self.path(i))

    def path(self, i):
        return os.fsdecode(self.paths[i])

    def sizes(self, index):
        """(n, 2) int64 heights and widths, from the array or the files' headers."""
        return np.array([image_size(self.path(i)) if self.array is None else self.array.shape[1:3] for i in index])

    def subset(self, index):
        """The images of the given rows, in that order."""
        part = copy.copy(self)
        part.labels = self.labels[index]
        part.array, part.paths = (None if rows is None else rows[index] for rows in (self.array, self.paths))
        return part

    def labelled(self):
        return self.subset(np.flatnonzero(self.labels >= 0)) if (self.labels < 0).any() else self

    def checksum(self):
        """16 hexadecimal digits that tell whether two image sets are the same. Seconds, however many images.

        They depend on the number of images, their order, the labels and the images. Of files these are all names below
        the data folder, which may be moved, and the byte sizes of 1,000 files spread evenly. Of an array it is all of
        it, or, above 64 MiB, 1,000 images spread evenly.
        """
        digest = hashlib.sha256(self.labels.astype("<i8").tobytes())
        for part in self.content():
            digest.update(hashlib.sha256(part).digest())
        return digest.hexdigest()[:16]

    def content(self):
        """Yield what `checksum` reads beside the labels, as bytes."""
        if self.paths is not None:
            yield b"\0".join(self.relative(path) for path in self.paths.tolist())
            yield repr([file_size(self.path(i)) for i in self.spread(1000)]).encode()
        else:
            whole = self.array.nbytes <= 2**26
            yield repr(self.array.shape).encode()
            yield np.ascontiguousarray(self.array if whole else self.array[self.spread(1000)])

    def relative(self, path):
        """A path (bytes) without the folder of the data set."""
        folder = next((folder for folder in self.folders if path.startswith(folder)), b"")
        return path[len(folder) :]

    def spread(self, count):
        """Up to `count` row numbers, spread evenly from the first row to the last."""
        return np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(np.int64)


class OwnImages(ImageSet):
    """A user's own map-style Dataset as an ImageSet.

    Its images are PIL's, uint8 arrays (H, W[, 3]) or uint8 tensors (C, H, W). An item may be a tuple that begins with
    the image. Labels, if `labelled`, are data.targets, or else the items' second entries, for which every item is read
    once. A batch's images are held from `sizes` on, so that each is decoded once. owner: what an error calls the data.
    """

    def __init__(self, data, labelled=False, owner="your data set"):
        self.owner, self.data = owner, data
        labels = self.read_labels() if labelled else np.full(self.length(), -1)
        names = list(getattr(data, "classes", None) or ()) if labelled else []
        numbers = [str(i) for i in range(labels.max(initial=-1) + 1)]
        if names and len(names) < len(numbers):
            fail(f"{owner} has a label {labels.max()}, and `classes` has {len(names)} names: give one name per class")
        super().__init__("own", labels, names or numbers)
        self.rows, self.held = np.arange(len(labels)), {}

    def length(self):
        """The number of items. Exits with an error message if there is none, or the data set is not a map-style one."""
        try:
            if isinstance(self.data, torch.utils.data.IterableDataset) or not hasattr(self.data, "__getitem__"):
                raise TypeError
            count = len(self.data)
        except (TypeError, NotImplementedError):
            kind = type(self.data).__name__
            fail(f"{self.owner} is of type {kind}: give a map-style Dataset, with __len__ and __getitem__")
        if count == 0:
            fail(f"{self.owner} is empty: its length is 0")
        return count

    def read_labels(self):
        """(n,) int64. Exits with an error message if the items have no labels, or other ones than whole numbers."""
        count, labels = self.length(), getattr(self.data, "targets", None)
        remedy = "give `targets`, or items (image, label), with one whole number from 0 per image"
        if labels is None:
            labels = []
            for i in range(count):
                item = self.data[i]
                if not isinstance(item, (tuple, list)) or len(item) < 2:
                    fail(f"item {i} of {self.owner} has no label, it is {describe(item)}: {remedy}")
                labels.append(item[1])
        try:
            array = np.array([x.item() if isinstance(x, torch.Tensor) else x for x in labels])
        except (TypeError, ValueError, RuntimeError):  # labels of several numbers, or no list of labels
            array = np.array(None)
        if array.shape != (count,):
            fail(f"{self.owner} has {count} images, and labels that are no list of {count} numbers: {remedy}")
        if array.dtype.kind not in "iub" or array.min() < -1:
            wrong = next(x for x in array.tolist() if not isinstance(x, int) or x < -1)
            fail(f"{self.owner} has labels like {wrong!r:.40}: {remedy}. Names of classes go into `classes`")
        if array.max() < 0:
            fail(f"{self.owner} has no labels, all are -1: {remedy}")
        return array.astype(np.int64)

    def subset(self, index):
        part = super().subset(index)
        part.rows, part.held = self.rows[index], {}
        return part

    def sizes(self, index):
        self.held |= {i: self[i] for i in index.tolist()}
        return np.array([self.held[i].shape[:2] for i in index.tolist()])

    def __getitem__(self, i):
        if i in self.held:
            return self.held.pop(i)
        row = int(self.rows[i])
        item = self.data[row]
        image = item[0] if isinstance(item, (tuple, list)) and len(item) else item
        where, remedy = f"image {row} of {self.owner}", "give PIL images, or uint8 arrays or tensors"
        if not isinstance(image, (Image.Image, np.ndarray, torch.Tensor)):
            raise BadImage(f"{where} is {describe(image)}: {remedy}, alone or as (image, label)")
        if isinstance(image, Image.Image):
            return np.asarray(to_rgb(image, where))
        if str(image.dtype).removeprefix("torch.") != "uint8":
            raise BadImage(f"{where} is {image.dtype}: {remedy}")
        if image.ndim not in (2, 3) or len(found := to_image(image)) not in (1, 3):
            raise BadImage(f"{where} has shape {tuple(image.shape)}: give arrays (H, W, 3) or tensors (3, H, W)")
        return found.expand(3, -1, -1).permute(1, 2, 0).numpy()

    def content(self):
        """Yield 20 images spread evenly, or none if a second reading differs: then the data set draws at random."""
        images, again = ([self[i] for i in self.spread(20).tolist()] for _ in range(2))
        if all(map(np.array_equal, images, again)):
            for image in images:
                yield repr(image.shape).encode() + image.tobytes()


def describe(item):
    """What an error message calls a thing that is no image: its type, and a dict's keys."""
    return f"a dict of {', '.join(map(str, item))}"[:80] if isinstance(item, dict) else f"of type {type(item).__name__}"


def file_size(path):
    """A file's bytes, or -1 if it is missing."""
    try:
        return os.path.getsize(path)
    except OSError:
        return -1


class BadImage(Exception):
    """An image that cannot be used; the message names it and says what to do."""


def open_file(path):
    """PIL's Image.open, which gives up a JPEG for some damages to its EXIF: then as if it had none."""
    try:
        return Image.open(path)
    except UnidentifiedImageError as error:
        with contextlib.suppress(UnidentifiedImageError):
            return Image.open(io.BytesIO(Path(path).read_bytes().replace(b"Exif\0\0", b"none\0\0", 1)))
        raise error


@contextlib.contextmanager
def open_image(path):
    """An open image file, not yet decoded. Raises BadImage, which names the file, for whatever goes wrong."""
    try:
        with open_file(path) as image:
            yield image
    except BadImage:
        raise
    except Exception as error:  # a damaged file may raise anything
        reason = f"cannot read the image {path}: {error or type(error).__name__}"
        raise BadImage(f"{reason}. Replace this file with an intact one: a run cannot go on with fewer") from error


TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_orientation(image):
    """The EXIF orientation, 1 to 8, of an open file: 1 if there is none, or none that can be read.

    Only the header is read, and nothing is changed. A PNG's own getexif would decode the pixels, to look behind them.
    A TIFF with rotation is decoded: Pillow turns it then, and what is left to do is 1.
    """
    try:
        orientation = Image.Image.getexif(image).get(0x0112)
        if image.format == "TIFF" and orientation in TURNS:
            image.load()
            orientation = Image.Image.getexif(image).get(0x0112)
        return int(orientation) if orientation in TURNS else 1
    except Exception:  # damaged EXIF may raise anything, and the picture may be intact; if not, decoding it says so
        return 1


def value_range(image):
    """(white, least) of a PIL image that `convert` would not scale right, by its type and header alone; else None.

    white: the value that means white, 1 for floats. A TIFF's header may name 12 bits or a largest value
    (MaxSampleValue): one that is not 2^k - 1 is only this picture's, and says nothing. Without that, 16 bits end at
    65535, and 32 bits are taken for 8. least: a largest value below it leaves open which value is white.
    """
    tags = getattr(image, "tag_v2", {})  # a TIFF's
    bits, largest = (np.ravel(tags.get(tag, 0))[0] for tag in (258, 281))  # BitsPerSample, MaxSampleValue
    sixteen = bits == 16 or ";16" in image.mode + str(getattr(image, "tile", ())[:1])
    if image.mode == "F":
        return 1, 0
    if image.mode[0] != "I":  # colours: Pillow has kept the upper 8 of 16 bits
        return (255, 16) if sixteen and image.format != "PPM" else None
    if largest in [2**k - 1 for k in range(8, 17)]:
        return int(largest), 0
    if bits == 12:
        return 4095, 0
    if image.format == "PPM":  # Pillow has scaled it by the largest value, which the header names
        return 65535, 0
    return (65535, 4096) if image.mode.startswith("I;16") or image.format == "PNG" else (255, 0)


def to_rgb(image, name):
    """A PIL image of any mode -> one of mode RGB, 8 bits per channel.

    Raises BadImage, with the name, if the header does not say which value is white. To scale each picture by its own
    values would brighten the dark ones.
    """
    found = value_range(image)
    if found is None:
        return image.convert("RGB")
    (white, least), deep = found, image.mode[0] in "IF"
    values = np.asarray(image if deep else image.convert("RGB"))
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= white) or 0 < high < least:
        kind = {"F": "float", "I": "integer"}.get(image.mode, "16-bit")
        note = f"{kind} values of {low:g} to {high:g}" if deep else "16-bit values below 4096"
        raise BadImage(f"{name} has {note}, and does not say which one is white: convert it to 8 bits per channel")
    if deep:
        values = np.rint(values * (255 / white)).astype(np.uint8)
    return Image.fromarray(values).convert("RGB")


def read_image(path):
    """Any JPEG, PNG, ... of any mode (gray, palette, CMYK, alpha, 16 bits, EXIF-rotated) as uint8 (H, W, 3).

    Raises BadImage for a file that is damaged or whose values have no known white.
    """
    with open_image(path) as file:
        orientation = read_orientation(file)
        image = to_rgb(file, path)
        return np.asarray(image.transpose(TURNS[orientation]) if orientation in TURNS else image)


def image_size(path):
    """(height, width) of what `read_image` returns, from the header."""
    with open_image(path) as file:
        turned = read_orientation(file) >= 5  # before the size: of a TIFF it changes that
        width, height = file.size
        return (width, height) if turned else (height, width)


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
    """The data set `patterns`, by its arguments alone: uint8 images (count, size, size, 3) and labels (count,).

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


def list_files(folder, classes, unlabeled):
    """The images of one folder per class, and of trees without labels.

    Returns paths (n,) bytes, sorted, labels (n,) int64, and the folders (bytes) before the relative names in the paths.
    Raises FileNotFoundError, which names the folders without images.
    """
    samples = make_dataset(folder, {c: i for i, c in enumerate(classes)}, EXTENSIONS, None, True) if classes else []
    found = {label for _, label in samples}
    empty = [Path(folder, c) for i, c in enumerate(classes) if i not in found]
    trees = [path.resolve() for path in unlabeled]
    for tree in trees:
        more = make_dataset(tree.parent, {tree.name: -1}, EXTENSIONS, None, True)
        empty += [] if more else [tree]
        samples += more
    if empty:
        names = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise FileNotFoundError(f"no image in {names}: an image's name ends in one of {' '.join(EXTENSIONS)}")
    paths, labels = zip(*samples, strict=True)
    folders = [os.fsencode(os.path.join(f, "")) for f in (*([folder] if classes else []), *trees)]
    return np.array([os.fsencode(path) for path in paths]), np.array(labels), folders


def counted(images, count):
    """Yield the images, and show after every 1,000 of them how many of `count` have been read."""
    for done, image in enumerate(images, 1):
        if done % 1000 == 0:
            progress(f"reading images: {done} of {count}")
        yield image


def read_folder(name, folder, classes, cache, unlabeled=None):
    """One folder per class (classes: their names) and any tree `unlabeled`; without classes, `folder` is such a tree.

    The first process lists the files and tells the others; images of one size of up to 96 px are decoded at once.
    """
    trees = [tree for tree in (None if classes else folder, unlabeled) if tree]
    array = None
    try:
        paths, labels, folders = from_first(lambda: list_files(folder, classes, trees))
        names = [os.fsdecode(path) for path in paths] if cache and max(image_size(os.fsdecode(paths[0]))) <= 96 else []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            if len(set(pool.map(image_size, names))) == 1:
                array = np.stack(list(counted(pool.map(read_image, names), len(names))))
    except (BadImage, FileNotFoundError) as error:
        fail(str(error))
    return ImageSet(name, labels, classes, array, paths, folders)


def load_images(name, data_dir=None, train=True, size=32, cache=True, unlabeled=False):
    """A data set by name, or any data_dir with train/ (and val/ or test/), one folder per class.

    size: of `patterns` only, which is generated; unlabeled: also return images without labels, for pre-training.
    Returns an ImageSet, or None where train is False and there is no test set. Exits with an error message if there is
    no data. Downloads only into the folder data/, an empty folder, or one with torchvision's files.
    """
    root, given = Path(data_dir or "data"), name in ("imagenet", "imagenet100", "folder")  # never downloaded
    if data_dir is not None and not root.is_dir():
        fail(f"--data-dir {data_dir} {'is not a folder' if root.exists() else 'does not exist'}")
    if data_dir is not None and (root / "train").is_dir():
        return _load_layout(name, root, train, cache, unlabeled)
    if name == "patterns":
        if data_dir is not None:
            fail(f"--data-dir {data_dir} has no train/, and patterns are generated: give --dataset folder")
        array, labels = make_patterns(4096, size, seed=0) if train else make_patterns(1024, size, seed=1)
        return ImageSet(name, labels, PATTERNS, array)
    if given:
        if name == "folder" and data_dir is not None:
            return read_folder(name, root, (), cache) if train else None
        if name == "folder":
            fail("--dataset folder needs --data-dir DIR, a folder of images. For labels, DIR has train/ and val/")
        found = "" if data_dir is None else f"; {data_dir} has no train/"
        fail(f"--dataset {name} needs --data-dir DIR with train/ and val/, each with one folder per class{found}")
    if data_dir is not None and not _may_download(root):
        where = "name the folder that has them, or an empty one to download into, or leave --data-dir out (data/)"
        fail(f"--data-dir {data_dir} has neither train/ nor torchvision's files of {name}: {where}")
    return _load_torchvision(name, root, train, unlabeled)


def _may_download(root):
    """True for the default folder, an empty one (but for hidden files), and one with files of torchvision's."""
    visible = {path.name for path in root.iterdir() if path.name[0] != "."}
    known = torchvision.datasets.CIFAR10, torchvision.datasets.CIFAR100, torchvision.datasets.STL10
    return root == Path("data") or not visible or any({d.base_folder, d.filename} & visible for d in known)


def _load_layout(name, root, train, cache, unlabeled):
    """train/ and val/ or test/, one folder per class (or none: no labels), and unlabeled/."""
    folder = next((root / s for s in (("train",) if train else ("val", "test")) if (root / s).is_dir()), None)
    if folder is None:
        return None
    parts = root / "train", folder
    classes, have = (sorted(p.name for p in d.iterdir() if p.is_dir() and p.name[0] != ".") for d in parts)
    if name == "imagenet100" and set(IMAGENET100) <= set(classes):
        classes, have = sorted(IMAGENET100), [c for c in have if c in IMAGENET100]
    if odd := sorted(set(have) ^ set(classes)):
        fail(f"{folder} and {root / 'train'} have different class folders: {', '.join(odd[:5])}")
    more = root / "unlabeled"
    return read_folder(name, folder, classes, cache, more if unlabeled and train and more.is_dir() else None)


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
    """A user's Datasets as ImageSets; those for training have labels if there is a test set, which may be None.

    Exits with an error message if a label or the first image is not what OwnImages takes.
    """
    if train is None:
        fail("a data set of your own to test on needs one to train on, too")
    train = OwnImages(train, labelled=test is not None, owner="your training data set")
    test = None if test is None else OwnImages(test, labelled=True, owner="your test data set")
    try:
        for images in (train, test):
            if images is not None:
                images[0]
    except BadImage as error:
        fail(str(error))
    return train, test


def open_images(args, train=None, test=None):
    """(training images, test images or None) that the flags name, or a user's own; exits with a line if none."""
    if train is not None or test is not None:
        train, test = own_images(train, test)
    else:
        options = dict(size=args.image_size, cache=not args.no_cache)
        train = load_images(args.dataset, args.data_dir, True, unlabeled=True, **options)
        test = load_images(args.dataset, args.data_dir, False, **options) if train.classes else None
    if len(train) < args.batch_size:
        fail(f"{len(train)} images are fewer than one batch: give --batch-size {len(train)} or less")
    if getattr(args, "queue", 0) is None:  # the recipe leaves it to the data
        args.queue = min(65536, max(args.batch_size, len(train) // 10))
    return train, test


# ------------------------------------------------------------------- 4. views

CROP_DRAWS, COLOUR_DRAWS = 22, 11
COLOUR = ("brightness", "contrast", "saturation", "hue", "order", "gray", "sigma", "solarize", "flip")
ORDERS = torch.tensor(list(itertools.permutations(range(4))))  # of brightness, contrast, saturation, hue
RESAMPLE = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def random_resized_crop(sizes, draws, scale, ratio=(3 / 4, 4 / 3), area=None, whole=False):
    """torchvision's RandomResizedCrop for many images at once: ten tries, then the centre crop of nearest aspect.

    sizes (n, 2) heights and widths; draws (n, 22) uniform in [0, 1): ten areas, ten aspects, top, left. scale: range of
    the area fraction; area (n,): a given fraction instead of ten drawn ones; whole: if ten tries fail, the whole image.
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


def random_colour(draws, jitter=(0,) * 4, jitter_p=0, gray_p=0, blur_p=0, sigma=(0.1, 2.0), solarize_p=0, flip_p=0.5):
    """Colour parameters of one view, for `colour`: draws (n, 11) uniform -> (n, 9) float32, columns as COLOUR.

    jitter: torchvision ColorJitter's (brightness, contrast, saturation, hue); the rest are probabilities, and the range
    of the blur's sigma in pixels. Identity values: factors 1, hue 0, gray 0, sigma 0, solarize 0, flip 0.
    """
    coin, b, c, s, h, order, gray, blur, sig, sol, flip = draws.T
    on = coin < jitter_p
    low, high = np.maximum(0, 1 - np.array(jitter[:3])), 1 + np.array(jitter[:3])
    factors = [np.where(on, lo + (hi - lo) * d, 1) for lo, hi, d in zip(low, high, (b, c, s), strict=True)]
    hue = np.where(on, jitter[3] * (2 * h - 1), 0)
    blurred = np.where(blur < blur_p, sigma[0] + (sigma[1] - sigma[0]) * sig, 0)
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

    sample(index, sizes, draws) -> (cuts, colours) is the method's: lists over views, of (image index (n,), boxes (n,
    4), output size) and of (n, 9) float32 as `random_colour` gives. A batch is {'views': [uint8 (n, 3, S, S), ...],
    'colour': (n, views, 9), 'index': (n,)}.
    """

    def __init__(self, images, sample, num_draws, seed, interpolation="bilinear"):
        self.images, self.sample, self.num_draws = images, sample, num_draws
        self.seed, self.interpolation = seed, interpolation

    def __getitems__(self, keys):
        epochs, index = np.array(keys).T
        draws = uniform(self.seed, epochs, index, self.num_draws)
        cuts, colours = self.sample(index, self.images.sizes(index), draws)
        views = [np.empty((len(index), size, size, 3), np.uint8) for _, _, size in cuts]
        for row in range(len(index)):
            read = functools.cache(self.images.__getitem__)  # an image that several views use is decoded once
            for view, (image_index, boxes, size) in zip(views, cuts, strict=True):
                view[row] = cut(read(image_index[row].item()), boxes[row], size, self.interpolation)
        views = [torch.from_numpy(view).permute(0, 3, 1, 2) for view in views]
        return {"views": views, "colour": torch.from_numpy(np.stack(colours, 1)), "index": torch.from_numpy(index)}


class EpochSampler:
    """Batches of (epoch, index) keys: a permutation per (seed, epoch), whole batches, this process's slice of each.

    `epoch` and `start` (the first batch, for a resumed epoch) are set before iterating.
    """

    def __init__(self, length, batch_size, seed):
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.epoch = self.start = 0

    def order(self, epoch):
        return torch.randperm(self.length, generator=generator(self.seed, epoch, 1)).tolist()

    def __iter__(self):
        rank, world = rank_and_world()
        epoch, order, local = self.epoch, self.order(self.epoch), self.batch_size // world
        for step in range(self.start, self.length // self.batch_size):
            begin = step * self.batch_size + rank * local
            yield [(epoch, i) for i in order[begin : begin + local]]


def workers_of(args, device):
    """--workers, or what suits: the CPU is busy enough without; a GPU gets up to 12 for each training process."""
    if args.workers is not None or device.type != "cuda" or sys.platform != "linux":  # elsewhere `sample` can't be sent
        return args.workers or 0
    return min(12, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


FORK = "fork" if sys.platform == "linux" else None  # workers share the decoded images instead of copying them


def _start_worker(_):
    for number in (signal.SIGINT, signal.SIGTERM):  # the training process finishes its step and ends its workers
        signal.signal(number, signal.SIG_IGN)


def _end_workers():
    if FORK:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or torch would report their end, after what was the error
    for child in multiprocessing.active_children():
        child.kill()


class Loader(DataLoader):
    """A DataLoader whose error is a line that names the image which cannot be read."""

    def __init__(self, data, device, workers=0, **options):
        if workers:
            atexit.register(_end_workers)  # they ignore SIGTERM, by which Python would end them
            options |= dict(num_workers=workers, multiprocessing_context=FORK, worker_init_fn=_start_worker)
        super().__init__(data, pin_memory=device.type == "cuda", **options)

    def __iter__(self):
        try:
            yield from super().__iter__()
        except BadImage as error:  # from a worker, with its traceback before the message
            fail(str(error).strip().splitlines()[-1].removeprefix("common.BadImage: "))


def make_loader(args, views, device):
    """Batches of `views` as --batch-size, --seed and --workers say; its workers live as long as the run."""
    sampler = EpochSampler(len(views.images), args.batch_size, args.seed)
    workers = workers_of(args, device)
    options = dict(batch_sampler=sampler, collate_fn=default_convert, persistent_workers=workers > 0)
    return Loader(views, device, workers, **options)


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


def gaussian_blur(x, sigma, largest=2.0):
    """A Gaussian with reflected borders; sigma (N,) in pixels, 0 leaves an image as it is; largest: of all sigmas.

    Columns, then rows, by kernels of 5 sigma to each side, which hold all but 6e-7 of a Gaussian (in images of at most
    that size: as wide as they can be mirrored). They are as wide for all sigmas up to 2, whatever else is in the batch.
    """
    sigma = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).clamp_min(1e-3).view(-1, 1)
    reach = min(math.ceil(5 * max(2, largest)), x.shape[2] - 1, x.shape[3] - 1)
    weight = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device) / sigma) ** 2)
    weight = (weight / weight.sum(1, keepdim=True)).repeat_interleave(x.shape[1], 0)[:, None]  # a channel's own
    y = F.pad(x.flatten(0, 1)[None], (reach,) * 4, mode="reflect")
    y = F.conv2d(y, weight.unsqueeze(3), groups=len(weight))
    return F.conv2d(y, weight.unsqueeze(2), groups=len(weight)).view_as(x)


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
    blur = functools.partial(gaussian_blur, largest=p["sigma"].max().item())
    x = _on(x, torch.nonzero(p["sigma"]).flatten(), blur, on["sigma"])
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


def own_part(x):
    """This process's rows of a tensor (n, ...): the processes share it out in rank order."""
    rank, world = rank_and_world()
    return x.tensor_split(world)[rank]


def gather_uneven(x):
    """Concatenate a tensor (n, ...) over the processes, in rank order, where n may differ and be 0. No gradient."""
    return torch.cat([part.to(x.device) for part in from_all(x.cpu())])


class CentreCrops(Dataset):
    """Images as an evaluation sees them, uint8 (3, size, size): as they are where the size fits, else the centre crop
    of an image whose shorter side is 256/224 of it."""

    def __init__(self, images, size, interpolation="bilinear"):
        self.images, self.size, self.interpolation = images, size, interpolation

    def __getitem__(self, i):
        image = self.images[i]
        height, width = image.shape[:2]
        if (height, width) != (self.size, self.size):
            side = min(height, width) * 224 / 256  # the centre that a resize to 256/224 and a centre crop leave
            image = cut(image, ((height - side) / 2, (width - side) / 2, side, side), self.size, self.interpolation)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@contextlib.contextmanager
def evaluation_mode(module):
    """A module in evaluation mode, and afterwards each of its parts in the mode in which it was."""
    modes = [(part, part.training) for part in module.modules()]
    yield module.eval()
    for part, training in modes:
        part.training = training


@torch.no_grad()
def output_width(module, image_size):
    """How many numbers an encoder, (N, 3, H, W) -> (N, width), gives for an image: one of zeros is encoded."""
    device = next((p.device for p in module.parameters()), "cpu")
    with evaluation_mode(module):
        return module(torch.zeros(1, 3, image_size, image_size, device=device)).flatten(1).shape[1]


@torch.no_grad()
def extract_features(encoder, images, info, device, batch_size=256, workers=0, amp=False, whole=True):
    """Features of every image in evaluation mode: (n, width) float32 on the CPU, in order, on every process.

    encoder: (N, 3, H, W) -> (N, width), on the device; images: len and [i] -> uint8 (H, W, 3); info: image_size, mean,
    std, interpolation, as in backbone.pt; amp: bf16. Each process encodes its part (`own_part`); whole=False returns
    that only. Raises RuntimeError if the encoder's weights or statistics have changed.
    """
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    mine = own_part(torch.arange(len(images)))
    crops = CentreCrops(images, info["image_size"], info["interpolation"])
    # A process without images encodes one for the features' width, and drops it.
    crops = torch.utils.data.Subset(crops, mine.tolist() or [0])
    features = []
    with evaluation_mode(encoder):
        for batch in Loader(crops, device, workers, batch_size=batch_size):
            x = normalize(batch.to(device, non_blocking=True).float().div_(255), info["mean"], info["std"])
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                features.append(encoder(x).flatten(1).float().cpu())
    for key, value in encoder.state_dict().items():
        if not torch.equal(before[key].nan_to_num(), value.nan_to_num()):
            raise RuntimeError(f"evaluation changed the frozen encoder: {key}")
    features = torch.cat(features)[: len(mine)]
    return gather_uneven(features) if whole else features


@torch.no_grad()
def knn_scores(train_x, train_y, test_x, ks, temperature, num_classes):
    """Weighted k-nearest-neighbour class scores for several k at once (Wu et al., arXiv 1805.01978).

    train_x (n, d) and train_y (n,) int64 in [0, num_classes): the bank, or in a process group this process's part of
    it, which may be empty; test_x (m, d): the same, whole, on every process. Both are L2-normalised here. A neighbour
    votes for its class with exp(cosine / temperature), scaled so that the nearest one's vote is 1; k above the bank's
    size counts all. Each process finds the nearest in its part for a chunk of test images, and the nearest of all
    these are the nearest in the bank: exact but for the rounding of matrix products, in bounded memory; equally near
    ones come in any order. Returns {k: (m, num_classes) float32 on the CPU}, on every process.
    """
    bank, queries = (F.normalize(x.float(), dim=1) for x in (train_x, test_x))
    train_y, most = train_y.to(bank.device), max(ks)
    longest = int(gather_uneven(torch.tensor([len(bank)])).max())  # all processes take the same chunks
    scores = {k: [] for k in ks}
    for chunk in queries.split(max(1, 2**26 // longest)):
        similarity, row = (chunk @ bank.T).topk(min(most, len(bank)), dim=1)
        similarity, label = (gather_uneven(x.T).T for x in (similarity, train_y[row]))
        similarity, column = similarity.topk(min(most, similarity.shape[1]), dim=1)
        label, vote = label.gather(1, column), ((similarity - similarity[:, :1]) / temperature).exp()
        for k, chunks in scores.items():
            score = torch.zeros(len(chunk), num_classes, device=bank.device)
            chunks.append(score.scatter_add_(1, label[:, :k], vote[:, :k]).cpu())
    return {k: torch.cat(chunks) for k, chunks in scores.items()}


def knn_predict(train_x, train_y, test_x, k, temperature, num_classes):
    """The class with the highest weighted k-nearest-neighbour score: (m,) int64. Arguments as `knn_scores`."""
    return knn_scores(train_x, train_y, test_x, (k,), temperature, num_classes)[k].argmax(1)


def knn_accuracy(encoder, train, test, info, device, ks=(20, 200), temperature=0.07, workers=0, amp=False):
    """Top-1 accuracy in percent for each k: {k: float}. The bank is the labelled training set, augmented by nothing."""
    train, options = train.labelled(), dict(workers=workers, amp=amp)
    train_x = extract_features(encoder, train, info, device, whole=False, **options).to(device)
    test_x = extract_features(encoder, test, info, device, **options).to(device)
    train_y, truth = own_part(torch.from_numpy(train.labels)), torch.from_numpy(test.labels)
    scores = knn_scores(train_x, train_y, test_x, ks, temperature, len(train.classes))
    return {k: 100 * (s.argmax(1) == truth).float().mean().item() for k, s in scores.items()}


@torch.no_grad()
def embedding_health(q, k):
    """Label-free figures that show collapse, of unit embeddings q and their positives k, both (n, d).

    std: mean per-dimension standard deviation times sqrt(d), 1 on a uniform sphere, 0 collapsed; rank: effective rank,
    exp of the singular values' entropy, at most min(n, d); alignment: mean squared distance of positives; uniformity:
    log mean exp(-2 squared distance) of pairs, -4 at best and 0 collapsed. (Wang and Isola, arXiv 2005.10242; Roy and
    Vetterli's effective rank.)
    """
    q, k = F.normalize(q.float(), dim=1), F.normalize(k.float(), dim=1)
    share = torch.linalg.svdvals(q - q.mean(0))
    share = share / share.sum().clamp_min(1e-12)
    pairs = torch.pdist(q) if len(q) > 1 else q.new_zeros(1)
    return dict(
        std=(q.std(0, correction=0).mean() * q.shape[1] ** 0.5).item(),
        rank=torch.special.entr(share).sum().exp().item(),
        alignment=(q - k).square().sum(1).mean().item(),
        uniformity=pairs.square().mul(-2).exp().mean().log().item(),
    )


PLAIN = dict(zero_init_last=False)  # residual branches start as torchvision's and MoCo's do
ARCHS = {  # short name: (timm name, what differs from it)
    "vit_micro": ("vit_tiny_patch16_224", dict(embed_dim=64, depth=3, num_heads=2)),
    "vit_tiny": ("vit_tiny_patch16_224", {}),
    "vit_small": ("vit_small_patch16_224", {}),
    "vit_base": ("vit_base_patch16_224", {}),
    "resnet_micro": (
        "resnet18",
        dict(zero_init_last=False, layers=(1, 1, 1, 1), channels=(16, 32, 64, 128), stem_type="deep", stem_width=8),
    ),
    "resnet_mini": ("resnet18", dict(zero_init_last=False, layers=(1, 1, 1, 1), channels=(16, 32, 64, 128))),
    "resnet18": ("resnet18", PLAIN),
    "resnet34": ("resnet34", PLAIN),
    "resnet50": ("resnet50", PLAIN),
}


def backbone_info(arch, image_size, patch_size, norm=IMAGENET_NORM, interpolation="bilinear", **more):
    """What backbone.pt says of an encoder besides its weights: how timm builds it, and what its images are like.

    arch: a name of ARCHS, any timm model, or None for a user's own module. Plain ResNets get the 3 x 3 stem for images
    of up to 64 px (resnet_mini with stride 2, resnet_micro none: they are to be fast on a CPU); ViTs the given patch,
    MoCo v3's initialisation (except of the patch embedding, which timm leaves out), and a position embedding that is
    interpolated for other image sizes.
    """
    like = dict(image_size=image_size, mean=norm[0], std=norm[1], interpolation=interpolation, **more)
    if arch is None:
        return dict(timm_name=None, create_kwargs={}, stem="own", **like)
    if arch not in ARCHS and not timm.is_model(arch):
        fail(f"unknown --arch {arch}: give {', '.join(ARCHS)}, or a timm model")
    name, kwargs = ARCHS.get(arch, (arch, {}))
    kwargs = {**kwargs, "num_classes": 0}
    if name.startswith(("vit_", "deit")):
        if image_size % patch_size:
            fail(f"--patch-size {patch_size} does not divide --image-size {image_size}")
        kwargs |= dict(img_size=image_size, patch_size=patch_size, weight_init="moco", dynamic_img_size=True)
    plain = name.removeprefix("resnet").isdigit()  # resnet26d, resnetv2_50, ... have stems of their own
    small = plain and image_size <= 64 and arch != "resnet_micro"
    stem = "timm" if not small else "3x3-s2" if arch == "resnet_mini" else "3x3"
    return dict(timm_name=name, create_kwargs=kwargs, stem=stem, **like)


def arch_name(info):
    """The name by which --arch calls an encoder that `backbone_info` describes."""
    name, given = info["timm_name"], info["create_kwargs"].items()
    fitting = (short for short, (timm_name, more) in ARCHS.items() if timm_name == name and more.items() <= given)
    return next(fitting, name or "own encoder")


def build_backbone(info, sizes=(), **more):
    """The untrained timm model without classifier that `info` describes, (N, 3, H, W) -> (N, width).

    sizes: of the images that it will see, too; more: for timm. Exits with a line if it does not take such images.
    """
    try:
        backbone = timm.create_model(info["timm_name"], **info["create_kwargs"], **more)
        for size in {info["image_size"], *sizes}:
            output_width(backbone, size)
    except (TypeError, AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        fail(f"timm's {info['timm_name']} does not work with these arguments and image size: {reason}")
    if info["stem"] in ("3x3", "3x3-s2"):  # no 7 x 7 convolution and no max-pool, as CIFAR work has it
        stride = 2 if info["stem"] == "3x3-s2" else 1
        backbone.conv1 = nn.Conv2d(3, backbone.conv1.out_channels, 3, stride, padding=1, bias=False)
        backbone.maxpool = nn.Identity()
    return backbone


def load_backbone(path, encoder=None, module=None):
    """Load a pre-trained backbone from a run folder, a last.pt or a backbone.pt.

    encoder: 'query' or 'momentum'; by default the one the method's authors evaluate, which is what backbone.pt holds.
    module: gets the weights; without it timm builds what the file names, which a user's own encoder does not. Returns
    (module in evaluation mode, info); info has image_size, mean, std, interpolation, method, encoder, timm_name,
    create_kwargs, stem. Every key must match. Exits with a line if the file does not fit.
    """
    path = Path(path)
    if path.is_dir():
        path = path / ("backbone.pt" if encoder is None else "last.pt")
    if not path.is_file():
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
        if module is None and info["timm_name"] is None:
            fail(f"{path} holds a user's own encoder: give it, too, as eval_knn.main(args, encoder=MODULE)")
        backbone = build_backbone(info) if module is None else module
        backbone.load_state_dict(weights)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:600]}"
        fail(f"{path} is not a checkpoint of this project, or does not fit its encoder: {reason}")
    return backbone.eval(), info


# What eval_knn.py and eval_linear.py share: the encoder, the images and the floors (flags: EVALUATION_FLAGS).


def open_encoder(args, module=None, own=False):
    """Join torchrun's process group if there is one; returns (device, encoder in evaluation mode, info).

    module: a user's own encoder, which gets the checkpoint's weights, or, if there is none, is judged as it is on the
    first process. own: the images are a user's. Fills in args.workers, and args.dataset and data_dir from the run.
    """
    given = args.checkpoint is not None or module is not None
    if args.random_init == given or args.random_init != (args.arch is not None):
        fail("give a checkpoint, or --arch NAME --random-init")
    if args.checkpoint and (args.image_size or args.patch_size):
        fail("--image-size and --patch-size go without a checkpoint, which has its own")
    device = join_processes(args)
    torch.backends.cuda.matmul.allow_tf32 = False  # neighbours are compared in float32
    args.workers = workers_of(args, device)
    if args.checkpoint is None:
        args.dataset, size = args.dataset or "patterns", args.image_size or 32
        patch = args.patch_size or (2 if size <= 32 else 16)
        info = backbone_info(args.arch, size, patch, method="no run", encoder="given")
        torch.manual_seed(args.seed)
        encoder = build_backbone(info) if module is None else module
        if rank_and_world()[1] > 1:
            encoder.load_state_dict(from_first(encoder.cpu().state_dict))
        return device, encoder.eval().to(device), info
    encoder, info = load_backbone(args.checkpoint, args.encoder, module)
    if args.dataset is None and not own:
        folder = Path(args.checkpoint) if os.path.isdir(args.checkpoint) else Path(args.checkpoint).parent
        try:
            config = json.loads((folder / "config.json").read_text())
            args.dataset, args.data_dir = config["dataset"], args.data_dir or config["data_dir"]
        except (OSError, ValueError, TypeError, KeyError):
            fail("there is no readable config.json beside the checkpoint to tell its data set: give --dataset")
    return device, encoder.to(device), info


def open_data(args, info, train=None, test=None, labels=True):
    """(training images, test images or None), labelled ones only. train, test: a user's own Datasets, for --dataset's.

    Own training images have labels if there is a test set. labels: exits with a line if there is no test set, or only
    one class.
    """
    if train is None and test is None:
        train, test = (load_images(args.dataset, args.data_dir, t, size=info["image_size"]) for t in (True, False))
    else:
        args.dataset, args.data_dir = "own", None
        train, test = own_images(train, test)
    if labels and (test is None or len(train.classes) < 2):
        fail("an evaluation needs labels of two classes: --data-dir with train/ and val/ or test/, one folder a class")
    return train.labelled() if train.classes else train, test and test.labelled()


def floor_encoders(args, info, device, count):
    """{name: encoder}: what a trained encoder has to beat: raw pixels of up to 200,000 images, and itself untrained."""
    torch.manual_seed(args.seed)
    pixels = nn.AvgPool2d(max(1, info["image_size"] // 32))  # at most 63 x 63 of them
    floors = {"raw pixels": pixels} if count <= 200_000 else {}
    if info["timm_name"] and not args.random_init:
        floors["untrained"] = build_backbone(info).to(device)
    return {} if args.no_floors else floors


def protocol(args, info, train, test):
    """What an evaluation's numbers depend on, as lines."""
    scale = f"if not of {info['image_size']} px: shorter side 256/224 of it, centre crop, {info['interpolation']}"
    same = train.array is not None and train.array.shape[1:3] == (info["image_size"],) * 2
    precision = "bf16" if args.amp else "float32 (CUDA's convolutions: TF32)"
    return f"""encoder {arch_name(info)} of {info["method"]}, the {info["encoder"]} encoder, evaluation mode; \
features: before the projector, after the last norm and pooling; {precision}
data {args.dataset}: {len(train)} training and {len(test or ())} test images, {len(train.classes)} classes; \
{"no resize" if same else scale}; mean {tuple(info["mean"])}, std {tuple(info["std"])}"""


# ------------------------------------------------------------------- 6. flags


def number(kind, least, most=10**9):
    """An argparse type: an int or a float from `least` to `most`."""

    def parse(text):
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least:g} to {most:g}")
        return value

    parse.__name__ = kind.__name__  # argparse's word for a text that is no number
    return parse


NATURAL, COUNT, POSITIVE, SHARE = number(int, 0), number(int, 1), number(float, 1e-9), number(float, 0, 1)
AT_LEAST_TWO, SEED, WORKERS = number(int, 2), number(int, 0, 2**63 - 1), number(int, 0, 1024)

# fmt: off
FLAGS = dict(  # of every training run: group, flag, argparse's options
    data=dict(
        dataset=dict(default="patterns", choices=DATASETS, help="data set, and whose recipe is used"),
        data_dir=dict(metavar="DIR", help="where it is, or is downloaded to; train/ and val/ or test/ are read"),
        no_cache=dict(action="store_true", help="do not keep small images decoded in memory"),
        arch=dict(metavar="NAME", help="vit_tiny, vit_small, vit_base, resnet18, resnet50, ..., or any timm model"),
        image_size=dict(type=COUNT, metavar="N", help="px of a view"),
        patch_size=dict(type=COUNT, metavar="N", help="px, of a ViT"),
    ),
    recipe=dict(
        variant=dict(choices=("paper", "released"), default="paper", help="the paper's form, or that of its code"),
        epochs=dict(type=COUNT, metavar="N", help="over which the schedules run"),
        batch_size=dict(type=AT_LEAST_TWO, metavar="N", help="global: over all processes"),
        lr=dict(type=POSITIVE, metavar="X", help="at the recipe's batch; scaled linearly with the batch"),
        seed=dict(type=SEED, default=0, metavar="N", help="of everything that is drawn"),
    ),
    operation=dict(  # these may change when a run goes on
        out=dict(metavar="DIR", help="folder of the run (runs/METHOD-DATASET-ARCH-sSEED...)"),
        resume=dict(default="auto", metavar="auto|PATH|none", help="auto: go on from what is in --out"),
        max_steps=dict(type=COUNT, metavar="N", help="stop and save after N steps, counted over resumes"),
        save_every=dict(type=COUNT, default=1, metavar="N", help="save every N epochs"),
        keep_every=dict(type=NATURAL, default=0, metavar="N", help="keep a copy every N epochs; 0: the last two only"),
        knn_every=dict(type=NATURAL, default=10, metavar="N", help="judge every N epochs; 0: never"),
        device=dict(default="auto", choices=("auto", "cuda", "cpu"), help="auto: a GPU where there is one"),
        amp=dict(default="auto", choices=("auto", "bf16", "off"), help="auto: bf16 on GPUs that have it"),
        compile=dict(action="store_true", help="compile the encoders: minutes at the start, faster steps"),
        grad_checkpoint=dict(action="store_true", help="less memory, more time; batch norm counts a batch twice"),
        workers=dict(type=WORKERS, metavar="N", help="loader processes for each training process"),
        tensorboard=dict(action="store_true", help="write its events, too"),
        show_views=dict(metavar="PNG", help="write what the network is fed, and exit"),
    ),
)
# fmt: on
EVALUATION_FLAGS = dict(  # of eval_knn.py and eval_linear.py
    encoder=dict(choices=("query", "momentum"), help="default: the one that the method's authors evaluate"),
    random_init=dict(action="store_true", help="an untrained encoder, --arch, instead of a checkpoint"),
    arch=dict(metavar="NAME", help="with --random-init: vit_tiny, resnet18, ..., or any timm model"),
    image_size=dict(type=COUNT, metavar="N", help="without a checkpoint (32)"),
    patch_size=dict(type=COUNT, metavar="N", help="the same, of a ViT (2 up to 32 px, else 16)"),
    dataset=dict(choices=DATASETS, help="default: what the encoder was trained on, or patterns"),
    data_dir=dict(metavar="DIR", help="default: where that was"),
    seed=dict(type=NATURAL, default=0, metavar="N", help="of what is drawn"),
    workers=dict(type=WORKERS, metavar="N", help="loader processes (up to 12 for a GPU, else 0)"),
    device=dict(default="auto", choices=("auto", "cuda", "cpu"), help="auto: a GPU where there is one"),
    amp=dict(action="store_true", help="encode in bf16"),
    no_floors=dict(action="store_true", help="leave out raw pixels and the untrained encoder"),
)
OPERATING = {*FLAGS["operation"], "data_dir", "no_cache", "bf16", "name", "eval_every"}


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that there are."""

    def _get_help_string(self, action):
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are one line, as every other mistake's, without abbreviations."""

    def __init__(self, prog, description, **options):
        super().__init__(prog, description=description, formatter_class=Help, allow_abbrev=False, **options)

    def error(self, message):
        fail(f"{message} (see python {self.prog} --help)")


def add_flags(parser, flags):
    for flag, options in flags.items():
        parser.add_argument("--" + flag.replace("_", "-"), **options)


def evaluation_parser(prog, doc):
    parser = ArgumentParser(prog, doc.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", help="a run's folder, a last.pt or a backbone.pt")
    add_flags(parser, EVALUATION_FLAGS)
    return parser


def run_parser(prog, doc, evaluated):
    """The flags of every training run. doc: the script's docstring; evaluated: the encoder that the authors judge."""
    about = "Defaults are those of --dataset patterns, generated here; --dataset imagenet --help shows ImageNet's."
    parser = ArgumentParser(prog, f"{doc.splitlines()[0]} {about}", add_help=False)
    for name, flags in FLAGS.items():
        add_flags(parser.add_argument_group(name), flags)
    parser.set_defaults(evaluated=evaluated)
    return parser


def parse_run(parser, argv, recipe):
    """The command line as a namespace, with a recipe's values as defaults. Exits with a line on a mistake.

    recipe(given) -> {name: value}, of flags and of constants; given: the namespace of the command line alone, where a
    flag that it does not have is None. Added: method, norm (mean, std), backbone (see `backbone_info`), name (the
    run's).
    """
    given = parser.parse_known_args(argv)[0]
    parser.set_defaults(**recipe(given))
    parser.add_argument("-h", "--help", action="help", help="show this and exit")
    args = parser.parse_args(argv)
    args.method = parser.prog.removesuffix(".py")
    usual = {name: parser.get_default(name) for name in ("epochs", "lr", "batch_size")}
    args.warmup *= min(1, args.epochs / usual["epochs"])  # a short run warms up in proportion
    args.min_lr *= args.lr * args.batch_size / (usual["lr"] * usual["batch_size"])  # the last rate follows the first
    args.norm = NORMS.get(getattr(args, "norm", args.dataset), IMAGENET_NORM)
    more = dict(interpolation=args.interpolation, method=args.method, encoder=args.evaluated)
    args.backbone = backbone_info(args.arch, args.image_size, args.patch_size, args.norm, **more)
    general = {"evaluated"}.union(*FLAGS.values()) - {"variant"}
    changed = [flag for flag in vars(given) if flag not in general and getattr(args, flag) != parser.get_default(flag)]
    parts = [args.method, args.dataset, args.arch, f"s{args.seed}", *(f"{f}{getattr(args, f)}" for f in changed)]
    args.name = "".join(c if c.isalnum() or c in "-_." else "+" for c in "-".join(parts))
    if args.batch_size % (world := int(os.environ.get("WORLD_SIZE", 1))):
        fail(f"--batch-size {args.batch_size} (global) cannot be shared out over {world} processes")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        fail("--tensorboard needs a package: pip install tensorboard")
    return args


# --------------------------------------------------------------------- 7. run


class Run:
    """The life of a run: its folder, going on, what is said and logged, stopping, saving. Nothing of training.

        run = Run(args, device)                    # what is wrong with --out is said here; nothing is written
        run.begin(model, optimizer, train, ...)    # goes on from last.pt, if there is one; introduces the run
        while run.goes_on():
            for batch in run.batches(loader):      # what is left of this epoch; ends early if asked to stop
                run.log(metrics)                   # counts the step
            run.end_epoch()                        # saves; then evaluates; then writes the record
        run.finish()

    step: steps made; steps: of an epoch; total: of all epochs; end: where this call stops (--max-steps).
    """

    health_images = 1024  # the last images of an epoch, whose embeddings the health figures are of

    def __init__(self, args, device, train=None, encoder=None):
        """train, encoder: a user's own, which the run's name and backbone.pt tell."""
        if train is not None:
            args.name = args.name.replace(f"-{args.dataset}-", "-own-", 1)
        if encoder is not None:
            args.name, args.arch = args.name.replace(f"-{args.arch}-", "-own-", 1), "own"
            args.backbone |= dict(timm_name=None, create_kwargs={}, stem="own")
            if args.grad_checkpoint and not hasattr(encoder, "set_grad_checkpointing"):
                fail("--grad-checkpoint needs an encoder with timm's set_grad_checkpointing, which yours has not")
        args.out = args.out or f"runs/{args.name}"
        self.args, self.device, self.out = args, device, Path(args.out)
        self.config = json.loads(json.dumps(vars(args)))
        self.checkpoint = None if getattr(args, "show_views", None) else open_run(self.out, self.config, args.resume)
        self.step, self.record, self.saved, self.stopping = 0, None, None, False
        self.start_epoch()

    def start_epoch(self):
        self.names, self.sums, self.count = [], None, 0  # of the metrics that are averaged, and how many steps
        self.last, self.pairs = {}, []  # the others; embeddings for the health figures
        self.seen = 0, 0.0  # at the last check: steps, and the sum of their gradients' norms

    def begin(self, model, optimizer, train, test=None, encoder=None, chance=None, about="", **options):
        """Load what last.pt holds and say what the run's numbers depend on.

        encoder: what backbone.pt gets, and kNN judges on `test` every --knn-every epochs; or `evaluate`, a function
        without arguments that returns {name: score}, asked every `every` epochs and at the end. chance: the loss at
        equal logits. about: the method's own words. Other options: what else is saved, by name: tensors, or objects
        with state_dict and load_state_dict.
        """
        args, self.encoder, self.chance = self.args, encoder, chance
        self.evaluate, self.every = options.pop("evaluate", None), options.pop("every", 0)
        self.parts = dict(model=model, optimizer=optimizer, **options)
        self.images, self.steps = len(train), len(train) // args.batch_size
        self.total = args.epochs * self.steps
        self.end = min(self.total, args.max_steps or self.total)
        if test is not None and args.knn_every:
            judged = encoder, train, test, args.backbone, self.device
            how = dict(workers=workers_of(args, self.device), amp=args.bf16)
            self.evaluate = lambda: {f"knn{k}_top1": v for k, v in knn_accuracy(*judged, **how).items()}
            self.every = args.knn_every
        records = self.restore() if self.checkpoint else []
        self.resumed_at = self.step
        self.same_everywhere()
        self.stop = StopRequest()
        if not self.goes_on() and not self.record:
            return
        environment = versions(self.device)
        say(", ".join(f"{k} {v}" for k, v in environment.items()))
        say(introduction(args, encoder, train, test, self.steps, chance, about) if encoder is not None else about)
        records = records or [dict(step=self.step, **environment, arguments=self.config, chance=chance)]
        if rank_and_world()[0] == 0:
            for unfinished in self.out.glob("*.tmp"):  # of a process that was killed in a write
                unfinished.unlink()
            lines = "".join(json.dumps(record) + "\n" for record in records)
            write_whole(self.out / "config.json", lambda path: path.write_text(json.dumps(self.config, indent=1)))
            write_whole(self.out / "metrics.jsonl", lambda path: path.write_text(lines))
        if self.record:
            self.end_record()

    def restore(self):
        """Take over a last.pt; returns the records up to it. Exits with a line if it is another's, or does not fit."""
        state = load_checkpoint(self.checkpoint)
        rank, world = rank_and_world()
        try:
            here, there = self.config | {"images": self.images}, state["config"] | {"images": state["images"]}
            for name in ("method", "arch", "image_size", "batch_size", "images"):
                if here.get(name) != there.get(name):
                    fail(f"{self.checkpoint} is of {name} {there.get(name)}, not {here.get(name)}")
            for name, part in self.parts.items():
                part.copy_(state[name]) if torch.is_tensor(part) else part.load_state_dict(state[name])
            self.step, self.record, log = state["step"], state["record"], state["log"]
            self.names, self.count, sums = log["names"], log["count"], log["sums"]
            if self.count:
                self.sums = (sums[rank] if len(sums) == world else sums.mean(0)).to(self.device)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__} {' '.join(str(error).split())[:300]}"
            fail(f"{self.checkpoint} is not a last.pt of this method, or does not fit its model: {reason}")
        say(f"going on at step {self.step}")
        self.saved = self.step
        records = [r for r in read_metrics(self.out / "metrics.jsonl") if r.get("step", 0) <= self.step]
        if self.record and (not records or any(r.get("epoch") == self.record["epoch"] for r in records)):
            self.record = None  # written already, or in another folder
        return records

    def same_everywhere(self):
        """Exit with a line unless the processes have the same flags, images and checkpoint."""
        when = {"max_steps", "save_every", "keep_every", "knn_every", "eval_every"}  # all have to act together
        flags = {name: value for name, value in self.config.items() if name not in OPERATING - when}
        marks = from_all((flags, self.images, self.step))
        if any(mark != marks[0] for mark in marks):
            fail("the processes differ in flags, images or checkpoint: --data-dir and --out must be on shared disks")

    def goes_on(self):
        return self.step < self.end and not self.stopping

    def batches(self, loader):
        """The batches that are left of this epoch."""
        sampler = loader.batch_sampler
        sampler.epoch, sampler.start = divmod(self.step, self.steps)
        self.first, self.waited = self.step, 0.0
        self.epoch_began = ready = time.perf_counter()
        for batch in loader:
            self.waited += time.perf_counter() - ready
            yield batch
            self.stopping = self.stop.agreed(self.step, self.pace())
            if self.step == self.end or self.stopping:
                break
            ready = time.perf_counter()

    def pace(self):
        """Seconds a step."""
        return (time.perf_counter() - self.epoch_began) / max(1, self.step - self.first)

    def log(self, metrics):
        """Count a step. metrics: 0-d tensors, which are averaged over the epoch and the processes; numbers, of which
        the last is kept; q and k, the embeddings (n, C) of images and of their positives, for the health figures.
        """
        pair = [metrics.pop(name).detach() for name in ("q", "k") if name in metrics]
        tensors = {name: v.detach().double() for name, v in metrics.items() if torch.is_tensor(v)}
        self.last = {name: v for name, v in metrics.items() if name not in tensors}
        values = torch.stack([*tensors.values()])
        if self.names != [*tensors]:  # an epoch's first step, or other flags than before the run was broken off
            self.sums, self.count = None, 0
        self.names, self.sums = [*tensors], values if self.sums is None else self.sums + values
        self.step, self.count = self.step + 1, self.count + 1
        if pair and -self.step % self.steps * self.args.batch_size < self.health_images:
            self.pairs.append(torch.stack(pair, 1))
        if self.step == self.resumed_at + 1:
            say(f"step {self.step}: loss {metrics['loss']:.4f}")
        if self.step % 10 == 0:
            self.check()
            where = f"epoch {-(-self.step // self.steps)}/{self.args.epochs}  step {self.step}/{self.total}"
            pace, left = self.pace(), self.end - self.step
            speed = f"{self.args.batch_size / pace:.0f} images/s  {pace * left / 60:.1f} min left"
            progress(f"{where}  loss {metrics['loss']:.3f}  {speed}")

    def check(self):
        """Stop in words if the loss or the gradient is not finite (nothing is saved since); warn of a jump."""
        if self.count and not self.sums.isfinite().all():
            advice = "go on without bf16, or with a lower --lr in a new --out (and --resume PATH)"
            fail(f"the loss or its gradient is not finite by step {self.step}; last.pt is from before: {advice}")
        norms = self.sums[self.names.index("grad_norm")].item() if "grad_norm" in self.names else 0.0
        (count, before), self.seen = self.seen, (self.count, norms)
        if count and norms - before > 1000 * before / count:
            say(f"warning: before step {self.step} the gradient's norm has jumped to over a hundred times its mean")

    def means(self):
        """{name: mean over the steps since the last record and over the processes}."""
        mean = gather_uneven(self.sums[None]).mean(0) / self.count
        return dict(zip(self.names, mean.tolist(), strict=True))

    def end_epoch(self):
        """After the last batch, or a request to stop: save, then evaluate, then write the record."""
        self.check()
        self.stopping = self.stopping or self.stop.agreed()
        epoch, left = divmod(self.step, self.steps)
        if left == 0:
            speed = dict(data_wait=self.waited / (time.perf_counter() - self.epoch_began))
            speed |= dict(images_per_s=self.args.batch_size / self.pace())
            self.record = dict(epoch=epoch, step=self.step, **self.means(), **self.health(), **self.last, **speed)
            if self.chance is not None:
                self.record["below_chance"] = self.chance - self.record["loss"]
            self.start_epoch()
        kept = left == 0 and self.args.keep_every and epoch % self.args.keep_every == 0
        if left or kept or not self.goes_on() or epoch % self.args.save_every == 0:
            self.save(f"epoch-{epoch:04d}.pt" if kept else None)
        if self.record:
            self.end_record()

    def health(self):
        """`embedding_health` of the epoch's last images, or nothing."""
        if not self.pairs:
            return {}
        pairs = gather_uneven(torch.cat(self.pairs)[-self.health_images :])
        return embedding_health(*pairs[-self.health_images :].unbind(1))

    def end_record(self):
        """Write the record, with what an evaluation finds if one is due; asked to stop, leave that to the next call."""
        due = self.evaluate and (self.step == self.total or (self.every and self.record["epoch"] % self.every == 0))
        if due and self.stopping:
            return
        if due:
            with self.evaluation():
                self.record |= self.evaluate()
        write_metrics(self.out, self.record, self.args.epochs, self.args.tensorboard)
        if self.record["epoch"] >= 3 and self.record.get("std", 1) < 0.1:
            say("warning: std is below 0.1 (1: spread over the sphere): the embeddings have collapsed")
        self.record = None

    @contextlib.contextmanager
    def evaluation(self):
        """What takes long between steps: everything is saved before, so that a request to stop is answered at once."""
        if self.saved != self.step:
            self.save()
        self.stop.at_once = True
        self.stop.leave()
        yield
        self.stop.at_once = False

    def save(self, keep=None):
        """Write backbone.pt, keep (a third name) and last.pt, from the first process; last.pt becomes last.prev.pt.

        last.pt comes last: a run that was killed before it writes all of them again. Weights that the last step threw
        out of range are not saved.
        """
        sums = gather_uneven(self.sums[None]).cpu() if self.count else None
        state = {name: part if torch.is_tensor(part) else part.state_dict() for name, part in self.parts.items()}
        if not is_finite(state):
            fail(f"weights are not finite after step {self.step}, which is not saved: give a lower --lr, a new --out")
        state |= dict(step=self.step, record=self.record, log=dict(names=self.names, count=self.count, sums=sums))
        state |= dict(config=self.config, images=self.images)
        if rank_and_world()[0] == 0:
            if self.encoder is not None:
                state["backbone"] = self.args.backbone
                weights = {"state_dict": self.encoder.state_dict()}
                save_checkpoint(self.out / "backbone.pt", self.args.backbone | weights)
            if keep:
                save_checkpoint(self.out / keep, state)
            save_checkpoint(self.out / "last.pt", state, keep_previous=True)
        self.saved = self.step

    def finish(self):
        """Say how it ended and leave the process group; exit status 75 if it was asked to stop."""
        asked = self.stopping and (self.step < self.end or self.record is not None)  # or there is nothing left to do
        self.result = next((r for r in reversed(read_metrics(self.out / "metrics.jsonl")) if "loss" in r), {})
        if self.step == self.resumed_at:
            last = json.dumps(self.result)
            say(f"{self.out} is at step {self.step} of {self.end} already. Its last epoch: {last}")
        elif self.step < self.total or self.record:  # asked to stop in the last step: its evaluation is left
            loss = f" (mean loss since the last record: {self.means()['loss']:.4f})" if self.count else ""
            why = " on request (exit status 75)" * asked
            where = f"stopped at step {self.step} of {self.total}"
            last_words(f"{where}{why}{loss}; the same command goes on from {self.out}")
        elif self.encoder is not None:
            say(f"finished. Judge it, with labels: python eval_knn.py {self.out}; python eval_linear.py {self.out}")
        for number, handler in self.stop.before.items():
            signal.signal(number, handler)
        if dist.is_initialized():
            dist.destroy_process_group()
        if asked:
            raise SystemExit(75)


def introduction(args, encoder, train, test, steps, chance, about):
    """The first lines of a method's run: everything that its numbers depend on."""
    world, size = rank_and_world()[1], sum(p.numel() for p in encoder.parameters()) / 1e6
    memory = "read when needed" if train.array is None else f"{train.array.nbytes / 2**20:.0f} MiB decoded"
    queue = getattr(args, "queue", None)
    share = f"; the queue is {100 * queue / len(train):.1f} % of the images" if queue else ""
    share += ", much above the usual tenth: --queue" if queue and queue > len(train) / 5 else ""
    return f"""{args.method}, {about}; variant {args.variant}; chance level of the loss {chance:.3f}{share}
encoder {args.arch}, {size:.2f} M parameters, {args.image_size} px; evaluated: the {args.evaluated} encoder
data {train.name}: {len(train)} training images ({memory}), {len(test) if test else "no"} test images, \
{len(train.classes) or "no"} classes; mean {args.norm[0]}, std {args.norm[1]}
batch {args.batch_size} over {world} process(es), {args.batch_size // world} each; {steps} steps an epoch, \
{args.epochs} epochs; {"bf16" if args.bf16 else "TF32" if torch.backends.cuda.matmul.allow_tf32 else "float32"}; \
batch-norm groups {args.bn_groups}
rate {args.lr:g} at batch {args.lr_batch}, scaled linearly to {args.lr * args.batch_size / args.lr_batch:g}; \
weight decay {args.weight_decay}, momentum {args.momentum}, temperature {args.temperature}"""


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
        with contextlib.suppress(OSError):
            temporary.unlink()
        fail(f"cannot write {path} ({error}): nothing that was there is lost; the same command goes on from it")
    if os.name == "posix":  # the new name, too, has to reach the disk
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def is_intact(path):
    """Whether a checkpoint's archive is whole: torch.load alone would take flipped bits for weights."""
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
    """The state in a file, or, with a line, in NAME.prev.pt beside it; exits with a line if neither can be used.

    Loads tensors and plain data only.
    """
    path = Path(path)
    previous = path.with_name(path.stem + ".prev" + path.suffix)
    for candidate in (path, previous):
        with contextlib.suppress(Exception):  # of a file from elsewhere; torch's advice is to load it unsafely
            state = torch.load(candidate, map_location="cpu", weights_only=True) if is_intact(candidate) else None
            if isinstance(state, dict):
                return state
        if candidate == previous or not previous.exists():
            fail(f"{candidate} is damaged, or not a checkpoint of this project")
        say(f"warning: {candidate} is damaged; going on from {previous}")


def read_metrics(path):
    """The records of a metrics.jsonl; what is not JSON, as a last line that was cut off, is left out."""
    records = []
    for line in Path(path).read_text(errors="replace").splitlines() if Path(path).is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [r for r in records if isinstance(r, dict) and isinstance(r.get("step", 0), int)]


def write_metrics(out, record, epochs=0, tensorboard=False):
    """Add one JSON object to metrics.jsonl, flushed to the disk, and say what matters most; from the first process."""
    if rank_and_world()[0]:
        return
    with open(Path(out) / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
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


def open_run(out, config, resume="auto"):
    """Find out, before any work, what to do with --out: the checkpoint (a Path) to go on from, or None for a new run.

    A folder with the same configuration (OPERATING flags apart) goes on; another configuration, or files that are not a
    run's, end with a line. Nothing is written.
    """
    last = next((out / n for n in ("last.pt", "last.prev.pt") if os.path.exists(out / n)), None)
    if resume not in ("auto", "none") and not os.path.isfile(resume):
        fail(f"--resume {resume}: no such file; give auto, none or a last.pt")
    parent = next(p for p in (out, *out.absolute().parents) if os.path.exists(p))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        fail(f"--out {out} cannot be written: {parent} is not a folder that you may write to")
    if os.path.exists(out) and any(p.suffix != ".tmp" for p in out.iterdir()):  # a kill may leave an unfinished file
        if resume == "none":
            fail(f"--out {out} is not empty: --resume none needs a new or empty folder")
        try:
            old = {**json.loads((out / "config.json").read_text())}  # an object, or a TypeError
        except (OSError, ValueError, TypeError):
            fail(f"--out {out} is not empty and has no readable config.json: give a new folder")
        names = sorted((set(old) | set(config)) - set(OPERATING))
        if different := [f"{n} was {old.get(n)}, is {config.get(n)}" for n in names if old.get(n) != config.get(n)]:
            fail(f"--out {out} is of another configuration ({'; '.join(different)}): give another --out")
    if resume in ("auto", "none"):
        return last
    if last and Path(resume).resolve().parent == out.resolve() and not os.path.samefile(resume, last):
        fail(f"--resume {resume} would overwrite {last}, which is newer: give a new --out")
    return last or Path(resume)  # the same command again: --out has gone on since


def is_finite(state):
    """Whether all numbers in the tensors of a nested state are finite."""
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


def save_grid(path, rows, labels, border=None, captions=None):
    """Write rows of images as one PNG. rows: list of (n, 3, H, W) float in [0, 1]; labels: a text per row.

    border: list per row of n colours ('green', 'red', ...) or None; captions: list per row of n texts below the images.
    Small images are enlarged without smoothing.
    """
    size, gap, foot = max(row.shape[-1] for row in rows), 6, 14 if captions else 0
    side = size * max(1, 96 // size)
    ruler = ImageDraw.Draw(Image.new("1", (1, 1)))
    left = 2 * gap + max(int(ruler.textbbox((0, 0), text, font_size=12)[2]) for text in labels)
    height = side + foot + gap
    sheet = Image.new("RGB", (left + max(len(r) for r in rows) * (side + gap), gap + len(rows) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for r, row in enumerate(rows):
        top = gap + r * height
        draw.text((gap, top + side // 2), labels[r], fill="black", font_size=12, anchor="lm")
        for c, image in enumerate(row.detach().cpu().clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).numpy()):
            x = left + c * (side + gap)
            if border and border[r] and border[r][c]:
                draw.rectangle((x - 3, top - 3, x + side + 2, top + side + 2), fill=border[r][c])
            sheet.paste(Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST), (x, top))
            if captions:
                draw.text((x + side // 2, top + side + 3), captions[r][c], fill="black", font_size=11, anchor="ma")
    if rank_and_world()[0] == 0:
        write_whole(path, lambda temporary: sheet.save(temporary, "PNG"))


def save_views(path, views, labels):
    """What --show-views writes: the first twelve images of each view, (n, 3, H, W) in [0, 1], a row a view."""
    save_grid(path, [view[:12] for view in views], labels)
    say(f"views written to {path}")
