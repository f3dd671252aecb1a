"""moco_jointcrop.py against the papers: the joint sampler, views, queue, InfoNCE, ShuffleBN, MoCo v3's contrast."""

import importlib
import math

import numpy as np
import pytest
import timm
import torch
from conftest import NANO, info_nce, ks, state_of, unit
from tiny import processes
from torch import nn

import common
import moco_jointcrop as moco

SAMPLERS = [(4.0, 0.2, 1.0), (3.0, 0.2, 1.0), (0.5, 0.1, 2.0), (0.0, 0.2, 1.0), (-0.7, 0.1, 2.0), (-4.0, 0.2, 1.0)]
# Figure 7, read from the paper: mean distance of the two crops' corners, for beta from 4 down to -4 in halves.
FIGURE7 = (40.63, 42.33, 44.36, 47.14, 50.35, 53.73, 56.53, 58.41, 59.20)
FIGURE7 += (59.73, 61.71, 64.53, 67.78, 71.29, 74.24, 76.77, 78.82)
RANDOM_CROP = 45.97  # the same for RandomCrop


def draws(n, low, high, beta, seed=0, offset=0.0):
    return moco.sample_joint(n, low, high, beta, torch.Generator().manual_seed(seed), offset)


def algorithm1(n, low, high, beta, rng):
    """Algorithm 1 as it is written, the truncated normal by rejection, one pair after another."""
    pairs = []
    s_b = math.log(high / low)
    while len(pairs) < n:
        if beta == 0:
            u = rng.uniform(-s_b, s_b)
        else:
            u = rng.normal(0, s_b / abs(beta))
            if abs(u) > s_b:
                continue
            if beta < 0:
                u = -s_b - u if u < 0 else s_b - u
        s_r = math.exp(u)
        s_1 = rng.uniform(max(low, low / s_r), min(high / s_r, high))
        pairs.append((s_1, s_1 * s_r))
    return np.array(pairs)


@pytest.mark.parametrize("beta, low, high", SAMPLERS)
def test_algorithm1_against_rejection_sampling(beta, low, high):
    reference = algorithm1(20_000, low, high, beta, np.random.default_rng(1)).T
    ours = torch.stack(draws(200_000, low, high, beta)).numpy()
    assert ks(reference[0], ours[0]) < 1.9  # far beyond 0.1 %
    assert ks(reference[1] / reference[0], ours[1] / ours[0]) < 1.9


@pytest.mark.parametrize("low, high", [(0.2, 1.0), (0.999, 1.0), (1e-6, 1.0), (3.0, 900.0)])
def test_bounds_are_never_left(low, high):
    edges = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
    for beta in (1e-12, -1e-12, 1e-5, -1e-3, 0.0, 2.0, 50.0, -50.0, 1e6, None):
        at_edges = moco.joint_from_uniform(edges.repeat(3), edges.repeat_interleave(3), low, high, beta)
        for s in (*draws(20_000, low, high, beta), *at_edges):
            assert s.dtype == torch.float64 and s.isfinite().all() and s.min() >= low and s.max() <= high


