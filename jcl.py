"""JCL: Joint Contrastive Learning with Infinite Possibilities (Cai et al., NeurIPS 2020, arXiv 2009.14776).

MoCo compares a query with one key of its image. JCL asks for the expected loss over all keys that augmentation could
make: the keys of an image are taken as Gaussian, and Jensen's inequality turns the expectation into a closed form that
needs only their mean and covariance, estimated from M' keys. Compared with MoCo's loss, the positive logit inside the
logarithm grows by the variance of the keys along the query, lambda / (2 tau^2) q' Sigma q, and the numerator uses the
mean key: the loss is low where an image's keys agree. Gradients reach the query only; the keys come from a momentum
encoder, which follows the query's, and their mean is enqueued.

    Eq. 1         info_nce                MoCo v2's loss, and each term of Eq. 2
    Eq. 2-3       JCL.forward, --vanilla  the average over keys
    Eq. 4-7       the bound, in the tests
    Eq. 8-9       jcl_loss                Algorithm 1, lines 7-10
    Algorithm 1   make_sample (line 4), JCL.forward (5-10), train_step (11-12), JCL.update (13)

    python jcl.py                                                             # laptop, no data
    python jcl.py --dataset cifar10 --num-keys 1                              # the baseline, MoCo v2, one GPU
    torchrun --nproc_per_node=8 jcl.py --dataset imagenet --data-dir DIR

Baseline: `--num-keys 1` is MoCo v2 exactly (one key has no variance). New relative to it: jcl_loss, M' key views, the
mean.

Departures:
    D1 lambda: paper 4.0, constant; released 2.0 after a linear ramp over the epochs (`--variant released`)
    D2 M': paper 5 keys; the released script's 5 counts the query, so 4 keys (`--variant released`)
    D3 batch and rate on ImageNet-1K: paper 512 and 0.06; released 256 and 0.03, the same ratio (`--variant released`)
    D4 the paper removes 256 old keys while it adds N = 512 (App. C); here as many as are added
    D5 Algorithm 1 updates f and g by the loss; g is a momentum encoder (App. C)
    D6 App. D's class list has two misprints; common.IMAGENET100 is mended
    D7 the rate's cosine moves once a step; released once an epoch, in 200 epochs up to 0.8 % of the peak rate
       apart (not reproduced)
    D8 released float32, and the first process's batch-norm statistics; here bf16 in the encoders on CUDA (--amp off:
       float32, with products in TF32), and the statistics' mean
    D9 --vanilla: in the paper the gradient goes through all branches (section 3.2); here to the query only
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
BASE = dict(  # section 4.1 and App. C; the rate is that of batch size lr_batch
    num_keys=5, lam=4.0, lam_schedule="constant", vanilla=False, temperature=0.2, dim=128, momentum=0.999,
    weight_decay=1e-4, warmup=0, min_lr=0.0, bn_groups=8, patch_size=16, interpolation="bilinear",
    crop_scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray_p=0.2, blur_p=0.5,
)
IMAGENET = dict(  # section 4.1 and App. C
    BASE, arch="resnet50", image_size=224, epochs=200, batch_size=512, lr=0.06, lr_batch=512, queue=65536,
)
CIFAR = dict(  # ours: moco_jointcrop.py's, so that the two can be compared
    BASE, arch="resnet18", image_size=32, patch_size=4, epochs=500, batch_size=512, lr=0.5, lr_batch=512, min_lr=0.05,
    queue=4096, blur_p=0.0,
)
RECIPES = dict(
    patterns=dict(  # ours, for two CPU cores
        BASE, arch="resnet_micro", image_size=32, patch_size=4, epochs=45, batch_size=64, lr=0.06, lr_batch=128,
        queue=128, blur_p=0.1, crop_scale=(0.3, 1.0), bn_groups=2, momentum=0.95, warmup=5, num_keys=3,
    ),
    cifar10=CIFAR,
    cifar100=CIFAR,
    stl10=dict(CIFAR, image_size=96, patch_size=8, queue=8192),
    imagenet100=dict(  # App. D; the queue's length is not restated there
        BASE, arch="resnet18", image_size=224, epochs=100, batch_size=128, lr=0.1, lr_batch=128, queue=65536,
    ),
    imagenet=dict(IMAGENET, knn_every=50),  # its kNN takes minutes
    folder=dict(IMAGENET, queue=None),  # ours: a tenth of the images
)
CPU = dict(batch_size=256, lr=0.1, lr_batch=256, min_lr=0.0, momentum=0.99, blur_p=0.5)  # ours: the small encoders
RELEASED = dict(num_keys=4, lam=2.0, lam_schedule="ramp")  # D1, D2
RELEASED_IMAGENET = dict(RELEASED, batch_size=256, lr=0.03, lr_batch=256)  # D3
# fmt: on


def recipe(given):
    """The hyper-parameters that the data set, the encoder and the variant of a command line stand for."""
    values = dict(RECIPES[given.dataset])
    if given.arch in ("resnet_micro", "resnet_mini") and given.dataset in ("cifar10", "cifar100", "stl10"):
        values |= CPU
    if given.variant == "released":
        values |= RELEASED_IMAGENET if given.dataset in ("imagenet", "folder") else RELEASED
    return values


# ================================================================ 2. the paper


def jcl_loss(q, k, queue, temperature, lam):
    """The bound on the expected InfoNCE over Gaussian keys (Eq. 8-9).

    log[exp(q.mu/T + lam/(2 T^2) q' Sigma q) + sum_j exp(q.queue_j/T)] - q.mu/T, averaged over the batch. q (N, C) of
    unit length; k (N, M', C), each key of unit length; mu is their mean, Sigma their (biased) covariance; queue (K, C),
    unit vectors or means of some. lam >= 0; with one key it is InfoNCE. Gradients go to q, and to k and queue unless
    they are detached, as in the paper. q' Sigma q is the variance of the M' projections q.k, so no C x C matrix is
    made. Promoted to float32 (call it outside autocast). Returns a scalar.
    """
    q, k, queue = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, queue))
    projections = (q[:, None] * k).sum(2) / temperature
    mean = projections.mean(1, keepdim=True)  # q.mu / T, Algorithm 1, line 7
    variance = (projections - mean).square().mean(1, keepdim=True)  # q' Sigma q / T^2, Algorithm 1, lines 8-9
    inside = torch.cat([mean + lam / 2 * variance, (q / temperature) @ queue.T], dim=1)  # the exponents in Eq. 8
    return (inside.logsumexp(1, keepdim=True) - mean).mean()  # Eq. 8; its mean over the batch is Eq. 9


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
    """What common.Views calls for a query and M' key views an image, with sizes and uniform draws, and their number."""
    views = 1 + args.num_keys

    def sample(index, sizes, draws):
        cuts, colours = [], []
        for draw in draws.reshape(len(index), views, DRAWS).swapaxes(0, 1):
            crop, colour = draw[:, : common.CROP_DRAWS], draw[:, common.CROP_DRAWS :]
            cuts.append((index, common.random_resized_crop(sizes, crop, args.crop_scale), args.image_size))
            colours.append(common.random_colour(colour, args.jitter, args.jitter_p, args.gray_p, args.blur_p))
        return cuts, colours

    return sample, views * DRAWS


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


# ----------------------------------------------------------------------- JCL


class JCL(nn.Module):
    """Query encoder, momentum (key) encoder and queue of MoCo v2, with M' keys per query (Algorithm 1)."""

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args = args
        self.backbone = encoder or common.build_backbone(args.backbone)
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

    def forward(self, views, step, lam):
        """views: this process's query and M' key views (n, 3, H, W). Returns (loss, metrics: scalars, and q, k)."""
        q = self.query(views[0])
        keys = encode_keys(self.key, views[1:], common.generator(self.args.seed, step, 20))  # (M', N, C)
        k = keys.split(len(q), dim=1)[common.rank_and_world()[0]].transpose(0, 1)  # this process's: (n, M', C)
        if self.args.vanilla:
            losses = [info_nce(q, key, self.queue.keys, self.args.temperature) for key in k.unbind(1)]
            loss = sum(losses) / len(losses)  # Eq. 3
        else:
            loss = jcl_loss(q, k, self.queue.keys, self.args.temperature, lam)
        self.new_keys = keys.mean(0)  # Algorithm 1, line 13, for `update`: the means, not of unit length
        variance = k.var(1, correction=0).mean()  # the mean of Sigma's diagonal
        return loss, dict(loss=loss, key_variance=variance, q=q, k=k[:, 0])

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
    parser = common.run_parser("jcl.py", __doc__, evaluated="query")
    group = parser.add_argument_group("JCL")
    group.add_argument("--num-keys", type=common.COUNT, metavar="M", help="keys a query, M' (Fig. 2a); 1 is MoCo v2")
    group.add_argument("--lam", type=common.number(float, 0), metavar="X", help="lambda of Eq. 8 (Fig. 2b)")
    group.add_argument("--lam-schedule", choices=("constant", "ramp"), help="ramp: lambda (epoch + 1) / epochs (D1)")
    group.add_argument("--vanilla", action="store_true", default=None, help="the average loss over the keys, Eq. 2-3")
    group.add_argument("--queue", type=common.COUNT, metavar="K", help="negatives: the keys of earlier batches")
    return common.parse_run(parser, argv, recipe)


def scheduled_lam(args, epoch):
    """lambda of an epoch, counted from 0: constant, or, as released, a ramp up to it (D1)."""
    return args.lam if args.lam_schedule == "constant" else args.lam * (epoch + 1) / args.epochs


def train_step(args, model, ddp, optimizer, batch, step, steps, device):
    """One step of Algorithm 1; steps: of an epoch. Returns the metrics, on the device."""
    lr, weight_decay, momentum = schedule(args, step, steps)
    for group in optimizer.param_groups:  # a weight decay of 0: a group that never decays
        group.update(lr=lr, weight_decay=weight_decay if group["weight_decay"] else 0.0)
    views = [common.normalize(view, *args.norm) for view in common.colour_views(batch, device)]
    common.seed_step(args.seed, step)  # of what still draws from the global generator
    loss, metrics = ddp(views, step, scheduled_lam(args, step // steps))
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
        names = ("query", *(f"key {m + 1}" for m in range(args.num_keys)))
        return common.save_views(args.show_views, common.colour_views(next(iter(loader)), device), names)

    torch.manual_seed(args.seed)
    model = group_batch_norms(JCL(args, encoder).to(device, memory_format=torch.channels_last), args.bn_groups)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0, momentum=0.9, weight_decay=args.weight_decay)
    ddp = in_parallel(args, model)
    kind = "vanilla" if args.vanilla else f"lambda {args.lam:g}, {args.lam_schedule}"
    about = f"M' = {args.num_keys}, {kind}, {args.queue} negatives a query"
    run.begin(model, optimizer, train, test, model.backbone, chance=math.log(args.queue + 1), about=about)
    while run.goes_on():
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
