"""Runs that are written down, so that a law can say where two of them part."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from purecompose import batch as batches, tree
from purecompose.algorithm import Algorithm
from purecompose.application import applied
from purecompose.compose import Step
from purecompose.event import Event
from purecompose.state import State
from purecompose.testing.law import Broken


__all__ = ["LASTING", "STEP_FIELDS", "Run", "compare", "copied", "intercepted", "run"]

LASTING = ("params", "buffers", "opt_state", "slots", "hparams", "key", "loss", "metrics")
"""What a state holds between steps."""
STEP_FIELDS = (*LASTING, "batch", "outputs", "grads")
"""What a state holds inside a step."""


class Run(NamedTuple):
    """The states of a run, and where the algorithm under test acted."""

    states: tuple[State, ...]
    """The state after `init`, and after each step."""
    applications: tuple[tuple[Event, State], ...]
    """Each event at which it acted within a step, with the state it left."""

    @property
    def acted(self) -> bool:
        """Whether it acted within a step."""
        return bool(self.applications)


def run(step: Step, state: State, data: Sequence[Any], name: str = "") -> Run:
    """Initialises and takes a step with each batch.

    Args:
        step: The step.
        state: A state before `init`, or one that goes on.
        data: The batches.
        name: The algorithm under test.
    """
    state = step.init(state)
    states, seen = [state], []

    def observe(algorithm: Algorithm, event: Event, before: State, after: State, code: int | None) -> None:
        del before, code
        if algorithm.name == name:
            seen.append((event, after))

    for batch in data:
        state = step.finish(step.fold(state, batch, observe))
        states.append(state)
    return Run(tuple(states), tuple(seen))


def compare(
    first: State,
    second: State,
    labels: tuple[str, str],
    *,
    fields: Sequence[str] = LASTING,
    tolerance: float = 0.0,
    event: Event | None = None,
    without_slot: str | None = None,
) -> None:
    """Raises `Broken` for the first leaf in which two states differ.

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
        difference = next(tree.differences(ours, theirs, tolerance=tolerance), None)
        if difference is not None:
            raise Broken(difference, labels, event=event, where=field)


def copied(value: Any) -> Any:
    """A tree or batch with copies of its tensors, cut off from any graph."""
    return batches.map_tensors(lambda tensor: tensor.detach().clone(), value)


def intercepted(algorithm: Algorithm, around: Callable[[Event, State, Callable[[State], State]], State]) -> Algorithm:
    """The algorithm with `around(event, state, act)` in place of each application within a step.

    `act(state)` is what the algorithm makes of a state there; INIT is left alone.
    """

    def apply(event: Event, state: State) -> State:
        def act(given: State) -> State:
            return applied(algorithm, event, given)[0]

        return act(state) if event is Event.INIT else around(event, state, act)

    return dataclasses.replace(algorithm, apply=apply)


def _without(slots: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in slots.items() if key != name}
