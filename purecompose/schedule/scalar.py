"""Scalars for optimizers and methods: numbers, named hyper-parameters, schedules, and products of them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from purecompose._support.specs import check_flag, check_number, is_number, shown
from purecompose.schedule.shape import Shape, stretched
from purecompose.time import Time, Timestamp


class _Factor:
    """Base class that adds `*` to the scalars that are not plain numbers; the result is one flat Product."""

    def __mul__(self, other: Scalar) -> Product:
        return Product((*factors_of(self), *factors_of(other))) if _is_scalar(other) else NotImplemented

    def __rmul__(self, other: Scalar) -> Product:
        return Product((*factors_of(other), *factors_of(self))) if _is_scalar(other) else NotImplemented


@dataclasses.dataclass(frozen=True)
class Hparam(_Factor):
    """A scalar that is stored under its name, as a 0-d tensor, in `state.hparams`.

    Members of a population may have different values, and gradients flow to it. Created by `hparam`.

    Args:
        name: The name.
        default: The initial value, finite.

    Raises:
        TypeError, ValueError: The name is not a non-empty string, or the default is not a number.

    Example:
        >>> Hparam("lr", 0.1)
        hparam('lr', 0.1)
    """

    name: str
    default: float

    def __repr__(self) -> str:
        return f"hparam({self.name!r}, {self.default!r})"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"hparam: expected a name, a string that is not empty, got {shown(self.name)}")
        object.__setattr__(self, "default", check_number(self.default, f"hparam({self.name!r}): default"))


@dataclasses.dataclass(frozen=True)
class Schedule(_Factor):
    """A multiplier that changes with time: `schedule(timestamp) -> float`.

    Created by `cosine` and similar functions, or from a plain function by `scheduled`. Schedules with equal settings
    are equal, and those around the same plain function.

    Args:
        fn: The function of the timestamp.

    Raises:
        TypeError: `fn` is not a function, or is a schedule.

    Example:
        >>> Schedule(lambda timestamp: 0.5)(Timestamp())
        0.5
    """

    fn: Callable[[Timestamp], float]
    call: str = dataclasses.field(default="", compare=False)
    """The call that created it, as text; by default `scheduled` and the function."""

    def __repr__(self) -> str:
        return self.call or f"scheduled({getattr(self.fn, '__qualname__', None) or repr(self.fn)})"

    def __post_init__(self) -> None:
        if isinstance(self.fn, Schedule) or not callable(self.fn):
            raise TypeError(f"scheduled: expected a function (timestamp) -> float, got {shown(self.fn)}")

    def __call__(self, timestamp: Timestamp) -> float:
        """Return the multiplier at a point of the run.

        Raises:
            TypeError, ValueError: The function returned something other than a finite number.
            UnitError: The schedule's times cannot be converted to one unit in this run.
            Exception: The function raised it; a note names the schedule and the batch.
        """
        try:
            value = self.fn(timestamp)
        except OverflowError as error:
            raise ValueError(
                f"{self!r}: value at batch {timestamp.batch}: expected a finite number, got one beyond a float's range"
            ) from error
        except Exception as error:
            error.add_note(f"in the schedule {self!r}, at batch {timestamp.batch}")
            raise
        if type(value) is float and math.isfinite(value):
            return value
        return check_number(value, f"{self!r}: value at batch {timestamp.batch}")

    def scaled(self, ratio: float, *, scale_warmup: bool = False) -> Schedule:
        """Return the same curve over a time stretched by a factor: its value at t is this one's value at t / ratio.

        Absolute times (`ep`, `ba`, `sp`, `tok`) are multiplied by the ratio, and not rounded. Fractions of the run
        (`dur`) do not change.

        Args:
            ratio: The factor, above 0; at 1 the schedule is returned unchanged.
            scale_warmup: True to stretch warm-ups (`warmup=`), too.

        Raises:
            TypeError, ValueError: A setting is of the wrong kind or out of range; or the schedule is around a plain
                function, whose times are not known.

        Example:
            >>> from purecompose.schedule import linear
            >>> [linear(t_max="4ba").scaled(0.5)(Timestamp(batch=t)) for t in range(3)]
            [1.0, 0.5, 0.0]
        """
        ratio = check_number(ratio, "scaled: ratio", 0, above=True, hint="0.5 is for half the time")
        check_flag(scale_warmup, "scaled: scale_warmup")
        if ratio == 1:
            return self
        if not isinstance(self.fn, Shape):
            raise ValueError(
                f"{self!r} is a plain function of the timestamp, whose times cannot be scaled by {ratio:g}: scale them "
                "in the function"
            )
        fn = stretched(self.fn, ratio, scale_warmup=scale_warmup)
        how = ", scale_warmup=True" if scale_warmup else ""
        return self if fn is self.fn else Schedule(fn, f"{self!r}.scaled({ratio!r}{how})")


@dataclasses.dataclass(frozen=True)
class Product(_Factor):
    """The product of scalars, never nested; the result of `*` between numbers, hparams and schedules.

    Args:
        factors: Numbers, hparams and schedules.

    Raises:
        TypeError: A factor is not a number, an hparam or a schedule.

    Example:
        >>> 0.1 * hparam("lr", 1.0)
        0.1 * hparam('lr', 1.0)
    """

    factors: tuple[Scalar, ...]

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.factors))

    def __post_init__(self) -> None:
        for factor in self.factors:
            if isinstance(factor, Product):
                raise TypeError(f"Product: expected factors that are not products, got {factor!r}; multiply with *")
            if not isinstance(factor, Hparam | Schedule):
                check_number(factor, "Product: factor")


Scalar: TypeAlias = float | int | Hparam | Schedule | Product
"""A number, an `hparam`, a schedule, or a product of them."""


def hparam(name: str, default: float) -> Hparam:
    """Return a named scalar to use in place of a constant, read from `state.hparams[name]` in every step.

    Args:
        name: The scalar's key in `state.hparams`.
        default: The initial value in the state, a finite number.

    Raises:
        TypeError, ValueError: The name is not a non-empty string, or the default is not a finite number.

    Example:
        >>> 0.1 * hparam("lr", 1.0)
        0.1 * hparam('lr', 1.0)
    """
    return Hparam(name, default)


def scheduled(fn: Callable[[Timestamp], float]) -> Schedule:
    """Make a schedule from a plain function of the timestamp.

    The function runs on the host, outside traced code. Keep it at module level: two lambdas are different schedules.

    Args:
        fn: A function of the timestamp that returns a finite number.

    Example:
        >>> halving = scheduled(lambda timestamp: 0.5**timestamp.epoch)
        >>> halving(Timestamp(epoch=2))
        0.25
    """
    return Schedule(fn)


def made(name: str, shape: Shape, **settings: object) -> Schedule:
    """Return the schedule of a shape, printed as a call of the function `name`, which creates it."""
    return Schedule(shape, f"{name}({', '.join(f'{key}={_written(value)!r}' for key, value in settings.items())})")


def factors_of(scalar: Scalar | _Factor) -> tuple[Scalar, ...]:
    """Return the factors of a scalar: numbers, hparams and schedules."""
    return scalar.factors if isinstance(scalar, Product) else (scalar,)  # pyright: ignore[reportReturnType]


def resolve(
    scalar: Scalar, *, hparams: Mapping[str, Tensor], scheduled: Callable[[Schedule], float | Tensor]
) -> float | Tensor:
    """Return the value of a scalar in a running step.

    Args:
        scalar: A number, an hparam, a schedule or a product.
        hparams: 0-d tensors by name, `state.hparams`.
        scheduled: Function that returns the value of a schedule at the step's time.

    Returns:
        A float for plain numbers, otherwise the product of the parts (a 0-d tensor in a step).

    Raises:
        KeyError: `hparams` lacks an hparam.
        TypeError: The value is not a scalar.

    Example:
        >>> import torch
        >>> lr = 0.5 * hparam("lr", 0.1)
        >>> resolve(lr, hparams={"lr": torch.tensor(3.0)}, scheduled=lambda schedule: 1.0)
        tensor(1.5000)
    """
    if type(scalar) is float:  # by far the most frequent case, several times per step
        return scalar
    if isinstance(scalar, Schedule):
        return scheduled(scalar)
    if isinstance(scalar, Hparam):
        if scalar.name not in hparams:
            raise KeyError(
                f"hparam {scalar.name!r} is not in state.hparams, which holds {sorted(hparams)}; step.init(state) adds "
                "those that the config of an algorithm names, Algorithm(..., config={'name': hparam})"
            )
        return hparams[scalar.name]
    if isinstance(scalar, Product):
        return math.prod(resolve(factor, hparams=hparams, scheduled=scheduled) for factor in scalar.factors)
    return number(scalar)


def number(scalar: Scalar) -> float:
    """Return the value of a scalar without a state: numbers as they are, hparams by their default.

    Args:
        scalar: A number, an hparam or a product of them.

    Raises:
        TypeError: The value is a schedule, which has a value only at a time, or not a scalar.

    Example:
        >>> number(2 * hparam("lr", 0.25))
        0.5
    """
    if isinstance(scalar, Hparam):
        return scalar.default
    if isinstance(scalar, Product):
        return math.prod(number(factor) for factor in scalar.factors)
    if isinstance(scalar, Schedule):
        raise TypeError(
            f"{scalar!r} has a value only at a point of a run: call schedule(timestamp), or let the step read it"
        )
    if not _is_scalar(scalar):
        raise TypeError(not_a_scalar(scalar))
    return float(scalar)


def known_part(scalar: Scalar) -> float:
    """Return a scalar as far as it is known without a state: schedules count as 1, hparams as their defaults."""
    return math.prod((number(factor) for factor in factors_of(scalar) if not isinstance(factor, Schedule)), start=1.0)


def not_a_scalar(value: object) -> str:
    """Return the message for a value that is not a scalar, with a hint for names, functions and torch's schedulers."""
    hint = ""
    if isinstance(value, str):
        hint = f"; a named scalar is state.hparams[{value!r}]"
        with contextlib.suppress(ValueError):
            float(value)
            hint = "; write the number without quotes"
    elif isinstance(value, LRScheduler) or (isinstance(value, type) and issubclass(value, LRScheduler)):
        name = value.__name__ if isinstance(value, type) else type(value).__name__
        hint = f"; write schedule.from_torch(torch.optim.lr_scheduler.{name}, ...) with the settings of the scheduler"
    elif isinstance(value, FunctionType) and value.__module__.startswith(__package__ or ""):  # such as `cosine`
        hint = f"; call it: {value.__name__}(...) is a schedule"
    elif callable(value):
        hint = "; make a schedule of a function of the timestamp with schedule.scheduled(fn)"
    return f"expected a number, an hparam, a schedule or a product of them, got {shown(value)}{hint}"


