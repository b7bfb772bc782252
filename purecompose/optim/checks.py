"""Checks of optimizers' settings and of the names that their patterns match."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, TypeAlias

from purecompose._support.checks import shown
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within


# Pattern -> the options it overrides, both as tuples so that optimizers hash.
Groups: TypeAlias = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
GivenGroups: TypeAlias = Mapping[str, Mapping[str, Any]] | Groups
"""Groups as they are given, also as a mapping of mappings."""


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


def checked_betas(betas: Any, where: str) -> tuple[Scalar, ...]:
    """Return two decay rates, each in [0, 1) as far as it is known."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"{where}: expected two numbers, got {shown(betas)}")
    return tuple(as_float(Within(0, 1, below=True).scalar(beta, f"{where}[{i}]")) for i, beta in enumerate(betas))


def as_float(value: Any) -> Any:
    """Return an int as a float, and everything else unchanged."""
    return float(value) if type(value) is int else value


# Settings of optimizers.
Rate: TypeAlias = Annotated[Scalar, Within(0)]
Share: TypeAlias = Annotated[Scalar, Within(0, 1, below=True)]
Betas: TypeAlias = Annotated[tuple[Scalar, Scalar], checked_betas]
Constant: TypeAlias = Annotated[float, Within(0)]


def _pairs(mapping: Any, where: str) -> list[tuple[Any, Any]]:
    try:
        return [(key, item) for key, item in (mapping.items() if isinstance(mapping, Mapping) else mapping)]
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: expected a mapping, such as groups={{'*.bias': {{'weight_decay': 0.0}}}}, got {shown(mapping)}"
        ) from None
