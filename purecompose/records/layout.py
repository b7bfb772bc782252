"""The files in a run's folder, in TOML, JSON and text; each is written completely or not at all."""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from purecompose._support.checks import shown
from purecompose._support.files import from_json, is_nested_deeper, misfit, read_whole, to_json
from purecompose.run.saving.folder import CHECKPOINTS as CHECKPOINTS, written


CONFIG, VERSIONS, PLAN, COMMAND = "config.toml", "versions.json", "plan.txt", "command.txt"
RECORDS, HISTORY = "records.jsonl", "history.json"
RESULT, CURVES, REPORT = "result.json", "curves.png", "report.html"
LOCK = ".lock"

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_MOST_BYTES, _MOST_NESTED = 2**26, 64
"""Maximal size of the settings, plan, history, ... that are read, and maximal depth of nesting."""


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8, in one move."""
    with written(path) as new:
        new.write_bytes(text.encode("utf-8", "replace"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON, in one move.

    Numbers that are not finite become the strings "nan", "inf" and "-inf"; tensors become lists.
    """
    write_text(path, json.dumps(to_json(content), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(file: Path, form: Any = object) -> dict[str, Any]:
    """Return a JSON object of a form (see `misfit`), with "nan", "inf" and "-inf" as numbers."""
    try:
        content = json.loads(read_whole(file, _MOST_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if is_nested_deeper(content, _MOST_NESTED):
        raise ValueError(f"{file} is damaged: it is nested more than {_MOST_NESTED} levels deep")
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: expected a JSON object, got {type(content).__name__}")
    content = from_json(content)
    if (place := misfit(content, form, "")) is not None:
        raise ValueError(f"{file} is damaged: unexpected content at {place or 'the top'}")
    return content


def read_toml(file: Path) -> dict[str, Any]:
    """Return the settings in a TOML file."""
    try:
        return tomllib.loads(read_whole(file, _MOST_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid TOML: {error}; restore it from a copy") from error


def read_text(file: Path) -> str:
    """Return the text in a file; empty if it is missing."""
    return read_whole(file, _MOST_BYTES).decode("utf-8", "replace") if file.exists() else ""


def checked_settings(config: Any, where: str, *, is_nested: bool = False) -> dict[str, Any]:
    """Return a copy of settings, flat or one level nested, with paths as text, tuples as lists, and `None` left out."""
    if not isinstance(config, Mapping):
        raise TypeError(
            f"{where}: expected settings by name, a mapping, got {shown(config)}; for a namespace pass vars(namespace)"
        )
    settings: dict[str, Any] = {}
    for name, value in config.items():
        if not isinstance(name, str):
            raise TypeError(f"{where}: expected names of settings as strings, got {shown(name)}")
        place = f"{where}.{name}" if is_nested else f"{where}: {name}"
        if isinstance(value, Mapping) and not is_nested:
            settings[name] = checked_settings(value, place, is_nested=True)
        elif value is not None:
            settings[name] = _plain(value, place)
    return settings


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return checked settings as TOML: the flat ones first, then a table for each nested one.

    Example:
        >>> print(to_toml({"lr": 0.1, "model": {"name": "cnn", "widths": [8, 16]}}), end="")
        lr = 0.1
        <BLANKLINE>
        [model]
        name = "cnn"
        widths = [8, 16]
    """
    lines = [_line(name, value) for name, value in settings.items() if not isinstance(value, Mapping)]
    for name, value in settings.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(name)}]", *(_line(inner, one) for inner, one in value.items())]
    return "\n".join([*lines, ""]).lstrip("\n")


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings as flat ones, with dots in the names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            found[name] = value
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ, the old one and the new one of each name."""
    names = [*before, *(name for name in now if name not in before)]
    return {name: [before.get(name), now.get(name)] for name in names if repr(before.get(name)) != repr(now.get(name))}


def _plain(value: Any, where: str) -> Any:
    """Return the value as a type that TOML can represent."""
    if isinstance(value, bool):
        return value
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, list | tuple):
        return [_plain(one, f"{where}[{i}]") for i, one in enumerate(value)]
    # Values of a subclass, such as members of an enum, become plain.
    if isinstance(value, str):
        return str.__str__(value)
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(
        f"{where}: expected a string, a number, a bool or a list of them, got {shown(value)}; pass a string, such as "
        "str(value)"
    )


def _line(name: str, value: Any) -> str:
    return f"{_key(name)} = {_value(value)}"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    # A float in the shortest form that reads back to the same bits, also nan and inf; else as in JSON.
    return repr(value) if isinstance(value, float) else _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    # TOML has the escapes of JSON, but requires one for DEL as well. Unpaired surrogates do not exist in UTF-8.
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")
