"""LoGo: Leverage Your Local and Global Representations (CVPR 2022, arXiv 2203.17205), on MoCo and SimSiam.

Large crops of an image show the same things, small ones often do not. LoGo takes two global and two local crops. Globals are
drawn to each other, as ever; locals are drawn to the globals, but never the globals to the locals (they are constants there);
and the two locals are pushed apart, since they are different parts. How alike two locals are is not measured by their cosine
but learned: an affinity network is trained to score locals of one image above locals of two, and the encoder then lowers, a
little, its score for its own pairs. The two take turns, step by step.

    L_gg, L_lg         MoCo.forward, SimSiam.forward, combine
    Omega, Eq. 6       affinity_loss             what the affinity learns (supplement, Eq. 4)
    L_ll, Eq. 9        local_dissimilarity       what the encoder lowers
    Algorithm 1        LocalToLocal, train_step  the alternating update

    python logo.py                                                            # laptop, no data
    python logo.py --dataset cifar10 --local-crops 0 --one-way                # the baseline, MoCo v2, one GPU
    torchrun --nproc_per_node=8 logo.py --dataset imagenet100 --data-dir DIR --base simsiam

Baseline: `--local-crops 0` is symmetrised MoCo (both views are queries), or SimSiam; with `--one-way` MoCo v2's loss. New
relative to it: local crops, Affinity, affinity_loss, local_dissimilarity, LocalToLocal.

Of this paper only the supplement could be read. The equations above are those of the main text as others quote them; the MoCo
form is the released code's; all of SimSiam's (of which no code was released) and lambda for MoCo are inference.

Departures, from the released code if not said otherwise:
    D1 default: the released form, which is bounded and needs no lambda. Released: a logistic affinity, the mean over the six
       terms, and L_ll as a step of its own, clipped to 1.5 % of the last gradient's norm. Paper (`--variant paper`): a linear
       objective, L_gg + L_lg + lambda L_ll with the sum of L_lg's four terms, one step
    D2 a momentum update each step; released: two, as each forward pass makes one
    D3 weight decay once a step; released: twice, in both optimisers of the encoder
    D4 the clip's reference norm is kept over epochs and saved; released: 0 at the start of every epoch, which stops L_ll there
    D5 the affinity sees the whole batch on every process; released: each process has an affinity of its own
    D6 negatives of the affinity: the batch rolled by one; released: reversed, which pairs the middle of an odd batch with itself
    D7 local crops take [0.08, r_l] of the area (supplement); released default: 0.05. On patterns at half the size, to save time
    D8 no local keys, which released code makes and drops; no clip of the main gradient at norm 100, nor 1e-6 added to the
       norm that the clip of L_ll divides by
    D9 STL-10: ResNet-18; the supplement's small AlexNet is not in timm
    D10 colours once, in MoCo v2's order; released blur before jitter and gray, and on CIFAR jitter, gray, flip and
       normalisation twice, with the std (0.2023, 0.1994, 0.2010)
    D11 baseline: global crops and, with --one-way, the key's view enqueued; released crops from 0.08, both views enqueued
    D12 released float32, and of the processes' batch-norm statistics the first's; here bf16 in the encoders on CUDA (--amp
       off: float32), and the statistics' mean
"""

import copy
import importlib.util
import json
import math
import os
import sys
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import common

METHOD = "logo"
EVALUATED = "query"  # the encoder that the authors evaluate

# ================================================================ 1. arguments

# fmt: off
# "by" holds what depends on another flag, in this order. The rate is that of batch size lr_batch. COMMON is the released code's,
# but for the crops (supplement, section 1), and lam and SimSiam's hidden (a third party's).
COMMON = dict(
    base="moco", local_crops=2, global_scale=(0.4, 1.0), local_scale=(0.08, 0.4), local_size=None,
    affinity_form="logistic", affinity_hidden=256, affinity_lr=None, l2l_weighting="clip", clip_ratio=0.015, lam=1e-4,
    jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray_p=0.2, blur_p=0.5, interpolation="bilinear", norm=common.IMAGENET_NORM,
    patch_size=16, epochs=200, batch_size=256, lr=0.03, lr_batch=256, milestones=(0.6, 0.8), warmup=0, min_lr=0.0,
    dim=128, layers=2, hidden=512, bn_groups=8, momentum=0.999, weight_decay=1e-4, temperature=0.07, queue=4096,
)
SIMSIAM = dict(dim=2048, layers=3, bn_groups=1, l2l_weighting="lambda", milestones=None)
BY = dict(
    base=dict(simsiam=SIMSIAM),
    variant=dict(paper=dict(affinity_form="linear", l2l_weighting="lambda")),
    affinity_form=dict(linear=dict(affinity_lr=1e-4)),  # unbounded above, so slowly
)
CIFAR = dict(  # supplement, section 1; layers and batch of SimSiam: a third party's
    COMMON, arch="resnet18", image_size=32, patch_size=4, local_scale=(0.08, 0.6), blur_p=0.0,
    by=BY | dict(
        base=dict(simsiam=SIMSIAM | dict(layers=2, batch_size=512)),
        arch=dict(resnet_micro=dict(lr=0.1, milestones=None, momentum=0.99, blur_p=0.5, temperature=0.2, dim=128)),  # for CPUs
    ),
)
IMAGENET = dict(COMMON, arch="resnet34", image_size=224, local_size=96, by=BY)  # supplement, section 1, on ImageNet-100
RECIPES = {
    "patterns": dict(  # ours, for two CPU cores
        COMMON, arch="resnet_micro", image_size=32, patch_size=4, local_size=16, epochs=28, batch_size=64, lr=0.06, lr_batch=128,
        queue=128, blur_p=0.1, norm=common.NORMS["patterns"], bn_groups=2, momentum=0.95, warmup=5, temperature=0.2,
        milestones=None,
        by=BY | dict(base=dict(simsiam=SIMSIAM | dict(dim=256, layers=2, hidden=128))),
    ),
    "cifar10": dict(CIFAR, norm=common.NORMS["cifar10"]),
    "cifar100": dict(CIFAR, norm=common.NORMS["cifar100"]),
    "stl10": dict(COMMON, arch="resnet18", image_size=96, patch_size=8, by=BY),  # D9
    "imagenet100": IMAGENET,
    "imagenet": dict(IMAGENET, arch="resnet50", queue=65536),  # ours
    "folder": dict(IMAGENET, arch="resnet50"),  # ours
}
# fmt: on


