"""The search behind `commutes`: runs of generated cases in both orders of a pair."""

import contextlib
import dataclasses
import random as python_random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from hypothesis import Phase, Verbosity, assume, find, settings
from hypothesis.errors import NoSuchExample, Unsatisfiable
from hypothesis.strategies import SearchStrategy

from purecompose.algorithm import Algorithm
from purecompose.compose import Step
from purecompose.event import Event
from purecompose.loop import Program, eval_events, loop_events, predict_events, walk
from purecompose.passes import (
    compose_passes,
    order_by_constraints,
    set_filo_order,
    sort_fused_layernorm_last,
    sort_selective_backprop_first,
)
from purecompose.predicate import on
from purecompose.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken
from purecompose.testing.record import LASTING, STEP_FIELDS, compare
from purecompose.testing.strategies import cases
from purecompose.testing.tasks import Task


__all__ = ["Findings", "PairSearch"]


class _Run(NamedTuple):
    """A run of a case: the states that it left, where the pair met, and the error that ended it."""

    states: tuple[State, ...]
    met: frozenset[Event]
    error: Exception | None


class Findings(NamedTuple):
    """What the cases say about a pair at an event."""

    tried: int
    """How many cases were run."""
    examples: int
    """How many of them let both act and gave an answer, up to the first that differs."""
    errors: tuple[Exception, ...]
    """What failed whichever came first."""
    case: Case | None
    """The simplest case that differs."""
    broken: Broken | None
    """The difference there."""


class _Outcome(NamedTuple):
    """What a case says: whether it is an answer at all, and the difference if there is one."""

    is_answer: bool
    broken: Broken | None = None
    error: Exception | None = None


