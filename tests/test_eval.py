"""eval_knn.py and eval_linear.py run end to end on a tiny dataset, and the linear probe matches a plain loop."""

import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Pictures, generator
from PIL import Image
from test_features import slow_knn
from tiny import evaluate, load, play, refused, save_encoder, succeed
from torchvision.datasets import ImageFolder

import common
import eval_knn
import eval_linear

CLASSES, EACH, TEST = "abc", 14, 6
SCRIPTS = [(eval_knn, "--k 3"), (eval_linear, "--epochs 2")]


def seeded(function, *args, **options):
    torch.manual_seed(4)
    return function(*args, **options)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Return {name: path}: images of 16 px, whose color mostly reveals their class, and runs of a ViT and a ResNet."""
    root, rng = tmp_path_factory.mktemp("places"), np.random.default_rng(0)
    for kind, name in enumerate(CLASSES):
        for i in range(EACH + 2 * TEST):
            folder = root / "data" / ("train" if i < EACH else "val" if i < EACH + TEST else "test") / name
            folder.mkdir(parents=True, exist_ok=True)
            image = 80 + 60 * np.eye(3)[kind] + rng.normal(0, 35, 3) + rng.normal(0, 12, (16, 16, 3))
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{name}{i:02}.png")
    images = common.fingerprint(common.load_dataset("folder", root / "data"))
    for arch in ("vit_micro", "resnet_micro"):
        info = common.backbone_info(arch, 16, 8, "patterns") | dict(method="m", encoder="query")
        save_encoder(root / arch, info | dict(dataset="folder", images=images))
        (root / arch / "config.json").write_text(json.dumps(dict(data_dir=str(root / "data"))))
    return {"DATA": root / "data", "VIT": root / "vit_micro", "RESNET": root / "resnet_micro"}


def pictures(folder):
    """Return the images of a folder as a dataset in memory."""
    images, targets = zip(*((np.array(image), label) for image, label in ImageFolder(folder)), strict=True)
    return Pictures(np.stack(images), list(targets), [*CLASSES])


def parts(places, *names, seed=0):
    """Return (ViT's features, normalized pixels, untrained ViT's features, labels) of each part, without a loader."""
    (encoder, info), found = common.load_backbone(places["VIT"]), []
    torch.manual_seed(seed)
    untrained = common.build_backbone(info).eval()
    for images in (pictures(places["DATA"] / name) for name in names):
        x = (torch.from_numpy(images.array).permute(0, 3, 1, 2) / 255 - 0.5) / 0.2
        with torch.no_grad():
            one, two = (torch.cat([network(i[None]) for i in x]) for network in (encoder, untrained))
        found.append((one, x.flatten(1), two, torch.tensor(images.targets)))
    return found


def test_knn_of_a_checkpoint_and_its_baselines(places):
    flags = [places["VIT"], "--k", 1, 3, 500]
    results, (train, test) = evaluate(eval_knn, *flags), parts(places, "train", "val")
    assert list(results) == ["encoder", "raw pixels", "untrained"]
    for which, name in enumerate(results):
        for k in (1, 3, 500):  # if k is 500, all 42 images vote
            predicted = slow_knn(train[which], train[3], test[which], k, 0.07, 3).argmax(1)
            assert results[name][f"knn{k}_top1"] == pytest.approx(100 * (predicted == test[3]).double().mean().item())
    assert evaluate(eval_knn, *flags, "--no-baselines") == {"encoder": results["encoder"]}


def test_linear_probe_of_a_checkpoint_and_its_baselines(places, capsys):
    flags = ["--epochs", 5, "--lrs", 0.01, 0.1, 1, "--holdout", 0.5, "--seed", 4]
    with torch.autocast("cpu", torch.bfloat16):  # the caller's mode changes nothing
        results = evaluate(eval_linear, places["VIT"] / "backbone.pt", *flags)
    assert list(results) == ["encoder", "raw pixels", "untrained"]
    out = capsys.readouterr().out
    said = [line for line in out.splitlines() if "held out" in line]
    assert "--lrs 0.01," in said[0] and out.count("widen it") == 1  # baselines get no such warning
    train, test = parts(places, "train", "val", seed=4)
    for which, name in enumerate(results):
        options = dict(lrs=[0.01, 0.1, 1], epochs=5, holdout=0.5)
        found = seeded(eval_linear.linear_probe, train[which], train[3], test[which], 3, **options)
        assert results[name] == pytest.approx(eval_linear.scores(found["logits"], test[3], 3))
        best = found["chosen"]
        assert f"--lrs {best:.3g}, {found['held_out'][best]:.2f}% of those held out" in said[which]


@pytest.mark.slow
def test_two_processes_evaluate_as_one(places, tmp_path):
    said, dumps = [], [tmp_path / name for name in "12"]
    for world, dump in enumerate(dumps, start=1):
        words = [("eval_knn", "--k", 3), ("eval_knn", "--dump", dump), ("eval_linear", "--epochs", 3)]
        each = [(script, [places["VIT"], "--device", "cpu", *flags]) for script, *flags in words]
        lines = [succeed(tmp_path / "log", play, [call] * world)[0].splitlines() for call in each]
        said.append([line for line in sum(lines, []) if "%" in line])
    assert said[0] == said[1] and len(said[0]) == 6
    np.testing.assert_allclose(*(np.load(dump)["train_features"] for dump in dumps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("script, flags", [(eval_knn, ""), (eval_linear, "--finetune --epochs 1 --batch-size 12")])
def test_an_evaluation_leaves_the_caller_as_it_was(script, flags, places, here):
    """An evaluation keeps the caller's random state and inference mode, even if it fails because of a missing image."""
    own = dict(train=ImageFolder(places["DATA"] / "train"), test=pictures(places["DATA"] / "val"))
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()[1]
    with torch.inference_mode():
        assert evaluate(script, places["VIT"], *flags.split(), **own)["encoder"]
        assert torch.is_inference_mode_enabled()
    own["train"].samples[5] = (str(here / "none.png"), 0)
    with pytest.raises(OSError, match="none.png"):
        evaluate(script, places["VIT"], *flags.split(), "--seed", 1, **own)  # another seed starts another run
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()[1]
    assert all(map(np.array_equal, before, after))