def parse_args(argv=None):
    """The command line as a namespace in which every value of the recipe is filled in. Exits with a line on a mistake."""
    parser = common.ArgumentParser("logo.py", description=__doc__.splitlines()[0])
    add_run_flags(parser)
    parser.set_defaults(variant="released")  # D1
    group = parser.add_argument_group("LoGo")
    group.add_argument("--base", choices=("moco", "simsiam"))
    group.add_argument("--local-crops", type=int, choices=(0, 2), help="0: symmetrised MoCo, or SimSiam")
    group.add_argument("--no-l2l", action="store_true", default=None, help="without local-to-local dissimilarity")
    group.add_argument("--affinity-form", choices=("logistic", "linear"), help="what the affinity learns by")
    group.add_argument("--l2l-weighting", choices=("clip", "lambda"), help="a clipped step of its own, or a term of the loss")
    group.add_argument("--clip-ratio", type=float, metavar="X", help="of the last gradient's norm, with --l2l-weighting clip")
    group.add_argument("--lam", type=float, metavar="X", help="with --l2l-weighting lambda")
    group.add_argument("--global-scale", type=float, nargs=2, metavar=("LO", "HI"), help="area range, r_g to 1")
    group.add_argument("--local-scale", type=float, nargs=2, metavar=("LO", "HI"), help="area range, up to r_l")
    group.add_argument("--local-size", type=int, metavar="N", help="px of a local crop; of a global one: --image-size")
    group.add_argument("--one-way", action="store_true", default=None, help="MoCo v2's loss; with --local-crops 0")
    flags = (
        "base local_crops no_l2l affinity_form l2l_weighting clip_ratio lam global_scale local_scale local_size one_way".split()
    )
    args = resolve(parser.parse_args(argv), method_flags=dict.fromkeys(flags) | {"variant": "released"})
    args.l2l, args.one_way = args.local_crops == 2 and not args.no_l2l, bool(args.one_way)
    if args.local_size is not None and not 0 < args.local_size < 10**9:
        common.fail(f"--local-size {args.local_size}: give a number above 0, below {10**9}")
    args.local_size = min(args.local_size or args.image_size, args.image_size)
    if any(not 0 < low < high <= 1 for low, high in (args.global_scale, args.local_scale)):
        common.fail("--global-scale, --local-scale: 0 < LO < HI <= 1")
    if not (0 <= args.lam < math.inf and 0 <= args.clip_ratio < math.inf):
        common.fail("--lam, --clip-ratio: 0 or more")
    if args.one_way and (args.base != "moco" or args.local_crops):
        common.fail("--one-way is MoCo v2's loss: it needs --base moco --local-crops 0")
    if args.local_crops and args.arch.startswith(("vit_", "deit")) and args.local_size % args.patch_size:
        common.fail(f"--patch-size {args.patch_size} does not divide the local crops' size, {args.local_size}")
    return args


# -------------------------------------------- run flags (same in all five files)


def add_run_flags(parser):
    parser.add_argument("--dataset", default="patterns", choices=common.DATASETS, help="data set, and whose recipe is used")
    parser.add_argument("--data-dir", metavar="DIR", help="where it is, or is downloaded to; train/ and val/ or test/ are read")
    parser.add_argument("--no-cache", action="store_true", help="do not keep small images decoded in memory")
    parser.add_argument("--skip-bad-images", action="store_true", help="read every file first; leave out what cannot be decoded")
    parser.add_argument("--arch", help=f"{', '.join(common.ARCHS)}, or any timm model")
    parser.add_argument("--image-size", type=int, metavar="N")
    parser.add_argument("--patch-size", type=int, metavar="N", help="of a ViT")
    parser.add_argument("--epochs", type=int, metavar="N")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop and save after N steps, counted over resumes")
    parser.add_argument("--batch-size", type=int, metavar="N", help="global: over all processes")
    parser.add_argument("--lr", type=float, metavar="X", help="at the recipe's reference batch, scaled linearly with the batch")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--queue", type=int, metavar="N", help="number of negatives kept (methods with a queue)")
    parser.add_argument("--out", metavar="DIR", help="folder of the run (runs/METHOD-DATASET-ARCH-sSEED...)")
    parser.add_argument("--resume", default="auto", metavar="auto|PATH|none")
    parser.add_argument("--save-every", type=int, default=1, metavar="N", help="epochs")
    parser.add_argument("--keep-every", type=int, default=0, metavar="N", help="epochs; 0: only the last two are kept")
    parser.add_argument("--knn-every", type=int, default=10, metavar="N", help="epochs; 0: never")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--amp", default="auto", choices=("auto", "bf16", "off"), help="auto: bf16 on CUDA")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--grad-checkpoint", action="store_true", help="less memory, more time; batch norm counts a batch twice")
    parser.add_argument("--workers", type=int, metavar="N", help="loader processes for each training process")
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--show-views", metavar="PNG", help="write what the network is fed, and exit")
    parser.add_argument("--variant", default="paper", choices=("paper", "released"))


