"""Schedules in sequence: each one treats its part of the run as a whole run."""

import pytest
from hypothesis import given, strategies as st

from purecompose.schedule import (
    Schedule,
    collect,
    constant,
    cosine,
    cosine_warm_restarts,
    exponential,
    linear,
    multi_step,
    polynomial,
    sequence,
    step,
)
from purecompose.time import RunLength, Time, Timestamp, UnitError


# Schedules of all kinds, in batches and fractions, whose warm-ups all fit in a part of at least 7 batches.
KINDS = [
    constant(0.3, warmup="2ba"),
    constant(0.3),
    linear(0.0, 1.0),
    linear(2.0, 0.5, "0.5dur", "2ba"),
    cosine(alpha_f=0.1, warmup="3ba"),
    polynomial(2, "0.5dur"),
    step("0.3dur", 0.5, "2ba"),
    multi_step(["3ba", "0.6dur"], 0.5),
    exponential(0.9, "4ba"),
    cosine_warm_restarts("2ba", 2, 0.1, "0.1dur"),
]
kinds = st.sampled_from(KINDS)
sizes = st.integers(7, 40)


def at(schedule: Schedule, batch: int, run: RunLength | None = None) -> float:
    return schedule(Timestamp(batch=batch, run=run or RunLength()))


def test_a_warm_up_and_then_a_cosine() -> None:
    run, curve = RunLength("40ba"), sequence([linear(0.0, 1.0), cosine(alpha_f=0.1)], ["8ba"])
    for t in range(45):
        assert at(curve, t, run) == pytest.approx(at(cosine(alpha_f=0.1, warmup="8ba"), t, run), abs=1e-12)


@given(parts=st.lists(st.tuples(kinds, sizes), min_size=1, max_size=4), t=st.integers(0, 170))
def test_each_part_is_a_separate_run(parts: list[tuple[Schedule, int]], t: int) -> None:
    total = sum(size for _, size in parts)
    starts = [sum(size for _, size in parts[:index]) for index in range(len(parts))]
    curve = sequence([part for part, _ in parts], [Time(start, "ba") for start in starts[1:]])
    index = max(index for index, start in enumerate(starts) if start <= t)
    part, size = parts[index]
    expected = at(part, t - starts[index], RunLength(Time(size, "ba")))
    assert at(curve, t, RunLength(Time(total, "ba"))) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(first=kinds, second=kinds, third=kinds, a=sizes, b=sizes, c=sizes, t=st.integers(0, 130))
def test_a_sequence_in_a_sequence(
    first: Schedule, second: Schedule, third: Schedule, a: int, b: int, c: int, t: int
) -> None:
    run = RunLength(Time(a + b + c, "ba"))
    flat = sequence([first, second, third], [Time(a, "ba"), Time(a + b, "ba")])
    right = sequence([first, sequence([second, third], [Time(b, "ba")])], [Time(a, "ba")])
    left = sequence([sequence([first, second], [Time(a, "ba")]), third], [Time(a + b, "ba")])
    fractions = sequence([first, sequence([second, third], [Time(b / (b + c), "dur")])], [Time(a / (a + b + c), "dur")])
    for other in (right, left, fractions):
        assert at(other, t, run) == pytest.approx(at(flat, t, run), rel=1e-9, abs=1e-9)


def test_a_schedule_keeps_its_last_value_up_to_the_next_milestone() -> None:
    curve = sequence([linear(0.0, 1.0, t_max="2ba"), step("3ba", 0.5)], ["5ba"])
    assert [at(curve, t) for t in range(12)] == [0, 0.5, 1, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25]


def test_numbers_and_products_take_turns_as_well() -> None:
    curve = sequence([0.5 * linear() * 2, 3, constant(0.25)], ["4ba", "6ba"])
    assert [at(curve, t) for t in range(8)] == [1, 0.75, 0.5, 0.25, 3, 3, 0.25, 0.25]
    # A sequence is a factor like any other, and its parts are not evaluated separately.
    assert collect(0.1 * curve * linear(), Schedule) == (curve, linear())


@pytest.mark.parametrize(
    ("milestones", "run", "fields", "expected"),
    [
        # Half of the last part, a linear descent: fractions refer to the part's share of the run.
        (["0.5dur"], RunLength("40ba"), {"batch": 30}, 0.5),
        (["2ep"], RunLength("4ep", batches_per_epoch=10), {"batch": 30}, 0.5),
        (["20ba"], RunLength("4ep", batches_per_epoch=10), {"batch": 30}, 0.5),
        (["2ep"], RunLength("4ep"), {"epoch": 3, "batch": 777}, 0.5),
        (["200sp"], RunLength("400sp"), {"sample": 300}, 0.5),
        (["0.5dur"], RunLength("400tok"), {"token": 300}, 0.5),
        # Before the first milestone.
        (["2ep"], RunLength("4ep"), {"epoch": 1}, 7.0),
        (["201sp"], RunLength("400sp"), {"sample": 200}, 7.0),
    ],
)
def test_parts_in_all_units(milestones: list[str], run: RunLength, fields: dict[str, int], expected: float) -> None:
    assert sequence([7.0, linear()], milestones)(Timestamp(run=run, **fields)) == pytest.approx(expected, rel=1e-12)


def test_a_milestone_waits_for_the_one_in_front_of_it() -> None:
    curve, run = sequence([1, 2, 3], ["10ba", "0.1dur"]), RunLength("50ba")
    assert [at(curve, t, run) for t in (0, 5, 9, 10, 11)] == [1, 1, 1, 3, 3]


def test_at_and_after_the_end_of_the_run() -> None:
    run = RunLength("10ba")
    falling = sequence([1, cosine(alpha_f=0.5)], ["5ba"])
    assert at(falling, 10, run) == at(falling, 99, run) == 0.5
    for last in KINDS:  # evaluated after the last batch, where its part has length 0
        assert 0 <= at(sequence([1, last], ["10ba"]), 10, run) <= 2
    late = sequence([1, cosine()], ["20ba"])
    assert at(late, 10, run) == 1
    with pytest.raises(ValueError, match="t_max=.* is negative in this run: in a sequence, the milestone"):
        at(late, 20, run)


def test_a_part_whose_time_the_run_cannot_determine_is_an_error() -> None:
    run = RunLength("4ep")
    now = Timestamp(epoch=3, batch=30, run=run)
    with pytest.raises(UnitError, match=r"start=2ep and t_max=5ba have no unit in common"):
        sequence([1, linear(t_max="5ba")], ["2ep"])(now)
    assert sequence([1, linear(t_max="5ba")], ["2ep"])(now.replace(run=RunLength("4ep", 14))) == pytest.approx(0.6)
