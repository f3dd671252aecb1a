"""eval_linear.py's protocols: recipes, schedules, labels, L-BFGS; runs stopped, continued, shared by two processes."""

import contextlib
import io
import json
import math
import os
import random
import shutil
import signal
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from test_eval import Own
from timm.scheduler import CosineLRScheduler
from tiny import TIMING, assert_same_run, flat, load, records, refused, unequal

import common
import eval_linear

CLASSES, EACH, TEST = "abc", 14, 6
STEPS = 2  # an epoch: 42 images in batches of 16
FAST = ["--batch-size", "16", "--epochs", "3"]


def save_encoder(folder, arch, data):
    info = common.backbone_info(arch, 16, 8, "patterns", method="m", encoder="query")
    torch.manual_seed(0)
    encoder = common.build_backbone(info)
    encoder(torch.randn(8, 3, 16, 16))  # batch norm's statistics are not the initial ones
    folder.mkdir()
    common.write_file(folder / "backbone.pt", info | {"state_dict": encoder.state_dict()})
    (folder / "config.json").write_text(json.dumps({"dataset": "folder", "data_dir": str(data)}))
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """{name: path}: a data set of three kinds told by their colour (train/, val/, test/), a ViT and a ResNet."""
    root, rng = tmp_path_factory.mktemp("places"), np.random.default_rng(0)
    for kind, name in enumerate(CLASSES):
        for i in range(EACH + 2 * TEST):
            folder = root / "data" / ("train" if i < EACH else "val" if i < EACH + TEST else "test") / name
            folder.mkdir(parents=True, exist_ok=True)
            image = np.full((16, 16, 3), 60) + 60 * np.eye(3)[kind] + rng.normal(0, 12, (16, 16, 3))
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{name}{i:02}.png")
    vit, resnet = (save_encoder(root / arch, arch, root / "data") for arch in ("vit_micro", "resnet_micro"))
    return {"DATA": root / "data", "VIT": vit, "RESNET": resnet, "OUT": root / "out"}


