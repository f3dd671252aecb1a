"""common.py's features, kNN and measures of collapse match slow references, on one process and on several."""

import numpy as np
import pytest
import torch
from conftest import INFO, generator
from PIL import Image
from tiny import load, refused, succeed
from torch import nn

import common

CPU = torch.device("cpu")


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_crop_is_resize_then_center_crop(interpolation):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8))
    small = image.crop((5, 5, 33, 33))
    resized = image.resize((48, 32), Image.Resampling[interpolation.upper()])  # 32 = 28 * 256 // 224
    assert common.center_crop(image, 28, interpolation) == resized.crop((10, 2, 38, 30))
    assert common.center_crop(small, 28, interpolation) == small


def slow_knn(train_x, train_y, test_x, k, temperature, num_classes):
    """Return the float64 votes of weighted k-nearest neighbors, by a double loop. The nearest one's weight is 1."""
    bank, queries = ([row / np.sqrt((row * row).sum()) for row in x.double().numpy()] for x in (train_x, test_x))
    scores = torch.zeros(len(test_x), num_classes, dtype=torch.float64)
    for i, q in enumerate(queries):
        ranked = sorted(((float(q @ t), j) for j, t in enumerate(bank)), reverse=True)
        for similarity, j in ranked[:k]:
            scores[i, int(train_y[j])] += np.exp((similarity - ranked[0][0]) / temperature)
    return scores


@pytest.mark.parametrize("n, m, d, classes, tau", [(99, 99, 9, 9, 0.1), (1, 3, 4, 1, 0.1), (11, 13, 2, 9, 1.0)])
def test_knn_is_a_double_loop(n, m, d, classes, tau):
    g = generator(n)
    train_x, test_x = torch.randn(n, d, generator=g) * 3, torch.randn(m, d, generator=g) * 0.2
    train_y, several = torch.randint(0, classes, (n,), generator=g), (5, 1, 200, 11)
    with torch.autocast("cpu", torch.bfloat16):  # the caller's mode changes nothing
        found = common.knn_predict(train_x, train_y, test_x, several, tau, classes)
    slow = [slow_knn(train_x, train_y, test_x, k, tau, classes).argmax(1) for k in several]
    assert torch.equal(found, torch.stack(slow))
    train_x, test_x = train_x.bfloat16(), test_x.bfloat16()  # are compared in float32
    found = common.knn_predict(train_x, train_y, test_x, several, tau, classes)
    assert torch.equal(found, common.knn_predict(train_x.float(), train_y, test_x.float(), several, tau, classes))


@pytest.mark.slow
def test_knn_with_a_bank_that_needs_chunks():
    """Two million points of a circle are labeled by octant. 40 queries in the octants' middles need two chunks."""
    octants = 8 * torch.rand(2**21, generator=generator(0))
    where = torch.arange(40) % 8
    x, q = (torch.stack([a.cos(), a.sin()], 1) for a in (octants * torch.pi / 4, (where + 0.5) * torch.pi / 4))
    assert torch.equal(common.knn_predict(x, octants.long(), q, [3], 0.07, 8)[0], where)


def make_encoder():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
    norm.running_mean.normal_()
    return nn.Sequential(conv, norm, nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2), nn.Flatten())


@pytest.mark.parametrize("batch_size, workers", [(256, 0), (4, 2), (1, 0)])
def test_features_are_a_plain_loops(batch_size, workers):
    """Features match a plain loop. The encoder's modes and statistics and the caller's random state do not change."""
    encoder, images = make_encoder(), common.Patterns(11, 16, seed=0)
    encoder[1].eval()
    modes, statistics = [m.training for m in encoder.modules()], encoder[1].running_mean.clone()
    state = torch.get_rng_state()
    features = common.extract_features(encoder, images, INFO, CPU, batch_size, workers)
    assert [m.training for m in encoder.modules()] == modes and encoder[1].running_mean.equal(statistics)
    assert torch.get_rng_state().equal(state) and common.feature_width(encoder, 16, 20) == 24 == features.shape[1]
    encoder.double().eval()
    mean, std = (torch.tensor(INFO[k], dtype=torch.float64).view(3, 1, 1) for k in ("mean", "std"))
    for (image, _), feature in zip(images, features, strict=True):
        x = (torch.tensor(np.array(image)).permute(2, 0, 1).double() / 255 - mean) / std
        torch.testing.assert_close(feature.double(), encoder(x[None]).flatten(), rtol=1e-5, atol=1e-5)


