"""What the four queue files build on is one and the same: MoCo v2, from the same views, shuffles, queue and start."""

import importlib

import pytest
import torch
from conftest import METHODS

import common

BASELINES = {
    "moco_jointcrop": ["--joint", "none"],
    "jcl": ["--num-keys", "1"],
    "clim": ["--selection", "none"],
    "logo": ["--local-crops", "0", "--one-way"],
}


def test_queue_methods_share_their_baseline(tmp_path, monkeypatch):
    """Three steps of each file's baseline with one recipe end in the same encoder, queue and loss, up to rounding."""
    assert set(METHODS) == {*BASELINES, "patchmix"}
    monkeypatch.setattr(common, "ARCHS", common.ARCHS | {"nano": ("resnet18", dict(layers=(1,) * 4, channels=(4, 8, 8, 8)))})
    shared = dict(crop_scale=(0.3, 1.0), global_scale=(0.3, 1.0), temperature=0.2, momentum=0.9, lr=0.1, lr_batch=128, warmup=0)
    shared |= dict(epochs=2, queue=40, dim=16, hidden=None, bn_groups=2, blur_p=0.2, blur_prob=(0.2, 0.2), milestones=None)
    shared |= dict(resolutions=(32,))
    states = {}
    for method, flags in BASELINES.items():
        module = importlib.import_module(method)
        recipe = module.RECIPES["patterns"]
        monkeypatch.setitem(module.RECIPES, "patterns", recipe | {k: v for k, v in shared.items() if k in recipe})
        run = ["--arch", "nano", "--batch-size", "16", "--max-steps", "3", "--knn-every", "0", "--out", str(tmp_path / method)]
        module.main(module.parse_args([*run, *flags, "--device", "cpu"]))
        states[method] = common.read_checkpoint(tmp_path / method / "last.pt")
    first = states.pop("moco_jointcrop")
    start = torch.nn.functional.normalize(torch.randn(40, 16, generator=common.generator(0, 4)), dim=1)
    assert not torch.equal(first["model"]["queue.keys"], start)
    for method, state in states.items():
        assert state["model"].keys() == first["model"].keys()
        for name, value in first["model"].items():
            torch.testing.assert_close(state["model"][name], value, rtol=1e-4, atol=1e-6, msg=f"{method}: {name}")
        assert state["log"]["sums"][0, 0].item() == pytest.approx(first["log"]["sums"][0, 0].item(), rel=1e-6)
