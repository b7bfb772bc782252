"""The observer of a run's folder: writes records and measures time."""

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from purecompose.core.state import State
from purecompose.observers import Records, Stopwatch, read_records
from purecompose.records.layout import HISTORY, write_json
from purecompose.records.starts import KILLED, RUNNING, Start
from purecompose.time.event import Event


__all__ = ["Watch"]

# How long a killed run's history may be out of date, in seconds. A note costs a file that is forced onto the disk.
_BETWEEN_NOTES = 10.0


class Watch:
    """The observer of a run's folder.

    Args:
        records: The records, called at every event.
        folder: The run's folder.
        trained: What was trained so far.
        starts: The starts so far; a new one is added where the run begins.
        new_start: Makes a start from the number of batches and the time.
        on_first_batch: Called with the start when its first batch has been trained on.
        goes_on: Whether the folder holds an earlier part of the run. Nothing is written then before there is a batch to
            train on: a run that was at its end already leaves the folder as it is.

    Attributes:
        trained: What is trained, for the history.
        is_noted: Whether the history was written the last time.
    """

    def __init__(
        self,
        records: Records,
        folder: Path,
        trained: dict[str, Any],
        starts: list[Start],
        new_start: Callable[[int, str], Start],
        on_first_batch: Callable[[Start], None],
        *,
        goes_on: bool,
    ) -> None:
        self.trained = trained
        self._waits = goes_on
        self.is_noted = True
        self._records, self._path, self._starts = records, folder / HISTORY, starts
        self._new_start, self._on_first_batch = new_start, on_first_batch
        self._has_trained = False
        self._stopwatch = Stopwatch()
        self._start: Start | None = None
        self._reached: dict[str, int] = {}
        self._seconds_before = 0.0
        self._noted_at = time.monotonic()
        self._has_warned = False

    @property
    def has_begun(self) -> bool:
        """Whether a run has been seen."""
        return self._start is not None

    @property
    def seconds(self) -> float:
        """Wall-clock time from the run's first batch, without what was trained in vain before it continued."""
        return self._seconds_before + self._stopwatch.seconds

    @property
    def reached(self) -> dict[str, int]:
        """How far the run has come, in batches, epochs, samples and, where there are any, tokens."""
        return dict(self._reached)

    def __call__(self, event: Event, state: State) -> None:
        """Take an event."""
        if self._waits and event not in _BEGINS_WORK:
            return
        self._waits = False
        if self._start is None or event is Event.FIT_START:
            self._begin(event, state)
        assert self._start is not None
        if event is Event.BATCH_END and not self._has_trained:
            self._has_trained = True
            self._on_first_batch(self._start)
        self._stopwatch(event, state)
        self._records(event, state)
        if not event.is_eval:
            now = state.timestamp
            self._reached = {"batches": now.batch, "epochs": now.epoch, "samples": now.sample}
            if now.token:
                self._reached["tokens"] = now.token
            self._start.until = now.batch
        if event in _NOTED and time.monotonic() - self._noted_at >= _BETWEEN_NOTES:
            self.note()

    def note(self) -> None:
        """Write the history; a disk that is full brings one warning."""
        self._noted_at = time.monotonic()
        if self._start is not None:
            self._start.seconds = self._stopwatch.seconds
            self._start.evaluation_seconds = self._stopwatch.seconds - self._stopwatch.training_seconds
        try:
            write_json(self._path, {"trained": self.trained, "starts": [start.to_plain() for start in self._starts]})
            self.is_noted = True
        except OSError as error:
            self.is_noted = False
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._path} cannot be written: {error}. Training continues; this is said once",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def flush(self) -> None:
        """Write down all records so far: a checkpoint is about to be written, from which the run may continue."""
        self._records.flush()

    def end(self, outcome: str) -> None:
        """Close the records, and note how the run ended."""
        self._records.close()
        if self._start is not None:
            self._start.outcome = outcome
        self.note()

    def _begin(self, event: Event, state: State) -> None:
        if self._start is not None and self._start.batches == 0:
            self._starts.remove(self._start)  # an evaluation before the run
        elif self._start is not None:
            self._start.outcome = "finished"  # another call of fit in the same folder
            self.note()
        self._records.flush()
        batch = state.timestamp.batch - (event is Event.BATCH_END)
        times = self._times() if self._starts else []
        for earlier in self._starts:
            if earlier.outcome == RUNNING:  # it had no time to say more than its records do
                earlier.outcome, last = KILLED, times[-1] if times else (0, 0.0)
                earlier.until = max(earlier.until, last[0])
                earlier.seconds = max(earlier.seconds, last[1] - _seconds_at(earlier.batch, times))
        self._seconds_before = _seconds_at(batch, times)
        self._start = self._new_start(batch, datetime.now().astimezone().isoformat(timespec="seconds"))
        self._starts.append(self._start)
        self._has_trained = False
        self._stopwatch = Stopwatch()
        self.note()

    def _times(self) -> list[tuple[int, float]]:
        """Return from the records the numbers of batches and the wall-clock times at which they were trained on."""
        with suppress(OSError, ValueError):  # no file yet, or one that the records themselves will complain of
            name = "time/seconds"
            return [(one["batch"], one[name]) for one in read_records(self._records.path) if name in one]
        return []


def _seconds_at(batch: int, times: list[tuple[int, float]]) -> float:
    return max((seconds for at, seconds in times if at <= batch), default=0.0)


_BEGINS_WORK = frozenset({Event.BEFORE_DATALOADER, Event.BATCH_END})
_NOTED = frozenset({Event.BATCH_END, Event.EVAL_AFTER_ALL, Event.EPOCH_END})
