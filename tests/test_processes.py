"""Tests that several processes compute what one does from the same views and shuffles, and batch norm in groups."""

import functools
import os
import zlib

import pytest
import tiny
import torch
from conftest import MODULES, generator, slow_but
from methods import RECORDS
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import clim
import common
import jcl
import patchmix

SMALL = "--image-size 16 --batch-size 32 --epochs 1 --dim 16 --patch-size 8 --knn-every 0 --device cpu".split()
CASES = [f"{method} {flags}" for method, record in RECORDS.items() for flags in record.processes]
QUICK = [f"{method} {RECORDS[method].processes[0]}" for method in ("jcl", "clim", "patchmix")]


def random_view(g, x, *_):
    """Return this process's rows of a random view of the global batch. It takes the place of `augment`."""
    return common.local_rows(torch.randn(len(x) * common.rank_and_world()[1], *x.shape[1:], generator=g))


def seeded(function, per_process=False):
    """Make a function draw the same random numbers in each call, and in each process unless `per_process`."""

    def call(*args, **options):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(common.rank_and_world()[0] if per_process else 0)
            return function(*args, **options)

    return call


def train_each(folder, cases):
    """Train all cases as one of several processes, in float64, so that a difference is an error and not rounding."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    torch.randn, torch.randperm = seeded(torch.randn), seeded(torch.randperm, per_process=True)  # noise; ShuffleBN
    choose, mix = seeded(clim.choose_positives, per_process=True), patchmix.patch_mix

    def choose_positives(*args):
        table = choose(*args)
        assert all(torch.equal(table, other) for other in common.all_gather_object(table))
        return table

    def patch_mix(images, num_mix, patch_size):  # a slice gets the same shuffle on any process
        g = generator(zlib.crc32(images.numpy().tobytes()))
        return mix(images, num_mix, patch_size, torch.randperm((images.shape[-1] // patch_size) ** 2, generator=g))

    clim.choose_positives, clim.mix_queries = choose_positives, seeded(clim.mix_queries)
    patchmix.patch_mix = patch_mix
    for case in cases:
        method, *flags = case.split()
        module = MODULES[method]
        module.augment = functools.partial(random_view, generator())
        # Without --bn-groups, batch norm uses the rows of all processes, for which torch needs GPUs
        module.DistributedDataParallel = DDP if "--bn-groups" in flags else lambda model: DDP(tiny.synchronize(model))
        arch = ["--drop-path", "0"] if common.is_vit(module.parse_args([]).arch) else ["--arch", "resnet_nano"]
        args = module.parse_args([*SMALL, *arch, *flags, "--out", f"{folder}/{CASES.index(case)}"])
        module.main(args, train=common.Patterns(96, 16, seed=0))  # three steps


def outcome(out):
    """Return a run's saved tensors, {name: tensor}, and the averages of its only epoch, {name: number}."""
    saved = tiny.load(out / "last.pt")
    (epoch,) = saved["records"]
    record = {name: value for name, value in epoch.items() if name not in tiny.TIMING}
    return {k: x for k, x in tiny.flat(saved).items() if torch.is_tensor(x) and "num_batches" not in k}, record


@pytest.fixture(scope="module")
def runs_of(request, tmp_path_factory):
    """Return a function: number of processes -> the folder of their runs of all cases. Each is trained once."""

    @functools.cache
    def folder(world):
        folder, cases = tmp_path_factory.mktemp("runs"), CASES if request.config.getoption("--slow") else QUICK
        tiny.succeed(folder / "log", train_each, [(str(folder), cases)] * world, seconds=900)
        return folder

    return folder


@pytest.mark.parametrize("world", slow_but([2], [2, 8]))
@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_processes_compute_what_one_computes(runs_of, world, case):
    """The loss, gradients (in the optimizer's state), weights, running statistics, queue and positives are the same."""
    (one, means), (several, others) = (outcome(runs_of(n) / str(CASES.index(case))) for n in (1, world))
    assert others == pytest.approx(means, rel=1e-7, abs=1e-9)
    assert others["loss"] == pytest.approx(means["loss"], rel=1e-9)
    torch.testing.assert_close(several, one, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(8, 1), (8, 3), (8, 3, 2, 5)])
