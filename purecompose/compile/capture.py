"""Capture: a part of a step as a flat graph of tensor operations.

The part runs once on fake tensors, which have a form but no numbers. Which fields of the state it looks at is noted
on the way: these, and no others, decide later whether the graph may be used again.
"""

import contextlib
import importlib
import linecache
import pathlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose._form import ABSENT, Form
from purecompose.compile.sizes import OPEN_FIELDS, Size, size_of
from purecompose.context import Static
from purecompose.folding import Body, Notes
from purecompose.lease import LASTING
from purecompose.state import State


__all__ = ["FIELDS", "Captured", "Source", "TraceError", "capture", "fake_mode", "state_of"]

FIELDS = (
    *LASTING, "key", "loss", "metrics", "batch", "outputs", "grads", "clock", "first_example", "regrad",
)  # fmt: skip
_LEFT_AT_THE_END = (*LASTING, "key", "loss", "metrics")


class TraceError(RuntimeError):
    """A part of a step cannot be compiled: it reads a number, or does something that no graph can hold."""


class Source(NamedTuple):
    """Where a tensor comes from: an incoming field's, or (with no field) one of the graph's results."""

    field: str | None
    index: int


class Captured(NamedTuple):
    """A part of a step, flat."""

    graph: fx.GraphModule
    """Takes the tensors of `takes`, returns those that `writes` asks for; writes into `targets` before it returns."""
    takes: tuple[Source, ...]
    targets: tuple[Source, ...]
    """The lane's tensors that are written but not read, after those of `takes`."""
    reads: dict[str, Form]
    """The fields that the part looked at, as they were."""
    writes: dict[str, tuple[Form, tuple[Source, ...]]]
    """The fields that it replaced: what they are now."""
    copies: frozenset[int]
    """The results that share memory with a lane: they are copied before anybody sees them."""
    used: frozenset[str]
    """The gradients that updates have applied by the end."""
    size: Size | None
    """The number of examples, where it is left open."""


def fake_mode() -> FakeTensorMode:
    """Where fake tensors live; constants of closures are let in."""
    # Imported here: it brings sympy along, which eager runs never need.
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbolic_shapes.ShapeEnv())


class _Recorder:
    """In a lease's place while tracing: hands out fields, and notes which."""

    def __init__(self, forms: Mapping[str, Form], tensors: Mapping[str, list[Tensor]]) -> None:
        self.forms, self.tensors = forms, tensors
        self.issued: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        if name not in self.issued:
            self.issued[name] = self.forms[name].build(self.tensors[name])
        return self.issued[name]


def state_of(static: Static, reader: Any, fields: Mapping[str, Any] | None = None) -> State:
    """A state with these fields, which asks the reader for the others."""
    state = object.__new__(State)
    state.__dict__.update(fields or {}, static=static, _lease=reader)
    return state


def capture(
    body: Body,
    forms: Mapping[str, Form],
    static: Static,
    used: frozenset[str],
    *,
    is_last: bool = False,
    is_donated: bool = False,
    own: Mapping[str, tuple[bool, ...]] | None = None,
    is_open: bool = False,
) -> Captured:
    """Traces a part of a step.

    Args:
        body: The part.
        forms: The form of every field that comes in.
        static: The static part of the state.
        used: The gradients that earlier parts have applied.
        is_last: Whether the step ends here: what is temporary is left out.
        is_donated: Whether the end of the step writes into what comes in.
        own: Write the lasting fields into the lane here, at the end of the part. For each field, which of the
            tensors that come in are the lane's own.
        is_open: Leave the number of examples open.

    Raises:
        TraceError: The part cannot be traced; the message names algorithm and line.
    """
    mode = fake_mode()
    size = Size(mode, size_of(forms)) if is_open else None
    with mode:
        fakes = {
            name: [size.empty(spec) if size and name in OPEN_FIELDS else spec.empty() for spec in form.specs]
            for name, form in forms.items()
        }
    sources = [Source(name, i) for name in FIELDS for i in range(len(fakes[name]))]
    flat = [fakes[source.field][source.index] for source in sources if source.field]
    ends: list[_End] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        by_field: dict[str, list[Tensor]] = {name: [] for name in FIELDS}
        for source, tensor in zip(sources, tensors, strict=True):
            by_field[source.field].append(tensor)  # pyright: ignore[reportArgumentType]
        recorder, notes = _Recorder(forms, by_field), Notes(set(used))
        with torch.no_grad():
            end = body(state_of(static, recorder), notes)
        ends.append(_End(end, recorder, frozenset(notes.used), is_last))
        return ends[-1].results

    with explained():
        graph = make_fx(run, tracing_mode="symbolic" if is_open else "fake", _allow_non_fake_inputs=True)(*flat)
    draft = _Draft(graph, sources, ends[-1], forms)
    if is_donated:
        draft.keep_out_of_lane()
    if own is not None:
        draft.write_into_lane(own)
    return draft.finished()._replace(size=size)


