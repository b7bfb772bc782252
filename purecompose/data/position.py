"""Places in the data: seeds of an epoch, its order, torch's (on the CPU), Python's and NumPy's global generators, and
data that know their position, such as streams: a run saves it, and continues there without reading batches again.

If the global generators are seeded before each read from a place in the run, a data set that draws from them becomes a
function of that place.

Torchdata's `StatefulDataLoader`, Hugging Face's `IterableDataset` and the `StreamingDataLoader` of MosaicML Streaming
know their position by `state_dict` and `load_state_dict`, and have an order of their own.
"""

import copy
import importlib.util
import random
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2s
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from purecompose._support.specs import is_callable_with
from purecompose.random import Rng, fold_in, permutation, salt
from purecompose.time import Timestamp


_ORDER = salt("data order")


def epoch_order(key: Tensor, epoch: int, num_examples: int) -> Tensor:
    """Return the permutation of 0 .. num_examples-1 that belongs to an epoch, for all data sets of that size."""
    return permutation(Rng(fold_in(key, epoch), _ORDER), num_examples)


def epoch_seed(key: Tensor, epoch: int) -> int:
    """Return a 64-bit seed for code that draws an epoch's order in its own way, such as a sampler."""
    return int(fold_in(fold_in(key, _ORDER), epoch)[0]) % 2**64


def seed_words(key: tuple[int, int], draw: int, number: int, epoch: int) -> tuple[int, ...]:
    """Return eight 32-bit words for a numbered item of an epoch and a purpose (a salt), to seed other generators.

    A hash on the host takes 2 microseconds; a draw on tensors takes a hundred.
    """
    return _WORDS.unpack(blake2s(_PLACE.pack(*key, draw, number, epoch), digest_size=_WORDS.size).digest())


_PLACE, _WORDS = Struct("<qqIQQ"), Struct("<8I")

SEED_WORDS = 4
"""Number of 32-bit words that `seed_globals` reads."""


def load_numpy() -> None:
    """Import numpy's generator if numpy is installed.

    A data set that imported it during its first read would draw from an unseeded generator.
    """
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy.random")


class _Generator(NamedTuple):
    """What is done with a global generator."""

    seed: Callable[[Sequence[int]], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]


def _numpy(method: str, *arguments: Any) -> Any:
    """Call a function of NumPy's generator, if NumPy has been imported."""
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else getattr(numpy, method)(*arguments)


_TORCH = torch.default_generator
_GENERATORS = (
    # `torch.manual_seed` would take 100 microseconds, because it also seeds accelerators, which workers must not touch.
    _Generator(lambda words: _TORCH.manual_seed(words[0]), _TORCH.get_state, _TORCH.set_state),
    _Generator(lambda words: random.seed(words[1] << 32 | words[2]), random.getstate, random.setstate),
    _Generator(
        lambda words: _numpy("seed", words[3]),
        lambda: _numpy("get_state", False),
        lambda state: None if state is None else _numpy("set_state", state),
    ),
)


def seed_globals(words: Sequence[int]) -> None:
    """Seed the generators from four words of 32 bits each, in about 7 microseconds."""
    for generator in _GENERATORS:
        generator.seed(words)


@contextmanager
def kept_globals() -> Iterator[None]:
    """Restore the generators afterwards."""
    outside = [generator.state() for generator in _GENERATORS]
    try:
        yield
    finally:
        for generator, state in zip(_GENERATORS, outside, strict=True):
            generator.restore(state)


