"""Whole runs of every method: stopped, killed, continued; on two processes; the files, the words and the mistakes."""

import contextlib
import importlib
import io
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error

import numpy as np
import pytest
import timm
import torch
import torch.distributed as dist
from conftest import METHODS, ROOT
from PIL import Image
from torch import nn

import common

SCRIPTS = [*METHODS, "eval_knn", "eval_linear"]
ONE = [m for m in METHODS if m == "jcl"]  # where only common.py is meant
TINY = "--dataset patterns --arch vit_micro --image-size 16 --batch-size 16 --epochs 2".split()
TINY += ["--knn-every", "1", "--device", "cpu"]
STEPS = 4  # an epoch: 68 images in batches of 16
TIMING = ("images_per_s", "data_wait")
NEEDED = {"patchmix": ["--mix-slices", "2"]}  # what a method needs to be the same on two processes
CHILDREN = torch.multiprocessing.get_context("forkserver")  # clean processes, without importing torch again
CHILDREN.set_forkserver_preload(["torch", "torchvision", "timm"])


def narrow(module, drop_path):
    """Small heads, and a small ResNet with the 3 x 3 stem, for speed."""
    common.ARCHS["resnet_nano"] = ("resnet18", dict(layers=(1, 1, 1, 1), channels=(8, 16, 32, 64)))
    recipe = module.RECIPES["patterns"]
    recipe |= {k: v for k, v in dict(hidden=32, dim=16, patch_size=8, drop_path=drop_path).items() if k in recipe}


@pytest.fixture(scope="module", autouse=True)
def _narrow():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "ARCHS", dict(common.ARCHS))
        for method in METHODS:
            module = importlib.import_module(method)
            patch.setitem(module.RECIPES, "patterns", dict(module.RECIPES["patterns"]))
            narrow(module, drop_path=0.2)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """68 + 32 patterns of 16 px as PNG files in train/ and test/, one folder a class."""
    root = tmp_path_factory.mktemp("patterns")
    for split, count, seed in (("train", 68, 0), ("test", 32, 1)):
        for i, (image, label) in enumerate(zip(*common.make_patterns(count, 16, seed), strict=True)):
            path = root / split / f"kind{label % 4}" / f"{i:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return root


def run(method, folder, out, *flags, **own):
    """A run in this process; returns what it prints. own: the user's train, test, encoder."""
    module, said = importlib.import_module(method), io.StringIO()
    where = ["--data-dir", str(folder)] if folder else []
    with contextlib.redirect_stdout(said):
        module.main(module.parse_args([*TINY, *where, "--out", str(out), *map(str, flags)]), **own)
    return said.getvalue()


def stopped(status, *args, **own):
    """A run that ends with an exit status."""
    with pytest.raises(SystemExit) as stop:
        run(*args, **own)
    assert stop.value.code == status


@pytest.fixture(scope="module", params=METHODS)
def whole(request, tmp_path_factory, folder):
    """(method, folder of its undisturbed run of two epochs, what that run printed)."""
    out = tmp_path_factory.mktemp(request.param) / "whole"
    return request.param, out, run(request.param, folder, out, "--keep-every", "1")


def load(path):
    return torch.load(path, weights_only=True)


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def tensors(state, name=""):
    """{path: tensor or plain value} of a nested state."""
    if isinstance(state, dict | list | tuple):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, value in pairs for k, v in tensors(value, f"{name}/{key}").items()}
    return {name: state}


def assert_equal(one, two):
    a, b = tensors(one), tensors(two)
    assert a.keys() == b.keys()
    assert [k for k in a if not (torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k])] == []


def assert_same_run(one, two):
    """Bit for bit: weights, optimiser, counters, metrics."""
    for name in ("last.pt", "backbone.pt"):
        states = [{k: v for k, v in load(out / name).items() if k not in ("config", "record")} for out in (one, two)]
        assert_equal(*states)
    first, second = records(one), records(two)
    assert [r["step"] for r in first] == [r["step"] for r in second] == [0, STEPS, 2 * STEPS]
    for r, s in zip(first[1:], second[1:], strict=True):
        assert {k: v for k, v in r.items() if k not in TIMING} == {k: v for k, v in s.items() if k not in TIMING}
        assert r.keys() == s.keys()


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --------------------------------------------------------------- continuation


def test_stopped_and_continued(whole, folder, tmp_path):
    """In mid-epoch, at an epoch's end, with other numbers of workers; the finished run then stays as it is."""
    method, reference, _ = whole
    for stop, workers in ((3, 0), (4, 2), (6, 0), (None, 0)):
        said = run(method, folder, tmp_path, "--workers", workers, *(["--max-steps", stop] if stop else []))
        assert load(tmp_path / "last.pt")["step"] == (stop or 2 * STEPS)
        assert (f"stopped at step {stop} of 8" if stop else "finished") in said
        assert ("mean loss since the last record" in said) == (stop in (3, 6))
    assert_same_run(reference, tmp_path)
    before = contents(tmp_path)
    said = run(method, folder, tmp_path)
    last = records(tmp_path)[-1]
    assert f"already. Its last epoch: epoch 2, loss {last['loss']}" in said
    assert f"knn20_top1 {last['knn20_top1']}" in said and contents(tmp_path) == before


@pytest.mark.parametrize("whole", ONE, indirect=True)
def test_first_and_last_words_of_a_short_run(whole, folder, tmp_path):
    """--max-steps 3, which everyone tries first, tells the first loss and the mean of all."""
    said = run(whole[0], folder, tmp_path, "--max-steps", "3")
    first = float(re.search(r"^step 1: loss ([\d.]+)$", said, re.M)[1])
    mean = float(re.search(r"mean loss since the last record: ([\d.]+)", said)[1])
    log = load(tmp_path / "last.pt")["log"]
    assert first > 0 and mean == pytest.approx(log["sums"][0][log["names"].index("loss")].item() / 3, abs=1e-4)


@pytest.mark.parametrize("whole", ONE, indirect=True)
def test_stopped_by_a_signal_in_training(whole, folder, tmp_path, monkeypatch):
    """After the step at hand, with exit status 75; a scheduler and torchrun may both send it at about the same time."""
    method, reference, _ = whole
    make, made = common.ViewDataset.__getitems__, []
    requests = {3: [signal.SIGTERM], 6: [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]}

    def signalled(self, keys):
        made.append(keys)
        for number in requests.get(len(made), ()):
            os.kill(os.getpid(), number)
        return make(self, keys)

    monkeypatch.setattr(common.ViewDataset, "__getitems__", signalled)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "said.json"))  # what torchrun's report ends with
    for step in requests:
        stopped(75, method, folder, tmp_path / "run")
        said = json.loads((tmp_path / "said.json").read_text())["message"]
        assert said["message"].startswith(f"stopped at step {step} of 8 on request (exit status 75)")
        assert abs(time.time() - int(said["extraInfo"]["timestamp"])) < 60
        assert load(tmp_path / "run" / "last.pt")["step"] == step
    monkeypatch.undo()
    run(method, folder, tmp_path / "run")
    assert_same_run(reference, tmp_path / "run")


class Killed(BaseException):
    """Stands for SIGKILL, where a process of its own would take seconds."""


ENDS = [(m, 1, "kill") for m in METHODS] + [
    (m, *end) for m in ONE for end in ((1, "request"), (2, "kill"), (2, "request"))
]


