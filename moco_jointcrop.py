"""MoCo with JointCrop and JointBlur (arXiv 2412.16522, AAAI 2025), on MoCo v1, v2 and v3.

Two random crops of an image mostly have similar areas. Such pairs are easy positives. JointCrop draws the ratio of the
two areas first, and then the areas. One number, beta, sets the distribution of the ratio: beta > 0 prefers similar
areas, beta = 0 makes the logarithm of the ratio uniform, and beta < 0 prefers extreme ratios. The areas stay in the
same range. Loss, model and cost stay as they are.

JointBlur does the same with the strengths of the two blurs, so that one view is sharp and the other is not. The rest is
MoCo. A momentum encoder makes the keys. The negatives are a queue of earlier keys (v1, v2) or the other keys of the
batch (v3, which also has a predictor).

    Algorithm 1        joint_from_uniform, sample_joint    the two areas, or the two sigmas of the blurs
    Eq. 4-10           (in the tests)                      RandomCrop's distribution; here `--joint none`
    App. D             draw_views, --local-crops           JointCrop with multi-crop, and which pairs are drawn jointly
    App. F             draw_views, --joint either          JointCrop or JointBlur, one of the two per image
    App. G             center_suppressed, --css-alpha      center-suppressed sampling of a crop's position
    MoCo, Eq. 1, 2     info_nce; MoCo.update               the loss; the momentum encoder
    MoCo v3, Alg. 1    contrast, MoCoV3.forward            the symmetric loss

    python moco_jointcrop.py                                                  # a laptop, no data
    python moco_jointcrop.py --dataset cifar10 --joint none                   # the baseline, MoCo v2, on one GPU
    torchrun --nproc_per_node=8 moco_jointcrop.py --dataset imagenet --data-dir DIR --moco v1

The baseline is MoCo. It is exactly `--joint none`. What JointCrop and JointBlur change in it:
    two areas, each drawn on its own          two areas whose ratio is drawn first        joint_from_uniform
    each view is blurred or not on its own    both or neither, sigmas by the same rule    draw_views

In another project, with torchvision's transforms, three lines make the views of an image, and three more are JointBlur:

    areas = torch.cat(sample_joint(1, 0.2, 1.0, beta=0.0)).tolist()
    boxes = [RandomResizedCrop.get_params(image, scale=[area, area], ratio=[3 / 4, 4 / 3]) for area in areas]
    views = [resized_crop(image, *box, size=[224, 224]) for box in boxes]
    sigmas = torch.cat(sample_joint(1, 0.1, 2.0, beta=0.0)).tolist()
    if torch.rand(1) < 0.5:  # both views, or neither
        views = [gaussian_blur(view, 21, sigma) for view, sigma in zip(views, sigmas)]

Inference: only the paper's appendix could be read here. The main text defines JointBlur and the settings of small data
sets. So it is ours that JointBlur draws the two sigmas like areas, and that it blurs both views or neither.
CIFAR, STL-10, MoCo v1's views and App. G's alpha (0.6 on ImageNet, 0.1 on small sets) are ContrastiveCrop's. The second
parameter of Algorithm 1's N_T(0, s_b / beta) is taken for the standard deviation, not for the variance.
MoCo v3 blurs the key view of one pair in ten, so that JointBlur hardly acts there.

Not here: SimSiam, BYOL, SimCLR and DINO (Tables 9 and 10), for which the lines above are all that is needed; and
ContrastiveCrop's semantic-aware localization (Table 11, second row).

Where this file, the paper and the released code differ:
    D1 s_b, line 1. Paper and here: ln(s_max / s_min). Released (`--variant released`): ln(s_max / s_min - 0.1).
    D2 None of ten aspect ratios fits. Paper and here: a center crop. Released (`--variant released`): the whole image.
    D3 What is joint. Paper and here: crops and blurs, any beta, App. G. Released (`--variant released`): crops, beta 0.
    D4 The areas of crops. Here: from 0.2, as in the released README's command. Released script's default: from 0.08.
    D5 Small data sets. ContrastiveCrop: a queue of 65,536, CIFAR's stem. Here: 4,096 (STL-10: 8,192, ImageNet's stem).
    D6 The version of MoCo. Paper (appendix): v1. Released: v3. Here: v2, and `--moco` chooses, whatever the variant.
    D7 MoCo v3 on a ViT. Released MoCo v3: AdamW, a projector of three layers, a last batch norm. Here: as for ResNets.
    D8 MoCo v1's learning rate at 60 % of the epochs. ContrastiveCrop's file: times 0. Here: a tenth, as at 80 %.
    D9 Multi-crop (App. D). Paper: Table 10 is on DINO. Here (ours): local crops are queries only, blurred as the query
       view is. Each is compared with the key view's key (v1, v2), or with the keys of both views (v3). The loss is the
       mean over all terms (v3: twice the mean, as its loss is a sum of two). JointBlur is of the large views only. App.
       D: `--image-size 160 --crop-scale 0.4 1 --local-crops 4 --local-size 96 --joint-pair local` (or global).
What differs by rounding, by an index or by precision is in tests/golden/README.md.
"""

