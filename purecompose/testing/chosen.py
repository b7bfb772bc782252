"""Choice of laws and tasks by name."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from purecompose._support.specs import did_you_mean
from purecompose.testing.law import Law
from purecompose.testing.tasks import Task


Named = TypeVar("Named", Law, Task)


def chosen(kind: str, given: Iterable[Any], known: Mapping[str, Named], wanted: type[Named]) -> tuple[Named, ...]:
    """Return the chosen laws or tasks, given as names or objects, in order, without duplicates."""
    given = (given,) if isinstance(given, (str, wanted)) else tuple(given)
    if not given:
        raise ValueError(f"no {kind} given: expected at least one of {', '.join(known)}")
    found = tuple(dict.fromkeys(_named(kind, item, known, wanted) for item in given))
    twice = [name for name, count in Counter(item.name for item in found).items() if count > 1]
    if twice:
        raise ValueError(f"two different {kind}s are called {twice[0]!r}: give one of them another name")
    return found


def _named(kind: str, item: Any, known: Mapping[str, Named], wanted: type[Named]) -> Named:
    if isinstance(item, wanted):
        return item
    if not isinstance(item, str):
        raise TypeError(f"{item!r} ({type(item).__name__}): expected a {wanted.__name__} or the name of a {kind}")
    if item not in known:
        hint = did_you_mean(item, known)
        raise ValueError(f"no {kind} is called {item!r};{hint} {'K' if hint else 'k'}nown: {', '.join(known)}")
    return known[item]
