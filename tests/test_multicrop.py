"""Multi-crop: losses against slow forms, crops, chance levels, pictures, and runs that go on where they stopped.

The slow forms of LoGo and PatchMix are in their own tests, and two processes in test_processes.py.
"""

import importlib

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from PIL import Image
from tiny import assert_same_run, records

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
forms = pytest.mark.parametrize("method, flags", FORMS)


def words(method, flags):
    return [*flags.split(), *SMALL.get(method, "").split(), "--local-size", "8"]


@forms
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


@forms
def test_a_stopped_run_goes_on_exactly(method, flags, _tiny, tmp_path):
    given = words(method, flags)
    tiny.run(method, tmp_path / "straight", *given)
    for stop in ("--max-steps 3", "--max-steps 5", ""):
        tiny.run(method, tmp_path / "stopped", *given, *stop.split())
    assert_same_run(tmp_path / "straight", tmp_path / "stopped", interrupted=(1, 2))


@pytest.mark.parametrize("method, flags", [form for form in FORMS if "simsiam" not in form[1]])
def test_chance_is_the_loss_at_equal_logits(method, flags, _tiny, tmp_path):
    """A temperature of 10^6 makes them equal. MoCo v3's loss has it as a factor."""
    tiny.run(method, tmp_path, *words(method, flags), "--temperature", "1e6")
    for record in records(tmp_path):
        assert record["below_chance"] == pytest.approx(0, abs=1e-4 * record["loss"])


@forms
def test_picture_of_all_crops(method, flags, _tiny, tmp_path):
    """A row per input: PatchMix and CLIM also show mixed ones."""
    tiny.run(method, tmp_path, *words(method, flags), "--show-views", tmp_path / "views.png")
    rows = {"patchmix": 2 * (2 + 2), "clim": 8 + 4, "logo": 4, "moco_jointcrop": 6}[method]
    assert np.asarray(Image.open(tmp_path / "views.png")).shape[0] == 6 + rows * (96 + 6)


def embedding(row):
    """In place of an encoder: pixels of a row of the image, of any size."""
    return lambda x: F.normalize(x[:, :, row, :8].flatten(1), dim=1)


def slow_nce(q, k, negatives, temperature):
    """The mean of -log(exp(q.k / T) / sum exp(q.n / T)); negatives: a list per query."""
    found = []
    for i in range(len(q)):
        own = torch.exp(q[i] @ k[i] / temperature)
        others = sum(torch.exp(q[i] @ n / temperature) for n in negatives[i])
        found.append(-torch.log(own / (own + others)))
    return sum(found) / len(found)


@pytest.mark.parametrize("form", ["clim", "v2", "v3"])
def test_loss_and_its_gradient(form, _tiny, double):
    """Table 7 of CLIM: a sum of mixed terms. App. D on MoCo v2: the mean of all terms. On v3: twice that of 2 T nce."""
    module = clim if form == "clim" else moco_jointcrop
    flags = ["--local-crops", "2", "--local-size", "8", *([] if form == "clim" else ["--moco", form])]
    args = module.parse_args([*tiny.FLAGS, *flags])
    args.amp = "off"
    model = {"clim": clim.CLIM, "v2": moco_jointcrop.MoCo, "v3": moco_jointcrop.MoCoV3}[form](args)
    model.query, model.key = embedding(0), lambda x: embedding(1)(x).detach()  # as by frozen weights
    if form != "v3":
        model.queue.keys = F.normalize(torch.randn(32, 24), dim=1)
    sizes = [16] * 4 + [8] * 4 if form == "clim" else [16] * 2 + [8] * 2
    views = [torch.randn(5, 3, size, size).requires_grad_() for size in sizes]

    t, terms = args.temperature, []
    if form == "clim":
        k1, k2 = (model.key(view) for view in views[1:3])
        for number, (x, partner) in enumerate(((views[0], views[3]), views[4:6], views[6:8])):
            mixed, lam = clim.mix(args, x, partner, 7, number)
            q, negatives = model.query(mixed), [model.queue.keys] * 5
            terms.append(lam * slow_nce(q, k1, negatives, t) + (1 - lam) * slow_nce(q, k2, negatives, t))
        expected, given = sum(terms), (views, 7, True)
    elif form == "v2":
        k = model.key(views[1])
        terms = [slow_nce(model.query(x), k, [model.queue.keys] * 5, t) for x in (views[0], *views[2:])]
        expected, given = sum(terms) / 3, (views, 7)
    else:
        for i, j in ((0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)):  # query of view i, keys of view j
            k = model.key(views[j])
            others = [torch.cat([k[:row], k[row + 1 :]]) for row in range(5)]
            terms.append(2 * t * slow_nce(model.query(views[i]), k, others, t))
        expected, given = 2 * sum(terms) / 6, (views, 7)
    loss = model(*given)[0]
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
