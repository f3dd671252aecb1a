"""Makes the pages' pictures, by hand, and the numbers of the papers' analyses. Needs matplotlib.

    python tests/tools/figures.py explain [FOLDER]                 README's: what goes in, what is compared with what
    python tests/tools/figures.py corners [FOLDER] [--pairs N]     JointCrop, Fig. 7: how far apart the two crops are

`mechanisms` has the papers' other analyses, as numbers: results.py makes its tables of them.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
import common  # noqa: E402

CPU = torch.device("cpu")


# ---------------------------------------------------------- JointCrop, Fig. 7


def corners(args):
    """How far apart two crops' corners are on average, by beta: ours, with the released offset, and the paper's."""
    sys.path.append(str(Path(__file__).parents[1]))
    from matplotlib import pyplot
    from test_moco_jointcrop import FIGURE7, RANDOM_CROP, mean_corner_distance  # needs pytest, as nothing else here

    beta = [4 - i / 2 for i in range(len(FIGURE7))]
    ours, offset = ([mean_corner_distance(b, shift, args.pairs) for b in beta] for shift in (0.0, 0.1))
    random_crop = mean_corner_distance(None, 0.0, args.pairs)
    print("  beta    ours  offset 0.1   paper")
    for row in zip(beta, ours, offset, FIGURE7, strict=True):
        print("{:6.1f} {:7.2f} {:11.2f} {:7.2f}".format(*row))
    print(f"RandomCrop {random_crop:.2f}, paper {RANDOM_CROP}")
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="tight")
    axes.plot(beta, ours, label="here: the paper's distribution")
    axes.plot(beta, offset, linestyle="--", label="here: --variant released, offset 0.1")
    axes.plot(beta, FIGURE7, "k.", markersize=9, label="read from the paper's Fig. 7")
    label = f"here: RandomCrop, {random_crop:.2f} (paper: {RANDOM_CROP})"
    axes.axhline(random_crop, color="gray", linestyle=":", label=label)
    axes.set(xlabel="beta of J-Crop(beta)", ylabel="mean distance of the top-left corners, px (image: 224 x 224)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(Path(args.folder) / "jointcrop_corners.png", dpi=100)


# ------------------------------------- JCL, Fig. 3: how alike an image's views are


def view_similarity(features):
    """Mean cosine of all views x views of an image, self-pairs included (App. E): features (n, views, d) -> (n,).

    With the mean mu of the L2-normalised features it is |mu|^2. Their variance, the figure's other half, follows from
    it: (1 - |mu|^2) / d is the mean diagonal of their (biased) covariance.
    """
    return F.normalize(features.double(), dim=2).mean(1).square().sum(1)


@torch.no_grad()
def view_features(encoder, info, kinds, images, index, count):
    """Return the features of `count` views of each image of an index: (n, count, d) float32.

    kinds: list of View, which take turns; their size is the encoder's. The draws depend on the image alone, so that
    runs share them.
    """
    views = [kinds[i % len(kinds)]._replace(size=info["image_size"]) for i in range(count)]
    data, at_once, found = common.ViewDataset(images, views, 0, info["interpolation"]), max(1, 256 // count), []
    for start in range(0, len(index), at_once):
        batch = data.__getitems__([(0, i) for i in index[start : start + at_once]])
        x = torch.stack(common.color_views(batch, CPU, norm=(info["mean"], info["std"])), 1)
        found.append(encoder(x.flatten(0, 1)).flatten(1).unflatten(0, (-1, count)))
    return torch.cat(found)


# ------------------------------------------- CLIM: positives, and Table 10


def trained(run):
    """(the model of a run of a queue method or of logo.py, its configuration, all of its last.pt)."""
    import logo

    state = common.load_checkpoint(Path(run) / "last.pt")
    info, args = state["backbone"], argparse.Namespace(**state["config"])
    backbone = common.build_backbone(info)
    width = common.output_width(backbone, info["image_size"])
    if getattr(args, "base", "moco") == "simsiam":
        model = logo.SimSiam(backbone, width, args.dim, args.layers, args.hidden)
    else:  # the queue methods' models have the same parts
        model = logo.MoCo(backbone, width, args.dim, args.queue)
    model.load_state_dict(state["model"])
    return model, args, state


def choose(run, images, selection):
    """CLIM's table of positives, (N, 10), by the momentum encoder of a run of a queue method."""
    import clim

    model, config, state = trained(run)
    args = clim.parse_args(["--dataset", config.dataset, "--arch", config.arch, "--selection", selection])
    encoder = torch.nn.Sequential(model.momentum_backbone, model.momentum_projector)
    x = F.normalize(common.extract_features(encoder, images, state["backbone"], CPU), dim=1).double()
    return clim.choose_positives(args, x, clim.nearest_neighbors(x, args.knn_k), common.generator(0))


def class_similarity(features, labels):
    """Mean cosine of pairs of a class, averaged over the classes (Table 10): features (N, d), labels (N,)."""
    x = F.normalize(features.double(), dim=1)
    means = []
    for label in labels.unique():
        rows = x[labels == label]
        n = len(rows)
        means.append((rows.sum(0).square().sum() - n) / (n * (n - 1)))  # the self-pairs are left out
    return torch.stack(means).mean().item()


# -------------------------- what JointCrop, LoGo and PatchMix say of features


def only_crops(low, high):
    """One kind of view: crops of an area from low to high, with flips and without color, as a list of View."""
    color = dict(jitter=(0, 0, 0, 0), jitter_p=0, gray_p=0, blur_p=0, blur_sigma=(0.1, 2.0), solarize_p=0)
    return [common.View(size=32, area=(low, high), ratio=(3 / 4, 4 / 3), **color, flip_p=0.5)]  # of any size


