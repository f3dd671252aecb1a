"""Judge an encoder with labels: by a linear classifier on its frozen features, or by fine-tuning all its layers.

The default is `--protocol probe`. It computes the features once, standardises them, and trains a linear classifier on
them for a grid of learning rates at once, in seconds. The rate is chosen on a tenth of the training set. The test set
is used once. The same number is printed for two floors: raw pixels, and the same encoder untrained.

    python eval_linear.py runs/patchmix-patterns-vit_micro-s0
    python eval_linear.py RUN --dataset cifar100 --data-dir DIR                # transfer
    python eval_linear.py RUN --solver lbfgs                                   # transfer as in LoGo's Table 5
    torchrun --nproc_per_node=8 eval_linear.py RUN --data-dir DIR --protocol moco
    python eval_linear.py RUN --finetune --label-fraction 0.01
    python eval_linear.py FILE --arch resnet50 --dataset imagenet --data-dir DIR   # a checkpoint of others

The papers' own protocols train on random crops of the images, on any number of processes. The same command goes on
where a run was stopped, bit for bit. The score is that of the last epoch, never of the best one.
    --protocol moco              MoCo's. JointCrop's App. F and Table 11 (on MoCo v1)
    --protocol jointcrop         MoCo v3's. JointCrop's released code: MoCo v3 on ImageNet-1k
    --protocol jointcrop-small   ContrastiveCrop's. JointCrop on small images
    --protocol jcl               JCL's Table 1, and Fig. 2 with --dataset imagenet100
    --protocol clim              CLIM's Tables 1, 6 to 9 and 11. Table 2: --finetune --protocol clim --label-files LIST
    --protocol patchmix          PatchMix's Tables 2, 3 and 5 to 7, "Linear". "Finetune": with --finetune
`--finetune` trains all layers. ViTs take PatchMix's recipe by default, and other encoders CLIM's.
LoGo's Table 5 is `--solver lbfgs`, with `--metric per_class` for Pets, Flowers, Caltech101 and Aircraft only.
Every value of a recipe is a flag. A training says them all at its start.
Your own encoder and images: eval_linear.main(args, encoder=MODULE, train=common.ImageSet(...), test=...).

Departures from the papers:
    D1 An epoch is whole batches. The images over are left out of it.
    D2 Mixup and CutMix pair the images of one process, and each process draws for drop-path. So a fine-tuning with them
       depends on the number of processes. Nothing else does, but for rounding.
    D3 Images are resized by the interpolation that the encoder was trained with; for a checkpoint of others it is
       bilinear. LoGo's released evaluation: bicubic.
    D4 Precision. The encoder computes in bf16 on GPUs that have it (`--amp off`: in float32, with products in TF32).
       The probe is fitted in float32, and L-BFGS works in float64.
    D5 PatchMix's fine-tuning for fewer than 100 epochs. Released: the rate changes once per epoch, an epoch late, so
       that one or two epochs train at the warm-up's first rate. Here: 100 changes, however short the run is.
"""

import copy
import hashlib
import itertools
import json
import math
import os
import random
import re
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from timm.data import Mixup, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from timm.layers import convert_sync_batchnorm
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_convert

import common

# ===================================================== 1. recipes and arguments

