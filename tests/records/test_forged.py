"""Forged and torn files of a run's folder: each is read, or refused by an error that names the file."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from purecompose.records import RunFolder, read_run, write_report
from tests.records.run_helpers import train


FORGED = [None, True, -1, 1.5, "", "x", [], [None], {}, {"a": []}, 2**70]


def places_in(value: object, place: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    yield place
    for key, member in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places_in(member, (*place, key))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", ["history.json", "result.json", "versions.json"])
def test_a_forged_file_is_refused_or_harmless(tmp_path: Path, name: str) -> None:
    run = RunFolder(tmp_path / "run", {"lr": 0.5})
    train(run, until=6)
    del run
    with RunFolder(tmp_path / "run", {"lr": 0.6}, resume=True) as run:
        train(run)
    content, refused = json.loads((run.path / name).read_text()), 0
    for place in places_in(content):
        for value in FORGED:
            forged: Any = {"whole": copy.deepcopy(content)}
            inner: Any = forged
            for key in ("whole", *place)[:-1]:
                inner = inner[key]
            inner[("whole", *place)[-1]] = value
            (run.path / name).write_text(json.dumps(forged["whole"]))
            try:
                write_report(read_run(run.path), tmp_path / "report.html", curves=False)
            except ValueError as error:
                assert str(run.path / name) in str(error), error
                refused += 1
    assert refused > 5


@pytest.mark.parametrize("content", [b"lr = ", b"\xff\xfe", b"lr = 0.5\n[model", b"a = " + b"[" * 5000])
def test_torn_settings_are_named(tmp_path: Path, content: bytes) -> None:
    run = RunFolder(tmp_path / "run", {"lr": 0.5})
    run.stop("done")
    (run.path / "config.toml").write_bytes(content)
    for read in (lambda: read_run(run.path), lambda: RunFolder(run.path, {"lr": 0.5}, resume=True)):
        with pytest.raises(ValueError, match=r"config\.toml is not valid TOML: .*; restore it from a copy"):
            read()
