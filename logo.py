"""LoGo: Leverage Your Local and Global Representations (Zhang et al., CVPR 2022, arXiv 2203.17205).

Large crops of an image look alike. Small crops often do not. LoGo, which is added to MoCo or SimSiam, pulls two global
crops together (L_gg), and two local crops toward the global ones, which are held constant (L_lg). It pushes the two
local crops apart (L_ll), as they show different parts of the image. Their similarity is learned: an affinity network is
trained to score two local crops of one image above those of two images, and the encoder takes a small step to reduce
the scores of its own pairs. By default this file follows the released code, as the paper's Eq. 6 is unbounded (D1).

Inferred: only the paper's supplement and the code for MoCo were available, so all that concerns SimSiam is inferred, or
from erceguder/LoGo, an unofficial repository. Caution: the affinity can succeed in training without comparing the two
crops of a pair. In batches that mix pairs of one image and pairs of two, it ranked only 60% correctly (see the end).

    L_gg, L_lg    MoCo.forward, SimSiam.forward, combine
    L_ll          local_dissimilarity
    Eq. 6         affinity_loss                              what the affinity learns (supplement, Eq. 4, from Eq. 2-3)
    Eq. 9         main, --l2l-weighting lambda               L_gg + L_lg + lambda L_ll; with clip, L_ll has its own step
    Algorithm 1   main                                       each step: first Eq. 6, then Eq. 9

    python logo.py                                                            # a laptop, no data
    python logo.py --dataset cifar10 --local-crops 0                          # the baseline, MoCo, on one GPU
    torchrun --nproc_per_node=8 logo.py --dataset imagenet100 --data-dir DIR --base simsiam

The baseline is MoCo or SimSiam with two global crops, both of which are queries: `--local-crops 0`. `--one-way` leaves
one query, as in MoCo v2 (D11). LoGo changes three things:
    loss = the mean of the two terms of L_gg  ->  of these and the four terms of L_lg           (MoCo.forward, combine)
    one step of the encoder                   ->  a second, clipped step on L_ll; or a term     (main)
    no affinity                               ->  a step of the affinity before these, Eq. 6    (main)
(D1), (D2), ... at the end are differences between the paper, the released code and this file.
"""

import argparse
import copy
import math
import os
from itertools import permutations

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.transforms import v2

import common

# ========================================================= 1. hyper-parameters


