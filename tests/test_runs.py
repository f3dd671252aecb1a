"""What a run writes and says, wherever its output goes; and the switches that leave its numbers as they are."""

import contextlib
import importlib.util
import io
import json
import math
import os
import random
import signal
import sys
import warnings

import numpy as np
import pytest
import timm
import tiny
import torch
from conftest import METHODS
from tiny import STEPS, load, records, refused, run
from torch import nn

import common
import eval_knn
import eval_linear

_tiny = tiny._tiny
pytestmark = pytest.mark.usefixtures("_tiny")
TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


@pytest.fixture(scope="module", params=METHODS)
def whole(request, _tiny, tmp_path_factory):
    """(method, folder of its run of two epochs, what that run printed)."""
    out, more = tmp_path_factory.mktemp(request.param) / "whole", ["--tensorboard"] * TENSORBOARD
    return request.param, out, run(request.param, out, "--keep-every", "1", *more)


# ------------------------------------------------------------- files and words


def test_a_runs_folder(whole):
    _, out, _ = whole
    names = {"config.json", "metrics.jsonl", "last.pt", "backbone.pt", "epoch-0001.pt", "epoch-0002.pt"}
    assert {path.name for path in out.iterdir() if not path.name.startswith("events")} - {"lock"} == names
    assert len([*out.glob("events*")]) == TENSORBOARD
    steps = {path.stem: load(path)["step"] for path in out.glob("*.pt") if path.stem != "backbone"}
    assert steps == {"last": 8, "epoch-0001": 4, "epoch-0002": 8}
    last, config = load(out / "last.pt"), json.loads((out / "config.json").read_text())
    assert {"model", "optimizer", "step", "records", "config", "images", "backbone"} <= last.keys()
    assert config["torch"] == torch.__version__ and "CPU" in config["machine"] and config["images"]["number"] == 68
    assert {"python", "torchvision", "timm", "numpy", "commit"} <= config.keys()
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}.items() >= last["config"].items()
    assert records(out) == last["records"]
    for i, r in enumerate(last["records"], 1):
        assert (r["epoch"], r["step"]) == (i, STEPS * i)
        chance = r["loss"] + r["below_chance"]
        assert chance == pytest.approx(last["records"][0]["loss"] + last["records"][0]["below_chance"])
        assert 0 <= r["data_wait"] <= 1 and r["images_per_s"] > 0 and r["grad_norm"] > 0 and r["lr"] > 0
        assert 0 < r["std"] < 1.1 and 1 <= r["rank"] <= 64
        assert {"momentum", "knn20_top1"} <= r.keys() and all(map(math.isfinite, r.values()))


def test_what_a_run_says(whole):
    method, out, said = whole
    words = "68 images, test images: 32, 10 classes, vit_micro, batch 16 over 1 process, 4 steps per epoch, "
    words += "rate , weight decay, slice(s), " if method == "patchmix" else "rate , weight decay, batch-norm groups, "
    words += "CutMix's shares: Beta(2, 2), " if method == "clim" else ""
    words += f"16 px in patches of 8 px, torch {torch.__version__}, evaluated: the , "
    words += f"chance level of the loss {records(out)[0]['loss'] + records(out)[0]['below_chance']:.3f}"
    assert [w for w in words.split(", ") if w not in said] == []
    for epoch in (1, 2):
        (line,) = (x for x in said.splitlines() if x.startswith(f"epoch {epoch}/2  loss"))
        assert all(name in line for name in ("loss ", " chance)", "images/s", "std ", "knn20_top1 ")), line
        assert len(line) <= 120
    assert "finished. Judge it" in said
    lines = said.splitlines()
    for line in (lines[0], lines[-1]):  # the images are a demo: how to train on others
        assert line.startswith("DEMO: these images are generated")
        assert f"python {method}.py --dataset cifar10" in line and f"{method}.py --dataset imagenet" in line


