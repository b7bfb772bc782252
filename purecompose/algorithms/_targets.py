"""Methods that mix targets: MixUp, with those of other examples, and label smoothing, with all classes."""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose import batch as batches, losses, random, tree
from purecompose.algorithms._parts import WrittenField, check_reads_targets, chosen_fields, needed_rng
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.losses.functions import MeanSquaredError
from purecompose.losses.targets import Mixture, class_scores, has_index_targets, one_hot, per_row, wide_dtype
from purecompose.losses.terms import for_mixtures, ignore_index_of
from purecompose.random.distributions import beta_number
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


ALPHA = Within(0, hint="0 switches mixup off, 0.2 suits ImageNet, 1 is uniform mixing")
SHARE = Within(0, 1, hint="it is the share of the partner")


@checked
def mixup_batch(
    key: Tensor | random.Rng | None,
    inputs: Tensor,
    targets: Tensor | Mixture,
    *,
    alpha: Annotated[float | Tensor, ALPHA] = 0.2,
    mixing: Annotated[float | Tensor | None, SHARE] = None,
    indices: Tensor | None = None,
    per_example: bool = False,
    interpolate_loss: bool = False,
) -> tuple[Tensor, Mixture]:
    """Mix each example of a batch with a partner.

    Args:
        key: A random key; may be `None` if `mixing` and `indices` are both given.
        inputs: (N, ...). Integers and bools are promoted to the default float dtype.
        targets: (N, ...), indices or dense, or a `Mixture`; the result has twice as many terms.
        alpha: See `mixup`; 0 does not mix. The value of a (0-d) tensor is not checked.
        mixing: The share of the partner in [0, 1], used instead of a draw: a number, or a tensor, 0-d or (N,), which is
            not checked.
        indices: (N,), int64, the partner of each example, used instead of a random order.
        per_example, interpolate_loss: See `mixup`.

    Returns:
        The mixed inputs, of a floating dtype, and a `Mixture` whose second half of terms are the partners' targets,
        with weight `mixing`.

    Example:
        >>> from purecompose.random import key
        >>> inputs, targets = torch.tensor([[0.0], [4.0]]), torch.tensor([0, 1])
        >>> mixed, mixture = mixup_batch(None, inputs, targets, mixing=0.25, indices=torch.tensor([1, 0]))
        >>> mixed.tolist()
        [[1.0], [3.0]]
        >>> mixture.soft(torch.zeros(2, 2)).tolist()
        [[0.75, 0.25], [0.25, 0.75]]
        >>> mixup_batch(key(0), inputs, targets)[0].shape
        torch.Size([2, 1])
    """
    _check_inputs(inputs)
    num = inputs.shape[0]
    if isinstance(mixing, Tensor):
        mixing = mixing.to(inputs.device)
    if mixing is None or indices is None:
        rng = needed_rng(key, "mixup_batch", "when mixing or indices are left out")
        if mixing is None:
            mixing = draw_share(rng.named("mixing"), alpha, num if per_example else None)
            mixing = torch.minimum(mixing, 1 - mixing) if isinstance(mixing, Tensor) else min(mixing, 1 - mixing)
        indices = random.permutation(rng.named("permutation"), num) if indices is None else indices
    partners = indices if indices.device == inputs.device else indices.to(inputs.device)
    # Build the mixture first: it rejects partners of the wrong shape with a message about shapes.
    mixture = mixture_for(inputs, targets, "mixup_batch").mixed_with(partners, mixing, interpolate_loss)
    return _mix(inputs, partners, mixing), mixture


@factory
def mixup(
    alpha: Annotated[Scalar, ALPHA] = 0.2,
    *,
    interpolate_loss: bool = False,
    per_example: bool = False,
    name: str = "mixup",
    input_field: WrittenField = None,
    target_field: WrittenField = None,
) -> Algorithm:
    """Train on mixtures of pairs of examples.

        z ~ Beta(alpha, alpha),   t = min(z, 1 - z)
        X' = (1 - t) X + t X[pi],     y' = (1 - t) y + t y[pi]

    with one random permutation pi per batch, and one t per batch or, with `per_example`, per example; t in [0, 1/2] is
    the share of the *partner*. The targets are kept in a `Mixture` of two terms until the loss stage resolves them: as
    soft targets or, with `interpolate_loss`, as (1 - t) loss(y) + t loss(y[pi]). Mixing happens before the batch is
    split.

    Events: AFTER_DATALOADER (and INIT, to check the loss). Reads and replaces: the batch's input and target.

    Args:
        alpha: Both parameters of the Beta distribution from which the partner's share is drawn, at least 0. With the
            number 0 the algorithm never matches. An `hparam` or a schedule may be given; no gradient flows to it.
        interpolate_loss: Mix the losses of the two targets instead of the targets, which is correct also for losses
            that are not linear in their targets. The loss must support the reduction "none".
        per_example: Draw a separate share for each example instead of one for the batch.
        name: Name of the algorithm and of its draws.
        input_field: Field of the batch with the input, one tensor; defaults to the state's input field.
        target_field: Field of the batch with the target; defaults to the state's target field.

    Raises:
        TypeError, ValueError: At INIT: there is no target, the model computes the loss itself, or `interpolate_loss` is
            set and the loss has no reduction. In the step: the inputs are not one tensor, or have a dtype of token ids,
            int32 or int64.

    Example:
        >>> mixup(0.2)
        mixup(alpha=0.2, interpolate_loss=False, per_example=False)
        >>> mixup(0).match
        never

    References:
        Hongyi Zhang et al.: mixup: Beyond Empirical Risk Minimization. ICLR 2018. https://arxiv.org/abs/1710.09412
    """

    mix = functools.partial(mixup_batch, per_example=per_example, interpolate_loss=interpolate_loss)
    return mixing(name, alpha, (input_field, target_field), _check_no_ids, mix, by_loss=interpolate_loss)


