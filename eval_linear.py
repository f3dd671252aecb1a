"""Evaluate an encoder with labels: train a linear classifier on its frozen features, or fine-tune all its layers.

The default, `--protocol probe`, computes the features once, standardizes them, and trains linear classifiers on them
for a grid of learning rates, all at once. The learning rate is chosen on a held-out tenth of the training
images or, if that is less than 400, by cross-validation. The test images are used once. The baselines, raw pixels (not
by L-BFGS, nor of more than 200,000 images) and the untrained encoder, are evaluated, too.

    python eval_linear.py runs/patchmix-patterns-vit_micro-s0
    python eval_linear.py RUN --dataset cifar100 --data-dir DIR                # transfer
    torchrun --nproc_per_node=8 eval_linear.py RUN --data-dir DIR --protocol moco
    python eval_linear.py RUN --finetune --label-fraction 0.01
    python eval_linear.py FILE --arch resnet50 --prefix module.encoder_q. --dataset imagenet --data-dir DIR

The papers' own protocols train on random crops of the images, on any number of processes. They evaluate no baselines.
The same command resumes an interrupted run. The scores are those of the last epoch, not of the best one.
    --protocol moco              MoCo's. JointCrop's App. F and Table 11 (on MoCo v1); LoGo's "Linear" (both inferred)
    --protocol jointcrop         MoCo v3's. JointCrop's released code: MoCo v3 on ImageNet-1k
    --protocol jointcrop-small   ContrastiveCrop's. JointCrop on small images
    --protocol jcl               JCL's Table 1, and Fig. 2 with --dataset imagenet100
    --protocol clim              CLIM's Tables 1, 6 to 9 and 11. Table 2: --finetune --protocol clim --label-files LIST
    --protocol patchmix          PatchMix's Tables 2, 3, 5 to 7, Fig. 5: "Linear". "Finetune", "Tune": with --finetune
`--solver lbfgs` fits features: LoGo's supplement, Table 5 (Pets, Flowers, Caltech101, Aircraft: --metric per_class).
`--finetune` trains all layers, by PatchMix's recipe (ViTs) or CLIM's (others). eval_knn.py evaluates its --out, too.
(D1), (D2), ... are the differences from the papers, listed at the end.
"""

import argparse
import datetime
import hashlib
import math
import os
import random
import re
from pathlib import Path
from statistics import median_low

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
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler
from torchvision.transforms import v2

import common

# ========================================================= 1. hyper-parameters

# [P]: printed in the paper. [C]: from its released code, or from code that it builds on, which is named. [I]: inferred.
# fmt: off
PROBE = dict(epochs=50, batch_size=256, lrs=None, holdout=0.1)  # not from a paper
# LoGo, supplement: L2 (section 3), metrics (Table 1) [P]; its grid: BYOL's, SimCLR's [I]
LBFGS = dict(batch_size=256, strengths=[10 ** (i / 4) for i in range(-24, 21)], holdout=0.1, metric="top1")
MOCO = dict(  # JCL, 4.2 [P]. CLIM, 4.1: learning rate and milestones [P], the rest as MoCo [I]
    epochs=100, batch_size=256, lr=30.0, milestones=[0.6, 0.8], min_lr=0.0, warmup=0.0, warmup_lr=0.0,
    optimizer="sgd", nesterov=False, weight_decay=0.0, crop_scale=[0.08, 1.0],  # [C]
    pad=0, randaug=0, erase=0.0, mixup=0.0, cutmix=0.0, smoothing=0.0, out=None, resume=None,
)
LINEAR = {
    "probe": PROBE, "moco": MOCO, "jcl": MOCO, "clim": MOCO,
    "jointcrop": dict(MOCO, epochs=90, batch_size=1024, lr=0.1, milestones=[]),  # MoCo v3's [C]
    # CIFAR, STL-10, Tiny-ImageNet: as ContrastiveCrop's released code, where lr is 10 for 512 images [I]
    "jointcrop-small": dict(MOCO, batch_size=512, lr=5.0),
    # 4.1.3: 100 epochs [P]; the rest [C]. Encoders other than ViT-T, -S and -B have ViT-S's learning rate, except for
    # vit_micro, which has ViT-T's [I]
    "patchmix": dict(MOCO, batch_size=1024, lr=0.02, milestones=[], nesterov=True),
}
FINETUNE = {
    # 4.2 [P]; batch size, weight decay and areas of crops [I]
    "clim": dict(MOCO, epochs=60, lr=1e-4, head_lr=10.0, milestones=[1 / 3, 2 / 3], layer_decay=1.0, drop_path=0.0),
    # 4.1.3: 100 epochs [P]; the rest [C], with timm's scheduler, which is called after each epoch
    "patchmix": dict(
        MOCO, batch_size=1024, lr=5e-4, head_lr=0.0, milestones=[], min_lr=1e-5, warmup=10.0, warmup_lr=1e-6,
        optimizer="adamw", weight_decay=0.05, layer_decay=0.75, drop_path=0.1, randaug=9, erase=0.25, mixup=0.8,
        cutmix=1.0, smoothing=0.1,
    ),
}
# fmt: on


