"""Boundaries: the known facts about the state between two compiled parts, before its tensors exist."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from purecompose.core.context import Static
from purecompose.core.values import fields_where
from purecompose.transforms.donation import LASTING
from purecompose.transforms.signature import Signature


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
        """The device of the state."""
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