def sharded(folder):
    """Save features, predictions, scores and measures of collapse that this process computes, alone or in a group."""
    _, rank, world = common.init_distributed("cpu")
    encoder, few = make_encoder(), common.Patterns(32, 16, seed=0)
    test = common.Subset(few, range(5))
    result, test_x = [], common.gather_rows(common.extract_features(encoder, test, INFO, CPU))
    for n in (7, 2, 1):  # with 2 or 1, some of three processes have no images
        images = common.Subset(few, range(n))
        images.targets[3:5] = [-1] * len(images.targets[3:5])
        part = common.extract_features(encoder, images, INFO, CPU, batch_size=2)
        assert len(part) == n // world + (rank < n % world)
        whole = common.gather_rows(part)
        gathered = common.gather_rows(part, to_first=True)
        assert gathered is None if rank else gathered.equal(whole)
        result += [whole, common.knn_predict(part, common.local_rows(torch.arange(n) % 3), test_x, (1, 2, 9), 0.1, 3)]
        if n > 1:
            result.append(torch.tensor([*common.knn_accuracy(encoder, INFO, images, test, CPU, 0).values()]))
            result.append(torch.tensor([*common.embedding_health(part).values()]))
    torch.save(result, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_several_processes_find_what_one_finds(tmp_path):
    succeed(tmp_path / "log", sharded, [(tmp_path,)] * 3)
    found = [load(tmp_path / f"{rank}.pt") for rank in range(3)]
    sharded(tmp_path)
    for one in found:
        torch.testing.assert_close(one, load(tmp_path / "0.pt"), rtol=1e-5, atol=1e-6)


def with_other_images():
    """Try to train and to evaluate with images that the other process does not have."""
    _, rank, _ = common.init_distributed("cpu")
    images = common.Patterns(32, 16, seed=0)
    own, info = common.Subset(images, range(rank, rank + 8)), INFO | dict(encoder="query", arch="a", method="m")
    for train, test in ((images, own), (own, images), (own, None)):
        with pytest.raises(common.UsageError, match="processes differ in their images"):
            common.open_evaluation_data("folder", None, info, False, train, test)
    with pytest.raises(common.UsageError, match="processes differ in their test images"):
        common.open_data("folder", train=images, test=own)


@pytest.mark.slow
def test_processes_that_have_other_images(tmp_path):
    succeed(tmp_path / "log", with_other_images, [()] * 2)


def test_embedding_health():
    x = torch.randn(12, 5, generator=generator(9)) * 7
    a = nn.functional.normalize(x.double(), dim=1)
    a = a - a.mean(0)
    rank = torch.distributions.Categorical(torch.linalg.eigvalsh(a.T @ a).sqrt()).entropy().exp().item()
    std = a.square().mean(0).sqrt().mean().item() * 5**0.5
    assert common.embedding_health(x) == pytest.approx(dict(std=std, rank=rank), rel=1e-4)
    for equal in (x[:1], x[:1].expand(50, 5)):
        assert common.embedding_health(equal) == pytest.approx(dict(std=0, rank=1), abs=1e-3)


def test_an_encoder_that_does_not_fit_is_refused(capsys):
    two, infinite = nn.Identity(), nn.Identity()
    two.forward = lambda x: (x, x)
    infinite.forward = lambda x: torch.tensor([[1.0], [torch.inf]])
    with pytest.raises(ValueError, match="finite"):
        common.extract_features(infinite, common.Patterns(2, 16, seed=0), INFO, CPU)
    for encoder, words in ((nn.Linear(9, 9), "16 px"), (nn.Identity(), "1, 3, 16, 16"), (two, "tuple")):
        assert words in refused(capsys, common.feature_width, encoder, 16)
    unpooled = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())  # images of 8 px have 144 features
    assert "(n, 144)" in refused(capsys, common.feature_width, unpooled, 8, 6)


def test_what_is_known_of_an_encoder():
    assert [common.backbone_info("resnet50", size, 2)["stem"] for size in (32, 64, 96)] == ["3x3", "3x3", "timm"]
    assert [common.backbone_info("resnet_mini", size, 2)["stem"] for size in (32, 96)] == ["3x3-s2", "timm"]
    assert common.backbone_info("resnet10t", 32)["stem"] == "timm"  # its own stem has three convolutions
