"""Image sets: which files are read and how, what is refused in words, and by what two sets are told apart."""

import errno
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
import types

import numpy as np
import pytest
import torch
import torchvision
from conftest import ROOT
from PIL import Image
from tiny import gradient, refused, write_tree

import common
import eval_knn
import eval_linear
import moco_jointcrop

# -------------------------------------------------------------------- checksum

TREE = {"train/a": 3, "train/b": 2, "val/a": 2, "val/b": 2, "unlabeled/x": 2}


def checksums(root, **options):
    parts = [common.load_images("folder", root, part, unlabeled=True, **options) for part in (True, False)]
    return [images.checksum() for images in parts]


def test_a_copied_folder_is_the_same_set(tmp_path, monkeypatch):
    root = write_tree(tmp_path / "one", TREE)
    before = checksums(root)
    assert all(len(x) == 16 and int(x, 16) >= 0 for x in before) and before[0] != before[1]
    shutil.copytree(root, tmp_path / "deep" / "er" / "two")
    assert checksums(tmp_path / "deep" / "er" / "two") == before == checksums(root, cache=False)
    monkeypatch.chdir(tmp_path)
    assert checksums("one") == before
    flat = [common.load_images("folder", folder / "unlabeled").checksum() for folder in (root, tmp_path / "one")]
    assert flat[0] == flat[1]


CHANGES = {
    "a name": lambda path: path.rename(path.parent / "7.png"),
    "its pixels": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),  # of the same size
    "a label": lambda path: path.rename(path.parent.parent / "a" / "2.png"),
    "one fewer": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_set_of_files_has_another_checksum(tmp_path, change):
    root = write_tree(tmp_path / "data", TREE)
    before = checksums(root)
    change(root / "val" / "b" / "1.png")
    after = checksums(root)
    assert after[0] == before[0] and after[1] != before[1]


def test_a_checksum_reads_a_hundred_files_and_all_names(monkeypatch):
    """As of ImageNet: 1.28 million names, in seconds."""
    names = np.array([f"train/n{i % 1000:08}/{i:08}.JPEG".encode() for i in range(200_000)])
    asked = []
    monkeypatch.setattr(common.Path, "read_bytes", lambda path: asked.append(str(path)) or b"pixels")
    images = common.ImageSet("folder", np.arange(200_000) % 1000, "ab", paths=names, root="/x")
    first = images.checksum()
    assert len(set(asked)) == 100 and {asked[0], asked[-1]} == {images.path(0), images.path(199_999)}
    images.root = "/elsewhere"
    assert images.checksum() == first
    images.paths[77] = b"train/other.JPEG"
    assert images.checksum() != first


def test_a_checksum_of_decoded_images(tmp_path):
    patterns = [common.load_images("patterns", train=part, size=16) for part in (True, False, False)]
    sums = [images.checksum() for images in patterns]
    assert sums[0] != sums[1] == sums[2] != common.load_images("patterns", train=False, size=20).checksum()
    patterns[2].array = patterns[1].array.copy()
    patterns[2].array[500, 3, 3, 0] ^= 1
    assert patterns[2].checksum() != sums[1]
    large = np.zeros((23000, 32, 32, 3), np.uint8)
    images = common.ImageSet("cifar10", np.zeros(len(large)), ["a"], large)
    first = images.checksum()
    large[-1] = 1
    assert images.checksum() != first
    assert common.ImageSet("cifar10", np.ones(len(large)), ["a"], large).checksum() != images.checksum()


class Own(torch.utils.data.Dataset):
    """A user's Dataset of `items`; counts what is read."""

    def __init__(self, items, **more):
        self.items, self.read = items, 0
        vars(self).update(more)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        self.read += 1
        item = self.items[i]
        return item() if callable(item) else item


def own(data):
    """A user's Dataset as an ImageSet, as for a training without a test set."""
    return common.own_images(data, None)[0]


def test_a_checksum_of_own_images_is_of_their_number():
    data = Own([None] * 100)
    assert own(data).checksum() == own(Own([1] * 100)).checksum() and data.read == 0
    assert own(data).checksum() != own(Own([None] * 99)).checksum()