def test_batch_norm_in_groups_is_one_for_each_slice(shape, compiled, double):
    """The output, gradients and running statistics match, for slices that differ. It compiles as one graph."""
    x, weight = torch.randn(2, *shape)
    rows = torch.arange(8.0).view(-1, *[1] * (len(shape) - 1))
    x = (x * (1 + rows) + rows).requires_grad_()
    kind = functools.partial(nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d, shape[1])
    norm = jcl.convert_split_batchnorm(kind(), 4)
    assert norm.training and not jcl.convert_split_batchnorm(kind().eval(), 4).training
    nn.init.normal_(norm.weight)
    statistics = [norm.running_mean, norm.running_var]
    if compiled:
        norm.compile(fullgraph=True, backend="eager")
    ours, inputs, parts = norm(x), [x, norm.weight, norm.bias], x.chunk(4)
    theirs = torch.cat([nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True) for x in parts])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (ours, theirs)))
    all_but_channels = [0, *range(2, len(shape))]
    mean, var = (sum(f(part, all_but_channels) for part in parts) / 4 for f in (torch.mean, torch.var))
    torch.testing.assert_close(statistics, [0.1 * mean, 0.9 + 0.1 * var])
    if len(shape) == 4:
        assert norm(x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)


class Halved(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize("norm, has_groups", [
    (Halved(8), False), (nn.BatchNorm2d(8), True), (nn.BatchNorm2d(8, affine=False), True), (BatchNormAct2d(8), True),
    (nn.BatchNorm2d(8, momentum=None), False), (nn.BatchNorm2d(8, track_running_stats=False), False),
], ids=str)  # fmt: skip
def test_batch_norm_groups_leave_an_encoder_its_function(norm, has_groups):
    """Its output in evaluation mode stays. Subclasses, and norms without statistics or momentum, are not split."""
    encoder, x = nn.Sequential(norm, nn.Flatten()), torch.randn(8, 8, 3, 3)
    expected = encoder.eval()(x)
    split = jcl.convert_split_batchnorm(encoder, 2)
    torch.testing.assert_close(split.eval()(x), expected)
    assert split.train()(x).isfinite().all()
    assert isinstance(split[0], jcl.SplitBatchNorm) == has_groups


@pytest.mark.parametrize("parts, world, each", [  # each: parts per process; None: unequal, or single images
    (2, 1, 2), (8, 4, 2), (2, 6, 1), (1, 1, 1), (5, 1, None), (24, 1, None), (3, 2, None), (1, 5, None), (1, 16, None)
])  # fmt: skip
def test_parts_of_24_images_are_as_given_and_one_per_process_at_least(parts, world, each, capsys):
    if each is None:
        line = tiny.refused(capsys, common.split_batch, 24, 24, world, parts, "--bn-groups")
        assert f"{world} process" in line and ("--bn-groups" in line) == (parts > 1)  # one group is not the cause
    else:
        assert common.split_batch(24, 24, world, parts, "--bn-groups") == each


def train_and_keep(folder, line):
    """Train, and save the model of each process, not only of the first one."""
    (method, *flags), path = line.split(), folder / f"{os.environ['RANK']}.pt"
    common.save_run = lambda out, config, info, state, *_: torch.save(state["model"].state_dict(), path)
    words = [*tiny.FLAGS, *"--arch resnet_nano --knn-every 0 --epochs 1".split()]
    tiny.play(method, [*words, *flags, "--out", folder / "run"])


@pytest.mark.slow
@pytest.mark.parametrize("line", ["moco_jointcrop --moco v3", "logo --base simsiam", "patchmix"])
def test_after_an_epoch_all_processes_have_the_same_running_statistics(line, tmp_path):
    """Covers methods without a queue, which lack SyncBatchNorm on CPUs. Others are compared with one process, above."""
    tiny.succeed(tmp_path / "log", train_and_keep, [(tmp_path, line)] * 2)
    one, two = (tiny.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert one["backbone.bn1.running_mean"].abs().max() > 0 and tiny.unequal(one, two) == []
