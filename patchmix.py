"""PatchMix: Inter-Instance Similarity Modeling for Contrastive Learning (Shen et al., arXiv 2306.12243).

Two images of a data set are rarely as unrelated as one-hot contrast claims. PatchMix makes images whose similarity is
known: the patches of M images are mixed into one, at the places they had, and a ViT learns to give each source its share.
Three contrasts are added up: mixed query against original keys (M positives), mixed query against the mixed keys of the
other view (2M - 1 positives, weighted by the sources they share), and original against original, which closes the gap
between mixed and natural images. A momentum encoder makes the keys; the other images of the batch are the negatives.

    Eq. 1-9, 17, Algorithm 1   patch_mix        M images into one, patch by patch
    Eq. 10-12, 18, 19          mix_targets      who is in a mixed image, and with what weight
    Eq. 13-15                  soft_info_nce    cross-entropy against weighted positives
    Eq. 16, Algorithm 2        PatchMix.forward, train_step

    python patchmix.py                                                        # laptop, no data, about 4 minutes
    python patchmix.py --dataset cifar10 --arch vit_tiny                      # one GPU
    torchrun --nproc_per_node=8 patchmix.py --dataset imagenet --data-dir DIR --arch vit_small

Baseline: MoCo v3 is `--num-mix 1 --terms oto,mto`, L(q2, k1) + L(q1, k2), its symmetric loss divided by 2 tau; new here are
patch_mix, mix_targets, the weights in soft_info_nce and two more terms in forward.

Departures (defaults follow the paper; `--variant released` follows the authors' code where it says so):
    D1 weights of the terms: paper 1, 1, 1 with mix-to-mix weights that sum to M; released 1, 1/2, 1/2 and sum 1, and the
       labels of original to original smoothed by 0.1 over all keys, so that M = 1 is not MoCo v3 there
    D2 M: paper 3; released 2
    D3 heads of ViT-S: paper 6; released 12
    D4 ViT-T: paper has a momentum encoder; released none: the encoder itself makes the keys, in training mode
    D5 paper mixes the query of view 1 and keeps that of view 2; released the reverse
    D6 the momentum of a step is per step; the released loop overwrites its index, so its momentum moves once an epoch
    D7 ImageNet multi-crop of the released configurations (8 x 96 px more, globals from 0.35) is not in the paper, not here
    D8 the patch embedding is initialised as timm does it; the released code draws it by Xavier's rule
    D9 warm-up of W steps: i / W of the peak at step i; the released linspace i / (W - 1), not reproduced
    D10 a permutation for each slice; released one for all GPUs, which seed alike (reproduced)
    D11 the momentum update follows the optimiser's step (Algorithm 2); released before the forwards: m's index moves by one
    D12 below 2M - 1 images repeated mix-to-mix targets add up; the released scatter keeps the last, so a row sums to less
Not said in the paper, taken from the released code: drop-path 0.1, AdamW's betas, ImageNet's mean and std on CIFAR,
weight decay on all but 1-D tensors, mixing within the images of one GPU (here: slices, see --mix-slices).
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

METHOD = "patchmix"
EVALUATED = "momentum"  # the encoder that the authors evaluate

# ================================================================ 1. arguments

# fmt: off
# Section 4.1.2 and Tables 8-10. lr is the effective rate at batch size lr_batch; "by" holds what depends on another flag.
COMMON = dict(
    num_mix=3, temperature=0.2, momentum=(0.996, 1.0), min_lr=1e-6, hidden=4096, dim=256, drop_path=0.1, bn_groups=1,
    jitter=(0.4, 0.4, 0.2, 0.1), jitter_p=0.8, gray_p=0.2, blur_p=(1.0, 0.1), solarize_p=(0.0, 0.2), interpolation="bicubic",
    norm=common.IMAGENET_NORM, lr=1e-3, weight_decay=(0.04, 0.4),  # for encoders of which the paper does not speak
)
RELEASED = dict(released=dict(num_mix=2))  # D2; D3 and D4 depend on the encoder, D1 and D5 are in the loss
CIFAR = dict(
    COMMON, arch="vit_tiny", image_size=32, patch_size=2, epochs=800, warmup=100, batch_size=512, lr_batch=512,
    mix_slices=4, crop_scale=(0.1, 1.0),
    by=dict(variant=RELEASED, arch=dict(
        vit_micro=dict(lr=2e-3, weight_decay=(0.02, 0.2), patch_size=8, hidden=512, dim=128),  # ours, for CPUs
        vit_tiny=dict(lr=4e-3, weight_decay=(0.02, 0.2)),
        vit_small=dict(lr=1e-3),
        vit_base=dict(lr=1.5e-3),
    )),
)
IMAGENET = dict(
    COMMON, arch="vit_small", image_size=224, patch_size=16, epochs=300, warmup=10, batch_size=1024, lr_batch=1024,
    mix_slices=8, crop_scale=(0.05, 1.0),
    by=dict(variant=RELEASED, arch=dict(vit_small=dict(lr=2e-3), vit_base=dict(lr=3e-3))),
)
RECIPES = {
    # Ours, for two CPU cores: small heads, fewer and larger patches, weaker views; the loss is the paper's.
    "patterns": dict(
        COMMON, arch="vit_micro", image_size=32, patch_size=8, epochs=50, warmup=1, batch_size=64, lr_batch=64,
        lr=1e-3, weight_decay=(0.02, 0.2), num_mix=2, mix_slices=1, hidden=512, dim=128, drop_path=0.0,
        crop_scale=(0.3, 1.0), blur_p=(0.1, 0.1), norm=common.NORMS["patterns"], momentum=(0.98, 1.0),
        by=dict(variant=RELEASED),
    ),
    "cifar10": CIFAR,
    "cifar100": CIFAR,
    "stl10": dict(CIFAR, image_size=96, patch_size=6),  # ours: not in the paper
    "imagenet100": IMAGENET,  # ours: not in the paper
    "imagenet": IMAGENET,
    "folder": IMAGENET,  # ours
}
# fmt: on
TERMS = ("oto,mto,mtm", "oto,mto", "oto,mtm", "mto,mtm", "oto", "mto", "mtm")


def parse_args(argv=None):
    """The command line as a namespace in which every value of the recipe is filled in. Exits with a line on a mistake."""
    parser = common.ArgumentParser("patchmix.py", description=__doc__.splitlines()[0])
    add_run_flags(parser)
    group = parser.add_argument_group("PatchMix")
    group.add_argument("--num-mix", type=int, metavar="M", help="images mixed into one (Table 6)")
    group.add_argument("--terms", default="oto,mto,mtm", choices=TERMS, help="of Eq. 16, for Table 7")
    group.add_argument("--mix-slices", type=int, metavar="N", help="mix within N equal slices of the global batch")
    args = resolve(parser.parse_args(argv), method_flags={"num_mix": None, "terms": "oto,mto,mtm", "mix_slices": None})
    if args.queue is not None:
        common.fail("--queue: PatchMix has none, its negatives are the batch")
    if args.variant == "released" and args.arch == "vit_tiny":
        args.momentum = (0.0, 0.0)  # D4
    check_mix(args)
    return args


def check_mix(args):
    """What the mixing needs of batch, slices, patches and M."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if args.mix_slices < 1 or args.num_mix < 1:
        common.fail("--mix-slices and --num-mix: give at least 1")
    if args.mix_slices % world:  # a ring must lie within one process
        common.say(f"mix slices: {args.mix_slices} cannot be shared out over {world} processes, so {world} are used")
        args.mix_slices = world
    if args.batch_size % args.mix_slices:
        common.fail(f"--batch-size {args.batch_size} cannot be divided into {args.mix_slices} equal --mix-slices")
    if args.image_size % args.patch_size:
        common.fail(f"--patch-size {args.patch_size} does not divide --image-size {args.image_size}")
    images, patches = args.batch_size // args.mix_slices, (args.image_size // args.patch_size) ** 2
    if args.num_mix > min(images, patches):
        common.fail(f"--num-mix {args.num_mix} is too large: a slice has {images} images, an image {patches} patches")


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
    """T_1 and T_2 of Table 10: the function that common.Views calls with image sizes and uniform draws, and their number."""

    def sample(index, sizes, draws):
        draws = draws.reshape(len(index), 2, DRAWS)
        cuts, colours = [], []
        for view in (0, 1):
            crop, colour = np.split(draws[:, view], [common.CROP_DRAWS], axis=1)
            cuts.append((index, common.random_resized_crop(sizes, crop, args.crop_scale), args.image_size))
            blur, solarize = args.blur_p[view], args.solarize_p[view]
            colours.append(common.random_colour(colour, args.jitter, args.jitter_p, args.gray_p, blur, solarize_p=solarize))
        return cuts, np.stack(colours, 1)

    return sample, 2 * DRAWS