@pytest.mark.parametrize("script, flags", [*SCRIPTS, (eval_linear, "--protocol moco --epochs 2 --batch-size 16")])
def test_own_data_give_the_scores_of_the_same_folder(script, flags, places, here, monkeypatch):
    """Images with the label -1 are ignored. Labels are read from `targets`, of any integer type, not from items."""
    flags = flags.split()
    own = dict(train=pictures(places["DATA"] / "train"), test=pictures(places["DATA"] / "val"))
    monkeypatch.setattr(Pictures, "__getitem__", lambda images, i: [Image.fromarray(images.array[i])])
    for images in own.values():
        images.array = np.concatenate([images.array, images.array[:5]])
        images.targets = np.int8([*images.targets, *[-1] * 5])
    outs = [["--out", here / name] * ("--protocol" in flags) for name in ("own", "folder")]
    found = evaluate(script, places["VIT"], *flags, *outs[0], **own)
    assert found == evaluate(script, places["VIT"], *flags, *outs[1])
    own["test"].array = 255 - own["test"].array  # the labels are the same, but old scores are not reused
    assert found != evaluate(script, places["VIT"], *flags, *outs[0], **own)


def test_a_run_is_evaluated_on_the_images_it_was_trained_on(places, tmp_path, capsys):
    """The folder may move. Changed images, or a backbone.pt that does not name its dataset, need --dataset."""
    expected, data = evaluate(eval_knn, places["VIT"], "--k", 3), shutil.copytree(places["DATA"], tmp_path / "data")
    flags, state = ["--k", 3, "--data-dir", data], load(places["VIT"] / "backbone.pt")
    assert evaluate(eval_knn, places["VIT"], *flags) == expected
    (data / "train" / "a" / "a00.png").rename(data / "train" / "a" / "a99.png")
    unnamed = {name: state[name] for name in state.keys() - {"dataset", "data_dir", "images"}}
    torch.save(unnamed, tmp_path / "backbone.pt")
    for folder, words in (places["VIT"], "trained on"), (tmp_path, "--dataset"):
        assert words in refused(capsys, evaluate, eval_knn, folder, *flags)
        assert evaluate(eval_knn, folder, *flags, "--dataset", "folder") == expected
    for text in ("[]", "{}", "no JSON"):  # another project's config.json
        (tmp_path / "config.json").write_text(text)
        assert common.load_backbone(tmp_path)[1].get("data_dir") is None


