"""clim.py against slow references written from the paper (Eq. 1-6, App. A.2), and its limit cases."""

import itertools
import math
import types
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import NANO, info_nce, ks, unit, values

import clim
import common

TINY = "--arch nano --image-size 16 --batch-size 8 --queue 16 --dim 8 --device cpu".split()


@pytest.fixture(autouse=True)
def _nano(monkeypatch):
    monkeypatch.setitem(common.ARCHS, "nano", ("resnet18", dict(NANO, zero_init_last=False)))


def points(kind, n, dims=3, seed=0):
    """Rows of float64: of a normal law, on a coarse grid (distances tie, all sums are exact), repeated, all equal."""
    g = torch.Generator().manual_seed(seed)
    if kind == "normal":
        return torch.randn(n, dims, dtype=torch.float64, generator=g)
    grid = torch.randint(-2, 3, (n, dims), generator=g).double()
    return {"grid": grid, "repeated": grid[torch.arange(n) // 3], "equal": grid[:1].expand(n, -1).clone()}[kind]


def squared(a, b):
    return sum((p - q) ** 2 for p, q in zip(a.tolist(), b.tolist(), strict=True))


# ----------------------------------------------------------------- loss, Eq. 4


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
    each = lam if isinstance(lam, tuple) else [lam] * 4
    given = torch.tensor(lam, dtype=torch.float64) if isinstance(lam, tuple) else lam
    ours, reference = clim.clim_loss(q, anchor, positive, queue, tau, given), eq4(q, anchor, positive, queue, tau, each)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(loss, q)[0] for loss in (ours, reference)), rtol=1e-10, atol=1e-14)


# -------------------------------------------------------------------- neighbours


def test_nearest_neighbors_are_found_in_float64(monkeypatch):
    """Unit vectors, as embeddings are, in clusters so tight that float32 finds others. In chunks and of some rows."""
    x = F.normalize(unit(3, 16)[torch.arange(120) % 3] + 1e-4 * points("normal", 120, 16), dim=1).float()
    distance = (x.double()[:, None] - x.double()).square().sum(2).fill_diagonal_(math.inf)
    found = clim.nearest_neighbors(x, 5)
    torch.testing.assert_close(distance.gather(1, found), distance.sort(1).values[:, :5], rtol=0, atol=1e-14)
    in_float32 = torch.cdist(x, x).fill_diagonal_(math.inf).topk(5, largest=False).indices
    assert (in_float32.sort(1).values != found.sort(1).values).any()
    monkeypatch.setattr(clim, "rows_per_chunk", lambda width: 7)
    rows = torch.tensor([7, 3, 119, 0])
    assert torch.equal(clim.nearest_neighbors(x, 5), found)
    assert torch.equal(clim.nearest_neighbors(x, 5, rows), found[rows])


# ----------------------------------------------------------------------- k-means


def clustered(x, m, iterations, seed=0):
    """(centres of kmeans, sum of squared distances to the assigned centres, which have to be the nearest)."""
    centers, assignment = clim.kmeans(x, m, iterations, torch.Generator().manual_seed(seed))
    assert centers.shape == (min(m, len(x)), x.shape[1]) and assignment.shape == (len(x),)
    distances = (x[:, None] - centers).square().sum(2)
    assigned = distances[torch.arange(len(x)), assignment]
    assert (assigned <= distances.min(1).values * (1 + 1e-9) + 1e-9).all()
    return centers, assigned.sum().item()


def lloyd(x, centers, iterations):
    """Assign every point to its nearest centre, move every centre to the mean of its points, and again."""
    for _ in range(iterations):
        members = [[] for _ in centers]
        for row in x:
            members[min(range(len(centers)), key=lambda j: squared(row, centers[j]))].append(row)
        assert all(members), "choose another seed: the reference does not know empty clusters"
        centers = torch.stack([sum(rows) / len(rows) for rows in members])
    return centers


