"""CLIM: Center-wise Local Image Mixture (Li et al., ICLR 2021 submission, arXiv 2011.02697), on MoCo v2.

MoCo's only positives are views of the same image. CLIM adds other images. Every few epochs all images are embedded and
clustered; the positives of an image are those of its k nearest neighbours that share its cluster and lie closer to the
cluster's centre than the image itself, so that similar images move towards centres together. Neighbours may be wrong,
so they are not trusted outright: image and positive are mixed by CutMix, and the mix is drawn to both keys by the share
that each has in it. Multi-resolution, a second augmentation, compares the same crop at several input sizes, every query
with every key.

    Eq. 1              clim_loss, its nce                         info_nce is the same, as a function of its own
    Eq. 2, App. A.2    kmeans, nearest_neighbors, select_positives
    Eq. 3              cutmix
    Eq. 4              clim_loss
    Eq. 5              says what a crop is; nothing computes it
    Eq. 6              CLIM.forward                               the sum over pairs of resolutions
    Table 6            choose_positives, --selection, --mix

    python clim.py                                                            # laptop, no data
    python clim.py --dataset cifar10 --selection none                         # the baseline, MoCo v2, one GPU
    torchrun --nproc_per_node=8 clim.py --dataset imagenet --data-dir DIR

Baseline: `--selection none` with one resolution is MoCo v2 exactly. New relative to it: the functions above, two more
views of the positive, and the loops of CLIM.forward. A choice of positives on ImageNet (n = 1.28 M, d = 128, m = 10,000
clusters) takes, besides a pass over all images, 2 n^2 d = 4.2e14 operations for the neighbours and 40 n m d = 6.6e13
for 20 iterations of k-means, in float64: about a minute on one H100 by its data sheet. An estimate, not measured.

There is no released code (`--variant released` is refused). Where the paper is silent, this is inference: the embedding
is the momentum encoder's unit-length output for a centre crop; an image is no neighbour of itself; the positive's key
comes from a view of its own and is encoded with the anchor's, so that a batch-norm group has twice as many keys as
queries; each epoch one of an image's ten is drawn; one CutMix box a batch, as in CutMix's code, at the largest size; 20
iterations of k-means from random rows; without mixing, half the loss goes to each key; MoCo v2's temperature and colour
jitter; the first table after --clim-start epochs of plain MoCo v2; the anchor's own key is enqueued; bf16 in the
encoders on CUDA; all recipes but ImageNet's.

Departures:
    D1 Eq. 2 would let an image be its own positive (equality); it is left out, unless it is the only image
    D2 App. A.2 tops up with neighbours that Eq. 2 excludes: followed
    D3 Eq. 6 is a sum, four terms for two sizes, which raises the effective rate: as printed; small images have one size
       here
    D4 Table 7's {224, 224} does not say what differs: here the crop is the same; colours and flip are drawn anew
"""

import copy
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

# ================================================================== 1. recipes

