"""One of several states, chosen element by element, where what is chosen is a tensor."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from purecompose import tree
from purecompose.batch.fields import with_members
from purecompose.core.state import State
from purecompose.core.values import TENSOR_FIELDS
from purecompose.errors import FormError
from purecompose.losses.evaluation import with_weights
from purecompose.losses.targets import Mixture, per_row


def selected(name: str, masks: list[Tensor], results: list[State], start: State) -> State:
    """Return the state whose values are those of the result whose mask is true, or of the start if none is."""
    by_example = masks[0].ndim > 0
    changes = {}
    for field in TENSOR_FIELDS:
        values, old = [getattr(result, field) for result in results], getattr(start, field)
        if all(value is old for value in values):
            continue
        if by_example and field not in ("batch", "slots", "metrics"):
            raise ValueError(f"{name}: per_example=True: expected a method that changes the batch only, not {field}")
        if field == "batch":
            *values, old = with_weights([*values, old], start.context.target_field)
        choose = _chooser(name, f"state.{field}", masks)
        is_by_key = field in ("slots", "metrics")
        changes[field] = _by_key(choose, values, old) if is_by_key else choose([*values, old])
    return start.replace(**changes)


def _by_key(choose: Callable[[list[Any]], Any], values: list[dict[str, Any]], old: dict[str, Any]) -> dict[str, Any]:
    """Choose among dicts key by key; a key that one of the methods adds or removes is added or removed."""
    removed = {key for key in old if any(key not in value for value in values)}
    kept = {key: None for value in [old, *values] for key in value if key not in removed}
    every_value = [*values, old]
    made = {key: next(value[key] for value in every_value if key in value) for key in kept}
    return {key: choose([value.get(key, made[key]) for value in every_value]) for key in kept}


def _chooser(name: str, where: str, masks: list[Tensor]) -> Callable[[list[Any]], Any]:
    """Return a function of one value for each mask, and one more for where no mask is true."""

    def leaf(*values: Any) -> Any:
        if all(value is values[0] for value in values):
            return values[0]
        if any(isinstance(value, Mixture) for value in values) or _are_targets(values):
            mixtures = [Mixture.of(value) for value in values]
            if len({targets.shape for mixture in mixtures for targets in mixture.targets}) > 1:
                return _either(mixtures, masks)
            num, by_loss = max(len(one.weights) for one in mixtures), any(one.interpolate_loss for one in mixtures)
            return tree.map(leaf, *[mixture.extended(num, by_loss) for mixture in mixtures])
        if len({type(value) for value in values}) == 1 and not isinstance(values[0], Tensor):
            members = [tree.members(value) for value in values]  # of dataclasses and objects
            if all(members):
                return with_members(values[0], choose(members))
        if not all(isinstance(value, Tensor) and value.shape == values[0].shape for value in values):
            shapes = " or ".join(dict.fromkeys(_words(value) for value in values))
            raise FormError(
                f"{name}: {where} is {shapes}, by what is chosen: expected methods that keep shapes and structure, or, "
                "outside of the gradient, host=True, which chooses on the host, where they may differ"
            )
        result = values[-1]
        for mask, value in zip(masks[::-1], values[-2::-1], strict=True):
            if mask.ndim and not (value.ndim and len(value) == len(mask)):
                raise ValueError(
                    f"{name}: per_example=True: {where}: expected a tensor with {len(mask)} examples in its first "
                    f"dimension, got {_words(value)}"
                )
            result = torch.where(per_row(mask, value) if mask.ndim else mask, value, result)
        return result

    def choose(values: list[Any]) -> Any:
        try:
            return tree.map(leaf, *values, is_leaf=lambda node: isinstance(node, Mixture))
        except (FormError, TypeError, ValueError) as error:
            if str(error).startswith(name):
                raise
            raise FormError(f"{name}: {where} has another structure, by what is chosen; use host=True") from error

    return choose


def _are_targets(values: Sequence[Any]) -> bool:
    """Return whether values are targets in two forms: class indices (N, ...) and dense (N, C, ...)."""
    forms = {(value.ndim, value.is_floating_point()) for value in values if isinstance(value, Tensor)}
    low, high = min(forms, default=(0, True)), max(forms, default=(0, True))
    return len(forms) == 2 and low == (high[0] - 1, False) and low[0] > 0


def _either(mixtures: Sequence[Mixture], masks: Sequence[Tensor]) -> Mixture:
    """Return all terms of several mixtures, in which those of the mixtures that are not chosen have weight 0."""
    chosen = [*masks, ~torch.stack(list(masks)).any(0)]
    return Mixture(
        tuple(targets for mixture in mixtures for targets in mixture.targets),
        tuple(weight * mask for mixture, mask in zip(mixtures, chosen, strict=True) for weight in mixture.weights),
        any(mixture.interpolate_loss for mixture in mixtures),
        mixtures[0].is_weighted,
    )


def _words(value: Any) -> str:
    return tree.describe(value, with_device=False) if isinstance(value, Tensor) else type(value).__name__
