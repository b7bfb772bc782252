"""Intervals at which an observer acts: a number of batches, epochs, samples or tokens, or a fraction of the run."""

from purecompose.time import TimeLike, Timestamp, TimeUnit
from purecompose.time.timestamp import checked_interval, has_passed


class Due:
    """A predicate for the batches in which a multiple of an interval is passed.

    Epochs count at their last batch, or at the next batch if their length is not known.

    Example:
        >>> due = Due("2ba", "every")
        >>> due.start(Timestamp())
        >>> [due(Timestamp(batch=batch)) for batch in (1, 2, 3, 4)]
        [False, True, False, True]
    """

    def __init__(self, every: TimeLike | int, where: str) -> None:
        self._interval = checked_interval(every, where, TimeUnit.BATCH)
        self._before: Timestamp | None = None

    def start(self, timestamp: Timestamp) -> None:
        """Count from this point on."""
        self._before = timestamp

    def __call__(self, timestamp: Timestamp) -> bool:
        """Return whether a multiple was passed since the last call, given the time after a batch."""
        before, self._before = self._before or batch_before(timestamp), timestamp
        return has_passed(self._interval, before, timestamp)


def batch_before(timestamp: Timestamp) -> Timestamp:
    """Estimate the time before a batch in loops that call an observer only at BATCH_END."""
    if timestamp.batch <= 1:
        return Timestamp(run=timestamp.run)
    return timestamp.replace(batch=timestamp.batch - 1)
