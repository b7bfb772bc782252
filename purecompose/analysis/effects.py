"""The effect of each method on a metric, from the results of the cells of an ablation.

Effects have simultaneous confidence intervals, by a studentized wild bootstrap over the seeds of paired differences:

    r[j, i] = difference of comparison j at seed i, minus the mean of row j
    t[j] of signs s = |mean of s[i] r[j, i]| / its standard error
    c = the confidence quantile, over random signs s, of max_j t[j]
    interval of row j = mean ± c * standard error

A seed has the same sign in all rows, so c takes their correlation into account (the max-t method). Random signs are
robust to ties, where resamples of few seeds would often have a standard error of 0.

References:
    Wu, Jackknife, bootstrap and other resampling methods in regression analysis, 1986.
    Romano and Wolf, Exact and approximate stepdown methods for multiple hypothesis testing, 2005.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from purecompose import random
from purecompose._support.messages import table


def subsets_of(methods: Sequence[str]) -> list[frozenset[str]]:
    """Return the subsets to train: all methods, all but each one, and none."""
    whole = frozenset(methods)
    return list(dict.fromkeys([whole, *(whole - {name} for name in methods), frozenset[str]()]))


def name_of(subset: frozenset[str], methods: Sequence[str]) -> str:
    """Return a short name of a subset, such as 'all', 'all but c', 'a + b' or 'none'."""
    if not subset:
        return "none"
    missing = [name for name in methods if name not in subset]
    if not missing:
        return "all"
    if len(missing) == 1 and len(methods) > 2:
        return f"all but {missing[0]}"
    return " + ".join(name for name in methods if name in subset)


CONFIDENCE = 0.95
"""Confidence with which all intervals contain the means that they estimate."""
MOST_SEEDS = 1000
"""Numbers of seeds above this one are reported as "more than"."""
FEWEST_SEEDS = 5
"""With four seeds, simultaneous 95 % intervals would have a coverage of only 93 %."""
_ALL_SIGNS = 13
"""Number of seeds up to which all signs are used."""
_POWER = 0.8
"""Probability with which the number of seeds that is reported as needed suffices."""


class Interval(NamedTuple):
    """A mean difference with its simultaneous confidence interval.

    Example:
        >>> Interval(mean=0.5, low=0.1, high=0.9, deviation=0.2).is_decided
        True
    """

    mean: float
    """Mean of the differences."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    deviation: float
    """Standard deviation of the differences."""

    @property
    def is_decided(self) -> bool:
        """True if the interval does not contain 0."""
        return self.low > 0 or self.high < 0


def simultaneous_intervals(differences: Tensor | Sequence[Sequence[float]]) -> list[Interval]:
    """Return an interval for the mean of each row; with 95 % confidence, all contain their mean.

    Args:
        differences: Paired differences of shape (number of comparisons, number of seeds), one column for each seed.

    Returns:
        One interval for each row: infinite ones for fewer than five seeds. With enough seeds, a row of equal numbers
        has an interval of length 0.

    Raises:
        ValueError: The differences are not a matrix of finite numbers with at least one row and column.

    Example:
        >>> one, two = simultaneous_intervals([[1.0, 1.2, 0.9, 1.1, 1.0, 0.8], [0.1, -0.2, 0.0, 0.1, 0.2, -0.1]])
        >>> one.is_decided, two.is_decided
        (True, False)
    """
    values = torch.as_tensor(differences, dtype=torch.float64)
    if values.ndim != 2 or not values.numel() or not values.isfinite().all():
        raise ValueError(
            f"simultaneous_intervals: expected finite differences of shape (comparisons, seeds), got shape "
            f"{tuple(values.shape)}{'' if values.isfinite().all() else ' with numbers that are not finite'}"
        )
    num = values.shape[1]
    varies = values.amax(1) > values.amin(1)
    suffices = num >= FEWEST_SEEDS
    critical = _critical(values[varies]) if suffices else math.inf
    deviations = values.std(1).tolist() if num > 1 else [math.nan] * len(values)
    intervals = []
    for mean, deviation, row_varies in zip(values.mean(1).tolist(), deviations, varies.tolist(), strict=True):
        half = critical * deviation / math.sqrt(num) if row_varies else 0.0 if suffices else math.inf
        intervals.append(Interval(mean, mean - half, mean + half, deviation))
    return intervals


def _critical(values: Tensor) -> float:
    """Return the quantile of the greatest t over the rows, all of which vary."""
    num = values.shape[1]
    if not len(values):
        return 0.0
    signed = (values - values.mean(1, keepdim=True))[:, None] * _signs(num)
    errors = signed.std(2) / math.sqrt(num)
    greatest = (signed.mean(2).abs() / errors).amax(0)
    return greatest.sort().values[math.ceil(CONFIDENCE * len(greatest)) - 1].item()


def _signs(num: int) -> Tensor:
    """Return all signs of the seeds, or as many random ones, of shape (number of signs, seeds)."""
    if num <= _ALL_SIGNS:
        return torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * num)
    return 2 * random.bernoulli(random.key(0), 0.5, (2**_ALL_SIGNS, num)).double() - 1


def seeds_needed(interval: Interval, num_seeds: int, num_comparisons: int) -> int:
    """Return about how many seeds in total would decide a comparison with probability 0.8; 0 if it is decided.

    At most `MOST_SEEDS` + 1, from normal quantiles with Šidák's correction for the number of comparisons.
    """
    if interval.is_decided or interval.low == interval.high:
        return 0
    if num_seeds < 2:
        return FEWEST_SEEDS
    quantile = NormalDist().inv_cdf((1 + CONFIDENCE ** (1 / num_comparisons)) / 2) + NormalDist().inv_cdf(_POWER)
    ratio = quantile * interval.deviation / abs(interval.mean) if interval.mean else math.inf
    # Two more, because the error is estimated, too.
    return max(num_seeds + 1, FEWEST_SEEDS, math.ceil(min(ratio**2 + 2, MOST_SEEDS + 1)))


