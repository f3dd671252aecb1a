"""JCL: Joint Contrastive Learning with Infinite Possibilities (Cai et al., NeurIPS 2020, arXiv 2009.14776).

MoCo compares the embedding of one view of an image, the query, with that of another view, the key. JCL minimizes an
upper bound on the expectation of MoCo's loss over all keys that augmentation could produce. The keys are assumed to be
Gaussian, so the bound needs only their mean mu and covariance Sigma, which are estimated from M' keys.

This changes MoCo's loss in two places. mu replaces the key. In the denominator, the positive logit grows by
lambda / (2 tau^2) times the variance of the keys along the query, q^T Sigma q. So the loss is low when the keys of an
image agree. In the bound, lambda is 1; the paper sets it to 4. Gradients reach only the query.

    Eq. 1-2          info_nce                 MoCo v2's loss
    Eq. 3            JCL.forward, --vanilla   its average over the keys
    Eq. 8-9          jcl_loss                 the bound, which Eq. 4-7 and 10-12 derive, and its mean over the batch
    Algorithm 1      main                     views (line 4), the update of the encoders (12), the queue (13)
                     JCL.forward              queries and keys (lines 5 and 6), and jcl_loss (lines 7 to 10, and Eq. 9)

    python jcl.py                                                             # a laptop, no data
    python jcl.py --dataset cifar10 --num-keys 1                              # the baseline, MoCo v2, on one GPU
    torchrun --nproc_per_node=8 jcl.py --dataset imagenet --data-dir DIR

The baseline is MoCo v2. `--num-keys 1` is exactly its loss, because one key has no variance. JCL changes three lines:
    one query and one key view    ->  one query view and M' key views       (main)
    info_nce(q, k, queue, tau)    ->  jcl_loss(q, k, queue, tau, lambda)    (JCL.forward)
    enqueue(k)                    ->  enqueue(the mean of the M' keys)      (JCL.forward, main)
(D1), (D2), ... at the end are differences between the paper, the released code (`--variant released`) and this file.
"""

