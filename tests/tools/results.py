"""Makes the runs behind the tables of tests/results/*.md, and the tables, by hand.

    python tests/tools/results.py begin --data-dir DIR [--arms jcl-stl10]   three epochs of every recipe
    python tests/tools/results.py gpu --archive FILE [--minutes 9]          what gpu_list.py has for a GPU
    python tests/tools/results.py readme                                    the tables of tests/results/*.md
    python tests/tools/results.py curves                                    the learning curves (needs matplotlib)

claims.json is of earlier recipes; each of its runs names its command and commit. Its "baselines", raw pixels and
untrained encoders, are what eval_knn.py and eval_linear.py print beside a run's.
"""

import argparse
import contextlib
import itertools
import json
import re
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import gpu_list
import numpy as np
import torch
from bench import ROOT, parse, records, training_batches  # which puts the project's root on the path

import common

KEPT, RUNS = ROOT / "tests" / "results", ROOT / "runs" / "results"
RESNET, VIT = "resnet_mini", "vit_micro"  # PatchMix has the ViT

ARMS = {  # of claims.json: how tables call them
    "moco": "MoCo v2",
    "jcl": "JCL",
    "jointcrop": "J-Crop(0)",
    "clim": "CLIM",
    "jointblur": "J-Blur(0)",
    "moco-symmetric": "MoCo, both views as queries",
    "logo-moco": "LoGo on MoCo",
    "logo-moco-no-l2l": "LoGo on MoCo, no local-to-local",
    "patchmix-1": "PatchMix, M = 1",
    "patchmix-3": "PatchMix, M = 3",
    "simsiam": "SimSiam",
    "logo-simsiam": "LoGo on SimSiam",
    "moco-twice": "MoCo v2, 100 epochs",
    "moco-half-more": "MoCo v2, 75 epochs",
    "mocov3": "MoCo v3",
    "patchmix-released": "PatchMix, M = 3, released",
}
CURVES = {  # the panels of the picture
    "MoCo v2 and what builds on it": "moco jcl jointcrop clim jointblur moco-symmetric logo-moco".split(),
    "SimSiam": ["simsiam", "logo-simsiam"],
    "PatchMix": ["patchmix-1", "patchmix-3"],
}

CLAIMS = (  # an arm, the one that it is to beat, its time over that one's
    ("jointcrop", "moco", "1"),
    ("jointblur", "moco", "1"),
    ("jcl", "moco", "2"),
    ("jcl", "moco-twice", "1"),
    ("clim", "moco", "1.5"),
    ("clim", "moco-half-more", "1"),
    ("logo-moco", "moco-symmetric", "2.5"),
    ("logo-moco-no-l2l", "moco-symmetric", "1.8"),
    ("logo-simsiam", "simsiam", "2.5"),
    ("patchmix-3", "patchmix-1", "1"),
    ("patchmix-released", "mocov3", "1.1"),
)
# What `begin` trains, {name: script with flags}, with each recipe. cifar100's differs from cifar10's by its norm only.
BEGUN = {
    "moco-v1": "moco_jointcrop.py --moco v1 --joint none",
    "moco-v2": "moco_jointcrop.py --joint none",
    "moco-v3": "moco_jointcrop.py --moco v3 --joint none",
    "jointcrop": "moco_jointcrop.py",
    "jcl": "jcl.py",
    "clim": "clim.py --clim-start 1",
    "logo-moco": "logo.py",
    "logo-simsiam": "logo.py --base simsiam",
    "patchmix": "patchmix.py",
}
# What a CPU cannot do is reduced. CIFAR-10's images have 32 px, so larger views would show no more, and take longer.
REDUCED = dict(  # recipe: (by what sides of views, local crops and patches are divided, images)
    patterns=(1, 4096), cifar10=(1, 12800), stl10=(3, 9600), imagenet100=(8, 8192), imagenet=(8, 8192),
    folder=(8, 8192), resnet18=(4, 12800),
)  # fmt: skip
WITH_RESNET18 = "resnet18"  # CIFAR-10's recipe with its own encoder: a small one may hide how that one begins
BEGINS = {f"{name}-{recipe}": (name, recipe) for recipe in REDUCED for name in BEGUN}
del BEGINS[f"patchmix-{WITH_RESNET18}"]
COLLAPSED = 0.2  # a lower std after three epochs

