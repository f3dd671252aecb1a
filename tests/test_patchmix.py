"""Tests patchmix.py against slow references written from the paper, limit cases and the paper's tables."""

import pytest
import torch
from conftest import assert_same, first_call, generator, random_views, state_of, values

import common
import patchmix

TINY = "--arch vit_micro --image-size 16 --patch-size 4 --batch-size 12 --epochs 10 --hidden 16 --dim 8"


def make_model(flags):
    """Return a run's small model, with a momentum encoder that differs from its encoder."""
    model = state_of(patchmix, f"{TINY} {flags}")["model"]
    for p in (*model.momentum_backbone.parameters(), *model.momentum_projector.parameters()):
        p.data.add_(0.1 * torch.randn(p.shape))
    return model


def mix_by_loops(images, num_mix, p, k):
    """Mix by Eq. 1-7: shuffled patch j of mixed image i is patch k(j) of image u(i, m), where m = floor(j / S)."""
    n, _, height, width = images.shape
    tokens, columns = (height // p) * (width // p), width // p
    size, mixed = tokens // num_mix, torch.zeros_like(images)
    for i in range(n):
        for j in range(tokens):
            m = j // size if j < size * num_mix else 0  # leftover patches stay
            row, column = divmod(int(k[j]), columns)
            place = (..., slice(row * p, row * p + p), slice(column * p, column * p + p))
            mixed[i][place] = images[(i + m) % n][place]
    return mixed


@pytest.mark.parametrize("n, num_mix, size, patch", [
    (4, 3, (8, 8), 2),  # one of 16 patches is left over; N is not a multiple of M
    (7, 3, (8, 12), 4),  # not square
    (2, 4, (6, 6), 2),  # N < M: an image is mixed with itself
    (4, 9, (6, 6), 2),  # M = T
    (3, 1, (8, 8), 2),
])  # fmt: skip
def test_patch_mix_eq_1_to_9(n, num_mix, size, patch):
    g = generator(n)
    x, weight = (torch.randn(n, 2, *size, dtype=torch.float64, generator=g) for _ in range(2))
    k = torch.randperm(size[0] // patch * (size[1] // patch), generator=g)
    mixed, expected = (mix(x.requires_grad_(), num_mix, patch, k) for mix in (patchmix.patch_mix, mix_by_loops))
    assert torch.equal(mixed, expected)
    torch.testing.assert_close(*(torch.autograd.grad((y * weight).sum(), x)[0] for y in (mixed, expected)))


def in_batch(n, slices, num_mix, first=0):
    """Return Eq. 10-12 in each slice (D7) by loops, {term: (index, weight)}. first: row of this process's first key."""
    size, rows = n // slices, range(n)
    mto = [[first + i // size * size + (i + m) % size for m in range(num_mix)] for i in rows]
    mtm = [[first + i // size * size + (i - num_mix + 1 + j) % size for j in range(2 * num_mix - 1)] for i in rows]
    omega = [1 - abs(num_mix - j - 1) / num_mix for j in range(2 * num_mix - 1)]
    lists = {"oto": ([[first + i] for i in rows], [1.0]), "mto": (mto, [1 / num_mix] * num_mix), "mtm": (mtm, omega)}
    return {term: (torch.tensor(index), torch.tensor(weight)) for term, (index, weight) in lists.items()}


def nce_by_loops(q, k, index, weight, temperature, smoothing=0.0):
    """Return Eq. 13-15 as printed, with weights as given. smoothing: the fraction of them spread over all keys."""
    total = 0
    for i in range(len(q)):
        scores = (torch.cosine_similarity(q[i], k, dim=1) / temperature).exp()
        logs = (scores / scores.sum()).log()
        for j in range(index.shape[1]):
            total = total - weight[j] * ((1 - smoothing) * logs[index[i, j]] + smoothing * logs.mean())
    return total / len(q)


@pytest.mark.parametrize("term", ["oto", "mto", "mtm"])
@pytest.mark.parametrize("n, num_mix, keys, settings", [(7, 2, 4, [0.5]), (4, 3, 2, [0.2, 0.1]), (3, 1, 0, [0.07])])
def test_soft_info_nce_eq_13_to_15(term, n, num_mix, keys, settings):
    """A repeated positive counts twice (mtm, 4 images). keys: of other processes. settings: temperature, smoothing."""
    g = generator()
    q, k = (torch.randn(rows, 5, dtype=torch.float64, generator=g, requires_grad=True) for rows in (n, n + keys))
    index, weight = in_batch(n, 1, num_mix, keys // 2)[term]
    ours, theirs = (nce(q, k, index, weight.double(), *settings) for nce in (patchmix.soft_info_nce, nce_by_loops))
    assert_same(ours, theirs, q, k)


def mixed_by_loops(images):
    """Mix by Eq. 1-7 within each of two slices, each with its own shuffle of patches of 4 px."""
    return torch.cat([mix_by_loops(x, 3, 4, torch.randperm(x[0, 0].numel() // 16)) for x in images.chunk(2)])


def terms_by_loops(model, views, terms):
    """Return the terms of Eq. 13-15, {name: value}. Local crops are compared with the keys of both views (D6)."""
    (x1, x2, *crops), targets = views, in_batch(12, 2, 3)
    mixed = [mixed_by_loops(x) for x in (x1, x2)[: 1 + ("mtm" in terms)]]
    pairs = {"oto": (x2, x1), "mto": (mixed[0], x2), "mtm": mixed}
    found = {t: nce_by_loops(model.query(pairs[t][0]), model.key(pairs[t][1]), *targets[t], 0.3) for t in terms}
    local = dict(oto=crops, mto=[mixed_by_loops(x) for x in crops])
    for term in [term for term in local if crops and term in terms]:
        h = model.query(torch.cat(local[term])).chunk(len(crops))
        values = [nce_by_loops(one, model.key(x), *targets[term], 0.3) for one in h for x in (x1, x2)]
        found[f"local_{term}"] = sum(values) / len(crops)
    return found


@pytest.mark.parametrize("terms, local_crops", [("oto,mto", 0), ("mtm", 0), ("oto,mto,mtm", 2), ("oto,mtm", 2)])
def test_total_is_eq_16(double, terms, local_crops):
    """The terms have the weights 1, 2 and 0.5, and local ones 1. Both sides draw the same shuffles."""
    flags = f"--num-mix 3 --mix-slices 2 --temperature 0.3 --terms {terms} --term-weights 1 2 0.5"
    model, views = make_model(flags), random_views(2, 12) + random_views(local_crops, 12, size=8)
    torch.manual_seed(0)
    loss, _, metrics = model(views)
    torch.manual_seed(0)
    expected = terms_by_loops(model, views, terms.split(","))
    total = sum(dict(mto=2, mtm=0.5).get(term, 1) * value for term, value in expected.items())
    torch.testing.assert_close(metrics, dict(loss=total) | {f"loss_{term}": value for term, value in expected.items()})
    assert_same(loss, total, *[p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("flags, of_keys", [("", False), ("--key-encoder query", True)])
def test_drop_path_is_of_queries_and_of_keys_that_the_encoder_itself_makes(double, flags, of_keys):
    """Drop path acts on keys with --key-encoder query, as for the released ViT-T (D4). Keys have no gradient."""
    model, (x,) = make_model(f"--drop-path 0.5 {flags}"), random_views(1, 12)
    assert not torch.equal(model.query(x), model.query(x))
    assert torch.equal(model.key(x), model.key(x)) != of_keys and not model.key(x).requires_grad


@pytest.mark.parametrize("dataset, arch", [
    ("cifar10", "vit_tiny"), ("cifar100", "vit_small"), ("cifar10", "vit_base"), ("imagenet", "vit_small"),
    ("imagenet", "vit_base"),
])  # fmt: skip
def test_recipes(dataset, arch):
    """The recipes are those of section 4.1.2 and of the released code, whether --arch is our name or timm's."""
    paper = dict(epochs=800, warmup=100, batch_size=512, image_size=32, patch_size=2, crop_scale=[0.1, 1])
    if dataset == "imagenet":
        paper = dict(epochs=300, warmup=10, batch_size=1024, image_size=224, patch_size=16, crop_scale=[0.05, 1])
    paper |= dict(terms="oto,mto,mtm", term_weights=[1, 1, 1], smoothing=0, hidden=4096, dim=256)
    paper |= dict(momentum=[0.996, 1], num_mix=3, temperature=0.2)
    paper["min_lr"] = 1e-6 * 256 / paper["batch_size"]
    lr = dict(vit_tiny=2e-3, vit_small=5e-4, vit_base=7.5e-4)[arch]  # per 256 images
    paper |= dict(weight_decay=[0.02, 0.2] if arch == "vit_tiny" else [0.04, 0.4], lr=lr)
    released = dict(num_mix=2, smoothing=0.1, term_weights=[1, 0.5, 0.25])
    released["key_encoder"] = "query" if arch == "vit_tiny" else "momentum"
    released["num_heads"] = 12 if arch == "vit_small" else None
    for name in (arch, f"{arch.replace('vit', 'deit')}_patch16_224 --patch-size {paper['patch_size']}"):
        flags = f"--dataset {dataset} --arch {name}"
        assert values(patchmix, flags, " ".join(paper)) == [*paper.values()]
        assert values(patchmix, f"{flags} --variant released", " ".join(released)) == [*released.values()]


def test_what_follows_from_other_flags():
    """mtm's released weights sum to 1/2 for any M, if not given (D1). With local crops, large crops are larger (D6)."""
    released = "--dataset imagenet --variant released"
    assert values(patchmix, f"{released} --num-mix 4", "term_weights") == [[1, 0.5, 0.125]]
    assert values(patchmix, f"{released} --num-mix 4 --term-weights 1 2 3", "term_weights") == [[1, 2, 3]]
    assert values(patchmix, "--weight-decay 0.1", "weight_decay") == [[0.1, 0.1]]
    chosen = patchmix.chosen_terms(patchmix.parse_args("--terms mtm,oto,mto --term-weights 1 0 3".split()))
    assert chosen == dict(oto=1, mtm=3)
    for count, smallest in ((0, 0.05), (2, 0.35)):
        assert values(patchmix, f"{released} --local-crops {count}", "crop_scale") == [[smallest, 1]]
    for flags in ("--num-mix 1", "--terms oto"):  # without mixing there is one slice, not CIFAR-10's four
        assert state_of(patchmix, f"--dataset cifar10 {TINY} {flags} --batch-size 18")["model"].slices == 1


def test_crops_are_bicubic():
    """All crops are resized bicubically, as in the released code."""
    _, crops = first_call("common.Views", patchmix, f"{TINY} --local-crops 2 --local-size 8")
    assert [crop.interpolation.value for crop in crops] == ["bicubic"] * 4


def test_encoders_are_table_8():
    """The ViTs have Table 8's depths, attention heads and widths. test_trajectories.py covers Table 9."""
    with torch.device("meta"):  # shapes only
        vits = [common.build_backbone(common.backbone_info(f"vit_{size}", 32, 4)) for size in ("tiny", "small", "base")]
    found = [(len(vit.blocks), vit.blocks[0].attn.num_heads, vit.embed_dim) for vit in vits]
    assert found == [(12, 3, 192), (12, 6, 384), (12, 12, 768)]
