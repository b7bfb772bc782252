"""The graph cache: the graphs of a step and the plans built from them, each checked in a first run.

Processes that share each batch agree on what is known, and on what fails: one that took another way, for which it sends
other messages, would wait for the others forever.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from purecompose._support.messages import warn
from purecompose.core.compose import Step
from purecompose.core.context import Context
from purecompose.core.operation import Carry, Operation, Purpose, in_order
from purecompose.core.ranks import Ranks
from purecompose.core.state import State
from purecompose.errors import TraceError
from purecompose.transforms.compilation.backends import Options
from purecompose.transforms.compilation.building import Builder, SlicedPart
from purecompose.transforms.compilation.capture import FALLBACK_ADVICE, explained, fake_mode, state_of
from purecompose.transforms.compilation.parts import (
    EAGER,
    CompiledPart,
    Entry,
    ExecutionPlan,
    PlanPart,
    Segments,
    Stretch,
    Variant,
)
from purecompose.transforms.compilation.updates import check_alike
from purecompose.transforms.members import member
from purecompose.transforms.signature import ABSENT, FIELDS, LASTING, Boundary, Signature


def environment() -> tuple[Any, ...]:
    """Return the settings of torch that a graph or its code depends on."""
    return (torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())


_BUILDING = threading.RLock()
"""A lock for tracing, which patches torch for the whole process, so that only one thread can trace at a time."""


class GraphCache:
    """All graphs and plans of a compiled step."""

    def __init__(self, step: Step, options: Options) -> None:
        self.step, self.options, self.segments = step, options, Segments(step)
        self.ranks = step.ranks
        self._builder = Builder(step, options)
        self._compiled_parts: dict[Any, list[CompiledPart]] = {}
        self._contexts: dict[Context, Context] = {}
        self._entries: dict[Any, Entry] = {}
        self._scopes: dict[Any, SlicedPart] = {}
        self._refused: set[str] = set()
        self._may_build = True

    @property
    def variants(self) -> list[Variant]:
        """The compiled parts, in the order in which they were built."""
        return self._builder.variants

    def entry(self, context: Context, signatures: Mapping[str, Signature]) -> Entry:
        """Return the single entry for states of a context and signatures."""
        schedules = context.schedules  # not part of a context's equality; they decide the order of values in the clock
        context = self._contexts.setdefault(context, context)
        entry_key = (context, schedules, *[signatures[name] for name in (*LASTING, "key", "loss")])
        if entry_key not in self._entries:
            self._entries[entry_key] = Entry(context, {**IDLE, **signatures})
        return self._entries[entry_key]

    def plan(self, boundary: Boundary, bits: int, first_stretch: int = 0) -> ExecutionPlan:
        """Return the plan from a boundary to the end of the step, or to the next host algorithm."""
        stretches = self.segments.stretches(self.step.lowered(bits), bits)
        parts: list[PlanPart] = []
        for stretch in stretches[first_stretch:]:
            if stretch.kind == "host":
                return ExecutionPlan(parts, boundary, stretch.lowered[0], stretch.number + 1)
            is_last = stretch is stretches[-1]
            if stretch.kind == "sliced":
                purpose = self.step.purpose(bits)._replace(frees_fields=False)
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
        """
        device = boundary.device
        try:
            with _BUILDING:
                known = self._plan_of_known(boundary, bits, first_stretch) if self.options.dynamic else None
                if start is not None and not (self.options.dynamic and all_true(self.ranks, known is not None, device)):
                    _watch(self.step, start, boundary.signatures, bits)
                with failing_together(self.ranks, device):
                    plan = known or self.plan(boundary, bits, first_stretch)
                if self.ranks is not None:
                    forms = [one.form for part in plan.parts for one in part.compiled_parts() if one.form is not None]
                    check_alike(self.ranks, forms, device)
                return plan
        except TraceError as error:
            self.fall_back(error)
            return EAGER

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
        part = self._builder.part(stretch, boundary, is_last, body)
        known.append(part)
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
        held = frozenset(boundary.held.items())
        return (stretch.segment, acting, stretch.bits, boundary.used, held, *settings, *rest)


class _MissingError(Exception):
    """A graph does not exist yet."""


IDLE: dict[str, Signature] = {**dict.fromkeys(FIELDS, ABSENT), "metrics": Signature.of({})[0]}
"""The signatures of fields that are not set."""


def _watch(step: Step, start: State, signatures: Mapping[str, Signature], bits: int) -> None:
    """Run a step on fake tensors, which take no memory, and check it as the first run of a schedule."""
    ranks = step.ranks
    _fill_caches(start)
    with failing_together(ranks, start.device), explained(), fake_mode(), torch.no_grad():
        fields = {
            name: signature.build([spec.empty() for spec in signature.specs]) for name, signature in signatures.items()
        }
        step.run_checked(bits, state_of(start.static, None, fields), step.purpose())
    if ranks is not None:
        _check_values(step, bits, start)


def _fill_caches(start: State) -> None:
    """Run forward once on real tensors, so that tensors it caches in a function or a global are not fake ones."""
    if start.model.skeleton(train=True).is_fixed:  # such a network has only torch's layers, which cache nothing
        return
    one = member(start, 0) if start.key.ndim > 1 else start
    with contextlib.suppress(Exception), torch.no_grad():  # errors are reported by the step itself
        one.run_model(one.inputs, train=True)


def _check_values(step: Step, bits: int, start: State) -> None:
    """Run a step up to the operation that has a check, and check its input."""
    operations = step.lowered(bits)
    places = [place for place, lowered in enumerate(operations) if lowered.check is not None]
    if not places:
        return
    with torch.no_grad():
        before = in_order(lowered.run for lowered in operations[: places[0]])
        carry = before(Carry(start), step.purpose()._replace(is_first=True))
        check = operations[places[0]].check
        assert check is not None
        check(carry)


def all_true(ranks: Ranks | None, own: bool, device: torch.device) -> bool:
    """Return whether this is true in all processes, which must all ask; without ranks, there is only this one."""
    return own if ranks is None else all(_gathered(ranks, int(own), device))


@contextmanager
def failing_together(ranks: Ranks | None, device: torch.device) -> Iterator[None]:
    """Return a scope, in which no messages are sent, that ends with an error in all processes or in none."""
    if ranks is None:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    own = 0 if error is None else 1 if isinstance(error, TraceError) else 2
    kinds = _gathered(ranks, own, device)
    worst = max(kinds)
    if error is not None and own == worst:
        raise error
    if worst:
        failed = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind == worst)
        text = f"compile: rank {failed} failed to compile a part of the step, and its own error tells why"
        raise TraceError(f"{text}{FALLBACK_ADVICE}") if worst == 1 else RuntimeError(text)


def _gathered(ranks: Ranks, own: int, device: torch.device) -> list[int]:
    return ranks.gather(torch.tensor([own], device=device)).tolist()
