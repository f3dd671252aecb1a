"""logo.py against the supplement's Eq. 4, the main text's losses and Algorithm 1, as loops; limits; processes."""

import copy
import io
import json
import math
import os
import signal
import socket

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

import common
import jcl
import logo

FORMS = ("logistic", "linear")
BASES = {"moco": ["--base", "moco"], "simsiam": ["--base", "simsiam"]}
NANO = ("resnet18", dict(layers=(1, 1, 1, 1), channels=(4, 8, 8, 8), zero_init_last=False))


@pytest.fixture(autouse=True)
def _double(monkeypatch):
    """float64 throughout, one thread, and a very small ResNet."""
    torch.set_num_threads(1)
    monkeypatch.setitem(common.ARCHS, "resnet_nano", NANO)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random(*shape, seed=0, grad=False):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def unit(*shape, seed=0, grad=False):
    return F.normalize(random(*shape, seed=seed), dim=-1).requires_grad_(grad)


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)


def assert_close(one, two, **tolerance):
    torch.testing.assert_close(list(one), list(two), **(tolerance or dict(rtol=1e-6, atol=1e-8)))


# ------------------------------------------------------------------ the affinity


def affinity(training, dim=6, hidden=10, seed=0):
    """An affinity no value of which is what it is at the start, the statistics included."""
    module, generator = logo.Affinity(dim, hidden), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(generator=generator)
        for norm in (m for m in module.modules() if isinstance(m, _BatchNorm)):
            norm.running_mean.normal_(generator=generator)
            norm.running_var.uniform_(0.5, 2, generator=generator)
    return module.train(training)


def scores(affinity, pairs):
    """Raw scores of pairs of vectors: concatenated, twice Linear, batch norm and ReLU, then Linear.

    Evaluated pair by pair; in training the batch norms take the mean and the variance of these pairs.
    """
    if not affinity.training and len(pairs) > 1:
        return torch.cat([scores(affinity, [pair]) for pair in pairs])
    weights, norms = list(affinity.parameters()), [m for m in affinity.modules() if isinstance(m, _BatchNorm)]
    assert (len(weights), len(norms)) == (10, 2)
    x = torch.stack([torch.cat(pair) for pair in pairs])
    for layer, norm in enumerate(norms):
        weight, bias, gain, shift = weights[4 * layer : 4 * layer + 4]
        x = x @ weight.T + bias
        mean, var = norm.running_mean, norm.running_var
        if affinity.training:
            mean = sum(x) / len(x)
            var = sum((row - mean) ** 2 for row in x) / len(x)
        x = ((x - mean) / (var + 1e-5) ** 0.5 * gain + shift).clamp(min=0)
    return x @ weights[8][0] + weights[9]


def softplus(x):
    return torch.log(1 + torch.exp(x))


def omega(affinity, a, b, noise, form):
    """What the affinity minimises, pair by pair: minus Eq. 4, or the released logistic form."""
    n, (x, y) = len(a), noise
    positives = [(a[i] + x[i], b[i] + y[i]) for i in range(n)]
    negatives = [(a[i], b[i - 1]) for i in range(n)]  # b[-1] for the first
    if form == "linear":
        return -(sum(softplus(scores(affinity, positives))) / n - sum(softplus(scores(affinity, negatives))) / n)
    reverse = [(b[i] + x[i], a[i] + y[i]) for i in range(n)], [(b[i], a[i - 1]) for i in range(n)]
    total = 0.0
    for positive, negative in ((positives, negatives), reverse):
        for s, t in zip(scores(affinity, positive), scores(affinity, negative), strict=True):
            total = total - 0.5 * torch.log(1 / (1 + torch.exp(-s))) - 0.5 * torch.log(1 - 1 / (1 + torch.exp(-t)))
    return total / n


@pytest.mark.parametrize("training", [False, True])
def test_affinity_is_a_small_mlp(training):
    module, a, b = affinity(training), unit(5, 6), unit(5, 6, seed=1)
    ours = module(a, b)
    assert ours.shape == (5,)
    torch.testing.assert_close(ours, scores(affinity(training), list(zip(a, b, strict=True))))
    assert not torch.allclose(ours, module(b, a))  # the order of the two matters


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("training, noisy", [(True, True), (True, False), (False, True)])
def test_affinity_loss(form, training, noisy):
    """Against loops over an odd batch; its gradient reaches the affinity and not the locals."""
    a, b, noise = unit(5, 6, grad=True), unit(5, 6, seed=1, grad=True), 0.2 * random(2, 5, 6, seed=2)
    module, other = affinity(training), affinity(training)
    ours = logo.affinity_loss(module, a, b, noise if noisy else None, form)
    reference = omega(other, a.detach(), b.detach(), noise if noisy else 0 * noise, form)
    torch.testing.assert_close(ours, reference)
    assert_close(gradients(ours, list(module.parameters())), gradients(reference, list(other.parameters())))
    ours.backward()
    assert a.grad is None and b.grad is None and module.layers[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize("form", FORMS)
def test_negatives_are_the_batch_rolled_by_one(form):
    """Every image but itself, in an odd batch too; the noise is on positives only."""
    seen, a, b = [], unit(5, 6), unit(5, 6, seed=1)

    def spy(x, y):
        seen.append((x, y))
        return x.sum(1) - y.sum(1)

    logo.affinity_loss(spy, a, b, torch.ones(2, 5, 6), form)
    rolled = [torch.stack([v[4], v[0], v[1], v[2], v[3]]) for v in (a, b)]
    expected = [(a + 1, b + 1), (a, rolled[1])] + [(b + 1, a + 1), (b, rolled[0])] * (form == "logistic")

    def order(pairs):
        return sorted(torch.cat(pair, 1).flatten().tolist() for pair in pairs)

    assert order(seen) == order(expected)


def test_affinity_loss_limits():
    """At zero scores 2 ln 2 and 0; the least is 0 in the logistic form, none in the linear one; no order of the two."""
    a, b, module = unit(5, 6), unit(5, 6, seed=1), affinity(False)
    losses = {form: logo.affinity_loss(module, a, b, None, form) for form in FORMS}
    torch.testing.assert_close(logo.affinity_loss(module, b, a), losses["logistic"])  # the default form
    with torch.no_grad():
        list(module.parameters())[-2].zero_()
        list(module.parameters())[-1].zero_()
    assert logo.affinity_loss(module, a, b, None, "logistic").item() == pytest.approx(2 * math.log(2))
    assert logo.affinity_loss(module, a, b, None, "linear").item() == pytest.approx(0, abs=1e-15)

    def oracle(x, y):  # knows that a[i] and b[i] belong together
        return torch.where(((x == a) & (y == b) | (x == b) & (y == a)).all(1), 100.0, -100.0)

    assert logo.affinity_loss(oracle, a, b, None, "logistic").item() == pytest.approx(0)
    assert logo.affinity_loss(oracle, a, b, None, "linear").item() == pytest.approx(-100)


@pytest.mark.parametrize("form, training", [("logistic", True), ("linear", True), ("logistic", False)])
def test_local_dissimilarity(form, training):
    """Mean softplus of the score, a gradient to the locals alone; the affinity stays as it is, and its gradients."""
    a, b = unit(5, 6, grad=True), unit(5, 6, seed=1, grad=True)
    module, other = affinity(training), affinity(training)
    ours = logo.local_dissimilarity(module, a, b, form)
    reference = sum(softplus(scores(other, list(zip(a, b, strict=True))))) / 5
    torch.testing.assert_close(ours, reference)
    assert_close(gradients(ours, [a, b]), gradients(reference, [a, b]))
    ours.backward()
    assert a.grad.abs().max() > 0 and b.grad.abs().max() > 0
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), other.parameters(), strict=True))
    for p in module.parameters():
        p.grad = torch.full_like(p, 3.0)
    logo.local_dissimilarity(module, a, b, form).backward()
    assert all((p.grad == 3).all() for p in module.parameters())


