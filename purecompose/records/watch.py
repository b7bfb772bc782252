"""The observer of a run's folder, which writes records and measures time."""

import dataclasses
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
from purecompose.records.reading import FINISHED, KILLED, RUNNING, Start
from purecompose.time.event import Event


# Seconds between two writes of the history, so that a killed run's is at most this old. A write syncs a file to disk.
_BETWEEN_NOTES = 10.0


class Watch:
    """The observer of a run's folder.

    Args:
        records: The records, called at every event.
        folder: The run's folder.
        trained: Description of the training so far.
        starts: The starts so far; a new one is added when the run begins.
        new_start: Function that returns a start, given the number of batches and the time.
        on_first_batch: Function that is called with the start after its first batch.
        waits: True if the folder is that of a complete run. Nothing is then written before there is a batch to train
            on, so a run that was already at its end leaves the folder unchanged.

    Attributes:
        trained: Description of the training, for the history.
        is_noted: True if the last attempt to write the history succeeded.
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
        waits: bool,
    ) -> None:
        self.trained = trained
        self._waits = waits
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
        """True if a run has begun."""
        return self._start is not None

    @property
    def seconds(self) -> float:
        """Seconds of wall-clock time since the run's start, without training that was lost before it continued."""
        return self._seconds_before + self._stopwatch.seconds

    @property
    def reached(self) -> dict[str, int]:
        """Progress of the run in batches, epochs, samples and, if there are any, tokens."""
        return dict(self._reached)

    def __call__(self, event: Event, state: State) -> None:
        """Handle an event."""
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
        """Write the history; if that fails, as on a full disk, there is one warning."""
        self._noted_at = time.monotonic()
        if self._start is not None:
            self._start.seconds = self._stopwatch.seconds
            self._start.evaluation_seconds = self._stopwatch.seconds - self._stopwatch.training_seconds
        try:
            write_json(
                self._path, {"trained": self.trained, "starts": [dataclasses.asdict(start) for start in self._starts]}
            )
            self.is_noted = True
        except OSError as error:
            self.is_noted = False
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._path} cannot be written: {error}. Training continues; this warning is shown once",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def flush(self) -> None:
        """Write all records so far, because the run may continue from the checkpoint that is written next."""
        self._records.flush()

    def end(self, outcome: str) -> None:
        """Close the records, and write the outcome to the history."""
        self._records.close()
        if outcome == FINISHED and self._records.num_unwritten:
            outcome = f"{FINISHED}, but {self._records.num_unwritten:,} records could not be written"
        if self._start is not None:
            self._start.outcome = outcome
        self.note()

    def _begin(self, event: Event, state: State) -> None:
        if self._start is not None and self._start.batches == 0:
            self._starts.remove(self._start)  # it was only an evaluation before the run
        elif self._start is not None:
            self._start.outcome = FINISHED  # another call of fit in the same folder
            self.note()
        self._records.flush()
        batch = state.timestamp.batch - (event is Event.BATCH_END)
        times = self._times() if self._starts else []
        for earlier in self._starts:
            if earlier.outcome == RUNNING:  # it was killed, so its records may be newer than its history
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
        """Return the batches in the records, with the wall-clock time of each."""
        with suppress(OSError, ValueError):  # no file yet, or a damaged one, for which `Records` raises
            name = "time/seconds"
            return [(one["batch"], one[name]) for one in read_records(self._records.path) if name in one]
        return []


def _seconds_at(batch: int, times: list[tuple[int, float]]) -> float:
    return max((seconds for at, seconds in times if at <= batch), default=0.0)


_BEGINS_WORK = frozenset({Event.BEFORE_DATALOADER, Event.BATCH_END})
_NOTED = frozenset({Event.BATCH_END, Event.EVAL_AFTER_ALL, Event.EPOCH_END})
