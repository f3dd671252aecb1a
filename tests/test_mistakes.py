"""A mistake is one line on stderr that names it, exit status 2, no traceback, before anything is written."""

import importlib
import runpy
import subprocess
import sys
import urllib.error

import figures
import pytest
import tiny
import torch
from conftest import METHODS, ROOT, unit
from tiny import FLAGS, contents, load, refused, run

import clim
import common
import jcl
import logo
import moco_jointcrop
import patchmix

_tiny = tiny._tiny
pytestmark = pytest.mark.usefixtures("_tiny")

OF_ALL_METHODS = [  # flags, and words of the line
    ("--dataset nothing", "nothing"),
    ("--arch nothing", "unknown --arch nothing"),
    ("--nothing", "unrecognized arguments: --nothing"),
    ("--batch_size 64", "unrecognized arguments: --batch_size 64"),
    ("--epoch 3", "unrecognized arguments: --epoch 3: did you mean --epochs?"),
    ("--data-dir somewhere", "--data-dir needs --dataset"),
    ("--dataset folder --data-dir missing --batch-size 64 --patch-size 4", "missing"),
    ("--dataset imagenet --data-dir missing --batch-size 64 --patch-size 4", "missing"),
    ("--dataset cifar10 --data-dir notes.txt", "notes.txt"),
    ("--flip-p 1.5", "--flip-p: 1.5 is not from 0 to 1"),
    ("--lr nan", "--lr: nan is not from"),
    ("--lr 1e999", "--lr: 1e999 is not from"),
    ("--epochs text", "--epochs: invalid int value: 'text'"),
    ("--batch-size 1", "--batch-size: 1 is not from 2"),
    ("--crop-ratio 1.5 0.5", "--crop-ratio 1.5 0.5: give the smaller number first"),
    ("--patch-size 5", "--patch-size 5 does not divide --image-size 16"),
    ("--batch-size 128", "68 images are fewer"),
    ("--resume missing.pt", "no checkpoint at missing.pt"),
    ("--resume notes.txt", "notes.txt"),
    ("--out busy", "busy is not empty"),
    ("--out notes.txt", "notes.txt"),
    ("--warmup 3", "--warmup 3 is longer than the run, --epochs 2"),
    ("--min-lr 99", "--min-lr 99 is above the learning rate's peak"),
    ("--device cuda", "--device cuda: torch sees no CUDA device"),
]
OF_ALL_EVALUATIONS = [
    ("", "give RUN"),
    ("--random-init", "give RUN"),
    ("missing", "no checkpoint at missing"),
    ("notes.txt", "no file of torch.save"),
    ("begun --image-size 32", "go with --arch"),
    ("begun --arch vit_micro", "leave out --arch"),
    ("begun --dataset folder --data-dir missing", "missing"),
    ("begun --dataset nothing", "nothing"),
]
OF_SOME = [  # scripts, flags, words
    *((method, "--temperature 0", "--temperature: 0 is not from") for method in METHODS if method != "logo"),
    *((m, "--batch-size 6 --bn-groups 4", "4 --bn-groups of two or more") for m in METHODS if m != "patchmix"),
    ("jcl", "--batch-size 2 --bn-groups 2", "2 --bn-groups of two or more"),
    ("moco_jointcrop", "--moco v3 --queue 64", "--queue has no effect"),
    ("moco_jointcrop", "--moco v2 --hidden 64", "--hidden has no effect"),
    ("moco_jointcrop", "--variant released --joint blur", "--variant released does not go with --joint:"),
    ("moco_jointcrop", "--variant released --beta 1", "--variant released does not go with --beta:"),
    ("moco_jointcrop", "--variant released --local-crops 2", "--variant released does not go with --local-crops:"),
    (
        "moco_jointcrop",
        "--local-crops 2 --image-size 1 --arch resnet_micro",
        "--local-crops 2: local crops have to be smaller",
    ),
    ("moco_jointcrop", "--joint blur --blur-p 0 0", "--blur-p 0.5 0.5"),
    *(
        (method, "--local-crops 2 --local-size 16", "--local-size 16: local crops have to be smaller")
        for method in ("moco_jointcrop", "clim", "logo", "patchmix")
    ),
    ("jcl", "--num-keys 101", "--num-keys: 101 is not from 1 to 100"),
    ("clim", "--variant released", "no released code"),
    ("clim", "--resolutions 24 12", "--resolutions 24 12"),
    ("clim", "--resolutions 12 8", "--resolutions 12 8"),
    ("clim", "--arch test_coatnet --image-size 160 --resolutions 160 96", "test_coatnet does not work"),
    ("logo", "--arch test_coatnet --image-size 160 --local-size 96", "test_coatnet does not work"),
    ("logo", "--base simsiam --arch test_coatnet --image-size 160 --local-size 96", "test_coatnet does not work"),
    ("logo", "--local-scale 0.5 0.1", "--local-scale 0.5 0.1: give the smaller number first"),
    ("logo", "--base simsiam --temperature 0.1", "--temperature has no effect"),
    ("logo", "--hidden 64", "--hidden has no effect"),
    ("logo", "--dataset cifar10 --image-size 24 --local-size 32", "--local-size 32: local crops have to be smaller"),
    ("logo", "--patch-size 16", "--local-crops 2: local crops have to be smaller"),  # no smaller one has a whole patch
    ("logo", "--l2l --local-crops 0", "--l2l compares local crops"),
    ("logo", "--one-way", "--one-way is MoCo v2's loss"),
    *(("logo", f"--pairs all {flag}", f"leave out {flag}\n") for flag in ("--one-way", "--l2l", "--local-crops 0")),
    ("patchmix", "--bn-groups 2", "unrecognized arguments: --bn-groups"),
    ("patchmix", "--mix-slices 3", "--mix-slices 3"),
    ("patchmix", "--num-mix 9", "2 slices has 8 image(s). Give a smaller one, or --mix-slices 1"),
    ("patchmix", "--terms oto,other", "some of oto, mto, mtm"),
    ("patchmix", "--patch-size 8 --num-mix 5", "--image-size 16: 4 patch"),
    ("patchmix", "--patch-size 4 --local-crops 2 --local-size 4", "--local-size 4: 1 patch"),
    (
        "patchmix",
        "--patch-size 4 --local-crops 2 --local-size 10",
        "--local-size 10 is not a multiple of --patch-size 4",
    ),
    ("patchmix", "--patch-size 16 --local-crops 2 --num-mix 1", "--local-crops 2: local crops have to be smaller"),
    ("patchmix", "--local-crops 2 --terms mtm", "--local-crops with --terms mtm"),
    ("eval_knn", "begun --k 0", "--k: 0 is not from"),
    ("eval_linear", "begun --protocol moco --lrs 1", "--lrs is no value of this evaluation"),
    ("eval_linear", "begun --finetune --protocol moco", "not moco"),
    ("eval_linear", "begun --protocol moco --batch-size 16 --out busy", "busy is not empty"),
]
CASES = [
    *((method, *row) for method in METHODS for row in OF_ALL_METHODS),
    *((script, *row) for script in ("eval_knn", "eval_linear") for row in OF_ALL_EVALUATIONS),
    *OF_SOME,
]


