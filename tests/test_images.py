"""Datasets read the right images, reject folders with a wrong layout, and are identified by a fingerprint."""

import argparse
import base64
import fcntl
import os
import re
import shutil
import sys

import check_images
import numpy as np
import pytest
import timm
import torch
import torchvision
from conftest import INFO, Pictures
from PIL import Image
from tiny import gradient, refused, write_tree
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import common
import moco_jointcrop

BEST = dict(quality=100, subsampling=0)  # of a JPEG


def read(path):
    image = common.load_image(path)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("mode", ["RGB png", "RGB JPG", "L jpg", "P png", "P gif", "RGBA png", "1 png", "CMYK jfif"])
def test_images_of_any_mode_are_read_as_rgb(tmp_path, mode):
    mode, extension = mode.split()
    image, path = Image.fromarray(gradient()).convert(mode), tmp_path / f"x.{extension}"
    image.save(path, **BEST)
    assert abs(read(path) - np.asarray(image.convert("RGB"))).max() <= 6 * extension.startswith(("J", "j"))


def test_an_image_is_rotated_as_its_exif_data_say(tmp_path):
    """Damage in EXIF data, such as meaningless bytes, or text where Pillow needs a number, is ignored."""
    exif, rotated = Image.Exif(), np.rot90(gradient(), -1)
    exif[0x0112], exif[0x010F] = 6, "make"  # a quarter turn
    wrong_type = exif.tobytes().replace(b"\x01\x0f", b"\x01\x00")  # the width is "make"
    for data, expected in (exif, rotated), (wrong_type, rotated), (b"Exif\0\0" + b"garbage" * 5, gradient()):
        Image.fromarray(gradient()).save(tmp_path / "x.jpg", exif=data, **BEST)
        image = read(tmp_path / "x.jpg")
        assert image.shape == expected.shape and abs(image - expected).max() <= 6


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "CMYK"])
def test_images_of_ones_own_of_any_mode_become_rgb_before_they_are_resized(mode):
    """Images become RGB first, as Pillow resizes palettes by the nearest pixel and multiplies colors by alpha."""
    image = Image.fromarray(gradient(80, 80)).convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(gradient(80, 80)[..., 0]))
    found = []
    for own in (image, image.convert("RGB")):
        torch.manual_seed(0)
        views, _ = common.Views([(own, 0)], [v2.Resize(20), v2.RandomResizedCrop(20)])[0]
        joint, _ = moco_jointcrop.JointViews([(own, 0)], moco_jointcrop.JointCrop(20), None)[0]
        features = common.extract_features(torch.nn.Flatten(), [(own, 0)], INFO, torch.device("cpu"))
        found.append([*views, *joint, features])
    assert {view.dtype for view in (*views, *joint)} == {torch.uint8}
    assert all(torch.equal(one, two) and one.is_contiguous() for one, two in zip(*found, strict=True))


def test_an_image_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    """The error names unreadable images, and any with more than 8 bits per channel, whose values Pillow would clip."""
    for name, dtype in ("gray.png", "uint16"), ("float.tif", "f4"):
        Image.fromarray(np.arange(120, dtype=dtype).reshape(12, 10)).save(tmp_path / name)
    deep = [  # RGB and RGBA PNG files of one pixel with 16 bits per channel, which Pillow can read but not write
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAIAAADA54+dAAAADElEQVR4nGPg/w+CAAmyAysEKUClAAAAAElFTkSuQmCC",
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAYAAABPhRjKAAAADElEQVR4nGPg/w+BABElBDlTtASBAAAAAElFTkSuQmCC",
    ]
    for i, data in enumerate(deep):
        (tmp_path / f"deep{i}.png").write_bytes(base64.b64decode(data))
    Image.fromarray(gradient(80, 80)).save(tmp_path / "whole.jpg")
    (tmp_path / "half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:700])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.webp").touch()
    images = common.load_dataset("folder", tmp_path)
    assert len(images) == 8
    for i, (path, _) in enumerate(images.samples):
        if not path.endswith("whole.jpg"):
            with pytest.raises(OSError, match=f"{re.escape(path)}.*check_images"):
                images[i]
    for own in (Image.fromarray(np.zeros((4, 4), "uint16")), Image.open(tmp_path / "deep0.png"), torch.zeros(3, 4, 4)):
        with pytest.raises(ValueError, match="8 bits|expected a PIL image, not Tensor"):  # in the user's own dataset
            common.Views([(own, 0)], [])[0]


