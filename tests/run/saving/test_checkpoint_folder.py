"""Clearing the folder of checkpoints: files removed, files restored, and files that must not be deleted."""

import dataclasses
import errno
import os
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import purecompose as pc
from purecompose.core.ranks import Ranks
from purecompose.records.layout import write_json
from purecompose.run.saving import folder as disk
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


def test_what_was_being_replaced_is_restored_and_old_files_are_cleared(tmp_path, monkeypatch):
    old, new = make(tmp_path / f".{NAME}.00000000.old"), make(tmp_path / f".{NAME}.22222222.writing")
    disk.clear(tmp_path)
    assert names(tmp_path) == [new.name, NAME]
    assert (tmp_path / NAME / "index.json").read_text() == old.name
    make(old)
    monkeypatch.setattr(disk, "_LONG", -1.0)
    disk.clear(tmp_path)
    assert names(tmp_path) == [NAME]


def test_files_that_are_being_written_are_not_touched(tmp_path: pathlib.Path) -> None:
    with disk.replaced(tmp_path / NAME) as new, disk.written(tmp_path / "notes.json") as file:
        file.touch()
        disk.clear(tmp_path)
        assert sorted([new.name, file.name]) == names(tmp_path)
    assert names(tmp_path) == [NAME, "notes.json"]


def test_a_reader_that_restores_what_is_being_replaced_loses_nothing(tmp_path, monkeypatch):
    make(tmp_path / NAME)
    real, cleared = pathlib.Path.rename, []

    def renamed(path, target):
        if path.name.endswith(".writing") and not cleared:
            cleared.append(disk.clear(tmp_path))  # between the two renamings
        return real(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", renamed)
    with disk.replaced(tmp_path / NAME) as new:
        (new / "index.json").write_text("new")
    assert cleared and names(tmp_path) == [NAME] and (tmp_path / NAME / "index.json").read_text() == "new"


def test_half_written_files_and_links_are_removed_too(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_LONG", -1.0)
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


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_damaged(tmp_path, monkeypatch):
    path, real = pc.save(make_state(), tmp_path / NAME), disk.read_whole

    def replaced_meanwhile(file, most):
        monkeypatch.undo()
        path.rename(tmp_path / "away")
        try:
            return real(file, most)
        finally:
            (tmp_path / "away").rename(path)

    monkeypatch.setattr(disk, "read_whole", replaced_meanwhile)
    assert disk.read_index(path).batch == 0


def test_an_index_is_missing_only_if_nobody_is_replacing_it(tmp_path, monkeypatch):
    path, real, looks = pc.save(make_state(), tmp_path / NAME), disk.read_whole, []
    (path / "index.json").rename(tmp_path / "index")

    def replaced_late(file, most):
        looks.append(file)
        if len(looks) == 9:
            (tmp_path / "index").rename(file)
        return real(file, most)

    monkeypatch.setattr(disk, "read_whole", replaced_late)
    with pytest.raises(pc.errors.DamagedError, match="index.json cannot be read"):
        disk.read_index(path)
    looks.clear()
    disk.hidden(path).mkdir()
    assert disk.read_index(path).batch == 0


def test_a_reader_restores_nothing_that_is_being_deleted(tmp_path, monkeypatch):
    path, real, deleted = pc.save(make_state(), tmp_path / NAME), disk.shutil.rmtree, []

    def delete(folder, **settings):
        (folder / "index.json").unlink()
        path.rename(tmp_path / "moved")  # as another writer does
        disk.clear(tmp_path)
        deleted.append(path.exists())
        (tmp_path / "moved").rename(path)
        real(folder, **settings)

    monkeypatch.setattr(disk.shutil, "rmtree", delete)
    pc.save(make_state(), path)
    assert deleted == [False] and names(tmp_path) == [NAME]


def writers_here(total: int) -> list[disk.Writers]:
    """Return writers that are all in this process, where all messages say the same."""
    ranks = [cast(Ranks, SimpleNamespace(rank=i, exchange=lambda values, _: values)) for i in range(total)]
    return [disk.Writers(ranks[i], i, total, "0" * 16, torch.device("cpu")) for i in range(total)]


@pytest.mark.parametrize("is_alone", [False, True])
def test_files_of_other_processes_may_appear_late(tmp_path, monkeypatch, is_alone):
    first, other = writers_here(2)
    index = disk.read_index(pc.save(make_state(), tmp_path / "one"))

    def part(writers):
        disk.write_part(tmp_path / NAME, lambda: {"key": torch.zeros(2)}, {"key": (0, 1)}, writers)

    def described(files):
        return dataclasses.replace(index, files=files)

    def complete():
        disk.complete(tmp_path / NAME, described, lambda: part(first), first, is_alone=is_alone)

    late = threading.Timer(0.3, part, [other])
    late.start()
    complete()
    files = ["state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"]
    assert names(tmp_path / NAME) == ["index.json", *files] and [*disk.read_index(tmp_path / NAME).files] == files
    monkeypatch.setattr(disk, "_AFTER_END" if is_alone else "_TO_APPEAR", 0.1)
    with pytest.raises(OSError, match=f"{files[1]} is not whole after 0.1 s"):
        complete()
    assert names(tmp_path) == [NAME, "one"] and [*disk.read_index(tmp_path / NAME).files] == files
