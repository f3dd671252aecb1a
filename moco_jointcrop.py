"""MoCo with JointCrop and JointBlur (arXiv 2412.16522, AAAI 2025), on MoCo v1, v2 and v3.

Two random crops of an image mostly have similar areas. Such pairs are easy positives. JointCrop draws the ratio of the
two areas first, and then the areas. One number, beta, sets the law of the ratio: beta > 0 prefers similar areas,
beta = 0 makes the logarithm of the ratio uniform, and beta < 0 prefers extreme ratios. The areas stay in the same
range. Loss, model and cost stay as they are.

JointBlur does the same with the strengths of the two blurs, so that one view is sharp and the other is not. The rest is
MoCo. A momentum encoder makes the keys. The negatives are a queue of earlier keys (v1, v2) or the other keys of the
batch (v3, which also has a predictor).

    Algorithm 1        joint_from_uniform, sample_joint    the two areas, or the two sigmas of the blurs
    Eq. 4-10           (in the tests)                      RandomCrop's own law of the ratio; here `--joint none`
    App. D             draw_views, --local-crops           JointCrop with multi-crop, and which pairs are drawn jointly
    App. F             draw_views, --joint either          JointCrop or JointBlur, one of the two per image
    App. G             centre_suppressed, --css-alpha      centre-suppressed sampling of a crop's position
    MoCo, Eq. 1, 2     info_nce; MoCo.update               the loss; the momentum encoder
    MoCo v3, Alg. 1    contrast, MoCoV3.forward            the symmetric loss

    python moco_jointcrop.py                                                  # a laptop, no data
    python moco_jointcrop.py --dataset cifar10 --joint none                   # the baseline, MoCo v2, on one GPU
    torchrun --nproc_per_node=8 moco_jointcrop.py --dataset imagenet --data-dir DIR --moco v1

The baseline is MoCo. It is exactly `--joint none`. What JointCrop and JointBlur change in it:
    two areas, each drawn on its own          two areas whose ratio is drawn first        joint_from_uniform
    each view is blurred by its own coin      one coin, two sigmas by the same law        draw_views

In another project, with torchvision's transforms, three lines make the views of an image, and three more are JointBlur:

    areas = torch.cat(sample_joint(1, 0.2, 1.0, beta=0.0)).tolist()
    boxes = [RandomResizedCrop.get_params(image, scale=[area, area], ratio=[3 / 4, 4 / 3]) for area in areas]
    views = [resized_crop(image, *box, size=[224, 224]) for box in boxes]
    sigmas = torch.cat(sample_joint(1, 0.1, 2.0, beta=0.0)).tolist()
    if torch.rand(1) < 0.5:  # one coin for both views
        views = [gaussian_blur(view, 21, sigma) for view, sigma in zip(views, sigmas)]

Inference: only the paper's appendix could be read here. The main text defines JointBlur and the settings of small data
sets. So it is ours that JointBlur puts the law on the sigma of the blur, and that one coin decides for both views.
CIFAR, STL-10, MoCo v1's views and App. G's alpha (0.6 on ImageNet, 0.1 on small sets) are ContrastiveCrop's. The second
parameter of Algorithm 1's N_T(0, s_b / beta) is taken for the standard deviation; as a variance it would be another
law. MoCo v3 blurs the key view of one pair in ten, so that JointBlur hardly acts there.

Not here: SimSiam, BYOL, SimCLR and DINO (Tables 9 and 10), for which the lines above are all that is needed; and
ContrastiveCrop's semantic-aware localization (Table 11, second row).

Where this file, the paper and the released code differ:
    D1 s_b, line 1. Paper and here: ln(s_max / s_min). Released (`--variant released`): ln(s_max / s_min - 0.1).
    D2 None of ten aspect ratios fits. Paper and here: a centre crop. Released (`--variant released`): the whole image.
    D3 What is joint. Paper and here: crops and blurs, any beta, App. G. Released (`--variant released`): crops, beta 0.
    D4 The areas of crops. Here: from 0.2, as in the released README's command. Released script's default: from 0.08.
    D5 Small data sets. ContrastiveCrop: a queue of 65,536, CIFAR's stem. Here: 4,096 (STL-10: 8,192, ImageNet's stem).
    D6 The version of MoCo. Paper (appendix): v1. Released: v3. Here: v2, and `--moco` chooses, whatever the variant.
    D7 MoCo v3 on a ViT. Released MoCo v3: AdamW, three layers, a last batch norm. Here: what it has for ResNets.
    D8 MoCo v1's rate at 60 % of the epochs. ContrastiveCrop's file: times 0. Here: to a tenth, and again at 80 %.
    D9 Multi-crop (App. D). Paper: Table 10 is on DINO. Here (ours): local crops are queries only. Each is compared with
       the key view's key (v1, v2), or with the keys of both views (v3). The loss is the mean over all terms (v3: twice
       the mean, as its loss is a sum of two), so that it keeps its size. JointBlur is of the two large views only. App.
       D: `--image-size 160 --crop-scale 0.4 1 --local-crops 4 --local-size 96 --joint-pair local` (or global).
What differs by rounding, by an index or by precision is in tests/golden/README.md.
"""

import argparse
import functools
import json
import math
from pathlib import Path

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.optim import Lars, param_groups_weight_decay
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common

# ========================================================= 1. hyper-parameters

