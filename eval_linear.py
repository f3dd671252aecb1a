"""Evaluate an encoder with labels: train a linear classifier on its frozen features, or fine-tune all its layers.

The default, `--protocol probe`, computes the features once, standardises them, and trains linear classifiers on them
with a grid of learning rates, all at once, in seconds. A tenth of the training images chooses the learning rate. The
test images are used once. The same scores are printed for two baselines: raw pixels, and the same encoder untrained.

    python eval_linear.py runs/patchmix-patterns-vit_micro-s0
    python eval_linear.py RUN --dataset cifar100 --data-dir DIR                # transfer
    python eval_linear.py RUN --solver lbfgs                                   # transfer as in LoGo's Table 5
    torchrun --nproc_per_node=8 eval_linear.py RUN --data-dir DIR --protocol moco
    python eval_linear.py RUN --finetune --label-fraction 0.01
    python eval_linear.py FILE --arch resnet50 --prefix module.encoder_q. --dataset imagenet --data-dir DIR

The papers' own protocols train on random crops of the images, on any number of processes. The same command resumes a
training that was stopped. The scores are those of the last epoch, never those of the best one.
    --protocol moco              MoCo's. JointCrop's App. F and Table 11 (on MoCo v1)
    --protocol jointcrop         MoCo v3's. JointCrop's released code: MoCo v3 on ImageNet-1k
    --protocol jointcrop-small   ContrastiveCrop's. JointCrop on small images
    --protocol jcl               JCL's Table 1, and Fig. 2 with --dataset imagenet100
    --protocol clim              CLIM's Tables 1, 6 to 9 and 11. Table 2: --finetune --protocol clim --label-files LIST
    --protocol patchmix          PatchMix's Tables 2, 3 and 5 to 7, "Linear". "Finetune": with --finetune
    --solver lbfgs               LoGo's Table 5; for Pets, Flowers, Caltech101 and Aircraft with --metric per_class
`--finetune` trains all layers, by PatchMix's recipe (ViTs) or CLIM's (others). `python eval_knn.py OUT` works, too.

Differences from the papers:
    D1 Incomplete batches are dropped.
    D2 Images are resized with the interpolation that the encoder was trained with; third-party checkpoints have
       bilinear. LoGo does not describe a linear protocol. PatchMix's released one resizes CIFAR's images to 36 px,
       crops the center, and reports the best epoch on the test set. Here: neither.
    D3 Precision. The encoder computes in bf16 on GPUs that have it (`--amp off`: in float32, convolutions in TF32). All
       linear classifiers are trained in float32, and by L-BFGS in float64.
    D4 PatchMix's protocols in fewer than 100 epochs. Released: the learning rate changes once per epoch, an epoch late,
       so a fine-tuning of two epochs would never leave the warm-up. Here: it changes 100 times, too.
    D5 A warm-up takes at most a quarter of the run.
"""

import argparse
import datetime
import hashlib
import math
import os
import random
import re
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import Mixup, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.transforms import v2

import common

# ========================================================= 1. hyper-parameters

# [P]: printed in the paper. [C]: from its released code, or from the code that it builds on, which is named. [I]: our
# inference, where neither says it.
# fmt: off
PROBE = dict(epochs=50, batch_size=256, lrs=None, holdout=0.1)  # ours
LBFGS = dict(  # LoGo, supplement 3: L2, iterations, metrics [P]; its grid: BYOL's, SimCLR's [I]
    batch_size=256, strengths=[10 ** (i / 4) for i in range(-24, 21)], holdout=0.1, metric="top1", iterations=5000,
)
MOCO = dict(  # JCL, 4.2 [P]. CLIM, 4.1: learning rate and milestones [P], the rest as MoCo [I]
    epochs=100, batch_size=256, lr=30.0, milestones=[0.6, 0.8], min_lr=0.0, warmup=0.0, warmup_lr=0.0,
    optimizer="sgd", nesterov=False, weight_decay=0.0, crop_scale=[0.08, 1.0],  # [C]
    pad=0, randaug=0, erase=0.0, mixup=0.0, cutmix=0.0, smoothing=0.0, out=None, resume=None,
)
LINEAR = {
    "moco": MOCO, "jcl": MOCO, "clim": MOCO,
    "jointcrop": dict(MOCO, epochs=90, batch_size=1024, lr=0.1, milestones=[]),  # MoCo v3's [C]
    # CIFAR, STL-10, Tiny-ImageNet: ContrastiveCrop's released code's, lr 10 for 512 [I]
    "jointcrop-small": dict(MOCO, batch_size=512, lr=5.0),
    # 4.1.3: 100 epochs [P]; the rest [C]. Encoders other than ViT-T, -S and -B have ViT-S's learning rate, except for
    # vit_micro, which has ViT-T's [I]
    "patchmix": dict(MOCO, batch_size=1024, lr=0.02, milestones=[], nesterov=True),
}
FINETUNE = {
    # 4.2 [P]; batch size, weight decay and areas of crops [I]
    "clim": dict(
        MOCO, epochs=60, lr=1e-4, head_lr=10.0, milestones=[1 / 3, 2 / 3], layer_decay=1.0, drop_path=0.0,
    ),
    # 4.1.3: 100 epochs [P]; the rest [C], with timm's scheduler, which is called after each epoch
    "patchmix": dict(
        MOCO, batch_size=1024, lr=5e-4, head_lr=0.0, milestones=[], min_lr=1e-5, warmup=10.0, warmup_lr=1e-6,
        optimizer="adamw", weight_decay=0.05, layer_decay=0.75, drop_path=0.1, randaug=9, erase=0.25, mixup=0.8,
        cutmix=1.0, smoothing=0.1,
    ),
}
# fmt: on


