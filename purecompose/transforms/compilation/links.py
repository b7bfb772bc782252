"""Links: compiled parts of steps. Routes chain them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from purecompose.core.context import Context
from purecompose.core.operation import Lowered
from purecompose.transforms.compilation.backends import Compiled
from purecompose.transforms.compilation.capture import Captured
from purecompose.transforms.compilation.replay import Replay
from purecompose.transforms.compilation.seam import Seam, Source
from purecompose.transforms.compilation.sizes import OPEN_FIELDS, opened, size_of
from purecompose.transforms.compilation.variants import Variant
from purecompose.transforms.form import Form
from purecompose.transforms.lease import LASTING, Lane


__all__ = ["EAGER", "Entry", "Leg", "Link", "Route", "Values"]

Values = dict[str, list[Tensor]]
"""A state in flight: each field's tensors."""


class Link:
    """A compiled part of a step: takes tensors from a state in flight, and puts new ones there."""

    __slots__ = (
        "call",
        "takes",
        "targets",
        "reads",
        "writes",
        "copies",
        "used",
        "variant",
        "takes_clock",
        "is_plain",
        "writes_lane",
        "_replays",
        "_size",
    )

    def __init__(self, captured: Captured, call: Compiled, variant: Variant, *, replays: bool = False) -> None:
        """Keeps what is needed to run; with `replays` it is recorded as a CUDA graph for each lane."""
        self.call, self.variant, self._replays = call, variant, replays
        self.takes, self.targets, self.reads = captured.takes, captured.targets, captured.reads
        self.writes, self.copies, self.used = captured.writes, captured.copies, captured.used
        self._size, self.writes_lane = captured.size, captured.writes_lane
        passed = (source for _, where in captured.writes.values() for source in where)
        taken = {source.field for source in (*captured.takes, *passed)}
        self.takes_clock = "clock" in taken
        self.is_plain = taken <= {"", *LASTING, "key", "loss", "batch"}

    def fits(self, forms: Mapping[str, Form]) -> bool:
        """Whether everything that the part looks at has the form that it was built for."""
        if self._size is None:
            return all(forms[name] == form for name, form in self.reads.items())
        size = size_of(forms)
        return self._size.allows(size) and all(
            opened(forms[name], size) == opened(form, self._size.example)
            if name in OPEN_FIELDS
            else forms[name] == form
            for name, form in self.reads.items()
        )

    def after(self, seam: Seam) -> Seam:
        """The seam after the part."""
        if self._size is None:
            return seam.after(self.writes, self.used)
        size = size_of(seam.forms)
        settled = {name: (self._size.settle(form, size), where) for name, (form, where) in self.writes.items()}
        return seam.after(settled, self.used)

    def run(self, values: Values, lane: Lane, *, is_first: bool) -> None:
        """Runs the part, and puts its results into `values`.

        Args:
            values: The state in flight.
            lane: Where the step writes at its end.
            is_first: Whether the lasting fields in `values` are the lane's own.
        """
        if is_first:
            bound = lane.bound.get(self) or self._bind(lane)
            results = bound.call([*bound.args, *[values[field][index] for field, index in bound.free]])
        else:
            results = self.call(_gathered(values, self.takes) + _gathered(lane.values, self.targets))
        self.variant.hits += 1
        if self.copies:
            results = [result.clone() if i in self.copies else result for i, result in enumerate(results)]
        if self.writes:
            values.update(
                {
                    name: [results[index] if not field else values[field][index] for field, index in where]
                    for name, (_, where) in self.writes.items()
                }
            )

    def _bind(self, lane: Lane) -> "_Bound":
        own = [source for source in self.takes if source.field in LASTING]
        assert self.takes[: len(own)] == tuple(own) and not self.targets, "the lane's come first"
        call = Replay(self.call, len(own)) if self._replays and lane.is_donated else self.call
        bound = lane.bound[self] = _Bound(call, _gathered(lane.values, own), self.takes[len(own) :])
        return bound


class _Bound(NamedTuple):
    """A link on a lane: what is the same in every step."""

    call: Compiled
    args: list[Tensor]
    """The arguments that lie in the lane."""
    free: tuple[Source, ...]
    """Where the others come from."""


def _gathered(values: Values, sources: Any) -> list[Tensor]:
    return [values[field][index] for field, index in sources]


class Leg(Protocol):
    """One stretch of a route."""

    takes_clock: bool
    is_plain: bool
    writes_lane: bool

    def after(self, seam: Seam, /) -> Seam:
        """The seam after it."""
        ...

    def run(self, values: Values, lane: Lane, /, *, is_first: bool) -> None:
        """Runs it, and puts its results into `values`."""
        ...


@dataclass(eq=False)
class Route:
    """What a step runs for one schedule and one form of state and batch, as far as the next host algorithm."""

    links: "list[Leg]"
    end: Seam | None = None
    host: Lowered | None = None
    """The host algorithm that comes next; `None` at the end of the step."""
    next_part: int = 0
    """The part after that."""
    writes_lane: bool = False
    """Whether the last link has written all that lasts into the lane."""
    after_host: dict[Any, "Route"] = field(default_factory=dict)
    """How it goes on, by what the host algorithm left."""
    exit: "Entry | None" = None
    """Where the next step starts, once it is known."""

    plain: "Leg | None" = None
    """The only link, where it takes nothing but the lane, key, loss and batch, and writes into the lane."""

    def __post_init__(self) -> None:
        if self.writes_lane and len(self.links) == 1 and self.links[0].is_plain:
            self.plain = self.links[0]
        self.takes_clock = any(link.takes_clock for link in self.links) or self.host is not None


EAGER = Route([])
"""The route of a step that cannot be compiled, and runs as it was composed."""


@dataclass(eq=False)
class Entry:
    """A form of state that steps start from, with the routes that are known from there."""

    context: Context
    forms: dict[str, Form]
    routes: dict[Any, Route] = field(default_factory=dict)
