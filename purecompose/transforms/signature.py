"""What compiled code assumes of a state: signatures of values, donated buffers, and boundaries between parts.

Compiled code runs without guards, so everything it was built for must be known: the containers, the constants
among the leaves, and each tensor's shape, strides, dtype and device.

A step with donation writes the new parameters into the memory of the old ones. The state that it returns may read
these buffers until the next step, and has a `BufferLease` that knows whether this is still so. Reading a field returns
a copy, so that a tensor that was read never changes; reading it after the next step raises an error.
"""

import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.device import Place, local, place_of, placed
from purecompose._support.internals import plainly
from purecompose._support.objects import fingerprint
from purecompose.batch.fields import is_graphs, without_records
from purecompose.core.context import Static
from purecompose.core.values import fields_where
from purecompose.errors import SpentStateError
from purecompose.time import Timestamp


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


LASTING = fields_where(keeps_form=True)
"""Names of the fields that are kept in donated buffers."""


_SPENDING = threading.Lock()
"""Held while a step takes buffers over: two threads must not write into the same ones."""


class StateBuffers:
    """The memory in which successive states are stored, and a count of how often it was overwritten.

    Attributes:
        signatures: The signature of each lasting field.
        values: Each lasting field's tensors.
        is_donated: True if steps write into these tensors; if not, they may be returned without a copy.
        bound: For each compiled part that starts a step here, the arguments that it takes from the buffers.
    """

    __slots__ = ("signatures", "values", "is_donated", "bound", "generation", "reason")

    def __init__(self, signatures: dict[str, Signature], values: dict[str, list[Tensor]], *, is_donated: bool) -> None:
        """Take over the tensors; with `is_donated` nothing else may refer to them."""
        self.signatures, self.values, self.is_donated = signatures, values, is_donated
        self.bound: dict[Any, Any] = {}
        self.generation = 0
        self.reason: str | Timestamp = ""

    def spend(self, reason: str | Timestamp, held: int) -> int:
        """Forbid all states so far to read the buffers, and return the new generation.

        Of two threads whose states have the same generation, one succeeds.

        Args:
            reason: The time of the state that is there now, or the end of a sentence that begins with "its memory".
            held: The generation of the state that is given up.

        Raises:
            SpentStateError: The buffers are of another generation by now.
        """
        with _SPENDING:
            if held != self.generation:
                self.check(held)
            self.generation += 1
            self.reason = reason
            return self.generation

    def check(self, held: int) -> None:
        """Raise a `SpentStateError` if the buffers are of another generation by now."""
        if held == self.generation:
            return
        reason = self.reason
        if isinstance(reason, Timestamp):
            reason = f"was given to a compiled step, which wrote the state after batch {reason.batch} into it"
        raise SpentStateError(
            f"this state is spent: its memory {reason}. Use the state that the step returned. To step from one state "
            "more than once, give the step state.copy(), or use compile(step, donate=False). loss, metrics and "
            "timestamp can still be read"
        )


