"""Functions that read files from untrusted sources, of a bounded size and a given form, and put files on disk."""

import contextlib
import errno
import math
import os
import stat
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any


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
    """Return the content of a regular file; larger ones than `most` bytes are refused before anything is read."""
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


def to_json(value: Any) -> Any:
    """Return a value for JSON: numbers that are not finite become "nan", "inf" and "-inf", tensors become lists."""
    if isinstance(value, Mapping):
        return {name: to_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if hasattr(value, "tolist"):  # a tensor, or a NumPy number
        return to_json(value.tolist())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(value: Any) -> Any:
    """Return a value that `to_json` made, with "nan", "inf" and "-inf" as numbers again."""
    if isinstance(value, dict):
        return {name: from_json(one) for name, one in value.items()}
    if isinstance(value, list):
        return [from_json(one) for one in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def is_nested_deeper(value: object, most: int) -> bool:
    """Return whether lists and dicts of JSON are nested deeper than `most`, without recursion."""
    level = [value]
    for _ in range(most + 1):
        members = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (list, dict))]
        level = [member for part in members for member in part]
    return bool(level)


def is_count(value: object) -> bool:
    """Return whether a value is a whole number from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 2**63


def is_numbers(value: object) -> bool:
    """Return whether a value is a number, or a list of them, also nested."""
    return all(map(is_numbers, value)) if isinstance(value, list) else isinstance(value, (bool, int, float))


PLAIN = (bool, int, float, str, None)
"""A value without members."""


def misfit(value: Any, form: Any, place: str) -> str | None:
    """Return the place, named from `place` on, of the first value of JSON or TOML that lacks its form, if any.

    A form is a type, for values of exactly this type, or of `float` also whole numbers; `None`; a tuple of
    alternatives; a function that returns a bool; a list with the form of the members; or a dict with the forms of named
    members, of which those with a "?" may be missing, and of all others under "*".
    """
    if isinstance(form, tuple):
        return None if any(misfit(value, one, place) is None for one in form) else place
    if isinstance(form, list):
        members = [(one, form[0], f"{place}[{i}]") for i, one in enumerate(value)] if isinstance(value, list) else None
    elif isinstance(form, dict):
        named, rest = {name.removesuffix("?"): one for name, one in form.items()}, form.get("*", object)
        members = None
        if isinstance(value, dict) and value.keys() >= form.keys() - {"*", *(f"{name}?" for name in named)}:
            members = [(one, named.get(name, rest), f"{place}[{name!r}]") for name, one in value.items()]
    elif isinstance(form, type):
        return None if form is object or type(value) in {float: (int, float)}.get(form, (form,)) else place
    else:
        return None if (value is None if form is None else form(value)) else place
    if members is None:
        return place
    return next((found for member in members if (found := misfit(*member)) is not None), None)
