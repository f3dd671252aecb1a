"""Tests `main` against the authors' training loops, on the same views and weights, for 8 to 12 steps in float64.

golden/README.md says what the files trajectory_*.npz hold. Seeds determine the views and initial weights. The methods
are patched with the documented differences of the released code, by number. All losses, weights and buffers must agree.
"""

import functools
import itertools
import math
import os
import zlib

import numpy as np
import pytest
import timm
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import MODULES, ROOT, blank, slow_but

import common

JCL, MOCO = "jcl --lam-schedule ramp --lam 2 --num-keys", "moco_jointcrop --joint none --moco"
CLIM, LOGO = "clim --selection none", "logo --local-crops 0 --one-way"
PATCHMIX = "patchmix --arch vit_golden --num-heads 4 --drop-path 0 --variant released"
# (golden file and run, flags). The baseline of all methods with a queue is MoCo v2.
QUICK = [
    ("jcl/one_step_per_epoch", f"{JCL} 4"), ("mocov2/v2_one_step_per_epoch", f"{MOCO} v2"),
    ("mocov2/v2_one_step_per_epoch", CLIM), ("mocov3/constant", f"{MOCO} v3"),
    ("logo/aligned", "logo --milestones 1"), ("patchmix/constant", PATCHMIX),  # at 1, the learning rate never falls
]  # fmt: skip
RUNS = QUICK + [
    ("mocov2/v1", f"{MOCO} v1"), ("mocov2/v2", f"{MOCO} v2"), ("mocov2/v2_one_step_per_epoch", "jcl --num-keys 1"),
    ("jcl/released", f"{JCL} 3"), ("mocov2/v2_one_step_per_epoch", LOGO), ("mocov3/released", f"{MOCO} v3"),
    ("logo/baseline", LOGO), ("logo/no_l2l", "logo --no-l2l"), ("logo/released", "logo"),
    ("patchmix/released", PATCHMIX), ("patchmix/itself", f"{PATCHMIX} --key-encoder query"),
]  # fmt: skip
OF_TWO_PROCESSES = [
    ("two_processes/mocov2", f"{MOCO} v2"), ("two_processes/mocov2", CLIM), ("two_processes/mocov3", f"{MOCO} v3"),
    ("two_processes/jcl", f"{JCL} 3"), ("two_processes/logo", "logo --no-l2l"), ("two_processes/patchmix", PATCHMIX),
]  # fmt: skip
LR_PER_EPOCH = ("jcl/released", "mocov2/v2", "two_processes/jcl", "two_processes/mocov2")  # only in the released code


def initial(seed, name, tensor):
    """Return the initial value of a tensor by its name. The momentum encoder has the same values as the encoder."""
    name = name.replace("momentum_", "")
    if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
        return tensor
    stream = np.random.RandomState((seed + zlib.crc32(name.encode())) % 2**32)
    r = torch.from_numpy(stream.standard_normal(tensor.shape))
    if name == "queue.keys":
        return F.normalize(r, dim=1)
    if name.endswith(("cls_token", "pos_embed")):
        return 0.2 * r
    if tensor.dim() > 1:
        return r / math.sqrt(math.prod(tensor.shape[1:]))
    return 1 + 0.1 * r if name.endswith("weight") else 0.1 * r


def views_of_step(seed, step, n, sizes):
    """Return the views of a step, (n, 3, S, S) each: a pattern of squares that all share, plus weaker noise."""
    stream = np.random.RandomState((seed + 7919 * (step + 1)) % 2**32)
    shared = torch.from_numpy(stream.standard_normal((n, 3, 4, 4)))
    return [F.interpolate(shared, s) + torch.from_numpy(stream.standard_normal((n, 3, s, s))) / 2 for s in sizes]


def probe(x):
    """Return two numbers that identify an array: its norm, and its dot product with cos(1), cos(2), ..."""
    x = x.double().flatten()
    return torch.stack([x.norm(), x @ torch.cos(torch.arange(1.0, len(x) + 1, dtype=torch.float64))])


