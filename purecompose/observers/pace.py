"""The recent speed of a run and its remaining time."""

from collections import deque
from typing import NamedTuple

from purecompose.observers.stopwatch import Stopwatch
from purecompose.time import Timestamp


class _Reading(NamedTuple):
    seconds: float
    batch: int
    sample: int
    token: int
    elapsed: float | None


class Pace:
    """Rates over the most recent readings, so that they adapt when the speed of the run changes."""

    def __init__(self, stopwatch: Stopwatch, num_readings: int) -> None:
        self._stopwatch = stopwatch
        self._readings: deque[_Reading] = deque(maxlen=num_readings)

    def read(self, timestamp: Timestamp) -> None:
        """Take a reading."""
        now = timestamp
        self._readings.append(
            _Reading(self._stopwatch.training_seconds, now.batch, now.sample, now.token, now.elapsed())
        )

    def clear(self) -> None:
        """Forget all readings."""
        self._readings.clear()

    def per_second(self, name: str) -> float | None:
        """Return the rate of `batch`, `sample` or `token` per second; None before the first progress."""
        if len(self._readings) < 2:
            return None
        first, last = self._readings[0], self._readings[-1]
        seconds, moved = last.seconds - first.seconds, getattr(last, name) - getattr(first, name)
        return moved / seconds if seconds > 0 and moved > 0 else None

    def seconds_left(self) -> float | None:
        """Return the remaining seconds at this rate, if evaluations take the same share of the time as so far.

        None in a run without a duration, and before the first progress.
        """
        if len(self._readings) < 2:
            return None
        first, last = self._readings[0], self._readings[-1]
        if first.elapsed is None or last.elapsed is None or not last.elapsed > first.elapsed:
            return None
        training = self._stopwatch.training_seconds
        stretch = self._stopwatch.seconds / training if training > 0 else 1.0
        left = max(1.0 - last.elapsed, 0.0)
        return left * (last.seconds - first.seconds) / (last.elapsed - first.elapsed) * stretch
