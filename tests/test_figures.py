"""figures.py: the numbers that it draws. test_moco_jointcrop.py holds the distances of Fig. 7 to the paper."""

import importlib
import json

import figures
import numpy as np
import pytest
import timm
import tiny
import torch
import torch.nn.functional as F
from conftest import METHODS
from PIL import Image
from test_common import refused
from torch import nn

import clim
import common
import jcl

INFO = {"image_size": 32, "mean": (0.5,) * 3, "std": (0.2,) * 3, "interpolation": "bilinear"}
_tiny = tiny._tiny
CPU = torch.device("cpu")
GREEN = (50, 205, 50)


@pytest.fixture(scope="module")
def images():
    array, labels = common.make_patterns(10, 32, seed=3)
    return common.ImageSet("patterns", labels, common.PATTERNS, array)


def test_similarity_statistics_against_a_loop():
    features = torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 10
    similarity, variance = figures.similarity_statistics(features)
    for i, rows in enumerate(features.tolist()):
        unit = [np.array(r) / np.linalg.norm(r) for r in rows]
        assert similarity[i] == pytest.approx(np.mean([x @ y for x in unit for y in unit]))
        assert variance[i] == pytest.approx(np.diag(np.cov(np.array(unit).T, bias=True)).mean())
        assert variance[i] == pytest.approx((1 - np.square(np.mean(unit, 0)).sum()) / 7)


def test_similarity_statistics_at_the_limits():
    row = torch.arange(1.0, 7).expand(2, 4, 6)
    for scale in (1.0, torch.tensor([0.5, 1, 2, 3])[:, None]):  # lengths do not count
        similarity, variance = figures.similarity_statistics(row * scale)
        assert similarity == pytest.approx(1) and variance == pytest.approx(0, abs=1e-12)
    similarity, variance = figures.similarity_statistics(torch.eye(4)[None])  # orthogonal: only the self-pairs count
    assert similarity == pytest.approx(1 / 4) and variance == pytest.approx(3 / 16)
    for bad in (0.0, float("nan"), float("inf")):
        with pytest.raises(RuntimeError, match="zero or not finite"):
            figures.similarity_statistics(torch.full((2, 3, 4), bad))


