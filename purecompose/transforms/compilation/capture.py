"""Capture: trace a part of a step to a flat graph of tensor operations.

The part runs once on fake tensors, which have shapes and dtypes but no numbers. The fields of the state that it reads
are recorded: only these decide later whether the graph may be used again.
"""

import contextlib
import importlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose import tree
from purecompose._support.contexts import unvalidated
from purecompose._support.internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from purecompose._support.messages import layer_of, line_of
from purecompose.core.context import Static
from purecompose.core.operation import NO_PURPOSE, Carry, Operation, Purpose
from purecompose.core.state import State
from purecompose.core.values import fields_where
from purecompose.errors import TraceError
from purecompose.transforms.compilation.sizes import OPEN_FIELDS, Sizes
from purecompose.transforms.compilation.updates import drop_unread
from purecompose.transforms.signature import FIELDS, Boundary, Signature, Source, Spec, Writes


FALLBACK_ADVICE = "; or let such steps run eagerly with compile(step, fallback=True)"
_LEFT_AT_THE_END = fields_where(persists=True)


class Captured(NamedTuple):
    """A part of a step as a flat graph."""

    graph: fx.GraphModule
    """Graph from the tensors of `takes` to the results that `writes` refers to; it also writes into `targets`."""
    takes: tuple[Source, ...]
    targets: tuple[Source, ...]
    """Donated buffers that are written but not read; as inputs they follow those of `takes`."""
    reads: dict[str, Signature]
    """Signatures of the fields that the part read."""
    writes: Writes
    """Fields that it replaced."""
    copies: frozenset[int]
    """Indices of the results that share memory with donated buffers; they are copied before they leave the step."""
    used: frozenset[str]
    """Names of the gradients that updates have applied by the end."""
    sizes: Sizes | None = None
    """Symbolic sizes, if some are left open."""
    writes_buffers: bool = False
    """True if it writes all donated fields into the buffers."""


def fake_mode() -> FakeTensorMode:
    """Return the mode that makes fake tensors; constants in closures are accepted."""
    # Imported here because it imports sympy, which eager runs never need.
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    # Otherwise a number read from a tensor would become a symbol, and reading it would wait for the device.
    env = symbolic_shapes.ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)


class _Recorder:
    """A replacement for a lease while tracing: returns fields, and records which were read."""

    def __init__(self, signatures: Mapping[str, Signature], tensors: Mapping[str, list[Tensor]]) -> None:
        self.signatures, self.tensors = signatures, tensors
        self.issued: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        if name not in self.issued:
            self.issued[name] = self.signatures[name].build(self.tensors[name])
        return self.issued[name]


def state_of(static: Static, reader: Any, fields: Mapping[str, Any] | None = None) -> State:
    """Return a state with these fields, which reads the others from `reader`."""
    state = object.__new__(State)
    state.__dict__.update(fields or {}, static=static, _lease=reader)
    return state


def capture(
    body: Operation,
    boundary: Boundary,
    purpose: Purpose = NO_PURPOSE,
    *,
    is_last: bool = False,
    dynamic: "bool | Literal['all']" = False,
) -> Captured:
    """Trace a part of a step.

    Args:
        boundary: The incoming state. If its fields are in donated buffers, the last part writes there.
        is_last: True if the step ends here: temporary fields are left out.
        dynamic: True to leave the number of examples open, "all" for all sizes of the batch.
    """
    mode, signatures, inputs = fake_mode(), boundary.signatures, boundary.inputs()
    sizes = Sizes(mode, signatures, boundary.static.context.layout, is_all=dynamic == "all") if dynamic else None
    sources = [place for place, source in inputs.items() if place == source]
    with mode:
        flat = [_fake(name, i, signatures[name].specs[i], sizes) for name, i in sources]
    ends: list[_End] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(sources, tensors, strict=True))
        by_field: dict[str, list[Tensor]] = {name: [] for name in FIELDS}
        for place, source in inputs.items():
            by_field[place.field].append(given[source])
        recorder = _Recorder(signatures, by_field)
        with torch.no_grad():
            end = body(Carry(state_of(boundary.static, recorder), boundary.used), purpose)
        incoming = {id(tensor): source for source, tensor in given.items()}
        ends.append(_End(end.state, recorder, incoming, end.used, is_last=is_last))
        return ends[-1].results

    with explained():
        graph = make_fx(run, tracing_mode="symbolic" if dynamic else "fake", _allow_non_fake_inputs=True)(*flat)
    _check_constants(graph)
    draft = _Draft(graph, sources, ends[-1], boundary)
    if boundary.donated is not None:
        draft.keep_out_of_buffers()
        if is_last and draft.fits(boundary.donated):
            draft.write_into_buffers(boundary.donated, boundary.held)
            return draft.finished()._replace(sizes=sizes, writes_buffers=True)
    return draft.finished()._replace(sizes=sizes)


