"""clim.py matches slow references written from the paper (Eq. 1-6, App. A.2), also in limit cases."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from conftest import INFO, Pictures, assert_same, blank, first_call, generator, info_nce, ks, random_views, unit, values
from torch import nn

import clim
import common


def points(kind, n, dims=3, seed=0):
    """Return float64 rows: normal, on a coarse grid (distances tie, and sums are exact), repeated, or all equal."""
    g = generator(seed)
    if kind == "normal":
        return torch.randn(n, dims, dtype=torch.float64, generator=g)
    grid = torch.randint(-2, 3, (n, dims), generator=g).double()
    return {"grid": grid, "repeated": grid[torch.arange(n) // 3], "equal": grid[:1].expand(n, -1).clone()}[kind]


def eq4(q, k_anchor, k_positive, queue, tau, lam):
    """Return the loss of Eq. 4, computed query by query."""
    return lam * info_nce(q, k_anchor, queue, tau) + (1 - lam) * info_nce(q, k_positive, queue, tau)


@pytest.mark.parametrize("tau, lam", [(0.07, 0.3), (0.2, 0.0), (0.2, 1.0), (1.0, 0.7)])
def test_clim_loss_is_eq4(tau, lam):
    q, anchor, positive, queue = unit(4, 6, grad=True), unit(4, 6, seed=1), unit(4, 6, seed=2), unit(9, 6, seed=3)
    reference = eq4(q, anchor, positive, queue, tau, lam)
    for loss in (clim.clim_loss, torch.compile(clim.clim_loss, fullgraph=True, backend="eager")):
        assert_same(loss(q, anchor, positive, queue, tau, lam), reference, q)


def test_nearest_neighbors():
    """Neighbors are exact in tight clusters, in float32, far from 0 and over chunks, and exclude the row itself."""
    tight = F.normalize(unit(3, 16)[torch.arange(300) % 3] + 1e-4 * points("normal", 300, 16), dim=1)
    cases = [(points("normal", 7), 100), (points("repeated", 9), 4), (tight, 5), (tight.float(), 5), (tight + 9, 5)]
    for x, k in cases:
        distance = (x.double()[:, None] - x.double()).square().sum(2).fill_diagonal_(math.inf)
        found, expected = clim.nearest_neighbors(x, k), distance.sort(1).values[:, : min(k, len(x) - 1)]
        torch.testing.assert_close(distance.gather(1, found), expected, rtol=0, atol=1e-14)
    rows = torch.tensor([7, 3, 299, 0])
    assert torch.equal(clim.nearest_neighbors(x, 5, rows), found[rows])


def clustered(x, m, iterations, seed=0):
    """Run k-means. Assert that each row has its nearest center, and return (centers, sum of squared distances)."""
    centers, assignment = clim.kmeans(x, m, iterations, generator(seed))
    assert centers.shape == (min(m, len(x)), x.shape[1]) and assignment.shape == (len(x),)
    distances = (x[:, None] - centers).square().sum(2)
    assigned = distances[torch.arange(len(x)), assignment]
    assert (assigned <= distances.min(1).values * (1 + 1e-9) + 1e-9).all()
    return centers, assigned.sum().item()


@pytest.mark.parametrize("iterations, far", [(1, 0.0), (2, 0.0), (6, 0.0), (6, 1e8)])
def test_kmeans_is_lloyds_algorithm(iterations, far):
    """The centers start at rows and follow Lloyd's algorithm, even far from 0, where the last digit is about 1e-8."""
    x, atol = far + points("normal", 60) + 4 * points("grid", 60, seed=10).sign(), 1e-7 if far else 1e-12
    start, ours = (clustered(x, 5, steps)[0] for steps in (0, iterations))
    row = (x - start[:, None]).abs().amax(2).min(1)
    assert len({*row.indices.tolist()}) == 5 and row.values.max() <= atol
    expected = start
    for _ in range(iterations):  # no cluster becomes empty here
        nearest = (x[:, None] - expected).square().sum(2).argmin(1)
        expected = torch.stack([x[nearest == j].mean(0) for j in range(5)])
    torch.testing.assert_close(ours - far, expected - far, rtol=1e-9, atol=atol)


@pytest.mark.parametrize("kind, n, m", [("repeated", 15, 5), ("repeated", 15, 9), ("equal", 6, 3), ("normal", 3, 50)])
def test_kmeans_as_many_clusters_as_points(kind, n, m):
    """An empty cluster restarts at the point that is farthest from its center, so every point ends at a center."""
    for seed in range(5):
        assert clustered(points(kind, n), m, 10, seed)[1] < 1e-20


