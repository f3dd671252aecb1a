"""Helpers that train, interrupt and compare runs within seconds (68 + 32 images of 16 px), and write image files."""

import contextlib
import functools
import importlib
import io
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import MODULES
from PIL import Image
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port

import common

FLAGS = "--arch vit_micro --image-size 16 --batch-size 16 --epochs 2 --knn-every 1 --device cpu".split()
STEPS = 4  # per epoch: 68 images in batches of 16
TIMING = ("images_per_s",)
CHILDREN = torch.multiprocessing.get_context("forkserver")  # starts clean processes that need not import torch
CHILDREN.set_forkserver_preload(["torch", "torchvision", "timm"])


def shrink(patch):
    """Shrink the patterns dataset, its recipes and vit_micro. patch: a MonkeyPatch."""
    make = common.Patterns
    patch.setattr(common, "Patterns", lambda count, size, seed: make(68 if count > 1024 else 32, size, seed))
    name, options = common.ARCHS["vit_micro"]  # two blocks, the second of which has drop path
    patch.setitem(common.ARCHS, "vit_micro", (name, options | dict(depth=2)))
    small = dict(hidden=32, dim=16, patch_size=8, queue=32, mix_slices=2, drop_path=0.2, clim_start=0, num_clusters=4)
    for module in MODULES.values():
        names = vars(module.parse_args([])).keys() & small
        patch.setitem(module.RECIPES, "patterns", module.RECIPES["patterns"] | {name: small[name] for name in names})


def synchronize(model):
    """Make each batch norm use the rows of all CPU processes, as SyncBatchNorm does on GPUs. Return the model."""
    for norm in model.modules():
        if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
            norm.register_forward_pre_hook(lambda _, inputs: MODULES["logo"].GatherWithGradient.apply(*inputs))
            norm.register_forward_hook(lambda _, inputs, outputs: common.local_rows(outputs))
    return model


@pytest.fixture(scope="module")
def _tiny():
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        yield


def run(method, out, *flags, **own):
    """Train with a method in this process and return what it prints. own: the user's datasets `train` and `test`."""
    args = MODULES[method].parse_args([*FLAGS, "--out", str(out), *map(str, flags)])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        MODULES[method].main(args, **own)
    return said.getvalue()


def evaluate(script, *flags, **own):
    """Run the module eval_knn or eval_linear in this process and return the scores. own: as in `run`."""
    return script.main(script.parse_args([*map(str, flags), "--device", "cpu"]), **own)


@pytest.fixture(scope="module")
def begun(_tiny, tmp_path_factory):
    """Return a function: method -> the folder of a run that was stopped in its second epoch. Each is trained once."""

    @functools.cache
    def folder(method):
        out = tmp_path_factory.mktemp(method) / "run"
        assert life(method, [*FLAGS, "--knn-every", "0", "--out", out], "step 6")[0] == 130
        return out

    return folder


def refused(capsys, call, *args, **options):
    """Make a call that must raise a UsageError or exit with status 2. Return its message of one line."""
    capsys.readouterr()
    with pytest.raises((common.UsageError, SystemExit)) as stop:
        call(*args, **options)
    *usage, line = (capsys.readouterr().err or str(stop.value)).splitlines()
    assert getattr(stop.value, "code", 2) == 2 and all(text.startswith(("usage: ", " ")) for text in usage), usage
    del stop  # its traceback would keep a loader's workers alive
    return line


# --------------------------------------------------------------- image files


def gradient(height=12, width=10):
    """Return a smooth RGB image without symmetries."""
    y, x = np.mgrid[:height, :width]
    return np.stack([250 * y / height, 250 * x / width, 255 - 120 * y / height - 100 * x / width], 2).astype(np.uint8)


def write_tree(root, folders, count=3, size=(12, 10)):
    """Write random PNG images and return root. folders: {folder: count}, or a list with `count` images each."""
    rng = np.random.default_rng(0)
    for folder, n in (folders if isinstance(folders, dict) else dict.fromkeys(folders, count)).items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(root / folder / f"{i}.png")
    return root


def save_encoder(folder, info):
    """Save an encoder with weights of its own as backbone.pt, as a run does. Return it."""
    torch.manual_seed(5)  # not the seed of the untrained baseline
    encoder = common.build_backbone(info)
    encoder(torch.randn(8, 3, info["image_size"], info["image_size"]))  # gives batch norm its running statistics
    folder.mkdir(parents=True)
    torch.save(info | {"state_dict": encoder.state_dict()}, folder / "backbone.pt")
    return encoder.eval()


# ------------------------------------------------------------------ comparing


def load(path):
    return torch.load(path, weights_only=True)


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def epochs_of(out):
    """Return the number of epochs in a run's last.pt, or None if there is no such file."""
    return len(load(out / "last.pt")["records"]) if (out / "last.pt").exists() else None


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flat(state, name=""):
    """Flatten a nested state into {path: tensor or plain value}."""
    if isinstance(state, dict | list | tuple):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, value in pairs for k, v in flat(value, f"{name}/{key}").items()}
    return {name: state}


