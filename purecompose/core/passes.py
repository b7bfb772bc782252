"""Passes, which order the algorithms at an event; what one is, is said in `purecompose.passes`."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from purecompose._support.messages import warn
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.errors import MixedLossWarning, OrderError
from purecompose.time.event import Event


T = TypeVar("T")
Pass: TypeAlias = Callable[[Sequence[Algorithm], Event], Sequence[Algorithm]]
"""A function `(algorithms, event) -> algorithms`: the order in which those act that act at an event."""


def compose_passes(*passes: Pass) -> Pass:
    """Return one pass that applies these from left to right; without any, it is the identity.

    Args:
        *passes: Passes, in the order in which they are applied.

    Raises:
        TypeError: When the composed pass runs: a pass did not return a sequence of algorithms.

    Example:
        >>> from purecompose.core.algorithm import identity
        >>> both = compose_passes(set_filo_order, sort_fused_layernorm_last)
        >>> [algorithm.name for algorithm in both([identity("a"), identity("b")], Event.AFTER_LOSS)]
        ['b', 'a']
    """
    return lambda algorithms, event: functools.reduce(
        lambda current, one_pass: run_pass(one_pass, current, event), passes, tuple(algorithms)
    )


def run_pass(one_pass: Pass, algorithms: Sequence[Algorithm], event: Event) -> tuple[Algorithm, ...]:
    result: Any = one_pass(algorithms, event)
    if not isinstance(result, Sequence) or not all(isinstance(member, Algorithm) for member in result):
        raise TypeError(
            f"the pass {pass_name(one_pass)} must return a sequence of algorithms, got {type(result).__name__}"
            f"{' (is a return statement missing?)' if result is None else ''}"
        )
    return tuple(result)


def pass_name(one_pass: Pass) -> str:
    """Return the name of a pass, or its printed form if it has none."""
    return getattr(one_pass, "__name__", repr(one_pass))


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
    """Move the chosen items to the back; both halves keep their order. See `sort_to_front`.

    Args:
        items: Algorithms, or other items.
        chosen: A type, several types, or a function that is true for the items to move.

    Example:
        >>> sort_to_back([1, 2, 3, 4], lambda item: item % 2 == 1)
        [2, 4, 1, 3]
    """
    is_chosen = _chooser(chosen)
    return sorted(items, key=is_chosen)


def set_filo_order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Reverse the order on AFTER events, so that the first algorithm in is the last one out.

    AFTER events of evaluation and prediction are included; `*_END` events keep the order of the list.

    Args:
        algorithms: Those that act at the event, in the order of the list.
        event: The event.

    Example:
        >>> from purecompose.algorithms import ema, mixup
        >>> [set_filo_order([mixup(), ema()], event)[0].name for event in (Event.AFTER_LOSS, Event.BATCH_END)]
        ['ema', 'mixup']
    """
    return tuple(reversed(algorithms)) if event.is_reversed else tuple(algorithms)


