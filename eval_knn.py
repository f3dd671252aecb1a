"""Judge an encoder by weighted k-nearest-neighbour classification of its frozen features.

Each test image's class is voted for by its k nearest training images, a vote being exp(cosine similarity / temperature), as in
Wu et al. (arXiv 1805.01978). Nothing is trained, so the number is the representation's own. Beside it stand two floors:
raw pixels, and the same encoder untrained.

    python eval_knn.py runs/patchmix-patterns-vit_micro-s0
    python eval_knn.py RUN/last.pt --encoder query --dataset cifar10 --data-dir DIR --pictures neighbours
    python eval_knn.py --arch vit_small --random-init --dataset cifar10 --data-dir DIR
    torchrun --nproc_per_node=8 eval_knn.py RUN --data-dir DIR
"""

import json
import math
import os
from pathlib import Path

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


# ---------------------------------------------------------------- 2. kNN


def parse_args(argv=None):
    parser = common.ArgumentParser("eval_knn.py", description=__doc__.splitlines()[0])
    add_encoder_flags(parser)
    parser.add_argument("--k", type=int, nargs="+", default=[10, 20, 100, 200], metavar="K", help="neighbours (10 20 100 200)")
    parser.add_argument("--temperature", type=float, default=0.07, metavar="T")
    parser.add_argument("--pictures", metavar="DIR", help="write grids of test images and their nearest training images")
    args = parser.parse_args(argv)
    check_encoder_flags(args)
    if min(args.k) < 1 or not 0 < args.temperature < math.inf:
        common.fail("--k and --temperature: give numbers above 0")
    args.k = list(dict.fromkeys(args.k))
    return args


def write_pictures(folder, train, test, train_x, test_x, predicted, count=12, neighbours=10):
    """right.png and wrong.png: test images and their nearest training images, framed green (same class) or red."""
    bank = F.normalize(train_x, dim=1).T
    for name, right in (("right", True), ("wrong", False)):
        chosen = torch.nonzero((predicted == torch.from_numpy(test.labels)) == right).flatten()
        chosen = chosen[torch.randperm(len(chosen), generator=common.generator(0))[:count]]
        rows, labels, borders = [], [], []
        for i in chosen.tolist():
            nearest = (F.normalize(test_x[i], dim=0) @ bank).topk(min(neighbours, len(train))).indices.tolist()
            images = [common.cut(x, (0, 0, *x.shape[:2]), 96) for x in (test[i], *(train[j] for j in nearest))]
            rows.append(torch.stack([torch.from_numpy(x.copy()).permute(2, 0, 1) for x in images]) / 255)
            labels.append(train.classes[test.labels[i]])
            borders.append([None] + ["limegreen" if train.labels[j] == test.labels[i] else "red" for j in nearest])
        if rows:
            common.save_grid(Path(folder) / f"{name}.png", rows, labels, border=borders)


def main(args):
    device, encoder, info = open_encoder(args)
    train, test = open_data(args, info)
    options = dict(batch_size=args.batch_size, workers=args.workers, amp=args.amp)
    train_y, test_y = torch.from_numpy(train.labels), torch.from_numpy(test.labels)
    common.say(f"{protocol(args, info, train, test)}\nkNN: cosine similarity, votes exp(similarity / {args.temperature})")
    results = {}
    for name, network in {"encoder": encoder, **floor_encoders(args, info, device, train)}.items():
        train_x, test_x = (common.extract_features(network, part, info, device, **options) for part in (train, test))
        scores = common.knn_scores(train_x.to(device), train_y, test_x.to(device), args.k, args.temperature, len(train.classes))
        predicted = {k: score.argmax(1) for k, score in scores.items()}
        results[name] = {f"knn{k}_top1": 100 * (p == test_y).float().mean().item() for k, p in predicted.items()}
        common.say(f"{name:>10}  " + "  ".join(f"k={k} {v:.2f} %" for k, v in zip(args.k, results[name].values(), strict=True)))
        if name == "encoder" and args.pictures and common.rank_and_world()[0] == 0:
            middle = args.k[len(args.k) // 2 - (len(args.k) > 1)]
            write_pictures(args.pictures, train, test, train_x, test_x, predicted[middle])
            common.say(f"pictures in {args.pictures}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    main(parse_args())
