"""The formats of record files: JSON Lines and CSV, one line per record."""

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from purecompose._support.checks import shown


_NOT_FINITE = "not_finite"


class Format(Protocol):
    """A file format for records. Both methods are stateless; all information is in the file."""

    @staticmethod
    def scan(file: BinaryIO, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the records of a file, each after the offset of its line's end, up to a line without an end.

        The first item is an empty record with the offset at which the records begin.
        """
        ...

    @staticmethod
    def add(path: Path, records: list[dict[str, Any]]) -> None:
        """Add records: all of them, or none if it raises an OSError."""
        ...


class JsonLines:
    """One JSON object per line.

    JSON has only finite numbers. Others are written as null, and named under `not_finite`:
    `{"batch": 7, "loss": null, "not_finite": {"loss": "nan"}}`, with a list for the members of a population.
    """

    @staticmethod
    def scan(file: BinaryIO, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """See `Format`."""
        yield 0, {}
        with _naming_line(name) as at:
            for end, line in _whole_lines(file, at):
                yield end, _checked(_from_json(json.loads(line)))

    @staticmethod
    def add(path: Path, records: list[dict[str, Any]]) -> None:
        """See `Format`."""
        lines = (json.dumps(_to_json(record), allow_nan=False) for record in records)
        _append(path, "".join(f"{line}\n" for line in lines))


class Csv:
    """A table with the names in its first line, and an empty cell if a record has no value.

    Numbers that are not finite are `nan`, `inf` and `-inf`. The numbers of a population's members share a cell, as a
    JSON list. New columns are added on the right, which replaces the whole file.
    """

    @staticmethod
    def scan(file: BinaryIO, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """See `Format`."""
        with _naming_line(name) as at:
            lines = _whole_lines(file, at)
            end, header = next(lines, (0, b"batch"))
            columns = _cells(header)
            if "batch" not in columns:
                raise ValueError("no column is called batch")
            yield end, {}
            for end, line in lines:
                cells = zip(columns, _cells(line), strict=True)
                yield end, _checked({column: _from_cell(cell) for column, cell in cells if cell})

    @staticmethod
    def add(path: Path, records: list[dict[str, Any]]) -> None:
        """See `Format`."""
        columns = []
        if path.exists():
            with path.open("rb") as file:
                columns = _cells(file.readline())
        known = set(columns)
        new = list(dict.fromkeys(name for record in records for name in record if name not in known))
        rows = _table([[_to_cell(record.get(column)) for column in (*columns, *new)] for record in records])
        if not columns:
            _append(path, _table([new]) + rows)
        elif not new:
            _append(path, rows)
        else:
            _widen(path, _table([[*columns, *new]]), len(new), rows)


FORMATS: dict[str, type[Format]] = {".jsonl": JsonLines, ".csv": Csv}
"""The formats by the suffix of a file's name."""


def _whole_lines(file: BinaryIO, at: list[Any]) -> Iterator[tuple[int, bytes]]:
    """Yield the offset of the end and the bytes of each complete line, and note its number and bytes in a list."""
    offset = 0
    for at[0], line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return  # a process was killed while it wrote this line
        at[1], offset = line, offset + len(line)
        yield offset, line


@contextlib.contextmanager
def _naming_line(name: str) -> Iterator[list[Any]]:
    """Return a scope that names the line of a file at which an error occurs, which is noted in a list."""
    at: list[Any] = [1, b""]
    try:
        yield at
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, csv.Error) as error:
        number, line = at
        text = line[:60].decode("utf-8", "replace").rstrip()
        raise ValueError(
            f"{name}, line {number}: expected a record of a run, got {text!r} ({error}); "
            "is this a file that Records wrote?"
        ) from error


def _append(path: Path, text: str) -> None:
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, io.SEEK_END)
        try:
            _write(file, text.encode())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _write(file: Any, data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # an unbuffered write may write only a part, such as on a disk that becomes full
        rest = rest[file.write(rest) :]


def _widen(path: Path, header: str, num_new: int, rows: str) -> None:
    """Replace a file by one with the new columns and rows."""
    path = path.resolve()  # the target of a link is replaced, not the link
    new_path = path.with_name(path.name + ".new")
    try:
        with path.open("rb") as old, new_path.open("wb") as new:
            old.readline()
            new.write(header.encode())
            for line in old:
                new.write(line.rstrip(b"\r\n") + b"," * num_new + b"\n")
            new.write(rows.encode())
            new.flush()
            os.fsync(new.fileno())
        os.replace(new_path, path)
    except OSError:
        with contextlib.suppress(OSError):
            new_path.unlink()
        raise


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record, or raise if it is not one that `Records` writes."""
    for name in ("batch", "epoch"):
        if type(record.get(name)) is not int or record[name] < 0:
            raise ValueError(f"{name}: expected a whole number, got {shown(record.get(name))}")
    for name, value in record.items():
        if not _is_number(value) and not (isinstance(value, list) and all(map(_is_number, value)) and value):
            raise ValueError(f"{name}: expected a number, or a list of numbers for a population, got {shown(value)}")
    return record


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _to_json(record: dict[str, Any]) -> dict[str, Any]:
    named = {name: word for name, value in record.items() if (word := _word(value))}
    if (own := record.get(_NOT_FINITE)) is not None:  # a metric of this name is beside the words
        named[_NOT_FINITE] = [_word(one) or one for one in own] if isinstance(own, list) else _word(own) or own
    if not named:
        return record
    return {**{name: _nulled(value) for name, value in record.items()}, _NOT_FINITE: named}


def _from_json(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {shown(record)}")
    named = record.pop(_NOT_FINITE, {})
    for name, words in named.items():
        record[name] = _filled(words if name == _NOT_FINITE else record[name], words)
    return record


def _word(value: Any) -> Any:
    """Return the name of a number that is not finite, such as "nan", else None; for a list, a list or None."""
    if isinstance(value, list):
        words = [_word(one) for one in value]
        return words if any(words) else None
    return str(value) if isinstance(value, float) and not math.isfinite(value) else None


def _nulled(value: Any) -> Any:
    if isinstance(value, list):
        return [_nulled(one) for one in value]
    return None if _word(value) else value


def _filled(value: Any, word: Any) -> Any:
    if isinstance(word, list):
        return [_filled(one, its_word) for one, its_word in zip(value, word, strict=True)]
    return float(word) if isinstance(word, str) else value


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode()]), [])


def _table(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _to_cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value


def _from_cell(cell: str) -> Any:
    if cell.startswith("["):
        return json.loads(cell)
    if cell in ("True", "False"):
        return cell == "True"
    try:
        return int(cell)
    except ValueError:
        pass
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"expected a number, got {shown(cell)}") from None
