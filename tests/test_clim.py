"""clim.py against slow references written from the paper (Eq. 1-6, App. A.2), and its limit cases."""

import itertools
import math
import types
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import info_nce, ks, random_views, unit, values
from torch import nn

import clim
import common

TINY = "--image-size 16 --device cpu".split()


def points(kind, n, dims=3, seed=0):
    """Rows of float64: normal, on a coarse grid (distances tie, all sums are exact), repeated, all equal."""
    g = torch.Generator().manual_seed(seed)
    if kind == "normal":
        return torch.randn(n, dims, dtype=torch.float64, generator=g)
    grid = torch.randint(-2, 3, (n, dims), generator=g).double()
    return {"grid": grid, "repeated": grid[torch.arange(n) // 3], "equal": grid[:1].expand(n, -1).clone()}[kind]


def squared(a, b):
    return sum((p - q) ** 2 for p, q in zip(a.tolist(), b.tolist(), strict=True))


def eq4(q, k_anchor, k_positive, queue, tau, lam):
    """Eq. 4, image by image; lam: a number per image."""
    terms = [
        share * info_nce(one, own, queue, tau) + (1 - share) * info_nce(one, other, queue, tau)
        for share, one, own, other in zip(lam, q[:, None], k_anchor[:, None], k_positive[:, None], strict=True)
    ]
    return sum(terms) / len(terms)


@pytest.mark.parametrize("tau, lam", [(0.07, 0.3), (0.2, 0.0), (0.2, (0.0, 0.9, 0.25, 1.0)), (1.0, 0.7)])
def test_clim_loss_is_eq4(tau, lam):
    q, anchor, positive, queue = unit(4, 6, grad=True), unit(4, 6, seed=1), unit(4, 6, seed=2), unit(9, 6, seed=3)
    each = torch.tensor(lam, dtype=torch.float64)
    ours = clim.clim_loss(q, anchor, positive, queue, tau, each if each.dim() else lam)
    reference = eq4(q, anchor, positive, queue, tau, each.expand(4))
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(loss, q)[0] for loss in (ours, reference)), rtol=1e-10, atol=1e-14)


def test_nearest_neighbors():
    """In clusters so tight that float32 finds others. In chunks and of some rows. Not the row itself (D1)."""
    tight = F.normalize(unit(3, 16)[torch.arange(300) % 3] + 1e-4 * points("normal", 300, 16), dim=1)
    for x, k in ((points("normal", 7), 100), (points("repeated", 9), 4), (tight, 5)):
        distance, found = (x[:, None] - x).square().sum(2).fill_diagonal_(math.inf), clim.nearest_neighbors(x, k)
        expected = distance.sort(1).values[:, : min(k, len(x) - 1)]
        torch.testing.assert_close(distance.gather(1, found), expected, rtol=0, atol=1e-14)
    assert (clim.nearest_neighbors(x.float(), 5).sort(1).values != found.sort(1).values).any()
    rows = torch.tensor([7, 3, 299, 0])
    assert torch.equal(clim.nearest_neighbors(x, 5, rows), found[rows])


def clustered(x, m, iterations, seed=0):
    """(centers of kmeans, sum of squared distances to the assigned centers, which have to be the nearest)."""
    centers, assignment = clim.kmeans(x, m, iterations, torch.Generator().manual_seed(seed))
    assert centers.shape == (min(m, len(x)), x.shape[1]) and assignment.shape == (len(x),)
    distances = (x[:, None] - centers).square().sum(2)
    assigned = distances[torch.arange(len(x)), assignment]
    assert (assigned <= distances.min(1).values * (1 + 1e-9) + 1e-9).all()
    return centers, assigned.sum().item()


def lloyd(x, centers, iterations):
    for _ in range(iterations):
        members = [[] for _ in centers]
        for row in x:
            members[min(range(len(centers)), key=lambda j: squared(row, centers[j]))].append(row)
        assert all(members), "choose another seed: the reference does not know empty clusters"
        centers = torch.stack([sum(rows) / len(rows) for rows in members])
    return centers