def test_images_of_a_users_folder_are_no_demo(tmp_path):
    data = tiny.write_tree(tmp_path / "data", {"train/a": 8, "train/b": 8}, size=(16, 16))
    said = run("jcl", tmp_path / "run", "--dataset", "patterns", "--data-dir", data)
    assert "DEMO" not in said and f"in {data}: 16 images" in said
    assert common.read_config(tmp_path / "run")["data_dir"] == str(data)


def test_a_run_that_has_made_its_steps_says_how_to_go_on(tmp_path):
    """With --tensorboard each call that makes steps has a file of events."""
    for steps in (3, 3, 1):
        said = run("jcl", tmp_path, "--max-steps", steps, *["--tensorboard"] * TENSORBOARD)
        assert "stopped at step 3 of 8: give a larger --max-steps, or none" in said and "same command" not in said


def test_a_run_without_labels_says_how_to_find_out(tmp_path):
    tiny.write_tree(tmp_path, ["."], 20, (16, 16))
    flags = "--dataset folder --arch resnet_micro --epochs 1 --queue 16 --bn-groups 2".split()
    said = run("jcl", tmp_path / "out", *flags, "--data-dir", tmp_path)
    assert f"Judge it: python eval_knn.py {tmp_path / 'out'} --data-dir DIR" in said


KEPT = [*((method, None, "timm") for method in METHODS), ("jcl", "resnet_nano", "3x3")]


@pytest.mark.parametrize("whole, arch, stem", KEPT, indirect=["whole"])
def test_the_backbone_file(whole, arch, stem, tmp_path):
    """timm rebuilds the encoder from it, strictly. It is the one whose kNN the run reports."""
    method, out, _ = whole
    if arch:
        out = tmp_path
        run(method, out, "--arch", arch, "--knn-every", "10")  # the last epoch has kNN all the same
        assert ["knn20_top1" in r for r in records(out)] == [False, True]
    saved = load(out / "backbone.pt")
    encoder = timm.create_model(saved["timm_name"], **saved["create_kwargs"])
    if stem == "3x3":
        encoder.conv1 = nn.Conv2d(3, encoder.conv1.out_channels, 3, padding=1, bias=False)
        encoder.maxpool = nn.Identity()
    encoder.load_state_dict(saved["state_dict"], strict=True)
    x = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        assert saved["stem"] == stem and torch.equal(encoder.eval()(x), common.load_backbone(out)[0](x))
    words = [str(out), "--k", "20", "--no-floors", "--device", "cpu"]
    found = eval_knn.main(eval_knn.parse_args(words))["encoder"]
    assert found["knn20_top1"] == pytest.approx(records(out)[-1]["knn20_top1"])


one = pytest.mark.parametrize("whole", ["patchmix"], indirect=True)


@one
def test_random_init_is_the_untrained_floor_of_a_run(whole, capsys):
    words = [str(whole[1]), "--device", "cpu"]
    found, alone = (eval_knn.main(eval_knn.parse_args([*words, *more])) for more in ([], ["--random-init"]))
    assert alone["encoder"] == found["untrained"] and "the untrained encoder" in capsys.readouterr().out


