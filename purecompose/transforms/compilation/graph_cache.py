"""The graph cache: a step's compiled graphs and the plans built from them."""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from purecompose._support.warnings import warn
from purecompose.core.compose import Step
from purecompose.core.context import Context
from purecompose.core.members import SINGLE, Members
from purecompose.core.operation import NO_PURPOSE, Carry, Lowered, Operation, Purpose, in_order
from purecompose.core.program import events_in
from purecompose.core.ranks import noting_shares
from purecompose.core.state import State
from purecompose.nn.network import looking_for_draws
from purecompose.time import Time, Timestamp
from purecompose.transforms.compilation.agreement import all_true, failing_together
from purecompose.transforms.compilation.backends import compile_graph
from purecompose.transforms.compilation.background import Background
from purecompose.transforms.compilation.boundary import FIELDS, Boundary
from purecompose.transforms.compilation.capture import (
    FALLBACK_ADVICE,
    Captured,
    TraceError,
    capture,
    explained,
    fake_mode,
    state_of,
)
from purecompose.transforms.compilation.chunks import in_chunks, of_chunk
from purecompose.transforms.compilation.inductor import start_inductor
from purecompose.transforms.compilation.messages import GraphForm, check_alike
from purecompose.transforms.compilation.ordering import write_early
from purecompose.transforms.compilation.plan_parts import EAGER, CompiledPart, Entry, ExecutionPlan, PlanPart
from purecompose.transforms.compilation.segments import Segments, Stretch
from purecompose.transforms.compilation.sizes import can_open
from purecompose.transforms.compilation.sliced import SlicedPart
from purecompose.transforms.compilation.variants import Variant, too_many
from purecompose.transforms.donation import LASTING
from purecompose.transforms.members import member
from purecompose.transforms.population import Stacked
from purecompose.transforms.signature import ABSENT, Signature


__all__ = ["GraphCache", "Options", "environment"]


@dataclass(frozen=True)
class Options:
    """Options for compiling a step; see `purecompose.compile`."""

    donate: bool
    backend: str | Callable[..., Any]
    mode: str | None
    fallback: bool
    eager_below: int
    dynamic: bool | Literal["all"]
    max_variants: int
    tiered: bool | Time
    announce: Callable[[str], object] | None

    @property
    def words(self) -> str:
        """The options on which the bits of a run depend, such as "inductor from 500ba"."""
        if isinstance(self.tiered, Time):
            return f"{self.backend} from {self.tiered}"
        return f"{self.backend} when ready" if self.tiered else str(self.backend)

    @property
    def is_tiered(self) -> bool:
        """True if steps run as composed at first."""
        return self.tiered is not False  # a time of 0 is false

    def is_due(self, now: Timestamp) -> bool:
        """Return whether a fixed time is given and has been reached."""
        return isinstance(self.tiered, Time) and now.reached(self.tiered)


def environment() -> tuple[Any, ...]:
    """Return the settings of torch that a graph or its code depends on."""
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )


_BUILDING = threading.RLock()
"""A lock for tracing, which patches torch for the whole process, so that only one thread can trace at a time."""


