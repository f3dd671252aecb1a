"""Makes the runs behind the tables of tests/results/README.md, and the tables, by hand.

    python tests/tools/results.py begin --data-dir DIR [--arms jcl-stl10]   three epochs of every recipe
    python tests/tools/results.py gpu --archive FILE [--minutes 9]          what gpu_list.py has for a GPU
    python tests/tools/results.py readme                                    the tables of tests/results/README.md

The tables of earlier.md are of earlier recipes, and are not made again.
"""

import argparse
import contextlib
import itertools
import json
import re
import shutil
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

OWN, FROM_008, SEEDS = ", as its recipe is", ", crops from 0.08 of the area", ("", ", seed 1", ", seed 2")
LOW_RATE = ", with a learning rate of 0.03"
COMPARED = {  # method: its name and the baseline's in small_encoders.json
    "JointCrop": ("J-Crop(0)", "MoCo v2"),
    "JCL": ("JCL", "MoCo v2"),
    "CLIM": ("CLIM", "MoCo v2"),
    "LoGo": ("LoGo on MoCo", "MoCo, both views as queries"),
    "PatchMix": ("PatchMix", "MoCo v3"),
}
SMALL = {  # the rows of the table of small_encoders.json: their names there, and in the table
    f"MoCo v2{OWN}": "MoCo v2, `moco_jointcrop.py --joint none`",
    f"J-Crop(0){OWN}": "J-Crop(0), `moco_jointcrop.py`",
    f"MoCo v3 on a ResNet{OWN}": "MoCo v3, `moco_jointcrop.py --moco v3 --joint none`",
    f"J-Crop(0) on MoCo v3{OWN}": "J-Crop(0) on MoCo v3, `moco_jointcrop.py --moco v3`",
    f"JCL{OWN}": "JCL, `jcl.py`",
    f"CLIM{OWN}": "CLIM, `clim.py` (positives from the sixth epoch on)",
    f"MoCo, both views as queries{OWN}": "MoCo, both views as queries, `logo.py --local-crops 0`",
    f"LoGo on MoCo{OWN}": "LoGo on MoCo, `logo.py`",
    f"SimSiam{OWN}": "SimSiam, `logo.py --base simsiam --local-crops 0`",
    f"SimSiam{LOW_RATE}": "SimSiam, `logo.py --base simsiam --local-crops 0 --lr 0.03`",
    f"LoGo on SimSiam{LOW_RATE}": "LoGo on SimSiam, `logo.py --base simsiam --lr 0.03`",
    f"MoCo v3{OWN}": "MoCo v3, `patchmix.py --num-mix 1 --terms oto,mto --arch vit_micro`",
    f"PatchMix{OWN}": "PatchMix, `patchmix.py --arch vit_micro`",
    f"MoCo v2{FROM_008}": "MoCo v2, crops from 0.08, `moco_jointcrop.py --joint none --crop-scale 0.08 1`",
    f"J-Crop(0){FROM_008}": "J-Crop(0), crops from 0.08, `moco_jointcrop.py --crop-scale 0.08 1`",
    f"JCL{FROM_008}": "JCL, crops from 0.08, `jcl.py --crop-scale 0.08 1`",
    f"CLIM{FROM_008}": "CLIM, crops from 0.08, `clim.py --crop-scale 0.08 1`",
}


def kept(name):
    """Return what is kept in a file of tests/results, or {}."""
    file = KEPT / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def versions():
    """Return the versions that a run was made with."""
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True)
    return dict(torch=torch.__version__, commit=commit.strip())


def three_epochs(name, recipe, images):
    """Train a recipe for three epochs, with a small encoder and the reductions of REDUCED, and return its record."""
    out, dataset = RUNS / "begin" / f"{name}-{recipe}", "cifar10" if recipe == WITH_RESNET18 else recipe
    where = f"--device cpu --workers 0 --knn-every 0 --dataset {dataset} --out {out}"
    module, args = parse(f"{BEGUN[name]} {where}")
    own = dict(dataset=dataset, image_size=np.max(args.image_size).item(), batch_size=args.batch_size)
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
    epochs = [{name: epoch[name] for name in ("epoch", "loss", "std", "rank", "grad_norm")} for epoch in records(out)]
    uniform = json.loads((out / "config.json").read_text()).get("loss_at_uniform_logits")
    used = dict(images=len(images), image_size=np.max(args.image_size).item(), batch_size=args.batch_size)
    found = dict(command=BEGUN[name], recipe=own, used=dict(arch=args.arch) | used, loss_at_uniform_logits=uniform)
    return found | dict(epochs=gpu_list.columns(epochs), seconds=round(time.time() - began))


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
        print(f"{arm}: std {record['epochs']['std'][-1]}, {record['seconds']} s", flush=True)


