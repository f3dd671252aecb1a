"""Each row of HYPERPARAMETERS is a flag: listed with its default, held to its limits, kept as typed; and it acts."""

import functools
import importlib
import json
import math
import re
import tempfile

import numpy as np
import pytest
import torch
from conftest import METHODS, VARIANTS
from tiny import flat, refused

import clim
import common


def table(method):
    """{name: (value, what it is, limits or words)} of a method."""
    groups = importlib.import_module(method).HYPERPARAMETERS
    return {name: row for rows in groups.values() for name, row in rows.items()}


def recipe_of(method, flags):
    """The recipe {name: value} that flags choose, as `parse_args` gets it first."""
    module, found = importlib.import_module(method), []
    choose = module.recipe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "recipe", lambda chosen: found.append(choose(chosen)) or found[-1])
        module.parse_args(flags)
    return found[0]


@pytest.mark.parametrize("method", METHODS)
def test_help_lists_every_value_of_the_recipe_with_its_default(method, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        importlib.import_module(method).parse_args(["--dataset", "imagenet", "--help"])
    text = capsys.readouterr().out
    for name, value in recipe_of(method, ["--dataset", "imagenet"]).items():
        (line,) = re.findall(rf"^  {common.option(name)}[ ,].*\n(?:   .*\n)*", text, re.M)
        assert value is False or line.rstrip().endswith(f"(default: {common.shown(value)})"), line


@pytest.mark.parametrize("method", METHODS)
def test_table_and_recipes_have_the_same_names(method):
    """Of the flags of every run only knn_every is a recipe's."""
    flags = [f"--dataset {dataset}" for dataset in common.DATASETS] + [more for one, more in VARIANTS if one == method]
    names = set().union(*(recipe_of(method, words.split()) for words in flags))
    assert names - {"knn_every"} == table(method).keys()
    assert importlib.import_module(method).RECIPES.keys() == set(common.DATASETS)


@pytest.mark.parametrize("method", METHODS)
def test_limits_and_words_hold(method, capsys):
    """Without limits a number is not below 0, and a text is free."""
    parse = importlib.import_module(method).parse_args
    for name, (value, _, *more) in table(method).items():
        limits, flag = more[0] if more else (0, math.inf), common.option(name)
        if isinstance(value, bool) or (isinstance(value, str) and not more):
            continue
        is_range = isinstance(limits, tuple) and not isinstance(limits[0], str)
        for wrong in (limits[0] - 1, limits[1] * 2 + 1) if is_range else ("other",):
            words = [flag, *[str(wrong)] * (len(value) if isinstance(value, tuple) else 1)]
            assert flag in refused(capsys, parse, words), words


# ---------------------------------------------------------------- the values


@pytest.mark.parametrize("dataset", common.DATASETS)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_given_is_the_recipes(method, dataset):
    args = importlib.import_module(method).parse_args(["--dataset", dataset])
    recipe = recipe_of(method, ["--dataset", dataset])
    if "local_size" in recipe and method != "logo":  # at most half of the views' side
        recipe = recipe | {"local_size": min(recipe["local_size"], recipe["image_size"] // 2)}
    plain = {name: tuple(x) if isinstance(x, list) else x for name, x in recipe.items()}
    assert {name: getattr(args, name) for name in recipe} == plain


@pytest.mark.parametrize("dataset", ["patterns", "cifar10"])  # the one warms up, the other's last rate is above 0
@pytest.mark.parametrize("method", METHODS)
def test_warm_up_and_last_rate_follow_from_others_where_they_are_not_given(method, dataset):
    parse, usual = importlib.import_module(method).parse_args, recipe_of(method, ["--dataset", dataset])
    epochs, batch = usual["epochs"] // 2, usual["batch_size"] // 2
    half = ["--dataset", dataset, "--epochs", str(epochs), "--batch-size", str(batch)]
    for flags, lr in (([], usual["lr"]), (["--lr", str(usual["lr"] / 5)], usual["lr"] / 5)):
        args = parse([*half, *flags])
        assert args.warmup == pytest.approx(usual["warmup"] * epochs / usual["epochs"])
        assert args.min_lr == pytest.approx(usual["min_lr"] / 2 * lr / usual["lr"]) and args.lr == lr
    args = parse([*half, "--warmup", "3", "--min-lr", "1e-5"])
    assert (args.warmup, args.min_lr) == (3, 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_small_encoders_have_their_recipe_on_folders(method):
    module = importlib.import_module(method)
    archs = ("vit_micro", "vit_small") if method == "patchmix" else ("resnet_mini", "resnet18")
    small, large = (vars(module.parse_args(["--dataset", "folder", "--arch", arch])) for arch in archs)
    name = dict(patchmix="SMALL_ENCODER", logo="SMALL_MOCO").get(method, "SMALL_ENCODERS")
    of_a_folder = getattr(module, name) | dict(batch_size=64)
    assert of_a_folder.items() <= small.items() and small["momentum"] != large["momentum"]
    assert small.get("queue") == large.get("queue")
    if method == "moco_jointcrop":
        assert module.parse_args(["--dataset", "folder", "--arch", "resnet_mini", "--moco", "v3"]).batch_size == 64


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_of_few_images_makes_one_batch(method, tmp_path):
    """Unless a batch size is typed. Each slice with batch-norm statistics of its own has eight images or more."""
    for i in range(30):
        (tmp_path / f"{i}.png").touch()
    arch = "vit_micro" if method == "patchmix" else "resnet_mini"
    flags = ["--dataset", "folder", "--data-dir", str(tmp_path), "--arch", arch, "--image-size", "64"]
    args = importlib.import_module(method).parse_args(flags)
    assert args.batch_size == 30 and getattr(args, "bn_groups", 3) == 3
    args = importlib.import_module(method).parse_args([*flags, "--batch-size", "16"])
    assert args.batch_size == 16 and getattr(args, "bn_groups", 2) == 2
    args = importlib.import_module(method).parse_args([*flags, "--batch-size", "100", "--arch", "resnet18"])
    assert 100 % getattr(args, "bn_groups", 1) == 0
    if method == "patchmix":
        args = importlib.import_module(method).parse_args([*flags, "--batch-size", "16", "--arch", "vit_tiny"])
        assert (args.num_mix, args.mix_slices) == (3, 4)


def test_choice_of_positives_begins_earlier_in_a_shorter_run():
    starts = [clim.parse_args(["--epochs", str(n), "--dataset", "imagenet"]).clim_start for n in (400, 200, 80, 2)]
    usual = clim.IMAGENET["clim_start"]
    assert clim.IMAGENET["epochs"] == 200 and starts == [usual, usual, usual * 80 // 200, 0]


@pytest.mark.parametrize("method", METHODS)
def test_what_is_typed_holds(method):
    """Also where it equals a default: the recipe of ImageNet evaluates by kNN every 50 epochs, and 10 is the usual."""
    parse, argv = importlib.import_module(method).parse_args, "--arch vit_tiny_patch16_224 --image-size 64".split()
    assert [parse([*argv, *flags]).patch_size for flags in ([], ["--patch-size", "8"])] == [16, 8]
    assert [parse(["--dataset", "imagenet", *flags]).knn_every for flags in ([], ["--knn-every", "10"])] == [50, 10]


# ----------------------------------------------------------------- the effect

TINY = "--image-size 16 --batch-size 16 --max-steps 2 --knn-every 0 --device cpu".split()
OTHER = """arch resnet_mini, selection random, num_clusters 2, kmeans_iterations 1, knn_k 2, num_positives 2
    clim_start 0, refresh_every 1, image_size 24, batch_size 8, patch_size 4, bn_groups 4, resolutions 16 12
    local_size 12, min_lr 1e-5, milestones 0.5, terms mto,mtm, num_heads 4, drop_path 0.5, epochs 20, mix_slices 2
    num_mix 3, mixed_view 2, hidden 64, affinity_lr 0.5, layers 3, variant paper"""
# What to change a value to, where half the value, or one more, would not fit, or act later
OTHER = dict(words.split(" ", 1) for words in re.split(r", |\n +", OTHER))
CLIM, LOCALS = "--clim-start 0 --num-clusters 4", "--local-crops 2 --local-size 8"
PARTNERS = dict(  # what a flag needs to act: another architecture, a view that is blurred, ...
    variant="--variant released",
    blur_sigma="--blur-p 1",
    patch_size="--arch vit_micro --patch-size 8",
    milestones="--epochs 1",
    min_lr="--warmup 0 --epochs 1",
    joint_prob="--joint either --blur-p 1 1",
    refresh_every="--clim-start 0 --batch-size 32",
    trust_coeff="--moco v3",
    layers="--base simsiam",
    **dict.fromkeys("mix alpha knn_k num_positives selection num_clusters kmeans_iterations".split(), CLIM),
    **dict.fromkeys("local_size local_scale local_blur_p".split(), LOCALS),
    local_crops="--local-size 8",
    joint_pair=LOCALS,
    one_way="--local-crops 0",
    lam="--l2l-weighting lambda",
)
OF_ONE = dict(
    moco_jointcrop=dict(blur_sigma="--blur-p 1 1", hidden="--moco v3"),
    jcl=dict(lam=""),
    logo=dict(hidden="--base simsiam"),
    patchmix=dict.fromkeys(("local_crops", "local_size", "local_scale", "local_blur_p"), f"{LOCALS} --patch-size 4"),
)
OF_ONE["patchmix"]["blur_sigma"] = "--blur-p 1 1"
PAIRS = [(method, name) for method in METHODS for name in (*table(method), "seed", "variant")]
PAIRS.remove(("clim", "variant"))


def another(method, name, value):
    """Words for a flag that change a value."""
    flag, limits = common.option(name), table(method).get(name, ())[2:]
    if isinstance(value, bool):
        return [flag.replace("--", "--no-", 1) if value else flag]
    if name == "local_crops":
        return [flag, str(2 - value)]
    if name in OTHER:
        return [flag, *OTHER[name].split()]
    if isinstance(value, str):
        return [flag, next(word for word in limits[0] if word != value)]
    numbers = value if isinstance(value, tuple) else (value,)
    return [flag, *(str(x + 1 if isinstance(x, int) else x / 2 or 0.5) for x in numbers)]


@functools.cache
def two_steps(method, *flags):
    """The tensors that a run of two steps saves, and its loss. Here they are not written."""
    module, files = importlib.import_module(method), {}
    with tempfile.TemporaryDirectory() as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "write_file", lambda path, state: files.update({path.name: state}))
        module.main(module.parse_args([*TINY, *flags, "--out", out]))
    saved = files["last.pt"]
    state = {name: x.numpy().tobytes() for name, x in flat(saved).items() if torch.is_tensor(x)}
    return state, [record["loss"] for record in saved["records"]]


@pytest.mark.slow
@pytest.mark.parametrize("method, name", PAIRS)
def test_every_flag_acts(method, name, few_patterns):
    """Changed, with a companion flag where it needs one, it changes the loss or the weights within two steps."""
    parse = importlib.import_module(method).parse_args
    partners = (PARTNERS | OF_ONE.get(method, {})).get(name, "").split()
    value = getattr(parse([*TINY, *partners]), name)
    words = another(method, name, value)
    assert getattr(parse([*TINY, *partners, *words]), name) != value
    same = two_steps(method, *partners) == two_steps(method, *partners, *words)
    assert not same, words


# ------------------------------------------------------- the name of the run


@pytest.mark.parametrize("method", METHODS)
def test_what_is_given_is_in_the_runs_name_and_config(method, few_patterns, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(method)
    usual = recipe_of(method, [])
    module.main(module.parse_args([*TINY, "--gray-p", "0.25", "--jitter", *"0.1 0.1 0.1 0.05".split()]))
    (out,) = (tmp_path / "runs").iterdir()
    given = "-batch_size16-gray_p0.25-image_size16-jitter0.1,0.1,0.1,0.05"  # without operating flags
    assert out.name == f"{method}-patterns-{usual['arch']}-s0{given}"
    config = json.loads((out / "config.json").read_text())
    assert (config["gray_p"], config["jitter"]) == (0.25, [0.1, 0.1, 0.1, 0.05])
    assert usual.keys() <= config.keys()


@pytest.mark.parametrize("count, length", [(32, 16), (400, 40), (700_000, 65536)])
@pytest.mark.parametrize("method", [method for method in METHODS if method != "patchmix"])
def test_a_queue_of_auto_is_a_tenth_of_the_images(method, count, length, tmp_path):
    """A batch at least, 65,536 at most."""
    module, images = importlib.import_module(method), common.ImageSet(np.zeros((count, 1, 1, 3), np.uint8))
    module.main(module.parse_args([*TINY, "--queue", "auto", "--out", str(tmp_path)]), train=images)
    assert json.loads((tmp_path / "config.json").read_text())["queue"] == length