def test_bad_images_are_listed(tmp_path, capsys):
    write_tree(tmp_path, ["train/a", "train/b", "val/a"], count=2)
    bad = [str(tmp_path / name) for name in ("train/b/1.png", "val/a/0.png")]
    for path in bad:
        os.truncate(path, 40)
    with pytest.raises(SystemExit) as stop:
        check_images.main(str(tmp_path))
    *lines, summary = capsys.readouterr().out.splitlines()
    assert stop.value.code == 1 and summary == "6 images, 2 cannot be read"
    assert all(path in line for path, line in zip(bad, lines, strict=True))


def test_the_images_of_the_demo_do_not_change():
    """The README's numbers depend on these images. The means are weighted so that no part of a formula cancels."""
    patterns = common.Patterns(40, 32, seed=0)
    images, labels = patterns.images, patterns.targets
    weight = np.linspace(-1, 1, 32)[:, None, None] * np.linspace(1, 2, 32)[:, None] * np.array([1, -2, 0.5])
    means = [(images[labels == kind] * weight).mean() for kind in range(10)]
    assert means == pytest.approx([1.311, 0.155, -3.062, 1.426, 1.165, -2.189, -0.505, -1.376, 0.222, -0.430], abs=0.01)
    for train, total, first in (True, 100330157, [8, 5, 4, 1, 5]), (False, 25062133, [4, 9, 3, 4, 8]):
        patterns = common.load_dataset("patterns", train=train, image_size=8)
        assert patterns.images.sum(dtype=np.int64) == pytest.approx(total, rel=1e-5)
        assert patterns.targets[:5].tolist() == first and patterns.classes == list(common.PATTERNS)
        image, label = patterns[3]
        assert image.size == (8, 8) and image.mode == "RGB" and label == first[3]


@pytest.mark.parametrize("name, test_name", [("folder", "val"), ("imagenet", "test"), ("cifar10", "validation")])
def test_a_layout_of_class_folders_is_read_whatever_the_name(tmp_path, test_name, name, capsys):
    """Hidden and system files are ignored, others counted by extension. Classes may be links, and begin with # or @."""
    parts = {"train/@b": 3, "../elsewhere": 2, "unlabeled/x/y": 4, f"{test_name}/#a": 1, f"{test_name}/@b": 2}
    skipped = [".git", "train/.x", "train/@b/@eaDir", "train/lost+found", "train/#recycle", "$RECYCLE.BIN"]
    skipped += ["train/@Recycle", "train/#snapshot"]
    root = write_tree(tmp_path / "data", parts | dict.fromkeys(skipped, 1))
    (root / "train" / "#a").symlink_to(tmp_path / "elsewhere")
    folder = root / "train" / "@b"
    for other in ("notes.txt", "notes.TXT", "README", "._0.png"):
        (folder / other).write_text("not an image")
    os.mkfifo(folder / "pipe.png")
    (root / "docs").mkdir()
    (folder / "2.png").rename(folder / "$2.PNG")
    train, test = (common.load_dataset(name, root, part) for part in (True, False))
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "2 .txt" in said and "1 without an extension" in said
    assert train.classes == test.classes == ["#a", "@b"]
    assert train.targets.tolist() == [0, 0, 1, 1, 1, -1, -1, -1, -1] and test.targets.tolist() == [0, 1, 1]
    assert np.array_equal(train[1][0], Image.open(tmp_path / "elsewhere" / "1.png")) and train[1][1] == 0
    labeled = common.with_labels(train)
    assert labeled.samples == train.samples[:5] and common.with_labels(labeled) is labeled
    assert os.path.relpath(train.samples[8][0], root) == "unlabeled/x/y/3.png"


def test_names_are_in_one_array(tmp_path):
    """Names are in one array, because each forked loader worker would copy a list. They need not be valid UTF-8."""
    names = ["a/1.png", "b/long name.png", os.fsdecode(b"b/\xff.png")]
    images = common.ImageFiles(tmp_path, names, [0, 1, 1], ["a", "b"])
    arrays = [value for value in vars(images).values() if not isinstance(value, str) and value is not images.classes]
    assert len(arrays) == 2 and all(isinstance(a, np.ndarray) and a.dtype != object for a in arrays)
    how = common.loader_options(2, torch.device("cpu"))["multiprocessing_context"]
    assert how == ("fork" if sys.platform == "linux" else None)
    assert images.samples == [(f"{tmp_path}/{name}", label) for name, label in zip(names, [0, 1, 1], strict=True)]


def test_images_without_labels(tmp_path):
    tree, flat = write_tree(tmp_path / "tree", ["x", "y/z"]), write_tree(tmp_path / "flat", ["train"])
    for root, count in (tree, 6), (flat, 3):
        images = common.load_dataset("folder", root)
        assert images.targets.tolist() == [-1] * count and images.classes == [] and len(common.with_labels(images)) == 0
        assert common.load_dataset("folder", root, train=False) is None


