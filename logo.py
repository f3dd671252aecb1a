"""LoGo: Leverage Your Local and Global Representations (CVPR 2022, arXiv 2203.17205), on MoCo and on SimSiam.

By default this file follows the released code (`--variant released`), because the paper's form is ill-posed (D1). The
other files follow their papers by default.

Large crops of an image show much the same. Small crops often do not. LoGo takes two global and two local crops per
image. The two globals are drawn to each other. The locals are drawn to the globals, which are constants there. The two
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
       is the sum of its four terms, so that the loss is five times as large, at the same rate; and lambda L_ll is a
       term of the loss. Here and released: the objective is logistic and so bounded, the loss is the mean of the six
       terms, and L_ll has a step of its own, clipped to 1.5 % of the last gradient's norm, without lambda. On SimSiam
       both variants have lambda.
    D2 The momentum encoder moves. Here: once per step. Released: twice, once per forward pass (not reproduced).
    D3 Weight decay acts. Here: once per step. Released: twice, in both optimisers of the encoder (not reproduced).
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
    D12 SimSiam (inference). Rate, batch size and weight decay are LoGo's on MoCo. On CIFAR the batch has 512 images, as
       a third party's, whose rate is half of that here. All rates fall by a cosine; SimSiam keeps the predictor's.
    D13 The size of local crops. Paper (supplement): on CIFAR 32 px, as large as the views, so that they differ in area
       only. On STL-10 it is not stated: 96 px of 96 is ours.
    D14 `--pairs all`. Paper (supplement, section 2): four crops with areas (.3, 1) and (.05, .3), and every ordered
       pair. Inference, as not stated: the mean of the 12 terms, --local-size, only global crops' keys enqueued.
What differs by rounding, by an index or by precision is in tests/golden/README.md.
"""

import argparse
import json
import math
from itertools import permutations
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common

# ========================================================= 1. hyper-parameters

