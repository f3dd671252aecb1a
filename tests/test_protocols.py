"""eval_linear.py's protocols: recipes, schedules, labels, L-BFGS; runs that are ended, go on, have two processes."""

import contextlib
import hashlib
import io
import math
import os
import random

import numpy as np
import pytest
import test_eval
import torch
from timm.scheduler import CosineLRScheduler
from tiny import TIMING, assert_same_run, contents, epochs_of, flat, life, load, play, records, refused, succeed

import common
import eval_linear

places = test_eval.places

FAST = ["--batch-size", "16", "--epochs", "3"]  # of two steps: 42 images


def run(*flags, **own):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return test_eval.run(eval_linear, *flags, **own), said.getvalue()


def completed(places, *flags, encoder="VIT", **changed):
    args = eval_linear.parse_args([str(places[encoder]), *map(str, flags)])
    args.dataset = args.dataset or "patterns"
    return eval_linear.complete(args, common.load_backbone(places[encoder])[1] | changed)


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
    ("--finetune --epochs 10 --mixup 0", VIT_S, dict(TUNED, epochs=10, mixup=0)),
    ("", RESNET, dict(mode="probe", epochs=50, batch_size=256, holdout=0.1)),
    ("--solver lbfgs", RESNET, dict(iterations=5000, tolerance=1e-6, metric="top1", batch_size=256)),
]


@pytest.mark.parametrize("flags, timm_name, expected", RECIPES)
def test_recipes_are_the_papers(places, flags, timm_name, expected):
    args = completed(places, *flags.split(), timm_name=timm_name)
    assert {k: getattr(args, k) for k in expected} == expected


def learning_rates(places, *flags, at, encoder="VIT"):
    """The learning rates at steps of epochs of 10 steps."""
    args = completed(places, *flags, encoder=encoder)
    return [eval_linear.learning_rate(args, step / 10) for step in at]


