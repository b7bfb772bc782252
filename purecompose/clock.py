"""The time of a step as traced code may read it: one small tensor.

The host's counters are the only source. They are written into the tensor, with the values that every schedule
takes then, so that traced code holds no changing Python number.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from purecompose import tree
from purecompose.schedule import Schedule
from purecompose.time import Timestamp


__all__ = ["Clock"]

_FIELDS = ("batch", "epoch", "batch_in_epoch", "sample", "token", "elapsed")


class Clock:
    """Time inside a step. Its tensor is made when first read: a step that reads no time pays nothing."""

    __slots__ = ("schedules", "_values", "_later", "_source")

    def __init__(
        self,
        values: Tensor | None,
        later: "Clock | None",
        schedules: tuple[Schedule, ...],
        source: tuple[Timestamp, torch.device] | None = None,
    ) -> None:
        """Takes the values, or what they can be made from; `Clock.of` is the usual way."""
        self._values, self._later, self.schedules, self._source = values, later, schedules, source

    @classmethod
    def of(cls, now: Timestamp, later: Timestamp, schedules: tuple[Schedule, ...], device: torch.device) -> "Clock":
        """The clock of a step that leads from `now` to `later`."""
        return cls(None, cls(None, None, schedules, (later, device)), schedules, (now, device))

    @property
    def values(self) -> Tensor:
        """float64 of shape (fields,), which holds every count below 2**53 exactly."""
        if self._values is None:
            assert self._source is not None
            timestamp, device = self._source
            self._values = torch.tensor(_read(timestamp, self.schedules), dtype=torch.float64, device=device)
        return self._values

    @property
    def batch(self) -> Tensor:
        """The number of batches finished, 0-d int64."""
        return self.values[0].to(torch.int64)

    @property
    def epoch(self) -> Tensor:
        """The number of epochs finished, 0-d int64."""
        return self.values[1].to(torch.int64)

    @property
    def batch_in_epoch(self) -> Tensor:
        """The number of batches finished in this epoch, 0-d int64."""
        return self.values[2].to(torch.int64)

    @property
    def sample(self) -> Tensor:
        """The number of examples seen, 0-d int64."""
        return self.values[3].to(torch.int64)

    @property
    def token(self) -> Tensor:
        """The number of tokens seen, 0-d int64."""
        return self.values[4].to(torch.int64)

    @property
    def elapsed(self) -> Tensor:
        """The fraction of the run that is over, 0-d float64; NaN in a run without a duration."""
        return self.values[5]

    def scheduled(self, schedule: Schedule) -> Tensor:
        """The schedule's multiplier now, 0-d float64.

        Raises:
            KeyError: The schedule is none of those that the step evaluates.
        """
        if schedule not in self.schedules:
            raise KeyError(
                f"{schedule!r} is not evaluated in this step: schedules work in optimizers' settings and in "
                "those that an algorithm lists in its config"
            )
        return self.values[len(_FIELDS) + self.schedules.index(schedule)]

    def advanced(self) -> "Clock":
        """The clock after the step's `advance`."""
        return self._later or self


def _read(timestamp: Timestamp, schedules: tuple[Schedule, ...]) -> list[float]:
    elapsed = timestamp.elapsed()
    return [
        timestamp.batch,
        timestamp.epoch,
        timestamp.batch_in_epoch,
        timestamp.sample,
        timestamp.token,
        float("nan") if elapsed is None else elapsed,
        *[schedule(timestamp) for schedule in schedules],
    ]


def _flatten(clock: Clock) -> tuple[tuple[str, ...], tuple[Any, ...], Any]:
    if clock._later is None:
        return ("values",), (clock.values,), clock.schedules
    return ("values", "later"), (clock.values, clock._later), clock.schedules


def _unflatten(names: tuple[str, ...], children: Iterable[Any], schedules: Any) -> Clock:
    del names
    values, later = (*children, None)[:2]
    return Clock(values, later, schedules)


tree.register_node(Clock, _flatten, _unflatten)
