"""Evaluate an encoder with labels: by a linear classifier on its frozen features, or by fine-tuning all its layers.

The default is `--protocol probe`. It computes the features once, standardises them, and trains a linear classifier on
them for a grid of learning rates at once, in seconds. The learning rate is chosen on a tenth of the training set. The
test set is used once. The same number is printed for two baselines: raw pixels, and the same encoder untrained.

    python eval_linear.py runs/patchmix-patterns-vit_micro-s0
    python eval_linear.py RUN --dataset cifar100 --data-dir DIR                # transfer
    python eval_linear.py RUN --solver lbfgs                                   # transfer as in LoGo's Table 5
    torchrun --nproc_per_node=8 eval_linear.py RUN --data-dir DIR --protocol moco
    python eval_linear.py RUN --finetune --label-fraction 0.01
    python eval_linear.py FILE --arch resnet50 --dataset imagenet --data-dir DIR   # a checkpoint of others

The papers' own protocols train on random crops of the images, on any number of processes. The same command goes on
after the last whole epoch. The score is that of the last epoch, never of the best one.
    --protocol moco              MoCo's. JointCrop's App. F and Table 11 (on MoCo v1)
    --protocol jointcrop         MoCo v3's. JointCrop's released code: MoCo v3 on ImageNet-1k
    --protocol jointcrop-small   ContrastiveCrop's. JointCrop on small images
    --protocol jcl               JCL's Table 1, and Fig. 2 with --dataset imagenet100
    --protocol clim              CLIM's Tables 1, 6 to 9 and 11. Table 2: --finetune --protocol clim --label-files LIST
    --protocol patchmix          PatchMix's Tables 2, 3 and 5 to 7, "Linear". "Finetune": with --finetune
    --solver lbfgs               LoGo's Table 5; for Pets, Flowers, Caltech101 and Aircraft with --metric per_class
`--finetune` trains all layers, by PatchMix's recipe (ViTs) or CLIM's (others). Every value of a recipe is a flag.
Your own encoder and images: eval_linear.main(args, encoder=MODULE, train=common.ImageSet(...), test=...).

Departures from the papers:
    D1 An epoch is whole batches. The images over are left out of it.
    D2 Mixup and CutMix pair the images of one process, and each process draws for drop-path. So a fine-tuning with them
       depends on the number of processes; so does one with batch norm on CPUs. Nothing else does, but for rounding.
    D3 Images are resized by the interpolation that the encoder was trained with; for a checkpoint of others it is
       bilinear, or what timm knows of it. LoGo does not give its linear protocol. PatchMix's released one resizes
       CIFAR's images to 36 px and cuts their middle, and reports the best epoch on the test set. Here: neither.
    D4 Precision. The encoder computes in bf16 on GPUs that have it (`--amp off`: in float32, convolutions in TF32). The
       probe is fitted in float32, and L-BFGS works in float64.
    D5 PatchMix's protocols in fewer than 100 epochs. Released: the learning rate changes once per epoch, an epoch late,
       so that a fine-tuning of two epochs has the warm-up's first one. Here: 100 changes, however short the run is.
    D6 A warm-up takes at most a quarter of the run.
"""

import argparse
import hashlib
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

