"""clim.py against slow references written from the paper (Eq. 1-6, App. A.2), its limit cases, and whole runs."""

import contextlib
import functools
import inspect
import io
import itertools
import json
import math
import os
import signal
import socket

import conftest
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn.parallel import DistributedDataParallel

import clim
import common
import jcl

TINY = "--arch resnet_nano --image-size 16 --batch-size 8 --queue 16 --dim 8 --device cpu".split()
NANO = ("resnet18", dict(conftest.NANO, zero_init_last=False))


@pytest.fixture(autouse=True)
def _nano(monkeypatch):
    monkeypatch.setitem(common.ARCHS, "resnet_nano", NANO)


def load(path):
    return torch.load(path, weights_only=True)


def unit(*shape, seed=0, grad=False):
    x = F.normalize(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=-1)
    return x.requires_grad_(grad)


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


def eq1(q, k, queue, tau):
    """Eq. 1 of one query."""
    positive = torch.exp(sum(a * b for a, b in zip(q, k, strict=True)) / tau)
    return -torch.log(positive / (positive + sum(torch.exp((q * n).sum() / tau) for n in queue)))


def eq4(q, k_anchor, k_positive, queue, tau, lam):
    """Eq. 4, image by image; lam: a number an image."""
    terms = [
        lam[i] * eq1(q[i], k_anchor[i], queue, tau) + (1 - lam[i]) * eq1(q[i], k_positive[i], queue, tau)
        for i in range(len(q))
    ]
    return sum(terms) / len(terms)


@pytest.mark.parametrize("tau, lam", [(0.07, 0.3), (0.2, 0.0), (0.2, (0.0, 0.9, 0.25, 1.0)), (1.0, 0.7)])
def test_clim_loss_eq4(tau, lam):
    q, anchor, positive, queue = unit(4, 6, grad=True), unit(4, 6, seed=1), unit(4, 6, seed=2), unit(9, 6, seed=3)
    each = lam if isinstance(lam, tuple) else [lam] * 4
    given = torch.tensor(lam, dtype=torch.float64) if isinstance(lam, tuple) else lam
    ours, reference = clim.clim_loss(q, anchor, positive, queue, tau, given), eq4(q, anchor, positive, queue, tau, each)
    assert ours.shape == ()
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(loss, q)[0] for loss in (ours, reference)), rtol=1e-10, atol=1e-14)


def test_clim_loss_limits():
    q, anchor, positive, queue = (unit(n, 6, seed=s) for s, n in enumerate((5, 5, 5, 9)))
    exact = dict(rtol=1e-12, atol=0)

    def loss(lam, k=positive):
        return clim.clim_loss(q, anchor, k, queue, 0.2, lam)

    torch.testing.assert_close(loss(1.0), clim.info_nce(q, anchor, queue, 0.2), **exact)
    torch.testing.assert_close(loss(0.0), clim.info_nce(q, positive, queue, 0.2), **exact)
    torch.testing.assert_close(loss(0.3, anchor), clim.info_nce(q, anchor, queue, 0.2), **exact)  # they add up to 1
    torch.testing.assert_close(loss(torch.full((5,), 0.3)), loss(0.3), rtol=1e-7, atol=0)  # float32 shares of an image
    torch.testing.assert_close(loss(0.3), 0.3 * loss(1.0) + 0.7 * loss(0.0), **exact)


@pytest.mark.parametrize("wrong", ["k_positive", "queue", "lam of a column", "lam of another length"])
def test_clim_loss_refuses_wrong_shapes(wrong):
    k_positive = unit(4, 1, 6) if wrong == "k_positive" else unit(4, 6)
    queue = unit(9, 5) if wrong == "queue" else unit(9, 6)
    lam = {"lam of a column": torch.rand(4, 1), "lam of another length": torch.rand(3)}.get(wrong, 0.5)
    with pytest.raises(ValueError, match="clim_loss takes"):
        clim.clim_loss(unit(4, 6), unit(4, 6), k_positive, queue, 0.2, lam)


# -------------------------------------------------------------------- neighbours


def check_neighbors(found, x, k, tolerance=0.0):
    """Each row's are k others, no two the same, at the k smallest distances in order; of equals, any."""
    n = len(x)
    if n == 1:
        assert found.tolist() == [[0]]  # alone (D1)
        return
    assert found.shape == (n, min(k, n - 1)) and found.dtype == torch.int64
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
    in_float32 = torch.cdist(x, x).fill_diagonal_(math.inf).topk(5, largest=False).indices
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
    """kmeans, and the objective of what it returns: the sum of squared distances to the assigned centres."""
    centers, assignment = clim.kmeans(x, m, iterations, torch.Generator().manual_seed(seed))
    assert centers.shape == (min(m, len(x)), x.shape[1]) and centers.dtype == x.dtype and centers.isfinite().all()
    assert assignment.shape == (len(x),) and assignment.dtype == torch.int64
    rows, c = x.double(), centers.double()
    objective = 0.0
    for i, j in enumerate(assignment.tolist()):  # to the nearest of the returned centres
        distances = [squared(rows[i], center) for center in c]
        assert distances[j] <= min(distances) * (1 + 1e-9) + 1e-9
        objective += distances[j]
    return centers, assignment, objective


def lloyd(x, centers, iterations):
    """Assign every point to its nearest centre, move every centre to the mean of its points, and again."""
    centers = [c.clone() for c in centers]
    for _ in range(iterations):
        members = [[] for _ in centers]
        for row in x:
            members[min(range(len(centers)), key=lambda j: squared(row, centers[j]))].append(row)
        assert all(members), "choose another seed: the reference does not know empty clusters"
        centers = [sum(rows) / len(rows) for rows in members]
    return torch.stack(centers)


