"""Numbers still on the device: collected one by one, read in groups."""

import math
import time
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from purecompose._support.warnings import warn
from purecompose.core.state import State
from purecompose.time.event import Event


__all__ = ["Pile", "read", "record_of"]

T = TypeVar("T")


class Pile(Generic[T]):
    """Things that wait to be dealt with together: until there are enough, or the first has waited long enough.

    Args:
        most: How many may wait.
        seconds: How long the first one may wait; looked at when another comes.
    """

    def __init__(self, most: int, seconds: float = math.inf) -> None:
        """Return an empty pile."""
        self._most, self._seconds = most, seconds
        self._waiting: list[T] = []
        self._since = 0.0

    def add(self, thing: T) -> bool:
        """Add a thing; whether it is time to take them all."""
        now = time.monotonic()
        if not self._waiting:
            self._since = now
        self._waiting.append(thing)
        return len(self._waiting) >= self._most or now - self._since >= self._seconds

    def take(self) -> list[T]:
        """Return the waiting records in their order, and empty the queue."""
        waiting, self._waiting = self._waiting, []
        return waiting


def record_of(event: Event, state: State, left_out: set[str]) -> dict[str, Any] | None:
    """Return the record of a BATCH_END or EVAL_END, with tensors for numbers; None at other events.

    Args:
        event: The event.
        state: The state.
        left_out: The metrics that are known not to be single numbers; others are added, with a warning.

    Returns:
        `batch` and `epoch`, how many have gone by; the loss of a batch; and the metrics.

    Warns:
        UserWarning: A metric is not a single number, and not in `left_out`.
    """
    if event is Event.BATCH_END:
        values = state.metrics if state.loss is None else {"loss": state.loss, **state.metrics}
    elif event is Event.EVAL_END:
        values = state.metrics
    else:
        return None
    counters = {"batch": state.timestamp.batch, "epoch": state.timestamp.epoch}
    return {**counters, **_single_numbers(values, state, left_out), **counters}  # which no metric takes the place of


def _single_numbers(values: dict[str, Tensor], state: State, left_out: set[str]) -> dict[str, Tensor]:
    """Copy of the tensors that hold a single number, of which a population has one for each member."""
    # The keys of a population tell that it is one. Copies, because a step that donates its state writes the next
    # loss over this one.
    num_dims = state.key.ndim - 1
    for name, value in values.items():
        if value.ndim != num_dims and name not in left_out:
            left_out.add(name)
            warn(
                f"metric {name!r} is left out of the records: expected a single number, got a tensor of shape "
                f"{tuple(value.shape[num_dims:])}; report a mean, or each number under a name of its own"
            )
    return {name: value.detach().clone() for name, value in values.items() if value.ndim == num_dims}


def read(records: Iterable[dict[str, Any]]) -> None:
    """Turn tensors in records into numbers and lists of them, with one transfer for each dtype, device and shape."""
    groups: dict[Any, list[tuple[dict[str, Any], str, Tensor]]] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, Tensor):
                groups.setdefault((value.dtype, value.device, value.shape), []).append((record, name, value))
    for entries in groups.values():
        numbers = torch.stack([value for _, _, value in entries]).tolist()
        for (record, name, _), number in zip(entries, numbers, strict=True):
            record[name] = number
