"""Pairs of algorithms: whether their order at an event matters, decided on generated cases, and what decides it.

Two algorithms commute at an event if a training run ends in the same state whichever of them acts first there. Both
orders are run with everything else unchanged, in float64, so that rounding does not look like a conflict.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import torch
from hypothesis import assume
from hypothesis.strategies import SearchStrategy

from purecompose._support.tables import table
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.loop import eval_events, loop_events, predict_events
from purecompose.core.operation import walk
from purecompose.core.passes import DEFAULT_PASSES, Pass, order_by_constraints, precedes, run_pass
from purecompose.core.program import events_in
from purecompose.core.state import State
from purecompose.errors import MatchError
from purecompose.testing.attempt import Search, Stop, Tried, broken_company, first_line, search
from purecompose.testing.case import Case, find_moments
from purecompose.testing.checking import chosen
from purecompose.testing.law import Broken, Row, labelled
from purecompose.testing.record import LASTING, STEP_FIELDS, compare
from purecompose.testing.strategies import cases
from purecompose.testing.subject import Subject
from purecompose.testing.tasks import FULL_TASKS, TASKS, Task
from purecompose.time.event import Event
from purecompose.time.predicates import Predicate, on


Composed = TypeVar("Composed", Step, Iterable[Algorithm])

_LOOP = frozenset(events_in(loop_events))
_MAX_TRIES = 3
"""Maximal number of tries for each of the `max_examples` cases, since some give no answer."""


class OrderOptions(TypedDict, total=False):
    """The options of `commutes`."""

    tasks: Iterable[Task | str] | None
    """The tasks, or their names in `TASKS`; by default all in full precision, because half precision rounds more."""
    tolerance: float
    """Share of its largest magnitude by which a leaf may differ, 1e-6 by default."""
    max_examples: int
    """Number of cases in which both act, for each event, 25 by default."""
    seed: int
    """Seed of the cases, 0 by default."""


@dataclass(frozen=True)
class Commutation:
    """The result of `commutes`; true if the two commute, and with a reason as text."""

    algorithms: tuple[str, str]
    """The two names, in alphabetical order."""
    commutes: bool | None
    """True or False, or `None` if no generated case gave an answer."""
    events: tuple[Event, ...]
    """The events in question: all at which both may act, or the one at which they do not commute."""
    num_cases: int
    """Number of cases in which both acted and that gave an answer, up to the first that differs."""
    reason: str = ""
    """The reason if there is nothing to compare, or no answer."""
    counterexample: Case | None = None
    """The simplest case found in which the order matters."""
    path: str = ""
    """The key path of the first difference, such as "params['0.weight']"."""
    what: str = ""
    """Description of the first difference."""
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The two values of the first difference, by order: {"a before b": 1.0, "b before a": 2.0}."""

    @property
    def event(self) -> Event | None:
        """The event, if the answer is about a single one."""
        return self.events[0] if len(self.events) == 1 else None

    @property
    def difference(self) -> str:
        """The first difference in one line; empty if there is none."""
        texts = [f"{text} with {order}" for order, text in self._labelled_values()]
        return ": ".join(part for part in (self.path, self.what, ", ".join(texts)) if part)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The parts of the first difference, each with a label."""
        found = (("leaf", self.path), ("found", self.what), *self._labelled_values())
        return (*((label, text) for label, text in found if text), ("case", repr(self.counterexample)))

    def _labelled_values(self) -> list[Row]:
        texts = [f"{value:.6g}" if isinstance(value, float) else repr(value) for value in self.values.values()]
        if len(set(texts)) == 1:
            texts = [repr(value) for value in self.values.values()]
        return list(zip(self.values, texts, strict=True))

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
        return Commutation(names, True, () if asked is None else (asked,), 0, f"they never both act at {where}")
    given = chosen("task", FULL_TASKS if tasks is None else tasks, TASKS, Task)
    answers: list[Commutation] = []
    for one in events:
        attempt = _Attempts(pair, one, tolerance, max_tries=_MAX_TRIES * max_examples)
        found = search(attempt.cases(given), attempt, max_examples=max_examples, seed=seed)
        answers.append(_answer(names, attempt, found))
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


class _Attempts:
    """A function that tries a pair at an event in a case; each case runs once, because shrinking repeats cases."""

    def __init__(self, pair: tuple[Algorithm, Algorithm], event: Event, tolerance: float, max_tries: int) -> None:
        self.pair, self.event, self.seen = pair, event, dict[Case, Broken | _NoAnswer | None]()
        self._tolerance, self._tries_left = tolerance, max_tries
        self._program = next((p for p in (eval_events, predict_events) if event in p), loop_events)
        is_outside = event not in (*_LOOP, Event.INIT) and self._program is loop_events
        self._fired = event if is_outside else None

    def cases(self, tasks: Sequence[Task]) -> SearchStrategy[Case]:
        """Return a strategy for cases; most begin where both act, as far as that follows from their predicates."""
        one, other = self.pair
        both = dataclasses.replace(one, match=on(self.event) & one.predicate & other.predicate)
        return cases(tasks, algorithm=both if self.event in _LOOP else None)

    def __call__(self, case: Case) -> Tried:
        if case not in self.seen:
            self._tries_left -= not any(isinstance(found, Broken) for found in self.seen.values())
            if self._tries_left < 0:
                raise Stop
            try:
                self.seen[case] = self._difference(case)
            except _NoAnswer as none:
                self.seen[case] = none
        found = self.seen[case]
        assume(not isinstance(found, _NoAnswer))
        return Tried(True, found)

    @property
    def errors(self) -> list[BaseException]:
        """The errors of cases that failed in both orders."""
        return [e.__cause__ for e in self.seen.values() if isinstance(e, _NoAnswer) and e.__cause__ is not None]

    def _difference(self, case: Case) -> Broken | None:
        """Return the difference that the order at the event makes in a case."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the algorithms do not matter here
            usual = self._run(case, is_swapped=False)
            if not usual.have_met:
                raise _NoAnswer from usual.error
            swapped = self._run(case, is_swapped=True)
        if usual.error is not None and swapped.error is not None:
            raise _NoAnswer from usual.error
        one, other = (algorithm.name for algorithm in _by_passes(DEFAULT_PASSES, self.pair, self.event))
        labels = (f"{one} before {other}", f"{other} before {one}")
        fields = LASTING if self._program is loop_events else STEP_FIELDS
        try:
            for error, label in zip((usual.error, swapped.error), labels, strict=True):
                if error is not None:
                    text = " ".join(str(error).split())
                    raise Broken(f"fails with {label} alone, with {type(error).__name__}: {text}", event=self.event)
            for ours, theirs in zip(usual.states, swapped.states, strict=True):
                compare(ours, theirs, labels, fields=fields, tolerance=self._tolerance, event=self.event)
        except Broken as broken:
            return broken
        return None

    def _run(self, case: Case, *, is_swapped: bool) -> "_Run":
        run = _Run()

        def order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
            """Set the order of the two in their places, as the only pass of the run."""
            if not all(algorithm in algorithms for algorithm in self.pair):
                return algorithms
            run.have_met |= event is self.event
            ordered = _by_passes(DEFAULT_PASSES, self.pair, event)
            waiting = iter(ordered[::-1] if is_swapped and event is self.event else ordered)
            return tuple(next(waiting) if algorithm in self.pair else algorithm for algorithm in algorithms)

        try:
            step = case.step(*self.pair, passes=[order], program=self._program)
            for state in _states(step, case, self._fired):
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


