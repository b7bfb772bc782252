"""URLs of folders in remote storage, which are used through local copies; messages name the URLs."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Known(NamedTuple):
    """What is known of a local copy."""

    url: str
    """The URL of the folder that is copied."""
    fetch: Callable[[Path], None] | None = None
    """Function that reads what is missing at a path in the copy; `None` if all is there."""


_COPIES: dict[str, Known] = {}
"""The local copies in use, by their paths."""


def is_remote(path: Path | str) -> bool:
    """Return whether a path is a URL, such as `s3://bucket/run`.

    Raises:
        ValueError: It is a `Path` that was made of a URL, and so names a local folder.
    """
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
    """Return a text with URLs in place of the paths of local copies.

    Example:
        >>> know(Path("/tmp/copy/run"), "s3://bucket/run")
        >>> with_urls("/tmp/copy/run/index.json is damaged")
        's3://bucket/run/index.json is damaged'
        >>> forget(Path("/tmp/copy/run"))
    """
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
