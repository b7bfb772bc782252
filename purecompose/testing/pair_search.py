"""The runs behind `commutes`: a generated case in both orders of a pair."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from hypothesis.strategies import SearchStrategy

from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.loop import eval_events, loop_events, predict_events
from purecompose.core.operation import walk
from purecompose.core.passes import (
    compose_passes,
    order_by_constraints,
    set_filo_order,
    sort_fused_layernorm_last,
    sort_gradients_by_trait,
    sort_selective_backprop_first,
)
from purecompose.core.program import Program
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken
from purecompose.testing.record import LASTING, STEP_FIELDS, compare
from purecompose.testing.strategies import cases
from purecompose.testing.tasks import Task
from purecompose.time.event import Event
from purecompose.time.predicates import on


class NoAnswer(Exception):
    """Raised for a case without an answer; its cause is the error of the usual order, if there was one."""


class _Run(NamedTuple):
    """A run of a case: its states, the events at which the pair met, and the error that ended it."""

    states: tuple[State, ...]
    met: frozenset[Event]
    error: Exception | None


class _Order:
    """The only pass of a run: it records where the pair meets, and sets the order of the two in their places."""

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
    set_filo_order,
    sort_gradients_by_trait,
    sort_selective_backprop_first,
    sort_fused_layernorm_last,
    order_by_constraints,
)
_LOOP = frozenset(node for node in walk(loop_events) if isinstance(node, Event))


class Pair:
    """Two algorithms that are run in both orders."""

    def __init__(self, a: Algorithm, b: Algorithm, tolerance: float) -> None:
        # Sorted by name, so that the result does not depend on which one is named first.
        self.algorithms = sorted((a, b), key=lambda algorithm: algorithm.name)
        self.tolerance = tolerance
        # A run in the pair's usual order is used for all events of a program.
        self._usual: dict[tuple[Case, Program, Event | None], _Run] = {}

    def cases(self, event: Event, tasks: Sequence[Task]) -> SearchStrategy[Case]:
        """Return a strategy for cases; most begin where both act, as far as that follows from their predicates."""
        a, b = self.algorithms
        both = dataclasses.replace(a, match=on(event) & a.predicate & b.predicate)
        return cases(tasks, algorithm=both if event in _LOOP else None)

    def difference(self, case: Case, event: Event) -> Broken | None:
        """Return the difference that the order at an event makes in a case."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the algorithms do not matter here
            is_alike = event is Event.INIT and self._starts_alike(case)
            return None if is_alike else self._difference(case, event)

    def _starts_alike(self, case: Case) -> bool:
        """Return whether both orders at INIT leave the same bits, so that the costlier rest can be skipped."""
        orders = [_Order(self.algorithms, swapped_at) for swapped_at in (None, Event.INIT)]
        steps = [case.step(*self.algorithms, passes=[order]) for order in orders]
        try:
            ours, theirs = (step.init(case.state(dtype=torch.float64)) for step in steps)
            compare(ours, theirs, ("", ""))
        except Exception:  # the whole run provides more information
            return False
        return Event.INIT in orders[0].met and ours.context == theirs.context

    def _difference(self, case: Case, event: Event) -> Broken | None:
        program = next((p for p in (eval_events, predict_events) if event in p), loop_events)
        fired = event if event not in (*_LOOP, Event.INIT) and program is loop_events else None
        usual = self._run_usual(case, program, fired)
        if event not in usual.met:
            raise NoAnswer from usual.error
        swapped = self._run(case, program, fired, event)
        if usual.error is not None and swapped.error is not None:
            raise NoAnswer from usual.error
        try:
            self._compare(usual, swapped, event, LASTING if program is loop_events else STEP_FIELDS)
        except Broken as broken:
            if broken.path == "model" and not self._makes_one_model(usual, case, program, fired):
                raise NoAnswer from None
            return broken
        return None

    def _compare(self, usual: _Run, swapped: _Run, event: Event, fields: Sequence[str]) -> None:
        one, other = (algorithm.name for algorithm in _DEFAULT_ORDER(self.algorithms, event))
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
        """Return whether two runs have equal models; a model with a new function object never equals another."""
        again = self._run(case, program, fired, None)
        return all(ours.model == theirs.model for ours, theirs in zip(usual.states, again.states, strict=True))

    def _run_usual(self, case: Case, program: Program, fired: Event | None) -> _Run:
        about = (case, program, fired)
        if about not in self._usual:
            self._usual[about] = self._run(case, program, fired, None)
        return self._usual[about]

    def _run(self, case: Case, program: Program, fired: Event | None, swapped_at: Event | None) -> _Run:
        order, states, error = _Order(self.algorithms, swapped_at), [], None
        try:
            for state in _states(case.step(*self.algorithms, passes=[order], program=program), case, fired):
                states.append(state)
        except Exception as failure:
            error = failure
        return _Run(tuple(states), frozenset(order.met), error)


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