# fmt: off
# {group: {name: (value, what it is, its limits or words)}}: MoCo v2's for ImageNet, and JointCrop's. Each is a flag of
# its value's type, --beta 1.5, and args.NAME. Without limits, a number is not below 0.
HYPERPARAMETERS = dict(
    loss=dict(
        moco=("v2", "version of MoCo (D6); it also chooses the recipe", ("v1", "v2", "v3")),
        local_crops=(0, "local crops per image, as queries (App. D, D9)"),
        temperature=(0.2, "temperature of the loss", (1e-9, math.inf)),
        queue=(65536, "negatives per query; auto: a tenth of the images, at least a batch", (1, math.inf, "auto")),
    ),
    model=dict(
        arch=("resnet50", "encoder: resnet_micro, resnet18, resnet50, vit_small, ..., or any timm model"),
        image_size=(224, "side of a view, in pixels", (1, math.inf)),
        patch_size=(16, "side of a ViT's patch, in pixels", (1, math.inf)),
        dim=(128, "dimension of queries and keys", (1, math.inf)),
        hidden=(4096, "width of the hidden layer of v3's projector and predictor", (1, math.inf)),  # MoCo v3's
        bn_groups=(8, "equal slices of the batch; each has its own batch-norm statistics", (1, math.inf)),
        momentum=((0.999, 0.999), "momentum m of the momentum encoder, first and last", (0, 1)),
    ),
    schedule=dict(
        epochs=(200, "epochs of the whole training", (1, math.inf)),
        batch_size=(256, "images per step, over all processes", (2, math.inf)),
        lr=(0.03, "learning rate at --lr-batch; scaled linearly to --batch-size", (1e-9, math.inf)),
        lr_batch=(256, "batch size for which --lr is given", (1, math.inf)),
        min_lr=(0.0, "last learning rate; if not given, it is scaled as the peak rate is"),
        milestones=([], "rate to a tenth at these shares; none: a cosine", (0.0, 1.0)),
        warmup=(0.0, "epochs of linear warm-up; if not given, it shrinks with --epochs"),
        weight_decay=(1e-4, "weight decay of SGD, or of v3's LARS"),
        sgd_momentum=(0.9, "momentum of SGD, or of v3's LARS", (0, 1)),
        trust_coeff=(0.001, "trust coefficient of v3's LARS", (1e-9, math.inf)),  # MoCo v3's
    ),
    augmentation=dict(
        joint=("crop", "what is drawn jointly", ("none", "crop", "blur", "either", "both")),
        joint_pair=("global", "which pairs of crops are drawn jointly (App. D)", ("global", "local", "both")),
        beta=(0.0, "beta of J-Crop(beta), J-Blur(beta), of any sign", (-1e9, 1e9)),  # the released code's (D3)
        joint_prob=(0.5, "of --joint either: probability of JointCrop (App. F)", (0, 1)),
        css_alpha=(1.0, "alpha of centre-suppressed sampling (App. G); 1: none", (1e-9, math.inf)),
        crop_scale=((0.2, 1.0), "smallest and largest share of the image that a crop has", (1e-9, 1)),  # D4
        local_size=(96, "side of a local crop, in pixels; at most half, unless it is typed", (1, math.inf)),  # D9
        local_scale=((0.05, 0.4), "smallest and largest area of a local crop", (1e-9, 1)),  # D9
        crop_ratio=((3 / 4, 4 / 3), "smallest and largest width / height of a crop", (1e-9, math.inf)),
        interpolation=("bilinear", "how a crop is resized", ("bilinear", "bicubic")),
        jitter=((0.4, 0.4, 0.4, 0.1), "largest change of brightness, contrast, saturation and hue"),
        jitter_p=(0.8, "probability of these color changes", (0, 1)),
        gray_p=(0.2, "probability of a gray view", (0, 1)),
        blur_p=((0.5, 0.5), "probabilities of a blurred query and a blurred key view", (0, 1)),
        blur_sigma=((0.1, 2.0), "smallest and largest sigma of the blur, in pixels", (1e-9, math.inf)),
        solarize_p=((0.0, 0.0), "as --blur-p, of a solarised view", (0, 1)),
        flip_p=(0.5, "probability of a horizontal flip", (0, 1)),
        norm=("imagenet", "data set whose mean and standard deviation normalise the views", common.NORMS),
    ),
)
ONLY_V3 = ("hidden", "trust_coeff")
NOT_V3 = ("queue", "bn_groups", "milestones")  # its negatives and its batch norms are the global batch's
# fmt: on


# ================================================================ 2. the paper


def joint_from_uniform(u, v, low, high, beta, offset=0.0):
    """Return pairs by Algorithm 1, which draws the ratio first: (a, b), two (n,) float64 tensors in [low, high].

    The logarithm of b / a follows the law of beta on [-s_b, s_b], where s_b = ln(high / low - offset). Given the ratio,
    a is uniform on the values for which a and b are in range.

    u, v: (n,) uniform draws in [0, 1). u decides on the ratio, v on a. low > 0. beta: any number, or None for two
    independent uniform values (RandomCrop). offset: 0.1 in the released code (D1).
    Raises ValueError if 0 < low <= high does not hold.
    """
    if not 0 < low <= high:
        raise ValueError(f"joint_from_uniform takes 0 < low <= high, not low {low} and high {high}")
    u, v = (torch.as_tensor(x, dtype=torch.float64) for x in (u, v))
    if beta is None:
        return low + (high - low) * u, low + (high - low) * v
    s_b = math.log(high / low - offset)  # line 1
    if abs(beta) < 1e-6:
        log_ratio = s_b * (2 * u - 1)  # line 5, and the limit of both other cases
    else:
        # Lines 3 and 7: a normal law of standard deviation s_b / |beta|, truncated at |beta| standard deviations. u is
        # put into the inverse of its distribution function.
        tail = torch.special.ndtr(torch.tensor(-abs(beta), dtype=torch.float64))
        log_ratio = (torch.special.ndtri(tail + u * (1 - 2 * tail)) * (s_b / abs(beta))).clamp(-s_b, s_b)
    if beta < 0:  # lines 8-12: mirrored within each half, so that the extremes are the likeliest
        log_ratio = torch.where(log_ratio < 0, -s_b - log_ratio, s_b - log_ratio)
    ratio = log_ratio.exp()
    lowest, highest = (low / ratio).clamp_min(low), (high / ratio).clamp_max(high)
    a = lowest + v * (highest - lowest).clamp_min(0)  # line 14; rounding may cross the ends where |ln ratio| = s_b
    return a.clamp(low, high), (a * ratio).clamp(low, high)  # line 15


