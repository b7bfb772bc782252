"""The end of a run of several processes after a signal: all end after the same batch."""

import itertools
import signal
from typing import Any

import torch.distributed as dist


__all__ = ["CommonEnd"]

_NUMBERS = itertools.count()
"""Numbers of the runs in this process, which are the same in all processes."""


class CommonEnd:
    """The batch after which all processes end.

    A process that has received a signal notes in the process group's store that all end after the next batch. No other
    can have gone further, since that batch needs its messages. Each looks into the store after every batch, and so does
    not wait for a GPU.
    """

    def __init__(self) -> None:
        self._place = f"purecompose/end/{next(_NUMBERS)}"
        self._store: Any = dist.distributed_c10d._get_default_store()

    def due(self, batch: int, received: signal.Signals | None) -> signal.Signals | None:
        """Return the signal by which the run ends after a batch, if it does.

        Args:
            batch: The number of batches so far.
            received: The signal that this process has received, if any.
        """
        if received is not None:
            self._store.compare_set(self._place, "", f"{batch + 1} {int(received)}")
        elif not self._store.check([self._place]):
            return None
        last, number = map(int, self._store.get(self._place).split())
        return signal.Signals(number) if batch >= last else None
