"""Context managers: several as one, values of context variables, distributions that do not check their arguments, and
those in which given tensors cannot be written into or moved to other memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from purecompose._support.internals import DispatchMode, unwrapped


_T = TypeVar("_T")
NOTHING: AbstractContextManager[None] = nullcontext()
"""A context manager that does nothing."""


def together(*scopes: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return one context manager for several; those that do nothing cost nothing."""
    active = [scope for scope in scopes if scope is not NOTHING]
    if len(active) < 2:
        return active[0] if active else NOTHING
    return _nested(active)


@contextmanager
def _nested(scopes: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        yield


@contextmanager
def during(variable: ContextVar[Any], value: _T) -> Iterator[_T]:
    """Return a scope in which a context variable has a value, which it yields."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextmanager
def unvalidated() -> Iterator[None]:
    """Return a scope in which distributions check their arguments only if they are made with `validate_args=True`.

    The check reads values, which fake tensors and those of several members do not have.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


class WriteGuard(DispatchMode):
    """A mode that raises before an operation writes into a tensor's memory, also through `.data`, a view or a tie.

    `error` returns the error to raise, from the name of the tensor and the operation.
    """

    def __init__(self, tensors: Mapping[str, Tensor], error: Callable[[str, Any], Exception]) -> None:
        super().__init__()
        self._names = {storage_of(tensor): name for name, tensor in tensors.items()}
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            written = [given.get(one.name) for one in schema.arguments if one.alias_info and one.alias_info.is_write]
            for tensor in tree_leaves(written):
                if isinstance(tensor, Tensor) and storage_of(tensor) in self._names:
                    raise self._error(self._names[storage_of(tensor)], func)
        return func(*args, **kwargs)


class DataGuard(TorchFunctionMode):
    """A mode that refuses `tensor.data = other`, which torch does not dispatch: a graph would keep the old value.

    `error` returns the error to raise for one of the tensors, from its name and what was done.
    """

    def __init__(self, tensors: Mapping[str, Tensor], error: Callable[[str, str], Exception]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `.to(device)` on a module assigns each tensor to itself.
        if func == _SET_DATA and memory_of(args[0]) != memory_of(args[1]):
            if id(args[0]) in self._names:
                raise self._error(repr(self._names[id(args[0])]), _BY_DATA)
            raise RuntimeError(
                "an assignment to `.data` of a fake tensor is recorded in no graph; write `self.name.copy_(value)`"
            )
        return func(*args, **(kwargs or {}))


_BY_DATA = "by assigning to its `.data`"
_SET_DATA = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def kept_in_place(tensors: Mapping[str, Tensor], error: Callable[[str, str], Exception]) -> Iterator[None]:
    """Return a context manager that raises if tensors have other memory or `requires_grad` at its end than before.

    They are restored first. `error` returns the error, from their names and what was done to them.
    """
    before = [(memory_of(tensor), tensor.detach(), tensor.requires_grad) for tensor in tensors.values()]
    moved, switched = [], []
    try:
        yield
    finally:
        for (name, tensor), (memory, alias, requires_grad) in zip(tensors.items(), before, strict=True):
            if memory_of(tensor) != memory:
                moved.append(name)
                tensor.data = alias
            if tensor.requires_grad is not requires_grad:
                switched.append(name)
                tensor.requires_grad_(requires_grad)
    for names, how in ((moved, _BY_DATA), (switched, "by switching its requires_grad")):
        if names:
            raise error(", ".join(map(repr, names)), how)


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the location of a tensor's elements in memory, and their layout there."""
    form = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    return storage_of(tensor), tensor.dtype, tensor.shape, tensor.is_conj(), tensor.is_neg(), *form


def storage_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors on the same memory; valid while one of them exists."""
    tensor = unwrapped(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
        return id(tensor)
