"""Local copies of remote folders: those of processes that have ended are removed, and no others."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from purecompose.run.saving import copies
from purecompose.run.saving.process import place, token


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(copies.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make_copy(**user: Any) -> Path:
    """Make a copy of a process; by default of an earlier one with the number of this."""
    copy = copies.copy_named(copies.new_name())
    copy.mkdir()
    words = {"process": os.getpid(), "token": "00000000", "place": place(), **user}
    (copy / f".user-{words['process']}-{words['token']}").write_text(json.dumps(words))
    return copy


def test_copies_of_processes_that_have_ended_are_removed(temporary: Path) -> None:
    make_copy()
    make_copy(process=2**22 + 1)
    copies.note_sent(copy := make_copy(), True)
    (copy / copies.WRITER).touch()
    copies.clear_copies()
    assert not [*temporary.iterdir()]


def test_other_copies_stay(temporary: Path) -> None:
    make_copy(token=token())
    make_copy(place="another machine")
    shared, unsent = make_copy(), make_copy()
    copies.note_user(shared)
    (unsent / copies.WRITER).touch()
    copies.note_sent(unsent, False)
    (temporary / "purecompose-mine").mkdir()
    copies.copy_named("link").symlink_to(temporary / "purecompose-mine")
    damaged = make_copy()
    (damaged / ".user-1-00000000").write_text("")
    before = sorted(temporary.iterdir())
    copies.clear_copies()
    assert sorted(temporary.iterdir()) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_copies_of_other_users_stay() -> None:
    os.chown(copy := make_copy(), 12345, 12345)
    copies.clear_copies()
    assert copy.exists()
