"""CLIM: Center-wise Local Image Mixture (Li et al., ICLR 2021 submission, arXiv 2011.02697), on MoCo v2.

MoCo's only positives are views of the same image. CLIM adds other images. Every few epochs all images are embedded and
clustered; the positives of an image are those of its k nearest neighbours that share its cluster and lie closer to the
cluster's centre than the image itself, so that similar images move towards centres together. Neighbours may be wrong, so they
are not trusted outright: image and positive are mixed by CutMix, and the mix is drawn to both keys by the share that each has
in it. Multi-resolution, a second augmentation, compares the same crop at several input sizes, every query with every key.

    Eq. 1              clim_loss, its nce                  (info_nce: the same as a function of its own)
    Eq. 2, App. A.2    kmeans, nearest_neighbors, select_positives
    Eq. 3              cutmix
    Eq. 4              clim_loss
    Eq. 6              CLIM.forward                        the sum over pairs of resolutions
    Table 6            choose_positives, --selection, --mix

    python clim.py                                                            # laptop, no data
    python clim.py --dataset cifar10 --selection none                         # the baseline, MoCo v2, one GPU
    torchrun --nproc_per_node=8 clim.py --dataset imagenet --data-dir DIR

Baseline: `--selection none` with one resolution is MoCo v2 exactly. New relative to it: kmeans, nearest_neighbors,
select_positives, cutmix, clim_loss, choose_positives, two more views of the positive, and the loops of CLIM.forward.

What a choice of positives costs on ImageNet (n = 1.28 M, d = 128, m = 10,000 clusters), besides a pass over all images: the
neighbours 2 n^2 d = 4.2e14 operations in float32, whose results, 6.6 TB, are written and read about five times (candidates, of
which float64 chooses); 20 iterations of k-means 40 n m d = 6.6e13 operations in float64. From the data sheet of an H100 (67
TFLOP/s in either, 3.3 TB/s) some 20 s on one. An estimate, not measured. Memory: x 2.6 GB, a chunk 0.7 GB, the table 51 MB.

There is no released code (`--variant released` is refused). Where the paper is silent, this is inference: the embedding is the
momentum encoder's unit-length output for a centre crop; an image is no neighbour of itself; the positive's key comes from a
view of its own; one CutMix box a batch, as in CutMix's code; without mixing, half the loss goes to each key; MoCo v2's
temperature and colour jitter; the first table after --clim-start epochs of plain MoCo v2; the anchor's own key is enqueued;
all recipes but ImageNet's.

Departures:
    D1 Eq. 2 would let an image be its own positive (equality); it is left out, unless it is the only image
    D2 App. A.2 tops up with neighbours that Eq. 2 excludes: followed
    D3 Eq. 6 is a sum, four terms for two sizes, which raises the effective rate: as printed; small images have one size here
    D4 Table 7's {224, 224} does not say what differs: here the crop is the same and the colours are drawn anew
"""

import copy
import importlib.util
import itertools
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

METHOD = "clim"
EVALUATED = "query"  # the encoder that the authors evaluate

# ================================================================ 1. arguments

