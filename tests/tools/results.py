"""Does each paper's improvement over its baseline show? Makes the runs and the tables of their numbers, by hand.

    python tests/tools/results.py train --data-dir DIR [--arms jcl clim] [--seeds 0 1]
    python tests/tools/results.py baselines --data-dir DIR         raw pixels, and untrained encoders
    python tests/tools/results.py mechanisms --data-dir DIR        what the losses do, in all runs
    python tests/tools/results.py readme                           write the tables into the pages
    python tests/tools/results.py curves                           draw the learning curves (needs matplotlib)

The protocol (tests/results/README.md) was written down before the first run. `train` makes the runs that are missing,
in runs/results, and resumes where it was stopped. The numbers are kept in tests/results/*.json.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.transforms import v2

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import clim  # noqa: E402
import common  # noqa: E402
import eval_linear  # noqa: E402
import jcl  # noqa: E402
import logo  # noqa: E402

KEPT, RUNS = ROOT / "tests" / "results", ROOT / "runs" / "results"
CPU = torch.device("cpu")
RESNET, VIT = "resnet_mini", "vit_micro"  # PatchMix has the ViT

ARMS = {  # name: how tables call it, its script with flags
    "moco": ("MoCo v2", "moco_jointcrop.py --joint none"),
    "jcl": ("JCL", "jcl.py"),
    "jointcrop": ("J-Crop(0)", "moco_jointcrop.py --joint crop"),
    "clim": ("CLIM", "clim.py"),
    "jointblur": ("J-Blur(0)", "moco_jointcrop.py --joint blur"),
    "moco-symmetric": ("MoCo, both views as queries", "logo.py --local-crops 0"),
    "logo-moco": ("LoGo on MoCo", "logo.py"),
    "patchmix-1": ("PatchMix, M = 1", "patchmix.py --num-mix 1"),
    "patchmix-3": ("PatchMix, M = 3", "patchmix.py --num-mix 3"),
    "simsiam": ("SimSiam", "logo.py --base simsiam --local-crops 0"),
    "logo-simsiam": ("LoGo on SimSiam", "logo.py --base simsiam"),
    "moco-twice": ("MoCo v2, 100 epochs", "moco_jointcrop.py --joint none"),
    "moco-half-more": ("MoCo v2, 75 epochs", "moco_jointcrop.py --joint none"),
    "logo-moco-no-l2l": ("LoGo on MoCo, no local-to-local", "logo.py --no-l2l"),
    "mocov3": ("MoCo v3", "patchmix.py --num-mix 1 --terms oto,mto"),
    "patchmix-released": ("PatchMix, M = 3, released", "patchmix.py --num-mix 3 --variant released"),
}
NAMES = {arm: name for arm, (name, _) in ARMS.items()}
LONGER = {"moco-twice": 100, "moco-half-more": 75}  # epochs; the others have 50

CURVES = {  # the panels of the picture; these arms are trained by default
    "MoCo v2 and what builds on it": "moco jcl jointcrop clim jointblur moco-symmetric logo-moco".split(),
    "SimSiam": ["simsiam", "logo-simsiam"],
    "PatchMix": ["patchmix-1", "patchmix-3"],
}

CLAIMS = (  # an arm, the one that it is to beat, its time over that one's; for README, the paper's own numbers
    ("jointcrop", "moco", "1", "ImageNet-1K linear, MoCo v1: 57.3 → 60.9"),
    ("jointblur", "moco", "1", "the same: 57.3 → 60.6"),
    ("jcl", "moco", "2", "ImageNet-1K linear: 67.5 → 68.7"),
    ("jcl", "moco-twice", "1", None),
    ("clim", "moco", "1.5", "ImageNet-1K linear, one size: 67.5 → 70.1"),
    ("clim", "moco-half-more", "1", None),
    ("logo-moco", "moco-symmetric", "2.5", "ImageNet-100 kNN, ResNet-34, over MoCo: 64.2 → 76.8"),
    ("logo-moco-no-l2l", "moco-symmetric", "1.8", None),
    ("logo-simsiam", "simsiam", "2.5", "ImageNet-100 kNN, ResNet-34: 71.7 → 78.5"),
    ("patchmix-3", "patchmix-1", "1", "CIFAR-10 kNN, ViT-S/2: 88.2 → 94.6"),
    ("patchmix-released", "mocov3", "1.1", None),
)
NOISE = 0.5  # points by which 10,000 test images alone let an accuracy err

LOGO = ("moco-symmetric", "logo-moco", "logo-moco-no-l2l", "simsiam", "logo-simsiam")
ANALYSES = {  # the tables of analyse, and the arms that each is about
    "JCL": ("moco", "jcl"),
    "CLIM": ("moco", "clim"),
    "JointCrop": ("moco", "jointcrop", "clim", *LOGO),
    "LoGo": LOGO,
    "affinity": ("logo-moco", "logo-simsiam"),
    "PatchMix": ("patchmix-1", "patchmix-3"),
}


def command(arm, seed):
    """The command line of one run, without the data's place and the run's folder."""
    script, epochs = ARMS[arm][1], LONGER.get(arm, 50)
    encoder = f"{VIT} --patch-size 4" if script.startswith("patchmix") else RESNET
    flags = f"--dataset cifar10 --arch {encoder} --epochs {epochs}"
    return f"{script} {flags} --batch-size 128 --knn-every 10 --seed {seed}"


def kept(name):
    """What is kept under a name; of an arm {seed: record} of its runs, else nothing."""
    file = KEPT / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def keep(name, found):
    (KEPT / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def evaluate(line, out, where):
    """What is kept of a run: its command, what it was made with, its epochs with kNN, and the linear probe."""
    flags = eval_linear.parse_args([str(out), *where, "--no-baselines", "--workers", "0"])
    linear = eval_linear.main(flags)["encoder"]["linear_top1"]
    config = json.loads((out / "config.json").read_text())
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    record = dict(command=line, torch=config["torch"], device=config["machine"], commit=commit)
    epochs = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("epoch", "loss", "std", "knn20_top1", "knn200_top1")
    epochs = [{name: round(r[name], 4) for name in names} for r in epochs if "knn20_top1" in r]
    return record | dict(epochs=epochs, linear_top1=round(linear, 4))


def train(args):
    """Every run of the arms that is not kept yet, all arms of a seed before the next seed."""
    where = ["--data-dir", args.data_dir] if args.data_dir else []
    for arm, seed in ((arm, seed) for seed in args.seeds for arm in args.arms if str(seed) not in kept(arm)):
        line, out = command(arm, seed), RUNS / f"{arm}-s{seed}"
        RUNS.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, *line.split(), *where, "--workers", "0", "--out", str(out)]
        how = dict(cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        with open(f"{out}.log", "a") as log:
            subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, **how)
        record = evaluate(line, out, where)
        keep(arm, dict(sorted((kept(arm) | {str(seed): record}).items())))
        print(f"{arm}, seed {seed}: kNN and linear {scores(record)}", flush=True)


def baselines(args):
    """Raw pixels, and both encoders untrained."""
    found, (train, test) = {}, [common.load_dataset("cifar10", args.data_dir, part) for part in (True, False)]
    train_y, test_y = (torch.as_tensor(part.targets) for part in (train, test))
    for name, arch in {"raw pixels": RESNET, "the ResNet untrained": RESNET, "the ViT untrained": VIT}.items():
        torch.manual_seed(0)
        info = common.backbone_info(arch, 32, 4, norm="cifar10")
        encoder = torch.nn.Flatten() if name == "raw pixels" else common.build_backbone(info)
        x, test_x = (common.extract_features(encoder, part, info, CPU) for part in (train, test))
        scored = common.knn_top1(x, train_y, test_x, test_y, (20,), 0.07, 10)
        linear = eval_linear.linear_probe(x, train_y, test_x, 10)["logits"].argmax(1)
        scored["linear_top1"] = 100 * (linear == test_y).double().mean().item()
        found[name] = {measure: round(value, 4) for measure, value in scored.items()}
        print(f"{name}: {found[name]}", flush=True)
    keep("baselines", found)


# ------------------------------------------- what the papers say of features


def view_similarity(features):
    """Mean cosine of all views x views of an image, self-pairs included (JCL, App. E): (n, views, d) -> (n,).

    With the mean mu of the L2-normalised features it is |mu|^2. So it tells their variance, too: it is 1 - |mu|^2.
    """
    return F.normalize(features.double(), dim=2).mean(1).square().sum(1)


@torch.no_grad()
def view_features(encoder, crop, color, images, index, count):
    """Return the features of `count` random views of each image of an index: (n, count, d) float32.

    crop: PIL image -> PIL image. color: uint8 (n, 3, S, S) -> normalised float. The same numbers are drawn each time.
    """
    views, found = common.Views(images, [crop] * count), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for rows in torch.as_tensor(index).split(max(1, 256 // count)):
            x = color(torch.stack([view for i in rows.tolist() for view in views[i][0]]))
            found.append(encoder(x).flatten(1).unflatten(0, (-1, count)))
    return torch.cat(found)


def moco_views(info):
    """Return (crop, color) of `view_features`, by which JCL makes MoCo v2's views of CIFAR-10, for an encoder."""
    args = jcl.parse_args(["--dataset", "cifar10", "--arch", RESNET])
    args.norm = next(name for name, (mean, _) in common.NORMS.items() if list(mean) == list(info["mean"]))
    return only_crops(info, *args.crop_scale)[0], functools.partial(jcl.augment, args=args)


