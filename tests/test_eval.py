"""eval_knn.py and eval_linear.py end to end on a tiny data set, and the linear probe against a plain loop."""

import argparse
import copy
import gc
import json
import math
import runpy
import shutil
import sys
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from test_common import refused
from test_features import slow_knn

import common
import eval_knn
import eval_linear

SCRIPTS = [eval_knn, eval_linear]


def run(script, *flags):
    return script.main(script.parse_args([*map(str, flags), "--device", "cpu"]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(a run's folder with an encoder of 16 px, a data set of three kinds of pattern, 12 training, 4 test images)."""
    root = tmp_path_factory.mktemp("tiny")
    images, labels = common.make_patterns(160, 16, 0)
    for kind, name in enumerate("abc"):
        for i, image in enumerate(images[labels == kind]):
            folder = root / "data" / ("train" if i < 12 else "val") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{i:02}.png")
    torch.manual_seed(0)
    info = common.backbone_info("vit_micro", 16, 8, "patterns", method="m", encoder="query")
    (root / "run").mkdir()
    common.write_file(root / "run" / "backbone.pt", info | {"state_dict": common.build_backbone(info).state_dict()})
    (root / "run" / "config.json").write_text(json.dumps({"dataset": "folder", "data_dir": str(root / "data")}))
    return root / "run", root / "data"


def parts(checkpoint, data, classes="abc"):
    """(encoder features, normalised pixels, labels) of both parts, image by image, without the project's loaders."""
    encoder, found = common.load_backbone(checkpoint)[0], []
    for part in ("train", "val"):
        files = [(p, label) for label, c in enumerate(classes) for p in sorted((data / part / c).iterdir())]
        x = torch.stack([torch.from_numpy(np.array(Image.open(p))).permute(2, 0, 1) / 255 for p, _ in files])
        x = (x - 0.5) / 0.2
        with torch.no_grad():
            found.append((torch.cat([encoder(i[None]) for i in x]), x.flatten(1), torch.tensor([y for _, y in files])))
    return found


def slow_accuracy(train, test, which, k):
    predicted = slow_knn(train[which], train[2], test[which], k, 0.07, 3).argmax(1)
    return 100 * sum(int(p == y) for p, y in zip(predicted, test[2], strict=True)) / len(predicted)


def test_knn_of_a_checkpoint_and_its_floors(tiny):
    flags = [tiny[0], "--k", 1, 3, 500]
    results = run(eval_knn, *flags)
    assert list(results) == ["encoder", "raw pixels", "untrained"] and results == run(eval_knn, *flags)
    train, test = parts(*tiny)
    for which, name in enumerate(("encoder", "raw pixels")):
        expected = {f"knn{k}_top1": slow_accuracy(train, test, which, k) for k in (1, 3, 36)}  # 36 images vote, not 500
        assert results[name] == pytest.approx(expected)
    assert results["untrained"].keys() == results["encoder"].keys()
    assert list(run(eval_knn, *flags, "--no-floors").items()) == [("encoder", results["encoder"])]


def test_linear_probe_of_a_checkpoint_and_its_floors(tiny, capsys):
    flags = [tiny[0] / "backbone.pt", "--epochs", 5, "--lrs", 0.01, 0.1, 1]
    results = run(eval_linear, *flags)
    assert list(results) == ["encoder", "raw pixels", "untrained"] and results == run(eval_linear, *flags)
    train, test = parts(*tiny)
    for which, name in enumerate(("encoder", "raw pixels")):
        found = eval_linear.linear_probe(train[which], train[2], test[which], 3, epochs=5, lrs=[0.01, 0.1, 1])
        right = (found["logits"].argmax(1) == test[2]).float()
        per_class = 100 * right.view(3, 4).mean(1).mean().item()
        assert results[name] == pytest.approx(dict(linear_top1=100 * right.mean().item(), linear_per_class=per_class))
    capsys.readouterr()
    assert list(run(eval_linear, *flags, "--no-floors", "--lrs", 1e-9, 1e-8)) == ["encoder"]
    assert "3 images choose the rate" in (said := capsys.readouterr().out) and "guess" in said and "edge" not in said
    assert "probe probe" not in said and "{" not in said


def test_the_edge_of_the_grid_is_told_where_it_helps(tiny, capsys, monkeypatch):
    """Not if several values are the best."""
    held_out, logits = {0.1: 20.0, 1.0: 30.0, 10.0: 40.0}, torch.eye(3).repeat(4, 1)
    found = lambda *_, **__: dict(logits=logits, chosen=best, held_out=held_out)  # noqa: E731
    monkeypatch.setattr(eval_linear, "linear_probe", found)
    for best, score, count in ((10.0, 40.0, 1), (10.0, 30.0, 0), (1.0, 50.0, 0)):
        held_out[best] = score
        run(eval_linear, tiny[0], "--holdout", 0.9, "--lrs", 0.1, 1, 10)  # 32 images
        said = capsys.readouterr().out
        assert said.count("the best rate is at the edge of the grid, 0.1 to 10") == count and "guess" not in said


# ------------------------------------------------------------- precision, progress, Ctrl-C


@pytest.fixture
def allow_tf32():
    """Sets whether CUDA's matrix products may use TF32, and afterwards that they may not."""
    yield lambda allowed: setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    torch.backends.cuda.matmul.allow_tf32 = False


class Products(torch.overrides.TorchFunctionMode):
    """Notes for each product of matrices whether TF32 was allowed, by the width of the first factor."""

    def __init__(self):
        super().__init__()
        self.allowed = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul, torch.addmm, F.linear):
            name = "linear" if function is F.linear else "product"
            self.allowed.setdefault(name, set()).add(torch.backends.cuda.matmul.allow_tf32)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("flags", [["--k", 3], ["--epochs", 2], ["--solver", "lbfgs", "--strengths", 1]])
def test_only_what_follows_the_encoder_is_kept_from_tf32(tiny, allow_tf32, flags):
    """The encoder's layers may use TF32. Neighbours, the probe and L-BFGS may not. Afterwards all is as before."""
    allow_tf32(True)
    script = eval_knn if "--k" in flags else eval_linear
    with Products() as products:
        run(script, tiny[0], *flags, "--no-floors")
    assert products.allowed == {"linear": {True}, "product": {False}} and torch.backends.cuda.matmul.allow_tf32


def test_the_protocols_line_tells_the_precision(tiny, allow_tf32, capsys):
    for amp, allowed, said in (("off", False, "float32"), ("off", True, "TF32"), ("bf16", True, "bf16")):
        allow_tf32(allowed)
        run(eval_knn, tiny[0], "--k", 3, "--no-floors", "--amp", amp)
        line = capsys.readouterr().out.splitlines()[0]
        assert line.startswith("encoder vit_micro of m, the query encoder")
        assert line.endswith(said) and ("TF32" in line) == (said == "TF32")


def test_long_work_says_what_it_is_and_how_far(tiny, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(common, "progress", lines.append)
    run(eval_knn, tiny[0], "--batch-size", 10)
    for name in ("encoder", "raw pixels", "untrained"):
        assert f"features of {name}, train: 30 of 36 images" in lines
    assert "neighbours: found for 0 of 12 images" in lines
    run(eval_linear, tiny[0], "--epochs", 3, "--no-floors")
    assert "features of encoder: 0 of 36 images" in lines and "probe: 13 rates, epoch 2 of 3" in lines
    run(eval_linear, tiny[0], "--solver", "lbfgs", "--strengths", 1, 10, "--no-floors")
    assert "L-BFGS: strength 1, 2 of 2, after 10 evaluations of the gradient" in lines


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_is_answered_in_words(tiny, monkeypatch, capsys, script):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "extract_features", interrupted)
    monkeypatch.setattr(sys, "argv", [script.__file__, str(tiny[0]), "--device", "cpu"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(script.__file__, run_name="__main__")
    assert stop.value.code == 130 and "stopped by Ctrl-C" in capsys.readouterr().out


# ------------------------------------------------------------- other data, other encoders


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_untrained_encoder_on_a_set_smaller_than_k(tiny, tmp_path, script):
    """One solid colour a class, two training images and a test image each: solved by anything that sees colour."""
    for c, colour in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255)]):
        for part, count in (("train", 2), ("test", 1)):
            folder = tmp_path / part / str(c)
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (20 + i, 16), colour).save(folder / f"{i}.png")
    flags = [tiny[0], "--random-init", "--dataset", "folder", "--data-dir", tmp_path]
    results = run(script, *flags, "--seed", 3, "--amp", "bf16")
    assert list(results) == ["encoder", "raw pixels"] and set(results["raw pixels"].values()) == {100.0}
    assert results == run(script, *flags, "--seed", 3, "--amp", "bf16")
    other = run(script, tiny[0], "--dataset", "folder", "--data-dir", tmp_path, "--no-floors")  # a transfer
    assert list(other["encoder"]) == list(results["encoder"])


