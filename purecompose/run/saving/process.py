"""The identity of a process, and whether it still runs.

The process number is not sufficient: in a container a process has the same number each time, and any number is used
again at some time. A token is therefore added. On Linux it is computed from the start time of the process, so that
other processes can compare it; elsewhere it is random, and only distinguishes this process from earlier ones with the
same number.
"""

import hashlib
import os
import platform
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path


def token() -> str:
    """Return a token, eight hexadecimal digits, that distinguishes this process from earlier ones with its number.

    Example:
        >>> token() == token()
        True
    """
    return _token(os.getpid())  # cached by number, because a fork is another process


def is_alive(pid: int, its_token: str | None) -> bool:
    """Return whether a process on this machine, or in this container, is still running.

    Args:
        pid: Number of the process.
        its_token: Token of the process; `None` if it is not known, as from an older version.
    """
    if pid == os.getpid():
        return its_token == token()
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # a process of another user
        pass
    state, born = _from_system(pid)
    return state not in ("Z", "X") and (None in (born, its_token) or born == its_token)


def place() -> str:
    """Return the scope of process numbers: the machine's name, and on Linux the process namespace.

    Two containers on a machine are therefore two places.
    """
    name = platform.node() or "localhost"
    with suppress(OSError):
        name += f" {os.readlink('/proc/self/ns/pid')}"
    return name


def short_place() -> str:
    """Return the scope of process numbers as eight hexadecimal digits, for the names of files."""
    return hashlib.blake2s(place().encode(), digest_size=4).hexdigest()


def owner() -> str:
    """Return the words by which the names of files tell which process writes them: number, token and place."""
    return f"{os.getpid()}-{token()}-{short_place()}"


@cache
def _token(pid: int) -> str:
    return _from_system(pid)[1] or secrets.token_hex(4)


def _from_system(pid: int) -> tuple[str | None, str | None]:
    """Return the state of a process (a letter) and a token of its start, or `None` for each if not known."""
    try:
        # The name, in brackets, may contain any characters.
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        started = int(words[19])
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except (OSError, ValueError, IndexError):
        return None, None
    return words[0].decode(), hashlib.blake2s(b"%s %d" % (boot, started), digest_size=4).hexdigest()
