"""The loss stage: a loss of plain, mixed or weighted targets, as a mean or per example.

A `Mixture` is resolved in one of two ways, which agree for cross entropy, since it is linear in its targets:

    soft targets          loss(outputs, sum_k w_k onehot(t_k))
    interpolated losses   sum_k w_k loss(outputs, t_k)

A target with weights of examples is a `Mixture.weighted`. So whatever mixes, smooths, selects or cuts targets does so
with their weights, and the mean of the losses divides by the sum of the weights of a slice, a part or a batch.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from purecompose import batch as batches
from purecompose._support.device import as_scalar
from purecompose._support.internals import without_modes
from purecompose._support.specs import shown
from purecompose.losses.from_model import ModelLoss
from purecompose.losses.functions import mean_of, reduced
from purecompose.losses.targets import Mixture, num_examples, per_row, wide_dtype
from purecompose.losses.terms import (
    counter_of,
    couples_examples,
    denominators_of,
    for_mixtures,
    has_denominators,
    ignore_index_of,
    num_terms,
)


def check_loss(loss_fn: object, *, per_example: bool = False) -> None:
    """Raise early if this is not a loss or, with `per_example`, if it cannot return losses per example.

    Args:
        loss_fn: What is used as a loss.
        per_example: Whether losses per example are needed.

    Raises:
        TypeError: `loss_fn` is not callable, is a class instead of an instance, or has no `reduction` parameter.
        ValueError: It returns a sum, or losses of examples, unless another reduction is requested.

    Example:
        >>> check_loss(torch.nn.functional.cross_entropy, per_example=True)
    """
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise TypeError(
            f'expected a loss, a callable (outputs, targets, reduction="mean"), such as losses.cross_entropy, got '
            f"{loss_fn!r} ({type(loss_fn).__name__}){'; make an instance of it' * isinstance(loss_fn, type)}"
        )
    if (reduction := _reduction_of(loss_fn)) in ("sum", "none"):
        raise ValueError(
            f"the loss {shown(loss_fn)} has reduction={reduction!r}: a step, its microbatches and evaluation take "
            "means over examples: leave it out, or write reduction='mean'"
        )
    if per_example and (isinstance(loss_fn, ModelLoss) or not _takes_reduction(loss_fn)):
        raise TypeError(
            f'expected a loss that gives losses per example for reduction="none", got {loss_fn!r}; use a function, '
            "such as torch.nn.functional.cross_entropy, in place of a module, or give yours a `reduction` parameter"
        )


def evaluate_loss(loss_fn: Callable[..., Any], outputs: Any, targets: Any, reduction: str = "mean") -> Tensor:
    """Return the loss of plain or mixed targets, without its parts; see `evaluate_parts`.

    Args:
        loss_fn: A loss, `(outputs, targets, reduction="mean")`.
        outputs: The network's outputs.
        targets: The batch's targets, or a `Mixture` of them.
        reduction: "mean", "sum" or "none".

    Example:
        >>> evaluate_loss(torch.nn.functional.mse_loss, torch.ones(2, 1), torch.zeros(2, 1)).item()
        1.0
    """
    return evaluate_parts(loss_fn, outputs, targets, reduction)[0]


def evaluate_parts(
    loss_fn: Callable[..., Any], outputs: Any, targets: Any, reduction: str = "mean"
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the loss of plain or mixed targets, which the loss stage differentiates, and its parts, which it logs.

    A loss that returns a tensor has no parts; one that returns `(loss, {"kl": kl, ...})` has those.

    A mixture of one term is used as its plain target, unless its examples have weights. Other mixtures become soft
    targets or, with `interpolate_loss`, a sum of the terms' losses per example, whose mean is over the positions the
    loss counts (see `purecompose.losses`), or their weights; such a sum has no parts. For "mean" the loss is called
    without `reduction`, so a plain function of (outputs, targets) suffices.

    Args:
        loss_fn: A loss, `(outputs, targets, reduction="mean")`.
        outputs: The network's outputs.
        targets: The batch's targets, or a `Mixture` of them.
        reduction: "mean", "sum" or "none".

    Raises:
        TypeError: The loss does not support the reduction (see `check_loss`), a mixture is given to a `ModelLoss`, or
            the loss returns neither a tensor nor a tensor with parts.

    Example:
        >>> vae = lambda outputs, targets: (outputs.mean(), {"kl": outputs.max()})
        >>> evaluate_parts(vae, torch.tensor([1.0, 3.0]), None)
        (tensor(2.), {'kl': tensor(3.)})
    """
    if not isinstance(targets, Mixture):
        return _call_loss(loss_fn, outputs, targets, reduction)
    if isinstance(loss_fn, ModelLoss):
        raise TypeError(
            "mixed targets cannot reach a loss that the model computed itself; use a loss of outputs and "
            "targets, such as losses.cross_entropy, or leave out the method that mixes"
        )
    loss_fn = for_mixtures(loss_fn)
    if len(targets.targets) == 1 and not targets.is_weighted:
        return _call_loss(loss_fn, outputs, targets.targets[0], reduction)
    if not targets.interpolate_loss:
        soft = targets.soft(outputs, ignore_index=ignore_index_of(loss_fn))
        return _call_loss(loss_fn, outputs, soft, reduction)
    losses = _interpolated_losses(loss_fn, outputs, targets)
    has_positions = hasattr(counter_of(loss_fn), "counted")
    if reduction == "mean" and (has_positions or targets.is_weighted):
        total = losses if has_positions else losses.reshape(len(losses), -1).mean(1)
        number = num_terms(loss_fn, outputs, targets)
        if targets.is_weighted:  # the dtype of the loss is not that of the weights
            number = as_scalar(number, total.dtype, total.device)
        return mean_of(total.sum(), number), {}
    return reduced(losses, reduction), {}