def only_crops(info, low, high):
    """Return (crop, color) of `view_features`: crops of an area from low to high, with flips and without color."""
    interpolation = v2.InterpolationMode(info["interpolation"])
    crop = v2.RandomResizedCrop(info["image_size"], (low, high), interpolation=interpolation)
    return crop, lambda x: common.normalize(common.horizontal_flip(x / 255), info["mean"], info["std"])


def trained(run):
    """(the model of a run of a queue method or of logo.py, its configuration, all of its last.pt)."""
    state = common.load_checkpoint(Path(run) / "last.pt")
    info, args = state["backbone"], argparse.Namespace(**state["config"])
    backbone, pairs = common.build_backbone(info), logo.compared_views()
    width = common.feature_width(backbone, info["image_size"])
    if getattr(args, "base", "moco") == "simsiam":
        model = logo.SimSiam(backbone, width, pairs, args.dim, args.layers, args.hidden)
    else:  # the queue methods' models have the same parts
        model = logo.MoCo(backbone, width, pairs, args.dim, args.queue)
    model.load_state_dict(state["model"])
    return model, args, state


def choose(run, images, selection):
    """CLIM's table of positives, (N, 10), by the momentum encoder of a run of a queue method."""
    model, config, state = trained(run)
    flags = ["--dataset", config.dataset, "--arch", config.arch, "--selection", selection, "--workers", "0"]
    torch.manual_seed(0)
    return clim.choose_positives(clim.parse_args(flags), model, images, state["backbone"], CPU)