# [P]: printed in the paper. [C]: from its released code, or that of the base that it names. [I]: our inference, where
# both are silent.
# fmt: off
SHARE, POSITIVE = (1e-9, 1), (1e-9, math.inf)
# {group: {name: (value, what it is, its limits or words)}}: MoCo's protocol, CLIM's fine-tuning, our probe, LoGo's
# L-BFGS. Each is a flag of its value's type, for example --lr 3. Without limits, a number is not below 0.
VALUES = {
    "training": dict(  # JCL, 4.2 [P]. CLIM, 4.1: rate and milestones [P], the rest as MoCo [I]
        epochs=(100, "epochs of the whole training", (1, math.inf)),
        batch_size=(256, "images per step, or encoded at once, over all processes", (2, math.inf)),
        lr=(30.0, "learning rate at batch size --lr-batch; scaled linearly with --batch-size", POSITIVE),
        lr_batch=(256, "batch size for which --lr is given", (1, math.inf)),
        milestones=([0.6, 0.8], "shares of the run where the rate falls by 10; none: it falls by a cosine", SHARE),
        min_lr=(0.0, "learning rate with which the cosine ends"),
        warmup=(0.0, "epochs of linear warm-up; not given, it shrinks with --epochs"),
        warmup_lr=(0.0, "learning rate with which the warm-up begins"),
        optimizer=("sgd", "how the weights are updated", ("sgd", "adamw")),
        momentum=(0.9, "momentum of SGD", (0, 1)),  # MoCo's [C], as the weight decay and the areas of crops
        nesterov=(False, "Nesterov's form of that momentum"),
        weight_decay=(0.0, "weight decay of the optimizer"),
        crop_scale=((0.08, 1.0), "smallest and largest share of the image that a crop has", SHARE),
        pad=(0, "crops are places of the image, padded by this many pixels; 0: --crop-scale"),
        randaug=(0, "magnitude of RandAugment (rand-mN-mstd0.5-inc1); 0: none", (0, 10)),
        erase=(0.0, "probability of random erasing", (0, 1)),
        mixup=(0.0, "alpha of mixup; 0: none"),
        cutmix=(0.0, "alpha of CutMix; 0: none"),
        smoothing=(0.0, "smoothing of the labels", (0, 0.99)),
    ),
    "fine-tuning": dict(
        head_lr=(10.0, "learning rate of the new classifier at --lr-batch; 0: as the other layers"),
        layer_decay=(1.0, "each layer's rate is this times that of the layer above it", SHARE),
        drop_path=(0.0, "probability of stochastic depth in the last block", (0, 0.99)),
    ),
    "probe and L-BFGS": dict(  # LoGo, supplement 3: L-BFGS, L2, iterations, metrics [P]; its grid: BYOL's, SimCLR's [I]
        holdout=(0.1, "share that chooses the rate or the strength", (0.001, 0.999)),
        lrs=((10.0 ** np.arange(-4.5, 1.51, 0.5)).tolist(), "the probe's grid of rates", POSITIVE),
        strengths=(np.logspace(-6, 5, 45).tolist(), "L-BFGS: grid of L2 penalties", POSITIVE),
        metric=("top1", "L-BFGS: the score that chooses", ("top1", "per_class")),
        iterations=(5000, "L-BFGS: most iterations for each strength", (1, math.inf)),
        tolerance=(1e-6, "L-BFGS: largest entry of the final whitened gradient", POSITIVE),
    ),
}
MOCO, TUNED, CACHED = (common.defaults({group: rows}) for group, rows in VALUES.items())
COSINE = dict(MOCO, milestones=())
LINEAR = {
    "moco": MOCO, "jcl": MOCO, "clim": MOCO,
    "jointcrop": dict(COSINE, epochs=90, batch_size=1024, lr=0.1),  # MoCo v3's [C]
    # CIFAR, STL-10, Tiny-ImageNet: ContrastiveCrop's released code's [I]
    "jointcrop-small": dict(MOCO, batch_size=512, lr=10.0, lr_batch=512),
    # 4.1.3: 100 epochs [P]; the rest [C]. Other encoders than ViT-T, -S, -B have the rate of S, vit_micro that of T [I]
    "patchmix": dict(COSINE, batch_size=1024, lr=0.02, nesterov=True),
}
FINETUNE = {
    # 4.2 [P]; batch, weight decay and areas of crops [I]
    "clim": dict(MOCO, **TUNED, epochs=60, lr=1e-4, milestones=(1 / 3, 2 / 3)),
    # 4.1.3: 100 epochs [P]; the rest [C], with the rates of timm's scheduler, which is called after each epoch
    "patchmix": dict(
        COSINE, optimizer="adamw", batch_size=1024, lr=5e-4, head_lr=0.0, weight_decay=0.05, layer_decay=0.75,
        warmup=10.0, warmup_lr=1e-6, min_lr=1e-5, drop_path=0.1, randaug=9, erase=0.25, mixup=0.8, cutmix=1.0,
        smoothing=0.1,
    ),
}
# fmt: on


def recipe(args, arch, image_size):
    """Return the values of an evaluation, {name: value}. arch: timm's name of the encoder, or custom."""
    arch, small = "_".join(arch.split("_")[:2]), args.dataset in ("cifar10", "cifar100")
    if args.mode == "probe":  # ours
        return {name: CACHED[name] for name in ("lrs", "holdout")} | dict(epochs=50, batch_size=256)
    if args.mode == "lbfgs":
        return {name: value for name, value in CACHED.items() if name != "lrs"} | dict(batch_size=256)
    values = dict((LINEAR if args.mode == "linear" else FINETUNE)[args.protocol])
    if args.mode == "linear" and args.protocol == "jcl" and args.dataset == "imagenet100":
        values |= dict(lr=10.0)  # App. D [P]
    if args.mode == "linear" and args.protocol == "jointcrop" and arch.startswith("vit_"):
        values |= dict(lr=3.0)  # MoCo v3's [C]
    if args.protocol == "patchmix":
        rates = dict(vit_tiny=0.05, vit_base=0.01) if args.mode == "linear" else dict(vit_tiny=1e-3)
        values |= dict(lr=rates.get(arch, values["lr"]), batch_size=256 if small else 1024)
        values |= dict(pad=4 if small and args.mode == "finetune" and image_size <= 32 else 0)
    if arch == "custom" and args.mode == "finetune":  # nothing is known of its layers
        values |= dict(layer_decay=1.0)
        del values["drop_path"]
    values["warmup"] *= min(1, (args.epochs or values["epochs"]) / values["epochs"])  # in proportion in a short run
    return values


# Random streams, see common.generator: what draws, and the numbers that keep the draws apart. They never change.
STREAM_STEP, STREAM_HOLDOUT, STREAM_PROBE, STREAM_LABELS = 0, 2, 3, 4
STREAM_CLASSES, STREAM_RANDAUG, STREAM_ERASE = 5, 6, 7

