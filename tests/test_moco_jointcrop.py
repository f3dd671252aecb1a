"""Tests moco_jointcrop.py against the papers: the joint sampler, views, queue, ShuffleBN, losses, LARS, recipes."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import assert_same, generator, info_nce, ks, state_of, unit, values
from PIL import Image
from torch import nn
from torchvision.transforms import v2

import common
import logo
import moco_jointcrop as moco


def even_draws(low, high, beta, offset=0.0):
    """Return (2, 32768) samples from evenly spread uniform pairs, as exact (within 0.002) as 10^6 random samples."""
    i = np.arange(2**15)
    pairs = zip(((i + 0.5) / len(i)).tolist(), (i * (5**0.5 - 1) / 2 % 1).tolist(), strict=True)
    return np.transpose([moco.joint_from_uniform(u, v, low, high, beta, offset) for u, v in pairs])


def algorithm1(n, low, high, beta, rng, offset=0.0):
    """Draw n pairs by Algorithm 1 as printed, with rejection sampling for the truncated normal: (s_1, s_2)."""
    s_b = math.log(high / low - offset)
    u = rng.uniform(-s_b, s_b, n) if beta == 0 else rng.normal(0, s_b / abs(beta), 10 * n)
    u = u[abs(u) <= s_b][:n]
    if beta < 0:
        u = np.where(u < 0, -s_b - u, s_b - u)
    s_r = np.exp(u)
    s_1 = rng.uniform(np.maximum(low, low / s_r), np.minimum(high / s_r, high))
    return s_1, s_1 * s_r


@pytest.mark.parametrize("beta, low, high, offset", [
    (4, 0.2, 1, 0), (0.5, 0.1, 2, 0), (0, 0.2, 1, 0), (-0.7, 0.1, 2, 0), (-4, 0.2, 1, 0.1)
])  # fmt: skip
def test_algorithm1_against_rejection_sampling(beta, low, high, offset):
    reference = algorithm1(200_000, low, high, beta, np.random.default_rng(1), offset)
    ours = even_draws(low, high, beta, offset)
    assert ks(reference[0], ours[0]) < 1  # a distance of 0.006 is three times that of a random reference
    assert ks(reference[1] / reference[0], ours[1] / ours[0]) < 1


@pytest.mark.parametrize("low, high", [(0.2, 1.0), (0.999, 1.0), (1e-6, 1.0), (3.0, 900.0)])
def test_bounds_are_never_left(low, high):
    edges = 0.0, 1 - 2**-53, 0.5
    for beta in (1e-12, -1e-12, 1e-5, -1e-3, 0.0, 2.0, 50.0, -50.0, 1e6, None):
        pairs = [moco.joint_from_uniform(u, v, low, high, beta) for u in edges for v in edges]
        for s in (*moco.sample_joint(1000, low, high, beta, generator()), torch.tensor(pairs, dtype=torch.float64)):
            assert s.dtype == torch.float64 and s.isfinite().all() and s.min() >= low and s.max() <= high


@pytest.mark.parametrize("beta", [0.0, 2.0, -2.0])
def test_an_offset_beyond_the_range_leaves_equal_areas(beta):
    a, b = moco.joint_from_uniform(0.9, 0.5, 0.95, 1.0, beta, offset=0.1)
    assert a == b == pytest.approx(0.975)


def test_randomcrop_ratio_density_eq8_eq10():
    """The ratio of independent areas in [0.2, 1] has the distribution function of Eq. 8, and App. H's mean."""
    a, b = even_draws(0.2, 1.0, None)
    x = a / b
    below_1 = 25 * x / 32 + 1 / (32 * x) - 5 / 16
    above_1 = 21 / 16 - x / 32 - 25 / (32 * x)
    assert ks(np.where(x <= 1, below_1, above_1)) < 0.5  # a distance of 0.0028
    assert abs(np.log(x)).mean() == pytest.approx(0.494, abs=0.003)


