"""Functions that read files from untrusted sources, only regular ones of a bounded size, and put files on disk."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path


@contextlib.contextmanager
def opened(file: Path) -> Iterator[BufferedReader]:
    """Open a regular file, or a link to one, for reading.

    A pipe would wait for its writer and a device such as `/dev/zero` has no end, so both are refused.
    """
    # Without O_NONBLOCK, opening a pipe waits; with regular files it makes no difference.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(file, "rb", opener=lambda path, _: os.open(path, flags)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        yield stream


def read_whole(file: Path, most: int) -> bytes:
    """Return the content of a regular file.

    Args:
        file: The file, or a link to it.
        most: The largest size in bytes that is read; larger files are refused before anything is read.
    """
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        content = stream.read(most + 1) if size <= most else b""
    if max(size, len(content)) > most:
        raise OSError(errno.EFBIG, f"larger than the {most:,} bytes that are read", str(file))
    return content


def sync(path: Path) -> None:
    """Put a file, or a folder's list of names, on disk, so that it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_nested_deeper(value: object, most: int) -> bool:
    """Return whether lists and dicts of JSON are nested deeper than `most`, without recursion."""
    level, depth = [value], 0
    while level:
        if depth > most:
            return True
        level = [
            member
            for one in level
            if isinstance(one, (list, dict))
            for member in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return False