def recipe(args, info):
    """Return the hyper-parameters of a protocol, {name: value}. info: see `common.backbone_info`."""
    if args.solver == "lbfgs":
        return LBFGS
    values = dict((FINETUNE if args.finetune else LINEAR)[args.protocol])
    arch = re.sub("^(?:deit3?|vit)_([a-z]+)_.*", r"vit_\1", info["timm_name"])  # vit_tiny, vit_small, resnet50, ...
    if args.protocol == "jcl" and args.dataset == "imagenet100":
        values["lr"] = 10.0  # App. D [P]
    if args.protocol == "jointcrop" and arch.startswith("vit_"):
        values["lr"] = 3.0  # MoCo v3's [C]
    if args.protocol == "patchmix":
        lr = dict(vit_tiny=1e-3) if args.finetune else dict(vit_tiny=0.05, vit_base=0.01)
        values["lr"] = lr.get(arch, values["lr"])
        if args.dataset in ("cifar10", "cifar100"):
            values["batch_size"] = 256  # as pad, [C]
            values["pad"] = 4 if args.finetune and info["image_size"] <= 32 else 0
    return values


def parse_args(argv=None):
    """Parse the command line. Hyper-parameters that it does not set are absent, and `complete_args` adds them."""
    parser = argparse.ArgumentParser("eval_linear.py", description="Evaluate by linear probing or fine-tuning")
    common.add_evaluation_arguments(parser)
    share = common.bounded("a positive number, at most 1", float, lambda x: 0 < x <= 1)
    group = parser.add_argument_group("protocol")
    add = group.add_argument
    add("--protocol", choices=tuple(LINEAR), help="if None, probe; with --finetune, patchmix for ViTs, clim for others")
    add("--finetune", action="store_true", help="train all layers, with --protocol patchmix or clim")
    add("--solver", choices=("sgd", "lbfgs"), default="sgd", help="optimizer of the probe")
    add = group.add_mutually_exclusive_group().add_argument
    add("--label-fraction", type=share, metavar="X", help="fraction of the labels, balanced over classes if possible")
    add("--label-files", metavar="FILE", help="list of the training images to use: file names, or paths in train/")

    unset = dict(argument_default=argparse.SUPPRESS)  # the defaults are the recipe's
    add = parser.add_argument_group("training (defaults: the protocol's, printed at the start)", **unset).add_argument
    add("--epochs", type=common.positive_int, help="number of epochs")
    add("--batch-size", type=common.positive_int, help="global batch size")
    add("--lr", type=common.positive_float, help="peak learning rate per 256 images")
    add("--milestones", type=common.fraction, nargs="*", help="fractions of training at which the "
        "learning rate is divided by 10; none: a cosine")  # fmt: skip
    add("--warmup", type=common.nonnegative_float, help="linear warmup epochs, at most --epochs / 4")
    add("--weight-decay", type=common.nonnegative_float, help="weight decay, except for biases, norms and tokens")
    add("--pad", type=common.nonnegative_int, help="padding of RandomCrop, in pixels; 0: RandomResizedCrop")
    add("--randaug", type=int, choices=range(11), help="magnitude of RandAugment (rand-mN-mstd0.5-inc1); 0: none")
    add("--erase", type=common.fraction, help="probability of random erasing")
    add("--mixup", type=common.nonnegative_float, help="mixup alpha; 0: none")
    add("--cutmix", type=common.nonnegative_float, help="CutMix alpha; 0: none")
    add("--smoothing", type=common.fraction, help="label smoothing")
    add("--head-lr", type=common.nonnegative_float, help="--finetune: --lr of the head; 0: the same")
    add("--layer-decay", type=common.fraction, help="--finetune: layer-wise learning rate decay")
    add("--drop-path", type=common.fraction, help="--finetune: stochastic depth rate of the last block")
    add("--out", type=os.path.abspath, metavar="DIR", help="folder, by default in runs/; an existing run is resumed")
    add("--resume", metavar="FILE", help="last.pt of another run, to resume in a new --out")

    add = parser.add_argument_group("probe (also --epochs and --batch-size)", **unset).add_argument
    add("--holdout", type=share, help="held-out fraction that chooses from --lrs or --strengths, unless "
        "val/ does (default: 0.1)")  # fmt: skip
    add("--lrs", type=common.positive_float, nargs="+", help="learning rates (default: 13 from 10^-4.5 to 10^1.5)")
    add("--strengths", type=common.positive_float, nargs="+", help="lbfgs: L2 penalties (default: 45 from 1e-6 to 1e5)")
    add("--metric", choices=("top1", "per_class"), help="lbfgs: score that chooses the penalty (default: top1)")

    args = parser.parse_args(argv)
    if args.finetune and args.protocol not in (None, *FINETUNE):
        parser.error(f"--finetune needs --protocol patchmix or clim, not {args.protocol}")
    names = FINETUNE["clim"] if args.finetune else LINEAR[args.protocol or "probe"]
    if names is not PROBE and (args.solver == "lbfgs" or args.no_baselines):
        parser.error("--solver lbfgs and --no-baselines need --protocol probe, without --finetune")
    if args.solver == "lbfgs":
        names = LBFGS
    without_effect = [name for name in PROBE | LBFGS | FINETUNE["clim"] if name not in names]
    common.needs(parser, args, without_effect, False, "another protocol (--protocol, --solver, --finetune)")
    return args