# [P]: printed in the paper. [C]: from its released code, or that of the base that it names. [I]: our inference, where
# both are silent.
# fmt: off
SHARE, POSITIVE = (1e-9, 1.0), (1e-9, math.inf)
# {group: {name: (value, what it is, its limits or words)}}: each is a flag of its value's type, for example --lr 3
VALUES = {
    "training": dict(  # JCL, 4.2 [P]. CLIM, 4.1: learning rate and milestones [P], the rest as MoCo [I]
        epochs=(100, "epochs of the whole training", (1, math.inf)),
        batch_size=(256, "images per step, or encoded at once, over all processes", (2, math.inf)),
        lr=(30.0, "learning rate at batch size --lr-batch; scaled linearly with --batch-size", POSITIVE),
        lr_batch=(256, "batch size for which --lr is given", (1, math.inf)),
        milestones=([], "shares of the run where the learning rate falls by 10; none: it falls by a cosine", SHARE),
        min_lr=(0.0, "learning rate with which the cosine ends, at any batch size"),
        warmup=(0.0, "epochs of linear warm-up, at most a quarter of the run"),
        warmup_lr=(0.0, "learning rate with which the warm-up begins, at any batch size"),
        optimizer=("sgd", "how the weights are updated", ("sgd", "adamw")),
        momentum=(0.9, "momentum of SGD", (0.0, 1.0)),  # MoCo's [C], as the weight decay and the areas of crops
        nesterov=(False, "Nesterov's form of that momentum"),
        weight_decay=(0.0, "weight decay of the optimizer"),
        crop_scale=((0.08, 1.0), "smallest and largest share of the image that a crop has", SHARE),
        pad=(0, "crops are places of the image, padded by this many pixels; 0: --crop-scale"),
        randaug=(0, "magnitude of RandAugment (rand-mN-mstd0.5-inc1); 0: none", (0, 10)),
        erase=(0.0, "probability of random erasing", (0.0, 1.0)),
        mixup=(0.0, "alpha of mixup; 0: none"),
        cutmix=(0.0, "alpha of CutMix; 0: none"),
        smoothing=(0.0, "smoothing of the labels", (0.0, 0.99)),
    ),
    "fine-tuning": dict(
        head_lr=(10.0, "learning rate of the new classifier at --lr-batch; 0: as the other layers"),
        layer_decay=(1.0, "each layer's learning rate is this times that of the layer above it", SHARE),
        drop_path=(0.0, "probability of stochastic depth in the last block", (0.0, 0.99)),
    ),
    "probe and L-BFGS": dict(  # LoGo, supplement 3: L-BFGS, L2, iterations, metrics [P]; its grid: BYOL's, SimCLR's [I]
        holdout=(0.1, "share that chooses the learning rate or the strength", (0.001, 0.999)),
        lrs=((10.0 ** np.arange(-4.5, 1.51, 0.5)).tolist(), "the probe's grid of learning rates", POSITIVE),
        strengths=(np.logspace(-6, 5, 45).tolist(), "L-BFGS: grid of L2 penalties", POSITIVE),
        metric=("top1", "L-BFGS: the score that chooses", ("top1", "per_class")),
        iterations=(5000, "L-BFGS: most iterations for each strength", (1, math.inf)),
        tolerance=(1e-6, "L-BFGS: largest entry of the final whitened gradient", POSITIVE),
    ),
}
COSINE, TUNED, CACHED = (common.defaults({group: rows}) for group, rows in VALUES.items())
MOCO = dict(COSINE, milestones=(0.6, 0.8))
LINEAR = {
    "moco": MOCO, "jcl": MOCO, "clim": MOCO,
    "jointcrop": dict(COSINE, epochs=90, batch_size=1024, lr=0.1),  # MoCo v3's [C]
    # CIFAR, STL-10, Tiny-ImageNet: ContrastiveCrop's released code's [I]
    "jointcrop-small": dict(MOCO, batch_size=512, lr=10.0, lr_batch=512),
    # 4.1.3: 100 epochs [P]; the rest [C]. Others than ViT-T, -S, -B have the learning rate of S, vit_micro of T [I]
    "patchmix": dict(COSINE, batch_size=1024, lr=0.02, nesterov=True),
}
FINETUNE = {
    # 4.2 [P]; batch, weight decay and areas of crops [I]
    "clim": dict(MOCO, **TUNED, epochs=60, lr=1e-4, milestones=(1 / 3, 2 / 3)),
    # 4.1.3: 100 epochs [P]; the rest [C], with timm's scheduler, which is called after each epoch
    "patchmix": dict(
        COSINE, optimizer="adamw", batch_size=1024, lr=5e-4, head_lr=0.0, weight_decay=0.05, layer_decay=0.75,
        warmup=10.0, warmup_lr=1e-6, min_lr=1e-5, drop_path=0.1, randaug=9, erase=0.25, mixup=0.8, cutmix=1.0,
        smoothing=0.1,
    ),
}
# fmt: on


def recipe(protocol, finetune, dataset, arch, image_size):
    """Return the values of an evaluation, {name: value}. arch: timm's name of the encoder, or custom."""
    arch, small = "_".join(arch.split("_")[:2]), dataset in ("cifar10", "cifar100")
    if protocol == "probe":  # ours
        return {name: CACHED[name] for name in ("lrs", "holdout")} | dict(epochs=50, batch_size=256)
    if protocol == "lbfgs":
        return {name: value for name, value in CACHED.items() if name != "lrs"} | dict(batch_size=256)
    values = dict((FINETUNE if finetune else LINEAR)[protocol])
    if protocol == "jcl" and dataset == "imagenet100":
        values |= dict(lr=10.0)  # App. D [P]
    if protocol == "jointcrop" and arch.startswith("vit_"):
        values |= dict(lr=3.0)  # MoCo v3's [C]
    if protocol == "patchmix":
        lr = dict(vit_tiny=1e-3) if finetune else dict(vit_tiny=0.05, vit_base=0.01)
        values |= dict(lr=lr.get(arch, values["lr"]), batch_size=256 if small else 1024)
        values |= dict(pad=4 if small and finetune and image_size <= 32 else 0)
    if arch == "custom" and finetune:  # nothing is known of its layers
        values |= dict(layer_decay=1.0)
        del values["drop_path"]
    return values


