"""What the optimizers share: the protocol, parameter groups, and checks of settings.

An optimizer of this room is a `Rule`: it says what it remembers of one parameter (`slots`, `fresh`) and how a
list of parameters moves (`move`). `ByGroup` makes `init` and `update` of it: it splits the parameters by group,
gathers the lists, and puts the results back under their names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from purecompose._checks import shown
from purecompose.schedule import Hparam, Product, Scalar, Schedule, number


__all__ = [
    "Cell",
    "Groups",
    "OptState",
    "Optimizer",
    "Rule",
    "Value",
    "cells",
    "checked_groups",
    "checked_scalar",
    "ByGroup",
    "read",
    "wide_dtype",
]

# What an optimizer remembers: slot -> parameter name -> tensor.
OptState: TypeAlias = dict[str, dict[str, Tensor]]
# Reads a setting: plain numbers stay floats, what moves or is learned comes as a 0-d tensor.
Value: TypeAlias = Callable[[Scalar], float | Tensor]
# Pattern -> the options it overrides, both as tuples so that optimizers hash.
Groups: TypeAlias = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


class Optimizer(Protocol):
    """The pair of pure functions that the step calls; hashable, and equal by value."""

    def init(self, params: Mapping[str, Tensor]) -> Any:
        """The state before the first update: a pytree of tensors; structure, shapes and dtypes last."""
        ...

    def update(
        self, grads: Mapping[str, Tensor], opt_state: Any, params: Mapping[str, Tensor], value: Value = number
    ) -> tuple[dict[str, Tensor], Any]:
        """New parameters and new state; the arguments stay as they are.

        Args:
            grads: gradients by parameter name. A parameter without one keeps its tensor and its state.
            opt_state: what `init` or the last `update` returned.
            params: all parameters by name; the result has their order.
            value: gives the numbers, or 0-d tensors, that scalar settings stand for.
        """
        ...


class Rule(Protocol):
    """An optimizer seen from inside one group: settings that hold for all the tensors it is handed."""

    @property
    def groups(self) -> Groups: ...

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of what it remembers of each parameter."""
        ...

    def fresh(self, slot: str, param: Tensor) -> Tensor:
        """A slot's tensor before the first update."""
        ...

    def move(
        self, grads: list[Tensor], params: list[Tensor], slots: dict[str, list[Tensor]], value: Value
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """New parameters and new slots, in the order of the lists; all of them new tensors."""
        ...


class Cell(NamedTuple):
    """The parameters that one set of options moves."""

    rule: Rule
    names: tuple[str, ...]
    slots: tuple[str, ...]


class ByGroup:
    """What the library's optimizers share: a rule (`slots`, `move`) applied group by group, starting from zeros."""

    groups: Groups

    def __repr__(self) -> str:
        """The call that makes it, without settings that are the defaults."""
        fields = [field for field in dataclasses.fields(cast(Any, self)) if field.init and field.repr]
        given = {field.name: getattr(self, field.name) for field in fields}
        told = {field.name: given[field.name] for field in fields if given[field.name] != field.default}
        if "groups" in told:
            told["groups"] = {pattern: dict(options) for pattern, options in told["groups"]}
        return f"{self.called}({', '.join(f'{name}={value!r}' for name, value in told.items())})"

    @property
    def called(self) -> str:
        """The name of the function that makes it."""
        return type(self).__name__.lower()

    def init(self, params: Mapping[str, Tensor]) -> OptState:
        """Zeros for every parameter, frozen ones included, each slot in the order of `params`.

        Raises:
            ValueError: a group's pattern matches no parameter.
        """
        for pattern, _ in self.groups:
            if not any(fnmatchcase(name, pattern) for name in params):
                known = ", ".join(list(params)[:5]) or "none at all"
                raise ValueError(
                    f"{self.called}: groups[{pattern!r}] matches no parameter; the names are "
                    f"{known}{', ...' if len(params) > 5 else ''}; patterns match whole names, as in '*.bias'"
                )
        cell_of = {name: cell for cell in cells(cast(Rule, self), tuple(params)) for name in cell.names}
        opt_state: OptState = {}
        for name, param in params.items():
            for slot in cell_of[name].slots:
                opt_state.setdefault(slot, {})[name] = cell_of[name].rule.fresh(slot, param)
        return opt_state

    def update(
        self,
        grads: Mapping[str, Tensor],
        opt_state: Mapping[str, Mapping[str, Tensor]],
        params: Mapping[str, Tensor],
        value: Value = number,
    ) -> tuple[dict[str, Tensor], OptState]:
        """Moves every parameter that has a gradient; see `Optimizer.update`.

        Raises:
            KeyError: a gradient without a parameter, or a parameter that `opt_state` does not know.
        """
        new_params = dict(params)
        new_opt_state = {slot: dict(leaves) for slot, leaves in opt_state.items()}
        for cell in cells(cast(Rule, self), tuple(grads)):
            moved, slots = cell.rule.move(*_gathered(cell, grads, opt_state, params), value)
            new_params.update(zip(cell.names, moved, strict=True))
            for slot, leaves in slots.items():
                new_opt_state[slot].update(zip(cell.names, leaves, strict=True))
        return new_params, new_opt_state

    def fresh(self, slot: str, param: Tensor) -> Tensor:
        """What a slot starts from: a count of steps, 0-d float32, or zeros like the parameter."""
        if slot == "step":
            return torch.zeros((), dtype=torch.float32, device=param.device)
        return torch.zeros_like(param, requires_grad=False)


@functools.lru_cache(maxsize=256)
def cells(rule: Rule, names: tuple[str, ...]) -> tuple[Cell, ...]:
    """Split parameter names by the first group whose pattern they match; the rest keeps the rule's options.

    A cell's rule is the optimizer itself with the group's options in place, and without groups. Groups of
    equal options share a cell, and empty cells are left out.
    """
    members: dict[Rule, list[str]] = {}
    rules = [(pattern, _overridden(rule, options)) for pattern, options in rule.groups]
    rest = _overridden(rule, ())
    for name in names:
        own = next((grouped for pattern, grouped in rules if fnmatchcase(name, pattern)), rest)
        members.setdefault(own, []).append(name)
    return tuple(Cell(own, tuple(found), own.slots) for own, found in members.items())


# Checks, made when an optimizer is built.


def checked_groups(rule: Any, groups: Mapping[str, Mapping[str, Any]] | Groups) -> Groups:
    """Groups as sorted tuples, with every option checked as the optimizer's own would be.

    Args:
        rule: the optimizer under construction, its own settings checked already.
        groups: pattern -> options, in the order in which patterns are tried; a mapping or pairs.

    Raises:
        TypeError: no mapping of mappings, or an option that the optimizer does not have.
        TypeError, ValueError: an option's value is wrong, alone or beside the optimizer's other settings.
    """
    valid = [field.name for field in dataclasses.fields(rule) if field.name != "groups"]
    checked = []
    for pattern, options in _pairs(groups, "groups"):
        where = f"{type(rule).__name__.lower()}: groups[{pattern!r}]"
        if not isinstance(pattern, str):
            raise TypeError(f"{where}: expected a pattern of parameter names, such as '*.bias', got {shown(pattern)}")
        options = dict(_pairs(options, where))
        unknown = [key for key in options if key not in valid]
        if unknown:
            raise TypeError(f"{where}: no option {unknown[0]!r}; the options are {', '.join(valid)}")
        try:
            grouped = _overridden(rule, tuple(options.items()))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error
        checked.append((pattern, tuple((key, getattr(grouped, key)) for key in sorted(options))))
    return tuple(checked)


def checked_scalar(scalar: Scalar, where: str, *, below: float = math.inf) -> Scalar:
    """A scalar whose value, as far as it is known now, lies in [0, below); plain numbers become floats.

    Of a product, the numbers and the hparams' defaults are known. What a schedule brings is not checked.

    Raises:
        TypeError: no scalar, tensors included.
        ValueError: a known value out of range, or not finite.
    """
    if isinstance(scalar, Tensor):
        raise TypeError(
            f"{where}: expected a number, got a tensor of shape {tuple(scalar.shape)}; an optimizer holds "
            "no tensors: name the scalar with hparam('lr', 0.1), and its tensor lives in state.hparams"
        )
    if isinstance(scalar, bool) or not isinstance(scalar, numbers.Real | Hparam | Product | Schedule):
        raise TypeError(f"{where}: expected a number, an hparam, a schedule or a product of them, got {shown(scalar)}")
    factors = scalar.factors if isinstance(scalar, Product) else (scalar,)
    known = math.prod(number(factor) for factor in factors if not isinstance(factor, Schedule))
    bound = math.inf if any(isinstance(factor, Schedule) for factor in factors) else below
    if not 0 <= known < bound:  # also refuses nan, and inf, as no bound exceeds it
        upper = "" if below == math.inf else f" and < {below:g}"
        raise ValueError(f"{where}: expected a finite number >= 0{upper}, got {shown(scalar)}")
    return float(scalar) if isinstance(scalar, numbers.Real) else scalar


# Helpers of the rules.


def read(scalar: Scalar, value: Value) -> float | Tensor:
    """A setting's value now; plain numbers, floats since their check, need no reading."""
    return scalar if type(scalar) is float else value(scalar)


def wide_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """The dtype for factors derived from a step count: float64 beside float64 parameters, else float32."""
    return torch.float64 if any(param.dtype is torch.float64 for param in params) else torch.float32


def _gathered(
    cell: Cell,
    grads: Mapping[str, Tensor],
    opt_state: Mapping[str, Mapping[str, Tensor]],
    params: Mapping[str, Tensor],
) -> tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]]]:
    """A cell's gradients (in its parameters' dtypes), parameters and slots as lists."""
    names = cell.names
    try:
        cell_params = [params[name] for name in names]
        slots = {slot: [opt_state[slot][name] for name in names] for slot in cell.slots}
    except KeyError:
        raise KeyError(_missing(cell, opt_state, params)) from None
    cell_grads = [grads[name] for name in names]
    # Gradients accumulated in another precision must not promote what they move.
    cell_grads = [
        grad if grad.dtype is param.dtype else grad.to(param.dtype)
        for grad, param in zip(cell_grads, cell_params, strict=True)
    ]
    return cell_grads, cell_params, slots


def _missing(cell: Cell, opt_state: Mapping[str, Mapping[str, Tensor]], params: Mapping[str, Tensor]) -> str:
    where = type(cell.rule).__name__.lower()
    for name in cell.names:
        if name not in params:
            return f"{where}: a gradient came for {name!r}, which is not among the {len(params)} parameters"
        for slot in cell.slots:
            if name not in opt_state.get(slot, {}):
                return (
                    f"{where}: opt_state[{slot!r}] holds nothing for parameter {name!r}; "
                    "opt_state must come from this optimizer's init(params), of the same settings and names"
                )
    raise AssertionError("nothing is missing")  # pragma: no cover


def _overridden(rule: Any, options: Iterable[tuple[str, Any]]) -> Any:
    return dataclasses.replace(rule, **{**dict(options), "groups": ()})


def _pairs(mapping: Any, where: str) -> list[tuple[Any, Any]]:
    try:
        return [(key, item) for key, item in (mapping.items() if isinstance(mapping, Mapping) else mapping)]
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: expected a mapping, such as groups={{'*.bias': {{'weight_decay': 0.0}}}}, got {shown(mapping)}"
        ) from None