# -------------------------------------------------------- folders and downloads


@pytest.fixture
def downloads(monkeypatch):
    """The folders into which torchvision's CIFAR-10 would be downloaded; nothing is."""
    found = []

    class Fake(torchvision.datasets.CIFAR10):
        def __init__(self, root, download, train):
            found.append(root)
            self.data, self.targets, self.classes = np.zeros((2, 8, 8, 3), np.uint8), [0, 1], ["a", "b"]

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Fake)
    return found


def test_nothing_is_downloaded_into_a_users_folder(tmp_path, capsys, downloads):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    line = refused(capsys, common.load_images, "cifar10", tmp_path / "mine")
    assert "mine has neither train/ nor torchvision's files of cifar10: give an empty folder" in line
    for name in (*common.DATASETS, "cifar10"):
        line = refused(capsys, common.load_images, name, tmp_path / "typo")
        assert line == f"error: --data-dir {tmp_path / 'typo'} does not exist\n"
    assert not downloads and not (tmp_path / "typo").exists()


@pytest.mark.parametrize("content", ["", ".DS_Store", "cifar-10-batches-py", "cifar-10-python.tar.gz", "stl10_binary"])
def test_downloads_go_into_an_empty_folder_or_torchvisions(tmp_path, downloads, content, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    if content:
        (root / content).touch()
    assert len(common.load_images("cifar10", root)) == 2 and downloads == [str(root)]
    monkeypatch.chdir(tmp_path)
    common.load_images("cifar10")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").touch()
    common.load_images("cifar10")
    common.load_images("cifar10", "data")
    assert downloads[1:] == ["data"] * 3


def test_hidden_folders_and_links_back_are_passed_over(tmp_path):
    root = write_tree(tmp_path / "data", {"train/a/deep": 2, "train/b": 2, "train/.x": 1, "train/a/@eaDir": 1, "c": 3})
    write_tree(root / "train", {"a/.ipynb_checkpoints": 1})
    (root / "train" / "b" / "._0.png").write_bytes(b"not an image")
    for name, target in {
        "a/up": "..",
        "a/top": "../..",
        "loop": ".",
        "b/c": "../../c",
        "../c/back": "../train/b",
    }.items():
        (root / "train" / name).symlink_to(target, target_is_directory=True)
    images = common.load_images("folder", root)
    names = [os.path.relpath(images.path(i), root / "train") for i in range(len(images))]
    assert names == ["a/deep/0.png", "a/deep/1.png", "b/0.png", "b/1.png", "b/c/0.png", "b/c/1.png", "b/c/2.png"]
    assert images.classes == ["a", "b"] and images.labels.tolist() == [0, 0, 1, 1, 1, 1, 1]


LAYOUTS = {  # folders, and words of the message
    "images beside classes": (("train", "train/a", "train/b"), "train has the folder 'a' beside the image '0.png'"),
    "no classes in val": (("train/a", "train/b", "val"), "no class folders in DIR/val"),
    "other classes": (
        ("train/a", "train/b", "val/a", "val/c"),
        "not in both: 'b', 'c'. Give both one folder per class, by the same names\n",
    ),
    "capitals": (("Train/a", "Val/a"), "DIR has Train/, Val/: name them train/, and val/ or test/"),
    "one in capitals": (("train/a", "Val/a"), "DIR has Val/: name them"),
    "another word": (("training", "validation"), "DIR has training/, validation/: name them"),
    "two forms": (
        ("train/g\xe2teau", "val/ga\u0302teau", "train/b", "val/b"),
        r"not in both: 'ga\u0302teau', 'g\xe2teau'",
    ),
    "a blank": (("train/cat", "val/cat ", "train/b", "val/b"), "not in both: 'cat', 'cat '"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_folders_that_are_no_data_set_are_one_line(tmp_path, capsys, kind):
    folders, words = LAYOUTS[kind]
    write_tree(tmp_path, {folder: 2 for folder in sorted(folders, reverse=True)})
    args = types.SimpleNamespace(dataset="folder", data_dir=tmp_path, image_size=32, no_cache=False)
    assert words in refused(capsys, common.open_images, args).replace(str(tmp_path), "DIR")


def test_an_evaluation_says_that_its_folder_does_not_exist(capsys):
    args = eval_knn.parse_args(["--device", "cpu", "--data-dir", "/nowhere"])
    line = refused(capsys, lambda: eval_knn.main(args, encoder=torch.nn.Flatten()))
    assert line == "error: --data-dir /nowhere does not exist\n"


# ------------------------------------------------------------- what values mean


def save(path, values, **options):
    Image.fromarray(values).save(path, **options)
    return path


@pytest.mark.parametrize("name, dtype", [("x.png", "uint16"), ("x.tif", "uint16"), ("x.tif", "int32"), ("x.tif", "f4")])
def test_images_of_more_than_8_bits_are_refused_in_words(tmp_path, name, dtype):
    path = save(tmp_path / name, np.arange(120, dtype=dtype).reshape(12, 10))
    with pytest.raises(common.BadImage, match=rf"{name}: .*convert it to 8 bits per channel"):
        common.read_image(path)
    with pytest.raises(common.BadImage, match="image 0 of your training data set: .*convert it to 8 bits per channel"):
        own(Own([Image.open(path)]))[0]


# ------------------------------------------------------------------------- EXIF


def exif_bytes(*entries):
    """EXIF (big-endian) with orientation 6 and other tags: (tag, type, count, 4 bytes of value or an offset)."""
    rows = sorted([(0x0112, 3, 1, b"\0\6\0\0"), *entries])
    body = b"".join(struct.pack(">HHI", *row[:3]) + row[3] for row in rows)
    return b"Exif\0\0MM\0*" + struct.pack(">IH", 8, len(rows)) + body + bytes(4)


DAMAGED = {  # EXIF, and whether the picture is turned
    "text for a number": (exif_bytes((0x0128, 2, 4, b"abc\0")), True),
    "an offset behind the end": (exif_bytes((0x8769, 4, 1, b"\xff\xff\xff\0")), True),
    "no TIFF": (b"Exif\0\0" + b"garbage" * 5, False),
    "a text for the resolution": (exif_bytes((0x011A, 2, 2, b"a\0\0\0"), (0x0128, 3, 1, b"\0\2\0\0")), None),
}


@pytest.mark.filterwarnings("ignore")  # Pillow warns of some
@pytest.mark.parametrize("extension", ["jpg", "png", "webp"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_exif_does_not_end_a_run(tmp_path, kind, extension):
    (exif, turned), path = DAMAGED[kind], tmp_path / f"x.{extension}"
    expected = common.read_image(save(path, gradient()))
    read = common.read_image(save(path, gradient(), exif=exif))
    if turned is None:  # Pillow itself may give up
        turned = read.shape[:2] == (10, 12)
    assert np.array_equal(read, np.rot90(expected, -1) if turned else expected)


def test_an_image_that_cannot_be_read_is_named_in_pillows_words(tmp_path):
    path = save(tmp_path / "two\nlines.png", gradient())
    for content in (path.read_bytes()[:-200], b"", b"text", None):
        path.write_bytes(content) if content is not None else path.unlink()
        with pytest.raises(common.BadImage, match=r"cannot read the image .*lines\.png: .") as error:
            common.read_image(path)
        assert "\n" not in str(error.value)


def test_sizes_are_those_of_the_images_and_no_image_is_decoded_twice(tmp_path, monkeypatch):
    """Also of a PNG whose orientation stands behind the pixels. An image is kept from `sizes` on until it is cut."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for i in range(20):
        save(tmp_path / f"{i:02}.png", gradient(100, 120), **({"exif": exif} if i % 2 else {}))
    data = (tmp_path / "01.png").read_bytes()
    start = data.index(b"eXIf") - 4
    chunk = data[start : start + 12 + struct.unpack(">I", data[start : start + 4])[0]]
    data = data.replace(chunk, b"")
    (tmp_path / "01.png").write_bytes(data[:-12] + chunk + data[-12:])
    images = common.load_images("folder", tmp_path)
    assert images.sizes(range(3)).tolist() == [[100, 120], [120, 100], [100, 120]]
    assert images[1].shape == (120, 100, 3)
    read, decoded = common.read_image, []
    monkeypatch.setattr(common, "read_image", lambda path: decoded.append(path) or read(path))
    images = common.load_images("folder", tmp_path, cache=False)
    views = moco_jointcrop.augmentation(moco_jointcrop.parse_args([]))
    common.ViewDataset(images, views, 0).__getitems__([(0, i) for i in range(20)])
    assert len(decoded) == len(set(decoded)) == 20


# -------------------------------------------------------------------- own images

IMAGE = gradient()
INFO = dict(image_size=8, mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear")


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([IMAGE])


class NoLength(torch.utils.data.Dataset):
    def __getitem__(self, i):
        return IMAGE


WRONG = {  # (training set, test set or None, words of the message)
    "a stream": (Stream(), None, "your training data set is of type Stream: give a map-style Dataset"),
    "no length": (NoLength(), None, "of type NoLength: give a map-style Dataset, with __len__ and __getitem__"),
    "a loader": (torch.utils.data.DataLoader(Own([IMAGE])), None, "of type DataLoader: give a map-style"),
    "empty": (Own([]), None, "your training data set is empty"),
    "dicts": (
        Own([{"image": IMAGE, "label": 1}]),
        None,
        "image 0 of your training data set: found dict, but items are PIL images",
    ),
    "paths": (Own(["a.png"]), None, "image 0 of your training data set: found str, but items are PIL images"),
    "four channels": (Own([np.zeros((9, 9, 4), np.uint8)]), None, "found ndarray uint8 (9, 9, 4), but items are"),
    "channels first": (Own([np.zeros((3, 9, 9), np.uint8)]), None, "found ndarray uint8 (3, 9, 9), but items are"),
    "batches": (Own([torch.zeros(2, 3, 9, 9, dtype=torch.uint8)]), None, "torch.Size([2, 3, 9, 9])"),
    "floats": (Own([torch.zeros(3, 9, 9)]), None, "found Tensor torch.float32"),
    "no labels in test": (Own([(IMAGE, 0)]), Own([IMAGE]), "the label of image 0 of your test data set: found ndarray"),
    "none as labels": (Own([(IMAGE, 0)]), Own([(IMAGE, None)]), "the label of image 0 of your test data set: 'None"),
    "text": (Own([(IMAGE, "cat")]), Own([(IMAGE, 1)]), "the label of image 0 of your training data set: 'str'"),
    "fractions": (Own([(IMAGE, torch.tensor(0.5))]), Own([(IMAGE, 1)]), "the label of image 0 of your training"),
    "one-hot": (Own([(IMAGE, torch.eye(3)[0])]), Own([(IMAGE, 1)]), "the label of image 0 of your training"),
    "other names": (Own([(IMAGE, 0)], classes="ab"), Own([(IMAGE, 0)], classes="ba"), "different `classes`"),
}


def encode(*data):
    for images in common.open_images(types.SimpleNamespace(batch_size=1), *data):
        if images is not None:
            common.extract_features(torch.nn.Flatten(), images, INFO, torch.device("cpu"))


@pytest.mark.parametrize("kind", WRONG)
def test_own_data_of_another_kind_end_in_one_line(capsys, kind):
    train, test, words = WRONG[kind]
    assert words in refused(capsys, common.start, lambda _: encode(train, test), lambda: None)


def test_own_data_are_read_by_loaders_only():
    """The items' second entries are the labels, of any integer type; `targets` are not. Subsets keep their rows."""
    makes = int, np.int64, torch.tensor, np.array, bool
    data = Own([(IMAGE, make(1)) for make in makes], targets=[5] * 5, classes=["a", "b"])
    train, test = common.open_images(types.SimpleNamespace(batch_size=1), data, data)
    device, workers = torch.device("cpu"), 2
    assert common.extract_features(torch.nn.Flatten(), train, INFO, device, workers=workers)[1].tolist() == [1] * 5
    assert data.read == 0 and test.labels.tolist() == [-1] * 5  # in this process


def test_labels_of_own_data_are_places_among_those_that_occur():
    train, test = (Own([(IMAGE, y) for y in labels]) for labels in ([7, -1, -3, 10**12], [0, 7]))
    images = common.own_images(train, test)
    train, test = eval_linear.read_labels(*images, INFO, torch.device("cpu"), 0)
    assert train.labels.tolist() == [2, 0, 3] and test.labels.tolist() == [1, 2] and train.rows.tolist() == [0, 2, 3]
    assert train.classes == test.classes == ["-3", "0", "7", "1000000000000"] and train.item(1)[1] == 0


def test_an_error_in_the_users_own_length_is_shown_as_it_is():
    class Broken(NoLength):
        def __len__(self):
            return len(None)

    with pytest.raises(TypeError, match="NoneType"):
        encode(Broken(), None)


def test_a_later_item_of_another_kind_is_named():
    data = own(Own([IMAGE, {"image": IMAGE}, IMAGE]))
    with pytest.raises(common.BadImage, match="image 1 of your training data set: found dict"):
        data.subset(np.array([2, 1]))[1]


# --------------------------------------------- links, other files, disks, memory


def test_a_link_that_leads_nowhere_is_an_error_that_names_it(tmp_path, capsys):
    """A class folder, a part of a tree, an image or a test set, as on a disk that is not mounted."""
    root = write_tree(tmp_path, {"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 1})
    for place in ("train/c", "train/b/more", "train/a/9.png", "unlabeled", "test"):
        (root / place).symlink_to("/nowhere/at/all")
        assert f"{root / place} is a link that leads nowhere" in refused(capsys, common.load_images, "folder", root)
        (root / place).unlink()


def test_only_regular_files_are_images(tmp_path):
    """A named pipe would be waited for."""
    root = write_tree(tmp_path, {"x": 2})
    os.mkfifo(root / "x" / "pipe.png")
    (root / "x" / "link.png").symlink_to("pipe.png")
    assert len(common.load_images("folder", root)) == 2


CHECK = str(ROOT / "tests" / "tools" / "check_images.py")


@pytest.mark.slow
def test_a_tool_lists_what_cannot_be_used_and_what_is_passed_over(tmp_path):
    root = write_tree(tmp_path, {"train/a": 3, "train/b": 3, ".thumbnails": 2})
    check = lambda: subprocess.run([sys.executable, CHECK, root], capture_output=True, text=True, timeout=100)  # noqa: E731
    done = check()
    assert done.returncode == 0 and "6 images read, 0 cannot be used" in done.stdout
    (root / "train" / "b" / "1.png").write_bytes(b"damaged")
    (root / "train" / "c").symlink_to("/nowhere")
    (root / "train" / "a" / "x.GIF").touch()
    os.mkfifo(root / "train" / "a" / "pipe.jpg")
    with pytest.raises(common.BadImage, match=r"1\.png.*tests/tools/check_images\.py DIR lists all such images"):
        common.read_image(root / "train" / "b" / "1.png")
    done = check()
    assert done.returncode == 1 and "6 images read, 2 cannot be used" in done.stdout
    assert f"{root}/train/b/1.png: cannot identify" in done.stdout and f"{root}/train/c: this link" in done.stdout
    for kind, path in {".gif": "train/a/x.GIF", "hidden": ".thumbnails", "no regular file": "train/a/pipe.jpg"}.items():
        assert f"passed over: 1 ({kind}), such as {root}/{path}" in done.stdout


@pytest.mark.parametrize("number, tries", [(errno.ESTALE, 3), (errno.EIO, 3), (errno.ENOENT, 1), (None, 1)])
def test_an_error_of_the_disk_is_tried_again_twice(tmp_path, monkeypatch, number, tries):
    """Pillow's own errors, of damaged images, have no number."""
    path, opened, pauses, answers = save(tmp_path / "x.png", IMAGE), Image.open, [], []

    def unwilling(file):
        answers.append(file)
        if len(answers) < limit:
            raise OSError(number, "the disk says no") if number else OSError("damaged")
        return opened(file)

    monkeypatch.setattr(common.time, "sleep", pauses.append)
    monkeypatch.setattr(Image, "open", unwilling)
    limit = 4
    with pytest.raises(common.BadImage, match="says no|damaged"):
        common.read_image(path)
    assert len(answers) == tries and pauses == [1] * (tries - 1)
    answers.clear()
    limit = tries
    assert np.array_equal(common.read_image(path), IMAGE)


def test_images_are_decoded_into_one_array(monkeypatch):
    """It takes the memory of one."""
    image = np.zeros((96, 96, 3), np.uint8)
    images = common.ImageSet("x", [0] * 2000, ["a"], paths=np.array([b"x"] * 2000))
    monkeypatch.setattr(common, "read_image", lambda path: image + 1)
    tracemalloc.start()
    array = common.decode_all(images)
    peak = tracemalloc.get_traced_memory()[1] / array.nbytes
    tracemalloc.stop()
    assert 0.9 < peak < 1.2 and (array == 1).all()


def test_an_image_set_says_where_its_images_are(tmp_path, monkeypatch):
    root = write_tree(tmp_path, {"train/a": 3, "train/b": 3})
    assert str(common.load_images("patterns", size=32)) == "patterns: 4096 images (12 MiB decoded), 10 classes"
    assert str(common.load_images("folder", root)) == f"folder in {root}: 6 images (0 MiB decoded), 2 classes"
    monkeypatch.setattr(common, "IN_MEMORY", 6 * IMAGE.nbytes - 1)
    large = common.load_images("folder", root)
    assert large.array is None and str(large) == f"folder in {root}: 6 images (read when needed), 2 classes"
    train, test = common.own_images(Own([(IMAGE, 1)]), Own([(IMAGE, 1)] * 2))
    assert str(test) == "your test data set: 2 images (read when needed), labels in the items"
    assert str(own(Own([IMAGE]))) == "your training data set: 1 images (read when needed), no classes"


# ------------------------------------------------------------------------ pictures


def test_a_picture_is_written_over_nothing_but_a_picture(tmp_path, capsys):
    views = [torch.rand(3, 3, 8, 8)]
    for name, content in {"notes.md": b"mine", "last.pt": b"mine", "page.png": b"<html>", "new.jpg": None}.items():
        if content:
            (tmp_path / name).write_bytes(content)
        assert name in refused(capsys, common.save_views, tmp_path / name, views, ["a"])
        assert (tmp_path / name).read_bytes() == content if content else not (tmp_path / name).exists()
    (tmp_path / "folder.png").mkdir()
    refused(capsys, common.check_picture, tmp_path / "folder.png")
    for _ in range(2):
        common.save_views(tmp_path / "new.png", views, ["a"])
    assert Image.open(tmp_path / "new.png").format == "PNG"


def test_padded_images_of_a_subset_are_its_own():
    """As --label-fraction and --pad of eval_linear.py take them together."""
    part = common.load_images("patterns", train=False, size=16).subset(np.array([7, 3]))
    args = eval_linear.parse_args(["RUN", "--finetune", "--protocol", "patchmix", "--pad", "2"])
    padded = eval_linear.TrainingViews(part, args, INFO | dict(image_size=16)).images
    assert all(np.array_equal(padded[i][2:-2, 2:-2], part[i]) for i in range(2)) and len(padded) == 2


def test_the_demos_images_stay():
    """README's numbers are of them. The means are weighted, so that no part of a formula cancels."""
    images, labels = common.make_patterns(40, 32, seed=0)
    weight = np.linspace(-1, 1, 32)[:, None, None] * np.linspace(1, 2, 32)[:, None] * np.array([1, -2, 0.5])
    means = [(images[labels == kind] * weight).mean() for kind in range(10)]
    assert means == pytest.approx([1.311, 0.155, -3.062, 1.426, 1.165, -2.189, -0.505, -1.376, 0.222, -0.430], abs=0.01)
