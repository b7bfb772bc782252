"""Tools of the laws: runs with all events, comparison of states, and observation of an algorithm while it acts."""

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from purecompose import batch as batches, tree
from purecompose.core.algorithm import Algorithm
from purecompose.core.application import applied
from purecompose.core.compose import Step
from purecompose.core.context import Context
from purecompose.core.operation import Node
from purecompose.core.program import Program, StateFn, as_nodes
from purecompose.core.scopes import Scope
from purecompose.core.state import State
from purecompose.core.values import fields_where
from purecompose.testing.law import Broken
from purecompose.testing.process import process_settings
from purecompose.time.event import Event


_BEGINNING = (Event.FIT_START,)
_ENDING = (Event.FIT_END,)


def begun(step: Step, state: State) -> State:
    """Return the state after `step.init` and the events that `fit` fires before the first batch."""
    return fired(step, _BEGINNING, step.init(state))


def after_batch(step: Step, state: State, batch: Any) -> State:
    """Return the state after a step and the events around it, including those of an epoch that begins or ends."""
    before = opened(step, state)
    return closed(step, before, step(before, batch))


def opened(step: Step, state: State) -> State:
    """Return the state after the events between steps that `fit` fires before a batch."""
    opening = [Event.EPOCH_START] if state.timestamp.batch_in_epoch == 0 else []
    return fired(step, [*opening, Event.BEFORE_DATALOADER], state)


def closed(step: Step, before: State, state: State) -> State:
    """Return the state after the events that `fit` fires after a step from the state `before`."""
    closing = [Event.EPOCH_END, Event.EPOCH_CHECKPOINT] if state.timestamp.epoch != before.timestamp.epoch else []
    return fired(step, [Event.BATCH_CHECKPOINT, *closing], state)


def ended(step: Step, state: State) -> State:
    """Return the state after the events that `fit` fires at the end of a run."""
    return fired(step, _ENDING, state)


def fired(step: Step, events: Iterable[Event], state: State) -> State:
    """Return the state after these events; the states of evaluation and prediction are discarded."""
    for event in events:
        after = step.fire(event, state)
        state = state if event.is_eval or event.is_predict else after
    return state


STEP_FIELDS = fields_where(holds_values=True)
"""Fields of a state that have values inside a step."""
LASTING = fields_where(persists=True)
"""Fields of a state that have values between steps."""
FORMED = (*fields_where(keeps_form=True), "key")
"""Fields of a state that keep their form during a run."""
CONTEXT = tuple(f.name for f in dataclasses.fields(Context) if f.init and f.name not in ("initialised", "schedules"))
"""Fields of the static part that an algorithm may change; the step itself sets the others."""

Act = Callable[[State], State]
"""An application of an algorithm at some event."""


class Run(NamedTuple):
    """The states of a run, and the applications of the algorithm under test."""

    states: tuple[State, ...]
    """The state after `init` and FIT_START, and after each step and the events around it."""
    applications: tuple[tuple[Event, State], ...]
    """Each event after INIT at which it acted, with the state that it returned."""

    @property
    def acted(self) -> bool:
        """True if it acted after INIT."""
        return bool(self.applications)


def run(step: Step, state: State, data: Sequence[Any], name: str = "") -> Run:
    """Initialise, take a step with each batch, and fire the events outside steps as `fit` does.

    Args:
        step: The step.
        state: A state before `init`, or one that continues.
        data: The batches.
        name: Name of the algorithm under test; without it the algorithm is not observed, which is a third of the work.
    """
    watched = [Watched(algorithm) for algorithm in step.algorithms if algorithm.name == name]
    if watched:
        step = step.replace(algorithms=[watched[0].algorithm if a.name == name else a for a in step.algorithms])
    states = [begun(step, state)]
    for batch in data:
        states.append(after_batch(step, states[-1], batch))
    states[-1] = ended(step, states[-1])
    return Run(tuple(states), tuple(watched[0].applications) if watched else ())