def test_beta_is_continuous_at_zero():
    u, v = torch.rand(2, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    middle = moco.joint_from_uniform(u, v, 0.2, 1.0, 0.0)[1]
    for beta in (1e-5, 1e-7):
        torch.testing.assert_close(moco.joint_from_uniform(u, v, 0.2, 1.0, beta)[1], middle, atol=1e-4, rtol=0)


def test_randomcrop_ratio_density_eq8_eq10():
    """Independent areas: the distribution function that Eq. 8 integrates to, for s in [0.2, 1]; App. H's values."""

    def cdf(x):
        low = 25 * x / 32 + 1 / (32 * x) - 5 / 16
        return np.where(x <= 1, low, 21 / 16 - x / 32 - 25 / (32 * x))

    assert cdf(np.array([0.5, 1, 2, 4])) == pytest.approx([0.1406, 0.5, 0.8594, 0.9922], abs=5e-5)
    a, b = draws(500_000, 0.2, 1.0, None)
    assert ks(cdf((a / b).numpy())) < 1.95
    assert (b / a).log().abs().mean().item() == pytest.approx(0.494, abs=0.003)


def mean_corner_distance(beta, offset, n=100_000):
    """Figure 7: crops of a 224 x 224 image, s in [0.2, 1]; the mean distance between the two top-left corners."""
    view, rng = moco.augmentation(moco.parse_args(["--dataset", "imagenet"]))["query"], np.random.default_rng(0)
    areas = [None, None] if beta is None else [a.numpy() for a in draws(n, 0.2, 1.0, beta, offset=offset)]
    tables = [rng.random((n, common.VIEW_DRAWS)) for _ in areas]
    boxes = [common.draw_boxes(view, np.full((n, 2), 224), *pair) for pair in zip(tables, areas, strict=True)]
    return np.hypot(*(boxes[0] - boxes[1])[:, :2].T).mean()


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_figure7_corner_distances(every):
    assert mean_corner_distance(None, 0.0) == pytest.approx(RANDOM_CROP, abs=0.3)
    for i in range(0, len(FIGURE7), every):
        assert mean_corner_distance(4 - i / 2, 0.0) == pytest.approx(FIGURE7[i], abs=1.0)
        assert mean_corner_distance(4 - i / 2, 0.1) == pytest.approx(FIGURE7[i], abs=0.3)


SIGMA, LOCALS = common.COLOR.index("sigma"), ["--local-crops", "4"]


def drawn(flags, n=4000):
    """Of the first n images' views: areas (views, n), sigmas (views, n), colors (n, views, 9), and query boxes."""
    args = moco.parse_args(["--dataset", "imagenet", *flags])
    draws = len(moco.augmentation(args)) * common.VIEW_DRAWS + moco.SHARED_DRAWS + args.local_crops
    table = common.uniform(0, 0, np.arange(n), draws)
    cuts, colors = moco.draw_views(args, np.arange(n), np.full((n, 2), 224), table)
    areas, colors = np.stack([box[:, 2] * box[:, 3] / 224**2 for _, box, _ in cuts]), np.stack(colors, 1)
    return areas, colors[:, :, SIGMA].T, colors, cuts[0][1]


def test_views_of_each_joint_mode():
    """Areas are joint in two modes; but for sigmas all colors are the baseline's."""
    views = {mode: drawn(["--joint", mode, "--beta", "-4"]) for mode in ("none", "crop", "blur", "both", "either")}
    extreme = {mode: (abs(np.log(np.divide(*found[0]))) > math.log(2)).mean() for mode, found in views.items()}
    assert extreme["none"] == extreme["blur"] < 0.36 and extreme["crop"] == extreme["both"] > 0.93
    others = [i for i in range(len(common.COLOR)) if i != SIGMA]
    for found in views.values():
        assert np.array_equal(views["none"][2][:, :, others], found[2][:, :, others])


def test_either_is_one_of_the_two_per_image():
    alone, crop, blur = (drawn(["--joint", mode]) for mode in ("none", "crop", "blur"))
    areas, sigmas, *_ = drawn(["--joint", "either", "--joint-prob", "0.3"])
    has_crop = (areas != alone[0]).any(0)
    assert has_crop.mean() == pytest.approx(0.3, abs=0.03)
    assert np.array_equal(areas[:, has_crop], crop[0][:, has_crop])
    assert np.array_equal(sigmas[:, has_crop], alone[1][:, has_crop])
    has_blur = ~has_crop & (alone[0] != crop[0]).any(0)  # a few boxes are equal with and without JointCrop
    assert np.array_equal(sigmas[:, has_blur], blur[1][:, has_blur])


def test_jblur_blurs_both_views_or_neither_and_has_the_distribution_of_beta():
    _, sigma, *_ = drawn(["--joint", "blur", "--beta", "0"])
    assert ((sigma[0] > 0) == (sigma[1] > 0)).all() and (sigma[0] > 0).mean() == pytest.approx(0.5, abs=0.03)
    both = sigma[:, sigma[0] > 0]
    assert both.min() >= 0.1 and both.max() <= 2.0
    s_b = math.log(20)
    assert np.log(both[1] / both[0]).std() == pytest.approx(s_b / math.sqrt(3), rel=0.05)  # uniform on [-s_b, s_b]


@pytest.mark.parametrize("pair, joint", [("global", [1, 0, 0]), ("local", [0, 1, 1]), ("both", [1, 1, 1])])
def test_joint_pair_says_which_pairs_have_joint_areas(pair, joint):
    """App. D: the two large crops, local crops 1 and 2, 3 and 4; beta = -4 makes their areas differ."""
    areas, *_ = drawn([*LOCALS, "--beta", "-4", "--joint-pair", pair])
    ratios = abs(np.log(areas[::2] / areas[1::2])) > math.log(2)
    assert [share > 0.85 for share in ratios.mean(1)] == [bool(one) for one in joint]


@pytest.mark.parametrize("joint", ["blur", "both", "either"])
def test_jblur_is_of_the_large_views_whatever_the_pair(joint):
    pairs = ("global", "local", "both")
    sigmas = [drawn([*LOCALS, "--joint", joint, "--joint-pair", pair])[1] for pair in pairs]
    assert np.array_equal(sigmas[0], sigmas[1]) and np.array_equal(sigmas[0], sigmas[2])
    alone = drawn([*LOCALS, "--joint", "none"])[1]
    assert not np.array_equal(sigmas[0][:2], alone[:2]) and np.array_equal(sigmas[0][2:], alone[2:])


def test_center_suppressed_positions():
    box = drawn(["--joint", "none", "--css-alpha", "0.1"])[3]
    room = 224 - box[:, 2]
    share = (box[:, 0] / np.maximum(room, 1))[room > 20]
    assert ((share < 0.1) | (share > 0.9)).mean() > 0.7 and share.min() >= 0 and share.max() <= 1  # the edges
    positions = moco.center_suppressed(np.random.default_rng(0).random(20_000), 0.6)
    assert positions.max() < 1 and positions.mean() == pytest.approx(0.5, abs=0.01)
    assert positions.var() == pytest.approx(0.25 / (2 * 0.6 + 1), abs=0.003)  # of Beta(0.6, 0.6)
    assert abs(np.corrcoef(positions.T)[0, 1]) < 0.03


# ------------------------------------------------------------------ MoCo


def test_queue_is_first_in_first_out():
    """It wraps, and holds the last ones of more keys than it has rows."""
    length, queue = 5, moco.Queue(5, 3)
    held = [tuple(row) for row in queue.keys.tolist()]
    for step, n in enumerate((2, 7, 1, 12)):
        keys = unit(n, 3, seed=step).float()
        queue.enqueue(keys)
        held = (held + [tuple(row) for row in keys.tolist()])[-length:]
        order = [(int(queue.position) + i) % length for i in range(length)]  # oldest first
        assert [tuple(queue.keys[i].tolist()) for i in order] == held


def encoder():
    """An encoder whose embeddings depend on which images are in a batch-norm group, of two views' rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5)).double()


def view_rows():
    """Two views of 8 images."""
    return list(torch.randn(2, 8, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def slow_shuffle_bn(groups):
    """Each key by itself: normalised with the statistics of the rows that the shuffle puts into its group."""
    linear, rows = encoder()[:2], torch.cat(view_rows())
    order, z = torch.randperm(16, generator=torch.Generator().manual_seed(2)).tolist(), linear(rows)
    members = [order[i : i + 16 // groups] for i in range(0, 16, 16 // groups)]
    group_of = {row: group for group in members for row in group}
    keys = []
    for row in range(16):
        group = z[group_of[row]]
        keys.append((z[row] - group.mean(0)) / (group.var(0, correction=0) + 1e-5).sqrt())
    return torch.stack(keys).view(2, 8, 5).detach()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shuffle_bn(groups):
    """Against the slow form. Without a generator it is torch's global one."""
    model, expected = moco.split_batch_norms(encoder(), groups), slow_shuffle_bn(groups)
    torch.testing.assert_close(
        moco.encode_shuffled_keys(model, view_rows(), torch.Generator().manual_seed(2)), expected
    )
    torch.manual_seed(2)
    torch.testing.assert_close(moco.encode_shuffled_keys(model, view_rows()), expected)
    plain = torch.stack([model(x) for x in view_rows()])  # each view by itself, in order
    assert (plain - expected).abs().max() > 0.1


def shuffle_as_one_of_two(groups):
    common.join_processes("cpu")
    model = moco.split_batch_norms(encoder(), groups // 2)
    keys = moco.encode_shuffled_keys(model, [common.shard(x) for x in view_rows()], torch.Generator().manual_seed(2))
    torch.testing.assert_close(keys, slow_shuffle_bn(groups))
    torch.testing.assert_close(moco.shard(moco.gather(common.shard(keys[0]))), common.shard(keys[0]))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 4])
