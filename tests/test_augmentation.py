"""Augmentations match torchvision's and the papers' pipelines. Their draws are independent and well distributed."""

import itertools
import re

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF
from conftest import MODULES, generator, ks, slow_but
from methods import DRAWN, RECORDS
from PIL import Image
from tiny import run

import common

ADJUST = ("brightness", "contrast", "saturation", "hue")
OPERATIONS = {  # name: (our function of images and p; torchvision's, which changes all images)
    "horizontal_flip": (common.horizontal_flip, TF.horizontal_flip),
    "grayscale": (common.grayscale, lambda x: TF.rgb_to_grayscale(x, 3)),
    "solarize": (common.solarize, lambda x: TF.solarize(x, 0.5)),
    "gaussian_blur": (lambda x, p: common.gaussian_blur(x, (0.8, 0.8), p), lambda x: TF.gaussian_blur(x, 7, 0.8)),
    "color_jitter": (lambda x, p: common.color_jitter(x, 0.5, 0, 0, 0, p), None),
}


def noise(n, height=20, width=17, seed=0):
    return torch.rand(n, 3, height, width, generator=generator(seed))


@pytest.fixture
def changes(monkeypatch):
    """Return a list to which each adjustment in `color_jitter` appends (name, factors), in the order of the calls."""
    changes = []
    for name in ADJUST:

        def adjust(x, factor, name=name, original=getattr(common, f"adjust_{name}")):
            changes.append((name, factor.flatten()))
            return original(x, factor) if len(x) else x

        monkeypatch.setattr(common, f"adjust_{name}", adjust)
    return changes


def test_jitter_is_torchvisions_by_each_images_factors(changes):
    """Jittered images match torchvision's in random orders and small batches, even if gray or of pure colors."""
    for n in [1, 2, 24] * 12:
        x = noise(n, seed=n)
        x[4:8], x[8:16] = x[4:8, :1].clone(), x[8:16].round()
        before = x.clone()
        changes.clear()
        y = common.color_jitter(x, 1.0, 1.0, 1.5, 0.5, p=0.7)
        drawn = (y != x).flatten(1).any(1)
        assert torch.equal(x, before) and {len(factors) for _, factors in changes} == {int(drawn.sum())}
        theirs = [*x[drawn]]
        for name, factors in changes:
            adjust = getattr(TF, f"adjust_{name}")
            theirs = [adjust(image, factor) for image, factor in zip(theirs, factors.tolist(), strict=True)]
        torch.testing.assert_close([*y[drawn]], theirs, rtol=0, atol=2e-5)
        half, angle = x.half(), torch.full((n, 1, 1, 1), 0.25)  # gray pixels stay gray, even in half precision
        ours, theirs = common.adjust_hue(half, angle.half()), common.adjust_hue(half.float(), angle)
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0.02)


@pytest.mark.parametrize("shape", [(21, 18), (18, 40), (33, 17), (9, 2), (1, 7), (1, 1)])
def test_blur_is_torchvisions_by_each_images_sigma(shape):
    """Each blurred image matches torchvision's. The radius is 4 times the largest sigma, or less in small images."""
    x, p = noise(9, *shape).double(), torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1])
    sigma = torch.tensor([0.1, 0.5, 1.0, 1.3, 2.0, 2.0, 3.0, 0.0, 0.7], dtype=torch.float64)
    kernel = 2 * min(12, shape[0] - 1, shape[1] - 1) + 1
    rows = zip(x, sigma.tolist(), p.tolist(), strict=True)
    theirs = torch.stack([TF.gaussian_blur(image, [kernel] * 2, [s] * 2) if on else image for image, s, on in rows])
    ours = common.gaussian_blur(x, sigma, p)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(common.gaussian_blur(x.float(), sigma, p), theirs.float(), rtol=0, atol=2e-6)
    assert torch.equal(ours[p == 0], x[p == 0])
    torch.testing.assert_close(common.gaussian_blur(x[:, :1], sigma, p), ours[:, :1])  # gray images


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_image_is_drawn_with_probability_p(name):
    """Each image changes with probability p, as in torchvision, independently of its neighbors and of other calls."""
    (operation, theirs), n, x = OPERATIONS[name], 4000, noise(4000, 4, 4)
    before, found = x.clone(), []
    for p in (0.0, 0.2, 1.0, 0.5, 0.5):
        y = operation(x, p)
        drawn = (y != x).flatten(1).any(1)
        assert torch.equal(x, before) and not y.requires_grad
        assert abs(drawn.double().mean() - p) <= 4 * (p * (1 - p) / n) ** 0.5
        if theirs:
            torch.testing.assert_close(y[drawn], theirs(x[drawn]), rtol=0, atol=4e-6)
        found.append(drawn.double())
    *_, one, two = found
    for a, b in (one, two), (one[1:], one[:-1]):  # two calls, and neighbors in a batch
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4 / n**0.5