@pytest.mark.parametrize("seed", [0, 1])
def test_kmeans_is_lloyds_algorithm(seed):
    """From different random rows."""
    x = points("normal", 60, seed=seed) + 4 * points("grid", 60, seed=seed + 10).sign()
    start = clustered(x, 5, 0, seed)[0]
    rows = [tuple(row) for row in x.tolist()]
    assert len({rows.index(tuple(c)) for c in start.tolist()}) == 5  # different rows
    for iterations in (1, 2, 6):
        torch.testing.assert_close(
            clustered(x, 5, iterations, seed)[0], lloyd(x, start, iterations), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("kind, n, m", [("normal", 50, 8), ("grid", 50, 20), ("repeated", 60, 15), ("equal", 9, 4)])
def test_kmeans_never_gets_worse(kind, n, m):
    x = points(kind, n)
    for seed in range(2):
        objectives = [clustered(x, m, iterations, seed)[2] for iterations in (0, 1, 2, 3, 5, 8, 20)]
        for before, after in itertools.pairwise(objectives):
            assert after <= before * (1 + 1e-12) + 1e-12
        assert kind == "equal" or objectives[-1] < objectives[0]


AS_MANY = [("repeated", 15, 5), ("repeated", 15, 9), ("equal", 6, 3), ("normal", 3, 50), ("normal", 1, 1)]


@pytest.mark.parametrize("kind, n, m", AS_MANY)
def test_kmeans_as_many_clusters_as_points(kind, n, m):
    """A cluster that comes out empty finds a point that has none of its own, so every point ends as a centre."""
    for seed in range(5):
        assert clustered(points(kind, n), m, 10, seed)[2] < 1e-20


def test_kmeans_empty_cluster_starts_at_the_farthest_row():
    x = torch.zeros(20, 2, dtype=torch.float64)
    x[[3, 11, 17]] = torch.tensor([[1.0, 0.0], [0.0, 5.0], [-2.0, 0.0]], dtype=torch.float64)
    both = 0
    for seed in range(30):
        if not clustered(x, 2, 0, seed)[0].any():  # both centres at the origin: one has all rows, the other none
            both += 1
            found = sorted(clustered(x, 2, 1, seed)[0].tolist())
            assert found == sorted([pytest.approx(x.mean(0).tolist()), [0.0, 5.0]], key=lambda c: c == [0.0, 5.0])
    assert both > 5


def test_kmeans_reports_and_draws_from_its_generator():
    x, done = points("normal", 40), []
    runs = [clim.kmeans(x, 6, 3, torch.Generator().manual_seed(seed), done.append)[0] for seed in (3, 3, 4)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2]) and done == [1, 2, 3] * 3


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
    ("normal", 40, 4, 12, 3), ("normal", 40, 1, 15, 4), ("normal", 40, 12, 8, 20), ("grid", 24, 3, 6, 5),
    ("repeated", 18, 2, 7, 4), ("equal", 9, 2, 4, 3), ("normal", 7, 2, 100, 20), ("normal", 1, 1, 4, 3),
    ("normal", 2, 2, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize("kind, n, m, k, count", CASES)
def test_select_positives(kind, n, m, k, count, natural):
    """natural: clusters of k-means; else any centres and any assignment, which Eq. 2 allows as well."""
    x = points(kind, n)
    centers, assignment = points("grid", m, seed=1), torch.randint(m, (n,), generator=torch.Generator().manual_seed(2))
    if natural:
        centers = clim.kmeans(x, m, generator=torch.Generator().manual_seed(0))[0].round(
            decimals=3 if kind == "normal" else 0
        )
        assignment = torch.tensor([min(range(len(centers)), key=lambda j: squared(row, centers[j])) for row in x])
    for seed in range(3):
        table = clim.select_positives(x, centers, assignment, k, count, torch.Generator().manual_seed(seed))
        assert table.shape == (n, count) and table.dtype == torch.int64
        for i, chosen in enumerate(table.tolist()):
            assert any(obeys(chosen, i, near, x, centers, assignment) for near in neighborhoods(x, i, k)), (i, chosen)


def test_select_positives_by_hand():
    """Points on a line, the centre at 0. Anchor 6 has candidates on both sides; only those closer to 0 are meant."""
    x = torch.tensor([[v] for v in (0.0, 1.0, -2.0, 3.0, 6.5, 7.5, 6.0, -6.0, 20.0)], dtype=torch.float64)
    assignment = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1])
    centers = torch.tensor([[0.0], [20.0]], dtype=torch.float64)

    def choose(k, count):
        return [
            set(row) for row in clim.select_positives(x, centers, assignment, k, count, common.generator(0)).tolist()
        ]

    assert choose(5, 3)[6] == {3, 1, 0}  # of 4, 5, 3, 1, 0 at distances 0.5, 1.5, 3, 5, 6
    assert choose(5, 4)[6] == {3, 1, 0, 4}  # topped up with the nearest of the rest
    assert choose(8, 5)[6] == {0, 1, 2, 3, 7}  # -6 is as far from the centre as 6: equality counts
    assert choose(3, 2)[0] == {1, 2}  # nothing is closer to the centre than what lies on it
    assert choose(2, 2)[8] == {5, 4}  # nothing in its cluster
    assert choose(8, 8)[6] == {0, 1, 2, 3, 4, 5, 7, 8}


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


def test_select_positives_with_given_neighbors():
    x, centers = points("normal", 40), points("grid", 3, seed=1)
    assignment = torch.arange(40) % 3
    near = clim.nearest_neighbors(x, 9)
    own, given = (
        clim.select_positives(x, centers, assignment, k, 4, common.generator(0), neighbors)
        for k, neighbors in ((9, None), (2, near))
    )
    assert torch.equal(own, given)