def _check_constants(graph: fx.GraphModule) -> None:
    """Raise a `TraceError` for a tensor that is not from the state: the graph would keep its value while tracing."""
    for node in graph.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(graph, str(node.target), None), FakeTensor):
            raise TraceError(
                "a step cannot be compiled: an algorithm, the loss or the network keeps a tensor of one step for "
                f"another ({tree.describe(getattr(graph, str(node.target)))}), in a closure, a cache or a global. A "
                "graph would hold on to what it was while tracing: keep it in state.slots[name]"
            )


def _fake(field: str, index: int, spec: Spec, sizes: Sizes | None) -> Tensor:
    return spec.empty() if sizes is None or field not in OPEN_FIELDS else sizes.empty(field, index, spec)


class _End:
    """The state that the part returned."""

    def __init__(
        self, state: State, recorder: _Recorder, incoming: Mapping[int, Source], used: frozenset[str], *, is_last: bool
    ) -> None:
        self.reads, self.used = tuple(recorder.issued), used
        self.results: list[Tensor] = []
        self.writes: dict[str, tuple[Signature, tuple[Source, ...]]] = {}
        for name in _LEFT_AT_THE_END if is_last else FIELDS:
            if name not in state.__dict__ or state.__dict__[name] is recorder.issued.get(name, _MISSING):
                continue
            value = state.__dict__[name]
            if any(isinstance(leaf, torch.SymInt) for leaf in tree.leaves(value)):
                raise TraceError(f"state.{name} holds a size of the batch, which was to be left open")
            signature, tensors = Signature.of(value)
            self.writes[name] = signature, tuple(incoming.get(id(t)) or self._result(t) for t in tensors)

    def _result(self, tensor: Tensor) -> Source:
        for index, known in enumerate(self.results):
            if known is tensor:
                return Source("", index)
        self.results.append(tensor)
        return Source("", len(self.results) - 1)


_MISSING = object()


class _Draft:
    """A traced graph, to which donation is added and from which unused nodes are removed."""

    def __init__(self, graph: fx.GraphModule, sources: list[Source], end: _End, boundary: Boundary) -> None:
        self.module, self.graph, self.signatures = graph, graph.graph, boundary.signatures
        self.writes, self.reads, self.used = dict(end.writes), end.reads, end.used
        self.taken_from = boundary.inputs()
        nodes = self.graph.find_nodes(op="placeholder")
        self.inputs: dict[Source, fx.Node] = dict(zip(sources, nodes, strict=True))
        self.donated = {boundary.held[source]: node for source, node in self.inputs.items() if source in boundary.held}
        """Inputs that are donated buffers, by their place."""
        (self.output,) = self.graph.find_nodes(op="output")
        self.results: list[fx.Node] = list(self.output.args[0])  # pyright: ignore[reportArgumentType]
        self.targets: list[Source] = []
        self.read_first: list[fx.Node] = []
        """Copies of tensors about to be overwritten. They are also results, because a compiler treats a copy of an
        input that is not a result as the input itself."""
        self.copies: set[int] = set()
        """Results that the backend may return in the memory of a donated buffer."""

    def keep_out_of_buffers(self) -> None:
        """Copy results that are views of donated buffers, because the end of the step will write there."""
        donated = {_storage(node) for node in self.donated.values()}
        with self.graph.inserting_before(self.output):
            for index, node in enumerate(self.results):
                if _storage(node) in donated:
                    self.results[index] = self._clone(node)
            for name in ("loss", "metrics"):
                if name in self.writes:
                    signature, where = self.writes[name]
                    self.writes[name] = signature, tuple(self._out_of_buffers(source) for source in where)

    def fits(self, donated: Mapping[str, Signature]) -> bool:
        """Return whether the donated fields fit the signatures of the buffers; a host algorithm may change them."""
        return all(
            (self.writes[name][0] if name in self.writes else self.signatures[name]).is_alike(donated[name])
            for name in donated
        )

    def write_into_buffers(self, donated: Mapping[str, Signature], held: Mapping[Source, Source]) -> None:
        """Add copies of the new values into the donated buffers to the end of the graph."""
        moves: list[tuple[fx.Node, fx.Node]] = []
        for name, signature in donated.items():
            _, where = self.writes.pop(name, (None, None))
            for i, spec in enumerate(signature.specs):
                place = Source(name, i)
                source = place if where is None else where[i]
                if held.get(source) != place:
                    value = self._input(source) if source.field else self.results[source.place]
                    moves.append((self.donated.get(place) or self._target(place, spec), value))
        written = {_storage(target) for target, _ in moves}
        values = {_storage(value) for _, value in moves}
        self.copies = {index for index, node in enumerate(self.results) if _storage(node) in values}
        with self.graph.inserting_before(self.output):
            # All reads precede all writes: one tensor's new value may be another's old one.
            moves = [(to, self._clone(value) if _storage(value) in written else value) for to, value in moves]
            self.read_first += [value for _, value in moves if value.target is torch.ops.aten.clone.default]
            for to, value in moves:
                self.graph.call_function(torch.ops.aten.copy_.default, (to, value))

    def finished(self) -> Captured:
        asked = {source.place for _, where in self.writes.values() for source in where if not source.field}
        place = {index: position for position, index in enumerate(sorted(asked))}
        self.output.args = ([*[self.results[index] for index in place], *self.read_first],)
        drop_unread(self.graph)
        for node in self.inputs.values():
            if not node.users:
                self.graph.erase_node(node)
        self.module.recompile()
        left = set(self.graph.find_nodes(op="placeholder"))
        return Captured(
            self.module,
            tuple(source for source, node in self.inputs.items() if node in left),
            tuple(self.targets),
            {name: self.signatures[name] for name in self.reads},
            {
                name: (signature, tuple(s if s.field else Source("", place[s.place]) for s in where))
                for name, (signature, where) in self.writes.items()
            },
            frozenset(place[index] for index in self.copies & asked),
            self.used,
        )

    def _input(self, place: Source) -> fx.Node:
        """Return the input for a place, which may belong to another place with the same memory."""
        return self.inputs[self.taken_from[place]]

    def _out_of_buffers(self, source: Source) -> Source:
        node = None if not source.field else self._input(source)
        if node is None or node not in self.donated.values():
            return source
        self.results.append(self._clone(node))
        return Source("", len(self.results) - 1)

    def _clone(self, node: fx.Node) -> fx.Node:
        clone = self.graph.call_function(torch.ops.aten.clone.default, (node,))
        with node.meta["val"].fake_mode:
            clone.meta["val"] = node.meta["val"].clone()
        return clone

    def _target(self, place: Source, spec: Spec) -> fx.Node:
        last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(f"target_{len(self.targets)}")
        with last.meta["val"].fake_mode:
            node.meta["val"] = spec.empty()
        self.targets.append(place)
        return node