def recipe(args, info):
    """Return the values of a protocol, {name: value}. info: of the encoder, see `common.backbone_info`."""
    if args.protocol == "probe":
        return LBFGS if args.solver == "lbfgs" else PROBE
    values = dict((FINETUNE if args.finetune else LINEAR)[args.protocol])
    arch = "_".join(re.sub("^deit3?_", "vit_", info["timm_name"]).split("_")[:2])  # vit_tiny, vit_small, resnet50, ...
    if args.protocol == "jcl" and args.dataset == "imagenet100":
        values["lr"] = 10.0  # App. D [P]
    if args.protocol == "jointcrop" and arch.startswith("vit_"):
        values["lr"] = 3.0  # MoCo v3's [C]
    if args.protocol == "patchmix":
        lr = dict(vit_tiny=1e-3) if args.finetune else dict(vit_tiny=0.05, vit_base=0.01)
        values["lr"] = lr.get(arch, values["lr"])
        if args.dataset in ("cifar10", "cifar100"):
            values["batch_size"] = 256
            values["pad"] = 4 if args.finetune and info["image_size"] <= 32 else 0
    return values


def parse_args(argv=None):
    """Parse the command line. Values of a recipe that are not given are left out: `complete` adds them."""
    options = dict(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    first_line = str(__doc__).splitlines()[0]  # there is none with python -OO
    parser = argparse.ArgumentParser("eval_linear.py", "%(prog)s RUN [options]", first_line, **options)
    common.add_evaluation_arguments(parser)
    group = parser.add_argument_group("protocol")
    add = group.add_argument
    add("--protocol", choices=("probe", *LINEAR), help="see the top of the file; if not given, probe")
    add("--finetune", action="store_true", help="train all layers, with --protocol patchmix or clim")
    add("--solver", choices=("sgd", "lbfgs"), default="sgd", help="how the probe is trained")
    add = group.add_mutually_exclusive_group().add_argument
    add("--label-fraction", type=common.fraction, metavar="X", help="fraction of the labels, equally many per class")
    add("--label-files", metavar="FILE", help="list of the training images to use: file names, or paths in train/")

    unset = dict(argument_default=argparse.SUPPRESS)  # the defaults are the recipe's
    add = parser.add_argument_group("training (defaults: the protocol's, printed at its start)", **unset).add_argument
    add("--epochs", type=common.positive_int, help="number of epochs")
    add("--batch-size", type=common.positive_int, help="images per step, over all processes")
    add("--lr", type=common.positive_float, help="peak learning rate per 256 images")
    add("--milestones", type=common.fraction, nargs="*", help="parts of the run where --lr falls tenfold; none: cosine")
    add("--warmup", type=common.nonnegative_float, help="epochs of linear warm-up, at most a quarter of all")
    add("--weight-decay", type=common.nonnegative_float, help="weight decay, except for biases and norms")
    add("--pad", type=common.nonnegative_int, help="random crops of the image padded by N pixels; 0: random areas")
    add("--randaug", type=int, choices=range(11), help="magnitude of RandAugment (rand-mN-mstd0.5-inc1); 0: none")
    add("--erase", type=common.fraction, help="probability of random erasing")
    add("--mixup", type=common.nonnegative_float, help="alpha of mixup; 0: none")
    add("--cutmix", type=common.nonnegative_float, help="alpha of CutMix; 0: none")
    add("--smoothing", type=common.fraction, help="label smoothing")
    add("--head-lr", type=common.nonnegative_float, help="--finetune: --lr of the classifier; 0: that of the encoder")
    add("--layer-decay", type=common.fraction, help="--finetune: learning rate of a layer over that of the next layer")
    add("--drop-path", type=common.fraction, help="--finetune: drop-path rate of the last block")
    add("--out", metavar="DIR", help="output folder, by default in runs/; an existing training is resumed")
    add("--resume", metavar="FILE", help="last.pt of another training, to resume in a new --out")

    add = parser.add_argument_group("probe (also --epochs and --batch-size)", **unset).add_argument
    add("--holdout", type=common.fraction, help="fraction that chooses --lrs or --strengths (default: 0.1)")
    add("--lrs", type=common.positive_float, nargs="+", help="learning rates (default: 13 from 10^-4.5 to 10^1.5)")
    add("--strengths", type=common.positive_float, nargs="+", help="lbfgs: L2 penalties (default: 45 from 1e-6 to 1e5)")
    add("--metric", choices=("top1", "per_class"), help="lbfgs: the score that chooses the strength (default: top1)")

    args = parser.parse_args(argv)
    if args.finetune and args.protocol not in (None, *FINETUNE):
        parser.error(f"--finetune needs --protocol patchmix or clim, not {args.protocol}")
    trained = args.finetune or args.protocol not in (None, "probe")
    if trained and (args.solver == "lbfgs" or args.no_baselines):
        parser.error("--solver lbfgs and --no-baselines need --protocol probe")
    if args.finetune:
        names = FINETUNE["clim"]
    elif trained:
        names = MOCO
    else:
        names = LBFGS if args.solver == "lbfgs" else PROBE
    for name in PROBE | LBFGS | FINETUNE["clim"]:
        if name in args and name not in names:
            parser.error(f"--{name.replace('_', '-')} has no effect without another --protocol, --solver or --finetune")
    return args


def complete(args, info):
    """Return a copy of args with a protocol, a data set, the values of the recipe that are not given, and an --out."""
    given, args = vars(args), argparse.Namespace(**vars(args))
    if args.protocol is None:
        args.protocol = "probe" if not args.finetune else "patchmix" if common.is_vit(info["timm_name"]) else "clim"
    args.method = "finetune" if args.finetune else "linear"
    args.dataset = args.dataset or info.get("dataset")  # the one that the encoder was trained on
    values = recipe(args, info)
    args = argparse.Namespace(**values | vars(args))
    if args.protocol == "probe":
        return args
    if args.min_lr > args.lr * args.batch_size / 256:
        raise common.UsageError(f"--lr {args.lr}: its peak is below the last learning rate, {args.min_lr}")
    if args.out is None:  # named after the encoder's run and all that is given
        path = Path(args.checkpoint).resolve()
        source = f"{path.stem}-{args.arch}" if args.arch else (path if path.is_dir() else path.parent).name
        words = [args.method, args.protocol, args.dataset or "own", source, f"s{args.seed}"]
        for name in (*values, "prefix", "data_dir", "encoder", "label_fraction", "label_files"):
            if given.get(name) is not None and name != "resume":
                words.append(name + os.path.basename(common.format_value(given[name])))
        args.out = common.run_folder(words)
    return args


# ========================================================== 2. data and labels


def open_data(args, info):
    """Load the images: (training images, those that choose the strength for L-BFGS or None, test images).

    If the folder has val/ and test/ with classes (ImageNet's test/ has none), L-BFGS chooses on val/ and is evaluated
    on test/. If only some labels may be used, val/ is not used, because its labels would be more.
    """
    train, val = common.open_evaluation_data(args.dataset, args.data_dir, info)
    root = args.data_dir or (info.get("data_dir") if args.dataset is None else None)
    folders = os.listdir(root) if root and args.solver == "lbfgs" else []
    if "train" not in folders or "test" not in folders or not {"val", "validation"} & {*folders}:
        return train, None, val
    test = common.load_split(args.dataset or info["dataset"], root, ["test"], train=False, unlabeled=False)
    if not test.classes:
        return train, None, val
    if test.classes != val.classes:
        raise common.UsageError(f"the classes of test/ and val/ in {root} differ: remove test/, or correct its folders")
    common.log(f"test/ is evaluated: {common.describe(test)}")
    return train, val if args.label_fraction is None and args.label_files is None else None, test


def balanced_share(labels, fraction, seed):
    """Return the sorted rows (m,) of a fraction of the labels (n,), which the seed determines.

    Each class has as many as any other, or one more; at least one, and at most all. The rows of a smaller fraction are
    among those of a larger one.
    """
    generator = torch.Generator().manual_seed(seed)
    classes, labels, counts = torch.as_tensor(labels).unique(return_inverse=True, return_counts=True)
    order = torch.randperm(len(labels), generator=generator)
    rank = torch.randperm(len(classes), generator=generator)  # the first classes have one more
    each, more = divmod(max(round(fraction * len(labels)), len(classes)), len(classes))
    order = order[labels[order].argsort(stable=True)]  # class by class, each in random order
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)  # of a row in its class
    return order[place < (each + (rank < more)).repeat_interleave(counts)].sort().values


