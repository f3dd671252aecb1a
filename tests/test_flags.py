"""Every value of a recipe is a flag: it is listed, it acts, and it is in the run's name. Wrong words are told."""

import functools
import importlib
import json
import re

import pytest
import torch
from conftest import METHODS, VARIANTS

import common

OPERATION = {*common.RUN_FLAGS["operation"]}


def recipe_of(method, flags):
    """The recipe {name: value} that flags choose, as `parse_args` gets it."""
    module, found = importlib.import_module(method), []
    choose = module.recipe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "recipe", lambda chosen: found.append(choose(chosen)) or found[-1])
        module.parse_args(flags)
    return found[-1]


def rows_of(method):
    """{name: (kind, help[, number of values])} of all groups of a method's FLAGS."""
    return {name: row for group in importlib.import_module(method).FLAGS.values() for name, row in group.items()}


# ------------------------------------------------------------------ the help


def help_of(method, flags, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as end:
        importlib.import_module(method).parse_args([*flags, "--help"])
    captured = capsys.readouterr()
    assert end.value.code == 0 and captured.err == ""
    return captured.out


@pytest.mark.parametrize("dataset", common.DATASETS)
@pytest.mark.parametrize("method, variant", [*VARIANTS, *((m, "--arch resnet_mini") for m in METHODS)])
def test_help_lists_every_value_of_the_recipe(method, variant, dataset, capsys, monkeypatch):
    """With its default. No recipe holds None, and a flag that this recipe lacks is not listed."""
    if method == "moco_jointcrop" and "blur" in variant + variant.replace("either", "blur"):
        variant += " --blur-prob 0.5 0.5"  # JointBlur needs a recipe that blurs
    flags = ["--dataset", dataset, *variant.split()]
    recipe, text = recipe_of(method, flags), help_of(method, flags, capsys, monkeypatch)
    listed = set(re.findall(r"^  (?:-h, )?--([\w-]+)", text, re.M))
    assert {name.replace("_", "-") for name in recipe} <= listed
    assert listed == {name.replace("_", "-") for name in {*recipe, *sum(map(list, common.RUN_FLAGS.values()), [])}} | {
        "help"
    }
    assert None not in recipe.values()
    for name, value in recipe.items():
        (line,) = re.findall(rf"^  {common.option(name)}[ ,](?:.*\n)(?:   .*\n)*", text, re.M)
        default = re.search(r"\(default: (.*)\)$", line.rstrip())[1]
        assert default == (common.shown(value) if name not in OPERATION else str(value)), line
        assert len(line.split("(default")[0].split()) > 3, f"{name} is not explained"


@pytest.mark.parametrize("dataset", common.DATASETS)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_typed_is_the_recipes(method, dataset):
    args = importlib.import_module(method).parse_args(["--dataset", dataset])
    recipe = recipe_of(method, ["--dataset", dataset])
    assert {name: getattr(args, name) for name in recipe} == recipe and args.typed == []


@pytest.mark.parametrize("method", METHODS)
def test_what_is_typed_holds_as_it_is(method):
    """What follows from other values does so only where it is not typed itself."""
    parse, usual = importlib.import_module(method).parse_args, recipe_of(method, [])
    epochs, batch = usual["epochs"] // 2, usual["batch_size"] // 2
    half = ["--epochs", str(epochs), "--batch-size", str(batch)]
    args = parse(half)
    assert args.warmup == pytest.approx(usual["warmup"] * epochs / usual["epochs"])
    assert args.min_lr == pytest.approx(usual["min_lr"] / 2) and args.lr == usual["lr"]
    args = parse([*half, "--warmup", "3", "--min-lr", "0.001"])
    assert (args.warmup, args.min_lr, args.epochs, args.batch_size) == (3, 0.001, epochs, batch)


# ----------------------------------------------------------------- the effect

TINY = "--dataset patterns --image-size 16 --batch-size 16 --max-steps 2 --knn-every 0 --device cpu".split()
OTHER = dict(  # what to change a value to, where `another` would make one that does not fit or acts later
    arch="resnet_mini",
    selection="random",
    num_clusters="4",
    kmeans_iterations="1",
    knn_k="2",
    refresh_every="1",
    clim_start="0",
    image_size="24",
    batch_size="8",
    patch_size="8",
    bn_groups="4",
    norm="imagenet",
    resolutions="16 12",
    local_crops="0",
    local_size="12",
    milestones="0.5",
    terms="mto,mtm",
    num_heads="4",
    drop_path="0.5",
    epochs="20",
    mix_slices="2",
    mixed_view="2",
    term_weights="1 0.5 0.5",
    hidden="64",
    affinity_lr="0.5",
    queue="24",
)
INSTEAD = dict(patch_size="4", mixed_view="1")  # where the recipe has that value
PARTNERS = dict(  # what a flag needs to act: another architecture, a view that is blurred, ...
    blur_sigma="--blur-p 1",
    patch_size="--arch vit_micro",
    milestones="--epochs 1",
    min_lr="--warmup 0",
    joint_prob="--joint either",
    refresh_every="--clim-start 0 --batch-size 32",
)
OF_METHODS = {
    ("moco_jointcrop", "blur_sigma"): "--blur-prob 1 1",
    ("patchmix", "blur_sigma"): "--blur-p 1 1",
    ("patchmix", "patch_size"): "",
    **{("clim", name): "--clim-start 0" for name in ("mix", "alpha", "knn_k", "num_positives", "selection")},
    ("clim", "num_clusters"): "--clim-start 0",
    ("clim", "kmeans_iterations"): "--clim-start 0 --num-clusters 4",
    ("logo", "one_way"): "--local-crops 0",
    ("logo", "lam"): "--l2l-weighting lambda",
}


def partners(method, name):
    return OF_METHODS.get((method, name), PARTNERS.get(name, "")).split()


def another(name, kind, value):
    """Words for a flag that change a value."""
    if kind is bool:
        return [common.option(name).replace("--", "--no-", 1) if value else common.option(name)]
    if name in OTHER:
        words = OTHER[name] if OTHER[name] != common.shown(value) else INSTEAD[name]
        return [common.option(name), *words.split()]
    if isinstance(kind, tuple):
        return [common.option(name), next(word for word in kind if word != value)]
    numbers = value if isinstance(value, tuple) else (value,)
    changed = [str(x + 1 if isinstance(x, int) else x / 2 or 0.5) for x in numbers]
    return [common.option(name), *changed]


@functools.cache
def few_patterns(count, size, seed, make=common.make_patterns):
    return make(32, size, seed)


class Caught(Exception):
    pass


@functools.cache
def two_steps(method, *flags):
    """(the losses of two steps, all tensors that are then saved), as bytes; a run that writes nothing but its start."""
    losses, tensors, module = [], [], importlib.import_module(method)

    def count(self, step, metrics):
        losses.append(metrics["loss"].item())
        self.steps_counted += 1

    def save(self, step, record, encoder=None, keep=None, **parts):
        if step < 2:
            return
        for part in parts.values():
            state = part.state_dict() if hasattr(part, "state_dict") else part
            tensors.extend(t.numpy().tobytes() for t in walk(state))
        raise Caught

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "make_patterns", few_patterns)
        patch.setattr(common.Run, "begin", lambda self, step, last_step, *_: None)
        patch.setattr(common.Run, "count", count)
        patch.setattr(common.Run, "summary", lambda self, step, loader: {})
        patch.setattr(common.Run, "write", lambda self, record: None)
        patch.setattr(common.Run, "save", save)
        patch.setattr(common, "say", lambda *_, **__: None)
        with pytest.raises(Caught):
            module.main(module.parse_args([*TINY, *flags, "--save-every", "1000", "--out", "never"]))
    assert len(losses) == 2 and tensors
    return losses, tensors


