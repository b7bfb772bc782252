"""A run's folder belongs to one process at a time; the lock of a dead process is free."""

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from purecompose.records import RunFolder, folder
from purecompose.records.folder import _Lock as Lock


CODE = """
import sys, pathlib
from purecompose.records.folder import _Lock
lock = _Lock(pathlib.Path(sys.argv[1]))
lock.take()
print("taken", flush=True)
input()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start another process that has the folder."""
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "taken\n"
        yield other
        other.kill()


def test_a_living_process_keeps_others_out_and_a_killed_one_does_not(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    words = rf"in use by process {holder.pid} on .*, since 20.*would mix their records"
    with pytest.raises(BlockingIOError, match=words):
        Lock(tmp_path).take()
    with pytest.raises(BlockingIOError, match=words):
        RunFolder(tmp_path, resume=True)
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    (tmp_path / ".lock").write_text("process 7\x1b[2J")
    with pytest.raises(BlockingIOError, match=r"process 7\\x1b\[2J:"):  # escaped
        Lock(tmp_path).take()

    shutil.copytree(tmp_path, tmp_path / "copy")
    Lock(tmp_path / "copy").take()  # it is another folder

    holder.send_signal(signal.SIGKILL)
    holder.wait()
    taken = Lock(tmp_path)
    taken.take()
    assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def is_free(path: Path) -> bool:
    lock = Lock(path)
    try:
        lock.take()
    except BlockingIOError:
        return False
    lock.release()
    return True


def test_a_run_has_its_folder_until_it_is_finished_stopped_or_dropped(tmp_path: Path) -> None:
    for name, end in (("a", RunFolder.finish), ("b", lambda run: run.stop("enough")), ("c", lambda run: None)):
        run = RunFolder(tmp_path / name)
        assert not is_free(tmp_path / name)
        end(run)
        del run
        gc.collect()
        assert is_free(tmp_path / name)


def test_the_lock_of_a_folder_that_was_made_again_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    first, second = Lock(path), Lock(path)
    first.take()
    shutil.rmtree(path)
    path.mkdir()
    second.take()
    first.release()
    assert not is_free(path)


def test_the_folder_that_follows_in_the_same_process_keeps_it(tmp_path: Path) -> None:
    left = RunFolder(tmp_path / "run")
    run = RunFolder(tmp_path / "run", resume=True)
    left._lock.release()
    del left
    gc.collect()
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", CODE, str(run.path)], check=True, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("config", ["learning rate = 3", None])
def test_a_folder_that_is_refused_is_not_kept(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "config.toml").write_text(config or "")
    if config is None:
        (tmp_path / "history.json").write_text("[]")
    with pytest.raises(ValueError):
        RunFolder(tmp_path, {"lr": 1}, resume=True)
    assert is_free(tmp_path)


def test_a_file_system_without_locks_is_warned_about_and_does_not_block_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder.fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="No locks available. Another process could"):
        Lock(tmp_path).take()


def test_a_fork_does_not_release_its_parents_lock(tmp_path: Path) -> None:
    taken = Lock(tmp_path)
    taken.take()
    child = os.fork()
    if child == 0:
        taken.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], check=True, stderr=subprocess.DEVNULL)


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    fork = CODE.replace("input()", "import os, time; os.fork() or time.sleep(60); input()")
    command = [sys.executable, "-c", fork, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "taken\n"
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        Lock(tmp_path).take()
        os.killpg(other.pid, signal.SIGKILL)


def test_a_copy_of_the_folder_does_not_release_the_lock(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        code = f"from purecompose.records import RunFolder; RunFolder({str(tmp_path / 'run')!r}, resume=True)"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is in use by process" in found.stderr
