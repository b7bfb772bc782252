"""EMA: its formula in float64, time in all units, and no effect on training."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, algorithms as alg, compose, loop_events, optim
from purecompose.algorithms._averages import compute_ema, ema
from purecompose.time import Time
from tests.algorithms.averaging_checks import (
    BATCHES,
    assert_near,
    averages_of,
    check_evaluation_sees_averages,
    check_init,
    cnn_state,
    states_after,
    weights_of,
)
from tests.helpers import assert_same, make_batches, make_mlp, make_state


SHARES = st.floats(0, 1)
NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=2)


def expected_averages(weights: list[dict[str, Tensor]], factors: list[float]) -> dict[str, Tensor]:
    """Return the closed form: first weights times the product of all factors, later ones times 1 - s and the rest."""
    total = {name: torch.zeros_like(value) for name, value in weights[0].items()}
    for index, sample in enumerate(weights):
        rest = math.prod(factors[index:])
        own = rest if index == 0 else (1 - factors[index - 1]) * rest
        for name, value in sample.items():
            total[name] += own * value
    return total


# The core


@pytest.mark.parametrize("smoothing", [0.0, 0.25, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_core_is_the_formula_element_by_element(smoothing, as_tensor):
    generator = torch.Generator().manual_seed(0)
    average, weight = (torch.randn(5, 4, generator=generator) for _ in range(2))
    share = torch.tensor(smoothing, dtype=torch.float64) if as_tensor else smoothing
    found = compute_ema({"a": average}, {"a": weight, "more": weight}, share)
    expected = smoothing * average.double() + (1 - smoothing) * weight.double()
    assert found.keys() == {"a"} and found["a"].dtype is torch.float32
    torch.testing.assert_close(found["a"].double(), expected, rtol=1e-6, atol=1e-7)
    if smoothing in (0, 1):
        assert torch.equal(found["a"], average if smoothing else weight)


@given(pair=NUMBERS, smoothing=SHARES)
def test_averages_are_between_the_weights_and_constants_are_kept(pair, smoothing):
    average, weight = torch.tensor(pair)
    found = compute_ema({"a": average}, {"a": weight}, smoothing)["a"]
    assert min(pair) <= found.item() <= max(pair)
    assert torch.equal(compute_ema({"a": average}, {"a": average}, smoothing)["a"], average)


def test_integers_of_a_state_dict_are_those_of_the_weights() -> None:
    old, new = torch.nn.BatchNorm1d(2).state_dict(), torch.nn.BatchNorm1d(2).state_dict()
    new["running_mean"], new["num_batches_tracked"] = torch.ones(2), torch.tensor(7)
    found = compute_ema(old, new, 0.75)
    assert found["running_mean"].tolist() == [0.25, 0.25] and found["num_batches_tracked"].item() == 7


@pytest.mark.parametrize(("half_life", "interval"), [(8, 1), (12, 3), (1000, 10)])
def test_after_a_half_life_half_of_the_distance_is_left(half_life, interval):
    averages, weights = {"a": torch.tensor([3.0, -1.0])}, {"a": torch.tensor([1.0, 1.0])}
    for _ in range(half_life // interval):
        averages = compute_ema(averages, weights, 2 ** (-interval / half_life))
    torch.testing.assert_close(averages["a"], torch.tensor([2.0, 0.0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [1e-6, 1e-9, 1e-12])
def test_a_smoothing_next_to_one_is_not_rounded_to_it(change):
    for smoothing in (1 - change, torch.tensor(1 - change, dtype=torch.float64)):
        found = compute_ema({"a": torch.zeros(())}, {"a": torch.ones(())}, smoothing)["a"].item()
        assert found == pytest.approx(change, rel=1e-3 if change == 1e-12 else 1e-6)


# Averaged tensors and times


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 0.9, 1.0])
def test_the_method_is_the_closed_form_of_weights_and_statistics(smoothing):
    states = states_after(ema(smoothing=smoothing), cnn_state(), BATCHES)
    samples = [weights_of(state) for state in states[1:]]
    assert "1.running_var" in samples[0]
    for num in (1, 2, len(samples)):
        expected = expected_averages(samples[:num], [smoothing] * (num - 1))
        assert_near(averages_of(states[num], "ema"), expected)
        assert states[num].slots["ema"].num.item() == num


# Twelve batches of eight, four per epoch: the fraction of a half-life between two updates.
@pytest.mark.parametrize(
    ("half_life", "interval", "every", "passed"),
    [
        ("3ba", "1ba", 1, 1 / 3),
        (3, 1, 1, 1 / 3),
        (Time.of("3ba"), "2ba", 2, 2 / 3),
        ("1ep", "1ba", 1, 1 / 4),
        ("1ep", "3ba", 3, 3 / 4),
        ("6ba", "1ep", 4, 4 / 6),
        ("0.25dur", "1ba", 1, 1 / 3),
        ("2ba", "0.25dur", 3, 3 / 2),
        ("2ba", "2ep", 8, 4),
        ("0.5dur", "0.5dur", 6, 1),
        (None, "5ba", 5, 5 / 1000),
    ],
)
def test_half_lives_in_every_unit_beside_intervals_in_another(half_life, interval, every, passed):
    method = ema(half_life, every=interval)
    states = states_after(method, cnn_state(), BATCHES)
    samples = [weights_of(state) for state in states[every::every]]
    expected = expected_averages(samples, [2**-passed] * (len(samples) - 1))
    assert_near(averages_of(states[-1], "ema"), expected)


@pytest.mark.parametrize(
    ("start", "interval", "first"),
    [(0.0, "1ba", 1), ("5ba", "1ba", 5), ("5ba", "2ba", 6), (0.5, "1ba", 6), ("2ep", "1ba", 8), ("33sp", "1ba", 5)],
)
def test_averaging_begins_with_the_first_update_from_the_start_on(start, interval, first):
    method = ema("2ba", start=start, every=interval)
    states = states_after(method, cnn_state(), BATCHES)
    assert all(state.slots["ema"].num.item() == 0 for state in states[:first])
    assert_same(averages_of(states[first], "ema"), weights_of(states[first]))
    step = compose(loop_events, [method])
    for state in states[:first]:  # until then evaluation sees the training weights
        assert_same(step.replace(program=pc.loop.eval_events).fire(Event.EVAL_START, state), state)


def test_a_run_without_a_length_works():
    states = states_after(ema("2ba"), make_state(duration=None), make_batches(3))
    assert states[-1].slots["ema"].num.item() == 3


@pytest.mark.filterwarnings("ignore:the run is 5ep long, and was 4ep")
def test_a_longer_run_continues_with_the_averages_and_its_own_half_life():
    """Half-lives that are fractions of the run get longer with it; the averages so far stay valid."""
    method = ema("0.25dur")
    step, batches = compose(loop_events, [method]), make_batches(3)
    start = make_state(duration="4ep", batches_per_epoch=3)
    longer = pc.fit(step, pc.fit(step, start, batches), batches, duration="5ep")
    samples = [weights_of(state) for state in states_after(method, start, batches * 5)[1:]]
    expected = expected_averages(samples, [2 ** (-1 / 3)] * 11 + [2 ** (-1 / 3.75)] * 3)
    assert_near(averages_of(longer, "ema"), expected)


# Training and evaluation


def test_evaluation_sees_averages_and_does_not_change_training():
    check_evaluation_sees_averages(ema("2ba"))


def test_evaluation_sees_the_later_one_of_two_averages():
    methods = [ema("1ba", name="fast"), ema("10ba", name="slow")]
    state = states_after(methods, cnn_state(), BATCHES)[-1]
    step = compose(loop_events, methods)
    expected = pc.evaluate(pc.surgery.with_weights(state, "slow"), BATCHES[:1])
    assert pc.evaluate(state, BATCHES[:1], step=step) == expected
    assert expected != pc.evaluate(pc.surgery.with_weights(state, "fast"), BATCHES[:1])


# Networks of all kinds, and other ways to run them


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_averages_of_half_precision_are_float32(dtype):
    def train(method):
        state = make_state(make_mlp(dtype=dtype), optimizer=optim.sgd(0.5))
        return states_after(method, state, make_batches(6, dtype=dtype))

    states = train(ema(smoothing=0.999))
    samples = [weights_of(state) for state in states[1:]]
    assert {tensor.dtype for tensor in states[-1].slots["ema"].params.values()} == {torch.float32}
    assert_near(averages_of(states[-1], "ema"), expected_averages(samples, [0.999] * 5))
    seen = pc.surgery.with_weights(states[-1], "ema").params
    assert {tensor.dtype for tensor in seen.values()} == {dtype}


def test_counters_are_the_live_ones():
    state = states_after(ema("2ba"), cnn_state(), BATCHES)[-1]
    seen = pc.surgery.with_weights(state, "ema").buffers
    assert seen["1.num_batches_tracked"].item() == len(BATCHES)
    assert not torch.equal(seen["1.running_mean"], state.buffers["1.running_mean"])


class Masked(nn.Module):
    """A network with a mask of infinities among its buffers, as in language models."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.inf, 7.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(torch.where(self.mask.isinf(), 0.0, inputs))


