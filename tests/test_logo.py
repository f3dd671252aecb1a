"""logo.py matches plain versions of the supplement's Eq. 4, the main text's losses and Algorithm 1."""

import functools
import itertools
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, info_nce, slow_but, state_of, unit, values
from torch import nn

import common
import logo

pytestmark = pytest.mark.usefixtures("double")


def omega(affinity, a, b, noise, form):
    """Return what the affinity minimizes: minus Eq. 4, or the released logistic form."""
    n, (x, y) = len(a), (0, 0) if noise is None else noise
    before = [i - 1 for i in range(n)]  # the negative of each row; -1 is the last row
    positive, negative = affinity(a + x, b + y), affinity(a, b[before])
    if form == "linear":
        return -(F.softplus(positive).sum() - F.softplus(negative).sum()) / n
    right = torch.cat([positive, affinity(b + x, a + y)]).sigmoid()
    wrong = torch.cat([negative, affinity(b, a[before])]).sigmoid()
    return -(right.log().sum() + (1 - wrong).log().sum()) / (2 * n)


@pytest.mark.parametrize("form", ["logistic", "linear"])
@pytest.mark.parametrize("noisy", [True, False])
def test_affinity_loss(form, noisy):
    """The loss of an odd batch matches. Only the affinity, which test_golden.py tests by itself, gets a gradient."""
    a, b, noise = unit(5, 6, grad=True), unit(5, 6, seed=1, grad=True), torch.randn(2, 5, 6) if noisy else None
    module = logo.Affinity(6, 10)
    for p in module.parameters():
        nn.init.normal_(p)  # no parameter keeps its initial value
    ours = logo.affinity_loss(module, a, b, noise, form)
    assert_same(ours, omega(module, a.detach(), b.detach(), noise, form), *module.parameters())
    ours.backward()
    assert a.grad is None and b.grad is None


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_simsiams_projector(layers):
    projector = state_of(logo, f"--base simsiam --layers {layers}")["model"].projector
    assert [type(m) for m in projector] == ([nn.Linear, nn.BatchNorm1d, nn.ReLU] * layers)[:-1]
    assert not list(projector[-1].parameters())


def embed(model, x):
    """Return what the affinity takes: L2-normalized projections, before SimSiam's predictor."""
    return F.normalize(model.projector(model.backbone(x)), dim=1)


def main_loss(args, model, views):
    """Return L_gg and L_lg combined, and the global keys. Views are encoded one by one, and targets are constants."""
    constants = range(len(views) if args.pairs == "all" else 2)  # all views, or the global crops
    pairs, keys = [(i, j) for i, j in itertools.product(range(len(views)), constants) if i != j], []
    if args.base == "simsiam":
        z = [model.projector(model.backbone(x)) for x in views]
        p = [model.predictor(v) for v in z]
        found = [-(F.normalize(p[i], dim=1) * F.normalize(z[j].detach(), dim=1)).sum() / 16 for i, j in pairs]
    else:
        keys = [logo.encode_shuffled_keys(model.key, [views[j]])[0] for j in constants]
        q, queue = [embed(model, x) for x in views], model.queue.keys.clone()
        found = [info_nce(q[i], keys[j], queue, args.temperature) for i, j in pairs]
    if args.variant == "paper":  # the mean of the two terms of global crops, and the sum of the others
        return sum(found[:2]) / 2 + sum(found[2:]), keys[:2]
    return sum(found) / len(found), keys[:2]


def descend(optimizer, loss, max_norm=torch.inf):
    """Take a step. Return the norm of the gradient before it is clipped."""
    parameters = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    loss.backward(inputs=parameters)
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()
    return norm.item()


