"""moco_jointcrop.py against the papers: the joint sampler, views, queue, InfoNCE, ShuffleBN, MoCo v3's contrast."""

import math

import numpy as np
import pytest
import timm
import torch
from conftest import NANO, QUEUES, info_nce, ks, state_of, unit
from torch import nn

import common
import moco_jointcrop as moco

SAMPLERS = [(4.0, 0.2, 1.0), (3.0, 0.2, 1.0), (0.5, 0.1, 2.0), (0.0, 0.2, 1.0), (-0.7, 0.1, 2.0), (-4.0, 0.2, 1.0)]
# Figure 7, read from the paper: mean distance of the two crops' corners, for beta from 4 down to -4 in halves.
FIGURE7 = (40.63, 42.33, 44.36, 47.14, 50.35, 53.73, 56.53, 58.41, 59.20)
FIGURE7 += (59.73, 61.71, 64.53, 67.78, 71.29, 74.24, 76.77, 78.82)


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
    reference, ours = algorithm1(20_000, low, high, beta, np.random.default_rng(1)).T, draws(200_000, low, high, beta)
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
    assert mean_corner_distance(None, 0.0) == pytest.approx(45.97, abs=0.3)  # RandomCrop
    for i in range(0, len(FIGURE7), every):
        assert mean_corner_distance(4 - i / 2, 0.0) == pytest.approx(FIGURE7[i], abs=1.0)
        assert mean_corner_distance(4 - i / 2, 0.1) == pytest.approx(FIGURE7[i], abs=0.3)


SIGMA, LOCALS = common.COLOR.index("sigma"), "--local-crops 4 --joint"


def drawn(flags, n=4000):
    """Of the first n images' views: areas (views, n), sigmas (views, n), colors (views, n, 9), and query boxes."""
    args = moco.parse_args(["--dataset", "imagenet", *flags.split()])
    draws = len(moco.augmentation(args)) * common.VIEW_DRAWS + moco.SHARED_DRAWS + args.local_crops
    table = common.uniform(0, 0, np.arange(n), draws)
    cuts, colors = moco.draw_views(args, np.arange(n), np.full((n, 2), 224), table)
    areas, colors = np.stack([box[:, 2] * box[:, 3] / 224**2 for _, box, _ in cuts]), np.stack(colors)
    return areas, colors[:, :, SIGMA], np.delete(colors, SIGMA, 2), cuts[0][1]


def test_views_of_each_joint_mode():
    """Areas are joint in two modes; but for sigmas all colors are the baseline's. `either` is one mode per image."""
    found = {mode: drawn(f"--joint {mode} --beta -4") for mode in ("none", "crop", "blur", "both")}
    found["either"] = drawn("--joint either --joint-prob 0.3 --beta -4")
    (alone, sharp), (crop, _), (_, blur) = (found[mode][:2] for mode in ("none", "crop", "blur"))
    extreme = {mode: (abs(np.log(np.divide(*areas))) > math.log(2)).mean() for mode, (areas, *_) in found.items()}
    assert extreme["none"] == extreme["blur"] < 0.36 and extreme["crop"] == extreme["both"] > 0.93
    assert np.array_equal(found["both"][1], blur) and np.array_equal(found["crop"][1], sharp)
    assert all(np.array_equal(colors, found["none"][2]) for _, _, colors, _ in found.values())
    areas, sigmas, *_ = found["either"]
    has_crop = (areas != alone).any(0)
    assert has_crop.mean() == pytest.approx(0.3, abs=0.03)
    assert np.array_equal(areas[:, has_crop], crop[:, has_crop])
    assert np.array_equal(sigmas[:, has_crop], sharp[:, has_crop])
    has_blur = ~has_crop & (alone != crop).any(0)  # a few boxes are equal with and without JointCrop
    assert np.array_equal(sigmas[:, has_blur], blur[:, has_blur])


def test_jblur_blurs_both_views_or_neither_and_has_the_distribution_of_beta():
    _, sigma, *_ = drawn("--joint blur --beta 0")
    assert ((sigma[0] > 0) == (sigma[1] > 0)).all() and (sigma[0] > 0).mean() == pytest.approx(0.5, abs=0.03)
    both = sigma[:, sigma[0] > 0]
    assert both.min() >= 0.1 and both.max() <= 2.0
    s_b = math.log(20)
    assert np.log(both[1] / both[0]).std() == pytest.approx(s_b / math.sqrt(3), rel=0.05)  # uniform on [-s_b, s_b]


@pytest.mark.parametrize("pair, joint", [("global", [1, 0, 0]), ("local", [0, 1, 1]), ("both", [1, 1, 1])])
def test_joint_pair_says_which_pairs_have_joint_areas(pair, joint):
    """App. D: the two large crops, local crops 1 and 2, 3 and 4. JointBlur is of the large views, whatever the pair."""
    areas, sigmas, *_ = drawn(f"{LOCALS} both --beta -4 --joint-pair {pair}")  # -4 makes areas differ
    ratios = abs(np.log(areas[::2] / areas[1::2])) > math.log(2)
    assert [share > 0.85 for share in ratios.mean(1)] == [bool(one) for one in joint]
    assert abs(np.log(areas[2] / areas[4])).mean() > 0.3  # each pair by draws of its own
    assert areas[:2].min() > 0.19 and areas[2:].max() < 0.41
    assert np.array_equal(sigmas[:2], drawn(f"{LOCALS} blur --beta -4")[1][:2])
    assert np.array_equal(sigmas[2:], drawn(f"{LOCALS} none")[1][2:])