def complete_args(args, info):
    """Return a copy of args with the protocol, the dataset, the recipe's values for what is not set, and an --out."""
    from_command_line = vars(args)
    args = argparse.Namespace(**from_command_line)  # a copy, which is completed
    if args.protocol is None:
        tuning = "patchmix" if common.is_vit(info["timm_name"]) else "clim"
        args.protocol = tuning if args.finetune else "probe"
    args.method = "finetune" if args.finetune else "linear"
    args.dataset, args.data_dir = info["dataset"], info["data_dir"]  # those that `open_labeled_data` has loaded
    values = recipe(args, info)
    args = argparse.Namespace(**values | vars(args))
    if args.protocol == "probe":
        return args
    args.warmup = min(args.warmup, args.epochs / 4)  # D5
    if args.min_lr > args.lr * args.batch_size / 256:
        raise common.UsageError(f"--lr {args.lr} peaks below the final learning rate, {args.min_lr}: increase it")
    if args.out is None:  # named after the encoder's run and all flags that are set
        path = Path(args.checkpoint).resolve()
        source = f"{path.stem}-{args.arch}" if args.arch else (path if path.is_dir() else path.parent).name
        if path.stem.startswith("epoch-"):  # one of --keep-every
            source += f"-{path.stem}"
        words = [args.method, args.protocol, args.dataset or "own", source, f"s{args.seed}"]
        named = "amp prefix data_dir encoder label_fraction label_files image_size patch_size num_heads norm"
        for name in [*values, *named.split()]:
            if from_command_line.get(name) not in (None, "auto") and name != "resume":
                words.append(name + Path(common.format_value(from_command_line[name])).name)
        args.out = common.run_folder(words)
    return args


# ========================================================== 2. data and labels


