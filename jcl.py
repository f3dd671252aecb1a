"""JCL: Joint Contrastive Learning with Infinite Possibilities (Cai et al., NeurIPS 2020, arXiv 2009.14776).

MoCo compares the embedding of one view of an image, the query, with that of another view, the key. JCL is about the
expected loss over all keys that augmentation could make of the image. Jensen's inequality bounds it from above, and JCL
minimises the bound. If the keys are Gaussian, it has a closed form, which needs only their mean and covariance. Both
are estimated from M' keys.

Two things change in MoCo's loss. The mean key mu takes the place of the key. In the denominator the positive logit
also grows by lambda / (2 tau^2) times the variance of the keys along the query, q^T Sigma q. So the loss is low where
the keys of an image agree. Gradients reach the query only; the momentum encoder, which makes the keys, follows slowly.
The mean keys enter the queue of negatives.

    Eq. 1-2                    info_nce                 MoCo v2's loss, for --vanilla
    Eq. 3                      JCL.forward, --vanilla   its average over the keys
    Eq. 4-7                    (in the tests)           the derivation of the bound
    Eq. 8-9                    jcl_loss                 the bound, and its mean over the batch
    Algorithm 1, line 4        augmentation, main       the views
    Algorithm 1, lines 5-10    JCL.forward              queries, keys and the loss; lines 7-10 are jcl_loss
    Algorithm 1, lines 12-13   main                     12: the update; 13: the queue

    python jcl.py                                                             # a laptop, no data
    python jcl.py --dataset cifar10 --num-keys 1                              # the baseline, MoCo v2, on one GPU
    torchrun --nproc_per_node=8 jcl.py --dataset imagenet --data-dir DIR

The baseline is MoCo v2. Its loss is exactly that of `--num-keys 1`, because one key has no variance. What JCL changes
in it (MoCo v2 | here | where):
    one query view and one key view           one query view and M' key views             augmentation
    k = key(view)                             k = M' keys per query                       JCL.forward
    info_nce(q, k, queue, tau)                jcl_loss(q, k, queue, tau, lambda)          JCL.forward
    enqueue(k)                                enqueue(the mean of the M' keys)            main

Not here: detection, segmentation and keypoints on COCO (Table 2), and the histograms of Fig. 3.

Where the paper, which is the default, and the released code, `--variant released`, differ:
    D1 lambda. Paper: 4.0, constant. Released: a linear ramp over the epochs, up to 2.0.
    D2 The number of keys M'. Paper: 5. Released: 4, because the 5 in its script counts the query, too.
    D3 Batch size and learning rate on ImageNet-1K. Paper: 512 and 0.06. Released: 256 and 0.03, the same ratio.
    D4 The queue. Paper (App. C): 256 old keys leave while N = 512 enter. Here and released: as many leave as enter.
    D5 The encoder g. Paper: learned (Alg. 1; 3.2), or a momentum encoder (App. C). Here: the latter, in all forms.
    D6 The classes of ImageNet-100. Paper (App. D): the list has two misprints. Here: common.py's list corrects them.
What differs by rounding, by an index or by precision is in tests/golden/README.md.
"""

import argparse
import copy
import math
import time

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common

# ========================================================= 1. hyper-parameters

