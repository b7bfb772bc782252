"""Schedules stretched in time."""

import types
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, strategies as st

from purecompose import optim
from purecompose.optim.wrapping import Guarded
from purecompose.schedule import (
    Schedule,
    constant,
    cosine,
    cosine_warm_restarts,
    exponential,
    hparam,
    linear,
    multi_step,
    polynomial,
    scaled,
    scheduled,
    sequence,
    step,
)
from purecompose.time import RunLength, Time, Timestamp


RATIOS = [0.5, 0.75, 1.0]

# Of all kinds, with absolute times, fractions of the run and both, without and with warm-ups.
UNWARMED = [
    linear(2.0, 0.5, "36ba"),
    linear(),
    cosine(alpha_f=0.1, t_max="0.5dur"),
    cosine(alpha_f=0.1, t_max="3ep"),
    polynomial(2, "40ba", 0.1),
    step("3ep", 0.5),
    step("7ba"),
    multi_step(["8ba", "28ba", "0.9dur"], 0.5),
    exponential(0.9),
    exponential(0.9, "0.1dur"),
    cosine_warm_restarts("4ba", 2),
    sequence([linear(0.0, 1.0), cosine(), 0.1 * step("2ba")], ["6ba", "5ep"]),
    sequence([linear(0.0, 1.0), sequence([cosine(), 0.5], ["0.5dur"])], ["2ep"]),
]
WARMED = [
    constant(2.0, warmup="6ba"),
    linear(warmup="4ba"),
    cosine(alpha_f=0.1, t_max="36ba", warmup="4ba"),
    polynomial(2, "2ep", warmup="1ep"),
    step("3ba", 0.5, "5ba"),
    multi_step(["8ba", "28ba"], 0.5, "2ep"),
    exponential(0.9, "4ba", "4ba"),
    cosine_warm_restarts("4ba", 3, warmup="5ba"),
    sequence([0.5 * linear(0.0, 1.0, warmup="2ba"), cosine(warmup="3ba")], ["6ba"]),
]
batches = st.integers(0, 60)
LENGTH, PER_EPOCH = 40, 4


def run_of(ratio: float) -> RunLength:
    return RunLength(Time(round(LENGTH * ratio), "ba"), batches_per_epoch=PER_EPOCH)


def at(schedule: Schedule, batch: float, ratio: float = 1.0) -> float:
    return schedule(Timestamp(batch=int(batch), run=run_of(ratio)))


@given(schedule=st.sampled_from(UNWARMED), ratio=st.sampled_from([*RATIOS, 0.25, 1.5, 2.0]), t=batches)
def test_the_value_at_ratio_times_t_is_the_old_value_at_t(schedule: Schedule, ratio: float, t: int) -> None:
    assume((t * ratio).is_integer())
    assert at(schedule.scaled(ratio), t * ratio, ratio) == pytest.approx(at(schedule, t), rel=1e-12, abs=1e-12)


@given(schedule=st.sampled_from(WARMED), ratio=st.sampled_from([*RATIOS, 0.25, 1.5, 2.0]), t=batches)
def test_with_the_warm_up_the_whole_curve_is_stretched(schedule: Schedule, ratio: float, t: int) -> None:
    assume((t * ratio).is_integer())
    found = at(schedule.scaled(ratio, scale_warmup=True), t * ratio, ratio)
    assert found == pytest.approx(at(schedule, t), rel=1e-12, abs=1e-12)


@given(t=batches, ratio=st.sampled_from([0.5, 0.75, 1.5, 2.0]))
def test_otherwise_a_warm_up_keeps_its_length_and_the_curve_has_no_jump(t: int, ratio: float) -> None:
    found = at(cosine(alpha_f=0.1, t_max="36ba", warmup="4ba").scaled(ratio), t, ratio)
    assert found == pytest.approx(
        at(cosine(alpha_f=0.1, t_max=Time(int(36 * ratio), "ba"), warmup="4ba"), t, ratio), rel=1e-12
    )
    assert at(step("6ba", 0.5, "5ba").scaled(ratio), t) == at(
        step(Time(int(6 * ratio * 2), "ba"), 0.5, "10ba"), 2 * t
    )  # times are doubled, so that all of them are integers


@given(ratio=st.floats(0.01, 10), size=st.integers(1, 40), t=batches)
def test_times_are_not_rounded(ratio: float, size: int, t: int) -> None:
    assume(min(Fraction(t) / (Fraction(ratio) * size) % 1, 1 - Fraction(t) / (Fraction(ratio) * size) % 1) > 1e-9)
    expected = Fraction(1, 2) ** int(Fraction(t) / (Fraction(ratio) * size))
    assert at(step(Time(size, "ba"), 0.5).scaled(ratio), t) == pytest.approx(float(expected))


