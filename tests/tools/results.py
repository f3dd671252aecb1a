"""Does each paper's improvement over its baseline show? Makes the runs and the tables of their numbers, by hand.

    python tests/tools/results.py train --data-dir DIR [--arms jcl clim] [--seeds 0 1]
    python tests/tools/results.py few --data-dir DIR --arm mocov3  one run of PatchMix where images are few
    python tests/tools/results.py floors --data-dir DIR            raw pixels, and untrained encoders
    python tests/tools/results.py mechanisms --data-dir DIR        what the losses do, in all runs
    python tests/tools/results.py readme                           write the tables into the pages
    python tests/tools/results.py curves OUT.png                   learning curves (needs matplotlib)

The protocol (tests/results/README.md) was written down before the first run. `train` makes the runs that are missing.
It and `few` go on where they were stopped. The numbers are kept in tests/results/*.json.
"""

import argparse
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timm
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import figures  # noqa: E402

import common  # noqa: E402
import eval_linear  # noqa: E402
import patchmix  # noqa: E402

KEPT = ROOT / "tests" / "results"
MEASURES = {"knn20_top1": "kNN, k = 20", "knn200_top1": "kNN, k = 200", "linear_top1": "linear"}
SHOWN = ("knn20_top1", "linear_top1")  # in the tables
EPOCHS = 50
RESNET, VIT = "resnet_mini", "vit_micro"  # PatchMix has the ViT


class Arm(NamedTuple):
    name: str
    script: str  # with its flags
    baseline: str | None
    tier: int  # 1: trained by default; 2: if asked for
    times: float = 1  # EPOCHS


ARMS = {
    "moco": Arm("MoCo v2", "moco_jointcrop.py --joint none", None, 1),
    "jcl": Arm("JCL", "jcl.py", "moco", 1),
    "jointcrop": Arm("J-Crop(0)", "moco_jointcrop.py --joint crop", "moco", 1),
    "clim": Arm("CLIM", "clim.py", "moco", 1),
    "jointblur": Arm("J-Blur(0)", "moco_jointcrop.py --joint blur", "moco", 1),
    "moco-symmetric": Arm("MoCo, both views as queries", "logo.py --local-crops 0", "moco", 1),
    "logo-moco": Arm("LoGo on MoCo", "logo.py", "moco-symmetric", 1),
    "patchmix-1": Arm("PatchMix, M = 1", "patchmix.py --num-mix 1", None, 1),
    "patchmix-3": Arm("PatchMix, M = 3", "patchmix.py --num-mix 3", "patchmix-1", 1),
    "simsiam": Arm("SimSiam", "logo.py --base simsiam --local-crops 0", None, 1),
    "logo-simsiam": Arm("LoGo on SimSiam", "logo.py --base simsiam", "simsiam", 1),
    "moco-twice": Arm("MoCo v2, 100 epochs", "moco_jointcrop.py --joint none", "moco", 2, times=2),
    "moco-half-more": Arm("MoCo v2, 75 epochs", "moco_jointcrop.py --joint none", "moco", 2, times=1.5),
    "logo-moco-joint": Arm("LoGo on MoCo, joint affinity", "logo.py --affinity-batch joint", "moco-symmetric", 2),
    "logo-moco-no-l2l": Arm("LoGo on MoCo, no local-to-local", "logo.py --no-l2l", "moco-symmetric", 2),
    "mocov3": Arm("MoCo v3", "patchmix.py --num-mix 1 --terms oto,mto", None, 2),
    "patchmix-released": Arm("PatchMix, M = 3, released", "patchmix.py --num-mix 3 --variant released", "mocov3", 2),
}

