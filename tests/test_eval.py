"""eval_knn.py and eval_linear.py end to end on a tiny data set, and the linear probe against a plain loop."""

import copy
import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from test_features import slow_knn
from tiny import load, play, refused, save_encoder, succeed

import common
import eval_knn
import eval_linear

CLASSES, EACH, TEST = "abc", 14, 6


def run(script, *flags, **own):
    return script.main(script.parse_args([*map(str, flags), "--device", "cpu"]), **own)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """{name: path}: images of 16 px whose color mostly tells their class (train/, val/, test/), a ViT, a ResNet."""
    root, rng = tmp_path_factory.mktemp("places"), np.random.default_rng(0)
    for kind, name in enumerate(CLASSES):
        for i in range(EACH + 2 * TEST):
            folder = root / "data" / ("train" if i < EACH else "val" if i < EACH + TEST else "test") / name
            folder.mkdir(parents=True, exist_ok=True)
            color = 80 + 60 * np.eye(3)[kind] + rng.normal(0, 35, 3)
            image = color + rng.normal(0, 12, (16, 16, 3))
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{name}{i:02}.png")
    for arch in ("vit_micro", "resnet_micro"):
        save_encoder(root / arch, common.backbone_info(arch, 16, 8, "patterns", method="m", encoder="query"))
        (root / arch / "config.json").write_text(json.dumps({"dataset": "folder", "data_dir": str(root / "data")}))
    return {"DATA": root / "data", "VIT": root / "vit_micro", "RESNET": root / "resnet_micro"}


def own_images(folder, cached=False):
    files = [(p, label) for label, c in enumerate(CLASSES) for p in sorted((folder / c).iterdir())]
    images = np.stack([np.array(Image.open(p)) for p, _ in files]) if cached else [p for p, _ in files]
    return common.ImageSet(images, [y for _, y in files], CLASSES)


def parts(places, *names):
    """[(ViT's features, normalised pixels, labels) of a part], image by image, without the project's loaders."""
    encoder, found = common.load_backbone(places["VIT"])[0], []
    for images in (own_images(places["DATA"] / name, cached=True) for name in names):
        x = (torch.from_numpy(images.array).permute(0, 3, 1, 2) / 255 - 0.5) / 0.2
        with torch.no_grad():
            found.append((torch.cat([encoder(i[None]) for i in x]), x.flatten(1), torch.from_numpy(images.labels)))
    return found


def test_knn_of_a_checkpoint_and_its_baselines(places):
    flags = [places["VIT"], "--k", 1, 3, 500]
    results, (train, test) = run(eval_knn, *flags), parts(places, "train", "val")
    assert list(results) == ["encoder", "raw pixels", "untrained"]
    for which, name in enumerate(("encoder", "raw pixels")):
        for k in (1, 3, 42):  # 42 images vote, not 500
            predicted = slow_knn(train[which], train[2], test[which], k, 0.07, 3).argmax(1)
            assert results[name][f"knn{k}_top1"] == pytest.approx(100 * (predicted == test[2]).double().mean().item())
        assert 40 < results[name]["knn3_top1"] < 100
    assert list(run(eval_knn, *flags, "--no-baselines").items()) == [("encoder", results["encoder"])]
    alone = run(eval_knn, *flags, "--no-baselines", "--random-init")["encoder"]
    assert alone == results["untrained"] != results["encoder"]


def test_bf16_of_small_images_on_a_cpu_is_refused(places, capsys):
    assert "--amp bf16" in refused(capsys, run, eval_linear, places["RESNET"], "--finetune", "--amp", "bf16")


