"""moco_jointcrop.py against the papers: the joint sampler's law, views, queue, InfoNCE, MoCo v3's contrast."""

import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F

import common
import moco_jointcrop as moco

BETAS = (4, 2, 1, 0, -1, -2, -4)
# Means over the area law alone, s in [0.2, 1]: E|ln s_r| and P(|ln s_r| > ln 2), derived numerically from Algorithm 1.
MEAN_LOG = dict(zip(BETAS, (0.321, 0.582, 0.740, 0.805, 0.870, 1.028, 1.288), strict=True))
ABOVE_TWO = dict(zip(BETAS, (0.085, 0.360, 0.512, 0.570, 0.632, 0.781, 0.977), strict=True))
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


@pytest.mark.parametrize("beta", BETAS)
def test_algorithm1_law_of_the_ratio(beta):
    a, b = draws(400_000, 0.2, 1.0, beta)
    u = (b / a).log()
    assert u.abs().mean().item() == pytest.approx(MEAN_LOG[beta], abs=0.004)
    assert (u.abs() > math.log(2)).double().mean().item() == pytest.approx(ABOVE_TWO[beta], abs=0.004)
    assert u.mean().abs() < 0.01  # neither view is the larger one
    assert a.mean().item() == pytest.approx(b.mean().item(), abs=0.004)


def kolmogorov_smirnov(x, y):
    """The largest distance of two samples' distribution functions."""
    both = np.sort(np.concatenate([x, y]))
    shares = [np.searchsorted(np.sort(sample), both, "right") / len(sample) for sample in (x, y)]
    return abs(shares[0] - shares[1]).max()


@pytest.mark.parametrize("beta, low, high", [(3.0, 0.2, 1.0), (0.5, 0.1, 2.0), (0.0, 0.2, 1.0), (-0.7, 0.1, 2.0)])
def test_algorithm1_against_rejection_sampling(beta, low, high):
    reference = algorithm1(20_000, low, high, beta, np.random.default_rng(1)).T
    ours = torch.stack(draws(200_000, low, high, beta)).numpy()
    for pick in (lambda pair: pair[0], lambda pair: np.log(pair[1] / pair[0])):
        assert kolmogorov_smirnov(pick(reference), pick(ours)) < 1.95 / math.sqrt(20_000)  # far beyond 0.1 %


@pytest.mark.parametrize("low, high", [(0.2, 1.0), (0.999, 1.0), (1e-6, 1.0), (3.0, 900.0)])
def test_bounds_are_never_left(low, high):
    edges = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
    for beta in (1e-12, -1e-12, 1e-5, -1e-3, 0.0, 2.0, 50.0, -50.0, 1e6, None):
        at_edges = moco.joint_from_uniform(edges.repeat(3), edges.repeat_interleave(3), low, high, beta)
        for s in (*draws(20_000, low, high, beta), *at_edges):
            assert s.dtype == torch.float64 and s.isfinite().all() and s.min() >= low and s.max() <= high


def test_bounds_of_a_million_draws():
    for beta, offset in ((-1e-3, 0.0), (2.0, 0.1), (-4.0, 0.1)):
        for s in draws(1_000_000, 0.2, 1.0, beta, offset=offset):
            assert s.min() >= 0.2 and s.max() <= 1.0


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
    x = np.linspace(0.2, 5, 200_001)
    density = np.where(x <= 1, (x**2 - 0.04) / (2 * x**2 * 0.64), (1 - 0.04 * x**2) / (2 * x**2 * 0.64))  # Eq. 8
    assert np.gradient(cdf(x), x)[5:-5] == pytest.approx(density[5:-5], abs=1e-3)
    a, b = draws(500_000, 0.2, 1.0, None)
    ratio = np.sort((a / b).numpy())
    assert abs(cdf(ratio) - (np.arange(len(ratio)) + 0.5) / len(ratio)).max() < 1.95 / math.sqrt(len(ratio))
    assert (b / a).log().abs().mean().item() == pytest.approx(0.494, abs=0.003)


