"""Suggestions for keyword arguments that a function does not have."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from purecompose._support.specs import describe, did_you_mean


F = TypeVar("F", bound=Callable[..., Any])


def check_keywords(given: Iterable[str], function: Callable[..., Any], instead: Mapping[str, str]) -> None:
    """Raise if a function has no parameter of a given name; the message suggests one, or lists all."""
    known = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in given:
        if name not in known:
            names = [name for name in known if name not in ("cls", "self")]
            hint = f" write {instead[name]}" if name in instead else did_you_mean(name, names)
            raise TypeError(
                f"{_name(function)}() got an unexpected keyword argument {name!r};"
                f"{hint or ' it takes ' + ', '.join(names)}"
            )


def suggests_keywords(**instead: str) -> Callable[[F], F]:
    """Return a decorator that explains calls with arguments that a function, or a class, does not take.

    An unknown keyword is explained as by `check_keywords`; for any other mistake the message shows the signature. The
    arguments are alive until the function returns, so it is not for functions that release the memory of one.

    Example:
        >>> @suggests_keywords(seed="key=3")
        ... def create(net, key=0):
        ...     return key
        >>> create(None, seed=3)
        Traceback (most recent call last):
        TypeError: create() got an unexpected keyword argument 'seed'; write key=3
        >>> create()
        Traceback (most recent call last):
        TypeError: create() missing 1 required positional argument: 'net'; it is create(net, key=0)
    """

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)
            return function

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                signature = inspect.signature(function)
                try:
                    signature.bind(*args, **kwargs)
                except TypeError:
                    check_keywords(kwargs, function, instead)
                    call = describe(_name(function), signature).replace("(self, ", "(")
                    raise TypeError(f"{error}; it is {call}") from None
                raise

        return checked

    return decorate


def _name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")
