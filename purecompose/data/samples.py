"""One batch of samples: seeded, transformed, collated, with errors that name the sample."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from purecompose import tree
from purecompose.data.order import seed_words
from purecompose.data.reader import naming
from purecompose.data.seeding import SEED_WORDS, Draws
from purecompose.random import Rng, fold_in, salt


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
    """Source that makes a batch from a request; see `loader` for the arguments.

    Args:
        dataset: A map-style data set.
        transform: A function of the sample, and of the random argument if there is one; or None.
        rng: One of `RNG_KINDS`.
        collate: A function of the list of samples, or None.
        seeds_globals: True to seed the global generators for every sample.
    """

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
        self.rng: str | None = rng
        self.collate: Callable[[list[Any]], Any] | None = collate
        self.reads_whole_batches: bool = reads_whole_batches(dataset)
        self._has_columns = has_columns(dataset)
        runs_code = transform is not None or collate is not None or not is_plain(dataset)
        self._draws = Draws() if seeds_globals and runs_code else None

    def __getitem__(self, request: Request) -> Any:
        if self._draws is None:
            return self._read(request)
        words = seed_words(request.key, _READ, request.indices[0], request.epoch)
        return self._draws.read(words, lambda: self._read(request))

    def _read(self, request: Request) -> Any:
        columns = read_columns(self.dataset, request.indices) if self._has_columns else None
        if columns is not None and self.transform is None and self.collate is None:
            return columns
        return self._collated(self._samples(request, columns), request)

    def _samples(self, request: Request, columns: Any) -> list[Any]:
        indices, at_once = request.indices, self._at_once(request, columns)
        transform, arguments = self.transform, self._arguments(request)
        uses_words = bool(self._draws) or (transform is not None and self.rng in ("torch", "numpy"))
        samples, index, words = [], indices[0], ()
        with naming(lambda: f"data.loader: this happened with sample {index} of epoch {request.epoch}"):
            if at_once is None and transform is None and not uses_words:  # the same as below, 0.1 us a sample faster
                for index in indices:
                    samples.append(self.dataset[index])
                return samples
            for place, index in enumerate(indices):
                if uses_words:
                    words = self._seed(request, _SAMPLE, index)
                sample = self.dataset[index] if at_once is None else at_once[place]
                samples.append(sample if transform is None else transform(sample, *arguments(index, words)))
        return samples

    def _at_once(self, request: Request, columns: Any) -> Sequence[Any] | None:
        """Return the samples of a batch if they can be read in one call, or have been, as columns."""
        if isinstance(columns, Tensor):
            return columns.unbind()
        if columns is not None:
            return list(zip(*map(torch.unbind, columns), strict=True))
        if not self.reads_whole_batches:
            return None
        with naming(lambda: f"data.loader: this happened with {_listed(request)} of epoch {request.epoch}"):
            return self.dataset.__getitems__(request.indices)

    def _arguments(self, request: Request) -> Callable[[int, Sequence[int]], tuple[Any, ...]]:
        """Return a function of a sample's index and seed that gives the transform's random argument, if it has one."""
        if self.transform is None:
            return lambda index, words: ()
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
        if self.collate is not None:
            self._seed(request, _COLLATE, request.indices[0])
            with naming(lambda: f"data.loader: this happened with {_listed(request)}, collating them"):
                return self.collate(samples)
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(_uncollated(samples, request.indices, error)) from error

    def _seed(self, request: Request, draw: int, index: int) -> tuple[int, ...]:
        words = seed_words(request.key, draw, index, request.epoch)
        if self._draws:
            self._draws.seed(words)
        return words


def reads_whole_batches(dataset: Any) -> bool:
    """Return whether a data set can read many samples in one call; for a `Subset`, whether its data set can.

    Every `Subset` has `__getitems__`, but it may read the samples one by one, without seeding between them.
    """
    if type(dataset) is Subset:
        return reads_whole_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def has_columns(dataset: Any) -> bool:
    """Return whether `read_columns` can read a data set: tensors, or a `Subset` of them."""
    if type(dataset) is Subset:
        return has_columns(dataset.dataset)
    return type(dataset) in (Tensor, TensorDataset)


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


def is_plain(dataset: Any) -> bool:
    """Return whether reading and collating run no code of the user's: tensors, or a list of samples of tensors."""
    if type(dataset) is Subset:
        return is_plain(dataset.dataset)
    if type(dataset) in (list, tuple):
        return all(type(leaf) in _PLAIN for leaf in tree.leaves(dataset[0]))
    return type(dataset) in (Tensor, TensorDataset, range)


_PLAIN = (Tensor, int, float, bool, str, bytes)


def _uncollated(samples: list[Any], indices: list[int], error: Exception) -> str:
    """Return a message that names the first sample with another form than the first one, if any, and torch's error."""
    first = _form(samples[0])
    lines = f"sample {indices[0]} is {first}"
    for index, sample in zip(indices, samples, strict=True):
        if (form := _form(sample)) != first:
            lines += f", sample {index} is {form}"
            break
    return (
        f"data.loader: the samples cannot be made into one batch: {lines}. Give them one form in `transform`, "
        f"or pass `collate`, a function of the list of samples ({type(error).__name__}: {str(error).splitlines()[0]})"
    )


def _form(sample: Any) -> str:
    """Return a description of a sample's structure, with its shapes."""
    if isinstance(sample, Tensor) or (hasattr(sample, "shape") and hasattr(sample, "dtype")):
        return f"{sample.dtype} of shape {tuple(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name!r}: {_form(member)}" for name, member in sample.items()) + "}"
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        shown = [_form(member) for member in sample[:8]]
        return f"{type(sample).__name__} of {len(sample)} ({', '.join(shown)}{', ...' if len(sample) > 8 else ''})"
    return type(sample).__name__


def _listed(request: Request) -> str:
    indices = request.indices
    shown = f"{indices}" if len(indices) <= 8 else f"[{', '.join(map(str, indices[:8]))}, ... {len(indices)} in all]"
    return f"samples {shown}"
