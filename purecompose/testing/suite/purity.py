"""Laws of purity: the same result for the same input, no change of the input, no side effects; and of `match`, which
depends on time and shapes only."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from purecompose import batch as batches, tree
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.context import SealedTime, SealedTimeError, Static
from purecompose.core.loop import eval_events, predict_events
from purecompose.core.matching import Matcher
from purecompose.core.state import State
from purecompose.errors import GlobalDrawError, InPlaceError, MatchError, UnkeyedRandomError
from purecompose.testing.case import Case
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
    intercepted,
    run,
    snapshot,
)
from purecompose.testing.subject import Subject
from purecompose.time import Timestamp
from purecompose.time.event import Event


_LABELS = ("before", "after")


@define_law(
    "what a step or an algorithm is given is bit for bit as it was afterwards, and stays the caller's",
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

    step = case.step(intercepted(subject.algorithm, around))
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


class _Moment(NamedTuple):
    """The inputs of a step's matching."""

    state: State
    batch: Any
    later: Timestamp
    """The time after the step."""


_Answers = dict[tuple[int, Event], bool]
"""Results of `match`, by the moment's number and the event."""


@define_law(
    "match answers by time and shapes only, the same whenever it is asked, and the step acts where it says so",
    "let match read the event, state.timestamp and shapes only, and write nothing; choose by values inside apply with "
    "torch.where, or declare host=True",
    owns=(MatchError,),
    exempt=never_acts,
)
def match_pure(subject: Subject, case: Case) -> bool:
    """Call `match` at every event and time of the run: forwards, backwards after some steps, and for other values."""
    algorithm = subject.algorithm
    step = case.step(algorithm)
    state = step.init(case.state())
    inside = frozenset(step.events)
    moments = _moments(case, state)
    settings, before, labels = process_settings(), snapshot(state), ("before match was asked", "after it")
    first = _asked(algorithm, inside, moments)
    check_process(settings, labels)
    compare(before, state, labels)

    for batch in case.batches():
        state = _followed(subject, step, state, batch)
    again = _asked(algorithm, inside, moments, backwards=True)
    _check_same_answers(moments, first, again, ("at first", "asked again, after some steps"))

    if not algorithm.host:
        other = dataclasses.replace(case, seed=case.seed + 1)
        twin = step.init(other.state())
        run(step, twin, [other.batch(0)])
        elsewhere = _asked(algorithm, inside, _moments(other, twin))
        _check_same_answers(moments, first, elsewhere, ("for one state", "for another seed's, of equal shapes"))
    return any(answer for (_, event), answer in first.items() if event is not Event.INIT)


