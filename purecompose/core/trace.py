"""`traced`: a step that also reports what every algorithm did."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from purecompose import tree
from purecompose._support.messages import columns, fragment, note, table
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.core.values import fields_where
from purecompose.time.event import Event


_COMPARED = fields_where(holds_values=True)


class TraceEntry(NamedTuple):
    """The record of one algorithm at one event of a step."""

    algorithm: str
    event: Event
    order: int | None
    """Position at the event, from 0; `None` if it did not run."""
    ran: bool
    runs: int
    """Number of times it ran: once per microbatch for events inside `Microbatches`."""
    exit_code: int | None
    """Exit code of its last `apply`."""
    changed: tuple[str, ...]
    """Key paths of the leaves of which it changed at least one bit, such as `batch[0]`."""
    amounts: Mapping[str, float]
    """How much it changed them: the norm of the change by that of the leaf before, the largest of its runs. Leaves
    that are not floating point, are new or have another shape are left out."""

    @property
    def words(self) -> list[str]:
        """The changed leaves, each with its amount if it has one, such as `batch[0] (0.12)`."""
        return [f"{path} ({self.amounts[path]:.2g})" if path in self.amounts else path for path in self.changed]


class _Record(NamedTuple):
    exit_code: int | None
    changed: dict[str, float | None]


@dataclass(frozen=True)
class Trace:
    """One entry per algorithm and event of the program, including algorithms that did not run.

    The algorithms are those of the step, and those that a pass has added and that ran.
    """

    entries: tuple[TraceEntry, ...]

    def __iter__(self) -> Iterator[TraceEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: tuple[str, Event | str]) -> TraceEntry:
        """Return the entry of (algorithm's name, event)."""
        name, event = place[0], Event(place[1])
        for entry in self.entries:
            if entry.algorithm == name and entry.event is event:
                return entry
        raise KeyError(f"the step has no algorithm {name!r} or no event {event}")

    def __str__(self) -> str:
        rows = self._table()
        return "\n".join([table(_HEAD, rows) if rows else _NOTHING, *self._silent()])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = self._table()
        return fragment(columns(_HEAD, rows) if rows else note(_NOTHING), *map(note, self._silent()))

    def _table(self) -> list[list[str]]:
        return [
            [*map(str, (e.event.name, e.order, e.algorithm, e.runs, e.exit_code)), ", ".join(e.words)]
            for e in self.entries
            if e.ran
        ]

    def _silent(self) -> list[str]:
        """Return a line with the algorithms that did not run, or none."""
        names = sorted({e.algorithm for e in self.entries} - {e.algorithm for e in self.entries if e.ran})
        return [f"did not run: {', '.join(names)}"] if names else []


_HEAD = ("event", "order", "algorithm", "runs", "exit", "changed")
_NOTHING = "nothing ran"


def traced(step: Step) -> Callable[[State, Any], tuple[State, Trace]]:
    """Return a step that returns `(state, trace)`; the state is the same bit for bit.

    It compares every leaf before and after every algorithm, so it is meant for inspection, not for training.

    Args:
        step: A step.

    Returns:
        A function `(state, batch) -> (state, trace)`; a trace prints as a table.

    Example:
        >>> from purecompose import compose, loop_events
        >>> traced_step = traced(compose(loop_events))
    """

    def run(state: State, batch: Any) -> tuple[State, Trace]:
        end, trace = traced_fold(step, state, batch)
        return step.finish(end), trace

    return run


def traced_fold(step: Step, state: State, batch: Any) -> tuple[State, Trace]:
    """Return the state at the end of a step, with its temporary fields such as the gradients, and the trace."""
    seen: dict[tuple[str, Event], list[_Record]] = {}

    def observe(algorithm: Algorithm, event: Event, before: State, after: State, *code: int | None) -> None:
        seen.setdefault((algorithm.name, event), []).append(_Record(code[0], _changed(before, after)))

    end = step.fold(state, batch, observe)
    orders: dict[Event, list[str]] = {}
    for name, event in seen:
        orders.setdefault(event, []).append(name)
    # A pass may have added algorithms that the step does not list.
    names = dict.fromkeys([*[algorithm.name for algorithm in step.algorithms], *[name for name, _ in seen]])
    entries = [
        _entry(name, event, seen.get((name, event), []), orders.get(event, []))
        for event in step.events
        for name in names
    ]
    entries.sort(key=lambda e: (step.events.index(e.event), not e.ran, e.order or 0))
    return end, Trace(tuple(entries))


def _entry(name: str, event: Event, records: list["_Record"], order: list[str]) -> TraceEntry:
    if not records:
        return TraceEntry(name, event, None, False, 0, None, (), {})
    changed = tuple(dict.fromkeys(path for record in records for path in record.changed))
    amounts: dict[str, float] = {}
    for path, amount in (pair for record in records for pair in record.changed.items()):
        if amount is not None:
            amounts[path] = max(amount, amounts.get(path, 0.0))
    return TraceEntry(name, event, order.index(name), True, len(records), records[-1].exit_code, changed, amounts)


def _changed(before: State, after: State) -> dict[str, float | None]:
    """Return the leaves that differ, each with the norm of the change by that of the leaf, where it has one."""
    found: dict[str, float | None] = {}
    for name in _COMPARED:
        old, new = getattr(before, name), getattr(after, name)
        if old is new:
            continue
        ours = tree.leaves_with_paths(old, into_objects=True)
        theirs = tree.leaves_with_paths(new, into_objects=True)
        for path in {**ours, **theirs}:
            if path not in ours or path not in theirs or not tree.equal(ours[path], theirs[path]):
                found[f"{name}{path}"] = _amount(ours.get(path), theirs.get(path))
    return found


def _amount(before: Any, after: Any) -> float | None:
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)) or before.shape != after.shape:
        return None
    if not (before.is_floating_point() and after.is_floating_point()):
        return None
    before, after = before.detach().double(), after.detach().double()
    return float((after - before).norm() / before.norm())
