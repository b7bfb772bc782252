"""Predicates and their combination: `&`, `|`, `~`, constants, and plain functions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from purecompose.time.event import Event
from purecompose.time.timestamp import Timestamp


class Predicate:
    """The base class of predicates, with the operators and conservative defaults of the other methods."""

    @property
    def is_timed(self) -> bool:
        """True if it reads only the event and `state.timestamp`, and nothing else of the state."""
        return False

    def __call__(self, event: Event, state: Any) -> bool:
        """Return whether the predicate is true at this event, for a state (any object with a `timestamp`)."""
        raise NotImplementedError

    def at(self, event: Event) -> "Predicate":
        """Return the predicate simplified for a known event."""
        del event
        return self

    def during(self, timestamp: Timestamp) -> "tuple[Predicate, float]":
        """Return the predicate simplified from `timestamp` on, and the batch count at which this ends.

        The simplified predicate agrees with this one at every timestamp of the same run and epoch whose
        `batch` is at least `timestamp.batch` and below the second result. It is `ALWAYS` or `NEVER` if the predicate
        cannot change in that stretch.
        """
        del timestamp
        return self, math.inf

    def negated_words(self) -> str:
        """Return the text of the negation."""
        return f"~{self!r}"

    def __and__(self, other: "Predicate | Callable[[Event, Any], bool]") -> "Predicate":
        return _both(self, as_predicate(other))

    def __rand__(self, other: Callable[[Event, Any], bool]) -> "Predicate":
        return _both(as_predicate(other), self)

    def __or__(self, other: "Predicate | Callable[[Event, Any], bool]") -> "Predicate":
        return ~(~self & ~as_predicate(other))

    def __ror__(self, other: Callable[[Event, Any], bool]) -> "Predicate":
        return as_predicate(other) | self

    def __invert__(self) -> "Predicate":
        return _Not(self)


class Timed(Predicate):
    """A predicate about event and time only."""

    @property
    def is_timed(self) -> bool:
        return True


@dataclass(frozen=True, repr=False)
class _Constant(Timed):
    """A predicate that always gives the same answer: `ALWAYS`, `NEVER`."""

    value: bool

    def __call__(self, event: Event, state: Any) -> bool:
        del event, state
        return self.value

    def __invert__(self) -> Predicate:
        return NEVER if self.value else ALWAYS

    def __repr__(self) -> str:
        return "always" if self.value else "never"


ALWAYS: Predicate = _Constant(True)
"""Predicate that is always true."""

NEVER: Predicate = _Constant(False)
"""Predicate that is never true; the `match` of algorithms with neutral settings."""


@dataclass(frozen=True, repr=False)
class _And(Predicate):
    first: Predicate
    second: Predicate

    @property
    def is_timed(self) -> bool:
        return self.first.is_timed and self.second.is_timed

    def __call__(self, event: Event, state: Any) -> bool:
        return self.first(event, state) and self.second(event, state)

    def at(self, event: Event) -> Predicate:
        return _both(self.first.at(event), self.second.at(event))

    def during(self, timestamp: Timestamp) -> tuple[Predicate, float]:
        first, end = self.first.during(timestamp)
        if first == NEVER:
            return first, end
        second, second_end = self.second.during(timestamp)
        return _both(first, second), second_end if second == NEVER else min(end, second_end)

    def __repr__(self) -> str:
        return f"{self.first!r} & {self.second!r}"

    def negated_words(self) -> str:
        if isinstance(self.first, _Not) and isinstance(self.second, _Not):
            return f"({~self.first!r} | {~self.second!r})"
        return f"~({self!r})"


@dataclass(frozen=True, repr=False)
class _Not(Predicate):
    inner: Predicate

    @property
    def is_timed(self) -> bool:
        return self.inner.is_timed

    def __call__(self, event: Event, state: Any) -> bool:
        return not self.inner(event, state)

    def at(self, event: Event) -> Predicate:
        return ~self.inner.at(event)

    def during(self, timestamp: Timestamp) -> tuple[Predicate, float]:
        inner, end = self.inner.during(timestamp)
        return ~inner, end

    def __invert__(self) -> Predicate:
        return self.inner

    def __repr__(self) -> str:
        return self.inner.negated_words()


@dataclass(frozen=True, repr=False)
class Custom(Predicate):
    """A plain function `(event, state) -> bool`; its answer may depend on more than time.

    Args:
        fn: The function, called in every step.

    Example:
        >>> Custom(lambda event, state: True)(None, None)
        True
    """

    fn: Callable[[Event, Any], bool]

    def __call__(self, event: Event, state: Any) -> bool:
        return bool(self.fn(event, state))

    def __repr__(self) -> str:
        return getattr(self.fn, "__qualname__", repr(self.fn))


def as_predicate(match: Predicate | Callable[[Event, Any], bool]) -> Predicate:
    """Return a predicate from a plain function `(event, state) -> bool`; a predicate is returned unchanged.

    Args:
        match: A predicate, or a function of time and shapes.

    Raises:
        TypeError: `match` is neither a predicate nor callable.

    Example:
        >>> predicate = as_predicate(lambda event, state: state.timestamp.batch > 3)
        >>> type(predicate).__name__
        'Custom'
    """
    if isinstance(match, Predicate):
        return match
    if not callable(match):
        raise TypeError(f"match={match!r}: expected a predicate or a function (event, state) -> bool")
    return Custom(match)


def _both(first: Predicate, second: Predicate) -> Predicate:
    if NEVER in (first, second):
        return NEVER
    if first == ALWAYS:
        return second
    return first if second == ALWAYS else _And(first, second)
