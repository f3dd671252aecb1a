"""Judge an encoder with labels: a linear classifier on its frozen features, or fine-tuning of all layers.

The default, `--protocol probe`, computes features once, standardises them, and trains a classifier on them for a whole
grid of learning rates at once, in seconds. The rate is chosen on a tenth of the training set; the test set is used
once. Beside the number stand two floors: raw pixels, and the same encoder untrained.

    python eval_linear.py runs/patchmix-patterns-vit_micro-s0
    python eval_linear.py RUN --dataset cifar100 --data-dir DIR                # transfer
    python eval_linear.py RUN --solver lbfgs --metric per_class                # transfer as LoGo's Table 5
    torchrun --nproc_per_node=8 eval_linear.py RUN --data-dir DIR --protocol moco
    python eval_linear.py RUN --finetune --label-fraction 0.01

The papers' own protocols (`--protocol moco|jcl|clim|jointcrop|jointcrop-small|patchmix`) train on random crops of the
images, on any number of processes, and go on where they were stopped, bit for bit; the last epoch is reported, never
the best. `--finetune` trains all layers: PatchMix's recipe for ViTs, CLIM's for other encoders. Every value is a flag,
and is printed. Your own encoder and data: eval_linear.main(args, encoder=MODULE, train=DATASET, test=DATASET).

Departures: an epoch is whole batches, the images over are left out of it. Mixup and CutMix pair the images of a
process, and drop-path draws for each, so a fine-tuning with them depends on the number of processes; nothing else
does, but for rounding. Images are resized by the interpolation that the encoder was trained with; LoGo's released
evaluation is bicubic. The probe and L-BFGS compute features on all processes and fit on each: with several of them, up
to 2**30 numbers (4 GiB).
"""

import argparse
import copy
import hashlib
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

import common

# ---------------------------------------------------------- 1. recipes and arguments

