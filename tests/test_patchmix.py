"""PatchMix against slow references written from the paper (arXiv 2306.12243), its limit cases and its tables."""

import math
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common
import patchmix

TINY = "--arch vit_micro --image-size 16 --patch-size 4 --batch-size 12 --num-mix 3 --mix-slices 2 --epochs 10".split()


@pytest.fixture
def double(monkeypatch):
    """Everything in float64, so that a difference is an error and not rounding."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def make_model(monkeypatch):
    """A function: flags -> (args, small model whose momentum encoder differs from its encoder)."""
    torch.set_num_threads(1)  # so small that threads only wait for each other

    def make(*flags):
        for name, value in (("hidden", 16), ("dim", 8)):
            monkeypatch.setitem(patchmix.RECIPES["patterns"], name, value)
        args = patchmix.parse_args([*TINY, *flags])
        args.bf16 = False
        torch.manual_seed(0)
        model = patchmix.group_batch_norms(patchmix.PatchMix(args), args.bn_groups)
        for p in (*model.momentum_backbone.parameters(), *model.momentum_projector.parameters()):
            p.data.add_(0.1 * torch.randn(p.shape))
        return args, model

    return make


def views_of(args, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(args.batch_size, 3, args.image_size, args.image_size, generator=g) for _ in range(2)]


# ------------------------------------------------------------------ patch_mix


def mix_by_loops(images, num_mix, ph, pw, k):
    """Eq. 1-7, patch by patch: shuffled patch j of mixed image i is patch k(j) of image u(i, m), m = floor(j / S)."""
    n, _, height, width = images.shape
    tokens, columns = (height // ph) * (width // pw), width // pw
    size, mixed = tokens // num_mix, torch.zeros_like(images)
    for i in range(n):
        for j in range(tokens):
            m = j // size if j < size * num_mix else 0  # what is left over stays
            row, column = divmod(int(k[j]), columns)
            place = (..., slice(row * ph, row * ph + ph), slice(column * pw, column * pw + pw))
            mixed[i][place] = images[(i + m) % n][place]
    return mixed


def mix_by_index(images, num_mix, ph, pw, k):
    """Algorithm 1 with the 1-d index of Eq. 8-9 (17) on the flattened patch groups."""
    n, c, height, width = images.shape
    rows, columns = height // ph, width // pw
    x = images.view(n, c, rows, ph, columns, pw).permute(0, 2, 4, 1, 3, 5).reshape(n, rows * columns, -1)[:, k]
    size = rows * columns // num_mix
    groups = x[:, : size * num_mix].reshape(n * num_mix, size, -1)
    l = torch.arange(n * num_mix)  # noqa: E741  (the paper's letter)
    q = (l + (l % num_mix) * num_mix) % (n * num_mix)
    x = torch.cat([groups[q].view(n, size * num_mix, -1), x[:, size * num_mix :]], 1)[:, k.argsort()]
    return x.view(n, rows, columns, c, ph, pw).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)


MIXES = [  # N, M, (H, W), (p_h, p_w)
    (4, 3, (8, 8), (2, 2)),  # 16 patches: one is left over; N is no multiple of M
    (7, 3, (8, 12), (4, 2)),  # not square
    (6, 4, (12, 8), (3, 4)),
    (5, 3, (6, 10), (2, 2)),
    (3, 3, (8, 8), (4, 4)),  # N < 2M - 1, and four patches
    (2, 4, (6, 6), (2, 2)),  # N < M: an image meets itself again
    (4, 9, (6, 6), (2, 2)),  # M = T
    (3, 1, (8, 8), (2, 2)),
]


@pytest.mark.parametrize("n, num_mix, size, patch", MIXES)
def test_patch_mix_eq_1_to_9(n, num_mix, size, patch):
    g = torch.Generator().manual_seed(n)
    x, weight = (torch.randn(n, 2, *size, dtype=torch.float64, generator=g) for _ in range(2))
    k = torch.randperm(size[0] // patch[0] * (size[1] // patch[1]), generator=g)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    mixed = patchmix.patch_mix(ours, num_mix, patch if patch[0] != patch[1] else patch[0], k)
    gradient = torch.autograd.grad((mixed * weight).sum(), ours)[0]
    for reference in (mix_by_loops, mix_by_index):
        expected = reference(theirs, num_mix, *patch, k)
        assert torch.equal(mixed, expected)
        torch.testing.assert_close(gradient, torch.autograd.grad((expected * weight).sum(), theirs)[0])


@pytest.mark.parametrize("n, num_mix, size, patch", [c for c in MIXES if c[0] >= c[1]])
def test_patch_mix_keeps_places_and_shares(n, num_mix, size, patch):
    """Every pixel comes from its own place; each source gives floor(T / M) patches, the own one the rest, too."""
    pixels = 3 * size[0] * size[1]
    mixed = patchmix.patch_mix(torch.arange(n * pixels).view(n, 3, *size), num_mix, patch)
    assert torch.equal(mixed % pixels, torch.arange(pixels).view(3, *size).expand_as(mixed))
    area, tokens = patch[0] * patch[1], size[0] * size[1] // (patch[0] * patch[1])
    for i in range(n):
        sources, counts = (mixed[i, 0] // pixels).unique(return_counts=True)
        expected = {(i + m) % n: tokens // num_mix * area for m in range(num_mix)}
        expected[i] += tokens % num_mix * area
        assert dict(zip(sources.tolist(), counts.tolist(), strict=True)) == expected


def test_patch_mix_draws_its_own_permutation():
    x = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 16, 16)
    assert torch.equal(patchmix.patch_mix(x, 1, 4), x)
    torch.manual_seed(0)
    assert len({patchmix.patch_mix(x, 2, 4).numpy().tobytes() for _ in range(4)}) == 4


@pytest.mark.parametrize("num_mix, patch", [(2, 3), (2, (4, 3)), (2, (3, 4)), (0, 4), (5, 4)])
def test_patch_mix_refuses(num_mix, patch):
    with pytest.raises(ValueError, match="num_mix" if patch == 4 else "do not tile"):
        patchmix.patch_mix(torch.zeros(8, 3, 8, 8), num_mix, patch)


# ---------------------------------------------------------------- mix_targets


@pytest.mark.parametrize("n, num_mix", [(9, 3), (8, 1), (7, 4), (5, 3), (4, 3), (2, 4)])
def test_mix_targets_eq_10_to_12(n, num_mix):
    mto_index, mto_weight, mtm_index, mtm_weight = patchmix.mix_targets(n, num_mix)
    assert mto_index.dtype == mtm_index.dtype == torch.int64
    assert mto_index.tolist() == [[(i + m) % n for m in range(num_mix)] for i in range(n)]
    assert mtm_index.tolist() == [[(i - num_mix + 1 + j) % n for j in range(2 * num_mix - 1)] for i in range(n)]
    omega = [1 - abs(num_mix - j - 1) / num_mix for j in range(2 * num_mix - 1)]
    assert mtm_weight.tolist() == pytest.approx(omega, abs=1e-7) and mto_weight.tolist() == pytest.approx(
        [1 / num_mix] * num_mix
    )
    assert mto_weight.sum().item() == pytest.approx(1) and mtm_weight.sum().item() == pytest.approx(num_mix)
    target = torch.zeros(n, n).scatter_add_(1, mtm_index, mtm_weight.expand(n, -1))
    assert torch.allclose(target.sum(1), torch.tensor(float(num_mix)))  # below 2M - 1 images some repeat, and add up
    if n >= 2 * num_mix - 1:  # the target is how many of its images a pair shares, for every pair
        sets = [set(row) for row in mto_index.tolist()]
        shared = torch.tensor([[len(a & b) / num_mix for b in sets] for a in sets])
        torch.testing.assert_close(target, shared)
    else:
        assert all(len(set(row)) < len(row) for row in mtm_index.tolist())


def test_mix_targets_figure_7():
    mto_index, _, mtm_index, mtm_weight = patchmix.mix_targets(9, 3)
    view_1 = [(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5, 6), (5, 6, 7), (6, 7, 8), (7, 8, 0), (8, 0, 1)]
    assert [tuple(row) for row in mto_index.tolist()] == view_1
    assert mtm_index[0].tolist() == [7, 8, 0, 1, 2] and mtm_index[8].tolist() == [6, 7, 8, 0, 1]
    assert mtm_weight.tolist() == pytest.approx([1 / 3, 2 / 3, 1, 2 / 3, 1 / 3])


# -------------------------------------------------------------- soft_info_nce


def nce_by_loops(q, k, index, weight, temperature):
    """Eq. 13-15 as printed: sums over i, j and t, without the weights' normalisation."""

    def sim(h, z):
        return h.dot(z) / (h.dot(h).sqrt() * z.dot(z).sqrt())

    total = 0
    for i in range(len(q)):
        scores = [(sim(q[i], z) / temperature).exp() for z in k]
        below = sum(scores)
        for j in range(index.shape[1]):
            total = total - weight[j] * (scores[index[i, j]] / below).log()
    return total / len(q)


