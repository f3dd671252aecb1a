"""LoGo: Leverage Your Local and Global Representations (CVPR 2022, arXiv 2203.17205), on MoCo and on SimSiam.

By default this file follows the released code (`--variant released`), because the paper's form is ill-posed (D1). The
other files follow their papers by default.

Large crops of an image show much the same. Small crops often do not. LoGo takes two global and two local crops per
image. The two globals are pulled together. The locals are pulled to the globals, which are constants there. The two
locals are pushed apart, because they show different parts. Their similarity is learned: an affinity network is trained
to score two locals of one image above locals of two images. The encoder lowers the score of its own pairs a little.

    L_gg, L_lg    MoCo.forward, SimSiam.forward, combine
    Eq. 6         affinity_loss, affinity_step: what the affinity learns (supplement, Eq. 4)
    L_ll          local_dissimilarity: what the encoder lowers
    Eq. 9         main: L_gg + L_lg + lambda L_ll, what the encoder learns
    Algorithm 1   main: in each step Eq. 6 is first, then Eq. 9
    "(4-crop)"    --pairs all: every crop against every other one (supplement, Tables 2 and 3)

    python logo.py                                                            # a laptop, no data
    python logo.py --dataset cifar10 --local-crops 0 --one-way                # the baseline, MoCo, on one GPU
    torchrun --nproc_per_node=8 logo.py --dataset imagenet100 --data-dir DIR --base simsiam

The baseline is MoCo or SimSiam with two global crops: `--local-crops 0`. Both views are queries there. With `--one-way`
one is, as in MoCo v2; temperature and schedule are still LoGo's. What LoGo changes in it:
    two global crops per image                also two local crops                        augmentation
    loss = the mean of L_gg's two terms       also L_lg's four terms                      MoCo.forward, combine
    (no affinity)                             a step of the affinity (Eq. 6)              affinity_loss, affinity_step
    one step of the encoder                   one more, down L_ll, clipped, or a term     local_dissimilarity, descend

Inference: only the supplement of this paper could be read. L_gg, L_lg, L_ll, Eq. 6, Eq. 9 and Algorithm 1 are the main
text's, as others quote them. The MoCo form is the released code's. No code of the SimSiam form was released, so all of
it is inference, and so is lambda on MoCo.

Not here: SwAV (supplement, Tables 4 and 5), the SVM on VOC after a training on COCO (Table 7), Fig. 2 (the affinity).

Caution: in the released code and here, pairs of one image and pairs of two images pass the affinity in batches of
their own, and only pairs of one image have noise. So batch norm, or the noise, can tell the two kinds apart without a
comparison of the locals. In our runs the affinity ranks all pairs rightly in such batches, but 57 to 63 % in a mixed
batch (tests/results/README.md).

Where this file, the paper and the released code differ:
    D1 Terms and weights. Paper (`--variant paper`): the affinity's objective is linear, so that it has no bound; L_lg
       is the sum of its four terms, so that the loss is five times as large; and lambda L_ll is a
       term of the loss. Here and released: the objective is logistic and so bounded, the loss is the mean of the six
       terms, and L_ll has a step of its own, clipped to 1.5 % of the last gradient's norm, without lambda. On SimSiam
       both variants have lambda.
    D2 The momentum encoder moves. Here: once per step. Released: twice, once per forward pass (not reproduced).
    D3 Weight decay acts. Here: once per step. Released: twice, in both optimizers of the encoder (not reproduced).
    D4 The clip's norm. Here: kept over epochs. Released: 0 as an epoch begins, so a step lacks L_ll (not reproduced).
    D5 The affinity. Here: the same on each process, it sees the whole batch. Released: each process has its own.
    D6 Its negatives. Here: the batch rolled by one. Released: reversed, so an odd batch's middle image meets itself.
    D7 The smallest area of a local crop. Paper (supplement) and here: 0.08. Released: 0.05.
    D8 Keys of local crops, and a clip of the main gradient at 100. Released: both, the keys unused. Here: neither.
    D9 The encoder on STL-10. Paper: a small AlexNet. Here: ResNet-18, because timm has no such AlexNet.
    D10 Color changes. Here: once per view, in MoCo v2's order. Released: the blur comes before the jitter, and on CIFAR
       jitter, gray, flip and normalisation come twice.
    D11 The baseline. Here: it has global crops, and with `--one-way` the keys of one view are enqueued. Released: its
       crops take at least 0.08 of the area, and the keys of both views are enqueued.
    D12 SimSiam (inference). Learning rate, batch size and weight decay are LoGo's on MoCo. On CIFAR the batch has 512
       images, as a third party's, whose learning rate is half of that here. All learning rates fall by a cosine;
       in SimSiam's own code the predictor's is constant.
    D13 The size of local crops. Paper (supplement): on CIFAR 32 px, as large as the views, so that they differ in area
       only. On STL-10 it is not stated: 96 px of 96 is ours.
    D14 `--pairs all`. Paper (supplement, section 2): four crops with areas (.3, 1) and (.05, .3), and every ordered
       pair. Inference, as not stated: the mean of the 12 terms, --local-size, only global crops' keys enqueued.
What differs by rounding, by an index or by precision is in tests/golden/README.md.
"""