def mean_corner_distance(areas):
    """Return the mean corner distance of two crops of a 224 x 224 image, with ten tries per crop. areas: (2, n)."""
    rng = np.random.default_rng(0)
    aspect = np.exp(rng.uniform(-math.log(4 / 3), math.log(4 / 3), (10, *areas.shape)))
    sides = np.round(224 * np.sqrt([areas / aspect, areas * aspect]))  # height and width
    fits = (sides <= 224).all(0)
    first = np.take_along_axis(sides, fits.argmax(0)[None, None], 1)[:, 0]
    size = np.where(fits.any(0), first, 224)
    corners = np.floor(rng.random(size.shape) * (225 - size))
    return np.hypot(*(corners[:, 0] - corners[:, 1])).mean()


@pytest.mark.slow
def test_figure7_corner_distances():
    """The mean distances of two crops' corners match Fig. 7, to 1 px (0.3 px with the released offset of 0.1)."""
    figure7 = [40.63, 42.33, 44.36, 47.14, 50.35, 53.73, 56.53, 58.41, 59.20]
    figure7 += [59.73, 61.71, 64.53, 67.78, 71.29, 74.24, 76.77, 78.82]
    for i, distance in enumerate(figure7):
        for offset, error in ((0.0, 1.0), (0.1, 0.3)):
            areas = np.tile(even_draws(0.2, 1.0, 4 - i / 2, offset), 3)  # three positions for each pair of areas
            assert mean_corner_distance(areas) == pytest.approx(distance, abs=error)


@pytest.fixture
def crops_are_boxes(monkeypatch):
    """Make torchvision's crop return an image of two pixels, whose values are the box."""

    def resized_crop(image, top, left, height, width, *_, **__):
        return Image.fromarray(np.array([[[top, left, height], [width, 0, 0]]], np.uint8))

    monkeypatch.setattr(v2.functional, "resized_crop", resized_crop)


def boxes_in(crops):
    """Return (top, left, height, width), (n, 4), of crops (n, 3, 1, 2) that are boxes."""
    return crops[:, :, 0].transpose(1, 2).flatten(1)[:, :4].double().numpy()


def boxes_by(transform, image, n, **how):
    """Return the boxes of both crops in n calls, (n, 4) each."""
    calls = [[v2.functional.pil_to_tensor(crop) for crop in transform(image, **how)] for _ in range(n)]
    return [boxes_in(torch.stack(crops)) for crops in zip(*calls, strict=True)]


def test_crops_that_are_not_joint_are_torchvisions(crops_are_boxes):
    image, how = Image.new("RGB", (60, 25)), dict(scale=(0.3, 0.9), ratio=(0.5, 2))
    ours = boxes_by(moco.JointCrop(8, **how, beta=-4.0), image, 1200, joint=False)
    theirs = np.array([v2.RandomResizedCrop.get_params(image, *how.values()) for _ in range(3000)], float)
    for boxes in ours:  # top, left, height, width, area, aspect ratio, bottom, right
        a, b = ([*x.T, x[:, 2] * x[:, 3], x[:, 3] / x[:, 2], *(x[:, :2] + x[:, 2:]).T] for x in (boxes, theirs))
        assert max(ks(x, y) for x, y in zip(a, b, strict=True)) < 2
    assert abs(np.corrcoef(*(boxes[:, 2:].prod(1) for boxes in ours))[0, 1]) < 4 / 1200**0.5


