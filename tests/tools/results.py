"""Does each paper's improvement over its baseline show? Makes the runs and the tables of their numbers, by hand.

    python tests/tools/results.py train --data-dir DIR [--arms jcl clim] [--seeds 0 1]
    python tests/tools/results.py baselines --data-dir DIR         raw pixels, and untrained encoders
    python tests/tools/results.py mechanisms --data-dir DIR        what the losses do, in all runs
    python tests/tools/results.py readme                           write the tables into the pages
    python tests/tools/results.py curves [OUT.png]                 learning curves (needs matplotlib)

The protocol (tests/results/README.md) was written down before the first run. `train` makes the runs that are missing,
and goes on where it was stopped. The numbers are kept in tests/results/*.json.
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
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import figures  # noqa: E402

import common  # noqa: E402
import eval_linear  # noqa: E402

KEPT = ROOT / "tests" / "results"
RESNET, VIT = "resnet_mini", "vit_micro"  # PatchMix has the ViT


class Arm(NamedTuple):
    name: str
    script: str  # with its flags
    epochs: int = 50


ARMS = {
    "moco": Arm("MoCo v2", "moco_jointcrop.py --joint none"),
    "jcl": Arm("JCL", "jcl.py"),
    "jointcrop": Arm("J-Crop(0)", "moco_jointcrop.py --joint crop"),
    "clim": Arm("CLIM", "clim.py"),
    "jointblur": Arm("J-Blur(0)", "moco_jointcrop.py --joint blur"),
    "moco-symmetric": Arm("MoCo, both views as queries", "logo.py --local-crops 0"),
    "logo-moco": Arm("LoGo on MoCo", "logo.py"),
    "patchmix-1": Arm("PatchMix, M = 1", "patchmix.py --num-mix 1"),
    "patchmix-3": Arm("PatchMix, M = 3", "patchmix.py --num-mix 3"),
    "simsiam": Arm("SimSiam", "logo.py --base simsiam --local-crops 0"),
    "logo-simsiam": Arm("LoGo on SimSiam", "logo.py --base simsiam"),
    "moco-twice": Arm("MoCo v2, 100 epochs", "moco_jointcrop.py --joint none", 100),
    "moco-half-more": Arm("MoCo v2, 75 epochs", "moco_jointcrop.py --joint none", 75),
    "logo-moco-no-l2l": Arm("LoGo on MoCo, no local-to-local", "logo.py --no-l2l"),
    "mocov3": Arm("MoCo v3", "patchmix.py --num-mix 1 --terms oto,mto"),
    "patchmix-released": Arm("PatchMix, M = 3, released", "patchmix.py --num-mix 3 --variant released"),
}

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
ANALYSES = {  # the tables of figures.mechanisms, and the arms that each is about
    "JCL": ("moco", "jcl"),
    "CLIM": ("moco", "clim"),
    "JointCrop": ("moco", "jointcrop", "clim", *LOGO),
    "LoGo": LOGO,
    "affinity": ("logo-moco", "logo-simsiam"),
    "PatchMix": ("patchmix-1", "patchmix-3"),
}


# ----------------------------------------------------------------- the runs


def command(arm, seed):
    """The command line of one run, without the data's place and the run's folder."""
    _, script, epochs = ARMS[arm]
    encoder = f"{VIT} --patch-size 4" if script.startswith("patchmix") else f"{RESNET} --amp bf16"
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
    torch.set_num_threads(1)
    flags = eval_linear.parse_args([str(out), *where, "--no-baselines", "--workers", "0"])
    linear = eval_linear.main(flags)["encoder"]["linear_top1"]
    config = json.loads((Path(out) / "config.json").read_text())
    record = dict(command=line, torch=config["torch"], device=config["machine"], commit=config["commit"])
    epochs = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("epoch", "loss", "std", "knn20_top1", "knn200_top1")
    epochs = [{name: round(r[name], 4) for name in names} for r in epochs if "knn20_top1" in r]
    return record | dict(epochs=epochs, linear_top1=round(linear, 4))


def train(args):
    """Every run of the arms that is not kept yet, all arms of a seed before the next seed."""
    where = ["--data-dir", args.data_dir] if args.data_dir else []
    for arm, seed in ((arm, seed) for seed in args.seeds for arm in args.arms if str(seed) not in kept(arm)):
        line, out = command(arm, seed), Path(args.runs, f"{arm}-s{seed}").resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, *shlex.split(line), *where, "--workers", "0", "--out", str(out)]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        with open(f"{out}.log", "a") as log:
            subprocess.run(words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
        record = evaluate(line, out, where)
        keep(arm, dict(sorted((kept(arm) | {str(seed): record}).items())))
        print(f"{arm}, seed {seed}: kNN and linear {scores(record)}", flush=True)


def cifar10(args):
    """The images: (training set, test set)."""
    return [common.load_images("cifar10", args.data_dir, part) for part in (True, False)]


def baselines(args):
    """Raw pixels, and both encoders untrained."""
    torch.set_num_threads(1)
    found, (train, test) = {}, cifar10(args)
    train_y, test_y = (torch.from_numpy(part.labels) for part in (train, test))
    for name, arch in {"raw pixels": RESNET, "the ResNet untrained": RESNET, "the ViT untrained": VIT}.items():
        torch.manual_seed(0)
        info = common.backbone_info(arch, 32, 4, norm="cifar10")
        encoder = torch.nn.Flatten() if name == "raw pixels" else common.build_backbone(info)
        x, test_x = (common.extract_features(encoder, part, info, figures.CPU) for part in (train, test))
        scored = common.knn_scores(x, train, test_x, test, (20,), 0.07)
        linear = eval_linear.linear_probe(x, train_y, test_x, 10)["logits"].argmax(1)
        scored["linear_top1"] = 100 * (linear == test_y).double().mean().item()
        found[name] = {measure: round(value, 4) for measure, value in scored.items()}
        print(f"{name}: {found[name]}", flush=True)
    keep("baselines", found)


def mechanisms(args):
    """What the losses do, by the papers' analyses and ours (`figures.mechanisms`), of the runs that ANALYSES names."""
    torch.set_num_threads(1)
    found, parts = kept("mechanisms"), cifar10(args)
    for run in sorted(Path(args.runs).iterdir()):
        arm, _, seed = run.name.rpartition("-s")
        wanted = [table for table, arms in ANALYSES.items() if arm in arms]
        if wanted and run.is_dir() and seed not in found.setdefault(arm, {}):
            tables = figures.mechanisms(run, *parts)
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
    for name, arm in ARMS.items():
        percents = list(zip(*map(scores, kept(name).values()), strict=True))
        rows.append([f"{arm.name}, `{arm.script}`", *map(spread, percents)])
    rows += [[name, *(f"{value:.1f}" for value in values.values())] for name, values in kept("baselines").items()]
    return markdown(["arm", "kNN", "linear"], rows)


