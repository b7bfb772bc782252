"""Observers for finding faults: `NaNs` stops a run when its loss is not finite, `Profile` records a few batches with
torch's profiler.
"""

import math
import os
from pathlib import Path
from typing import Any

import torch.profiler

from purecompose._support.messages import warn
from purecompose._support.specs import check_whole, shown
from purecompose.core.context import listed
from purecompose.core.state import State
from purecompose.observers.recorder import Due, Pile, read
from purecompose.time import TimeLike
from purecompose.time.event import Event


_SECONDS = 2.0
"""Age in seconds at which waiting losses are checked."""


class NaNs:
    """An observer that raises `FloatingPointError`, or warns once, when the loss is NaN or infinite.

    Losses are read in groups, so that no batch waits for the device: after 100 checked batches or two seconds, and at
    evaluations, EPOCH_CHECKPOINT and FIT_END. The message names the first bad batch.

    Args:
        every: Interval between checked batches: "1ba", "10ba", "1ep", ...
        action: `"raise"`, or `"warn"` for one warning per run.

    Raises:
        TypeError, ValueError: An argument has the wrong kind.
        FloatingPointError: When called: a number is not finite.

    Example:
        >>> import torch
        >>> from purecompose import losses, optim
        >>> state = State.create(torch.nn.Linear(1, 1), loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> nans = NaNs()
        >>> nans(Event.BATCH_END, state.replace(loss=torch.tensor(torch.nan), timestamp=state.timestamp.advance()))
        >>> nans(Event.FIT_END, state)
        Traceback (most recent call last):
            ...
        FloatingPointError: batch 1: the loss is nan
    """

    def __init__(self, every: TimeLike | int = "1ba", action: str = "raise") -> None:
        if action not in ("raise", "warn"):
            raise ValueError(f"NaNs: action: expected one of 'raise', 'warn', got {shown(action)}")
        self._due = Due(every, "NaNs: every")
        self._action = action
        self._pile = Pile[dict[str, Any]](100, _SECONDS)
        self._has_warned = False

    def __call__(self, event: Event, state: State) -> None:
        """Queue the loss at BATCH_END, and check the queue when it is time."""
        if event is Event.FIT_START:
            self._pile.take()
            self._has_warned = False
            self._due.start(state.timestamp)
        elif event is Event.BATCH_END and self._due(state.timestamp) and state.loss is not None:
            # A copy, because a step that donates its state overwrites it.
            if self._pile.add({"batch": state.timestamp.batch, "loss": state.loss.detach().clone()}):
                self.flush()
        elif event in _CHECKS:
            self.flush()

    def flush(self) -> None:
        """Check all waiting losses; this waits for the device.

        Raises:
            FloatingPointError: A loss is not finite.
        """
        seen = self._pile.take()
        read(seen)
        messages = (f"batch {record['batch']}: {what}" for record in seen if (what := _bad(record["loss"])))
        message = next(messages, None)
        if message is not None and self._action == "raise":
            raise FloatingPointError(message)
        if message is not None and not self._has_warned:
            self._has_warned = True
            warn(f"{message}. This warning is shown once per run", RuntimeWarning)


def _bad(losses: Any) -> str:
    """Return a loss that is not finite, in words, or those of members of a population; empty if all are finite."""
    if not isinstance(losses, list):
        return "" if math.isfinite(losses) else f"the loss is {losses}"
    bad = [f"{member} is {loss}" for member, loss in enumerate(losses) if not math.isfinite(loss)]
    return f"the loss of member {listed(bad, 5)}" if bad else ""


_CHECKS = frozenset({Event.EVAL_BEFORE_ALL, Event.EPOCH_CHECKPOINT, Event.FIT_END})


class Profile:
    """An observer that profiles some batches and writes a Chrome trace, for chrome://tracing or ui.perfetto.dev.

    From the start of `fit` it skips `wait` batches, warms up for `warmup` batches, and writes the `active` ones
    that follow to a file `batches_<first>_to_<last>.json`. The profiler is off before
    and afterwards. A run that ends in the active window writes the batches so far.

    Work between two batches belongs to the later one. A full disk causes a warning. As a context manager it stops the
    profiler after an exception, too.

    Args:
        folder: Folder of the trace; it is created if necessary.
        wait: Number of batches to skip, such as those that compile.
        warmup: Number of batches whose findings are dropped, at least 1: the profiler's start distorts them.
        active: Number of batches in the trace, at least 1.
        **options: Further options of `torch.profiler.profile`, such as `record_shapes=True`, `with_stack=True`.

    Raises:
        TypeError, ValueError: A number is not an int, or out of range.

    Example:
        >>> import tempfile
        >>> from purecompose import compose, fit, loop_events, losses, optim
        >>> state = State.create(torch.nn.Linear(3, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="6ba")
        >>> data = [(torch.zeros(4, 3), torch.zeros(4, 1))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state = fit(compose(loop_events), state, data, observers=Profile(folder, active=2))
        ...     os.listdir(folder)
        ['batches_3_to_4.json']
    """

    def __init__(
        self, folder: str | os.PathLike[str], wait: int = 1, warmup: int = 1, active: int = 4, **options: Any
    ) -> None:
        self.folder: Path = Path(folder).absolute()  # valid after a change of the working directory
        self._wait = check_whole(wait, "Profile: wait", 0)
        self._warmup = check_whole(warmup, "Profile: warmup", 1)
        self._active = check_whole(active, "Profile: active", 1)
        self._options = options
        self._profiler: torch.profiler.profile | None = None
        self._batch = self._first = 0

    def __call__(self, event: Event, state: State) -> None:
        """Start torch's profiler when a run starts, and advance it after each batch."""
        if event is Event.FIT_START:
            self.close()
            self._start(state)
        elif event is Event.BATCH_END and self._profiler is not None:
            self._batch = state.timestamp.batch
            self._profiler.step()
        elif event is Event.FIT_END:
            self.close()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the profiler, and write the active batches so far."""
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler = None

    def _start(self, state: State) -> None:
        self._batch = state.timestamp.batch
        self._first = self._batch + self._wait + self._warmup + 1
        activities = [torch.profiler.ProfilerActivity.CPU]
        if state.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        plan = torch.profiler.schedule(wait=self._wait, warmup=self._warmup, active=self._active, repeat=1)
        settings = {"activities": activities, "schedule": plan, "acc_events": True, **self._options}
        self._profiler = torch.profiler.profile(**settings, on_trace_ready=self._write)
        self._profiler.start()

    def _write(self, profiler: Any) -> None:
        if self._batch < self._first:
            return
        path = self.folder / f"batches_{self._first}_to_{self._batch}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            warn(f"Profile: {path} cannot be written: {error}", RuntimeWarning)
