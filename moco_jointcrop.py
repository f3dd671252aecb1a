"""MoCo with JointCrop and JointBlur (arXiv 2412.16522, AAAI 2025), on MoCo v1, v2 and v3.

Two random crops of an image mostly have similar areas, and make easy positives. JointCrop draws the ratio of the two
areas first, from a law that one number sets, and then the areas: beta > 0 similar areas, beta = 0 a uniform log-ratio,
beta < 0 extreme ratios. Each view's area is still spread over the same range; loss, model and cost are untouched.
JointBlur does the same to the two blur strengths, so that one view is sharp and one is not. The rest is MoCo: a query
encoder, a momentum encoder for the keys, and a queue of keys as negatives (v1, v2), or the batch's keys and a predictor
(v3).

    Algorithm 1        joint_from_uniform, sample_joint    the two areas (or two blur strengths)
    Eq. 4-10           RandomCrop's own ratio law, in the tests; here `--joint none`
    App. F             make_sample, --joint either         JointCrop or JointBlur, one of the two per image
    App. G             centre_suppressed, --css-alpha      centre-suppressed sampling of the position
    MoCo, Eq. 1, 2     info_nce; MoCo.update               the loss; the momentum encoder
    MoCo v3, Alg. 1    contrast, MoCoV3

    python moco_jointcrop.py                                                  # laptop, no data
    python moco_jointcrop.py --dataset cifar10 --joint none                   # the baseline, one GPU
    torchrun --nproc_per_node=8 moco_jointcrop.py --dataset imagenet --data-dir DIR --moco v1 --beta 0

Baseline: `--joint none` is MoCo. New relative to it: joint_from_uniform and the lines of make_sample that call it.

Of this paper only the appendix could be read; the main text, with JointBlur's definition and the small data sets'
settings, could not. Inference, therefore: JointBlur is the same law on sigma in [0.1, 2.0], and in its runs one coin an
image decides for both views; CIFAR and STL-10 follow, with MoCo v2, ContrastiveCrop's public configurations as a
stand-in; so do MoCo v1's views.

Departures:
    D1 s_b: paper ln(s_max / s_min); the released code subtracts 0.1 inside the logarithm (`--variant released`)
    D2 if ten aspect ratios do not fit: torchvision's centre crop, as the paper's "same steps"; released
       (`--variant released`): the whole image
    D3 the released code has beta = 0 only, no JointBlur, no CSS: `--variant released` refuses the rest
    D4 crop areas from 0.2 here, as in the command of the released README; the released script's own default is 0.08
    D5 the queue is 8 % of the images, 4,096 on CIFAR; the stand-in's 65,536 would hold every image's own keys. STL-10's
       encoder has ImageNet's stem, the stand-in's CIFAR's
    D6 the paper reports on MoCo v1 and the released code is on v3; the default here is v2, `--moco` chooses;
       `--variant released` changes D1 and D2 only, whatever the version
    D7 v3's LARS is timm's, whose trust ratio divides by |g| + wd |w| + 1e-8, the released by |g + wd w|: at wd 1e-6 a
       step differs by 1e-6 of itself at gradients as large as the weights, by 1e-2 at 1e-4 of that; a library's, so
       kept
    D8 v3's momentum update follows the optimiser's step; released before the forwards: m's index moves by one
    D9 v3 on a ViT keeps the settings of ResNets (LARS, no batch norm at the predictor's end); released MoCo v3's for
       ViTs
    D10 v1's rate falls to a tenth at 60 and at 80 % of the epochs; ContrastiveCrop's own file multiplies it by 0, with
       which training would end at 60 %
    D11 code of MoCo v1 and v2: float32, and the first process's batch-norm statistics; here bf16 in the encoders on
       CUDA (--amp off: float32, with products in TF32), and the statistics' mean
"""

import copy
import math

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.optim import Lars, param_groups_weight_decay
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common

# ================================================================== 1. recipes