def unequal(one, two):
    """Return the paths at which two nested states are not bitwise equal, ignoring timings."""
    a, b = ({k: v for k, v in flat(state).items() if not k.endswith(TIMING)} for state in (one, two))
    same = {k for k in a.keys() & b.keys() if (torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k])}
    return sorted((a.keys() | b.keys()) - same)


def assert_same_run(one, two, without_knn=()):
    """Assert that two runs are bitwise equal. The second may lack the kNN scores of the epochs `without_knn`."""
    files = {path.name for path in one.glob("*.pt")}
    assert files == {path.name for path in two.glob("*.pt")}
    for file in files:
        a, b = load(one / file), load(two / file)
        for record in a.get("records", []):
            for name in [name for name in record if name.startswith("knn") and record["epoch"] in without_knn]:
                del record[name]
        assert unequal(a, b) == [], file
    assert all(records(out) == load(out / "last.pt")["records"] for out in (one, two))


# -------------------------------------------------------------- interruptions


def strike(patch, moment, end=Mock(side_effect=KeyboardInterrupt)):
    """Call `end` at a moment counted from now: "step 5" is the end of the fifth step, and "" is never.

    A save has eight moments: for last.pt, in the middle of writing, before the flush and before the rename; for
    backbone.pt, these three; and for metrics.jsonl, the last two. Each start of a run also has two for config.json,
    which come before its first save.
    """
    if not moment:
        return
    (place, number), calls, save = moment.split(), itertools.count(1), torch.save
    clim, linear = (importlib.import_module(name) for name in ("clim", "eval_linear"))
    places = dict(step=[(common.Meter, "update")], knn=[(common, "knn_accuracy"), (linear, "scores")])
    places |= dict(save=[(torch, "save"), (os, "fsync"), (os, "replace")], choice=[(clim, "choose_positives")])
    places["anything"] = sum(places.values(), [])

    def wrap(original):
        def struck(*args, **options):
            if next(calls) == int(number):
                if original is save:  # in the middle of a write
                    args[1].write(b"half")
                end()
            return original(*args, **options)

        return struck

    for target, function in places[place]:
        patch.setattr(target, function, wrap(getattr(target, function)))


def life(script, argv, moment=""):
    """Run a script in this process, with Ctrl-C at a moment (see `strike`). Return (exit status, what it prints)."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        strike(patch, moment)
        try:
            play(script, argv)
        except SystemExit as stop:
            return stop.code, said.getvalue()
    return 0, said.getvalue()


# ---------------------------------------------------------- separate processes


def begin(function, log, environment, args):
    """Call a function in a new process, whose output goes to the files LOG.out and LOG.err."""
    for stream, suffix in ((sys.stdout, ".out"), (sys.stderr, ".err")):
        stream.flush()
        os.dup2(os.open(log + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    os.environ |= environment
    torch.set_num_threads(1)
    shrink(pytest.MonkeyPatch())
    function(*args)


def play(script, argv, moment=""):
    """Run a script as `python SCRIPT ...` does. SIGKILL ends this process at a moment (see `strike`)."""
    strike(pytest.MonkeyPatch(), moment, lambda: os.kill(os.getpid(), signal.SIGKILL))
    module = importlib.import_module(script)
    common.start(module.main, lambda: module.parse_args([*map(str, argv)]))


def processes(log, function, each, seconds=240):
    """Run a function in one process per tuple of arguments. Several form a group. Return [(status, stdout, stderr)].

    Processes that still run after `seconds`, or 30 seconds after one has failed, are killed. Their status is None.
    """
    group, started = dict(WORLD_SIZE=str(len(each)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(get_free_port())), []
    for rank, args in enumerate(each):
        environment = group | dict(RANK=str(rank)) if len(each) > 1 else {}
        started.append(CHILDREN.Process(target=begin, args=(function, f"{log}{rank}", environment, args)))
        started[-1].start()
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(p.is_alive() for p in started):
        if any(p.exitcode for p in started):
            until = min(until, time.monotonic() + 30)
        time.sleep(0.05)
    ends = []
    for rank, process in enumerate(started):
        status = process.exitcode
        process.kill()
        ends.append((status, *(Path(f"{log}{rank}.{name}").read_text() for name in ("out", "err"))))
    return ends


def succeed(log, function, each, **how):
    """Run a function in `processes`, all of which must succeed. Return the stdout of each."""
    ends = processes(log, function, each, **how)
    assert all(status == 0 for status, *_ in ends), ends
    return [out for _, out, _ in ends]


if __name__ == "__main__":  # for torchrun: SCRIPT MOMENT FLAGS. The moment is the second process's, before a restart
    torch.set_num_threads(1)
    shrink(pytest.MonkeyPatch())
    struck = os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    play(sys.argv[1], sys.argv[3:], sys.argv[2] if struck else "")