@pytest.mark.parametrize("size", [(10, 200), (200, 10), (1, 100), (100, 1), (3, 50), (37, 5)])
def test_if_no_aspect_ratio_fits_the_crop_is_torchvisions_or_the_whole_image(size):
    """Its pixels are torchvision's, and center-suppressed sampling does not move it (D2)."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    center, bicubic = v2.RandomResizedCrop.get_params(image, [0.9, 1], [3 / 4, 4 / 3]), v2.InterpolationMode.BICUBIC
    for whole, box in (False, center), (True, (0, 0, *size)):
        crop = moco.JointCrop(6, (0.9, 1.0), interpolation=bicubic, whole=whole, css_alpha=0.1)
        expected = v2.functional.resized_crop(image, *box, [6, 6], bicubic)
        assert all(one == expected for joint in (True, False) for one in crop(image, joint=joint))


@pytest.mark.parametrize("scale", [(0.08, 1.0), (1.0, 1.0), (1e-5, 1e-4)])
def test_crops_are_inside(scale, crops_are_boxes):
    """Crops of PIL images and of tensors stay inside, even if center-suppressed sampling moves them (App. G)."""
    transform = moco.JointCrop(8, scale, css_alpha=0.05)
    for size in [(1, 1), (1, 2), (2, 1), (1, 250), (250, 1), (2, 3), (7, 5), (32, 32), (31, 97), (250, 180)]:
        images = Image.new("RGB", size[::-1]), torch.zeros(3, *size)
        for image, joint in itertools.product(images, (True, False)):
            for box in boxes_by(transform, image, 8, joint=joint):
                assert (box[:, :2] >= 0).all() and (box[:, 2:] >= 1).all() and (box[:, :2] + box[:, 2:] <= size).all()


def drawn(flags, n=600):
    """Return what a run draws for n images: areas as fractions and sigmas, (views, n) each, and boxes per view."""
    made, words = [], f"--dataset imagenet --arch resnet_micro --dim 8 --batch-size {n} --device cpu --workers 0"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):  # the model gets None as views
        patch.setattr(common, "open_run", lambda *_: (dict(images=None), []))
        patch.setattr(moco, "augment", lambda x, _, view, sigma: made.append((view, boxes_in(x), sigma)))
        moco.main(moco.parse_args(f"{words} {flags}".split()), train=[(Image.new("RGB", (224, 224)), 0)] * n)
    views, boxes, sigmas = zip(*made, strict=True)
    assert views == (*range(len(views)),)
    return np.stack([box[:, 2:].prod(1) / 224**2 for box in boxes]), np.stack(sigmas), boxes


def shares_of_extremes(areas):
    """Return, for each pair of views, the fraction of images where one has over twice the area of the other."""
    return (abs(np.log(areas[::2] / areas[1::2])) > math.log(2)).mean(1)


def test_views_of_each_joint_mode(crops_are_boxes):
    """`crop` and `both` draw areas by Algorithm 1, `blur` and `both` sigmas. `either` draws one of them per image."""
    modes = dict(none="", crop="--beta -4", blur="--beta -4", both="--beta -4", either="--beta -4 --joint-prob 0.3")
    found = {mode: drawn(f"--crop-scale 0.14 0.7 --joint {mode} {flags}") for mode, flags in modes.items()}
    extremes = {mode: shares_of_extremes(areas)[0] for mode, (areas, *_) in found.items()}
    alike = {mode: (sigmas[0] > 0) == (sigmas[1] > 0) for mode, (_, sigmas, _) in found.items()}
    assert max(extremes["none"], extremes["blur"]) < 0.36 and min(extremes["crop"], extremes["both"]) > 0.93
    assert alike["blur"].all() and alike["both"].all()
    assert alike["none"].mean() == pytest.approx(0.5, abs=0.08) == alike["crop"].mean()
    assert extremes["either"] == pytest.approx(0.3 * extremes["crop"] + 0.7 * extremes["none"], abs=0.08)
    assert alike["either"].mean() == pytest.approx(0.3 * 0.5 + 0.7, abs=0.06)
    assert shares_of_extremes(found["either"][0][:, ~alike["either"]])[0] > 0.9  # without JointBlur it is JointCrop
    crops = [found[mode][0] for mode in ("crop", "both")]  # drawn for each image, and small enough to fit
    blurs = [sigmas[:, sigmas[0] > 0] for _, sigmas, _ in (found["blur"], found["both"])]
    for pairs, low, high in ((crops, 0.14, 0.7), (blurs, 0.1, 2.0)):
        theirs = algorithm1(5000, low, high, -4.0, np.random.default_rng(0))
        for one, two in pairs:
            assert ks(one, theirs[0]) < 2 and ks(two / one, theirs[1] / theirs[0]) < 2


@pytest.mark.parametrize("flags, expected", [
    ("--moco v3 --local-crops 3", [1, 0.1, 1, 1, 1]), ("--blur-p 0.2 0.7", [0.2, 0.7]),
])  # fmt: skip
def test_each_view_has_its_own_probability_of_a_blur(flags, expected, crops_are_boxes):
    """Local crops, whose number may be odd, have the query's probability. Sigmas are uniform without JointBlur."""
    for joint in ("none", "blur"):
        _, sigma, _ = drawn(f"--joint {joint} {flags}", 320)
        assert (sigma > 0).mean(1) == pytest.approx(expected, abs=0.08)
        assert joint == "blur" or ks((sigma[sigma > 0] - 0.1) / 1.9) < 2