def test_shuffle_bn_on_two_processes(groups, tmp_path):
    """All keys, on both."""
    ends = processes(tmp_path / "log", shuffle_as_one_of_two, [(groups,)] * 2)
    assert [status for status, _, _ in ends] == [0, 0], ends


@pytest.mark.parametrize("method, flags, rows", [
    *((method, "--bn-groups 4", 4) for method in ("moco_jointcrop", "jcl", "clim", "logo")),
    ("moco_jointcrop", "--moco v3", 16), ("logo", "--base simsiam", 16),
])  # fmt: skip
def test_an_image_changes_its_own_group(method, flags, rows):
    """Of the model that main makes: batch norm is over as many slices of the batch as are given."""
    flags += " --arch resnet_micro --batch-size 16 --image-size 16"
    model, x = state_of(importlib.import_module(method), flags)["model"], torch.randn(2, 16, 3, 16, 16)
    x[1, 1:] = x[0, 1:]
    for encode in (model.backbone, getattr(model, "momentum_backbone", model.backbone)):
        changed = (encode(x[0]) - encode(x[1])).abs().amax(1) > 1e-6
        assert changed.nonzero().flatten().tolist() == [*range(rows)]


def test_v3_contrast_is_info_nce_of_cosines_among_all_keys():
    q, k = unit(4, 6), unit(8, 6, seed=1)
    rows = [(q[i : i + 1], k[4 + i : 5 + i], torch.cat([k[: 4 + i], k[5 + i :]])) for i in range(4)]
    expected = 2 * 0.5 * sum(info_nce(*row, 0.5) for row in rows) / 4
    torch.testing.assert_close(moco.contrast(3 * q, 5 * k, 0.5, first=4), expected)


