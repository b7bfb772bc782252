"""SWA: means of samples and their times, the learning rate, and statistics of the averaged network."""

import dataclasses
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, State, algorithms as alg, compose, loop_events, optim, schedule
from purecompose.algorithms._averages import add_to_mean, swa
from purecompose.optim.base import progress
from purecompose.optim.wrapping import Guarded
from purecompose.schedule import Scalar
from purecompose.time import RunLength, Timestamp
from tests.algorithms.averaging_checks import (
    BATCHES,
    assert_near,
    check_evaluation_sees_averages,
    cnn_state,
    states_after,
)
from tests.helpers import assert_close, assert_same, make_batch, make_batches, make_state, run_steps


RUN = RunLength("3ep", batches_per_epoch=4)


def mean_of(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]).mean(0) for name in samples[0]}


def parameters_of(state: State) -> dict[str, Tensor]:
    return {name: param.double() for name, param in state.params.items()}


# The core


@given(samples=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20), as_tensor=st.booleans())
def test_updates_make_the_arithmetic_mean_between_the_samples(samples, as_tensor):
    means = {"a": torch.tensor([5.0])}
    for num, sample in enumerate(samples):
        means = add_to_mean(means, {"a": torch.tensor([sample])}, torch.tensor(num) if as_tensor else num)
    assert means["a"].item() == pytest.approx(math.fsum(samples) / len(samples), rel=1e-5, abs=1e-3)
    assert min(samples) <= means["a"].item() <= max(samples)
    assert means["a"].dtype is torch.float32


@pytest.mark.parametrize("num", [0, 1, 5, 1000])
def test_constant_weights_are_their_own_mean(num):
    weights = {"a": torch.randn(10, generator=torch.Generator().manual_seed(0))}
    assert_same(add_to_mean(weights, weights, num), weights)


# Averaged tensors and times