RUN = common.EVALUATION | {  # the other flags
    "protocol": dict(
        protocol=(None, "default: probe; for which table: see the file's first lines", ("probe", *LINEAR)),
        finetune=(False, "train all layers; --protocol is patchmix (ViTs) or clim (others)"),
        solver=(None, "lbfgs: logistic regression on features that are computed once", ("sgd", "lbfgs")),
        label_fraction=(None, "train on this share of the labels, alike per class", SHARE),
        label_files=(None, "a list of files to train on: one per line, base name or path in train/"),
    ),
    "a training's folder": dict(
        out=(None, "default: runs/PROTOCOL-DATASET-RUN...; the same command goes on from it"),
        max_steps=(None, "save and stop when the run has made N steps in all", (1, math.inf)),
        eval_every=(0, "epochs between judgements; 0: the last only"),
    ),
}


def parse_args(argv=None):
    """Return the command line as a namespace. Exits with an error message on a mistake.

    argv: a list of words; sys.argv's if None. Values of a recipe that are not given are None until `resolve`. Added is
    `mode`: probe, lbfgs, linear or finetune; and `changes`, the typed values as the name of a run's folder has them.
    """
    args, typed = common.parse("eval_linear.py", __doc__, argv, VALUES, RUN)
    cached = "lbfgs" if args.solver == "lbfgs" else "probe"
    args.mode = "finetune" if args.finetune else "linear" if args.protocol in LINEAR else cached
    if args.solver == "lbfgs" and args.mode != "lbfgs":
        common.fail("--solver lbfgs is for features that are computed once: leave out --finetune and --protocol")
    if args.finetune and args.protocol not in (None, *FINETUNE):
        common.fail(f"--finetune goes with --protocol patchmix or clim, not {args.protocol}")
    if args.label_files and args.label_fraction:
        common.fail("give --label-fraction or --label-files, not both")
    in_name = {*common.defaults(VALUES), "data_dir", "encoder", "random_init", "label_fraction", "label_files"}
    args.changes = common.describe_changes(args, in_name & typed)
    return args


def resolve(args, info):
    """Fill in from the recipe what the command line left open, for this encoder and data set.

    Exits with an error message if a value was given that this evaluation does not have, or that would be wrong.
    """
    arch = re.sub("^deit3?_", "vit_", info["timm_name"] or "custom")
    if args.mode in ("linear", "finetune"):
        args.protocol = args.protocol or ("patchmix" if arch.startswith("vit_") else "clim")
    values = recipe(args, arch, info["image_size"])
    for name in common.defaults(VALUES):
        if getattr(args, name) is None:
            value = values.get(name)
            setattr(args, name, tuple(value) if isinstance(value, list) else value)
        elif name not in values:
            common.fail(f"{common.option(name)} has no effect here: {args.mode} has {', '.join(values)}")
    if args.mode in ("probe", "lbfgs"):
        return
    if args.head_lr and args.layer_decay < 1:
        common.fail("--head-lr and a --layer-decay below 1 do not go together: give --head-lr 0 or --layer-decay 1")
    common.check_schedule(args)
    each = args.batch_size // common.rank_and_world()[1]
    if args.mixup + args.cutmix > 0 and each % 2:
        common.fail(f"--batch-size {args.batch_size}: mixup needs an even number of images per process, not {each}")


# =================================================================== 2. labels


def balanced_share(labels, fraction, seed):
    """Return the sorted rows (m,) of a share of the labels (n,), which the seed fixes.

    Each class has as many as any other, or one more; at least one, and at most all. The rows of a smaller share are
    among those of a larger one.
    """
    classes, labels = np.unique(labels, return_inverse=True)
    order = torch.randperm(len(labels), generator=common.generator(seed, STREAM_LABELS)).numpy()
    turn = torch.randperm(len(classes), generator=common.generator(seed, STREAM_CLASSES)).numpy()
    each, more = divmod(max(round(fraction * len(labels)), len(classes)), len(classes))
    order = order[labels[order].argsort(kind="stable")]  # class by class, each in random order
    counts = np.bincount(labels)
    place = np.arange(len(labels)) - np.repeat(counts.cumsum() - counts, counts)  # of a row in its class
    return np.sort(order[place < np.repeat(each + (turn < more), counts)])


def listed_files(images, root, file):
    """Return the sorted rows of the files that a list names, one per line.

    A line is a base name, as in SimCLR's splits, or a path relative to `root`. Exits with an error message if a line is
    not the name of exactly one file.
    """
    if images.paths is None or not os.path.isfile(file):
        common.fail(f"--label-files {file}: give a file, and images in files, --data-dir with train/")
    rows = {}
    for i in range(len(images)):
        for name in {os.path.basename(images.path(i)), os.path.relpath(images.path(i), root)}:
            rows.setdefault(name, []).append(i)
    names = {line.strip() for line in Path(file).read_text("utf-8-sig", "replace").splitlines()} - {""}
    odd = sorted(name for name in names if len(rows.get(name, ())) != 1)
    if odd or not names:
        common.fail(f"--label-files {file}: not the name of one file in {root}: {', '.join(odd[:5]) or 'nothing'}")
    return np.unique([rows[name][0] for name in names])


