"""Functions, forward passes, schedules and crops give the numbers of the authors' code, stored in tests/golden.

Everything is computed in float64. A difference is the largest |ours - theirs| divided by the largest |theirs|.
"""

import functools
import math
import types

import numpy as np
import pytest
import torch
from conftest import ROOT, first_call, generator, values
from PIL import Image
from torch import nn
from torchvision.transforms import v2

import jcl
import logo
import moco_jointcrop
import patchmix

EXACT = 1e-13  # golden/README.md states this bound
pytestmark = pytest.mark.usefixtures("double")


def same(ours, theirs, bound=EXACT, scale=None):
    ours, theirs = (torch.as_tensor(x).detach() for x in (ours, theirs))
    assert ours.shape == theirs.shape and (ours.dtype == theirs.dtype or bound == 0)
    assert (ours - theirs).abs().max() <= bound * (scale or theirs.abs().max())


def golden(method):
    """Return the arrays of a method's file, {name: tensor}. Settings are 0-d tensors."""
    arrays = np.load(ROOT / "tests" / "golden" / f"{method}.npz")
    return {name: torch.from_numpy(x) for name, x in arrays.items() if x.dtype.kind in "fi"}


def leaf(x):
    return x.clone().requires_grad_()


def as_images(query, key):
    """Return images (N, 2, 1, C) that the encoders of `replace_encoders` turn into these queries and keys."""
    return torch.stack([query, key], 1)[:, :, None]


