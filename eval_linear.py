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
Every value of a recipe is a flag, and is printed.
Your own encoder and data: eval_linear.main(args, encoder=MODULE, train=DATASET, test=DATASET).

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

The probe and L-BFGS compute the features on all processes. Then each process fits on all features. With several
processes these may be up to 2**30 numbers (4 GiB).
"""

import argparse
import copy
import hashlib
import itertools
import json
import math
import os
import random
import re
import time
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

# fmt: off
# lr is the rate at batch size lr_batch. Milestones are shares of the run; warmup counts epochs.
# [P]: printed in the paper. [C]: from its released code, or that of the base that it names. [I]: our inference, where
# both are silent.
COMMON = dict(
    optimizer="sgd", momentum=0.9, nesterov=False, lr_batch=256, weight_decay=0.0, milestones=(), warmup=0,
    warmup_lr=0.0, min_lr=0.0, crop_scale=(0.08, 1.0), pad=0, randaug=0, erase=0.0, mixup=0.0, cutmix=0.0,
    smoothing=0.0,
)
# JCL, 4.2 [P]. CLIM, 4.1: rate and milestones [P], the rest as MoCo [I]. Weight decay, momentum, areas: MoCo's [C]
MOCO = dict(COMMON, epochs=100, batch_size=256, lr=30.0, milestones=(0.6, 0.8))
LINEAR = ("moco", "jcl", "clim", "jointcrop", "jointcrop-small", "patchmix")
RATES = (10.0 ** np.arange(-4.5, 1.51, 0.5)).tolist()  # the probe's grid: 13 rates from 0.00003 to 32
STRENGTHS = np.logspace(-6, 5, 45).tolist()  # L-BFGS's grid
RECIPES = {  # "mode" or "mode protocol", and what an encoder or a data set changes in it: "mode protocol trait"
    "probe": dict(epochs=50, batch_size=256, lrs=RATES, holdout=0.1),  # ours
    "lbfgs": dict(  # LoGo, supplement 3: L-BFGS, L2, 5000 iterations, metrics [P]; grid: BYOL's and SimCLR's [I]
        batch_size=256, strengths=STRENGTHS, holdout=0.1, metric="top1", iterations=5000, tolerance=1e-6,
    ),
    "linear moco": MOCO,
    "linear jcl": MOCO,
    "linear jcl imagenet100": dict(lr=10.0),  # App. D [P]
    "linear clim": MOCO,
    "linear jointcrop": dict(COMMON, epochs=90, batch_size=1024, lr=0.1),  # MoCo v3's [C]
    "linear jointcrop vit": dict(lr=3.0),  # MoCo v3's [C]
    "linear jointcrop-small": dict(  # CIFAR, STL-10, Tiny-ImageNet: ContrastiveCrop's released code's [I]
        COMMON, epochs=100, batch_size=512, lr=10.0, lr_batch=512, milestones=(0.6, 0.8),
    ),
    # 4.1.3: 100 epochs [P]; the rest [C]. Other encoders than ViT-T, -S, -B have the rate of S, vit_micro that of T [I]
    "linear patchmix": dict(COMMON, epochs=100, batch_size=1024, lr=0.02, nesterov=True),
    "linear patchmix vit_tiny": dict(lr=0.05),
    "linear patchmix vit_base": dict(lr=0.01),
    "linear patchmix cifar10": dict(batch_size=256),
    "linear patchmix cifar100": dict(batch_size=256),
    # 4.1.3: 100 epochs [P]; the rest [C], with the rates of timm's scheduler, which is called after each epoch
    "finetune patchmix": dict(
        COMMON, optimizer="adamw", epochs=100, batch_size=1024, lr=5e-4, head_lr=None, weight_decay=0.05,
        layer_decay=0.75, warmup=10, warmup_lr=1e-6, min_lr=1e-5, drop_path=0.1, randaug=9, erase=0.25,
        mixup=0.8, cutmix=1.0, smoothing=0.1,
    ),
    "finetune patchmix vit_tiny": dict(lr=1e-3),
    "finetune patchmix cifar10": dict(batch_size=256, pad=4),
    "finetune patchmix cifar100": dict(batch_size=256, pad=4),
    "finetune clim": dict(  # 4.2 [P]; batch, weight decay and areas of crops [I]
        COMMON, epochs=60, batch_size=256, lr=1e-4, head_lr=10.0, milestones=(1 / 3, 2 / 3), layer_decay=1.0,
        drop_path=0.0,
    ),
}
# fmt: on
VALUES = tuple(dict.fromkeys(name for recipe in RECIPES.values() for name in recipe))  # each one is a flag

# Random streams, see common.generator: what draws, and the numbers that keep the draws apart. They never change.
STREAM_STEP, STREAM_HOLDOUT, STREAM_PROBE, STREAM_LABELS = 0, 2, 3, 4
STREAM_CLASSES, STREAM_RANDAUG, STREAM_ERASE = 5, 6, 7


def parse_args(argv=None):
    """Return the command line as a namespace. Exits with an error message on a mistake.

    argv: a list of words; sys.argv's if None. Values of a recipe that are not given are None until `resolve`. Added is
    `mode`: probe, lbfgs, linear or finetune; and `changes`, the typed values as the name of a run's folder has them.
    """
    number = common.number
    positive, share = number(float, 1e-9), number(float, 1e-9, 1)
    parser = common.evaluation_parser("eval_linear.py", __doc__)
    group = parser.add_argument_group("protocol")
    add = group.add_argument
    add("--protocol", choices=("probe", *LINEAR), help="default: probe; for which table: see the file's first lines")
    add("--finetune", action="store_true", help="train all layers; --protocol is patchmix (ViTs) or clim (others)")
    add("--solver", choices=("sgd", "lbfgs"), help="lbfgs: logistic regression on features that are computed once")
    add = group.add_mutually_exclusive_group().add_argument
    add("--label-fraction", type=share, help="train on this share of the labels, alike per class")
    add("--label-files", metavar="LIST", help="train on these files: one per line, base name or path in train/")
    add = parser.add_argument_group("probe and L-BFGS").add_argument
    add("--lrs", type=positive, nargs="+", help="the probe's grid of rates (13 from 0.00003 to 32)")
    add("--strengths", type=positive, nargs="+", help="L-BFGS: grid of L2 penalties (45 from 1e-6 to 1e5)")
    add("--holdout", type=number(float, 0.001, 0.999), help="share that chooses the rate or the strength (0.1)")
    add("--metric", choices=("top1", "per_class"), help="L-BFGS: the score that chooses (top1)")
    add("--iterations", type=number(int, 1), help="L-BFGS: most iterations for each strength (5000)")
    add("--tolerance", type=positive, help="L-BFGS: largest entry of the final whitened gradient (1e-6)")
    add = parser.add_argument_group("schedule").add_argument
    add("--epochs", type=number(int, 1), help="epochs of the whole training")
    add("--batch-size", type=number(int, 2), help="images per step, or encoded at once, over all processes")
    add("--lr", type=positive, help="learning rate at batch size --lr-batch; scaled linearly with --batch-size")
    add("--lr-batch", type=number(int, 1), help="batch size for which --lr is given")
    add("--milestones", type=share, nargs="*", help="shares of the run where the rate falls by 10")
    add("--min-lr", type=number(float, 0), help="learning rate with which the cosine ends")
    add("--warmup", type=number(float, 0), help="epochs of linear warm-up; not given, it shrinks with --epochs")
    add("--warmup-lr", type=number(float, 0), help="learning rate with which the warm-up begins")
    add("--optimizer", choices=("sgd", "adamw"))
    add("--momentum", type=number(float, 0, 1), help="momentum of SGD")
    add("--nesterov", action=argparse.BooleanOptionalAction, help="Nesterov's form of that momentum")
    add("--weight-decay", type=number(float, 0), help="weight decay of the optimizer")
    add = parser.add_argument_group("fine-tuning").add_argument
    add("--head-lr", type=positive, help="learning rate of the new classifier at --lr-batch")
    add("--layer-decay", type=share, help="each layer's rate is this times that of the layer above it")
    add("--drop-path", type=number(float, 0, 0.99), help="probability of stochastic depth in the last block")
    add = parser.add_argument_group("augmentation").add_argument
    add("--crop-scale", type=share, nargs=2, metavar=("LO", "HI"), help="smallest and largest share of a crop's area")
    add("--pad", type=number(int, 0), help="crops are places of the image, padded by this many pixels; 0: --crop-scale")
    add("--randaug", type=number(int, 0, 10), help="magnitude of RandAugment (rand-mN-mstd0.5-inc1); 0: none")
    add("--erase", type=number(float, 0, 1), help="probability of random erasing")
    add("--mixup", type=number(float, 0), help="alpha of mixup; 0: none")
    add("--cutmix", type=number(float, 0), help="alpha of CutMix; 0: none")
    add("--smoothing", type=number(float, 0, 0.99), help="smoothing of the labels")
    add = parser.add_argument_group("a training's folder").add_argument
    add("--out", metavar="DIR", help="default: runs/PROTOCOL-DATASET-RUN...; the same command goes on from it")
    add("--max-steps", type=number(int, 1), metavar="N", help="save and stop when the run has made N steps in all")
    add("--eval-every", type=number(int, 0), default=0, metavar="N", help="epochs between judgements; 0: the last only")
    args, typed = common.parse(parser, argv)

    cached = "lbfgs" if args.solver == "lbfgs" else "probe"
    args.mode = "finetune" if args.finetune else "linear" if args.protocol in LINEAR else cached
    if args.solver == "lbfgs" and args.mode != "lbfgs":
        common.fail("--solver lbfgs is for features that are computed once: leave out --finetune and --protocol")
    if args.finetune and args.protocol not in (None, "patchmix", "clim"):
        common.fail(f"--finetune goes with --protocol patchmix or clim, not {args.protocol}")
    in_name = {*VALUES, "data_dir", "encoder", "random_init", "label_fraction", "label_files"}
    args.changes = common.describe_changes(args, in_name & typed)
    return args


def resolve(args, info):
    """Fill in from the recipe what the command line left open, for this encoder and data set.

    Exits with an error message if a value was given that this evaluation does not have, or that would be wrong.
    """
    name = re.sub("^deit3?_", "vit_", info["timm_name"] or "own")
    vit, chosen = name.startswith("vit_"), args.mode
    if args.mode in ("linear", "finetune"):
        args.protocol = args.protocol or ("patchmix" if vit else "clim")
        chosen = f"{args.mode} {args.protocol}"
    recipe = dict(RECIPES[chosen])
    for trait in ("vit" if vit else "", "_".join(name.split("_")[:2]), args.dataset):
        recipe |= RECIPES.get(f"{chosen} {trait}", {})
    if name == "own" and args.mode == "finetune":  # nothing is known of its layers
        recipe["layer_decay"] = 1.0
        del recipe["drop_path"]
    if info["image_size"] > 32 and "pad" in recipe:
        recipe["pad"] = 0
    if "warmup" in recipe:  # a short run warms up in proportion
        recipe["warmup"] *= min(1, (args.epochs or recipe["epochs"]) / recipe["epochs"])
    for value in VALUES:
        if getattr(args, value) is None:
            setattr(args, value, recipe.get(value))
        elif value not in recipe:
            evaluation = f"this evaluation, {chosen} of {name}, which has {', '.join(map(common.option, recipe))}"
            common.fail(f"{common.option(value)} is no value of {evaluation}")
    if args.mode in ("probe", "lbfgs"):
        return
    if args.head_lr and args.layer_decay < 1:
        given = f"--layer-decay {args.layer_decay:g} and --head-lr {args.head_lr:g}, which {chosen} has"
        common.fail(f"{given}, do not go together: give --layer-decay 1, or another --protocol")
    common.check_schedule(args)
    each = args.batch_size // common.rank_and_world()[1]
    if args.mixup + args.cutmix > 0 and each % 2:
        common.fail(f"--batch-size {args.batch_size}: mixup needs an even number of images per process, not {each}")


# =================================================================== 2. labels


def read_labels(train, test, info, device, workers):
    """Return the images that have labels, (train, test), with labels that are places in their `classes`.

    The items of a user's own Datasets are read once for it. Their classes are the labels that occur in either.
    """
    if not train.reads_labels:
        return train, test
    pool, options = nn.AvgPool2d(info["image_size"]), dict(workers=workers, what="labels")
    found = [common.extract_features(pool, x, info, device, **options)[1].numpy() for x in (train, test)]
    classes, names = np.setdiff1d(np.concatenate(found), [-1]), dict(enumerate(train.classes or test.classes))
    common.check_labels(*map(torch.from_numpy, found))
    parts = []
    for images, labels in zip((train, test), found, strict=True):
        rows = np.flatnonzero(labels != -1)
        part = images.subset(rows)
        part.labels, part.classes = np.searchsorted(classes, labels[rows]), [str(names.get(c, c)) for c in classes]
        parts.append(part)
    return parts


def balanced_share(labels, fraction, seed):
    """Return the sorted rows (m,) of a share of the labels (n,), which the seed fixes.

    Each class has as many as any other, or one more; at least one, and at most all. The rows of a smaller share are
    among those of a larger one.
    """
    classes, labels = np.unique(labels, return_inverse=True)
    order = torch.randperm(len(labels), generator=common.generator(seed, STREAM_LABELS)).numpy()
    turns = torch.randperm(len(classes), generator=common.generator(seed, STREAM_CLASSES)).tolist()
    each, more = divmod(max(round(fraction * len(labels)), len(classes)), len(classes))
    rows = [order[labels[order] == c][: each + (turn < more)] for c, turn in enumerate(turns)]
    return np.sort(np.concatenate(rows))


def listed_files(images, root, file):
    """Return the sorted rows of the files that a list names, one per line.

    A line is a base name, as in SimCLR's splits, or a path relative to `root`. Exits with an error message if a line is
    not the name of exactly one file.
    """
    if images.paths is None:
        common.fail("--label-files needs images in files: --data-dir with train/, one folder per class")
    rows = {}
    for i in range(len(images)):
        for name in {os.path.basename(images.path(i)), os.path.relpath(images.path(i), root)}:
            rows.setdefault(name, []).append(i)
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()  # Windows may begin it with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        common.fail(f"--label-files {file} cannot be read: {' '.join(str(error).split())}")
    names = {line.strip() for line in lines} - {""}
    odd = sorted(ascii(name) for name in names if len(rows.get(name, ())) != 1)
    if odd or not names:
        common.fail(f"--label-files {file}: not the name of one file in {root}: {', '.join(odd[:5]) or 'nothing'}")
    return np.unique([rows[name][0] for name in names])


def choose_labels(args, train):
    """Return the training images whose labels may be used, as --label-fraction or --label-files says."""
    if args.label_files:
        rows = listed_files(train, Path(args.data_dir or "data") / "train", args.label_files)
    elif (args.label_fraction or 1) < 1:
        rows = balanced_share(train.labels, args.label_fraction, args.seed)
    else:
        return train
    chosen = train.subset(rows)
    counts = np.bincount(chosen.labels, minlength=len(train.classes))
    if (counts > 0).sum() < 2:
        common.fail(f"--label-files {args.label_files} has images of fewer than two classes")
    common.say(f"labels: {len(chosen)} of {len(train)} training images, {counts.min()} to {counts.max()} per class")
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
    right = ranked[:, 0].double()
    per_class = torch.stack([right[labels == c].mean() for c in labels.unique()])
    top5 = {"linear_top5": 100 * ranked.any(1).double().mean().item()} if num_classes > 5 else {}
    return {"linear_top1": 100 * right.mean().item(), **top5, "linear_per_class": 100 * per_class.mean().item()}


# ================================================== 4. linear probe and L-BFGS


@torch.no_grad()
@common.exact_products()
def linear_probe(x, y, test_x, num_classes, seed=0, epochs=50, batch_size=256, lrs=None, holdout=0.1):
    """Train a linear classifier on cached features, by SGD with momentum 0.9 and a cosine, with many rates at once.

    x: (n, d) and test_x: (m, d), features, which are standardised by the mean and deviation of x. y: (n,) int64.
    lrs: the grid; RATES if None. holdout: the share of x that chooses the rate. Returns what `fit_and_choose` does.
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

    return fit_and_choose(fit, x, y, test_x, *hold_out(len(x), holdout, seed), num_classes, sorted(set(lrs or RATES)))


