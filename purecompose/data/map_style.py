"""Batches of map-style data sets, with randomness that depends on the sample and not on the process that reads it.

    order(key, epoch)  = permutation of 0 .. n-1 drawn at (key, "data order", epoch), as for `arrays`
    sample i of epoch  = transform(dataset[i], draws at (key, epoch, i))

So a sample has the same bits for any number of workers, batch size and place in the epoch (except for long sums, as
workers have one thread), and a run can resume at any batch.
"""

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from purecompose._support.contexts import NOTHING
from purecompose._support.specs import check_flag, check_whole, is_callable_with, shown, suggests_keywords
from purecompose.data.bucketing import Buckets
from purecompose.data.position import SEED_WORDS, epoch_order, kept_globals, load_numpy, seed_globals, seed_words
from purecompose.data.reader import Reader, SharedReader, naming
from purecompose.random import Rng, fold_in, salt
from purecompose.random.keys import as_rng


RNG_KINDS = ("torch", "numpy", "key", None)
"""Kinds of random argument that a transform may take besides the sample."""

_SAMPLE, _TRANSFORM = salt("data sample"), salt("data transform")
# Draws for a whole batch use the index of its first sample.
_READ, _COLLATE = salt("data read"), salt("data collate")


class Request(NamedTuple):
    """Everything that a batch depends on, besides the data."""

    key: tuple[int, int]
    """The words of the run's key."""
    epoch: int
    indices: list[int]


class Samples:
    """Source that makes a batch from a request; see `loader` for the arguments."""

    def __init__(
        self,
        dataset: Any,
        transform: Callable[..., Any] | None,
        rng: str | None,
        collate: Callable[[list[Any]], Any] | None,
        seeds_globals: bool,
    ) -> None:
        self.dataset: Any = dataset
        self.transform: Callable[..., Any] | None = transform
        self.collate: Callable[[list[Any]], Any] | None = collate
        self.rng: str | None = None if transform is None else rng
        self.reads_whole_batches: bool = reads_whole_batches(dataset)
        self._seeds_globals = seeds_globals
        self._needs_words = seeds_globals or self.rng in ("torch", "numpy")

    def __getitem__(self, request: Request) -> Any:
        if self.transform is None and self.collate is None:
            if (columns := read_columns(self.dataset, request.indices)) is not None:
                return columns
        with kept_globals() if self._seeds_globals else NOTHING:
            self._seed(request, _READ, request.indices[0])
            return self._collated(self._samples(request), request)

    def _samples(self, request: Request) -> list[Any]:
        at_once, arguments = None, self._arguments(request)
        if self.reads_whole_batches:
            with naming(lambda: f"data.loader: this happened with {_listed(request)} of epoch {request.epoch}"):
                at_once = self.dataset.__getitems__(request.indices)
        samples, index = [], request.indices[0]
        with naming(lambda: f"data.loader: this happened with sample {index} of epoch {request.epoch}"):
            for place, index in enumerate(request.indices):
                words = self._seed(request, _SAMPLE, index)
                sample = self.dataset[index] if at_once is None else at_once[place]
                samples.append(sample if self.transform is None else self.transform(sample, *arguments(index, words)))
        return samples

    def _arguments(self, request: Request) -> Callable[[int, Sequence[int]], tuple[Any, ...]]:
        """Return a function of a sample's index and seed that gives the transform's random argument, if it has one."""
        if self.rng == "torch":
            generator = torch.Generator()  # one for the batch, because seeding is cheaper than creating
            return lambda index, words: (generator.manual_seed(words[SEED_WORDS]),)
        if self.rng == "numpy":
            import numpy as np

            return lambda index, words: (np.random.default_rng(words[SEED_WORDS:]),)
        if self.rng == "key":
            epoch = Rng(fold_in(torch.tensor(request.key), request.epoch), _TRANSFORM)
            return lambda index, words: (epoch.per_example(index),)
        return lambda index, words: ()

    def _collated(self, samples: list[Any], request: Request) -> Any:
        with naming(lambda: f"data.loader: this happened with {_listed(request)}, collating them"):
            if self.collate is None:
                return default_collate(samples)
            self._seed(request, _COLLATE, request.indices[0])
            return self.collate(samples)

    def _seed(self, request: Request, draw: int, index: int) -> tuple[int, ...]:
        if not self._needs_words:
            return ()
        words = seed_words(request.key, draw, index, request.epoch)
        if self._seeds_globals:
            seed_globals(words)
        return words


