"""The writer of a run's checkpoints: when they are written, in which thread, and what happens if that fails."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from purecompose._support.messages import is_remote, warn, with_urls
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.errors import CheckpointWarning
from purecompose.run.saving import folder as disk
from purecompose.run.saving.checkpoint import Resumed, Snapshot, snapshot
from purecompose.run.saving.files import DECIDES, library
from purecompose.run.saving.folder import Found, Writers, in_all, writers_of
from purecompose.run.saving.leaves import EXTRA, POSITION, leaves_of, pack
from purecompose.run.saving.remote import Mirror
from purecompose.run.saving.selection import Checkpoints, best_in, best_of, surplus
from purecompose.time import Time, Timestamp, TimeUnit
from purecompose.time.timestamp import has_passed


class Keeper:
    """The writer of a run's checkpoints, one for each call of `fit`; `written` is its newest one, with its time.

    `folder` is absolute; if it is in remote storage, it is that of the local copy, from `open` on.
    """

    def __init__(self, settings: Checkpoints) -> None:
        self.settings = settings
        self.written: tuple[Path, Timestamp] | None = None
        self.folder = Path(settings.folder).absolute()
        self._mirror: Mirror | None = None
        self._reported: str | None = None
        self._pool = ThreadPoolExecutor(1, "checkpoints") if settings.background else None
        self._waiting: list[tuple[Future[None], Timestamp]] = []
        """The checkpoints (not their tensors) that the writing thread has not written, and their times."""
        self._parts: tuple[_Task, Future[None]] | None = None
        """The checkpoint of which the processes that share the state write parts."""
        self._has_skipped = False
        self._problems: list[str] = []
        self._failure: Exception | None = None
        self._failures: Counter[str] = Counter()
        self._written_at: float = time.monotonic()
        self._last: tuple[Timestamp, Any] | None = None
        self._best: list[tuple[float, str]] = []
        """Ratings and names of the best checkpoints so far; the same in all processes."""
        self._writers: Writers | None = None
        self._has_lacked_position = False

    def open(self, state: State, step: Step | None = None) -> None:
        """Read the folder if it is in remote storage; all processes that share the state must call this."""
        if not is_remote(self.settings.folder):
            return
        url, writers = str(self.settings.folder), writers_of(state, step)
        if writers is not None and writers.is_joint:
            raise ValueError(f"checkpoints: {url}: processes that hold parts of a state need a folder that they share")
        sends = writers is None or writers.is_first
        self._mirror = in_all(writers, lambda: Mirror(url, sends=sends), f"{url} cannot be read")
        self.folder: Path = self._mirror.local

    def begin(self, state: State, step: Step | None = None, *, from_here: Resumed | None = None) -> None:
        """Check that the run, which starts at `state`, can be saved, and that the folder has no later checkpoints.

        `from_here` is the checkpoint in this folder from which it continues, if any.
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
        self._best = self._rated(found)
        if from_here is not None and from_here.state.timestamp == state.timestamp:
            self._last = state.timestamp, from_here.index.metrics  # already saved, with these metrics
        try:
            if self._is_tidying:
                disk.clear(self.folder)
        except OSError as error:
            self._problems.append(f"{self.folder} cannot be tidied: {_words(error)}")

    def is_due(self, before: Timestamp, now: Timestamp, metrics: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint is due between two times, or because its metrics are among the best."""
        self._complete(waits=False)
        if metrics and _has(self._best_with(now, metrics), now):
            return True
        every = self.settings.every
        assert not isinstance(every, str)
        if isinstance(every, Time) and every.unit is TimeUnit.SECOND:
            return time.monotonic() - self._written_at >= every.value
        return has_passed(every, before, now)

    def keep(
        self,
        state: State,
        step: Step | None,
        metrics: Mapping[str, Any],
        memory: Mapping[str, Any],
        position: Callable[[Timestamp], Any] = lambda _: None,
    ) -> None:
        """Write a checkpoint, or pass it to the thread; errors of the disk become warnings.

        Of processes that hold parts of the state each writes its own, and the next call or `is_due` completes them.
        `memory` are notes for a run that continues, and `position` returns the position of the data at a time, if any.
        """
        self._complete()
        self._tell()
        now = state.timestamp
        if self._last == (now, metrics):
            return
        self._last, self._written_at = (now, metrics), time.monotonic()
        target = self.folder / disk.name_at(now)
        self._best = self._best_with(now, metrics)
        if self.settings.best is not None:
            memory = {**memory, DECIDES: {"metric": self.settings.best, "mode": self.settings.mode}}
        if not (self._is_tidying or self._is_joint):  # the first process writes
            self.written = target, now
            return
        joint = self._writers if self._is_joint else None

        def take() -> Snapshot:
            is_copy = joint is not None and joint.number is None  # others write the same rows
            outside = {} if is_copy else self._outside(position, now)
            return snapshot(state, step, metrics=metrics, memory=memory, outside=outside, writers=joint)

        try:
            task = _Task(in_all(joint, take, f"{target} was not written"), target, now)
        except (TypeError, OSError) as error:  # something else than numbers in the metrics, or in `extra`
            self._failed(target, error)
        else:
            if self._pool is None:
                self._write(task)
            elif joint is not None:
                self._parts = task, self._pool.submit(task.taken.write_part, target, joint)
            else:
                self._enqueue(self._pool, task)
        self._tell()

    def keep_last(self, state: State, *others: Any) -> None:
        """Write the last checkpoint of a run as `keep` does, and wait until it is written."""
        self.keep(state, *others)
        self._complete()
        self.settle()

    def report_missing(self, now: Timestamp) -> None:
        """Warn if the final state of a run is not in a checkpoint."""
        if self._failure is not None and (self.written is None or self.written[1] != now):
            target = self.folder / disk.name_at(now)
            warn(
                f"the last state of the run is in no checkpoint: {target} could not be written "
                f"({_cause_of(self._failure)}); save what fit returns with purecompose.save(state, path)",
                CheckpointWarning,
            )

    def settle(self) -> None:
        """Wait until everything so far is written; at the end of a run, since other processes may have ended, too."""
        wait([one for one, _ in self._waiting])
        if self._parts is not None:
            self._complete_alone()
        self._tell()

    def close(self) -> None:
        """Wait until everything is written, and sent to remote storage, and end the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        if self._parts is not None:
            self._complete_alone()
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

    def _complete(self, *, waits: bool = True) -> None:
        """Complete a checkpoint of which the processes write parts, if all have done so, or after waiting for them."""
        if self._parts is None:
            return
        assert self._writers is not None
        task, part = self._parts
        if waits or self._writers.is_good_for_all(part.done()):
            self._parts = None
            self._write(task, part)

    def _complete_alone(self) -> None:
        """Complete a checkpoint of which the processes write parts, without messages to those that may have ended."""
        assert self._parts is not None and self._writers is not None
        (task, part), self._parts = self._parts, None
        try:
            task.taken.complete(task.target, self._writers, part.result, is_alone=True)
        except Exception as error:
            self._problems.append(f"{task.target} was not written: {_words(error)}")
        else:
            if self._is_tidying:  # the others do not know
                self._has_written(task)

    def _enqueue(self, pool: ThreadPoolExecutor, task: "_Task") -> None:
        """Pass a checkpoint to the writing thread, in place of those that wait and are not among the best."""
        for one, now in self._waiting:
            if not _has(self._best, now) and one.cancel() and now.batch != task.now.batch:
                if not self._has_skipped:
                    self._problems.append(
                        f"the checkpoint of batch {now.batch} was skipped, and others may be: writing takes longer "
                        f"than the time between checkpoints ({self.settings.every})"
                    )
                self._has_skipped = True
        self._waiting = [pair for pair in self._waiting if not pair[0].done()]
        self._waiting.append((pool.submit(self._write, task), task.now))

    def _write(self, task: "_Task", part: "Future[None] | None" = None) -> None:
        """Write a checkpoint, possibly in the writing thread; errors become warnings and never end the run."""
        try:
            if part is None or self._writers is None:
                task.taken.write(task.target, self._writers)
            else:
                task.taken.complete(task.target, self._writers, part.result)
        except Exception as error:
            self._failed(task.target, error)
        else:
            self._has_written(task)

    def _has_written(self, task: "_Task") -> None:
        """Note a checkpoint that is complete, and remove those that need not be kept."""
        self.written, self._failure = (task.target, task.now), None
        try:
            found = disk.all_in(self.folder)[0] if self._is_tidying and self.settings.keep is not None else []
            for one in surplus(found, self.settings):
                if one.path != task.target:
                    disk.remove(one.path)
        except Exception as error:
            self._problems.append(f"{self.folder}: older checkpoints could not be removed: {_words(error)}")

    def _failed(self, target: Path, error: Exception) -> None:
        cause = _cause_of(error)
        self._failure = error
        self._failures[cause] += 1
        if self._failures[cause] == 1:  # `close` reports the number of repetitions
            self._problems.append(f"{target} was not written, and training continues without it: {_words(error)}")
        self._last = None  # the same state may be tried again
        if self._is_joint:
            return  # `_best` has to remain the same in all processes
        with contextlib.suppress(OSError):
            others = *self._rated(disk.all_in(self.folder)[0]), *self._best  # on the disk, and still to be written
            known = {name: rating for rating, name in others if name != target.name}
            self._best = best_of([(known[name], name) for name in sorted(known)], self.settings.keep_best)

    def _rated(self, found: Sequence[Found]) -> list[tuple[float, str]]:
        return [(rating, one.path.name) for rating, one in best_in(found, self.settings)]

    def _best_with(self, now: Timestamp, metrics: Mapping[str, Any]) -> list[tuple[float, str]]:
        """Return the best checkpoints with that of another state, whose metrics are known, if it is one of them."""
        name = disk.name_at(now)
        others = [pair for pair in self._best if pair[1] != name]
        return best_of([*others, (self.settings.rating(metrics), name)], self.settings.keep_best)

    def _tell(self) -> None:
        """Warn of problems since the last call; in the thread of the run, where warnings filters are valid."""
        problems, self._problems = self._problems, []
        if self._mirror is not None:
            if (problem := self._mirror.problem) != self._reported:
                self._reported = problem
                problems += [] if problem is None else [f"{problem}; trying again"]
        for problem in problems:
            warn(problem, CheckpointWarning)


class _Task(NamedTuple):
    """A checkpoint to be written."""

    taken: Snapshot
    target: Path
    now: Timestamp


def _has(best: Iterable[tuple[float, str]], now: Timestamp) -> bool:
    return any(name == disk.name_at(now) for _, name in best)


def _cause_of(error: Exception) -> str:
    """Return an error as text, without the name of the file, so that it is the same for each checkpoint."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
