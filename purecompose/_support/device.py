"""Devices: numbers sent without waiting, precision, freed memory, torch's settings of the process; and shards.

Shards are `torch.distributed.tensor.DTensor`s, of which each process holds some rows. That module takes a second to
import, so nothing here imports it: where it is not loaded, no shards exist.
"""

import ctypes
import functools
import os
import platform
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.contexts import NOTHING
from purecompose._support.internals import is_fake


AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of the forward pass, for each precision that uses autocast."""

PRECISIONS = ("fp32", "tf32", *AUTOCAST)
"""Precisions of a state: full float32; float32 with products rounded on a GPU; a forward pass in half precision."""

_BACKENDS: Any = torch.backends  # pyright does not know all of its members
_ON_CUDA = (_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn)
_ALL = (*_ON_CUDA, _BACKENDS.mkldnn.matmul)


@contextmanager
def building(seed: int) -> Iterator[None]:
    """Return a scope for building modules on the CPU, with initial weights from a seed; generators are restored."""
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

    `torch.tensor(numbers, device="cuda")` copies from pageable memory, and so waits for the GPU's queued work.
    """
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype, device="cpu")
    host = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=device.type != "mps")


def constants(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers that never change as a tensor on a device, copied there only once, also in a CUDA graph."""
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


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager for computing in a precision, backward passes included, without an outer autocast.

    On CUDA, only "tf32" rounds factors to TensorFloat-32, also those of convolutions, which torch rounds by default.
    The switches belong to the process, and are restored: to train in several threads, set them beforehand, since those
    with the right values are not changed.
    """
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return _without_autocast(precision, device)
    tf32 = precision == "tf32"
    # Only the new names of the switches can be read without errors.
    if device.type != "cuda" or all((operator.fp32_precision == "tf32") is tf32 for operator in _ON_CUDA):
        return NOTHING
    return _multiplying(tf32)


@contextmanager
def _without_autocast(precision: str, device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), arithmetic(precision, device):
        yield


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


@contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN; `torch.backends.mkldnn.flags(enabled=False)` warns about settings that it does not change."""
    before = _BACKENDS.mkldnn.enabled
    _BACKENDS.mkldnn.enabled = False
    try:
        yield
    finally:
        _BACKENDS.mkldnn.enabled = before


def processor() -> str:
    """Return the processor's name, which `platform` does not report on Linux."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
_OF_MALLOC = {f"MALLOC_{name}_" for name in ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX", "TOP_PAD")}
"""glibc's variables in the environment that decide which memory is kept."""
LARGEST_KEPT = 2**25
"""The size in bytes of a tensor from which on it is mapped separately: glibc's own largest value."""


def return_freed_memory() -> None:
    """Return freed memory to the system if the C library is glibc, which keeps freed blocks of up to 32 MB."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory of tensors of up to 32 MB, unless the environment says otherwise.

    Where it returns the memory of activations, page faults take up to a third of a step's time.
    """
    if not _OF_MALLOC.isdisjoint(os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if (set_option := _of_glibc("mallopt")) is not None:
        set_option(M_MMAP_THRESHOLD, LARGEST_KEPT)
        set_option(M_TRIM_THRESHOLD, -1)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, or `None` if that is not glibc."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(library, name, None) if hasattr(library, "gnu_get_libc_version") else None


Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Functions to read and to set a setting."""


def read_settings() -> dict[str, Any]:
    """Return torch's own settings by name, as values that can be sent to another process."""
    return read(_SETTINGS)


def write_settings(settings: Mapping[str, Any]) -> None:
    """Restore torch's settings, as `read_settings` returned them."""
    write(_SETTINGS, settings)


def read(table: Mapping[str, Setting]) -> dict[str, Any]:
    return {name: get() for name, (get, _) in table.items()}


def write(table: Mapping[str, Setting], values: Mapping[str, Any]) -> None:
    """Set those settings of a table that differ from the given values."""
    for name, value in values.items():
        get, put = table[name]
        if get() != value:
            put(value)


def _attribute(owner: Any, name: str) -> Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


_SETTINGS: dict[str, Setting] = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    # One value for two switches: 0 for off, 1 for warnings only, 2 for errors.
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        lambda mode: torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1),
    ),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "anomaly detection": (
        lambda: torch.is_anomaly_enabled() and ("with check_nan" if torch.is_anomaly_check_nan_enabled() else "on"),
        lambda mode: torch.set_anomaly_enabled(bool(mode), mode != "on"),
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda enabled: torch.set_autocast_enabled("cpu", enabled)),
    "autocast dtype": (lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype)),
    "default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "mkldnn": _attribute(torch.backends.mkldnn, "enabled"),
    "cudnn benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "cudnn allow_tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
}
"""Functions to read and to set each of torch's settings, by name."""


_MODULE = "torch.distributed.tensor"


def may_be_shards() -> bool:
    """Return whether this process can have divided tensors, which is known without looking at any."""
    return _MODULE in sys.modules


