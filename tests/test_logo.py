"""logo.py against the supplement's Eq. 4, the main text's losses and Algorithm 1, as loops, and its limits."""

import copy
import math
import types

import pytest
import torch
from conftest import NANO, info_nce, unit, values
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import common
import jcl
import logo

FORMS = ("logistic", "linear")
BASES = {"moco": ["--base", "moco"], "simsiam": ["--base", "simsiam"]}


@pytest.fixture(autouse=True)
def _small(monkeypatch, double):
    """float64 throughout, and a very small ResNet."""
    monkeypatch.setitem(common.ARCHS, "nano", ("resnet18", dict(NANO, zero_init_last=False)))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def random(*shape, seed=0, grad=False):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


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

    In training the batch norms take the mean and the variance of these pairs.
    """
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


def separate(affinity, *parts):
    """Each part's scores, in batches of their own."""
    return [scores(affinity, part) for part in parts]


def joint(affinity, *parts):
    """Each part's scores, all in one batch."""
    found = scores(affinity, [pair for part in parts for pair in part])
    return [found[i * len(parts[0]) : (i + 1) * len(parts[0])] for i in range(len(parts))]


BATCHES = {"separate": separate, "joint": joint}


def omega(affinity, a, b, noise, form, score=separate):
    """What the affinity minimises, pair by pair: minus Eq. 4, or the released logistic form."""
    n, (x, y) = len(a), noise
    u, v = noise if score is joint else 0 * noise  # the negatives' noise
    positives = [(a[i] + x[i], b[i] + y[i]) for i in range(n)]
    negatives = [(a[i] + u[i], b[i - 1] + v[i - 1]) for i in range(n)]  # b[-1] for the first
    if form == "linear":
        positive, negative = score(affinity, positives, negatives)
        return -(sum(softplus(positive)) / n - sum(softplus(negative)) / n)
    other_positives = [(b[i] + x[i], a[i] + y[i]) for i in range(n)]
    other_negatives = [(b[i] + u[i], a[i - 1] + v[i - 1]) for i in range(n)]
    found = score(affinity, positives, other_positives, negatives, other_negatives)
    chances = [1 / (1 + torch.exp(-s)) for s in found]
    return -(sum(torch.log(p).sum() for p in chances[:2]) + sum(torch.log(1 - p).sum() for p in chances[2:])) / (2 * n)


def dissimilarity_of(affinity, a, b, score=separate):
    """L_ll, pair by pair; negatives in the batch are constants."""
    positives, c, d = list(zip(a, b, strict=True)), a.detach(), b.detach()
    negatives = [(c[i], d[i - 1]) for i in range(len(c))]
    return sum(softplus(score(affinity, positives, negatives)[0])) / len(a)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("training, noisy", [(True, True), (True, False), (False, True)])
def test_affinity_loss(form, batch, training, noisy):
    """Against loops over an odd batch; its gradient reaches the affinity and not the locals."""
    a, b, noise = unit(5, 6, grad=True), unit(5, 6, seed=1, grad=True), 0.2 * random(2, 5, 6, seed=2)
    module, other = affinity(training), affinity(training)
    ours = logo.affinity_loss(module, a, b, noise if noisy else None, form, batch)
    reference = omega(other, a.detach(), b.detach(), noise if noisy else 0 * noise, form, BATCHES[batch])
    torch.testing.assert_close(ours, reference)
    assert_close(gradients(ours, list(module.parameters())), gradients(reference, list(other.parameters())))
    ours.backward()
    assert a.grad is None and b.grad is None and module.layers[0].weight.grad.abs().max() > 0


