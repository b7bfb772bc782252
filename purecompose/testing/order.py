"""Decide on generated cases whether the order of two algorithms matters.

Two algorithms commute at an event if a training run ends in the same state whichever of them acts first there. Both
orders are run with everything else unchanged, in float64, so that rounding does not look like a conflict.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict

from hypothesis import assume

from purecompose.core.algorithm import Algorithm
from purecompose.core.loop import loop_events
from purecompose.core.program import events_in
from purecompose.errors import MatchError
from purecompose.testing.case import Case
from purecompose.testing.chosen import chosen
from purecompose.testing.faults import broken_company, first_line
from purecompose.testing.law import Broken
from purecompose.testing.moments import find_moments
from purecompose.testing.pair_search import NoAnswer, Pair
from purecompose.testing.rows import Row, plain
from purecompose.testing.search import Search, Stop, Tried, search
from purecompose.testing.subject import Subject
from purecompose.testing.tasks import FULL_TASKS, TASKS, Task
from purecompose.time.event import Event
from purecompose.time.predicates import Predicate, on


# Maximal number of tries for each of the `max_examples` cases.
_MAX_TRIES = 3
# Number of equal failures of a pair on a task, without a success, after which the task is left out.
_MAX_ALIKE = 3


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
        texts = [f"{text} with {order}" for order, text in self._told_values()]
        return ": ".join(part for part in (self.path, self.what, ", ".join(texts)) if part)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The parts of the first difference, each with a label."""
        found = (("leaf", self.path), ("found", self.what), *self._told_values())
        return (*((label, text) for label, text in found if text), ("case", repr(self.counterexample)))

    def _told_values(self) -> list[Row]:
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
        return plain(f"{names} do not commute at {where}", self.rows)


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
    names = (min(first.name, second.name), max(first.name, second.name))
    asked = None if event is None else Event(event)
    events = [met for met in meeting_events(first, second) if asked in (None, met)]
    if not events:
        where = "the same event" if asked is None else asked.name
        return Commutation(names, True, () if asked is None else (asked,), 0, f"they never both act at {where}")
    attempts = partial(_Attempts, Pair(first, second, tolerance), max_tries=_MAX_TRIES * max_examples)
    chosen_tasks = chosen("task", FULL_TASKS if tasks is None else tasks, TASKS, Task)
    answers: list[Commutation] = []
    for one in events:
        attempt = attempts(one)
        found = search(attempt.pair.cases(one, chosen_tasks), attempt, max_examples=max_examples, seed=seed)
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
    if event not in events_in(loop_events):
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


class _Attempts:
    """A function that tries a pair at an event in a case; each case runs once, because shrinking repeats cases.

    A task on which the pair fails in the same way in several cases, and succeeds in none, is given up.
    """

    def __init__(self, pair: Pair, event: Event, max_tries: int) -> None:
        self.pair, self.event, self._tries_left = pair, event, max_tries
        self.seen: dict[Case, Broken | NoAnswer | None] = {}
        self._came_out: dict[Task, list[str]] = {}

    def __call__(self, case: Case) -> Tried:
        if case not in self.seen:
            came_out = self._came_out.setdefault(case.task, [])
            assume("" in came_out or max(map(came_out.count, came_out), default=0) < _MAX_ALIKE)
            self._tries_left -= not self._has_difference
            if self._tries_left < 0:
                raise Stop
            self.seen[case] = self._try(case)
            error = getattr(self.seen[case], "__cause__", None)
            came_out.append("" if error is None else first_line(error))
        found = self.seen[case]
        assume(not isinstance(found, NoAnswer))
        return Tried(True, found)

    @property
    def errors(self) -> list[BaseException]:
        """The errors of cases that failed in both orders."""
        return [e.__cause__ for e in self.seen.values() if isinstance(e, NoAnswer) and e.__cause__ is not None]

    @property
    def _has_difference(self) -> bool:
        return any(isinstance(found, Broken) for found in self.seen.values())

    def _try(self, case: Case) -> Broken | NoAnswer | None:
        try:
            return self.pair.difference(case, self.event)
        except NoAnswer as none:
            return none


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