# fmt: off
BASE = dict(  # MoCo v2; a pair of probabilities is of the two views; the rate is that of batch size lr_batch
    moco="v2", joint="crop", beta=0.0, joint_prob=0.5, css_alpha=1.0, temperature=0.2, dim=128, momentum=0.999,
    weight_decay=1e-4, warmup=0, min_lr=0.0, bn_groups=8, patch_size=16, interpolation="bilinear",
    crop_scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray_p=0.2, blur_prob=(0.5, 0.5),
    solarize_p=(0.0, 0.0),
)
IMAGENET = dict(
    BASE, arch="resnet50", image_size=224, epochs=200, batch_size=256, lr=0.03, lr_batch=256, queue=65536,
)
CIFAR = dict(  # ContrastiveCrop's small configurations, as a stand-in; no blur, so JointBlur needs --blur-prob 0.5 0.5
    BASE, arch="resnet18", image_size=32, patch_size=4, epochs=500, batch_size=512, lr=0.5, lr_batch=512, min_lr=0.05,
    queue=4096, blur_prob=(0.0, 0.0),
)
RECIPES = dict(
    patterns=dict(  # ours, for two CPU cores
        BASE, arch="resnet_micro", image_size=32, patch_size=4, epochs=75, batch_size=64, lr=0.02, lr_batch=128,
        queue=128, blur_prob=(0.1, 0.1), crop_scale=(0.3, 1.0), bn_groups=2, momentum=0.95, warmup=1,
    ),
    cifar10=CIFAR,
    cifar100=CIFAR,
    stl10=dict(CIFAR, image_size=96, patch_size=8, queue=8192),
    imagenet100=dict(IMAGENET, arch="resnet18", queue=16384),  # ours
    imagenet=dict(IMAGENET, knn_every=50),  # its kNN takes minutes
    folder=dict(IMAGENET, queue=None),  # ours: a tenth of the images
)
CPU = dict(batch_size=256, lr=0.1, lr_batch=256, min_lr=0.0, momentum=0.99, blur_prob=(0.5, 0.5))  # ours
V1 = dict(temperature=0.07, milestones=(0.6, 0.8))  # ContrastiveCrop's, which the paper names as its own (App. G)
V1_IMAGENET = dict(V1, epochs=100)
V3_IMAGENET = dict(  # the released code, and MoCo v3's CONFIG: 100 epochs with 0.6 (300 epochs: --lr 0.3)
    queue=0, epochs=100, batch_size=4096, lr=0.6, lr_batch=256, warmup=10, min_lr=0.0, weight_decay=1e-6,
    momentum=(0.99, 1.0), temperature=1.0, dim=256, hidden=4096, bn_groups=1, jitter=(0.4, 0.4, 0.2, 0.1),
    blur_prob=(1.0, 0.1), solarize_p=(0.0, 0.2),
)
V3_CIFAR = dict(V3_IMAGENET, epochs=500, batch_size=512, hidden=2048, blur_prob=(0.0, 0.0))  # ours, as the next
V3_PATTERNS = dict(V3_IMAGENET, epochs=75, batch_size=64, lr_batch=128, warmup=1, hidden=512, momentum=(0.98, 1.0))
# fmt: on


def recipe(given):
    """The hyper-parameters that the data set, the encoder and MoCo's version of a command line stand for."""
    values = dict(RECIPES[given.dataset])
    small = given.dataset in ("cifar10", "cifar100", "stl10")
    large = given.dataset in ("imagenet100", "imagenet", "folder")
    if given.arch in ("resnet_micro", "resnet_mini") and small:
        values |= CPU
    if given.moco == "v1":
        values |= V1_IMAGENET if large else V1
    if given.moco == "v3":
        values |= V3_IMAGENET if large else V3_CIFAR if small else V3_PATTERNS
    return values


# ================================================================ 2. the paper


def joint_from_uniform(u, v, low, high, beta, offset=0.0):
    """Algorithm 1 on uniform draws: u, v (n,) in [0, 1) -> (a, b), two (n,) float64 tensors in [low, high].

    ln(b / a) follows the law of beta on [-s_b, s_b], s_b = ln(high / low - offset), drawn by u through the inverse of
    its distribution function; given the ratio, a is uniform on the values that keep both in range, drawn by v. beta
    None: both independent and uniform (RandomCrop). low > 0. offset: 0.1 in the released code (D1).
    """
    u, v = (torch.as_tensor(x, dtype=torch.float64) for x in (u, v))
    if beta is None:
        return low + (high - low) * u, low + (high - low) * v
    s_b = math.log(high / low - offset)  # line 1
    if abs(beta) < 1e-6:
        log_ratio = s_b * (2 * u - 1)  # line 5, and the limit of both other cases
    else:  # lines 3 and 7: normal, standard deviation s_b / |beta|, truncated at |beta| standard deviations
        tail = torch.special.ndtr(torch.tensor(-abs(beta), dtype=torch.float64))
        log_ratio = (torch.special.ndtri(tail + u * (1 - 2 * tail)) * (s_b / abs(beta))).clamp(-s_b, s_b)
    if beta < 0:  # lines 8-12: mirrored within each half, so that the extremes are the likeliest
        log_ratio = torch.where(log_ratio < 0, -s_b - log_ratio, s_b - log_ratio)
    ratio = log_ratio.exp()
    lowest, highest = (low / ratio).clamp_min(low), (high / ratio).clamp_max(high)
    a = lowest + v * (highest - lowest).clamp_min(0)  # line 14; rounding may cross the ends where |ln ratio| = s_b
    return a.clamp(low, high), (a * ratio).clamp(low, high)  # line 15