def _storage(node: fx.Node) -> int:
    return node.meta["val"].untyped_storage()._cdata


_UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Return a context manager for tracing that reports untraceable operations with algorithm, line and remedy.

    Every other error is raised unchanged. Anomaly detection, which reads numbers, is off.
    """
    try:
        with torch.autograd.set_detect_anomaly(False), unvalidated():  # both would read numbers
            yield
    except Exception as error:
        if not _is_untraceable(error):
            raise
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
        what = _what(error)
        remedy = next((remedy for name, remedy in _REMEDIES.items() if name in what), _REMEDY)
        untraceable = TraceError(
            f"a step cannot be compiled {notes[-1] if notes else 'here'}: {what}, at {line_of(error)}{layer_of(error)}"
            f". {remedy}{FALLBACK_ADVICE}"
        )
        untraceable.algorithm = error.__dict__.get("algorithm")
        raise untraceable from error


_REMEDIES = {
    "_ctc_loss": "losses.ctc(outputs, (indices, lengths, frames)) is the same loss and compiles",
    "_pack_padded_sequence": "Pass the layer padded sequences, and choose or mask its outputs by the lengths",
}
_REMEDY = (
    "While a step is compiled, tensors have no numbers: choose with torch.where, keep shapes fixed (prepare indices, "
    "masks and self-loops of graphs in the data), read time from state.clock as a tensor; or make the algorithm a host "
    "one (host=True)"
)


def _is_untraceable(error: Exception) -> bool:
    # Reading a fake tensor's memory (numpy(), tolist(), data_ptr()) raises plain RuntimeErrors of torch.
    words = (
        "FakeTensor",
        "fake tensor",
        "data-dependent",
        "tensor subclasses",
        "Cannot access data pointer",
        "tracing tensor",
    )
    text = str(error)
    if isinstance(error, _UNTRACEABLE):
        return True
    # "unsupported operand type(s) for +: 'FakeTensor' and 'NoneType'" would be an error in an eager step, too.
    is_told = isinstance(error, (RuntimeError, TypeError, ValueError)) and not text.startswith("unsupported operand")
    return is_told and any(word in text for word in words)


_VALIDATING = "torch.distributions.distribution"


def _what(error: Exception) -> str:
    if isinstance(error, DataDependentOutputException):
        if any(frame.f_globals.get("__name__") == _VALIDATING for frame, _ in traceback.walk_tb(error.__traceback__)):
            return "a distribution checks its values, as validate_args=True asks; leave that out"
        return f"a tensor's number is read ({error.func})"
    if isinstance(error, DynamicOutputShapeException):
        return f"a result's shape depends on numbers ({error.func})"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"