def algorithm1(args, model, affinity, batches, noises):
    """Train plainly: each step updates the affinity, then the encoder. Return each metric's values, {name: list}."""
    lr, norm, steps = args.lr * 16 / 256, 0.0, defaultdict(list)
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    of_all = sgd([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.01)
    of_encoder = sgd([*model.backbone.parameters(), *model.projector.parameters()], lr)  # what L_ll moves
    affinity_lr = args.affinity_lr or (1e-4 if args.affinity_form == "linear" else lr)
    of_affinity = sgd(affinity.parameters(), affinity_lr, weight_decay=0.01)

    def dissimilarity(views, noise):
        """Update the affinity, and return L_ll by the updated one."""
        a, b = (embed(model, x) for x in views[2:])
        loss = omega(affinity, a.detach(), b.detach(), noise, args.affinity_form)
        descend(of_affinity, loss)
        l_ll = F.softplus(affinity(a, b)).sum() / 16
        steps["affinity_loss"].append(loss.item())
        steps["dissimilarity"].append(l_ll.item())
        return l_ll

    for views, noise in itertools.zip_longest(batches, noises):
        if args.l2l and args.l2l_weighting == "clip":
            descend(of_encoder, dissimilarity(views, noise), args.clip_ratio * norm)
        loss, keys = main_loss(args, model, views)
        if args.l2l and args.l2l_weighting == "lambda":
            loss = loss + args.lam * dissimilarity(views, noise)  # Eq. 9
        norm = descend(of_all, loss)
        steps["loss"].append(loss.item())
        steps["grad_norm"].append(norm)
        if args.base == "moco":
            model.queue.enqueue(torch.cat(keys))
            model.update(args.momentum)
    return steps


SMALL = "--arch resnet_nano --image-size 16 --batch-size 16 --dim 8 --lr 0.1 --warmup 0 --milestones 0.99 "
SMALL += "--weight-decay 0.01 --epochs 1 --knn-every 0 --device cpu"
QUICK = ["--variant paper --lam 0.5", "--base simsiam --l2l-weighting clip --clip-ratio 0.3 --affinity-lr 0.03"]
RUNS = [*QUICK, "--base simsiam --lam 0.5", "--base simsiam --variant paper --lam 0.5"]
RUNS += [f"--base {base} {flags}" for base in ("moco", "simsiam") for flags in ("--pairs all", "--local-crops 0")]


@pytest.mark.parametrize("flags", slow_but(QUICK, RUNS))
def test_algorithm1(flags, tmp_path, monkeypatch):
    """Three steps of `main` give the weights, queue and affinity of a slow reference, and the same metrics."""
    own = "--hidden 8" if "simsiam" in flags else "--queue 40 --momentum 0.9 --temperature 0.2 --bn-groups 4"
    line, views, noises = f"{SMALL} {own} {flags}", [], []
    args = logo.parse_args([*line.split(), "--out", str(tmp_path)])
    augment, affinity_loss = logo.augment, logo.affinity_loss
    monkeypatch.setattr(torch, "randperm", lambda n, **_: (5 * torch.arange(n) + 3) % n)  # also for ShuffleBN
    monkeypatch.setattr(logo, "augment", lambda *given: views.append(augment(*given)) or views[-1])
    monkeypatch.setattr(logo, "affinity_loss", lambda *given: noises.append(given[3]) or affinity_loss(*given))
    train = common.Patterns(48, 16, 0)
    logo.main(args, train=train)
    batches = [views[i : i + len(views) // 3] for i in range(0, len(views), len(views) // 3)]
    saved, state = common.load_checkpoint(tmp_path / "last.pt"), state_of(logo, line, train=train)
    assert state["l2l_optimizer"].param_groups[0]["lr"] == args.lr * 16 / 256  # copies may lack main's schedule
    assert len(noises) == 3 * args.l2l
    if args.affinity_form == "linear":
        assert noises == [None] * 3
    elif args.l2l:
        assert torch.stack(noises).std().item() == pytest.approx(0.3 / 8**0.5, rel=0.1)
    steps = algorithm1(args, state["model"], state["affinity"], batches, noises)
    for part in ("model", "affinity"):
        for name, value in state[part].named_parameters():
            torch.testing.assert_close(saved[part][name], value.detach(), rtol=1e-6, atol=1e-8)
    if args.base == "moco":
        torch.testing.assert_close(saved["model"]["queue.keys"], state["model"].queue.keys, rtol=1e-6, atol=1e-8)
    (record,) = saved["records"]
    assert {name: record[name] for name in steps} == pytest.approx({name: sum(x) / 3 for name, x in steps.items()})


def test_recipes():
    imagenet100 = dict(arch="resnet34", image_size=224, local_size=96, epochs=200, batch_size=256, lr=0.03)
    imagenet100 |= dict(milestones=[0.6, 0.8], momentum=0.999, temperature=0.07, queue=4096, dim=128)
    imagenet100 |= dict(bn_groups=8, weight_decay=1e-4, clip_ratio=0.015, blur_p=0.5)
    cifar = dict(image_size=32, local_size=32, local_scale=[0.08, 0.6], batch_size=256, lr=0.03, milestones=[0.6, 0.8])
    simsiam = dict(arch="resnet18", batch_size=512, lr=0.25, layers=2, dim=2048, hidden=512, lam=1e-4, milestones=[])
    recipes = {"imagenet100": imagenet100, "cifar10": cifar, "cifar10 --base simsiam": simsiam}
    for flags, recipe in recipes.items():
        assert values(logo, f"--dataset {flags}", " ".join(recipe)) == [*recipe.values()]
    forms = {"": ["logistic", "clip", True], "--local-crops 0": ["logistic", "clip", False]}
    forms |= {"--base simsiam": ["logistic", "lambda", True], "--variant paper": ["linear", "lambda", True]}
    forms["--variant paper --affinity-form logistic --l2l-weighting clip"] = ["logistic", "clip", True]
    forms["--pairs all --l2l --variant paper"] = ["linear", "lambda", True]
    for flags, expected in forms.items():
        assert values(logo, flags, "affinity_form l2l_weighting l2l") == expected
    assert logo.Affinity(8).layers[0].out_features == 256


def test_descend_leaves_unused_and_frozen_parameters_as_they_are():
    used, unused, frozen = (torch.ones(3, requires_grad=i < 2) for i in range(3))
    optimizer = torch.optim.SGD([dict(params=[used]), dict(params=[unused, frozen])], lr=0.5)
    logo.descend(optimizer, (used * frozen).square().sum(), max_norm=1.0)
    torch.testing.assert_close(used.detach(), torch.full((3,), 1 - 0.5 / 3**0.5), rtol=1e-5, atol=0)
    assert (unused == 1).all() and (frozen == 1).all()


def test_gathered_rows_are_differentiated_once():
    """A second derivative, as in a gradient penalty, is an error: it would lack the part of the other processes."""
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(logo.GatherWithGradient.apply, rows)
    (gradient,) = torch.autograd.grad(logo.GatherWithGradient.apply(rows).square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
