"""Device helpers: numbers sent without waiting, the precision of products, where modules are built, freed memory."""

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from purecompose._support.scopes import NOTHING


AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of the forward pass, for each precision that uses autocast."""

PRECISIONS = ("fp32", "tf32", *AUTOCAST)
"""Precisions of a state: full float32; float32 with products rounded on a GPU; a forward pass in half precision."""

_BACKENDS: Any = torch.backends  # pyright does not know all of its members
_ON_CUDA = (_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn)
_ALL = (*_ON_CUDA, _BACKENDS.mkldnn.matmul)


@contextmanager
def building(seed: int) -> Iterator[None]:
    """Return a context manager for building modules on the CPU, with initial weights from a seed.

    The states of torch's generators are the same afterwards.
    """
    # torch.manual_seed would also seed the accelerators' generators, which would not be restored.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def as_scalar(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number or a 0-d tensor as a tensor, without a copy from the host, which would wait for the device."""
    if isinstance(value, Tensor):
        return value.to(dtype=dtype, device=device)
    return torch.full((), value, dtype=dtype, device=device)


def sent(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on the host as a tensor on a device, without synchronizing with a GPU.

    `torch.tensor(numbers, device="cuda")` copies from pageable memory, and so waits until the GPU has finished its
    queued work. A copy from pinned memory is queued; torch's allocator keeps the memory until then.

    Example:
        >>> sent([1, 2], torch.float64, torch.device("cpu"))
        tensor([1., 2.], dtype=torch.float64)
    """
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype, device="cpu")
    host = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=device.type != "mps")


def constants(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers that never change as a tensor on a device, to which they are copied only once.

    In a compiled step, `sent` would copy from the host in every step, and a CUDA graph could not repeat that.

    Example:
        >>> constants([0.5, 2.0], torch.float32, torch.device("cpu"))
        tensor([0.5000, 2.0000])
    """
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype, device="cpu")
    return _constants(list(numbers), dtype, device)


@torch.library.custom_op("purecompose::constants", mutates_args=())
def _constants(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _kept(tuple(numbers), dtype, device).clone()  # results must not share memory


_constants.register_fake(lambda numbers, dtype, device: torch.empty(len(numbers), dtype=dtype, device=device))


@functools.cache  # a CUDA graph reads the address of the tensor
def _kept(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return sent(numbers, dtype, device)


def bfloat16_units() -> str | None:
    """Return the name of this CPU's instructions for matrix products in bfloat16; `None` if it has none."""
    found = torch.cpu.get_capabilities()
    return next((name for name in ("amx_bf16", "avx512_bf16") if found.get(name)), None)


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager for computing in a precision, backward passes included.

    An autocast around it has no effect inside: the state determines the precision.

    TensorFloat-32 keeps 10 of a float32's 23 mantissa bits in the factors of matrix products and convolutions. torch
    enables it by default for convolutions and recurrent layers; here only "tf32" uses it, also for matrix products. The
    switches are restored afterwards. They belong to the process: to train in several threads, set them beforehand,
    since switches that already have the right values are not changed. Other devices than CUDA have no such switch.
    """
    if torch._C._is_any_autocast_enabled():
        return _without_autocast(precision, device)
    if device.type != "cuda":
        return NOTHING
    tf32 = precision == "tf32"
    return NOTHING if _multiplies(tf32) else _multiplying(tf32)


@contextmanager
def _without_autocast(precision: str, device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), arithmetic(precision, device):
        yield


def _multiplies(tf32: bool) -> bool:
    """Return whether the switches already have these values; only the new names can be read without errors."""
    return all((operator.fp32_precision == "tf32") is tf32 for operator in _ON_CUDA)


@contextmanager
def _multiplying(tf32: bool) -> Iterator[None]:
    # torch has two sets of names for the switches, and reading the older ones (as Inductor does in torch 2.13) raises
    # if they contradict the newer ones. So both are set, the older first, since setting these changes the newer ones.
    matmul = _read(torch.get_float32_matmul_precision)
    cudnn = _read(lambda: torch.backends.cudnn.allow_tf32)
    before = [operator.fp32_precision for operator in _ALL]
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    for operator in _ON_CUDA:
        operator.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            torch.backends.cudnn.allow_tf32 = cudnn
        for operator, value in zip(_ALL, before, strict=True):
            operator.fp32_precision = value


def _read(switch: Callable[[], Any]) -> Any:
    """Return a switch by its older name, or None if the newer names have values that the older one cannot express."""
    try:
        return switch()
    except RuntimeError:
        return None


def processor() -> str:
    """Return the processor's name, which `platform` does not report on Linux."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
