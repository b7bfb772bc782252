"""Gradients through the steps of whole populations: a gradient around the `vmap`, not within it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim


def layer_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2))


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def instance_normed() -> nn.Module:
    norm = nn.InstanceNorm1d(2, affine=True)
    return nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), norm, nn.Tanh(), nn.Flatten(), nn.Linear(6, 2))


def group_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 2))


BATCH = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 2


def make_state(make: Callable[[], nn.Module], seed: int) -> State:
    torch.manual_seed(seed)
    net = make().double()
    optimizer = optim.sgd(pc.hparam("lr", 0.1))
    return State.create(net, loss=losses.cross_entropy, optimizer=optimizer, key=seed, duration="9ba")


def loss_after(states: State, run: Callable[[State], State], rate: Tensor) -> Tensor:
    states = states.replace(hparams={"lr": rate.expand(states.key.shape[:-1])})
    for _ in range(3):
        states = run(states)
    assert states.loss is not None
    return states.loss.sum()


@pytest.mark.parametrize("make", [layer_normed, batch_normed, instance_normed, group_normed])
def test_the_gradient_around_a_population_is_the_sum_of_its_members(make: Callable[[], nn.Module]) -> None:
    """Taken so, the second derivative of torch's fused norms is wrong without a warning."""
    step, states = compose(loop_events), [make_state(make, seed) for seed in range(3)]
    many, rate = pc.population(step, 3), torch.tensor(0.1, dtype=torch.float64)
    together = torch.func.grad(lambda rate: loss_after(pc.stack_states(states), lambda s: many(s, BATCH), rate))(rate)
    alone = [torch.func.grad(lambda rate, s=s: loss_after(s, lambda s: step(s, BATCH), rate))(rate) for s in states]
    torch.testing.assert_close(together, torch.stack(alone).sum(), rtol=1e-9, atol=0)
    nearby = [loss_after(pc.stack_states(states), lambda s: many(s, BATCH), rate + d) for d in (1e-6, -1e-6)]
    torch.testing.assert_close(together, (nearby[0] - nearby[1]) / 2e-6, rtol=1e-5, atol=1e-9)


def test_leaves_around_a_population_have_exact_first_and_second_derivatives() -> None:
    step, states = compose(loop_events), [make_state(layer_normed, seed) for seed in range(2)]
    many, rate = pc.population(step, 2), torch.tensor(0.1, dtype=torch.float64)

    def slope(rate: Tensor) -> Tensor:
        loss = loss_after(pc.stack_states(states), lambda s: many(s, BATCH), rate)
        return torch.autograd.grad(loss, rate, create_graph=True)[0]

    found = torch.autograd.grad(slope(leaf := rate.clone().requires_grad_()), leaf)[0]
    nearby = [slope((rate + d).requires_grad_()).detach() for d in (1e-6, -1e-6)]
    torch.testing.assert_close(found, (nearby[0] - nearby[1]) / 2e-6, rtol=1e-5, atol=1e-9)
