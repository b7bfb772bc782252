"""Methods made of methods: one that acts with a probability, one of several, in a part of the run, or in turn."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from purecompose import random
from purecompose._support.specs import shown
from purecompose.algorithms._parts import Point, checked_period, selected
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.application import applied
from purecompose.core.loop import loop_events
from purecompose.core.operation import walk
from purecompose.core.passes import DEFAULT_PASSES, compose_passes
from purecompose.core.state import State
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within
from purecompose.time import Time, predicates
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, Moment, Predicate, on


STEP_EVENTS: tuple[Event, ...] = tuple(node for node in walk(loop_events) if isinstance(node, Event))
"""The events of a training step. Others, such as INIT and EVAL_START, are not affected by a choice."""

_OUTSIDE = on(*[event for event in Event if event not in STEP_EVENTS])


def _method(value: Any, where: str) -> Algorithm:
    if isinstance(value, Algorithm):
        return value
    hint = f"; write {where}(a, b), without a list" if isinstance(value, list | tuple) else ""
    raise TypeError(f"{where}: expected a method, such as alg.mixup(0.2), got {shown(value)}{hint}")


Method = Annotated[Algorithm, _method]


@factory
def sometimes(
    method: Method,
    p: Annotated[Scalar, Within(0, 1, hint="it is a probability")] = 0.5,
    *,
    per_example: bool = False,
    host: bool = False,
) -> Algorithm:
    """Let a method act with a probability, decided by batch or by example.

    The decision is drawn from the state's key, once for all events of a step, or for each turn of an event that a
    program has several times. Other events, such as INIT and EVAL_START, are not affected.

    The method is computed in every batch, and its result is chosen or not, element by element, so that a compiled step
    has a single variant, and members of a population decide for themselves. Targets that are not mixed become a
    `Mixture` in which the partners have weight 0. With `host`, the method runs only in the batches that are chosen, and
    may change shapes; a compiled step then runs it between two compiled parts.

    Events: those of the method. Its name, slots and draws are those of the method, so that constraints on its order
    hold. Reports `name/chosen`: 1 or 0, or the share of the examples.

    Args:
        method: The method. It must act in training steps, not only at INIT.
        p: The probability, in [0, 1]; an `hparam` or a schedule may be given, and no gradient flows to it.
        per_example: Decide for each example, (N,); the method must change single examples of the batch, along their
            first dimension, and nothing else.
        host: Decide on the host; always so for a method that acts there.

    Raises:
        TypeError, ValueError: A setting is of the wrong kind, or the method does not act in training steps. In the
            step: with `per_example`, the method changes more than the batch.
        FormError: In the step: the method changes shapes or structure.

    Example:
        >>> from purecompose.algorithms import mixup
        >>> sometimes(mixup(0.2), 0.5)
        sometimes(mixup(alpha=0.2, interpolate_loss=False, per_example=False), p=0.5, per_example=False, host=False)
    """
    _check_acts(method, "sometimes")
    host = host or method.host
    if per_example and host:
        raise ValueError(f"sometimes: per_example=True: expected a method that acts on the device, got {method!r}")

    label = "chosen" if _num_choices(method) == 0 else f"chosen.{_num_choices(method) + 1}"

    def choose(state: State) -> list[Tensor]:
        rng, shape = _source(state, f"{method.name}.{label}", per_example)
        return [random.bernoulli(rng, state.scalar(p), shape or None)]

    return _choice(method.name, (method,), choose, (label,), is_host=host)


@factory
def one_of(
    *methods: Algorithm,
    weights: Sequence[float] | None = None,
    per_example: bool = False,
    host: bool = False,
    name: str | None = None,
) -> Algorithm:
    """Let one of several methods act, drawn for each batch or for each example.

    All are computed from the same state, and one result is chosen, element by element; see `sometimes`, also for the
    settings. `one_of(mixup(), cutmix())` is the usual choice for images. The identity is a method, too:
    `one_of(mixup(), cutmix(), pc.identity())`.

    Events: those of the methods, whose slots and draws keep their names. Reports `name/METHOD` for each method: 1 or 0,
    or the share of the examples.

    Args:
        *methods: At least two methods with different names, which act in training steps.
        weights: Numbers proportional to the probabilities, at least 0 and not all 0; by default all are equal.
        per_example: Choose for each example, (N,).
        host: Choose on the host, and run the chosen method only; always so if one of them acts there.
        name: Name of the method; by default the names, as in "mixup_or_cutmix".

    Raises:
        TypeError, ValueError: As `sometimes`; or two of the methods act at the same event, but not in the same batches:
            let the result act in a part of the run.

    Example:
        >>> from purecompose.algorithms import cutmix, mixup
        >>> one_of(mixup(0.2), cutmix(1.0), weights=(1, 3)).name
        'mixup_or_cutmix'
    """
    parts, shares = _several(methods, "one_of"), _shares(weights, len(methods))
    name = "_or_".join(part.name for part in parts) if name is None else name
    host = host or any(part.host for part in parts)
    if not any(_acts(part) for part in parts):
        raise ValueError(f"one_of: expected methods that act in training steps, got {', '.join(map(repr, parts))}")
    if per_example and host:
        raise ValueError("one_of: per_example=True: expected methods that act on the device")
    ends = [sum(shares[: i + 1]) for i in range(len(shares))]
    ends[-1] = 1.0

    def choose(state: State) -> list[Tensor]:
        rng, shape = _source(state, f"{name}.choice", per_example)
        drawn = random.uniform(rng, shape, dtype=torch.float64)
        below = [drawn < end for end in ends]
        return [below[0], *[now & ~before for before, now in zip(below, below[1:], strict=False)]]

    return _choice(name, parts, choose, tuple(part.name for part in parts), is_host=host)


@factory
def chain(*methods: Algorithm, name: str | None = None) -> Algorithm:
    """Join methods to one that applies them in their order.

    The order is that of a step with the list of these methods: at AFTER events it is the opposite one, and constraints
    of the methods, such as clipping gradients after they are accumulated, come first. A chain is meant as a part of
    `sometimes` and `one_of`.

    Args:
        *methods: At least two methods with different names.
        name: Name of the method; by default the names, as in "cutout_then_mixup".

    Example:
        >>> from purecompose.algorithms import cutmix, cutout, mixup
        >>> one_of(chain(cutout(), mixup()), cutmix()).name
        'cutout_then_mixup_or_cutmix'
    """
    parts = _several(methods, "chain")
    acting = {event: _acting(parts, event) for event in Event}

    def apply(event: Event, state: State) -> State:
        for part in acting[event]:
            state, _ = applied(part, event, state)
        return state

    name = "_then_".join(part.name for part in parts) if name is None else name
    return _joined(
        name, parts, _Together(tuple(part.predicate for part in parts)), apply, is_host=any(part.host for part in parts)
    )


@factory
def during(method: Method, start: Point = 0.0, end: Point | None = None) -> Algorithm:
    """Let a method act in a part of the run, from `start` up to `end`.

    Events outside of training steps, such as INIT and EVAL_START, are not affected.

    Args:
        method: The method, whose events in a step are all before the time advances, or all after it.
        start, end: Points of the run, of which the first is included and the last is not: fractions in [0, 1], or times
            such as "10ep". By default there is no end.

    Raises:
        TypeError, ValueError: A point is not one, `end` is before `start`, or the method acts both before and after the
            time advances, as `loss_scaling` does, whose halves would act in different batches.

    Example:
        >>> from purecompose.algorithms import cutmix
        >>> during(cutmix(), "1ep", "5ep").match.at(Event.AFTER_DATALOADER)
        after('1ep') & before('5ep')
    """
    _check_acts(method, "during")
    sides = {event.sees_new_time for event in STEP_EVENTS if _acts_at(method, event)}
    if len(sides) > 1:
        raise ValueError(
            f"during: {method.name} acts before and after the time advances, and the two halves belong together: "
            "expected a method with events on one side; use its own settings"
        )
    return _narrowed(method, predicates.during(start, end, is_batch_later=sides == {True}), "during")


@factory
def every(method: Method, n: Annotated[int | Time | str, checked_period], *, since: Point | None = None) -> Algorithm:
    """Let a method act in every n-th batch, counted from 1.

    Events outside of training steps, such as INIT and EVAL_START, are not affected.

    Args:
        method: The method.
        n: A number of batches, or a time in batches, epochs or a share of the run: the method acts in the n-th batch,
            the 2n-th, and so on.
        since: A point of the run from which to count; see `purecompose.every`.

    Raises:
        TypeError, ValueError: `n` is not a positive interval, or the method does not act in training steps.

    Example:
        >>> from purecompose.algorithms import mixup
        >>> every(mixup(), 10).match.at(Event.AFTER_DATALOADER)
        every('10ba')
    """
    _check_acts(method, "every")
    return _narrowed(method, predicates.every(n, since=since), "every")


def named(method: Algorithm, name: str) -> Algorithm:
    """Return a method with another name, so that a step can have it twice.

    Args:
        method: A method made by a factory that takes a name, as all of `purecompose.algorithms` do. Methods inside of
            it are renamed with it.
        name: The name, also of its slot, draws and metrics; unique in a step.

    Raises:
        TypeError: The method was not made by such a factory.

    Example:
        >>> from purecompose.algorithms import ema
        >>> named(ema("10ba"), "short").name
        'short'
    """
    call = _method(method, "named: method")._made_by  # pyright: ignore[reportPrivateUsage]
    signature = None if call is None else inspect.signature(call.factory)
    if call is not None and signature is not None:
        bound = signature.bind(*call.args, **call.kwargs)
        if "name" in signature.parameters:
            bound.arguments["name"] = name
            if method.parts:
                bound.arguments["methods"] = tuple(named(part, f"{name}.{part.name}") for part in method.parts)
            return call.factory(*bound.args, **bound.kwargs)
        if "method" in signature.parameters:
            bound.arguments["method"] = named(bound.arguments["method"], name)
            return call.factory(*bound.args, **bound.kwargs)
    raise TypeError(
        f"named: {method.name}: expected a method whose factory takes a name, because slots and draws are found by it; "
        "decorate a function with the argument `name` with purecompose.factory"
    )


COMBINED: dict[str, Callable[..., Algorithm]] = {
    made.__name__: made for made in (sometimes, one_of, chain, during, every, named)
}
"""Functions that make methods of methods, by their names."""


@dataclass(frozen=True, repr=False)
class _Together(Predicate):
    """True where one of several is; at each event those that can be true are equal."""

    parts: tuple[Predicate, ...]

    @property
    def is_timed(self) -> bool:
        return all(part.is_timed for part in self.parts)

    def __call__(self, event: Event, state: Moment) -> bool:
        return any(part(event, state) for part in self.parts)

    def at(self, event: Event) -> Predicate:
        return next((answer for part in self.parts if (answer := part.at(event)) != NEVER), NEVER)

    def __repr__(self) -> str:
        return " | ".join(repr(part) for part in self.parts)


def _acts_at(method: Algorithm, event: Event) -> bool:
    return method.predicate.at(event) != NEVER


_ORDER = compose_passes(*DEFAULT_PASSES)


def _acting(parts: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Return the methods that act at an event, in the order of a step."""
    return _ORDER([part for part in parts if _acts_at(part, event)], event)