def mean_corner_distance(beta, offset, n=100_000):
    """Figure 7: crops of a 224 x 224 image, s in [0.2, 1]; the mean distance between the two top-left corners."""
    sizes, rng = np.full((n, 2), 224), np.random.default_rng(0)
    areas = [None, None] if beta is None else [a.numpy() for a in draws(n, 0.2, 1.0, beta, offset=offset)]
    boxes = [common.random_resized_crop(sizes, rng.random((n, 22)), (0.2, 1.0), area=a) for a in areas]
    return np.hypot(*(boxes[0] - boxes[1])[:, :2].T).mean()


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_figure7_corner_distances(every):
    assert mean_corner_distance(None, 0.0) == pytest.approx(RANDOM_CROP, abs=0.3)
    for i in range(0, len(FIGURE7), every):
        assert mean_corner_distance(4 - i / 2, 0.0) == pytest.approx(FIGURE7[i], abs=1.0)
        assert mean_corner_distance(4 - i / 2, 0.1) == pytest.approx(FIGURE7[i], abs=0.3)


def sampled(flags, n=4000):
    args = moco.parse_args(["--dataset", "imagenet", *flags])
    sizes = np.full((n, 2), 224)
    sample, width = moco.make_sample(args)
    table = common.uniform(0, 0, np.arange(n), width)
    before = table.copy()
    cuts, colours = sample(np.arange(n), sizes, table)
    assert np.array_equal(table, before)
    area, colour = np.stack([box[:, 2] * box[:, 3] / 224**2 for _, box, _ in cuts]), np.stack(colours, 1)
    return area, colour[:, :, common.COLOUR.index("sigma")].T, colour


def test_views_of_each_joint_mode():
    modes = ("none", "crop", "blur", "both", "either")
    log = {m: np.log(np.divide(*sampled(["--joint", m, "--beta", "-4"])[0])) for m in modes}
    extreme = {m: (abs(u) > math.log(2)).mean() for m, u in log.items()}
    assert extreme["none"] == extreme["blur"] and 0.2 < extreme["none"] < 0.36
    assert extreme["crop"] == extreme["both"] > 0.93
    assert extreme["either"] == pytest.approx((extreme["none"] + extreme["crop"]) / 2, abs=0.05)
    base = sampled(["--joint", "none"])[2]
    for mode in ("crop", "blur", "both", "either"):  # all but the blur's column is as in the baseline
        other = sampled(["--joint", mode])[2]
        keep = [i for i, name in enumerate(common.COLOUR) if name != "sigma"]
        assert np.array_equal(base[:, :, keep], other[:, :, keep])


def test_jblur_has_one_coin_and_the_law_of_beta():
    _, sigma, _ = sampled(["--joint", "blur", "--beta", "0"])
    assert ((sigma[0] > 0) == (sigma[1] > 0)).all() and (sigma[0] > 0).mean() == pytest.approx(0.5, abs=0.03)
    both = sigma[:, sigma[0] > 0]
    assert both.min() >= 0.1 and both.max() <= 2.0
    s_b = math.log(20)
    assert np.log(both[1] / both[0]).std() == pytest.approx(s_b / math.sqrt(3), rel=0.05)  # uniform on [-s_b, s_b]
    _, independent, _ = sampled(["--joint", "none"])
    assert ((independent[0] > 0) & (independent[1] > 0)).mean() == pytest.approx(0.25, abs=0.03)


def test_centre_suppressed_positions():
    args = moco.parse_args(["--dataset", "imagenet", "--joint", "none", "--css-alpha", "0.1"])
    sample, width = moco.make_sample(args)
    cuts, _ = sample(np.arange(3000), np.full((3000, 2), 224), common.uniform(0, 0, np.arange(3000), width))
    _, box, _ = cuts[0]
    room = 224 - box[:, 2]
    share = (box[:, 0] / np.maximum(room, 1))[room > 20]
    assert ((share < 0.1) | (share > 0.9)).mean() > 0.7 and share.min() >= 0 and share.max() <= 1  # the edges
    positions = moco.centre_suppressed(np.random.default_rng(0).random(20_000), 0.6)
    assert positions.max() < 1 and positions.mean() == pytest.approx(0.5, abs=0.01)
    assert positions.var() == pytest.approx(0.25 / (2 * 0.6 + 1), abs=0.003)  # of Beta(0.6, 0.6)
    assert abs(np.corrcoef(positions.T)[0, 1]) < 0.03