import argparse
import copy
import math
import os

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
    """Parse the command line. The defaults are the paper's for ImageNet, with the changes that `recipe` returns."""
    parser = argparse.ArgumentParser(os.path.basename(__file__), description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--variant", choices=("paper", "released"), default="paper", help="follow the paper or the released code")

    add = parser.add_argument_group("loss").add_argument
    add("--num-keys", type=common.positive_int, default=5, help="keys per query, M' (Fig. 2a); 1 is MoCo v2")
    add("--lam", type=common.nonnegative_float, default=4.0, help="lambda of Eq. 8 (Fig. 2b)")
    add("--lam-schedule", choices=("constant", "ramp"), default="constant", help="ramp: linear, up to --lam (D1)")
    add("--vanilla", action="store_true", help="minimize the average InfoNCE loss over the keys (Eq. 2-3), not Eq. 8")
    add("--temperature", type=common.positive_float, default=0.2, help="softmax temperature tau (Fig. 2c)")
    add("--queue", type=common.positive_int, default=65536, help="queue length; folder: a tenth of the images")

    add = parser.add_argument_group("model").add_argument
    add("--arch", default="resnet50", help="encoder: resnet_mini, resnet18, resnet50, vit_small, or any timm model")
    add("--image-size", type=common.positive_int, default=224, help="size of the views, in pixels")
    add("--patch-size", type=common.positive_int, default=16, help="patch size of a ViT, in pixels")
    add("--dim", type=common.positive_int, default=128, help="embedding dimension")
    add("--bn-groups", type=common.positive_int, default=8, help="batch-norm groups per global batch, for ShuffleBN")
    add("--momentum", type=common.fraction, default=0.999, help="EMA momentum m of the momentum encoder")

    add = parser.add_argument_group("schedule").add_argument
    add("--epochs", type=common.positive_int, default=200, help="number of epochs")
    add("--batch-size", type=common.positive_int, default=512, help="global batch size, over all processes")
    add("--lr", type=common.positive_float, default=0.03, help="peak learning rate per 256 images")  # 0.06 for 512
    add("--warmup", type=common.nonnegative_float, default=0.0, help="linear warmup epochs, at most --epochs / 4")
    add("--weight-decay", type=common.nonnegative_float, default=1e-4, help="weight decay of SGD")

    add = parser.add_argument_group("augmentation").add_argument
    add("--crop-scale", action=common.AreaRange, default=[0.2, 1.0], help="area range of RandomResizedCrop")
    add("--blur-p", type=common.fraction, default=0.5, help="probability of blur")

    args = common.parse_args(parser, argv, recipe)
    args.warmup = min(args.warmup, args.epochs / 4)  # a short run would not reach its peak learning rate
    common.needs(parser, args, ["patch_size"], common.is_vit(args.arch), "a ViT (--arch)")
    common.needs(parser, args, ["bn_groups"], not common.is_vit(args.arch), "batch norm, which no ViT (--arch) has")
    common.needs(parser, args, ["vanilla", "lam", "lam_schedule"], args.num_keys > 1, "--num-keys 2 or more")
    common.needs(parser, args, ["lam", "lam_schedule"], not args.vanilla, "Eq. 8, without --vanilla")
    return args


# Not in the paper: as MoCo's demo on CIFAR-10 (branch colab-notebook), but with MoCo v2's head, temperature and crop
# areas, and with a warmup
CIFAR = dict(
    arch="resnet18", image_size=32, patch_size=4, epochs=200, batch_size=512, lr=0.03, warmup=1.0,  # 0.06 for 512
    weight_decay=5e-4, momentum=0.99, queue=4096, blur_p=0.0,
)  # fmt: skip
RECIPES = dict(  # what differs from the paper's values for ImageNet
    patterns=dict(  # not in the paper: for a laptop
        arch="resnet_micro", image_size=32, patch_size=4, epochs=45, batch_size=64, lr=0.12, queue=128,
        crop_scale=[0.3, 1.0], blur_p=0.1, bn_groups=2, momentum=0.95, warmup=5.0, num_keys=3,
    ),
    cifar10=CIFAR,
    cifar100=CIFAR,
    stl10=dict(CIFAR, image_size=96, patch_size=8, queue=8192),
    # App. D: a learning rate of 0.1 for 128 images. Queue and bn_groups, which it does not give, are ImageNet's
    imagenet100=dict(arch="resnet18", epochs=100, batch_size=128, lr=0.2),
    imagenet={},
    folder=dict(queue=None, bn_groups=2, momentum=0.99),  # not in the paper; None: a tenth of the images
)  # fmt: skip


def recipe(args):
    """Return the defaults, {name: value}, that suit args."""
    values = dict(RECIPES[args.dataset])
    if common.is_vit(args.arch):
        values["bn_groups"] = 1  # a ViT has no batch norm
    if args.variant == "released":
        values |= dict(num_keys=4, lam=2.0, lam_schedule="ramp")  # keys: D2, lambda: D1
        if args.dataset in ("imagenet", "folder"):
            values["batch_size"] = 256  # D3
    return values


# ================================================================ 2. the paper


def jcl_loss(q, k, queue, temperature, lam):
    """Return JCL's loss (Eq. 8-9). For lam >= 1 it bounds the expected InfoNCE loss over Gaussian keys from above.

    It is the mean of log[exp(q.mu / tau + lam / (2 tau^2) q^T Sigma q) + sum_j exp(q.queue_j / tau)] - q.mu / tau, with
    the mean mu and the biased covariance Sigma (divided by M') of an image's keys. With one key it is InfoNCE.
    For lam = 1 the bound follows from Jensen's inequality, E log X <= log E X (Eq. 7), and from the moment-generating
    function of a Gaussian (App. A): E exp(q.k / tau) = exp(q.mu / tau + q^T Sigma q / (2 tau^2)).

    q: (N, C) queries, L2-normalized. k: (N, M', C) keys, each L2-normalized; the keys of q[i] are k[i], not k[:, i].
    queue: (K, C) negatives, for example earlier keys, or means of keys. temperature: tau > 0. lam: lambda >= 0.
    Gradients reach q, and also k and queue unless these are detached. float16 and bfloat16 are converted to float32;
    call it outside autocast, which would undo that. Raises ValueError if the shapes do not fit.
    """
    if k.dim() != 3 or (len(k), k.shape[2]) != q.shape or k.shape[1] == 0 or queue.shape[1:] != q.shape[1:]:
        shapes = [tuple(x.shape) for x in (q, k, queue)]
        raise ValueError(f"jcl_loss takes q (N, C), k (N, M', C) and queue (K, C), not {shapes}")
    q, k, queue = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, queue))
    logits = (q[:, None] * k).sum(2) / temperature  # q.k_m / tau
    mean = logits.mean(1, keepdim=True)  # q.mu / tau, so mu itself is not needed: Algorithm 1, line 7
    # q^T Sigma q / tau^2 is the variance of the M' logits, so no C x C matrix is needed: Algorithm 1, lines 8, 9
    variance = (logits - mean).square().mean(1, keepdim=True)
    positive = mean + lam / 2 * variance  # the first exponent of Eq. 8
    negatives = (q / temperature) @ queue.T
    loss = torch.cat([positive, negatives], dim=1).logsumexp(1, keepdim=True) - mean  # Eq. 8
    return loss.mean()  # Eq. 9


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
    """Augment crops as MoCo v2 does (App. C): uint8 -> normalized float (n, 3, S, S)."""
    x = common.horizontal_flip(x / 255, p=0.5)
    x = common.color_jitter(x, 0.4, 0.4, 0.4, 0.1, p=0.8)
    x = common.grayscale(x, p=0.2)
    x = common.gaussian_blur(x, sigma=(0.1, 2.0), p=args.blur_p)
    return common.normalize(x, *common.NORMS[args.norm])


