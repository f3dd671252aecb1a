"""Image sets: which files are read and how, what is refused, and by what two sets are told apart."""

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torchvision
from PIL import Image
from tiny import gradient, refused, unequal, write_tree

import common
import jcl

# ---------------------------------------------------------------- image files


def save(path, image, **options):
    """Save an array or a picture, as well as the format can."""
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    options |= dict(quality=100, subsampling=0) if path.suffix == ".jpg" else {}
    image.save(path, **options)
    return path


MODES = "RGB png, RGB jpg, L png, L jpg, P png, RGBA png, LA png, 1 png, CMYK jpg".split(", ")


@pytest.mark.parametrize("mode", MODES)
def test_images_of_any_mode_are_read_as_rgb(tmp_path, mode):
    mode, extension = mode.split()
    image = Image.fromarray(gradient()).convert(mode)
    read = common.read_image(save(tmp_path / f"x.{extension}", image))
    assert read.dtype == np.uint8 and read.shape == (12, 10, 3)
    assert abs(read.astype(int) - np.asarray(image.convert("RGB"))).max() <= 6 * (extension == "jpg")


@pytest.mark.parametrize("name, dtype", [("x.png", "uint16"), ("x.tif", "uint16"), ("x.tif", "int32"), ("x.tif", "f4")])
def test_images_of_more_than_8_bits_are_refused(tmp_path, name, dtype):
    with pytest.raises(common.BadImage, match=name):
        common.read_image(save(tmp_path / name, np.arange(120, dtype=dtype).reshape(12, 10)))


@pytest.mark.parametrize("extension, tolerance", [("png", 0), ("jpg", 6), ("tif", 0)])
def test_exif_rotation(tmp_path, extension, tolerance):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter of a turn
    read = common.read_image(save(tmp_path / f"x.{extension}", gradient(), exif=exif))
    assert read.shape == (10, 12, 3) and abs(read.astype(int) - np.rot90(gradient(), -1)).max() <= tolerance


@pytest.mark.parametrize("name", ["x.jpg", "x.png"])
def test_damaged_exif_does_not_end_a_run(tmp_path, name):
    path = save(tmp_path / name, gradient(), exif=b"Exif\0\0" + b"garbage" * 5)
    assert np.array_equal(common.read_image(path), common.read_image(save(path, gradient())))


def test_a_damaged_image_is_one_line_that_says_how_to_go_on(tmp_path, capsys):
    (tmp_path / "x.png").write_bytes(save(tmp_path / "y.png", gradient()).read_bytes()[:60])
    args = SimpleNamespace(device="cpu", arch=None)
    line = refused(capsys, common.start, lambda _: common.read_image(tmp_path / "x.png"), lambda: args)
    assert all(word in line for word in ("x.png", "check_images.py", "--resume", "--out"))


# --------------------------------------------------------------- the demo's set


def test_the_demos_images_stay():
    """README's numbers are of them. The means are weighted, so that no part of a formula cancels."""
    images, labels = common.make_patterns(40, 32, seed=0)
    weight = np.linspace(-1, 1, 32)[:, None, None] * np.linspace(1, 2, 32)[:, None] * np.array([1, -2, 0.5])
    means = [(images[labels == kind] * weight).mean() for kind in range(10)]
    assert means == pytest.approx([1.311, 0.155, -3.062, 1.426, 1.165, -2.189, -0.505, -1.376, 0.222, -0.430], abs=0.01)
    train, test = (common.load_images("patterns", train=part, size=8) for part in (True, False))
    assert np.array_equal(train.array, common.make_patterns(4096, 8, seed=0)[0])
    assert np.array_equal(test.array, common.make_patterns(1024, 8, seed=1)[0])


# -------------------------------------------------------------------- folders


@pytest.mark.parametrize("name, test_name", [("folder", "val"), ("imagenet", "test"), ("cifar10", "val")])
def test_a_layout_of_class_folders_is_read_whatever_the_name(tmp_path, test_name, name, capsys):
    """But what is no image, hidden names and thumbnails, links that lead back, and named pipes, which would hang.

    A class may be a link to a folder elsewhere.
    """
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


def test_cached_and_uncached_images_are_the_same(tmp_path, monkeypatch):
    root = write_tree(tmp_path, {"train/a": 20, "train/b": 17})
    cached = common.load_images("folder", root)
    monkeypatch.setattr(common, "IN_MEMORY", cached.array.nbytes - 1)
    paths = common.load_images("folder", root)
    assert cached.array.shape == (37, 12, 10, 3) and paths.array is None
    args = jcl.parse_args(["--image-size", "16"])
    keys = [(1, 3), (0, 36), (2, 20), (0, 0), (0, 1)]
    views = [*jcl.augmentation(args).values()]
    a, b = (common.ViewDataset(images, views, 5).__getitems__(keys) for images in (cached, paths))
    assert unequal(a, b) == []


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
    """Its classes among others, or 100 others; not 99 of its own."""
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
    ("folder", "train/a,train/cat,val/a,val/cat ", "'cat ', 'cat'"),
    ("folder", "Train/a,Val/a", "Train, Val"),
    ("folder", "train/a,train/b,valid/a,valid/b", "valid"),
    ("folder", "tram,bus,train", "bus, tram"),  # a class that is called train
    ("folder", "train/a,train/b,unlabelled", "unlabelled"),
    ("patterns", "train/a,train/b", "--dataset"),
]


