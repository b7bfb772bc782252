"""Pairs of algorithms: whether their order at an event matters, decided on generated cases, and what decides it.

Two algorithms commute at an event if a training run ends in the same state whichever of them acts first there. Both
orders are run with everything else unchanged, in float64, so that rounding does not look like a conflict.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch
from hypothesis import assume

from purecompose._support.tables import table
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.loop import eval_events, loop_events, predict_events
from purecompose.core.passes import DEFAULT_PASSES, Pass, order_by_constraints, precedes, run_pass
from purecompose.core.program import events_in
from purecompose.core.state import State
from purecompose.errors import MatchError
from purecompose.testing.attempt import Stop, Tried, first_line, search
from purecompose.testing.case import Case, Subject, find_moments
from purecompose.testing.checking import chosen
from purecompose.testing.law import Broken, Row, labelled
from purecompose.testing.record import LASTING, STEP_FIELDS, compare
from purecompose.testing.strategies import cases
from purecompose.testing.tasks import FULL_TASKS, TASKS, Task
from purecompose.time.event import Event
from purecompose.time.predicates import Predicate, on


_LOOP = frozenset(events_in(loop_events))
_MAX_TRIES = 3
"""Maximal number of tries for each of the `max_examples` cases, since some give no answer."""


@dataclass(frozen=True)
class Commutation:
    """The result of `commutes`; true if the two commute, and with a reason as text."""

    algorithms: tuple[str, str]
    """The two names, in alphabetical order."""
    commutes: bool | None
    """True or False, or `None` if no generated case gave an answer."""
    events: tuple[Event, ...]
    """The events in question: all at which both may act, or the one at which they do not commute."""
    num_cases: int = 0
    """Number of cases in which both acted and that gave an answer, up to the first that differs."""
    reason: str = ""
    """The reason if there is nothing to compare, or no answer."""
    counterexample: Case | None = None
    """The simplest case found in which the order matters."""
    difference: Broken | None = field(default=None, compare=False)
    """The first difference in it: its `path`, `what`, and `values` by order, {"a before b": 1.0, "b before a": 2.0}."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The parts of the first difference, each with a label."""
        if self.difference is None:
            return ()
        found = {"leaf": self.difference.path, "found": self.difference.what}
        values = {
            order: f"{value:.6g}" if isinstance(value, float) else repr(value)
            for order, value in self.difference.values.items()
        }
        return (
            *((label, text) for label, text in (found | values).items() if text),
            ("case", repr(self.counterexample)),
        )

    def __bool__(self) -> bool:
        return self.commutes is True

    def __str__(self) -> str:
        names, where = " and ".join(self.algorithms), ", ".join(event.name for event in self.events)
        cases = f"{self.num_cases} case{'s' * (self.num_cases != 1)}"
        if self.commutes is None:
            return f"{names}: undecided at {where}: {self.reason}"
        if self.commutes:
            return f"{names} commute: {self.reason}" if self.reason else f"{names} commute at {where}, in {cases}"
        return labelled(f"{names} do not commute at {where}", self.rows)