def class_similarity(features, labels):
    """Mean cosine of pairs of a class, averaged over the classes (CLIM, Table 10): features (N, d), labels (N,)."""
    x = F.normalize(features.double(), dim=1)
    classes = F.one_hot(labels).T.double()  # (classes, N)
    sums, n = (classes @ x).square().sum(1), classes.sum(1)
    return ((sums - n) / (n * (n - 1))).mean().item()  # the self-pairs are left out


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
    model, args, state = trained(run)
    affinity = logo.Affinity(args.dim)
    affinity.load_state_dict(state["affinity"])
    encoder = torch.nn.Sequential(model.backbone, model.projector).eval()
    crop, color = v2.RandomResizedCrop(args.local_size, args.local_scale), functools.partial(logo.augment, args=args)
    return affinity, *F.normalize(view_features(encoder, crop, color, images, index, 2), dim=2).unbind(1)


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


def analyse(run, train, test, few=1000):
    """All these analyses of a run on CIFAR-10, {table: {measure: number}}. few: test images, for those of views."""
    (encoder, info), config = common.load_backbone(run), json.loads((Path(run) / "config.json").read_text())
    train_y, labels = (torch.as_tensor(part.targets) for part in (train, test))
    index, views = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:few], moco_views(info)
    similarity = view_similarity(view_features(encoder, *views, test, index, 32)).mean().item()
    features = common.extract_features(encoder, test, info, CPU)
    any_two = {"similarity of any two images": class_similarity(features, torch.zeros_like(labels))}
    found = {"JCL": {"similarity of an image's 32 views": similarity} | any_two}  # Fig. 3
    found["CLIM"] = {"similarity of two images of a class": class_similarity(features, labels)} | any_two  # Table 10
    if config["method"] != "patchmix" and config.get("base") != "simsiam":
        for selection in ("knn", "center"):
            of_class = (train_y[choose(run, train, selection)] == train_y[:, None]).double().mean().item()
            found["CLIM"][f"`{selection}` positives of the class, %"] = 100 * of_class
    found["JointCrop"] = {}
    bank = view_features(encoder, *only_crops(info, 1, 1), train, range(len(train)), 1)[:, 0]
    for name, area in {"whole images, %": 1, "crops of a fifth of them, %": 0.2}.items():
        queries = view_features(encoder, *only_crops(info, area, area), test, range(len(test)), 1)[:, 0]
        scored = common.knn_top1(bank, train_y, queries, labels, (20,), 0.07, len(train.classes))
        found["JointCrop"][name] = scored["knn20_top1"]
    alike = crop_similarity(view_features(encoder, *only_crops(info, 0.08, 0.6), test, index, 2))
    found["LoGo"] = dict(zip(("similarity of two small crops of one image", "of two images"), alike, strict=True))
    if config.get("l2l"):
        ranked = affinity_ranking(*local_embeddings(run, test, index))
        found["affinity"] = {f"{scored}, %": 100 * fraction for scored, fraction in ranked.items()}
    pairs = view_features(encoder, *views, test, index, 2)
    vehicle = torch.tensor([name in ("airplane", "automobile", "ship", "truck") for name in test.classes]).long()
    found["PatchMix"] = similarity_bars(pairs, labels[index], vehicle)  # after Fig. 4
    return found