def obeys(chosen, i, neighbors, x, centers, assignment):
    """Return whether Eq. 2 and App. A.2 allow the chosen positives of row i, given its neighbors."""
    center = centers[assignment[i]]
    omega1 = {j for j in range(len(x)) if assignment[j] == assignment[i]}
    omega_p = {j for j in omega1 & set(neighbors) if torch.dist(x[j], center) <= torch.dist(x[i], center)}
    size = min(len(chosen), len(neighbors))
    if len(omega_p) >= size:
        right = len(set(chosen)) == size and set(chosen) <= omega_p
    else:
        topped_up = sorted(torch.dist(x[i], x[j]) for j in set(chosen) - omega_p)
        nearest = sorted(torch.dist(x[i], x[j]) for j in neighbors if j not in omega_p)[: size - len(omega_p)]
        right = omega_p <= set(chosen) <= set(neighbors) and topped_up == nearest
    times = [chosen.count(j) for j in set(chosen)]
    return right and max(times) - min(times) <= 1  # if there are too few, all are repeated about equally often


@pytest.mark.parametrize("kind, n, clusters, k, count", [
    ("normal", 40, 4, 12, 3), ("normal", 40, 12, 8, 20), ("grid", 24, 3, 6, 5), ("repeated", 18, 2, 7, 4),
    ("equal", 9, 2, 4, 3), ("normal", 7, 2, 100, 20), ("normal", 2, 2, 1, 1),
])  # fmt: skip
def test_select_positives_is_eq2(kind, n, clusters, k, count):
    x, centers = points(kind, n), points("grid", clusters, seed=1)
    neighbors = clim.nearest_neighbors(x, k)
    for seed in range(3):
        assignment = torch.randint(clusters, (n,), generator=generator(seed))
        table = clim.select_positives(x, centers, assignment, neighbors, count, generator(seed))
        assert table.shape == (n, count)
        for i, near in enumerate(neighbors.tolist()):
            assert obeys(table[i].tolist(), i, near, x, centers, assignment), i


def test_select_positives_is_uniform():
    """If 3 of 8 candidates are selected, each is equally likely in each place."""
    x, g = torch.arange(10.0)[:, None], generator(0)  # row 8 is the anchor; row 9 is farther from the center, 0
    center, assignment = torch.zeros(1, 1), torch.zeros(10, dtype=torch.int64)
    neighbors = clim.nearest_neighbors(x, 9)
    rows = torch.stack([clim.select_positives(x, center, assignment, neighbors, 3, g)[8] for _ in range(2000)])
    for place in rows.T:
        counts = place.bincount(minlength=10)
        assert (counts[:8] - 250).abs().max() < 5 * math.sqrt(250) and counts[8:].sum() == 0


