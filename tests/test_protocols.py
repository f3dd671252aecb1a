"""Tests eval_linear.py's protocols: recipes, schedules, labels, L-BFGS, interrupted runs, and two processes."""

import argparse
import functools
import hashlib
import random
import shutil

import numpy as np
import pytest
import test_eval
import timm
import tiny
import torch
import torch.nn.functional as F
from conftest import generator, slow_but
from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.scheduler import CosineLRScheduler
from tiny import contents, epochs_of, evaluate, life, load, play, records, refused, succeed, unequal
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder

import common
import eval_knn
import eval_linear

places = test_eval.places
run = functools.partial(evaluate, eval_linear)

FAST = ["--batch-size", "16", "--epochs", "3"]  # two steps per epoch of 42 images


def completed(places, *flags, encoder="VIT", **changed):
    args = eval_linear.parse_args([str(places[encoder]), *map(str, flags)])
    info = common.load_backbone(places[encoder])[1]
    return eval_linear.complete_args(args, info | dict(dataset=args.dataset or info["dataset"]) | changed)


SGD = dict(optimizer="sgd", weight_decay=0, crop_scale=[0.08, 1], pad=0, randaug=0, erase=0, mixup=0, smoothing=0)
MOCO = dict(SGD, epochs=100, batch_size=256, lr=30, nesterov=False)
PATCHMIX = dict(SGD, epochs=100, batch_size=1024, nesterov=True, milestones=[])
TUNED = dict(crop_scale=[0.08, 1], epochs=100, lr=5e-4, batch_size=1024, randaug=9, pad=0)
CLIM = dict(SGD, epochs=60, lr=1e-4, cutmix=0, drop_path=0)
RESNET, VIT_S, VIT_B = "resnet50", "vit_small_patch16_224", "vit_base_patch16_224"


@pytest.mark.parametrize("flags, timm_name, expected", [  # other tests check schedules, layer decay, mixup, ...
    *((f"--protocol {protocol}", RESNET, MOCO) for protocol in ("moco", "jcl", "clim")),
    ("--protocol jcl --dataset imagenet100", RESNET, dict(MOCO, lr=10)),
    ("--protocol jointcrop", RESNET, dict(MOCO, epochs=90, batch_size=1024, lr=0.1)),
    ("--protocol jointcrop", VIT_S, dict(MOCO, epochs=90, batch_size=1024, lr=3)),
    ("--protocol jointcrop-small", RESNET, dict(MOCO, batch_size=512, lr=10 * 256 / 512, milestones=[0.6, 0.8])),
    ("--protocol patchmix", "vit_tiny_patch16_224", dict(PATCHMIX, lr=0.05)),
    ("--protocol patchmix", VIT_S, dict(PATCHMIX, lr=0.02)),
    ("--protocol patchmix --dataset cifar10", VIT_B, dict(PATCHMIX, lr=0.01, batch_size=256)),
    ("--finetune", VIT_S, dict(TUNED, protocol="patchmix")),
    ("--finetune --dataset cifar100", "deit_tiny_patch16_224", dict(TUNED, lr=1e-3, batch_size=256, pad=4)),
    ("--finetune", RESNET, dict(CLIM, protocol="clim")),
    ("--finetune --protocol clim --lr 1 --milestones", VIT_S, dict(CLIM, lr=1, milestones=[])),
    ("", RESNET, dict(protocol="probe", epochs=50, batch_size=256, holdout=0.1)),
    ("--solver lbfgs", RESNET, dict(metric="top1", batch_size=256, holdout=0.1)),
])  # fmt: skip
def test_recipes_are_the_papers(places, flags, timm_name, expected):
    """The recipes have the papers' values. Learning rates are per 256 images."""
    args = completed(places, *flags.split(), timm_name=timm_name)
    assert {k: getattr(args, k) for k in expected} == expected


@pytest.mark.parametrize("flags", [
    "--out x", "--lr 1", "--strengths 1", "--solver lbfgs --lrs 1", "--protocol moco --layer-decay 0.5", "--lrs 0",
    "--protocol moco --metric top1", "--finetune --no-baselines", "--protocol moco --lr nan", "--holdout 1.5",
    "--holdout 0", "--label-fraction 0", "--protocol moco --finetune", "--label-fraction 0.1 --label-files list.txt",
])  # fmt: skip
def test_flags_without_effect_and_impossible_values_are_refused(flags, capsys):
    line = refused(capsys, eval_linear.parse_args, ["RUN", *flags.split()])
    assert [word for word in flags.split() if word.startswith("--")][-1] in line


