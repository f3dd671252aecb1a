"""Makes pictures for the README and of runs, by hand from the project's folder. Most need matplotlib.

    python tests/tools/figures.py explain [FOLDER]                  README's pictures: what goes in, what is compared
    python tests/tools/figures.py corners OUT.png                   JointCrop, Fig. 7: how far apart the two crops are
    python tests/tools/figures.py similarity OUT.png RUN [RUN ...]  JCL, Fig. 3: how much an image's features vary
    python tests/tools/figures.py encoder RUN --pictures DIR        nearest neighbours; --attention, --similarities DIR

`mechanisms` has the papers' other analyses, as numbers: results.py makes its tables of them.
"""

import argparse
import importlib
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageColor, ImageDraw, ImageOps
from timm.models.vision_transformer import Attention
from torch.utils.data import default_convert
from torchvision.transforms.functional import to_pil_image, to_tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
import common  # noqa: E402
import eval_knn  # noqa: E402

SIDE = 128  # of a picture in a grid, in pixels


def subplots(*args, **options):
    """matplotlib's subplots, for files; imported here so that the numbers can be had without it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*args, **options)


def cell(image, caption="", frame="white"):
    """Return an image (3, H, W), uint8 or in [0, 1], at SIDE pixels in a frame, above a caption, as another image."""
    sheet = Image.new("RGB", (SIDE + 20, SIDE + 20), "white")
    draw = ImageDraw.Draw(sheet)
    draw.rectangle((7, 0, SIDE + 12, SIDE + 5), fill=frame)
    sheet.paste(to_pil_image(image).resize((SIDE, SIDE), Image.Resampling.BOX), (10, 3))
    draw.text((SIDE // 2 + 10, SIDE + 7), caption, fill="black", font_size=11, anchor="ma")
    return to_tensor(sheet)


# ------------------------------------------------------------------- explain


def explain(args):
    """The pictures of README: what goes in, and what is compared with what."""
    import explain as pictures

    pictures.explain(args.folder)


# ---------------------------------------------------------- JointCrop, Fig. 7


def corners(args):
    """How far apart two crops' corners are on average, by beta: ours, with the released offset, and the paper's."""
    sys.path.append(str(Path(__file__).parents[1]))
    from test_moco_jointcrop import FIGURE7, RANDOM_CROP, mean_corner_distance  # needs pytest, as nothing else here

    beta = [4 - i / 2 for i in range(len(FIGURE7))]
    ours, offset = ([mean_corner_distance(b, shift, args.pairs) for b in beta] for shift in (0.0, 0.1))
    random_crop = mean_corner_distance(None, 0.0, args.pairs)
    print("  beta    ours  offset 0.1   paper")
    for row in zip(beta, ours, offset, FIGURE7, strict=True):
        print("{:6.1f} {:7.2f} {:11.2f} {:7.2f}".format(*row))
    print(f"RandomCrop {random_crop:.2f}, paper {RANDOM_CROP}")
    figure, axes = subplots(figsize=(9, 5))
    axes.plot(beta, ours, label="here: the paper's law")
    axes.plot(beta, offset, linestyle="--", label="here: --variant released, offset 0.1")
    axes.plot(beta, FIGURE7, "k.", markersize=9, label="read from the paper's Fig. 7")
    label = f"here: RandomCrop, {random_crop:.2f} (paper: {RANDOM_CROP})"
    axes.axhline(random_crop, color="gray", linestyle=":", label=label)
    axes.set(xlabel="beta of J-Crop(beta)", ylabel="mean distance of the top-left corners, px (image: 224 x 224)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.out, dpi=100)


# ---------------------------------------------------------------- JCL, Fig. 3


def views_of(config):
    """The two kinds of view of a run, a list of two View, from its config.json.

    They are drawn independently here: what ties the views of a pair (JointCrop) is left out, and so are LoGo's local
    crops and CLIM's partners.
    """
    method = importlib.import_module(config["method"])
    return method.augmentation(argparse.Namespace(**config))[:2]


def similarity_statistics(features):
    """How far the features of an image's views agree (JCL, App. E): features (n, views, d) -> two (n,) float64 arrays.

    The first is the mean of all views x views cosine similarities, self-pairs included. The second is the mean diagonal
    of the (biased) covariance of the L2-normalised features. Both follow from their mean mu, as |mu|^2 and
    (1 - |mu|^2) / d. Raises RuntimeError if features are zero or not finite.
    """
    x = F.normalize(features.double(), dim=2)
    if not (x.norm(dim=2) - 1).abs().max() < 1e-6:  # not a number, too
        raise RuntimeError("some features are zero or not finite")
    similarity = x.mean(1).square().sum(1)
    return similarity.numpy(), ((1 - similarity) / x.shape[2]).numpy()


@torch.no_grad()
def view_features(encoder, info, kinds, images, index, count, device):
    """Features of `count` views of each image of an index: (n, count, d) float32 on the CPU.

    kinds: list of View, which take turns; their size is the encoder's. The draws depend on the image alone, so that
    runs share them.
    """
    views = [kinds[i % len(kinds)]._replace(size=info["image_size"]) for i in range(count)]
    data = common.ViewDataset(images, views, 0, info["interpolation"])
    at_once = max(1, 256 // count)
    batches = [[(0, i) for i in index[start : start + at_once]] for start in range(0, len(index), at_once)]
    found = []
    for batch in common.Loader(data, device, batch_sampler=batches, collate_fn=default_convert):
        x = torch.stack(batch["views"], 1).flatten(0, 1).to(device)
        x = common.normalize(common.colour(x, batch["colour"].flatten(0, 1)), info["mean"], info["std"])
        found.append(encoder(x).flatten(1).cpu().unflatten(0, (-1, count)))
    return torch.cat(found)


def view_statistics(encoder, info, kinds, images, index, count, device):
    """`similarity_statistics` of `count` views of the images of an index, (2, n)."""
    return np.stack(similarity_statistics(view_features(encoder, info, kinds, images, index, count, device)))


def open_runs(args):
    """The runs' kinds of view, and their images, of --split."""
    configs = [common.read_config(run) for run in args.runs]
    if {} in configs:
        common.fail(f"{args.runs[configs.index({})]} is not a run's folder: it has no config.json")
    if args.dataset is None:
        if len({config["dataset"] for config in configs}) > 1:
            common.fail("the runs were trained on different data sets: give --dataset")
        args.dataset, args.data_dir = configs[0]["dataset"], args.data_dir or configs[0]["data_dir"]
    images = common.load_images(args.dataset, args.data_dir, args.split == "train", configs[0]["image_size"])
    if images is None:
        common.fail(f"{args.dataset} has no test images: give --split train")
    kinds = [views_of(config) for config in configs]
    if any(other != kinds[0] for other in kinds):
        print("note: the runs' views differ, so each run is shown views of its own")
    return kinds, images


