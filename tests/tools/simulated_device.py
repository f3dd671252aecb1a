"""A device made of Python, which shows without a GPU what would go wrong on one.

    python tests/tools/simulated_device.py FOLDER                                                one process
    python -m torch.distributed.run --nproc_per_node=2 tests/tools/simulated_device.py FOLDER    two, in DDP

Its tensors say that they lie on `sim`, and the CPU computes them. Operations and collectives on tensors of both devices
raise, as on a GPU. Whatever makes a program wait for a GPU is counted by the line of ours that asked for it: reading a
value, a shape that depends on values, a copy that blocks. Every script runs whole on the CPU and on `sim`; a training
is stopped in its second epoch and goes on. FOLDER/found.json then has {case: {"cpu": records of metrics.jsonl, "sim":
the same, "waits": {line: count} in training steps}}. Under "noticed" it has what was seen of code that is wrong on
purpose. Speed, memory, a GPU's own kernels and bf16 it cannot show.
"""

import collections
import contextlib
import functools
import importlib
import itertools
import json
import os
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from bench import watched  # noqa: E402

import common  # noqa: E402

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
waits = collections.Counter()


def note(what):
    """Count a wait by the innermost line of this repository."""
    lines = [f for f in traceback.extract_stack() if Path(f.filename).parent == ROOT]
    waits[f"{Path(lines[-1].filename).name}:{lines[-1].lineno}: {what}" if lines else what] += 1


class OnDevice(torch.Tensor):
    """A tensor on `sim`; `inner` is the CPU's."""

    @staticmethod
    def __new__(cls, inner):
        layout = dict(strides=inner.stride(), storage_offset=inner.storage_offset())
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **layout, dtype=inner.dtype, device="sim:0")

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self, **_):
        return f"OnDevice({self.inner})"

    def tolist(self):
        note("tolist")
        return self.inner.tolist()

    def __format__(self, how):
        note("format")
        return format(self.inner.item(), how)

    def __reduce_ex__(self, protocol):  # to a file
        return self.inner.detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


def unwrap(x):
    return x.inner if isinstance(x, OnDevice) else x


def wrap(x):
    return OnDevice(x) if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) else x


def compute(function, args, kwargs):
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = any(isinstance(x, OnDevice) for x in tensors)
    if function.namespace == "c10d" and here and not all(isinstance(x, OnDevice) for x in tensors):
        raise RuntimeError(f"{function} on tensors of both devices")
    to = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    if to == "sim":
        kwargs = kwargs | dict(device="cpu")
    if function is aten._to_copy.default:
        if to is not None and here != (to == "sim") and not (to == "sim" and kwargs.get("non_blocking")):
            note(f"a copy to {to} that blocks")
        here = here and to is None  # where the result lies
    elif function is aten.copy_.default:
        onto, non_blocking = isinstance(args[0], OnDevice), args[2:] == (True,)
        if isinstance(args[1], OnDevice) != onto and not (onto and non_blocking):
            note("a copy that blocks")
    elif here:
        away = [x for x in tensors if not isinstance(x, OnDevice) and x.dim()]
        if function in INDEXING:
            index = [x for x in args[1] if x is not None]
            if any(not isinstance(x, OnDevice) or x.dtype == torch.bool for x in index):
                note("an index of the CPU, or a mask")
            away = [x for x in away if all(x is not y for y in index)]
        if away:
            shapes = [(tuple(x.shape), x.device.type) for x in tensors]
            raise RuntimeError(f"{function} on tensors of both devices: {shapes}")
        if function in READS:
            note(str(function))
    out = function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    if not (here or to == "sim") or function is aten._local_scalar_dense.default:
        return out
    return return_and_correct_aliasing(function, args, kwargs, tree_map(wrap, out))