def choose_labels(args, train):
    """Return the training images whose labels may be used, as --label-fraction or --label-files says."""
    if args.label_files:
        rows = listed_files(train, Path(args.data_dir or "data") / "train", args.label_files)
    elif args.label_fraction is not None and args.label_fraction < 1:
        rows = balanced_share(train.labels, args.label_fraction, args.seed)
    else:
        return train
    chosen = train.subset(rows)
    counts = np.bincount(chosen.labels, minlength=len(train.classes))
    if (counts > 0).sum() < 2:
        common.fail(f"--label-files {args.label_files} has images of fewer than two classes")
    common.log(f"labels: {len(chosen)} of {len(train)} training images, {counts.min()} to {counts.max()} per class")
    return chosen


# ============================================== 3. on cached features: the choice


def hold_out(count, share, seed):
    """Return (rows that are fitted, rows that choose) of `count` images, in random order. At least one row chooses."""
    order = torch.randperm(count, generator=common.generator(seed, STREAM_HOLDOUT))
    held = max(1, int(share * count))
    return order[held:], order[:held]


def fit_and_choose(fit, x, y, test_x, rest, check, num_classes, grid, metric="top1"):
    """Fit linear classifiers by each value of a grid. The best one on held-out images is fitted again, on all images.

    fit: maps (rows, values, weights to begin from or None) to a list of weights (d, num_classes), one per value. x:
    (n, d) and test_x: (m, d), features with a last 1 for the bias. y: (n,) int64. rest, check: the rows that are
    fitted, and those that choose. metric: the score that chooses, top1 or per_class. Of equals the first is taken.
    Returns {'logits': (m, num_classes), 'chosen': the value, 'held_out': {value: percent}}.
    """
    weights, held_out = fit(rest, grid, None), []
    for weight in weights:
        logits = torch.cat([(x[part] @ weight).cpu() for part in check.split(4096)])
        held_out.append(scores(logits, y[check].cpu(), num_classes)[f"linear_{metric}"])
    best = held_out.index(max(held_out))
    (weight,) = fit(torch.cat([check, rest]), [grid[best]], weights[best])
    return dict(logits=test_x @ weight, chosen=grid[best], held_out=dict(zip(grid, held_out, strict=True)))


def scores(logits, labels, num_classes):
    """Return the scores of logits (m, num_classes) against labels (m,), in percent, as a dict.

    linear_top1; linear_top5 if there are more than five classes; linear_per_class, the mean over the classes of each
    one's top-1.
    """
    ranked = logits.topk(min(5, num_classes), dim=1).indices == labels[:, None]
    right, counts = ranked[:, 0].double(), labels.bincount()
    per_class = (labels.bincount(right) / counts)[counts > 0]
    top5 = {"linear_top5": 100 * ranked.any(1).double().mean().item()} if num_classes > 5 else {}
    return {"linear_top1": 100 * right.mean().item(), **top5, "linear_per_class": 100 * per_class.mean().item()}


# ================================================== 4. linear probe and L-BFGS


@torch.no_grad()
@common.exact_products()
def linear_probe(x, y, test_x, num_classes, seed=0, epochs=50, batch_size=256, lrs=CACHED["lrs"], holdout=0.1):
    """Train a linear classifier on cached features, by SGD with momentum 0.9 and a cosine, with many rates at once.

    x: (n, d) and test_x: (m, d), features, which are standardised by the mean and deviation of x. y: (n,) int64.
    lrs: the grid. holdout: the share of x that chooses the rate. Returns what `fit_and_choose` does.
    """
    mean, std = x.mean(0), x.std(0, correction=0).clamp_min(1e-6)
    x, test_x = (F.pad((part - mean) / std, (0, 1), value=1.0) for part in (x, test_x))

    def fit(rows, rates, _):
        weight = x.new_zeros(x.shape[1], len(rates), num_classes)
        velocity, scale = torch.zeros_like(weight), weight.new_tensor(rates)[:, None]
        what = f"{len(rates)} rates" if len(rows) < len(x) else "the best rate"
        for epoch in range(epochs):
            common.progress(f"probe: {what}, epoch {epoch + 1} of {epochs}")
            shuffled = torch.randperm(len(rows), generator=common.generator(seed, STREAM_PROBE, epoch))
            batches = rows[shuffled].split(batch_size)
            for i, batch in enumerate(batches):
                inputs = x[batch]
                rate = 0.5 * (1 + math.cos(math.pi * (epoch + i / len(batches)) / epochs))
                # One product for all rates: (n, d) and (d, rates, classes) -> (n, rates, classes)
                error = (inputs @ weight.flatten(1)).view(len(batch), *weight.shape[1:]).softmax(-1)
                error[torch.arange(len(batch)), :, y[batch]] -= 1  # the gradient of cross-entropy
                velocity = 0.9 * velocity + (inputs.T @ error.flatten(1)).view_as(weight) / len(batch)
                weight = weight - rate * scale * velocity
        return list(weight.unbind(1))

    return fit_and_choose(fit, x, y, test_x, *hold_out(len(x), holdout, seed), num_classes, sorted(set(lrs)))


