"""The picture of `ablation.py`: a panel for each data set, with the effect of each method and its interval.

python benchmarks/_ablation_picture.py  # from results/ablation.json
"""

import json
import pathlib
from typing import Any

from _pictures import save
from _timing import RESULTS, Row


PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "images" / "ablation.svg"
_COLORS = {"better": "#0f766e", "worse": "#c2410c"}


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Draw the differences of these rows, in percentage points."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.get("with")]  # without that of the null
    titles, methods = ([*dict.fromkeys(str(row[name]) for row in rows)] for name in ("data", "method"))
    figure = Figure(figsize=(9, 0.32 * len(methods) + 0.9), layout="constrained")
    panels: Any = figure.subplots(1, len(titles), sharex=True, sharey=True, squeeze=False)[0]
    for panel, title in zip(panels, titles, strict=True):
        panel.axvline(0, color="#94a3b8", linewidth=1, zorder=0)
        for row in rows:
            if row["data"] == title:
                color, place = _COLORS.get(str(row["verdict"]), "#475569"), methods.index(str(row["method"]))
                low, high = map(float, str(row["interval"]).split(" to "))
                panel.plot([low, high], [place, place], color=color, linewidth=2)
                panel.plot(float(str(row["difference"])), place, "o", color=color, markersize=6, markeredgewidth=0)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set(yticks=range(len(methods)), yticklabels=methods, ylim=(len(methods) - 0.5, -0.5))
        panel.grid(axis="y", color="#e2e8f0", zorder=-1)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    figure.supxlabel("change of the accuracy with the method, in percentage points", fontsize=10)
    save(figure, path, "The effect of each method on the accuracy, with intervals, on the digits and on MNIST")


if __name__ == "__main__":
    draw(json.loads((RESULTS / "ablation.json").read_text())["rows"], PICTURE)
