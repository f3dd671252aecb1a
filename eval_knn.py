"""Judge an encoder by weighted k-nearest-neighbour classification of its frozen features.

The k nearest training images vote for the class of a test image. A vote is exp(cosine similarity / temperature), as in
Wu et al. (arXiv 1805.01978). Nothing is trained, so the number is the representation's own. The same number is printed
for two floors: raw pixels, and the same encoder untrained.

    python eval_knn.py runs/patchmix-patterns-vit_micro-s0
    python eval_knn.py RUN/last.pt --encoder query --dataset cifar10 --data-dir DIR --pictures neighbours
    python eval_knn.py RUN --dump features.npz --attention maps --similarities bars --images 0 7
    python eval_knn.py --arch vit_small --random-init --dataset cifar10 --data-dir DIR
    torchrun --nproc_per_node=8 eval_knn.py RUN --data-dir DIR

The encoder computes in bf16 on GPUs that have it (`--amp off`: in float32, with products in TF32). Neighbours are
always compared in float32.
Your own encoder and data: eval_knn.main(eval_knn.parse_args(["RUN"]), encoder=MODULE, train=DATASET, test=DATASET).
"""

import copy
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageOps
from torchvision.transforms.functional import to_tensor

import common

# ================================================================ 1. arguments


# fmt: off
FLAGS = {  # {group: {flag: argparse's options}}
    "kNN": dict(
        k=dict(type=common.COUNT, nargs="+", default=[10, 20, 100, 200], metavar="K", help="numbers of neighbours"),
        temperature=dict(
            type=common.number(float, 1e-6), default=0.07, metavar="T", help="temperature of the votes"),
        batch_size=dict(type=common.COUNT, default=256, metavar="N", help="images encoded at once, by each process"),
    ),
    "files to write": dict(
        dump=dict(metavar="FILE.npz", help="features, labels, class names and paths for numpy; needs no labels"),
        pictures=dict(metavar="DIR", help="grids of test images and their nearest training images"),
        attention=dict(metavar="DIR", help="ViTs: what each head's CLS token attends to in the last block"),
        similarities=dict(metavar="DIR", help="how similar test images and some training images are, as bars"),
        images=dict(
            type=common.NATURAL, nargs="+", metavar="I",
            help="test images of --attention and --similarities, from 0 (default: four at random)"),
        keys=dict(
            type=common.NATURAL, nargs="+", metavar="I",
            help="training images of --similarities (default: seven at random)"),
    ),
}
# fmt: on


def parse_args(argv=None):
    """The command line as a namespace. Exits with an error message on a mistake.

    argv: a list of words; sys.argv's if None.
    """
    args = common.parse_evaluation("eval_knn.py", __doc__, argv, FLAGS)
    if not args.attention and not args.similarities:
        common.refuse(args, ["images"], "it chooses what --attention and --similarities draw, and neither is given")
    if not args.similarities:
        common.refuse(args, ["keys"], "it chooses what --similarities draws, which is not given")
    return args


def make_folders(args):
    """Make the folders of what is to be written. Exits with an error message, before any work, if one cannot be."""
    if args.dump and os.path.exists(args.dump):
        common.fail(f"--dump {args.dump} is there already: give another name")
    for name in ("dump", "pictures", "attention", "similarities"):
        if path := getattr(args, name):
            try:
                os.makedirs(Path(path).absolute().parent if name == "dump" else path, exist_ok=True)
            except OSError as error:
                common.fail(f"--{name} {path} cannot be written: {error.strerror}")


def choose_images(args, train, test):
    """What to draw, as indices: (test images, a list of keys for each of them), where keys are training images.

    They are --images and --keys. What is not given is drawn at random, alike for every encoder. PatchMix's Fig. 4 has a
    key of the query's class as number 4, between keys of two related classes. Here these are the classes next to it in
    order, and ImageNet's ids are sorted by kind. The other keys are of any class.
    """
    for name, given, part in (("images", args.images, test), ("keys", args.keys, train)):
        if given and max(given) >= len(part):
            common.fail(f"--{name} {' '.join(map(str, given))}: give numbers from 0 to {len(part) - 1}")
    images = args.images or torch.randperm(len(test), generator=common.generator(0))[:4].tolist()
    keys, count = [], len(train.classes)
    for i in images:
        own, draw = int(test.labels[i]), np.random.default_rng(i)
        far = [c for c in draw.permutation(count).tolist() if (c - own) % count not in (0, 1, count - 1)]
        classes = [*far[:2], (own - 1) % count, own, (own + 1) % count, *far[2:4]]
        rows = [np.flatnonzero(train.labels == c) for c in classes]
        keys.append(args.keys or [int(draw.choice(own)) for own in rows if len(own)])
    return images, keys