def logistic_regression(x, y, num_classes, strength, start=None, iterations=5000, tolerance=1e-6, what="one fit"):
    """Fit a multinomial logistic regression with an L2 penalty, by L-BFGS.

    Returns (weights (d + 1, num_classes), largest entry of the gradient). The weights W and, as their last row, the
    bias b minimise sum_i CE(x_i W + b, y_i) + strength / 2 |W|^2. It has converged if the largest entry of the gradient
    of that, divided by n, is at most `tolerance`.
    x: (n, d) float64. y: (n,) int64. strength: 1 / C of scikit-learn. start: weights to begin from.
    L-BFGS works on V with W = P V, where P whitens the features as far as the penalty lets it: the minimum is the same,
    and tens of iterations are enough.
    """
    values, basis = torch.linalg.eigh(x.T @ x / len(x))
    decay = strength / len(x)
    scale = (values.clamp_min(0) / 4 + decay).rsqrt()[:, None]  # at most 1/4: the curvature of cross-entropy in a logit
    white = x @ (basis * scale.T)
    weight = x.new_zeros(x.shape[1] + 1, num_classes)
    if start is not None:
        weight = torch.cat([basis.T @ start[:-1] / scale, start[-1:]])
    weight.requires_grad_()
    options = dict(tolerance_grad=tolerance, tolerance_change=0, history_size=20, line_search_fn="strong_wolfe")
    optimizer = torch.optim.LBFGS([weight], max_iter=iterations, max_eval=25 * iterations, **options)
    evaluations = itertools.count()

    def closure():
        if (made := next(evaluations)) % 10 == 0:
            common.progress(f"L-BFGS: {what}, after {made} evaluations of the gradient")
        optimizer.zero_grad()
        penalty = decay / 2 * (scale * weight[:-1]).square().sum()
        loss = F.cross_entropy(torch.addmm(weight[-1], white, weight[:-1]), y) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    closure()
    v = weight.detach()
    return torch.cat([basis @ (scale * v[:-1]), v[-1:]]), weight.grad.abs().max().item()


@common.exact_products()
def lbfgs_probe(x, y, test_x, rest, check, num_classes, strengths, metric="top1", iterations=5000, tolerance=1e-6):
    """Fit cached features by logistic regression, with a grid of strengths of its L2 penalty.

    strengths: the grid. The other arguments, and what is returned, are those of `fit_and_choose`.
    The features are centred and divided by one number, their root mean square. So a strength means the same for every
    encoder, while directions keep their share. All is in float64. The fits go from the strongest penalty to the
    weakest. Each begins where the last one ended.
    """
    mean = x[rest].double().mean(0)
    scale = (x[rest] - mean).square().mean().sqrt().clamp_min(1e-12)
    x, test_x = (F.pad((part - mean) / scale, (0, 1), value=1.0) for part in (x, test_x))

    def fit(rows, grid, weight):
        weights, fit_x, fit_y = [], x[rows, :-1], y[rows]
        for i, strength in enumerate(grid, start=1):
            what = f"strength {strength:.3g}, {i} of {len(grid)}"
            options = dict(iterations=iterations, tolerance=tolerance, what=what)
            weight, left = logistic_regression(fit_x, fit_y, num_classes, strength, weight, **options)
            if left > tolerance:
                common.log(f"warning: {what}, has not converged in {iterations} iterations: gradient {left:.1e}")
            weights.append(weight)
        return weights

    return fit_and_choose(fit, x, y, test_x, rest, check, num_classes, sorted(set(strengths), reverse=True), metric)


# ====================================== 5. on cached features: what is judged


def evaluate_cached(args, device, encoder, info, train, test):
    """Fit the probe or L-BFGS on features that are computed once. Return {encoder or floor: scores}."""
    parts, root, classes = [train, test], Path(args.data_dir or ""), len(train.classes)
    if args.mode == "lbfgs" and args.data_dir and all((root / part).is_dir() for part in ("train", "val", "test")):
        judged = common.read_folder(args.dataset, root, "test")
        if judged.classes:  # ImageNet's test/ has none
            common.check_labels(train, judged)
            parts = [train, test, judged]
            common.log(f"val/ and test/ are both there: val/ chooses, test/ with its {len(judged)} images is judged")
    labels = [torch.from_numpy(part.labels) for part in parts]
    y, test_y = torch.cat(labels[:-1]).to(device), labels[-1]
    rest, check = hold_out(len(train), args.holdout, args.seed)
    if len(parts) == 3:
        rest, check = torch.arange(len(y)).split([len(train), len(test)])
    value, flag, grid = "rate", "--lrs", args.lrs
    if args.mode == "lbfgs":
        value, flag, grid = "strength", "--strengths", args.strengths
    common.log(f"{len(check)} images choose the {value} by {args.metric or 'top1'}; all {len(y)} are fitted")
    results, how = {}, dict(batch_size=args.batch_size, workers=args.workers, amp=args.amp == "bf16")
    for name, network in {"encoder": encoder, **common.floor_encoders(args, info, device, len(train))}.items():
        if name == "raw pixels" and args.mode == "lbfgs":
            continue  # thousands of numbers per image take minutes to hours
        how["what"] = f"features of {name}"
        *x, test_x = [common.extract_features(network, part, info, device, **how).to(device) for part in parts]
        x = torch.cat(x)
        if args.mode == "probe":
            found = linear_probe(x, y, test_x, classes, args.seed, args.epochs, lrs=args.lrs, holdout=args.holdout)
        else:
            options = args.strengths, args.metric, args.iterations, args.tolerance
            found = lbfgs_probe(x, y, test_x, rest, check, classes, *options)
        results[name] = scores(found["logits"].cpu(), test_y, classes)
        chosen, percents = found["chosen"], [*found["held_out"].values()]
        common.log(f"{name:>10}  {show(results[name])}  ({value} {chosen:.3g}, {max(percents):.2f} % held out)")
        at_edge = chosen in (min(grid), max(grid)) and percents.count(max(percents)) == 1 < len(grid)
        if name == "encoder" and at_edge:
            common.log(f"warning: the best {value} is at the edge of the grid: widen {flag}")
    return results