class Own(torch.utils.data.Dataset):
    """A user's data set of the first `count` images in a folder of classes: (PIL image, label), or images alone."""

    def __init__(self, folder, count=100, labelled=True):
        self.files = [(p, label) for label, c in enumerate("abc") for p in sorted((folder / c).iterdir())][:count]
        self.labelled = labelled

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image = Image.open(self.files[i][0]).convert("RGB")
        return (image, self.files[i][1]) if self.labelled else image


def test_own_encoder_and_own_data(tiny, tmp_path, capsys):
    """A user's module and Datasets give the numbers of the same encoder, saved by us, on the same folder."""
    module, info = common.load_backbone(tiny[0])
    own = dict(train=Own(tiny[1] / "train"), test=Own(tiny[1] / "val"))
    args = lambda script, *flags: script.parse_args([*map(str, flags), "--device", "cpu"])  # noqa: E731
    expected = run(eval_knn, tiny[0], "--k", 3)
    assert eval_knn.main(args(eval_knn, tiny[0], "--k", 3), **own) == expected
    state = common.backbone_info(None, 16, None, "patterns", method="m", encoder="query")
    common.write_file(tmp_path / "backbone.pt", state | {"state_dict": module.state_dict()})
    flags = [tmp_path, "--dataset", "folder", "--k", 3]
    found = eval_knn.main(args(eval_knn, *flags), encoder=common.build_backbone(info), **own)
    assert found == {k: v for k, v in expected.items() if k != "untrained"}
    assert "own encoder" in refused(capsys, lambda: eval_knn.main(args(eval_knn, *flags), **own))
    bare = eval_knn.main(args(eval_knn, "--image-size", 16, "--k", 3), encoder=module, **own)
    assert set(bare) == {"encoder", "raw pixels"}
    found = eval_linear.main(args(eval_linear, "--image-size", 16, "--epochs", 2), encoder=module, **own)
    assert set(found) == {"encoder", "raw pixels"}
    for flags in (["--protocol", "moco"], ["--finetune", "--protocol", "patchmix"], ["--finetune"]):
        flags += ["--image-size", 16, "--batch-size", 12, "--epochs", 1, "--pad", 0, "--out", tmp_path / flags[-1]]
        found = eval_linear.main(args(eval_linear, *flags), encoder=module, **own)
        assert found["encoder"] and eval_linear.main(args(eval_linear, *flags), encoder=module, **own) == found
        capsys.readouterr()
    assert all(p.requires_grad for p in module.parameters())  # and its weights: or the run would not have gone on