# fmt: off
# Milestones and warm-up end at shares of the run and at epochs; the rate is that of batch size lr_batch.
# [P] printed in the paper, [C] its released code, [I] inference: the paper is silent.
COMMON = dict(
    optimizer="sgd", momentum=0.9, nesterov=False, lr_batch=256, weight_decay=0.0, milestones=(), lr_per="epoch",
    warmup=0, warmup_lr=0.0, min_lr=0.0, crop_scale=(0.08, 1.0), pad=0, randaug=0, erase=0.0, mixup=0.0, cutmix=0.0,
    smoothing=0.0,
)
MOCO = dict(COMMON, epochs=100, batch_size=256, lr=30.0, milestones=(0.6, 0.8))  # JCL, CLIM [P], decay 0 [C]
LINEAR = ("moco", "jcl", "clim", "jointcrop", "jointcrop-small", "patchmix")
RECIPES = {  # "mode protocol", and what an encoder or a data set changes in it: "mode protocol trait"
    "probe probe": dict(epochs=50, batch_size=256, lrs=None, holdout=0.1),  # ours
    "lbfgs lbfgs": dict(  # LoGo, supplementary 3: L-BFGS, L2, 5000 iterations [P]; grid: BYOL's and SimCLR's [I]
        batch_size=256, strengths=None, holdout=0.1, metric="top1", iterations=5000, tolerance=1e-6,
    ),
    "linear moco": MOCO,
    "linear jcl": MOCO,
    "linear jcl imagenet100": dict(lr=10.0),  # App. D [P]
    "linear clim": MOCO,
    "linear jointcrop": dict(COMMON, epochs=90, batch_size=1024, lr=0.1),  # MoCo v3's [C]
    "linear jointcrop vit": dict(lr=3.0),
    "linear jointcrop-small": dict(  # CIFAR, STL-10, Tiny-ImageNet: ContrastiveCrop's [C]
        COMMON, epochs=100, batch_size=512, lr=10.0, lr_batch=512, milestones=(0.6, 0.8),
    ),
    # 4.1.3: 100 epochs [P]; the rest [C]; the rate for encoders that are no ViT-T, -S, -B: as S, for vit_micro as T [I]
    "linear patchmix": dict(COMMON, epochs=100, batch_size=1024, lr=0.02, nesterov=True),
    "linear patchmix vit_tiny": dict(lr=0.05),
    "linear patchmix vit_base": dict(lr=0.01),
    "linear patchmix cifar10": dict(batch_size=256),
    "linear patchmix cifar100": dict(batch_size=256),
    # 4.1.3: 100 epochs [P]; the rest [C]; the batch as in its linear protocol, each step a rate [I]
    "finetune patchmix": dict(
        COMMON, optimizer="adamw", epochs=100, batch_size=1024, lr=5e-4, head_lr=None, weight_decay=0.05,
        layer_decay=0.75, lr_per="step", warmup=10, warmup_lr=1e-6, min_lr=1e-5, drop_path=0.1, randaug=9, erase=0.25,
        mixup=0.8, cutmix=1.0, smoothing=0.1,
    ),
    "finetune patchmix vit_tiny": dict(lr=1e-3),
    "finetune patchmix cifar10": dict(batch_size=256, pad=4),
    "finetune patchmix cifar100": dict(batch_size=256, pad=4),
    "finetune clim": dict(  # 4.2 [P]; batch and weight decay [I]
        COMMON, epochs=60, batch_size=256, lr=1e-4, head_lr=10.0, milestones=(1 / 3, 2 / 3), layer_decay=1.0,
        drop_path=0.0,
    ),
}
RUN = dict(resume="auto", max_steps=None, save_every=1, keep_every=0, eval_every=0, tensorboard=False)
MOST = 1e9
FLAGS = {  # name: (type, least, most, help)
    "epochs": (int, 1, MOST, "(the probe: 50)"),
    "batch_size": (int, 1, MOST, "a training's global batch; else the images encoded at once, by each process"),
    "lr": (float, 1e-9, MOST, "rate at batch --lr-batch, scaled linearly with the batch"),
    "lr_batch": (int, 1, MOST, "the batch that --lr is for"),
    "head_lr": (float, 1e-9, MOST, "fine-tuning: rate of the new classifier, at --lr-batch"),
    "layer_decay": (float, 1e-9, 1, "fine-tuning: each layer's rate is this times that of the layer above"),
    "momentum": (float, 0, 1, "of SGD"),
    "weight_decay": (float, 0, MOST, "of the optimizer"),
    "warmup": (float, 0, MOST, "epochs of linear warm-up"),
    "warmup_lr": (float, 0, MOST, "the rate it begins with"),
    "min_lr": (float, 0, MOST, "the rate that a cosine ends with"),
    "pad": (int, 0, MOST, "pixels: random crops of the padded image instead of resized ones"),
    "drop_path": (float, 0, 0.99, "fine-tuning: stochastic depth"),
    "randaug": (int, 0, 10, "RandAugment's magnitude (timm rand-mX-mstd0.5-inc1); 0: none"),
    "erase": (float, 0, 1, "probability of random erasing"),
    "mixup": (float, 0, MOST, "alpha; 0: none"),
    "cutmix": (float, 0, MOST, "alpha; 0: none"),
    "smoothing": (float, 0, 0.99, "of the labels"),
    "max_steps": (int, 1, MOST, "stop and save after N steps, counted over resumes"),
    "save_every": (int, 1, MOST, "epochs (1)"),
    "eval_every": (int, 0, MOST, "epochs; 0: the last one only (0)"),
    "holdout": (float, 0.001, 0.999, "share of the training set that chooses the rate or the strength (0.1)"),
    "iterations": (int, 1, MOST, "L-BFGS, at most, for each strength (5000)"),
    "tolerance": (float, 1e-12, MOST, "L-BFGS: converged when no entry of the whitened gradient is above (1e-6)"),
    "label_fraction": (float, 1e-9, 1, "train on this share of the labels, the same count for each class"),
}
# fmt: on


def parse_args(argv=None):
    parser = common.evaluation_parser("eval_linear.py", __doc__)
    positive, share = common.number(float, 1e-9), common.number(float, 1e-9, 1)
    add = parser.add_argument
    add("--protocol", choices=("probe", *LINEAR), help="how the classifier is trained (probe)")
    add("--finetune", action="store_true", help="train all layers; --protocol patchmix (ViTs) or clim (others)")
    add("--solver", choices=("sgd", "lbfgs"), help="lbfgs: logistic regression on cached features")
    add("--label-files", metavar="LIST", help="train on these files: one a line, base name or path in train/")
    add("--lrs", type=positive, nargs="+", metavar="X", help="the probe's grid of rates (0.00003 to 32)")
    add("--strengths", type=positive, nargs="+", metavar="X", help="L-BFGS: L2 strengths (45, 1e-6 to 1e5)")
    add("--metric", choices=("top1", "per_class"), help="L-BFGS: what chooses the strength (top1)")
    add("--out", metavar="DIR", help="folder of a training (runs/...); the same command goes on from it")
    add = parser.add_argument_group("what the protocols set").add_argument
    add("--optimizer", choices=("sgd", "adamw"))
    add("--nesterov", action=argparse.BooleanOptionalAction)
    add("--milestones", type=share, nargs="*", metavar="X", help="shares of the run: rate / 10; none: a cosine")
    add("--lr-per", choices=("epoch", "step"), help="how often the rate changes")
    add("--crop-scale", type=share, nargs=2, metavar=("LO", "HI"), help="area of the random resized crops")
    for name, (kind, least, most, text) in FLAGS.items():
        metavar = "N" if kind is int else "X"
        add("--" + name.replace("_", "-"), type=common.number(kind, least, most), metavar=metavar, help=text)
    args = parser.parse_args(argv)
    check_flags(args)
    return args