class Watched:
    """An algorithm that is observed while it acts.

    Attributes:
        algorithm: An algorithm that does the same, and records its applications here.
        applications: Each event after INIT at which it has acted, with the state that it returned.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        around: Callable[[Event, State, Act], State] | None = None,
        *,
        with_init: bool = False,
    ) -> None:
        """Take an algorithm, and a function `around(event, state, act) -> state` to call instead of each application.

        `act(state)` is the algorithm's result. INIT is not observed, unless `with_init` is true.
        """
        self._inner, self._around, self._with_init = algorithm, around, with_init
        self.algorithm = dataclasses.replace(algorithm, apply=self._apply)
        self.applications: list[tuple[Event, State]] = []

    @property
    def acted(self) -> bool:
        """True if it has acted after INIT, or at INIT if that is included."""
        return bool(self.applications)

    @property
    def acted_after_init(self) -> bool:
        """True if it has acted after INIT."""
        return any(event is not Event.INIT for event, _ in self.applications)

    def _apply(self, event: Event, state: State) -> State:
        def act(given: State) -> State:
            return applied(self._inner, event, given)[0]

        if event is Event.INIT and not self._with_init:
            return act(state)
        after = act(state) if self._around is None else self._around(event, state, act)
        self.applications.append((event, after))
        return after


def check_equal(
    first: Any,
    second: Any,
    labels: tuple[str, str],
    where: str = "",
    *,
    event: Event | None = None,
    tolerance: tree.ToleranceLike = 0.0,
) -> None:
    """Raise `Broken` for the first leaf in which two trees differ."""
    if first is second:
        return
    found = list(tree.differences(first, second, tolerance=tolerance))
    if found:
        # A new entry of a dictionary is more informative than the fact that it is no longer empty.
        named = next((difference for difference in found if difference.path), found[0])
        raise Broken(named, labels, event=event, where=where)


def check_process(before: dict[str, Any], labels: tuple[str, str], *, event: Event | None = None) -> None:
    """Raise `Broken` for the first of `process_settings` that has changed."""
    for name, value in process_settings().items():
        if value == before[name]:
            continue
        where = f"the process's {name}"
        if name.endswith("generator"):  # its value is only a hash
            raise Broken("it was moved or seeded", where=where, event=event)
        if name == "environment":  # by names only: values may be secrets
            names = sorted(key for key in {**before[name], **value} if before[name].get(key) != value.get(key))
            raise Broken(f"it was changed in {', '.join(names)}", where=where, event=event)
        if name == "module hooks":
            raise Broken("a hook for every module was added or taken away", where=where, event=event)
        raise Broken(tree.Difference("", "", before[name], value), labels, where=where, event=event)


def compare(
    first: State,
    second: State,
    labels: tuple[str, str],
    *,
    fields: Sequence[str] = LASTING,
    tolerance: tree.ToleranceLike = 0.0,
    event: Event | None = None,
    without_slots: Collection[str] = (),
) -> None:
    """Raise `Broken` for the first leaf in which two states differ.

    Args:
        first, second: The states.
        labels: Descriptions of the two.
        fields: The fields to compare.
        tolerance: See `tree.differences`.
        event: The event to which they belong, if known.
        without_slots: Names of slots that are ignored.
    """
    for field in fields:
        ours, theirs = getattr(first, field), getattr(second, field)
        if ours is theirs:
            continue
        if field == "slots":
            ours, theirs = (
                {name: slots[name] for name in slots if name not in without_slots} for slots in (ours, theirs)
            )
        if field in ("batch", "outputs"):
            ours, theirs = batches.tensors(ours), batches.tensors(theirs)
        check_equal(ours, theirs, labels, field, event=event, tolerance=tolerance)


def changed_context(first: State, second: State) -> str | None:
    """Return the first name in `CONTEXT` of a field in which two states differ; `None` if there is none."""
    for name in CONTEXT if first.context is not second.context else ():
        ours, theirs = getattr(first.context, name), getattr(second.context, name)
        if ours is not theirs and ours != theirs:
            return name
    return None


def copied(value: Any) -> Any:
    """Return a tree or batch with detached copies of its tensors."""
    return batches.map_tensors(lambda tensor: tensor.detach().clone(), value)


def snapshot(state: State, fields: Sequence[str] = LASTING) -> State:
    """Return the state with copies in these fields, for a later comparison."""
    return state.replace(**{field: copied(getattr(state, field)) for field in fields})


def inserted(program: Sequence[Node], after: Callable[[Node], StateFn | None]) -> Program:
    """Return the program with a stage inserted after each node for which `after(node)` returns one, also in scopes."""
    nodes: list[Node] = []
    for node in program:
        stage = after(node)
        if isinstance(node, Scope):
            body, node = inserted(node.body, after), copy.copy(node)  # with all of its settings
            object.__setattr__(node, "body", body)
        nodes += [node] if stage is None else [node, stage]
    return as_nodes(nodes)