# fmt: off
# {group: {name: (value, what it is, its limits or words)}}: the paper's for ImageNet, section 4.1 and App. C. Each is a
# flag of its value's type, --num-keys 3, and args.NAME. Without limits, a number is not below 0.
HYPERPARAMETERS = dict(
    recipe=dict(variant=("paper", "follow the paper, or the authors' code", ("paper", "released"))),
    loss=dict(
        num_keys=(5, "keys per query, M' (Fig. 2a); 1 is MoCo v2", (1, math.inf)),
        lam=(4.0, "lambda of Eq. 8 (Fig. 2b)"),
        lam_schedule=("constant", "ramp: lambda grows over the epochs, up to --lam (D1)", ("constant", "ramp")),
        vanilla=(False, "the average InfoNCE loss over the keys (Eq. 2-3), not Eq. 8"),  # ours: means are enqueued
        temperature=(0.2, "temperature tau of the loss (Fig. 2c)", (1e-9, math.inf)),
        queue=(65536, "negatives per query; auto: a tenth of the images, at least a batch", (1, math.inf, "auto")),
    ),
    model=dict(
        arch=("resnet50", "encoder: resnet_micro, resnet18, resnet50, vit_small, ..., or any timm model"),
        image_size=(224, "side of a view, in pixels", (1, math.inf)),
        patch_size=(16, "side of a ViT's patch, in pixels", (1, math.inf)),
        dim=(128, "dimension of queries and keys", (1, math.inf)),
        bn_groups=(8, "slices of the batch with batch-norm statistics of their own, as on 8 GPUs", (1, math.inf)),
        momentum=(0.999, "momentum m of the momentum encoder", (0, 1)),
    ),
    schedule=dict(
        epochs=(200, "epochs of the whole training", (1, math.inf)),
        batch_size=(512, "images per step, over all processes", (2, math.inf)),
        lr=(0.06, "peak learning rate at --lr-batch; scaled linearly to --batch-size", (1e-9, math.inf)),
        min_lr=(0.0, "last learning rate, scaled as --lr is"),
        lr_batch=(512, "batch size for which the learning rates are given", (1, math.inf)),
        warmup=(0.0, "epochs of linear warm-up, at most a quarter of the run"),
        weight_decay=(1e-4, "weight decay of SGD"),
        sgd_momentum=(0.9, "momentum of SGD", (0, 0.999999)),
    ),
    augmentation=dict(
        crop_scale=((0.2, 1.0), "smallest and largest share of the image that a crop has", (1e-9, 1)),
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


def jcl_loss(q, k, queue, temperature, lam):
    """Return JCL's loss (Eq. 8-9), for lam >= 1 an upper bound on the expected InfoNCE loss over Gaussian keys.

    It is log[exp(q.mu / T + lam / (2 T^2) q^T Sigma q) + sum_j exp(q.queue_j / T)] - q.mu / T, averaged over the batch.
    mu and Sigma are the mean and the covariance of an image's keys. Sigma is divided by M', not by M' - 1. With one key
    it is InfoNCE, whatever lam is.

    q: (N, C) queries, L2-normalised. k: (N, M', C) keys, each L2-normalised; k[i], not k[:, i], are the keys of q[i].
    queue: (K, C) negatives, for example earlier keys, or means of keys. temperature: T > 0. lam: lambda >= 0.
    Gradients reach q. They also reach k and queue unless these are detached, as they are in this file (D5).
    float16 and bfloat16 are converted to float32. Call it outside autocast, which would undo that. Raises ValueError if
    the shapes do not fit.
    """
    if q.dim() != 2 or k.dim() != 3 or k.shape[::2] != q.shape or queue.shape[1:] != q.shape[1:]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, queue {tuple(queue.shape)}"
        raise ValueError(f"jcl_loss takes q (N, C), k (N, M', C) and queue (K, C), not {shapes}")
    q, k, queue = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, queue))
    projections = (q[:, None] * k).sum(2) / temperature  # q.k_m / T
    mean = projections.mean(1, keepdim=True)  # q.mu / T: Algorithm 1, line 7
    # q^T Sigma q / T^2 is the variance of the M' projections. No C x C matrix is needed: Algorithm 1, lines 8 and 9
    variance = (projections - mean).square().mean(1, keepdim=True)
    positive = mean + lam / 2 * variance  # the first exponent of Eq. 8
    negatives = (q / temperature) @ queue.T
    loss = torch.cat([positive, negatives], dim=1).logsumexp(1, keepdim=True) - mean  # Eq. 8
    return loss.mean()  # Eq. 9


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
    """Return {name: View}: one query view and M' key views per image. All are drawn alike, as in MoCo v2 (App. C)."""
    crop = dict(size=args.image_size, area=args.crop_scale, ratio=args.crop_ratio)
    color = dict(jitter=args.jitter, jitter_p=args.jitter_p, gray_p=args.gray_p, solarize_p=0.0)
    blur = dict(blur_p=args.blur_p, blur_sigma=args.blur_sigma)
    view = common.View(**crop, **color, **blur, flip_p=args.flip_p)
    return dict(query=view) | {f"key {m + 1}": view for m in range(args.num_keys)}


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


# ----------------------------------------------------------------------- JCL


