"""The building of compiled parts: stretches of a step, chunks of a population, slices of a batch."""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from purecompose._support.contexts import storage_of
from purecompose._support.internals import is_fake, is_transforming, unset_fake_temporarily
from purecompose._support.messages import warn
from purecompose.core.compose import Step
from purecompose.core.operation import Carry, Lowered, Members, Operation, Purpose
from purecompose.core.program import events_in
from purecompose.transforms.compilation.backends import Options, compile_graph
from purecompose.transforms.compilation.capture import Captured, capture, explained, fake_mode, state_of
from purecompose.transforms.compilation.gpu import Compiled, check_on_device
from purecompose.transforms.compilation.inductor import start_inductor
from purecompose.transforms.compilation.parts import CompiledPart, Stretch, Values, Variant, too_many
from purecompose.transforms.compilation.sizes import can_open
from purecompose.transforms.compilation.updates import GraphForm, described, write_early
from purecompose.transforms.members import own_tensors
from purecompose.transforms.population import Stacked
from purecompose.transforms.signature import (
    FIELDS,
    LASTING,
    Boundary,
    Signature,
    Source,
    Spec,
    StateBuffers,
    Writes,
    spec_of,
)


# For a population in chunks, the graph of a chunk of members is built once and called for each chunk. On a CPU a chunk
# whose tensors fit into the cache is faster per member than all members together.


class Builder:
    """The builder of a step's compiled parts."""

    def __init__(self, step: Step, options: Options) -> None:
        self.step, self.options = step, options
        self.variants: list[Variant] = []
        self._ranks = step.ranks

    def part(self, stretch: Stretch, boundary: Boundary, is_last: bool, body: Operation | None = None) -> CompiledPart:
        """Return the compiled graph of a stretch, or of a body within it."""
        if torch.is_anomaly_enabled():
            warn(
                "anomaly detection does not see into a compiled step: to find where a NaN comes from, run the step "
                "that was given to pc.compile"
            )
        variant = Variant(
            stretch.segment, self._acting(stretch), _words(spec.shape for spec in boundary.signatures["batch"].specs)
        )
        if len(self.variants) >= self.options.max_variants:
            raise too_many(self.variants, variant, self.options.max_variants)
        members, num_chunks = self._members(boundary)
        part = self._build(variant, boundary, is_last, body or members.in_order(stretch.lowered), num_chunks)
        self.variants.append(variant)
        return part

    def _build(
        self, variant: Variant, boundary: Boundary, is_last: bool, body: Operation, num_chunks: int
    ) -> CompiledPart:
        options = self.options
        options.announce(f"purecompose: compiling {variant.title} ...")
        if options.backend == "inductor":
            with contextlib.suppress(ImportError, AttributeError, TypeError):  # reported by compile_graph
                start_inductor(boundary.device)
        captured, form = self._traced(variant, of_chunk(boundary, num_chunks), is_last, body)
        whole, for_all = in_chunks(captured, boundary, num_chunks)
        replays = options.mode == "reduce-overhead" and boundary.device.type == "cuda"
        if replays:
            check_on_device(captured.graph, boundary.device)
        start = time.perf_counter()
        call = for_all(compile_graph(captured.graph, options.backend, options.mode))
        variant.compile_seconds = time.perf_counter() - start
        options.announce(f" {variant.nodes} operations, {variant.seconds:.1f} s\n")
        return CompiledPart(whole, call, variant, form=form, replays=replays)

    def _members(self, boundary: Boundary) -> tuple[Members, int]:
        """Return the members whose operations are one graph, and the number of times that it is called.

        It is called for each chunk of a population only on the CPU: kernels for GPUs assume aligned tensors.
        """
        members = self.step.members
        if isinstance(members, Stacked) and boundary.device.type == "cpu" and not self.options.dynamic:
            return members.in_chunks()
        return members, 1

    def _traced(
        self, variant: Variant, boundary: Boundary, is_last: bool, body: Operation
    ) -> tuple[Captured, GraphForm | None]:
        """Return the graph of a body and its form, if several processes share the batch; describe it in its variant."""
        start = time.perf_counter()
        form = None
        captured = self._captured(variant, boundary, is_last, body, self.step.purpose())
        if self._ranks is not None:
            write_early(captured.graph, ())
            form = GraphForm(variant.title, tuple(described(captured.graph.graph)))
        if captured.sizes is not None:
            variant.batch = _words(captured.sizes.describe("batch", boundary.signatures["batch"]))
        variant.trace_seconds = time.perf_counter() - start
        variant.nodes = len(captured.graph.graph.nodes)
        return captured, form

    def _captured(
        self, variant: Variant, boundary: Boundary, is_last: bool, body: Operation, purpose: Purpose
    ) -> Captured:
        dynamic, layout = self.options.dynamic, boundary.static.context.layout
        if dynamic and can_open(boundary.signatures, layout, is_all=dynamic == "all"):
            try:
                return capture(body, boundary, purpose, is_last=is_last, dynamic=dynamic)
            except Exception as error:  # if a fixed size fails too, that error is raised
                variant.why_fixed = f"{type(error).__name__}: {error}".splitlines()[0]
        return capture(body, boundary, purpose, is_last=is_last)

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