def resolve(args, method_flags):
    """Fill in from the recipe what the command line left open, check it, and name the run's folder.

    method_flags: {flag: its default where the recipe has none}; those that differ become part of the folder's name.
    """
    recipe = dict(RECIPES[args.dataset])
    for flag, overrides in recipe.pop("by", {}).items():  # what depends on another choice
        choice = getattr(args, flag, None) or recipe.get(flag)
        recipe |= overrides.get(choice, {})
    defaults = {"variant": "paper"} | method_flags | recipe  # what the folder's name leaves out
    given = {name: getattr(args, name) for name in ("variant", *method_flags)}
    named = "".join(f"-{k}{v}" for k, v in given.items() if v is not None and v != defaults[k])
    recipe["warmup"] *= min(1, (args.epochs or recipe["epochs"]) / recipe["epochs"])  # a short run warms up in proportion
    for key, value in recipe.items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)
    folder = f"{METHOD}-{args.dataset}-{args.arch}-s{args.seed}{named}"
    args.out = args.out or "runs/" + "".join(c if c.isalnum() or c in "-_." else "+" for c in folder)
    zero = ("seed", "keep_every", "knn_every", "workers")  # these may be
    for name in ("image_size", "patch_size", "epochs", "batch_size", "lr", "save_every", "max_steps", "queue", *zero):
        value = getattr(args, name)
        most = 2**63 if name == "seed" else 1025 if name == "workers" else 10**9
        if value is not None and not (0 < value < most or (value == 0 and name in zero)):
            least = "from" if name in zero else "above"
            common.fail(f"--{name.replace('_', '-')} {value}: give a number {least} 0, below {most}")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size % world:
        common.fail(f"--batch-size {args.batch_size} (global) cannot be shared out over {world} processes")
    if args.device == "cuda" and not torch.cuda.is_available():
        common.fail("--device cuda: torch sees no CUDA device; use --device cpu")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        common.fail("--tensorboard needs a package: pip install tensorboard")
    return args


# ==================================================================== 2. views


DRAWS = common.CROP_DRAWS + common.COLOUR_DRAWS  # of one view


def make_sample(args):
    """Two global views, then the local ones: what common.Views calls with image sizes and uniform draws, and their number."""
    kinds = [(args.global_scale, args.image_size)] * 2 + [(args.local_scale, args.local_size)] * args.local_crops

    def sample(index, sizes, draws):
        draws = draws.reshape(len(index), len(kinds), DRAWS)
        cuts, colours = [], []
        for view, (scale, size) in enumerate(kinds):
            crop, colour = np.split(draws[:, view], [common.CROP_DRAWS], axis=1)
            cuts.append((index, common.random_resized_crop(sizes, crop, scale), size))
            colours.append(common.random_colour(colour, args.jitter, args.jitter_p, args.gray_p, args.blur_p))
        return cuts, np.stack(colours, 1)

    return sample, len(kinds) * DRAWS


def show_views(args, loader, device):
    """Write a grid of all views, as the network gets them but for the normalisation."""
    batch = next(iter(loader))
    views = common.colour_views(batch, device)
    labels = ("global 1", "global 2", "local 1", "local 2")[: len(views)]
    common.save_grid(args.show_views, [v[:12] for v in views], labels)
    common.say(f"views written to {args.show_views}")


# ------------------------------------------ 3. encoder (same in all five files)