def reads_whole_batches(dataset: Any) -> bool:
    """Return whether a data set can read many samples in one call."""
    if type(dataset) is Subset:  # which has `__getitems__`, but may read one by one, without seeding between them
        return reads_whole_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def read_columns(dataset: Any, indices: Sequence[int]) -> Any:
    """Return a batch of tensors in memory, as `default_collate` makes it of their samples; `None` for other data."""
    if type(dataset) is Subset:
        return read_columns(dataset.dataset, [dataset.indices[index] for index in indices])
    tensors = dataset.tensors if type(dataset) is TensorDataset else (dataset,)
    if not all(type(tensor) is Tensor and tensor.layout is torch.strided for tensor in tensors):
        return None
    if not all(type(index) is int and index >= 0 for index in indices):  # others may mean something else
        return None
    chosen = torch.tensor(indices)
    rows = [tensor.index_select(0, chosen.to(tensor.device)) for tensor in tensors]
    return rows[0] if dataset is tensors[0] else rows


def _listed(request: Request) -> str:
    indices = request.indices
    shown = f"{indices}" if len(indices) <= 8 else f"[{', '.join(map(str, indices[:8]))}, ... {len(indices)} in all]"
    return f"samples {shown}"


_STORED_KEY = (0, 0)


@dataclass(eq=False, repr=False)
class Loader:
    """A data set of single samples, and how it is read. Created by `loader`.

    Iterating over it yields the batches in the stored order, as evaluation expects; random numbers for the samples are
    then drawn as in epoch 0 of a run with `key(0)`, the same each time. `epoch` yields the batches in keyed order for
    training. `len` counts batches per epoch.

    Attributes:
        samples: What makes a batch of some samples.
        reader: What reads such batches, in this process or in workers.
        batch_size: Samples per batch; the last batch of an epoch may be smaller. With buckets, the greatest number.
        shuffle: True if `epoch` permutes; otherwise every epoch has the stored order.
        drop_last: True if a smaller last batch is left out, in `epoch` and in plain iteration.
        buckets: How samples of different lengths are put into batches, if they are; see `data.buckets`.
    """

    samples: Samples
    reader: Reader
    batch_size: int
    shuffle: bool
    drop_last: bool
    buckets: Buckets | None = None

    def __repr__(self) -> str:
        rest = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("batch_size", "shuffle", "drop_last"))
        return f"Loader({self.num_examples:,} of {type(self.dataset).__name__}, {rest})"

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self.samples.dataset

    @property
    def num_examples(self) -> int:
        """Number of samples in the data set, including those that `drop_last` leaves out of an epoch."""
        return len(self.dataset)

    def __len__(self) -> int:
        if self.buckets is not None:
            return self.buckets.num_batches(drop_last=self.drop_last)
        full, rest = divmod(self.num_examples, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def __iter__(self) -> Iterator[Any]:
        """Return the batches in the stored order."""
        return self._read(_STORED_KEY, 0, self._parts(), 0)

    def indices(self, key: Tensor | None = None, epoch: int = 0) -> list[list[int]]:
        """Return the indices of the samples in each batch of an epoch; without a key, of plain iteration."""
        return [part.tolist() for part in self._parts(key, epoch)]

    def _parts(self, key: Tensor | None = None, epoch: int = 0) -> Sequence[Tensor]:
        key = key if self.shuffle else None
        order = torch.arange(self.num_examples) if key is None else self.order(key, epoch)
        if self.buckets is None:
            return order.split(self.batch_size)[: len(self)]
        key = None if key is None else key.cpu()
        return self.buckets.batches(order, drop_last=self.drop_last, key=key, epoch=epoch)

    def epoch(self, key: Tensor, epoch: int, start: int = 0) -> Generator[Any, None, None]:
        """Return the batches of one epoch, as `Arrays.epoch`; the iterator may be dropped before its end."""
        check_whole(epoch, "Loader.epoch: epoch", 0)
        check_whole(start, "Loader.epoch: start", 0, len(self))
        key = as_rng(key, "Loader.epoch: key").key.cpu()
        first, second = key.tolist()
        return self._read((first, second), epoch, self._parts(key, epoch), start)

    def order(self, key: Tensor, epoch: int) -> Tensor:
        """Return the keyed order of one epoch, int64 of shape `(num_examples,)`, on the CPU; as in `arrays`."""
        return epoch_order(key.cpu(), epoch, self.num_examples)

    def close(self) -> None:
        """End workers that wait for the next epoch; a later epoch starts new ones."""
        self.reader.close()

    def _read(
        self, key: tuple[int, int], epoch: int, parts: Sequence[Tensor], start: int
    ) -> Generator[Any, None, None]:
        return self.reader.read(Request(key, epoch, part.tolist()) for part in parts[start:])


@suggests_keywords
def loader(
    dataset: Any,
    batch_size: int | Buckets,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    workers: int = 0,
    transform: Callable[..., Any] | None = None,
    rng: str | None = "torch",
    collate: Callable[[list[Any]], Any] | None = None,
    seed_globals: bool = True,
    persistent_workers: bool | None = None,
    prefetch_factor: int | None = None,
    multiprocessing_context: Any = None,
    timeout: float = 0.0,
    pin_memory: bool = False,
) -> Loader:
    """Make batches of a map-style data set: a torch `Dataset`, a list, a Hugging Face `datasets.Dataset`.

    Args:
        dataset: A data set with `__len__` and `__getitem__`, and at least one sample. If it has a method
            `__getitems__`, all samples of a batch are read in one call.
        batch_size: Samples per batch, at least 1; or `data.buckets(lengths, ...)`, for samples of different lengths.
        shuffle: Permute the order of each epoch by key; plain iteration never shuffles.
        drop_last: Leave out a last batch that is smaller than the others.
        workers: Number of processes that read; with 0, the caller's process reads.
        transform: `transform(sample, rng) -> sample`, with all its randomness from `rng`, which belongs to this call.
        rng: Random argument of the transform: "torch" for a `torch.Generator`; "numpy" for a `numpy.random.Generator`;
            "key" for a `purecompose.random.Rng`, whose draws have the same bits in every version and take about 0.1 ms
            each; or None for a `transform(sample)` that draws from global generators, as torchvision's do.
        collate: Function from a list of samples to a batch; None for `torch.utils.data.default_collate`, or the padding
            of buckets.
        seed_globals: Seed the global generators of torch, Python and numpy for each sample, while it is read and
            transformed, and restore them: about 8 microseconds per sample. Without it, draws from them are not
            reproducible.
        persistent_workers: Keep workers between epochs; None to keep them if there are any.
        prefetch_factor, multiprocessing_context, timeout: Options of torch's `DataLoader` for workers; `timeout` is in
            seconds.
        pin_memory: Copy batches into pinned memory in a thread; `fit` does so itself if there is a GPU.

    Raises:
        TypeError: An argument has a wrong type, or the transform or collate function cannot be called in this way.
        ValueError: There are no samples or no batches, a number is out of range, or options for workers without any.
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
    lengths = batch_size if isinstance(batch_size, Buckets) else None
    if lengths is not None and len(lengths.lengths) != num_examples:
        raise ValueError(f"loader: expected the lengths of {num_examples} samples, got those of {len(lengths.lengths)}")
    size = max(lengths.sizes) if lengths is not None else batch_size
    batch_size = check_whole(size, "loader: batch_size", 1)
    leaves_none = batch_size > num_examples if lengths is None else not lengths.num_batches(drop_last=True)
    if check_flag(drop_last, "loader: drop_last") and leaves_none:
        many = f"is more than the {num_examples} samples" if lengths is None else "is more than any bucket has samples"
        raise ValueError(f"loader: drop_last=True leaves no batch at all: batch_size={batch_size} (int) {many}")
    workers = check_whole(workers, "loader: workers", 0, hint="0 reads in the caller's own process")
    _check_transform(transform, rng)
    if collate is not None and not callable(collate):
        raise TypeError(f"loader: expected collate to be a function of a list of samples, got {shown(collate)}")
    if check_flag(seed_globals, "loader: seed_globals"):
        load_numpy()
    collate = lengths.collate if lengths is not None and collate is None else collate
    samples = Samples(dataset, transform, rng, collate, seed_globals)
    reader = Reader(
        samples,
        num_workers=workers,
        persistent_workers=workers > 0 if persistent_workers is None else persistent_workers,
        prefetch_factor=prefetch_factor,
        multiprocessing_context=multiprocessing_context,
        timeout=timeout,
        pin_memory=check_flag(pin_memory, "loader: pin_memory"),
    )
    return Loader(samples, reader, batch_size, check_flag(shuffle, "loader: shuffle"), drop_last, lengths)


def _check_dataset(dataset: Any) -> int:
    came = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise TypeError(f"loader: got {came} with the keys {[*dataset][:8]}; choose one of them, as in data['train']")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"loader: expected a data set with a length and dataset[i], got {came}; a stream has no order to permute: "
            "pass fit the stream of batches itself, or a DataLoader over it"
        )
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
    if not is_callable_with(transform, 1 if rng is None else 2):
        hint = "" if rng is None else "; rng=None is for transforms that draw from the global generators"
        raise TypeError(f"loader: {shown(transform)} cannot be called as {wanted}{hint}")


def shared(loader: Loader, mesh: Any = None) -> Loader:
    """Split the reading of each batch of a loader among processes.

    Messages put the rows together, so that all have the whole batch, as steps of several processes need it, with the
    same bits. All processes must call this, and iterate in the same way. Rows are sent by gloo, on the CPU.

    Args:
        loader: A loader from `data.loader` without `collate`, which would see a part of the batch. Its samples consist
            of numbers and tensors, which have one shape in all samples, or are padded to the bounds of `data.buckets`.
        mesh: A `torch.distributed.DeviceMesh` or a process group; by default all processes.

    Returns:
        A `Loader`, whose batches are on the CPU. In a single process it is `loader` itself.

    Raises:
        TypeError: `loader` is of another kind, or `mesh` is neither a mesh nor a process group.
        ValueError: The loader has a function `collate`, or is shared already, or this process is not in the mesh.
            While iterating: samples have different shapes or dtypes in different processes, or contain something other
            than numbers and tensors.
        RuntimeError: There is no process group. While iterating: another process has failed to read its rows.

    Example:
        >>> import tempfile
        >>> from purecompose.data import loader
        >>> where = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        >>> list(shared(loader([10.0, 20.0, 30.0], 2)))
        [tensor([10., 20.], dtype=torch.float64), tensor([30.], dtype=torch.float64)]
        >>> dist.destroy_process_group()
    """
    if not isinstance(loader, Loader):
        raise TypeError(
            f"data.shared: expected a loader from data.loader, whose draws belong to the samples, got {shown(loader)}"
        )
    if isinstance(loader.reader, SharedReader):
        raise ValueError("data.shared: the processes share the loader already")
    pads_alike = loader.buckets is not None and loader.buckets.pad_to_bound
    pads_alike = pads_alike and getattr(loader.samples.collate, "__self__", None) is loader.buckets
    if loader.samples.collate is not None and not pads_alike:
        raise ValueError(
            "data.shared: the loader has a function collate, which would see a part of each batch: give samples one "
            "form by transform, or pad them to bounds by data.buckets"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "data.shared: there is no process group: start the processes by torchrun, and call "
            "torch.distributed.init_process_group() in each"
        )
    members = _ranks(mesh)
    if dist.get_rank() not in members:
        raise ValueError(f"data.shared: this process, {dist.get_rank()}, is not in the mesh, which has {members}")
    if len(members) == 1:
        return loader
    # A group that only its members make is named by the number of groups that each has, which may differ.
    is_part = len(members) < dist.get_world_size()
    group = dist.new_group(members, backend="gloo", use_local_synchronization=is_part)
    divided = copy.copy(loader)
    divided.reader = cast(Reader, SharedReader(loader.reader, group))
    return divided


def _ranks(mesh: Any) -> list[int]:
    if mesh is None:
        return list(range(dist.get_world_size()))
    if hasattr(mesh, "mesh"):
        return mesh.mesh.flatten().tolist()
    if not isinstance(mesh, dist.ProcessGroup):
        raise TypeError(f"data.shared: expected mesh to be a DeviceMesh or a process group, got {shown(mesh)}")
    return dist.get_process_group_ranks(mesh)