# Random streams, see common.generator: what draws, and the numbers that keep the draws apart. They never change.
STREAM_STEP, STREAM_HOLDOUT, STREAM_PROBE, STREAM_LABELS = 0, 2, 3, 4
STREAM_CLASSES, STREAM_RANDAUG, STREAM_ERASE = 5, 6, 7

FLAGS = {  # beside those of VALUES and common.EVALUATION
    "protocol": dict(
        protocol=(None, "default: probe; for which table: see the file's first lines", ("probe", *LINEAR)),
        finetune=(False, "train all layers; --protocol is patchmix (ViTs) or clim (others)"),
        solver=("sgd", "of the probe; lbfgs: logistic regression", ("sgd", "lbfgs")),
        label_fraction=(None, "train on this share of the labels, alike per class", SHARE),
        label_files=(None, "a list of files to train on: one per line, base name or path in train/"),
    ),
    "folder": common.FOLDER,
}


def parse_args(argv=None):
    """Return the command line, or a list of words, as a namespace. Until `complete`, None is for the recipe's value."""
    tables = common.EVALUATION | FLAGS | VALUES
    values = common.defaults(tables) | dict.fromkeys(common.defaults(VALUES))
    args = common.parse("eval_linear", __doc__, argv, tables, lambda _: values)
    if args.finetune and args.protocol not in (None, *FINETUNE):
        common.fail(f"--finetune goes with --protocol patchmix or clim, not {args.protocol}")
    if args.solver == "lbfgs" and (args.finetune or args.protocol not in (None, "probe")):
        common.fail("--solver lbfgs is for features that are computed once: leave out --finetune and --protocol")
    if args.label_files and args.label_fraction:
        common.fail("give --label-fraction or --label-files, not both")
    if () in (args.lrs, args.strengths):
        common.fail("--lrs and --strengths are grids: give one number at least")
    return args


def complete(args, info):
    """Return args with mode (probe, lbfgs, linear or finetune), --out, and the recipe's values where none were given.

    Exits with an error message if a value was given that this evaluation does not have, or that would be wrong.
    """
    arch = re.sub("^deit3?_", "vit_", info["timm_name"] or "custom")
    default = "probe" if not args.finetune else "patchmix" if arch.startswith("vit_") else "clim"
    protocol = "lbfgs" if args.solver == "lbfgs" else args.protocol or default
    mode = "finetune" if args.finetune else "linear" if protocol in LINEAR else protocol
    values = recipe(protocol, args.finetune, args.dataset, arch, info["image_size"])
    given = {name: value for name in common.defaults(VALUES) if (value := getattr(args, name)) is not None}
    if odd := sorted(given.keys() - values.keys()):
        common.fail(f"{common.option(odd[0])} has no effect here: {protocol} has {', '.join(values)}")
    args = argparse.Namespace(**vars(args) | values | given | dict(protocol=protocol, mode=mode))
    if mode in ("probe", "lbfgs"):
        return args
    source = common.run_folder(args.checkpoint).resolve().name if args.checkpoint else "custom"
    source = f"{Path(args.checkpoint).stem}-{args.arch}" if args.arch else source  # a file of others
    names = "prefix", "data_dir", "encoder", "random_init", "label_fraction", "label_files"
    given |= {name: value for name in names if (value := getattr(args, name))}
    changed = [f"{name}{os.path.basename(str(value))}" for name, value in sorted(given.items())]
    args.out = args.out or common.default_folder(mode, protocol, args.dataset, source, f"s{args.seed}", *changed)
    world, peak = common.rank_and_world()[1], args.lr * args.batch_size / args.lr_batch
    if args.finetune and args.head_lr and args.layer_decay < 1:
        common.fail("--head-lr and a --layer-decay below 1 do not go together: give --head-lr 0 or --layer-decay 1")
    if args.batch_size % world or args.batch_size < 2 * world:  # batch norm needs two
        common.fail(f"--batch-size {args.batch_size} cannot be shared out over {world} processes, two or more each")
    if args.mixup + args.cutmix > 0 and args.batch_size // world % 2:
        common.fail(f"--batch-size {args.batch_size}: mixup needs an even number of images on each process")
    if args.min_lr > peak:
        common.fail(f"--min-lr {args.min_lr:g} is above the learning rate's peak, {peak:g}")
    return args


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