def test_affinity_loss_limits():
    """At zero scores 2 ln 2 and 0; the least is 0 in the logistic form, none in the linear one; no order of the two."""
    a, b, module = unit(5, 6), unit(5, 6, seed=1), affinity(False)
    losses = {form: logo.affinity_loss(module, a, b, None, form) for form in FORMS}
    torch.testing.assert_close(logo.affinity_loss(module, b, a), losses["logistic"])  # the default form
    with torch.no_grad():
        module.layers[-1].weight.zero_()
        module.layers[-1].bias.zero_()
    assert logo.affinity_loss(module, a, b, None, "logistic").item() == pytest.approx(2 * math.log(2))
    assert logo.affinity_loss(module, a, b, None, "linear").item() == pytest.approx(0, abs=1e-15)

    def oracle(x, y):  # knows that a[i] and b[i] belong together
        return torch.where(((x == a) & (y == b) | (x == b) & (y == a)).all(1), 100.0, -100.0)

    assert logo.affinity_loss(oracle, a, b, None, "logistic").item() == pytest.approx(0)
    assert logo.affinity_loss(oracle, a, b, None, "linear").item() == pytest.approx(-100)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("training", [False, True])
def test_local_dissimilarity(training, batch):
    """Mean softplus of the score, a gradient to the locals alone; the affinity stays as it is, and its gradients."""
    a, b = unit(5, 6, grad=True), unit(5, 6, seed=1, grad=True)
    module, other = affinity(training), affinity(training)
    ours = logo.local_dissimilarity(module, a, b, batch)
    reference = dissimilarity_of(other, a, b, BATCHES[batch])
    torch.testing.assert_close(ours, reference)
    assert_close(gradients(ours, [a, b]), gradients(reference, [a, b]))
    for p in module.parameters():
        p.grad = torch.full_like(p, 3.0)
    ours.backward()
    assert a.grad.abs().max() > 0 and b.grad.abs().max() > 0
    assert all((p.grad == 3).all() and p.requires_grad for p in module.parameters())
    assert_close(module.parameters(), other.parameters(), rtol=0, atol=0)


# -------------------------------------------------------------- the two bases

SMALL = "--arch nano --image-size 16 --batch-size 16 --dim 8 --lr 0.05 --lr-batch 128 --warmup 0 "
SMALL += "--milestones 0.99 --weight-decay 0.01 --epochs 1 --knn-every 0 --device cpu --amp off"
SMALL_BASE = {"moco": "--queue 40 --momentum 0.9 --temperature 0.2 --bn-groups 4", "simsiam": "--hidden 8"}


def parse(*flags):
    """Arguments for images of 16 px and locals of 8 px, small heads, decay and momentum that can be seen."""
    base = SMALL_BASE["simsiam" if "simsiam" in flags else "moco"]
    local = [] if "--local-crops" in flags else ["--local-size", "8"]
    local += ["--affinity-hidden", "12"]
    return logo.parse_args([*SMALL.split(), *base.split(), *local, *flags])


def build(args):
    """The model of a run of one process, as it begins."""
    torch.manual_seed(args.seed)
    if args.base == "simsiam":
        return logo.SimSiam(args)
    return logo.split_batch_norms(logo.MoCo(args), args.bn_groups)


def tiny(*flags):
    args = parse(*flags)
    return args, build(args)


def inputs(n=4, seed=0, grad=False):
    return [random(16, 3, s, s, seed=10 * seed + i, grad=grad) for i, s in enumerate((16, 16, 8, 8)[:n])]


def project(model, x):
    return model.projector(model.backbone(x))


def embed(model, x):
    """What the affinity sees: L2-normalised, before SimSiam's predictor."""
    return torch.stack([z / z.norm() for z in project(model, x)])


def cosine(p, z):
    return -sum(p[i] @ z[i] / (p[i].norm() * z[i].norm()) for i in range(len(p))) / len(p)


def keys_of(args, model, views, step):
    """Each view's keys by themselves: their batch statistics are of one view."""
    generators = [common.generator(args.seed, step, 20 + i) for i in range(len(views))]
    found = [logo.encode_shuffled_keys(model.key, [x], g) for x, g in zip(views, generators, strict=True)]
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
    return [[info_nce(a, b, queue, args.temperature) for a, b in part] for part in pairs]


def total(args, found):
    g, local = found
    return sum(g) / 2 + sum(local) if args.variant == "paper" else (sum(g) + sum(local)) / (2 + len(local))