def test_v3_starts_from_zero_residual_branches_of_its_own_encoder():
    def last_norms(**own):
        model = state_of(moco, "--arch resnet_micro --batch-size 8 --moco v3", **own)["model"]
        return [block.bn2.weight for block in model.modules() if hasattr(block, "zero_init_last")]

    assert all(not weight.any() for weight in last_norms())
    own = timm.create_model("resnet18", num_classes=0, zero_init_last=False, **NANO)  # perhaps pre-trained
    assert all(weight.all() for weight in last_norms(encoder=own))


def test_recipes_of_moco():
    v1, v2, v3 = (moco.parse_args(["--dataset", "imagenet", "--moco", v]) for v in ("v1", "v2", "v3"))
    assert (v1.temperature, v1.milestones, v1.queue, v1.lr) == (0.07, (0.6, 0.8), 65536, 0.03)
    assert v1.momentum == v2.momentum == (0.999, 0.999) and v2.milestones == ()
    assert (v2.temperature, v2.epochs, v2.batch_size, v2.weight_decay, v2.bn_groups) == (0.2, 200, 256, 1e-4, 8)
    assert (v3.batch_size, v3.lr, v3.lr_batch, v3.momentum, v3.temperature) == (4096, 0.6, 256, (0.99, 1.0), 1.0)
    assert (v3.hidden, v3.blur_p, v3.solarize_p, v3.trust_coeff) == (4096, (1.0, 0.1), (0.0, 0.2), 0.001)
    models = [state_of(moco, f"--batch-size 8 --moco {v}")["model"] for v in ("v1", "v2")]
    assert [len(model.projector) for model in models] == [1, 3]  # Linear; Linear, ReLU, Linear
