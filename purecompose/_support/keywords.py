"""Suggestions for keyword arguments that a function does not have."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from purecompose._support.specs import did_you_mean


__all__ = ["check_keywords", "suggests_keywords"]

P = ParamSpec("P")
T = TypeVar("T")


def check_keywords(given: Iterable[str], function: Callable[..., Any], instead: Mapping[str, str]) -> None:
    """Raise if a function has no parameter of a given name; the message suggests one, or lists all."""
    known = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in given:
        if name not in known:
            names = [name for name in known if name != "cls"]
            hint = f" write {instead[name]}" if name in instead else did_you_mean(name, names)
            raise TypeError(
                f"{function.__qualname__}() got an unexpected keyword argument {name!r};"
                f"{hint or ' it takes ' + ', '.join(names)}"
            )


def suggests_keywords(**instead: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that applies `check_keywords` to each call of a function.

    The arguments are alive until the function returns, so it is not for functions that release the memory of one.

    Example:
        >>> @suggests_keywords(seed="key=3")
        ... def create(key=0):
        ...     return key
        >>> create(seed=3)
        Traceback (most recent call last):
        TypeError: create() got an unexpected keyword argument 'seed'; write key=3
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            check_keywords(kwargs, function, instead)
            return function(*args, **kwargs)

        return checked

    return decorate