def test_an_own_encoder_is_fine_tuned_whole(tiny, tmp_path, capsys):
    """Also one that the user has frozen; of its layers nothing is known, so nothing is said of them."""
    module, _ = common.load_backbone(tiny[0])
    module.requires_grad_(False)
    own = dict(encoder=module, train=Own(tiny[1] / "train"), test=Own(tiny[1] / "val"))
    flags = f"--finetune --protocol patchmix --image-size 16 --batch-size 12 --epochs 1 --pad 0 --out {tmp_path / 'a'}"
    parse = lambda more="": eval_linear.parse_args([*flags.split(), "--device", "cpu", *more.split()])  # noqa: E731
    eval_linear.main(parse(), **own)
    trained = torch.load(tmp_path / "a" / "last.pt", weights_only=True)["model"]
    assert not torch.equal(trained["0.patch_embed.proj.weight"], module.patch_embed.proj.weight)
    said = capsys.readouterr().out
    assert "layer_decay 1" in said and "drop_path" not in said
    assert "--drop-path" in refused(capsys, lambda: eval_linear.main(parse("--drop-path 0.3"), **own))


def test_a_run_is_judged_on_the_images_it_was_trained_on(tiny, tmp_path, capsys):
    """Another folder of the same name is not taken for its data. A folder that is given is."""
    run_folder, data = (shutil.copytree(path, tmp_path / path.name) for path in tiny)
    images = {"number": 36, "checksum": common.load_images("folder", data, True).checksum()}
    config = {"dataset": "folder", "data_dir": str(data), "images": images}
    (run_folder / "config.json").write_text(json.dumps(config))
    expected = run(eval_knn, run_folder, "--k", 3)
    (data / "train" / "a" / "00.png").rename(data / "train" / "a" / "99.png")
    assert "other images" in refused(capsys, lambda: run(eval_knn, run_folder, "--k", 3))
    assert run(eval_knn, run_folder, "--data-dir", data, "--k", 3) == expected


