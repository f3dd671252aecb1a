"""Image sets: which files are read and how, what is refused, and by what two sets are told apart."""

import argparse
import os
import shutil

import numpy as np
import pytest
import timm
import torchvision
from PIL import Image
from tiny import gradient, refused, write_tree

import common

BEST = dict(quality=100, subsampling=0)  # of a JPEG


@pytest.mark.parametrize("mode", ["RGB png", "RGB jpg", "L jpg", "P png", "RGBA png", "1 png", "CMYK jpg"])
def test_images_of_any_mode_are_read_as_rgb(tmp_path, mode):
    mode, extension = mode.split()
    image, path = Image.fromarray(gradient()).convert(mode), tmp_path / f"x.{extension}"
    image.save(path, **BEST)
    read = common.read_image(path)
    assert read.dtype == np.uint8 and read.shape == (12, 10, 3)
    assert abs(read.astype(int) - np.asarray(image.convert("RGB"))).max() <= 6 * (extension == "jpg")


@pytest.mark.parametrize("name, dtype", [("x.png", "uint16"), ("x.tif", "f4")])
def test_images_of_more_than_8_bits_are_refused(tmp_path, name, dtype):
    Image.fromarray(np.arange(120, dtype=dtype).reshape(12, 10)).save(tmp_path / name)
    with pytest.raises(common.BadImage, match=name):
        common.read_image(tmp_path / name)


def test_an_image_is_turned_as_its_exif_says(tmp_path):
    """One that is damaged says nothing."""
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter of a turn
    for said, right in ((exif, np.rot90(gradient(), -1)), (b"Exif\0\0" + b"garbage" * 5, gradient())):
        Image.fromarray(gradient()).save(tmp_path / "x.jpg", exif=said, **BEST)
        read = common.read_image(tmp_path / "x.jpg")
        assert read.shape == right.shape and abs(read.astype(int) - right).max() <= 6


def test_the_demos_images_stay():
    """README's numbers are of them. The means are weighted, so that no part of a formula cancels."""
    images, labels = common.make_patterns(40, 32, seed=0)
    weight = np.linspace(-1, 1, 32)[:, None, None] * np.linspace(1, 2, 32)[:, None] * np.array([1, -2, 0.5])
    means = [(images[labels == kind] * weight).mean() for kind in range(10)]
    assert means == pytest.approx([1.311, 0.155, -3.062, 1.426, 1.165, -2.189, -0.505, -1.376, 0.222, -0.430], abs=0.01)
    train, test = (common.load_images("patterns", train=part, size=8) for part in (True, False))
    assert np.array_equal(train.array, common.make_patterns(4096, 8, seed=0)[0])
    assert np.array_equal(test.array, common.make_patterns(1024, 8, seed=1)[0])


@pytest.mark.parametrize("name, test_name", [("folder", "val"), ("imagenet", "test"), ("cifar10", "val")])
def test_a_layout_of_class_folders_is_read_whatever_the_name(tmp_path, test_name, name, capsys):
    """But what is no image, hidden names, thumbnails, links that lead back, and named pipes. A class may be a link."""
    parts = {"train/b": 3, "../elsewhere": 2, "unlabeled/x/y": 4, f"{test_name}/a": 1, f"{test_name}/b": 2}
    root = write_tree(tmp_path / "data", parts | {"train/.x": 1, "train/b/@eaDir": 1})
    (root / "train" / "a").symlink_to(tmp_path / "elsewhere")
    for other in ("b/notes.txt", "b/._0.png"):
        (root / "train" / other).write_text("not an image")
    os.mkfifo(root / "train" / "b" / "pipe.png")
    for link, target in {"b/up": "..", "loop": ".", "../../elsewhere/back": "../data/train"}.items():
        (root / "train" / link).symlink_to(target)
    train, test = (common.load_images(name, root, part) for part in (True, False))
    assert train.classes == test.classes == ["a", "b"]
    assert train.labels.tolist() == [0, 0, 1, 1, 1] and test.labels.tolist() == [0, 1, 1]
    images = common.load_images(name, root, unlabeled=True)
    assert images.labels.tolist() == [0, 0, 1, 1, 1, -1, -1, -1, -1] and images.classes == ["a", "b"]
    assert np.array_equal(images.labelled().array, train.array)
    assert len(common.load_images(name, root, False, unlabeled=True)) == 3
    (root / "train" / "c").symlink_to("/nowhere")  # a disk that is not mounted
    assert str(root / "train" / "c") in refused(capsys, common.load_images, name, root)