def test_released_refuses_what_it_lacks(capsys):
    for flags in (["--joint", "blur"], ["--beta", "1"], ["--css-alpha", "0.6"]):
        with pytest.raises(SystemExit) as stop:
            moco.parse_args(["--dataset", "imagenet", "--variant", "released", *flags])
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------------ MoCo


def unit(*shape, seed=0, grad=False):
    x = F.normalize(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=-1)
    return x.requires_grad_(grad)


def test_info_nce_against_a_loop():
    q, k, queue = unit(5, 7, grad=True), unit(5, 7, seed=1), unit(11, 7, seed=2)
    total = 0.0
    for i in range(5):
        positive = math.e ** ((q[i] * k[i]).sum() / 0.2)
        total = total - torch.log(positive / (positive + sum(math.e ** ((q[i] * n).sum() / 0.2) for n in queue)))
    ours = moco.info_nce(q, k, queue, 0.2)
    torch.testing.assert_close(ours, total / 5)
    torch.testing.assert_close(*(torch.autograd.grad(loss, q, retain_graph=True)[0] for loss in (ours, total / 5)))
    same = unit(1, 7).expand(4, 7)
    assert moco.info_nce(same, same, same[:1].expand(9, 7), 0.07).item() == pytest.approx(math.log(10))  # equal logits


@pytest.mark.parametrize("length, sizes", [(8, [3, 3, 3, 3]), (5, [2, 7, 1, 12])])
def test_queue_is_first_in_first_out(length, sizes):
    queue = moco.Queue(length, 3, seed=0)
    held = [tuple(row) for row in queue.keys.tolist()]
    torch.testing.assert_close(queue.keys.norm(dim=1), torch.ones(length))
    for step, n in enumerate(sizes):
        keys = unit(n, 3, seed=step).float()
        queue.enqueue(keys)
        held = (held + [tuple(row) for row in keys.tolist()])[-length:]
        order = [(int(queue.position) + i) % length for i in range(length)]  # oldest first
        assert [tuple(queue.keys[i].tolist()) for i in order] == held


@pytest.mark.parametrize("views", [1, 3])
def test_encode_keys_restores_the_order(views):
    images = [torch.randn(6, 3, 2, 2) + 10 * v for v in range(views)]
    seen = []

    def encode(x):
        seen.append(x)
        return x.flatten(1)

    keys = moco.encode_keys(encode, images, torch.Generator().manual_seed(3))
    torch.testing.assert_close(keys, torch.stack([v.flatten(1) for v in images]))
    assert not torch.equal(seen[0].flatten(1), torch.cat(images).flatten(1)) and not keys.requires_grad


def tiny(*flags, encoder=None):
    queue = [] if "v3" in flags else ["--queue", "32"]
    args = moco.parse_args(["--arch", "resnet_micro", "--batch-size", "8", "--device", "cpu", *queue, *flags])
    common.join_processes(args)
    torch.manual_seed(0)
    model = (moco.MoCoV3 if "v3" in flags else moco.MoCo)(args, encoder)
    return args, moco.group_batch_norms(model, args.bn_groups).double()


def images():
    return [*torch.randn(2, 8, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))]


def test_moco_forward_is_info_nce_of_its_embeddings():
    args, model = tiny()
    loss, metrics = model(images(), 0)
    torch.testing.assert_close(loss, moco.info_nce(metrics["q"], metrics["k"], model.queue.keys, 0.2))
    loss.backward()
    assert all((p.grad is None) == n.startswith("momentum") for n, p in model.named_parameters())
    before = model.queue.keys.clone()
    model.update(0.9)
    torch.testing.assert_close(model.queue.keys[:8], model.new_keys)
    assert torch.equal(before[8:], model.queue.keys[8:])


