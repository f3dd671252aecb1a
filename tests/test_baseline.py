"""What the four queue files build on is one and the same: MoCo v2, from the same views, shuffles, queue and start."""

import importlib

import pytest
import torch
from conftest import METHODS, NANO

import common

RECIPE = """--arch nano --batch-size 16 --epochs 2 --lr 0.1 --lr-batch 128 --warmup 0 --temperature 0.2
    --queue 40 --dim 16 --bn-groups 2 --max-steps 3 --knn-every 0 --device cpu"""
BASELINES = {
    "moco_jointcrop": "--joint none --crop-scale 0.3 1 --blur-p 0.2 0.2 --momentum 0.9 0.9",
    "jcl": "--num-keys 1 --crop-scale 0.3 1 --blur-p 0.2 --momentum 0.9",
    "clim": "--selection none --crop-scale 0.3 1 --blur-p 0.2 --momentum 0.9",
    "logo": "--local-crops 0 --one-way --global-scale 0.3 1 --blur-p 0.2 --momentum 0.9",
}


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in BASELINES if method != "moco_jointcrop"])
def test_queue_methods_share_their_baseline(method, few_patterns, tmp_path, monkeypatch):
    """Three steps of two files' baselines with one recipe end in the same encoder, queue and loss, up to rounding."""
    assert {*METHODS} == {*BASELINES, "patchmix"}
    monkeypatch.setitem(common.ARCHS, "nano", ("resnet18", NANO))
    states = {}
    for name in (method, "moco_jointcrop"):
        module, out = importlib.import_module(name), tmp_path / name
        module.main(module.parse_args([*RECIPE.split(), *BASELINES[name].split(), "--out", str(out)]))
        states[name] = torch.load(out / "last.pt", weights_only=True)
    ours, moco = states.values()
    start = torch.nn.functional.normalize(torch.randn(40, 16, generator=common.generator(0, 4)), dim=1)
    assert not torch.equal(moco["model"]["queue.keys"], start)
    assert ours["model"].keys() == moco["model"].keys()
    for name, value in moco["model"].items():
        torch.testing.assert_close(ours["model"][name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert ours["records"][-1]["loss"] == pytest.approx(moco["records"][-1]["loss"], rel=1e-6)
