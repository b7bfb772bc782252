"""RunFolder: a folder with everything about a run, from its settings to its report."""

import contextlib
import dataclasses
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from purecompose._support.device import processor
from purecompose._support.messages import escaped, is_remote, warn
from purecompose._support.specs import check_flag, shown
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.observers import Records, Stopwatch, learning_rate, memory, read_records, speed
from purecompose.records.contents import Predictions
from purecompose.records.layout import (
    CHECKPOINTS,
    COMMAND,
    CONFIG,
    FINISHED,
    HISTORY,
    KILLED,
    LOCK,
    PLAN,
    RECORDS,
    REPORT,
    RESULT,
    RUNNING,
    VERSIONS,
    Start,
    changes,
    checked_settings,
    flat,
    last_metrics,
    read_history,
    read_json,
    read_toml,
    to_toml,
    write_json,
    write_text,
)
from purecompose.records.report import write_report
from purecompose.run.evaluation import Observer
from purecompose.run.saving.comparison import describe, environment
from purecompose.run.saving.folder import clear
from purecompose.run.saving.selection import Checkpoints
from purecompose.time import TimeLike
from purecompose.time.event import Event


try:
    import fcntl
except ImportError:  # not available on Windows, where nothing keeps two processes apart
    fcntl = None


class RunFolder:
    """The folder of a run: settings, versions, plan, records and checkpoints; afterwards result and report.

    | file | content |
    | --- | --- |
    | `config.toml` | settings |
    | `command.txt` | command that reproduces the run |
    | `versions.json` | whatever else can change the results, bit for bit: git commit, versions, device, threads |
    | `plan.txt` | algorithms that act at each event, with the reasons for their order |
    | `history.json` | when the run started and continued, and how long it took |
    | `records.jsonl` | records, with learning rate, speed and memory |
    | `checkpoints/` | checkpoints |
    | `result.json` | after the run: the last metrics, batches, seconds |
    | `report.html` | after the run: one page with everything, also its curves |

    Each file is written completely or not at all. After the first batch, a full disk causes a warning. When a run
    continues, nothing in its folder changes until a batch has been trained. One process at a time owns the folder, from
    the constructor to `finish` or `stop`, which a context manager calls at the end or after an exception; a signal or
    Ctrl-C ends it without a report.

    Args:
        path: The folder; it is created if necessary.
        config: The settings, flat or one level nested: strings, numbers, bools and lists of them; `None` values are
            left out. If the run continues, the default is the settings in the folder.
        command: The command that reproduces the run, as a string or a list of arguments. By default the command that
            started this process, except in notebooks.
        resume: True to continue the run in the folder, or to start one if there is none.
        every: Interval between the batches with a record: "10ba", "1ep", ...

    Attributes:
        path: The folder, as an absolute path.
        is_resumed: True if the folder already contained a run.
        was_complete: True if it contained all files of a finished run.
        unwritten: After `finish` or `stop`, the names of the files that could not be written completely.

    Raises:
        FileExistsError: The folder contains a run, but `resume` is not given; or it contains something else.
        BlockingIOError: Another process uses the folder.
        TypeError, ValueError, OSError: An argument has the wrong kind, or the folder cannot be created.

    Warns:
        RuntimeWarning: The folder cannot be locked, as on some file systems, so another process could use it.

    Example:
        >>> import tempfile, torch
        >>> from purecompose import compose, fit, loop_events, losses, optim
        >>> from purecompose.records import read_run
        >>> state = State.create(torch.nn.Linear(3, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="2ep")
        >>> step, data = compose(loop_events), [(torch.zeros(4, 3), torch.zeros(4, 1))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = RunFolder(f"{folder}/first", {"lr": 0.1}, command="python train.py --lr 0.1")
        ...     run.begin(step, state)
        ...     state = fit(step, state, data, observers=run.observer, checkpoints=run.checkpoints(), resume=run.resume)
        ...     run.finish()
        ...     read_run(run.path).result["batches"]
        2
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: Mapping[str, Any] | None = None,
        *,
        command: str | Sequence[str] | None = None,
        resume: bool = False,
        every: TimeLike | int = "1ba",
    ) -> None:
        if is_remote(path if isinstance(path, str) else Path(path)):
            raise ValueError(
                f"RunFolder: {path} is in remote storage: give the folder of `with purecompose.saving.mirror(url)`"
            )
        self.path: Path = Path(path).absolute()  # valid after a change of the working directory
        self.unwritten: tuple[str, ...] = ()
        settings = None if config is None else checked_settings(config, "RunFolder: config")
        self._command = _as_command(command)
        check_flag(resume, "RunFolder: resume")
        # Created here to check the arguments before the first batch; the file itself is opened when the run begins.
        self._records = Records(
            self.path / RECORDS, every=every, monitors=[learning_rate(), speed(), memory(), self._clock]
        )
        is_run(self.path, resume)  # raises before anything in the folder is changed
        self.path.mkdir(parents=True, exist_ok=True)
        if (earlier := _OPEN.pop(self.path.resolve(), None)) is not None:
            earlier._records.close()  # otherwise its waiting records would be written between ours
            earlier._lock.release()
        self._lock = _Lock(self.path)
        # Functions that are called, if the run continues, after its first batch.
        self._pending: list[Callable[[], None]] = []
        try:
            self._lock.take()
            _OPEN[self.path.resolve()] = self
            # Again, because another process may have changed the folder.
            self.is_resumed: bool = is_run(self.path, resume)
            self.was_complete: bool = all((self.path / name).exists() for name in (RESULT, REPORT))
            trained, self._starts = read_history(self.path) if self.is_resumed else ({}, [])
            self._changed = self._write_settings(settings)
        except BaseException:
            self._lock.release()
            raise
        self._trained = trained
        self._stopwatch = Stopwatch()
        self._start: Start | None = None
        self._has_trained = False
        # In the folder of a complete run nothing is written before there is a batch to train on.
        self._waits = self.was_complete
        self._reached: dict[str, int] = {}
        self._seconds_before = 0.0
        self._noted_at, self._is_noted, self._has_warned = time.monotonic(), True, False
        self._is_over = False
        self._predictions: Predictions | None = None

    @property
    def observer(self) -> Observer:
        """The observer to pass to `fit`; it writes the records and the history."""
        return self

    @property
    def resume(self) -> str | None:
        """The value of `resume` to pass to `fit`: "auto" if the run continues."""
        return "auto" if self.is_resumed else None

    def checkpoints(self, **options: Any) -> Checkpoints:
        """Return `Checkpoints` in this folder, with the given options."""
        return Checkpoints(self.path / CHECKPOINTS, **options)

    def begin(self, step: Step, state: State, batch: Any = None) -> None:
        """Record what is going to be trained: the plan, and everything that can change its results.

        Args:
            step, state: As they are given to `fit`.
            batch: A batch, needed if a `match` reads shapes.

        Raises:
            OSError: A file cannot be written.
        """
        machine = {"platform": platform.platform(), "processor": processor()}
        now = {**environment(state, step), **machine, **({"commit": commit} if (commit := _commit()) else {})}
        with contextlib.suppress(ValueError, OSError):  # the file is missing or damaged
            self._changed |= changes(read_json(self.path / VERSIONS), now)
        plan = f"{_plan(step, state, batch)}\n"
        self._when_trained(lambda: write_json(self.path / VERSIONS, now))
        self._when_trained(lambda: write_text(self.path / PLAN, plan))
        duration, described = state.timestamp.run.duration, describe(state, step)
        members = len(state.key) if state.key.ndim > 1 else None
        trained = {
            "model": described["model"],
            "weights": sum(tensor.numel() for tensor in state.params.values()) // (members or 1),
            "members": members,
            "optimizer": described["optimizer"],
            "loss": described["loss"],
            "algorithms": [repr(algorithm) for algorithm in step.algorithms],
            "duration": None if duration is None else str(duration),
        }
        self._when_trained(lambda: setattr(self, "_trained", trained))
        if not self.is_resumed:
            self._note()

    def __call__(self, event: Event, state: State) -> None:
        """Handle an event of the run."""
        if self._waits and event not in _BEGINS_WORK:
            return
        self._waits = False
        if self._start is None or event is Event.FIT_START:
            self._begin_start(event, state)
        assert self._start is not None
        if event is Event.BATCH_END and not self._has_trained:
            self._has_trained = True
            while self._pending:
                self._pending.pop(0)()
            self._start.changed, self._changed = self._changed, {}
        self._stopwatch(event, state)
        self._records(event, state)
        if not event.is_eval:
            now = state.timestamp
            self._reached = {"batches": now.batch, "epochs": now.epoch, "samples": now.sample}
            if now.token:
                self._reached["tokens"] = now.token
            self._start.until = now.batch
        if event in _NOTED and time.monotonic() - self._noted_at >= _BETWEEN_NOTES:
            self._note()

    def flush(self) -> None:
        """Write all records so far, because the run may continue from the checkpoint that is written next."""
        self._records.flush()

    def finish(self, result: Mapping[str, Any] | None = None, *, predictions: Predictions | None = None) -> None:
        """Close the records and write result and report. A second call writes them again.

        If a run should have continued and has not, `result` is added to an existing one and nothing else changes.

        Args:
            result: Additional entries of the result, such as `{"checksum": ...}`: names and plain values.
            predictions: Outputs for examples of known classes, whose confusion matrix the report shows.
        """
        self._predictions = predictions
        self._end(FINISHED, result or {}, draws=True)

    def stop(self, reason: str) -> None:
        """Finish a run that was cut short: it has no result, and its history names the reason."""
        self._end(reason, None, draws=True)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._is_over:
            return
        if kind is None:
            self.finish()
        else:
            said = " ".join(str(error).split())
            reason = f"{kind.__name__}: {said}" if said else kind.__name__
            self._end(reason, None, draws=issubclass(kind, Exception))

    def _end(self, outcome: str, result: Mapping[str, Any] | None, *, draws: bool) -> None:
        self._is_over = True
        try:
            if self._start is not None or not self.is_resumed:
                self._write_end(outcome, result, draws)
            elif result and (self.path / RESULT).exists():
                write_json(self.path / RESULT, {**read_json(self.path / RESULT), **result})
        finally:
            self._lock.release()

    def _write_end(self, outcome: str, result: Mapping[str, Any] | None, draws: bool) -> None:
        problems: dict[str, Exception] = {}
        with _noted(HISTORY, problems):
            self._records.close()
            if outcome == FINISHED and self._records.num_unwritten:
                outcome = f"{FINISHED}, but {self._records.num_unwritten:,} records could not be written"
            if self._start is not None:
                self._start.outcome = outcome
            self._note()
        if self._records.num_unwritten:
            problems[RECORDS] = OSError(f"{self._records.num_unwritten:,} records are missing")
        with _noted(RESULT, problems):
            if draws:  # the report of an earlier part, which would mark the folder as complete
                (self.path / REPORT).unlink(missing_ok=True)
            if result is not None:
                self._write_result(result)
        if draws:
            with _noted(REPORT, problems):  # last, since it marks a complete folder
                write_report(self.path, self.path / REPORT, predictions=[self._predictions])
        if problems:
            reported = (f"{name} was not written: {type(error).__name__}: {error}" for name, error in problems.items())
            warn(f"{self.path}: {'; '.join(reported)}", RuntimeWarning)
        self.unwritten = tuple(dict.fromkeys([*([] if self._is_noted else [HISTORY]), *problems]))

    def _write_result(self, given: Mapping[str, Any]) -> None:
        written: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError):  # what the run knows is sufficient
            written = read_records(self.path / RECORDS)
        found = {
            # Not only from the file, which lacks the newest records if they could not be written.
            "metrics": last_metrics([*written, self._records.newest]),
            **self._reached,
            "seconds": sum(start.seconds for start in self._starts),
            "evaluation_seconds": sum(start.evaluation_seconds for start in self._starts),
        }
        write_json(self.path / RESULT, {**found, **given})

    def _write_settings(self, settings: dict[str, Any] | None) -> dict[str, Any]:
        """Write what is known before the run; return the differences to the settings in the folder."""
        changed: dict[str, Any] = {}
        if self.is_resumed and settings is not None:
            changed = changes(flat(read_toml(self.path / CONFIG)), flat(settings))
        if settings is not None or not self.is_resumed:
            text = to_toml(settings or {})
            self._when_trained(lambda: write_text(self.path / CONFIG, text))  # first, as it marks the folder as a run's
        if self._command is not None and not (self.is_resumed and (self.path / COMMAND).exists()):
            command = f"{self._command}\n"
            self._when_trained(lambda: write_text(self.path / COMMAND, command))
        return changed

    def _when_trained(self, act: Callable[[], None]) -> None:
        """Call `act` now or, if the run continues, after its first batch."""
        if self.is_resumed:
            self._pending.append(act)
        else:
            act()

    def _begin_start(self, event: Event, state: State) -> None:
        """Add a start to the history: the run begins, or continues."""
        if self._start is not None and self._start.batches == 0:
            self._starts.remove(self._start)  # it was only an evaluation before the run
        elif self._start is not None:
            self._start.outcome = FINISHED  # another call of fit in the same folder
            self._note()
        self._records.flush()
        batch = state.timestamp.batch - (event is Event.BATCH_END)
        times = self._times() if self._starts else []
        for earlier in self._starts:
            if earlier.outcome == RUNNING:  # it was killed, so its records may be newer than its history
                earlier.outcome, last = KILLED, times[-1] if times else (0, 0.0)
                earlier.until = max(earlier.until, last[0])
                earlier.seconds = max(earlier.seconds, last[1] - _seconds_at(earlier.batch, times))
        self._seconds_before = _seconds_at(batch, times)
        self._lock.take()  # again, for a run after `finish`
        if self.is_resumed:
            with contextlib.suppress(OSError):  # half-written files of a killed process do no harm
                clear(self.path)
            (self.path / RESULT).unlink(missing_ok=True)  # it is out of date
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        self._start = Start(batch, started, until=batch, command=self._command)
        self._starts.append(self._start)
        self._has_trained = False
        self._stopwatch = Stopwatch()
        self._note()

    def _note(self) -> None:
        """Write the history; if that fails, as on a full disk, there is one warning."""
        self._noted_at = time.monotonic()
        if self._start is not None:
            self._start.seconds = self._stopwatch.seconds
            self._start.evaluation_seconds = self._stopwatch.seconds - self._stopwatch.training_seconds
        history = {"trained": self._trained, "starts": [dataclasses.asdict(start) for start in self._starts]}
        try:
            write_json(self.path / HISTORY, history)
            self._is_noted = True
        except OSError as error:
            self._is_noted = False
            if not self._has_warned:
                self._has_warned = True
                text = f"{self.path / HISTORY} cannot be written: {error}. Training continues"
                warn(f"{text}; this warning is shown once", RuntimeWarning)

    def _times(self) -> list[tuple[int, float]]:
        """Return the batches in the records, with the wall-clock time of each."""
        with contextlib.suppress(OSError, ValueError):  # no file yet, or a damaged one, for which `Records` raises
            name = "time/seconds"
            return [(one["batch"], one[name]) for one in read_records(self._records.path) if name in one]
        return []

    def _clock(self, state: State) -> dict[str, float]:
        """Return the wall-clock time since the run's start, without training that was lost before it continued."""
        del state
        return {"time/seconds": self._seconds_before + self._stopwatch.seconds}


