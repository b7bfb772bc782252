"""Lookahead against a manual loop; its interval, its slot, and tensors that it does not change."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose import State, algorithms as alg, compose, loop_events, optim, schedule, tree
from purecompose.algorithms._around_updates import lookahead, pull_back
from purecompose.algorithms._batch_sizes import gradient_accumulation
from purecompose.surgery.weights import averages_in
from purecompose.time.predicates import NEVER
from tests.algorithms import method_helpers as helpers


BATCHES = [helpers.make_batch(num=num) for num in (10, 7, 9, 8, 10, 6, 11)]


def wide_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def wide(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].double(), batch[1]


def started(step, state: State, optimizer=None) -> State:
    optimizer = optimizer or optim.sgd(0.3, momentum=0.9)
    return step.init(state.replace(optimizer=optimizer, opt_state=optimizer.init(state.params)))


def slow_of(state: State) -> dict[str, Tensor]:
    return state.slots["lookahead"]


@pytest.mark.parametrize(
    ("mine", "torchs", "settings"),
    [
        (optim.sgd(0.2, momentum=0.9), torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}),
        (optim.adam(0.02), torch.optim.Adam, {"lr": 0.02}),
    ],
    ids=["sgd", "adam"],
)
@pytest.mark.parametrize(("alpha", "every"), [(0.5, 3), (0.8, 1), (0.0, 2)])
def test_it_equals_a_manual_loop_around_torchs_optimizer(mine, torchs, settings, alpha, every):
    """The optimizer state is not changed by a synchronisation."""
    net, step = wide_net(), compose(loop_events, [lookahead(alpha, every)])
    state, optimizer = started(step, helpers.make_state(net), mine), torchs(net.parameters(), **settings)
    slow = [param.detach().clone() for param in net.parameters()]
    for number, batch in enumerate(map(wide, BATCHES), start=1):
        optimizer.zero_grad()
        F.cross_entropy(net(batch[0]), batch[1]).backward()
        optimizer.step()
        if number % every == 0:
            for low, param in zip(slow, net.parameters(), strict=True):
                low += alpha * (param.detach() - low)
                param.data.copy_(low)
        state = step(state, batch)
        for low, (name, param) in zip(slow, net.named_parameters(), strict=True):
            torch.testing.assert_close(state.params[name], param.detach(), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(slow_of(state)[name], low, rtol=1e-10, atol=1e-12)


def test_alpha_0_undoes_all_training_and_alpha_1_never_matches():
    step = compose(loop_events, [lookahead(0.0, 1)])
    start = started(step, helpers.make_state())
    assert tree.equal(step(step(start, BATCHES[0]), BATCHES[1]).params, start.params)
    assert lookahead(1).match == lookahead(1.0, 7).match == NEVER


def test_the_points_between_are_exact_at_both_ends():
    slow = {"w": torch.tensor([0.1, -3.7e7]), "b": torch.tensor(1e-30)}
    fast = {"w": torch.tensor([3e-8, 0.3]), "b": torch.tensor(7.0), "other": torch.ones(1)}
    assert tree.equal(pull_back(slow, fast, 0.0), slow)
    assert tree.equal(pull_back(slow, fast, 1.0), {name: fast[name] for name in slow})
    torch.testing.assert_close(pull_back(slow, fast, torch.tensor(0.25))["b"], torch.tensor(1.75))
    with pytest.raises(KeyError, match="v"):
        pull_back({"v": torch.ones(1)}, fast, 0.5)


@pytest.mark.parametrize("average", [alg.ema(smoothing=0.0, name="mean"), alg.swa(0.0, 1.0, "1ba", name="mean")])
@pytest.mark.parametrize("turn", [1, -1])
def test_averages_see_the_weights_after_synchronisation(average, turn):
    step = compose(loop_events, [average, lookahead(0.0, 1)][::turn])
    state = started(step, helpers.make_state())
    for batch in BATCHES[:2]:
        state = step(state, batch)
    found = averages_in(state, "mean").params
    assert all(torch.equal(value, state.params[key]) for key, value in found.items())


def test_it_counts_batches_where_updates_are_fewer():
    """With an update every two batches and a synchronisation every four, it follows every second update."""
    both = [gradient_accumulation(2), lookahead(0.5, 4)]
    step, once = compose(loop_events, both), compose(loop_events, [lookahead(0.5, 2)])
    state = started(step, helpers.make_state(wide_net()))
    other = started(once, helpers.make_state(wide_net()))
    pairs = [(wide(helpers.make_batch(num=12)), seed) for seed in range(4)]
    for (inputs, targets), seed in pairs:
        inputs = inputs + seed
        other = once(other, (inputs, targets))
        for part in zip(inputs.split(6), targets.split(6), strict=True):
            state = step(state, part)
    for name, param in other.params.items():
        torch.testing.assert_close(state.params[name], param, rtol=1e-9, atol=1e-12)


def test_slow_weights_of_a_parameter_frozen_since_init_follow_it():
    step = compose(loop_events, [lookahead(0.5, 2)])
    start = started(step, helpers.make_state())
    trained = step(start, BATCHES[0])
    state = step(trained.replace(frozen={"0.weight"}), BATCHES[1])
    weight = trained.params["0.weight"]
    assert not torch.equal(weight, start.params["0.weight"])
    assert torch.equal(state.params["0.weight"], weight) and torch.equal(slow_of(state)["0.weight"], weight)
    assert slow_of(state).keys() == slow_of(start).keys()


def test_a_share_of_slow_weights_that_grows_and_a_triangle_of_rates_are_those_of_a_plain_program():
    """The program of airbench: rates by interpolation at the step before, the decay at the step after the update."""
    triangle = schedule.sequence([schedule.linear(0.2, 1.0), schedule.linear(1.0, 0.07)], ["0.25dur"])
    alpha = schedule.scheduled(lambda now: 1 - 0.95**5 * (now.elapsed() or 0.0) ** 3)
    net, total = wide_net(), 20
    step = compose(loop_events, [lookahead(alpha, every=5)])
    state = started(step, helpers.make_state(net, duration="20ba"), optim.sgd(0.3 * triangle, momentum=0.85))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.85)
    slow, rates = [param.detach().clone() for param in net.parameters()], []
    for number in range(total):
        rates.append(0.2 + 0.8 * number / 5 if number < 5 else 1.0 - 0.93 * (number - 5) / 15)
        optimizer.param_groups[0]["lr"] = 0.3 * rates[-1]
        batch = wide(BATCHES[number % len(BATCHES)])
        optimizer.zero_grad()
        F.cross_entropy(net(batch[0]), batch[1]).backward()
        optimizer.step()
        if (number + 1) % 5 == 0:
            for low, param in zip(slow, net.parameters(), strict=True):
                low.lerp_(param.detach(), 1 - 0.95**5 * ((number + 1) / total) ** 3)
                param.data.copy_(low)
        state = step(state, batch)
        for name, param in net.named_parameters():
            torch.testing.assert_close(state.params[name], param.detach())
    assert (rates[0], rates[5]) == (0.2, 1.0)
    assert triangle(state.timestamp) == pytest.approx(0.07)
