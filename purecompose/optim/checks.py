"""Checks of optimizers' settings and of the names that their patterns match."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import Tensor

from purecompose._support.checks import shown
from purecompose.schedule import Hparam, Product, Scalar, Schedule, number
from purecompose.schedule.scalar import factors_of, not_a_scalar


# Pattern -> the options it overrides, both as tuples so that optimizers hash.
Groups: TypeAlias = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


def match_or_raise(pattern: str, names: Iterable[str], where: str, kind: str = "parameter") -> None:
    """Raise a `ValueError` for a pattern that matches none of the names of parameters, or of things of another kind."""
    names = list(names)
    if not any(fnmatchcase(name, pattern) for name in names):
        known = ", ".join(names[:5]) or "none at all"
        raise ValueError(
            f"{where} matches no {kind}; the names are {known}{', ...' if len(names) > 5 else ''}; "
            "patterns match whole names, as in '*.bias'"
        )


@functools.lru_cache(maxsize=256)
def matched(patterns: tuple[str, ...], names: tuple[str, ...]) -> frozenset[str]:
    """Return the names that one of the patterns matches (`fnmatch`, on the whole name); cached, as each step needs it.

    Example:
        >>> matched(("*.bias",), ("0.weight", "0.bias"))
        frozenset({'0.bias'})
    """
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def checked_groups(rule: Any, groups: Mapping[str, Mapping[str, Any]] | Groups) -> Groups:
    """Return groups as sorted tuples, with every option checked like the optimizer's own settings.

    Args:
        rule: The optimizer under construction, its own settings already checked.
        groups: Pattern -> options, in the order in which patterns are tried; a mapping or pairs.

    Raises:
        TypeError: `groups` is not a mapping of mappings, or an option is one that the optimizer does not have.
        TypeError, ValueError: An option's value is wrong, by itself or together with the optimizer's other settings.
    """
    valid = list(rule.settings_by_name)
    checked = []
    for pattern, options in _pairs(groups, "groups"):
        where = f"{rule.called}: groups[{pattern!r}]"
        if not isinstance(pattern, str):
            raise TypeError(f"{where}: expected a pattern of parameter names, such as '*.bias', got {shown(pattern)}")
        options = dict(_pairs(options, where))
        unknown = [key for key in options if key not in valid]
        if unknown:
            raise TypeError(f"{where}: no option {unknown[0]!r}; the options are {', '.join(valid)}")
        try:
            grouped = rule.overridden(options).settings_by_name
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error
        checked.append((pattern, tuple((key, grouped[key]) for key in sorted(options))))
    return tuple(checked)


def checked_scalar(scalar: Scalar, where: str, *, below: float = math.inf) -> Scalar:
    """Return a scalar whose value, as far as it is known now, is in [0, below); plain numbers become floats.

    In a product, the numbers and the hparams' defaults are known. The values of schedules are not checked.

    Raises:
        TypeError: The value is not a scalar; a tensor is not one.
        ValueError: The known value is out of range or not finite.
    """
    if isinstance(scalar, Tensor):
        raise TypeError(
            f"{where}: expected a number, got a tensor of shape {tuple(scalar.shape)}; an optimizer holds "
            "no tensors: use hparam('lr', 0.1), whose tensor is kept in state.hparams"
        )
    if isinstance(scalar, bool) or not isinstance(scalar, numbers.Real | Hparam | Product | Schedule):
        raise TypeError(f"{where}: {not_a_scalar(scalar)}")
    known = known_part(scalar)
    bound = math.inf if any(isinstance(factor, Schedule) for factor in factors_of(scalar)) else below
    if not 0 <= known < bound:  # also rejects NaN, and infinity, which is below no bound
        upper = "" if below == math.inf else f" and < {below:g}"
        raise ValueError(f"{where}: expected a finite number >= 0{upper}, got {shown(scalar)}")
    return float(scalar) if isinstance(scalar, numbers.Real) else scalar


def checked_betas(betas: Any, where: str) -> tuple[Scalar, Scalar]:
    """Return two decay rates, each in [0, 1) as far as it is known.

    Raises:
        TypeError: There are not two, or they are not scalars.
        ValueError: One is out of range.
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"{where}: betas: expected two numbers, got {betas!r} ({type(betas).__name__})")
    first, second = (checked_scalar(beta, f"{where}: betas[{i}]", below=1.0) for i, beta in enumerate(betas))
    return first, second


def checked_constant(scalar: Scalar, where: str) -> float:
    """Return a plain finite number >= 0 as a float, for a setting that is neither scheduled nor learned.

    Raises:
        TypeError: The value is not a number; hparams and schedules are not.
        ValueError: The number is out of range or not finite.
    """
    checked = checked_scalar(scalar, where)
    if not isinstance(checked, float):
        raise TypeError(f"{where}: expected a plain number, got {checked!r} ({type(checked).__name__})")
    return checked


def known_part(scalar: Scalar) -> float:
    """Return a scalar as far as it is known without a state: schedules count as 1, hparams as their defaults.

    Example:
        >>> from purecompose.schedule import cosine, hparam
        >>> known_part(0.5 * cosine() * hparam("lr", 0.1))
        0.05
    """
    return math.prod((number(factor) for factor in factors_of(scalar) if not isinstance(factor, Schedule)), start=1.0)


def _pairs(mapping: Any, where: str) -> list[tuple[Any, Any]]:
    try:
        return [(key, item) for key, item in (mapping.items() if isinstance(mapping, Mapping) else mapping)]
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: expected a mapping, such as groups={{'*.bias': {{'weight_decay': 0.0}}}}, got {shown(mapping)}"
        ) from None