def all_gather(own: Tensor, size: int, group: str) -> Tensor:
    """Return the tensors of all processes of a group, of the same shape, one after the other in dimension 0."""
    return _MESSAGES.wait_tensor(_MESSAGES.all_gather_into_tensor(own, size, group))


def reduce_scatter(own: Tensor, size: int, group: str) -> Tensor:
    """Return this process's part of the sum over a group, which is cut into equal parts in dimension 0."""
    return _MESSAGES.wait_tensor(_MESSAGES.reduce_scatter_tensor(own, "sum", size, group))


def all_reduce(own: Tensor, how: str, group: str) -> Tensor:
    """Return the "sum", "min" or "max" over a group."""
    return _MESSAGES.wait_tensor(_MESSAGES.all_reduce(own, how, group))


# Private in torch: public functions such as `torch.distributed.all_reduce` write into an argument, which a graph of
# pure functions cannot contain.
_MESSAGES: Any = torch.ops._c10d_functional


def is_wait(target: Any) -> bool:
    """Return whether an operation in a graph waits for a message."""
    return target is _MESSAGES.wait_tensor.default


def check_alike(message: str, group: str, like: Tensor) -> None:
    """Raise on all processes of a group if their next messages, described in words, differ.

    Messages of other tensors would mix up values or, of other sizes, abort. Graphs are compared when they are built, so
    nothing is sent if `like`, a tensor of the message, is fake.
    """
    if is_fake(like):
        return
    c10d: Any = torch.distributed.distributed_c10d
    found = c10d._resolve_process_group(group)
    # Where the group also has a transport for the CPU, this does not wait for a GPU.
    device = "cpu" if torch.device("cpu") in getattr(found, "_device_types", ()) else like.device
    own = torch.tensor([zlib.crc32(message.encode())], device=device)
    if len(set(all_gather(own, found.size(), group).tolist())) > 1:
        raise RuntimeError(
            f"the processes read different parameters at the same time, this one {message}: with gather='layer', all "
            "must call the same layers in the same order; or use fully_sharded(step, mesh, gather='step')"
        )


INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers in which the bits of an element can be read, by its number of bytes."""


def names_by_memory(params: Mapping[str, Tensor]) -> Callable[[Tensor], str]:
    """Return a function from a divided tensor, such as a detached parameter, to the parameter's name or the shape."""
    with torch.no_grad():  # otherwise `to_local` is a function of autograd, which torch.func refuses
        names = {local(param).untyped_storage()._cdata: name for name, param in params.items()}
    return lambda shard: names.get(local(shard.detach()).untyped_storage()._cdata, str(tuple(shard.shape)))


def is_shard(value: Any) -> bool:
    """Return whether this is a tensor that is divided among processes."""
    if type(value) is Tensor:
        return False
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the rows that this process holds; a tensor that is not divided, as it is."""
    return tensor.to_local() if is_shard(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole(tensor: Tensor) -> Tensor:
    """Return all rows, which every process must ask for; a tensor that is not divided, as it is."""
    return tensor.full_tensor() if is_shard(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


class Place(NamedTuple):
    """How a divided tensor lies on its mesh of processes."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def place_of(tensor: Any) -> Place | None:
    """Return how a tensor lies on its mesh; `None` if it is not divided."""
    if not is_shard(tensor):
        return None
    return Place(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())


def placed(own: Tensor, place: Place | None) -> Tensor:
    """Return the divided tensor of which this process has these rows; without a place, the tensor itself."""
    if place is None:
        return own
    mesh, placements, shape, stride = place
    dtensor = sys.modules[_MODULE].DTensor
    return dtensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


def divided(tensor: Tensor, place: Place | None) -> Tensor:
    """Return a whole tensor, the same on all processes, in a place: each keeps its rows, and no message is sent."""
    return tensor if place is None else placed(rows_of(tensor, place.mesh), place)


def laid_as(value: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor with the dtype and strides of another one, and divided among processes as it is."""
    return divided(torch.empty_like(whole(like)).copy_(value), place_of(like))


def rows_of(tensor: Tensor, mesh: Any) -> Tensor:
    """Return the rows of a whole tensor that this process holds on a mesh, copied."""
    start, stop = _span(tensor.shape[0], mesh)
    return tensor[start:stop].clone()


def span_of(place: Place) -> tuple[int, int]:
    """Return the first row that this process holds of a divided tensor, and the row after the last."""
    return _span(place.shape[0], place.mesh)


def _span(num_rows: int, mesh: Any) -> tuple[int, int]:
    size = -(-num_rows // mesh.size(mesh.ndim - 1))
    start = min(size * mesh.get_local_rank(mesh.ndim - 1), num_rows)
    return start, min(start + size, num_rows)


def sum_of_shards(own: Tensor, shards: Sequence[Any]) -> Tensor:
    """Return the sum over the parts of tensors that are divided alike: a plain tensor, by one message."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = shards[0].device_mesh, shards[0].placements
    parts = [Partial("sum") if placement.is_shard() else Replicate() for placement in placements]
    return DTensor.from_local(own, mesh, parts, run_check=False).full_tensor()
