"""CLIM: Center-wise Local Image Mixture (Li et al., ICLR 2021 submission, arXiv 2011.02697), on MoCo v2.

MoCo's only positives are views of the same image. CLIM adds other images as positives. Every few epochs it embeds all
images, clusters them, and finds the nearest neighbours of each. The positives of an image are those of its neighbours
that share its cluster and lie closer to the cluster's centre than the image itself. So similar images move together,
towards the centres.

Some of these positives are wrong, so the loss does not trust them fully. CutMix pastes a box of the positive into the
image. The query is the embedding of this mix. Its loss has two terms, with the keys of the image and of the positive.
Each counts by its share of the pixels. Multi-resolution is a second augmentation: the same crop is encoded at several
sizes, and the query of every size is compared with the keys of every size.

    Eq. 1              info_nce; nce in clim_loss                 MoCo v2's loss; each term of Eq. 4
    Eq. 2, App. A.2    kmeans, nearest_neighbors, select_positives
    Eq. 3              cutmix
    Eq. 4              clim_loss
    Eq. 5              (not computed)                             it defines the scale of a crop
    Eq. 6              CLIM.forward                               the sum over pairs of sizes
    Table 6            choose_positives, --selection, --mix       other ways to choose positives, and no mixing

    python clim.py                                                            # a laptop, no data
    python clim.py --dataset cifar10 --selection none                         # the baseline, MoCo v2, on one GPU
    torchrun --nproc_per_node=8 clim.py --dataset imagenet --data-dir DIR

The baseline is MoCo v2. It is exactly `--selection none`, which takes one resolution. What CLIM changes in it:
    (no positives)                            a choice of positives every few epochs      kmeans, ..., refresh
    one query view and one key view           also two views of one positive              augmentation, draw_views
    q = query(view)                           q = query(view mixed with the positive's)   cutmix, CLIM.forward
    k = key(view)                             key k of the image, k' of its positive      CLIM.forward
    info_nce(q, k, queue, tau)                clim_loss(q, k, k', queue, tau, lambda)     CLIM.forward
    one size                                  a sum over all pairs of sizes               CLIM.forward
Tables 6, 8 and 9 take one resolution: `--dataset imagenet --resolutions 224`, and the flags whose help names the table.
Table 7 is `--resolutions 224 96` and so on. Its multi-crop is `--local-crops 2`.
Not here: detection and segmentation on VOC, COCO and LVIS (Tables 3 to 5), and the t-SNE of Fig. 3.

There is no released code. Where the paper is silent, this file decides, and says "ours" there. What differs:
    D1 The image itself. Paper: it fulfils Eq. 2, as an equality. Here: it is no positive, unless it is the only image.
    D2 Too few positives. Paper (App. A.2): the nearest of the remaining 40 neighbours. Here: read as those that Eq. 2
       excludes, nearest first, although that contradicts Eq. 2.
    D3 The sum of Eq. 6. Paper and here: a sum, of four terms for two sizes, which raises the effective learning rate.
       Local crops add their terms.
    D4 The sizes {224, 224} of Table 7. Paper: silent. Here: both have one crop, but colors and a flip of their own.
    D5 Crops of multi-resolution. Paper (section 3.3): fixed over the sizes. Here: so for a view, but query and key have
       crops of their own. `--same-crop` is the other reading: a key has the crop of its query.
    D6 Multi-crop. Paper (Table 7): sizes, areas. Here (ours): local crops are queries, mixed with the positive's own.
What differs by rounding, by an index or by precision is in tests/golden/README.md.
"""

import argparse
import functools
import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common

# ========================================================= 1. hyper-parameters

