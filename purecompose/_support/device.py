"""Device helpers: numbers sent without waiting, the precision of products, and where modules are built."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


__all__ = ["AUTOCAST", "PRECISIONS", "arithmetic", "as_scalar", "building", "sent"]

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of the forward pass, of the precisions under which it runs under autocast."""

PRECISIONS = ("fp32", "tf32", *AUTOCAST)
"""How a state computes: in full float32; with float32 products rounded on a GPU; the forward pass in half precision."""

_AS_IT_IS = nullcontext()
_BACKENDS: Any = torch.backends  # pyright knows few of its members
_ON_CUDA = (_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn)
_ALL = (*_ON_CUDA, _BACKENDS.mkldnn.matmul)


@contextmanager
def building(seed: int) -> Iterator[None]:
    """Return a scope in which modules are built on the CPU, with first weights from a seed; torch's generators stay
    put.
    """
    # torch.manual_seed would seed the accelerators' generators as well, which no one would set back.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def as_scalar(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number or a 0-d tensor as a tensor, without copying from the host, which would wait."""
    if isinstance(value, Tensor):
        return value.to(dtype=dtype, device=device)
    return torch.full((), value, dtype=dtype, device=device)


def sent(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor on a device, without synchronizing with a GPU.

    `torch.tensor(numbers, device="cuda")` copies from pageable memory, and so waits until the GPU has done all that
    it was given before. From pinned memory the copy takes its turn; torch's allocator keeps the memory until then.

    Example:
        >>> sent([1, 2], torch.float64, torch.device("cpu"))
        tensor([1., 2.], dtype=torch.float64)
    """
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype, device="cpu")
    host = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=device.type != "mps")


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a scope in which numbers are computed as the precision says, backward passes included.

    An autocast around the scope has no effect in it: the state says how it computes.

    TensorFloat-32 keeps 10 bits of a float32's 23 in the factors of matrix products and convolutions. torch leaves it
    on for convolutions and recurrent layers; here only "tf32" has it, for matrix products too. Afterwards the switches
    are as they were. They are the process's own: who trains in several threads sets them right before, and then they
    are left alone. On other devices there is no such switch.

    Args:
        precision: One of `PRECISIONS`.
        device: Where the work is done.
    """
    if torch._C._is_any_autocast_enabled():
        return _without_autocast(precision, device)
    if device.type != "cuda":
        return _AS_IT_IS
    tf32 = precision == "tf32"
    return _AS_IT_IS if _multiplies(tf32) else _multiplying(tf32)


@contextmanager
def _without_autocast(precision: str, device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), arithmetic(precision, device):
        yield


def _multiplies(tf32: bool) -> bool:
    """Return whether the switches stand so already; read by the new names, whose reading never raises."""
    return all((operator.fp32_precision == "tf32") is tf32 for operator in _ON_CUDA)


@contextmanager
def _multiplying(tf32: bool) -> Iterator[None]:
    # torch has two sets of names for the switches and raises where the older ones are read (Inductor does, torch 2.13)
    # while they contradict the newer: so both are set, the older first, since they write into the newer.
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
    """Return a switch by its older name; None where the caller has set the newer ones to what it cannot say."""
    try:
        return switch()
    except RuntimeError:
        return None
