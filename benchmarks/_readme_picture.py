"""The picture of the README: quality over seconds for each task, in the forms whose times the README's table gives.

python benchmarks/_readme_picture.py  # from results/quality, after quality/report.py
"""

import pathlib
import sys
from statistics import median
from typing import Any

from _pictures import save


sys.path.append(str(pathlib.Path(__file__).parent / "quality"))

from report import COLORS, IMAGES, TASKS, runs_of, times_of  # noqa: E402  # pyright: ignore[reportMissingImports]


PICTURE = IMAGES / "quality_short.svg"
NAMES = {"baseline": "tuned PyTorch loop", "recipe": "recipe"}


def draw(path: pathlib.Path) -> None:
    """Draw the curves of all seeds of both sides, compiled or not, whichever reaches the target sooner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.7), layout="constrained")
    panels: Any = figure.subplots(1, len(TASKS))
    for task, panel in zip(TASKS, panels, strict=True):
        runs = runs_of(task, task.precisions[0])
        for side in NAMES:
            form = _sooner(task, runs, side)
            for (name, _), points in sorted(runs.items()):
                if name == form:
                    seconds, values = [point.seconds for point in points], [point.value for point in points]
                    panel.plot(seconds, values, color=COLORS[side], linewidth=1, alpha=0.8)
        panel.axhline(task.target, color="#94a3b8", linewidth=0.8, linestyle="--")
        panel.set(xlabel="seconds", xlim=(0, None), ylim=task.shown, ylabel=task.metric)
        panel.set_title(f"{task.title.partition(',')[0]}, to {task.target:g}", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    for side, label in NAMES.items():
        panels[0].plot([], [], color=COLORS[side], label=label)
    panels[0].legend(frameon=False, fontsize=9, loc="lower right")
    save(figure, path, "Quality over seconds, compilation included, on three tasks, for both sides and all seeds")


def _sooner(task: Any, runs: Any, side: str) -> str:
    """Return the form of a side, compiled or eager, that reaches the target sooner in the median."""
    forms = {form: times_of(task, runs, form).in_all.values() for form in (side, f"{side}, eager")}
    return min((form for form, times in forms.items() if times), key=lambda form: median(forms[form]))


if __name__ == "__main__":
    draw(PICTURE)
