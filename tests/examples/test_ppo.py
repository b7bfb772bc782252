"""PPO: the example's step against a plain loop, with the same draws in the rollouts."""

import types

import torch
from torch import Tensor

import purecompose as pc
from examples import ppo


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    _, start, _ = ppo.make(dtype)  # gives the draws, and the initial weights
    net, carts = pc.to_module(start), ppo.Carts(dtype)
    policy, optimizer = torch.no_grad()(net), torch.optim.Adam(net.parameters(), lr=0.01)
    for i in range(num_batches):
        rng = start.replace(timestamp=start.timestamp.replace(batch=i)).rng
        places, *targets = carts(types.SimpleNamespace(forward=policy, rng=rng))
        for _ in range(8):
            optimizer.zero_grad()
            ppo.ppo_loss(net(places), targets)[0].backward()
            optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_ppo_equals_a_plain_loop():
    step, start, batches = ppo.make(torch.float64)
    trained = pc.fit(step, start, batches, duration="5ba")
    torch.testing.assert_close(trained.params, plain_loop(5), rtol=1e-9, atol=1e-9)


def test_advantages_are_discounted_sums_of_the_errors_of_the_values():
    """The definition of GAE: sum over l of (0.99 * 0.95)^l of the error at t + l, up to the end of the episode."""
    _, state, _ = ppo.make(torch.float64)
    carts = ppo.Carts(torch.float64)
    places, _, _, scaled, returns = carts(state)
    values = torch.cat([ppo.split(state.forward(places))[1], ppo.split(state.forward(carts.places))[1]]).view(65, 16)
    # A cart that falls begins again near the middle, which no cart reaches from the edge in one step of 0.02 s.
    following = torch.cat([places.view(64, 16, 4)[1:], carts.places[None]])
    ends = (following - places.view(64, 16, 4))[..., 2].abs() > 0.1
    assert ends.any()
    for cart in range(16):
        for t in range(64):
            total, weight = 0.0, 1.0
            for now in range(t, 64):
                error = 1 + (0.0 if ends[now, cart] else 0.99 * values[now + 1, cart]) - values[now, cart]
                total, weight = total + weight * error, weight * 0.99 * 0.95
                if ends[now, cart]:
                    break
            torch.testing.assert_close(returns.view(64, 16)[t, cart], values[t, cart] + total)
    torch.testing.assert_close(scaled.mean() + 1, torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(scaled.std(), torch.ones((), dtype=torch.float64))
