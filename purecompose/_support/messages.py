"""Messages to users, safe to print, with the line and the layer of their own code; tables as plain text and as HTML.

Messages name the URLs of folders in remote storage, which are used through local copies.
"""

import contextlib
import functools
import html
import importlib
import inspect
import linecache
import random
import re
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch


_OURS = str(Path(__file__).parents[1])
_ALGORITHMS = str(Path(_OURS, "algorithms"))
_TORCH = str(Path(inspect.getfile(torch)).parent)


# Control characters, except tabs and ends of lines; marks of the direction of writing; halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: object) -> str:
    """Return a text with escapes of Python for what would control a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def say(*values: object, file: Any = None, **settings: Any) -> None:
    """Print, escaped for standard output and standard error; files get the values as they are."""
    is_shown = file in (None, sys.stdout, sys.stderr)
    print(*(map(escaped, values) if is_shown else values), file=file, **settings)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the innermost line outside of the library and torch, and with URLs for the paths of local copies."""
    level, frame = 1, sys._getframe(0)
    # torch's decorators, such as no_grad, stand between the library's functions.
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        level, frame = level + 1, frame.f_back
    warnings.warn(escaped(with_urls(text)), category, stacklevel=level)


def required(by: str, install: str, *modules: str) -> Any:
    """Return the first of some optional modules that can be imported; the error says what to install by pip."""
    cause = None
    for name in modules:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            cause = error
    raise ImportError(f"{by} needs {modules[0]}; install it with `pip install {install}`") from cause


def line_of(error: BaseException) -> str:
    """Return the innermost line of an algorithm, a loss or a network: outside of torch and the rest of the library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)]
    frame = own[-1] if own else frames[-1]
    text = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} ({text})"


def layer_of(error: BaseException) -> str:
    """Return the innermost module that was running, as ", in the layer 'name' (Type)", or nothing."""
    found = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    running = [layer for layer in found if isinstance(layer, torch.nn.Module)]
    if not running:
        return ""
    # The outermost module is the network, in which a layer has its name.
    name = next((name for name, child in running[0].named_modules() if child is running[-1]), "")
    kind = type(running[-1]).__name__
    return f", in the layer {name!r} ({kind})" if name else f", in the layer {kind}"


def calling_frames(frame: FrameType | None = None) -> tuple[FrameType | None, FrameType | None]:
    """Return the innermost running frame as in `line_of`, and the frame of the function of torch that it called."""
    frame, inner = frame or sys._getframe(1), None
    while frame is not None and not _is_own(frame.f_code.co_filename):
        is_public = frame.f_code.co_filename.startswith(_TORCH) and not _is_machinery(frame)
        frame, inner = frame.f_back, frame if is_public else inner
    return frame, inner


def _is_own(file: str) -> bool:
    return file.startswith(_ALGORITHMS) or not (
        file.startswith((_TORCH, _OURS)) or "contextlib" in file or file == random.__file__
    )


def _is_machinery(frame: FrameType) -> bool:
    """Return whether a frame of torch only passes a call on."""
    package, _, module = frame.f_globals.get("__name__", "").partition(".")
    return package == "torch" and module.startswith(("_", "fx", "overrides", "utils", "nn.modules.module"))


class Known(NamedTuple):
    """What is known of a local copy."""

    url: str
    """The URL of the folder that is copied."""
    fetch: Callable[[Path], None] | None = None
    """Function that reads what is missing at a path in the copy; `None` if all is there."""


_COPIES: dict[str, Known] = {}
"""The local copies in use, by their paths."""


def is_remote(path: Path | str) -> bool:
    """Return whether a path is a URL, such as `s3://bucket/run`; raise for a `Path` that was made of a URL."""
    if isinstance(path, Path) and path.parts and _SCHEME.fullmatch(path.parts[0]):
        raise ValueError(
            f"{path!r} is a local folder named {path.parts[0]!r}, since pathlib drops slashes: pass the URL as a str, "
            f"'{path.parts[0]}//...'"
        )
    return "://" in str(path)


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # not the single letter of a drive


def know(local: Path, url: str, fetch: Callable[[Path], None] | None = None) -> None:
    """Remember a local copy until `forget`; for the arguments see `Known`."""
    _COPIES[str(local)] = Known(url, fetch)


def forget(local: Path) -> None:
    """Forget a local copy: messages name it by its own path again."""
    _COPIES.pop(str(local), None)


def with_urls(text: object) -> str:
    """Return a text with URLs in place of the paths of local copies."""
    found = str(text)
    for local in sorted(_COPIES, key=len, reverse=True):  # a folder after those in it, whose URLs are longer
        found = found.replace(local, _COPIES[local].url)
    return found


def present(path: Path) -> Path:
    """Return a path, at which a local copy has what is in the storage."""
    for local, known in [*_COPIES.items()]:
        if known.fetch is not None and path.is_relative_to(local):
            known.fetch(path)
    return path


@contextlib.contextmanager
def naming_urls() -> Iterator[None]:
    """Return a scope whose errors name URLs in place of the paths of local copies."""
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        seen: list[BaseException] = []
        while _COPIES and found is not None and found not in seen:
            seen.append(found)
            found.args = tuple(with_urls(one) if isinstance(one, str) else one for one in found.args)
            if isinstance(found, OSError) and isinstance(found.filename, str | Path):
                found.filename = with_urls(found.filename)
            found = found.__cause__
        raise


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
    heads = (f'<th scope="row">{breakable(row[0], "_./")}</th>' for row in rows)
    body = "\n".join(f"<tr>{first}{''.join(map(_td, row[1:]))}</tr>" for first, row in zip(heads, rows, strict=True))
    return (
        f'<div class="wide many" tabindex="0"><table>\n<thead><tr>{names}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def note(text: str, tone: str = "faint") -> str:
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


def _td(cell: str | Toned) -> str:
    text, tone = cell if isinstance(cell, Toned) else (cell, "")
    classes = f"{'short' if len(text) <= _LONGEST_SHORT else 'long'} {tone}".rstrip()
    return f'<td class="{classes}">{breakable(text)}</td>'


def _escaped(text: str) -> str:
    return html.escape(printable(text))


@functools.cache
def _style() -> str:
    return Path(__file__).with_name("html.css").read_text(encoding="utf-8")
