"""JCL: Joint Contrastive Learning with Infinite Possibilities (Cai et al., NeurIPS 2020, arXiv 2009.14776).

MoCo compares the embedding of one view of an image, the query, with that of another view, the key. JCL minimises the
expected loss over all keys that augmentation could make of the image. Jensen's inequality bounds this expectation from
above. If the keys are Gaussian, the bound has a closed form, which needs only their mean and covariance. Both are
estimated from M' keys.

Two things change in MoCo's loss. The mean key mu takes the place of the key. In the denominator the positive logit
also grows by lambda / (2 tau^2) times the variance of the keys along the query, q^T Sigma q. So the loss is low where
the keys of an image agree. Gradients reach the query only; the momentum encoder, which makes the keys, follows slowly.
The mean keys enter the queue of negatives.

    Eq. 1                      info_nce                 MoCo v2's loss, and each term of Eq. 3
    Eq. 2-3                    JCL.forward, --vanilla   the average loss over the keys
    Eq. 4-7                    (in the tests)           the derivation of the bound
    Eq. 8-9                    jcl_loss                 the bound, and its mean over the batch
    Algorithm 1, line 4        main                     the views
    Algorithm 1, lines 5-10    JCL.forward              queries, keys and the loss; lines 7-10 are jcl_loss
    Algorithm 1, lines 12-13   main                     12: the update; 13: the queue

    python jcl.py                                                             # a laptop, no data
    python jcl.py --dataset cifar10 --num-keys 1                              # the baseline, MoCo v2, on one GPU
    torchrun --nproc_per_node=8 jcl.py --dataset imagenet --data-dir DIR

The baseline is MoCo v2. Its loss is exactly that of `--num-keys 1`, because one key has no variance. What JCL changes
in it:
    one query view and one key view           one query view and M' key views             augmentation
    k = key(view)                             k = M' keys per query                       JCL.forward
    info_nce(q, k, queue, tau)                jcl_loss(q, k, queue, tau, lambda)          JCL.forward
    enqueue(k)                                enqueue(the mean of the M' keys)            main

Not here: detection, segmentation and keypoints on COCO (Table 2).

Where the paper, which is the default, and the released code, `--variant released`, differ:
    D1 lambda. Paper: 4.0, constant. Released: a linear ramp over the epochs, up to 2.0.
    D2 The number of keys M'. Paper: 5. Released: 4, because the 5 in its script counts the query, too.
    D3 Batch size and learning rate on ImageNet-1K. Paper: 512 and 0.06. Released: 256 and 0.03, the same ratio.
    D4 The queue. Paper (App. C): 256 old keys leave while N = 512 enter. Here and released: as many leave as enter.
    D5 The encoder g. Paper: learned (Alg. 1; 3.2, `--vanilla`), or a momentum encoder (App. C). Here: the latter.
    D6 The classes of ImageNet-100. Paper (App. D): the list has two misprints. Here: common.py's list corrects them.
What differs by rounding, by an index or by precision is in tests/golden/README.md.
"""

