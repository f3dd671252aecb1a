"""Tests the tables of results, the numbers that the pages quote from them, and the pictures."""

import re

import gpu_list
import numpy as np
import pytest
import results
from conftest import ROOT
from PIL import Image


def test_tables(tmp_path):
    """The page has each table that tests/tools/results.py makes from tests/results/, unless the table is empty."""
    gpu_list.write(tmp_path / "begin.json", results.kept("begin"))
    assert (tmp_path / "begin.json").read_bytes() == (results.KEPT / "begin.json").read_bytes()
    text = results.PAGE.read_text()
    assert results.with_tables(text) == text
    found = re.findall(r"<!-- tests/tools/results.py: (.*) -->\n\| .*\n\| ---.*\n\| .*", text)
    assert {*found} == {what for what, make in results.TABLES.items() if make()}
    assert [*results.kept("begin")] == [*results.BEGINS]  # every recipe has a run


def test_the_numbers_of_the_front_page():
    """README's column "ours" has the mean kNN accuracies over the seeds. Both pages quote the gains and losses."""
    page, small = (ROOT / "README.md").read_text(), results.kept("small_encoders")
    own, from_008 = ", as its recipe is", ", crops from 0.08 of the area"
    runs = [(f"MoCo v2{own}", f"{method}{own}") for method in ("J-Crop(0)", "JCL", "CLIM")]
    runs += [(f"MoCo, both views as queries{own}", f"LoGo on MoCo{own}"), (f"MoCo v3{own}", f"PatchMix{own}")]
    expected = []
    for pair in runs:
        seeds = [seed for seed in ("", ", seed 1", ", seed 2") if pair[1] + seed in small]
        knn = [[small[name + seed]["epochs"]["knn20_top1"]["20"] for name in pair] for seed in seeds]
        expected.append(" → ".join(f"{mean:.1f}" for mean in np.mean(knn, axis=0)))
    assert re.findall(r"\| (\S+ → \S+) \|$", page, re.M) == expected
    arms = "moco-008", "jcl-008", "jointcrop-008"
    moco, jcl, joint = (results.kept(f"gpu/{arm}-s0")["epochs"]["knn20_top1"]["100"] for arm in arms)
    text = results.PAGE.read_text()
    assert f"JCL gained {jcl - moco:.1f} points over MoCo v2, and JointCrop lost {moco - joint:.1f}" in text
    names = f"J-Crop(0){own}", f"MoCo v2{own}", f"MoCo v2{from_008}", f"CLIM{from_008}"
    joint, moco, moco_008, clim = (small[f"{name}, 50 epochs"]["epochs"]["knn20_top1"]["50"] for name in names)
    gains = joint - moco, joint - moco_008, moco_008 - clim
    words = "gained {:.1f} points over MoCo v2 with the same crops, and {:.1f} over MoCo v2 with crops from 0.08, the "
    assert (words + "better baseline. With these crops, CLIM lost {:.1f}").format(*gains) in text
    assert "was {:.1f} points (JointCrop, 50 epochs, one seed; {:.1f} over MoCo v2 with".format(*gains) in page


@pytest.mark.slow
def test_pictures_that_explain(tmp_path):
    """Drawing the six figures of the pages again gives nearly the same pixels."""
    pytest.importorskip("matplotlib")
    import figures

    figures.main(tmp_path)
    for name in figures.FIGURES:
        files = tmp_path / f"{name}.png", ROOT / ".github" / f"{name}.png"
        new, old = (np.asarray(Image.open(file).convert("RGB")).astype(int) for file in files)
        assert new.shape == old.shape and np.abs(new - old).mean() < 5, name