# fmt: off
BASE = dict(  # the rate is that of batch size lr_batch
    selection="center", mix="cutmix", num_positives=10, knn_k=40, refresh_every=5,  # App. A.2
    alpha=2.0, clim_start=5,  # Table 9; ours
    temperature=0.2, dim=128, momentum=0.999, weight_decay=1e-4, warmup=0, min_lr=0.0, bn_groups=8, patch_size=16,
    interpolation="bilinear", crop_scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray_p=0.2, blur_p=0.5,
)
IMAGENET = dict(  # App. A, but for the epochs: 200 as in section 4.4 (App. A: 1,200); Table 7's best sizes
    BASE, arch="resnet50", image_size=224, epochs=200, batch_size=512, lr=0.06, lr_batch=512, queue=65536,
    bn_groups=16, num_clusters=10000, resolutions=[224, 160],
)
CIFAR = dict(  # ours: moco_jointcrop.py's, so that the two can be compared, and as many images a cluster as on ImageNet
    BASE, arch="resnet18", image_size=32, patch_size=4, epochs=500, batch_size=512, lr=0.5, lr_batch=512, min_lr=0.05,
    queue=4096, blur_p=0.0, num_clusters=400, resolutions=[32],
)
RECIPES = dict(
    patterns=dict(  # ours, for two CPU cores
        BASE, arch="resnet_micro", image_size=32, patch_size=4, epochs=45, batch_size=64, lr=0.06, lr_batch=128,
        queue=128, blur_p=0.1, crop_scale=(0.3, 1.0), bn_groups=2, momentum=0.95, warmup=5,
        num_clusters=32, resolutions=[32],
    ),
    cifar10=CIFAR,
    cifar100=CIFAR,
    stl10=dict(CIFAR, image_size=96, patch_size=8, queue=8192, num_clusters=800, resolutions=[96]),
    imagenet100=dict(IMAGENET, arch="resnet18", queue=16384, num_clusters=1000),  # ours
    imagenet=dict(IMAGENET, knn_every=50),  # its kNN takes minutes
    folder=dict(IMAGENET, queue=None, num_clusters=None),  # ours: a tenth of the images, 128 images a cluster
)
CPU = dict(batch_size=256, lr=0.1, lr_batch=256, min_lr=0.0, momentum=0.99, blur_p=0.5)  # ours: the small encoders
KNN = dict(knn_k=10)  # Table 6: the comparison with kNN draws from the nearest ten
# fmt: on


def recipe(given):
    """The hyper-parameters that the data set, the encoder and other choices of a command line stand for."""
    values = dict(RECIPES[given.dataset])
    if given.arch in ("resnet_micro", "resnet_mini") and given.dataset in ("cifar10", "cifar100", "stl10"):
        values |= CPU
    if given.selection == "knn":
        values |= KNN
    if given.resolutions:  # the largest size is that of the views
        values["image_size"] = max(given.resolutions)
    elif given.image_size not in (None, values["image_size"]):
        values["resolutions"] = [given.image_size]
    return values


# ================================================================ 2. the paper


def clim_loss(q, k_anchor, k_positive, queue, temperature, lam):
    """Eq. 4: lam InfoNCE(q, k_anchor) + (1 - lam) InfoNCE(q, k_positive); the queue's keys are the negatives of both.

    q, k_anchor, k_positive (N, C), queue (K, C), all of unit length; lam in [0, 1], a float or (N,). The gradient goes
    to q (and to the keys, if they have one). lam = 1 is MoCo's loss. Returns a scalar.
    """
    negatives, target = q @ queue.T, torch.zeros(len(q), dtype=torch.int64, device=q.device)
    lam = lam.to(q) if torch.is_tensor(lam) else lam

    def nce(k):  # Eq. 1, image by image
        logits = torch.cat([(q * k).sum(1, keepdim=True), negatives], dim=1) / temperature
        return F.cross_entropy(logits, target, reduction="none")

    return (lam * nce(k_anchor) + (1 - lam) * nce(k_positive)).mean()  # Eq. 4


def cutmix(x, partner, lam, generator=None):
    """Eq. 3, as CutMix has it: a box of about (1 - lam) of the area of x is replaced by the same box of the partner.

    x, partner (N, 3, H, W); lam in [0, 1]: a float, one box for all, or (N,), a box an image. The box's centre is
    uniform in the image, and what hangs over the edge is cut off. Returns (mixed, the share of x that is left: a float
    or (N,) float64).
    """
    height, width = x.shape[2:]
    side = (1 - torch.as_tensor(lam, dtype=torch.float64).cpu().reshape(-1)).sqrt()  # of the box, as a share

    def extent(size):
        middle = (torch.rand(len(side), dtype=torch.float64, generator=generator) * size).long()
        half = (side * size).long() // 2
        return [(middle + sign * half).clamp(0, size).view(-1, 1) for sign in (-1, 1)]

    (top, bottom), (left, right) = extent(height), extent(width)
    row, column = torch.arange(height), torch.arange(width)
    rows, columns = (row >= top) & (row < bottom), (column >= left) & (column < right)
    box = (rows[:, :, None] & columns[:, None, :])[:, None].to(x.device, non_blocking=True)  # 1 - M
    kept = 1 - ((bottom - top) * (right - left)).flatten().double() / (height * width)
    mixed = torch.where(box, partner, x)  # Eq. 3
    return mixed, kept if torch.is_tensor(lam) and lam.dim() else kept.item()


