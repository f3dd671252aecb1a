"""The runs behind the tables, the tables, and the pictures."""

import re

import gpu_list
import numpy as np
import pytest
import results
from conftest import ROOT
from PIL import Image


@pytest.mark.parametrize("arm", results.ARMS)
def test_runs(arm):
    """Each kept run has the command that results.py would start for it, which its script takes, and its last epoch."""
    for seed, record in results.runs_of(arm).items():
        command = record["command"].replace(" --amp bf16", "")  # which earlier commits had on CPUs
        # --blur-p had these values in an earlier recipe
        command = re.sub("--joint blur(?! --blur-p)", "--joint blur --blur-p 0.5 0.5", command)
        _, args = results.parse(results.former(command))
        assert command == results.command(arm, seed)
        assert (args.dataset, args.seed, args.batch_size) == ("cifar10", int(seed), 128)
        assert record["epochs"][-1]["epoch"] == args.epochs


def test_tables(tmp_path):
    """The tables are what tests/tools/results.py makes of tests/results/, and the page has all that are not empty.

    Some arms have fewer seeds than those that they are compared with, over the seeds of both.
    """
    gpu_list.write(tmp_path / "claims.json", results.kept("claims"))
    assert (tmp_path / "claims.json").read_bytes() == (results.KEPT / "claims.json").read_bytes()
    text = results.PAGE.read_text()
    assert results.with_tables(text) == text
    found = re.findall(r"<!-- tests/tools/results.py: (.*) -->\n\| .*\n\| ---.*\n\| .*", text)
    assert {*found} == {what for what, make in results.TABLES.items() if make()}
    assert [*results.kept("begin")] == [*results.BEGINS]  # every recipe has been begun


def test_the_numbers_of_the_front_page():
    """The last two columns of README's table of methods have the means of kNN over the seeds."""
    pairs = "moco jointcrop", "moco jcl", "moco clim", "moco-symmetric logo-moco", "mocov3 patchmix-3"
    page = (ROOT / "README.md").read_text()
    rows = [line.strip(" |").split("|") for line in page.splitlines() if line.startswith("| [")]
    for pair, row in zip(pairs, rows, strict=True):
        runs = [results.runs_of(arm).values() for arm in pair.split()]
        means = [np.mean([record["epochs"][-1]["knn20_top1"] for record in each]) for each in runs]
        assert row[-1].strip() == " → ".join(f"{mean:.1f}" for mean in means)
    small, (recipe, crops) = results.kept("small_encoders"), (", as its recipe is", ", crops from 0.2 of the area")
    runs = ("J-Crop(0)", recipe), ("JCL", recipe), ("CLIM", recipe), ("J-Crop(0)", crops)
    shown = re.findall(r"has ([\d.]+ → [\d.]+) with the current", page)
    shown = [row[-2].strip() for row in rows if row[-2].strip()] + shown
    for (what, how), percents in zip(runs, shown, strict=True):
        ends = [[small[name + how + seed]["epochs"][-1] for seed in ("", ", seed 1")] for name in ("MoCo v2", what)]
        assert percents == " → ".join(f"{np.mean([end['knn20_top1'] for end in each]):.1f}" for each in ends)


@pytest.mark.slow
def test_pictures_that_explain(tmp_path):
    """The six figures of README are drawn anew as they are kept."""
    pytest.importorskip("matplotlib")
    import figures

    figures.main(tmp_path)
    for name in figures.FIGURES:
        files = tmp_path / f"{name}.png", ROOT / ".github" / f"{name}.png"
        new, old = (np.asarray(Image.open(file).convert("RGB")).astype(int) for file in files)
        assert new.shape == old.shape and np.abs(new - old).mean() < 5, name
