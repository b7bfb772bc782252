"""The lock of a run's folder: two processes would mix records and remove each other's checkpoints."""

import contextlib
import os
import socket
import weakref
from datetime import datetime
from pathlib import Path
from typing import Any

from purecompose._support.messages import escaped, warn
from purecompose.records.layout import LOCK


try:
    import fcntl
except ImportError:  # not available on Windows, where nothing keeps two processes apart
    fcntl = None


class Lock:
    """A lock of this process on a run's folder, released at the latest with this object.

    It is a lock of the system on a file that names the process. The system releases it when the process ends, however
    it ends, and a file system that several machines share keeps them apart, too. (A record lock of POSIX would be lost
    as soon as the process closes any other handle of the file, as a copy of the folder does.)
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._finalizer: weakref.finalize | None = None

    def take(self) -> None:
        """Take the lock for this process, unless this object has it already.

        Raises:
            BlockingIOError: Another process has the lock.

        Warns:
            RuntimeWarning: The folder cannot be locked, as on some file systems, so it keeps no process out.
        """
        if self._finalizer is not None and self._finalizer.alive:
            return
        try:
            file = _locked(self._path)
        except BlockingIOError:
            raise
        except OSError as error:
            text = f"RunFolder: {self._path} cannot be locked: {error}. Another process could use the folder, too"
            warn(text, RuntimeWarning)
            return
        self._finalizer = weakref.finalize(self, _release, file, self._path, os.getpid())

    def release(self) -> None:
        """Release the lock."""
        if self._finalizer is not None:
            self._finalizer()


def _locked(path: Path) -> Any:
    """Return the lock file, opened and locked, with the name of this process in it."""
    file = path.open("a+b", buffering=0)
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = escaped(file.read(200).decode("utf-8", "replace").strip())
        file.close()
        if not isinstance(error, BlockingIOError):
            raise
        raise BlockingIOError(
            f"RunFolder: {path.parent} is in use by {holder}: two runs in one folder would mix their records. Wait "
            "until it is done, end it, or give this run another folder"
        ) from error
    if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):  # removed after it was opened
        file.close()
        return _locked(path)
    _HELD.add(file)
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # a full disk
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
    return file


def _release(file: Any, path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a child process
        with contextlib.suppress(OSError):
            path.unlink()
    file.close()


_HELD: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The lock files of this process. A forked child closes them: it would keep the locks after this process was killed."""


def _close_in_child() -> None:
    for file in list(_HELD):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