def test_a_dump_has_all_images_also_those_without_labels(places, tmp_path, capsys):
    path = tmp_path / "features"  # no extension is added to the name
    own = dict(train=ImageFolder(places["DATA"] / "train"), test=pictures(places["DATA"] / "val"))
    for images in own.values():
        images.targets[1::3] = [-1] * len(images.targets[1::3])
        images.classes = [("a", "an a"), *CLASSES[1:]]  # as torchvision's ImageNet has them
    assert evaluate(eval_knn, places["VIT"], "--dump", path, **own) == {}
    data = dict(np.load(path, allow_pickle=False))
    names = {f"{part}_{what}" for part in own for what in ("features", "labels", "classes")}
    assert set(data) == names | {"train_paths", "protocol"}
    assert data["train_classes"].tolist() == data["test_classes"].tolist() == ["('a', 'an a')", *CLASSES[1:]]
    protocol = json.loads(str(data["protocol"]))
    assert (protocol["dataset"], protocol["images"]) == (None, common.fingerprint(own["train"]))  # not the training's
    assert protocol["image_size"] == load(places["VIT"] / "backbone.pt")["image_size"]
    assert data["train_paths"].tolist() == [path for path, _ in own["train"].samples]
    for (part, images), (x, *_) in zip(own.items(), parts(places, "train", "val"), strict=True):
        assert data[f"{part}_labels"].tolist() == images.targets
        np.testing.assert_allclose(data[f"{part}_features"], x.numpy(), rtol=1e-4, atol=1e-5)
    folder = places["DATA"] / "train" / "a"
    flags = [places["VIT"], "--dataset", "folder", "--data-dir", folder, "--dump"]
    assert "exists" in refused(capsys, evaluate, eval_knn, *flags, path)
    assert evaluate(eval_knn, *flags, tmp_path / "f.npz") == {}
    data = np.load(tmp_path / "f.npz")
    assert data["train_paths"].tolist() == sorted(map(str, folder.iterdir())) and "test_features" not in data
    assert len(data["train_features"]) == EACH and (data["train_labels"] == -1).all()


def problem(n=50, m=20, noise=1.0):
    """Return six-dimensional features and labels of three classes, n rows to fit and m rows to test."""
    g, dtype = generator(n + 1000 * m), torch.float64
    centers = 3 * torch.randn(3, 6, generator=g, dtype=dtype)
    y = torch.arange(n + m) % 3
    x = (centers[y] + noise * torch.randn(n + m, 6, generator=g, dtype=dtype)) * torch.linspace(0.1, 30, 6) + 5
    return x[:n], y[:n], x[n:], y[n:]


def test_the_probe_is_sgd_by_autograd(epochs=7, lr=0.25):
    """The probe standardizes features and trains like SGD with momentum and a cosine schedule, finally on all rows."""
    train_x, train_y, test_x, _ = problem()
    for x in (train_x, test_x):
        x[:, 0] += 1000  # it varies by a thousandth of its mean
    with_gradient = [x.clone().requires_grad_() for x in (train_x, test_x)]  # the caller's gradients have no effect
    found = seeded(eval_linear.linear_probe, with_gradient[0], train_y, with_gradient[1], 3, [lr], epochs, 16)
    a, b = ((x - train_x.mean(0)) / train_x.std(0, correction=0) for x in (train_x, test_x))

    def fit(rows, x):
        weight, bias = (torch.zeros(*size, dtype=torch.float64, requires_grad=True) for size in ((3, 6), (3,)))
        optimizer = torch.optim.SGD([weight, bias], momentum=0.9)
        for epoch in range(epochs):
            batches = rows[torch.randperm(len(rows))].split(16)
            for i, batch in enumerate(batches):
                cosine = (1 + math.cos(math.pi * (epoch + i / len(batches)) / epochs)) / 2
                optimizer.param_groups[0]["lr"] = lr * cosine
                optimizer.zero_grad()
                F.cross_entropy(F.linear(a[batch], weight, bias), train_y[batch]).backward()
                optimizer.step()
        return F.linear(x, weight, bias).detach()

    folds, right, total = seeded(eval_linear.hold_out, train_y, 0.1), 0, 0
    for rest, check in folds:
        right += (fit(rest, a[check]).argmax(1) == train_y[check]).sum().item()
        total += len(check)
    torch.testing.assert_close(found["logits"], fit(torch.arange(len(a)), b), rtol=1e-9, atol=1e-9)
    assert len(folds) == 10 and total == 47 and found["held_out"] == {lr: pytest.approx(100 * right / total)}


