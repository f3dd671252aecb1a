"""The runs behind the tables, the tables, and the pictures."""

import re

import gpu_list
import numpy as np
import pytest
import results
from conftest import ROOT
from PIL import Image


def test_tables(tmp_path):
    """The tables are what tests/tools/results.py makes of tests/results/, and the page has all that are not empty."""
    gpu_list.write(tmp_path / "begin.json", results.kept("begin"))
    assert (tmp_path / "begin.json").read_bytes() == (results.KEPT / "begin.json").read_bytes()
    text = results.PAGE.read_text()
    assert results.with_tables(text) == text
    found = re.findall(r"<!-- tests/tools/results.py: (.*) -->\n\| .*\n\| ---.*\n\| .*", text)
    assert {*found} == {what for what, make in results.TABLES.items() if make()}
    assert [*results.kept("begin")] == [*results.BEGINS]  # every recipe has been begun


def test_the_numbers_of_the_front_page():
    """README's table has the means of kNN over the seeds."""
    page, small = (ROOT / "README.md").read_text(), results.kept("small_encoders")
    own, from_008 = ", as its recipe is", ", crops from 0.08 of the area"
    runs = [(f"MoCo v2{own}", f"J-Crop(0){own}"), *((f"MoCo v2{from_008}", f"{what}{own}") for what in ("JCL", "CLIM"))]
    runs += [(f"MoCo, both views as queries{own}", f"LoGo on MoCo{own}"), (f"MoCo v3{own}", f"PatchMix{own}")]
    rows = re.findall(r"^\| \[.* epochs\].*", page, re.M)
    of_resnet18, *of_small = (re.findall(r"[\d.]+ → [\d.]+", row) for row in rows)
    lengths = ("20", ["", ", seed 1", ", seed 2"]), ("50", [", 50 epochs"])
    for cells, (epochs, seeds) in zip(of_small, lengths, strict=True):
        expected = []
        for names in runs:
            found = [[small[name + seed]["epochs"] for name in names] for seed in seeds if names[1] + seed in small]
            if found:
                means = np.mean([[run["knn20_top1"][epochs] for run in pair] for pair in found], axis=0)
                expected.append(" → ".join(f"{mean:.1f}" for mean in means))
        assert cells == expected
    arms = "moco-008", "jointcrop-008", "jcl"
    before, *after = [results.kept(f"gpu/{arm}-s0")["epochs"]["knn20_top1"]["100"] for arm in arms]
    assert of_resnet18 == [f"{before:.1f} → {accuracy:.1f}" for accuracy in after]


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
