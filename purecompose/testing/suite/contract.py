"""Laws of the contract: an algorithm keeps the form of what lasts, and changes nothing that is not its own."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from purecompose import tree
from purecompose.algorithm import Algorithm
from purecompose.application import applied
from purecompose.compose import Step
from purecompose.context import Context
from purecompose.contract import FormError
from purecompose.event import Event
from purecompose.loop import eval_events, loop_events, predict_events
from purecompose.predicate import NEVER
from purecompose.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.record import LASTING, copied, intercepted, run
from purecompose.testing.subject import Subject


__all__ = ["buffers_kept", "init_once", "own_slot", "structure_kept"]

_Act = Callable[[State], State]
_FORMED = ("params", "buffers", "opt_state", "slots", "hparams", "key")
_NOT_FIRED = frozenset(
    {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, *(node for node in eval_events if isinstance(node, Event))}
    | {node for node in predict_events if isinstance(node, Event)}
)


@define_law(
    "what outlives a step or an outer event keeps its structure, shapes, dtypes and device",
    "make slots and surgery at INIT; give results back as they came: x.to(old.dtype), x.reshape(old.shape), x.detach()",
    owns=(FormError,),
    exempt=never_acts,
)
def structure_kept(subject: Subject, case: Case) -> bool:
    """Compares the forms at the end of each step, before the step's own check, and around each outer event."""
    log: list[tuple[Event, dict[str, Any], dict[str, Any]]] = []
    start: dict[str, Any] = {}

    def around(event: Event, state: State, act: _Act) -> State:
        before = _forms(state)
        after = act(state)
        if not subject.algorithm.host:
            _check_context(state.context, after.context, event)
        forms = _forms(after)
        if event not in step.events:
            _check_forms(before, forms, lambda field: event)
        log.append((event, before, forms))
        return after

    def at_end(state: State) -> State:
        def guilty(field: str) -> Event | None:
            changed = (event for event, before, after in reversed(log) if before[field] != after[field])
            return next(changed, None)

        _check_forms(start, _forms(state), guilty)
        return state

    step = case.step(intercepted(subject.algorithm, around), program=(*loop_events, at_end))
    outer = [event for event in Event if event not in step.events and event not in _NOT_FIRED]
    state = step.init(case.state())
    start.update(_forms(state))
    state = _fired(step, [event for event in outer if event.is_before_event], state)
    for batch in case.batches():
        end = step.fold(state, batch)
        _check_loss(state.loss, end.loss)
        state = step.finish(end)
    _fired(step, [event for event in outer if not event.is_before_event], state)
    return bool(log)


def _fired(step: Step, events: list[Event], state: State) -> State:
    """The state after these events; what evaluation and prediction make of it is thrown away."""
    for event in events:
        after = step.fire(event, state)
        state = state if event.is_eval or event.is_predict else after
    return state


def _forms(state: State) -> dict[str, Any]:
    """The lasting fields with descriptions in place of tensors."""
    return {field: tree.map(_form, getattr(state, field)) for field in _FORMED}


