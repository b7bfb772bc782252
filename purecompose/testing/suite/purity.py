"""Laws of purity: the same result for the same input, no change of the input, no side effects; and of `match`, which
depends on time and shapes only."""

import dataclasses
from typing import Any

from torch import Tensor

from purecompose import batch as batches, tree
from purecompose.core.algorithm import Algorithm
from purecompose.core.application import Matcher
from purecompose.core.compose import Step
from purecompose.core.loop import eval_events, predict_events
from purecompose.core.state import State
from purecompose.errors import GlobalDrawError, InPlaceError, MatchError, UnkeyedRandomError
from purecompose.testing.case import Case, Subject
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.process import elsewhere, process_restored, process_settings, seeded
from purecompose.testing.record import (
    LASTING,
    STEP_FIELDS,
    Act,
    Watched,
    after_batch,
    begun,
    check_equal,
    check_process,
    compare,
    copied,
    ended,
    run,
    snapshot,
)
from purecompose.time import Timestamp
from purecompose.time.event import Event


_LABELS = ("before", "after")


@define_law(
    "the inputs of a step or an algorithm are unchanged afterwards, bit for bit, and still belong to the caller",
    "make new tensors and dictionaries: x.mul(2) for x.mul_(2), {**params, name: tensor} for params[name] = tensor; "
    "remember in state.slots[name], not in attributes of tensors, and of a batch remember copies (x.clone())",
    owns=(InPlaceError,),
    exempt=never_acts,
)
def input_untouched(subject: Subject, case: Case) -> bool:
    """Compare the state at each event, and the state and batch of each step, with copies taken before.

    New attributes of tensors count as changes, too. Persistent fields must not be views of the batch, because its
    loader may reuse the memory.
    """

    def around(event: Event, state: State, act: Act) -> State:
        before, attributes = snapshot(state, STEP_FIELDS), _attributes(state, STEP_FIELDS)
        after = act(state)
        _check_untouched(before, state, attributes, STEP_FIELDS, event)
        return after

    watched = Watched(subject.algorithm, around)
    step = case.step(watched.algorithm)
    state = begun(step, case.state())
    for batch in case.batches():
        before, attributes, batch_before = snapshot(state), _attributes(state, LASTING), copied(batch)
        following = after_batch(step, state, batch)
        _check_untouched(before, state, attributes, LASTING, None)
        check_equal(batch_before, batch, ("before the step", "after it"), "batch")
        _check_no_view(following, batch)
        state = following
    ended(step, state)
    return watched.acted


def _check_untouched(
    before: State, state: State, attributes: dict[str, list[str]], fields: tuple[str, ...], event: Event | None
) -> None:
    for field in fields:
        check_equal(getattr(before, field), getattr(state, field), _LABELS, field, event=event)
    for path, names in _attributes(state, fields).items():
        new = [name for name in names if name not in attributes.get(path, [])]
        if new:
            raise Broken(f"the tensor that was given now has the attribute {new[0]!r}", where=path, event=event)


