"""The numbers of a step's GPU code, run on the CPU, against those of the eager step.

The step is a compiled one: its own code calls the graphs, in donated buffers that the next step reads, so that a wrong
order or two values in the same memory show in the results. Both sides take several steps from the same state, with the
same keys and batches.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

import purecompose as pc
from benchmarks.gpu_code.cases import Case, ours
from benchmarks.gpu_code.graphs import Graph, compiling_for_gpu
from benchmarks.gpu_code.interpreting import load
from benchmarks.gpu_code.writing import code_of
from purecompose import State, Step
from purecompose.transforms.compilation.backends import Compiled
from purecompose.transforms.donation import LASTING
from purecompose.transforms.signature import Signature


def interpreted(graph: fx.GraphModule) -> Compiled:
    """Return the function of a graph's GPU code, run on the CPU."""
    return load(code_of(Graph("part", graph, True)).source)


def differences(
    case: Case,
    methods: str,
    num_steps: int = 3,
    compile_: Callable[[fx.GraphModule], Compiled] = interpreted,
) -> dict[str, float]:
    """Return the largest differences between GPU code and eager step of a case, as `largest` finds them.

    Args:
        case: The network with its batch.
        methods: The methods of the step.
        num_steps: Number of steps.
        compile_: What makes GPU code of a graph and runs it.
    """
    step, state = ours(case, methods)
    batches = [tuple(tensor.roll(number, 0) for tensor in case.batch) for number in range(num_steps)]
    return largest(step, pc.compile(step, quiet=True), state, batches, compile_)


def largest(
    eager: Step,
    compiled: Step,
    state: State,
    batches: Iterable[Any],
    compile_: Callable[[fx.GraphModule], Compiled] = interpreted,
) -> dict[str, float]:
    """Return for each field of the state the largest difference between GPU code and eager step, over all steps.

    A difference of floats is relative to the largest number of the tensor, if that is above 1; other tensors, such as
    keys and counts, differ by 0 or by infinity.

    Args:
        eager: The step as composed.
        compiled: The same step, compiled.
        state: The state at the start of both.
        batches: A batch for each step.
        compile_: What makes GPU code of a graph and runs it.
    """
    found = dict.fromkeys(_FIELDS, 0.0)
    own = state
    with compiling_for_gpu(compile_):
        for batch in batches:
            own, state = compiled(own, batch), eager(state, batch)
            found = _larger(found, own, state)
    return found


def largest_of_half(
    eager: Step, compiled: Step, state: State, batches: Iterable[Any], compile_: Callable[[fx.GraphModule], Compiled]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the differences of `largest` for steps in half precision, and those of eager steps to float32.

    Rounding moves the argument of a ReLU across zero, or changes what is left of two numbers that are nearly equal, so
    that the numbers of two correct steps differ by as much as a step in half precision differs from one in float32.
    After each step the numbers of the eager one are written into the memory of the other, so that differences do not
    grow from step to step.
    """
    found, rounding = dict.fromkeys(_FIELDS, 0.0), dict.fromkeys(_FIELDS, 0.0)
    own = state
    with compiling_for_gpu(compile_):
        for batch in batches:
            full = state.replace(precision="fp32")
            own, full, state = compiled(own, batch), eager(full, batch), eager(state, batch)
            found, rounding = _larger(found, own, state), _larger(rounding, full, state)
            for name in found:
                for a, b in zip(*(Signature.of(getattr(one, name))[1] for one in (own, state)), strict=True):
                    a.detach().copy_(b)
    return found, rounding


_FIELDS = (*LASTING, "key", "loss", "metrics")


def _larger(found: dict[str, float], own: State, state: State) -> dict[str, float]:
    return {
        name: max(
            [
                found[name],
                *map(difference, *(Signature.of(getattr(one, name))[1] for one in (own, state))),
            ]
        )
        for name in found
    }


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, as `differences` measures it."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.dtype.is_floating_point:
        return 0.0 if torch.equal(a, b) else float("inf")
    a, b = a.detach(), b.detach()
    differs = (a != b) & ~(a.isnan() & b.isnan())
    if not differs.any():
        return 0.0
    scale = b[b.isfinite()].abs().max().clamp(min=1) if b.isfinite().any() else 1
    found = float(((a - b)[differs].abs() / scale).max())
    return float("inf") if found != found else found
