"""CLIM: Center-wise Local Image Mixture (Li et al., ICLR 2021 submission, arXiv 2011.02697), on MoCo v2.

MoCo's only positives are views of the same image. CLIM adds other images as positives. Every few epochs it embeds all
images, clusters them, and finds the nearest neighbours of each. The positives of an image are those of its neighbours
that share its cluster and lie closer to the cluster's center than the image itself. So similar images move together,
towards the centers.

Some of these positives are wrong, so the loss does not trust them fully. CutMix pastes a box of the positive into the
image. The query is the embedding of this mix. Its loss has two terms, with the keys of the image and of the positive.
Each counts by its share of the pixels. Multi-resolution is a second augmentation: the same crop is encoded at several
sizes, and the query of every size is compared with the keys of every size.

    Eq. 1              info_nce; nce in clim_loss                 MoCo v2's loss; each term of Eq. 4
    Eq. 2, App. A.2    kmeans, nearest_neighbors, select_positives
    Eq. 3              cutmix, mix_views
    Eq. 4              clim_loss
    Eq. 5              (not computed)                             it defines the scale of a crop
    Eq. 6              CLIM.forward                               the sum over pairs of sizes
    Table 6            choose_positives, --selection, --mix       other choices, at CLIM's times (ours); no mixing

    python clim.py                                                            # a laptop, no data
    python clim.py --dataset cifar10 --selection none                         # the baseline, MoCo v2, on one GPU
    torchrun --nproc_per_node=8 clim.py --dataset imagenet --data-dir DIR

The baseline is MoCo v2. It is exactly `--selection none`, of one resolution. What CLIM changes in it (MoCo v2 | here):
    (no positives)                            a choice of positives every few epochs      kmeans, ..., refresh
    one query view and one key view           also two views of one positive              draw_views
    q = query(view)                           q = query(view mixed with the positive's)   mix_views, cutmix
    k = key(view)                             key k of the image, k' of its positive      CLIM.forward
    info_nce(q, k, queue, tau)                clim_loss(q, k, k', queue, tau, lambda)     CLIM.contrast
    one size                                  a sum over all pairs of sizes               CLIM.forward
Tables 6, 8 and 9 take one resolution: `--dataset imagenet --resolutions 224`, and the flags whose help names the table.
Table 7 is `--resolutions 224 96` and so on. Its multi-crop is `--local-crops 2`.
Not here: detection and segmentation on VOC, COCO and LVIS (Tables 3 to 5), Table 10, and the t-SNE of Fig. 3.

There is no released code. Where the paper is silent, this file decides, and says "ours" there. What differs:
    D1 The image itself. Paper: it fulfils Eq. 2, as an equality. Here: it is no positive, unless it is the only image.
    D2 Too few positives. Paper (App. A.2): the nearest of the remaining 40 neighbours. Here: read as those that Eq. 2
       excludes, nearest first, although that contradicts Eq. 2.
    D3 The sum of Eq. 6. Paper and here: a sum, of four terms for two sizes, which raises the effective learning rate.
       Local crops add their terms. Paper: r is the size of the image's views, r' of the positive's. Here: r is the size
       of the query, r' of both its keys.
    D4 The sizes {224, 224} of Table 7. Paper: silent. Here: both have one crop with its colors, one is mirrored.
    D5 Crops of multi-resolution. Paper (section 3.3): fixed over the sizes. Here: so for a view, but query and key have
       crops of their own. `--same-crop` is the other reading: a key has the crop of its query.
    D6 Multi-crop. Paper (4.4): sizes, areas. Here (ours): local crops are queries, mixed with the positive's own.
What differs by rounding, by an index or by precision is in tests/golden/README.md.
"""

