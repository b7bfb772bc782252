"""Local copies of remote folders: those of processes that have ended are removed, and no others."""

import os
from pathlib import Path

import pytest

from purecompose.run.saving import remote
from purecompose.run.saving.folder import owner, short_place, token


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(remote.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make_copy(pid: int = os.getpid(), its_token: str = "00000000", place: str = short_place(), *marks: str) -> Path:
    """Make a copy of a process; by default of an earlier one with the number of this."""
    copy = remote._copy_named(remote.new_name())
    copy.mkdir()
    (copy / f".user-{pid}-{its_token}-{place}").touch()
    for mark in marks:
        (copy / mark).touch()
    return copy


def test_copies_of_processes_that_have_ended_are_removed(temporary: Path) -> None:
    make_copy()
    make_copy(2**22 + 1)
    make_copy(os.getpid(), "00000000", short_place(), ".writer", ".sent")
    remote.clear_copies()
    assert not [*temporary.iterdir()]


def test_other_copies_stay(temporary: Path) -> None:
    assert owner() == f"{os.getpid()}-{token()}-{short_place()}"
    make_copy(os.getpid(), token())
    make_copy(os.getpid(), "00000000", "elsewhere")
    make_copy(os.getpid(), "00000000", short_place(), ".writer")  # whose files could not be sent
    (temporary / "purecompose-mine").mkdir()
    remote._copy_named("link").symlink_to(temporary / "purecompose-mine")
    (make_copy() / ".user-").touch()
    before = sorted(temporary.iterdir())
    remote.clear_copies()
    assert sorted(temporary.iterdir()) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_copies_of_other_users_stay() -> None:
    os.chown(copy := make_copy(), 12345, 12345)
    remote.clear_copies()
    assert copy.exists()