FROM_008 = ", crops from 0.08 of the area"
SMALL = {  # the rows of the table of small_encoders.json: their names there, and in the table
    "MoCo v2, as its recipe is": "MoCo v2, `moco_jointcrop.py --joint none`",
    "J-Crop(0), as its recipe is": "J-Crop(0), `moco_jointcrop.py`",
    f"MoCo v2{FROM_008}": "MoCo v2, the baseline of JCL and CLIM, `moco_jointcrop.py --joint none --crop-scale 0.08 1`",
    f"J-Crop(0){FROM_008}": "J-Crop(0), `moco_jointcrop.py --crop-scale 0.08 1`",
    "JCL, as its recipe is": "JCL, `jcl.py`",
    "CLIM, as its recipe is": "CLIM, `clim.py` (positives from the sixth epoch on)",
    "MoCo, both views as queries, as its recipe is": "MoCo, both views as queries, `logo.py --local-crops 0`",
    "LoGo on MoCo, as its recipe is": "LoGo on MoCo, `logo.py`",
    "MoCo v3, as its recipe is": "MoCo v3, `patchmix.py --num-mix 1 --terms oto,mto --arch vit_micro`",
    "PatchMix, as its recipe is": "PatchMix, `patchmix.py --arch vit_micro`",
}

NOISE = 0.5  # points by which 10,000 test images alone let an accuracy err


def kept(name):
    """What is kept in a file of tests/results."""
    file = KEPT / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def runs_of(arm):
    """What is kept of an arm's runs: {seed: record}."""
    return kept("claims").get(arm, {})


def versions():
    """What a run was made with."""
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True)
    return dict(torch=torch.__version__, commit=commit.strip())


def three_epochs(name, recipe, images):
    """The first three epochs of a recipe: a small encoder takes the place of its own, and REDUCED is heeded."""
    out, dataset = RUNS / "begin" / f"{name}-{recipe}", "cifar10" if recipe == WITH_RESNET18 else recipe
    where = f"--device cpu --workers 0 --knn-every 0 --dataset {dataset} --out {out}"
    module, args = parse(f"{BEGUN[name]} {where}")
    own = dict(recipe=dataset, size=np.max(args.image_size).item(), batch=args.batch_size)
    if recipe not in ("patterns", WITH_RESNET18):
        args.arch = VIT if name == "patchmix" else RESNET
    args.batch_size = min(args.batch_size, 512)
    for sides in {"image_size", "local_size", "patch_size"} & vars(args).keys():
        setattr(args, sides, np.floor_divide(getattr(args, sides), REDUCED[recipe][0]).tolist())
    if name == "patchmix" and recipe != "patterns":
        args.patch_size = 4  # more patches would take an hour
    epochs = itertools.count(1)

    def begin_epoch(batches):  # the recipe's number of epochs stays, because schedules depend on it
        if next(epochs) > 3:
            raise KeyboardInterrupt
        return batches

    shutil.rmtree(out, ignore_errors=True)
    began = time.time()
    with training_batches(begin_epoch), contextlib.suppress(KeyboardInterrupt):
        module.main(args, train=images)
    names = ("epoch", "loss", "std", "rank", "grad_norm", "lr")
    epochs = [{name: float(f"{epoch[name]:.4g}") for name in names} for epoch in records(out)]
    uniform = json.loads((out / "config.json").read_text()).get("loss_at_uniform_logits")
    used = dict(arch=args.arch, used_size=np.max(args.image_size).item(), used_batch=args.batch_size)
    made = dict(images=len(images), steps=len(images) // args.batch_size, uniform=uniform)
    return own | dict(epochs=epochs, command=BEGUN[name]) | used | made | dict(seconds=round(time.time() - began))


def begin(args):
    """Three epochs of every recipe that is not kept yet, on CIFAR-10's images. Keeps them in begin.json."""
    whole = common.load_dataset("cifar10", args.data_dir)
    for arm in args.arms or BEGINS:
        name, recipe = BEGINS[arm]
        if arm in kept("begin"):
            continue
        rows = np.linspace(0, len(whole) - 1, REDUCED[recipe][1]).astype(int).tolist()
        images = common.Patterns(4096, 32, seed=0) if recipe == "patterns" else common.Subset(whole, rows)
        record = three_epochs(name, recipe, images) | versions()
        found = kept("begin") | {arm: record}
        gpu_list.write(KEPT / "begin.json", {arm: found[arm] for arm in BEGINS if arm in found})
        print(f"{arm}: std {record['epochs'][-1]['std']}, {record['seconds']} s", flush=True)


# --------------------------------------------------------------- the tables


def scores(record):
    """Percents at the end of a run: (kNN, linear)."""
    return record["epochs"][-1]["knn20_top1"], record["linear_top1"]


def spread(values):
    """Mean, with its sign, and standard deviation in words."""
    mean = f"{round(statistics.mean(values), 1) + 0.0:+.1f}"  # + 0.0: never "-0.0"
    return mean + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def gains(arm, other):
    """Points by which an arm is above another, one for each seed that both have: (kNN's, linear's)."""
    runs, others = runs_of(arm), runs_of(other)
    pairs = [(scores(runs[seed]), scores(others[seed])) for seed in sorted(runs.keys() & others.keys())]
    return [[ours[i] - theirs[i] for ours, theirs in pairs] for i in (0, 1)]


def markdown(heads, rows):
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *rows])