def test_linear_probe_of_a_checkpoint_and_its_baselines(places):
    results = run(eval_linear, places["VIT"] / "backbone.pt", "--epochs", 5, "--lrs", 0.01, 0.1, 1)
    assert list(results) == ["encoder", "raw pixels", "untrained"]
    train, test = parts(places, "train", "val")
    for which, name in enumerate(("encoder", "raw pixels")):
        found = eval_linear.linear_probe(train[which], train[2], test[which], 3, epochs=5, lrs=[0.01, 0.1, 1])
        right = (found["logits"].argmax(1) == test[2]).float()
        per_class = 100 * right.view(3, TEST).mean(1).mean().item()
        assert results[name] == pytest.approx(dict(linear_top1=100 * right.mean().item(), linear_per_class=per_class))


@pytest.mark.slow
def test_two_processes_evaluate_as_one(places, tmp_path):
    said, dumps = [], [tmp_path / name for name in "12"]
    for world, dump in enumerate(dumps, start=1):
        knn = "eval_knn", [places["VIT"], "--device", "cpu", "--k", 3, "--dump", dump]
        linear = "eval_linear", [places["VIT"], "--device", "cpu", "--epochs", 3]
        first, second = (succeed(tmp_path / "log", play, [words] * world)[0] for words in (knn, linear))
        said.append([line for line in (first + second).splitlines() if " %" in line])
    assert said[0] == said[1] and len(said[0]) == 6
    np.testing.assert_allclose(*(np.load(dump)["train_features"] for dump in dumps), rtol=1e-4, atol=1e-5)


def test_own_encoder_and_own_data(places, tmp_path):
    """A user's module and images give the numbers of the same encoder, saved by us, on the same folder."""
    module, info = common.load_backbone(places["VIT"])
    own = dict(train=own_images(places["DATA"] / "train", cached=True), test=own_images(places["DATA"] / "val"))
    knn, probe = run(eval_knn, places["VIT"], "--k", 3), run(eval_linear, places["VIT"], "--epochs", 2)
    assert run(eval_knn, places["VIT"], "--k", 3, **own) == knn and knn.pop("untrained") and probe.pop("untrained")
    state = common.backbone_info("custom", 16, None, "patterns", method="m", encoder="query")
    torch.save(state | {"state_dict": module.state_dict()}, tmp_path / "backbone.pt")  # without a config.json
    assert run(eval_knn, tmp_path, "--k", 3, encoder=common.build_backbone(info), **own) == knn
    flags = ["--image-size", 16, "--norm", "patterns"]
    assert run(eval_knn, *flags, "--k", 3, encoder=module, **own) == knn
    assert run(eval_linear, *flags, "--epochs", 2, encoder=module, **own) == probe


@pytest.mark.parametrize("recipe", ["--protocol moco", "--finetune --protocol patchmix --pad 0", "--finetune"])
def test_an_own_encoder_stays_as_it_was(recipe, places, tmp_path, group_of_one):
    """A fine-tuning trains a copy, also of frozen layers; some may be unused."""
    module, _ = common.load_backbone(places["VIT"])
    module.unused = torch.nn.Parameter(torch.ones(3))
    before = copy.deepcopy(module.requires_grad_(False).state_dict())
    own = dict(train=own_images(places["DATA"] / "train", True), test=own_images(places["DATA"] / "val"))
    flags = f"{recipe} --image-size 16 --batch-size 12 --epochs 1 --out {tmp_path / 'a'}".split()
    found = run(eval_linear, *flags, encoder=module, **own)
    assert found["encoder"] and run(eval_linear, *flags, encoder=module, **own) == found
    assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())
    assert not any(p.requires_grad for p in module.parameters())
    if "--finetune" in flags:
        trained = load(tmp_path / "a" / "last.pt")["model"]
        assert not torch.equal(trained["0.patch_embed.proj.weight"], before["patch_embed.proj.weight"])