def open_labeled_data(args, info, train=None, test=None):
    """Load the images: (training images, those that choose the strength for L-BFGS or None, test images, info).

    train, test: a caller's own datasets, which are used instead. If the folder has val/ and a test/ with classes,
    L-BFGS is evaluated on test/, and val/ chooses. With few labels (--label-fraction, --label-files) val/ is not used.
    """
    may_choose = args.solver == "lbfgs" and test is None
    train, test, info = common.open_evaluation_data(args.dataset, args.data_dir, info, True, train, test)
    root, val = info["data_dir"], None
    folders = {path.name for path in Path(root).iterdir()} if may_choose and root else set()
    if folders >= {"train", "test"} and folders & {"val", "validation"}:
        labeled = common.load_split(info["dataset"], root, "test")
        if labeled.classes == test.classes:
            val, test = test, labeled
            common.log(f"test/ is evaluated, not val/: {common.describe(test)}")
        elif labeled.classes:  # ImageNet's test/ has none
            raise common.UsageError(f"the classes of test/ and val/ in {root} differ: remove test/, or correct it")
    if may_choose:
        common.require_equal("their test images", common.fingerprint(test))  # of test/
    if args.label_files is not None:
        rows = listed_rows([path for path, _ in getattr(train, "samples", ())], args.label_files)
    elif args.label_fraction not in (None, 1):
        rows = balanced_share(common.labels_of(train), args.label_fraction, args.seed)
    else:
        return train, val, test, info
    chosen = common.Subset(train, rows.tolist())
    counts = np.bincount(chosen.targets, minlength=len(train.classes))
    common.log(f"labels: {len(chosen)} of {len(train)} training images, {counts.min()} to {counts.max()} per class")
    return chosen, None, test, info


def balanced_share(labels, fraction, seed):
    """Return the sorted rows (m,) of a balanced fraction of the labels (n,), determined by the seed.

    The numbers per class differ by at most one, unless a class has fewer; each class has at least one. The rows of a
    smaller fraction are among those of a larger one.
    """
    generator = torch.Generator().manual_seed(seed)
    classes, labels, counts = torch.as_tensor(labels).unique(return_inverse=True, return_counts=True)
    order = torch.randperm(len(labels), generator=generator)
    each, more = divmod(max(round(fraction * len(labels)), len(classes)), len(classes))
    extra = torch.randperm(len(classes), generator=generator) < more  # whether a class has one row more
    rows_of_class = order[labels[order].argsort(stable=True)].split(counts.tolist())  # each in random order
    return torch.cat([rows[: each + extra[i]] for i, rows in enumerate(rows_of_class)]).sort().values


def listed_rows(paths, file):
    """Return the sorted rows (m,) of the paths that a file lists, one per line.

    A line is a file name, as in SimCLR's splits, or the end of a path. Raises UsageError unless it fits exactly one.
    """
    try:
        lines = Path(file).read_text("utf-8-sig", "replace").splitlines()
    except OSError as error:
        raise common.UsageError(f"--label-files: {error}") from error
    found = {line.strip().removeprefix("./"): [] for line in lines if line.strip()}
    for row, path in enumerate(paths):
        parts = str(path).split("/")
        for start in range(len(parts)):
            if (end := "/".join(parts[start:])) in found:
                found[end].append(row)
    wrong = sorted(name for name, rows in found.items() if len(rows) != 1)
    if wrong or not found:
        what = f"{len(wrong)} of {len(found)} lines do not name exactly one training image: {', '.join(wrong[:3])}"
        raise common.UsageError(f"--label-files {file}: {what}")
    return torch.tensor(sorted({row for (row,) in found.values()}))


# ================================================== 3. classifiers of features
# These functions take tensors only. To copy one, also copy the functions that its docstring names.


def scores(logits, labels, num_classes, name="linear"):
    """Return the scores of logits (m, num_classes) for labels (m,), in percent: {name: float}.

    linear_top1; linear_top5 if there are more than five classes; linear_per_class, the mean over the classes of each
    class's top-1. name: prefix of the scores.
    """
    correct = logits.topk(min(5, num_classes), dim=1).indices == labels[:, None]
    top1, counts = correct[:, 0].double(), labels.bincount()
    per_class = (labels.bincount(top1) / counts)[counts > 0]
    top5 = {f"{name}_top5": 100 * correct.any(1).double().mean().item()} if num_classes > 5 else {}
    return {f"{name}_top1": 100 * top1.mean().item(), **top5, f"{name}_per_class": 100 * per_class.mean().item()}


def hold_out(labels, fraction, least=400):
    """Split the rows of labels (n,), on the CPU, at random: [(rows to fit, rows to choose by), ...].

    Each fold holds out a fraction of the rows. Folds are added, as in cross-validation, until `least` rows have been
    held out, or all but one row per class, which is always fitted. If each class has one row, none is held out.
    """
    order = torch.randperm(len(labels))
    last_of_class = dict(zip(labels[order].tolist(), order.tolist(), strict=True))  # the row that is always fitted
    free = order[~torch.isin(order, torch.tensor([*last_of_class.values()]))]
    size = max(1, int(fraction * len(labels)))
    folds = free.split(size)[: math.ceil(least / size)]
    return [(order[~torch.isin(order, held)], held) for held in folds]


