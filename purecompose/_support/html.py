"""Tables and texts as HTML: in the pages of runs, and in notebooks."""

import functools
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


_LONGEST_SHORT = 24


class Toned(NamedTuple):
    """A cell of a table with a class of the style sheet: "good", "bad" or "faint"."""

    text: str
    tone: str


def columns(head: Sequence[str], rows: Sequence[Sequence[str | Toned]]) -> str:
    """Return a table. One that is wider than the page scrolls inside its box, by the keyboard too."""
    names = "".join(f'<th scope="col">{_escaped(name)}</th>' for name in head)
    body = "\n".join(f"<tr>{_head(row[0])}{''.join(map(_cell, row[1:]))}</tr>" for row in rows)
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


def _head(cell: str | Toned) -> str:
    return f'<th scope="row">{breakable(_toned(cell).text, "_./")}</th>'


def _cell(cell: str | Toned) -> str:
    text, tone = _toned(cell)
    classes = f"{'short' if len(text) <= _LONGEST_SHORT else 'long'} {tone}".rstrip()
    return f'<td class="{classes}">{_escaped(text)}</td>'


def _toned(cell: str | Toned) -> Toned:
    return cell if isinstance(cell, Toned) else Toned(cell, "")


def _escaped(text: str) -> str:
    return html.escape(printable(text))


@functools.cache
def _style() -> str:
    return Path(__file__).with_name("html.css").read_text(encoding="utf-8")