def test_masks_of_infinities_are_unchanged():
    state = states_after(ema("2ba", buffers=["mask"]), make_state(Masked()), make_batches(3))[-1]
    assert "mask" in state.slots["ema"].buffers
    assert torch.equal(pc.surgery.with_weights(state, "ema").buffers["mask"], state.buffers["mask"])


def test_patterns_choose_the_buffers_to_average():
    none, some = (states_after(ema("2ba", buffers=given), cnn_state(), BATCHES)[-1] for given in ((), ("*_mean",)))
    assert not none.slots["ema"].buffers
    assert some.slots["ema"].buffers.keys() == {"1.running_mean", "4.running_mean"}
    with pytest.raises(ValueError, match=r"ema: buffers: '\*tracked' matches no floating buffer"):
        compose(loop_events, [ema(buffers=["*tracked"])]).init(cnn_state())


def test_it_averages_the_network_after_surgery():
    check_init(ema("2ba"), lambda: alg.squeeze_excite(min_channels=1), cnn_state())


# Settings


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"half_life": "0.1dur"}, {"duration": None}, "half_life='0.1dur' .*give State.create batches_per_epoch"),
        ({"start": 0.5}, {"duration": None}, "0.5dur is a fraction of a run that has no duration"),
        ({"every": "1ep"}, {}, "every.'1ep'. cannot be counted in batches in this run"),
    ],
)
def test_times_that_the_run_cannot_determine_are_errors(settings, options, words):
    with pytest.raises((ValueError, pc.errors.MatchError), match=words):
        states_after(ema(**settings), make_state(**options), make_batches(1))


