"""Scopes that seed the global generators of torch (on the CPU), Python and NumPy, and restore them.

Data sets draw from them: a random crop uses torch's, older code Python's `random` or `numpy.random`. If they are seeded
before each read from a place in the run, such a data set becomes a function of that place.
"""

import importlib.util
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


__all__ = ["SEED_WORDS", "Stream", "kept_globals", "load_numpy", "seed_globals"]

SEED_WORDS = 4
"""Number of 32-bit words that `seed_globals` reads."""


def load_numpy() -> None:
    """Import numpy's generator if numpy is installed.

    A data set that imported it during its first read would draw from an unseeded generator.
    """
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy.random")


def seed_globals(words: Sequence[int]) -> None:
    """Seed the generators from four words of 32 bits each, in about 7 microseconds.

    `torch.manual_seed` would take 100 more, because it also seeds accelerators, which workers must not touch.
    """
    torch.default_generator.manual_seed(words[0])
    random.seed(words[1] << 32 | words[2])
    if (numpy := _numpy_random()) is not None:
        numpy.seed(words[3])


@contextmanager
def kept_globals() -> Iterator[None]:
    """Restore the generators afterwards; takes about 75 microseconds, nearly all of them for numpy."""
    outside = _states()
    try:
        yield
    finally:
        _set(outside)


class Stream:
    """A stream of draws that continues from one block to the next, separate from other draws.

    Args:
        words: Seed of the generators, as for `seed_globals`.
        torch_seed: Seed of torch's generator, 64 bits; it replaces the first word.
        torch_only: True to replace only torch's generator, which is about fifty times cheaper.
    """

    def __init__(self, words: Sequence[int], torch_seed: int, torch_only: bool) -> None:
        self._torch_only = torch_only
        with kept_globals():
            seed_globals(words)
            torch.default_generator.manual_seed(torch_seed)
            self._inside = _states(torch_only)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a scope in which the global generators continue this stream."""
        outside = _states(self._torch_only)
        _set(self._inside)
        try:
            yield
        finally:
            self._inside = _states(self._torch_only)
            _set(outside)


def _states(torch_only: bool = False) -> tuple[Any, ...]:
    if torch_only:
        return (torch.default_generator.get_state(),)
    numpy = _numpy_random()
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        None if numpy is None else numpy.get_state(legacy=False),
    )


def _set(states: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(states[0])
    if len(states) > 1:
        random.setstate(states[1])
        if states[2] is not None and (numpy := _numpy_random()) is not None:
            numpy.set_state(states[2])


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")
