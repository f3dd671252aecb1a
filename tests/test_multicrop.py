"""Tests the local crops of all methods, their terms in MoCo's loss, and each method's loss at uniform logits."""

import re

import numpy as np
import pytest
import torch
from conftest import assert_same, info_nce
from PIL import Image
from tiny import records, run
from torch import nn

import common
import moco_jointcrop

JOINTCROP = "--local-crops 4 --joint-pair both"


@pytest.mark.parametrize("method, flags, small_crops, large_areas, small_areas", [
    ("patchmix", "--variant released", 8, (0.35, 1.0), (0.05, 0.35)),
    ("moco_jointcrop", JOINTCROP, 4, (0.2, 1.0), (0.05, 0.4)),
    ("logo", "", 2, (0.4, 1.0), (0.08, 0.4)),
    pytest.param("logo", "--pairs all", 2, (0.3, 1.0), (0.05, 0.3), marks=pytest.mark.slow),
    pytest.param("clim", "--local-crops 2", 2, (0.2, 1.0), (0.05, 0.14), marks=pytest.mark.slow),
])  # fmt: skip
def test_crops_on_imagenet(module, flags, small_crops, large_areas, small_areas, monkeypatch):
    """Large and small crops have the expected sizes and areas, as passed to --show-views without augmentation."""
    row, column = np.indices((256, 256), np.uint8)
    image = Image.fromarray(np.stack([column, row, row], 2))  # slopes of 1 reveal a crop's size
    views, names = [], []
    monkeypatch.setattr(module, "augment", lambda x, *_: x)
    monkeypatch.setattr(common, "save_views", lambda _, x, what, norm: (views.extend(x), names.extend(what)))
    words = f"--dataset imagenet --batch-size 96 --device cpu --workers 0 --show-views x.png {flags}"
    module.main(module.parse_args(words.split()), train=[(image, 0)] * 96)
    views = [view for view, name in zip(views, names, strict=True) if not re.search("mixed|positive", name)]
    assert [view.shape[-1] for view in views] == [224] * 2 + [96] * small_crops
    for crops, (low, high) in ((views[:2], large_areas), (views[2:], small_areas)):
        x = torch.cat(crops).double()
        quarter = x.shape[-1] // 4  # the middle half, because interpolation differs at the borders
        width = (x[:, 0, 0, 3 * quarter] - x[:, 0, 0, quarter]) * 2
        height = (x[:, 1, 3 * quarter, 0] - x[:, 1, quarter, 0]) * 2
        areas, margin = width * height / 256**2, 0.06 * (high - low)
        assert 0.9 * low < areas.min() < low + margin and high - margin < areas.max() < 1.1 * high


@pytest.mark.slow
@pytest.mark.parametrize("method, flags", [
    ("moco_jointcrop", ""), ("moco_jointcrop", JOINTCROP), ("moco_jointcrop", "--moco v3 --arch resnet_nano"),
    ("moco_jointcrop", f"{JOINTCROP} --moco v3 --arch resnet_nano"), ("jcl", ""), ("jcl", "--vanilla"),
    ("clim", "--selection none"), ("clim", "--image-size 16 8"), ("clim", "--local-crops 2"),
    ("logo", ""), ("logo", "--local-crops 0"), ("logo", "--pairs all"), ("logo", "--variant paper"),
    ("patchmix", ""), ("patchmix", "--num-mix 1 --terms oto,mto"),
    ("patchmix", "--variant released --local-crops 2 --patch-size 4"),
])  # fmt: skip
def test_loss_at_uniform_logits(method, flags, _tiny, tmp_path):
    """A temperature of 10^6 makes the logits equal, so the loss is loss_at_uniform_logits, which the run prints."""
    said = run(method, tmp_path, *f"{flags} --temperature 1e6 --epochs 1 --knn-every 0".split())
    (record,) = records(tmp_path)
    assert float(re.search(r"loss_at_uniform_logits (\S+)", said)[1]) == pytest.approx(record["loss"], rel=1e-3)


@pytest.mark.parametrize("kind, own", [("MoCo", dict(queue=32)), ("MoCoV3", dict(hidden=24))])
def test_loss_and_its_gradient(kind, own, double):
    """With local crops (App. D), MoCo v2's loss is the mean of all terms, and MoCo v3's is twice the mean."""
    model = getattr(moco_jointcrop, kind)(nn.Identity(), 8, dim=24, temperature=0.3, **own)
    model.query = lambda x: nn.functional.normalize(x[:, :, 0, :8].flatten(1), dim=1)  # pixels of an image of any size
    model.key = lambda x: nn.functional.normalize(x[:, :, 1, :8].flatten(1), dim=1)
    views = [torch.randn(5, 3, size, size).requires_grad_() for size in (16, 16, 8, 8)]
    q, keys = [model.query(view) for view in views], [model.key(view).detach() for view in views[:2]]
    if kind == "MoCo":
        expected = sum(info_nce(q[i], keys[1], model.queue.keys, 0.3) for i in (0, 2, 3)) / 3
    else:
        pairs = (0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)  # query of view i, keys of view j
        expected = 2 * sum(moco_jointcrop.contrast(q[i], keys[j], 0.3, 0) for i, j in pairs) / 6
    assert_same(model(views)[0], expected, *views)
