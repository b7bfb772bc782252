"""Steps, milestones, decays and restarts, against reference values, torch's schedulers and formulas in fractions."""

import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose import schedule as schedules
from purecompose.schedule import Schedule, cosine_warm_restarts, exponential, multi_step, step
from purecompose.time import RunLength, Time, Timestamp, UnitError


BATCHES = RunLength("100ba")

counts = st.integers(0, 400)
lengths = st.integers(1, 50)
gammas = st.sampled_from([0.1, 0.5, 0.0, 1.0, 1.5]) | st.floats(0.01, 2)


def values(schedule: Schedule, num: int, **fields: Any) -> list[float]:
    return [schedule(Timestamp(batch=t, **fields)) for t in range(num)]


@pytest.mark.parametrize(
    ("schedule", "run", "expected"),
    [
        (cosine_warm_restarts("10ba", 2), BATCHES, {15: 0.853553, 20: 0.5, 30: 1.0, 50: 0.5, 75: 0.990393}),
        (exponential(0.9), RunLength("100ba", batches_per_epoch=10), {0: 1.0, 5: 0.948683, 10: 0.9, 20: 0.81}),
        (step("3ep"), RunLength("9ep", 2), {0: 1, 5: 1, 6: 0.1, 11: 0.1, 12: 0.01}),
        (multi_step(["2ep", "7ep"]), RunLength("9ep", 2), {3: 1, 4: 0.1, 13: 0.1, 14: 0.01, 17: 0.01}),
        (multi_step(["20ba", "60ba"], 0.5, warmup="4ba"), BATCHES, {0: 0, 1: 0.25, 4: 1, 19: 1, 20: 0.5, 60: 0.25}),
    ],
)
def test_reference_values_of_periods(schedule: Schedule, run: RunLength, expected: dict[int, float]) -> None:
    for batch, value in expected.items():
        assert schedule(Timestamp(batch=batch, run=run)) == pytest.approx(value, abs=1e-6)


Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
lr_scheduler = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        (step("7ba", 0.3), lambda opt: lr_scheduler.StepLR(opt, 7, 0.3)),
        (multi_step(["5ba", "6ba", "20ba"], 0.5), lambda opt: lr_scheduler.MultiStepLR(opt, [5, 6, 20], 0.5)),
        (exponential(0.9, "1ba"), lambda opt: lr_scheduler.ExponentialLR(opt, 0.9)),
        (
            cosine_warm_restarts("3ba", 2, 0.1),
            lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3, 2, eta_min=0.1),
        ),
        (cosine_warm_restarts("4ba"), lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 4)),
        (schedules.polynomial(1.7, "30ba"), lambda opt: lr_scheduler.PolynomialLR(opt, 30, power=1.7)),
        (schedules.cosine(alpha_f=0.2, t_max="40ba"), lambda opt: lr_scheduler.CosineAnnealingLR(opt, 40, eta_min=0.2)),
    ],
)
def test_they_equal_torchs_schedulers(schedule: Schedule, theirs: Scheduler) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, expected = theirs(optimizer), []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert values(schedule, 40) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(t=counts, size=lengths, warmup=st.integers(0, 50), gamma=gammas)
def test_step_is_its_formula(t: int, size: int, warmup: int, gamma: float) -> None:
    expected = Fraction(t, warmup) if t < warmup else Fraction(gamma) ** ((t - warmup) // size)
    found = step(Time(size, "ba"), gamma, Time(warmup, "ba"))(Timestamp(batch=t))
    assert found == pytest.approx(float(expected), rel=1e-9)


@given(t=counts, points=st.lists(counts, min_size=1, max_size=5), warmup=st.integers(0, 50), gamma=gammas)
def test_multi_step_is_its_formula(t: int, points: list[int], warmup: int, gamma: float) -> None:
    passed = len([point for point in points if point <= t])
    expected = Fraction(t, warmup) if t < warmup else Fraction(gamma) ** passed
    schedule = multi_step([Time(point, "ba") for point in points], gamma, Time(warmup, "ba"))
    assert schedule(Timestamp(batch=t)) == pytest.approx(float(expected), rel=1e-9)


@given(t=counts, period=lengths, warmup=st.integers(0, 50), gamma=st.floats(0.5, 1.5))
def test_exponential_is_its_formula(t: int, period: int, warmup: int, gamma: float) -> None:
    expected = t / warmup if t < warmup else math.exp(math.log(gamma) * (t - warmup) / period)
    found = exponential(gamma, Time(period, "ba"), Time(warmup, "ba"))(Timestamp(batch=t))
    assert found == pytest.approx(expected, rel=1e-9)


@given(
    t=st.integers(0, 20_000),
    first=lengths,
    quarters=st.integers(4, 16),
    warmup=st.integers(0, 50),
    alpha_f=st.floats(-1, 2),
)
def test_restarts_come_after_longer_and_longer_times(
    t: int, first: int, quarters: int, warmup: int, alpha_f: float
) -> None:
    # Intervals one after the other, in exact fractions.
    since, length = Fraction(t - warmup), Fraction(first)
    while since >= length:
        since, length = since - length, length * Fraction(quarters, 4)
    expected = alpha_f + (1 - alpha_f) * math.cos(math.pi / 2 * since / length) ** 2 if t >= warmup else t / warmup
    schedule = cosine_warm_restarts(Time(first, "ba"), quarters / 4, alpha_f, Time(warmup, "ba"))
    assert schedule(Timestamp(batch=t)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("t_mult", [2, 3, 5, 7, 10])
def test_a_restart_is_exactly_at_its_batch(t_mult: int) -> None:
    schedule, start = cosine_warm_restarts("7ba", t_mult, 0.25), 0
    for number in range(10):
        assert schedule(Timestamp(batch=start)) == 1.0
        if number:
            assert schedule(Timestamp(batch=start - 1)) < 0.3  # the previous period is nearly at its end
        start += 7 * t_mult**number


@given(t=st.integers(0, 10**7), t_mult=st.floats(1, 1.0001))
def test_factors_close_to_1_take_no_longer(t: int, t_mult: float) -> None:
    assert 0 <= cosine_warm_restarts("3ba", t_mult)(Timestamp(batch=t)) <= 1


@pytest.mark.parametrize("t_mult", [1e100, 1e300])
def test_a_restart_beyond_the_range_of_floats_never_comes(t_mult: float) -> None:
    schedule = cosine_warm_restarts("2ba", t_mult, 0.5)
    assert [schedule(Timestamp(batch=t)) for t in (0, 2, 10**6, 10**12)] == [1.0] * 4
    assert schedule(Timestamp(batch=1)) == pytest.approx(0.75)


@pytest.mark.parametrize(
    "schedule",
    [
        exponential(2.0, "1ba"),
        step("1ba", 2.0),
        multi_step(["1ba", "2ba"], 1e200),
        schedules.sequence([0.5, exponential(2.0, "1ba")], ["9ba"]),
    ],
)
def test_a_value_beyond_the_range_of_floats_is_refused_by_name(schedule: Schedule) -> None:
    assert math.isfinite(schedule(Timestamp(batch=1)))
    with pytest.raises(ValueError, match="value at batch 2000: expected a finite number, got one beyond") as caught:
        schedule(Timestamp(batch=2000))
    assert str(caught.value).startswith(f"{schedule!r}: ")


def test_periods_are_not_truncated_to_whole_batches() -> None:
    run = RunLength("10ba")
    assert values(step("0.15dur", 0.5), 7, run=run) == [1, 1, 0.5, 0.25, 0.25, 0.125, 0.0625]
    # Two intervals of 1.5 batches.
    assert values(cosine_warm_restarts("0.15dur"), 4, run=run) == pytest.approx([1, 0.25, 0.75, 1])
    run = RunLength("70ba")  # 0.1 * 70 is 7.000000000000001
    assert step("0.1dur")(Timestamp(batch=7, run=run)) == multi_step(["0.1dur"])(Timestamp(batch=7, run=run)) == 0.1


@pytest.mark.parametrize(
    ("size", "warmup", "run", "fields"),
    [
        ("4ep", "2ep", RunLength("10ep"), {"epoch": 6, "batch": 1}),
        ("4ep", "2ep", RunLength("10ep", batches_per_epoch=3), {"batch": 18}),
        ("4ep", "6ba", RunLength(batches_per_epoch=3), {"batch": 18}),
        ("400sp", "200sp", RunLength(), {"sample": 600}),
        ("400tok", "0ba", RunLength(), {"token": 400}),
        ("0.4dur", "0.2dur", RunLength("1000tok"), {"token": 600}),
        ("0.4dur", "200sp", RunLength("1000sp"), {"sample": 600}),
    ],
)
def test_periods_in_all_units(size: str, warmup: str, run: RunLength, fields: dict[str, int]) -> None:
    now = Timestamp(run=run, **fields)
    assert step(size, 0.5, warmup)(now) == exponential(0.5, size, warmup)(now) == 0.5
    assert cosine_warm_restarts(size, 3.0, 0.5, warmup)(now) == 1.0


def test_each_milestone_has_its_own_unit() -> None:
    schedule = multi_step(["2ep", "500sp", "40tok"], 0.5, warmup="4ba")
    assert schedule(Timestamp(batch=2, epoch=2, sample=1000, token=9)) == 0.5  # warming up
    assert schedule(Timestamp(batch=4, epoch=1, sample=500, token=9)) == 0.5
    assert schedule(Timestamp(batch=4, epoch=2, sample=499, token=40)) == 0.25
    assert schedule(Timestamp(batch=9, epoch=3, sample=500, token=40)) == 0.125


def test_a_milestone_within_the_warm_up_acts_after_it() -> None:
    assert values(multi_step(["2ba", "5ba"], 0.5, "4ba"), 6) == [0, 0.25, 0.5, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    ("schedule", "run", "error", "message"),
    [
        (step("3ep", warmup="5sp"), RunLength("9ep"), UnitError, "warmup=5sp and period=3ep have no unit in common"),
        (exponential(0.9, "0.1dur"), RunLength(), ValueError, "no duration"),
        (multi_step(["0.5dur"]), RunLength("60sec"), ValueError, "wall-clock"),
    ],
)
def test_periods_that_the_run_cannot_determine_are_errors(
    schedule: Schedule, run: RunLength, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        schedule(Timestamp(run=run))


ALL = [
    schedules.constant(0.5, warmup="3ba"),
    schedules.constant(0.5),
    schedules.linear(2.0, 0.5, "10ep", "3ba"),
    schedules.cosine(alpha_f=0.1, t_max="10ep"),
    schedules.polynomial(2, "0.5dur", 0.1),
    schedules.step("3ep", 0.2, "1ep"),
    schedules.multi_step(["3ep", "0.5dur"], 0.3),
    schedules.exponential(0.9),
    schedules.cosine_warm_restarts("10ba", 2, 0.1),
    schedules.sequence([schedules.linear(0.0, 1.0), 0.5 * schedules.cosine(), 0.1], ["5ep", "7ep"]),
]


@pytest.mark.parametrize("schedule", [*ALL, *[one.scaled(0.3, scale_warmup=True) for one in ALL]], ids=repr)
def test_a_schedule_prints_as_the_call_that_makes_it(schedule: Schedule) -> None:
    again = eval(repr(schedule), vars(schedules).copy())
    assert again == schedule and hash(again) == hash(schedule) and repr(again) == repr(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