def test_views_belong_to_the_image(images):
    """An image's views do not depend on the other images, nor on the number of views after them."""
    kinds = [figures.only_crops(0.2, 1.0)[0]._replace(jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, blur_p=1.0)]

    def found(index, count):
        return figures.view_statistics(nn.Flatten(), INFO, kinds, images, index, count, CPU)

    together = found(list(range(10)), 100)  # in batches of two
    assert together[:, [7, 4]] == pytest.approx(found([7, 4], 100))
    assert together.shape == (2, 10) and (together[0] < 0.9).all() and (together[1] > 0).all()
    three, five = (figures.view_features(nn.Flatten(), INFO, kinds, images, [7], count, CPU) for count in (3, 5))
    torch.testing.assert_close(three, five[:, :3])
    assert len(five[0].unique(dim=0)) == 5
    whole = figures.only_crops(1.0, 1.0)  # nothing but flips
    same = figures.view_statistics(nn.AdaptiveAvgPool2d(1), INFO, whole, images, [0, 1], 4, CPU)
    assert same[0] == pytest.approx(1) and same[1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_views_of_every_method(method):
    """The views that are shown to a run are its own, as its config.json says."""
    words = "--dataset imagenet --gray-p 0.37 --blur-sigma 0.5 1.5".split()
    args = importlib.import_module(method).parse_args(words)
    kinds = figures.views_of(json.loads(json.dumps(vars(args))))
    assert len(kinds) == 2 and all(view.gray_p == 0.37 and list(view.blur_sigma) == [0.5, 1.5] for view in kinds)
    assert kinds[0].size == kinds[1].size == 224
    blurs = [1.0, 0.1] if method == "patchmix" else [0.5, 0.5]
    assert [view.blur_p for view in kinds] == blurs


def test_corners(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figures.main(["corners", str(tmp_path / "out.png"), "--pairs", "1000"])
    _, *rows, last = capsys.readouterr().out.splitlines()
    table = np.array([row.split() for row in rows], float)
    assert table[:, 0].tolist() == [4 - i / 2 for i in range(17)] and abs(table[:, 1] - table[:, 3]).max() < 6
    assert (table[:, 1] > table[:, 2]).all()  # the offset narrows the range of ratios
    assert "RandomCrop" in last and (tmp_path / "out.png").exists()


@pytest.mark.parametrize("split, total", [("train", 68), ("test", 32)])
def test_similarity_of_a_run(_tiny, tmp_path, capsys, split, total):
    pytest.importorskip("matplotlib")
    tiny.run("jcl", tmp_path / "run", "--max-steps", "1")
    flags = ["--split", split, "--images", "5", "--views", "3"]
    figures.main(["similarity", str(tmp_path / "out.png"), str(tmp_path / "run"), *flags])
    assert f"5 of {total} images of patterns, {split} split, 3 views each" in capsys.readouterr().out


def test_class_similarity_against_a_loop():
    features, labels = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    unit = [row / np.linalg.norm(row) for row in features.double().numpy()]
    means = []
    for c in range(3):
        members = [unit[i] for i in range(12) if labels[i] == c]
        means.append(np.mean([a @ b for i, a in enumerate(members) for j, b in enumerate(members) if i != j]))
    assert figures.class_similarity(features, labels) == pytest.approx(np.mean(means))
    assert figures.class_similarity(torch.ones(4, 3), torch.tensor([0, 0, 1, 1])) == pytest.approx(1)
    assert figures.class_similarity(torch.eye(3), torch.tensor([0, 0, 1])) == pytest.approx(
        0
    )  # a class of one has no pairs


def test_crop_similarity_against_a_loop():
    small, large = torch.randn(2, 5, 2, 4, generator=torch.Generator().manual_seed(0)).unbind()
    found = figures.crop_similarity(small, large)
    for name, a, b in (("small-small", small, small), ("small-large", small, large), ("large-large", large, large)):
        cosine = [[F.cosine_similarity(a[i, 0], b[j, 1], dim=0).item() for j in range(5)] for i in range(5)]
        own = [cosine[i][i] for i in range(5)]
        others = [cosine[i][j] for i in range(5) for j in range(5) if i != j]
        assert found[name] == pytest.approx((np.mean(own), np.mean(others)), rel=1e-5)


def test_similarity_bars_against_a_loop():
    views = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0))
    labels, groups = torch.arange(8) % 4, torch.tensor([0, 0, 1, 1])
    kinds = {"own image": [], "own class": [], "related class": [], "other class": []}
    for i, a in enumerate(labels.tolist()):
        for j, b in enumerate(labels.tolist()):
            bar = np.exp((F.cosine_similarity(views[i, 0], views[j, 1], dim=0).item() - 1) / 0.07)
            kind = "own image" if i == j else "own class" if a == b else "related class" if a // 2 == b // 2 else ""
            kinds[kind or "other class"].append(bar)
    found = figures.similarity_bars(views, labels, groups)
    assert found == pytest.approx({kind: np.mean(bars) for kind, bars in kinds.items()}, rel=1e-4)
    alike = figures.similarity_bars(torch.ones(8, 2, 3), labels, groups)
    assert alike == pytest.approx(dict.fromkeys(kinds, 1.0))


def test_scale_accuracy(images):
    """With four mean colours as features: each image is its own neighbour at its own scale, and is found at another."""
    encoder = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    apart = common.ImageSet("patterns", np.arange(10), list("abcdefghij"), images.array)  # a class each
    found = figures.scale_accuracy(encoder, INFO, apart, apart, CPU, k=1)
    assert found.keys() == {(a, b) for a in (1.0, 0.2) for b in (1.0, 0.2)}
    assert found[1.0, 1.0] == found[0.2, 0.2] == 100 and 10 <= found[1.0, 0.2] < 100
    whole, part = (  # the bank is of the first, the queries are of the second
        figures.view_features(encoder, INFO, figures.only_crops(area, area), apart, list(range(10)), 1, CPU)[:, 0]
        for area in (1.0, 0.2)
    )
    chosen = common.knn_predict(whole, torch.arange(10), part, 1, 0.07, 10)
    assert found[1.0, 0.2] == pytest.approx(10 * (chosen == torch.arange(10)).sum().item()) != found[0.2, 1.0]
    constant = figures.scale_accuracy(lambda x: torch.ones(len(x), 2), INFO, apart, apart, CPU, k=1)
    assert all(value == 10 for value in constant.values())  # one image in ten


