"""Label smoothing: takes a share of each target's weight and spreads it over all classes."""

import torch
from torch import Tensor

from purecompose import batch as batches
from purecompose._support.checks import check_number
from purecompose.algorithms._parts.checks import check_can_write, check_reads_targets, check_scalar, given_fields
from purecompose.core.algorithm import Algorithm, factory
from purecompose.core.state import State
from purecompose.losses.targets import Mixture, has_index_targets, one_hot, wide_dtype
from purecompose.schedule import Scalar
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


__all__ = ["label_smoothing", "smooth_labels"]

_HINT = "it is the share spread over all classes; 0.1 is common, 0 switches label smoothing off"


def smooth_labels(
    logits: Tensor, targets: Tensor, smoothing: float | Tensor = 0.1, *, ignore_index: int | None = None
) -> Tensor:
    """Smooth class targets.

    Args:
        logits: (N, C, ...), C at least 2; only shape, dtype and device are used.
        targets: Indices (N, ...), of an integer dtype, or dense (N, C, ...).
        smoothing: The share spread, in [0, 1]; a tensor's value (0-d) is not checked, and gradients flow to
            it.
        ignore_index: An index to ignore besides the negative ones.

    Returns:
        (N, C, ...), float32, or float64 where logits or dense targets are. Positions to ignore are rows of
        zeros.

    Raises:
        TypeError: Not tensors.
        ValueError: `smoothing` out of range, shapes that do not fit, index targets of no integer dtype, or
            fewer than two classes. An index of C or more raises torch's own error.

    Example:
        >>> smooth_labels(torch.zeros(2, 4), torch.tensor([1, -100]), 0.5).tolist()
        [[0.125, 0.625, 0.125, 0.125], [0.0, 0.0, 0.0, 0.0]]
    """
    if not isinstance(smoothing, Tensor):
        check_number(smoothing, "smooth_labels: smoothing", 0, 1, hint=_HINT)
    dense = _dense(logits, targets, ignore_index)
    # A dense row of zeros is the form in which the loss recognises what to leave out.
    is_counted = dense.any(dim=1, keepdim=True)
    return torch.where(is_counted, (1 - smoothing) * dense + smoothing / dense.shape[1], dense)


@factory
def label_smoothing(
    smoothing: Scalar = 0.1, *, name: str = "label_smoothing", target_field: batches.Field | None = None
) -> Algorithm:
    """Spread a share of each target over all classes.

        y' = (1 - a) y + a / C

    for the loss only: before it the targets are replaced by dense ones, after it the originals are back.

    It is affine in y, so it acts on each term of a mixture and gives what smoothing the mixed target would give.
    Positions to ignore (negative indices, the loss's `ignore_index`, dense rows of zeros) stay rows of zeros.

    Events: BEFORE_LOSS, AFTER_LOSS (and INIT, to check the loss). Reads `outputs` (their shape); replaces the batch's
    target, and keeps the original target in `slots[name]` between the two events.

    Args:
        smoothing: The share of each target that is spread over all classes, in [0, 1]. The number 0 never
            matches. An `hparam` or a schedule may be given: gradients flow to an hparam, members of a population
            may differ in it, and one of 0 acts, since it has a slope there. Its default is checked; what becomes
            of it later is not.
        name: Names its slot, which is there between BEFORE_LOSS and AFTER_LOSS only.
        target_field: Names the batch's target; by default the state's own.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range, or a read-only field. At INIT:
            a loss that the model computes itself, or such a field of the state's. In the step: as `smooth_labels`.

    Example:
        >>> label_smoothing(0.1)
        label_smoothing(smoothing=0.1)
        >>> label_smoothing(0.0).match
        never

    References:
        Christian Szegedy, Vincent Vanhoucke, Sergey Ioffe, Jonathon Shlens, Zbigniew Wojna: Rethinking the
        Inception Architecture for Computer Vision. CVPR 2016. https://arxiv.org/abs/1512.00567
    """
    check_scalar(smoothing, "label_smoothing: smoothing", 0, 1, hint=_HINT)
    fields = given_fields(writes=("target_field",), target_field=target_field)

    def apply(event: Event, state: State) -> State:
        field = fields.get("target_field", state.context.target_field)
        if event is Event.INIT:
            check_reads_targets(name, state.context.loss)
            check_can_write(field, "target_field")
            return state
        if event is Event.AFTER_LOSS:
            slots = {slot: value for slot, value in state.slots.items() if slot != name}
            return state.replace(batch=batches.put(state.batch, field, state.slots[name]), slots=slots)
        targets = batches.get(state.batch, field)
        smoothed = _smooth_terms(state, targets, state.scalar(smoothing))
        return state.replace(batch=batches.put(state.batch, field, smoothed), slots={**state.slots, name: targets})

    is_neutral = isinstance(smoothing, (int, float)) and smoothing == 0
    return Algorithm(
        name,
        NEVER if is_neutral else on(Event.INIT, Event.BEFORE_LOSS, Event.AFTER_LOSS),
        apply,
        config={"smoothing": smoothing, **fields},
    )


def _smooth_terms(state: State, targets: Tensor | Mixture, smoothing: float | Tensor) -> Tensor | Mixture:
    ignore_index = getattr(state.context.loss, "ignore_index", None)

    def smooth(term: Tensor) -> Tensor:
        return smooth_labels(state.outputs, term, smoothing, ignore_index=ignore_index)

    return targets.map(smooth) if isinstance(targets, Mixture) else smooth(targets)


def _dense(logits: Tensor, targets: Tensor, ignore_index: int | None) -> Tensor:
    if has_index_targets(logits, targets):
        return one_hot(targets, logits, ignore_index=ignore_index)
    if logits.ndim < 2 or logits.shape[1] < 2:
        raise ValueError(
            f"label smoothing spreads targets over the classes in dim 1, at least two, got logits of shape "
            f"{tuple(logits.shape)}; for one logit per example smooth its targets towards 1/2 yourself"
        )
    wide = wide_dtype(logits)
    return targets.to(torch.promote_types(targets.dtype, wide) if targets.is_floating_point() else wide)
