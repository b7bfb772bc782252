"""Predicates: truth tables, the laws of logic, and their simplification at an event and in a stretch of time."""

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from purecompose.time import RunLength, Time, Timestamp, predicates
from purecompose.time.event import Event
from purecompose.time.predicates import (
    ALWAYS,
    NEVER,
    Custom,
    Predicate,
    after,
    as_predicate,
    before,
    between,
    epoch_ends,
    every,
    on,
    through,
)
from tests.time.predicate_strategies import EVENTS, LATER_EVENTS, at_time, pairs, runs, walks


RUN = RunLength("4ep", batches_per_epoch=5)


def points(run: RunLength, count: int, samples: int = 8) -> list[Timestamp]:
    """Return the first points of a run, batch by batch."""
    found = [Timestamp(run=run)]
    while len(found) < count:
        found.append(found[-1].advance(samples))
    return found


def batches_of(predicate: Predicate, run: RunLength, count: int, event: Event = Event.BATCH_START) -> list[int]:
    """Return the numbers, from 1, of the batches in which a predicate holds at an event."""
    times = points(run, count + 1)
    times = times[1:] if event.sees_new_time else times[:-1]
    return [number for number, time in enumerate(times, 1) if predicate(event, at_time(time))]


def is_plain(event: Event, state: Any) -> bool:
    return event is Event.BATCH_START and state.timestamp.batch == 3


# Truth tables


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (ALWAYS, list(range(1, 21))),
        (NEVER, []),
        (after("15ba"), [16, 17, 18, 19, 20]),
        (after("3ep"), [16, 17, 18, 19, 20]),
        (after(0.75), [16, 17, 18, 19, 20]),
        (after("0.75dur"), [16, 17, 18, 19, 20]),
        (after("120sp"), [16, 17, 18, 19, 20]),
        (after(0), list(range(1, 21))),
        (after(1), []),
        (before("3ba"), [1, 2, 3]),
        (through("3ba"), [1, 2, 3, 4]),
        (through("3ep"), list(range(1, 17))),
        (through(0.75), list(range(1, 17))),
        (through("120sp"), list(range(1, 17))),
        (before(1), list(range(1, 21))),
        (between(0.1, 0.25), [3, 4, 5]),
        (between("1ep", "7ba"), [6, 7]),
        (between(0.5, 0.5), []),
        (every(1), list(range(1, 21))),
        (every(6), [6, 12, 18]),
        (every("1ep"), [5, 10, 15, 20]),
        (every("0.3dur"), [6, 12, 18]),
        (every("0.125dur"), [3, 5, 8, 10, 13, 15, 18, 20]),
        (every(2, in_epoch=True), [2, 4, 7, 9, 12, 14, 17, 19]),
        (every(5, in_epoch=True), [5, 10, 15, 20]),
        (every(6, since=0), [1, 7, 13, 19]),
        (every(6, since="2ep"), [10, 16]),
        (every("2ep", since="6ba"), [10, 20]),
        (every("1ep", since=0), [5, 10, 15, 20]),
        (every("0.125dur", since=0.4), [8, 11, 13, 16, 18]),
        (every(6, since="80sp"), [6, 12, 18]),
        (epoch_ends(), [5, 10, 15, 20]),
        (every(2) & ~every(4), [2, 6, 10, 14, 18]),
        (between(0.5, 0.9) & ~every(2), [11, 13, 15, 17]),
        (before("2ba") | after("19ba"), [1, 2, 20]),
        (on(Event.BATCH_START) & every(9), [9, 18]),
        (on(Event.BATCH_END) & every(9), []),
        (as_predicate(is_plain), [4]),
        (is_plain | every(9), [4, 9, 18]),
        (is_plain & after(0), [4]),
        (before("2ba") & is_plain, []),
    ],
    ids=repr,
)
def test_truth_table_of_a_run_of_four_epochs_of_five_batches(predicate: Predicate, expected: list[int]) -> None:
    assert batches_of(predicate, RUN, 20) == expected