@pytest.mark.parametrize("pair, joint", [("global", [1, 0, 0]), ("local", [0, 1, 1]), ("both", [1, 1, 1])])
def test_joint_pair_says_which_pairs_have_joint_areas(pair, joint, crops_are_boxes):
    """The pairs are the two large crops and local crops 1-2 and 3-4 (App. D). JointBlur only acts on the large ones."""
    areas, sigmas, _ = drawn(f"--local-crops 4 --joint both --beta -4 --joint-pair {pair}", 320)
    assert [share > 0.85 for share in shares_of_extremes(areas)] == [bool(one) for one in joint]
    assert abs(np.log(areas[2] / areas[4])).mean() > 0.3  # each local pair has draws of its own
    assert ((sigmas[0] > 0) == (sigmas[1] > 0)).all()
    assert ((sigmas[2] > 0) == (sigmas[3] > 0)).mean() == pytest.approx(0.5, abs=0.09)


def test_center_suppressed_positions(crops_are_boxes):
    for joint in ("none", "crop"):
        box = drawn(f"--joint {joint} --css-alpha 0.1", 200)[2][0]
        room = 224 - box[:, 2:]
        share = (box[:, :2] / np.maximum(room, 1))[room > 20]
        assert ((share < 0.1) | (share > 0.9)).mean() > 0.7  # near the edges
    positions = np.array([moco.center_suppressed(10**6, 0.5) for _ in range(2000)])
    assert ks(2 / math.pi * np.arcsin(np.sqrt(positions / 10**6))) < 2  # the distribution function of Beta(0.5, 0.5)
    assert {0, 3} <= {moco.center_suppressed(3, 0.01) for _ in range(200)} <= {0, 1, 2, 3}


def test_queue_is_first_in_first_out():
    """The queue keeps the last keys, the oldest first, also if it gets more than it has rows."""
    queue = moco.Queue(5, 3)
    held = [*queue.keys.clone()]
    for step, n in enumerate((2, 7, 1, 12)):
        keys = unit(n, 3, seed=step).float()
        queue.enqueue(keys)
        held += [*keys]
        assert torch.equal(queue.keys, torch.stack(held[-5:]))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shuffle_bn(groups, double):
    """Each key is normalized by the statistics of its group, into which the shuffle puts rows of all views."""
    linear, views = nn.Linear(12, 5), list(torch.randn(2, 8, 3, 2, 2))
    model, z = nn.Sequential(nn.Flatten(), linear, nn.BatchNorm1d(5)), linear(torch.cat(views).flatten(1)).detach()
    torch.manual_seed(2)
    expected = torch.empty(16, 5)
    for rows in torch.randperm(16).chunk(groups):
        expected[rows] = (z[rows] - z[rows].mean(0)) / (z[rows].var(0, correction=0) + 1e-5).sqrt()
    model = moco.convert_split_batchnorm(model, groups)
    torch.manual_seed(2)
    torch.testing.assert_close(moco.encode_shuffled_keys(model, views), expected.view(2, 8, 5))


def test_v3_contrast_is_info_nce_of_cosines_among_all_keys():
    q, k = (3 * unit(4, 6)).requires_grad_(), (5 * unit(8, 6, seed=1)).requires_grad_()
    a, b = (x / x.norm(dim=1, keepdim=True) for x in (q, k))
    rows = [(a[i : i + 1], b[4 + i : 5 + i], torch.cat([b[: 4 + i], b[5 + i :]])) for i in range(4)]
    expected = 2 * 0.5 * sum(info_nce(*row, 0.5) for row in rows) / 4
    assert_same(moco.contrast(q, k, 0.5, first=4), expected, q, k)


