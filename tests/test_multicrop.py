"""Multi-crop: losses against slow forms, and crops. Chance levels and pictures of the other forms, too.

The slow forms of CLIM, LoGo and PatchMix are in their own tests, and two processes in test_processes.py.
"""

import importlib

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from conftest import METHODS, info_nce
from PIL import Image
from tiny import records

import clim
import moco_jointcrop

_tiny = tiny._tiny
WHOLE, RELEASED, JOINTCROP = (0.2, 1.0), (0.35, 1.0), "--local-crops 4 --joint-pair both"
FORMS = {  # (method, flags): the number of large and of small views on ImageNet, and their areas
    ("patchmix", "--variant released"): (2, 8, RELEASED, (0.05, 0.35)),
    ("clim", "--local-crops 2"): (4, 4, WHOLE, (0.05, 0.14)),
    ("logo", "--pairs all"): (2, 2, (0.3, 1.0), (0.05, 0.3)),
    ("logo", "--pairs all --base simsiam"): (2, 2, (0.3, 1.0), (0.05, 0.3)),
    ("moco_jointcrop", JOINTCROP): (2, 4, WHOLE, (0.05, 0.4)),
    ("moco_jointcrop", f"{JOINTCROP} --moco v3"): (2, 4, WHOLE, (0.05, 0.4)),
}
SMALL = {"patchmix": "--local-crops 2 --patch-size 4", "clim": "--clim-start 1 --num-clusters 4"}


def words(method, flags):
    return [*flags.split(), *SMALL.get(method, "").split(), "--local-size", "8"]


@pytest.mark.parametrize("method, flags", FORMS)
def test_crops_on_imagenet(method, flags):
    module = importlib.import_module(method)
    args = module.parse_args(["--dataset", "imagenet", *flags.split()])
    large, small, area, local_area = FORMS[method, flags]
    found = [(view.size, view.area) for view in module.augmentation(args)]
    assert found == [(224, area)] * large + [(96, local_area)] * small
    if method == "patchmix":
        more = [(view.blur_p, view.solarize_p) for view in module.augmentation(args)]
        assert more == [(1.0, 0.0), (0.1, 0.2)] + [(0.5, 0.0)] * 8
    on_cifar = module.parse_args(["--dataset", "cifar10", *flags.split()]).local_size
    assert on_cifar == (32 if method == "logo" else 16)  # half of the views' side; LoGo's supplement has 32


LOCAL_SIZES = {  # flags: the side of a local crop whose size is not typed; at most half of the views', in whole patches
    "moco_jointcrop --dataset imagenet": 96,
    "moco_jointcrop --dataset imagenet --arch vit_small_patch14_dinov2": 84,
    "moco_jointcrop --dataset imagenet --image-size 160": 80,
    "moco_jointcrop --dataset imagenet --image-size 160 --local-size 96": 96,
    "patchmix --dataset imagenet --arch vit_small_patch14_dinov2": 84,
    "patchmix --dataset stl10 --image-size 90": 42,
    "clim --dataset imagenet --image-size 112": 56,
    "clim --dataset imagenet --image-size 112 --arch vit_small": 48,
    "logo --dataset imagenet --image-size 128": 64,
    "logo --dataset imagenet --image-size 112 --arch vit_small": 48,
    "logo --dataset imagenet --image-size 112 --local-size 96": 96,
    "logo --dataset cifar10 --image-size 48": 24,  # of 32 px: 32, as in the supplement (D14)
}


@pytest.mark.parametrize("line", LOCAL_SIZES)
def test_a_local_crop_is_at_most_half_a_view(line):
    method, *flags = line.split()
    assert importlib.import_module(method).parse_args([*flags, "--local-crops", "2"]).local_size == LOCAL_SIZES[line]


CHANCES = [form for form in FORMS if "simsiam" not in form[1]]
CHANCES += [(method, "") for method in METHODS]
CHANCES += [("moco_jointcrop", "--moco v3"), ("jcl", "--vanilla"), ("clim", "--resolutions 16 8")]
CHANCES += [("logo", "--variant paper"), ("logo", "--local-crops 0")]
CHANCES += [("patchmix", "--terms mtm"), ("patchmix", "--num-mix 1 --terms oto,mto")]


@pytest.mark.parametrize("method, flags", CHANCES)
def test_chance_is_the_loss_at_equal_logits(method, flags, _tiny, tmp_path):
    """A temperature of 10^6 makes them equal. MoCo v3's loss has it as a factor."""
    more = words(method, flags) if (method, flags) in FORMS else flags.split()
    more += ["--clim-start", "0", "--num-clusters", "4"] if method == "clim" else []
    tiny.run(method, tmp_path, *more, "--temperature", "1e6", "--epochs", "1", "--knn-every", "0")
    (record,) = records(tmp_path)
    assert record["below_chance"] == pytest.approx(0, abs=1e-4 * record["loss"])


