"""Local copies of folders in remote storage, below the temporary folder, and the processes that use them.

Each process notes itself in the copies that it uses. So what killed processes have left can be removed by the next one,
unless it holds files that could not be sent.
"""

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from purecompose.run.saving.process import is_alive, place, token


WRITER = ".writer"
"""Name of the file that marks a local copy as that of the process that sends what has changed."""
_SENT = ".sent"
"""Name of the file that says that sending works; without it, a writer's copy may hold the only files of a run."""
_PREFIX, _USER = "purecompose-", ".user-"


def new_name() -> str:
    """Return a name for a local copy that no other has."""
    return f"{os.getpid()}-{token()}-{time.monotonic_ns():x}"


def copy_named(name: str) -> Path:
    """Return the path of the local copy with a name."""
    return Path(tempfile.gettempdir()).resolve() / f"{_PREFIX}{name}"


def note_user(copy: Path) -> None:
    """Note that this process uses a local copy."""
    words = json.dumps({"process": os.getpid(), "token": token(), "place": place()})
    (copy / f"{_USER}{os.getpid()}-{token()}").write_text(words, encoding="utf-8")


def note_sent(copy: Path, is_sent: bool) -> None:
    """Note whether sending works."""
    with contextlib.suppress(OSError):  # a full disk
        (copy / _SENT).touch() if is_sent else (copy / _SENT).unlink(missing_ok=True)


def clear_copies() -> None:
    """Remove the local copies whose processes have ended without doing so."""
    for copy in Path(tempfile.gettempdir()).resolve().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # another process removes it, or writes
            if _is_left(copy):
                shutil.rmtree(copy, ignore_errors=True)


def _is_left(copy: Path) -> bool:
    """Return whether a local copy is of this user, and of processes that have run on this machine and have ended."""
    status = copy.lstat()
    if not stat.S_ISDIR(status.st_mode) or (os.name == "posix" and status.st_uid != os.getuid()):
        return False
    users = [json.loads(mark.read_text(encoding="utf-8")) for mark in copy.glob(f"{_USER}*")]
    if not users or any(user["place"] != place() or is_alive(user["process"], user["token"]) for user in users):
        return False
    return (copy / _SENT).exists() or not (copy / WRITER).exists()