def problem(n, num_mix, keys=0, dim=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(m, dim, dtype=torch.float64, generator=g, requires_grad=True) for m in (n, n + keys))
    mto, mto_weight, mtm, mtm_weight = patchmix.mix_targets(n, num_mix)
    offset = keys // 2  # the slice's own ids in a larger batch of keys
    triples = {"oto": (torch.arange(n)[:, None], torch.ones(1)), "mto": (mto, mto_weight), "mtm": (mtm, mtm_weight)}
    return q, k, {term: (index + offset, weight.double()) for term, (index, weight) in triples.items()}


@pytest.mark.parametrize("term", ["oto", "mto", "mtm"])
@pytest.mark.parametrize(
    "n, num_mix, keys, temperature", [(6, 3, 0, 0.2), (7, 2, 4, 0.5), (4, 3, 2, 1.0), (3, 1, 0, 0.07)]
)
def test_soft_info_nce_eq_13_to_15(term, n, num_mix, keys, temperature):
    q, k, targets = problem(n, num_mix, keys)
    ours = patchmix.soft_info_nce(q, k, *targets[term], temperature)
    theirs = nce_by_loops(q, k, *targets[term], temperature)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, (q, k)), torch.autograd.grad(theirs, (q, k)))
    scaled = patchmix.soft_info_nce(q * torch.rand(n, 1).add(0.1), k * 7, *targets[term], temperature)
    torch.testing.assert_close(scaled, ours)
    # Equal logits: the weights' sum times log N, whatever the temperature.
    equal = patchmix.soft_info_nce(q, k[:1].expand(n + keys, -1), *targets[term], temperature)
    assert equal.item() == pytest.approx(targets[term][1].sum().item() * math.log(n + keys))


