"""eval_knn.py beside its number: dump, attention maps, similarity bars."""

import contextlib
import io

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from test_common import refused

import common
import eval_knn

YELLOW, GREEN, BLUE, PALE = (253, 231, 37), (50, 205, 50), (70, 130, 180), 235
TRAIN, TEST = 8, 4  # images a class


def knn(*flags):
    return eval_knn.main(eval_knn.parse_args([*map(str, flags), "--device", "cpu", "--workers", "0"]))


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """(folder, results, what was printed) of one evaluation with every extra: a ViT of 16 patches, three classes."""
    root = tmp_path_factory.mktemp("judged")
    images, labels = common.make_patterns(150, 16, 0)
    for kind, name in enumerate("abc"):
        for i, image in enumerate(images[labels == kind][: TRAIN + TEST]):
            folder = root / "data" / ("train" if i < TRAIN else "val") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{i:02}.png")
    torch.manual_seed(0)
    info = common.backbone_info("vit_micro", 16, 4, "patterns", method="m", encoder="query")
    common.save_checkpoint(root / "backbone.pt", info | {"state_dict": common.build_backbone(info).state_dict()})
    flags = [root / "backbone.pt", "--dataset", "folder", "--data-dir", root / "data", "--k", 3, "--images", 5, 0]
    flags += ["--dump", root / "new" / "features.npz", "--attention", root / "maps", "--similarities", root / "bars"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        results = knn(*flags)
    return root, results, printed.getvalue()


def features(root, part):
    """The encoder's features of the images of a part, in the order of the folders, without the project's loaders."""
    encoder = common.load_backbone(root / "backbone.pt")[0]
    files = sorted((root / "data" / part).rglob("*.png"))
    x = torch.stack([torch.from_numpy(np.array(Image.open(p))).permute(2, 0, 1) / 255 for p in files])
    with torch.no_grad():
        return encoder((x - 0.5) / 0.2), x, files


# ------------------------------------------------------------- the dump


def test_dump_is_what_was_judged(judged):
    root, results, printed = judged
    with np.load(root / "new" / "features.npz", allow_pickle=False) as file:
        data = dict(file)
    names = {f"{part}_{what}" for part in ("train", "test") for what in ("features", "labels", "paths")}
    assert set(data) == names | {"classes", "protocol"} and data["classes"].tolist() == list("abc")
    assert str(data["protocol"]) in printed
    for part, folder, count in (("train", "train", TRAIN), ("test", "val", TEST)):
        x, _, files = features(root, folder)
        assert data[f"{part}_features"].dtype == np.float32 and data[f"{part}_labels"].dtype == np.int64
        np.testing.assert_allclose(data[f"{part}_features"], x.numpy(), rtol=1e-4, atol=1e-5)
        assert data[f"{part}_paths"].tolist() == [str(p) for p in files]
        assert data[f"{part}_labels"].tolist() == [c for c in range(3) for _ in range(count)]
    bank, queries = (data[f"{p}_features"].astype(float) for p in ("train", "test"))
    bank, queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (bank, queries))
    right = 0
    for similarity, truth in zip(queries @ bank.T, data["test_labels"], strict=True):
        votes = np.zeros(3)
        for i in np.argsort(-similarity)[:3]:
            votes[data["train_labels"][i]] += np.exp(similarity[i] / 0.07)
        right += votes.argmax() == truth
    assert results["encoder"]["knn3_top1"] == pytest.approx(100 * right / len(queries))
    assert f"k=3 {100 * right / len(queries):.2f} %" in printed and not list((root / "new").glob("*.tmp"))


def test_it_says_which_files_it_wrote(judged):
    root, _, printed = judged
    files = [p for p in root.rglob("*.*") if "data" not in p.parts and p.name != "backbone.pt"]
    assert len(files) == 4 and all(f"written to {path}" in printed for path in files)


def test_dump_without_paths(tmp_path):
    images = common.ImageSet("patterns", [1, 0], ["u", "é"], np.zeros((2, 4, 4, 3), np.uint8))
    x = torch.arange(6.0).view(2, 3)
    parts = {"train": images, "test": images}
    eval_knn.write_dump(tmp_path / "f", "words", parts, {"train": x, "test": x + 1})  # the name stays as it was given
    data = np.load(tmp_path / "f", allow_pickle=False)
    assert data["train_index"].tolist() == [0, 1] and data["classes"].tolist() == ["u", "é"]
    assert np.array_equal(data["test_features"], x.numpy() + 1) and "train_paths" not in data


# ------------------------------------------------------------- attention