def commutes(
    a: Algorithm | Subject | str,
    b: Algorithm | Subject | str,
    event: Event | str | None = None,
    *,
    tasks: Iterable[Task | str] | None = None,
    tolerance: float = 1e-6,
    max_examples: int = 25,
    seed: int = 0,
) -> Commutation:
    """Decide by generated cases whether it matters which of two algorithms acts first.

    A case is run twice, with either algorithm first at the event, and the states between steps are compared. At all
    other events the pair keeps the order of the default passes. An error in only one order is a difference, too. The
    answer does not depend on which algorithm is named first, and is the same in every process.

    Args:
        a: An algorithm, or a text as for `Subject.of`.
        b: Another algorithm, with another name.
        event: The event; by default each one at which both may act, up to the first at which they do not commute.
        tasks: The tasks, or their names; by default all of `TASKS` in full precision, since half precision rounds by
            more than `tolerance`.
        tolerance: Share of its largest magnitude by which a leaf may differ.
        max_examples: Number of cases in which both act, for each event.
        seed: Seed of the cases.

    Raises:
        TypeError, ValueError: Both have the same name, or there is no such algorithm or task.
        OrderError: Their constraints contradict each other.

    Example:
        >>> print(commutes("mixup(0.2)", "label_smoothing(0.1)", "after_loss"))
        label_smoothing and mixup commute: they never both act at AFTER_LOSS
    """
    first, second = Subject.of(a).algorithm, Subject.of(b).algorithm
    if first.name == second.name:
        raise ValueError(f"two algorithms called {first.name!r}; give one another name: mixup(..., name='other')")
    pair = (first, second) if first.name < second.name else (second, first)
    names = (pair[0].name, pair[1].name)
    asked = None if event is None else Event(event)
    events = [met for met in meeting_events(first, second) if asked in (None, met)]
    if not events:
        where = "the same event" if asked is None else asked.name
        return Commutation(names, True, () if asked is None else (asked,), reason=f"they never both act at {where}")
    given = chosen("task", FULL_TASKS if tasks is None else tasks, TASKS, Task)
    answers: list[Commutation] = []
    for one in events:
        answers.append(_answer(_Trial(pair, one, tolerance), given, max_examples, seed))
        if answers[-1].commutes is False:
            return answers[-1]
    undecided = next((answer for answer in answers if answer.commutes is None), None)
    if undecided is not None:
        return undecided
    return Commutation(names, True, tuple(events), sum(answer.num_cases for answer in answers))


def meeting_events(a: Algorithm, b: Algorithm) -> tuple[Event, ...]:
    """Return the events at which both may act in one step, INIT first.

    A plain function for `match` is evaluated in every step of a short run of each task.
    """
    theirs = set(b.events)
    both = tuple(event for event in a.events if event in theirs)
    left = {event: on(event) & a.predicate & b.predicate for event in both}
    opaque = [event for event in both if not left[event].at(event).is_timed]
    seen = _seen_together(a, b, opaque) if opaque else set()
    return tuple(event for event in both if (event in seen if event in opaque else _overlap(left[event], event)))


def _overlap(joint: Predicate, event: Event) -> bool:
    """Return whether a predicate about time is ever true at an event; True for events outside the step."""
    if event not in _LOOP:
        return True
    return bool(find_moments(joint, batches_per_epoch=2, epochs=4).acting)


def _seen_together(a: Algorithm, b: Algorithm, events: Sequence[Event]) -> set[Event]:
    found: set[Event] = set()
    for task in TASKS.values():
        whole = Case(task)
        for start in range(whole.batches_per_epoch * whole.epochs):
            case = Case(task, start=start)
            try:
                plan = case.step(a, b, passes=()).plan(case.state(), case.batch(0))
            except MatchError:  # it cannot be evaluated at every event, so the runs themselves have to show it
                return set(events)
            found |= {event for event in events if len(plan.order(event)) == 2}
    return found


class _NoAnswer(Exception):
    """Raised for a case without an answer; its cause is the error of the usual order, if there was one."""


@dataclass(frozen=True)
class _Trial:
    """A pair at an event."""

    pair: tuple[Algorithm, Algorithm]
    event: Event
    tolerance: float

    def difference(self, case: Case) -> Broken | None:
        """Return the difference that the order makes in a case."""
        program = next((p for p in (eval_events, predict_events) if self.event in p), loop_events)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the algorithms do not matter here
            usual = self._run(case, program, is_swapped=False)
            if not usual.have_met:
                raise _NoAnswer from usual.error
            swapped = self._run(case, program, is_swapped=True)
        if usual.error is not None and swapped.error is not None:
            raise _NoAnswer from usual.error
        one, other = (algorithm.name for algorithm in _by_passes(DEFAULT_PASSES, self.pair, self.event))
        labels = (f"{one} before {other}", f"{other} before {one}")
        fields = LASTING if program is loop_events else STEP_FIELDS
        try:
            for error, label in zip((usual.error, swapped.error), labels, strict=True):
                if error is not None:
                    raise Broken(f"fails with {label} alone, with {first_line(error)}", event=self.event)
            for ours, theirs in zip(usual.states, swapped.states, strict=True):
                compare(ours, theirs, labels, fields=fields, tolerance=self.tolerance, event=self.event)
        except Broken as broken:
            return broken
        return None

    def _run(self, case: Case, program: Sequence[Any], *, is_swapped: bool) -> "_Run":
        run = _Run()

        def order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
            """Set the order of the two in their places, as the only pass of the run."""
            if not all(algorithm in algorithms for algorithm in self.pair):
                return algorithms
            run.have_met |= event is self.event
            ordered = _by_passes(DEFAULT_PASSES, self.pair, event)
            waiting = iter(ordered[::-1] if is_swapped and event is self.event else ordered)
            return tuple(next(waiting) if algorithm in self.pair else algorithm for algorithm in algorithms)

        is_outside = self.event not in (*_LOOP, Event.INIT) and program is loop_events
        try:
            step = case.step(*self.pair, passes=[order], program=program)
            for state in _states(step, case, self.event if is_outside else None):
                run.states.append(state)
        except Exception as failure:
            run.error = failure
        return run


