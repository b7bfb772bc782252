"""The duration of a run, with evaluation counted separately."""

import time
from collections import deque
from collections.abc import Callable

from purecompose.core.state import State
from purecompose.time import Timestamp
from purecompose.time.event import Event


class Stopwatch:
    """An observer that measures wall-clock time and batches from FIT_START on; a new FIT_START starts it again.

    It waits for the device at the beginning and end of evaluations and at FIT_END, so that training and evaluation are
    separated correctly, but never at a batch.

    Example:
        >>> watch = Stopwatch()
        >>> watch.seconds, watch.batches
        (0.0, 0)
    """

    def __init__(self) -> None:
        self._started: float | None = None
        self._now = 0.0
        self._evaluation_began: float | None = None
        self._evaluating = 0.0
        self._first_batch = self._batch = 0

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last event, evaluations included."""
        return 0.0 if self._started is None else self._now - self._started

    @property
    def training_seconds(self) -> float:
        """Seconds from the start to the last event, without evaluations."""
        current = 0.0 if self._evaluation_began is None else self._now - self._evaluation_began
        return self.seconds - self._evaluating - current

    @property
    def batches(self) -> int:
        """Number of batches trained on since the start."""
        return self._batch - self._first_batch

    @property
    def batches_per_second(self) -> float:
        """Mean rate of training, without evaluations; 0 before any time has passed."""
        seconds = self.training_seconds
        return self.batches / seconds if seconds > 0 else 0.0

    def __call__(self, event: Event, state: State) -> None:
        """Note the time of an event; any first event starts the watch."""
        if self._started is None or event is Event.FIT_START:
            self.__init__()
            self._started = time.monotonic()
            is_batch_over = event is Event.BATCH_END
            self._first_batch = state.timestamp.batch - is_batch_over
        if event in _WAITS:
            state.key.sum().item()
        self._now, self._batch = time.monotonic(), state.timestamp.batch
        if event is Event.EVAL_BEFORE_ALL:
            self._evaluation_began = self._now
        elif event is Event.EVAL_AFTER_ALL and self._evaluation_began is not None:
            self._evaluating += self._now - self._evaluation_began
            self._evaluation_began = None


# Reading any value of the state waits for the work queued on the device.
_WAITS = frozenset({Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL, Event.FIT_END})


class Pace:
    """Rates over the most recent readings, so that they adapt when the speed of the run changes."""

    def __init__(self, stopwatch: Stopwatch, num_readings: int) -> None:
        self._stopwatch = stopwatch
        # Seconds of training, and the time of the run.
        self._readings: deque[tuple[float, Timestamp]] = deque(maxlen=num_readings)

    def read(self, timestamp: Timestamp) -> None:
        """Take a reading."""
        self._readings.append((self._stopwatch.training_seconds, timestamp))

    def clear(self) -> None:
        """Forget all readings."""
        self._readings.clear()

    def per_second(self, name: str) -> float | None:
        """Return the rate of `batch`, `sample` or `token` per second; None before the first progress."""
        return self._rate(lambda timestamp: getattr(timestamp, name))

    def seconds_left(self) -> float | None:
        """Return the remaining seconds at this rate, if evaluations take the same share of the time as so far.

        None in a run without a duration, and before the first progress.
        """
        rate = self._rate(Timestamp.elapsed)
        if rate is None:
            return None
        training, left = self._stopwatch.training_seconds, 1.0 - (self._readings[-1][1].elapsed() or 0.0)
        return max(left, 0.0) / rate * (self._stopwatch.seconds / training if training > 0 else 1.0)

    def _rate(self, progress: Callable[[Timestamp], float | None]) -> float | None:
        if len(self._readings) < 2:
            return None
        (began, first), (ended, last) = self._readings[0], self._readings[-1]
        before, after = progress(first), progress(last)
        if before is None or after is None or not (after > before and ended > began):
            return None
        return (after - before) / (ended - began)