def claims():
    """Markdown of all comparisons, over the seeds that both arms have, and the verdicts that follow."""
    rows = []
    for arm, other, cost in CLAIMS:
        seeds = runs_of(arm).keys() & runs_of(other).keys()
        cells, found = [ARMS[arm], ARMS[other]], gains(arm, other)
        for i, gained in enumerate(found):
            before = statistics.mean(scores(runs_of(other)[seed])[i] for seed in seeds)
            cells += [f"{before:.1f} → {before + statistics.mean(gained):.1f}", spread(gained)]
        lowest, highest = min(sum(found, [])), max(sum(found, []))  # of all seeds and measures
        verdict = "+" if lowest > NOISE else "-" if highest < -NOISE else "unclear"
        rows.append([*cells, f"x {cost}", verdict])
    return markdown(["method", "over", "kNN", "gain", "linear", "gain", "time", "verdict"], rows)


def begun():
    """Markdown of `std` after the third epoch of each recipe."""
    cells = {}
    for arm, record in kept("begin").items():
        std = record["epochs"][-1]["std"]
        bold = "**" * (std < COLLAPSED)
        cells[BEGINS[arm]] = f"{bold}{std:.2f}{bold}"
    rows = [[f"`{script}`", *(cells.get((name, recipe), "") for recipe in REDUCED)] for name, script in BEGUN.items()]
    return markdown(["script", *REDUCED], rows)


def trained_on_gpu():
    """Markdown of what a GPU has trained to the end."""
    rows = []
    for file in sorted((KEPT / "gpu").glob("*-s?.json")):
        record = json.loads(file.read_text())
        epochs = record["epochs"]
        if f"--epochs {len(epochs)} " not in record["command"]:
            continue  # the time was over
        stds = ", ".join(f"{epoch['std']:.2f}" for epoch in epochs[:5:2])
        knn = ", ".join(f"{e['knn20_top1']:.1f} after {e['epoch']}" for e in epochs if "knn20_top1" in e)
        k_200 = {temperature: scores["knn200_top1"] for temperature, scores in record.get("kNN", {}).items()}
        finals = k_200.get("0.07"), record.get("linear", {}).get("linear_top1")
        line = re.sub(r" --(knn-every|seed) \d+", "", record["command"])
        percents = [f"{score:.1f}" if score else "" for score in finals]
        rows.append([f"{record['title']}, `{line}`", stds, knn, *percents, f"{record['seconds'] / 60:.0f}"])
    heads = ["training", "`std` after epochs 1, 3, 5", "kNN, k 20", "k 200", "linear", "minutes"]
    return markdown(heads, rows) if rows else ""