def test_times_that_are_whole_are_not_missed_by_rounding_errors() -> None:
    curve = multi_step(["70ba"]).scaled(0.1)  # 70 * 0.1 is 7.000000000000001
    assert curve(Timestamp(batch=7)) == step("70ba").scaled(0.1)(Timestamp(batch=7)) == 0.1


@pytest.mark.parametrize("schedule", [*UNWARMED, *WARMED], ids=repr)
def test_ratios_multiply_and_1_is_neutral(schedule: Schedule) -> None:
    assert schedule.scaled(1) is schedule and scaled(schedule, 1.0, scale_warmup=True) is schedule
    twice = schedule.scaled(0.5, scale_warmup=True).scaled(0.25, scale_warmup=True)
    assert twice == schedule.scaled(0.125, scale_warmup=True)
    assert schedule.scaled(0.5).scaled(2) == schedule
    for t in range(8):
        inner = sequence([schedule.scaled(0.5, scale_warmup=True), 1], ["80ba"]).scaled(0.25, scale_warmup=True)
        outer = sequence([schedule, 1], ["160ba"]).scaled(0.125, scale_warmup=True)
        assert at(inner, t) == pytest.approx(at(outer, t)), t


def test_fractions_of_the_run_are_not_stretched_again() -> None:
    for schedule in (linear(), cosine(warmup="0.1dur"), cosine(warmup="4ba"), step("0.3dur"), multi_step(["0.5dur"])):
        assert schedule.scaled(0.5) is schedule
    assert cosine(warmup="4ba").scaled(0.5, scale_warmup=True) != cosine(warmup="4ba")


def test_a_warm_up_that_no_longer_fits_is_an_error_with_a_remedy() -> None:
    short = cosine(t_max="40ba", warmup="20ba").scaled(0.25)
    with pytest.raises(ValueError, match="warmup=20ba is longer than t_max=40ba.*20 against 10.*scale_warmup=True"):
        at(short, 0)
    assert at(cosine(t_max="40ba", warmup="20ba").scaled(0.25, scale_warmup=True), 5) == 1


def plain(timestamp: Timestamp) -> float:
    return 0.5**timestamp.batch


def test_a_plain_function_cannot_be_stretched() -> None:
    with pytest.raises(ValueError, match=r"scheduled\(plain\) is a plain function.*by 0.5"):
        scheduled(plain).scaled(0.5)
    assert scheduled(plain).scaled(1) == scheduled(plain)


@pytest.mark.parametrize("ratio", [0, -0.5, float("nan"), float("inf"), "0.5", None, True])
@pytest.mark.parametrize("thing", [linear(), 0.1, optim.sgd(0.1)], ids=repr)
def test_ratios_are_checked(thing: Any, ratio: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="scaled: ratio: expected a finite number > 0"):
        scaled(thing, ratio)
    with pytest.raises(TypeError, match="scale_warmup: expected True or False"):
        linear().scaled(0.5, scale_warmup=1)  # pyright: ignore[reportArgumentType]


class Pair(NamedTuple):
    first: Any
    second: Any


def test_all_schedules_of_a_tree_are_stretched() -> None:
    old, new = step("4ep"), step("4ep").scaled(0.5)
    assert scaled(0.1 * old * hparam("lr", 1.0) * linear(), 0.5) == 0.1 * new * hparam("lr", 1.0) * linear()
    assert scaled([old, (old, {"a": old}), Pair(1, old)], 0.5) == [new, (new, {"a": new}), Pair(1, new)]
    assert type(scaled(Pair(1, old), 0.5)) is Pair
    assert scaled(types.MappingProxyType({"a": old}), 0.5) == {"a": new}
    groups = {"*.bias": {"lr": 0.2 * old, "weight_decay": 0.0}}
    optimizer = Guarded(optim.adamw(0.1 * old, weight_decay=old, groups=groups))
    groups = {"*.bias": {"lr": 0.2 * new, "weight_decay": 0.0}}
    assert scaled(optimizer, 0.5) == Guarded(optim.adamw(0.1 * new, weight_decay=new, groups=groups))


def test_objects_with_nothing_to_stretch_are_returned_unchanged() -> None:
    for thing in (0.1, None, "text", hparam("lr", 0.1), optim.sgd(0.1 * linear()), [1, (linear(),)], {"a": 1}, step):
        assert scaled(thing, 0.5) is thing
