"""clim.py against slow references written from the paper (Eq. 1-6, App. A.2), and its limit cases."""

import functools
import itertools
import math

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
    """Value and gradient, with one share or a share per image."""
    q, anchor, positive, queue = unit(4, 6, grad=True), unit(4, 6, seed=1), unit(4, 6, seed=2), unit(9, 6, seed=3)
    each = lam if isinstance(lam, tuple) else [lam] * 4
    given = torch.tensor(lam, dtype=torch.float64) if isinstance(lam, tuple) else lam
    ours, reference = clim.clim_loss(q, anchor, positive, queue, tau, given), eq4(q, anchor, positive, queue, tau, each)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(loss, q)[0] for loss in (ours, reference)), rtol=1e-10, atol=1e-14)


def test_clim_loss_limits():
    """InfoNCE at shares of 1 and 0, and where both keys are one."""
    q, anchor, positive, queue = (unit(n, 6, seed=s) for s, n in enumerate((5, 5, 5, 9)))
    for lam, k, same in ((1.0, positive, anchor), (0.0, positive, positive), (0.3, anchor, anchor)):
        ours, nce = clim.clim_loss(q, anchor, k, queue, 0.2, lam), clim.info_nce(q, same, queue, 0.2)
        torch.testing.assert_close(ours, nce, rtol=1e-12, atol=0)


# -------------------------------------------------------------------- neighbours


def check_neighbors(found, x, k, tolerance=0.0):
    """Each row's are k others, no two the same, at the k smallest distances in order; of equals, any."""
    n = len(x)
    if n == 1:
        assert found.tolist() == [[0]]  # alone (D1)
        return
    assert found.shape == (n, min(k, n - 1))
    for i, row in enumerate(found.tolist()):
        assert i not in row and len(set(row)) == len(row)
        expected = sorted(squared(x[i], x[j]) for j in range(n) if j != i)[:k]
        assert [squared(x[i], x[j]) for j in row] == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("kind", ["normal", "grid", "repeated", "equal"])
@pytest.mark.parametrize("n, k", [(1, 3), (2, 5), (30, 4), (30, 100)])
def test_nearest_neighbors(kind, n, k):
    x = points(kind, n)
    check_neighbors(clim.nearest_neighbors(x, k), x, k, 1e-6 if kind == "normal" else 0.0)


def test_nearest_neighbors_that_float32_confuses():
    """Unit vectors, as embeddings are, in clusters so tight that float32 finds others: why it is float64."""
    x = F.normalize(unit(3, 16)[torch.arange(120) % 3] + 1e-4 * points("normal", 120, 16), dim=1).float()
    found = clim.nearest_neighbors(x, 5)
    check_neighbors(found, x.double(), 5, 1e-14)
    in_float32 = clim.nearest_neighbors(x, 5, dtype=torch.float32)
    assert (in_float32.sort(1).values != found.sort(1).values).any()


def test_nearest_neighbors_in_parts(monkeypatch):
    """Neither chunks nor asking for some rows only changes the neighbours."""
    x = points("normal", 50)
    whole, rows = clim.nearest_neighbors(x, 6), torch.tensor([7, 3, 49, 0])
    assert torch.equal(clim.nearest_neighbors(x, 6, rows), whole[rows])
    monkeypatch.setattr(clim, "rows_per_chunk", lambda width: 7)
    assert torch.equal(clim.nearest_neighbors(x, 6), whole)


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


