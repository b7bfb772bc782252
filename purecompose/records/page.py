"""A page in HTML: pieces that escape what they are given, and the style sheet."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


__all__ = [
    "Markup",
    "Pictures",
    "breakable",
    "duration",
    "escaped",
    "figure",
    "number",
    "page",
    "preformatted",
    "section",
    "table",
    "tiles",
]


class Markup(str):
    """Text that is HTML already; any other string is escaped where it goes into a page."""

    __slots__ = ()


_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f8fa; --text: #1f2328; --faint: #59636e;
  --line: #d8dee4; --shade: #1f232833; --good: #1a7f37; --bad: #b3261e; }
@media screen and (prefers-color-scheme: dark) {
  :root { --back: #0d1117; --card: #161b22; --text: #e6edf3; --faint: #9198a1; --line: #30363d;
    --shade: #00000099; --good: #3fb950; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .7rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
p { margin: .3rem 0; }
.faint { color: var(--faint); }
.good { color: var(--good); }
.bad { color: var(--bad); }
.state { display: inline-block; border: 1px solid currentColor; border-radius: 1rem; padding: 0 .65rem;
  font-size: .8rem; font-weight: 600; margin-left: .5rem; vertical-align: .25rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .75rem; margin: 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.tiles dt { color: var(--faint); font-size: .8rem; overflow-wrap: anywhere; }
.tiles dd { margin: 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.tiles .note { color: var(--faint); font-size: .8rem; font-weight: 400; text-wrap: balance; }
.wide { overflow-x: auto; }
.many { --under: var(--back); }
pre { --under: var(--card); }
/* A shadow at a side towards which there is more to scroll: what is under the words covers it at the end. */
.many, pre { background:
  linear-gradient(to right, var(--under) 40%, transparent) 0 0 / 2rem 100% no-repeat local,
  linear-gradient(to left, var(--under) 40%, transparent) 100% 0 / 2rem 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) 0 0 / .6rem 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) 100% 0 / .6rem 100% no-repeat scroll,
  var(--under); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--faint); }
tbody th { width: 13rem; }
.many th, .many td { overflow-wrap: break-word; }
.many thead th, .many tbody th, .many .short { white-space: nowrap; }
.many td { min-width: 3rem; }
.many td.long { min-width: 16rem; }
.many tr > :last-child { padding-right: 0; }
@media screen and (max-width: 40rem) {
  body { font-size: 14px; }
  tbody th { width: 8rem; }
  .many tbody th { width: auto; } }
pre { border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem; margin: 0;
  overflow-x: auto; font: 12.5px/1.45 ui-monospace, monospace; }
pre.wrapped { white-space: pre-wrap; overflow-wrap: anywhere; }
pre .whole { white-space: nowrap; }
.tiles + .wide, .wide + .wide, .wide + pre { margin-top: 1rem; }
figure { margin: 0; }
figure img { display: block; width: 100%; height: auto; border: 1px solid var(--line); border-radius: .5rem; }
figcaption { color: var(--faint); font-size: .85rem; margin-top: .4rem; }
@media print {
  body { font-size: 11px; }
  main { max-width: none; padding: 0; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 9px; }
  .many, pre { background: none; }
  .many th, .many td, .many .short { white-space: normal; min-width: 0; overflow-wrap: anywhere; }
  h2 { break-after: avoid; }
  figure, tr, .tiles div { break-inside: avoid; } }
"""


def page(title: str, parts: Iterable[Markup]) -> str:
    """A whole page. Nothing in it is fetched from elsewhere, and nothing runs."""
    inside = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f'<link rel="icon" href="data:,">\n<title>{escaped(title)}</title>\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{inside}\n</main>\n</body>\n</html>\n"
    )


def escaped(value: Any) -> str:
    """A value as text of the page, whatever is in it; `Markup` as it is."""
    if isinstance(value, Markup):
        return value
    # Control characters other than these three have no place in HTML, not even escaped.
    text = "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" if c != "\r" else "" for c in str(value))
    return html.escape(text)


def breakable(value: Any, after: str = ",(") -> Markup:
    """A value as text in which lines may end after signs that stand between words, as in `checkpoint_every`."""
    pieces = [value] if isinstance(value, Markup) else re.split(rf"(?<=[{re.escape(after)}])(?=[^\W\d])", str(value))
    return Markup("<wbr>".join(map(escaped, pieces)))