@pytest.mark.parametrize("parts", ["", "train/a train/b", "train/a train/b val", "train/a train/b val/a val/c"])
def test_there_is_no_knn_without_test_images_of_the_same_classes(parts, tmp_path, capsys):
    root = write_tree(tmp_path, parts.split() or ["x", "y"])
    assert common.open_data("folder", root)[1] is None
    assert "no kNN during training" in capsys.readouterr().out
    line = refused(capsys, common.open_evaluation_data, "folder", root, dict(image_size=32))
    assert "same classes" in line and "not in both: [" in line


def test_there_is_no_knn_without_labels_of_the_same_classes(capsys):
    """The classes must have the same order. Different names may look alike: Unicode has two forms of an accented e."""
    arrays, labels = np.zeros((4, 8, 8, 3), np.uint8), torch.tensor([0, 1, -1, 0])
    images, alike = (Pictures(arrays, labels, ["a", e]) for e in ("\u00e9", "e\u0301"))
    assert common.open_data("folder", train=images, test=images)[1] is images
    assert common.open_data("folder", train=images, test=alike)[1] is None
    assert r"not in both: ['e\u0301', '\xe9']" in capsys.readouterr().out
    assert common.open_data("folder", train=images, test=Pictures(arrays, labels, images.classes[::-1]))[1] is None
    assert "same order" in capsys.readouterr().out
    wrong = (np.uint8([1, 2, 1, 2]), "labels of 2 classes must be below 2, but one is 2"), ([-1] * 4, "without labels")
    for images.targets, words in wrong:
        assert common.open_data("folder", train=images, test=images)[1] is None
        assert words in capsys.readouterr().out


def test_test_images_of_ones_own_are_used_without_training_images_too():
    own = common.Patterns(32, 8, seed=5)
    train, test = common.open_data("patterns", image_size=8, test=own)
    assert test is own and train.classes == [*common.PATTERNS] and train is not own
    info = INFO | dict(encoder="query", arch="a", method="m")
    assert common.open_evaluation_data("patterns", None, info, test=own)[1] is own


def test_imagenet100(tmp_path, capsys):
    """ImageNet-100's classes are selected from a larger folder. A missing one is an error, even if 100 others exist."""
    synsets, own = timm.data.ImageNetInfo("imagenet-1k").label_names(), common.IMAGENET100
    assert len(own) == len(set(own)) == 100 and set(own) <= set(synsets)
    more = [s for s in synsets if s not in own][:2]
    root = write_tree(tmp_path, [f"train/{name}" for name in (*own, *more)], 1, (2, 2))
    images = common.load_dataset("imagenet100", root)
    assert images.classes == own and images.targets.tolist() == list(range(100))
    assert [path.split("/")[-2] for path, _ in images.samples] == own
    for missing, words in (own[7], own[7]), (more[0], "--dataset imagenet"):
        shutil.rmtree(root / "train" / missing)
        assert words in refused(capsys, common.load_dataset, "imagenet100", root)


@pytest.mark.parametrize("name, folders, empty, links, words", [  # folders: with two images each; empty: with none
    ("folder", "train train/a train/b", "", "", "DIR/train/0.png is .* in no class folder"),
    ("folder", "train/a train/b", "train/c", "", "DIR/train/c is a class folder without images"),
    ("folder", "train/a train/b", "val/a", "", "no images in DIR/val"),
    ("imagenet", "a b", "", "", "train/"),
    ("folder", "Train/a Val/a training/a", "", "", "Train, Val, training/"),
    ("folder", "train/a train/b unlabelled", "", "", "unlabelled/"),
    ("folder", "train/a train/b", "", "train/c nowhere", "DIR/train/c"),  # a disk that is not mounted
    ("folder", "train/a train/b", "", "val nowhere", "DIR/val"),
    ("folder", "train/a train/b", "", "train/a/x ../b, train/b/y ../a", "DIR/train/a/x/y is a link"),  # a cycle
    ("patterns", "train/a train/b", "", "", "--dataset"),
    ("imagenet", None, "", "", "--data-dir"),
])  # fmt: skip
def test_folders_that_are_not_laid_out_as_a_data_set_are_errors(tmp_path, name, folders, empty, links, words, capsys):
    write_tree(tmp_path, (folders or "").split(), 2)
    for folder in empty.split():
        (tmp_path / folder).mkdir(parents=True)
    for link, target in [pair.split() for pair in links.split(",") if pair]:
        (tmp_path / link).symlink_to(target)
    line = refused(capsys, common.open_data, name, None if folders is None else str(tmp_path))
    assert re.search(words, line.replace(str(tmp_path), "DIR"))