# Twelve batches of eight, four an epoch. Weights are taken at the end, too, as in the original, which tests for the end
# after it has taken them.
@pytest.mark.parametrize(
    ("start", "end", "interval", "taken"),
    [
        (0.5, 1.0, "1ba", range(6, 13)),
        (0.5, 0.9, "1ba", range(6, 11)),
        ("1ep", "10ba", "2ba", [4, 6, 8, 10]),
        (0.3, 1.0, "1ep", [4, 8, 12]),
        ("2ep", "11ba", "1ba", [8, 9, 10, 11]),
        (0, "1ep", "1ba", [1, 2, 3, 4]),
        ("40sp", "80sp", "1ba", range(5, 11)),
        (0.25, 0.75, "0.25dur", [3, 6, 9]),
        ("5ba", 1, 3, [5, 8, 11]),
        ("5ba", 0.3, "1ba", []),
        ("5ba", "11ba", "1ep", [8]),
        ("1ep", 1.0, "2ep", [4, 12]),
    ],
)
def test_it_is_the_mean_of_the_weights_at_these_batches(start, end, interval, taken):
    states = states_after(swa(start, end, interval), cnn_state(), BATCHES)
    for num in (1, len(BATCHES) // 2, len(BATCHES)):
        so_far = [states[at] for at in taken if at <= num]
        averages = states[num].slots["swa"].averages
        assert averages.num.item() == len(so_far)
        if so_far:
            found = {name: param.double() for name, param in averages.params.items()}
            assert_near(found, mean_of([parameters_of(state) for state in so_far]))


def test_until_the_end_statistics_are_those_of_the_live_network_at_the_last_update():
    states = states_after(swa("2ba", "10ba", "3ba"), cnn_state(), BATCHES)
    for now, last in ((2, 2), (4, 2), (5, 5), (7, 5), (8, 8), (9, 8)):
        seen = pc.surgery.with_weights(states[now], "swa").buffers
        for name in ("1.running_mean", "4.running_var"):
            assert torch.equal(seen[name], states[last].buffers[name])
        assert seen["1.num_batches_tracked"].item() == now


def test_before_the_first_update_evaluation_sees_the_training_weights():
    states = states_after(swa("6ba", 1.0, "1ba"), cnn_state(), BATCHES)
    for state in states[:6]:
        assert_same(pc.surgery.with_weights(state, "swa"), state)


@pytest.mark.parametrize("duration", ["1ep", "3ep", "40ba", "7ep"])
@pytest.mark.parametrize("interval", ["1ba", "3ba", "1ep", "0.3dur", "50ba"])
@pytest.mark.parametrize(
    ("start", "end"), [(0.7, 0.97), (0.5, 1.0), (0.0, "2ba"), ("20ba", 0.3), ("2ep", "9ba"), (0.97, 1.0), (1.0, "99ba")]
)
def test_init_warns_exactly_of_runs_that_take_no_weights(duration, interval, start, end):
    """Compared with calling the match for every batch."""
    method: Any = swa(start, end, interval)
    point, takes_some = Timestamp(run=RunLength(duration, batches_per_epoch=4)), False
    while not point.is_finished():
        point = point.advance()
        takes_some = takes_some or method.match(Event.BATCH_END, SimpleNamespace(timestamp=point))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compose(loop_events, [method]).init(cnn_state(duration=duration))
    told = [str(warning.message) for warning in caught if "averages no weights" in str(warning.message)]
    assert len(told) == (not takes_some)


# Training, evaluation, resuming


@pytest.mark.parametrize("end", [1.0, "9ba"])
def test_evaluation_sees_averages_and_does_not_change_training(end):
    check_evaluation_sees_averages(swa("2ba", end, "1ba"))


# Statistics


@pytest.mark.parametrize("num", [1, 3, 6])
def test_after_the_end_statistics_are_the_means_of_the_averaged_network(num):
    """Compared with a pass of plain torch over the batches since then."""
    states = states_after(swa("2ba", "6ba", "1ba"), cnn_state(), BATCHES)
    net = pc.to_module(states[6], weights="swa")
    torch.optim.swa_utils.update_bn(BATCHES[6 : 6 + num], net)
    expected = {name: buffer for name, buffer in net.named_buffers() if buffer.is_floating_point()}
    assert (states[6].slots["swa"].averages.buffers["4.running_mean"] - expected["4.running_mean"]).abs().max() > 0.01
    assert_close(states[6 + num].slots["swa"].averages.buffers, expected)
    assert_same(states[6 + num].slots["swa"].averages.params, states[6].slots["swa"].averages.params)


@pytest.mark.parametrize("guards", [[], [alg.skip_nonfinite()]])
@pytest.mark.parametrize("at", [6, 8])
def test_a_bad_batch_is_left_out_of_the_statistics(guards, at):
    """Compared with runs without it; the average no longer changes, so all see the same batches."""
    bad = [*BATCHES[:at], (torch.full_like(BATCHES[0][0], torch.inf), BATCHES[0][1]), *BATCHES[at:11]]
    found = states_after([swa("2ba", "6ba", "1ba"), *guards], cnn_state(), bad)[-1].slots["swa"]
    expected = states_after([swa("2ba", "6ba", "1ba"), *guards], cnn_state(), BATCHES[:11])[-1].slots["swa"]
    assert found.num_batches.item() == 5
    assert_same(found, expected)


def test_statistics_that_are_not_finite_are_replaced():
    """Statistics of the live network are NaN after a bad batch, whose gradients are left out here."""
    calm = pc.Algorithm("calm", pc.on(Event.AFTER_TRAIN_BATCH), _without_bad_gradients)
    bad = [*BATCHES[:4], (torch.full_like(BATCHES[0][0], torch.inf), BATCHES[0][1]), *BATCHES[5:]]
    states = states_after([swa("5ba", "6ba", "5ba"), calm], cnn_state(), bad)
    assert not states[5].slots["swa"].averages.buffers["1.running_mean"].isfinite().all()
    assert all(buffer.isfinite().all() for buffer in states[8].slots["swa"].averages.buffers.values())


def _without_bad_gradients(event: Event, state: State) -> State:
    del event
    return state.replace(grads={name: grad.nan_to_num(0, 0, 0) for name, grad in (state.grads or {}).items()})


CALLS: list[int] = []


class Counted(nn.Linear):
    """A linear layer that counts its forward passes."""

    def forward(self, input: Tensor) -> Tensor:
        CALLS.append(1)
        return super().forward(input)


@pytest.mark.parametrize(("net", "passes"), [(Counted(4, 3), 1), (nn.Sequential(Counted(4, 3), nn.BatchNorm1d(3)), 2)])
def test_networks_without_statistics_need_no_second_pass(net, passes):
    step = compose(loop_events, [swa(0, "2ba", "1ba")])
    state = run_steps(step, step.init(make_state(net, batches_per_epoch=4)), make_batches(3))
    CALLS.clear()
    step(state, make_batch(5))
    assert len(CALLS) == passes


def test_the_pass_for_statistics_changes_no_draw_and_no_weight():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    options = {"batches_per_epoch": 4, "key": 3}
    for plain, ours in zip(
        states_after([], make_state(net, **options), make_batches(6)),
        states_after(swa(0, "3ba", "1ba"), make_state(net, **options), make_batches(6)),
        strict=True,
    ):
        assert_same((plain.params, plain.buffers, plain.loss), (ours.params, ours.buffers, ours.loss))


# The learning rate


def progress_at(rate: Scalar, point: Timestamp) -> float:
    """Return the factor of a rate's schedules at a point of a run, by which weights decay."""
    return float(progress(rate, lambda it: rate_at(it, point)))


def rate_at(rate: Scalar, point: Timestamp) -> float:
    """Return a learning rate without hparams at a point of a run."""
    return float(schedule.resolve(rate, hparams={}, scheduled=lambda it: it(point)))


def rates_of(optimizer: object, method: pc.Algorithm) -> list[float]:
    """Return the learning rate before each batch, according to the state's optimizer."""
    lr = compose(loop_events, [method]).init(cnn_state(optimizer=optimizer)).optimizer.lr
    return [rate_at(lr, Timestamp(batch=at, epoch=at // 4, sample=8 * at, run=RUN)) for at in range(13)]


@pytest.mark.parametrize("strategy", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("start", "interval", "steps", "first", "length"),
    [
        (0.5, "1ba", 4, 6, 4),
        ("1ep", "2ba", 3, 4, 6),
        ("1ep", "1ep", 1, 4, 4),
        (0.25, "0.25dur", 2, 3, 6),
        (0, 1, 5, 0, 5),
    ],
)
@pytest.mark.parametrize(
    "base",
    [
        0.4,
        0.4 * schedule.linear(),
        schedule.cosine(warmup="2ba"),
        0.5 * schedule.linear() * schedule.cosine() * 0.8,
        0.0,
        0.0 * schedule.cosine(),
    ],
)
def test_the_rate_goes_from_the_schedules_own_to_the_given_one(strategy, start, interval, steps, first, length, base):
    found = rates_of(optim.sgd(base), swa(start, 1.0, interval, 0.05, strategy, steps))
    for at, rate in enumerate(found):
        own = rate_at(base, Timestamp(batch=at, epoch=at // 4, sample=8 * at, run=RUN))
        way = min(max((at - first) / length, 0), 1)
        way = way if strategy == "linear" else 0.5 - 0.5 * math.cos(math.pi * way)
        if at <= first:
            assert rate == pytest.approx(own, rel=1e-15)
        assert rate == pytest.approx((1 - way) * own + way * 0.05, rel=1e-12)
    assert found[-1] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("optimizer", "others"),
    [
        (optim.sgd(0.1 * schedule.constant(), momentum=0.9), []),
        (optim.sgd(0.2 * schedule.cosine(), momentum=0.9), []),
        (optim.decoupled_sgdw(0.2 * schedule.cosine(), momentum=0.9, weight_decay=0.05), []),
        (optim.decoupled_adamw(0.01 * schedule.cosine(), weight_decay=0.005), []),
        (optim.sgd(0.2 * schedule.cosine()), [alg.decoupled_weight_decay(0.05)]),
    ],
)
def test_before_the_start_training_only_follows_the_schedule(optimizer, others):
    plain = states_after(others, cnn_state(optimizer=optimizer), BATCHES)
    ours = states_after([swa(0.5, 1.0, "1ba", 0.001), *others], cnn_state(optimizer=optimizer), BATCHES)
    for at in range(7):  # the step at the start itself still has the schedule's rate
        assert_same(plain[at].params, ours[at].params)
    assert not torch.equal(plain[8].params["0.weight"], ours[8].params["0.weight"])


@pytest.mark.parametrize("base", [0.4, 0.4 * schedule.cosine(), 0.4 * schedule.cosine() * schedule.linear()])
def test_weight_decay_by_schedule_follows_the_rate(base):
    """The decay is scaled by lr_t / lr_0: from the schedule's own value to the last rate over the first."""
    state = compose(loop_events, [swa(0.5, 1.0, "1ba", 0.1, anneal_steps=2)]).init(cnn_state(optimizer=optim.sgd(base)))
    for at in range(13):
        point = Timestamp(batch=at, epoch=at // 4, run=RUN)
        found = progress_at(state.optimizer.lr, point)
        assert found == pytest.approx(rate_at(state.optimizer.lr, point) / 0.4, rel=1e-12)
        if at <= 6:
            assert found == progress_at(base, point)
        if at >= 8:
            assert found == pytest.approx(0.25)


def test_groups_with_rates_and_optimizers_in_others_follow():
    groups = {"*.bias": {"lr": 0.2, "weight_decay": 0.0}, "6.*": {"momentum": 0.5}}
    inner = optim.sgd(0.1, momentum=0.9, groups=groups)
    step = compose(loop_events, [swa(0.5, 1.0, "1ba", 0.02, anneal_steps=2), alg.loss_scaling()])
    for algorithms in (step.algorithms, step.algorithms[::-1]):
        state = step.replace(algorithms=algorithms).init(cnn_state(optimizer=inner))
        assert isinstance(state.optimizer, Guarded)
        changed: Any = state.optimizer.inner
        bias, six = dict(changed.groups[0][1]), dict(changed.groups[1][1])
        points = [Timestamp(batch=at, epoch=at // 4, run=RUN) for at in (0, 6, 7, 8, 12)]
        assert [rate_at(changed.lr, point) for point in points] == pytest.approx([0.1, 0.1, 0.06, 0.02, 0.02])
        assert [rate_at(bias["lr"], point) for point in points] == pytest.approx([0.2, 0.2, 0.11, 0.02, 0.02])
        assert bias["weight_decay"] == 0 and six == {"momentum": 0.5}
        run_steps(step, state, BATCHES)


def test_optimizers_that_divide_the_parameters_follow_in_all_parts():
    optimizer = optim.by_pattern({"*.bias": optim.adam(0.001)}, optim.from_torch(torch.optim.Adamax, lr=0.1))
    state = compose(loop_events, [swa(0.5, 1.0, "1ba", 0.02, anneal_steps=2)]).init(cnn_state(optimizer=optimizer))
    half = Timestamp(batch=7, epoch=1, run=RUN)
    assert rate_at(dict(state.optimizer.rest.settings)["lr"], half) == pytest.approx(0.06)
    assert rate_at(state.optimizer.groups[0][1].lr, half) == pytest.approx(0.0105)


def test_a_rate_that_is_a_torch_classs_default_goes_to_another_too():
    optimizer = optim.from_torch(torch.optim.Adamax, groups={"*.bias": {"lr": 0.2}})
    state = compose(loop_events, [swa(0.5, 1.0, "1ba", 0.02, anneal_steps=2)]).init(cnn_state(optimizer=optimizer))
    half = Timestamp(batch=7, epoch=1, run=RUN)
    assert rate_at(dict(state.optimizer.settings)["lr"], half) == pytest.approx(0.011)  # halfway from 0.002
    assert rate_at(dict(state.optimizer.groups[0][1])["lr"], half) == pytest.approx(0.11)


def test_a_second_init_keeps_the_rate_and_a_second_method_is_refused():
    state = cnn_state(optimizer=optim.sgd(0.1))
    method = swa(0.5, 1.0, "1ba", 0.02)
    once: Any = method.apply(pc.Event.INIT, state)
    twice: Any = method.apply(pc.Event.INIT, once)
    assert twice.optimizer.lr is once.optimizer.lr
    with pytest.raises(ValueError, match="expected one method that changes the rate, got 0.1 . .1.0, to"):
        swa(0.0, 1.0, "1ba", 0.2, name="other").apply(pc.Event.INIT, once)


@dataclasses.dataclass(frozen=True)
class Rateless:
    """An optimizer without a learning rate."""

    def init(self, params):
        return {}

    def update(self, grads, opt_state, params, value):
        return {name: param - 0.1 * grads[name] for name, param in params.items()}, opt_state


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optim.sgd(pc.hparam("lr", 0.1)), "swa_lr=0.02 replaces the learning rate, which is hparam"),
        (optim.sgd(pc.hparam("lr", 0.1) * schedule.cosine()), "leave the hparam out of the rate"),
        (optim.sgd(0.1, groups={"*.bias": {"lr": pc.hparam("bias_lr", 0.1)}}), "hparam"),
        (Rateless(), r"swa: expected an optimizer with a learning rate, a setting lr, got .*Rateless"),
    ],
)
def test_rates_that_it_cannot_change_are_refused_at_init(optimizer, words):
    with pytest.raises(ValueError, match=words):
        compose(loop_events, [swa(swa_lr=0.02)]).init(cnn_state(optimizer=optimizer))
    compose(loop_events, [swa()]).init(cnn_state(optimizer=optimizer))


def test_an_annealing_period_that_the_run_cannot_measure_is_an_error():
    step = compose(loop_events, [swa("5sp", "20sp", "1ba", 0.01)])
    with pytest.raises(ValueError, match="start=5sp and 10ba of annealing cannot be counted in batches"):
        step(step.init(cnn_state()), BATCHES[0])
