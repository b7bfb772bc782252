"""One batch of samples: seeded, transformed, collated, with errors that name the sample."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate, get_worker_info

from purecompose.data.order import seed_words
from purecompose.data.reader import naming
from purecompose.data.seeding import SEED_WORDS, kept_globals, seed_globals
from purecompose.random import Rng, salt


__all__ = ["RNG_KINDS", "Request", "Samples", "reads_whole_batches"]

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
        self.dataset, self.transform, self.rng, self.collate = dataset, transform, rng, collate
        self.seeds_globals = seeds_globals
        self.reads_whole_batches = reads_whole_batches(dataset)

    def __getitem__(self, request: Request) -> Any:
        # In a worker nothing else uses the generators, so they need not be restored.
        is_outside_kept = self.seeds_globals and get_worker_info() is None
        with kept_globals() if is_outside_kept else nullcontext():
            return self._collated(self._samples(request), request)

    def _samples(self, request: Request) -> list[Any]:
        indices, at_once = request.indices, None
        if self.reads_whole_batches:
            self._seed(request, _READ, indices[0])
            with naming(f"data.loader: this happened with samples {_listed(indices)} of epoch {request.epoch}"):
                at_once = self.dataset.__getitems__(indices)
        samples = []
        for place, index in enumerate(indices):
            with naming(f"data.loader: this happened with sample {index} of epoch {request.epoch}"):
                words = self._seed(request, _SAMPLE, index)
                sample = self.dataset[index] if at_once is None else at_once[place]
                samples.append(self._transformed(sample, request, index, words[SEED_WORDS:]))
        return samples

    def _transformed(self, sample: Any, request: Request, index: int, words: Sequence[int]) -> Any:
        if self.transform is None:
            return sample
        if self.rng is None:
            return self.transform(sample)
        if self.rng == "torch":
            return self.transform(sample, torch.Generator().manual_seed(words[0]))
        if self.rng == "numpy":
            import numpy as np

            return self.transform(sample, np.random.default_rng(words))
        return self.transform(sample, Rng(torch.tensor(request.key), _TRANSFORM, index, request.epoch))

    def _collated(self, samples: list[Any], request: Request) -> Any:
        indices = request.indices
        self._seed(request, _COLLATE, indices[0])
        if self.collate is not None:
            with naming(f"data.loader: this happened with samples {_listed(indices)}, collating them"):
                return self.collate(samples)
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(_uncollated(samples, indices, error)) from error

    def _seed(self, request: Request, draw: int, index: int) -> tuple[int, ...]:
        words = seed_words(request.key, draw, index, request.epoch)
        if self.seeds_globals:
            seed_globals(words)
        return words


def reads_whole_batches(dataset: Any) -> bool:
    """Return whether a data set can read many samples in one call; for a `Subset`, whether its data set can.

    Every `Subset` has `__getitems__`, but it may read the samples one by one, without seeding between them.
    """
    if type(dataset) is Subset:
        return reads_whole_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


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


def _listed(indices: list[int]) -> str:
    return f"{indices}" if len(indices) <= 8 else f"[{', '.join(map(str, indices[:8]))}, ... {len(indices)} in all]"
