"""Identity of processes: a pid may be reused, and a killed process may still be in the list."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from purecompose.run.saving import folder as process
from purecompose.run.saving.folder import is_alive, token


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
