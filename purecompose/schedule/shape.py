"""Shapes: the curves behind schedules, which can start at any point of a run and be stretched."""

from __future__ import annotations

import dataclasses

from purecompose.schedule.axis import Moment
from purecompose.time import Time, Timestamp, TimeUnit


class Shape:
    """A multiplier at a moment; unlike a plain function of the timestamp, it may apply to a part of a run.

    The shapes are frozen dataclasses of numbers and times, so that schedules with equal settings are equal.
    """

    def __call__(self, timestamp: Timestamp) -> float:
        """Return the multiplier at a point of a run, where the schedule applies to the whole run."""
        return self.at(Moment(timestamp))

    def at(self, moment: Moment) -> float:
        """Return the multiplier at a moment."""
        raise NotImplementedError

    def times(self, *, with_warmup: bool) -> tuple[Time, ...]:
        """Return all times that the shape depends on, with or without those of warm-ups."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Stretched(Shape):
    """A shape whose absolute times are multiplied by these factors."""

    shape: Shape
    ratio: float
    warmup_ratio: float

    def at(self, moment: Moment) -> float:
        timestamp, start, whole, ratio, warmup_ratio = moment
        return self.shape.at(Moment(timestamp, start, whole, ratio * self.ratio, warmup_ratio * self.warmup_ratio))

    def times(self, *, with_warmup: bool) -> tuple[Time, ...]:
        return self.shape.times(with_warmup=with_warmup)


def stretched(shape: Shape, ratio: float, *, scale_warmup: bool) -> Shape:
    """Return the shape with its absolute times multiplied by a factor, or the shape itself if none would change."""
    if not any(time and time.unit is not TimeUnit.DURATION for time in shape.times(with_warmup=scale_warmup)):
        return shape
    inner, own = (shape.shape, shape) if isinstance(shape, Stretched) else (shape, Stretched(shape, 1.0, 1.0))
    ratios = own.ratio * ratio, own.warmup_ratio * (ratio if scale_warmup else 1.0)
    return inner if ratios == (1.0, 1.0) else Stretched(inner, *ratios)