def learning_rates(places, *flags, at, encoder="VIT"):
    """Return the learning rates at the steps `at`, with 10 steps per epoch."""
    args = completed(places, *flags, encoder=encoder)
    return [eval_linear.learning_rate(args, step / 10) for step in at]


def test_schedules_are_the_papers(places):
    moco = learning_rates(places, "--protocol", "moco", at=(0, 599, 600, 799, 800, 999))
    assert moco == pytest.approx([30, 30, 3, 3, 0.3, 0.3])
    steps = (0, 9, 10, 500, 509, 899)
    cosine = [0.4 * (1 + np.cos(np.pi * (step // 10) / 90)) / 2 for step in steps]  # 0.1 * 1024 / 256
    assert learning_rates(places, "--protocol", "jointcrop", at=steps, encoder="RESNET") == pytest.approx(cosine)
    clim = learning_rates(places, "--finetune", at=(199, 200, 399, 400, 599), encoder="RESNET")
    assert clim == pytest.approx([1e-4, 1e-5, 1e-5, 1e-6, 1e-6])
    warm = learning_rates(places, "--protocol", "moco", "--warmup", 1, at=(0, 5, 10))
    assert warm == pytest.approx([0, 15, 30])  # a warmup changes every step


def test_patchmix_has_timms_scheduler_called_after_each_epoch(places):
    """A ViT-T with batches of 1,024 images has the learning rates of timm's scheduler."""
    tuned = dict(lr_min=1e-5, warmup_t=10, warmup_lr_init=1e-6)
    for flags, peak, options in (("--finetune", 4e-3, tuned), ("--protocol patchmix", 0.2, {})):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], peak)
        scheduler, found = CosineLRScheduler(optimizer, 100, **options), []
        for epoch in range(100):
            found += [optimizer.param_groups[0]["lr"]] * 10
            scheduler.step(epoch)
        assert learning_rates(places, *flags.split(), at=range(1000)) == pytest.approx(found)


@pytest.mark.parametrize("epochs", [1, 3, 50])
def test_a_short_fine_tuning_has_the_learning_rates_of_a_long_one(places, epochs):
    """Each hundredth of it has the rate of one epoch in 100 (D4). --warmup is not scaled, but cut to a quarter (D5)."""
    flags, steps = ["--finetune", "--epochs", epochs], [epochs * i / 100 for i in range(1000)]
    found = learning_rates(places, *flags, "--warmup", epochs / 10, at=steps)
    assert found[:990:10] == pytest.approx(learning_rates(places, "--finetune", at=range(10, 1000, 10)))
    assert len({*found}) == 1000  # the learning rate changes every step
    end_of_warmup = 1000 * min(10, epochs / 4) / epochs
    assert np.argmax(learning_rates(places, *flags, at=steps)) == pytest.approx(end_of_warmup, abs=1)


def test_patchmixs_linear_classifier_starts_as_torchs_does(places, tmp_path):
    """PatchMix's released code does so. The other heads have weights of standard deviation 0.01 and zero biases."""
    for protocol in ("patchmix", "moco"):
        run(places["VIT"], "--protocol", protocol, "--lr", 1e-9, *FAST, "--out", tmp_path / protocol)
        torch.manual_seed(0)
        head = torch.nn.Linear(64, 3)
        if protocol == "moco":
            torch.nn.init.normal_(head.weight, std=0.01), torch.nn.init.zeros_(head.bias)
        torch.testing.assert_close(load(tmp_path / protocol / "last.pt")["model"], head.state_dict(), rtol=0, atol=1e-6)


def test_what_differs_has_a_folder_of_its_own(places):
    """The default --out depends on the flags and the encoder. A run's folder and its last.pt are the same encoder."""
    vit, info = places["VIT"], common.load_backbone(places["VIT"])[1]
    flags = "", "--amp off", "--lr 2", "--dataset cifar10", "--label-fraction 0.5", "--norm cifar10"
    lines = [[vit, *words.split()] for words in flags]
    lines += [[vit / f"{name}.pt"] for name in ("epoch-0001", "epoch-0002", "last")]
    each = [eval_linear.parse_args([*map(str, line), "--protocol", "moco"]) for line in lines]
    *outs, last = [eval_linear.complete_args(a, info | dict(dataset=a.dataset or info["dataset"])).out for a in each]
    assert last == outs[0] and len({*outs}) == len(outs)


def groups_of(places, encoder, *flags):
    args = completed(places, "--finetune", *flags, encoder=encoder)
    model = eval_linear.Classifier(common.load_backbone(places[encoder])[0], 64, 3)
    optimizer = eval_linear.make_optimizer(args, model)
    scale = {id(p): (g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(scale) == sum(len(g["params"]) for g in optimizer.param_groups) == len([*model.parameters()])
    return {k.removeprefix("backbone."): scale[id(p)] for k, p in model.named_parameters()}, type(optimizer).__name__


def test_layer_decay(places):
    """In a ViT, block i of 3 has 0.75^(3 - i), the patch embedding 0.75^4, the head 1. ResNets have only two rates."""
    found, optimizer = groups_of(places, "VIT")
    assert optimizer == "AdamW"
    for name, (scale, decay) in found.items():
        part, number, *_ = name.split(".") + [""]
        depth = int(number) if part == "blocks" else {"head": 3, "norm": 2}.get(part, -1)
        assert scale == pytest.approx(0.75 ** (3 - depth)), name
        assert decay == (0.05 if name.endswith("weight") and "norm" not in name else 0), name
    found, optimizer = groups_of(places, "RESNET")
    assert optimizer == "SGD"
    assert found == {name: (pytest.approx(10 / 1e-4 if name.startswith("head.") else 1), 0) for name in found}


@pytest.mark.parametrize("flags", slow_but([""], ["", "--mixup 0 --cutmix 0"]))
def test_a_fine_tuning_is_a_plain_loop(flags, places, tmp_path, monkeypatch):
    """Images are not cropped here. Seed and epoch determine erasing, mixup and drop path. An epoch has two steps."""
    monkeypatch.setattr(eval_linear, "training_transform", lambda *_: lambda image: image)
    flags = [places["VIT"], *f"--finetune --batch-size 16 --epochs 2 --lr 0.05 --seed 2 {flags}".split()]
    run(*flags, "--out", tmp_path)
    args, (encoder, info) = completed(places, *flags[1:]), common.load_backbone(places["VIT"])
    torch.manual_seed(2)
    network, head = common.build_backbone(info, drop_path_rate=0.1), torch.nn.Linear(64, 3)
    network.load_state_dict(encoder.state_dict())
    torch.nn.init.normal_(head.weight, std=0.01), torch.nn.init.zeros_(head.bias)
    model = torch.nn.ModuleDict(dict(backbone=network, head=head)).train()
    pairs = zip(groups_of(places, "VIT")[0].values(), model.parameters(), strict=True)  # see test_layer_decay
    optimizer = torch.optim.AdamW([dict(params=[p], weight_decay=decay, scale=scale) for (scale, decay), p in pairs])
    images = test_eval.pictures(places["DATA"] / "train")
    order = DistributedSampler(images, 1, 0, seed=2)
    loader = DataLoader([*zip(images.array, images.targets, strict=True)], 16, sampler=order, drop_last=True)  # D1
    for epoch in range(2):
        order.set_epoch(epoch)
        timm.utils.random_seed(hash((2, epoch, 0)) % 2**32)
        for step, (pixels, y) in enumerate(loader):
            x = RandomErasing(0.25, mode="pixel", device="cpu")((pixels.permute(0, 3, 1, 2) / 255 - 0.5) / 0.2)
            target = 0.9 * F.one_hot(y, 3) + 0.1 / 3
            if args.mixup:
                x, target = timm.data.Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=3)(x, y)
            for group in optimizer.param_groups:
                group["lr"] = eval_linear.learning_rate(args, epoch + step / 2) * group["scale"]
            optimizer.zero_grad()
            (target * -head(network(x)).log_softmax(1)).sum(1).mean().backward()
            optimizer.step()
    trained = load(tmp_path / "last.pt")["model"]
    for name in trained.keys() - {f"backbone.blocks.{i}.attn.qkv.bias" for i in range(3)}:  # Adam amplifies rounding
        torch.testing.assert_close(trained[name], model.state_dict()[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_drop_path_0_turns_off_the_encoders_own(places, tmp_path):
    """Some encoders, such as timm's Swin, drop paths by default."""
    own = load(places["VIT"] / "backbone.pt")
    own["create_kwargs"]["drop_path_rate"] = 0.5
    torch.save(own, tmp_path / "own.pt")
    flags = ["--dataset", "folder", "--data-dir", places["DATA"], "--finetune", "--drop-path", 0, *FAST]
    for name, encoder in ("one", places["VIT"]), ("two", tmp_path / "own.pt"):
        run(encoder, *flags, "--out", tmp_path / name)
    assert unequal(*(load(tmp_path / name / "last.pt")["model"] for name in ("one", "two"))) == []


@pytest.mark.parametrize("fraction, total, digest", [(0.01, 7, "98da8038"), (0.1, 20, "f0ac84f9")])
def test_label_fractions_are_balanced_and_never_change(fraction, total, digest):
    labels = torch.arange(203) * 5 % 7
    rows, other = (eval_linear.balanced_share(labels, fraction, seed) for seed in (0, 1))
    counts = labels[rows].bincount(minlength=7)
    assert len(rows) == len(other) == total and (rows.diff() > 0).all() and not rows.equal(other)
    assert counts.max() - counts.min() <= 1 and counts.min() >= 1
    assert hashlib.sha256(rows.numpy().astype("<i8").tobytes()).hexdigest().startswith(digest)
    assert {*rows.tolist()} <= {*eval_linear.balanced_share(labels.tolist(), 2 * fraction, 0).tolist()}
    labels = torch.tensor([0] * 30 + [1] * 30 + [2] * 2)  # a class that has too few images gives all
    assert sorted(labels[eval_linear.balanced_share(labels, 0.5, 0)].bincount().tolist()) == [2, 10, 10]


def test_label_files(places, tmp_path, capsys):
    """A line is a file name, with as many parent folders as it takes to identify one image."""
    listed, paths = tmp_path / "list.txt", ["d/a/1.png", "d/b/1.png", "d/b/2.png", "d/b/12.png"]
    for text, rows in (("b/1.png", [1]), ("2.png\n\nd/a/1.png\r\n2.png", [0, 2]), ("12.png", [3])):
        listed.write_text(text)
        assert eval_linear.listed_rows(paths, listed).tolist() == rows
    for text in ("1.png", "b/1.png\nnothing.png", "", ".png"):
        listed.write_text(text)
        assert "list.txt" in refused(capsys, eval_linear.listed_rows, paths, listed)
    assert "none.txt" in refused(capsys, eval_linear.listed_rows, paths, tmp_path / "none.txt")
    flags = [places["VIT"], "--epochs", 1, "--lrs", 0.1, "--no-baselines", "--label-files", listed]
    listed.write_text("a03.png\nc/c05.png\n\nb00.png\na03.png\n")
    result, said = run(*flags), capsys.readouterr().out
    assert "3 of 42 training images" in said and "of the fitted images" in said and "held out" not in said
    own = dict(train=ImageFolder(places["DATA"] / "train"), test=test_eval.pictures(places["DATA"] / "val"))
    assert run(*flags, **own) == result  # also for a user's own dataset, if it has file names
    own["train"] = test_eval.pictures(places["DATA"] / "train")
    assert "list.txt" in refused(capsys, run, *flags, **own)


@pytest.mark.parametrize("classes, factor", [(3, 1), (2, 2)])
def test_the_strength_is_scikit_learns(classes, factor, capsys):
    """It is 1 / C, or 2 / C for two classes, where scikit-learn has one weight vector, the difference of two here."""
    x, y, strength = torch.randn(60, 4, generator=generator(3), dtype=torch.float64), torch.arange(60) % classes, 6.0
    x[:, 0] += y
    weight = eval_linear.logistic_regression(x, y, classes, factor * strength, tolerance=1e-9).requires_grad_()
    penalized = weight[:-1] if classes > 2 else weight[:-1].diff(dim=1)
    loss = F.cross_entropy(x @ weight[:-1] + weight[-1], y, reduction="sum") + strength / 2 * penalized.square().sum()
    assert torch.autograd.grad(loss, weight)[0].abs().max() < 1e-6
    assert not capsys.readouterr().out
    eval_linear.logistic_regression(x, y, classes, strength, iterations=1)
    assert "has not converged for strength 6" in capsys.readouterr().out


def test_the_strength_is_the_best_of_the_validation_part_and_then_all_is_fitted():
    """Per-class accuracy chooses here, and ties go to the middle one. The test above checks the fits."""
    g, y = generator(7), (torch.arange(120) % 5).clamp_max(2)
    noise, centers = torch.randn(120, 20, generator=g), torch.randn(3, 20, generator=g)
    x = torch.cat([(centers[y] + noise)[:, :4], 2 * noise[:, 4:]], 1)
    test_x, rest, check, grid = 2 * x[:7], torch.arange(80), torch.arange(80, 120), [0.1, 0.3, 1.0, 3.0, 10.0, 1e3]
    found = eval_linear.lbfgs_probe(x.clone(), y.clone(), test_x, rest, check, 3, grid, "per_class")
    mean = x[:80].double().mean(0)
    scale = (x[:80] - mean).square().mean().sqrt()
    x, test_x = (x - mean) / scale, (test_x - mean) / scale

    def logits(rows, strength, of):
        weight = eval_linear.logistic_regression(x[rows], y[rows], 3, strength)
        return of @ weight[:-1] + weight[-1]

    fits = [eval_linear.scores(logits(rest, strength, x[check]), y[check], 3) for strength in grid]
    percents = {strength: fit["linear_per_class"] for strength, fit in zip(grid, fits, strict=True)}
    equals = [strength for strength in grid if percents[strength] == max(percents.values())]
    assert found["held_out"] == pytest.approx(percents) and found["chosen"] == equals[len(equals) // 2]
    assert 1 < len(equals) < len(grid)
    expected = logits(torch.arange(120), found["chosen"], test_x).softmax(1)
    torch.testing.assert_close(found["logits"].softmax(1), expected, rtol=1e-5, atol=1e-6)


def test_lbfgs_of_a_checkpoint(places, tmp_path, capsys):
    """If test/ has labels, val/ chooses the strength. Otherwise, or with few labels, part of train/ is held out."""
    flags = [places["VIT"], "--solver", "lbfgs", "--strengths", 1, 10, 100, "--metric", "per_class"]
    result, said = run(*flags), capsys.readouterr().out
    assert list(result) == ["encoder", "untrained"] and "on 18 images" in said and "on all 60" in said
    train, val, (test_x, *_, test_y) = test_eval.parts(places, "train", "val", "test")
    x, *_, y = (torch.cat(pair) for pair in zip(train, val, strict=True))
    found = eval_linear.lbfgs_probe(x, y, test_x, *torch.arange(60).split([42, 18]), 3, [1, 10, 100])
    assert result["encoder"] == pytest.approx(eval_linear.scores(found["logits"], test_y, 3))
    run(*flags, "--label-fraction", 0.2, "--holdout", 0.5)
    said = capsys.readouterr().out
    assert "on 4 images" in said and "on all 8" in said and "test/ is evaluated, not val/: 18 " in said
    data, info = shutil.copytree(places["DATA"], tmp_path / "data"), common.load_backbone(places["VIT"])[1]
    args = eval_linear.parse_args([*map(str, flags), "--dataset", "folder", "--data-dir", str(data)])
    everything = eval_linear.parse_args([*map(str, flags), "--label-fraction", "1"])
    assert eval_linear.open_labeled_data(everything, info)[1] is not None  # val/ chooses, as without the flag
    (data / "test" / "a").rename(tmp_path / "a")
    assert "classes of test/" in refused(capsys, eval_linear.open_labeled_data, args, info)
    for test in (tmp_path / "a", data / "val"):  # images without classes, as in ImageNet; then no val/
        shutil.rmtree(data / "test")
        test.rename(data / "test")
        assert eval_linear.open_labeled_data(args, info)[1] is None


@pytest.fixture(scope="module")
def tuned(places, tmp_path_factory):
    """Return (flags, folder, scores) of a fine-tuning with all random operations, whose data folder has moved."""
    root = tmp_path_factory.mktemp("tuned")
    (root / "moved").symlink_to(places["DATA"])
    flags = [places["VIT"], "--data-dir", root / "moved", "--finetune", "--erase", 0.9, "--label-fraction", 0.9, *FAST]
    return flags, root / "run", run(*flags, "--out", root / "run")


def test_a_run_and_what_it_leaves(tuned, capsys):
    """Repeating the command returns the scores and changes nothing. The fine-tuned encoder can be evaluated."""
    flags, out, result = tuned
    assert evaluate(eval_knn, out, "--k", 3)["encoder"]["knn3_top1"] > 34
    assert "query" in refused(capsys, common.load_backbone, out, "query")  # it is a different encoder now
    assert "data_dir" not in load(out / "backbone.pt")  # the file may be published
    assert common.load_backbone(out)[1]["data_dir"] == str(flags[2])
    assert result["encoder"].keys() == {"finetune_top1", "finetune_per_class"}
    assert [(r["epoch"], "finetune_top1" in r) for r in records(out)] == [(1, False), (2, False), (3, True)]
    assert result["encoder"].items() <= records(out)[2].items()
    assert load(out / "backbone.pt")["classes"] == [*test_eval.CLASSES]
    before, after = load(flags[0] / "backbone.pt")["state_dict"], load(out / "last.pt")["model"]
    assert not [name for name, value in before.items() if torch.equal(value, after[f"backbone.{name}"])]
    files = contents(out)
    assert run(*flags, "--out", out) == result and contents(out) == files


@pytest.mark.slow
def test_an_encoder_that_was_fine_tuned_on_other_images_is_evaluated_on_these(places, tmp_path):
    """The data may include unlabeled images, which fine-tuning does not use."""
    data = shutil.copytree(places["DATA"], tmp_path / "data")
    shutil.copytree(data / "train" / "a", data / "unlabeled")
    flags = ["--dataset", "folder", "--data-dir", data, "--out", tmp_path / "run"]
    run(places["VIT"], "--finetune", *flags, "--epochs", 1, "--batch-size", 14)
    found = evaluate(eval_knn, tmp_path / "run", "--k", 3)
    assert found == evaluate(eval_knn, tmp_path / "run", "--k", 3, *flags[:4])


@pytest.mark.slow
def test_stopped_and_resumed(tuned, tmp_path):
    """A run stopped in an epoch, a save or the evaluation (which costs no epoch) ends bitwise as an undisturbed one."""
    flags, out, result = tuned
    flags = [*flags, "--out", tmp_path]
    for moment, epochs in (("step 2", None), ("step 4", 1), ("save 4", 1), ("knn 1", 3)):
        assert life("eval_linear", [*flags, "--device", "cpu"], moment)[0] == 130 and epochs_of(tmp_path) == epochs
    random.seed(99), np.random.seed(98), torch.manual_seed(97)  # the run must not depend on these
    assert run(*flags) == result
    different = unequal(load(out / "last.pt"), load(tmp_path / "last.pt"))
    assert all(name.startswith("/optimizer/param_groups") and name.endswith("/lr") for name in different)
    assert unequal(load(out / "backbone.pt"), load(tmp_path / "backbone.pt")) == []


def test_the_frozen_encoder_stays_as_it_is_and_learning_is_seen(places, tmp_path, monkeypatch):
    (network, info), before = common.load_backbone(places["RESNET"]), load(places["RESNET"] / "backbone.pt")
    monkeypatch.setattr(common, "load_backbone", lambda *_: (network, info))
    result = run(places["RESNET"], *"--protocol moco --lr 1 --batch-size 16 --epochs 20".split(), "--out", tmp_path)
    assert unequal(network.state_dict(), before["state_dict"]) == [] and not network.training
    assert result["encoder"]["linear_top1"] > 50  # of three classes


def test_another_evaluation_is_refused(places, tmp_path, capsys):
    """A folder holds one evaluation, of an encoder that may have moved. test_continue.py covers what all runs share."""
    train, a, b = (common.Patterns(32, 16, i) for i in range(3))
    vit, flags = places["VIT"], ["--protocol", "moco", *FAST, "--out", tmp_path]
    run(vit, *flags, train=train, test=a)
    capsys.readouterr()
    run(vit / "backbone.pt", *flags, train=train, test=a)
    assert "finished" in capsys.readouterr().out
    assert "test_images was" in refused(capsys, run, vit, *flags, train=train, test=b)
    assert "checkpoint was" in refused(capsys, run, places["RESNET"], *flags, train=train, test=a)
    assert "a run of finetune" in refused(capsys, run, vit, "--finetune", *flags[2:], train=train, test=a)
    assert "peak" in refused(capsys, run, vit, "--finetune", "--lr", 2e-6, train=train, test=a)
    odd = ["--finetune", "--mixup", 0.8, "--batch-size", 15, "--out", tmp_path / "odd"]
    assert "even number" in refused(capsys, run, vit, *odd, train=train, test=a)
    assert completed(places, "--finetune", "--lr", 5e-6).min_lr == 1e-5  # the peak for 1,024 images is 2e-5


def test_augmentation_of_training_images():
    """With --pad, crops are from the padded image; without, of random areas. Flips and RandAugment follow."""
    image, info = tiny.gradient(16, 16), dict(image_size=16, interpolation="bicubic", mean=(0.5, 0.5, 0.5))

    def made(count, pad=3, randaug=0):
        args = argparse.Namespace(pad=pad, randaug=randaug, crop_scale=[0.08, 0.08])
        return [np.array(eval_linear.training_transform(args, info)(Image.fromarray(image))) for _ in range(count)]

    padded = np.pad(image, ((3, 3), (3, 3), (0, 0)))
    crops = [padded[top : top + 16, left : left + 16] for top, left in np.ndindex(7, 7)]
    wanted, found = {x[:, ::flip].tobytes() for x in crops for flip in (1, -1)}, {x.tobytes() for x in made(150)}
    assert found <= wanted and len(found) > len(crops) + 10  # so some are flipped
    small = made(40, pad=0)
    assert np.shape(small) == (40, 16, 16, 3) and np.std(small, (1, 2)).mean() < 0.4 * np.std(image, (0, 1)).mean()
    assert len({view.tobytes() for view in made(150, randaug=10)}) > 120  # no operation fails at the highest magnitude


def play_on_center_crops(flags):
    """Run eval_linear.py without random augmentation, so that any number of processes sees the same batches."""
    pytest.MonkeyPatch().setattr(eval_linear, "training_transform", lambda args, info: lambda image: image)
    play("eval_linear", flags)


@pytest.mark.slow
@pytest.mark.parametrize("encoder, flags, only", [  # only: what is compared. On CPUs, later batch norms differ
    ("RESNET", "--protocol moco --lr 3", ""),
    ("VIT", "--finetune --mixup 0 --cutmix 0 --drop-path 0 --erase 0", ""),
    ("RESNET", "--finetune --lr 1e-9 --head-lr 0", "model/backbone.conv1.1.running_mean"),
])  # fmt: skip
def test_two_processes_train_as_one(places, tmp_path, encoder, flags, only):
    """A frozen protocol, and fine-tuning without random operations, give the same weights, optimizer and scores."""
    flags, outs = [places[encoder], *flags.split(), *FAST, "--device", "cpu", "--out"], (tmp_path / "1", tmp_path / "2")
    for world, out in enumerate(outs, start=1):
        succeed(tmp_path / "log", play_on_center_crops, [([*flags, out],)] * world)
    states = [tiny.flat({k: load(out / "last.pt")[k] for k in ("model", "optimizer")}) for out in outs]
    a, b = ({k: v for k, v in state.items() if only in k} for state in states)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    first, second = ({k: v for k, v in records(out)[-1].items() if k not in tiny.TIMING} for out in outs)
    assert a and (only or first == pytest.approx(second, rel=1e-4))


@pytest.mark.parametrize("flags, hours", [("", 24), ("--solver lbfgs", 24), ("--protocol moco", 1), ("--finetune", 1)])
def test_how_long_a_process_waits_for_the_others(flags, hours, monkeypatch):
    """One process fits features while the others wait. Training waits an hour, as in the other scripts."""

    def init_distributed(device, timeout):
        raise TimeoutError(timeout.total_seconds())

    monkeypatch.setattr(common, "init_distributed", init_distributed)
    with pytest.raises(TimeoutError, match=f"^{hours * 3600}.0$"):
        eval_linear.main(eval_linear.parse_args(["RUN", *flags.split()]))