def show_views(args, loader, device):
    """Write a grid of both views and both mixes, as the network gets them but for the normalisation."""
    batch = next(iter(loader))
    views = common.colour_views(batch, device)
    mixed = [mix_slices(v, args, step=0, view=i) for i, v in enumerate(views)]
    labels = ("view 1", "view 2", f"mix 1, M={args.num_mix}", f"mix 2, M={args.num_mix}")
    common.save_grid(args.show_views, [v[:12] for v in views + mixed], labels)
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


def patch_mix(images, num_mix, patch_size, permutation=None):
    """Mix each image with the num_mix - 1 that follow it in the batch, patch by patch (Algorithm 1, Eq. 1-9).

    images (N, C, H, W), any values; patch_size p or (p_h, p_w), which divide H and W; permutation (T,) int64, the shuffle
    k of Eq. 2, T = H/p_h * W/p_w (drawn if None). Mixed image i takes from image (i + m) mod N the m-th of M groups of
    floor(T / M) shuffled patches, each at its own place; the T mod M patches that are left over stay with image i.
    Returns (N, C, H, W); gradients pass through.
    """
    n, _, height, width = images.shape
    ph, pw = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    if height % ph or width % pw:
        raise ValueError(f"patches of {ph} x {pw} do not tile an image of {height} x {width}")
    tokens = (height // ph) * (width // pw)
    if not 1 <= num_mix <= tokens:
        raise ValueError(f"num_mix must be from 1 to the {tokens} patches of an image, not {num_mix}")
    if permutation is None:
        permutation = torch.randperm(tokens)
    size = tokens // num_mix  # S
    group = torch.arange(tokens) // size  # Eq. 3: the group of the j-th shuffled patch
    group[size * num_mix :] = 0
    group = group[permutation.cpu().argsort()]  # Eq. 5, 7: unshuffled, a group for each place
    group = group.to(images.device, non_blocking=True).view(height // ph, width // pw)
    group = group.repeat_interleave(ph, 0).repeat_interleave(pw, 1)
    mixed = images
    for m in range(1, num_mix):  # Eq. 4: u(i, m) = (i + m) mod N, which is the batch rolled by -m
        mixed = torch.where(group == m, images.roll(-m, 0), mixed)
    return mixed


def mix_targets(n, num_mix):
    """The images in each mixed image, and the mixed images that share some with it (Eq. 10-12).

    Returns mto_index (n, M) int64, mto_weight (M,) = 1/M, mtm_index (n, 2M-1) int64, mtm_weight (2M-1,), a triangle that
    sums to M as printed. Indices are within the ring of n images; below n = 2M - 1 some repeat, and their weights add up.
    """
    i = torch.arange(n)[:, None]
    mto_index = (i + torch.arange(num_mix)) % n  # Eq. 10
    offset = torch.arange(2 * num_mix - 1) - (num_mix - 1)
    mtm_index = (i + offset) % n  # Eq. 11
    mtm_weight = 1 - offset.abs() / num_mix  # Eq. 12: |M - j - 1| = |offset|
    return mto_index, torch.full((num_mix,), 1 / num_mix), mtm_index, mtm_weight


def soft_info_nce(q, k, index, weight, temperature, smoothing=0.0):
    """Cross-entropy of each query against weighted positives among the keys (Eq. 13-15).

    -1/N sum_i sum_j weight_j log softmax_t(sim(q_i, k_t) / temperature)[index_ij], sim the cosine: q (n, C) and k (N, C)
    are normalised here, the weights never. index (n, P) int64 into k, weight (P,). Gradients go to q and k; detach k for
    the paper's sg(). smoothing s (released: D1): 1 - s of each weight stays, s is spread over all N keys. No n x N target
    matrix is made. Returns a scalar: weight.sum() * log(N) at equal logits.
    """
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / temperature
    index, weight = index.to(q.device), weight.to(logits)
    below = logits.logsumexp(1, keepdim=True)
    loss = (weight * (below - logits.gather(1, index))).sum(1).mean()
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * weight.sum() * (below.mean() - logits.mean())
    return loss


# ==================================================================== 5. model


def mlp(widths, groups):
    """Table 9: Linear + BN + ReLU, and at the end Linear + BN without parameters."""
    layers = []
    for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False)):
        last = i == len(widths) - 2
        layers += [nn.Linear(a, b, bias=False), GroupedBatchNorm(b, groups, affine=not last)]
        layers += [] if last else [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def mix_slices(images, args, step, view):
    """patch_mix within each of this process's slices of the global batch, each slice and view with its own permutation."""
    rank, world = common.rank_and_world()
    local, tokens = args.mix_slices // world, (args.image_size // args.patch_size) ** 2
    mixed = []
    for i, part in enumerate(images.chunk(local)):
        number = rank * local + i if args.variant == "paper" else 0  # D10
        draw = common.generator(args.seed, step, 10 + view, number)
        mixed.append(patch_mix(part, args.num_mix, args.patch_size, torch.randperm(tokens, generator=draw)))
    return torch.cat(mixed)


def describe_backbone(args):
    more = dict(interpolation=args.interpolation, method=METHOD, encoder=EVALUATED)
    info = common.backbone_info(args.arch, args.image_size, args.patch_size, args.norm, **more)
    if args.variant == "released" and args.arch == "vit_small":
        info["create_kwargs"]["num_heads"] = 12  # D3
    return info


class PatchMix(nn.Module):
    """Encoder F, projector G, predictor H, and the momentum copies of F and G (Algorithm 2)."""

    def __init__(self, args, info):
        super().__init__()
        self.args, self.temperature, self.terms = args, args.temperature, args.terms.split(",")
        drop = dict(drop_path_rate=args.drop_path) if info["timm_name"].startswith(("vit_", "deit")) else {}
        self.backbone = group_batch_norms(common.build_backbone(info, **drop), args.bn_groups)
        self.projector = mlp([self.backbone.head_hidden_size, args.hidden, args.hidden, args.dim], args.bn_groups)
        self.predictor = mlp([args.dim, args.hidden, args.dim], args.bn_groups)
        if args.momentum == (0.0, 0.0):  # D4: no momentum encoder, its names are the encoder's own
            self.momentum_backbone, self.momentum_projector = self.backbone, self.projector
        else:
            self.momentum_backbone = group_batch_norms(common.build_backbone(info), args.bn_groups).requires_grad_(False)
            self.momentum_backbone.load_state_dict(self.backbone.state_dict())
            self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        # D1: weights of the terms, and of the positives within mix-to-mix; smoothing of original to original.
        paper = args.variant == "paper"
        self.smoothing = 0.0 if paper else 0.1
        self.weights = {"oto": 1.0, "mto": 1.0 if paper else 0.5, "mtm": 1.0 if paper else 0.5 / args.num_mix}
        mto_index, mto_weight, mtm_index, mtm_weight = mix_targets(args.batch_size // args.mix_slices, args.num_mix)
        slices = torch.arange(args.batch_size).view(args.mix_slices, -1)  # ids in the global batch: (slices, images)
        for name, index, weight in (
            ("oto", slices.view(-1, 1), torch.ones(1)),
            ("mto", (slices[:, :1, None] + mto_index).flatten(0, 1), mto_weight),
            ("mtm", (slices[:, :1, None] + mtm_index).flatten(0, 1), mtm_weight),
        ):
            self.register_buffer(f"{name}_index", index, persistent=False)
            self.register_buffer(f"{name}_weight", weight, persistent=False)

    def chance(self):
        """The loss at equal logits: the weights' sum times log N."""
        weight = sum(self.weights[t] * getattr(self, f"{t}_weight").sum().item() for t in self.terms)
        return weight * math.log(self.args.batch_size)

    def query(self, x):
        """h = H(G(F(x))): (n, 3, H, W) -> (n, dim), not in bf16."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.predictor(self.projector(self.backbone(x))).to(x.dtype)

    @torch.no_grad()
    def key(self, x):
        """sg(z), z = G(F(x)) of the momentum encoder, of all processes: (n, 3, H, W) -> (N, dim), not in bf16."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return gather(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype))

    def forward(self, views, step):
        """views: this process's two (n, 3, H, W). Returns (Eq. 16, metrics: detached scalars, and q, k (n, dim))."""
        # "1" is the view whose mix is the query: that of T_1 in the paper, of T_2 as released (D5).
        x1, x2 = views if self.args.variant == "paper" else views[::-1]
        mix1, mix2 = mix_slices(x1, self.args, step, 0), mix_slices(x2, self.args, step, 1)  # Algorithm 2, lines 5-6
        first, losses = common.rank_and_world()[0] * len(x1), {}
        own = slice(first, first + len(x1))  # this process's part of the global batch
        if "oto" in self.terms:
            h2, z1 = self.query(x2), self.key(x1)
            oto = self.oto_index[own], self.oto_weight
            losses["oto"] = soft_info_nce(h2, z1, *oto, self.temperature, self.smoothing)  # Eq. 15
        if "mto" in self.terms or "mtm" in self.terms:
            h_mix1 = self.query(mix1)
        if "mto" in self.terms:
            z2 = self.key(x2)
            losses["mto"] = soft_info_nce(h_mix1, z2, self.mto_index[own], self.mto_weight, self.temperature)  # Eq. 13
        if "mtm" in self.terms:
            z_mix2 = self.key(mix2)
            losses["mtm"] = soft_info_nce(h_mix1, z_mix2, self.mtm_index[own], self.mtm_weight, self.temperature)  # Eq. 14
        loss = sum(self.weights[term] * value for term, value in losses.items())  # Eq. 16
        q, k = (h2, z1) if "oto" in self.terms else (h_mix1, z2 if "mto" in self.terms else z_mix2)  # for the health figures
        metrics = {"loss": loss.detach()} | {f"loss_{term}": value.detach() for term, value in losses.items()}
        return loss, metrics | {"q": q.detach(), "k": k[own]}

    @torch.no_grad()
    def update_momentum_encoder(self, m):
        """Xi <- m Xi + (1 - m) Theta (Algorithm 2, line 11). Parameters only: the copies keep their own BN statistics."""
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
    common.say(
        f"{METHOD}, variant {args.variant}; encoder {args.arch}, {size:.2f} M parameters, image {args.image_size} px, patch "
        f"{args.patch_size}, heads {args.hidden} wide; evaluated: the {EVALUATED} encoder\n"
        f"data {args.dataset}: {len(train)} training images ({train.memory()}), {len(test) if test else 'no'} test images, "
        f"{len(train.classes) or 'no'} classes; mean {args.norm[0]}, std {args.norm[1]}\n"
        f"batch {args.batch_size} over {world} process(es), {args.batch_size // world} each; {steps} steps an epoch, "
        f"{args.epochs} epochs; {'bf16' if args.bf16 else 'float32'}; batch-norm groups {args.bn_groups}\n"
        f"rate {args.lr:g} at batch {args.lr_batch}, scaled linearly to {args.lr * args.batch_size / args.lr_batch:g}; "
        f"weight decay {args.weight_decay}, momentum {args.momentum}, temperature {args.temperature}\n"
        f"M = {args.num_mix} within {args.mix_slices} slice(s) of {args.batch_size // args.mix_slices} images; terms "
        f"{', '.join(f'{t} x {model.weights[t]:.3g}' for t in model.terms)}; negatives per query {args.batch_size - 1}, no "
        f"queue; chance level of the loss {model.chance():.3f}"
    )


def train_step(args, model, wrapped, optimizer, batch, step, steps, device):
    """Lines 4-11 of Algorithm 2. Returns the metrics, on the device."""
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
    average_buffers(model)
    return metrics


@common.memory_in_words
def main(args):
    device = init_distributed(args)
    info = describe_backbone(args)
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
    model = PatchMix(args, info).to(device)
    if args.grad_checkpoint:
        model.backbone.set_grad_checkpointing()
    if args.compile:
        model.backbone.compile()
        model.momentum_backbone.compile()
    optimizer = torch.optim.AdamW(parameter_groups(model, skip_vectors=True), lr=0.0, fused=True)
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
    encoder, options = model.momentum_backbone, dict(workers=workers, amp=args.bf16)
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
