"""common.py against slow, obvious references: randomness, color, views, the loader, files; own encoders."""

import argparse
import itertools

import numpy as np
import pytest
import torch
import torchvision
import torchvision.transforms.functional as TF
from conftest import METHODS, ks
from PIL import Image
from timm.layers import BatchNormAct2d
from tiny import refused, unequal
from torch import nn

import common
import jcl

CPU = torch.device("cpu")


def test_draws_never_change():
    """Or a run would not go on as it began."""
    expected = [[0.2797197902007582, 0.6688137121671075], [0.8242661513614719, 0.9388993461227779]]
    assert common.uniform(1, 2, [3, 4], 2).tolist() == expected
    assert common.generator(5, 6, 7).initial_seed() == 4604071011895309353


def test_uniform_is_uniform_and_uncorrelated():
    index = np.arange(20000)
    base = common.uniform(0, 0, index, 6)
    assert base.min() >= 0 and base.max() < 1 and all(ks(base[:, j]) < 2 for j in range(6))
    for seed, epoch, shift in [(0, 0, 1), (0, 1, 0), (1, 0, 0)]:  # the next index, ...
        other = common.uniform(seed, epoch, index + shift, 6)
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 4.5 / base.size**0.5
        assert ks((base - other) % 1) < 2 and not (base == other).any()
    assert abs(np.corrcoef(base.T) - np.eye(6)).max() < 4.5 / len(index) ** 0.5  # positions
    assert not (common.uniform(5, 0, index, 6) == common.uniform(0, 5, index, 6)).any()


@pytest.mark.parametrize("shape", [(21, 18), (18, 40), (33, 17), (9, 2), (1, 7)])
def test_blur_is_torchvisions_with_a_wide_kernel(shape):
    x = torch.rand(8, 3, *shape, generator=common.generator(3), dtype=torch.float64)
    sigma = torch.tensor([0.1, 0.5, 1.0, 1.3, 2.0, 2.0, 3.0, 0.7], dtype=torch.float64)
    kernel = 2 * min(shape) - 1  # over five sigma to each side, or as far as can be mirrored
    theirs = torch.stack([TF.gaussian_blur(image, kernel, s) for image, s in zip(x, sigma.tolist(), strict=True)])
    torch.testing.assert_close(common.gaussian_blur(x, sigma, 3.0), theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(common.gaussian_blur(x.float(), sigma, 3.0), theirs.float(), rtol=0, atol=2e-6)
    alone = common.gaussian_blur(x[1:2], sigma[1:2], 0.5), common.gaussian_blur(x[:6], sigma[:6], 2.0)[1:2]
    torch.testing.assert_close(*alone, rtol=0, atol=1e-15)  # whatever else is in the batch


def torchvision_color(image, row):
    """One image, uint8 (3, H, W), by torchvision's functionals in the image's own order; the reference of `color`."""
    p = dict(zip(common.COLOR, row.tolist(), strict=True))
    x = image.double() / 255
    for step in common.ORDERS[int(p["order"])].tolist():
        name = ("brightness", "contrast", "saturation", "hue")[step]
        x = getattr(TF, f"adjust_{name}")(x, p[name])
    x = TF.rgb_to_grayscale(x, 3) if p["gray"] else x
    x = TF.gaussian_blur(x, 33, p["sigma"]) if p["sigma"] else x
    x = TF.solarize(x, 0.5) if p["solarize"] else x
    return TF.hflip(x) if p["flip"] else x


STRONG = dict(jitter=(1, 1, 1.5, 0.5), jitter_p=0.8, gray_p=0.3, blur_p=0.5, blur_sigma=(0.1, 3), solarize_p=0.3)


def draws(n, seed=0):
    return common.uniform(seed, 0, np.arange(n), common.VIEW_DRAWS)


def boxes(n, size, seed=0, position=None, **changes):
    """The boxes of n images, by VIEWS[0] with changes."""
    sizes = np.broadcast_to(size, (n, 2))
    return common.draw_boxes(VIEWS[0]._replace(**changes), sizes, draws(n, seed), position=position)


def colors(n, seed=0, **changes):
    return torch.from_numpy(common.draw_colors(VIEWS[0]._replace(**changes), draws(n, seed)))


def test_color_is_torchvisions_steps_image_by_image():
    n, g, (mean, std) = 48, common.generator(4), ((0.1, 0.5, 0.7), (0.2, 0.3, 0.5))
    views = [torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=g) for size in (20, 17, 20)]
    views[0][:9] = views[0][:9, :1]  # gray
    views[0][9:20] = views[0][9:20] // 128 * 255  # black, white and pure colors
    rows = colors(3 * n, **STRONG).view(n, 3, -1)
    assert len(rows[..., 4].unique()) == 24  # every order is met
    ours = common.color_views(dict(views=views, color=rows), CPU)
    for i, view in enumerate(views):
        theirs = torch.stack([torchvision_color(*pair) for pair in zip(view, rows[:, i], strict=True)])
        torch.testing.assert_close(ours[i].double(), theirs, rtol=0, atol=2e-5)
        for size in (1, 3, 16):  # small batches, where an operation touches all rows or none
            parts = [common.color(a, b) for a, b in zip(view.split(size), rows[:, i].split(size), strict=True)]
            torch.testing.assert_close(torch.cat(parts), ours[i], rtol=0, atol=1e-6)
    normalised = common.color_views(dict(views=views, color=rows), CPU, norm=(mean, std))
    torch.testing.assert_close(normalised, [TF.normalize(view, mean, std) for view in ours])