def section(title: str, *parts: Markup) -> Markup:
    """A part of the page under a heading."""
    return Markup(f"<section>\n<h2>{escaped(title)}</h2>\n" + "\n".join(parts) + "\n</section>")


def table(rows: Sequence[Sequence[Any]], head: Sequence[str] = ()) -> Markup:
    """A table; the first cell of a row names it. With a head, what is wider than the page scrolls within its box."""
    top = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    lines = [f"<thead><tr>{top}</tr></thead>"] if head else []
    body = []
    for name, *cells in rows:
        inside = "".join(_cell(cell, bool(head)) for cell in cells)
        body.append(f'<tr><th scope="row">{breakable(name, "_./")}</th>{inside}</tr>')
    # They scroll by the keyboard as well.
    frame = '<div class="wide many" tabindex="0">' if head else '<div class="wide">'
    return Markup(f"{frame}<table>" + "\n".join([*lines, "<tbody>", *body, "</tbody>"]) + "</table></div>")


def _cell(cell: Any, is_column: bool) -> str:
    if not is_column:
        return f"<td>{breakable(cell)}</td>"
    kind = "short" if len(str(cell)) <= _SHORT else "long"
    return f'<td class="{kind}">{escaped(cell)}</td>'


_SHORT = 24
"""Up to so many characters a cell stays on one line."""


def tiles(facts: Iterable[tuple[str, str, str]]) -> Markup:
    """A few numbers, large: name, value, and what there is to add to it."""
    inside = "".join(
        f"<div><dt>{breakable(name, '_./')}</dt><dd>{escaped(value)}</dd>"
        + (f'<dd class="note">{escaped(note)}</dd></div>' if note else "</div>")
        for name, value, note in facts
    )
    return Markup(f'<dl class="tiles">{inside}</dl>')


def preformatted(text: str, *, is_wrapped: bool = False) -> Markup:
    """Text in which columns stay columns; or a command, whose lines are wrapped, though not at an option's dashes."""
    inside = escaped(text)
    if is_wrapped:
        inside = re.sub(r"(?<!\S)--?[\w-]{1,30}(?!\S)", r'<span class="whole">\g<0></span>', inside)
    return Markup(f'<pre tabindex="0"{" class=wrapped" if is_wrapped else ""}>\n{inside}</pre>')


class Pictures(NamedTuple):
    """One picture as URLs of data: for wide and narrow screens, light and dark ones."""

    light: str
    dark: str
    narrow_light: str
    narrow_dark: str


def figure(pictures: Pictures, words: str, caption: str) -> Markup:
    """A picture that suits the screen; on paper the wide light one."""
    narrow, dark = "screen and (max-width: 40rem)", "(prefers-color-scheme: dark)"
    return Markup(
        "<figure><picture>"
        f'<source media="{narrow} and {dark}" srcset="{escaped(pictures.narrow_dark)}">'
        f'<source media="{narrow}" srcset="{escaped(pictures.narrow_light)}">'
        f'<source media="screen and {dark}" srcset="{escaped(pictures.dark)}">'
        f'<img src="{escaped(pictures.light)}" alt="{escaped(words)}">'
        "</picture>" + (f"<figcaption>{escaped(caption)}</figcaption></figure>" if caption else "</figure>")
    )


def number(value: Any, name: str = "") -> str:
    """A number as people read it; of a population's the middle and the range.

    Example:
        >>> number(0.98765, "eval/accuracy"), number(12345), number(1.5e-05), number([0.5, 0.25, 1.0])
        ('98.77%', '12,345', '1.5e-05', '0.5 (0.25 to 1)')
    """
    if isinstance(value, list) and value and all(isinstance(one, (int, float)) for one in value):
        members = sorted(one for one in value if math.isfinite(one))
        if not members:
            return "not finite"
        half = len(members) // 2
        middle = (members[half] + members[-half - 1]) / 2
        return f"{number(middle, name)} ({number(members[0], name)} to {number(members[-1], name)})"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if "accuracy" in name and 0 <= value <= 1:
        return f"{value:.2%}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """A time in words.

    Example:
        >>> duration(0.25), duration(75), duration(7500)
        ('0.25 s', '1 min 15 s', '2 h 05 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"