def explicit_attention(vit, x):
    """softmax(q k' / sqrt(d)) of the last block, from its own weights, for timm's VisionTransformer."""
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(x)))
    for block in vit.blocks[:-1]:
        tokens = block(tokens)
    attention, tokens = vit.blocks[-1].attn, vit.blocks[-1].norm1(tokens)
    heads, width = attention.num_heads, tokens.shape[2] // attention.num_heads
    rows = []
    for head in range(heads):
        part = [slice(i * heads * width + head * width, i * heads * width + (head + 1) * width) for i in (0, 1)]
        q, k = (tokens @ attention.qkv.weight[s].T + attention.qkv.bias[s] for s in part)
        weight = (attention.q_norm(q) @ attention.k_norm(k).mT / width**0.5).exp()
        rows.append(weight / weight.sum(2, keepdim=True))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("more", [{}, dict(qk_norm=True, reg_tokens=2), dict(global_pool="avg", init_values=0.1)])
@torch.no_grad()
def test_attention_is_the_last_blocks_softmax(more):
    torch.manual_seed(1)
    size = dict(img_size=24, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=0)
    vit = timm.create_model("vit_tiny_patch16_224", **size, **more).double().eval()
    for p in vit.parameters():
        p.add_(0.3 * torch.randn_like(p))  # biases and tokens are zero at the start, and the softmax flat
    x, prefix = torch.randn(2, 3, 24, 24, dtype=torch.float64), 1 + more.get("reg_tokens", 0)
    fused, before = vit.blocks[-1].attn.fused_attn, vit(x)
    found, expected = eval_knn.last_attention(vit, x), explicit_attention(vit, x)
    assert found.shape == (2, 3, 9 + prefix, 9 + prefix) and found.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.sum(3), torch.ones_like(found[..., 0]), rtol=1e-12, atol=0)
    maps = eval_knn.cls_maps(vit, x)
    for row in range(3):
        for column in range(3):  # the patches come row by row, after CLS and the registers
            assert torch.equal(maps[:, :, row, column], found[:, :, 0, prefix + 3 * row + column])
    torch.testing.assert_close(maps.sum((2, 3)), 1 - found[:, :, 0, :prefix].sum(2))
    assert (
        vit.blocks[-1].attn.fused_attn == fused
        and torch.equal(vit(x), before)
        and not vit.blocks[-1].attn.attn_drop._forward_pre_hooks
    )


@pytest.mark.parametrize(
    "name, more",
    [("resnet10t", {}), ("vit_tiny_patch16_224", dict(class_token=False, global_pool="avg", depth=1, img_size=32))]
    + [
        ("vit_tiny_patch16_224", dict(attn_layer="diff", depth=1, img_size=32)),
        ("xcit_nano_12_p16_224", dict(depth=1)),
    ],
)
def test_what_has_no_cls_attention_is_refused(capsys, name, more):
    encoder = timm.create_model(name, num_classes=0, **more).eval()
    assert "--attention" in refused(capsys, lambda: eval_knn.last_attention(encoder, torch.zeros(1, 3, 32, 32)))


def cells(path, columns):
    """The picture's cells of 96 px, 6 px apart, 14 px for a caption below: (rows, columns, 96, 96, 3)."""
    with Image.open(path) as image:
        sheet = np.array(image).astype(int)
    left, rows = sheet.shape[1] - 102 * columns, (sheet.shape[0] - 6) // 116
    assert sheet.shape[0] == 6 + 116 * rows and left >= 6
    return np.stack(
        [
            [sheet[t : t + 96, x : x + 96] for x in range(left, sheet.shape[1], 102)]
            for t in range(6, sheet.shape[0], 116)
        ]
    )


def test_attention_pictures(judged):
    """Images 5 and 0, two heads and their mean, 4 x 4 patches of 24 px; where CLS attends to most is yellow."""
    root = judged[0]
    assert [p.name for p in (root / "maps").iterdir()] == ["attention.png"]
    _, x, _ = features(root, "val")
    maps = eval_knn.cls_maps(common.load_backbone(root / "backbone.pt")[0], (x[[5, 0]] - 0.5) / 0.2)
    maps = torch.cat([maps, maps.mean(1, keepdim=True)], 1)
    sheet = cells(root / "maps" / "attention.png", 5)
    assert sheet.shape == (2, 5, 96, 96, 3)
    for row, i in enumerate((5, 0)):
        pixels = (255 * x[i]).round().permute(1, 2, 0).int().numpy().repeat(6, 0).repeat(6, 1)
        assert (sheet[row, 0] == pixels).all() and abs(sheet[row, 4] - (pixels + sheet[row, 3]) / 2).max() <= 1
        for which, map_ in enumerate(maps[row]):
            blocks = sheet[row, 1 + which].reshape(4, 24, 4, 24, 3)
            assert (blocks == blocks[:, :1, :, :1]).all()  # each patch one colour
            y, x_ = divmod(int(map_.argmax()), 4)
            assert tuple(blocks[y, 0, x_, 0]) == YELLOW
            green = blocks[:, 0, :, 0, 1].flatten()
            assert (np.diff(green[map_.flatten().argsort().numpy()]) >= 0).all()


# ------------------------------------------------------------- similarities