def _moments(case: Case, state: State) -> list[_Moment]:
    """Return the times of the case's run, evenly distributed if it is long."""
    batch, total = case.batch(0), case.epochs * case.batches_per_epoch
    size, tokens = state.context.layout.num_examples(batch), state.context.layout.num_tokens(batch)
    beginning = Timestamp(run=state.timestamp.run)
    found = []
    stride = -(-total // _MOST_TIMES) | 1  # odd, so that both even and odd batches are included
    for number in range(0, total, stride):
        now = beginning.advance_by(number, size, tokens)
        found.append(_Moment(state.replace(timestamp=now), batch, now.advance(size, tokens)))
    return found


def _asked(
    algorithm: Algorithm, inside: frozenset[Event], moments: list[_Moment], *, backwards: bool = False
) -> _Answers:
    """Return the answers for all events and moments; backwards with a new matcher for each."""
    kept = {event: Matcher([algorithm], [event]) for event in Event}
    questions = [(number, event) for number in range(len(moments)) for event in Event]
    if not backwards:
        return {(number, event): _ask(kept[event], inside, event, moments[number]) for number, event in questions}
    return {
        (number, event): _ask(Matcher([algorithm], [event]), inside, event, moments[number])
        for number, event in reversed(questions)
    }


def _ask(matcher: Matcher, inside: frozenset[Event], event: Event, moment: _Moment) -> bool:
    """Return the answer of a matcher as a step calls it; outside of programs there is no batch."""
    state, batch, later = moment
    has_batch = event in inside or event in _OTHER_PROGRAMS
    now = state.timestamp
    bits = matcher.schedule(state, batch if has_batch else None, now, later if event in inside else now)
    return bits > 0 or bool(matcher.always)


def _followed(subject: Subject, step: Step, state: State, batch: Any) -> State:
    """Return the state after a step, in which the algorithm must act exactly where `match` returns True."""
    inside, now = frozenset(step.events), state.timestamp
    layout = state.context.layout
    later = now.advance(layout.num_examples(batch), layout.num_tokens(batch))
    moment = _Moment(state, batch, later)
    announced = {e: _ask(Matcher([subject.algorithm], [e]), inside, e, moment) for e in step.events}
    following = run(step, state, [batch], subject.name)
    acted = {event for event, _ in following.applications}
    for event, answer in announced.items():
        if answer != (event in acted):
            found = tree.Difference("", _when(now), answer, event in acted)
            raise Broken(found, ("match says", "the step acts"), event=event, where="match")
    return following.states[-1]


def _check_same_answers(moments: list[_Moment], first: _Answers, second: _Answers, labels: tuple[str, str]) -> None:
    for (number, event), answer in first.items():
        if second[number, event] != answer:
            what = _when(moments[number].state.timestamp)
            raise Broken(tree.Difference("", what, answer, not answer), labels, event=event, where="match")


def _when(now: Timestamp) -> str:
    return f"the answer for the step after {now.batch} batches"


def _runs_on_host(algorithm: Algorithm) -> str | None:
    return "it runs on the host, which may read the timestamp" if algorithm.host else never_acts(algorithm)


@define_law(
    "inside apply, time is read from state.clock, never from state.timestamp",
    "read state.clock (tensors) inside apply; let match decide by state.timestamp, but keep nothing of it",
    owns=(SealedTimeError,),
    exempt=_runs_on_host,
)
def time_from_clock(subject: Subject, case: Case) -> bool:
    """Apply the algorithm again to the same state and clock, with another time in the sealed timestamp and in `match`.

    If an algorithm has another result each time even with the same time, nothing is judged.
    """
    judged: list[bool] = []

    def around(event: Event, state: State, act: Act) -> State:
        once = act(state)
        sealed = state.static.timestamp
        assert isinstance(sealed, SealedTime)
        now, later = _another_time(case, batch, sealed.opened(later=False))
        outside = state.replace(timestamp=now, clock=None, batch=None, outputs=None, grads=None)
        again = _difference(once, act(state), ("at first", "once more"), event)
        _ask_all(subject.algorithm, step.events, _Moment(outside, batch, later))
        elsewhen = state.replace(static=Static(state.context, SealedTime(now, later)))
        labels = (f"at batch {sealed.opened(later=False).batch}", f"with the same clock, match asked at {now.batch}")
        found = _difference(once, act(elsewhen), labels, event)
        judged.append(again is None)
        if again is None and found is not None:
            raise found
        return once

    batch = case.batch(0)
    step = case.step(Watched(subject.algorithm, around).algorithm)
    run(step, case.state(), case.batches())
    return any(judged)


def _difference(first: State, second: State, labels: tuple[str, str], event: Event) -> Broken | None:
    try:
        compare(first, second, labels, fields=STEP_FIELDS, event=event)
    except Broken as found:
        return found
    return None


def _another_time(case: Case, batch: Any, now: Timestamp) -> tuple[Timestamp, Timestamp]:
    """Return the time before and after a step at the other end of the run."""
    total, size = case.epochs * case.batches_per_epoch, case.batch_size
    number = 0 if now.batch > 0 and 2 * now.batch >= total else max(total - 1, 1)
    tokens = batches.num_tokens(batch)
    other = Timestamp(run=now.run).advance_by(number, size, tokens)
    return other, other.advance(size, tokens)


def _ask_all(algorithm: Algorithm, events: Sequence[Event], moment: _Moment) -> None:
    inside = frozenset(events)
    for event in events:  # in the program's order, like a step
        _ask(Matcher([algorithm], [event]), inside, event, moment)
