"""How far a run is, and how fast: `Progress`, a live display in a terminal or lines elsewhere, and `Stopwatch`."""

import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO, TypeAlias

from torch import Tensor

from purecompose._support.messages import required, say
from purecompose.core.context import describe_replaced
from purecompose.core.state import State
from purecompose.time import Timestamp, TimeUnit
from purecompose.time.event import Event


# Weight of the newest loss in the running mean: losses of single batches are noisy, even more with mixed targets.
_SHARE_OF_NEWEST_LOSS = 0.05
_SECONDS_BETWEEN_READS, _SECONDS_BETWEEN_LINES = 0.1, 30.0
_READINGS_IN_RATE = 30


class Progress:
    """An observer that shows the progress, the loss, the last evaluation's metrics, batches per second and the time.

    In a terminal it draws a bar over the whole run. Elsewhere (a file, a pipe, a notebook) it prints a plain line after
    each epoch and each evaluation, and every 30 seconds. The loss is a running mean of about twenty batches. A
    population's numbers are shown as a range over its members, `loss 0.210..0.350`.

    The display closes at FIT_END. As a context manager it closes in any case::

        with Progress() as progress:
            state = fit(step, state, data, observers=[progress])

    Args:
        live: True to draw the bar; by default, if the output is a terminal. In a notebook this needs ipywidgets.
        file: The file to write to; by default standard output.

    Raises:
        ImportError: Rich is not installed.
    """

    def __init__(self, *, live: bool | None = None, file: TextIO | None = None) -> None:
        rich = required("Progress", "'purecompose[cli]'", "rich.console")
        self._console = rich.Console(file=file, force_terminal=live or None)
        can_draw = self._console.is_terminal and not self._console.is_jupyter and not self._console.is_dumb_terminal
        self._live = can_draw if live is None else live
        self._file = file
        self._stopwatch = Stopwatch()
        self._pace = Pace(self._stopwatch, _READINGS_IN_RATE)
        self._display: _Display | None = None
        self._finalizer: weakref.finalize | None = None
        self._is_running = False
        self._reset()

    def __call__(self, event: Event, state: State) -> None:
        """Follow the run; the first event of a run opens the display."""
        self._stopwatch(event, state)
        if event is Event.FIT_START or (event is Event.BATCH_END and not self._is_running):
            self._open(state)
        if event is Event.BATCH_END:
            self._after_batch(state)
        elif event is Event.EVAL_START:
            self._show(state, "evaluating")
        elif event is Event.EVAL_END:
            self._metrics |= {name: _read(value) for name, value in state.metrics.items() if _is_single(value, state)}
            self._show(state)
        elif event in (Event.EVAL_AFTER_ALL, Event.EPOCH_CHECKPOINT):  # also after the last evaluation, after FIT_END
            self._read(state)
            self._show(state)
            self._print_line(state, is_new=event is Event.EVAL_AFTER_ALL)
        elif event is Event.FIT_END:
            self._read(state)
            self._show(state, "trained")
            if not self._metrics:  # otherwise an evaluation follows, or has had its line
                self._print_line(state)
            self.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the live display and restore the terminal; a second call does nothing."""
        self._is_running = False
        if self._finalizer is not None:
            self._finalizer()
        self._display = self._finalizer = None

    def _reset(self) -> None:
        self._running_loss: Tensor | None = None
        self._loss: _Number | None = None
        self._metrics: dict[str, _Number] = {}
        self._pace.clear()
        self._last_read = -math.inf
        self._printed_batch = -1
        self._printed_at = time.monotonic()

    def _open(self, state: State) -> None:
        self.close()
        self._reset()
        self._is_running = True
        for name, words in describe_replaced(state.context.replaced).items():
            say(f"{name}: {words}", file=self._file or sys.stdout, flush=True)
        if self._live:
            self._display = display = _Display(self._console)
            # Also stops the display if a run ends with an exception outside a with block, at the latest at exit.
            self._finalizer = weakref.finalize(self, display.close)
            self._show(state)

    def _after_batch(self, state: State) -> None:
        if state.loss is not None and _is_single(state.loss, state):
            loss = state.loss.detach()
            mean = loss.clone() if self._running_loss is None else self._running_loss
            self._running_loss = mean.lerp(loss, _SHARE_OF_NEWEST_LOSS)
        now = time.monotonic()
        if now - self._last_read < _SECONDS_BETWEEN_READS:
            return
        self._read(state)
        self._show(state)
        self._last_read = time.monotonic()
        if now - self._printed_at >= _SECONDS_BETWEEN_LINES:
            self._print_line(state)

    def _read(self, state: State) -> None:
        if self._running_loss is not None:
            self._loss = _read(self._running_loss)
        self._pace.read(state.timestamp)

    def _numbers(self, state: State) -> list[str]:
        if not self._stopwatch.batches:
            return [] if state.timestamp.is_finished() else ["waiting for the first batch"]
        loss = [] if self._loss is None else [f"loss {_range(self._loss, '.3f')}"]
        rate = self._pace.per_second("batch") or self._stopwatch.batches_per_second
        speed = f"{rate:.0f} ba/s" if rate >= 100 else f"{rate:.3g} ba/s"
        return [*loss, *_describe(self._metrics), speed]

    def _show(self, state: State, doing: str = "training") -> None:
        if self._display is None:
            return
        elapsed = state.timestamp.elapsed()
        share = None if elapsed is None else min(elapsed, 1.0)
        self._display.show(doing, share, _describe_time(state.timestamp), "  ".join(self._numbers(state)))

    def _print_line(self, state: State, *, is_new: bool = False) -> None:
        """Print a line if there is no terminal; at most one for each batch, unless there is something new."""
        batch = state.timestamp.batch
        # A run that was already at its end has nothing to show.
        if self._live or not self._stopwatch.batches or (batch == self._printed_batch and not is_new):
            return
        self._printed_batch, self._printed_at = batch, time.monotonic()
        parts = [_describe_time(state.timestamp), *self._numbers(state), f"{self._stopwatch.seconds:.1f} s"]
        left = None if state.timestamp.is_finished() else self._pace.seconds_left()
        if left is not None:
            parts.append(f"{describe_seconds(left)} left")
        say("  ".join(parts), file=self._file or sys.stdout, flush=True)


_Number: TypeAlias = float | list[float]
"""A number, or one for each member of a population."""


def _is_single(value: Tensor, state: State) -> bool:
    """Return whether a value is a single number, or for a population one for each member."""
    return value.ndim == state.key.ndim - 1


def _read(value: Tensor) -> _Number:
    return value.item() if value.ndim == 0 else value.tolist()


def _range(value: _Number, form: str) -> str:
    """Return a number, or the lowest and the highest of several (NaN is the highest), as text."""
    if not isinstance(value, list):
        return format(value, form)
    ordered = sorted(value, key=lambda one: (math.isnan(one), one))
    return f"{ordered[0]:{form}}..{ordered[-1]:{form}}"


def _describe(metrics: dict[str, _Number]) -> list[str]:
    """Return metrics as text, accuracies first and in percent, where "eval", if it is the only label, is left out."""
    label = "eval/" if all(name.startswith("eval/") for name in metrics) else ""
    shares = {name: value for name, value in metrics.items() if "accuracy" in name}
    others = {name: value for name, value in metrics.items() if name not in shares}
    return [
        *(f"{name.removeprefix(label).replace('/', ' ')} {_range(value, '.1%')}" for name, value in shares.items()),
        *(f"{name.replace('/', ' ')} {_range(value, '.3f')}" for name, value in others.items()),
    ]


def describe_seconds(seconds: float) -> str:
    """Return a time in seconds as text, such as '0.25 s', '75 s' or '2 h 05 min'."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60:,} h {minutes % 60:02} min"


