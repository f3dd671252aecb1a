"""What a run writes, and the switches that leave its numbers as they are."""

import importlib
import io
import json
import math
import os
import signal
import sys
import types

import pytest
import tiny
import torch
from conftest import JCL_AT_ONCE, METHODS
from tiny import STEPS, load, records, refused, run
from torch import nn

import common
import eval_knn
import jcl

_tiny = tiny._tiny
pytestmark = pytest.mark.usefixtures("_tiny")
TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


def knn(words, **own):
    return eval_knn.main(eval_knn.parse_args([*map(str, words), "--device", "cpu"]), **own)


@pytest.fixture(scope="module", params=JCL_AT_ONCE)
def whole(request, _tiny, tmp_path_factory):
    """The folder of a method's run of two epochs."""
    out, more = tmp_path_factory.mktemp(request.param) / "whole", ["--tensorboard"] * TENSORBOARD
    run(request.param, out, "--keep-every", "1", *more)
    return out


# ----------------------------------------------------------------------- files


def test_a_runs_folder(whole):
    names = {"config.json", "metrics.jsonl", "last.pt", "backbone.pt", "epoch-0001.pt", "epoch-0002.pt", "lock"}
    assert {path.name for path in whole.iterdir() if not path.name.startswith("events")} == names
    assert len([*whole.glob("events*")]) == TENSORBOARD
    steps = {path.stem: load(path)["step"] for path in whole.glob("*.pt") if path.stem != "backbone"}
    assert steps == {"last": 8, "epoch-0001": 4, "epoch-0002": 8}
    last, config = load(whole / "last.pt"), json.loads((whole / "config.json").read_text())
    assert config["torch"] == torch.__version__ and "CPU" in config["machine"] and config["images"]["number"] == 68
    assert {"python", "torchvision", "timm", "numpy", "commit"} <= config.keys()
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}.items() >= last["config"].items()
    assert records(whole) == last["records"]
    for i, r in enumerate(last["records"], 1):
        assert (r["epoch"], r["step"]) == (i, STEPS * i)
        assert 0 <= r["data_wait"] <= 1 and r["images_per_s"] > 0 and r["grad_norm"] > 0 and r["lr"] > 0
        assert 0 < r["std"] < 1.1 and 1 <= r["rank"] <= 64
        assert {"momentum", "knn20_top1"} <= r.keys() and all(map(math.isfinite, r.values()))


def test_a_run_on_images_of_a_folder(tmp_path):
    """Those without labels are trained on, too. It is judged on its own images, which are found."""
    data = tiny.write_tree(tmp_path / "data", ["train/a", "train/b", "test/a", "test/b", "unlabeled"], 8, (16, 16))
    said = run("jcl", tmp_path / "run", "--dataset", "folder", "--data-dir", data, "--patch-size", 8, "--epochs", 1)
    assert "24 images of 2 classes" in " ".join(said.split())
    assert knn([tmp_path / "run", "--no-floors", "--k", 16])["encoder"].keys() == {"knn16_top1"}


def test_the_backbone_file_is_the_encoder_whose_knn_the_run_reports(whole):
    found = knn([whole, "--k", "20", "--no-floors"])["encoder"]
    assert found["knn20_top1"] == pytest.approx(records(whole)[-1]["knn20_top1"])


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_the_last_epoch_has_its_knn_whatever_knn_every_says(method, tmp_path):
    run(method, tmp_path, "--knn-every", "10")
    assert ["knn20_top1" in r for r in records(tmp_path)] == [False, True]


def test_the_speed_and_the_means_of_an_epoch(monkeypatch):
    """Of 4 steps of 16 images in 8 seconds, of which one was waited."""
    loader, args = common.Loader([0], torch.device("cpu")), types.SimpleNamespace(batch_size=16)
    loader.began, loader.waited = 2.0, 1.0
    history = [dict(loss=torch.tensor(x)) for x in (1.0, 2.0, 3.0, 6.0)]
    monkeypatch.setattr("time.perf_counter", lambda: 10.0)
    for script in (*METHODS, "eval_linear"):
        found = importlib.import_module(script).means(args, loader, history)
        assert found == dict(loss=3.0, images_per_s=8.0, data_wait=0.125)