def test_center_suppressed_positions():
    box = drawn("--joint none --css-alpha 0.1")[3]
    room = 224 - box[:, 2]
    share = (box[:, 0] / np.maximum(room, 1))[room > 20]
    assert ((share < 0.1) | (share > 0.9)).mean() > 0.7 and share.min() >= 0 and share.max() <= 1  # the edges
    positions = moco.center_suppressed(np.random.default_rng(0).random(20_000), 0.6)
    assert positions.max() < 1 and positions.mean() == pytest.approx(0.5, abs=0.01)
    assert positions.var() == pytest.approx(0.25 / (2 * 0.6 + 1), abs=0.003)  # of Beta(0.6, 0.6)
    assert abs(np.corrcoef(positions.T)[0, 1]) < 0.03


def test_queue_is_first_in_first_out():
    """It wraps, and holds the last ones of more keys than it has rows."""
    queue = moco.Queue(5, 3)
    held = queue.keys.clone()
    for step, n in enumerate((2, 7, 1, 12)):
        keys = unit(n, 3, seed=step).float()
        queue.enqueue(keys)
        held = torch.cat([held, keys])[-5:]
        assert torch.equal(queue.keys.roll(-int(queue.position), 0), held)  # the oldest first


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shuffle_bn(groups, double):
    """Each key has the statistics of the rows that the shuffle puts into its group, of all views."""
    linear, views, seeded = nn.Linear(12, 5), list(torch.randn(2, 8, 3, 2, 2)), torch.Generator().manual_seed(2)
    model, z = nn.Sequential(nn.Flatten(), linear, nn.BatchNorm1d(5)), linear(torch.cat(views).flatten(1)).detach()
    expected = torch.empty(16, 5)
    for rows in torch.randperm(16, generator=torch.Generator().manual_seed(2)).chunk(groups):
        expected[rows] = (z[rows] - z[rows].mean(0)) / (z[rows].var(0, correction=0) + 1e-5).sqrt()
    model = moco.split_batch_norms(model, groups)
    torch.testing.assert_close(moco.encode_shuffled_keys(model, views, seeded), expected.view(2, 8, 5))
    torch.manual_seed(2)  # of the global generator
    torch.testing.assert_close(moco.encode_shuffled_keys(model, views), expected.view(2, 8, 5))


@pytest.mark.parametrize("method, flags, rows", [
    *((method, "--bn-groups 4", 4) for method in QUEUES),
    ("moco_jointcrop", "--moco v3", 16), ("logo", "--base simsiam", 16),
])  # fmt: skip
def test_an_image_changes_its_own_group(module, flags, rows):
    """Of the model that main makes: batch norm is over as many slices of the batch as are given."""
    flags += " --arch resnet_micro --batch-size 16 --image-size 16"
    model, x = state_of(module, flags)["model"], torch.randn(2, 16, 3, 16, 16)
    x[1, 1:] = x[0, 1:]
    for encode in (model.backbone, getattr(model, "momentum_backbone", model.backbone)):
        changed = (encode(x[0]) - encode(x[1])).abs().amax(1) > 1e-6
        assert changed.nonzero().flatten().tolist() == [*range(rows)]


def test_v3_contrast_is_info_nce_of_cosines_among_all_keys():
    q, k = unit(4, 6), unit(8, 6, seed=1)
    rows = [(q[i : i + 1], k[4 + i : 5 + i], torch.cat([k[: 4 + i], k[5 + i :]])) for i in range(4)]
    expected = 2 * 0.5 * sum(info_nce(*row, 0.5) for row in rows) / 4
    torch.testing.assert_close(moco.contrast(3 * q, 5 * k, 0.5, first=4), expected)


def test_v3_starts_from_zero_residual_branches_unless_the_encoder_is_a_users():
    own = timm.create_model("resnet18", num_classes=0, zero_init_last=False, **NANO)  # perhaps pre-trained
    for more, is_zero in ({}, True), (dict(encoder=own), False):
        model = state_of(moco, "--arch resnet_micro --batch-size 8 --moco v3", **more)["model"]
        blocks = [block for block in model.modules() if hasattr(block, "zero_init_last")]
        assert blocks and all(block.bn2.weight.any() != is_zero for block in blocks)


def test_recipes_of_moco():
    v1, v2, v3 = (moco.parse_args(["--dataset", "imagenet", "--moco", v]) for v in ("v1", "v2", "v3"))
    assert (v1.temperature, v1.milestones, v1.queue, v1.lr) == (0.07, (0.6, 0.8), 65536, 0.03)
    assert v1.momentum == v2.momentum == (0.999, 0.999) and v2.milestones == ()
    assert (v2.temperature, v2.epochs, v2.batch_size, v2.weight_decay, v2.bn_groups) == (0.2, 200, 256, 1e-4, 8)
    assert (v3.batch_size, v3.lr, v3.lr_batch, v3.momentum, v3.temperature) == (4096, 0.6, 256, (0.99, 1.0), 1.0)
    assert (v3.hidden, v3.blur_p, v3.solarize_p, v3.trust_coeff) == (4096, (1.0, 0.1), (0.0, 0.2), 0.001)
    models = [state_of(moco, f"--batch-size 8 --moco {v}")["model"] for v in ("v1", "v2")]
    assert [len(model.projector) for model in models] == [1, 3]  # Linear; Linear, ReLU, Linear
