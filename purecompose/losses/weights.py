"""Weights of examples: a field of the batch, which the field of the targets is joined with.

A target with weights is a `Mixture.weighted`. So whatever mixes, smooths, selects or cuts targets does so with their
weights, and the mean of the losses divides by the sum of the weights of a slice, a process's part or a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from purecompose import batch as batches
from purecompose._support.checks import shown
from purecompose.losses.evaluation import check_loss
from purecompose.losses.from_model import ModelLoss
from purecompose.losses.targets import Mixture
from purecompose.losses.terms import couples_examples, has_denominators


@dataclass(frozen=True)
class WeightedField:
    """The getter and the setter of the field of targets, if another field has a weight for each example.

    It returns a `Mixture.weighted`, which mixing methods put back in place of the target.
    """

    target: batches.Field
    weight: batches.Field

    def __call__(self, batch: Any, *new: Any) -> Any:
        if new:
            return batches.put(batch, self.target, new[0])
        targets = batches.get(batch, self.target)
        if not isinstance(targets, Mixture):
            return Mixture.weighted(targets, batches.get(batch, self.weight))
        if not targets.is_weighted:
            raise ValueError(
                f"targets in the field {self.target!r} were mixed without the weights of their examples: leave out "
                "target_field= of the method, which is by default that of the state, with weight_field"
            )
        return targets


def weighted_field(loss: Callable[..., Any], input_field: Any, target_field: Any, weight_field: Any) -> Any:
    """Return the field of targets with weights, a pair of getter and setter.

    Raises:
        TypeError, ValueError: A field is not one, there is no target besides the input, or the loss has no losses of
            single examples.
    """
    batches.check_field(weight_field, "weight_field")
    if target_field is None or target_field == (0 if input_field is None else input_field):
        raise ValueError(
            f"weight_field={weight_field!r}: expected a target besides the input, got target_field={target_field!r}: "
            "give the batch a member for it"
        )
    batches.check_field(target_field, "target_field")
    if isinstance(loss, ModelLoss) or couples_examples(loss) or has_denominators(loss):
        raise TypeError(
            f"weight_field={weight_field!r}: the loss {shown(loss)} has no loss of each example, which a weight could "
            "multiply: weigh them in the loss, whose targets may be several members, target_field=['label', 'weight']"
        )
    check_loss(loss, per_example=True)
    field = WeightedField(target_field, weight_field)
    return field, field


def has_weights(field: Any) -> bool:
    """Return whether a field of targets has weights of examples."""
    return isinstance(field, tuple) and isinstance(field[0], WeightedField)


def with_weights(given: list[Any], field: Any) -> list[Any]:
    """Return forms of a batch whose targets all have the weights of examples, if those of one have been mixed."""
    if not has_weights(field):
        return given
    targets = [batches.get(batch, field[0].target) for batch in given]
    if not any(isinstance(target, Mixture) for target in targets):
        return given
    return [batches.put(batch, field, batches.get(batch, field)) for batch in given]


def lacks_weights(batch: Any, field: Any) -> bool:
    """Return whether a field of targets has weights of examples, and a batch has not."""
    if not has_weights(field):
        return False
    try:
        batches.get(batch, field[0].weight)
    except KeyError:
        return True
    return False


def without_weights(field: Any) -> Any:
    """Return a field of targets, without the weights of examples if it has any."""
    return field[0].target if has_weights(field) else field
