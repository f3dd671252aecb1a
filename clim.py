"""CLIM: Center-wise Local Image Mixture (Li et al., ICLR 2021 submission, arXiv 2011.02697), on MoCo v2.

MoCo's only positives are views of the same image. CLIM adds other images as positives. Every few epochs it embeds all
images, clusters them, and finds the nearest neighbors of each. The positives of an image are those of its neighbors
that share its cluster and are closer to the cluster's center than the image itself. So an image is pulled toward the
center of its cluster, but only by similar images.

Some of these positives are wrong, so CutMix pastes a box of the positive into the image. The query is the embedding of
this mix. Its loss has two terms, with the keys of the image and of the positive, weighted by their fractions of the
pixels. Multi-resolution encodes each crop at several sizes, and compares queries of every size with keys of every size.

    Eq. 1              info_nce                                        MoCo v2's loss; each term of Eq. 4
    Eq. 2, App. A.2    kmeans, nearest_neighbors, select_positives     the positives (Table 6: choose_positives)
    Eq. 3              cutmix, mix_queries                             mixed queries
    Eq. 4              clim_loss                                       their loss
    Eq. 6              CLIM.forward                                    the sum over pairs of sizes (Eq. 5: see the end)

    python clim.py                                                            # a laptop, no data
    python clim.py --dataset cifar10 --selection none                         # the baseline, MoCo v2, on one GPU
    torchrun --nproc_per_node=8 clim.py --dataset imagenet --data-dir DIR

The baseline is MoCo v2: `--selection none` with one image size is exactly its loss. CLIM changes these lines:
    one query and one key view    ->  also two views of one positive               (choose_positives, ImageAndPositive)
    q = query(view)               ->  q = query(view mixed with the positive's)    (mix_queries, cutmix)
    k = key(view)                 ->  keys k of the image, k' of its positive      (CLIM.forward)
    info_nce(q, k, queue, tau)    ->  clim_loss(q, k, k', queue, tau, lambda)      (CLIM.contrast)
    one size                      ->  a sum over all pairs of sizes                (CLIM.forward)
There is no released code. (D1), (D2), ... at the end are differences between the paper and this file.
"""

import argparse
import copy
import math
import os
import time

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms import v2

import common

# ========================================================= 1. hyper-parameters


