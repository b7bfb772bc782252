"""The checkpoints of a run: when they are written, and which are removed."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from purecompose._support.messages import warn
from purecompose._support.urls import is_remote, with_urls
from purecompose.core.state import State
from purecompose.errors import CheckpointWarning
from purecompose.run.saving import folder as disk, together
from purecompose.run.saving.checkpoint import Snapshot, snapshot
from purecompose.run.saving.extra import EXTRA, POSITION, pack
from purecompose.run.saving.leaves import leaves_of
from purecompose.run.saving.remote import Mirror
from purecompose.run.saving.resuming import Resumed
from purecompose.run.saving.room import Room, is_disk_full
from purecompose.run.saving.settings import Checkpoints, rating_of, surplus
from purecompose.run.saving.tensors import library
from purecompose.run.saving.together import Writers, cause_of, in_all, mirror_of, writers_of
from purecompose.time import Time, Timestamp, TimeUnit
from purecompose.time.timestamp import has_passed


def newest(folder: Path | str) -> Path | None:
    """Return the newest checkpoint in a folder, by its index; `None` if there is none.

    Args:
        folder: A folder of checkpoints.

    Raises:
        ValueError: The folder is a URL.

    Example:
        >>> import tempfile
        >>> newest(tempfile.mkdtemp()) is None
        True
    """
    if is_remote(folder):
        raise ValueError(f"newest: {folder} is in remote storage: give the folder of `with mirror(url) as folder`")
    found, _ = disk.all_in(Path(folder))
    return found[0].path if found else None


class Keeper:
    """The writer of a run's checkpoints, one for each call of `fit`.

    Attributes:
        settings: Settings of the checkpoints.
        folder: Absolute path of the folder, valid after a change of the working directory; if it is in remote storage,
            of its local copy, from `open` on.
        written: The newest checkpoint that this run has written, with its time.
    """

    def __init__(self, settings: Checkpoints) -> None:
        self.settings = settings
        self.written: tuple[Path, Timestamp] | None = None
        self.folder = Path(settings.folder).absolute()
        self._mirror: Mirror | None = None
        self._told: str | None = None
        self._pool = ThreadPoolExecutor(1, "checkpoints") if settings.background else None
        self._waiting: _Waiting | None = None
        self._has_skipped = False
        self._problems: list[str] = []
        self._failure: Exception | None = None
        self._failures: Counter[str] = Counter()
        self._room = Room(settings)
        self._written_at: float = time.monotonic()
        self._last: tuple[Timestamp, Any] | None = None
        self._best: float | None = None
        self._writers: Writers | None = None
        self._num_written = 0
        self._undecided: tuple[Path, Timestamp] | None = None
        self._found: list[disk.Found] = []
        self._has_lacked_position = False

    def open(self, state: State, step: Any = None) -> None:
        """Read the folder if it is in remote storage; all processes that share the state must call this.

        Raises:
            ValueError, ImportError, OSError: See `mirror_of`.
        """
        if is_remote(self.settings.folder):
            self._mirror = mirror_of(str(self.settings.folder), writers_of(state, step))
            self.folder: Path = self._mirror.local

    def begin(self, state: State, step: Any = None, *, from_here: Resumed | None = None) -> None:
        """Check, before the run starts, that it can be saved, and that the folder has no later checkpoints.

        Args:
            state: The state at the start of the run.
            step: The step that trains it.
            from_here: The checkpoint in this folder from which the run continues, if any.
        """
        leaves_of(state)
        library()
        self._writers = writers_of(state, step)
        if self._is_joint and isinstance(every := self.settings.every, Time):
            if every.unit is TimeUnit.SECOND:
                raise ValueError(
                    f"checkpoints: every={every}: processes that hold parts of a state write at the same batch, and "
                    "clocks differ; give a number of batches or epochs"
                )
        found, _ = in_all(self._writers, lambda: disk.all_in(self.folder), f"{self.folder} cannot be read")
        later = [one for one in found if one.index.batch > state.timestamp.batch]
        if later and from_here is None:
            raise FileExistsError(
                f"{with_urls(self.folder)} holds checkpoints of a run that has come further ({later[0].path.name}): "
                "continue from there with resume='auto', or give this run a folder of its own"
            )
        self._best = self._best_of(found)
        if from_here is not None and from_here.state.timestamp == state.timestamp:
            self._last = state.timestamp, from_here.index.metrics  # already saved, with these metrics
        try:
            if self._is_tidying:
                disk.clear(self.folder)
        except OSError as error:
            self._problems.append(f"{self.folder} cannot be tidied: {_words(error)}")

    def is_due(self, before: Timestamp, now: Timestamp, metrics: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint is due between two times, or because its metrics are the best."""
        if self._is_best(metrics):
            return True
        every = self.settings.every
        assert not isinstance(every, str)
        if isinstance(every, Time) and every.unit is TimeUnit.SECOND:
            return time.monotonic() - self._written_at >= every.value
        return has_passed(every, before, now)

    def keep(
        self,
        state: State,
        step: Any,
        metrics: Mapping[str, Any],
        memory: Mapping[str, Any],
        position: Callable[[Timestamp], Any] = lambda _: None,
    ) -> None:
        """Write a checkpoint, or pass it to the thread; errors of the disk become warnings.

        Args:
            state: The state.
            step: The step that trains it.
            metrics: What has been measured of it.
            memory: Notes for the run that continues.
            position: Function that returns the position of the data at a time, `None` if they have none.
        """
        self._decide()  # before a next one, which all processes write
        self._tell()
        now, is_best = state.timestamp, self._is_best(metrics)
        if self._last == (now, metrics):
            return
        self._last, self._written_at = (now, metrics), time.monotonic()
        self._best = rating_of(metrics, self.settings) if is_best else self._best
        target = self.folder / disk.name_at(now)
        is_ours = self._writers is None or self._writers.number is not None
        taken, problem = None, None
        if is_ours:
            try:
                taken = snapshot(state, step, metrics=metrics, memory=memory, outside=self._outside(position, now))
            except TypeError as error:  # something else than numbers in the metrics, or in `extra`
                problem = error
        if self._is_any(problem is not None):
            self._failed(target, problem or OSError("another process has failed"))
        else:
            self._hand_over(_Task(taken, target, now), is_best)
        self._tell()

    def keep_last(self, state: State, *others: Any) -> None:
        """Write the last checkpoint of a run, and wait until it is written; see `Checkpoints` about a full disk.

        Args: see `keep`.
        """
        while True:
            self.keep(state, *others)
            self.settle()
            self._decide()
            if not self._is_any(is_disk_full(self._failure)):
                return
            now = state.timestamp
            may_wait = not self._is_saved(now)
            if not self._is_any(self._is_tidying and self._room.make(self.folder, now, may_wait=may_wait)):
                return

    def report_missing(self, now: Timestamp) -> None:
        """Warn if the final state of a run is not in a checkpoint."""
        if self._failure is not None and not self._is_saved(now):
            target = self.folder / disk.name_at(now)
            warn(
                f"the last state of the run is in no checkpoint: {target} could not be written "
                f"({cause_of(self._failure)}). fit returns the state; save it with purecompose.save(state, path)",
                CheckpointWarning,
            )

    def _is_saved(self, now: Timestamp) -> bool:
        return self.written is not None and self.written[1] == now

    def settle(self) -> None:
        """Wait until everything so far is written."""
        if self._waiting is not None:
            wait([self._waiting.future])  # the thread writes them in order, so the last one is sufficient
        self._tell()

    def give_up(self) -> None:
        """Note that an error ends the run: another process may have ended, and is not waited for any longer."""
        if self._writers is not None:
            self._writers.has_failed.set()

    def close(self) -> None:
        """Wait until everything is written, and sent to remote storage, and end the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        if self._mirror is not None:
            self._problems = [*map(with_urls, self._problems)]
            problem = self._mirror.close()
            self._problems += [] if problem is None else [problem]
            self._mirror = None
        repeated = {cause: num for cause, num in self._failures.items() if num > 1}
        self._problems += [f"{num} attempts to write a checkpoint failed: {cause}" for cause, num in repeated.items()]
        self._failures.clear()
        self._tell()

    def _outside(self, position: Callable[[Timestamp], Any], now: Timestamp) -> dict[str, Any]:
        """Return what is saved besides the state, by its name in the index."""
        found = {} if self.settings.extra is None else {EXTRA: self.settings.extra}
        try:
            current = position(now)
            if current is not None:
                pack(current, POSITION)
                found[POSITION] = current
        except Exception as error:  # it may come from the code of the data, or a worker process that was killed
            if not self._has_lacked_position:
                self._problems.append(
                    "the position of the data is not saved, and a resumed run reads its epoch from the start: "
                    f"{_words(error)}"
                )
            self._has_lacked_position = True
        return found

    @property
    def _is_joint(self) -> bool:
        """True if several processes write parts of each checkpoint."""
        return self._writers is not None and self._writers.is_joint

    @property
    def _is_tidying(self) -> bool:
        """True for the process that removes what is no longer needed: one of those that write together."""
        return self._writers is None or self._writers.is_first

    def _is_any(self, flag: bool) -> bool:
        """Return whether something is true, in one of the processes that write together; all of them must ask."""
        if not self._is_joint:
            return flag
        assert self._writers is not None
        return not self._writers.is_good_for_all(not flag)

    def _decide(self) -> None:
        """Wait for a checkpoint that several processes write, which counts as written by all of them or by none."""
        if self._undecided is None:
            return
        assert self._writers is not None
        self.settle()
        (target, now), self._undecided = self._undecided, None
        if not self._is_any(self._failure is not None):
            self.written = target, now
            return
        if self._failure is None:
            self._failed(target, OSError("another process has failed"))
        if self._is_tidying:
            together.discard(target, self._writers, self._num_written)

    def _hand_over(self, task: "_Task", is_best: bool) -> None:
        if self._is_joint:
            self._undecided, self._failure, self._num_written = (task.target, task.now), None, self._num_written + 1
        if task.taken is None:
            self.written = (task.target, task.now) if self._undecided is None else self.written
        elif self._pool is None:
            self._write(task)
        else:
            self._enqueue(task, is_best)

    def _enqueue(self, task: "_Task", is_best: bool) -> None:
        assert self._pool is not None
        if self._waiting is not None and not self._waiting.is_best and self._waiting.future.cancel():
            if not self._has_skipped and self._waiting.batch != task.now.batch:
                self._problems.append(
                    f"the checkpoint of batch {self._waiting.batch} was skipped, and others may be: writing takes "
                    f"longer than the time between checkpoints ({self.settings.every})"
                )
            self._has_skipped |= self._waiting.batch != task.now.batch
        self._waiting = _Waiting(self._pool.submit(self._write, task), task.now.batch, is_best)

    def _write(self, task: "_Task") -> None:
        """Write a checkpoint, possibly in the writing thread; errors become warnings and never end the run."""
        assert task.taken is not None
        try:
            task.taken.write(task.target, self._writers, self._num_written)
        except Exception as error:
            self._failed(task.target, error)
            return
        if not self._is_joint:
            self.written, self._failure = (task.target, task.now), None
        try:
            # Reading all of them again would take longer than writing a small one.
            known = {one.path: one for one in self._found if one.path != task.target}
            self._found = disk.all_in(self.folder, known)[0] if self._is_tidying else []
            for one in surplus(self._found, self.settings):
                if one.path != task.target:
                    disk.remove(one.path)
        except Exception as error:
            self._problems.append(f"{self.folder}: older checkpoints could not be removed: {_words(error)}")

    def _failed(self, target: Path, error: Exception) -> None:
        cause = cause_of(error)
        self._failure = error
        self._failures[cause] += 1
        if self._failures[cause] == 1:  # `close` reports the number of repetitions
            self._problems.append(f"{target} was not written, and training continues without it: {_words(error)}")
        self._last = None  # the same state may be tried again
        if self._is_joint:
            return  # `_best` has to remain the same in all processes
        with contextlib.suppress(OSError):
            self._best = self._best_of(disk.all_in(self.folder)[0])  # a checkpoint that was not written does not count

    def _best_of(self, found: Iterable[disk.Found]) -> float | None:
        ratings = [rating_of(one.index.metrics, self.settings) for one in found]
        return max((rating for rating in ratings if rating is not None), default=None)

    def _is_best(self, metrics: Mapping[str, Any]) -> bool:
        rating = rating_of(metrics, self.settings)
        return rating is not None and (self._best is None or rating > self._best)

    def _tell(self) -> None:
        """Warn of problems since the last call; in the thread of the run, where warnings filters are valid."""
        problems, self._problems = self._problems, []
        if self._mirror is not None:
            if (problem := self._mirror.problem()) != self._told:
                self._told = problem
                problems += [] if problem is None else [f"{problem}; trying again"]
        for problem in problems:
            warn(problem, CheckpointWarning)


class _Task(NamedTuple):
    """A checkpoint to be written."""

    taken: Snapshot | None
    """What this process writes; `None` if others write all."""
    target: Path
    now: Timestamp


class _Waiting(NamedTuple):
    """A checkpoint that waits for the writing thread."""

    future: Future[None]
    batch: int
    is_best: bool


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
