"""Whole runs of every method: stopped, killed and continued; on two processes; the files, the words and the mistakes."""

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
import sys
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

EVALUATIONS = ["eval_knn", "eval_linear"]
KILLED = [m for m in METHODS if m in ("moco_jointcrop", "patchmix")]
TINY = "--dataset patterns --arch vit_micro --image-size 16 --patch-size 8 --batch-size 16 --epochs 2 --knn-every 1".split()
STEPS = 4  # an epoch: 68 images in batches of 16
TIMING = ("images_per_s", "data_wait")
NEEDED = {"patchmix": ["--mix-slices", "2"]}  # what a method needs to be the same on two processes
CHILDREN = torch.multiprocessing.get_context("forkserver")  # each child is a clean process, without importing torch again
CHILDREN.set_forkserver_preload(["torch", "torchvision", "timm"])


def narrow(module, drop_path):
    """Small heads, and a small ResNet with the 3 x 3 stem, for speed."""
    common.ARCHS["resnet_nano"] = ("resnet18", dict(layers=(1, 1, 1, 1), channels=(8, 16, 32, 64)))
    recipe = module.RECIPES["patterns"]
    recipe |= {k: v for k, v in dict(hidden=32, dim=16, drop_path=drop_path).items() if k in recipe}


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


def run(method, folder, out, *flags):
    """A run in this process; returns what it prints."""
    module, said = importlib.import_module(method), io.StringIO()
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(said):
            module.main(module.parse_args([*TINY, "--data-dir", str(folder), "--out", str(out), *flags]))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return said.getvalue()


@pytest.fixture(scope="module", params=METHODS)
def whole(request, tmp_path_factory, folder):
    """(method, folder of its undisturbed run of two epochs, what that run printed)."""
    out = tmp_path_factory.mktemp(request.param) / "whole"
    return request.param, out, run(request.param, folder, out, "--keep-every", "1")


