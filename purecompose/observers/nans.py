"""`NaNs`: an observer that stops a run when its loss is not finite."""

import math
import warnings
from typing import Any

from purecompose._support.checks import shown
from purecompose.core.context import listed
from purecompose.core.state import State
from purecompose.observers.recorder import Due, Pile, read
from purecompose.time import TimeLike
from purecompose.time.event import Event


# The check is made when this many batches wait for it, or when the first of them has waited this many seconds.
_GROUP = 100
_SECONDS = 2.0

_ACTIONS = ("raise", "warn")


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
        if action not in _ACTIONS:
            raise ValueError(f"NaNs: action: expected one of {', '.join(map(repr, _ACTIONS))}, got {shown(action)}")
        self._due = Due(every, "NaNs: every")
        self._action = action
        self._pile = Pile[dict[str, Any]](_GROUP, _SECONDS)
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
        for record in seen:
            if what := _bad(record["loss"]):
                self._report(f"batch {record['batch']}: {what}")
                return

    def _report(self, message: str) -> None:
        if self._action == "raise":
            raise FloatingPointError(message)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{message}. This warning is shown once per run", RuntimeWarning, stacklevel=2)


def _bad(losses: Any) -> str:
    """Return a loss that is not finite, in words, or those of members of a population; empty if all are finite."""
    if not isinstance(losses, list):
        return "" if math.isfinite(losses) else f"the loss is {losses}"
    bad = [f"{member} is {loss}" for member, loss in enumerate(losses) if not math.isfinite(loss)]
    return f"the loss of member {listed(bad, 5)}" if bad else ""


_CHECKS = frozenset({Event.EVAL_BEFORE_ALL, Event.EPOCH_CHECKPOINT, Event.FIT_END})