def test_trees_without_labels_and_mixed_sizes(tmp_path):
    root = write_tree(tmp_path / "tree", ["x", "y/z"])
    write_tree(tmp_path / "tree", ["w"], size=(14, 10))
    tree = common.load_images("folder", root)
    assert tree.labels.tolist() == [-1] * 9 and tree.classes == [] and tree.array is None and len(tree.labelled()) == 0
    assert [image.shape for image in map(tree.__getitem__, range(9))] == [(14, 10, 3)] * 3 + [(12, 10, 3)] * 6
    assert common.load_images("folder", root, train=False) is None
    write_tree(tmp_path / "flat", ["train", "unlabeled"])
    assert common.load_images("folder", tmp_path / "flat", unlabeled=True).labels.tolist() == [-1] * 6
    assert common.load_images("folder", write_tree(tmp_path / "big", ["b"], 1, (97, 20))).array is None


def test_imagenet100(tmp_path, capsys):
    """Its classes among others, or 100 others; not 99 of its own and others."""
    synsets, own = timm.data.ImageNetInfo("imagenet-1k").label_names(), sorted(common.IMAGENET100)
    assert len(own) == len(set(own)) == 100 and set(own) <= set(synsets)
    more = [s for s in synsets if s not in own][:2]
    root = write_tree(tmp_path, [f"train/{name}" for name in (*own, *more)], 1, (2, 2))
    images = common.load_images("imagenet100", root)
    assert images.classes == own and images.labels.tolist() == list(range(100))
    assert [os.path.dirname(images.path(i)).split("/")[-1] for i in range(100)] == own
    assert len(common.load_images("imagenet", root).classes) == 102
    shutil.rmtree(root / "train" / own[7])
    assert own[7] in refused(capsys, common.load_images, "imagenet100", root)
    shutil.rmtree(root / "train" / more[0])
    others = common.load_images("imagenet100", root)
    assert len(others.classes) == 100 and more[1] in others.classes


LAYOUTS = [  # --dataset, folders with two images each, what the line names
    ("folder", "train,train/a,train/b", "DIR/train"),  # images beside classes
    ("imagenet", "a,b", "train/"),
    ("folder", "train/a,train/b,val/a,val/c", "'b', 'c'"),
    ("folder", "Train/a,Val/a", "Train, Val"),
    ("folder", "tram,bus,train", "bus, tram"),  # a class that is called train
    ("folder", "train/a,train/b,unlabelled", "unlabelled"),
    ("patterns", "train/a,train/b", "--dataset"),
]


@pytest.mark.parametrize("name, folders, word", LAYOUTS)
def test_folders_that_are_no_data_set_are_one_line(tmp_path, capsys, name, folders, word):
    write_tree(tmp_path, folders.split(","), 2)
    args = argparse.Namespace(dataset=name, data_dir=str(tmp_path), image_size=32)
    assert word in refused(capsys, common.open_images, args).replace(str(tmp_path), "DIR")


def test_torchvisions_data(tmp_path, monkeypatch):
    """Each call reads its own split. Here nothing is downloaded: the data are as torchvision gives them."""
    asked = []

    def fake(root, download, **split):
        asked.append(split)
        data = np.arange(288).astype(np.uint8).reshape((2, 3, 8, 6) if "split" in split else (2, 8, 6, 3))
        labels = np.array([1, -1] if split.get("split") == "train+unlabeled" else [0, 1])
        return argparse.Namespace(data=data, labels=labels, targets=[0, 1], classes="ab")

    for name in ("CIFAR10", "STL10"):
        monkeypatch.setattr(torchvision.datasets, name, fake)
    calls = [("cifar10", True, True), ("cifar10", False, True)]
    calls += [("stl10", True, False), ("stl10", True, True), ("stl10", False, True)]
    sets = [common.load_images(name, tmp_path, train, unlabeled=more) for name, train, more in calls]
    splits = "train", "train+unlabeled", "test"
    assert asked == [dict(train=True), dict(train=False), *(dict(split=split) for split in splits)]
    assert [images.labels.tolist() for images in sets] == [[0, 1]] * 3 + [[1, -1]] + [[0, 1]]
    assert all(images.array.shape == (2, 8, 6, 3) and images.classes == ["a", "b"] for images in sets)
    assert sets[2].array[1, 2, 3].tolist() == [(144 + c * 48 + 2 * 6 + 3) % 256 for c in range(3)]