def parse_args(argv=None):
    """Parse the command line. The defaults are the released code's for ImageNet-100, changed by `recipe`."""
    parser = argparse.ArgumentParser(os.path.basename(__file__), description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--variant", choices=("paper", "released"), default="released", help="follow the paper or the released code")
    add("--base", choices=("moco", "simsiam"), default="moco", help="what LoGo is added to")

    add = parser.add_argument_group("loss").add_argument
    add("--pairs", choices=("logo", "all"), default="logo", help="all: contrast every pair of crops (4-crop, D14)")
    add("--local-crops", type=int, choices=(0, 2), default=2, help="local crops per image; 0: MoCo or SimSiam alone")
    add("--one-way", action="store_true", help="one query per image, as in MoCo v2; with --local-crops 0")
    add("--l2l", action=argparse.BooleanOptionalAction, default=True, help="push local crops apart, by L_ll (L2L)")
    add("--l2l-weighting", choices=("clip", "lambda"), default="clip", help="L_ll has a "
        "clipped step of its own, or is a term of the loss (D1)")  # fmt: skip
    add("--clip-ratio", type=common.positive_float, default=0.015, help="clip of the gradient norm "
        "of L_ll, relative to that of the loss in the last step (D1)")  # fmt: skip
    add("--lam", type=common.positive_float, default=1e-4, help="lambda of Eq. 9")  # erceguder/LoGo's
    add("--affinity-form", choices=("logistic", "linear"), default="logistic", help="objective of the affinity (D1)")
    add("--affinity-lr", type=common.positive_float, help="constant learning rate; if None, 1e-4 "
        "(linear) or the encoder's peak")  # fmt: skip
    add("--temperature", type=common.positive_float, default=0.07, help="MoCo: softmax temperature tau")
    add("--queue", type=common.positive_int, default=4096, help="queue length; folder: a tenth of the images")

    add = parser.add_argument_group("model").add_argument
    add("--arch", default="resnet34", help="encoder: resnet_mini, resnet18, resnet50, vit_small, or any timm model")
    add("--image-size", type=common.positive_int, default=224, help="size of a global crop, in pixels")
    add("--local-size", type=common.positive_int, default=96, help="size of a local crop, in pixels (D13)")
    add("--patch-size", type=common.positive_int, default=16, help="patch size of a ViT, in pixels")
    add("--dim", type=common.positive_int, default=128, help="embedding dimension")
    add("--layers", type=common.positive_int, default=3, help="SimSiam: layers of the projector")  # inferred (D12)
    add("--hidden", type=common.positive_int, default=512, help="SimSiam: hidden size of predictor")  # erceguder/LoGo's
    add("--bn-groups", type=common.positive_int, default=8, help="batch-norm groups per global batch, for ShuffleBN")
    add("--momentum", type=common.fraction, default=0.999, help="EMA momentum m of the momentum encoder")

    add = parser.add_argument_group("schedule").add_argument
    add("--epochs", type=common.positive_int, default=200, help="number of epochs")
    add("--batch-size", type=common.positive_int, default=256, help="global batch size, over all processes")
    add("--lr", type=common.positive_float, default=0.03, help="peak learning rate per 256 images")
    add("--milestones", type=common.fraction, nargs="*", default=[0.6, 0.8], help="fractions of training at which the "
        "learning rate is divided by 10; none: a cosine")  # fmt: skip
    add("--warmup", type=common.nonnegative_float, default=0.0, help="linear warmup epochs, at most --epochs / 4")
    add("--weight-decay", type=common.nonnegative_float, default=1e-4, help="weight decay of SGD")

    add = parser.add_argument_group("augmentation").add_argument
    add("--crop-scale", action=common.AreaRange, default=[0.4, 1.0], help="area range of global crops, [r_g, 1] (D7)")
    add("--local-scale", action=common.AreaRange, default=[0.08, 0.4], help="area range of local crops, up to r_l (D7)")
    add("--blur-p", type=common.fraction, default=0.5, help="probability of blur")

    args = common.parse_args(parser, argv, recipe)
    args.warmup = min(args.warmup, args.epochs / 4)  # a short run would not reach its peak learning rate
    common.needs(parser, args, ["patch_size"], common.is_vit(args.arch), "a ViT (--arch)")
    common.needs(parser, args, ["bn_groups"], not common.is_vit(args.arch), "batch norm, which no ViT (--arch) has")
    common.needs(parser, args, ["local_size", "local_scale"], args.local_crops, "local crops (--local-crops)")
    if args.local_crops and args.local_size > args.image_size:
        parser.error(f"--local-size {args.local_size} is larger than --image-size {args.image_size}")
    moco_flags = ["queue", "temperature", "momentum", "bn_groups"]
    common.needs(parser, args, moco_flags, args.base == "moco", "--base moco")
    common.needs(parser, args, ["layers", "hidden"], args.base == "simsiam", "--base simsiam")
    common.needs(parser, args, ["pairs", "l2l", "variant"], args.local_crops, "--local-crops 2")
    common.needs(parser, args, ["variant"], args.pairs == "logo" or args.l2l, "--pairs logo, or --l2l")
    l2l_flags = ["l2l_weighting", "clip_ratio", "lam", "affinity_form", "affinity_lr"]
    common.needs(parser, args, l2l_flags, args.l2l, "L_ll (--l2l; not with --local-crops 0)")
    common.needs(parser, args, ["clip_ratio"], args.l2l_weighting == "clip", "--l2l-weighting clip")
    common.needs(parser, args, ["lam"], args.l2l_weighting == "lambda", "--l2l-weighting lambda")
    if args.local_crops and args.one_way:
        parser.error("--one-way is a form of the baseline: pass --local-crops 0, too")
    return args


CIFAR = dict(  # supplement, section 1; released: no blur; not in the paper: patch_size
    arch="resnet18", image_size=32, local_size=32, patch_size=4, local_scale=[0.08, 0.6], blur_p=0.0,
)  # fmt: skip
# The supplement gives the encoders, the crops and, for ImageNet-100, the number of epochs
RECIPES = dict(  # what differs from the values for MoCo on ImageNet-100
    patterns=dict(  # not in the paper: for a laptop
        arch="resnet_micro", image_size=32, local_size=16, patch_size=4, epochs=28, batch_size=64, lr=0.12, queue=128,
        blur_p=0.1, bn_groups=2, momentum=0.95, warmup=5.0, milestones=[], temperature=0.2,
    ),
    cifar10=CIFAR,
    cifar100=CIFAR,  # not in the supplement
    stl10=dict(arch="resnet18", image_size=96, local_size=96, patch_size=8),  # supplement, section 1; D9, D13
    imagenet100={},  # arch, local_size: supplement, section 1
    imagenet=dict(arch="resnet50", queue=65536),  # not in the supplement
    folder=dict(arch="resnet50", queue=None, bn_groups=2, momentum=0.99),  # not in the paper; queue: a tenth
)  # fmt: skip


def recipe(args):
    """Return the defaults, {name: value}, that suit args."""
    values = dict(RECIPES[args.dataset], l2l=args.local_crops > 0)
    if common.is_vit(args.arch):
        values["bn_groups"] = 1  # a ViT has no batch norm
    if args.base == "simsiam":
        values |= dict(l2l_weighting="lambda", milestones=[], dim=2048)  # inferred (D12)
        values |= dict(queue=None, temperature=None, bn_groups=None, momentum=None)  # it has none of them
        if args.dataset in ("cifar10", "cifar100"):
            values |= dict(layers=2, batch_size=512, lr=0.25)  # erceguder/LoGo's; lr: ContrastiveCrop's (D12)
        if args.dataset == "patterns":
            values |= dict(layers=2, dim=256, hidden=128, lr=1.0)  # not in the paper
    if args.dataset == "folder":
        values["local_size"] = min(96, args.image_size)  # not in the paper
    if args.pairs == "all":
        values |= dict(crop_scale=[0.3, 1.0], local_scale=[0.05, 0.3], l2l=False)  # supplement, section 2
    if args.variant == "paper":
        values |= dict(affinity_form="linear", l2l_weighting="lambda")  # D1
    return values


# ================================================================ 2. the paper


def affinity_loss(affinity, local1, local2, noise=None, form="logistic"):
    """Return the affinity's loss (Eq. 6), low if two local crops of one image score above local crops of two images.

    affinity: (N, C), (N, C) -> scores (N,). local1, local2: (N, C), L2-normalized. Row i of both is of the same image,
    a positive pair; row i of local1 and row i - 1 of local2 are a negative pair (D6). noise: (2, N, C), added to the
    positive pairs, or None.
    form: "logistic" (released) is the binary cross-entropy of the positive scores plus that of the negative ones, as
    logits, averaged over both orders of a pair. "linear" (paper) is E f(negative) - E f(positive), which is unbounded
    (supplement, Eq. 4). That f is the softplus of the score is inferred.
    Gradients reach the affinity only. Call it outside autocast. Raises ValueError if N, shapes or form do not fit.
    """
    noise = local1.new_zeros(2, *local1.shape) if noise is None else noise
    if local1.dim() != 2 or len(local1) < 2 or local2.shape != local1.shape or noise.shape != (2, *local1.shape):
        shapes = f"{tuple(local1.shape)}, {tuple(local2.shape)} and {tuple(noise.shape)}"
        raise ValueError(f"affinity_loss takes local1, local2 (N, C), N >= 2, and noise (2, N, C), not {shapes}")
    a, b = local1.detach(), local2.detach()
    if form == "linear":
        positive = affinity(a + noise[0], b + noise[1])
        negative = affinity(a, b.roll(1, 0))
        return F.softplus(negative).mean() - F.softplus(positive).mean()  # -Eq. 4
    if form == "logistic":  # softplus(-x) and softplus(x) are the cross-entropy of a logit x with the targets 1 and 0
        positive = F.softplus(-affinity(a + noise[0], b + noise[1])) + F.softplus(-affinity(b + noise[0], a + noise[1]))
        negative = F.softplus(affinity(a, b.roll(1, 0))) + F.softplus(affinity(b, a.roll(1, 0)))
        return (positive + negative).mean() / 2
    raise ValueError(f"form is 'logistic' or 'linear', not {form!r}")


def local_dissimilarity(affinity, local1, local2):
    """Return L_ll, the mean softplus of the scores of two local crops of one image: low if they are dissimilar.

    affinity: a module, (N, C), (N, C) -> scores (N,). local1, local2: (N, C), L2-normalized. Gradients reach local1 and
    local2 only; the affinity's parameters are constants, but in training mode its running statistics change. Call it
    outside autocast.
    """
    constants = {name: p.detach() for name, p in affinity.named_parameters()}
    return F.softplus(torch.func.functional_call(affinity, constants, (local1, local2))).mean()


def combine(global_terms, local_terms, reduction="mean"):
    """Combine the terms of L_gg and L_lg, two lists of scalars, into one loss (D1).

    reduction: "mean" (released): of all terms. "sum" (paper): the mean of the global plus the sum of the local terms.
    """
    if reduction == "mean":
        return (sum(global_terms) + sum(local_terms)) / (len(global_terms) + len(local_terms))
    if reduction == "sum":
        return sum(global_terms) / len(global_terms) + sum(local_terms)
    raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}")


