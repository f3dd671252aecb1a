"""A device made of Python, which shows without a GPU what would go wrong on one.

    with simulated():
        module.main(args)
    print(waits)

Its tensors report the device `cpu:0`, which torch distinguishes from `cpu`, but the CPU computes them. An operation on
tensors of both devices raises a RuntimeError, as on a GPU. `waits` counts what would make the program wait for a GPU,
by line of this project: reading a value, a shape that depends on values, and a copy that blocks. Speed, memory, bf16
and the kernels of a GPU are not simulated.
"""

import collections
import contextlib
import functools
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch
from bench import watched  # which puts the project's root on the path
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

import common

DEVICE, ROOT, aten = torch.device("cpu:0"), Path(common.__file__).parent, torch.ops.aten
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
PARTS = dict(  # of a training step, by the functions that do it
    augment="color", mix_batch="mix", mix_queries="mix", query="query", queries="query", project="query", key="key",
    keys="key", encode_shuffled_keys="key", forward="loss", backward="backward", grad="backward", step="optimizer",
    update="momentum update", enqueue="queue",
)  # fmt: skip
TORCH = Path(torch.__file__).parent
FOLDERS = ROOT, TORCH, TORCH / "autograd", TORCH / "optim"  # which have these functions; other modules have a forward
waits, launches, copies = collections.Counter(), collections.Counter(), collections.Counter()


def note(what):
    """Count a wait by the innermost line of this project."""
    lines = [f for f in traceback.extract_stack() if Path(f.filename).parent == ROOT]
    waits[f"{Path(lines[-1].filename).name}:{lines[-1].lineno}: {what}" if lines else what] += 1


def part():
    """The part of a step that is at work: the outermost, but what the forward of a model calls need not be the loss."""
    found = "rest"
    for frame, _ in traceback.walk_stack(sys._getframe()):  # from here outward; None would skip some in Python 3.11
        name = PARTS.get(frame.f_code.co_name)
        if name and (name != "loss" or found == "rest"):
            file = Path(frame.f_code.co_filename)
            found = name if file.parent in FOLDERS and file.name != "common.py" else found
    return found


def compute(_, function, types, args=(), kwargs=None):
    """Compute an operation of torch on tensors of the CPU or the device."""
    kwargs = kwargs or {}
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    from_device = any(isinstance(x, OnDevice) for x in tensors)
    to_device = from_device if kwargs.get("device") is None else kwargs["device"] == DEVICE
    is_view = function.is_view or function is aten._unsafe_view.default
    if from_device and to_device and not is_view and "empty" not in str(function):  # it starts a kernel
        launches[part()] += 1
    if function in (aten._to_copy.default, aten.copy_.default):
        if function is aten.copy_.default:
            to_device, from_device = (isinstance(x, OnDevice) for x in args[:2])
        blocks = from_device or not (kwargs.get("non_blocking") or args[2:] == (True,))
        if to_device and not from_device:
            copies[part()] += 1
        if to_device != from_device and blocks:
            note("a copy that blocks")
    elif from_device:
        index = [x for x in args[1] if x is not None] if function in INDEXING else []
        others = [x for x in tensors if not isinstance(x, OnDevice) and x.dim() and all(x is not y for y in index)]
        if others:
            raise RuntimeError(f"{function} on tensors of both devices")
        if any(not isinstance(x, OnDevice) or x.dtype == torch.bool for x in index):
            note("an index of the CPU, or a mask")
        if READS & {*function.tags} and function not in INDEXING:
            note(str(function))
    if kwargs.get("device") is not None:
        kwargs = kwargs | dict(device="cpu")
    inner_args, inner_kwargs = tree_map_only(OnDevice, lambda x: x.inner, (args, kwargs))
    out = function(*inner_args, **inner_kwargs)
    if not to_device:
        return out
    return return_and_correct_aliasing(function, args, kwargs, tree_map_only(torch.Tensor, OnDevice, out))


class Simulation(TorchDispatchMode):
    __torch_dispatch__ = compute


class OnDevice(torch.Tensor):
    """A tensor on the device. `inner` is the CPU's."""

    __torch_dispatch__ = classmethod(compute)

    @staticmethod
    def __new__(cls, inner):
        layout = dict(strides=inner.stride(), storage_offset=inner.storage_offset())
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **layout, dtype=inner.dtype, device=DEVICE)

    def __init__(self, inner):
        self.inner = inner

    def tolist(self):
        return self.cpu().tolist()

    def __format__(self, how):
        return format(self.item(), how)

    def new_tensor(self, data):
        return torch.tensor(data, dtype=self.dtype, device=DEVICE)

    def __reduce_ex__(self, protocol):  # for torch.save
        return self.inner.detach().__reduce_ex__(protocol)


@contextlib.contextmanager
def simulated():
    """Inside, scripts and evaluations run on this device."""
    join, make = common.init_distributed, torch.tensor
    patches = {
        (common, "init_distributed"): lambda _, **more: (DEVICE, *join("cpu", **more)[1:]),
        (torch, "tensor"): lambda data, *, device=None, **how: make(data, **how).to(device or "cpu"),  # else not seen
        (torch.__future__, "get_overwrite_module_params_on_conversion"): lambda: True,  # model.to makes new parameters
        (distributed, "_verify_param_shape_across_processes"): mock.Mock(),  # it would read the memory of tensors
    }
    with contextlib.ExitStack() as stack:
        for (place, name), function in patches.items():
            stack.enter_context(mock.patch.object(place, name, function))
        yield stack.enter_context(Simulation())


def count(module, args):
    """What the second training step of a script gives to the device, by part: {part: [operations, copies]}.

    The first step differs, because optimizers have no state yet. Norms of gradients are foreach, as on a GPU.
    """
    steps, norm = [], functools.partial(torch.nn.utils.get_total_norm, foreach=True)

    def begin():
        launches.clear(), copies.clear()

    def end():
        steps.append({name: [launches[name], copies[name]] for name in (*dict.fromkeys(PARTS.values()), "rest")})
        if len(steps) == 2:
            raise KeyboardInterrupt

    foreach = mock.patch.object(torch.nn.utils, "get_total_norm", norm)
    with foreach, simulated(), watched(begin, end), contextlib.suppress(KeyboardInterrupt):
        module.main(args, train=common.Patterns(64, 32, seed=0))
    return steps[1]