def _acts(method: Algorithm) -> bool:
    return any(_acts_at(method, event) for event in STEP_EVENTS)


def _check_acts(method: Algorithm, where: str) -> None:
    if not _acts(method) and method.predicate != NEVER:
        events = ", ".join(event.name for event in method.events)
        raise ValueError(f"{where}: expected a method that acts in training steps, got {method!r}, for {events}")


def _several(methods: Sequence[Algorithm], where: str) -> tuple[Algorithm, ...]:
    parts = tuple(_method(method, where) for method in methods)
    if len(parts) < 2:
        raise ValueError(f"{where}: expected at least two methods, got {len(parts)}")
    names = [name for part in parts for name in part.names]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{where}: two methods are called {twice!r}: rename one, named(method, 'other')")
    for event in Event:
        found = [part for part in parts if _acts_at(part, event)]
        for other in found[1:]:
            if other.predicate.at(event) != found[0].predicate.at(event):
                raise ValueError(
                    f"{where}: at {event}, {other.name} and {found[0].name} act in different batches "
                    f"({other.predicate.at(event)!r} and {found[0].predicate.at(event)!r}): expected methods that act "
                    f"in the same; let the result act in a part of the run, as in during({where}(...), 0.5)"
                )
    return parts


def _shares(weights: Sequence[float] | None, num: int) -> list[float]:
    given = [1.0] * num if weights is None else list(weights)
    check = Within(0).number
    given = [float(check(weight, "one_of: weights")) for weight in given]
    if len(given) != num or not sum(given):
        raise ValueError(f"one_of: weights={weights!r}: expected {num} numbers, one for each method, and not only 0")
    return [weight / sum(given) for weight in given]