class _End:
    """How the part left the state."""

    def __init__(self, state: State, recorder: _Recorder, used: frozenset[str], is_last: bool) -> None:
        self.reads, self.used = tuple(recorder.issued), used
        incoming = {id(t): Source(name, i) for name in FIELDS for i, t in enumerate(recorder.tensors[name])}
        self.results: list[Tensor] = []
        self.writes: dict[str, tuple[Form, tuple[Source, ...]]] = {}
        for name in _LEFT_AT_THE_END if is_last else FIELDS:
            if name not in state.__dict__ or state.__dict__[name] is recorder.issued.get(name, _MISSING):
                continue
            form, tensors = Form.of(state.__dict__[name])
            self.writes[name] = form, tuple(incoming.get(id(t)) or self._result(t) for t in tensors)

    def _result(self, tensor: Tensor) -> Source:
        for index, known in enumerate(self.results):
            if known is tensor:
                return Source(None, index)
        self.results.append(tensor)
        return Source(None, len(self.results) - 1)


_MISSING = object()


class _Draft:
    """A traced graph on its way: donation is added, and what is not needed taken out."""

    def __init__(self, graph: fx.GraphModule, sources: list[Source], end: _End, forms: Mapping[str, Form]) -> None:
        self.module, self.graph, self.forms = graph, graph.graph, forms
        self.writes, self.reads, self.used = dict(end.writes), end.reads, end.used
        nodes = self.graph.find_nodes(op="placeholder")
        self.inputs: dict[Source, fx.Node] = dict(zip(sources, nodes, strict=True))
        (self.output,) = self.graph.find_nodes(op="output")
        self.results: list[fx.Node] = list(self.output.args[0])  # pyright: ignore[reportArgumentType]
        self.targets: dict[Source, fx.Node] = {}
        self.copies: set[int] = set()
        """Results that the backend may give out in a lane's memory."""

    def keep_out_of_lane(self) -> None:
        """Copies what is a view of a lane's tensor, or lasts as one: the end of the step will write there."""
        lane = {_storage(node) for source, node in self.inputs.items() if source.field in LASTING}
        with self.graph.inserting_before(self.output):
            for index, node in enumerate(self.results):
                if _storage(node) in lane:
                    self.results[index] = self._clone(node)
            for name in ("loss", "metrics"):
                form, where = self.writes.get(name, (ABSENT, ()))
                if any(source.field in LASTING for source in where):
                    self.writes[name] = form, tuple(self._as_result(source) for source in where)

    def write_into_lane(self, own: Mapping[str, tuple[bool, ...]]) -> None:
        """Lets the graph end with copies of the new values into the lane's tensors."""
        moves: list[tuple[fx.Node, fx.Node]] = []
        for name in LASTING:
            _, where = self.writes.pop(name, (None, None))
            for i, is_own in enumerate(own[name]):
                place = Source(name, i)
                source = place if where is None else where[i]
                if is_own and source == place:
                    continue
                value = self.inputs[source] if source.field else self.results[source.index]
                moves.append((self.inputs[place] if is_own else self._target(place), value))
        written = {_storage(target) for target, _ in moves}
        values = {_storage(value) for _, value in moves}
        self.copies = {index for index, node in enumerate(self.results) if _storage(node) in values}
        with self.graph.inserting_before(self.output):
            # All reading comes before all writing: one tensor's new value may be another's old one.
            moves = [(to, self._clone(value) if _storage(value) in written else value) for to, value in moves]
            for to, value in moves:
                self.graph.call_function(torch.ops.aten.copy_.default, (to, value))

    def finished(self) -> Captured:
        asked = {source.index for _, where in self.writes.values() for source in where if source.field is None}
        place = {index: position for position, index in enumerate(sorted(asked))}
        self.output.args = ([self.results[index] for index in place],)
        self.graph.eliminate_dead_code()
        for node in self.inputs.values():
            if not node.users:
                self.graph.erase_node(node)
        self.module.recompile()
        left = set(self.graph.find_nodes(op="placeholder"))
        return Captured(
            self.module,
            tuple(source for source, node in self.inputs.items() if node in left),
            tuple(self.targets),
            {name: self.forms[name] for name in self.reads},
            {
                name: (form, tuple(s if s.field else Source(None, place[s.index]) for s in where))
                for name, (form, where) in self.writes.items()
            },
            frozenset(place[index] for index in self.copies & asked),
            self.used,
            None,
        )

    def _as_result(self, source: Source) -> Source:
        if source.field not in LASTING:
            return source
        self.results.append(self._clone(self.inputs[source]))
        return Source(None, len(self.results) - 1)

    def _clone(self, node: fx.Node) -> fx.Node:
        clone = self.graph.call_function(torch.ops.aten.clone.default, (node,))
        with node.meta["val"].fake_mode:
            clone.meta["val"] = node.meta["val"].clone()
        return clone

    def _target(self, place: Source) -> fx.Node:
        last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(f"target_{len(self.targets)}")
        with last.meta["val"].fake_mode:
            node.meta["val"] = self.forms[place.field].specs[place.index].empty()  # pyright: ignore
        self.targets[place] = node
        return node