def test_own_images_need_no_config_and_a_test_set_a_training_set(tiny, tmp_path, capsys):
    shutil.copy(tiny[0] / "backbone.pt", tmp_path)
    own, argv = dict(train=Own(tiny[1] / "train"), test=Own(tiny[1] / "val")), ["--device", "cpu", "--k", "3"]
    found = eval_knn.main(eval_knn.parse_args([str(tmp_path / "backbone.pt"), *argv]), **own)
    assert found == run(eval_knn, tiny[0], "--k", 3)
    del own["train"]
    for script in SCRIPTS:
        line = refused(capsys, lambda s=script: s.main(s.parse_args([str(tiny[0]), "--device", "cpu"]), **own))
        assert "your training data set is of type NoneType" in line


def test_an_own_encoder_without_a_checkpoint_is_the_first_processs(tiny, monkeypatch):
    """It may be another on each. One process judges it as it is, even if it saves a part of itself only."""
    theirs, _ = common.load_backbone(tiny[0])
    mine, args = copy.deepcopy(theirs), eval_knn.parse_args(["--image-size", "16", "--device", "cpu"])
    torch.nn.init.zeros_(mine.cls_token)
    with monkeypatch.context() as patch:
        patch.setattr(common, "from_first", lambda make: theirs.state_dict())
        patch.setattr(common, "rank_and_world", lambda: (1, 2))
        _, encoder, _ = common.open_encoder(args, mine)
    assert torch.equal(encoder.cls_token, theirs.cls_token) and theirs.cls_token.any()
    monkeypatch.setattr(mine, "state_dict", lambda: {})
    assert common.open_encoder(args, mine)[1] is mine


def launched_alone(monkeypatch):
    """Set torchrun's variables for one process."""
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)


def test_fine_tuning_in_a_process_group_of_one(tiny, tmp_path, monkeypatch):
    """An own encoder may leave parameters unused. DDP is gone before its process group, or it could hang for ever."""
    launched_alone(monkeypatch)
    monkeypatch.setattr(common, "rendezvous", lambda _: iter([(torch.distributed.HashStore(), 0, 1)]))
    wrapped, left, end = [], [], torch.distributed.destroy_process_group

    class Watched(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            wrapped.append(weakref.ref(self))

    def destroy():
        gc.collect()
        left.append([one() is not None for one in wrapped])
        end()

    monkeypatch.setattr(eval_linear, "DistributedDataParallel", Watched)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroy)
    module, _ = common.load_backbone(tiny[0])
    module.unused = torch.nn.Parameter(torch.ones(3))
    flags = f"--finetune --protocol patchmix --image-size 16 --batch-size 12 --epochs 1 --pad 0 --out {tmp_path / 'a'}"
    args = eval_linear.parse_args([*flags.split(), "--device", "cpu"])
    own = dict(encoder=module, train=Own(tiny[1] / "train"), test=Own(tiny[1] / "val"))
    assert "finetune_top1" in eval_linear.main(args, **own)["encoder"] and left == [[False]]


