"""Laws of purity: the same result from the same input, the input left alone, nothing touched outside."""

from collections.abc import Callable
from typing import Any

from purecompose import tree
from purecompose.contract import GlobalDrawError, InPlaceError
from purecompose.event import Event
from purecompose.random.modules import UnkeyedRandomError
from purecompose.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.process import process_settings, seeded
from purecompose.testing.record import STEP_FIELDS, compare, copied, intercepted, run
from purecompose.testing.subject import Subject


__all__ = ["deterministic", "global_state_kept", "input_untouched"]


@define_law(
    "what a step or an algorithm is given is bit for bit as it was afterwards",
    "make new tensors and dictionaries: x.mul(2) for x.mul_(2), {**params, name: tensor} for params[name] = tensor",
    owns=(InPlaceError,),
    exempt=never_acts,
)
def input_untouched(subject: Subject, case: Case) -> bool:
    """Compares the state at each event, and the state and batch of each step, with copies taken before."""

    def around(event: Event, state: State, act: Callable[[State], State]) -> State:
        before = {field: copied(getattr(state, field)) for field in STEP_FIELDS}
        after = act(state)
        _check_same(before, state, event)
        return after

    step = case.step(intercepted(subject.algorithm, around))
    state, acted = step.init(case.state()), False
    for batch in case.batches():
        before, batch_before = copied(vars(state) | {"static": None}), copied(batch)
        following = run(step, state, [batch], subject.name)
        acted |= following.acted
        _check_same({field: value for field, value in before.items() if field in STEP_FIELDS}, state, None)
        difference = next(tree.differences(batch_before, batch), None)
        if difference is not None:
            raise Broken(difference, ("before the step", "after it"), where="batch")
        state = following.states[-1]
    return acted


def _check_same(before: dict[str, Any], state: State, event: Event | None) -> None:
    for field, value in before.items():
        difference = next(tree.differences(value, getattr(state, field)), None)
        if difference is not None:
            raise Broken(difference, ("before", "after"), event=event, where=field)


@define_law(
    "the same state and batch give the same result, bit for bit, whatever ran before",
    "draw from state.rng(name) or state.example_rng(name); remember in state.slots[name], not in a closure or a global",
    owns=(GlobalDrawError, UnkeyedRandomError),
    exempt=never_acts,
)
def deterministic(subject: Subject, case: Case) -> bool:
    """Takes the steps twice with one algorithm, other seeds in the global generators and other work in between."""

    def around(event: Event, state: State, act: Callable[[State], State]) -> State:
        once = act(state)
        compare(once, act(state), ("at first", "once more"), fields=STEP_FIELDS, event=event)
        return once

    step = case.step(intercepted(subject.algorithm, around))
    with seeded(1):
        first = run(step, case.state(), case.batches(), subject.name)
    elsewhere = case.step(subject.algorithm)
    with seeded(2):
        run(elsewhere, case.state(key=case.seed + 1), case.batches()[-1:])
    with seeded(3):
        second = run(step, case.state(), case.batches(), subject.name)
    labels = ("in the first run", "in the second")
    for (event, ours), (_, theirs) in zip(first.applications, second.applications, strict=False):
        compare(ours, theirs, labels, fields=STEP_FIELDS, event=event)
    for ours, theirs in zip(first.states, second.states, strict=True):
        compare(ours, theirs, labels)
    return first.acted


@define_law(
    "generators, modes and defaults of torch, Python and NumPy stay as they were",
    "leave global settings to the program that trains; torch.manual_seed and random.seed are settings too",
    owns=(GlobalDrawError,),
    exempt=never_acts,
)
def global_state_kept(subject: Subject, case: Case) -> bool:
    """Looks at the settings of the process around each application, INIT included, and sets them back at the end."""
    # Generators that stand where nobody's seed puts them: seeding them moves them.
    with seeded(0x5EED):
        before_init = process_settings()
        step = case.step(intercepted(subject.algorithm, _keeping_settings))
        state = step.init(case.state())
        _check_settings(before_init, Event.INIT)
        return run(step, state, case.batches(), subject.name).acted


def _keeping_settings(event: Event, state: State, act: Callable[[State], State]) -> State:
    before = process_settings()
    after = act(state)
    _check_settings(before, event)
    return after


def _check_settings(before: dict[str, Any], event: Event) -> None:
    difference = next(tree.differences(before, process_settings()), None)
    if difference is not None:
        raise Broken(difference, ("before", "after"), event=event, where="the process's ")