def walk(state):
    if torch.is_tensor(state):
        yield state
    for part in state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ():
        yield from walk(part)


def without_effect(method, variant, names, may_be_refused):
    """The flags that change nothing in two steps, or that are refused where they should act."""
    found, recipe = [], recipe_of(method, [*TINY, *variant.split()])
    rows = rows_of(method)
    for name in names(recipe):
        words = another(name, rows[name][0], recipe[name])
        before = variant.split() + partners(method, name)
        if name in before or common.option(name) in before:
            continue
        try:
            if two_steps(method, *before) == two_steps(method, *before, *words):
                found.append(f"{' '.join(before + words)}: no effect")
        except SystemExit as end:
            if end.code != 2 or not may_be_refused:
                found.append(f"{' '.join(before + words)}: exit status {end.code}")
    return found


def test_the_same_flags_give_the_same_run():
    """Otherwise the tests below could not fail."""
    first = two_steps("jcl")
    two_steps.cache_clear()
    assert first == two_steps("jcl")


@pytest.mark.parametrize("method", METHODS)
def test_every_flag_acts(method):
    """Changed, with a companion flag where it needs one, it changes the loss or the weights within two steps."""
    names = lambda recipe: sorted(set(recipe) - OPERATION)  # noqa: E731
    assert without_effect(method, "", names, may_be_refused=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("method, variant", [v for v in VARIANTS if v[1]])
def test_every_flag_of_every_form_acts_or_is_refused(method, variant):
    names = lambda recipe: sorted(set(recipe) - OPERATION)  # noqa: E731
    assert without_effect(method, variant, names, may_be_refused=True) == []


# ------------------------------------------------------- the name of the run


def typed_of(method):
    """(name, words) that change each value of a method's recipe, without those that choose its other values."""
    recipe, rows = recipe_of(method, []), rows_of(method)
    for name in sorted(set(recipe) - OPERATION - {"arch", "resolutions", "image_size"}):
        yield name, another(name, rows[name][0], recipe[name])


@pytest.mark.parametrize("method", METHODS)
def test_a_typed_value_is_in_the_name_of_the_run(method):
    """And in `typed`, also if it is the default. Operating flags are in neither."""
    module = importlib.import_module(method)
    plain = module.parse_args([])
    assert plain.name == f"{method}-patterns-{plain.arch}-s0" and plain.typed == []
    named = 0
    for name, words in typed_of(method):
        try:
            args = module.parse_args([*partners(method, name), *words])
        except SystemExit:
            continue  # what is refused, and when, is told above
        value = common.shown(getattr(args, name)).replace(" ", ",")
        assert f"-{name}{value}" in args.name and name in args.typed
        named += 1
    assert named > 20
    operating = "--out a --max-steps 3 --save-every 2 --keep-every 2 --knn-every 7 --amp off --workers 1 --no-cache"
    operating += " --device cpu --grad-checkpoint --compile --resume none"
    args = module.parse_args([*operating.split()])
    assert args.name == plain.name and args.typed == [] and args.knn_every == 7
    lr = f"{plain.lr:g}"
    assert module.parse_args(["--lr", lr]).name == f"{plain.name}-lr{lr}"
    assert module.parse_args(["--seed", "3"]).name.startswith(plain.name.replace("-s0", "-s3"))
    assert "-patterns-" in plain.name and "dataset" not in module.parse_args(["--dataset", "patterns"]).name


@pytest.mark.parametrize("method", METHODS)
def test_a_long_name_is_shortened_by_a_hash(method):
    module = importlib.import_module(method)
    words = "--temperature 0.3 --lr 0.01 --lr-batch 100 --min-lr 0.001 --warmup 2 --crop-ratio 0.7 1.4 --gray-p 0.1"
    words += " --flip-p 0.4 --jitter-p 0.7 --dim 64"
    one, two = (module.parse_args([*words.split(), "--epochs", epochs]).name for epochs in ("10", "11"))
    assert one != two and len(one) < 200 and one == module.parse_args([*words.split(), "--epochs", "10"]).name


def test_a_typed_value_is_in_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "make_patterns", few_patterns)
    module = importlib.import_module("jcl")
    args = module.parse_args(
        [*TINY, "--temperature", "0.3", "--jitter", "0.1", "0.1", "0.1", "0.05", "--gray-p", "0.25"]
    )
    module.main(args)
    (out,) = (tmp_path / "runs").iterdir()
    assert out.name == args.name
    assert "-jitter0.1,0.1,0.1,0.05" in out.name and "-temperature0.3" in out.name and "-gray_p0.25" in out.name
    config = json.loads((out / "config.json").read_text())
    assert (config["temperature"], config["jitter"], config["gray_p"]) == (0.3, [0.1, 0.1, 0.1, 0.05], 0.25)
    assert set(recipe_of("jcl", [])) <= set(config)


