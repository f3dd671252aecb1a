"""jcl.py matches the paper: Eq. 8 with an explicit covariance, the bound of Eq. 5-7, and Eq. 3."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, generator, info_nce, random_views, state_of, unit, values

import jcl


def eq8(q, k, queue, tau, lam):
    """Return the loss of Eq. 8-9, computed image by image, with Sigma as a matrix (Algorithm 1, lines 7-10)."""
    losses = []
    for i in range(len(q)):
        mu, sigma = k[i].mean(0), torch.cov(k[i].T, correction=0)
        positive = q[i] @ mu / tau + lam / (2 * tau**2) * (q[i] @ sigma @ q[i])
        inside = torch.exp(positive) + sum(torch.exp(q[i] @ n / tau) for n in queue)
        losses.append(torch.log(inside) - q[i] @ mu / tau)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("keys", [1, 2, 5])
@pytest.mark.parametrize("tau, lam", [(0.2, 4.0), (0.07, 0.25), (1.0, 10.0), (0.2, 0.0)])
def test_jcl_loss_is_eq8(keys, tau, lam):
    q, k, queue = unit(4, 6, grad=True), unit(4, keys, 6, seed=1), unit(9, 6, seed=2)
    assert_same(jcl.jcl_loss(q, k, queue, tau, lam), eq8(q, k, queue, tau, lam), q)


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.5, 0.0])
def test_bound_on_the_expectation_eq6(spread):
    """With lambda = 1, Eq. 8 is never below Eq. 6 for keys from N(mu, Sigma), and equals it if all keys are equal."""
    g = generator()
    q, queue = unit(1, 6), unit(9, 6, seed=10)
    k = F.normalize(unit(1, 1, 6, seed=20) + spread * torch.randn(1, 5, 6, dtype=torch.float64, generator=g), dim=-1)
    mu, centered = k[0].mean(0), k[0] - k[0].mean(0)
    noise = torch.randn(400_000, 5, dtype=torch.float64, generator=g) @ centered / 5**0.5  # its covariance is Sigma
    positive = (mu + noise) @ q[0] / 0.2
    samples = torch.logaddexp(positive, torch.logsumexp(queue @ q[0] / 0.2, 0)) - positive
    bound, error = jcl.jcl_loss(q, k, queue, 0.2, 1.0), 4 * samples.std() / len(samples) ** 0.5
    assert bound >= samples.mean() - error - 1e-12
    if spread == 0:
        torch.testing.assert_close(bound, samples.mean())


@pytest.mark.parametrize("flags", ["", "--vanilla"])
def test_forward_is_eq8_or_eq3(flags):
    """The loss is Eq. 8 with the keys from ShuffleBN. With --vanilla it is Eq. 3, the average of Eq. 2 over keys."""
    model = state_of(jcl, f"{flags} --arch resnet_micro --batch-size 8 --num-keys 3 --bn-groups 2")["model"].double()
    x, queue, tau = random_views(4, 8, size=32), model.queue.keys, 0.2
    torch.manual_seed(1)
    loss, mean_keys, q, metrics = model(x, 4.0)
    torch.manual_seed(1)
    keys, query = jcl.encode_shuffled_keys(model.key, x[1:]), model.query(x[0])
    losses = [info_nce(query, key, queue, tau) for key in keys]
    expected = sum(losses) / 3 if flags else eq8(query, keys.transpose(0, 1), queue, tau, 4.0)
    assert_same(loss, expected, *model.projector.parameters())
    torch.testing.assert_close(torch.cat([query[None], keys]).norm(dim=2), torch.ones(4, 8, dtype=torch.float64))
    found = q, mean_keys, metrics["key_variance"]
    torch.testing.assert_close(found, (query, keys.mean(0), keys.var(0, correction=0).mean()))


def test_recipes():
    names = "num_keys lam lam_schedule temperature batch_size queue"
    assert values(jcl, "--dataset imagenet", names) == [5, 4.0, "constant", 0.2, 512, 65536]
    assert values(jcl, "--dataset imagenet --variant released", names) == [4, 2.0, "ramp", 0.2, 256, 65536]
    assert values(jcl, "--dataset imagenet100", "arch epochs batch_size") == ["resnet18", 100, 128]