def check_flags(args):
    """Set args.mode, one of probe, lbfgs, linear, finetune; refuse flags that contradict it or each other."""
    args.mode = "lbfgs" if args.solver == "lbfgs" else "probe"
    if args.finetune or args.protocol in LINEAR:
        args.mode = "finetune" if args.finetune else "linear"
        if args.solver:
            common.fail(f"--solver {args.solver} is for cached features: leave out --finetune and --protocol")
    if args.finetune and args.protocol not in (None, "patchmix", "clim"):
        common.fail(f"--finetune goes with --protocol patchmix or clim, not {args.protocol}")
    known = {"label_fraction"}.union(*(recipe for name, recipe in RECIPES.items() if name.split()[0] == args.mode))
    known |= {"out", *RUN} if args.mode in ("linear", "finetune") else set()
    for name in sorted({"out", "lrs", "strengths", "metric", *COMMON, *FLAGS} - known):
        if getattr(args, name) is not None:
            common.fail(f"--{name.replace('_', '-')} is not used by this evaluation ({args.mode})")
    if args.label_fraction and args.label_files:
        common.fail("give --label-fraction or --label-files, not both")
    if args.crop_scale and args.crop_scale[0] > args.crop_scale[1]:
        common.fail("--crop-scale: give the smaller area first")