import argparse
import copy
import math
import time
from itertools import permutations

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common

# ========================================================= 1. hyper-parameters

# fmt: off
# {group: {name: (value, what it is, its limits or words)}}: the released code's on MoCo, but for
# what says its source. Each is a flag of its value's type, --clip-ratio 0.1, and args.NAME.
HYPERPARAMETERS = dict(
    recipe=dict(variant=("released", "follow the paper, or the authors' code", ("paper", "released"))),
    loss=dict(
        base=("moco", "what LoGo is put on; it also chooses the recipe", ("moco", "simsiam")),
        pairs=("logo", "all: every crop with every other, the 4-crop baseline (D14)", ("logo", "all")),
        local_crops=(2, "local crops per image; 0: symmetrised MoCo, or SimSiam", (0, 2)),
        one_way=(False, "one query per image, as in MoCo v2; with --local-crops 0"),
        l2l=(True, "local-to-local dissimilarity"),
        l2l_weighting=("clip", "L_ll as a clipped step, or as a term of the loss (D1)", ("clip", "lambda")),
        clip_ratio=(0.015, "clip: largest gradient of L_ll, as a share of the main one"),
        lam=(1e-4, "lambda: the weight of L_ll in Eq. 9"),  # a third party's
        affinity_form=("logistic", "the affinity's objective (D1)", ("logistic", "linear")),
        affinity_hidden=(256, "width of the affinity's two hidden layers", (1, math.inf)),
        affinity_lr=(None, "its learning rate; default: the encoder's peak or, if linear, 1e-4", (1e-9, math.inf)),
        affinity_noise=(0.3, "logistic: deviation of the noise on positive pairs' locals, times sqrt(dim)"),
        temperature=(0.07, "temperature of MoCo's loss", (1e-9, math.inf)),
        queue=(4096, "negatives per query; auto: a tenth of the images, at least a batch", (1, math.inf, "auto")),
    ),
    model=dict(  # encoder and sizes: the supplement's for ImageNet-100, section 1
        arch=("resnet34", "encoder: resnet_micro, resnet18, resnet50, vit_small, ..., or any timm model"),
        image_size=(224, "side of a global view, in pixels", (1, math.inf)),
        local_size=(96, "side of a local view, in pixels", (1, math.inf)),
        patch_size=(16, "side of a ViT's patch, in pixels", (1, math.inf)),
        dim=(128, "size of the embeddings", (1, math.inf)),
        layers=(3, "layers of SimSiam's projector", (1, math.inf)),  # inference (D12)
        hidden=(512, "width of SimSiam's predictor", (1, math.inf)),  # a third party's
        bn_groups=(8, "slices of the batch with batch-norm statistics of their own, as on GPUs", (1, math.inf)),
        momentum=(0.999, "momentum m of the momentum encoder", (0, 1)),
    ),
    schedule=dict(
        epochs=(200, "epochs of the whole training", (1, math.inf)),
        batch_size=(256, "images per step, over all processes", (2, math.inf)),
        lr=(0.03, "peak learning rate at --lr-batch; scaled linearly to --batch-size", (1e-9, math.inf)),
        lr_batch=(256, "batch size for which the learning rates are given", (1, math.inf)),
        milestones=([0.6, 0.8], "shares of the run from which on the learning rate is a tenth; empty: cosine", (0, 1)),
        min_lr=(0.0, "last learning rate, scaled as --lr is"),
        warmup=(0.0, "epochs of linear warm-up, at most a quarter of the run"),
        weight_decay=(1e-4, "weight decay of SGD"),
        sgd_momentum=(0.9, "momentum of SGD, the affinity's too", (0, 0.999999)),
    ),
    augmentation=dict(  # areas of crops: supplement, section 1
        global_scale=((0.4, 1.0), "areas of global crops (supplement, Table 9)", (1e-9, 1)),
        local_scale=((0.08, 0.4), "areas of local crops (supplement, Table 8)", (1e-9, 1)),  # D7
        crop_ratio=((3 / 4, 4 / 3), "smallest and largest width / height of a crop", (1e-9, math.inf)),
        interpolation=("bilinear", "how a crop is resized", ("bilinear", "bicubic")),
        jitter=((0.4, 0.4, 0.4, 0.1), "largest change of brightness, contrast, saturation and hue"),
        jitter_p=(0.8, "probability of these color changes", (0, 1)),
        gray_p=(0.2, "probability of a gray view", (0, 1)),
        blur_p=(0.5, "probability of a blurred view", (0, 1)),
        blur_sigma=((0.1, 2.0), "smallest and largest sigma of the blur, in pixels", (1e-9, math.inf)),
        flip_p=(0.5, "probability of a horizontal flip", (0, 1)),
        norm=("imagenet", "data set whose mean and standard deviation normalise the views", common.NORMS),
    ),
)
# fmt: on