def test_factors_of_a_jitter_are_uniform_and_independent(changes):
    common.color_jitter(noise(4000, 2, 2), 0.4, 0.3, 1.5, 0.1, p=0.8)
    ranges = dict(brightness=(0.6, 1.4), contrast=(0.7, 1.3), saturation=(0, 2.5), hue=(-0.1, 0.1))
    for name, factors in changes:
        low, high = ranges[name]
        assert low <= factors.min() and factors.max() <= high and ks((factors.numpy() - low) / (high - low)) < 2
    assert abs(torch.corrcoef(torch.stack([factors for _, factors in changes])) - torch.eye(4)).max() < 4.5 / 3000**0.5


def test_all_orders_of_a_jitter_are_equally_likely(changes, n=2400):
    for _ in range(n):
        common.color_jitter(torch.zeros(0, 3, 1, 1), 0.4, 0.4, 0.4, 0.1)
    orders = [tuple(name for name, _ in changes[i : i + 4]) for i in range(0, 4 * n, 4)]
    counts = np.array([orders.count(order) for order in itertools.permutations(ADJUST)])
    assert counts.sum() == n and abs(counts - n / 24).max() < 5 * (n / 24) ** 0.5


def test_sigmas_of_a_blur_are_uniform(n=4000):
    """The sigmas are uniform. The brightness that is left at a single bright point reveals the sigma of its blur."""
    x = torch.zeros(n, 3, 17, 17)
    x[:, :, 8, 8] = 1
    ours, theirs = (common.gaussian_blur(x, sigma)[:, 0, 8, 8] for sigma in ((0.5, 2.0), 0.5 + 1.5 * torch.rand(n)))
    assert ks(ours, theirs) < 2


@pytest.fixture
def calls(monkeypatch):
    """Make all operations add 1 to the images. Return a list to which they append (name, their other arguments)."""
    calls = []
    for name in OPERATIONS:

        def add_one(x, *values, name=name, **named):
            arguments = *values, *named.values()  # none is left to its default
            calls.append((name, *(value.tolist() if torch.is_tensor(value) else value for value in arguments)))
            return x + 1

        monkeypatch.setattr(common, name, add_one)
    return calls


ON_IMAGENET = [(method, *row) for method, record in RECORDS.items() for row in record.augmentation]
TRAININGS = {method: record.four_views for method, record in RECORDS.items() if record.four_views}


@pytest.mark.parametrize("method, flags, view, jitter, blur, solarize_p", ON_IMAGENET)
def test_augment_calls_the_operations_of_the_paper(method, module, flags, view, jitter, blur, solarize_p, calls):
    """The operations run in the paper's order with its values, one after the other, and the result is normalized."""
    x, args = (noise(2, 4, 4) * 256).byte(), module.parse_args(["--dataset", "imagenet", *flags.split()])
    more = [] if view is None else [view, torch.tensor(DRAWN[0])] if blur == DRAWN else [view]  # as main passes them
    y = module.augment(x, args, *more)
    expected = [("horizontal_flip", 0.5), ("color_jitter", *jitter), ("grayscale", 0.2), ("gaussian_blur", *blur)]
    assert calls == expected + [("solarize", solarize_p)] * (solarize_p > 0)
    theirs = TF.normalize(x / 255 + len(calls), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's
    torch.testing.assert_close(y, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method, flags, small_crops, large_areas, small_areas", [
    ("patchmix", "--variant released", 8, (0.35, 1.0), (0.05, 0.35)),
    ("moco_jointcrop", "--local-crops 4 --joint-pair both", 4, (0.2, 1.0), (0.05, 0.4)),
    ("logo", "", 2, (0.4, 1.0), (0.08, 0.4)),
    pytest.param("logo", "--pairs all", 2, (0.3, 1.0), (0.05, 0.3), marks=pytest.mark.slow),
    pytest.param("clim", "--local-crops 2", 2, (0.2, 1.0), (0.05, 0.14), marks=pytest.mark.slow),
])  # fmt: skip
def test_crops_on_imagenet(module, flags, small_crops, large_areas, small_areas, monkeypatch):
    """Large and small crops have the expected sizes and areas, as passed to --show-views without augmentation."""
    row, column = np.indices((256, 256), np.uint8)
    image = Image.fromarray(np.stack([column, row, row], 2))  # slopes of 1 reveal a crop's size
    views, names = [], []
    monkeypatch.setattr(module, "augment", lambda x, *_: x)
    monkeypatch.setattr(common, "save_views", lambda _, x, what, norm: (views.extend(x), names.extend(what)))
    words = f"--dataset imagenet --batch-size 96 --device cpu --workers 0 --show-views x.png {flags}"
    module.main(module.parse_args(words.split()), train=[(image, 0)] * 96)
    views = [view for view, name in zip(views, names, strict=True) if not re.search("mixed|positive", name)]
    assert [view.shape[-1] for view in views] == [224] * 2 + [96] * small_crops
    for crops, (low, high) in ((views[:2], large_areas), (views[2:], small_areas)):
        x = torch.cat(crops).double()
        quarter = x.shape[-1] // 4  # the middle half, because interpolation differs at the borders
        width = (x[:, 0, 0, 3 * quarter] - x[:, 0, 0, quarter]) * 2
        height = (x[:, 1, 3 * quarter, 0] - x[:, 1, quarter, 0]) * 2
        areas, margin = width * height / 256**2, 0.06 * (high - low)
        assert 0.9 * low < areas.min() < low + margin and high - margin < areas.max() < 1.1 * high


