"""Seeding of the global generators of torch (on the CPU), Python and NumPy, and their states.

Data sets draw from them: a random crop uses torch's, older code Python's `random` or `numpy.random`. If they are seeded
before each read from a place in the run, such a data set becomes a function of that place.
"""

import _random
import importlib.util
import pickle
import random
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import string_at
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import get_worker_info


SEED_WORDS = 4
"""Number of 32-bit words that `seed_globals` reads."""

T = TypeVar("T")


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
    equal: Callable[[Any, Any], bool]


class _Remembered:
    """A generator's state, which is copied only if its words in memory have changed, and otherwise the same object.

    A copy takes 8 microseconds for Python's generator and 30 for NumPy's; to read the words takes less than one.

    Args:
        read: Function that returns the words and the position in them, or no bytes if they cannot be read.
        copy: Function that returns the state.
        keeps_normal: Function that returns whether a state holds the second of a pair of normal numbers, which will be
            drawn without a change of the words.
    """

    def __init__(self, read: Callable[[], bytes], copy: Callable[[], Any], keeps_normal: Callable[[Any], bool]) -> None:
        self._read, self._copy, self._keeps_normal = read, copy, keeps_normal
        self._words, self._state = b"", None

    def __call__(self) -> Any:
        words = self._read()
        if not words or words != self._words or self._keeps_normal(self._state):
            self._words, self._state = words, self._copy()
        return self._state


def _torchs() -> _Generator:
    # `torch.manual_seed` would take 100 microseconds, because it also seeds accelerators, which workers must not touch.
    def are_equal(a: Tensor, b: Tensor) -> bool:  # torch.equal takes four times as long
        return string_at(a.data_ptr(), a.numel()) == string_at(b.data_ptr(), b.numel())

    return _Generator(lambda words: _TORCH.manual_seed(words[0]), _TORCH.get_state, _TORCH.set_state, are_equal)


def _pythons() -> _Generator:
    # CPython keeps the words between the object's header and the end of the fields of the base class.
    generator: Any = random.getstate.__self__  # pyright: ignore[reportFunctionMemberAccess]
    place = id(generator) + object.__basicsize__, _random.Random.__basicsize__ - object.__basicsize__
    words = array("I", random.getstate()[1][:-1]).tobytes()
    is_found = sys.implementation.name == "cpython" and words in string_at(*place)
    return _Generator(
        lambda words: random.seed(words[1] << 32 | words[2]),
        _Remembered(
            lambda: string_at(*place) if is_found else b"", random.getstate, lambda state: state[2] is not None
        ),
        random.setstate,
        lambda a, b: a is b or a == b,
    )


def _numpys() -> _Generator:
    """Return the generator of NumPy, which does nothing and whose state is `None` until NumPy is imported."""

    def read() -> bytes:
        generator: Any = numpy.get_bit_generator() if (numpy := _numpy()) else None
        is_known = numpy is not None and type(generator) is numpy.MT19937
        return string_at(generator.ctypes.state_address, _MT19937_BYTES) if is_known else b""

    def seed(words: Sequence[int]) -> None:
        if numpy := _numpy():
            numpy.seed(words[3])

    def restore(state: Any) -> None:
        if state is not None and remembered() is not state:
            sys.modules["numpy.random"].set_state(state)

    remembered = _Remembered(
        read,
        lambda: numpy.get_state(legacy=False) if (numpy := _numpy()) else None,
        lambda state: state["has_gauss"],
    )
    return _Generator(seed, remembered, restore, lambda a, b: a is b or pickle.dumps(a) == pickle.dumps(b))


def _numpy() -> Any:
    return sys.modules.get("numpy.random")


_MT19937_BYTES = 625 * 4
"""Size of the state of NumPy's Mersenne Twister: its words, and its position in them."""

_TORCH = torch.default_generator
_GENERATORS = (_torchs(), _pythons(), _numpys())