class NormalizeOverProcesses(torch.autograd.Function):
    """Batch norm of (n, C, ...) by the statistics of all processes' slices, of one size: (output, mean, biased variance).

    As nn.SyncBatchNorm, which needs GPUs, but of operations that CPUs have, too. With r = (var + eps)^-1/2, z = (x - mean) r
    and means E over all processes, dx = weight r (g - E[g] - z E[g z]); weight and bias get this process's sums, as from other
    layers. One collective forward, one backward; nothing of x's size is kept but x.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        unused = torch.zeros(2, len(weight), dtype=weight.dtype, device=x.device)  # makes the statistics of bf16 float32
        means, variances = gather(torch.stack(torch.batch_norm_update_stats(x, *unused, 0.0)).unsqueeze(0)).unbind(1)
        mean = means.mean(0)
        var = (variances + (means - mean).square()).mean(0)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.mark_non_differentiable(mean, var)
        ctx.eps = eps
        return F.batch_norm(x, mean, var, weight, bias, eps=eps), mean, var

    @staticmethod
    def backward(ctx, gradient, *_):
        x, weight, mean, var = ctx.saved_tensors
        r = (var + ctx.eps).rsqrt()
        statistics = mean, var, mean, r, True, ctx.eps, [False, True, True]  # the sums of g z and g alone
        _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(gradient, x, weight, *statistics)
        scale = weight * r
        slope, shift = -scale * gather(torch.stack([dweight, dbias]).unsqueeze(0)).mean(0) / (x.numel() // len(weight))
        dx = F.batch_norm(x, mean, var, slope, shift, eps=ctx.eps)
        return dx.addcmul_(gradient, scale.to(x.dtype).view(-1, *[1] * (x.dim() - 2))), dweight, dbias, None


class GroupedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose statistics are taken over `groups` equal slices of the global batch, for (N, C) or (N, C, H, W).

    Several groups emulate the separate batch norms of as many GPUs, on any number of processes that divides them. One
    group is one set of statistics over all processes. Running statistics are the mean over this process's groups;
    `average_buffers` then takes the mean over the processes.
    """

    def __init__(self, num_features, groups=1, affine=True):
        super().__init__(num_features, affine=affine)
        self.groups, self.after = groups, nn.Identity()

    def _check_input_dim(self, x):
        pass

    def forward(self, x):
        world = common.rank_and_world()[1]
        if not self.training or self.groups == world:  # this process is one group
            return self.after(super().forward(x))
        self.num_batches_tracked.add_(1)
        return self.after(self.over_all_processes(x) if self.groups == 1 else self.in_groups(x, self.groups // world))

    def in_groups(self, x, g):
        mean, var = self.running_mean.repeat(g, 1), self.running_var.repeat(g, 1)
        parts = zip(x.chunk(g), mean, var, strict=True)
        y = torch.cat([F.batch_norm(p, m, v, self.weight, self.bias, True, self.momentum, self.eps) for p, m, v in parts])
        with torch.no_grad():
            self.running_mean.copy_(mean.mean(0))
            self.running_var.copy_(var.mean(0))
        return y

    @torch.compiler.disable  # collectives
    def over_all_processes(self, x):
        weight = self.weight if self.affine else torch.ones_like(self.running_mean)
        bias = self.bias if self.affine else torch.zeros_like(self.running_mean)
        y, mean, var = NormalizeOverProcesses.apply(x, weight, bias, self.eps)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * count / (count - 1), self.momentum)
        return y


def group_batch_norms(module, groups):
    """Make every nn.BatchNorm1d/2d in a module a GroupedBatchNorm, in place, parameters kept; returns the module."""
    for norm in [m for m in module.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]:
        after = nn.Sequential(norm.drop, norm.act) if hasattr(norm, "act") else nn.Identity()  # timm's BatchNormAct2d
        norm.__class__, norm.groups, norm.after = GroupedBatchNorm, groups, after
    return module


# ===================================================================== 4. loss


class Affinity(nn.Module):
    """The learned affinity of two local crops: forward(a, b), (N, dim) each -> raw score (N,), high for crops of one image."""

    def __init__(self, dim, hidden):
        super().__init__()
        layers = [nn.Linear(2 * dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
        layers += [nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, a, b):
        return self.layers(torch.cat([a, b], dim=1)).squeeze(1)


def affinity_loss(affinity, local1, local2, noise=None, form="logistic"):
    """What the affinity minimises: it is to score two locals of one image above locals of two images (supplement, Eq. 4).

    local1, local2 (N, C) of unit length, row by row of the same image; both are detached here. Negatives: the other local of
    the batch rolled by one. noise (2, N, C) is added to the positives. logistic (released): softplus of minus the positives'
    and of the negatives' scores, both orders. linear (paper): -Omega, where Omega = E f(positive) - E f(negative) and f is the
    softplus of the score, so that f > 0; unbounded below. Returns a scalar.
    """
    a, b = local1.detach(), local2.detach()
    x, y = (0, 0) if noise is None else noise
    if form == "linear":
        return F.softplus(affinity(a, b.roll(1, 0))).mean() - F.softplus(affinity(a + x, b + y)).mean()
    positive = F.softplus(-affinity(a + x, b + y)) + F.softplus(-affinity(b + x, a + y))
    negative = F.softplus(affinity(a, b.roll(1, 0))) + F.softplus(affinity(b, a.roll(1, 0)))
    return (positive + negative).mean() / 2


def local_dissimilarity(affinity, local1, local2, form="logistic"):
    """L_ll, what the encoder minimises: the mean softplus of the affinity's score for two locals of one image, (N, C) each.

    The gradient goes to the locals only; the affinity is a constant. In the linear form this is f itself, in the logistic one
    the price of taking the pair for a negative: the same number, so form only has to be one of the two. Returns a scalar.
    """
    if form not in ("logistic", "linear"):
        raise ValueError(f"form {form!r}: logistic or linear")
    constants = {name: p.detach() for name, p in affinity.named_parameters()}
    return F.softplus(torch.func.functional_call(affinity, constants, (local1, local2))).mean()


def combine(args, global_terms, local_terms):
    """L_gg and L_lg: the mean of all terms (released), or L_gg + L_lg with the local terms summed (paper, D1)."""
    if args.variant == "released":
        return (sum(global_terms) + sum(local_terms)) / (len(global_terms) + len(local_terms))
    return sum(global_terms) / len(global_terms) + sum(local_terms)


# ------------- queue and keys (same in the four queue files: jcl, clim, logo too)


def info_nce(q, k, queue, temperature):
    """InfoNCE with a queue: the positive is the key of the same row, the negatives are the queue's keys.

    -mean log(exp(q.k / T) / (exp(q.k / T) + sum_j exp(q.queue_j / T))); q, k (N, C), queue (K, C), all of unit length. The
    gradient goes to q (and to k, if it has one); at equal logits the loss is log(K + 1). Returns a scalar.
    """
    positive = (q * k).sum(1, keepdim=True)
    logits = torch.cat([positive, q @ queue.T], dim=1) / temperature
    return F.cross_entropy(logits, logits.new_zeros(len(q), dtype=torch.int64))


class Queue(nn.Module):
    """The last `length` keys, first in first out; random unit vectors at the start. Any length, any batch."""

    def __init__(self, length, dim, seed):
        super().__init__()
        keys = torch.randn(length, dim, generator=common.generator(seed, 4))
        self.register_buffer("keys", F.normalize(keys, dim=1))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    @torch.no_grad()
    def enqueue(self, keys):
        """Replace the oldest by keys (n, dim), the same on every process; of more than `length` the last are kept."""
        length = len(self.keys)
        at = (self.position + torch.arange(len(keys), device=keys.device)) % length
        self.keys.index_copy_(0, at[-length:], keys[-length:].to(self.keys))
        self.position.add_(len(keys)).remainder_(length)


@torch.no_grad()
def encode_keys(encode, views, generator):
    """Keys of all processes for several views, shuffled for batch norm: (views, N, C).

    encode: images -> keys; views: list of this process's (n, 3, H, W). The keys of one image must not share their batch
    statistics with its query, or the batch tells which is which (MoCo, section 3.3): all views of the global batch are
    shuffled, each process encodes its part, and the keys are put back in order. The shuffle depends on the generator
    alone, so any number of processes makes the same groups.
    """
    rank, world = common.rank_and_world()
    n, total = len(views[0]), len(views) * len(views[0]) * world
    shuffle = torch.randperm(total, generator=generator)
    gathered = torch.arange(total).view(world, len(views), n).transpose(0, 1).flatten()  # where (view, image) came to lie
    mine = gathered[shuffle].view(world, -1)[rank].to(views[0].device, non_blocking=True)
    keys = gather(encode(gather(torch.cat(views)).index_select(0, mine)))
    return torch.empty_like(keys).index_copy_(0, shuffle.to(keys.device, non_blocking=True), keys).view(len(views), n * world, -1)


# ==================================================================== 5. model


class MoCo(nn.Module):
    """Query encoder, momentum (key) encoder and queue of MoCo v2; both globals are queries and keys, the locals queries."""

    def __init__(self, args, info):
        super().__init__()
        self.args, self.temperature = args, args.temperature
        self.backbone = group_batch_norms(common.build_backbone(info), args.bn_groups)
        width = self.backbone.head_hidden_size
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, args.dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(args.queue, args.dim, args.seed)

    def chance(self):
        terms = 1 if self.args.variant == "released" else 1 + 2 * self.args.local_crops
        return terms * math.log(self.args.queue + 1)

    def query(self, x):
        """(n, 3, H, W) -> (n, dim) of unit length, not in bf16."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    local = query  # the embedding that the affinity sees

    def key(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, step):
        """views: this process's two global and two or no local views (n, 3, H, W). Returns (loss, metrics: scalars, q, k and
        the locals' embeddings, all (n, dim), the last with their gradient).
        """
        one_way, rank = self.args.one_way, common.rank_and_world()[0]
        keyed = views[1:2] if one_way else views[:2]  # each view's keys in a batch of their own, as released
        draws = [common.generator(self.args.seed, step, 20 + i) for i in range(len(keyed))]
        keys = torch.cat([encode_keys(self.key, [x], draw) for x, draw in zip(keyed, draws, strict=True)])
        queries = [self.query(x) for x in (views[:1] if one_way else views)]
        k = keys.unflatten(1, (-1, len(queries[0])))[:, rank]  # this process's; the last is of the second global

        def nce(q, k):
            return info_nce(q, k, self.queue.keys, self.temperature)

        global_terms = [nce(queries[0], k[-1])] if one_way else [nce(queries[0], k[1]), nce(queries[1], k[0])]
        loss = combine(self.args, global_terms, [nce(q, key) for q in queries[2:] for key in k])
        self.new_keys = keys.flatten(0, 1)
        return loss, {"loss": loss.detach(), "q": queries[0].detach(), "k": k[-1], "locals": queries[2:]}

    def enqueue(self):
        """After the backward pass, which still needs the old queue."""
        self.queue.enqueue(self.new_keys)

    @torch.no_grad()
    def update_momentum_encoder(self, m):
        """theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2). Parameters only: the copies keep their own BN statistics."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


class SimSiam(nn.Module):
    """Siamese encoder and predictor: negative cosines, no keys, no queue (SimSiam, section 3)."""

    def __init__(self, args, info):
        super().__init__()
        self.args = args
        self.backbone = group_batch_norms(common.build_backbone(info), args.bn_groups)
        for block in self.backbone.modules():  # SimSiam starts from zero residual branches
            if hasattr(block, "zero_init_last"):
                block.zero_init_last()

        def layer(a, b, relu=True):
            norm = GroupedBatchNorm(b, args.bn_groups)
            return [nn.Linear(a, b, bias=False), norm, *[nn.ReLU(inplace=True)] * relu]

        widths = [self.backbone.head_hidden_size] + [args.dim] * args.layers
        pairs = zip(widths, widths[1:], strict=False)
        self.projector = nn.Sequential(*[m for i, pair in enumerate(pairs) for m in layer(*pair, relu=i < args.layers - 1)])
        self.predictor = nn.Sequential(*layer(args.dim, args.hidden), nn.Linear(args.hidden, args.dim))

    def chance(self):
        return 0.0

    def project(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.projector(self.backbone(x)).to(x.dtype)

    def local(self, x):
        return F.normalize(self.project(x), dim=1)

    def forward(self, views, step):
        """As MoCo.forward: p = predictor(z) is drawn to z of another view, and z is a constant there."""
        z = [self.project(x) for x in views]
        p1, p2, *local = [self.predictor(v) for v in z]
        z1, z2 = (v.detach() for v in z[:2])

        def distance(p, z):
            return -F.cosine_similarity(p, z, dim=1).mean()

        local_terms = [distance(p, target) for p in local for target in (z1, z2)]
        loss = combine(self.args, [distance(p1, z2), distance(p2, z1)], local_terms)
        q, k, *local = [F.normalize(v, dim=1) for v in (z1, z2, *z[2:])]
        return loss, {"loss": loss.detach(), "q": q, "k": k, "locals": local}

    def enqueue(self):
        pass  # no queue

    def update_momentum_encoder(self, m):
        pass  # no momentum encoder


class GatherWithGradient(torch.autograd.Function):
    """x -> (world, *x.shape) of all processes; each process's gradient flows back to the one whose x it was."""

    @staticmethod
    def forward(ctx, x):
        return gather(x.unsqueeze(0))

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


class LocalToLocal:
    """The affinity with its optimiser, and the encoder's step away from it (Algorithm 1).

    With the weighting "clip" (released) that step is the encoder's own, by a second SGD without weight decay, its gradient
    clipped to clip_ratio times the norm of the last main gradient, and before the main loss is computed; none is made before
    there is such a norm. With "lambda" (paper) L_ll is a term of the main loss.
    """

    def __init__(self, args, model, device):
        self.args, self.model, self.norm = args, model, torch.zeros((), device=device)
        self.affinity = Affinity(args.dim, args.affinity_hidden).to(device)
        distributed = dist.is_initialized()
        self.wrapped = DistributedDataParallel(self.affinity, broadcast_buffers=False) if distributed else self.affinity
        rate = args.affinity_lr or args.lr * args.batch_size / args.lr_batch  # constant
        self.optimizer = torch.optim.SGD(self.affinity.parameters(), rate, momentum=0.9, weight_decay=args.weight_decay)
        self.parameters = [*model.backbone.parameters(), *model.projector.parameters()]
        self.second = torch.optim.SGD(self.parameters, lr=0.0, momentum=0.9)

    def dissimilarity(self, local, step):
        """L_ll of the whole batch, with a gradient to this process's locals, after a step of the affinity; and metrics."""
        if dist.is_initialized():
            local = [GatherWithGradient.apply(x).flatten(0, 1) for x in local]
        noise = None
        if self.args.affinity_form == "logistic":
            draws = common.generator(self.args.seed, step, 30)
            noise = torch.randn(2, *local[0].shape, generator=draws, pin_memory=local[0].is_cuda)
            noise = noise.to(local[0], non_blocking=True) * 0.3 / self.args.dim**0.5
        loss = affinity_loss(self.wrapped, *local, noise, self.args.affinity_form)
        self.optimizer.zero_grad()
        loss.backward()
        finite_gradient(self.affinity.parameters())
        self.optimizer.step()
        dissimilarity = local_dissimilarity(self.affinity, *local, self.args.affinity_form)
        return dissimilarity, {"affinity_loss": loss.detach(), "dissimilarity": dissimilarity.detach()}

    def step(self, views, step, lr):
        """The encoder's clipped step. views: the two local ones. Returns the metrics."""
        loss, metrics = self.dissimilarity([self.model.local(x) for x in views], step)
        gradients = torch.autograd.grad(loss, self.parameters)
        if dist.is_initialized():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat.div_(dist.get_world_size()))
            parts = flat.split([gradient.numel() for gradient in gradients])
            gradients = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
        scale = (self.args.clip_ratio * self.norm / torch.nn.utils.get_total_norm(gradients)).clamp(max=1)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient * scale.nan_to_num()  # while the norm is 0, so is the step
        finite_gradient(self.parameters)
        self.second.param_groups[0]["lr"] = lr
        self.second.step()
        return metrics

    def parts(self):
        return dict(affinity=self.affinity, optimizer=self.optimizer, second=self.second)

    def state(self):
        return {name: part.state_dict() for name, part in self.parts().items()} | {"norm": self.norm}

    def load(self, state):
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.norm.copy_(state["norm"])


# ---------------------------------------- 6. distributed (same in all five files)


def init_distributed(args):
    """Join torchrun's process group, if there is one; returns this process's device."""
    torch.set_flush_denormal(True)  # denormal numbers make a CPU several times slower
    common.keep_memory()
    warnings.filterwarnings("ignore", ".*(broadcast_buffers|Grad strides do not match).*")  # about speed and names only
    use_cuda = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if use_cuda:
        if (local := int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > torch.cuda.device_count():
            common.fail(f"{local} processes, but {torch.cuda.device_count()} GPU(s) here: lower --nproc_per_node")
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        store, rank, world = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # torchrun's restarts keep a store that holds dead workers' addresses
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group("nccl" if use_cuda else "gloo", store=store, rank=rank, world_size=world, timeout=common.PATIENCE)
        sys.excepthook = common.end_without_peer
    args.bf16 = args.amp == "bf16" or (args.amp == "auto" and use_cuda)
    world = common.rank_and_world()[1]
    if args.bn_groups > 1 and args.bn_groups % world:
        common.say(f"batch-norm groups: {args.bn_groups} cannot be shared out over {world} processes, so {world} are used")
        args.bn_groups = world
    if args.batch_size % args.bn_groups or args.batch_size // args.bn_groups < 2:
        common.fail(f"--batch-size {args.batch_size} cannot be divided into {args.bn_groups} batch-norm groups of 2 or more")
    return device


def gather(x):
    """(n, ...) of each process -> (N, ...) of all, in rank order, without gradient."""
    world = common.rank_and_world()[1]
    if world == 1:
        return x
    out = x.new_empty(world * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def require_agreement(what, value, device):
    """Exit with a line unless all processes have the same value, an int."""
    mine = torch.tensor([value], device=device)
    if (gather(mine) != mine).any():
        common.fail(f"the processes of this run have different {what}")


@torch.no_grad()
def finite_gradient(parameters):
    """The gradient's norm. One that is not finite is then put to 0: no weight sees it, and `EpochLog.check` stops the run."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    bad = ~norm.isfinite()  # stays on the device, which is not waited for
    for gradient in gradients:
        gradient.masked_fill_(bad, 0)
    return norm


def average_buffers(model):
    """Make batch norm's running statistics the mean over the processes: one collective."""
    world = common.rank_and_world()[1]
    norms = [m for m in model.modules() if isinstance(m, GroupedBatchNorm)]
    buffers = [b for m in norms for b in (m.running_mean, m.running_var)]
    if world > 1 and buffers:
        flat = torch.cat(buffers)
        dist.all_reduce(flat)
        torch._foreach_copy_(buffers, flat.div_(world).split([len(b) for b in buffers]))


# ---------------------------- 7. schedule and checkpoint (same in all five files)


def schedule(args, step, steps_per_epoch):
    """(learning rate, weight decay, momentum of the momentum encoder) of a step.

    The rate warms up linearly, then falls by a cosine to min_lr, or by 10 at each of the recipe's milestones (shares of the
    run). A pair of weight decays or momenta is the start and the end of a cosine.
    """
    epoch, done = step / steps_per_epoch, step / (args.epochs * steps_per_epoch)
    peak, warmup = args.lr * args.batch_size / args.lr_batch, args.warmup

    def cosine(start, end, t):
        return end + (start - end) * (1 + math.cos(math.pi * t)) / 2

    if epoch < warmup:
        lr = peak * epoch / warmup
    elif getattr(args, "milestones", None):
        lr = peak * 0.1 ** sum(done >= m for m in args.milestones)
    else:
        lr = cosine(peak, args.min_lr, (epoch - warmup) / (args.epochs - warmup))
    pair = [v if isinstance(v, (tuple, list)) else (v, v) for v in (args.weight_decay, args.momentum)]
    return lr, *(cosine(start, end, done) for start, end in pair)


def parameter_groups(model, skip_vectors):
    """Two optimiser groups of the trainable parameters; with skip_vectors, biases and other 1-D tensors do not decay."""
    groups = [dict(params=[], decays=True), dict(params=[], decays=False)]
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[skip_vectors and parameter.dim() <= 1]["params"].append(parameter)
    return [g for g in groups if g["params"]]


class EpochLog:
    """Sums of an epoch's metrics, kept on the device, and its last embeddings: all that resuming in mid-epoch needs."""

    last = 1024  # images whose embeddings are kept for the health figures

    def __init__(self, state=None):
        rank, world = common.rank_and_world()
        self.names, self.sums, self.steps, self.pairs = [], None, 0, []
        if state and state["steps"]:
            self.names, self.steps = state["names"], state["steps"] + 0  # a number, or a TypeError
            self.pairs = [] if state["pairs"] is None else [state["pairs"].cpu()]
            same = len(state["sums"]) == world
            self.sums = state["sums"][rank] if same else state["sums"].mean(0)

    def add(self, metrics, step, images_left):
        """metrics: detached scalars, and q and k, this process's embeddings and their positives."""
        q, k = metrics.pop("q"), metrics.pop("k")
        values = torch.stack([v.double() for v in metrics.values()])
        bad = torch.where(values.isfinite().all(), math.inf, float(step)).view(1)  # the first step that is no number
        if self.sums is None:
            self.names, self.sums = list(metrics), torch.cat([torch.zeros_like(values), bad])
        self.sums = self.sums.to(values.device, non_blocking=True)
        self.sums[:-1] += values
        self.sums[-1:] = torch.minimum(self.sums[-1:], bad)
        self.steps += 1
        if images_left < self.last:
            self.pairs.append(gather(torch.stack([q, k], 1)))

    def state(self):
        """The same on every process, whole: what `EpochLog(state)` goes on from."""
        pairs = torch.cat([p.cpu() for p in self.pairs]) if self.pairs else None
        sums = gather(self.sums.unsqueeze(0)).cpu() if self.steps else None
        return dict(names=self.names, steps=self.steps, sums=sums, pairs=pairs)

    def check(self, sampler):
        """Stop in words if a loss was not a number; nothing has been saved since. Waits for the device."""
        bad = gather(self.sums[-1:]).min().item()
        if bad < math.inf:
            images = ", ".join(map(str, sampler.batch(int(bad))[:8]))
            common.fail(
                f"the loss or its gradient is not finite since step {bad:.0f} (images {images}, ...); the last checkpoint is "
                "from before it: go on with --amp off, or with a lower --lr in a new --out and --resume PATH"
            )

    def means(self):
        """{name: mean over the epoch and the processes}, and the health figures."""
        mean = gather(self.sums[None, :-1]).mean(0) / self.steps
        pairs = [p.to(mean.device) for p in self.pairs]
        health = common.embedding_health(*torch.cat(pairs)[-self.last :].unbind(1))
        return dict(zip(self.names, mean.tolist(), strict=True)) | health


def restore(state, model, optimizer, more=None):
    """Load a last.pt's state (the rest by `more(state)`); returns (step, EpochLog). Exits with a line if it does not fit."""
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if more:
            more(state)
        return state["step"], EpochLog(state["log"])
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        common.fail(f"the checkpoint does not fit this model: {' '.join(str(error).split())[:300]}")


# ===================================================================== 8. main


def introduce(args, model, train, test, steps):
    """The first lines of a run: everything that its numbers depend on."""
    world, size = common.rank_and_world()[1], sum(p.numel() for p in model.backbone.parameters()) / 1e6
    queue = f"queue {args.queue} ({100 * args.queue / len(train):.1f} % of the data set); negatives per query {args.queue}"
    queue = queue if args.base == "moco" else "no queue, no negatives"
    l2l = f"L2L {args.affinity_form}, {args.l2l_weighting}" if args.l2l else "no L2L"
    common.say(
        f"{METHOD} on {args.base}, {args.local_crops} local crops of {args.local_size} px, {l2l}, variant {args.variant}; "
        f"encoder {args.arch}, {size:.2f} M parameters, image {args.image_size} px; evaluated: the {EVALUATED} encoder\n"
        f"data {args.dataset}: {len(train)} training images ({train.memory()}), {len(test) if test else 'no'} test images, "
        f"{len(train.classes) or 'no'} classes; mean {args.norm[0]}, std {args.norm[1]}\n"
        f"batch {args.batch_size} over {world} process(es), {args.batch_size // world} each; {steps} steps an epoch, "
        f"{args.epochs} epochs; {'bf16' if args.bf16 else 'float32'}; batch-norm groups {args.bn_groups}\n"
        f"rate {args.lr:g} at batch {args.lr_batch}, scaled linearly to {args.lr * args.batch_size / args.lr_batch:g}; "
        f"weight decay {args.weight_decay}, momentum {args.momentum}, temperature {args.temperature}\n"
        f"global areas {args.global_scale}, local {args.local_scale}; {queue}; chance level of the loss {model.chance():.3f}"
    )


def make_optimizer(args, model):
    """SGD as in MoCo."""
    return torch.optim.SGD(parameter_groups(model, skip_vectors=False), lr=0.0, momentum=0.9)


def train_step(args, model, wrapped, optimizer, l2l, batch, step, steps, device):
    """One step of Algorithm 1. Returns the metrics, on the device."""
    views = [common.normalize(v, *args.norm) for v in common.colour_views(batch, device)]
    lr, weight_decay, momentum = schedule(args, step, steps)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = lr, weight_decay if group["decays"] else 0.0
    # What still draws from the global generator (drop-path) depends on nothing but this.
    torch.manual_seed(common.generator(args.seed, step, 0, common.rank_and_world()[0]).initial_seed())
    clipped, metrics = args.l2l and args.l2l_weighting == "clip", {}
    if clipped:
        metrics = l2l.step(views[2:], step, lr)
    loss, more = wrapped(views, step)
    local, metrics = more.pop("locals"), more | metrics
    if args.l2l and not clipped:
        dissimilarity, more = l2l.dissimilarity(local, step)
        loss, metrics = loss + args.lam * dissimilarity, metrics | more
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    metrics["grad_norm"] = finite_gradient(model.parameters())
    l2l.norm.copy_(metrics["grad_norm"])
    optimizer.step()
    model.update_momentum_encoder(momentum)
    model.enqueue()
    average_buffers(model)
    return metrics


@common.memory_in_words
def main(args):
    device = init_distributed(args)
    more = dict(interpolation=args.interpolation, method=METHOD, encoder=EVALUATED)
    info = common.backbone_info(args.arch, args.image_size, args.patch_size, args.norm, **more)
    config = {"method": METHOD, **vars(args), "backbone": info}
    flags = json.dumps({name: value for name, value in config.items() if name not in common.OPERATING})
    require_agreement("flags", zlib.crc32(flags.encode()), device)
    checkpoint = None if args.show_views else common.open_run(args.out, config, args.resume)
    data = dict(size=args.image_size, cache=not args.no_cache, skip_bad=args.skip_bad_images)
    train = common.load_images(args.dataset, args.data_dir, True, unlabeled=True, **data)
    test = common.load_images(args.dataset, args.data_dir, False, **data) if train.classes else None
    require_agreement("numbers of images: check --data-dir", len(train), device)
    if len(train) < args.batch_size:
        common.fail(f"{len(train)} images are fewer than one batch: give --batch-size {len(train)} or less")
    workers = args.workers if args.workers is not None else common.default_workers(device)
    sampler = common.EpochSampler(len(train), args.batch_size, args.seed)
    views = common.Views(train, *make_sample(args), args.seed, args.interpolation)
    loader = common.make_loader(views, sampler, workers, device)
    if args.show_views:
        return show_views(args, loader, device)
    state = common.load_run(checkpoint, config, len(train)) if checkpoint else None
    require_agreement("checkpoints: --out must be on a disk that all nodes share", state["step"] if state else 0, device)

    torch.manual_seed(args.seed)
    model = (MoCo if args.base == "moco" else SimSiam)(args, info).to(device, memory_format=torch.channels_last)
    l2l = LocalToLocal(args, model, device)
    if args.grad_checkpoint:
        model.backbone.set_grad_checkpointing()
    if args.compile:
        model.backbone.compile()
        if args.base == "moco":
            model.momentum_backbone.compile()
    optimizer = make_optimizer(args, model)
    steps, step, log = len(train) // args.batch_size, 0, EpochLog()
    total = args.epochs * steps
    end = min(total, args.max_steps or total)
    if state:
        step, log = restore(state, model, optimizer, lambda state: l2l.load(state["l2l"]))
    if step >= end:
        last = next((r for r in reversed(common.read_metrics(Path(args.out) / "metrics.jsonl")) if "loss" in r), {})
        return common.say(f"{args.out} is at step {step} of {end} already. Its last epoch: {json.dumps(last)}")
    distributed = dist.is_initialized()
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True) if distributed else model
    encoder, options = model.backbone, dict(workers=workers, amp=args.bf16)
    environment = common.environment(device)
    common.say(", ".join(f"{k} {v}" for k, v in environment.items()))
    introduce(args, model, train, test, steps)
    common.begin_run(Path(args.out), config, checkpoint, step)
    if checkpoint is None or Path(checkpoint).parent != Path(args.out):
        record = dict(step=step, **environment, arguments=config, chance=model.chance())
        quick = train.array is not None and (device.type == "cuda" or len(train) <= 10_000)
        if step == 0 and args.knn_every and test is not None and quick:
            record |= common.knn_floors(encoder, train, test, info, device, **options)
        common.write_metrics(args.out, record, args.epochs)

    stop, stopping = common.StopRequest(), False
    while step < end and not stopping:
        sampler.epoch, sampler.start = step // steps, step % steps
        began = ready = time.perf_counter()
        waited, first = 0.0, step
        for batch in loader:
            waited += time.perf_counter() - ready
            metrics = train_step(args, model, wrapped, optimizer, l2l, batch, step, steps, device)
            log.add(metrics, step, images_left=(steps - 1 - step % steps) * args.batch_size)
            step += 1
            if step % 10 == 0:
                log.check(sampler)
                pace = (time.perf_counter() - began) / (step - first)
                where = f"epoch {sampler.epoch + 1}/{args.epochs}  step {step}/{total}  loss {metrics['loss']:.3f}"
                common.progress(f"{where}  {args.batch_size / pace:.0f} images/s  {pace * (end - step) / 60:.1f} min left")
            if step == end or stop.agreed(step):
                break
            ready = time.perf_counter()
        log.check(sampler)
        epoch, seconds = step // steps, time.perf_counter() - began
        if step % steps == 0:
            lr, _, momentum = schedule(args, step - 1, steps)
            record = dict(epoch=epoch, step=step, **log.means(), lr=lr, momentum=momentum)
            record |= dict(below_chance=model.chance() - record["loss"], data_wait=waited / seconds)
            record |= dict(images_per_s=(step - first) * args.batch_size / seconds)
            if args.knn_every and test is not None and (epoch % args.knn_every == 0 or step == total):
                found = common.knn_accuracy(encoder, train, test, info, device, **options)
                record |= {f"knn{k}_top1": top1 for k, top1 in found.items()}
            common.write_metrics(args.out, record, args.epochs, args.tensorboard)
            log = EpochLog()
        stopping = stop.agreed()
        kept = args.keep_every and step % steps == 0 and epoch % args.keep_every == 0
        if step % steps or step == end or stopping or epoch % args.save_every == 0 or kept:
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, log=log.state())
            state |= dict(config=config, backbone=info, images=len(train), l2l=l2l.state())
            common.save_run(Path(args.out), state, encoder.state_dict(), f"epoch-{epoch:04d}.pt" if kept else None)
    if step == total:
        common.say(f"finished. Judge it: python eval_knn.py {args.out}; python eval_linear.py {args.out}")
    else:
        why = " on request (exit status 75)" * stopping
        common.say(f"stopped at step {step} of {total}{why}, saved in {args.out}; the same command goes on from there")
    if distributed:
        del wrapped, l2l  # before the group: in torch 2.11 a DDP that goes last can hang for ever
        dist.destroy_process_group()
    if stopping and step < end:
        raise SystemExit(75)  # stopped on request, not done


if __name__ == "__main__":
    main(parse_args())
