"""Decoupled weight decay as a method: same numbers as decoupled optimizers, any optimizer, no unrequested decay."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, optim, schedule
from purecompose.algorithms._optimizer_settings import decoupled_weight_decay
from purecompose.optim.wrapping import Decaying, DecayRule, Guarded
from tests.algorithms.averaging_checks import BATCHES, cnn_state, states_after
from tests.helpers import assert_close, assert_same, make_state


CURVE = schedule.cosine(warmup="2ba")
GROUPS = {"*.bias": {"lr": 0.03 * schedule.linear()}}
PAIRS = {
    "sgd": (
        optim.sgd(0.1 * CURVE, momentum=0.9, nesterov=True, groups=GROUPS),
        optim.decoupled_sgdw(0.1 * CURVE, momentum=0.9, nesterov=True, weight_decay=0.01, groups=GROUPS),
    ),
    "adam": (
        optim.adam(0.02 * CURVE, betas=(0.9, 0.95), amsgrad=True),
        optim.decoupled_adamw(0.02 * CURVE, betas=(0.9, 0.95), amsgrad=True, weight_decay=0.01),
    ),
    "constant": (optim.sgd(0.1), optim.decoupled_sgdw(0.1, weight_decay=0.01)),
}


def after(method: Any, optimizer: Any, **options: Any) -> State:
    return states_after(method, cnn_state(optimizer=optimizer, **options), BATCHES)[-1]


@pytest.mark.parametrize("pair", PAIRS)
def test_it_is_the_decoupled_optimizer(pair: str) -> None:
    plain, decoupled = PAIRS[pair]
    ours, theirs = after(decoupled_weight_decay(0.01), plain), after([], decoupled)
    assert_same(ours.params, theirs.params)
    assert_same(ours.opt_state, theirs.opt_state)


def test_weights_without_a_gradient_of_the_loss_only_shrink_by_the_factor() -> None:
    zero = {"w": torch.zeros(3, dtype=torch.float64)}
    params: dict[str, Tensor] = {"w": torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)}
    for share, lr in [(1.0, 0.1), (0.5, 0.1), (1.0, 0.0)]:
        optimizer = Decaying(optim.adam(lr * CURVE), (DecayRule("any", 0.01),))
        values = {CURVE: share, lr * CURVE: lr * share}
        moved, _ = optimizer.update(zero, optimizer.init(params), params, values.__getitem__)
        torch.testing.assert_close(moved["w"], params["w"] * (1 - 0.01 * share), rtol=1e-15, atol=0)


def test_another_learning_rate_decays_alike_and_another_schedule_does_not() -> None:
    def norm(lr: float, curve: schedule.Schedule) -> float:
        state = cnn_state(optimizer=optim.sgd(lr * curve))
        states = states_after([alg.gradient_clipping("value", 1e-30), decoupled_weight_decay(0.1)], state, BATCHES)
        return float(pc.tree.global_norm(states[-1].params))

    assert norm(0.1, CURVE) == norm(0.7, CURVE) != norm(0.1, schedule.linear())


@pytest.mark.parametrize("optimizer", [optim.lion(0.01), optim.rmsprop(0.01), optim.from_torch(torch.optim.Adamax)])
def test_it_works_with_optimizers_that_have_no_decoupled_decay(optimizer: Any) -> None:
    state = cnn_state(optimizer=optimizer)
    start = compose(loop_events, [decoupled_weight_decay(0.002)]).init(state)
    params = {name: value - 0.002 * value for name, value in start.params.items()}
    grads = {name: torch.ones_like(value) for name, value in params.items()}
    ours, _ = start.optimizer.update(grads, start.opt_state, start.params)
    theirs, _ = optimizer.update(grads, state.opt_state, params)
    assert_close(ours, theirs, rtol=1e-7, atol=0)


def test_only_matching_weights_decay() -> None:
    (moved, big, kept, none) = (
        after(method, optim.sgd(0.0))
        for method in (
            decoupled_weight_decay(0.1),
            decoupled_weight_decay(0.1, min_dims=2),
            decoupled_weight_decay(0.1, exclude=("0.*",)),
            [],
        )
    )
    small = {name: param * 0.9 ** len(BATCHES) for name, param in none.params.items()}
    assert_close(moved.params, small)
    assert_close(big.params, {name: small[name] if one.ndim > 1 else one for name, one in none.params.items()})
    assert_close(kept.params, {name: one if name[0] == "0" else small[name] for name, one in none.params.items()})


@pytest.mark.parametrize("turn", [1, -1])
def test_names_are_those_of_the_network_after_surgery(turn: int) -> None:
    net = nn.Sequential(nn.Conv2d(16, 4, 3, 2), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def started(pattern: str) -> tuple[Any, State]:
        step = compose(loop_events, [decoupled_weight_decay(0.1, exclude=(pattern,)), alg.blurpool()][::turn])
        return step, step.init(make_state(net, optimizer=optim.sgd(0.0)))

    step, state = started("0.conv.weight")
    after = step(state, (torch.ones(4, 16, 6, 6), torch.tensor([0, 1, 2, 3])))
    assert torch.equal(after.params["0.conv.weight"], state.params["0.conv.weight"])
    torch.testing.assert_close(after.params["0.conv.bias"], 0.9 * state.params["0.conv.bias"])
    with pytest.raises(ValueError, match="exclude: '0.weight' matches no parameter; the names are 0.conv.weight"):
        started("0.weight")


@pytest.mark.parametrize("method", [alg.skip_nonfinite(), alg.loss_scaling()], ids=lambda method: method.name)
@pytest.mark.parametrize("turn", [1, -1])
def test_a_step_that_is_skipped_decays_nothing(method: Any, turn: int) -> None:
    step = compose(loop_events, [method, decoupled_weight_decay(0.1)][::turn])
    state = step.init(cnn_state())
    inputs, targets = BATCHES[0]
    assert_same(step(state, (inputs * torch.nan, targets)).params, state.params)
    assert not torch.equal(step(state, BATCHES[0]).params["0.weight"], state.params["0.weight"])


def test_batches_whose_gradients_are_kept_for_later_decay_nothing() -> None:
    methods = [alg.gradient_accumulation(2), decoupled_weight_decay(0.1)]
    start, once, twice = states_after(methods, cnn_state(optimizer=optim.sgd(0.0)), BATCHES[:2])
    assert_same(start.params, once.params)
    assert_close(twice.params, {name: 0.9 * value for name, value in start.params.items()})


def test_sams_gradients_are_those_of_the_weights_before() -> None:
    methods = [alg.sam(0.1), decoupled_weight_decay(0.01)]
    ours = after(methods, optim.sgd(0.1 * CURVE))
    assert_same(ours.params, after(methods[::-1], optim.sgd(0.1 * CURVE)).params)
    assert_same(ours.params, after([methods[0]], optim.decoupled_sgdw(0.1 * CURVE, weight_decay=0.01)).params)


def test_each_optimizer_of_several_decays_by_its_own_schedule() -> None:
    muon, adam = optim.muon(0.02 * CURVE, weight_decay=0.0), optim.adam(0.01 * schedule.linear())
    state = cnn_state(optimizer=optim.by_pattern({"*": muon}, adam))
    state = compose(loop_events, [decoupled_weight_decay(0.01)]).init(state)
    rules = (DecayRule("decoupled_weight_decay", 0.01),)
    assert state.optimizer == optim.by_pattern({"*": Decaying(muon, rules)}, Decaying(adam, rules))
    zeros = {name: torch.zeros_like(value) for name, value in state.params.items()}
    values = {CURVE: 0.5, muon.lr: 0.01, schedule.linear(): 0.25, adam.lr: 0.0025}
    moved, _ = state.optimizer.update(zeros, state.opt_state, state.params, lambda scalar: values.get(scalar, scalar))
    shares = {name: 0.5 if muon.can_move(value) else 0.25 for name, value in state.params.items()}
    assert set(shares.values()) == {0.5, 0.25}
    assert_close(moved, {name: value * (1 - 0.01 * shares[name]) for name, value in state.params.items()})


def test_several_optimizers_in_one_decay_are_refused() -> None:
    several, rules = optim.by_pattern({"*": optim.muon(0.02)}, optim.adam(0.01)), (DecayRule("any", 0.01),)
    for inner in (several, Guarded(several)):
        with pytest.raises(ValueError, match="Decaying: expected one optimizer, .* use it inside by_pattern"):
            Decaying(inner, rules)
    # A single optimizer is accepted.
    assert Decaying(Guarded(optim.by_pattern({}, optim.adam(0.01))), rules).rules == rules


# Settings


def test_a_pattern_that_matches_nothing_is_refused_at_init() -> None:
    with pytest.raises(ValueError, match="decoupled_weight_decay: exclude: 'nothing' matches no parameter"):
        after(decoupled_weight_decay(exclude=("nothing",)), optim.sgd(0.1))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optim.adamw(0.1), "also has a weight decay, and both are applied"),
        (optim.sgd(0.1, groups={"*.bias": {"weight_decay": 0.1}}), "also has a weight decay"),
    ],
)
def test_likely_mistakes_are_warned_about(optimizer: Any, words: str) -> None:
    with pytest.warns(UserWarning, match=f"^decoupled_weight_decay: .*{words}"):
        compose(loop_events, [decoupled_weight_decay(0.01)]).init(cnn_state(optimizer=optimizer))