def test_a_run_is_evaluated_on_the_images_it_was_trained_on(places, tmp_path, capsys):
    """Unless a folder is given."""
    folder, data = (shutil.copytree(places[name], tmp_path / name) for name in ("VIT", "DATA"))
    images = common.load_images("folder", data, True).checksum()
    (folder / "config.json").write_text(json.dumps({"dataset": "folder", "data_dir": str(data), "images": images}))
    expected = run(eval_knn, folder, "--k", 3)
    (data / "train" / "a" / "a00.png").rename(data / "train" / "a" / "a99.png")
    assert "trained on" in refused(capsys, run, eval_knn, folder, "--k", 3)
    assert run(eval_knn, folder, "--data-dir", data, "--k", 3) == expected


def test_a_dump_without_labels(places, tmp_path, capsys):
    """Of a folder without classes: nothing is evaluated."""
    folder = places["DATA"] / "train" / "a"
    flags = [places["VIT"], "--dataset", "folder", "--data-dir", folder]
    assert "labels" in refused(capsys, run, eval_knn, *flags)
    assert run(eval_knn, *flags, "--dump", tmp_path / "f.npz") == {}
    data = np.load(tmp_path / "f.npz")
    assert data["train_paths"].tolist() == sorted(map(str, folder.iterdir())) and "test_features" not in data
    assert len(data["train_features"]) == EACH and (data["train_labels"] == -1).all()


def test_the_dump_has_all_images_of_which_those_without_labels_do_not_vote(places, tmp_path):
    path = tmp_path / "features"  # the name stays as it was given
    own = dict(train=own_images(places["DATA"] / "train"), test=own_images(places["DATA"] / "val", cached=True))
    for images in own.values():
        images.labels[1::3] = -1
    found = run(eval_knn, places["VIT"], "--k", 3, 99, "--dump", path, **own)
    assert found == run(eval_knn, places["VIT"], "--k", 3, 28, **{part: x.labelled() for part, x in own.items()})
    data = dict(np.load(path, allow_pickle=False))
    names = {f"{part}_{what}" for part in own for what in ("features", "labels")}
    assert set(data) == names | {"train_paths", "classes", "protocol"} and data["classes"].tolist() == list(CLASSES)
    assert data["train_paths"].tolist() == [own["train"].path(i) for i in range(3 * EACH)]
    for (part, images), (x, *_) in zip(own.items(), parts(places, "train", "val"), strict=True):
        assert data[f"{part}_labels"].tolist() == images.labels.tolist()
        np.testing.assert_allclose(data[f"{part}_features"], x.numpy(), rtol=1e-4, atol=1e-5)


def problem(n=50, m=20, d=6, classes=3, noise=1.0):
    g, dtype = common.generator(n, m), torch.float64
    centers = 3 * torch.randn(classes, d, generator=g, dtype=dtype)
    y = torch.arange(n + m) % classes
    x = (centers[y] + noise * torch.randn(n + m, d, generator=g, dtype=dtype)) * torch.linspace(0.1, 30, d) + 5
    return x[:n], y[:n], x[n:], y[n:]


def test_the_probe_is_sgd_by_autograd(epochs=7, lr=0.25, seed=4):
    """Standardise, then torch's SGD with momentum, and a cosine over all steps, in float64. In the end on all rows."""
    train_x, train_y, test_x, _ = problem()
    found = eval_linear.linear_probe(train_x, train_y, test_x, 3, seed, epochs, batch_size=16, lrs=[lr])
    a, b = ((x - train_x.mean(0)) / train_x.std(0, correction=0) for x in (train_x, test_x))
    layer = torch.nn.Linear(6, 3, dtype=torch.float64)
    torch.nn.init.zeros_(layer.weight), torch.nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr, momentum=0.9)
    rest, check = eval_linear.hold_out(train_y, 0.1, seed)
    for epoch in range(epochs):
        order = torch.randperm(50, generator=common.generator(seed, eval_linear.STREAM_PROBE, epoch))
        for i, rows in enumerate(torch.cat([check, rest])[order].split(16)):
            optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * (epoch + i / 4) / epochs))
            optimizer.zero_grad()
            F.cross_entropy(layer(a[rows]), train_y[rows]).backward()
            optimizer.step()
    torch.testing.assert_close(found["logits"], layer(b).detach(), rtol=1e-9, atol=1e-9)