def test_local_dissimilarity_is_low_for_pairs_that_score_low():
    a, b, module = unit(5, 6, grad=True), unit(5, 6, seed=1), affinity(False)
    last, losses = list(module.parameters())[-1], []
    for shift in (-1e3, -1.0, 0.0, 1.0, 1e3):
        with torch.no_grad():
            last.copy_(torch.tensor([shift]))
        losses.append(logo.local_dissimilarity(module, a, b).item())
    assert losses == sorted(set(losses)) and losses[0] == pytest.approx(0, abs=1e-9)
    assert losses[-1] == pytest.approx(module(a, b).mean().item())  # softplus(s) is s, far above 0
    with torch.no_grad():
        last.zero_()
    (gradient,) = gradients(logo.local_dissimilarity(module, a, b), [a])
    assert module(a - 0.01 * gradient, b).mean() < module(a, b).mean()


def test_combine():
    released, paper = (logo.parse_args(["--variant", variant]) for variant in ("released", "paper"))
    g, one, local = (
        [torch.tensor(1.0), torch.tensor(2.0)],
        [torch.tensor(7.0)],
        [torch.tensor(v) for v in (3.0, 5.0, 10.0, 11.0)],
    )
    assert logo.combine(released, g, local).item() == pytest.approx(32 / 6)
    assert logo.combine(paper, g, local).item() == pytest.approx(1.5 + 29)
    for args in (released, paper):
        assert (logo.combine(args, g, []).item(), logo.combine(args, one, []).item()) == (1.5, 7)


# -------------------------------------------------------------- the two bases


def tiny(*flags, module=logo, seed=0):
    """(args, model) of 16 images of 16 px and locals of 8 px, small heads, decay and momentum that can be seen."""
    argv = ["--arch", "resnet_nano", "--image-size", "16", "--batch-size", "16", "--device", "cpu"]
    args = module.parse_args([*argv, *([] if "simsiam" in flags else ["--queue", "40"]), *flags])
    args.dim, args.hidden, args.affinity_hidden, args.weight_decay, args.momentum = 8, 8, 12, 0.01, 0.9
    args.lr, args.lr_batch, args.warmup, args.milestones, args.temperature = 0.05, 128, 0, (0.99,), 0.2
    args.bn_groups = 4 if args.bn_groups > 1 else 1
    args.backbone["stem"] = "timm"
    common.join_processes(args)
    torch.manual_seed(seed)
    kind = jcl.JCL if module is jcl else logo.MoCo if args.base == "moco" else logo.SimSiam
    return args, module.group_batch_norms(kind(args), args.bn_groups)


def inputs(n=4, seed=0, grad=False):
    return [random(16, 3, s, s, seed=10 * seed + i, grad=grad) for i, s in enumerate((16, 16, 8, 8)[:n])]


def project(model, x):
    return model.projector(model.backbone(x))


def embed(model, x):
    """What the affinity sees: of unit length, before SimSiam's predictor."""
    return torch.stack([z / z.norm() for z in project(model, x)])


def nce(q, k, queue, temperature):
    total = 0.0
    for i in range(len(q)):
        logits = torch.cat([k[i : i + 1], queue]) @ q[i] / temperature
        total = total - (logits[0] - torch.log(torch.exp(logits).sum()))
    return total / len(q)


def cosine(p, z):
    return -sum(p[i] @ z[i] / (p[i].norm() * z[i].norm()) for i in range(len(p))) / len(p)


def keys_of(args, model, views, step):
    """Each view's keys by themselves: their batch statistics are of one view."""
    found = [logo.encode_keys(model.key, [x], common.generator(args.seed, step, 20 + i)) for i, x in enumerate(views)]
    return torch.cat(found).detach()


def terms(args, model, views, step):
    """([global to global], [local to global]), each view by a pass of its own; the right sides are constants."""
    if args.base == "simsiam":
        z = [project(model, x) for x in views]
        p = [model.predictor(v) for v in z]
        z1, z2 = z[0].detach(), z[1].detach()
        return [cosine(p[0], z2), cosine(p[1], z1)], [cosine(v, t) for v in p[2:] for t in (z1, z2)]
    k1, k2 = keys_of(args, model, views[:2], step)
    queue, q = model.queue.keys.clone(), [embed(model, x) for x in views]
    pairs = [(q[0], k2), (q[1], k1)], [(v, k) for v in q[2:] for k in (k1, k2)]
    return [[nce(a, b, queue, args.temperature) for a, b in part] for part in pairs]