def sample_joint(n, low, high, beta, generator=None, offset=0.0):
    """n pairs of Algorithm 1: two (n,) float64 tensors in [low, high], areas for J-Crop or blur sigmas for J-Blur."""
    u, v = torch.rand(2, n, dtype=torch.float64, generator=generator)
    return joint_from_uniform(u, v, low, high, beta, offset)


def centre_suppressed(draws, alpha):
    """Positions by centre-suppressed sampling (App. G): draws (n,) uniform in [0, 1) -> (n, 2) of Beta(alpha, alpha).

    A position is a share, below 1, of the room that a crop leaves; alpha < 1 prefers the edges. Each draw seeds a pair.
    """
    pairs = [np.random.default_rng(int(draw * 2**53)).beta(alpha, alpha, 2) for draw in draws]
    return np.clip(pairs, 0, 1 - 1e-9)


def contrast(q, k, temperature, first):
    """MoCo v3's ctr: 2 T x cross-entropy of q (n, C) against all keys k (N, C); row i's positive is first + i."""
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / temperature
    return 2 * temperature * F.cross_entropy(logits, first + torch.arange(len(q), device=q.device))


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
SHARED = 6  # draws of both views together, after their own
BLUR, SIGMA = 7, (0.1, 2.0)  # which of a view's colour draws decides on blur; the range of its strength in pixels


def make_sample(args):
    """What common.Views calls for a query and a key view an image, with sizes and uniform draws, and their number."""
    released = args.variant == "released"
    offset = 0.1 if released else 0.0  # D1

    def sample(index, sizes, draws):
        coin, area_u, area_v, sigma_u, sigma_v, blur = draws[:, 2 * DRAWS :].T
        joint_crop = np.full(len(index), args.joint in ("crop", "both"))
        joint_blur = np.full(len(index), args.joint in ("blur", "both"))
        if args.joint == "either":  # App. F
            joint_crop = coin < args.joint_prob
            joint_blur = ~joint_crop
        areas = joint_from_uniform(area_u, area_v, *args.crop_scale, args.beta, offset)
        sigmas = joint_from_uniform(sigma_u, sigma_v, *SIGMA, args.beta)
        cuts, colours = [], []
        for view in (0, 1):
            draw = draws[:, view * DRAWS : (view + 1) * DRAWS].copy()
            crop, colour = draw[:, : common.CROP_DRAWS], draw[:, common.CROP_DRAWS :]
            if args.css_alpha != 1:
                crop[:, -2:] = centre_suppressed(crop[:, -1], args.css_alpha)
            alone = common.random_resized_crop(sizes, crop, args.crop_scale, whole=released)  # D2
            joint = common.random_resized_crop(sizes, crop, args.crop_scale, area=areas[view], whole=released)
            cuts.append((index, np.where(joint_crop[:, None], joint, alone), args.image_size))
            colour[:, BLUR] = np.where(joint_blur, blur, colour[:, BLUR])  # one coin for both views
            chances = args.jitter_p, args.gray_p, args.blur_prob[view]
            parameters = common.random_colour(colour, args.jitter, *chances, SIGMA, args.solarize_p[view])
            sigma = parameters[:, common.COLOUR.index("sigma")]
            sigma[:] = np.where(joint_blur & (sigma > 0), sigmas[view], sigma)
            colours.append(parameters)
        return cuts, colours

    return sample, 2 * DRAWS + SHARED


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


# ---------------------------------------------------------------------- MoCo


