"""The pages keep their word: links lead somewhere, commands parse, Python runs."""

import importlib
import re
import shlex
from pathlib import Path

import diff_mains
import pytest
import torch
from conftest import ROOT
from tiny import save_encoder

import common

PAGES = {page: (ROOT / page).read_text() for page in ("README.md", "tests/README.md", "tests/results/README.md")}
SCRIPTS = sorted({p.stem for p in ROOT.glob("*.py")} - {"common"})
COMMAND = re.compile(rf"(?<!/)\b(?:{'|'.join(SCRIPTS)})\.py(?: [^`\n#]*)?")


def commands():
    """Every command line of a script, from its name on, in blocks and in the text."""
    text = "\n".join(PAGES.values()).replace("\\\n", " ")
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    blocks = [line for block in re.findall(r"```bash[^\n]*\n(.*?)```", text, re.S) for line in block.splitlines()]
    return sorted({c.strip() for line in inline + blocks for c in COMMAND.findall(line) if "diff" not in line})


def blocks(page, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.M | re.S)


COPIED, LOOP, OWN, WEIGHTS = FRONT = "import mix_targets", "JCL(", "eval_knn.main(", "timm.create_model("


def run_block(word, page="README.md", **names):
    """What the one Python block of a page that has a word leaves, {name: value}."""
    (code,) = (block for block in blocks(page) if word in block)
    exec(compile(code, page, "exec"), names)
    return names


def anchors(page):
    return [re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", page, re.M)]


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        if not path.startswith("https://arxiv.org/abs/"):
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file.read_text()), target


def test_commands(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert {line.split(".py")[0] for line in commands()} == set(SCRIPTS)
    for line in commands():
        script, *words = shlex.split(line)
        if "--help" not in words:
            importlib.import_module(script[:-3]).parse_args(words)


def test_the_shown_difference_of_two_papers():
    (shown,) = blocks("README.md", "diff")
    assert shown.splitlines() == diff_mains.difference("moco_jointcrop.py", "jcl.py", loop=True)


def test_each_block_of_the_front_page_is_run():
    assert [sum(word in block for word in FRONT) for block in blocks("README.md")] == [1] * len(FRONT)


def test_copied_functions():
    images, keys = torch.rand(4, 3, 32, 32), torch.randn(4, 8)
    found = run_block(COPIED, images=images, keys=keys, encode=lambda x: x.mean((2, 3)) @ keys[:3])
    assert found["mixed"].shape == images.shape and found["loss"].isfinite()


def test_a_loop_of_ones_own():
    """Each step moves the user's own encoder, and the momentum encoder after it; its keys are the next negatives."""
    found = run_block(LOOP)
    encoder, model, keys = found["encoder"], found["model"], found["keys"]
    pairs = [*zip(encoder.parameters(), model.momentum_backbone.parameters(), strict=True)]
    assert found["loss"].isfinite() and model.backbone is encoder and len(pairs) > 10
    assert all(fast.grad is not None and 0 < (fast - slow).abs().max() < 1 for fast, slow in pairs)
    position, steps = int(model.queue.position), len(found["images"]) // len(keys)
    assert position == steps * len(keys) and torch.equal(model.queue.keys[position - len(keys) : position], keys)


def test_own_data_and_encoder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = run_block(OWN)
    assert "kNN" in capsys.readouterr().out
    common.load_backbone("runs/mine", module=found["encoder"])
    saved = torch.load("runs/mine/backbone.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in found["encoder"].state_dict().items())


@pytest.mark.parametrize("arch", ["vit_micro", "resnet18", "resnet_mini"])
def test_weights_elsewhere(arch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    info, x = common.backbone_info(arch, 32, 4, method="m", encoder="query"), torch.rand(2, 3, 32, 32)
    made = save_encoder(Path("runs/patchmix-patterns-vit_micro-s0"), info)
    with torch.no_grad():
        assert torch.equal(run_block(WEIGHTS)["backbone"](x), made(x))


@pytest.mark.slow
def test_a_detector(tmp_path, monkeypatch):
    """torchvision's Mask R-CNN on a random ResNet-50, which torchvision builds as the same."""
    monkeypatch.chdir(tmp_path)
    info, x = common.backbone_info("resnet50", 224, None, method="m", encoder="query"), torch.randn(1, 3, 64, 64)
    resnet = save_encoder(Path("runs/jcl-imagenet-resnet50-s0"), info)
    found = run_block("MaskRCNN(", "tests/README.md")
    with torch.no_grad():
        features = found["resnet"].eval()(x)
        torch.testing.assert_close(features, resnet(x), rtol=1e-4, atol=1e-5)
        deepest = found["detector"].backbone.eval().body(x)["3"]
    torch.testing.assert_close(deepest.mean((2, 3)), features, rtol=1e-4, atol=1e-5)