import argparse
import json
import math
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
# {group: {name: (value, what it is, its limits or words)}}: the paper's for ImageNet, section 4.1 and App. C. Each is a
# flag of its value's type, --num-keys 3, and args.NAME. Without limits, a number is not below 0.
HYPERPARAMETERS = dict(
    loss=dict(
        num_keys=(5, "keys per query, M' (Fig. 2a); 1 is MoCo v2", (1, 100)),
        lam=(4.0, "lambda of Eq. 8 (Fig. 2b)"),
        lam_schedule=("constant", "ramp: lambda grows over the epochs, up to --lam (D1)", ("constant", "ramp")),
        vanilla=(False, "the average InfoNCE loss over the keys (Eq. 2-3), instead of Eq. 8"),
        temperature=(0.2, "temperature tau of the loss (Fig. 2c)", (1e-9, math.inf)),
        queue=(65536, "negatives per query; auto: a tenth of the images, at least a batch", (1, math.inf, "auto")),
    ),
    model=dict(
        arch=("resnet50", "encoder: resnet_micro, resnet18, resnet50, vit_small, ..., or any timm model"),
        image_size=(224, "side of a view, in pixels", (1, math.inf)),
        patch_size=(16, "side of a ViT's patch, in pixels", (1, math.inf)),
        dim=(128, "dimension of queries and keys", (1, math.inf)),
        bn_groups=(8, "equal slices of the batch; each has its own batch-norm statistics", (1, math.inf)),
        momentum=(0.999, "momentum m of the momentum encoder", (0, 1)),
    ),
    schedule=dict(
        epochs=(200, "epochs of the whole training", (1, math.inf)),
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
    """Return a list of View: one query view and M' key views per image. All are drawn alike, as in MoCo v2 (App. C)."""
    crop = dict(size=args.image_size, area=args.crop_scale, ratio=args.crop_ratio)
    color = dict(jitter=args.jitter, jitter_p=args.jitter_p, gray_p=args.gray_p, solarize_p=0.0)
    blur = dict(blur_p=args.blur_p, blur_sigma=args.blur_sigma)
    view = common.View(**crop, **color, **blur, flip_p=args.flip_p)
    return [view] * (1 + args.num_keys)  # the query's, and the keys'


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


# ----------------------------------------------------------------------- JCL


class JCL(nn.Module):
    """MoCo v2's query encoder, momentum encoder (for the keys) and queue, with M' keys per query (Algorithm 1).

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of --arch.
    """

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args = args
        self.backbone = common.build_backbone(common.encoder_info(args)) if encoder is None else encoder
        width = common.output_width(self.backbone, args.image_size)
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

    def forward(self, views, step, lam):
        """Return (loss, mean keys to enqueue (N, dim), (q, k), metrics {name: tensor}): Algorithm 1, lines 5 to 10.

        views: this process's query view and M' key views, each (n, 3, H, W), normalised. step: seeds the shuffle of the
        keys. lam: lambda. q and k (n, dim) are queries and their first keys, without gradient. Gradients reach the
        query encoder only.
        """
        q = self.query(views[0])  # line 5
        generator = common.generator(self.args.seed, step, STREAM_SHUFFLE)
        keys = encode_shuffled_keys(self.key, views[1:], generator)  # line 6: (M', N, C), of all processes
        k = common.shard(keys, dim=1).transpose(0, 1)  # (n, M', C)
        if self.args.vanilla:
            losses = [info_nce(q, key, self.queue.keys, self.args.temperature) for key in k.unbind(1)]  # Eq. 2
            loss = sum(losses) / len(losses)  # Eq. 3
        else:
            loss = jcl_loss(q, k, self.queue.keys, self.args.temperature, lam)  # lines 7 to 10
        mean_keys = keys.mean(0)  # for line 13: means are not normalised again, so their norm is at most 1
        metrics = dict(key_variance=k.var(1, correction=0).mean())  # the mean of Sigma's diagonal
        return loss, mean_keys, (q.detach(), k[:, 0]), metrics

    @torch.no_grad()
    def update(self, m):
        """Move the momentum encoder's parameters: theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2), m in [0, 1]."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


# ================================================================= 5. training

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
    folder=dict(IMAGENET, queue="auto"),  # ours: the queue is a tenth of the images
)
SMALL_ENCODERS = dict(batch_size=256, lr=0.1, lr_batch=256, min_lr=0.0, momentum=0.99, blur_p=0.5)  # ours
RELEASED = dict(num_keys=4, lam=2.0, lam_schedule="ramp")  # D1, D2
RELEASED_IMAGENET = dict(RELEASED, batch_size=256, lr=0.03, lr_batch=256)  # D3
# fmt: on


def recipe(chosen):
    """Return the hyper-parameters {name: value}. chosen: a namespace with dataset, arch and variant."""
    values = dict(RECIPES[chosen.dataset])
    if chosen.variant == "released":
        values |= RELEASED_IMAGENET if chosen.dataset in ("imagenet", "folder") else RELEASED
    if chosen.arch in ("resnet_micro", "resnet_mini") and chosen.dataset in ("cifar10", "cifar100", "stl10", "folder"):
        values |= SMALL_ENCODERS
        if chosen.dataset == "folder":
            values["batch_size"] = 64  # a folder of one's own may be small
    return values


def parse_args(argv=None):
    """Return the command line (argv, or sys.argv's) as a namespace of all values. Exits with an error on a mistake."""
    run = dict(RUN, variant=("paper", "follow the paper, or the authors' code", ("paper", "released")))
    args, typed = common.parse("jcl.py", __doc__, argv, HYPERPARAMETERS, dict(run=run), recipe)
    args.method, args.evaluated = "jcl", "query"
    common.check_schedule(args)
    args.bn_groups = batch_norm_groups(args, typed)
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
    args.out = args.out or f"runs/jcl-{dataset}-{args.arch}-s{args.seed}{args.changes}"
    args.amp = "bf16" if common.use_bf16(args.amp, device, args.arch, [args.image_size]) else "off"
    args.device = device.type

    # Data
    train, test = common.open_images(args, train, test)
    loader = common.make_loader(args, train, augmentation(args), device)
    layout, norm = common.memory_format(device, args.arch), common.NORMS[args.norm]
    if args.show_views:
        names = ["query", *(f"key {m + 1}" for m in range(args.num_keys))]
        return common.save_views(args.show_views, common.colour_views(next(iter(loader)), device), names)
    steps_per_epoch = len(train) // args.batch_size
    total_steps, rank = args.epochs * steps_per_epoch, common.rank_and_world()[0]
    last_step = min(args.max_steps or total_steps, total_steps)

    # Model and optimiser
    if args.queue == "auto":
        args.queue = min(65536, max(args.batch_size, len(train) // 10))
    torch.manual_seed(args.seed)
    model = JCL(args, common.copy_module(encoder)).to(device, memory_format=layout)
    model = split_batch_norms(model, args.bn_groups)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, args.lr, momentum=args.sgd_momentum, weight_decay=args.weight_decay)
    ddp = in_parallel(args, model)

    # The run's folder. The run goes on from its last.pt, if there is one. The lock keeps other runs out
    images = dict(number=len(train), checksum=train.checksum())
    lock = common.claim_folder(args.out)
    step, records = restore(args, images, model, optimizer)
    save(args, step, records, images, model, optimizer)
    chance = math.log(args.queue + 1)  # the loss at equal logits
    facts = dict(chance_level=chance, queue_share=args.queue / len(train))
    introduce(args, train, test, peak_lr=common.peak_rate(args), **facts)

    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # the last epoch again: it may lack its kNN
        loader.batch_sampler.set_epoch(epoch, step, last_step)
        history = []
        lam = args.lam if args.lam_schedule == "constant" else args.lam * (epoch + 1) / args.epochs  # D1
        with common.until_stopped(loader) as batches:  # SIGTERM or Ctrl-C: the step is saved, then it raises Stopped
            for batch in batches:
                lr, _, momentum = schedule(args, step, steps_per_epoch)
                optimizer.param_groups[0]["lr"] = lr
                # Algorithm 1, line 4: a query view and M' key views per image; the loader has cut them
                views = common.colour_views(batch, device, layout, norm)
                torch.manual_seed(common.generator(args.seed, step, STREAM_STEP, rank).initial_seed())  # for drop-path
                # Lines 5 to 10, and Eq. 9: the loss
                loss, mean_keys, (q, _), metrics = ddp(views, step, lam)
                # Line 12: update the query encoder. Then move the momentum encoder (D5)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                grad_norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
                optimizer.step()
                model.update(momentum)
                average_statistics(model)
                # Line 13: the mean keys are negatives of the next steps
                model.queue.enqueue(mean_keys)
                step += 1
                metrics |= dict(loss=loss, grad_norm=grad_norm)
                history.append({name: value.detach() for name, value in metrics.items()})
                if step % 10 == 0 or step == total_steps:
                    common.show_progress(args, loader, history, step, total_steps)
            ended = step == (epoch + 1) * steps_per_epoch
            if ended and history:
                record = dict(epoch=epoch + 1, step=step, **means(args, loader, history), lr=lr, momentum=momentum)
                records.append(record | dict(below_chance=chance - record["loss"], **common.embedding_health(q)))
            save(args, step, records, images, model, optimizer)
        if ended:
            due = args.knn_every and ((epoch + 1) % args.knn_every == 0 or epoch + 1 == args.epochs)
            if test is not None and due and "knn20_top1" not in records[-1]:
                records[-1] |= common.knn_record(args, model.backbone, train, test, device)
                save(args, step, records, images, model, optimizer)
            common.log_epoch(args, records[-1])
        if step >= last_step:
            break

    lock.close()
    common.log_end(args, step, total_steps)


# =============================================================== 6. machinery


def restore(args, images, model, optimizer):
    """Load the run in --out, or --resume's, or --init's weights only. Return (steps done, records of the epochs)."""
    path, state = common.load_run(args, images, args.resume)
    if state["step"] > 0:
        with common.fitting(path):
            model.load_state_dict(state["model"])
            # Only its buffers: rates and weight decay are this run's, which may differ from --resume's
            optimizer.load_state_dict(optimizer.state_dict() | dict(state=state["optimizer"]["state"]))
    elif args.init:
        weights, _ = common.fitting_weights(args.init, model.backbone, args.init_prefix)
        model.backbone.load_state_dict(weights)
        model.momentum_backbone.load_state_dict(weights)
    return state["step"], state["records"]


def save(args, step, records, images, model, optimizer):
    """Write last.pt, which is all that a run needs to go on, and what follows from it, each whole or not at all."""
    out, info = Path(args.out), common.encoder_info(args)
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, records=records)
    state |= dict(config=vars(args), images=images, backbone=info)
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
