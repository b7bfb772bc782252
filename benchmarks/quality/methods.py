"""The trade-off of every method: what a step costs, and when training reaches a quality, from recorded runs.

    python benchmarks/quality/methods.py

Reads the records of `methods_images.py` and `methods_text.py`, and writes docs/images/methods.svg and the tables after
the marks in docs/quality.md. Times are processor time.
"""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import methods_images
import methods_text
from _curve import Point
from _methods import JOINT, PLAIN
from _pictures import save
from _task import Task
from _timing import Row, table
from report import markdown, replaced, runs_of as recorded

from purecompose.analysis import Interval, simultaneous_intervals


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "quality.md"
TASKS = (methods_images.TASK, methods_text.TASK)
Runs = Mapping[int, Sequence[Point]]
"""The points of the runs of one side, by seed."""


def runs_of(task: Task) -> dict[str, Runs]:
    """Return the runs of each side that has records with the settings that it has now."""
    found: dict[str, dict[int, Sequence[Point]]] = {}
    for (side, seed), points in recorded(task, task.precisions[0]).items():
        found.setdefault(side, {})[seed] = points
    return {side: found[side] for side in task.sides if side in found}


class Ratios(NamedTuple):
    """Ratios of paired seeds, of plain training."""

    lowest: float
    median: float
    highest: float

    def __str__(self) -> str:
        if math.isinf(self.median):
            return "not reached"
        return f"{self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


class Effect(NamedTuple):
    """What a method does."""

    method: str
    cost: Ratios
    """Of the processor time of a step."""
    time: Ratios
    """Of the processor time until the target; infinite where it is not reached."""
    end: Interval
    """The difference of the metric at the end of the run."""
    product: float | None
    """Of a group of methods: the product of the median times of its methods, each by itself."""


def effects(task: Task) -> list[Effect]:
    """Return the effects of all methods, the ones that reach the target soonest first."""
    runs = runs_of(task)
    plain = runs.pop(PLAIN)
    ends = [[run[seed][-1].value - plain[seed][-1].value for seed in run] for run in runs.values()]

    def ratios(run: Runs, seconds: Callable[[Sequence[Point]], float]) -> Ratios:
        values = [seconds(points) / seconds(plain[seed]) for seed, points in run.items()]
        return Ratios(min(values), median(values), max(values))

    def until(points: Sequence[Point]) -> float:
        reached = task.reached(points)
        return math.inf if reached is None else reached.cpu_seconds

    def cost(points: Sequence[Point]) -> float:
        return points[-1].cpu_seconds / points[-1].batch

    times = {name: ratios(run, until) for name, run in runs.items()}

    def product(name: str) -> float | None:
        parts = name.split(JOINT)
        return math.prod(times[part].median for part in parts) if len(parts) > 1 else None

    found = [
        Effect(name, ratios(run, cost), times[name], end, product(name))
        for (name, run), end in zip(runs.items(), simultaneous_intervals(ends), strict=True)
    ]
    return sorted(found, key=lambda effect: effect.time.median)


def rows_of(task: Task, found: Sequence[Effect]) -> list[Row]:
    """Return the table of the effects of a task."""
    with_products = any(effect.product is not None for effect in found)
    unit = "" if task.is_lower_better else ", points"
    rows: list[Row] = []
    for effect in found:
        row: Row = {"method": effect.method, "time of a step": str(effect.cost)}
        row[f"time to {task.target:g}"] = str(effect.time)
        if with_products:
            row["product of its methods"] = "" if effect.product is None else f"{effect.product:.2f}"
        row[f"{task.metric} at the end{unit}"] = with_interval(effect.end, scale=1 if task.is_lower_better else 100)
        rows.append(row)
    return rows


def with_interval(difference: Interval, scale: float) -> str:
    """Return a difference with its interval, or without it if there are too few seeds for one."""
    mean, low, high = (scale * value for value in (difference.mean, difference.low, difference.high))
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})" if math.isfinite(low) else f"{mean:+.2f}"


def draw(found: Mapping[str, Sequence[Effect]], path: pathlib.Path) -> None:
    """Draw the time to the target over the cost of a step; hollow marks at the top do not reach the target."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import AutoLocator, NullLocator

    figure = Figure(figsize=(9, 5 * len(TASKS)), layout="constrained")
    panels: Any = figure.subplots(len(TASKS), 1, squeeze=False)
    for task, panel in zip(TASKS, panels[:, 0], strict=True):
        labels: list[tuple[str, tuple[float, float], str]] = []
        top = 1.15 * max(effect.time.median for effect in found[task.name] if math.isfinite(effect.time.median))
        for method, cost, time, *_ in found[task.name]:
            is_reached, (low, middle, high) = math.isfinite(time.median), (min(one, top) for one in time)
            color = "#94a3b8" if not is_reached else "#c2410c" if time.highest < 1 else "#475569"
            across = [[cost.median - cost.lowest], [cost.highest - cost.median]]
            options: dict[str, Any] = {"color": color, "markersize": 4, "elinewidth": 0.7}
            options["markerfacecolor"] = color if is_reached else "none"
            panel.errorbar(cost.median, middle, [[middle - low], [high - middle]], across, fmt="o", **options)
            labels.append((method, (cost.median, middle), color))
        panel.axhline(1, color="#94a3b8", linewidth=0.8, linestyle="--")
        panel.axvline(1, color="#94a3b8", linewidth=0.8, linestyle="--")
        panel.set(xlabel="time of a step, of plain training", ylabel=f"time to {task.target:g}, of plain training")
        panel.set(xscale="log", yscale="log")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(AutoLocator())
            axis.set_major_formatter("{x:.1f}")
            axis.set_minor_locator(NullLocator())
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{task.title}: {task.metric} {task.target:g}", loc="left", fontsize=10)
        annotate(panel, labels)
    save(figure, path, "Time to the target of each method over the time of a step with it")


def annotate(panel: Any, labels: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Write a label beside each point, given as text, point and color, where it covers no other one, if possible."""
    panel.figure.draw_without_rendering()
    placed: list[tuple[float, float, float]] = []
    for text, point, color in labels:
        left, base = panel.transData.transform(point)
        right = left + 4.6 * len(text)

        def is_free(y: float, left: float = left, right: float = right) -> bool:
            return all(abs(y - own_y) > 8 or left > end or right < start for start, end, own_y in placed)

        heights = (3, -10, 12, -19, 21, -28, 30, -37, 39)
        height = next((height for height in heights if is_free(base + height)), heights[0])
        placed.append((left, right, base + height))
        options = {"textcoords": "offset pixels", "fontsize": 7, "color": color}
        panel.annotate(text, point, xytext=(5, height), **options)


def main() -> None:
    found = {task.name: effects(task) for task in TASKS}
    text = PAGE.read_text()
    for task in TASKS:
        rows = rows_of(task, found[task.name])
        print(table(rows))
        text = replaced(text, markdown(rows), task.name)
    PAGE.write_text(text)
    draw(found, PAGE.parent / "images" / "methods.svg")


if __name__ == "__main__":
    main()
