"""The batches of any kind of data: those of an epoch, from a given batch on, and those made from the state of a run.

A `DataLoader` without its own generator draws by the run's key: over a map-style data set its samplers by (key,
epoch), and the reading of a batch by (key, epoch, its number), so that a run can resume within an epoch. Over a stream,
an epoch begins with new workers, since its batches must not depend on earlier epochs.
"""

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from purecompose._support.messages import warn
from purecompose._support.objects import fingerprint
from purecompose._support.specs import is_callable_with, shown
from purecompose.batch import tensors
from purecompose.data.map_style import read_columns, reads_whole_batches
from purecompose.data.position import (
    PositionedBatches,
    Stream,
    epoch_seed,
    has_shuffle_buffer,
    kept_globals,
    load_numpy,
    position_holder,
    seed_globals,
    seed_words,
)
from purecompose.data.reader import Reader, naming
from purecompose.errors import SkippingWarning
from purecompose.random import fold_in, salt


_SAMPLER, _BATCH, _WORKERS, _STREAM = (salt(name) for name in ("data sampler", "data batch", "workers", "data stream"))
_EVAL = salt("evaluation")


def epoch_batches(data: Any, key: Tensor, epoch: int, start: int = 0, position: Any = None) -> Iterator[Any]:
    """Return the batches of an epoch from `start` on.

    If the data have a method `epoch(key, epoch, start)`, it is used. Otherwise, a `set_epoch` of the data, or of a
    loader's data set and samplers, is called first. Lists, tuples and most `DataLoader`s of map-style data sets begin
    at `start`, and data with `state_dict` and `load_state_dict` at a `position`; of others the first batches are read
    and dropped.

    Args:
        data: Any data that `fit` accepts.
        key: The run's key, int64 of shape (2,).
        epoch: Number of finished epochs.
        start: Number of batches of this epoch that have been trained on.
        position: The position after these batches, from `PositionedBatches.position`, if the data have one and it is
            known: they continue there.

    Warns:
        SkippingWarning: Batches are read and dropped.
    """
    if callable(getattr(data, "epoch", None)):
        return iter(data.epoch(key, epoch, start))
    _tell_epoch(data, epoch)
    holder = position_holder(data)
    if holder is not None:
        if start and position is None:
            _warn_of_reading(start, data, epoch, "no position of the data is saved")
        return PositionedBatches(data, holder, key, epoch, start, position)
    if draws_globally(data):
        return keyed_batches(data, key, epoch, start)
    if isinstance(data, list | tuple):
        return islice(data, start, None)
    return _after(start, iter(data), data, epoch)


def draws_globally(data: object) -> bool:
    """Return whether iterating over data reads torch's global generator, as a `DataLoader` without a generator does."""
    return isinstance(data, DataLoader) and data.generator is None


def fixed_batches(data: Iterable[Any], key: Tensor) -> Iterable[Any]:
    """Return batches for evaluation: a `DataLoader` without a generator yields the same in each call.

    Of the keys (n, 2) of a population, the first one is used.
    """
    if not draws_globally(data):
        return data
    return keyed_batches(cast("DataLoader[Any]", data), fold_in(key.reshape(-1, 2)[0], _EVAL), 0)


def shuffles(data: object) -> bool:
    """Return whether data are not in the order of their data set: in buckets, or drawn by a `DataLoader`."""
    if not isinstance(data, DataLoader):
        return getattr(data, "buckets", None) is not None
    drawing = RandomSampler | SubsetRandomSampler | WeightedRandomSampler
    return isinstance(data.sampler, drawing) or isinstance(getattr(data.batch_sampler, "sampler", None), drawing)


def own_order(data: Any, *, has_position: bool) -> str | None:
    """Return why the order of data may differ after a resume, with or without their position; `None` if it does not."""
    if isinstance(data, DataLoader) and data.generator is not None:
        return (
            "the DataLoader has its own generator, which is not part of a checkpoint: its order differs after a "
            "resume. Leave generator= out to draw the order from the run's key"
        )
    if isinstance(data, Iterator):
        return "an iterator cannot be restarted: its next items are taken as the next batches"
    if not has_position and position_holder(data) is not None:
        return f"no position of the {type(data).__name__} is saved: its order differs if it depends on earlier epochs"
    return None