def learned(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("base", BASES)
def test_all_pairs_of_crops(base):
    """The supplement's 4-crop baseline: the mean over every crop with every other, whose side is a constant."""
    args, model = tiny(*BASES[base], "--pairs", "all")
    other, views = copy.deepcopy(model), inputs(grad=True)
    loss, keys, *_ = model(views, 7)
    if base == "moco":
        k = keys_of(args, other, views, 7)
        q, queue = [embed(other, x) for x in views], other.queue.keys
        found = [info_nce(q[i], k[j], queue, args.temperature) for i in range(4) for j in range(4) if i != j]
        assert torch.equal(keys, k[:2].flatten(0, 1))
    else:
        z = [project(other, x) for x in views]
        p = [other.predictor(v) for v in z]
        found = [cosine(p[i], z[j].detach()) for i in range(4) for j in range(4) if i != j]
    torch.testing.assert_close(loss, sum(found) / 12)
    assert_close(gradients(loss, views), gradients(sum(found) / 12, views))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_simsiams_projector(layers):
    """It has as many layers as asked for, and ends with a batch norm without parameters."""
    _, model = tiny("--base", "simsiam", "--layers", str(layers))
    assert sum(isinstance(m, nn.Linear) for m in model.projector) == layers
    assert isinstance(model.projector[-1], nn.BatchNorm1d) and not list(model.projector[-1].parameters())


# ------------------------------------------------------- Algorithm 1: Eq. 6, then Eq. 9


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


def encoder_of(model):
    """Backbone and projector: what L_ll moves."""
    return [*model.backbone.parameters(), *model.projector.parameters()]


def norm_of(gradients):
    return math.sqrt(sum((g**2).sum().item() for g in gradients))


class Algorithm1:
    """The steps of a run in a plain way: the affinity first, then the encoder."""

    def __init__(self, args):
        self.args, self.model, self.norm, self.steps = args, build(args), 0.0, 0
        self.affinity = logo.Affinity(args.dim, args.affinity_hidden)
        self.rate = args.lr * 16 / args.lr_batch
        self.main = Sgd(learned(self.model), args.weight_decay)
        self.second = Sgd(encoder_of(self.model), 0.0)
        self.of_affinity = Sgd(list(self.affinity.parameters()), args.weight_decay)
        self.found = []  # (loss, norm of the gradient)

    def dissimilarity(self, views, noise):
        """L_ll by the affinity after its step."""
        local = [embed(self.model, x) for x in views[2:]]
        a, b = (v.detach() for v in local)
        noise = torch.zeros(2, *a.shape) if noise is None else noise
        score = BATCHES[self.args.affinity_batch]
        loss = omega(self.affinity, a, b, noise, self.args.affinity_form, score)
        lr = 1e-4 if self.args.affinity_form == "linear" else self.rate
        self.of_affinity.step(gradients(loss, self.of_affinity.parameters), lr)
        return dissimilarity_of(self.affinity, *local, score)

    def step(self, views, noise):
        args, model = self.args, self.model
        if args.l2l and args.l2l_weighting == "clip":
            found = gradients(self.dissimilarity(views, noise), encoder_of(model))
            scale = min(1.0, args.clip_ratio * self.norm / (norm_of(found) + 1e-6))
            self.second.step([scale * g for g in found], self.rate)
        keys = keys_of(args, model, views[:2], self.steps) if args.base == "moco" else None
        loss = objective = total(args, terms(args, model, views, self.steps))
        if args.l2l and args.l2l_weighting == "lambda":
            objective = loss + args.lam * self.dissimilarity(views, noise)
        found = gradients(objective, self.main.parameters)
        self.norm = norm_of(found)
        self.main.step(found, self.rate)
        self.found.append((loss.item(), self.norm))
        self.steps += 1
        if args.base == "moco":
            model.queue.enqueue(keys.flatten(0, 1))
            slow = [*model.momentum_backbone.parameters(), *model.momentum_projector.parameters()]
            with torch.no_grad():
                for p, fast in zip(slow, encoder_of(model), strict=True):
                    p.copy_(0.9 * p + 0.1 * fast)


def images():
    """A user's own data set: 48 patterns of 16 px."""
    return common.ImageSet(common.make_patterns(48, 16, 0)[0])


def views_of(args):
    """Each step's views in the first epoch of a run on `images`."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in common.NORMS[args.norm])
    loader = common.make_loader(args, images(), logo.augmentation(args), torch.device("cpu"))
    return [[(v - mean) / std for v in common.colour_views(batch, torch.device("cpu"))] for batch in loader]


def run(args, out):
    """A run on `images`; returns its last.pt."""
    logo.main(types.SimpleNamespace(**vars(args) | dict(out=str(out))), train=images())
    return common.load_checkpoint(out / "last.pt")


@pytest.fixture
def noises(monkeypatch):
    """The noise of each call of `affinity_loss`."""
    found, loss = [], logo.affinity_loss

    def spy(affinity, local1, local2, noise=None, *rest):
        found.append(noise)
        return loss(affinity, local1, local2, noise, *rest)

    monkeypatch.setattr(logo, "affinity_loss", spy)
    return found


RUNS = {
    "moco": "--base moco --clip-ratio 0.3",
    "moco, nothing clipped": "--base moco --clip-ratio 1e6",
    "moco, linear": "--base moco --affinity-form linear --clip-ratio 0.3",
    "moco, joint": "--base moco --affinity-batch joint --clip-ratio 0.3",
    "moco, paper": "--base moco --variant paper --lam 0.5",
    "moco, no l2l": "--base moco --no-l2l",
    "moco, alone": "--base moco --local-crops 0",
    "simsiam": "--base simsiam --lam 0.5",
    "simsiam, paper": "--base simsiam --variant paper --lam 0.5",
    "simsiam, joint": "--base simsiam --variant paper --affinity-batch joint --lam 0.5",
    "simsiam, clip": "--base simsiam --l2l-weighting clip --clip-ratio 0.3",
    "simsiam, alone": "--base simsiam --local-crops 0",
}


AT_ONCE = ("moco", "moco, paper", "simsiam", "simsiam, clip")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in AT_ONCE else pytest.mark.slow) for n in RUNS])
def test_algorithm1(name, tmp_path, noises):
    """Three steps of `main`: the weights, velocities, queue and affinity of a slow reference, which never mix."""
    args = parse(*RUNS[name].split())
    saved = run(args, tmp_path)
    (record,) = saved["records"]
    assert saved["step"] == 3 and len(noises) == 3 * args.l2l
    reference = Algorithm1(args)
    untrained = copy.deepcopy(reference.affinity.state_dict())
    for step, views in enumerate(views_of(args)):
        reference.step(views, noises[step] if args.l2l else None)
    for part, module in (("model", reference.model), ("affinity", reference.affinity)):
        for weight, value in module.named_parameters():
            assert_close([saved[part][weight]], [value.detach()])
    optimizers = dict(optimizer=reference.main, affinity_optimizer=reference.of_affinity)
    for part, sgd in (optimizers | dict(second_optimizer=reference.second)).items():
        for i, state in saved[part]["state"].items():
            assert_close([state["momentum_buffer"]], [sgd.velocity[i]])
        used = dict(optimizer=True, affinity_optimizer=args.l2l, second_optimizer=args.l2l_weighting == "clip")
        assert bool(saved[part]["state"]) == (used[part] and (args.l2l or part == "optimizer"))
    if args.base == "moco":
        torch.testing.assert_close(saved["model"]["queue.keys"], reference.model.queue.keys)
    losses, norms = zip(*reference.found, strict=True)
    assert record["loss"] == pytest.approx(sum(losses) / 3) and record["grad_norm"] == pytest.approx(sum(norms) / 3)
    assert saved["previous_norm"].item() == pytest.approx(reference.norm) and ("dissimilarity" in record) == args.l2l
    same = [torch.equal(saved["affinity"][name], value) for name, value in untrained.items()]
    assert not any(same) if args.l2l else all(same)


@pytest.mark.parametrize("scale", [0.3, 0.6])
def test_noise_of_the_affinity(scale, noises):
    """Normal, of standard deviation scale / sqrt(dim), new for each step, local and image; none in the linear form."""
    a, b, module = unit(16, 8), unit(16, 8, seed=1), affinity(True, dim=8)
    optimizer = torch.optim.SGD(module.parameters())
    for args in (parse("--affinity-noise", str(scale)), parse("--affinity-form", "linear")):
        for step in range(8):
            logo.affinity_step(args, module, optimizer, 0.01, a, b, step)
    assert noises[8:] == [None] * 8
    noise = torch.stack(noises[:8])
    assert noise.shape == (8, 2, 16, 8) and len(noise.unique()) == noise.numel()
    assert noise.std().item() == pytest.approx(scale / math.sqrt(8), rel=0.05) and noise.mean().abs() < 0.02 * scale
    assert (noise.abs() < noise.std()).double().mean().item() == pytest.approx(0.683, abs=0.03)


@pytest.mark.parametrize("max_norm", [math.inf, 3.0, 0.0])
def test_descend(max_norm):
    """Its rate is the one given, not a checkpoint's; what the loss leaves out stays; no gradient is no step."""
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.SGD([used, unused], lr=7.0)
    logo.descend(optimizer, 2 * used.sum(), 0.1, max_norm)
    torch.testing.assert_close(used.detach(), 1 - 0.1 * torch.full((3,), min(2, max_norm / math.sqrt(3))))
    assert torch.equal(unused, torch.ones(3))
    logo.descend(optimizer, 0 * used.sum(), 0.1, max_norm)
    assert used.isfinite().all()


# ----------------------------------------------------------------- views and recipes


def test_crops():
    """Two globals, then two locals. With the crops' range of jcl.py the globals are its query and its first key."""
    small = "--dataset imagenet --global-scale 0.2 0.5 --local-scale 0.05 0.9"
    for flags, *sizes, global_scale, local_scale in (
        ("--dataset cifar10", 32, 32, (0.4, 1), (0.08, 0.6)),
        (small, 224, 96, (0.2, 0.5), (0.05, 0.9)),
    ):
        views = [(view.size, view.area) for view in logo.augmentation(logo.parse_args(flags.split()))]
        assert views == [(sizes[0], global_scale)] * 2 + [(sizes[1], local_scale)] * 2
    theirs = jcl.parse_args([])
    args = logo.parse_args(["--global-scale", *map(str, theirs.crop_scale)])
    assert logo.augmentation(args)[:2] == jcl.augmentation(theirs)[:2]


def test_recipes():
    names = "affinity_form l2l_weighting affinity_lr"
    for flags, expected in {
        "": ["logistic", "clip", "auto"],
        "--base simsiam": ["logistic", "lambda", "auto"],
        "--variant paper": ["linear", "lambda", 1e-4],
        "--affinity-form linear": ["linear", "clip", 1e-4],
        "--variant paper --affinity-form logistic --l2l-weighting clip": ["logistic", "clip", "auto"],
    }.items():
        assert values(logo, flags, names) == expected
    assert [values(logo, f, "l2l") for f in ("", "--no-l2l", "--local-crops 0")] == [[True], [False], [False]]
    names = "arch image_size local_size epochs batch_size lr lr_batch milestones momentum temperature queue dim"
    ours = ["resnet34", 224, 96, 200, 256, 0.03, 256, (0.6, 0.8), 0.999, 0.07, 4096, 128]
    assert values(logo, "--dataset imagenet100", names) == ours
    names = "weight_decay affinity_hidden affinity_noise clip_ratio jitter blur_p bn_groups"
    assert values(logo, "--dataset imagenet100", names) == [1e-4, 256, 0.3, 0.015, (0.4, 0.4, 0.4, 0.1), 0.5, 8]
    assert values(logo, "--dataset cifar10", "image_size local_size local_scale") == [32, 32, (0.08, 0.6)]
    names = "arch batch_size lr layers dim hidden lam milestones"
    assert values(logo, "--dataset cifar10 --base simsiam", names) == ["resnet18", 512, 0.03, 2, 2048, 512, 1e-4, ()]