def resolve(args, info):
    """Fill in from the recipe what the command line left open, for this encoder and data set, and name the run."""
    name = re.sub("^deit3?_", "vit_", info["timm_name"] or "own")
    vit = name.startswith("vit_")
    if args.mode in ("probe", "lbfgs"):
        args.protocol = args.mode
    args.protocol = args.protocol or ("patchmix" if vit else "clim")
    recipe = dict(RECIPES[f"{args.mode} {args.protocol}"])
    for trait in ("vit" * vit, "_".join(name.split("_")[:2]), args.dataset):
        recipe |= RECIPES.get(f"{args.mode} {args.protocol} {trait}", {})
    if name == "own" and "layer_decay" in recipe:  # of whose layers nothing is known
        recipe |= dict(layer_decay=1.0, drop_path=0.0)
        if args.drop_path or args.layer_decay not in (None, 1.0):
            common.fail("--drop-path and --layer-decay need an encoder of timm's, not your own")
    if info["image_size"] > 32 and "pad" in recipe:
        recipe["pad"] = 0
    if "warmup" in recipe:  # a short run warms up in proportion
        recipe["warmup"] *= min(1, (args.epochs or recipe["epochs"]) / recipe["epochs"])
    args.values = list(recipe)
    for key, value in (RUN | recipe).items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)
    if args.mode in ("probe", "lbfgs"):
        return
    if args.optimizer == "sgd" and args.nesterov and not args.momentum:
        common.fail("--momentum 0 needs --no-nesterov")
    if args.mode == "finetune" and args.head_lr and args.layer_decay < 1:
        common.fail("--head-lr goes with --layer-decay 1")
    world = common.rank_and_world()[1]
    if args.batch_size % world or (args.mixup + args.cutmix > 0 and args.batch_size // world % 2):
        common.fail(f"--batch-size {args.batch_size}: {world} process(es) get equal parts, with mixup even numbers")
    path = Path(args.checkpoint or args.arch or "own").resolve()
    source = path.name if path.is_dir() or not args.checkpoint else path.parent.name
    labels = f"-{args.label_fraction:g}" if args.label_fraction else "-listed" if args.label_files else ""
    args.method, args.bf16 = f"{args.mode} {args.protocol}", args.amp  # as common.Run knows them
    args.name = f"{args.mode}-{args.protocol}-{args.dataset}-{source}-s{args.seed}{labels}"


# ------------------------------------------------------------- 2. labels


def balanced_share(labels, fraction, seed):
    """Sorted rows of a share of the labels (n,), as many for each class up to one, and at least one; fixed by the seed.

    The classes give images in turn, so that the others make up for a class that has too few, and a smaller share is
    part of a larger one.
    """
    classes, labels = np.unique(labels, return_inverse=True)
    order = torch.randperm(len(labels), generator=common.generator(seed, 4)).numpy()
    first = torch.randperm(len(classes), generator=common.generator(seed, 5)).numpy()  # which classes give one more
    turn = np.empty(len(labels), np.int64)
    for c in range(len(classes)):
        mine = order[labels[order] == c]
        turn[mine] = np.arange(len(mine))
    count = max(round(fraction * len(labels)), len(classes))
    return np.sort(np.lexsort((first[labels], turn))[:count])


def listed_files(images, root, file):
    """Rows of the files that a list names, one a line: base names (SimCLR's splits) or paths relative to `root`."""
    if images.paths is None:
        common.fail("--label-files needs images in files: --data-dir with train/, one folder a class")
    found = {}
    for i in range(len(images)):
        for name in {os.path.basename(images.path(i)), os.path.relpath(images.path(i), root)}:
            found.setdefault(name, []).append(i)
    try:
        names = dict.fromkeys(line.strip() for line in Path(file).read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        common.fail(f"--label-files {file} cannot be read: {' '.join(str(error).split())}")
    odd = [name for name in names if len(found.get(name, ())) != 1]
    if odd or not names:
        common.fail(f"--label-files {file}: not the name of one file in {root}: {', '.join(odd[:5]) or 'nothing'}")
    return np.unique([found[n][0] for n in names])


def choose_labels(args, train):
    """The training images whose labels may be used."""
    if args.label_fraction is None and args.label_files is None:
        return train
    if args.label_files:
        chosen = train.subset(listed_files(train, Path(args.data_dir or "data") / "train", args.label_files))
    else:
        chosen = train.subset(balanced_share(train.labels, args.label_fraction, args.seed))
    counts = np.bincount(chosen.labels, minlength=len(train.classes))
    each = f"{counts.min()} to {counts.max()} for each class"
    common.say(f"labels: {len(chosen)} of {len(train)} training images, {each}")
    return chosen


# ------------------------------------------------------- 3. linear probe


@torch.no_grad()
def linear_probe(train_x, train_y, test_x, num_classes, seed=0, epochs=50, batch_size=256, lrs=None, holdout=0.1):
    """A linear classifier on cached features: a grid of learning rates at once, the best by a held-out part.

    train_x (n, d), test_x (m, d) are standardised by the training features' mean and std; train_y (n,) int64 in
    [0, num_classes). SGD, momentum 0.9, cosine. The rate is chosen on `holdout` of the training set, which the test
    set never sees, and the classifier is then trained on all of it.
    Returns {'logits': (m, num_classes), 'lr', 'at_edge': bool, 'held_out': {lr: percent}}.
    """
    lrs = torch.tensor(lrs or [10.0**e for e in np.arange(-4.5, 1.51, 0.5)])
    mean, std = train_x.mean(0), train_x.std(0, correction=0).clamp_min(1e-6)
    train_x, test_x = (F.pad((x - mean) / std, (0, 1), value=1.0) for x in (train_x, test_x))  # a last 1 for the bias
    order = torch.randperm(len(train_x), generator=common.generator(seed, 2))
    check, rest = order.split([held := int(holdout * len(order)), len(order) - held])

    def fit(rows, rates):
        weight = train_x.new_zeros(train_x.shape[1], len(rates), num_classes)
        velocity, rates = torch.zeros_like(weight), rates.to(weight).view(-1, 1)
        for epoch in range(epochs):
            batches = rows[torch.randperm(len(rows), generator=common.generator(seed, 3, epoch))].split(batch_size)
            for i, batch in enumerate(batches):
                x, rate = train_x[batch], 0.5 * (1 + math.cos(math.pi * (epoch + i / len(batches)) / epochs))
                error = logits(x, weight).softmax(-1)
                error[torch.arange(len(batch)), :, train_y[batch]] -= 1  # the gradient of cross-entropy
                velocity = 0.9 * velocity + (x.T @ error.flatten(1)).view_as(weight) / len(batch)
                weight = weight - rate * rates * velocity
        return weight

    def logits(x, weight):  # one product for all rates: (n, d) and (d, rates, classes) -> (n, rates, classes)
        return (x @ weight.flatten(1)).view(len(x), *weight.shape[1:])

    grid, check = fit(rest, lrs), check if held else order
    guesses = torch.cat([logits(train_x[part], grid).argmax(-1) for part in check.split(4096)])
    right = (guesses == train_y[check][:, None]).float().mean(0)
    best = int(right.argmax())
    held_out = {f"{lr:.3g}": 100 * r for lr, r in zip(lrs.tolist(), right.tolist(), strict=True)}
    tested = logits(test_x, fit(order, lrs[best : best + 1]))[:, 0]
    return dict(logits=tested, lr=lrs[best].item(), at_edge=best in (0, len(lrs) - 1), held_out=held_out)


def scores(logits, labels, num_classes):
    """{linear_top1, linear_top5 (more than five classes), linear_per_class (mean over classes)}, in percent."""
    ranked = logits.topk(min(5, num_classes), dim=1).indices == labels[:, None]
    right = ranked[:, 0].float()
    per_class = torch.stack([right[labels == c].mean() for c in labels.unique()])
    top5 = {"linear_top5": 100 * ranked.any(1).float().mean().item()} if num_classes > 5 else {}
    return {"linear_top1": 100 * right.mean().item(), **top5, "linear_per_class": 100 * per_class.mean().item()}


# --------------------------------- 4. logistic regression by L-BFGS


def logistic_regression(x, y, num_classes, strength, start=None, iterations=5000, tolerance=1e-6):
    """Multinomial logistic regression with L2: minimises sum_i CE(x_i W + b, y_i) + strength / 2 |W|^2, the bias free.

    The strength is 1 / C of scikit-learn. x (n, d) float64, y (n,) int64; the sum is divided by n, which leaves the
    minimum where it is. start: weights to begin from. Returns (weights (d + 1, num_classes), the bias last; largest
    entry of the gradient, which is converged below `tolerance`).

    L-BFGS works on W = P V, where P whitens the features as far as the penalty lets it: the minimum is the same, but a
    few strong directions no longer make thousands of iterations of what takes tens.
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


def lbfgs_probe(x, y, check, test_x, num_classes, strengths, metric="top1", iterations=5000, tolerance=1e-6):
    """Logistic regression whose L2 strength is chosen on a validation part; then all of x is fitted.

    x (n, d), test_x (m, d): features; x of training and validation images, check: rows of the latter. Features are
    centred (the free bias makes that no difference) and divided by one number, their root mean square, so that a
    strength means the same for every encoder while directions keep their share; all in float64. From strong to weak,
    each fit begins where the last one ended. strengths: None: 45 from 1e-6 to 1e5. Returns {'logits': (m,
    num_classes), 'lr': the strength, 'at_edge', 'held_out': {strength: percent}}.
    """
    rest = torch.ones(len(x), dtype=torch.bool, device=x.device)
    rest[check] = False
    mean = x[rest].double().mean(0)
    scale = (x[rest] - mean).square().mean().sqrt().clamp_min(1e-12)
    x, test_x = (x - mean) / scale, (test_x - mean) / scale
    weight, best, start, held_out, unfinished = None, None, None, {}, []
    fit_x, fit_y, check_x, check_y = x[rest], y[rest], x[check], y[check].cpu()
    for strength in sorted(set(strengths or np.logspace(-6, 5, 45).tolist()), reverse=True):
        weight, gradient = logistic_regression(fit_x, fit_y, num_classes, strength, weight, iterations, tolerance)
        logits = torch.addmm(weight[-1], check_x, weight[:-1]).cpu()
        held_out[strength] = scores(logits, check_y, num_classes)[f"linear_{metric}"]
        if best is None or held_out[strength] > held_out[best]:  # of equals the strongest
            best, start = strength, weight
        unfinished += [(strength, gradient)] * (gradient > tolerance)
    weight, gradient = logistic_regression(x, y, num_classes, best, start, iterations, tolerance)
    for strength, left in unfinished + [(best, gradient)] * (gradient > tolerance):
        late = f"has not converged in {iterations} iterations: gradient {left:.1e}"
        common.say(f"warning: strength {strength:.3g} {late}")
    at_edge = len(held_out) > 1 and best in (min(held_out), max(held_out))
    return dict(logits=torch.addmm(weight[-1], test_x, weight[:-1]), lr=best, at_edge=at_edge, held_out=held_out)


# --------------------------------------- 5. on cached features: probe and L-BFGS


def open_validation(args, train, test):
    """(validation, test): where --data-dir has val/ and test/ both, they are that; else (None, test)."""
    root, parts = Path(args.data_dir or "."), ("train", "val", "test")
    if args.mode != "lbfgs" or not args.data_dir or not all((root / part).is_dir() for part in parts):
        return None, test
    judged = common.read_folder(args.dataset, root / "test", train.classes, True)
    common.say(f"val/ and test/ are both there: val/ chooses, test/ with its {len(judged)} images is judged")
    return test, judged


def evaluate_cached(args, device, encoder, info, train, test):
    """The probe or L-BFGS, on features that are computed once, of the encoder and of its floors: {name: scores}."""
    validation, test = open_validation(args, train, test)
    parts = [part for part in (train, validation, test) if part is not None]
    labels = [torch.from_numpy(part.labels) for part in parts]
    train_y, test_y, classes = torch.cat(labels[:-1]).to(device), labels[-1], len(train.classes)
    order = torch.randperm(len(train), generator=common.generator(args.seed, 2))
    check = order[: max(1, int(args.holdout * len(train)))]
    if validation is not None:
        check = len(train) + torch.arange(len(validation))
    if args.mode == "lbfgs":
        common.say(f"L-BFGS: {len(check)} images choose the strength by {args.metric}; all {len(train_y)} are fitted")
    chosen, flag = ("rate", "--lrs") if args.mode == "probe" else ("strength", "--strengths")
    results = {}
    for name, network in {"encoder": encoder, **common.floor_encoders(args, info, device, len(train))}.items():
        if name == "raw pixels" and args.mode == "lbfgs" and len(train) > 10_000:
            continue  # 3,072 numbers an image: hours
        if common.rank_and_world()[1] > 1 and len(train_y) * common.output_width(network, info["image_size"]) > 2**30:
            common.fail(f"{len(train_y)} images' features are over 2**30 numbers for each process: start one")
        options = dict(batch_size=args.batch_size, workers=args.workers, amp=args.amp)
        *train_x, test_x = (common.extract_features(network, x, info, device, **options).to(device) for x in parts)
        train_x = torch.cat(train_x)
        if args.mode == "probe":
            options = dict(lrs=args.lrs, holdout=args.holdout)
            found = linear_probe(train_x, train_y, test_x, classes, args.seed, args.epochs, **options)
        else:
            options = (args.strengths, args.metric, args.iterations, args.tolerance)
            found = lbfgs_probe(train_x, train_y, check.to(device), test_x, classes, *options)
        results[name] = scores(found["logits"].cpu(), test_y, classes)
        held_out = f"{chosen} {found['lr']:.3g}, {max(found['held_out'].values()):.2f} % held out"
        common.say(f"{name:>10}  {show(results[name])}  ({held_out})")
        if found["at_edge"]:
            common.say(f"warning: the best {chosen} is at the edge of the grid, widen it: {flag}; {found['held_out']}")
    return results


def show(result):
    return "  ".join(f"{k} {v:.2f} %" for k, v in result.items())


# ------------------------------------- 6. the papers' protocols: training


class TrainingViews(common.Views):
    """One view of each image, a random resized crop (or a crop of the padded image), with RandAugment if asked for.

    The flip, which follows on the device, might as well come before: RandAugment treats left and right alike.
    """

    def __init__(self, images, args, info):
        size, pad = info["image_size"], args.pad
        if pad and (images.array is None or images.array.shape[1:3] != (size, size)):
            common.fail(f"--pad {pad} needs images of {size} x {size} px, decoded in memory: give --pad 0")
        if pad:
            array = np.pad(images.array, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
            images = common.ImageSet(images.name, images.labels, images.classes, array)
        super().__init__(images, self.draw, common.CROP_DRAWS + common.COLOUR_DRAWS, args.seed, info["interpolation"])
        self.args, self.size, self.randaug = args, size, None
        if args.randaug:
            options = dict(translate_const=int(0.45 * size), img_mean=tuple(round(255 * m) for m in info["mean"]))
            # At 10, "posterize" would keep 0 bits, which Pillow 13 refuses.
            options |= dict(interpolation=common.RESAMPLE[info["interpolation"]], magnitude_max=9.99)
            self.randaug = rand_augment_transform(f"rand-m{args.randaug}-mstd0.5-inc1", options)

    def draw(self, index, sizes, draws):
        """Boxes (n, 4) and flips for the images' sizes (n, 2) and uniform draws (n, D): what `common.Views` calls."""
        crop, colour = np.split(draws, [common.CROP_DRAWS], axis=1)
        box = common.random_resized_crop(sizes, crop, self.args.crop_scale)
        if self.args.pad:
            corner = np.floor(crop[:, 20:] * (2 * self.args.pad + 1)).astype(np.int64)
            box = np.concatenate([corner, np.full_like(corner, self.size)], 1)
        return [(index, box, self.size)], [common.random_colour(colour)]

    def __getitems__(self, keys):
        batch = super().__getitems__(keys)
        for view, key in zip(batch["views"][0] if self.randaug else (), keys, strict=False):
            seed_libraries(self.seed, 6, *key)
            image = self.randaug(Image.fromarray(view.permute(1, 2, 0).numpy()))
            view.copy_(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        return batch


def seed_libraries(*keys):
    """timm's augmentations draw from the global generators: make what they draw depend on integer keys only."""
    number = common.generator(*keys).initial_seed()
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def make_network(args, encoder, info, num_classes, device):
    """(network, head): what is trained and its new linear layer, N(0, 0.01) and bias 0. Frozen: the head is all."""
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
    """SGD or AdamW. A group's rate is the schedule's times its lr_scale: --layer-decay's power, or --head-lr / --lr."""
    if args.mode == "finetune" and not args.head_lr:
        names = network.no_weight_decay() if hasattr(network, "no_weight_decay") else ()
        groups = param_groups_layer_decay(network, args.weight_decay, names, layer_decay=args.layer_decay)
    else:
        new = {id(p) for p in head.parameters()}
        groups = [dict(params=[p for p in network.parameters() if id(p) not in new], lr_scale=1.0)]
        scale = args.head_lr / args.lr if args.mode == "finetune" else 1.0
        groups = [g for g in groups if g["params"]] + [dict(params=[*head.parameters()], lr_scale=scale)]
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, weight_decay=args.weight_decay)
    return torch.optim.SGD(
        groups, lr=0.0, momentum=args.momentum, nesterov=args.nesterov, weight_decay=args.weight_decay
    )


def learning_rate(args, step, steps_per_epoch):
    """The rate of a step, before a group's lr_scale: warm-up, then by 10 at each milestone, or a cosine to min_lr."""
    epoch = step / steps_per_epoch if args.lr_per == "step" else step // steps_per_epoch
    peak = args.lr * args.batch_size / args.lr_batch
    if epoch < args.warmup:
        return args.warmup_lr + (peak - args.warmup_lr) * epoch / args.warmup
    if args.milestones:
        return peak * 0.1 ** sum(epoch / args.epochs >= m for m in args.milestones)
    turn = math.pi * (epoch - args.warmup) / (args.epochs - args.warmup)
    return args.min_lr + (peak - args.min_lr) * (1 + math.cos(turn)) / 2


def train_step(args, encoder, wrapped, optimizer, batch, labels, step, steps, info, device):
    """One step on this process's images. Returns {loss, train_top1 (percent): 0-d tensors, lr}.

    wrapped: the network, or the classifier of a frozen encoder, maybe in DDP, which averages the gradients.
    """
    (x,) = common.colour_views(batch, device)
    x, y = common.normalize(x, info["mean"], info["std"]), labels[batch["index"]].to(device, non_blocking=True)
    truth = y
    for image, i in zip(x if args.erase else (), batch["index"].tolist(), strict=False):
        seed_libraries(args.seed, 7, step // steps, i)
        RandomErasing(args.erase, mode="pixel", device=device)(image)
    seed_libraries(args.seed, step, 0, common.rank_and_world()[0])  # mixup and drop-path
    if args.mixup or args.cutmix:
        x, y = Mixup(args.mixup, args.cutmix, label_smoothing=args.smoothing, num_classes=args.num_classes)(x, y)
    lr = learning_rate(args, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    frozen = args.mode == "linear"
    with torch.autocast(device.type, torch.bfloat16, enabled=args.amp), torch.set_grad_enabled(not frozen):
        logits = (encoder if frozen else wrapped)(x).flatten(1)
    logits = wrapped(logits.float()) if frozen else logits.float()
    loss = F.cross_entropy(logits, y, label_smoothing=args.smoothing if y.dim() == 1 else 0.0)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach(), "train_top1": 100 * (logits.argmax(1) == truth).float().mean(), "lr": lr}


def fingerprint(module):
    """A hash of all weights and statistics, bit for bit."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ----------------------------------------- 7. the papers' protocols: main


def introduction(args, train, steps, network):
    """What the numbers depend on: every value of the recipe, and what follows from them."""
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad) / 1e6
    world, peak = common.rank_and_world()[1], args.lr * args.batch_size / args.lr_batch
    what = "all layers" if args.mode == "finetune" else "a linear classifier; the encoder is frozen, in evaluation mode"
    return (
        f"{what} ({trained:.3f} M parameters trained); the last epoch is reported\n"
        + ", ".join(f"{k} {getattr(args, k)}" for k in args.values)
        + f"\nrate {args.lr:g} at batch {args.lr_batch}, scaled linearly to {peak:g}; {len(train)} images, {steps} "
        f"steps an epoch, {args.batch_size // world} images for each of {world} process(es)"
    )


def train_protocol(args, device, encoder, info, train, test):
    """Train as the recipe says; returns {'encoder': scores of the last epoch}, or {} before its end."""
    args.weights, args.num_classes = fingerprint(encoder), len(train.classes)
    args.checkpoint = args.checkpoint and os.path.abspath(args.checkpoint)
    small = info["image_size"] <= 16 and not (info["timm_name"] or "").startswith(("vit_", "deit"))
    if args.mode == "finetune" and args.amp and device.type == "cpu" and small:
        common.fail("--amp on a CPU: at 16 px and below torch's gradients of convolutions are wrong: leave it out")
    run = common.Run(args, device)
    if len(train) < args.batch_size:
        common.fail(f"{len(train)} images are fewer than one batch: give --batch-size {len(train)} or less")
    loader = common.make_loader(args, TrainingViews(train, args, info), device)
    labels, test_y, steps = torch.from_numpy(train.labels), torch.from_numpy(test.labels), len(train) // args.batch_size
    network, head = make_network(args, encoder, info, args.num_classes, device)
    if device.type == "cpu" and any(isinstance(module, nn.SyncBatchNorm) for module in network.modules()):
        common.fail("--finetune with batch norm in several processes needs GPUs: start one process")
    unused = args.mode == "finetune" and info["timm_name"] is None  # an own encoder may leave some parameters unused
    wrapped = DistributedDataParallel(network, find_unused_parameters=unused) if dist.is_initialized() else network
    optimizer = make_optimizer(args, network, head)

    def evaluate():
        options = dict(batch_size=args.batch_size // common.rank_and_world()[1], workers=args.workers, amp=args.amp)
        x = common.extract_features(network if args.mode == "finetune" else encoder, test, info, device, **options)
        with torch.no_grad():
            logits = x if args.mode == "finetune" else head(x.to(device)).cpu()
        found = scores(logits, test_y, args.num_classes)
        return {name.replace("linear", args.mode): value for name, value in found.items()}

    about = introduction(args, train, steps, network)
    run.begin(network, optimizer, train, evaluate=evaluate, every=args.eval_every, about=about)
    network.train()
    while run.goes_on():
        for batch in run.batches(loader):
            run.log(train_step(args, encoder, wrapped, optimizer, batch, labels, run.step, steps, info, device))
        run.end_epoch()
    if args.mode == "linear" and fingerprint(encoder) != args.weights:
        raise RuntimeError("training changed the frozen encoder")
    run.finish()
    result = {name: value for name, value in run.result.items() if name.startswith(args.mode)}
    if run.step < run.total:
        return {}
    common.say(f"{'encoder':>10}  {show(result)}  (epoch {args.epochs}, the last)")
    return {"encoder": result}


def main(args, encoder=None, train=None, test=None):
    """{"encoder" or a floor: {"linear_top1": percent, ...}}. encoder, train, test: a user's own module and Datasets."""
    device, encoder, info = common.open_encoder(args, encoder, own=train is not None)
    train, test = common.open_data(args, info, train, test)
    resolve(args, info)
    common.say(common.protocol(args, info, train, test))
    evaluation = evaluate_cached if args.mode in ("probe", "lbfgs") else train_protocol
    results = evaluation(args, device, encoder, info, choose_labels(args, train), test)
    if dist.is_initialized():
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    main(parse_args())