# ========================== 3. on cached features: the choice, and what is evaluated


def hold_out(labels, share, seed):
    """Return (rows that are fitted, rows that choose) of labels (n,), in random order.

    Each class keeps a row that is fitted. At least one row chooses, unless no class has two.
    """
    order = torch.randperm(len(labels), generator=common.generator(seed, STREAM_HOLDOUT))
    _, kept = np.unique(labels[order].flip(0), return_index=True)  # the last of each class, counted from the end
    free = torch.ones(len(labels), dtype=torch.bool)
    free[len(labels) - 1 - kept] = False
    held = free & (free.cumsum(0) <= max(1, int(share * len(labels))))
    return order[~held], order[held]


def fit_and_choose(fit, x, y, test_x, rest, check, num_classes, grid, metric="top1"):
    """Fit linear classifiers by each value of a grid. The best one on held-out images is fitted again, on all images.

    fit: maps (rows, values, weights to begin from or None) to a list of weights (d, num_classes), one per value. x:
    (n, d) and test_x: (m, d), features with a last 1 for the bias. y: (n,) int64. rest, check: the rows that are
    fitted, and those that choose; if there are none, the fitted ones do. metric: the score that chooses, top1 or
    per_class. Of equals the middle one is taken.
    Returns {'logits': (m, num_classes), 'chosen': the value, 'held_out': {value: percent}}.
    """
    weights, held_out, choosing = fit(rest, grid, None), [], check if len(check) else rest
    for weight in weights:
        logits = torch.cat([(x[part] @ weight).cpu() for part in choosing.split(4096)])
        held_out.append(scores(logits, y[choosing].cpu(), num_classes)[f"linear_{metric}"])
    equals = [i for i, percent in enumerate(held_out) if percent == max(held_out)]
    best = equals[(len(equals) - 1) // 2]
    (weight,) = fit(torch.cat([check, rest]), [grid[best]], weights[best])
    return dict(logits=test_x @ weight, chosen=grid[best], held_out=dict(zip(grid, held_out, strict=True)))


def scores(logits, labels, num_classes, name="linear"):
    """Return the scores of logits (m, num_classes) against labels (m,), in percent, as a dict.

    linear_top1; linear_top5 if there are more than five classes; linear_per_class, the mean over the classes of each
    one's top-1. name: instead of "linear".
    """
    ranked = logits.topk(min(5, num_classes), dim=1).indices == labels[:, None]
    right, counts = ranked[:, 0].double(), labels.bincount()
    per_class = (labels.bincount(right) / counts)[counts > 0]
    top5 = {f"{name}_top5": 100 * ranked.any(1).double().mean().item()} if num_classes > 5 else {}
    return {f"{name}_top1": 100 * right.mean().item(), **top5, f"{name}_per_class": 100 * per_class.mean().item()}


def show(result):
    """Return scores, in percent, as a line of text."""
    return "  ".join(f"{name} {value:.2f} %" for name, value in result.items())


def evaluate_cached(args, device, encoder, info, train, test):
    """Fit the probe or L-BFGS on features that are computed once. Return {encoder or baseline: scores}.

    All processes compute features. The first one alone holds them all, and fits.
    """
    lbfgs, limited = args.mode == "lbfgs", args.label_fraction or args.label_files
    parts, root, classes = [train, test], Path(args.data_dir or ""), len(train.classes)
    if lbfgs and args.data_dir and all((root / part).is_dir() for part in ("train", "val", "test")):
        evaluated = common.read_folder(args.dataset, root, "test")
        if evaluated.classes:  # ImageNet's test/ has none
            common.check_labels(train, evaluated)
            parts = [train, evaluated] if limited else [train, test, evaluated]  # all of val/ would be more labels
            common.log(f"test/ is evaluated, {len(evaluated)} images; val/ {'is left out' if limited else 'chooses'}")
    labels = [torch.from_numpy(part.labels) for part in parts]
    y, test_y = torch.cat(labels[:-1]).to(device), labels[-1]
    rest, check = hold_out(labels[0], args.holdout, args.seed)
    if len(parts) == 3:
        rest, check = torch.arange(len(y)).split([len(train), len(test)])
    flag, grid = ("--strengths", args.strengths) if lbfgs else ("--lrs", args.lrs)
    many = len(check) or len(y)
    common.log(f"{many} images choose one of {flag} by {args.metric or 'top1'}; all {len(y)} are fitted")
    results, how = {}, dict(batch_size=args.batch_size, workers=args.workers, amp=args.amp == "bf16", whole=False)
    for name, network in {"encoder": encoder, **common.baseline_encoders(args, info, device, len(train))}.items():
        if name == "raw pixels" and lbfgs:
            continue  # thousands of numbers per image take minutes to hours
        how["what"] = f"features of {name}"
        x = [common.extract_features(network, part, info, device, **how) for part in parts]
        x = [common.gather_uneven(part, to_first=True) for part in x]
        if common.rank_and_world()[0] > 0:
            continue
        x, test_x = x[0] if len(x) == 2 else torch.cat(x[:-1]), x[-1].to(device)
        if lbfgs:
            options = args.strengths, args.metric, args.iterations, args.tolerance
            found = lbfgs_probe(x.to(device), y, test_x, rest, check, classes, *options)
        else:
            options = dict(epochs=args.epochs, lrs=args.lrs, holdout=args.holdout)
            found = linear_probe(x.to(device), y, test_x, classes, args.seed, **options)
        results[name] = scores(found["logits"].cpu(), test_y, classes)
        chosen, percent = found["chosen"], max(found["held_out"].values())
        common.log(f"{name:>10}  {show(results[name])}  ({flag} {chosen:.3g}, {percent:.2f} % held out)")
        if name == "encoder" and len(grid) > 1 and chosen in (min(grid), max(grid)):
            common.log(f"warning: the best of {flag} is at the edge of its grid: widen it")
    return common.from_all(results)[0]


# ================================================== 4. linear probe and L-BFGS


def affine(x, mean, scale):
    """Return (x - mean) / scale of features (n, d), with a last 1 for the bias: (n, d + 1). It is copied only once."""
    x = F.pad(x.to(mean.dtype), (0, 1), value=1.0)
    x[:, :-1].sub_(mean).div_(scale)
    return x


@torch.no_grad()
def linear_probe(x, y, test_x, num_classes, seed=0, epochs=50, batch_size=256, lrs=CACHED["lrs"], holdout=0.1):
    """Train a linear classifier on cached features, by SGD with momentum 0.9, for many learning rates at once.

    x: (n, d) and test_x: (m, d), features, which are standardised by the mean and deviation of x; one that never varies
    in x, but for rounding, becomes 0. y: (n,) int64. lrs: the grid; each falls by a cosine. holdout: the share of x
    that chooses the learning rate. Returns what `fit_and_choose` does.
    """
    mean, std = x.mean(0), x.std(0, correction=0)
    std = std.masked_fill(std <= 1e-6 * mean.abs(), math.inf)
    x, test_x = affine(x, mean, std), affine(test_x, mean, std)

    def fit(rows, lrs, _):
        weight = x.new_zeros(x.shape[1], len(lrs), num_classes)
        velocity, lr = torch.zeros_like(weight), weight.new_tensor(lrs)[:, None]
        what = f"{len(lrs)} learning rates" if len(rows) < len(x) else "the best learning rate"
        for epoch in range(epochs):
            common.progress(f"probe: {what}, epoch {epoch + 1} of {epochs}")
            shuffled = torch.randperm(len(rows), generator=common.generator(seed, STREAM_PROBE, epoch))
            batches = rows[shuffled].split(batch_size)
            for i, batch in enumerate(batches):
                inputs = x[batch]
                decay = 0.5 * (1 + math.cos(math.pi * (epoch + i / len(batches)) / epochs))
                # One product for all learning rates: (n, d) and (d, lrs, classes) -> (n, lrs, classes)
                error = (inputs @ weight.flatten(1)).view(len(batch), *weight.shape[1:]).softmax(-1)
                error[torch.arange(len(batch)), :, y[batch]] -= 1  # the gradient of cross-entropy
                velocity = 0.9 * velocity + (inputs.T @ error.flatten(1)).view_as(weight) / len(batch)
                weight = weight - decay * lr * velocity
        return list(weight.unbind(1))

    return fit_and_choose(fit, x, y, test_x, *hold_out(y.cpu(), holdout, seed), num_classes, sorted(set(lrs)))


def logistic_regression(x, y, num_classes, strength, start=None, iterations=5000, tolerance=1e-6):
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

    def closure():
        optimizer.zero_grad()
        penalty = decay / 2 * (scale * weight[:-1]).square().sum()
        loss = F.cross_entropy(torch.addmm(weight[-1], white, weight[:-1]), y) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    closure()
    v = weight.detach()
    return torch.cat([basis @ (scale * v[:-1]), v[-1:]]), weight.grad.abs().max().item()


def lbfgs_probe(x, y, test_x, rest, check, num_classes, strengths, metric="top1", iterations=5000, tolerance=1e-6):
    """Fit cached features by logistic regression, with a grid of strengths of its L2 penalty.

    strengths: the grid. The other arguments, and what is returned, are those of `fit_and_choose`.
    The features are centered and divided by one number, their root mean square. So a strength means the same for every
    encoder, while directions keep their share. All is in float64. The fits go from the strongest penalty to the
    weakest. Each begins where the last one ended.
    """
    mean = x[rest].double().mean(0)
    scale = (x[rest] - mean).square().mean().sqrt().clamp_min(1e-12)
    x, test_x = affine(x, mean, scale), affine(test_x, mean, scale)

    def fit(rows, grid, weight):
        weights, fit_x, fit_y = [], x[rows, :-1], y[rows]
        for i, strength in enumerate(grid, start=1):
            what = f"strength {strength:.3g}, {i} of {len(grid)}"
            common.progress(f"L-BFGS: {what}")
            weight, left = logistic_regression(fit_x, fit_y, num_classes, strength, weight, iterations, tolerance)
            if left > tolerance:
                common.log(f"warning: {what}, has not converged in {iterations} iterations: gradient {left:.1e}")
            weights.append(weight)
        return weights

    return fit_and_choose(fit, x, y, test_x, rest, check, num_classes, sorted(set(strengths), reverse=True), metric)


# =================================== 5. the papers' protocols: what is trained


class TrainingViews(common.ViewDataset):
    """One view of each image: a random crop, RandAugment and a flip. Erasing, mixup and CutMix follow on the device.

    The crop is a random resized one with crop_scale of the area or, with pad, a random place of the padded image, which
    has the view's size. The flip is made on the device, too. RandAugment treats left and right alike.
    """

    def __init__(self, images, info, seed, crop_scale, pad=0, randaug=0):
        size, area, ratio = info["image_size"], crop_scale, (3 / 4, 4 / 3)
        if pad and (images.array is None or images.array.shape[1:3] != (size, size)):
            common.fail(f"--pad {pad} needs images of {size} x {size} px, decoded in memory: give --pad 0")
        if pad:
            array = np.pad(images.array, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
            images = common.ImageSet(array, images.labels, images.classes)
            area, ratio = ((size / (size + 2 * pad)) ** 2,) * 2, (1, 1)
        plain = dict(jitter=(0, 0, 0, 0), jitter_p=0.0, gray_p=0.0, blur_p=0.0, blur_sigma=(0.1, 2.0), solarize_p=0.0)
        view = common.View(size=size, area=area, ratio=ratio, flip_p=0.5, **plain)
        super().__init__(images, [view], seed, info["interpolation"])
        self.randaug = None
        if randaug:
            options = dict(translate_const=int(0.45 * size), img_mean=tuple(round(255 * m) for m in info["mean"]))
            # At 10, "posterize" would keep 0 bits, which Pillow 13 refuses.
            options |= dict(interpolation=common.RESAMPLE[info["interpolation"]], magnitude_max=9.99)
            self.randaug = rand_augment_transform(f"rand-m{randaug}-mstd0.5-inc1", options)

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


def erase(x, index, probability, seed, epoch):
    """Erase a random box of each image (n, 3, H, W) with a probability, in place. index: (n,) its rows."""
    erasing = RandomErasing(probability, mode="pixel", device=x.device)
    for image, row in zip(x, index.tolist(), strict=True):
        seed_libraries(seed, STREAM_ERASE, epoch, row)
        erasing(image)


def make_network(encoder, info, num_classes, finetune=False, drop_path=None, std=0.01):
    """Return what is trained, and its new linear layer: (network, head). Of a frozen encoder both are the head.

    The head's weights are drawn from N(0, std), and its bias is 0; std None: as torch draws those of nn.Linear. timm's
    encoders are built anew for fine-tuning.
    """
    if finetune and info["timm_name"]:
        network = common.build_backbone(info, **({"drop_path_rate": drop_path} if drop_path else {}))
        network.load_state_dict(encoder.state_dict())
        network.reset_classifier(num_classes)
        head = network.get_classifier()
    else:
        head = nn.Linear(common.output_width(encoder, info["image_size"]), num_classes)
        network = nn.Sequential(encoder, nn.Flatten(), head).requires_grad_() if finetune else head
    if std is not None:
        nn.init.normal_(head.weight, std=std)
        nn.init.zeros_(head.bias)
    return network, head


def make_optimizer(args, network, head):
    """Return SGD or AdamW. A group's `lr_scale` is a power of --layer-decay, or --head-lr / --lr for the head."""
    groups = [dict(params=[*network.parameters()], lr_scale=1.0)]
    if args.finetune and args.head_lr:
        new = {*head.parameters()}
        groups[0]["params"] = [p for p in network.parameters() if p not in new]
        groups.append(dict(params=[*new], lr_scale=args.head_lr / args.lr))
    elif args.finetune:
        names = network.no_weight_decay() if hasattr(network, "no_weight_decay") else ()
        groups = param_groups_layer_decay(network, args.weight_decay, names, layer_decay=args.layer_decay)
    options = dict(lr=0.0, weight_decay=args.weight_decay)
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, **options)
    return torch.optim.SGD(groups, momentum=args.momentum, nesterov=args.nesterov and args.momentum > 0, **options)


def learning_rate(args, epoch):
    """Return the learning rate at a time, in epochs from 0, before a group's lr_scale. It changes once per epoch.

    It warms up linearly. Then it falls by a factor of 10 at each milestone or, without milestones, by a cosine to
    --min-lr. PatchMix's two protocols have timm's scheduler, which its released code calls after each epoch: so each
    epoch has the learning rate of the one before it, and the cosine counts the epochs of the warm-up. A run of fewer
    than 100 epochs passes through the learning rates of 100 epochs in its time (D5).
    """
    peak, warmup = args.lr * args.batch_size / args.lr_batch, min(args.warmup, args.epochs / 4)  # D6
    late = args.protocol == "patchmix"
    changes = max(100, args.epochs) if late else args.epochs  # of the learning rate, in the whole run
    last_change = max(0, int(epoch * changes / args.epochs + 1e-9) - late)  # 1e-9: the epoch is rounded
    epoch, cosine_begins = last_change * args.epochs / changes, 0 if late else warmup
    if epoch < warmup:
        return args.warmup_lr + (peak - args.warmup_lr) * epoch / warmup
    if args.milestones:
        return peak * 0.1 ** sum(epoch / args.epochs >= m for m in args.milestones)
    turn = math.pi * (epoch - cosine_begins) / (args.epochs - cosine_begins)
    return args.min_lr + (peak - args.min_lr) * (1 + math.cos(turn)) / 2


# ======================================= 6. the papers' protocols: the training


def evaluate(args, device, encoder, network, info, test):
    """Return the test images' scores, in percent: {"linear_top1" or "finetune_top1": ..., ...}; see `make_network`."""
    options = dict(workers=args.workers, amp=args.amp == "bf16", what="evaluating: features of the test set")
    options |= dict(batch_size=args.batch_size // common.rank_and_world()[1])
    logits = common.extract_features(network if args.finetune else encoder, test, info, device, **options)
    if not args.finetune:  # these are the features
        with torch.no_grad():
            logits = network(logits.to(device)).cpu()
    return scores(logits, torch.from_numpy(test.labels), len(test.classes), args.mode)


def train_protocol(args, device, encoder, info, train, test):
    """Train as the protocol says. Return {"encoder": scores after the last epoch}.

    The same call goes on after the last whole epoch that --out holds.
    """
    # Data
    rank, world = common.rank_and_world()
    views = TrainingViews(train, info, args.seed, args.crop_scale, args.pad, args.randaug)
    sampler = common.EpochSampler(len(train), args.batch_size, args.seed)
    loader = common.data_loader(views, device, args.workers, batch_sampler=sampler, collate_fn=default_convert)
    labels, norm = torch.from_numpy(train.labels), (info["mean"], info["std"])
    layout, classes = common.memory_format(device, common.arch_name(info)), len(train.classes)

    # The run's folder
    weights = b"".join(x.float().cpu().numpy().tobytes() for x in encoder.state_dict().values())
    names = "protocol", "finetune", "dataset", "data_dir", "label_fraction", "seed", "amp", "out"
    about = {name: getattr(args, name) for name in (*names, *common.defaults(VALUES))}
    about |= dict(weights=hashlib.sha256(weights).hexdigest()[:16], test_images=test.checksum())
    config = common.open_run(argparse.Namespace(**about, checkpoint=os.path.abspath(args.checkpoint or "")), train)
    del config["checkpoint"]  # the weights tell whether it is the same, wherever it lies

    # Network and optimizer
    torch.manual_seed(args.seed)
    std = 0.01 if args.finetune or args.protocol != "patchmix" else None  # None: PatchMix's released code
    network, head = make_network(encoder, info, classes, args.finetune, args.drop_path, std)
    if world > 1 and device.type == "cuda":  # torch has it for GPUs only
        network = convert_sync_batchnorm(network)  # timm's: torch's would drop the activation in a BatchNormAct2d
    network = network.to(device).train()
    optimizer = make_optimizer(args, network, head)
    state = dict(model=network, optimizer=optimizer)
    records = common.load_run(args, config, state)  # one for each epoch that is done
    unused = args.finetune and info["timm_name"] is None  # an own encoder may leave some parameters unused
    ddp = DistributedDataParallel(network, find_unused_parameters=unused) if dist.is_initialized() else network
    ddp.broadcast_buffers = False  # but at the start
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16")
    mix = None
    if args.mixup or args.cutmix:
        mix = Mixup(args.mixup, args.cutmix, label_smoothing=args.smoothing, num_classes=classes)

    run = common.EVALUATION["what is evaluated"] | common.EVALUATION["operation"]
    common.log_table(args, dict(run=run) | FLAGS | VALUES, train=train, test=test)

    for epoch in range(len(records), args.epochs):
        sampler.epoch = epoch
        history, began = [], time.perf_counter()
        for step, batch in enumerate(loader, epoch * len(loader)):
            lr = learning_rate(args, step / len(loader))
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            # One view per image
            (x,) = common.color_views(batch, device, layout, norm)
            y = target = labels[batch["index"]].to(device, non_blocking=True)
            if args.erase:
                erase(x, batch["index"], args.erase, args.seed, epoch)
            seed_libraries(args.seed, step, STREAM_STEP, rank)  # mixup and drop-path draw from the global generators
            if mix:
                x, target = mix(x, y)  # (n, classes): the labels of both images, smoothed
            # The logits and the loss
            if args.finetune:
                with autocast:
                    logits = ddp(x)
                logits = logits.flatten(1).float()
            else:
                with torch.no_grad(), autocast:
                    features = encoder(x).flatten(1).float()
                logits = ddp(features)
            loss = F.cross_entropy(logits, target, label_smoothing=0.0 if mix else args.smoothing)
            # The step
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(dict(loss=loss.detach(), train_top1=100 * (logits.argmax(1) == y).float().mean()))
            if (step + 1) % 10 == 0:
                common.show_progress(args, history, began, step + 1, args.epochs * len(loader))

        for buffer in network.buffers() if world > 1 else ():  # batch norm's: on CPUs each process has its own
            buffer.copy_(sum(common.from_all(buffer.cpu())) / world)
        records.append(dict(epoch=epoch + 1, lr=lr) | common.means(args, history, began))
        common.save_run(args, config, None, state, records)
        common.log_epoch(args, records[-1])

    if f"{args.mode}_top1" not in records[-1]:  # else it is a finished run
        records[-1] |= evaluate(args, device, encoder, network, info, test)
        common.save_run(args, config, None, state, records)
    result = {name: value for name, value in records[-1].items() if name.startswith(args.mode)}
    common.log(f"{'encoder':>10}  {show(result)}  (epoch {args.epochs}, the last)")
    return {"encoder": result}


def main(args, encoder=None, train=None, test=None):
    """Evaluate an encoder as args say. Return {"encoder" or a baseline: {"linear_top1": percent, ...}}.

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of timm's; a
    copy of it is evaluated. train, test: common.ImageSet of images and labels to use instead of --dataset.
    """
    args = argparse.Namespace(**vars(args))
    device, encoder, info = common.open_encoder(args, encoder)
    train, test = common.open_data(args, info, train, test)
    args = complete(args, info)
    common.log(common.protocol(args, info, train, test))
    train = choose_labels(args, train)
    how = evaluate_cached if args.mode in ("probe", "lbfgs") else train_protocol
    return how(args, device, encoder, info, train, test)


if __name__ == "__main__":
    common.start(main, parse_args)
