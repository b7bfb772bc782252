"""Open sizes: one graph for batches of any number of examples.

The number is a symbol while tracing. Assumptions that the trace made about it (that it is at least 2, that a division
has no remainder) are kept, and checked before the graph is used for a batch of another size.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from purecompose.transforms.signature import Signature, Spec


__all__ = ["OPEN_FIELDS", "Size", "opened", "size_of"]

OPEN_FIELDS = ("batch", "outputs")
"""The fields whose leading dimensions may be left open."""


def size_of(signatures: Mapping[str, Signature]) -> int:
    """Return the number of examples in the batch according to its signature: the first leading dimension."""
    return next((spec.shape[0] for spec in signatures["batch"].specs if spec.shape), 0)


def opened(signature: Signature, size: int) -> Signature:
    """Return the signature with leading dimensions of this size replaced by -1, for comparisons."""
    return signature.with_specs(
        [spec._replace(shape=(-1, *spec.shape[1:])) if _has(spec, size) else spec for spec in signature.specs]
    )


def _has(spec: Spec, size: int) -> bool:
    """Return whether a tensor's leading dimension is the number of examples, and the outermost in memory."""
    return len(spec.shape) > 0 and spec.shape[0] == size and all(spec.stride[0] >= stride for stride in spec.stride)


class Size:
    """The open number of examples in one graph."""

    def __init__(self, mode: FakeTensorMode, example: int) -> None:
        """Create the symbol; `example` is the size of the batch being traced."""
        symbolic = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        source = importlib.import_module("torch._dynamo.source").ConstantSource("num_examples")
        assert mode.shape_env is not None
        self._env = mode.shape_env
        self._symbol: Any = self._env.create_symbol(example, source=source, dynamic_dim=symbolic.DimDynamic.DYNAMIC)
        self.example = example
        self._node = self._env.create_symintnode(self._symbol, hint=example, source=source)

    def empty(self, spec: Spec) -> Tensor:
        """Return a tensor of a spec, with the number of examples left open."""
        if not _has(spec, self.example):
            return spec.empty()
        shape = (self._node, *spec.shape[1:])
        return torch.empty_strided(shape, spec.stride, dtype=spec.dtype, device=spec.device)

    def allows(self, size: int) -> bool:
        """Return whether the graph is valid for a number of examples."""
        bounds = self._env.var_to_range[self._symbol]
        if not max(2, bounds.lower) <= size <= bounds.upper:
            return False
        return all(bool(guard.expr.subs(self._symbol, size)) for guard in self._env.guards)

    def settle(self, signature: Signature, size: int) -> Signature:
        """Return the signature of a result of the graph for a given number of examples."""

        def number(value: Any) -> int:
            return int(value.node.expr.subs(self._symbol, size)) if isinstance(value, torch.SymInt) else value

        specs = [
            spec._replace(shape=torch.Size(map(number, spec.shape)), stride=tuple(map(number, spec.stride)))
            for spec in signature.specs
        ]
        return signature.with_specs(specs)
