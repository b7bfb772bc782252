"""Profiles of a few batches of a run, with torch's profiler."""

import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.profiler
from torch.profiler import ProfilerAction

from purecompose._support.checks import check_whole
from purecompose.core.state import State
from purecompose.time.event import Event


class Profile:
    """An observer that profiles some batches and writes Chrome traces, for chrome://tracing or ui.perfetto.dev.

    Starting when training starts or continues, it skips `skip_first` batches once, and then repeats a cycle of `wait`,
    `warmup` (the profiler runs, its findings are dropped) and `active` batches `repeat` times. Each cycle writes the
    active batches to a file `batches_<first>_to_<last>.json`. The profiler is off outside of warm-up and active
    batches. A run that ends in an active window writes the batches so far.

    Work between two batches, such as evaluation and loading, belongs to the later batch. A full disk causes a warning;
    training continues.

    Args:
        folder: Folder of the traces; it is created if necessary.
        wait: Number of batches before each warm-up.
        warmup: Number of batches of warm-up; with 0, the start of the profiler distorts the first active batches.
        active: Number of batches in a trace, at least 1.
        repeat: Number of traces, at least 1.
        skip_first: Number of batches to skip at the start of the run, such as those that compile.
        **options: Further options of `torch.profiler.profile`, such as `record_shapes=True`, `with_stack=True`.

    Raises:
        TypeError, ValueError: A number is not an int, or out of range; or `on_trace_ready` is given.

    Example:
        >>> import tempfile
        >>> from purecompose import compose, fit, loop_events, losses, optim
        >>> state = State.create(
        ...     torch.nn.Linear(3, 2), loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="6ba"
        ... )
        >>> data = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state = fit(compose(loop_events), state, data, observers=Profile(folder, active=2))
        ...     os.listdir(folder)
        ['batches_3_to_4.json']
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        wait: int = 1,
        warmup: int = 1,
        active: int = 4,
        repeat: int = 1,
        skip_first: int = 0,
        **options: Any,
    ) -> None:
        self.folder: Path = Path(folder).absolute()  # valid after a change of the working directory
        self._schedule = {
            "skip_first": check_whole(skip_first, "Profile: skip_first", 0),
            "wait": check_whole(wait, "Profile: wait", 0),
            "warmup": check_whole(warmup, "Profile: warmup", 0),
            "active": check_whole(active, "Profile: active", 1),
            "repeat": check_whole(repeat, "Profile: repeat", 1),
        }
        if "on_trace_ready" in options:
            raise TypeError("Profile: on_trace_ready: it writes the traces itself; use torch.profiler for others")
        self._options = options
        self._profiler: _Profiler | None = None
        self._finalizer: weakref.finalize | None = None

    def __call__(self, event: Event, state: State) -> None:
        """Start torch's profiler when a run starts, and advance it after each batch."""
        is_batch_over = event is Event.BATCH_END
        if event is Event.FIT_START or (is_batch_over and self._profiler is None):
            self.close()
            # In a manual loop, the first event is the end of the first batch, which can no longer be profiled.
            self._profiler = _Profiler(self.folder, self._schedule, self._options, state, num_missed=int(is_batch_over))
            self._finalizer = weakref.finalize(self, self._profiler.close)
        elif is_batch_over and self._profiler is not None:
            self._profiler.advance(state.timestamp.batch)
        elif event is Event.FIT_END:
            self.close()

    def close(self) -> None:
        """Stop the profiler, and write the active batches so far."""
        if self._finalizer is not None:
            self._finalizer()
        self._profiler = self._finalizer = None


class _Profiler:
    """torch's profiler, which follows a schedule that starts `num_missed` batches ago."""

    def __init__(
        self, folder: Path, schedule: dict[str, int], options: dict[str, Any], state: State, *, num_missed: int
    ) -> None:
        self._folder, self._batch = folder, state.timestamp.batch
        self._first = self._batch + 1
        activities = [torch.profiler.ProfilerActivity.CPU]
        if state.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with _quietly():
            plan = torch.profiler.schedule(**schedule)
            settings = {"activities": activities, "schedule": lambda number: plan(number + num_missed), **options}
            self._profiler = torch.profiler.profile(**settings, on_trace_ready=self._write)
            self._profiler.start()

    def advance(self, batch: int) -> None:
        """Note that a batch is over."""
        before, self._batch = self._profiler.current_action, batch
        with _quietly():
            self._profiler.step()
        if before is not ProfilerAction.RECORD:
            self._first = batch + 1  # of the next trace, unless the profiler is off

    def close(self) -> None:
        self._profiler.stop()

    def _write(self, profiler: Any) -> None:
        if self._batch < self._first:
            return
        path = self._folder / f"batches_{self._first}_to_{self._batch}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            warnings.warn(f"Profile: {path} cannot be written: {error}", RuntimeWarning, stacklevel=2)


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's warnings of schedules without warm-up, and that a trace has the batches of one window only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Warning: Profiler clears events|Profiler won't be using warmup)")
        yield