CLAIMS = (  # what is claimed; the arm, what it is compared with, its time over that one's
    ("JointCrop beats MoCo v2", "jointcrop", "moco", "1"),
    ("JCL beats MoCo v2", "jcl", "moco", "2"),
    ("JCL beats MoCo v2 of 100 epochs", "jcl", "moco-twice", "1"),
    ("CLIM beats MoCo v2", "clim", "moco", "1.5"),
    ("CLIM beats MoCo v2 of 75 epochs", "clim", "moco-half-more", "1"),
    ("JointBlur beats MoCo v2", "jointblur", "moco", "1"),
    ("LoGo beats MoCo of both views", "logo-moco", "moco-symmetric", "2.5"),
    ("LoGo, joint affinity, beats MoCo of both views", "logo-moco-joint", "moco-symmetric", "2.4"),
    ("LoGo without local-to-local beats MoCo of both views", "logo-moco-no-l2l", "moco-symmetric", "1.8"),
    ("LoGo beats SimSiam", "logo-simsiam", "simsiam", "2.5"),
    ("PatchMix with M = 3 beats M = 1", "patchmix-3", "patchmix-1", "1"),
    ("PatchMix with M = 3, released, beats MoCo v3", "patchmix-released", "mocov3", "1.1"),
)
NOISE = 0.5  # points by which 10,000 test images alone let an accuracy err

# README's table: arm, its time over the baseline's (from one sitting: tests/results/README.md), the paper's gain
FRONT = {
    "jointcrop": ("1", "ImageNet-1K linear, MoCo v1: 57.3 → 60.9"),
    "jointblur": ("1", "the same: 57.3 → 60.6"),
    "jcl": ("2", "ImageNet-1K linear: 67.5 → 68.7"),
    "clim": ("1.5", "ImageNet-1K linear: 67.5 → 70.1"),
    "logo-moco": ("2.5", "ImageNet-100 kNN, ResNet-34, over MoCo: 64.2 → 76.8"),
    "logo-simsiam": ("2.5", "ImageNet-100 kNN, ResNet-34: 71.7 → 78.5"),
    "patchmix-3": ("1", "CIFAR-10 kNN, ViT-S/2: 88.2 → 94.6"),
}

LOGO = ("moco-symmetric", "logo-moco", "logo-moco-no-l2l", "simsiam", "logo-simsiam")
ANALYSES = {  # the tables of figures.mechanisms, and the arms that each is about
    "JCL": ("moco", "jcl"),
    "CLIM": ("moco", "clim"),
    "JointCrop": ("moco", "jointcrop", "clim", *LOGO),
    "LoGo": LOGO,
    "affinity": ("logo-moco", "logo-moco-joint", "logo-simsiam"),
    "PatchMix": ("patchmix-1", "patchmix-3"),
}


# ----------------------------------------------------------------- the runs


def command(arm, seed):
    """The command line of one run, without the data's place and the run's folder."""
    script, epochs = ARMS[arm].script, round(EPOCHS * ARMS[arm].times)
    encoder = f"{VIT} --patch-size 4" if script.startswith("patchmix") else f"{RESNET} --amp bf16"
    flags = f"--dataset cifar10 --arch {encoder} --epochs {epochs}"
    return f"{script} {flags} --batch-size 128 --knn-every 10 --seed {seed}"