def test_momentum_update_moves_by_exactly_one_minus_m():
    _, model = tiny("--moco", "v3")
    pairs = [(model.backbone, model.momentum_backbone), (model.projector, model.momentum_projector)]
    for m in (1.0, 0.9, 0.0):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        slow = [[p.clone() for p in key.parameters()] for _, key in pairs]
        model.update(m)
        for (query, key), before in zip(pairs, slow, strict=True):
            for new, old, fast in zip(key.parameters(), before, query.parameters(), strict=True):
                torch.testing.assert_close(new, m * old + (1 - m) * fast, rtol=1e-14, atol=1e-15)


def test_v3_contrast_against_a_loop():
    q, k = unit(4, 6, grad=True), unit(8, 6, seed=1)
    total = 0.0
    for i in range(4):
        logits = torch.stack([(q[i] @ k[j]) / (q[i].norm() * k[j].norm()) / 0.5 for j in range(8)])
        total = total - (logits[4 + i] - torch.log(torch.exp(logits).sum())) / 4
    ours = moco.contrast(3 * q, 5 * k, 0.5, first=4)  # cosine: lengths do not matter; positives are the second half
    torch.testing.assert_close(ours, 2 * 0.5 * total)
    torch.testing.assert_close(*(torch.autograd.grad(loss, q, retain_graph=True)[0] for loss in (ours, total)))


def test_v3_is_symmetric_and_has_no_queue():
    _, model = tiny("--moco", "v3")
    one, two = images()
    model.eval()  # running statistics, so that the order of the views cannot matter
    torch.testing.assert_close(model([one, two], 0)[0], model([two, one], 0)[0])
    assert not any("queue" in name for name in model.state_dict())
    model.update(0.9)


def test_v3_starts_from_zero_residual_branches_of_its_own_encoder():
    def last_norms(model):
        return [block.bn2.weight for block in model.modules() if hasattr(block, "zero_init_last")]

    assert all(not weight.any() for weight in last_norms(tiny("--moco", "v3")[1]))
    own = timm.create_model("resnet18", num_classes=0, zero_init_last=False)  # perhaps pre-trained
    assert all(weight.all() for weight in last_norms(tiny("--moco", "v3", encoder=own)[1]))


def test_optimizers_have_every_parameter_once():
    for version, kind in (("v1", "SGD"), ("v3", "Lars")):
        args, model = tiny("--moco", version)
        optimizer = moco.make_optimizer(args, model)
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        assert type(optimizer).__name__ == kind
        assert len(grouped) == len({id(p) for p in grouped}) == sum(p.requires_grad for p in model.parameters())
    assert all(p.dim() > 1 for group in optimizer.param_groups if group["weight_decay"] for p in group["params"])
    assert all(p.dim() <= 1 for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"])


def test_recipes_of_moco():
    v1, v2, v3 = (moco.parse_args(["--dataset", "imagenet", "--moco", v]) for v in ("v1", "v2", "v3"))
    assert (v1.temperature, v1.milestones, v1.queue, v1.lr, v1.momentum) == (0.07, (0.6, 0.8), 65536, 0.03, 0.999)
    assert (v2.temperature, v2.epochs, v2.batch_size, v2.weight_decay, v2.bn_groups) == (0.2, 200, 256, 1e-4, 8)
    assert (v3.batch_size, v3.lr, v3.lr_batch, v3.momentum, v3.temperature) == (4096, 0.6, 256, (0.99, 1.0), 1.0)
    assert (v3.hidden, v3.blur_prob, v3.solarize_p, v3.bn_groups) == (4096, (1.0, 0.1), (0.0, 0.2), 1)
    small = moco.parse_args(["--dataset", "cifar10", "--moco", "v3", "--arch", "resnet_micro", "--epochs", "50"])
    assert (small.batch_size, small.hidden, small.blur_prob, small.queue) == (512, 2048, (0.0, 0.0), 0)
    assert small.warmup == 1.0  # a tenth of the recipe's epochs: a tenth of its warm-up
    heads = {v: len(tiny("--moco", v)[1].projector) for v in ("v1", "v2")}
    assert heads == {"v1": 1, "v2": 3}  # linear; Linear, ReLU, Linear