class Affinity(nn.Module):
    """The affinity of local crops, the supplement's regressor: two (N, dim) -> scores (N,), high for two of one image.

    Its initial weights must be equal on all processes. To copy LoGo, copy it with compared_views, affinity_loss,
    local_dissimilarity, combine, descend, GatherWithGradient, gather, shard and main's blocks "LoGo" and "Algorithm 1".
    The encoder's two optimizers follow the same learning rate; the affinity's learning rate is constant.
    """

    def __init__(self, dim, hidden=256):
        super().__init__()
        layers = [nn.Linear(2 * dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
        layers += [nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, a, b):
        return self.layers(torch.cat([a, b], dim=1)).squeeze(1)


def descend(optimizer, loss, max_norm=math.inf):
    """Take an optimizer step for a loss, with the gradient averaged over the processes and clipped to a norm.

    This is backward, clip_grad_norm_ and step for a loss that is computed outside DistributedDataParallel. Only the
    .grad of the optimizer's parameters is overwritten. max_norm: a number or a 0-d tensor.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    optimizer.zero_grad()
    loss.backward(inputs=parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]  # an encoder may have unused parameters
    if dist.is_initialized():
        flat = torch.cat([gradient.flatten() for gradient in gradients])  # one message
        dist.all_reduce(flat)
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient) / dist.get_world_size())
    # As clip_grad_norm_, which would wait for the GPU to read max_norm
    scale = (max_norm / (nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(scale)
    optimizer.step()


class GatherWithGradient(torch.autograd.Function):
    """`gather` with gradients: apply(x), (n, C) -> (N, C). The gradients of all processes' losses are summed."""

    @staticmethod
    def forward(ctx, x):
        return gather(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return shard(gather(gradient[None]).sum(0))  # (processes, N, C) -> (N, C) -> (n, C)


# ---------------------------------------- InfoNCE with a queue (shared block)


def info_nce(q, k, queue, temperature):
    """Return MoCo's loss, InfoNCE with a queue (MoCo, Eq. 1).

    It is the mean of -log(exp(q.k / tau) / (exp(q.k / tau) + sum_j exp(q.queue_j / tau))), where a query's positive is
    the key in the same row. At equal logits it is log(K + 1).

    q, k: (N, C), L2-normalized. queue: (K, C), the negatives. temperature: tau > 0.
    Gradients reach q, and also k and queue unless these are detached. float16 and bfloat16 are converted to float32;
    call it outside autocast, which would undo that. Raises ValueError if the shapes do not fit.
    """
    if q.dim() != 2 or k.shape != q.shape or queue.shape[1:] != q.shape[1:]:
        shapes = [tuple(x.shape) for x in (q, k, queue)]
        raise ValueError(f"info_nce takes q and k (N, C) and queue (K, C), not {shapes}")
    q, k, queue = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, queue))
    positive = (q * k).sum(1, keepdim=True)
    logits = torch.cat([positive, q @ queue.T], dim=1) / temperature
    return F.cross_entropy(logits, logits.new_zeros(len(q), dtype=torch.int64))  # the positive is in column 0


# ============================================================= 3. augmentation


def augment(x, args):
    """Augment crops as MoCo v2 does (D10): uint8 -> normalized float (n, 3, S, S)."""
    x = common.horizontal_flip(x / 255, p=0.5)
    x = common.color_jitter(x, 0.4, 0.4, 0.4, 0.1, p=0.8)
    x = common.grayscale(x, p=0.2)
    x = common.gaussian_blur(x, sigma=(0.1, 2.0), p=args.blur_p)
    return common.normalize(x, *common.NORMS[args.norm])


# ==================================================================== 4. model


def compared_views(pairs="logo", local_crops=2, one_way=False):
    """Return the pairs (i, j) of views where i is pulled toward j: (list of L_gg's pairs, list of L_lg's pairs).

    Views 0 and 1 are global, 2 and 3 local. With pairs "all", L_gg has all 12 ordered pairs of views, and L_lg none.
    """
    if pairs == "all":  # the supplement's 4-crop baseline
        return list(permutations(range(4), 2)), []
    if pairs != "logo":
        raise ValueError(f"pairs is 'logo' or 'all', not {pairs!r}")
    global_pairs = [(0, 1)] if one_way else [(0, 1), (1, 0)]
    local_pairs = [(2, 0), (2, 1), (3, 0), (3, 1)] if local_crops else []
    return global_pairs, local_pairs


class MoCo(nn.Module):
    """MoCo v2's query encoder, momentum encoder and queue, with global and local views.

    Copy it with compared_views, info_nce, combine, Queue, gather, shard and encode_shuffled_keys. With one process,
    ShuffleBN needs convert_split_batchnorm. With several, wrap it in DistributedDataParallel, which first broadcasts
    rank 0's weights and, unless broadcast_buffers=False, its queue. backbone: (n, 3, H, W) -> (n, width). pairs: from
    `compared_views`. dim: embedding dimension. queue: number of negatives. temperature: tau. reduction: see `combine`.
    """

    def __init__(self, backbone, width, pairs, dim=128, queue=4096, temperature=0.07, reduction="mean"):
        super().__init__()
        self.backbone = backbone
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(queue, dim)
        self.global_pairs, self.local_pairs = pairs
        self.temperature, self.reduction = temperature, reduction

    def project(self, x):
        """Return the projections of images, the queries before L2-normalization: (n, 3, H, W) -> (n, dim)."""
        return self.projector(self.backbone(x)).to(x.dtype)

    def key(self, x):
        """Return the momentum encoder's keys of images: (n, 3, H, W) -> (n, dim), L2-normalized, in the dtype of x."""
        return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, local_z=None):
        """Return (loss, keys to enqueue (N or 2N, dim), queries (n, dim), {name: metric}). For the loss see `combine`.

        views: this process's two global views, then its local views, each (n, 3, H, W), normalized. local_z: list of
        the local views' projections, if already computed. The keys are the global views', of all processes; the
        queries are view 0's. Only the loss has a gradient, which reaches the query encoder only.
        """
        compared = self.global_pairs + self.local_pairs  # view i is a query, and view j is its key
        q = {}
        for i in sorted({i for i, _ in compared}):
            z = local_z[i - 2] if local_z and i >= 2 else self.project(views[i])  # views 2 and 3 are local
            q[i] = F.normalize(z, dim=1)
        # One view at a time, as released, so that a batch-norm group has as many keys as queries
        keys = {j: encode_shuffled_keys(self.key, [views[j]])[0] for j in sorted({j for _, j in compared})}  # (N, dim)
        with torch.autocast(q[0].device.type, enabled=False):  # the loss is computed in float32
            l_gg = [info_nce(q[i], shard(keys[j]), self.queue.keys, self.temperature) for i, j in self.global_pairs]
            l_lg = [info_nce(q[i], shard(keys[j]), self.queue.keys, self.temperature) for i, j in self.local_pairs]
            loss = combine(l_gg, l_lg, self.reduction)
        global_keys = torch.cat([keys[j] for j in keys if j < 2])
        return loss, global_keys, q[0].detach(), dict(loss=loss.detach())

    @torch.no_grad()
    def update(self, m):
        """Update the momentum encoder (float32 or float64): theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2)."""
        for slow, fast in ((self.momentum_backbone, self.backbone), (self.momentum_projector, self.projector)):
            for theta_k, theta_q in zip(slow.parameters(), fast.parameters(), strict=True):
                theta_k.lerp_(theta_q, 1 - m)  # in bfloat16 the small change would be rounded away


