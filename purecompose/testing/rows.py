"""Findings as a title with labelled rows below it, for any terminal and for rich's console."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from rich.console import RenderableType


Row = tuple[str, str]
"""A label and its text."""

_NARROWEST = 20


def plain(title: str, rows: Sequence[Row], width: int | None = None) -> str:
    """Return the title with the rows indented below it.

    Args:
        title: The first line.
        rows: Labels, which are aligned in a column, and their texts.
        width: Number of columns, at which longer lines are wrapped; by default they are not.

    Example:
        >>> print(plain("it broke", [("leaf", "params['w']"), ("to do", "look at it once more, please")], width=30))
        it broke
          leaf   params['w']
          to do  look at it once more,
                 please
    """
    size = max((len(label) for label, _ in rows), default=0)
    return "\n".join([hung("", title, width), *(hung(f"  {label.ljust(size)}  ", text, width) for label, text in rows)])


def hung(label: str, text: str, width: int | None) -> str:
    """Return a text behind its label; wrapped lines are aligned with its beginning, by at least two columns."""
    if width is None:
        return f"{label}{text}".rstrip()
    hang = " " * (len(label) or 2)
    size = max(width - len(hang), _NARROWEST)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, size, break_on_hyphens=False) or [""]]
    first, *others = lines or [""]
    return "\n".join([f"{label}{first}".rstrip(), *(f"{hang}{line}" for line in others)])


def coloured(title: str, rows: Sequence[Row], style: str = "bold red") -> "list[RenderableType]":
    """Return the same for rich: the title in its style, labels dim, the advice bold."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for label, text in rows:
        grid.add_row(Text(label, style="dim"), Text(text, style="bold" if label == "to do" else ""))
    return [Text(title, style=style), Padding(grid, (0, 0, 0, 2))]
