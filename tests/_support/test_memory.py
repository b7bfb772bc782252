"""Freed memory goes back to the system, or is kept for the next step."""

import pathlib
import platform
import resource

import pytest
import torch

from purecompose._support import device
from purecompose._support.device import keep_freed_memory, return_freed_memory


needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such options")


def resident_bytes() -> int:
    """Return the size of the process's resident set."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


@needs_glibc
def test_blocks_freed_between_others_are_returned() -> None:
    tensors = [torch.ones(2**14) for _ in range(1600)]  # 64 KB each, which malloc does not map separately
    kept = tensors[::100]
    del tensors
    before = resident_bytes()
    return_freed_memory()
    assert resident_bytes() < before - 80e6
    assert all(bool((tensor == 1).all()) for tensor in kept)


@needs_glibc
def test_kept_memory_is_used_again_without_page_faults() -> None:
    def faults_of_a_step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.zeros(2**21) for _ in range(16)]  # 8 MB each
        del activations
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    keep_freed_memory()
    assert min(faults_of_a_step() for _ in range(5)) < 10_000  # of 32,768 pages: other memory may lie in between


@pytest.mark.parametrize(
    "setting",
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "65536"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1048576"),
    ],
)
def test_settings_in_the_environment_are_left_as_they_are(
    setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(device, "_of_glibc", asked.append)
    monkeypatch.setenv(*setting)
    keep_freed_memory()
    assert asked == []
    monkeypatch.delenv(setting[0])
    keep_freed_memory()
    assert asked == ["mallopt"]
