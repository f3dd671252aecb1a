"""Tests the pages: links, commands, Python code, tables, numbers, pictures. Differences cited in files are listed."""

import importlib
import inspect
import re
import shlex

import gpu_list
import numpy as np
import pytest
import results
import torch
from conftest import METHODS, ROOT
from PIL import Image
from tiny import run, save_encoder
from torchvision.transforms import RandomResizedCrop, functional

import common
import jcl
import moco_jointcrop

PAGES = "README.md", "tests/README.md", "tests/running.md", "tests/results/README.md", "tests/results/earlier.md"
PAGES = {page: (ROOT / page).read_text() for page in PAGES}
SCRIPTS = sorted({p.stem for p in ROOT.glob("*.py")} - {"common"})
COMMAND = re.compile(rf"(?<!/)\b(?:{'|'.join(SCRIPTS)})\.py(?: [^`\n#]*)?")
BLOCKS = [code for page in PAGES.values() for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)]
WORDS = "JCL(", "timm.create_model(", "logsumexp"  # each is in one block
LOOP, WEIGHTS, LOSS = (code for word in WORDS for code in BLOCKS if word in code)
OTHERS = [code for code in BLOCKS if code not in (LOOP, WEIGHTS, LOSS)]


def run_block(code, **names):
    """Run a block of Python and return its variables, {name: value}."""
    names["__name__"] = "__main__"
    exec(code, names)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        if not path.startswith("https://arxiv.org/abs/"):
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), target
            if anchor:
                titles = re.findall(r"^#+ (.*)$", file.read_text().lower(), re.M)
                assert anchor in [re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles], target


def test_commands(here):
    """Every command line of a script, in blocks and in the text, is parsed without an error."""
    text = "\n".join(PAGES.values()).replace("\\\n", " ")
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    blocks = "\n".join(re.findall(r"```bash[^\n]*\n(.*?)```", text, re.S)).splitlines()
    commands = {command.strip() for line in inline + blocks for command in COMMAND.findall(line)}
    assert {line.split(".py")[0] for line in commands} == set(SCRIPTS)
    for line in sorted(commands):
        script, *words = shlex.split(line)
        if words and "--help" not in words:  # a name alone is not a command
            importlib.import_module(script[:-3]).parse_args(words)


@pytest.mark.parametrize("code", OTHERS, ids=range(len(OTHERS)))
def test_blocks_of_python_run(code, _tiny, here):
    """The runs that a block reads are made first."""
    if "matplotlib" in code:
        pytest.importorskip("matplotlib").use("Agg")
    for out in set(re.findall(r"runs/[\w.-]+", code)) - set(re.findall(r"--out (\S+?)\"", code)):
        run("jcl", out, "--epochs", 1, "--batch-size", 64)
    run_block(code)


def test_the_loss_in_lines():
    q, k, queue = (torch.nn.functional.normalize(torch.randn(shape), dim=-1) for shape in ((6, 8), (6, 3, 8), (9, 8)))
    found = run_block(LOSS, torch=torch, q=q, k=k, queue=queue, temperature=0.2, lam=4.0)["loss"]
    torch.testing.assert_close(found, jcl.jcl_loss(q, k, queue, 0.2, 4.0))


def test_a_users_own_loop():
    """Each step updates the user's encoder, then the momentum encoder, whose keys become the next negatives."""
    found = run_block(LOOP)
    encoder, model, keys = found["encoder"], found["model"], found["keys"]
    pairs = [*zip(encoder.parameters(), model.momentum_backbone.parameters(), strict=True)]
    assert found["loss"].isfinite() and model.backbone is encoder and len(pairs) > 10
    assert all(fast.grad is not None and 0 < (fast - slow).abs().max() < 1 for fast, slow in pairs)
    new = model.queue.keys.norm(dim=1) < 1 - 1e-5  # means of keys; the initial vectors have a norm of 1
    assert new.sum() == len(found["images"]) and torch.equal(model.queue.keys[-len(keys) :], keys)


@pytest.mark.parametrize("arch", ["vit_micro", "resnet18", "resnet_mini"])
def test_weights_elsewhere(arch, here):
    info, x = common.backbone_info(arch, 32, 4) | dict(method="m", encoder="query"), torch.rand(2, 3, 32, 32)
    made = save_encoder(here / "runs/jcl-patterns-resnet_micro-s0-epochs20", info)
    with torch.no_grad():
        assert torch.equal(run_block(WEIGHTS)["backbone"](x), made(x))