def _attributes(state: State, fields: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the attributes added to the tensors of a state, by the tensor's path."""
    return {
        f"{field}{path}": [*vars(leaf), *(["grad"] if leaf.is_leaf and leaf.grad is not None else [])]
        for field in fields
        for path, leaf in tree.leaves_with_paths(getattr(state, field), into_objects=True).items()
        if isinstance(leaf, Tensor)
    }


def _check_no_view(state: State, batch: Any) -> None:
    given = {tensor.untyped_storage().data_ptr() for tensor in batches.tensors(batch) if tensor.numel()}
    for field in LASTING:
        for path, leaf in tree.leaves_with_paths(getattr(state, field), into_objects=True).items():
            if isinstance(leaf, Tensor) and leaf.numel() and leaf.untyped_storage().data_ptr() in given:
                raise Broken("it outlasts the step and shares its memory with the batch", where=f"{field}{path}")


@define_law(
    "the same state and batch give the same result, bit for bit, whatever ran before",
    "random numbers: draw from state.rng(name) or state.example_rng(name); memory: state.slots[name], not a closure or "
    "a global",
    owns=(GlobalDrawError, UnkeyedRandomError),
    exempt=never_acts,
)
def deterministic(subject: Subject, case: Case) -> bool:
    """Take the steps twice with one algorithm, with other work in between.

    The second time, the global generators have other seeds, the clocks are days ahead and run faster, by an hour with
    each reading, and the process has another number and rank.
    """

    def around(event: Event, state: State, act: Act) -> State:
        once = act(state)
        compare(once, act(state), ("at first", "once more"), fields=STEP_FIELDS, event=event)
        return once

    step = case.step(Watched(subject.algorithm, around).algorithm)
    with elsewhere(0):
        first = run(step, case.state(), case.batches(), subject.name)
    other = case.step(subject.algorithm)
    with elsewhere(2):
        run(other, case.state(key=case.seed + 1), case.batches()[-1:])
    with elsewhere(3, pace=3700):
        second = run(step, case.state(), case.batches(), subject.name)
    labels = ("in the first run", "in the second")
    for (event, ours), (_, theirs) in zip(first.applications, second.applications, strict=False):
        compare(ours, theirs, labels, fields=STEP_FIELDS, event=event)
    for ours, theirs in zip(first.states, second.states, strict=True):
        compare(ours, theirs, labels)
    return first.acted


@define_law(
    "generators, modes, defaults and warnings filters of torch, Python and NumPy stay as they were",
    "leave global settings to the program that trains; torch.manual_seed and random.seed are settings too",
    owns=(GlobalDrawError,),
    exempt=never_acts,
)
def global_state_kept(subject: Subject, case: Case) -> bool:
    """Compare the settings of the process around each application, including INIT, and restore them at the end."""

    def around(event: Event, state: State, act: Act) -> State:
        before = process_settings()
        with process_restored():
            after = act(state)
            changed = [name for name, value in process_settings().items() if value != before[name]]
            if changed != ["warnings filters"]:  # a module that is imported on the way may set them, once
                check_process(before, _LABELS, event=event)
        if changed:
            act(state)
            check_process(before, _LABELS, event=event)
        return after

    watched = Watched(subject.algorithm, around, with_init=True)
    with seeded(0x5EED):  # a seed that no algorithm is likely to use, so that seeding changes the generators
        run(case.step(watched.algorithm), case.state(), case.batches())
    return watched.acted_after_init


_OTHER_PROGRAMS = frozenset(node for node in (*eval_events, *predict_events) if isinstance(node, Event))
_MOST_TIMES = 12

_Answers = dict[tuple[int, Event], bool]
"""Results of `match`, by the number of batches before the step and the event."""


@define_law(
    "match depends only on time and shapes, always gives the same answer, and the step acts where it matches",
    "let match read the event, state.timestamp and shapes only, and write nothing; choose by values inside apply with "
    "torch.where, or declare host=True",
    owns=(MatchError,),
    exempt=never_acts,
)
def match_pure(subject: Subject, case: Case) -> bool:
    """Call `match` at every event and time of the run: forwards, backwards after some steps, and for other values."""
    algorithm, watched, batch = subject.algorithm, Watched(subject.algorithm), case.batch(0)
    step = case.step(watched.algorithm)
    state = begun(step, case.state())
    states = _times(case, state)
    settings, before, labels = process_settings(), snapshot(state), ("before match was asked", "after it")
    first = _asked(step, algorithm, states, batch)
    check_process(settings, labels)
    compare(before, state, labels)

    for taken in case.batches():
        says = _asked(step, algorithm, [state], taken, backwards=True)
        watched.applications.clear()
        state = after_batch(step, state, taken)
        acted = {event for event, _ in watched.applications}
        acts = {(number, event): event in acted for number, event in says if event in step.events}
        _check_same(acts, says, ("the step acts", "match says"))
    _check_same(first, _asked(step, algorithm, states, batch, backwards=True), ("at first", "after some steps"))

    if not algorithm.host:
        other = dataclasses.replace(case, seed=case.seed + 1)
        twin = step.init(other.state())
        after_batch(step, begun(step, other.state()), other.batch(0))
        elsewhere = _asked(step, algorithm, _times(other, twin), other.batch(0))
        _check_same(first, elsewhere, ("for one state", "for another seed's, of equal shapes"))
    return any(answer for (_, event), answer in first.items() if event is not Event.INIT)


def _times(case: Case, state: State) -> list[State]:
    """Return the state at the times of the case's run, evenly distributed if it is long."""
    batch, total = case.batch(0), case.epochs * case.batches_per_epoch
    size, tokens = state.context.layout.num_examples(batch), state.context.layout.num_tokens(batch)
    beginning = Timestamp(run=state.timestamp.run)
    stride = -(-total // _MOST_TIMES) | 1  # odd, so that both even and odd batches are included
    return [state.replace(timestamp=beginning.advance_by(number, size, tokens)) for number in range(0, total, stride)]


def _asked(step: Step, algorithm: Algorithm, states: list[State], batch: Any, *, backwards: bool = False) -> _Answers:
    """Return the answers for all events and states; backwards with a new matcher for each."""
    kept = {event: Matcher([algorithm], [event]) for event in Event}
    found: _Answers = {}
    for state in reversed(states) if backwards else states:
        now, layout = state.timestamp, state.context.layout
        later = now.advance(layout.num_examples(batch), layout.num_tokens(batch))
        for event in reversed(Event) if backwards else Event:
            matcher = Matcher([algorithm], [event]) if backwards else kept[event]
            is_inside = event in step.events
            given = batch if is_inside or event in _OTHER_PROGRAMS else None  # elsewhere there is no batch
            bits = matcher.schedule(state, given, now, later if is_inside else now)
            found[now.batch, event] = bits > 0 or bool(matcher.always)
    return found


def _check_same(first: _Answers, second: _Answers, labels: tuple[str, str]) -> None:
    for (number, event), answer in first.items():
        if second[number, event] != answer:
            what = f"the answer for the step after {number} batches"
            raise Broken(tree.Difference("", what, answer, not answer), labels, event=event, where="match")
