"""Compiled parts: where a step is cut, what a part takes and returns, their table, and the plans that chain them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from purecompose._support.messages import table
from purecompose.core.compose import Step
from purecompose.core.context import Context
from purecompose.core.operation import Lowered, Node
from purecompose.core.program import Update, events_in
from purecompose.core.scopes import Scope
from purecompose.errors import VariantLimitError
from purecompose.transforms.compilation.capture import Captured
from purecompose.transforms.compilation.gpu import Compiled, Replay
from purecompose.transforms.compilation.sizes import OPEN_FIELDS
from purecompose.transforms.compilation.updates import GraphForm
from purecompose.transforms.signature import LASTING, Boundary, Signature, Source, StateBuffers


@dataclass
class Variant:
    """One compiled part of a step, and its cost."""

    segment: int
    """Index of the part of the step, from 0."""
    acting: tuple[str, ...]
    """Algorithms that act in it, as "name at event"."""
    batch: str
    """Shapes of the incoming batch."""
    nodes: int = 0
    """Number of operations in its graph."""
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    hits: int = 0
    """Number of times it has run."""
    why_fixed: str = ""
    """Why its sizes could not be left open, if they were to be."""

    @property
    def seconds(self) -> float:
        """Seconds spent tracing and compiling it, for which the run waited."""
        return self.trace_seconds + self.compile_seconds

    @property
    def title(self) -> str:
        acting = ", ".join(self.acting) or "no algorithm"
        return f"part {self.segment} of the step ({acting}; batch {self.batch or 'gone'})"


class Variants(tuple[Variant, ...]):
    """All variants of a compiled step; prints as a table."""

    @property
    def seconds(self) -> float:
        """Seconds spent tracing and compiling all of them, for which the run waited."""
        return sum(variant.seconds for variant in self)

    def __str__(self) -> str:
        if not self:
            return "nothing is compiled yet"
        return table(["part", "batch", "operations", "trace s", "compile s", "hits", "acting"], [*map(_row, self)])


def _row(variant: Variant) -> list[str]:
    seconds = f"{variant.trace_seconds:.2f}", f"{variant.compile_seconds:.2f}"
    acting = ", ".join(variant.acting) or "-"
    return [str(variant.segment), variant.batch, str(variant.nodes), *seconds, str(variant.hits), acting]


def too_many(variants: Sequence[Variant], refused: Variant, limit: int) -> VariantLimitError:
    """Return the error for one variant too many, which names the cause of the variants."""
    # Count by segment: a batch that a segment has changed is not a new form of batch, and each segment has at least
    # one variant.
    wanted = (*variants, refused)
    segments = [[v for v in wanted if v.segment == segment] for segment in dict.fromkeys(v.segment for v in wanted)]
    most = max(segments, key=lambda segment: (len(segment), segment[-1] is refused))
    batches, schedules = dict.fromkeys(v.batch for v in most), {v.acting for v in most}
    if len(batches) == len(schedules) == 1 < len(most):
        cause = (
            f"{len(most)} of them are for one form of batch ({next(iter(batches)) or '()'}) and the same algorithms, "
            "and differ in what shapes do not show: a Python value in the batch (ids, names, numbers: keep it in a "
            "tensor), the form of another field of the state, or torch's settings"
        )
    elif len(batches) > len(schedules):
        shown = "; ".join(batch or "()" for batch in list(batches)[:4])
        cause = (
            f"the batch came in {len(batches)} forms ({shown}{'; ...' if len(batches) > 4 else ''}), and each is "
            "compiled for itself: pad or crop batches to few sizes, or give compile(eager_below=...) for short last "
            "batches, or compile(dynamic=True) for any number of examples, or compile(dynamic='all') for any sizes"
        )
        failed = next((variant.why_fixed for variant in most if variant.why_fixed), None)
        cause += f". Sizes could not be left open, because of {failed}" if failed else ""
    elif len(schedules) > 1:
        name, times = _busiest(most)
        cause = (
            f"{name} is in {times} of {len(most)} and not in the others, as its match decides: let it match in coarser "
            "stretches, or always, choosing by torch.where inside apply"
        )
    else:
        cause = f"it has {len(segments)} parts, and each needs one at least"
    return VariantLimitError(
        f"the step needs more than max_variants={limit} compiled variants: {cause}. step.variants() lists them"
    )


def _busiest(variants: Sequence[Variant]) -> tuple[str, int]:
    """Return the algorithm that divides the variants most evenly: in some of them and not in others."""
    names = Counter(place.split(" at ")[0] for variant in variants for place in set(variant.acting))
    return max(names.items(), key=lambda item: min(item[1], len(variants) - item[1]))


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
            form: The parts of the graph that must match on all ranks, if several processes share each batch.
            replays: True if it is recorded as a CUDA graph.
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
        if self._sizes is None:
            return boundary.after(self.writes, self.used)
        settled = {
            name: (self._sizes.settle(signature, boundary.signatures), where)
            for name, (signature, where) in self.writes.items()
        }
        return boundary.after(settled, self.used)

    def run(self, values: Values, buffers: StateBuffers, *, from_buffers: bool) -> None:
        """Run the part and put its results into `values`; with `from_buffers` donated fields there are the buffers
        themselves.
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

    def compiled_parts(self) -> Iterable[CompiledPart]: ...

    def after(self, boundary: Boundary, /) -> Boundary: ...

    def run(self, values: Values, buffers: StateBuffers, /, *, from_buffers: bool) -> None: ...


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


