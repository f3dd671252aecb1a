"""The pages keep their word: links lead somewhere, commands parse, Python runs, tables are those of tests/results."""

import contextlib
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
import torchvision
from conftest import ROOT

import common

PAGES = {page: (ROOT / page).read_text() for page in ("README.md", "tests/README.md", "tests/results/README.md")}
README = PAGES["README.md"]
SCRIPTS = sorted({p.stem for p in ROOT.glob("*.py")} - {"common"})
COMMAND = re.compile(rf"(?<!/)\b(?:{'|'.join(SCRIPTS)})\.py(?: [^`\n#]*)?")

# Options of torchrun, Slurm, pytest and Docker.
OF_OTHERS = """--nnodes --nproc_per_node --max-restarts --rdzv-id --rdzv-backend --rdzv-endpoint --nodes
--ntasks-per-node --gpus-per-node --cpus-per-task --signal --requeue --time --open-mode --durations --ipc"""


def commands():
    """Every command line of one of the seven scripts, from its name on, in blocks and in the text."""
    text = "\n".join(PAGES.values()).replace("\\\n", " ")
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    blocks = [line for block in re.findall(r"```bash[^\n]*\n(.*?)```", text, re.S) for line in block.splitlines()]
    found = {c.strip() for line in inline + blocks for c in COMMAND.findall(line) if "diff" not in line}
    choices = {line: re.search(r"[\w|-]+\|[\w|-]+", line) for line in found}  # A|B stands for either
    each = [[line.replace(c[0], w) for w in c[0].split("|")] if c else [line] for line, c in choices.items()]
    return sorted({line for lines in each for line in lines})


def python_block(page, word):
    """The one Python block of a page that has a word."""
    (block,) = (b for b in re.findall(r"^```python\n(.*?)^```", PAGES[page], re.M | re.S) if word in b)
    return block


def run_block(code, **names):
    exec(compile(code, "README.md", "exec"), names)
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


def test_front_door():
    """README is short, shows every picture that is kept, and has the two commands that .ci/run takes from it."""
    assert len(README.splitlines()) <= 250 and len(README.encode()) <= 20 * 1024
    shown = {Path(p).name for text in PAGES.values() for p in re.findall(r"\]\(([^)\s]+\.png)\)", text)}
    assert shown == {p.name for p in (ROOT / ".github").glob("*.png")}
    assert all(p.stat().st_size < 250_000 for p in (ROOT / ".github").glob("*.png"))
    first, second = re.findall(r"```bash ci\n(.*?)```", README, re.S)
    assert "patchmix.py" in first and "pytest" in second


@pytest.mark.parametrize("line", commands())
def test_commands(line, monkeypatch, tmp_path):
    """Each script takes the flags that the pages give it."""
    script, *words = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    if "--help" not in words:
        importlib.import_module(script[:-3]).parse_args(words)


def test_every_flag_that_is_named_exists(monkeypatch, capsys):
    """In one of the scripts or tools."""
    assert {command.split(".py")[0] for command in commands()} == set(SCRIPTS)
    known = set(OF_OTHERS.split())
    for tool in (ROOT / "tests").rglob("*.py"):  # pytest and the tools have flags of their own
        known |= set(re.findall(r'(?:argument|option)\(\s*"(--[\w-]+)"', tool.read_text()))
    for script in SCRIPTS:
        for choice in ("", "--moco v3", "--base simsiam"):
            with contextlib.suppress(SystemExit):
                importlib.import_module(script).parse_args([*choice.split(), "--help"])
            known |= set(re.findall(r"(?<![\w-])(--[\w-]+)", capsys.readouterr().out))
    for page, text in PAGES.items():
        named = set(re.findall(r"(?<![\w<!-])(--[a-z][\w-]*)", text))
        assert named - known == set(), page


def backbone(arch, size, path):
    """An untrained encoder, written as a run would have."""
    info = common.backbone_info(arch, size, 4, method="m", encoder="query")
    Path(path).mkdir(parents=True)
    made = common.build_backbone(info).eval()
    common.write_file(Path(path) / "backbone.pt", info | {"state_dict": made.state_dict()})
    return made


def test_copied_functions():
    images, keys = torch.rand(4, 3, 32, 32), torch.randn(4, 8)
    code = python_block("README.md", "import mix_targets")
    found = run_block(code, images=images, keys=keys, encode=lambda x: x.mean((2, 3)) @ keys[:3])
    assert found["mixed"].shape == images.shape and found["loss"].isfinite()


def test_own_data_and_encoder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_block(python_block("README.md", "eval_knn.main("))
    assert (tmp_path / "runs/mine/backbone.pt").exists() and "kNN" in capsys.readouterr().out


def test_weights_elsewhere(tmp_path, monkeypatch):
    """The project's own way, timm's, and a training step of torchvision's Mask R-CNN, on random weights."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    own_code = python_block("README.md", "common.load_backbone(")
    timm_code = python_block("README.md", "timm.create_model(")
    detector_code = python_block("tests/README.md", "MaskRCNN(")
    vit = backbone("vit_micro", 32, re.search(r'"(runs/[^"/]+)', own_code)[1])
    resnet = backbone("resnet50", 224, re.search(r'"(runs/[^"/]+)', detector_code)[1])
    own, timms = run_block(own_code), run_block(timm_code)["backbone"]
    x = common.normalize(own["images"], own["info"]["mean"], own["info"]["std"])
    with torch.no_grad():
        assert torch.equal(timms(x), vit(x)) and torch.equal(own["features"], vit(x))
    found = run_block(detector_code)
    losses = {k.removeprefix("loss_"): v.item() for k, v in found["losses"].items()}
    assert set(losses) == {"classifier", "box_reg", "mask", "objectness", "rpn_box_reg"} and losses["mask"] > 0
    moved = found["resnet"].layer4[2].conv3.weight.detach() - resnet.layer4[2].conv3.weight
    assert 0 < moved.abs().max() < 0.1  # trained, from these weights
    plain = torchvision.models.resnet50()
    plain.fc = torch.nn.Identity()
    plain.load_state_dict(resnet.state_dict())
    with torch.no_grad():
        x = torch.randn(1, 3, 64, 64)
        torch.testing.assert_close(plain.eval()(x), resnet(x), rtol=1e-4, atol=1e-5)  # the same network


@pytest.mark.parametrize("arch", ["resnet18", "resnet_mini"])
def test_the_3x3_stem(arch, tmp_path, monkeypatch):
    """The lines of README for a ResNet at 32 px."""
    monkeypatch.chdir(tmp_path)
    code = python_block("README.md", "timm.create_model(")
    made, x = backbone(arch, 32, re.search(r'"(runs/[^"/]+)', code)[1]), torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(run_block(code)["backbone"](x), made(x))
