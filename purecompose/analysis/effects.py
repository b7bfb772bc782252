"""The effect of each method on quality and time, from the results of the cells of an ablation."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from purecompose._support.tables import table
from purecompose.analysis.intervals import MOST_SEEDS, Interval, fewest_seeds, seeds_needed, simultaneous_intervals
from purecompose.analysis.subsets import Pairs


@dataclass(frozen=True)
class Cell:
    """The results of one subset of the methods."""

    name: str
    """Such as "all", "all but mixup", "mixup + sam" or "none"."""
    methods: tuple[str, ...]
    """Names of the methods in the subset."""
    values: tuple[float, ...]
    """The metric at the end of the run, for each seed."""
    seconds: tuple[float, ...]
    """The mean time of a step in seconds, in each round; the same rounds in all cells. Empty if not measured."""
    mode: str
    """"population", "sequential" or "processes", with the reason if it is not a population."""

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
    """The difference for each seed; with `design="all"`, its mean over all pairs of subsets."""
    interval: Interval | None
    """The mean difference with its simultaneous interval; `None` if a difference is not finite."""
    slowdown: Interval | None
    """The step time with the method, divided by the one without it; `None` if not measured."""
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
        confidence: The confidence with which all intervals contain their true difference.
        resolution: The smallest difference that matters, if it was given.
        seeds: The seeds.
        cells: The trained subsets.
        effects: The effect of each method, in the order given.
        mode: "min" if lower values of the metric are better, "max" if higher ones are.
        folder: The folder of the runs, if they were kept.
    """

    metric: str
    confidence: float
    resolution: float | None
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    effects: tuple[Effect, ...]
    mode: str
    folder: Path | None = None

    def __str__(self) -> str:
        rows = [_row(effect, self) for effect in self.effects]
        head = ["method", "with", "without", "difference", "interval", "step time", "verdict"]
        lower = " (lower is better)" if self.mode == "min" else ""
        lines = [
            f"{self.metric}{lower} of {len(self.cells)} subsets of {len(self.effects)} methods, "
            f"{len(self.seeds)} seeds each; simultaneous {self.confidence:.0%} intervals",
            "",
            table(head, rows),
        ]
        return "\n".join([*lines, *_remarks(self)])


def effects_of(
    compared: Sequence[Pairs],
    cells: Mapping[frozenset[str], Cell],
    mode: str,
    confidence: float,
    resolution: float | None,
) -> tuple[Effect, ...]:
    """Return the effect of each method on a metric of this mode, from the results of the cells."""
    num_seeds = len(next(iter(cells.values())).values)
    rows = {one.method: _differences(one, cells) for one in compared}
    finite = [name for name, row in rows.items() if all(map(math.isfinite, row))]
    intervals = dict(zip(finite, _intervals([rows[name] for name in finite], confidence), strict=True))
    slowdowns = _slowdowns(compared, cells, confidence)
    found = []
    for one in compared:
        interval = intervals.get(one.method)
        needed = 0 if interval is None else seeds_needed(interval, num_seeds, len(finite), confidence, resolution)
        found.append(
            Effect(
                one.method,
                statistics.fmean(cells[with_it].mean for with_it, _ in one.pairs),
                statistics.fmean(cells[without].mean for _, without in one.pairs),
                tuple(rows[one.method]),
                interval,
                slowdowns.get(one.method),
                needed,
                _verdict(interval, needed, resolution, mode),
            )
        )
    return tuple(found)


def _differences(one: Pairs, cells: Mapping[frozenset[str], Cell]) -> list[float]:
    """Return the difference of each seed, as a mean over the pairs."""
    pairs = [zip(cells[with_it].values, cells[without].values, strict=True) for with_it, without in one.pairs]
    return [statistics.fmean(a - b for a, b in found) for found in zip(*pairs, strict=True)]


def _intervals(rows: list[list[float]], confidence: float) -> list[Interval]:
    return simultaneous_intervals(torch.tensor(rows, dtype=torch.float64), confidence) if rows else []


def _slowdowns(
    compared: Sequence[Pairs], cells: Mapping[frozenset[str], Cell], confidence: float
) -> dict[str, Interval]:
    """Return the ratio of step times of each method, as a geometric mean over pairs and rounds."""
    if not all(cell.seconds for cell in cells.values()):
        return {}
    logs = []
    for one in compared:
        pairs = [zip(cells[with_it].seconds, cells[without].seconds, strict=True) for with_it, without in one.pairs]
        logs.append([statistics.fmean(math.log(a / b) for a, b in found) for found in zip(*pairs, strict=True)])
    return {
        one.method: Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.deviation)
        for one, found in zip(compared, _intervals(logs, confidence), strict=True)
    }


def _verdict(interval: Interval | None, needed: int, resolution: float | None, mode: str) -> str:
    if interval is None:
        return "not finite"
    if interval.is_within(resolution):
        return "no difference"
    if interval.is_decided:
        return "better" if (interval.mean < 0) == (mode == "min") else "worse"
    return "undecided" if needed else "no difference"


def _row(effect: Effect, ablation: Ablation) -> list[str]:
    interval, slowdown = effect.interval, effect.slowdown
    digits = _digits(ablation)
    verdict = effect.verdict
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
        "" if slowdown is None else _change(slowdown),
        verdict,
    ]


def _change(slowdown: Interval) -> str:
    """Return the change of the time of a step, in brackets if it may be due to noise."""
    text = f"{slowdown.mean - 1:+.0%}"
    return f"({text})" if slowdown.low <= 1 <= slowdown.high else text


def _digits(ablation: Ablation) -> int:
    """Return the number of decimals with which the narrowest interval shows two digits."""
    widths = [one.interval.high - one.interval.low for one in ablation.effects if one.interval is not None]
    finite = [width for width in widths if 0 < width < math.inf]
    return min(max(1 - math.floor(math.log10(min(finite) / 2)), 2), 8) if finite else 4


def _remarks(ablation: Ablation) -> list[str]:
    """Return what a reader of the table has to know."""
    lines = []
    if any(effect.slowdown is not None and _change(effect.slowdown)[0] == "(" for effect in ablation.effects):
        lines.append("times in brackets: the interval of the change contains 0")
    if any(effect.interval is not None and math.isinf(effect.interval.high) for effect in ablation.effects):
        fewest = fewest_seeds(ablation.confidence)
        lines.append(f"{len(ablation.seeds)} seeds are too few for intervals: give at least {fewest}")
    if any(effect.verdict == "not finite" for effect in ablation.effects):
        bad = [cell.name for cell in ablation.cells if not all(map(math.isfinite, cell.values))]
        lines.append(f"runs without a finite {ablation.metric}: {', '.join(bad)}")
    lines += sorted({f"{cell.name}: {cell.mode}" for cell in ablation.cells if "(" in cell.mode})
    return ["", *lines] if lines else []