# --------------------------------------------------------------- the tables


def markdown(heads, rows):
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *rows])


def begun():
    """Markdown of `std` after the third epoch of each recipe."""
    cells = {}
    for arm, record in kept("begin").items():
        std = record["epochs"]["std"][-1]
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
        if f"--epochs {len(epochs['epoch'])} " not in record["command"]:
            continue  # the time was over
        stds = ", ".join(f"{std:.2f}" for std in epochs["std"][:5:2])
        knn = ", ".join(f"{accuracy:.1f} after {epoch}" for epoch, accuracy in epochs["knn20_top1"].items())
        k_200 = {temperature: scores["knn200_top1"] for temperature, scores in record.get("kNN", {}).items()}
        finals = k_200.get("0.07"), record.get("linear", {}).get("linear_top1")
        line = re.sub(r" --(knn-every|seed) \d+", "", record["command"])
        percents = [f"{score:.1f}" if score else "" for score in finals]
        rows.append([f"{record['title']}, `{line}`", stds, knn, *percents, f"{record['seconds'] / 60:.0f}"])
    heads = ["training", "`std` after epochs 1, 3, 5", "kNN, k 20", "k 200", "linear", "minutes"]
    return markdown(heads, rows) if rows else ""


def small(name, epochs, k=20):
    """Return the kNN accuracies of small encoders after 20 or 50 epochs, {seed: percent}."""
    what = name + ", 50 epochs" * (epochs == 50)
    runs = {seed: kept("small_encoders").get(what + seed) for seed in SEEDS}
    return {seed: run["epochs"][f"knn{k}_top1"][str(epochs)] for seed, run in runs.items() if run}


def on_gpu(title):
    """Return the kNN accuracies of the runs with this title on a GPU after 100 epochs, {seed: percent}."""
    found = {}
    for file in sorted((KEPT / "gpu").glob("*-s?.json")):
        run = json.loads(file.read_text())
        accuracies = run["epochs"].get("knn20_top1", {})
        if run["title"] == title and "100" in accuracies:
            found[file.stem[-1]] = accuracies["100"]
    return found


def gains():
    """Markdown of the gains of each method over its baseline, one number per seed, without columns that are empty."""
    rows = []
    for title, (method, baseline) in COMPARED.items():
        pairs = []
        for recipe, on_gpus in ((OWN, ""), (FROM_008, ", crops from 0.08")):
            pairs += [[small(name + recipe, epochs) for name in (method, baseline)] for epochs in (20, 50)]
            pairs.append([on_gpu(name + on_gpus) for name in (method, baseline)])
        differences = [[ours[seed] - theirs[seed] for seed in ours if seed in theirs] for ours, theirs in pairs]
        rows.append([title, *(", ".join(f"{gain:+.1f}" for gain in seeds) for seeds in differences)])
    heads = ["gain of", "20 epochs", "50 epochs", "100, on a GPU"]
    heads += ["20, crops from 0.08", "50, crops from 0.08", "100, crops from 0.08, on a GPU"]
    columns = [column for column in zip(heads, *rows, strict=True) if any(column[1:])]
    heads, *rows = zip(*columns, strict=True)
    return markdown(heads, rows)


def small_encoders():
    """Markdown of kNN after 20 and 50 epochs of small encoders, for each seed."""
    rows = []
    for name, label in SMALL.items():
        columns = [small(name, epochs, k) for epochs in (20, 50) for k in (20, 200)]
        rows.append([label, *(", ".join(f"{score:.1f}" for score in column.values()) for column in columns)])
    heads = ["`--dataset cifar10 --arch resnet_mini`", "20 epochs, each seed: kNN, k 20", "k 200"]
    return markdown([*heads, "50 epochs: k 20", "k 200"], rows)


TABLES = {"gains": gains, "gpu": trained_on_gpu, "small": small_encoders, "begin": begun}
PAGE = KEPT / "README.md"


def with_tables(page):
    """The page's text with each table between its two marks written anew. A table may be empty, and have no marks."""
    for what, make in TABLES.items():
        begin, end = f"<!-- tests/tools/results.py: {what} -->\n", "<!-- end -->"
        if begin in page:
            before, after = page.split(begin)
            page = before + begin + make() + "\n" + after[after.index(end) :]
    return page


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests/tools/results.py", description=__doc__, formatter_class=raw)
    actions = dict(begin=begin, gpu=gpu_list.run, readme=lambda args: PAGE.write_text(with_tables(PAGE.read_text())))
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
