"""Open sizes: a graph that serves batches of any number of examples.

The number is a symbol while tracing. What the trace had to assume about it (that it is at least 2, that a division
leaves no rest) is kept, and asked before a batch of another size is let in.
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
    """Return how many examples the batch has, as far as its signature tells: the first leading dimension."""
    return next((spec.shape[0] for spec in signatures["batch"].specs if spec.shape), 0)


def opened(signature: Signature, size: int) -> Signature:
    """Return the signature with this leading dimension left out, for comparing."""
    return signature.with_specs(
        [spec._replace(shape=(-1, *spec.shape[1:])) if _has(spec, size) else spec for spec in signature.specs]
    )


def _has(spec: Spec, size: int) -> bool:
    """Return whether a tensor's leading dimension is the number of examples, and the outermost in memory."""
    return len(spec.shape) > 0 and spec.shape[0] == size and all(spec.stride[0] >= stride for stride in spec.stride)


class Size:
    """The open number of examples in one graph."""

    def __init__(self, mode: FakeTensorMode, example: int) -> None:
        """Make the symbol; `example` is a size that will come."""
        symbolic = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        source = importlib.import_module("torch._dynamo.source").ConstantSource("num_examples")
        assert mode.shape_env is not None
        self._env = mode.shape_env
        self._symbol: Any = self._env.create_symbol(example, source=source, dynamic_dim=symbolic.DimDynamic.DYNAMIC)
        self.example = example
        self._node = self._env.create_symintnode(self._symbol, hint=example, source=source)

    def empty(self, spec: Spec) -> Tensor:
        """Return a tensor of a signature, with the number of examples left open."""
        if not _has(spec, self.example):
            return spec.empty()
        shape = (self._node, *spec.shape[1:])
        return torch.empty_strided(shape, spec.stride, dtype=spec.dtype, device=spec.device)

    def allows(self, size: int) -> bool:
        """Return whether the graph is right for a number of examples."""
        bounds = self._env.var_to_range[self._symbol]
        if not max(2, bounds.lower) <= size <= bounds.upper:
            return False
        return all(bool(guard.expr.subs(self._symbol, size)) for guard in self._env.guards)

    def settle(self, signature: Signature, size: int) -> Signature:
        """Return a signature that the graph leaves, for a number of examples."""

        def number(value: Any) -> int:
            return int(value.node.expr.subs(self._symbol, size)) if isinstance(value, torch.SymInt) else value

        specs = [
            spec._replace(shape=torch.Size(map(number, spec.shape)), stride=tuple(map(number, spec.stride)))
            for spec in signature.specs
        ]
        return signature.with_specs(specs)
