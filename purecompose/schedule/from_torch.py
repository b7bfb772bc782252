"""Schedules of `torch.optim.lr_scheduler` as pure functions of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from purecompose._support.checks import frozen, shown
from purecompose.schedule.scalar import Schedule
from purecompose.schedule.shape import checked_time
from purecompose.time import Time, TimeLike, Timestamp, TimeUnit


_UNITS = (TimeUnit.BATCH, TimeUnit.EPOCH)


def from_torch(make: Callable[..., Any], *, every: TimeLike = "1ep", **settings: Any) -> Schedule:
    """Return the multiplier that a scheduler of torch sets on an optimizer whose learning rate is 1.

    The scheduler is run ahead, on a separate optimizer, and its values are stored: the schedule is a function of
    time, so runs resume exactly from any batch. Settings that torch takes as learning rates (`eta_min`, `max_lr`,
    `base_lr`) are multipliers here. A scheduler's changes of momentum are ignored.

    Args:
        make: A class of `torch.optim.lr_scheduler`, or a function `(optimizer, **settings) -> scheduler`.
        every: Interval between the scheduler's steps, in epochs or batches: "1ep", "1ba".
        **settings: Settings of the scheduler.

    Raises:
        TypeError: The scheduler steps by a metric; use `purecompose.ReduceOnPlateau` instead.
        ValueError: The interval is not positive, or in another unit. Also raised by torch at a time past the end of a
            scheduler that has a fixed number of steps.

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
    values = _Values(make, tuple((name, frozen(value)) for name, value in sorted(settings.items())), every)
    values.at(0)  # raises here if a setting is wrong
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
        """Return the value after `num_steps` steps. The scheduler runs from its start, twice as far as needed."""
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
            except ValueError:  # a scheduler with a fixed number of steps, such as OneCycleLR, has ended
                if len(values) <= needed:
                    raise
                break
            values.append(float(optimizer.param_groups[0]["lr"]))
        return values
