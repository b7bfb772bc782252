"""The view of a state that a `match` may see: time, static facts, and tensors with shapes and no values."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from purecompose import tree
from purecompose.core.state import State
from purecompose.time import Timestamp


__all__ = ["SealedState", "ValueReadError"]

_STATIC = frozenset({"static", "context", "model", "optimizer", "device"})
"""The attributes of a state that hold no tensors."""
_FORM = frozenset(
    {"shape", "size", "dim", "ndim", "numel", "stride", "dtype", "device", "requires_grad", "is_floating_point"}
)
"""The attributes of a tensor that do not depend on its values."""


class ValueReadError(Exception):
    """A value was read that is not known before the step; the arguments are its path and a description of it."""


class SealedState:
    """A state at the time of an event, whose tensors are sealed."""

    def __init__(self, state: State, batch: Any, timestamp: Timestamp) -> None:
        self._state, self._batch, self.timestamp = state, batch, timestamp

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state.replace(batch=self._batch), name)
        if inspect.ismethod(value):
            raise ValueReadError(f"state.{name}(...)", "the result")
        return value if name in _STATIC else _sealed(f"state.{name}", value)


class SealedTensor:
    """A placeholder for a tensor: shape, dtype and device can be read, values cannot."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self._path, self._tensor = path, tensor

    def __len__(self) -> int:
        return len(self._tensor)

    def __getattr__(self, name: str) -> Any:
        if name in _FORM:
            return getattr(self._tensor, name)
        if name.startswith("__"):  # protocols that numpy, copy and others look up before they read
            raise AttributeError(name)
        raise ValueReadError(self._path, name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise for torch functions of a sealed tensor, such as `torch.any(sealed)`."""
        del types
        found = (leaf for leaf in tree.leaves((args, kwargs or {})) if isinstance(leaf, cls))
        raise ValueReadError(f"torch.{func.__name__}({next(found)._path})", "the result")

    def _refuse(self, *_: Any) -> Any:
        raise ValueReadError(self._path, "the value")

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __getitem__ = __iter__ = __array__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # pyright: ignore
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = _refuse
    __rmatmul__ = __neg__ = __abs__ = __invert__ = __round__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __hash__ = None  # pyright: ignore


def _sealed(path: str, value: Any) -> Any:
    """Return the value with its tensors sealed, also those in dataclasses."""

    def seal(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return SealedTensor(path, leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        twin = copy.copy(leaf)  # a batch's dataclass may be frozen, and may check its fields when made
        for field in dataclasses.fields(leaf):
            object.__setattr__(twin, field.name, _sealed(f"{path}.{field.name}", getattr(leaf, field.name)))
        return twin

    leaves, treespec = tree.leaves_with_paths(value), tree.structure(value)
    return tree.unflatten(treespec, [seal(f"{path}{key}", leaf) for key, leaf in leaves.items()])