# ==================================================================== 4. model


class JCL(nn.Module):
    """MoCo v2's query encoder, momentum encoder and queue, with M' keys per query (Algorithm 1).

    Copy it with jcl_loss, info_nce, Queue, gather, shard and encode_shuffled_keys. With one process, ShuffleBN needs
    convert_split_batchnorm. With several, wrap it in DistributedDataParallel, which first broadcasts rank 0's weights
    and, unless broadcast_buffers=False, its queue.
    backbone: (n, 3, H, W) -> (n, width). dim: embedding dimension. queue: number of negatives. temperature: tau.
    vanilla: the loss is the average of info_nce over the keys.
    """

    def __init__(self, backbone, width, dim=128, queue=65536, temperature=0.2, vanilla=False):
        super().__init__()
        self.backbone = backbone
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(queue, dim)
        self.temperature, self.vanilla = temperature, vanilla

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), L2-normalized, in the dtype of x."""
        return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        """Return the momentum encoder's keys of images: (n, 3, H, W) -> (n, dim), L2-normalized, in the dtype of x."""
        return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, lam):
        """Return (loss, mean keys to enqueue (N, dim), queries (n, dim), {name: metric}): Algorithm 1, lines 5 to 10.

        views: this process's query view and M' key views, each (n, 3, H, W), normalized. lam: lambda. n is the batch
        size per process, N the global batch size. Only the loss has a gradient, which reaches the query encoder only.
        """
        q = self.query(views[0])  # line 5, f(x)
        keys = encode_shuffled_keys(self.key, views[1:])  # line 6, g(x): (M', N, dim)
        k = shard(keys, dim=1).transpose(0, 1)  # (n, M', dim)
        with torch.autocast(q.device.type, enabled=False):  # the loss is computed in float32
            if self.vanilla:
                losses = [info_nce(q, key, self.queue.keys, self.temperature) for key in k.unbind(1)]  # Eq. 2
                loss = sum(losses) / len(losses)  # Eq. 3
            else:
                loss = jcl_loss(q, k, self.queue.keys, self.temperature, lam)  # lines 7 to 10, Eq. 9
        mean_keys = keys.mean(0)  # mu of line 7, for line 13; not normalized again, so its norm is at most 1
        metrics = dict(loss=loss.detach(), key_variance=(keys - mean_keys).square().mean())  # mean of Sigma's diagonal
        return loss, mean_keys, q.detach(), metrics

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


