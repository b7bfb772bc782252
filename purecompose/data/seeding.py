"""Seeds of an epoch, its order, and the global generators of torch (on the CPU), Python and NumPy.

Data sets draw from these generators: a random crop uses torch's, older code Python's `random` or `numpy.random`. If
they are seeded before each read from a place in the run, such a data set becomes a function of that place.
"""

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2s
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose.random import Rng, fold_in, permutation, salt


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