def listed_rows(paths, file):
    """Return the sorted rows (m,) of the paths that a file lists, one per line. Raises UsageError if one is not there.

    A line is the end of exactly one path: its file name, as in SimCLR's splits, or also the names of folders above it.
    """
    try:
        lines = Path(file).read_text("utf-8-sig", "replace").splitlines()
    except OSError as error:
        raise common.UsageError(f"--label-files: {error}") from error
    names = {line.strip().removeprefix("./"): [] for line in lines if line.strip()}
    depths = {name.count("/") + 1 for name in names}
    for row, path in enumerate(paths):
        parts = str(path).split("/")
        for depth in depths:
            if (rows := names.get("/".join(parts[-depth:]))) is not None:
                rows.append(row)
    wrong = sorted(name for name, rows in names.items() if len(rows) != 1)
    if wrong or not names:
        found = f"{len(wrong)} lines are not the name of exactly one training image: {', '.join(wrong[:3])}"
        raise common.UsageError(f"--label-files {file}: {found if names else 'the file is empty'}")
    return torch.tensor(sorted({row for rows in names.values() for row in rows}))


def choose_labels(args, train):
    """Return the training images whose labels --label-fraction or --label-files allows."""
    if args.label_files:
        if not hasattr(train, "samples"):
            raise common.UsageError("--label-files needs image files, which these training images are not")
        rows = listed_rows([path for path, _ in train.samples], args.label_files)
    elif args.label_fraction not in (None, 1):
        rows = balanced_share(train.targets, args.label_fraction, args.seed)
    else:
        return train
    chosen = common.Subset(train, rows.tolist())
    counts = torch.tensor(chosen.targets).bincount(minlength=len(train.classes))
    common.log(f"labels: {len(chosen)} of {len(train)} training images, {counts.min()} to {counts.max()} per class")
    return chosen


