"""A device made of Python, which shows without a GPU what would go wrong on one.

    python tests/tools/simulated_device.py FOLDER                                                one process
    python -m torch.distributed.run --nproc_per_node=2 tests/tools/simulated_device.py FOLDER    two, in DDP

Its tensors say that they lie on `sim`, and the CPU computes them. Operations on tensors of both devices raise, as on a
GPU. Whatever makes a program wait for a GPU is counted by the line of ours that asked for it: reading a value, a shape
that depends on values, a copy that blocks. gpu_check.py's trainings, ended in the second epoch and resumed, and its
evaluations are made on the CPU and on `sim`. FOLDER/found.json then has {case: {"cpu": records or scores, "sim": the
same, "waits": {line: count} in training steps, "launches": how many operations color a view on `sim`}} and, under
"noticed", what was seen of code that is wrong on purpose. It cannot show speed, memory, a GPU's kernels, bf16.
"""

import collections
import contextlib
import functools
import gc
import importlib
import itertools
import json
import sys
import traceback
from pathlib import Path
from unittest import mock

import gpu_check  # which puts the project's root on the path
import torch
import torch.distributed as dist
from bench import training_batches, watched
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

import common

CASES = gpu_check.CASES | {
    "JointBlur, local crops": "moco_jointcrop --queue 64 --joint both --local-crops 2",
    "CLIM, two sizes": "clim --queue 64 --image-size 32 24 --clim-start 1 --num-clusters 4",
    "LoGo, paper": "logo --queue 64 --variant paper",
}
ROOT, aten = Path(common.__file__).parent, torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
COPIES = {aten._to_copy.default, aten.copy_.default}
PARTS = dict(  # of a training step, by the functions that do it
    augment="color", mix_batch="mix", mix_queries="mix", query="query", queries="query", project="query", key="key",
    keys="key", encode_shuffled_keys="key", forward="loss", backward="backward", grad="backward", step="optimizer",
    update="momentum update", enqueue="queue",
)  # fmt: skip
TORCH = Path(torch.__file__).parent
FOLDERS = ROOT, TORCH, TORCH / "autograd", TORCH / "optim"  # which have these functions; other modules have a forward
waits, launches, copies = collections.Counter(), collections.Counter(), collections.Counter()


def note(what):
    """Count a wait by the innermost line of this repository."""
    lines = [f for f in traceback.extract_stack() if Path(f.filename).parent == ROOT]
    waits[f"{Path(lines[-1].filename).name}:{lines[-1].lineno}: {what}" if lines else what] += 1


def part():
    """The part of a step that is at work: the outermost, but what the forward of a model calls need not be the loss."""
    found = "rest"
    for frame, _ in traceback.walk_stack(None):  # from the innermost
        name = PARTS.get(frame.f_code.co_name)
        if name and (name != "loss" or found == "rest"):
            file = Path(frame.f_code.co_filename)
            found = name if file.parent in FOLDERS and file.name != "common.py" else found
    return found


def compute(_, function, types, args=(), kwargs=None):
    """Compute a function of tensors for OnDevice and Simulation."""
    kwargs = kwargs or {}
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = any(isinstance(x, OnDevice) for x in tensors)
    to = here if kwargs.get("device") is None else str(torch.device(kwargs["device"])) in DEVICES
    is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.returns)
    is_view |= function is aten._unsafe_view.default
    if here and to and not is_view and "empty" not in str(function):  # not for copies from the CPU
        launches[part()] += 1
    if function in COPIES:
        onto, come, at_once = to, here, kwargs.get("non_blocking")
        if function is aten.copy_.default:
            onto, come, at_once = isinstance(args[0], OnDevice), isinstance(args[1], OnDevice), args[2:] == (True,)
        if onto and not come:
            copies[part()] += 1
        if onto != come and not (onto and at_once):
            note("a copy that blocks")
    elif here:
        away = [x for x in tensors if not isinstance(x, OnDevice) and x.dim()]
        if function in INDEXING:
            index = [x for x in args[1] if x is not None]
            if any(not isinstance(x, OnDevice) or x.dtype == torch.bool for x in index):
                note("an index of the CPU, or a mask")
            away = [x for x in away if all(x is not y for y in index)]
        if away:
            raise RuntimeError(f"{function} on tensors of both devices")
        if function in READS:
            note(str(function))
    if kwargs.get("device") is not None:
        kwargs = kwargs | dict(device="cpu")
    inner_args, inner_kwargs = tree_map_only(OnDevice, lambda x: x.inner, (args, kwargs))
    out = function(*inner_args, **inner_kwargs)
    if not to or function is aten._local_scalar_dense.default:
        return out
    return return_and_correct_aliasing(function, args, kwargs, tree_map_only(torch.Tensor, OnDevice, out))


DEVICES = ["sim:0", "sim"]  # names of the device


class Simulation(TorchDispatchMode):
    __torch_dispatch__ = compute