@pytest.mark.parametrize("interval", [1, 2, 3, 6, "1ep", "0.3dur", "0.125dur"])
@pytest.mark.parametrize("in_epoch", [False, True])
def test_every_picks_the_same_batches_before_and_after_the_time_advances(interval: Any, in_epoch: bool) -> None:
    predicate = every(interval, in_epoch=in_epoch)
    before_advance = batches_of(predicate, RUN, 20, Event.AFTER_DATALOADER)
    assert before_advance == batches_of(predicate, RUN, 20, Event.BATCH_END)
    assert before_advance or in_epoch


@pytest.mark.parametrize("event", LATER_EVENTS)
def test_counting_predicates_do_not_hold_before_the_first_batch(event: Event) -> None:
    start = at_time(Timestamp(run=RUN))
    for predicate in (every(1), every(2), every("1ep"), every(5, in_epoch=True), epoch_ends()):
        assert not predicate(event, start)


def test_an_epoch_that_the_loader_ends_early_counts_as_ended() -> None:
    time = Timestamp(run=RUN).advance().advance().advance_epoch()
    assert epoch_ends()(Event.EPOCH_END, at_time(time))
    assert after("1ep")(Event.BATCH_START, at_time(time))
    assert not after("5ba")(Event.BATCH_START, at_time(time))


@pytest.mark.parametrize("event", Event)
def test_on_holds_only_at_its_events(event: Event) -> None:
    predicate = on("batch_end", Event.INIT)
    expected = event in (Event.BATCH_END, Event.INIT)
    assert predicate(event, None) is expected  # pyright: ignore[reportArgumentType]
    assert predicate.at(event) == (ALWAYS if expected else NEVER)


# Boundaries that floats miss


@pytest.mark.parametrize(("fraction", "total"), [(0.1, 300), (0.07, 100), (0.29, 100), (0.3, 10), (0.57, 1000)])
def test_known_traps_of_float_arithmetic(fraction: float, total: int) -> None:
    turn = round(fraction * total)
    run = RunLength(f"{total}ba")
    for batch in (turn - 1, turn):
        state = at_time(Timestamp(batch=batch, run=run))
        assert after(fraction)(Event.BATCH_START, state) is (batch == turn)
        assert before(fraction)(Event.BATCH_START, state) is (batch < turn)


@given(st.integers(1, 999), st.sampled_from([10, 30, 100, 999, 1000]), st.integers(1, 5000))
def test_a_fraction_turns_at_the_batch_that_exact_arithmetic_names(part: int, whole: int, total: int) -> None:
    part = min(part, whole)
    turn = math.ceil(Fraction(part, whole) * total)
    run, predicate = RunLength(f"{total}ba"), after(part / whole)
    answers = [
        predicate(Event.BATCH_START, at_time(Timestamp(batch=batch, run=run)))
        for batch in (max(turn - 1, 0), turn, turn + 1)
    ]
    assert answers == [turn == 0, True, True]


@given(st.sampled_from([3, 7, 10, 20, 30, 100]), st.integers(1, 200))
def test_a_fraction_as_interval_picks_the_batches_that_exact_arithmetic_names(parts: int, total: int) -> None:
    length = Fraction(total, parts)
    expected = sorted({math.ceil(i * length) for i in range(1, parts + 1)})
    run, predicate = RunLength(f"{total}ba"), every(Time(1 / parts, "dur"))
    for event, shift in ((Event.BATCH_START, 1), (Event.BATCH_END, 0)):
        found = [
            batch + shift
            for batch in range(1 - shift, total + 1 - shift)
            if predicate(event, at_time(Timestamp(batch=batch, run=run)))
        ]
        assert found == expected


# Laws


@given(st.data())
def test_every_tree_evaluates_to_its_meaning(data: st.DataObject) -> None:
    run = data.draw(runs())
    predicate, meaning = data.draw(pairs(run))
    for time in data.draw(walks(run)):
        for event in EVENTS:
            assert predicate(event, at_time(time)) is meaning(event, time)


@given(st.data())
def test_the_event_may_be_given_first(data: st.DataObject) -> None:
    run = data.draw(runs())
    predicate = data.draw(pairs(run)).predicate
    for time in data.draw(walks(run, max_size=8)):
        for event in EVENTS:
            assert predicate.at(event)(event, at_time(time)) is predicate(event, at_time(time))


