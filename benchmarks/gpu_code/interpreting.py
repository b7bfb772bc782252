"""GPU code run on the CPU: Triton kernels in Triton's interpreter, library calls by torch's functions for the CPU.

The source runs as Inductor wrote it, with the block sizes that Inductor chooses first. What it imports is replaced:
memory of the GPU becomes memory of the host, filled with NaN, so that a kernel that reads what no kernel has written
shows in the results. The process must be started with TRITON_INTERPRET=1.
"""

import functools
import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_code.attention import empty, register
from benchmarks.gpu_code.pretend import InterfaceError, find, replace


class InterpretedKernel:
    """A Triton kernel in the place of Inductor's autotuner; with its first configuration."""

    def __init__(self, fn: Any, *, configs: Sequence[Any], inductor_meta: Any, **rest: Any) -> None:
        """Take what the autotuner takes."""
        del rest
        self.fn, self.blocks = fn, configs[0].kwargs
        expression = find("torch._inductor.runtime.triton_heuristics.GridExpr")
        self._grid = expression.from_meta(inductor_meta, configs[0])

    def run(self, *args: Any, stream: int, **kwargs: Any) -> None:
        """Run all blocks, one after the other."""
        del stream
        named = dict(zip(self.fn.arg_names, args, strict=False)) | kwargs
        grid = self._grid.eval_slow({**named, **self.blocks})
        self.fn[grid](*args, **kwargs, **self.blocks)


def load(source: str) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Return the function that code defines.

    Args:
        source: The source that Inductor wrote.

    Raises:
        InterfaceError: Triton was not started as an interpreter, or an interface has moved.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise InterfaceError("kernels are interpreted in a process that was started with TRITON_INTERPRET=1")
    run_in_place_of_autotuner(InterpretedKernel)
    replace("torch._inductor.runtime.triton_helpers.libdevice", _libdevice())
    _pack_operands_of_atomics()
    replace("torch._C._dynamo.guards._empty_strided_cuda", empty)
    replace("torch._C._dynamo.guards.copy_if_misaligned", lambda tensor: tensor)
    replace("torch._C._cuda_getCurrentRawStream", lambda device: 0)
    replace("purecompose._support.device._kept", lambda numbers, dtype, device: torch.tensor(numbers, dtype=dtype))
    register()
    return executed(source)["call"]


@functools.cache
def _pack_operands_of_atomics() -> None:
    """Let atomic operations of the interpreter read broadcast operands, which it takes for dense (Triton 3.8)."""
    path = "triton.runtime.interpreter.InterpreterBuilder.create_atomic_rmw"
    plain = find(path)

    def packed(self: Any, operation: Any, *operands: Any) -> Any:
        for one in operands:
            if hasattr(one, "data"):
                one.data = np.ascontiguousarray(one.data)
        return plain(self, operation, *operands)

    replace(path, packed)


def run_in_place_of_autotuner(kernel: type) -> None:
    """Let the kernels that code defines be objects of a class, which takes what Inductor's autotuner takes."""
    path = "torch._inductor.runtime.triton_heuristics.cached_autotune"
    original = find(path)
    replace(path, functools.partial(getattr(original, "func", original), caching_autotuner_cls=kernel))
    replace("torch._inductor.async_compile.AsyncCompile.triton", _compiled)
    replace("torch._inductor.async_compile.AsyncCompile.wait", lambda self, names: None)
    replace("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", lambda: None)


def executed(source: str, name: str = "code") -> dict[str, Any]:
    """Run source from a separate file, which Triton reads again later, and return its names."""
    path = _FOLDER / f"{name}_{next(_NUMBERS)}.py"
    path.write_text(source)
    names: dict[str, Any] = {"__file__": str(path), "__name__": name}
    exec(compile(source, str(path), "exec"), names)
    return names


def _compiled(self: Any, name: str, source: str, **rest: Any) -> Any:
    """Stand for Inductor's compilation of a kernel in another process."""
    return executed(source, name)[name]


_NUMBERS = itertools.count()
_FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="gpu_code_"))


def _libdevice() -> Any:
    """Return functions of the host with the names of the device's, which the interpreter does not have."""
    tl, handle = find("triton.language"), find("triton.runtime.interpreter.TensorHandle")

    def on_host(function: Callable[..., Tensor], result: Any = None) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            first = next(arg for arg in args if isinstance(arg, tl.tensor))
            given = (torch.from_numpy(np.array(a.handle.data)) if isinstance(a, tl.tensor) else a for a in args)
            dtype = result or first.type.scalar
            data = function(*given).numpy().astype(np.int32 if result else first.handle.data.dtype)
            shape = first.type.get_block_shapes() if first.type.is_block() else None
            return tl.tensor(handle(data, dtype), tl.block_type(dtype, shape) if shape else dtype)

        return call

    same = {name: on_host(getattr(torch, name)) for name in _SAME_NAME}
    other = {name: on_host(function) for name, function in _OTHER_NAME.items()}
    tests = {name: on_host(getattr(torch, name), tl.int32) for name in ("isnan", "isinf", "signbit")}
    return SimpleNamespace(**same, **other, **tests)


_SAME_NAME = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh", "erf"),
    *("erfc", "exp", "exp2", "expm1", "floor", "fmod", "hypot", "lgamma", "log", "log10", "log1p", "log2", "pow"),
    *("rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
_OTHER_NAME: dict[str, Callable[..., Tensor]] = {
    "erfinv": torch.erfinv,
    "fast_expf": torch.exp,
    "nearbyint": torch.round,
    "rint": torch.round,
    "sqrt_rn": torch.sqrt,
    "div_rn": torch.div,
}
