"""Flags show a dataset's defaults and reject values outside their ranges. Each has an effect or is rejected."""

import argparse
import functools
import os
import re
import runpy
import shutil
import tempfile
from unittest import mock

import pytest
import torch
from conftest import METHODS, MODULES, QUEUES, VARIANTS, blank, state_of
from methods import RECORDS
from tiny import flat, load, refused

import common

SMALL = [(method, f"--arch {arch}") for method in METHODS for arch in ("resnet_mini", "vit_micro")]


@functools.cache
def options(method):
    """Return the flags of a method, {name: argparse's action}."""
    parse = mock.patch.object(argparse.ArgumentParser, "parse_args", autospec=True, side_effect=LookupError)
    with parse as parsed, pytest.raises(LookupError):
        MODULES[method].parse_args([])
    return {action.dest: action for action in parsed.call_args.args[0]._actions if action.dest != "help"}


def words(method, name, value):
    """Return the words of a command line that set a flag to a value."""
    return [options(method)[name].option_strings[0], *map(str, value if isinstance(value, list) else [value])]


@pytest.mark.parametrize("dataset", common.DATASETS)
@pytest.mark.parametrize("method", METHODS)
def test_help_shows_the_defaults_of_a_dataset(method, module, dataset, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        module.parse_args(["--dataset", dataset, "--help"])
    text, args = " ".join(capsys.readouterr().out.split()), module.parse_args(["--dataset", dataset])
    assert f"(default: {args.epochs})" in text and f"0: never (default: {args.knn_every})" in text
    assert f"Defaults are for --dataset {dataset}." in text


@pytest.mark.parametrize("dataset", common.DATASETS)
@pytest.mark.parametrize("method, form", VARIANTS + SMALL)
def test_recipes_have_values_that_the_flags_take(method, module, dataset, form):
    """Passing the values of a recipe as flags gives the same arguments. Each value belongs to a flag."""
    argv = ["--dataset", dataset, *form.split()]
    args = vars(module.parse_args(argv))
    assert args.keys() - {"method"} == options(method).keys()
    assert "vit_micro" not in argv or args.get("bn_groups", 1) == 1  # it has no batch norm to divide
    for name, action in options(method).items():
        if action.default is None or name == "out":  # derived from other values
            continue
        if words(method, name, 0)[0] not in argv and args[name] is not None and not isinstance(args[name], bool):
            argv += words(method, name, args[name])
    assert vars(module.parse_args(argv)) == args  # including --out


ZERO = """beta blur_p clim_start drop_path joint_prob keep_every knn_every lam local_crops milestones min_lr momentum
    seed smoothing term_weights warmup weight_decay workers""".split()  # may be 0; the other numbers must be above 0
FRACTIONS = "momentum crop_scale local_scale blur_p joint_prob smoothing drop_path milestones".split()


@pytest.mark.parametrize("method", METHODS)
def test_ranges_hold(method, module, capsys):
    """Each flag rejects values outside its range, and ranges of areas that have the larger number first."""
    for name, action in options(method).items():
        count = len(action.default) if isinstance(action.default, list) and action.default else 1
        wrong = []
        if action.type not in (None, os.path.abspath) and not action.choices:  # a number
            wrong += ["other", "nan", "inf"] + ["-1"] * (name != "beta") + ["0"] * (name not in ZERO)
            wrong += ["1.5"] * (name in FRACTIONS or isinstance(action.default, int)) + [str(2**32)] * (name == "seed")
        wrong = [[word] * count for word in wrong] + [["0.5", "0.25"]] * name.endswith("_scale")
        wrong += [["0.1", "0.2", "0.3"]] * (action.nargs == "+" and name in ("momentum", "blur_p"))  # takes up to two
        for given in wrong:
            line = refused(capsys, module.parse_args, words(method, name, given))
            assert action.option_strings[0] in line, (name, given)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_given_is_in_the_runs_name(method, module, tmp_path):
    """The default --out names the script, the image folder and all changed values but those of operational flags."""
    args = module.parse_args("--epochs 9 --workers 1 --crop-scale 0.25 1".split())
    assert args.out == f"runs/{method}-patterns-{args.arch}-s0-epochs9-crop_scale0.25,1"
    own = module.parse_args(["--dataset", "folder", "--data-dir", "my images"])
    assert own.out == f"runs/{method}-folder-my,images-{own.arch}-s0"
    copy = runpy.run_path(shutil.copy(module.__file__, tmp_path / "mine.py"))
    assert copy["parse_args"]([]).out == f"runs/mine-patterns-{args.arch}-s0"


@pytest.mark.parametrize("count, length", [(64, 64), (400, 64), (1280, 128), (700_000, 65536)])
@pytest.mark.parametrize("method", QUEUES)
def test_the_queue_of_a_folder_is_a_tenth_of_the_images(method, module, count, length):
    """With --dataset folder, the queue has a tenth of the images, within limits, and batch norm has two groups."""
    flags = "--dataset folder --arch resnet_mini --image-size 32 --batch-size 64"
    model = state_of(module, flags, train=blank(count))["model"]
    assert len(model.queue.keys) == length
    assert {norm.groups for norm in model.modules() if isinstance(norm, module.SplitBatchNorm)} == {2}


TINY = "--image-size 16 --batch-size 16 --epochs 1 --knn-every 0 --device cpu".split()  # two steps
OTHER = dict(  # values to try where half the value, or one more, would be invalid, or act later
    arch="resnet_mini", selection="kmeans", alpha=0.1, num_clusters=2, knn_k=2, num_positives=2, clim_start=1,
    refresh_every=1, image_size=24, batch_size=8, patch_size=2, bn_groups=4, local_size=8, min_lr=1e-5, milestones=0.5,
    terms="mto,mtm", num_heads=4, drop_path=0.5, affinity_lr=0.5, warmup=0,
)  # fmt: skip
NEEDS = {  # what to add for flags that act only with others or in the second epoch
    "patch_size": "--arch vit_micro", "local_size": "--local-crops 2 --local-size 12", "local_scale": "--local-crops 2",
    "joint_prob": "--joint either --blur-p 1 1", "joint_pair": "--local-crops 2", "one_way": "--local-crops 0",
    "moco_jointcrop hidden": "--moco v3", "logo hidden": "--base simsiam", "layers": "--base simsiam",
    "logo lam": "--l2l-weighting lambda", "lam_schedule": "--epochs 2",
    "clim_start": "--epochs 2", "refresh_every": "--epochs 2",
}  # fmt: skip
ELSEWHERE = ("dataset", "amp", "init", "init_prefix", *common.NOT_IN_CONFIG)  # amp acts only on GPUs
PAIRS = [(method, name) for method in METHODS for name in options(method) if name not in ELSEWHERE]


def another(method, name, value):
    """Return the words of a command line that change a flag from this value."""
    flag, choices = words(method, name, 0)[0], options(method)[name].choices
    if isinstance(value, bool):
        return [flag.replace("--", "--no-", 1) if value else flag]
    if name in OTHER:
        return [flag, str(OTHER[name])]
    if choices:
        return [flag, next(str(x) for x in choices if x != value)]
    numbers = value if isinstance(value, list) else [value]
    return [flag, *(str(x + 1 if isinstance(x, int) else x / 2 or 0.5) for x in numbers)]


@functools.cache
def trained(method, *flags):
    with tempfile.TemporaryDirectory() as out:
        args = MODULES[method].parse_args([*TINY, *flags, "--out", out])
        MODULES[method].main(args, train=common.Patterns(32, 16, seed=0))
        saved = load(f"{out}/last.pt")
    state = {name: x.numpy().tobytes() for name, x in flat(saved).items() if torch.is_tensor(x)}
    return state, [record["loss"] for record in saved["records"]]


@pytest.mark.slow
@pytest.mark.parametrize("method, name", PAIRS)
def test_every_flag_acts(method, module, name):
    """Changing a flag changes the loss or the saved tensors within one or two epochs of two steps."""
    form = [*RECORDS[method].needs.split(), *NEEDS.get(f"{method} {name}", NEEDS.get(name, "")).split()]
    value = getattr(module.parse_args([*TINY, *form]), name)
    change = another(method, name, value)
    assert getattr(module.parse_args([*TINY, *form, *change]), name) != value
    same = trained(method, *form) == trained(method, *form, *change)
    assert not same, change


REFUSED = [(m, flags) for m, record in RECORDS.items() for flags in ("--init-prefix x.", *record.refused)]


@pytest.mark.parametrize("method, flags", REFUSED)
def test_a_flag_without_effect_is_refused(method, module, flags, capsys):
    line = refused(capsys, module.parse_args, flags.split())
    assert re.findall(r"--[a-z]\S+", flags)[-1] in line and "no effect" in line


def test_bf16_is_for_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert common.use_bf16("auto", gpu) and not common.use_bf16("auto", cpu) and not common.use_bf16("off", gpu)
