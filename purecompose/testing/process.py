"""The settings of the process, which are not in a state: generators, modes and defaults."""

import contextlib
import datetime
import functools
import itertools
import os
import random as python_random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from purecompose._support.device import Setting, read, read_settings, write, write_settings


def process_settings() -> dict[str, Any]:
    """Return the settings of the process by name. Generators are represented by a hash of their state."""
    python_state, numpy_state, torch_state = _generators()
    return {
        "torch generator": hash(torch_state.numpy().tobytes()),
        "random generator": hash(python_state),
        "NumPy generator": None if numpy_state is None else hash((numpy_state[1].tobytes(), numpy_state[2])),
        **read_settings(),
        **read(_SURROUNDINGS),
    }


@contextlib.contextmanager
def process_restored() -> Iterator[None]:
    """Restore the settings of the process at the end of a `with` block."""
    settings, surroundings = read_settings(), read(_SURROUNDINGS)
    python_state, numpy_state, torch_state = _generators()
    try:
        yield
    finally:
        python_random.setstate(python_state)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        write_settings(settings)
        write(_SURROUNDINGS, surroundings)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, and restore them afterwards."""
    numpy = sys.modules.get("numpy")
    with process_restored():
        # torch.manual_seed would also seed the accelerators' generators, which are not restored.
        torch.default_generator.manual_seed(seed)
        python_random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        yield


@contextlib.contextmanager
def ignoring_missing_terms() -> Iterator[None]:
    """Return a scope without the warning that an evaluation lacks terms of the loss, which laws do not judge."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss of evaluator", UserWarning)
        yield


@contextlib.contextmanager
def elsewhere(seed: int, *, pace: int = 0) -> Iterator[None]:
    """Imitate another process at another time: with other global seeds, clocks, process number and rank.

    Args:
        seed: The seed; 0 for the present time.
        pace: Number of seconds by which each reading moves all clocks on.
    """
    readings = itertools.count(100_003 * seed, pace)
    other = {id(clock): _shifted(clock, readings.__next__) for clock in _CLOCKS}
    other[id(os.getpid)] = functools.partial(int, os.getpid() + seed)
    # Also under the names by which modules of users have imported them.
    places = [(vars(module), name) for module in _modules() for name in vars(module)]
    patched = [(names, name, names[name]) for names, name in places if id(names[name]) in other]
    with seeded(seed), as_rank(seed, seed + 1):
        try:
            for names, name, original in patched:
                names[name] = other[id(original)]
            yield
        finally:
            for names, name, original in patched:
                names[name] = original


def _modules() -> list[Any]:
    """Return the modules of the clocks, and those of users, which may have imported one."""
    known = {*sys.stdlib_module_names, "torch", "purecompose"}
    others = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] not in known]
    return [os, time, datetime, *(one for one in others if "site-packages" not in (getattr(one, "__file__", "") or ""))]


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Set the environment variables with which launchers pass a process its rank, and restore them afterwards."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_NOW = time.time
_READ_AT = (time.localtime, time.gmtime, time.ctime)
"""Functions of a time, by default the present one."""
_CLOCKS = (time.time, time.monotonic, time.perf_counter, time.time_ns, time.monotonic_ns, time.perf_counter_ns)
_CLOCKS += (*_READ_AT, datetime.datetime)


class _LikeBase(type):
    """Metaclass of a class whose instances are those of its base."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])


def _shifted(clock: Any, shift: Callable[[], int]) -> Any:
    """Return a clock that is ahead by a number of seconds."""
    if clock in _READ_AT:
        return lambda at=None: clock(_NOW() + shift() if at is None else at)
    if clock is datetime.datetime:  # whose `today` reads `time.time`

        def ahead(name: str) -> Any:
            return staticmethod(lambda *zone, **tz: getattr(clock, name)(*zone, **tz) + datetime.timedelta(0, shift()))

        return _LikeBase("datetime", (clock,), {name: ahead(name) for name in ("now", "utcnow")})
    unit = 10**9 if isinstance(clock(), int) else 1
    return lambda: clock() + shift() * unit


def _generators() -> tuple[Any, Any, torch.Tensor]:
    numpy = sys.modules.get("numpy")
    return python_random.getstate(), None if numpy is None else numpy.random.get_state(), torch.get_rng_state()


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _hooks() -> list[dict[int, Any]]:
    """Return the hooks that are called for every module, by kind."""
    places = vars(torch.nn.modules.module).items()
    return [found for name, found in places if name.startswith("_global_") and name.endswith("_hooks")]


def _set_hooks(hooks: tuple[dict[int, Any], ...]) -> None:
    for found, wanted in zip(_hooks(), hooks, strict=True):
        found.clear()
        found.update(wanted)


def _set_filters(filters: list[Any]) -> None:
    with warnings.catch_warnings():  # leaving it invalidates Python's cache of the filters
        pass
    warnings.filters[:] = filters  # pyright: ignore[reportIndexIssue]


def _numpy_errors() -> dict[str, str] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else dict(numpy.geterr())


def _set_numpy_errors(errors: dict[str, str] | None) -> None:
    if errors is not None:
        sys.modules["numpy"].seterr(**errors)


_SURROUNDINGS: dict[str, Setting] = {
    "environment": (lambda: dict(os.environ), _set_environment),
    "module hooks": (lambda: tuple(map(dict, _hooks())), _set_hooks),
    "warnings filters": (lambda: list(warnings.filters), _set_filters),
    "NumPy error handling": (_numpy_errors, _set_numpy_errors),
}
"""Functions to read and to set settings of the process that cannot be sent to another one, by name."""
