"""Tests that a mistake gives one line on stderr that names it, and status 2, before anything is trained or written."""

import shutil
import subprocess
import sys

import pytest
import torch
from conftest import METHODS, ROOT, WITH_MIN_LR, unit
from tiny import FLAGS, contents, play, refused, write_tree

import clim
import jcl
import logo
import moco_jointcrop
import patchmix

pytestmark = pytest.mark.usefixtures("_tiny")

EVALUATIONS = ["eval_knn", "eval_linear"]
MISTAKES = [  # (scripts, flags, what the line must name)
    (METHODS, "--arch nothing", "nothing"),
    (METHODS, "--arch resnet18.a1_in1k", "pass resnet18, and --init"),  # the weights it names would not be used
    (METHODS, "--epoch 3", "--epoch"),  # abbreviations are not accepted
    (WITH_MIN_LR, "--min-lr 99", "--min-lr"),
    (METHODS, "--patch-size 5", "--patch-size"),
    (METHODS, "--arch coat_lite_tiny", "16 px"),  # accepts only images of 224 px
    (METHODS, "--dataset folder --data-dir missing --epochs 900 --image-size 224", "missing"),
    (METHODS, "--dataset cifar10 --data-dir notes.txt --epochs 900 --image-size 224", "notes.txt"),
    (METHODS, "--batch-size 128", "68 images"),
    (METHODS, "--init missing.pt", "missing.pt"),
    (METHODS, "--init begun/last.pt --init-prefix other.", "'other.'"),
    (METHODS, "--resume notes.txt", "notes.txt"),
    (METHODS, "--show-views views.jpg", "views.jpg"),
    (METHODS, "--out busy", "thesis.txt"),
    (["jcl"], "--out encoder", "backbone.pt"),  # copied from a run
    (["eval_linear"], "begun --protocol moco --batch-size 16 --out begun", "not the last.pt of a run of linear"),
    (["jcl"], "--out kept", "neither empty"),  # a run of two epochs whose last.pt was deleted
    (["eval_linear"], "begun --protocol moco --batch-size 16 --out kept", "neither empty"),
    (["eval_linear"], "begun --protocol moco --batch-size 16 --out=", "neither empty"),  # from an unset shell variable
    (["moco_jointcrop"], "--css-alpha 0.001", "--css-alpha"),  # Beta's draws would underflow
    (["clim"], "--alpha 0.001", "--alpha"),
    (["jcl"], "--show-views=", "--show-views"),  # from an unset shell variable
    (METHODS, "--out notes.txt", "notes.txt"),
    (["moco_jointcrop"], "--moco v3", "ViT"),
    (["moco_jointcrop"], "--variant released --joint blur", "--variant released"),
    (["moco_jointcrop"], "--joint blur --blur-p 0.5 0", "--blur-p"),
    (["clim"], "--clim-start 2", "--clim-start"),
    (["clim"], "--image-size 24 12", "images of 12 px"),
    (["moco_jointcrop", "clim", "logo"], "--local-crops 2 --local-size 12", "images of 12 px"),
    (["logo"], "--one-way", "--local-crops 0"),
    (["moco_jointcrop", "clim", "logo", "patchmix"], "--local-crops 2 --local-size 48", "--local-size"),
    (["patchmix"], "--terms oto,other", "--terms"),
    (["patchmix"], "--patch-size 8 --num-mix 5", "--num-mix"),
    (["patchmix"], "--mix-slices 8 --num-mix 3", "8 equal parts of 3 images"),  # a slice must hold all images of a mix
    (["patchmix"], "--local-crops 2 --terms mtm", "--terms"),
    (EVALUATIONS, "missing", "missing"),
    (EVALUATIONS, "notes.txt", "notes.txt"),
    (EVALUATIONS, "begun --norm cifar10", "--norm"),
    (EVALUATIONS, "begun/backbone.pt --arch vit_micro --dataset patterns", "leave it out"),  # the file has its own arch
    (EVALUATIONS, "begun --encoder momentum --dataset cifar10 --data-dir images", "classes"),
    (["eval_linear"], "begun --label-files=", "--label-files"),
    (["eval_linear"], "begun --protocol moco", "68 images"),
    (["eval_knn"], "begun --dump missing/features.npz", "--dump"),  # rejected before the features are computed
    (["eval_knn"], "begun --temperature 0", "--temperature"),
]