def metrics_of_parts(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts of a loss by the names under which they are logged, "loss/name".

    Args:
        parts: The parts of a loss, by name.

    Example:
        >>> metrics_of_parts({"kl": torch.tensor(0.5)})
        {'loss/kl': tensor(0.5000)}
    """
    return {f"loss/{name}": part for name, part in parts.items()}


def check_interpolation(loss_fn: Callable[..., Tensor], outputs: Any, targets: Any) -> None:
    """Raise if a mean over all losses, by which a `Mixture` interpolates them, is not the mean that the loss takes.

    It evaluates the loss again and waits for the device. A loss that reports what it counts is not examined.
    """
    if not isinstance(targets, Mixture) or not targets.interpolate_loss or hasattr(counter_of(loss_fn), "counted"):
        return
    for term in targets.targets:
        mean = evaluate_loss(loss_fn, outputs, term).double()
        over_all = evaluate_loss(loss_fn, outputs, term, "none").double().mean()
        if not torch.isclose(mean, over_all, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError(
                f'interpolate_loss=True averages the losses of {loss_fn!r} with reduction="none" over all positions, '
                f"which for the targets of the batch is {over_all.item():.6g}, but its own mean is {mean.item():.6g}: "
                "use losses.CrossEntropy, or give the loss a method counted(outputs, targets)"
            )


def check_pairs(fn: Callable[..., Any], outputs: Any, targets: Any, name: str = "") -> None:
    """Raise if a loss or metric compares each output with each target, as torch broadcasts (N, 1) and (N,).

    For made-up numbers, such a value stays the same if the examples of one tensor change places, and differs from the
    value for tensors of one shape. Only shapes that differ in dims of size 1 are examined.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.shape == targets.shape:
        return
    if [n for n in outputs.shape if n > 1] != [n for n in targets.shape if n > 1]:
        return

    def rows(by: int, shape: torch.Size | None = None) -> Any:
        pair = [_numbers_like(outputs), _numbers_like(targets)]
        flat = int(targets.ndim < outputs.ndim)
        pair[flat] = pair[flat].roll(by, 0)
        try:
            result = fn(*(pair if shape is None else [one.reshape(shape) for one in pair]))
            result = torch.atleast_1d(result[0] if isinstance(result, tuple) else result).double()
            return torch.tensor(result.reshape(len(result), -1).mean(1).tolist())
        except Exception:
            return None  # it takes other shapes or numbers, or has parameters without numbers

    def differ(*pair: Tensor) -> bool:
        return not torch.allclose(*pair, rtol=1e-4, equal_nan=True)

    with torch.no_grad(), warnings.catch_warnings(action="ignore"), without_modes():  # also while tracing
        value, moved = rows(0), rows(1)
        if value is None or moved is None or differ(value, moved):
            return
        found = ([rows(by, shape) for by in range(4)] for shape in (outputs.shape, targets.shape))
        own, *others = next((values for values in found if values[0] is not None), [value])
        compares_all = differ(value.mean(), own.mean()) and any(differ(own, one) for one in others)
    if compares_all:
        raise ValueError(
            f"{name or shown(fn)} compares each output with each target: outputs {tuple(outputs.shape)} and targets "
            f"{tuple(targets.shape)} were broadcast. Use `targets.view_as(outputs)`"
        )


def _numbers_like(tensor: Tensor) -> Tensor:
    """Return a tensor of different numbers in [0, 1), or of integers 0 and 1, by multiples of the golden ratio."""
    numbers = torch.arange(tensor.numel(), device=tensor.device) * 0.6180339887 % 1
    return (numbers if tensor.is_floating_point() else numbers * 2).to(tensor.dtype).reshape(tensor.shape)


def dense_advice(targets: Any) -> str:
    """Return a hint for an error of a loss if a method may have made its targets dense, which few losses take."""
    is_dense = isinstance(targets, Tensor) and targets.ndim > 1 and targets.is_floating_point()
    if not (is_dense or (isinstance(targets, Mixture) and not targets.interpolate_loss)):
        return ""
    return (
        "if a method such as label_smoothing or mixup made the targets dense, (N, C, ...) with rows of zeros for what "
        "does not count: losses.CrossEntropy(ignore_index=...) takes them; methods that mix also take "
        "interpolate_loss=True"
    )


def per_example(loss_fn: Callable[..., Tensor], outputs: Any, targets: Any) -> Tensor:
    """Return the loss of each example, (N,): the mean over its positions, or over those that the loss counts.

    An example in which nothing counts has loss 0.

    Args:
        loss_fn: A loss, `(outputs, targets, reduction="mean")`.
        outputs: The network's outputs.
        targets: The batch's targets, or a `Mixture` of them.

    Raises:
        TypeError: The loss has no `reduction` parameter.
        ValueError: The losses it returns for "none" have no leading dim of N.

    Example:
        >>> per_example(torch.nn.functional.mse_loss, torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1))
        tensor([1., 4.])
    """
    losses = evaluate_loss(loss_fn, outputs, targets, "none")
    _check_rows(loss_fn, losses, outputs, targets)
    if losses.ndim == 1:
        return losses
    counted = getattr(counter_of(loss_fn), "counted", None)
    if counted is None:
        return losses.flatten(1).mean(1)
    return losses.flatten(1).sum(1) / counted(outputs, targets).flatten(1).sum(1).clamp(min=1)


def _call_loss(
    loss_fn: Callable[..., Any], outputs: Any, targets: Any, reduction: str
) -> tuple[Tensor, Mapping[str, Tensor]]:
    if reduction == "mean" and has_denominators(loss_fn):
        result = loss_fn(outputs, targets, denominators=denominators_of(loss_fn, targets))
    elif reduction == "mean":
        result = loss_fn(outputs, targets)
    else:
        try:
            result = loss_fn(outputs, targets, reduction=reduction)
        except TypeError:
            # The signature is read only after a failure, because reading it costs as much as a small loss.
            check_loss(loss_fn, per_example=True)
            raise
    if isinstance(result, Tensor):
        return result, {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        loss, parts = result
        if isinstance(loss, Tensor) and all(isinstance(part, Tensor) and part.ndim == 0 for part in parts.values()):
            return loss, parts
    raise TypeError(
        f'expected a tensor, or a tensor and its parts, (loss, {{"kl": kl}}) with 0-d tensors, from the loss '
        f"{loss_fn!r}, got {shown(result)}"
    )


def _interpolated_losses(loss_fn: Callable[..., Tensor], outputs: Any, mixture: Mixture) -> Tensor:
    terms = list[Tensor]()
    for targets, weight in zip(mixture.targets, mixture.weights, strict=True):
        losses, _ = _call_loss(loss_fn, outputs, targets, "none")
        _check_rows(loss_fn, losses, outputs, targets)
        terms.append(per_row(weight.to(wide_dtype(losses)), losses) * losses)
    return sum(terms[1:], terms[0])


def _check_rows(loss_fn: object, losses: Tensor, outputs: Any, targets: Any) -> None:
    expected = num_examples(outputs, targets)
    if losses.ndim == 0 or losses.shape[0] != expected:
        raise ValueError(
            f'expected one loss for each of {expected} examples from {loss_fn!r} with reduction="none", got '
            f'shape {tuple(losses.shape)}; keep the batch dim first and reduce nothing for "none"'
        )


def _reduction_of(loss_fn: Any) -> Any:
    """Return the reduction of a loss that is called without one, if it is torch's or a function."""
    if isinstance(loss_fn, functools.partial):
        return loss_fn.keywords["reduction"] if "reduction" in loss_fn.keywords else _reduction_of(loss_fn.func)
    if type(loss_fn).__module__ == nn.modules.loss.__name__:
        return getattr(loss_fn, "reduction", "mean")
    parameters = inspect.signature(loss_fn).parameters if inspect.isfunction(loss_fn) else {}
    return parameters["reduction"].default if "reduction" in parameters else None


def _takes_reduction(loss_fn: Callable[..., Any]) -> bool:
    # A module's __call__ accepts any arguments, so the signature of its forward is read.
    inner = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(inner).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature: assume that they take it
        return True
    return "reduction" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


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
                "target_field= of the method"
            )
        return targets


def weighted_field(loss: Callable[..., Any], input_field: Any, target_field: Any, weight_field: Any) -> Any:
    """Return the field of targets with weights, a pair of getter and setter; without weights, that of the targets.

    Raises:
        TypeError, ValueError: A field is not one, there is no target besides the input, or the loss has no losses of
            single examples.
    """
    if weight_field is None:
        return target_field
    batches.check_field(weight_field, "weight_field")
    if target_field is None or target_field == (0 if input_field is None else input_field):
        raise ValueError(
            f"weight_field={weight_field!r}: expected a target besides the input, got target_field={target_field!r}: "
            "give the batch a member for it"
        )
    batches.check_field(target_field, "target_field")
    if isinstance(loss, ModelLoss) or couples_examples(loss) or has_denominators(loss):
        raise TypeError(
            f"weight_field={weight_field!r}: the loss {shown(loss)} has no loss of each example: weigh them in the "
            "loss, with target_field=['label', 'weight']"
        )
    check_loss(loss, per_example=True)
    field = WeightedField(target_field, weight_field)
    return field, field


def has_weights(field: Any) -> bool:
    return isinstance(field, tuple) and isinstance(field[0], WeightedField)


def with_weights(given: list[Any], field: Any) -> list[Any]:
    """Return forms of a batch whose targets all have the weights of examples, if those of one have been mixed."""
    if not has_weights(field):
        return given
    if not any(isinstance(batches.get(batch, field[0].target), Mixture) for batch in given):
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