def test_colors_have_their_probabilities_and_ranges():
    n, p = 20000, dict(jitter_p=0.8, gray_p=0.2, blur_p=0.5, solarize_p=0.1, flip_p=0.4)
    c = dict(zip(common.COLOR, colors(n, seed=7, jitter=(0.4, 0.3, 1.5, 0.1), **p).numpy().T, strict=True))
    jittered = c["brightness"] != 1
    shares = [(jittered, 0.8), (c["gray"], 0.2), (c["sigma"] > 0, 0.5), (c["solarize"], 0.1), (c["flip"], 0.4)]
    for on, share in shares:
        assert set(np.unique(on)) == {0, 1} and abs(on.mean() - share) < 4 * (share * (1 - share) / n) ** 0.5
    assert abs(np.corrcoef([on for on, _ in shares]) - np.eye(5)).max() < 4.5 / n**0.5  # one draw for each
    ranges = dict(brightness=(0.6, 1.4), contrast=(0.7, 1.3), saturation=(0, 2.5), hue=(-0.1, 0.1))
    for name, (low, high) in ranges.items():
        assert ks((c[name][jittered] - low) / (high - low)) < 2
        assert (c[name][~jittered] == (name != "hue")).all()
    assert ks((c["sigma"][c["sigma"] > 0] - 0.1) / 1.9) < 2
    counts = np.bincount(c["order"].astype(int), minlength=24)
    assert len(counts) == 24 and abs(counts - n / 24).max() < 5 * (n / 24) ** 0.5


@pytest.mark.parametrize("area", [(0.08, 1.0), (0.2, 0.6), (1.0, 1.0), (1e-5, 1e-4)])
def test_boxes_are_inside(area):
    sizes = [(1, 1), (1, 2), (2, 1), (1, 300), (300, 1), (2, 3), (7, 5), (32, 32), (31, 97), (500, 375), (40, 4000)]
    sizes = np.repeat(sizes, 200, axis=0)
    for position in (None, np.zeros((len(sizes), 2)), np.full((len(sizes), 2), 1 - 2**-53)):
        box = boxes(len(sizes), sizes, position=position, area=area)
        assert (box[:, :2] >= 0).all() and (box[:, 2:] >= 1).all() and (box[:, :2] + box[:, 2:] <= sizes).all()


@pytest.mark.parametrize("size, area, ratio", [((32, 32), (0.08, 1), 4 / 3), ((60, 25), (0.3, 0.9), 2)])
def test_crops_have_torchvisions_distribution(size, area, ratio):
    n, ratio = 2500, (1 / ratio, ratio)
    ours = boxes(n, size, 1, area=area, ratio=ratio).astype(float)
    image, params = torch.zeros(1, *size), torchvision.transforms.RandomResizedCrop.get_params
    torch.manual_seed(0)
    theirs = np.array([params(image, list(area), list(ratio)) for _ in range(n)], float)
    # top, left, height, width, area, aspect, bottom, right
    a, b = ([*x.T, x[:, 2] * x[:, 3], x[:, 3] / x[:, 2], x[:, 0] + x[:, 2], x[:, 1] + x[:, 3]] for x in (ours, theirs))
    for x, y in zip(a, b, strict=True):
        assert abs(x.mean() - y.mean()) < 4 * ((x.var() + y.var()) / n) ** 0.5 + 1e-9 and ks(x, y) < 2


