"""The class of mutants, the decorator that makes one from a mistake, and helpers that many mistakes use."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import Predicate, on


__all__ = ["Mutant", "mutant", "scaled", "scaled_grads", "scaled_params", "with_slot"]


@dataclass(frozen=True)
class Mutant:
    """An algorithm that is wrong on purpose, and the law that must detect it; calling it makes the algorithm.

    Args:
        make: Factory of the algorithm; its docstring describes the mistake and its cause.
        breaks: Name of the law.
        task: The name of a task on which it can be seen.
    """

    make: Callable[[], Algorithm]
    breaks: str
    task: str = "vectors"

    def __call__(self) -> Algorithm:
        return self.make()

    @property
    def name(self) -> str:
        """The factory's name."""
        return self.make.__name__

    @property
    def source(self) -> str:
        """The source text that rebuilds it, for `Subject.of`."""
        return f"{self.make.__module__}:{self.make.__name__}"


def mutant(
    breaks: str, *, at: Event | tuple[Event, ...] | Predicate | None = None, task: str = "vectors"
) -> Callable[[Callable[..., Any]], Mutant]:
    """Make a mutant of the decorated function, which gives the algorithm its name.

    With `at`, the function is the mistake itself, `change(state)` or `change(event, state)`; or, without arguments,
    it makes such a function again for each algorithm, which then may remember in a closure. Without `at` it makes
    the whole algorithm.

    Args:
        breaks: Name of the law that detects it.
        at: Event, events or predicate at which it acts.
        task: The name of a task on which it can be seen.

    Example:
        >>> @mutant("input_untouched", at=Event.BATCH_END)
        ... def clears_metrics(state):
        ...     "Clears the metrics of the state that it was given."
        ...     state.metrics.clear()
        ...     return state
        >>> clears_metrics.name, clears_metrics().predicate
        ('clears_metrics', on(BATCH_END))
    """

    def decorate(mistake: Callable[..., Any]) -> Mutant:
        return Mutant(mistake if at is None else _factory(mistake, at), breaks, task)

    return decorate


def _factory(mistake: Callable[..., Any], at: Event | tuple[Event, ...] | Predicate) -> Callable[[], Algorithm]:
    match = at if isinstance(at, Predicate) else on(*((at,) if isinstance(at, Event) else at))

    def make() -> Algorithm:
        return Algorithm(mistake.__name__, match, _apply(mistake if _arity(mistake) else mistake()))

    make.__module__, make.__name__, make.__doc__ = mistake.__module__, mistake.__name__, mistake.__doc__
    return make


def _apply(change: Callable[..., State]) -> Callable[[Event, State], State]:
    if _arity(change) == 2:
        return change

    @functools.wraps(change)  # errors are located by this function's file
    def apply(event: Event, state: State) -> State:
        del event
        return change(state)

    return apply


def _arity(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)


def scaled(by_name: Mapping[str, Tensor] | None, factor: Any) -> dict[str, Tensor]:
    """Return the tensors times a number."""
    return {name: tensor * factor for name, tensor in (by_name or {}).items()}


def scaled_params(state: State, factor: Any) -> State:
    """Return the state with its params times a number."""
    return state.replace(params=scaled(state.params, factor))


def scaled_grads(state: State, factor: Any) -> State:
    """Return the state with its gradients times a number."""
    return state.replace(grads=scaled(state.grads, factor))


def with_slot(state: State, name: str, slot: Any) -> State:
    """Return the state with a slot of that name."""
    return state.replace(slots={**state.slots, name: slot})