class OnDevice(torch.Tensor):
    """A tensor on `sim`; `inner` is the CPU's."""

    __torch_dispatch__ = classmethod(compute)

    @staticmethod
    def __new__(cls, inner):
        layout = dict(strides=inner.stride(), storage_offset=inner.storage_offset())
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **layout, dtype=inner.dtype, device=DEVICES[0])

    def __init__(self, inner):
        self.inner = inner

    def tolist(self):
        return self.cpu().tolist()

    def __format__(self, how):
        return format(self.item(), how)

    def new_tensor(self, data):
        return torch.tensor(data, dtype=self.dtype, device="sim")

    def __deepcopy__(self, memo):
        return OnDevice(self.inner.detach().clone()).requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol):  # to a file
        return self.inner.detach().__reduce_ex__(protocol)


def make_device():
    """Register `sim`, for this process for good."""
    backend = backend_registration._DummyBackendModule()
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16]
    backend_registration._setup_privateuseone_for_python_backend("sim", backend)
    make = torch.tensor  # it goes past Simulation
    torch.tensor = lambda data, *, device=None, **how: make(data, **how).to(device or "cpu")


def noticed():
    """What is seen of code that is wrong on purpose."""
    x, found = torch.ones(3).to("sim:0"), {}
    wrong = dict(mixed=lambda: x + torch.ones(3), value=lambda: x.sum().item(), shape=lambda: x[x > 0])
    wrong |= dict(back=lambda: x.cpu(), blocking=lambda: torch.ones(3).to("sim:0"))
    wrong |= dict(literal=lambda: torch.tensor([1.0], device="sim:0"))
    for name, function in wrong.items():
        waits.clear()
        try:
            function()
        except RuntimeError as error:
            note(f"raised {error}")
        found[name] = list(waits)
    return found


def on(device, found, work, case, *words):
    """Do work on a device. What is found of its training steps is added to `found`."""
    module = importlib.import_module(case.split()[0])
    augment, join = getattr(module, "augment", None), common.init_distributed  # evaluations have no augment

    def joined(_, **more):
        return torch.device(device), *join("cpu", **more)[1:]

    def counted(*x):
        launches.clear()
        views = augment(*x)
        found["launches"] = max(found["launches"], launches.total())
        return views

    placed = mock.patch.object(common, "init_distributed", joined)
    counting = mock.patch.object(module, "augment", counted, create=True)
    simulation = contextlib.nullcontext() if device == "cpu" else Simulation()
    with placed, counting, watched(waits.clear, lambda: found["waits"].update(waits)), simulation:
        return work(case, *words, "--device", "cpu")


def count(module, args):
    """What a training step of a script gives to a device, by part: {part: [operations, copies]}.

    The device calls itself cpu:0, for which torch chooses an operation of its own where it would on a GPU; for `sim` it
    would take some apart. Norms of gradients are foreach. The first step differs, because optimizers have no state yet.
    "SGD as on GPUs" has the optimizer's operations as a GPU's foreach kernels, in place of a CPU's loop.
    """
    found = {}

    def three_steps(batches):
        yield next(batches)
        batch = next(batches)
        launches.clear(), copies.clear()
        yield batch
        found.update({name: [launches[name], copies[name]] for name in (*dict.fromkeys(PARTS.values()), "rest")})
        for optimizer in [x for x in gc.get_objects() if type(x) is torch.optim.SGD]:
            for group in optimizer.param_groups:
                group["foreach"] = not group["fused"]
        batch = next(batches)
        launches.clear()
        yield batch
        found["SGD as on GPUs"] = [launches["optimizer"], 0]
        raise KeyboardInterrupt

    make_device()
    DEVICES[:] = ["cpu:0"]
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    norm = functools.partial(torch.nn.utils.get_total_norm, foreach=True)
    foreach = mock.patch.object(torch.nn.utils, "get_total_norm", norm)
    placed = mock.patch.object(common, "init_distributed", lambda *_: (torch.device("cpu:0"), 0, 1))
    with foreach, placed, training_batches(three_steps), Simulation(), contextlib.suppress(KeyboardInterrupt):
        module.main(args, train=common.Patterns(64, 32, seed=0))
    return found


def main(folder):
    make_device()
    gpu_check.make_few_patterns()
    folder, (rank, world) = Path(folder), common.init_distributed("cpu")[1:]
    with Simulation():
        found = {"noticed": noticed()}
    with contextlib.redirect_stdout(sys.stderr):
        for (name, case), device in itertools.product((CASES | gpu_check.EVALUATIONS).items(), ("sim", "cpu")):
            case_found = found.setdefault(name, dict(waits=collections.Counter(), launches=0))
            do, words = functools.partial(on, device, case_found), (case, folder / f"{device} {name}")
            if name in gpu_check.EVALUATIONS:
                case_found[device] = do(gpu_check.evaluate, *words, folder / "sim PatchMix")
                continue
            if world == 1:
                do(functools.partial(gpu_check.train_until, 5), *words)
            case_found[device] = do(gpu_check.train, *words)
    if world > 1:
        # A thread of gloo may still hold Python's tensors. If it gives them back while Python ends, the process aborts.
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