# fmt: off
# {group: {name: (value, what it is, its limits or words)}}: the released code's on MoCo, but for what says its source.
# Each is a flag of its value's type, --clip-ratio 0.1, and args.NAME. Without limits, a number is not below 0.
HYPERPARAMETERS = dict(
    loss=dict(
        base=("moco", "what LoGo is put on; it also chooses the recipe", ("moco", "simsiam")),
        pairs=("logo", "all: every crop with every other, the 4-crop baseline (D14)", ("logo", "all")),
        local_crops=(2, "local crops per image; 0: symmetrised MoCo, or SimSiam", [0, 2]),
        one_way=(False, "one query per image, as in MoCo v2; with --local-crops 0"),
        l2l=(True, "local-to-local dissimilarity"),
        l2l_weighting=("clip", "L_ll as a clipped step, or as a term of the loss (D1)", ("clip", "lambda")),
        clip_ratio=(0.015, "clip: largest gradient of L_ll, as a share of the main one"),
        lam=(1e-4, "lambda: the weight of L_ll in Eq. 9"),  # a third party's (D1)
        affinity_form=("logistic", "the affinity's objective (D1)", ("logistic", "linear")),
        affinity_hidden=(256, "width of the affinity's two hidden layers", (1, math.inf)),
        affinity_lr=("auto", "its rate; auto: the encoder's peak rate", (1e-9, math.inf, "auto")),
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
        bn_groups=(8, "equal slices of the batch; each has its own batch-norm statistics", (1, math.inf)),
        momentum=(0.999, "momentum m of the momentum encoder", (0, 1)),
    ),
    schedule=dict(
        epochs=(200, "epochs of the whole training", (1, math.inf)),
        batch_size=(256, "images per step, over all processes", (2, math.inf)),
        lr=(0.03, "learning rate at --lr-batch; scaled linearly to --batch-size", (1e-9, math.inf)),
        lr_batch=(256, "batch size for which --lr is given", (1, math.inf)),
        milestones=([0.6, 0.8], "a tenth of the rate from these shares on; none: a cosine", (0.0, 1.0)),
        min_lr=(0.0, "last learning rate; if not given, it is scaled as the peak rate is"),
        warmup=(0.0, "epochs of linear warm-up; if not given, it shrinks with --epochs"),
        weight_decay=(1e-4, "weight decay of SGD"),
        sgd_momentum=(0.9, "momentum of SGD, the affinity's too", (0, 1)),
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


def local_dissimilarity(affinity, local1, local2):
    """L_ll, a scalar that the encoder minimises: the mean softplus of the affinity's score for two locals of one image.

    affinity: an nn.Module that maps two (N, C) to scores (N,). local1, local2: (N, C), L2-normalised. Gradients reach
    the locals only: the affinity's parameters are constants. Raises ValueError for other shapes.
    """
    if local1.dim() != 2 or local1.shape != local2.shape:
        raise ValueError(f"local_dissimilarity takes two (N, C), not {tuple(local1.shape)}, {tuple(local2.shape)}")
    constants = {name: p.detach() for name, p in affinity.named_parameters()}
    return F.softplus(torch.func.functional_call(affinity, constants, (local1, local2))).mean()


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


def augmentation(args):
    """Two global and two local views per image; without local crops only the global ones: a list of View."""
    crop = dict(size=args.image_size, area=args.global_scale, ratio=args.crop_ratio)
    color = dict(jitter=args.jitter, jitter_p=args.jitter_p, gray_p=args.gray_p, solarize_p=0.0)
    blur = dict(blur_p=args.blur_p, blur_sigma=args.blur_sigma)
    global_view = common.View(**crop, **color, **blur, flip_p=args.flip_p)
    local_view = global_view._replace(size=args.local_size, area=args.local_scale)
    return [global_view, global_view] + [local_view] * args.local_crops


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


# ------------------------------------------------------------- the two bases


def image_sizes(args):
    """Return the sides of the images that the encoder gets, in pixels."""
    return [args.image_size] + [args.local_size] * (args.local_crops > 0)


class MoCo(nn.Module):
    """MoCo v2's query encoder, momentum encoder (for the keys) and queue. Global crops are queries and keys; local
    crops are queries only.

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of --arch.
    """

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args = args
        self.backbone = common.build_backbone(common.encoder_info(args)) if encoder is None else encoder
        width = common.output_width(self.backbone, *image_sizes(args))
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, args.dim))
        self.momentum_backbone = common.copy_module(self.backbone, frozen=True)
        self.momentum_projector = common.copy_module(self.projector, frozen=True)
        self.queue = Queue(args.queue, args.dim, common.generator(args.seed, STREAM_QUEUE))

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.amp == "bf16"):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        """Return the momentum encoder's keys of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.amp == "bf16"):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def local(self, x):
        """Return the embeddings of local crops, which the affinity compares. They are their queries."""
        return self.query(x)

    def forward(self, views, step):
        """Return (L_gg and L_lg, keys to enqueue (N or 2 N, dim), (q, k), metrics {name: tensor}, locals).

        views: this process's two global and two or no local views, each (n, 3, H, W), normalised. step: seeds the
        shuffle of the keys. q and k (n, dim) are embeddings of the two global views, without gradient. locals is the
        list of the local views' embeddings, with gradient. Gradients reach the query encoder only.
        """
        all_pairs = self.args.pairs == "all"
        if self.args.one_way:  # the first view is the query, the second the key
            queried, keyed = views[:1], views[1:2]
        else:
            queried = views
            keyed = views if all_pairs else views[:2]
        shuffles = [common.generator(self.args.seed, step, STREAM_SHUFFLE + i) for i in range(len(keyed))]
        keys = [encode_shuffled_keys(self.key, [x], shuffle)[0] for x, shuffle in zip(keyed, shuffles, strict=True)]
        q = [self.query(x) for x in queried]
        k = [common.shard(key) for key in keys]

        def nce(query, key):
            return info_nce(query, key, self.queue.keys, self.args.temperature)

        if all_pairs:  # the supplement's 4-crop baseline
            terms = [nce(q[i], k[j]) for i, j in permutations(range(len(views)), 2)]
            loss = sum(terms) / len(terms)
        else:
            global_terms = [nce(query, key) for query, key in zip(q[:2], reversed(k), strict=True)]  # L_gg
            local_terms = [nce(query, key) for query in q[2:] for key in k]  # L_lg
            loss = combine(global_terms, local_terms, "sum" if self.args.variant == "paper" else "mean")
        k2 = k[0] if self.args.one_way else k[1]  # the key of the second view
        return loss, torch.cat(keys[:2]), (q[0].detach(), k2), {}, q[2:]

    @torch.no_grad()
    def update(self, m):
        """Move the momentum encoder's parameters: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2), m in [0, 1]."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