def affine(x, mean, scale):
    """Return (x - mean) / scale of features (n, d), and a column of ones for the bias: (n, d + 1). No gradient."""
    x = F.pad(x.to(mean.dtype), (0, 1), value=1.0)
    x[:, :-1].sub_(mean).div_(scale)
    return x.detach()


def linear_probe(x, y, test_x, num_classes, lrs=None, epochs=50, batch_size=256, holdout=0.1):
    """Train a linear classifier on features by SGD with momentum 0.9. Held-out features choose its learning rate.

    x: (n, d) and test_x: (m, d), which are standardized by the mean and the standard deviation of x; a feature that
    does not vary in x, except for rounding, becomes 0. y: (n,) int64, on x's device. lrs: peak learning rates of cosine
    schedules; None: 13 from 10^-4.5 to 10^1.5. holdout: fraction of x that is held out to choose one of them, by
    cross-validation if that is less than 400 rows. If each class has one row, the fitted rows choose. The final fit
    uses all of x. Random numbers are torch's global ones.
    Returns {'logits': (m, num_classes), 'chosen': learning rate, 'held_out': {learning rate: percent}}.
    To copy it, also copy hold_out and affine, and delete common.progress.
    """
    mean, std = x.mean(0), x.std(0, correction=0)
    std = std.masked_fill(std <= 1e-6 * mean.abs(), math.inf)
    x, test_x = affine(x, mean, std), affine(test_x, mean, std)

    def fit(rows, lrs):  # with all learning rates at once: one weight (d + 1, num_classes) for each
        weight = x.new_zeros(x.shape[1], len(lrs), num_classes).requires_grad_()
        lr = x.new_tensor(lrs)
        optimizer = torch.optim.SGD([weight], momentum=0.9)
        for epoch in range(epochs):
            common.progress(f"probe of {len(lrs)} learning rate(s): epoch {epoch + 1} of {epochs}")
            batches = rows[torch.randperm(len(rows))].to(x.device).split(batch_size)
            for i, batch in enumerate(batches):
                logits = (x[batch] @ weight.flatten(1)).view(-1, num_classes)
                losses = F.cross_entropy(logits, y[batch].repeat_interleave(len(lrs)), reduction="none")
                # Each loss is scaled by its peak learning rate, which scales its gradient; SGD's own rate is the cosine
                loss = (lr * losses.view(-1, len(lrs)).mean(0)).sum()
                optimizer.param_groups[0]["lr"] = (1 + math.cos(math.pi * (epoch + i / len(batches)) / epochs)) / 2
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return weight.detach().unbind(1)

    lrs = sorted(set([10 ** (i / 2) for i in range(-9, 4)] if lrs is None else lrs))
    correct = [[] for _ in lrs]
    for rest, check in hold_out(y.cpu(), holdout):
        choosing = check if len(check) else rest
        for part, weight in zip(correct, fit(rest, lrs), strict=True):
            part.extend(((x[choosing] @ weight).argmax(1) == y[choosing]).tolist())
    percents = [100 * (sum(part) / len(part)) for part in correct]
    best = median_low(i for i, percent in enumerate(percents) if percent == max(percents))  # the middle one of ties
    (weight,) = fit(torch.arange(len(x)), [lrs[best]])
    return dict(logits=test_x @ weight, chosen=lrs[best], held_out=dict(zip(lrs, percents, strict=True)))