def test_kmeans_empty_cluster_starts_at_the_farthest_row():
    x = torch.zeros(20, 2, dtype=torch.float64)
    x[[3, 11, 17]] = torch.tensor([[1.0, 0.0], [0.0, 5.0], [-2.0, 0.0]], dtype=torch.float64)
    both = [seed for seed in range(30) if not clustered(x, 2, 0, seed)[0].any()]  # both centres at the origin
    for seed in both:
        found = sorted(clustered(x, 2, 1, seed)[0].tolist(), key=lambda center: center == [0.0, 5.0])
        assert found == [pytest.approx(x.mean(0).tolist()), [0.0, 5.0]]
    assert len(both) > 5


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
    """3 of 8 candidates: each is chosen alike, in each place, and pairs are, too."""
    x = torch.tensor([[float(v)] for v in range(10)], dtype=torch.float64)  # anchor 8; 9 is farther from the centre
    centers, assignment, draws = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(10, dtype=torch.int64), 2000
    g = torch.Generator().manual_seed(0)
    rows = torch.stack([clim.select_positives(x, centers, assignment, 9, 3, g)[8] for _ in range(draws)])
    for place in range(3):
        expected, counts = draws / 8, rows[:, place].bincount(minlength=10)
        assert (counts[:8] - expected).abs().max() < 5 * math.sqrt(expected) and counts[8:].sum() == 0
    pairs = (rows.sort(1).values[:, :2] * torch.tensor([10, 1])).sum(1)  # the two smallest of each draw
    assert (pairs == 1).double().mean().item() == pytest.approx(6 / 56, abs=0.03)  # 0, 1 and any third


@pytest.mark.parametrize("selection", ["random", "knn", "kmeans", "center"])
def test_choose_positives(selection):
    """Table 6: what each choice may contain, and that it contains all of it now and then."""
    x = points("normal", 30).float()
    args = clim.parse_args([*TINY, *f"--selection {selection} --num-clusters 4 --knn-k 6 --num-positives 3".split()])
    tables = torch.stack([clim.choose_positives(args, x, common.generator(seed)) for seed in range(100)])
    near = [set(neighborhoods(x.double(), i, 6)[0]) for i in range(30)]
    others = [set(range(30)) - {i} for i in range(30)]
    if selection in ("random", "knn"):
        for i, seen in enumerate(tables.transpose(0, 1).flatten(1)):
            assert set(seen.tolist()) == (near[i] if selection == "knn" else others[i])
        return
    args.num_positives = 400
    for seed in range(5):
        centers, assignment = clim.kmeans(x, 4, generator=common.generator(seed))
        many = clim.choose_positives(args, x, common.generator(seed))
        for i, chosen in enumerate(tables[seed].tolist()):
            if selection == "kmeans":  # one that is alone gets any
                members = {*torch.nonzero(assignment == assignment[i])[:, 0].tolist()} - {i}
                assert set(chosen) <= set(many[i].tolist()) == (members or others[i])
            else:
                assert obeys(chosen, i, near[i], x.double(), centers.double(), assignment)


@pytest.mark.parametrize("assignment, others", [([0], [{0}]), ([0, 1, 1, 0, 2], [{3}, {2}, {1}, {0}, {0, 1, 2, 3}])])
def test_other_members_of_a_cluster(assignment, others):
    """Never the image itself (D1), but if it is the only one. Who is alone in a cluster gets any other image."""
    found = clim.random_members(torch.tensor(assignment), 200)
    assert [{*row} for row in found.tolist()] == others


# ------------------------------------------------------------------ CutMix, Eq. 3


