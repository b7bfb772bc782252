"""Tables and pictures of the time to quality, from the records of all tasks.

    python benchmarks/quality/report.py [--check]

Writes `results/quality.json`, the pictures in docs/images, and the tables between the marks in docs/quality.md and
README.md. `--check` writes nothing, and fails if a table differs from the records.
"""

import argparse
import functools
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import cifar10
import cifar10_91
import held_out
import mnist
import shakespeare
import torch
from _curve import Point
from _pictures import save
from _score import profile_scores
from _task import RECORDS, Task, records
from _timing import RESULTS, Row, quartiles, table

from purecompose.analysis import simultaneous_intervals


ROOT = pathlib.Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
TASKS = (mnist.TASK, cifar10.TASK, shakespeare.TASK)
COLORS = {"recipe": "#c2410c", "baseline": "#334155", "whitened loop": "#0f766e"}
Runs = Mapping[tuple[str, int], Sequence[Point]]
"""The points of each run of one task in one precision, by side and seed."""


class Reached(NamedTuple):
    """When a run reaches the target; infinite if it does not."""

    seconds: float
    """Of training, compilation included."""
    batches: float


def runs_of(task: Task, precision: str) -> Runs:
    """Return the recorded runs of a task in this precision, with the settings that its sides have now."""
    found = records(RECORDS / f"{task.name}.jsonl")
    return {(r["side"], r["seed"]): r["points"] for r in found if r["settings"] == task.settings(r["side"], precision)}


def reached(task: Task, runs: Runs, side: str) -> dict[int, Reached]:
    """Return when each run of a side reaches the target, by seed."""
    found: dict[int, Reached] = {}
    for (name, seed), points in runs.items():
        if name == side:
            point = task.reached(points)
            # Evaluations are not counted, but for what averaging over several views of an image adds to one.
            views = task.sides[side].settings.get("views", 1)
            found[seed] = (
                Reached(math.inf, math.inf)
                if point is None
                else Reached(point.seconds + point.evaluation * (1 - 1 / views), point.batch)
            )
    return found


def seconds(task: Task, side: str) -> dict[int, float]:
    """Return the seconds until each run of a side reaches the target in the task's fastest precision, by seed."""
    return {seed: one.seconds for seed, one in reached(task, runs_of(task, task.precisions[0]), side).items()}


def rows_of(task: Task) -> Iterator[Row]:
    """Yield a row for each side in each precision; ratios are those of paired seeds, over the baseline."""
    for precision in task.precisions:
        runs = runs_of(task, precision)
        base = reached(task, runs, "baseline")
        for side in task.sides:
            own = reached(task, runs, side)
            if not own:
                continue
            num_reached = sum(math.isfinite(one.seconds) for one in own.values())
            yield {
                "task": task.name,
                "precision": precision,
                "side": side,
                "reached": f"{num_reached} of {len(own)}",
                "batches": f"{median(one.batches for one in own.values()):g}",
                "seconds": _mean([one.seconds for one in own.values()]),
                "batches, of baseline": _ratio(own, base, "batches"),
                "seconds, of baseline": _ratio(own, base, "seconds"),
            }


def short_row(task: Task) -> Row:
    """Return the row of a task in the README: its fastest precision, in one line."""
    runs = runs_of(task, task.precisions[0])
    base, own = reached(task, runs, "baseline"), reached(task, runs, "recipe")
    return {
        "task": task.title,
        "target": f"{task.metric} {task.target:g}",
        "tuned PyTorch loop": f"{median(one.seconds for one in base.values()):.1f} s",
        "recipe": f"{median(one.seconds for one in own.values()):.1f} s",
        "ratio": _ratio(own, base, "seconds"),
    }


def score_rows() -> list[Row]:
    """Return AlgoPerf's score of both sides, with the times that it consists of, over those of the faster side."""
    times = {
        name: {task.name: median(seconds(task, name).values()) for task in TASKS} for name in ("baseline", "recipe")
    }
    scores = profile_scores(times)
    least = {task.name: min(own[task.name] for own in times.values()) for task in TASKS}
    return [
        {
            "submission": name,
            **{task.name: f"{own[task.name] / least[task.name]:.2f}" for task in TASKS},
            "score": f"{scores[name]:.2f}",
        }
        for name, own in times.items()
    ]


FINETUNING = (
    "side",
    "batches",
    "loss at the end",
    "difference from plain",
    "a batch, of plain",
    "time to it, of plain",
)
"""Columns of the table of `finetuning.py` that are shown."""


def saved_rows(name: str, columns: Sequence[str] | None = None) -> list[Row]:
    """Return the table that another script has saved, or some of its columns; no rows if it has not been run."""
    path = RESULTS / f"quality_{name}.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return [{column: row[column] for column in columns or row} for row in rows]


def _mean(seconds: Sequence[float]) -> str:
    """Return the mean with its 95 % interval."""
    if not all(map(math.isfinite, seconds)):
        return f"median {median(seconds):.1f}"
    if len(seconds) < 5:
        return f"{fmean(seconds):.1f}"
    (interval,) = simultaneous_intervals(torch.tensor([seconds], dtype=torch.float64))
    return f"{interval.mean:.1f} ({interval.low:.1f} to {interval.high:.1f})"


