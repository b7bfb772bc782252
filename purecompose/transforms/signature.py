"""The signature of a value: everything about it except the numbers in its tensors.

Compiled code runs without guards, so everything it was built for must be known: the containers, the constants
among the leaves, and each tensor's shape, strides, dtype and device.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.objects import fingerprint
from purecompose._support.shards import Place, local, place_of, placed
from purecompose.batch.fields import is_graphs, without_records


class Spec(NamedTuple):
    """The properties of a tensor on which compiled code relies."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device

    def empty(self) -> Tensor:
        """Return an uninitialised tensor with these properties."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def spec_of(tensor: Tensor) -> Spec:
    """Return the spec of a tensor."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"expected a dense tensor, got one with layout {tensor.layout}; to_dense() makes it one")
    return Spec(tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


def as_it_lies(tensor: Tensor) -> Tensor:
    """Return the tensor with a lazy sign or conjugation applied, so that its memory contains its numbers."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_neg() or tensor.is_conj() else tensor


class Signature:
    """A value without its numbers; signatures compare and hash.

    Attributes:
        specs: The specs of the tensors, in order.
    """

    __slots__ = ("specs", "_structure", "_build", "_hash")

    def __init__(self, specs: tuple[Spec, ...], structure: Hashable, build: Callable[[list[Tensor]], Any]) -> None:
        """Use `Signature.of` instead."""
        self.specs, self._structure, self._build = specs, structure, build
        self._hash: int | None = None  # computed on demand: symbolic sizes cannot be hashed

    @classmethod
    def of(cls, value: Any) -> tuple["Signature", list[Tensor]]:
        """Return the signature of a value, and its tensors."""
        leaves, treespec = tree.flatten(value)
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            places = tuple(map(place_of, leaves))
            if any(places):
                return cls._of_shards(leaves, treespec, places)
            leaves = list(map(as_it_lies, leaves))
            return cls(tuple(map(spec_of, leaves)), treespec, lambda new: tree.unflatten(treespec, new)), leaves
        # Constants, and objects that the registries do not know, such as a batch's dataclass.
        value = tree.map(lambda leaf: without_records(leaf) if is_graphs(leaf) else leaf, value)
        found = list(map(as_it_lies, batches.tensors(value)))
        template = batches.map_tensors(lambda _: _HOLE, value)
        if not found:
            return cls((), fingerprint(template), lambda _: value), found
        return cls(
            tuple(map(spec_of, found)), fingerprint(template), lambda new: batches.with_tensors(value, new)
        ), found

    @classmethod
    def _of_shards(
        cls, leaves: list[Tensor], treespec: Any, places: tuple[Place | None, ...]
    ) -> tuple["Signature", list[Tensor]]:
        """Return the signature of tensors of which some are divided among processes, and this process's rows."""
        with torch.no_grad():  # otherwise each call would return new views
            own = [as_it_lies(local(leaf)) for leaf in leaves]

        def build(tensors: list[Tensor]) -> Any:
            return tree.unflatten(treespec, map(placed, tensors, places))

        return cls(tuple(map(spec_of, own)), (treespec, places), build), own

    def build(self, tensors: list[Tensor]) -> Any:
        """Return the value of this signature with these tensors."""
        return self._build(tensors)

    def with_specs(self, specs: Iterable[Spec]) -> "Signature":
        """Return the signature of the same containers around other tensors."""
        return Signature(tuple(specs), self._structure, self._build)

    def is_alike(self, other: "Signature") -> bool:
        """Return whether the signatures are equal except for strides."""
        return self._structure == other._structure and [spec._replace(stride=()) for spec in self.specs] == [
            spec._replace(stride=()) for spec in other.specs
        ]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Signature)
            and hash(self) == hash(other)
            and self.specs == other.specs
            and self._structure == other._structure
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.specs, self._structure))
        return self._hash


class _Hole:
    """A placeholder for a tensor."""


_HOLE = _Hole()
ABSENT, _ = Signature.of(None)
"""The signature of a field that is `None`."""
