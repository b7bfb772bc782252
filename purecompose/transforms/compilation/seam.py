"""What is known of a state in flight before any tensor of it is there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from purecompose.core.context import Static
from purecompose.core.state import fields_where
from purecompose.transforms.form import Form
from purecompose.transforms.lease import LASTING


__all__ = ["FIELDS", "Seam", "Source", "Writes"]

FIELDS = (*LASTING, *fields_where(keeps_form=False))
"""The fields of a state, those that lie in a lane first."""


class Source(NamedTuple):
    """Where a tensor is: in a field of the state or, with an empty name, among a part's results."""

    field: str
    place: int


Writes = Mapping[str, tuple[Form, tuple[Source, ...]]]
"""The fields that a part replaced: what they are now, and where their tensors come from."""


@dataclass(frozen=True)
class Seam:
    """A place between two parts of a step: the forms of all fields there, and what memory they share."""

    static: Static
    """The static part of the state, its time sealed."""
    forms: dict[str, Form]
    used: frozenset[str] = frozenset()
    """The gradients that updates have applied."""
    lane: dict[str, Form] | None = None
    """With donation: the forms of the lane that the end of the step writes into."""
    held: dict[Source, Source] = field(default_factory=dict)
    """With donation: which tensors are a lane's, and which of the lane's they are. Several places may hold one, and a
    compiler that did not know would write over it while another is still to be read."""

    @classmethod
    def start(cls, static: Static, forms: Mapping[str, Form], *, is_donated: bool) -> "Seam":
        """Where a step starts: what lasts is in its place in the lane."""
        if not is_donated:
            return cls(static, dict(forms))
        lane = {name: forms[name] for name in LASTING}
        places = [Source(name, i) for name, form in lane.items() for i in range(len(form.specs))]
        return cls(static, dict(forms), lane=lane, held={place: place for place in places})

    def after(self, writes: Writes, used: frozenset[str]) -> "Seam":
        """The seam after a part that replaced these fields."""
        forms = {**self.forms, **{name: form for name, (form, _) in writes.items()}}
        held = {place: to for place, to in self.held.items() if place.field not in writes}
        for name, (_, where) in writes.items():
            held |= {Source(name, i): self.held[source] for i, source in enumerate(where) if source in self.held}
        return Seam(self.static, forms, used, self.lane, held)

    def inputs(self) -> dict[Source, Source]:
        """All tensors of the state, each with the place to take it from: places that share memory have one."""
        shared: dict[Source, Source] = {}
        found: dict[Source, Source] = {}
        for name in FIELDS:
            for i in range(len(self.forms[name].specs)):
                place = Source(name, i)
                to = self.held.get(place)
                if to is None:
                    found[place] = place
                else:  # where it belongs, if it is still there
                    found[place] = to if self.held.get(to) == to else shared.setdefault(to, place)
        return found
