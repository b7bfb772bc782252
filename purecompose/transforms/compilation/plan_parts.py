"""Compiled parts of a step, and the execution plans that chain them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from purecompose.core.context import Context
from purecompose.core.operation import Lowered
from purecompose.transforms.compilation.backends import Compiled
from purecompose.transforms.compilation.boundary import Boundary, Source
from purecompose.transforms.compilation.capture import Captured
from purecompose.transforms.compilation.messages import GraphForm
from purecompose.transforms.compilation.replay import Replay
from purecompose.transforms.compilation.sizes import OPEN_FIELDS
from purecompose.transforms.compilation.variants import Variant
from purecompose.transforms.donation import LASTING, StateBuffers
from purecompose.transforms.signature import Signature


Values = dict[str, list[Tensor]]
"""The tensors of each field while a step runs."""


class CompiledPart:
    """A compiled part of a step: takes tensors of the state's fields and returns new ones."""

    __slots__ = (
        "takes",
        "targets",
        "reads",
        "writes",
        "copies",
        "used",
        "form",
        "variant",
        "takes_clock",
        "is_plain",
        "writes_buffers",
        "call",
        "_replays",
        "_sizes",
    )

    def __init__(
        self,
        captured: Captured,
        call: Compiled,
        variant: Variant,
        *,
        form: GraphForm | None = None,
        replays: bool = False,
    ) -> None:
        """Store the part.

        Args:
            captured: The graph.
            call: The compiled graph.
            variant: Its entry in the table of variants.
            form: The parts of the graph that must match on all ranks, if several processes share each batch.
            replays: True if it is recorded as a CUDA graph, one for each set of buffers.
        """
        self.call, self.form, self.variant, self._replays = call, form, variant, replays
        self.takes, self.targets, self.reads = captured.takes, captured.targets, captured.reads
        self.writes, self.copies, self.used = captured.writes, captured.copies, captured.used
        self._sizes, self.writes_buffers = captured.sizes, captured.writes_buffers
        passed = (source for _, where in captured.writes.values() for source in where)
        taken = {source.field for source in (*captured.takes, *passed)}
        self.takes_clock = "clock" in taken
        self.is_plain = taken <= {"", *LASTING, "key", "loss", "batch"}

    def compiled_parts(self) -> "Iterable[CompiledPart]":
        """Return the part itself."""
        return (self,)

    def fits(self, signatures: Mapping[str, Signature]) -> bool:
        """Return whether every field that the part reads has the signature that the part was built for."""
        sizes = self._sizes
        if sizes is None:
            return all(signatures[name] == signature for name, signature in self.reads.items())
        return all(
            sizes.fits(name, signature, signatures) if name in OPEN_FIELDS else signatures[name] == signature
            for name, signature in self.reads.items()
        ) and sizes.allows(signatures)

    def after(self, boundary: Boundary) -> Boundary:
        """Return the boundary after the part."""
        if self._sizes is None:
            return boundary.after(self.writes, self.used)
        settled = {
            name: (self._sizes.settle(signature, boundary.signatures), where)
            for name, (signature, where) in self.writes.items()
        }
        return boundary.after(settled, self.used)

    def run(self, values: Values, buffers: StateBuffers, *, from_buffers: bool) -> None:
        """Run the part and put its results into `values`.

        Args:
            values: The tensors of each field.
            buffers: The buffers that the step writes into at its end.
            from_buffers: True if the donated fields in `values` are the buffers themselves.
        """
        if from_buffers:
            bound = buffers.bound.get(self) or self._bind(buffers)
            results = bound.call([*bound.args, *[values[field][index] for field, index in bound.free]])
        else:
            results = self.call(_gathered(values, self.takes) + _gathered(buffers.values, self.targets))
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

    def _bind(self, buffers: StateBuffers) -> "_Bound":
        own = [source for source in self.takes if source.field in LASTING]
        assert self.takes[: len(own)] == tuple(own) and not self.targets, "the buffers come first"
        call = Replay(self.call, len(own)) if self._replays and buffers.is_donated else self.call
        bound = buffers.bound[self] = _Bound(call, _gathered(buffers.values, own), self.takes[len(own) :])
        return bound


class _Bound(NamedTuple):
    """A part bound to certain buffers, with the arguments that are the same in every step."""

    call: Compiled
    args: list[Tensor]
    """The arguments that are buffers."""
    free: tuple[Source, ...]
    """Sources of the other arguments."""


def _gathered(values: Values, sources: Any) -> list[Tensor]:
    return [values[field][index] for field, index in sources]


class PlanPart(Protocol):
    """One part of a plan."""

    takes_clock: bool
    is_plain: bool
    writes_buffers: bool

    def compiled_parts(self) -> Iterable[CompiledPart]:
        """Return the compiled parts in it."""
        ...

    def after(self, boundary: Boundary, /) -> Boundary:
        """Return the boundary after it."""
        ...

    def run(self, values: Values, buffers: StateBuffers, /, *, from_buffers: bool) -> None:
        """Run it and put its results into `values`."""
        ...


@dataclass(eq=False)
class ExecutionPlan:
    """The parts of a step for one schedule and one signature of state and batch, up to the next host algorithm."""

    parts: "list[PlanPart]"
    end: Boundary | None = None
    host: Lowered | None = None
    """The host algorithm that comes next; `None` at the end of the step."""
    next_stretch: int = 0
    """The number of the stretch after the host algorithm."""
    writes_buffers: bool = False
    """True if the last part writes all donated fields into the buffers."""
    after_host: dict[Any, "ExecutionPlan"] = field(default_factory=dict)
    """The plans after the host algorithm, by the signature of the state it returned."""
    exit: "Entry | None" = None
    """The entry of the next step, once it is known."""
    is_refused: bool = False
    """True if the step runs as composed, because it cannot be compiled."""
    plain: "PlanPart | None" = None
    """The only part, if it takes only buffers, key, loss and batch, and writes into the buffers."""

    def __post_init__(self) -> None:
        if self.writes_buffers and len(self.parts) == 1 and self.parts[0].is_plain:
            self.plain = self.parts[0]
        self.takes_clock = any(part.takes_clock for part in self.parts) or self.host is not None


EAGER = ExecutionPlan([], is_refused=True)
"""The plan of a step that cannot be compiled and runs as composed."""


@dataclass(eq=False)
class Entry:
    """The signature of states at the start of steps, with the plans known for it."""

    context: Context
    signatures: dict[str, Signature]
    plans: dict[Any, ExecutionPlan] = field(default_factory=dict)