# ================================================================ 2. the paper

# -------------------------------------------------- the affinity of local crops


def affinity_loss(affinity, local1, local2, noise=None, form="logistic"):
    """Return the loss of the affinity, a scalar: it is to score two locals of one image above locals of two (Eq. 6).

    The positives are the pairs (local1, local2), row by row of the same image. In the negatives the second local is
    that of the batch rolled by one. form: "logistic" (released) is the softplus of minus the positives' scores plus the
    softplus of the negatives' scores, the mean over both orders of the two. It is at least 0. "linear" (paper) is
    -Omega = E f(negative) - E f(positive), where f is the softplus of the score (supplement, Eq. 4). It has no lower
    bound.

    affinity: maps two (N, C) to scores (N,). local1, local2: (N, C), L2-normalised. noise: (2, N, C), added to the
    positives, or None. Gradients reach the affinity only. Raises ValueError for other shapes and forms.
    """
    if form not in ("logistic", "linear"):
        raise ValueError(f"form is 'logistic' or 'linear', not {form!r}")
    noise = local1.new_zeros(2, *local1.shape) if noise is None else noise
    if local1.dim() != 2 or local2.shape != local1.shape or noise.shape != (2, *local1.shape):
        shapes = f"{tuple(local1.shape)}, {tuple(local2.shape)} and {tuple(noise.shape)}"
        raise ValueError(f"affinity_loss takes local1, local2 (N, C) and noise (2, N, C), not {shapes}")
    a, b = local1.detach(), local2.detach()
    x, y = noise
    if form == "linear":
        positive = affinity(a + x, b + y)
        negative = affinity(a, b.roll(1, 0))
        return F.softplus(negative).mean() - F.softplus(positive).mean()  # -Eq. 4
    positive = F.softplus(-affinity(a + x, b + y)) + F.softplus(-affinity(b + x, a + y))
    negative = F.softplus(affinity(a, b.roll(1, 0))) + F.softplus(affinity(b, a.roll(1, 0)))
    return (positive + negative).mean() / 2