def logistic_regression(x, y, num_classes, strength, iterations=5000, tolerance=1e-6):  # iterations: LoGo's [P]
    """Fit a multinomial logistic regression with an L2 penalty by L-BFGS: weights (d + 1, num_classes).

    These are W and, in the last row, the bias b, which minimize sum_i CE(x_i W + b, y_i) + strength / 2 |W|^2.
    x: (n, d) float64. y: (n,) int64. strength: 1 / C of scikit-learn, but 2 / C for two classes, where scikit-learn
    penalizes one weight vector, the difference of the two here. tolerance: a warning is logged if an entry of the
    final gradient exceeds it (of the sum divided by n, with respect to b and the whitened weights V below). To copy it,
    replace common.log by print.
    """
    # L-BFGS finds V, with W = P V, where P whitens the features as far as the penalty allows: fewer iterations
    values, basis = torch.linalg.eigh(x.T @ x / len(x))
    decay = strength / len(x)
    scale = (values.clamp_min(0) / 4 + decay).rsqrt()[:, None]  # at most 1/4: the curvature of cross-entropy in a logit
    white = x @ (basis * scale.T)
    weight = x.new_zeros(x.shape[1] + 1, num_classes).requires_grad_()
    options = dict(tolerance_grad=tolerance, tolerance_change=0, history_size=20, line_search_fn="strong_wolfe")
    optimizer = torch.optim.LBFGS([weight], max_iter=iterations, max_eval=25 * iterations, **options)

    def closure():
        optimizer.zero_grad()
        penalty = decay / 2 * (scale * weight[:-1]).square().sum()
        loss = F.cross_entropy(torch.addmm(weight[-1], white, weight[:-1]), y) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    closure()  # to compute the gradient at the final weights
    if (left := weight.grad.abs().max().item()) > tolerance:
        common.log(f"warning: L-BFGS has not converged for strength {strength:.3g}: gradient {left:.1e}")
    v = weight.detach()
    return torch.cat([basis @ (scale * v[:-1]), v[-1:]])


def lbfgs_probe(x, y, test_x, rest, check, num_classes, strengths, metric="top1"):
    """Fit features by logistic regression. Held-out features choose the strength of its L2 penalty.

    x: (n, d) and test_x: (m, d), which are centered and divided by one number, the root mean square of x[rest]. So a
    strength means the same for every encoder, and directions keep their relative size. Computes in float64. y: (n,)
    int64. rest, check: rows to fit and rows to choose by; if check is empty, the fitted rows choose. The final fit uses
    all of x. metric: the score that chooses, top1 or per_class. Returns what `linear_probe` does.
    To copy it, also copy scores, affine and logistic_regression, and delete common.progress.
    """
    mean = x[rest].double().mean(0)
    scale = (x[rest] - mean).square().mean().sqrt().clamp_min(1e-12)
    x, test_x = affine(x, mean, scale), affine(test_x, mean, scale)
    strengths, percents = sorted(set(strengths), reverse=True), []
    choosing = check if len(check) else rest
    for i, strength in enumerate(strengths, start=1):
        common.progress(f"L-BFGS: strength {strength:.3g}, {i} of {len(strengths)}")
        weight = logistic_regression(x[rest, :-1], y[rest], num_classes, strength)
        logits = (x[choosing] @ weight).cpu()
        percents.append(scores(logits, y[choosing].cpu(), num_classes)[f"linear_{metric}"])
    best = median_low(i for i, percent in enumerate(percents) if percent == max(percents))  # the middle one of ties
    weight = logistic_regression(x[:, :-1], y, num_classes, strengths[best])
    return dict(logits=test_x @ weight, chosen=strengths[best], held_out=dict(zip(strengths, percents, strict=True)))


# ====================================================== 4. the probe and L-BFGS


def evaluate_features(args, device, encoder, info, train, val, test):
    """Fit the probe or L-BFGS to features: {"encoder" or a baseline: scores}.

    val: images that choose the strength for L-BFGS, and are then fitted, too; None: a part of `train` chooses. All
    processes compute features. The first process fits them.
    """
    lbfgs, num_classes = args.solver == "lbfgs", len(train.classes)
    torch.manual_seed(args.seed)
    y = torch.from_numpy(common.labels_of(train))
    folds = hold_out(y, args.holdout, least=1 if lbfgs else 400)
    if val is not None:
        y = torch.cat([y, torch.from_numpy(common.labels_of(val))])
        folds = [torch.arange(len(y)).split([len(train), len(val)])]
        train = ConcatDataset([train, val])
    held = sum(len(check) for _, check in folds)
    flag, metric = ("--strengths", args.metric) if lbfgs else ("--lrs", "top1")
    common.log(f"{flag}: chosen by {metric} on {held or len(y)} images, folds: {len(folds)}; refitted on all {len(y)}")
    encoders = {"encoder": encoder} | ({} if args.no_baselines else common.baselines(info, args.seed, len(train)))
    if lbfgs:
        encoders.pop("raw pixels", None)  # with thousands of numbers per image it takes minutes to hours
    options = dict(batch_size=args.batch_size, workers=args.workers, amp=common.use_bf16(args.amp, device))
    results = {}
    for name, network in encoders.items():
        x = [common.extract_features(network.to(device), images, info, device, **options) for images in (train, test)]
        x, test_x = (common.gather_rows(part, to_first=True) for part in x)
        if common.rank_and_world()[0] > 0:
            continue
        features = x.to(device), y.to(device), test_x.to(device)
        torch.manual_seed(args.seed)  # so that the probe has the folds that were logged
        if lbfgs:
            found = lbfgs_probe(*features, *folds[0], num_classes, args.strengths, args.metric)
        else:
            found = linear_probe(*features, num_classes, args.lrs, args.epochs, args.batch_size, args.holdout)
        results[name] = scores(found["logits"].cpu(), torch.from_numpy(common.labels_of(test)), num_classes)
        chosen, grid = found["chosen"], found["held_out"]
        text = "  ".join(f"{score} {value:.2f}%" for score, value in results[name].items())
        where = "of those held out" if held else "of the fitted images"
        common.log(f"{name:>10}  {text}  ({flag} {chosen:.3g}, {grid[chosen]:.2f}% {where})")
        if name == "encoder" and len(grid) > 1 and chosen in (min(grid), max(grid)):
            common.log(f"warning: the best of {flag} is at the edge of the grid: widen it")
    return common.all_gather_object(results)[0]