class _Order:
    """The one pass of a run: notes where the pair meets, and sets its order there; the two stand side by side."""

    def __init__(self, pair: Sequence[Algorithm], swapped_at: Event | None) -> None:
        self.pair, self.swapped_at, self.met = pair, swapped_at, set[Event]()

    def __call__(self, algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
        if not all(algorithm in algorithms for algorithm in self.pair):
            return algorithms
        self.met.add(event)
        ordered = _DEFAULT_ORDER(self.pair, event)
        waiting = iter(ordered[::-1] if event is self.swapped_at else ordered)
        return tuple(next(waiting) if algorithm in self.pair else algorithm for algorithm in algorithms)


_DEFAULT_ORDER = compose_passes(
    set_filo_order, sort_selective_backprop_first, sort_fused_layernorm_last, order_by_constraints
)
_MAX_SHRINKS = 60
_MAX_TRIES = 3  # for each case that is to give an answer
_LOOP = frozenset(node for node in walk(loop_events) if isinstance(node, Event))


class PairSearch:
    """Looks for the simplest case in which the order of a pair matters.

    Args:
        a: An algorithm.
        b: Another.
        tasks: The tasks to try.
        tolerance: By which share of its largest magnitude a leaf may differ.
        max_examples: How many cases in which both act are tried at an event.
        seed: Of the cases.
    """

    def __init__(
        self, a: Algorithm, b: Algorithm, *, tasks: tuple[Task, ...], tolerance: float, max_examples: int, seed: int
    ) -> None:
        # By name, so that what is found does not depend on which one is named first.
        self.pair = sorted((a, b), key=lambda algorithm: algorithm.name)
        self.tasks, self.tolerance, self.max_examples, self.seed = tasks, tolerance, max_examples, seed
        # Runs in the pair's usual order serve all events of a program.
        self._usual: dict[tuple[Case, Program, Event | None], _Run] = {}

    def findings(self, event: Event) -> Findings:
        """What the cases say about an event."""
        outcomes: dict[Case, _Outcome] = {}  # a case is run once: shrinking comes back to what it has seen

        def differs(case: Case) -> bool:
            if case not in outcomes:
                if _is_enough(outcomes, _MAX_TRIES * self.max_examples):
                    return False
                outcomes[case] = self._try(case, event)
            assume(outcomes[case].is_answer)
            return outcomes[case].broken is not None

        quietly = settings(
            max_examples=self.max_examples, database=None, deadline=None, derandomize=True,
            phases=(Phase.generate, Phase.shrink), verbosity=Verbosity.quiet,
        )  # fmt: skip
        case, source = None, python_random.Random(self.seed)
        with contextlib.suppress(NoSuchExample, Unsatisfiable):
            case = find(self._cases(event), differs, settings=quietly, random=source)
        broken = None if case is None else outcomes[case].broken
        answers = [outcome.broken is None for outcome in outcomes.values() if outcome.is_answer]
        examples = answers.index(False) + 1 if False in answers else len(answers)
        errors = tuple(outcome.error for outcome in outcomes.values() if outcome.error is not None)
        return Findings(len(outcomes), examples, errors, case, broken)

    def _cases(self, event: Event) -> SearchStrategy[Case]:
        """Cases of which most begin where both act, as far as their predicates tell."""
        a, b = self.pair
        both = dataclasses.replace(a, match=on(event) & a.predicate & b.predicate)
        return cases(self.tasks, algorithm=both if event in _LOOP else None)

    def _try(self, case: Case, event: Event) -> _Outcome:
        """Runs a case in both orders."""
        if event is Event.INIT and self._starts_alike(case):
            return _Outcome(True)
        program = next((p for p in (eval_events, predict_events) if event in p), loop_events)
        fired = event if event not in (*_LOOP, Event.INIT) and program is loop_events else None
        if fired is not None and not self._may_meet(self._run_usual(case, loop_events, None), fired):
            return _Outcome(False)
        usual = self._run_usual(case, program, fired)
        if event not in usual.met:
            return _Outcome(False, error=usual.error)
        swapped = self._run(case, program, fired, event)
        if usual.error is not None and swapped.error is not None:
            return _Outcome(False, error=usual.error)
        try:
            self._compare(usual, swapped, event, LASTING if program is loop_events else STEP_FIELDS)
        except Broken as broken:
            if broken.path == "model" and not self._makes_one_model(usual, case, program, fired):
                return _Outcome(False)
            return _Outcome(True, broken)
        return _Outcome(True)

    def _starts_alike(self, case: Case) -> bool:
        """Whether both orders at INIT leave the same bits, so that all that follows is the same too."""
        usual, swapped = (self._run(case, (), None, swapped_at) for swapped_at in (None, Event.INIT))
        if Event.INIT not in usual.met or usual.error is not None or swapped.error is not None:
            return False
        (ours,), (theirs,) = usual.states, swapped.states
        try:
            compare(ours, theirs, ("", ""))
        except Broken:
            return False
        return ours.context == theirs.context

    def _compare(self, usual: _Run, swapped: _Run, event: Event, fields: Sequence[str]) -> None:
        one, other = (algorithm.name for algorithm in _DEFAULT_ORDER(self.pair, event))
        labels = (f"{one} before {other}", f"{other} before {one}")
        for error, label in zip((usual.error, swapped.error), labels, strict=True):
            if error is not None:
                text = " ".join(str(error).split())
                raise Broken(f"fails with {label} alone, with {type(error).__name__}: {text}", event=event)
        for ours, theirs in zip(usual.states, swapped.states, strict=True):
            compare(ours, theirs, labels, fields=fields, tolerance=self.tolerance, event=event)
            if ours.model != theirs.model:
                raise Broken("the two orders leave different models", event=event, where="model")

    def _makes_one_model(self, usual: _Run, case: Case, program: Program, fired: Event | None) -> bool:
        """Whether models can be compared: one with a function made on the spot equals no other."""
        again = self._run(case, program, fired, None)
        return all(ours.model == theirs.model for ours, theirs in zip(usual.states, again.states, strict=True))

    def _may_meet(self, run: _Run, event: Event) -> bool:
        """Asks the predicates of an event outside the step directly, which saves a run for each such event."""
        return any(all(_holds(algorithm, event, state) for algorithm in self.pair) for state in run.states)

    def _run_usual(self, case: Case, program: Program, fired: Event | None) -> _Run:
        about = (case, program, fired)
        if about not in self._usual:
            self._usual[about] = self._run(case, program, fired, None)
        return self._usual[about]

    def _run(self, case: Case, program: Program, fired: Event | None, swapped_at: Event | None) -> _Run:
        order, states, error = _Order(self.pair, swapped_at), [], None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what an algorithm warns of is for its own runs
                for state in _states(case.step(*self.pair, passes=[order], program=program), case, fired):
                    states.append(state)
        except Exception as failure:
            error = failure
        return _Run(tuple(states), frozenset(order.met), error)


def _states(step: Step, case: Case, fired: Event | None) -> Iterator[State]:
    """The state after `init` and after each step, with an event from outside the program fired each time.

    An empty program takes no steps.
    """
    state = step.init(case.state(dtype=torch.float64))
    for batch in [None, *(case.batches(torch.float64) if step.program else ())]:
        seen = state
        if batch is not None:
            seen = step.fold(state, batch)
            state = step.finish(seen)
        if fired is not None:
            seen = state = step.fire(fired, state)
        yield state if step.has_advance else seen  # an evaluation's result are the outputs, which `finish` drops


def _holds(algorithm: Algorithm, event: Event, state: State) -> bool:
    try:
        return bool(algorithm.predicate(event, state))
    except Exception:  # the step says so in its own words
        return True


def _is_enough(outcomes: Mapping[Case, _Outcome], max_tries: int) -> bool:
    """Whether to try no more cases: too many gave no answer, or the one that differs is simple enough."""
    first = next((i for i, outcome in enumerate(outcomes.values()) if outcome.broken is not None), None)
    return len(outcomes) >= max_tries if first is None else len(outcomes) - first > _MAX_SHRINKS