def _written(setting: object) -> object:
    """Return a setting as it is typed: times as strings, tuples as lists."""
    if isinstance(setting, tuple):
        return [_written(one) for one in setting]
    return str(setting) if isinstance(setting, Time) else setting


def _is_scalar(value: object) -> bool:
    return isinstance(value, _Factor) or is_number(value)


T = TypeVar("T")


def collect(obj: object, kind: type[T]) -> tuple[T, ...]:
    """Return the distinct instances of `kind` inside a tree of dataclasses, tuples, lists and dicts.

    Equal instances count once, in order of appearance. Other leaves are ignored, and instances of `kind` are not
    searched themselves.

    Args:
        obj: The tree.
        kind: The type of the instances.

    Example:
        >>> from purecompose.schedule import Hparam, hparam
        >>> collect({"lr": 0.1 * hparam("lr", 1.0), "decay": (hparam("decay", 0.0),)}, Hparam)
        (hparam('lr', 1.0), hparam('decay', 0.0))
    """
    found: dict[T, None] = {}
    _collect(obj, kind, found)
    return tuple(found)


def scaled(tree: T, ratio: float, *, scale_warmup: bool = False) -> T:
    """Return the same tree with every schedule in it stretched in time; see `Schedule.scaled`.

    Args:
        tree: A scalar, an optimizer, or another tree of dataclasses, tuples, lists and dicts, as for `collect`.
        ratio: The factor, above 0.
        scale_warmup: True to stretch warm-ups, too.

    Returns:
        A new tree, or the given one if nothing in it changes.

    Raises:
        TypeError, ValueError: As for `Schedule.scaled`.

    Example:
        >>> from purecompose import optim
        >>> from purecompose.schedule import multi_step
        >>> scaled(0.1 * multi_step(["30ep", "60ep"]), 0.5)
        0.1 * multi_step(milestones=['30ep', '60ep'], gamma=0.1, warmup='0ba').scaled(0.5)
        >>> scaled(optim.sgd(0.1, momentum=0.9), 0.5)
        sgd(lr=0.1, momentum=0.9)
    """
    check_number(ratio, "scaled: ratio", 0, above=True, hint="0.5 is for half the time")
    return _mapped(tree, lambda schedule: schedule.scaled(ratio, scale_warmup=scale_warmup))