def sample_joint(n, low, high, beta, generator=None, offset=0.0):
    """Draw n pairs by Algorithm 1: two (n,) float64 tensors in [low, high]. They are areas (J-Crop) or sigmas (J-Blur).

    generator: a torch.Generator on the CPU, or None for the global one. The rest is as in `joint_from_uniform`, which
    it calls: copy both.
    """
    u, v = torch.rand(2, n, dtype=torch.float64, generator=generator)
    return joint_from_uniform(u, v, low, high, beta, offset)


def centre_suppressed(draws, alpha):
    """Positions of crops by centre-suppressed sampling (App. G): (n, 2) of the law Beta(alpha, alpha), in [0, 1).

    A position (top, left) is a share of the room that a crop leaves. alpha > 0: below 1 it prefers the edges.
    draws: (n,) uniform in [0, 1), each the seed of a pair.
    """
    pairs = [np.random.default_rng(int(draw * 2**53)).beta(alpha, alpha, 2) for draw in draws]
    return np.clip(pairs, 0, 1 - 1e-9)


def contrast(q, k, temperature, first):
    """MoCo v3's ctr (its Algorithm 1), as a scalar: 2 T times the cross-entropy of cosine similarities.

    q: (n, C) this process's queries. k: (N, C) the keys of all processes. The positive of row i is key first + i, and
    the others are its negatives. temperature: T > 0. Both are L2-normalised here.
    Gradients reach q, and also k unless it is detached. Raises ValueError if the shapes do not fit.
    """
    if q.dim() != 2 or k.dim() != 2 or q.shape[1] != k.shape[1] or not 0 <= first <= len(k) - len(q):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and first {first}"
        raise ValueError(f"contrast takes q (n, C), k (N, C) and first from 0 to N - n, not {shapes}")
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / temperature
    return 2 * temperature * F.cross_entropy(logits, first + torch.arange(len(q), device=q.device))


# -------- InfoNCE with a queue (the same in moco_jointcrop, jcl, clim and logo)


def info_nce(q, k, queue, temperature):
    """Return MoCo's loss, InfoNCE with a queue (MoCo, Eq. 1), as a scalar.

    It is the mean of -log(exp(q.k / T) / (exp(q.k / T) + sum_j exp(q.queue_j / T))), where the positive of a query is
    the key of the same row. At equal logits it is log(K + 1).

    q, k: (N, C), L2-normalised. queue: (K, C), the negatives. temperature: T > 0.
    Gradients reach q, and also k and queue unless these are detached. Raises ValueError if the shapes do not fit.
    """
    if q.dim() != 2 or k.shape != q.shape or queue.shape[1:] != q.shape[1:]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, queue {tuple(queue.shape)}"
        raise ValueError(f"info_nce takes q (N, C), k (N, C) and queue (K, C), not {shapes}")
    positive = (q * k).sum(1, keepdim=True)
    logits = torch.cat([positive, q @ queue.T], dim=1) / temperature
    return F.cross_entropy(logits, logits.new_zeros(len(q), dtype=torch.int64))  # the positive is in column 0


# ============================================================= 3. augmentation

SHARED_DRAWS = 6  # uniform numbers per image that its views share, after those of each view; then one per local crop


def augmentation(args):
    """Return a list of View: query and key, which differ in blur and solarization at most, and local crops."""
    whole = args.variant == "released"  # D2
    crop = dict(size=args.image_size, area=args.crop_scale, ratio=args.crop_ratio, whole=whole)
    color = dict(jitter=args.jitter, jitter_p=args.jitter_p, gray_p=args.gray_p, solarize_p=args.solarize_p[0])
    blur = dict(blur_p=args.blur_p[0], blur_sigma=args.blur_sigma)
    query = common.View(**crop, **color, **blur, flip_p=args.flip_p)
    key = query._replace(blur_p=args.blur_p[1], solarize_p=args.solarize_p[1])
    local = query._replace(size=args.local_size, area=args.local_scale)
    return [query, key] + [local] * args.local_crops


def draw_views(args, index, sizes, draws):
    """Draw the views of n images. This is where --joint acts.

    index: (n,) rows of the images. sizes: (n, 2) their heights and widths. draws: uniform in [0, 1), (n, VIEW_DRAWS for
    each view + SHARED_DRAWS + local crops). Returns (cuts, colors) as `common.ViewDataset` wants them.
    """
    views = augmentation(args)
    *view_draws, shared = np.split(draws, common.VIEW_DRAWS * np.arange(1, len(views) + 1), axis=1)
    coin, area_u, area_v, sigma_u, sigma_v, blur_coin, *local_draws = shared.T

    # Which images have JointCrop, and which have JointBlur
    if args.joint == "either":  # App. F: one of the two
        joint_crop = coin < args.joint_prob
        joint_blur = ~joint_crop
    else:
        joint_crop = np.full(len(index), args.joint in ("crop", "both"))
        joint_blur = np.full(len(index), args.joint in ("blur", "both"))

    # Algorithm 1: a pair of areas and a pair of sigmas per image. What is not joint is NaN: each view draws its own
    offset = 0.1 if args.variant == "released" else 0.0  # D1
    joint_areas, joint_sigmas, joint_coins = np.full((3, len(views), len(index)), np.nan)
    if args.joint_pair in ("global", "both"):
        areas = joint_from_uniform(area_u, area_v, *args.crop_scale, args.beta, offset)
        joint_areas[:2] = np.where(joint_crop, areas, np.nan)
    if args.joint_pair in ("local", "both"):  # App. D: local crops 1 and 2, 3 and 4, ...
        for i in range(0, args.local_crops - 1, 2):
            areas = joint_from_uniform(local_draws[i], local_draws[i + 1], *args.local_scale, args.beta, offset)
            joint_areas[2 + i : 4 + i] = np.where(joint_crop, areas, np.nan)
    sigmas = joint_from_uniform(sigma_u, sigma_v, *args.blur_sigma, args.beta)  # of the large views, in any case
    joint_sigmas[:2] = np.where(joint_blur, sigmas, np.nan)
    joint_coins[:2] = np.where(joint_blur, blur_coin, np.nan)  # both are blurred, or neither is

    cuts, colors = [], []
    for i, (view, draw) in enumerate(zip(views, view_draws, strict=True)):
        position = None
        if args.css_alpha != 1:
            position = centre_suppressed(common.name_draws(draw)["position"][:, 1], args.css_alpha)
        boxes, color = common.draw_view(view, sizes, draw, joint_areas[i], position, joint_sigmas[i], joint_coins[i])
        cuts.append((index, boxes, view.size))
        colors.append(color)
    return cuts, colors