@pytest.mark.parametrize("size", [(10, 200), (200, 10), (1, 100), (100, 1), (3, 50), (37, 5)])
def test_fallback_is_torchvisions_center_crop_or_the_whole(size):
    area = (0.9, 1.0)
    theirs = torchvision.transforms.RandomResizedCrop.get_params(torch.zeros(1, *size), list(area), [3 / 4, 4 / 3])
    assert boxes(1, size, area=area)[0].tolist() == list(theirs)
    assert boxes(1, size, area=area, whole=True)[0].tolist() == [0, 0, *size]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("box, size", [((5, 6, 20, 15), 8), ((5, 6, 20, 15), 33), ((3, 2, 1, 1), 5)])
def test_cut_is_pils_crop_then_resize(interpolation, box, size):
    image = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    top, left, height, width = box
    crop = Image.fromarray(image).crop((left, top, left + width, top + height))
    theirs = np.asarray(crop.resize((size, size), Image.Resampling[interpolation.upper()]))
    assert np.array_equal(common.cut(image, np.array(box), size, interpolation), theirs)


VIEW = dict(ratio=(3 / 4, 4 / 3), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray_p=0.2, blur_p=0.5)
VIEW |= dict(blur_sigma=(0.1, 2.0), solarize_p=0.1, flip_p=0.5)
VIEWS = [common.View(size=12, area=(0.2, 1.0), **VIEW), common.View(size=8, area=(0.05, 0.2), **VIEW)]


def with_a_partner(index, sizes, draws):
    """A method's `draw`: two crops with one color; the second is of the next image, as a partner would be."""
    box, color = common.draw_view(VIEWS[0], sizes, draws[:, : common.VIEW_DRAWS])
    other = common.draw_boxes(VIEWS[1], sizes, draws[:, common.VIEW_DRAWS : 2 * common.VIEW_DRAWS])
    return [(index, box, 12), ((index + 1) % 37, other, 8)], [color, color]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("draw", [None, with_a_partner])
def test_views_are_those_that_are_drawn(draw, workers):
    """By the method's `draw`, or each as it is declared, from (seed, epoch, index): whatever the workers did before."""
    images = common.ImageSet(*common.make_patterns(37, 16, 3))
    args = argparse.Namespace(batch_size=8, seed=5, workers=workers, interpolation="bilinear")
    loader = common.make_loader(args, images, VIEWS, CPU, draw)
    for epoch in (1, 0):
        loader.batch_sampler.epoch = epoch
        for batch, keys in zip(loader, loader.batch_sampler, strict=True):
            index, sizes = np.array([i for _, i in keys]), np.full((8, 2), 16)
            numbers = common.uniform(5, epoch, index, 2 * common.VIEW_DRAWS)
            if draw:
                cuts, colored = draw(index, sizes, numbers)
            else:
                own = [*zip(VIEWS, np.split(numbers, 2, axis=1), strict=True)]
                cuts = [(index, common.draw_boxes(view, sizes, part), view.size) for view, part in own]
                colored = [common.draw_colors(view, part) for view, part in own]
            assert batch["index"].tolist() == index.tolist()
            for v, (rows, box, size) in enumerate(cuts):
                expected = [common.cut(images.array[i], *pair, size) for i, *pair in zip(rows, box, strict=True)]
                assert np.array_equal(batch["views"][v].permute(0, 2, 3, 1), np.stack(expected))
                assert np.array_equal(batch["color"][:, v], colored[v])


def test_epochs_are_permutations_in_whole_batches_which_processes_share(monkeypatch, capsys):
    def rows_of(epoch, seed=2):
        sampler = common.EpochSampler(37, 8, seed)
        sampler.epoch = epoch
        assert len(sampler) == 4 and {number for batch in sampler for number, _ in batch} == {epoch}
        return [[row for _, row in batch] for batch in sampler]

    epochs, parts = [rows_of(0), rows_of(1), rows_of(2), rows_of(0, seed=3)], []
    for batches in epochs:
        assert [len(batch) for batch in batches] == [8] * 4 and len({*range(37)} - {*sum(batches, [])}) == 5
    assert all(one != other for one, other in itertools.combinations(epochs, 2))
    for rank in range(4):
        monkeypatch.setattr(common, "rank_and_world", lambda rank=rank: (rank, 4))
        parts.append(rows_of(2))
    assert [sum(slices, []) for slices in zip(*parts, strict=True)] == epochs[2]
    for few in ((7, 8), (37, 6)):  # images; a batch for four processes
        refused(capsys, common.EpochSampler, *few, 2)


