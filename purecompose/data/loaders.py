"""The batches of an epoch from a given one on, for any kind of data.

A `DataLoader` without a generator of its own draws by the run's key. Over a map-style data set its samplers draw in a
stream that follows from (key, epoch), and each batch is read with the global generators seeded from (key, epoch,
number of the batch). So order and augmentation repeat with any number of workers, and a run continues in the middle of
an epoch for the price of the sampler. What cannot be taken apart like this is read from its start, and what has been
trained on dropped, with a warning. Over a stream, an epoch begins with new workers, and with the global generators
seeded from (key, epoch): what an epoch gives must not depend on those before it.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from purecompose.data.order import epoch_seed, seed_words
from purecompose.data.reader import Reader, naming
from purecompose.data.samples import reads_whole_batches
from purecompose.data.seeding import Stream, kept_globals, load_numpy, seed_globals
from purecompose.random import fold_in, salt


__all__ = ["SkippingWarning", "draws_globally", "epoch_batches", "fixed_batches", "keyed_batches", "own_order"]

_SAMPLER, _BATCH, _WORKERS, _STREAM = (salt(name) for name in ("data sampler", "data batch", "workers", "data stream"))
_EVAL = salt("evaluation")


class SkippingWarning(UserWarning):
    """A run continues in the middle of an epoch by reading the epoch from its start."""


def epoch_batches(data: Any, key: Tensor, epoch: int, start: int = 0) -> Iterator[Any]:
    """Return the batches of an epoch from `start` on.

    Data with `epoch(key, epoch, start)` are asked. A `set_epoch` of the data, or of a loader's data set and samplers,
    is called with the epoch's number first. Lists, tuples and most `DataLoader`s of map-style data sets begin at
    `start`; all else is read from its start, and the first batches dropped.

    Args:
        data: Whatever `fit` takes.
        key: The run's key, int64 of shape (2,).
        epoch: The number of epochs finished.
        start: How many batches of this epoch have been trained on.

    Warns:
        SkippingWarning: Batches are read to be dropped.
    """
    if callable(getattr(data, "epoch", None)):
        return iter(data.epoch(key, epoch, start))
    _tell_epoch(data, epoch)
    if draws_globally(data):
        return keyed_batches(data, key, epoch, start)
    if isinstance(data, list | tuple):
        return islice(data, start, None)
    return _after(start, iter(data), data, epoch)


def draws_globally(data: object) -> bool:
    """Return whether iterating over this reads torch's global generator: a `DataLoader` without one of its own."""
    return isinstance(data, DataLoader) and data.generator is None


def fixed_batches(data: Iterable[Any], key: Tensor) -> Iterable[Any]:
    """Return batches to look at, not to train on: a `DataLoader` without a generator gives the same ones at each call.

    Args:
        data: Batches.
        key: The run's key, int64 of shape (2,); of a population's, (n, 2), the first one counts.
    """
    if not draws_globally(data):
        return data
    return keyed_batches(cast("DataLoader[Any]", data), fold_in(key.reshape(-1, 2)[0], _EVAL), 0)


def own_order(data: object) -> str | None:
    """Return why the order of data does not follow the run's key; `None` if it does."""
    if isinstance(data, DataLoader) and data.generator is not None:
        return (
            "the DataLoader has its own generator, which is not part of a checkpoint: its order is not what "
            "it would have been. Leave generator= out, and it follows the run's key; or take data.loader"
        )
    if isinstance(data, Iterator):
        return "an iterator has no start to go back to: what comes from it now is taken for what comes next"
    return None


def keyed_batches(data: "DataLoader[Any]", key: Tensor, epoch: int, start: int = 0) -> Iterator[Any]:
    """Return the loader's batches in an order that follows from the run's key and the epoch.

    Args:
        data: A loader without a generator.
        key: The run's key, int64 of shape (2,).
        epoch: The number of epochs finished.
        start: The first batch to give.

    Warns:
        SkippingWarning: `start` is above 0, and the loader is one of a stream, or of a class that iterates in its
            own way.
    """
    key = key.cpu()
    seed = epoch_seed(key, epoch)
    low, high = key.tolist()
    load_numpy()
    if isinstance(data.dataset, IterableDataset) or type(data).__iter__ is not DataLoader.__iter__:
        return _after(start, _streamed(data, seed_words((low, high), _STREAM, 0, epoch), seed), data, epoch)
    requests = _requests(data, (low, high), epoch, start, seed)
    return _reader(data).read(requests, seed ^ _WORKERS)


class _Request(NamedTuple):
    """A batch of a map-style loader."""

    key: tuple[int, int]
    epoch: int
    batch: int
    index: Any
    """What the sampler gave: the indices of a batch, or one where the loader makes no batches."""