@pytest.fixture
def place(begun, here):
    """Return the working folder. It holds a run, a folder of images, and files and folders that are not valid."""
    for folder in ("busy", "encoder", "kept"):
        (here / folder).mkdir()
    for name in ("notes.txt", "busy/thesis.txt", "busy/draft.tmp", "encoder/backbone.pt", "encoder/config.json"):
        (here / name).write_text("neither a checkpoint nor an image")
    for name in ("config.json", "metrics.jsonl"):
        (here / "kept" / name).write_text("{}\n{}\n")
    write_tree(here / "images", ["train/a"])
    shutil.copytree(begun("jcl"), here / "begun")
    (here / "begun" / ".being-written-host-1-last.pt").write_text("another process saves")
    return here


@pytest.mark.parametrize("script, flags, name", [(s, *row) for scripts, *row in MISTAKES for s in scripts])
def test_mistakes(place, capsys, script, flags, name):
    usual = [*FLAGS, *([] if "--out" in flags else ["--out", "run"])] if script in METHODS else ["--device", "cpu"]
    before = contents(place)
    assert name in refused(capsys, play, script, [*usual, *flags.split()])
    assert contents(place) == before


@pytest.mark.slow
@pytest.mark.parametrize("script", ["logo", *EVALUATIONS])  # test_readme.py checks each method's last line
def test_a_script_as_a_program(script, tmp_path):
    flags = ["missing"] if script in EVALUATIONS else ["--dataset", "folder", "--data-dir", "missing"]
    done = subprocess.run([sys.executable, ROOT / f"{script}.py", *flags], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: ") and "missing" in done.stderr and done.stderr.count("\n") == 1


A, B, IMAGES = unit(4, 6), unit(8, 6), torch.zeros(4, 3, 8, 8)
WRONG_ARGUMENTS = {  # for functions that other projects copy. Without a check, many would give a wrong number
    "moco: keys of other queries": lambda: moco_jointcrop.info_nce(A, B, B, 0.2),
    "moco: keys that are no vectors": lambda: moco_jointcrop.info_nce(A[None], A[None], B[None], 0.2),
    "moco v3: keys of another width": lambda: moco_jointcrop.contrast(A, B[:, :5], 0.2, 0),
    "moco: a range from 0": lambda: moco_jointcrop.sample_joint(3, 0.0, 1.0, 0.0),
    "moco: a range upside down": lambda: moco_jointcrop.sample_joint(3, 1.0, 0.2, 0.0),
    "jcl: keys of two dimensions": lambda: jcl.jcl_loss(A, A, B, 0.2, 4.0),
    "moco v3: queries that are no vectors": lambda: moco_jointcrop.contrast(A[None], A[None], 0.2, 0),
    "jcl: no keys": lambda: jcl.jcl_loss(A, A[:, None][:, :0], B, 0.2, 4.0),
    "jcl: keys of other queries": lambda: jcl.jcl_loss(A, B[:, None], B, 0.2, 4.0),
    "jcl: a batch that is no equal groups": lambda: jcl.SplitBatchNorm(3, 2)(torch.zeros(5, 3)),
    "clim: keys of three dimensions": lambda: clim.clim_loss(A, A, A[:, None], B, 0.2, 0.5),
    "clim: a queue of another width": lambda: clim.clim_loss(A, A, A, B[:, :5], 0.2, 0.5),
    "clim: a share of the loss above 1": lambda: clim.clim_loss(A, A, A, B, 0.2, 1.5),
    "clim: partners of other rows": lambda: clim.cutmix(IMAGES, IMAGES[:1], 0.5),
    "clim: a share above 1": lambda: clim.cutmix(IMAGES, IMAGES, 1.5),
    "logo: locals of other rows": lambda: logo.affinity_loss(logo.Affinity(6, 8), A, B),
    "logo: noise of one local": lambda: logo.affinity_loss(logo.Affinity(6, 8), A, A, torch.zeros(4, 6)),
    "logo: pairs in capitals": lambda: logo.compared_views("ALL"),
    "patchmix: more images than patches": lambda: patchmix.patch_mix(IMAGES, 5, 4),
    "patchmix: index of other rows": lambda: patchmix.soft_info_nce(A, A, torch.zeros(3, 3), torch.ones(3), 1),
    "patchmix: another key encoder": lambda: patchmix.PatchMix(torch.nn.Identity(), 8, 8, 8, key_encoder="momentun"),
    "patchmix: a query alone": lambda: patchmix.soft_info_nce(A[0], A[0], torch.zeros(6, 3), torch.ones(3), 1),
}


@pytest.mark.parametrize("call", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_wrong_arguments_are_value_errors(call):
    with pytest.raises(ValueError) as error:
        call()
    assert error.type is ValueError  # not its subclass common.UsageError
