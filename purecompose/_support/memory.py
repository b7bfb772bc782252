"""Freed memory that the C library keeps."""

import ctypes
import sys


__all__ = ["return_freed_memory"]


def return_freed_memory() -> None:
    """Return freed memory to the system if the C library is glibc; with others, do nothing.

    glibc's `malloc` keeps blocks of up to 32 MB when they are freed. The tensors of a step reuse them only where they
    fit, so after much has been freed in other sizes the process would keep this memory beside the one it uses.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
