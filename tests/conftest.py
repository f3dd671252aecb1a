"""Shared by the tests: the project's root on the path, few threads, and small helpers."""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
METHODS = [p.stem for p in (ROOT / f"{m}.py" for m in ("moco_jointcrop", "jcl", "clim", "logo", "patchmix")) if p.exists()]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    torch.set_num_threads(2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def cifar10():
    """The folder with CIFAR-10 as JPEG files (train/ and test/), named by CIFAR10_DIR."""
    folder = os.environ.get("CIFAR10_DIR")
    if not folder or not Path(folder, "train").is_dir():
        pytest.skip("set CIFAR10_DIR to a folder with CIFAR-10 as train/ and test/, one folder a class")
    return folder
