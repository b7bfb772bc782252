"""Room on a full disk for the last checkpoint of a run."""

import contextlib
import errno
import time
from pathlib import Path

from purecompose._support.messages import warn
from purecompose.errors import CheckpointWarning
from purecompose.run.saving import folder as disk
from purecompose.run.saving.settings import Checkpoints, of_newest, surplus_before
from purecompose.run.saving.tensors import is_whole
from purecompose.time import Timestamp


_WAITING_TIME, _PAUSE = 60.0, 2.0
"""Seconds for which the last checkpoint waits for space on the disk, and seconds between two tries."""


def is_disk_full(error: Exception | None) -> bool:
    """Return whether an error is that of a full disk."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class Room:
    """The room for a last checkpoint, which is made by removing earlier ones, or waited for."""

    def __init__(self, settings: Checkpoints) -> None:
        self._settings = settings
        self._deadline: float | None = None

    def make(self, folder: Path, now: Timestamp, *, may_wait: bool) -> bool:
        """Make room for a checkpoint at this time, or wait for it; return whether to try again.

        Args:
            folder: The folder of checkpoints.
            now: The time of the checkpoint.
            may_wait: True if the state is in no checkpoint yet; False if only new metrics are missing.
        """
        if self._remove(folder, now, self._settings) or (may_wait and self._wait(folder)):
            return True
        # The newest state is worth more than older ones.
        return may_wait and self._remove(folder, now, of_newest(self._settings))

    def _remove(self, folder: Path, now: Timestamp, settings: Checkpoints) -> bool:
        """Remove the oldest checkpoint that a new one at this time makes superfluous; return whether there was one."""
        with contextlib.suppress(OSError):
            found = disk.all_in(folder)[0]
            older = [one for one in found if one.index.batch < now.batch]
            for one in reversed(surplus_before(older, settings)):
                rest = [other for other in found if other is not one]
                if any(is_whole(other.path, other.index) for other in rest):
                    disk.remove(one.path)
                    return not one.path.exists()
        return False

    def _wait(self, folder: Path) -> bool:
        """Wait for space to be freed; return whether to try again."""
        if self._deadline is None:
            self._deadline = time.monotonic() + _WAITING_TIME
            text = f"{folder}: the disk is full. Trying to write the last checkpoint for {_WAITING_TIME:g} s"
            warn(f"{text}; free some space", CheckpointWarning)
        if time.monotonic() >= self._deadline:
            return False
        time.sleep(_PAUSE)
        return True