def _answer(names: tuple[str, str], attempt: _Attempts, found: Search) -> Commutation:
    """Return the answer at one event."""
    events, broken = (attempt.event,), found.failure
    if isinstance(broken, Broken):
        at = {"path": broken.path, "what": broken.what, "values": broken.values}
        return Commutation(names, False, events, found.num_cases, counterexample=found.case, **at)
    if found.num_cases:
        return Commutation(names, True, events, found.num_cases)
    return Commutation(names, None, events, 0, f"{_why_undecided(attempt)}; give tasks on which both act and work")


def _why_undecided(attempt: _Attempts) -> str:
    tried, errors = len(attempt.seen), attempt.errors
    if not errors:
        return f"in none of {tried} cases did both act there"
    said = f"both orders failed in {len(errors)} of {tried} cases, the first with {first_line(errors[0])}"
    company = next(filter(None, map(broken_company, errors)), None)
    return said if company is None else f"{said}; the pair {company}"


class OrderWarning(UserWarning):
    """Two algorithms do not commute, and only the order of a list decides which acts first."""


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
    """The result of `conflicts`; `str` shows the matrix of pairs and the list of those that do not commute."""

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

    def cell(self, row: str, column: str) -> str:
        """Return the matrix's entry for two names: one mark, or several where events differ.

        `.`: they commute. `-`: they never meet. `<` or `>`: they do not commute, and the row acts before or after the
        column. `!`: they do not commute, and only the list decides. `?`: no answer. Empty for a name and itself.
        """
        met = [meeting for meeting in self.meetings if set(meeting.order) == {row, column}]
        if row == column:
            return ""
        marks = {_mark(meeting, row) for meeting in met}
        return "".join(mark for mark in "!<>?" if mark in marks) or ("." if met else "-")

    def __str__(self) -> str:
        if not self.algorithms:
            return "no algorithms"
        parts = [table(*self._matrix()), _LEGEND]
        if self.conflicting:
            parts.append(table(["event", "order", "decided by"], self._decisions()))
        else:
            parts.append("no conflict found, but some gave no answer" if self.unknown else "they all commute")
        parts += [
            labelled(f"{' and '.join(m.order)} do not commute at {m.event.name}", m.commutation.rows)
            for m in self.conflicting
        ]
        return "\n\n".join([*parts, *(str(meeting.commutation) for meeting in self.unknown)])

    def __repr__(self) -> str:
        return f"Conflicts({', '.join(self.algorithms)}; conflicting: {len(self.conflicting)})"

    def _matrix(self) -> tuple[list[str], list[list[str]]]:
        numbers = [str(number) for number in range(1, len(self.algorithms) + 1)]
        rows = [
            [number, name, *(self.cell(name, other) for other in self.algorithms)]
            for number, name in zip(numbers, self.algorithms, strict=True)
        ]
        return ["", "algorithm", *numbers], rows

    def _decisions(self) -> list[list[str]]:
        return [[m.event.name, " < ".join(m.order), m.decided_by or self._listing(m)] for m in self.conflicting]

    def _listing(self, meeting: Meeting) -> str:
        first, second = map(self.algorithms.index, meeting.order)
        return f"only the list ({'listed so' if first < second else 'listed, reversed'})"


