"""What a new user meets: defaults that suit, and messages that say what is and what to do."""

import importlib

import pytest
from conftest import METHODS
from tiny import _tiny, run  # noqa: F401

pytestmark = pytest.mark.usefixtures("_tiny")


@pytest.mark.parametrize("method", METHODS)
def test_a_patch_size_in_timms_name_holds(method):
    parse = importlib.import_module(method).parse_args
    argv = "--arch vit_tiny_patch16_224 --image-size 64".split()
    assert parse(argv).patch_size == 16
    assert parse([*argv, "--patch-size", "8"]).patch_size == 8


def test_a_run_names_its_patch_size(tmp_path):
    assert "16 px in patches of 8 px" in run("jcl", tmp_path, "--max-steps", 1)