class Simulation(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


def make_device():
    """Register `sim`, for this process for good."""

    class Backend(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    def empty(size, *, dtype=None, memory_format=None, **_):
        return OnDevice(torch.empty(size, dtype=dtype))

    def empty_strided(size, stride, *, dtype=None, **_):
        return OnDevice(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source, to, non_blocking=False):
        if isinstance(source, OnDevice) != isinstance(to, OnDevice):
            note("a copy that blocks")
        unwrap(to).copy_(unwrap(source))
        return to

    backend_registration._setup_privateuseone_for_python_backend("sim", Backend())
    library = torch.library.Library("aten", "IMPL")  # torch.tensor(..., device="sim") goes past Simulation
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    return library


def noticed():
    """What is seen of code that is wrong on purpose."""
    x, found = torch.ones(3).to("sim:0"), {}

    def mixed():
        try:
            x + torch.ones(3)
        except RuntimeError as error:
            note(f"raised {error}")

    wrong = dict(mixed=mixed, value=lambda: x.sum().item(), shape=lambda: x[x > 0], back=lambda: x.cpu())
    wrong |= dict(blocking=lambda: torch.ones(3).to("sim:0"), literal=lambda: torch.tensor([1.0], device="sim:0"))
    for name, function in wrong.items():
        before = waits.copy()
        function()
        found[name] = list(waits - before)
    return found


CASES = {
    "MoCo v2, J-Crop": "moco_jointcrop --queue 32",
    "MoCo v3, J-Crop": "moco_jointcrop --moco v3 --arch vit_micro",
    "JCL": "jcl --queue 32",
    "CLIM": "clim --queue 32 --clim-start 0 --refresh-every 1",
    "CLIM, two sizes": "clim --queue 32 --resolutions 32 24 --clim-start 1",
    "LoGo on MoCo": "logo --queue 32",
    "LoGo on MoCo, paper": "logo --queue 32 --variant paper",
    "LoGo on SimSiam": "logo --base simsiam",
    "PatchMix": "patchmix --mix-slices 2",
}
EVALUATIONS = {
    "kNN": "eval_knn",
    "linear probe": "eval_linear --no-baselines",
    "MoCo's linear protocol": "eval_linear --protocol moco --epochs 2 --batch-size 32 --out OUT",
    "fine-tuning": "eval_linear --finetune --epochs 2 --batch-size 32 --out OUT",
}
ONLY_ONE = ("CLIM, two sizes", "LoGo on MoCo, paper", "linear probe")  # nothing new in two processes
FEWER = {4096: 48, 1024: 16}  # patterns
FOR_TWO = [name for name in CASES | EVALUATIONS if name not in ONLY_ONE]
OWN_STATISTICS = ("MoCo v3, J-Crop", "LoGo on SimSiam", "PatchMix")  # batch norm over processes is torch's, for GPUs


def counting(inside, free):
    """A patch of DataLoader that adds to `inside` the waits of training steps, but for the first `free` steps."""
    steps, before = itertools.count(), collections.Counter()

    def start(_):
        before.clear()
        before.update(waits)

    def end(_):
        if next(steps) >= free:
            inside.update(waits - before)

    return mock.patch.object(DataLoader, "__iter__", watched(DataLoader.__iter__, start, end))


def on(device):
    """What runs on a device: a context."""
    return Simulation() if device != "cpu" else contextlib.nullcontext()


def train(case, out, device):
    """(records, waits in steps) of a run of two epochs of three steps, stopped in its fifth step and continued."""
    script, *flags = case.split()
    module, inside, join = importlib.import_module(script), collections.Counter(), common.join_processes
    flags += [*"--epochs 2 --batch-size 16 --workers 0 --knn-every 1 --device cpu --out".split(), str(out)]
    calls, color_views = itertools.count(1), common.color_views

    def stopped(*args):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return color_views(*args)

    joined = mock.patch.object(common, "join_processes", lambda name: (torch.device(device), *join(name)[1:]))
    with joined, mock.patch.object(common, "color_views", stopped):
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt), counting(inside, free=1), on(device):
                module.main(module.parse_args(flags))  # a start's first step loads constants
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()], inside


def evaluate(case, run, out, device):
    """(results, waits in training steps) of an evaluation of a run."""
    script, *flags = (str(out) if word == "OUT" else word for word in case.split())
    module, inside = importlib.import_module(script), collections.Counter()
    open_encoder = common.open_encoder

    def opened(*args, **named):
        _, encoder, info = open_encoder(*args, **named)
        return torch.device(device), encoder.to(device), info

    with mock.patch.object(common, "open_encoder", opened), counting(inside, free=1), on(device):
        return module.main(module.parse_args([str(run), "--workers", "0", "--device", "cpu", *flags])), inside


def main(folder):
    library, folder = make_device(), Path(folder)  # what is registered ends with the library
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    with Simulation():
        found, few = {"noticed": noticed()}, common.make_patterns
    with (
        mock.patch.object(common, "make_patterns", lambda n, *more, **named: few(FEWER[n], *more, **named)),
        mock.patch.object(common, "show_progress"),  # it waits, in every tenth step and the last
        mock.patch.object(dist, "destroy_process_group"),  # one group for all
        contextlib.redirect_stdout(sys.stderr),
    ):
        for name, case in (CASES | EVALUATIONS).items():
            if world > 1 and name not in FOR_TWO:
                continue
            run = functools.partial(train, case)
            if name in EVALUATIONS:
                run = functools.partial(evaluate, case, folder / "sim PatchMix")
            found[name] = dict(cpu=run(folder / f"cpu {name}", "cpu")[0]) if world == 1 else {}
            found[name]["sim"], found[name]["waits"] = run(folder / f"sim {name}", "sim:0")
    if world > 1:
        # A thread of gloo may still hold Python's tensors. If it gives them back while Python ends, the process aborts.
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    return library


if __name__ == "__main__":
    main(sys.argv[1])
