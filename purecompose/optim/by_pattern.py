"""Several optimizers, each for the parameters whose names match a pattern, and what any optimizer has to be."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, TypeAlias

from torch import Tensor, nn

from purecompose._support.specs import shown, suggests_keywords
from purecompose.optim.base import Rate, can_move, match_or_raise
from purecompose.optim.protocol import Optimizer, OptState, Value, check_optimizer
from purecompose.schedule import number
from purecompose.schedule.declared import Within, checked


# Pattern -> optimizer, as pairs so that it hashes.
Patterns: TypeAlias = tuple[tuple[str, Any], ...]


@suggests_keywords
def by_pattern(groups: Mapping[str, Optimizer] | Patterns, rest: Optimizer) -> ByPattern:
    """Return one optimizer that uses different optimizers for different parameters.

    A parameter is assigned to the first pattern that matches its name (`fnmatch`, on the whole name) and whose
    optimizer moves parameters of its form, as `muon` moves only matrices; all others are assigned to `rest`::

        by_pattern({"blocks.*": muon(0.02)}, adamw(3e-4))

    Each optimizer sees only its own parameters, and the patterns of its `groups` are matched against these. An
    hparam that several of them name is one number. If your own optimizer leaves some parameters to others, it needs a
    method `can_move(param) -> bool`.

    Args:
        groups: Pattern -> optimizer, in the order in which patterns are tried; a mapping or pairs.
        rest: The optimizer for all other parameters.

    Returns:
        A frozen, hashable optimizer. Its state is `{slot: {parameter name: tensor}}`, the union of the optimizers'
        states: a slot that two of them have, such as "step", contains the parameters of both.

    Raises:
        TypeError: The groups are not patterns with optimizers; from `init`, an optimizer's state has another form.
        ValueError: From `init`, a pattern matches no parameter, or none that its optimizer moves.

    Example:
        >>> import torch
        >>> from purecompose.optim import sgd
        >>> optimizer = by_pattern({"*.bias": sgd(1.0)}, sgd(0.5, momentum=0.9))
        >>> params = {"0.weight": torch.ones(2), "0.bias": torch.ones(2)}
        >>> params, opt_state = optimizer.update(params, optimizer.init(params), params)
        >>> params
        {'0.weight': tensor([0.5000, 0.5000]), '0.bias': tensor([0., 0.])}
        >>> opt_state
        {'momentum': {'0.weight': tensor([1., 1.])}}
    """
    # The class converts groups to tuples when it checks them.
    return ByPattern(groups, rest)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, repr=False)
class ByPattern:
    """Optimizer returned by `by_pattern`; see there."""

    groups: Patterns
    rest: Any

    def __repr__(self) -> str:
        return f"by_pattern({dict(self.groups)!r}, {self.rest!r})"

    def __post_init__(self) -> None:
        try:
            groups = tuple(self.groups.items() if isinstance(self.groups, Mapping) else map(tuple, self.groups))
            pairs = {pattern: optimizer for pattern, optimizer in groups}
        except (TypeError, ValueError):
            raise TypeError(
                "by_pattern: expected patterns with optimizers, such as {'blocks.*': muon(0.02)}, "
                f"got {shown(self.groups)}"
            ) from None
        for pattern, optimizer in pairs.items():
            if not isinstance(pattern, str):
                raise TypeError(
                    f"by_pattern: expected a pattern of parameter names, such as '*.bias', got {shown(pattern)}"
                )
            check_optimizer(optimizer, f"by_pattern: {pattern!r}")
        check_optimizer(self.rest, "by_pattern: rest")
        object.__setattr__(self, "groups", tuple(pairs.items()))

    def init(self, params: Mapping[str, Tensor]) -> OptState:
        """Return the states of all optimizers, each for its own parameters; see `Optimizer.init`."""
        parts = self.parts(params, params)
        for i, (pattern, optimizer) in enumerate(self.groups):
            where = f"by_pattern: {pattern!r}"
            match_or_raise(pattern, params, where)
            if i not in parts:
                raise ValueError(
                    f"{where}: {optimizer!r} gets no parameter: those of the pattern also match earlier patterns, "
                    "or have a form that this optimizer does not move"
                )
        found: dict[str, dict[str, Tensor]] = {}
        for i, names in parts.items():
            own = self.own(i).init({name: params[name] for name in names})
            _check_form(own, names, self.own(i))
            for slot, leaves in own.items():
                found.setdefault(slot, {}).update(leaves)
        return {slot: {name: leaves[name] for name in params if name in leaves} for slot, leaves in found.items()}

    def update(
        self,
        grads: Mapping[str, Tensor],
        opt_state: Mapping[str, Mapping[str, Tensor]],
        params: Mapping[str, Tensor],
        value: Value = number,
    ) -> tuple[dict[str, Tensor], OptState]:
        """Move every parameter that has a gradient by its optimizer; see `Optimizer.update`."""
        new_params = dict(params)
        new_opt_state = {slot: dict(leaves) for slot, leaves in opt_state.items()}
        left = dict(grads)
        del grads  # as in ByGroup.update
        for i, names in self.parts(left, params).items():
            moved, slots = self.own(i).update(
                {name: left.pop(name) for name in names},
                {
                    slot: own
                    for slot, leaves in opt_state.items()
                    if (own := {name: leaves[name] for name in names if name in leaves})
                },
                {name: params[name] for name in names if name in params},
                value,
            )
            new_params.update(moved)
            for slot, leaves in slots.items():
                new_opt_state[slot].update(leaves)
        return new_params, new_opt_state

    def parts(self, names: Iterable[str], params: Mapping[str, Tensor]) -> dict[int, list[str]]:
        """Return the names by their optimizer's number, in the order of the patterns; the last number is for `rest`."""
        names, parts = tuple(names), dict[int, list[str]]()
        for name, matching in zip(names, _matching(self.groups, names), strict=True):
            own = next(
                (i for i in matching if name in params and can_move(self.groups[i][1], params[name])), len(self.groups)
            )
            parts.setdefault(own, []).append(name)
        return parts

    def own(self, i: int) -> Any:
        """Return the optimizer of a number in `parts`."""
        return self.groups[i][1] if i < len(self.groups) else self.rest