def by_view(table, x):
    """Return the embeddings of views from a table {(view, is mixed): embeddings}. Pixel values identify each view."""
    parts = x.chunk(len(x) // len(next(iter(table.values()))))  # all local crops come at once
    return torch.cat([table[int(part.mean()), bool(part.flatten(1).std(1).max() > 1e-9)] for part in parts])


def replace_encoders(model, query=lambda x: x[:, 0].flatten(1), key=lambda x: x[:, 1].flatten(1)):
    """Replace a model's encoders by functions, by default for `as_images`, and its heads by the identity. Return it."""
    model.backbone, model.projector, model.predictor = nn.Identity(), nn.Identity(), nn.Identity()
    model.momentum_backbone, model.momentum_projector = nn.Identity(), nn.Identity()
    model.backbone.forward, model.momentum_backbone.forward = query, key
    return model


def patchmix_forward(query, key, flags):
    """Run PatchMix.forward with these embeddings, {(view, is mixed): (n, dim)}. Return (loss, metrics)."""
    n, args = len(query[0, False]), patchmix.parse_args(flags.split())
    terms, names = patchmix.chosen_terms(args), ("num_mix", "patch_size", "temperature", "smoothing")
    model = patchmix.PatchMix(nn.Identity(), 8, 8, 8, terms=terms, **{name: getattr(args, name) for name in names})
    replace_encoders(model, functools.partial(by_view, query), functools.partial(by_view, key))
    values = [(v + torch.arange(n) / (4 * n)).view(n, 1, 1, 1) for v in range(2 + args.local_crops)]
    views = [value.expand(n, 3, args.image_size, args.image_size) for value in values]
    views[:2] = views[1::-1] if args.variant == "released" else views[:2]
    loss, *_, metrics = model(views)
    return loss, metrics


def queue_model(kind, f, *pairs):
    """Return a model with the queue and the temperature of a golden file."""
    (length, dim), t = f["queue"].shape, f["temperature"].item()
    model = replace_encoders(kind(nn.Identity(), dim, *pairs, dim=dim, queue=length, temperature=t))
    model.queue.keys.copy_(f["queue"].roll(-int(f.get("queue_position", 0)), 0))  # the oldest keys first
    return model


def test_patchmix_mixed_images():
    f = golden("patchmix")
    for case, num_mix in (("m2", 2), ("m3", 3), ("m3_coarse", 3)):
        patch, shuffle = f[f"mix_{case}_patch_size"].item(), f[f"mix_{case}_permutation"]
        same(patchmix.patch_mix(f["mix_images"], num_mix, patch, shuffle), f[f"mix_{case}_images"], bound=0)


def test_patchmix_forward():
    f = golden("patchmix")
    for m in (2, 3):
        for smoothing, kind in ((0.1, "smoothed"), (0.0, "plain")):
            h2, h_mix1 = leaf(f["loss_h2"]), leaf(f["loss_h_mix1"])
            query = {(0, False): h2, (1, True): h_mix1}
            key = {(1, False): f["loss_z1"], (0, False): f["loss_z2"], (0, True): f["loss_z_mix2"]}
            loss, terms = patchmix_forward(query, key, f"--variant released --num-mix {m} --smoothing {smoothing}")
            same(terms["loss_oto"], f[f"loss_oto_{kind}"])
            same(terms["loss_mto"], f[f"loss_mto_m{m}"])
            same(terms["loss_mtm"] / m, f[f"loss_mtm_m{m}"])
            same(loss, f[f"loss_m{m}_{kind}_total"])
            for ours, theirs in zip(torch.autograd.grad(loss, (h2, h_mix1)), ("h2", "h_mix1"), strict=True):
                same(ours, f[f"loss_m{m}_{kind}_grad_{theirs}"])


def test_patchmix_local_crops():
    f = golden("patchmix_multicrop")
    for m in (2, 3):
        crops, mixed, shuffles = (f[f"m{m}_{name}"] for name in ("locals", "locals_mixed", "local_permutations"))
        for x, expected, shuffle in zip(crops, mixed, shuffles, strict=True):
            same(patchmix.patch_mix(x, m, f[f"m{m}_patch_size"].item(), shuffle), expected, bound=0)
        names = ("h2", "h_mix1", "h_local", "h_mix_local")
        h2, h_mix1, h_local, h_mix_local = leaves = [leaf(f[f"loss_{name}"]) for name in names]
        query = {(0, False): h2, (1, True): h_mix1}
        for i in range(8):  # local crops are views 2 to 9
            query |= {(2 + i, False): h_local[i], (2 + i, True): h_mix_local[i]}
        key = {(1, False): f["loss_z1"], (0, False): f["loss_z2"], (0, True): f["loss_z_mix2"]}
        loss, _ = patchmix_forward(query, key, f"--variant released --num-mix {m} --local-crops 8")
        same(loss, f[f"m{m}_total"])
        for gradient, name in zip(torch.autograd.grad(loss, leaves), ("h2", "hm", "hl", "hml"), strict=True):
            same(gradient, f[f"m{m}_grad_{name}"])


def test_patchmix_schedule():
    f = golden("patchmix")
    s = {name.removeprefix("schedule_"): value.tolist() for name, value in f.items() if name.startswith("schedule_")}
    args = types.SimpleNamespace(epochs=s["epochs"], warmup=s["warmup_epochs"], lr=s["base_lr"])
    args.batch_size, args.min_lr = s["batch_size"], s["min_lr"] * 256 / s["batch_size"]
    per_epoch, steps, warm = s["steps_per_epoch"], len(f["schedule_lr"]), args.warmup * s["steps_per_epoch"]
    lr = torch.tensor([patchmix.learning_rate(args, step / per_epoch) for step in range(steps)])
    same(lr[warm:], f["schedule_lr"][warm:])
    same(lr[:warm], f["schedule_lr"][:warm] * (warm - 1) / warm)  # released: i / (W - 1)
    cosines = (s["weight_decay_start_end"], (s["momentum_start"], 1.0))  # test_schedules.py tests them in main
    decay, momentum = torch.tensor([[patchmix.cosine(*x, i / steps) for i in range(steps)] for x in cosines])
    same(decay, f["schedule_weight_decay"])
    same(momentum, f["schedule_momentum_intended"])
    once = momentum.unflatten(0, (-1, per_epoch))[:, 1:2].expand(-1, per_epoch)  # released: the index stays at 1
    same(once.flatten(), f["schedule_momentum_as_released"])


def test_jcl_forward():
    f = golden("jcl")
    keys = f["keys_before_normalisation"].unbind(1)
    assert values(jcl, "--variant released", "num_keys lam") == [len(keys), f["lambda_final"].item()]
    for i, lam in enumerate(f["lam"].tolist()):  # test_trajectories.py tests the ramp itself
        model = queue_model(jcl.JCL, f)
        raw = leaf(f["query_before_normalisation"])
        loss, enqueued, *_ = model([as_images(x, x) for x in (raw, *keys)], lam)
        same(loss, f["loss"][i])
        same(torch.autograd.grad(loss, raw)[0], f["grad_query_before_normalisation"][i])
        same(enqueued, f["enqueued_keys"])
        model.queue.enqueue(enqueued)
        same(model.queue.keys.roll(f["queue_position_after"].item(), 0), f["queue_after"])


def test_logo_affinity_loss_and_dissimilarity():
    f = golden("logo")
    ours = logo.Affinity(f["local1"].shape[1], len(f["affinity.0.bias"]))
    ours.load_state_dict(ours.state_dict() | {f"layers.{n[9:]}": v for n, v in f.items() if n.startswith("affinity.")})
    loss = logo.affinity_loss(ours, f["local1"], f["local2"], f["noise"])
    same(loss, f["affinity_loss_rolled"])
    loss.backward()
    for name, parameter in ours.layers.named_parameters():
        theirs = f[f"grad_affinity_loss_rolled.{name}"]
        before_norm = name in ("0.bias", "3.bias")  # their gradients are 0 except for rounding
        scale = f[f"grad_affinity_loss_rolled.{name.replace('bias', 'weight')}"].abs().max() if before_norm else None
        same(parameter.grad, theirs, scale=scale)
    locals_ = [leaf(f[name]) for name in ("local1", "local2")]
    loss = logo.local_dissimilarity(ours, *locals_)
    same(loss, f["local_dissimilarity"])
    found = torch.autograd.grad(loss, [*locals_, *ours.parameters()], allow_unused=True)
    assert {*found[2:]} == {None}
    for name, gradient in zip(("local1", "local2"), found[:2], strict=True):
        same(gradient, f[f"grad_local_dissimilarity_{name}"])


def test_logo_forward():
    f = golden("logo")
    model = queue_model(logo.MoCo, f, logo.compared_views())
    inputs = {name: leaf(f[f"{name}_before_normalisation"]) for name in ("global1", "global2", "local1", "local2")}
    keys = [f["key_global1"], f["key_global2"], f["local1"], f["local2"]]  # the locals' keys are not used
    loss, enqueued, *_ = model([as_images(x, k) for x, k in zip(inputs.values(), keys, strict=True)])
    same(loss, f["nce_total"])
    for name, gradient in zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True):
        same(gradient, f[f"grad_nce_total_{name}_before_normalisation"])
    model.queue.enqueue(enqueued)
    same(model.queue.keys.roll(len(enqueued), 0), f["queue_after"])