# fmt: off
# "by" holds what depends on another flag. The rate is that of batch size lr_batch.
COMMON = dict(
    selection="center", mix="cutmix", num_positives=10, alpha=2.0, refresh_every=5, clim_start=5,  # App. A.2, Table 9
    crop_scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray_p=0.2,
    blur_p=0.5, interpolation="bilinear", norm=common.IMAGENET_NORM, patch_size=16,
    warmup=0, min_lr=0.0, dim=128, bn_groups=8, momentum=0.999, weight_decay=1e-4, temperature=0.2,
    knn_k=40, by=dict(selection=dict(knn=dict(knn_k=10))),  # Table 6: the comparison with kNN draws from the nearest ten
)
IMAGENET = dict(  # App. A, but for the epochs: 200 as in section 4.4 (App. A: 1,200); Table 7's best sizes
    COMMON, arch="resnet50", image_size=224, epochs=200, batch_size=512, lr=0.06, lr_batch=512, queue=65536, bn_groups=16,
    num_clusters=10000, resolutions=(224, 160),
)
CIFAR = dict(  # ours: moco_jointcrop.py's, so that the two can be compared, and as many images a cluster as on ImageNet
    COMMON, arch="resnet18", image_size=32, patch_size=4, epochs=500, batch_size=512, lr=0.5, lr_batch=512, min_lr=0.05,
    queue=4096, blur_p=0.0, num_clusters=400, resolutions=(32,), by=COMMON["by"] | dict(arch=dict(  # for CPUs
        resnet_micro=dict(batch_size=256, lr=0.1, lr_batch=256, min_lr=0.0, momentum=0.99, blur_p=0.5)
    )),
)
RECIPES = {
    "patterns": dict(  # ours, for two CPU cores
        COMMON, arch="resnet_micro", image_size=32, patch_size=4, epochs=45, batch_size=64, lr=0.06, lr_batch=128, queue=128,
        blur_p=0.1, crop_scale=(0.3, 1.0), norm=common.NORMS["patterns"], bn_groups=2, momentum=0.95, warmup=5,
        num_clusters=32, resolutions=(32,),
    ),
    "cifar10": dict(CIFAR, norm=common.NORMS["cifar10"]),
    "cifar100": dict(CIFAR, norm=common.NORMS["cifar100"]),
    "stl10": dict(CIFAR, image_size=96, patch_size=8, queue=8192, num_clusters=800, resolutions=(96,)),
    "imagenet100": dict(IMAGENET, arch="resnet18", queue=16384, num_clusters=1000),  # ours
    "imagenet": IMAGENET,
    "folder": IMAGENET,  # ours
}
# fmt: on


def parse_args(argv=None):
    """The command line as a namespace in which every value of the recipe is filled in. Exits with a line on a mistake."""
    parser = common.ArgumentParser("clim.py", description=__doc__.splitlines()[0])
    add_run_flags(parser)
    group = parser.add_argument_group("CLIM")
    group.add_argument("--selection", choices=("none", "random", "knn", "kmeans", "center"), help="of positives (Table 6)")
    group.add_argument("--mix", choices=("cutmix", "none"), help="none: half the loss to each key (Table 6)")
    group.add_argument("--num-clusters", type=int, metavar="N", help="m (Table 8)")
    group.add_argument("--knn-k", type=int, metavar="N", help="nearest neighbours, k (Table 8)")
    group.add_argument("--num-positives", type=int, metavar="N", help="kept of them (App. A.2)")
    group.add_argument("--alpha", type=float, metavar="A", help="of CutMix's Beta(A, A) (Table 9)")
    group.add_argument("--resolutions", type=int, nargs="+", metavar="N", help="the largest is the image size (Table 7)")
    group.add_argument("--refresh-every", type=int, metavar="N", help="epochs between choices of positives")
    group.add_argument("--clim-start", type=int, metavar="N", help="epochs of plain MoCo v2 before the first choice")
    flags = "selection mix num_clusters knn_k num_positives alpha resolutions refresh_every clim_start".split()
    args = parser.parse_args(argv)
    if args.variant == "released":
        common.fail("--variant released: CLIM has no released code; leave it out")
    if args.resolutions or args.image_size:  # either gives the other
        args.resolutions = tuple(sorted(args.resolutions or [args.image_size], reverse=True))
        args.image_size = args.image_size or args.resolutions[0]
    args = resolve(args, method_flags=dict.fromkeys(flags))
    least = min(args.num_clusters, args.knn_k, args.num_positives, args.refresh_every, args.clim_start + 1, *args.resolutions)
    if least < 1 or args.num_positives > 1000 or not 0 < args.alpha < math.inf:
        whole = "--num-clusters, --knn-k, --num-positives (to 1000), --refresh-every, --resolutions"
        common.fail(f"{whole}: 1 or more; --clim-start: 0 or more; --alpha: above 0")
    if args.resolutions[0] != args.image_size:
        common.fail(f"--resolutions: the largest, {args.resolutions[0]}, must be the --image-size, {args.image_size}")
    if args.arch.startswith(("vit_", "deit")) and any(size % args.patch_size for size in args.resolutions):
        common.fail(f"--resolutions: --patch-size {args.patch_size} must divide each of {args.resolutions}")
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