@pytest.mark.parametrize("native", [True, False])
def test_bf16_by_itself_and_tf32_are_of_gpus_that_have_them(native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    libraries = argparse.Namespace(allow_tf32=not native), argparse.Namespace(allow_tf32=not native)
    monkeypatch.setattr(torch.backends.cuda, "matmul", libraries[0])
    monkeypatch.setattr(torch.backends, "cudnn", libraries[1])
    args = argparse.Namespace(device="auto", arch="resnet50")
    common.start(lambda _: None, lambda: args)
    device = common.join_processes(args.device)
    assert device.type == "cuda" and [library.allow_tf32 for library in libraries] == [native] * 2
    for asked, given in {"auto": native, "bf16": True, "off": False}.items():
        assert common.use_bf16(asked, device, "resnet50", [224]) == given


def test_bf16_is_refused_where_torch_computes_it_wrongly(tiny, tmp_path, capsys):
    info = common.backbone_info("resnet_micro", 16, None, method="m", encoder="query")
    common.write_file(tmp_path / "backbone.pt", info | {"state_dict": common.build_backbone(info).state_dict()})
    flags = ["--dataset", "folder", "--data-dir", tiny[1], "--finetune", "--amp", "bf16"]
    assert "--amp bf16 on a CPU" in refused(capsys, lambda: run(eval_linear, tmp_path, *flags))


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_encoder_of_another_image_size_is_one_line(tiny, capsys, script):
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 4))
    own = dict(encoder=flat, train=Own(tiny[1] / "train"), test=Own(tiny[1] / "val"))
    args = script.parse_args(["--image-size", "16", "--device", "cpu"])
    line = refused(capsys, lambda: script.main(args, **own))
    assert "(1, 3, 16, 16)" in line and "--image-size" in line


def test_each_process_group_of_a_program_has_a_store_of_its_own(monkeypatch):
    """Or the second would look for the first one's addresses."""
    launched_alone(monkeypatch)
    shared = torch.distributed.HashStore()
    monkeypatch.setattr(common, "rendezvous", lambda _: iter([(shared, 0, 1)]))
    args, found = eval_knn.parse_args(["--device", "cpu"]), []
    for _ in range(2):
        common.join_processes(args.device)
        store = torch.distributed.distributed_c10d._get_default_store()
        found.append(store.check(["address"]))
        store.set("address", "mine")
        torch.distributed.destroy_process_group()
    assert found == [False, False]


def test_the_dump_is_what_was_judged(tiny, tmp_path, capsys):
    path = tmp_path / "new" / "features"  # the name stays as it was given
    results = run(eval_knn, tiny[0], "--k", 3, "--no-floors", "--dump", path)
    said = capsys.readouterr().out
    with np.load(path, allow_pickle=False) as file:
        data = dict(file)
    names = {f"{part}_{what}" for part in ("train", "test") for what in ("features", "labels", "paths")}
    assert set(data) == names | {"classes", "protocol"} and data["classes"].tolist() == list("abc")
    assert str(data["protocol"]) in said and f"written to {path}" in said
    for part, folder, (x, _, y) in zip(("train", "test"), ("train", "val"), parts(*tiny), strict=True):
        np.testing.assert_allclose(data[f"{part}_features"], x.numpy(), rtol=1e-4, atol=1e-5)
        assert data[f"{part}_features"].dtype == np.float32 and data[f"{part}_labels"].dtype == np.int64
        assert data[f"{part}_paths"].tolist() == [str(p) for p in sorted((tiny[1] / folder).rglob("*.png"))]
        assert data[f"{part}_labels"].tolist() == y.tolist()
    x, y, test_x, test_y = (
        torch.from_numpy(data[f"{part}_{what}"]) for part in ("train", "test") for what in ("features", "labels")
    )
    right = slow_knn(x, y, test_x, 3, 0.07, 3).argmax(1) == test_y
    assert results["encoder"]["knn3_top1"] == pytest.approx(100 * right.float().mean().item())