# ==================================================== 2. what can be written


def write_dump(path, lines, parts, features):
    """Write the features as one .npz without pickles, which numpy.load reads.

    lines: what the features are, as text. parts: {"train": images, "test": images}, the latter only if there is a test
    set. features: the same of tensors (n, d).
    The file has train_features (n, d) float32, as the encoder gives them, and train_labels (n,) int64, -1 where there
    is none. It has train_paths (n,) text or, if the images do not come from files, train_index (n,), their numbers
    among those used here. It has the same for test, the names `classes` of the labels, and the text `protocol`.
    """
    arrays = {"classes": np.array(parts["train"].classes, str), "protocol": np.array(lines)}
    for name, part in parts.items():
        arrays |= {f"{name}_features": features[name].numpy(), f"{name}_labels": part.labels}
        if part.paths is None:
            arrays[f"{name}_index"] = np.arange(len(part))
        else:
            arrays[f"{name}_paths"] = np.array([part.path(i) for i in range(len(part))])

    def write(temporary):
        with open(temporary, "wb") as file:  # given a name, savez would add .npz to it
            np.savez(file, **arrays)

    if common.rank_and_world()[0] == 0:
        common.write_whole(path, write)
    common.say(f"features written to {path}")


def write_neighbours(folder, info, train, test, train_x, test_x, predicted, count=12, neighbours=10):
    """Write right.png and wrong.png: test images, their class, the predicted one, and the nearest training images.

    train_x: this process's rows of the bank. test_x: (m, d), whole. predicted: (m,). count: rows per picture. A green
    frame means the test image's class, a red one another class.
    """
    crops, test_crops = (common.CentreCrops(part, info["image_size"], info["interpolation"]) for part in (train, test))
    for name, right in (("right", True), ("wrong", False)):
        chosen = torch.nonzero((predicted == torch.from_numpy(test.labels)) == right).flatten()
        chosen = chosen[torch.randperm(len(chosen), generator=common.generator(0))[:count]]
        with common.exact_products():
            similarity = F.normalize(train_x, dim=1) @ F.normalize(test_x[chosen], dim=1).T
        similarity = common.gather_uneven(similarity)
        nearest = similarity.topk(min(neighbours, len(train)), dim=0).indices.T.tolist()
        rows, labels, border, captions = [], [], [], []
        for i, own in zip(chosen.tolist(), nearest, strict=True):
            rows.append(torch.stack([test_crops[i], *(crops[j] for j in own)]) / 255)
            labels.append(f"true: {test.classes[test.labels[i]]}\npredicted: {train.classes[predicted[i]]}")
            border.append([None, *("limegreen" if train.labels[j] == test.labels[i] else "red" for j in own)])
            captions.append([f"test {i}", *(train.classes[train.labels[j]][:14] for j in own)])
        if rows:
            save_picture(Path(folder) / f"{name}.png", rows, labels, border, captions)


def save_picture(path, *grid, **more):
    """Write a grid of images, as `common.save_grid`, and say where it is."""
    common.save_grid(path, *grid, **more)
    common.say(f"picture written to {path}")


