"""Settings that are declared once: the annotation of an argument says which values are valid.

    Smoothing = Annotated[Scalar, Within(0, 1, hint="0.1 is common, 0 switches it off")]

    @checked
    def smooth(logits: Tensor, smoothing: Smoothing = 0.1, *, mode: Literal["even", "prior"] = "even"): ...

The decorators `checked` and `purecompose.factory`, and the base class of the optimizers, reject all other values, with
errors that name the function, the argument, what was expected and what was given. The laws draw their settings from the
same annotations.

    annotation                      values
    `bool`                          True or False, but not 0 or 1
    `Literal["a", "b"]`             one of these
    `Annotated[int, Within(1)]`     an int of the range
    `Annotated[float, Within(0)]`   a finite number of the range
    `Annotated[Scalar, Within(0)]`  a scalar that is in the range as far as it is known
    `... | None`, `... | Tensor`    also `None`, or any tensor, whose values may be on a device
    `Annotated[T, function]`        those for which `function(value, where)` does not raise; it returns the value to use

Arguments with other annotations are not checked. What depends on two settings is checked by the function itself.
"""

import contextlib
import dataclasses
import enum
import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from purecompose import tree
from purecompose._support.other_names import instead_of_setting
from purecompose._support.specs import check_flag, check_number, check_whole, is_number, shown, suggests_keywords
from purecompose.schedule.scalar import Hparam, Product, Scalar, Schedule, factors_of, known_part, not_a_scalar


F = TypeVar("F", bound=Callable[..., Any])

Check: TypeAlias = Callable[[Any, str], Any]
"""A function `(value, where) -> value` that raises if the value is not valid; `where` is such as "mixup: alpha"."""


@dataclasses.dataclass(frozen=True)
class Within:
    """A range of numbers, as metadata of an annotation.

    With `above`, `low` itself is excluded, with `below`, `high` is. `hint`, for the error, says what the number means.
    """

    low: float = -math.inf
    high: float = math.inf
    _: dataclasses.KW_ONLY
    above: bool = False
    below: bool = False
    or_infinite: bool = False
    hint: str = ""

    def whole(self, value: Any, where: str) -> int:
        """Return an int of the range, or raise a `TypeError` or `ValueError`."""
        return check_whole(value, where, self.low, self.high, hint=self.hint)

    def number(self, value: Any, where: str) -> float:
        """Return a finite number of the range (an int remains one), or raise a `TypeError` or `ValueError`."""
        if self.or_infinite and is_number(value) and value == math.inf:
            return value
        bounds = {"above": self.above, "below": self.below}
        number = check_number(value, where, self.low, self.high, **bounds, hint=self.hint)
        return value if type(value) is int else number

    def scalar(self, value: Any, where: str) -> Scalar:
        """Return a scalar that is in the range as far as it is known: schedules count as 1, hparams as their defaults.

        The default of an hparam may be an excluded lower bound, since it is only where its values begin.
        """
        if is_number(value):
            return self.number(value, where)
        if isinstance(value, Tensor):
            name = where.rpartition(": ")[2]
            raise TypeError(
                f"{where}: expected a number, got {shown(value)}; settings contain no tensors: use "
                f"hparam({name!r}, 0.1), whose tensor is kept in state.hparams"
            )
        if not isinstance(value, Hparam | Product | Schedule):
            raise TypeError(f"{where}: {not_a_scalar(value)}{f'; {self.hint}' if self.hint else ''}")
        # A schedule may take a product below the upper bound again.
        is_scheduled = any(isinstance(factor, Schedule) for factor in factors_of(value))
        high, below = (math.inf, False) if is_scheduled else (self.high, self.below)
        check_number(known_part(value), f"{where}={value!r}", self.low, high, below=below, hint=self.hint)
        return value


def check_of(annotation: Any) -> Check | None:
    """Return the check that an annotation declares, or `None` if it declares none, or has a part that is not known."""
    choices, checks, free = alternatives(annotation)
    if not (choices or checks) or object in free:
        return None
    is_flag = choices == (True, False) and all(type(one) is bool for one in choices)

    def check(value: Any, where: str) -> Any:
        if (free and isinstance(value, free)) or any(type(one) is type(value) and one == value for one in choices):
            return value
        for one in checks[:-1]:
            with contextlib.suppress(TypeError, ValueError):
                return one(value, where)
        if checks:
            return checks[-1](value, where)
        return check_flag(value, where) if is_flag else _refuse(choices, value, where)

    return check