@pytest.mark.parametrize("iterations", [1, 2, 6])
def test_kmeans_is_lloyds_algorithm(iterations):
    """From different random rows."""
    x = points("normal", 60) + 4 * points("grid", 60, seed=10).sign()
    start = clustered(x, 5, 0)[0]
    assert len({x.tolist().index(c) for c in start.tolist()}) == 5
    torch.testing.assert_close(clustered(x, 5, iterations)[0], lloyd(x, start, iterations), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind, n, m", [("repeated", 15, 5), ("repeated", 15, 9), ("equal", 6, 3), ("normal", 3, 50)])
def test_kmeans_as_many_clusters_as_points(kind, n, m):
    """A cluster that comes out empty finds a point that has none of its own, so every point ends as a centre."""
    for seed in range(5):
        assert clustered(points(kind, n), m, 10, seed)[1] < 1e-20


# ------------------------------------------------- positives, Eq. 2 and App. A.2


def neighborhoods(x, i, k):
    """Every set that may be called the k nearest neighbours of row i: of rows equally far, any may be the last."""
    distance = {j: squared(x[i], x[j]) for j in range(len(x)) if j != i}
    k = min(k, len(distance))
    farthest = sorted(distance.values())[k - 1] if k else 0.0
    sure, tied = ([j for j, d in distance.items() if test(d)] for test in (farthest.__gt__, farthest.__eq__))
    return [sure + list(more) for more in itertools.combinations(tied, k - len(sure))]


def obeys(chosen, i, neighbors, x, centers, assignment):
    """Whether the chosen positives of row i are what Eq. 2 and App. A.2 make of these neighbours."""
    if not neighbors:
        return set(chosen) == {i}  # alone
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


@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize("kind, n, m, k, count", CASES)
def test_select_positives_is_eq2(kind, n, m, k, count, natural):
    """natural: clusters of k-means; else any centres and any assignment, which Eq. 2 allows as well."""
    x = points(kind, n)
    centers, assignment = points("grid", m, seed=1), torch.randint(m, (n,), generator=torch.Generator().manual_seed(2))
    if natural:
        centers = clim.kmeans(x, m, generator=common.generator(0))[0].round(decimals=3 if kind == "normal" else 0)
        assignment = torch.tensor([min(range(len(centers)), key=lambda j: squared(row, centers[j])) for row in x])
    for seed in range(3):
        table = clim.select_positives(x, centers, assignment, k, count, common.generator(seed))
        assert table.shape == (n, count)
        for i, chosen in enumerate(table.tolist()):
            assert any(obeys(chosen, i, near, x, centers, assignment) for near in neighborhoods(x, i, k)), (i, chosen)


def test_select_positives_is_uniform():
    """3 of 8 candidates: each is chosen alike, in each place."""
    x = torch.tensor([[float(v)] for v in range(10)], dtype=torch.float64)  # anchor 8; 9 is farther from the centre
    centers, assignment, draws = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(10, dtype=torch.int64), 2000
    g = torch.Generator().manual_seed(0)
    rows = torch.stack([clim.select_positives(x, centers, assignment, 9, 3, g)[8] for _ in range(draws)])
    for place in range(3):
        expected, counts = draws / 8, rows[:, place].bincount(minlength=10)
        assert (counts[:8] - expected).abs().max() < 5 * math.sqrt(expected) and counts[8:].sum() == 0


@pytest.mark.parametrize("selection, count", [("random", 400), ("knn", 6), ("kmeans", 400), ("center", 3)])
def test_choose_positives(selection, count):
    """Table 6: what each choice may contain, and all of it if there is room."""
    x, flags = points("normal", 30).float(), f"--selection {selection} --num-clusters 4 --knn-k 6"
    args = clim.parse_args([*TINY, *flags.split(), "--num-positives", str(count)])
    table = clim.choose_positives(args, x, common.generator(0))
    centers, assignment = clim.kmeans(x, 4, generator=common.generator(0))
    for i, chosen in enumerate(table.tolist()):
        near, others = neighborhoods(x.double(), i, 6)[0], {*range(30)} - {i}
        members = {j for j in others if assignment[j] == assignment[i]}
        if selection == "center":
            assert obeys(chosen, i, near, x.double(), centers.double(), assignment)
        else:
            assert {*chosen} == dict(random=others, knn={*near}, kmeans=members)[selection]


@pytest.mark.parametrize("assignment, others", [([0], [{0}]), ([0, 1, 1, 0, 2], [{3}, {2}, {1}, {0}, {0, 1, 2, 3}])])
def test_other_members_of_a_cluster(assignment, others):
    """Never the image itself (D1), but if it is the only one. Who is alone in a cluster gets any other image."""
    found = clim.random_members(torch.tensor(assignment), 200)
    assert [{*row} for row in found.tolist()] == others


# ------------------------------------------------------------------ CutMix, Eq. 3


def masks(lam, height, width):
    """CutMix's rand_bbox for every centre: {which pixels are in the box, as bytes: how many centres give it}."""
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
    torch.testing.assert_close(kept, of_x.double().mean((1, 2)), rtol=0, atol=1e-12)
    count, expected = Counter(mask.tobytes() for mask in of_partner.numpy()), masks(lam, height, width)
    assert count.keys() == expected.keys()
    for mask, centres in expected.items():
        often = n * centres / (height * width)
        assert abs(count[mask] - often) < 5 * math.sqrt(often)


# ------------------------------------------------------------------------- views


def sizes_of(index):
    return np.stack([20 + 7 * (index % 5), 20 + 11 * (index % 4)], 1)


def drawn(positives, flags="", epoch=0):
    """(cuts, colors (n, views, 9)) of images of many sizes, one for each row of the table of positives."""
    args, index = clim.parse_args([*TINY, *flags.split()]), np.arange(len(positives))
    draws = common.uniform(0, epoch, index, len(clim.augmentation(args)) * common.VIEW_DRAWS + 1)
    images = types.SimpleNamespace(sizes=sizes_of)
    cuts, colors = clim.draw_views(args, images, positives, index, sizes_of(index), draws)
    return cuts, np.stack(colors, 1)


NONE_YET = torch.full((40, 3), -1, dtype=torch.int32)
TABLE = torch.randint(40, (40, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)


def assert_same_views(a, b, views):
    for (index, box, size), (other_index, other_box, other_size) in zip(a[0][:views], b[0][:views], strict=True):
        assert np.array_equal(index, other_index) and np.array_equal(box, other_box) and size == other_size
    assert np.array_equal(a[1][:, :views], b[1][:, :views])


@pytest.mark.parametrize(
    "flags, count", [("", 4), ("--mix none", 3), ("--resolutions 16 12", 4), ("--local-crops 2 --local-size 8", 8)]
)
def test_views_of_the_image_and_of_its_partner(flags, count):
    """With a table its own views stay, and those of a partner come: one of its row, the same in all of them."""
    own, (cuts, colors) = (drawn(positives, flags) for positives in (NONE_YET, TABLE))
    assert_same_views(own, (cuts, colors), 2)
    assert (len(own[0]), len(cuts)) == (4 if "local" in flags else 2, count)
    partner = cuts[2][0]
    assert all(p in TABLE[i] for i, p in enumerate(partner.tolist()))
    for view, (index, box, size) in enumerate(cuts):
        assert np.array_equal(index, partner if view in (2, 3, 5, 7) else np.arange(40))
        assert size == (16 if view < 4 else 8)
        assert (box[:, :2] >= 0).all() and (box[:, 2:] > 0).all()
        assert (box[:, :2] + box[:, 2:] <= sizes_of(index)).all()
    for a, b in itertools.combinations(range(len(cuts)), 2):
        assert (cuts[a][1] == cuts[b][1]).all(1).mean() < 0.1 and (colors[:, a] == colors[:, b]).all(1).mean() < 0.1


def test_with_the_same_crop_a_key_has_the_box_of_its_query():
    (cuts, colors), (plain, plain_colors) = (drawn(TABLE, flags) for flags in ("--same-crop", ""))
    boxes, plain = [box for _, box, _ in cuts], [box for _, box, _ in plain]
    assert all(np.array_equal(boxes[view], plain[of]) for view, of in enumerate((0, 0, 3, 3)))
    assert np.array_equal(colors, plain_colors)


def test_partners_are_drawn_uniformly_and_anew_each_epoch():
    n = 4000
    table = torch.arange(5, dtype=torch.int32).repeat(n, 1)  # a partner is the number of its column
    cuts = [drawn(table, epoch=epoch)[0] for epoch in (0, 1)]
    picks, boxes = [cut[2][0] for cut in cuts], np.concatenate([box for _, box, _ in cuts[0][:2]], 1)
    for pick in picks:
        assert abs(np.bincount(pick, minlength=5) - n / 5).max() < 5 * math.sqrt(n / 5)
    assert abs(np.corrcoef(picks[0], boxes.T)[0, 1:]).max() < 4.5 / math.sqrt(n)  # by a number of its own
    assert (picks[0] == picks[1]).mean() == pytest.approx(0.2, abs=0.04)
    assert len(drawn(torch.zeros(40, 3, dtype=torch.int32))[0]) == 4  # image 0 is a partner, too


@pytest.mark.parametrize("positives", [NONE_YET, TABLE], ids=["none", "some"])
def test_a_repeated_resolution_repeats_the_boxes_with_other_colors(positives):
    once, (cuts, colors) = drawn(positives), drawn(positives, "--resolutions 16 16")
    views = len(once[0])
    assert_same_views(once, (cuts, colors), 2)
    assert_same_views((cuts[:views], colors[:, :0]), (cuts[views:], colors[:, :0]), views)
    assert len(cuts) == 2 * views and (colors[:, :views] != colors[:, views:]).any(2).mean() > 0.9


# ------------------------------------------------------------------- the model


def tiny(flags=()):
    args = clim.parse_args([*TINY, *flags])
    torch.manual_seed(0)
    model = clim.split_batch_norms(clim.CLIM(args), args.bn_groups).double()
    for p in (*model.momentum_backbone.parameters(), *model.momentum_projector.parameters()):
        p.add_(0.1 * torch.randn_like(p))  # so that the two encoders differ
    return model


def random_views(count, size=16):
    return list(torch.rand(count, 8, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def resized(x, size):
    return x if size == 16 else F.interpolate(x, (size, size), mode="bilinear", antialias=True)


FORWARD = [  # --mix, or None while there are no positives; sizes; local crops
    ("cutmix", (16, 12, 12), 0), ("cutmix", (16, 12), 2), ("none", (16, 12), 0), ("none", (16, 16), 2),
    (None, (16, 12), 2),
]  # fmt: skip


@pytest.mark.parametrize("mix, sizes, local_crops", FORWARD)
def test_forward_is_eq6(mix, sizes, local_crops):
    """Eq. 4, summed over all pairs of sizes, and for each local crop with the large views' keys (Table 7).

    Batch norms take running statistics, so that an embedding is a function of its image.
    """
    flags = ["--resolutions", *map(str, sizes), *f"--local-crops {local_crops} --local-size 8".split()]
    model = tiny([*flags, *(["--mix", mix] if mix else [])])
    per_copy = {"cutmix": 4, "none": 3, None: 2}[mix]
    large = random_views(per_copy * max(map(sizes.count, sizes)))
    crops = random_views(local_crops * (1 + (mix == "cutmix")), size=8)
    model(large + crops, 0, mix is not None)  # statistics of some batch
    model.eval()
    loss, keys, (q, k), _ = model(large + crops, 5, mix is not None)

    def mixed(x, partner, number):
        """The mix, and the share of x by its pixels: after clipping, not the one that is drawn."""
        found = clim.mix(model.args, x, partner, 5, number)[0]
        return found, (found == x).all(1).double().mean().item()

    queries, key_pairs, lam = [], [], 0.5
    for i, size in enumerate(sizes):
        copy = sizes[:i].count(size)
        x, *others = large[copy * per_copy : (copy + 1) * per_copy]
        if mix == "cutmix":  # at full size
            x, lam = mixed(x, others.pop(), 0)
        queries.append(model.query(resized(x, size)))
        of_size = [model.key(resized(view, size)) for view in others]
        key_pairs.append((of_size[0], of_size[-1]))  # without positives, twice the own key
    terms = [(query, *pair, lam) for query, pair in itertools.product(queries, key_pairs)]
    for number in range(local_crops):
        if mix == "cutmix":  # by a share and a box of its own
            x, lam = mixed(*crops[2 * number : 2 * number + 2], 1 + number)
        else:
            x = crops[number]
        terms.append((model.query(x), *key_pairs[0], lam))
    expected = sum(eq4(*vectors, model.queue.keys, 0.2, [share] * 8) for *vectors, share in terms)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    for ours, theirs in ((q, queries[0]), (k, key_pairs[0][0]), (keys, key_pairs[0][0])):  # at the largest size
        torch.testing.assert_close(ours, theirs)
    weights = list(model.projector.parameters())
    ours, theirs = (torch.autograd.grad(value, weights) for value in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("alpha", [2.0, 0.5])
def test_the_share_is_drawn_from_beta(alpha, monkeypatch):
    """Beta(alpha, alpha), anew at each step."""
    args, shares = clim.parse_args([*TINY, "--alpha", str(alpha)]), []
    monkeypatch.setattr(clim, "cutmix", lambda x, partner, lam, generator: shares.append(lam))
    for step in range(300):
        clim.mix(args, None, None, step)
    s = np.sort(shares)
    law = {2.0: 3 * s**2 - 2 * s**3, 0.5: 2 / np.pi * np.arcsin(np.sqrt(s))}[alpha]
    assert ks(law) < 1.95  # far beyond 0.1 %


def test_refresh_embeds_with_the_momentum_encoder(monkeypatch, capsys):
    """The table is that of backbone and projector, unit-length outputs, running statistics, for normalised images."""
    args = clim.parse_args([*TINY, "--selection", "knn", "--knn-k", "3", "--num-positives", "3"])
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    monkeypatch.setitem(common.NORMS, "patterns", (mean, std))
    array, labels = common.make_patterns(30, 16, 0)
    images, model = common.ImageSet(array, labels), tiny().float()
    model([x.float() for x in random_views(2)], 0, False)
    positives = torch.full((30, 3), -1, dtype=torch.int32)
    clim.refresh(args, model, images, torch.device("cpu"), 0, positives)
    assert model.momentum_backbone.training
    model.eval()
    with torch.no_grad():
        x = common.normalize(torch.from_numpy(array).permute(0, 3, 1, 2) / 255, mean, std)
        x = F.normalize(model.momentum_projector(model.momentum_backbone(x)), dim=1).double()
    assert [set(row) for row in positives.tolist()] == [set(neighborhoods(x, i, 3)[0]) for i in range(30)]
    share = np.mean([labels[i] == labels[j] for i, row in enumerate(positives.tolist()) for j in row])
    assert f" {100 * share:.1f} % " in capsys.readouterr().out


def test_positives_are_chosen_at_the_start_and_every_few_epochs():
    args = clim.parse_args([*TINY, "--clim-start", "3", "--refresh-every", "2"])
    assert [epoch for epoch in range(10) if clim.choice_is_due(args, epoch)] == [3, 5, 7, 9]


# ----------------------------------------------------------------------- recipes


def test_recipes():
    paper = "--dataset imagenet"
    assert values(clim, paper, "num_clusters knn_k num_positives refresh_every") == [10000, 40, 10, 5]  # App. A.2
    assert values(clim, paper, "arch batch_size lr lr_batch weight_decay") == ["resnet50", 512, 0.06, 512, 1e-4]
    assert values(clim, paper, "alpha temperature queue momentum dim bn_groups") == [2.0, 0.2, 65536, 0.999, 128, 16]
    assert values(clim, paper, "resolutions selection mix") == [(224, 160), "center", "cutmix"]
    assert values(clim, f"{paper} --selection knn", "knn_k") == [10]  # Table 6


def test_resolutions():
    """Views are cut at the largest. The baseline and Table 7's multi-crop have one."""
    for flags, *sizes in (("--resolutions 24 40", 40, 24), ("--image-size 48", 48), ("--dataset imagenet", 224, 160)):
        assert values(clim, flags, "resolutions image_size") == [tuple(sizes), sizes[0]]
    for flags in ("--selection none", "--local-crops 2", "--resolutions 224"):
        assert values(clim, f"--dataset imagenet {flags}", "resolutions") == [(224,)]
