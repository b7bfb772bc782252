"""Open sizes: one graph for batches of any number of examples, or with all their dimensions open.

An open size is a symbol while tracing. Assumptions that the trace made about it (that it is at least 2, that it is that
of a layer's features, that a division has no remainder) are kept, and checked before the graph is used for a batch of
other sizes. With all dimensions open, each has a symbol of its own: that two sizes are equal is assumed only once an
operation needs it.
"""

import importlib
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from purecompose._support.internals import FakeTensorMode
from purecompose.core.context import Layout
from purecompose.transforms.compilation.inductor import constant_source
from purecompose.transforms.signature import Signature, Spec


OPEN_FIELDS = ("batch", "outputs")
"""The fields whose dimensions may be left open."""


def size_of(signatures: Mapping[str, Signature], layout: Layout) -> int:
    """Return the number of examples in the batch according to its signature; 0 if they are not rows."""
    signature = signatures["batch"]
    batch = signature.build([torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in signature.specs])
    try:
        return layout.num_examples(batch) if layout.has_rows(batch) else 0
    except ValueError:  # no batch, or an algorithm has replaced it
        return 0


def can_open(signatures: Mapping[str, Signature], layout: Layout, *, is_all: bool) -> bool:
    """Return whether a batch has a size that can be left open; torch treats sizes 0 and 1 as constants."""
    if is_all:
        return any(_open_dims(spec, None) for spec in signatures["batch"].specs)
    return size_of(signatures, layout) >= 2


def opened(signature: Signature, size: int | None) -> Signature:
    """Return the signature with open dimensions replaced by -1, for comparisons.

    Args:
        signature: The signature of a field.
        size: The number of examples: leading dimensions of this size are open; `None` if all dimensions are.
    """
    return signature.with_specs([_opened(spec, size) for spec in signature.specs])


def _opened(spec: Spec, size: int | None) -> Spec:
    dims = _open_dims(spec, size)
    shape = [-1 if dim in dims else length for dim, length in enumerate(spec.shape)]
    return spec._replace(shape=tuple(shape), stride=() if size is None and _is_contiguous(spec) else spec.stride)


def _open_dims(spec: Spec, size: int | None) -> range | tuple[int, ...]:
    """Return the dimensions of a tensor that are open; see `opened` for `size`."""
    if size is None and _is_contiguous(spec):
        return tuple(dim for dim, length in enumerate(spec.shape) if length >= 2)
    # Strides do not depend on the size of the dimension that is outermost in memory.
    has_rows = len(spec.shape) > 0 and (spec.shape[0] >= 2 if size is None else spec.shape[0] == size)
    return range(has_rows and all(spec.stride[0] >= stride for stride in spec.stride))


def _is_contiguous(spec: Spec) -> bool:
    """Return whether a tensor has the strides that `torch.empty` gives to its shape."""
    steps = itertools.accumulate([1, *(max(length, 1) for length in spec.shape[:0:-1])], lambda a, b: a * b)
    return not spec.shape or tuple(spec.stride) == tuple(steps)[::-1]


class Sizes:
    """The open sizes of one graph."""

    def __init__(
        self, mode: FakeTensorMode, signatures: Mapping[str, Signature], layout: Layout, *, is_all: bool
    ) -> None:
        """Create a symbol for the number of examples, or with `is_all` for each dimension, of a batch that is being
        traced.
        """
        assert mode.shape_env is not None
        self._env, self._is_all, self._layout = mode.shape_env, is_all, layout
        self._examples = self._size(signatures)
        self._symbols: dict[tuple[str, int, int], Any] = {}
        """Symbols by field, tensor and dimension."""
        self._nodes: dict[Any, Any] = {}
        for name in OPEN_FIELDS:
            for place, length in self._lengths(name, signatures[name], self._examples).items():
                shared = None if is_all else next(iter(self._symbols.values()), None)
                self._symbols[place] = self._symbol(length, "_".join(map(str, place))) if shared is None else shared

    def empty(self, field: str, index: int, spec: Spec) -> Tensor:
        """Return a tensor of a spec at a place in the state, with its open sizes."""
        symbols = [self._symbols.get((field, index, dim)) for dim in range(len(spec.shape))]
        shape = [n if symbol is None else self._nodes[symbol] for n, symbol in zip(spec.shape, symbols, strict=True)]
        if self._is_all and _is_contiguous(spec):
            return torch.empty(shape, dtype=spec.dtype, device=spec.device)
        return torch.empty_strided(shape, spec.stride, dtype=spec.dtype, device=spec.device)

    def fits(self, name: str, signature: Signature, signatures: Mapping[str, Signature]) -> bool:
        """Return whether a field has the signature of the trace, up to open sizes."""
        return opened(signatures[name], self._size(signatures)) == opened(signature, self._examples)

    def allows(self, signatures: Mapping[str, Signature]) -> bool:
        """Return whether the assumptions of the trace hold for fields that fit."""
        values = self._values(signatures)
        for symbol, value in values.items():
            bounds = self._env.var_to_range[symbol]
            if not max(2, bounds.lower) <= value <= bounds.upper:
                return False
        guards = [guard.expr.xreplace(values) for guard in self._env.guards]
        # A guard on the size of a field that the graph does not read is not known, and does not matter.
        return all(bool(guard) for guard in guards if not guard.free_symbols)

    def settle(self, signature: Signature, signatures: Mapping[str, Signature]) -> Signature:
        """Return the signature of a result of the graph for given fields."""
        values = self._values(signatures)

        def number(value: Any) -> int:
            found: Any = value.node.expr.xreplace(values) if isinstance(value, torch.SymInt) else value
            return int(found)

        specs = [
            spec._replace(shape=torch.Size(map(number, spec.shape)), stride=tuple(map(number, spec.stride)))
            for spec in signature.specs
        ]
        return signature.with_specs(specs)

    def describe(self, name: str, signature: Signature) -> list[tuple[Any, ...]]:
        """Return the shapes of a field, with "n" for sizes that the trace left open."""
        shapes: list[list[Any]] = [list(spec.shape) for spec in signature.specs]
        for (field, index, dim), symbol in self._symbols.items():
            if field == name and not self._env.simplify(symbol).is_number:
                shapes[index][dim] = "n"
        return list(map(tuple, shapes))

    def _size(self, signatures: Mapping[str, Signature]) -> int | None:
        return None if self._is_all else size_of(signatures, self._layout)

    def _lengths(self, name: str, signature: Signature, size: int | None) -> dict[tuple[str, int, int], int]:
        specs = enumerate(signature.specs)
        return {(name, i, dim): spec.shape[dim] for i, spec in specs for dim in _open_dims(spec, size)}

    def _values(self, signatures: Mapping[str, Signature]) -> dict[Any, Any]:
        size, sympy = self._size(signatures), importlib.import_module("sympy")
        return {
            self._symbols[place]: sympy.Integer(length)
            for name in OPEN_FIELDS
            for place, length in self._lengths(name, signatures[name], size).items()
            if place in self._symbols
        }

    def _symbol(self, length: int, name: str) -> Any:
        symbolic = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        source = constant_source(f"size_{name}")
        symbol = self._env.create_symbol(length, source=source, dynamic_dim=symbolic.DimDynamic.DYNAMIC)
        self._nodes[symbol] = self._env.create_symintnode(symbol, hint=length, source=source)
        return symbol