def parse_args(argv=None):
    """Parse the command line. The defaults are the paper's for ImageNet, with the changes that `recipe` returns."""
    parser = argparse.ArgumentParser(os.path.basename(__file__), description=__doc__.splitlines()[0])

    add = parser.add_argument_group("loss").add_argument
    add("--mix", choices=("cutmix", "none"), default="cutmix", help="none: no mixing (Table 6, D9)")
    add("--alpha", type=common.concentration, default=2.0, help="alpha of CutMix's Beta(alpha, alpha) (Table 9)")
    add("--temperature", type=common.positive_float, default=0.2, help="softmax temperature tau")  # MoCo v2's
    add("--queue", type=common.positive_int, default=65536, help="queue length; folder: a tenth of the images")

    add = parser.add_argument_group("positives").add_argument
    ways = ("none", "random", "knn", "kmeans", "center")
    add("--selection", choices=ways, default="center", help="how positives are selected (Table 6); none: MoCo v2")
    add("--num-clusters", type=common.positive_int, default=10000, help="clusters (Table 8); if None, 1 per 128 images")
    add("--knn-k", type=common.positive_int, default=40, help="number of nearest neighbors, k (Table 8)")
    add("--num-positives", type=common.positive_int, default=10, help="positives per image (App. A.2)")
    add("--refresh-every", type=common.positive_int, default=5, help="epochs between selections (App. A.2)")
    add("--clim-start", type=common.nonnegative_int, default=5, help="epochs before any positives")  # not in the paper

    add = parser.add_argument_group("model").add_argument
    add("--arch", default="resnet50", help="encoder: resnet_mini, resnet18, resnet50, vit_small, or any timm model")
    add("--image-size", type=common.positive_int, nargs="+", help="sizes of the views, in pixels (Table 7)")
    add("--patch-size", type=common.positive_int, default=16, help="patch size of a ViT, in pixels")
    add("--dim", type=common.positive_int, default=128, help="embedding dimension")
    add("--bn-groups", type=common.positive_int, default=16, help="batch-norm groups per global batch, for ShuffleBN")
    add("--momentum", type=common.fraction, default=0.999, help="EMA momentum m of the momentum encoder")

    add = parser.add_argument_group("schedule").add_argument
    add("--epochs", type=common.positive_int, default=200, help="number of epochs")  # section 4.4; App. A.1: 1,200
    add("--batch-size", type=common.positive_int, default=512, help="global batch size, over all processes")
    add("--lr", type=common.positive_float, default=0.03, help="peak learning rate per 256 images")  # 0.06 for 512
    add("--warmup", type=common.nonnegative_float, default=0.0, help="linear warmup epochs, at most --epochs / 4")
    add("--weight-decay", type=common.nonnegative_float, default=1e-4, help="weight decay of SGD")

    add = parser.add_argument_group("augmentation").add_argument
    add("--crop-scale", action=common.AreaRange, default=[0.2, 1.0], help="area range of RandomResizedCrop")
    add("--blur-p", type=common.fraction, default=0.5, help="probability of blur")
    add("--same-crop", action="store_true", help="share one crop between query and key (D5)")
    add("--local-crops", type=common.nonnegative_int, default=0, help="local crops per image, as queries (Table 7, D6)")
    add("--local-size", type=common.positive_int, default=96, help="size of a local crop, in pixels (Table 7)")
    add("--local-scale", action=common.AreaRange, default=[0.05, 0.14], help="area range of local crops (section 4.4)")

    args = common.parse_args(parser, argv, recipe)
    args.warmup = min(args.warmup, args.epochs / 4)  # a short run would not reach its peak learning rate
    args.image_size = sorted(args.image_size, reverse=True)  # views are cropped at the largest size
    common.needs(parser, args, ["patch_size"], common.is_vit(args.arch), "a ViT (--arch)")
    common.needs(parser, args, ["bn_groups"], not common.is_vit(args.arch), "batch norm, which no ViT (--arch) has")
    common.needs(parser, args, ["local_size", "local_scale"], args.local_crops, "local crops (--local-crops)")
    if args.local_crops and args.local_size > args.image_size[0]:
        parser.error(f"--local-size {args.local_size} is larger than --image-size {args.image_size[0]}")
    positive_flags = ["mix", "alpha", "num_positives", "refresh_every", "clim_start"]
    common.needs(parser, args, positive_flags, args.selection != "none", "positives (--selection)")
    common.needs(parser, args, ["num_clusters"], args.selection in ("kmeans", "center"), "--selection kmeans or center")
    common.needs(parser, args, ["knn_k"], args.selection in ("knn", "center"), "--selection knn or center")
    common.needs(parser, args, ["alpha"], args.mix == "cutmix", "--mix cutmix")
    if args.selection != "none" and args.clim_start >= args.epochs:
        parser.error(f"--clim-start {args.clim_start} is not below --epochs {args.epochs}: pass a smaller --clim-start")
    return args


# Not in the paper: as MoCo's demo on CIFAR-10 (branch colab-notebook), but with MoCo v2's head, temperature and crop
# areas, and with a warmup
CIFAR = dict(
    arch="resnet18", image_size=[32], patch_size=4, epochs=200, batch_size=512, lr=0.03, warmup=1.0,  # 0.06 for 512
    weight_decay=5e-4, momentum=0.99, queue=4096, blur_p=0.0, bn_groups=8, local_size=16,
    num_clusters=400,  # about as many images per cluster as on ImageNet
)  # fmt: skip
RECIPES = dict(  # what differs from the paper's values for ImageNet
    patterns=dict(  # not in the paper: for a laptop
        arch="resnet_micro", image_size=[32], patch_size=4, epochs=45, batch_size=64, lr=0.12, queue=128, local_size=16,
        crop_scale=[0.3, 1.0], blur_p=0.1, bn_groups=2, momentum=0.95, warmup=5.0, num_clusters=32,
    ),
    cifar10=CIFAR,
    cifar100=CIFAR,
    stl10=dict(CIFAR, image_size=[96], patch_size=8, queue=8192, num_clusters=800, local_size=48),
    imagenet100=dict(arch="resnet18", queue=16384, num_clusters=1000),  # not in the paper
    imagenet={},
    folder=dict(queue=None, num_clusters=None, bn_groups=2, momentum=0.99),  # None: 1/10 of images, 1 per 128
)  # fmt: skip