def alternatives(annotation: Any) -> tuple[tuple[Any, ...], list[Check], tuple[type, ...]]:
    """Return what an annotation declares: choices, checks of its other parts, and types that are not checked.

    A part that cannot be judged is the type `object`.
    """
    origin = get_origin(annotation)
    if annotation is bool:
        return (True, False), [], ()
    if origin is Literal:
        return get_args(annotation), [], ()
    if origin is Annotated:
        kind = annotation.__origin__
        known = (one for one in annotation.__metadata__ if isinstance(one, Within | types.FunctionType))
        declared = next(known, None)
        if declared is None:
            return alternatives(kind)
        if not isinstance(declared, Within):
            return (), [declared], ()
        members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        check = declared.scalar if Hparam in members else declared.number if float in members else declared.whole
        others = [one for one in members if one not in get_args(Scalar)]
        return (), [check], tuple(one for other in others for one in alternatives(other)[2])
    if origin in (Union, types.UnionType):
        parts = [alternatives(part) for part in get_args(annotation)]
        choices, checks = tuple(one for part in parts for one in part[0]), [one for part in parts for one in part[1]]
        return choices, checks, tuple(one for part in parts for one in part[2])
    plain = annotation if origin is None else origin
    try:
        isinstance(None, plain)
    except TypeError:  # Any, a type variable, a protocol
        return (), [], (object,)
    return (), [], {float: (float, int), complex: (complex, float, int)}.get(plain, (plain,))


def declarations(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function's arguments, or of a dataclass's fields; without those not resolvable."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # a name that only a type checker has, or text: resolve each by itself
        hints, names = {}, getattr(function, "__globals__", {})
        for name, annotation in getattr(function, "__annotations__", {}).items():
            with contextlib.suppress(Exception):
                alone = types.SimpleNamespace(__annotations__={name: annotation})
                hints |= get_type_hints(alone, globalns=names, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}


def checks_of(function: Callable[..., Any]) -> dict[str, Check]:
    """Return the checks of a function's arguments, or of a dataclass's fields, by name."""
    found = {name: check_of(annotation) for name, annotation in declarations(function).items()}
    return {name: check for name, check in found.items() if check is not None}


class Settings:
    """The declared arguments of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._signature = function, inspect.signature(function)
        self._parameters = self._signature.parameters
        positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._positional = [name for name, one in self._parameters.items() if one.kind in positional]

    @functools.cached_property
    def _checks(self) -> dict[str, tuple[Check, str]]:
        # In the first call: names in annotations that are text may be defined further below in the module.
        own = getattr(self._function, "__name__", "the function")
        return {name: (check, f"{own}: {name}") for name, check in checks_of(self._function).items()}

    def checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments after their checks; if they do not fit the signature, the call itself explains that."""
        if not self._checks:
            return args, dict(kwargs)
        try:
            named = zip([*self._positional, *[""] * len(args)], args, strict=False)
            new_args = tuple(self._after_check(name, value) for name, value in named)
            return new_args, {name: self._after_check(name, value) for name, value in kwargs.items()}
        except (TypeError, ValueError):
            try:
                self._signature.bind_partial(*args, **kwargs)
            except TypeError:
                return args, dict(kwargs)
            raise

    def _after_check(self, name: str, value: Any) -> Any:
        if name not in self._checks:
            return value
        check, where = self._checks[name]
        return check(value, where)

    def config(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, with defaults, for the repr and the comparison with a checkpoint.

        Left out are the name, empty defaults, and objects that are not settings, such as networks.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {
            name: value
            for name, value in bound.arguments.items()
            if name != "name" and _is_setting(value)
            if not (value in (None, ()) and value == self._parameters[name].default)
        }


def checked(function: F) -> F:
    """Decorate a function so that its declared arguments are checked, and unknown ones are explained.

    Example:
        >>> @checked
        ... def blend(image, share: Annotated[float | Tensor, Within(0, 1)] = 0.5): ...
        >>> blend(None, 2.0)
        Traceback (most recent call last):
        ValueError: blend: share: expected a finite number in [0, 1], got 2.0 (float)
    """
    settings, explained = Settings(function), suggests_keywords(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = settings.checked(args, kwargs)
        return explained(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def _refuse(choices: tuple[Any, ...], value: Any, where: str) -> NoReturn:
    # Among True and False, text is a wrong choice, and anything else is of a wrong type.
    error = TypeError if True in choices and not isinstance(value, str) else ValueError
    *others, last = map(repr, choices)
    wanted = f"{', '.join(others)}{' or ' if others else ''}{last}"
    hint = instead_of_setting(*where.split(": ", 1)) if ": " in where else ""
    raise error(f"{where}: expected {wanted}, got {shown(value)}{hint and ';' + hint}")


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_setting, value))
    if isinstance(value, Mapping):
        return all(map(_is_setting, value.values()))
    if isinstance(value, nn.Module | Tensor) or any(isinstance(leaf, Tensor) for leaf in tree.leaves(value)):
        return False
    is_plain = isinstance(value, bool | int | float | str | bytes | None | enum.Enum) or callable(value)
    return is_plain or dataclasses.is_dataclass(value)