def main(args, train=None, test=None):
    """Train, resuming from args.out if it holds a run. train, test: datasets to use instead of --dataset."""
    device, rank, world = common.init_distributed(args.device)
    torch.manual_seed(args.seed)

    # Data: one query view and M' key views per image (Algorithm 1, line 4), cropped here and augmented in the loop
    train, test = common.open_data(args.dataset, args.data_dir, args.image_size, train, test)
    groups = common.split_batch(args.batch_size, len(train), world, args.bn_groups, "--bn-groups")  # per process
    images = common.Views(train, [v2.RandomResizedCrop(args.image_size, args.crop_scale)] * (1 + args.num_keys))
    sampler = DistributedSampler(images, world, rank, seed=args.seed, drop_last=True)
    options = common.loader_options(args.workers, device)
    loader = DataLoader(images, args.batch_size // world, sampler=sampler, drop_last=True, **options)
    if args.show_views:
        views = [augment(x, args) for x in next(iter(loader))[0]]
        return common.save_views(args.show_views, views, ["query"] + ["key"] * args.num_keys, args.norm)

    # Model and optimizer. backbone.pt has `info` and the weights of the encoder that info["encoder"] names
    info = common.backbone_info(args.arch, args.image_size, args.patch_size, args.norm) | dict(encoder="query")
    backbone = common.build_backbone(info)
    width = common.feature_width(backbone, args.image_size)
    if args.init:
        common.load_weights(backbone, args.init, args.init_prefix)
    negatives = common.queue_length(args.queue, args.batch_size, len(train))
    model = JCL(backbone, width, args.dim, negatives, args.temperature, args.vanilla)
    model = convert_split_batchnorm(model, groups) if groups > 1 else model  # as on that many GPUs, for ShuffleBN
    model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=args.weight_decay, fused=True)

    # The run
    amp = common.use_bf16(args.amp, device)
    state = dict(model=model, optimizer=optimizer)
    derived = dict(negatives=negatives, loss_at_uniform_logits=math.log(negatives + 1))
    derived |= dict(peak_lr=args.lr * args.batch_size / 256, batch_norm_groups=groups * world, bf16=amp)
    config, records = common.open_run(args, train, state, derived)  # restores a saved run; one record per epoch
    if args.compile:
        model.backbone.compile(dynamic=False)
        model.momentum_backbone.compile(dynamic=False)
    ddp = DistributedDataParallel(model) if world > 1 else model
    ddp.broadcast_buffers = False  # queues stay equal without it; torch 2.13 renames the argument, not the attribute

    for epoch in range(len(records), args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(hash((args.seed, epoch, rank)))  # a resumed run gets the same seed: hashes of ints are fixed
        lam = args.lam if args.lam_schedule == "constant" else args.lam * (epoch + 1) / args.epochs  # ramp: D1
        meter = common.Meter(epoch, args.epochs, len(loader), args.batch_size)
        for step, (crops, _) in enumerate(loader):
            now = epoch + step / len(loader)  # in epochs
            lr = learning_rate(args, now)
            for group in optimizer.param_groups:
                group["lr"] = lr
            views = [augment(x.to(device, non_blocking=True), args) for x in crops]
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss, mean_keys, q, metrics = ddp(views, lam)  # Algorithm 1, lines 5 to 10
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()  # line 12: f
            model.update(args.momentum)  # line 12: g (D5)
            model.queue.enqueue(mean_keys)  # line 13
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

# D1 lambda. Paper: 4.0, constant. Released: a linear ramp over the epochs, up to 2.0.
# D2 The number of keys M'. Paper: 5. Released: 4, because the 5 in its script counts the query, too.
# D3 Batch size on ImageNet-1K (and here on `folder`). Paper: 512. Released: 256, with the same learning rate per image.
# D4 The queue. Paper (App. C): 256 keys leave as N = 512 enter, so it would grow. Released, and here: N keys leave.
# D5 The key encoder g. Paper: trained (Alg. 1; 3.2), or a momentum encoder (App. C). Here: a momentum encoder.
# D6 `--vanilla`. Paper (3.2, App. B): gradients through the branches of all keys; the queue is not given. Here: the
#    keys are constants, as JCL's are, and their means enter the queue.
# D7 The classes of ImageNet-100, on which Fig. 2 is measured. Paper (App. D): two misprints. Here: corrected.
# D8 Views. Paper (App. C): as MoCo v2's, but "cropped from the resized images" and flipped last. Here: MoCo v2's random
#    resized crops. They are flipped first; this order makes no difference.
# Differences in rounding, indices and precision are listed in tests/golden/README.md.
# Omitted: detection, segmentation and keypoints on COCO (Table 2), and the histograms of Fig. 3.


if __name__ == "__main__":
    common.start(main, parse_args, "--dataset imagenet --data-dir DIR")