def test_tables(tmp_path):
    """The page has each table that tests/tools/results.py makes from tests/results/, unless the table is empty."""
    gpu_list.write(tmp_path / "begin.json", results.kept("begin"))
    assert (tmp_path / "begin.json").read_bytes() == (results.KEPT / "begin.json").read_bytes()
    text = results.PAGE.read_text()
    assert results.with_tables(text) == text
    found = re.findall(r"<!-- tests/tools/results.py: (.*) -->\n\| .*\n\| ---.*\n\| .*", text)
    assert {*found} == {what for what, make in results.TABLES.items() if make()}
    assert [*results.kept("begin")] == [*results.BEGINS]  # every recipe has a run


def test_the_numbers_of_the_front_page():
    """README's column "ours" has kNN accuracies, as means over seeds, and the page quotes JointCrop's 50 epochs."""
    page = PAGES["README.md"]
    expected = []
    for method, baseline in results.COMPARED.values():
        found, theirs = (results.small(name + results.OWN, 20) for name in (method, baseline))
        means = np.mean([theirs[seed] for seed in found]), np.mean([*found.values()])
        expected.append("{:.1f} → {:.1f}".format(*means))
        signs = {np.sign(round(found[seed] - theirs[seed], 1)) for seed in found}
        assert (signs >= {-1, 1}) == (method in ("JCL", "CLIM"))
    assert re.findall(r"\| (\S+ → \S+) \|$", page, re.M) == expected
    joint, moco = (results.small(name + results.OWN, 50) for name in ("J-Crop(0)", "MoCo v2"))
    gains = [joint[seed] - moco[seed] for seed in joint]
    assert f"and {gains[0]:+.1f} points." in page and f"50 epochs, where another seed gained {gains[1]:.1f}" in page


@pytest.mark.slow
def test_pictures_that_explain(tmp_path):
    """Drawing the six figures of the pages again gives nearly the same pixels."""
    pytest.importorskip("matplotlib")
    import figures

    figures.main(tmp_path)
    for name in figures.FIGURES:
        files = tmp_path / f"{name}.png", ROOT / ".github" / f"{name}.png"
        new, old = (np.asarray(Image.open(file).convert("RGB")).astype(int) for file in files)
        assert new.shape == old.shape and np.abs(new - old).mean() < 5, name


@pytest.mark.parametrize("method", METHODS)
def test_tops_and_ends(method):
    """At most 30 lines precede the imports, with the demo's command. Each (D3) that is cited is listed at the end."""
    text = (ROOT / f"{method}.py").read_text()
    (flags,) = re.findall(r'common.start\(main, parse_args, "(.*)"\)', text)
    assert f"    torchrun --nproc_per_node=8 {method}.py {flags}" in text
    text, end = re.split(r"^# =+ \d\. differences between the paper.*$", text, flags=re.M)
    assert text.partition("\nimport argparse")[0].count("\n") < 30
    listed = re.findall(r"^# D(\d+) ", end, re.M)
    assert listed == [str(i + 1) for i in range(len(listed))]
    assert {*re.findall(r"\bD(\d+)\b", text)} <= {*listed}


def test_the_lines_of_joint_crop():
    """The code in its docstring gives two views of 224 px without the class."""
    _, _, lines = moco_jointcrop.JointCrop.__doc__.rpartition(":\n\n")
    names = dict(torch=torch, sample_joint=moco_jointcrop.sample_joint, image=Image.new("RGB", (300, 260)))
    names |= dict(resized_crop=functional.resized_crop, gaussian_blur=functional.gaussian_blur)
    found = run_block(inspect.cleandoc(lines), RandomResizedCrop=RandomResizedCrop, **names)  # it blurs both views
    assert [view.size for view in found["views"]] == [(224, 224)] * 2 and len(found["sigmas"]) == 2


def test_a_demo_says_so(monkeypatch, capsys):
    """It prints the paper's command before and after, unlike runs on real data or other ranks. It has one thread."""
    for flags, rank, lines, threads in (("", "0", 3, 1), ("--dataset cifar10", "0", 0, 2), ("", "1", 0, 1)):
        monkeypatch.setenv("RANK", rank)
        torch.set_num_threads(2)
        common.start(lambda args: print("main"), lambda flags=flags: jcl.parse_args(flags.split()), "--queue 9")
        said = capsys.readouterr().out.splitlines()
        assert said[lines] == "main" and said[lines + 1 :] == said[:lines][-1:] and len(said) == lines + 1 + bool(lines)
        assert torch.get_num_threads() == threads
        assert not lines or "image size" in said[1]
        assert not lines or said[2] == "At full scale: torchrun --nproc_per_node=8 jcl.py --queue 9"