@pytest.mark.parametrize("whole, epoch, end", ENDS, indirect=["whole"])
def test_ended_in_an_evaluation(whole, folder, tmp_path, monkeypatch, epoch, end):
    """The epoch is saved before; the next call writes its record, with kNN: the same run."""
    method, reference, _ = whole
    judge, calls = common.knn_accuracy, []

    def struck(*args, **kwargs):
        calls.append(0)
        if len(calls) == epoch:
            if end == "kill":
                raise Killed
            os.kill(os.getpid(), signal.SIGINT)  # SIGTERM ends the process where it is: a slow test
            time.sleep(1)
            pytest.fail("the request was not answered at once")
        return judge(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises((Killed, SystemExit)) as stop:
        patch.setattr(common, "knn_accuracy", struck)
        run(method, folder, tmp_path)
    assert end == "kill" or stop.value.code == 75
    state = load(tmp_path / "last.pt")
    assert state["step"] == epoch * STEPS == state["record"]["step"] and "knn20_top1" not in state["record"]
    assert [r["step"] for r in records(tmp_path)] == [0, STEPS, 2 * STEPS][:epoch]
    said = run(method, folder, tmp_path)
    assert f"going on at step {epoch * STEPS}" in said
    assert_same_run(reference, tmp_path)
    before = contents(tmp_path)
    assert "already" in run(method, folder, tmp_path) and contents(tmp_path) == before


@pytest.mark.parametrize("whole", ONE, indirect=True)
@pytest.mark.parametrize("epoch", [1, 2])
def test_asked_to_stop_in_the_last_step_before_an_evaluation(whole, folder, tmp_path, monkeypatch, epoch):
    """Nothing is evaluated any more: exit status 75 also after the last step of all, whose record is still missing."""
    method, reference, _ = whole
    make, made = common.ViewDataset.__getitems__, []

    def signalled(self, keys):
        made.append(keys)
        if len(made) == epoch * STEPS:
            os.kill(os.getpid(), signal.SIGTERM)
        return make(self, keys)

    with monkeypatch.context() as patch:
        patch.setattr(common.ViewDataset, "__getitems__", signalled)
        stopped(75, method, folder, tmp_path)
    assert [r["step"] for r in records(tmp_path)] == [0, STEPS][:epoch]
    run(method, folder, tmp_path)
    assert_same_run(reference, tmp_path)


@pytest.mark.parametrize("whole", ONE, indirect=True)
def test_saved_less_often_than_evaluated(whole, folder, tmp_path, monkeypatch):
    """An evaluation saves before it begins, whatever --save-every says; a record without its save is made again."""
    method, reference, _ = whole
    judge = common.knn_accuracy

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(common, "knn_accuracy", killed)
        run(method, folder, tmp_path / "a", "--save-every", "9")
    assert load(tmp_path / "a" / "last.pt")["step"] == STEPS
    run(method, folder, tmp_path / "a", "--save-every", "9")
    assert_same_run(reference, tmp_path / "a")
    with monkeypatch.context() as patch, pytest.raises(Killed):  # kNN at the end only: the first epoch is not saved
        patch.setattr(common, "knn_accuracy", killed)
        patch.setattr(common.Run, "save", lambda *_, **__: (_ for _ in ()).throw(Killed))
        run(method, folder, tmp_path / "b", "--save-every", "9", "--knn-every", "9")
    assert [r["step"] for r in records(tmp_path / "b")] == [0, STEPS] and not (tmp_path / "b" / "last.pt").exists()
    said = run(method, folder, tmp_path / "b", "--save-every", "9", "--knn-every", "9")
    assert [r["step"] for r in records(tmp_path / "b")] == [0, STEPS, 2 * STEPS] and "going on" not in said
    assert judge is common.knn_accuracy and not (tmp_path / "b" / "last.prev.pt").exists()


@pytest.mark.parametrize("whole", ONE, indirect=True)
def test_damaged_checkpoint(whole, folder, tmp_path):
    """last.pt cut short, then gone: the run goes on from last.prev.pt, in words, and ends the same."""
    method, reference, _ = whole
    run(method, folder, tmp_path, "--max-steps", "6")
    assert load(tmp_path / "last.prev.pt")["step"] == STEPS
    os.truncate(tmp_path / "last.pt", (tmp_path / "last.pt").stat().st_size // 2)
    said = run(method, folder, tmp_path, "--max-steps", "7")
    assert f"going on from {tmp_path / 'last.prev.pt'}" in said and "at step 4" in said
    steps = [load(tmp_path / name)["step"] for name in ("last.prev.pt", "last.pt")]
    assert steps == [4, 7]  # the damaged file is not kept
    (tmp_path / "last.pt").unlink()
    assert "going on at step 4" in run(method, folder, tmp_path)
    assert_same_run(reference, tmp_path)


@pytest.mark.parametrize("whole", ONE, indirect=True)
def test_resume_from_another_folder(whole, folder, tmp_path):
    """--resume PATH: the same weights; the same command again goes on in --out; an older file of the same run."""
    method, reference, _ = whole
    run(method, folder, tmp_path / "a", "--max-steps", "3")
    more = ["--resume", tmp_path / "a" / "last.pt"]
    run(method, folder, tmp_path / "b", *more, "--max-steps", "5")
    assert "going on at step 5" in run(method, folder, tmp_path / "b", *more)
    for name in ("model", "optimizer"):
        assert_equal(load(reference / "last.pt")[name], load(tmp_path / "b" / "last.pt")[name])
    assert [r["step"] for r in records(tmp_path / "b")] == [3, STEPS, 2 * STEPS]
    shutil.copytree(reference, tmp_path / "c")
    stopped(2, method, folder, tmp_path / "c", "--resume", tmp_path / "c" / "epoch-0001.pt")  # would overwrite last.pt
    assert_same_run(reference, tmp_path / "c")
    run(method, folder, tmp_path / "d", "--resume", tmp_path / "c" / "epoch-0001.pt")  # another folder's record
    assert [r["step"] for r in records(tmp_path / "d")] == [STEPS, 2 * STEPS]


@pytest.mark.parametrize("method", METHODS)
def test_loss_that_is_no_number(method, folder, tmp_path, monkeypatch, capsys):
    """The run stops in words before the epoch's end; its files are intact, and good to go on from."""
    flags, colour, batches, make = ["--batch-size", "6"], common.colour, [], common.ViewDataset.__getitems__
    run(method, folder, tmp_path, *flags, "--max-steps", "11")
    before = {path: content for path, content in contents(tmp_path).items() if path.suffix == ".pt"}
    with monkeypatch.context() as patch:
        patch.setattr(common, "colour", lambda x, parameters: colour(x, parameters) * float("nan"))
        patch.setattr(common.ViewDataset, "__getitems__", lambda self, keys: batches.append(0) or make(self, keys))
        stopped(2, method, folder, tmp_path, *flags)
    error = capsys.readouterr().err
    assert "not finite" in error and len(error.splitlines()) == 1
    assert before.items() <= contents(tmp_path).items() and len(batches) <= 11
    assert "going on" in run(method, folder, tmp_path, *flags, "--max-steps", "12")


@pytest.mark.parametrize("whole", ONE, indirect=True)
def test_a_gradient_that_jumps_is_told(whole, folder, tmp_path, monkeypatch):
    module = importlib.import_module(whole[0])
    norm, calls = module.gradient_norm, []
    monkeypatch.setattr(
        module, "gradient_norm", lambda model: norm(model) * (1e4 if calls.append(0) or len(calls) == 25 else 1)
    )
    flags = ["--batch-size", "2", "--knn-every", "0", "--epochs", "1"]
    assert run(whole[0], folder, tmp_path / "a", *flags).count("before step 30 the gradient's norm has jumped") == 1
    monkeypatch.setattr(module, "gradient_norm", norm)
    assert "warning" not in run(whole[0], folder, tmp_path / "b", *flags)


@pytest.mark.parametrize("method", ONE)
def test_embeddings_that_have_collapsed_are_told(method, folder, tmp_path, monkeypatch):
    """From the third epoch on."""
    health, flags = common.embedding_health, "--epochs 3 --batch-size 34 --knn-every 0".split()
    assert "collapsed" not in run(method, folder, tmp_path / "a", *flags)
    monkeypatch.setattr(common, "embedding_health", lambda q, k: health(q, k) | {"std": 0.05})
    said = run(method, folder, tmp_path / "b", *flags)
    assert said.count("the embeddings have collapsed") == 1 and said.index("epoch 3/3") < said.index("collapsed")


def watched(method, monkeypatch):
    """A list that gets the model of each later run, as `in_parallel` has prepared it."""
    module, models = importlib.import_module(method), []
    prepare = module.in_parallel
    monkeypatch.setattr(module, "in_parallel", lambda args, model: models.append(model) or prepare(args, model))
    return models


@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing_changes_nothing(method, folder, tmp_path, monkeypatch):
    """Of a ViT: where there is no batch norm, weights are equal bit for bit, drop-path included."""
    models = watched(method, monkeypatch)
    for name, flags in (("usual", []), ("again", ["--grad-checkpoint"])):
        run(method, folder, tmp_path / name, *flags, "--max-steps", "2")
    assert [model.backbone.grad_checkpointing for model in models] == [False, True]
    assert_equal(*(load(tmp_path / name / "last.pt")["model"] for name in ("usual", "again")))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_encoder_is_the_same_one(method, folder, tmp_path, monkeypatch):
    """Its weights have the usual names in both files. Here without the compiler's own code."""
    compile, models = torch.compile, watched(method, monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda module, **_: compile(module, backend="eager"))
    for name, flags in (("usual", []), ("compiled", ["--compile"])):
        run(method, folder, tmp_path / name, *flags, "--max-steps", "2")
    assert [model.backbone._compiled_call_impl is not None for model in models] == [False, True]
    for file in ("last.pt", "backbone.pt"):
        usual, compiled = (load(tmp_path / name / file) for name in ("usual", "compiled"))
        key = "model" if file == "last.pt" else "state_dict"
        assert usual[key].keys() == compiled[key].keys()
        for name, value in usual[key].items():
            torch.testing.assert_close(value, compiled[key][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method, arch", [(m, "vit_micro") for m in METHODS] + [(m, "resnet_nano") for m in ONE])
def test_bf16_is_for_the_networks_only(method, arch, folder, tmp_path, monkeypatch):
    """Embeddings, losses, statistics and weights stay in float32, and the loss is about that of a run without bf16."""
    seen, losses, count = [], {}, common.Run.count

    def watch(self, step, metrics):
        seen.extend(v.dtype for v in metrics.values() if torch.is_tensor(v))
        losses.setdefault(amp, metrics["loss"].item())
        count(self, step, metrics)

    monkeypatch.setattr(common.Run, "count", watch)
    flags = ["--arch", arch, "--image-size", "32", "--max-steps", "2"]
    for amp in ("bf16", "off"):
        run(method, folder, tmp_path / amp, *flags, "--amp", amp)
    if arch == "resnet_nano":  # where torch's gradients are wrong, it is refused
        stopped(2, method, folder, tmp_path / "small", *flags, "--image-size", "16", "--amp", "bf16")
    state = load(tmp_path / "bf16" / "last.pt")["model"]
    assert set(seen) == {torch.float32} == {v.dtype for v in state.values() if v.is_floating_point()}
    assert losses["bf16"] != losses["off"] and abs(losses["bf16"] / losses["off"] - 1) < 0.02


# ------------------------------------------------------------------ own images


class Own(torch.utils.data.Dataset):
    """A user's Dataset: `make` of each image, with a label or alone; counts what is decoded."""

    def __init__(self, count, make, labelled, seed=0):
        self.images, self.labels = common.make_patterns(count, 20, seed)
        self.make, self.labelled, self.decoded = make, labelled, []

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        self.decoded.append(i)
        image = self.make(self.images[i])
        return (image, int(self.labels[i])) if self.labelled else image


KINDS = {  # of items, with and without labels
    "PIL": (Image.fromarray, True),
    "gray PIL, alone": (lambda x: Image.fromarray(x).convert("L"), False),
    "array": (lambda x: x, False),
    "gray array": (lambda x: x[:, :, 0], True),
    "tensor": (lambda x: torch.from_numpy(x).permute(2, 0, 1), True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_own_images_are_what_the_dataset_gives(kind):
    make, labelled = KINDS[kind]
    data = Own(30, make, labelled)
    images = common.OwnImages(data, labelled)
    expected = data.images
    if "gray" in kind:
        gray = [np.asarray(make(x)) for x in data.images]
        expected = np.stack(gray)[..., None].repeat(3, 3)
    assert images.labels.tolist() == [-1] * 30 and not data.decoded
    assert [images.item(i)[1] for i in range(30)] == (data.labels.tolist() if labelled else [-1] * 30)
    data.decoded.clear()
    part = images.subset(np.array([4, 9, 2, 9]))
    for source, rows in ((images, range(30)), (part, (4, 9, 2, 9))):
        assert all(np.array_equal(source[i], expected[row]) for i, row in enumerate(rows))
    assert data.decoded == [*range(30), 4, 9, 2, 9]


class OwnEncoder(nn.Sequential):
    def __init__(self):
        torch.manual_seed(3)
        super().__init__(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self[1].bias.requires_grad_(False)  # a user may freeze what is to stay


@pytest.mark.parametrize("method", [m for m in METHODS if m != "patchmix"])
def test_own_data_and_encoder(method, tmp_path, monkeypatch, capsys):
    """main(args, train=..., test=..., encoder=...): trains, is judged on nothing else, resumes bit for bit, is kept."""
    monkeypatch.chdir(tmp_path)
    data, test = (Own(n, Image.fromarray, True, seed=n) for n in (68, 24))
    flags = ["--dataset", "folder", "--batch-size", "16", *(["--queue", "32"] if method != "patchmix" else [])]
    module = importlib.import_module(method)
    args = module.parse_args([*TINY, *flags])
    given = OwnEncoder()
    given[2].eval()
    module.main(args, train=data, test=test, encoder=given)
    fresh = OwnEncoder()
    assert repr(given) == repr(fresh)  # the object that was given is as it was: modules, state, training modes
    assert_equal(dict(given.state_dict()), dict(fresh.state_dict()))
    assert [m.training for m in given.modules()] == [m is not given[2] for m in given.modules()]
    assert all(p.grad is None for p in given.parameters())
    (out,) = (tmp_path / "runs").iterdir()
    assert out.name.startswith(f"{method}-own-own-s0") and "data own: 68 training images" in capsys.readouterr().out
    weights = load(out / "backbone.pt")
    encoder = OwnEncoder()
    encoder.load_state_dict(weights["state_dict"], strict=True)
    assert weights["stem"] == "own" and not torch.equal(encoder[0].weight, OwnEncoder()[0].weight)
    assert torch.equal(encoder[1].bias, OwnEncoder()[1].bias)
    assert all("knn20_top1" in r for r in records(out)[1:])
    for stop in ("3", "8"):
        run(method, None, tmp_path / "b", *flags, "--max-steps", stop, train=data, test=test, encoder=OwnEncoder())
    assert_same_run(out, tmp_path / "b")
    stopped(2, method, None, out, *flags, train=Own(70, Image.fromarray, True), test=test, encoder=OwnEncoder())
    assert "other images (68 images, now 70" in capsys.readouterr().err


@pytest.mark.parametrize("method", [m for m in METHODS if m in ("jcl", "logo")])
def test_an_own_encoder_may_leave_parameters_unused(method, tmp_path, monkeypatch):
    """Under DDP, here of one process, too."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(common, "rendezvous", lambda _: iter([(dist.HashStore(), 0, 1)]))
    encoder = OwnEncoder()
    encoder[0].unused = nn.Parameter(torch.ones(3))
    options = dict(train=Own(68, Image.fromarray, True), encoder=encoder)
    run(method, None, tmp_path, "--dataset", "folder", "--queue", "32", "--max-steps", "3", **options)
    assert load(tmp_path / "last.pt")["step"] == 3 and torch.equal(encoder[0].unused, torch.ones(3))


@pytest.mark.parametrize("method", METHODS)
def test_an_own_encoder_that_gives_maps_is_refused(method, tmp_path, capsys):
    """As a torchvision ResNet without its last layer does."""
    module, data = importlib.import_module(method), Own(68, Image.fromarray, False)
    args = module.parse_args([*TINY, "--out", str(tmp_path / "run")])
    maps = nn.Sequential(*list(OwnEncoder())[:-1])
    assert_one_line(lambda: module.main(args, data, encoder=maps), capsys, "gives (1, 8, 1, 1) for one image")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ONE)
def test_an_own_encoder_that_cannot_be_checkpointed_is_refused(method, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stopped(2, method, None, tmp_path / "a", "--dataset", "folder", "--grad-checkpoint", encoder=OwnEncoder())
    assert "--grad-checkpoint" in capsys.readouterr().err and not (tmp_path / "a").exists()


@pytest.mark.parametrize("method", ONE)
def test_own_data_is_decoded_once_for_a_batch_and_never_judged_elsewhere(method, tmp_path, capsys):
    data = Own(40, lambda x: x, False)
    flags = ["--dataset", "folder", "--batch-size", "16", "--queue", "32"]
    run(method, None, tmp_path / "a", *flags, train=data)
    trained = data.decoded
    assert len(trained) == 64 and len(set(trained[:32])) == len(set(trained[32:])) == 32
    assert not any("knn20_top1" in r for r in records(tmp_path / "a"))
    wrong = Own(40, lambda x: torch.from_numpy(x).permute(2, 0, 1) / 255, False)
    for workers in (0, 1):
        stopped(2, method, None, tmp_path / f"b{workers}", *flags, "--workers", workers, train=wrong)
        error = capsys.readouterr().err
        assert "found Tensor torch.float32" in error and error.count("\n") == 1, error


# ---------------------------------------------------------------------- kills


def child(function, log, *args):
    """Run a function in a process of its own, its output in the files LOG.out and LOG.err; returns the exit status."""
    process = CHILDREN.Process(target=_redirected, args=(function, str(log), *args))
    process.start()
    process.join()
    return process.exitcode


def _redirected(function, log, *args):
    for stream, suffix in ((sys.stdout, ".out"), (sys.stderr, ".err")):
        stream.flush()
        os.dup2(os.open(log + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    torch.set_num_threads(1)
    function(*args)


def life(method, argv, batch=None, signals=(), moment=None):
    """A run that gets signals while it makes a batch, or dies at a moment: the n-th batch, write, flush or renaming."""
    module, count, batches = importlib.import_module(method), 0, 0
    narrow(module, drop_path=0.2)

    def mortal(target, name):
        original = getattr(target, name)

        def wrapped(*args, **kwargs):
            nonlocal count, batches
            count += 1
            if count == moment:
                if name == "save":  # in the middle of a write
                    original(*args, **kwargs)
                    os.truncate(args[1], os.path.getsize(args[1]) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            batches += name == "__getitems__"
            for number in signals if name == "__getitems__" and batches == batch else ():
                os.kill(os.getpid(), number)
            return original(*args, **kwargs)

        setattr(target, name, wrapped)

    for target, name in ((common.ViewDataset, "__getitems__"), (torch, "save"), (os, "fsync"), (os, "replace")):
        mortal(target, name)
    mortal(common, "knn_judge")
    module.main(module.parse_args(argv))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [m for m in METHODS if m in ("jcl", "patchmix")], indirect=True)
def test_killed_again_and_again(whole, folder, tmp_path):
    """SIGKILL at random moments, writes, renamings and evaluations among them, until a life lasts: the same run."""
    method, reference, _ = whole
    out, chance, deaths = tmp_path / "run", random.Random(0), 0
    argv = [*TINY, "--data-dir", str(folder), "--out", str(out)]
    while status := child(life, tmp_path / "log", method, argv, None, (), chance.randint(1, 26)):
        assert status == -signal.SIGKILL, (tmp_path / "log.err").read_text()
        deaths += 1
    assert deaths >= 3
    assert_same_run(reference, out)


@pytest.mark.slow
@pytest.mark.parametrize("method", ONE)
def test_killed_while_the_folder_is_made(method, folder, tmp_path):
    """Whatever a run leaves behind before its first step, the same command starts it."""
    for moment in range(1, 7):
        argv = [*TINY, "--data-dir", str(folder), "--out", str(tmp_path / f"{moment}"), "--max-steps", "1"]
        assert child(life, tmp_path / "log", method, argv, None, (), moment) == -signal.SIGKILL
        assert child(life, tmp_path / "log", method, argv) == 0, (tmp_path / "log.err").read_text()
        assert load(tmp_path / f"{moment}" / "last.pt")["step"] == 1


def judged_slowly(method, ready, argv):
    """A run whose evaluation takes for ever, on the first process; where there are two, the second waits for it."""
    rank = int(os.environ.get("RANK", 0))
    module, accuracy = importlib.import_module(method), common.knn_accuracy
    narrow(module, drop_path=0.0)

    def slow(*args, **kwargs):
        open(f"{ready}{rank}", "w").close()
        while rank == 0:
            torch.zeros(200, 200) @ torch.zeros(200, 200)
        return accuracy(*args, **kwargs)

    common.knn_accuracy = slow
    module.main(module.parse_args(argv))


@pytest.mark.slow
@pytest.mark.parametrize("method", ONE)
@pytest.mark.parametrize("world", [1, 2])
def test_a_request_in_an_evaluation_is_answered_within_seconds(method, folder, tmp_path, world):
    """With loader workers; of two processes one computes and the other waits for it."""
    argv = [*TINY, "--data-dir", str(folder), "--out", str(tmp_path / "run"), "--workers", "2"]
    code = f"import test_runs; test_runs.judged_slowly({method!r}, {str(tmp_path / 'ready')!r}, {argv})"
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    group = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world)) if world > 1 else {}
    running = []
    for rank in range(world):
        with open(tmp_path / f"out{rank}", "w") as out, open(tmp_path / f"err{rank}", "w") as err:
            more = group | ({"RANK": str(rank)} if group else {})
            command = [sys.executable, "-c", code]
            running.append(subprocess.Popen(command, env=environment | more, stdout=out, stderr=err))
    until = time.monotonic() + 120
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(world)) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.5)
    asked = time.monotonic()
    for process in running:
        process.terminate()
    statuses = [process.wait(60) for process in running]
    errors = [(tmp_path / f"err{rank}").read_text() for rank in range(world)]
    assert statuses == [75] * world and errors == [""] * world, (statuses, errors)
    assert time.monotonic() - asked < 5
    assert "stopped on request (exit status 75) when all was saved" in (tmp_path / "out0").read_text()
    assert load(tmp_path / "run" / "last.pt")["step"] == STEPS


# -------------------------------------------------------------- two processes


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


NORMS = [(groups, shape, affine) for groups in (1, 4) for shape in ((8, 3), (8, 3, 2, 5)) for affine in (True, False)]
BOTH = [(*case, torch.float64) for case in NORMS] + [(groups, (8, 3, 2, 5), True, torch.bfloat16) for groups in (1, 4)]
RELATIVE = {torch.float32: 5e-4, torch.float64: 1e-9}  # by which two processes may differ from one


def batch_norm_case(groups, shape, affine):
    """(norm, input of uneven statistics, weights of a loss), in float64."""
    g = torch.Generator().manual_seed(shape[-1] + groups)
    x, weight = (torch.randn(shape, dtype=torch.float64, generator=g) for _ in range(2))
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    norm = nn.Sequential(kind(shape[1], affine=affine)).double()
    with_parameters = nn.ModuleList([norm, nn.Linear(1, 1)])
    if groups == 1:  # over all processes
        importlib.import_module("patchmix").synchronize_batch_norms(with_parameters)
    else:
        importlib.import_module("jcl").split_batch_norms(with_parameters, groups)
    for p in norm.parameters():
        nn.init.normal_(p, generator=g)
    rows = torch.arange(len(x)).view(-1, *[1] * (len(shape) - 1))
    return norm, x * (1 + rows) + rows, weight


def batch_norm_results(norm, x, weight):
    x = x.clone().requires_grad_()
    y = norm(x)
    gradients = torch.autograd.grad((y * weight).sum(), [x, *norm.parameters()])
    return [y.detach(), *gradients, norm[0].running_mean, norm[0].running_var]


def checkpointed_gradients(world, rank):
    """Of two layers with batch norm over all processes, whose forward pass is run again in the backward pass."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)]
    net = importlib.import_module("patchmix").synchronize_batch_norms(nn.Sequential(*layers))
    x, weight = torch.randn(8, 3, 8, 8), torch.randn(8, 5, 4, 4)
    x, weight = (v.chunk(world)[rank] for v in (x, weight))
    (torch.utils.checkpoint.checkpoint_sequential(net, 2, x, use_reentrant=False) * weight).sum().backward()
    return [p.grad for p in net.parameters()]


def exchanged(method, rank, world):
    """[(what exchange gave, what indexing all rows gives)]: permutations, repeats, nothing from the other process."""
    exchange, found = importlib.import_module(method).exchange, []
    rows = torch.arange(480.0).view(10, 3, 4, 4).contiguous(memory_format=torch.channels_last)  # as images are
    mine = rows.chunk(world)[rank]
    for seed in range(6):
        wanted = torch.randperm(10, generator=common.generator(seed))
        wanted = [wanted, wanted % 3, wanted.sort()[0], 9 - wanted.sort()[0], wanted // 5, wanted][seed].view(world, -1)
        found.append((exchange(mine, wanted), rows[wanted[rank]]))
    return found


def processes(index, port, folder, out):
    """Process 0 trains alone, 1 and 2 as a group: each method for an epoch in float32 and 64, and the collectives."""
    world, rank = (2, index - 1) if index else (1, 0)
    if index:
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank))
        dist.destroy_process_group = lambda: None  # one group for all that follows
    torch.set_num_threads(1)
    for method in METHODS:
        narrow(importlib.import_module(method), drop_path=0.0)
    for dtype, archs in ((torch.float32, ["vit_micro"]), (torch.float64, ["vit_micro", "resnet_nano"])):
        if dtype == torch.float64:
            torch.Tensor.float = torch.Tensor.double
            torch.set_default_dtype(dtype)
        for method in METHODS:
            module = importlib.import_module(method)
            for arch in archs:
                flags = ["--arch", arch, "--epochs", "1", *NEEDED.get(method, []), "--data-dir", str(folder)]
                module.main(module.parse_args([*TINY, *flags, "--out", f"{out}/{method}-{arch}-{dtype}-{world}"]))
    results, average = [], importlib.import_module("jcl").average_statistics
    for *case, dtype in BOTH:
        norm, x, weight = batch_norm_case(*case)
        norm.to(torch.promote_types(dtype, torch.float32))
        x, weight = (v.to(dtype).chunk(world)[rank] for v in (x, weight))
        if dtype == torch.bfloat16:  # as autocast has it, and channels_last
            x = x.to(memory_format=torch.channels_last)
        result = batch_norm_results(norm, x, weight)
        average(norm)
        results.append(result)
    torch.save(results, f"{out}/norms-{index}.pt")
    torch.save(checkpointed_gradients(world, rank), f"{out}/checkpointed-{index}.pt")
    torch.save([exchanged(m, rank, world) for m in METHODS if m != "patchmix"], f"{out}/exchanged-{index}.pt")


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("processes")
    given = (free_port(), str(folder), str(out))
    torch.multiprocessing.start_processes(processes, given, nprocs=3, start_method="forkserver")
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, dtype", [("vit_micro", torch.float32), ("vit_micro", torch.float64), ("resnet_nano", torch.float64)]
)
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one(trained, method, arch, dtype):
    """In float64 weights, statistics, queue, optimiser (so the gradients) and metrics after an epoch; else the loss."""
    one, two = (trained / f"{method}-{arch}-{dtype}-{world}" for world in (1, 2))
    (begin, first), (begun, second) = records(one), records(two)
    assert begin["chance"] == pytest.approx(begun["chance"], rel=1e-12)
    assert first["loss"] == pytest.approx(second["loss"], rel=RELATIVE[dtype])
    if dtype == torch.float32:
        return
    a, b = (tensors({k: load(out / "last.pt")[k] for k in ("model", "optimizer")}) for out in (one, two))
    assert a.keys() == b.keys() and any(v.dtype == torch.float64 for v in a.values() if torch.is_tensor(v))
    for name in a.keys() - {k for k in a if k.endswith("num_batches_tracked")}:  # in groups, nobody counts
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
    for name in first.keys() - set(TIMING):
        assert first[name] == pytest.approx(second[name], rel=1e-7 if name == "rank" else 1e-9, abs=1e-9), name


@pytest.mark.slow
def test_exchange_is_indexing_the_rows_of_all_processes(trained):
    for index in range(3):
        for cases in load(trained / f"exchanged-{index}.pt"):
            assert len(cases) == 6 and all(torch.equal(ours, rows) for ours, rows in cases)


@pytest.mark.slow
def test_batch_norm_over_processes(trained):
    alone, *parts = (load(trained / f"norms-{i}.pt") for i in range(3))
    for case, *dtype in zip(range(len(BOTH)), (b[-1] for b in BOTH), strict=True):
        half = dtype == [torch.bfloat16]
        for i, value in enumerate(alone[case]):
            first, second = (p[case][i] for p in parts)
            tolerance = 2e-2 if half else 1e-9
            if i < 2:  # the output and the input's gradient
                together = torch.cat([first, second])
            elif i >= len(alone[case]) - 2:  # running statistics, averaged; those of bfloat16 are taken in float32
                torch.testing.assert_close(first, second)
                together, tolerance = first, 1e-6 if half else 1e-9
            else:  # gradients of weight and bias add up
                together = first + second
            torch.testing.assert_close(together, value, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_checkpointing_with_batch_norm_over_processes(trained):
    alone, *parts = (load(trained / f"checkpointed-{i}.pt") for i in range(3))
    assert len(alone) == 8
    for value, *halves in zip(alone, *parts, strict=True):
        torch.testing.assert_close(sum(halves), value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("groups, shape, affine", [(2, (8, 3), True), *NORMS[4:]])
def test_batch_norm_is_one_for_each_slice(groups, shape, affine):
    norm, x, weight = batch_norm_case(groups, shape, affine)
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    slices = [nn.Sequential(kind(shape[1], affine=affine)).double() for _ in range(groups)]
    for one in slices:
        one.load_state_dict({k: v for k, v in norm.state_dict().items() if "after" not in k})
    ours = batch_norm_results(norm, x, weight)
    theirs = [batch_norm_results(*part) for part in zip(slices, x.chunk(groups), weight.chunk(groups), strict=True)]
    for i, value in enumerate(ours):
        join = torch.cat if i < 2 else (lambda v: sum(v) / groups) if i >= len(ours) - 2 else sum
        torch.testing.assert_close(value, join([t[i] for t in theirs]))
    norm.eval(), slices[0].eval()
    with torch.no_grad():
        slices[0][0].running_mean.copy_(norm[0].running_mean), slices[0][0].running_var.copy_(norm[0].running_var)
    torch.testing.assert_close(norm(x), slices[0](x))


def test_split_batch_norms_keeps_what_a_norm_is():
    module = importlib.import_module("jcl")
    layers = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-2, momentum=0.3), nn.Sequential(nn.BatchNorm2d(4))
    original = nn.Sequential(*layers)
    original(torch.randn(5, 3, 2, 2))
    before = original[1].running_mean.clone()
    grouped = module.split_batch_norms(original, 2)
    assert [type(m).__name__ for m in (grouped[1], grouped[2][0])] == ["GroupedBatchNorm"] * 2
    assert (grouped[1].eps, grouped[1].momentum) == (1e-2, 0.3)
    assert before.abs().sum() > 0 and torch.equal(before, grouped[1].running_mean)


@pytest.mark.parametrize("arch", ["resnet10t", "mobilenetv3_small_050", "convnext_atto"])
def test_any_timm_model(arch, folder, tmp_path):
    """Other stems, norms that hold an activation, layers after the pooling: grouped norms change nothing, it trains."""
    method = (ONE or METHODS)[0]
    model = common.build_backbone(common.backbone_info(arch, 32, 16)).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(importlib.import_module(method).split_batch_norms(model, 2)(x), expected)
    flags = ["--arch", arch, "--image-size", "32", "--max-steps", "1"]
    assert "stopped at step 1" in run(method, folder, tmp_path, *flags)


@pytest.mark.parametrize("method", ONE)
@pytest.mark.parametrize(
    "world, batch, asked, given", [(1, 16, 2, 2), (1, 6, 4, 3), (2, 16, 3, 2), (3, 6, 2, 3), (1, 3, 2, 1)]
)
def test_batch_norm_groups_follow_the_batch_and_the_processes(method, monkeypatch, capsys, world, batch, asked, given):
    module = importlib.import_module(method)
    args = module.parse_args([*TINY, "--batch-size", str(batch)])
    args.bn_groups = asked
    monkeypatch.setattr(common, "rank_and_world", lambda: (0, world))
    assert module.batch_norm_groups(args) == given
    said = capsys.readouterr().out
    assert said.count("\n") == (asked != given) and (asked == given or f"groups: {given} instead of {asked}" in said)
    typed = module.parse_args([*TINY, "--batch-size", str(batch), "--bn-groups", str(asked)])
    if asked == given:
        assert module.batch_norm_groups(typed) == given
    else:
        assert_one_line(lambda: module.batch_norm_groups(typed), capsys, f"give {given}")


# ------------------------------------------------------------- files and words


def check_backbone_file(out, folder, stem, knn_epochs):
    """timm alone rebuilds the encoder from backbone.pt, strictly; it is the one whose kNN the run reports."""
    saved = load(out / "backbone.pt")
    encoder = timm.create_model(saved["timm_name"], **saved["create_kwargs"])
    assert saved["stem"] == stem
    if stem == "3x3":
        encoder.conv1 = nn.Conv2d(3, encoder.conv1.out_channels, 3, padding=1, bias=False)
        encoder.maxpool = nn.Identity()
    encoder.load_state_dict(saved["state_dict"], strict=True)
    images = [common.load_images("folder", folder, train) for train in (True, False)]
    found = common.knn_accuracy(encoder, *images, saved, torch.device("cpu"))[20]
    assert records(out)[-1]["knn20_top1"] == pytest.approx(found)
    assert [r["epoch"] for r in records(out)[1:] if "knn20_top1" in r] == knn_epochs


def test_backbone_file(whole, folder):
    check_backbone_file(whole[1], folder, "timm", [1, 2])


@pytest.mark.parametrize("method", ONE)
def test_backbone_file_of_a_resnet(method, folder, tmp_path):
    run(method, folder, tmp_path, "--arch", "resnet_nano", "--knn-every", "10")
    check_backbone_file(tmp_path, folder, "3x3", [2])  # the last epoch always has kNN


def test_run_folder(whole):
    method, out, _ = whole
    names = {"config.json", "metrics.jsonl", "last.pt", "last.prev.pt", "backbone.pt", "epoch-0001.pt", "epoch-0002.pt"}
    assert {p.name for p in out.iterdir()} - {"lock"} == names
    config = json.loads((out / "config.json").read_text())
    assert (config["method"], config["arch"], config["epochs"]) == (method, "vit_micro", 2)
    steps = {p.stem: load(p)["step"] for p in out.glob("*.pt") if p.stem != "backbone"}
    assert steps == {"last": 8, "last.prev": 4, "epoch-0001": 4, "epoch-0002": 8}
    first, *epochs = records(out)
    assert first["torch"] == torch.__version__ and first["timm"] == timm.__version__ and "CPU" in first["device"]
    assert {"python", "torchvision", "numpy", "commit"} <= first.keys()
    assert first["arguments"] == config and first["step"] == 0
    names = "loss lr momentum images_per_s data_wait grad_norm std rank alignment uniformity knn20_top1".split()
    for i, r in enumerate(epochs):
        assert (r["epoch"], r["step"]) == (i + 1, STEPS * (i + 1))
        assert all(np.isfinite(r[name]) for name in names)
        assert r["below_chance"] == pytest.approx(first["chance"] - r["loss"])
        assert 0 <= r["data_wait"] <= 1 and r["images_per_s"] > 0 and r["grad_norm"] > 0 and r["lr"] > 0
        assert 0 < r["std"] < 1.1 and 1 <= r["rank"] <= 64 and r["alignment"] > 0 and r["uniformity"] < 0


def test_what_a_run_says(whole):
    method, out, said = whole
    first = records(out)[0]
    words = "68 training images, 32 test images, 4 classes, vit_micro, batch 16 over 1 process, 4 steps per epoch, "
    words += f"rate , weight decay, batch-norm groups, torch {torch.__version__}, evaluated: the "
    assert [w for w in words.split(", ") if w not in said] == []
    assert f"chance level of the loss {first['chance']:.3f}" in said
    for epoch in (1, 2):
        (line,) = (x for x in said.splitlines() if x.startswith(f"epoch {epoch}/2"))
        assert all(name in line for name in ("loss ", "below chance", "images/s", "std ", "knn20_top1 ")), line
        assert len(line) <= 120


@pytest.mark.parametrize("method", METHODS)
def test_show_views(method, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(method)
    module.main(module.parse_args([*TINY, "--data-dir", str(folder), "--show-views", "views.png"]))
    assert [p.name for p in tmp_path.iterdir()] == ["views.png"]
    with Image.open("views.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 100 and np.asarray(picture).std() > 10


@pytest.mark.parametrize("method", ONE)
def test_tensorboard(method, folder, tmp_path):
    pytest.importorskip("tensorboard")
    run(method, folder, tmp_path, "--tensorboard")
    assert len(list(tmp_path.glob("events*"))) >= 1


def import_scripts(folder):
    os.chdir(folder)
    for script in SCRIPTS:
        importlib.import_module(script)


@pytest.mark.parametrize("method", METHODS)
def test_the_schedule_keeps_its_shape(method):
    """Another batch or rate scales the rate of every step, that of the last one, too."""
    module = importlib.import_module(method)
    usual = module.parse_args(["--dataset", "cifar10"])

    def rates(*flags):
        args = module.parse_args(["--dataset", "cifar10", *flags])
        return np.array([module.schedule(args, step, 1)[0] for step in range(args.epochs + 1)])

    assert rates("--batch-size", str(usual.batch_size // 16)) == pytest.approx(rates() / 16)
    assert rates("--lr", "1e-3") == pytest.approx(rates() * 1e-3 / usual.lr)


@pytest.mark.slow
def test_importing_runs_nothing(tmp_path):
    (tmp_path / "here").mkdir()
    assert child(import_scripts, tmp_path / "log", str(tmp_path / "here")) == 0
    assert not contents(tmp_path / "here") and {(tmp_path / f"log.{s}").read_text() for s in ("out", "err")} == {""}


@pytest.mark.parametrize("method", ONE)
def test_nothing_that_is_written_shows_up_in_git(method, tmp_path, monkeypatch):
    """A run with the default --out, downloaded data, and what the tests leave."""
    git = shutil.which("git") or pytest.skip("no git here")
    shutil.copy(ROOT / ".gitignore", tmp_path)
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(method)
    module.main(module.parse_args([*TINY, "--max-steps", "1"]))
    for path in ("data/cifar10.tar.gz", "tests/__pycache__/a.pyc", ".pytest_cache/v", ".ruff_cache/x", ".venv/x"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    subprocess.run([git, "init", "-q"], check=True)
    status = subprocess.run([git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    assert status == "?? .gitignore\n" and (tmp_path / "runs").is_dir()


# -------------------------------------------------------------------- mistakes


def assert_one_line(call, capsys, words):
    with pytest.raises(SystemExit) as stop:
        call()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and len(error.splitlines()) == 1 and words in error, error


MISTAKES = [  # flags, in a folder that has: data/ (good), empty/, hollow/ (a class without images), notes.txt, busy/
    ("--dataset nothing", "nothing"),
    ("--arch nothing", "nothing"),
    ("--nothing", "--nothing"),
    ("--patch-size 5", "--patch-size 5"),
    ("--batch-size 128", "68 images are fewer"),
    ("--dataset folder --data-dir missing --batch-size 64 --patch-size 4", "missing"),
    ("--dataset imagenet --data-dir missing --batch-size 64 --patch-size 4", "missing"),
    ("--dataset folder --data-dir empty --batch-size 64 --patch-size 4", "empty"),
    ("--data-dir hollow", "hollow"),
    ("--data-dir notes.txt", "notes.txt"),
    ("--resume missing.pt", "missing.pt"),
    ("--resume notes.txt", "notes.txt"),
    ("--out busy", "busy"),
    ("--out notes.txt", "notes.txt"),
    ("--device cuda", "cuda"),
]


@pytest.fixture
def place(folder, tmp_path, monkeypatch):
    """A working folder with good and bad things in it."""
    for name in ("empty", "hollow/train/a", "hollow/test/a", "busy"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("notes.txt", "busy/notes.txt"):
        (tmp_path / name).write_text("not a checkpoint")
    (tmp_path / "data").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


@pytest.mark.parametrize("method", METHODS)
def test_mistakes(method, place, capsys):
    """Each is one line and status 2, before anything is written."""
    before = contents(place)
    for flags, words in MISTAKES:
        assert_one_line(lambda flags=flags: run(method, "data", "run", *flags.split()), capsys, words)
        assert contents(place) == before and not (place / "run").exists()


@pytest.mark.parametrize("method", METHODS)
def test_batch_that_processes_cannot_share(method, place, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert_one_line(lambda: run(method, "data", "run"), capsys, "3 processes")


@pytest.mark.parametrize("method", ONE)
def test_no_network(method, place, capsys, monkeypatch):
    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    assert_one_line(lambda: run(method, "empty", "run", "--dataset", "cifar10"), capsys, "no route to host")
    assert not (place / "run").exists()


def test_mistakes_in_going_on(whole, folder, tmp_path, capsys):
    """Another method's, encoder's or data set's checkpoint; another configuration; a folder in use; damaged files."""
    method, reference, _ = whole
    last = str(reference / "last.pt")
    state = load(last)
    torch.save(state | {"config": state["config"] | {"method": "another"}}, tmp_path / "another.pt")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "weights.pt")
    shutil.copytree(reference, tmp_path / "damaged")
    for name in ("last.pt", "last.prev.pt"):
        os.truncate(tmp_path / "damaged" / name, 1000)
    before, new = contents(tmp_path), tmp_path / "new"
    for out, flags, words in (
        (new, ["--resume", last, "--arch", "resnet_micro"], "resnet_micro"),
        (new, ["--resume", last, "--image-size", "32"], "image_size"),
        (new, ["--resume", str(tmp_path / "another.pt")], "another"),
        (new, ["--resume", str(tmp_path / "weights.pt")], "weights.pt"),
        (reference, ["--lr", "0.123"], "lr was"),
        (reference, ["--resume", "none"], "not empty"),
        (tmp_path / "damaged", [], "damaged"),
    ):
        assert_one_line(lambda out=out, flags=flags: run(method, folder, out, *flags), capsys, words)
        assert contents(tmp_path) == before


@pytest.mark.parametrize("whole", ONE, indirect=True)
def test_other_images_are_refused_even_if_they_are_as_many(whole, folder, tmp_path, capsys):
    """Also where the run is finished. The error says what to do, in a cross-validation, too."""
    method, reference, _ = whole
    shutil.copytree(folder, tmp_path / "data")
    path = sorted((tmp_path / "data" / "train").rglob("*.png"))[7]
    path.rename(path.with_name("other.png"))
    before = contents(reference)
    assert_one_line(lambda: run(method, tmp_path / "data", reference), capsys, "was trained on other images")
    assert contents(reference) == before
    shutil.copytree(reference, tmp_path / "moved")
    shutil.copytree(folder, tmp_path / "copy")  # the same files in another place are the same images
    assert "already" in run(method, tmp_path / "copy", tmp_path / "moved")


@pytest.mark.parametrize("whole", ONE, indirect=True)
def test_what_differs_is_said_in_a_few_words(whole, folder, capsys):
    method, reference, _ = whole
    for flags, words in (
        (["--image-size", "24"], "(image_size was 16, is 24)"),
        (["--min-lr", "0.00001"], "min_lr was 0, is 1e-05"),
        (["--jitter", "0.4", "0.4", "0.4", "0.2"], "(jitter was 0.4 0.4 0.4 0.1, is 0.4 0.4 0.4 0.2)"),
    ):
        with pytest.raises(SystemExit):
            run(method, folder, reference, *flags)
        line = capsys.readouterr().err
        assert words in line and len(line) < 150 + len(str(reference)), line


@pytest.mark.parametrize("method", ONE)
def test_a_folder_without_a_checkpoint_is_taken_over(method, folder, tmp_path, monkeypatch):
    """A first run may lack the memory; the next one has a smaller batch."""

    def too_little_memory(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(importlib.import_module(method), "gradient_norm", too_little_memory)
        patch.setattr(importlib.import_module(method), "batch_norm_groups", lambda args: 8)
        run(method, folder, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["bn_groups"] == 8 and not list(tmp_path.glob("*.pt"))
    said = run(method, folder, tmp_path, "--batch-size", "8", "--max-steps", "1")
    assert "is taken over" in said and "batch_size was 16, is 8" in said
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["batch_size"] == 8 and config["bn_groups"] == 2  # the recipe's groups, not the failed run's
    assert [r["step"] for r in records(tmp_path)] == [0]


def hold(folder, ready, end):
    lock = common.lock_folder(folder)
    ready.set()
    end.wait(60)
    lock.close()


@pytest.mark.skipif(common.fcntl is None, reason="no such locks here")
@pytest.mark.parametrize("method", ONE)
def test_two_runs_at_once_in_one_folder(method, folder, tmp_path, capsys):
    fork = torch.multiprocessing.get_context("fork")  # the fastest; the child only locks and waits
    ready, end = fork.Event(), fork.Event()
    other = fork.Process(target=hold, args=(tmp_path, ready, end))
    other.start()
    assert ready.wait(60)
    before = contents(tmp_path)
    assert_one_line(lambda: run(method, folder, tmp_path, "--max-steps", "1"), capsys, "another run is at work")
    assert contents(tmp_path) == before
    other.kill()  # the lock ends with the process, however it ends
    other.join()
    assert "stopped at step 1" in run(method, folder, tmp_path, "--max-steps", "1")


@pytest.mark.skipif(common.fcntl is None, reason="no such locks here")
def test_a_lock_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "lock").mkdir()  # as good as another user's file, which the superuser could write
    assert_one_line(lambda: common.lock_folder(tmp_path), capsys, f"cannot write {tmp_path / 'lock'}")


@pytest.mark.parametrize("method, name", [("jcl", "bn_groups"), ("patchmix", "mix_slices")])
def test_what_the_processes_may_decide_goes_on_as_it_began(method, name, folder, tmp_path, capsys, monkeypatch):
    """A run with four goes on with four where nothing else is typed, as one of four processes would; three cannot."""
    module, flag = importlib.import_module(method), common.option(name)
    run(method, folder, tmp_path, flag, "4", "--max-steps", "3")
    run(method, folder, tmp_path, "--max-steps", "5")
    assert json.loads((tmp_path / "config.json").read_text())[name] == 4
    assert_one_line(lambda: run(method, folder, tmp_path, flag, "2"), capsys, f"{name} was 4, is 2")
    monkeypatch.setattr(common, "rank_and_world", lambda: (0, 3))
    args = module.parse_args([*TINY, "--out", str(tmp_path)])
    words = f"{flag} 4, which 3 processes do not divide"
    assert_one_line(lambda: common.settle(args, torch.device("cpu")), capsys, words)


@pytest.mark.parametrize("method", ONE)
def test_a_run_in_a_thread(method, folder, tmp_path):
    said = []
    thread = threading.Thread(target=lambda: said.append(run(method, folder, tmp_path, "--max-steps", "1")))
    thread.start()
    thread.join()
    assert len(said) == 1 and "stopped at step 1" in said[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_raises_puts_signal_handlers_back(method, folder, tmp_path, monkeypatch):
    def broken(*_):
        found.extend(signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT))
        raise ZeroDivisionError

    found, before = [], [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(importlib.import_module(method), "gradient_norm", broken)
    with pytest.raises(ZeroDivisionError):
        run(method, folder, tmp_path)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert len(found) == 2 and not set(found) & set(before)


def as_script(script, argv):
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_ends_with_status_2(script, tmp_path):
    argv = ["--dataset", "folder", "--data-dir", str(tmp_path / "missing")]
    argv += [] if script in METHODS else ["--arch", "vit_micro", "--random-init"]
    assert child(as_script, tmp_path / "log", str(ROOT / f"{script}.py"), argv) == 2
    error = (tmp_path / "log.err").read_text()
    assert error.startswith("error: ") and len(error.splitlines()) == 1 and "missing" in error


@pytest.mark.parametrize("package", ["torch", "torchvision", "timm"])
def test_packages_that_are_too_old_are_one_line(package, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules[package], "__version__", "0.9.1")
    assert_one_line(lambda: runpy.run_path(str(ROOT / "common.py")), capsys, f"{package} 0.9.1 is too old")


# -------------------------------------------------------------------- torchrun


def torchrun(argv, log, ask=False):
    """(exit status, everything on the screen) of a run on two processes, asked to stop once it trains."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        command = [*launch, str(ROOT / "jcl.py"), *TINY, *map(str, argv)]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        while ask and process.poll() is None and "step 1:" not in log.read_text():
            time.sleep(0.1)
        if ask:
            process.terminate()
        return process.wait(200), log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not ONE, reason="jcl.py is not here")
def test_torchrun_tells_a_mistake_and_a_request(folder, tmp_path):
    """Our line stands in torchrun's own report, where the reader looks: at its end."""
    status, screen = torchrun(["--dataset", "folder", "--data-dir", "missing"], tmp_path / "mistake")
    last = screen.strip().splitlines()[-2]
    assert status == 1 and last.split(": ", 1)[1].startswith("error: --data-dir missing does not exist")
    assert screen.splitlines()[0].startswith("error: ")
    argv = ["--batch-size", "16", "--epochs", "500", "--knn-every", "0", "--out", tmp_path / "run"]
    status, screen = torchrun(argv, tmp_path / "request", ask=True)
    step = load(tmp_path / "run" / "last.pt")["step"]
    assert status == 1 and screen.count(f"stopped at step {step} of") == 1
