"""What a run writes, and the switches that leave its numbers as they are."""

import importlib
import io
import json
import math
import os
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

_tiny = tiny._tiny
pytestmark = pytest.mark.usefixtures("_tiny")
TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


def knn(*words):
    return eval_knn.main(eval_knn.parse_args([*map(str, words), "--device", "cpu", "--no-baselines"]))["encoder"]


@pytest.fixture(scope="module", params=JCL_AT_ONCE)
def whole(request, _tiny, tmp_path_factory):
    """The folder of a method's run of two epochs."""
    out, more = tmp_path_factory.mktemp(request.param) / "whole", ["--tensorboard"] * TENSORBOARD
    run(request.param, out, "--keep-every", "1", *more)
    return out


# ----------------------------------------------------------------------- files


def test_a_runs_folder(whole):
    names = {"config.json", "metrics.jsonl", "last.pt", "backbone.pt", "epoch-0001.pt", "epoch-0002.pt"}
    assert {path.name for path in whole.iterdir() if not path.name.startswith("events")} == names
    assert bool([*whole.glob("events*")]) == TENSORBOARD
    last, config = load(whole / "last.pt"), json.loads((whole / "config.json").read_text())
    assert len(load(whole / "epoch-0001.pt")["records"]) == 1
    assert config["torch"] == torch.__version__ and "CPU" in config["machine"]
    assert {"python", "torchvision", "timm", "numpy", "commit"} <= config.keys()
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}.items() >= last["config"].items()
    assert records(whole) == last["records"] and [r["epoch"] for r in records(whole)] == [1, 2]
    for r in last["records"]:
        assert r["images_per_s"] > 0 and r["grad_norm"] > 0 and r["lr"] > 0 and 0 < r["std"] < 1.1
        assert 1 <= r["rank"] <= 16 and "knn20_top1" in r and all(map(math.isfinite, r.values()))


def test_a_run_on_images_of_a_folder(tmp_path):
    """Those without labels are trained on, too. It is evaluated on its own images, which are found."""
    data = tiny.write_tree(tmp_path / "data", ["train/a", "train/b", "test/a", "test/b", "unlabeled"], 8, (16, 16))
    said = run("jcl", tmp_path / "run", "--dataset", "folder", "--data-dir", data, "--patch-size", 8, "--epochs", 1)
    assert "24 images of 2 classes" in " ".join(said.split())
    assert knn(tmp_path / "run", "--k", 16).keys() == {"knn16_top1"}


def test_the_backbone_file_is_the_encoder_whose_knn_the_run_reports(whole):
    assert knn(whole, "--k", "20")["knn20_top1"] == pytest.approx(records(whole)[-1]["knn20_top1"])


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_the_last_epoch_has_its_knn_whatever_knn_every_says(method, tmp_path):
    run(method, tmp_path, "--knn-every", "10")
    assert ["knn20_top1" in r for r in records(tmp_path)] == [False, True]


def test_the_speed_and_the_means_of_an_epoch(monkeypatch):
    """Of 4 steps of 16 images in 8 seconds, and of two processes, one of which has twice the other's loss."""
    history = [dict(loss=torch.tensor(x)) for x in (1.0, 2.0, 3.0, 6.0)]
    monkeypatch.setattr("time.perf_counter", lambda: 10.0)
    monkeypatch.setattr(common, "gather_uneven", lambda sums: torch.cat([sums, 2 * sums]))
    assert common.means(types.SimpleNamespace(batch_size=16), history, 2.0) == dict(loss=4.5, images_per_s=8.0)


# ------------------------------------------------------- a program that calls in


def process_state():
    """What belongs to a whole process, but for its random numbers: denormals, precision, a group."""
    precision = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.get_default_dtype()
    denormals, group = (torch.tensor([1e-40]) * 1).item() != 0, torch.distributed.is_initialized()
    return [torch.is_grad_enabled(), precision, denormals, group, dict(os.environ)]


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_a_program_that_calls_in_stays_as_it_was(method, tmp_path, monkeypatch):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch, "set_num_threads", None)
        torch.set_flush_denormal(False)
        before = process_state()
        run(method, tmp_path, "--epochs", "1", train=common.ImageSet(common.make_patterns(16, 16, 0)[0]))
        knn(tmp_path, "--dataset", "patterns", "--k", "1")
        assert process_state() == before
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device")])
def test_a_run_goes_on_if_nobody_reads_its_output(error, tmp_path, monkeypatch):
    class Broken(io.StringIO):
        def write(self, _):
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Broken())
        jcl.main(jcl.parse_args([*tiny.FLAGS, "--epochs", "1", "--out", str(tmp_path)]))
    assert epochs_of(tmp_path) == 1


# ---------------------------------------------- switches, and encoders of any kind


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
    for name, flags in (("usual", []), ("other", ["--compile"])):
        run(method, tmp_path / name, *flags, "--epochs", "1")
    assert [model.backbone._compiled_call_impl is not None for model in models] == [False, True]
    for file, part in (("last.pt", "model"), ("backbone.pt", "state_dict")):
        usual, other = (load(tmp_path / name / file)[part] for name in ("usual", "other"))
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
    """Other stems, norms that hold an activation, layers after the pooling: grouped norms change nothing, it trains."""
    model = common.build_backbone(common.backbone_info(arch, 32, 16)).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(jcl.split_batch_norms(model, 2)(x), expected)
    run("jcl", tmp_path, "--arch", arch, "--image-size", "32", "--epochs", "1")