def test_a_dump_without_labels(tiny, tmp_path, capsys):
    """Of an unlabelled folder, of one class, and of a user's own images: nothing is judged."""
    only = tmp_path / "one class"
    for part in ("train", "val"):
        shutil.copytree(tiny[1] / part / "a", only / part / "a")
    places = [["--dataset", "folder", "--data-dir", tiny[1] / "train" / "a"], ["--data-dir", only]]
    for i, flags in enumerate(places):
        assert "labels" in refused(capsys, run, eval_knn, tiny[0], *flags)
        assert run(eval_knn, tiny[0], *flags, "--dump", tmp_path / f"{i}.npz") == {}
        data = np.load(tmp_path / f"{i}.npz")
        assert data["train_features"].shape == (12, 64) and (data["train_labels"] == [-1, 0][i]).all()
        assert ("test_features" in data) == (i == 1)
    args = eval_knn.parse_args([str(tiny[0]), "--device", "cpu", "--dump", str(tmp_path / "own.npz")])
    assert eval_knn.main(args, train=Own(tiny[1] / "train", labelled=False)) == {}
    data = np.load(tmp_path / "own.npz")
    assert data["train_index"].tolist() == list(range(36)) and (data["train_labels"] == -1).all()
    args.dump, named = str(tmp_path / "named.npz"), Own(tiny[1] / "train")
    named.classes = list("abc")  # as torchvision's sets: without a test set they are no labels
    eval_knn.main(args, train=named)
    assert len(np.load(args.dump)["train_features"]) == 36
    torch.testing.assert_close(torch.from_numpy(data["train_features"]), parts(*tiny)[0][0], rtol=1e-4, atol=1e-5)


MISTAKES = [
    ("RUN --batch-size 0", "--batch-size: 0 is not from"),
    ("RUN --class a b", "unrecognized arguments: --class"),
    ("RUN --seed x", "invalid int value: 'x'"),
    ("RUN --workers 1000000", "--workers: 1000000 is not from"),
    ("DATA", "no checkpoint at"),
    ("RUN --encoder momentum", "no checkpoint at"),
    ("RUN --dataset folder --data-dir DATA/train", "one folder per class"),
    ("RUN --data-dir NONE", "none does not exist"),
    ("RUN --device cuda", "sees no CUDA device"),
]
OF_KNN = [
    ("RUN --temperature 0", "--temperature: 0 is not from"),
    ("RUN --dump RUN", "there already"),
    ("RUN --dump FILE/f.npz", "cannot be written"),
]
MISTAKES = [(script, *mistake) for script in SCRIPTS for mistake in MISTAKES]
MISTAKES += [(eval_knn, *mistake) for mistake in OF_KNN]


