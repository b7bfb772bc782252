"""Data that know their position, such as streams: a run saves it, and continues there without reading batches again.

Torchdata's `StatefulDataLoader`, Hugging Face's `IterableDataset` and the `StreamingDataLoader` of MosaicML Streaming
have `state_dict` and `load_state_dict`. The order of their batches is their own. Each batch is read with the global
generators seeded from (key, epoch, number of the batch), so that draws do not depend on earlier batches.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from purecompose._support.checks import is_callable_with
from purecompose.data.order import seed_words
from purecompose.data.seeding import kept_globals, load_numpy, seed_globals
from purecompose.random import salt
from purecompose.time import Timestamp


__all__ = ["PositionedBatches", "has_shuffle_buffer", "needs_other_loader", "position_at", "position_holder"]

_BEGIN, _NEXT = salt("data begin"), salt("data next")


def position_holder(data: Any) -> Any:
    """Return what knows the position of data by `state_dict` and `load_state_dict`; `None` if nothing does.

    It is the data itself or, of a `DataLoader` that reads a stream in this process, the stream.
    """
    if callable(getattr(data, "epoch", None)) or isinstance(data, type) or has_shuffle_buffer(data):
        return None
    if _has_position(data):
        return data
    if isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset) and not data.num_workers:
        return data.dataset if _has_position(data.dataset) else None
    return None


def has_shuffle_buffer(data: Any) -> bool:
    """Return whether data read a stream of Hugging Face with a shuffle buffer, which its `state_dict` leaves out."""
    stream = data.dataset if isinstance(data, DataLoader) else data
    sources = [getattr(stream, "_ex_iterable", None)]
    while sources:
        source = sources.pop()
        if (getattr(source, "buffer_size", None) or 1) > 1:
            return True
        within = getattr(source, "ex_iterable", None)
        sources += [*([] if within is None else [within]), *getattr(source, "ex_iterables", ())]
    return False


def needs_other_loader(data: "DataLoader[Any]") -> bool:
    """Return whether only a loader of its own can ask a data set for its position (MosaicML's `StreamingDataset`)."""
    return callable(getattr(data.dataset, "state_dict", None)) and not (
        _has_position(data.dataset) or position_holder(data) is data
    )


def position_at(batches: "PositionedBatches", start: Timestamp, now: Timestamp) -> dict[str, Any] | None:
    """Return the position of the data at a time of the run; `None` if they do not stand there.

    Args:
        batches: The batches of an epoch, read from `start` on.
        start: When the first of them was requested.
        now: When the position is saved: after the last one that was trained.
    """
    if now.batch - start.batch != batches.num_returned:
        return None
    if now.batch_in_epoch == 0:
        return batches.position(is_over=True)
    return batches.position(is_over=None if now.run.batches_per_epoch is None else False)


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
        self._known: dict[str, Any] | None = saved
        self._ahead: Any = None  # what has been read to find out whether the epoch is over

    def __iter__(self) -> "PositionedBatches":
        return self

    def __next__(self) -> Any:
        following = self._look_ahead()
        if isinstance(following, Exception):
            raise following
        if following is _END:
            raise StopIteration
        self._ahead = self._known = None
        self._number += 1
        return following.batch

    @property
    def num_returned(self) -> int:
        """The number of batches that have been returned."""
        return self._number - self._start

    def position(self, *, is_over: bool | None) -> dict[str, Any] | None:
        """Return the position after the last batch, and whether the epoch ends there; `None` if it is not known.

        Args:
            is_over: Whether the epoch ends there. If it is `None`, the next batch is read, and kept, to find out: data
                may stand at their start again after the last batch.

        Raises:
            TypeError: `state_dict` returns `None`.
            Exception: What reading the next batch raises; asking for that batch raises it again.
        """
        if self._known is None and self.num_returned:
            current = copy.deepcopy(self._holder.state_dict())
            if current is None:
                raise TypeError(f"{type(self._holder).__name__}.state_dict returns None")
            if is_over is None:
                following = self._look_ahead()
                if isinstance(following, Exception):
                    raise following
                is_over = following is _END
            self._known = {"state": current, "is_over": is_over}
        return self._known

    def _look_ahead(self) -> Any:
        """Return the next batch as `_Batch`, `_END`, or the error that reading it has raised."""
        if self._ahead is None:
            try:
                batch = self._read()
                self._ahead = _END if batch is _END else _Batch(batch)
            except Exception as error:
                self._ahead = error
        return self._ahead

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
        if self._saved is not None:
            _forget_loaded(self._holder)
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
    """Return whether the methods can be called: `state_dict` of MosaicML's `StreamingDataset` needs other arguments."""
    methods = (getattr(data, "state_dict", None), 0), (getattr(data, "load_state_dict", None), 1)
    return all(callable(method) and is_callable_with(method, num) for method, num in methods)


def _forget_loaded(holder: Any) -> None:
    """Let a stream of Hugging Face that has gone on from a loaded position begin its next epoch at the start."""
    stream = getattr(holder, "dataset", holder)
    if getattr(stream, "_starting_state_dict", None) is not None:
        stream._starting_state_dict = None


class _Batch(NamedTuple):
    """A batch that has been read; it may be of any type."""

    batch: Any


_END = object()