# ==================================================================== 4. model

# -------------------- queue (the same in moco_jointcrop, jcl, clim and logo)

STREAM_QUEUE, STREAM_SHUFFLE = 4, 20  # random streams, see common.generator


class Queue(nn.Module):
    """The last `length` keys, (length, dim), first in, first out. It begins with random L2-normalised vectors.

    Any length goes with any batch size: it wraps around. generator: a torch CPU generator; torch's global one if None.
    """

    def __init__(self, length, dim, generator=None):
        super().__init__()
        keys = torch.randn(length, dim, generator=generator)
        self.register_buffer("keys", F.normalize(keys, dim=1))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))  # of the oldest key

    @torch.no_grad()
    def enqueue(self, keys):
        """Replace the oldest keys by `keys` (n, dim), the same on every process. Call it after backward."""
        length = len(self.keys)
        rows = (self.position + torch.arange(len(keys), device=keys.device)) % length
        self.keys.index_copy_(0, rows[-length:], keys[-length:].to(self.keys))
        self.position.add_(len(keys)).remainder_(length)


# ---------------------------------------------------------------------- MoCo


def image_sizes(args):
    """Return the sides of the images that the encoder gets, in pixels."""
    return [args.image_size] + [args.local_size] * (args.local_crops > 0)


class MoCo(nn.Module):
    """MoCo v1's (linear head) or v2's (two-layer head) query encoder, momentum encoder (for the keys) and queue.

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of --arch.
    """

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args = args
        self.backbone = common.build_backbone(common.encoder_info(args)) if encoder is None else encoder
        width = common.output_width(self.backbone, *image_sizes(args))
        if args.moco == "v1":
            self.projector = nn.Sequential(nn.Linear(width, args.dim))
        else:
            self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, args.dim))
        self.momentum_backbone = common.copy_module(self.backbone, frozen=True)
        self.momentum_projector = common.copy_module(self.projector, frozen=True)
        if args.moco != "v3":
            self.queue = Queue(args.queue, args.dim, common.generator(args.seed, STREAM_QUEUE))

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.amp == "bf16"):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        """Return the momentum encoder's keys of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.amp == "bf16"):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, step):
        """Return (loss, keys to enqueue (N, dim), (q, k), metrics {name: tensor}): MoCo, Algorithm 1.

        views: this process's query view, key view and local crops, each (n, 3, H, W), normalised. step: seeds the
        shuffle of the keys. q and k (n, dim) are queries and their keys, without gradient. Gradients reach the query
        encoder only.
        """
        q = self.query(views[0])
        generator = common.generator(self.args.seed, step, STREAM_SHUFFLE)
        keys = encode_shuffled_keys(self.key, views[1:2], generator)[0]  # (N, C), of all processes
        k = common.shard(keys)  # (n, C)
        loss = info_nce(q, k, self.queue.keys, self.args.temperature)  # MoCo, Eq. 1
        for local in views[2:]:  # App. D
            loss = loss + info_nce(self.query(local), k, self.queue.keys, self.args.temperature)
        loss = loss / (len(views) - 1)  # the mean over the queries
        return loss, keys, (q.detach(), k), {}

    @torch.no_grad()
    def update(self, m):
        """Move the momentum encoder's parameters: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2), m in [0, 1]."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


class MoCoV3(MoCo):
    """MoCo v3's query encoder with a predictor, and its momentum encoder. Its heads replace MoCo's. It has no queue."""

    def __init__(self, args, encoder=None):
        super().__init__(args, encoder)
        if encoder is None:  # MoCo v3 starts from zero residual branches
            for block in self.modules():
                if hasattr(block, "zero_init_last"):
                    block.zero_init_last()
        self.projector = two_layers(self.projector[0].in_features, args.hidden, args.dim)
        self.projector.append(nn.BatchNorm1d(args.dim, affine=False))
        self.predictor = two_layers(args.dim, args.hidden, args.dim)  # D7
        self.momentum_projector = common.copy_module(self.projector, frozen=True)

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), not normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.amp == "bf16"):
            return self.predictor(self.projector(self.backbone(x))).to(x.dtype)

    def forward(self, views, step):
        """Return (loss, None, (q, k), {}), as MoCo.forward: MoCo v3, Algorithm 1, symmetric in the two views."""
        q1, q2, *q_local = [self.query(view) for view in views]
        k1, k2 = [gather(self.key(view)) for view in views[:2]]  # (N, C), of all processes
        first = common.rank_and_world()[0] * len(q1)
        loss = contrast(q1, k2, self.args.temperature, first) + contrast(q2, k1, self.args.temperature, first)
        for q in q_local:  # App. D
            loss = loss + sum(contrast(q, k, self.args.temperature, first) for k in (k1, k2))
        loss = loss / (1 + len(q_local))
        return loss, None, (q1.detach(), common.shard(k2)), {}


