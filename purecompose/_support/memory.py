"""Freed memory that the C library keeps."""

import ctypes
import os
import sys
from collections.abc import Callable


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
_SETTINGS = {f"MALLOC_{name}_" for name in ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX", "TOP_PAD")}
"""glibc's variables in the environment that decide which memory is kept."""
LARGEST_KEPT = 2**25
"""The size in bytes of a tensor from which on it is mapped separately: glibc's own largest value."""


def return_freed_memory() -> None:
    """Return freed memory to the system if the C library is glibc; with others, do nothing.

    glibc's `malloc` keeps blocks of up to 32 MB when they are freed. The tensors of a step reuse them only where they
    fit, so after much has been freed in other sizes the process would keep this memory beside the one it uses.
    """
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors of up to 32 MB; with other C libraries, do nothing.

    By default it returns the memory of a step's activations to the system when they are freed, or not, as chance lays
    out the heap, and takes page faults for it in the next step: up to a third of a step's time. Settings in the
    environment are left as they are.
    """
    if not _SETTINGS.isdisjoint(os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if (set_option := _of_glibc("mallopt")) is not None:
        set_option(M_MMAP_THRESHOLD, LARGEST_KEPT)
        set_option(M_TRIM_THRESHOLD, -1)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, or `None` if that is not glibc."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(library, name, None) if hasattr(library, "gnu_get_libc_version") else None
