"""The loop programs, the core stages in them, and the plan of a step.

A program is a tuple of events, stages and scopes; a training step is the fold over it. The plan says, at each event,
which algorithms act, in what order, and why.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from purecompose import losses
from purecompose._support.messages import columns, fragment, note, table
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.calls import run_loss, run_model
from purecompose.core.context import describe_replaced, listed
from purecompose.core.means import targets_of_loss, with_loss_of_slice
from purecompose.core.passes import Pass, pass_name, precedes, run_pass, set_filo_order
from purecompose.core.program import Program, Stage, Update, events_in
from purecompose.core.scopes import Grad, Microbatches
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER


def _forward(state: State) -> State:
    outputs, buffers = run_model(state, state.inputs, train=True)
    return state.replace(outputs=outputs, buffers=buffers)


def _eval_forward(state: State) -> State:
    try:
        outputs, _ = state.run_model(state.inputs, train=False)
    except (NotImplementedError, TypeError) as error:
        if not str(error) or "forward" in str(error):
            error.add_note(
                "evaluate and predict call forward(inputs): a network of several players gives the argument that "
                "selects one a default, as in forward(self, inputs, player='G')"
            )
        raise
    return state.replace(outputs=outputs)


def _loss(state: State) -> State:
    if state.whole_loss is not None:
        return with_loss_of_slice(state)
    outputs, targets = state.outputs, targets_of_loss(state)
    (loss, parts), buffers = run_loss(state, lambda loss: losses.evaluate_parts(loss, outputs, targets), train=True)
    changes = {} if buffers is state.buffers else {"buffers": buffers}
    if parts:
        changes["metrics"] = {**state.metrics, **losses.metrics_of_parts(parts)}
    return state.replace(loss=loss, **changes)


def _advance(state: State) -> State:
    return state.replace(clock=state.clock.advanced()) if state.clock is not None else state


forward: Stage = Stage("forward", _forward)
"""Stage that runs the network in training mode on the batch's input and sets `outputs` and `buffers`."""

eval_forward: Stage = Stage("eval_forward", _eval_forward)
"""Stage that runs the network in evaluation mode on the batch's input and sets `outputs`."""

loss: Stage = Stage("loss", _loss, sets_loss=True)
"""Stage that sets `loss`, 0-d, from `outputs` and the batch's target; mixtures are resolved here."""

update: Update = Update()
"""Node that updates the parameters with the optimizer."""

advance: Stage = Stage("advance", _advance)
"""Stage that advances the time by one batch: later nodes see the new time."""

loop_events: Program = (
    Event.AFTER_DATALOADER,
    Event.BATCH_START,
    Event.BEFORE_TRAIN_BATCH,
    Microbatches(
        Grad(
            Event.BEFORE_FORWARD,
            forward,
            Event.AFTER_FORWARD,
            Event.BEFORE_LOSS,
            loss,
            Event.AFTER_LOSS,
            Event.BEFORE_BACKWARD,
        ),
        Event.AFTER_BACKWARD,
    ),
    Event.AFTER_TRAIN_BATCH,
    update,
    advance,
    Event.BATCH_END,
)
"""One training step."""

eval_events: Program = (
    Event.EVAL_BATCH_START,
    Event.EVAL_BEFORE_FORWARD,
    eval_forward,
    Event.EVAL_AFTER_FORWARD,
    Event.EVAL_BATCH_END,
)
"""One batch of an evaluation."""

predict_events: Program = (
    Event.PREDICT_BATCH_START,
    Event.PREDICT_BEFORE_FORWARD,
    eval_forward,
    Event.PREDICT_AFTER_FORWARD,
    Event.PREDICT_BATCH_END,
)
"""One batch of a prediction."""


_STEP_EVENTS = frozenset(events_in(loop_events))


class PlanRow(NamedTuple):
    """One algorithm at one event."""

    event: Event
    order: int | None
    """Position at the event, from 0; `None` if it does not act now."""
    algorithm: str
    reason: str
    """Reason for its position or absence."""


class Plan(NamedTuple):
    """The result of `step.plan`; prints as a table."""

    rows: tuple[PlanRow, ...]
    warnings: tuple[str, ...]

    def order(self, event: Event | str) -> tuple[str, ...]:
        """Return the names of the algorithms that act at an event, in their order."""
        rows = [row for row in self.rows if row.event is Event(event)]
        return tuple(row.algorithm for row in rows if row.order is not None)

    def __str__(self) -> str:
        rows = self._table()
        return "\n".join([table(_HEAD, rows) if rows else _NOTHING, *self._warned()])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = self._table()
        return fragment(columns(_HEAD, rows) if rows else note(_NOTHING), *[note(one, "bad") for one in self._warned()])

    def _table(self) -> list[list[str]]:
        """Return the rows as text; the reason for an absence at several events is given once."""
        found = [
            [row.event.name, str(row.order), row.algorithm, row.reason] for row in self.rows if row.order is not None
        ]
        absent: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.order is None:
                absent.setdefault((row.algorithm, row.reason), []).append(row.event.name)
        for (algorithm, reason), events in absent.items():
            where = events[0] if len(events) == 1 else f"{len(events)} events"
            found.append([where, "-", algorithm, reason])
        return found

    def _warned(self) -> list[str]:
        return [f"warning: {warning}" for warning in self.warnings]