# fmt: off
# {group: {name: (value, what it is, its limits or words)}}: the paper's for ImageNet, App. A, or MoCo v2's. Each is a
# flag of its value's type, --knn-k 10, and args.NAME. Without limits, a number is not below 0.
HYPERPARAMETERS = dict(
    loss=dict(
        same_crop=(False, "a key has the crop of its query (D5)"),
        local_crops=(0, "local crops per image, as queries (Table 7, D6)", [0, 2]),
        mix=("cutmix", "none: no mixing, half the loss to each key (Table 6)", ("cutmix", "none")),
        alpha=(2.0, "parameter of CutMix's Beta(alpha, alpha) (Table 9)", (1e-9, math.inf)),
        temperature=(0.2, "temperature tau of the loss", (1e-9, math.inf)),  # MoCo v2's
        queue=(65536, "negatives per query; auto: a tenth of the images, at least a batch", (1, math.inf, "auto")),
    ),
    positives=dict(
        selection=("center", "choice of positives (Table 6)", ("none", "random", "knn", "kmeans", "center")),
        num_clusters=(10000, "clusters, m (Table 8); auto: one per 128 images", (1, math.inf, "auto")),
        kmeans_iterations=(20, "iterations of k-means", (1, 1000)),  # ours; faiss: 25, of <= 256 images per cluster
        knn_k=(40, "nearest neighbours, k (Table 8)", (1, 1000)),
        num_positives=(10, "positives per image (App. A.2)", (1, 1000)),
        refresh_every=(5, "epochs between choices of positives", (1, math.inf)),
        clim_start=(5, "epochs of MoCo v2 before the first choice; if not given, it shrinks with --epochs"),  # ours
    ),
    model=dict(
        arch=("resnet50", "encoder: resnet_micro, resnet18, resnet50, vit_small, ..., or any timm model"),
        image_size=(224, "side of a view, in pixels", (1, math.inf)),
        resolutions=([224, 160], "sides at which views are encoded, in pixels (Table 7)", (1, math.inf)),  # its best
        patch_size=(16, "side of a ViT's patch, in pixels", (1, math.inf)),
        dim=(128, "dimension of queries and keys", (1, math.inf)),
        bn_groups=(16, "equal slices of the batch; each has its own batch-norm statistics", (1, math.inf)),
        momentum=(0.999, "momentum m of the momentum encoder", (0, 1)),
    ),
    schedule=dict(
        epochs=(200, "epochs of the whole training", (1, math.inf)),  # section 4.4; App. A: 1,200
        batch_size=(512, "images per step, over all processes", (2, math.inf)),
        lr=(0.06, "learning rate at --lr-batch; scaled linearly to --batch-size", (1e-9, math.inf)),
        lr_batch=(512, "batch size for which --lr is given", (1, math.inf)),
        min_lr=(0.0, "last learning rate; if not given, it is scaled as the peak rate is"),
        warmup=(0.0, "epochs of linear warm-up; if not given, it shrinks with --epochs"),
        weight_decay=(1e-4, "weight decay of SGD"),
        sgd_momentum=(0.9, "momentum of SGD", (0, 1)),
    ),
    augmentation=dict(
        crop_scale=((0.2, 1.0), "smallest and largest share of the image that a crop has", (1e-9, 1)),
        local_size=(96, "side of a local crop, in pixels", (1, math.inf)),  # Table 7
        local_scale=((0.05, 0.14), "smallest and largest area of a local crop", (1e-9, 1)),  # Table 7
        crop_ratio=((3 / 4, 4 / 3), "smallest and largest width / height of a crop", (1e-9, math.inf)),
        interpolation=("bilinear", "how a crop is resized", ("bilinear", "bicubic")),
        jitter=((0.4, 0.4, 0.4, 0.1), "largest change of brightness, contrast, saturation and hue"),  # hue: MoCo v2's
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


def clim_loss(q, k_anchor, k_positive, queue, temperature, lam):
    """Return the loss of mixed queries (Eq. 4), lam * NCE(q, k_anchor) + (1 - lam) * NCE(q, k_positive), as a scalar.

    NCE is InfoNCE (Eq. 1). The keys of the queue are the negatives of both terms. With lam = 1 it is MoCo's loss.

    q: (N, C) queries, one per mixed image. k_anchor: (N, C), the keys of the images. k_positive: (N, C), the keys of
    the images that were pasted in. queue: (K, C). All are L2-normalised. temperature: T > 0. lam: in [0, 1], the share
    of k_anchor's images in the mix, a float, or (N,) for a share per query.
    Gradients reach q, and also the keys and the queue unless these are detached. Raises ValueError if the shapes do not
    fit.
    """
    lam_shape = tuple(lam.shape) if torch.is_tensor(lam) else ()
    keys_fit = q.dim() == 2 and k_anchor.shape == q.shape and k_positive.shape == q.shape
    if not keys_fit or queue.shape[1:] != q.shape[1:] or lam_shape not in ((), (len(q),)):
        shapes = f"q {tuple(q.shape)}, k_anchor {tuple(k_anchor.shape)}, k_positive {tuple(k_positive.shape)}"
        shapes += f", queue {tuple(queue.shape)} and lam {lam_shape}"
        raise ValueError(f"clim_loss takes q, k_anchor, k_positive (N, C), queue (K, C), lam () or (N,), not {shapes}")
    negatives = q @ queue.T
    target = torch.zeros(len(q), dtype=torch.int64, device=q.device)

    def nce(k):  # Eq. 1 for each query: (N,)
        logits = torch.cat([(q * k).sum(1, keepdim=True), negatives], dim=1) / temperature
        return F.cross_entropy(logits, target, reduction="none")

    lam = lam.to(q) if torch.is_tensor(lam) else lam
    return (lam * nce(k_anchor) + (1 - lam) * nce(k_positive)).mean()  # Eq. 4


def cutmix(x, partner, lam, generator=None):
    """Mix two batches of images (Eq. 3): returns (mixed images, the share of x that is left in them).

    A box of about (1 - lam) of the area of x is replaced by the same box of the partner. The box has the image's aspect
    ratio. Its centre is uniform in the image. The part of it that lies outside the image is dropped, so the share can
    exceed lam. Use the share, not lam, as the weight in the loss.

    x, partner: (N, C, H, W); row i of partner is pasted into row i of x. lam: the wanted share of x, in [0, 1], often
    drawn from Beta(alpha, alpha); a float for one box in all images, or (N,) for a box per image. generator: a torch
    CPU generator; torch's global one if None. The share is a float, or (N,) float64 on the CPU if lam is (N,). Raises
    ValueError if shapes do not fit or lam is not in [0, 1]. Source: the code of CutMix (Yun et al., arXiv 1905.04899).
    """
    share = torch.as_tensor(lam, dtype=torch.float64).cpu()
    if x.dim() != 4 or partner.shape != x.shape or tuple(share.shape) not in ((), (len(x),)):
        shapes = f"x {tuple(x.shape)}, partner {tuple(partner.shape)} and lam {tuple(share.shape)}"
        raise ValueError(f"cutmix takes x and partner (N, C, H, W), and lam () or (N,), not {shapes}")
    if not ((share >= 0) & (share <= 1)).all():
        raise ValueError(f"cutmix takes lam in [0, 1], not {lam}")
    height, width = x.shape[2:]
    side = (1 - share.reshape(-1)).sqrt()  # of each box, as a share of the image's side

    def interval(size):  # where the boxes begin and end along `size` pixels: two (boxes, 1) int64
        centre = (torch.rand(len(side), dtype=torch.float64, generator=generator) * size).long()
        half = (side * size).long() // 2
        return (centre - half).clamp(0, size)[:, None], (centre + half).clamp(0, size)[:, None]

    top, bottom = interval(height)
    left, right = interval(width)
    row, column = torch.arange(height), torch.arange(width)
    in_rows = (row >= top) & (row < bottom)  # (boxes, H)
    in_columns = (column >= left) & (column < right)  # (boxes, W)
    in_box = (in_rows[:, None, :, None] & in_columns[:, None, None, :]).to(x.device, non_blocking=True)  # 1 - M
    mixed = torch.where(in_box, partner, x)  # Eq. 3: x where the mask M is 1
    kept = 1 - ((bottom - top) * (right - left)).flatten().double() / (height * width)
    return mixed, (kept if share.dim() else kept.item())


# ------------------------------- choice of positives (section 3.2.1 and App. A.2)


def rows_per_chunk(width):
    """Return how many rows of `width` float64 numbers a chunk has: as many as 128 MiB hold, but at least 128."""
    return max(128, 2**24 // width)


@torch.no_grad()
def nearest_neighbors(x, k, rows=None):
    """Return the k nearest other rows of each row by L2 distance, nearest first: (n, min(k, N - 1)) int64.

    x: (N, C). rows: (n,) int64, the rows whose neighbours are wanted; all if None. A row is not its own neighbour,
    unless it is the only one (D1). Distances are computed in float64, since the rounding of float32 changes which are
    found, and rounded to float32, so that copies of an image have equal ones. Raises ValueError if the shape of x or k
    does not fit. To copy it, also copy `rows_per_chunk`.
    """
    if x.dim() != 2 or len(x) == 0 or k < 1:
        raise ValueError(f"nearest_neighbors takes x (N, C) with N > 0, and k > 0, not x {tuple(x.shape)} and k {k}")
    x, k = x.double(), min(k, max(1, len(x) - 1))
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    neighbors = []
    for chunk in rows.split(rows_per_chunk(len(x))):
        distance = torch.cdist(x[chunk], x).float().clamp_min(1e-7)  # what is nearer counts as a copy
        distance.scatter_(1, chunk[:, None], math.inf)  # from a row to itself
        neighbors.append(distance.topk(k, largest=False).indices)
    return torch.cat(neighbors)


def nearest_center(x, centers):
    """Return the number of each row's nearest centre by L2 distance: x (N, C), centers (m, C) -> (N,) int64."""
    chunks = x.split(rows_per_chunk(len(centers)))
    return torch.cat([torch.cdist(chunk, centers).argmin(1) for chunk in chunks])


@torch.no_grad()
def kmeans(x, num_clusters, iterations=20, generator=None):
    """Run Lloyd's k-means by L2 distance. Return (centers (m, C), assignment (N,) int64 of each row to its centre).

    x: (N, C); its rows are used as given, not normalised. m is min(num_clusters, N). The first centres are random rows.
    If clusters come out empty, they start anew at the rows that are farthest from their centres. Exactly `iterations`
    are made, in float64; there is no test of convergence. The centres have the dtype of x. generator: a torch CPU
    generator; torch's global one if None. No gradient. Raises ValueError if the shape of x or a number does not fit.
    To copy it, also copy `nearest_center` and `rows_per_chunk`.
    """
    if x.dim() != 2 or len(x) == 0 or num_clusters < 1 or iterations < 0:
        given = f"x {tuple(x.shape)}, {num_clusters} clusters and {iterations} iterations"
        raise ValueError(f"kmeans takes x (N, C) with N > 0, 1 cluster or more, and 0 iterations or more, not {given}")
    rows = x.double()
    centers = rows[torch.randperm(len(x), generator=generator)[:num_clusters].to(x.device)]
    for _ in range(iterations):
        assignment = nearest_center(rows, centers)
        count = assignment.bincount(minlength=len(centers))
        empty = torch.nonzero(count == 0).flatten()
        farthest = (rows - centers[assignment]).square().sum(1).topk(len(empty)).indices
        centers = torch.zeros_like(centers).index_add_(0, assignment, rows) / count.clamp_min(1)[:, None]
        centers[empty] = rows[farthest]
    centers = centers.to(x.dtype)
    return centers, nearest_center(rows, centers.double())


def take(neighbors, preferred, count, generator=None):
    """Choose `count` neighbours per row (App. A.2): (N, count) int64.

    Preferred ones come first, in random order. Then come the others, nearest first. If k < count, they repeat in that
    order. neighbors: (N, k) int64, nearest first. preferred: (N, k) bool.
    """
    k = neighbors.shape[1]
    # Sort each row by a number: random in [0, 1) for preferred neighbours, 1 + rank for the others.
    random = torch.rand(neighbors.shape, generator=generator).to(neighbors.device)
    rank = torch.arange(k, device=neighbors.device)
    order = torch.where(preferred, random, 1 + rank).argsort(1)
    repeated = torch.arange(count, device=neighbors.device) % k
    return neighbors.gather(1, order[:, repeated])


@torch.no_grad()
def select_positives(x, centers, assignment, k=40, num_positives=10, generator=None, neighbors=None):
    """Choose positives by center-wise local selection (Eq. 2, App. A.2): returns (N, num_positives) int64, rows of x.

    The candidates are those of an image's k nearest neighbours that are in its cluster and at most as far from its
    centre as the image is. num_positives random ones are chosen. If there are fewer, the nearest of the other
    neighbours are added (D2). If the neighbours are too few, they repeat. If there is only one image, it is its own
    positive.

    x: (N, C), one embedding per image. centers: (m, C), and assignment: (N,) int64, the number of each image's centre:
    both as `kmeans` returns them. generator: a torch CPU generator; torch's global one if None. neighbors: (N, k)
    int64, nearest first, if they are known; then the argument k is not used. No gradient. Raises ValueError if the
    shapes do not fit. To copy it, also copy `take`, `nearest_neighbors` and `rows_per_chunk`.
    """
    shapes = f"x {tuple(x.shape)}, centers {tuple(centers.shape)}, assignment {tuple(assignment.shape)}"
    if x.dim() != 2 or centers.dim() != 2 or centers.shape[1:] != x.shape[1:] or assignment.shape != x.shape[:1]:
        raise ValueError(f"select_positives takes x (N, C), centers (m, C) and assignment (N,), not {shapes}")
    if neighbors is None:
        neighbors = nearest_neighbors(x, k)  # Omega_2
    if neighbors.dim() != 2 or len(neighbors) != len(x) or num_positives < 1:
        given = f"{tuple(neighbors.shape)} and {num_positives} with {shapes}"
        raise ValueError(f"select_positives takes neighbors (N, k) and 1 positive or more, not {given}")
    same_cluster = assignment[neighbors] == assignment[:, None]  # in Omega_1
    to_center = (x.double() - centers.double()[assignment]).square().sum(1)  # each image's squared distance
    closer = to_center[neighbors] <= to_center[:, None]  # the inequality of Eq. 2
    return take(neighbors, same_cluster & closer, num_positives, generator)  # Eq. 2's Omega_p is preferred: App. A.2


def random_members(assignment, count, generator=None):
    """Draw `count` other rows of each row's own cluster: (N,) int64 -> (N, count) int64. They may repeat.

    A row that is alone in its cluster gets rows of any cluster. If it is the only row, it gets itself (D1).
    """
    n = len(assignment)
    by_cluster = assignment.argsort(stable=True)
    place = torch.empty_like(by_cluster).index_copy_(0, by_cluster, torch.arange(n, device=assignment.device))
    sizes = assignment.bincount()
    first = (sizes.cumsum(0) - sizes)[assignment]  # where the row's cluster begins in by_cluster
    size = sizes[assignment]
    first, size = torch.where(size == 1, 0, first), torch.where(size == 1, n, size)
    random = torch.rand(n, count, dtype=torch.float64, generator=generator).to(assignment.device)
    other = (random * (size - 1)[:, None]).long()
    other += other >= (place - first)[:, None]  # the row itself is passed over
    return by_cluster[(first[:, None] + other).clamp_max(n - 1)]


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

VIEWS = ("query", "key", "positive's key", "positive's query")  # the views of one copy, in this order
BOX_OF = (0, 0, 3, 3)  # with --same-crop: the view whose box each of them has
STREAM_POSITIVES, STREAM_MIX = 5, 30  # random streams, see common.generator; 31 and up mix the local crops


def num_copies(resolutions):
    """Return how many copies of the views are needed: 1, or more if a size is named several times (D4)."""
    return max(resolutions.count(size) for size in resolutions)


def view_names(args, have_positives):
    """Return the names of the views of one copy: all of VIEWS or, with --mix none, the first three."""
    if not have_positives:  # until they are chosen, there are the image's own two views
        return VIEWS[:2]
    return VIEWS if args.mix == "cutmix" else VIEWS[:3]


def augmentation(args):
    """Return a list of View: those of VIEWS for each copy, then a local crop of the image and one of the positive for
    each of --local-crops. All are drawn alike, as in MoCo v2 (App. A).

    VIEWS are cut at the largest size. CLIM.forward resizes them, so that all sizes have the same crop (section 3.3).
    """
    crop = dict(size=args.image_size, area=args.crop_scale, ratio=args.crop_ratio)
    color = dict(jitter=args.jitter, jitter_p=args.jitter_p, gray_p=args.gray_p, solarize_p=0.0)
    blur = dict(blur_p=args.blur_p, blur_sigma=args.blur_sigma)
    view = common.View(**crop, **color, **blur, flip_p=args.flip_p)
    local = view._replace(size=args.local_size, area=args.local_scale)
    return [view] * len(VIEWS) * num_copies(args.resolutions) + [local] * 2 * args.local_crops


def draw_views(args, images, positives, index, sizes, draws):
    """Draw the views of images and of their positives: returns (cuts, colors), as common.ViewDataset needs them.

    The views are those of `augmentation`. While there are no positives, none of theirs is drawn. With --mix none, only
    the positive's key is, as nothing is pasted into the queries.

    images: the ImageSet. positives: (N, num_positives) int32, the table of positives; -1 if none are chosen yet. index,
    sizes, draws: as in common.ViewDataset; the last column of draws is extra, and chooses the positive.
    """
    # The last number chooses the partner: in each epoch one of the image's positives at random (ours)
    column = (draws[:, -1] * positives.shape[1]).astype(int)
    partner = positives.numpy()[index, column].astype(np.int64)
    have_positives = partner[0] >= 0
    image = index, sizes
    positive = (partner, images.sizes(partner)) if have_positives else None
    sources = [image, image, positive, positive][: len(view_names(args, have_positives))]
    of_local = [image, positive] if len(sources) == len(VIEWS) else [image]  # nothing is pasted where none is mixed

    views, copies = augmentation(args), num_copies(args.resolutions)
    draws = draws[:, :-1].reshape(len(index), len(views), common.VIEW_DRAWS)
    cuts, colors = [], []

    def draw(source, number, box_number):
        rows, row_sizes = source
        boxes, color = common.draw_view(views[number], row_sizes, draws[:, number])
        if box_number != number:
            boxes, _ = common.draw_view(views[number], row_sizes, draws[:, box_number])
        cuts.append((rows, boxes, views[number].size))
        colors.append(color)

    # A second copy has the boxes of the first, and colors and flips of its own (D4).
    for number in range(copies):
        for i, source in enumerate(sources):
            draw(source, number * len(VIEWS) + i, BOX_OF[i] if args.same_crop else i)
    for number in range(args.local_crops):
        for i, source in enumerate(of_local):
            view_number = copies * len(VIEWS) + 2 * number + i
            draw(source, view_number, view_number)
    return cuts, colors


def mix(args, x, partner, step, number=0):
    """Mix a batch with one share and one box, the same on every process (ours). Returns what `cutmix` returns.

    The share is drawn from Beta(alpha, alpha) (section 3.2.2), one per batch as in the code of CutMix. x, partner:
    (n, 3, H, W). step, number: seed share and box; number: 0 for the queries, 1 and up for local crops.
    """
    generator = common.generator(args.seed, step, STREAM_MIX + number)
    lam = np.random.default_rng(generator.initial_seed()).beta(args.alpha, args.alpha)
    return cutmix(x, partner, lam, generator)


def show_views(args, positives, loader, device):
    """Write the picture of --show-views: the views of one copy, local crops, and mixed queries."""
    if args.selection != "none":
        positives.random_(len(positives), generator=common.generator(args.seed))
        common.log("no encoder has chosen positives yet: those in the picture are random")
    views = common.colour_views(next(iter(loader)), device)
    names = view_names(args, args.selection != "none")
    shown = dict(zip(names, views, strict=False))  # the first copy
    of_local = ["local crop", "positive's local crop"][: 2 if names == VIEWS else 1]
    local_names = [f"{name} {number + 1}" for number in range(args.local_crops) for name in of_local]
    shown |= dict(zip(local_names, views[num_copies(args.resolutions) * len(names) :], strict=True))
    if names == VIEWS:
        shown["mixed query"], _ = mix(args, shown["query"], shown["positive's query"], step=0)
        for number in range(1, 1 + args.local_crops):
            local, partner = shown[f"local crop {number}"], shown[f"positive's local crop {number}"]
            shown[f"mixed local crop {number}"], _ = mix(args, local, partner, 0, number)
    common.save_views(args.show_views, list(shown.values()), list(shown))


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


# ---------------------------------------------------------------------- CLIM


def image_sizes(args):
    """Return the sides of the images that the encoder gets, in pixels."""
    return [*args.resolutions, *[args.local_size] * args.local_crops]


def resize(x, size):
    """Resize images (n, 3, S, S) to (n, 3, size, size), with antialiasing."""
    return x if x.shape[-1] == size else F.interpolate(x, (size, size), mode="bilinear", antialias=True)


class CLIM(nn.Module):
    """MoCo v2's query encoder, momentum encoder (for the keys) and queue, with mixed queries and several sizes.

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

    def forward(self, views, step, have_positives):
        """Return (loss, keys to enqueue (N, dim), (q, k), metrics {name: tensor}) of a batch. The loss is Eq. 6.

        views: this process's views (n, 3, H, W), normalised, as `draw_views` orders them. step: seeds CutMix's shares
        and boxes, and the shuffles of the keys. have_positives: False until they are chosen. The loss is MoCo's then,
        summed over the same pairs of sizes. q and k (n, dim) are queries and the images' own keys at the largest size,
        without gradient. Gradients reach the query encoder only.
        In Eq. 6, r is the query's size here, and r' that of both its keys (ours). Literally, r would be the size of the
        image's own views, and r' that of the positive's.
        """
        args, sizes, names = self.args, self.args.resolutions, view_names(self.args, have_positives)
        lam = 0.5  # without mixing, half the loss goes to each key (ours)

        def contrast(q, k, lam):  # q: (n, C), k: (1 or 2, n, C), the keys of the image and of its positive
            if have_positives:
                return clim_loss(q, k[0], k[1], self.queue.keys, args.temperature, lam)  # Eq. 4
            return info_nce(q, k[0], self.queue.keys, args.temperature)  # Eq. 1

        queries, keys = [], []
        for i, size in enumerate(sizes):
            first = sizes[:i].count(size) * len(names)  # a size that is named again has a copy of its own
            view = dict(zip(names, views[first : first + len(names)], strict=True))
            x, key_views = view["query"], [view["key"]]
            if have_positives:
                key_views.append(view["positive's key"])
                if args.mix == "cutmix":
                    x, lam = mix(args, x, view["positive's query"], step)  # Eq. 3: the same box at every size
            queries.append(self.query(resize(x, size)))
            # Both keys are encoded together (ours): a batch-norm group holds twice as many keys as queries
            shuffle = common.generator(args.seed, step, STREAM_SHUFFLE + i)
            keys.append(encode_shuffled_keys(self.key, [resize(v, size) for v in key_views], shuffle))  # (1 or 2, N, C)
        keys_here = [common.shard(k, dim=1) for k in keys]  # (1 or 2, n, C) for each size
        losses = [contrast(q, k, lam) for q, k in itertools.product(queries, keys_here)]
        anchor_keys = keys[0][0]  # the images' own keys at the largest size: only these enter the queue (ours)

        # Table 7's multi-crop: local crops are queries, mixed with the positive's, against the keys of the large views
        local_views = views[num_copies(sizes) * len(names) :]
        for number in range(args.local_crops):
            if names == VIEWS:
                x, partner = local_views[2 * number : 2 * number + 2]
                x, lam = mix(args, x, partner, step, 1 + number)
            else:
                x = local_views[number]
            losses.append(contrast(self.query(x), keys_here[0], lam))
        return sum(losses), anchor_keys, (queries[0].detach(), keys_here[0][0]), {}  # Eq. 6

    @torch.no_grad()
    def update(self, m):
        """Move the momentum encoder's parameters: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2), m in [0, 1]."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


# ================================================================= 5. training

# fmt: off
IMAGENET = common.defaults(HYPERPARAMETERS)
CIFAR = dict(  # ours: the values of moco_jointcrop.py, for comparison; as many images per cluster as on ImageNet
    IMAGENET, arch="resnet18", image_size=32, resolutions=(32,), patch_size=4, epochs=500, lr=0.5, min_lr=0.05,
    queue=4096, bn_groups=8, blur_p=0.0, norm="cifar10", num_clusters=400,
)
RECIPES = dict(
    patterns=dict(  # ours, for two CPU cores
        IMAGENET, arch="resnet_micro", image_size=32, resolutions=(32,), patch_size=4, epochs=45, batch_size=64,
        lr_batch=128, queue=128, blur_p=0.1, crop_scale=(0.3, 1.0), bn_groups=2, momentum=0.95, warmup=5.0,
        norm="patterns", num_clusters=32,
    ),
    cifar10=CIFAR,
    cifar100=dict(CIFAR, norm="cifar100"),
    stl10=dict(
        CIFAR, image_size=96, resolutions=(96,), patch_size=8, queue=8192, norm="imagenet", num_clusters=800,
    ),
    imagenet100=dict(IMAGENET, arch="resnet18", queue=16384, num_clusters=1000),  # ours
    imagenet=dict(IMAGENET, knn_every=50),  # its kNN takes minutes
    folder=dict(IMAGENET, queue="auto", num_clusters="auto"),  # ours: queue of a tenth of the images, 128 per cluster
)
SMALL_ENCODERS = dict(batch_size=256, lr=0.1, lr_batch=256, min_lr=0.0, momentum=0.99, blur_p=0.5)  # ours
# fmt: on


def recipe(chosen):
    """Return the hyper-parameters {name: value}.

    chosen: a namespace with dataset, arch, selection, resolutions, image_size and local_crops. All but dataset may be
    None.
    """
    values = dict(RECIPES[chosen.dataset])
    if chosen.arch in ("resnet_micro", "resnet_mini") and chosen.dataset in ("cifar10", "cifar100", "stl10", "folder"):
        values |= SMALL_ENCODERS
        if chosen.dataset == "folder":
            values["batch_size"] = 64  # a folder of one's own may be small
    if chosen.selection == "knn":
        values["knn_k"] = 10  # Table 6: the comparison with kNN takes positives from the nearest ten
    if chosen.resolutions:
        values["image_size"] = max(chosen.resolutions)  # views are cut at the largest size
    elif chosen.image_size not in (None, values["image_size"]):
        values["resolutions"] = (chosen.image_size,)  # another size of views is the only size
    elif chosen.selection == "none" or chosen.local_crops:
        values["resolutions"] = (values["image_size"],)  # the baseline, and Table 7's multi-crop
    return values


def parse_args(argv=None):
    """Return the command line (argv, or sys.argv's) as a namespace of all values. Exits with an error on a mistake."""
    run = dict(RUN, variant=("paper", "CLIM has no released code", ("paper",)))
    args, typed = common.parse("clim.py", __doc__, argv, HYPERPARAMETERS, dict(run=run), recipe)
    args.method, args.evaluated = "clim", "query"
    # What is not typed follows from other values
    usual = argparse.Namespace(**recipe(args))
    if "clim_start" not in typed:
        args.clim_start = min(args.clim_start, args.clim_start * args.epochs // usual.epochs)  # and a shorter wait
    if "local_size" not in typed:  # at most half of a view's side, in whole patches of a ViT
        patch_size = args.patch_size if common.is_vit(args.arch) else 1
        args.local_size = min(args.local_size, args.image_size // 2) // patch_size * patch_size
    args.resolutions = tuple(sorted(args.resolutions, reverse=True))  # the largest, at which views are cut, comes first
    if args.resolutions[0] != args.image_size:
        sizes = common.shown(args.resolutions)
        common.fail(f"--resolutions {sizes}: the largest must be the --image-size, {args.image_size}")
    common.check_schedule(args)
    args.bn_groups = batch_norm_groups(args, typed)
    if args.selection != "none" and args.clim_start >= args.epochs:
        common.log("warning: no positives will be chosen: give --clim-start a number below --epochs")
    return args


def schedule(args, step, steps_per_epoch):
    """Return (learning rate, weight decay, momentum of the momentum encoder) for a step, counted from 0.

    The rate warms up linearly from 0, then falls by a cosine to --min-lr. The other two are constant.
    """
    epoch = step / steps_per_epoch
    warmup = args.warmup if args.warmup * steps_per_epoch >= 1 else 0  # less than a step is none
    if epoch < warmup:
        lr = common.peak_rate(args) * epoch / warmup
    else:
        done = (epoch - warmup) / (args.epochs - warmup)
        lr = args.min_lr + (common.peak_rate(args) - args.min_lr) * (1 + math.cos(math.pi * done)) / 2
    return lr, args.weight_decay, args.momentum


def choice_is_due(args, epoch):
    """Return True if positives are chosen before this epoch, counted from 0 (App. A.2)."""
    since = epoch - args.clim_start
    return args.selection != "none" and since >= 0 and since % args.refresh_every == 0


def choose_positives(args, x, generator=None, neighbors=None):
    """Choose the table of positives by --selection (Table 6): embeddings x (N, C) -> (N, num_positives) int64.

    neighbors: (N, knn_k) int64, if they are known.
    """
    count = args.num_positives
    if args.selection == "random":
        one_cluster = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return random_members(one_cluster, count, generator)
    if args.selection == "knn":
        neighbors = nearest_neighbors(x, args.knn_k) if neighbors is None else neighbors
        return take(neighbors, torch.ones_like(neighbors, dtype=torch.bool), count, generator)
    centers, assignment = kmeans(x, args.num_clusters, args.kmeans_iterations, generator)
    if args.selection == "kmeans":
        return random_members(assignment, count, generator)
    return select_positives(x, centers, assignment, args.knn_k, count, generator, neighbors)


def refresh(args, model, images, device, epoch, positives):
    """Choose the table of positives anew, in place. Say the seconds and, if all have labels, the share of right ones.

    The embeddings are the momentum encoder's for centre crops (ours), not in bf16. positives: (N, num_positives) int32.
    """
    began = time.perf_counter()
    encoder = nn.Sequential(model.momentum_backbone, model.momentum_projector)
    workers = common.workers_of(args, device)
    features = common.extract_features(encoder, images, common.encoder_info(args), device, workers=workers)
    x = F.normalize(features, dim=1).to(device)

    common.progress(f"choosing positives for epoch {epoch + 1}")
    neighbors = None
    if args.selection in ("knn", "center"):  # each process finds those of its part of the images
        mine = common.shard(torch.arange(len(x), device=device))
        neighbors = common.gather_uneven(nearest_neighbors(x, args.knn_k, mine))
    generator = common.generator(args.seed, epoch, STREAM_POSITIVES)
    table = choose_positives(args, x, generator, neighbors).to(device)
    if dist.is_initialized():
        dist.broadcast(table, 0)  # the sums of k-means on CUDA differ in the last bits between processes
    positives.copy_(table)
    share, labels = "", torch.from_numpy(images.labels)
    if (labels >= 0).all():
        right = (labels[:, None] == labels[positives.long()]).float().mean()
        share = f"; {100 * right:.1f} % of them are of the image's own class"
    common.log(f"epoch {epoch + 1}: positives chosen in {time.perf_counter() - began:.1f} s{share}")


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
    args.out = args.out or f"runs/clim-{dataset}-{args.arch}-s{args.seed}{args.changes}"
    args.amp = "bf16" if common.use_bf16(args.amp, device, args.arch, image_sizes(args)) else "off"
    args.device = device.type

    # Data
    train, test = common.open_images(args, train, test)
    positives = torch.full((len(train), args.num_positives), -1, dtype=torch.int32)
    positives.share_memory_()  # so that the loader's workers see its changes
    draw = functools.partial(draw_views, args, train, positives)
    loader = common.make_loader(args, train, augmentation(args), device, draw, extra_draws=1)
    layout, norm = common.memory_format(device, args.arch), common.NORMS[args.norm]
    if args.show_views:
        return show_views(args, positives, loader, device)
    steps_per_epoch = len(train) // args.batch_size
    total_steps, rank = args.epochs * steps_per_epoch, common.rank_and_world()[0]
    last_step = min(args.max_steps or total_steps, total_steps)

    # Model and optimiser
    if args.queue == "auto":
        args.queue = min(65536, max(args.batch_size, len(train) // 10))
    if args.num_clusters == "auto":
        args.num_clusters = max(1, len(train) // 128)
    torch.manual_seed(args.seed)
    model = CLIM(args, common.copy_module(encoder)).to(device, memory_format=layout)
    model = split_batch_norms(model, args.bn_groups)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, args.lr, momentum=args.sgd_momentum, weight_decay=args.weight_decay)
    ddp = in_parallel(args, model)

    # The run's folder. The run goes on from its last.pt, if there is one. The lock keeps other runs out
    images = dict(number=len(train), checksum=train.checksum())
    lock = common.claim_folder(args.out)
    step, records = restore(args, images, model, optimizer, positives)
    save(args, step, records, images, model, optimizer, positives)
    terms = len(args.resolutions) ** 2 + args.local_crops  # of the loss, which is their sum
    chance = terms * math.log(args.queue + 1)  # the loss at equal logits
    facts = dict(peak_lr=common.peak_rate(args), terms=terms, chance_level=chance, queue_share=args.queue / len(train))
    introduce(args, train, test, **facts)

    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # the last epoch again: it may lack its kNN
        loader.batch_sampler.set_epoch(epoch, step, last_step)
        history = []
        # Positives are chosen every few epochs (App. A.2). A signal ends this at once: all is saved
        if choice_is_due(args, epoch) and step == epoch * steps_per_epoch:
            refresh(args, model, train, device, epoch, positives)
        have_positives = positives[0, 0].item() >= 0
        with common.until_stopped(loader) as batches:  # SIGTERM or Ctrl-C: the step is saved, then it raises Stopped
            for batch in batches:
                lr, _, momentum = schedule(args, step, steps_per_epoch)
                optimizer.param_groups[0]["lr"] = lr
                # A query view and a key view per image. Once positives are chosen, also views of one positive
                views = common.colour_views(batch, device, layout, norm)
                torch.manual_seed(common.generator(args.seed, step, STREAM_STEP, rank).initial_seed())  # for drop-path
                # The loss: Eq. 3 mixes the queries, and Eq. 6 sums Eq. 4 over all pairs of sizes
                loss, anchor_keys, (q, _), metrics = ddp(views, step, have_positives)
                # Update the query encoder. Then move the momentum encoder
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                grad_norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
                optimizer.step()
                model.update(momentum)
                average_statistics(model)
                # The images' own keys are negatives of the next steps
                model.queue.enqueue(anchor_keys)
                step += 1
                metrics |= dict(loss=loss, grad_norm=grad_norm)
                history.append({name: value.detach() for name, value in metrics.items()})
                if step % 10 == 0 or step == total_steps:
                    common.show_progress(args, loader, history, step, total_steps)
            ended = step == (epoch + 1) * steps_per_epoch
            if ended and history:
                record = dict(epoch=epoch + 1, step=step, **means(args, loader, history), lr=lr, momentum=momentum)
                records.append(record | dict(below_chance=chance - record["loss"], **common.embedding_health(q)))
            save(args, step, records, images, model, optimizer, positives)
        if ended:
            due = args.knn_every and ((epoch + 1) % args.knn_every == 0 or epoch + 1 == args.epochs)
            if test is not None and due and "knn20_top1" not in records[-1]:
                records[-1] |= common.knn_record(args, model.backbone, train, test, device)
                save(args, step, records, images, model, optimizer, positives)
            common.log_epoch(args, records[-1])
        if step >= last_step:
            break

    lock.close()
    common.log_end(args, step, total_steps)


# =============================================================== 6. machinery


def restore(args, images, model, optimizer, positives):
    """Load the run in --out, or --resume's, or --init's weights only. Return (steps done, records of the epochs).

    positives: the table, which is changed in place.
    """
    path, state = common.load_run(args, images, args.resume)
    if state["step"] > 0:
        with common.fitting(path):
            model.load_state_dict(state["model"])
            # Only its buffers: rates and weight decay are this run's, which may differ from --resume's
            optimizer.load_state_dict(optimizer.state_dict() | dict(state=state["optimizer"]["state"]))
            if args.selection != "none":  # --resume's run may have had positives
                positives.copy_(state["positives"])
    elif args.init:
        weights, _ = common.fitting_weights(args.init, model.backbone, args.init_prefix)
        model.backbone.load_state_dict(weights)
        model.momentum_backbone.load_state_dict(weights)
    return state["step"], state["records"]


def save(args, step, records, images, model, optimizer, positives):
    """Write last.pt, which is all that a run needs to go on, and what follows from it, each whole or not at all."""
    out, info = Path(args.out), common.encoder_info(args)
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, records=records)
    state |= dict(config=vars(args), images=images, backbone=info, positives=positives)
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