def two_layers(inputs, hidden, outputs):
    """A head of MoCo v3: linear, batch norm, ReLU, linear."""
    first = nn.Linear(inputs, hidden, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, outputs, bias=False))


# ================================================================= 5. training

# fmt: off
IMAGENET = common.defaults(HYPERPARAMETERS)
CIFAR = dict(  # ContrastiveCrop's small configurations; they do not blur, so JointBlur needs --blur-p 0.5 0.5
    IMAGENET, arch="resnet18", image_size=32, patch_size=4, epochs=500, batch_size=512, lr=0.5, lr_batch=512,
    min_lr=0.05, queue=4096, blur_p=(0.0, 0.0), norm="cifar10",
)
RECIPES = dict(
    patterns=dict(  # ours, for two CPU cores
        IMAGENET, arch="resnet_micro", image_size=32, patch_size=4, epochs=75, batch_size=64, lr=0.02, lr_batch=128,
        queue=128, blur_p=(0.1, 0.1), crop_scale=(0.3, 1.0), bn_groups=2, momentum=(0.95, 0.95), warmup=1.0,
        norm="patterns",
    ),
    cifar10=CIFAR,
    cifar100=dict(CIFAR, norm="cifar100"),
    stl10=dict(CIFAR, image_size=96, patch_size=8, queue=8192, norm="imagenet"),
    imagenet100=dict(IMAGENET, arch="resnet18", queue=16384),  # ours
    imagenet=dict(IMAGENET, knn_every=50),  # its kNN takes minutes
    folder=dict(IMAGENET, queue="auto"),  # ours: the queue is a tenth of the images
)
SMALL_ENCODERS = dict(  # ours
    batch_size=256, lr=0.1, lr_batch=256, min_lr=0.0, momentum=(0.99, 0.99), blur_p=(0.5, 0.5),
)
V1 = dict(moco="v1", temperature=0.07, milestones=(0.6, 0.8), min_lr=0.0)  # ContrastiveCrop's, as the paper's (App. G)
V1_IMAGENET = dict(V1, epochs=100)
V3_IMAGENET = dict(  # the released code, and MoCo v3's CONFIG: 100 epochs with 0.6 (300 epochs: --lr 0.3)
    moco="v3", epochs=100, batch_size=4096, lr=0.6, lr_batch=256, warmup=10.0, min_lr=0.0, weight_decay=1e-6,
    momentum=(0.99, 1.0), temperature=1.0, dim=256, jitter=(0.4, 0.4, 0.2, 0.1), blur_p=(1.0, 0.1),
    solarize_p=(0.0, 0.2),
)
V3_CIFAR = dict(V3_IMAGENET, epochs=500, batch_size=512, hidden=2048, blur_p=(0.0, 0.0))  # ours, as the next
V3_PATTERNS = dict(V3_IMAGENET, epochs=75, batch_size=64, lr_batch=128, warmup=1.0, hidden=512, momentum=(0.98, 1.0))
# fmt: on


def recipe(chosen):
    """Return the hyper-parameters {name: value}. chosen: a namespace with dataset, arch and moco."""
    values = dict(RECIPES[chosen.dataset])
    small = chosen.dataset in ("cifar10", "cifar100", "stl10")
    large = chosen.dataset in ("imagenet100", "imagenet", "folder")
    small_encoder = chosen.arch in ("resnet_micro", "resnet_mini")
    if small_encoder and (small or chosen.dataset == "folder"):
        values |= SMALL_ENCODERS
    if chosen.moco == "v1":
        values |= V1_IMAGENET if large else V1
    if chosen.moco == "v3":
        values |= V3_IMAGENET if large else V3_CIFAR if small else V3_PATTERNS
    if small_encoder and chosen.dataset == "folder":
        values["batch_size"] = 64  # a folder of one's own may be small
    unused = NOT_V3 if chosen.moco == "v3" else ONLY_V3
    return {name: value for name, value in values.items() if name not in unused}


def parse_args(argv=None):
    """Return the command line (argv, or sys.argv's) as a namespace of all values. Exits with an error on a mistake."""
    run = dict(RUN, variant=("paper", "follow the paper, or the authors' code", ("paper", "released")))
    args, typed = common.parse("moco_jointcrop.py", __doc__, argv, HYPERPARAMETERS, dict(run=run), recipe)
    args.method, args.evaluated = "moco_jointcrop", "query"
    # What is not typed follows from other values
    if "local_size" not in typed:  # at most half of a view's side, in whole patches of a ViT
        patch_size = args.patch_size if common.is_vit(args.arch) else 1
        args.local_size = min(args.local_size, args.image_size // 2) // patch_size * patch_size
    common.check_schedule(args)
    if args.moco != "v3":
        args.bn_groups = batch_norm_groups(args, typed)
    # What would contradict itself
    if args.joint_pair != "global" and args.local_crops < 2:
        common.fail(f"--joint-pair {args.joint_pair} has nothing to act on: give --local-crops 2 or more")
    if args.joint in ("blur", "either", "both") and max(args.blur_p) == 0:
        common.fail(f"--joint {args.joint} has nothing to act on: this recipe does not blur; give --blur-p 0.5 0.5")
    is_released = args.joint in ("none", "crop") and args.beta == 0 and args.css_alpha == 1 and args.local_crops == 0
    if args.variant == "released" and not is_released:
        what = "JointCrop with beta 0 on two views (D3)"
        common.fail(f"--variant released is {what}: leave out --beta, --css-alpha, --local-crops, other --joint")
    return args


def schedule(args, step, steps_per_epoch):
    """Return (learning rate, weight decay, momentum of the momentum encoder) for a step, counted from 0.

    The rate warms up linearly from 0. Then it falls to a tenth at each of --milestones or, if there are none, by a
    cosine to --min-lr. The momentum follows a cosine from its first to its second value over the whole training.
    """
    epoch = step / steps_per_epoch
    warmup = args.warmup if args.warmup * steps_per_epoch >= 1 else 0  # less than a step is none
    whole = step / (args.epochs * steps_per_epoch)  # the share of the training that is done
    if epoch < warmup:
        lr = common.peak_rate(args) * epoch / warmup
    elif args.moco != "v3" and args.milestones:
        lr = common.peak_rate(args) * 0.1 ** sum(whole >= milestone for milestone in args.milestones)
    else:
        done = (epoch - warmup) / (args.epochs - warmup)
        lr = args.min_lr + (common.peak_rate(args) - args.min_lr) * (1 + math.cos(math.pi * done)) / 2
    first, last = args.momentum
    return lr, args.weight_decay, last + (first - last) * (1 + math.cos(math.pi * whole)) / 2


def make_optimizer(args, model):
    """SGD as in MoCo v1 and v2, or v3's LARS, without decay and adaptation of biases and batch norms."""
    if args.moco == "v3":
        trained = param_groups_weight_decay(model, args.weight_decay)
        trained[-1]["always_adapt"] = True  # those that decay, also if --weight-decay is 0
        return Lars(trained, args.lr, momentum=args.sgd_momentum, trust_coeff=args.trust_coeff)
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, args.lr, momentum=args.sgd_momentum, weight_decay=args.weight_decay)


