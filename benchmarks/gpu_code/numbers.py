"""The numbers of a step's GPU code, run on the CPU, against those of the eager step.

The step is a compiled one: its own code calls the graphs, in donated buffers that the next step reads, so that a wrong
order or two values in the same memory show in the results. Both sides take several steps from the same state, with the
same keys and batches.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.gpu_code.graphs import compiling_for_gpu
from purecompose import State, Step
from purecompose.transforms.compilation.backends import Compiled
from purecompose.transforms.signature import LASTING, Signature


FIELDS = (*LASTING, "key", "loss", "metrics")


def largest(
    eager: Step,
    compiled: Step,
    state: State,
    batches: Iterable[Any],
    compile_: Callable[[fx.GraphModule], Compiled],
    *,
    is_half: bool,
) -> dict[str, float]:
    """Return for each field of the state the largest difference between GPU code and eager step, over all steps.

    In half precision, rounding moves the argument of a ReLU across zero, or changes what is left of two numbers that
    are nearly equal, so that the numbers of two correct steps differ as a step in half precision differs from one in
    float32. There a difference is a share of what is allowed (`allowed`), and after each step the numbers of the eager
    one are written into the memory of the other, so that differences do not grow from step to step.

    Args:
        eager: The step as composed.
        compiled: The same step, compiled.
        state: The state at the start of both.
        batches: A batch for each step.
        compile_: What makes GPU code of a graph and runs it.
        is_half: Whether numbers are rounded to half precision.
    """
    found = dict.fromkeys(FIELDS, 0.0)
    own = state
    with compiling_for_gpu(compile_):
        for batch in batches:
            before, full = state, eager(state.replace(precision="fp32"), batch) if is_half else state
            own, state = compiled(own, batch), eager(state, batch)
            for name in FIELDS:
                a, b, c, d = (Signature.of(getattr(one, name))[1] for one in (own, state, before, full))
                rounded = _finite(max(map(difference, d, b), default=0.0)) if len(d) == len(b) else 0.0
                for place, (ours, theirs) in enumerate(zip(a, b, strict=True)):
                    measured = difference(ours, theirs)
                    if is_half and measured < float("inf"):
                        old = c[place] if len(c) == len(b) else theirs
                        measured /= allowed(theirs, old, rounded, computed_in_half=name in ("loss", "metrics"))
                        ours.detach().copy_(theirs)
                    found[name] = max(found[name], measured)
    return found


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors.

    That of floats is relative to the largest number of the second tensor, if that is above 1; other tensors, such as
    keys and counts, differ by 0 or by infinity.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.dtype.is_floating_point:
        return 0.0 if torch.equal(a, b) else float("inf")
    a, b = a.detach(), b.detach()
    differs = (a != b) & ~(a.isnan() & b.isnan())
    if not differs.any():
        return 0.0
    found = float(((a - b)[differs].abs() / _scale(b)).max())
    return float("inf") if found != found else found


def _scale(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


def allowed(new: Tensor, old: Tensor, rounded: float, *, computed_in_half: bool) -> float:
    """Return the difference, as `difference` measures it, that rounding in half precision explains.

    It is the largest of: twice what the step in half precision differs from one in float32; a tenth of the change in
    the step; and two ulps of half precision, for numbers stored or computed in it, or else of single precision.

    Args:
        new: The tensor after the step.
        old: The tensor before it.
        rounded: The largest difference of a tensor of the same field from a step in float32.
        computed_in_half: Whether it is a result of the forward pass.
    """
    is_half = new.element_size() < 4 or computed_in_half
    return max(2.0**-6 if is_half else 2.0**-21, 0.1 * _finite(difference(old, new)), 2 * rounded)


def _finite(number: float) -> float:
    return number if number < float("inf") else 0.0