@pytest.mark.parametrize("model", [clim.CLIM, jcl.JCL])
def test_positives_are_chosen_by_the_momentum_encoder(model, tmp_path, images):
    """--selection knn gives each image's ten nearest, by the embeddings of what a queue method's last.pt holds."""
    args = importlib.import_module(model.__module__).parse_args(["--arch", "resnet_micro", "--out", str(tmp_path)])
    args.bf16 = False
    torch.manual_seed(0)
    model, many = model(args), images.subset(np.arange(20) % 10)
    # twenty images, all of them different
    many.array, many.rows = images.array[many.rows] + np.arange(20, dtype=np.uint8)[:, None, None, None], np.arange(20)
    for p in model.momentum_projector.parameters():  # no copy of the query's any more
        p.add_(torch.randn_like(p))
    state = dict(
        config=json.loads(json.dumps(vars(args))), backbone=common.encoder_info(args), model=model.state_dict()
    )
    common.write_file(tmp_path / "last.pt", state)
    table = figures.choose(tmp_path, many, ("knn",))["knn"]
    x = common.normalize(torch.from_numpy(many.array).permute(0, 3, 1, 2) / 255, *common.NORMS[args.norm])
    with torch.no_grad():
        x = model.eval().momentum_projector(model.momentum_backbone(x))
    nearest = torch.cdist(*[F.normalize(x, dim=1).double()] * 2).fill_diagonal_(9).topk(10, largest=False).indices
    assert table.sort(1).values.tolist() == nearest.sort(1).values.tolist()


def test_same_class_share():
    labels, table = torch.tensor([0, 0, 1]), torch.tensor([[1, 2], [0, 0], [2, 1]])
    assert figures.same_class_share(labels, table) == pytest.approx(4 / 6)


@pytest.mark.slow
def test_pictures_that_explain(tmp_path):
    """The six figures of README are drawn anew as they are kept."""
    pytest.importorskip("matplotlib")
    import explain

    explain.explain(tmp_path)
    for name in explain.FIGURES:
        files = tmp_path / f"{name}.png", explain.ROOT / ".github" / f"{name}.png"
        new, old = (np.asarray(Image.open(file).convert("RGB")).astype(int) for file in files)
        assert new.shape == old.shape and np.abs(new - old).mean() < 5, name


def test_positives_of_the_pictures_look_like_their_images():
    """The two crops of a photograph are each other's positives."""
    explain = pytest.importorskip("explain")
    photos = explain.photographs()
    assert explain.likest(explain.alike(photos)).flatten().tolist() == [1, 0, 3, 2, 5, 4]


def test_affinity_ranking():
    """An affinity that knows the batch alone ranks by it; one that is the cosine is the cosine's equal everywhere."""
    rng = torch.Generator().manual_seed(0)
    a = F.normalize(torch.randn(40, 6, generator=rng), dim=1)
    b = F.normalize(a + 0.8 * torch.randn(40, 6, generator=rng), dim=1)
    found = figures.affinity_ranking(lambda x, y: (x * y).sum(1), a, b)
    pairs = [(a[i] @ b[i], a[j] @ b[j - 1 if j > 20 else 39]) for i in range(20) for j in range(20, 40)]
    expected = np.mean([float(one > two) for one, two in pairs])
    assert 0.5 < expected < 1 and all(share == pytest.approx(expected) for share in found.values())
    batch = figures.affinity_ranking(lambda x, y: (x * y).mean() + 0 * x[:, 0], a, b)
    assert batch["in batches of their own"] == 1 and batch["in one batch"] == 0  # ties


