"""A user's own images through main(args, train=..., test=...), and an own encoder through timm's registry."""

import numpy as np
import pytest
import timm
import torch
from conftest import JCL_AT_ONCE
from PIL import Image
from tiny import load, records, refused, run
from torch import nn

import eval_knn

pytestmark = pytest.mark.usefixtures("_tiny")


class Images(torch.utils.data.Dataset):
    """A user's data set, with items (PIL image, label). As torchvision's it has targets and classes, unless `plain`."""

    def __init__(self, count, plain=False):
        self.arrays = np.random.default_rng(count).integers(0, 256, (count, 20, 24, 3), np.uint8)
        if not plain:
            self.targets, self.classes = [i % 3 for i in range(count)], ["a", "b", "c"]

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, index):
        return Image.fromarray(self.arrays[index]), index % 3


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_own_images(method, tmp_path, capsys):
    """With labels there is kNN, in trainings and evaluations. Other images do not resume the run."""
    train, test = Images(68), Images(24)
    run(method, tmp_path, train=train, test=test)
    scores = [record["knn20_top1"] for record in records(tmp_path)]
    args = eval_knn.parse_args([str(tmp_path), "--k", "20", "--device", "cpu"])
    found = eval_knn.main(args, train=train, test=test)
    assert found["encoder"] == dict(knn20_top1=scores[-1]) and found.keys() == {"encoder", "raw pixels", "untrained"}
    assert "images was" in refused(capsys, run, method, tmp_path, train=Images(67), test=test)


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_own_images_with_nothing_but_items(method, tmp_path):
    """Only kNN needs labels. Images alone, of which CLIM chooses positives, give the same training."""
    for plain in (False, True):
        run(method, tmp_path / str(plain), "--epochs", 1, train=Images(68, plain))
    models = [load(tmp_path / name / "last.pt")["model"] for name in ("False", "True")]
    assert all(torch.equal(x, models[1][name]) for name, x in models[0].items())
    assert not any("knn20_top1" in record for record in records(tmp_path / "True"))


@timm.models.register_model
def own_encoder(pretrained=False, num_classes=0, **kwargs):
    """An encoder that timm does not have, (n, 3, H, W) -> (n, 8). One parameter is frozen."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net[1].bias.requires_grad_(False)
    return net


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_own_encoder(method, tmp_path, capsys):
    """timm's registry makes it an --arch: of trainings, also resumed ones, and of evaluations."""
    words = ["--arch", "own_encoder", "--patch-size", 8] if method == "patchmix" else ["--arch", "own_encoder"]
    run(method, tmp_path, *words)
    saved = load(tmp_path / "backbone.pt")
    encoder = timm.create_model(saved["timm_name"], **saved["create_kwargs"])
    encoder.load_state_dict(saved["state_dict"])
    assert encoder[1].running_mean.any() and not encoder[1].bias.any()  # trained, and frozen
    args = eval_knn.parse_args([str(tmp_path), "--device", "cpu", "--k", "20"])
    assert eval_knn.main(args)["encoder"]["knn20_top1"] == records(tmp_path)[-1]["knn20_top1"]