def mechanisms(args):
    """What the losses do, by the papers' analyses and ours (`analyse`), of the runs that ANALYSES names."""
    found, parts = kept("mechanisms"), [common.load_dataset("cifar10", args.data_dir, part) for part in (True, False)]
    for run in sorted(RUNS.iterdir()):
        arm, _, seed = run.name.rpartition("-s")
        wanted = [table for table, arms in ANALYSES.items() if arm in arms]
        if wanted and run.is_dir() and seed not in found.setdefault(arm, {}):
            tables = analyse(run, *parts)
            found[arm][seed] = {table: tables[table] for table in wanted}
            keep("mechanisms", found)


# --------------------------------------------------------------- the tables


def scores(record):
    """Percents at the end of a run: (kNN, linear)."""
    return record["epochs"][-1]["knn20_top1"], record["linear_top1"]


def spread(values, sign="", digits=1):
    """Mean and standard deviation in words."""
    mean = f"{round(statistics.mean(values), digits) + 0.0:{sign}.{digits}f}"  # + 0.0: never "-0.0"
    return mean + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def gains(arm, other):
    """Points by which an arm is above another, one for each seed that both have: (kNN's, linear's)."""
    runs, others = kept(arm), kept(other)
    pairs = [(scores(runs[seed]), scores(others[seed])) for seed in sorted(runs.keys() & others.keys())]
    return [[ours[i] - theirs[i] for ours, theirs in pairs] for i in (0, 1)]


