"""LoGo: Leverage Your Local and Global Representations (CVPR 2022, arXiv 2203.17205), on MoCo and SimSiam.

Large crops of an image show the same things, small ones often do not. LoGo takes two global and two local crops.
Globals are drawn to each other, as ever; locals are drawn to the globals, but never the globals to the locals (they are
constants there); and the two locals are pushed apart, since they are different parts. How alike two locals are is not
measured by their cosine but learned: an affinity network is trained to score locals of one image above locals of two,
and the encoder then lowers, a little, its score for its own pairs. The two take turns, step by step.

    L_gg, L_lg    MoCo.forward, SimSiam.forward, combine
    Eq. 6         affinity_loss        -Omega: what the affinity learns (supplement, Eq. 4)
    L_ll          local_dissimilarity  what the encoder lowers
    Eq. 9         train_step           L_gg + L_lg + lambda L_ll: what the encoder learns
    Algorithm 1   LocalToLocal, train_step, in turn: Eq. 6, then Eq. 9

    python logo.py                                                            # laptop, no data
    python logo.py --dataset cifar10 --local-crops 0 --one-way                # the baseline, MoCo v2, one GPU
    torchrun --nproc_per_node=8 logo.py --dataset imagenet100 --data-dir DIR --base simsiam

Baseline: `--local-crops 0` is symmetrised MoCo (both views are queries), or SimSiam; with `--one-way` MoCo v2's loss.
New relative to it: local crops, Affinity, affinity_loss, local_dissimilarity, LocalToLocal.

Of this paper only the supplement could be read. The equations of the main text are as others quote them; the MoCo form
is the released code's; all of SimSiam's (of which no code was released) and lambda for MoCo are inference.

Beware: the affinity has batch norms and sees pairs of one image and pairs of two, here as in the released code, in
batches of their own. So it need not compare the locals, and in our runs hardly does: it ranks all rightly in such
batches, but 57 to 63 % where both kinds share one (tests/results/README.md).

Departures, from the released code if not said otherwise:
    D1 default: the released form, which is bounded and needs no lambda: a logistic affinity, the mean over the six
       terms, and L_ll as a step of its own, clipped to 1.5 % of the last gradient's norm. Paper (`--variant paper`): a
       linear objective, L_gg + L_lg + lambda L_ll with the sum of L_lg's four terms, one step, at the same rate: the
       loss is five times as large. SimSiam, in both: lambda, of which 1e-4 is a third party's and acts little
    D2 a momentum update each step; released: two, as each forward pass makes one
    D3 weight decay once a step; released: twice, in both optimisers of the encoder
    D4 the clip's reference norm is kept over epochs and saved; released: 0 at an epoch's start, which stops L_ll there
    D5 the affinity sees the whole batch on every process; released: each process has an affinity of its own
    D6 negatives of the affinity: the batch rolled by one; released: reversed, where an odd batch's middle meets itself
    D7 local crops take [0.08, r_l] of the area (supplement); released default: 0.05. On patterns at half the size
    D8 no local keys, which released code makes and drops; main gradient not clipped at 100
    D9 STL-10: ResNet-18; the supplement's small AlexNet is not in timm
    D10 colours once, in MoCo v2's order; released blur before jitter and gray, and on CIFAR jitter, gray, flip and
       normalisation twice, with the std (0.2023, 0.1994, 0.2010)
    D11 baseline: global crops and, with --one-way, the key's view enqueued; released crops from 0.08, both enqueued
    D12 released float32, and of the processes' batch-norm statistics the first's; here bf16 in the encoders on CUDA
       (--amp off: float32, with products in TF32), and the statistics' mean
    D13 SimSiam: rate and weight decay are LoGo's MoCo's, as is the batch but on CIFAR (512, a third party's, whose rate
       is half of that here); the rate falls by a cosine, the predictor's, too (SimSiam's code: constant)
"""

import copy
import math

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common