def test_the_learning_rate_is_the_best_held_out_one_of_the_grid():
    """Each learning rate of a grid gives the result that it gives alone, and the best on held-out rows is chosen."""
    data, options = problem(200, noise=6.0)[:3], dict(epochs=5, batch_size=64, holdout=0.3)
    grid = [1e-6, 1e-3, 0.1, 300.0]
    grids = [np.array(grid), *([lr] for lr in grid)]
    found, *alone = [seeded(eval_linear.linear_probe, *data, 3, lrs, **options) for lrs in grids]
    percents = [one["held_out"][lr] for one, lr in zip(alone, grid, strict=True)]
    assert [*found["held_out"].values()] == percents and len(set(percents)) > 1
    best = percents.index(max(percents))
    assert found["chosen"] == grid[best]
    torch.testing.assert_close(found["logits"], alone[best]["logits"])


@pytest.mark.parametrize("counts, fraction, sizes", [
    ([107, 107, 106], 0.1, [32] * 9 + [29]), ([2000, 1000, 1000], 0.1, [400]), ([600, 500], 0.1, [110] * 4),
    ([50, 2, 1], 0.9, [47, 3]), ([1, 1, 1], 0.5, [0]),
])  # fmt: skip
def test_few_rows_choose_by_cross_validation(counts, fraction, sizes):
    """Folds are added until 400 rows, or all but one per class, have been held out. That one is always fitted."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    for _ in range(20):
        folds = eval_linear.hold_out(labels, fraction)
        assert [len(held) for _, held in folds] == sizes
        for rest, held in folds:
            assert torch.cat([rest, held]).sort().values.equal(torch.arange(len(labels)))
            assert labels[rest].unique().tolist() == [*range(len(counts))]
        held = torch.cat([held for _, held in folds])
        assert len(held.unique()) == len(held)
        assert len(held) == 0 or not held.equal(held.sort().values)  # in random order


@pytest.mark.parametrize("value", [0, -2.1179, 0.1, 14.62])
def test_a_feature_that_never_varies_in_training_changes_nothing(value):
    """A constant feature, such as a digit's border or a dead unit, has no effect, even if it varies in test images."""
    x, y, test_x, _ = (a.float() if a.is_floating_point() else a for a in problem(1000, 100, noise=4.0))
    plain = seeded(eval_linear.linear_probe, x, y, test_x, 3, epochs=2)
    x, test_x = (F.pad(a, (0, 1), value=value) for a in (x, test_x))
    test_x[::10, -1] += 1
    wide = seeded(eval_linear.linear_probe, x, y, test_x, 3, epochs=2)
    assert wide["held_out"] == plain["held_out"]
    torch.testing.assert_close(wide["logits"], plain["logits"], rtol=1e-4, atol=1e-4)


def test_scores_against_a_loop():
    labels, logits = torch.tensor([0] * 20 + [1, 2, 3, 4, 6] * 2), torch.randn(30, 8, generator=generator(8))
    logits[torch.arange(30), labels] += 1.5
    ranked = [sorted(range(8), key=lambda c: -row[c]) for row in logits.tolist()]
    top1, top5 = (np.array([y in r[:k] for r, y in zip(ranked, labels.tolist(), strict=True)]) for k in (1, 5))
    expected = dict(linear_top1=100 * top1.mean(), linear_top5=100 * top5.mean())
    expected["linear_per_class"] = 100 * np.mean([top1[labels == c].mean() for c in (0, 1, 2, 3, 4, 6)])
    assert eval_linear.scores(logits, labels, 8) == pytest.approx(expected)
    assert "linear_top5" not in eval_linear.scores(logits[:, :5], labels % 5, 5)
