"""How laws compare, and how they watch: one way to say where two things differ, one to see an algorithm act."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from purecompose import batch as batches, tree
from purecompose.core.algorithm import Algorithm
from purecompose.core.application import applied
from purecompose.core.compose import Step
from purecompose.core.context import Context
from purecompose.core.operation import Node
from purecompose.core.scopes import Grad, Microbatches, Program, StateFn
from purecompose.core.state import State, fields_where
from purecompose.testing.law import Broken
from purecompose.testing.outer import after_batch, begun, ended
from purecompose.testing.process import process_settings
from purecompose.time.event import Event


__all__ = [
    "CONTEXT",
    "FORMED",
    "LASTING",
    "STEP_FIELDS",
    "Act",
    "Run",
    "Watched",
    "changed_context",
    "check_equal",
    "check_process",
    "compare",
    "copied",
    "inserted",
    "intercepted",
    "run",
    "snapshot",
]

STEP_FIELDS = fields_where(holds_values=True)
"""What a state holds inside a step."""
LASTING = fields_where(persists=True)
"""What a state holds between steps."""
FORMED = (*fields_where(keeps_form=True), "key")
"""What keeps its form all through a run."""
CONTEXT = tuple(f.name for f in dataclasses.fields(Context) if f.init and f.name not in ("initialised", "schedules"))
"""What of the static part is an algorithm's to change; the step writes the rest down itself."""

Act = Callable[[State], State]
"""What an algorithm makes of a state at some event."""


class Run(NamedTuple):
    """The states of a run, and where the algorithm under test acted."""

    states: tuple[State, ...]
    """The state after `init` and FIT_START, and after each step and the events around it."""
    applications: tuple[tuple[Event, State], ...]
    """Each event after INIT at which it acted, with the state it left."""

    @property
    def acted(self) -> bool:
        """Whether it acted after INIT."""
        return bool(self.applications)


def run(step: Step, state: State, data: Sequence[Any], name: str = "") -> Run:
    """Initialise, take a step with each batch, and fire the events outside steps as `fit` does.

    Args:
        step: The step.
        state: A state before `init`, or one that continues.
        data: The batches.
        name: The algorithm under test; without it the steps are plain ones, which are a third of the work.
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
    """An algorithm that is watched while it acts.

    Attributes:
        algorithm: It does the same, and tells what it does.
        applications: Each event after INIT at which it has acted, and the state it left.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        around: Callable[[Event, State, Act], State] | None = None,
        *,
        with_init: bool = False,
    ) -> None:
        """Take an algorithm, and what is to be done in place of each application.

        Args:
            algorithm: The algorithm.
            around: `around(event, state, act) -> state`, where `act(state)` is what the algorithm makes of a state
                there; by default just that.
            with_init: Whether INIT counts, which is left alone otherwise.
        """
        self._inner, self._around, self._with_init = algorithm, around, with_init
        self.algorithm = dataclasses.replace(algorithm, apply=self._apply)
        self.applications: list[tuple[Event, State]] = []

    @property
    def acted(self) -> bool:
        """Whether it has acted after INIT, or at INIT where that counts."""
        return bool(self.applications)

    @property
    def acted_after_init(self) -> bool:
        """Whether it has acted after INIT."""
        return any(event is not Event.INIT for event, _ in self.applications)

    def _apply(self, event: Event, state: State) -> State:
        def act(given: State) -> State:
            return applied(self._inner, event, given)[0]

        if event is Event.INIT and not self._with_init:
            return act(state)
        after = act(state) if self._around is None else self._around(event, state, act)
        self.applications.append((event, after))
        return after


def intercepted(algorithm: Algorithm, around: Callable[[Event, State, Act], State]) -> Algorithm:
    """Wrap each application of the algorithm within a step in `around(event, state, act)`; see `Watched`."""
    return Watched(algorithm, around).algorithm


def check_equal(
    first: Any,
    second: Any,
    labels: tuple[str, str],
    where: str = "",
    *,
    event: Event | None = None,
    tolerance: tree.ToleranceLike = 0.0,
) -> None:
    """Raise `Broken` for the first leaf in which two trees differ.

    Args:
        first: A tree.
        second: Another.
        labels: What they are.
        where: What stands before the leaf's path, such as "params".
        event: Where they were taken, if known.
        tolerance: See `tree.differences`.
    """
    if first is second:
        return
    found = list(tree.differences(first, second, tolerance=tolerance))
    if found:
        # That a dictionary is no longer empty says less than what is in it now.
        named = next((difference for difference in found if difference.path), found[0])
        raise Broken(named, labels, event=event, where=where)


def check_process(before: dict[str, Any], labels: tuple[str, str], *, event: Event | None = None) -> None:
    """Raise `Broken` for the first of `process_settings` that is another now."""
    for name, value in process_settings().items():
        if value == before[name]:
            continue
        where = f"the process's {name}"
        if name.endswith("generator"):  # whose states are hashes here
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
    without_slot: str | None = None,
) -> None:
    """Raise `Broken` for the first leaf in which two states differ.

    Args:
        first: A state.
        second: Another.
        labels: What they are.
        fields: The fields to compare.
        tolerance: See `tree.differences`.
        event: Where they were taken.
        without_slot: The name of a slot that plays no part.
    """
    for field in fields:
        ours, theirs = getattr(first, field), getattr(second, field)
        if ours is theirs:
            continue
        if field == "slots" and without_slot is not None:
            ours, theirs = (_without(slots, without_slot) for slots in (ours, theirs))
        if field in ("batch", "outputs"):
            ours, theirs = batches.tensors(ours), batches.tensors(theirs)
        check_equal(ours, theirs, labels, field, event=event, tolerance=tolerance)


def changed_context(first: State, second: State) -> str | None:
    """Return the first name of `CONTEXT` under which two states differ; `None` if there is none."""
    for name in CONTEXT if first.context is not second.context else ():
        ours, theirs = getattr(first.context, name), getattr(second.context, name)
        if ours is not theirs and ours != theirs:
            return name
    return None


def copied(value: Any) -> Any:
    """Return a tree or batch with copies of its tensors, cut off from any graph."""
    return batches.map_tensors(lambda tensor: tensor.detach().clone(), value)


def snapshot(state: State, fields: Sequence[str] = LASTING) -> State:
    """Return the state with copies in these fields, to be compared with it later."""
    return state.replace(**{field: copied(getattr(state, field)) for field in fields})


def inserted(program: Sequence[Node], after: Callable[[Node], StateFn | None]) -> Program:
    """Return the program with your own stage after each node for which `after(node)` gives one, inside scopes
    too.
    """
    nodes: list[Node] = []
    for node in program:
        stage = after(node)
        if isinstance(node, Grad):
            node = Grad(*inserted(node.body, after), wrt=node.wrt)
        elif isinstance(node, Microbatches):
            node = Microbatches(*inserted(node.body, after), microbatches=node.microbatches)
        nodes += [node] if stage is None else [node, stage]
    return tuple(nodes)


def _without(slots: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in slots.items() if key != name}
