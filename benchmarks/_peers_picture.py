"""The picture of `peers.py`: a panel for each network, with each side's time over that of the loop by hand.

python benchmarks/_peers_picture.py  # from results/peers.json
"""

import json
import pathlib
from typing import Any

from _pictures import save
from _timing import RESULTS, Row


PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "images" / "peers.svg"
_OURS, _OTHERS = "#c2410c", "#475569"


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Writes the picture of these rows."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    networks = list(dict.fromkeys(str(row["network"]) for row in rows))
    sides = list(dict.fromkeys(str(row["side"]) for row in rows))
    figure = Figure(figsize=(2.4 * len(networks) + 2, 0.32 * len(sides) + 1.2), layout="constrained")
    panels: Any = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    for panel, network in zip(panels, networks, strict=True):
        panel.axvline(1, color="#94a3b8", linewidth=1, zorder=0)
        for row in rows:
            if row["network"] == network:
                color = _OURS if str(row["side"]).startswith("ours") else _OTHERS
                face = "white" if row["methods"] else color
                place: Any = row["of by hand"], sides.index(str(row["side"]))
                panel.plot(
                    *place, "o", color=color, markerfacecolor=face, markersize=6, zorder=3 - bool(row["methods"])
                )
        ratios: list[Any] = [row["of by hand"] for row in rows if row["network"] == network]
        panel.set(title=network, xlim=(0, 1.05 * max(ratios)), yticks=range(len(sides)), yticklabels=sides)
        panel.grid(axis="y", color="#e2e8f0", zorder=-1)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    panels[0].invert_yaxis()  # shared by all
    for label in panels[0].get_yticklabels():
        label.set_color(_OURS if label.get_text().startswith("ours") else "black")
    figure.supxlabel("time of a step, over the loop by hand with the same methods (less is faster)", fontsize=10)
    marks = [
        Line2D([], [], marker="o", linestyle="", color=_OTHERS, markerfacecolor=face) for face in (_OTHERS, "white")
    ]
    figure.legend(
        marks, ["plain", "with MixUp and label smoothing"], loc="outside upper center", ncols=2, frameon=False
    )
    save(figure, path, "Time per step with each library, relative to a hand-written loop")


if __name__ == "__main__":
    draw(json.loads((RESULTS / "peers.json").read_text())["rows"], PICTURE)