@pytest.mark.parametrize("other, said", [(3.0, "step 20/20  loss 2.000"), (math.inf, None)])
def test_progress_is_that_of_all_processes(other, said, monkeypatch, capsys):
    monkeypatch.setattr(common, "from_all", lambda here: [here, (other, 0.0)])
    monkeypatch.setattr(common, "progress", print)
    loader, args = common.Loader([0], torch.device("cpu")), types.SimpleNamespace(batch_size=16, epochs=2)
    loader.began = 0.0
    given = args, loader, [dict(loss=torch.tensor(1.0))], 20, 20
    if said is None:
        assert "step 20" in refused(capsys, common.show_progress, *given)
    else:
        common.show_progress(*given)
        assert said in capsys.readouterr().out


# ------------------------------------------------------- a program that calls in


def process_state():
    """What belongs to a whole process, but for its random numbers: threads, denormals, precision, handlers, a group."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    precision = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.get_default_dtype()
    denormals, group = (torch.tensor([1e-40]) * 1).item() != 0, torch.distributed.is_initialized()
    return [torch.get_num_threads(), torch.is_grad_enabled(), precision, denormals, handlers, group, dict(os.environ)]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_a_program_that_calls_in_stays_as_it_was(method, tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.set_num_threads(2)
        torch.set_flush_denormal(False)
        before = process_state()
        run(method, tmp_path, "--max-steps", "1")
        knn([tmp_path, "--k", "1"])
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
    assert load(tmp_path / "last.pt")["step"] == STEPS


# ---------------------------------------------- switches, and encoders of any kind


def watch(method, monkeypatch, look):
    """Call `look` with the model of each later run, which `in_parallel` then prepares."""
    module = importlib.import_module(method)
    prepare = module.in_parallel
    monkeypatch.setattr(module, "in_parallel", lambda args, model: [look(model), prepare(args, model)][1])


@pytest.mark.parametrize("flag", ["--grad-checkpoint", pytest.param("--compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_a_switch_of_the_encoder_changes_nothing(flag, method, tmp_path, monkeypatch):
    """Of a ViT, bit for bit, drop-path included; compiled but for rounding, here without the compiler's own code."""
    compile, models = torch.compile, []
    watch(method, monkeypatch, models.append)
    monkeypatch.setattr(torch, "compile", lambda module, **_: compile(module, backend="eager"))
    for name, flags in (("usual", []), ("other", [flag])):
        run(method, tmp_path / name, *flags, "--max-steps", "2")
    encoders, compiled = [model.backbone for model in models], flag == "--compile"
    acts = [e._compiled_call_impl is not None if compiled else e.grad_checkpointing for e in encoders]
    assert acts == [False, True]
    for file, part in (("last.pt", "model"), ("backbone.pt", "state_dict")):
        usual, other = (load(tmp_path / name / file)[part] for name in ("usual", "other"))
        torch.testing.assert_close(usual, other, rtol=1e-4 * compiled, atol=1e-5 * compiled)


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_bf16_is_for_the_networks_only(method, tmp_path, monkeypatch):
    """Embeddings, losses, statistics and weights stay in float32. The loss is about that of a run without bf16."""
    arch, made = "resnet_nano" if method == "jcl" else "vit_micro", []

    def note(model, given, output):
        made.append(tiny.flat(output))

    watch(method, monkeypatch, lambda model: model.register_forward_hook(note))
    flags = ["--arch", arch, "--image-size", "32", "--max-steps", "1"]
    for amp in ("bf16", "off"):
        run(method, tmp_path / amp, *flags, "--amp", amp)
    state = load(tmp_path / "bf16" / "last.pt")["model"]
    seen, losses = (v.dtype for v in made[0].values() if torch.is_tensor(v)), [found["/0"].item() for found in made]
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
    run("jcl", tmp_path, "--arch", arch, "--image-size", "32", "--max-steps", "1")


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_an_own_encoder_in_evaluation_mode_is_trained_in_training_mode(method, tmp_path):
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = common.ImageSet(common.make_patterns(68, 16, 0)[0])
    run(method, tmp_path, "--max-steps", 2, train=images, encoder=encoder.eval())
    trained = load(tmp_path / "backbone.pt")["state_dict"]
    assert not encoder.training and not torch.equal(trained["1.running_mean"], encoder[1].running_mean)