@dataclass
class _Run:
    """A run of a case: its states, whether the pair met at the event, and the error that ended it."""

    states: list[State] = field(default_factory=list)
    have_met: bool = False
    error: Exception | None = None


def _states(step: Step, case: Case, fired: Event | None) -> Iterator[State]:
    """Yield the state after `init` and after each step, each time after firing an event outside the program, if any."""
    state = step.init(case.state(dtype=torch.float64))
    for batch in [None, *case.batches(torch.float64)]:
        seen = state
        if batch is not None:
            seen = step.fold(state, batch)
            state = step.finish(seen)
        if fired is not None:
            seen = state = step.fire(fired, state)
        yield state if step.has_advance else seen  # the result of an evaluation is its outputs, which `finish` drops


def _answer(trial: _Trial, tasks: Sequence[Task], max_examples: int, seed: int) -> Commutation:
    """Return the answer at one event."""
    num_tries, errors, has_failed = 0, list[BaseException](), False

    def attempt(case: Case) -> Tried:
        nonlocal num_tries, has_failed
        if not has_failed and num_tries == _MAX_TRIES * max_examples:
            raise Stop
        num_tries += 1
        try:
            found = trial.difference(case)
        except _NoAnswer as none:
            errors.extend([none.__cause__] if none.__cause__ else [])
            assume(False)
            raise
        has_failed = has_failed or found is not None
        return Tried(True, found)

    one, other = trial.pair
    # Most cases begin where both act, as far as that follows from their predicates.
    both = dataclasses.replace(one, match=on(trial.event) & one.predicate & other.predicate)
    strategy = cases(tasks, algorithm=both if trial.event in _LOOP else None)
    found = search(strategy, attempt, max_examples=max_examples, seed=seed)
    names, events, broken = (one.name, other.name), (trial.event,), found.failure
    if isinstance(broken, Broken):
        return Commutation(names, False, events, found.num_cases, counterexample=found.case, difference=broken)
    if found.num_cases:
        return Commutation(names, True, events, found.num_cases)
    why = f"in none of {num_tries} cases did both act there"
    if errors:
        why = f"both orders failed in {len(errors)} of {num_tries} cases, the first with {first_line(errors[0])}"
    return Commutation(names, None, events, reason=f"{why}; give tasks on which both act and work")


class Meeting(NamedTuple):
    """A pair at an event where both may act."""

    event: Event
    """The event."""
    order: tuple[str, str]
    """The names in the order in which they act."""
    decided_by: str | None
    """The constraint or pass that decides the order, whichever is listed first; `None` if the list does."""
    commutation: Commutation
    """The answer to whether the order matters."""

    @property
    def is_open(self) -> bool:
        """True if the order matters and only the list decides it."""
        return self.commutation.commutes is False and self.decided_by is None