def _describe_time(timestamp: Timestamp) -> str:
    """Return the progress of the run in its own unit: `3.5/20 ep`, of constant width."""
    duration, elapsed = timestamp.run.duration, timestamp.elapsed()
    if duration is None or elapsed is None:
        return f"{timestamp.batch} ba"
    digits = 1 if duration.unit is TimeUnit.EPOCH else 0
    return f"{elapsed * duration.value:.{digits}f}/{duration.value:g} {duration.unit.value}"


class _Display:
    """A bar, which measures the times itself, with the numbers below it, since both do not fit into 80 columns."""

    def __init__(self, console: Any) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Column
        from rich.text import Text

        self._bar = Bar(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=10)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[done]}", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            TextColumn("left", table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("training", total=None, done="")
        self._numbers = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._numbers), console=console, refresh_per_second=5)

    def show(self, doing: str, share: float | None, done: str, numbers: str) -> None:
        """Replace the contents; the first call opens the display. The share is `None` if the run has no length."""
        self._numbers.plain = numbers
        total = None if share is None else 1.0
        self._bar.update(self._task, description=doing, total=total, completed=share or 0.0, done=done)
        self._live.start()

    def close(self) -> None:
        """Leave the last contents, and restore the terminal."""
        self._live.stop()


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
        """Return the remaining seconds at this rate, with the share of evaluations so far; None if it is not known."""
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