def sort_selective_backprop_first(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put algorithms that select examples of the raw batch first, before others change the examples.

    Args:
        algorithms: Those that act at the event, in the order of the list.
        event: The event.

    Example:
        >>> from purecompose import algorithms as alg
        >>> methods = [alg.mixup(), alg.selective_backprop()]
        >>> [method.name for method in sort_selective_backprop_first(methods, Event.AFTER_DATALOADER)]
        ['selective_backprop', 'mixup']
    """
    del event
    return sort_to_front(algorithms, lambda algorithm: Trait.SELECTS_EXAMPLES in algorithm.traits)


def sort_fused_layernorm_last(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put algorithms that fuse layer norms last, so that they also fuse those that others insert.

    Args:
        algorithms: Those that act at the event, in the order of the list.
        event: The event.

    Example:
        >>> from purecompose import algorithms as alg
        >>> methods = [alg.fused_layernorm(), alg.alibi()]
        >>> [method.name for method in sort_fused_layernorm_last(methods, Event.INIT)]
        ['alibi', 'fused_layernorm']
    """
    del event
    return sort_to_back(algorithms, lambda algorithm: Trait.FUSES_LAYERNORM in algorithm.traits)


def sort_loss_scaling_innermost(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put algorithms that scale the loss last, and first at AFTER events: others see unscaled losses and gradients.

    Args:
        algorithms: Those that act at the event, in the order of the list.
        event: The event.

    Example:
        >>> from purecompose import algorithms as alg
        >>> methods = [alg.loss_scaling(), alg.skip_nonfinite()]
        >>> [method.name for method in sort_loss_scaling_innermost(methods, Event.BEFORE_BACKWARD)]
        ['skip_nonfinite', 'loss_scaling']
    """
    sort = sort_to_front if event.is_reversed else sort_to_back
    return sort(algorithms, lambda algorithm: Trait.SCALES_LOSS in algorithm.traits)


def sort_gradients_by_trait(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Put what computes gradients again first, and what collects or clips them last, of those that act after them.

    Args:
        algorithms: Those that act at the event, in the order of the list.
        event: The event.

    Example:
        >>> from purecompose import algorithms as alg
        >>> methods = [alg.gradient_clipping("norm", 1.0), alg.sam()]
        >>> [method.name for method in sort_gradients_by_trait(methods, Event.AFTER_TRAIN_BATCH)]
        ['sam', 'gradient_clipping']
    """
    if event not in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH):
        return algorithms
    renewed = sort_to_front(algorithms, lambda algorithm: Trait.RENEWS_GRADIENTS in algorithm.traits)
    collected = sort_to_back(renewed, lambda algorithm: Trait.COLLECTS_GRADIENTS in algorithm.traits)
    return sort_to_back(collected, lambda algorithm: Trait.CLIPS_GRADIENTS in algorithm.traits)


def order_by_constraints(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Apply `runs_before` and `runs_after`; otherwise keep the given order as far as possible.

    Args:
        algorithms: Those that act at the event, in the order of the list.
        event: The event.

    Raises:
        OrderError: The constraints form a cycle, which the message prints.

    Example:
        >>> from purecompose.core.algorithm import identity
        >>> import dataclasses
        >>> last = dataclasses.replace(identity("last"), runs_after=("first",))
        >>> [algorithm.name for algorithm in order_by_constraints([last, identity("first")], Event.INIT)]
        ['first', 'last']
    """
    remaining = list(algorithms)  # compared by identity: an algorithm that a pass adds may equal another one
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
    """Warn if several algorithms each replace the loss value, which cannot be combined.

    MixUp, CutMix and label smoothing do not: they act on the targets and compose exactly.

    Args:
        algorithms: Those that act at the event, in the order of the list.
        event: The event.
    """
    editors = [algorithm.name for algorithm in algorithms if Trait.EDITS_LOSS in algorithm.traits]
    if len(editors) > 1:
        warn(
            f"{', '.join(editors)} each replace the loss at {event}; the later ones undo the earlier ones",
            MixedLossWarning,
        )
    return algorithms


DEFAULT_PASSES: tuple[Pass, ...] = (
    set_filo_order,
    sort_gradients_by_trait,
    sort_loss_scaling_innermost,
    sort_selective_backprop_first,
    sort_fused_layernorm_last,
    order_by_constraints,
    warn_if_multiple_loss_interpolation,
)
"""The passes of `compose` unless others are given, from first to last."""


def precedes(early: Algorithm, late: Algorithm) -> bool:
    """Return whether a constraint requires `early` to come before `late`."""
    return _refers(early.runs_before, late) or _refers(late.runs_after, early)


def _refers(references: tuple[str | Trait, ...], algorithm: Algorithm) -> bool:
    return not algorithm.names.union(algorithm.traits).isdisjoint(references)


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