def test_schedules_are_the_papers(places):
    moco = learning_rates(places, "--protocol", "moco", at=(0, 599, 600, 799, 800, 999))
    assert moco == pytest.approx([30, 30, 3, 3, 0.3, 0.3])
    assert learning_rates(places, "--protocol", "moco", "--batch-size", 512, at=(0,)) == [60]
    steps = (0, 9, 10, 500, 509, 899)
    cosine = [0.4 * (1 + math.cos(math.pi * (step // 10) / 90)) / 2 for step in steps]  # 0.1 * 1024 / 256
    assert learning_rates(places, "--protocol", "jointcrop", at=steps, encoder="RESNET") == pytest.approx(cosine)
    clim = learning_rates(places, "--finetune", at=(199, 200, 399, 400, 599), encoder="RESNET")
    assert clim == pytest.approx([1e-4, 1e-5, 1e-5, 1e-6, 1e-6])


def test_patchmix_has_timms_scheduler_called_after_each_epoch(places):
    """Of a ViT-T at 1,024 images."""
    tuned = dict(lr_min=1e-5, warmup_t=10, warmup_lr_init=1e-6)
    for flags, peak, options in (("--finetune", 4e-3, tuned), ("--protocol patchmix", 0.2, {})):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], peak)
        scheduler, found = CosineLRScheduler(optimizer, 100, **options), []
        for epoch in range(100):
            found += [optimizer.param_groups[0]["lr"]] * 10
            scheduler.step(epoch)
        assert learning_rates(places, *flags.split(), at=range(1000)) == pytest.approx(found)


@pytest.mark.parametrize("epochs", [1, 3, 20])
def test_a_short_fine_tuning_passes_through_the_learning_rates_of_a_long_one(places, epochs):
    """But for the warm-up, which is not shortened, and takes at most a quarter (D5, D6)."""
    flags, steps = ["--finetune", "--epochs", epochs], range(100 * epochs)
    whole, short, as_given = (completed(places, *f) for f in (flags[:1], [*flags, "--warmup", epochs / 10], flags))
    found = [eval_linear.learning_rate(short, step / 100) for step in steps]
    assert found == pytest.approx([eval_linear.learning_rate(whole, step // epochs) for step in steps])
    found = [eval_linear.learning_rate(as_given, step / 100) for step in steps]
    assert np.argmax(found) == pytest.approx(100 * min(10, epochs / 4), abs=epochs + 2)


def test_patchmixs_linear_classifier_starts_as_torchs_does(places, tmp_path):
    """As in its released code: uniform up to 1 / sqrt(width). The others': N(0, 0.01), and no bias."""
    images = common.ImageSet(np.zeros((32, 16, 16, 3), np.uint8), np.arange(32) % 2, range(500))
    for protocol, std in (("patchmix", (1 / 64 / 3) ** 0.5), ("moco", 0.01)):
        flags = ["--protocol", protocol, "--epochs", 1, "--batch-size", 32, "--lr", 1e-9, "--out", tmp_path / protocol]
        run(places["VIT"], *flags, train=images, test=images)
        begun = load(tmp_path / protocol / "last.pt")["model"]
        assert begun["weight"].std().item() == pytest.approx(std, rel=0.02)
        assert begun["bias"].std().item() == pytest.approx(std * (protocol == "patchmix"), rel=0.1, abs=1e-6)


def groups_of(places, encoder, *flags):
    args = completed(places, "--finetune", *flags, encoder=encoder)
    network, head = eval_linear.make_network(*common.load_backbone(places[encoder]), 3, finetune=True)
    optimizer = eval_linear.make_optimizer(args, network, head)
    scale = {id(p): (g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(scale) == sum(len(g["params"]) for g in optimizer.param_groups) == len([*network.parameters()])
    return {name: scale[id(p)] for name, p in network.named_parameters()}, type(optimizer).__name__


def test_layer_decay(places):
    """Block i of 3 has 0.75^(3 - i) of the learning rate, the classifier all of it, the patches' embedding 0.75^4."""
    found, optimizer = groups_of(places, "VIT")
    assert optimizer == "AdamW" and found["head.weight"] == (1, 0.05) and found["head.bias"] == (1, 0)
    for name, (scale, decay) in found.items():
        part, number, *_ = name.split(".") + [""]
        depth = int(number) if part == "blocks" else {"head": 3, "norm": 2}.get(part, -1)
        assert scale == pytest.approx(0.75 ** (3 - depth)), name
        assert decay == (0.05 if name.endswith("weight") and "norm" not in name else 0), name


def test_two_learning_rates(places):
    found, optimizer = groups_of(places, "RESNET")
    expected = {name: (10 / 1e-4 if name.startswith("fc.") else 1, 0) for name in found}
    assert optimizer == "SGD" and found == expected


@pytest.mark.parametrize("fraction, total, digest", [(0.01, 7, "23483b55"), (0.1, 20, "20efab49"), (1.0, 203, "")])
def test_label_fractions_are_balanced_and_never_change(fraction, total, digest):
    labels = np.random.default_rng(3).permutation(np.arange(203) % 7)
    rows, again, other = (eval_linear.balanced_share(labels, fraction, seed) for seed in (0, 0, 1))
    counts = np.bincount(labels[rows], minlength=7)
    assert len(rows) == total and (rows == again).all() and (np.diff(rows) > 0).all()
    assert counts.max() - counts.min() <= 1 and counts.min() >= 1
    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest().startswith(digest)
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
    _, said = run(places["VIT"], "--label-files", listed, "--epochs", 1, "--lrs", 0.1, "--no-baselines")
    assert "3 of 42 training images" in said
    twice = common.ImageSet(["a/1.png", "b/1.png"], [0, 1], "ab", root="d")
    listed.write_text("b/1.png")
    assert eval_linear.listed_files(twice, "d", listed).tolist() == [1]
    for text in ("1.png", "b/1.png\nnothing.png", ""):
        listed.write_text(text)
        refused(capsys, eval_linear.listed_files, twice, "d", listed)


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


def test_the_strength_is_the_best_of_the_validation_part_and_then_all_is_fitted():
    """Here by the mean over unequal classes. Of equals it is the middle one."""
    g, y = common.generator(7), (torch.arange(120) % 5).clamp_max(2)
    noise, centers = torch.randn(120, 20, generator=g), torch.randn(3, 20, generator=g)
    x = torch.cat([(centers[y] + noise)[:, :4], 2 * noise[:, 4:]], 1)
    test_x, rest, check, grid = 2 * x[:7], torch.arange(80), torch.arange(80, 120), [0.1, 0.3, 1.0, 3.0, 10.0, 1e3]
    found = eval_linear.lbfgs_probe(x, y, test_x, rest, check, 3, grid, "per_class", tolerance=1e-8)
    mean = x[:80].double().mean(0)
    scale = (x[:80] - mean).square().mean().sqrt()
    x, test_x = (x - mean) / scale, (test_x - mean) / scale

    def logits(rows, strength, of):
        weight = newton(x[rows].numpy(), y[rows].numpy(), 3, strength)
        return of @ weight[:-1] + weight[-1]

    def percent(strength):
        right = logits(rest, strength, x[check]).argmax(1) == y[check]
        return 100 * np.mean([right[y[check] == c].double().mean() for c in range(3)])

    percents = {strength: percent(strength) for strength in grid}
    equals = [strength for strength in grid if percents[strength] == max(percents.values())]
    assert found["held_out"] == pytest.approx(percents) and equals == [0.1, 0.3, 1.0, 3.0] and found["chosen"] == 1.0
    expected = logits(torch.arange(120), 1.0, test_x).softmax(1)
    torch.testing.assert_close(found["logits"].softmax(1), expected, rtol=1e-5, atol=1e-6)


def test_lbfgs_of_a_checkpoint(places, tmp_path):
    """val/ chooses where there is test/ too, else a part of train/. Of few labels a part chooses: val/ is left out."""
    flags = ["--solver", "lbfgs", "--strengths", 0.1, 1, 10, "--metric", "per_class"]
    result, said = run(places["VIT"], *flags)
    assert list(result) == ["encoder", "untrained"] and "18 images choose" in said and "all 60 " in said
    train, val, (test_x, _, test_y) = test_eval.parts(places, "train", "val", "test")
    x, _, y = (torch.cat(pair) for pair in zip(train, val, strict=True))
    found = eval_linear.lbfgs_probe(x, y, test_x, *torch.arange(60).split([42, 18]), 3, [0.1, 1, 10])
    assert result["encoder"] == pytest.approx(eval_linear.scores(found["logits"], test_y, 3))
    _, said = run(places["VIT"], *flags, "--label-fraction", 0.2)
    assert "1 images choose" in said and "all 8 " in said and "test/ is evaluated, 18 " in said
    for part in ("train", "test"):
        (tmp_path / part).symlink_to(places["DATA"] / part)
    _, said = run(places["VIT"], *flags, "--dataset", "folder", "--data-dir", tmp_path, "--holdout", 0.5)
    assert "21 images choose" in said and "all 42 " in said


@pytest.fixture(scope="module")
def tuned(places, tmp_path_factory):
    """(flags of a fine-tuning with all that draws, the folder of an undisturbed one, its scores)."""
    flags = [places["VIT"], "--finetune", "--erase", 0.9, "--label-fraction", 0.9, *FAST]
    out = tmp_path_factory.mktemp("tuned") / "run"
    return flags, out, run(*flags, "--out", out)[0]


def test_a_run_and_what_it_leaves(tuned):
    """The same command again says its scores, and changes nothing."""
    flags, out, result = tuned
    assert result["encoder"].keys() == {"finetune_top1", "finetune_per_class"}
    assert [(r["epoch"], "finetune_top1" in r) for r in records(out)] == [(1, False), (2, False), (3, True)]
    assert result["encoder"].items() <= records(out)[2].items()
    before, after = load(flags[0] / "backbone.pt")["state_dict"], load(out / "last.pt")["model"]
    assert not [name for name, value in before.items() if torch.equal(value, after[name])]  # all are trained
    files = contents(out)
    assert run(*flags, "--out", out)[0] == result and contents(out) == files


def test_ended_and_gone_on(tuned, tmp_path):
    """In an epoch, in a save, in the evaluation; with loader processes: as an undisturbed run, bit for bit."""
    flags, out, result = tuned
    flags = [*flags, "--out", tmp_path]
    for moment, epochs in (("step 2", None), ("step 4", 1), ("save 4", 1), ("knn 1", 3)):
        assert life("eval_linear", [*flags, "--device", "cpu"], moment)[0] == 130 and epochs_of(tmp_path) == epochs
    random.seed(99), np.random.seed(98), torch.manual_seed(97)  # nothing depends on what these were
    assert run(*flags, "--workers", 1)[0] == result
    assert_same_run(out, tmp_path)


def test_the_frozen_encoder_stays_as_it_is_and_learning_is_seen(places, tmp_path, monkeypatch):
    network, info = common.load_backbone(places["RESNET"])
    before = {k: v.clone() for k, v in network.state_dict().items()}
    monkeypatch.setattr(common, "load_backbone", lambda *_: (network, info))
    flags = "--protocol moco --lr 5 --batch-size 16 --epochs 10 --crop-scale 0.5 1".split()
    result, _ = run(places["RESNET"], *flags, "--out", tmp_path)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items()) and not network.training
    assert result["encoder"]["linear_top1"] > 50  # of three classes


def test_another_evaluation_is_refused(places, tmp_path, capsys):
    """In the folder of the first. The same encoder in another place goes on."""
    train, a, b = (common.ImageSet(*common.make_patterns(32, 16, i)) for i in range(3))
    vit, resnet, flags = places["VIT"], places["RESNET"], ["--protocol", "moco", *FAST, "--out", tmp_path / "run"]
    run(vit, *flags, train=train, test=a)
    for word, words, test in (("--lr", [vit, "--lr", 3], a), ("images", [vit], b), ("weights", [resnet], a)):
        assert word in refused(capsys, run, *words, *flags, train=train, test=test)
    assert "going on" in run(vit / "backbone.pt", *flags, train=train, test=a)[1]


def test_augmentations_are_a_function_of_seed_epoch_and_image(places):
    train, info = common.load_images("folder", places["DATA"], True), common.load_backbone(places["VIT"])[1]

    def made(keys, pad=3, randaug=9):
        return eval_linear.TrainingViews(train, info, 0, (0.08, 1.0), pad, randaug).__getitems__(keys)

    one, two = (made(keys)["views"][0] for keys in ([(0, 3), (1, 5), (1, 3)], [(1, 3), (0, 3)]))
    assert torch.equal(one[0], two[1]) and torch.equal(one[2], two[0]) and not torch.equal(one[0], one[2])
    made([(epoch, 3) for epoch in range(150)], randaug=10)  # the limit of all its operations is no error
    plain = made([(epoch, 7) for epoch in range(40)], randaug=0)
    padded, corners = np.pad(train[7], ((3, 3), (3, 3), (0, 0))), set()
    for view in plain["views"][0]:
        image = view.permute(1, 2, 0).numpy()
        corners |= {(t, s) for t in range(7) for s in range(7) if (padded[t : t + 16, s : s + 16] == image).all()}
    assert len(corners) > 15 and 0 < plain["color"][:, 0, -1].mean() < 1  # flips
    (view,) = eval_linear.TrainingViews(train, info, 0, (0.08, 1.0)).views
    assert (view.area, view.ratio, view.flip_p) == ((0.08, 1), (3 / 4, 4 / 3), 0.5)
    assert view.jitter_p == view.blur_p == view.solarize_p == view.gray_p == 0


TWO = [  # encoder, flags, and what is compared: of batch norms, which on CPUs each process has for itself, the first
    ("RESNET", "--protocol moco --lr 3", ""),
    ("VIT", "--finetune --mixup 0 --cutmix 0 --drop-path 0", ""),
    ("RESNET", "--finetune --lr 1e-9 --head-lr 0", "model/conv1.1.running_mean"),
]


@pytest.mark.slow
@pytest.mark.parametrize("encoder, flags, only", TWO)
def test_two_processes_train_as_one(places, tmp_path, encoder, flags, only):
    """A frozen protocol, and fine-tuning where nothing pairs the images of a process: weights, optimizer, scores."""
    flags, outs = [places[encoder], *flags.split(), *FAST, "--device", "cpu", "--out"], (tmp_path / "1", tmp_path / "2")
    for world, out in enumerate(outs, start=1):
        succeed(tmp_path / "log", play, [("eval_linear", [*flags, out])] * world)
    a, b = (flat({k: load(out / "last.pt")[k] for k in ("model", "optimizer")}) for out in outs)
    assert a.keys() == b.keys()
    for name in [f"/{only}"] if only else a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    first, second = ({k: v for k, v in records(out)[-1].items() if k not in TIMING} for out in outs)
    assert only or first == pytest.approx(second, rel=1e-4)