# ---------------------------------------------------------------- wrong words


def refused(method, flags, capsys, run=False):
    """The one line that flags are refused with."""
    module = importlib.import_module(method)
    with pytest.raises(SystemExit) as end:
        args = module.parse_args(flags.split())
        if run:
            module.main(args)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


WRONG = [  # flags, words of the error
    ("--batch_size 64", "unknown argument --batch_size: did you mean --batch-size?"),
    ("--epoch 3", "unknown argument --epoch: did you mean --epochs?"),
    ("--temprature=0.3", "did you mean --temperature?"),
    ("--xyz", "unknown argument --xyz"),
    ("--data-dir somewhere", ", ".join(common.DATASETS[1:])),
    ("--dataset cifar", "cifar10"),
    ("--crop-ratio 0.5", "expected 2 arguments"),
    ("--crop-ratio 0.5 1 2", "unknown argument 2"),
    ("--crop-ratio 1.5 0.5", "--crop-ratio 1.5 0.5: give the smaller number first"),
    ("--blur-sigma 2 1", "--blur-sigma 2 1: give the smaller number first"),
    ("--jitter 0.4 0.4 0.4", "expected 4 arguments"),
    ("--jitter 0.4 0.4 0.4 0.6", "at most 0.5"),
    ("--flip-p 1.5", "not from 0 to 1"),
    ("--interpolation nearest", "bicubic"),
    ("--batch-size 1", "not from 2"),
    ("--temperature 0", "--temperature"),
    ("--epochs 2 --warmup 2.5", "--warmup 2.5 is longer than the training"),
]
OF_ONE = [
    ("jcl", "--num-keys 100000", "not from 1 to 100"),
    ("jcl", "--num-keys 1 --lam 2", "--lam has no effect"),
    ("jcl", "--crop-scale 0.5 0.1", "give the smaller number first"),
    ("jcl", "--arch resnet18 --patch-size 4", "--patch-size has no effect"),
    ("moco_jointcrop", "--joint none --beta 2", "--beta has no effect"),
    ("moco_jointcrop", "--moco v3 --queue 64", "--queue has no effect"),
    ("clim", "--selection none --num-clusters 5", "--num-clusters has no effect"),
    ("logo", "--local-size 64", "local"),
    ("logo", "--local-scale 0.5 0.1", "give the smaller number first"),
    ("logo", "--base simsiam --temperature 0.1", "--temperature has no effect"),
    ("patchmix", "--bn-groups 2", "--bn-groups"),
    ("patchmix", "--terms oto,other", "--terms"),
]


@pytest.mark.parametrize("method", METHODS)
def test_wrong_words(method, capsys):
    for flags, words in WRONG:
        assert words in refused(method, flags, capsys), flags


@pytest.mark.parametrize("method, flags, words", OF_ONE)
def test_wrong_words_of_one_method(method, flags, words, capsys):
    assert words in refused(method, flags, capsys)


@pytest.mark.parametrize("method", METHODS)
def test_views_are_not_shown_in_a_folder_that_is_not_there(method, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "is not a folder" in refused(method, "--show-views missing/views.png", capsys, run=True)
    assert not list(tmp_path.iterdir())