def test_similarity_is_the_papers():
    """exp(sim / t) / exp(1 / t), 1 for the image itself."""
    g = common.generator(1)
    query, keys = torch.randn(5, generator=g), torch.randn(4, 5, generator=g)
    keys[2] = 3 * query
    q, rows = query.double().numpy(), keys.double().numpy()
    expected = [np.exp(q @ k / np.linalg.norm(q) / np.linalg.norm(k) / 0.5) / np.exp(1 / 0.5) for k in rows]
    found = eval_knn.similarity(query, keys, 0.5)
    assert found.tolist() == pytest.approx(expected, rel=1e-5) and found[2] == pytest.approx(1) and found.max() <= 1


def test_keys_are_as_in_the_papers_figure():
    """Key 4 is of the query's class, 3 and 5 of the classes beside it, the others of other ones."""
    labels = np.repeat(np.arange(10), 6)
    images = common.ImageSet("x", labels, list("abcdefghij"), np.zeros((60, 2, 2, 3), np.uint8))
    args = eval_knn.parse_args(["run", "--similarities", "bars"])
    chosen, keys = eval_knn.choose_images(args, images, images)
    assert len(set(chosen)) == 4 and (chosen, keys) == eval_knn.choose_images(args, images, images)
    for i, own in zip(chosen, keys, strict=True):
        classes, label = labels[own].tolist(), labels[i]
        assert len(own) == 7 == len(set(classes)) and classes[2:5] == [(label - 1) % 10, label, (label + 1) % 10]
    args = eval_knn.parse_args(["run", "--similarities", "bars", "--images", "9", "--keys", "1", "59"])
    assert eval_knn.choose_images(args, images, images) == ([9], [[1, 59]])
    args = eval_knn.parse_args(["run", "--similarities", "bars", "--images", "9"])
    fewer = images.subset(np.flatnonzero(labels != 2))  # a class without training images has no key
    assert len(eval_knn.choose_images(args, fewer, images)[1][0]) == 6


def test_similarity_pictures(judged):
    """The query and three keys (there are three classes), below them the bars of the encoder and both floors."""
    root = judged[0]
    bank, train_pixels, _ = features(root, "train")
    queries, pixels, _ = features(root, "val")
    assert sorted(p.name for p in (root / "bars").iterdir()) == ["query0.png", "query5.png"]
    large = lambda image: (255 * image).round().permute(1, 2, 0).int().numpy().repeat(6, 0).repeat(6, 1)  # noqa: E731
    for i in (5, 0):
        sheet = cells(root / "bars" / f"query{i}.png", 4)
        assert sheet.shape == (4, 4, 96, 96, 3) and (sheet[0, 0] == large(pixels[i])).all()
        keys = [next(k for k, p in enumerate(train_pixels) if (large(p) == sheet[0, c]).all()) for c in (1, 2, 3)]
        expected = ((F.normalize(bank[keys], dim=1) @ F.normalize(queries[i], dim=0) - 1) / 0.07).exp()
        for c, (key, value) in enumerate(zip(keys, expected.tolist(), strict=True), start=1):
            colour = GREEN if key // TRAIN == i // TEST else BLUE
            filled = (sheet[1, c] == colour).all(2)
            assert abs(filled[:, 48].sum() - 96 * value) <= 1
            assert filled.sum() == filled[:, 48].sum() * filled.any(0).sum()
            assert filled[95, 48] == (filled.sum() > 0) and (sheet[1, c, :, 48][~filled[:, 48]] == PALE).all()
        assert sum(key // TRAIN == i // TEST for key in keys) == 1
        assert (sheet[1:, 0] == 255).all()


# ------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--dump HERE/backbone.pt", "there already"),
        ("--dump HERE/backbone.pt/f.npz", "cannot be written"),
        ("--attention HERE/backbone.pt", "cannot be written"),
        ("--similarities HERE/backbone.pt/x", "cannot be written"),
        ("--attention HERE/n --images 12", "from 0 to 11"),
        ("--attention HERE/n --images -1", "from 0 to"),
        ("--similarities HERE/n --keys 0 24", "from 0 to 23"),
    ],
)
def test_mistakes_are_one_line(judged, capsys, monkeypatch, flags, words):
    root = judged[0]
    monkeypatch.setattr(common, "extract_features", lambda *_, **__: pytest.fail("work was begun"))
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*.*")}
    flags = flags.replace("HERE", str(root)).split()
    run = [root / "backbone.pt", "--dataset", "folder", "--data-dir", root / "data", *flags]
    assert words in refused(capsys, lambda: knn(*run))
    assert before == {p: p.stat().st_mtime_ns for p in root.rglob("*.*")}


def test_attention_of_a_resnet_is_refused_before_the_data_are_read(judged, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "load_images", lambda *_, **__: pytest.fail("the data were read"))
    flags = ["--arch", "resnet_micro", "--random-init", "--dataset", "folder", "--data-dir", judged[0] / "data"]
    assert "CLS token" in refused(capsys, lambda: knn(*flags, "--attention", tmp_path / "maps"))
