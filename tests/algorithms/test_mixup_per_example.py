"""MixUp with a share for each example; one share a batch is in test_mixup.py."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from scipy import stats

from purecompose import random
from purecompose.algorithms._mixup import mixup, mixup_batch
from purecompose.core.compose import compose
from purecompose.core.loop import loop_events
from purecompose.random import Rng
from purecompose.surgery.weights import to_module
from tests.algorithms.method_helpers import LR, make_batch, make_state


SEEDS = st.integers(0, 2**64 - 1)


def drawn(rng, alpha, num):
    """Return the shares and the order, drawn under the documented names."""
    z = random.beta(rng.named("mixing").per_example(torch.arange(num)), alpha, alpha, (num,))
    return torch.minimum(z, 1 - z), random.permutation(rng.named("permutation"), num)


@given(SEEDS, st.integers(2, 9), st.sampled_from([(), (3,), (2, 3, 1)]), st.floats(0.05, 4))
def test_each_row_has_its_own_share(seed, num, rest, alpha):
    inputs = torch.randn(num, *rest, generator=torch.Generator().manual_seed(seed % 2**32))
    targets = torch.arange(num) % 3
    mixed, mixture = mixup_batch(random.key(seed), inputs, targets, alpha=alpha, per_example=True)
    shares, order = drawn(Rng(random.key(seed)), alpha, num)
    assert torch.equal(mixture.weights[1], shares) and torch.equal(mixture.targets[1], targets[order])
    assert ((0 <= shares) & (shares <= 0.5)).all()
    for i, (share, partner) in enumerate(zip(shares.tolist(), order.tolist(), strict=True)):
        torch.testing.assert_close(mixed[i], (1 - share) * inputs[i] + share * inputs[partner])
    soft = mixture.soft(torch.zeros(num, 3))
    assert (soft >= 0).all()
    torch.testing.assert_close(soft.sum(1), torch.ones(num))


@given(SEEDS)
def test_a_longer_batch_begins_with_the_same_shares(seed):
    shares = [
        mixup_batch(random.key(seed), torch.zeros(num, 1), torch.arange(num), per_example=True)[1].weights[1]
        for num in (3, 7)
    ]
    assert torch.equal(shares[0], shares[1][:3])


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_follow_the_smaller_part_of_a_beta_variable(alpha):
    _, mixture = mixup_batch(random.key(5), torch.zeros(600, 1), torch.arange(600), alpha=alpha, per_example=True)
    result = stats.kstest(mixture.weights[1].double().numpy(), lambda x: 2 * stats.beta.cdf(x, alpha, alpha))
    assert result.pvalue > 0.01


@given(
    st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]),
)
def test_given_shares_are_taken(shares, dtype):
    inputs, order = torch.tensor([[0.0], [40.0], [80.0], [200.0]]).to(dtype), torch.tensor([1, 2, 3, 0])
    mixed, mixture = mixup_batch(None, inputs, torch.arange(4), mixing=torch.tensor(shares), indices=order)
    expected = [(1 - t) * a + t * b for t, a, b in zip(shares, [0, 40, 80, 200], [40, 80, 200, 0], strict=True)]
    rounded = torch.tensor(expected)[:, None].to(mixed.dtype)
    torch.testing.assert_close(mixed, rounded, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-4)
    assert mixed.dtype is (dtype if dtype.is_floating_point else torch.float32)
    assert torch.equal(mixture.weights[1], torch.tensor(shares))


@pytest.mark.parametrize("kind", ["index", "soft"])
@given(seed=SEEDS, interpolate_loss=st.booleans(), microbatches=st.sampled_from([1, 3, 10]))
def test_a_step_is_the_closed_form(kind, seed, interpolate_loss, microbatches):
    step = compose(
        loop_events, [mixup(0.4, interpolate_loss=interpolate_loss, per_example=True)], microbatches=microbatches
    )
    (inputs, targets), state = make_batch(kind), step.init(make_state().replace(key=random.key(seed)))
    shares, order = drawn(state.rng("mixup"), 0.4, 10)
    share = shares[:, None]
    soft = targets if kind == "soft" else F.one_hot(targets, 4).float()
    soft = (1 - share) * soft + share * soft[order]
    net = to_module(state)
    loss = -(soft * torch.log_softmax(net((1 - share) * inputs + share * inputs[order]), 1)).sum(1).mean()
    grads = torch.autograd.grad(loss, list(net.parameters()))
    after = step(state, (inputs, targets))
    torch.testing.assert_close(after.loss, loss.detach())
    for (name, param), grad in zip(net.named_parameters(), grads, strict=True):
        torch.testing.assert_close(after.params[name], (param - LR * grad).detach())