_LEGEND = (
    ".  commute        <  row acts before column    !  do not commute, and only the order of the list decides\n"
    "-  never meet     >  row acts after column     ?  no generated case gave an answer"
)


def conflicts(
    algorithms: Iterable[Algorithm | Subject | str],
    *,
    passes: Iterable[Pass] = DEFAULT_PASSES,
    **options: Unpack[OrderOptions],
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
           algorithm        1  2
        -  ---------------  -  -
        1  mixup               -
        2  label_smoothing  -
        <BLANKLINE>
        .  commute        <  row acts before column    !  do not commute, and only the order of the list decides
        -  never meet     >  row acts after column     ?  no generated case gave an answer
        <BLANKLINE>
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


def warn_of_conflicts(composed: Composed, **settings: Any) -> Composed:
    """Warn of each pair that does not commute and whose order only the list decides, while composing.

    Args:
        composed: A step, or a list of algorithms for a step with the default passes.
        settings: Options of `conflicts`.

    Returns:
        The step or the algorithms, as given.

    Example:
        >>> from purecompose import algorithms as alg, compose, loop_events
        >>> warn_of_conflicts(compose(loop_events, [alg.label_smoothing(0.1)]))
        Step(label_smoothing(smoothing=0.1))
    """
    if isinstance(composed, Step):
        algorithms, settings = composed.algorithms, {"passes": composed.passes, **settings}
        absent = {node for node in walk(loop_events) if isinstance(node, Event)} - set(composed.events)
    else:
        composed = tuple(composed) if not isinstance(composed, Sequence) else composed  # pyright: ignore
        algorithms, absent = composed, set()
    for meeting in conflicts(algorithms, **settings).undecided:
        if meeting.event not in absent:
            warnings.warn(_advice(meeting), OrderWarning, stacklevel=2)
    return composed


def _advice(meeting: Meeting) -> str:
    first, second = meeting.order
    return (
        f"{first} and {second} do not commute at {meeting.event.name}, and only the order of the list decides that "
        f"{first} comes first there. They differ in {meeting.commutation.difference}. Decide it by a constraint, "
        f"runs_before=({second!r},) on {first} or runs_after=({first!r},) on {second} (or the other way round); or by "
        "a pass, a function (algorithms, event) -> algorithms in compose(..., passes=(*DEFAULT_PASSES, my_pass))"
    )


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


def _mark(meeting: Meeting, row: str) -> str:
    if meeting.commutation.commutes is None:
        return "?"
    if meeting.commutation.commutes:
        return "."
    if meeting.is_open:
        return "!"
    return "<" if meeting.order[0] == row else ">"
