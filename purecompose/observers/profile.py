"""Profiles of a few batches in the middle of a run, by torch's profiler."""

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


__all__ = ["Profile"]


class Profile:
    """Profiles some batches and writes Chrome traces, for chrome://tracing or ui.perfetto.dev.

    Counted in batches from where training starts or continues: `skip_first` once, then `repeat` times `wait`, `warmup`
    (the profiler runs, its findings are dropped) and `active` batches, each time with a file
    `batches_<first>_to_<last>.json` of the active ones. The profiler is off outside of warm-up and active batches. A
    run that ends in an active window writes what there is.

    What happens between two batches, such as evaluation and loading, counts to the later one.

    Args:
        folder: Where the traces go; made if need be.
        wait: Batches before each warm-up.
        warmup: Batches of warm-up; 0 skews the first active ones by the profiler's own start.
        active: Batches in a trace, at least 1.
        repeat: Number of traces, at least 1.
        skip_first: Batches at the start of the run, such as those that compile.
        **options: More for `torch.profiler.profile`, such as `record_shapes=True`, `with_stack=True`.

    A disk that is full brings a warning; training continues.

    Raises:
        TypeError, ValueError: A number that is not an int or out of range.

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
        self.folder = Path(folder).absolute()  # wherever the process goes
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
        """Open and closes the window as batches go by."""
        if event is Event.FIT_START:
            self.close()
            self._num_batches = 0
            self._enter(state)
        elif event is Event.BATCH_END:
            # In your own loop, what comes before the first batch's end cannot be profiled any more.
            self._num_batches = 1 if self._num_batches is None else self._num_batches + 1
            if self._window is not None and self._window.is_over(state.timestamp.batch):
                self.close()
            self._enter(state)
        elif event is Event.FIT_END:
            self.close()
            self._num_batches = None

    def close(self) -> None:
        """End a window that is open and writes what it has seen of its active batches."""
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
        # A schedule without warm-up makes torch warn; without a schedule all batches are active, and it is silent.
        schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1) if warmup else None
        self._profiler = torch.profiler.profile(**{"activities": activities, "schedule": schedule, **options})
        with _quietly():
            self._profiler.start()

    def is_over(self, batch: int) -> bool:
        """Tell the profiler that a batch is over, but for the last, at which the window closes."""
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
    """Without torch's advice on windows that follow one another: each is written to a file of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        yield
