"""Batches of map-style data sets, with randomness that depends on the sample and not on the process that reads it.

    order(key, epoch)  = permutation of 0 .. n-1 drawn at (key, "data order", epoch), as for `arrays`
    sample i of epoch  = transform(dataset[i], draws at (key, epoch, i))

So a sample has the same bits for any number of workers, batch size and place in the epoch (except for long sums, which
round differently in several threads, and workers have only one), and a run can resume at any batch without reading the
earlier ones.
"""

import inspect
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from purecompose._support.checks import check_flag, check_whole, shown
from purecompose.data.order import epoch_order
from purecompose.data.reader import Reader
from purecompose.data.samples import RNG_KINDS, Request, Samples
from purecompose.data.seeding import load_numpy
from purecompose.random.keys import as_rng


_STORED_KEY = (0, 0)


class Loader:
    """A data set of single samples, and how it is read. Created by `loader`.

    Iterating over it yields the batches in the stored order, as evaluation expects; random numbers for the samples are
    then drawn as in epoch 0 of a run with `key(0)`, the same each time. `epoch` yields the batches in keyed order for
    training. `len` counts batches per epoch.

    Attributes:
        dataset: The data set.
        batch_size: Samples per batch; the last batch of an epoch may be smaller.
        shuffle: True if `epoch` permutes; otherwise every epoch has the stored order.
        drop_last: True if a smaller last batch is left out, in `epoch` and in plain iteration.
        samples: What makes a batch of some samples.
        reader: What reads such batches, in this process or in workers.
    """

    def __init__(self, samples: Samples, reader: Reader, batch_size: int, shuffle: bool, drop_last: bool) -> None:
        self.dataset: Any = samples.dataset
        self.batch_size: int = batch_size
        self.shuffle: bool = shuffle
        self.drop_last: bool = drop_last
        self.samples: Samples = samples
        self.reader: Reader = reader

    @property
    def num_examples(self) -> int:
        """Number of samples in the data set, including those that `drop_last` leaves out of an epoch."""
        return len(self.dataset)

    def __len__(self) -> int:
        full, rest = divmod(self.num_examples, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def __iter__(self) -> Iterator[Any]:
        """Return the batches in the stored order."""
        return self._read(_STORED_KEY, 0, torch.arange(self.num_examples), 0)

    def epoch(self, key: Tensor, epoch: int, start: int = 0) -> Generator[Any, None, None]:
        """Return the batches of one epoch, in the order that belongs to `(key, epoch)`.

        Args:
            key: The run's key, int64 of shape (2,), such as `state.key`.
            epoch: Number of the epoch in the run, from 0.
            start: Number of the first batch to return, 0 to `len(self)`; earlier batches are not read.

        Returns:
            An iterator over batches. It may be closed or dropped before its end.

        Raises:
            TypeError: `epoch` or `start` is not an int.
            ValueError: `epoch` is negative, or `start` is outside 0 to `len(self)`.
        """
        check_whole(epoch, "Loader.epoch: epoch", 0)
        check_whole(start, "Loader.epoch: start", 0, len(self))
        key = as_rng(key, "Loader.epoch: key").key.cpu()
        first, second = key.tolist()
        order = self.order(key, epoch) if self.shuffle else torch.arange(self.num_examples)
        return self._read((first, second), epoch, order, start)

    def order(self, key: Tensor, epoch: int) -> Tensor:
        """Return the keyed order of one epoch, int64 of shape `(num_examples,)`, on the CPU; as in `arrays`."""
        return epoch_order(key.cpu(), epoch, self.num_examples)

    def close(self) -> None:
        """End workers that wait for the next epoch; a later epoch starts new ones."""
        self.reader.close()

    def _read(self, key: tuple[int, int], epoch: int, order: Tensor, start: int) -> Generator[Any, None, None]:
        parts = order.split(self.batch_size)[start : len(self)]
        return self.reader.read(Request(key, epoch, part.tolist()) for part in parts)


def loader(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    workers: int = 0,
    transform: Callable[..., Any] | None = None,
    rng: str | None = "torch",
    collate: Callable[[list[Any]], Any] | None = None,
    seed_globals: bool = True,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool | None = None,
    multiprocessing_context: Any = None,
    timeout: float = 0.0,
) -> Loader:
    """Make batches of a map-style data set: a torch `Dataset`, a list, a Hugging Face `datasets.Dataset`.

    Args:
        dataset: A data set with `__len__` and `__getitem__`, and at least one sample. If it has a method
            `__getitems__`, all samples of a batch are read in one call.
        batch_size: Samples per batch, at least 1.
        shuffle: Permute the order of each epoch by key; plain iteration never shuffles.
        drop_last: Leave out a last batch that is smaller than the others.
        workers: Number of processes that read; with 0, the caller's process reads.
        transform: `transform(sample, rng) -> sample`, with all its randomness from `rng`, which belongs to this call.
        rng: Random argument of the transform: "torch" for a `torch.Generator`; "numpy" for a `numpy.random.Generator`;
            "key" for a `purecompose.random.Rng`, whose draws have the same bits in every version and take about 0.1 ms
            each; or None for a `transform(sample)` that draws from global generators, as torchvision's do.
        collate: Function from a list of samples to a batch; None for `torch.utils.data.default_collate`.
        seed_globals: Seed the global generators of torch, Python and numpy for each sample, while it is read and
            transformed, and restore them. Only those that the samples draw from are seeded, which takes up to 8
            microseconds per sample; without it, draws from them are not reproducible. A batch that is the first to
            draw from a generator is read twice, unless it is the loader's first batch.
        pin_memory: Copy batches into pinned memory in a thread; `fit` does so itself if there is a GPU.
        prefetch_factor: Number of batches that each worker reads ahead; None for 2.
        persistent_workers: Keep workers between epochs; None to keep them if there are any.
        multiprocessing_context: Start method of workers, such as "spawn"; None for the system's default.
        timeout: Seconds to wait for a batch from the workers before a `TimeoutError` names the worker that did not
            answer; 0 for no limit.

    Raises:
        TypeError: The data set is of another kind, the transform or collate function cannot be called in this way, or
            an argument has a wrong type.
        ValueError: There are no samples or no batches, a number is out of range, or there are options for workers but
            no workers.
        ImportError: `rng="numpy"` is given and numpy is not installed.

    Example:
        >>> from purecompose.random import key
        >>> def noisy(number, rng):
        ...     return number + torch.rand((), generator=rng)
        >>> data = loader([10.0, 20.0, 30.0, 40.0, 50.0], 2, transform=noisy)
        >>> whole = list(data.epoch(key(0), epoch=3))
        >>> resumed = list(data.epoch(key(0), epoch=3, start=1))
        >>> len(data), [len(batch) for batch in whole], all(map(torch.equal, whole[1:], resumed))
        (3, [2, 2, 1], True)
    """
    num_examples = _check_dataset(dataset)
    batch_size = check_whole(batch_size, "loader: batch_size", 1)
    if check_flag(drop_last, "loader: drop_last") and batch_size > num_examples:
        raise ValueError(
            f"loader: drop_last=True leaves no batch at all: batch_size={batch_size} (int) is more than the "
            f"{num_examples} samples; lower batch_size or keep the last batch"
        )
    workers = check_whole(workers, "loader: workers", 0, hint="0 reads in the caller's own process")
    _check_transform(transform, rng)
    if collate is not None and not callable(collate):
        raise TypeError(f"loader: expected collate to be a function of a list of samples, got {shown(collate)}")
    if check_flag(seed_globals, "loader: seed_globals"):
        load_numpy()
    options = _worker_options(workers, prefetch_factor, persistent_workers, multiprocessing_context, timeout)
    samples = Samples(dataset, transform, rng, collate, seed_globals)
    reader = Reader(samples, num_workers=workers, pin_memory=check_flag(pin_memory, "loader: pin_memory"), **options)
    return Loader(samples, reader, batch_size, check_flag(shuffle, "loader: shuffle"), drop_last)


def _check_dataset(dataset: Any) -> int:
    where, came = "loader: expected a data set with a length and dataset[i]", type(dataset).__name__
    if isinstance(dataset, Mapping):
        keys = list(dataset)[:8]
        raise TypeError(f"{where}, got {came} with the keys {keys}; choose one of them, as in data['train']")
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if is_stream and hasattr(dataset, "__iter__"):
        raise TypeError(
            f"{where}, got {came}, which can only be iterated: a stream has no order to permute. Pass fit the "
            "stream of batches itself, or a DataLoader over it"
        )
    if is_stream or not hasattr(dataset, "__len__"):
        missing = "__getitem__" if is_stream else "__len__"
        raise TypeError(f"{where}, got {came}, which has no {missing}")
    num_examples = check_whole(len(dataset), "loader: len(dataset)", 0, 2**32 - 1)  # type: ignore[arg-type]
    if num_examples == 0:
        raise ValueError(f"loader: the data set is empty: {came} of length 0")
    return num_examples


def _check_transform(transform: Any, rng: Any) -> None:
    if rng not in RNG_KINDS:
        raise ValueError(f"loader: expected rng to be 'torch', 'numpy', 'key' or None, got {shown(rng)}")
    if transform is None:
        return
    wanted = "transform(sample)" if rng is None else "transform(sample, rng)"
    if not callable(transform):
        raise TypeError(f"loader: expected {wanted}, a function, got {shown(transform)}")
    if rng == "numpy":
        try:
            import numpy  # noqa: F401
        except ImportError as error:
            raise ImportError("loader: rng='numpy' needs numpy; pip install numpy, or take rng='torch'") from error
    try:
        signature = inspect.signature(transform)
    except (TypeError, ValueError):  # built-in functions without a signature
        return
    try:
        signature.bind(*(["sample"] if rng is None else ["sample", "rng"]))
    except TypeError as error:
        hint = "; rng=None is for transforms that draw from the global generators" if rng is not None else ""
        raise TypeError(f"loader: {shown(transform)} cannot be called as {wanted}: {error}{hint}") from error


def _worker_options(
    workers: int, prefetch_factor: int | None, persistent_workers: bool | None, context: Any, timeout: float
) -> dict[str, Any]:
    if prefetch_factor is not None:
        check_whole(prefetch_factor, "loader: prefetch_factor", 1)
    if persistent_workers is not None:
        check_flag(persistent_workers, "loader: persistent_workers")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout < math.inf:
        raise ValueError(f"loader: timeout: expected a number of seconds, or 0 for no limit, got {shown(timeout)}")
    if workers == 0 and (prefetch_factor is not None or persistent_workers or context is not None or timeout):
        raise ValueError(
            "loader: prefetch_factor, persistent_workers, multiprocessing_context and timeout need workers, got "
            "workers=0 (int); set workers=2 or more, or leave them out"
        )
    return {
        "prefetch_factor": prefetch_factor,
        "persistent_workers": workers > 0 if persistent_workers is None else persistent_workers,
        "multiprocessing_context": context,
        "timeout": timeout,
    }