class Stream:
    """A stream of draws that continues from one block to the next; `torch_seed`, 64 bits, replaces the first word."""

    def __init__(self, words: Sequence[int], torch_seed: int) -> None:
        with kept_globals():
            seed_globals(words)
            _TORCH.manual_seed(torch_seed)
            self._inside = [generator.state() for generator in _GENERATORS]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a scope in which the global generators continue this stream."""
        with kept_globals():
            for generator, state in zip(_GENERATORS, self._inside, strict=True):
                generator.restore(state)
            try:
                yield
            finally:
                self._inside = [generator.state() for generator in _GENERATORS]


_BEGIN, _NEXT = salt("data begin"), salt("data next")


def position_holder(data: Any) -> Any:
    """Return what knows the position of data by `state_dict` and `load_state_dict`; `None` if nothing does.

    It is the data itself or the stream of a `DataLoader` in this process; not of a subclass with its own `__iter__`,
    which may have read more of the stream than it has returned.
    """
    if callable(getattr(data, "epoch", None)) or isinstance(data, type) or has_shuffle_buffer(data):
        return None
    if _has_position(data):
        return data
    reads_stream = isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)
    if reads_stream and not data.num_workers and type(data).__iter__ is DataLoader.__iter__:
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


def position_at(batches: "PositionedBatches", start: Timestamp, now: Timestamp) -> dict[str, Any] | None:
    """Return the position of the data, whose first batch was requested at `start`, at the time of a state.

    `None` if they do not stand there. Errors are those of `PositionedBatches.position`.
    """
    if now.batch - start.batch != batches.num_returned:
        return None  # the last batch that was read is not part of the state
    if now.batch_in_epoch == 0:
        return batches.position(is_over=True)
    return batches.position(is_over=None if now.run.batches_per_epoch is None else False)


class PositionedBatches:
    """The batches of an epoch of data, whose position `holder` knows, from the batch `start` on.

    Without `saved`, the position there, as `position` returned it, earlier batches are read and dropped.
    """

    def __init__(self, data: Any, holder: Any, key: Tensor, epoch: int, start: int, saved: Any) -> None:
        load_numpy()
        self._data, self._holder, self._epoch = data, holder, epoch
        self._words: tuple[int, int] = tuple(key.tolist())
        self._start = self._number = start
        self._saved = saved
        self._state: Any = None  # the holder's state after the last batch, once it has been requested
        self._batches: Iterator[Any] | None = None
        self._ahead: Any = _NOTHING  # what has been read ahead: a batch, `_END` or a `_Failure`

    def __iter__(self) -> "PositionedBatches":
        return self

    def __next__(self) -> Any:
        following = self._look_ahead()
        if isinstance(following, _Failure):
            raise following.error
        if following is _END:
            raise StopIteration
        # A worker that ends raises in any line; then the position is that after another batch, and not taken.
        self._number += 1
        self._ahead, self._state = _NOTHING, None
        return following

    @property
    def num_returned(self) -> int:
        return self._number - self._start

    def position(self, is_over: bool | None) -> dict[str, Any] | None:
        """Return the position after the last batch, and whether the epoch ends there; `None` if it is not known.

        If `is_over` is `None`, the next batch is read and kept to find out: after the last one data may stand at their
        start again. An error in reading it is raised, and again when the batch is requested.
        """
        if self.num_returned == 0 and (self._start or self._saved is not None):
            return self._saved
        if self._state is None:
            self._check_read()
            self._state = copy.deepcopy(self._holder.state_dict())
        if self._state is None:
            raise TypeError(f"{type(self._holder).__name__}.state_dict returns None")
        if is_over is None:
            is_over = self._look_ahead() is _END
            self._check_read()
        return {"state": self._state, "is_over": is_over}

    def _check_read(self) -> None:
        """Raise the error of reading ahead, if there was one: the data may stand anywhere."""
        if isinstance(self._ahead, _Failure):
            raise self._ahead.error

    def _look_ahead(self) -> Any:
        """Return the next batch, which is kept until it is requested, `_END`, or the `_Failure` to read it."""
        if self._ahead is _NOTHING:
            try:
                self._ahead = self._read()
            except Exception as error:
                self._ahead = _Failure(error)
            except BaseException:  # such as a second Ctrl-C
                self._ahead = _Failure(RuntimeError("reading the next batch was interrupted"))
                raise
        return self._ahead

    def _read(self) -> Any:
        if self._batches is None:
            self._batches = self._begun()
        batch = self._next(self._batches, self._number)
        if batch is _END and self._number == 0:  # the data stood at the end of the epoch before
            self._batches = self._iterated()
            batch = self._next(self._batches, 0)
        # A stream of Hugging Face that has continued from a loaded position is iterated from the start next time.
        stream = getattr(self._holder, "dataset", self._holder)
        if getattr(stream, "_starting_state_dict", None) is not None:
            stream._starting_state_dict = None
        return batch

    def _begun(self) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch."""
        if self._saved is None:
            batches = self._iterated()
            for number in range(self._start):
                self._next(batches, number)
            return batches
        with self._seeded(_BEGIN, 0):
            self._holder.load_state_dict(self._saved["state"])
        if self._saved["is_over"]:
            # A loader first continues the epoch of the loaded position, even if it is over.
            rest = self._iterated()
            if self._holder is self._data and isinstance(self._data, DataLoader) and isinstance(rest, Generator):
                self._next(rest, 0)  # that of a `StreamingDataLoader`, which does nothing before
            if self._start:
                return iter(())
        return self._iterated()

    def _iterated(self) -> Iterator[Any]:
        with self._seeded(_BEGIN, 0):  # also in the middle of an epoch, to repeat what is drawn at its start
            return iter(self._data)

    def _next(self, batches: Iterator[Any], number: int) -> Any:
        with self._seeded(_NEXT, number):
            return next(batches, _END)

    @contextmanager
    def _seeded(self, draw: int, number: int) -> Iterator[None]:
        with kept_globals():
            seed_globals(seed_words(self._words, draw, number, self._epoch))
            yield


def _has_position(data: Any) -> bool:
    """Return whether the methods can be called: `state_dict` of MosaicML's `StreamingDataset` needs other arguments."""
    methods = (getattr(data, "state_dict", None), 0), (getattr(data, "load_state_dict", None), 1)
    return all(callable(method) and is_callable_with(method, num) for method, num in methods)


class _Failure(NamedTuple):
    """The error of reading a batch."""

    error: Exception


_NOTHING, _END = object(), object()
