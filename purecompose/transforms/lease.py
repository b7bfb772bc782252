"""Leases: states whose tensors the next compiled step may write over.

A compiled step with donation writes the new parameters into the old ones' memory, as an imperative loop does. That
memory is a *lane*; a state that the step returned holds a lease on it, good until the next step. Reading a field
copies it out, so that no tensor which anybody holds ever changes; reading it after the next step raises.
"""

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from purecompose._support.functorch import plainly
from purecompose.core.state import fields_where
from purecompose.time import Timestamp
from purecompose.transforms.form import Form


__all__ = ["LASTING", "Lane", "Lease", "SpentStateError"]

LASTING = fields_where(keeps_form=True)
"""The fields that lie in a lane: what outlives a step and changes in it."""


class SpentStateError(RuntimeError):
    """A state was read whose memory a later step has written over."""


class Lane:
    """The memory of one line of states, and who may read it.

    Attributes:
        forms: The form of each lasting field.
        values: Each lasting field's tensors.
        is_donated: Whether steps write into these tensors; if not, they may be handed out as they are.
        bound: For the compiled parts that start a step here: the arguments that they take from the lane.
    """

    __slots__ = ("forms", "values", "is_donated", "bound", "generation", "reason")

    def __init__(self, forms: dict[str, Form], values: dict[str, list[Tensor]], *, is_donated: bool) -> None:
        """Takes over the tensors; with `is_donated` nobody else may hold them."""
        self.forms, self.values, self.is_donated = forms, values, is_donated
        self.bound: dict[Any, Any] = {}
        self.generation = 0
        self.reason: str | Timestamp = ""

    def spend(self, reason: str | Timestamp) -> None:
        """Ends all leases.

        Args:
            reason: The time of the state that is there now, or what happened, going on after "its memory".
        """
        self.generation += 1
        self.reason = reason


class Lease:
    """A state's right to read a lane, until the next step writes there; twins share one."""

    __slots__ = ("lane", "generation", "entry", "frees", "_issued")

    def __init__(self, lane: Lane, entry: Any, frees: tuple[Any, ...]) -> None:
        """Leases the lane as it is now; `entry` and `frees` are the compiled step's own notes."""
        self.lane, self.generation, self.entry, self.frees = lane, lane.generation, entry, frees
        self._issued: dict[str, tuple[Any, list[Tensor], list[int]]] = {}

    @property
    def is_live(self) -> bool:
        """Whether the lane still holds what this lease is about."""
        return self.generation == self.lane.generation

    def read(self, name: str) -> Any:
        """A lasting field's value; always the same object.

        Raises:
            SpentStateError: A later step has written there.
        """
        if name not in self._issued:
            self.check()
            tensors = self.lane.values[name]
            if self.lane.is_donated:
                with plainly():
                    tensors = [tensor.clone() for tensor in tensors]
                self.check()  # a step of another thread may have begun to write meanwhile
            versions = [tensor._version for tensor in tensors]
            self._issued[name] = self.lane.forms[name].build(tensors), tensors, versions
        return self._issued[name][0]

    def check(self) -> None:
        """Raises a `SpentStateError` where the lease has ended."""
        if not self.is_live:
            reason = self.lane.reason
            if isinstance(reason, Timestamp):
                reason = f"was given to a compiled step, which wrote the state after batch {reason.batch} into it"
            raise SpentStateError(
                f"this state is spent: its memory {reason}. Go on from the state that the step returned. To step from "
                "one state more than once (a cell run again, a list of old states), give the step state.copy(), or use "
                "compile(step, donate=False), which writes over nothing. loss, metrics and timestamp can still be read"
            )

    @property
    def is_read(self) -> bool:
        """Whether a field has been read, by whichever of the twins: its owner may have written into it since."""
        return bool(self._issued)

    def has_kept(self, name: str, fields: Mapping[str, Any]) -> bool:
        """Whether a state with these fields has the lane's values of one: not replaced, and not written into."""
        if name not in self._issued:
            return name not in fields
        return self.untouched(name, fields.get(name, self._issued[name][0])) is not None

    def untouched(self, name: str, value: Any) -> list[Tensor] | None:
        """The tensors that `read` gave for a field, if this value is what it gave and nobody has written into it."""
        if name not in self._issued:
            return None
        issued, tensors, versions = self._issued[name]
        if issued is not value or [tensor._version for tensor in tensors] != versions:
            return None
        form, now = Form.of(value)
        is_same = form.is_alike(self.lane.forms[name]) and all(map(operator.is_, now, tensors))
        return tensors if is_same else None
