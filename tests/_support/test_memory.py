"""Freed memory goes back to the system."""

import pathlib
import platform

import pytest
import torch

from purecompose._support.memory import return_freed_memory


def resident_bytes() -> int:
    """Return the size of the process's resident set."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no malloc_trim")
def test_blocks_freed_between_others_are_returned() -> None:
    tensors = [torch.ones(2**14) for _ in range(1600)]  # 64 KB each, which malloc does not map separately
    kept = tensors[::100]
    del tensors
    before = resident_bytes()
    return_freed_memory()
    assert resident_bytes() < before - 80e6
    assert all(bool((tensor == 1).all()) for tensor in kept)