LEAST = {"min020": 0.2, "min008": 0.08}


@pytest.mark.parametrize("name", LEAST)
def test_jointcrop_areas_and_boxes(name, monkeypatch):
    f = golden("jointcrop")
    sizes, draws, areas, boxes = (f[f"{key}_{name}"] for key in ("image_height_width", "draws", "areas", "boxes"))
    uniform = draws[:, :2].tolist()
    ours = torch.tensor([moco_jointcrop.joint_from_uniform(u, v, LEAST[name], 1, 0, offset=0.1) for u, v in uniform])
    same(ours, areas)
    same((ours[:, 1] / ours[:, 0]).log(), f[f"log_ratio_{name}"])

    flags = f"--variant released --crop-scale {LEAST[name]} 1"
    (_, crop, *_), found = first_call("moco_jointcrop.JointViews", moco_jointcrop, flags), []

    def uniform_(x, low, high):  # torchvision draws an area, here from a range of one value, and an aspect ratio
        return x.fill_(low if low == high else low + (high - low) * next(aspects[len(found) % 2]))

    def randint(low, high, size):
        return torch.full(size, low + int((high - low) * next(positions[len(found) % 2])))

    monkeypatch.setattr(torch, "rand", lambda *_, **__: draw[:2])
    monkeypatch.setattr(torch.Tensor, "uniform_", uniform_)
    monkeypatch.setattr(torch, "randint", randint)
    monkeypatch.setattr(v2.functional, "resized_crop", lambda image, *box_and_more: found.append(box_and_more[:4]))
    for (height, width), draw in zip(sizes.tolist(), draws, strict=True):
        aspects, positions = (iter(draw[2:12]), iter(draw[14:24])), (iter(draw[12:14]), iter(draw[24:]))
        crop(Image.new("L", (width, height)))
    same(torch.tensor(found).view(boxes.shape), boxes, bound=0)