import argparse
import copy
import functools
import math
import time

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
# {group: {name: (value, what it is, its limits or words)}}: MoCo v2's for ImageNet, and
# JointCrop's. Each is a flag of its value's type, --beta 1.5, and args.NAME.
HYPERPARAMETERS = dict(
    recipe=dict(variant=("paper", "follow the paper, or the authors' code", ("paper", "released"))),
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
        bn_groups=(8, "slices of the batch with batch-norm statistics of their own, as on GPUs", (1, math.inf)),
        momentum=((0.999, 0.999), "momentum m of the momentum encoder, first and last", (0, 1)),
    ),
    schedule=dict(
        epochs=(200, "epochs of the whole training", (1, math.inf)),
        batch_size=(256, "images per step, over all processes", (2, math.inf)),
        lr=(0.03, "peak learning rate at --lr-batch; scaled linearly to --batch-size", (1e-9, math.inf)),
        lr_batch=(256, "batch size for which the learning rates are given", (1, math.inf)),
        min_lr=(0.0, "last learning rate, scaled as --lr is"),
        milestones=([], "shares of the run from which on the learning rate is a tenth; empty: cosine", (0.0, 1.0)),
        warmup=(0.0, "epochs of linear warm-up, at most a quarter of the run"),
        weight_decay=(1e-4, "weight decay of SGD, or of v3's LARS"),
        sgd_momentum=(0.9, "momentum of SGD, or of v3's LARS", (0, 0.999999)),
        trust_coeff=(0.001, "trust coefficient of v3's LARS"),  # MoCo v3's
    ),
    augmentation=dict(
        joint=("crop", "what is drawn jointly", ("none", "crop", "blur", "either", "both")),
        joint_pair=("global", "which pairs of crops are drawn jointly (App. D)", ("global", "local", "both")),
        beta=(0.0, "beta of J-Crop(beta), J-Blur(beta), of any sign", (-1000, 1000)),  # the released code's (D3)
        joint_prob=(0.5, "of --joint either: probability of JointCrop (App. F)", (0, 1)),
        css_alpha=(1.0, "alpha of center-suppressed sampling (App. G); 1: none", (1e-9, math.inf)),
        crop_scale=((0.2, 1.0), "smallest and largest share of the image that a crop has", (1e-9, 1)),  # D4
        local_size=(96, "side of a local crop, in pixels", (1, math.inf)),  # D9
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

    beta sets the distribution of ln(b / a) on [-s_b, s_b], where s_b = ln(high / low - offset). Given the ratio, a is
    uniform on the values for which a and b are in range.

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
        # Lines 3 and 7: a normal of standard deviation s_b / |beta|, truncated at |beta| standard deviations. u is
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


def center_suppressed(draws, alpha):
    """Positions of crops by center-suppressed sampling (App. G): (n, 2) from Beta(alpha, alpha), in [0, 1).

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


# ---------------------------------------- InfoNCE with a queue (shared block)


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
SIGMA = common.COLOR.index("sigma")


def augmentation(args):
    """Return {name: View}: query and key, which differ in blur and solarization at most, and local crops."""
    whole = args.variant == "released"  # D2
    crop = dict(size=args.image_size, area=args.crop_scale, ratio=args.crop_ratio, whole=whole)
    color = dict(jitter=args.jitter, jitter_p=args.jitter_p, gray_p=args.gray_p, solarize_p=args.solarize_p[0])
    blur = dict(blur_p=args.blur_p[0], blur_sigma=args.blur_sigma)
    query = common.View(**crop, **color, **blur, flip_p=args.flip_p)
    key = query._replace(blur_p=args.blur_p[1], solarize_p=args.solarize_p[1])
    local = query._replace(size=args.local_size, area=args.local_scale)
    return dict(query=query, key=key) | {f"local {i + 1}": local for i in range(args.local_crops)}


def draw_views(args, index, sizes, draws):
    """Draw the views of n images: MoCo's, then what --joint puts in their place.

    index: (n,) rows of the images. sizes: (n, 2) their heights and widths. draws: uniform in [0, 1), (n, VIEW_DRAWS for
    each view + SHARED_DRAWS + local crops). Returns (cuts, colors) as `common.ViewDataset` wants them.
    """
    views = [*augmentation(args).values()]
    *view_draws, shared = np.split(draws, common.VIEW_DRAWS * np.arange(1, len(views) + 1), axis=1)
    crop_or_blur, area_u, area_v, sigma_u, sigma_v, blurred, *local_draws = shared.T

    # Which images have JointCrop, and which JointBlur
    if args.joint == "either":  # App. F: one of the two
        joint_crop = crop_or_blur < args.joint_prob
        joint_blur = ~joint_crop
    else:
        joint_crop = np.full(len(index), args.joint in ("crop", "both"))
        joint_blur = np.full(len(index), args.joint in ("blur", "both"))

    # Algorithm 1: a pair of areas for two views of an image, and a pair of sigmas for its large views
    offset, areas = 0.1 if args.variant == "released" else 0.0, {}  # D1
    if args.joint_pair in ("global", "both"):
        areas[0], areas[1] = joint_from_uniform(area_u, area_v, *args.crop_scale, args.beta, offset)
    if args.joint_pair in ("local", "both"):  # App. D: local crops 1 and 2, 3 and 4, ...
        for i in range(2, len(views) - 1, 2):
            u, v = local_draws[i - 2 : i]
            areas[i], areas[i + 1] = joint_from_uniform(u, v, *args.local_scale, args.beta, offset)
    sigmas = joint_from_uniform(sigma_u, sigma_v, *args.blur_sigma, args.beta)

    cuts, colors = [], []
    for i, (view, draw) in enumerate(zip(views, view_draws, strict=True)):
        position = None
        if args.css_alpha != 1:
            position = center_suppressed(common.name_draws(draw)["position"][:, 1], args.css_alpha)
        boxes = common.draw_boxes(view, sizes, draw, position=position)
        color = common.draw_colors(view, draw)
        if i in areas:  # JointCrop
            joint_boxes = common.draw_boxes(view, sizes, draw, areas[i], position)
            boxes = np.where(joint_crop[:, None], joint_boxes, boxes)
        if i < 2:  # JointBlur: both views are blurred, or neither
            joint_sigma = np.where(blurred < view.blur_p, sigmas[i], 0)
            color[:, SIGMA] = np.where(joint_blur, joint_sigma, color[:, SIGMA])
        cuts.append((index, boxes, view.size))
        colors.append(color)
    return cuts, colors


# ==================================================================== 4. model

# ------------------------------------------------------- queue (shared block)


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


class MoCo(nn.Module):
    """MoCo v2's query encoder, momentum encoder (for the keys) and queue. With one layer in the projector it is v1's.

    Copy it with info_nce, Queue, gather, shard and encode_shuffled_keys.
    backbone: (n, 3, H, W) -> (n, width). layers: 1 or 2. queue: its length; 0: none. amp: encode in bf16. generator:
    see `Queue`.
    """

    def __init__(self, backbone, width, layers=2, dim=128, queue=65536, temperature=0.2, amp=False, generator=None):
        super().__init__()
        self.temperature, self.amp = temperature, amp
        self.backbone = backbone
        hidden = [nn.Linear(width, width), nn.ReLU(inplace=True)] if layers == 2 else []
        self.projector = nn.Sequential(*hidden, nn.Linear(width, dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(queue, dim, generator) if queue else None

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        """Return the momentum encoder's keys of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, generator=None):
        """Return (loss, keys to enqueue (N, dim), queries (n, dim), {name: metric}): MoCo, Algorithm 1.

        views: this process's query view, key view and local crops, each (n, 3, H, W), normalised. generator: a torch
        CPU generator that shuffles the keys, the same on all processes. Only the loss has a gradient. It reaches the
        query encoder only.
        """
        q = self.query(views[0])
        keys = encode_shuffled_keys(self.key, views[1:2], generator)[0]  # (N, C), of all processes
        k = shard(keys)  # (n, C)
        loss = info_nce(q, k, self.queue.keys, self.temperature)  # MoCo, Eq. 1
        for local in views[2:]:  # App. D
            loss = loss + info_nce(self.query(local), k, self.queue.keys, self.temperature)
        loss = loss / (len(views) - 1)  # the mean over the queries
        return loss, keys, q.detach(), dict(loss=loss.detach())

    @torch.no_grad()
    def update(self, m):
        """Move the momentum encoder's parameters: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2), m in [0, 1]."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


class MoCoV3(MoCo):
    """MoCo v3's query encoder with a predictor, and its momentum encoder. Its heads replace MoCo's. It has no queue.

    Copy it with MoCo, contrast and two_layers. hidden: the width of the heads' hidden layers. The rest: as in `MoCo`.
    """

    def __init__(self, backbone, width, hidden=4096, dim=256, temperature=1.0, amp=False):
        super().__init__(backbone, width, dim=dim, queue=0, temperature=temperature, amp=amp)
        self.projector = two_layers(width, hidden, dim).append(nn.BatchNorm1d(dim, affine=False))
        self.predictor = two_layers(dim, hidden, dim)  # D7
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), not normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return self.predictor(self.projector(self.backbone(x))).to(x.dtype)

    def forward(self, views, generator=None):
        """Return what `MoCo.forward` does, but no keys: MoCo v3, Algorithm 1, symmetric in the two views."""
        q1, q2, *q_local = [self.query(view) for view in views]
        k1, k2 = [gather(self.key(view)) for view in views[:2]]  # (N, C), of all processes
        first = int(shard(torch.arange(len(k1)))[0])  # the row of this process's first key
        loss = contrast(q1, k2, self.temperature, first) + contrast(q2, k1, self.temperature, first)
        for q in q_local:  # App. D
            loss = loss + sum(contrast(q, k, self.temperature, first) for k in (k1, k2))
        loss = loss / (1 + len(q_local))
        return loss, None, q1.detach(), dict(loss=loss.detach())


def two_layers(inputs, hidden, outputs):
    """A head of MoCo v3: linear, batch norm, ReLU, linear."""
    first = nn.Linear(inputs, hidden, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, outputs, bias=False))


# ================================================================= 5. training

STREAM_EPOCH, STREAM_QUEUE, STREAM_SHUFFLE = 0, 4, 20  # random streams, see common.generator

# fmt: off
IMAGENET = common.defaults(HYPERPARAMETERS)
CIFAR = dict(  # ContrastiveCrop's small configurations; they do not blur, so JointBlur needs --blur-p 0.5 0.5
    IMAGENET, arch="resnet18", image_size=32, patch_size=4, epochs=500, batch_size=512, lr=0.5, lr_batch=512,
    min_lr=0.05, queue=4096, local_size=16, blur_p=(0.0, 0.0), norm="cifar10",
)
RECIPES = dict(
    patterns=dict(  # ours, for two CPU cores
        IMAGENET, arch="resnet_micro", image_size=32, patch_size=4, epochs=75, batch_size=64, lr=0.02, lr_batch=128,
        queue=128, blur_p=(0.1, 0.1), crop_scale=(0.3, 1.0), local_size=16, bn_groups=2, momentum=(0.95, 0.95),
        warmup=1.0, norm="patterns",
    ),
    cifar10=CIFAR,
    cifar100=dict(CIFAR, norm="cifar100"),
    stl10=dict(CIFAR, image_size=96, patch_size=8, queue=8192, local_size=48, norm="imagenet"),
    imagenet100=dict(IMAGENET, arch="resnet18", queue=16384),  # ours
    imagenet=dict(IMAGENET, knn_every=50),  # its kNN takes minutes
    folder=dict(IMAGENET, queue="auto", bn_groups=2),  # ours: a folder of one's own may be small
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
    """Return the hyper-parameters {name: value}. chosen: what is given, a namespace, with None for the rest."""
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
    without = NOT_V3 if chosen.moco == "v3" else ONLY_V3
    if chosen.image_size:  # local crops follow it: at most half of a view's side, in whole patches
        patch_size = chosen.patch_size or values["patch_size"]
        values["local_size"] = min(values["local_size"], chosen.image_size // 2) // patch_size * patch_size
    return {name: value for name, value in values.items() if name not in without}


def parse_args(argv=None):
    """Return the command line (argv, or sys.argv's) as a namespace of all values. Exits with an error on a mistake."""
    args = common.parse("moco_jointcrop", __doc__, argv, HYPERPARAMETERS | common.RUN, recipe)
    if args.joint_pair != "global" and args.local_crops < 2:
        common.fail(f"--joint-pair {args.joint_pair} has nothing to act on: give --local-crops 2 or more")
    if args.joint in ("blur", "either", "both") and max(args.blur_p) == 0:
        common.fail(f"--joint {args.joint} has nothing to act on: this recipe does not blur; give --blur-p 0.5 0.5")
    is_released = args.joint in ("none", "crop") and args.beta == 0 and args.css_alpha == 1 and args.local_crops == 0
    if args.variant == "released" and not is_released:
        what = "JointCrop with beta 0 on two views (D3)"
        common.fail(f"--variant released is {what}: leave out --beta, --css-alpha, --local-crops, other --joint")
    return args


def learning_rate(args, epoch):
    """Return the learning rate at a time, in epochs from 0: a linear warm-up from 0, then a cosine down to --min-lr.

    With --milestones, as in MoCo v1, it falls to a tenth at each of them instead (D8).
    """
    peak, last = (lr * args.batch_size / args.lr_batch for lr in (args.lr, args.min_lr))
    warmup = min(args.warmup, args.epochs / 4)
    if epoch < warmup:
        return peak * epoch / warmup
    if args.milestones:
        return peak * 0.1 ** sum(epoch / args.epochs >= share for share in args.milestones)
    done = (epoch - warmup) / (args.epochs - warmup)
    return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2


def momentum_at(args, epoch):
    """Return the momentum encoder's momentum at a time, in epochs from 0: a cosine from --momentum's first to its last.

    It is constant but for MoCo v3.
    """
    first, last = args.momentum
    return last + (first - last) * (1 + math.cos(math.pi * epoch / args.epochs)) / 2


def make_optimizer(args, model):
    """SGD as in MoCo v1 and v2, or v3's LARS, without decay and adaptation of biases and batch norms."""
    if args.moco == "v3":
        trained = param_groups_weight_decay(model, args.weight_decay)
        trained[-1]["always_adapt"] = True  # those that decay, also if --weight-decay is 0
        return Lars(trained, momentum=args.sgd_momentum, trust_coeff=args.trust_coeff)
    return torch.optim.SGD(model.parameters(), momentum=args.sgd_momentum, weight_decay=args.weight_decay)


def main(args, train=None, test=None, encoder=None):
    """Train as args say. The same call goes on after the last whole epoch that --out holds.

    args: the namespace of `parse_args`. train, test: common.ImageSet of images to use instead of --dataset.
    encoder: a module that maps (N, 3, H, W) to (N, width), to train instead of --arch; a copy of it is trained.
    """
    args = argparse.Namespace(**vars(args) | dict(arch=args.arch if encoder is None else "custom"))
    device, rank, world = common.join_processes(args.device)

    # Data
    train, test = common.open_images(args, train, test)
    declared = augmentation(args)
    draw = functools.partial(draw_views, args)  # Algorithm 1
    loader = common.make_loader(args, train, [*declared.values()], device, draw, SHARED_DRAWS + args.local_crops)
    layout, norm = common.memory_format(device, args.arch), common.NORMS[args.norm]
    if args.show_views:
        return common.save_views(args.show_views, common.color_views(next(iter(loader)), device), [*declared])

    # Model and optimizer
    torch.manual_seed(args.seed)
    info = common.encoder_info(args, method="moco_jointcrop", encoder="query")  # the encoder that is evaluated
    backbone = common.build_backbone(info, args.moco == "v3") if encoder is None else common.copy_module(encoder)
    sizes = {view.size for view in declared.values()}
    width = common.output_width(backbone, *sizes, check_gradient=True)
    amp = common.use_bf16(args.amp, device, args.arch, sizes)
    if args.moco == "v3":  # the negatives and the batch norms are of the global batch
        negatives, groups = args.batch_size - 1, 1
        model = MoCoV3(backbone, width, args.hidden, args.dim, args.temperature, amp)
        if world > 1 and device.type == "cuda":  # torch synchronises batch norms on GPUs only
            model, groups = timm.layers.convert_sync_batchnorm(model), 1 / world
    else:
        negatives = args.queue if args.queue != "auto" else min(65536, max(args.batch_size, len(train) // 10))
        first_keys = common.generator(args.seed, STREAM_QUEUE)
        layers = 1 if args.moco == "v1" else 2
        model = MoCo(backbone, width, layers, args.dim, negatives, args.temperature, amp=amp, generator=first_keys)
        groups = common.slices_per_process(args, "bn_groups")
        model = split_batch_norms(model, groups)
    model.to(device, memory_format=layout)
    optimizer = make_optimizer(args, model)  # v3 has LARS

    # The run
    config = common.open_run(args, train)
    state = dict(model=model, optimizer=optimizer)
    records = common.load_run(args, config, state)  # one for each epoch that is done
    if args.compile:
        model.backbone.compile()
        model.momentum_backbone.compile()
    ddp = DistributedDataParallel(model, find_unused_parameters=encoder is not None) if dist.is_initialized() else model
    ddp.broadcast_buffers = False  # at each step; when it is made, all get the first process's weights and buffers
    facts = dict(batch_norm_groups=groups * world, bf16=amp, negatives=negatives)
    scale = 4 * args.temperature if args.moco == "v3" else 1  # v3's loss is two terms of 2 T each
    facts |= dict(loss_at_uniform_logits=scale * math.log(negatives + 1))
    common.log_table(args, HYPERPARAMETERS | common.RUN, train=train, test=test, **facts)

    # The last epoch's kNN, if a kill came before it
    common.add_knn(args, config, info, state, records, model.backbone, train, test, device, amp)
    for epoch in range(len(records), args.epochs):
        loader.batch_sampler.epoch = epoch
        torch.manual_seed(common.generator(args.seed, epoch, STREAM_EPOCH, rank).initial_seed())  # for drop-path
        history, began = [], time.perf_counter()
        for step, batch in enumerate(loader, epoch * len(loader)):
            lr = learning_rate(args, step / len(loader))
            for group in optimizer.param_groups:
                group["lr"] = lr
            # Algorithm 1: a query view and a key view per image, cut by the loader and colored here
            views = common.color_views(batch, device, layout, norm)
            # The loss: MoCo's Eq. 1, or MoCo v3's Algorithm 1
            shuffle = common.generator(args.seed, step, STREAM_SHUFFLE)
            loss, keys, q, metrics = ddp(views, shuffle)
            # Update the query encoder. Then move the momentum encoder (MoCo, Eq. 2)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            momentum = momentum_at(args, step / len(loader))  # v3: it grows
            model.update(momentum)
            # The keys are negatives of the next steps; v3 has no queue
            if keys is not None:
                model.queue.enqueue(keys)
            history.append(metrics | dict(grad_norm=grad_norm))
            if (step + 1) % 10 == 0:
                common.show_progress(args, history, began, step + 1, args.epochs * len(loader))

        average_statistics(model)
        record = dict(epoch=epoch + 1, lr=lr, momentum=momentum)
        records.append(record | common.means(args, history, began) | common.embedding_health(q))
        common.save_run(args, config, info, state, records)  # before the kNN, which may fail
        common.add_knn(args, config, info, state, records, model.backbone, train, test, device, amp)
        common.log_epoch(args, records[-1])
    common.log_end(args, train)


# ================================================================ 6. ShuffleBN

# ------------------------------------------------------ gather (shared block)


def gather(x):
    """Concatenate the tensors (n, ...) of all processes to (N, ...), in rank order. No gradient."""
    if not dist.is_initialized():
        return x
    out = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather([*out.chunk(dist.get_world_size())], x.contiguous())
    return out


# --------------------------------------------------- ShuffleBN (shared block)


def shard(x, dim=0):
    """Return this process's part of a tensor that all processes have: what `gather` would put back together."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()] if dist.is_initialized() else x


@torch.no_grad()
def encode_shuffled_keys(encode, views, generator=None):
    """Encode several views of the global batch as keys, with ShuffleBN: (views, N, C), on every process.

    encode: maps images to keys. views: list of this process's images (n, 3, H, W).
    The key and the query of an image must not share batch statistics, which would tell the encoder that they belong
    together (MoCo, section 3.3). So the rows of all views of the global batch are shuffled, each process encodes its
    part, and the keys are put back in order. Any number of processes makes the same batch-norm groups.
    Meanwhile each process holds the views of the global batch twice: 0.6 GB for a view of 512 images of 224 px.
    """
    images = torch.cat([gather(view) for view in views])  # row v * N + i is view v of image i
    shuffle = torch.randperm(len(images), generator=generator).to(images.device, non_blocking=True)
    keys = gather(encode(images[shard(shuffle)]))
    return keys[shuffle.argsort()].view(len(views), -1, keys.shape[1])


class GroupedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose statistics are taken over `groups` equal slices of the batch, for (N, C) or (N, C, H, W).

    Each group acts as the batch norm of one GPU would. The running statistics are the mean over the groups.
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
        if not self.training or self.groups == 1:
            return self.after(super().forward(x))
        mean = self.running_mean.repeat(self.groups, 1)
        var = self.running_var.repeat(self.groups, 1)
        slices = [
            F.batch_norm(part, m, v, self.weight, self.bias, True, self.momentum, self.eps)  # updates m and v in place
            for part, m, v in zip(x.chunk(self.groups), mean, var, strict=True)
        ]
        self.running_mean.copy_(mean.mean(0))
        self.running_var.copy_(var.mean(0))
        return self.after(torch.cat(slices))


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
    """Average the running statistics of batch norms over the processes. Nothing in training reads them.

    They are exponential averages, which are linear: once at the end of an epoch gives what each step would.
    """
    if dist.is_initialized():
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(buffer)
                buffer.div_(dist.get_world_size())


if __name__ == "__main__":
    common.start(main, parse_args)