def _form(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    dtype = str(leaf.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(leaf.shape)} on {leaf.device}{' with requires_grad' if leaf.requires_grad else ''}"


def _check_forms(before: dict[str, Any], after: dict[str, Any], guilty: Callable[[str], Event | None]) -> None:
    for field, forms in before.items():
        difference = _first_difference(forms, after[field], ("before", "after"))
        if difference is not None:
            raise Broken(difference, ("before", "after"), event=guilty(field), where=field)


def _check_loss(before: Tensor | None, after: Tensor | None) -> None:
    if _form(before) != _form(after):
        raise Broken(tree.Difference("", "", _form(before), _form(after)), ("before", "after"), where="loss")


def _check_context(before: Context, after: Context, event: Event | None) -> None:
    if before is after:
        return
    for field in dataclasses.fields(Context):
        ours, theirs = getattr(before, field.name), getattr(after, field.name)
        if ours is not theirs and ours != theirs:
            difference = tree.Difference(field.name, "", ours, theirs)
            raise Broken(difference, ("before", "after"), event=event, where="context.")


@define_law(
    "an algorithm changes no slot but its own, and neither the run's key nor hparams that it does not name",
    "remember in state.slots[name], by the name that the factory was given; draw from state.rng(name), which needs no "
    "new key; list the hparams that it writes in its config",
    exempt=never_acts,
)
def own_slot(subject: Subject, case: Case) -> bool:
    """Compares others' slots, others' hparams and the key around each application, INIT included."""
    own_hparams, acted = {hparam.name for hparam in subject.algorithm.hparams}, []

    def others(state: State) -> dict[str, Any]:
        return {
            "slots": {name: slot for name, slot in state.slots.items() if name != subject.name},
            "hparams": {name: value for name, value in state.hparams.items() if name not in own_hparams},
            "key": state.key,
        }

    def around(event: Event, state: State, act: _Act) -> State:
        before = copied(others(state))
        after = act(state)
        acted.append(event)
        for now in (state, after):  # the state that was given, too: somebody may write into it
            _check_fields(before, others(now), event)
        return after

    case = _in_company(subject, case)
    run(case.step(_watched(subject.algorithm, around)), case.state(), case.batches())
    return bool(acted)


@define_law(
    "an algorithm leaves the network's buffers, such as BatchNorm's statistics, to the step's own forward pass",
    "drop the buffers of a forward pass of your own: outputs, _ = state.run_model(...), or state.forward(...)",
    exempt=never_acts,
    unsuited=lambda task: None if task.has_buffers else "its network has no buffers",
)
def buffers_kept(subject: Subject, case: Case) -> bool:
    """Compares the buffers around each application, and what BatchNorm counts with and without the algorithm."""
    acted = []

    def around(event: Event, state: State, act: _Act) -> State:
        before = copied({"buffers": state.buffers})
        after = act(state)
        acted.append(event)
        for now in (state, after):
            _check_fields(before, {"buffers": now.buffers}, event)
        return after

    run(case.step(intercepted(subject.algorithm, around)), case.state(), case.batches())
    # In one slice: an algorithm that picks examples may leave fewer of them than slices.
    steps = [case.step(*algorithms, microbatches=1) for algorithms in ((), (subject.algorithm,))]
    without, with_it = (_counted(run(step, case.state(), case.batches()).states[-1]) for step in steps)
    both = without.keys() & with_it.keys()
    found = next(
        tree.differences(*({name: count[name] for name in sorted(both)} for count in (without, with_it))), None
    )
    if found is not None:
        raise Broken(found, ("without the algorithm", "with it"), where="buffers")
    return bool(acted)


def _counted(state: State) -> dict[str, Tensor]:
    """How many batches each BatchNorm has seen."""
    return {name: value for name, value in state.buffers.items() if name.endswith("num_batches_tracked")}


def _silent_at_init(algorithm: Algorithm) -> str | None:
    return "it does not act at INIT" if algorithm.predicate.at(Event.INIT) == NEVER else None


@define_law(
    "INIT done twice is INIT done once, in any order, and leaves existing weights as they are",
    "at INIT make the slot from the state's shapes and values, whatever is there already; change weights in later "
    "events, or by surgery that keeps what they compute",
    exempt=_silent_at_init,
)
def init_once(subject: Subject, case: Case) -> bool:
    """Initialises twice, applies INIT to its own result, and lists the algorithm before and after its company."""
    acted: list[Event] = []

    def around(event: Event, state: State, act: _Act) -> State:
        if event is not Event.INIT:
            return act(state)
        before = copied({"params": state.params, "buffers": state.buffers})
        after = act(state)
        acted.append(event)
        if after.model == state.model:
            _check_fields(before, {"params": after.params, "buffers": after.buffers}, event)
        _check_twice(after, act(after), "INIT applied to its own result")
        return after

    case = _in_company(subject, case)
    early, late = (dataclasses.replace(case, place=place) for place in (0, len(case.others)))
    algorithm = _watched(subject.algorithm, around)
    step = early.step(algorithm)
    once = step.init(early.state())
    _check_twice(once, step.init(once), "after step.init twice")
    other = late.step(algorithm).init(late.state())
    labels = ("listed before the others", "listed after them")
    slots = ({name: slot for name, slot in state.slots.items() if name == subject.name} for state in (once, other))
    difference = next(tree.differences(*slots), None)
    if difference is not None:
        raise Broken(difference, labels, event=Event.INIT, where="slots")
    return bool(acted)


def _check_twice(once: State, twice: State, label: str) -> None:
    labels = ("after INIT", label)
    for field in LASTING:
        difference = _first_difference(getattr(once, field), getattr(twice, field), labels)
        if difference is not None:
            raise Broken(difference, labels, event=Event.INIT, where=field)
    _check_context(once.context, twice.context, Event.INIT)


def _check_fields(before: dict[str, Any], after: dict[str, Any], event: Event) -> None:
    for field, value in before.items():
        difference = _first_difference(value, after[field], ("before", "after"))
        if difference is not None:
            raise Broken(difference, ("before", "after"), event=event, where=field)


def _first_difference(first: Any, second: Any, labels: tuple[str, str]) -> tree.Difference | None:
    """The first difference in a leaf; that a dictionary is no longer empty says less than what is in it now."""
    found = list(tree.differences(first, second))
    chosen = next((difference for difference in found if difference.path), found[0] if found else None)
    if chosen is None:
        return None
    what = chosen.what.replace("in the first", labels[0]).replace("in the second", labels[1])
    return chosen._replace(what=what) if chosen.what.startswith("only") else chosen


def _watched(algorithm: Algorithm, around: Callable[[Event, State, _Act], State]) -> Algorithm:
    """Like `intercepted`, with INIT."""

    def apply(event: Event, state: State) -> State:
        return around(event, state, lambda given: applied(algorithm, event, given)[0])

    return dataclasses.replace(algorithm, apply=apply)


def _in_company(subject: Subject, case: Case) -> Case:
    """The case with a companion that has a slot."""
    if "bystander" in (*case.others, subject.name):
        return case
    return dataclasses.replace(case, others=(*case.others, "bystander"))