@pytest.mark.parametrize("name, folders, word", LAYOUTS)
def test_folders_that_are_no_data_set_are_one_line(tmp_path, capsys, name, folders, word):
    write_tree(tmp_path, folders.split(","), 2)
    args = SimpleNamespace(dataset=name, data_dir=str(tmp_path), image_size=32)
    assert word in refused(capsys, common.open_images, args).replace(str(tmp_path), "DIR")


@pytest.mark.parametrize("name", ["missing", "notes.txt", "x" * 300, "link"])
def test_a_data_dir_that_cannot_be_listed_is_one_line(tmp_path, capsys, name):
    (tmp_path / "notes.txt").write_text("no folder")
    (tmp_path / "link").symlink_to("/nowhere")
    for dataset in ("folder", "cifar10"):
        assert f"--data-dir {tmp_path / name}: " in refused(capsys, common.load_images, dataset, str(tmp_path / name))


# ------------------------------------------------------------------ downloads


def test_torchvisions_data(tmp_path, monkeypatch):
    """Each call reads its own split. Here nothing is downloaded: the data are as torchvision gives them."""
    asked = []

    class Fake:
        def __init__(self, root, download, **split):
            asked.append(split)
            self.data = np.arange(288).astype(np.uint8).reshape((2, 3, 8, 6) if "split" in split else (2, 8, 6, 3))
            more = split.get("split") == "train+unlabeled"
            self.labels = np.array([1, -1]) if more else np.array([0, 1], np.uint8)
            self.classes, self.targets = "ab", [0, 1]

    for name in ("CIFAR10", "STL10"):
        monkeypatch.setattr(torchvision.datasets, name, Fake)
    calls = {("cifar10", True, True): dict(train=True), ("cifar10", False, True): dict(train=False)}
    calls |= {("stl10", True, False): dict(split="train"), ("stl10", True, True): dict(split="train+unlabeled")}
    calls |= {("stl10", False, True): dict(split="test")}
    sets = [common.load_images(name, tmp_path, train, unlabeled=more) for name, train, more in calls]
    assert asked == [*calls.values()]
    assert [images.labels.tolist() for images in sets] == [[0, 1]] * 3 + [[1, -1]] + [[0, 1]]
    assert all(images.array.shape == (2, 8, 6, 3) and images.classes == ["a", "b"] for images in sets)
    assert sets[2].array[1, 2, 3].tolist() == [(144 + c * 48 + 2 * 6 + 3) % 256 for c in range(3)]


# ------------------------------------------------------------------ checksums

CHANGES = {
    "a name": lambda path: path.rename(path.parent / "7.png"),
    "its pixels": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),  # of the same size
    "a label": lambda path: path.rename(path.parent.parent / "a" / "2.png"),
    "one fewer": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_checksum_is_of_the_files_not_of_their_place(tmp_path, monkeypatch, change):
    def checksums(root):
        return [common.load_images("folder", root, part).checksum() for part in (True, False)]

    root = write_tree(tmp_path / "one", {"train/a": 3, "train/b": 2, "val/a": 2, "val/b": 2})
    before = checksums(root)
    assert before[0] != before[1]
    shutil.copytree(root, tmp_path / "deep" / "er" / "two")
    monkeypatch.chdir(tmp_path)
    assert checksums("deep/er/two") == before
    change(root / "val" / "b" / "1.png")
    after = checksums(root)
    assert after[0] == before[0] and after[1] != before[1]


def test_a_checksum_of_many(monkeypatch):
    """Of files it reads a hundred, and all names; of decoded images also the shape, and the last one."""
    asked = []
    monkeypatch.setattr(common.Path, "read_bytes", lambda path: asked.append(str(path)) or b"pixels")
    images = common.ImageSet([f"train/{i:08}.JPEG" for i in range(2000)])
    first = images.checksum()
    assert len(set(asked)) == 100
    images.paths[77] = b"train/other.JPEG"
    assert images.checksum() != first
    array = np.zeros((2300, 32, 32, 3), np.uint8)
    changed, labels = array.copy(), np.zeros(2300, int)
    changed[-1] = 1
    sets = [(array,), (array, labels), (array.reshape(2300, 64, 16, 3),), (array[:-1],), (changed,)]
    assert len({common.ImageSet(*images).checksum() for images in sets}) == 5


# ----------------------------------------------------------------- own images


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