def test_soft_info_nce_one_hot_is_cross_entropy_and_duplicates_add_up():
    q, k, _ = problem(6, 1)
    index, logits = torch.tensor([[3], [0], [5], [5], [1], [2]]), F.normalize(q) @ F.normalize(k).T / 0.3
    one_hot = patchmix.soft_info_nce(q, k, index, torch.ones(1), 0.3)
    torch.testing.assert_close(one_hot, F.cross_entropy(logits, index[:, 0]))
    twice = patchmix.soft_info_nce(q, k, index.repeat(1, 2), torch.tensor([0.25, 0.5]).double(), 0.3)
    torch.testing.assert_close(twice, 0.75 * one_hot)
    detached = patchmix.soft_info_nce(q, k.detach(), index, torch.ones(1), 0.3)
    assert torch.autograd.grad(detached, (q, k), allow_unused=True)[1] is None


@pytest.mark.parametrize("term", ["oto", "mto", "mtm"])
@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothing_spreads_a_share_over_all_keys(term, smoothing):
    """Against a dense target: (1 - s) weights + s sum(weights) / N."""
    q, k, targets = problem(7, 2, 4)
    index, weight = targets[term]
    ours = patchmix.soft_info_nce(q, k, index, weight, 0.3, smoothing)
    target = torch.zeros(7, 11, dtype=torch.float64).scatter_add_(1, index, weight.expand(7, -1))
    target = (1 - smoothing) * target + smoothing * weight.sum() / 11
    theirs = -(target * F.log_softmax(F.normalize(q) @ F.normalize(k).T / 0.3, 1)).sum(1).mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, (q, k)), torch.autograd.grad(theirs, (q, k)))
    equal = patchmix.soft_info_nce(q, k[:1].expand(11, -1), index, weight, 0.3, smoothing)
    assert equal.item() == pytest.approx(weight.sum().item() * math.log(11))


