"""Parameter groups, and the class from which optimizers get `init` and `update`.

An optimizer of this package is a `ByGroup`: it defines the tensors kept for each parameter (`slots`, `fresh`) and how a
list of parameters moves (`move`). The class derives `init` and `update` from it: it splits the parameters by group,
gathers the lists, and puts the results back under their names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from purecompose._support.device import divided, is_shard, local, may_be_shards, place_of, placed, whole
from purecompose._support.specs import shown
from purecompose.optim.lists import Moved, Slots, add, alike, is_plain, multiply, sign
from purecompose.optim.protocol import OptState, Value
from purecompose.schedule import Scalar, Schedule, number
from purecompose.schedule.declared import Check, Within, checks_of, declarations
from purecompose.schedule.scalar import factors_of


class Cell(NamedTuple):
    """The parameters that one set of options moves."""

    rule: ByGroup
    names: tuple[str, ...]
    slots: tuple[str, ...]


class ByGroup:
    """Base class of the library's optimizers: a rule (`slots`, `move`) applied group by group, starting from zeros."""

    groups: Any
    """`Groups`, or a mapping of them, which becomes tuples when the settings are checked."""
    is_elementwise: ClassVar[bool] = False
    """True if each element moves by itself, so that the rows of a process move without the others, and the real and
    imaginary parts of complex parameters as in `torch.optim`."""
    cautious_decay: Any = False
    """True if decoupled decay leaves out elements that move away from zero."""

    def __post_init__(self) -> None:
        for name, (check, is_float) in _checks_of(type(self)).items():
            value = check(getattr(self, name), f"{self.called}: {name}")
            object.__setattr__(self, name, as_float(value) if is_float else value)
        self.check()
        object.__setattr__(self, "groups", checked_groups(self, self.groups))

    @property
    def moves_rows(self) -> bool:
        """True if a row stays as it is where its gradient is zero, so that only looked-up rows of a table move."""
        return False

    def check(self) -> None:
        """Raise a `TypeError` or `ValueError` for settings that are valid one by one, but not together."""

    def __repr__(self) -> str:
        """Return the call that creates it, without settings that are equal to the defaults."""
        factory = vars(sys.modules[type(self).__module__]).get(self.called, type(self))
        defaults = inspect.signature(factory).parameters
        given = {**self.settings_by_name, "groups": self.groups}
        reported = {name: setting for name, setting in given.items() if setting != defaults[name].default}
        if "groups" in reported:
            reported["groups"] = {pattern: dict(options) for pattern, options in reported["groups"]}
        return f"{self.called}({', '.join(f'{name}={value!r}' for name, value in reported.items())})"

    @property
    def called(self) -> str:
        """The name of the function that creates it."""
        return type(self).__name__.lower()

    def init(self, params: Mapping[str, Tensor]) -> OptState:
        """Return zeros for every parameter, each slot in the order of `params`."""
        for pattern, _ in self.groups:
            match_or_raise(pattern, params, f"{self.called}: groups[{pattern!r}]")
        cell_of = {name: cell for cell in self._cells(params, params) for name in cell.names}
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
        """Move every parameter that has a gradient; see `Optimizer.update`."""
        new_params = dict(params)
        new_opt_state = {slot: dict(leaves) for slot, leaves in opt_state.items()}
        left = dict(grads)
        del grads  # A gradient that has been used, and that the caller does not hold, makes room for the new values.
        has_shards = may_be_shards() and any(map(is_shard, params.values()))
        has_complex = any(map(Tensor.is_complex, params.values()))
        for cell in self._cells(left, params):
            # Called directly: a function in between would hold gradients that `move` has dropped.
            move = cell.rule.move
            if cell.rule.cautious_decay:
                move = functools.partial(_moved_cautiously, cell.rule, move)
            if has_complex and cell.rule.is_elementwise:
                move = functools.partial(_moved_by_parts, move)
            if has_shards:
                move = functools.partial(_moved, cell.rule, move)
            for names in _portions(cell.names, left):
                moved, slots = move(*_gathered(cell, names, left, opt_state, params), value)
                if not has_shards and is_plain():
                    # Sums do not always keep the layout of filters, on which the speed of convolutions depends.
                    moved = alike(moved, [params[name] for name in names])
                new_params.update(zip(names, moved, strict=True))
                for slot, leaves in slots.items():
                    new_opt_state[slot].update(zip(names, leaves, strict=True))
                for name in names:
                    del left[name]
        return new_params, new_opt_state

    def fresh(self, slot: str, param: Tensor) -> Tensor:
        """Return a slot's initial value: a count of steps, 0-d float32, or zeros like the parameter."""
        if slot == "step":
            return torch.zeros((), dtype=torch.float32, device=param.device)
        return torch.zeros_like(param, requires_grad=False)

    @property
    def settings_by_name(self) -> dict[str, Any]:
        """The factory's arguments, with defaults and without the groups: the options that a group may override."""
        fields = dataclasses.fields(cast(Any, self))
        others = {"groups", "cautious_decay"} if getattr(self, "decay", None) == "coupled" else {"groups"}
        reported = [field.name for field in fields if field.init and field.repr and field.name not in others]
        return {name: getattr(self, name) for name in reported}

    @property
    def moving_decay(self) -> Scalar:
        """The weight decay that `move` applies; cautious decay comes after the move, on which it depends."""
        return 0.0 if self.cautious_decay else cast(Any, self).weight_decay

    def overridden(self, options: Mapping[str, Any]) -> Any:
        """Return the rule inside a group: with the group's options, and without groups."""
        return dataclasses.replace(cast(Any, self), **options, groups=())

    def _cells(self, names: Iterable[str], params: Mapping[str, Tensor]) -> tuple[Cell, ...]:
        names = tuple(names)
        if type(self).form is ByGroup.form:
            return cells(self, names)
        # A name without a parameter is reported later, when the lists are gathered.
        forms = tuple(self.form(params[name]) if name in params else None for name in names)
        return cells(self, names, forms)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the tensors kept for each parameter."""
        raise NotImplementedError

    def move(self, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
        """Return new parameters and new slots, in the order of the lists; all of them are new tensors."""
        raise NotImplementedError

    def form(self, param: Tensor) -> Hashable:
        """Return a value that distinguishes parameters that move in different ways; by default `None`."""
        del param
        return None

    def formed(self, form: Hashable) -> Any:
        """Return the rule for parameters of a form: itself, since all parameters move alike."""
        del form
        return self


@functools.cache
def _checks_of(kind: type) -> dict[str, tuple[Check, bool]]:
    """Return the checks of an optimizer's declared settings, and whether the setting is a float."""
    kinds = {name: getattr(hint, "__origin__", None) for name, hint in declarations(kind).items()}
    return {name: (check, kinds[name] is not int) for name, check in checks_of(kind).items()}


