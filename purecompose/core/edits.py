"""Edits of the gradients by several algorithms at one event, and a warning if one undoes what others have done.

In the first run of each schedule, the gradients that earlier algorithms have set are followed through all operations.
This shows whether a later algorithm uses them, whatever traits it declares.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from purecompose import batch as batches
from purecompose._support.dynamo import DispatchMode
from purecompose._support.messages import warn
from purecompose._support.writes import storage_of
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State, fields_where
from purecompose.time.event import Event


@dataclass
class _Round:
    """One firing of an event."""

    event: Event | None = None
    acted: set[str] = field(default_factory=set)
    """The algorithms that have acted."""
    editors: list[str] = field(default_factory=list)
    """The algorithms whose edits the gradients still have."""
    edited: set[str] = field(default_factory=set)
    """The names of the gradients that these have changed."""
    is_renewed: bool = False
    """True if the first editor computed new gradients."""


class Edits:
    """The edits of the gradients in a watched run."""

    def __init__(self) -> None:
        self._round = _Round()

    def followed(
        self, algorithm: Algorithm, event: Event, before: State, apply: Callable[[], tuple[State, int | None]]
    ) -> tuple[State, int | None]:
        """Return the result of `apply`; warn if it undoes what earlier algorithms did to the gradients."""
        if event is not self._round.event or algorithm.name in self._round.acted:  # in the next microbatch
            self._round = _Round(event)
        self._round.acted.add(algorithm.name)
        if not before.grads:
            return apply()
        names = self._round.edited or before.grads
        with _Followed(before.grads[name] for name in names if name in before.grads) as reach:
            after, exit_code = apply()
        if after.grads and after.grads is not before.grads:
            self._note(algorithm, before, after, uses=reach.includes([after.grads, *_kept(before, after)]))
        return after, exit_code

    def _note(self, algorithm: Algorithm, before: State, after: State, *, uses: bool) -> None:
        this, name, renews = self._round, algorithm.name, Trait.RENEWS_GRADIENTS in algorithm.traits
        earlier, remedy = ", ".join(this.editors), "leave one of them out, or combine them in one method"
        if earlier and not uses:
            if not renews and not this.is_renewed:
                remedy = f"give {name} traits=[Trait.RENEWS_GRADIENTS], so that it acts first"
            warn(f"{name} at {this.event} replaces the gradients: what {earlier} did to them is lost; {remedy}")
        elif earlier and renews and this.is_renewed:
            warn(
                f"{name} at {this.event} computes the gradients of the step's loss again: those that {earlier} "
                f"computed are not applied; {remedy}"
            )
        if renews or not uses:
            this.editors, this.edited, this.is_renewed = [], set(), True
        old, new = before.grads or {}, after.grads or {}
        this.editors.append(name)
        this.edited |= {name for name in {**old, **new} if old.get(name) is not new.get(name)}


_KEPT = fields_where(keeps_form=True)


def _kept(before: State, after: State) -> list[Tensor]:
    """Return the tensors that an algorithm has put into fields that outlive the step."""
    old = {id(tensor) for name in _KEPT for tensor in batches.tensors(getattr(before, name))}
    new = [tensor for name in _KEPT for tensor in batches.tensors(getattr(after, name))]
    return [tensor for tensor in new if id(tensor) not in old]


class _Followed(DispatchMode):
    """A mode that follows tensors to those computed from them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        # The key is the memory, which no other tensor can have while these tensors are kept here.
        self._reached = {storage_of(tensor): tensor for tensor in tensors}

    def includes(self, values: Any) -> bool:
        """Return whether the values have one of these tensors."""
        return any(storage_of(tensor) in self._reached for tensor in batches.tensors(values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.includes([args, kwargs]):
            self._reached |= {storage_of(tensor): tensor for tensor in batches.tensors([result])}
        return result
