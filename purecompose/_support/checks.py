"""Argument checks with messages of the form "where: expected what, got value (type); hint".

`where` names the function and the argument, such as "sgd: lr". Each check returns the value.
"""

import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.nn import Module

from purecompose._support.other_names import instead_of_setting
from purecompose._support.specs import describe, did_you_mean


F = TypeVar("F", bound=Callable[..., Any])


def frozen(setting: Any) -> Any:
    """Return a setting with lists, nested ones included, converted to tuples."""
    return tuple(map(frozen, setting)) if isinstance(setting, list | tuple) else setting


def check_flag(value: Any, where: str) -> bool:
    """Require an actual bool; 0 and 1 are rejected."""
    if not isinstance(value, bool):
        raise TypeError(f"{where}: expected True or False, got {shown(value)}")
    return value


def check_whole(value: Any, where: str, low: float = -math.inf, high: float = math.inf, *, hint: str = "") -> int:
    """Require an int or an object with `__index__`, but not a float or a tensor, whose value may be on a device."""
    if type(value) is int and low <= value <= high:  # the usual case, which runs in every step
        return value
    is_int = hasattr(value, "__index__") and not isinstance(value, bool | Tensor)
    if is_int and low <= operator.index(value) <= high:
        return operator.index(value)
    raise (ValueError if is_int else TypeError)(_refusal(where, f"an int{_range(low, high)}", value, hint))


def check_number(
    value: Any,
    where: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    hint: str = "",
) -> float:
    """Require a finite real number and return it as a float."""
    if is_number(value) and math.isfinite(value) and low <= value <= high:
        if not (above and value == low) and not (below and value == high):
            return float(value)
    wanted = f"a finite number{_range(low, high, above=above, below=below)}"
    raise (ValueError if is_number(value) else TypeError)(_refusal(where, wanted, value, hint))


def is_callable_with(fn: Any, num_args: int) -> bool:
    """Return whether a function takes this many positional arguments; true if its signature is unknown."""
    try:
        inspect.signature(fn).bind(*[None] * num_args)
    except TypeError:
        return False
    except ValueError:  # a function in C may have none
        return True
    return True


def is_number(value: Any) -> bool:
    """Return whether the value is a real number; a bool is not."""
    if type(value) is float:  # the usual case, which runs in every step
        return True
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Describe a value for a message: a tensor by dtype and shape, others by value (at most 80 characters) and type."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    # In one line, since that of torch's optimizers has many; without the address of a function.
    text = value.__qualname__ if isinstance(value, FunctionType) else " ".join(repr(value).split())
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _refusal(where: str, wanted: str, value: Any, hint: str) -> str:
    return f"{where}: expected {wanted}, got {shown(value)}{f'; {hint}' if hint else ''}"


def _range(low: float, high: float, *, above: bool = False, below: bool = False) -> str:
    if high < math.inf and low > -math.inf:
        return f" in {'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
    parts = [f"{'>' if above else '>='} {low:g}"] if low > -math.inf else []
    parts += [f"{'<' if below else '<='} {high:g}"] if high < math.inf else []
    return "".join(f" {part}" for part in parts)


def check_keywords(given: Iterable[str], function: Callable[..., Any]) -> None:
    """Raise if a function has no parameter of a given name; the message names the right one, or lists all."""
    known = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in given:
        if name not in known:
            names = [name for name in known if name not in ("cls", "self")]
            hint = instead_of_setting(_name(function), name, names) or did_you_mean(name, names)
            raise TypeError(
                f"{_name(function)}() got an unexpected keyword argument {name!r};"
                f"{hint or ' it takes ' + ', '.join(names)}"
            )


def suggests_keywords(function: F) -> F:
    """Decorate a function, or a class, to explain calls with arguments that it does not take.

    An unknown keyword is explained as by `check_keywords`; for any other mistake the message shows the signature. The
    arguments are alive until the function returns, so it is not for functions that release the memory of one.
    """
    if isinstance(function, type):
        decorated: Any = function
        decorated.__init__ = suggests_keywords(decorated.__init__)
        return decorated

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            has_params = args and isinstance(args[0], Iterator | list | Module)  # given to an optimizer, as in torch
            if has_params and (hint := instead_of_setting(_name(function), "params")):
                raise TypeError(f"{_name(function)}() got params ({type(args[0]).__name__});{hint}") from None
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                check_keywords(kwargs, function)
                call = describe(_name(function), signature).replace("(self, ", "(")
                raise TypeError(f"{error}; it is {call}") from None
            raise

    return cast(F, checked)


def _name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")