def local_dissimilarity(affinity, local1, local2):
    """L_ll, a scalar that the encoder minimises: the mean softplus of the affinity's score for two locals of one image.

    affinity: an nn.Module that maps two (N, C) to scores (N,). local1, local2: (N, C), L2-normalised. Gradients reach
    the locals only: the affinity's parameters are constants. Raises ValueError for other shapes.
    """
    if local1.dim() != 2 or local1.shape != local2.shape:
        raise ValueError(f"local_dissimilarity takes two (N, C), not {tuple(local1.shape)}, {tuple(local2.shape)}")
    constants = {name: p.detach() for name, p in affinity.named_parameters()}
    return F.softplus(torch.func.functional_call(affinity, constants, (local1, local2))).mean()


class Affinity(nn.Module):
    """The learned affinity of local crops.

    forward(a, b): two (N, dim) -> scores (N,), high for two crops of one image. Raises ValueError for other shapes.
    """

    def __init__(self, dim, hidden):
        super().__init__()
        layers = [nn.Linear(2 * dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
        layers += [nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, a, b):
        if a.dim() != 2 or a.shape != b.shape:
            raise ValueError(f"Affinity takes two (N, dim), not {tuple(a.shape)} and {tuple(b.shape)}")
        return self.layers(torch.cat([a, b], dim=1)).squeeze(1)


# ------------------------------------------------------------ the encoder's loss


def combine(global_terms, local_terms, form="mean"):
    """Return L_gg and L_lg, lists of scalars, as one scalar (D1).

    form: "mean" (released) is the mean of all terms. "sum" (paper) is L_gg + L_lg, the mean of the global terms plus
    the sum of the local ones. Raises ValueError for another form, and without global terms.
    """
    if form not in ("mean", "sum") or not global_terms:
        raise ValueError(f"combine takes global terms, and form 'mean' or 'sum', not {form!r}")
    if form == "mean":
        return (sum(global_terms) + sum(local_terms)) / (len(global_terms) + len(local_terms))
    return sum(global_terms) / len(global_terms) + sum(local_terms)


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


def augmentation(args):
    """Two global and two local views per image; without local crops only the global ones: {name: View}."""
    crop = dict(size=args.image_size, area=args.global_scale, ratio=args.crop_ratio)
    color = dict(jitter=args.jitter, jitter_p=args.jitter_p, gray_p=args.gray_p, solarize_p=0.0)
    blur = dict(blur_p=args.blur_p, blur_sigma=args.blur_sigma)
    global_view = common.View(**crop, **color, **blur, flip_p=args.flip_p)
    local_view = global_view._replace(size=args.local_size, area=args.local_scale)
    views = {"global 1": global_view, "global 2": global_view}
    return views | {f"local {i + 1}": local_view for i in range(args.local_crops)}


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


# ------------------------------------------------------------- the two bases


def compared_views(args):
    """Return the pairs of views that are compared, of L_gg and of L_lg: two lists of (i, j), where i is pulled to j.

    Views 0 and 1 are global, 2 and 3 local.
    """
    if args.pairs == "all":  # the supplement's 4-crop baseline
        return list(permutations(range(4), 2)), []
    if args.base == "moco" and args.one_way:  # MoCo v2
        return [(0, 1)], []
    return [(0, 1), (1, 0)], [(i, j) for i in range(2, 2 + args.local_crops) for j in (0, 1)]


class MoCo(nn.Module):
    """MoCo v2's query encoder, momentum encoder (for the keys) and queue.

    Copy it with info_nce, combine, Queue, gather, shard and encode_shuffled_keys. backbone: (n, 3, H, W) ->
    (n, width). amp: encode in bf16. generator: see `Queue`.
    """

    def __init__(self, backbone, width, dim=128, queue=4096, temperature=0.07, amp=False, generator=None):
        super().__init__()
        self.temperature, self.amp = temperature, amp
        self.backbone = backbone
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(queue, dim, generator)

    def embed(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        """Return the momentum encoder's keys of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, global_pairs, local_pairs=(), form="mean", generators=None):
        """Return (loss, keys to enqueue (N', dim), queries, {name: metric}): L_gg and L_lg, see `combine`.

        views: list of this process's (n, 3, H, W), normalised; 0 and 1 are global. global_pairs, local_pairs: lists of
        (i, j): the query of view i is pulled to the key of view j. generators: a torch CPU generator for each view that
        has keys, the same on every process, to shuffle them; torch's global one if None. The keys are the global
        views'. The queries are those of each view that is an i, (n, dim), with gradient, for L_ll. Gradients reach the
        query encoder only.
        """
        pairs = [*global_pairs, *local_pairs]
        queried, keyed = (sorted({*views}) for views in zip(*pairs, strict=True))
        generators = generators or [None] * len(keyed)
        keys = {j: encode_shuffled_keys(self.key, [views[j]], g)[0] for j, g in zip(keyed, generators, strict=True)}
        q = {i: self.embed(views[i]) for i in queried}
        k = {j: shard(key) for j, key in keys.items()}
        losses = [info_nce(q[i], k[j], self.queue.keys, self.temperature) for i, j in pairs]
        loss = combine(losses[: len(global_pairs)], losses[len(global_pairs) :], form)
        return loss, torch.cat([keys[j] for j in keyed if j < 2]), [*q.values()], dict(loss=loss.detach())

    @torch.no_grad()
    def update(self, m):
        """Move the momentum encoder's parameters: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2), m in [0, 1]."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


class SimSiam(nn.Module):
    """SimSiam's encoder and predictor (SimSiam, section 3). It has no momentum encoder, no keys and no queue.

    Copy it with combine. backbone, amp: as in `MoCo`. layers: of the projector. hidden: the width of the predictor.
    """

    def __init__(self, backbone, width, dim=2048, layers=3, hidden=512, amp=False):
        super().__init__()
        self.amp = amp
        self.backbone = backbone

        def layer(inputs, outputs):
            return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]

        projector = layer(width, dim)
        for _ in range(layers - 1):
            projector += layer(dim, dim)
        projector[-2:] = [nn.BatchNorm1d(dim, affine=False)]  # the last one: no weights, no ReLU
        self.projector = nn.Sequential(*projector)
        self.predictor = nn.Sequential(*layer(dim, hidden), nn.Linear(hidden, dim))

    def project(self, x):
        """Return the projections z of images: (n, 3, H, W) -> (n, dim), in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return self.projector(self.backbone(x)).to(x.dtype)

    def embed(self, x):
        """Return what the affinity compares of local crops: their projections, L2-normalised (inference)."""
        return F.normalize(self.project(x), dim=1)

    def forward(self, views, global_pairs, local_pairs=(), form="mean", generators=None):
        """Return (loss, None, embeddings of all views, {name: metric}), as `MoCo.forward`. Nothing is shuffled.

        The prediction of view i is pulled to the projection of view j, a constant.
        """
        z = [self.project(x) for x in views]
        p = [self.predictor(v) for v in z]
        losses = [-F.cosine_similarity(p[i], z[j].detach(), dim=1).mean() for i, j in [*global_pairs, *local_pairs]]
        loss = combine(losses[: len(global_pairs)], losses[len(global_pairs) :], form)
        return loss, None, [F.normalize(v, dim=1) for v in z], dict(loss=loss.detach())


# ------------------------------------------------------------- the two steps


def affinity_step(local, affinity, optimizer, form, noise, generator):
    """Make one step of the affinity, by `affinity_loss` (Eq. 6). Return (its loss, then L_ll by the new affinity).

    local: the embeddings of this process's two local views, (n, dim) each. form: "logistic" or "linear". noise: the
    deviation of what is added to positive pairs, times sqrt(dim), if logistic. generator: a torch CPU generator of it,
    the same on every process. L_ll has gradients.
    """
    local1, local2 = [gather_with_gradient(x) for x in local]  # (N, dim), of all processes
    added = None
    if form == "logistic":
        added = torch.randn(2, *local1.shape, generator=generator, pin_memory=local1.is_cuda)
        added = added.to(local1, non_blocking=True) * noise / local1.shape[1] ** 0.5
    loss = affinity_loss(affinity, local1, local2, added, form)
    descend(optimizer, loss)
    return loss, local_dissimilarity(affinity, local1, local2)


def descend(optimizer, loss, max_norm=math.inf):
    """Make one step of an optimizer down a loss that does not pass DDP.

    The gradient is averaged over the processes. Then it is clipped to the norm max_norm, a number or a 0-d tensor.
    """
    parameters = optimizer.param_groups[0]["params"]
    # A user's own encoder may leave some parameters unused.
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    if dist.is_initialized():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat.div_(dist.get_world_size()))
        parts = flat.split([gradient.numel() for gradient in gradients])
        gradients = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    scale = (max_norm / (torch.nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1)  # 1e-6 as torch's own clipping
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient * scale
    optimizer.step()


class AllReduce(torch.autograd.Function):
    """The sum of a tensor over the processes. The gradient is the sum of the processes' gradients."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return AllReduce.apply(gradient)


def gather_with_gradient(x):
    """Concatenate (n, C) of each process to (N, C) of all, in rank order. The gradients of all processes flow back."""
    if not dist.is_initialized():
        return x
    parts = [x if r == dist.get_rank() else torch.zeros_like(x) for r in range(dist.get_world_size())]
    return AllReduce.apply(torch.cat(parts))


# ================================================================= 5. training

STREAM_EPOCH, STREAM_QUEUE, STREAM_SHUFFLE, STREAM_NOISE = 0, 4, 20, 30  # random streams, see common.generator

# fmt: off
ONLY_MOCO = ("one_way", "temperature", "queue", "bn_groups", "momentum")
ONLY_SIMSIAM = ("layers", "hidden")
IMAGENET100 = common.defaults(HYPERPARAMETERS)
CIFAR = dict(  # supplement, section 1
    IMAGENET100, arch="resnet18", image_size=32, local_size=32, patch_size=4, local_scale=(0.08, 0.6), blur_p=0.0,
    norm="cifar10",
)
STL10 = dict(IMAGENET100, arch="resnet18", image_size=96, local_size=96, patch_size=8)  # supplement, section 1, and D9
IMAGENET = dict(IMAGENET100, arch="resnet50")  # ours
RECIPES = dict(  # on MoCo
    patterns=dict(  # ours, for two CPU cores
        IMAGENET100, arch="resnet_micro", image_size=32, local_size=16, patch_size=4, epochs=28, batch_size=64, lr=0.06,
        lr_batch=128, milestones=(), warmup=5.0, momentum=0.95, temperature=0.2, queue=128, bn_groups=2, blur_p=0.1,
        norm="patterns",
    ),
    cifar10=CIFAR,
    cifar100=dict(CIFAR, norm="cifar100"),
    stl10=STL10,
    imagenet100=IMAGENET100,
    imagenet=dict(IMAGENET, queue=65536, knn_every=50),  # its kNN takes minutes
    folder=dict(IMAGENET, queue="auto", bn_groups=2),  # ours: a folder of one's own may be small
)
SIMSIAM = dict(base="simsiam", l2l_weighting="lambda", milestones=(), dim=2048)  # inference (D12)
SIMSIAM_CIFAR = dict(SIMSIAM, layers=2, batch_size=512)  # a third party's
SIMSIAM_PATTERNS = dict(SIMSIAM, dim=256, layers=2, hidden=128)  # ours
ALL_PAIRS = dict(pairs="all", global_scale=(0.3, 1.0), local_scale=(0.05, 0.3), l2l=False)  # supplement, section 2
PAPER = dict(affinity_form="linear", l2l_weighting="lambda")  # D1
SMALL_ENCODERS = dict(lr=0.1, milestones=(), blur_p=0.5)  # ours
SMALL_MOCO = dict(SMALL_ENCODERS, momentum=0.99, temperature=0.2)
SMALL_SIMSIAM = dict(SMALL_ENCODERS, batch_size=256, dim=512, hidden=128)  # hidden: a quarter of dim, as SimSiam's
# fmt: on


def recipe(chosen):
    """Return the hyper-parameters {name: value}. chosen: what is given, a namespace, with None for the rest."""
    values, on_simsiam = dict(RECIPES[chosen.dataset]), chosen.base == "simsiam"
    if on_simsiam:
        small = dict(patterns=SIMSIAM_PATTERNS, cifar10=SIMSIAM_CIFAR, cifar100=SIMSIAM_CIFAR)
        values |= small.get(chosen.dataset, SIMSIAM)
    if chosen.arch in ("resnet_micro", "resnet_mini") and chosen.dataset in ("cifar10", "cifar100", "stl10", "folder"):
        values |= SMALL_SIMSIAM if on_simsiam else SMALL_MOCO
        if chosen.dataset == "folder":
            values["batch_size"] = 64
    if chosen.pairs == "all":
        values |= ALL_PAIRS
    if chosen.variant == "paper":
        values |= PAPER
    if chosen.local_crops == 0:
        values |= dict(l2l=False)
    without = ONLY_MOCO if on_simsiam else ONLY_SIMSIAM
    if chosen.image_size:  # local crops follow it: at most half of a view's side, in whole patches
        patch_size = chosen.patch_size or values["patch_size"]
        values["local_size"] = min(values["local_size"], chosen.image_size // 2) // patch_size * patch_size
    return {name: value for name, value in values.items() if name not in without}


def parse_args(argv=None):
    """Return the command line (argv, or sys.argv's) as a namespace of all values. Exits with an error on a mistake."""
    args = common.parse("logo", __doc__, argv, HYPERPARAMETERS | common.RUN, recipe)
    if args.local_crops == 0 and (args.l2l or args.pairs == "all"):
        common.fail("--l2l and --pairs all are about local crops: leave out --local-crops 0")
    if args.one_way and args.local_crops:
        common.fail("--one-way is for MoCo without local crops: give --local-crops 0, too")
    return args


def learning_rate(args, epoch):
    """Return the learning rate at a time, in epochs from 0: a linear warm-up from 0, then a cosine down to --min-lr.

    With --milestones, as in MoCo v1, it falls to a tenth at each of them instead.
    """
    peak, last = (lr * args.batch_size / args.lr_batch for lr in (args.lr, args.min_lr))
    warmup = min(args.warmup, args.epochs / 4)
    if epoch < warmup:
        return peak * epoch / warmup
    if args.milestones:
        return peak * 0.1 ** sum(epoch / args.epochs >= share for share in args.milestones)
    done = (epoch - warmup) / (args.epochs - warmup)
    return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2


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
    loader = common.make_loader(args, train, [*declared.values()], device)
    layout, norm = common.memory_format(device, args.arch), common.NORMS[args.norm]
    if args.show_views:
        return common.save_views(args.show_views, common.color_views(next(iter(loader)), device), [*declared])

    # Model and optimizer
    torch.manual_seed(args.seed)
    info = common.encoder_info(args, method="logo", encoder="query")  # the encoder that is evaluated
    backbone = common.build_backbone(info, args.base == "simsiam") if encoder is None else common.copy_module(encoder)
    sizes = {view.size for view in declared.values()}
    width = common.output_width(backbone, *sizes, check_gradient=True)
    amp = common.use_bf16(args.amp, device, args.arch, sizes)
    if args.base == "simsiam":  # no negatives; the batch norms are of the global batch
        negatives, groups = 0, 1
        model = SimSiam(backbone, width, args.dim, args.layers, args.hidden, amp)
        if world > 1 and device.type == "cuda":  # torch synchronises batch norms on GPUs only
            model, groups = timm.layers.convert_sync_batchnorm(model), 1 / world
    else:
        negatives = args.queue if args.queue != "auto" else min(65536, max(args.batch_size, len(train) // 10))
        first_keys = common.generator(args.seed, STREAM_QUEUE)
        model = MoCo(backbone, width, args.dim, negatives, args.temperature, amp=amp, generator=first_keys)
        groups = common.slices_per_process(args, "bn_groups")
        model = split_batch_norms(model, groups)
    model.to(device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=args.sgd_momentum, weight_decay=args.weight_decay)

    # The affinity and its optimizer; for --l2l-weighting clip a second optimizer of the encoder, without weight decay
    affinity, peak_lr = Affinity(args.dim, args.affinity_hidden).to(device), args.lr * args.batch_size / args.lr_batch
    affinity_lr = args.affinity_lr or (1e-4 if args.affinity_form == "linear" else peak_lr)  # 1e-4: a third party's
    options = dict(momentum=args.sgd_momentum, weight_decay=args.weight_decay)
    affinity_optimizer = torch.optim.SGD(affinity.parameters(), affinity_lr, **options)
    of_encoder = [p for p in (*model.backbone.parameters(), *model.projector.parameters()) if p.requires_grad]
    second_optimizer = torch.optim.SGD(of_encoder, momentum=args.sgd_momentum)
    previous_norm = torch.zeros((), device=device)  # of the last step's main gradient
    eq6 = affinity, affinity_optimizer, args.affinity_form, args.affinity_noise
    global_pairs, local_pairs = compared_views(args)
    keyed = len({j for _, j in global_pairs})  # MoCo's views that have keys
    form = "sum" if args.variant == "paper" else "mean"  # D1

    # The run
    config = common.open_run(args, train)
    state = dict(model=model, optimizer=optimizer, affinity=affinity)
    state |= dict(affinity_optimizer=affinity_optimizer, second_optimizer=second_optimizer, previous_norm=previous_norm)
    records = common.load_run(args, config, state)  # one for each epoch that is done
    if args.compile:
        model.backbone.compile()
        if args.base == "moco":
            model.momentum_backbone.compile()
    ddp = DistributedDataParallel(model, find_unused_parameters=encoder is not None) if dist.is_initialized() else model
    ddp.broadcast_buffers = False  # at each step; when it is made, all get the first process's weights and buffers
    facts = dict(batch_norm_groups=groups * world, bf16=amp, negatives=negatives)
    terms = 1 + len(local_pairs) if form == "sum" else 1  # `combine` takes the sum, or the mean
    facts |= dict(loss_at_uniform_logits=terms * math.log(negatives + 1))
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
            # Two global and two local views per image, cut by the loader and colored here
            views = common.color_views(batch, device, layout, norm)
            noise = common.generator(args.seed, step, STREAM_NOISE)
            if args.l2l and args.l2l_weighting == "clip":
                # Released, on MoCo (D1). Eq. 6: the affinity's step. Then a step of the encoder down L_ll alone
                local = [model.embed(view) for view in views[2:]]
                ranking_loss, dissimilarity = affinity_step(local, *eq6, noise)
                second_optimizer.param_groups[0]["lr"] = lr
                descend(second_optimizer, dissimilarity, args.clip_ratio * previous_norm)
            # L_gg and L_lg
            shuffles = [common.generator(args.seed, step, STREAM_SHUFFLE + i) for i in range(keyed)]
            loss, keys, q, metrics = ddp(views, global_pairs, local_pairs, form, shuffles)
            if args.l2l and args.l2l_weighting == "lambda":
                # Paper, and SimSiam. Eq. 6: the affinity's step. Then L_ll is a term of Eq. 9
                ranking_loss, dissimilarity = affinity_step(q[2:], *eq6, noise)
                loss = loss + args.lam * dissimilarity
            if args.l2l:
                metrics |= dict(affinity_loss=ranking_loss.detach(), dissimilarity=dissimilarity.detach())
            # Eq. 9: update the encoder
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            previous_norm.copy_(grad_norm)
            optimizer.step()
            # MoCo: move the momentum encoder. The keys of the global views are negatives of the next steps
            if keys is not None:
                model.update(args.momentum)
                model.queue.enqueue(keys)
            history.append(metrics | dict(grad_norm=grad_norm))
            if (step + 1) % 10 == 0:
                common.show_progress(args, history, began, step + 1, args.epochs * len(loader))

        average_statistics(model)
        record = dict(epoch=epoch + 1, lr=lr)
        records.append(record | common.means(args, history, began) | common.embedding_health(q[0]))
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