def test_positives_can_be_chosen_without_common():
    """The functions, copied into another program, need torch and math only."""
    names = "rows_per_chunk nearest_neighbors nearest_center kmeans take select_positives".split()
    program = {"torch": torch, "math": math}
    exec("".join(inspect.getsource(getattr(clim, name)) for name in names), program)
    x = points("normal", 30)
    clusters = program["kmeans"](x, 3, generator=common.generator(0))
    table = program["select_positives"](x, *clusters, 8, 4, common.generator(1))
    assert torch.equal(table, clim.select_positives(x, *clusters, 8, 4, common.generator(1)))


WRONG = {
    "neighbours of a vector": lambda x: clim.nearest_neighbors(x[0], 3),
    "no neighbours": lambda x: clim.nearest_neighbors(x, 0),
    "no clusters": lambda x: clim.kmeans(x, 0),
    "no rows": lambda x: clim.kmeans(x[:0], 3),
    "centres of another size": lambda x: clim.select_positives(x, x[:2, :1], torch.zeros(9, dtype=torch.int64)),
    "assignment of other rows": lambda x: clim.select_positives(x, x[:2], torch.zeros(8, dtype=torch.int64)),
    "neighbours of other rows": lambda x: clim.select_positives(
        x, x[:2], torch.zeros(9, dtype=torch.int64), neighbors=torch.zeros(8, 3, dtype=torch.int64)
    ),
    "partners of another size": lambda x: clim.cutmix(torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 4, 4), 0.5),
    "shares as a column": lambda x: clim.cutmix(*torch.zeros(2, 2, 3, 8, 8), torch.rand(2, 1)),
    "a share above 1": lambda x: clim.cutmix(*torch.zeros(2, 2, 3, 8, 8), 1.5),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(ValueError, match="takes"):
        call(points("normal", 9))


@pytest.mark.parametrize("selection", ["random", "knn", "kmeans", "center"])
def test_choose_positives(selection):
    """Table 6: what each choice may contain, and that it contains all of it now and then."""
    x = points("normal", 30).float()
    few, many = (
        clim.parse_args([*TINY, "--selection", selection, "--num-positives", str(count)]) for count in (3, 400)
    )
    for args in (few, many):
        args.num_clusters, args.knn_k = 4, 6
    tables = torch.stack([clim.choose_positives(few, x, common.generator(seed)) for seed in range(100)])
    assert tables.shape == (100, 30, 3) and tables.dtype == torch.int64
    assert torch.equal(tables[7], clim.choose_positives(few, x, common.generator(7)))
    near = [set(neighborhoods(x.double(), i, 6)[0]) for i in range(30)]
    if selection in ("random", "knn"):
        for i, seen in enumerate(tables.transpose(0, 1).flatten(1)):
            assert set(seen.tolist()) == (near[i] if selection == "knn" else set(range(30)))
        return
    for seed in range(5):
        centers, assignment = clim.kmeans(x, 4, generator=common.generator(seed))
        for i, (chosen, all_of_it) in enumerate(
            zip(tables[seed], clim.choose_positives(many, x, common.generator(seed)), strict=True)
        ):
            if selection == "kmeans":
                assert (assignment[chosen] == assignment[i]).all()
                assert set(all_of_it.tolist()) == set(torch.nonzero(assignment == assignment[i]).flatten().tolist())
            else:
                assert obeys(chosen.tolist(), i, near[i], x.double(), centers.double(), assignment)


# ------------------------------------------------------------------ CutMix, Eq. 3


