"""Passes: pure functions `(algorithms, event) -> algorithms` that order what acts at an event.

A pass sees the algorithms that matched at one event, in the order they were listed, and may reorder, drop or
add. Passes know algorithms by traits and names, never by import. The default order first reverses on the
AFTER events, and then sets pins and constraints, which therefore always hold.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from purecompose.core.algorithm import Algorithm, Trait
from purecompose.time.event import Event


__all__ = [
    "DEFAULT_PASSES",
    "MixedLossWarning",
    "OrderError",
    "Pass",
    "compose_passes",
    "order_by_constraints",
    "set_filo_order",
    "sort_fused_layernorm_last",
    "sort_loss_scaling_innermost",
    "sort_selective_backprop_first",
    "sort_to_back",
    "sort_to_front",
    "warn_if_multiple_loss_interpolation",
]

T = TypeVar("T")
Pass: TypeAlias = Callable[[Sequence[Algorithm], Event], Sequence[Algorithm]]


class OrderError(ValueError):
    """Constraints that contradict each other."""


class MixedLossWarning(UserWarning):
    """Two algorithms that each replace the loss, so that the second undoes the first."""


def compose_passes(*passes: Pass) -> Pass:
    """Return one pass that applies these from left to right; without any, it is the identity.

    Raises (when the composed pass runs):
        TypeError: A pass returned something else than a sequence of algorithms.
    """
    return lambda algorithms, event: functools.reduce(
        lambda current, one_pass: run_pass(one_pass, current, event), passes, tuple(algorithms)
    )


def run_pass(one_pass: Pass, algorithms: Sequence[Algorithm], event: Event) -> tuple[Algorithm, ...]:
    """Apply one pass and checks what it returned."""
    result: Any = one_pass(algorithms, event)
    if not isinstance(result, Sequence) or not all(isinstance(member, Algorithm) for member in result):
        raise TypeError(
            f"the pass {_name(one_pass)} must return a sequence of algorithms, got {type(result).__name__}"
            f"{' (is a return statement missing?)' if result is None else ''}"
        )
    return tuple(result)


def sort_to_front(items: Iterable[T], chosen: type | tuple[type, ...] | Callable[[T], bool]) -> list[T]:
    """Move the chosen items to the front; both halves keep their order.

    Args:
        items: Anything iterable.
        chosen: A type (or a tuple of types), or a predicate.

    Example:
        >>> sort_to_front([1, "a", "c", 2, 3.0], int)
        [1, 2, 'a', 'c', 3.0]
    """
    is_chosen = _chooser(chosen)
    return sorted(items, key=lambda item: not is_chosen(item))


def sort_to_back(items: Iterable[T], chosen: type | tuple[type, ...] | Callable[[T], bool]) -> list[T]:
    """Move the chosen items to the back; both halves keep their order. See `sort_to_front`."""
    is_chosen = _chooser(chosen)
    return sorted(items, key=is_chosen)


def set_filo_order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Reverse the order on AFTER events, so that the first algorithm in is the last one out.

    Evaluation's and prediction's AFTER events count; `*_END` events keep the order of the list.
    """
    return tuple(reversed(algorithms)) if event.is_reversed else tuple(algorithms)


def sort_selective_backprop_first(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put what selects examples of the raw batch first: it must see them before others change them."""
    del event
    return sort_to_front(algorithms, lambda algorithm: Trait.SELECTS_EXAMPLES in algorithm.traits)


def sort_fused_layernorm_last(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put what fuses layer norms last: it must see those that others put in."""
    del event
    return sort_to_back(algorithms, lambda algorithm: Trait.FUSES_LAYERNORM in algorithm.traits)


def sort_loss_scaling_innermost(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put what scales the loss last, and first on AFTER events: others see true losses and gradients."""
    sort = sort_to_front if event.is_reversed else sort_to_back
    return sort(algorithms, lambda algorithm: Trait.SCALES_LOSS in algorithm.traits)


def order_by_constraints(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Honour `runs_before` and `runs_after`; otherwise the order stays as near as possible to what it was.

    Raises:
        OrderError: The constraints form a cycle, which the message prints.
    """
    remaining = list(algorithms)  # distinguished by identity: what a pass adds may equal what is there
    earlier = {
        id(late): [early for early in algorithms if early is not late and precedes(early, late)] for late in algorithms
    }
    ordered: list[Algorithm] = []
    placed: set[int] = set()
    while remaining:
        ready = (i for i, a in enumerate(remaining) if all(id(e) in placed for e in earlier[id(a)]))
        first = next(ready, None)
        if first is None:
            raise OrderError(f"no order at {event} satisfies all constraints: {_cycle(remaining, earlier)}")
        placed.add(id(remaining[first]))
        ordered.append(remaining.pop(first))
    return ordered


def warn_if_multiple_loss_interpolation(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Warn of algorithms that cannot be mixed: several that each put a loss value of their own in place.

    MixUp, CutMix and label smoothing are not among them: they act on the targets and compose exactly.
    """
    editors = [algorithm.name for algorithm in algorithms if Trait.EDITS_LOSS in algorithm.traits]
    if len(editors) > 1:
        warnings.warn(
            f"{', '.join(editors)} each replace the loss at {event}; the later ones undo the earlier ones",
            MixedLossWarning,
            stacklevel=2,
        )
    return algorithms


DEFAULT_PASSES: tuple[Pass, ...] = (
    set_filo_order,
    sort_loss_scaling_innermost,
    sort_selective_backprop_first,
    sort_fused_layernorm_last,
    order_by_constraints,
    warn_if_multiple_loss_interpolation,
)


def precedes(early: Algorithm, late: Algorithm) -> bool:
    """Return whether a constraint says that the one must come before the other."""
    return _refers(early.runs_before, late) or _refers(late.runs_after, early)


def _refers(references: tuple[str | Trait, ...], algorithm: Algorithm) -> bool:
    return algorithm.name in references or any(trait in references for trait in algorithm.traits)


def _cycle(stuck: list[Algorithm], earlier: dict[int, list[Algorithm]]) -> str:
    """Follow constraints backwards until an algorithm comes up twice."""
    among = {id(algorithm) for algorithm in stuck}
    path = [stuck[0]]
    while True:
        before = next(e for e in earlier[id(path[-1])] if id(e) in among)
        if any(before is seen for seen in path):
            start = next(i for i, seen in enumerate(path) if seen is before)
            loop = [before, *reversed(path[start:])]
            return " before ".join(algorithm.name for algorithm in loop)
        path.append(before)


def _chooser(chosen: Any) -> Callable[[Any], bool]:
    if isinstance(chosen, (type, tuple)):
        return lambda item: isinstance(item, chosen)
    return lambda item: bool(chosen(item))


def _name(one_pass: Pass) -> str:
    return getattr(one_pass, "__name__", repr(one_pass))