def load(path):
    return torch.load(path, weights_only=True)


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
    """Bit for bit: weights, optimiser, counters, metrics. The first record, of the machine and the flags, is left out."""
    assert_equal(*({k: v for k, v in load(out / "last.pt").items() if k != "config"} for out in (one, two)))
    first, second = ([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (one, two))
    assert [r["step"] for r in first] == [r["step"] for r in second] == [0, STEPS, 2 * STEPS]
    for r, s in zip(first[1:], second[1:], strict=True):
        assert {k: v for k, v in r.items() if k not in TIMING} == {k: v for k, v in s.items() if k not in TIMING}
    assert_equal(load(one / "backbone.pt"), load(two / "backbone.pt"))


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --------------------------------------------------------------- continuation


def test_stopped_and_continued(whole, folder, tmp_path):
    """In mid-epoch, at an epoch's end, with other numbers of workers; the finished run then stays as it is."""
    method, reference, _ = whole
    for stop, workers in ((3, 0), (4, 2), (None, 0)):
        said = run(method, folder, tmp_path, "--workers", str(workers), *(["--max-steps", str(stop)] if stop else []))
        assert load(tmp_path / "last.pt")["step"] == (stop or 2 * STEPS)
        assert (f"stopped at step {stop} of 8" if stop else "finished") in said
    assert_same_run(reference, tmp_path)
    before = contents(tmp_path)
    said = run(method, folder, tmp_path)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert "already" in said and json.dumps(last) in said and contents(tmp_path) == before


def test_damaged_checkpoint(whole, folder, tmp_path):
    """last.pt cut short, then gone: the run goes on from last.prev.pt, in words, and ends the same."""
    method, reference, _ = whole
    run(method, folder, tmp_path, "--max-steps", "6")
    assert load(tmp_path / "last.prev.pt")["step"] == STEPS
    os.truncate(tmp_path / "last.pt", (tmp_path / "last.pt").stat().st_size // 2)
    said = run(method, folder, tmp_path, "--max-steps", "7")
    assert f"going on from {tmp_path / 'last.prev.pt'}" in said and "at step 4" in said
    assert [load(tmp_path / name)["step"] for name in ("last.prev.pt", "last.pt")] == [4, 7]  # the damaged file is not kept
    (tmp_path / "last.pt").unlink()
    assert "going on at step 4" in run(method, folder, tmp_path)
    assert_same_run(reference, tmp_path)


def test_resume_from_another_folder(whole, folder, tmp_path):
    method, reference, _ = whole
    run(method, folder, tmp_path / "a", "--max-steps", "3")
    run(method, folder, tmp_path / "b", "--resume", str(tmp_path / "a" / "last.pt"))
    for name in ("model", "optimizer"):
        assert_equal(load(reference / "last.pt")[name], load(tmp_path / "b" / "last.pt")[name])


@pytest.mark.parametrize("method", METHODS)
def test_loss_that_is_no_number(method, folder, tmp_path, monkeypatch, capsys):
    """The run stops in words before the epoch's end; its files are intact, and good to go on from."""
    flags, colour, batches, make = ["--batch-size", "6"], common.colour, [], common.Views.__getitems__
    run(method, folder, tmp_path, *flags, "--max-steps", "11")
    before = contents(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(common, "colour", lambda x, parameters: colour(x, parameters) * float("nan"))
        patch.setattr(common.Views, "__getitems__", lambda self, keys: batches.append(0) or make(self, keys))
        run(method, folder, tmp_path, *flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "not finite since step 11" in error and len(error.splitlines()) == 1
    assert contents(tmp_path) == before and len(batches) < 11
    assert "going on" in run(method, folder, tmp_path, *flags, "--max-steps", "12")


@pytest.mark.parametrize("arch", ["vit_micro", "resnet_nano"])
@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_for_the_networks_only(method, arch, folder, tmp_path, monkeypatch):
    """Embeddings, losses, statistics and weights stay in float32, and the loss is about that of a run without bf16."""
    module, seen, losses = importlib.import_module(method), [], {}
    add = module.EpochLog.add

    def watch(self, metrics, step, images_left):
        seen.extend(v.dtype for v in metrics.values())
        losses.setdefault(amp, metrics["loss"].item())
        add(self, metrics, step, images_left)

    monkeypatch.setattr(module.EpochLog, "add", watch)
    for amp in ("bf16", "off"):
        run(method, folder, tmp_path / amp, "--arch", arch, "--amp", amp, "--max-steps", "2")
    state = load(tmp_path / "bf16" / "last.pt")["model"]
    assert set(seen) == {torch.float32} == {v.dtype for v in state.values() if v.is_floating_point()}
    assert losses["bf16"] != losses["off"] and abs(losses["bf16"] / losses["off"] - 1) < 0.02


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

    for target, name in ((common.Views, "__getitems__"), (torch, "save"), (os, "fsync"), (os, "replace")):
        mortal(target, name)
    module.main(module.parse_args(argv))


@pytest.mark.parametrize("whole", KILLED, indirect=True)
def test_signals(whole, folder, tmp_path):
    """SIGTERM and SIGINT: the step is finished and saved, status 75; two of them end at once. It then goes on."""
    method, reference, _ = whole
    out, term = tmp_path / "run", signal.SIGTERM
    argv = [*TINY, "--data-dir", str(folder), "--out", str(out)]
    for batch, signals, status, step in ((3, (term,), 75, 3), (2, (signal.SIGINT,), 75, 5), (2, (term, term), -term, 5)):
        assert child(life, tmp_path / "log", method, argv, batch, signals) == status
        assert load(out / "last.pt")["step"] == step
        assert status < 0 or f"stopped at step {step}" in (tmp_path / "log.out").read_text()
        assert (tmp_path / "log.err").read_text() == ""
    assert child(life, tmp_path / "log", method, argv) == 0
    assert_same_run(reference, out)


@pytest.mark.parametrize("whole", KILLED, indirect=True)
def test_killed_again_and_again(whole, folder, tmp_path):
    """SIGKILL at random moments, writes and renamings among them, until a life lasts: the same run, bit for bit."""
    method, reference, _ = whole
    out, chance, deaths = tmp_path / "run", random.Random(0), 0
    argv = [*TINY, "--data-dir", str(folder), "--out", str(out)]
    while status := child(life, tmp_path / "log", method, argv, None, (), chance.randint(1, 24)):
        assert status == -signal.SIGKILL, (tmp_path / "log.err").read_text()
        deaths += 1
    assert deaths >= 3
    assert_same_run(reference, out)


@pytest.mark.parametrize("method", KILLED[:1])
@pytest.mark.parametrize("moment", range(1, 6))
def test_killed_while_the_folder_is_made(method, folder, tmp_path, moment):
    """Whatever a run leaves behind before its first step, the same command starts it."""
    argv = [*TINY, "--data-dir", str(folder), "--out", str(tmp_path / "run"), "--knn-every", "0", "--max-steps", "1"]
    assert child(life, tmp_path / "log", method, argv, None, (), moment) == -signal.SIGKILL
    assert child(life, tmp_path / "log", method, argv) == 0, (tmp_path / "log.err").read_text()
    assert load(tmp_path / "run" / "last.pt")["step"] == 1


# -------------------------------------------------------------- two processes


NORMS = [(groups, shape, affine) for groups in (1, 2) for shape in ((8, 3), (8, 3, 2, 5)) for affine in (True, False)]
BOTH = [(*case, torch.float64) for case in NORMS] + [(groups, (8, 3, 2, 5), True, torch.bfloat16) for groups in (1, 2)]


def batch_norm_case(method, groups, shape, affine):
    """(norm, input of uneven statistics, weights of a loss), in float64."""
    g = torch.Generator().manual_seed(shape[-1] + groups)
    x, weight = (torch.randn(shape, dtype=torch.float64, generator=g) for _ in range(2))
    norm = importlib.import_module(method).GroupedBatchNorm(shape[1], groups, affine).double()
    for p in norm.parameters():
        nn.init.normal_(p, generator=g)
    rows = torch.arange(len(x)).view(-1, *[1] * (len(shape) - 1))
    return norm, x * (1 + rows) + rows, weight


def batch_norm_results(norm, x, weight):
    x = x.clone().requires_grad_()
    y = norm(x)
    gradients = torch.autograd.grad((y * weight).sum(), [x, *norm.parameters()])
    return [y.detach(), *gradients, norm.running_mean, norm.running_var]


def checkpointed_gradients(world, rank):
    """Of two layers with batch norm over all processes, whose forward pass is run again in the backward pass."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)]
    net = importlib.import_module(METHODS[0]).group_batch_norms(nn.Sequential(*layers), 1)
    x, weight = torch.randn(8, 3, 8, 8), torch.randn(8, 5, 4, 4)
    x, weight = (v.chunk(world)[rank] for v in (x, weight))
    (torch.utils.checkpoint.checkpoint_sequential(net, 2, x, use_reentrant=False) * weight).sum().backward()
    return [p.grad for p in net.parameters()]


def processes(index, port, folder, out):
    """Process 0 trains alone, 1 and 2 as a group: every method for an epoch in float64, and each case of batch norm."""
    world = 2 if index else 1
    if index:
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(index - 1))
        dist.destroy_process_group = lambda: None  # one group for all that follows
    torch.set_num_threads(1)
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    for method in METHODS:
        module = importlib.import_module(method)
        narrow(module, drop_path=0.0)
        for arch in ("vit_micro", "resnet_nano"):
            flags = ["--arch", arch, "--epochs", "1", *NEEDED.get(method, [])]
            flags += ["--data-dir", str(folder), "--out", f"{out}/{method}-{arch}-{world}"]
            module.main(module.parse_args([*TINY, *flags]))
    results, average = [], importlib.import_module(METHODS[0]).average_buffers
    for *case, dtype in BOTH:
        norm, x, weight = batch_norm_case(METHODS[0], *case)
        norm.to(torch.promote_types(dtype, torch.float32))
        x, weight = (v.to(dtype).chunk(world)[max(0, index - 1)] for v in (x, weight))
        if dtype == torch.bfloat16:  # as autocast has it, and channels_last
            x = x.to(memory_format=torch.channels_last)
        result = batch_norm_results(norm, x, weight)
        average(norm)
        results.append(result)
    torch.save(results, f"{out}/norms-{index}.pt")
    torch.save(checkpointed_gradients(world, max(0, index - 1)), f"{out}/checkpointed-{index}.pt")


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("processes")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.start_processes(processes, (port, str(folder), str(out)), nprocs=3, start_method="forkserver")
    return out


@pytest.mark.parametrize("arch", ["vit_micro", "resnet_nano"])
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one(trained, method, arch):
    """Weights, running statistics, optimiser (so the gradients) and metrics after an epoch, in float64."""
    one, two = (trained / f"{method}-{arch}-{world}" for world in (1, 2))
    a, b = (tensors({k: load(out / "last.pt")[k] for k in ("model", "optimizer")}) for out in (one, two))
    assert a.keys() == b.keys() and any(v.dtype == torch.float64 for v in a.values() if torch.is_tensor(v))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
    first, second = ([json.loads(line) for line in (o / "metrics.jsonl").read_text().splitlines()] for o in (one, two))
    assert first[0]["chance"] == pytest.approx(second[0]["chance"], rel=1e-12) and len(first) == len(second) == 2
    for name in first[1].keys() - set(TIMING):
        assert first[1][name] == pytest.approx(second[1][name], rel=1e-7 if name == "rank" else 1e-9, abs=1e-9), name


@pytest.mark.parametrize("case", range(len(BOTH)))
def test_batch_norm_over_processes(trained, case):
    alone, *parts = (load(trained / f"norms-{i}.pt")[case] for i in range(3))
    half = BOTH[case][-1] == torch.bfloat16
    for i, value in enumerate(alone):
        tolerance = 2e-2 if half else 1e-9
        if i < 2:  # the output and the input's gradient
            together = torch.cat([p[i] for p in parts])
        elif i >= len(alone) - 2:  # running statistics, averaged; those of bfloat16 are taken in float32
            torch.testing.assert_close(parts[0][i], parts[1][i])
            together, tolerance = parts[0][i], 1e-6 if half else 1e-9
        else:  # gradients of weight and bias add up
            together = parts[0][i] + parts[1][i]
        torch.testing.assert_close(together, value, rtol=tolerance, atol=tolerance)


def test_checkpointing_with_batch_norm_over_processes(trained):
    alone, *parts = (load(trained / f"checkpointed-{i}.pt") for i in range(3))
    assert len(alone) == 8
    for value, *halves in zip(alone, *parts, strict=True):
        torch.testing.assert_close(sum(halves), value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("groups, shape, affine", NORMS)
def test_batch_norm_is_one_for_each_slice(method, groups, shape, affine):
    norm, x, weight = batch_norm_case(method, groups, shape, affine)
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    slices = [kind(shape[1], affine=affine).double() for _ in range(groups)]
    for one in slices:
        one.load_state_dict(norm.state_dict())
    ours = batch_norm_results(norm, x, weight)
    theirs = [batch_norm_results(*part) for part in zip(slices, x.chunk(groups), weight.chunk(groups), strict=True)]
    for i, value in enumerate(ours):
        join = torch.cat if i < 2 else (lambda v: sum(v) / groups) if i >= len(ours) - 2 else sum
        torch.testing.assert_close(value, join([t[i] for t in theirs]))
    norm.eval(), slices[0].eval()
    with torch.no_grad():
        slices[0].running_mean.copy_(norm.running_mean), slices[0].running_var.copy_(norm.running_var)
    torch.testing.assert_close(norm(x), slices[0](x))


@pytest.mark.parametrize("method", METHODS)
def test_group_batch_norms_keeps_what_a_norm_is(method):
    module = importlib.import_module(method)
    original = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-2, momentum=0.3), nn.Sequential(nn.BatchNorm2d(4)))
    original(torch.randn(5, 3, 2, 2))
    grouped = module.group_batch_norms(nn.Sequential(*original), 1)
    assert [type(m).__name__ for m in (grouped[1], grouped[2][0])] == ["GroupedBatchNorm"] * 2
    assert (grouped[1].eps, grouped[1].momentum) == (1e-2, 0.3)
    assert original[1].running_mean.abs().sum() > 0 and torch.equal(grouped[1].running_mean, original[1].running_mean)


@pytest.mark.parametrize("arch", ["resnet10t", "mobilenetv3_small_050", "convnext_atto"])
def test_any_timm_model(arch, folder, tmp_path):
    """Other stems, norms that hold an activation, layers after the pooling: trains, and grouped norms change nothing."""
    model = common.build_backbone(common.backbone_info(arch, 32, 16)).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(importlib.import_module(METHODS[0]).group_batch_norms(model, 1)(x), expected)
    assert "stopped at step 1" in run(METHODS[0], folder, tmp_path, "--arch", arch, "--image-size", "32", "--max-steps", "1")


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
    torch.set_num_threads(1)  # as in the run
    features = []
    for e, info in ((encoder, saved), common.load_backbone(out), common.load_backbone(out / "last.pt", saved["encoder"])):
        assert {k: info[k] for k in saved if k != "state_dict"} == {k: v for k, v in saved.items() if k != "state_dict"}
        features.append(common.extract_features(e.eval(), images[1], info, torch.device("cpu")))
    assert torch.equal(features[0], features[1]) and torch.equal(features[0], features[2]) and features[0].std() > 0
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = common.knn_accuracy(encoder, *images, saved, torch.device("cpu"))[20]
    assert records[-1]["knn20_top1"] == pytest.approx(found)
    assert [r["epoch"] for r in records[1:] if "knn20_top1" in r] == knn_epochs


def test_backbone_file(whole, folder):
    check_backbone_file(whole[1], folder, "timm", [1, 2])


@pytest.mark.parametrize("method", METHODS)
def test_backbone_file_of_a_resnet(method, folder, tmp_path):
    run(method, folder, tmp_path, "--arch", "resnet_nano", "--knn-every", "10")
    check_backbone_file(tmp_path, folder, "3x3", [2])  # the last epoch always has kNN


def test_run_folder(whole):
    method, out, _ = whole
    names = {"config.json", "metrics.jsonl", "last.pt", "last.prev.pt", "backbone.pt", "epoch-0001.pt", "epoch-0002.pt"}
    assert {p.name for p in out.iterdir()} == names
    config = json.loads((out / "config.json").read_text())
    assert (config["method"], config["arch"], config["epochs"]) == (method, "vit_micro", 2)
    steps = {p.stem: load(p)["step"] for p in out.glob("*.pt") if p.stem != "backbone"}  # all load with weights_only=True
    assert steps == {"last": 8, "last.prev": 4, "epoch-0001": 4, "epoch-0002": 8}
    first, *epochs = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    assert first["torch"] == torch.__version__ and first["timm"] == timm.__version__ and "CPU" in first["device"]
    assert {"python", "torchvision", "numpy", "commit", "knn20_top1_pixels", "knn20_top1_untrained"} <= first.keys()
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
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    for words in (
        "68 training images",
        "32 test images",
        "4 classes",
        "vit_micro",
        "batch 16 over 1 process",
        "4 steps an epoch",
    ):
        assert words in said, words
    for words in ("rate", "weight decay", "negatives", "batch-norm groups", "torch " + torch.__version__, "evaluated: the"):
        assert words in said, words
    assert re.search(rf"chance level of the loss.* {first['chance']:.3f}$", said, re.MULTILINE)
    for epoch in (1, 2):
        (line,) = (x for x in said.splitlines() if x.startswith(f"epoch {epoch}/2"))
        assert all(f"{name} " in line for name in ("loss", "below_chance", "images_per_s", "std", "rank", "knn20_top1"))


@pytest.mark.parametrize("method", METHODS)
def test_show_views(method, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(method)
    module.main(module.parse_args([*TINY, "--data-dir", str(folder), "--show-views", "views.png"]))
    assert [p.name for p in tmp_path.iterdir()] == ["views.png"]
    with Image.open("views.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 100 and np.asarray(picture).std() > 10


def import_scripts(folder):
    os.chdir(folder)
    for script in METHODS + EVALUATIONS:
        importlib.import_module(script)


def test_importing_runs_nothing(tmp_path):
    (tmp_path / "here").mkdir()
    assert child(import_scripts, tmp_path / "log", str(tmp_path / "here")) == 0
    assert not contents(tmp_path / "here") and {(tmp_path / f"log.{s}").read_text() for s in ("out", "err")} == {""}


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
    ("--epochs two", "two"),
    ("--epochs 0", "--epochs"),
    ("--lr nan", "--lr"),
    ("--batch-size -4", "--batch-size"),
    ("--seed -1", "--seed"),
    ("--variant third", "third"),
    ("--patch-size 5", "--patch-size 5"),
    ("--batch-size 128", "68 images are fewer"),
    ("--dataset folder --data-dir missing --batch-size 64 --patch-size 4", "missing"),
    ("--dataset imagenet --data-dir missing --batch-size 64 --patch-size 4", "missing"),
    ("--dataset folder --data-dir empty --batch-size 64 --patch-size 4", "no images"),
    ("--data-dir hollow", "no images"),
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
@pytest.mark.parametrize("flags, words", MISTAKES)
def test_mistakes(method, place, capsys, flags, words):
    """Each is one line and status 2, before anything is written."""
    before = contents(place)
    assert_one_line(lambda: run(method, "data", "run", *flags.split()), capsys, words)
    assert contents(place) == before and not (place / "run").exists()


@pytest.mark.parametrize("method", METHODS)
def test_batch_that_processes_cannot_share(method, place, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert_one_line(lambda: run(method, "data", "run"), capsys, "3 processes")


@pytest.mark.parametrize("method", METHODS)
def test_no_network(method, place, capsys, monkeypatch):
    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    assert_one_line(lambda: run(method, "new", "run", "--dataset", "cifar10"), capsys, "no route to host")
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


def as_script(script, argv):
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize("script", METHODS + EVALUATIONS)
def test_script_ends_with_status_2(script, tmp_path):
    argv = ["--dataset", "folder", "--data-dir", str(tmp_path / "missing")]
    argv += [] if script in METHODS else ["--arch", "vit_micro", "--random-init"]
    assert child(as_script, tmp_path / "log", str(ROOT / f"{script}.py"), argv) == 2
    error = (tmp_path / "log.err").read_text()
    assert error.startswith("error: ") and len(error.splitlines()) == 1 and "missing" in error