def show(result):
    """Return scores, in percent, as a line of text."""
    return "  ".join(f"{name} {value:.2f} %" for name, value in result.items())


# =================================== 6. the papers' protocols: what is trained


class TrainingViews(common.ViewDataset):
    """One view of each image: a random crop, RandAugment and a flip. Erasing, mixup and CutMix follow on the device.

    The crop is a random resized one or, with --pad, a random place of the padded image, which has the view's size.
    The flip is made on the device, too. RandAugment treats left and right alike.
    """

    def __init__(self, images, args, info):
        size, pad, area, ratio = info["image_size"], args.pad, args.crop_scale, (3 / 4, 4 / 3)
        if pad and (images.array is None or images.array.shape[1:3] != (size, size)):
            common.fail(f"--pad {pad} needs images of {size} x {size} px, decoded in memory: give --pad 0")
        if pad:
            array = np.pad(images.array, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
            images = common.ImageSet(array, images.labels, images.classes)
            area, ratio = ((size / (size + 2 * pad)) ** 2,) * 2, (1, 1)
        plain = dict(jitter=(0, 0, 0, 0), jitter_p=0.0, gray_p=0.0, blur_p=0.0, blur_sigma=(0.1, 2.0), solarize_p=0.0)
        view = common.View(size=size, area=area, ratio=ratio, flip_p=0.5, **plain)
        super().__init__(images, [view], args.seed, info["interpolation"])
        self.randaug = None
        if args.randaug:
            options = dict(translate_const=int(0.45 * size), img_mean=tuple(round(255 * m) for m in info["mean"]))
            # At 10, "posterize" would keep 0 bits, which Pillow 13 refuses.
            options |= dict(interpolation=common.RESAMPLE[info["interpolation"]], magnitude_max=9.99)
            self.randaug = rand_augment_transform(f"rand-m{args.randaug}-mstd0.5-inc1", options)

    def __getitems__(self, keys):
        batch = super().__getitems__(keys)
        if self.randaug:
            for view, key in zip(batch["views"][0], keys, strict=True):
                seed_libraries(self.seed, STREAM_RANDAUG, *key)
                image = self.randaug(Image.fromarray(view.permute(1, 2, 0).numpy()))
                view.copy_(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        return batch


def seed_libraries(*keys):
    """Make what timm's augmentations draw depend on integer keys only: they draw from the global generators."""
    number = common.generator(*keys).initial_seed()
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def erase(args, x, index, epoch):
    """Erase a random box of each image (n, 3, H, W) with probability --erase, in place. index: (n,) its rows."""
    erasing = RandomErasing(args.erase, mode="pixel", device=x.device)
    for image, row in zip(x, index.tolist(), strict=True):
        seed_libraries(args.seed, STREAM_ERASE, epoch, row)
        erasing(image)


def make_network(args, encoder, info, num_classes, device):
    """Return what is trained, and its new linear layer: (network, head). Of a frozen encoder both are the head.

    The head's weights are drawn from N(0, 0.01), and its bias is 0. For a fine-tuning the encoder is copied. With
    several processes batch norm is taken over all of them.
    """
    torch.manual_seed(args.seed)
    if args.mode == "linear":
        network = head = nn.Linear(common.output_width(encoder, info["image_size"]), num_classes)
    elif info["timm_name"] is None:
        head = nn.Linear(common.output_width(encoder, info["image_size"]), num_classes)
        network = nn.Sequential(copy.deepcopy(encoder), nn.Flatten(), head).requires_grad_()
    else:
        network = common.build_backbone(info, **({"drop_path_rate": args.drop_path} if args.drop_path else {}))
        network.load_state_dict(encoder.state_dict())
        network.reset_classifier(num_classes)
        head = network.get_classifier()
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    if common.rank_and_world()[1] > 1:
        network = convert_sync_batchnorm(network)  # timm's: torch's would drop the activation in a BatchNormAct2d
    return network.to(device).train(), head


def make_optimizer(args, network, head):
    """Return SGD or AdamW. A group's `lr_scale` is a power of --layer-decay, or --head-lr / --lr for the head."""
    if args.mode == "linear":
        groups = [dict(params=[*head.parameters()], lr_scale=1.0)]
    elif args.head_lr:
        new = {id(p) for p in head.parameters()}
        pretrained = [p for p in network.parameters() if id(p) not in new]
        groups = [dict(params=pretrained, lr_scale=1.0)]
        groups.append(dict(params=[*head.parameters()], lr_scale=args.head_lr / args.lr))
    else:
        names = network.no_weight_decay() if hasattr(network, "no_weight_decay") else ()
        groups = param_groups_layer_decay(network, args.weight_decay, names, layer_decay=args.layer_decay)
    options = dict(lr=0.0, weight_decay=args.weight_decay)
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, **options)
    return torch.optim.SGD(groups, momentum=args.momentum, nesterov=args.nesterov and args.momentum > 0, **options)


def learning_rate(args, step, steps_per_epoch):
    """Return the learning rate of a step, counted from 0, before a group's lr_scale. It changes once per epoch.

    It warms up linearly. Then it falls by a factor of 10 at each milestone or, without milestones, by a cosine to
    --min-lr. PatchMix fine-tunes by timm's scheduler, which its released code calls after each epoch: so each epoch has
    the rate of the one before it, and the cosine counts the epochs of the warm-up. A run of fewer than 100 epochs
    passes through the rates of 100 epochs in its time (D5).
    """
    epoch, cosine_begins = step // steps_per_epoch, args.warmup
    if (args.mode, args.protocol) == ("finetune", "patchmix"):
        changes = max(100, args.epochs)  # of the rate, in the whole run
        last_change = max(0, step * changes // (args.epochs * steps_per_epoch) - 1)
        epoch, cosine_begins = last_change * args.epochs / changes, 0
    if epoch < args.warmup:
        return args.warmup_lr + (common.peak_rate(args) - args.warmup_lr) * epoch / args.warmup
    if args.milestones:
        return common.peak_rate(args) * 0.1 ** sum(epoch / args.epochs >= m for m in args.milestones)
    turn = math.pi * (epoch - cosine_begins) / (args.epochs - cosine_begins)
    return args.min_lr + (common.peak_rate(args) - args.min_lr) * (1 + math.cos(turn)) / 2


# ======================================= 7. the papers' protocols: the training


def name_run(args, encoder):
    """Fill in args.weights, a hash of the encoder, and args.out. A run goes on only where both are the same."""
    digest = hashlib.sha256()
    for name, value in encoder.state_dict().items():
        digest.update(name.encode() + value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    args.weights, source = digest.hexdigest(), "custom"
    if args.checkpoint:
        args.checkpoint = os.path.abspath(args.checkpoint)
        source = common.run_folder(args.checkpoint).resolve().name
        if args.arch:  # a file of others
            source = "-".join([Path(args.checkpoint).stem, args.arch, *([args.prefix] if args.prefix else [])])
    name = f"{args.mode}-{args.protocol}-{args.dataset}-{common.short(source, 100)}-s{args.seed}{args.changes}"
    args.out = args.out or f"runs/{common.short(name, 250)}"  # file systems have names of up to 255 bytes


def restore(args, images, network, optimizer):
    """Load the state of the run in --out. Return (steps done, records of the epochs)."""
    path, state = common.load_run(args, images)
    if state["step"] > 0:
        with common.fitting(path):
            network.load_state_dict(state["model"])
            # What it has gathered. Its flags are this run's
            optimizer.load_state_dict(optimizer.state_dict() | dict(state=state["optimizer"]["state"]))
    return state["step"], state["records"]


def save(args, step, records, images, network, optimizer):
    """Write last.pt, which is all that a run needs to go on, and what follows from it, each whole or not at all."""
    out, state = Path(args.out), dict(model=network.state_dict(), optimizer=optimizer.state_dict())
    state |= dict(step=step, records=records, config=vars(args), images=images)
    common.write_file(out / "last.pt", state)
    config = vars(args) | common.versions(args.device) | {"images": images}
    common.write_file(out / "config.json", json.dumps(config, default=str))
    common.write_file(out / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))


def introduce(args, **facts):
    """Say what a training is: every value that its numbers depend on, and facts that follow from these."""
    rows = dict(run={name: getattr(args, name) for name in ("mode", "protocol", "seed", "checkpoint", "out")})
    rows |= {group: {name: getattr(args, name) for name in table} for group, table in VALUES.items()}
    rows |= dict(facts=facts, versions=common.versions(args.device))
    for group, values in rows.items():
        common.log_values(group, values)


def means(args, loader, history):
    """Return the means of metrics over the steps and processes, and how fast the steps were: {name: float}.

    history: a dict per step, {name: 0-d tensor}.
    """
    sums = sum(torch.stack([*metrics.values()]).double() for metrics in history)
    values = (common.gather_uneven(sums[None]).mean(0) / len(history)).tolist()
    return dict(zip(history[0], values, strict=True)) | loader.speed(args.batch_size * len(history))


def evaluate(args, device, encoder, network, info, test):
    """Return the test images' scores, in percent: {"linear_top1" or "finetune_top1": ..., ...}; see `make_network`."""
    frozen, options = args.mode == "linear", dict(workers=args.workers, amp=args.amp == "bf16")
    options |= dict(batch_size=args.batch_size // common.rank_and_world()[1], what="judging the test set")
    logits = common.extract_features(encoder if frozen else network, test, info, device, **options)
    if frozen:  # these are the features
        with torch.no_grad():
            logits = network(logits.to(device)).cpu()
    found = scores(logits, torch.from_numpy(test.labels), len(test.classes))
    return {name.replace("linear", args.mode): value for name, value in found.items()}


def train_protocol(args, device, encoder, info, train, test):
    """Train as the recipe says. Return {"encoder": scores of the last epoch}, or {} if the training ends before it."""
    # Data
    frozen, classes = args.mode == "linear", len(train.classes)
    name_run(args, encoder)
    images = dict(train=len(train), train_checksum=train.checksum(), test=len(test), test_checksum=test.checksum())
    args.device = device.type
    sampler = common.EpochSampler(len(train), args.batch_size, args.seed)
    options = dict(batch_sampler=sampler, collate_fn=default_convert, persistent_workers=args.workers > 0)
    loader = common.Loader(TrainingViews(train, args, info), device, args.workers, **options)
    labels, norm = torch.from_numpy(train.labels), (info["mean"], info["std"])
    steps_per_epoch = len(train) // args.batch_size
    total_steps = args.epochs * steps_per_epoch
    last_step = min(args.max_steps or total_steps, total_steps)

    # Network and optimiser
    layout = common.memory_format(device, common.arch_name(info))
    network, head = make_network(args, encoder, info, classes, device)
    unused = not frozen and info["timm_name"] is None  # an own encoder may leave some parameters unused
    ddp = DistributedDataParallel(network, find_unused_parameters=unused) if dist.is_initialized() else network
    optimizer = make_optimizer(args, network, head)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16")
    mixup = None
    if args.mixup or args.cutmix:
        mixup = Mixup(args.mixup, args.cutmix, label_smoothing=args.smoothing, num_classes=classes)

    # The run's folder. The run goes on from its last.pt, if there is one. The lock keeps other runs out
    lock = common.claim_folder(args.out)
    step, records = restore(args, images, network, optimizer)
    save(args, step, records, images, network, optimizer)
    facts = dict(trained_parameters=sum(p.numel() for p in network.parameters()), peak_rate=common.peak_rate(args))
    introduce(args, steps_per_epoch=steps_per_epoch, processes=common.rank_and_world()[1], **facts)

    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # the last one again: it may lack its scores
        loader.batch_sampler.set_epoch(epoch, step, last_step)
        history = []
        with common.until_stopped(loader) as batches:  # SIGTERM or Ctrl-C: the step is saved, then it raises Stopped
            for batch in batches:
                lr = learning_rate(args, step, steps_per_epoch)
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]
                # One view per image
                (x,) = common.colour_views(batch, device, layout, norm)
                y = target = labels[batch["index"]].to(device, non_blocking=True)
                if args.erase:
                    erase(args, x, batch["index"], epoch)
                seed_libraries(args.seed, step, STREAM_STEP, common.rank_and_world()[0])  # mixup and drop-path
                if mixup:
                    x, target = mixup(x, y)  # (n, classes): the labels of both images, smoothed
                # The logits and the loss
                if frozen:
                    with torch.no_grad(), autocast:
                        features = encoder(x).flatten(1).float()
                    logits = ddp(features)
                else:
                    with autocast:
                        logits = ddp(x)
                    logits = logits.flatten(1).float()
                loss = F.cross_entropy(logits, target, label_smoothing=0.0 if mixup else args.smoothing)
                # The step
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                step += 1
                train_top1 = 100 * (logits.argmax(1) == y).float().mean()
                history.append(dict(loss=loss.detach(), train_top1=train_top1))
                if step % 10 == 0 or step == total_steps:
                    common.show_progress(args, loader, history, step, total_steps)
            ended = step == (epoch + 1) * steps_per_epoch
            if ended and history:
                records.append(dict(epoch=epoch + 1, step=step, **means(args, loader, history), lr=lr))
            save(args, step, records, images, network, optimizer)
        if ended:
            due = epoch + 1 == args.epochs or (args.eval_every and (epoch + 1) % args.eval_every == 0)
            if due and f"{args.mode}_top1" not in records[-1]:
                records[-1] |= evaluate(args, device, encoder, network, info, test)
                save(args, step, records, images, network, optimizer)
            common.log_epoch(args, records[-1])
        if step >= last_step:
            break

    lock.close()
    if step < total_steps:
        common.log(f"stopped at step {step} of {total_steps}: give a larger --max-steps, or none, to go on")
        return {}
    result = {name: value for name, value in records[-1].items() if name.startswith(args.mode)}
    common.log(f"{'encoder':>10}  {show(result)}  (epoch {args.epochs}, the last)")
    return {"encoder": result}


@common.leaves_no_trace
def main(args, encoder=None, train=None, test=None):
    """Judge an encoder as args say. Return {"encoder" or a floor: {"linear_top1": percent, ...}}.

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of timm's; a
    copy of it is judged. train, test: common.ImageSet of images and labels to use instead of --dataset.
    """
    args = copy.copy(args)
    device, encoder, info = common.open_encoder(args, encoder)
    train, test = common.open_data(args, info, train, test)
    resolve(args, info)
    common.log(common.protocol(args, info, train, test))
    train = choose_labels(args, train)
    evaluate = evaluate_cached if args.mode in ("probe", "lbfgs") else train_protocol
    return evaluate(args, device, encoder, info, train, test)


if __name__ == "__main__":
    common.start(main, parse_args)