@functools.lru_cache(maxsize=256)
def cells(rule: ByGroup, names: tuple[str, ...], forms: tuple[Hashable, ...] | None = None) -> tuple[Cell, ...]:
    """Split parameter names by the first group whose pattern they match; the rest keep the rule's options.

    A cell's rule is the optimizer with the group's options, and without groups. Groups with equal options share a cell,
    and empty cells are left out.
    """
    members: dict[ByGroup, list[str]] = {}
    rules = [(pattern, rule.overridden(dict(options))) for pattern, options in rule.groups]
    rest = rule.overridden({})
    for i, name in enumerate(names):
        own = next((grouped for pattern, grouped in rules if fnmatchcase(name, pattern)), rest)
        members.setdefault(own if forms is None else own.formed(forms[i]), []).append(name)
    return tuple(Cell(own, tuple(found), own.slots) for own, found in members.items())


# Helpers for the rules.


def read(scalar: Scalar, value: Value) -> float | Tensor:
    """Return a setting's current value; plain numbers, which are floats after their check, are returned unchanged."""
    return scalar if type(scalar) is float else value(scalar)


def can_move(optimizer: Any, param: Tensor) -> bool:
    """Return whether an optimizer, or the one inside it, moves parameters of this form; all if it has no `can_move`."""
    own = getattr(optimizer, "can_move", None)
    return own(param) if own is not None else not hasattr(optimizer, "inner") or can_move(optimizer.inner, param)


def wide_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype for factors derived from a step count: float64 for float64 parameters, else float32."""
    return torch.float64 if any(param.dtype is torch.float64 for param in params) else torch.float32


Decay: TypeAlias = Literal["coupled", "by rate", "by schedule"]
"""How the decay is applied: "coupled" adds it to the gradient; "by rate" subtracts it from the parameter, times the
learning rate; "by schedule" does so times only the learning rate's schedule."""


def decayed(
    how: Decay, grads: list[Tensor], params: list[Tensor], weight_decay: Scalar, lr: Scalar, value: Value
) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients and parameters with the decay applied; a decay that is the number 0 costs nothing.

    A parameter's decay is computed as p - factor * p rather than (1 - factor) * p: in float32, 1 - 1e-5 loses two
    of the factor's digits.
    """
    if weight_decay == 0.0:
        return grads, params
    if how == "coupled":
        return add(grads, params, read(weight_decay, value)), params
    return grads, add(params, params, -shrinkage(how, weight_decay, lr, value))


def shrinkage(how: Decay, weight_decay: Scalar, lr: Scalar, value: Value) -> float | Tensor:
    """Return the part of a parameter that decoupled decay subtracts; 0 if the decay is coupled."""
    if how == "coupled" or weight_decay == 0.0:
        return 0.0
    return read(weight_decay, value) * (read(lr, value) if how == "by rate" else progress(lr, value))


def decayed_cautiously(moved: list[Tensor], params: list[Tensor], shrinkage: float | Tensor) -> list[Tensor]:
    """Return moved parameters, less a share of the old ones where these did not move away from zero."""
    aligned = multiply(sign(params), add(params, moved, -1.0))
    shrunk = add(moved, params, -shrinkage)
    return [torch.where(x >= 0, new, old) for x, new, old in zip(aligned, shrunk, moved, strict=True)]


def progress(scalar: Scalar, value: Value) -> float | Tensor:
    """Return the product of a scalar's schedules, or 1 without schedules."""
    return math.prod((read(one, value) for one in factors_of(scalar) if isinstance(one, Schedule)), start=1.0)