@pytest.mark.parametrize("num_mix", [2, 3])
def test_a_mixed_query_is_best_between_its_sources(num_mix):
    """With orthogonal keys the minimum, log M at low temperature, is where similarity is shared as the mixture is."""
    n = 8
    index, weight = patchmix.mix_targets(n, num_mix)[:2]
    k = torch.eye(n, dtype=torch.float64)
    shared = k[index].mean(1).requires_grad_()
    loss = patchmix.soft_info_nce(shared, k, index, weight.double(), 0.01)
    assert loss.item() == pytest.approx(math.log(num_mix), abs=1e-6)
    assert torch.autograd.grad(loss, shared)[0].abs().max() < 1e-6
    g = torch.Generator().manual_seed(0)
    for step in (1e-3, 0.1, 1.0):
        moved = shared.detach() + step * torch.randn(n, n, dtype=torch.float64, generator=g)
        assert patchmix.soft_info_nce(moved, k, index, weight.double(), 0.01) > loss
    assert patchmix.soft_info_nce(k[index[:, 0]], k, index, weight.double(), 0.01) > loss + 1  # one source takes all


# ---------------------------------------------------------- the total, Eq. 16


def heads(model, x):
    return model.predictor(model.projector(model.backbone(x)))


def keys(model, x):
    return model.momentum_projector(model.momentum_backbone(x)).detach()