@torch.no_grad()
def last_attention(encoder, x):
    """The softmax weights of a timm ViT's last block: (N, heads, T, T) for T tokens, of which CLS is the first.

    x: (N, 3, H, W). Row i says what token i attends to, and sums to 1. timm's fused kernel never shows the weights, so
    it is switched off for this pass. They are taken where they go into the block's attention dropout.
    Exits with an error message if that block has no CLS token, or if its attention is not one softmax over the tokens
    for each head.
    """
    name, attention = type(encoder).__name__, getattr(getattr(encoder, "blocks", [None])[-1], "attn", None)
    if getattr(encoder, "cls_token", None) is None or not hasattr(attention, "attn_drop"):
        common.fail(f"--attention needs a ViT with a CLS token and attention in its last block, and {name} has none")
    fused, attention.fused_attn, seen = getattr(attention, "fused_attn", False), False, []
    with attention.attn_drop.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
        encoder(x)
    attention.fused_attn = fused
    heads, tokens, columns = seen[0].shape[1:]
    patches = tokens - encoder.num_prefix_tokens
    if heads != attention.num_heads or tokens != columns or math.isqrt(max(0, patches)) ** 2 != patches:
        common.fail(f"--attention: {name}'s last block has no softmax from a CLS token to a square of patches by head")
    return seen[0]


def cls_maps(encoder, x):
    """What the CLS token attends to, on the grid of patches: (N, heads, side, side), of images x (N, 3, H, W).

    These are the softmax's weights as they are. The columns of CLS and of other tokens before the patches are left out
    (PatchMix, App. E).
    """
    maps = last_attention(encoder, x)[:, :, 0, encoder.num_prefix_tokens :]
    return maps.unflatten(2, (math.isqrt(maps.shape[2]),) * 2)


def coloured(x):
    """A map (H, W) of numbers in [0, 1] as colours (3, H, W), from violet over green to yellow."""
    gray = Image.fromarray(x.mul(255).round().byte().numpy())
    return to_tensor(ImageOps.colorize(gray, "#440154", "#fde725", mid="#21918c"))


def write_attention(folder, encoder, info, device, test, images):
    """Write attention.png, one row per image: the image, each head's map, their mean, and the mean over the image.

    Violet is no attention. Yellow is the map's greatest weight, which the caption gives in percent (PatchMix, Fig. 11).
    """
    crops, rows, captions = common.CentreCrops(test, info["image_size"], info["interpolation"]), [], []
    for x in (crops[i] / 255 for i in images):
        maps = cls_maps(encoder, common.normalize(x[None], info["mean"], info["std"]).to(device)).cpu()[0]
        maps = torch.cat([maps, maps.mean(0, keepdim=True)])
        peaks = maps.amax((1, 2))
        large = F.interpolate((maps / peaks[:, None, None])[None], x.shape[1:])[0]  # each patch a square
        colours = [coloured(one) for one in large]
        rows.append(torch.stack([x, *colours, (x + colours[-1]) / 2]))
        names = [*(f"head {h}" for h in range(1, len(maps))), "mean"]
        captions.append(["", *(f"{n}, {100 * p:.0f} %" for n, p in zip(names, peaks, strict=True)), "mean, over it"])
    labels = [f"{i} {test.classes[test.labels[i]]}" for i in images]
    save_picture(Path(folder) / "attention.png", rows, labels, captions=captions)


@common.exact_products()
def similarity(query, keys, temperature):
    """exp(cosine / temperature) / exp(1 / temperature), a vote of kNN: (n,) in (0, 1] (PatchMix, section 4.5).

    query: (d,). keys: (n, d). Both are L2-normalised here.
    """
    cosine = F.normalize(keys, dim=1) @ F.normalize(query, dim=0)
    return ((cosine.clamp(max=1) - 1) / temperature).exp()


def draw_bars(heights, colours, side=96):
    """Bars as images (n, 3, side, side). heights: (n,) in [0, 1], drawn on a pale bar of height 1. colours: n RGB."""
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    middle, filled = (2 * column - side).abs() < side // 2, side - row <= (side * heights).round()[:, None, None]
    pale = torch.where(middle, 0.92, 1.0)
    return torch.where((middle & filled)[:, None], torch.tensor(colours)[:, :, None, None] / 255, pale)