def test_a_checksum_is_of_the_files_not_of_their_place(tmp_path, monkeypatch):
    def checksum(folder):
        return common.load_images("folder", folder).checksum()

    root = write_tree(tmp_path / "one", {"train/a": 3, "train/b": 2})
    found, file, other = [checksum(root)], root / "train" / "b" / "1.png", root / "train" / "a" / "7.png"
    shutil.copytree(root, tmp_path / "deep" / "er" / "two")
    monkeypatch.chdir(tmp_path)
    assert checksum("deep/er/two") == found[0]
    data = file.read_bytes()
    for change in (
        lambda: file.write_bytes(data[:-1] + b"x"),  # of the same size
        lambda: file.rename(file.with_name("7.png")),
        lambda: file.with_name("7.png").rename(other),  # another label
        other.unlink,
    ):
        change()
        found.append(checksum(root))
    assert len(set(found)) == 5


def test_a_checksum_of_many(monkeypatch):
    """Of files it reads a hundred, and all names; of an array also the shape, and the last image."""
    asked = []
    monkeypatch.setattr(common.Path, "read_bytes", lambda path: asked.append(path) or b"pixels")
    names = [f"train/{i:08}.JPEG" for i in range(2000)]
    sums = {common.ImageSet(paths).checksum() for paths in (names, [*names[:77], "other.JPEG", *names[78:]])}
    assert len(sums) == 2 and len(set(asked)) == 100
    array = np.zeros((2300, 32, 32, 3), np.uint8)
    changed, labels = array.copy(), np.zeros(2300, int)
    changed[-1] = 1
    sets = [(array,), (array, labels), (array.reshape(2300, 64, 16, 3),), (array[:-1],), (changed,)]
    assert len({common.ImageSet(*images).checksum() for images in sets}) == 5


def test_own_images_are_an_array_or_paths(tmp_path, capsys):
    """Labels of any integer type; -1 is none. Rows stay together in subsets."""
    root = write_tree(tmp_path, {"": 4})
    array = np.stack([np.asarray(Image.open(root / f"{i}.png")) for i in range(4)])
    for labels in ([2, 0, -1, 1], np.array([2, 0, -1, 1], np.int8), np.array([2, 0, 0, 1], np.uint8)):
        for images in (array, [root / f"{i}.png" for i in range(4)]):
            own = common.ImageSet(images, labels)
            assert own.classes == [0, 1, 2] and np.array_equal(own.labels, labels)
            part = own.subset(np.array([3, 0])).labelled()
            assert part.labels.tolist() == [1, 2] and all(np.array_equal(part[i], array[3 - 3 * i]) for i in range(2))
    assert len(common.ImageSet(array).classes) == len(common.ImageSet(array).labelled()) == 0
    for wrong in (array.astype("f4"), array.swapaxes(1, 3), array[..., :1], array[0]):
        refused(capsys, common.ImageSet, wrong)
    # Too few; a column, as of Keras; one-hot rows; no whole numbers; names
    for labels in ([0, 1], [[0], [1], [2], [0]], np.eye(4, dtype=int), [0.0, 1.0, 2.0, 0.0], [*"abca"]):
        assert f"{np.shape(labels)}" in refused(capsys, common.ImageSet, array, labels)
    assert "up to 2" in refused(capsys, common.ImageSet, array, [0, 0, 0, 2], "ab")
    sets = [common.ImageSet(array, [0, 1, 0, 1], classes) for classes in ("ab", "ba")]
    assert "order" in refused(capsys, common.check_labels, *sets)