def markdown(heads, rows):
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *rows])


def table():
    """Markdown of all arms, and of the baselines below."""
    rows = []
    for arm, (name, script) in ARMS.items():
        percents = list(zip(*map(scores, kept(arm).values()), strict=True))
        rows.append([f"{name}, `{script}`", *map(spread, percents)])
    rows += [[name, *(f"{value:.1f}" for value in values.values())] for name, values in kept("baselines").items()]
    return markdown(["arm", "kNN", "linear"], rows)


def claims(front=False):
    """Markdown of all comparisons and the verdicts that follow; or, for README, of those with the paper's numbers."""
    rows = []
    for arm, other, time, paper in CLAIMS:
        knn, linear = gains(arm, other)
        lowest, highest = min(knn + linear), max(knn + linear)  # of all seeds and measures
        found = "shown" if lowest > NOISE else "the opposite" if highest < -NOISE else "not shown"
        said = paper if front else found + " (one seed)" * (len(knn) == 1)
        if said:
            rows.append([NAMES[arm], NAMES[other], spread(knn, "+"), spread(linear, "+"), f"x {time}", said])
    last = "the paper's own numbers" if front else "verdict"
    return markdown(["method", "over", "gain, kNN", "gain, linear", "time", last], rows)


def analysis(table):
    """Markdown of a table of `analyse`: an arm per row, a measure per column."""
    found, rows = kept("mechanisms"), []
    for arm in ANALYSES[table]:
        runs = [run[table] for run in found[arm].values()]
        values = {name: [run[name] for run in runs] for name in runs[0]}
        cells = [spread(v, digits=2 if name.endswith("%") else 4) for name, v in values.items()]
        rows.append([NAMES[arm], *cells])
    return markdown(["arm", *values], rows)


TABLES = dict(claims=claims, arms=table, front=functools.partial(claims, front=True))
TABLES |= {f"mechanisms, {name}": functools.partial(analysis, name) for name in ANALYSES}
PAGES = ROOT / "README.md", KEPT / "README.md"


def with_tables(page):
    """A page's text with each table between its two marks written anew."""
    for what, make in TABLES.items():
        begin, end = f"<!-- tests/tools/results.py: {what} -->\n", "<!-- end -->"
        if begin in page:
            before, after = page.split(begin)
            page = before + begin + make() + "\n" + after[after.index(end) :]
    return page


def write_pages(args):
    """Write the tables into README.md and tests/results/README.md."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


def curves(args):
    """kNN accuracy over the epochs: mean and range over the seeds."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CURVES), figsize=(5 * len(CURVES), 4.2), sharey=True, layout="tight")
    for panel, (title, arms) in zip(panels, CURVES.items(), strict=True):
        for arm in arms:
            runs = [record["epochs"] for record in kept(arm).values()]
            epochs, values = [r["epoch"] for r in runs[0]], np.array([[r["knn20_top1"] for r in run] for run in runs])
            (drawn,) = panel.plot(epochs, values.mean(0), marker="o", label=NAMES[arm])
            panel.fill_between(epochs, values.min(0), values.max(0), color=drawn.get_color(), alpha=0.15)
        panel.axhline(kept("baselines")["raw pixels"]["knn20_top1"], ls="--", c="gray", label="raw pixels")
        panel.set(title=title, xlabel="epoch")
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="kNN top-1, % (k = 20)")
    figure.savefig(ROOT / ".github" / "cifar_curves.png", dpi=100)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests/tools/results.py", description=__doc__, formatter_class=raw)
    actions = dict(train=train, baselines=baselines, mechanisms=mechanisms, readme=write_pages, curves=curves)
    parser.add_argument("action", choices=actions, metavar="ACTION")
    parser.add_argument("--data-dir", metavar="DIR", help="CIFAR-10's")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=sum(CURVES.values(), []), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(1)
    actions[args.action](args)


if __name__ == "__main__":
    main()