def make_sample(args, images, positives):
    """Query and key view of an image, then key and query view of its positive, drawn from the table (N, num_positives) for
    this epoch: the function that common.Views calls with image sizes and uniform draws, and their number. While the table is
    -1, the first two only. A size that --resolutions names twice gets all views again, the same crops in other colours.
    """
    copies = max(args.resolutions.count(size) for size in args.resolutions)

    def sample(index, sizes, draws):
        table, turn = positives[torch.from_numpy(index)].numpy().astype(np.int64), draws[:, -1]
        draws = draws[:, :-1].reshape(len(index), copies, 4, DRAWS)
        pick = table[np.arange(len(index)), (turn * table.shape[1]).astype(int)]
        sources = [(index, sizes)] * 2
        if pick[0] >= 0:
            sources += [(pick, images.sizes(pick))] * (2 if args.mix == "cutmix" else 1)
        cuts, colours = [], []
        for again, (view, (source, size)) in itertools.product(range(copies), enumerate(sources)):
            crop, colour = draws[:, 0, view, : common.CROP_DRAWS], draws[:, again, view, common.CROP_DRAWS :]
            cuts.append((source, common.random_resized_crop(size, crop, args.crop_scale), args.image_size))
            colours.append(common.random_colour(colour, args.jitter, args.jitter_p, args.gray_p, args.blur_p))
        return cuts, np.stack(colours, 1)

    return sample, copies * 4 * DRAWS + 1


def cutmix(x, partner, lam, generator=None):
    """Eq. 3, as CutMix has it: a box of about (1 - lam) of the area of x is replaced by the same box of the partner.

    x, partner (N, 3, H, W); lam in [0, 1]: a float, one box for all, or (N,), a box an image. The box's centre is uniform in
    the image, and what hangs over the edge is cut off. Returns (mixed, the share of x that is left: a float or (N,) float64).
    """
    height, width = x.shape[2:]
    side = (1 - torch.as_tensor(lam, dtype=torch.float64).cpu().reshape(-1)).sqrt()

    def extent(size):
        middle = (torch.rand(len(side), dtype=torch.float64, generator=generator) * size).long()
        half = (side * size).long() // 2
        return [(middle + sign * half).clamp(0, size).view(-1, 1) for sign in (-1, 1)]

    (top, bottom), (left, right) = extent(height), extent(width)
    rows, columns = (torch.arange(n) for n in (height, width))
    box = ((rows >= top) & (rows < bottom))[:, None, :, None] & ((columns >= left) & (columns < right))[:, None, None, :]
    kept = 1 - ((bottom - top) * (right - left)).flatten().double() / (height * width)
    mixed = torch.where(box.to(x.device, non_blocking=True), partner, x)
    return mixed, kept if torch.is_tensor(lam) and lam.dim() else kept.item()


def show_views(args, loader, device):
    """Write a grid of all views and the mix, as the network gets them but for the normalisation."""
    batch = next(iter(loader))
    views = [view[:12] for view in common.colour_views(batch, device)][:4]
    labels = ["query view", "key view", "key, positive", "query, positive"][: len(views)]
    if len(views) == 4:
        lam = torch.rand(len(views[0]), generator=common.generator(args.seed))
        views, labels = [*views, cutmix(views[0], views[3], lam, common.generator(args.seed))[0]], [*labels, "query, mixed"]
        common.say("no encoder has chosen positives yet: they are random here")
    common.save_grid(args.show_views, views, labels)
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


