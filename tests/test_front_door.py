"""What a new user meets: defaults that suit, and messages that say what is and what to do."""

import importlib
import re
import sys

import figures
import pytest
import torch
from conftest import METHODS
from PIL import Image
from tiny import FLAGS, _tiny, refused, run  # noqa: F401

import common
import eval_knn
import eval_linear
import patchmix

pytestmark = pytest.mark.usefixtures("_tiny")


@pytest.mark.parametrize("method", METHODS)
def test_a_patch_size_in_timms_name_holds(method):
    parse = importlib.import_module(method).parse_args
    argv = "--arch vit_tiny_patch16_224 --image-size 64".split()
    assert parse(argv).patch_size == 16
    assert parse([*argv, "--patch-size", "8"]).patch_size == 8


def test_a_run_names_its_patch_size(tmp_path):
    assert "16 px in patches of 8 px" in run("jcl", tmp_path, "--max-steps", 1)


@pytest.fixture(scope="module")
def finished(_tiny, tmp_path_factory):  # noqa: F811
    """A run of one epoch, in its folder."""
    out = tmp_path_factory.mktemp("run")
    run("patchmix", out, "--epochs", 1, "--knn-every", 0)
    return out


def test_random_init_is_the_untrained_floor_of_a_run(finished, capsys):
    found = eval_knn.main(eval_knn.parse_args([str(finished), "--device", "cpu"]))
    alone = eval_knn.main(eval_knn.parse_args([str(finished), "--device", "cpu", "--random-init"]))
    assert alone["encoder"] == found["untrained"] and "the untrained encoder" in capsys.readouterr().out


def test_a_sweep_of_an_evaluation_has_a_folder_per_value(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [str(finished), "--protocol", "moco", "--epochs", "1", "--batch-size", "32", "--device", "cpu"]
    for flags in ("--lr 0.1", "--lr 0.2", "--label-fraction 0.5", "--random-init"):
        eval_linear.main(eval_linear.parse_args([*words, *flags.split()]))
    names = {path.name.rpartition("-epochs1-")[2] for path in (tmp_path / "runs").iterdir()}
    assert names == {"lr0.1", "lr0.2", "label_fraction0.5", "random_initTrue"}


@pytest.mark.parametrize("rate, warned", [(1e-4, False), (1e4, True)])
def test_a_diverging_classifier_is_told(finished, tmp_path, capsys, rate, warned):
    words = f"{finished} --protocol moco --epochs 2 --batch-size 16 --device cpu --out {tmp_path / 'out'} --lr {rate}"
    eval_linear.main(eval_linear.parse_args(words.split()))
    assert ("give a lower --lr" in capsys.readouterr().out) == warned


def test_messages_name_what_was_used(finished, tmp_path, capsys):
    eval_knn.main(eval_knn.parse_args([*f"{finished} --k 100000 --no-floors --device cpu".split()]))
    assert "k=68 " in capsys.readouterr().out
    for part in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / part).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / part / "x.png")
    words = [str(finished), "--data-dir", str(tmp_path), "--no-floors", "--device", "cpu"]
    eval_knn.main(eval_knn.parse_args(words))
    assert f"training images patterns in {tmp_path}: 2 images (" in capsys.readouterr().out
    line = refused(capsys, patchmix.parse_args, "--dataset imagenet --batch-size 8 --arch vit_micro".split())
    assert "8 slices has 1 image(s)" in line and "--mix-slices 1" in line


def test_a_run_that_has_made_its_steps_says_how_to_go_on(tmp_path):
    for steps in (3, 3, 1):
        said = run("jcl", tmp_path, "--max-steps", steps)
        assert "stopped at step 3 of 8: give a larger --max-steps, or none" in said and "same command" not in said


def test_a_full_disk_is_told_with_its_free_space(tmp_path, capsys, monkeypatch):
    def full(state, path):
        raise RuntimeError("unexpected pos")  # torch's words

    monkeypatch.setattr(torch, "save", full)
    assert re.search(r"free on its disk: \d+ MiB", refused(capsys, common.save_checkpoint, tmp_path / "a.pt", {}))


def test_pictures_without_matplotlib_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "explain", raising=False)
    assert "pip install matplotlib" in refused(capsys, figures.main, ["explain", str(tmp_path)])


@pytest.mark.parametrize("method", METHODS)
def test_small_encoders_have_their_recipe_on_folders(method):
    module = importlib.import_module(method)
    archs = ("vit_micro", "vit_small") if method == "patchmix" else ("resnet_mini", "resnet18")
    small, large = (vars(module.parse_args(["--dataset", "folder", "--arch", arch])) for arch in archs)
    name = dict(patchmix="SMALL_ENCODER", logo="SMALL_MOCO").get(method, "SMALL_ENCODERS")
    expected = getattr(module, name)
    assert expected.items() <= small.items() and small["momentum"] != large["momentum"]
    assert small.get("queue") == large.get("queue")


def test_a_run_without_labels_says_how_to_find_out(tmp_path):
    for i in range(20):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(tmp_path / f"{i:02}.png")
    flags = "--dataset folder --arch resnet_micro --epochs 1 --queue 16 --bn-groups 2".split()
    said = run("jcl", tmp_path / "out", *flags, "--data-dir", tmp_path)
    assert "Judge it on labelled images" in said and f"eval_knn.py {tmp_path / 'out'} --data-dir DIR" in said
