"""Judge an encoder by a linear classifier on its frozen, cached features.

Features are computed once, standardised, and a classifier is trained on them for a whole grid of learning rates at once, in
seconds. The rate is chosen on a tenth of the training set; the test set is used once. Beside the number stand two floors:
raw pixels, and the same encoder untrained. (No augmentation: the papers' slower protocols train on crops.)

    python eval_linear.py runs/patchmix-patterns-vit_micro-s0
    python eval_linear.py RUN --dataset cifar100 --data-dir DIR                # transfer
    torchrun --nproc_per_node=8 eval_linear.py RUN --data-dir DIR
"""

import json
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

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
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="images encoded at once by each process")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--workers", type=int, metavar="N")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--amp", action="store_true", help="encode in bf16")
    parser.add_argument("--no-floors", action="store_true", help="leave out raw pixels and the untrained encoder")


def check_encoder_flags(args):
    if args.random_init == (args.checkpoint is not None) or args.random_init != (args.arch is not None):
        common.fail("give a checkpoint, or --arch NAME --random-init")
    for name in ("image_size", "patch_size", "batch_size", "workers", "seed"):
        value, least = getattr(args, name), int(name not in ("workers", "seed"))
        if value is not None and not least <= value < 10**9:
            common.fail(f"--{name.replace('_', '-')} {value}: give a number from {least}, below {10**9}")
    if args.device == "cuda" and not torch.cuda.is_available():
        common.fail("--device cuda: torch sees no CUDA device; use --device cpu")


def open_encoder(args):
    """Join torchrun's process group if there is one; returns (device, encoder, info)."""
    torch.set_flush_denormal(True)
    cuda = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        if (local := int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > torch.cuda.device_count():
            common.fail(f"{local} processes, but {torch.cuda.device_count()} GPU(s) here: lower --nproc_per_node")
        torch.cuda.set_device(device)
    args.workers = common.default_workers(device) if args.workers is None else args.workers
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
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


# ------------------------------------------------------- 2. linear probe


def parse_args(argv=None):
    parser = common.ArgumentParser("eval_linear.py", description=__doc__.splitlines()[0])
    add_encoder_flags(parser)
    parser.add_argument("--epochs", type=int, default=50, metavar="N")
    parser.add_argument("--lrs", type=float, nargs="+", metavar="X", help="grid of learning rates (0.00003 to 3, half decades)")
    parser.add_argument("--holdout", type=float, default=0.1, metavar="X", help="share of the training set that chooses the rate")
    args = parser.parse_args(argv)
    check_encoder_flags(args)
    if args.epochs < 1 or not 0 < args.holdout < 1 or not all(0 < lr < 1e9 for lr in args.lrs or ()):
        common.fail("--epochs and --lrs: above 0; --holdout: between 0 and 1")
    return args


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
    right = (logits(train_x[check], grid).argmax(-1) == train_y[check][:, None]).float().mean(0)
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


def main(args):
    device, encoder, info = open_encoder(args)
    train, test = open_data(args, info)
    options = dict(batch_size=args.batch_size, workers=args.workers, amp=args.amp)
    train_y, test_y = torch.from_numpy(train.labels), torch.from_numpy(test.labels)
    common.say(f"{protocol(args, info, train, test)}\nlinear probe: features standardised, SGD, {args.epochs} epochs, cosine")
    results = {}
    for name, network in {"encoder": encoder, **floor_encoders(args, info, device, train)}.items():
        train_x, test_x = (common.extract_features(network, part, info, device, **options).to(device) for part in (train, test))
        found = linear_probe(
            train_x, train_y.to(device), test_x, len(train.classes), args.seed, args.epochs, lrs=args.lrs, holdout=args.holdout
        )
        results[name] = scores(found.pop("logits").cpu(), test_y, len(train.classes))
        shown = "  ".join(f"{k} {v:.2f} %" for k, v in results[name].items())
        common.say(f"{name:>10}  {shown}  (rate {found['lr']:.3g}, {max(found['held_out'].values()):.2f} % held out)")
        if found["at_edge"]:
            common.say(f"warning: the best rate is at the edge of the grid, widen it with --lrs: {found['held_out']}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    main(parse_args())