def logistic_regression(x, y, num_classes, strength, start=None, iterations=5000, tolerance=1e-6, what="one fit"):
    """Fit a multinomial logistic regression with an L2 penalty, by L-BFGS.

    Returns (weights (d + 1, num_classes), largest entry of the gradient). The weights are W and, as their last row, the
    bias b. They minimise sum_i CE(x_i W + b, y_i) + strength / 2 |W|^2. It has converged if the largest entry of the
    gradient of that, divided by n, is at most `tolerance`.
    x: (n, d) float64. y: (n,) int64. strength: 1 / C of scikit-learn. start: weights to begin from. what: what the
    progress line calls it.

    L-BFGS works on V with W = P V, where P whitens the features as far as the penalty lets it. The minimum is the same.
    But a few strong directions no longer take thousands of iterations where tens are enough.
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
def lbfgs_probe(x, y, test_x, rest, check, num_classes, strengths=None, metric="top1", iterations=5000, tolerance=1e-6):
    """Fit cached features by logistic regression, with a grid of strengths of its L2 penalty.

    x: (n, d) and test_x: (m, d), features. strengths: the grid; STRENGTHS if None. The other arguments, and what is
    returned, are those of `fit_and_choose`.
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
                common.say(f"warning: {what}, has not converged in {iterations} iterations: gradient {left:.1e}")
            weights.append(weight)
        return weights

    grid = sorted(set(strengths or STRENGTHS), reverse=True)
    return fit_and_choose(fit, x, y, test_x, rest, check, num_classes, grid, metric)