def kept(name):
    """What is kept under a name; of an arm {seed: record} of its runs, else nothing."""
    file = KEPT / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def keep(name, found):
    (KEPT / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def keep_run(name, seed, record):
    keep(name, dict(sorted((kept(name) | {str(seed): record}).items())))


def records_of(out):
    """The records of the epochs of a run's folder."""
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def summary(line, out, shown):
    """What is kept of a run: its command, what it was made with, and the records of its epochs with kNN."""
    config = common.read_config(out)
    record = dict(command=line, torch=config["torch"], device=config["machine"], commit=config["commit"])
    epochs = [r for r in records_of(out) if "knn20_top1" in r]
    return record | dict(epochs=[{k: round(r[k], 4) for k in shown if k in r} for r in epochs])


def judge(line, out, where):
    """The record of a run that has ended: its epochs with kNN, the linear probe, and the minutes that it trained."""
    torch.set_num_threads(1)
    flags = eval_linear.parse_args([str(out), *where, "--no-floors", "--workers", "0"])
    linear = eval_linear.main(flags)["encoder"]["linear_top1"]
    epochs = records_of(out)
    images = epochs[0]["step"] * common.read_config(out)["batch_size"]
    minutes = sum(images / r["images_per_s"] for r in epochs) / 60
    record = summary(line, out, ("epoch", "loss", "below_chance", "std", "knn20_top1", "knn200_top1"))
    return record | {"linear_top1": round(linear, 4), "minutes": round(minutes, 1)}


def train(args):
    """Every run of the arms that is not kept yet, all arms of a seed before the next seed."""
    where = ["--data-dir", args.data_dir] if args.data_dir else []
    arms = args.arms or [name for name, arm in ARMS.items() if arm.tier == 1]
    for arm, seed in ((arm, seed) for seed in args.seeds for arm in arms if str(seed) not in kept(arm)):
        line, out = command(arm, seed), Path(args.runs, f"{arm}-s{seed}").resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, *shlex.split(line), *where, "--workers", "0", "--out", str(out)]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        with open(f"{out}.log", "a") as log:
            subprocess.run(words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
        record = judge(line, out, where)
        keep_run(arm, seed, record)
        print(f"{arm}, seed {seed}: {shown(scores(record))}", flush=True)


def cifar10(args):
    """The images: (training set, test set)."""
    return [common.load_images("cifar10", args.data_dir, part) for part in (True, False)]


FEW = 200  # images per class
FEW_ARMS = ("mocov3", "patchmix-released")


def few(args):
    """A run of PatchMix where images are few: the first 200 of each class by name, and a ViT of 1.2 M parameters."""
    torch.set_num_threads(1)
    train, test = cifar10(args)
    of_class = [np.flatnonzero(train.labels == c)[:FEW] for c in range(len(train.classes))]
    torch.manual_seed(args.seed)
    size = dict(img_size=32, patch_size=4, embed_dim=128, depth=6, num_heads=4)
    encoder = timm.create_model("vit_tiny_patch16_224", **size, num_classes=0)
    script, *flags = ARMS[args.arm].script.split()
    flags += f"--dataset cifar10 --arch {VIT} --patch-size 4 --epochs 330 --batch-size 128 --knn-every 30".split()
    flags += f"--seed {args.seed} --workers 0 --device cpu {args.flags}".split()
    out, images = Path(args.runs) / f"few-{args.arm}-s{args.seed}", train.subset(np.concatenate(of_class))
    patchmix.main(patchmix.parse_args([*flags, "--out", str(out)]), images, test, encoder)
    line = f"tests/tools/results.py few --arm {args.arm} --seed {args.seed}"
    record = summary(line, out, ("epoch", "loss", "std", "knn20_top1", "knn200_top1"))
    keep_run(f"few-{args.arm}", args.seed, record | dict(flags=" ".join(flags)))


def floors(args):
    """Raw pixels, and both encoders untrained."""
    torch.set_num_threads(1)
    found, (train, test) = {}, cifar10(args)
    train_y, test_y = (torch.from_numpy(part.labels) for part in (train, test))
    for name, arch in dict(pixels=RESNET, resnet=RESNET, vit=VIT).items():
        torch.manual_seed(0)
        info = common.backbone_info(arch, 32, 4, norm="cifar10")
        encoder = torch.nn.Flatten() if name == "pixels" else common.build_backbone(info)
        x, test_x = (common.extract_features(encoder, part, info, figures.CPU) for part in (train, test))
        judged = common.knn_scores(x, train, test_x, test, (20, 200), 0.07)
        linear = eval_linear.linear_probe(x, train_y, test_x, 10)["logits"].argmax(1)
        judged["linear_top1"] = 100 * (linear == test_y).double().mean().item()
        found[name] = {measure: round(value, 4) for measure, value in judged.items()}
        print(f"{name}: {shown(found[name])}", flush=True)
    keep("floors", found)


def mechanisms(args):
    """What the losses do, by the papers' analyses and ours (`figures.mechanisms`), of the runs that ANALYSES names."""
    torch.set_num_threads(1)
    runs, found, parts = Path(args.runs).resolve(), kept("mechanisms"), cifar10(args)
    wanted = {name: [table for table, arms in ANALYSES.items() if name in arms] for name in ARMS}
    for arm, seed in ((name, seed) for name in ARMS if wanted[name] for seed in kept(name)):
        run = runs / f"{arm}-s{seed}"
        if seed not in found.setdefault(arm, {}) and run.is_dir():
            tables = figures.mechanisms(run, *parts)
            found[arm][seed] = {table: tables[table] for table in wanted[arm]}
            print(f"{arm}, seed {seed}: {found[arm][seed]}", flush=True)
            keep("mechanisms", {name: dict(sorted(found[name].items())) for name in ARMS if found.get(name)})


# --------------------------------------------------------------- the tables


def scores(record):
    """{measure: percent} at the end of a run."""
    return {name: record["epochs"][-1].get(name, record.get(name)) for name in MEASURES}


def shown(values):
    return ", ".join(f"{MEASURES[name]} {value:.1f}" for name, value in values.items())


def spread(values, sign="", digits=1):
    """Mean and standard deviation in words."""
    mean = f"{round(statistics.mean(values), digits) + 0.0:{sign}.{digits}f}"  # + 0.0: never "-0.0"
    return mean + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def paired(arm, other):
    """[(scores of the arm `other`, scores of the arm)] of the seeds that both have; other: None for no arm."""
    runs, others = (kept(name) if name else {} for name in (arm, other))
    return [(scores(others[seed]), scores(runs[seed])) for seed in sorted(runs.keys() & others.keys())]


def markdown(heads, rows):
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *rows])