def boxes(lam, height, width):
    """CutMix's rand_bbox for every centre: the boxes (top, bottom, left, right) and how many centres give each."""
    found = {}
    cut_h, cut_w = int(height * math.sqrt(1 - lam)), int(width * math.sqrt(1 - lam))
    for cy, cx in itertools.product(range(height), range(width)):
        edges = (
            np.clip([cy - cut_h // 2, cy + cut_h // 2], 0, height),
            np.clip([cx - cut_w // 2, cx + cut_w // 2], 0, width),
        )
        box = tuple(int(v) for v in np.concatenate(edges))
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
def test_cutmix_an_image(lam, height, width):
    """Every box that CutMix can draw, as often as it draws it; the share that is left, to the pixel."""
    n = 3000
    x, partner = torch.rand(n, 3, height, width) / 2, 0.5 + torch.rand(n, 3, height, width) / 2
    before = x.clone(), partner.clone()
    mixed, kept = clim.cutmix(x, partner, torch.full((n,), lam, dtype=torch.float64), torch.Generator().manual_seed(0))
    assert torch.equal(x, before[0]) and torch.equal(partner, before[1])
    assert mixed.dtype == x.dtype and kept.shape == (n,) and kept.dtype == torch.float64
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
    assert kept.min() >= lam - 1e-12  # the edge, and whole pixels, only make the box smaller
    if lam == 1:
        assert torch.equal(mixed, x) and (kept == 1).all()


def test_cutmix_a_batch():
    """A number: one box for all images, the share a number too; lam = 0 in the middle takes all of the partner."""
    x, partner, g = torch.zeros(4, 3, 8, 8), torch.ones(4, 3, 8, 8), torch.Generator().manual_seed(0)
    shares, whole = [], 0
    for step in range(300):
        lam = (step % 11) / 10
        mixed, kept = clim.cutmix(x, partner, lam, g)
        assert isinstance(kept, float) and all(torch.equal(m, mixed[0]) for m in mixed)
        box_of(mixed[0], x[0], partner[0])
        assert kept == pytest.approx(1 - mixed.mean().item(), abs=1e-7) and kept >= lam - 1e-12
        whole += kept == 0.0
        shares.append(kept)
        assert lam < 1 or kept == 1.0
    assert whole and np.mean(shares) > 0.6  # 0.5 were it not for the edge
    one, other = (clim.cutmix(x, partner, 0.4, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one[0], other[0]) and one[1] == other[1]


# ------------------------------------------------------------------------- views


class Grays:
    """Images of many sizes, each of one gray level: its index. As an ImageSet to common.ViewDataset."""

    array = None

    def __init__(self, n):
        self.all = np.stack([20 + 7 * (np.arange(n) % 5), 20 + 11 * (np.arange(n) % 4)], 1)

    def __len__(self):
        return len(self.all)

    def __getitem__(self, i):
        return np.full((*self.all[i], 3), i, np.uint8)

    def sizes(self, index):
        return self.all[index]


def data(positives, *flags, images=None):
    """What training cuts views from, with this table of positives; None: none are chosen yet."""
    args = clim.parse_args([*TINY, *flags])
    images = Grays(40) if images is None else images
    positives = torch.full((len(images), 3), -1, dtype=torch.int32) if positives is None else positives
    draw = functools.partial(clim.draw_views, args, images, positives)
    return common.ViewDataset(images, clim.augmentation(args), args.seed, draw=draw, extra_draws=1)


def drawn(data, epoch=0):
    """(cuts, colours (n, views, 9)) of all images."""
    index = np.arange(len(data.images))
    draws = common.uniform(data.seed, epoch, index, data.num_draws)
    cuts, colours = data.draw(index, data.images.sizes(index), draws)
    return cuts, np.stack(colours, 1)


def table_of(n, count=3, seed=0):
    return torch.randint(n, (n, count), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def assert_same_views(a, b, views):
    for (index, box, size), (other_index, other_box, other_size) in zip(a[0][:views], b[0][:views], strict=True):
        assert np.array_equal(index, other_index) and np.array_equal(box, other_box) and size == other_size
    assert np.array_equal(a[1][:, :views], b[1][:, :views])


@pytest.mark.parametrize(
    "flags, views", [((), 4), (("--mix", "none"), 3), (("--selection", "none"), 2), (("--resolutions", "16", "12"), 4)]
)
def test_own_views_are_the_baselines(flags, views):
    """Without a table there are two views, MoCo v2's. With one they stay, and others come, if they are used."""
    own = drawn(data(None, *flags))
    assert len(own[0]) == own[1].shape[1] == 2
    theirs = jcl.parse_args([*TINY, "--num-keys", "1"])
    assert_same_views(own, drawn(common.ViewDataset(Grays(40), jcl.augmentation(theirs), theirs.seed)), 2)
    partners = []
    for seed in (0, 1):
        more = drawn(data(table_of(40, seed=seed), *flags))
        assert len(more[0]) == more[1].shape[1] == views
        assert_same_views(own, more, 2)
        partners.append(more[0][-1][0])
    assert views == 2 or not np.array_equal(*partners)


@pytest.mark.parametrize("mix", ["cutmix", "none"])
def test_views_of_the_partner(mix):
    """It is one of the anchor's row, the same in all its views, cut inside its own bounds, each view for itself."""
    table, images = table_of(40), Grays(40)
    cuts, _ = drawn(data(table, "--mix", mix))
    partner = cuts[2][0]
    assert all(p in table[i] for i, p in enumerate(partner.tolist()))
    for view, (index, box, size) in enumerate(cuts):
        assert np.array_equal(index, partner if view >= 2 else np.arange(40)) and size == 16
        bounds, areas = images.sizes(index), box[:, 2] * box[:, 3]
        assert (box[:, :2] >= 0).all() and (box[:, 2:] > 0).all() and (box[:, :2] + box[:, 2:] <= bounds).all()
        assert (areas / bounds.prod(1) > 0.25).all()  # at least crop_scale of its own image
    cuts, colours = drawn(data(torch.arange(40, dtype=torch.int32)[:, None].repeat(1, 3), "--mix", mix))
    for a, b in itertools.combinations(range(len(cuts)), 2):  # of the same images
        assert np.array_equal(cuts[a][0], cuts[b][0]) and (cuts[a][1] == cuts[b][1]).all(1).mean() < 0.1
        assert (colours[:, a] == colours[:, b]).all(1).mean() < 0.1


def test_partners_are_drawn_uniformly_and_anew_each_epoch():
    n = 4000
    table = torch.arange(5, dtype=torch.int32).repeat(n, 1)  # a partner is the number of its column
    picks = [drawn(data(table, images=Grays(n)), epoch)[0][2][0] for epoch in (0, 1)]
    for pick in picks:
        assert abs(np.bincount(pick, minlength=5) - n / 5).max() < 5 * math.sqrt(n / 5)
    assert (picks[0] == picks[1]).mean() == pytest.approx(0.2, abs=0.04)


@pytest.mark.parametrize("resolutions, chosen", [("16 12", True), ("16 16", False), ("16 12 12", True)])
def test_a_repeated_resolution_repeats_the_boxes(resolutions, chosen):
    table, sizes = table_of(40) if chosen else None, resolutions.split()
    once, again = drawn(data(table)), drawn(data(table, "--resolutions", *sizes))
    views, copies = len(once[0]), len(sizes) + 1 - len(set(sizes))
    assert len(again[0]) == again[1].shape[1] == copies * views
    assert_same_views(once, again, 2)
    for view in range(views * (copies - 1)):
        first, second = again[0][view], again[0][view + views]
        assert np.array_equal(first[0], second[0]) and np.array_equal(first[1], second[1]) and first[2] == second[2]
        assert not np.array_equal(again[1][:, view], again[1][:, view + views])


def test_views_are_cut_from_the_right_images():
    """Every pixel tells which image it is of; a table that is filled later is seen."""
    kept, positives = table_of(40), torch.full((40, 3), -1, dtype=torch.int32)
    views = data(positives, "--resolutions", "16", "16")
    keys = [(2, i) for i in (5, 39, 0, 17)]
    assert len(views.__getitems__(keys)["views"]) == 4
    positives.copy_(kept)
    batch = views.__getitems__(keys)
    levels = torch.stack([v.flatten(1).float().std(1) for v in batch["views"]])
    assert len(batch["views"]) == 8 and batch["colour"].shape == (4, 8, len(common.COLOUR)) and (levels == 0).all()
    seen = torch.stack([v[:, 0, 0, 0] for v in batch["views"]]).tolist()
    for copy in (0, 4):
        assert seen[copy] == seen[copy + 1] == [5, 39, 0, 17] and seen[copy + 2] == seen[copy + 3] == seen[2]
    assert all(p in kept[i] for i, p in zip((5, 39, 0, 17), seen[2], strict=True))


# ------------------------------------------------------------------- the model


def tiny(flags=(), module=clim, name="CLIM"):
    args = module.parse_args([*TINY, *flags])
    args.bf16 = False
    torch.manual_seed(0)
    model = module.split_batch_norms(getattr(module, name)(args), args.bn_groups).double()
    for p in (*model.momentum_backbone.parameters(), *model.momentum_projector.parameters()):
        p.add_(0.1 * torch.randn_like(p))  # so that the two encoders differ
    return model


def test_an_encoder_that_does_not_take_every_resolution_is_refused(capsys):
    args = clim.parse_args([*TINY, *"--arch test_coatnet --image-size 160 --resolutions 160 96".split()])
    with pytest.raises(SystemExit) as stop:
        clim.CLIM(args)
    assert stop.value.code == 2 and "test_coatnet does not work" in capsys.readouterr().err


def random_views(count, seed=1, n=8):
    return list(torch.rand(count, n, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


def test_without_positives_it_is_moco_v2_exactly():
    ours, theirs = tiny(["--selection", "none", "--resolutions", "16"]), tiny(["--num-keys", "1"], jcl, "JCL")
    ours.load_state_dict(theirs.state_dict())
    views = random_views(2)
    for step in range(2):
        (a, keys, metrics), (b, other_keys, others) = ours(views, step), theirs(views, step, 4.0)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            a, clim.info_nce(metrics["q"], metrics["k"], ours.queue.keys, 0.2), rtol=1e-12, atol=0
        )
        for name in ("q", "k"):
            torch.testing.assert_close(metrics[name], others[name], rtol=1e-12, atol=1e-14)
        for model, loss, new in ((ours, a, keys), (theirs, b, other_keys)):
            model.zero_grad()
            loss.backward()
            model.update(0.9)
            model.queue.enqueue(new)
    for (name, p), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (p.grad is None) == name.startswith("momentum")
        torch.testing.assert_close(p, other, rtol=1e-12, atol=1e-14)
        assert p.grad is None or torch.allclose(p.grad, other.grad, rtol=1e-9, atol=1e-14)
    for one, two in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def recorded(monkeypatch):
    """A list of (x, partner, lam drawn, mixed) of the calls of cutmix from now on."""
    calls, cutmix = [], clim.cutmix

    def record(x, partner, lam, *args, **kwargs):
        mixed, kept = cutmix(x, partner, lam, *args, **kwargs)
        calls.append((x, partner, float(lam), mixed))
        return mixed, kept

    monkeypatch.setattr(clim, "cutmix", record)
    return calls


def resized(x, size):
    return x if size == 16 else F.interpolate(x, (size, size), mode="bilinear", antialias=True)


FORWARD = [
    ("cutmix", (16,)),
    ("cutmix", (16, 12, 12)),
    ("none", (16, 12)),
    ("none", (16, 16)),
    (None, (16,)),
    (None, (16, 12)),
]


@pytest.mark.parametrize("positives, resolutions", FORWARD)
def test_forward_is_eq6(resolutions, positives, monkeypatch):
    """The sum over all pairs of sizes of Eq. 4; with running statistics: an embedding is a function of its image."""
    model = tiny(["--resolutions", *map(str, resolutions), *(["--mix", positives] if positives else [])])
    per_copy = {"cutmix": 4, "none": 3, None: 2}[positives]
    copies = max(resolutions.count(r) for r in resolutions)
    views = random_views(per_copy * copies)
    model(views, 0)  # statistics of some batch
    model.eval()
    calls = recorded(monkeypatch)
    loss, keys, metrics = model(views, 5)
    lam = {"cutmix": None, "none": 0.5, None: 1.0}[positives]
    queries, anchors, partners, boxes = [], [], [], set()
    for i, size in enumerate(resolutions):
        copy = resolutions[:i].count(size)
        x, own, *others = views[copy * per_copy : (copy + 1) * per_copy]
        if positives == "cutmix":
            mixed = next(
                m for a, b, _, m in calls if torch.equal(a, x) and torch.equal(b, others[1])
            )  # mixed at full size
            boxes |= {box_of(*trio) for trio in zip(mixed, x, others[1], strict=True)}
            x, lam = mixed, (mixed == x).all(1).double().mean().item()  # the share after clipping, not the one drawn
        queries.append(model.query(resized(x, size)))
        anchors.append(model.key(resized(own, size)))
        partners.append(model.key(resized(others[0] if others else own, size)))
    assert len(boxes) == (positives == "cutmix") and (positives is None or lam < 1)  # one box for all images and sizes
    pairs = [
        eq4(q, a, p, model.queue.keys, 0.2, [lam] * 8) for q in queries for a, p in zip(anchors, partners, strict=True)
    ]
    assert len(pairs) == len(resolutions) ** 2
    torch.testing.assert_close(loss, sum(pairs), rtol=1e-10, atol=0)
    torch.testing.assert_close(metrics["q"], queries[0])
    torch.testing.assert_close(metrics["k"], anchors[0])
    gradients = torch.autograd.grad(sum(pairs), list(model.projector.parameters()))
    loss.backward()
    for p, gradient in zip(model.projector.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-8, atol=1e-12)
    assert all((p.grad is None) == n.startswith("momentum") for n, p in model.named_parameters())
    torch.testing.assert_close(keys, anchors[0])  # to enqueue: the anchors' own, at the largest size


@pytest.mark.parametrize("alpha", [2.0, 0.5])
def test_the_share_is_drawn_from_beta(alpha, monkeypatch):
    """Beta(alpha, alpha), anew at each step: the law of the numbers that cutmix is given."""
    args, calls, n = clim.parse_args([*TINY, "--alpha", str(alpha)]), recorded(monkeypatch), 300
    for step in range(n):
        clim.mix(args, *torch.zeros(2, 1, 3, 4, 4), step)
    s = np.sort([lam for _, _, lam, _ in calls])
    law = {2.0: 3 * s**2 - 2 * s**3, 0.5: 2 / np.pi * np.arcsin(np.sqrt(s))}[alpha]
    assert abs(law - (np.arange(n) + 0.5) / n).max() < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov, far beyond 0.1 %


@pytest.mark.parametrize("resolutions, views", [((16,), 2), ((16, 12), 4), ((16, 12), 3)])
def test_chance_is_the_loss_of_equal_logits(resolutions, views):
    model = tiny(["--resolutions", *map(str, resolutions), *(["--mix", "none"] if views == 3 else [])])
    model.query = model.key = lambda x: unit(1, 8).expand(len(x), -1)
    model.queue.keys.copy_(unit(1, 8).expand(16, -1))
    loss = model(random_views(views), 0)[0]
    assert loss.item() == pytest.approx(len(resolutions) ** 2 * math.log(17))


def test_refresh_embeds_with_the_momentum_encoder(capsys):
    """The table is that of backbone and projector, unit-length outputs, running statistics, for normalised images."""
    args = clim.parse_args([*TINY, "--selection", "knn", "--knn-k", "3", "--num-positives", "3"])
    device, args.bf16 = torch.device("cpu"), False
    args.backbone |= dict(mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3))
    array, labels = common.make_patterns(30, 16, 0)
    images = common.ImageSet("patterns", labels, common.PATTERNS, array)
    torch.manual_seed(0)
    model = clim.CLIM(args)
    for p in (*model.momentum_backbone.parameters(), *model.momentum_projector.parameters()):
        p.add_(0.3 * torch.randn_like(p))
    model([torch.randn(8, 3, 16, 16) for _ in range(2)], 0)
    positives = torch.full((30, 3), -1, dtype=torch.int32)
    clim.refresh(args, model, images, device, 0, positives)
    assert model.training and model.momentum_backbone.training
    model.eval()
    with torch.no_grad():
        x = torch.from_numpy(array).permute(0, 3, 1, 2) / 255
        x = (x - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
        x = model.momentum_projector(model.momentum_backbone(x)).double()
        x = x / x.square().sum(1, keepdim=True).sqrt()
    for i, row in enumerate(positives.tolist()):
        assert set(row) == set(neighborhoods(x, i, 3)[0])
    share = np.mean([labels[j] == labels[i] for i, row in enumerate(positives.tolist()) for j in row])
    assert f" {100 * share:.1f} % " in capsys.readouterr().out
    images.labels[::2] = -1  # without a label: nothing is known of a pair with such an image
    clim.refresh(args, model, images, device, 0, positives)
    pairs = [(images.labels[i], images.labels[j]) for i, row in enumerate(positives.tolist()) for j in row]
    share = np.mean([a == b for a, b in pairs if a >= 0 and b >= 0])
    assert f" {100 * share:.1f} % " in capsys.readouterr().out


# -------------------------------------------------------------- several processes


def member(index, port, folder):
    """Alone or one of two processes: tables of every selection, and two steps of float64 on its part of a batch."""
    world, rank = (1, 2, 2)[index], (0, 0, 1)[index]
    torch.set_num_threads(1)
    if world > 1:
        os.environ |= dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    common.ARCHS["resnet_nano"] = NANO
    flags = "--batch-size 16 --queue 24 --resolutions 16 12 --num-positives 3 --bn-groups 4".split()
    args = clim.parse_args([*TINY, *flags])
    args.bf16 = False
    device = common.join_processes(args)
    assert common.rank_and_world() == (rank, world)
    torch.manual_seed(0)
    model = clim.split_batch_norms(clim.CLIM(args), args.bn_groups)
    result = dict(tables={}, losses=[])
    for n, args.num_clusters, args.knn_k in ((101, 7, 9), (30, 40, 5), (16, 2, 50)):
        array, labels = common.make_patterns(n, 16, 0)
        array[2::3] = array[: len(array[2::3])]  # a third are copies of others
        images = common.ImageSet("patterns", labels, common.PATTERNS, array)
        for args.selection in ("random", "knn", "kmeans", "center"):
            table = torch.full((n, 3), -1, dtype=torch.int32)
            clim.refresh(args, model, images, device, 0, table)
            assert (table >= 0).all() and all(torch.equal(table, other) for other in common.from_all(table))
            result["tables"][f"{args.selection}-{n}"] = table
    model.double()
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if world > 1 else model
    mine = torch.stack(random_views(4, n=16)).view(4, world, -1, 3, 16, 16)[:, rank]
    for step in range(2):
        model.zero_grad()
        loss, keys, _ = wrapped(list(mine), step)
        loss.backward()
        model.queue.enqueue(keys)
        clim.average_statistics(model)
        result["losses"].append(clim.gather(loss.detach().view(1)).mean())
    queues = clim.gather(model.queue.keys.unsqueeze(0))
    assert all(torch.equal(queue, queues[0]) for queue in queues)
    result |= dict(gradients={n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    result |= dict(state=model.state_dict())
    if rank == 0:
        torch.save(result, f"{folder}/{world}.pt")
    if world > 1:
        del wrapped  # before the group: in torch 2.11 a DDP that goes last can hang for ever
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """What one process and two have got."""
    folder = tmp_path_factory.mktemp("groups")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.start_processes(member, (port, str(folder)), nprocs=3, start_method="forkserver")
    return load(folder / "1.pt"), load(folder / "2.pt")


@pytest.mark.slow
def test_two_processes_choose_the_same_positives(one_and_two):
    one, two = (result["tables"] for result in one_and_two)
    assert len(one) == 12 and one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@pytest.mark.slow
def test_two_processes_train_as_one(one_and_two):
    one, two = one_and_two
    assert len(one["gradients"]) > 10
    torch.testing.assert_close(two["losses"], one["losses"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(two["gradients"], one["gradients"], rtol=1e-8, atol=1e-10)
    for name, value in one["state"].items():
        if not name.endswith("num_batches_tracked"):  # counts where a process is one group
            torch.testing.assert_close(two["state"][name], value, rtol=1e-9, atol=1e-10, msg=name)


# ------------------------------------------------------------------- whole runs

# Four epochs of 4 steps: the first without positives, tables before the second and the fourth.
RUN = "--dataset patterns --arch resnet_nano --image-size 16 --batch-size 16 --queue 32 --knn-every 0".split()
RUN += "--epochs 4 --resolutions 16 12 --device cpu".split()
CHOICE = "--clim-start 1 --refresh-every 2 --num-clusters 6 --knn-k 8".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """68 patterns of 16 px as PNG files in train/, one folder a class."""
    root = tmp_path_factory.mktemp("patterns")
    for i, (image, label) in enumerate(zip(*common.make_patterns(68, 16, 0), strict=True)):
        path = root / "train" / f"kind{label % 4}" / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return root


def run(folder, out, *flags):
    """A run in this process; returns what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        clim.main(clim.parse_args([*RUN, "--data-dir", str(folder), "--out", str(out), *flags]))
    return said.getvalue()


def assert_same_state(one, two):
    """The same weights, optimiser and table, bit for bit."""
    for name in ("model", "optimizer", "positives", "step"):
        torch.testing.assert_close(load(one / "last.pt")[name], load(two / "last.pt")[name], rtol=0, atol=0)


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()[1:]]


@pytest.mark.slow
def test_stopped_continued_and_by_other_workers(folder, tmp_path):
    """In mid-epoch with a table, before an epoch without and one with a new table: bit for bit the same."""
    said = run(folder, tmp_path / "whole", *CHOICE, "--keep-every", "1")
    assert said.count("positives chosen") == 2 and "epoch 2: positives" in said and "epoch 4: positives" in said
    tables = [load(tmp_path / "whole" / f"epoch-000{epoch}.pt")["positives"] for epoch in (1, 2, 3, 4)]
    assert (tables[0] == -1).all() and (tables[1] >= 0).all() and (tables[1] < 68).all()
    assert torch.equal(tables[1], tables[2]) and not torch.equal(tables[1], tables[3])
    chosen = []
    for stop, workers in ((6, 2), (8, 0), (12, 2), (None, 0)):  # the first two workers live on over the first table
        flags = ["--workers", str(workers), *(["--max-steps", str(stop)] if stop else [])]
        chosen.append(run(folder, tmp_path / "parts", *CHOICE, *flags).count("positives chosen"))
        assert load(tmp_path / "parts" / "last.pt")["step"] == (stop or 16)
    assert chosen == [1, 0, 0, 1]
    assert_same_state(tmp_path / "whole", tmp_path / "parts")
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts") and len(losses(tmp_path / "whole")) == 4


@pytest.mark.slow
def test_from_and_to_the_baseline(folder, tmp_path):
    """Before the first table it is its baseline; the baseline's checkpoint goes on with positives, and the reverse."""
    run(folder, tmp_path / "whole", *CHOICE, "--keep-every", "1", "--max-steps", "8")
    said = run(folder, tmp_path / "none", "--selection", "none", "--keep-every", "1", "--max-steps", "8")
    assert "chosen" not in said and (load(tmp_path / "none" / "last.pt")["positives"] == -1).all()
    ours, plain = ([load(tmp_path / out / f"epoch-000{e}.pt")["model"] for e in (1, 2)] for out in ("whole", "none"))
    torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=0)
    assert not all(torch.equal(ours[1][name], plain[1][name]) for name in ours[1])
    baseline = str(tmp_path / "none" / "last.pt")
    said = run(folder, tmp_path / "late", *CHOICE, "--resume", baseline, "--max-steps", "9")
    assert "epoch 3: positives chosen" in said  # it has none yet, so they are chosen before their turn
    second = str(tmp_path / "whole" / "epoch-0002.pt")
    said = run(folder, tmp_path / "plain", "--selection", "none", "--resume", second, "--max-steps", "9")
    assert "chosen" not in said and "step 9: loss" in said


@pytest.mark.slow
def test_a_stop_while_positives_are_chosen(folder, tmp_path, monkeypatch):
    """Everything is saved before, so it is answered at once; the same command makes up for it."""
    flags = [*CHOICE, "--save-every", "4", "--max-steps", "8"]
    run(folder, tmp_path / "whole", *flags)
    choose = clim.choose_positives

    def stop(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return choose(*args)

    monkeypatch.setattr(clim, "choose_positives", stop)
    with pytest.raises(SystemExit) as end:
        run(folder, tmp_path / "parts", *flags)
    assert end.value.code == 75 and load(tmp_path / "parts" / "last.pt")["step"] == 4
    monkeypatch.setattr(clim, "choose_positives", choose)
    assert "epoch 2: positives chosen" in run(folder, tmp_path / "parts", *flags)
    assert_same_state(tmp_path / "whole", tmp_path / "parts")


SHOWN = [([], 6), (["--mix", "none", "--resolutions", "16", "16"], 3), (["--selection", "none"], 2)]


@pytest.mark.parametrize("flags, rows", SHOWN)
def test_show_views(flags, rows, folder, tmp_path, monkeypatch):
    """A row per view, then the mix of training's first step, and the mix with its box in a red frame."""
    sheets = []

    def keep(path, images, labels):
        sheets.append(dict(zip(labels, images, strict=True)))

    monkeypatch.setattr(common, "save_grid", keep)
    run(folder, tmp_path / "run", *flags, "--show-views", str(tmp_path / "views.png"))
    (sheet,) = sheets
    assert len(sheet) == rows and not (tmp_path / "run").exists()
    if rows == 6:
        query, partner, mixed, framed = (
            sheet[label] for label in ("query", "positive's query", "mixed query", "its box, framed")
        )
        trained, _ = clim.mix(clim.parse_args(TINY), query, partner, step=0)
        top, bottom, left, right = box_of(mixed[0], query[0], partner[0])
        red = (framed == torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)).all(1)
        around = torch.zeros(16, 16, dtype=torch.bool)
        around[max(0, top - 1) : bottom + 1, max(0, left - 1) : right + 1] = True
        around[top:bottom, left:right] = False
        assert torch.equal(mixed, trained) and around.any() and all(torch.equal(r, around) for r in red)


@pytest.mark.slow
def test_own_images_and_encoder(tmp_path):
    """Positives come from a user's own Dataset, through a user's own encoder; auto is a cluster per 128 images."""
    array, labels = common.make_patterns(300, 16, 0)
    encoder = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    images = [(Image.fromarray(image), int(label)) for image, label in zip(array, labels, strict=True)]
    tables = []
    for clusters in ([], ["--num-clusters", "2"], ["--num-clusters", "50"]):
        out = tmp_path / f"own{len(tables)}"
        flags = [*RUN, *"--dataset folder --bn-groups 2 --clim-start 0 --max-steps 1 --out".split(), str(out)]
        clim.main(clim.parse_args([*flags, *clusters]), train=images, encoder=encoder)
        tables.append(load(out / "last.pt")["positives"])
    assert tables[0].shape == (300, 10) and (tables[0] >= 0).all()
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])


def test_epochs_without_positives_are_told(folder, tmp_path):
    said = run(folder, tmp_path / "run", "--clim-start", "4", "--max-steps", "1")
    assert "no positives will be chosen" in said


# --------------------------------------------------------------------- arguments

MISTAKES = """
    --variant released
    --image-size 32 --resolutions 24 16
    --image-size 32 --resolutions 32 48
    --resolutions 16 0
    --num-clusters 0
    --knn-k 0
    --knn-k 100000
    --num-positives -1
    --refresh-every 0
    --clim-start -1
    --kmeans-iterations 0
    --alpha 0
    --alpha nan
    --alpha inf
    --arch vit_micro --patch-size 4 --resolutions 32 18
    --selection best
    --selection none --mix none
    --selection none --alpha 1
    --selection none --num-clusters 5
    --selection none --kmeans-iterations 5
    --selection none --knn-k 5
    --selection none --num-positives 5
    --selection none --refresh-every 5
    --selection none --clim-start 5
    --selection random --num-clusters 5
    --selection random --kmeans-iterations 5
    --selection random --knn-k 5
    --selection knn --num-clusters 5
    --selection knn --kmeans-iterations 5
    --selection kmeans --knn-k 5
    --mix none --alpha 1
"""


@pytest.mark.parametrize("flags", MISTAKES.strip().splitlines())
def test_mistakes_end_with_an_error_message(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        clim.parse_args(flags.split())
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and said.err.endswith("\n")


def values(args, names):
    return [getattr(args, name) for name in names.split()]


def test_recipes():
    paper = clim.parse_args(["--dataset", "imagenet"])
    assert values(paper, "num_clusters knn_k num_positives refresh_every") == [10000, 40, 10, 5]  # App. A.2
    assert values(paper, "arch batch_size lr lr_batch weight_decay") == ["resnet50", 512, 0.06, 512, 1e-4]
    assert values(paper, "alpha temperature queue momentum dim bn_groups") == [2.0, 0.2, 65536, 0.999, 128, 16]
    assert values(paper, "resolutions selection mix") == [(224, 160), "center", "cutmix"]
    assert clim.parse_args("--dataset imagenet --selection knn".split()).knn_k == 10  # Table 6
    assert clim.parse_args("--dataset imagenet --selection knn --knn-k 20".split()).knn_k == 20
    for flags, sizes in (
        ("--dataset cifar10 --resolutions 24 40", (40, 24)),
        ("--dataset cifar10 --image-size 48", (48,)),
        ("--dataset imagenet --image-size 224", (224, 160)),  # as without
        ("--dataset imagenet --image-size 192", (192,)),
    ):
        args = clim.parse_args(flags.split())
        assert args.resolutions == sizes and args.image_size == sizes[0]
