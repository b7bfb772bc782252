"""Schedules of `torch.optim.lr_scheduler` as pure functions of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from purecompose._support.checks import shown
from purecompose.schedule.axis import checked_time
from purecompose.schedule.scalar import Schedule
from purecompose.time import Time, TimeLike, Timestamp, TimeUnit


__all__ = ["from_torch"]

_UNITS = (TimeUnit.BATCH, TimeUnit.EPOCH)


def from_torch(make: Callable[..., Any], *, every: TimeLike = "1ep", **settings: Any) -> Schedule:
    """Return the multiplier that a scheduler of torch gives an optimizer whose learning rate is 1.

    The scheduler runs ahead, on an optimizer of its own, and its values are kept: the schedule is a function of the
    time, so runs continue exactly from any batch. Settings that torch takes as learning rates (`eta_min`, `max_lr`,
    `base_lr`) are multipliers here. Momentum that a scheduler moves stays as it is.

    Args:
        make: A class of `torch.optim.lr_scheduler`, or a function `(optimizer, **settings) -> scheduler`.
        every: How often the scheduler steps, in epochs or batches: "1ep", "1ba".
        **settings: The scheduler's.

    Raises:
        TypeError: A scheduler that steps by a metric; `purecompose.ReduceOnPlateau` does what that does.
        ValueError: An interval that is not positive, or in another unit. At a time past the end of a scheduler that
            has a fixed number of steps: as torch's.

    Example:
        >>> halving = from_torch(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
        >>> [halving(Timestamp(epoch=epoch)) for epoch in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    if make is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise TypeError(
            "schedule.from_torch: ReduceLROnPlateau steps by a metric, and a schedule is a function of time: use "
            'fit(..., adjust=purecompose.ReduceOnPlateau("eval/loss"))'
        )
    every = checked_time(every, "schedule.from_torch: every", is_positive=True)
    if every.unit not in _UNITS:
        raise ValueError(f"schedule.from_torch: every={every}: expected epochs or batches")
    if not callable(make):
        raise TypeError(f"schedule.from_torch: expected a class of torch.optim.lr_scheduler, got {shown(make)}")
    values = _Values(make, tuple(sorted(settings.items())), every)
    values.at(0)  # a wrong setting is an error now
    given = "".join(f", {name}={value!r}" for name, value in settings.items())
    return Schedule(values, f"from_torch({getattr(make, '__name__', make)}, every={str(every)!r}{given})")


@dataclasses.dataclass(frozen=True)
class _Values:
    make: Callable[..., Any]
    settings: tuple[tuple[str, Any], ...]
    every: Time
    _known: list[float] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def __call__(self, timestamp: Timestamp) -> float:
        return self.at(int(timestamp.get(self.every.unit) // self.every.value))

    def at(self, num_steps: int) -> float:
        """Return the value after so many steps. The scheduler runs from its start, twice as far as is asked for."""
        if num_steps >= len(self._known):
            self._known[:] = self._run(num_steps, 2 * num_steps + 1)
        return self._known[num_steps]

    def _run(self, needed: int, num: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
        scheduler = self.make(optimizer, **dict(self.settings))
        values = [float(optimizer.param_groups[0]["lr"])]
        while len(values) < num:
            optimizer.step()
            try:
                scheduler.step()
            except ValueError:  # a scheduler of a fixed number of steps, such as OneCycleLR, is at its end
                if len(values) <= needed:
                    raise
                break
            values.append(float(optimizer.param_groups[0]["lr"]))
        return values
