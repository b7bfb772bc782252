"""torch's autograd engine and grad mode without the checks of their public functions.

`torch.autograd.grad` checks its arguments, and `torch.enable_grad` prepares to be a decorator. In a step of a small
network the two cost as much as a layer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd


try:  # private: what `torch.autograd.grad` and `Tensor.backward` call, and what that calls after it has copied the
    # context to the engine's threads, which the CPU does not need
    from torch.autograd.graph import _engine_run_backward as _run_backward

    _run_on_cpu = torch.autograd.Variable._execution_engine.run_backward
except (ImportError, AttributeError):  # pragma: no cover
    _run_backward = _run_on_cpu = None


_PLAIN = (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
"""`__torch_function__` of tensors, and of subclasses that torch's functions take like tensors."""


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of a real 0-d loss that has a graph, `None` for leaves that it does not reach."""
    # By types: `has_torch_function` is true in every mode, and the public function would leave the mode while the
    # backward pass runs, in which layers may be computed again.
    kinds = {type(loss), *map(type, leaves)}
    is_plain = loss.is_floating_point() and all(kind.__torch_function__ in _PLAIN for kind in kinds - {Tensor})
    run = _run_on_cpu if loss.is_cpu else _run_backward
    if run is None or not is_plain or torch.compiler.is_compiling():
        return torch.autograd.grad(loss, leaves, allow_unused=True)
    # By position: grad_outputs, retain_graph, create_graph, inputs, allow_unused.
    return run((loss,), (torch.ones_like(loss),), False, False, tuple(leaves), True, accumulate_grad=False)


def graph_of(*tensors: Tensor) -> Iterator[Any]:
    """Yield each node of the graph of these tensors once."""
    waiting, known = [tensor.grad_fn for tensor in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def is_in_backward() -> bool:
    """Return whether autograd's engine runs the caller, in a backward pass."""
    return torch._C._current_graph_task_id() != -1


class GradMode:
    """Context manager that sets whether operations are recorded, as `torch.set_grad_enabled` does."""

    __slots__ = ("_before", "_mode")

    def __init__(self, mode: bool) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._mode)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self._before)


def saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the innermost hooks of saved tensors (pack, unpack), by which activation checkpointing works."""
    return _autograd._top_saved_tensors_default_hooks(True)