class MoCo(nn.Module):
    """Query encoder, momentum (key) encoder and queue: MoCo v1 (linear head) and v2 (two-layer head)."""

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args = args
        self.backbone = encoder or common.build_backbone(args.backbone)
        width = common.output_width(self.backbone, args.image_size)
        hidden = [] if args.moco == "v1" else [nn.Linear(width, width), nn.ReLU(inplace=True)]
        self.projector = nn.Sequential(*hidden, nn.Linear(width, args.dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(args.queue, args.dim, args.seed) if args.queue else None  # v3 has none

    def query(self, x):
        """(n, 3, H, W) -> (n, dim) of unit length, in x's dtype."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, step):
        """views: this process's query and key views (n, 3, H, W). Returns (loss, metrics: scalars, and q, k)."""
        q = self.query(views[0])
        self.new_keys = encode_keys(self.key, views[1:], common.generator(self.args.seed, step, 20))[0]  # (N, C)
        k = self.new_keys.unflatten(0, (-1, len(q)))[common.rank_and_world()[0]]  # this process's (n, C)
        loss = info_nce(q, k, self.queue.keys, self.args.temperature)  # MoCo, Eq. 1
        return loss, dict(loss=loss, q=q, k=k)

    @torch.no_grad()
    def update(self, m):
        """After the optimiser's step: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2); the new keys are enqueued.

        Parameters only: the copies keep their own batch-norm statistics.
        """
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)
        if self.queue:
            self.queue.enqueue(self.new_keys)


class MoCoV3(MoCo):
    """MoCo v3 (--moco v3): projector and predictor, a symmetric loss against the batch's keys, no queue."""

    def __init__(self, args, encoder=None):
        super().__init__(args, encoder)
        if encoder is None:  # MoCo v3 starts from zero residual branches
            for block in self.modules():
                if hasattr(block, "zero_init_last"):
                    block.zero_init_last()

        def mlp(width, *end):
            hidden = nn.Linear(width, args.hidden, bias=False), nn.BatchNorm1d(args.hidden), nn.ReLU(inplace=True)
            return nn.Sequential(*hidden, nn.Linear(args.hidden, args.dim, bias=False), *end)

        width = common.output_width(self.backbone, args.image_size)
        self.projector = mlp(width, nn.BatchNorm1d(args.dim, affine=False))
        self.predictor = mlp(args.dim)  # D9
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)

    def query(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.predictor(self.projector(self.backbone(x))).to(x.dtype)

    def forward(self, views, step):
        """MoCo v3's Algorithm 1; arguments and result as MoCo's."""
        (q1, q2), (k1, k2) = [self.query(x) for x in views], [gather(self.key(x)) for x in views]
        first = common.rank_and_world()[0] * len(q1)
        temperature = self.args.temperature
        loss = contrast(q1, k2, temperature, first) + contrast(q2, k1, temperature, first)
        return loss, dict(loss=loss, q=q1, k=k2[first : first + len(q1)])


# ================================================================= 5. training


def parse_args(argv=None):
    """The command line as a namespace with every value of the recipe. Exits with a line on a mistake."""
    parser = common.run_parser("moco_jointcrop.py", __doc__, evaluated="query")
    group = parser.add_argument_group("MoCo with JointCrop and JointBlur")
    real, area = common.number(float, -1e9, 1e9), common.number(float, 1e-9, 1)
    group.add_argument("--moco", choices=("v1", "v2", "v3"), help="MoCo's version: heads, loss, schedule (D6)")
    joint = ("none", "crop", "blur", "either", "both")
    group.add_argument("--joint", choices=joint, help="what is drawn jointly; either: one of the two (App. F)")
    group.add_argument("--beta", type=real, metavar="X", help="of J-Crop(beta), J-Blur(beta); any real number")
    group.add_argument("--joint-prob", type=common.SHARE, metavar="P", help="of JointCrop, if --joint either (App. F)")
    group.add_argument("--css-alpha", type=common.POSITIVE, metavar="A", help="position by Beta(A, A); 1: off (App. G)")
    group.add_argument("--crop-scale", type=area, nargs=2, metavar=("LO", "HI"), help="area range of the crops")
    group.add_argument("--blur-prob", type=common.SHARE, nargs=2, metavar=("P1", "P2"), help="of blurring each view")
    group.add_argument("--queue", type=common.COUNT, metavar="K", help="negatives: the keys of earlier batches")
    args = common.parse_run(parser, argv, recipe)
    if args.moco == "v3" and args.queue:
        common.fail("--queue: MoCo v3 has none, its negatives are the batch")
    if args.crop_scale[0] >= args.crop_scale[1]:
        common.fail(f"--crop-scale {args.crop_scale[0]} {args.crop_scale[1]}: LO has to be below HI")
    if args.joint in ("blur", "either", "both") and max(args.blur_prob) == 0:
        common.fail(f"--joint {args.joint} has nothing to act on: this recipe does not blur; give --blur-prob 0.5 0.5")
    if args.variant == "released" and (args.joint not in ("none", "crop") or args.beta != 0 or args.css_alpha != 1):
        common.fail("--variant released: the released code has JointCrop with beta 0 only (D3)")
    return args


def make_optimizer(args, model):
    """SGD as in MoCo; LARS for v3, without decay and adaptation of biases and batch norms (D7)."""
    if args.moco == "v3":
        return Lars(param_groups_weight_decay(model, args.weight_decay), lr=0.0, momentum=0.9, trust_coeff=0.001)
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.0, momentum=0.9, weight_decay=args.weight_decay)


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
    loader = common.make_loader(args, common.Views(train, *make_sample(args), args.seed, args.interpolation), device)
    if args.show_views:
        return common.save_views(args.show_views, common.colour_views(next(iter(loader)), device), ("query", "key"))

    torch.manual_seed(args.seed)
    model = (MoCoV3 if args.moco == "v3" else MoCo)(args, encoder).to(device, memory_format=torch.channels_last)
    model = group_batch_norms(model, args.bn_groups)
    optimizer = make_optimizer(args, model)
    ddp = in_parallel(args, model)
    negatives = args.queue or args.batch_size - 1
    scale = 4 * args.temperature if args.moco == "v3" else 1  # v3's loss has two terms of 2 T each
    views = f"crop areas {tuple(args.crop_scale)}, blur {tuple(args.blur_prob)}"
    about = f"MoCo {args.moco}, --joint {args.joint}, beta {args.beta:g}, {views}, {negatives} negatives a query"
    run.begin(model, optimizer, train, test, model.backbone, chance=scale * math.log(negatives + 1), about=about)
    while run.goes_on():
        for batch in run.batches(loader):
            run.log(train_step(args, model, ddp, optimizer, batch, run.step, run.steps, device))
        run.end_epoch()
    del ddp  # before the process group: in torch 2.11 a DDP that goes last can hang for ever
    run.finish()


