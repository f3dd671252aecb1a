"""jcl.py against the paper: Eq. 8 with an explicit covariance, the bound of Eq. 5-7, its limits, the forward pass."""

import math

import pytest
import torch
import torch.nn.functional as F

import common
import jcl
import moco_jointcrop


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
    on_the_mean = jcl.info_nce(q, k.mean(1), queue, 0.2)
    torch.testing.assert_close(jcl.jcl_loss(q, k, queue, 0.2, 0.0), on_the_mean)
    losses = [jcl.jcl_loss(q, k, queue, 0.2, lam).item() for lam in (0.0, 1.0, 4.0, 10.0)]
    assert losses == sorted(losses) and losses[0] < losses[-1]


def test_bound_on_the_expectation_eq6():
    """At lambda = 1 Eq. 8 is never below Eq. 6 with keys from N(mu, Sigma), and meets it for equal keys."""
    generator = torch.Generator().manual_seed(0)
    for seed, spread in ((0, 0.05), (1, 0.2), (2, 0.5), (3, 0.0)):
        q, queue = unit(1, 6, seed=seed), unit(9, 6, seed=seed + 10)
        k = F.normalize(
            unit(1, 1, 6, seed=seed + 20) + spread * torch.randn(1, 5, 6, dtype=torch.float64, generator=generator),
            dim=-1,
        )
        mu, centred = k[0].mean(0), k[0] - k[0].mean(0)
        noise = torch.randn(400_000, 5, dtype=torch.float64, generator=generator) @ centred / math.sqrt(5)  # Sigma
        positive = (mu + noise) @ q[0] / 0.2
        negative = torch.logsumexp(queue @ q[0] / 0.2, 0)
        samples = torch.logaddexp(positive, negative) - positive
        bound, error = jcl.jcl_loss(q, k, queue, 0.2, 1.0), 4 * samples.std() / math.sqrt(len(samples))
        assert bound >= samples.mean() - error
        if spread == 0:
            torch.testing.assert_close(bound, samples.mean())


def test_what_cannot_be_right_raises():
    q, k, queue = unit(4, 6), unit(4, 5, 6, seed=1), unit(9, 6, seed=2)
    for wrong in (
        (q, k[:, 0], queue),
        (q, k[:3], queue),
        (q, k[..., :5], queue),
        (q, k, queue[:, :5]),
        (q[0], k, queue),
    ):
        with pytest.raises(ValueError, match="jcl_loss takes"):
            jcl.jcl_loss(*wrong, 0.2, 4.0)


def tiny(module, name, *flags):
    flags = ["--arch", "resnet_micro", "--batch-size", "8", "--queue", "32", "--device", "cpu", *flags]
    args = module.parse_args(flags)
    args.bf16 = False
    torch.manual_seed(0)
    return module.split_batch_norms(getattr(module, name)(args), args.bn_groups).double()


def test_forward_gives_the_mean_key_and_keeps_keys_constant():
    model = tiny(jcl, "JCL", "--num-keys", "3")
    x = list(torch.randn(4, 8, 3, 32, 32, dtype=torch.float64))
    loss, mean_keys, metrics = model(x, 0, 4.0)
    loss.backward()
    assert all((p.grad is None) == n.startswith("momentum") for n, p in model.named_parameters())
    keys = jcl.encode_keys(model.key, x[1:], common.generator(0, 0, jcl.STREAM_SHUFFLE))
    torch.testing.assert_close(mean_keys, keys.mean(0))
    expected = jcl.jcl_loss(metrics["q"], keys.transpose(0, 1), model.queue.keys, 0.2, 4.0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["key_variance"], keys.var(0, correction=0).mean())


def test_update_moves_the_momentum_encoder():
    model = tiny(jcl, "JCL")
    before = [p.clone() for p in model.momentum_projector.parameters()]
    with torch.no_grad():
        for p in model.projector.parameters():
            p.add_(1)
    model.update(0.75)
    for now, then in zip(model.momentum_projector.parameters(), before, strict=True):
        torch.testing.assert_close(now, then + 0.25)


def test_one_key_is_moco_v2_exactly():
    moco, ours = tiny(moco_jointcrop, "MoCo", "--joint", "none"), tiny(jcl, "JCL", "--num-keys", "1")
    x = list(torch.randn(2, 8, 3, 32, 32, dtype=torch.float64))
    (a, moco_keys, _), (b, mean_keys, _) = moco(x, 0), ours(x, 0, 4.0)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    assert torch.equal(moco_keys, mean_keys)


def test_vanilla_is_the_average_of_eq2():
    model = tiny(jcl, "JCL", "--num-keys", "3", "--vanilla")
    x = list(torch.randn(4, 8, 3, 32, 32, dtype=torch.float64))
    loss, _, metrics = model(x, 0, 4.0)
    keys = jcl.encode_keys(model.key, x[1:], common.generator(0, 0, jcl.STREAM_SHUFFLE))
    losses = [jcl.info_nce(metrics["q"], key, model.queue.keys, 0.2) for key in keys]
    torch.testing.assert_close(loss, sum(losses) / 3)


def values(args, names):
    return [getattr(args, name) for name in names.split()]


def test_lambda_schedule_and_recipes():
    args = jcl.parse_args(["--lam-schedule", "ramp", "--lam", "2", "--epochs", "4"])
    assert [jcl.scheduled_lam(args, epoch) for epoch in range(4)] == [0.5, 1.0, 1.5, 2.0]
    paper = jcl.parse_args(["--dataset", "imagenet"])
    assert jcl.scheduled_lam(paper, 0) == 4.0
    assert values(paper, "num_keys temperature lam batch_size lr queue") == [5, 0.2, 4.0, 512, 0.06, 65536]
    released = jcl.parse_args(["--dataset", "imagenet", "--variant", "released"])
    assert values(released, "num_keys lam lam_schedule batch_size lr") == [4, 2.0, "ramp", 256, 0.03]
    ablation = jcl.parse_args(["--dataset", "imagenet100"])
    assert values(ablation, "arch epochs batch_size lr") == ["resnet18", 100, 128, 0.1]
