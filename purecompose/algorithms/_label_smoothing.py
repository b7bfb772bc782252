"""Label smoothing: takes a share of each target's weight and spreads it over all classes."""

import functools
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose import batch as batches
from purecompose.algorithms._parts.checks import WrittenField, check_reads_targets, chosen_fields
from purecompose.core.algorithm import Algorithm, factory
from purecompose.core.state import State
from purecompose.losses.functions import MeanSquaredError
from purecompose.losses.targets import Mixture, class_scores, has_index_targets, one_hot, wide_dtype
from purecompose.losses.terms import for_mixtures, ignore_index_of
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


SMOOTHING = Within(0, 1, hint="it is the share spread over all classes; 0.1 is common, 0 switches label smoothing off")


@checked
def smooth_labels(
    logits: Tensor,
    targets: Tensor,
    smoothing: Annotated[float | Tensor, SMOOTHING] = 0.1,
    *,
    ignore_index: int | None = None,
    ignore_zeros: bool = True,
) -> Tensor:
    """Smooth class targets.

    Args:
        logits: (N, C, ...), C at least 2; only shape, dtype and device are used.
        targets: Indices (N, ...), of an integer dtype, or dense (N, C, ...).
        smoothing: The share to spread, in [0, 1]; the value of a (0-d) tensor is not checked, and gradients flow to
            it.
        ignore_index: An index to ignore, besides negative ones.
        ignore_zeros: False for dense targets in which a row of zeros is an example without a label.

    Returns:
        Dense targets (N, C, ...), float64 if logits or dense targets are, otherwise float32. Ignored positions are
        rows of zeros.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: `smoothing` is out of range, shapes do not match, index targets do not have an integer dtype, or
            there are fewer than two classes.
        IndexError: On a CPU, an index is C or more.

    Example:
        >>> smooth_labels(torch.zeros(2, 4), torch.tensor([1, -100]), 0.5).tolist()
        [[0.125, 0.625, 0.125, 0.125], [0.0, 0.0, 0.0, 0.0]]
    """
    if has_index_targets(logits, targets):
        return _smoothed(one_hot(targets, logits, ignore_index=ignore_index), smoothing)
    dense = _dense(logits, targets)
    even = dense.any(dim=1, keepdim=True).to(dense.dtype) if ignore_zeros else torch.ones_like(dense[:, :1])
    return _smoothed(dense, smoothing, even / dense.shape[1])


@factory
def label_smoothing(
    smoothing: Annotated[Scalar, SMOOTHING] = 0.1, *, name: str = "label_smoothing", target_field: WrittenField = None
) -> Algorithm:
    """Spread a share of each target over all classes.

        y' = (1 - a) y + a / C

    Only the loss sees the smoothed targets: they replace the targets before it, and the originals are restored after
    it.

    Smoothing each term of a mixture is the same as smoothing the mixed target. Ignored positions become or stay rows of
    zeros: negative indices, the loss's `ignore_index`, and dense rows of zeros if the loss declares an `ignore_index`.

    Events: BEFORE_LOSS, AFTER_LOSS (and INIT, to check the loss). Reads `outputs` (their shape); replaces the batch's
    target, and keeps the original target in `slots[name]` between the two events.

    Args:
        smoothing: The share of each target that is spread over all classes, in [0, 1]. With the number 0 the algorithm
            never matches. An `hparam` or a schedule may be given: gradients flow to an hparam, and one of 0 still
            matches.
        name: Name of the algorithm and of its slot, which exists only between BEFORE_LOSS and AFTER_LOSS.
        target_field: Field of the batch with the target; defaults to the state's target field.

    Raises:
        TypeError, ValueError: At INIT: there is no target, the model computes the loss itself, or the loss is one of
            regression. In the step: see `smooth_labels`.

    Example:
        >>> label_smoothing(0.1)
        label_smoothing(smoothing=0.1)
        >>> label_smoothing(0.0).match
        never

    References:
        Christian Szegedy et al.: Rethinking the Inception Architecture for Computer Vision. CVPR 2016.
        https://arxiv.org/abs/1512.00567
    """

    def apply(event: Event, state: State) -> State:
        _, field = chosen_fields(state, None, target_field)
        if event is Event.INIT:
            check_reads_targets(name, state.context.loss, field)
            _check_has_classes(name, state.context.loss)
            return state
        if event is Event.AFTER_LOSS:
            slots = {slot: value for slot, value in state.slots.items() if slot != name}
            return state.replace(batch=batches.put(state.batch, field, state.slots[name]), slots=slots)
        targets = batches.get(state.batch, field)
        smoothed = _smooth_terms(state, targets, state.scalar(smoothing))
        return state.replace(batch=batches.put(state.batch, field, smoothed), slots={**state.slots, name: targets})

    match = NEVER if smoothing == 0 else on(Event.INIT, Event.BEFORE_LOSS, Event.AFTER_LOSS)
    return Algorithm(name, match, apply)


_REGRESSION = (
    *(MeanSquaredError, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.GaussianNLLLoss, nn.PoissonNLLLoss),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.gaussian_nll_loss, F.poisson_nll_loss),
)
"""Losses whose targets are values, not weights of classes."""


def _check_has_classes(name: str, loss_fn: Any) -> None:
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if loss_fn in _REGRESSION or isinstance(loss_fn, tuple(kind for kind in _REGRESSION if isinstance(kind, type))):
        raise TypeError(
            f"{name}: expected a loss of classes, such as losses.cross_entropy, got {loss_fn!r}, whose targets are "
            f"values: leave out {name}; or if they are weights of classes (one-hot), call it in a function of yours"
        )


def _smooth_terms(state: State, targets: Tensor | Mixture, smoothing: float | Tensor) -> Tensor | Mixture:
    loss_fn = state.context.loss
    ignore_index = ignore_index_of(loss_fn)

    def smooth(term: Tensor) -> Tensor:
        logits = class_scores(state.outputs, term)
        ignores = ignore_index is not None
        return smooth_labels(logits, term, smoothing, ignore_index=ignore_index, ignore_zeros=ignores)

    if not isinstance(targets, Mixture) and for_mixtures(loss_fn) is loss_fn:
        return smooth(targets)
    mixture = Mixture.of(targets)
    logits = class_scores(state.outputs, mixture.targets[0])
    if mixture.interpolate_loss or not has_index_targets(logits, mixture.targets[0]):
        return mixture.map(smooth)
    # The sum of the smoothed terms, by smoothing a single tensor.
    return Mixture.of(_smoothed(mixture.soft(logits, ignore_index=ignore_index), smoothing))


def _smoothed(dense: Tensor, smoothing: float | Tensor, even: Tensor | None = None) -> Tensor:
    """Return dense targets that are moved towards even ones, by default with the same sum in each row.

    The loss ignores positions whose row is zero: there the even target is zero, too.
    """
    even = dense.mean(dim=1, keepdim=True) if even is None else even
    return torch.lerp(dense, even, smoothing.to(dense) if isinstance(smoothing, Tensor) else smoothing)


def _dense(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.ndim < 2 or logits.shape[1] < 2:
        raise ValueError(
            f"label smoothing spreads targets over the classes in dim 1: expected at least two, got logits of shape "
            f"{tuple(logits.shape)}; for one logit per example smooth its targets towards 1/2 yourself"
        )
    wide = wide_dtype(logits)
    return targets.to(torch.promote_types(targets.dtype, wide) if targets.is_floating_point() else wide)