@functools.lru_cache(maxsize=256)
def _matching(groups: Patterns, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the patterns that match, for each name."""
    return tuple(tuple(i for i, (pattern, _) in enumerate(groups) if fnmatchcase(name, pattern)) for name in names)


def _check_form(opt_state: Any, names: list[str], optimizer: Any) -> None:
    known = set(names)
    if not isinstance(opt_state, Mapping) or any(
        not isinstance(leaves, Mapping) or not known.issuperset(leaves) for leaves in opt_state.values()
    ):
        raise TypeError(
            f"by_pattern: expected a state of the form {{slot: {{parameter name: tensor}}}} from {optimizer!r}; "
            "states of another form cannot be combined"
        )


@checked
def layerwise(
    net: nn.Module, lr: Rate, decay: Annotated[float, Within(0, 1, above=True)], *, blocks: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return groups for fine-tuning, whose learning rates fall by a factor with every block from the head to the input.

    With L blocks, block i (from 0) has the learning rate lr * decay^(L - i). Parameters defined before the blocks
    (embeddings) have lr * decay^(L + 1). Those defined after them (the head) have no group: they train with the
    optimizer's own learning rate, which should be `lr`.

    Args:
        net: The network; only its names are read.
        lr: The learning rate of the head; it may be a schedule or an hparam.
        decay: The factor, in (0, 1]; 0.65 to 0.9 are common.
        blocks: The name of the module that contains the blocks, in order, such as "encoder.layer"; by default the
            `nn.ModuleList` or `nn.Sequential` with the most members.

    Returns:
        Groups for an optimizer, to which others may be added: `optim.adamw(lr, groups=layerwise(net, lr, 0.75))`.

    Raises:
        TypeError, ValueError: A setting is of the wrong kind or out of range, or the network has no such list.

    Example:
        >>> blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net = nn.ModuleDict({"embed": nn.Embedding(5, 2), "blocks": blocks})
        >>> layerwise(net, 1.0, 0.5)
        {'embed.weight': {'lr': 0.125}, 'blocks.0.*': {'lr': 0.25}, 'blocks.1.*': {'lr': 0.5}}

    References:
        Jeremy Howard, Sebastian Ruder: Universal Language Model Fine-tuning for Text Classification. ACL 2018.
        https://arxiv.org/abs/1801.06146
    """
    where = _blocks_of(net) if blocks is None else blocks
    num = len(list(net.get_submodule(where).children()))
    if num == 0:
        raise ValueError(f"layerwise: blocks={where!r}: expected a module that holds blocks, got one without children")
    prefix = f"{where}." if where else ""
    children = [name for name, _ in net.get_submodule(where).named_children()]
    before = []
    for name, _ in net.named_parameters():
        if name.startswith(prefix):
            break
        before.append(name)
    groups: dict[str, dict[str, Any]] = {name: {"lr": lr * decay ** (num + 1)} for name in before}
    return groups | {f"{prefix}{child}.*": {"lr": lr * decay ** (num - i)} for i, child in enumerate(children)}


def _blocks_of(net: nn.Module) -> str:
    lists = {
        name: len(module)
        for name, module in net.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and any(True for _ in module.parameters())
    }
    if not lists:
        raise ValueError(
            "layerwise: the network has no nn.ModuleList or nn.Sequential of blocks; name the module that holds them, "
            'as in blocks="encoder.layer"'
        )
    return max(lists, key=lambda name: lists[name])
