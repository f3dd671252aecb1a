"""Set the import path and a single thread for all tests, and define --slow and small helpers."""

import gc
import importlib
import multiprocessing
import random
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from methods import RECORDS
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tools")]
pytest_plugins = ["tiny"]  # its fixtures
torch.set_num_threads(1)  # a second one would wait for other programs and change the rounding
METHODS = [*RECORDS]
# (method, flags): all methods with their default models, then with the others, which these flags select.
EACH_MODEL = [(m, "") for m in METHODS] + [(m, flags) for m in METHODS for flags in RECORDS[m].models if flags]
VARIANTS = [(method, flags) for method in METHODS for flags in ("", *RECORDS[method].forms)]
INFO = dict(image_size=16, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), interpolation="bilinear")  # an encoder's images


def slow_but(quick, cases):
    """Return all cases of a test as pytest parameters. Only the quick ones run without --slow."""
    rows = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [pytest.param(*row, marks=[] if case in quick else pytest.mark.slow) for case, row in rows]


JCL_AT_ONCE = slow_but(["jcl"], METHODS)
MODULES = {method: importlib.import_module(method) for method in METHODS}
# A very small encoder, but no layer has fewer than 8 channels. With fewer, the gradient of a 1 x 1 convolution of
# stride 2 crashes in torch 2.8 to 2.15 on CPUs without AVX-512.
importlib.import_module("common").ARCHS["resnet_nano"] = ("resnet18", dict(layers=[1] * 4, channels=[8] * 4))
QUEUES = [method for method in METHODS if hasattr(MODULES[method], "Queue")]
WITH_MIN_LR = [method for method in METHODS if hasattr(MODULES[method].parse_args([]), "min_lr")]  # else it is 0


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also long tests: whole runs, several processes, kills")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: run with --slow only")


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("--slow runs it")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    torch.set_num_threads(1)  # a test may have changed it
    random.seed(0), np.random.seed(0), torch.manual_seed(0)  # a test draws the same numbers, whatever ran before it
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = set(multiprocessing.active_children())
    yield
    if set(multiprocessing.active_children()) - before:  # an error kept a loader's workers, which would warn later
        gc.collect()


@pytest.fixture
def module(method):
    """Return the module of a test's parameter `method`."""
    return MODULES[method]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Make the test's temporary folder the current one, and return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def unit(*shape, seed=0, grad=False):
    """Return random float64 rows of unit length."""
    x = torch.randn(*shape, dtype=torch.float64, generator=generator(seed))
    return torch.nn.functional.normalize(x, dim=-1).requires_grad_(grad)


def random_views(count, n, size=16):
    """Return `count` random views of n images, in float64, as a model takes them."""
    return list(torch.randn(count, n, 3, size, size, dtype=torch.float64, generator=generator(1)))


def assert_same(ours, theirs, *inputs):
    """Assert that two losses, and their gradients with respect to the inputs, are equal up to float64 rounding."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    gradients = (torch.autograd.grad(x, inputs, retain_graph=True, materialize_grads=True) for x in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def info_nce(q, k, queue, temperature):
    """Return InfoNCE, computed query by query. The key in the same row is the positive; the queue has the negatives."""
    total = 0.0
    for i in range(len(q)):
        positive = torch.exp(q[i] @ k[i] / temperature)
        total = total - torch.log(positive / (positive + torch.exp(queue @ q[i] / temperature).sum()))
    return total / len(q)


UNIFORM = (np.arange(10**6) + 0.5) / 10**6  # stands for U(0, 1)


def ks(sample, other=UNIFORM):
    """Return the Kolmogorov-Smirnov distance to another sample, times sqrt(size). It rarely exceeds 2."""
    sample, other = np.sort(np.ravel(sample)), np.sort(np.ravel(other))
    at = np.concatenate([sample, other])
    distance = np.searchsorted(sample, at, "right") / len(sample) - np.searchsorted(other, at, "right") / len(other)
    return abs(distance).max() * (len(sample) * len(other) / len(at)) ** 0.5


def values(module, flags, names):
    """Return the values of these names after a method's parse_args has parsed the flags."""
    args = module.parse_args(flags.split())
    return [getattr(args, name) for name in names.split()]


class Pictures(torch.utils.data.Dataset):
    """A dataset of the images in an array (n, H, W, 3)."""

    def __init__(self, array, targets=None, classes=()):
        self.array, self.classes = array, classes
        self.targets = [0] * len(array) if targets is None else targets

    def __len__(self):
        return len(self.array)

    def __getitem__(self, i):
        return Image.fromarray(self.array[i]), self.targets[i]


def blank(n, size=8):
    """Return n black images, size x size: a list, which has no targets."""
    return [(Image.new("RGB", (size, size)), 0)] * n


def first_call(function, module, flags="", train=None):
    """Run `main` until it calls a function, "MODULE.NAME", and return the positional arguments of that call."""
    args = module.parse_args([*flags.split(), "--device", "cpu"])
    with mock.patch(function, side_effect=InterruptedError) as called, pytest.raises(InterruptedError):
        module.main(args, train=blank(args.batch_size) if train is None else train)
    return called.call_args.args


def state_of(module, flags="", train=None):
    """Return the initial state of what `main` trains and saves, {name: module, optimizer or tensor}."""
    return first_call("common.open_run", module, flags, train)[2]


@pytest.fixture
def double(monkeypatch):
    """Use float64 throughout, so that a difference is an error and not rounding."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
