"""MoCo with JointCrop and JointBlur (arXiv 2412.16522, AAAI 2025), on MoCo v1, v2 and v3.

Two random crops of an image mostly have similar areas, and make easy positives. JointCrop draws the ratio of the two areas
first, from a law that one number sets, and then the areas: beta > 0 similar areas, beta = 0 a uniform log-ratio, beta < 0
extreme ratios. Each view's area is still spread over the same range; loss, model and cost are untouched. JointBlur does the
same to the two blur strengths, so that one view is sharp and one is not. The rest is MoCo: a query encoder, a momentum
encoder for the keys, and a queue of keys as negatives (v1, v2), or the batch's keys and a predictor (v3).

    Algorithm 1        joint_from_uniform, sample_joint    the two areas (or two blur strengths)
    Eq. 4-10           RandomCrop's own ratio law, in the tests; here `--joint none`
    App. F             make_sample, --joint either         JointCrop or JointBlur, one of the two per image
    App. G             make_sample, --css-alpha            centre-suppressed sampling of the position
    MoCo, Eq. 1        info_nce                            MoCo, Eq. 2: update_momentum_encoder
    MoCo v3, Alg. 1    MoCoV3, contrast

    python moco_jointcrop.py                                                  # laptop, no data
    python moco_jointcrop.py --dataset cifar10 --joint none                   # the baseline, one GPU
    torchrun --nproc_per_node=8 moco_jointcrop.py --dataset imagenet --data-dir DIR --moco v1 --beta 0

Baseline: `--joint none` is MoCo. New relative to it: joint_from_uniform and the lines of make_sample that call it.

Of this paper only the appendix could be read; the main text, with JointBlur's definition and the small data sets' settings,
could not. Inference, therefore: JointBlur is the same law on sigma in [0.1, 2.0], and in its runs one coin an image decides
for both views; CIFAR and STL-10 follow ContrastiveCrop's public configurations as a stand-in; so do MoCo v1's views.

Departures:
    D1 s_b: paper ln(s_max / s_min); the released code subtracts 0.1 inside the logarithm (`--variant released`)
    D2 if ten aspect ratios do not fit: torchvision's centre crop, as the paper's "same steps"; released: the whole image
    D3 the released code has beta = 0 only, and no JointBlur: `--variant released` refuses the rest
    D4 crop areas from 0.2 here, as in the command of the released README; the released script's own default is 0.08
    D5 CIFAR's queue is 4,096, 8 % of its images; the stand-in's 65,536 would hold every image's own keys
    D6 the paper reports on MoCo v1 and the released code is on v3; the default here is v2, `--moco` chooses
    D7 v3's LARS is timm's, whose trust ratio divides by |g| + wd |w| + 1e-8, the released by |g + wd w|: at wd 1e-6 a step
       differs by 1e-6 of itself at gradients as large as the weights, by 1e-2 at 1e-4 of that; a library's, so kept
    D8 v3's momentum update follows the optimiser's step; released before the forwards: m's index moves by one
    D9 v3 on a ViT keeps the settings of ResNets (LARS, no batch norm at the predictor's end); released MoCo v3's for ViTs
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
from timm.optim import Lars
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import common

METHOD = "moco_jointcrop"
EVALUATED = "query"  # the encoder that the authors evaluate

# ================================================================ 1. arguments

# fmt: off
# "by" holds what depends on another flag. Blur: a probability for each view. The rate is that of batch size lr_batch.
COMMON = dict(
    moco="v2", css_alpha=1.0, crop_scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray_p=0.2,
    blur_prob=(0.5, 0.5), solarize_p=(0.0, 0.0), interpolation="bilinear", norm=common.IMAGENET_NORM, patch_size=16,
    warmup=0, min_lr=0.0, dim=128, bn_groups=8, momentum=0.999, weight_decay=1e-4, temperature=0.2,
)
MOCO = dict(
    v1=dict(temperature=0.07, milestones=(0.6, 0.8)),  # ContrastiveCrop's setting, which the paper names as its own (G)
    v2=dict(),
    v3=dict(  # the released code, and MoCo v3's CONFIG: 100 epochs with 0.6 (300 epochs: --lr 0.3)
        epochs=100, batch_size=4096, lr=0.6, lr_batch=256, warmup=10, weight_decay=1e-6, momentum=(0.99, 1.0), temperature=1.0,
        min_lr=0.0, jitter=(0.4, 0.4, 0.2, 0.1), blur_prob=(1.0, 0.1), solarize_p=(0.0, 0.2), dim=256, hidden=4096, bn_groups=1,
    ),
)
IMAGENET = dict(
    COMMON, arch="resnet50", image_size=224, epochs=200, batch_size=256, lr=0.03, lr_batch=256, queue=65536,
    by=dict(moco=MOCO | dict(v1=MOCO["v1"] | dict(epochs=100))),
)
CIFAR = dict(  # the stand-in: ContrastiveCrop's small configurations; no blur, so JointBlur needs --blur-prob 0.5 0.5
    COMMON, arch="resnet18", image_size=32, patch_size=4, epochs=500, batch_size=512, lr=0.5, lr_batch=512, min_lr=0.05,
    queue=4096, blur_prob=(0.0, 0.0), by=dict(
        arch=dict(resnet_micro=dict(batch_size=256, lr=0.1, lr_batch=256, min_lr=0.0, momentum=0.99, blur_prob=(0.5, 0.5))),
        moco=dict(v1=MOCO["v1"], v3=dict(MOCO["v3"], epochs=500, batch_size=512, blur_prob=(0.0, 0.0), hidden=2048)),
    ),
)
RECIPES = {
    "patterns": dict(  # ours, for two CPU cores
        COMMON, arch="resnet_micro", image_size=32, patch_size=4, epochs=75, batch_size=64, lr=0.02, lr_batch=128, queue=128,
        blur_prob=(0.1, 0.1), crop_scale=(0.3, 1.0), norm=common.NORMS["patterns"], bn_groups=2, momentum=0.95, warmup=1,
        by=dict(moco=dict(
            v1=MOCO["v1"],
            v3=dict(MOCO["v3"], epochs=75, batch_size=64, warmup=1, hidden=512, lr_batch=128, momentum=(0.98, 1.0)),
        )),
    ),
    "cifar10": dict(CIFAR, norm=common.NORMS["cifar10"]),
    "cifar100": dict(CIFAR, norm=common.NORMS["cifar100"]),
    "stl10": dict(CIFAR, image_size=96, patch_size=8, queue=8192),
    "imagenet100": dict(IMAGENET, arch="resnet18", queue=16384),  # ours
    "imagenet": IMAGENET,
    "folder": IMAGENET,  # ours
}
# fmt: on


def parse_args(argv=None):
    """The command line as a namespace in which every value of the recipe is filled in. Exits with a line on a mistake."""
    parser = common.ArgumentParser("moco_jointcrop.py", description=__doc__.splitlines()[0])
    add_run_flags(parser)
    group = parser.add_argument_group("MoCo with JointCrop and JointBlur")
    group.add_argument("--moco", choices=("v1", "v2", "v3"))
    group.add_argument("--joint", default="crop", choices=("none", "crop", "blur", "either", "both"))
    group.add_argument("--beta", type=float, default=0.0, metavar="X", help="of J-Crop(beta), J-Blur(beta); any real number")
    group.add_argument("--joint-prob", type=float, default=0.5, metavar="P", help="of JointCrop, with --joint either (App. F)")
    group.add_argument("--css-alpha", type=float, metavar="A", help="centre-suppressed sampling, Beta(A, A); 1: off (App. G)")
    group.add_argument("--crop-scale", type=float, nargs=2, metavar=("LO", "HI"), help="area range of the crops")
    group.add_argument("--blur-prob", type=float, nargs=2, metavar=("P1", "P2"), help="of blurring view 1, view 2")
    flags = dict(joint="crop", beta=0.0, joint_prob=0.5) | dict.fromkeys(("moco", "css_alpha", "crop_scale", "blur_prob"))
    args = parser.parse_args(argv)
    if args.moco == "v3" and args.queue is not None:
        common.fail("--queue: MoCo v3 has none, its negatives are the batch")
    args = resolve(args, method_flags=flags)
    shares, (low, high) = (args.joint_prob, *args.blur_prob), args.crop_scale
    if not (0 < low < high <= 1 and all(0 <= p <= 1 for p in shares) and 0 < args.css_alpha < 1e9 and math.isfinite(args.beta)):
        common.fail("--crop-scale: 0 < LO < HI <= 1; --joint-prob, --blur-prob: 0 to 1; --css-alpha: above 0; --beta: finite")
    if args.joint in ("blur", "either", "both") and max(args.blur_prob) == 0:
        common.fail(f"--joint {args.joint} has nothing to act on: this recipe does not blur; give --blur-prob 0.5 0.5")
    if args.variant == "released" and (args.joint not in ("none", "crop") or args.beta != 0 or args.css_alpha != 1):
        common.fail("--variant released: the released code has JointCrop with beta 0 only (D3)")
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


def joint_from_uniform(u, v, low, high, beta, offset=0.0):
    """Algorithm 1 on uniform draws: u, v (n,) in [0, 1) -> (a, b), two (n,) float64 tensors in [low, high].

    ln(b / a) follows the law of beta on [-s_b, s_b], s_b = ln(high / low - offset), drawn by u through the inverse of its
    distribution function; given the ratio, a is uniform on the values that keep both in range, drawn by v. beta None: both
    independent and uniform (RandomCrop). low > 0. offset: 0.1 in the released code (D1).
    """
    u, v = (torch.as_tensor(x, dtype=torch.float64) for x in (u, v))
    if beta is None:
        return low + (high - low) * u, low + (high - low) * v
    s_b = math.log(high / low - offset)  # line 1
    if abs(beta) < 1e-6:
        log_ratio = s_b * (2 * u - 1)  # line 5, and the limit of both other cases
    else:  # lines 3 and 7: normal, standard deviation s_b / |beta|, truncated at |beta| standard deviations
        tail = torch.special.ndtr(torch.tensor(-abs(beta), dtype=torch.float64))
        log_ratio = (torch.special.ndtri(tail + u * (1 - 2 * tail)) * (s_b / abs(beta))).clamp(-s_b, s_b)
    if beta < 0:  # lines 8-12: mirrored within each half, so that the extremes are the likeliest
        log_ratio = torch.where(log_ratio < 0, -s_b - log_ratio, s_b - log_ratio)
    ratio = log_ratio.exp()
    lowest, highest = (low / ratio).clamp_min(low), (high / ratio).clamp_max(high)
    a = lowest + v * (highest - lowest).clamp_min(0)  # line 14; rounding may cross the ends where |log s_r| = s_b
    return a.clamp(low, high), (a * ratio).clamp(low, high)  # line 15


def sample_joint(n, low, high, beta, generator=None, offset=0.0):
    """n pairs of Algorithm 1: two (n,) float64 tensors in [low, high], areas for J-Crop or blur sigmas for J-Blur."""
    u, v = torch.rand(2, n, dtype=torch.float64, generator=generator)
    return joint_from_uniform(u, v, low, high, beta, offset)


# Draws after the views' own; which of a view's colour draws decides on blur, and the range of its strength in pixels.
NUM_VIEWS, EXTRA, BLUR_COIN, SIGMA = 2, 6, 7, (0.1, 2.0)
DRAWS = common.CROP_DRAWS + common.COLOUR_DRAWS  # of one view


def make_sample(args):
    """Query view and key view: the function that common.Views calls with image sizes and uniform draws, and their number."""

    def sample(index, sizes, draws):
        released, extra = args.variant == "released", draws[:, NUM_VIEWS * DRAWS :]
        draws = draws[:, : NUM_VIEWS * DRAWS].reshape(len(index), NUM_VIEWS, DRAWS).copy()
        coin = extra[:, 0] < args.joint_prob  # of "either": JointCrop, else JointBlur
        joint_crop = coin if args.joint == "either" else np.full(len(index), args.joint in ("crop", "both"))
        joint_blur = ~coin if args.joint == "either" else np.full(len(index), args.joint in ("blur", "both"))
        areas = [a.numpy() for a in joint_from_uniform(*extra[:, 1:3].T, *args.crop_scale, args.beta, 0.1 * released)]  # D1
        sigmas = [s.numpy() for s in joint_from_uniform(*extra[:, 3:5].T, *SIGMA, args.beta)]
        cuts, colours = [], []
        for view in range(NUM_VIEWS):
            crop, colour = np.split(draws[:, view], [common.CROP_DRAWS], axis=1)
            if args.css_alpha != 1:  # App. G: the position is drawn from Beta(alpha, alpha) instead of uniformly
                betas = [np.random.default_rng(int(s * 2**53)).beta(args.css_alpha, args.css_alpha, 2) for s in crop[:, -1]]
                crop[:, -2:] = np.clip(betas, 0, 1 - 1e-9)
            box = common.random_resized_crop(sizes, crop, args.crop_scale, whole=released)  # D2
            joint = common.random_resized_crop(sizes, crop, args.crop_scale, area=areas[view], whole=released)
            cuts.append((index, np.where(joint_crop[:, None], joint, box), args.image_size))
            colour[:, BLUR_COIN] = np.where(joint_blur, extra[:, 5], colour[:, BLUR_COIN])  # one for both views
            blur, solarize = args.blur_prob[view], args.solarize_p[view]
            colours.append(common.random_colour(colour, args.jitter, args.jitter_p, args.gray_p, blur, SIGMA, solarize))
            sigma = colours[-1][:, common.COLOUR.index("sigma")]
            sigma[:] = np.where(joint_blur & (sigma > 0), sigmas[view], sigma)
        return cuts, np.stack(colours, 1)

    return sample, NUM_VIEWS * DRAWS + EXTRA


def show_views(args, loader, device):
    """Write a grid of both views, as the network gets them but for the normalisation."""
    batch = next(iter(loader))
    views = common.colour_views(batch, device)
    common.save_grid(args.show_views, [v[:12] for v in views], ("query", "key"))
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
    """Query encoder, momentum (key) encoder and queue: MoCo v1 (linear head) and v2 (two-layer head)."""

    def __init__(self, args, info):
        super().__init__()
        self.args, self.temperature = args, args.temperature
        self.backbone = group_batch_norms(common.build_backbone(info), args.bn_groups)
        width = self.backbone.head_hidden_size
        hidden = [] if args.moco == "v1" else [nn.Linear(width, width), nn.ReLU(inplace=True)]
        self.projector = nn.Sequential(*hidden, nn.Linear(width, args.dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(args.queue, args.dim, args.seed)

    def chance(self):
        return math.log(self.args.queue + 1)

    def query(self, x):
        """(n, 3, H, W) -> (n, dim) of unit length, not in bf16."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, step):
        """views: this process's query and key views (n, 3, H, W). Returns (loss, metrics: scalars, and q, k (n, dim))."""
        q = self.query(views[0])
        keys = encode_keys(self.key, views[1:], common.generator(self.args.seed, step, 20))[0]
        k = keys.view(-1, len(q), self.args.dim)[common.rank_and_world()[0]]
        loss = info_nce(q, k, self.queue.keys, self.temperature)
        self.new_keys = keys
        return loss, {"loss": loss.detach(), "q": q.detach(), "k": k}

    def enqueue(self):
        """After the backward pass, which still needs the old queue."""
        if self.args.moco != "v3":
            self.queue.enqueue(self.new_keys)

    @torch.no_grad()
    def update_momentum_encoder(self, m):
        """theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2). Parameters only: the copies keep their own BN statistics."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


# MoCo v3: projector and predictor, a symmetric loss against the batch's keys, no queue. One block, used by --moco v3 alone.


def contrast(q, k, temperature, first):
    """MoCo v3's ctr: 2 T x cross-entropy of q (n, C) against all keys k (N, C), the positive of row i being first + i."""
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / temperature
    return 2 * temperature * F.cross_entropy(logits, first + torch.arange(len(q), device=q.device))


