"""jcl.py against the paper: Eq. 8 with an explicit covariance, the bound of Eq. 5-7, its limits, and the forward pass."""

import math

import pytest
import torch
import torch.nn.functional as F

import common
import jcl


def unit(*shape, seed=0, grad=False):
    x = F.normalize(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=-1)
    return x.requires_grad_(grad)


def eq8(q, k, queue, tau, lam):
    """Eq. 8-9 image by image, Sigma as a matrix (Algorithm 1, lines 7-10)."""
    losses = []
    for i in range(len(q)):
        mu = sum(k[i]) / len(k[i])
        centred = [key - mu for key in k[i]]
        sigma = sum(torch.outer(c, c) for c in centred) / len(k[i])
        positive = q[i] @ mu / tau + lam / (2 * tau**2) * (q[i] @ sigma @ q[i])
        inside = torch.exp(positive) + sum(torch.exp(q[i] @ n / tau) for n in queue)
        losses.append(torch.log(inside) - q[i] @ mu / tau)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("keys", [1, 2, 5])
@pytest.mark.parametrize("tau, lam", [(0.2, 4.0), (0.07, 0.25), (1.0, 10.0), (0.2, 0.0)])
def test_jcl_loss_eq8(keys, tau, lam):
    q, k, queue = unit(4, 6, grad=True), unit(4, keys, 6, seed=1), unit(9, 6, seed=2)
    ours, reference = jcl.jcl_loss(q, k, queue, tau, lam), eq8(q, k, queue, tau, lam)
    torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(*(torch.autograd.grad(loss, q)[0] for loss in (ours, reference)))


def test_limits():
    q, k, queue = unit(4, 6), unit(4, 5, 6, seed=1), unit(9, 6, seed=2)
    one = k[:, :1]
    for lam in (0.0, 4.0):  # one key has no variance
        torch.testing.assert_close(jcl.jcl_loss(q, one, queue, 0.2, lam), jcl.info_nce(q, one[:, 0], queue, 0.2))
    same = one.expand(-1, 5, -1)
    torch.testing.assert_close(jcl.jcl_loss(q, same, queue, 0.2, 4.0), jcl.info_nce(q, one[:, 0], queue, 0.2))
    torch.testing.assert_close(jcl.jcl_loss(q, k, queue, 0.2, 0.0), jcl.info_nce(q, k.mean(1), queue, 0.2))  # MoCo on the mean
    losses = [jcl.jcl_loss(q, k, queue, 0.2, lam).item() for lam in (0.0, 1.0, 4.0, 10.0)]
    assert losses == sorted(losses) and losses[0] < losses[-1]


def test_bound_on_the_expectation_eq6():
    """At lambda = 1 Eq. 8 is never below Eq. 6 with keys from N(mu, Sigma), not normalised, and meets it for equal keys."""
    generator = torch.Generator().manual_seed(0)
    for seed, spread in ((0, 0.05), (1, 0.2), (2, 0.5), (3, 0.0)):
        q, queue = unit(1, 6, seed=seed), unit(9, 6, seed=seed + 10)
        k = F.normalize(
            unit(1, 1, 6, seed=seed + 20) + spread * torch.randn(1, 5, 6, dtype=torch.float64, generator=generator), dim=-1
        )
        mu, centred = k[0].mean(0), k[0] - k[0].mean(0)
        noise = torch.randn(400_000, 5, dtype=torch.float64, generator=generator) @ centred / math.sqrt(5)  # covariance Sigma
        positive = (mu + noise) @ q[0] / 0.2
        negative = torch.logsumexp(queue @ q[0] / 0.2, 0)
        samples = torch.logaddexp(positive, negative) - positive
        bound, error = jcl.jcl_loss(q, k, queue, 0.2, 1.0), 4 * samples.std() / math.sqrt(len(samples))
        assert bound >= samples.mean() - error
        if spread == 0:
            torch.testing.assert_close(bound, samples.mean())


def tiny(flags=()):
    args = jcl.parse_args(["--arch", "resnet_micro", "--batch-size", "8", "--queue", "32", "--device", "cpu", *flags])
    jcl.init_distributed(args)
    args.steps = 10
    info = common.backbone_info(args.arch, args.image_size, args.patch_size, args.norm, method="m", encoder="query")
    torch.manual_seed(0)
    return args, jcl.JCL(args, info).double()


def test_forward_enqueues_the_mean_and_keeps_keys_constant():
    _, model = tiny(["--num-keys", "3"])
    x = torch.randn(4, 8, 3, 32, 32, dtype=torch.float64)
    loss, metrics = model(list(x), 0)
    loss.backward()
    assert all((p.grad is None) == n.startswith("momentum") for n, p in model.named_parameters())
    keys = model.new_keys
    assert keys.shape == (8, model.args.dim) and (keys.norm(dim=1) < 1).all()
    model.enqueue()
    torch.testing.assert_close(model.queue.keys[:8], keys)


def test_one_key_is_moco_v2_exactly():
    import moco_jointcrop

    flags = ["--arch", "resnet_micro", "--batch-size", "8", "--queue", "32", "--device", "cpu"]
    args = moco_jointcrop.parse_args([*flags, "--joint", "none"])
    moco_jointcrop.init_distributed(args)
    info = common.backbone_info(args.arch, args.image_size, args.patch_size, args.norm, method="m", encoder="query")
    moco = moco_jointcrop.MoCo(args, info).double()
    _, ours = tiny(["--num-keys", "1"])
    ours.load_state_dict(moco.state_dict())
    x = list(torch.randn(2, 8, 3, 32, 32, dtype=torch.float64))
    for step in range(2):
        (a, _), (b, _) = moco(x, step), ours(x, step)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        moco.enqueue()
        ours.enqueue()
    torch.testing.assert_close(moco.queue.keys, ours.queue.keys)


def test_vanilla_is_the_average_of_eq2():
    _, model = tiny(["--num-keys", "3", "--vanilla"])
    x = list(torch.randn(4, 8, 3, 32, 32, dtype=torch.float64))
    loss, metrics = model(x, 0)
    keys = jcl.encode_keys(model.key, x[1:], common.generator(0, 0, 20))
    losses = [jcl.info_nce(metrics["q"], key, model.queue.keys, 0.2) for key in keys]
    torch.testing.assert_close(loss, sum(losses) / 3)


def test_lambda_schedule_and_recipes():
    args, model = tiny(["--lam-schedule", "ramp", "--lam", "2", "--epochs", "4"])
    assert [model.lam(step) for step in (0, 9, 10, 39)] == [0.5, 0.5, 1.0, 2.0]  # 10 steps an epoch
    paper = jcl.parse_args(["--dataset", "imagenet"])
    assert (paper.num_keys, paper.temperature, paper.lam, paper.batch_size, paper.lr, paper.queue) == (
        5,
        0.2,
        4.0,
        512,
        0.06,
        65536,
    )
    released = jcl.parse_args(["--dataset", "imagenet", "--variant", "released"])
    assert (released.num_keys, released.lam, released.lam_schedule, released.batch_size, released.lr) == (
        4,
        2.0,
        "ramp",
        256,
        0.03,
    )
    ablation = jcl.parse_args(["--dataset", "imagenet100"])
    assert (ablation.arch, ablation.epochs, ablation.batch_size, ablation.lr) == ("resnet18", 100, 128, 0.1)
