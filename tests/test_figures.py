"""The papers' analyses against loops, and README's pictures. test_moco_jointcrop.py has the distances of Fig. 7."""

import numpy as np
import pytest
import results
import torch
import torch.nn.functional as F
from conftest import ROOT
from PIL import Image
from torch import nn

import common


def draws(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def cosine(a, b):
    return F.cosine_similarity(a, b, dim=0).item()


def test_views_belong_to_the_image():
    """Crops of the whole image have its mean color; so many views go in batches of two images."""
    images = common.Patterns(10, 32, seed=3)
    info = {"image_size": 32, "mean": (0.5,) * 3, "std": (0.2,) * 3, "interpolation": "bilinear"}
    found = results.view_features(nn.AdaptiveAvgPool2d(1), *results.only_crops(info, 1.0, 1.0), images, [7, 4, 0], 100)
    for views, i in zip(found, (7, 4, 0), strict=True):
        expected = (np.asarray(images[i][0]).mean((0, 1)) / 255 - 0.5) / 0.2
        np.testing.assert_allclose(views, np.tile(expected, (100, 1)), rtol=1e-4, atol=1e-5)


def test_similarities_against_loops():
    views, labels = draws(12, 5, 7), torch.arange(12) % 3
    expected = [np.mean([cosine(a, b) for a in rows for b in rows]) for rows in views]
    assert results.view_similarity(views).tolist() == pytest.approx(expected, rel=1e-5)
    x, pairs = views[:, 0], [(i, j) for i in range(12) for j in range(12) if i != j]
    means = [np.mean([cosine(x[i], x[j]) for i, j in pairs if labels[i] == labels[j] == c]) for c in range(3)]
    assert results.class_similarity(x, labels) == pytest.approx(np.mean(means), rel=1e-5)
    own = np.mean([cosine(*rows) for rows in views[:, :2]])
    others = np.mean([cosine(views[i, 0], views[j, 1]) for i, j in pairs])
    assert results.crop_similarity(views[:, :2]) == pytest.approx((own, others), rel=1e-5)


def test_similarity_bars_against_a_loop():
    views, labels, bars = draws(8, 2, 4), [0, 1, 2, 3] * 2, {}
    for i, j in np.ndindex(8, 8):
        shared = (labels[i] // 2 == labels[j] // 2) + (labels[i] == labels[j]) + (i == j)
        kind = ("other class", "related class", "own class", "own image")[shared]
        bars.setdefault(kind, []).append(np.exp((cosine(views[i, 0], views[j, 1]) - 1) / 0.07))
    found = results.similarity_bars(views, torch.tensor(labels), torch.tensor([0, 0, 1, 1]))
    assert found == pytest.approx({kind: np.mean(values) for kind, values in bars.items()}, rel=1e-4)


def test_affinity_ranking():
    """One that is the cosine ranks as the cosine does; one that knows the batch alone ranks by it."""
    a, noise = draws(2, 40, 6)
    a, b = F.normalize(a, dim=1), F.normalize(a + 2 * noise, dim=1)
    found = results.affinity_ranking(lambda x, y: (x * y).sum(1), a, b)
    one, two = (a[:20] * b[:20]).sum(1), (a[20:] * b[[39, *range(20, 39)]]).sum(1)
    expected = np.mean([float(i > j) for i in one for j in two])
    assert 0.5 < expected < 1 and all(share == pytest.approx(expected) for share in found.values())
    batch = results.affinity_ranking(lambda x, y: (x * y).mean() + 0 * x[:, 0], a, b)
    assert batch["in batches of their own"] == 1 and batch["in one batch"] == 0  # ties


@pytest.mark.slow
def test_pictures_that_explain(tmp_path):
    """The six figures of README are drawn anew as they are kept."""
    pytest.importorskip("matplotlib")
    import figures

    figures.explain(tmp_path)
    for name in figures.FIGURES:
        files = tmp_path / f"{name}.png", ROOT / ".github" / f"{name}.png"
        new, old = (np.asarray(Image.open(file).convert("RGB")).astype(int) for file in files)
        assert new.shape == old.shape and np.abs(new - old).mean() < 5, name