@dataclass(frozen=True, repr=False)
class Conflicts:
    """The result of `conflicts`; `str` shows the pairs that do not commute, and what decides the order of each."""

    algorithms: tuple[str, ...]
    """The names, as listed."""
    meetings: tuple[Meeting, ...]
    """Each pair at each event where both may act."""

    @property
    def conflicting(self) -> tuple[Meeting, ...]:
        """The meetings of pairs that do not commute."""
        return tuple(meeting for meeting in self.meetings if meeting.commutation.commutes is False)

    @property
    def undecided(self) -> tuple[Meeting, ...]:
        """The meetings of pairs that do not commute and whose order only the list decides."""
        return tuple(meeting for meeting in self.meetings if meeting.is_open)

    @property
    def unknown(self) -> tuple[Meeting, ...]:
        """The meetings for which no generated case shows whether the pair commutes."""
        return tuple(meeting for meeting in self.meetings if meeting.commutation.commutes is None)

    def __str__(self) -> str:
        if self.conflicting:
            parts = [table(["event", "order", "decided by"], self._decisions())]
        else:
            parts = ["no conflict found, but some gave no answer" if self.unknown else "they all commute"]
        parts += [
            labelled(f"{' and '.join(m.order)} do not commute at {m.event.name}", m.commutation.rows)
            for m in self.conflicting
        ]
        return "\n\n".join([*parts, *(str(meeting.commutation) for meeting in self.unknown)])

    def _decisions(self) -> list[list[str]]:
        return [[m.event.name, " < ".join(m.order), m.decided_by or self._listing(m)] for m in self.conflicting]

    def _listing(self, meeting: Meeting) -> str:
        first, second = map(self.algorithms.index, meeting.order)
        return f"only the list ({'listed so' if first < second else 'listed, reversed'})"


def conflicts(
    algorithms: Iterable[Algorithm | Subject | str], *, passes: Iterable[Pass] = DEFAULT_PASSES, **options: Any
) -> Conflicts:
    """Try all pairs of a list at all events where both may act; see `commutes` for the settings.

    Each pair is tried without the others, with the events in the order of `loop_events`. If the passes drop one of a
    pair, it does not meet.

    Args:
        algorithms: Algorithms, or texts as for `Subject.of`, with different names.
        passes: The passes of the intended step.
        options: `tasks`, `tolerance=1e-6`, `max_examples=25` and `seed=0`, as for `commutes`.

    Raises:
        TypeError, ValueError: Two algorithms have the same name, or there is no such algorithm or task.
        OrderError: Constraints contradict each other.

    Example:
        >>> found = conflicts(["mixup(0)", "label_smoothing(0)"])  # neutral settings: neither ever acts
        >>> print(found)
        they all commute
    """
    listed, ordering = [Subject.of(given).algorithm for given in algorithms], tuple(passes)
    names = tuple(algorithm.name for algorithm in listed)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"the name {twice[0]!r} is used twice; give one another: mixup(..., name='other')")
    meetings = []
    for a, b in combinations(listed, 2):
        for event in meeting_events(a, b):
            decision = _decide(a, b, event, ordering)
            if decision is not None:
                meetings.append(Meeting(event, *decision, commutes(a, b, event, **options)))
    return Conflicts(names, tuple(meetings))


def _decide(
    a: Algorithm, b: Algorithm, event: Event, passes: tuple[Pass, ...]
) -> tuple[tuple[str, str], str | None] | None:
    """Return the order of a pair at an event and the rule that decides it; `None` if the passes drop one of them."""
    listed, reverse = (a, b), (b, a)
    decided_by: str | None = None
    for one_pass in passes:
        listed, reverse = (_by_passes([one_pass], given, event) for given in (listed, reverse))
        if len(listed) < 2 or len(reverse) < 2:
            return None
        if listed != reverse:
            decided_by = None
        elif decided_by is None:
            decided_by = getattr(one_pass, "__name__", repr(one_pass))
    first, second = listed
    if decided_by is not None and order_by_constraints in passes and precedes(first, second):
        decided_by = f"constraint: {first.name} before {second.name}"
    return (first.name, second.name), decided_by


def _by_passes(passes: Iterable[Pass], pair: Sequence[Algorithm], event: Event) -> tuple[Algorithm, ...]:
    """Return what passes make of a pair, without their warnings, which come when the step itself is composed."""
    ordered = pair
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one_pass in passes:
            ordered = run_pass(one_pass, ordered, event)
    return tuple(algorithm for algorithm in ordered if algorithm in pair)
