"""Tables as plain text and as HTML, in the pages of runs and in notebooks."""

import functools
import html
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


_WIDEST = 110
_NUMBER = re.compile(r"[\d.,]+")
_LONGEST_SHORT = 24


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Return columns under a header; the last is wrapped so that lines fit in `width` (by default the terminal's).

    Lines break at spaces only. Columns of numbers between the first and the last are aligned on the right.
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
    wrapped = [textwrap.wrap(row[-1], max(width - left, 20), break_long_words=False) or [""] for row in rows]
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


class Toned(NamedTuple):
    """A cell of a table with a class of the style sheet: "good", "bad" or "faint"."""

    text: str
    tone: str


def columns(head: Sequence[str], rows: Sequence[Sequence[str | Toned]]) -> str:
    """Return a table. One that is wider than the page scrolls inside its box, by the keyboard too."""
    names = "".join(f'<th scope="col">{_escaped(name)}</th>' for name in head)
    body = "\n".join(f"<tr>{_th(row[0])}{''.join(map(_td, row[1:]))}</tr>" for row in rows)
    return (
        f'<div class="wide many" tabindex="0"><table>\n<thead><tr>{names}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def note(text: str, tone: str = "faint") -> str:
    """Return a paragraph."""
    return f'<p class="{tone}">{_escaped(text)}</p>'


def preformatted(text: str) -> str:
    """Return text with its own line breaks."""
    return f'<pre tabindex="0">\n{_escaped(text)}</pre>'


def fragment(*parts: str) -> str:
    """Return parts in the appearance of a page, for the output of a notebook's cell."""
    inner = "\n".join(parts)
    return f'<div class="purecompose notebook"><style>\n{_style()}</style>\n{inner}</div>'


def breakable(value: object, after: str = ",(") -> str:
    """Return text with optional line breaks before words that follow a character of `after`, such as a comma."""
    return "<wbr>".join(map(_escaped, re.split(rf"(?<=[{re.escape(after)}])(?=[^\W\d])", str(value))))


def printable(text: str) -> str:
    """Return text without control characters, which HTML does not allow even if escaped."""
    return "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" if c != "\r" else "" for c in text)


def _th(cell: str | Toned) -> str:
    return f'<th scope="row">{breakable(_toned(cell).text, "_./")}</th>'


def _td(cell: str | Toned) -> str:
    text, tone = _toned(cell)
    classes = f"{'short' if len(text) <= _LONGEST_SHORT else 'long'} {tone}".rstrip()
    return f'<td class="{classes}">{breakable(text)}</td>'


def _toned(cell: str | Toned) -> Toned:
    return cell if isinstance(cell, Toned) else Toned(cell, "")


def _escaped(text: str) -> str:
    return html.escape(printable(text))


@functools.cache
def _style() -> str:
    return Path(__file__).with_name("html.css").read_text(encoding="utf-8")
