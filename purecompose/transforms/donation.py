"""Donated buffers: states whose memory the next compiled step may overwrite.

A compiled step with donation writes the new parameters into the memory of the old ones, as an imperative loop does. A
state returned by the step holds a lease on these buffers, which ends with the next step. Reading a field returns a
copy, so that a tensor that was read never changes; reading it after the next step raises an error.
"""

import operator
import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from purecompose._support.internals import plainly
from purecompose.core.values import fields_where
from purecompose.errors import SpentStateError
from purecompose.time import Timestamp
from purecompose.transforms.signature import Signature


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
        """End all leases, and return the new generation; of two threads that hold the same one, one succeeds.

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
            f"this state is spent: its memory {reason}. Use the state that the step returned. To step from "
            "one state more than once (a cell run again, a list of old states), give the step state.copy(), or use "
            "compile(step, donate=False), which writes over nothing. loss, metrics and timestamp can still be read"
        )


class BufferLease:
    """A state's right to read the buffers until the next step writes there; copies of the state share it."""

    __slots__ = ("buffers", "generation", "entry", "origin", "_issued")

    def __init__(self, buffers: StateBuffers, entry: Any, origin: tuple[Any, ...]) -> None:
        """Lease the buffers as they are now.

        Args:
            buffers: The buffers.
            entry: The entry of the compiled step for states in these buffers; `None` in a host algorithm.
            origin: Key, loss, context and graph cache of the state, by which the step recognises it as unchanged.
        """
        self.buffers, self.generation, self.entry, self.origin = buffers, buffers.generation, entry, origin
        self._issued: dict[str, tuple[Any, list[Tensor], list[int]]] = {}

    @property
    def is_live(self) -> bool:
        """True if the buffers still contain the state of this lease."""
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
        """Raise a `SpentStateError` if the lease has ended."""
        self.buffers.check(self.generation)

    def spend(self, reason: str | Timestamp) -> None:
        """Take the buffers over: all other leases end; see `StateBuffers.spend`."""
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
