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
    nano = "resnet18", dict(layers=(1,) * 4, channels=(4, 8, 8, 8))
    monkeypatch.setitem(common.ARCHS, "nano", nano)
    shared = dict(crop_scale=(0.3, 1.0), global_scale=(0.3, 1.0), blur_p=0.2, blur_prob=(0.2, 0.2), resolutions=(32,))
    shared |= dict(lr=0.1, lr_batch=128, warmup=0, milestones=None, epochs=2, momentum=0.9, temperature=0.2)
    shared |= dict(queue=40, dim=16, hidden=None, bn_groups=2)
    states = {}
    for method, flags in BASELINES.items():
        module = importlib.import_module(method)
        recipe = module.RECIPES["patterns"]
        monkeypatch.setitem(module.RECIPES, "patterns", recipe | {k: v for k, v in shared.items() if k in recipe})
        run = "--arch nano --batch-size 16 --max-steps 3 --knn-every 0 --device cpu --out".split()
        module.main(module.parse_args([*run, str(tmp_path / method), *flags]))
        states[method] = torch.load(tmp_path / method / "last.pt", weights_only=True)
    first = states.pop("moco_jointcrop")
    start = torch.nn.functional.normalize(torch.randn(40, 16, generator=common.generator(0, 4)), dim=1)
    assert not torch.equal(first["model"]["queue.keys"], start)
    for method, state in states.items():
        assert state["model"].keys() == first["model"].keys()
        for name, value in first["model"].items():
            torch.testing.assert_close(state["model"][name], value, rtol=1e-4, atol=1e-6, msg=f"{method}: {name}")
        assert state["log"]["sums"][0, 0].item() == pytest.approx(first["log"]["sums"][0, 0].item(), rel=1e-6)
