"""Values that exist and cannot be read.

A `match` sees a view of the state with time, static facts, and tensors with shapes and no values. After a batch has run
in parts, the outputs are sealed: only those of the last part are there.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from purecompose import tree
from purecompose.core.state import State
from purecompose.time import Timestamp


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
        self._state = state
        self._batch = batch
        self.timestamp: Timestamp = timestamp

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state.replace(batch=self._batch), name)
        if inspect.ismethod(value):
            raise ValueReadError(f"state.{name}(...)", "the result")
        return value if name in _STATIC else _sealed(f"state.{name}", value)


class _Sealed:
    """A placeholder for a value that cannot be read."""

    def _refuse(self, what: str, by: str = "") -> Any:
        """Raise because `what` was read, by torch's function of that name if there is one."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that numpy, copy and others look up before they read
            raise AttributeError(name)
        self._refuse(name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise for torch functions of a sealed value, such as `torch.any(sealed)`."""
        del types
        given = tree.leaves((args, kwargs or {}), is_leaf=lambda node: isinstance(node, cls))
        return next(leaf for leaf in given if isinstance(leaf, cls))._refuse("the result", func.__name__)

    def _refuse_value(self, *_: Any) -> Any:
        self._refuse("the value")

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __getitem__ = __iter__ = __array__ = _refuse_value
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse_value  # pyright: ignore
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_value
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = _refuse_value
    __rmatmul__ = __neg__ = __abs__ = __invert__ = __round__ = _refuse_value
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse_value
    __hash__ = None  # pyright: ignore


class SealedTensor(_Sealed):
    """A placeholder for a tensor: shape, dtype and device can be read, values cannot."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self._path, self._tensor = path, tensor

    def __len__(self) -> int:
        return len(self._tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name) if name in _FORM else super().__getattr__(name)

    def _refuse(self, what: str, by: str = "") -> Any:
        raise ValueReadError(f"torch.{by}({self._path})" if by else self._path, what)


class SealedOutputs(_Sealed):
    """A placeholder for the outputs after a batch has run in several parts, of which the last part's would be left.

    It is a pytree node without leaves, so that it passes through transforms.
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts

    def _refuse(self, what: str, by: str = "") -> Any:
        del what, by
        raise RuntimeError(
            f"state.outputs was read after the batch has run in {self.num_parts} parts (slices or processes), where it "
            "would be that of the last part only, beside the whole batch. Read it within each part, from AFTER_FORWARD "
            "to AFTER_BACKWARD; or run the network on the whole batch again, state.forward(state.inputs)"
        )

    def __len__(self) -> int:
        return self._refuse("the value")

    def __repr__(self) -> str:
        return f"SealedOutputs(num_parts={self.num_parts})"


tree.register_node(
    SealedOutputs, lambda sealed: ((), (), sealed.num_parts), lambda names, children, static: SealedOutputs(static)
)


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