def write_similarities(folder, info, train, test, images, keys, bars):
    """Write queryI.png for each chosen test image I: the query and its keys, and below them bars for each encoder.

    bars: for each image {encoder: similarities of its keys (n,)}. Keys of the query's class are framed and drawn in
    green (PatchMix, Fig. 4).
    """
    crops, test_crops = (common.CentreCrops(part, info["image_size"], info["interpolation"]) for part in (train, test))
    for i, own, values in zip(images, keys, bars, strict=True):
        same = [train.labels[j] == test.labels[i] for j in own]
        colours = [(50, 205, 50) if s else (70, 130, 180) for s in same]
        rows = [torch.stack([test_crops[i], *(crops[j] for j in own)]) / 255]
        rows += [torch.cat([torch.ones(1, 3, 96, 96), draw_bars(value, colours)]) for value in values.values()]
        border = [[None, *("limegreen" if s else "silver" for s in same)], *[None] * len(values)]
        captions = [[test.classes[test.labels[i]], *(train.classes[train.labels[j]] for j in own)]]
        captions += [["", *(f"{v:.3f}" for v in value.tolist())] for value in values.values()]
        save_picture(Path(folder) / f"query{i}.png", rows, [f"test {i}", *values], border, captions)


# ===================================================================== 3. main


def main(args, encoder=None, train=None, test=None):
    """Judge an encoder as args say: {"encoder" or a floor: {"knn20_top1": percent, ...}}.

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of timm's.
    train, test: map-style Datasets of images and labels to use instead of --dataset. Without labels of two classes
    nothing is judged, and --dump can be written only: the result is {}.
    """
    args = copy.copy(args)
    device, encoder, info = common.open_encoder(args, encoder, own=train is not None)
    make_folders(args)
    if args.attention:  # refuses an encoder without a CLS token before long work
        last_attention(encoder, torch.zeros(1, 3, info["image_size"], info["image_size"], device=device))
    pictures = args.pictures or args.attention or args.similarities
    train, test = common.open_data(args, info, train, test, labels=pictures or not args.dump)
    judged = test is not None and len(train.classes) > 1  # else there is only something to dump
    if not judged:
        common.refuse(args, ["k", "temperature", "no_floors"], "without labels of two classes nothing is judged")
    parts = {"train": train} if test is None else {"train": train, "test": test}
    images, keys = choose_images(args, train, test) if args.attention or args.similarities else ((), ())
    votes = f"kNN: cosine in float32, votes exp(similarity / {args.temperature})"
    lines = f"{common.protocol(args, info, train, test)}\n{votes}"
    common.say(lines)
    how = dict(batch_size=args.batch_size, workers=args.workers, amp=args.bf16)
    networks = {"encoder": encoder, **(common.floor_encoders(args, info, device, len(train)) if judged else {})}
    results, bars = {}, [{} for _ in images]
    for name, network in networks.items():
        x = {}
        for part, own in parts.items():  # the bank stays shared out over the processes
            what = f"features of {name}, {part}"
            x[part] = common.extract_features(network, own, info, device, **how, whole=part == "test", what=what)
        if name == "encoder" and args.dump:
            write_dump(args.dump, lines, parts, x | {"train": common.gather_uneven(x["train"])})
        if not judged:
            continue
        if args.similarities:
            keys_x = common.extract_features(network, train.subset(np.concatenate(keys)), info, device, **how)
            for i, own_x, values in zip(images, keys_x.split([len(own) for own in keys]), bars, strict=True):
                values[name] = similarity(x["test"][i], own_x, args.temperature)
        train_y, test_y = common.own_rows(torch.from_numpy(train.labels)), torch.from_numpy(test.labels)
        bank, queries = x["train"].to(device), x["test"].to(device)
        scores = common.knn_scores(bank, train_y, queries, args.k, args.temperature, len(train.classes))
        predicted = {k: score.argmax(1) for k, score in scores.items()}
        results[name] = {f"knn{k}_top1": 100 * (p == test_y).float().mean().item() for k, p in predicted.items()}
        common.say(f"{name:>10}  " + "  ".join(f"k={k} {results[name][f'knn{k}_top1']:.2f} %" for k in predicted))
        if name == "encoder" and args.pictures:
            middle = args.k[(len(args.k) - 1) // 2]
            write_neighbours(args.pictures, info, train, test, x["train"], x["test"], predicted[middle])
    if args.attention:
        write_attention(args.attention, encoder, info, device, test, images)
    if args.similarities:
        write_similarities(args.similarities, info, train, test, images, keys, bars)
    if dist.is_initialized():
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    common.start(main, parse_args)