@given(st.data())
def test_logic(data: st.DataObject) -> None:
    run = data.draw(runs())
    p, q, r = (data.draw(pairs(run, max_leaves=3)).predicate for _ in range(3))
    equal = [
        (~(p & q), ~p | ~q),
        (~(p | q), ~p & ~q),
        (~~p, p),
        (p & q, q & p),
        ((p & q) & r, p & (q & r)),
        (p & (q | r), (p & q) | (p & r)),
        (p & ALWAYS, p),
        (p | NEVER, p),
        (p & NEVER, NEVER),
        (p | ALWAYS, ALWAYS),
        (p & ~p, NEVER),
        (p | ~p, ALWAYS),
    ]
    for time in data.draw(walks(run, max_size=6)):
        for event in EVENTS:
            for first, second in equal:
                assert first(event, at_time(time)) is second(event, at_time(time))


def test_units_and_zeros_vanish_from_the_tree() -> None:
    p = every(3)
    assert p & ALWAYS == p == ALWAYS & p
    assert p | NEVER == p == NEVER | p
    assert p & NEVER is NEVER is NEVER & p
    assert p | ALWAYS == ALWAYS == ALWAYS | p
    assert ~~p is p
    assert (~ALWAYS, ~NEVER) == (NEVER, ALWAYS)


@settings(max_examples=100)
@given(st.data())
def test_the_simplified_predicate_agrees_throughout_a_stretch(data: st.DataObject) -> None:
    run = data.draw(runs())
    predicate = data.draw(pairs(run)).predicate
    walk = data.draw(walks(run))
    for event in EVENTS:
        for start in walk[:: data.draw(st.integers(1, 4))]:
            left, end = predicate.at(event).during(start)
            assert end > start.batch
            for time in walk:
                if time.epoch == start.epoch and start.batch <= time.batch < end:
                    assert left(event, at_time(time)) is predicate(event, at_time(time))


def test_is_timed_is_false_for_predicates_that_read_more_than_time() -> None:
    plain = as_predicate(is_plain)
    for predicate in (ALWAYS, on("init"), after(0.5), every(2), epoch_ends(), ~(on("init") | before(0.2))):
        assert predicate.is_timed
        assert not (predicate & plain).is_timed or predicate == NEVER
    for predicate in (plain, ~plain, every(2) & plain, plain | on("init")):
        assert not predicate.is_timed
    assert (on("init") & plain).at(Event.BATCH_END) is NEVER


# Printing


@given(st.data())
def test_the_repr_evaluates_to_a_predicate_of_the_same_meaning(data: st.DataObject) -> None:
    run = data.draw(runs())
    predicate = data.draw(pairs(run)).predicate
    names = {**vars(predicates), **Event.__members__, "always": ALWAYS, "never": NEVER}
    again = eval(repr(predicate), names)
    for time in data.draw(walks(run, max_size=6)):
        for event in EVENTS:
            assert again(event, at_time(time)) is predicate(event, at_time(time))


# Plain functions and errors


def test_plain_functions_become_predicates() -> None:
    plain = as_predicate(is_plain)
    assert isinstance(plain, Custom)
    assert as_predicate(plain) is plain
    assert as_predicate(is_plain) == plain
    assert plain.at(Event.BATCH_END) is plain


@pytest.mark.parametrize(
    ("predicate", "run", "text"),
    [
        (epoch_ends(), RunLength("9ba"), "batches_per_epoch"),
        (every("1ep"), RunLength("9ba"), r"every\('1ep'\) cannot be counted in batches .* batches_per_epoch"),
        (every("0.1dur"), RunLength(), "duration"),
        (every("0.1dur"), RunLength("90sp"), "duration"),
        (after(0.5), RunLength(), r"State\.create\(duration="),
    ],
)
def test_questions_that_a_run_cannot_answer_are_errors_on_evaluation(
    predicate: Predicate, run: RunLength, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        predicate(Event.BATCH_START, at_time(Timestamp(run=run)))
