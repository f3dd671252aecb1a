"""The papers' analyses against loops, and README's pictures. test_moco_jointcrop.py has the distances of Fig. 7."""

import figures
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import common

INFO = {"image_size": 32, "mean": (0.5,) * 3, "std": (0.2,) * 3, "interpolation": "bilinear"}


def test_similarity_statistics_against_a_loop():
    features = torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 10
    similarity, variance = figures.similarity_statistics(features)
    for i, rows in enumerate(features.tolist()):
        unit = [np.array(r) / np.linalg.norm(r) for r in rows]
        assert similarity[i] == pytest.approx(np.mean([x @ y for x in unit for y in unit]))
        assert variance[i] == pytest.approx(np.diag(np.cov(np.array(unit).T, bias=True)).mean())
    for bad in (0.0, float("nan"), float("inf")):
        with pytest.raises(RuntimeError, match="zero or not finite"):
            figures.similarity_statistics(torch.full((2, 3, 4), bad))


def test_views_belong_to_the_image():
    array = common.make_patterns(10, 32, seed=3)[0]
    kinds = [figures.only_crops(0.2, 1.0)[0]._replace(jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, blur_p=1.0)]
    given = nn.Flatten(), INFO, kinds, common.ImageSet(array)
    together = figures.view_features(*given, list(range(10)), 100)  # in batches of two
    torch.testing.assert_close(together[[7, 4]], figures.view_features(*given, [7, 4], 100))
    assert len(together[7].unique(dim=0)) == 100
    whole = figures.only_crops(1.0, 1.0)  # nothing but flips
    same = figures.view_features(nn.AdaptiveAvgPool2d(1), INFO, whole, common.ImageSet(array), [0, 1], 4)
    expected = (torch.from_numpy(array[:2]).double().mean((1, 2)) / 255 - 0.5) / 0.2
    torch.testing.assert_close(same.double(), expected[:, None].expand(-1, 4, -1), rtol=1e-4, atol=1e-5)


def test_class_similarity_against_a_loop():
    features, labels = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    unit = [row / np.linalg.norm(row) for row in features.double().numpy()]
    means = []
    for c in range(3):
        members = [unit[i] for i in range(12) if labels[i] == c]
        means.append(np.mean([a @ b for i, a in enumerate(members) for j, b in enumerate(members) if i != j]))
    assert figures.class_similarity(features, labels) == pytest.approx(np.mean(means))
    one_alone = torch.tensor([0, 0, 1])
    assert figures.class_similarity(torch.eye(3), one_alone) == pytest.approx(0)  # it has no pairs


def test_crop_similarity_against_a_loop():
    small, large = torch.randn(2, 5, 2, 4, generator=torch.Generator().manual_seed(0)).unbind()
    found = figures.crop_similarity(small, large)
    for name, a, b in (("small-small", small, small), ("small-large", small, large), ("large-large", large, large)):
        cosine = [[F.cosine_similarity(a[i, 0], b[j, 1], dim=0).item() for j in range(5)] for i in range(5)]
        own = [cosine[i][i] for i in range(5)]
        others = [cosine[i][j] for i in range(5) for j in range(5) if i != j]
        assert found[name] == pytest.approx((np.mean(own), np.mean(others)), rel=1e-5)


def test_similarity_bars_against_a_loop():
    views = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0))
    labels, groups = torch.arange(8) % 4, torch.tensor([0, 0, 1, 1])
    kinds = {"own image": [], "own class": [], "related class": [], "other class": []}
    for i, a in enumerate(labels.tolist()):
        for j, b in enumerate(labels.tolist()):
            bar = np.exp((F.cosine_similarity(views[i, 0], views[j, 1], dim=0).item() - 1) / 0.07)
            kind = "own image" if i == j else "own class" if a == b else "related class" if a // 2 == b // 2 else ""
            kinds[kind or "other class"].append(bar)
    found = figures.similarity_bars(views, labels, groups)
    assert found == pytest.approx({kind: np.mean(bars) for kind, bars in kinds.items()}, rel=1e-4)


@pytest.mark.slow
def test_pictures_that_explain(tmp_path):
    """The six figures of README are drawn anew as they are kept."""
    pytest.importorskip("matplotlib")
    import explain

    explain.explain(tmp_path)
    for name in explain.FIGURES:
        files = tmp_path / f"{name}.png", explain.ROOT / ".github" / f"{name}.png"
        new, old = (np.asarray(Image.open(file).convert("RGB")).astype(int) for file in files)
        assert new.shape == old.shape and np.abs(new - old).mean() < 5, name


def test_affinity_ranking():
    """One that knows the batch alone ranks by it; one that is the cosine is the cosine's equal everywhere."""
    rng = torch.Generator().manual_seed(0)
    a = F.normalize(torch.randn(40, 6, generator=rng), dim=1)
    b = F.normalize(a + 0.8 * torch.randn(40, 6, generator=rng), dim=1)
    found = figures.affinity_ranking(lambda x, y: (x * y).sum(1), a, b)
    pairs = [(a[i] @ b[i], a[j] @ b[j - 1 if j > 20 else 39]) for i in range(20) for j in range(20, 40)]
    expected = np.mean([float(one > two) for one, two in pairs])
    assert 0.5 < expected < 1 and all(share == pytest.approx(expected) for share in found.values())
    batch = figures.affinity_ranking(lambda x, y: (x * y).mean() + 0 * x[:, 0], a, b)
    assert batch["in batches of their own"] == 1 and batch["in one batch"] == 0  # ties