@common.leaves_no_trace
def main(args, train=None, test=None, encoder=None):
    """Train as args say. If an earlier call was stopped, the same call continues its run.

    args: the namespace of `parse_args`. train, test: common.ImageSet of images to use instead of --dataset.
    encoder: a module that maps (N, 3, H, W) to (N, width), to train instead of --arch; a copy of it is trained.
    """
    args = argparse.Namespace(**vars(args))  # a copy
    device = common.join_processes(args.device)
    args.arch = args.arch if encoder is None else "custom"
    dataset = args.dataset if train is None else "custom"
    args.out = args.out or f"runs/moco_jointcrop-{dataset}-{args.arch}-s{args.seed}{args.changes}"
    args.amp = "bf16" if common.use_bf16(args.amp, device, args.arch, image_sizes(args)) else "off"
    args.device = device.type

    # Data
    train, test = common.open_images(args, train, test)
    draw = functools.partial(draw_views, args)
    loader = common.make_loader(args, train, augmentation(args), device, draw, SHARED_DRAWS + args.local_crops)
    layout, norm = common.memory_format(device, args.arch), common.NORMS[args.norm]
    if args.show_views:
        names = ["query", "key", *(f"local {i + 1}" for i in range(args.local_crops))]
        return common.save_views(args.show_views, common.colour_views(next(iter(loader)), device), names)
    steps_per_epoch = len(train) // args.batch_size
    total_steps, rank = args.epochs * steps_per_epoch, common.rank_and_world()[0]
    last_step = min(args.max_steps or total_steps, total_steps)

    # Model and optimiser
    if args.moco != "v3" and args.queue == "auto":
        args.queue = min(65536, max(args.batch_size, len(train) // 10))
    torch.manual_seed(args.seed)
    if args.moco == "v3":
        model = MoCoV3(args, common.copy_module(encoder)).to(device, memory_format=layout)
        if dist.is_initialized() and device.type == "cuda":  # on CPUs each process takes its own statistics
            model = timm.layers.convert_sync_batchnorm(model)
    else:
        model = MoCo(args, common.copy_module(encoder)).to(device, memory_format=layout)
        model = split_batch_norms(model, args.bn_groups)
    optimizer = make_optimizer(args, model)
    ddp = in_parallel(args, model)

    # The run's folder. The run goes on from its last.pt, if there is one. The lock keeps other runs out
    images = dict(number=len(train), checksum=train.checksum())
    lock = common.claim_folder(args.out)
    step, records = restore(args, images, model, optimizer)
    save(args, step, records, images, model, optimizer)
    if args.moco == "v3":
        chance = 4 * args.temperature * math.log(args.batch_size)  # the loss at equal logits: two terms of 2 T each
        norms = "each process's own" if dist.is_initialized() and device.type == "cpu" else "of the whole batch"
        facts = dict(negatives=args.batch_size - 1, batch_norm=norms)
    else:
        chance = math.log(args.queue + 1)  # the loss at equal logits
        facts = dict(queue_share=args.queue / len(train))
    introduce(args, train, test, peak_lr=common.peak_rate(args), chance_level=chance, **facts)

    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # the last epoch again: it may lack its kNN
        loader.batch_sampler.set_epoch(epoch, step, last_step)
        history = []
        with common.until_stopped(loader) as batches:  # SIGTERM or Ctrl-C: the step is saved, then it raises Stopped
            for batch in batches:
                lr, _, momentum = schedule(args, step, steps_per_epoch)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                # Algorithm 1: a query view and a key view per image; the loader has drawn and cut them
                views = common.colour_views(batch, device, layout, norm)
                torch.manual_seed(common.generator(args.seed, step, STREAM_STEP, rank).initial_seed())  # for drop-path
                # The loss: MoCo's Eq. 1, or MoCo v3's Algorithm 1
                loss, keys, (q, _), metrics = ddp(views, step)
                # Update the query encoder. Then move the momentum encoder (MoCo, Eq. 2)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
                optimizer.step()
                model.update(momentum)
                average_statistics(model)
                # The keys are negatives of the next steps; v3 enqueues none
                if keys is not None:
                    model.queue.enqueue(keys)
                step += 1
                metrics |= dict(loss=loss, grad_norm=grad_norm)
                history.append({name: value.detach() for name, value in metrics.items()})
                if step % 10 == 0 or step == total_steps:
                    common.show_progress(args, loader, history, step, total_steps)
            ended = step == (epoch + 1) * steps_per_epoch
            if ended and history:
                record = dict(epoch=epoch + 1, step=step, **means(args, loader, history), lr=lr, momentum=momentum)
                records.append(record | dict(below_chance=chance - record["loss"], **common.embedding_health(q)))
            save(args, step, records, images, model, optimizer)
        if ended:
            due = args.knn_every and ((epoch + 1) % args.knn_every == 0 or epoch + 1 == args.epochs)
            if test is not None and due and "knn20_top1" not in records[-1]:
                records[-1] |= common.knn_record(args, model.backbone, train, test, device)
                save(args, step, records, images, model, optimizer)
            common.log_epoch(args, records[-1])
        if step >= last_step:
            break

    lock.close()
    common.log_end(args, step, total_steps)


# =============================================================== 6. machinery


def restore(args, images, model, optimizer):
    """Load the run in --out, or --resume's, or --init's weights only. Return (steps done, records of the epochs)."""
    path, state = common.load_run(args, images, args.resume)
    if state["step"] > 0:
        with common.fitting(path):
            model.load_state_dict(state["model"])
            # Only its buffers: rates and weight decay are this run's, which may differ from --resume's
            optimizer.load_state_dict(optimizer.state_dict() | dict(state=state["optimizer"]["state"]))
    elif args.init:
        weights, _ = common.fitting_weights(args.init, model.backbone, args.init_prefix)
        model.backbone.load_state_dict(weights)
        model.momentum_backbone.load_state_dict(weights)
    return state["step"], state["records"]


def save(args, step, records, images, model, optimizer):
    """Write last.pt, which is all that a run needs to go on, and what follows from it, each whole or not at all."""
    out, info = Path(args.out), common.encoder_info(args)
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, records=records)
    state |= dict(config=vars(args), images=images, backbone=info)
    common.write_file(out / "last.pt", state)
    epoch = records[-1]["epoch"] if records and records[-1]["step"] == step else 0  # 0: in the middle of one
    if epoch and args.keep_every and epoch % args.keep_every == 0:
        common.write_file(out / f"epoch-{epoch:04d}.pt", state)
    common.write_file(out / "backbone.pt", info | {"state_dict": model.backbone.state_dict()})
    config = vars(args) | common.versions(args.device) | {"images": images}
    common.write_file(out / "config.json", json.dumps(config, default=str))
    common.write_file(out / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))