STATE = {"x": torch.arange(100.0), "epoch": 7, "lr": [0.1, 2.0], "nested": {"y": torch.zeros(2, 3, dtype=torch.int64)}}


def test_damage_is_found(tmp_path):
    path = tmp_path / "last.pt"
    common.write_file(path, lambda file: torch.save(STATE, file))
    data = path.read_bytes()

    def is_refused(content):
        path.write_bytes(content)
        try:
            found = common.load_checkpoint(path)
        except SystemExit:
            return True
        assert unequal(found, STATE) == []  # what is read is right
        return False

    entries = data.index(b"PK\1\2")  # bit 4 of one: an entry that claims to be a folder, of which torch reads no bytes
    flips = [(i, i % 8) for i in range(0, len(data), 31)] + [(i, 4) for i in range(entries, len(data))]
    changed = (data[:i] + bytes([data[i] ^ (1 << bit)]) + data[i + 1 :] for i, bit in flips)
    assert sum(map(is_refused, changed)) > len(flips) / 2
    assert all(is_refused(data[:length]) for length in [0, 1, *range(40, len(data), 97), len(data) - 1])


class Hostile:  # when it is unpickled, a file is written
    def __reduce__(self):
        return open, ("victim", "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_is_not_run(tmp_path, capsys, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Hostile()}, "backbone.pt", _use_new_zipfile_serialization=zipped)
    refused(capsys, common.load_checkpoint, "backbone.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["backbone.pt"]


def test_values_that_a_program_sets_are_saved(tmp_path):
    """A Path for --out, numbers of numpy's: the same call goes on."""
    args = argparse.Namespace(out=tmp_path / "run", resume=None, keep_every=0, seed=np.int64(3), lr=np.float32(0.05))
    model, images = nn.Linear(2, 2), common.ImageSet(np.zeros((2, 8, 8, 3), np.uint8))
    config = common.open_run(args, images)
    common.save_run(args, config, None, dict(model=model), [dict(epoch=1, lr=args.lr)])
    assert common.open_run(args, images) == config
    assert common.load_run(args, config, dict(model=model)) == [dict(epoch=1, lr=args.lr)]


@pytest.mark.parametrize("method", METHODS)
def test_an_encoder_that_no_gradient_reaches_is_refused(tmp_path, capsys, module):
    """Under no_grad; with a forward that a copy shares, so that the original's parameters are reached; frozen."""
    args = module.parse_args(["--device", "cpu", "--out", str(tmp_path / "run")])
    images = common.ImageSet(np.zeros((args.batch_size, 8, 8, 3), np.uint8))
    for context in (torch.no_grad(), torch.enable_grad(), None):
        encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        encoder.requires_grad_(context is not None)
        encoder.forward = context(encoder.forward) if context else encoder.forward
        assert "gradient" in refused(capsys, module.main, args, train=images, encoder=encoder)
    assert not (tmp_path / "run").exists()


class Halved(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) / 2


NORMS = [Halved(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)]
NORMS += [nn.BatchNorm2d(8, momentum=None), nn.BatchNorm2d(8, track_running_stats=False), BatchNormAct2d(8)]


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_batch_norm_groups_leave_an_encoder_its_function(norm):
    """Also where a batch norm has a forward of its own, timm's activation, or no running statistics to split."""
    encoder, x = nn.Sequential(norm, nn.Flatten()), torch.randn(8, 8, 3, 3)
    split = jcl.split_batch_norms(common.copy_module(encoder), 2)
    torch.testing.assert_close(split.eval()(x), encoder.eval()(x))
    assert split.train()(x).isfinite().all()


def test_more_processes_than_gpus_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "1 GPUs for 2" in refused(capsys, common.join_processes, "auto")
    assert common.join_processes("cpu")[0] == CPU