@dataclass(frozen=True)
class Cell:
    """The results of one subset of the methods."""

    name: str
    """Such as "all", "all but mixup", "mixup + sam" or "none"."""
    methods: tuple[str, ...]
    """Names of the methods in the subset."""
    values: tuple[float, ...]
    """The metric at the end of the run, for each seed."""

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return statistics.fmean(self.values)


@dataclass(frozen=True)
class Effect:
    """What one method changes: the metric with it minus the metric without it, seed by seed."""

    method: str
    """Name of the method."""
    with_it: float
    """Mean over the seeds of the metric with the method."""
    without_it: float
    """Mean of the metric without it."""
    differences: tuple[float, ...]
    """The difference for each seed."""
    interval: Interval | None
    """The mean difference with its simultaneous interval; `None` if a difference is not finite."""
    seeds_needed: int
    """Estimated total number of seeds with which the comparison would be decided; 0 if it is, 1,001 for more than
    1,000."""
    verdict: str
    """"better", "worse", "no difference", "undecided" or "not finite"."""


@dataclass(frozen=True)
class Ablation:
    """The result of `ablate`; it prints as a table.

    Attributes:
        metric: The metric that is compared.
        seeds: The seeds.
        cells: The trained subsets.
        effects: The effect of each method, in the order given.
        mode: "min" if lower values of the metric are better, "max" if higher ones are.
        folder: The folder of the runs, if they were kept.
    """

    metric: str
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    effects: tuple[Effect, ...]
    mode: str
    folder: Path | None = None

    def __str__(self) -> str:
        rows = [_row(effect, self) for effect in self.effects]
        head = ["method", "with", "without", "difference", "interval", "verdict"]
        lower = " (lower is better)" if self.mode == "min" else ""
        lines = [
            f"{self.metric}{lower} of {len(self.cells)} subsets of {len(self.effects)} methods, "
            f"{len(self.seeds)} seeds each; simultaneous {CONFIDENCE:.0%} intervals",
            "",
            table(head, rows),
        ]
        return "\n".join([*lines, *_remarks(self)])


def effects_of(methods: Sequence[str], cells: Mapping[frozenset[str], Cell], mode: str) -> tuple[Effect, ...]:
    """Return the effect of each method on a metric of this mode, from the results of the cells."""
    whole = frozenset(methods)
    pairs = {name: (cells[whole], cells[whole - {name}]) for name in methods}
    rows = {
        name: [a - b for a, b in zip(with_it.values, without.values, strict=True)]
        for name, (with_it, without) in pairs.items()
    }
    finite = [name for name, row in rows.items() if all(map(math.isfinite, row))]
    found_for = simultaneous_intervals([rows[name] for name in finite]) if finite else []
    intervals = dict(zip(finite, found_for, strict=True))
    found = []
    for name, (with_it, without) in pairs.items():
        interval = intervals.get(name)
        needed = 0 if interval is None else seeds_needed(interval, len(with_it.values), len(finite))
        means, verdict = (with_it.mean, without.mean), _verdict(interval, needed, mode)
        found.append(Effect(name, *means, tuple(rows[name]), interval, needed, verdict))
    return tuple(found)


def _verdict(interval: Interval | None, needed: int, mode: str) -> str:
    if interval is None:
        return "not finite"
    if interval.is_decided:
        return "better" if (interval.mean < 0) == (mode == "min") else "worse"
    return "undecided" if needed else "no difference"


def _row(effect: Effect, ablation: Ablation) -> list[str]:
    interval, digits, verdict = effect.interval, _digits(ablation), effect.verdict
    if verdict == "undecided":
        more = effect.seeds_needed - len(ablation.seeds)
        few = f"about {more} more seeds" if effect.seeds_needed <= MOST_SEEDS else f"more than {MOST_SEEDS} seeds"
        verdict = f"undecided; needs {few}"
    return [
        effect.method,
        f"{effect.with_it:.{digits}f}",
        f"{effect.without_it:.{digits}f}",
        "" if interval is None else f"{interval.mean:+.{digits}f}",
        "" if interval is None else f"{interval.low:+.{digits}f} to {interval.high:+.{digits}f}",
        verdict,
    ]


def _digits(ablation: Ablation) -> int:
    """Return the number of decimals with which the narrowest interval shows two digits."""
    widths = [one.interval.high - one.interval.low for one in ablation.effects if one.interval is not None]
    finite = [width for width in widths if 0 < width < math.inf]
    return min(max(1 - math.floor(math.log10(min(finite) / 2)), 2), 8) if finite else 4


def _remarks(ablation: Ablation) -> list[str]:
    """Return what a reader of the table has to know."""
    lines = []
    if any(effect.interval is not None and math.isinf(effect.interval.high) for effect in ablation.effects):
        lines.append(f"{len(ablation.seeds)} seeds are too few for intervals: give at least {FEWEST_SEEDS}")
    if any(effect.verdict == "not finite" for effect in ablation.effects):
        bad = [cell.name for cell in ablation.cells if not all(map(math.isfinite, cell.values))]
        lines.append(f"runs without a finite {ablation.metric}: {', '.join(bad)}")
    return ["", *lines] if lines else []
