"""Reading the batches of an epoch, and checking that they fit the run's length."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from purecompose.core.state import State
from purecompose.data.checks import StateStream
from purecompose.data.loaders import epoch_batches
from purecompose.data.position import PositionedBatches, position_at
from purecompose.data.prefetch import prefetch
from purecompose.data.waiting import watched
from purecompose.time import Timestamp, TimeUnit


class EpochData(Protocol):
    """Data with an order of their own, so that a run continues in the middle of an epoch without skipping batches."""

    def epoch(self, key: Tensor, epoch: int, start: int, /) -> Iterable[Any]:
        """Return the batches of an epoch from batch `start` on, in an order that depends on the run's key only."""
        ...


EXHAUSTED = object()
"""The batch after the last one of an epoch."""
Position: TypeAlias = Callable[[Timestamp], Any]
"""A function that returns the position of the data at the time of a state; `None` if it is not known."""


def reader(data: Any, start: State, position: Any) -> tuple[Callable[[State], Any], Position]:
    """Return a function that reads the epoch's next batch, and one that returns the position of the data.

    The first is given the current state, and begins at the start's place. The batches are on the state's device; for a
    GPU they are sent ahead. At the end it returns `EXHAUSTED`.
    """
    if isinstance(data, StateStream):
        return lambda state: next(prefetch([data.batch(state)], state.device)), lambda _: None
    now = start.timestamp
    # All members of a population train on the same batches, in the order of the first member.
    key = start.key.reshape(-1, 2)[0]
    batches = epoch_batches(data, key, now.epoch, now.batch_in_epoch, position)
    positioned = batches if isinstance(batches, PositionedBatches) else None
    # A batch read from an iterator is gone, and the next run must find the one that follows; a position is that after
    # the batch that is trained: no reading ahead.
    is_ordered = isinstance(data, Iterator) or positioned is not None
    sent = prefetch(watched(batches, data), start.device, size=1 if is_ordered else 2)
    return lambda _: next(sent, EXHAUSTED), lambda at: None if positioned is None else position_at(positioned, now, at)


def check_exhausted(now: Timestamp) -> None:
    """Raise if the data end before the epoch does."""
    if now.batch_in_epoch == 0:
        raise ValueError(f"no batch came in epoch {now.epoch}: is the data empty, or an exhausted iterator?")
    if now.run.batches_per_epoch is not None:
        raise ValueError(
            f"the data ended after {now.batch_in_epoch} batches of epoch {now.epoch}, but the state's "
            f"batches_per_epoch is {now.run.batches_per_epoch}; leave it out, or give the number that comes"
        )


def check_moved(before: Timestamp, now: Timestamp) -> None:
    """Raise if the batch has none of the units that the run's length is counted in: the run would never end."""
    run = now.run
    if run.duration is None:
        return
    unit = run.duration.unit
    if unit is TimeUnit.TOKEN and now.token == before.token:
        raise ValueError(
            f"the run is counted in tokens (duration {run.duration}), but batch {before.batch} has none: tokens are "
            "the elements of a batch's 'input_ids'. Name the ids so, or give the duration in samples, batches or epochs"
        )
    if unit is TimeUnit.SAMPLE and now.sample == before.sample:
        raise ValueError(
            f"the run is counted in samples (duration {run.duration}), but batch {before.batch} has none; leave empty "
            "batches out of the data, or give the duration in batches or epochs"
        )
