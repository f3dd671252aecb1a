"""Tests what a run writes and prints, a user's own images and encoders, and --compile."""

import argparse
import datetime
import functools
import json
import re
import sys
import types
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from conftest import JCL_AT_ONCE, METHODS, QUEUES, blank, slow_but
from methods import RECORDS
from tiny import evaluate, load, records, refused, run, unequal
from torch import nn

import common
import eval_knn

pytestmark = pytest.mark.usefixtures("_tiny")


@pytest.mark.parametrize("line", slow_but(["patchmix"], [*METHODS, "patchmix --key-encoder query"]))
def test_a_runs_folder(line, tmp_path, capsys):
    """Every second epoch and the last have the kNN scores of the encoder in backbone.pt, which the authors evaluate."""
    method, *flags = line.split()
    said = run(method, tmp_path, "--epochs", 3, "--keep-every", 2, "--knn-every", 2, *flags)
    names = {"config.json", "metrics.jsonl", "last.pt", "backbone.pt", "epoch-0002.pt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    last, config = load(tmp_path / "last.pt"), json.loads((tmp_path / "config.json").read_text())
    assert len(load(tmp_path / "epoch-0002.pt")["records"]) == 2
    assert {"torch", "machine", "processes", "bf16", "out", "images", "method"} <= config.keys()
    assert config.items() >= last["config"].items() and last["config"].keys().isdisjoint(common.NOT_IN_CONFIG)
    peak = config["lr"] * 16 / 256
    assert float(re.search(r"peak_lr (\S+)", said)[1]) == pytest.approx(peak, rel=1e-3) and config["peak_lr"] == peak
    found = records(tmp_path)
    assert last["records"] == found and [record["epoch"] for record in found] == [1, 2, 3]
    assert ["knn20_top1" in record for record in found] == [False, True, True]
    for r in found:
        assert r["images_per_s"] > 0 and r["grad_norm"] > 0 and r["lr"] > 0 and 0 < r["std"] < 1.1
        assert 1 <= r["rank"] <= 16 and np.isfinite([*r.values()]).all()
    assert evaluate(eval_knn, tmp_path, "--k", 20)["encoder"]["knn20_top1"] == found[-1]["knn20_top1"]
    saved, encoder = load(tmp_path / "backbone.pt"), "query" if flags else RECORDS[method].evaluated
    assert (saved["stem"], saved["method"], saved["encoder"]) == ("timm", method, encoder)
    assert saved["interpolation"] == ("bicubic" if method == "patchmix" else "bilinear")
    for path, asked in (tmp_path, None), (tmp_path / "last.pt", None), (tmp_path / "last.pt", "query"):  # it has both
        network, info = common.load_backbone(path, asked)
        assert info["encoder"] == (asked or encoder) and not network.training
        prefix = dict(momentum="momentum_backbone.", query="backbone.")[info["encoder"]]
        assert all(torch.equal(value, last["model"][prefix + name]) for name, value in network.state_dict().items())
    other = "query" if encoder == "momentum" else "momentum"
    assert other in refused(capsys, common.load_backbone, tmp_path / "backbone.pt", other)
    torch.save(saved | {"state_dict": saved["state_dict"] | {"more": torch.ones(1)}}, tmp_path / "backbone.pt")
    with pytest.raises(RuntimeError, match="more"):
        common.load_backbone(tmp_path)


def test_the_progress_and_the_averages_of_an_epoch(monkeypatch, capsys):
    """A log file gets a line every minute, here after one step. Averages are over the steps and the processes."""
    monkeypatch.setattr("time.perf_counter", mock.Mock(side_effect=[0.0, 61.0, 100.0, 122.0]))
    monkeypatch.setattr(common, "all_gather_object", lambda values: [values, 2 * values])  # two processes
    meter = common.Meter(1, 3, 10, 122)
    for loss in (2.5, 3.5):
        meter.update(dict(loss=torch.tensor(loss)))
    assert capsys.readouterr().out == "epoch 2/3  step 1/10  loss 2.500  2 images/s  19.3 min left\n"
    assert meter.averages() == dict(loss=4.5, images_per_s=2.0)


def test_processes_wait_an_hour_for_each_other(monkeypatch):
    """The first may need minutes to list files, download or run kNN. torchrun's restarts have separate stores."""
    joined, store = {}, torch.distributed.HashStore()
    rendezvous = mock.Mock(return_value=iter([(store, 1, 2)]))
    monkeypatch.setattr(torch.distributed, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _, **given: joined.update(given))
    for name, value in dict(WORLD_SIZE="2", GROUP_WORLD_SIZE="1", TORCHELASTIC_RESTART_COUNT="1").items():
        monkeypatch.setenv(name, value)
    common.init_distributed("cpu")
    assert joined["timeout"] == rendezvous.call_args.kwargs["timeout"] == datetime.timedelta(hours=1)
    assert (joined["rank"], joined["world_size"]) == (1, 2)
    joined["store"].set("key", "value")
    assert store.check(["1/key"]) and not store.check(["key"])


def test_what_a_run_says_of_its_values(tmp_path, monkeypatch, capsys):
    """It prints its values, which may be a Path or numpy's numbers, and a changed number of processes."""
    numbers = dict(seed=np.int64(3), lr=np.float64(0.1), epochs=2)
    args = argparse.Namespace(method="m", out=tmp_path, resume=None, workers=3, data_dir=None, **numbers)
    images, state = blank(40), dict(model=nn.Linear(2, 2))
    config, _ = common.open_run(args, images, state, {})
    said = " ".join(capsys.readouterr().out.split())
    assert "lr 0.1 " in said and "workers 3" in said
    common.save_run(args.out, config, None, state, [dict(epoch=1)])
    monkeypatch.setattr(common, "rank_and_world", lambda: (0, 2))
    assert common.open_run(args, images, state, {}) == (config, [dict(epoch=1)])
    said = capsys.readouterr().out
    assert "processes: 1 before, 2 now" in said and "batch-norm groups" in said
    common.save_run(args.out, config, None, state, [dict(epoch=1), dict(epoch=2)])
    common.open_run(args, images, state, {})
    assert "before" not in capsys.readouterr().out  # a finished run draws no random numbers


@pytest.mark.slow
@pytest.mark.parametrize("method, flags", [
    ("moco_jointcrop", ""), ("moco_jointcrop", "--local-crops 4 --joint-pair both"),
    ("moco_jointcrop", "--moco v3 --arch resnet_nano"), ("jcl", ""), ("jcl", "--vanilla"),
    ("moco_jointcrop", "--moco v3 --arch resnet_nano --local-crops 4 --joint-pair both"),
    ("clim", "--selection none"), ("clim", "--image-size 16 8"), ("clim", "--local-crops 2"),
    ("logo", ""), ("logo", "--local-crops 0"), ("logo", "--pairs all"), ("logo", "--variant paper"),
    ("patchmix", ""), ("patchmix", "--num-mix 1 --terms oto,mto"),
    ("patchmix", "--variant released --local-crops 2 --patch-size 4"),
])  # fmt: skip
def test_loss_at_uniform_logits(method, flags, tmp_path):
    """A temperature of 10^6 makes the logits equal, so the loss is loss_at_uniform_logits, which the run prints."""
    said = run(method, tmp_path, *f"{flags} --temperature 1e6 --epochs 1 --knn-every 0".split())
    (record,) = records(tmp_path)
    assert float(re.search(r"loss_at_uniform_logits (\S+)", said)[1]) == pytest.approx(record["loss"], rel=1e-3)


MANY = [(method, "--queue", "for 64 images can hold the query's own image") for method in QUEUES]
MANY += [("clim", "--queue 16 --clim-start 0 --num-clusters", "clusters are too many for 64 images")]


@pytest.mark.parametrize("method, flags, words", MANY)
def test_what_is_many_for_so_few_images_is_said(method, flags, words, tmp_path):
    """A run warns if negatives or clusters number more than a quarter of the images."""
    for count, is_said in ((16, False), (17, True)):
        said = run(method, tmp_path / str(count), "--epochs", 1, *flags.split(), count, train=blank(64))
        assert (f"{count} {words}" in said) == is_said


def test_a_run_that_collapses_says_so_once(capsys):
    """It says so after three epochs in a row, and again if it has recovered and collapses a second time."""
    stds, said = [0.5, 0.09, 0.09, 0.09, 0.01, 0.2, 0.05, 0.05, 0.05], []
    for last in range(len(stds)):
        common.log_epoch("", [dict(std=std) for std in stds[: last + 1]], ["std"])
        said.append("--temperature" in capsys.readouterr().out)
    assert said == [False, False, False, True, False, False, False, False, True]
    for names, count in (["std"], 1), ((), 0):  # the line "finished" has no metrics and no second warning
        common.log_epoch("", [dict(std=0.01)] * 3, names)
        assert capsys.readouterr().out.count("a collapse") == count


@pytest.mark.parametrize("kind", [common.UsageError, FloatingPointError])
def test_an_error_is_not_glued_to_the_progress_line(kind, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)

    def main(args):
        common.progress("step 3")
        raise kind("a mistake")

    with pytest.raises(SystemExit, match="2"):
        common.start(main, lambda: None)
    said = capsys.readouterr()
    assert said.out.endswith("step 3\r\x1b[K") and said.err == "error: a mistake\n"


@pytest.mark.slow
@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_compiled_encoders_change_nothing(method, tmp_path, monkeypatch):
    """Weights differ only by rounding, here without the compiler's own code. Nothing is compiled for kNN."""
    graphs, compiled, monitor = [], [], common.knn_accuracy

    def watched(*words):
        before, found = len(graphs), monitor(*words)
        assert len(graphs) == before
        return found

    monkeypatch.setattr(common, "knn_accuracy", watched)
    eager = functools.partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph)
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or eager(function))
    run(method, tmp_path / "usual", "--epochs", 1)
    assert not compiled
    run(method, tmp_path / "compiled", "--epochs", 1, "--compile")
    assert len(compiled) == 2 and graphs  # the query encoder and the momentum encoder
    usual, other = (load(tmp_path / name / "last.pt")["model"] for name in ("usual", "compiled"))
    torch.testing.assert_close(usual, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_own_images(method, tmp_path):
    """Only kNN needs labels: a list of items, which has no `targets`, gives the same weights, even with CLIM."""
    train, test = common.Patterns(4096, 20, seed=7), common.Patterns(1024, 20, seed=8)  # 68 and 32 images
    run(method, tmp_path / "labels", "--epochs", 1, train=train, test=test)
    run(method, tmp_path / "items", "--epochs", 1, train=[*train])
    assert unequal(*(load(tmp_path / name / "last.pt")["model"] for name in ("labels", "items"))) == []
    assert ["knn20_top1" in records(tmp_path / name)[0] for name in ("labels", "items")] == [True, False]


@timm.models.register_model
def own_encoder(pretrained=False, num_classes=0, **kwargs):
    """Return an encoder that timm does not have, (n, 3, H, W) -> (n, 8). One parameter is frozen."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net[1].bias.requires_grad_(False)
    return net


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_own_encoder(method, tmp_path, capsys):
    """An encoder in timm's registry can be an --arch, and any script that registers it can evaluate it."""
    run(method, tmp_path, "--arch", "own_encoder")
    saved = load(tmp_path / "backbone.pt")
    encoder = timm.create_model(saved["timm_name"], **saved["create_kwargs"])
    encoder.load_state_dict(saved["state_dict"])
    assert encoder[1].running_mean.any() and not encoder[1].bias.any()  # trained, and frozen
    assert evaluate(eval_knn, tmp_path, "--k", 20)["encoder"]["knn20_top1"] == records(tmp_path)[-1]["knn20_top1"]
    torch.save(saved | dict(timm_name="encoder_of_mine"), tmp_path / "backbone.pt")
    line = refused(capsys, common.load_backbone, tmp_path)
    assert "encoder_of_mine is not registered" in line and "eval_knn.main" in line


@pytest.mark.parametrize("name, module", [("resnet7", "resnet"), ("vit_own", "vision_transformer")])
def test_an_own_encoder_is_not_taken_for_timms(name, module, monkeypatch, capsys):
    """It stays as it is if its file is called like one of timm's. A name of ours is refused."""
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setattr(own_encoder, "__module__", module)
    monkeypatch.setattr(own_encoder, "__name__", name)
    timm.models.register_model(own_encoder)
    info = common.backbone_info(name, 32)
    assert (info["create_kwargs"], info["stem"]) == (dict(num_classes=0), "timm") and not common.is_vit(name)
    assert common.is_vit("vit_small_patch16_224_dino")  # a name that timm has deprecated
    monkeypatch.setitem(common.ARCHS, name, common.ARCHS["vit_tiny"])
    assert "another name" in refused(capsys, common.backbone_info, name, 32)
