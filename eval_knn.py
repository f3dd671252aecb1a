"""Judge an encoder by weighted k-nearest-neighbour classification of its frozen features.

Each test image's class is voted for by its k nearest training images, a vote being exp(cosine similarity / temperature), as in
Wu et al. (arXiv 1805.01978). Nothing is trained, so the number is the representation's own. Beside it stand two floors:
raw pixels, and the same encoder untrained.

    python eval_knn.py runs/patchmix-patterns-vit_micro-s0
    python eval_knn.py RUN/last.pt --encoder query --dataset cifar10 --data-dir DIR --pictures neighbours
    python eval_knn.py RUN --dump features.npz --attention maps --similarities bars --images 0 7
    python eval_knn.py --arch vit_small --random-init --dataset cifar10 --data-dir DIR
    torchrun --nproc_per_node=8 eval_knn.py RUN --data-dir DIR
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


# ---------------------------------------------------------------- 2. kNN


def parse_args(argv=None):
    parser = common.ArgumentParser("eval_knn.py", description=__doc__.splitlines()[0])
    add_encoder_flags(parser)
    parser.add_argument("--k", type=int, nargs="+", default=[10, 20, 100, 200], metavar="K", help="neighbours (10 20 100 200)")
    parser.add_argument("--temperature", type=float, default=0.07, metavar="T")
    parser.add_argument("--pictures", metavar="DIR", help="write grids of test images and their nearest training images")
    parser.add_argument("--dump", metavar="FILE.npz", help="write features, labels, class names and paths for numpy")
    parser.add_argument("--attention", metavar="DIR", help="ViTs: draw what the CLS token attends to in the last block, by head")
    parser.add_argument(
        "--similarities", metavar="DIR", help="draw how similar test images and some training images are, as bars"
    )
    parser.add_argument("--images", type=int, nargs="+", metavar="I", help="for those two: test images, from 0 (four at random)")
    parser.add_argument("--keys", type=int, nargs="+", metavar="I", help="for --similarities: training images (seven at random)")
    args = parser.parse_args(argv)
    check_encoder_flags(args)
    if min(args.k) < 1 or not 1e-6 <= args.temperature < math.inf:
        common.fail("--k: give numbers above 0; --temperature: from 1e-6")
    args.k = list(dict.fromkeys(args.k))
    check_outputs(args)
    return args


def check_outputs(args):
    """Exit with a line, before any work, where something cannot be written or a flag would do nothing."""
    if args.dump and os.path.exists(args.dump):
        common.fail(f"--dump {args.dump} is there already: give another name")
    for name in ("pictures", "dump", "attention", "similarities"):
        if path := getattr(args, name):
            folder = Path(path).absolute().parent if name == "dump" else Path(path).absolute()
            there = next(p for p in (folder, *folder.parents) if os.path.exists(p))
            too_long = any(len(os.fsencode(part)) > 255 for part in Path(path).parts)
            if not there.is_dir() or not os.access(there, os.W_OK) or too_long:
                common.fail(f"--{name} {path} cannot be written: {there} is no folder you may write to, or a name is too long")
    if (args.images and not (args.attention or args.similarities)) or (args.keys and not args.similarities):
        common.fail("--images needs --attention or --similarities, and --keys needs --similarities")


def choose_images(args, train, test):
    """(test images, keys for each of them) to draw, as indices: the given ones, or random ones that no encoder changes.

    PatchMix's Fig. 4 has a key of the query's class as number 4, between two of related classes. Here these are its
    neighbours in the order of the classes, and ImageNet's ids are sorted by kind; the others are of any class.
    """
    for name, given, part in (("images", args.images, test), ("keys", args.keys, train)):
        if given and not (0 <= min(given) and max(given) < len(part)):
            common.fail(f"--{name} {' '.join(map(str, given))}: give numbers from 0 to {len(part) - 1}")
    images = list(dict.fromkeys(args.images or torch.randperm(len(test), generator=common.generator(0))[:4].tolist()))
    keys, count = [], len(train.classes)
    for i in images:
        own, draw = int(test.labels[i]), np.random.default_rng(i)
        far = [c for c in draw.permutation(count).tolist() if (c - own) % count not in (0, 1, count - 1)]
        classes = [*far[:2], (own - 1) % count, own, (own + 1) % count, *far[2:4]]
        keys.append(args.keys or [int(draw.choice(np.flatnonzero(train.labels == c))) for c in classes])
    return images, keys


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


def write_dump(path, lines, train, test, train_x, test_x):
    """Everything that a kNN needs as one .npz without pickles: numpy.load reads it.

    train_features (n, d) float32 as the encoder gives them, train_labels (n,) int64, and train_paths (n,) text, or
    train_index (n,) where images do not come from files: their numbers among those used here; the same for test; classes: the
    labels' names; protocol: what the features are, as text.
    """
    arrays = {"classes": np.array(train.classes, str), "protocol": np.array(lines)}
    for name, part, x in (("train", train, train_x), ("test", test, test_x)):
        arrays |= {f"{name}_features": x.numpy(), f"{name}_labels": part.labels}
        where = ("index", np.arange(len(part))) if part.paths is None else ("paths", np.array(part.paths, str))
        arrays[f"{name}_{where[0]}"] = where[1]

    def write(temporary):
        with open(temporary, "wb") as file:  # given a name, savez would add .npz to it
            np.savez(file, **arrays)

    common.write_whole(path, write)


# ------------------------------------------- 3. attention (PatchMix, Fig. 11)


@torch.no_grad()
def last_attention(encoder, x):
    """The softmax weights of a timm ViT's last block: x (N, 3, H, W) -> (N, heads, T, T) for T tokens, CLS first.

    Row i says what token i attends to, and sums to 1. timm's fused kernel never shows them, so it is switched off for this
    pass; they are what goes into the block's attention dropout. Exits with a line if there is no CLS token in that block, or
    its attention is not one softmax over the tokens for each head.
    """
    name, attention = type(encoder).__name__, getattr(getattr(encoder, "blocks", [None])[-1], "attn", None)
    has_cls = getattr(encoder, "cls_token", None) is not None and getattr(encoder, "num_prefix_tokens", 0) > 0
    if not has_cls or not isinstance(getattr(attention, "attn_drop", None), nn.Module):
        common.fail(f"--attention needs a ViT with a CLS token and attention in its last block, and {name} has none")
    fused, attention.fused_attn, seen = getattr(attention, "fused_attn", False), False, []
    with attention.attn_drop.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
        encoder(x)
    attention.fused_attn = fused
    heads, tokens, columns = seen[0].shape[1:]
    patches = max(0, tokens - encoder.num_prefix_tokens)
    if heads != attention.num_heads or tokens != columns or math.isqrt(patches) ** 2 != patches:
        common.fail(f"--attention: {name}'s last block has no softmax from a CLS token to a square of patches for each head")
    return seen[0]


def cls_maps(encoder, x):
    """What the CLS token attends to, on the grid of patches: x (N, 3, H, W) -> (N, heads, side, side).

    The weights as they are, without the columns of CLS and of what other tokens come before the patches (PatchMix, App. E).
    """
    maps = last_attention(encoder, x)[:, :, 0, encoder.num_prefix_tokens :]
    return maps.unflatten(2, (math.isqrt(maps.shape[2]),) * 2)


VIRIDIS = torch.tensor([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]) / 255


def coloured(x):
    """Numbers in [0, 1] as colours from violet over green to yellow: (..., H, W) -> (..., 3, H, W)."""
    low = (4 * x).long().clamp(max=3)
    return torch.lerp(VIRIDIS[low], VIRIDIS[low + 1], (4 * x - low)[..., None]).movedim(-1, -3)


def write_attention(folder, encoder, info, device, test, images):
    """heads.png: a row for each image, beside it the maps of all heads. head1.png, ...: image, map, and map over the image.

    Violet is no attention, yellow the map's greatest weight.
    """
    crops = common.CentreCrops(test, info["image_size"], info["interpolation"])
    x = torch.stack([crops[i] for i in images]) / 255
    normal = common.normalize(x, info["mean"], info["std"])
    maps = torch.cat([cls_maps(encoder, one.to(device)).cpu() for one in normal.split(1)])
    maps = F.interpolate(maps / maps.amax((2, 3), keepdim=True).clamp_min(1e-12), x.shape[-2:])  # each patch a square
    colours, labels = coloured(maps), [f"{i} {test.classes[test.labels[i]]}" for i in images]
    common.save_grid(Path(folder) / "heads.png", [torch.cat([a[None], b]) for a, b in zip(x, colours, strict=True)], labels)
    for head, own in enumerate(colours.unbind(1), start=1):
        rows = list(torch.stack([x, own, (x + own) / 2], 1))
        common.save_grid(Path(folder) / f"head{head}.png", rows, labels)


# ---------------------------------------- 4. similarities (PatchMix, Fig. 4)


def similarity(query, keys, temperature):
    """exp(cosine / temperature) / exp(1 / temperature) in (0, 1], kNN's vote (PatchMix, 4.5): (d,), (n, d) -> (n,)."""
    cosine = F.normalize(keys, dim=1) @ F.normalize(query, dim=0)
    return ((cosine.clamp(max=1) - 1) / temperature).exp()