def in_batch(n, slices, num_mix):
    """Targets within each slice, as ids in the whole batch, by loops: {term: (index, weight)}."""
    size, rows = n // slices, range(n)
    mto = [[i // size * size + (i + m) % size for m in range(num_mix)] for i in rows]
    mtm = [[i // size * size + (i - num_mix + 1 + j) % size for j in range(2 * num_mix - 1)] for i in rows]
    omega = [1 - abs(num_mix - j - 1) / num_mix for j in range(2 * num_mix - 1)]
    lists = {"oto": ([[i] for i in rows], [1.0]), "mto": (mto, [1 / num_mix] * num_mix), "mtm": (mtm, omega)}
    return {term: (torch.tensor(index), torch.tensor(weight)) for term, (index, weight) in lists.items()}


def total_by_loops(model, args, views):
    """Eq. 13-16 from the model's own modules; the released weights, smoothing and roles of the views if asked for."""
    released = args.variant == "released"
    x1, x2 = views[::-1] if released else views
    mix1, mix2 = (patchmix.mix_slices(x, args, 5, i) for i, x in enumerate((x1, x2)))
    targets = in_batch(args.batch_size, args.mix_slices, args.num_mix)
    factor = {"oto": 1, "mto": 0.5, "mtm": 0.5 / args.num_mix} if released else dict.fromkeys(targets, 1)
    pairs = {"oto": (x2, x1), "mto": (mix1, x2), "mtm": (mix1, mix2)}
    pairs = {t: (heads(model, x), keys(model, y)) for t, (x, y) in pairs.items() if t in args.terms.split(",")}
    terms = {t: nce_by_loops(*pairs[t], *targets[t], 0.2) for t in pairs}
    if released and "oto" in terms:
        everyone = torch.arange(args.batch_size).expand(args.batch_size, -1)
        even = torch.full((args.batch_size,), 1 / args.batch_size)
        terms["oto"] = 0.9 * terms["oto"] + 0.1 * nce_by_loops(*pairs["oto"], everyone, even, 0.2)
    return sum(factor[t] * terms[t] for t in pairs), terms


ALL = "oto,mto,mtm"


@pytest.mark.parametrize(
    "variant, terms",
    [("paper", ALL), ("released", ALL), ("paper", "oto,mto"), ("released", "mto,mtm"), ("paper", "mtm")],
)
def test_total_eq_16(make_model, double, variant, terms):
    args, model = make_model("--variant", variant, "--terms", terms)
    views = views_of(args)
    loss, metrics = model(views, 5)
    expected, parts = total_by_loops(model, args, views)
    torch.testing.assert_close(loss, expected)
    assert parts.keys() == set(terms.split(","))
    for term, value in parts.items():
        torch.testing.assert_close(metrics[f"loss_{term}"], value)
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.testing.assert_close(torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained))
    assert metrics["q"].shape == metrics["k"].shape == (args.batch_size, args.dim)


@pytest.mark.parametrize("terms, factor", [("oto,mto", 1), ("oto,mto,mtm", 2)])
def test_without_mixing_it_is_moco_v3(make_model, double, terms, factor):
    """M = 1 without mix-to-mix: MoCo v3's symmetric loss over 2 tau; with it one direction counts twice."""
    args, model = make_model("--num-mix", "1", "--terms", terms)
    x1, x2 = views_of(args)
    own = torch.arange(args.batch_size)[:, None], torch.ones(1)
    one, two = (nce_by_loops(heads(model, a), keys(model, b), *own, 0.2) for a, b in ((x1, x2), (x2, x1)))
    torch.testing.assert_close(model([x1, x2], 0)[0], factor * one + two)


@pytest.mark.parametrize("flags", ["", "--variant released", "--terms mtm", "--terms oto,mto", "--num-mix 1"])
def test_chance_is_the_loss_at_equal_logits(make_model, double, flags):
    args, model = make_model(*flags.split())
    model.momentum_projector.register_forward_hook(lambda module, inputs, output: torch.ones_like(output))
    assert model(views_of(args), 0)[0].item() == pytest.approx(model.chance(), rel=1e-12)


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_rings_stay_within_their_slices(variant, monkeypatch):
    args = patchmix.parse_args([*TINY, "--mix-slices", "3", "--variant", variant])
    ids = torch.arange(12.0).view(-1, 1, 1, 1).expand(12, 3, 16, 16)
    mixed = patchmix.mix_slices(ids, args, 7, 0)
    for i in range(12):  # four images a slice, three of them in a mixed one
        ring = {i // 4 * 4 + (i + m) % 4 for m in range(3)}
        assert set(mixed[i].unique().tolist()) == ring
    # Each view and step has its own shuffle, and each slice in the paper's variant (D10).
    own = [mixed[s : s + 4, 0] == ids[s : s + 4, 0] for s in (0, 4, 8)]
    assert torch.equal(own[0], own[1]) == torch.equal(own[1], own[2]) == (variant == "released")
    for step, view in ((7, 1), (8, 0)):
        assert not torch.equal(mixed, patchmix.mix_slices(ids, args, step, view))
    parts = []
    for rank in range(3):  # the same on any number of processes
        monkeypatch.setattr(common, "rank_and_world", lambda rank=rank: (rank, 3))
        parts.append(patchmix.mix_slices(ids.chunk(3)[rank], args, 7, 0))
    assert torch.equal(torch.cat(parts), mixed)


# ------------------------------------------------ momentum, groups, schedule


@pytest.mark.parametrize("m", [0.0, 0.3, 1.0])
def test_momentum_update(make_model, double, m):
    args, model = make_model()
    slow = [*model.momentum_backbone.parameters(), *model.momentum_projector.parameters()]
    fast = [*model.backbone.parameters(), *model.projector.parameters()]
    before, statistics = [p.clone() for p in slow], [b.clone() for b in model.momentum_projector.buffers()]
    model.update(m)
    for new, old, query in zip(slow, before, fast, strict=True):
        torch.testing.assert_close(new, m * old + (1 - m) * query, rtol=1e-13, atol=1e-15)
        assert m not in (0, 1) or torch.equal(new, old if m else query)
    assert all(torch.equal(a, b) for a, b in zip(statistics, model.momentum_projector.buffers(), strict=True))


def test_released_vit_tiny_has_no_momentum_encoder(make_model, double, monkeypatch):
    """D4: keys of the encoder itself in training mode, so that they pass drop-path and move the batch norms."""
    monkeypatch.setitem(patchmix.RECIPES["patterns"], "drop_path", 0.5)
    monkeypatch.setitem(common.ARCHS, "vit_tiny", common.ARCHS["vit_micro"])
    args, model = make_model("--variant", "released")
    assert model.momentum_backbone is not model.backbone and args.momentum[0] > 0
    args, model = make_model("--arch", "vit_tiny", "--variant", "released")
    assert model.momentum_backbone is model.backbone and model.momentum_projector is model.projector
    trained = list(model.parameters())
    groups = patchmix.param_groups_weight_decay(model, args.weight_decay[0])
    grouped = [p for group in groups for p in group["params"]]
    assert len(grouped) == len(trained) == len({id(p) for p in grouped}) and all(p.requires_grad for p in grouped)
    counts = [m.num_batches_tracked for m in model.projector if isinstance(m, patchmix.GroupedBatchNorm)]
    x = views_of(args)
    first, second = model.key(x[0]), model.key(x[0])
    assert not torch.equal(first, second) and not first.requires_grad  # drop-path
    assert [int(c) for c in counts] == [2] * len(counts)
    model(x, 0)[0].backward()
    before = [p.detach().clone() for p in trained]
    model.update(0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, trained, strict=True))


def test_drop_path_is_of_the_encoder_only(make_model, double, monkeypatch):
    monkeypatch.setitem(patchmix.RECIPES["patterns"], "drop_path", 0.5)
    args, model = make_model()
    x = views_of(args)[0]
    assert not torch.equal(model.query(x), model.query(x))
    assert torch.equal(model.key(x), model.key(x))


def test_train_step(make_model, double):
    """One step: the optimiser moves the trainable parameters only, then the momentum encoder moves once, by 1 - m."""
    args, model = make_model("--seed", "3")
    optimizer = torch.optim.AdamW(patchmix.param_groups_weight_decay(model, args.weight_decay[0]), lr=0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    grouped = [(names[id(p)], group["weight_decay"] > 0) for group in optimizer.param_groups for p in group["params"]]
    trainable = [name for name, p in model.named_parameters() if not name.startswith("momentum_")]
    assert sorted(name for name, _ in grouped) == sorted(trainable)  # each exactly once
    assert {name for name, decays in grouped if not decays} == {
        n for n in trainable if model.get_parameter(n).dim() == 1
    }
    assert {("backbone.pos_embed", True), ("backbone.cls_token", True), ("backbone.norm.bias", False)} <= set(grouped)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    draws = np.full((args.batch_size, 2, common.COLOUR_DRAWS), 0.9)
    colour = np.stack([common.random_colour(d) for d in draws.swapaxes(0, 1)], 1)
    images = [((v * 40 + 128).clamp(0, 255)).byte() for v in views_of(args)]
    batch = {"views": images, "colour": torch.from_numpy(colour)}
    metrics = patchmix.train_step(args, model, model, optimizer, batch, 9, 10, torch.device("cpu"))
    lr, weight_decay, m = patchmix.schedule(args, 9, 10)
    assert {(g["lr"], g["weight_decay"]) for g in optimizer.param_groups} == {(lr, weight_decay), (lr, 0.0)} and lr > 0
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None for g in gradients)
    assert metrics["grad_norm"].item() == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in gradients)))
    for name, p in model.named_parameters():
        if name.startswith("momentum_"):
            query = model.get_parameter(name.removeprefix("momentum_"))
            torch.testing.assert_close(p, m * before[name] + (1 - m) * query, rtol=1e-13, atol=1e-15)
            assert p.grad is None and not p.requires_grad
        else:
            assert not torch.equal(p, before[name])