# ====================================== 5. on cached features: what is judged


def evaluate_cached(args, device, encoder, info, train, test):
    """Fit the probe or L-BFGS on features that are computed once. Return {encoder or floor: scores}."""
    validation, root = None, Path(args.data_dir or "")
    both = args.data_dir and all((root / part).is_dir() for part in ("train", "val", "test"))
    if args.mode == "lbfgs" and both and common.class_folders(root / "test"):  # ImageNet's test/ has no labels
        validation, test = test, common.read_folder(args.dataset, root, "test")
        common.say(f"val/ and test/ are both there: val/ chooses, test/ with its {len(test)} images is judged")
    parts = [train, test] if validation is None else [train, validation, test]
    labels = [torch.from_numpy(part.labels) for part in parts]
    train_y, test_y, classes = torch.cat(labels[:-1]).to(device), labels[-1], len(train.classes)
    rest, check = hold_out(len(train), args.holdout, args.seed)
    if validation is not None:
        rest, check = torch.arange(len(train_y)).split([len(train), len(validation)])
    value, flag, grid, score = "rate", "--lrs", args.lrs, "top1"
    if args.mode == "lbfgs":
        value, flag, grid, score = "strength", "--strengths", args.strengths, args.metric
    few = f"; so few that the choice is a guess: give one with {flag}" if len(check) < 30 and len(grid) > 1 else ""
    common.say(f"{len(check)} images choose the {value} by {score}; all {len(train_y)} are fitted{few}")
    results = {}
    for name, network in {"encoder": encoder, **common.floor_encoders(args, info, device, len(train))}.items():
        if name == "raw pixels" and args.mode == "lbfgs" and len(train) > 10_000:
            continue  # 3,072 numbers per image take hours
        if common.rank_and_world()[1] > 1 and len(train_y) * common.output_width(network, info["image_size"]) > 2**30:
            common.fail(f"{len(train_y)} images' features are over 2**30 numbers for each process: start one")
        options = dict(batch_size=args.batch_size, workers=args.workers, amp=args.amp == "bf16")
        options["what"] = f"features of {name}"
        *x, test_x = [common.extract_features(network, part, info, device, **options)[0].to(device) for part in parts]
        x = torch.cat(x)
        if args.mode == "probe":
            options = dict(lrs=args.lrs, holdout=args.holdout)
            found = linear_probe(x, train_y, test_x, classes, args.seed, args.epochs, **options)
        else:
            options = args.strengths, args.metric, args.iterations, args.tolerance
            found = lbfgs_probe(x, train_y, test_x, rest, check, classes, *options)
        results[name] = scores(found["logits"].cpu(), test_y, classes)
        chosen, percents = found["chosen"], [*found["held_out"].values()]
        held_out = f"{value} {chosen:.3g}, {max(percents):.2f} % held out"
        common.say(f"{name:>10}  {show('linear', results[name])}  ({held_out})")
        at_edge = chosen in (min(grid), max(grid)) and percents.count(max(percents)) == 1 < len(grid)
        if name == "encoder" and at_edge and not few:
            limits = f"{min(grid):.3g} to {max(grid):.3g}"
            common.say(f"warning: the best {value} is at the edge of the grid, {limits}: widen {flag}")
    return results