class Lars(torch.optim.Optimizer):
    """MoCo v3's LARS, which divides by |g + wd p|. timm's divides by |g| + wd |p| (golden/README.md)."""

    def __init__(self, groups, lr=0.0, momentum=0.9, trust_coeff=0.001):
        super().__init__(groups, dict(lr=lr, momentum=momentum, trust_coeff=trust_coeff, weight_decay=0.0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad
                if p.dim() > 1:
                    update = update + group["weight_decay"] * p
                    update = update * (group["trust_coeff"] * p.norm() / update.norm())
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                p.sub_(group["lr"] * buffer.mul_(group["momentum"]).add_(update))


def released_pos_embed(posemb, new_size, **_):
    """Resample a ViT's position embedding as released: bicubic, without antialiasing, by the scale (n + 0.1) / n0."""
    prefix, grid = posemb[:, :1], posemb[:, 1:]
    side = math.isqrt(grid.shape[1])
    if (side, side) == tuple(new_size):
        return posemb
    grid = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    scale = tuple((n + 0.1) / side for n in new_size)
    grid = F.interpolate(grid, scale_factor=scale, mode="bicubic", recompute_scale_factor=False)
    return torch.cat([prefix, grid.permute(0, 2, 3, 1).flatten(1, 2)], 1)


def flags_of(method, s):
    """Return a method's flags for the settings of a run. Learning rates are per 256 images."""
    n = s["batch_size"]
    values = dict(arch="resnet_golden", device="cpu", knn_every=0, workers=0, warmup=s.get("warmup_epochs", 0))
    values["lr"] = s["lr_at_256"] if "lr_at_256" in s else s["lr"] * 256 / n
    names = "epochs batch_size image_size patch_size dim queue temperature hidden weight_decay num_mix momentum"
    values |= {name: s[name] for name in [*names.split(), "local_crops"] if s.get(name)}  # 0 is the default
    if method == "patchmix":
        values |= dict(min_lr=s["min_lr"] * 256 / n, mix_slices=s.get("processes", 1))
    elif "trust_coeff" not in s:
        values["bn_groups"] = s.get("processes", 1)
    if s.get("milestone_epochs"):
        values["milestones"] = [epoch / s["epochs"] for epoch in s["milestone_epochs"]]
    if s.get("l2l"):
        values["clip_ratio"] = s["clip_ratio"]
    words = []
    for name, value in values.items():
        words += ["--" + name.replace("_", "-"), *map(str, value if isinstance(value, list) else [value])]
    return words


def follow(patch, module, method, run, s, d):
    """Patch a method with views, weights and documented differences. Return a list that will get each step's loss."""
    losses, open_run = [], common.open_run
    patch.setitem(common.ARCHS, "resnet_golden", ("resnet18", dict(layers=(1, 1, 1, 1), channels=(8, 8, 16, 16))))
    patch.setitem(common.ARCHS, "vit_golden", ("vit_tiny_patch16_224", dict(embed_dim=32, depth=2, num_heads=4)))

    def stream():
        local_sizes = [s["local_size"]] * s.get("local_crops", 2) if "local_size" in s else []
        sizes = [s["image_size"]] * (1 + s.get("num_keys", 1)) + local_sizes
        for step in itertools.count():
            views = views_of_step(s["seed"], step, s["batch_size"], sizes)
            yield from map(common.local_rows, reversed(views) if method == "clim" else views)  # CLIM's key comes first

    def with_weights(args, train, state, derived):
        for name, part in state.items():
            if isinstance(part, torch.nn.Module):
                prefix = "" if name == "model" else f"{name}."
                part.load_state_dict({k: initial(s["seed"], prefix + k, x) for k, x in part.state_dict().items()})
        if dist.is_initialized() and not hasattr(state["model"], "queue"):
            tiny.synchronize(state["model"])
        state["model"].register_forward_hook(lambda model, views, found: losses.append(found[0].detach()))
        return open_run(args, train, state, derived)

    views = stream()
    patch.setattr(module, "augment", lambda *_: next(views))
    patch.setattr(common, "open_run", with_weights)
    if run in LR_PER_EPOCH or s.get("warmup_epochs", 0) > s["epochs"] / 4:
        patch.setattr(module, "learning_rate", lambda args, epoch: d["lr"][round(epoch * s["steps_per_epoch"])].item())
    if s.get("momentum_cosine"):  # released: the momentum encoder is updated before a step, not after it
        moves = iter([*d["momentum_of_step"][1:].tolist(), 1.0])
        model = module.PatchMix if method == "patchmix" else module.MoCoBase
        patch.setattr(model, "update", lambda self, m, move=model.update: move(self, next(moves)))
    if "trust_coeff" in s:
        patch.setattr(module, "Lars", Lars)
    if "affinity_hidden" in s:
        patch.setattr(module, "Affinity", functools.partial(module.Affinity, hidden=s["affinity_hidden"]))
    if method == "patchmix":
        local = d.get("local_permutations", [()] * len(d["loss"]))
        steps = zip(d["permutations"], local, strict=True)  # D5: view 2, of the queries, is mixed first
        shuffles = iter([torch.from_numpy(x) for views, crops in steps for x in (*views[::-1], *crops)])
        patch.setattr(module, "patch_mix", lambda *args, mix=module.patch_mix: mix(*args, next(shuffles)))
        patch.setattr(timm.models.vision_transformer, "resample_abs_pos_embed", released_pos_embed)
    if "shuffles" in d:  # of the keys, with two processes only
        encode_shuffled_keys = module.encode_shuffled_keys
        per_step = torch.from_numpy(d["shuffles"]).split(len(d["shuffles"]) // len(d["loss"]))
        orders = iter([order for step in per_step for order in step[:2]])  # LoGo's third and fourth are of local crops

        def shuffled(encode, views):
            order = next(orders)
            # Released: rows are ordered by process, then by view; here: by view, then by process
            location = torch.arange(len(order)).view(s["processes"], len(views), -1).transpose(0, 1).flatten()
            order = location.argsort()[order]
            with pytest.MonkeyPatch.context() as inside:
                inside.setattr(torch, "randperm", lambda *_, **__: order)
                return encode_shuffled_keys(encode, views)

        patch.setattr(module, "encode_shuffled_keys", shuffled)
    if "noise" in d:
        affinity_loss, noises = module.affinity_loss, iter(torch.from_numpy(d["noise"]))
        patch.setattr(module, "affinity_loss", lambda f, a, b, _, form: affinity_loss(f, a, b, next(noises), form))
    if run == "logo/released":
        depart(patch, module, s)
    if run == "logo/baseline":  # D11: the keys of both views are enqueued

        def both(self, views, *more, forward=module.MoCo.forward):
            loss, keys, *rest = forward(self, views, *more)
            with torch.no_grad():
                return loss, torch.cat([self.key(views[0]), keys]), *rest

        patch.setattr(module.MoCo, "forward", both)
    return losses


def depart(patch, logo, s):
    """Patch logo.py with the released code's D2, D3, D4 and D6."""
    update, forward, project, descend = logo.MoCo.update, logo.MoCo.forward, logo.MoCo.project, logo.descend
    passes, steps = itertools.count(), itertools.count()

    def project_that_moves(self, x):  # D2: the momentum encoder is updated before each of a step's two passes
        if next(passes) % 6 == 0:  # the first two of a step's six projections are of local crops, for the affinity
            update(self, s["momentum"])
        return project(self, x)

    def forward_that_moves(self, *inputs):
        update(self, s["momentum"])
        return forward(self, *inputs)

    def descend_with_decay(optimizer, loss, max_norm=math.inf):
        if max_norm is not math.inf:
            optimizer.param_groups[0]["weight_decay"] = s["weight_decay"]  # D3
            max_norm = max_norm * (next(steps) % s["steps_per_epoch"] > 0)  # D4
        descend(optimizer, loss, max_norm)

    patch.setattr(logo.MoCo, "update", lambda self, m: None)
    patch.setattr(logo.MoCo, "project", project_that_moves)
    patch.setattr(logo.MoCo, "forward", forward_that_moves)
    patch.setattr(logo, "descend", descend_with_decay)
    patch.setattr(torch.Tensor, "roll", lambda x, *_: x.flip(0))  # D6; nothing else is rolled


def load_golden(run):
    """Return a run's settings and measurements, {name: number or array} each."""
    file, run = run.split("/")
    arrays = np.load(ROOT / f"tests/golden/trajectory_{file}.npz")
    d = {name.partition("/")[2]: arrays[name] for name in arrays.files if name.startswith(f"{run}/")}
    s = {name.removeprefix("settings/"): x.tolist() for name, x in d.items() if name.startswith("settings/")}
    return s, d


# These change only by rounding errors, and so do the projector's and predictor's means (golden/README.md)
BY_ROUNDING = ("backbone.norm.bias", "attn.qkv.bias", "projector.1.running_mean", "predictor.1.running_mean")
# Running statistics of batch norm, which do not affect training, come from other passes there (golden/README.md)
OTHER_PASSES = {
    "logo": ("momentum_",), "logo/baseline": ("momentum_", "backbone"), "patchmix": ("momentum_projector",),
    "patchmix/itself": ("projector", "momentum_projector"), "two_processes": ("",),
}  # fmt: skip


def train(out, run, flags):
    """Train with the settings of a run of the authors' code. Return the loss of each step."""
    (s, d), (method, *flags) = load_golden(run), flags.split()
    module = MODULES[method]
    with pytest.MonkeyPatch.context() as patch:
        losses = follow(patch, module, method, run, s, d)
        args = module.parse_args([*flags_of(method, s), *flags, "--out", str(out)])
        module.main(args, train=blank(s["batch_size"] * s["steps_per_epoch"], s["image_size"]))
    return torch.stack(losses)


def check(out, run, losses):
    """Compare a run with the authors'. Print the largest difference, except of what changes only by rounding errors."""
    saved, (_, d) = tiny.load(out / "last.pt"), load_golden(run)
    state = saved["model"] | {f"affinity.{name}": x for name, x in saved.get("affinity", {}).items()}
    if "queue.keys" in state:  # the authors' queues do not have the oldest keys first
        state["queue.keys"] = state["queue.keys"].roll(d["queue_position"].item(), 0)
    truth = torch.from_numpy(d["loss"])
    found = {"loss": ((losses - truth).abs().max() / truth.abs().max(), 1e-9)}  # {what: (difference, its limit)}
    skipped = OTHER_PASSES.get(run, OTHER_PASSES.get(run.split("/")[0], ("nothing",)))
    for name, expected in zip(d["final_names"].tolist(), torch.from_numpy(d["final_probes"]), strict=True):
        if name.startswith(skipped) and "running" in name:
            continue
        if run == "two_processes/logo" and name == "queue.keys":  # a step's keys are in another order
            continue
        limit = 1e-6 if name.endswith(BY_ROUNDING) else 1e-9
        found[name] = ((probe(state[name]) - expected).abs().max() / expected[0].clamp_min(1e-3), limit)
        if f"final/{name}" in d:
            whole = torch.from_numpy(d[f"final/{name}"])
            found[f"{name}, all"] = ((state[name] - whole).abs().max() / whole.abs().max().clamp_min(1e-3), limit)
    print(f"{run}: {max(value for value, limit in found.values() if limit < 1e-6):.1e}")
    assert {name: pair for name, pair in found.items() if not pair[0] <= pair[1]} == {}


@pytest.mark.parametrize("run, flags", slow_but(QUICK, RUNS))
def test_a_training_is_the_authors(run, flags, double, tmp_path):
    check(tmp_path, run, train(tmp_path, run, flags))


def train_as_one_of_two(out, run, flags):
    torch.set_default_dtype(torch.float64)
    torch.save(train(out, run, flags), f"{out}-losses{os.environ['RANK']}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("run, flags", OF_TWO_PROCESSES)
def test_a_training_of_two_processes_is_the_authors(run, flags, double, tmp_path):
    tiny.succeed(tmp_path / "log", train_as_one_of_two, [(tmp_path / "run", run, flags)] * 2)
    losses = [tiny.load(tmp_path / f"run-losses{rank}.pt") for rank in (0, 1)]
    check(tmp_path / "run", run, sum(losses) / 2)
