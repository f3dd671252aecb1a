"""Each row of HYPERPARAMETERS is a flag: listed, held to its limits, kept as given; and it acts."""

import functools
import importlib
import json
import math
import re
import tempfile

import numpy as np
import pytest
import torch
from conftest import CHOICES, METHODS, QUEUES, state_of, table, values
from tiny import flat, load, refused

import common


@pytest.mark.parametrize("method", METHODS)
def test_help_lists_every_flag_with_the_data_sets_default(method, module, capsys):
    with pytest.raises(SystemExit):
        module.parse_args(["--dataset", "imagenet", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(common.option(name) in text for name in table(method))
    assert "every N epochs; 0: never (default: 50)" in text


@pytest.mark.parametrize("method", METHODS)
def test_recipes_have_no_names_but_the_tables(method, module):
    names = {*table(method), *common.defaults(common.RUN)}
    for flags in [*(f"--dataset {dataset}" for dataset in common.DATASETS), *CHOICES.get(method, ())]:
        assert vars(module.parse_args(flags.split())).keys() == names


@pytest.mark.parametrize("method", METHODS)
def test_limits_and_words_hold(method, module, capsys):
    """Without limits a number is not below 0, and a text is free. Ranges are refused upside down."""
    for name, (value, _, *more) in table(method).items():
        if isinstance(value, bool) or (isinstance(value, str) and not more):
            continue
        numbers, count = [x for x in (*more, (0, math.inf))[0] if not isinstance(x, str)], np.size(value)
        ends = (numbers[0] - 1, numbers[1] * 2 + 1, math.nan) if numbers else ["other"]
        wrong = [[x] * max(count, 1) for x in ends]
        if isinstance(value, tuple) and name.endswith(("_scale", "_ratio", "_sigma")):
            wrong.append(value[::-1])
        for words in wrong:
            if math.inf not in words:
                flag = common.option(name)
                assert flag in refused(capsys, module.parse_args, [flag, *map(str, words)]), words


@pytest.mark.parametrize("method", METHODS)
def test_what_is_given_holds(module):
    """Also where it equals a default: the recipe of ImageNet evaluates by kNN every 50 epochs, and 10 is the usual."""
    parse = module.parse_args
    assert [parse(["--dataset", "imagenet", *flags]).knn_every for flags in ([], ["--knn-every", "10"])] == [50, 10]
    assert vars(parse(["--crop-ratio", "0.5", "2"])) == vars(parse("--crop-ratio .5 2.0".split()))
    assert values(module, "--warmup 9 --lr 1 --min-lr 1", "warmup lr min_lr") == [9, 1, 1]


@pytest.mark.parametrize("count, length", [(64, 64), (400, 64), (1280, 128), (700_000, 65536)])
@pytest.mark.parametrize("method", QUEUES)
def test_a_queue_of_auto_is_a_tenth_of_the_images(module, count, length):
    """A batch of 64 at least, 65,536 at most."""
    images = common.ImageSet(np.zeros((count, 1, 1, 3), np.uint8))
    model = state_of(module, "--queue auto", train=images)["model"]
    assert len(model.queue.keys) == length


def test_clusters_of_auto_are_one_per_128_images(monkeypatch):
    clim, asked = importlib.import_module("clim"), []
    args = clim.parse_args(["--selection", "kmeans", "--num-clusters", "auto"])
    monkeypatch.setattr(clim, "kmeans", lambda x, m, *_: asked.append(m) or (x[:m], torch.zeros(len(x)).long()))
    for count in (100, 128, 1300):
        clim.choose_positives(args, torch.randn(count, 4), None)
    assert asked == [1, 1, 10]


TINY = "--image-size 16 --batch-size 16 --epochs 1 --knn-every 0 --device cpu".split()  # two steps
OTHER = """arch resnet_mini, selection random, num_clusters 2, kmeans_iterations 1, knn_k 2, num_positives 2
    clim_start 0, refresh_every 1, image_size 24, batch_size 8, patch_size 4, bn_groups 4, resolutions 16 12
    local_size 12, min_lr 1e-5, milestones 0.5, terms mto,mtm, num_heads 4, drop_path 0.5, epochs 2, mix_slices 2
    num_mix 3, mixed_view 2, hidden 64, affinity_lr 0.5, layers 3, variant paper, warmup 0"""
# What to change a value to, where half the value, or one more, would not fit, or act later
OTHER = dict(words.split(" ", 1) for words in re.split(r", |\n +", OTHER))
CLIM, LOCALS = "--num-clusters 4 --selection center", "--local-crops 2 --local-size 8"
PARTNERS = dict(  # what a flag needs to act: another architecture, a view that is blurred, ...
    variant="--variant released", blur_sigma="--blur-p 1", patch_size="--arch vit_micro --patch-size 8",
    min_lr="--warmup 0", lam_schedule="--epochs 2", joint_prob="--joint either --blur-p 1 1", joint_pair=LOCALS,
    clim_start=f"{CLIM} --clim-start 1 --epochs 2", refresh_every=f"{CLIM} --epochs 2", layers="--base simsiam",
    one_way="--local-crops 0", lam="--l2l-weighting lambda", local_crops="--local-size 8",
    **dict.fromkeys("mix alpha knn_k num_positives num_clusters kmeans_iterations".split(), CLIM),
    **dict.fromkeys("local_size local_scale local_blur_p".split(), LOCALS),
)  # fmt: skip
SMALL_PATCHES = f"{LOCALS} --patch-size 4"
OF_ONE = dict(
    moco_jointcrop=dict(blur_sigma="--blur-p 1 1", hidden="--moco v3", trust_coeff="--moco v3"),
    jcl=dict(lam=""),
    logo=dict(hidden="--base simsiam"),
    patchmix=dict.fromkeys("local_crops local_size local_scale local_blur_p".split(), SMALL_PATCHES),
)
OF_ONE["patchmix"]["blur_sigma"] = "--blur-p 1 1"
PAIRS = [(method, name) for method in METHODS for name in (*table(method), "seed")]
PAIRS.remove(("clim", "variant"))


def another(method, name, value):
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
def trained(method, *flags):
    module = importlib.import_module(method)
    with tempfile.TemporaryDirectory() as out:
        module.main(module.parse_args([*TINY, *flags, "--out", out]))
        saved = load(f"{out}/last.pt")
    state = {name: x.numpy().tobytes() for name, x in flat(saved).items() if torch.is_tensor(x)}
    return state, [record["loss"] for record in saved["records"]]


@pytest.mark.slow
@pytest.mark.parametrize("method, name", PAIRS)
def test_every_flag_acts(method, module, name, few_patterns):
    """Changed, with a companion flag where it needs one, it changes the loss or the weights within two steps."""
    partners = ["--clim-start", "0"] * (method == "clim") + (PARTNERS | OF_ONE.get(method, {})).get(name, "").split()
    value = getattr(module.parse_args([*TINY, *partners]), name)
    words = another(method, name, value)
    assert getattr(module.parse_args([*TINY, *partners, *words]), name) != value
    same = trained(method, *partners) == trained(method, *partners, *words)
    assert not same, words


@pytest.mark.parametrize("method", METHODS)
def test_what_is_given_is_in_the_runs_name_and_config(method, module, few_patterns, tmp_path, monkeypatch):
    """But for operating flags."""
    monkeypatch.chdir(tmp_path)
    more = ["--selection", "none"] * (method == "clim")
    module.main(module.parse_args([*TINY, *more, "--gray-p", "0.25", "--jitter", *"0.1 0.1 0.1 0.05".split()]))
    (out,) = (tmp_path / "runs").iterdir()
    given = "-batch_size16-epochs1-gray_p0.25-image_size16-jitter,?0.1,0.1,0.1,0.05,?" + "-selectionnone" * bool(more)
    assert re.fullmatch(rf"{method}-patterns-(resnet|vit)_micro-s0{given}", out.name)
    config = json.loads((out / "config.json").read_text())
    assert (config["gray_p"], config["jitter"]) == (0.25, [0.1, 0.1, 0.1, 0.05])
    own = module.parse_args(["--dataset", "folder", "--data-dir", "my images"])
    assert own.out.startswith(f"runs/{method}-folder-my")