def show(start, record):
    """Return the scores of a record, in percent, as a line of text: those whose names start so."""
    return "  ".join(f"{name} {value:.2f} %" for name, value in record.items() if name.startswith(start))


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
            array = np.pad(images.array[images.rows], ((0, 0), (pad, pad), (pad, pad), (0, 0)))
            images = common.ImageSet(images.name, images.labels, images.classes, array)
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
        if not isinstance(head, nn.Linear):
            common.fail(f"--finetune needs an encoder with one linear classifier, which {info['timm_name']} has not")
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    if common.rank_and_world()[1] > 1:
        network = convert_sync_batchnorm(network)  # timm's: torch's would drop the activation in a BatchNormAct2d
    return network.to(device), head


def make_optimizer(args, network, head):
    """Return SGD or AdamW. The schedule's rate is multiplied by each group's `lr_scale`.

    lr_scale is a power of --layer-decay, or --head-lr / --lr for the head.
    """
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


def peak_rate(args):
    """Return the learning rate after the warm-up: --lr, scaled linearly with the batch size."""
    return args.lr * args.batch_size / args.lr_batch


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
        return args.warmup_lr + (peak_rate(args) - args.warmup_lr) * epoch / args.warmup
    if args.milestones:
        return peak_rate(args) * 0.1 ** sum(epoch / args.epochs >= m for m in args.milestones)
    turn = math.pi * (epoch - cosine_begins) / (args.epochs - cosine_begins)
    return args.min_lr + (peak_rate(args) - args.min_lr) * (1 + math.cos(turn)) / 2