def keyed_batches(data: "DataLoader[Any]", key: Tensor, epoch: int, start: int = 0) -> Iterator[Any]:
    """Return the batches from `start` on of a loader without a generator, in an order determined by key and epoch."""
    key = key.cpu()
    seed = epoch_seed(key, epoch)
    first, second = key.tolist()
    load_numpy()
    if isinstance(data.dataset, IterableDataset) or type(data).__iter__ is not DataLoader.__iter__:
        return _after(start, _streamed(data, seed_words((first, second), _STREAM, 0, epoch), seed), data, epoch)
    requests = _requests(data, (first, second), epoch, start, seed)
    return _reader(data).read(requests, seed ^ _WORKERS)


class _Request(NamedTuple):
    """A batch of a map-style loader."""

    key: tuple[int, int]
    epoch: int
    batch: int
    index: Any
    """The sampler's item: the indices of a batch, or a single index if the loader makes no batches."""


def _requests(data: "DataLoader[Any]", key: tuple[int, int], epoch: int, start: int, seed: int) -> Iterator[_Request]:
    stream = Stream(seed_words(key, _SAMPLER, 0, epoch), seed)
    with stream.drawing():
        indices = iter(data.sampler if data.batch_sampler is None else data.batch_sampler)
    for batch in count():
        with stream.drawing():
            index = next(indices, _END)
        if index is _END:
            return
        if batch >= start:
            yield _Request(key, epoch, batch, index)


class _Batches:
    """Source that makes batches as a map-style `DataLoader` does, with the global generators seeded for each."""

    def __init__(self, data: "DataLoader[Any]") -> None:
        self.dataset, self.collate_fn = data.dataset, data.collate_fn
        self.makes_batches = data.batch_sampler is not None
        self.reads_whole_batches = reads_whole_batches(data.dataset)
        self._epoch: int | None = None

    def __getitem__(self, request: _Request) -> Any:
        if request.epoch != self._epoch:  # a persistent worker has its own copy of the data set
            _tell_epoch(self.dataset, request.epoch)
            self._epoch = request.epoch
        with naming(lambda: f"this happened with batch {request.batch} of epoch {request.epoch}: {request.index}"):
            words = seed_words(request.key, _BATCH, request.batch, request.epoch)
            with kept_globals():
                seed_globals(words)
                return self._read(request.index)

    def _read(self, index: Any) -> Any:
        if not self.makes_batches:
            return self.collate_fn(self.dataset[index])
        if self.collate_fn is default_collate and (columns := read_columns(self.dataset, index)) is not None:
            return columns
        if self.reads_whole_batches:
            whole: Any = self.dataset
            return self.collate_fn(whole.__getitems__(index))
        return self.collate_fn([self.dataset[number] for number in index])


_KEPT: "WeakKeyDictionary[DataLoader[Any], Reader]" = WeakKeyDictionary()
"""Readers of loaders with persistent workers, which live as long as the loader."""


def _reader(data: "DataLoader[Any]") -> Reader:
    if data in _KEPT:
        return _KEPT[data]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's own loader has already given the same warnings
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
    stream = Stream(words, seed)
    with stream.drawing():
        # Without a generator, the workers' seed would be drawn from the global one.
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
        # The loader may keep the workers alive; see `reader` for why this is not left to the garbage collector.
        getattr(batches, "_shutdown_workers", lambda: None)()
        _let_go(data)


def _let_go(data: "DataLoader[Any]") -> None:
    """Make a loader forget the workers that it would keep for the next epoch.

    Their generators have been drawn from, and `set_epoch` does not reach their copies of the data set.
    """
    data._iterator = None


