"""Microbatches in a compiled step: the graph of a slice is built once and called for each slice."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily

from purecompose._support.functorch import is_transforming
from purecompose.core.operation import Carry, Lowered, Operation, Purpose
from purecompose.transforms.compilation.boundary import FIELDS, Boundary, Source, Writes
from purecompose.transforms.compilation.capture import explained, fake_mode, state_of
from purecompose.transforms.compilation.plan_parts import CompiledPart, Values
from purecompose.transforms.donation import LASTING, StateBuffers
from purecompose.transforms.signature import Signature, spec_of


_TERMS = ".terms"
"""Name of the metric in which a slice's graph returns the number of terms that its loss is a mean of."""


class SlicedPart:
    """A scope that cuts the batch: it runs as composed, except for the slices, which run compiled.

    Averaging and cutting run as in the composed step; their cost is small compared with a slice of a batch that is too
    large for the memory. One graph for all slices would be longer by the number of slices.
    """

    takes_clock, is_plain, writes_buffers = True, False, False

    def __init__(
        self,
        scope: Lowered,
        boundary: Boundary,
        find: Callable[[Operation, Boundary], CompiledPart],
        purpose: Purpose,
    ) -> None:
        """Build the slices' graphs for an incoming state.

        Args:
            scope: The scope.
            boundary: The incoming state.
            find: Function that returns the compiled part of a body for the boundary at its start.
            purpose: The purpose of its runs.
        """
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
        buffers = {_storage(fakes[name][i]) for name, i in boundary.held if name}
        self.writes: dict[str, Any] = {}
        self._views: list[tuple[str, int]] = []
        """Results that are views of donated buffers and are copied, because the end of the step will write there."""
        for name in FIELDS:
            if getattr(end, name) is not before[name]:
                signature, tensors = Signature.of(getattr(end, name))
                where = tuple(places.get(id(tensor), Source("", 0)) for tensor in tensors)
                if name in ("loss", "metrics"):  # these outlive the step and must not be donated buffers
                    where = tuple(Source("", 0) if source in boundary.held else source for source in where)
                views = [i for i, t in enumerate(tensors) if not where[i].field and _storage(t) in buffers]
                specs = [spec_of(t.clone()) if i in views else spec_of(t) for i, t in enumerate(tensors)]
                self.writes[name] = signature.with_specs(specs), where
                self._views += [(name, i) for i in views]

    def compiled_parts(self) -> Iterable[CompiledPart]:
        """Return the graphs of the slices."""
        return [part for part, _ in self._compiled_parts.values()]

    def after(self, boundary: Boundary) -> Boundary:
        """Return the boundary after the scope."""
        writes: Writes = self.writes
        return boundary.after(writes, self.used)

    def run(self, values: Values, buffers: StateBuffers, *, from_buffers: bool) -> None:
        """Run the scope and put its results into `values`."""
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
            end = body(carry, slices._replace(shares=purpose.shares))
            counts.append(None if isinstance(end.terms, Tensor) else end.terms)
            return end

        with unset_fake_temporarily():
            part = self._find(counted, boundary)
        return part, counts[-1]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_NO_BUFFERS = StateBuffers({}, {name: [] for name in LASTING}, is_donated=False)