def _storage(node: fx.Node) -> int:
    return node.meta["val"].untyped_storage()._cdata


_UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_OURS = str(pathlib.Path(__file__).parents[1])
_TORCH = str(pathlib.Path(torch.__file__).parent)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """What cannot be traced is told with algorithm, line and remedy; every other error stays as it is.

    Raises:
        TraceError: Something read a number that a graph does not have yet, or has a result of unknown shape.
    """
    try:
        yield
    except Exception as error:
        if not _is_untraceable(error):
            raise
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
        raise TraceError(
            f"a step cannot be compiled {notes[-1] if notes else 'here'}: {_what(error)}, at {_line(error)}. While a "
            "step is compiled, tensors have no numbers: choose with torch.where, keep shapes fixed, read time from "
            "state.clock as a tensor; or make the algorithm a host one (host=True); or let such steps run eagerly "
            "with compile(step, fallback=True)"
        ) from error


def _is_untraceable(error: Exception) -> bool:
    # Reading a fake tensor's memory (numpy(), tolist(), data_ptr()) raises plain RuntimeErrors of torch.
    words = ("FakeTensor", "fake tensor", "data-dependent", "make_fx", "proxy", "Cannot access data pointer")
    return isinstance(error, _UNTRACEABLE) or (
        isinstance(error, (RuntimeError, TypeError, ValueError)) and any(word in str(error) for word in words)
    )


def _what(error: Exception) -> str:
    if isinstance(error, DataDependentOutputException):
        return f"a tensor's number is read ({error.func})"
    if isinstance(error, DynamicOutputShapeException):
        return f"a result's shape depends on numbers ({error.func})"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"


def _line(error: Exception) -> str:
    """The innermost line that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_TORCH, _OURS)) and "contextlib" not in f.filename]
    frame = own[-1] if own else frames[-1]
    text = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} ({text})"