def test_evaluating_a_state_without_the_slot_says_what_is_missing():
    step = compose(loop_events, [ema()])
    with pytest.raises(ValueError, match="weights='ema'.*no algorithm of this state keeps any"):
        pc.evaluate(make_state(), make_batches(1), step=step)


# Warm-up


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"smoothing": 0.9, "warmup": 3}, lambda n: 0.9 * (1 - math.exp(-n / 3))),
        ({"smoothing": 0.9, "power": 2 / 3}, lambda n: min(0.9, 1 - (1 + n) ** (-2 / 3))),
        ({"smoothing": 0.9 * pc.schedule.linear(0.0, 1.0, "12ba")}, lambda n: 0.9 * (n + 1) / 12),
        ({"smoothing": pc.hparam("s", 0.8)}, lambda n: 0.8),
    ],
    ids=["detection", "diffusion", "schedule", "hparam"],
)
def test_the_smoothing_may_change_with_the_updates(settings, factor):
    """The factor after n updates; a schedule has its value at the end of the batch."""
    states = states_after(ema(**settings), cnn_state(), BATCHES)
    samples = [weights_of(state) for state in states[1:]]
    expected = expected_averages(samples, [factor(n) for n in range(1, len(samples))])
    assert_near(averages_of(states[-1], "ema"), expected)