def _num_choices(method: Algorithm) -> int:
    """Return how many choices by `sometimes` lie within each other in a method, so that each draws by itself."""
    if len(method.parts) != 1:
        return 0
    made = method._made_by  # pyright: ignore[reportPrivateUsage]
    return _num_choices(method.parts[0]) + (made is not None and made.factory is sometimes)


def _source(state: State, name: str, per_example: bool) -> tuple[random.Rng, tuple[int, ...]]:
    """Return the generator of a choice and its shape: () for the batch, (N,) for examples."""
    if not per_example:
        return state.rng(name), ()
    context = state.context
    if context.batch_dim or context.splitter is not None:
        raise ValueError(
            f"{name}: per_example=True: expected batches whose examples lie along the first dimension, not with "
            f"batch_dim={context.batch_dim} or a splitter"
        )
    return state.example_rng(name), (state.num_examples,)


def _narrowed(method: Algorithm, within: Predicate, where: str) -> Algorithm:
    if Trait.COLLECTS_GRADIENTS in method.traits:
        raise ValueError(
            f"{where}: {method.name} keeps gradients for later batches, in which it would not act: leave it out"
        )
    return _joined(method.name, (method,), method.predicate & (within | _OUTSIDE), method.apply, is_host=method.host)


def _joined(
    name: str, parts: tuple[Algorithm, ...], match: Predicate, apply: Callable[..., Any], *, is_host: bool
) -> Algorithm:
    """Return an algorithm with the traits and constraints of its parts, except constraints among themselves."""
    inner = {inner for part in parts for inner in part.names}
    before, after = (
        tuple(dict.fromkeys(one for part in parts for one in getattr(part, field) if one not in inner))
        for field in ("runs_before", "runs_after")
    )
    return Algorithm(
        name,
        match,
        apply,
        traits=frozenset().union(*[part.traits for part in parts]),
        runs_before=before,
        runs_after=after,
        host=is_host,
        reported={key: value for part in parts for key, value in part.reported.items()},
        parts=parts,
        batches_per_update=max((part.batches_per_update for part in parts), default=1),
    )


