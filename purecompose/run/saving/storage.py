"""Access to remote storage by fsspec: what fails is tried again."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from purecompose.errors import DamagedError


T = TypeVar("T")

_WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds between the attempts to read, to send or to remove a file."""


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises:
        ImportError: The package fsspec, or the one that it needs for this scheme, is not installed.
        ValueError: The scheme is unknown.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{url}: remote storage needs fsspec: pip install 'purecompose[remote]'") from error
    try:
        fs, root = url_to_fs(url)
    except ImportError as error:
        raise ImportError(f"{url}: {error}") from error  # names the package, such as s3fs
    return fs, root.rstrip("/")


def files_in(fs: Any, root: str) -> list[str]:
    """Return the names of all files below a path.

    Raises:
        DamagedError: A name would lead out of the local copy.
        OSError: They cannot be listed in five attempts.
    """

    def found() -> list[str]:
        fs.invalidate_cache()
        return [name.removeprefix(root).lstrip("/") for name in fs.find(root)]

    names = [name for name in tried(found) if name]
    for name in names:
        if ".." in Path(name).parts or os.sep != "/" and os.sep in name:
            raise DamagedError(f"{root} holds a file {name!r}, which would be written outside of a local copy")
    return names


def download(fs: Any, source: str, target: Path) -> None:
    """Read a file; raise `OSError` if it cannot be read in five attempts."""
    target.parent.mkdir(parents=True, exist_ok=True)
    tried(lambda: fs.get_file(source, str(target)))


def tried(do: Callable[[], T], on_failure: Callable[[], object] = lambda: None) -> T:
    """Return what a function returns, after several attempts if necessary; raise `OSError` if all fail.

    Args:
        do: The function.
        on_failure: Function that is called after each attempt that fails and is followed by another.
    """
    for seconds in _WAITS:
        try:
            return do()
        except (FileNotFoundError, PermissionError):
            raise
        except Exception:  # each storage has its own
            on_failure()
            time.sleep(seconds)
    try:
        return do()
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