def same_images(n):
    """Return n copies of a large image, so that crops are equal only if their boxes are. Blue encodes the index."""
    red, green, _ = Image.fromarray(np.random.default_rng(0).integers(0, 256, (250, 250, 3), dtype=np.uint8)).split()
    return [(Image.merge("RGB", (red, green, Image.new("L", red.size, i))), 0) for i in range(n)]


def draws_of(method, out, *flags, rank=0):
    """Train for two epochs of two steps as one of two processes. Return what each call of `augment` takes and draws.

    Each entry is [indices, crops, colors, sigmas if any], with one value per image, as bytes except for the indices.
    The colors are those of one fixed picture, augmented once per image.
    """
    module, made, views = MODULES[method], [], []
    augment, jitter, x = module.augment, common.color_jitter, (noise(1, 16, 16) * 256).byte()

    def record(crops, args, *more):
        colored = augment(x.expand_as(crops), args, *more)
        parts = crops[:, :2], colored, *more[1:]  # more: the view's number and the sigmas, if any
        made.append([crops[:, 2, 0, 0].tolist(), *([row.numpy().tobytes() for row in part] for part in parts)])
        views.extend(more[:1])
        return colored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "augment", record)
        patch.setattr(common, "color_jitter", lambda x, *amounts, p: jitter(x, *amounts))
        patch.setattr(common, "init_distributed", lambda *_: (torch.device("cpu"), rank, 2))
        patch.setattr(module, "DistributedDataParallel", lambda model: model)
        patch.setattr("timm.utils.distribute_bn", lambda *_, **__: None)
        run(method, out, *TRAININGS[method].split(), "--knn-every", 0, *flags, train=same_images(32))
    assert views in ([], [0, 1, 2, 3] * 4)
    return made


def images_of(made):
    """Return the image indices of both epochs. Assert that the first two views of each step show the same images."""
    assert all(made[i][0] == made[i + 1][0] for i in range(0, 16, 4))
    return [made[i][0] + made[i + 4][0] for i in (0, 8)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("method, workers", slow_but([("jcl", 0), ("clim", 2)], itertools.product(TRAININGS, (0, 2))))
def test_no_two_draws_are_equal(method, workers, _tiny, tmp_path):
    """Crops, colors and sigmas differ between images, views, steps, workers, epochs, processes and seeds."""
    flags, others = ["--workers", workers], []
    found = draws_of(method, tmp_path / "one", *flags)
    if workers == 0:
        others = draws_of(method, tmp_path / "two", *flags, rank=1)
        for images in zip(images_of(found), images_of(others), strict=True):
            assert sorted(sum(images, [])) == [*range(32)]  # each image is in one process
        others += draws_of(method, tmp_path / "three", *flags, "--seed", 1)
    assert images_of(found)[0] != images_of(found)[1]
    for parts in [*zip(*found, *others, strict=True)][1:]:
        numbers = sum(parts, [])
        assert len(set(numbers)) == len(numbers) >= 16 * 8


def test_the_picture_of_the_views(tmp_path):
    """Each row of the picture has twelve images of a view, enlarged to 96 px, without the normalization."""
    x, norm = (noise(14, 48, 48) * 256).byte(), common.NORMS["cifar10"]
    views = [common.normalize(view / 255, *norm) for view in (x, x[:, :, :24, :24].flip(0))]
    common.save_views(tmp_path / "views.png", views, ["one", "two"], "cifar10")
    picture = TF.pil_to_tensor(Image.open(tmp_path / "views.png"))
    tiles = picture[:, 2:, 2:].unfold(1, 96, 98).unfold(2, 96, 98)  # the borders are two pixels wide
    assert tiles.shape == (3, 2, 12, 96, 96)
    assert torch.equal(tiles[:, 0, :, ::2, ::2], x[:12].transpose(0, 1))
    assert torch.equal(tiles[:, 1, :, ::4, ::4], x[:, :, :24, :24].flip(0)[:12].transpose(0, 1))