def _choice(
    name: str,
    parts: tuple[Algorithm, ...],
    choose: Callable[[State], list[Tensor]],
    labels: tuple[str, ...],
    *,
    is_host: bool,
) -> Algorithm:
    """Return an algorithm that applies the part for which `choose`, a bool for each, 0-d or (N,), is true."""

    outside = {event: _acting(parts, event) for event in Event if event not in STEP_EVENTS}

    def apply(event: Event, state: State) -> State:
        if event in outside:
            for part in outside[event]:
                state, _ = applied(part, event, state)
            return state
        acting = [part for part in parts if _acts_at(part, event)]
        masks = choose(state)
        if is_host:
            chosen = next((part for part, mask in zip(parts, masks, strict=True) if bool(mask)), None)
            end = applied(chosen, event, state)[0] if chosen in acting else state
        else:
            results, state = _results(acting, event, state)
            end = selected(name, masks, [results.get(part.name, state) for part in parts], state)
        shares = {f"{name}/{label}": mask.float().mean() for label, mask in zip(labels, masks, strict=True)}
        return end.replace(metrics={**end.metrics, **shares})

    return _joined(name, parts, _Together(tuple(part.predicate for part in parts)), apply, is_host=is_host)


def _results(acting: Sequence[Algorithm], event: Event, state: State) -> tuple[dict[str, State], State]:
    """Return the state after each method, by its name, and the state to which they were applied.

    A method that drops a slot puts the batch back that it has kept there, whether it is chosen or not, before others.
    """
    results: dict[str, State] = {}
    for part in acting:
        after, _ = applied(part, event, state)
        if state.slots.keys() <= after.slots.keys():
            results[part.name] = after
        else:
            state = state.replace(batch=after.batch)
            earlier = [one for one in acting if one.name in results]
            results = {**{one.name: applied(one, event, state)[0] for one in earlier}, part.name: after}
    return results, state