# ------------- shuffled keys (the same in moco_jointcrop, jcl, clim and logo)


def exchange(x, wanted):
    """Exchange rows between processes: on process r, return the rows wanted[r] of the global batch, as (m, ...).

    x: (n, ...), this process's part of the batch. wanted: (world, m) int64 on the CPU, the same on all processes. No
    gradient.
    """
    rank, world = common.rank_and_world()
    if world == 1:
        return x[wanted[0].to(x.device, non_blocking=True)]
    owner, row = wanted // len(x), wanted % len(x)
    rows_to_send = torch.cat([row[r][owner[r] == rank] for r in range(world)])
    send_counts = (owner == rank).sum(1).tolist()
    receive_counts = owner[rank].bincount(minlength=world).tolist()
    received = x.new_empty(wanted.shape[1], *x.shape[1:])
    to_send = x[rows_to_send.to(x.device, non_blocking=True)].contiguous()
    dist.all_to_all_single(received, to_send, receive_counts, send_counts)
    place = owner[rank].argsort(stable=True).to(x.device, non_blocking=True)  # rows arrive sorted by sender
    return torch.empty_like(received).index_copy_(0, place, received)


@torch.no_grad()
def encode_shuffled_keys(encode, views, generator):
    """Encode several views of the global batch as keys, shuffled for batch norm: (views, N, C).

    encode: maps images to keys. views: list of this process's images (n, 3, H, W).
    The key and the query of an image must not share batch statistics, which would tell the encoder that they belong
    together (MoCo, section 3.3). So the rows of all views of the global batch are shuffled, each process encodes its
    part, and the keys are put back in order. Any number of processes makes the same batch-norm groups.
    """
    n, world = len(views[0]), common.rank_and_world()[1]
    shuffle = torch.randperm(len(views) * n * world, generator=generator)
    # Row v * N + i is view v of image i. location[row] is its index in the concatenation, in rank order, of every
    # process's torch.cat(views).
    location = torch.arange(len(shuffle)).view(world, len(views), n).transpose(0, 1).flatten()
    mine = exchange(torch.cat(views), location[shuffle].view(world, -1))
    keys = gather(encode(mine))
    unshuffle = shuffle.argsort().to(keys.device, non_blocking=True)
    return keys[unshuffle].view(len(views), n * world, -1)


# -- batch norm in groups (the same in moco_jointcrop, jcl, clim and logo)


class GroupedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose statistics are taken over `groups` equal slices of the global batch, for (N, C) or (N, C, H, W).

    Each group acts as the batch norm of one GPU would. The number of processes must divide `groups`. The running
    statistics are the mean over this process's groups. `average_statistics` then averages them over the processes.
    norm: the batch norm whose parameters, statistics and state_dict keys this one takes over.
    """

    def __init__(self, norm, groups):
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked, self.groups, self.training = norm.num_batches_tracked, groups, norm.training
        # timm's BatchNormAct2d also applies a dropout and an activation.
        self.after = nn.Sequential(norm.drop, norm.act) if hasattr(norm, "act") else nn.Identity()

    def _check_input_dim(self, x):
        """Accept any number of dimensions."""

    def forward(self, x):
        groups_here = self.groups // common.rank_and_world()[1]
        if not self.training or groups_here <= 1:
            return self.after(super().forward(x))
        mean = self.running_mean.repeat(groups_here, 1)
        var = self.running_var.repeat(groups_here, 1)
        slices = [
            F.batch_norm(part, m, v, self.weight, self.bias, True, self.momentum, self.eps)  # updates m and v in place
            for part, m, v in zip(x.chunk(groups_here), mean, var, strict=True)
        ]
        self.running_mean.copy_(mean.mean(0))
        self.running_var.copy_(var.mean(0))
        return self.after(torch.cat(slices))


def batch_norm_groups(args, typed):
    """Return --bn-groups: as typed; else the recipe's or, if these do not fit, as many as have eight images each."""
    batch_size, groups, world = args.batch_size, args.bn_groups, common.rank_and_world()[1]
    if "bn_groups" not in typed:
        if batch_size % groups or batch_size < 8 * groups:
            groups = max((n for n in range(1, groups) if batch_size % n == 0 and batch_size >= 8 * n), default=1)
        groups = math.lcm(groups, world)
    if batch_size % groups or batch_size < 2 * groups or groups % world:
        needed = f"a multiple of the {world} process(es) that cuts the batch into equal groups of two or more images"
        common.fail(f"--bn-groups {groups} with --batch-size {batch_size}: give {needed}")
    return groups


def split_batch_norms(module, groups):
    """Replace a module's batch norms, but for subclasses of a user's own, by ones over `groups` slices. Return it."""
    for name, child in module.named_children():
        is_plain = type(child) in (nn.BatchNorm1d, nn.BatchNorm2d, timm.layers.BatchNormAct2d)
        if is_plain and child.track_running_stats and child.momentum is not None:
            setattr(module, name, GroupedBatchNorm(child, groups))
        else:
            split_batch_norms(child, groups)
    return module


@torch.no_grad()
def average_statistics(model):
    """Average the running statistics of batch norms over the processes, in one all-reduce."""
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    if dist.is_initialized() and buffers:
        flat = torch.cat(buffers)
        dist.all_reduce(flat)
        means = (flat / dist.get_world_size()).split([len(buffer) for buffer in buffers])
        torch._foreach_copy_(buffers, means)


# ------------------------- what every run has (the same in all five files)

STREAM_STEP = 0  # a random stream, see common.generator
RUN = dict(
    dataset=("patterns", "data set; it also chooses the recipe", common.DATASETS),
    data_dir=(None, "its folder, with train/, and val/ or test/; for `folder` any tree of images"),
    seed=(0, "seed of all random numbers", (0, 2**63 - 1)),
    init=(None, "start the encoder from a checkpoint, of this project or another"),
    init_prefix=(None, "prefix of the encoder's names in --init's file, if it has several"),
    out=(None, "folder of the run; one that has begun goes on"),
    resume=(None, "begin a new --out with another run's last.pt"),
    max_steps=(None, "save and stop when the run has made N steps in all", (1, math.inf)),
    keep_every=(0, "keep a copy of last.pt every N epochs; 0: none"),
    knn_every=(10, "evaluate by kNN every N epochs; 0: never"),
    device=("auto", "auto: a GPU where there is one", ("auto", "cuda", "cpu")),
    amp=("auto", "auto: bf16 on GPUs that have it; off: float32", ("auto", "bf16", "off")),
    compile=(False, "compile the encoders: minutes at the start, then faster steps"),
    grad_checkpoint=(False, "less memory, more time; batch norm's averages move twice"),
    workers=(None, "processes that load images, per training process", (0, 1024)),
    tensorboard=(False, "also write the metrics for TensorBoard"),
    show_views=(None, "write a picture of the inputs, and exit"),
)


def introduce(args, train, test, **facts):
    """Say what the run is: its data, every value that its numbers depend on, and facts that follow from these."""
    world = common.rank_and_world()[1]
    precision = "bf16" if args.amp == "bf16" else "TF32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
    facts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in facts.items()}
    facts |= dict(processes=world, images_per_process=args.batch_size // world, precision=precision)
    rows = dict(run={name: getattr(args, name) for name in ("dataset", "variant", "seed", "init", "evaluated", "out")})
    rows |= {group: {name: getattr(args, name, None) for name in table} for group, table in HYPERPARAMETERS.items()}
    rows |= dict(data={"train": train, "test": test}, facts=facts, versions=common.versions(args.device))
    for group, values in rows.items():
        common.log_values(group, values)


def means(args, loader, history):
    """Return the means of metrics over the steps and processes, and how fast the steps were: {name: float}.

    history: a dict per step, {name: 0-d tensor}. Exits with an error message if a mean is not finite.
    """
    sums = sum(torch.stack([*metrics.values()]).double() for metrics in history)
    values = (gather(sums[None]).mean(0) / len(history)).tolist()
    if not math.isfinite(sum(values)):
        common.fail("the loss or its gradient is not finite in this epoch; last.pt is from before")
    return dict(zip(history[0], values, strict=True)) | loader.speed(args.batch_size * len(history))


def gather(x):
    """Concatenate the tensors (n, ...) of all processes to (N, ...), in rank order. No gradient."""
    world = common.rank_and_world()[1]
    if world == 1:
        return x
    out = x.new_empty(world * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def in_parallel(args, model):
    """Apply --grad-checkpoint and --compile to the model, wrap it in DDP if there are several processes, return it."""
    if args.grad_checkpoint:
        model.backbone.set_grad_checkpointing()
    if args.compile:
        for encoder in {model.backbone, getattr(model, "momentum_backbone", model.backbone)}:
            encoder.compile()
    if not dist.is_initialized():
        return model
    options = dict(broadcast_buffers=False, gradient_as_bucket_view=True)
    options["find_unused_parameters"] = args.arch == "custom"  # only a user's own encoder may have any
    return DistributedDataParallel(model, **options)


if __name__ == "__main__":
    common.start(main, parse_args)
