"""Times, timestamps, events and predicates that are refused when they are made."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from purecompose.time import RunLength, Time, Timestamp, TimeUnit, UnitError, predicates
from purecompose.time.event import Event, named_time
from purecompose.time.predicates import after, before, between, every, on


MAKE: Any = Time  # without type checks, since the arguments are wrong on purpose
WRONG: Any = predicates
ONE = Time(1, "ep")
NONE: Any = None

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # Times
    (lambda: Time.parse("1.5ep"), TypeError, "expected a whole number"),
    (lambda: Time.parse("1e-9ba"), TypeError, "expected a whole number"),
    (lambda: Time.parse(" 3e4 "), ValueError, "has no unit; add one of ep, ba"),
    (lambda: MAKE.parse(5), TypeError, "got 5 (int)"),
    *[(lambda one=one: MAKE(one, "ep"), TypeError, "ep: expected an int, got") for one in (1.0, True, "1", None)],
    (lambda: MAKE("1", "dur"), TypeError, "dur: expected a finite number, got '1'"),
    (lambda: Time(math.nan, "dur"), ValueError, "finite"),
    (lambda: Time(math.inf, "dur"), ValueError, "finite"),
    (lambda: TimeUnit("epochs"), ValueError, "'epochs'; there are ep (epochs), ba (batches"),
    (lambda: TimeUnit(3), TypeError, "got 3 (int)"),
    *[
        (lambda one=one: MAKE.of(one), TypeError, "expected a Time or a string such as '90ep', got")
        for one in (None, [1, "ep"], (1, "ep"), True)
    ],
    (lambda: MAKE.of(5), TypeError, "give it a unit, as in '5ep'"),
    (lambda: MAKE.of(0.5), TypeError, "got 0.5 (float); a share of the run is '0.5dur'"),
    (lambda: named_time("often", "swa: every"), ValueError, "swa: every='often': cannot read the time 'often'; write"),
    (
        lambda: named_time(0.5, "ema: half_life", TimeUnit.BATCH, share="write smoothing="),
        TypeError,
        "ema: half_life=0.5: ba: expected an int, got 0.5 (float); write smoothing=0.5",
    ),
    (lambda: Time(5, "ep") < "3ba", UnitError, "5ep < 3ba: ep and ba cannot be converted without a run"),
    (lambda: ONE < 1.5, TypeError, "ep: expected an int, got 1.5"),
    (lambda: ONE < NONE, TypeError, "not supported between"),
    (lambda: ONE * NONE, TypeError, "unsupported operand"),
    # Lengths of runs and points of them
    (lambda: RunLength("0.5dur"), ValueError, "fraction of itself"),
    (lambda: RunLength("-1ep"), ValueError, "duration: expected a time > 0"),
    (lambda: RunLength(5), TypeError, "duration=5: expected a Time"),  # pyright: ignore[reportArgumentType]
    (lambda: RunLength(batches_per_epoch=0), ValueError, "batches_per_epoch: expected an int"),
    (lambda: Timestamp(batch=-1), ValueError, "batch: expected an int >= 0, got -1"),
    (lambda: Timestamp(epoch=True), TypeError, "epoch: expected an int"),
    (lambda: Timestamp(run="20ep"), TypeError, "run: expected a RunLength"),  # pyright: ignore[reportArgumentType]
    (lambda: Timestamp().advance(0, -1), ValueError, "counts >= 0"),
    (lambda: Timestamp().advance_by(-1), ValueError, "advance_by: batches"),
    (lambda: Timestamp().advance_by(2, samples=-1), ValueError, "counts >= 0"),
    # Events
    (lambda: Event("BATCH_ENDS"), ValueError, "'BATCH_ENDS'; did you mean 'batch_end'"),
    (lambda: Event("zzzz"), ValueError, "list(Event)"),
    *[(lambda one=one: Event(one), TypeError, "name of one, got") for one in (None, 3, ["init"])],
    # Predicates
    (lambda: on(), ValueError, "at least one event"),
    (lambda: WRONG.on(3), TypeError, "expected an Event"),
    (lambda: after(1.5), ValueError, "after: time=1.5: expected a share of the run in [0, 1], or a time from 0 on"),
    (lambda: after(math.nan), ValueError, "finite"),
    (lambda: before("soon"), ValueError, "before: time='soon': cannot read the time"),
    (lambda: between("1ep", "late"), ValueError, "between: end='late': cannot read the time"),
    (lambda: before("60sec"), ValueError, "before: time='60sec': wall-clock time is not part of a state"),
    (lambda: between(0.9, 0.5), ValueError, "between(0.9, 0.5): expected the start before the end"),
    (lambda: every(0), ValueError, "every(0): expected a positive interval"),
    (lambda: WRONG.every(2.5), TypeError, "write '2.5dur' for a fraction"),
    (lambda: every("60sec"), ValueError, "expected batches"),
    (lambda: every(2, in_epoch=True, since=0.5), ValueError, "in_epoch or since"),
    (lambda: every(2, since="60sec"), ValueError, "wall-clock"),
    *[
        (lambda make=make, one=one: make(one), TypeError, "expected a predicate or a function")
        for make in (WRONG.as_predicate, WRONG.ALWAYS.__and__)
        for one in (None, 3, "init", Event.INIT)
    ],
]


@pytest.mark.parametrize(("make", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_an_argument_is_refused(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make()