def total(args, found):
    g, local = found
    return sum(g) / 2 + sum(local) if args.variant == "paper" else (sum(g) + sum(local)) / (2 + len(local))


def learned(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("variant, crops", [("released", "2"), ("paper", "2"), ("released", "0")])
def test_forward(base, variant, crops):
    """The loss and its gradients are those of the terms one by one; without locals, the mean of the two directions."""
    args, model = tiny(*BASES[base], "--variant", variant, "--local-crops", crops)
    other, views = copy.deepcopy(model), inputs(2 + args.local_crops, grad=True)
    loss, metrics = model(views, 7)
    found = terms(args, other, views, 7)
    assert len(found[1]) == 2 * args.local_crops
    reference = total(args, found) if found[1] else (found[0][0] + found[0][1]) / 2
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(metrics["loss"], reference.detach())
    assert_close(gradients(loss, learned(model) + views), gradients(reference, learned(other) + views))
    for local, x in zip(metrics["locals"], views[2:], strict=True):
        torch.testing.assert_close(local, embed(other, x))
    if not found[1]:  # neither of the two views is the first
        model.eval()
        torch.testing.assert_close(model(views, 7)[0], model(views[::-1], 7)[0])


@pytest.mark.parametrize("base", BASES)
def test_globals_are_constants_to_the_locals(base, monkeypatch):
    """L_lg has no gradient to the globals, through whichever weights; keys and targets have none at all."""
    args, model = tiny(*BASES[base])
    views = inputs(grad=True)
    cases = [lambda g, local: sum(local), lambda g, local: sum(g), lambda g, local: g[0], lambda g, local: g[1]]
    for case, reached in zip(cases, ([2, 3], [0, 1], [0], [1]), strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(logo, "combine", lambda args, g, local, case=case: case(g, local))
            found = gradients(model(views, 0)[0], views)
        assert [i for i, g in enumerate(found) if g is not None and g.any()] == reached
    model(views, 0)[0].backward()
    assert all((p.grad is None) == n.startswith("momentum") for n, p in model.named_parameters())


@pytest.mark.parametrize("one_way", [False, True])
def test_enqueue(one_way):
    """Both globals' keys, or the one view's; the forward pass leaves the queue as it was."""
    args, model = tiny(*["--local-crops", "0", "--one-way"] * one_way)
    views, before = inputs(2 if one_way else 4), model.queue.keys.clone()
    keys = keys_of(args, copy.deepcopy(model), views[one_way:2], 3)
    model(views, 3)
    assert torch.equal(model.queue.keys, before)
    model.update(0.9)
    new = 16 * (2 - one_way)
    torch.testing.assert_close(model.queue.keys, torch.cat([*keys, before[new:]]))
    assert int(model.queue.position) == new
    model(views, 4)
    model.update(0.9)
    assert int(model.queue.position) == 2 * new % 40


def test_one_way_is_jcl_with_one_key():
    flags = ["--local-crops", "0", "--one-way"]
    (args, model), (other_args, other) = tiny(*flags), tiny("--num-keys", "1", module=jcl)
    other_args.temperature = args.temperature = 0.13
    other.load_state_dict(model.state_dict())
    for step in range(2):
        views = inputs(2, seed=step)
        losses = [model(views, step)[0], other(views, step, 4.0)[0]]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        assert_close(*(gradients(loss, learned(m)) for loss, m in zip(losses, (model, other), strict=True)))
        for m in (model, other):
            m.update(0.9)
    assert_close(model.state_dict().values(), other.state_dict().values())


@pytest.mark.parametrize("flags, terms", [([], 1), (["--variant", "paper"], 5)])
def test_chance_is_the_loss_at_equal_logits(flags, terms):
    args, model = tiny(*flags)
    with torch.no_grad():
        for projector in (model.projector, model.momentum_projector):
            list(projector.parameters())[-2].zero_()
            list(projector.parameters())[-1].fill_(1)
        model.queue.keys.fill_(8**-0.5)
    loss, _ = model(inputs(2 + args.local_crops), 0)
    assert model.chance() == pytest.approx(loss.item()) == pytest.approx(terms * math.log(41))


@pytest.mark.parametrize("flags, most", [([], 1), (["--variant", "paper"], 5)])
def test_range_of_simsiam(flags, most):
    """-1 where all is alike, 1 where the predictor tells the opposite, between them else; chance is 0."""
    args, model = tiny("--base", "simsiam", *flags)
    assert model.chance() == 0
    same = [random(16, 3, 16, 16)] * (2 + args.local_crops)
    model.predictor = nn.Linear(8, 8, bias=False)
    for sign in (1, -1):
        with torch.no_grad():
            model.predictor.weight.copy_(-sign * torch.eye(8))
        assert model(same, 0)[0].item() == pytest.approx(sign * most)
        assert abs(model(inputs(2 + args.local_crops), 0)[0]) < most


# ------------------------------------------------------- local to local, the step


class Still(torch.optim.SGD):
    """A main optimiser that leaves the weights alone, so that what moves them is L_ll's own step."""

    def step(self):
        pass


def bytes_of(seed, n=4):
    """A batch as the loader gives it, uncoloured: four views of 16 images, or two."""
    g = torch.Generator().manual_seed(100 + seed)
    arrays = [torch.randint(0, 256, (16, s, s, 3), generator=g, dtype=torch.uint8) for s in (16, 16, 8, 8)[:n]]
    identity = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0, 0], dtype=torch.float32)
    views = [array.permute(0, 3, 1, 2) for array in arrays]  # channels last in memory
    return {"views": views, "colour": identity.expand(16, n, 9).clone()}


def normalised(args, batch):
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in args.norm)
    return [(v.double() / 255 - mean) / std for v in batch["views"]]


