"""Data that know their position, such as streams: a run saves it, and continues there without reading batches again.

Torchdata's `StatefulDataLoader`, Hugging Face's `IterableDataset` and the `StreamingDataLoader` of MosaicML Streaming
have `state_dict` and `load_state_dict`. The order of their batches is their own. Each batch is read with the global
generators seeded from (key, epoch, number of the batch), so that draws do not depend on earlier batches.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from purecompose.data.order import seed_words
from purecompose.data.seeding import kept_globals, load_numpy, seed_globals
from purecompose.random import salt


__all__ = ["PositionedBatches", "position_holder"]

_BEGIN, _NEXT = salt("data begin"), salt("data next")


def position_holder(data: Any) -> Any:
    """Return what knows the position of data by `state_dict` and `load_state_dict`; `None` if nothing does.

    It is the data itself or, of a `DataLoader` that reads a stream in this process, the stream.
    """
    if callable(getattr(data, "epoch", None)) or isinstance(data, type):
        return None
    if _has_position(data):
        return data
    if isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset) and not data.num_workers:
        return data.dataset if _has_position(data.dataset) else None
    return None


class PositionedBatches:
    """The batches of an epoch of data that know their position.

    Args:
        data: The data.
        holder: What knows the position.
        key: The run's key, int64 of shape (2,).
        epoch: Number of finished epochs.
        start: Number of the first batch to return.
        saved: The position there, as `position` returned it; if it is `None`, earlier batches are read and dropped.
    """

    def __init__(self, data: Any, holder: Any, key: Tensor, epoch: int, start: int, saved: Any) -> None:
        load_numpy()
        self._data, self._holder, self._epoch = data, holder, epoch
        self._words: tuple[int, int] = tuple(key.tolist())
        self._saved = saved
        self._start = self._number = start
        self._batches: Iterator[Any] | None = None
        self._known: Any = None
        self._ahead: list[Any] = []  # what has been read to find out whether the epoch is over

    def __iter__(self) -> "PositionedBatches":
        return self

    def __next__(self) -> Any:
        batch = self._ahead.pop() if self._ahead else self._read()
        self._known = None
        if batch is _END:
            self._ahead.append(_END)
            raise StopIteration
        self._number += 1
        return batch

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch, and whether the epoch ends there.

        Data may stand at their start again after the last batch. So the next batch is read, and kept.
        """
        if self._known is None:
            current = copy.deepcopy(self._holder.state_dict())
            if not self._ahead:
                self._ahead.append(self._read())
            self._known = {"state": current, "is_over": self._ahead[0] is _END}
        return self._known

    def _read(self) -> Any:
        batches = self._begun() if self._batches is None else self._batches
        if batches is None:
            return _END
        with self._seeded(_NEXT):
            batch = next(batches, _END)
        if batch is _END and self._number == 0:  # the data stood at the end of the epoch before
            with self._seeded(_BEGIN):
                self._batches = batches = iter(self._data)
            with self._seeded(_NEXT):
                batch = next(batches, _END)
        return batch

    def _begun(self) -> Iterator[Any] | None:
        """Return an iterator at the position; `None` if the epoch is over there."""
        with self._seeded(_BEGIN):
            if self._saved is not None:
                self._holder.load_state_dict(self._saved["state"])
                if self._saved["is_over"] and self._number:
                    return None
            self._batches = batches = iter(self._data)
        if self._saved is None:
            for number in range(self._start):
                self._number = number
                with self._seeded(_NEXT):
                    next(batches, None)
            self._number = self._start
        return batches

    @contextmanager
    def _seeded(self, draw: int) -> Iterator[None]:
        with kept_globals():
            seed_globals(seed_words(self._words, draw, self._number, self._epoch))
            yield


def _has_position(data: Any) -> bool:
    return all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))


_END = object()