def test_the_learning_rate_is_the_best_held_out_one_of_the_grid():
    train_x, train_y, test_x, _ = problem(200, noise=6.0)
    grid, options = [1e-6, 1e-3, 0.1, 300.0], dict(epochs=5, batch_size=64, holdout=0.3)
    grids = [grid, *([lr] for lr in grid)]
    found, *alone = (eval_linear.linear_probe(train_x, train_y, test_x, 3, lrs=lrs, **options) for lrs in grids)
    percents = [one["held_out"][lr] for one, lr in zip(alone, grid, strict=True)]
    assert [*found["held_out"].values()] == percents and len(set(percents)) > 1  # they don't disturb each other
    best = int(np.argmax(percents))
    assert found["chosen"] == grid[best]
    torch.testing.assert_close(found["logits"], alone[best]["logits"])


def test_no_class_is_held_out_as_a_whole():
    """With one image per class none is held out, and the fitted ones choose."""
    labels = torch.tensor([0] * 50 + [1] * 2 + [2])
    for seed in range(20):
        rest, check = eval_linear.hold_out(labels, 0.9, seed)
        assert sorted(torch.cat([rest, check]).tolist()) == [*range(53)] and len(check) == 47
        assert labels[rest].bincount().min() >= 1
    assert [len(rows) for rows in eval_linear.hold_out(torch.arange(5), 0.5, 0)] == [5, 0]
    x, y, test_x, test_y = problem(3, 60, noise=0.3)
    found = eval_linear.linear_probe(x, y, test_x, 3, lrs=[1e-12, 0.01, 0.1, 1.0], epochs=20)
    assert max(found["held_out"].values()) == 100 and found["chosen"] > 1e-3
    assert eval_linear.scores(found["logits"], test_y, 3)["linear_top1"] > 90


@pytest.mark.parametrize("value", [0, -2.1179, 0.1, 14.62])
def test_a_feature_that_never_varies_in_training_changes_nothing(value):
    """A border of digits or X-rays, a dead unit. In some test images it does vary."""
    x, y, test_x, _ = (a.float() if a.is_floating_point() else a for a in problem(1000, 100, noise=4.0))
    plain = eval_linear.linear_probe(x, y, test_x, 3, epochs=2)
    column, test_column = (torch.full((len(a), 1), value, dtype=torch.float32) for a in (x, test_x))
    test_column[::10] += 1
    wide = eval_linear.linear_probe(torch.cat([x, column], 1), y, torch.cat([test_x, test_column], 1), 3, epochs=2)
    assert wide["held_out"] == plain["held_out"]
    torch.testing.assert_close(wide["logits"], plain["logits"], rtol=1e-4, atol=1e-4)


def test_scores_against_a_loop():
    g = common.generator(8)
    labels, logits = torch.tensor([0] * 20 + [1, 2, 3, 4, 6] * 2), torch.randn(30, 8, generator=g)
    logits[torch.arange(30), labels] += 1.5
    ranked = [sorted(range(8), key=lambda c: -row[c]) for row in logits.tolist()]
    top1, top5 = (np.array([y in r[:k] for r, y in zip(ranked, labels.tolist(), strict=True)]) for k in (1, 5))
    expected = dict(linear_top1=100 * top1.mean(), linear_top5=100 * top5.mean())
    expected["linear_per_class"] = 100 * np.mean([top1[labels == c].mean() for c in (0, 1, 2, 3, 4, 6)])
    assert eval_linear.scores(logits, labels, 8) == pytest.approx(expected)
    assert expected["linear_top1"] < expected["linear_top5"] != 100
    assert "linear_top5" not in eval_linear.scores(logits[:, :5], labels % 5, 5)