def begin(*flags, seed=0):
    args, model = tiny(*flags, seed=seed)
    l2l = logo.LocalToLocal(args, model, torch.device("cpu"))
    return args, model, l2l, torch.optim.SGD(learned(model), lr=0.0, momentum=0.9, weight_decay=args.weight_decay)


def advance(args, model, l2l, optimizer, step, n=4):
    """A step, of epochs of two."""
    return logo.train_step(args, model, model, optimizer, l2l, bytes_of(step, n), step, 2, torch.device("cpu"))


def still(model):
    return Still(learned(model), lr=0.0)


def encoder(model):
    """Backbone and projector: what L_ll moves."""
    return [*model.backbone.parameters(), *model.projector.parameters()]


def rate(args):
    return args.lr * 16 / args.lr_batch


class Sgd:
    """Momentum 0.9, weight decay added to the gradient."""

    def __init__(self, parameters, decay):
        self.parameters, self.decay = parameters, decay
        self.velocity = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, gradients, lr):
        for p, g, v in zip(self.parameters, gradients, self.velocity, strict=True):
            v.copy_(0.9 * v + g + self.decay * p)
            p.copy_(p - lr * v)


def norm_of(gradients):
    return math.sqrt(sum((g**2).sum().item() for g in gradients))


class Algorithm1:
    """The same steps in a plain way, on copies: the affinity first, then the encoder."""

    def __init__(self, args, model, l2l):
        self.args, self.model, self.affinity, self.norm, self.step_number = (
            args,
            *copy.deepcopy([model, l2l.affinity]),
            0.0,
            0,
        )
        decay = args.weight_decay
        self.main, self.second = Sgd(learned(self.model), decay), Sgd(encoder(self.model), 0.0)
        self.of_affinity = Sgd(list(self.affinity.parameters()), decay)

    def dissimilarity(self, local, noise):
        """L_ll by the affinity after its step."""
        a, b = (v.detach() for v in local)
        noise = noise if noise is not None else torch.zeros(2, *a.shape)
        loss = omega(self.affinity, a, b, noise, self.args.affinity_form)
        self.of_affinity_gradients = gradients(loss, self.of_affinity.parameters)
        lr = 1e-4 if self.args.affinity_form == "linear" else rate(self.args)
        self.of_affinity.step(self.of_affinity_gradients, lr)
        return softplus(scores(self.affinity, list(zip(*local, strict=True)))).mean()

    def step(self, batch, noise):
        args, model, views = self.args, self.model, normalised(self.args, batch)
        if args.l2l and args.l2l_weighting == "clip":
            found = gradients(self.dissimilarity([embed(model, x) for x in views[2:]], noise), encoder(model))
            scale = min(1.0, args.clip_ratio * self.norm / (norm_of(found) + 1e-6))
            self.second.step([scale * g for g in found], rate(args))
        keys = keys_of(args, model, views[:2], self.step_number) if args.base == "moco" else None
        loss = self.loss = total(args, terms(args, model, views, self.step_number))
        if args.l2l and args.l2l_weighting == "lambda":
            loss = loss + args.lam * self.dissimilarity([embed(model, x) for x in views[2:]], noise)
        self.gradients = gradients(loss, self.main.parameters)
        self.norm = norm_of(self.gradients)
        self.main.step(self.gradients, rate(args))
        self.step_number += 1
        if args.base == "moco":
            model.queue.enqueue(keys.flatten(0, 1))
            slow = [*model.momentum_backbone.parameters(), *model.momentum_projector.parameters()]
            for p, fast in zip(slow, encoder(model), strict=True):
                p.copy_(0.9 * p + 0.1 * fast.detach())


RUNS = {
    "moco": ["--base", "moco", "--clip-ratio", "0.3"],
    "moco linear clip": ["--base", "moco", "--affinity-form", "linear", "--clip-ratio", "0.3"],
    "moco paper": ["--base", "moco", "--variant", "paper", "--lam", "0.5"],
    "moco no-l2l": ["--base", "moco", "--no-l2l"],
    "simsiam": ["--base", "simsiam", "--lam", "0.5"],
    "simsiam paper": ["--base", "simsiam", "--variant", "paper", "--lam", "0.5"],
    "simsiam clip": ["--base", "simsiam", "--l2l-weighting", "clip", "--clip-ratio", "0.3"],
    "simsiam alone": ["--base", "simsiam", "--local-crops", "0"],
}


@pytest.mark.parametrize("name", RUNS)
def test_algorithm1(name, monkeypatch):
    """Three steps: every weight, the queue, the gradients of the main loss and of the affinity, which never mix."""
    args, model, l2l, optimizer = begin(*RUNS[name])
    noises, loss, untrained = [], logo.affinity_loss, copy.deepcopy(l2l.affinity)

    def spy(affinity, local1, local2, noise=None, form="logistic"):
        noises.append(noise)
        return loss(affinity, local1, local2, noise, form)

    monkeypatch.setattr(logo, "affinity_loss", spy)
    reference = Algorithm1(args, model, l2l)
    for step in range(3):
        metrics = advance(args, model, l2l, optimizer, step, 2 + args.local_crops)
        reference.step(bytes_of(step, 2 + args.local_crops), noises[-1] if noises else None)
        assert len(noises) == (step + 1) * args.l2l
        assert metrics["loss"].item() == pytest.approx(reference.loss.item(), rel=1e-9)
        assert metrics["grad_norm"].item() == pytest.approx(reference.norm, rel=1e-7)
        assert_close([p.grad for p in learned(model)], reference.gradients)
        assert_close(model.parameters(), reference.model.parameters())
        assert_close(l2l.affinity.parameters(), reference.affinity.parameters())
        if args.l2l:
            assert_close([p.grad for p in l2l.affinity.parameters()], reference.of_affinity_gradients)
        if args.base == "moco":
            torch.testing.assert_close(model.queue.keys, reference.model.queue.keys)
    same = [torch.equal(p, q) for p, q in zip(l2l.affinity.parameters(), untrained.parameters(), strict=True)]
    assert not any(same) if args.l2l else all(same)


