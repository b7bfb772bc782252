"""What torch has no public functions for: queries of transforms of `torch.func` and of tracing, its autograd engine
without the checks of the public functions, and functions that Dynamo, the tracer of `torch.compile`, does not trace.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _autograd
from torch._C._functorch import (  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    TransformType,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    peek_interpreter_stack,
)
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    UnsupportedFakeTensorException as UnsupportedFakeTensorException,
    UnsupportedOperatorException as UnsupportedOperatorException,
    unset_fake_temporarily as unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


try:  # private: what `torch.autograd.grad` and `Tensor.backward` call, and what that calls after it has copied the
    # context to the engine's threads, which the CPU does not need
    from torch.autograd.graph import _engine_run_backward as _run_backward

    _run_on_cpu = torch.autograd.Variable._execution_engine.run_backward
except (ImportError, AttributeError):  # pragma: no cover
    _run_backward = _run_on_cpu = None
try:
    _dynamo: Any = importlib.import_module("torch._C._dynamo.eval_frame")
except ImportError:  # a private module, which a later version may not have: Dynamo then traces these functions
    _dynamo = None


Fn = TypeVar("Fn", bound=Callable[..., Any])

OpOverload = type(torch.ops.aten.add.Tensor)
"""The type of torch's operations."""


def is_transforming() -> bool:
    """Return whether `grad`, `vmap` or another transform is active around the caller."""
    return peek_interpreter_stack() is not None


def levels() -> str:
    """Return a letter for each transform around the caller, from the outermost: v(map), g(rad), j(vp) or o(ther)."""
    found = (level.key() for level in retrieve_all_functorch_interpreters())
    return "".join(_LETTERS.get(key, "o") for key in found)


_LETTERS = {TransformType.Vmap: "v", TransformType.Grad: "g", TransformType.Jvp: "j"}


def only_maps() -> bool:
    """Return whether no transform other than `vmap` is active around the caller."""
    return set(levels()) <= {"v"}


# torch.compile evaluates it while tracing, under the active transforms, and keeps the result as a constant. The public
# decorator for this imports the compiler.
only_maps._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def is_watched() -> bool:
    """Return whether a mode sees the operations of the caller, as while a step is traced."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is fake (without numbers), as while a step is traced, also inside transforms."""
    return isinstance(unwrapped(tensor), FakeTensor)


def is_plain(tensor: Tensor) -> bool:
    """Return whether an operation on a tensor runs at once on its numbers: eager, outside transforms and modes."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and peek_interpreter_stack() is None
        and not is_watched()
        and not tensor.is_meta
    )


def is_readable(tensor: Tensor) -> bool:
    """Return whether the host can read a tensor at once: on the CPU and plain."""
    return tensor.device.type == "cpu" and is_plain(tensor)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers that `unwrapped` can read."""
    plain = unwrapped(tensor)
    return not (plain.is_meta or isinstance(plain, FakeTensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor inside transforms, under `vmap` those of all members."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_tracked(tensor: Tensor) -> bool:
    """Return whether a tensor depends on what the caller is differentiated by."""
    while is_functorch_wrapped_tensor(tensor):
        if is_gradtrackingtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return tensor.requires_grad


def is_any(conditions: Tensor) -> bool:
    """Return whether a bool tensor holds anywhere, under `vmap` in any member."""
    return bool(unwrapped(conditions).any())


def allowing_requires_grad() -> AbstractContextManager[None]:
    """Return a context manager in which `requires_grad_()` works within a gradient of `torch.func`.

    torch refuses it there, although a gradient penalty, which differentiates a tensor made within, is correct.
    """
    return enable_inplace_requires_grad(True)


def without_modes() -> AbstractContextManager[Any]:
    """Return a context manager in which no mode sees operations, so that those on real tensors run while tracing."""
    return _disable_current_modes()


@contextmanager
def plainly() -> Iterator[None]:
    """Return a context manager for making tensors as if no transform, mode or `inference_mode` were active."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch(), _disable_current_modes(), torch.no_grad():
        yield


# The autograd engine. `torch.autograd.grad` checks its arguments, and `torch.enable_grad` prepares to be a decorator.
# In a step of a small network the two cost as much as a layer.


_PLAIN = (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
"""`__torch_function__` of tensors, and of subclasses that torch's functions take like tensors."""


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of a real 0-d loss that has a graph, `None` for leaves that it does not reach."""
    # By types: `has_torch_function` is true in every mode, and the public function would leave the mode while the
    # backward pass runs, in which layers may be computed again.
    kinds = {type(loss), *map(type, leaves)}
    takes_engine = loss.is_floating_point() and all(kind.__torch_function__ in _PLAIN for kind in kinds - {Tensor})
    run = _run_on_cpu if loss.is_cpu else _run_backward
    if run is None or not takes_engine or torch.compiler.is_compiling():
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


# Dynamo: `torch.compiler.disable` imports it, which takes two seconds, and its functions do not learn whether they are
# called within `torch.compile`.


get_eval_frame_callback: Callable[[], Any] = getattr(_dynamo, "get_eval_frame_callback", lambda: None)


def called_by_dynamo(reason: str) -> Callable[[Fn], Fn]:
    """Return a decorator for a function that Dynamo calls after a break of its graph.

    In the function `get_eval_frame_callback()` is not `None` if it is called within `torch.compile`. Dynamo would then
    trace the functions that it calls, unless they are called by `without_dynamo`. With `fullgraph=True`, Dynamo's error
    gives the reason.
    """

    def mark(fn: Any) -> Any:
        fn._torchdynamo_disable, fn._torchdynamo_disable_msg = True, reason
        if _dynamo is not None:
            skip = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
            _dynamo.set_code_exec_strategy(fn.__code__, skip)
        return fn

    return mark


@called_by_dynamo("it turns Dynamo off")
def without_dynamo(fn: Callable[[Any], Any]) -> Any:
    """Call `fn(backend)` with Dynamo turned off, where `backend` is that of the `torch.compile` around it."""
    callback = _dynamo.set_eval_frame(None)
    backend: Any = callback
    try:
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        return fn(backend)
    finally:
        _dynamo.set_eval_frame(callback)


class DispatchMode(TorchDispatchMode):
    """Base class of modes whose `__torch_dispatch__` Dynamo does not trace, without importing Dynamo, as torch does."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__torch_dispatch__ = called_by_dynamo("it watches operations")(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