@pytest.mark.parametrize("iterations", [1, 2, 6])
def test_kmeans_is_lloyds_algorithm(iterations):
    x = points("normal", 60) + 4 * points("grid", 60, seed=10).sign()
    start = clustered(x, 5, 0)[0]
    assert len({x.tolist().index(c) for c in start.tolist()}) == 5
    torch.testing.assert_close(clustered(x, 5, iterations)[0], lloyd(x, start, iterations), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind, n, m", [("repeated", 15, 5), ("repeated", 15, 9), ("equal", 6, 3), ("normal", 3, 50)])
def test_kmeans_as_many_clusters_as_points(kind, n, m):
    """A cluster that comes out empty finds a point that has none of its own, so every point ends as a center."""
    for seed in range(5):
        assert clustered(points(kind, n), m, 10, seed)[1] < 1e-20


def obeys(chosen, i, neighbors, x, centers, assignment):
    """Whether the chosen positives of row i are what Eq. 2 and App. A.2 make of these neighbours."""
    center = centers[assignment[i]]
    omega1 = {j for j in range(len(x)) if assignment[j] == assignment[i]}
    omega_p = {j for j in omega1 & set(neighbors) if squared(x[j], center) <= squared(x[i], center)}
    size = min(len(chosen), len(neighbors))
    if len(omega_p) >= size:
        right = len(set(chosen)) == size and set(chosen) <= omega_p
    else:
        topped_up = sorted(squared(x[i], x[j]) for j in set(chosen) - omega_p)
        nearest = sorted(squared(x[i], x[j]) for j in neighbors if j not in omega_p)[: size - len(omega_p)]
        right = omega_p <= set(chosen) <= set(neighbors) and topped_up == nearest
    times = [chosen.count(j) for j in set(chosen)]
    return right and max(times) - min(times) <= 1  # too few are repeated, all alike


CASES = [  # points, N, clusters, k, number of positives
    ("normal", 40, 4, 12, 3), ("normal", 40, 12, 8, 20), ("grid", 24, 3, 6, 5), ("repeated", 18, 2, 7, 4),
    ("equal", 9, 2, 4, 3), ("normal", 7, 2, 100, 20), ("normal", 1, 1, 4, 3), ("normal", 2, 2, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("kind, n, m, k, count", CASES)
def test_select_positives_is_eq2(kind, n, m, k, count):
    x, centers = points(kind, n), points("grid", m, seed=1)
    for seed in range(3):
        assignment = torch.randint(m, (n,), generator=common.generator(seed))
        table = clim.select_positives(x, centers, assignment, k, count, common.generator(seed))
        assert table.shape == (n, count)
        for i, near in enumerate(clim.nearest_neighbors(x, k).tolist()):
            assert obeys(table[i].tolist(), i, near, x, centers, assignment), i


def test_select_positives_is_uniform():
    """3 of 8 candidates: each is chosen alike, in each place."""
    x = torch.tensor([[float(v)] for v in range(10)], dtype=torch.float64)  # anchor 8; 9 is farther from the center
    centers, assignment, draws = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(10, dtype=torch.int64), 2000
    g = torch.Generator().manual_seed(0)
    rows = torch.stack([clim.select_positives(x, centers, assignment, 9, 3, g)[8] for _ in range(draws)])
    for place in range(3):
        expected, counts = draws / 8, rows[:, place].bincount(minlength=10)
        assert (counts[:8] - expected).abs().max() < 5 * math.sqrt(expected) and counts[8:].sum() == 0


@pytest.mark.parametrize("selection, count", [("random", 400), ("knn", 6), ("kmeans", 400), ("center", 3)])
def test_choose_positives(selection, count):
    """Table 6: what each choice may contain, and all of it if there is room."""
    x, flags = points("normal", 30), f"--selection {selection} --num-clusters 4 --knn-k 6"
    args = clim.parse_args([*TINY, *flags.split(), "--num-positives", str(count)])
    neighbors = clim.nearest_neighbors(x, 6)
    table = clim.choose_positives(args, x, neighbors, common.generator(0))
    centers, assignment = clim.kmeans(x, 4, generator=common.generator(0))
    for i, chosen in enumerate(table.tolist()):
        near, others = neighbors[i].tolist(), {*range(30)} - {i}
        members = {j for j in others if assignment[j] == assignment[i]}
        if selection == "center":
            assert obeys(chosen, i, near, x, centers, assignment)
        else:
            assert {*chosen} == dict(random=others, knn={*near}, kmeans=members)[selection]


@pytest.mark.parametrize("assignment, others", [([0], [{0}]), ([0, 1, 1, 0, 2], [{3}, {2}, {1}, {0}, {0, 1, 2, 3}])])
def test_other_members_of_a_cluster(assignment, others):
    """Never the image itself (D1), but if it is the only one. Who is alone in a cluster gets any other image."""
    found = clim.random_members(torch.tensor(assignment), 200)
    assert [{*row} for row in found.tolist()] == others


def masks(lam, height, width):
    """CutMix's rand_bbox for every center: {which pixels are in the box, as bytes: how many centers give it}."""
    found = Counter()
    cut_h, cut_w = int(height * math.sqrt(1 - lam)), int(width * math.sqrt(1 - lam))
    for cy, cx in itertools.product(range(height), range(width)):
        top, bottom = np.clip([cy - cut_h // 2, cy + cut_h // 2], 0, height)
        left, right = np.clip([cx - cut_w // 2, cx + cut_w // 2], 0, width)
        mask = np.zeros((height, width), bool)
        mask[top:bottom, left:right] = True
        found[mask.tobytes()] += 1
    return found


@pytest.mark.parametrize("lam, height, width", [(0.0, 5, 5), (0.2, 6, 8), (0.81, 6, 8), (1.0, 5, 5)])
def test_cutmix_with_a_share_per_image(lam, height, width):
    """Every box that CutMix can draw, as often as it draws it; the share that is left, to the pixel."""
    n = 3000
    x, partner = torch.rand(n, 3, height, width) / 2, 0.5 + torch.rand(n, 3, height, width) / 2
    mixed, kept = clim.cutmix(x, partner, torch.full((n,), lam, dtype=torch.float64), torch.Generator().manual_seed(0))
    of_x, of_partner = (mixed == x).all(1), (mixed == partner).all(1)  # in all three channels
    assert (of_x ^ of_partner).all()
    torch.testing.assert_close(kept, of_x.to(kept).mean((1, 2)), rtol=0, atol=1e-6)
    count, expected = Counter(mask.tobytes() for mask in of_partner.numpy()), masks(lam, height, width)
    assert count.keys() == expected.keys()
    for mask, centers in expected.items():
        often = n * centers / (height * width)
        assert abs(count[mask] - often) < 5 * math.sqrt(often)


def sizes_of(index):
    return np.stack([20 + 7 * (index % 5), 20 + 11 * (index % 4)], -1)


def drawn(positives, flags="", epoch=0):
    """Views of images of many sizes: rows (views, n), boxes (views, n, 4), the views' sides, colors (views, n, 9)."""
    args, index = clim.parse_args([*TINY, *flags.split()]), np.arange(len(positives))
    draws = common.uniform(0, epoch, index, 2 * len(clim.augmentation(args)) * common.VIEW_DRAWS + 1)
    images = types.SimpleNamespace(sizes=sizes_of)
    cuts, colors = clim.draw_views(args, images, positives, index, sizes_of(index), draws)
    return *map(np.array, zip(*cuts, strict=True)), np.array(colors)


TABLE = torch.randint(40, (40, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)


@pytest.mark.parametrize("flags, own", [("", 2), ("--mix none", 2), ("--local-crops 2 --local-size 8", 4)])
def test_views_of_the_image_and_of_its_partner(flags, own):
    """With a table its own views stay, and as many of a partner come: one of its row, the same in all of them."""
    alone, found = drawn(torch.full_like(TABLE, -1), flags), drawn(TABLE, flags)
    assert all(np.array_equal(part, more[:own]) for part, more in zip(alone, found, strict=True))
    rows, boxes, sides, colors = found
    assert (rows[:own] == np.arange(40)).all() and (rows[own:] == rows[own]).all() and len(rows) == 2 * own
    assert (rows[own][:, None] == TABLE.numpy()).any(1).all()
    assert sides.tolist() == 2 * [16, 16, 8, 8][:own]
    assert (boxes[..., :2] + boxes[..., 2:] <= sizes_of(rows)).all()
    for a, b in itertools.combinations(range(2 * own), 2):
        assert (boxes[a] == boxes[b]).all(1).mean() < 0.1 and (colors[a] == colors[b]).all(1).mean() < 0.1


def test_with_the_same_crop_a_key_has_the_box_of_its_query():
    (_, boxes, _, colors), (_, plain, _, plain_colors) = (drawn(TABLE, flags) for flags in ("--same-crop", ""))
    assert np.array_equal(boxes, plain[[0, 0, 2, 2]]) and np.array_equal(colors, plain_colors)


def test_partners_are_drawn_uniformly_and_anew_each_epoch():
    n = 4000
    table = torch.arange(5, dtype=torch.int32).repeat(n, 1)  # a partner is the number of its column
    (first, boxes, *_), (second, *_) = (drawn(table, epoch=epoch) for epoch in (0, 1))
    for rows in (first, second):
        assert abs(np.bincount(rows[2], minlength=5) - n / 5).max() < 5 * math.sqrt(n / 5)
    assert abs(np.corrcoef(first[2], np.concatenate(boxes[:2], 1).T)[0, 1:]).max() < 4.5 / math.sqrt(n)
    assert (first[2] == second[2]).mean() == pytest.approx(0.2, abs=0.04)
    assert len(drawn(torch.zeros(40, 3, dtype=torch.int32))[0]) == 4  # image 0 is a partner, too


def tiny(sizes=(16,)):
    torch.manual_seed(0)
    pooled = nn.AdaptiveAvgPool2d(2), nn.Flatten()
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), *pooled)
    model = clim.CLIM(backbone, 16, sizes, dim=8, queue=16).double()
    for p in (*model.momentum_backbone.parameters(), *model.momentum_projector.parameters()):
        p.add_(0.1 * torch.randn_like(p))  # so that the two encoders differ
    return model


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("sizes, local_crops", [((16, 12), 0), ((16, 12), 2), ((16, 16), 1)])
def test_forward_is_eq6(keys, sizes, local_crops):
    """Eq. 4 (of one key per image Eq. 1) over all pairs of sizes, and of local crops with the large views' keys."""
    model, (query, *key_views) = tiny(sizes), random_views(1 + keys, 8)
    crops = list(zip(random_views(local_crops, 8, size=8), (0.9, 0.4), strict=False))
    model(query, key_views, 0.7, crops)  # statistics of some batch
    model.eval()  # so that an embedding is a function of its image
    loss, enqueued, q, _ = model(query, key_views, 0.7, crops)

    def resized(x, i):
        x = x if sizes[i] == 16 else F.interpolate(x, (sizes[i],) * 2, mode="bilinear", antialias=True)
        return x.flip(-1) if sizes[i] in sizes[:i] else x  # D4

    queries = [model.query(resized(query, i)) for i in range(len(sizes))]
    key_pairs = [[model.key(resized(view, i)) for view in (key_views[0], key_views[-1])] for i in range(len(sizes))]
    terms = [(one, *pair, 0.7) for one, pair in itertools.product(queries, key_pairs)]
    terms += [(model.query(crop), *key_pairs[0], share) for crop, share in crops]
    expected = sum(eq4(*vectors, model.queue.keys, 0.2, [share] * 8) for *vectors, share in terms)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close((q, enqueued), (queries[0], key_pairs[0][0]))  # both at the largest size
    weights = list(model.projector.parameters())
    ours, theirs = (torch.autograd.grad(value, weights) for value in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mix", ["cutmix", "none", "no positives yet"])
def test_mix_views(mix):
    """Query and local crop are mixed with the positive's, each by a box of its own; a share is what is left."""
    views = random_views(6, 8)
    given = views[:3] if "yet" in mix else views  # query, key, local crop; those of the positive
    query, keys, lam, crops = clim.mix_views(given, mix, 2.0, [common.generator(i) for i in range(2)])
    assert all(x is y for x, y in zip(keys, given[1::3], strict=True))
    for (mixed, share), x, other in zip([(query, lam), *crops], views[:3:2], views[3::2], strict=True):
        expected = {"cutmix": (mixed == x).all(1).double().mean().item(), "none": 0.5}.get(mix, 1.0)
        assert share == pytest.approx(expected)
        assert ((mixed == x) | (mixed == other)).all() if mix == "cutmix" else mixed is x
    assert (lam != crops[0][1]) == (mix == "cutmix")


@pytest.mark.parametrize("alpha", [2.0, 0.5])
def test_each_share_is_drawn_from_beta(alpha, monkeypatch):
    shares = []
    monkeypatch.setattr(clim, "cutmix", lambda x, partner, lam, generator: (x, shares.append(lam)))
    for step in range(150):
        clim.mix_views([None] * 6, "cutmix", alpha, [common.generator(step, i) for i in range(2)])
    s = np.sort(shares)
    assert len({*shares}) == 300
    assert ks({2.0: 3 * s**2 - 2 * s**3, 0.5: 2 / np.pi * np.arcsin(np.sqrt(s))}[alpha]) < 1.95  # far beyond 0.1 %


def test_refresh_embeds_with_the_momentum_encoder(monkeypatch, capsys):
    """The table is that of backbone and projector, unit-length outputs, running statistics, for normalised images."""
    args = clim.parse_args([*TINY, "--selection", "knn", "--knn-k", "3", "--num-positives", "3"])
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    monkeypatch.setitem(common.NORMS, "patterns", (mean, std))
    (array, labels), model = common.make_patterns(30, 16, 0), tiny().float()
    query, key = (x.float() for x in random_views(2, 8))
    model(query, [key], 1.0)  # statistics of some batch
    positives = torch.full((30, 3), -1, dtype=torch.int32)
    info = common.backbone_info("resnet_micro", 16, 4, "patterns")
    clim.refresh(args, info, model, common.ImageSet(array, labels), torch.device("cpu"), 0, positives)
    assert model.momentum_backbone.training
    model.eval()
    with torch.no_grad():
        x = common.normalize(torch.from_numpy(array).permute(0, 3, 1, 2) / 255, mean, std)
        x = F.normalize(model.momentum_projector(model.momentum_backbone(x)), dim=1).double()
    assert torch.equal(positives.long().sort(1).values, clim.nearest_neighbors(x, 3).sort(1).values)
    share = (labels[:, None] == labels[positives.numpy()]).mean()
    assert f" {100 * share:.1f} % " in capsys.readouterr().out


def test_positives_are_chosen_at_the_start_and_every_few_epochs():
    args = clim.parse_args([*TINY, "--clim-start", "3", "--refresh-every", "2"])
    chosen, none = torch.zeros(4, 2, dtype=torch.int32), torch.full((4, 2), -1, dtype=torch.int32)
    assert [epoch for epoch in range(10) if clim.choice_is_due(args, epoch, chosen)] == [3, 5, 7, 9]
    assert [epoch for epoch in range(10) if clim.choice_is_due(args, epoch, none)] == [*range(3, 10)]


def test_recipes():
    paper = "--dataset imagenet"
    assert values(clim, paper, "num_clusters knn_k num_positives refresh_every") == [10000, 40, 10, 5]  # App. A.2
    assert values(clim, paper, "arch batch_size lr lr_batch weight_decay") == ["resnet50", 512, 0.06, 512, 1e-4]
    assert values(clim, paper, "alpha temperature queue momentum dim bn_groups") == [2.0, 0.2, 65536, 0.999, 128, 16]
    assert values(clim, paper, "resolutions selection mix") == [(224, 160), "center", "cutmix"]
    assert values(clim, f"{paper} --selection knn", "knn_k") == [10]  # Table 6
    for flags, *sizes in (("--resolutions 24 40", 40, 24), ("--image-size 48", 48)):  # views are cut at the largest
        assert values(clim, flags, "resolutions image_size") == [tuple(sizes), sizes[0]]
    for flags in ("--selection none", "--local-crops 2", "--resolutions 224"):  # Table 7's multi-crop has one size
        assert values(clim, f"--dataset imagenet {flags}", "resolutions") == [(224,)]