@pytest.fixture
def asked(monkeypatch, here):
    """Replace torchvision's datasets, which download. Return a list of the arguments of the calls that succeed."""
    asked = []

    def fake(root, download=False, **split):
        if download:  # this run must hold the lock
            with open(os.path.join(root, ".lock")) as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            open(os.path.join(root, "cifar.tar"), "w").close()
        if not os.path.exists(os.path.join(root, "cifar.tar")):
            raise RuntimeError("not found")
        asked.append(dict(root=root, download=download, **split))
        labels = np.array([1, -1] if split.get("split") == "train+unlabeled" else [0, 1])
        return argparse.Namespace(labels=labels, targets=[0, 1], classes="ab")

    for name in ("CIFAR10", "CIFAR100", "STL10"):
        monkeypatch.setattr(torchvision.datasets, name, fake)
    return asked


def test_torchvisions_data_sets(tmp_path, asked):
    """Each call reads its own split. STL-10's images without labels are for training only."""
    calls = [("cifar10", True, dict(train=True)), ("cifar100", False, dict(train=False))]
    calls += [("stl10", True, dict(split="train+unlabeled")), ("stl10", False, dict(split="test"))]
    for name, train, split in calls:
        images = common.load_dataset(name, tmp_path, train)
        assert asked[-1] == dict(root=tmp_path, download=False, **split)
        assert list(images.targets) == ([1, -1] if split.get("split") == "train+unlabeled" else [0, 1])
    common.load_dataset("cifar10")
    assert asked[-1]["root"] == "data"


def test_nothing_is_downloaded_into_a_folder_of_other_files(tmp_path, asked, capsys):
    for other in ("thesis.txt", "x/0.png"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).touch()
        assert "has no train/" in refused(capsys, common.load_dataset, "cifar10", tmp_path)
    assert "missing" in refused(capsys, common.load_dataset, "cifar10", tmp_path / "missing")
    assert asked == [] and not (tmp_path / "missing").exists()
    (tmp_path / "cifar-10-batches-py").mkdir()
    common.load_dataset("cifar10", tmp_path)
    assert asked


@pytest.mark.parametrize("local_rank, downloads", [("0", [True, False]), ("1", [False])])
def test_each_node_downloads_once(local_rank, downloads, asked, tmp_path, monkeypatch):
    """The first process of each node downloads the dataset, and the others wait for it at a barrier."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    before = []  # how often the dataset was opened before the barrier; after it, the download is complete
    monkeypatch.setattr(torch.distributed, "barrier", lambda: before.append(len(asked)) or tar.touch())
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    tar = tmp_path / "cifar.tar"
    common.load_dataset("cifar10", tmp_path)
    assert [call["download"] for call in asked] == downloads and before == [len(asked) - 1]


@pytest.mark.parametrize("load", [
    lambda root: common.load_dataset("folder", root), lambda root: ImageFolder(f"{root}/train"),
], ids=["ours", "torchvision's"])  # fmt: skip
def test_the_fingerprint_is_of_the_images_not_of_their_place(load, tmp_path, monkeypatch):
    """The fingerprint depends on the images' names and labels, not on the path of the folder, which may be relative."""
    root = write_tree(tmp_path / "one", {"train/a": 3, "train/b": 2})
    monkeypatch.chdir(shutil.copytree(root, tmp_path / "two"))
    found = [common.fingerprint(load(folder)) for folder in (root, ".")]
    for old, new in ("b/1.png", "b/7.png"), ("b/7.png", "a/7.png"), ("a/7.png", "../7.png"):
        (root / "train" / old).rename(root / "train" / new)  # the last one moves it out of train/
        found.append(common.fingerprint(load(root)))
    assert found[0] == found[1] and len(set(found)) == 4


def test_the_fingerprint_reads_no_images():
    """It depends on the number of a user's own images, a subset's rows and the labels, of which each image has one."""
    labels = [0, 0, 0], [0, 1, 0], [0, 0], [0]
    images = [Pictures(np.zeros((len(some), 8, 8, 3), np.uint8), some) for some in labels]
    images += [common.ImageFiles("missing", ["a/0.png"], [0], ["a"])]
    images += [common.Subset(images[0], rows) for rows in ([0], [1])]
    assert len({common.fingerprint(some) for some in images}) == len(images)
    images[0].targets = np.zeros(3)
    assert common.fingerprint(images[0]) == common.fingerprint(Pictures(images[0].array, labels[0]))
    wrong = [0, 1], [0] * 4, [[0], [1], [0]], [0, 0.5, 1], np.uint64([0, 1, 2**63]), [0, 1, None], ["cat", "dog", "cat"]
    for images[0].targets in wrong:
        with pytest.raises(common.UsageError, match="one integer per image"):
            common.fingerprint(images[0])  # every run and every evaluation begins with it