# ------------------------------------------------------------- encoder


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A folder with data/ of three classes, backbone.pt of a ViT of 16 patches, and all pictures of it."""
    root = tmp_path_factory.mktemp("drawn")
    rng, labels = np.random.default_rng(0), np.arange(150) % 10
    images = rng.integers(0, 256, (150, 16, 16, 3), dtype=np.uint8)
    for kind, name in enumerate("abc"):
        for i, image in enumerate(images[labels == kind][:12]):
            folder = root / "data" / ("train" if i < 8 else "val") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{i:02}.png")
    torch.manual_seed(0)
    info = common.backbone_info("vit_micro", 16, 4, "patterns", method="m", encoder="query")
    common.write_file(root / "backbone.pt", info | {"state_dict": common.build_backbone(info).state_dict()})
    flags = ["--dataset", "folder", "--data-dir", root / "data", "--images", 5, 0]
    flags += [word for name in ("pictures", "attention", "similarities") for word in (f"--{name}", root / name)]
    figures.main(["encoder", *map(str, [root / "backbone.pt", *flags])])
    return root


def cells(path, columns):
    """The pictures of 128 px in a grid of framed ones: (rows, columns, 128, 128, 3); and their frames' colours."""
    sheet = np.asarray(Image.open(path)).astype(int)
    left = sheet.shape[1] - 154 * columns
    places = [[(top, left + 154 * c) for c in range(columns)] for top in range(6, sheet.shape[0], 154)]
    pictures = [[sheet[t + 3 : t + 131, x + 10 : x + 138] for t, x in row] for row in places]
    return np.array(pictures), [[tuple(sheet[t + 60, x + 8]) for t, x in row] for row in places]


def large(x):
    """An image (3, 16, 16) in [0, 1] as a grid shows it."""
    return (255 * x).round().permute(1, 2, 0).int().numpy().repeat(8, 0).repeat(8, 1)


def seen(root):
    """(encoder, [(features, images) of train/ and of val/]), file by file."""
    encoder, parts = common.load_backbone(root / "backbone.pt")[0], []
    for part in ("train", "val"):
        files = sorted((root / "data" / part).rglob("*.png"))
        x = torch.stack([torch.from_numpy(np.array(Image.open(p))).permute(2, 0, 1) / 255 for p in files])
        with torch.no_grad():
            parts.append((F.normalize(encoder((x - 0.5) / 0.2), dim=1), x))
    return encoder, parts


def test_pictures_of_neighbours(drawn):
    """Each row: a test image and its ten nearest training images, framed by whether their class is the test image's."""
    _, ((bank, train), (queries, test)) = seen(drawn)
    rows = [
        row for name in ("right", "wrong") for row in zip(*cells(drawn / "pictures" / f"{name}.png", 11), strict=True)
    ]
    shown = []
    for pictures, frames in rows:
        shown.append(next(i for i, x in enumerate(test) if (large(x) == pictures[0]).all()))
        nearest = (bank @ queries[shown[-1]]).topk(10).indices.tolist()
        assert all((large(train[j]) == picture).all() for j, picture in zip(nearest, pictures[1:], strict=True))
        assert frames[1:] == [GREEN if j // 8 == shown[-1] // 4 else (255, 0, 0) for j in nearest]
    assert sorted(shown) == list(range(12))


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
    found, expected = figures.last_attention(vit, x), explicit_attention(vit, x)
    assert found.shape == (2, 3, 9 + prefix, 9 + prefix) and found.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.sum(3), torch.ones_like(found[..., 0]), rtol=1e-12, atol=0)
    maps = figures.cls_maps(vit, x)
    for row in range(3):
        for column in range(3):  # the patches come row by row, after CLS and the registers
            assert torch.equal(maps[:, :, row, column], found[:, :, 0, prefix + 3 * row + column])
    torch.testing.assert_close(maps.sum((2, 3)), 1 - found[:, :, 0, :prefix].sum(2))