def similarity(args):
    """Mean and standard deviation over the images of both statistics, and their histograms, for each run."""
    kinds_of_runs, images = open_runs(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # In random order, since the images may be sorted by class.
    index = torch.randperm(len(images), generator=common.generator(0))[: args.images].tolist()
    of = f"{len(index)} of {len(images)} images of {args.dataset}, {args.split} split"
    print(f"{of}, {args.views} views each; mean +- standard deviation")
    found = []
    for run, kinds in zip(args.runs, kinds_of_runs, strict=True):
        encoder, info = common.load_backbone(run)
        found.append(view_statistics(encoder.to(device), info, kinds, images, index, args.views, device))
        (a, b), (sa, sb) = found[-1].mean(1), found[-1].std(1)
        name = f"{Path(run).name}, {encoder.num_features} features"
        print(f"{name}: similarity {a:.4f} +- {sa:.4f}, variance {b:.3e} +- {sb:.1e}")
    figure, both = subplots(1, 2, figsize=(10, 4))
    names = "mean cosine similarity of an image's views", "mean variance of a feature over an image's views"
    for axes, name, values in zip(both, names, zip(*found, strict=True), strict=True):
        bins = np.histogram_bin_edges(np.concatenate(values), 50)
        for run, value in zip(args.runs, values, strict=True):
            axes.hist(value, bins, alpha=0.5, label=Path(run).name)
        axes.set(xlabel=name, ylabel="images")
    both[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


# ------------------------------------------- CLIM: positives, and Table 10


def same_class_share(labels, positives):
    """The share of chosen positives (N, P) that are of their image's class: labels (N,)."""
    return (labels[positives] == labels[:, None]).float().mean().item()


def choose(run, images, selections):
    """{selection: CLIM's table of positives, (N, 10)}, by a run's momentum encoder: any run of a queue method."""
    import clim

    state = common.load_checkpoint(Path(run) / "last.pt")
    config, info = state["config"], state["backbone"]
    config = vars(clim.parse_args([])) | config  # the queue methods' models have the same parts
    model = clim.CLIM(argparse.Namespace(**config))
    model.load_state_dict(state["model"])
    encoder = torch.nn.Sequential(model.momentum_backbone, model.momentum_projector)
    x = F.normalize(common.extract_features(encoder, images, info, torch.device("cpu"))[0], dim=1)
    flags = ["--dataset", config["dataset"], "--arch", config["arch"], "--selection"]
    recipes = {selection: clim.parse_args([*flags, selection]) for selection in selections}
    return {selection: clim.choose_positives(args, x, common.generator(0)) for selection, args in recipes.items()}


def class_similarity(features, labels):
    """Mean cosine of pairs of a class, averaged over the classes (Table 10): features (N, d), labels (N,)."""
    x = F.normalize(features.double(), dim=1)
    means = []
    for label in labels.unique():
        rows = x[labels == label]
        n = len(rows)
        if n > 1:
            means.append((rows.sum(0).square().sum() - n) / (n * (n - 1)))  # the self-pairs are left out
    return torch.stack(means).mean().item()


# -------------------------- what JointCrop, LoGo and PatchMix say of features


def only_crops(low, high):
    """One kind of view: crops of an area from low to high, with flips and without colour, as a list of View."""
    cut = dict(size=32, area=(low, high), ratio=(3 / 4, 4 / 3), flip_p=0.5)  # view_features replaces the size
    colour = dict(jitter=(0, 0, 0, 0), jitter_p=0, gray_p=0, blur_p=0, blur_sigma=(0.1, 2.0), solarize_p=0)
    return [common.View(**cut, **colour)]


def scale_accuracy(encoder, info, train, test, device, areas=(1.0, 0.2), k=20):
    """kNN accuracy between crops of different scale, which JointCrop trains for: {(bank's area, query's): percent}."""
    parts, crops = (train, test), {}
    for area in areas:
        given = encoder, info, only_crops(area, area)
        crops[area] = [view_features(*given, part, list(range(len(part))), 1, device)[:, 0] for part in parts]
    labels, truth = (torch.from_numpy(part.labels) for part in parts)
    found = {}
    for bank in areas:
        for query in areas:
            chosen = common.knn_predict(crops[bank][0], labels, crops[query][1], k, 0.07, len(train.classes))
            found[bank, query] = 100 * (chosen == truth).double().mean().item()
    return found


def crop_similarity(small, large):
    """Mean cosine of two crops of an image, and of different images, for small and large crops (n, 2, d) each.

    LoGo draws an image's large crops together and its small ones to them, and lets two small ones differ. Returns
    {pair: (of one image, of different images)}; the pairs are small-small, small-large, large-large.
    """
    small, large = (F.normalize(x.double(), dim=2) for x in (small, large))
    found = {}
    for name, a, b in (("small-small", small, small), ("small-large", small, large), ("large-large", large, large)):
        table = a[:, 0] @ b[:, 1].T
        n = len(table)
        own = table.diagonal().sum()
        found[name] = (own / n).item(), ((table.sum() - own) / (n * (n - 1))).item()
    return found


@torch.no_grad()
def affinity_ranking(affinity, local1, local2):
    """How well LoGo's affinity ranks pairs of local crops: {how they were scored: share of couples ranked rightly}.

    local1, local2: (N, d), L2-normalised, row by row of the same image. In the second half of the images the other
    local is rolled by one, which makes pairs of two images. A couple is a pair of one image and a pair of two images.
    It is ranked rightly if the first scores higher. The affinity scores both kinds in batches of their own, and in one
    batch. It is in training mode, in which its batch norm sees the batch. The cosines are scored beside it.
    """
    half = len(local1) // 2
    one, two = (local1[:half], local2[:half]), (local1[half:], local2[half:].roll(1, 0))
    together = affinity(*(torch.cat(pair) for pair in zip(one, two, strict=True)))
    scores = {
        "in batches of their own": (affinity(*one), affinity(*two)),
        "in one batch": together.split([half, len(local1) - half]),
        "by cosine": ((one[0] * one[1]).sum(1), (two[0] * two[1]).sum(1)),
    }
    return {how: (a[:, None] > b).double().mean().item() for how, (a, b) in scores.items()}


def local_embeddings(run, images, index):
    """(the affinity of a run of LoGo, the embeddings of two local crops of each image, (n, d) each)."""
    import logo

    state = common.load_checkpoint(Path(run) / "last.pt")
    args, info = argparse.Namespace(**state["config"]), state["backbone"]
    model = (logo.MoCo if args.base == "moco" else logo.SimSiam)(args)
    model.load_state_dict(state["model"])
    affinity = logo.Affinity(args.dim, args.affinity_hidden)
    affinity.load_state_dict(state["affinity"])
    encoder = torch.nn.Sequential(model.backbone, model.projector).eval()
    info = dict(info, image_size=args.local_size)
    found = view_features(encoder, info, logo.augmentation(args)[2:], images, index, 2, torch.device("cpu"))
    return affinity, *F.normalize(found, dim=2).unbind(1)


def similarity_bars(views, labels, groups, temperature=0.07):
    """After PatchMix, Fig. 4: how high the bar exp((cos - 1) / temperature) of a query is for each kind of key.

    views (n, 2, d): queries and keys; labels (n,); groups: a number for each class, the same for related ones. Returns
    {kind: mean}: the query's own image, its class, a related class, any other class.
    """
    bars = vote(*views.double().unbind(1), temperature)
    same, related = labels[:, None] == labels, groups[labels][:, None] == groups[labels]
    own = torch.eye(len(labels), dtype=torch.bool)
    kinds = {"own image": own, "own class": same & ~own, "related class": related & ~same, "other class": ~related}
    return {kind: bars[pairs].mean().item() for kind, pairs in kinds.items()}


def mechanisms(run, train, test, few=1000):
    """All these figures of a run on CIFAR-10, {table: {measure: number}}: of its test images, or of so many of them.

    Views are those of MoCo v2's recipe there, whatever the run's own.
    """
    import moco_jointcrop

    kinds = moco_jointcrop.augmentation(moco_jointcrop.parse_args(["--dataset", "cifar10", "--arch", "resnet_mini"]))
    given, config, labels = common.load_backbone(run), common.read_config(run), torch.from_numpy(test.labels)
    device = torch.device("cpu")
    index = torch.randperm(len(test), generator=common.generator(0))[:few].tolist()
    similarity, variance = view_statistics(*given, kinds, test, index, 32, device).mean(1)
    features, _ = common.extract_features(given[0], test, given[1], device)
    any_two = {"similarity of any two images": class_similarity(features, torch.zeros_like(labels))}
    found = {"JCL": {"similarity of an image's 32 views": similarity}}  # Fig. 3
    found["JCL"] |= {"their variance per feature, thousandths": 1000 * variance} | any_two
    found["CLIM"] = {"similarity of two images of a class": class_similarity(features, labels)} | any_two  # Table 10
    if config.get("queue"):
        for selection, table in choose(run, train, ("knn", "center")).items():
            share = same_class_share(torch.from_numpy(train.labels), table)
            found["CLIM"][f"`{selection}` positives of the class, %"] = 100 * share
    accuracies = scale_accuracy(*given, train, test, device)
    found["JointCrop"] = {f"bank {bank:g}, queries {query:g}, %": v for (bank, query), v in accuracies.items()}
    pairs = [view_features(*given, only_crops(*area), test, index, 2, device) for area in ((0.08, 0.6), (0.4, 1.0))]
    alike = crop_similarity(*pairs)
    found["LoGo"] = {f"{pair}, one image": own for pair, (own, _) in alike.items()}
    found["LoGo"] |= {f"{pair}, two images": other for pair, (_, other) in alike.items()}
    if config.get("l2l"):
        shares = affinity_ranking(*local_embeddings(run, test, index))
        found["affinity"] = {f"{scored}, %": 100 * share for scored, share in shares.items()}
    views = view_features(*given, kinds, test, index, 2, device)
    vehicle = torch.tensor([name in ("airplane", "automobile", "ship", "truck") for name in test.classes]).long()
    found["PatchMix"] = similarity_bars(views, labels[index], vehicle)  # after Fig. 4
    return {table: {name: float(v) for name, v in measures.items()} for table, measures in found.items()}


# -------------------------------------------------- encoder: how it sees images


def write_neighbours(folder, train, test, crops, features, count=12, neighbours=10):
    """Write right.png and wrong.png: test images, their class, the predicted one, and the nearest training images.

    crops, features: of both parts. The prediction is that of kNN with k = 20. A green frame means the test image's
    class, a red one another class.
    """
    labels, truth = (torch.from_numpy(part.labels) for part in (train, test))
    predicted = common.knn_predict(features[0], labels, features[1], 20, 0.07, len(train.classes))
    for name, right in (("right", True), ("wrong", False)):
        chosen = torch.nonzero((predicted == truth) == right).flatten()
        chosen = chosen[torch.randperm(len(chosen), generator=common.generator(0))[:count]].tolist()
        rows, words = [], []
        for i in chosen:
            nearest = vote(features[1][i : i + 1], features[0])[0].topk(min(neighbours, len(train))).indices.tolist()
            row = [cell(crops[1][i][0], f"test {i}")]
            for j in nearest:
                frame = "limegreen" if labels[j] == truth[i] else "red"
                row.append(cell(crops[0][j][0], train.classes[labels[j]][:14], frame))
            rows.append(torch.stack(row))
            words.append(f"true: {test.classes[truth[i]]}\npredicted: {train.classes[predicted[i]]}")
        if rows:
            common.save_grid(Path(folder) / f"{name}.png", rows, words)


@torch.no_grad()
def last_attention(vit, x):
    """Return the softmax weights of a ViT's last block, (N, heads, T, T) for T tokens, of which CLS is the first.

    x: (N, 3, H, W). Row i says what token i attends to, and sums to 1. The weights are taken where they go into the
    block's attention dropout. Exits with an error message if the encoder has no such attention.
    """
    attention = getattr(getattr(vit, "blocks", [None])[-1], "attn", None)
    if not isinstance(attention, Attention) or vit.cls_token is None:
        common.fail("--attention needs one of timm's ViTs with a CLS token and plain attention")
    attention.fused_attn, seen = False, []  # the fused kernel never shows the weights
    with attention.attn_drop.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
        vit(x)
    return seen[0]


def cls_maps(vit, x):
    """Return what CLS attends to, on the grid of patches: (N, heads, side, side), of images x (N, 3, H, W).

    These are the softmax's weights as they are. The columns of CLS and of other tokens before the patches are left out
    (PatchMix, App. E).
    """
    maps = last_attention(vit, x)[:, :, 0, vit.num_prefix_tokens :]
    return maps.unflatten(2, (math.isqrt(maps.shape[2]),) * 2)


def write_attention(folder, vit, info, device, images):
    """Write attention.png, one row per image: the image, each head's map, their mean, and the mean over the image.

    images: {name: (3, H, W) in [0, 1]}. Violet is no attention. Yellow is the map's greatest weight, which the caption
    gives in percent (PatchMix, Fig. 11).
    """
    rows = []
    for x in images.values():
        maps = cls_maps(vit, common.normalize(x[None], info["mean"], info["std"]).to(device)).cpu()[0]
        row = [cell(x)]
        for head, weights in enumerate([*maps, maps.mean(0)], start=1):
            gray = to_pil_image(weights / weights.max())
            colours = to_tensor(ImageOps.colorize(gray, "#440154", "#fde725", mid="#21918c"))
            name = f"head {head}" if head <= len(maps) else "mean"
            row.append(cell(colours, f"{name}, {100 * weights.max():.0f} %"))
        row.append(cell((x + F.interpolate(colours[None], x.shape[1:])[0]) / 2, "mean, over it"))
        rows.append(torch.stack(row))
    common.save_grid(Path(folder) / "attention.png", rows, list(images))


def vote(q, k, temperature=0.07):
    """Return exp(cosine / temperature) / exp(1 / temperature), a vote of kNN: (m, n) in (0, 1] (PatchMix, 4.5).

    q: (m, d). k: (n, d). Both are L2-normalised here.
    """
    cosine = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T
    return ((cosine.clamp(max=1) - 1) / temperature).exp()


def choose_keys(labels, label, count, draw):
    """Return seven training images to compare with one of a class, as PatchMix's Fig. 4 does.

    Key 4 is of the query's class, keys 3 and 5 of the classes next to it (ImageNet's ids are sorted by kind), the
    others of any other class. labels: (n,) in [0, count). draw: a generator of numpy's. A class without images has no
    key.
    """
    far = [c for c in draw.permutation(count).tolist() if (c - label) % count not in (0, 1, count - 1)]
    classes = [*far[:2], (label - 1) % count, label, (label + 1) % count, *far[2:4]]
    rows = [np.flatnonzero(labels == c) for c in classes]
    return [int(draw.choice(own)) for own in rows if len(own)]


def bar(height, colour):
    """Return an image (3, SIDE, SIDE) of a bar of a height in [0, 1], on a pale one of height 1."""
    image, middle = torch.ones(3, SIDE, SIDE), slice(SIDE // 4, 3 * SIDE // 4)
    image[:, :, middle] = 0.92
    image[:, SIDE - round(SIDE * height) :, middle] = torch.tensor(ImageColor.getrgb(colour)).view(3, 1, 1) / 255
    return image


def write_similarities(folder, i, keys, train, test, crops, heights):
    """Write queryI.png: test image I and its keys, and below them a row of bars for each encoder.

    heights: {encoder: `vote` of the keys}. Keys of the query's class are framed and drawn in green (PatchMix, Fig. 4).
    """
    colours = ["limegreen" if train.labels[j] == test.labels[i] else "steelblue" for j in keys]
    images = [cell(crops[0][j][0], train.classes[train.labels[j]], c) for j, c in zip(keys, colours, strict=True)]
    rows = [torch.stack([cell(crops[1][i][0], test.classes[test.labels[i]]), *images])]
    for values in heights.values():
        bars = [cell(bar(v, c), f"{v:.3f}") for v, c in zip(values.tolist(), colours, strict=True)]
        rows.append(torch.stack([cell(torch.ones(3, SIDE, SIDE)), *bars]))
    common.save_grid(Path(folder) / f"query{i}.png", rows, [f"test {i}", *heights])


def encoder(args):
    """How an encoder sees images: its nearest neighbours, a ViT's attention, similarities as bars."""
    given = eval_knn.parse_args([args.run])
    given.dataset, given.data_dir = args.dataset, args.data_dir
    device, network, info = common.open_encoder(given)
    train, test = common.open_data(given, info)
    crops = [common.CentreCrops(part, info["image_size"], info["interpolation"]) for part in (train, test)]
    images = args.images or torch.randperm(len(test), generator=common.generator(0))[:4].tolist()
    if args.attention:
        shown = {f"{i} {test.classes[test.labels[i]]}": crops[1][i][0] / 255 for i in images}
        write_attention(args.attention, network, info, device, shown)
    if not args.pictures and not args.similarities:
        return
    networks = {"encoder": network, **common.floor_encoders(given, info, device, len(train))}
    features = {
        name: [common.extract_features(each, part, info, device)[0] for part in (train, test)]
        for name, each in networks.items()
    }
    if args.pictures:
        write_neighbours(args.pictures, train, test, crops, features["encoder"])
    for i in images if args.similarities else ():
        draw = np.random.default_rng(i)
        keys = choose_keys(train.labels, test.labels[i], len(train.classes), draw)
        heights = {name: vote(test_x[i : i + 1], train_x[keys])[0] for name, (train_x, test_x) in features.items()}
        write_similarities(args.similarities, i, keys, train, test, crops, heights)


def main(argv=None):
    parser = common.ArgumentParser("tests/tools/figures.py", __doc__, "FIGURE [flags]")
    count, natural = common.number(int, 1), common.number(int, 0)
    figures = parser.add_subparsers(required=True, metavar="FIGURE", parser_class=argparse.ArgumentParser)
    flags = {}
    for function in (explain, corners, similarity, encoder):
        flags[function] = figures.add_parser(function.__name__, help=function.__doc__.splitlines()[0])
        flags[function].set_defaults(function=function)
    flags[explain].add_argument("folder", nargs="?", default=".github", metavar="FOLDER")
    for function in (corners, similarity):
        flags[function].add_argument("out", type=common.check_picture, metavar="OUT.png")
    flags[corners].add_argument("--pairs", type=count, default=100_000, metavar="N", help="of crops, for each beta")
    compared, shown = flags[similarity], flags[encoder]
    compared.add_argument("runs", nargs="+", metavar="RUN")
    compared.add_argument("--split", choices=("train", "test"), default="train", help="train: as the paper")
    compared.add_argument("--images", type=count, default=1000, metavar="N", help="paper: 32,768")
    compared.add_argument("--views", type=count, default=32, metavar="N", help="of each image")
    shown.add_argument("run", metavar="RUN")
    shown.add_argument("--pictures", metavar="DIR", help="test images and their nearest training images")
    shown.add_argument("--attention", metavar="DIR", help="ViTs: what CLS attends to in the last block")
    shown.add_argument("--similarities", metavar="DIR", help="how similar training images are to test images")
    text = "test images of the last two: four by default"
    shown.add_argument("--images", type=natural, nargs="+", metavar="I", help=text)
    for figure in (compared, shown):
        figure.add_argument("--dataset", choices=common.DATASETS, help="default: what the runs were trained on")
        figure.add_argument("--data-dir", metavar="DIR", help="default: where that was")
    args = parser.parse_args(argv)
    try:
        args.function(args)
    except ModuleNotFoundError as error:
        common.fail(f"{error}: pip install {error.name}")


if __name__ == "__main__":
    main()