class SimSiam(nn.Module):
    """SimSiam's encoder and predictor (SimSiam, section 3), with global and local views. It has no keys and no queue.

    Copy it with compared_views and combine. layers: of the projector. hidden: of the predictor. For others see `MoCo`.
    """

    def __init__(self, backbone, width, pairs, dim=2048, layers=3, hidden=512, reduction="mean"):
        super().__init__()

        def layer(inputs, outputs):
            return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]

        projector = layer(width, dim)
        for _ in range(layers - 1):
            projector += layer(dim, dim)
        projector[-2:] = [nn.BatchNorm1d(dim, affine=False)]  # the last layer: a batch norm without weights, no ReLU
        self.backbone, self.projector = backbone, nn.Sequential(*projector)
        self.predictor = nn.Sequential(*layer(dim, hidden), nn.Linear(hidden, dim))
        self.global_pairs, self.local_pairs = pairs
        self.reduction = reduction

    def project(self, x):
        """Return the projections of images: (n, 3, H, W) -> (n, dim), in the dtype of x."""
        return self.projector(self.backbone(x)).to(x.dtype)

    def forward(self, views, local_z=None):
        """Return (loss, None, view 0's projections (n, dim), {name: metric}), see `MoCo.forward`; there are no keys.

        The prediction of view i is pulled toward the projection of view j, which is a constant.
        """
        z = [self.project(view) for view in views[:2]] + (local_z or [self.project(view) for view in views[2:]])
        p = [self.predictor(x).to(x.dtype) for x in z]
        with torch.autocast(z[0].device.type, enabled=False):  # the loss is computed in the dtype of views
            l_gg = [-F.cosine_similarity(p[i], z[j].detach(), dim=1).mean() for i, j in self.global_pairs]
            l_lg = [-F.cosine_similarity(p[i], z[j].detach(), dim=1).mean() for i, j in self.local_pairs]
            loss = combine(l_gg, l_lg, self.reduction)
        return loss, None, z[0].detach(), dict(loss=loss.detach())