def scale_accuracy(encoder, info, train, test, area):
    """kNN accuracy in % of crops of the test images, of so much of their area, among whole training images."""
    bank, queries = (
        view_features(encoder, info, only_crops(share, share), part, range(len(part)), 1)[:, 0]
        for part, share in ((train, 1.0), (test, area))
    )
    return common.knn_scores(bank, train, queries, test, (20,), 0.07)["knn20_top1"]


def crop_similarity(crops):
    """Mean cosine of two crops of one image, and of two images: crops (n, 2, d)."""
    a, b = F.normalize(crops.double(), dim=2).unbind(1)
    table, n = a @ b.T, len(a)
    return (table.trace() / n).item(), ((table.sum() - table.trace()) / (n * (n - 1))).item()


@torch.no_grad()
def affinity_ranking(affinity, local1, local2):
    """How well LoGo's affinity ranks pairs of local crops: {how they were scored: share of couples ranked rightly}.

    local1, local2: (N, d), L2-normalised, row by row of the same image. In the second half of the images the other
    local is rolled by one, which makes pairs of two images. A couple is a pair of one image and a pair of two images.
    It is ranked rightly if the first scores higher. The affinity is in training mode: its batch norm sees the batch.
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

    model, args, state = trained(run)
    affinity = logo.Affinity(args.dim, args.affinity_hidden)
    affinity.load_state_dict(state["affinity"])
    encoder = torch.nn.Sequential(model.backbone, model.projector).eval()
    info, kinds = state["backbone"] | dict(image_size=args.local_size), [*logo.augmentation(args).values()][2:]
    return affinity, *F.normalize(view_features(encoder, info, kinds, images, index, 2), dim=2).unbind(1)


def similarity_bars(views, labels, groups, temperature=0.07):
    """After PatchMix, Fig. 4: how high the bar exp((cos - 1) / temperature) of a query is for each kind of key.

    views (n, 2, d): queries and keys; labels (n,); groups: a number for each class, the same for related ones. Returns
    {kind: mean}: the query's own image, its class, a related class, any other class.
    """
    q, k = F.normalize(views.double(), dim=2).unbind(1)
    bars = ((q @ k.T - 1) / temperature).exp()
    same, related = labels[:, None] == labels, groups[labels][:, None] == groups[labels]
    own = torch.eye(len(labels), dtype=torch.bool)
    kinds = {"own image": own, "own class": same & ~own, "related class": related & ~same, "other class": ~related}
    return {kind: bars[pairs].mean().item() for kind, pairs in kinds.items()}


def mechanisms(run, train, test, few=1000):
    """All these figures of a run on CIFAR-10, {table: {measure: number}}: of its test images, or of so many of them.

    Views are those of MoCo v2's recipe there, whatever the run's own.
    """
    import moco_jointcrop

    flags = ["--dataset", "cifar10", "--arch", "resnet_mini"]
    kinds = [*moco_jointcrop.augmentation(moco_jointcrop.parse_args(flags)).values()]
    given, labels = common.load_backbone(run), torch.from_numpy(test.labels)
    config = json.loads((Path(run) / "config.json").read_text())
    index = torch.randperm(len(test), generator=common.generator(0))[:few].tolist()
    similarity = view_similarity(view_features(*given, kinds, test, index, 32)).mean().item()
    features = common.extract_features(given[0], test, given[1], CPU)
    any_two = {"similarity of any two images": class_similarity(features, torch.zeros_like(labels))}
    found = {"JCL": {"similarity of an image's 32 views": similarity} | any_two}  # Fig. 3
    found["CLIM"] = {"similarity of two images of a class": class_similarity(features, labels)} | any_two  # Table 10
    if config.get("queue"):
        own = torch.from_numpy(train.labels)
        for selection in ("knn", "center"):
            share = (own[choose(run, train, selection)] == own[:, None]).double().mean().item()
            found["CLIM"][f"`{selection}` positives of the class, %"] = 100 * share
    accuracies = {"whole images, %": 1.0, "crops of a fifth of them, %": 0.2}
    found["JointCrop"] = {name: scale_accuracy(*given, train, test, area) for name, area in accuracies.items()}
    alike = crop_similarity(view_features(*given, only_crops(0.08, 0.6), test, index, 2))
    found["LoGo"] = dict(zip(("similarity of two small crops of one image", "of two images"), alike, strict=True))
    if config.get("l2l"):
        shares = affinity_ranking(*local_embeddings(run, test, index))
        found["affinity"] = {f"{scored}, %": 100 * share for scored, share in shares.items()}
    views = view_features(*given, kinds, test, index, 2)
    vehicle = torch.tensor([name in ("airplane", "automobile", "ship", "truck") for name in test.classes]).long()
    found["PatchMix"] = similarity_bars(views, labels[index], vehicle)  # after Fig. 4
    return found


def main():
    parser = argparse.ArgumentParser("tests/tools/figures.py", description=__doc__.splitlines()[0])
    parser.add_argument("figure", choices=("explain", "corners"))
    parser.add_argument("folder", nargs="?", default=".github", metavar="FOLDER")
    parser.add_argument("--pairs", type=int, default=100_000, metavar="N", help="of crops, for each beta")
    args = parser.parse_args()
    if args.figure == "corners":
        return corners(args)
    import explain  # which needs matplotlib

    explain.explain(args.folder)


if __name__ == "__main__":
    main()