import argparse
import copy
import functools
import itertools
import math
import time

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
    recipe=dict(variant=("paper", "CLIM has no released code", ("paper",))),
    loss=dict(
        same_crop=(False, "a key has the crop of its query (D5)"),
        local_crops=(0, "local crops per image, as queries (Table 7, D6)", (0, 2)),
        mix=("cutmix", "none: no mixing, half the loss to each key (Table 6)", ("cutmix", "none")),
        alpha=(2.0, "parameter of CutMix's Beta(alpha, alpha) (Table 9)", (1e-9, math.inf)),
        temperature=(0.2, "temperature tau of the loss", (1e-9, math.inf)),  # MoCo v2's
        queue=(65536, "negatives per query; auto: a tenth of the images, at least a batch", (1, math.inf, "auto")),
    ),
    positives=dict(
        selection=("center", "choice of positives (Table 6)", ("none", "random", "knn", "kmeans", "center")),
        num_clusters=(10000, "clusters, m (Table 8); auto: one per 128 images", (1, math.inf, "auto")),
        kmeans_iterations=(20, "iterations of k-means", (1, math.inf)),  # ours; faiss: 25, of <= 256 images per cluster
        knn_k=(40, "nearest neighbours, k (Table 8)", (1, math.inf)),
        num_positives=(10, "positives per image (App. A.2)", (1, math.inf)),
        refresh_every=(5, "epochs between choices of positives", (1, math.inf)),
        clim_start=(5, "epochs of MoCo v2 before the first choice of positives"),  # ours
    ),
    model=dict(
        arch=("resnet50", "encoder: resnet_micro, resnet18, resnet50, vit_small, ..., or any timm model"),
        image_size=(224, "side of a view, in pixels", (1, math.inf)),
        resolutions=([224, 160], "sides at which views are encoded (Table 7); empty: --image-size", (1, math.inf)),
        patch_size=(16, "side of a ViT's patch, in pixels", (1, math.inf)),
        dim=(128, "dimension of queries and keys", (1, math.inf)),
        bn_groups=(16, "slices of the batch with batch-norm statistics of their own, as on GPUs", (1, math.inf)),
        momentum=(0.999, "momentum m of the momentum encoder", (0, 1)),
    ),
    schedule=dict(
        epochs=(200, "epochs of the whole training", (1, math.inf)),  # section 4.4; App. A: 1,200
        batch_size=(512, "images per step, over all processes", (2, math.inf)),
        lr=(0.06, "peak learning rate at --lr-batch; scaled linearly to --batch-size", (1e-9, math.inf)),
        lr_batch=(512, "batch size for which the learning rates are given", (1, math.inf)),
        min_lr=(0.0, "last learning rate, scaled as --lr is"),
        warmup=(0.0, "epochs of linear warm-up, at most a quarter of the run"),
        weight_decay=(1e-4, "weight decay of SGD"),
        sgd_momentum=(0.9, "momentum of SGD", (0, 0.999999)),
    ),
    augmentation=dict(
        crop_scale=((0.2, 1.0), "smallest and largest share of the image that a crop has", (1e-9, 1)),
        local_size=(96, "side of a local crop, in pixels", (1, math.inf)),  # Table 7
        local_scale=((0.05, 0.14), "smallest and largest area of a local crop", (1e-9, 1)),  # section 4.4
        crop_ratio=((3 / 4, 4 / 3), "smallest and largest width / height of a crop", (1e-9, math.inf)),
        interpolation=("bilinear", "how a crop is resized", ("bilinear", "bicubic")),
        jitter=((0.4, 0.4, 0.4, 0.1), "largest change of brightness, contrast, saturation and hue"),  # MoCo v2's
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
    keys_fit = q.dim() == 2 and k_anchor.shape == q.shape and k_positive.shape == q.shape
    if not keys_fit or queue.shape[1:] != q.shape[1:] or np.shape(lam) not in ((), (len(q),)):
        shapes = f"q {tuple(q.shape)}, k_anchor {tuple(k_anchor.shape)}, k_positive {tuple(k_positive.shape)}"
        shapes += f", queue {tuple(queue.shape)} and lam {tuple(np.shape(lam))}"
        raise ValueError(f"clim_loss takes q, k_anchor, k_positive (N, C), queue (K, C), lam () or (N,), not {shapes}")
    negatives = q @ queue.T
    target = torch.zeros(len(q), dtype=torch.int64, device=q.device)

    def nce(k):  # Eq. 1 for each query: (N,)
        logits = torch.cat([(q * k).sum(1, keepdim=True), negatives], dim=1) / temperature
        return F.cross_entropy(logits, target, reduction="none")

    return (lam * nce(k_anchor) + (1 - lam) * nce(k_positive)).mean()  # Eq. 4


def cutmix(x, partner, lam, generator=None):
    """Mix two batches of images (Eq. 3): returns (mixed images, the share of x that is left in them).

    A box of about (1 - lam) of the area of x is replaced by the same box of the partner. The box has the image's aspect
    ratio. Its center is uniform in the image. The part of it that lies outside the image is dropped, so the share can
    exceed lam. Use the share, not lam, as the weight in the loss.

    x, partner: (N, C, H, W); row i of partner is pasted into row i of x. lam: the wanted share of x, in [0, 1], often
    drawn from Beta(alpha, alpha); a float for one box in all images, or (N,) for a box per image. generator: a torch
    CPU generator; torch's global one if None. The share is a float, or (N,) like x if lam is (N,). Raises ValueError
    if shapes do not fit or lam is not in [0, 1]. Source: the code of CutMix (Yun et al., arXiv 1905.04899).
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
        center = (torch.rand(len(side), dtype=torch.float64, generator=generator) * size).long()
        half = (side * size).long() // 2
        return (center - half).clamp(0, size)[:, None], (center + half).clamp(0, size)[:, None]

    top, bottom = interval(height)
    left, right = interval(width)
    row, column = torch.arange(height), torch.arange(width)
    in_rows = (row >= top) & (row < bottom)  # (boxes, H)
    in_columns = (column >= left) & (column < right)  # (boxes, W)
    in_box = (in_rows[:, None, :, None] & in_columns[:, None, None, :]).to(x.device, non_blocking=True)  # 1 - M
    mixed = torch.where(in_box, partner, x)  # Eq. 3: x where the mask M is 1
    kept = 1 - ((bottom - top) * (right - left)).flatten().double() / (height * width)
    return mixed, (kept.to(x) if share.dim() else kept.item())


# ------------------------------- choice of positives (section 3.2.1 and App. A.2)


@torch.no_grad()
def nearest_neighbors(x, k, rows=None):
    """Return the k nearest other rows of each row by L2 distance, nearest first: (n, min(k, N - 1)) int64.

    x: (N, C), better in float64: float32 confuses near copies. rows: (n,) int64, the rows whose neighbours are wanted;
    all if None. A row is not its own neighbour, unless it is the only one (D1). Raises ValueError if the shape of x or
    k does not fit.
    """
    if x.dim() != 2 or len(x) == 0 or k < 1:
        raise ValueError(f"nearest_neighbors takes x (N, C) with N > 0, and k > 0, not x {tuple(x.shape)} and k {k}")
    k = min(k, max(1, len(x) - 1))
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    neighbors = []
    for chunk in rows.split(128):  # on ImageNet 1.3 GB of distances
        distance = torch.cdist(x[chunk], x).float().clamp_min(1e-7)  # rounded, so that copies are equally far
        distance.scatter_(1, chunk[:, None], math.inf)  # from a row to itself
        neighbors.append(distance.topk(k, largest=False).indices)
    return torch.cat(neighbors)


@torch.no_grad()
def kmeans(x, num_clusters, iterations=20, generator=None):
    """Run Lloyd's k-means by L2 distance. Return (centers (m, C), assignment (N,) int64 of each row to its center).

    x: (N, C); its rows are used as given, not normalised. m is min(num_clusters, N). The first centers are random rows.
    If clusters come out empty, they start anew at the rows that are farthest from their centers. Exactly `iterations`
    are made; there is no test of convergence. generator: a torch CPU generator; torch's global one if None. No
    gradient. Raises ValueError if the shape of x or a number does not fit.
    """
    if x.dim() != 2 or len(x) == 0 or num_clusters < 1 or iterations < 0:
        given = f"x {tuple(x.shape)}, {num_clusters} clusters and {iterations} iterations"
        raise ValueError(f"kmeans takes x (N, C) with N > 0, 1 cluster or more, and 0 iterations or more, not {given}")

    def nearest(centers):
        return torch.cat([torch.cdist(rows, centers).argmin(1) for rows in x.split(1024)])

    centers = x[torch.randperm(len(x), generator=generator)[:num_clusters].to(x.device)]
    for _ in range(iterations):
        assignment = nearest(centers)
        count = assignment.bincount(minlength=len(centers))
        empty = torch.nonzero(count == 0).flatten()
        farthest = (x - centers[assignment]).square().sum(1).topk(len(empty)).indices
        centers = torch.zeros_like(centers).index_add_(0, assignment, x) / count.clamp_min(1)[:, None]
        centers[empty] = x[farthest]
    return centers, nearest(centers)


def preferred_first(neighbors, preferred, count, generator=None):
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
    center as the image is. num_positives random ones are chosen. If there are fewer, the nearest of the other
    neighbours are added (D2). If the neighbours are too few, they repeat.

    x: (N, C), one embedding per image. centers: (m, C), and assignment: (N,) int64, the number of each image's center:
    of `kmeans`. generator: a torch CPU generator; torch's global one if None. neighbors: (N, k) int64, if they are
    known, which leaves k unused; else it needs `nearest_neighbors`. No gradient. Raises ValueError if the shapes do not
    fit. It needs `preferred_first`.
    """
    neighbors = nearest_neighbors(x, k) if neighbors is None else neighbors
    matrices = x.dim() == neighbors.dim() == centers.dim() == 2 and centers.shape[1] == x.shape[1]
    if not matrices or len(neighbors) != len(x) or assignment.shape != x.shape[:1] or num_positives < 1:
        given = f"{[tuple(a.shape) for a in (x, neighbors, centers, assignment)]} and {num_positives} positives"
        raise ValueError(f"select_positives takes (N, C), (N, k), (m, C), (N,) and 1 positive or more, not {given}")
    same_cluster = assignment[neighbors] == assignment[:, None]  # neighbours in Omega_1; all are in Omega_2
    to_center = (x - centers[assignment]).square().sum(1)  # each image's squared distance
    closer = to_center[neighbors] <= to_center[:, None]  # the inequality of Eq. 2
    return preferred_first(neighbors, same_cluster & closer, num_positives, generator)  # Eq. 2's Omega_p is preferred


def random_members(assignment, count, generator=None):
    """Draw `count` other rows of each row's own cluster: (N,) int64 -> (N, count) int64. They may repeat.

    A row that is alone in its cluster gets rows of any cluster. If it is the only row, it gets itself (D1).
    """
    n = len(assignment)
    by_cluster = assignment.argsort(stable=True)  # rows of cluster 0, then of cluster 1, ...
    place = by_cluster.argsort()  # of each row in by_cluster
    sizes = assignment.bincount()
    size, first = sizes[assignment], (sizes.cumsum(0) - sizes)[assignment]  # of the row's cluster in by_cluster
    size, first = torch.where(size == 1, n, size), torch.where(size == 1, 0, first)
    random = torch.rand(n, count, dtype=torch.float64, generator=generator).to(assignment.device)
    other = (random * (size - 1)[:, None]).long()
    other += other >= (place - first)[:, None]  # the row itself is passed over
    return by_cluster[(first[:, None] + other).clamp_max(n - 1)]


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
    """Return the views of an image, {name: View}: query, key, local crops. All are drawn as in MoCo v2 (App. A)."""
    crop = dict(size=args.image_size, area=args.crop_scale, ratio=args.crop_ratio)
    color = dict(jitter=args.jitter, jitter_p=args.jitter_p, gray_p=args.gray_p, solarize_p=0.0)
    blur = dict(blur_p=args.blur_p, blur_sigma=args.blur_sigma)
    view = common.View(**crop, **color, **blur, flip_p=args.flip_p)
    local = view._replace(size=args.local_size, area=args.local_scale)
    return dict(query=view, key=view) | {f"local crop {i + 1}": local for i in range(args.local_crops)}


def draw_views(args, images, positives, index, sizes, draws):
    """Draw the views of images, then those of one positive of each: (cuts, colors), as common.ViewDataset needs them.

    images: the ImageSet. positives: (N, num_positives) int32, the table of positives; -1 until they are chosen: then
    only the images' own views are drawn. index, sizes, draws: as in common.ViewDataset; the last of draws is extra.
    """
    views = [*augmentation(args).values()]
    # VIEW_DRAWS columns per view, in this order of old; the last column chooses the positive
    *view_draws, choice = np.split(draws, common.VIEW_DRAWS * np.arange(1, 2 * len(views) + 1), axis=1)
    query, key, positive_key, positive_query, *crops = view_draws  # crops: the image's, its positive's, ...
    column = (choice[:, 0] * positives.shape[1]).astype(int)  # in each epoch one of the positives at random (ours)
    positive = positives.numpy()[index, column].astype(np.int64)
    sources = [(index, sizes, [query, key, *crops[::2]])]
    if args.selection != "none" and positive[0] >= 0:
        sources.append((positive, images.sizes(positive), [positive_query, positive_key, *crops[1::2]]))
    cuts, colors = [], []
    for rows, row_sizes, numbers in sources:
        drawn = [common.draw_view(view, row_sizes, number) for view, number in zip(views, numbers, strict=True)]
        boxes, view_colors = map(list, zip(*drawn, strict=True))
        if args.same_crop:
            boxes[1] = boxes[0]  # a key has the crop of its query (D5)
        cuts += [(rows, box, view.size) for view, box in zip(views, boxes, strict=True)]
        colors += view_colors
    return cuts, colors


def mix_views(views, mix, alpha, generators):
    """Mix the queries of a batch (Eq. 3) by `cutmix`: (query, key views, lam, local crops), which CLIM.forward takes.

    A share is drawn from Beta(alpha, alpha) (section 3.2.2), one per batch as in the code of CutMix. views: a list of
    (n, 3, H, W), in the order of `draw_views`. mix: "cutmix" or "none". generators: a torch CPU generator for the query
    and for each local crop. They are the same on every process, and so are share and box (ours).
    """
    count = 1 + len(generators)
    query, key, *crops = views[:count]
    if len(views) == count:  # MoCo v2, until positives are chosen
        return query, [key], 1.0, [(crop, 1.0) for crop in crops]
    positive_query, positive_key, *positive_crops = views[count:]
    if mix == "none":  # half the loss to each key (ours)
        return query, [key, positive_key], 0.5, [(crop, 0.5) for crop in crops]
    mixed = []
    for x, partner, generator in zip([query, *crops], [positive_query, *positive_crops], generators, strict=True):
        lam = np.random.default_rng(generator.initial_seed()).beta(alpha, alpha)
        mixed.append(cutmix(x, partner, lam, generator))
    (query, lam), *crops = mixed
    return query, [key, positive_key], lam, crops


def show_views(args, positives, loader, device):
    """Write the picture of --show-views: the views of images and of random positives, and mixed queries."""
    if args.selection != "none":  # no encoder has chosen positives yet
        positives.random_(len(positives), generator=common.generator(args.seed))
    views = common.color_views(next(iter(loader)), device)
    own = [*augmentation(args)]
    names = own + [f"random positive's {name}" for name in own]
    if args.selection != "none" and args.mix == "cutmix":
        generators = [common.generator(args.seed, i) for i in range(len(own) - 1)]
        query, _, _, crops = mix_views(views, args.mix, args.alpha, generators)
        views += [query, *[crop for crop, _ in crops]]
        names += [f"mixed {name}" for name in own if name != "key"]
    common.save_views(args.show_views, views, names[: len(views)])


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


# ---------------------------------------------------------------------- CLIM


def resize(x, size, mirrored=False):
    """Resize images (n, 3, S, S) to (n, 3, size, size), with antialiasing, and perhaps mirror them."""
    x = x if x.shape[-1] == size else F.interpolate(x, (size, size), mode="bilinear", antialias=True)
    return x.flip(-1) if mirrored else x


class CLIM(nn.Module):
    """MoCo v2's query encoder, momentum encoder (for the keys) and queue, with mixed queries and several sizes.

    Copy it with clim_loss, info_nce, resize, Queue, gather, shard and encode_shuffled_keys; mix_views needs cutmix.
    backbone: (n, 3, H, W) -> (n, width). sizes: of the views, largest first. amp: in bf16. generator: see `Queue`.
    """

    def __init__(self, backbone, width, sizes, dim=128, queue=65536, temperature=0.2, amp=False, generator=None):
        super().__init__()
        self.sizes, self.temperature, self.amp = sizes, temperature, amp
        self.backbone = backbone
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(queue, dim, generator)

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        """Return the momentum encoder's keys of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def contrast(self, q, keys, lam):
        """Eq. 4 of q (n, dim) and keys (2, n, dim), of images and positives; Eq. 1 if there are no positives' keys."""
        if len(keys) == 1:
            return info_nce(q, keys[0], self.queue.keys, self.temperature)
        return clim_loss(q, keys[0], keys[1], self.queue.keys, self.temperature, lam)

    def forward(self, query, key_views, lam, local_crops=(), generators=None):
        """Return (loss, keys to enqueue (N, dim), queries (n, dim), {name: metric}). The loss is Eq. 6.

        query: this process's images (n, 3, H, W), normalised; once there are positives, mixed with these. lam: the
        share of the image in the mix. key_views: another view of each image and, once there are positives, a view of
        each of these, a list of one or two. local_crops: list of (further queries, their lam). generators: a torch CPU
        generator for each size, the same on every process, to shuffle the keys; torch's global one if None.
        Only the images' own keys at the largest size are to be enqueued (ours). Only the loss has a gradient. It
        reaches the query encoder only.
        """
        generators = generators or [None] * len(self.sizes)
        q, keys = [], []
        for i, size in enumerate(self.sizes):
            mirrored = size in self.sizes[:i]  # D4
            q.append(self.query(resize(query, size, mirrored)))
            # Both keys are encoded together (ours): a batch-norm group holds twice as many keys as queries
            views = [resize(view, size, mirrored) for view in key_views]
            keys.append(encode_shuffled_keys(self.key, views, generators[i]))  # (1 or 2, N, dim)
        k = [shard(x, dim=1) for x in keys]  # this process's, (1 or 2, n, dim)

        # Eq. 6: the queries of every size with the keys of every size
        losses = [self.contrast(*pair, lam) for pair in itertools.product(q, k)]
        # Table 7's multi-crop: local crops are queries, too, of the keys at the largest size (D6)
        losses += [self.contrast(self.query(crop), k[0], share) for crop, share in local_crops]
        loss = sum(losses)
        return loss, keys[0][0], q[0].detach(), dict(loss=loss.detach())

    @torch.no_grad()
    def update(self, m):
        """Move the momentum encoder's parameters: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2), m in [0, 1]."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


# ================================================================= 5. training

STREAM_EPOCH, STREAM_QUEUE, STREAM_POSITIVES, STREAM_SHUFFLE = 0, 4, 5, 20  # random streams, see common.generator
STREAM_MIX = 30  # of the queries; 31 and up are of the local crops

# fmt: off
IMAGENET = common.defaults(HYPERPARAMETERS)
CIFAR = dict(  # ours: the values of moco_jointcrop.py, for comparison; as many images per cluster as on ImageNet
    IMAGENET, arch="resnet18", image_size=32, resolutions=(), patch_size=4, epochs=500, lr=0.5, min_lr=0.05,
    queue=4096, bn_groups=8, blur_p=0.0, local_size=16, norm="cifar10", num_clusters=400,
)
RECIPES = dict(
    patterns=dict(  # ours, for two CPU cores
        IMAGENET, arch="resnet_micro", image_size=32, resolutions=(), patch_size=4, epochs=45, batch_size=64,
        lr_batch=128, queue=128, blur_p=0.1, crop_scale=(0.3, 1.0), local_size=16, bn_groups=2, momentum=0.95,
        warmup=5.0, norm="patterns", num_clusters=32,
    ),
    cifar10=CIFAR,
    cifar100=dict(CIFAR, norm="cifar100"),
    stl10=dict(CIFAR, image_size=96, patch_size=8, queue=8192, local_size=48, norm="imagenet", num_clusters=800),
    imagenet100=dict(IMAGENET, arch="resnet18", queue=16384, num_clusters=1000),  # ours
    imagenet=dict(IMAGENET, knn_every=50),  # its kNN takes minutes
    folder=dict(IMAGENET, queue="auto", num_clusters="auto", bn_groups=2),  # ours: a folder of one's own may be small
)
SMALL_ENCODERS = dict(batch_size=256, lr=0.1, lr_batch=256, min_lr=0.0, momentum=0.99, blur_p=0.5)  # ours
# fmt: on


def recipe(chosen):
    """Return the hyper-parameters {name: value}. chosen: what is given, a namespace, with None for the rest."""
    values = dict(RECIPES[chosen.dataset])
    if chosen.arch in ("resnet_micro", "resnet_mini") and chosen.dataset in ("cifar10", "cifar100", "stl10", "folder"):
        values |= SMALL_ENCODERS
        if chosen.dataset == "folder":
            values["batch_size"] = 64
    if chosen.selection == "knn":
        values["knn_k"] = 10  # section 4.4: for Table 6, positives are taken from the nearest ten
    if chosen.selection == "none" or chosen.local_crops or chosen.image_size:
        values["resolutions"] = ()  # the baseline, Table 7's multi-crop, and another size of views are of one size
    if chosen.resolutions:
        values["image_size"] = max(chosen.resolutions)  # views are cut at the largest
    if chosen.image_size:  # local crops follow it: at most half of a view's side, in whole patches
        patch_size = chosen.patch_size or values["patch_size"]
        values["local_size"] = min(values["local_size"], chosen.image_size // 2) // patch_size * patch_size
    return values


def parse_args(argv=None):
    """Return the command line (argv, or sys.argv's) as a namespace of all values. Exits with an error on a mistake."""
    args = common.parse("clim", __doc__, argv, HYPERPARAMETERS | common.RUN, recipe)
    args.resolutions = tuple(sorted(args.resolutions or (args.image_size,), reverse=True))
    if args.resolutions[0] != args.image_size:  # at which views are cut
        common.fail(f"--resolutions {args.resolutions}: the largest must be the --image-size, {args.image_size}")
    if args.selection != "none" and args.clim_start >= args.epochs:
        common.fail(f"--clim-start {args.clim_start} is not below --epochs {args.epochs}: no positives would be chosen")
    return args


def learning_rate(args, epoch):
    """Return the learning rate at a time, in epochs from 0: a linear warm-up from 0, then a cosine down to --min-lr."""
    peak, last = (lr * args.batch_size / args.lr_batch for lr in (args.lr, args.min_lr))
    warmup = min(args.warmup, args.epochs / 4)
    if epoch < warmup:
        return peak * epoch / warmup
    done = (epoch - warmup) / (args.epochs - warmup)
    return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2


def choice_is_due(args, epoch, positives):
    """Return True if positives are chosen before this epoch, counted from 0 (App. A.2). A table of -1 is not chosen."""
    since = epoch - args.clim_start
    return args.selection != "none" and since >= 0 and (since % args.refresh_every == 0 or bool(positives[0, 0] < 0))


def choose_positives(args, x, neighbors, generator=None):
    """Choose the table of positives by --selection (Table 6): (N, num_positives) int64.

    x: (N, C), embeddings. neighbors: (N, knn_k) int64, of `nearest_neighbors`, for --selection knn and center.
    """
    if args.selection == "random":
        return random_members(torch.zeros(len(x), dtype=torch.int64, device=x.device), args.num_positives, generator)
    if args.selection == "knn":
        return preferred_first(neighbors, neighbors >= 0, args.num_positives, generator)
    num_clusters = max(1, len(x) // 128) if args.num_clusters == "auto" else args.num_clusters
    centers, assignment = kmeans(x, num_clusters, args.kmeans_iterations, generator)
    if args.selection == "kmeans":
        return random_members(assignment, args.num_positives, generator)
    return select_positives(x, centers, assignment, args.knn_k, args.num_positives, generator, neighbors)


def refresh(args, info, model, images, device, epoch, positives):
    """Choose the table of positives anew, in place. Say the seconds and, if all have labels, the share of right ones.

    The embeddings are the momentum encoder's for center crops (ours), not in bf16. Neighbours and clusters are found in
    float64: float32 confuses near copies. positives: (N, num_positives) int32.
    """
    began = time.perf_counter()
    encoder = nn.Sequential(model.momentum_backbone, model.momentum_projector)
    features = common.extract_features(encoder, images, info, device, workers=args.workers)
    x = F.normalize(features, dim=1).double().to(device)

    common.progress(f"choosing positives for epoch {epoch + 1}")
    neighbors = None
    if args.selection in ("knn", "center"):  # each process finds those of its part of the images
        mine = common.shard(torch.arange(len(x), device=device))
        neighbors = common.gather_uneven(nearest_neighbors(x, args.knn_k, mine))
    generator = common.generator(args.seed, epoch, STREAM_POSITIVES)
    table = choose_positives(args, x, neighbors, generator).to(device)
    if dist.is_initialized():
        dist.broadcast(table, 0)  # the sums of k-means on CUDA differ in the last bits between processes
    positives.copy_(table)
    share, labels = "", torch.from_numpy(images.labels)
    if (labels >= 0).all():
        right = (labels[:, None] == labels[positives.long()]).float().mean()
        share = f"; {100 * right:.1f} % of them are of the image's own class"
    common.log(f"epoch {epoch + 1}: positives chosen in {time.perf_counter() - began:.1f} s{share}")


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
    positives = torch.full((len(train), args.num_positives), -1, dtype=torch.int32)
    positives.share_memory_()  # so that the loader's workers see its changes
    draw = functools.partial(draw_views, args, train, positives)  # an image's views, and its positive's
    loader = common.make_loader(args, train, 2 * [*declared.values()], device, draw, extra_draws=1)
    layout, norm = common.memory_format(device, args.arch), common.NORMS[args.norm]
    if args.show_views:
        return show_views(args, positives, loader, device)

    # Model and optimizer
    torch.manual_seed(args.seed)
    info = common.encoder_info(args, method="clim", encoder="query")  # the encoder that is evaluated
    backbone = common.build_backbone(info) if encoder is None else common.copy_module(encoder)
    sizes = {*args.resolutions, *(view.size for view in declared.values())}  # section 3.3
    width = common.output_width(backbone, *sizes, check_gradient=True)
    amp = common.use_bf16(args.amp, device, args.arch, sizes)
    negatives = args.queue if args.queue != "auto" else min(65536, max(args.batch_size, len(train) // 10))
    first_keys = common.generator(args.seed, STREAM_QUEUE)
    model = CLIM(backbone, width, args.resolutions, args.dim, negatives, args.temperature, amp, generator=first_keys)
    groups = common.slices_per_process(args, "bn_groups")
    model = split_batch_norms(model, groups)
    model.to(device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=args.sgd_momentum, weight_decay=args.weight_decay)

    # The run
    config = common.open_run(args, train)
    state = dict(model=model, optimizer=optimizer, positives=positives)
    records = common.load_run(args, config, state)  # one for each epoch that is done
    if args.compile:
        model.backbone.compile()
        model.momentum_backbone.compile()
    ddp = DistributedDataParallel(model, find_unused_parameters=encoder is not None) if dist.is_initialized() else model
    ddp.broadcast_buffers = False  # at each step; when it is made, all get the first process's weights and buffers
    facts = dict(batch_norm_groups=groups * world, bf16=amp, negatives=negatives)
    terms = len(args.resolutions) ** 2 + args.local_crops  # of the loss, which is their sum
    facts |= dict(loss_at_uniform_logits=terms * math.log(negatives + 1))
    common.log_table(args, HYPERPARAMETERS | common.RUN, train=train, test=test, **facts)

    # The last epoch's kNN, if a kill came before it
    common.add_knn(args, config, info, state, records, model.backbone, train, test, device, amp)
    for epoch in range(len(records), args.epochs):
        loader.batch_sampler.epoch = epoch
        torch.manual_seed(common.generator(args.seed, epoch, STREAM_EPOCH, rank).initial_seed())  # for drop-path
        if choice_is_due(args, epoch, positives):  # every few epochs (App. A.2)
            refresh(args, info, model, train, device, epoch, positives)
        history, began = [], time.perf_counter()
        for step, batch in enumerate(loader, epoch * len(loader)):
            lr = learning_rate(args, step / len(loader))
            for group in optimizer.param_groups:
                group["lr"] = lr
            # A query and a key view per image, colored here. Once positives are chosen, also views of one positive
            views = common.color_views(batch, device, layout, norm)
            # The loss: Eq. 3 mixes the queries, and Eq. 6 sums Eq. 4 over all pairs of sizes
            mixes = [common.generator(args.seed, step, STREAM_MIX + i) for i in range(1 + args.local_crops)]
            query, key_views, lam, crops = mix_views(views, args.mix, args.alpha, mixes)
            shuffles = [common.generator(args.seed, step, STREAM_SHUFFLE + i) for i in range(len(args.resolutions))]
            loss, keys, q, metrics = ddp(query, key_views, lam, crops, shuffles)
            # Update the query encoder. Then move the momentum encoder
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            model.update(args.momentum)
            # The images' own keys are negatives of the next steps
            model.queue.enqueue(keys)
            history.append(metrics | dict(grad_norm=grad_norm))
            if (step + 1) % 10 == 0:
                common.show_progress(args, history, began, step + 1, args.epochs * len(loader))

        average_statistics(model)
        record = dict(epoch=epoch + 1, lr=lr)
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