# ------------------------------------------------------- queue (shared block)


class Queue(nn.Module):
    """The last `length` keys, (length, dim), the oldest first. It starts with random L2-normalized vectors."""

    def __init__(self, length, dim):
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(length, dim), dim=1))

    @torch.no_grad()
    def enqueue(self, keys):
        """Append the (N, dim) keys of all processes and drop the oldest. Call it after backward, which needs those."""
        self.keys.copy_(torch.cat([self.keys, keys])[-len(self.keys) :])


# ================================================================= 5. training


def learning_rate(args, now):
    """Return the learning rate `now` epochs after the start: a linear warmup, then a cosine to 0, or --milestones."""
    peak = args.lr * args.batch_size / 256
    if now < args.warmup:
        return peak * now / args.warmup
    if args.milestones:
        return peak * 0.1 ** sum(now / args.epochs >= fraction for fraction in args.milestones)
    done = (now - args.warmup) / (args.epochs - args.warmup)
    return peak * (1 + math.cos(math.pi * done)) / 2


def main(args, train=None, test=None):
    """Train, resuming from args.out if it holds a run. train, test: datasets to use instead of --dataset."""
    device, rank, world = common.init_distributed(args.device)
    torch.manual_seed(args.seed)
    simsiam = args.base == "simsiam"

    # Data: two global and two local views of each image, cropped here and augmented in the loop
    train, test = common.open_data(args.dataset, args.data_dir, args.image_size, train, test)
    groups = common.split_batch(args.batch_size, len(train), world, args.bn_groups or 1, "--bn-groups")  # per process
    crop = v2.RandomResizedCrop(args.image_size, args.crop_scale)
    local_crop = v2.RandomResizedCrop(args.local_size, args.local_scale)
    images = common.Views(train, [crop] * 2 + [local_crop] * args.local_crops)
    sampler = DistributedSampler(images, world, rank, seed=args.seed, drop_last=True)
    options = common.loader_options(args.workers, device)
    loader = DataLoader(images, args.batch_size // world, sampler=sampler, drop_last=True, **options)
    if args.show_views:
        views = [augment(x, args) for x in next(iter(loader))[0]]
        names = ["global 1", "global 2", "local 1", "local 2"][: len(views)]
        return common.save_views(args.show_views, views, names, args.norm)

    # Model and optimizers. backbone.pt has `info` and the weights of the encoder that info["encoder"] names
    info = common.backbone_info(args.arch, args.image_size, args.patch_size, args.norm) | dict(encoder="query")
    backbone = common.build_backbone(info, zero_init=simsiam)
    sizes = [args.image_size, args.local_size] if args.local_crops else [args.image_size]
    width = common.feature_width(backbone, *sizes)
    if args.init:
        common.load_weights(backbone, args.init, args.init_prefix)
    pairs = compared_views(args.pairs, args.local_crops, args.one_way)
    reduction = "sum" if args.variant == "paper" else "mean"  # of the terms of L_gg and L_lg (D1)
    if simsiam:
        model = SimSiam(backbone, width, pairs, args.dim, args.layers, args.hidden, reduction)
        synchronize = world > 1 and device.type == "cuda"  # torch synchronizes batch norm on GPUs only
        model = timm.layers.convert_sync_batchnorm(model) if synchronize else model
        derived = dict(batch_norm_groups=1 if synchronize else world)
    else:
        negatives = common.queue_length(args.queue, args.batch_size, len(train))
        model = MoCo(backbone, width, pairs, args.dim, negatives, args.temperature, reduction)
        model = convert_split_batchnorm(model, groups) if groups > 1 else model  # as on that many GPUs, for ShuffleBN
        global_terms, local_terms = ([math.log(negatives + 1)] * len(part) for part in pairs)
        uniform = combine(global_terms, local_terms, reduction)
        derived = dict(negatives=negatives, loss_at_uniform_logits=uniform, batch_norm_groups=groups * world)
    model.to(device, memory_format=torch.channels_last)
    sgd = dict(momentum=0.9, weight_decay=args.weight_decay, fused=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, **sgd)

    # LoGo
    peak_lr = args.lr * args.batch_size / 256
    affinity = Affinity(args.dim).to(device)  # equal on all processes, which have the same seed until the first epoch
    linear = args.affinity_form == "linear"
    affinity_lr = args.affinity_lr or (1e-4 if linear else peak_lr)  # 1e-4: erceguder/LoGo's
    affinity_optimizer = torch.optim.SGD(affinity.parameters(), lr=affinity_lr, **sgd)
    encoder = [*model.backbone.parameters(), *model.projector.parameters()]
    l2l_optimizer = torch.optim.SGD(encoder, lr=peak_lr, momentum=0.9, fused=True)  # of L_ll, without weight decay (D3)
    previous_norm = torch.zeros((), device=device)  # of the loss's gradient, in the last step

    # The run
    amp = common.use_bf16(args.amp, device)
    state = dict(model=model, optimizer=optimizer, affinity=affinity, affinity_optimizer=affinity_optimizer)
    state |= dict(l2l_optimizer=l2l_optimizer, previous_norm=previous_norm)
    derived |= dict(peak_lr=peak_lr, lr_of_affinity=affinity_lr if args.l2l else None, bf16=amp)
    config, records = common.open_run(args, train, state, derived)  # restores a saved run; one record per epoch
    if args.compile:
        model.backbone.compile(dynamic=False)
        if not simsiam:
            model.momentum_backbone.compile(dynamic=False)
    ddp = DistributedDataParallel(model) if world > 1 else model
    ddp.broadcast_buffers = False  # queues stay equal without it; torch 2.13 renames the argument, not the attribute

    for epoch in range(len(records), args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(hash((args.seed, epoch, rank)))  # a resumed run gets the same seed: hashes of ints are fixed
        meter = common.Meter(epoch, args.epochs, len(loader), args.batch_size)
        for step, (crops, _) in enumerate(loader):
            now = epoch + step / len(loader)  # in epochs
            lr = learning_rate(args, now)
            for group in optimizer.param_groups + l2l_optimizer.param_groups:
                group["lr"] = lr
            views = [augment(x.to(device, non_blocking=True), args) for x in crops]

            # Algorithm 1. Each process draws its own noise; `descend` averages the gradients
            local_z = None  # the local views' projections
            if args.l2l:
                with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                    local_z = [model.project(view) for view in views[2:]]
                local1, local2 = (GatherWithGradient.apply(F.normalize(z, dim=1)) for z in local_z)  # (N, dim)
                scale = 0.3 / args.dim**0.5  # released
                noise = None if linear else scale * torch.randn(2, *local1.shape, device=device)
                loss_of_affinity = affinity_loss(affinity, local1, local2, noise, args.affinity_form)
                descend(affinity_optimizer, loss_of_affinity)  # update the affinity (Eq. 6)
                l_ll = local_dissimilarity(affinity, local1, local2)  # by the new affinity
                if args.l2l_weighting == "clip":  # as released (D1)
                    descend(l2l_optimizer, l_ll, args.clip_ratio * previous_norm)  # update the encoder by L_ll
                    local_z = None  # the encoder has changed: project the local views again
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss, keys, q, metrics = ddp(views, local_z)  # L_gg and L_lg
            if args.l2l:
                if args.l2l_weighting == "lambda":  # as in the paper (D1)
                    loss = loss + args.lam * l_ll  # Eq. 9; where `combine` takes the mean, lambda counts fivefold (D1)
                metrics |= dict(loss=loss, affinity_loss=loss_of_affinity, dissimilarity=l_ll)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            previous_norm.copy_(grad_norm)  # for the clip in the next step (D4)
            optimizer.step()  # update the encoder
            if not simsiam:
                model.update(args.momentum)
                model.queue.enqueue(keys)
            meter.update(metrics | dict(grad_norm=grad_norm))

        if world > 1:
            timm.utils.distribute_bn(model, world, reduce=True)  # average the running statistics
        records.append(dict(epoch=epoch + 1, lr=lr) | meter.averages() | common.embedding_health(q))
        # lr and q are the last step's. Save before kNN, too, so that a test image that cannot be read costs no epoch
        common.save_run(args.out, config, info, state, records, args.keep_every)
        if test is not None and args.knn_every and ((epoch + 1) % args.knn_every == 0 or epoch + 1 == args.epochs):
            records[-1] |= common.knn_accuracy(model.backbone, info, train, test, device, args.workers, amp)
            common.save_run(args.out, config, info, state, records, args.keep_every)
        common.log_epoch(f"epoch {epoch + 1}/{args.epochs}", records, ("loss", "std", "images_per_s"))
    common.log_epoch(f"finished: {args.out}", records)


# ================================================================ 6. ShuffleBN

# ------------------------------------------------------ gather (shared block)


def gather(x):
    """Concatenate the tensors (n, ...) of all processes, whose n is the same, in rank order: (N, ...). No gradient."""
    if not dist.is_initialized():
        return x.detach()
    whole = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather(list(whole.split(len(x))), x.contiguous())
    return whole


# --------------------------------------------------- ShuffleBN (shared block)


def shard(x, dim=0):
    """Return this process's part, along dim, of a tensor that all processes have. For dim 0 it undoes `gather`."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()] if dist.is_initialized() else x


@torch.no_grad()
def encode_shuffled_keys(encode, views):
    """Return the keys (V, N, C) of the views of all processes, on every process, encoded with ShuffleBN.

    Copy it with gather and shard. On one process it has no effect without SplitBatchNorm.
    encode: a function, images (n, 3, H, W) -> keys (n, C). views: list of V views of this process, each (n, 3, H, W).

    A query and its key must not share batch statistics, from which the encoder could tell that they belong together
    (MoCo, section 3.3). So the images of all processes are shuffled, each process encodes its part, and the keys are
    put back in order. All V views are encoded at once, as in JCL (App. C). Gathering 512 views of 224 px takes 0.6 GB.
    """
    images = torch.cat([gather(view) for view in views])  # row v * N + i is view v of image i
    shuffle = torch.randperm(len(images), device=images.device)
    if dist.is_initialized():
        dist.broadcast(shuffle, 0)  # each process has drawn its own
    keys = gather(encode(images[shard(shuffle)]))
    return keys[shuffle.argsort()].view(len(views), -1, keys.shape[1])


class SplitBatchNorm(nn.BatchNorm2d):
    """Batch norm over each of `groups` equal slices of the batch, as on that many GPUs. x: (N, C) or (N, C, H, W).

    In training it returns torch.cat([norm(part) for part in x.chunk(groups)]), but calls F.batch_norm once, with the
    groups as channels: a loop would launch many more operations on a GPU. As in MoCo's notebook, running statistics are
    averages over the groups. Raises ValueError if the groups do not divide a batch.
    """

    def __init__(self, num_features, groups, **kwargs):
        super().__init__(num_features, **kwargs)
        self.groups = groups
        self.drop = self.act = nn.Identity()  # timm's BatchNormAct2d has both; convert_split_batchnorm takes them over

    def forward(self, x):
        weight, bias, groups = self.weight, self.bias, self.groups
        if not self.training:
            x = F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.eps)
            return self.act(self.drop(x))
        if len(x) % groups:
            raise ValueError(f"a batch of {len(x)} cannot be split into {groups} equal groups of batch norm")
        x = torch.cat(x.chunk(groups), dim=1)  # the groups' channels side by side: (N / groups, groups * C, ...)
        means, variances = self.running_mean.repeat(groups), self.running_var.repeat(groups)
        if weight is not None:
            weight, bias = weight.repeat(groups), bias.repeat(groups)
        x = F.batch_norm(x, means, variances, weight, bias, training=True, momentum=self.momentum, eps=self.eps)
        self.running_mean.copy_(means.view(groups, -1).mean(0))  # F.batch_norm has updated those of each group
        self.running_var.copy_(variances.view(groups, -1).mean(0))
        return self.act(self.drop(torch.cat(x.chunk(groups, dim=1))))


def convert_split_batchnorm(module, groups):
    """Convert the batch norms of a module to SplitBatchNorm, like torch's convert_sync_batchnorm. Return the module.

    It converts BatchNorm1d, BatchNorm2d and timm's BatchNormAct2d that have running statistics and a momentum. All
    others, including subclasses of these, stay as they are. Copy it with SplitBatchNorm.
    """
    result = module
    is_plain = type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, timm.layers.BatchNormAct2d)
    if is_plain and module.track_running_stats and module.momentum is not None:
        result = SplitBatchNorm(module.num_features, groups, eps=module.eps, momentum=module.momentum)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "training"):
            setattr(result, name, getattr(module, name))
    for name, child in module.named_children():  # those of BatchNormAct2d are drop and act
        setattr(result, name, convert_split_batchnorm(child, groups))
    return result


# ============ 7. differences between the paper, the released code and this file

# D1 Terms and weights: all that `--variant` changes. Paper: the affinity's objective is linear, so it is unbounded. It
#    has one order of a pair and no noise, and here erceguder/LoGo's learning rate, 1e-4. L_lg is the sum of its four
#    terms, so the loss is five times as large. lambda L_ll is a term of it. Released: the objective is logistic, so it
#    is bounded. The loss is the mean of the six terms. L_ll has a step of its own without lambda, clipped to 1.5% of
#    the last gradient's norm. On SimSiam both variants use lambda.
# D2 Updates of the momentum encoder. Here: one per step. Released: two, one per forward pass.
# D3 Weight decay. Here: once per step. Released: twice, in both optimizers of the encoder.
# D4 The norm for the clip. Here: kept between epochs. Released: 0 before an epoch, so its first step lacks L_ll.
# D5 The affinity. Here: one for all processes, which sees the whole batch. Released: each process has its own.
# D6 Pairs of two images. Here: the batch rolled by one. Released: the batch reversed, so that in an odd batch the
#    middle image is paired with itself.
# D7 The smallest area of a local crop. Paper (supplement, Table 8) and here: 0.08. Released: 0.05. Table 9 varies
#    the largest area of a global crop, also called r_g: `--crop-scale 0.08 r_g --local-scale 0.08 1`.
# D8 Keys of local crops, and a clip of the main gradient to 100. Released: both; the keys are unused. Here: neither.
# D9 The encoder on STL-10. Paper: a small AlexNet. Here: ResNet-18, because timm has no such AlexNet.
# D10 Color changes. Here: once per view, in MoCo v2's order. Released: the blur comes before the jitter; on CIFAR,
#    jitter, gray, flip and normalization come twice.
# D11 The baseline. Here: its crops are LoGo's global ones, and with `--one-way` the keys of one view are enqueued.
#    Released: its crops take at least 0.08 of the area, and the keys of both views are enqueued.
# D12 SimSiam (inferred). Learning rate, batch size and weight decay are LoGo's on MoCo; the projector is SimSiam's. On
#    CIFAR a batch of 512 and two layers are erceguder/LoGo's, and the learning rate is ContrastiveCrop's: 0.5 for 512
#    images. SimSiam's is 0.06, for 800 epochs, with which a small encoder stayed near the untrained one in 20 epochs
#    (tests/results). erceguder/LoGo's is 0.03. The learning rate of the encoder and the predictor follows a cosine (in
#    SimSiam's code the predictor's is constant); the affinity's is constant, as it is on MoCo.
# D13 The size of local crops. Paper (supplement): on CIFAR 32 px, as the global ones. On STL-10 not given; here 96.
# D14 `--pairs all`, the "(4-crop)" of Tables 2 and 3 (supplement, section 2). Inferred: the mean of the 12 terms,
#    --local-size, and a queue of global crops' keys.
# Differences in rounding, indices and precision are listed in tests/golden/README.md.
# Inferred: L_gg, L_lg, L_ll, Eq. 6, Eq. 9 and Algorithm 1 are from the main text, as erceguder/LoGo quotes it. lambda
# on MoCo is inferred, too. The supplement's step from Eq. 2 to Eq. 3 reverses Jensen's inequality, so its Eq. 4 is no
# lower bound of the mutual information.
# Caution: in the released code and here, the affinity sees pairs of one image and pairs of two images in separate
# batches, and only the former have noise (not with `--variant paper`). So it can tell them apart by batch statistics or
# noise, without comparing the crops. In our runs (tests/results) it ranks all pairs of such batches correctly, but in
# mixed ones only 57 to 63%.
# Omitted: SwAV (supplement, Tables 4 and 5), the SVM on VOC after training on COCO (Table 7), and Fig. 2 (affinity).


if __name__ == "__main__":
    common.start(main, parse_args, "--dataset imagenet100 --data-dir DIR")
