"""The library of a compiled step: its links, and the routes made of them. What is missing is compiled here."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from purecompose._support.warnings import warn
from purecompose.core.compose import Step
from purecompose.core.context import Context
from purecompose.core.operation import Operation
from purecompose.core.scopes import events_in
from purecompose.core.state import State
from purecompose.transforms.compilation.backends import compile_graph
from purecompose.transforms.compilation.capture import (
    FALLBACK_ADVICE,
    Captured,
    TraceError,
    capture,
    explained,
    fake_mode,
    state_of,
)
from purecompose.transforms.compilation.links import EAGER, Entry, Leg, Link, Route
from purecompose.transforms.compilation.seam import FIELDS, Seam
from purecompose.transforms.compilation.segments import Part, Segments
from purecompose.transforms.compilation.sizes import opened, size_of
from purecompose.transforms.compilation.sliced import SlicedLink
from purecompose.transforms.compilation.variants import Variant, too_many
from purecompose.transforms.form import Form
from purecompose.transforms.lease import LASTING
from purecompose.transforms.members import member


__all__ = ["Library", "Options", "environment"]


@dataclass(frozen=True)
class Options:
    """How a step is compiled; see `purecompose.compile`."""

    donate: bool
    backend: str | Callable[..., Any]
    mode: str | None
    fallback: bool
    eager_below: int
    dynamic: bool
    max_variants: int
    announce: Callable[[str], object] | None


def environment() -> tuple[Any, ...]:
    """What torch's settings put into a graph or its code, beside what comes in."""
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )


_BUILDING = threading.RLock()
"""Tracing patches torch for the whole process: one thread at a time."""