@pytest.mark.parametrize("lam, height, width", [(0.0, 5, 5), (0.2, 6, 8), (0.81, 6, 8), (1.0, 5, 5)])
def test_cutmix(lam, height, width):
    """Boxes occur as often as in CutMix's rand_bbox, equal in all images, and the returned fraction is exact."""
    x, partner, g = torch.rand(2, 3, height, width) / 2, 0.5 + torch.rand(2, 3, height, width) / 2, generator(0)
    n, count, expected = 3000, Counter(), Counter()
    for _ in range(n):
        mixed, kept = clim.cutmix(x, partner, lam, g)
        of_partner = mixed == partner
        box = of_partner[0, 0]
        assert (of_partner == box).all() and ((mixed == x) ^ of_partner).all()
        assert kept == pytest.approx(1 - box.double().mean().item(), abs=1e-12)
        count[box.numpy().tobytes()] += 1
    cut_h, cut_w = int(height * math.sqrt(1 - lam)), int(width * math.sqrt(1 - lam))
    for cy, cx in itertools.product(range(height), range(width)):
        top, bottom = np.clip([cy - cut_h // 2, cy + cut_h // 2], 0, height)
        left, right = np.clip([cx - cut_w // 2, cx + cut_w // 2], 0, width)
        mask = np.zeros((height, width), bool)
        mask[top:bottom, left:right] = True
        expected[mask.tobytes()] += 1
    assert count.keys() == expected.keys()
    for mask, centers in expected.items():
        often = n * centers / (height * width)
        assert abs(count[mask] - often) < 5 * math.sqrt(often)


def data_set(flags=""):
    """Return the dataset that `main` passes to its loader. Red is the image's index; green and blue are coordinates."""
    index, x, y = np.meshgrid(np.arange(40), 8 * np.arange(32), 8 * np.arange(32), indexing="ij")
    images = Pictures(np.stack([index, x, y], 3).astype(np.uint8))
    return first_call("clim.DataLoader", clim, f"--batch-size 8 --image-size 16 {flags}", images)[0]


@pytest.mark.parametrize("flags, others", [
    ("", 2), ("--mix none", 1), ("--image-size 12 16", 2), ("--local-crops 2 --local-size 8", 4),
    ("--local-crops 2 --local-size 8 --same-crop", 4),
])  # fmt: skip
def test_views_of_the_image_and_of_its_positive(flags, others):
    """Once positives are chosen, items also have views of one of them. With --same-crop, key and query share a crop."""
    images, own, equal = data_set(flags), [16, 16, 8, 8][: max(2, others)], Counter()
    table = torch.randint(40, (40, 10), generator=generator(0), dtype=torch.int32)
    views, none = images[7]
    assert ([x.shape[-1] for x in views], none) == (own, []) and len(images) == 40
    images.positives.copy_(table)
    for index in range(40):
        views, others_views = images[index]
        assert [x[0].unique().item() for x in views] == [index] * len(own) and [x.shape[-1] for x in views] == own
        (positive,) = {x[0].unique().item() for x in others_views}
        assert positive in table[index] and [x.shape[-1] for x in others_views] == own[:others]
        boxes = enumerate(x[1:] for x in (*views, *others_views))
        equal.update((i, j) for (i, x), (j, y) in itertools.combinations(boxes, 2) if torch.equal(x, y))
    same = {(0, 1): 40, (4, 5): 40} if "same-crop" in flags else {}
    assert {pair: count for pair, count in equal.items() if count > 2} == same


def test_positives_are_drawn_uniformly_and_anew_each_time():
    images, n = data_set("--mix none"), 1000
    images.positives.copy_(torch.arange(10).expand(40, -1))  # the positive in column j is image j
    drawn = torch.tensor([images[3][1][0][0].unique().item() for _ in range(n)])  # the red of its view
    assert (drawn.bincount(minlength=10) - n / 10).abs().max() < 5 * math.sqrt(n / 10)  # image 0 is a positive, too
    assert (drawn[1:] == drawn[:-1]).double().mean().item() == pytest.approx(0.1, abs=0.04)


def model_of(sizes=(16,)):
    layers = nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    model = clim.CLIM(nn.Sequential(*layers), 16, sizes, dim=8, queue=16).double()
    for p in (*model.momentum_backbone.parameters(), *model.momentum_projector.parameters()):
        p.add_(0.1 * torch.randn_like(p))  # so that the two encoders differ
    return model


@pytest.mark.parametrize("keys, sizes, local_crops", [(1, (16, 12), 0), (2, (16, 12), 2), (2, (16, 16), 1)])
def test_forward_is_eq6(keys, sizes, local_crops):
    """The loss sums Eq. 4 (or Eq. 1) over all pairs of sizes, and over local crops with keys of the largest size."""
    model, (query, *key_views) = model_of(sizes), random_views(1 + keys, 8)
    crops, shares = random_views(local_crops, 8, size=8), [0.7, 0.9, 0.4][: 1 + local_crops]
    model([query, *crops], shares, key_views)  # updates the running statistics
    model.eval()  # so that an embedding depends only on its image
    loss, enqueued, q, _ = model([query, *crops], shares, key_views)

    def resized(x, i):
        x = x if sizes[i] == 16 else F.interpolate(x, (sizes[i],) * 2, mode="bilinear", antialias=True)
        return x.flip(-1) if sizes[i] in sizes[:i] else x  # D4

    queries = [model.query(resized(query, i)) for i in range(len(sizes))]
    key_pairs = [[model.key(resized(view, i)) for view in (key_views[0], key_views[-1])] for i in range(len(sizes))]
    terms = [(one, *pair, 0.7) for one, pair in itertools.product(queries, key_pairs)]
    terms += [(model.query(x), *key_pairs[0], share) for x, share in zip(crops, shares[1:], strict=True)]
    expected = sum(eq4(*vectors, model.queue.keys, 0.2, share) for *vectors, share in terms)
    assert_same(loss, expected, *model.projector.parameters())
    torch.testing.assert_close((q, enqueued), (queries[0], key_pairs[0][0]))  # both at the largest size


def test_mix_queries():
    """Each view has one box for all images, and its share is the fraction left. Without partners, nothing is mixed."""
    views = random_views(4, 8)
    queries, partners = views[:2], views[2:]
    mixed, shares = clim.mix_queries(queries, partners, 2.0)
    for x, y, partner, share in zip(mixed, queries, partners, shares, strict=True):
        of_x = (x == y).all(1)
        assert ((x == y) | (x == partner)).all() and (of_x == of_x[0]).all()
        assert share == pytest.approx(of_x.double().mean().item()) and 0 < share < 1
    mixed, shares = clim.mix_queries(queries, [], 2.0)
    assert all(x is y for x, y in zip(mixed, queries, strict=True)) and shares == [0.5, 0.5]


def test_each_share_is_drawn_from_beta(monkeypatch):
    shares = []
    monkeypatch.setattr(clim, "cutmix", lambda x, partner, lam: (x, shares.append(lam)))
    for _ in range(150):
        clim.mix_queries([None] * 2, [None] * 2, 0.5)
    assert len({*shares}) == 300
    assert ks(2 / np.pi * np.arcsin(np.sqrt(shares))) < 1.95  # a larger value has a probability of 0.1%


@pytest.mark.parametrize("selection, count, flags", [
    ("random", 400, ""), ("knn", 6, "--knn-k 6"), ("kmeans", 400, "--num-clusters 20"),
    ("center", 3, "--knn-k 6 --num-clusters 4"),
])  # fmt: skip
def test_choose_positives(selection, count, flags, monkeypatch, capsys):
    """Each selection (Table 6) gives exactly the images that it should, by the momentum encoder's embeddings."""
    clusters, kmeans = [], clim.kmeans
    monkeypatch.setattr(clim, "kmeans", lambda *a, **b: clusters.append(kmeans(*a, **b)) or clusters[0])
    args = clim.parse_args(f"--image-size 16 --selection {selection} --num-positives {count} {flags}".split())
    images, model, (query, key) = common.Patterns(30, 16, 0), model_of().float(), random_views(2, 8)
    model([query.float()], [1.0], [key.float()])  # updates the running statistics
    table = clim.choose_positives(args, model, images, INFO, torch.device("cpu"), args.num_clusters)
    assert model.momentum_backbone.training and table.shape == (30, count)
    labels = torch.as_tensor(images.targets)
    assert f" {100 * (labels[:, None] == labels[table]).double().mean():.1f}% " in capsys.readouterr().out

    model.eval()
    pixels = torch.from_numpy(images.images).permute(0, 3, 1, 2).contiguous()  # channels_last would round differently
    x = common.normalize(pixels / 255, INFO["mean"], INFO["std"])
    with torch.no_grad():
        x = F.normalize(model.momentum_projector(model.momentum_backbone(x)), dim=1).double()
    neighbors, (centers, assignment) = clim.nearest_neighbors(x, 6), clusters[0] if clusters else (None, [0] * 30)
    assert centers is None or (centers - x[:, None]).square().sum(2).argmin(1).equal(assignment)
    for i, chosen in enumerate(table.tolist()):
        near, others = neighbors[i].tolist(), {*range(30)} - {i}
        members = {j for j in others if assignment[j] == assignment[i]} or others  # some are alone (D1)
        if selection == "center":
            assert obeys(chosen, i, near, x, centers, assignment)
        else:
            assert {*chosen} == dict(random=others, knn={*near}, kmeans=members)[selection]


def test_the_clusters_of_a_folder_are_one_per_128_images(here):
    flags = "--dataset folder --selection kmeans --clim-start 0 --arch resnet_micro --image-size 16 --batch-size 64"
    for count, clusters in ((100, 1), (128, 1), (1300, 10)):
        assert first_call("clim.choose_positives", clim, flags, blank(count, 16))[-1] == clusters


def test_positives_are_chosen_at_the_start_and_every_few_epochs(monkeypatch, tmp_path):
    events, rate = [], clim.learning_rate
    monkeypatch.setattr(clim, "learning_rate", lambda args, epoch: events.append(epoch) or rate(args, epoch))
    monkeypatch.setattr(clim, "choose_positives", lambda *_: events.append("choice") or torch.zeros(16, 10))
    tiny.run("clim", tmp_path, *"--clim-start 3 --refresh-every 2 --epochs 8 --knn-every 0".split(), train=blank(16))
    assert events == [0, 1, 2, "choice", 3, 4, "choice", 5, 6, "choice", 7]


def test_recipes():
    paper = dict(num_clusters=10000, knn_k=40, num_positives=10, refresh_every=5)  # App. A.2
    paper |= dict(arch="resnet50", batch_size=512, lr=0.03, weight_decay=1e-4, alpha=2.0, temperature=0.2, queue=65536)
    paper |= dict(momentum=0.999, dim=128, bn_groups=16, image_size=[224, 160], selection="center", mix="cutmix")
    assert values(clim, "--dataset imagenet", " ".join(paper)) == [*paper.values()]
    assert values(clim, "--dataset cifar10", "batch_size lr") == [512, 0.03]
    assert values(clim, "--dataset imagenet --selection knn", "knn_k") == [10]  # Table 6
    assert values(clim, "--image-size 24 40", "image_size") == [[40, 24]]  # the largest first
    for flags in ("--selection none", "--local-crops 2"):  # Table 7's multi-crop has one size
        assert values(clim, f"--dataset imagenet {flags}", "image_size") == [[224]]
    terms = {"": 4, "--image-size 64": 1, "--selection none": 1, "--local-crops 2": 3}  # they are summed (D3)
    terms["--local-crops 2 --image-size 224 160"] = 6
    for flags, count in terms.items():
        for dataset in ("imagenet100", "folder"):
            assert values(clim, f"--dataset {dataset} --data-dir x {flags}", "lr") == [0.03 / count]