class GraphCache:
    """All graphs and plans of a compiled step."""

    def __init__(self, step: Step, options: Options) -> None:
        """Start empty."""
        self.step, self.options, self.segments = step, options, Segments(step)
        self.ranks = step.ranks
        self.variants: list[Variant] = []
        self._compiled_parts: dict[Any, list[CompiledPart]] = {}
        self._contexts: dict[Context, Context] = {}
        self._entries: dict[Any, Entry] = {}
        self._scopes: dict[Any, SlicedPart] = {}
        self._refused: set[str] = set()
        self._may_build = True
        self._background = Background() if options.is_tiered and options.backend == "inductor" else None
        if self._background is not None:
            weakref.finalize(self, self._background.stop)

    def entry(self, context: Context, signatures: Mapping[str, Signature]) -> Entry:
        """Return the single entry for states of a context and signatures."""
        schedules = context.schedules  # not part of a context's equality; they decide the order of values in the clock
        context = self._contexts.setdefault(context, context)
        entry_key = (context, schedules, *[signatures[name] for name in (*LASTING, "key", "loss")])
        if entry_key not in self._entries:
            self._entries[entry_key] = Entry(context, {**IDLE, **signatures})
        return self._entries[entry_key]

    def plan(self, boundary: Boundary, bits: int, first_stretch: int = 0) -> ExecutionPlan:
        """Return the plan from a boundary to the end of the step, or to the next host algorithm.

        Args:
            boundary: The start of the plan.
            bits: The schedule.
            first_stretch: The stretch of the step that begins there.
        """
        stretches = self.segments.stretches(self.step.lowered(bits), bits)
        parts: list[PlanPart] = []
        for stretch in stretches[first_stretch:]:
            if stretch.kind == "host":
                return ExecutionPlan(parts, boundary, stretch.lowered[0], stretch.number + 1)
            is_last = stretch is stretches[-1]
            if stretch.kind == "sliced":
                purpose = Purpose(replaces_gradients=self.step.purpose(bits).replaces_gradients)
                parts.append(self._sliced(stretch, boundary, is_last, purpose))
            else:
                parts.append(self._compiled_part(stretch, boundary, is_last))
            boundary = parts[-1].after(boundary)
        return ExecutionPlan(parts, boundary, writes_buffers=bool(parts) and parts[-1].writes_buffers)

    def plan_or_eager(
        self, boundary: Boundary, bits: int, first_stretch: int = 0, start: State | None = None
    ) -> ExecutionPlan:
        """Return the plan as `plan` does, or `EAGER` if it cannot be traced and `fallback` is set.

        Processes that share a batch must all call it. A plan fails on all of them or on none, and its graphs are
        compared.

        Args:
            boundary: The start of the plan.
            bits: The schedule.
            first_stretch: The stretch of the step that begins there.
            start: The state at the start of the step, for a first run without host algorithms, which is watched.
        """
        device = boundary.device
        try:
            with _BUILDING:
                known = self._plan_of_known(boundary, bits, first_stretch) if self.options.dynamic else None
                if start is not None and not (self.options.dynamic and all_true(self.ranks, known is not None, device)):
                    self._watch(start, boundary.signatures, bits)
                with failing_together(self.ranks, device):
                    plan = known or self.plan(boundary, bits, first_stretch)
                if self.ranks is not None:
                    forms = [one.form for part in plan.parts for one in part.compiled_parts() if one.form is not None]
                    check_alike(self.ranks, forms, device)
                return plan
        except TraceError as error:
            self.fall_back(error)
            return EAGER

    def is_ready(self, plan: ExecutionPlan, now: Timestamp) -> bool:
        """Return whether a step at this time runs the plan, if it can be compiled, and not as composed."""
        if plan.is_refused or not self.options.is_tiered:
            return not plan.is_refused
        if self.options.tiered is True:
            return not any(part.is_awaited for part in plan.waiting)
        return self.options.is_due(now)

    def make_ready(self, plan: ExecutionPlan, now: Timestamp) -> bool:
        """Make a plan ready for a step at this time, or return False if the step has to run as composed."""
        if not self.is_ready(plan, now):
            return False
        return not self.options.is_tiered or plan.has_swapped or self._swap(plan, now)

    def load(self, plan: ExecutionPlan) -> bool:
        """Compile all parts of a plan, or return False if that fails and `fallback` is set.

        Processes that share a batch must all call it, and have the same result.
        """
        if plan.end is None:
            return False
        try:
            with failing_together(self.ranks, plan.end.device):
                for part in plan.waiting:
                    if part.is_awaited:
                        self._say(f"purecompose: waiting for {part.variant.title} ...\n")
                    with _BUILDING:
                        part.compile()
        except TraceError as error:
            self.fall_back(error)
            plan.is_refused = True
        return not plan.is_refused

    def _swap(self, plan: ExecutionPlan, now: Timestamp) -> bool:
        """Let the plan replace the composed step from this batch on; return False if it cannot be compiled."""
        if not self.load(plan):
            return False
        for part in plan.waiting:
            if part.variant.from_batch is None:
                part.variant.from_batch = now.batch
                self._say(f"purecompose: from batch {now.batch} on, {part.variant.title} runs compiled\n")
        plan.has_swapped = True
        return True

    def _say(self, text: str) -> None:
        if self.options.announce is not None:
            self.options.announce(text)

    def fall_back(self, error: Exception) -> None:
        """Warn once that steps run eagerly, or raise the error."""
        if not self.options.fallback:
            raise error
        if str(error) not in self._refused:
            self._refused.add(str(error))
            text = str(error).removesuffix(FALLBACK_ADVICE)
            warn(f"{text}. As fallback=True asks, such steps run eagerly")

    def operation(self, bits: int, first_stretch: int = 0) -> Operation:
        """Return one operation that runs a schedule's operations from a stretch on."""
        stretches = self.segments.stretches(self.step.lowered(bits), bits)[first_stretch:]
        return self.step.members.in_order([lowered for stretch in stretches for lowered in stretch.lowered])

    def has_host(self, bits: int) -> bool:
        """Return whether a host algorithm acts in a schedule."""
        return any(lowered.is_host for lowered in self.step.lowered(bits))

    def _plan_of_known(self, boundary: Boundary, bits: int, first_stretch: int) -> ExecutionPlan | None:
        """Return the plan of graphs that exist, without tracing anything; `None` if one is missing."""
        self._may_build = False
        try:
            return self.plan(boundary, bits, first_stretch)
        except _MissingError:
            return None
        finally:
            self._may_build = True

    def _watch(self, start: State, signatures: Mapping[str, Signature], bits: int) -> None:
        """Run a step on fake tensors, which take no memory, and check it as the first run of a schedule.

        What is compared by values is compared in slices that run compiled, or here.
        """
        _fill_caches(start)
        with failing_together(self.ranks, start.device), explained(), fake_mode(), torch.no_grad():
            fields = {
                name: signature.build([spec.empty() for spec in signature.specs])
                for name, signature in signatures.items()
            }
            self.step.run_checked(bits, state_of(start.static, None, fields))
        if self.ranks is not None:
            _check_values(self.step.lowered(bits), start)
        if self.step.members is not SINGLE:
            # All slices of a population are in one graph, so their losses are compared by a step of one member.
            with looking_for_draws(), torch.no_grad():
                of_one = self.step.replace(members=SINGLE).operation(bits)
                of_one(Carry(self.step.members.one(start)), NO_PURPOSE)

    def _compiled_part(
        self, stretch: Stretch, boundary: Boundary, is_last: bool, body: Operation | None = None
    ) -> CompiledPart:
        """Return the compiled graph of a stretch, or of a body within it."""
        donated = tuple(boundary.donated.values()) if boundary.donated is not None and is_last else None
        known = self._compiled_parts.setdefault(self._part_key(stretch, boundary, is_last, donated, body), [])
        for part in known:
            if part.fits(boundary.signatures):
                return part
        if not self._may_build:
            raise _MissingError
        if torch.is_anomaly_enabled():
            warn(
                "anomaly detection does not see into a compiled step: to find where a NaN comes from, run the step "
                "that was given to pc.compile"
            )
        variant = Variant(stretch.segment, self._acting(stretch), _shapes(boundary.signatures["batch"]))
        if len(self.variants) >= self.options.max_variants:
            raise too_many(self.variants, variant, self.options.max_variants)
        members, num_chunks = self._members(boundary)
        part = self._build(variant, boundary, is_last, body or members.in_order(stretch.lowered), num_chunks)
        known.append(part)
        self.variants.append(part.variant)
        return part

    def _sliced(self, stretch: Stretch, boundary: Boundary, is_last: bool, purpose: Purpose) -> SlicedPart:
        scope_key = (*self._part_key(stretch, boundary, is_last, purpose), *boundary.signatures.values())
        if scope_key not in self._scopes:

            def find(body: Operation, inner: Boundary) -> CompiledPart:
                return self._compiled_part(stretch, inner, False, body)

            if not self._may_build:
                raise _MissingError
            self._scopes[scope_key] = SlicedPart(stretch.lowered[0], boundary, find, purpose)
        return self._scopes[scope_key]

    def _part_key(self, stretch: Stretch, boundary: Boundary, *rest: Any) -> tuple[Any, ...]:
        """Return everything that a part depends on except the signatures of the fields that it reads."""
        context = boundary.static.context
        settings = (self._contexts.setdefault(context, context), context.schedules, environment())
        acting = tuple((lowered.node, lowered.algorithm and lowered.algorithm.name) for lowered in stretch.lowered)
        return (
            stretch.segment,
            acting,
            stretch.bits,
            boundary.used,
            frozenset(boundary.held.items()),
            *settings,
            *rest,
        )

    def _build(
        self, variant: Variant, boundary: Boundary, is_last: bool, body: Operation, num_chunks: int
    ) -> CompiledPart:
        options, signatures = self.options, boundary.signatures
        self._say(f"purecompose: compiling {variant.title} ...")
        # A step whose time has come would only wait for the other process.
        background = None if options.is_due(boundary.static.opened(later=False)) else self._background
        if background is None and options.backend == "inductor":
            with contextlib.suppress(ImportError, AttributeError, TypeError):  # reported by compile_graph
                start_inductor(boundary.device)
        start = time.perf_counter()
        with noting_shares() as shares:
            captured = self._captured(variant, body, of_chunk(boundary, num_chunks), is_last)
        form = None
        if self.ranks is not None:
            write_early(captured.graph, ())
            form = GraphForm.of(captured.graph.graph, variant.title, shares)
        if captured.sizes is not None:
            variant.batch = _words(captured.sizes.describe("batch", signatures["batch"]))
        variant.trace_seconds = time.perf_counter() - start
        variant.nodes = len(captured.graph.graph.nodes)
        whole, for_all = in_chunks(captured, boundary, num_chunks)
        part = CompiledPart(
            whole,
            lambda: for_all(compile_graph(captured.graph, options.backend, options.mode)),
            variant,
            form=form,
            awaited=None if background is None else background.submit(captured.graph, options.mode),
            replays=options.mode == "reduce-overhead"
            and boundary.device.type == "cuda"
            and captured.sizes is None
            and form is None,
        )
        if background is None:
            part.compile()
            self._say(f" {variant.nodes} operations, {variant.seconds:.1f} s\n")
        else:
            self._say(f" {variant.nodes} operations, in the background\n")
        return part

    def _members(self, boundary: Boundary) -> tuple[Members, int]:
        """Return the members whose operations are one graph, and the number of times that it is called.

        It is called for each chunk of a population only on the CPU: kernels for GPUs assume aligned tensors.
        """
        members = self.step.members
        if isinstance(members, Stacked) and boundary.device.type == "cpu" and not self.options.dynamic:
            return members.in_chunks()
        return members, 1

    def _captured(self, variant: Variant, body: Operation, boundary: Boundary, is_last: bool) -> Captured:
        dynamic = self.options.dynamic
        if dynamic and can_open(boundary.signatures, is_all=dynamic == "all"):
            try:
                return capture(body, boundary, is_last=is_last, dynamic=dynamic)
            except Exception as error:  # if a fixed size fails too, that error is raised
                variant.why_fixed = f"{type(error).__name__}: {error}".splitlines()[0]
        return capture(body, boundary, is_last=is_last)

    def _acting(self, stretch: Stretch) -> tuple[str, ...]:
        """Return the algorithms that act in a stretch, as `name at event`."""
        nodes = dict.fromkeys(lowered.node for lowered in stretch.lowered)
        events = [event for node in nodes for event in events_in([self.step.program[node]])]
        here = {lowered.algorithm.name for lowered in stretch.lowered if lowered.algorithm is not None}
        return tuple(
            f"{algorithm.name} at {event}"
            for event in events
            for algorithm in self.step.matcher.matched(stretch.bits, event, self.step.algorithms)
            if algorithm.name in here or event in self.step.differentiated
        )


