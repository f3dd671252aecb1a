"""A mistake is one line on stderr that names it, exit status 2, no traceback, before anything is trained."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import JCL_AT_ONCE, METHODS, QUEUES, ROOT, unit
from tiny import FLAGS, contents, epochs_of, load, refused, run

import clim
import common
import jcl
import logo
import moco_jointcrop
import patchmix

pytestmark = pytest.mark.usefixtures("_tiny")

EVALUATIONS = "eval_knn", "eval_linear"
MISTAKES = [  # scripts, flags, what the line has to name
    (METHODS, "--arch nothing", "nothing"),
    (METHODS, "--epoch 3", "--epoch"),  # not taken for --epochs
    (METHODS, "--dataset folder --data-dir missing --epochs 9 --patch-size 4", "missing"),
    (METHODS, "--dataset cifar10 --data-dir notes.txt --epochs 9", "notes.txt"),
    (METHODS, "--batch-size 128", "68 images"),
    (METHODS, "--patch-size 5", "--patch-size"),
    (METHODS, "--min-lr 99", "--min-lr"),
    (METHODS, "--device cuda", "--device cuda"),
    (METHODS, "--resume missing.pt", "missing.pt"),
    (METHODS, "--out busy", "thesis.txt"),
    (METHODS, "--out /proc/run", "/proc/run"),
    (QUEUES, "--batch-size 6 --bn-groups 4", "--bn-groups"),
    (QUEUES, "--arch resnet_nano --amp bf16", "--amp bf16 on a CPU"),  # torch computes it wrongly
    (["moco_jointcrop"], "--moco v3 --queue 64", "--queue"),
    (["moco_jointcrop"], "--variant released --joint blur", "--variant released"),
    (["moco_jointcrop"], "--joint blur --blur-p 0 0", "--blur-p"),
    (["moco_jointcrop"], "--joint-pair local", "--local-crops"),
    (["clim"], "--clim-start 2", "--clim-start"),
    (["clim"], "--resolutions 24 12", "--resolutions"),
    (["logo"], "--base simsiam --temperature 0.1", "--temperature"),
    (["logo"], "--l2l --local-crops 0", "--l2l"),
    (["logo"], "--one-way", "--one-way"),
    (["patchmix"], "--mix-slices 3", "--mix-slices"),
    (["patchmix"], "--terms oto,other", "--terms"),
    (["patchmix"], "--patch-size 8 --num-mix 5", "--num-mix"),
    (["patchmix"], "--local-crops 2 --terms mtm", "--terms mtm"),
    (EVALUATIONS, "", "RUN"),
    (EVALUATIONS, "notes.txt", "notes.txt"),
    (EVALUATIONS, "begun --arch vit_micro", "--arch"),
    (EVALUATIONS, "begun --norm cifar10", "--norm"),  # would be lost in silence
    (EVALUATIONS, "begun/last.pt --arch vit_micro --encoder query", "--prefix"),
    (["eval_linear"], "begun --finetune --protocol moco", "moco"),
    (["eval_linear"], "begun --label-fraction 0.1 --label-files notes.txt", "--label-files"),
    (["eval_linear"], "begun --lr 1", "--lr"),
    (["eval_linear"], "begun --lrs", "--lrs"),
    (["eval_linear"], "begun --solver lbfgs --strengths", "--strengths"),
    (["eval_linear"], "begun --protocol moco", "68 images"),
    (["eval_linear"], "begun --finetune --batch-size 15", "--batch-size 15"),  # mixup pairs images
    (["eval_linear"], "begun --finetune --head-lr 5", "--layer-decay 1"),
    (["eval_knn"], "begun --k", "--k"),
    (["eval_knn"], "begun --dump notes.txt", "--dump"),
]


@pytest.fixture
def place(begun, tmp_path, monkeypatch):
    """A working folder with good and bad things in it."""
    (tmp_path / "busy").mkdir()
    for name in ("notes.txt", "busy/thesis.txt", "busy/draft.tmp"):
        (tmp_path / name).write_text("neither a checkpoint nor an image")
    (tmp_path / "begun").symlink_to(begun("jcl"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def start(script, flags):
    module = importlib.import_module(script)
    usual = [*FLAGS, *([] if "--out" in flags else ["--out", "run"])] if script in METHODS else ["--device", "cpu"]
    common.start(module.main, lambda: module.parse_args([*usual, *flags.split()]))


@pytest.mark.parametrize("script, flags, name", [(s, *row) for scripts, *row in MISTAKES for s in scripts])
def test_mistakes(place, capsys, script, flags, name):
    before = contents(place)
    assert name in refused(capsys, start, script, flags)
    after = contents(place)
    after.pop(Path("run/config.json"), None)  # shows that the folder can be written
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize("script", [*METHODS, *EVALUATIONS])
def test_a_script_as_a_program(script, tmp_path):
    command = [sys.executable, str(ROOT / f"{script}.py"), "--qqqq"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and not list(tmp_path.iterdir())
    assert "--qqqq" in done.stderr and done.stderr.count("\n") == 1


A, B, IMAGES = unit(4, 6), unit(8, 6), torch.zeros(4, 3, 8, 8)
WRONG_ARGUMENTS = {  # of functions that other projects copy
    "moco: positives beyond the keys": lambda: moco_jointcrop.contrast(A, B, 0.2, 5),
    "moco: keys of other queries": lambda: moco_jointcrop.info_nce(A, B, B, 0.2),
    "moco: a range from 0": lambda: moco_jointcrop.sample_joint(3, 0.0, 1.0, 0.0),
    "moco: a range upside down": lambda: moco_jointcrop.sample_joint(3, 1.0, 0.2, 0.0),
    "jcl: keys of two dimensions": lambda: jcl.jcl_loss(A, A, B, 0.2, 4.0),
    "jcl: keys of other queries": lambda: jcl.jcl_loss(A, B[:, None], B, 0.2, 4.0),
    "clim: keys of three dimensions": lambda: clim.clim_loss(A, A, A[:, None], B, 0.2, 0.5),
    "clim: shares as a column": lambda: clim.clim_loss(A, A, A, B, 0.2, torch.rand(4, 1)),
    "clim: assignment of other rows": lambda: clim.select_positives(A, B, torch.zeros(3).long()),
    "clim: a share above 1": lambda: clim.cutmix(IMAGES, IMAGES, 1.5),
    "logo: locals of other rows": lambda: logo.affinity_loss(logo.Affinity(6, 8), A, B),
    "logo: locals of three dimensions": lambda: logo.local_dissimilarity(logo.Affinity(6, 8), A[None], A[None]),
    "logo: noise of one local": lambda: logo.affinity_loss(logo.Affinity(6, 8), A, A, torch.zeros(4, 6)),
    "logo: scores of other rows": lambda: logo.Affinity(6, 8)(A, A[:1]),
    "patchmix: more than patches": lambda: patchmix.patch_mix(IMAGES, 5, 4),
    "patchmix: no permutation": lambda: patchmix.patch_mix(IMAGES, 2, 4, torch.tensor([0, 1, 2, 2])),
    "patchmix: index of other rows": lambda: patchmix.soft_info_nce(A, A, torch.zeros(3, 3), torch.ones(3), 1),
}


@pytest.mark.parametrize("call", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(ValueError):
        call()


@pytest.mark.parametrize("labels, tested", [([1, 1], [0, 1]), ([0, 1], [0, 2]), ([0, 1], [-1, -1]), ([0, 1], None)])
def test_labels_are_of_two_classes_and_of_those_that_were_trained(labels, tested, capsys):
    train, test = (common.ImageSet(["1.png", "2.png"], x) if x else None for x in (labels, tested))
    refused(capsys, common.check_labels, train, test)


@pytest.mark.parametrize("flag", ["--lr", "--image-size", "--epochs"])
def test_another_configuration(begun, capsys, flag):
    """The line names what differs, and --resume, which begins another run."""
    before = contents(begun("jcl"))
    line = refused(capsys, run, "jcl", begun("jcl"), flag, 24)
    assert f"{flag} was" in line and "--resume" in line and contents(begun("jcl")) == before


@pytest.mark.parametrize("method", JCL_AT_ONCE)
def test_resume_from_a_checkpoint_that_does_not_fit(method, begun, tmp_path, capsys):
    """Of another method or encoder, without a part, or with another model's shapes. Then --out can still be used."""
    state, more = load(begun(method) / "last.pt"), ["--epochs", 3, "--resume", tmp_path / "last.pt"]
    wrong = [(load(begun("jcl" if method == "patchmix" else "patchmix") / "last.pt"), []), (state, ["--dim", 8])]
    wrong += [({k: v for k, v in state.items() if k != part}, []) for part in state.keys() - {"backbone"}]
    wrong += [(state | {part: {}}, []) for part in state if "optim" in part]
    for saved, flags in wrong:
        torch.save(saved, tmp_path / "last.pt")
        assert str(tmp_path / "last.pt") in refused(capsys, run, method, tmp_path / "new", *more, *flags)
    torch.save(state, tmp_path / "last.pt")
    run(method, tmp_path / "new", *more)
    assert epochs_of(tmp_path / "new") == 3
