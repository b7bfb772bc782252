"""The identity of a process, and whether it still runs.

The number is not enough: in a container the process has the same one each time, and any number is given out again
some day. So a token goes with it. On Linux it follows from when the process was started, so that others can compare;
elsewhere it is drawn, and says of a process's own number only whether it means this process or an earlier one.
"""

import hashlib
import os
import platform
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path


__all__ = ["is_alive", "place", "token"]


def token() -> str:
    """Return a token that distinguishes this process from earlier ones with its number: eight hexadecimal
    digits.

    Example:
        >>> token() == token()
        True
    """
    return _token(os.getpid())  # by the number: a fork is another process


def is_alive(pid: int, its_token: str | None) -> bool:
    """Return whether a process of this machine, or this container, is still there.

    Args:
        pid: Its number.
        its_token: What `token` gave there; `None` where an older version did not write it down.
    """
    if pid == os.getpid():
        return its_token == token()
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another user
        pass
    state, born = _told(pid)
    return state not in ("Z", "X") and (None in (born, its_token) or born == its_token)


def place() -> str:
    """Return the scope of process numbers: a machine's name, and on Linux its process namespace.

    So two containers on a machine are two places.
    """
    name = platform.node() or "localhost"
    with suppress(OSError):
        name += f" {os.readlink('/proc/self/ns/pid')}"
    return name


@cache
def _token(pid: int) -> str:
    return _told(pid)[1] or secrets.token_hex(4)


def _told(pid: int) -> tuple[str | None, str | None]:
    """Return what the system reports of a process, if anything: its state (a letter) and a token of its start."""
    try:
        # The name, in brackets, may hold anything.
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        started = int(words[19])
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except (OSError, ValueError, IndexError):
        return None, None
    return words[0].decode(), hashlib.blake2s(b"%s %d" % (boot, started), digest_size=4).hexdigest()