class Stretch(NamedTuple):
    """Consecutive operations of a step: compiled as one graph, or run between two graphs."""

    segment: int
    """Segment of the program that it belongs to."""
    number: int
    """Place in the step; differs from `segment` if host algorithms divide a segment."""
    lowered: tuple[Lowered, ...]
    kind: str
    """"graph"; "host", a host algorithm or a scope in which one acts; or "sliced", a scope whose body runs compiled on
    slice after slice."""
    bits: int
    """Part of the schedule that decides which algorithms act in it."""


class Segments:
    """The cuts of one step.

    A scope, an update, and the nodes between them may each be a segment. A boundary costs some microseconds, so a cut
    is made only between two pieces that both depend on the schedule: otherwise the whole has as many variants as one
    piece.
    """

    def __init__(self, step: Step) -> None:
        """Determine the cuts from the program and the predicates of the step's algorithms."""
        varying = {question.event for question in step.matcher.questions if not question.algorithm.host}
        self._of_node: list[int] = []
        segment, is_varying = 0, False
        for piece in _pieces(step.program):
            piece_varies = any(event in varying for event in events_in(piece))
            if is_varying and piece_varies:
                segment, is_varying = segment + 1, False
            is_varying = is_varying or piece_varies
            self._of_node += [segment] * len(piece)
        questions = step.matcher.questions
        compiled = sum(1 << i for i, question in enumerate(questions) if not question.algorithm.host)
        self._masks = [0] * (segment + 1)
        for node, number in zip(step.program, self._of_node, strict=True):  # an event may be in several segments
            self._masks[number] |= step.matcher.mask(events_in([node])) & compiled

    @property
    def num(self) -> int:
        return len(self._masks)

    def stretches(self, operations: Sequence[Lowered], bits: int) -> list[Stretch]:
        """Return a schedule's operations, cut between segments and around host algorithms, without empty stretches."""
        runs: list[tuple[int, str, list[Lowered]]] = []
        for lowered in operations:
            segment = self._of_node[lowered.node]
            kind = "host" if lowered.is_host else "graph" if lowered.with_slices is None else "sliced"
            if kind != "graph" or not runs or runs[-1][:2] != (segment, "graph"):
                runs.append((segment, kind, []))
            runs[-1][2].append(lowered)
        return [
            Stretch(segment, number, tuple(members), kind, bits & self._masks[segment])
            for number, (segment, kind, members) in enumerate(runs)
        ]


def _pieces(program: Sequence[Node]) -> list[list[Node]]:
    pieces: list[list[Node]] = [[]]
    for node in program:
        is_own = isinstance(node, (Scope, Update))
        if pieces[-1] and (is_own or isinstance(pieces[-1][-1], Scope)):
            pieces.append([])
        pieces[-1].append(node)
    return pieces