def plan(**more):
    values = dict(lr=0.8, batch_size=64, lr_batch=64, warmup=4, epochs=20, min_lr=1e-3, weight_decay=0.1, momentum=0.9)
    return types.SimpleNamespace(**values | more)


def test_schedule():
    rates = [patchmix.schedule(plan(), s, 10)[0] for s in range(201)]
    assert rates[0] == 0 and rates[20] == pytest.approx(0.4) and rates[40] == pytest.approx(0.8)
    assert np.allclose(np.diff(rates[:41]), 0.02) and (np.diff(rates[40:]) < 0).all()
    assert rates[120] == pytest.approx((0.8 + 1e-3) / 2) and rates[200] == pytest.approx(1e-3)
    assert patchmix.schedule(plan(warmup=0), 0, 10)[0] == pytest.approx(0.8)
    assert patchmix.schedule(plan(batch_size=160), 40, 10)[0] == pytest.approx(2.0)  # linear in the batch
    steps = plan(milestones=(0.4, 0.6))
    expected = {79: 0.8, 80: 0.08, 119: 0.08, 120: 0.008, 199: 0.008, 20: 0.4}
    assert {s: patchmix.schedule(steps, s, 10)[0] for s in expected} == pytest.approx(expected)
    pairs = [
        patchmix.schedule(plan(weight_decay=(0.04, 0.4), momentum=(0.996, 1.0)), s, 10)[1:] for s in (0, 50, 100, 200)
    ]
    quarter = (1 + math.cos(math.pi / 4)) / 2
    assert pairs[0] == pytest.approx((0.04, 0.996)) and pairs[2] == pytest.approx((0.22, 0.998))
    assert pairs[1] == pytest.approx((0.4 - 0.36 * quarter, 1 - 0.004 * quarter)) and pairs[3] == pytest.approx(
        (0.4, 1.0)
    )
    assert patchmix.schedule(plan(), 77, 10)[1:] == (0.1, 0.9)