# ================================================================== 1. recipes

# fmt: off
BASE = dict(  # the released code's, but for the crops (supplement, section 1) and lam; lr is that of batch lr_batch
    base="moco", local_crops=2, no_l2l=False, one_way=False, global_scale=(0.4, 1.0), local_scale=(0.08, 0.4),
    affinity_form="logistic", affinity_hidden=256, affinity_lr=None, l2l_weighting="clip", clip_ratio=0.015, lam=1e-4,
    jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray_p=0.2, blur_p=0.5, interpolation="bilinear", patch_size=16,
    epochs=200, batch_size=256, lr=0.03, lr_batch=256, milestones=(0.6, 0.8), warmup=0, min_lr=0.0, weight_decay=1e-4,
    dim=128, momentum=0.999, temperature=0.07, queue=4096, bn_groups=8,
)
CIFAR = dict(  # supplement, section 1
    BASE, arch="resnet18", image_size=32, patch_size=4, local_scale=(0.08, 0.6), blur_p=0.0,
)
IMAGENET = dict(BASE, arch="resnet50", image_size=224, local_size=96)
RECIPES = dict(
    patterns=dict(  # ours, for two CPU cores
        BASE, arch="resnet_micro", image_size=32, patch_size=4, local_size=16, epochs=28, batch_size=64, lr=0.06,
        lr_batch=128, milestones=None, warmup=5, momentum=0.95, temperature=0.2, queue=128, blur_p=0.1, bn_groups=2,
    ),
    cifar10=CIFAR,
    cifar100=CIFAR,
    stl10=dict(BASE, arch="resnet18", image_size=96, patch_size=8),  # supplement, section 1, and D9
    imagenet100=dict(IMAGENET, arch="resnet34"),  # supplement, section 1
    imagenet=dict(IMAGENET, queue=65536, knn_every=50),  # ours; its kNN takes minutes
    folder=dict(IMAGENET, queue=None),  # ours: a tenth of the images
)
SIMSIAM = dict(dim=2048, layers=3, hidden=512, queue=0, bn_groups=1, l2l_weighting="lambda", milestones=None)
SIMSIAM_CIFAR = dict(SIMSIAM, layers=2, batch_size=512)  # a third party's, as hidden and lam
SIMSIAM_RECIPES = dict(
    patterns=dict(SIMSIAM, dim=256, layers=2, hidden=128), cifar10=SIMSIAM_CIFAR, cifar100=SIMSIAM_CIFAR,
)
PAPER = dict(affinity_form="linear", l2l_weighting="lambda")  # D1
CPU = dict(lr=0.1, milestones=None, momentum=0.99, blur_p=0.5, temperature=0.2)  # ours: the small encoders
SIMSIAM_CPU = dict(CPU, batch_size=256, dim=512, hidden=128)  # a bottleneck of a quarter, as SimSiam's
# fmt: on


def recipe(given):
    """The hyper-parameters that the data set, the encoder, the base and the variant of a command line stand for."""
    values = dict(RECIPES[given.dataset])
    if given.base == "simsiam":
        values |= SIMSIAM_RECIPES.get(given.dataset, SIMSIAM)
    if given.variant == "paper":
        values |= PAPER
    if given.arch in ("resnet_micro", "resnet_mini") and given.dataset in ("cifar10", "cifar100", "stl10"):
        values |= SIMSIAM_CPU if given.base == "simsiam" else CPU
    if (given.affinity_form or values["affinity_form"]) == "linear":
        values["affinity_lr"] = 1e-4  # unbounded below, so slowly
    return values


# ================================================================ 2. the paper