class BufferLease:
    """A state's right to read the buffers until the next step writes there; copies of the state share it."""

    __slots__ = ("buffers", "generation", "entry", "origin", "_issued")

    def __init__(self, buffers: StateBuffers, entry: Any, origin: tuple[Any, ...]) -> None:
        """Allow a state to read the buffers as they are now.

        Args:
            entry: The entry of the compiled step for states in these buffers; `None` in a host algorithm.
            origin: Key, loss, context and graph cache of the state, by which the step recognises it as unchanged.
        """
        self.buffers, self.generation, self.entry, self.origin = buffers, buffers.generation, entry, origin
        self._issued: dict[str, tuple[Any, list[Tensor], list[int]]] = {}

    @property
    def is_live(self) -> bool:
        """True if the buffers still contain the state."""
        return self.generation == self.buffers.generation

    def read(self, name: str) -> Any:
        """Return the value of a field, always the same object."""
        if name not in self._issued:
            self.check()
            tensors = self.buffers.values[name]
            if self.buffers.is_donated:
                with plainly():
                    tensors = [tensor.clone() for tensor in tensors]
                self.check()  # a step of another thread may have begun to write meanwhile
            versions = [tensor._version for tensor in tensors]
            self._issued[name] = self.buffers.signatures[name].build(tensors), tensors, versions
        return self._issued[name][0]

    def check(self) -> None:
        """Raise a `SpentStateError` if the buffers no longer contain the state."""
        self.buffers.check(self.generation)

    def spend(self, reason: str | Timestamp) -> None:
        """Forbid all other states to read the buffers; see `StateBuffers.spend`."""
        self.generation = self.buffers.spend(reason, self.generation)

    @property
    def is_read(self) -> bool:
        """True if a field has been read: the caller may have written into it since."""
        return bool(self._issued)

    def has_kept(self, name: str, fields: Mapping[str, Any]) -> bool:
        """Return whether the field `name`, in a state with these fields, is neither replaced nor written into."""
        if name not in self._issued:
            return name not in fields
        return self.untouched(name, fields.get(name, self._issued[name][0])) is not None

    def untouched(self, name: str, value: Any) -> list[Tensor] | None:
        """Return the tensors that `read` returned for a field, or `None` if this value differs or was changed."""
        if name not in self._issued:
            return None
        issued, tensors, versions = self._issued[name]
        if issued is not value or [tensor._version for tensor in tensors] != versions:
            return None
        signature, now = Signature.of(value)
        is_same = signature.is_alike(self.buffers.signatures[name]) and all(map(operator.is_, now, tensors))
        return tensors if is_same else None


FIELDS = (*LASTING, *fields_where(keeps_form=False))
"""Names of the fields of a state, those in donated buffers first."""


class Source(NamedTuple):
    """The location of a tensor: in a field of the state or, with an empty name, among a part's results."""

    field: str
    place: int


Writes = Mapping[str, tuple[Signature, tuple[Source, ...]]]
"""The fields that a part replaced, with their new signatures and the sources of their tensors."""


@dataclass(frozen=True)
class Boundary:
    """A place between two parts of a step: the signatures of all fields there, and the memory they share."""

    static: Static
    """The static part of the state, its time sealed."""
    signatures: dict[str, Signature]
    used: frozenset[str] = frozenset()
    """Names of the gradients that updates have applied."""
    donated: dict[str, Signature] | None = None
    """With donation: the signatures of the buffers that the end of the step writes into."""
    held: dict[Source, Source] = field(default_factory=dict)
    """With donation: the places whose tensor is a donated buffer, with the place of that buffer. Several places may
    hold the same buffer; without this, a compiler would overwrite it while another place is still to be read."""

    @classmethod
    def start(cls, static: Static, signatures: Mapping[str, Signature], *, is_donated: bool) -> "Boundary":
        """Return the start of a step, where each donated buffer is in its own place."""
        if not is_donated:
            return cls(static, dict(signatures))
        donated = {name: signatures[name] for name in LASTING}
        places = [Source(name, i) for name, signature in donated.items() for i in range(len(signature.specs))]
        return cls(static, dict(signatures), donated=donated, held={place: place for place in places})

    @property
    def device(self) -> torch.device:
        return self.signatures["key"].specs[0].device

    def after(self, writes: Writes, used: frozenset[str]) -> "Boundary":
        """Return the boundary after a part that replaced these fields."""
        signatures = {**self.signatures, **{name: signature for name, (signature, _) in writes.items()}}
        held = {place: to for place, to in self.held.items() if place.field not in writes}
        for name, (_, where) in writes.items():
            held |= {Source(name, i): self.held[source] for i, source in enumerate(where) if source in self.held}
        return Boundary(self.static, signatures, used, self.donated, held)

    def inputs(self) -> dict[Source, Source]:
        """Return the source of each tensor of the state; places that share memory have one source."""
        shared: dict[Source, Source] = {}
        found: dict[Source, Source] = {}
        for name in FIELDS:
            for i in range(len(self.signatures[name].specs)):
                place = Source(name, i)
                to = self.held.get(place)
                if to is None:
                    found[place] = place
                else:  # the buffer's own place, if it still contains the buffer
                    found[place] = to if self.held.get(to) == to else shared.setdefault(to, place)
        return found