@pytest.mark.slow
def test_jointcrop_quantiles():
    """Quantiles match those of the authors' float32 draws within 3 standard errors, which include both samples'."""
    f, worst = golden("jointcrop"), 0.0
    n, p = int(f["quantile_draws"]), f["quantile_probability"].numpy()
    for i, (name, least) in enumerate(LEAST.items()):
        a, b = (x.numpy() for x in moco_jointcrop.sample_joint(n, least, 1.0, 0.0, generator(i), offset=0.1))
        for what, ours in (("log_ratio", np.log(b / a)), ("area1", a), ("area2", b)):
            key = f"quantile_{what}_{name}"
            error = math.sqrt(2) * f[f"{key}_standard_error"].numpy()  # ours has as many draws
            worst = max(worst, (np.abs(np.quantile(ours, p) - f[key].numpy()) / error).max())
    assert worst < 3


@pytest.mark.parametrize("t", ["t020", "t100"])
def test_moco_v3_forward(t):
    """MoCo v3's symmetric loss matches, and so does PatchMix's baseline, which is this loss divided by 2 tau."""
    f = golden("mocov3")
    temperature, q1, q2 = f[f"temperature_{t}"].item(), leaf(f["q1"]), leaf(f["q2"])
    model = replace_encoders(moco_jointcrop.MoCoV3(nn.Identity(), 16, hidden=16, dim=16, temperature=temperature))
    loss, keys, *_ = model([as_images(q1, f["k1"]), as_images(q2, f["k2"])])
    assert keys is None  # nothing is enqueued
    query, key = {(0, False): q1, (1, False): q2}, {(0, False): f["k1"], (1, False): f["k2"]}
    by_patchmix, _ = patchmix_forward(query, key, f"--num-mix 1 --terms oto,mto --temperature {temperature}")
    for value in (loss, 2 * temperature * by_patchmix):
        same(value, f[f"loss_{t}"])
        for name, gradient in zip(("q1", "q2"), torch.autograd.grad(value, (q1, q2)), strict=True):
            same(gradient, f[f"grad_{name}_{t}"])


@pytest.mark.parametrize("suffix, least, most", [("", 1e-7, 1e-5), ("_small_gradients", 1e-3, 2e-2)])
def test_moco_v3_lars_steps(suffix, least, most):
    """LARS updates vectors as the authors' does, and matrices nearly, as timm defines the trust ratio differently."""
    f = golden("mocov3")
    factor, decay = f["lars_small_gradient_factor"].item() if suffix else 1, f["lars_weight_decay"].item()
    matrix, vector = (nn.Parameter(f[f"lars_{name}_before"].clone()) for name in ("matrix", "vector"))
    optimizer = moco_jointcrop.lars(nn.ParameterList([matrix, vector]), decay)
    for step, lr in enumerate(f["lars_lr"].tolist()):
        matrix.grad, vector.grad = (factor * f[f"lars_{name}_gradients"][step] for name in ("matrix", "vector"))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        same(vector, f[f"lars_vector_after{suffix}"][step])
    moved, theirs = (x.detach() - f["lars_matrix_before"] for x in (matrix, f[f"lars_matrix_after{suffix}"][-1]))
    assert least < (moved - theirs).norm() / theirs.norm() < most
