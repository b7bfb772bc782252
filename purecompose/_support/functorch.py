"""Queries and settings of transforms of `torch.func` and of tracing for which torch has no public functions.

Everything here is private in torch. Without it the queries would answer as outside of transforms, so that steps run
eagerly, and `vmap`, `grad` and tracing of steps would have to be refused.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
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
from torch.utils._python_dispatch import _disable_current_modes


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

    torch refuses it there, although `torch.autograd.grad` differentiates with respect to tensors that were made within
    the innermost gradient, as in a gradient penalty.
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