def table():
    """Markdown of the arms that have runs, and of the floors below."""
    rows = []
    for name, arm in ARMS.items():
        runs = kept(name).values()
        if not runs:
            continue
        longer = f" --epochs {round(EPOCHS * arm.times)}" if arm.times != 1 else ""
        accuracies = [spread([scores(run)[measure] for run in runs]) for measure in SHOWN]
        rows.append([f"{arm.name}, `{arm.script}{longer}`", str(len(runs)), *accuracies])
    names = {"pixels": "raw pixels", "resnet": "the ResNet untrained", "vit": "the ViT untrained"}
    for floor, values in kept("floors").items():
        rows.append([names[floor], "", *(f"{values[measure]:.1f}" for measure in SHOWN)])
    return markdown(["arm", "seeds", "kNN", "linear"], rows)


def front():
    """Markdown of README's table: each method beside its baseline, its time over the baseline's, and its paper."""
    heads = ["method", "over", "seeds", "kNN", "gain", "linear", "gain", "time", "the paper's own numbers"]
    rows = []
    for name, (time, paper) in FRONT.items():
        other, cells = ARMS[name].baseline, []
        both = paired(name, other)
        if not both:
            continue
        for measure in SHOWN:
            before, after = ([one[measure] for one in ones] for ones in zip(*both, strict=True))
            cells.append(f"{statistics.mean(before):.1f} → {statistics.mean(after):.1f}")
            cells.append(spread([b - a for a, b in zip(before, after, strict=True)], "+"))
        rows.append([ARMS[name].name, ARMS[other].name, str(len(both)), *cells, f"x {time}", paper])
    return markdown(heads, rows)


def verdict(gains):
    """What the gains of all seeds and measures say of a claim: is each larger than what the test set errs by?"""
    if min(gains) > NOISE:
        return "shown"
    return "the opposite" if max(gains) < -NOISE else "not shown"


def claims():
    """Markdown of what the papers claim, of the gains here, and of the verdict that follows from them."""
    rows = []
    for claim, arm, other, time in CLAIMS:
        if both := paired(arm, other):
            gains = [[own[measure] - others[measure] for others, own in both] for measure in SHOWN]
            said = verdict(sum(gains, [])) + " (one seed)" * (len(both) == 1)
            rows.append([claim, *(spread(gain, "+") for gain in gains), str(len(both)), f"x {time}", said])
    return markdown(["claim", "gain, kNN", "gain, linear", "seeds", "time", "verdict"], rows)


