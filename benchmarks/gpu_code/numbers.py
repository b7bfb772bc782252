"""The numbers of a step's GPU code, run on the CPU, against those of the eager step.

Both take several steps from the same state, with the same keys and batches. Kernels write into donated buffers, which
the next step reads, so that a wrong order or two values in the same memory show in the results.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_code.cases import Case, ours
from benchmarks.gpu_code.graphs import Graph, captured_parts
from benchmarks.gpu_code.interpreting import load
from benchmarks.gpu_code.writing import code_of
from purecompose.transforms.compilation.boundary import FIELDS
from purecompose.transforms.donation import LASTING
from purecompose.transforms.signature import Signature


Values = dict[str, list[Tensor]]


def differences(case: Case, methods: str, num_steps: int = 3) -> dict[str, float]:
    """Return for each field of the state the largest difference between GPU code and eager step, over all steps.

    A difference of floats is relative to the largest number of the tensor, if that is above 1; other tensors, such as
    keys and counts, differ by 0 or by infinity.

    Raises:
        NotImplementedError: The step has several parts.
    """
    step, state = ours(case, methods)
    parts = captured_parts(step, state, case.batch)
    if len(parts) != 1:
        raise NotImplementedError(f"a step in {len(parts)} parts")
    (part,) = parts
    call = load(code_of(Graph("step", part.graph, True)).source)
    buffers = {name: [tensor.clone() for tensor in tensors_of(state, name)] for name in LASTING}
    found: dict[str, float] = {}
    for number in range(num_steps):
        batch = tuple(tensor.roll(number, 0) for tensor in case.batch)
        start = step.prepare(state, batch).start()
        values: Values = {name: tensors_of(start, name) for name in FIELDS} | buffers
        results = list(call([values[field][place] for field, place in (*part.takes, *part.targets)]))
        results = [result.clone() if i in part.copies else result for i, result in enumerate(results)]
        for name, (_, where) in part.writes.items():
            values[name] = [results[place] if not field else values[field][place] for field, place in where]
        buffers = {name: values[name] for name in LASTING}
        state = step(state, batch)
        for name in (*LASTING, "key", "loss"):
            pairs = zip(values[name], tensors_of(state, name), strict=True)
            found[name] = max([found.get(name, 0.0), *(difference(a, b) for a, b in pairs)])
    return found


def tensors_of(state: Any, name: str) -> list[Tensor]:
    """Return the tensors of a field of a state."""
    return Signature.of(getattr(state, name))[1]


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, as `differences` measures it."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.dtype.is_floating_point or not a.numel():
        return 0.0 if torch.equal(a, b) else float("inf")
    found = float(((a - b).abs().max() / b.abs().max().clamp(min=1)).detach())
    return float("inf") if found != found else found