def clim_loss(q, k_anchor, k_positive, queue, temperature, lam):
    """Eq. 4: lam InfoNCE(q, k_anchor) + (1 - lam) InfoNCE(q, k_positive), with the queue's keys as negatives of both.

    q, k_anchor, k_positive (N, C), queue (K, C), all of unit length; lam in [0, 1], a float or (N,). The gradient goes to q
    (and to the keys, if they have one). lam = 1 is MoCo's loss. Returns a scalar.
    """
    negatives, target = q @ queue.T, torch.zeros(len(q), dtype=torch.int64, device=q.device)
    lam = lam.to(q) if torch.is_tensor(lam) else lam

    def nce(k):
        return F.cross_entropy(torch.cat([(q * k).sum(1, keepdim=True), negatives], 1) / temperature, target, reduction="none")

    return (lam * nce(k_anchor) + (1 - lam) * nce(k_positive)).mean()


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


# ------------------------------------------------------- positives (section 3.2.1)


def in_chunks(function, rows, width):
    """function(indices) of all rows, sharded over processes, in chunks of 128 MiB (`width` float64 numbers a row) or 128 rows."""
    rank, world = common.rank_and_world()
    mine = rows.tensor_split(world)[rank].split(max(128, 2**24 // width))
    return common.gather_uneven(torch.cat([function(part) for part in mine]))


def nearest_center(x, centers):
    """x (N, C), centers (m, C) -> (N,) int64: each row's nearest centre by L2 distance."""
    half, rows = centers.square().sum(1) / 2, torch.arange(len(x), device=x.device)
    return in_chunks(lambda part: (x[part] @ centers.T - half).argmax(1), rows, len(centers))


def largest(x, k):
    """(values, indices), (n, k) each, as of x.topk(k) for x (n, N), sooner where N is large.

    The k largest of a row lie in those k groups of 16 columns whose maxima are largest; only these groups are sorted.
    """
    groups = x.shape[1] // 16  # column i is in group i % groups; what is left over is in none
    if groups <= k:
        return x.topk(k)
    group = x[:, : 16 * groups].unflatten(1, (16, groups)).amax(1).topk(k).indices
    column = torch.arange(x.shape[1], device=x.device)
    columns = (group[:, None] + column[: 16 * groups : groups, None]).flatten(1)
    columns = torch.cat([columns, column[16 * groups :].expand(len(x), -1)], dim=1)
    values, order = x.gather(1, columns).topk(k)
    return values, columns.gather(1, order)


@torch.no_grad()
def kmeans(x, num_clusters, iterations=20, generator=None):
    """Lloyd's k-means by L2 distance from random rows: x (N, C) -> (centers (m, C), assignment (N,) int64 to these centers).

    m = min(num_clusters, N). A cluster that comes out empty starts anew at the row farthest from its centre. Computed in
    float64. The generator is a CPU one. In a process group every process gives the same x and gets the same result.
    """
    rows = x.double()
    centers = rows[torch.randperm(len(x), generator=generator)[:num_clusters].to(x.device)]
    for _ in range(iterations):
        before, assignment = centers, nearest_center(rows, centers)
        count = assignment.bincount(minlength=len(centers))
        centers = torch.zeros_like(centers).index_add_(0, assignment, rows) / count.clamp_min(1)[:, None]
        if len(empty := torch.nonzero(count == 0).flatten()):
            centers[empty] = rows[(rows - before[assignment]).square().sum(1).topk(len(empty)).indices]
    centers = centers.to(x.dtype)
    return centers, nearest_center(rows, centers.double())


@torch.no_grad()
def nearest_neighbors(x, k):
    """The k nearest other rows of each row by L2 distance, nearest first: x (N, C) -> (N, min(k, N - 1)) int64.

    Exact: by distances in float64, then rounded to float32, so that equal rows tie. All pairs are compared in float32 first,
    which is faster; where its rounding could cost a row a neighbour, in float64. In chunks of bounded memory, sharded over the
    processes, each of which gives the same x and gets the whole result.
    """
    k, few, x = min(k, len(x) - 1), min(k + 24, len(x) - 1), x.double() - x.double().mean(0)  # about the mean, for precision
    half = x.square().sum(1) / 2
    x32, half32, rounding = x.float(), half.float(), half.max() / 256  # more than CUDA's TF32 rounds

    def exact(part):
        score = (x[part] @ x.T - half - half[part, None]).clamp_max(-1e-14).float()  # -d^2 / 2; copies tie
        return score.scatter_(1, part[:, None], -math.inf).topk(k).indices  # an image is no neighbour of itself (D1)

    def nearest(part):
        rough, found = largest((x32[part] @ x32.T).sub_(half32).scatter_(1, part[:, None], -math.inf), few)
        score = (x[found] @ x[part, :, None])[..., 0] - half[found] - half[part, None]
        best = score.clamp_max(-1e-14).float().topk(k)
        neighbors = found.gather(1, best.indices)
        unsure = (best.values[:, -1:] + half[part, None] < rough[:, -1:] + rounding).any(1)
        neighbors[unsure] = exact(part[unsure])
        return neighbors

    return in_chunks(nearest, torch.arange(len(x), device=x.device), len(x))


def take(neighbors, preferred, count, generator=None):
    """App. A.2: `count` of each row's neighbors (N, k), nearest first: random preferred ones (N, k, bool), then the nearest of
    the rest; too few are repeated, and where there are none a row gets itself. (N, count) int64.
    """
    n, k = neighbors.shape
    if k == 0:
        return torch.arange(n, device=neighbors.device).view(n, 1).expand(n, count)
    turn = torch.rand(n, k, generator=generator).to(neighbors.device)
    order = torch.where(preferred, turn, 1 + torch.arange(k, device=neighbors.device)).argsort(1)
    return neighbors.gather(1, order[:, torch.arange(count, device=order.device) % k])


@torch.no_grad()
def select_positives(x, centers, assignment, k=40, num_positives=10, generator=None):
    """Center-wise local selection (Eq. 2, App. A.2): x (N, C), centers (m, C), assignment (N,) -> (N, num_positives) int64.

    Of an image's k nearest neighbours, those in its cluster that are at most as far from its centre: num_positives random
    ones of them, topped up with the nearest of the other neighbours. Too few neighbours are repeated; an image without any
    is its own positive. The generator is a CPU one.
    """
    neighbors = nearest_neighbors(x, k)
    distance = (x.double() - centers.double()[assignment]).square().sum(1)
    same = assignment[neighbors] == assignment[:, None]
    return take(neighbors, same & (distance[neighbors] <= distance[:, None]), num_positives, generator)


def choose_positives(args, x, generator=None):
    """The table of positives, (N, num_positives) int64, of embeddings x (N, C) by --selection (Table 6)."""
    if args.selection == "random":
        return torch.randint(len(x), (len(x), args.num_positives), generator=generator)
    if args.selection == "knn":
        neighbors = nearest_neighbors(x, args.knn_k)
        return take(neighbors, torch.ones_like(neighbors, dtype=torch.bool), args.num_positives, generator)
    centers, assignment = kmeans(x, args.num_clusters, generator=generator)
    if args.selection == "center":
        return select_positives(x, centers, assignment, args.knn_k, args.num_positives, generator)
    members, count = assignment.argsort(stable=True), assignment.bincount()  # any of the cluster
    turn = torch.rand(len(x), args.num_positives, dtype=torch.float64, generator=generator).to(x.device)
    return members[(count.cumsum(0) - count)[assignment, None] + (turn * count[assignment, None]).long()]


def refresh(args, model, images, info, device, epoch, positives, workers):
    """Choose the table of positives anew from the momentum encoder's embeddings of all images, in float32."""
    began, encoder = time.perf_counter(), nn.Sequential(model.momentum_backbone, model.momentum_projector)
    x = F.normalize(common.extract_features(encoder, images, info, device, workers=workers), dim=1).to(device)
    positives.copy_(choose_positives(args, x, common.generator(args.seed, epoch, 5)))
    labels = torch.from_numpy(images.labels)
    same = (labels[positives.long()] == labels[:, None])[labels >= 0].float().mean().item()
    share = f"; {100 * same:.1f} % of them are of the image's own class" if images.classes else ""
    common.say(f"epoch {epoch + 1}: positives chosen in {time.perf_counter() - began:.1f} s{share}")


# ==================================================================== 5. model


def resize(x, size):
    return x if x.shape[-1] == size else F.interpolate(x, (size, size), mode="bilinear", antialias=True)


class CLIM(nn.Module):
    """Query encoder, momentum (key) encoder and queue of MoCo v2, on mixed images and at several resolutions."""

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
        return len(self.args.resolutions) ** 2 * math.log(self.args.queue + 1)

    def query(self, x):
        """(n, 3, H, W) -> (n, dim) of unit length, not in bf16."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, step):
        """views: this process's query and key view (n, 3, H, W), and, if there are positives, their key and query view, all at
        the largest size; again for a size named twice. Returns (loss, metrics: scalars, and q, k (n, dim)).
        """
        args, rank = self.args, common.rank_and_world()[0]
        sizes, lam = args.resolutions, 1.0
        per_copy = len(views) // max(sizes.count(size) for size in sizes)
        queries, keys = [], []
        for i, size in enumerate(sizes):
            x, *rest = views[sizes[:i].count(size) * per_copy :][:per_copy]
            if len(rest) == 2:
                lam = 0.5  # without mixing, half the loss goes to each key
            elif len(rest) == 3:
                draws = common.generator(args.seed, step, 30)
                lam = np.random.default_rng(draws.initial_seed()).beta(args.alpha, args.alpha)
                x, lam = cutmix(x, rest.pop(), lam, draws)  # the same box at every size
            queries.append(self.query(resize(x, size)))
            keys.append(encode_keys(self.key, [resize(v, size) for v in rest], common.generator(args.seed, step, 20 + i)))
        mine = [k.unflatten(1, (-1, len(x)))[:, rank] for k in keys]  # (1 or 2, n, C) of each size
        # Eq. 6
        loss = sum(clim_loss(q, k[0], k[-1], self.queue.keys, self.temperature, lam) for q in queries for k in mine)
        self.new_keys = keys[0][0]
        return loss, {"loss": loss.detach(), "q": queries[0].detach(), "k": mine[0][0]}

    def enqueue(self):
        """After the backward pass, which still needs the old queue."""
        self.queue.enqueue(self.new_keys)

    @torch.no_grad()
    def update_momentum_encoder(self, m):
        """theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2). Parameters only: the copies keep their own BN statistics."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


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
    queue = f"queue {args.queue} ({100 * args.queue / len(train):.1f} % of the data set)"
    common.say(
        f"{METHOD}, selection {args.selection}, mix {args.mix}, resolutions {tuple(args.resolutions)}; encoder {args.arch}, "
        f"{size:.2f} M parameters, image {args.image_size} px; evaluated: the {EVALUATED} encoder\n"
        f"data {args.dataset}: {len(train)} training images ({train.memory()}), {len(test) if test else 'no'} test images, "
        f"{len(train.classes) or 'no'} classes; mean {args.norm[0]}, std {args.norm[1]}\n"
        f"batch {args.batch_size} over {world} process(es), {args.batch_size // world} each; {steps} steps an epoch, "
        f"{args.epochs} epochs; {'bf16' if args.bf16 else 'float32'}; batch-norm groups {args.bn_groups}\n"
        f"rate {args.lr:g} at batch {args.lr_batch}, scaled linearly to {args.lr * args.batch_size / args.lr_batch:g}; "
        f"weight decay {args.weight_decay}, momentum {args.momentum}, temperature {args.temperature}\n"
        f"{queue}; negatives per query {args.queue}; chance level of the loss {model.chance():.3f}"
    )


def make_optimizer(args, model):
    """SGD as in MoCo."""
    return torch.optim.SGD(parameter_groups(model, skip_vectors=False), lr=0.0, momentum=0.9)


def train_step(args, model, wrapped, optimizer, batch, step, steps, device):
    """One step of MoCo's Algorithm 1. Returns the metrics, on the device."""
    views = [common.normalize(v, *args.norm) for v in common.colour_views(batch, device)]
    lr, weight_decay, momentum = schedule(args, step, steps)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = lr, weight_decay if group["decays"] else 0.0
    # What still draws from the global generator (drop-path) depends on nothing but this.
    torch.manual_seed(common.generator(args.seed, step, 0, common.rank_and_world()[0]).initial_seed())
    loss, metrics = wrapped(views, step)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    metrics["grad_norm"] = finite_gradient(model.parameters())
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
    table = torch.full((len(train), args.num_positives), -1, dtype=torch.int32)  # no positives yet
    positives = table.share_memory_()  # with the loader's workers
    views = common.Views(train, *make_sample(args, train, positives), args.seed, args.interpolation)
    loader = common.make_loader(views, sampler, workers, device)
    if args.show_views:
        if args.selection != "none":
            positives.random_(len(train), generator=common.generator(args.seed))
        return show_views(args, loader, device)
    state = common.load_run(checkpoint, config, len(train)) if checkpoint else None
    require_agreement("checkpoints: --out must be on a disk that all nodes share", state["step"] if state else 0, device)

    torch.manual_seed(args.seed)
    model = CLIM(args, info).to(device, memory_format=torch.channels_last)
    if args.grad_checkpoint:
        model.backbone.set_grad_checkpointing()
    if args.compile:
        model.backbone.compile()
        model.momentum_backbone.compile()
    optimizer = make_optimizer(args, model)
    steps, step, log = len(train) // args.batch_size, 0, EpochLog()
    total = args.epochs * steps
    end = min(total, args.max_steps or total)

    def put_positives(state):
        if args.selection != "none" and state["positives"].shape == positives.shape:  # another run's may not fit
            positives.copy_(state["positives"])

    if state:
        step, log = restore(state, model, optimizer, put_positives)
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
        due = sampler.start == 0 and (sampler.epoch - args.clim_start) % args.refresh_every == 0
        if args.selection != "none" and sampler.epoch >= args.clim_start and (due or positives[0, 0] < 0):
            refresh(args, model, train, info, device, sampler.epoch, positives, workers)
        began = ready = time.perf_counter()
        waited, first = 0.0, step
        for batch in loader:
            waited += time.perf_counter() - ready
            metrics = train_step(args, model, wrapped, optimizer, batch, step, steps, device)
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
            state |= dict(config=config, backbone=info, images=len(train), positives=positives)
            common.save_run(Path(args.out), state, encoder.state_dict(), f"epoch-{epoch:04d}.pt" if kept else None)
    if step == total:
        common.say(f"finished. Judge it: python eval_knn.py {args.out}; python eval_linear.py {args.out}")
    else:
        why = " on request (exit status 75)" * stopping
        common.say(f"stopped at step {step} of {total}{why}, saved in {args.out}; the same command goes on from there")
    if distributed:
        del wrapped  # before the group: in torch 2.11 a DDP that goes last can hang for ever
        dist.destroy_process_group()
    if stopping and step < end:
        raise SystemExit(75)  # stopped on request, not done


if __name__ == "__main__":
    main(parse_args())