class Affinity(nn.Module):
    """The learned affinity of local crops: forward(a, b), (N, dim) each -> score (N,), high for crops of one image."""

    def __init__(self, dim, hidden):
        super().__init__()
        layers = [nn.Linear(2 * dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
        layers += [nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, a, b):
        return self.layers(torch.cat([a, b], dim=1)).squeeze(1)


def affinity_loss(affinity, local1, local2, noise=None, form="logistic"):
    """What the affinity minimises: it is to score two locals of one image above locals of two (Eq. 6).

    local1, local2 (N, C) of unit length, row by row of the same image; both are detached here. Negatives: the other
    local of the batch rolled by one. noise (2, N, C) is added to the positives. logistic (released): softplus of minus
    the positives' and of the negatives' scores, both orders. linear (paper): -Omega, where Omega = E f(positive) - E
    f(negative) (supplement, Eq. 4) and f, the softplus of the score, is above 0; unbounded below. Returns a scalar.
    """
    a, b = local1.detach(), local2.detach()
    x, y = (0, 0) if noise is None else noise
    if form == "linear":
        return F.softplus(affinity(a, b.roll(1, 0))).mean() - F.softplus(affinity(a + x, b + y)).mean()  # -Eq. 4
    positive = F.softplus(-affinity(a + x, b + y)) + F.softplus(-affinity(b + x, a + y))
    negative = F.softplus(affinity(a, b.roll(1, 0))) + F.softplus(affinity(b, a.roll(1, 0)))
    return (positive + negative).mean() / 2


def local_dissimilarity(affinity, local1, local2, form="logistic"):
    """L_ll, what the encoder minimises: the mean softplus of the affinity's score for two locals of one image, (N, C).

    The gradient goes to the locals only; the affinity is a constant. In the linear form this is f itself, in the
    logistic one the price of taking the pair for a negative: the same number, whatever the form. Returns a scalar.
    """
    constants = {name: p.detach() for name, p in affinity.named_parameters()}
    return F.softplus(torch.func.functional_call(affinity, constants, (local1, local2))).mean()


def combine(args, global_terms, local_terms):
    """L_gg and L_lg: the mean of all terms (released), or L_gg + L_lg with the local terms summed (paper, D1)."""
    if args.variant == "released":
        return (sum(global_terms) + sum(local_terms)) / (len(global_terms) + len(local_terms))
    return sum(global_terms) / len(global_terms) + sum(local_terms)


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


def make_sample(args):
    """What common.Views calls for two global and the local views, with sizes and uniform draws, and their number."""
    kinds = [(args.global_scale, args.image_size)] * 2 + [(args.local_scale, args.local_size)] * args.local_crops

    def sample(index, sizes, draws):
        cuts, colours = [], []
        draws = draws.reshape(len(index), len(kinds), DRAWS).swapaxes(0, 1)
        for (scale, size), draw in zip(kinds, draws, strict=True):
            crop, colour = draw[:, : common.CROP_DRAWS], draw[:, common.CROP_DRAWS :]
            cuts.append((index, common.random_resized_crop(sizes, crop, scale), size))
            colours.append(common.random_colour(colour, args.jitter, args.jitter_p, args.gray_p, args.blur_p))
        return cuts, colours

    return sample, len(kinds) * DRAWS


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


# ------------------------------------------------------------- the two bases


class MoCo(nn.Module):
    """Query encoder, momentum (key) encoder and queue of MoCo v2; globals are queries and keys, locals queries only."""

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args = args
        self.backbone = encoder or common.build_backbone(args.backbone, [args.local_size])
        width = common.output_width(self.backbone, args.image_size)
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, args.dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(args.queue, args.dim, args.seed)

    def chance(self):
        """The loss at equal logits."""
        terms = 1 if self.args.variant == "released" else 1 + 2 * self.args.local_crops
        return terms * math.log(self.args.queue + 1)

    def query(self, x):
        """(n, 3, H, W) -> (n, dim) of unit length, in x's dtype."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    local = query  # the embedding that the affinity sees

    def key(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, step):
        """views: this process's two global and two or no local ones (n, 3, H, W). Returns (loss, metrics).

        metrics: scalars, and q, k, and locals, whose embeddings keep their gradient.
        """
        queried, keyed = (views[:1], views[1:2]) if self.args.one_way else (views, views[:2])
        draws = [common.generator(self.args.seed, step, 20 + i) for i in range(len(keyed))]
        keys = torch.cat([encode_keys(self.key, [x], draw) for x, draw in zip(keyed, draws, strict=True)])
        q = [self.query(x) for x in queried]
        k = keys.unflatten(1, (-1, len(q[0])))[:, common.rank_and_world()[0]]  # this process's

        def nce(query, key):
            return info_nce(query, key, self.queue.keys, self.args.temperature)

        global_terms = [nce(query, key) for query, key in zip(q[:2], k.flip(0), strict=True)]  # L_gg: the other's key
        local_terms = [nce(query, key) for query in q[2:] for key in k]  # L_lg
        loss = combine(self.args, global_terms, local_terms)
        self.new_keys = keys.flatten(0, 1)
        return loss, dict(loss=loss, q=q[0], k=k[-1], locals=q[2:])

    @torch.no_grad()
    def update(self, m):
        """After the optimiser's step: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2); the new keys are enqueued.

        Parameters only: the copies keep their own batch-norm statistics.
        """
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)
        self.queue.enqueue(self.new_keys)


class SimSiam(nn.Module):
    """Siamese encoder and predictor: negative cosines, no keys, no queue (SimSiam, section 3)."""

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args = args
        self.backbone = encoder or common.build_backbone(args.backbone, [args.local_size])
        for block in self.backbone.modules():
            if encoder is None and hasattr(block, "zero_init_last"):
                block.zero_init_last()  # SimSiam starts from zero residual branches

        def layer(a, b):
            return [nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU(inplace=True)]

        widths = [common.output_width(self.backbone, args.image_size)] + [args.dim] * args.layers
        layers = [m for a, b in zip(widths, widths[1:], strict=False) for m in layer(a, b)]
        self.projector = nn.Sequential(*layers[:-2], nn.BatchNorm1d(args.dim, affine=False))  # SimSiam's code
        self.predictor = nn.Sequential(*layer(args.dim, args.hidden), nn.Linear(args.hidden, args.dim))

    def chance(self):
        return 0.0

    def project(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.projector(self.backbone(x)).to(x.dtype)

    def local(self, x):
        return F.normalize(self.project(x), dim=1)

    def forward(self, views, step):
        """As MoCo.forward: p = predictor(z) is drawn to z of another view, and z is a constant there."""
        z = [self.project(x) for x in views]
        p = [self.predictor(v) for v in z]
        z1, z2 = (v.detach() for v in z[:2])

        def distance(p, z):
            return -F.cosine_similarity(p, z, dim=1).mean()

        global_terms = [distance(p[0], z2), distance(p[1], z1)]  # L_gg
        local_terms = [distance(local, z) for local in p[2:] for z in (z1, z2)]  # L_lg
        loss = combine(self.args, global_terms, local_terms)
        q, k, *local = [F.normalize(v, dim=1) for v in (z1, z2, *z[2:])]
        return loss, dict(loss=loss, q=q, k=k, locals=local)

    def update(self, m):
        """No momentum encoder, no queue."""


# ------------------------------------------------------------- local to local


class LocalToLocal:
    """The affinity with its optimiser, and the encoder's step away from it (Algorithm 1).

    With the weighting "clip" (released) that step is the encoder's own, by a second SGD without weight decay, its
    gradient clipped to clip_ratio times the norm of the last main gradient, and before the main loss is computed; none
    is made before there is such a norm. With "lambda" (paper) L_ll is a term of the main loss.
    """

    def __init__(self, args, model, device):
        self.args, self.model, self.norm = args, model, torch.zeros((), device=device)
        self.affinity = Affinity(args.dim, args.affinity_hidden).to(device)
        self.rate = args.affinity_lr or args.lr * args.batch_size / args.lr_batch  # the affinity's, constant
        self.optimizer = torch.optim.SGD(self.affinity.parameters(), 0.0, momentum=0.9, weight_decay=args.weight_decay)
        encoder = [*model.backbone.parameters(), *model.projector.parameters()]
        encoder = [p for p in encoder if p.requires_grad]  # a user's own may have frozen ones
        self.second = torch.optim.SGD(encoder, 0.0, momentum=0.9)

    def dissimilarity(self, local, step):
        """A step of the affinity (Eq. 6), then L_ll of the whole batch, with a gradient to this process's locals."""
        local = [gather_with_gradient(x) for x in local]
        noise = None
        if self.args.affinity_form == "logistic":
            draws = common.generator(self.args.seed, step, 30)
            noise = torch.randn(2, *local[0].shape, generator=draws, pin_memory=local[0].is_cuda)
            noise = noise.to(local[0], non_blocking=True) * 0.3 / self.args.dim**0.5
        loss = affinity_loss(self.affinity, *local, noise, self.args.affinity_form)
        descend(self.optimizer, loss, self.rate)  # Eq. 6
        dissimilarity = local_dissimilarity(self.affinity, *local, self.args.affinity_form)
        return dissimilarity, dict(affinity_loss=loss, dissimilarity=dissimilarity)

    def clipped_step(self, views, step, lr):
        """The encoder's own step; views: the two local ones. Returns the metrics."""
        dissimilarity, metrics = self.dissimilarity([self.model.local(x) for x in views], step)
        descend(self.second, dissimilarity, lr, self.args.clip_ratio * self.norm)
        return metrics

    def state(self):
        """What a checkpoint holds, by name."""
        return dict(affinity=self.affinity, affinity_optimizer=self.optimizer, second=self.second, norm=self.norm)


def gather_with_gradient(x):
    """(n, C) of each process -> (N, C) of all; the gradients of all processes flow back to it."""
    if not dist.is_initialized():
        return x
    rank, world = common.rank_and_world()
    parts = [x if r == rank else torch.zeros_like(x) for r in range(world)]
    return AllReduce.apply(torch.cat(parts))


def descend(optimizer, loss, lr, most=math.inf):
    """A step down a loss outside DDP: its gradient is averaged over the processes, then clipped to the norm `most`."""
    optimizer.param_groups[0]["lr"] = lr
    parameters = optimizer.param_groups[0]["params"]
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)  # an own encoder may leave some unused
    if dist.is_initialized():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat.div_(dist.get_world_size()))
        parts = flat.split([gradient.numel() for gradient in gradients])
        gradients = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    scale = (most / (torch.nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1)  # 1e-6 as torch's own clipping
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient * scale
    optimizer.step()


# ================================================================= 5. training


def parse_args(argv=None):
    """The command line as a namespace with every value of the recipe. Exits with a line on a mistake."""
    parser = common.run_parser("logo.py", __doc__, evaluated="query")
    parser.set_defaults(variant="released")  # D1
    group = parser.add_argument_group("LoGo")
    group.add_argument("--base", choices=("moco", "simsiam"), help="what LoGo is put on")
    group.add_argument("--local-crops", type=int, choices=(0, 2), help="0: symmetrised MoCo, or SimSiam")
    group.add_argument("--no-l2l", action="store_true", default=None, help="without local-to-local dissimilarity")
    group.add_argument("--affinity-form", choices=("logistic", "linear"), help="what the affinity learns by (D1)")
    weight = common.number(float, 0)
    group.add_argument("--l2l-weighting", choices=("clip", "lambda"), help="L_ll: a step of its own, or a term")
    group.add_argument("--clip-ratio", type=weight, metavar="X", help="clip its gradient to X times the main one's")
    group.add_argument("--lam", type=weight, metavar="X", help="lambda, where L_ll is a term of the loss")
    scale = dict(type=common.SHARE, nargs=2, metavar=("LO", "HI"))
    group.add_argument("--global-scale", **scale, help="area of a global crop (supplement, Table 9)")
    group.add_argument("--local-scale", **scale, help="area of a local crop, up to r_l (supplement, Table 8)")
    group.add_argument("--local-size", type=common.COUNT, metavar="N", help="px of a local crop (the global ones')")
    group.add_argument("--one-way", action="store_true", default=None, help="MoCo v2's loss; with --local-crops 0")
    group.add_argument("--queue", type=common.COUNT, metavar="K", help="negatives of MoCo: the keys of earlier batches")
    args = common.parse_run(parser, argv, recipe)
    args.l2l = args.local_crops == 2 and not args.no_l2l
    if args.base == "simsiam" and args.queue:
        common.fail("--queue: SimSiam has no negatives; leave it out, or give --base moco")
    used = {"clip": "clip_ratio", "lambda": "lam"}[args.l2l_weighting] if args.l2l else "neither"
    for name in {"clip_ratio", "lam"} - {used}:
        if getattr(args, name) != parser.get_default(name):
            common.fail(f"--{name.replace('_', '-')} has no effect: of L_ll's two weights this run uses {used}")
    args.local_size = min((args.local_crops and args.local_size) or args.image_size, args.image_size)
    if args.one_way and (args.base != "moco" or args.local_crops):
        common.fail("--one-way is MoCo v2's loss: it needs --base moco --local-crops 0")
    if args.local_crops and args.arch.startswith(("vit_", "deit")) and args.local_size % args.patch_size:
        common.fail(f"--patch-size {args.patch_size} does not divide the local crops' size, {args.local_size}")
    return args


def train_step(args, model, ddp, optimizer, l2l, batch, step, steps, device):
    """One step of Algorithm 1; steps: of an epoch. Returns the metrics, on the device."""
    lr, weight_decay, momentum = schedule(args, step, steps)
    for group in optimizer.param_groups:  # a weight decay of 0: a group that never decays
        group.update(lr=lr, weight_decay=weight_decay if group["weight_decay"] else 0.0)
    views = [common.normalize(view, *args.norm) for view in common.colour_views(batch, device)]
    common.seed_step(args.seed, step)  # of what still draws from the global generator
    clipped = args.l2l and args.l2l_weighting == "clip"
    more = l2l.clipped_step(views[2:], step, lr) if clipped else {}  # Eq. 6, then L_ll alone (D1)
    loss, metrics = ddp(views, step)
    local = metrics.pop("locals")
    if args.l2l and not clipped:
        dissimilarity, more = l2l.dissimilarity(local, step)  # Eq. 6
        loss = loss + args.lam * dissimilarity  # Eq. 9
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    metrics |= dict(**more, grad_norm=gradient_norm(model), lr=lr, momentum=momentum)
    l2l.norm.copy_(metrics["grad_norm"])
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
        names = ("global 1", "global 2", "local 1", "local 2")
        return common.save_views(args.show_views, common.colour_views(next(iter(loader)), device), names)

    torch.manual_seed(args.seed)
    model = (MoCo if args.base == "moco" else SimSiam)(args, encoder).to(device, memory_format=torch.channels_last)
    model = group_batch_norms(model, args.bn_groups)
    l2l = LocalToLocal(args, model, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0, momentum=0.9, weight_decay=args.weight_decay)
    ddp = in_parallel(args, model)
    kind = f"L2L {args.affinity_form}, {args.l2l_weighting}" if args.l2l else "no L2L"
    areas = f"areas {args.global_scale} and {args.local_scale}"
    about = f"on {args.base}, {args.local_crops} local crops of {args.local_size} px, {areas}, {kind}"
    run.begin(model, optimizer, train, test, model.backbone, chance=model.chance(), about=about, **l2l.state())
    while run.goes_on():
        for batch in run.batches(loader):
            run.log(train_step(args, model, ddp, optimizer, l2l, batch, run.step, run.steps, device))
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