def test_noise_of_the_affinity(monkeypatch):
    """Normal, of standard deviation 0.3 / sqrt(dim), new for each step, local and image; none in the linear form."""
    found, loss = [], logo.affinity_loss

    def spy(affinity, local1, local2, noise=None, form="logistic"):
        found.append(noise)
        return loss(affinity, local1, local2, noise, form)

    monkeypatch.setattr(logo, "affinity_loss", spy)
    run = begin()
    for step in range(4):
        advance(*run, step)
    noise = torch.stack(found)
    assert noise.shape == (4, 2, 16, 8) and len(noise.unique()) == noise.numel()
    assert noise.std().item() == pytest.approx(0.3 / math.sqrt(8), rel=0.06)
    within = (noise.abs() < 0.3 / math.sqrt(8)).double().mean().item()
    assert noise.mean().abs() < 0.015 and within == pytest.approx(0.683, abs=0.04)
    found.clear()
    advance(*begin("--affinity-form", "linear"), 0)
    assert found[0] is None


@pytest.mark.parametrize("most", [math.inf, 0.0])
def test_descend(most):
    """Its rate is the one given, not a checkpoint's; what the loss leaves out stays; no gradient is no step."""
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.SGD([used, unused], lr=7.0)
    logo.descend(optimizer, 2 * used.sum(), 0.1, most)
    torch.testing.assert_close(used.detach(), torch.full((3,), 0.8 if most else 1.0))
    assert torch.equal(unused, torch.ones(3))
    logo.descend(optimizer, 0 * used.sum(), 0.1, most)
    assert used.isfinite().all()


def test_the_affinitys_rate_is_the_command_lines():
    """Also where a checkpoint of another rate was loaded."""
    args, model, l2l, _ = begin()
    l2l.optimizer.param_groups[0]["lr"] = 1e9
    advance(args, model, l2l, still(model), 0)
    assert l2l.optimizer.param_groups[0]["lr"] == pytest.approx(rate(args))


@pytest.mark.parametrize("base", BASES)
def test_an_encoder_of_one_size_only_is_refused(base, capsys):
    args = logo.parse_args([*BASES[base], *"--arch test_coatnet --image-size 160 --local-size 96".split()])
    with pytest.raises(SystemExit) as stop:
        (logo.MoCo if base == "moco" else logo.SimSiam)(args)
    assert stop.value.code == 2 and "test_coatnet does not work" in capsys.readouterr().err


def test_local_crops_that_there_are_not_have_no_size():
    """So bf16, which torch computes wrongly at 16 px on a CPU, is not refused."""
    args = logo.parse_args("--local-crops 0 --amp bf16 --device cpu --image-size 32".split())
    assert common.join_processes(args).type == "cpu" and args.local_size == 32


