"""Plain-text tables for plans and traces."""

import re
import shutil
import textwrap
from collections.abc import Sequence


_WIDEST = 110
_NUMBER = re.compile(r"[\d.,]+")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Return columns under a header; the last is wrapped so that lines fit in `width` (by default the terminal's).

    Columns of numbers between the first and the last are aligned on the right.

    Example:
        >>> print(table(["a", "size", "b"], [["1", "7", "one"], ["22", "10", "two and twenty, 11 + 11"]], width=24))
        a   size  b
        --  ----  --------------------
        1      7  one
        22    10  two and twenty, 11 +
                  11
    """
    width = width or terminal_width()
    head, rows = _printable(head), [_printable(row) for row in rows]
    for i in range(1, len(head) - 1):
        if rows and all(_NUMBER.fullmatch(row[i]) for row in rows):
            size = max(len(line[i]) for line in (head, *rows))
            for line in (head, *rows):
                line[i] = line[i].rjust(size)
    fixed = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head) - 1)]
    left = sum(fixed) + 2 * len(fixed)
    wrapped = [textwrap.wrap(row[-1], max(width - left, 20)) or [""] for row in rows]
    longest = max([len(head[-1]), *(len(part) for parts in wrapped for part in parts)])
    lines = [_line(head, head[-1], fixed), _line(["-" * size for size in fixed], "-" * longest, fixed)]
    for row, parts in zip(rows, wrapped, strict=True):
        lines.append(_line(row, parts[0], fixed))
        lines += [" " * left + part for part in parts[1:]]
    return "\n".join(lines)


def terminal_width() -> int:
    """Return the terminal's width in columns, at most 110; 110 without a terminal."""
    return min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)


def _printable(cells: Sequence[str]) -> list[str]:
    """Return the cells on one line each, with control characters escaped."""
    return [
        cell if cell.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in cell) for cell in cells
    ]


def _line(cells: Sequence[str], last: str, sizes: Sequence[int]) -> str:
    padded = [cell.ljust(size) for cell, size in zip(cells, sizes, strict=False)]
    return "  ".join([*padded, last]).rstrip()
