"""The tables and the picture of docs/scaling.md.

python benchmarks/_scaling_picture.py  # from results/scaling.json; prints the tables
"""

import json
import pathlib
from typing import Any

from _pictures import save
from _timing import RESULTS, Row


PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "images" / "scaling.svg"
_COLORS = {"data_parallel": "#c2410c", "fully_sharded, step": "#0f766e", "fully_sharded, layer": "#475569"}
_TITLES = {"gpt": "GPT, 1.3 billion parameters", "resnet": "ResNet-50"}
_LETTERS = {
    "compute": "c",
    "bandwidth": "b",
    "latency": "l",
    "copying the whole batch": "i",
    "fewer examples than GPUs": "e",
}


_SHOWN = (
    ("gpt", "", False),
    ("gpt", "", True),
    ("gpt", "overlap", False),
    ("resnet", "", False),
    ("resnet", "part", False),
    ("resnet", "part", True),
)
"""The tables of the page: the network, what is otherwise, and whether all GPUs share a fixed number of examples."""


def chosen(rows: list[Row], network: str, changes: str, *, is_fixed: bool) -> list[Row]:
    """The rows of a network whose number of examples is the same for all numbers of GPUs, or for each GPU."""
    own = [row for row in rows if row["network"] == network and row["as if"] == changes]
    sizes: dict[Any, list[Any]] = {}
    for row in own:
        sizes.setdefault(row["GPUs"], []).append(row["examples"])
    return [row for row in own if row["examples"] == (sizes[row["GPUs"]][-1] if is_fixed else sizes[row["GPUs"]][0])]


def table(rows: list[Row]) -> str:
    """A line for each way to divide a step, a column for each number of GPUs."""
    gpus = list(dict.fromkeys(row["GPUs"] for row in rows))
    lines = ["| GPUs | " + " | ".join(f"{num:,}" for num in gpus) + " |", "| --- |" + " --- |" * len(gpus)]
    for mode in _COLORS:
        for is_in_host in (False, True) if "sharded" in mode else (False,):
            cells = []
            for num in gpus:
                own = [row for row in rows if row["GPUs"] == num and row["mode"] == mode]
                cells.append(_cell(own[-1 if is_in_host else 0]))
            where = "" if "sharded" not in mode else ", 8 shards" if is_in_host else ", all shards"
            lines.append(f"| {mode}{where} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    if row["limit"] not in _LETTERS:
        return f"does not fit, {round(float(str(row['memory GB']))):,} GB"
    cut = f", {row['microbatches']} mb" if row["microbatches"] != 1 else ""
    return f"{float(str(row['step ms'])):,.0f} ms, {row['efficiency %']} % {_LETTERS[str(row['limit'])]}{cut}"


def tables(rows: list[Row]) -> dict[str, str]:
    """The tables of the page, by what they are of."""
    return {
        f"{network}, {'fixed' if is_fixed else 'growing'}, as if: {changes}": table(
            chosen(rows, network, changes, is_fixed=is_fixed)
        )
        for network, changes, is_fixed in _SHOWN
    }


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Writes the picture of these rows: efficiency against the number of GPUs, with as many examples for each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels: Any = figure.subplots(1, len(_TITLES), sharey=True)
    for panel, network in zip(panels, _TITLES, strict=True):
        own = chosen(rows, network, "part" if network == "resnet" else "", is_fixed=False)
        gpus = list(dict.fromkeys(row["GPUs"] for row in own))
        for mode, color in _COLORS.items():
            for place, style in ((0, "--" if "sharded" in mode else "-"), (-1, "-")):
                cells = [[row for row in own if row["GPUs"] == num and row["mode"] == mode][place] for num in gpus]
                label = mode + ("" if "sharded" not in mode else ", all shards" if place == 0 else ", 8 shards")
                values: Any = [row["efficiency %"] for row in cells]
                panel.plot(gpus, values, style, color=color, marker="o", markersize=4, label=label)
                if "sharded" not in mode:
                    break
        panel.set_xscale("log", base=2)
        panel.set(title=_TITLES[network], xticks=gpus, xticklabels=[f"{num:,}" for num in gpus], ylim=(0, 102))
        panel.grid(color="#e2e8f0")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("efficiency, %")
    figure.supxlabel("GPUs", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    save(figure, path, "Efficiency of two networks in each mode, from 8 to 4,096 GPUs")


if __name__ == "__main__":
    found = json.loads((RESULTS / "scaling.json").read_text())["rows"]
    draw(found, PICTURE)
    for title, text in tables(found).items():
        print(f"{title}\n\n{text}\n")