def fingerprint(module):
    """Return a hash of all weights and statistics, bit for bit."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ======================================= 7. the papers' protocols: the training


def name_run(args, encoder):
    """Fill in args.weights, a checksum of the encoder, and args.out. A run goes on only where both are the same."""
    source = "own"
    if args.checkpoint:
        args.checkpoint = os.path.abspath(args.checkpoint)
        source = common.run_folder(args.checkpoint).resolve().name
        if args.arch:  # a file of others
            source = "-".join([Path(args.checkpoint).stem, args.arch, *([args.prefix] if args.prefix else [])])
    args.weights = fingerprint(encoder)
    args.out = args.out or f"runs/{args.mode}-{args.protocol}-{args.dataset}-{source}-s{args.seed}{args.changes}"


def restore(args, images, network, optimizer):
    """Return (steps made, records of the epochs) of last.pt in --out, whose state network and optimizer take over.

    A new run has (0, []). Exits with an error message if something does not fit.
    """
    path, state = common.load_run(args, images)
    if state["step"] > 0:
        try:
            network.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            common.fail(f"{path} does not fit this evaluation: {type(error).__name__} {str(error)[:300]}")
    return state["step"], state["records"]


def save(args, step, records, images, network, optimizer):
    """Write last.pt, the whole state of the run, and then what is made of it: each file whole, or not at all.

    All is written each time, which mends what a kill has left out. Values that are not finite are never saved.
    """
    if common.rank_and_world()[0] != 0:
        return
    out, state = Path(args.out), dict(step=step, records=records, config=vars(args), images=images)
    state |= dict(model=network.state_dict(), optimizer=optimizer.state_dict())
    common.write_file(out / "last.pt", state)
    common.write_file(out / "config.json", json.dumps(vars(args) | common.versions(args.device) | {"images": images}))
    common.write_file(out / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))


def means(args, loader, history):
    """Return the means of metrics over the steps and processes, and how fast the steps were: {name: float}.

    history: {name: 0-d tensor} of each step. An epoch that was interrupted has those of the steps since then.
    """
    sums = sum(torch.stack([*metrics.values()]).double() for metrics in history)
    values = (common.gather_uneven(sums[None]).mean(0) / len(history)).tolist()
    seconds = time.perf_counter() - loader.began
    speed = dict(images_per_s=args.batch_size * len(history) / seconds, data_wait=loader.waited / seconds)
    return dict(zip(history[0], values, strict=True)) | speed


def is_due(args, step, records):
    """Return True if an epoch ends at this step that is to be judged, and is not judged yet."""
    if not records or records[-1]["step"] != step or f"{args.mode}_top1" in records[-1]:
        return False
    epoch = records[-1]["epoch"]
    return epoch == args.epochs or args.eval_every > 0 and epoch % args.eval_every == 0


def judge(args, device, encoder, network, info, test):
    """Return the scores of the test images, in percent: {"linear_top1": ..., ...}, or {"finetune_top1": ..., ...}.

    encoder: what makes the features. network: the classifier on them or, for a fine-tuning, encoder and classifier.
    """
    options = dict(workers=args.workers, amp=args.amp == "bf16", what="judging the test set")
    options["batch_size"] = args.batch_size // common.rank_and_world()[1]
    judged = encoder if args.mode == "linear" else network
    logits, _ = common.extract_features(judged, test, info, device, **options)
    if args.mode == "linear":  # these are the features
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
    if len(train) < args.batch_size:
        common.fail(f"{len(train)} images are fewer than one batch: give --batch-size {len(train)} or less")
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
    network.train()
    if device.type == "cpu" and any(isinstance(module, nn.SyncBatchNorm) for module in network.modules()):
        common.fail("--finetune with batch norm in several processes needs GPUs: start one process")
    unused = not frozen and info["timm_name"] is None  # an own encoder may leave some parameters unused
    ddp = DistributedDataParallel(network, find_unused_parameters=unused) if dist.is_initialized() else network
    optimizer = make_optimizer(args, network, head)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16")
    mixup = None
    if args.mixup or args.cutmix:
        mixup = Mixup(args.mixup, args.cutmix, label_smoothing=args.smoothing, num_classes=classes)

    # The run's folder. The run continues from its last.pt, if there is one. The lock keeps other runs out
    lock = common.claim_folder(args.out)
    step, records = restore(args, images, network, optimizer)
    save(args, step, records, images, network, optimizer)

    # What the numbers depend on
    millions, world = sum(p.numel() for p in network.parameters()) / 1e6, common.rank_and_world()[1]
    what = "a linear classifier; the encoder is frozen, in evaluation mode" if frozen else "all layers"
    values = {name: getattr(args, name) for name in VALUES if getattr(args, name) is not None}
    common.say(f"{what} ({millions:.3f} M parameters trained); the score is that of the last epoch")
    common.say(", ".join(f"{name} {common.shown(value)}" for name, value in values.items()))
    common.say(f"rate {args.lr:g} at batch {args.lr_batch}, scaled linearly to {peak_rate(args):g}")
    common.say(f"{len(train)} images, {steps_per_epoch} steps per epoch; {world} process(es); folder {args.out}")

    while True:
        # Judge the epoch that has just ended, if it is due. After a restart it is the one whose judging was cut short
        if is_due(args, step, records):
            records[-1] |= judge(args, device, encoder, network, info, test)
            save(args, step, records, images, network, optimizer)
        if records and records[-1]["step"] == step:
            common.tell(args, records[-1])
        if step >= last_step:
            break
        # Train the next epoch, or what is left of it, and save
        epoch, history = step // steps_per_epoch, []
        with common.signals_noted() as stopped:  # SIGTERM and Ctrl-C wait until the step at hand is made and saved
            try:
                loader.batch_sampler.set_epoch(epoch, step, last_step)
                for batch in loader:
                    if stopped():  # after a signal no further step is made
                        break
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
                    if step % 10 == 0:
                        common.show_progress(args, loader, history, step, total_steps)
            except common.BadImage:
                stopped(True)  # all processes leave the loop, and save the steps that were made
                save(args, step, records, images, network, optimizer)
                raise
            if history and step % steps_per_epoch == 0:
                records.append(dict(epoch=epoch + 1, step=step, **means(args, loader, history), lr=lr))
            save(args, step, records, images, network, optimizer)
        if stopped():
            common.say("stopped on request (exit status 75); everything is saved, and the same command goes on")
            raise SystemExit(75)

    lock.close()
    del ddp  # before the process group ends: in torch 2.11 a DDP that is deleted after it can hang for ever
    if step < total_steps:
        common.say(f"stopped at step {step} of {total_steps}: give a larger --max-steps, or none, to go on")
        return {}
    result = {name: value for name, value in records[-1].items() if name.startswith(args.mode)}
    common.say(f"{'encoder':>10}  {show(args.mode, result)}  (epoch {args.epochs}, the last)")
    return {"encoder": result}


@common.own_generators()
def main(args, encoder=None, train=None, test=None):
    """Judge an encoder as args say. Return {"encoder" or a floor: {"linear_top1": percent, ...}}.

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of timm's.
    train, test: map-style Datasets of images and labels to use instead of --dataset.
    """
    own_group, args = not dist.is_initialized(), copy.copy(args)  # a caller's process group stays
    device, encoder, info = common.open_encoder(args, encoder)
    train, test = common.open_data(args, info, train, test)
    resolve(args, info)
    train, test = read_labels(train, test, info, device, args.workers)
    common.say(common.protocol(args, info, train, test))
    train = choose_labels(args, train)
    if args.mode in ("probe", "lbfgs"):
        results = evaluate_cached(args, device, encoder, info, train, test)
    else:
        results = train_protocol(args, device, encoder, info, train, test)
    if own_group and dist.is_initialized():
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    common.start(main, parse_args)