class JCL(nn.Module):
    """MoCo v2's query encoder, momentum encoder (for the keys) and queue, with M' keys per query (Algorithm 1).

    Copy it with jcl_loss, info_nce, Queue, gather, shard and encode_shuffled_keys. For several groups of batch norm,
    without which ShuffleBN has no effect, give it to split_batch_norms, which needs GroupedBatchNorm.
    backbone: a module, (n, 3, H, W) -> (n, width). dim: of queries and keys. queue: the number of negatives.
    temperature, vanilla: of the loss. amp: encode in bfloat16. generator: a torch CPU generator of the first negatives;
    torch's global one if None.
    """

    def __init__(
        self, backbone, width, dim=128, queue=65536, temperature=0.2, vanilla=False, amp=False, generator=None
    ):
        super().__init__()
        self.backbone = backbone
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, dim))
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.queue = Queue(queue, dim, generator)
        self.temperature, self.vanilla, self.amp = temperature, vanilla, amp

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def key(self, x):
        """Return the momentum encoder's keys of images: (n, 3, H, W) -> (n, dim), L2-normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    def forward(self, views, lam, generator=None):
        """Return (loss, mean keys to enqueue (N, dim), queries (n, dim), {name: metric}): Algorithm 1, lines 5 to 10.

        views: this process's query view and M' key views, each (n, 3, H, W), normalised. lam: lambda. generator: a
        torch CPU generator that shuffles the keys, the same on all processes; torch's global one if None, which then
        has to be the same on all. Only the loss has a gradient. It reaches the query encoder only.
        """
        q = self.query(views[0])  # line 5
        keys = encode_shuffled_keys(self.key, views[1:], generator)  # line 6: (M', N, C), of all processes
        k = shard(keys, dim=1).transpose(0, 1)  # (n, M', C)
        if self.vanilla:
            losses = [info_nce(q, key, self.queue.keys, self.temperature) for key in k.unbind(1)]  # Eq. 2
            loss = sum(losses) / len(losses)  # Eq. 3
        else:
            loss = jcl_loss(q, k, self.queue.keys, self.temperature, lam)  # lines 7 to 10
        mean_keys = keys.mean(0)  # for line 13: means are not normalised again, so their norm is at most 1
        metrics = dict(loss=loss.detach(), key_variance=k.var(1, correction=0).mean())  # the mean of Sigma's diagonal
        return loss, mean_keys, q.detach(), metrics

    @torch.no_grad()
    def update(self, m):
        """Move the momentum encoder's parameters: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2), m in [0, 1]."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


# ================================================================= 5. training

STREAM_EPOCH, STREAM_QUEUE, STREAM_SHUFFLE = 0, 4, 20  # random streams, see common.generator

# fmt: off
IMAGENET = common.defaults(HYPERPARAMETERS)
CIFAR = dict(  # ours: the values of moco_jointcrop.py, so that the two can be compared
    IMAGENET, arch="resnet18", image_size=32, patch_size=4, epochs=500, lr=0.5, min_lr=0.05, queue=4096, blur_p=0.0,
    norm="cifar10",
)
RECIPES = dict(
    patterns=dict(  # ours, for two CPU cores
        IMAGENET, arch="resnet_micro", image_size=32, patch_size=4, epochs=45, batch_size=64, lr_batch=128, queue=128,
        blur_p=0.1, crop_scale=(0.3, 1.0), bn_groups=2, momentum=0.95, warmup=5.0, num_keys=3, norm="patterns",
    ),
    cifar10=CIFAR,
    cifar100=dict(CIFAR, norm="cifar100"),
    stl10=dict(CIFAR, image_size=96, patch_size=8, queue=8192, norm="imagenet"),
    imagenet100=dict(  # App. D; ours: the queue's length, which is not restated there, and bn_groups
        IMAGENET, arch="resnet18", epochs=100, batch_size=128, lr=0.1, lr_batch=128,
    ),
    imagenet=dict(IMAGENET, knn_every=50),  # its kNN takes minutes
    folder=dict(IMAGENET, queue="auto", bn_groups=2),  # ours: a folder of one's own may be small
)
SMALL_ENCODERS = dict(batch_size=256, lr=0.1, lr_batch=256, min_lr=0.0, momentum=0.99, blur_p=0.5)  # ours
RELEASED = dict(num_keys=4, lam=2.0, lam_schedule="ramp")  # D1, D2
RELEASED_IMAGENET = dict(RELEASED, batch_size=256, lr=0.03, lr_batch=256)  # D3
# fmt: on


