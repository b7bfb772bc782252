"""The settings that a sweep trains: all combinations of values, random ones, or those that Optuna proposes."""

import contextlib
import itertools
import math
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purecompose._support.messages import required
from purecompose._support.specs import check_flag, check_number, check_whole, shown
from purecompose.random import Rng, bits, uniform


Proposals: TypeAlias = Generator[list[dict[str, float]], Sequence[float], None]
"""Yields the settings of one population after the other, and is sent their metrics."""


@dataclass(frozen=True)
class Range:
    """The numbers among which a search chooses the value of a named scalar.

    Args:
        low: Least value.
        high: Greatest value, above `low`.
        log: True to draw the logarithm uniformly, as for learning rates; `low` is then positive.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.

    Example:
        >>> round(Range(1e-4, 1e-2, log=True).at(0.5), 9)
        0.001
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        check_flag(self.log, "Range: log")
        check_number(self.low, "Range: low", 0 if self.log else -math.inf, above=self.log)
        check_number(self.high, "Range: high", self.low, above=True)

    def at(self, share: float) -> float:
        """Return the value at a share of the way from `low` (0) to `high` (1)."""
        if self.log:
            return math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return self.low + share * (self.high - self.low)


def proposed(
    values: Any, search: str | None, trials: int | None, rounds: int, key: Tensor, is_better_lower: bool
) -> Proposals:
    """Return the settings to train, in one or several rounds; see the arguments of `sweep`."""
    space = _checked(values)
    search = search or ("grid" if trials is None else "random")
    if search not in ("grid", "random", "optuna"):
        raise ValueError(f"sweep: search={search!r}: expected 'grid', 'random' or 'optuna'")
    ranges = [name for name, given in space.items() if isinstance(given, Range)]
    if search == "grid":
        if ranges or trials is not None:
            what = f"values of {ranges[0]!r} are a range" if ranges else f"trials={trials}"
            raise ValueError(f"sweep: {what}: a grid has all combinations of lists; otherwise give trials")
        lists = [given for given in space.values() if isinstance(given, list)]
        settings = [dict(zip(space, one, strict=True)) for one in itertools.product(*lists)]
        if len(settings) < 2:
            raise ValueError(f"sweep: values: expected at least two settings, got {shown(values)}")
        return _at_once(settings)
    if trials is None:
        raise ValueError(f"sweep: search={search!r} needs the number of trials, such as trials=20")
    check_whole(trials, "sweep: trials", 2)
    check_whole(rounds, "sweep: rounds", 1)
    if search == "random":
        return _at_once([_drawn(space, Rng(key).named("sweep").named(trial)) for trial in range(trials)])
    seed = int(bits(Rng(key).named("sweep"), 1).item()) % 2**32
    optuna = required("the search", "'purecompose[optuna]'", "optuna")
    return _by_optuna(optuna, space, _sizes(trials, rounds), seed, is_better_lower)


def _checked(values: Any) -> dict[str, Range | list[float]]:
    if not isinstance(values, Mapping) or not values:
        raise TypeError(f"sweep: values: expected lists of numbers by name, {{'lr': [0.01, 0.1]}}, got {shown(values)}")
    space: dict[str, Range | list[float]] = {}
    for name, given in values.items():
        if isinstance(given, str) or not isinstance(given, Iterable | Range):
            raise TypeError(f"sweep: values[{name!r}]: expected a list of numbers or a Range, got {shown(given)}")
        is_range = isinstance(given, Range)
        space[name] = given if is_range else [check_number(float(one), f"sweep: values of {name!r}") for one in given]
    return space


def _at_once(settings: list[dict[str, float]]) -> Proposals:
    yield settings


def _drawn(space: Mapping[str, Range | list[float]], rng: Rng) -> dict[str, float]:
    """Return a random setting; the draws of a name do not depend on the others."""
    found = {}
    for name, given in space.items():
        share = uniform(rng.named(name), 1, dtype=torch.float64).item()
        found[name] = given.at(share) if isinstance(given, Range) else given[int(share * len(given))]
    return found


def _sizes(trials: int, rounds: int) -> list[int]:
    """Return the numbers of trials in each round, equal but for the last, so that one graph serves almost all."""
    size = math.ceil(trials / min(rounds, trials))
    return [min(size, trials - start) for start in range(0, trials, size)]


def _by_optuna(
    optuna: Any, space: Mapping[str, Any], sizes: Iterable[int], seed: int, is_better_lower: bool
) -> Proposals:
    """Propose settings by Optuna's tree-structured Parzen estimator, which learns from the rounds before."""
    kinds = optuna.distributions
    known = {
        name: kinds.FloatDistribution(given.low, given.high, log=given.log)
        if isinstance(given, Range)
        else kinds.CategoricalDistribution(given)
        for name, given in space.items()
    }
    with _quiet(optuna):
        # Settings that are still to be trained count as bad ones, so that a round does not propose the same ones.
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study = optuna.create_study(sampler=sampler, direction="minimize" if is_better_lower else "maximize")
    for size in sizes:
        with _quiet(optuna):
            asked = [study.ask(known) for _ in range(size)]
        results = yield [{name: float(value) for name, value in trial.params.items()} for trial in asked]
        for trial, value in zip(asked, results, strict=True):
            is_finite = math.isfinite(value)
            study.tell(trial, value if is_finite else None, None if is_finite else optuna.trial.TrialState.FAIL)


@contextlib.contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna's log and its warnings of experimental arguments."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    optuna.logging.set_verbosity(level)