def mixing(
    name: str,
    alpha: Scalar,
    given: tuple[Any, Any],
    check: Callable[[str, Any], object],
    mix: Callable[..., tuple[Tensor, Any]],
    *,
    by_loss: bool,
) -> Algorithm:
    """Return a method that mixes pairs of examples, as `mix(rng, inputs, targets, alpha=alpha)` does.

    Args:
        given: The fields of the inputs and the targets, or `None` for the state's own.
        check: Function that is called with the name and the inputs, and raises if they cannot be mixed.
        by_loss: True if losses are mixed, and not targets.
    """

    def apply(event: Event, state: State) -> State:
        fields = chosen_fields(state, *given)
        if event is Event.INIT:
            _check_mixable(name, state, *fields, by_loss=by_loss)
            return state
        inputs, targets = (batches.get(state.batch, field) for field in fields)
        check(name, inputs)
        inputs, targets = mix(state.rng(name), inputs, targets, alpha=state.scalar(alpha))
        batch = batches.put(state.batch, fields[0], inputs)
        # The input of an autoencoder is its target, too: the mixed input.
        return state.replace(batch=batch if fields[1] == fields[0] else batches.put(batch, fields[1], targets))

    return Algorithm(
        name,
        NEVER if alpha == 0 else on(Event.INIT, Event.AFTER_DATALOADER),
        apply,
        traits=frozenset({Trait.MIXES_EXAMPLES}),
        runs_after=(Trait.AUGMENTS_EXAMPLES,),
    )


def _mix(inputs: Tensor, partners: Tensor, mixing: float | Tensor) -> Tensor:
    floating = inputs if inputs.is_floating_point() or inputs.is_complex() else inputs.to(torch.get_default_dtype())
    # In half precision the share would be rounded differently from the targets' weights.
    wide = floating.float() if floating.element_size() < 4 else floating
    share: Any = mixing
    if isinstance(mixing, Tensor):
        share = per_row(mixing.to(wide), wide) if mixing.ndim else mixing.to(wide)
    # lerp is exact for shares of 0 and 1 and for equal partners; the sum of two products is not.
    mixed = torch.lerp(wide, wide.index_select(0, partners), share)
    return mixed if wide is floating else mixed.to(floating.dtype)


def _check_inputs(inputs: Any) -> None:
    if not isinstance(inputs, Tensor) or not inputs.ndim:
        came = "a 0-d tensor" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise TypeError(
            f"mixup mixes one tensor (N, ...) of inputs, got {came}; select it with input_field (an index, a key or "
            "an accessor)"
        )


def _check_no_ids(name: str, inputs: Any) -> None:
    """Reject dtypes of token ids. Images are bytes or floats; `mixup_batch` accepts any integers."""
    if isinstance(inputs, Tensor) and inputs.dtype in (torch.int32, torch.int64):
        raise TypeError(
            f"{name}: the inputs are {tree.describe(inputs)}, as token ids are, which cannot be mixed: mix their "
            "embeddings inside the model with mixup_batch. If they are numbers and not ids, convert them to floats, "
            "inputs.float()"
        )


# Shared with CutMix


def draw_share(rng: random.Rng, alpha: float | Tensor, num: int | None) -> float | Tensor:
    """Return a draw from Beta(alpha, alpha), or 0 for an alpha of 0: a number where the host can read it, or float32.

    Args:
        alpha: The parameter, at least 0; the value of a (0-d) tensor is not checked.
        num: The number of examples with separate draws, (num,); `None` for one draw, 0-d.
    """
    if not isinstance(alpha, Tensor):
        if alpha == 0:
            return 0.0
        if num is None:
            return beta_number(rng, alpha, alpha)
    if num is None:
        share = random.beta(rng, alpha, alpha)
    else:
        share = random.beta(rng.per_example(torch.arange(num, device=rng.key.device)), alpha, alpha, (num,))
    # The draw is NaN for an alpha of 0, which a member of a population may have.
    return torch.where(alpha > 0, share, 0) if isinstance(alpha, Tensor) else share


def mixture_for(inputs: Tensor, targets: Tensor | Mixture, where: str) -> Mixture:
    mixture = Mixture.of(targets)
    num, num_targets = inputs.shape[0], mixture.weights[0].shape[0]
    if num_targets != num:
        raise ValueError(
            f"{where}: expected inputs and targets of the same length, one target per example in the first dim, got "
            f"inputs of {num} examples and targets of {num_targets}"
        )
    return mixture


def _check_mixable(
    name: str, state: State, input_field: batches.Field | None, target_field: batches.Field | None, *, by_loss: bool
) -> None:
    check_reads_targets(name, state.context.loss, target_field)
    losses.check_loss(for_mixtures(state.context.loss), per_example=by_loss)
    if target_field == input_field and by_loss:
        raise ValueError(
            f"{name}: interpolate_loss=True: expected a target besides the input, got the field {input_field!r} for "
            "both: the mixed input is its own target, so there are no two losses to mix"
        )


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
            "values: if they are weights of classes (one-hot), call it in a function of yours"
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