def run(*flags, **own):
    """(what main returns, what it prints), or (exit status, ...)."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            result = eval_linear.main(eval_linear.parse_args([*map(str, flags), "--device", "cpu"]), **own)
    except SystemExit as stop:
        result = stop.code
    return result, said.getvalue()


def resolved(places, *flags, encoder="VIT", **changed):
    args = eval_linear.parse_args([str(places[encoder]), *map(str, flags)])
    args.dataset = args.dataset or "patterns"
    info = common.load_backbone(places[encoder])[1] | changed
    eval_linear.resolve(args, info)
    return args


# ------------------------------------------------------------- recipes and schedules

SGD = dict(optimizer="sgd", momentum=0.9, weight_decay=0, crop_scale=(0.08, 1), milestones=(0.6, 0.8))
MOCO = dict(SGD, epochs=100, batch_size=256, lr=30, lr_batch=256, nesterov=False)
COSINE = dict(SGD, milestones=(), min_lr=0, lr_batch=256)
PATCHMIX = dict(COSINE, epochs=100, batch_size=1024, nesterov=True)
TUNED = dict(optimizer="adamw", epochs=100, lr=5e-4, lr_batch=256, weight_decay=0.05, layer_decay=0.75, drop_path=0.1)
TUNED |= dict(warmup=10, warmup_lr=1e-6, min_lr=1e-5, milestones=(), smoothing=0.1)
TUNED |= dict(randaug=9, erase=0.25, mixup=0.8, cutmix=1, pad=0)
CLIM = dict(SGD, epochs=60, lr=1e-4, head_lr=10, milestones=(1 / 3, 2 / 3))
CLIM |= dict(randaug=0, mixup=0, cutmix=0, erase=0, smoothing=0)
RESNET, VIT_S, VIT_B = "resnet50", "vit_small_patch16_224", "vit_base_patch16_224"


RECIPES = [
    ("--protocol moco", RESNET, MOCO),
    ("--protocol jcl", RESNET, MOCO),
    ("--protocol jcl --dataset imagenet100", RESNET, dict(MOCO, lr=10)),
    ("--protocol clim", RESNET, MOCO),
    ("--protocol jointcrop", RESNET, dict(COSINE, epochs=90, batch_size=1024, lr=0.1, nesterov=False)),
    ("--protocol jointcrop", VIT_S, dict(COSINE, epochs=90, batch_size=1024, lr=3)),
    ("--protocol jointcrop-small", RESNET, dict(SGD, epochs=100, batch_size=512, lr=10, lr_batch=512)),
    ("--protocol patchmix", "vit_tiny_patch16_224", dict(PATCHMIX, lr=0.05)),
    ("--protocol patchmix", VIT_S, dict(PATCHMIX, lr=0.02)),
    ("--protocol patchmix --dataset cifar10", VIT_B, dict(PATCHMIX, lr=0.01, batch_size=256)),
    ("--finetune", VIT_S, dict(TUNED, protocol="patchmix", batch_size=1024)),
    ("--finetune --dataset cifar100", "deit_tiny_patch16_224", dict(TUNED, lr=1e-3, batch_size=256, pad=4)),
    ("--finetune", RESNET, dict(CLIM, protocol="clim")),
    ("--finetune --protocol clim --lr 1 --milestones", VIT_S, dict(CLIM, lr=1, milestones=())),
    ("--finetune --epochs 10 --mixup 0", VIT_S, dict(TUNED, epochs=10, warmup=1, mixup=0)),
    ("", RESNET, dict(mode="probe", epochs=50, batch_size=256, holdout=0.1)),
    ("--solver lbfgs", RESNET, dict(iterations=5000, tolerance=1e-6, metric="top1")),
]


@pytest.mark.parametrize("flags, timm_name, expected", RECIPES)
def test_recipes_are_the_papers(places, flags, timm_name, expected):
    args = resolved(places, *flags.split(), timm_name=timm_name)
    assert {k: getattr(args, k) for k in expected} == expected


def test_schedules_are_the_papers(places):
    """Rates at given epochs of 10 steps, at the recipe's batch."""

    def rates(*flags, at, encoder="VIT"):
        args = resolved(places, *flags, encoder=encoder)
        return [eval_linear.learning_rate(args, step, 10) for step in at]

    moco = rates("--protocol", "moco", at=(0, 599, 600, 799, 800, 999))
    assert moco == pytest.approx([30, 30, 3, 3, 0.3, 0.3])
    assert rates("--protocol", "moco", "--batch-size", 512, at=(0,)) == [60]
    steps = (0, 9, 10, 500, 509, 990, 999, 1000)
    cosine = [0.2 * (1 + math.cos(math.pi * (step // 10) / 100)) / 2 for step in steps]  # a ViT-T: 0.05 * 1024 / 256
    assert rates("--protocol", "patchmix", at=steps) == pytest.approx(cosine)
    clim = rates("--finetune", at=(199, 200, 399, 400, 599), encoder="RESNET")
    assert clim == pytest.approx([1e-4, 1e-5, 1e-5, 1e-6, 1e-6])


def test_patchmix_is_fine_tuned_by_timms_scheduler_called_after_each_epoch(places):
    tuned = resolved(places, "--finetune")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], peak := 4e-3)  # a ViT-T: 0.001 * 1024 / 256
    scheduler = CosineLRScheduler(optimizer, 100, lr_min=1e-5, warmup_t=10, warmup_lr_init=1e-6)
    for epoch in range(100):
        for step in (0, 9):
            ours = eval_linear.learning_rate(tuned, 10 * epoch + step, 10)
            assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        assert epoch != 30 or ours / peak == pytest.approx(0.807, abs=5e-4)
        scheduler.step(epoch)


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 20, 100])
def test_a_short_fine_tuning_passes_through_the_rates_of_a_long_one(places, epochs):
    short, whole = (resolved(places, "--finetune", "--epochs", e) for e in (epochs, 100))
    found = [eval_linear.learning_rate(short, step, 100) for step in range(100 * epochs)]
    expected = [eval_linear.learning_rate(whole, 100 * (step // epochs), 100) for step in range(100 * epochs)]
    assert found == pytest.approx(expected) and max(found) > 0.97 * eval_linear.peak_rate(short)


def groups_of(places, encoder, *flags):
    args = resolved(places, "--finetune", *flags, encoder=encoder)
    backbone, info = common.load_backbone(places[encoder])
    network, head = eval_linear.make_network(args, backbone, info, 3, torch.device("cpu"))
    optimizer = eval_linear.make_optimizer(args, network, head)
    scale = {id(p): (g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(scale) == sum(len(g["params"]) for g in optimizer.param_groups) == len([*network.parameters()])
    return {name: scale[id(p)] for name, p in network.named_parameters()}, type(optimizer).__name__


def test_layer_decay(places):
    """Block i of 3 (from 0) has 0.75^(3 - i) of the rate, the classifier all of it, the patches' embedding 0.75^4."""
    found, optimizer = groups_of(places, "VIT")
    assert optimizer == "AdamW" and found["head.weight"] == (1, 0.05) and found["head.bias"] == (1, 0)
    for name, (scale, decay) in found.items():
        part, number, *_ = name.split(".") + [""]
        depth = int(number) if part == "blocks" else {"head": 3, "norm": 2}.get(part, -1)
        assert scale == pytest.approx(0.75 ** (3 - depth)), name
        assert decay == (0.05 if name.endswith("weight") and "norm" not in name else 0), name


def test_two_rates(places):
    found, optimizer = groups_of(places, "RESNET")
    assert optimizer == "SGD"
    for name, (scale, decay) in found.items():
        assert (scale * 1e-4, decay) == (pytest.approx(10 if name.startswith("fc.") else 1e-4), 0)
    assert groups_of(places, "RESNET", "--head-lr", 2)[0]["fc.bias"][0] == pytest.approx(2e4)
    found, _ = groups_of(places, "VIT", "--layer-decay", 1)  # one rate, and still no decay of norms and biases
    assert {scale for scale, _ in found.values()} == {1} and found["norm.weight"][1] == found["head.bias"][1] == 0


# ------------------------------------------------------------------ labels


@pytest.mark.parametrize("fraction, total", [(0.01, 7), (0.1, 20), (0.5, 102), (1.0, 203)])
def test_label_fractions_are_balanced_and_repeatable(fraction, total):
    labels = np.random.default_rng(3).permutation(np.arange(203) % 7)
    rows, again, other = (eval_linear.balanced_share(labels, fraction, seed) for seed in (0, 0, 1))
    counts = np.bincount(labels[rows], minlength=7)
    assert len(rows) == len(set(rows.tolist())) == total and (rows == again).all() and (np.diff(rows) > 0).all()
    assert counts.max() - counts.min() <= 1 and counts.min() >= 1
    assert len(other) == total and ((rows != other).any() or fraction == 1)
    assert set(rows) <= set(eval_linear.balanced_share(labels, min(1, 2 * fraction), 0))
    labels = np.array([0] * 30 + [1] * 30 + [2] * 2)  # a class that has too few gives all
    assert sorted(np.bincount(labels[eval_linear.balanced_share(labels, 0.5, 0)])) == [2, 10, 10]


def test_label_files(places, tmp_path, capsys):
    train = common.load_images("folder", places["DATA"], True)
    listed = tmp_path / "list.txt"
    listed.write_text("a03.png\nc/c05.png\n\nb00.png\na03.png\n")
    rows = eval_linear.listed_files(train, places["DATA"] / "train", listed)
    assert [os.path.basename(train.path(i)) for i in rows] == ["a03.png", "b00.png", "c05.png"]
    result, said = run(places["VIT"], "--label-files", listed, "--epochs", 1, "--lrs", 0.1, "--no-floors")
    assert list(result) == ["encoder"] and "3 of 42 training images, 1 to 1 per class" in said
    for text in ("a03.png\nnothing.png", "b/a03.png", "", "a20.png"):
        listed.write_text(text)
        refused(capsys, lambda: eval_linear.listed_files(train, places["DATA"] / "train", listed))
    refused(capsys, lambda: eval_linear.listed_files(train, places["DATA"] / "train", tmp_path / "none"))
    twice = common.ImageSet("x", [0, 1], "ab", paths=np.array([b"d/a/1.png", b"d/b/1.png"]))
    listed.write_text("1.png")
    refused(capsys, lambda: eval_linear.listed_files(twice, "d", listed))
    listed.write_text("b/1.png")
    assert eval_linear.listed_files(twice, "d", listed).tolist() == [1]


# ------------------------------------------------------------------ L-BFGS


def problem(n=60, d=4, classes=3):
    g = common.generator(n, d)
    y = torch.arange(n) % classes
    centres, noise = (torch.randn(rows, d, generator=g, dtype=torch.float64) for rows in (classes, n))
    return centres[y] + noise, y


def newton(x, y, classes, strength):
    """The same minimum by damped Newton steps on the whole Hessian, in numpy."""
    a, onehot, weight = np.hstack([x, np.ones((len(x), 1))]), np.eye(classes)[y], np.zeros((x.shape[1] + 1, classes))
    penalty = strength * np.kron(np.diag([1.0] * x.shape[1] + [0.0]), np.eye(classes))
    for _ in range(50):
        p = np.exp(a @ weight - (a @ weight).max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        hessian = penalty + 1e-9 * np.eye(len(penalty))  # the biases' common shift is free
        curvature = p[:, :, None] * (np.eye(classes) - p[:, None])
        hessian += np.einsum("ni,nj,nkl->ikjl", a, a, curvature, optimize=True).reshape(hessian.shape)
        gradient = (a.T @ (p - onehot)).ravel() + penalty @ weight.ravel()
        step = np.linalg.solve(hessian, gradient)
        weight = weight - step.reshape(weight.shape) / max(1, np.abs(step).max())
    return torch.from_numpy(weight)


@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
def test_lbfgs_against_newton(strength):
    x, y = problem()
    weight, gradient = eval_linear.logistic_regression(x, y, 3, strength, tolerance=1e-8)
    expected = newton(x.numpy(), y.numpy(), 3, strength)
    assert gradient <= 1e-8
    torch.testing.assert_close(weight[:-1], expected[:-1], rtol=1e-5, atol=1e-6)
    centred = [w - w.mean() for w in (weight[-1], expected[-1])]  # a shift of all biases changes nothing
    torch.testing.assert_close(*centred, rtol=1e-5, atol=1e-6)


def test_lbfgs_in_the_limits():
    """All penalty: no weights, and biases that give the classes' shares. None, on what can be told apart: no error."""
    x, y = problem()
    y[:15] = 0
    weight, _ = eval_linear.logistic_regression(x, y, 3, 1e9, tolerance=1e-10)
    torch.testing.assert_close(weight[-1].softmax(0), y.bincount() / 60.0, check_dtype=False, rtol=1e-6, atol=1e-6)
    assert weight[:-1].abs().max() < 1e-6
    x = x + 20 * F.one_hot(y, 4)
    weight, _ = eval_linear.logistic_regression(x, y, 3, 1e-9)
    assert ((x @ weight[:-1] + weight[-1]).argmax(1) == y).all()


def test_the_strength_is_the_best_of_the_validation_part_and_then_all_is_fitted(capsys):
    x, y = problem(120, 30)
    x[:, 4:] *= 3  # noise
    x, test_x, rest, check = x.float(), x[:7].float() * 2, torch.arange(80), torch.arange(80, 120)
    grid = [1e-3, 1.0, 30.0, 1e3, 1e6]
    found = eval_linear.lbfgs_probe(x, y, test_x, rest, check, 3, grid)
    again = eval_linear.lbfgs_probe(x, y, torch.cat([test_x, -test_x]), rest, check, 3, grid)
    assert torch.equal(found["logits"], again["logits"][:7]) and found["held_out"] == again["held_out"]
    mean = x[:80].double().mean(0)
    scale = (x[:80] - mean).square().mean().sqrt()
    fit = lambda rows, s: newton(((x[rows] - mean) / scale).numpy(), y[rows].numpy(), 3, s)  # noqa: E731
    right = {}
    for s in grid:
        w = fit(rest, s)
        right[s] = 100 * ((((x[check] - mean) / scale) @ w[:-1] + w[-1]).argmax(1) == y[check]).double().mean().item()
    assert {float(k): v for k, v in found["held_out"].items()} == pytest.approx(right)
    best = max(right, key=lambda s: (right[s], s))
    w = fit(torch.arange(120), best)
    expected = (((test_x - mean) / scale) @ w[:-1] + w[-1]).softmax(1)
    torch.testing.assert_close(found["logits"].softmax(1), expected, rtol=1e-3, atol=1e-4)
    assert found["chosen"] == best
    capsys.readouterr()
    eval_linear.lbfgs_probe(x, y, test_x, rest, check, 3, [1e-3], iterations=2)
    assert "warning: strength 0.001, 1 of 1, has not converged in 2 iterations: gradient" in capsys.readouterr().out


def test_lbfgs_of_a_checkpoint(places, tmp_path):
    """val/ chooses where there is test/ too, else a part of train/; floors beside it; the scores of the test part."""
    flags = ["--solver", "lbfgs", "--strengths", 0.1, 1, 10, "--metric", "per_class"]
    result, said = run(places["VIT"], *flags)
    assert list(result) == ["encoder", "raw pixels", "untrained"]
    assert "18 images choose the strength by per_class" in said
    assert "all 60 are fitted" in said and result["encoder"]["linear_top1"] > 80
    (tmp_path / "train").symlink_to(places["DATA"] / "train"), (tmp_path / "test").symlink_to(places["DATA"] / "test")
    flags += ["--dataset", "folder", "--data-dir", tmp_path, "--holdout", 0.5, "--no-floors"]
    other, said = run(places["VIT"], *flags)
    assert list(other) == ["encoder"] and "21 images choose" in said and "all 42 are fitted" in said
    assert other["encoder"].keys() == result["encoder"].keys() == {"linear_top1", "linear_per_class"}


# ------------------------------------------------------------------ runs

RUNS = {
    "linear": ("RESNET", "--protocol", "moco", "--lr", 3),
    "finetune": ("VIT", "--finetune", "--erase", 0.9, "--eval-every", 1, "--label-fraction", 0.9),
}


@pytest.fixture(scope="module", params=RUNS)
def whole(request, places, tmp_path_factory):
    """(flags of a run, the folder of an undisturbed one, what it returned, what it printed)."""
    encoder, *flags = RUNS[request.param]
    out = tmp_path_factory.mktemp("whole") / "run"
    flags = [places[encoder], *flags, *FAST]
    return request.param, flags, out, *run(*flags, "--out", out)


def test_a_run_and_what_it_says(whole, places):
    name, flags, out, result, said = whole
    kind = "finetune" if "--finetune" in flags else "linear"
    assert list(result) == ["encoder"] and result["encoder"].keys() == {f"{kind}_top1", f"{kind}_per_class"}
    first, _, last = found = records(out)
    assert [(r["epoch"], r["step"]) for r in found] == [(1, STEPS), (2, 2 * STEPS), (3, 3 * STEPS)]
    assert result["encoder"].items() <= last.items() and (f"{kind}_top1" in first) == (name == "finetune")
    config, state = json.loads((out / "config.json").read_text()), load(out / "last.pt")
    assert config["epochs"] == 3 and config["images"] == state["images"] and config["images"]["test"] == 18
    args = resolved(places, *flags[1:], encoder="VIT" if flags[0] == places["VIT"] else "RESNET")
    recipe = {k: getattr(args, k) for k in eval_linear.VALUES if getattr(args, k) is not None}
    assert len(recipe) > 15 and all(f"{k} {common.shown(v)}" in said for k, v in recipe.items())
    texts = [(out / name).read_text() for name in ("metrics.jsonl", "config.json")]
    again, said = run(*flags, "--out", out)
    assert again == result and "at step 6" in said and unequal(load(out / "last.pt"), state) == []
    assert texts == [(out / name).read_text() for name in ("metrics.jsonl", "config.json")]


def test_stopped_and_continued(whole, tmp_path):
    """In mid-epoch, at an epoch's end, with loader processes, on request: as an undisturbed run, bit for bit."""
    name, flags, out, result, _ = whole
    assert run(*flags, "--out", tmp_path, "--max-steps", 1)[0] == {} and load(tmp_path / "last.pt")["step"] == 1
    make, batches = common.ViewDataset.__getitems__, []

    def interrupted(self, keys):
        batches.append(len(keys))
        if len(batches) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return make(self, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.ViewDataset, "__getitems__", interrupted)
        stopped, said = run(*flags, "--out", tmp_path)
    assert stopped == 75 and load(tmp_path / "last.pt")["step"] == 2 and "exit status 75" in said
    random.seed(99), np.random.seed(98), torch.manual_seed(97)  # nothing depends on what these were
    assert run(*flags, "--out", tmp_path, "--workers", 1 if name == "finetune" else 0)[0] == result
    assert_same_run(out, tmp_path, interrupted=(1,))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_while_the_last_epoch_is_judged(whole, tmp_path, monkeypatch, number):
    """The training is saved before it is judged. The same command then only judges."""
    _, flags, out, result, _ = whole
    flags = [*flags, "--out", tmp_path, "--eval-every", 0]

    def judged(*_, **__):
        if number == signal.SIGKILL:
            raise Killed
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, Killed)):
        patch.setattr(common, "extract_features", judged)
        run(*flags)
    assert load(tmp_path / "last.pt")["step"] == 3 * STEPS and "epoch" in records(tmp_path)[2]
    assert not result["encoder"].keys() & records(tmp_path)[2].keys()
    with monkeypatch.context() as patch:
        patch.setattr(eval_linear, "learning_rate", lambda *_: pytest.fail("a step was made again"))
        assert run(*flags)[0] == result and len(records(tmp_path)) == 3


class Killed(BaseException):
    """Stands in this process for the end by SIGKILL."""


def test_an_image_that_cannot_be_read_saves_what_was_trained(whole, tmp_path, monkeypatch):
    _, flags, *_ = whole
    make, batches = common.ViewDataset.__getitems__, []

    def damaged(self, keys):
        batches.append(keys)
        if len(batches) == 4:
            raise common.BadImage("cannot read the image x")
        return make(self, keys)

    monkeypatch.setattr(common.ViewDataset, "__getitems__", damaged)
    with pytest.raises(common.BadImage):
        run(*flags, "--out", tmp_path)
    assert load(tmp_path / "last.pt")["step"] == 3


def test_the_callers_generators_stay_as_they_were(whole):
    _, flags, out, *_ = whole
    numbers = []
    for again in (False, True):
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        if again:
            run(*flags, "--out", out)
        numbers.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert numbers[0] == numbers[1]


def test_the_frozen_encoder_stays_as_it_is_and_learning_is_seen(places, tmp_path, monkeypatch):
    """All weights and statistics, bit for bit; and the classifier learns what separates the classes."""
    network, info = common.load_backbone(places["RESNET"])
    before = {k: v.clone() for k, v in network.state_dict().items()}
    monkeypatch.setattr(common, "load_backbone", lambda *_: (network, info))
    flags = "--protocol moco --lr 5 --batch-size 16 --epochs 10 --crop-scale 0.5 1".split()
    result, _ = run(places["RESNET"], *flags, "--out", tmp_path)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items()) and not network.training
    assert result["encoder"]["linear_top1"] >= 70
    head = load(tmp_path / "last.pt")["model"]
    assert set(head) == {"weight", "bias"} and head["weight"].std() > 0.01


# ------------------------------------------------------------- other images


@pytest.fixture(scope="module")
def two_tests(places, tmp_path_factory):
    """Two folders with the same train/ and another val/ of as many images."""
    root = tmp_path_factory.mktemp("two")
    for name, part in (("A", "val"), ("B", "test")):
        shutil.copytree(places["DATA"] / "train", root / name / "train")
        shutil.copytree(places["DATA"] / part, root / name / "val")
    return root


def test_another_test_set_never_repeats_a_score(places, two_tests, tmp_path, monkeypatch, capsys):
    """A folder of another name gives the run another name. In one --out it is refused, also for own Datasets."""
    monkeypatch.chdir(tmp_path)
    flags = [places["RESNET"], "--protocol", "moco", *FAST]
    assert "encoder" in run(*flags)[0]
    for name in "AB":
        result, said = run(*flags, "--dataset", "folder", "--data-dir", two_tests / name)
        assert "encoder" in result and "going on" not in said
    again, said = run(*flags, "--dataset", "folder", "--data-dir", two_tests / "B")
    assert again == result and "going on from" in said
    names = sorted(p.name for p in (tmp_path / "runs").iterdir())
    start, more = "linear-moco-folder-resnet_micro-s0-batch_size16-", ("data_dirA-", "data_dirB-", "")
    assert names == [f"{start}{one}epochs3" for one in more]

    flags += ["--dataset", "folder", "--out", tmp_path / "one"]
    assert "encoder" in run(*flags, "--data-dir", two_tests / "A")[0]
    line = refused(capsys, run_or_exit, *flags, "--data-dir", two_tests / "B")
    assert "is of other images" in line and "give another --out" in line
    moved = shutil.copytree(two_tests / "A", tmp_path / "moved")
    assert "going on from" in run(*flags, "--data-dir", moved)[1]  # the same images in another place

    train, out = Own(places["DATA"] / "train"), ["--out", tmp_path / "own"]
    tests = [Own(places["DATA"] / "val"), Own(places["DATA"] / "val", 17)]
    assert "encoder" in run(*flags, *out, train=train, test=tests[0])[0]
    assert "going on from" in run(*flags, *out, train=train, test=tests[0])[1]
    assert run(*flags, *out, train=train, test=tests[1])[0] == 2 and "other images" in capsys.readouterr().err


def run_or_exit(*flags):
    eval_linear.main(eval_linear.parse_args([*map(str, flags), "--device", "cpu"]))


# ------------------------------------------------------------- training


LEARNING = {"VIT": "--lr 0.04 --warmup 0 --mixup 0 --randaug 0", "RESNET": "--lr 0.01 --head-lr 0.1"}


@pytest.mark.parametrize("encoder, flags", LEARNING.items())
def test_fine_tuning_learns(places, tmp_path, encoder, flags):
    flags = ["--finetune", *flags.split(), "--batch-size", 14, "--epochs", 10, "--out", tmp_path]
    result, _ = run(places[encoder], *flags)
    assert result["encoder"]["finetune_top1"] >= 60
    network = common.load_backbone(places[encoder])[0]
    moved = [k for k, v in network.state_dict().items() if not torch.equal(v, load(tmp_path / "last.pt")["model"][k])]
    assert len(moved) >= len([*network.parameters()])


def test_augmentations_are_a_function_of_seed_epoch_and_image(places):
    args = resolved(places, "--finetune", "--pad", 3)
    train, info = common.load_images("folder", places["DATA"], True), common.load_backbone(places["VIT"])[1]
    views = eval_linear.TrainingViews(train, args, info)
    one, two = views.__getitems__([(0, 3), (1, 5), (1, 3)]), views.__getitems__([(1, 3), (0, 3)])
    assert torch.equal(one["views"][0][0], two["views"][0][1]) and torch.equal(one["views"][0][2], two["views"][0][0])
    assert not torch.equal(one["views"][0][0], one["views"][0][2]) and one["views"][0].shape == (3, 3, 16, 16)
    strong = eval_linear.TrainingViews(train, resolved(places, "--finetune", "--pad", 3, "--randaug", 10), info)
    many = strong.__getitems__([(epoch, 3) for epoch in range(150)])  # at the limit of all its operations
    assert len(many["views"][0]) == 150
    plain = resolved(places, "--finetune", "--pad", 3, "--randaug", 0)
    batch = eval_linear.TrainingViews(train, plain, info).__getitems__([(e, 7) for e in range(40)])
    padded, corners = np.pad(train[7], ((3, 3), (3, 3), (0, 0))), set()
    for view in batch["views"][0]:
        image = view.permute(1, 2, 0).numpy()
        corners |= {(t, s) for t in range(7) for s in range(7) if (padded[t : t + 16, s : s + 16] == image).all()}
    brightness_to_hue, flips = batch["colour"][:, 0, :4], batch["colour"][:, 0, -1]
    assert len(corners) > 15 and (brightness_to_hue == torch.tensor([1, 1, 1, 0])).all() and 0 < flips.mean() < 1
    (view,) = eval_linear.TrainingViews(train, resolved(places, "--finetune", "--pad", 0), info).views
    assert view.ratio == (3 / 4, 4 / 3) and view.flip_p == 0.5 and view.blur_p == view.solarize_p == view.gray_p == 0


def group(index, port, flags, out):
    """Process 0 runs alone, 1 and 2 as a group."""
    torch.set_num_threads(1)
    if index:
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(index - 1))
        dist.destroy_process_group = lambda: None  # one group for all that follows
    for i, run_flags in enumerate(flags):
        eval_linear.main(eval_linear.parse_args([*run_flags, "--out", f"{out}/{i}-{min(index, 1)}", "--device", "cpu"]))


@pytest.mark.slow
def test_two_processes_train_as_one(places, tmp_path):
    """A frozen protocol, and fine-tuning where nothing pairs the images of a process: weights, optimiser, scores."""
    tune = "--finetune --mixup 0 --cutmix 0 --drop-path 0".split()
    flags = [[str(places["RESNET"]), "--protocol", "moco", "--lr", "3", *FAST], [str(places["VIT"]), *tune, *FAST]]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.start_processes(group, (port, flags, str(tmp_path)), nprocs=3, start_method="fork")
    for i in range(len(flags)):
        one, two = (tmp_path / f"{i}-{k}" for k in (0, 1))
        a, b = (flat({k: load(out / "last.pt")[k] for k in ("model", "optimizer")}) for out in (one, two))
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
        first, second = ({k: v for k, v in records(out)[-1].items() if k not in TIMING} for out in (one, two))
        assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize("name", ["regnety_002", "efficientnet_b0", "densenet121"])
def test_batch_norm_over_processes_keeps_the_activation(places, name, monkeypatch):
    """Norm and activation are one layer in these; what is converted for torchrun computes the same."""
    info = common.backbone_info(name, 32, None, method="m", encoder="query")
    args = resolved(places, "--finetune", timm_name=name)
    torch.manual_seed(0)
    encoder, x, networks = common.build_backbone(info), torch.randn(2, 3, 32, 32), []
    with torch.no_grad():
        encoder.train()(torch.randn(8, 3, 32, 32))  # batch norm's statistics are not the initial ones
    for world in (1, 2):
        monkeypatch.setattr(common, "rank_and_world", lambda world=world: (0, world))
        network, head = eval_linear.make_network(args, encoder, info, 3, torch.device("cpu"))
        assert any(isinstance(m, torch.nn.SyncBatchNorm) for m in network.modules()) == (world == 2)
        networks.append(network.eval())
    with torch.no_grad():
        assert torch.equal(networks[0](x), networks[1](x)) and networks[0](x).std() > 0


def test_batch_norm_over_processes_of_a_cpu_is_refused(places, capsys, monkeypatch):
    make = eval_linear.make_network

    def of_two(*given):
        monkeypatch.setattr(common, "rank_and_world", lambda: (0, 2))
        return make(*given)

    monkeypatch.setattr(eval_linear, "make_network", of_two)
    args = eval_linear.parse_args([str(places["RESNET"]), "--finetune", *FAST, "--out", str(places["OUT"])])
    assert "batch norm" in refused(capsys, eval_linear.main, args) and not places["OUT"].exists()


@pytest.mark.parametrize("flags", [[], ["--solver", "lbfgs"]])
def test_features_that_no_process_should_hold_alone(places, capsys, monkeypatch, flags):
    monkeypatch.setattr(common, "output_width", lambda *_: 2**25)
    monkeypatch.setattr(common, "extract_features", lambda *_, **__: pytest.fail("work was begun"))

    def two_processes(*_):
        monkeypatch.setattr(common, "rank_and_world", lambda: (0, 2))
        return {}

    monkeypatch.setattr(common, "floor_encoders", two_processes)
    assert run(places["VIT"], *flags)[0] == 2 and "2**30" in capsys.readouterr().err


MISTAKES = [
    ("VIT --solver lbfgs --protocol moco", "leave out --finetune and --protocol"),
    ("VIT --label-fraction 0", "--label-fraction: 0 is not from"),
    ("VIT --label-fraction 0.1 --label-files X", "not allowed with"),
    ("VIT --label-files NONE", "cannot be read"),
    ("VIT --lr 1", "probe of vit_tiny_patch16_224, which has --epochs, --batch-size, --lrs"),
    ("VIT --protocol moco --lrs 1", "--lrs is no value of this evaluation, linear moco"),
    ("VIT --solver lbfgs --epochs 3", "--epochs is no value of this evaluation, lbfgs"),
    ("VIT --protocol moco --out OUT", "42 images are fewer than one batch"),
    ("VIT --protocol moco --milestones 60 80", "--milestones: 60 is not from"),
    ("VIT --finetune --batch-size 15", "--batch-size 15"),
    ("RESNET --finetune --batch-size 1", "--batch-size: 1 is not from 2"),
    ("VIT --finetune --epochs 2 --warmup 3", "--warmup 3 is longer than the run, --epochs 2"),
    ("VIT --protocol patchmix --min-lr 3", "--min-lr 3 is above the learning rate's peak, 0.2"),
    ("VIT --finetune --head-lr 5", "--layer-decay 1"),
    ("VIT --finetune --randaug 8.5", "invalid int value: '8.5'"),
]


@pytest.mark.parametrize("flags, words", MISTAKES)
def test_wrong_flags_are_one_line(places, capsys, flags, words):
    argv = [str({**places, "NONE": places["DATA"] / "none"}.get(word, word)) for word in flags.split()]
    assert words in refused(capsys, run_or_exit, *argv)
    assert not places["OUT"].exists()


def test_another_configuration_or_encoder_is_refused(places, tmp_path, capsys):
    flags = [places["VIT"], "--protocol", "moco", *FAST, "--max-steps", 1, "--out", tmp_path]
    run(*flags)
    for more in (["--lr", 3], ["--label-fraction", 0.9]):
        assert run(*flags, *more)[0] == 2 and "another configuration" in capsys.readouterr().err
    assert run(places["RESNET"], *flags[1:])[0] == 2 and "weights" in capsys.readouterr().err
    assert run(f"{places['VIT']}/", *flags[1:])[0] != 2  # the same encoder by another name