def draw_bars(heights, colours, side=96):
    """Bars of heights in [0, 1], each a white square's middle: (n,) and n RGB colours -> (n, 3, side, side)."""
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    filled = (side - row <= (side * heights).round()[:, None, None]) & ((2 * column - side).abs() < side // 2)
    return torch.where(filled[:, None], torch.tensor(colours)[:, :, None, None] / 255, 1.0)


def write_similarities(folder, info, train, test, images, keys, bars):
    """queryI.png for each chosen test image I, and its numbers as a line: the query and its keys, bars for each encoder below.

    bars: for each image {encoder: similarities of its keys (n,)}. Keys of the query's class are framed and drawn in green.
    """
    train_crops, test_crops = (common.CentreCrops(part, info["image_size"], info["interpolation"]) for part in (train, test))
    for i, own, values in zip(images, keys, bars, strict=True):
        same = [train.labels[j] == test.labels[i] for j in own]
        colours = [(50, 205, 50) if s else (70, 130, 180) for s in same]
        rows = [torch.stack([test_crops[i], *(train_crops[j] for j in own)]) / 255]
        rows += [torch.cat([torch.ones(1, 3, 96, 96), draw_bars(value, colours)]) for value in values.values()]
        query = f"{i} {test.classes[test.labels[i]]}"
        border = [[None, *("limegreen" if s else "silver" for s in same)]] * len(rows)
        common.save_grid(Path(folder) / f"query{i}.png", rows, [query, *values], border)
        common.say(f"query {query}; keys {', '.join(f'{j} {train.classes[train.labels[j]]}' for j in own)}")
        for name, value in values.items():
            common.say(f"{name:>10}  " + "  ".join(f"{v:.3f}" for v in value.tolist()))


# --------------------------------------------------------------- 5. main


@common.memory_in_words
def main(args):
    device, encoder, info = open_encoder(args)
    if args.attention:  # refuses before long work
        last_attention(encoder, torch.zeros(1, 3, info["image_size"], info["image_size"], device=device))
    train, test = open_data(args, info)
    images, keys = choose_images(args, train, test)
    options = dict(batch_size=args.batch_size, workers=args.workers, amp=args.amp)
    train_y, test_y = torch.from_numpy(train.labels), torch.from_numpy(test.labels)
    lines = f"{protocol(args, info, train, test)}\nkNN: cosine similarity, votes exp(similarity / {args.temperature})"
    common.say(lines)
    results, bars, first = {}, [{} for _ in images], common.rank_and_world()[0] == 0
    for name, network in {"encoder": encoder, **floor_encoders(args, info, device, train)}.items():
        train_x, test_x = (common.extract_features(network, part, info, device, **options) for part in (train, test))
        if name == "encoder" and args.dump and first:
            write_dump(args.dump, lines, train, test, train_x, test_x)
        for i, own, values in zip(images, keys, bars, strict=True):
            values[name] = similarity(test_x[i], train_x[own], args.temperature)
        scores = common.knn_scores(train_x.to(device), train_y, test_x.to(device), args.k, args.temperature, len(train.classes))
        predicted = {k: score.argmax(1) for k, score in scores.items()}
        results[name] = {f"knn{k}_top1": 100 * (p == test_y).float().mean().item() for k, p in predicted.items()}
        common.say(f"{name:>10}  " + "  ".join(f"k={k} {v:.2f} %" for k, v in zip(args.k, results[name].values(), strict=True)))
        if name == "encoder" and args.pictures and first:
            middle = args.k[(len(args.k) - 1) // 2]
            write_pictures(args.pictures, train, test, train_x, test_x, predicted[middle])
    if args.attention and first:
        write_attention(args.attention, encoder, info, device, test, images)
    if args.similarities and first:
        write_similarities(args.similarities, info, train, test, images, keys, bars)
    for flag in ("pictures", "dump", "attention", "similarities"):
        if getattr(args, flag):
            common.say(f"{flag} in {getattr(args, flag)}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    main(parse_args())