_PORTION = 2**24
"""Number of bytes of gradients that are used at a time: a rule's temporary tensors take a few times as much."""


def _portions(names: tuple[str, ...], grads: Mapping[str, Tensor]) -> Iterable[Sequence[str]]:
    """Divide the names into portions of bounded size; tensors that exceed it come first, while most memory is free."""
    sizes = {name: grads[name].nbytes for name in names}
    if sum(sizes.values()) <= _PORTION:
        return (names,)
    portions: list[list[str]] = []
    room = 0
    for name in sorted(names, key=lambda name: sizes[name] <= _PORTION):
        if sizes[name] > room:
            portions.append([])
            room = _PORTION
        portions[-1].append(name)
        room -= sizes[name]
    return portions


def _gathered(
    cell: Cell,
    names: Sequence[str],
    grads: Mapping[str, Tensor],
    opt_state: Mapping[str, Mapping[str, Tensor]],
    params: Mapping[str, Tensor],
) -> tuple[list[Tensor], list[Tensor], Slots]:
    """Return gradients (in their parameters' dtypes), parameters and slots of a cell as lists."""
    try:
        cell_params = list(map(params.__getitem__, names))
        slots = {slot: list(map(opt_state[slot].__getitem__, names)) for slot in cell.slots}
    except KeyError as error:
        raise KeyError(
            f"{cell.rule.called}: {error.args[0]!r} is missing among the parameters or in opt_state, which must come "
            "from this optimizer's init(params), of the same settings and names"
        ) from None
    # Gradients accumulated in another precision must not promote the parameters.
    cell_grads = [
        grad if (grad := grads[name]).dtype is param.dtype else grad.to(param.dtype)
        for name, param in zip(names, cell_params, strict=True)
    ]
    return cell_grads, cell_params, slots


def _moved_cautiously(
    rule: Any, move: Any, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value
) -> Moved:
    moved, new = move(grads, params, slots, value)
    if rule.weight_decay == 0.0:
        return moved, new
    how: Any = getattr(rule, "decay", "by rate")
    return decayed_cautiously(moved, params, shrinkage(how, rule.weight_decay, rule.lr, value)), new


def _moved_by_parts(move: Any, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
    """Return what a rule's move does, with the real and imaginary parts of complex tensors as two real numbers."""

    def parts(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors]

    def whole(tensors: list[Tensor], before: list[Tensor]) -> list[Tensor]:
        return [torch.view_as_complex(x) if y.is_complex() else x for x, y in zip(tensors, before, strict=True)]

    moved, new = move(parts(grads), parts(params), {slot: parts(old) for slot, old in slots.items()}, value)
    return whole(moved, params), {slot: whole(tensors, slots[slot]) for slot, tensors in new.items()}


def _moved(rule: ByGroup, move: Any, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
    """Return what `ByGroup.move` does, also for tensors whose rows are divided among processes.

    Where elements move by themselves, each process moves its rows. Otherwise all processes put the tensors together and
    move all rows, and each keeps its own.
    """
    part, put_back = (local, placed) if rule.is_elementwise else (whole, divided)
    # A method's own gradient may be whole on every process.
    grads = [x if is_shard(x) else divided(x, place_of(y)) for x, y in zip(grads, params, strict=True)]
    parts = {slot: [*map(part, tensors)] for slot, tensors in slots.items()}
    moved, new = move([*map(part, grads)], [*map(part, params)], parts, value)

    def as_before(tensors: list[Tensor], before: list[Tensor]) -> list[Tensor]:
        return [put_back(x, place_of(y)) for x, y in zip(tensors, before, strict=True)]

    return as_before(moved, params), {slot: as_before(tensors, slots[slot]) for slot, tensors in new.items()}


# Settings, and the names that patterns match.


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


def matched_or_raise(
    patterns: Iterable[str], names: Iterable[str], where: str, kind: str = "parameter"
) -> frozenset[str]:
    """Return the names that one of the patterns matches; raise a `ValueError` for a pattern that matches none."""
    patterns, names = tuple(patterns), tuple(names)
    for pattern in patterns:
        match_or_raise(pattern, names, f"{where}: {pattern!r}", kind)
    return matched(patterns, names)


@functools.lru_cache(maxsize=256)
def matched(patterns: tuple[str, ...], names: tuple[str, ...]) -> frozenset[str]:
    """Return the names that a pattern matches (`fnmatch`, on the whole name); cached, as each step needs it."""
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def checked_groups(rule: Any, groups: Mapping[str, Mapping[str, Any]] | Groups) -> Groups:
    """Return groups as sorted tuples, with every option checked like the optimizer's own settings."""
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
