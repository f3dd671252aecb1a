"""A user's own images through main(args, train=..., test=...), and an own encoder through timm's registry."""

import numpy as np
import pytest
import timm
import torch
from conftest import JCL_AT_ONCE, Pictures
from tiny import load, records, refused, run, unequal
from torch import nn

import common
import eval_knn

pytestmark = pytest.mark.usefixtures("_tiny")


def pictures(count):
    arrays = np.random.default_rng(count).integers(0, 256, (count, 20, 24, 3), np.uint8)
    return Pictures(arrays, [i % 3 for i in range(count)], ["a", "b", "c"])


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_own_images(method, tmp_path):
    """Only kNN needs labels. Images alone, of which CLIM chooses positives, give the same training."""
    run(method, tmp_path / "labels", "--epochs", 1, train=pictures(68), test=pictures(24))
    run(method, tmp_path / "items", "--epochs", 1, train=[*pictures(68)])
    assert unequal(*(load(tmp_path / name / "last.pt")["model"] for name in ("labels", "items"))) == []
    assert ["knn20_top1" in records(tmp_path / name)[0] for name in ("labels", "items")] == [True, False]


@timm.models.register_model
def own_encoder(pretrained=False, num_classes=0, **kwargs):
    """An encoder that timm does not have, (n, 3, H, W) -> (n, 8). One parameter is frozen."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net[1].bias.requires_grad_(False)
    return net


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_own_encoder(method, tmp_path, capsys):
    """timm's registry makes it an --arch of trainings and, in a script that registers it, too, of evaluations."""
    run(method, tmp_path, "--arch", "own_encoder")
    saved = load(tmp_path / "backbone.pt")
    encoder = timm.create_model(saved["timm_name"], **saved["create_kwargs"])
    encoder.load_state_dict(saved["state_dict"])
    assert encoder[1].running_mean.any() and not encoder[1].bias.any()  # trained, and frozen
    args = eval_knn.parse_args([str(tmp_path), "--device", "cpu", "--k", "20"])
    assert eval_knn.main(args)["encoder"]["knn20_top1"] == records(tmp_path)[-1]["knn20_top1"]
    torch.save(saved | dict(timm_name="encoder_of_mine"), tmp_path / "backbone.pt")
    line = refused(capsys, common.load_backbone, tmp_path)
    assert "encoder_of_mine is not registered" in line and "eval_knn.main" in line