# ================================================= 3. classifiers of features
# These functions take tensors only. To copy one, also copy what its docstring names.


def scores(logits, labels, num_classes, name="linear"):
    """Return the scores of logits (m, num_classes) for labels (m,), in percent: {name: float}.

    linear_top1; linear_top5 if there are more than five classes; linear_per_class, the mean over the classes of each
    class's top-1. name: replaces "linear".
    """
    ranked = logits.topk(min(5, num_classes), dim=1).indices == labels[:, None]
    right, counts = ranked[:, 0].double(), labels.bincount()
    per_class = (labels.bincount(right) / counts)[counts > 0]
    top5 = {f"{name}_top5": 100 * ranked.any(1).double().mean().item()} if num_classes > 5 else {}
    return {f"{name}_top1": 100 * right.mean().item(), **top5, f"{name}_per_class": 100 * per_class.mean().item()}


def hold_out(labels, fraction):
    """Split the rows of labels (n,), on the CPU, at random: (rows that are fitted, rows that choose).

    Each class keeps a row that is fitted. At least one row chooses, unless no class has two.
    """
    order = torch.randperm(len(labels))
    _, last = np.unique(labels[order].flip(0), return_index=True)  # of each class, counted from the end
    free = torch.ones(len(labels), dtype=torch.bool)
    free[len(labels) - 1 - last] = False
    held = free & (free.cumsum(0) <= max(1, int(fraction * len(labels))))
    return order[~held], order[held]


