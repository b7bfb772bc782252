"""Shared parts of methods that average weights: means, and the times at which they are updated."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from purecompose._support.device import as_scalar
from purecompose.core.state import State
from purecompose.optim.guarded import chosen
from purecompose.schedule import Schedule
from purecompose.time import Time, TimeLike, Timestamp, TimeUnit, predicates
from purecompose.time.predicates import ALWAYS, Predicate, after
from purecompose.time.timestamp import checked_interval
from purecompose.time.units import named_point


Slot = TypeVar("Slot", bound=Any)

_KNOWN = (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION)
"""Units for which the host knows the averaging steps in advance; for other units the step decides."""


def between(low: Mapping[str, Tensor], high: Mapping[str, Tensor], share: float | Tensor) -> dict[str, Tensor]:
    """Return `low + share * (high - low)` element by element, in the dtypes of `low`; exact for shares of 0 and 1.

    The share, a number or a 0-d tensor, is rounded to each dtype as late as possible: pass a small share in float64.

    Raises:
        KeyError: `high` lacks a name.
    """
    kinds = dict.fromkeys((value.dtype, value.device) for value in low.values())
    shares = {kind: as_scalar(share, *kind) for kind in kinds}
    return {
        name: torch.lerp(value, high[name].to(value.dtype), shares[value.dtype, value.device])
        for name, value in low.items()
    }


# Times


def checked_period(every: Any, where: str) -> TimeLike:
    """Require an interval between averages, positive and not in seconds."""
    return checked_interval(every, where, TimeUnit.BATCH)


def checked_every(every: Any, where: str) -> TimeLike | None:
    """Require an interval between averages, or `None` for every batch."""
    return None if every is None else checked_period(every, where)


Point: TypeAlias = Annotated[TimeLike | float, named_point]
Period: TypeAlias = Annotated[TimeLike, checked_period]
Every: TypeAlias = Annotated[TimeLike | None, checked_every]


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Times at which weights are averaged: at regular intervals, from a start on."""

    length: Time
    starts_anew: bool
    """True to average in the first batch after the start and count intervals from it, else from the run's beginning."""
    measure: "Measure | None"
    """Measure by which the step counts examples or tokens; `match` is then true in every batch."""
    match: Predicate

    @classmethod
    def of(cls, length: TimeLike | None, start: Time, *, starts_anew: bool) -> "Intervals":
        """Return intervals, of one batch by default, from a point of the run on.

        Args:
            length: The interval; see `checked_every`.
            start: The point of the run.
            starts_anew: True to count from this point, else from the run's beginning.
        """
        time = Time.of("1ba" if length is None else length, TimeUnit.BATCH)
        is_known = time.unit in _KNOWN
        match = predicates.every(time, since=(start or "0ba") if starts_anew else None) if is_known else ALWAYS
        # A start at the beginning is left out: as a share of the run it would require the run's length.
        match = match & after(start) if start else match
        return cls(time, starts_anew, None if is_known else measure(time), match)

    @property
    def setting(self) -> "str | Measure":
        """The interval, as stored in an algorithm's `config`."""
        return str(self.length) if self.measure is None else self.measure

    def if_due(self, state: State, new: Slot, old: Slot) -> Slot:
        """Return `new`, which includes the batch's weights, if they are averaged in this batch; else `old`.

        Both are slots with the fields `averages` and `turn`, the `counters` at the end of the last interval.
        """
        if self.measure is None:
            return new
        now = counters(state)
        share = self.measure.between(state, old.turn, now)
        # The tolerance is for rounded ends of intervals. A negative share means that the counters started again,
        # in another run from these weights.
        whole, is_first = torch.floor(share + 1e-9), share < 0
        if self.starts_anew:
            is_first = is_first | (old.averages.num == 0)
        # Count from the exact end of the interval, not from the batch in which it ended, which may be a little later.
        turn = torch.lerp(old.turn, now, torch.where(share > 0, whole / share, 0.0))
        return chosen(is_first | (whole >= 1), new._replace(turn=torch.where(is_first, now, turn)), old)


_COUNTERS = (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.SAMPLE, TimeUnit.TOKEN)


def counters(state: State) -> Tensor:
    """Return the numbers of batches, epochs, examples and tokens so far: float64 of shape (4,)."""
    clock = state.clock
    assert clock is not None, "the clock is set during a step"
    return torch.stack([clock.batch, clock.epoch, clock.sample, clock.token]).double()


@dataclasses.dataclass(frozen=True)
class Measure:
    """A time as the unit of measurement in traced code, given by two numbers that the host passes in every step.

    Slots store all `counters`, so that they remain valid if a run is continued with another length, or with a known
    length of epochs where it was unknown before.
    """

    time: Time
    counter: Schedule
    """Index of the counter: batches if the time is a known number of batches, otherwise the time's unit."""
    length: Schedule
    """Length of the time in units of this counter."""

    def __repr__(self) -> str:
        return repr(str(self.time))

    def between(self, state: State, before: Tensor, now: Tensor) -> Tensor:
        """Return the number of intervals between two sets of counters, 0-d float64."""
        counter, length = (
            as_scalar(state.scalar(it), torch.float64, state.device) for it in (self.counter, self.length)
        )
        is_it = torch.arange(len(_COUNTERS), device=state.device) == counter
        return torch.where(is_it, now - before, 0.0).sum() / length


def measure(time: Time) -> Measure:
    """Return the measure of a time that is positive and not in seconds.

    Example:
        >>> two = measure(Time.of("2ep"))
        >>> two.counter(Timestamp(batch=30, epoch=3)), two.length(Timestamp(batch=30, epoch=3))
        (1.0, 2.0)
    """
    words = repr(str(time))
    return Measure(time, Schedule(_Counted(time, 0), words), Schedule(_Counted(time, 1), words))


def gone(timestamp: Timestamp, time: Time) -> float:
    """Return the number of intervals, with fractions, before a point of a run; they are positive and not in seconds.

    Raises:
        ValueError: A share of a run without a duration, or with one in seconds.
    """
    unit, length = _counted(timestamp, time)
    return timestamp.get(unit) / length


def _counted(timestamp: Timestamp, time: Time) -> tuple[TimeUnit, float]:
    """Return the unit in which a time is counted, and its length in this unit."""
    run = timestamp.run
    in_batches = run.in_batches(time)
    if in_batches is not None:
        return TimeUnit.BATCH, in_batches
    unit, length = time.unit, time.value
    if unit is TimeUnit.DURATION:
        if run.duration is None or run.duration.unit is TimeUnit.SECOND:
            has = "no duration" if run.duration is None else f"a duration of {run.duration}"
            raise ValueError(f"{time} is a share of a run that has {has}; give State.create one in batches or epochs")
        unit, length = run.duration.unit, length * run.duration.value
    return unit, length


@dataclasses.dataclass(frozen=True)
class _Counted:
    time: Time
    index: int

    def __call__(self, timestamp: Timestamp) -> float:
        unit, length = _counted(timestamp, self.time)
        return float((_COUNTERS.index(unit), length)[self.index])