# --------------------------------------------------------------- the paper's tables

TABLE = {  # section 4.1.2: data set, encoder -> rate, weight decay, epochs, warm-up, batch, image, patch, smallest crop
    ("cifar10", "vit_tiny"): (4e-3, (0.02, 0.2), 800, 100, 512, 32, 2, 0.1),
    ("cifar100", "vit_small"): (1e-3, (0.04, 0.4), 800, 100, 512, 32, 2, 0.1),
    ("cifar10", "vit_base"): (1.5e-3, (0.04, 0.4), 800, 100, 512, 32, 2, 0.1),
    ("imagenet", "vit_small"): (2e-3, (0.04, 0.4), 300, 10, 1024, 224, 16, 0.05),
    ("imagenet", "vit_base"): (3e-3, (0.04, 0.4), 300, 10, 1024, 224, 16, 0.05),
}
TABLE_8 = {  # heads, token width, million parameters
    ("imagenet", "vit_small"): (6, 384, 21.6),
    ("imagenet", "vit_base"): (12, 768, 85.7),
    ("cifar10", "vit_tiny"): (3, 192, 5.4),
    ("cifar100", "vit_small"): (6, 384, 21.3),
    ("cifar10", "vit_base"): (12, 768, 85.1),
}


@pytest.mark.parametrize("dataset, arch", TABLE)
def test_recipes(dataset, arch):
    args = patchmix.parse_args(["--dataset", dataset, "--arch", arch])
    rate, decay, epochs, warmup, batch, size, patch, smallest = TABLE[dataset, arch]
    assert (args.weight_decay, args.epochs, args.warmup, args.batch_size) == (decay, epochs, warmup, batch)
    assert (args.image_size, args.patch_size, args.crop_scale) == (size, patch, (smallest, 1.0))
    assert patchmix.schedule(args, warmup, 1) == pytest.approx((rate, *patchmix.schedule(args, warmup, 1)[1:]))
    assert patchmix.schedule(args, epochs, 1) == pytest.approx((1e-6, decay[1], 1.0))
    assert (args.momentum, args.num_mix, args.temperature, args.terms) == ((0.996, 1.0), 3, 0.2, "oto,mto,mtm")
    for variant in ("paper", "released"):  # by timm's name, too
        flags = ["--dataset", dataset, "--variant", variant, "--arch"]
        ours, timms = (vars(patchmix.parse_args([*flags, name])) for name in (arch, f"{arch}_patch16_224"))
        assert {k for k in ours if ours[k] != timms[k]} == {"arch", "name"}
    released = patchmix.parse_args(["--dataset", dataset, "--arch", arch, "--variant", "released"])
    assert released.num_mix == 2 and released.momentum == ((0, 0) if arch == "vit_tiny" else (0.996, 1.0))
    assert patchmix.parse_args(["--dataset", dataset]).arch == ("vit_small" if dataset == "imagenet" else "vit_tiny")
    with torch.device("meta"):  # shapes only
        model = patchmix.PatchMix(args)
        if arch == "vit_small":  # D3
            assert patchmix.PatchMix(released).backbone.blocks[0].attn.num_heads == 12
    heads, width, millions = TABLE_8[dataset, arch]
    attention = model.backbone.blocks[0].attn
    assert (len(model.backbone.blocks), attention.num_heads, model.backbone.embed_dim) == (12, heads, width)
    assert sum(p.numel() for p in model.backbone.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    # Table 9: widths, and what follows each linear layer; BN* has no parameters.
    for head, widths in ((model.projector, (width, 4096, 4096, 256)), (model.predictor, (256, 4096, 256))):
        kinds = [type(m).__name__ for m in head]
        assert kinds == ["Linear", "BatchNorm1d", "ReLU"] * (len(widths) - 2) + ["Linear", "BatchNorm1d"]
        linears = [m for m in head if isinstance(m, torch.nn.Linear)]
        assert [(m.in_features, m.out_features) for m in linears] == list(zip(widths, widths[1:], strict=False))
        learned = [m.weight is not None for m in head if isinstance(m, torch.nn.BatchNorm1d)]
        assert learned == [True] * (len(widths) - 2) + [False]


@pytest.mark.parametrize("dataset, smallest", [("cifar10", 0.1), ("imagenet", 0.05)])
def test_views_are_table_10(dataset, smallest):
    args, n = patchmix.parse_args(["--dataset", dataset]), 4000
    draws = np.random.default_rng(0).random((n, 2 * patchmix.DRAWS))
    cuts, colours = patchmix.make_sample(args)[0](np.arange(n), np.full((n, 2), 400), draws)
    assert args.interpolation == "bicubic" and args.norm == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    boxes = [box for _, box, _ in cuts]
    assert [size for *_, size in cuts] == [args.image_size] * 2 and (boxes[0] != boxes[1]).any(1).mean() > 0.99
    for view, (blur_p, solarize_p) in enumerate(((1.0, 0.0), (0.1, 0.2))):
        c = dict(zip(common.COLOUR, colours[view].T, strict=True))
        area, aspect = boxes[view][:, 2] * boxes[view][:, 3] / 400**2, boxes[view][:, 3] / boxes[view][:, 2]
        assert smallest * 0.98 < area.min() < smallest * 1.2 and area.max() <= 1
        assert 0.74 < aspect.min() < 0.77 and 1.3 < aspect.max() < 1.35
        shares = [(c["sigma"] > 0), (c["solarize"] > 0), (c["flip"] > 0), (c["gray"] > 0), (c["hue"] != 0)]
        assert [s.mean() for s in shares] == pytest.approx([blur_p, solarize_p, 0.5, 0.2, 0.8], abs=0.04)
        for name, spread in (("brightness", 0.4), ("contrast", 0.4), ("saturation", 0.2)):
            assert (c[name].min(), c[name].max()) == pytest.approx((1 - spread, 1 + spread), abs=0.01)
        assert np.abs(c["hue"]).max() == pytest.approx(0.1, abs=0.002)
        sigma = c["sigma"][c["sigma"] > 0]
        assert 0.1 <= sigma.min() < 0.2 and 1.9 < sigma.max() <= 2.0


# ----------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    "flags, word",
    [
        ("--num-mix 0", "num-mix"),
        ("--num-mix 7", "slice has 6 images"),
        ("--mix-slices 1 --image-size 8 --num-mix 5", "4 patches"),
        ("--mix-slices 5", "batch-size 12"),
        ("--arch resnet18 --patch-size 5", "patch-size 5"),
        ("--terms oto,mot", "some of oto, mto, mtm"),
        ("--queue 64", "queue"),
    ],
)
def test_wrong_flags(capsys, flags, word):
    with pytest.raises(SystemExit) as stop:
        patchmix.parse_args([*TINY, *flags.split()])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and len(error.splitlines()) == 1 and word in error


