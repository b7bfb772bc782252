"""The clock: the time of a step for traced code, as one small tensor.

The host's counters are the only source. They are written into the tensor together with the value of every schedule
at that time, so that traced code contains no changing Python number.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.device import sent
from purecompose.nn.keyed.draws import current_run
from purecompose.random.keys import fold_in
from purecompose.schedule import Schedule
from purecompose.time import Timestamp


_FIELDS = ("batch", "epoch", "batch_in_epoch", "sample", "token", "elapsed", "draw")


class Clock:
    """Time inside a step. Its tensor is made when first read: a step that reads no time pays nothing.

    Attributes:
        schedules: The schedules whose values follow the counters.
        domain: Purpose of the draws: "" in a training step, otherwise the name of the program or event.
    """

    __slots__ = ("schedules", "domain", "_source", "_row", "_values")

    def __init__(self, source: "_Source", schedules: tuple[Schedule, ...], domain: str, row: int = 0) -> None:
        """Store the source of the numbers; `Clock.of` is the usual way to create a clock."""
        self._source = source
        self.schedules: tuple[Schedule, ...] = schedules
        self.domain: str = domain
        self._row = row
        self._values: Tensor | None = None

    @classmethod
    def of(
        cls,
        now: Timestamp,
        later: Timestamp,
        schedules: tuple[Schedule, ...],
        device: torch.device,
        *,
        domain: str = "",
        draw: int | None = None,
    ) -> "Clock":
        """Return the clock of a step from `now` to `later`; `draw`, by default the batch, identifies its draws."""
        draw = now.batch if draw is None else draw
        return cls(_Source(now, later, schedules, draw, device), schedules, domain)

    @property
    def table(self) -> Tensor:
        """float64 of shape (2, fields): the numbers before `advance` and after it; exact below 2**53."""
        return self._source.table

    @property
    def values(self) -> Tensor:
        """float64 of shape (fields,): the numbers now."""
        if self._values is None:
            self._values = self._source.table[self._row]
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

    @property
    def draw(self) -> Tensor:
        """The number of this step's draws, 0-d int64: the same before and after `advance`, so that no draw repeats."""
        self._note_draw()
        return self.values[6].to(torch.int64)

    def key_of_draws(self, key: Tensor) -> Tensor:
        """Return `fold_in(key, draw)`, the key of this step's draws, derived once per step."""
        self._note_draw()
        known = self._source.folded
        if known is None or known[0] is not key:
            known = self._source.folded = key, fold_in(key, self._source.draw)
        return known[1]

    def _note_draw(self) -> None:
        run = current_run()
        if run is not None and run.watch is not None:
            run.watch.has_drawn = True

    def scheduled(self, schedule: Schedule) -> Tensor:
        """Return the schedule's multiplier now, 0-d float64.

        Raises:
            KeyError: The step does not evaluate this schedule.
            Exception: The schedule raised this error for the time after `advance`.
        """
        if schedule not in self.schedules:
            raise KeyError(
                f"{schedule!r} is not evaluated in this step: schedules work in optimizers' settings and in "
                "those that an algorithm lists in its config"
            )
        value = self.values[len(_FIELDS) + self.schedules.index(schedule)]
        if self._row == 1 and (error := self._source.failed_later.get(schedule)) is not None:
            raise error
        return value

    def advanced(self) -> "Clock":
        """Return the clock after the step's `advance`."""
        return Clock(self._source, self.schedules, self.domain, 1)

    def without_zeros(self) -> "Clock":
        """Return the clock with 1 in place of schedules that are 0."""
        counters, values = self.table.split([len(_FIELDS), len(self.schedules)], dim=1)
        table = torch.cat([counters, torch.where(values == 0, 1.0, values)], dim=1)
        return Clock(_Source(table=table), self.schedules, self.domain, self._row)


class _Source:
    """The source of a clock's numbers: a table, or the host's counters from which the table is made when first read."""

    __slots__ = ("failed_later", "folded", "_counters", "_table")

    def __init__(self, *counters: Any, table: Tensor | None = None) -> None:
        self._counters, self._table = counters, table
        self.folded: tuple[Tensor, Tensor] | None = None  # a key, and the key of the step's draws
        # Errors are raised only when a value after `advance` is read, which is rare: a list of rates may end with the
        # run. Traced code sees NaN.
        self.failed_later: dict[Schedule, Exception] = {}

    @property
    def draw(self) -> int | Tensor:
        """The number of the step's draws; an int where the host knows it, which costs no operations."""
        return self._counters[3] if self._counters else self.table[0, 6].to(torch.int64)

    @property
    def table(self) -> Tensor:
        if self._table is None:
            now, later, schedules, draw, device = self._counters
            rows = [_read(now, draw, schedules), _read(later, draw, schedules, self.failed_later)]
            self._table = sent(rows, torch.float64, device)
        return self._table


def _read(
    timestamp: Timestamp, draw: int, schedules: tuple[Schedule, ...], failed: dict[Schedule, Exception] | None = None
) -> list[float]:
    """Return the numbers at a time.

    If `failed` is given, errors of schedules are recorded there, and their numbers are NaN.
    """
    elapsed = timestamp.elapsed()
    row = [
        timestamp.batch,
        timestamp.epoch,
        timestamp.batch_in_epoch,
        timestamp.sample,
        timestamp.token,
        math.nan if elapsed is None else elapsed,
        draw,
    ]
    for schedule in schedules:
        try:
            row.append(schedule(timestamp))
        except Exception as error:
            if failed is None:
                raise
            failed[schedule] = error
            row.append(math.nan)
    return row


def _flatten(clock: Clock) -> tuple[tuple[str, ...], tuple[Any, ...], Any]:
    return ("table",), (clock.table,), (clock.schedules, clock.domain, clock._row)


def _unflatten(names: tuple[str, ...], children: Iterable[Any], static: Any) -> Clock:
    del names
    (table,) = children
    return Clock(_Source(table=table), *static)


tree.register_node(Clock, _flatten, _unflatten)