@pytest.fixture(scope="module")
def begun(_tiny, tmp_path_factory):
    """A function: method -> the folder of its run that stopped in the second epoch, made once."""
    made = {}

    def folder(method):
        if method not in made:
            made[method] = tmp_path_factory.mktemp(method) / "run"
            run(method, made[method], "--max-steps", "5", "--knn-every", "0")
        return made[method]

    return folder


@pytest.fixture
def place(begun, tmp_path, monkeypatch):
    """A working folder with good and bad things in it."""
    (tmp_path / "busy").mkdir()
    for name in ("notes.txt", "busy/notes.txt"):
        (tmp_path / name).write_text("neither a checkpoint nor an image")
    (tmp_path / "begun").symlink_to(begun("jcl"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def start(script, flags):
    """Run a script with the words of its command."""
    module = importlib.import_module(script)
    usual = [*FLAGS, *([] if "--out" in flags else ["--out", "run"])] if script in METHODS else ["--device", "cpu"]
    module.main(module.parse_args([*usual, *flags.split()]))


@pytest.mark.parametrize("script, flags, words", CASES)
def test_mistakes(place, capsys, script, flags, words):
    before = contents(place)
    assert words in refused(capsys, start, script, flags)
    assert contents(place) == before


A, B, IMAGES = unit(4, 6), unit(8, 6), torch.zeros(4, 3, 8, 8)
WRONG_ARGUMENTS = {  # of functions that other projects copy
    "moco: keys of another width": lambda: moco_jointcrop.contrast(A, B[:, :5], 0.2, 0),
    "moco: positives beyond the keys": lambda: moco_jointcrop.contrast(A, B, 0.2, 5),
    "moco: a queue of another width": lambda: moco_jointcrop.info_nce(A, A, B[:, :5], 0.2),
    "moco: keys of other queries": lambda: moco_jointcrop.info_nce(A, B, B, 0.2),
    "moco: a range from 0": lambda: moco_jointcrop.sample_joint(3, 0.0, 1.0, 0.0),
    "moco: a range upside down": lambda: moco_jointcrop.sample_joint(3, 1.0, 0.2, 0.0),
    "jcl: keys of two dimensions": lambda: jcl.jcl_loss(A, A, B, 0.2, 4.0),
    "jcl: keys of other queries": lambda: jcl.jcl_loss(A, B[:, None], B, 0.2, 4.0),
    "jcl: keys of another width": lambda: jcl.jcl_loss(A, A[:, None, :5], B, 0.2, 4.0),
    "jcl: a queue of another width": lambda: jcl.jcl_loss(A, A[:, None], B[:, :5], 0.2, 4.0),
    "clim: keys of three dimensions": lambda: clim.clim_loss(A, A, A[:, None], B, 0.2, 0.5),
    "clim: a queue of another width": lambda: clim.clim_loss(A, A, A, B[:, :5], 0.2, 0.5),
    "clim: shares as a column": lambda: clim.clim_loss(A, A, A, B, 0.2, torch.rand(4, 1)),
    "clim: neighbours of a vector": lambda: clim.nearest_neighbors(A[0], 3),
    "clim: no neighbours": lambda: clim.nearest_neighbors(A, 0),
    "clim: no clusters": lambda: clim.kmeans(A, 0),
    "clim: centres of another width": lambda: clim.select_positives(A, B[:, :1], torch.zeros(4).long()),
    "clim: assignment of other rows": lambda: clim.select_positives(A, B, torch.zeros(3).long()),
    "clim: partners of another size": lambda: clim.cutmix(IMAGES, IMAGES[..., :4], 0.5),
    "clim: a share above 1": lambda: clim.cutmix(IMAGES, IMAGES, 1.5),
    "logo: another form": lambda: logo.affinity_loss(logo.Affinity(6, 8), A, A, None, "Linear"),
    "logo: another batch": lambda: logo.local_dissimilarity(logo.Affinity(6, 8), A, A, "Joint"),
    "logo: locals of other rows": lambda: logo.affinity_loss(logo.Affinity(6, 8), A, B),
    "logo: locals of three dimensions": lambda: logo.local_dissimilarity(logo.Affinity(6, 8), A[None], A[None]),
    "logo: noise of one local": lambda: logo.affinity_loss(logo.Affinity(6, 8), A, A, torch.zeros(4, 6)),
    "logo: scores of other rows": lambda: logo.Affinity(6, 8)(A, A[:1]),
    "logo: a form of the sum": lambda: logo.combine([A.sum()], [], "paper"),
    "logo: no global terms": lambda: logo.combine([], [A.sum()]),
    "patchmix: patches that do not tile": lambda: patchmix.patch_mix(IMAGES, 2, (4, 3)),
    "patchmix: none to mix": lambda: patchmix.patch_mix(IMAGES, 0, 4),
    "patchmix: more than patches": lambda: patchmix.patch_mix(IMAGES, 5, 4),
    "patchmix: no permutation": lambda: patchmix.patch_mix(IMAGES, 2, 4, torch.tensor([0, 1, 2, 2])),
    "patchmix: one image": lambda: patchmix.patch_mix(IMAGES[0], 2, 4),
    "patchmix: targets of no image": lambda: patchmix.mix_targets(0, 1),
    "patchmix: targets of no mix": lambda: patchmix.mix_targets(4, 0),
    "patchmix: keys of another width": lambda: patchmix.soft_info_nce(A, A, torch.zeros(4, 3), torch.ones(2), 1),
    "patchmix: index of other rows": lambda: patchmix.soft_info_nce(A, A, torch.zeros(3, 3), torch.ones(3), 1),
}


@pytest.mark.parametrize("call", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(ValueError):
        call()


def test_pictures_without_matplotlib_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "explain", raising=False)
    assert "pip install matplotlib" in refused(capsys, figures.main, ["explain", str(tmp_path)])


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_that_processes_cannot_share(method, place, capsys, monkeypatch):
    monkeypatch.setattr(common, "rank_and_world", lambda: (0, 3))
    assert "--batch-size 16 (global) cannot be shared out over 3" in refused(capsys, start, method, "")


def test_no_network(place, capsys, monkeypatch):
    def unreachable(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    assert "no route to host" in refused(capsys, start, "jcl", "--dataset cifar10")


@pytest.mark.parametrize("package", ["torch", "torchvision", "timm", "PIL"])
def test_a_package_that_is_too_old(package, monkeypatch, capsys):
    """A script says so when it starts, and an import never."""
    monkeypatch.setattr(sys.modules[package], "__version__", "0.9.1")
    runpy.run_path(str(ROOT / "common.py"))
    assert f"{package} 0.9.1 is too old" in refused(capsys, common.start, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("script", [*METHODS, "eval_knn", "eval_linear"])
def test_a_script_of_its_own(script, tmp_path):
    """Nothing is imported or written that would put more on the screen."""
    command = [sys.executable, str(ROOT / f"{script}.py"), "--qqqq"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    words = f"error: unrecognized arguments: --qqqq (see python {script}.py --help)\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", words) and not list(tmp_path.iterdir())


# ------------------------------------------------------- a run that cannot go on


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--lr 0.123", "(lr was 0.06, is 0.123)"),
        ("--image-size 24", "(image-size was 16, is 24)"),
        ("--min-lr 0.00001", "min-lr was 0, is 1e-05"),
        ("--jitter 0.4 0.4 0.4 0.2", "(jitter was 0.4 0.4 0.4 0.1, is 0.4 0.4 0.4 0.2)"),
    ],
)
def test_another_configuration(begun, capsys, flags, words):
    """What differs is named, and nothing else."""
    out = begun("jcl")
    before = contents(out)
    line = refused(capsys, run, "jcl", out, "--knn-every", "0", *flags.split())
    assert words in line and len(line) < 150 + len(str(out)) and contents(out) == before


def test_other_images(begun, capsys, monkeypatch):
    """Also if they are as many."""
    make = common.make_patterns
    monkeypatch.setattr(common, "make_patterns", lambda count, size, seed: make(count, size, seed + 9))
    assert "is of other images" in refused(capsys, run, "jcl", begun("jcl"), "--knn-every", "0")


@pytest.mark.parametrize("method", METHODS)
def test_resume_from_the_run_of_another(method, begun, tmp_path, capsys):
    """Another encoder, batch, size or method, or a file that is no last.pt."""
    state, file = load(begun(method) / "last.pt"), tmp_path / "file.pt"
    for change, flags, words in (
        ({}, ["--arch", "resnet_nano"], "arch was vit_micro, is resnet_nano"),
        ({}, ["--batch-size", "8"], "batch-size was 16, is 8"),
        ({}, ["--image-size", "32"], "is of other images"),
        ({"config": state["config"] | {"method": "another"}}, [], "method was another"),
    ):
        torch.save(state | change, file)
        assert words in refused(capsys, run, method, tmp_path / "new", "--resume", file, *flags)
    assert not [p for p in tmp_path.glob("new/*") if p.name != "lock"]


def wrong_states(state):
    """Yield checkpoints that look right, but lack a part, or have another model's."""
    parts = set(state) - {"backbone"}
    yield from ({k: v for k, v in state.items() if k != part} for part in sorted(parts))
    yield from (state | {part: {}} for part in sorted(parts) if isinstance(state[part], dict) and "optim" in part)
    yield state | {"model": {k: v[..., None] for k, v in state["model"].items()}}
    yield state | {"optimizer": state["optimizer"] | {"param_groups": state["optimizer"]["param_groups"] * 9}}
    yield {"step": 3}
    yield [state]


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_with_parts_missing_or_wrong(method, begun, tmp_path, capsys):
    for state in wrong_states(load(begun(method) / "last.pt")):
        torch.save(state, tmp_path / "last.pt")
        flags = ["--knn-every", "0", "--resume", tmp_path / "last.pt"]
        assert str(tmp_path / "last.pt") in refused(capsys, run, method, tmp_path / "new", *flags)
    assert not [p for p in tmp_path.glob("new/*") if p.name != "lock"]


def test_a_folder_whose_run_has_made_no_step_is_taken_over(tmp_path, monkeypatch):
    """A first run may lack the memory. The next one has a smaller batch, and what follows from it."""

    def too_little_memory(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(importlib.import_module("jcl"), "gradient_norm", too_little_memory)
        run("jcl", tmp_path, "--bn-groups", "4")
    assert load(tmp_path / "last.pt")["step"] == 0
    run("jcl", tmp_path, "--batch-size", "8", "--max-steps", "1")
    config = common.read_config(tmp_path)
    assert (config["batch_size"], config["bn_groups"], load(tmp_path / "last.pt")["step"]) == (8, 2, 1)