def best_of(weights, x, y, num_classes, metric="top1"):
    """Compare linear classifiers, each (d, num_classes), on x (n, d) and y (n,): (index of the best, all percents).

    Ties go to the middle one. metric: top1 or per_class. Copy it with scores.
    """
    percents = [scores((x @ weight).cpu(), y.cpu(), num_classes)[f"linear_{metric}"] for weight in weights]
    ties = [i for i, percent in enumerate(percents) if percent == max(percents)]
    return ties[(len(ties) - 1) // 2], percents


def affine(x, mean, scale):
    """Return (x - mean) / scale of features (n, d), and a column of ones for the bias: (n, d + 1). Copies x once."""
    x = F.pad(x.to(mean.dtype), (0, 1), value=1.0)
    x[:, :-1].sub_(mean).div_(scale)
    return x


@torch.enable_grad()
def linear_probe(x, y, test_x, num_classes, lrs=None, epochs=50, batch_size=256, holdout=0.1):
    """Train a linear classifier on features by SGD with momentum 0.9. Held-out features choose its learning rate.

    x: (n, d) and test_x: (m, d), which are standardised by the mean and the standard deviation of x; a feature that
    does not vary in x, except for rounding, becomes 0. y: (n,) int64. lrs: the grid, each of which falls by a cosine;
    None: 13 from 10^-4.5 to 10^1.5. holdout: the fraction of x that chooses; then all of x is fitted. Random numbers
    are torch's global ones.
    Returns {'logits': (m, num_classes), 'chosen': the learning rate, 'held_out': {learning rate: percent}}.
    To copy it, also copy scores, hold_out, best_of and affine, and delete common.progress.
    """
    mean, std = x.mean(0), x.std(0, correction=0)
    std = std.masked_fill(std <= 1e-6 * mean.abs(), math.inf)
    x, test_x = affine(x, mean, std), affine(test_x, mean, std)

    def fit(rows, lrs):  # with all learning rates at once
        weight = x.new_zeros(x.shape[1], len(lrs), num_classes).requires_grad_()
        lr = x.new_tensor(lrs)
        optimizer = torch.optim.SGD([weight], momentum=0.9)
        for epoch in range(epochs):
            common.progress(f"probe of {len(lrs)} learning rate(s): epoch {epoch + 1} of {epochs}")
            batches = rows[torch.randperm(len(rows))].to(x.device).split(batch_size)
            for i, batch in enumerate(batches):
                logits = (x[batch] @ weight.flatten(1)).view(-1, num_classes)
                losses = F.cross_entropy(logits, y[batch].repeat_interleave(len(lrs)), reduction="none")
                # A factor of a loss acts as a learning rate. That of SGD is the cosine, which all share
                loss = (lr * losses.view(-1, len(lrs)).mean(0)).sum()
                optimizer.param_groups[0]["lr"] = (1 + math.cos(math.pi * (epoch + i / len(batches)) / epochs)) / 2
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return weight.detach().unbind(1)

    lrs = sorted(set(lrs or (10 ** (i / 2) for i in range(-9, 4))))
    rest, check = hold_out(y.cpu(), holdout)
    choosing = check if len(check) else rest
    best, percents = best_of(fit(rest, lrs), x[choosing], y[choosing], num_classes)
    (weight,) = fit(torch.cat([check, rest]), [lrs[best]])
    return dict(logits=test_x @ weight, chosen=lrs[best], held_out=dict(zip(lrs, percents, strict=True)))


@torch.enable_grad()
def logistic_regression(x, y, num_classes, strength, start=None, iterations=5000, tolerance=1e-6):
    """Fit a multinomial logistic regression with an L2 penalty by L-BFGS: (weights, largest entry of the gradient).

    The weights (d + 1, num_classes) are W and, as their last row, the bias b, which minimise
    sum_i CE(x_i W + b, y_i) + strength / 2 |W|^2. The gradient is that of this sum divided by n, with respect to b and
    to the whitened weights V below. The fit has converged if none of its entries is above `tolerance`.
    x: (n, d) float64. y: (n,) int64. strength: 1 / C of scikit-learn, but 2 / C for two classes, where scikit-learn
    penalises one weight vector, the difference of the two here. start: weights to begin from.
    """
    # L-BFGS finds V, with W = P V, where P whitens the features as far as the penalty allows, in tens of iterations
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
    """Fit features by logistic regression. Held-out features choose the strength of its L2 penalty.

    x: (n, d) and test_x: (m, d), which are centered and divided by one number, the root mean square of x[rest]. So a
    strength means the same for every encoder, and directions keep their relative size. All is in float64. y: (n,)
    int64. rest, check: the rows that are fitted, and those that choose; if there are none, the fitted rows choose. Then
    all are fitted. strengths: the grid, fitted from the strongest to the weakest, each from the weights of the one
    before. metric: the score that chooses, top1 or per_class. Returns what `linear_probe` does.
    To copy it, also copy scores, best_of, affine and logistic_regression, and delete common.progress and common.log.
    """
    mean = x[rest].double().mean(0)
    scale = (x[rest] - mean).square().mean().sqrt().clamp_min(1e-12)
    x, test_x = affine(x, mean, scale), affine(test_x, mean, scale)
    strengths = sorted(set(strengths), reverse=True)

    def fit(rows, strength, start):
        weight, left = logistic_regression(x[rows, :-1], y[rows], num_classes, strength, start, iterations, tolerance)
        if left > tolerance:
            common.log(f"warning: {strength:.3g} has not converged in {iterations} iterations: gradient {left:.1e}")
        return weight

    weights = []
    for i, strength in enumerate(strengths, start=1):
        common.progress(f"L-BFGS: strength {strength:.3g}, {i} of {len(strengths)}")
        weights.append(fit(rest, strength, weights[-1] if weights else None))
    choosing = check if len(check) else rest
    best, percents = best_of(weights, x[choosing], y[choosing], num_classes, metric)
    weight = fit(torch.cat([check, rest]), strengths[best], weights[best])
    return dict(logits=test_x @ weight, chosen=strengths[best], held_out=dict(zip(strengths, percents, strict=True)))


# ====================================================== 4. the probe and L-BFGS


def evaluate_features(args, device, encoder, info, train, val, test):
    """Fit the probe or L-BFGS to features: {"encoder" or a baseline: scores}.

    val: images that choose the strength for L-BFGS, and are then fitted, too; None: a part of `train` chooses. All
    processes compute features. The first process fits them.
    """
    lbfgs, num_classes = args.solver == "lbfgs", len(train.classes)
    parts = [train, test] if val is None else [train, val, test]
    *labels, test_y = [torch.tensor(part.targets) for part in parts]
    y = torch.cat(labels)
    torch.manual_seed(args.seed)
    rest, check = hold_out(y, args.holdout) if val is None else torch.arange(len(y)).split([len(train), len(val)])
    flag, metric = ("--strengths", args.metric) if lbfgs else ("--lrs", "top1")
    common.log(f"{len(check) or len(y)} images choose one of {flag} by {metric}; then all {len(y)} are fitted")
    encoders = {"encoder": encoder}
    if not args.no_baselines:
        encoders |= common.baselines(info, args.seed, len(train))
    if lbfgs:
        encoders.pop("raw pixels", None)  # with thousands of numbers per image it takes minutes to hours
    amp = common.use_bf16(args.amp, device)
    options = dict(batch_size=args.batch_size, workers=args.workers, amp=amp, whole=False)
    results = {}
    for name, network in encoders.items():
        x = [common.extract_features(network.to(device), part, info, device, **options) for part in parts]
        x = [common.gather_rows(part, to_first=True) for part in x]
        if common.rank_and_world()[0] > 0:
            continue
        features = (x[0] if val is None else torch.cat(x[:-1])).to(device), y.to(device), x[-1].to(device)
        torch.manual_seed(args.seed)  # the probe holds out the images above
        if lbfgs:
            found = lbfgs_probe(*features, rest, check, num_classes, args.strengths, args.metric, args.iterations)
        else:
            found = linear_probe(*features, num_classes, args.lrs, args.epochs, args.batch_size, args.holdout)
        results[name] = scores(found["logits"].cpu(), test_y, num_classes)
        chosen, grid = found["chosen"], found["held_out"]
        text = "  ".join(f"{score} {value:.2f} %" for score, value in results[name].items())
        common.log(f"{name:>10}  {text}  ({flag} {chosen:.3g}, {grid[chosen]:.2f} % held out)")
        if name == "encoder" and len(grid) > 1 and chosen in (min(grid), max(grid)):
            common.log(f"warning: the best of {flag} is at the edge of its grid: widen it")
    return common.all_gather_object(results)[0]


# ==================================================== 5. training on the images


def training_transform(args, info):
    """Return the augmentation of a training image: PIL image -> PIL image of the encoder's size, not normalised."""
    size, interpolation = info["image_size"], v2.InterpolationMode(info["interpolation"])
    if args.pad:
        steps = [v2.Resize(size, interpolation), v2.RandomCrop(size, padding=args.pad)]
    else:
        steps = [v2.RandomResizedCrop(size, args.crop_scale, interpolation=interpolation)]
    steps.append(v2.RandomHorizontalFlip())
    if args.randaug:
        options = dict(translate_const=int(0.45 * size), img_mean=tuple(round(255 * m) for m in info["mean"]))
        # At 10, "posterize" would keep 0 bits, which Pillow 13 refuses
        options |= dict(interpolation=Image.Resampling[info["interpolation"].upper()], magnitude_max=9.99)
        steps.append(rand_augment_transform(f"rand-m{args.randaug}-mstd0.5-inc1", options))
    return v2.Compose(steps)


class Classifier(nn.Module):
    """An encoder and a linear layer: (n, 3, H, W) -> logits (n, num_classes), which the layer computes in float32."""

    def __init__(self, backbone, width, num_classes):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, num_classes)

    def forward(self, x):
        features = self.backbone(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.head(features.float())


def make_optimizer(args, model):
    """Return SGD or AdamW. A group's `lr_scale` is a power of --layer-decay, or --head-lr / --lr for the head."""
    groups, scale = [], 1.0
    if args.finetune:
        undecayed = model.backbone.no_weight_decay() if hasattr(model.backbone, "no_weight_decay") else ()
        groups = param_groups_layer_decay(model.backbone, args.weight_decay, undecayed, layer_decay=args.layer_decay)
        for group in groups:
            group["lr_scale"] *= args.layer_decay  # the head is the layer after the backbone's last
        scale = args.head_lr / args.lr if args.head_lr else 1.0
    for x, decay in (model.head.weight, args.weight_decay), (model.head.bias, 0.0):
        groups.append(dict(params=[x], lr_scale=scale, weight_decay=decay))
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=0.0)
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=args.nesterov)