@pytest.mark.parametrize("name", ["resnet10t", "xcit_nano_12_p16_224", "vit_base_patch16_siglip_224"])
def test_what_has_no_attention_of_cls_is_refused(capsys, name):
    encoder = timm.create_model(name, num_classes=0, **({} if name == "resnet10t" else dict(depth=1)))
    assert "CLS token" in refused(capsys, lambda: figures.last_attention(encoder, torch.zeros(1, 3, 224, 224)))


def test_pictures_of_attention(drawn):
    """Images 5 and 0, two heads and their mean, 4 x 4 patches: where CLS attends to most is yellow."""
    encoder, (_, (_, test)) = seen(drawn)
    maps = figures.cls_maps(encoder, (test[[5, 0]] - 0.5) / 0.2)
    maps = torch.cat([maps, maps.mean(1, keepdim=True)], 1)
    pictures, _ = cells(drawn / "attention" / "attention.png", 5)
    for row, i in enumerate((5, 0)):
        assert abs(pictures[row, 0] - large(test[i])).max() <= 1
        assert abs(pictures[row, 4] - (large(test[i]) + pictures[row, 3]) / 2).max() <= 2
        for weights, picture in zip(maps[row].flatten(1), pictures[row, 1:4], strict=True):
            patches = picture[16::32, 16::32].reshape(16, 3)
            assert (picture == patches.reshape(4, 4, 3).repeat(32, 0).repeat(32, 1)).all()  # each patch one colour
            assert tuple(patches[weights.argmax()]) == (253, 231, 37)
            assert (np.diff(patches[weights.argsort().numpy(), 1]) >= 0).all()


def test_a_vote_is_the_papers_bar():
    """exp(sim / t) / exp(1 / t): 1 for the image itself."""
    query, keys = torch.randn(5, generator=common.generator(1)), torch.randn(4, 5, generator=common.generator(2))
    keys[2] = 3 * query
    q, rows = query.double().numpy(), keys.double().numpy()
    expected = [np.exp(q @ k / np.linalg.norm(q) / np.linalg.norm(k) / 0.5) / np.exp(1 / 0.5) for k in rows]
    found = figures.vote(query[None], keys, 0.5)[0]
    assert found.tolist() == pytest.approx(expected, rel=1e-5) and found[2] == pytest.approx(1) and found.max() <= 1


def test_keys_are_as_in_the_papers_figure():
    """Key 4 is of the query's class, 3 and 5 of the classes beside it, the others of other ones."""
    labels = np.repeat(np.arange(10), 6)
    for label in (0, 4, 9):
        keys = figures.choose_keys(labels, label, 10, np.random.default_rng(1))
        classes = labels[keys].tolist()
        assert len(set(classes)) == 7 and classes[2:5] == [(label - 1) % 10, label, (label + 1) % 10]
    assert len(figures.choose_keys(labels[labels != 2], 1, 10, np.random.default_rng(1))) == 6


def test_pictures_of_similarities(drawn):
    """The query and three keys, as there are three classes; below them the bars of the encoder and both floors."""
    _, ((bank, train), (queries, test)) = seen(drawn)
    assert sorted(p.name for p in (drawn / "similarities").iterdir()) == ["query0.png", "query5.png"]
    for i in (5, 0):
        pictures, frames = cells(drawn / "similarities" / f"query{i}.png", 4)
        assert pictures.shape[:2] == (4, 4) and (pictures[0, 0] == large(test[i])).all()
        for picture, frame, bar in zip(pictures[0, 1:], frames[0][1:], pictures[1, 1:], strict=True):
            key = next(k for k, x in enumerate(train) if (large(x) == picture).all())
            assert frame == (GREEN if key // 8 == i // 4 else (70, 130, 180))
            filled = (bar == frame).all(2)
            height = 128 * ((bank[key] @ queries[i] - 1) / 0.07).exp().item()
            assert filled.sum() == 64 * filled[:, 64].sum() and abs(filled[:, 64].sum() - height) <= 1
        assert frames[0].count(GREEN) == 1