def _requests(data: "DataLoader[Any]", key: tuple[int, int], epoch: int, start: int, seed: int) -> Iterator[_Request]:
    words = seed_words(key, _SAMPLER, 0, epoch)
    stream = Stream(words, seed, torch_only=_is_torchs(data.sampler) and _is_torchs(data.batch_sampler))
    indices = None
    batch = 0
    while True:
        with stream.drawing():
            if indices is None:
                indices = iter(_index_sampler(data))
            index = next(indices, _END)
        if index is _END:
            return
        if batch >= start:
            yield _Request(key, epoch, batch, index)
        batch += 1


def _index_sampler(data: "DataLoader[Any]") -> Iterable[Any]:
    return data.sampler if data.batch_sampler is None else data.batch_sampler


def _is_torchs(sampler: Any) -> bool:
    """Return whether a sampler is known to draw from torch's generator only."""
    return sampler is None or type(sampler).__module__ == "torch.utils.data.sampler"


class _Batches:
    """Makes a batch as a map-style `DataLoader` does, with the global generators seeded for it."""

    def __init__(self, data: "DataLoader[Any]") -> None:
        self.dataset, self.collate_fn = data.dataset, data.collate_fn
        self.makes_batches = data.batch_sampler is not None
        self.reads_whole_batches = reads_whole_batches(data.dataset)
        self._epoch: int | None = None

    def __getitem__(self, request: _Request) -> Any:
        if request.epoch != self._epoch:  # a worker that stays has a data set of its own
            _tell_epoch(self.dataset, request.epoch)
            self._epoch = request.epoch
        with kept_globals() if get_worker_info() is None else nullcontext():
            seed_globals(seed_words(request.key, _BATCH, request.batch, request.epoch))
            with naming(f"this happened with batch {request.batch} of epoch {request.epoch}: {request.index}"):
                return self._read(request.index)

    def _read(self, index: Any) -> Any:
        if not self.makes_batches:
            return self.collate_fn(self.dataset[index])
        if self.reads_whole_batches:
            whole: Any = self.dataset
            return self.collate_fn(whole.__getitems__(index))
        return self.collate_fn([self.dataset[number] for number in index])


# Readers of loaders with persistent workers, which stay as long as the loader.
_KEPT: "WeakKeyDictionary[DataLoader[Any], Reader]" = WeakKeyDictionary()


def _reader(data: "DataLoader[Any]") -> Reader:
    if data in _KEPT:
        return _KEPT[data]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's own loader has said the same
        reader = Reader(
            _Batches(data),
            persistent_workers=data.persistent_workers,
            num_workers=data.num_workers,
            prefetch_factor=data.prefetch_factor if data.num_workers else None,
            pin_memory=data.pin_memory,
            timeout=data.timeout,
            worker_init_fn=data.worker_init_fn,
            multiprocessing_context=data.multiprocessing_context,
        )
    if data.persistent_workers:
        _KEPT[data] = reader
    return reader


def _streamed(data: "DataLoader[Any]", words: Sequence[int], seed: int) -> Iterator[Any]:
    """Yield the loader's batches, with the global generators seeded for the epoch while it loads."""
    stream = Stream(words, seed, torch_only=False)
    with stream.drawing():
        # The workers' seed would come from the global generator.
        data.generator = torch.Generator().manual_seed(seed ^ _WORKERS)
        _let_go(data)
        try:
            batches = iter(data)
        finally:
            data.generator = None
            _let_go(data)
    try:
        while True:
            with stream.drawing():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
    finally:
        # The loader may keep them alive; see `reader` for why this is not left to the garbage collector.
        getattr(batches, "_shutdown_workers", lambda: None)()
        _let_go(data)


def _let_go(data: "DataLoader[Any]") -> None:
    """Make a loader forget the workers that it would keep for the next epoch.

    Those have generators that have been drawn from, and a data set that no `set_epoch` reaches.
    """
    data._iterator = None


def _after(start: int, batches: Iterator[Any], data: Any, epoch: int) -> Iterator[Any]:
    """Return the batches after the first `start`, which are read and dropped when the first of the rest is
    wanted.
    """
    if start == 0:
        return batches
    named = type(data).__name__
    if isinstance(data, DataLoader):
        named += f" over {type(data.dataset).__name__}"
    used = "; an iterator that has been read from before loses what comes next" if isinstance(data, Iterator) else ""
    warnings.warn(
        f"continuing at batch {start} of epoch {epoch}: the {start} before it are read from {named} and dropped: it "
        "cannot start in the middle. That is exact where it gives the same batches in the same order each "
        f"time{used}. Data with `epoch(key, epoch, start)`, such as data.loader, start at any batch",
        SkippingWarning,
        stacklevel=3,
    )
    return islice(batches, start, None)


def _tell_epoch(data: Any, epoch: int) -> None:
    """Call `set_epoch` where there is one: Hugging Face's streams and distributed samplers shuffle by it."""
    tellable = [data]
    if isinstance(data, DataLoader):
        tellable += [data.dataset, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
    for member in {id(member): member for member in tellable}.values():
        if callable(set_epoch := getattr(member, "set_epoch", None)):
            set_epoch(epoch)


_END = object()
