"""Scopes that seed the global generators of torch (on the CPU), Python and NumPy, and restore them.

Data sets draw from them: a random crop reads torch's, an older one Python's `random` or `numpy.random`. Seeded from a
place in the run before each read, they make such a data set a function of that place.
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
"""How many 32-bit words `seed_globals` reads."""


def load_numpy() -> None:
    """Import numpy's generator where numpy is installed.

    A data set that did so in the midst of its first read would draw from an unseeded generator.
    """
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy.random")


def seed_globals(words: Sequence[int]) -> None:
    """Seed the generators from four words of 32 bits each; about 7 microseconds.

    `torch.manual_seed` would take 100 more, for it reaches for accelerators too, which workers must not touch.
    """
    torch.default_generator.manual_seed(words[0])
    random.seed(words[1] << 32 | words[2])
    if (numpy := _numpy_random()) is not None:
        numpy.seed(words[3])


@contextmanager
def kept_globals() -> Iterator[None]:
    """Put the generators back where they were; about 75 microseconds, nearly all of them numpy's."""
    outside = _states()
    try:
        yield
    finally:
        _set(outside)


class Stream:
    """Draws that continue from one block to the next, beside those of the world outside.

    Args:
        words: Where it begins, as for `seed_globals`.
        torch_seed: The seed of torch's generator instead, 64 bits.
        torch_only: Whether only torch's generator is exchanged, which is some fifty times cheaper.
    """

    def __init__(self, words: Sequence[int], torch_seed: int, torch_only: bool) -> None:
        self._torch_only = torch_only
        with kept_globals():
            seed_globals(words)
            torch.default_generator.manual_seed(torch_seed)
            self._inside = _states(torch_only)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the global generators draw what comes next in this stream."""
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