class SimSiam(nn.Module):
    """SimSiam's encoder and predictor (SimSiam, section 3). It has no momentum encoder, no keys and no queue.

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of --arch.
    """

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args = args
        self.backbone = encoder
        if encoder is None:
            self.backbone = common.build_backbone(common.encoder_info(args))
            for block in self.backbone.modules():
                if hasattr(block, "zero_init_last"):
                    block.zero_init_last()  # SimSiam starts from zero residual branches
        width = common.output_width(self.backbone, *image_sizes(args))

        def layer(inputs, outputs):
            return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]

        layers = layer(width, args.dim)
        for _ in range(args.layers - 1):
            layers += layer(args.dim, args.dim)
        layers[-2:] = [nn.BatchNorm1d(args.dim, affine=False)]  # the last one: no weights, no ReLU
        self.projector = nn.Sequential(*layers)
        self.predictor = nn.Sequential(*layer(args.dim, args.hidden), nn.Linear(args.hidden, args.dim))

    def project(self, x):
        """Return the projections z of images: (n, 3, H, W) -> (n, dim), in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.amp == "bf16"):
            return self.projector(self.backbone(x)).to(x.dtype)

    def local(self, x):
        """Return what the affinity compares of local crops: their projections, L2-normalised (inference)."""
        return F.normalize(self.project(x), dim=1)

    def forward(self, views, step):
        """L_gg and L_lg of a batch: the prediction of each view is drawn to the projections of others, as constants.

        views and what is returned: as in `MoCo.forward`. There are no keys to enqueue: None. step is not used.
        """
        z = [self.project(x) for x in views]
        p = [self.predictor(v) for v in z]
        z1, z2 = (v.detach() for v in z[:2])

        def distance(p, z):
            return -F.cosine_similarity(p, z, dim=1).mean()

        if self.args.pairs == "all":  # the supplement's 4-crop baseline
            terms = [distance(p[i], z[j].detach()) for i, j in permutations(range(len(views)), 2)]
            loss = sum(terms) / len(terms)
        else:
            global_terms = [distance(p[0], z2), distance(p[1], z1)]  # L_gg
            local_terms = [distance(local, constant) for local in p[2:] for constant in (z1, z2)]  # L_lg
            loss = combine(global_terms, local_terms, "sum" if self.args.variant == "paper" else "mean")
        q, k, *local = [F.normalize(v, dim=1) for v in (z1, z2, *z[2:])]
        return loss, None, (q, k), {}, local


# ------------------------------------------------------------- the two steps

STREAM_NOISE = 30  # a random stream, see common.generator


def affinity_step(args, affinity, optimizer, lr, local1, local2, step):
    """Make one step of the affinity, by `affinity_loss` (Eq. 6). Return its loss, a scalar.

    local1, local2: (N, dim), the locals of the global batch, the same on all processes. step: chooses the noise.
    """
    noise = None
    if args.affinity_form == "logistic":
        draws = common.generator(args.seed, step, STREAM_NOISE)
        noise = torch.randn(2, *local1.shape, generator=draws, pin_memory=local1.is_cuda)
        noise = noise.to(local1, non_blocking=True) * args.affinity_noise / args.dim**0.5
    loss = affinity_loss(affinity, local1, local2, noise, args.affinity_form)
    descend(optimizer, loss, lr)
    return loss


def descend(optimizer, loss, lr, max_norm=math.inf):
    """Make one step of an optimiser down a loss that does not pass DDP.

    The gradient is averaged over the processes. Then it is clipped to the norm max_norm, a number or a 0-d tensor.
    """
    optimizer.param_groups[0]["lr"] = lr
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


# ================================================================= 5. training

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
    folder=dict(IMAGENET, queue="auto"),  # ours: the queue is a tenth of the images
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
    """Return the hyper-parameters {name: value}.

    chosen: a namespace with dataset, arch, variant, base, pairs, local_crops and affinity_form.
    """
    values, on_simsiam = dict(RECIPES[chosen.dataset]), chosen.base == "simsiam"
    if on_simsiam:
        small = dict(patterns=SIMSIAM_PATTERNS, cifar10=SIMSIAM_CIFAR, cifar100=SIMSIAM_CIFAR)
        values |= small.get(chosen.dataset, SIMSIAM)
    if chosen.arch in ("resnet_micro", "resnet_mini") and chosen.dataset in ("cifar10", "cifar100", "stl10", "folder"):
        values |= SMALL_SIMSIAM if on_simsiam else SMALL_MOCO
        if chosen.dataset == "folder":
            values["batch_size"] = 64  # a folder of one's own may be small
    if chosen.pairs == "all":
        values |= ALL_PAIRS
    if chosen.variant == "paper":
        values |= PAPER
    if (chosen.affinity_form or values["affinity_form"]) == "linear":
        values |= dict(affinity_lr=1e-4)  # a third party's: the linear objective has no lower bound
    if chosen.local_crops == 0:
        values |= dict(l2l=False)
    unused = ONLY_MOCO if on_simsiam else ONLY_SIMSIAM
    return {name: value for name, value in values.items() if name not in unused}


def parse_args(argv=None):
    """Return the command line (argv, or sys.argv's) as a namespace of all values. Exits with an error on a mistake."""
    run = dict(RUN, variant=("released", "follow the paper, or the authors' code", ("paper", "released")))
    args, typed = common.parse("logo.py", __doc__, argv, HYPERPARAMETERS, dict(run=run), recipe)
    args.method, args.evaluated = "logo", "query"
    # What is not typed follows from other values
    usual = argparse.Namespace(**recipe(args))
    if "local_size" not in typed and args.image_size != usual.image_size:  # half of a view's side, or less
        patch_size = args.patch_size if common.is_vit(args.arch) else 1
        args.local_size = min(args.local_size, args.image_size // 2) // patch_size * patch_size
    common.check_schedule(args)
    if args.base == "moco":
        args.bn_groups = batch_norm_groups(args, typed)
    # What would contradict itself
    if args.local_crops == 0 and (args.l2l or args.pairs == "all"):
        common.fail("--l2l and --pairs all are about local crops: leave out --local-crops 0")
    if args.base == "moco" and args.one_way and args.local_crops:
        common.fail("--one-way is for MoCo without local crops: give --local-crops 0, too")
    return args


def schedule(args, step, steps_per_epoch):
    """Return (learning rate, weight decay, momentum of the momentum encoder) for a step, counted from 0.

    The rate warms up linearly from 0. Then it falls to a tenth at each of --milestones. If there are none, it falls by
    a cosine to --min-lr. The other two are constant. SimSiam has no momentum encoder, so its momentum is 0.
    """
    epoch = step / steps_per_epoch
    warmup = args.warmup if args.warmup * steps_per_epoch >= 1 else 0  # less than a step is none
    if epoch < warmup:
        lr = common.peak_rate(args) * epoch / warmup
    elif args.milestones:
        done = step / (args.epochs * steps_per_epoch)
        lr = common.peak_rate(args) * 0.1 ** sum(done >= milestone for milestone in args.milestones)
    else:
        done = (epoch - warmup) / (args.epochs - warmup)
        lr = args.min_lr + (common.peak_rate(args) - args.min_lr) * (1 + math.cos(math.pi * done)) / 2
    return lr, args.weight_decay, args.momentum if args.base == "moco" else 0.0


def chance_level(args):
    """The loss at equal logits: of MoCo's terms, each log(K + 1); 0 for SimSiam's cosines."""
    if args.base == "simsiam":
        return 0.0
    takes_sum = args.variant == "paper" and args.pairs == "logo"
    terms = 1 + 2 * args.local_crops if takes_sum else 1  # `combine` takes the sum, or the mean
    return terms * math.log(args.queue + 1)


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
    args.out = args.out or f"runs/logo-{dataset}-{args.arch}-s{args.seed}{args.changes}"
    args.amp = "bf16" if common.use_bf16(args.amp, device, args.arch, image_sizes(args)) else "off"
    args.device = device.type

    # Data
    train, test = common.open_images(args, train, test)
    loader = common.make_loader(args, train, augmentation(args), device)
    layout, norm = common.memory_format(device, args.arch), common.NORMS[args.norm]
    if args.show_views:
        names = ["global 1", "global 2", *["local 1", "local 2"][: args.local_crops]]
        return common.save_views(args.show_views, common.colour_views(next(iter(loader)), device), names)
    steps_per_epoch = len(train) // args.batch_size
    total_steps, rank = args.epochs * steps_per_epoch, common.rank_and_world()[0]
    last_step = min(args.max_steps or total_steps, total_steps)

    # Model and optimiser
    if args.base == "moco" and args.queue == "auto":
        args.queue = min(65536, max(args.batch_size, len(train) // 10))
    torch.manual_seed(args.seed)
    if args.base == "moco":
        model = MoCo(args, common.copy_module(encoder)).to(device, memory_format=layout)
        model = split_batch_norms(model, args.bn_groups)
    else:
        model = SimSiam(args, common.copy_module(encoder)).to(device, memory_format=layout)
        if dist.is_initialized() and device.type == "cuda":  # on CPUs each process takes its own statistics
            model = timm.layers.convert_sync_batchnorm(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, args.lr, momentum=args.sgd_momentum, weight_decay=args.weight_decay)
    ddp = in_parallel(args, model)

    # The affinity and its optimiser; for --l2l-weighting clip a second optimiser of the encoder, without weight decay
    affinity = Affinity(args.dim, args.affinity_hidden).to(device)
    affinity_lr = common.peak_rate(args) if args.affinity_lr == "auto" else args.affinity_lr
    affinity_optimizer = torch.optim.SGD(
        affinity.parameters(), affinity_lr, momentum=args.sgd_momentum, weight_decay=args.weight_decay
    )
    of_encoder = [p for p in (*model.backbone.parameters(), *model.projector.parameters()) if p.requires_grad]
    second_optimizer = torch.optim.SGD(of_encoder, args.lr, momentum=args.sgd_momentum)
    previous_norm = torch.zeros((), device=device)  # of the last step's main gradient

    # The run's folder. The run goes on from its last.pt, if there is one. The lock keeps other runs out
    images, modules = dict(number=len(train), checksum=train.checksum()), dict(model=model, affinity=affinity)
    optimizers = dict(optimizer=optimizer, affinity_optimizer=affinity_optimizer, second_optimizer=second_optimizer)
    lock = common.claim_folder(args.out)
    step, records = restore(args, images, modules, optimizers, previous_norm)
    save(args, step, records, images, modules, optimizers, previous_norm)
    chance = chance_level(args)
    if args.base == "moco":
        facts = dict(queue_share=args.queue / len(train))
    else:
        norms = "each process's own" if dist.is_initialized() and device.type == "cpu" else "of the whole batch"
        facts = dict(batch_norm=norms)
    introduce(args, train, test, peak_lr=common.peak_rate(args), chance_level=chance, **facts)

    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # the last epoch again: it may lack its kNN
        loader.batch_sampler.set_epoch(epoch, step, last_step)
        history = []
        with common.until_stopped(loader) as batches:  # SIGTERM or Ctrl-C: the step is saved, then it raises Stopped
            for batch in batches:
                lr, _, momentum = schedule(args, step, steps_per_epoch)
                optimizer.param_groups[0]["lr"] = lr
                # Two global and two local views per image; the loader has cut them
                views = common.colour_views(batch, device, layout, norm)
                torch.manual_seed(common.generator(args.seed, step, STREAM_STEP, rank).initial_seed())  # for drop-path
                if args.l2l and args.l2l_weighting == "clip":
                    # Released, on MoCo (D1). Eq. 6: the affinity's step. Then a step of the encoder down L_ll alone
                    local = [gather_with_gradient(model.local(view)) for view in views[2:]]
                    ranking_loss = affinity_step(args, affinity, affinity_optimizer, affinity_lr, *local, step)
                    dissimilarity = local_dissimilarity(affinity, *local)
                    descend(second_optimizer, dissimilarity, lr, args.clip_ratio * previous_norm)
                # L_gg and L_lg
                loss, keys, (q, _), metrics, local = ddp(views, step)
                objective = loss
                if args.l2l and args.l2l_weighting == "lambda":
                    # Paper, and SimSiam. Eq. 6: the affinity's step. Then L_ll is a term of Eq. 9
                    local = [gather_with_gradient(x) for x in local]
                    ranking_loss = affinity_step(args, affinity, affinity_optimizer, affinity_lr, *local, step)
                    dissimilarity = local_dissimilarity(affinity, *local)
                    objective = loss + args.lam * dissimilarity
                if args.l2l:
                    metrics |= dict(affinity_loss=ranking_loss, dissimilarity=dissimilarity)
                # Eq. 9: the step of the encoder
                optimizer.zero_grad(set_to_none=True)
                objective.backward()
                grad_norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
                previous_norm.copy_(grad_norm)
                optimizer.step()
                average_statistics(model)
                # MoCo: move the momentum encoder. The keys are negatives of the next steps
                if args.base == "moco":
                    model.update(momentum)
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
            save(args, step, records, images, modules, optimizers, previous_norm)
        if ended:
            due = args.knn_every and ((epoch + 1) % args.knn_every == 0 or epoch + 1 == args.epochs)
            if test is not None and due and "knn20_top1" not in records[-1]:
                records[-1] |= common.knn_record(args, model.backbone, train, test, device)
                save(args, step, records, images, modules, optimizers, previous_norm)
            common.log_epoch(args, records[-1])
        if step >= last_step:
            break

    lock.close()
    common.log_end(args, step, total_steps)


# =============================================================== 6. machinery


def restore(args, images, modules, optimizers, previous_norm):
    """Load the run in --out, or --resume's, or --init's weights only. Return (steps done, records of the epochs)."""
    path, state = common.load_run(args, images, args.resume)
    if state["step"] > 0:
        with common.fitting(path):
            for name, module in modules.items():
                module.load_state_dict(state[name])
            for name, optimizer in optimizers.items():
                # Only its buffers: rates and weight decay are this run's, which may differ from --resume's
                optimizer.load_state_dict(optimizer.state_dict() | dict(state=state[name]["state"]))
            previous_norm.copy_(state["previous_norm"])
    elif args.init:
        model = modules["model"]
        weights, _ = common.fitting_weights(args.init, model.backbone, args.init_prefix)
        model.backbone.load_state_dict(weights)
        if args.base == "moco":
            model.momentum_backbone.load_state_dict(weights)
    return state["step"], state["records"]


def save(args, step, records, images, modules, optimizers, previous_norm):
    """Write last.pt, which is all that a run needs to go on, and what follows from it, each whole or not at all."""
    out, info = Path(args.out), common.encoder_info(args)
    state = {name: part.state_dict() for name, part in (modules | optimizers).items()}
    state |= dict(previous_norm=previous_norm, step=step, records=records)
    state |= dict(config=vars(args), images=images, backbone=info)
    common.write_file(out / "last.pt", state)
    epoch = records[-1]["epoch"] if records and records[-1]["step"] == step else 0  # 0: in the middle of one
    if epoch and args.keep_every and epoch % args.keep_every == 0:
        common.write_file(out / f"epoch-{epoch:04d}.pt", state)
    common.write_file(out / "backbone.pt", info | {"state_dict": modules["model"].backbone.state_dict()})
    config = vars(args) | common.versions(args.device) | {"images": images}
    common.write_file(out / "config.json", json.dumps(config, default=str))
    common.write_file(out / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))


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
    rank, world = common.rank_and_world()
    parts = [x if r == rank else torch.zeros_like(x) for r in range(world)]
    return AllReduce.apply(torch.cat(parts))


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
