"""Numbers that stay on the device until they are read in groups."""

import math
import time
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from purecompose._support.messages import warn
from purecompose.core.state import State
from purecompose.time.event import Event


T = TypeVar("T")


class Pile(Generic[T]):
    """A queue whose items are processed together, once there are enough or the first has waited long enough.

    Args:
        most: Number of items at which the queue is due.
        seconds: Time after which the first item is due, in seconds; checked when another one is added.
    """

    def __init__(self, most: int, seconds: float = math.inf) -> None:
        self._most, self._seconds = most, seconds
        self._waiting: list[T] = []
        self._since = 0.0

    def add(self, thing: T) -> bool:
        """Add an item, and return whether it is time to take all of them."""
        now = time.monotonic()
        if not self._waiting:
            self._since = now
        self._waiting.append(thing)
        return len(self._waiting) >= self._most or now - self._since >= self._seconds

    def take(self) -> list[T]:
        """Return the waiting items in order, and empty the queue."""
        waiting, self._waiting = self._waiting, []
        return waiting


def record_of(event: Event, state: State, left_out: set[str]) -> dict[str, Any] | None:
    """Return the record of a BATCH_END or EVAL_END, with tensors for numbers; None at other events.

    Args:
        event: The event.
        state: The state.
        left_out: Names of the metrics that are known not to be single numbers; new ones are added, with a warning.

    Returns:
        `batch` and `epoch`, the numbers of completed batches and epochs; the loss of a batch; and the metrics.

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
    return {**counters, **_single_numbers(values, state, left_out), **counters}  # again, so that no metric replaces one


def _single_numbers(values: dict[str, Tensor], state: State, left_out: set[str]) -> dict[str, Tensor]:
    """Return copies of the tensors with a single number (for a population, one for each member)."""
    # The state of a population has several keys. Copies, because a step that donates its state overwrites the loss.
    num_dims = state.key.ndim - 1
    for name, value in values.items():
        if value.ndim != num_dims and name not in left_out:
            left_out.add(name)
            warn(
                f"metric {name!r} is left out of the records: expected a single number, got a tensor of shape "
                f"{tuple(value.shape[num_dims:])}; report a mean, or each number under a separate name"
            )
    return {name: value.detach().clone() for name, value in values.items() if value.ndim == num_dims}


def read(records: Iterable[dict[str, Any]]) -> None:
    """Replace tensors in records by numbers or lists, with one transfer for each dtype, device and shape."""
    groups: dict[Any, list[tuple[dict[str, Any], str, Tensor]]] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, Tensor):
                groups.setdefault((value.dtype, value.device, value.shape), []).append((record, name, value))
    for entries in groups.values():
        numbers = torch.stack([value for _, _, value in entries]).tolist()
        for (record, name, _), number in zip(entries, numbers, strict=True):
            record[name] = number