_HEAD = ("event", "order", "algorithm", "why")
_NOTHING = "no algorithm acts anywhere"


class _Planned(Protocol):
    """The attributes of a step that a plan needs."""

    events: tuple[Event, ...]
    algorithms: tuple[Algorithm, ...]
    passes: tuple[Pass, ...]


def make_plan(
    step: _Planned,
    matched: Callable[[Event], Sequence[Algorithm]],
    moment: str,
    frozen_parts: Sequence[str] = (),
    replaced: Mapping[str, Sequence[str]] | None = None,
) -> Plan:
    """Return the plan of a step."""
    outer = [event for event in Event if event not in step.events]
    before = [event for event in outer if event in (Event.INIT, Event.FIT_START, Event.EPOCH_START)]
    rows: list[PlanRow] = []
    for event in (*before, *step.events, *[event for event in outer if event not in before]):
        rows += _rows_at(event, step, matched(event), moment)
    done = {name: f"; {words}" for name, words in describe_replaced(replaced or {}).items()}
    skips = {a.name for a in step.algorithms if Trait.SKIPS_FROZEN_PARTS in a.traits} if frozen_parts else set()
    kept = dict.fromkeys(skips, f"; does not change {listed(frozen_parts)}: nothing trains there")
    for i, row in enumerate(rows):
        if row.event is Event.INIT:
            more = done.get(row.algorithm, "") + kept.get(row.algorithm, "")
            rows[i] = row._replace(reason=row.reason + more)
    return Plan(tuple(rows), tuple(_warnings(step)))


def _rows_at(event: Event, step: _Planned, matched: Sequence[Algorithm], moment: str) -> list[PlanRow]:
    current = tuple(matched)
    placed_by: dict[str, str] = {}
    for one_pass in step.passes:
        following = run_pass(one_pass, current, event)
        if len(following) > 1:
            placed_by |= {a.name: pass_name(one_pass) for a in following if _is_pinned(a, one_pass, current, event)}
        current = following
    listed = "listed order, reversed" if event.is_reversed and set_filo_order in step.passes else "listed order"
    rows = [PlanRow(event, i, a.name, _why(a, current, placed_by.get(a.name, listed))) for i, a in enumerate(current)]
    for algorithm in step.algorithms:
        left = algorithm.predicate.at(event)
        if left != NEVER and algorithm not in current:
            why = "dropped by a pass" if algorithm in matched else f"{left!r} does not hold {moment}"
            rows.append(PlanRow(event, None, algorithm.name, why))
    return rows


def _is_pinned(algorithm: Algorithm, one_pass: Pass, given: Sequence[Algorithm], event: Event) -> bool:
    """Return whether a pass puts an algorithm in the same place, whatever its place before."""
    orders = [tuple(given), tuple(reversed(given)), (*given[1:], *given[:1])]
    return len({tuple(run_pass(one_pass, order, event)).index(algorithm) for order in orders}) == 1


def _why(algorithm: Algorithm, current: Sequence[Algorithm], placed_by: str) -> str:
    words = f"; {algorithm.made_of}" if algorithm.parts else ""
    if len(current) == 1:
        return f"no other acts there{words}"
    partners = [f"before {other.name}" for other in current if precedes(algorithm, other)]
    partners += [f"after {other.name}" for other in current if precedes(other, algorithm)]
    return ", ".join([placed_by, *partners]) + words


def _warnings(step: _Planned) -> list[str]:
    found = []
    names = {algorithm.name for algorithm in step.algorithms}
    for algorithm in step.algorithms:
        events = algorithm.events
        references = (*algorithm.runs_before, *algorithm.runs_after)
        # A method may name others that are not in the step, but a name close to one in the step is a typing error.
        for absent in (name for name in references if isinstance(name, str) and name not in names):
            if near := difflib.get_close_matches(absent, names, 1, cutoff=0.75):
                found.append(
                    f"{algorithm.name} is ordered by {absent}, which the step does not have; did you mean {near[0]}?"
                )
        if not events:
            found.append(f"{algorithm!r} never acts: its settings are neutral")
    return [*found, *lacking_events(step.algorithms, step.events)]


def lacking_events(algorithms: Iterable[Algorithm], present: Collection[Event]) -> list[str]:
    """Return the algorithms that act at events of a training step which a program lacks, one line each.

    Algorithms with a plain `match` function are left out, because they may act at any event.
    """
    found = []
    for algorithm in algorithms:
        events = algorithm.events
        lacking = [event.name for event in events if event in _STEP_EVENTS and event not in present]
        if lacking and len(events) < len(Event):
            found.append(f"{algorithm.name} acts at {', '.join(lacking)}, which the program does not have")
    return found