@one
def test_a_sweep_of_an_evaluation_has_a_folder_per_value(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [str(whole[1]), "--protocol", "moco", "--epochs", "1", "--batch-size", "32", "--device", "cpu"]
    for flags in ("--lr 0.1", "--lr 0.2", "--label-fraction 0.5", "--random-init"):
        eval_linear.main(eval_linear.parse_args([*words, *flags.split()]))
    names = {path.name.rpartition("-epochs1-")[2] for path in (tmp_path / "runs").iterdir()}
    assert names == {"lr0.1", "lr0.2", "label_fraction0.5", "random_initTrue"}


@one
def test_an_evaluation_names_what_was_used(whole, tmp_path, capsys):
    tiny.write_tree(tmp_path, ["train/a", "train/b", "val/a", "val/b"], 1, (16, 16))
    for flags, words in (("--k 100000", "k=68 "), (f"--data-dir {tmp_path}", f"patterns in {tmp_path}: 2 images")):
        eval_knn.main(eval_knn.parse_args(f"{whole[1]} --no-floors --device cpu {flags}".split()))
        assert words in capsys.readouterr().out


# ------------------------------------------------------- a program that calls in


def process_state():
    """What belongs to a whole process: threads, denormals, precision, filters, handlers, generators."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    denormals = (torch.tensor([1e-40]) * 1).item() != 0
    products = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)
    generators = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    threads = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())
    return [threads, denormals, products, list(warnings.filters), handlers, generators, dict(os.environ)]


def call_in(folder):
    """Import every file, train with each method and judge: afterwards the process is as it was."""
    torch.set_num_threads(2)
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    before = process_state()
    for script in [*METHODS, "eval_knn", "eval_linear", "common"]:
        known = sys.modules.pop(script, None)
        importlib.import_module(script)
        assert process_state() == before, script
        sys.modules |= {script: known} if known else {}
    for method in METHODS:
        run(method, f"{folder}/{method}", "--epochs", "1", "--workers", int(method == "jcl"))
        assert process_state() == before, method
    protocol = f"--protocol moco --batch-size 16 --epochs 1 --out {folder}/judged".split()
    for script, flags in (("eval_knn", []), ("eval_linear", protocol)):
        module = importlib.import_module(script)
        module.main(module.parse_args([f"{folder}/jcl", "--device", "cpu", *flags]))
        assert process_state() == before, script


def test_a_program_that_calls_in_stays_as_it_was(tmp_path):
    ((status, _, error),) = tiny.processes(tmp_path / "log", call_in, [(str(tmp_path / "runs"),)])
    assert status == 0, error


def test_a_callers_process_group_stays(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        run("jcl", tmp_path, "--max-steps", "1")
        eval_knn.main(eval_knn.parse_args([str(tmp_path), "--device", "cpu", "--k", "1"]))
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


# -------------------------------------------------------- output may go anywhere


class Both:
    """What many training scripts put in place of sys.stdout: write and flush, nothing else."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


class Broken(io.StringIO):
    """A reader that has gone away, or a full disk behind a log."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, _):
        raise self.error


STREAMS = {
    "none": lambda: None,
    "closed": lambda: (stream := io.StringIO()).close() or stream,
    "without isatty": Both,
    "its reader is gone": lambda: Broken(BrokenPipeError()),
    "a full disk": lambda: Broken(OSError(28, "No space left on device")),
}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_output_may_go_anywhere(make, tmp_path, monkeypatch):
    """A run goes on whatever becomes of its output, and a mistake still ends with status 2."""
    stream = make()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(contextlib, "redirect_stdout", lambda _: contextlib.nullcontext())
        run("jcl", tmp_path, "--max-steps", "1")
        patch.setattr(sys, "stderr", make())
        with pytest.raises(SystemExit) as stop:
            common.fail("a mistake")
    assert stop.value.code == 2 and load(tmp_path / "last.pt")["step"] == 1
    assert not isinstance(stream, Both) or "stopped at step 1" in stream.text


def test_letters_that_a_terminal_lacks(tmp_path, monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), "ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", shown)
        common.say("grün \udcff")
    shown.flush()
    assert shown.buffer.getvalue() == b"gr\\xfcn \\udcff\n"


def test_a_name_with_a_line_break_is_one_line(capsys):
    assert refused(capsys, common.fail, "a\nb") == "error: a\\nb\n"


LAUNCHER = dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


@pytest.mark.parametrize("missing", [*LAUNCHER, None])
@pytest.mark.parametrize("empty", [True, False])
def test_a_launchers_variables_count_only_together(missing, empty, capsys, monkeypatch):
    """A process whose variables are set in part is alone, and speaks."""
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    if missing and empty:
        monkeypatch.setenv(missing, "")
    elif missing:
        monkeypatch.delenv(missing)
    assert common.rank_and_world() == ((0, 1) if missing else (1, 2))
    common.say("words")
    assert capsys.readouterr().out == ("words\n" if missing else "")


# ---------------------------------------------- switches, and encoders of any kind


def watched(method, monkeypatch):
    """A list that gets the model of each later run, as `in_parallel` has prepared it."""
    module, models = importlib.import_module(method), []
    prepare = module.in_parallel
    monkeypatch.setattr(module, "in_parallel", lambda args, model: models.append(model) or prepare(args, model))
    return models


@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing_changes_nothing(method, tmp_path, monkeypatch):
    """Of a ViT: where there is no batch norm, weights are equal bit for bit, drop-path included."""
    models = watched(method, monkeypatch)
    for name, flags in (("usual", []), ("again", ["--grad-checkpoint"])):
        run(method, tmp_path / name, *flags, "--max-steps", "2")
    assert [model.backbone.grad_checkpointing for model in models] == [False, True]
    assert tiny.unequal(*(load(tmp_path / name / "last.pt")["model"] for name in ("usual", "again"))) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_encoder_is_the_same_one(method, tmp_path, monkeypatch):
    """Its weights have the usual names in both files. Here without the compiler's own code."""
    compile, models = torch.compile, watched(method, monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda module, **_: compile(module, backend="eager"))
    for name, flags in (("usual", []), ("compiled", ["--compile"])):
        run(method, tmp_path / name, *flags, "--max-steps", "2")
    assert [model.backbone._compiled_call_impl is not None for model in models] == [False, True]
    for file, part in (("last.pt", "model"), ("backbone.pt", "state_dict")):
        usual, compiled = (load(tmp_path / name / file)[part] for name in ("usual", "compiled"))
        torch.testing.assert_close(usual, compiled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method, arch", [*((m, "vit_micro") for m in METHODS), ("jcl", "resnet_nano")])
def test_bf16_is_for_the_networks_only(method, arch, tmp_path, monkeypatch, capsys):
    """Embeddings, losses, statistics and weights stay in float32. The loss is about that of a run without bf16."""
    made, module = [], importlib.import_module(method)
    prepare = module.in_parallel

    def watch(args, model):
        model.register_forward_hook(lambda _, __, output: made.append(tiny.flat(output)))
        return prepare(args, model)

    monkeypatch.setattr(module, "in_parallel", watch)
    flags = ["--arch", arch, "--image-size", "32", "--max-steps", "1"]
    for amp in ("bf16", "off"):
        run(method, tmp_path / amp, *flags, "--amp", amp)
    state = load(tmp_path / "bf16" / "last.pt")["model"]
    seen, losses = (v.dtype for v in made[0].values() if torch.is_tensor(v)), [found["/0"].item() for found in made]
    assert set(seen) == {torch.float32} == {v.dtype for v in state.values() if v.is_floating_point()}
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)
    if arch == "resnet_nano":  # where torch's gradients are wrong, it is refused
        flags += ["--image-size", "16", "--amp", "bf16"]
        assert "--amp bf16 on a CPU" in refused(capsys, run, method, tmp_path / "small", *flags)


@pytest.mark.parametrize("arch", ["resnet10t", "mobilenetv3_small_050", "convnext_atto"])
def test_any_timm_model(arch, tmp_path):
    """Other stems, norms that hold an activation, layers after the pooling: grouped norms change nothing, it trains."""
    model = common.build_backbone(common.backbone_info(arch, 32, 16)).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(importlib.import_module("jcl").split_batch_norms(model, 2)(x), expected)
    said = run("jcl", tmp_path, "--arch", arch, "--image-size", "32", "--max-steps", "1")
    assert "stopped at step 1" in said