def boxes(lam, height, width):
    """CutMix's rand_bbox for every centre: the boxes (top, bottom, left, right) and how many centres give each."""
    found = {}
    cut_h, cut_w = int(height * math.sqrt(1 - lam)), int(width * math.sqrt(1 - lam))
    for cy, cx in itertools.product(range(height), range(width)):
        rows = np.clip([cy - cut_h // 2, cy + cut_h // 2], 0, height)
        columns = np.clip([cx - cut_w // 2, cx + cut_w // 2], 0, width)
        box = (*rows.tolist(), *columns.tolist())
        box = box if box[0] < box[1] and box[2] < box[3] else None  # no pixel at all
        found[box] = found.get(box, 0) + 1
    return found


def box_of(mixed, x, partner):
    """The box that holds the partner's pixels, or None; what is in it and around it is checked."""
    inside = (mixed == partner).all(0)
    assert ((mixed == x).all(0) ^ inside).all()  # every pixel is of one of them, in all three channels
    if not inside.any():
        return None
    rows, columns = (torch.nonzero(inside.any(d)).flatten().tolist() for d in (1, 0))
    box = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    assert inside[box[0] : box[1], box[2] : box[3]].all() and int(inside.sum()) == (box[1] - box[0]) * (box[3] - box[2])
    return box


@pytest.mark.parametrize("lam, height, width", [(0.0, 5, 5), (0.2, 6, 8), (0.81, 6, 8), (1.0, 5, 5)])
def test_cutmix_with_a_share_per_image(lam, height, width):
    """Every box that CutMix can draw, as often as it draws it; the share that is left, to the pixel."""
    n = 3000
    x, partner = torch.rand(n, 3, height, width) / 2, 0.5 + torch.rand(n, 3, height, width) / 2
    mixed, kept = clim.cutmix(x, partner, torch.full((n,), lam, dtype=torch.float64), torch.Generator().manual_seed(0))
    count, expected = {}, boxes(lam, height, width)
    for i in range(n):
        box = box_of(mixed[i], x[i], partner[i])
        area = (box[1] - box[0]) * (box[3] - box[2]) if box else 0
        assert kept[i].item() == pytest.approx(1 - area / (height * width), abs=1e-12)
        count[box] = count.get(box, 0) + 1
    assert count.keys() == expected.keys()
    for box, centres in expected.items():
        often = n * centres / (height * width)
        assert abs(count[box] - often) < 5 * math.sqrt(often)


# ------------------------------------------------------------------------- views


class Grays:
    """Images of many sizes, each of one gray level: its index. As an ImageSet to common.ViewDataset."""

    array = None  # not decoded

    def __init__(self, n):
        self.all = np.stack([20 + 7 * (np.arange(n) % 5), 20 + 11 * (np.arange(n) % 4)], 1)

    def __len__(self):
        return len(self.all)

    def __getitem__(self, i):
        return np.full((*self.all[i], 3), i, np.uint8)

    def sizes(self, index):
        return self.all[index]


def data(positives, *flags, images=None):
    """What training cuts views from, with this table of positives."""
    args, images = clim.parse_args([*TINY, *flags]), images or Grays(40)
    draw = functools.partial(clim.draw_views, args, images, positives)
    return common.ViewDataset(images, clim.augmentation(args), args.seed, draw=draw, extra_draws=1)


def drawn(data, epoch=0):
    """(cuts, colors (n, views, 9)) of all images."""
    index = np.arange(len(data.images))
    draws = common.uniform(data.seed, epoch, index, data.num_draws)
    cuts, colors = data.draw(index, data.images.sizes(index), draws)
    return cuts, np.stack(colors, 1)


def table_of(n, count=3, seed=0):
    return torch.randint(n, (n, count), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


NONE_YET = torch.full((40, 3), -1, dtype=torch.int32)


def assert_same_views(a, b, views):
    for (index, box, size), (other_index, other_box, other_size) in zip(a[0][:views], b[0][:views], strict=True):
        assert np.array_equal(index, other_index) and np.array_equal(box, other_box) and size == other_size
    assert np.array_equal(a[1][:, :views], b[1][:, :views])


@pytest.mark.parametrize(
    "flags, count", [("", 4), ("--mix none", 3), ("--resolutions 16 12", 4), ("--local-crops 2 --local-size 8", 8)]
)
def test_views_of_the_image_and_of_its_partner(flags, count):
    """With a table its own views stay, and those of a partner come: one of its row, the same in all of them.

    Each is cut for itself, inside of its own image.
    """
    table, images = table_of(40), Grays(40)
    own, (cuts, colors) = (drawn(data(positives, *flags.split())) for positives in (NONE_YET, table))
    assert_same_views(own, (cuts, colors), 2)
    assert (len(own[0]), len(cuts)) == (4 if "local" in flags else 2, count)
    partner = cuts[2][0]
    assert all(p in table[i] for i, p in enumerate(partner.tolist()))
    for view, (index, box, size) in enumerate(cuts):
        assert np.array_equal(index, partner if view in (2, 3, 5, 7) else np.arange(40))
        assert size == (16 if view < 4 else 8)
        assert (box[:, :2] >= 0).all() and (box[:, 2:] > 0).all()
        assert (box[:, :2] + box[:, 2:] <= images.sizes(index)).all()
    for a, b in itertools.combinations(range(len(cuts)), 2):
        assert (cuts[a][1] == cuts[b][1]).all(1).mean() < 0.1 and (colors[:, a] == colors[:, b]).all(1).mean() < 0.1


def test_with_the_same_crop_a_key_has_the_box_of_its_query():
    """And all else is as without."""
    (cuts, colors), (plain, plain_colors) = (drawn(data(table_of(40), *flags)) for flags in (["--same-crop"], []))
    boxes, plain = [box for _, box, _ in cuts], [box for _, box, _ in plain]
    assert all(np.array_equal(boxes[view], plain[of]) for view, of in enumerate((0, 0, 3, 3)))
    assert np.array_equal(colors, plain_colors)


def test_partners_are_drawn_uniformly_and_anew_each_epoch():
    n = 4000
    table = torch.arange(5, dtype=torch.int32).repeat(n, 1)  # a partner is the number of its column
    cuts = [drawn(data(table, images=Grays(n)), epoch)[0] for epoch in (0, 1)]
    picks, boxes = [cut[2][0] for cut in cuts], np.concatenate([box for _, box, _ in cuts[0][:2]], 1)
    for pick in picks:
        assert abs(np.bincount(pick, minlength=5) - n / 5).max() < 5 * math.sqrt(n / 5)
    assert abs(np.corrcoef(picks[0], boxes.T)[0, 1:]).max() < 4.5 / math.sqrt(n)  # by a number of its own
    assert (picks[0] == picks[1]).mean() == pytest.approx(0.2, abs=0.04)


@pytest.mark.parametrize("positives", [NONE_YET, table_of(40)], ids=["none", "some"])
def test_a_repeated_resolution_repeats_the_boxes_with_other_colors(positives):
    once, (cuts, colors) = drawn(data(positives)), drawn(data(positives, "--resolutions", "16", "16"))
    views = len(once[0])
    assert_same_views(once, (cuts, colors), 2)
    assert_same_views((cuts[:views], colors[:, :0]), (cuts[views:], colors[:, :0]), views)
    assert len(cuts) == 2 * views and (colors[:, :views] != colors[:, views:]).any(2).mean() > 0.9


def test_views_are_cut_from_the_right_images():
    """Every pixel tells which image it is of; a table that is filled later is seen."""
    positives, keys = NONE_YET.clone(), [(2, i) for i in (5, 39, 0, 17)]
    views = data(positives)
    assert len(views.__getitems__(keys)["views"]) == 2
    positives.copy_(table_of(40))
    seen = [view[:, 0, 0, 0].tolist() for view in views.__getitems__(keys)["views"]]
    assert seen[0] == seen[1] == [5, 39, 0, 17] and seen[2] == seen[3]
    assert all(partner in positives[i] for i, partner in zip(seen[0], seen[2], strict=True))


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


def recorded(monkeypatch):
    """A list of (x, partner, lam drawn, mixed) of the calls of cutmix from now on."""
    calls, cutmix = [], clim.cutmix

    def record(x, partner, lam, *args):
        mixed, kept = cutmix(x, partner, lam, *args)
        calls.append((x, partner, float(lam), mixed))
        return mixed, kept

    monkeypatch.setattr(clim, "cutmix", record)
    return calls


def resized(x, size):
    return x if size == 16 else F.interpolate(x, (size, size), mode="bilinear", antialias=True)


FORWARD = [("cutmix", (16,)), ("cutmix", (16, 12, 12)), ("none", (16, 12)), ("none", (16, 16)), (None, (16, 12))]
HAVE_POSITIVES = {"cutmix": True, "none": True, None: False}


@pytest.mark.parametrize("positives, resolutions", FORWARD)
def test_forward_is_eq6(resolutions, positives, monkeypatch):
    """The sum over all pairs of sizes of Eq. 4; with running statistics: an embedding is a function of its image."""
    model = tiny(["--resolutions", *map(str, resolutions), *(["--mix", positives] if positives else [])])
    per_copy = {"cutmix": 4, "none": 3, None: 2}[positives]
    views = random_views(per_copy * max(resolutions.count(r) for r in resolutions))
    model(views, 0, HAVE_POSITIVES[positives])  # statistics of some batch
    model.eval()
    calls = recorded(monkeypatch)
    loss, keys, (q, k), _ = model(views, 5, HAVE_POSITIVES[positives])
    lam = {"cutmix": None, "none": 0.5, None: 1.0}[positives]
    queries, anchors, partners, found = [], [], [], set()
    for i, size in enumerate(resolutions):
        copy = resolutions[:i].count(size)
        x, own, *others = views[copy * per_copy : (copy + 1) * per_copy]
        if positives == "cutmix":  # mixed at full size
            mixed = next(m for a, b, _, m in calls if torch.equal(a, x) and torch.equal(b, others[1]))
            found |= {box_of(*trio) for trio in zip(mixed, x, others[1], strict=True)}
            x, lam = mixed, (mixed == x).all(1).double().mean().item()  # the share after clipping, not the one drawn
        queries.append(model.query(resized(x, size)))
        anchors.append(model.key(resized(own, size)))
        partners.append(model.key(resized(others[0] if others else own, size)))
    assert len(found) == (positives == "cutmix") and (positives is None or lam < 1)  # one box for all images and sizes
    pairs = itertools.product(queries, zip(anchors, partners, strict=True))
    expected = sum(eq4(one, a, p, model.queue.keys, 0.2, [lam] * 8) for one, (a, p) in pairs)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    for ours, theirs in ((q, queries[0]), (k, anchors[0]), (keys, anchors[0])):  # at the largest size
        torch.testing.assert_close(ours, theirs)
    weights = list(model.projector.parameters())
    ours, theirs = (torch.autograd.grad(value, weights) for value in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mix, per_image", [("cutmix", 2), ("none", 1), (None, 1)])
def test_local_crops_add_a_term_each(mix, per_image, monkeypatch):
    """Table 7: of a local query, mixed by a share and a box of its own, and the large views' keys."""
    model = tiny(["--local-crops", "2", "--local-size", "8", *(["--mix", mix] if mix else [])]).eval()
    large, crops = random_views({"cutmix": 4, "none": 3, None: 2}[mix]), random_views(2 * per_image, size=8)
    have, calls = HAVE_POSITIVES[mix], recorded(monkeypatch)
    loss, _, (_, k), _ = model(large + crops, 5, have)
    mixed = [m for x, _, _, m in calls if x.shape[-1] == 8]
    model.args.local_crops = 0
    expected = model(large, 5, have)[0]
    partner = model.key(large[2]) if have else k
    for number in range(2):
        x, lam = crops[per_image * number], 0.5
        if mix == "cutmix":
            x, lam = mixed[number], (mixed[number] == x).all(1).double().mean().item()
        expected = expected + eq4(model.query(x), k, partner, model.queue.keys, 0.2, [lam] * 8)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    ours, theirs = (torch.autograd.grad(value, [*model.projector.parameters()]) for value in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)
    assert len(mixed) == (2 if mix == "cutmix" else 0) and (not mixed or calls[1][2] != calls[2][2] != calls[0][2])


@pytest.mark.parametrize("alpha", [2.0, 0.5])
def test_the_share_is_drawn_from_beta(alpha, monkeypatch):
    """Beta(alpha, alpha), anew at each step: the law of the numbers that cutmix is given."""
    args, calls, n = clim.parse_args([*TINY, "--alpha", str(alpha)]), recorded(monkeypatch), 300
    for step in range(n):
        clim.mix(args, *torch.zeros(2, 1, 3, 4, 4), step)
    s = np.sort([lam for _, _, lam, _ in calls])
    law = {2.0: 3 * s**2 - 2 * s**3, 0.5: 2 / np.pi * np.arcsin(np.sqrt(s))}[alpha]
    assert ks(law) < 1.95  # far beyond 0.1 %


def test_refresh_embeds_with_the_momentum_encoder(monkeypatch, capsys):
    """The table is that of backbone and projector, unit-length outputs, running statistics, for normalised images."""
    args = clim.parse_args([*TINY, "--selection", "knn", "--knn-k", "3", "--num-positives", "3"])
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    monkeypatch.setitem(common.NORMS, "patterns", (mean, std))
    array, labels = common.make_patterns(30, 16, 0)
    labels[::2] = -1  # without a label nothing is known of a pair
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
    pairs = [(labels[i], labels[j]) for i, row in enumerate(positives.tolist()) for j in row]
    share = np.mean([a == b for a, b in pairs if a >= 0 and b >= 0])
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
