"""What no other file tests: hostile checkpoints, converted batch norms, numbers of GPUs, a program's values."""

import argparse
import copy

import numpy as np
import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

import common
import jcl


class Hostile:  # when it is unpickled, a file is written
    def __reduce__(self):
        return open, ("victim", "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_is_not_run(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Hostile()}, "backbone.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(common.UsageError):
        common.load_checkpoint("backbone.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["backbone.pt"]


class Halved(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) / 2


NORMS = [Halved(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)]
NORMS += [nn.BatchNorm2d(8, momentum=None), nn.BatchNorm2d(8, track_running_stats=False), BatchNormAct2d(8)]


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_batch_norm_groups_leave_an_encoder_its_function(norm):
    """Also where a batch norm has a forward of its own, timm's activation, or no running statistics to split."""
    encoder, x = nn.Sequential(copy.deepcopy(norm), nn.Flatten()), torch.randn(8, 8, 3, 3)
    expected = encoder.eval()(x)
    split = jcl.convert_split_batchnorm(encoder, 2)
    torch.testing.assert_close(split.eval()(x), expected)
    assert split.train()(x).isfinite().all()
    assert isinstance(split[0], jcl.SplitBatchNorm) == (norm in (NORMS[1], NORMS[2], NORMS[5]))


def test_more_processes_than_gpus_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(common.UsageError, match="1 GPUs for 2 processes"):
        common.init_distributed("auto")
    assert common.init_distributed("cpu") == (torch.device("cpu"), 0, 1)


def test_values_that_a_program_sets(tmp_path):
    """A Path for --out is fine. A number of numpy's is refused, because last.pt could not be loaded with it."""
    args = argparse.Namespace(method="m", seed=3, lr=0.1, out=tmp_path / "run", resume=None, epochs=2)
    images, state = common.Patterns(2, 8, 0), dict(model=nn.Linear(2, 2))
    for _ in range(2):
        config = common.configuration(args, images)
        records = common.open_run(args, config, state, {}) or [dict(epoch=1)]
        common.save_run(args.out, config, None, state, records)
    for name, value in dict(seed=np.int64(3), lr=np.float32(0.05)).items():
        changed = argparse.Namespace(**vars(args) | {name: value})
        with pytest.raises(common.UsageError, match=name):
            common.configuration(changed, images)