# ------------------------------- choice of positives (section 3.2.1 and App. A.2)


def in_chunks(function, x, width):
    """function(rows) of all rows of x, shared out over the processes, in chunks of 128 MiB or 128 rows.

    width: the float64 numbers that a row needs. In a process group every process gives the same x and gets all results.
    """
    rank, world = common.rank_and_world()
    mine = torch.arange(len(x), device=x.device).tensor_split(world)[rank]
    return common.gather_uneven(torch.cat([function(rows) for rows in mine.split(max(128, 2**24 // width))]))


def nearest_center(x, centers):
    """x (N, C), centers (m, C) -> (N,) int64: each row's nearest centre by L2 distance."""
    return in_chunks(lambda rows: torch.cdist(x[rows], centers).argmin(1), x, len(centers))


@torch.no_grad()
def kmeans(x, num_clusters, iterations=20, generator=None):
    """Lloyd's k-means by L2 distance from random rows: x (N, C) -> (centers (m, C), assignment (N,) int64 to them).

    m = min(num_clusters, N). A cluster that comes out empty starts anew at the row farthest from its centre. Computed
    in float64; the generator is a CPU one.
    """
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


@torch.no_grad()
def nearest_neighbors(x, k):
    """The k nearest other rows of each row by L2 distance, nearest first: x (N, C) -> (N, min(k, N - 1)) int64.

    An image is no neighbour of itself, unless it is the only one (D1). In float64, as float32 would give other
    neighbours; then rounded, so that copies of an image are equally far.
    """
    x, k = x.double(), min(k, max(1, len(x) - 1))

    def nearest(rows):
        distance = torch.cdist(x[rows], x).float().clamp_min(1e-7)
        return distance.scatter_(1, rows[:, None], math.inf).topk(k, largest=False).indices

    return in_chunks(nearest, x, len(x))


def take(neighbors, preferred, count, generator=None):
    """App. A.2: `count` of each row's neighbors (N, k), nearest first: random preferred ones (N, k, bool), then the
    nearest of the rest; too few are repeated. Returns (N, count) int64.
    """
    n, k = neighbors.shape
    turn = torch.rand(n, k, generator=generator).to(neighbors.device)
    order = torch.where(preferred, turn, 1 + torch.arange(k, device=neighbors.device)).argsort(1)
    wanted = torch.arange(count, device=neighbors.device) % k
    return neighbors.gather(1, order[:, wanted])


@torch.no_grad()
def select_positives(x, centers, assignment, k=40, num_positives=10, generator=None):
    """Center-wise local selection (Eq. 2, App. A.2): x (N, C), centers (m, C), assignment (N,) -> (N, num_positives).

    Of an image's k nearest neighbours, those in its cluster that are at most as far from its centre: num_positives
    random ones of them, topped up with the nearest of the other neighbours. Too few neighbours are repeated; an image
    without any is its own positive. The generator is a CPU one. Returns int64 rows of x.
    """
    neighbors = nearest_neighbors(x, k)  # Omega_2
    same_cluster = assignment[neighbors] == assignment[:, None]  # Omega_1
    distance = (x.double() - centers.double()[assignment]).square().sum(1)  # of each row from its centre
    closer = distance[neighbors] <= distance[:, None]
    return take(neighbors, same_cluster & closer, num_positives, generator)  # Eq. 2


def choose_positives(args, x, generator=None):
    """The table of positives, (N, num_positives) int64, of embeddings x (N, C) by --selection (Table 6)."""
    if args.selection == "random":
        return torch.randint(len(x), (len(x), args.num_positives), generator=generator)
    if args.selection == "knn":
        neighbors = nearest_neighbors(x, args.knn_k)
        return take(neighbors, torch.ones_like(neighbors, dtype=torch.bool), args.num_positives, generator)
    num_clusters = args.num_clusters or max(1, len(x) // 128)  # as many images a cluster as on ImageNet
    centers, assignment = kmeans(x, num_clusters, generator=generator)
    if args.selection == "center":
        return select_positives(x, centers, assignment, args.knn_k, args.num_positives, generator)
    members, count = assignment.argsort(stable=True), assignment.bincount()  # any of the cluster
    first = count.cumsum(0) - count  # where a cluster's members begin
    turn = torch.rand(len(x), args.num_positives, dtype=torch.float64, generator=generator).to(x.device)
    return members[first[assignment, None] + (turn * count[assignment, None]).long()]


# -------- InfoNCE with a queue (the same in moco_jointcrop, jcl, clim and logo)


def info_nce(q, k, queue, temperature):
    """InfoNCE with a queue (MoCo, Eq. 1): the positive is the key of the same row, the negatives the queue's keys.

    -mean log(exp(q.k / T) / (exp(q.k / T) + sum_j exp(q.queue_j / T))); q, k (N, C), queue (K, C), all of unit length.
    The gradient goes to q (and to k, if it has one); at equal logits the loss is log(K + 1). Returns a scalar.
    """
    positive = (q * k).sum(1, keepdim=True)
    logits = torch.cat([positive, q @ queue.T], dim=1) / temperature
    return F.cross_entropy(logits, logits.new_zeros(len(q), dtype=torch.int64))


# ==================================================================== 3. views

DRAWS = common.CROP_DRAWS + common.COLOUR_DRAWS  # of one view


def copies(resolutions):
    """How often the views of an image are coloured: a size that is named twice gets all views again (D4)."""
    return max(resolutions.count(size) for size in resolutions)


def make_sample(args, images, positives):
    """What common.Views calls for an image's views, with sizes and uniform draws, and the number of draws.

    The query and the key view of an image, then the key and (to be mixed) the query view of its positive, which is
    drawn from the table (N, num_positives) for this epoch; while the table is -1, the first two only. All of them again
    for each copy, the same crops in other colours, flipped anew.
    """
    repeats = copies(args.resolutions)

    def sample(index, sizes, draws):
        chosen = positives[torch.from_numpy(index)].numpy().astype(np.int64)  # (n, num_positives)
        column = (draws[:, -1] * chosen.shape[1]).astype(int)
        pick = chosen[np.arange(len(index)), column]
        sources = [(index, sizes)] * 2
        if args.selection != "none" and pick[0] >= 0:
            sources += [(pick, images.sizes(pick))] * (2 if args.mix == "cutmix" else 1)
        draws = draws[:, :-1].reshape(len(index), repeats, 4, DRAWS)
        cuts, colours = [], []
        for again, (view, (source, bounds)) in itertools.product(range(repeats), enumerate(sources)):
            crop, colour = draws[:, 0, view, : common.CROP_DRAWS], draws[:, again, view, common.CROP_DRAWS :]
            cuts.append((source, common.random_resized_crop(bounds, crop, args.crop_scale), args.image_size))
            colours.append(common.random_colour(colour, args.jitter, args.jitter_p, args.gray_p, args.blur_p))
        return cuts, colours

    return sample, repeats * 4 * DRAWS + 1


def mix(args, x, partner, step):
    """Eq. 3 on a batch as training mixes it: one share and one box, the same on every process. Returns as `cutmix`."""
    draws = common.generator(args.seed, step, 30)
    lam = np.random.default_rng(draws.initial_seed()).beta(args.alpha, args.alpha)
    return cutmix(x, partner, lam, draws)


def show_views(args, positives, loader, device):
    """What --show-views writes: the views of an image and of a positive, and the mix, before the normalisation."""
    if args.selection != "none":
        positives.random_(len(positives), generator=common.generator(args.seed))
        common.say("no encoder has chosen positives yet: they are random here")
    views = common.colour_views(next(iter(loader)), device)
    views = views[: len(views) // copies(args.resolutions)]
    names = ["query view", "key view", "key, positive", "query, positive"][: len(views)]
    if len(views) == 4:
        views.append(mix(args, views[0], views[3], step=0)[0])
        names.append("query, mixed")
    common.save_views(args.show_views, views, names)


# ==================================================================== 4. model

# ----------------- queue and keys (the same in moco_jointcrop, jcl, clim and logo)


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


def exchange(x, wanted):
    """Rows of all processes' x (n, ...), taken as one tensor: process r gets those of wanted[r], (m, ...).

    wanted (world, m) int64 on the CPU, the same on all processes, as is n. No gradient.
    """
    rank, world = common.rank_and_world()
    if world == 1:
        return x[wanted[0].to(x.device, non_blocking=True)]
    owner, row = wanted // len(x), wanted % len(x)
    send = torch.cat([row[r][owner[r] == rank] for r in range(world)])
    give, take = (owner == rank).sum(1).tolist(), owner[rank].bincount(minlength=world).tolist()
    received = x.new_empty(wanted.shape[1], *x.shape[1:])
    dist.all_to_all_single(received, x[send.to(x.device, non_blocking=True)].contiguous(), take, give)
    place = owner[rank].argsort(stable=True).to(x.device, non_blocking=True)
    return torch.empty_like(received).index_copy_(0, place, received)


@torch.no_grad()
def encode_keys(encode, views, generator):
    """Keys of all processes for several views, shuffled for batch norm: (views, N, C).

    encode: images -> keys; views: list of this process's (n, 3, H, W). The keys of one image must not share their batch
    statistics with its query, or the batch tells which is which (MoCo, section 3.3): all views of the global batch are
    shuffled, each process encodes its part, and the keys are put back in order. The shuffle depends on the generator
    alone, so any number of processes makes the same groups.
    """
    n, world = len(views[0]), common.rank_and_world()[1]
    shuffle = torch.randperm(len(views) * n * world, generator=generator)
    place = torch.arange(len(shuffle)).view(world, len(views), n).transpose(0, 1).flatten()  # where (view, image) lies
    mine = exchange(torch.cat(views), place[shuffle].view(world, -1))
    keys = gather(encode(mine))
    shuffle = shuffle.to(keys.device, non_blocking=True)
    return torch.empty_like(keys).index_copy_(0, shuffle, keys).view(len(views), n * world, -1)


# ---------------------------------------------------------------------- CLIM


def resize(x, size):
    return x if x.shape[-1] == size else F.interpolate(x, (size, size), mode="bilinear", antialias=True)


class CLIM(nn.Module):
    """Query encoder, momentum (key) encoder and queue of MoCo v2, on mixed images and at several resolutions."""

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args = args
        self.backbone = encoder or common.build_backbone(args.backbone, args.resolutions)
        width = common.output_width(self.backbone, args.image_size)
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, args.dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(args.queue, args.dim, args.seed)

    def query(self, x):
        """(n, 3, H, W) -> (n, dim) of unit length, in x's dtype."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, step):
        """views: this process's query and key view (n, 3, H, W), and, if there are positives, their key and query view,
        all at the largest size; again for each copy. Returns (loss, metrics: scalars, and q, k (n, dim)).
        """
        args, sizes, lam = self.args, self.args.resolutions, 1.0
        number = len(views) // copies(sizes)  # of views in a copy: 2 without positives, 3 without mixing, 4
        queries, keys = [], []
        for i, size in enumerate(sizes):
            first = sizes[:i].count(size) * number  # a size that comes again has views of its own
            x, *others = views[first : first + number]
            if number == 3:
                lam = 0.5  # without mixing, half the loss goes to each key
            elif number == 4:
                x, lam = mix(args, x, others.pop(), step)  # Eq. 3: the same box at every size
            queries.append(self.query(resize(x, size)))
            generator = common.generator(args.seed, step, 20 + i)
            keys.append(encode_keys(self.key, [resize(view, size) for view in others], generator))  # (1 or 2, N, C)
        rank = common.rank_and_world()[0]
        mine = [k.unflatten(1, (-1, len(x)))[:, rank] for k in keys]  # this process's (1 or 2, n, C) of each size
        pairs = itertools.product(queries, mine)
        loss = sum(clim_loss(q, k[0], k[-1], self.queue.keys, args.temperature, lam) for q, k in pairs)  # Eq. 6
        self.new_keys = keys[0][0]  # the anchors' own, at the largest size
        return loss, dict(loss=loss, q=queries[0], k=mine[0][0])

    @torch.no_grad()
    def update(self, m):
        """After the optimiser's step: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2); the new keys are enqueued.

        Parameters only: the copies keep their own batch-norm statistics.
        """
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)
        self.queue.enqueue(self.new_keys)


# ================================================================= 5. training


def parse_args(argv=None):
    """The command line as a namespace with every value of the recipe. Exits with a line on a mistake."""
    parser = common.run_parser("clim.py", __doc__, evaluated="query")
    group = parser.add_argument_group("CLIM")
    few = common.number(int, 1, 1000)
    choices = ("none", "random", "knn", "kmeans", "center")
    group.add_argument("--selection", choices=choices, help="of positives (Table 6); none: MoCo v2")
    group.add_argument("--mix", choices=("cutmix", "none"), help="none: half the loss to each key (Table 6)")
    group.add_argument("--num-clusters", type=common.COUNT, metavar="N", help="of k-means, m (Table 8)")
    group.add_argument("--knn-k", type=few, metavar="N", help="nearest neighbours, k (Table 8)")
    group.add_argument("--num-positives", type=few, metavar="N", help="kept of them (App. A.2)")
    group.add_argument("--alpha", type=common.POSITIVE, metavar="A", help="of CutMix's Beta(A, A) (Table 9)")
    group.add_argument("--resolutions", type=common.COUNT, nargs="+", metavar="N", help="px of the inputs (Table 7)")
    group.add_argument("--refresh-every", type=common.COUNT, metavar="N", help="epochs between choices of positives")
    group.add_argument("--clim-start", type=common.NATURAL, metavar="N", help="epochs of MoCo v2 before positives")
    group.add_argument("--queue", type=common.COUNT, metavar="K", help="negatives: the keys of earlier batches")
    args = common.parse_run(parser, argv, recipe)
    args.resolutions = sorted(args.resolutions, reverse=True)
    if args.variant == "released":
        common.fail("--variant released: CLIM has no released code; leave it out")
    if args.resolutions[0] != args.image_size:
        common.fail(f"--resolutions: the largest, {args.resolutions[0]}, must be the --image-size, {args.image_size}")
    if args.arch.startswith(("vit_", "deit")) and any(size % args.patch_size for size in args.resolutions):
        common.fail(f"--resolutions: --patch-size {args.patch_size} must divide each of {args.resolutions}")
    return args


def refresh(args, model, images, device, epoch, positives):
    """Choose the table of positives anew, from the momentum encoder's embeddings of all images, without bf16."""
    began = time.perf_counter()
    encoder, workers = nn.Sequential(model.momentum_backbone, model.momentum_projector), common.workers_of(args, device)
    features = common.extract_features(encoder, images, args.backbone, device, workers=workers)
    x = F.normalize(features, dim=1).to(device)
    table = choose_positives(args, x, common.generator(args.seed, epoch, 5)).to(device)
    if dist.is_initialized():
        dist.broadcast(table, 0)  # the sums of k-means on CUDA differ in the last bits
    positives.copy_(table)
    share = ""
    if images.classes:
        labels = torch.from_numpy(images.labels)
        own, others = labels[:, None], labels[positives.long()]
        same = (own == others)[(own >= 0) & (others >= 0)].float().mean()
        share = f"; {100 * same:.1f} % of them are of the image's own class"
    common.say(f"epoch {epoch + 1}: positives chosen in {time.perf_counter() - began:.1f} s{share}")


def train_step(args, model, ddp, optimizer, batch, step, steps, device):
    """One step of MoCo's Algorithm 1; steps: of an epoch. Returns the metrics, on the device."""
    lr, weight_decay, momentum = schedule(args, step, steps)
    for group in optimizer.param_groups:  # a weight decay of 0: a group that never decays
        group.update(lr=lr, weight_decay=weight_decay if group["weight_decay"] else 0.0)
    views = [common.normalize(view, *args.norm) for view in common.colour_views(batch, device)]
    common.seed_step(args.seed, step)  # of what still draws from the global generator
    loss, metrics = ddp(views, step)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    metrics |= dict(grad_norm=gradient_norm(model), lr=lr, momentum=momentum)
    optimizer.step()
    model.update(momentum)
    average_buffers(model)
    return metrics


def main(args, train=None, test=None, encoder=None):
    """Train. train, test: map-style Datasets of images instead of --dataset's; encoder: (N, 3, H, W) -> (N, width)."""
    device = common.join_processes(args)
    args.bn_groups = batch_norm_groups(args)
    run = common.Run(args, device, train, encoder)
    train, test = common.open_images(args, train, test)
    none_yet = torch.full((len(train), args.num_positives), -1, dtype=torch.int32)
    positives = none_yet.share_memory_()  # with the loader's workers
    views = common.Views(train, *make_sample(args, train, positives), args.seed, args.interpolation)
    loader = common.make_loader(args, views, device)
    if args.show_views:
        return show_views(args, positives, loader, device)

    torch.manual_seed(args.seed)
    model = group_batch_norms(CLIM(args, encoder).to(device, memory_format=torch.channels_last), args.bn_groups)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0, momentum=0.9, weight_decay=args.weight_decay)
    ddp = in_parallel(args, model)
    chosen = f"selection {args.selection}, {args.num_clusters or 'N / 128'} clusters, mix {args.mix}"
    about = f"{chosen}, sizes {args.resolutions}, {args.queue} negatives a query"
    chance = len(args.resolutions) ** 2 * math.log(args.queue + 1)
    run.begin(model, optimizer, train, test, model.backbone, chance=chance, about=about, positives=positives)
    if args.selection != "none" and args.clim_start >= args.epochs:
        common.say("warning: no positives will be chosen: give --clim-start a number below --epochs")
    while run.goes_on():
        epoch, begun = divmod(run.step, run.steps)
        due = begun == 0 and (epoch - args.clim_start) % args.refresh_every == 0
        if args.selection != "none" and epoch >= args.clim_start and (due or positives[0, 0] < 0):
            with run.evaluation():
                refresh(args, model, train, device, epoch, positives)
        for batch in run.batches(loader):
            run.log(train_step(args, model, ddp, optimizer, batch, run.step, run.steps, device))
        run.end_epoch()
    del ddp  # before the process group: in torch 2.11 a DDP that goes last can hang for ever
    run.finish()


# ============ 6. machine room (the same in all five files: read it once)


class AllReduce(torch.autograd.Function):
    """The sum over the processes; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return AllReduce.apply(gradient)


class GroupedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose statistics are taken over `groups` equal slices of the global batch, for (N, C) or (N, C, H, W).

    Several groups stand for the separate batch norms of as many GPUs, on any number of processes that divides them; one
    is one set of statistics over all processes. Running statistics are the mean over this process's groups;
    `average_buffers` then takes the mean over the processes.
    """

    def _check_input_dim(self, x):
        pass

    def forward(self, x):
        world = common.rank_and_world()[1]
        if not self.training or self.groups == world:  # this process is one group
            y = super().forward(x)
        elif self.groups == 1:
            y = self.over_processes(x, world)
        else:
            y = self.in_groups(x, self.groups // world)
        return self.after(y)

    def in_groups(self, x, g):
        mean, var = self.running_mean.repeat(g, 1), self.running_var.repeat(g, 1)
        options = self.weight, self.bias, True, self.momentum, self.eps
        y = torch.cat([F.batch_norm(part, m, v, *options) for part, m, v in zip(x.chunk(g), mean, var, strict=True)])
        self.running_mean.copy_(mean.mean(0))
        self.running_var.copy_(var.mean(0))
        return y

    @torch.compiler.disable  # collectives
    def over_processes(self, x, world):
        wide, others = x.to(self.running_mean.dtype), [0, *range(2, x.dim())]
        mean = AllReduce.apply(wide.mean(others, keepdim=True)) / world
        var = AllReduce.apply((wide - mean).square().mean(others, keepdim=True)) / world
        count = world * x.numel() // x.shape[1]
        self.running_mean.lerp_(mean.detach().flatten(), self.momentum)
        self.running_var.lerp_(var.detach().flatten() * count / (count - 1), self.momentum)
        shape = (-1, *[1] * (x.dim() - 2))
        scale, shift = (1.0, 0.0) if self.weight is None else (self.weight.view(shape), self.bias.view(shape))
        return ((wide - mean) * (var + self.eps).rsqrt() * scale + shift).to(x.dtype)


def batch_norm_groups(args):
    """The recipe's groups, or, with a line: one a process where these do not divide them, or fewer for the batch."""
    world, asked = common.rank_and_world()[1], args.bn_groups
    most = asked if asked == 1 or asked % world == 0 else world
    fitting = [g for g in range(most, 1, -1) if g % world == 0 and args.batch_size % g == 0 and args.batch_size > g]
    groups = (fitting or [1])[0]
    if groups != asked:
        common.say(f"batch-norm groups: {groups} for {asked}, with {world} process(es), batch {args.batch_size}")
    return groups


def group_batch_norms(module, groups):
    """Make every batch norm of a module one over `groups` slices of the global batch, in place; returns the module."""
    if groups == 1 and dist.is_initialized() and next(module.parameters()).is_cuda:
        return timm.layers.convert_sync_batchnorm(module)
    for norm in [m for m in module.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]:
        after = [norm.drop, norm.act] if hasattr(norm, "act") else []  # timm's BatchNormAct2d
        norm.after = nn.Sequential(*after)
        norm.__class__, norm.groups = GroupedBatchNorm, groups  # parameters and statistics stay where they are
    return module


def average_buffers(model):
    """Make batch norm's running statistics the mean over the processes: one collective."""
    world = common.rank_and_world()[1]
    buffers = [b for m in model.modules() if isinstance(m, GroupedBatchNorm) for b in (m.running_mean, m.running_var)]
    if world > 1 and buffers:
        flat = torch.cat(buffers)
        dist.all_reduce(flat)
        torch._foreach_copy_(buffers, flat.div_(world).split([len(b) for b in buffers]))


def gather(x):
    """(n, ...) of each process -> (N, ...) of all, in rank order, without gradient."""
    world = common.rank_and_world()[1]
    if world == 1:
        return x
    out = x.new_empty(world * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def gradient_norm(model):
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def in_parallel(args, model):
    """The model as --grad-checkpoint, --compile and torchrun want it run."""
    if args.grad_checkpoint:
        model.backbone.set_grad_checkpointing()
    if args.compile:
        for backbone in {model.backbone, getattr(model, "momentum_backbone", model.backbone)}:
            backbone.compile()
    if not dist.is_initialized():
        return model
    options = dict(broadcast_buffers=False, gradient_as_bucket_view=True)
    return DistributedDataParallel(model, find_unused_parameters=args.arch == "own", **options)


def schedule(args, step, steps_per_epoch):
    """(learning rate, weight decay, momentum of the momentum encoder) of a step.

    The rate warms up linearly, then falls by a cosine to min_lr, or by 10 at each of the recipe's milestones (shares of
    the run). A pair of weight decays or momenta is the start and the end of a cosine.
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


if __name__ == "__main__":
    main(parse_args())
