"""Profiles of a few batches of a run, with torch's profiler."""

import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.profiler

from purecompose._support.checks import check_whole
from purecompose.core.state import State
from purecompose.time.event import Event


class Profile:
    """An observer that profiles some batches and writes Chrome traces, for chrome://tracing or ui.perfetto.dev.

    Starting when training starts or continues, it skips `skip_first` batches once, and then repeats a cycle of `wait`,
    `warmup` (the profiler runs, its findings are dropped) and `active` batches `repeat` times. Each cycle writes the
    active batches to a file `batches_<first>_to_<last>.json`. The profiler is off outside of warm-up and active
    batches. A run that ends in an active window writes the batches so far.

    Work between two batches, such as evaluation and loading, belongs to the later batch.

    Args:
        folder: Folder of the traces; it is created if necessary.
        wait: Number of batches before each warm-up.
        warmup: Number of batches of warm-up; with 0, the start of the profiler distorts the first active batches.
        active: Number of batches in a trace, at least 1.
        repeat: Number of traces, at least 1.
        skip_first: Number of batches to skip at the start of the run, such as those that compile.
        **options: Further options of `torch.profiler.profile`, such as `record_shapes=True`, `with_stack=True`.

    A full disk causes a warning; training continues.

    Raises:
        TypeError, ValueError: A number is not an int, or out of range.

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
        self._skip_first = check_whole(skip_first, "Profile: skip_first", 0)
        self._wait = check_whole(wait, "Profile: wait", 0)
        self._warmup = check_whole(warmup, "Profile: warmup", 0)
        self._active = check_whole(active, "Profile: active", 1)
        self._repeat = check_whole(repeat, "Profile: repeat", 1)
        self._options = options
        self._num_batches: int | None = None
        self._window: _Window | None = None
        self._finalizer: weakref.finalize | None = None

    def __call__(self, event: Event, state: State) -> None:
        """Open or close the profiler's window, depending on the number of batches."""
        if event is Event.FIT_START:
            self.close()
            self._num_batches = 0
            self._enter(state)
        elif event is Event.BATCH_END:
            # In a manual loop, the first event is the end of the first batch, which can no longer be profiled.
            self._num_batches = 1 if self._num_batches is None else self._num_batches + 1
            if self._window is not None and self._window.is_over(state.timestamp.batch):
                self.close()
            self._enter(state)
        elif event is Event.FIT_END:
            self.close()
            self._num_batches = None

    def close(self) -> None:
        """Close the window, if one is open, and write the active batches so far."""
        if self._finalizer is not None:
            self._finalizer()
        self._window = self._finalizer = None

    def _enter(self, state: State) -> None:
        """Start the profiler if the next batch is the first of a warm-up."""
        cycle = self._wait + self._warmup + self._active
        repeat, place = divmod((self._num_batches or 0) - self._skip_first, cycle)
        if self._window is None and place == self._wait and 0 <= repeat < self._repeat:
            batch = state.timestamp.batch
            self._window = window = _Window(self.folder, batch, self._warmup, self._active, self._options, state)
            self._finalizer = weakref.finalize(self, window.close)


class _Window:
    """The profiler over one warm-up and the active batches after it."""

    def __init__(
        self, folder: Path, batch: int, warmup: int, active: int, options: dict[str, Any], state: State
    ) -> None:
        self._folder = folder
        self._first, self._last, self._batch = batch + warmup + 1, batch + warmup + active, batch
        activities = [torch.profiler.ProfilerActivity.CPU]
        if state.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Torch warns of a schedule without warm-up. Without a schedule all batches are active, without a warning.
        schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1) if warmup else None
        self._profiler = torch.profiler.profile(**{"activities": activities, "schedule": schedule, **options})
        with _quietly():
            self._profiler.start()

    def is_over(self, batch: int) -> bool:
        """Return whether the window's last batch is over; otherwise advance the profiler by one batch."""
        self._batch = batch
        if batch >= self._last:
            return True
        with _quietly():
            self._profiler.step()
        return False

    def close(self) -> None:
        self._profiler.stop()
        if self._batch >= self._first:
            path = self._folder / f"batches_{self._first}_to_{self._batch}.json"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._profiler.export_chrome_trace(str(path))
            except OSError as error:
                warnings.warn(f"Profile: {path} cannot be written: {error}", RuntimeWarning, stacklevel=2)


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's warning that a new window clears the last one; each is written to its own file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        yield