_BETWEEN_NOTES = 10.0
"""Seconds between two writes of the history, each of which syncs a file to disk; a killed run's is at most so old."""
_BEGINS_WORK = frozenset({Event.BEFORE_DATALOADER, Event.BATCH_END})
_NOTED = frozenset({Event.BATCH_END, Event.EVAL_AFTER_ALL, Event.EPOCH_END})


def _seconds_at(batch: int, times: list[tuple[int, float]]) -> float:
    return max((seconds for at, seconds in times if at <= batch), default=0.0)


# The folders in use in this process. One that was left by an exception may still have unwritten records.
_OPEN: weakref.WeakValueDictionary[Path, RunFolder] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def _noted(name: str, problems: dict[str, Exception]) -> Iterator[None]:
    """Collect the error that keeps a file from being written, which is not a reason to lose the others, or the run."""
    try:
        yield
    except Exception as error:
        problems[name] = error


def is_run(path: Path, resume: bool) -> bool:
    """Return whether the folder contains a run."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"RunFolder: {path} is a file; give a folder")
    # Hidden files do not count: they may be from the desktop, or half-written by a killed process.
    inside = sorted(one.name for one in path.iterdir() if not one.name.startswith(".")) if path.is_dir() else []
    if not inside:
        return False
    if CONFIG not in inside:
        few = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
        raise FileExistsError(
            f"RunFolder: {path} is neither empty nor the folder of a run: it has no {CONFIG}, but {few}"
        )
    if not resume:
        raise FileExistsError(
            f"RunFolder: {path} already holds a run; continue it with resume=True, or give this run another folder"
        )
    return True


def _as_command(command: Any) -> str | None:
    if command is None:
        return None if "ipykernel" in sys.modules else shlex.join(sys.orig_argv)
    if isinstance(command, str):
        return command
    if not isinstance(command, Sequence) or not all(isinstance(one, str) for one in command):
        raise TypeError(f"RunFolder: command: expected a string or a list of them, got {shown(command)}")
    return shlex.join(command)


def _commit() -> str:
    """Return the git commit of the working directory, if any, with "-dirty" if files have changed since."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return ""


