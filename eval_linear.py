"""Judge an encoder with labels: a linear classifier on its frozen features, or fine-tuning of all layers.

The default, `--protocol probe`, computes features once, standardises them, and trains a classifier on them for a whole grid of
learning rates at once, in seconds. The rate is chosen on a tenth of the training set; the test set is used once. Beside the
number stand two floors: raw pixels, and the same encoder untrained.

    python eval_linear.py runs/patchmix-patterns-vit_micro-s0
    python eval_linear.py RUN --dataset cifar100 --data-dir DIR                # transfer
    python eval_linear.py RUN --solver lbfgs --metric per_class                # transfer as LoGo's Table 5
    torchrun --nproc_per_node=8 eval_linear.py RUN --data-dir DIR --protocol moco
    python eval_linear.py RUN --finetune --label-fraction 0.01

The papers' own protocols (`--protocol moco|jcl|clim|jointcrop|jointcrop-small|patchmix`) train on random crops of the images, on
any number of processes, and go on where they were stopped, bit for bit; the last epoch is reported, never the best.
`--finetune` trains all layers: PatchMix's recipe for ViTs, CLIM's for other encoders. Every value is a flag, and is printed.

Departures: an epoch is whole batches, the images over are left out of it. Mixup and CutMix pair the images of a process, and
drop-path draws for each, so a fine-tuning with them depends on the number of processes; nothing else does, but for rounding.
Images are resized by the interpolation that the encoder was trained with; LoGo's released evaluation is bicubic.
"""

import argparse
import hashlib
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
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common

# ------------------ 1. encoder and data (same in eval_knn.py and eval_linear.py)


def add_encoder_flags(parser):
    parser.add_argument("checkpoint", nargs="?", help="a run's folder, a last.pt or a backbone.pt")
    parser.add_argument("--encoder", choices=("query", "momentum"), help="default: the one that the method's authors evaluate")
    parser.add_argument("--arch", help=f"with --random-init: {', '.join(common.ARCHS)}, or any timm model")
    parser.add_argument("--random-init", action="store_true", help="an untrained encoder instead of a checkpoint")
    parser.add_argument("--image-size", type=int, default=32, metavar="N", help="with --random-init (32)")
    parser.add_argument("--patch-size", type=int, metavar="N", help="with --random-init, of a ViT (2 up to 32 px, else 16)")
    parser.add_argument("--dataset", choices=common.DATASETS, help="default: what it was trained on, or patterns")
    parser.add_argument("--data-dir", metavar="DIR", help="default: where that was")
    parser.add_argument("--skip-bad-images", action="store_true", help="read every file first; leave out what cannot be decoded")
    parser.add_argument("--classes", nargs="+", metavar="NAME", help="keep these classes only")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="images encoded at once, by each process")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--workers", type=int, metavar="N")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--amp", action="store_true", help="encode in bf16")
    parser.add_argument("--no-floors", action="store_true", help="leave out raw pixels and the untrained encoder")


def check_encoder_flags(args):
    if args.random_init == (args.checkpoint is not None) or args.random_init != (args.arch is not None):
        common.fail("give a checkpoint, or --arch NAME --random-init")
    for name in ("image_size", "patch_size", "batch_size", "workers", "seed"):
        value, least, limit = getattr(args, name), int(name not in ("workers", "seed")), 1025 if name == "workers" else 10**9
        if value is not None and not least <= value < limit:
            common.fail(f"--{name.replace('_', '-')} {value}: give a number from {least}, below {limit}")
    args.classes = args.classes and list(dict.fromkeys(args.classes))
    if args.device == "cuda" and not torch.cuda.is_available():
        common.fail("--device cuda: torch sees no CUDA device; use --device cpu")


