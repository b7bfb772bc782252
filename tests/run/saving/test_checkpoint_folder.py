"""Clearing the folder of checkpoints: files removed, files restored, and files that must not be deleted."""

import errno
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import purecompose as pc
from purecompose.records.layout import write_json
from purecompose.run.saving import folder as disk, folder as process
from purecompose.run.saving.folder import is_alive, token
from tests.helpers import make_state


NAME = "ep0001-ba00000008"


def make(path: pathlib.Path) -> pathlib.Path:
    """Create a folder with the files of a checkpoint."""
    path.mkdir()
    (path / "index.json").write_text(path.name)
    (path / "state.safetensors").touch()
    return path


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("whose", ["-11111111", ""], ids=["with a token", "as older versions wrote it"])
def test_files_of_an_earlier_process_with_the_same_pid_are_cleared(tmp_path: pathlib.Path, whose: str) -> None:
    make(tmp_path / f".{NAME}.{os.getpid()}{whose}-00000000.old")
    make(tmp_path / f".{NAME}.{os.getpid()}{whose}-22222222.writing")
    disk.clear(tmp_path)
    assert names(tmp_path) == [NAME]
    assert (tmp_path / NAME / "index.json").read_text().endswith(".old")


def test_files_that_this_process_is_writing_are_not_touched(tmp_path: pathlib.Path) -> None:
    with disk.replaced(tmp_path / NAME) as new, disk.written(tmp_path / "notes.json") as file:
        file.touch()
        disk.clear(tmp_path)
        assert sorted([new.name, file.name]) == names(tmp_path)
        assert all(f".{os.getpid()}-{token()}-" in name for name in names(tmp_path))
    assert names(tmp_path) == [NAME, "notes.json"]


def test_files_of_another_machine_are_cleared_when_they_have_not_changed_for_long(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(process, "place", lambda: "another machine")
        name = f".{NAME}.{process.owner().replace(token(), '11111111')}-00000000"
    make(tmp_path / f"{name}.old")
    make(tmp_path / f"{name}.writing")
    disk.clear(tmp_path)
    assert names(tmp_path) == [f"{name}.old", f"{name}.writing"]
    monkeypatch.setattr(disk, "_MOMENT", -1.0)
    disk.clear(tmp_path)
    assert names(tmp_path) == [f"{name}.writing", NAME]
    monkeypatch.setattr(disk, "_LONG", -1.0)
    disk.clear(tmp_path)
    assert names(tmp_path) == [NAME]


def test_half_written_files_and_links_are_removed_too(tmp_path: pathlib.Path) -> None:
    store = make(tmp_path / "store")
    (tmp_path / f".weights.{os.getpid()}-11111111-00000000.writing").write_text("half")
    (tmp_path / f".{NAME}.{os.getpid()}-11111111-00000000.writing").symlink_to(store)
    (tmp_path / ".notes.writing").touch()  # a user's file
    disk.clear(tmp_path)
    assert names(tmp_path) == [".notes.writing", "store"]
    assert names(store) == ["index.json", "state.safetensors"]


def test_a_checkpoint_that_contains_a_foreign_file_is_not_removed(tmp_path: pathlib.Path) -> None:
    pinned, plain = make(tmp_path / NAME), make(tmp_path / "ep0002-ba00000016")
    (pinned / "notes.txt").write_text("the one of the paper")
    disk.remove(pinned)
    disk.remove(plain)
    assert names(tmp_path) == [NAME]
    assert names(pinned) == ["index.json", "notes.txt", "state.safetensors"]


def test_removing_a_link_to_a_checkpoint_keeps_its_target(tmp_path: pathlib.Path) -> None:
    store = make(tmp_path / "store")
    (tmp_path / NAME).symlink_to(store)
    disk.remove(tmp_path / NAME)
    assert names(tmp_path) == ["store"] and names(store) == ["index.json", "state.safetensors"]


def test_threads_that_save_to_one_path_leave_one_whole_checkpoint(tmp_path):
    states = [make_state() for _ in range(4)]
    states = [
        state.replace(params={name: value + i for name, value in state.params.items()})
        for i, state in enumerate(states)
    ]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(pc.save, states[i % 4], tmp_path / "one") for i in range(40)]
    assert {future.result() for future in futures} == {tmp_path / "one"}
    found = pc.load(tmp_path / "one", make_state())
    assert any(pc.tree.equal(found.params, state.params) for state in states)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_checkpoint_that_another_writer_moves_away_can_be_replaced(tmp_path, monkeypatch):
    """The other writer comes between two looks at the target, wherever they are."""
    target, looks = pc.save(make_state(), tmp_path / "one"), []

    def moving(look):
        def moved(path, *args, **kwargs):
            found = look(path, *args, **kwargs)
            if os.fspath(path) == str(target) and not looks:
                looks.append(look)
                target.rename(tmp_path / "moved")
            return found

        return moved

    for name in ("lstat", "stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, moving(getattr(os, name)))
    assert pc.save(make_state(), target) == target
    assert looks and sorted(path.name for path in tmp_path.iterdir()) == ["moved", "one"]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: pc.save(make_state(), tmp_path / "one"), lambda: write_json(tmp_path / "one", {})):
        with pytest.raises(OSError, match="No space left on device: '.*/one") as caught:
            write()
        assert caught.value.errno == errno.ENOSPC


CODE = "from purecompose.run.saving.folder import token; print(token(), flush=True); input()"
NEEDS_PROC = pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="only Linux tells")


@pytest.fixture(scope="module")
def other() -> Iterator[tuple[int, str]]:
    """Start another process of the library, and yield its pid and its token."""
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        yield it.pid, it.stdout.readline().strip()
        it.kill()


def test_this_process_is_alive_and_an_earlier_one_with_its_pid_is_not() -> None:
    assert is_alive(os.getpid(), token())
    assert not is_alive(os.getpid(), "00000000")
    assert not is_alive(os.getpid(), None)


@NEEDS_PROC
def test_another_process_is_known_by_its_token(other: tuple[int, str]) -> None:
    pid, its_token = other
    assert its_token != token()
    assert is_alive(pid, its_token) and is_alive(pid, None)
    assert not is_alive(pid, "00000000")  # the pid was reused


def test_without_information_from_the_system_a_process_counts_as_alive(
    other: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_from_system", lambda pid: (None, None))
    assert is_alive(other[0], "00000000")
    process._token.cache_clear()
    drawn = token()
    assert drawn == token() and len(drawn) == 8
    process._token.cache_clear()
    assert token() != drawn
    process._token.cache_clear()


@NEEDS_PROC
def test_a_killed_process_is_dead_before_its_parent_waits_for_it() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it stays in the list
    assert not is_alive(child, None)
    os.waitpid(child, 0)
    assert not is_alive(child, None)
    assert not is_alive(2**70, None)


def test_a_fork_is_another_process() -> None:
    token()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, token().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 8).decode() != token()
    os.close(reading)
    os.close(writing)
