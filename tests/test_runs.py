"""What a run writes, and the switches that leave its numbers as they are."""

import importlib
import io
import json
import math
import re
import sys
import types

import pytest
import tiny
import torch
from conftest import JCL_AT_ONCE
from tiny import STEPS, epochs_of, load, records, run

import common
import eval_knn
import jcl

pytestmark = pytest.mark.usefixtures("_tiny")
TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


def knn(*words):
    return eval_knn.main(eval_knn.parse_args([*map(str, words), "--device", "cpu", "--no-baselines"]))["encoder"]


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_a_runs_folder(method, tmp_path):
    """The last epoch has its kNN whatever --knn-every says, and it is that of the encoder in backbone.pt."""
    said = run(method, tmp_path, "--keep-every", 1, "--knn-every", 10, *["--tensorboard"] * TENSORBOARD)
    names = {"config.json", "metrics.jsonl", "last.pt", "backbone.pt", "epoch-0001.pt", "epoch-0002.pt"}
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("events")} == names
    assert bool([*tmp_path.glob("events*")]) == TENSORBOARD
    last, config = load(tmp_path / "last.pt"), json.loads((tmp_path / "config.json").read_text())
    assert len(load(tmp_path / "epoch-0001.pt")["records"]) == 1
    assert {"torch", "python", "torchvision", "timm", "numpy", "machine", "commit"} <= config.keys()
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}.items() >= last["config"].items()
    peak = config["lr"] * config["batch_size"] / config["lr_batch"]
    assert float(re.search(r"peak_lr (\S+)", said)[1]) == pytest.approx(peak, rel=1e-3)
    first, second = records(tmp_path)
    assert last["records"] == [first, second] and (first["epoch"], second["epoch"]) == (1, 2)
    for r in (first, second):
        assert r["images_per_s"] > 0 and r["grad_norm"] > 0 and r["lr"] > 0 and 0 < r["std"] < 1.1
        assert 1 <= r["rank"] <= 16 and all(map(math.isfinite, r.values()))
    assert knn(tmp_path, "--k", "20")["knn20_top1"] == second["knn20_top1"] and "knn20_top1" not in first


def test_a_run_on_images_of_a_folder(tmp_path):
    """Those without labels are trained on, too. It is evaluated on its own images, which are found."""
    data = tiny.write_tree(tmp_path / "data", ["train/a", "train/b", "test/a", "test/b", "unlabeled"], 8, (16, 16))
    said = run("jcl", tmp_path / "run", "--dataset", "folder", "--data-dir", data, "--patch-size", 8, "--epochs", 1)
    assert "24 images of 2 classes" in " ".join(said.split())
    assert knn(tmp_path / "run", "--k", 16).keys() == {"knn16_top1"}


def test_the_speed_and_the_means_of_an_epoch(monkeypatch):
    """Of 4 steps of 16 images in 8 seconds, and of two processes: one has twice the other's loss."""
    history = [dict(loss=torch.tensor(x)) for x in (1.0, 2.0, 3.0, 6.0)]
    monkeypatch.setattr("time.perf_counter", lambda: 10.0)
    monkeypatch.setattr(common, "gather_uneven", lambda sums: torch.cat([sums, 2 * sums]))
    assert common.means(types.SimpleNamespace(batch_size=16), history, 2.0) == dict(loss=4.5, images_per_s=8.0)


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device")])
def test_a_run_goes_on_if_nobody_reads_its_output(error, tmp_path, monkeypatch):
    class Broken(io.StringIO):
        def write(self, _):
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Broken())
        jcl.main(jcl.parse_args([*tiny.FLAGS, "--epochs", "1", "--out", str(tmp_path)]))
    assert epochs_of(tmp_path) == 1


def watch(monkeypatch, look):
    """Call `look` with the model of each later run, once it is loaded."""
    load_run = common.load_run
    monkeypatch.setattr(common, "load_run", lambda *args: [look(args[2]["model"]), load_run(*args)][1])


@pytest.mark.slow
@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_compiled_encoders_change_nothing(method, tmp_path, monkeypatch):
    """But for rounding, here without the compiler's own code."""
    compile, models = torch.compile, []
    watch(monkeypatch, models.append)
    monkeypatch.setattr(torch, "compile", lambda module, **_: compile(module, backend="eager"))
    for flag in ("--no-compile", "--compile"):
        run(method, tmp_path / flag, flag, "--epochs", "1")
    assert [model.backbone._compiled_call_impl is not None for model in models] == [False, True]
    usual, other = (load(tmp_path / flag / "last.pt")["model"] for flag in ("--no-compile", "--compile"))
    torch.testing.assert_close(usual, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_bf16_is_for_the_networks_only(method, tmp_path, monkeypatch):
    """Embeddings, losses, statistics and weights stay in float32. The loss is about that of a run without bf16."""
    arch, made = "resnet_nano" if method == "jcl" else "vit_micro", []
    watch(monkeypatch, lambda model: model.register_forward_hook(lambda *found: made.append(tiny.flat(found[2]))))
    for amp in ("bf16", "off"):
        run(method, tmp_path / amp, "--arch", arch, *"--image-size 32 --epochs 1 --knn-every 0 --amp".split(), amp)
    state = load(tmp_path / "bf16" / "last.pt")["model"]
    seen, losses = (v.dtype for v in made[0].values() if torch.is_tensor(v)), [made[i]["/0"].item() for i in (0, STEPS)]
    assert set(seen) == {torch.float32} == {v.dtype for v in state.values() if v.is_floating_point()}
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["resnet10t", "mobilenetv3_small_050", "convnext_atto"])
def test_any_timm_model(arch, tmp_path):
    run("jcl", tmp_path, "--arch", arch, "--image-size", "32", "--epochs", "1")