def _plan(step: Step, state: State, batch: Any) -> str:
    try:
        return str(step.plan(state, batch))
    except Exception as error:
        if batch is not None:
            raise
        return f"The plan needs a batch, begin(step, state, batch): {error}"  # most likely, a `match` reads shapes


# The lock of a folder


class _Lock:
    """A lock of this process on a run's folder, released at the latest with this object.

    It is the system's `flock` of a file that names the process: released when the process ends, and valid on file
    systems that machines share. The file stays, since a new one of that name could be another process's lock.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._finalizer: weakref.finalize | None = None

    def take(self) -> None:
        """Take the lock unless this object has it; raise a `BlockingIOError` if another process has it."""
        if self._finalizer is not None and self._finalizer.alive:
            return
        try:
            file = _locked(self._path)
        except BlockingIOError:
            raise
        except OSError as error:
            text = f"RunFolder: {self._path} cannot be locked: {error}. Another process could use the folder, too"
            warn(text, RuntimeWarning)
            return
        self._finalizer = weakref.finalize(self, file.close)

    def release(self) -> None:
        if self._finalizer is not None:
            self._finalizer()


def _locked(path: Path) -> Any:
    """Return the lock file, opened and locked, with the name of this process in it."""
    file = path.open("a+b", buffering=0)
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = escaped(file.read(200).decode("utf-8", "replace").strip())
        file.close()
        if not isinstance(error, BlockingIOError):
            raise
        raise BlockingIOError(
            f"RunFolder: {path.parent} is in use by {holder}: two runs in one folder would mix their records"
        ) from error
    _HELD.add(file)
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # a full disk
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
    return file


_HELD: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The lock files of this process. A forked child closes them: it would keep the locks after this process was killed."""


def _close_in_child() -> None:
    for file in list(_HELD):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