def open_encoder(args):
    """Join torchrun's process group if there is one; returns (device, encoder, info)."""
    torch.set_flush_denormal(True)
    common.keep_memory()
    cuda = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        if (local := int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > torch.cuda.device_count():
            common.fail(f"{local} processes, but {torch.cuda.device_count()} GPU(s) here: lower --nproc_per_node")
        torch.cuda.set_device(device)
    args.workers = common.default_workers(device) if args.workers is None else args.workers
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", timeout=common.PATIENCE)
    if args.random_init:
        patch = args.patch_size or (2 if args.image_size <= 32 else 16)
        info = common.backbone_info(args.arch, args.image_size, patch, method="untrained", encoder="query")
        torch.manual_seed(args.seed)
        return device, common.build_backbone(info).eval().to(device), info
    encoder, info = common.load_backbone(args.checkpoint, args.encoder)
    folder = Path(args.checkpoint) if Path(args.checkpoint).is_dir() else Path(args.checkpoint).parent
    if args.dataset is None:
        try:
            config = json.loads((folder / "config.json").read_text())
            args.dataset, args.data_dir = config["dataset"], args.data_dir or config["data_dir"]
        except (OSError, ValueError, TypeError, KeyError):
            common.fail("there is no readable config.json beside the checkpoint to tell its data set: give --dataset")
    return device, encoder.to(device), info


def open_data(args, info):
    """(train, test): the labelled images of both parts, of --classes only."""
    args.dataset = args.dataset or "patterns"
    options = dict(size=info["image_size"], skip_bad=args.skip_bad_images)
    train, test = (common.load_images(args.dataset, args.data_dir, part, **options) for part in (True, False))
    if test is None or not train.classes:
        common.fail("an evaluation needs labels: --data-dir with train/ and val/ or test/, one folder a class")
    if unknown := set(args.classes or ()) - set(train.classes):
        common.fail(f"--classes {' '.join(sorted(unknown))}: not among {', '.join(train.classes[:20])}")
    if len(args.classes or train.classes) < 2:
        common.fail("an evaluation needs two classes or more")
    keep = [train.classes.index(c) for c in args.classes or train.classes]
    return [part if args.classes is None else part.of_classes(keep) for part in (train, test)]


def floor_encoders(args, info, device, train):
    """{name: encoder}: what a trained encoder has to beat."""
    torch.manual_seed(args.seed)
    pixels = nn.AvgPool2d(max(1, info["image_size"] // 32))
    untrained = {} if args.random_init else {"untrained": common.build_backbone(info).to(device)}
    floors = untrained if len(train) > 200_000 else {"raw pixels": pixels, **untrained}  # 3,072 numbers an image
    return {} if args.no_floors else floors


def protocol(args, info, train, test):
    """What the numbers depend on, as lines."""
    scale = f"shorter side 256/224 of {info['image_size']} px, centre crop, {info['interpolation']}"
    same = train.array is not None and train.array.shape[1:3] == (info["image_size"],) * 2
    return (
        f"encoder {info['timm_name']} of {info['method']}, the {info['encoder']} encoder, evaluation mode; features: before the "
        f"projector, after the last norm and pooling\n"
        f"data {args.dataset}: {len(train)} training and {len(test)} test images, {len(train.classes)} classes; "
        f"{'no resize' if same else scale}; mean {tuple(info['mean'])}, std {tuple(info['std'])}"
    )


# ---------------------------------------------------------- 2. arguments

# fmt: off
# Milestones and warm-up end at shares of the run and at epochs; the rate is that of batch size lr_batch. "by" holds what depends
# on the data set or the encoder. [P] printed in the paper, [C] its released code, [I] inference: the paper is silent.
COMMON = dict(
    optimizer="sgd", momentum=0.9, nesterov=False, lr_batch=256, weight_decay=0.0, milestones=(), lr_per="epoch",
    warmup=0, warmup_lr=0.0, min_lr=0.0, crop_scale=(0.08, 1.0), pad=0, randaug=0, erase=0.0, mixup=0.0, cutmix=0.0,
    smoothing=0.0, by={},
)
MOCO = dict(COMMON, epochs=100, batch_size=256, lr=30.0, milestones=(0.6, 0.8))  # JCL 4.2 [P], CLIM 4.1 [P]; decay 0 [C]
RECIPES = {
    "probe": {"probe": dict(epochs=50, batch_size=256, lrs=None, holdout=0.1)},  # ours
    "lbfgs": {"lbfgs": dict(  # LoGo, supplementary, section 3: L-BFGS, L2, 5000 iterations [P]; grid: BYOL's and SimCLR's [I]
        batch_size=256, strengths=np.logspace(-6, 5, 45).tolist(), holdout=0.1, metric="top1", iterations=5000, tolerance=1e-6,
    )},
    "linear": {
        "moco": MOCO,
        "jcl": dict(MOCO, by=dict(imagenet100=dict(lr=10.0))),  # App. D [P]
        "clim": MOCO,
        "jointcrop": dict(COMMON, epochs=90, batch_size=1024, lr=0.1, by=dict(vit=dict(lr=3.0))),  # MoCo v3's [C]
        "jointcrop-small": dict(  # CIFAR, STL-10, Tiny-ImageNet: ContrastiveCrop's [C]
            COMMON, epochs=100, batch_size=512, lr=10.0, lr_batch=512, milestones=(0.6, 0.8),
        ),
        "patchmix": dict(  # 4.1.3: 100 epochs [P]; the rest [C]; the rate for encoders that are no ViT-T, -S, -B: as S [I]
            COMMON, epochs=100, batch_size=1024, lr=0.02, nesterov=True, by=dict(
                vit_tiny=dict(lr=0.05), vit_base=dict(lr=0.01), cifar10=dict(batch_size=256), cifar100=dict(batch_size=256),
            ),
        ),
    },
    "finetune": {
        "patchmix": dict(  # 4.1.3: 100 epochs [P]; the rest [C]; the batch as in its linear protocol, each step a rate [I]
            COMMON, optimizer="adamw", epochs=100, batch_size=1024, lr=5e-4, head_lr=None, weight_decay=0.05, layer_decay=0.75,
            lr_per="step", warmup=10, warmup_lr=1e-6, min_lr=1e-5, drop_path=0.1, randaug=9, erase=0.25, mixup=0.8, cutmix=1.0,
            smoothing=0.1, by=dict(
                vit_tiny=dict(lr=1e-3), cifar10=dict(batch_size=256, pad=4), cifar100=dict(batch_size=256, pad=4),
            ),
        ),
        "clim": dict(  # 4.2 [P]; batch and weight decay [I]
            COMMON, epochs=60, batch_size=256, lr=1e-4, head_lr=10.0, milestones=(1 / 3, 2 / 3), layer_decay=1.0, drop_path=0.0,
        ),
    },
}
TRAINED = ("linear", "finetune")  # on crops of the images; the others on cached features
RUN = dict(out=None, max_steps=None, save_every=1, eval_every=0)
FLAGS = {  # name: (type, smallest value or None for "above 0", largest value, help)
    "epochs": (int, None, math.inf, "(the probe: 50)"),
    "lr": (float, None, math.inf, "rate at batch --lr-batch, scaled linearly with the batch"),
    "lr_batch": (int, None, math.inf, "the batch that --lr is for"),
    "head_lr": (float, None, math.inf, "fine-tuning: rate of the new classifier, at --lr-batch"),
    "layer_decay": (float, None, 1, "fine-tuning: each layer's rate is this times that of the layer above"),
    "momentum": (float, 0, 1, "of SGD"),
    "weight_decay": (float, 0, math.inf, ""),
    "warmup": (float, 0, math.inf, "epochs of linear warm-up"),
    "warmup_lr": (float, 0, math.inf, "the rate it begins with"),
    "min_lr": (float, 0, math.inf, "the rate that a cosine ends with"),
    "pad": (int, 0, math.inf, "pixels: random crops of the padded image instead of resized ones"),
    "drop_path": (float, 0, 0.99, "fine-tuning: stochastic depth"),
    "randaug": (int, 0, 10, "RandAugment's magnitude (timm rand-mX-mstd0.5-inc1); 0: none"),
    "erase": (float, 0, 1, "probability of random erasing"),
    "mixup": (float, 0, math.inf, "alpha; 0: none"),
    "cutmix": (float, 0, math.inf, "alpha; 0: none"),
    "smoothing": (float, 0, 0.99, "of the labels"),
    "max_steps": (int, None, math.inf, "stop and save after N steps, counted over resumes"),
    "save_every": (int, None, math.inf, "epochs (1)"),
    "eval_every": (int, 0, math.inf, "epochs; 0: the last one only (0)"),
    "holdout": (float, 0.001, 0.999, "share of the training set that chooses the rate or the strength (0.1)"),
    "iterations": (int, None, math.inf, "L-BFGS, at most, for each strength (5000)"),
    "tolerance": (float, None, math.inf, "L-BFGS: converged when no entry of the gradient (features whitened) is above (1e-6)"),
    "label_fraction": (float, None, 1, "train on this share of the labels, the same count for each class"),
}
# fmt: on


def parse_args(argv=None):
    parser = common.ArgumentParser("eval_linear.py", description=__doc__.splitlines()[0], conflict_handler="resolve")
    add_encoder_flags(parser)
    batch = "images encoded at once, by each process; --protocol, --finetune: the global batch, the recipe's"
    parser.add_argument("--batch-size", type=int, metavar="N", help=batch)  # instead of the one that eval_knn.py shares
    parser.add_argument("--protocol", choices=("probe", *RECIPES["linear"]), help="how the classifier is trained (probe)")
    parser.add_argument("--finetune", action="store_true", help="train all layers; --protocol patchmix (ViTs) or clim (others)")
    parser.add_argument("--solver", choices=("sgd", "lbfgs"), help="lbfgs: logistic regression on cached features")
    parser.add_argument("--label-files", metavar="LIST", help="train on these files: one a line, base name or path in train/")
    parser.add_argument("--lrs", type=float, nargs="+", metavar="X", help="the probe's grid of rates (0.00003 to 3)")
    parser.add_argument("--strengths", type=float, nargs="+", metavar="X", help="L-BFGS: grid of L2 strengths (45, 1e-6 to 1e5)")
    parser.add_argument("--metric", choices=("top1", "per_class"), help="L-BFGS: what chooses the strength (top1)")
    group = parser.add_argument_group("what the papers' protocols set")
    group.add_argument("--optimizer", choices=("sgd", "adamw"))
    group.add_argument("--nesterov", action=argparse.BooleanOptionalAction)
    group.add_argument("--milestones", type=float, nargs="*", metavar="X", help="shares of the run: rate / 10; none: a cosine")
    group.add_argument("--lr-per", choices=("epoch", "step"), help="how often the rate changes")
    group.add_argument("--crop-scale", type=float, nargs=2, metavar=("LO", "HI"), help="area of the random resized crops")
    for name, (kind, _, _, text) in FLAGS.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--out", metavar="DIR", help="folder of the run (runs/...); the same command goes on from it")
    args = parser.parse_args(argv)
    check_encoder_flags(args)
    check_flags(args)
    return args


def check_flags(args):
    """Refuse flags that contradict each other, are out of range, or are not of this mode; sets args.mode."""
    given = {k for k, v in vars(args).items() if v is not None and v is not False}
    cached = "lbfgs" if args.solver == "lbfgs" else "probe"
    args.mode = "finetune" if args.finetune else "linear" if args.protocol not in (None, "probe") else cached
    if args.solver and (args.finetune or (args.protocol or "probe") != "probe"):
        common.fail(f"--solver {args.solver} goes with neither --finetune nor --protocol {args.protocol}")
    args.label_files = args.label_files or None
    if args.label_fraction and args.label_files:
        common.fail("give --label-fraction or --label-files, not both")
    if args.finetune and args.protocol not in (None, *RECIPES["finetune"]):
        common.fail(f"--finetune goes with --protocol {' or '.join(RECIPES['finetune'])}, not {args.protocol}")
    known = {m: {"label_fraction"}.union(RUN if m in TRAINED else (), *RECIPES[m].values()) for m in RECIPES}
    said = {"probe": "the probe", "lbfgs": "--solver lbfgs", "linear": f"--protocol {args.protocol}", "finetune": "--finetune"}
    for name in sorted(given & set.union(*known.values()) - known[args.mode]):
        common.fail(f"--{name.replace('_', '-')} is not used by {said[args.mode]}")
    for name, (_, low, high, _) in FLAGS.items():
        value = getattr(args, name)
        if value is not None and not ((value > 0 if low is None else value >= low) and value <= high and value < 10**9):
            most = f"at most {high}" if high < math.inf else f"below {10**9}"
            limits = ("above 0" if low is None else f"at least {low}") + f", {most}"
            common.fail(f"--{name.replace('_', '-')} {value}: give a number {limits}")
    low, high = args.crop_scale or (1, 1)
    positive = [*(args.lrs or ()), *(args.strengths or ()), low]
    if not all(0 < v < math.inf for v in positive) or not low <= high <= 1:
        common.fail("--lrs, --strengths: above 0; --crop-scale: two areas up to 1, the smaller first")
    if not all(0 < m < 1 for m in args.milestones or ()):
        common.fail("--milestones: shares of the run between 0 and 1 (0.6 0.8, not 60 80)")


def resolve(args, info):
    """Fill in from the recipe what the command line left open, for this encoder and data set, and name the run's folder."""
    name, args.dataset = re.sub("^deit3?_", "vit_", info["timm_name"]), args.dataset or "patterns"
    vit = name.startswith("vit_")
    args.protocol = args.mode if args.mode not in TRAINED else args.protocol or ("patchmix" if vit else "clim")
    recipe = dict(RECIPES[args.mode][args.protocol])
    by = recipe.pop("by", {})
    for trait in ("vit" * vit, "_".join(name.split("_")[:2]), args.dataset):
        recipe |= by.get(trait, {})
    if info["image_size"] > 32 and "pad" in recipe:
        recipe["pad"] = 0
    if "warmup" in recipe:  # a short run warms up in proportion
        recipe["warmup"] *= min(1, (args.epochs or recipe["epochs"]) / recipe["epochs"])
    args.values = list(recipe)
    for key, value in {**recipe, **(RUN if args.mode in TRAINED else {})}.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if args.mode not in TRAINED:
        return
    if args.optimizer == "sgd" and args.nesterov and not args.momentum:
        common.fail("--momentum 0 needs --no-nesterov")
    if args.mode == "finetune" and args.head_lr and args.layer_decay < 1:
        common.fail("--head-lr goes with --layer-decay 1")
    world = common.rank_and_world()[1]
    if args.batch_size % world or (args.mixup + args.cutmix > 0 and args.batch_size // world % 2):
        common.fail(f"--batch-size {args.batch_size}: each of {world} process(es) gets as many, for mixup an even number")
    path = Path(args.checkpoint or args.arch).resolve()
    source = args.arch or (path if path.is_dir() else path.parent).name
    labels = f"-{args.label_fraction:g}" if args.label_fraction else "-listed" if args.label_files else ""
    folder = f"{args.mode}-{args.protocol}-{args.dataset}-{source}-s{args.seed}{labels}"
    args.out = args.out or "runs/" + "".join(c if c.isalnum() or c in "-_." else "+" for c in folder)


# ------------------------------------------------------------- 3. labels


def balanced_share(labels, fraction, seed):
    """Rows of a share of the labels (n,), the same count for each class up to one, and at least one: sorted, fixed by the seed.

    The classes give images in turn, so that the others make up for a class that has too few, and a smaller share is part of
    a larger one.
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
    for i, path in enumerate(images.paths):
        for name in {os.path.basename(path), os.path.relpath(path, root)}:
            found.setdefault(name, []).append(i)
    try:
        names = dict.fromkeys(line.strip() for line in Path(file).read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        common.fail(f"--label-files {file} cannot be read: {' '.join(str(error).split())}")
    unknown, several = [n for n in names if n not in found], [n for n in names if len(found.get(n, ())) > 1]
    if unknown or not names:
        common.fail(f"--label-files {file}: {len(unknown)} of {len(names)} names are not in {root}: {', '.join(unknown[:5])}")
    if several:
        common.fail(f"--label-files {file}: several files are called {', '.join(several[:5])}: give paths relative to {root}")
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
    common.say(f"labels: {len(chosen)} of {len(train)} training images, {counts.min()} to {counts.max()} for each class")
    return chosen


# ------------------------------------------------------- 4. linear probe


@torch.no_grad()
def linear_probe(train_x, train_y, test_x, num_classes, seed=0, epochs=50, batch_size=256, lrs=None, holdout=0.1):
    """A linear classifier on cached features: a grid of learning rates at once, the best by a held-out part.

    train_x (n, d), test_x (m, d) are standardised by the training features' mean and std; train_y (n,) int64 in
    [0, num_classes). SGD, momentum 0.9, cosine. The rate is chosen on `holdout` of the training set, which the test
    set never sees, and the classifier is then trained on all of it.
    Returns {'logits': (m, num_classes), 'lr', 'at_edge': bool, 'held_out': {lr: percent}}.
    """
    lrs = torch.tensor(lrs or [10.0**e for e in np.arange(-4.5, 0.51, 0.5)])
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


# --------------------------------- 5. logistic regression by L-BFGS


def logistic_regression(x, y, num_classes, strength, start=None, iterations=5000, tolerance=1e-6):
    """Multinomial logistic regression with L2: minimises sum_i CE(x_i W + b, y_i) + strength / 2 |W|^2, the bias free.

    The strength is 1 / C of scikit-learn. x (n, d) float64, y (n,) int64; the sum is divided by n, which leaves the
    minimum where it is. start: weights to begin from. Returns (weights (d + 1, num_classes), the bias last; largest entry of
    the gradient, which is converged below `tolerance`).

    L-BFGS works on W = P V, where P whitens the features as far as the penalty lets it: the minimum is the same, but a few
    strong directions no longer make thousands of iterations of what takes tens.
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
    """Logistic regression whose L2 strength is chosen on a validation part, fitted again on all of x, for test_x (m, d).

    x (n, d) features of training and validation images, check: rows of the latter. Features are centred (the free bias makes
    that no difference) and divided by one number, their root mean square, so that a strength means the same for every
    encoder while directions keep their share; all in float64. From strong to weak, each fit begins where the last one ended.
    Returns {'logits': (m, num_classes), 'lr': the strength, 'at_edge', 'held_out': {strength: percent}}.
    """
    rest = torch.ones(len(x), dtype=torch.bool, device=x.device)
    rest[check] = False
    mean = x[rest].double().mean(0)
    scale = (x[rest] - mean).square().mean().sqrt().clamp_min(1e-12)
    x, test_x = (x - mean) / scale, (test_x - mean) / scale
    weight, best, start, held_out, unfinished = None, None, None, {}, []
    fit_x, fit_y, check_x, check_y = x[rest], y[rest], x[check], y[check].cpu()
    for strength in sorted(set(strengths), reverse=True):
        weight, gradient = logistic_regression(fit_x, fit_y, num_classes, strength, weight, iterations, tolerance)
        logits = torch.addmm(weight[-1], check_x, weight[:-1]).cpu()
        held_out[strength] = scores(logits, check_y, num_classes)[f"linear_{metric}"]
        if best is None or held_out[strength] > held_out[best]:  # of equals the strongest
            best, start = strength, weight
        unfinished += [(strength, gradient)] * (gradient > tolerance)
    weight, gradient = logistic_regression(x, y, num_classes, best, start, iterations, tolerance)
    for strength, left in unfinished + [(best, gradient)] * (gradient > tolerance):
        common.say(f"warning: strength {strength:.3g} has not converged in {iterations} iterations: gradient {left:.1e}")
    at_edge = len(held_out) > 1 and best in (min(held_out), max(held_out))
    return dict(logits=torch.addmm(weight[-1], test_x, weight[:-1]), lr=best, at_edge=at_edge, held_out=held_out)


def open_validation(args, train, test):
    """(validation, test): where --data-dir has val/ and test/ both, they are that; else (None, test)."""
    root = Path(args.data_dir or "data")
    if args.mode != "lbfgs" or args.data_dir is None or not all((root / part).is_dir() for part in ("train", "val", "test")):
        return None, test
    return test, common.read_folder(args.dataset, root / "test", train.classes, True, skip_bad=args.skip_bad_images)


def open_parts(args, info):
    """(training images whose labels may be used, test images); says what they are."""
    train, test = open_data(args, info)
    common.say(protocol(args, info, train, test))
    return choose_labels(args, train), test


def evaluate_cached(args, device, encoder, info):
    """The probe or L-BFGS, on features that are computed once, of the encoder and of its floors: {name: scores}."""
    train, test = open_parts(args, info)
    validation, test = open_validation(args, train, test)
    parts = [part for part in (train, validation, test) if part is not None]
    labels = [torch.from_numpy(part.labels) for part in parts]
    train_y, test_y, classes = torch.cat(labels[:-1]).to(device), labels[-1], len(train.classes)
    order = torch.randperm(len(train), generator=common.generator(args.seed, 2))
    check = order[: max(1, int(args.holdout * len(train)))] if validation is None else len(train) + torch.arange(len(validation))
    where = f"{len(check)} images of {'the training set' if validation is None else 'val/'}"
    if validation is not None:
        common.say(f"val/ and test/ are both there: val/ chooses, and the {len(test)} images of test/ are judged")
    common.say(
        f"linear probe: features standardised, SGD, {args.epochs} epochs, cosine"
        if args.mode == "probe"
        else f"logistic regression: features centred and divided by their root mean square, float64; L-BFGS, at most "
        f"{args.iterations} iterations, to a gradient of {args.tolerance:g}; {len(args.strengths)} L2 strengths, "
        f"{min(args.strengths):g} to {max(args.strengths):g}: {where} choose by {args.metric}; then all {len(train_y)} are fitted"
    )
    results = {}
    for name, network in {"encoder": encoder, **floor_encoders(args, info, device, train)}.items():
        if name == "raw pixels" and args.mode == "lbfgs" and len(train) > 10_000:
            continue  # 3,072 numbers an image: hours
        options = dict(batch_size=args.batch_size, workers=args.workers, amp=args.amp)
        *train_x, test_x = (common.extract_features(network, part, info, device, **options).to(device) for part in parts)
        train_x = torch.cat(train_x)
        if args.mode == "probe":
            found = linear_probe(train_x, train_y, test_x, classes, args.seed, args.epochs, lrs=args.lrs, holdout=args.holdout)
        else:
            options = (args.strengths, args.metric, args.iterations, args.tolerance)
            found = lbfgs_probe(train_x, train_y, check.to(device), test_x, classes, *options)
        results[name] = scores(found.pop("logits").cpu(), test_y, classes)
        chosen, flag = ("rate", "--lrs") if args.mode == "probe" else ("strength", "--strengths")
        held_out = f"{chosen} {found['lr']:.3g}, {max(found['held_out'].values()):.2f} % held out"
        common.say(f"{name:>10}  {show(results[name])}  ({held_out})")
        if found["at_edge"]:
            common.say(f"warning: the best {chosen} is at the edge of the grid, widen it with {flag}: {found['held_out']}")
    return results


def show(result):
    return "  ".join(f"{k} {v:.2f} %" for k, v in result.items())


# ------------------------------------- 6. the papers' protocols: training


class TrainingViews(common.Views):
    """One view of each image, a random resized crop (or a crop of the padded image), with RandAugment where it is asked for.

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
        """Boxes (n, 4) and flips for the images' sizes (n, 2) and uniform draws: what `common.Views` calls."""
        crop, colour = np.split(draws, [common.CROP_DRAWS], axis=1)
        box = common.random_resized_crop(sizes, crop, self.args.crop_scale)
        if self.args.pad:
            corner = np.floor(crop[:, 20:] * (2 * self.args.pad + 1)).astype(np.int64)
            box = np.concatenate([corner, np.full_like(corner, self.size)], 1)
        return [(index, box, self.size)], common.random_colour(colour)[:, None]

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
    """(network, head): what is trained and its new linear layer, N(0, 0.01) and bias 0. Frozen: the head alone is trained."""
    torch.manual_seed(args.seed)
    if args.mode == "linear":
        encoder.requires_grad_(False)
        network = head = nn.Linear(encoder.head_hidden_size, num_classes)
    else:
        network = common.build_backbone(info, **({"drop_path_rate": args.drop_path} if args.drop_path else {}))
        network.load_state_dict(encoder.state_dict())
        network.reset_classifier(num_classes)
        head = network.get_classifier()
        if not isinstance(head, nn.Linear):
            common.fail(f"--finetune needs an encoder with one linear classifier, which {info['timm_name']} has not")
        norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())
        if norms and dist.is_initialized() and device.type == "cpu":
            common.fail("several processes cannot fine-tune batch norm on the CPU (torch's SyncBatchNorm is for GPUs): start one")
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network) if norms and dist.is_initialized() else network
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
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
    return torch.optim.SGD(groups, lr=0.0, momentum=args.momentum, nesterov=args.nesterov, weight_decay=args.weight_decay)


def learning_rate(args, step, steps_per_epoch):
    """The rate of a step, before a group's lr_scale: warm-up, then by 10 at each milestone, or a cosine to min_lr."""
    epoch = step / steps_per_epoch if args.lr_per == "step" else step // steps_per_epoch
    peak = args.lr * args.batch_size / args.lr_batch
    if epoch < args.warmup:
        return args.warmup_lr + (peak - args.warmup_lr) * epoch / args.warmup
    if args.milestones:
        return peak * 0.1 ** sum(epoch / args.epochs >= m for m in args.milestones)
    return args.min_lr + (peak - args.min_lr) * (1 + math.cos(math.pi * (epoch - args.warmup) / (args.epochs - args.warmup))) / 2


def train_step(args, encoder, wrapped, optimizer, batch, labels, step, steps, info, device):
    """One step on this process's images. Returns (loss, right answers, images) in float64 on the device.

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
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(args, step, steps) * group["lr_scale"]
    frozen = args.mode == "linear"
    with torch.autocast(device.type, torch.bfloat16, enabled=args.amp), torch.set_grad_enabled(not frozen):
        logits = (encoder if frozen else wrapped)(x).flatten(1)
    logits = wrapped(logits.float()) if frozen else logits.float()
    loss = F.cross_entropy(logits, y, label_smoothing=args.smoothing if y.dim() == 1 else 0.0)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    right = (logits.argmax(1) == truth).sum()
    return torch.stack([loss.detach().double() * len(x), right.double(), torch.ones_like(truth).sum().double()])


def fingerprint(module):
    """A hash of all weights and statistics, bit for bit."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ----------------------------------------- 7. the papers' protocols: main


def introduce(args, train, steps, network):
    """What the numbers depend on: every value of the recipe, and what follows from them."""
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad) / 1e6
    world, peak = common.rank_and_world()[1], args.lr * args.batch_size / args.lr_batch
    what = "all layers" if args.mode == "finetune" else "a linear classifier; the encoder is frozen, in evaluation mode"
    common.say(
        f"{args.mode} protocol {args.protocol}: {what} ({trained:.3f} M parameters trained); the last epoch is reported\n"
        + ", ".join(f"{k} {getattr(args, k)}" for k in args.values)
        + f"\nrate {args.lr:g} at batch {args.lr_batch}, scaled linearly to {peak:g}; {len(train)} images, {steps} steps an "
        f"epoch, {args.batch_size // world} images for each of {world} process(es)"
    )


def train_protocol(args, device, encoder, info):
    """Train as the recipe says; returns {'encoder': scores of the last epoch}, {} before its end, None if asked to stop."""
    rank, world = common.rank_and_world()
    before = fingerprint(encoder)
    config = {k: v for k, v in vars(args).items() if k not in ("eval_every", "values")}
    config |= {"method": f"{args.mode} {args.protocol}", "weights": before, "backbone": info}
    config["checkpoint"] = args.checkpoint and os.path.abspath(args.checkpoint)
    checkpoint = common.open_run(args.out, config)
    train, test = open_parts(args, info)
    args.num_classes = len(train.classes)
    if len(train) < args.batch_size:
        common.fail(f"{len(train)} images are fewer than one batch: give --batch-size {len(train)} or less")
    sampler = common.EpochSampler(len(train), args.batch_size, args.seed)
    loader = common.make_loader(TrainingViews(train, args, info), sampler, args.workers, device)
    labels, test_y = torch.from_numpy(train.labels), torch.from_numpy(test.labels)
    network, head = make_network(args, encoder, info, len(train.classes), device)
    optimizer = make_optimizer(args, network, head)
    steps, step, sums = len(train) // args.batch_size, 0, torch.zeros(3, dtype=torch.float64, device=device)
    total, out = args.epochs * steps, Path(args.out)
    end = min(total, args.max_steps or total)
    state = common.load_run(checkpoint, config, len(train)) if checkpoint else None
    if state:
        try:
            network.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step, sums = state["step"], state["log"]["sums"].double().view(-1, 3)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            common.fail(f"{checkpoint} does not fit this training: {' '.join(str(error).split())[:300]}")
        sums = (sums[rank] if len(sums) == world else sums.sum(0).div(world)).to(device)
    places = common.gather_uneven(torch.tensor([[step, len(train)]], device=common.collective_device()))
    if (places != places[0]).any():
        common.fail("the processes see different checkpoints or images: --out and --data-dir must be on shared disks")
    if step >= end:
        last = next((r for r in reversed(common.read_metrics(out / "metrics.jsonl")) if "loss" in r), {})
        common.say(f"{out} is at step {step} of {end} already. Its last epoch: {json.dumps(last)}")
        return {"encoder": {k: v for k, v in last.items() if k.startswith(args.mode)}} if step == total else {}
    introduce(args, train, steps, network)
    common.begin_run(out, config, checkpoint, step)
    if checkpoint is None:
        common.write_metrics(out, dict(step=0, **common.environment(device), arguments=config), args.epochs)
    wrapped = DistributedDataParallel(network) if dist.is_initialized() else network
    network.train()

    def test_scores():
        options = dict(batch_size=max(1, args.batch_size // world), workers=args.workers, amp=args.amp)
        x = common.extract_features(network if args.mode == "finetune" else encoder, test, info, device, **options)
        with torch.no_grad():
            logits = x if args.mode == "finetune" else head(x.to(device)).cpu()
        return {k.replace("linear", args.mode): v for k, v in scores(logits, test_y, len(test.classes)).items()}

    stop, stopping, result = common.StopRequest(), False, {}
    while step < end and not stopping:
        sampler.epoch, sampler.start = step // steps, step % steps
        began, first = time.perf_counter(), step
        for batch in loader:
            sums += train_step(args, encoder, wrapped, optimizer, batch, labels, step, steps, info, device)
            step += 1
            if step % 10 == 0:
                pace = (time.perf_counter() - began) / (step - first)
                where = f"epoch {sampler.epoch + 1}/{args.epochs}  step {step}/{total}  loss {(sums[0] / sums[2]).item():.3f}"
                common.progress(f"{where}  {args.batch_size / pace:.0f} images/s  {pace * (end - step) / 60:.1f} min left")
            if step == end or stop.agreed(step):
                break
        epoch, everywhere = step // steps, common.gather_uneven(sums[None])
        loss, right, images = everywhere.sum(0).tolist()
        if not math.isfinite(loss) or not common.is_finite(network.state_dict()):
            common.fail(f"the loss or a weight is not finite in epoch {sampler.epoch + 1}: give a lower --lr and a new --out")
        if step % steps == 0:
            record = dict(epoch=epoch, step=step, loss=loss / images, train_top1=100 * right / images)
            pace = (step - first) * args.batch_size / (time.perf_counter() - began)
            record |= dict(lr=learning_rate(args, step - 1, steps), images_per_s=pace)
            if step == total or (args.eval_every and epoch % args.eval_every == 0):
                record |= (result := test_scores())
            common.write_metrics(out, record, args.epochs)
            sums, everywhere = torch.zeros_like(sums), torch.zeros_like(everywhere)
        stopping = stop.agreed()
        if rank == 0 and (step % steps or step == end or stopping or epoch % args.save_every == 0):
            state = dict(model=network.state_dict(), optimizer=optimizer.state_dict(), step=step, log=dict(sums=everywhere.cpu()))
            common.save_checkpoint(out / "last.pt", state | dict(config=config, images=len(train)), keep_previous=True)
    if fingerprint(encoder) != before:
        raise RuntimeError("training changed the frozen encoder")
    del wrapped  # before the process group
    if step < total:
        why = " on request (exit status 75)" * stopping
        common.say(f"stopped at step {step} of {total}{why}, saved in {out}; the same command goes on from there")
        return None if stopping else {}
    common.say(f"{'encoder':>10}  {show(result)}  (epoch {args.epochs}, the last)")
    return {"encoder": result}


@common.memory_in_words
def main(args):
    device, encoder, info = open_encoder(args)
    resolve(args, info)
    results = (train_protocol if args.mode in TRAINED else evaluate_cached)(args, device, encoder, info)
    if dist.is_initialized():
        dist.destroy_process_group()
    if results is None:
        raise SystemExit(75)  # stopped on request, not done
    return results


if __name__ == "__main__":
    main(parse_args())