def _fill_caches(start: State) -> None:
    """Run forward once on real tensors, so that tensors it caches in a function or a global are not fake ones."""
    if start.model.skeleton(train=True).is_fixed:  # such a network has only torch's layers, which cache nothing
        return
    one = member(start, 0) if start.key.ndim > 1 else start
    with contextlib.suppress(Exception), torch.no_grad():  # errors are reported by the step itself
        one.run_model(one.inputs, train=True)


def _check_values(operations: Sequence[Lowered], start: State) -> None:
    """Run a step up to the operation that has a check, and check its input."""
    places = [place for place, lowered in enumerate(operations) if lowered.check is not None]
    if not places:
        return
    with looking_for_draws(), torch.no_grad():
        carry = in_order(lowered.run for lowered in operations[: places[0]])(Carry(start), NO_PURPOSE)
        check = operations[places[0]].check
        assert check is not None
        check(carry)


def _shapes(batch: Signature) -> str:
    return _words([spec.shape for spec in batch.specs])


def _words(shapes: Iterable[Iterable[Any]]) -> str:
    return " ".join("x".join(map(str, shape)) or "()" for shape in shapes)


class _MissingError(Exception):
    """A graph does not exist yet."""


IDLE: dict[str, Signature] = {**dict.fromkeys(FIELDS, ABSENT), "metrics": Signature.of({})[0]}
"""The signatures of fields that are not set."""