class MoCoV3(MoCo):
    def __init__(self, args, info):
        super().__init__(args, info)
        del self.queue
        for block in self.backbone.modules():  # MoCo v3 starts from zero residual branches
            if hasattr(block, "zero_init_last"):
                block.zero_init_last()
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)

        def mlp(widths):
            norms = [GroupedBatchNorm(w, args.bn_groups, affine=i < len(widths) - 2) for i, w in enumerate(widths[1:])]
            linears = [nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:], strict=False)]
            layers = [m for pair in zip(linears, norms, strict=True) for m in (*pair, nn.ReLU(inplace=True))]
            return nn.Sequential(*layers[:-1])

        self.projector = mlp([self.backbone.head_hidden_size, args.hidden, args.dim])
        self.predictor = mlp([args.dim, args.hidden, args.dim])
        self.predictor[-1] = nn.Identity()  # MoCo v3's for ResNets, here for ViTs, too: no batch norm at its end
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)

    def chance(self):
        return 4 * self.temperature * math.log(self.args.batch_size)

    def query(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.predictor(self.projector(self.backbone(x))).to(x.dtype)

    def forward(self, views, step):
        (q1, q2), (k1, k2) = [self.query(x) for x in views], [gather(self.key(x)) for x in views]
        first = common.rank_and_world()[0] * len(q1)
        loss = contrast(q1, k2, self.temperature, first) + contrast(q2, k1, self.temperature, first)
        return loss, {"loss": loss.detach(), "q": q1.detach(), "k": k2[first : first + len(q1)]}


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
    common.say(
        f"{METHOD}, MoCo {args.moco}, --joint {args.joint}, beta {args.beta:g}, variant {args.variant}; encoder {args.arch}, "
        f"{size:.2f} M parameters, image {args.image_size} px; evaluated: the {EVALUATED} encoder\n"
        f"data {args.dataset}: {len(train)} training images ({train.memory()}), {len(test) if test else 'no'} test images, "
        f"{len(train.classes) or 'no'} classes; mean {args.norm[0]}, std {args.norm[1]}\n"
        f"batch {args.batch_size} over {world} process(es), {args.batch_size // world} each; {steps} steps an epoch, "
        f"{args.epochs} epochs; {'bf16' if args.bf16 else 'float32'}; batch-norm groups {args.bn_groups}\n"
        f"rate {args.lr:g} at batch {args.lr_batch}, scaled linearly to {args.lr * args.batch_size / args.lr_batch:g}; "
        f"weight decay {args.weight_decay}, momentum {args.momentum}, temperature {args.temperature}\n"
        f"crop areas {tuple(args.crop_scale)}, blur {tuple(args.blur_prob)}; "
        f"queue {'none' if args.moco == 'v3' else f'{args.queue} ({100 * args.queue / len(train):.1f} % of data)'}; negatives "
        f"{args.batch_size - 1 if args.moco == 'v3' else args.queue}; chance level of the loss {model.chance():.3f}"
    )


def make_optimizer(args, model):
    """SGD as in MoCo; LARS for v3, without decay and adaptation of biases and batch norms."""
    if args.moco == "v3":
        return Lars(parameter_groups(model, skip_vectors=True), lr=0.0, momentum=0.9, trust_coeff=0.001)
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
    views = common.Views(train, *make_sample(args), args.seed, args.interpolation)
    loader = common.make_loader(views, sampler, workers, device)
    if args.show_views:
        return show_views(args, loader, device)
    state = common.load_run(checkpoint, config, len(train)) if checkpoint else None
    require_agreement("checkpoints: --out must be on a disk that all nodes share", state["step"] if state else 0, device)

    torch.manual_seed(args.seed)
    model = (MoCoV3 if args.moco == "v3" else MoCo)(args, info).to(device, memory_format=torch.channels_last)
    if args.grad_checkpoint:
        model.backbone.set_grad_checkpointing()
    if args.compile:
        model.backbone.compile()
        model.momentum_backbone.compile()
    optimizer = make_optimizer(args, model)
    steps, step, log = len(train) // args.batch_size, 0, EpochLog()
    total = args.epochs * steps
    end = min(total, args.max_steps or total)
    if state:
        step, log = restore(state, model, optimizer)
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
            state |= dict(config=config, backbone=info, images=len(train))
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