# ============ 6. machine room (the same in all five files: read it once)


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


# -- batch norm over all processes (the same in moco_jointcrop, logo and patchmix)


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


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose statistics are taken over the global batch, for (N, C) or (N, C, H, W), on CPUs.

    It does what torch's SyncBatchNorm does on GPUs. All processes have the same statistics, and gradients flow through
    them. Each process must have as many images as the others.
    norm: the batch norm whose parameters, statistics and state_dict keys this one takes over.
    """

    def __init__(self, norm):
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked, self.training = norm.num_batches_tracked, norm.training
        # timm's BatchNormAct2d also drops and activates.
        self.after = nn.Sequential(norm.drop, norm.act) if hasattr(norm, "act") else nn.Identity()

    def _check_input_dim(self, x):
        """Any dimension will do."""

    @torch.compiler.disable  # it cannot compile the collectives
    def forward(self, x):
        if not self.training:
            return self.after(super().forward(x))
        world = common.rank_and_world()[1]
        wide = x.to(self.running_mean.dtype)  # x is bf16 under autocast
        all_but_channels = [0, *range(2, x.dim())]
        mean = AllReduce.apply(wide.mean(all_but_channels, keepdim=True)) / world
        var = AllReduce.apply((wide - mean).square().mean(all_but_channels, keepdim=True)) / world
        count = world * x.numel() // x.shape[1]  # values per channel
        self.running_mean.lerp_(mean.detach().flatten(), self.momentum)
        self.running_var.lerp_(var.detach().flatten() * count / (count - 1), self.momentum)
        y = (wide - mean) * (var + self.eps).rsqrt()
        if self.affine:
            y = y * self.weight.view_as(mean) + self.bias.view_as(mean)
        return self.after(y.to(x.dtype))


def synchronize_batch_norms(module):
    """Replace every batch norm of a module by one over the batch of all processes; returns the module.

    With one process the module stays as it is. On CUDA the new ones are torch's SyncBatchNorm.
    """
    if common.rank_and_world()[1] == 1:
        return module
    if any(parameter.is_cuda for parameter in module.parameters()):
        return timm.layers.convert_sync_batchnorm(module)
    for name, child in module.named_children():
        if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d)):
            setattr(module, name, GlobalBatchNorm(child))
        else:
            synchronize_batch_norms(child)
    return module


if __name__ == "__main__":
    main(parse_args())
