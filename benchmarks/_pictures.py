"""Writes figures of Matplotlib as SVG that is readable on light and on dark pages.

The colors of a figure are its light ones. Rules of style replace each by its dark counterpart: on the site, which puts
such pictures into its pages (docs/site/hooks.py), by the theme of the page; elsewhere, as on GitHub, by that of the
system. A renderer that does not know `light-dark()` shows the light colors.
"""

import io
import pathlib
import re
from typing import Any


__all__ = ["save"]

# Those of docs/images/explained.py, where both have one.
DARK = {
    "#ffffff": "#1e2129",  # paper
    "#000000": "#e3e6ec",  # axes and text
    "#e2e8f0": "#3a404d",  # grid
    "#cbd5e1": "#4b5362",
    "#94a3b8": "#7c8798",
    "#475569": "#a3adba",
    "#334155": "#cbd5e1",
    "#c2410c": "#fb923c",
    "#fb923c": "#b45f1c",
    "#0f766e": "#2dd4bf",
}


def save(figure: Any, path: pathlib.Path, label: str) -> None:
    """Write a figure of Matplotlib.

    Args:
        figure: The figure, on white, with colors of DARK only.
        path: The picture, `*.svg`.
        label: What the picture shows, for readers that cannot see it.

    Raises:
        ValueError: A color has no dark counterpart.
    """
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.hashsalt": "purecompose"}):  # the same names of clippings in each run
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = written.getvalue()
    used = {(kind, light) for kind, light in re.findall(r"\b(fill|stroke): (#\w+)", drawn)}
    if unknown := sorted({light for _, light in used} - DARK.keys()):
        raise ValueError(f"{path.name}: colors without a dark counterpart: {', '.join(unknown)}; add them to DARK")
    rules = [
        "svg:root { color-scheme: light dark; }",
        f".drawn {{ max-width: 100%; height: auto; {_both('fill', '#000000')}; }}",
        ".drawn * { stroke-linejoin: round; stroke-linecap: butt; }",
        *(f'.drawn [style*="{kind}: {one}"] {{ {_both(kind, one)} !important; }}' for kind, one in sorted(used)),
    ]
    style = "\n".join(["<style>", *rules, "</style>"])
    # Inlined in HTML, an SVG has no XML declaration, and a rule for "*" would apply to the whole page.
    drawn = drawn[drawn.index("<svg ") :]
    drawn = drawn.replace("<svg ", f'<svg class="drawn wide" role="img" aria-label="{label}" ', 1)
    path.write_text(re.sub(r"<style.*?</style>", style, drawn, count=1))


def _both(kind: str, light: str) -> str:
    return f"{kind}: light-dark({light}, {DARK[light]})"
