"""What a mutant is, the decorator that makes one of a mistake, and what many mistakes do."""

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
    """An algorithm that is wrong on purpose, and the law that must find it out; called, it makes the algorithm.

    Args:
        make: Makes the algorithm; its docstring says what is wrong and how it comes about.
        breaks: The law's name.
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
        """The text that makes it again, for `Subject.of`."""
        return f"{self.make.__module__}:{self.make.__name__}"


def mutant(
    breaks: str, *, at: Event | tuple[Event, ...] | Predicate | None = None, task: str = "vectors"
) -> Callable[[Callable[..., Any]], Mutant]:
    """Makes a mutant of the function below it, which gives the algorithm its name.

    With `at`, the function is the mistake itself, `change(state)` or `change(event, state)`; or, without arguments,
    it makes such a function again for each algorithm, which then may remember in a closure. Without `at` it makes
    the whole algorithm.

    Args:
        breaks: The name of the law that finds it out.
        at: Where it acts: an event, several, or a predicate.
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

    @functools.wraps(change)  # whose file an error is looked for in
    def apply(event: Event, state: State) -> State:
        del event
        return change(state)

    return apply


def _arity(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)


def scaled(by_name: Mapping[str, Tensor] | None, factor: Any) -> dict[str, Tensor]:
    """The tensors times a number."""
    return {name: tensor * factor for name, tensor in (by_name or {}).items()}


def scaled_params(state: State, factor: Any) -> State:
    """The state with its params times a number."""
    return state.replace(params=scaled(state.params, factor))


def scaled_grads(state: State, factor: Any) -> State:
    """The state with its gradients times a number."""
    return state.replace(grads=scaled(state.grads, factor))


def with_slot(state: State, name: str, slot: Any) -> State:
    """The state with a slot of that name."""
    return state.replace(slots={**state.slots, name: slot})