def test_terms_have_one_order():
    assert patchmix.parse_args(["--terms", "mtm,oto"]).terms == "oto,mtm"


def test_more_processes_than_slices(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert patchmix.parse_args(TINY).mix_slices == 3 and "3 are used" in capsys.readouterr().out


# ------------------------------------------------------------------ whole runs


class Noise(torch.utils.data.Dataset):
    """A user's own images."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.randint(256, (3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))


@pytest.mark.slow
def test_own_images_and_encoder_stopped_and_resumed(tmp_path):
    flags = (
        "--dataset folder --image-size 16 --patch-size 4 --batch-size 16 --mix-slices 2 --epochs 2 --device cpu".split()
    )
    states = []
    for name, calls in (("whole", [[]]), ("parts", [["--max-steps", "3"], []])):
        for more in calls:
            torch.manual_seed(0)
            encoder = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, 4), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
            args = patchmix.parse_args([*flags, "--out", str(tmp_path / name), *more])
            args.hidden, args.dim = 16, 8
            patchmix.main(args, train=Noise(), encoder=encoder)
        states.append(common.load_checkpoint(tmp_path / name / "last.pt"))
    whole, parts = (state["model"] for state in states)
    assert states[0]["step"] == 8 and all(torch.equal(whole[name], parts[name]) for name in whole)
    records = [common.read_metrics(tmp_path / name / "metrics.jsonl")[1:] for name in ("whole", "parts")]
    for name in ("epoch", "loss", "loss_oto", "loss_mto", "loss_mtm", "grad_norm"):
        assert [r[name] for r in records[0]] == [r[name] for r in records[1]]
