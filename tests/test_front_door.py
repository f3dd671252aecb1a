"""What a new user meets: defaults that suit, and messages that say what is and what to do."""

import importlib

import pytest
from conftest import METHODS
from tiny import _tiny, run  # noqa: F401

import eval_knn

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