# ==================================================== 5. training on the images


def training_transform(args, info):
    """Return the augmentation of a training image: PIL image -> PIL image of the encoder's size, not normalized."""
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
            return self.head(features.to(self.head.weight.dtype))


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


def learning_rate(args, now):
    """Return the learning rate `now` epochs after the start, before a group's lr_scale.

    It changes every step of a linear warmup, then once per epoch: it is divided by 10 at each milestone or, without
    milestones, follows a cosine to args.min_lr over all epochs, the warmup's included, as in timm. PatchMix's: D4.
    """
    if args.protocol == "patchmix" and args.epochs >= 100:  # in fewer epochs it changes every step (D4)
        now = max(0, int(now) - 1)  # timm's scheduler is called after each epoch
    peak = args.lr * args.batch_size / 256
    if now < args.warmup:
        return args.warmup_lr + (peak - args.warmup_lr) * now / args.warmup
    if args.protocol != "patchmix":
        now = int(now)
    if args.milestones:
        return peak * 0.1 ** sum(now / args.epochs >= milestone for milestone in args.milestones)
    return args.min_lr + (peak - args.min_lr) * (1 + math.cos(math.pi * now / args.epochs)) / 2


def train_protocol(args, device, encoder, info, train, test):
    """Train by a paper's protocol, resuming a run in --out: {"encoder": scores of the last epoch}."""
    rank, world = common.rank_and_world()
    torch.manual_seed(args.seed)

    # Data
    common.split_batch(args.batch_size, len(train), world)
    images = common.Views(train, [training_transform(args, info)])
    sampler = DistributedSampler(images, world, rank, seed=args.seed, drop_last=True)
    options = common.loader_options(args.workers, device)
    loader = DataLoader(images, args.batch_size // world, sampler=sampler, drop_last=True, **options)
    labels, num_classes = torch.from_numpy(common.labels_of(train)).to(device), len(train.classes)
    erase = RandomErasing(args.erase, mode="pixel", device=device)
    mix = None
    if args.mixup or args.cutmix:
        if args.batch_size // world % 2:
            raise common.UsageError(f"--batch-size {args.batch_size}: mixup needs an even number of images per process")
        mix = Mixup(args.mixup, args.cutmix, label_smoothing=args.smoothing, num_classes=num_classes)

    # Model and optimizer
    weights = encoder.state_dict()
    if args.finetune and args.drop_path:
        encoder = common.build_backbone(info, drop_path_rate=args.drop_path)
        encoder.load_state_dict(weights)
    elif args.finetune:
        for module in encoder.modules():
            if isinstance(module, timm.layers.DropPath):  # some of timm's encoders drop paths by default
                module.drop_prob = 0.0
    width = common.feature_width(encoder, info["image_size"])
    model = Classifier(encoder.requires_grad_(args.finetune), width, num_classes)
    if args.finetune or args.protocol != "patchmix":  # PatchMix's released code leaves it as torch initializes it
        nn.init.normal_(model.head.weight, std=0.01)
        nn.init.zeros_(model.head.bias)
    if args.finetune and world > 1 and device.type == "cuda":  # torch has none for CPUs
        model = timm.layers.convert_sync_batchnorm(model)  # torch's would lose the activation of a BatchNormAct2d
    model.to(device, memory_format=torch.channels_last)
    model.train(args.finetune)
    optimizer = make_optimizer(args, model)

    # The run. Its configuration has a hash of the encoder's weights instead of their path, and the test images, but not
    # the probe's solver and baselines
    amp = common.use_bf16(args.amp, device)
    digest = hashlib.sha256(b"".join(x.float().numpy().tobytes() for x in weights.values())).hexdigest()[:16]
    overrides = dict(checkpoint=digest, test_images=common.fingerprint(test), solver=None, no_baselines=None)
    state = dict(model=model if args.finetune else model.head, optimizer=optimizer)
    derived = dict(peak_lr=args.lr * args.batch_size / 256, bf16=amp)
    config, records = common.open_run(args, train, state, derived, overrides)
    del info["data_dir"]  # backbone.pt has no paths
    tuned = info | dict(encoder="fine-tuned", classes=[*map(str, train.classes)]) if args.finetune else None
    ddp = DistributedDataParallel(model) if world > 1 else model
    ddp.broadcast_buffers = False  # batch norm does not need it; torch 2.13 renames the argument, not the attribute

    for epoch in range(len(records), args.epochs):
        sampler.set_epoch(epoch)
        timm.utils.random_seed(hash((args.seed, epoch, rank)) % 2**32)  # torch's, and numpy's and Python's for timm
        meter = common.Meter(epoch, args.epochs, len(loader), args.batch_size)
        for step, ((crops,), rows) in enumerate(loader):
            lr = learning_rate(args, epoch + step / len(loader))
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            x, y = crops.to(device, non_blocking=True), labels[rows.to(device, non_blocking=True)]
            x = common.normalize(x / 255, info["mean"], info["std"])
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
        common.save_run(args.out, config, tuned, state, records)
        common.log_epoch(f"epoch {epoch + 1}/{args.epochs}", records, ("loss", "train_top1", "images_per_s"))

    logits = common.extract_features(model, test, info, device, args.batch_size // world, args.workers, amp)
    found = scores(common.gather_rows(logits), torch.from_numpy(common.labels_of(test)), num_classes, args.method)
    if not found.items() <= records[-1].items():  # a finished run that is evaluated again has these scores already
        records[-1] |= found
        common.save_run(args.out, config, tuned, state, records)  # again: a damaged test image must not cost the epoch
    common.log_epoch(f"finished: {args.out}", records)
    return {"encoder": found}


def main(args, train=None, test=None):
    """Evaluate an encoder. Return {"encoder" or a baseline: {"linear_top1": percent, ...}}.

    args: from `parse_args`. train, test: datasets with items (PIL image, label), `targets` and `classes`, which are
    used instead of --dataset. The caller's random numbers and modes of autograd stay as they are.
    """
    one_fits = args.protocol in (None, "probe") and not args.finetune  # the features, while the other processes wait
    device, *_ = common.init_distributed(args.device, timeout=datetime.timedelta(hours=24 if one_fits else 1))
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        gpus = [device] if device.type == "cuda" else []
        with torch.inference_mode(False), torch.autocast(device.type, enabled=False), torch.random.fork_rng(gpus):
            encoder, info = common.open_encoder(args)
            train, val, test, info = open_labeled_data(args, info, train, test)
            args = complete_args(args, info)
            if args.protocol == "probe":
                return evaluate_features(args, device, encoder, info, train, val, test)
            return train_protocol(args, device, encoder, info, train, test)
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


# =============================================== 6. differences from the papers

# D1 Incomplete batches are dropped.
# D2 Images are resized with the interpolation that the encoder was trained with, and bilinearly for third-party
#    checkpoints. PatchMix's released protocol resizes CIFAR's images to 36 px, crops the center, and reports the best
#    epoch on the test set. Here: neither.
# D3 The encoder computes in bf16 on GPUs that support it (`--amp off`: in float32, convolutions in TF32). Linear
#    classifiers are trained in float32, and by L-BFGS in float64.
# D4 PatchMix's protocols in fewer than 100 epochs. Released: the learning rate changes once per epoch, an epoch late,
#    so that two epochs of fine-tuning would never leave the warmup. Here: it changes every step.
# D5 A warmup takes at most a quarter of the run.
# D6 CLIM's Table 2 averages five trials. Here: one per --seed, which initializes the classifier and draws the crops.


if __name__ == "__main__":
    common.start(main, parse_args)