def seed_globals(words: Sequence[int]) -> None:
    """Seed the generators from four words of 32 bits each, in about 7 microseconds."""
    for generator in _GENERATORS:
        generator.seed(words)


@contextmanager
def kept_globals() -> Iterator[None]:
    """Restore the generators afterwards."""
    outside = _states()
    try:
        yield
    finally:
        _restore(outside)


def _states(generators: Sequence[_Generator] = _GENERATORS) -> list[Any]:
    return [generator.state() for generator in generators]


def _restore(states: Sequence[Any]) -> None:
    for generator, state in zip(_GENERATORS, states, strict=False):
        generator.restore(state)


class Draws:
    """Seeds of the global generators for a source of batches, limited to the generators that the source draws from.

    To seed all of them takes longer than to read a sample from memory. The first batch seeds all and finds the ones
    that the source draws from; later batches seed these and watch the others. A batch that draws from a watched one is
    read again, with that one seeded, too. So all draws are as if every generator had been seeded each time.

    torch's generator is seeded once for each batch in any case, because its seed can be read without a draw
    (`torch.initial_seed`).
    """

    def __init__(self) -> None:
        self._seeded = list(range(len(_GENERATORS)))
        self._is_first = True
        self._drawn: set[int] = set()
        self._before: list[Any] = []

    def __bool__(self) -> bool:
        """Return whether `seed` seeds anything."""
        return bool(self._seeded)

    def seed(self, words: Sequence[int]) -> None:
        """Seed the generators before the next part of a batch is read."""
        if self._is_first:
            self._drawn |= self._moved()
        for number in self._seeded:
            _GENERATORS[number].seed(words)
        if self._is_first:
            self._before = _states()

    def read(self, words: Sequence[int], read: Callable[[], T]) -> T:
        """Return the result of `read`, which may call `seed`, and restore the generators.

        Args:
            words: Seed for what is read before `seed` is called.
            read: Function without arguments. It may be called again.
        """
        outside = _states()
        changed = set(range(len(outside)))
        try:
            while True:
                _TORCH.manual_seed(words[0])
                self._before = [_TORCH.get_state(), *outside[1:]]
                self.seed(words)
                try:
                    result, error = read(), None
                except Exception as raised:  # perhaps because of a draw
                    result, error = None, raised
                seeded = {0, *self._seeded}
                if self._has_seeded_all():
                    changed = seeded
                    break
        finally:
            if get_worker_info() is None:  # in a worker nothing else uses the generators
                for number in changed:
                    _GENERATORS[number].restore(outside[number])
        if error is not None:
            raise error
        return cast(T, result)

    def _has_seeded_all(self) -> bool:
        """Return whether the batch has drawn from seeded generators only, and seed the others from now on."""
        moved = self._moved()
        is_complete = self._is_first or not moved
        self._drawn |= moved
        self._seeded, self._is_first = sorted(self._drawn), False
        return is_complete

    def _moved(self) -> set[int]:
        """Return which of the watched generators were drawn from; in the first batch, which of all."""
        pairs = zip(_GENERATORS, self._before, strict=True)
        return {
            number
            for number, (generator, before) in enumerate(pairs)
            if (self._is_first or number not in self._seeded) and not generator.equal(before, generator.state())
        }


class Stream:
    """A stream of draws that continues from one block to the next, separate from other draws.

    Args:
        words: Seed of the generators, as for `seed_globals`.
        torch_seed: Seed of torch's generator, 64 bits; it replaces the first word.
        torch_only: True to replace only torch's generator, which is about fifty times cheaper.
    """

    def __init__(self, words: Sequence[int], torch_seed: int, torch_only: bool) -> None:
        self._generators = _GENERATORS[:1] if torch_only else _GENERATORS
        with kept_globals():
            seed_globals(words)
            _TORCH.manual_seed(torch_seed)
            self._inside = _states(self._generators)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a scope in which the global generators continue this stream."""
        outside = _states(self._generators)
        _restore(self._inside)
        try:
            yield
        finally:
            self._inside = _states(self._generators)
            _restore(outside)
