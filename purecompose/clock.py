"""The time of a step as traced code may read it: one small tensor.

The host's counters are the only source. They are written into the tensor at the start of a step, with the values
that every schedule takes there, so that traced code holds no changing Python number.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from purecompose import tree
from purecompose.schedule import Schedule
from purecompose.time import Timestamp


__all__ = ["Clock"]

_FIELDS = ("batch", "epoch", "batch_in_epoch", "sample", "token", "elapsed")


@dataclass(frozen=True, slots=True)
class Clock:
    """Time inside a step.

    Attributes:
        values: float64 of shape (1 or 2, fields): the time before and, where something asks for it, after the
            step's `advance`. float64 holds every count below 2**53 exactly.
        row: Which of the two is now.
        schedules: The schedules whose values follow the counters, in order.
    """

    values: Tensor
    row: int
    schedules: tuple[Schedule, ...]

    @property
    def batch(self) -> Tensor:
        """The number of batches finished, 0-d int64."""
        return self._field(0).to(torch.int64)

    @property
    def epoch(self) -> Tensor:
        """The number of epochs finished, 0-d int64."""
        return self._field(1).to(torch.int64)

    @property
    def batch_in_epoch(self) -> Tensor:
        """The number of batches finished in this epoch, 0-d int64."""
        return self._field(2).to(torch.int64)

    @property
    def sample(self) -> Tensor:
        """The number of examples seen, 0-d int64."""
        return self._field(3).to(torch.int64)

    @property
    def token(self) -> Tensor:
        """The number of tokens seen, 0-d int64."""
        return self._field(4).to(torch.int64)

    @property
    def elapsed(self) -> Tensor:
        """The fraction of the run that is over, 0-d float64; NaN in a run without a duration."""
        return self._field(5)

    def scheduled(self, schedule: Schedule) -> Tensor:
        """The schedule's multiplier now, 0-d float64.

        Raises:
            KeyError: The schedule is none of those that the step evaluates.
        """
        if schedule not in self.schedules:
            raise KeyError(
                f"{schedule!r} is not evaluated in this step: schedules work in optimizers' settings and in those "
                "that an algorithm lists in its config"
            )
        return self._field(len(_FIELDS) + self.schedules.index(schedule))

    def advanced(self) -> "Clock":
        """The clock after the step's `advance`."""
        return replace(self, row=1)

    def _field(self, index: int) -> Tensor:
        return self.values[self.row, index]


def read(timestamp: Timestamp, schedules: tuple[Schedule, ...]) -> list[float]:
    """One row of a clock's values."""
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


tree.register_node(
    Clock,
    lambda clock: (("values",), (clock.values,), (clock.row, clock.schedules)),
    lambda names, children, static: Clock(next(iter(children)), *static),
)
