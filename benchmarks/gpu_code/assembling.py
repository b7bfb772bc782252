"""Machine code of every Triton kernel, by the assembler that Triton ships, for several kinds of GPUs."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu_code.interpreting import executed, run_in_place_of_autotuner
from benchmarks.gpu_code.pretend import find
from benchmarks.gpu_code.writing import Code


TARGETS = (80, 90)
"""Compute capabilities of A100 and H100, times ten."""


class Assembled(NamedTuple):
    """A kernel that was assembled for a target, or was not."""

    kernel: str
    target: int
    error: str = ""


class _Kernel:
    """A Triton kernel with the configuration that Inductor would try first."""

    def __init__(self, fn: Any, *, configs: Sequence[Any], triton_meta: Any, **rest: Any) -> None:
        del rest
        self.fn, self.config, self.meta = fn, configs[0], triton_meta

    def assembled(self, name: str, target: int) -> Assembled:
        blocks = {key: value for key, value in self.config.kwargs.items() if key in self.fn.arg_names}
        constants, (attributes, *_) = {**self.meta["constants"], **blocks}, self.meta["configs"]
        source = find("triton.compiler.ASTSource")(self.fn, self.meta["signature"], constants, attributes)
        options = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        gpu = find("triton.backends.compiler.GPUTarget")("cuda", target, 32)
        try:
            find("triton.compile")(source, target=gpu, options=options)
        except Exception as error:
            return Assembled(name, target, f"{type(error).__name__}: {error}".splitlines()[0])
        return Assembled(name, target)


def assembled(codes: Iterable[Code]) -> list[Assembled]:
    """Assemble each kernel for each target; what fails has an error."""
    run_in_place_of_autotuner(_Kernel)
    kernels: dict[str, _Kernel] = {}
    for i, code in enumerate(codes):
        found = executed(code.source, f"code_{i}")
        kernels |= {f"{name} of code {i}": value for name, value in found.items() if isinstance(value, _Kernel)}
    return [kernel.assembled(name, target) for name, kernel in kernels.items() for target in TARGETS]