class Library:
    """All that a compiled step has compiled."""

    def __init__(self, step: Step, options: Options) -> None:
        """Starts empty."""
        self.step, self.options, self.segments = step, options, Segments(step)
        self.variants: list[Variant] = []
        self._links: dict[Any, list[Link]] = {}
        self._contexts: dict[Context, Context] = {}
        self._entries: dict[Any, Entry] = {}
        self._scopes: dict[Any, SlicedLink] = {}
        self._refused: set[str] = set()

    def entry(self, context: Context, forms: Mapping[str, Form]) -> Entry:
        """The one entry for a form of state: same context, same forms of what lasts, of key and loss."""
        schedules = context.schedules  # no part of the equality: they only say what lies where in the clock
        context = self._contexts.setdefault(context, context)
        place = (context, schedules, *[forms[name] for name in (*LASTING, "key", "loss")])
        if place not in self._entries:
            self._entries[place] = Entry(context, {**IDLE, **forms})
        return self._entries[place]

    def route(self, seam: Seam, bits: int, first_part: int = 0) -> Route:
        """The links from a seam to the end of the step, or to the next host algorithm.

        Args:
            seam: Where it begins.
            bits: The schedule.
            first_part: The part of the step that begins there.
        """
        parts = self.segments.parts(self.step.lowered(bits), bits)
        links: list[Leg] = []
        for part in parts[first_part:]:
            if part.kind == "host":
                return Route(links, seam, part.lowered[0], part.number + 1)
            is_last = part is parts[-1]
            find = self._sliced if part.kind == "sliced" else self._link
            links.append(find(part, seam, is_last))
            seam = links[-1].after(seam)
        return Route(links, seam, writes_lane=bool(links) and links[-1].writes_lane)

    def route_or_eager(self, seam: Seam, bits: int, first_part: int = 0, start: State | None = None) -> Route:
        """As `route`; with `fallback` what cannot be traced is `EAGER`.

        Args:
            seam: Where it begins.
            bits: The schedule.
            first_part: The part of the step that begins there.
            start: The step's beginning, for a first run without host algorithms: it is watched.
        """
        try:
            with _BUILDING:
                if start is not None:
                    self._watch(start, seam.forms, bits)
                return self.route(seam, bits, first_part)
        except TraceError as error:
            self.fall_back(error)
            return EAGER

    def fall_back(self, error: Exception) -> None:
        """Warns once that steps run eagerly, or raises."""
        if not self.options.fallback:
            raise error
        if str(error) not in self._refused:
            self._refused.add(str(error))
            text = str(error).removesuffix(FALLBACK_ADVICE)
            warn(f"{text}. As fallback=True asks, such steps run eagerly")

    def operation(self, bits: int, first_part: int = 0) -> Operation:
        """Return what a schedule does from a part on."""
        parts = self.segments.parts(self.step.lowered(bits), bits)[first_part:]
        return self.step.members.in_order([lowered for part in parts for lowered in part.lowered])

    def has_host(self, bits: int) -> bool:
        """Whether something acts in a schedule that is not compiled."""
        return any(lowered.is_host for lowered in self.step.lowered(bits))

    def _watch(self, start: State, forms: Mapping[str, Form], bits: int) -> None:
        """Runs a step watched, as `compose` does with the first run of a variant; fake tensors take no memory."""
        _fill_caches(start)
        with explained(), fake_mode(), torch.no_grad():
            fields = {name: form.build([spec.empty() for spec in form.specs]) for name, form in forms.items()}
            self.step.run_checked(bits, state_of(start.static, None, fields))

    def _link(self, part: Part, seam: Seam, is_last: bool, body: Operation | None = None) -> Link:
        """The graph of a part, or of a body within it."""
        lane = tuple(seam.lane.values()) if seam.lane is not None and is_last else None
        known = self._links.setdefault(self._place(part, seam, is_last, lane, body), [])
        for link in known:
            if link.fits(seam.forms):
                return link
        is_open = self.options.dynamic and size_of(seam.forms) >= 2  # torch takes sizes of 0 and 1 for special
        if torch.is_anomaly_enabled():
            warn(
                "anomaly detection does not see into a compiled step: to find where a NaN comes from, run the step "
                "that was given to pc.compile"
            )
        variant = Variant(part.segment, self._acting(part), _shapes(seam.forms["batch"], is_open=is_open))
        if len(self.variants) >= self.options.max_variants:
            raise too_many(self.variants, variant, self.options.max_variants)
        link = self._build(variant, seam, is_last, body or self.step.members.in_order(part.lowered), is_open)
        known.append(link)
        self.variants.append(link.variant)
        return link

    def _sliced(self, part: Part, seam: Seam, is_last: bool) -> SlicedLink:
        place = (*self._place(part, seam, is_last), *seam.forms.values())
        if place not in self._scopes:

            def find(body: Operation, inner: Seam) -> Link:
                return self._link(part, inner, False, body)

            self._scopes[place] = SlicedLink(part.lowered[0], seam, find)
        return self._scopes[place]

    def _place(self, part: Part, seam: Seam, *rest: Any) -> tuple[Any, ...]:
        """All that a link depends on, but for the forms of the fields that it reads."""
        context = seam.static.context
        settings = (self._contexts.setdefault(context, context), context.schedules, environment())
        acting = tuple((lowered.node, lowered.algorithm and lowered.algorithm.name) for lowered in part.lowered)
        return (part.segment, acting, part.bits, seam.used, frozenset(seam.held.items()), *settings, *rest)

    def _build(self, variant: Variant, seam: Seam, is_last: bool, body: Operation, is_open: bool) -> Link:
        options, forms = self.options, seam.forms
        say = options.announce or (lambda text: None)
        say(f"purecompose: compiling {variant.title} ...")
        start = time.perf_counter()
        captured = self._captured(body, seam, is_last, is_open)
        if captured.size is None:
            variant.batch = _shapes(forms["batch"], is_open=False)
        traced = time.perf_counter()
        call = compile_graph(captured.graph, options.backend, options.mode)
        variant.trace_seconds, variant.compile_seconds = traced - start, time.perf_counter() - traced
        variant.nodes = len(captured.graph.graph.nodes)
        say(f" {variant.nodes} operations, {variant.seconds:.1f} s\n")
        replays = options.mode == "reduce-overhead" and forms["key"].specs[0].device.type == "cuda"
        return Link(captured, call, variant, replays=replays)

    @staticmethod
    def _captured(body: Operation, seam: Seam, is_last: bool, is_open: bool) -> Captured:
        if is_open:
            try:
                return capture(body, seam, is_last=is_last, is_open=True)
            except Exception:  # whatever it is, a fixed size has it too, or can do without
                pass
        return capture(body, seam, is_last=is_last)

    def _acting(self, part: Part) -> tuple[str, ...]:
        """The algorithms that act in a part, as `name at event`."""
        nodes = dict.fromkeys(lowered.node for lowered in part.lowered)
        events = [event for node in nodes for event in events_in([self.step.program[node]])]
        here = {lowered.algorithm.name for lowered in part.lowered if lowered.algorithm is not None}
        return tuple(
            f"{algorithm.name} at {event}"
            for event in events
            for algorithm in self.step.matcher.matched(part.bits, event, self.step.algorithms)
            if algorithm.name in here or event in self.step.differentiated
        )


def _fill_caches(start: State) -> None:
    """Runs forward once on real tensors: what it caches in a function or a global would be a fake tensor otherwise."""
    if start.model.skeleton(train=True).is_fixed:  # torch's layers cache nothing there
        return
    one = member(start, 0) if start.key.ndim > 1 else start
    with contextlib.suppress(Exception), torch.no_grad():  # what is wrong is reported by the step itself
        one.run_model(one.inputs, train=True)


def _shapes(batch: Form, *, is_open: bool) -> str:
    shapes = [spec.shape for spec in (opened(batch, size_of({"batch": batch})) if is_open else batch).specs]
    return " ".join("x".join("n" if size == -1 else str(size) for size in shape) or "()" for shape in shapes)


IDLE: dict[str, Form] = {name: Form.of({} if name == "metrics" else None)[0] for name in FIELDS}
"""What a state's fields are when nothing is said."""
