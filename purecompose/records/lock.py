"""The lock of a run's folder: two processes would mix records and remove each other's checkpoints."""

import os
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from purecompose._support.messages import escaped, warn
from purecompose.records.layout import LOCK, write_json
from purecompose.records.reading import read_json
from purecompose.run.saving.folder import is_alive, place, token


try:
    import fcntl
except ImportError:  # not available on Windows; see `_alone`
    fcntl = None


class Lock:
    """A lock on a run's folder, a file that names the owning process; released at the latest with this object.

    A lock whose process has ended is taken over. Whether a process on another machine or in another container is still
    running cannot be determined: its lock is taken over, too, with a warning, so that a job can be restarted elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._finalizer: weakref.finalize | None = None

    def take(self) -> None:
        """Take the lock for this process, unless this object has it already.

        Raises:
            BlockingIOError: Another process has the lock.

        Warns:
            RuntimeWarning: The folder may be in use elsewhere; or the lock cannot be written, so it keeps no process
                out.
        """
        if self._finalizer is not None and self._finalizer.alive:
            return
        file, now = self._folder / LOCK, datetime.now().astimezone().isoformat(timespec="seconds")
        mine = {**_own(self._folder), "since": now, "lock": secrets.token_hex(4)}
        try:
            with _alone(self._folder):
                reported = self._judged(_holder(self._folder))
                write_json(file, mine)
        except BlockingIOError:
            raise
        except OSError as error:
            reported = f"{file} cannot be written: {error}. Another process could use the folder at the same time"
        self._finalizer = weakref.finalize(self, _release, self._folder, mine)
        if reported is not None:
            warn(f"RunFolder: {reported}", RuntimeWarning)

    def release(self) -> None:
        """Release the lock."""
        if self._finalizer is not None:
            self._finalizer()

    def _judged(self, holder: dict[str, Any] | None) -> str | None:
        """Return a warning if the lock of a process that may still run is taken over; `None` if it can be taken safely.

        Raises:
            BlockingIOError: The process still runs.
        """
        if holder is None or holder.items() >= _own(self._folder).items():
            return None
        host = str(holder["place"]).partition(" ")[0]
        who = escaped(f"process {holder['process']} on {host}, since {holder['since']}")
        if holder["place"] != place():
            return (
                f"{self._folder} was used by {who}, and it is not known here whether that process still runs. If so, "
                "end one of the two: otherwise their records would be mixed"
            )
        if is_alive(holder["process"], holder["token"]):
            raise BlockingIOError(
                f"RunFolder: {self._folder} is in use by {who}: two runs in one folder would mix their records. Wait "
                "until it is done, end it, or give this run another folder"
            )
        return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let only one process at a time read and write the lock file.

    On a file system without locks, two processes that begin within a millisecond do not see each other. A system lock
    is not used for the folder itself, because child processes inherit it and would keep it after the run is killed.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _holder(folder: Path) -> dict[str, Any] | None:
    """Return the process that has the folder; `None` if there is none."""
    with suppress(FileNotFoundError, ValueError):
        found = read_json(folder / LOCK)
        # A lock that was copied with its folder belongs to no process, nor does a file that is not a lock.
        if isinstance(found.get("process"), int) and found.get("folder") == folder.stat().st_ino:
            return {"place": "somewhere", "token": None, "since": "some time", **found}
    return None


def _own(folder: Path) -> dict[str, Any]:
    return {"folder": folder.stat().st_ino, "place": place(), "process": os.getpid(), "token": token()}


def _release(folder: Path, mine: dict[str, Any]) -> None:
    # A forked child must not release the lock, nor this process if another one has taken it over.
    with suppress(OSError):
        if mine["process"] == os.getpid() and _holder(folder) == mine:
            (folder / LOCK).unlink()