def verdict(points):
    """What the gains of all seeds and measures say of a claim: is each larger than what the test set errs by?"""
    return "shown" if min(points) > NOISE else "the opposite" if max(points) < -NOISE else "not shown"


def claims(last="verdict", front=False):
    """Markdown of all comparisons and the verdicts that follow; or, for README, of those with the paper's numbers."""
    rows = []
    for arm, other, time, paper in CLAIMS:
        knn, linear = gains(arm, other)
        said = paper if front else verdict(knn + linear) + " (one seed)" * (len(knn) == 1)
        rows.append([ARMS[arm].name, ARMS[other].name, spread(knn, "+"), spread(linear, "+"), f"x {time}", said])
    return markdown(["method", "over", "gain, kNN", "gain, linear", "time", last], [row for row in rows if row[-1]])


def analysis(table):
    """Markdown of a table of figures.mechanisms: an arm per row, a measure per column."""
    found, rows = kept("mechanisms"), []
    for arm in ANALYSES[table]:
        runs = [run[table] for run in found[arm].values()]
        values = {name: [run[name] for run in runs] for name in runs[0]}
        cells = [spread(v, digits=2 if name.endswith("%") else 4) for name, v in values.items()]
        rows.append([ARMS[arm].name, *cells])
    return markdown(["arm", *values], rows)


TABLES = dict(claims=claims, arms=table, front=functools.partial(claims, "the paper's own numbers", front=True))
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
        for name in arms:
            epochs = [r["epoch"] for r in kept(name)["0"]["epochs"]]
            values = np.array([[r["knn20_top1"] for r in record["epochs"]] for record in kept(name).values()])
            (drawn,) = panel.plot(epochs, values.mean(0), marker="o", label=ARMS[name].name)
            panel.fill_between(epochs, values.min(0), values.max(0), color=drawn.get_color(), alpha=0.15)
        panel.axhline(kept("baselines")["raw pixels"]["knn20_top1"], ls="--", c="gray", label="raw pixels")
        panel.set(title=title, xlabel="epoch")
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="kNN top-1, % (k = 20)")
    figure.savefig(args.out, dpi=100)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests/tools/results.py", description=__doc__, formatter_class=raw)
    actions = dict(train=train, baselines=baselines, mechanisms=mechanisms, readme=write_pages, curves=curves)
    parser.add_argument("action", choices=actions, metavar="ACTION")
    parser.add_argument("out", nargs="?", default=ROOT / ".github" / "cifar_curves.png", metavar="OUT.png")
    parser.add_argument("--data-dir", metavar="DIR", help="CIFAR-10's")
    parser.add_argument("--runs", default="runs/results", metavar="DIR", help="where the runs' folders are")
    drawn = sum(CURVES.values(), [])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=drawn, metavar="ARM", help="default: CURVES")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], metavar="N")
    args = parser.parse_args()
    actions[args.action](args)


if __name__ == "__main__":
    main()
