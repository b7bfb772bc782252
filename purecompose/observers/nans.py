"""A guard that stops a run, or warns, when its numbers are no longer finite."""

import math
import warnings
from typing import Any, NamedTuple

from torch import Tensor

from purecompose._support.checks import shown
from purecompose.core.overview import listed
from purecompose.core.state import State
from purecompose.observers.recorder import Due, Pile, read
from purecompose.time import TimeLike
from purecompose.time.event import Event


# The check is made when this many batches wait for it, or when the first of them has waited this many seconds.
_GROUP = 100
_SECONDS = 2.0

_ACTIONS, _CHECKS = ("raise", "warn"), ("loss", "params")
_SHOWN = 5


class NaNs:
    """An observer that raises `FloatingPointError`, or warns once, when the loss is NaN or infinite.

    Losses are read in groups, so that no batch waits for the device. The message is therefore late, at most by 100
    checked batches or until the first batch after two seconds, whichever comes first; it names the first bad batch. At
    evaluations, at EPOCH_CHECKPOINT and at FIT_END all waiting losses are checked, so no checkpoint of an epoch is
    written after a bad loss if this observer comes before the one that writes.

    Args:
        every: Interval between checked batches: "1ba", "10ba", "1ep", ...
        action: `"raise"`, or `"warn"` for one warning per run.
        check: `"loss"`; or `"params"`, which also checks each parameter and names the bad ones. That costs a pass over
            the parameters (for a donating compiled step, also a copy of them) in each checked batch.

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

    def __init__(self, every: TimeLike | int = "1ba", action: str = "raise", *, check: str = "loss") -> None:
        if action not in _ACTIONS:
            raise ValueError(f"NaNs: action: expected one of {', '.join(map(repr, _ACTIONS))}, got {shown(action)}")
        if check not in _CHECKS:
            raise ValueError(f"NaNs: check: expected one of {', '.join(map(repr, _CHECKS))}, got {shown(check)}")
        self._due = Due(every, "NaNs: every")
        self._action, self._checks_params = action, check == "params"
        self._pile = Pile[_Seen](_GROUP, _SECONDS)
        self._has_warned = False

    def __call__(self, event: Event, state: State) -> None:
        """Queue the loss at BATCH_END, and check the queue when it is time."""
        if event is Event.FIT_START:
            self._pile.take()
            self._has_warned = False
            self._due.start(state.timestamp)
        elif event is Event.BATCH_END and self._due(state.timestamp):
            if self._pile.add(self._seen(state)):
                self.flush()
        elif event in _FLUSHES:
            self.flush()

    def flush(self) -> None:
        """Check all waiting batches; this waits for the device.

        Raises:
            FloatingPointError: A number is not finite.
        """
        seen = self._pile.take()
        for values in ([one.loss for one in seen], [one.params for one in seen]):
            read(values)
        for batch, loss, params in seen:
            what = [*_bad_losses(loss), *_bad_params(params)]
            if what:
                self._report(f"batch {batch}: {'; '.join(what)}")
                return

    def _seen(self, state: State) -> "_Seen":
        # A copy, because a step that donates its state overwrites it.
        loss = {} if state.loss is None else {"loss": state.loss.detach().clone()}
        params = {}
        if self._checks_params:
            num_dims = state.key.ndim - 1  # 1 for a population, whose members are distinguished
            params = {name: _all_finite(param.detach(), num_dims) for name, param in state.params.items()}
        return _Seen(state.timestamp.batch, loss, params)

    def _report(self, message: str) -> None:
        if self._action == "raise":
            raise FloatingPointError(message)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{message}. This warning is shown once per run", RuntimeWarning, stacklevel=2)


class _Seen(NamedTuple):
    """What waits of a batch: the loss, and a finite flag for each parameter; for a population, of each member."""

    batch: int
    loss: dict[str, Any]
    params: dict[str, Any]


def _all_finite(param: Tensor, num_dims: int) -> Tensor:
    finite = param.isfinite()
    return finite.reshape(*finite.shape[:num_dims], -1).all(-1)


def _bad_losses(values: dict[str, Any]) -> list[str]:
    losses = values.get("loss", 0.0)
    if not isinstance(losses, list):
        return [] if math.isfinite(losses) else [f"the loss is {losses}"]
    bad = [f"{member} is {loss}" for member, loss in enumerate(losses) if not math.isfinite(loss)]
    return [f"the loss of member {listed(bad, _SHOWN)}"] if bad else []


def _bad_params(params: dict[str, Any]) -> list[str]:
    bad = []
    for name, finite in params.items():
        if isinstance(finite, list) and not all(finite):
            members = [str(member) for member, is_finite in enumerate(finite) if not is_finite]
            bad.append(f"{name} (member {listed(members, _SHOWN)})")
        elif not finite:
            bad.append(name)
    return [f"not finite: {listed(bad, _SHOWN)} of {len(params)} parameters"] if bad else []


_FLUSHES = frozenset({Event.EVAL_BEFORE_ALL, Event.EPOCH_CHECKPOINT, Event.FIT_END})