@pytest.mark.parametrize("script, flags, words", MISTAKES)
def test_wrong_flags_are_one_line(tiny, capsys, monkeypatch, script, flags, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    places = {"RUN": tiny[0], "DATA": tiny[1], "NONE": tiny[0] / "none", "DATA/train": tiny[1] / "train"}
    places["FILE/f.npz"] = tiny[0] / "backbone.pt" / "f.npz"
    argv = [str(places.get(word, word)) for word in flags.split()]
    monkeypatch.setattr(common, "extract_features", lambda *_, **__: pytest.fail("work was begun"))
    assert words in refused(capsys, lambda: script.main(script.parse_args(argv)))


# ------------------------------------------------------------- the probe


def problem(n=50, m=20, d=6, classes=3, noise=1.0, dtype=torch.float64):
    g = common.generator(n, m)
    centres = 3 * torch.randn(classes, d, generator=g, dtype=dtype)
    y = torch.arange(n + m) % classes
    x = (centres[y] + noise * torch.randn(n + m, d, generator=g, dtype=dtype)) * torch.linspace(0.1, 30, d) + 5
    return x[:n], y[:n], x[n:], y[n:]


def test_the_probe_is_sgd_by_autograd(epochs=7):
    """Full batches, so that no order matters: standardise, then torch's SGD with momentum and cosine, in float64."""
    train_x, train_y, test_x, _ = problem()
    lr = 0.25
    found = eval_linear.linear_probe(train_x, train_y, test_x, 3, epochs=epochs, batch_size=1000, lrs=[lr])
    a, b = ((x - train_x.mean(0)) / train_x.std(0, correction=0) for x in (train_x, test_x))
    layer = torch.nn.Linear(6, 3, dtype=torch.float64)
    torch.nn.init.zeros_(layer.weight), torch.nn.init.zeros_(layer.bias)
    optimiser = torch.optim.SGD(layer.parameters(), lr, momentum=0.9)
    for epoch in range(epochs):
        optimiser.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        optimiser.zero_grad()
        F.cross_entropy(layer(a), train_y).backward()
        optimiser.step()
    torch.testing.assert_close(found["logits"], layer(b).detach(), rtol=1e-9, atol=1e-9)


def test_the_probe_solves_what_is_separable_and_is_deterministic():
    train_x, train_y, test_x, test_y = problem(noise=0.05, dtype=torch.float32)
    first, again = (eval_linear.linear_probe(train_x, train_y, test_x, 3, seed=4, batch_size=16) for _ in range(2))
    assert eval_linear.scores(first["logits"], test_y, 3) == dict(linear_top1=100, linear_per_class=100)
    assert max(first["held_out"].values()) == 100
    assert torch.equal(first.pop("logits"), again.pop("logits")) and first == again


def test_the_probe_never_looks_at_the_test_set():
    train_x, train_y, test_x, _ = problem(noise=4.0)
    a = eval_linear.linear_probe(train_x, train_y, test_x, 3, batch_size=16)
    b = eval_linear.linear_probe(train_x, train_y, torch.cat([test_x[:3], -100 * test_x]), 3, batch_size=16)
    assert (a["chosen"], a["held_out"]) == (b["chosen"], b["held_out"])
    torch.testing.assert_close(a["logits"][:3], b["logits"][:3])
    c = eval_linear.linear_probe(train_x * 7 - 3, train_y, test_x * 7 - 3, 3, batch_size=16)  # standardised away
    torch.testing.assert_close(a["logits"], c["logits"], rtol=1e-6, atol=1e-6)


def test_the_rate_is_the_best_held_out_one_of_the_grid():
    train_x, train_y, test_x, _ = problem(200, noise=6.0)
    grid = [1e-6, 1e-3, 0.1, 300.0]
    options = dict(epochs=5, batch_size=64, holdout=0.3)
    found, *alone = [
        eval_linear.linear_probe(train_x, train_y, test_x, 3, lrs=lrs, **options)
        for lrs in (grid, *([lr] for lr in grid))
    ]
    apart = {k: v for one in alone for k, v in one["held_out"].items()}
    assert found["held_out"] == apart  # the rates don't disturb each other
    assert len(set(found["held_out"].values())) > 1
    best = int(np.argmax(list(found["held_out"].values())))
    assert found["chosen"] == grid[best]
    torch.testing.assert_close(found["logits"], alone[best]["logits"])
    few = eval_linear.linear_probe(train_x[:4], train_y[:4], test_x, 3, epochs=2, lrs=[0.1, 1.0])  # one is held out
    assert few["logits"].isfinite().all()


def test_what_is_held_out_is_not_trained_on_and_then_everything_is():
    """Random labels that many features can memorise: chance on the held-out half, and in the end no training error."""
    g = common.generator(1)
    x, y = torch.randn(60, 200, generator=g), torch.randint(0, 5, (60,), generator=g)
    found = eval_linear.linear_probe(x, y, x, 5, lrs=[0.1, 0.5], holdout=0.5)
    assert max(found["held_out"].values()) < 45 and torch.equal(found["logits"].argmax(1), y)


def test_scores_against_a_loop():
    g = common.generator(8)
    labels, logits = torch.tensor([0] * 20 + [1, 2, 3, 4, 6] * 2), torch.randn(30, 8, generator=g)
    logits[torch.arange(30), labels] += 1.5
    ranked = [sorted(range(8), key=lambda c: -row[c]) for row in logits.tolist()]
    right = [r[0] == y for r, y in zip(ranked, labels.tolist(), strict=True)]
    classes = [[ok for ok, y in zip(right, labels.tolist(), strict=True) if y == c] for c in (0, 1, 2, 3, 4, 6)]
    expected = dict(
        linear_top1=100 * sum(right) / 30,
        linear_top5=100 * sum(y in r[:5] for r, y in zip(ranked, labels.tolist(), strict=True)) / 30,
        linear_per_class=100 * sum(sum(c) / len(c) for c in classes) / 6,
    )
    assert eval_linear.scores(logits, labels, 8) == pytest.approx(expected)
    assert expected["linear_top1"] < expected["linear_top5"] != 100
    assert set(eval_linear.scores(logits[:, :5], labels % 5, 5)) == {"linear_top1", "linear_per_class"}