def recipe(args):
    """Return the defaults, {name: value}, that suit args, whose image_size is None if not given."""
    values = dict(RECIPES[args.dataset])
    if common.is_vit(args.arch):
        values["bn_groups"] = 1  # a ViT has no batch norm
    if args.selection == "knn":
        values["knn_k"] = 10  # section 4.4: for Table 6, positives are taken from the nearest ten
    has_one_size = args.selection == "none" or args.local_crops  # the baseline, and Table 7's multi-crop
    values.setdefault("image_size", [224] if has_one_size else [224, 160])
    if args.dataset in ("imagenet100", "folder"):  # our choice: 0.03 over the number of terms, which are summed (D3)
        values["lr"] = 0.03 / (len(args.image_size or values["image_size"]) ** 2 + args.local_crops)
    return values


# ================================================================ 2. the paper


def clim_loss(q, k_anchor, k_positive, queue, temperature, lam):
    """Return the loss of mixed queries (Eq. 4), lam * NCE(q, k_anchor) + (1 - lam) * NCE(q, k_positive).

    NCE is InfoNCE (Eq. 1). The keys of the queue are the negatives of both terms. With lam = 1 it is MoCo's loss.

    q: (N, C) queries, one per mixed image. k_anchor: (N, C), the keys of the images. k_positive: (N, C), the keys of
    the images that were pasted in. queue: (K, C). All are L2-normalized. temperature: tau > 0. lam: a number in [0, 1],
    the fraction of k_anchor's images in the mix. Gradients reach q, and also keys and queue unless these are detached.
    Raises ValueError if the shapes do not fit, or if lam is not in [0, 1]. Copy it with info_nce, whose notes on dtypes
    apply here, too.
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"clim_loss takes lam in [0, 1], not {lam}")
    anchor_loss = info_nce(q, k_anchor, queue, temperature)
    positive_loss = info_nce(q, k_positive, queue, temperature)
    return lam * anchor_loss + (1 - lam) * positive_loss  # Eq. 4


def cutmix(x, partner, lam, generator=None):
    """Mix two batches of images (Eq. 3): return (mixed images, the fraction of x that is left in them).

    As in the code of CutMix (Yun et al., arXiv 1905.04899), a box is replaced by the partner's in all images of the
    batch. It has about (1 - lam) of the area, the images' aspect ratio, and a uniformly random center. Its part
    outside the image is dropped, so the fraction can exceed lam. Use the fraction, not lam, as the weight in the loss.

    x, partner: (N, C, H, W); row i of partner is pasted into row i of x. lam: a number in [0, 1], the requested
    fraction of x. generator: a torch.Generator on the CPU, or None. Raises ValueError if shapes or lam do not fit.
    """
    if x.dim() != 4 or partner.shape != x.shape:
        shapes = f"{tuple(x.shape)} and {tuple(partner.shape)}"
        raise ValueError(f"cutmix takes x and partner (N, C, H, W) of one shape, not {shapes}")
    if not 0 <= lam <= 1:
        raise ValueError(f"cutmix takes lam in [0, 1], not {lam}")

    def draw_slice(size):  # the box's rows, or its columns
        center = int(size * torch.rand((), dtype=torch.float64, generator=generator).item())
        half = int(size * math.sqrt(1 - lam)) // 2
        return slice(max(0, center - half), center + half)

    box = (..., draw_slice(x.shape[2]), draw_slice(x.shape[3]))  # rows, then columns
    mixed = x.clone()
    mixed[box] = partner[box]  # Eq. 3: the mask M is 0 in the box
    return mixed, 1 - x[box].numel() / x.numel()


@torch.no_grad()
def kmeans(x, num_clusters, iterations=20, generator=None):
    """Run Lloyd's k-means by L2 distance: return (centers (m, C), assignment (N,) int64 of each row to its center).

    The initial centers are random rows. Empty clusters restart at the rows that are farthest from their centers.

    x: (N, C); its rows are used as given, not normalized. m is min(num_clusters, N). iterations: the default is not in
    the paper; faiss's is 25. generator: a torch.Generator on the CPU, or None.
    """
    origin, dtype = x[:1].double(), x.dtype
    x = x.double() - origin  # cdist's |a|^2 - 2ab + |b|^2 is inexact for close rows, in float32 or far from 0

    def assign(centers):
        return torch.cat([torch.cdist(rows, centers).argmin(1) for rows in x.split(1024)])

    centers = x[torch.randperm(len(x), generator=generator)[:num_clusters].to(x.device)]
    for _ in range(iterations):
        assignment = assign(centers)
        count = assignment.bincount(minlength=len(centers))
        empty = torch.nonzero(count == 0).flatten()
        farthest = (x - centers[assignment]).square().sum(1).topk(len(empty)).indices
        centers = torch.zeros_like(centers).index_add_(0, assignment, x) / count.clamp_min(1)[:, None]
        centers[empty] = x[farthest]
    return (centers + origin).to(dtype), assign(centers)


@torch.no_grad()
def nearest_neighbors(x, k, rows=None):
    """Return the k nearest other rows of each row by L2 distance, nearest first: (n, min(k, N - 1)) int64.

    x: (N, C). rows: (n,) int64, the rows whose neighbors are returned; None: all. Distances below 1e-7 count as equal.
    """
    x = x.double() - x[:1].double()  # as in kmeans
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    neighbors = []
    for chunk in rows.split(128):  # on ImageNet 1.3 GB of distances
        distance = torch.cdist(x[chunk], x).float().clamp_min(1e-7)  # rounded, so that copies are equally far
        distance.scatter_(1, chunk[:, None], math.inf)  # from a row to itself (D1)
        neighbors.append(distance.topk(min(k, len(x) - 1), largest=False).indices)
    return torch.cat(neighbors)


def preferred_first(neighbors, preferred, count, generator=None):
    """Select `count` neighbors per row, the preferred ones first (App. A.2): (N, count) int64.

    The preferred ones are in random order. The others follow, nearest first. If k < count, they repeat in this order.

    neighbors: (N, k) int64, nearest first. preferred: (N, k) bool.
    """
    k = neighbors.shape[1]
    random = torch.rand(neighbors.shape, generator=generator).to(neighbors.device)  # in [0, 1)
    position = torch.arange(1, k + 1, device=neighbors.device)  # 1 for the nearest
    order = torch.where(preferred, random, position).argsort(1)  # so all preferred ones are before the others
    repeated = torch.arange(count, device=neighbors.device) % k
    return neighbors.gather(1, order[:, repeated])


@torch.no_grad()
def select_positives(x, centers, assignment, neighbors, num_positives=10, generator=None):
    """Select positives by center-wise local selection (Eq. 2, App. A.2): (N, num_positives) int64, rows of x.

    The candidates are those of an image's k nearest neighbors that are in its cluster and at most as far from its
    center as the image is. num_positives random ones are selected. If there are fewer, the nearest of the other
    neighbors are added (D2), and if k < num_positives, they repeat. Copy it with preferred_first.

    x: (N, C), N >= 2, one embedding per image. centers: (m, C), and assignment: (N,) int64, the index of each image's
    center, as `kmeans` returns them. neighbors: (N, k) int64, as `nearest_neighbors` returns them. generator: a
    torch.Generator on the CPU, or None.
    """
    same_cluster = assignment[neighbors] == assignment[:, None]  # neighbors in Omega_1; all are in Omega_2
    to_center = (x - centers[assignment]).square().sum(1)  # each image's squared distance
    closer = to_center[neighbors] <= to_center[:, None]  # the inequality of Eq. 2
    return preferred_first(neighbors, same_cluster & closer, num_positives, generator)  # Eq. 2's Omega_p is preferred


def random_members(assignment, count):
    """Draw `count` other rows of each row's own cluster: (N,) int64 -> (N, count) int64, N >= 2. They may repeat.

    A row that is alone in its cluster gets rows of any cluster.
    """
    table = assignment.new_empty(len(assignment), count)
    everyone = torch.arange(len(assignment), device=assignment.device)
    for rows in assignment.argsort(stable=True).split(assignment.bincount().tolist()):  # of a cluster, ascending
        candidates = rows if len(rows) > 1 else everyone
        place = torch.randint(len(candidates) - 1, (len(rows), count)).to(rows.device)  # among the other candidates
        place += candidates[place] >= rows[:, None]  # the candidates ascend, so this skips the row itself
        table[rows] = candidates[place]
    return table


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


class ImageAndPositive(Dataset):
    """Views of an image and, once there are positives, of one of them: items (views, positive's views).

    images, positive_images: common.Views of the same N images. positives: (N, num_positives) int, the indices of each
    image's positives; below 0 before they are selected. Loader workers restart in each epoch, so they see changes.
    """

    def __init__(self, images, positive_images, positives):
        self.images, self.positive_images, self.positives = images, positive_images, positives

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        views, _ = self.images[index]
        column = torch.randint(self.positives.shape[1], ())  # a random one in each epoch (not in the paper)
        positive = self.positives[index, column].item()
        return views, (self.positive_images[positive][0] if positive >= 0 else [])


def key_and_query(view):
    """Return a view as key and as query, for --same-crop (D5): common.Views takes a list of views from a transform."""
    return [view, view]


def augment(x, args):
    """Augment crops as MoCo v2 does (App. A.1): uint8 -> normalized float (n, 3, S, S)."""
    x = common.horizontal_flip(x / 255, p=0.5)
    x = common.color_jitter(x, 0.4, 0.4, 0.4, 0.1, p=0.8)
    x = common.grayscale(x, p=0.2)
    x = common.gaussian_blur(x, sigma=(0.1, 2.0), p=args.blur_p)
    return common.normalize(x, *common.NORMS[args.norm])


def mix_queries(query_views, partners, alpha):
    """Mix query views with those of positives (Eq. 3): return (list of mixed views, list of the images' fractions).

    query_views: list of (n, 3, H, W). partners: list of the positives' query views. For each view, lambda is drawn from
    Beta(alpha, alpha) (3.2.2), once per batch of a process, as in CutMix's code. Without partners nothing is mixed, and
    the fractions are 0.5: each of two keys has half the loss (D9). Copy it with cutmix.
    """
    if not partners:
        return query_views, [0.5] * len(query_views)
    beta = torch.distributions.Beta(alpha, alpha)
    mixed = [cutmix(x, partner, beta.sample().item()) for x, partner in zip(query_views, partners, strict=True)]
    return [x for x, _ in mixed], [fraction for _, fraction in mixed]


# ==================================================================== 4. model


class CLIM(nn.Module):
    """MoCo v2's query encoder, momentum encoder and queue, with mixed queries, keys of positives and several sizes.

    Copy it with clim_loss, info_nce, Queue, gather, shard and encode_shuffled_keys. With one process, ShuffleBN needs
    convert_split_batchnorm. With several, wrap it in DistributedDataParallel, which first broadcasts rank 0's weights
    and, unless broadcast_buffers=False, its queue.
    backbone: (n, 3, H, W) -> (n, width). sizes: sizes at which views are encoded, the largest first. dim: embedding
    dimension. queue: number of negatives. temperature: tau.
    """

    def __init__(self, backbone, width, sizes, dim=128, queue=65536, temperature=0.2):
        super().__init__()
        self.backbone = backbone
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(queue, dim)
        self.sizes, self.temperature = sizes, temperature

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), L2-normalized, in the dtype of x."""
        return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        """Return the momentum encoder's keys of images: (n, 3, H, W) -> (n, dim), L2-normalized, in the dtype of x."""
        return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def contrast(self, q, k, fraction):
        """Return the loss of queries (n, dim): Eq. 4 for keys (2, n, dim), or Eq. 1 for keys (1, n, dim)."""
        if len(k) == 1:
            return info_nce(q, k[0], self.queue.keys, self.temperature)
        return clim_loss(q, k[0], k[1], self.queue.keys, self.temperature, fraction)

    def forward(self, query_views, fractions, key_views):
        """Return (loss, keys to enqueue (N, dim), queries (n, dim), {name: metric}). The loss is Eq. 6.

        query_views: this process's query view and local crops, each (n, 3, H, W), normalized and, if there are
        positives, mixed with theirs. fractions: per view, the fraction of pixels that are the image's own, lambda in
        Eq. 4 (D7). key_views: a view of the images and, once there are positives, one of theirs, each (n, 3, H, W).
        The keys to enqueue are the images' own at the largest size (not in the paper), of all processes. Only the loss
        has a gradient, which reaches the query encoder only.
        """
        q, keys = [], []  # for each size
        for i, size in enumerate(self.sizes):
            views = [v2.functional.resize(view, [size, size]) for view in (query_views[0], *key_views)]  # query, keys
            if size in self.sizes[:i]:  # Table 7's {224, 224}: else both would be the same image (D4)
                views = [view.flip(-1) for view in views]
            q.append(self.query(views[0]))
            # Both keys are encoded together (not in the paper): a batch-norm group holds twice as many keys as queries
            keys.append(encode_shuffled_keys(self.key, views[1:]))  # (1 or 2, N, dim), of all processes
        k = [shard(keys_of_size, dim=1) for keys_of_size in keys]  # (1 or 2, n, dim), this process's
        local_q = [self.query(crop) for crop in query_views[1:]]
        with torch.autocast(q[0].device.type, enabled=False):  # the loss is computed in float32
            # Eq. 6: the queries of every size r with the keys of every size r'
            losses = [self.contrast(q_r, k_r, fractions[0]) for q_r in q for k_r in k]
            # Table 7: local crops with the keys of the largest size (D6)
            losses += [self.contrast(x, k[0], fraction) for x, fraction in zip(local_q, fractions[1:], strict=True)]
            loss = sum(losses)
        return loss, keys[0][0], q[0].detach(), dict(loss=loss.detach())  # the images' own keys at the largest size

    @torch.no_grad()
    def update(self, m):
        """Update the momentum encoder (float32 or float64): theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2)."""
        for slow, fast in ((self.momentum_backbone, self.backbone), (self.momentum_projector, self.projector)):
            for theta_k, theta_q in zip(slow.parameters(), fast.parameters(), strict=True):
                theta_k.lerp_(theta_q, 1 - m)  # in bfloat16 the small change would be rounded away


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
    """Return the learning rate `now` epochs after the start: a linear warmup from 0, then a cosine down to 0."""
    peak = args.lr * args.batch_size / 256
    if now < args.warmup:
        return peak * now / args.warmup
    done = (now - args.warmup) / (args.epochs - args.warmup)
    return peak * (1 + math.cos(math.pi * done)) / 2


def choose_positives(args, model, images, info, device, num_clusters):
    """Choose the positives of all images by --selection (Table 6): (N, num_positives) int64, the same on every process.

    The embeddings are those of the momentum encoder with its projector, of center crops (not in the paper), computed in
    float32. num_clusters: of k-means. Logs the time and, if all images have labels, how many of the positives have the
    image's class.
    """
    began = time.perf_counter()
    assignment = torch.zeros(len(images), dtype=torch.int64, device=device)  # for random: one cluster of all images
    if args.selection != "random":
        encoder = nn.Sequential(model.momentum_backbone, model.momentum_projector)
        features = common.extract_features(encoder, images, info, device, workers=args.workers)
        x = F.normalize(common.gather_rows(features), dim=1).double().to(device)  # float64, for Eq. 2's inequality
    if args.selection in ("knn", "center"):  # each process finds the neighbors of its part of the images
        rows = common.local_rows(torch.arange(len(x), device=device))
        neighbors = common.gather_rows(nearest_neighbors(x, args.knn_k, rows))
    if args.selection in ("kmeans", "center"):
        centers, assignment = kmeans(x, num_clusters)
    if args.selection == "center":
        table = select_positives(x, centers, assignment, neighbors, args.num_positives)
    elif args.selection == "knn":
        table = preferred_first(neighbors, torch.ones_like(neighbors, dtype=torch.bool), args.num_positives)
    else:  # kmeans: of the image's cluster; random: of all images
        table = random_members(assignment, args.num_positives)
    if dist.is_initialized():
        dist.broadcast(table, 0)  # each process has drawn its own
    text = f"positives chosen in {time.perf_counter() - began:.1f} s"
    labels = torch.from_numpy(common.labels_of(images))
    if labels.min() >= 0:
        same_class = (labels[:, None] == labels[table.cpu()]).double().mean()
        text += f", {100 * same_class:.1f}% of them with the image's class"
    common.log(text)
    return table


def main(args, train=None, test=None):
    """Train, resuming from args.out if it holds a run. train, test: datasets to use instead of --dataset."""
    device, rank, world = common.init_distributed(args.device)
    torch.manual_seed(args.seed)

    # Data: views of each image and of one of its positives, cropped here and augmented in the loop
    train, test = common.open_data(args.dataset, args.data_dir, args.image_size[0], train, test)
    groups = common.split_batch(args.batch_size, len(train), world, args.bn_groups, "--bn-groups")  # per process
    crop = v2.RandomResizedCrop(args.image_size[0], args.crop_scale)
    local_crop = v2.RandomResizedCrop(args.local_size, args.local_scale)
    transforms = [v2.Compose([crop, key_and_query])] if args.same_crop else [crop, crop]  # D5; the key's is first
    transforms += [local_crop] * args.local_crops  # so views[1:] are the queries'
    positive_transforms = transforms if args.mix == "cutmix" else [crop]  # without mixing, only a key view
    positives = torch.full((len(train), args.num_positives), -1, dtype=torch.int32)  # none yet
    images = ImageAndPositive(common.Views(train, transforms), common.Views(train, positive_transforms), positives)
    sampler = DistributedSampler(images, world, rank, seed=args.seed, drop_last=True)
    options = common.loader_options(args.workers, device)
    loader = DataLoader(images, args.batch_size // world, sampler=sampler, drop_last=True, **options)
    if args.show_views:  # views of images and of random positives, and mixed query views
        if args.selection != "none":
            positives.random_(len(positives))  # no encoder has selected any
        views, positive_views = ([augment(x, args) for x in part] for part in next(iter(loader)))
        mixed = mix_queries(views[1:], positive_views[1:], args.alpha)[0] if positive_views[1:] else []
        names = ["key", "query"] + ["local crop"] * args.local_crops
        names += [f"random positive's {name}" for name in names[: len(positive_views)]]
        names += [f"mixed {name}" for name in names[1 : 1 + len(mixed)]]
        return common.save_views(args.show_views, views + positive_views + mixed, names, args.norm)

    # Model and optimizer. backbone.pt has `info` and the weights of the encoder that info["encoder"] names
    info = common.backbone_info(args.arch, args.image_size[0], args.patch_size, args.norm) | dict(encoder="query")
    backbone = common.build_backbone(info)
    sizes = args.image_size + ([args.local_size] if args.local_crops else [])
    width = common.feature_width(backbone, *sizes)
    if args.init:
        common.load_weights(backbone, args.init, args.init_prefix)
    negatives = common.queue_length(args.queue, args.batch_size, len(train))
    model = CLIM(backbone, width, args.image_size, args.dim, negatives, args.temperature)
    model = convert_split_batchnorm(model, groups) if groups > 1 else model  # as on that many GPUs, for ShuffleBN
    model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=args.weight_decay, fused=True)

    # The run
    amp = common.use_bf16(args.amp, device)
    state = dict(model=model, optimizer=optimizer, positives=positives)
    terms = len(args.image_size) ** 2 + args.local_crops  # of the loss, which is their sum
    derived = dict(negatives=negatives, loss_at_uniform_logits=terms * math.log(negatives + 1))
    derived |= dict(peak_lr=args.lr * args.batch_size / 256, batch_norm_groups=groups * world, bf16=amp)
    clusters = args.num_clusters or max(1, len(train) // 128)
    if args.selection in ("kmeans", "center"):
        derived |= dict(clusters=clusters)
        if clusters > len(train) / 4:
            common.log(f"warning: {clusters} clusters are too many for {len(train)} images: reduce --num-clusters")
    config, records = common.open_run(args, train, state, derived)  # restores a saved run; one record per epoch
    if args.compile:
        model.backbone.compile(dynamic=False)
        model.momentum_backbone.compile(dynamic=False)
    ddp = DistributedDataParallel(model) if world > 1 else model
    ddp.broadcast_buffers = False  # queues stay equal without it; torch 2.13 renames the argument, not the attribute

    for epoch in range(len(records), args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(hash((args.seed, epoch, rank)))  # a resumed run gets the same seed: hashes of ints are fixed
        is_due = positives[0, 0] < 0 or (epoch - args.clim_start) % args.refresh_every == 0  # < 0: none, as by --resume
        if args.selection != "none" and epoch >= args.clim_start and is_due:
            positives.copy_(choose_positives(args, model, train, info, device, clusters))  # section 3.2.1
        meter = common.Meter(epoch, args.epochs, len(loader), args.batch_size)
        for step, (crops, positive_crops) in enumerate(loader):
            now = epoch + step / len(loader)  # in epochs
            lr = learning_rate(args, now)
            for group in optimizer.param_groups:
                group["lr"] = lr
            key_view, *query_views = [augment(x.to(device, non_blocking=True), args) for x in crops]
            positive_views = [augment(x.to(device, non_blocking=True), args) for x in positive_crops]
            query_views, fractions = mix_queries(query_views, positive_views[1:], args.alpha)  # Eq. 3
            key_views = [key_view] + positive_views[:1]
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss, keys, q, metrics = ddp(query_views, fractions, key_views)  # Eq. 6
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
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


# ============================== 7. differences between the paper and this file

# D1 The image itself. Paper: it satisfies Eq. 2, as an equality. Here: an image is never its own positive.
# D2 Too few positives. Paper (App. A.2): "we simply select the most nearest samples among the remained top-40 knn
#    samples". Here: the positives of Eq. 2 are kept, and the nearest of the other neighbors, which Eq. 2 excludes, are
#    added.
# D3 The sum of Eq. 6. Paper: r is the size of an image's views, r' that of its positive's. Here: r is the size of the
#    query, r' that of its keys. As in the paper, the terms are summed, four for two sizes, which raises the effective
#    learning rate: std rises slowly at first (tests/results/README.md). Local crops add their terms.
# D4 The sizes {224, 224} of Table 7. Paper: silent. Here: both have the same view, flipped for the second.
# D5 Crops of multi-resolution. Paper (sections 1, 3.3): positive pairs have the same content at different sizes, and
#    the crop ratio is fixed. Here: a view has one crop at all sizes (and one flip, color, blur and mix), but query and
#    key have different crops. So no crop at 224 px is compared with the same crop at 160 px, as it is with
#    `--same-crop`, the literal reading, where a key has the crop of its query.
# D6 Multi-crop. Paper (section 4.4): only sizes and areas. Here: local crops are queries, mixed with the positive's.
# D7 The weight of Eq. 4. Paper: lambda. Here, as in CutMix's code: the fraction of the image that is left in `cutmix`.
# D8 Color jitter. Paper (App. A.1): brightness, contrast, saturation, without values. Here: MoCo v2's, also of the hue.
# D9 Positives without mixing (Table 6). Paper (section 4.4): "a standard contrastive loss". Here, `--mix none`: the
#    mean of Eq. 1 with the image's own key and of Eq. 1 with the positive's.
# Differences in rounding, indices and precision are listed in tests/golden/README.md.
# Eq. 5 is not computed: it defines the scale of a crop. Its sigma is a ratio of lengths; elsewhere, sigma is a ratio of
# areas. Table 6: the other selections are made in the same epochs as CLIM's and also give ten positives per image, and
# k-means has as many clusters (not in the paper). For Tables 6, 8 and 9 pass `--dataset imagenet --image-size 224` and
# the flag whose help names the table; for Table 7, `--image-size 224 96` or `--local-crops 2`.
# Omitted: detection and segmentation on VOC, COCO and LVIS (Tables 3 to 5), Table 10, and the t-SNE of Fig. 3.


if __name__ == "__main__":
    common.start(main, parse_args, "--dataset imagenet --data-dir DIR")