def recipe(chosen):
    """Return the hyper-parameters {name: value}. chosen: what is given, a namespace, with None for the rest."""
    values = dict(RECIPES[chosen.dataset])
    if chosen.variant == "released":
        values |= RELEASED_IMAGENET if chosen.dataset in ("imagenet", "folder") else RELEASED
    if chosen.arch in ("resnet_micro", "resnet_mini") and chosen.dataset in ("cifar10", "cifar100", "stl10", "folder"):
        values |= SMALL_ENCODERS
        if chosen.dataset == "folder":
            values["batch_size"] = 64
    return values


def parse_args(argv=None):
    """Return the command line (argv, or sys.argv's) as a namespace of all values. Exits with an error on a mistake."""
    return common.parse("jcl", __doc__, argv, HYPERPARAMETERS | common.RUN, recipe)


def learning_rate(args, epoch):
    """Return the learning rate at a time, in epochs from 0: a linear warm-up from 0, then a cosine down to --min-lr."""
    peak, last = (lr * args.batch_size / args.lr_batch for lr in (args.lr, args.min_lr))
    warmup = min(args.warmup, args.epochs / 4)
    if epoch < warmup:
        return peak * epoch / warmup
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
    info = common.encoder_info(args, method="jcl", encoder="query")  # the encoder that is evaluated
    backbone = common.build_backbone(info) if encoder is None else common.copy_module(encoder)
    sizes = {view.size for view in declared.values()}
    width = common.output_width(backbone, *sizes, check_gradient=True)
    amp = common.use_bf16(args.amp, device, args.arch, sizes)
    negatives = args.queue if args.queue != "auto" else min(65536, max(args.batch_size, len(train) // 10))
    first_keys = common.generator(args.seed, STREAM_QUEUE)
    model = JCL(backbone, width, args.dim, negatives, args.temperature, args.vanilla, amp=amp, generator=first_keys)
    groups = common.slices_per_process(args, "bn_groups")
    model = split_batch_norms(model, groups)
    model.to(device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=args.sgd_momentum, weight_decay=args.weight_decay)

    # The run
    config = common.open_run(args, train)
    state = dict(model=model, optimizer=optimizer)
    records = common.load_run(args, config, state)  # one for each epoch that is done
    if args.compile:
        model.backbone.compile()
        model.momentum_backbone.compile()
    ddp = DistributedDataParallel(model, find_unused_parameters=encoder is not None) if dist.is_initialized() else model
    ddp.broadcast_buffers = False  # at each step; when it is made, all get the first process's weights and buffers
    facts = dict(batch_norm_groups=groups * world, bf16=amp, negatives=negatives)
    facts |= dict(loss_at_uniform_logits=math.log(negatives + 1))
    common.log_table(args, HYPERPARAMETERS | common.RUN, train=train, test=test, **facts)

    # The last epoch's kNN, if a kill came before it
    common.add_knn(args, config, info, state, records, model.backbone, train, test, device, amp)
    for epoch in range(len(records), args.epochs):
        loader.batch_sampler.epoch = epoch
        torch.manual_seed(common.generator(args.seed, epoch, STREAM_EPOCH, rank).initial_seed())  # for drop-path
        lam = args.lam if args.lam_schedule == "constant" else args.lam * (epoch + 1) / args.epochs  # D1
        history, began = [], time.perf_counter()
        for step, batch in enumerate(loader, epoch * len(loader)):
            lr = learning_rate(args, step / len(loader))
            for group in optimizer.param_groups:
                group["lr"] = lr
            # Algorithm 1, line 4: a query view and M' key views per image, cut by the loader and colored here
            views = common.color_views(batch, device, layout, norm)
            # Lines 5 to 10, and Eq. 9: the loss
            shuffle = common.generator(args.seed, step, STREAM_SHUFFLE)
            loss, keys, q, metrics = ddp(views, lam, shuffle)
            # Line 12: update the query encoder. Then move the momentum encoder (D5)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            model.update(args.momentum)
            # Line 13: the mean keys are negatives of the next steps
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