def _ratio(own: Mapping[int, Reached], base: Mapping[int, Reached], unit: Literal["seconds", "batches"]) -> str:
    """Return the median of the ratios of paired seeds, with quartiles."""
    pairs = [(getattr(own[seed], unit), getattr(base[seed], unit)) for seed in own if seed in base]
    ratios = [one / other for one, other in pairs if math.isfinite(other)]
    if len(ratios) < 2:
        return "".join(f"{one:.2f}" for one in ratios)
    low, middle, high = (f"{one:.2f}" if math.isfinite(one) else "not reached" for one in quartiles(ratios))
    return f"{middle} ({low} to {high})"


def draw(tasks: Sequence[Task], path: pathlib.Path) -> None:
    """Draw the curves of all seeds, over seconds and over batches, in each task's fastest precision."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * len(tasks)), layout="constrained")
    panels: Any = figure.subplots(len(tasks), 2, sharey="row", squeeze=False)
    for task, row in zip(tasks, panels, strict=True):
        for (side, _), points in sorted(runs_of(task, task.precisions[0]).items()):
            values = [point.value for point in points]
            style: dict[str, Any] = {"color": COLORS[side], "linewidth": 0.9, "alpha": 0.8}
            row[0].plot([point.seconds for point in points], values, **style)
            row[1].plot([point.batch for point in points], values, **style)
        for panel, unit in zip(row, ("seconds of training, compilation included", "batches"), strict=True):
            panel.axhline(task.target, color="#94a3b8", linewidth=0.8, linestyle="--")
            panel.set(xlabel=unit, xlim=(0, None), ylim=task.shown)
            panel.spines[["top", "right"]].set_visible(False)
        row[0].set(ylabel=task.metric)
        row[0].set_title(f"{task.title} ({task.precisions[0]})", loc="left", fontsize=10)
        row[0].annotate(
            f"target {task.target:g}",
            (0.01, task.target),
            xycoords=("axes fraction", "data"),
            ha="left",
            va="bottom",
            fontsize=8,
            color="#475569",
        )
    for side in dict.fromkeys(side for task in tasks for side, _ in runs_of(task, task.precisions[0])):
        panels[0][0].plot([], [], color=COLORS[side], label=side)
    panels[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, path, "Quality over seconds and over batches, for both sides and all seeds")


def draw_short(tasks: Sequence[Task], path: pathlib.Path) -> None:
    """Draw the curves of all seeds over seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.7), layout="constrained")
    panels: Any = figure.subplots(1, len(tasks))
    for task, panel in zip(tasks, panels, strict=True):
        runs = sorted(runs_of(task, task.precisions[0]).items())
        for name in ("baseline", "recipe"):
            for points in (points for (side, _), points in runs if side == name):
                times, values = [point.seconds for point in points], [point.value for point in points]
                panel.plot(times, values, color=COLORS[name], linewidth=1, alpha=0.8)
        panel.axhline(task.target, color="#94a3b8", linewidth=0.8, linestyle="--")
        panel.set(xlabel="seconds", xlim=(0, None), ylim=task.shown, ylabel=task.metric)
        panel.set_title(f"{task.title.partition(',')[0]}, to {task.target:g}", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    for name, label in (("baseline", "tuned PyTorch loop"), ("recipe", "recipe")):
        panels[-1].plot([], [], color=COLORS[name], label=label)
    panels[-1].legend(frameon=False, fontsize=9, loc="upper right")
    save(figure, path, "Quality over seconds, compilation included, on three tasks, for both sides and all seeds")


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table of Markdown; nothing if there are none."""
    if not rows:
        return ""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *[[str(row[name]) for name in head] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replaced(text: str, made: str, name: str) -> str:
    """Return a page with the table after a mark replaced."""
    mark = f"<!-- {name} -->\n"
    if mark not in text:
        raise SystemExit(f"a page lacks the mark {mark.strip()}, after which the table stands")
    return re.sub(rf"({mark})(\|.*\n)*", lambda found: found[1] + made, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a table differs from the records")
    args = parser.parse_args()
    rows = [row for task in TASKS for row in rows_of(task)]
    for task, name in itertools.product(TASKS, ("baseline", "recipe")):
        if not seconds(task, name):
            raise SystemExit(f"{task.name}: no records of the {name} with its present settings; run {task.name}.py")
    print(table(rows))
    tables = {
        ROOT / "docs" / "quality.md": {
            "quality": markdown(rows),
            "larger": markdown([*rows_of(cifar10_91.TASK)]),
            "held_out": markdown([row for task in held_out.TASKS.values() for row in rows_of(task)]),
            "ablations": markdown([row for task in TASKS for row in saved_rows(f"ablation_{task.name}")]),
            "finetuning": markdown(saved_rows("finetuning", FINETUNING)),
            **{name: markdown(saved_rows(name)) for name in ("rates", "ensemble_time", "schedules")},
            "scores": markdown(score_rows()),
        },
        ROOT / "README.md": {"quality": markdown([*map(short_row, TASKS)])},
    }
    pages = {page: page.read_text() for page in tables}
    written = {
        page: functools.reduce(lambda text, name: replaced(text, tables[page][name], name), tables[page], text)
        for page, text in pages.items()
    }
    if args.check:
        if changed := [str(page.relative_to(ROOT)) for page in pages if written[page] != pages[page]]:
            raise SystemExit(f"{' and '.join(changed)}: the tables differ from the records; run report.py")
        return
    for page, text in written.items():
        page.write_text(text)
    (RESULTS / "quality.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    draw(TASKS, IMAGES / "quality.svg")
    draw_short(TASKS, IMAGES / "quality_short.svg")


if __name__ == "__main__":
    main()