def learning_rate(args, epoch):
    """Return the learning rate at a time, in epochs from 0, before a group's lr_scale.

    It changes once per epoch, and with PatchMix's protocols at least 100 times (D4). A linear warm-up comes first. Then
    it falls to a tenth at each milestone or, without milestones, by a cosine to args.min_lr. The cosine counts the
    epochs of the warm-up, as timm's does.
    """
    if args.protocol == "patchmix":  # timm's scheduler is called after each epoch, of which there are 100 at least (D4)
        changes = max(100, args.epochs)
        epoch = max(0, int(epoch * changes / args.epochs + 1e-9) - 1) * args.epochs / changes  # 1e-9: for rounding
    else:
        epoch = int(epoch)
    peak = args.lr * args.batch_size / 256
    warmup = min(args.warmup, args.epochs / 4)  # D5
    if epoch < warmup:
        return args.warmup_lr + (peak - args.warmup_lr) * epoch / warmup
    if args.milestones:
        return peak * 0.1 ** sum(epoch / args.epochs >= milestone for milestone in args.milestones)
    return args.min_lr + (peak - args.min_lr) * (1 + math.cos(math.pi * epoch / args.epochs)) / 2


def train_protocol(args, device, encoder, info, train, test):
    """Train by a paper's protocol, resuming a run in --out: {"encoder": scores after the last epoch}."""
    rank, world = common.rank_and_world()
    torch.manual_seed(args.seed)

    # Data
    common.split_batch(args.batch_size, len(train), world)
    images = common.Views(train, [training_transform(args, info)])
    sampler = DistributedSampler(images, world, rank, seed=args.seed, drop_last=True)
    options = common.loader_options(args.workers, device)
    loader = DataLoader(images, args.batch_size // world, sampler=sampler, drop_last=True, **options)
    num_classes = len(train.classes)
    erase = RandomErasing(args.erase, mode="pixel", device=device)
    mix = None
    if args.mixup or args.cutmix:
        if args.batch_size // world % 2:
            raise common.UsageError(f"--batch-size {args.batch_size}: mixup needs an even number per process")
        mix = Mixup(args.mixup, args.cutmix, label_smoothing=args.smoothing, num_classes=num_classes)

    # Model and optimizer
    weights = encoder.state_dict()
    digest = hashlib.sha256(b"".join(x.float().numpy().tobytes() for x in weights.values())).hexdigest()[:16]
    if args.finetune and args.drop_path:
        encoder = common.build_backbone(info, drop_path_rate=args.drop_path)
        encoder.load_state_dict(weights)
    width = common.feature_width(encoder, info["image_size"])
    model = Classifier(encoder.requires_grad_(args.finetune), width, num_classes)
    if args.finetune or args.protocol != "patchmix":  # PatchMix's released code leaves it as torch initialises it
        nn.init.normal_(model.head.weight, std=0.01)
        nn.init.zeros_(model.head.bias)
    if args.finetune and world > 1 and device.type == "cuda":  # torch has none for CPUs
        model = timm.layers.convert_sync_batchnorm(model)  # torch's would lose the activation of a BatchNormAct2d
    model.to(device, memory_format=torch.channels_last)
    model.train(args.finetune)
    optimizer = make_optimizer(args, model)

    # The run. Not its path but its weights identify the encoder. config.json tells evaluations where the images are
    amp = common.use_bf16(args.amp, device)
    args = argparse.Namespace(**vars(args) | dict(checkpoint=digest, data_dir=info.get("data_dir", args.data_dir)))
    tuned = {name: x for name, x in info.items() if name != "data_dir"} | dict(encoder="fine-tuned")
    tuned = tuned if args.finetune else None  # for evaluations
    state = dict(model=model if args.finetune else model.head, optimizer=optimizer)
    config, records = common.open_run(args, train, state, dict(peak_lr=args.lr * args.batch_size / 256, bf16=amp))
    tested = common.fingerprint(test)
    if len(records) == args.epochs and records[-1].get("test_images", tested) != tested:
        raise common.UsageError(f"{args.out} has the scores of other test images: pass another --out")
    ddp = DistributedDataParallel(model) if world > 1 else model
    ddp.broadcast_buffers = False  # of batch norm (set here, because torch 2.13 renames the argument)

    for epoch in range(len(records), args.epochs):
        sampler.set_epoch(epoch)
        timm.utils.random_seed(hash((args.seed, epoch, rank)) % 2**32)  # torch's, and numpy's and Python's for timm
        meter = common.Meter(epoch, args.epochs, len(loader), args.batch_size)
        for step, ((crops,), labels) in enumerate(loader):
            lr = learning_rate(args, epoch + step / len(loader))
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            x, y = crops.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            x = common.normalize(x.float() / 255, info["mean"], info["std"])
            x = erase(x) if args.erase else x
            x, target = mix(x, y) if mix else (x, y)  # mixed labels: (n, num_classes), smoothed
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                logits = ddp(x)
            loss = F.cross_entropy(logits, target, label_smoothing=0.0 if mix else args.smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(dict(loss=loss, train_top1=100 * (logits.argmax(1) == y).float().mean()))

        if args.finetune and world > 1:
            timm.utils.distribute_bn(model, world, reduce=True)  # average the running statistics
        records.append(dict(epoch=epoch + 1, lr=lr) | meter.averages())
        # Saved before the evaluation, too, because a test image that cannot be read must not cost the epoch
        common.save_run(args.out, config, tuned, state, records)
        common.log_epoch(f"epoch {epoch + 1}/{args.epochs}", records, ("loss", "train_top1", "images_per_s"))

    if "test_images" not in records[-1]:  # else it was finished before
        options = dict(batch_size=args.batch_size // world, workers=args.workers, amp=amp)
        logits = common.extract_features(model, test, info, device, **options)
        records[-1] |= scores(logits, torch.tensor(test.targets), num_classes, args.method) | dict(test_images=tested)
        common.save_run(args.out, config, tuned, state, records)
    common.log_epoch(f"finished: {args.out}", records)
    return {"encoder": {name: value for name, value in records[-1].items() if name.startswith(args.method)}}


def main(args, train=None, test=None):
    """Evaluate an encoder. Return {"encoder" or a baseline: {"linear_top1": percent, ...}}.

    args: from `parse_args`. train, test: data sets with items (PIL image, label), `targets` and `classes` to use
    instead of --dataset. The caller's random numbers stay as they are.
    """
    device, *_ = common.init_distributed(args.device, timeout=datetime.timedelta(days=1))  # one process fits features
    python_state, numpy_state = random.getstate(), np.random.get_state()
    val = None
    try:
        with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            encoder, info = common.open_encoder(args)
            if train is not None:  # not the images that the encoder was trained on
                train, test = common.open_evaluation_data(None, None, info, True, train, test)
                info = {name: value for name, value in info.items() if name not in ("dataset", "data_dir", "images")}
            else:
                train, val, test = open_data(args, info)
                if args.finetune and args.dataset is not None:  # an evaluation of the fine-tuned encoder compares them
                    images = common.load_dataset(args.dataset, args.data_dir, True, info["image_size"], unlabeled=True)
                    info |= dict(dataset=args.dataset, data_dir=args.data_dir, images=common.fingerprint(images))
                elif args.dataset is None and args.data_dir is not None:  # the encoder's own images have moved
                    info |= dict(data_dir=args.data_dir)
            args, train = complete(args, info), choose_labels(args, train)
            if args.protocol == "probe":
                return evaluate_features(args, device, encoder, info, train, val, test)
            return train_protocol(args, device, encoder, info, train, test)
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


if __name__ == "__main__":
    common.start(main, parse_args)