def analysis(table):
    """Markdown of a table of figures.mechanisms: an arm per row, a measure per column."""
    found, rows = kept("mechanisms"), []
    for arm in ANALYSES[table]:
        runs = [run[table] for run in found[arm].values()]
        values = {name: [run[name] for run in runs] for name in runs[0]}
        cells = [spread(v, digits=2 if name.endswith("%") else 4) for name, v in values.items()]
        rows.append([ARMS[arm].name, str(len(runs)), *cells])
    return markdown(["arm", "seeds", *values], rows)


def few_table():
    """Markdown of the runs where images are few: kNN accuracy (k = 20) over the epochs, an arm per row."""
    runs = [(ARMS[arm], seed, record) for arm in FEW_ARMS for seed, record in kept(f"few-{arm}").items()]
    epochs, rows = range(30, 331, 60), []
    for arm, seed, record in runs:
        at = {r["epoch"]: f"{r['knn20_top1']:.1f}" for r in record["epochs"]}
        rows.append([f"{arm.name}, `{arm.script}`", seed, *(at[epoch] for epoch in epochs)])
    return markdown(["arm", "seed", *map(str, epochs)], rows)


TABLES = dict(claims=claims, front=front, arms=table, few=few_table)
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
    """kNN accuracy over the epochs: mean and range over the seeds, one panel for each family of baselines."""
    families = {"moco": "MoCo v2 and what builds on it", "simsiam": "SimSiam", "patchmix-1": "PatchMix"}
    figure, panels = figures.subplots(1, len(families), figsize=(5 * len(families), 4.2), sharey=True)
    for panel, (family, title) in zip(panels, families.items(), strict=True):
        for name, arm in ARMS.items():
            over = ARMS[arm.baseline].baseline if arm.baseline else None
            if arm.tier > 1 or family not in (name, arm.baseline, over):
                continue
            epochs = [r["epoch"] for r in kept(name)["0"]["epochs"]]
            values = np.array([[r["knn20_top1"] for r in record["epochs"]] for record in kept(name).values()])
            (drawn,) = panel.plot(epochs, values.mean(0), marker="o", label=arm.name)
            panel.fill_between(epochs, values.min(0), values.max(0), color=drawn.get_color(), alpha=0.15)
        panel.axhline(kept("floors")["pixels"]["knn20_top1"], ls="--", c="gray", label="raw pixels")
        panel.set(title=title, xlabel="epoch")
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="kNN top-1, % (k = 20)")
    figures.write_picture(figure, args.out)


def main(argv=None):
    parser = argparse.ArgumentParser("tests/tools/results.py", description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    functions = dict(train=train, few=few, floors=floors, mechanisms=mechanisms, readme=write_pages, curves=curves)
    flags = {name: actions.add_parser(name, help=function.__doc__) for name, function in functions.items()}
    for name, function in functions.items():
        flags[name].set_defaults(function=function)
    for name in ("train", "few", "floors", "mechanisms"):
        flags[name].add_argument("--data-dir", metavar="DIR", required=name == "few")
    for name in ("train", "few", "mechanisms"):
        flags[name].add_argument("--runs", default="runs/results", metavar="DIR", help="where the runs' folders are")
    flags["train"].add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help="default: tier 1")
    flags["train"].add_argument("--seeds", nargs="+", type=int, default=[0, 1], metavar="N")
    flags["few"].add_argument("--arm", choices=FEW_ARMS, required=True)
    flags["few"].add_argument("--seed", type=int, default=0, metavar="N")
    flags["few"].add_argument("--flags", default="--amp bf16", metavar="FLAGS", help="more (default: %(default)s)")
    flags["curves"].add_argument("out", metavar="OUT.png")
    args = parser.parse_args(argv)
    args.function(args)


if __name__ == "__main__":
    main()