def test_no_step_of_the_encoder_before_there_is_a_norm():
    args, model, l2l, _ = begin("--clip-ratio", "1e9")
    before, untrained = copy.deepcopy(encoder(model)), copy.deepcopy(list(l2l.affinity.parameters()))
    advance(args, model, l2l, still(model), 0)
    assert all(torch.equal(p, q) for p, q in zip(encoder(model), before, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(l2l.affinity.parameters(), untrained, strict=True))
    advance(args, model, l2l, still(model), 1)
    assert not all(torch.equal(p, q) for p, q in zip(encoder(model), before, strict=True))


@pytest.mark.parametrize("base, ratio", [("moco", 0.0), ("moco", 0.01), ("simsiam", 0.01), ("simsiam", 1e6)])
def test_clipped_step(base, ratio):
    """L_ll's step is its gradient, never longer than the ratio allows, and nothing else: no decay, no predictor."""
    args, model, l2l, _ = begin(*BASES[base], "--l2l-weighting", "clip", "--clip-ratio", str(ratio))
    velocity, norm = [torch.zeros_like(p) for p in encoder(model)], 0.0
    head = copy.deepcopy(list(model.predictor.parameters())) if base == "simsiam" else []
    for step in range(3):
        before, views = copy.deepcopy(model), normalised(args, bytes_of(step))
        metrics = advance(args, model, l2l, still(model), step)
        lowered = softplus(scores(l2l.affinity, list(zip(*(embed(before, x) for x in views[2:]), strict=True)))).mean()
        wanted = gradients(lowered, encoder(before))
        applied = []
        for p, q, v in zip(encoder(before), encoder(model), velocity, strict=True):
            moved = (p - q).detach() / rate(args)
            applied.append(moved - 0.9 * v)
            v.copy_(moved)
        assert norm_of(applied) <= ratio * norm * (1 + 1e-6) + 1e-12
        if ratio == 1e6 and step:
            assert norm_of(applied) == pytest.approx(norm_of(wanted))
        else:
            assert norm_of(wanted) > ratio * norm and norm_of(applied) == pytest.approx(
                ratio * norm, rel=1e-5, abs=1e-12
            )
        scale = norm_of(applied) / norm_of(wanted)
        assert_close(applied, [scale * g for g in wanted], rtol=1e-5, atol=1e-10)
        norm = norm_of([p.grad for p in learned(model)])  # of the main gradient, which the next step is measured by
        assert metrics["grad_norm"].item() == pytest.approx(norm) and norm > 0
        assert metrics["dissimilarity"].item() == pytest.approx(lowered.item())
    assert not head or all(torch.equal(p, q) for p, q in zip(head, model.predictor.parameters(), strict=True))


def test_simsiams_output_norm_has_no_weights():
    """As SimSiam's code: the projector ends with a batch norm of mean 0 and variance 1, and has no other bias."""
    args, model = tiny("--base", "simsiam")
    z = model.project(random(16, 3, 16, 16))
    torch.testing.assert_close(z.mean(0), torch.zeros(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(z.var(0, correction=0), torch.ones(8), atol=1e-2, rtol=0)
    assert not list(model.projector[-1].parameters())


def test_lambda_adds_to_the_gradient():
    """The loss's gradient and lambda times that of L_ll; with lambda 0 the loss's alone, though the affinity learns."""
    found, flags = {}, ["--l2l-weighting", "lambda"]
    for lam in ("0", "0.7"):
        args, model, l2l, _ = begin(*flags, "--lam", lam)
        views, before = normalised(args, bytes_of(0)), copy.deepcopy(model)
        untrained = copy.deepcopy(list(l2l.affinity.parameters()))
        advance(args, model, l2l, still(model), 0)
        found[lam] = [p.grad for p in learned(model)]
        assert not any(torch.equal(p, q) for p, q in zip(l2l.affinity.parameters(), untrained, strict=True))
    lowered = softplus(scores(l2l.affinity, list(zip(*(embed(before, x) for x in views[2:]), strict=True)))).mean()
    main = gradients(total(args, terms(args, before, views, 0)), learned(before))
    more = [
        torch.zeros_like(p) if g is None else g for p, g in zip(main, gradients(lowered, learned(before)), strict=True)
    ]
    assert_close(found["0"], main)
    assert_close(found["0.7"], [g + 0.7 * h for g, h in zip(main, more, strict=True)])
    assert norm_of(more) > 1e-4 * norm_of(main)  # it would be seen


def test_state_of_local_to_local():
    """Saved, read with weights_only and loaded anew: the next step is the same, bit for bit; unloaded, it is not."""
    args, model, l2l, optimizer = begin("--clip-ratio", "0.5")
    for step in range(2):
        advance(args, model, l2l, optimizer, step)
    file = io.BytesIO()
    parts = dict(l2l.state(), model=model, optimizer=optimizer)
    torch.save({name: part if torch.is_tensor(part) else part.state_dict() for name, part in parts.items()}, file)
    advance(args, model, l2l, optimizer, 2)
    results = []
    for loaded in (parts.keys(), ["model", "optimizer"]):
        other = begin("--clip-ratio", "0.5", seed=1)
        file.seek(0)
        saved, theirs = torch.load(file, weights_only=True), dict(other[2].state(), model=other[1], optimizer=other[3])
        for name in loaded:
            part = theirs[name]
            part.copy_(saved[name]) if torch.is_tensor(part) else part.load_state_dict(saved[name])
        advance(*other, 2)
        pairs = [*zip(model.parameters(), other[1].parameters(), strict=True)]
        pairs += zip(l2l.affinity.state_dict().values(), other[2].affinity.state_dict().values(), strict=True)
        results.append(all(torch.equal(p, q) for p, q in pairs))
    assert results == [True, False]


@pytest.fixture
def small(monkeypatch):
    """Whole runs in a second: 12 images of 16 px, small heads, the signals' handlers put back."""

    def images(name, data_dir=None, train=True, *args, **more):
        array, labels = common.make_patterns(12, 16, 0 if train else 1)
        return common.ImageSet(name, labels, common.PATTERNS, array)

    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(common, "load_images", images)
    sizes = dict(dim=16, hidden=16, affinity_hidden=16, local_size=8)
    for recipes in (logo.RECIPES, logo.SIMSIAM_RECIPES):
        monkeypatch.setitem(recipes, "patterns", recipes["patterns"] | sizes)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def flat(state, name=""):
    """{path: tensor or plain value} of a nested state."""
    if isinstance(state, dict | list | tuple):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, value in pairs for k, v in flat(value, f"{name}/{key}").items()}
    return {name: state}


RESUMED = {"moco": ["--clip-ratio", "0.5"], "simsiam": ["--base", "simsiam", "--lam", "0.5"]}
UNLIKE = "images_per_s data_wait std rank alignment uniformity".split()  # in an epoch that was broken off
RESUMED["paper"] = ["--variant", "paper", "--lam", "0.5"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_in_mid_epoch(name, small, tmp_path, monkeypatch):
    """Bit for bit an undisturbed run: weights, optimisers, affinity, norm, metrics; the norm lasts over epochs."""
    argv = "--arch resnet_nano --image-size 16 --batch-size 4 --epochs 2".split()
    argv += "--knn-every 0 --workers 0 --device cpu".split()
    norms, step_of_logo = [], logo.train_step

    def train_step(args, model, wrapped, optimizer, l2l, *rest):
        norms.append(l2l.norm.item())
        metrics = step_of_logo(args, model, wrapped, optimizer, l2l, *rest)
        assert not args.l2l_weighting == "clip" or l2l.norm == metrics["grad_norm"]
        return metrics

    monkeypatch.setattr(logo, "train_step", train_step)
    runs = []
    for name_of_run, stops in (("whole", (6,)), ("parts", (2, 6))):
        out = tmp_path / name_of_run
        for stop in stops:
            flags = [*argv, *RESUMED[name], "--out", str(out), "--max-steps", str(stop)]
            logo.main(logo.parse_args(flags))
            saved = torch.load(out / "last.pt", weights_only=True)
            assert saved.pop("step") == stop
        assert {"affinity", "affinity_optimizer", "second", "norm"} < saved.keys()
        del saved["config"], saved["record"], saved["log"]
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        epochs = [{k: v for k, v in r.items() if k not in UNLIKE} for r in records if "epoch" in r]
        assert len(epochs) == 2 and epochs[0]["dissimilarity"] > 0
        runs.append(flat([saved, epochs]))
    one, two = runs
    assert one.keys() == two.keys()
    assert [k for k in one if not (torch.equal(one[k], two[k]) if torch.is_tensor(one[k]) else one[k] == two[k])] == []
    assert norms[:6] == norms[6:] and (name != "moco" or (norms[0] == 0 and min(norms[1:6]) > 0))


def test_going_on_in_mid_epoch_with_other_metrics(small, tmp_path):
    """The means are of the steps since."""
    argv = "--arch resnet_nano --image-size 16 --batch-size 4 --epochs 1 --knn-every 0 --workers 0 --device cpu".split()
    logo.main(logo.parse_args([*argv, "--out", str(tmp_path / "a"), "--max-steps", "1"]))
    more = ["--no-l2l", "--resume", str(tmp_path / "a" / "last.pt"), "--out", str(tmp_path / "b")]
    logo.main(logo.parse_args([*argv, *more]))
    (record,) = [r for r in common.read_metrics(tmp_path / "b" / "metrics.jsonl") if "epoch" in r]
    assert record["step"] == 3 and 0 < record["loss"] < 100 and "dissimilarity" not in record


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_own_images_and_encoder(base, small, tmp_path):
    """One epoch of a list of arrays and a module without batch norm; backbone.pt holds its weights."""
    flags = "--batch-size 4 --image-size 16 --epochs 1 --workers 0 --device cpu --out".split()
    encoder = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 8))
    before = copy.deepcopy(encoder.state_dict())
    images = list(common.make_patterns(8, 20, 0)[0])
    logo.main(logo.parse_args([*flags, str(tmp_path), *BASES[base]]), train=images, encoder=encoder)
    saved = torch.load(tmp_path / "backbone.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], encoder.state_dict()[name]) for name in before)
    assert not any(torch.equal(saved[name], value) for name, value in before.items())


# ------------------------------------------------------------------ processes


def two_steps(rank, world, port, path):
    """Two steps of both bases on this process's part of the global batches; the first process writes what it got."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    common.ARCHS["resnet_nano"] = NANO
    if world:
        os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    results = {}
    for base, flags in (("moco", ["--clip-ratio", "0.5"]), ("simsiam", ["--base", "simsiam", "--lam", "0.5"])):
        args, model, l2l, optimizer = begin(*flags)
        wrapped = DistributedDataParallel(model, broadcast_buffers=False) if world else model
        found, share = [], 16 // max(1, world)
        mine = slice(rank * share, (rank + 1) * share)
        for step in range(2):
            batch = bytes_of(step)
            batch = {"views": [v[mine] for v in batch["views"]], "colour": batch["colour"][mine]}
            metrics = logo.train_step(args, model, wrapped, optimizer, l2l, batch, step, 10, torch.device("cpu"))
            names = ("loss", "affinity_loss", "dissimilarity")
            mean = {name: logo.gather(metrics[name].detach().view(1)).mean() for name in names}
            found.append([mean, [p.grad.clone() for p in learned(model)]])
        l2l_state = [part if torch.is_tensor(part) else part.state_dict() for part in l2l.state().values()]
        results[base] = flat([found, model.state_dict(), optimizer.state_dict(), l2l_state])
        weights = torch.cat([v.double().flatten() for m in (model, l2l.affinity) for v in m.state_dict().values()])
        assert (logo.gather(weights[None]) == weights).all()  # the same on every process
        del wrapped  # before the group: in torch 2.11 a DDP that goes last can hang for ever
    if rank == 0:
        torch.save(results, path)
    if world:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_any_number_of_processes_makes_the_same_steps(tmp_path):
    """One process without a group, and groups of 1, 2 and 4, in float64."""
    mp.get_context("forkserver").set_forkserver_preload(["torch", "torchvision", "timm"])
    results = []
    for world in (0, 1, 2, 4):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        path = str(tmp_path / f"{world}.pt")
        if world:
            mp.start_processes(two_steps, (world, port, path), nprocs=world, start_method="forkserver")
        else:
            two_steps(0, 0, port, path)
        results.append(torch.load(path, weights_only=True))
    for other in results[1:]:
        for base, alone in results[0].items():
            assert other[base].keys() == alone.keys() and sum(map(torch.is_tensor, alone.values())) > 100
            for name in (n for n in alone if "num_batches_tracked" not in n):  # counts, which nothing uses
                torch.testing.assert_close(
                    other[base][name], alone[name], rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
                )


# ---------------------------------------------------------------------- views


def boxes(flags, n=3000, module=logo):
    """([(boxes, size) of each view], colours) of square images of 1000 px."""
    args = module.parse_args(flags)
    sample, count = module.make_sample(args)
    index = np.arange(n)
    cuts, colours = sample(index, np.full((n, 2), 1000), common.uniform(0, 0, index, count))
    colours = np.stack(colours, 1)
    assert colours.shape == (n, len(cuts), 9) and all(np.array_equal(i, index) for i, _, _ in cuts)
    return [(box, size) for _, box, size in cuts], colours


@pytest.mark.parametrize(
    "flags, sizes, global_scale, local_scale",
    [
        ("--dataset imagenet100", (224, 96), (0.4, 1), (0.08, 0.4)),
        ("--dataset cifar10", (32, 32), (0.4, 1), (0.08, 0.6)),
        ("--dataset patterns --image-size 8", (8, 8), (0.4, 1), (0.08, 0.4)),
        ("--dataset imagenet --global-scale 0.2 0.5 --local-scale 0.05 0.9", (224, 96), (0.2, 0.5), (0.05, 0.9)),
    ],
)
def test_crops(flags, sizes, global_scale, local_scale):
    """Two globals, then two locals, all independent, of the sizes and of the area ranges asked for, which they fill."""
    views, colours = boxes(flags.split())
    assert [size for _, size in views] == [sizes[0], sizes[0], sizes[1], sizes[1]]
    for i, (box, _) in enumerate(views):
        low, high = global_scale if i < 2 else local_scale
        area = box[:, 2] * box[:, 3] / 1e6
        assert low * 0.99 <= area.min() < low + 0.02 and high - 0.05 < area.max() <= min(1, high * 1.01)
        assert (box >= 0).all() and (box[:, :2] + box[:, 2:] <= 1000).all()
        if high < 0.6:  # where every aspect fits, areas are uniform
            assert area.mean() == pytest.approx((low + high) / 2, abs=4 * (high - low) / math.sqrt(12 * len(area)))
        for other, _ in views[:i]:
            assert (box != other).any(1).mean() > 0.95
        for j in range(i):
            assert (colours[:, i] != colours[:, j]).any(1).mean() > 0.8


def test_globals_do_not_depend_on_the_locals():
    views, colours = boxes([])
    for flags in (["--local-crops", "0"], ["--local-scale", "0.3", "0.7"], ["--base", "simsiam", "--no-l2l"]):
        others, other_colours = boxes(flags)
        for (box, size), (other, other_size) in zip(views[:2], others[:2], strict=True):
            assert np.array_equal(box, other) and size == other_size
        assert np.array_equal(colours[:, :2], other_colours[:, :2])


def test_first_views_are_those_of_jcl():
    """With its crops' range: the query, and its first key, so that what is compared is the method."""
    scale = jcl.parse_args([]).crop_scale
    flags = ["--global-scale", *map(str, scale)]
    (views, colours), (others, other_colours) = boxes(flags), boxes(["--num-keys", "3"], module=jcl)
    assert [size for _, size in views[:2]] == [size for _, size in others[:2]]
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(views[:2], others[:2], strict=True))
    assert np.array_equal(colours[:, :2], other_colours[:, :2])


def test_views_are_cut_to_their_sizes():
    args = logo.parse_args([])
    array, labels = common.make_patterns(5, 32, 0)
    views = common.Views(common.ImageSet("patterns", labels, common.PATTERNS, array), *logo.make_sample(args), 0)
    batch = views.__getitems__([(0, i) for i in range(5)])
    assert [tuple(v.shape) for v in batch["views"]] == [(5, 3, 32, 32)] * 2 + [(5, 3, 16, 16)] * 2
    assert batch["colour"].shape == (5, 4, 9)


def test_patches_matter_to_local_crops_only_where_there_are_some():
    logo.parse_args("--arch vit_micro --image-size 32 --patch-size 32 --local-crops 0".split())
    with pytest.raises(SystemExit):
        logo.parse_args("--arch vit_micro --image-size 32 --patch-size 32".split())


@pytest.mark.parametrize("base", BASES)
def test_vit_takes_locals_at_their_own_resolution(base):
    args = logo.parse_args([*BASES[base], "--arch", "vit_micro", "--patch-size", "8", "--batch-size", "8"])
    assert (args.image_size, args.local_size, args.arch) == (32, 16, "vit_micro")
    args.dim, args.hidden, tokens = 8, 8, []
    common.join_processes(args)
    model = logo.group_batch_norms((logo.MoCo if base == "moco" else logo.SimSiam)(args), args.bn_groups)
    model.backbone.blocks[0].register_forward_hook(lambda module, given, out: tokens.append(out.shape[1]))
    views = [random(8, 3, s, s, seed=i, grad=True) for i, s in enumerate((32, 32, 16, 16))]
    loss, metrics = model(views, 0)
    assert tokens == [17, 17, 5, 5] and [v.shape for v in metrics["locals"]] == [(8, 8)] * 2
    assert all(g.abs().max() > 0 for g in gradients(loss, views))
    torch.testing.assert_close(loss, total(args, terms(args, model, views, 0)))


# ------------------------------------------------------------------ arguments


def test_recipes():
    def choices(*flags):
        a = logo.parse_args(list(flags))
        return a.variant, a.affinity_form, a.l2l_weighting, a.affinity_lr

    assert choices() == ("released", "logistic", "clip", None)
    assert choices("--base", "simsiam") == ("released", "logistic", "lambda", None)
    assert choices("--variant", "paper") == ("paper", "linear", "lambda", 1e-4)
    assert choices("--variant", "paper", "--base", "simsiam") == ("paper", "linear", "lambda", 1e-4)
    assert choices("--affinity-form", "linear") == ("released", "linear", "clip", 1e-4)
    flags = "--variant paper --affinity-form logistic --l2l-weighting clip"
    assert choices(*flags.split()) == ("paper", "logistic", "clip", None)
    assert [logo.parse_args(f.split()).l2l for f in ("", "--no-l2l", "--local-crops 0")] == [True, False, False]
    a = logo.parse_args(["--dataset", "imagenet100"])
    assert (a.arch, a.image_size, a.local_size, a.batch_size) == ("resnet34", 224, 96, 256)
    assert (a.epochs, a.lr, a.lr_batch) == (200, 0.03, 256)
    for arch, flags, size in (("resnet18", "", 32), ("resnet_micro", "", 32), ("resnet18", "--local-size 16", 16)):
        a = logo.parse_args(["--dataset", "cifar10", "--arch", arch, *flags.split()])
        assert (a.image_size, a.local_size, a.local_scale) == (32, size, (0.08, 0.6))
    a = logo.parse_args(["--dataset", "imagenet100"])
    assert (a.milestones, a.momentum, a.temperature, a.queue, a.dim, a.weight_decay) == (
        (0.6, 0.8),
        0.999,
        0.07,
        4096,
        128,
        1e-4,
    )
    assert (a.affinity_hidden, a.clip_ratio, a.jitter, a.blur_p) == (256, 0.015, (0.4, 0.4, 0.4, 0.1), 0.5)
    s = logo.parse_args(["--dataset", "cifar10", "--base", "simsiam"])
    assert s.queue == 0  # none; None would be a share of the images
    assert (s.arch, s.batch_size, s.lr, s.layers, s.dim, s.hidden, s.lam) == ("resnet18", 512, 0.03, 2, 2048, 512, 1e-4)
    for flags in ("", "--dataset cifar10 --arch resnet_mini", "--dataset cifar10", "--dataset folder"):
        s = logo.parse_args(["--base", "simsiam", *flags.split()])
        assert 2 * s.hidden <= s.dim  # the predictor is a bottleneck (SimSiam, section 3)
    assert logo.parse_args(["--one-way", "--local-crops", "0"]).one_way is True and logo.parse_args([]).one_way is False


MISTAKES = """
--one-way
--one-way --base simsiam --local-crops 0
--queue 64 --base simsiam
--local-crops 1
--global-scale 0.4 1.1
--lam nan
--clip-ratio -0.1
--lam 0.5
--clip-ratio 0.3 --base simsiam
--clip-ratio 0.3 --no-l2l
--lam 0.5 --l2l-weighting lambda --local-crops 0
--patch-size 32 --arch vit_micro --image-size 32
"""


@pytest.mark.parametrize("flags", MISTAKES.strip().splitlines())
def test_mistakes(flags, capsys):
    """One line that names the first of these flags, and status 2."""
    with pytest.raises(SystemExit) as stop:
        logo.parse_args(flags.split())
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.err.count("\n") == 1 and flags.split()[0] in said.err and said.out == ""