def small_encoders():
    """Markdown of kNN after 20 epochs of small encoders, for each seed."""
    runs, rows = kept("small_encoders"), []
    for name, label in SMALL.items():
        last = [runs[name + seed]["epochs"][-1] for seed in ("", ", seed 1", ", seed 2") if name + seed in runs]
        rows.append([label, *(", ".join(f"{record[k]:.1f}" for record in last) for k in ("knn20_top1", "knn200_top1"))])
    return markdown(["`--dataset cifar10 --arch resnet_mini --epochs 20`", "kNN, k 20, each seed", "k 200"], rows)


TABLES = {"gpu": trained_on_gpu, "small": small_encoders, "begin": begun, "claims": claims}
PAGES = [KEPT / "README.md", KEPT / "earlier.md"]


def with_tables(page):
    """A page's text with each table between its two marks written anew. A table may be empty, and have no marks."""
    for what, make in TABLES.items():
        begin, end = f"<!-- tests/tools/results.py: {what} -->\n", "<!-- end -->"
        if begin in page:
            before, after = page.split(begin)
            page = before + begin + make() + "\n" + after[after.index(end) :]
    return page


def curves(args):
    """kNN accuracy over the epochs: mean and range over the seeds."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CURVES), figsize=(5 * len(CURVES), 4.2), sharey=True, layout="tight")
    for panel, (title, arms) in zip(panels, CURVES.items(), strict=True):
        for arm in arms:
            runs = [record["epochs"] for record in runs_of(arm).values()]
            epochs, values = [r["epoch"] for r in runs[0]], np.array([[r["knn20_top1"] for r in run] for run in runs])
            (drawn,) = panel.plot(epochs, values.mean(0), marker="o", label=ARMS[arm])
            panel.fill_between(epochs, values.min(0), values.max(0), color=drawn.get_color(), alpha=0.15)
        panel.axhline(kept("claims")["baselines"]["raw pixels"]["knn20_top1"], ls="--", c="gray", label="raw pixels")
        panel.set(title=title, xlabel="epoch")
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="kNN top-1, % (k = 20)")
    figure.savefig(ROOT / ".github" / "cifar_curves.png", dpi=100)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests/tools/results.py", description=__doc__, formatter_class=raw)
    actions = dict(begin=begin, gpu=gpu_list.run, curves=curves)
    actions["readme"] = lambda args: [page.write_text(with_tables(page.read_text())) for page in PAGES]
    parser.add_argument("action", choices=actions, metavar="ACTION")
    parser.add_argument("--data-dir", metavar="DIR", help="folder of CIFAR-10")
    parser.add_argument("--arms", nargs="+", choices=[*BEGINS, *gpu_list.CHOICES], metavar="ARM")
    add = parser.add_argument_group("gpu").add_argument
    add("--archive", nargs="+", metavar="FILE", help="CIFAR-10's image files, in tar archives")
    add("--minutes", type=float, default=9, metavar="N", help="time limit; what still runs is stopped")
    add("--at-once", type=int, default=4, metavar="N", help="trainings that share the GPU")
    add("--workers", type=int, default=4, metavar="N", help="data loading processes per training")
    add("--flags", default="--epochs 40 --knn-every 20", metavar="TEXT", help="flags added to each training")
    add("--out", type=Path, default=gpu_list.KEPT, metavar="DIR", help="folder of the JSON files")
    add("--commit", default="unknown", metavar="TEXT", help="commit of these files, for a machine without git")
    add("--dry-run", action="store_true", help="all of it on the CPU: small encoders, few images, few steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as common.start does
    actions[args.action](args)


if __name__ == "__main__":
    main()