def _words(shapes: Iterable[Iterable[Any]]) -> str:
    return " ".join("x".join(map(str, shape)) or "()" for shape in shapes)


def of_chunk(boundary: Boundary, num: int) -> Boundary:
    """Return the boundary of one of `num` chunks of the members."""
    if num == 1:
        return boundary

    def one(spec: Spec, is_own: bool) -> Spec:
        return spec._replace(shape=torch.Size((spec.shape[0] // num, *spec.shape[1:]))) if is_own else spec

    signatures = {
        name: signature.with_specs(map(one, signature.specs, _own(signature)))
        for name, signature in boundary.signatures.items()
    }
    donated = boundary.donated and {name: signatures[name] for name in boundary.donated}
    return replace(boundary, signatures=signatures, donated=donated)


def in_chunks(captured: Captured, boundary: Boundary, num: int) -> tuple[Captured, Callable[[Compiled], Compiled]]:
    """Return the graph of a chunk with the signatures of all members, and what makes its compiled form run for them."""
    if num == 1:
        return captured, lambda call: call
    own = {name: _own(signature) for name, signature in boundary.signatures.items()}
    are_args_own = [own[field][place] for field, place in (*captured.takes, *captured.targets)]
    joined: dict[int, Spec | None] = {}  # for each result, the spec of the joined one if there is a row for each member

    def of_all(spec: Spec, source: Source, is_own: bool) -> Spec:
        if source.field:
            return boundary.signatures[source.field].specs[source.place]
        joined[source.place] = _of_all(spec, num) if is_own else None
        return joined[source.place] or spec

    writes = {
        name: (signature.with_specs(map(of_all, signature.specs, where, _own(signature))), where)
        for name, (signature, where) in captured.writes.items()
    }

    def for_all(call: Compiled) -> Compiled:
        def call_each(args: list[Tensor]) -> list[Tensor]:
            rows = [arg.chunk(num) if is_own else [arg] * num for arg, is_own in zip(args, are_args_own, strict=True)]
            columns = list(zip(*(call(list(chunk)) for chunk in zip(*rows, strict=True)), strict=True))
            return [
                columns[place][0] if spec is None else torch.cat(columns[place], out=spec.empty())
                for place, spec in sorted(joined.items())
            ]

        return call_each

    reads = {name: boundary.signatures[name] for name in captured.reads}
    return captured._replace(reads=reads, writes=writes), for_all


def _own(signature: Signature) -> list[bool]:
    """Return for each tensor of a stacked value whether it has a row for each member."""
    with fake_mode():
        tensors = [spec.empty() for spec in signature.specs]
    own = set(map(id, own_tensors(signature.build(tensors))))
    return [id(tensor) in own for tensor in tensors]


def _of_all(spec: Spec, num: int) -> Spec:
    """Return the spec of the chunks' results joined, one member after the other, each laid out as before."""
    row = torch.empty_like(torch.empty_strided(spec.shape[1:], spec.stride[1:], device="meta"))
    shape = torch.Size((spec.shape[0] * num, *row.shape))
    return spec._replace(shape=shape, stride=(max(row.numel(), 1), *row.stride()))


_TERMS = ".terms"
"""Name of the metric in which a slice's graph returns the number of terms that its loss is a mean of."""


class SlicedPart:
    """A scope that cuts the batch: it runs as composed, except for the slices, which run compiled.

    Averaging and cutting run as in the composed step; their cost is small compared with a slice of a batch that is too
    large for the memory. One graph for all slices would be longer by the number of slices.
    """

    takes_clock, is_plain, writes_buffers = True, False, False

    def __init__(
        self, scope: Lowered, boundary: Boundary, find: Callable[[Operation, Boundary], CompiledPart], purpose: Purpose
    ) -> None:
        """Build the slices' graphs for an incoming state; `find` returns the compiled part of a body."""
        assert scope.with_slices is not None
        self._find, self._boundary, self._is_building = find, boundary, True
        self._purpose = purpose
        self._compiled_parts: dict[Any, tuple[CompiledPart, int | None]] = {}
        self._run = scope.with_slices(self._compiled)
        mode = fake_mode()
        with explained(), mode, torch.no_grad():
            fakes = {name: [spec.empty() for spec in boundary.signatures[name].specs] for name in FIELDS}
            before = {name: boundary.signatures[name].build(fakes[name]) for name in FIELDS}
            end, self.used, _ = self._run(Carry(state_of(boundary.static, None, before), boundary.used), purpose)
        self._is_building = False
        places = {id(tensor): Source(name, i) for name in reversed(FIELDS) for i, tensor in enumerate(fakes[name])}
        buffers = {storage_of(fakes[name][i]) for name, i in boundary.held if name}
        self.writes: dict[str, Any] = {}
        self._views: list[tuple[str, int]] = []
        """Results that are views of donated buffers and are copied, because the end of the step will write there."""
        for name in FIELDS:
            if getattr(end, name) is not before[name]:
                signature, tensors = Signature.of(getattr(end, name))
                where = tuple(places.get(id(tensor), Source("", 0)) for tensor in tensors)
                if name in ("loss", "metrics"):  # these outlive the step and must not be donated buffers
                    where = tuple(Source("", 0) if source in boundary.held else source for source in where)
                views = [i for i, t in enumerate(tensors) if not where[i].field and storage_of(t) in buffers]
                specs = [spec_of(t.clone()) if i in views else spec_of(t) for i, t in enumerate(tensors)]
                self.writes[name] = signature.with_specs(specs), where
                self._views += [(name, i) for i in views]

    def compiled_parts(self) -> Iterable[CompiledPart]:
        return [part for part, _ in self._compiled_parts.values()]

    def after(self, boundary: Boundary) -> Boundary:
        writes: Writes = self.writes
        return boundary.after(writes, self.used)

    def run(self, values: Values, buffers: StateBuffers, *, from_buffers: bool) -> None:
        del buffers, from_buffers
        before = {name: self._boundary.signatures[name].build(values[name]) for name in FIELDS}
        start = state_of(self._boundary.static, None, before)
        with torch.no_grad():
            end = self._run(Carry(start, self._boundary.used), self._purpose).state
        values.update({name: Signature.of(getattr(end, name))[1] for name in self.writes})
        for name, i in self._views:
            values[name][i] = values[name][i].clone()

    def _compiled(self, body: Operation) -> Operation:
        def with_terms(carry: Carry, purpose: Purpose) -> Carry:
            end = body(carry, purpose)
            if isinstance(end.terms, Tensor):
                end = end._replace(state=end.state.replace(metrics={**end.state.metrics, _TERMS: end.terms}))
            return end

        def run(carry: Carry, purpose: Purpose) -> Carry:
            state = carry.state
            if is_transforming() or (is_fake(state.key) and not self._is_building):
                return body(carry, purpose)  # state.gradient, in a part that is being traced
            # The first example differs from slice to slice, and must not be a constant of the graph.
            if not isinstance(state.first_example, Tensor):
                first = torch.full((), state.first_example or 0, dtype=torch.int64, device=state.key.device)
                state = state.replace(first_example=first)
            found = {name: Signature.of(getattr(state, name)) for name in FIELDS}
            boundary = Boundary(
                self._boundary.static, {name: signature for name, (signature, _) in found.items()}, carry.used
            )
            is_empty = None if purpose.part is None else purpose.part.is_empty
            body_key = body, tuple(boundary.signatures.values()), boundary.used, is_empty
            if body_key not in self._compiled_parts:
                self._compiled_parts[body_key] = self._built(with_terms, boundary, purpose)
            part, num_terms = self._compiled_parts[body_key]
            if self._is_building:
                return body(carry._replace(state=state), purpose)
            values = {name: tensors for name, (_, tensors) in found.items()}
            part.run(values, _NO_BUFFERS, from_buffers=False)
            after = state.replace(
                **{name: signature.build(values[name]) for name, (signature, _) in part.writes.items()}
            )
            terms = after.metrics.get(_TERMS, num_terms)
            metrics = {name: value for name, value in after.metrics.items() if name != _TERMS}
            return Carry(after.replace(metrics=metrics), part.used, terms)

        return run

    def _built(self, body: Operation, boundary: Boundary, slices: Purpose) -> tuple[CompiledPart, int | None]:
        counts: list[int | None] = []

        def counted(carry: Carry, purpose: Purpose) -> Carry:
            end = body(carry, slices)
            counts.append(None if isinstance(end.terms, Tensor) else end.terms)
            return end

        with unset_fake_temporarily():
            part = self._find(counted, boundary)
        return part, counts[-1]


_NO_BUFFERS = StateBuffers({}, {name: [] for name in LASTING}, is_donated=False)