def _after(start: int, batches: Iterator[Any], data: Any, epoch: int) -> Iterator[Any]:
    """Return the batches after the first `start`, which are read and dropped when the next one is requested."""
    if start == 0:
        return batches
    if has_shuffle_buffer(data):
        reason = "the stream's position leaves out its shuffle buffer (buffer_size=1 shuffles shards only)"
    else:
        reason = "it cannot start in the middle"
    _warn_of_reading(start, data, epoch, reason)
    return islice(batches, start, None)


def _warn_of_reading(start: int, data: Any, epoch: int, reason: str) -> None:
    named = type(data).__name__
    if isinstance(data, DataLoader):
        named += f" over {type(data.dataset).__name__}"
    used = "; an iterator that has already been read from loses its next items" if isinstance(data, Iterator) else ""
    warn(
        f"continuing at batch {start} of epoch {epoch}: the {start} before it are read from {named} and dropped, "
        f"since {reason}. This is exact if it gives the same batches in the same order each time{used}. data.loader "
        "starts at any batch",
        SkippingWarning,
    )


def _tell_epoch(data: Any, epoch: int) -> None:
    """Call `set_epoch` if there is one, by which Hugging Face's streams and distributed samplers shuffle."""
    tellable = [data]
    if isinstance(data, DataLoader):
        tellable += [data.dataset, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
    for member in {id(member): member for member in tellable}.values():
        if callable(set_epoch := getattr(member, "set_epoch", None)):
            set_epoch(epoch)


_END = object()


@dataclass(frozen=True)
class StateStream:
    """Endless data, whose batches are made from the state; see `stream`.

    Attributes:
        fn: `state -> batch`.
    """

    fn: Callable[[Any], Any]

    def batch(self, state: Any) -> Any:
        """Return the batch for the next step from this state.

        Raises:
            TypeError: The function returned an iterator or `None`.
        """
        made = self.fn(state)
        if made is None or isinstance(made, Iterator):
            raise TypeError(
                f"data.stream: {shown(self.fn)} returned {shown(made)}: expected one batch for each call, the one for "
                "the next step"
            )
        return made


def stream(fn: Callable[[Any], Any]) -> StateStream:
    """Return data for `fit` that are made from the state as the run proceeds, one batch before each step.

    Batches are not prefetched, so `fn` sees the weights that the batch will train. It draws from `state.rng(name)`.
    Data that it keeps between calls, such as an environment or a buffer, belong in `Checkpoints(extra=...)`; a resumed
    run then makes the same batches.

    A stream has no epochs: give the run's length in batches, samples, tokens or seconds, or
    `State.create(batches_per_epoch=...)`.

    Args:
        fn: `state -> batch`, called with the state before each step.

    Raises:
        TypeError: `fn` cannot be called with one argument.

    Example:
        >>> import torch
        >>> import purecompose as pc
        >>> def self_training(state):
        ...     x = pc.random.normal(state.rng("questions"), (8, 2))
        ...     return x, state.forward(x).sign()
        >>> state = pc.State.create(torch.nn.Linear(2, 1), loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1))
        >>> pc.fit(pc.compose(pc.loop_events), state, stream(self_training), duration="5ba").timestamp.batch
        5
    """
    if not callable(fn) or not is_callable_with(fn, 1):
        raise TypeError(f"data.stream: expected a function state -> batch, got {shown(fn)}")
    return StateStream(fn)


# Data as such: whether they are batches, their length, and facts by which a checkpoint knows them


def check_batches(data: Any, where: str) -> None:
    """Raise a `TypeError` if data do not yield batches, with the remedy; streams may, and are accepted."""
    if callable(getattr(data, "epoch", None)):
        return
    is_hugging = type(data).__module__.startswith("datasets.") and hasattr(data, "column_names")
    if is_hugging or (isinstance(data, Dataset) and not isinstance(data, IterableDataset)):
        raise TypeError(
            f"{where}: expected batches, got the data set {type(data).__name__}, which gives single examples: wrap it "
            "in data.loader(dataset, batch_size=...)"
        )
    if isinstance(data, Tensor | Mapping) or _is_pair(data):
        came = shown(data) if isinstance(data, Tensor) else "inputs and targets" if _is_pair(data) else "a mapping"
        raise TypeError(
            f"{where}: expected batches, got {came}: wrap examples in data.arrays(inputs, targets, batch_size=...), "
            "and a single batch in a list, [batch]"
        )
    if isinstance(data, str | type) or not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        raise TypeError(
            f"{where}: expected batches, such as a DataLoader, a list of batches or data.arrays(...), got {shown(data)}"
        )


def _is_pair(data: Any) -> bool:
    """Return whether data are inputs and targets rather than two batches of the same form."""
    if type(data) not in (tuple, list) or len(data) != 2:
        return False
    if not all(isinstance(part, Tensor) and part.ndim for part in data) or len(data[0]) != len(data[1]):
        return False
    first, second = data
    # The tensors in a list of batches may have sequences of different lengths.
    have_one_form = first.shape == second.shape if type(data) is tuple else first.ndim == second.ndim
    return first.dtype != second.dtype or not have_one_form


def length_of(data: Any) -> int | None:
    """Return the number of batches, if known; the `__len__` of a `DataLoader` over a stream raises."""
    try:
        return len(data) if hasattr(data, "__len__") else None
    except (TypeError, NotImplementedError):
        return None


_NUM_READ = 64
"""Number of a tensor's examples that the checksum reads: enough to tell data sets apart, at negligible cost."""


def describe_data(data: Any) -> dict[str, str]:
    """Return facts about data that are known without reading a batch, with a checksum of data in memory.

    Iterators, which differ each time, have none.
    """
    if isinstance(data, Iterator):
        return {}
    reported = {"kind": type(data).__qualname__}
    with contextlib.suppress(Exception):  # data may be of any class, and training work nevertheless
        reported.update(_facts(data))
    return reported


def _facts(data: Any) -> Iterator[tuple[str, str]]:
    if isinstance(data, list | tuple):
        chosen = data[:: max(1, len(data) // _NUM_READ)]
        content = [[fingerprint(one.detach()[:1]) for one in tensors(batch) if one.ndim] for batch in chosen]
        if any(content):
            yield "content", f"{len(data)} batches {_digest(content)}"
        return
    for name in ("batch_size", "shuffle", "drop_last"):
        if isinstance(value := getattr(data, name, None), bool | int):
            yield name, str(value)
    if isinstance(data, DataLoader):
        yield "sampler", type(data.sampler).__qualname__
    if (in_buckets := getattr(data, "buckets", None)) is not None:
        yield "buckets", repr(in_buckets)
    dataset = getattr(data, "dataset", None)
    if dataset is not None:
        yield "dataset", type(dataset).__qualname__ + (f" of {len(dataset)}" if hasattr(dataset, "__len__") else "")
    held = {name: getattr(data, name, None) for name in ("inputs", "targets")}
    if isinstance(dataset, TensorDataset):
        held |= {f"dataset.tensors[{i}]": tensor for i, tensor in enumerate(dataset.tensors)}
    for name, value in held.items():
        if isinstance(value, Tensor) and value.layout is torch.strided and value.ndim:
            chosen = torch.arange(0, len(value), max(1, len(value) // _NUM_READ), device=value.device)
            form = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
            yield name, f"{form} {_digest(fingerprint(value.detach()[chosen]))}"


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each difference, including facts that only one side has; none if either side is empty."""
    if not saved or not now:
        return []
    return [
        f"data: {name}: {saved.get(name, 'nothing')} in the checkpoint, {now.get(name, 'nothing')} here"
        for name in dict.fromkeys((*saved, *now))
        if saved.get(name) != now.get(name)
    ]


def _digest(content: Any) -> str:
    return hashlib.blake2b(repr(content).encode(), digest_size=6).hexdigest()