@pytest.mark.parametrize("kind, own", [("MoCo", dict(queue=32)), ("MoCoV3", dict(hidden=24))])
def test_loss_with_local_crops_and_its_gradient(kind, own, double):
    """With local crops (App. D), MoCo v2's loss is the mean of all terms, and MoCo v3's is twice the mean."""
    model = getattr(moco, kind)(nn.Identity(), 8, dim=24, temperature=0.3, **own)
    model.query = lambda x: nn.functional.normalize(x[:, :, 0, :8].flatten(1), dim=1)  # pixels of an image of any size
    model.key = lambda x: nn.functional.normalize(x[:, :, 1, :8].flatten(1), dim=1)
    views = [torch.randn(5, 3, size, size).requires_grad_() for size in (16, 16, 8, 8)]
    q, keys = [model.query(view) for view in views], [model.key(view).detach() for view in views[:2]]
    if kind == "MoCo":
        expected = sum(info_nce(q[i], keys[1], model.queue.keys, 0.3) for i in (0, 2, 3)) / 3
    else:
        pairs = (0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)  # query of view i, keys of view j
        expected = 2 * sum(moco.contrast(q[i], keys[j], 0.3, 0) for i, j in pairs) / 6
    assert_same(model(views)[0], expected, *views)


def test_lars_without_weight_decay():
    """Weights have a trust ratio of 0.001 |w| / |g|. Biases have none, although their weight decay is 0, too."""
    parameters = nn.ParameterList([torch.ones(3, 4), torch.ones(12)])
    optimizer = moco.lars(parameters, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    gradient = torch.arange(12.0)
    for x in parameters:
        x.grad = gradient.view(x.shape).clone()
    optimizer.step()
    for x, ratio in zip(parameters, (0.001 * 12**0.5 / gradient.norm(), 1.0), strict=True):
        torch.testing.assert_close(x.detach().flatten(), 1 - 0.5 * ratio * gradient)


def test_v3_and_simsiam_start_from_zero_residual_branches():
    for module, flags, is_zero in (moco, "--moco v3", True), (moco, "--moco v2", False), (logo, "--base simsiam", True):
        model = state_of(module, f"--arch resnet_micro --batch-size 8 {flags}")["model"]
        blocks = [block for block in model.modules() if hasattr(block, "zero_init_last")]
        assert blocks and all(block.bn2.weight.any() != is_zero for block in blocks)


def test_recipes_of_moco():
    names = "temperature milestones queue momentum batch_size lr min_lr epochs weight_decay bn_groups"
    assert values(moco, "--dataset imagenet", names) == [0.2, [], 65536, [0.999, 0.999], 256, 0.03, 0, 200, 1e-4, 8]
    v1 = [0.07, [0.6, 0.8], 65536, [0.999, 0.999], 256, 0.03, 0]
    assert values(moco, "--dataset imagenet --moco v1", names)[:7] == v1
    names = "batch_size lr min_lr momentum temperature hidden blur_p"
    assert values(moco, "--dataset imagenet --moco v3", names) == [4096, 0.6, 0, [0.99, 1], 1, 4096, [1, 0.1]]
    models = [state_of(moco, f"--batch-size 8 --moco {v}")["model"] for v in ("v1", "v2")]
    assert [len(model.projector) for model in models] == [1, 3]  # Linear; Linear, ReLU, Linear
    # The authors' demo (facebookresearch/moco, branch colab-notebook): a cosine, with a peak of 0.06 for 512 images
    demo = dict(arch="resnet18", epochs=200, batch_size=512, weight_decay=5e-4, temperature=0.1, queue=4096, dim=128)
    demo |= dict(bn_groups=8, momentum=[0.99, 0.99], crop_scale=[0.08, 1.0], blur_p=[0.0, 0.0])
    demo |= dict(lr=0.03, warmup=0.0, min_lr=0.0, milestones=[])
    assert values(moco, "--dataset cifar10 --moco v1 --joint none", " ".join(demo)) == [*demo.values()]
    own = dict(demo, temperature=0.2, warmup=1.0, crop_scale=[0.2, 1.0])  # MoCo v2's temperature, App. H's areas
    assert values(moco, "--dataset cifar10", " ".join(own)) == [*own.values()]
    assert values(moco, "--dataset stl10 --moco v1", "batch_size lr milestones min_lr") == [512, 0.03, [], 0]