def _collect(obj: object, kind: type[T], found: dict[T, None]) -> None:
    if isinstance(obj, kind):
        found.setdefault(obj)
        return
    for inner in _children(obj) or ():
        _collect(inner, kind, found)


def _children(obj: object) -> Iterable[Any] | None:
    """Return the children of a tree's node; `None` for a leaf."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [getattr(obj, field.name) for field in dataclasses.fields(obj)]
    if isinstance(obj, Mapping):
        return obj.values()
    return obj if isinstance(obj, tuple | list) else None


def _mapped(obj: Any, fn: Callable[[Schedule], Schedule]) -> Any:
    if isinstance(obj, Schedule):
        return fn(obj)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        fields = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if field.init}
        changed = {name: new for name, old in fields.items() if (new := _mapped(old, fn)) is not old}
        return dataclasses.replace(obj, **changed) if changed else obj
    if isinstance(obj, Mapping):
        new = {key: _mapped(value, fn) for key, value in obj.items()}
        return obj if all(new[key] is obj[key] for key in obj) else type(obj)(new)  # pyright: ignore[reportCallIssue]
    if isinstance(obj, tuple | list):
        members = [_mapped(member, fn) for member in obj]
        if all(new is old for new, old in zip(members, obj, strict=True)):
            return obj
        return type(obj)(*members) if hasattr(obj, "_fields") else type(obj)(members)
    return obj
