"""Hypothesis strategies for the tests of matching: walks through time, predicates with their meanings.

A predicate is drawn together with a second opinion, a plain function `(event, timestamp) -> bool` that is
written from the documented meaning with exact arithmetic and shares no code with the library.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from hypothesis import strategies as st

from purecompose.core.program import events_in
from purecompose.loop import loop_events
from purecompose.time import RunLength, Timestamp
from purecompose.time.event import Event
from purecompose.time.predicates import Predicate, after, before, between, epoch_ends, every, on, through


__all__ = ["EVENTS", "LATER_EVENTS", "Pair", "at_time", "pairs", "predicates", "runs", "walks"]

LATER_EVENTS = (Event.BATCH_END, Event.EPOCH_END)
EVENTS = (Event.INIT, Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.EVAL_START, *LATER_EVENTS)

_SHORT = RunLength("1ep", batches_per_epoch=1)
Meaning = Callable[[Event, Timestamp], bool]


@st.composite
def runs(draw: st.DrawFn) -> RunLength:
    """Draw lengths of runs, with and without known epochs, which shrink to one epoch."""
    unit = draw(st.sampled_from(["ep", "ba", "sp", "tok"]))
    length = draw(st.integers(1, 60 if unit in ("sp", "tok") else 12))
    return RunLength(f"{length}{unit}", draw(st.none() | st.integers(1, 5)))


class Pair(NamedTuple):
    """A predicate and its intended meaning."""

    predicate: Predicate
    meaning: Meaning


class _AtTime(NamedTuple):
    timestamp: Timestamp


def at_time(timestamp: Timestamp) -> Any:
    """Return an object with the part of a state that predicates about time read."""
    return _AtTime(timestamp)


@st.composite
def walks(draw: st.DrawFn, run: RunLength, *, max_size: int = 25) -> list[Timestamp]:
    """Draw the points of a walk: mostly batch by batch, sometimes an epoch that ends early."""
    moves = st.sampled_from(["batch"] * 8 + ["epoch"])
    points = [Timestamp(run=run)]
    for move in draw(st.lists(moves, min_size=1, max_size=max_size)):
        if move == "batch":
            counts = draw(st.tuples(st.integers(0, 9), st.integers(0, 5)))
            points.append(points[-1].advance(*counts))
        else:
            points.append(points[-1].advance_epoch())
    return points


def pairs(run: RunLength, *, max_leaves: int = 6) -> st.SearchStrategy[Pair]:
    """Return a strategy for predicate trees that have an answer in this run."""
    leaves = [_on(), _points(), _ends(), _fractions(run), _counts(run)]
    if run.batches_per_epoch is not None:
        leaves += [_epoch_ends(run), _counts(run, in_epoch=True)]
    return st.recursive(st.one_of(leaves), _combinations, max_leaves=max_leaves)


def predicates(run: RunLength = _SHORT) -> st.SearchStrategy[Predicate]:
    """Return a strategy for predicates about events of training that have an answer in this run."""
    return pairs(run).map(lambda pair: pair.predicate & on(*events_in(loop_events)))


def _combinations(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    both = st.builds(
        lambda p, q: Pair(p.predicate & q.predicate, lambda e, t: p.meaning(e, t) and q.meaning(e, t)), inner, inner
    )
    either = st.builds(
        lambda p, q: Pair(p.predicate | q.predicate, lambda e, t: p.meaning(e, t) or q.meaning(e, t)), inner, inner
    )
    return both | either | st.builds(_negation, inner)


def _negation(pair: Pair) -> Pair:
    return Pair(~pair.predicate, lambda event, time: not pair.meaning(event, time))


def _on() -> st.SearchStrategy[Pair]:
    events = st.sets(st.sampled_from(EVENTS), min_size=1, max_size=3)
    return events.map(lambda chosen: Pair(on(*chosen), lambda event, time: event in chosen))


_COUNTERS = {"ba": "batch", "ep": "epoch", "sp": "sample", "tok": "token"}


def _points() -> st.SearchStrategy[Pair]:
    def build(unit: str, value: int, is_after: bool) -> Pair:
        meant = Pair(after(f"{value}{unit}"), lambda _, time: getattr(time, _COUNTERS[unit]) >= value)
        return meant if is_after else Pair(before(f"{value}{unit}"), _negation(meant).meaning)

    return st.builds(build, st.sampled_from(sorted(_COUNTERS)), st.integers(0, 12), st.booleans())


def _ends() -> st.SearchStrategy[Pair]:
    """Return a strategy for points that include themselves but not the batches of the epoch they start."""

    def build(unit: str, value: int) -> Pair:
        def meaning(event: Event, time: Timestamp) -> bool:
            del event
            counter = getattr(time, _COUNTERS[unit])
            return counter < value if unit == "ep" and time.batch_in_epoch else counter <= value

        return Pair(through(f"{value}{unit}"), meaning)

    return st.builds(build, st.sampled_from(sorted(_COUNTERS)), st.integers(0, 12))


def _fractions(run: RunLength) -> st.SearchStrategy[Pair]:
    """Return a strategy for fractions of the run in twentieths, which floats cannot represent."""
    duration = run.duration
    assert duration is not None
    counter, total = _COUNTERS[duration.unit.value], Fraction(duration.value)
    batches = _batches_in(run)
    if batches is not None:
        counter, total = "batch", batches

    def build(start: int, end: int) -> Pair:
        start, end = min(start, end), max(start, end)
        first, last = total * Fraction(start, 20), total * Fraction(end, 20)
        return Pair(between(start / 20, end / 20), lambda _, time: first <= getattr(time, counter) < last)

    return st.builds(build, st.integers(0, 20), st.integers(0, 20))


def _batches_in(run: RunLength) -> Fraction | None:
    duration, epoch = run.duration, run.batches_per_epoch
    assert duration is not None
    if duration.unit.value == "ba":
        return Fraction(duration.value)
    if duration.unit.value == "ep" and epoch is not None:
        return Fraction(duration.value) * epoch
    return None


def _counts(run: RunLength, *, in_epoch: bool = False) -> st.SearchStrategy[Pair]:
    total, epoch = _batches_in(run), run.batches_per_epoch
    lengths: list[tuple[Any, Fraction]] = [(n, Fraction(n)) for n in (1, 2, 3, 5)]
    if epoch is not None:
        lengths += [(f"{n}ep", Fraction(n * epoch)) for n in (1, 2)]
    if total is not None:
        lengths += [(f"{n / 20}dur", total * n / 20) for n in (1, 3, 7, 10)]

    def build(chosen: tuple[Any, Fraction], since: int | None) -> Pair:
        interval, length = chosen
        first = length
        if since is not None:
            one = (epoch or 0) if isinstance(interval, str) and interval.endswith("ep") else 1
            first = Fraction(max(one, -(-since // one) * one))

        def meaning(event: Event, time: Timestamp) -> bool:
            number = _number(event, time, in_epoch)
            return number > 0 and number >= first and (number - first) // length > (number - 1 - first) // length

        options = {} if since is None else {"since": f"{since}ba"}
        return Pair(every(interval, in_epoch=in_epoch, **options), meaning)

    return st.builds(build, st.sampled_from(lengths), st.none() if in_epoch else st.none() | st.integers(0, 12))


def _number(event: Event, time: Timestamp, in_epoch: bool) -> int:
    """Return the number, from 1, of the batch that an event belongs to."""
    if event not in LATER_EVENTS:
        return 1 + (time.batch_in_epoch if in_epoch else time.batch)
    if in_epoch and time.batch and not time.batch_in_epoch:
        return time.run.batches_per_epoch or 0
    return time.batch_in_epoch if in_epoch else time.batch


def _epoch_ends(run: RunLength) -> st.SearchStrategy[Pair]:
    def meaning(event: Event, time: Timestamp) -> bool:
        if event in LATER_EVENTS:
            return time.batch > 0 and time.batch_in_epoch == 0
        return time.batch_in_epoch == (run.batches_per_epoch or 0) - 1

    return st.builds(lambda: Pair(epoch_ends(), meaning))