ROWS = {form: {"patchmix": 2 * (2 + 2), "clim": 8 + 4, "logo": 4, "moco_jointcrop": 6}[form[0]] for form in FORMS}
ROWS |= {("moco_jointcrop", ""): 2, ("jcl", ""): 4, ("clim", ""): 6, ("logo", ""): 4, ("patchmix", ""): 4}


@pytest.mark.parametrize("method, flags", ROWS)
def test_picture_of_all_views(method, flags, _tiny, tmp_path):
    """A row per input: PatchMix and CLIM also show mixed ones. Nothing else is written."""
    more = words(method, flags) if flags else []
    tiny.run(method, tmp_path / "run", *more, "--show-views", tmp_path / "views.png")
    with Image.open(tmp_path / "views.png") as picture:
        assert picture.format == "PNG" and picture.height == 6 + ROWS[method, flags] * (96 + 6)
        assert np.asarray(picture).std() > 10
    assert [path.name for path in tmp_path.iterdir()] == ["views.png"]


def embedding(row):
    """In place of an encoder: pixels of a row of the image, of any size."""
    return lambda x: F.normalize(x[:, :, row, :8].flatten(1), dim=1)


@pytest.mark.parametrize("form", ["v2", "v3"])
def test_loss_and_its_gradient(form, _tiny, double):
    """JointCrop's App. D on MoCo v2: the mean of all terms. On v3: twice the mean of 2 T nce."""
    args = moco_jointcrop.parse_args([*tiny.FLAGS, "--local-crops", "2", "--local-size", "8", "--moco", form])
    args.amp = "off"
    model = (moco_jointcrop.MoCo if form == "v2" else moco_jointcrop.MoCoV3)(args)
    model.query, model.key = embedding(0), lambda x: embedding(1)(x).detach()  # as by frozen weights
    views = [torch.randn(5, 3, size, size).requires_grad_() for size in (16, 16, 8, 8)]
    t, q, keys = args.temperature, [model.query(view) for view in views], [model.key(view) for view in views[:2]]
    if form == "v2":
        model.queue.keys = F.normalize(torch.randn(32, 24), dim=1)
        expected = sum(info_nce(q[i], keys[1], model.queue.keys, t) for i in (0, 2, 3)) / 3
    else:
        terms = []
        for i, j in ((0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)):  # query of view i, keys of view j
            rows = [(q[i][n : n + 1], keys[j][n : n + 1], torch.cat([keys[j][:n], keys[j][n + 1 :]])) for n in range(5)]
            terms.append(2 * t * sum(info_nce(*row, t) for row in rows) / 5)
        expected = 2 * sum(terms) / 6
    loss = model(views, 7)[0]
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    theirs, ours = (torch.autograd.grad(x, views, materialize_grads=True) for x in (expected, loss))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("assignment, others", [([0], [{0}]), ([0, 1, 1, 0, 2], [{3}, {2}, {1}, {0}, {0, 1, 2, 3}])])
def test_clims_other_members_of_a_cluster(assignment, others):
    """Never the image itself (D1), but if it is the only one. Who is alone in a cluster gets any other image."""
    found = clim.random_members(torch.tensor(assignment), 200)
    assert [{*row} for row in found.tolist()] == others


@pytest.mark.parametrize("flags", ["--selection none", "--local-crops 2", "--resolutions 224"])
def test_clim_has_one_resolution(flags):
    """The baseline, Table 7's multi-crop, and Tables 6, 8 and 9."""
    assert clim.parse_args(["--dataset", "imagenet", *flags.split()]).resolutions == (224,)


SAID = [  # of the first lines of a run
    (
        "moco_jointcrop --local-crops 2 --joint-pair local",
        "2 local crops of 8 px, areas 0.05 0.4; pairs with a joint area: local",
    ),
    ("moco_jointcrop --local-crops 2 --joint none", "; pairs with a joint area: none"),
    (
        "clim --local-crops 2 --clim-start 0",
        "2 local crops of 8 px, areas 0.05 0.14: each a query, with the keys of the views of 16 px",
    ),
    ("clim --same-crop", "a key has the crop of its query"),
    ("logo", "2 local crops of 8 px, areas 0.08 0.4: each with both global crops"),
    ("logo --pairs all", "2 local crops of 8 px, areas 0.05 0.3: each with every other crop"),
    ("patchmix --local-crops 2 --patch-size 4", "; 2 local crops of 8 px, areas 0.05 0.35; images are mixed"),
    *((f"{method} {'--local-crops 0' if method == 'logo' else ''}", None) for method in METHODS),
]


@pytest.mark.parametrize("command, line", SAID)
def test_a_run_says_its_local_crops(command, line, _tiny, tmp_path):
    method, *flags = command.split()
    said = tiny.run(method, tmp_path, *flags, "--max-steps", "1")
    assert line in said if line else "local crop" not in said
