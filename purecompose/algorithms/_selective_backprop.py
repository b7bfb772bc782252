"""Selective backprop: trains on a part of each batch that contains more hard examples than easy ones."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose import batch as batches, losses, random, tree
from purecompose.algorithms._parts import Field, chosen_fields
from purecompose.algorithms.images.samples import whole_part
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.random.keys import as_rng
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, between, every, on


_MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}


_WINDOW_HINT = "start and end are fractions of the run"
Share: TypeAlias = Annotated[float, Within(0, 1, hint=_WINDOW_HINT)]
Keep: TypeAlias = Annotated[float, Within(0, 1, above=True, hint="it is the share of examples to keep; 1 keeps all")]
Shrink: TypeAlias = Annotated[float, Within(0, 1, above=True, hint="it shrinks images; 1 leaves them as they are")]
FullEvery: TypeAlias = Annotated[int, Within(0, hint="2 is for every other batch, 0 for no whole batches")]


@checked
def choose_by_loss(key: Tensor | random.Rng, example_losses: Tensor, *, keep: Keep = 0.5) -> Tensor:
    """Draw examples without replacement, preferring those with greater loss.

    The draw depends only on the order of the losses. Equal losses rank in the batch's order, NaN ranks lowest and +inf
    highest.

    Args:
        key: A random key.
        example_losses: (N,), N at least 1.
        keep: The share to keep, in (0, 1]; 1 returns all in random order.

    Returns:
        (max(1, int(keep * N)),), int64: positions in the batch, in the order in which they were drawn.

    Raises:
        TypeError, ValueError: `keep` out of range, no key, or losses of a shape other than (N,).

    Example:
        >>> from purecompose.random import key
        >>> choose_by_loss(key(0), torch.tensor([0.1, 3.0, 0.2, 2.0])).shape
        torch.Size([2])
    """
    if example_losses.ndim != 1 or not len(example_losses):
        raise ValueError(
            f"choose_by_loss: expected one loss for each example, (N,), got shape "
            f"{tuple(example_losses.shape)}; reduce over all other dims, as losses.per_example does"
        )
    num = len(example_losses)
    order = torch.sort(torch.where(example_losses.isnan(), -torch.inf, example_losses), stable=True).indices
    ranks = torch.arange(num, dtype=torch.float64, device=order.device)
    # Relative to the highest rank: for a small `keep`, the power of (r + 1/2) / N would underflow to 0 for all ranks.
    weights = ((ranks + 0.5) / (num - 0.5)) ** (1 / keep - 1)
    drawn = random.choice(as_rng(key, "choose_by_loss").named("choice"), num, max(1, whole_part(keep, num)), weights)
    return order.index_select(0, drawn.to(order.device))


@checked
def select_using_loss(
    key: Tensor | random.Rng,
    inputs: Any,
    targets: Any,
    forward_fn: Callable[[Any], Any],
    loss_fn: Callable[..., Tensor],
    *,
    keep: Keep = 0.5,
    scale_factor: Shrink = 1.0,
) -> tuple[Any, Any]:
    """Return the hard part of a batch: apply `choose_by_loss` to the losses of `forward_fn`.

    Args:
        key: A random key.
        inputs: (N, ...), or any tree of tensors with N rows each that `forward_fn` accepts.
        targets: (N, ...), a tree of such tensors or a `Mixture`, which `loss_fn` accepts.
        forward_fn: A function from inputs to outputs; called once, without gradients.
        loss_fn: A function `(outputs, targets, reduction="none")` that returns losses (N, ...).
        keep: The share to keep, in (0, 1].
        scale_factor: Factor in (0, 1] by which images (N, C, ...), with 1 to 3 dimensions after the channels, are
            shrunk for this forward pass only. The returned images have full size.

    Returns:
        The chosen rows of inputs and targets, in the order in which they were drawn.

    Example:
        >>> from purecompose.random import key
        >>> inputs, targets = torch.randn(8, 3), torch.arange(8) % 3
        >>> x, y = select_using_loss(key(0), inputs, targets, lambda x: x, losses.cross_entropy)
        >>> x.shape, y.shape
        (torch.Size([4, 3]), torch.Size([4]))
    """
    losses.check_loss(loss_fn, per_example=True)
    example_losses = partial(losses.per_example, loss_fn)
    ranking_losses = _ranking_losses(forward_fn, example_losses, inputs, targets, scale_factor)
    chosen = choose_by_loss(key, ranking_losses, keep=keep)
    num = len(ranking_losses)
    return batches.take(inputs, chosen, num), batches.take(targets, chosen, num)


@factory
def selective_backprop(
    start: Share = 0.5,
    end: Share = 0.9,
    keep: Keep = 0.5,
    *,
    scale_factor: Shrink = 1.0,
    full_every: FullEvery = 2,
    name: str = "selective_backprop",
    input_field: Field = None,
    target_field: Field = None,
) -> Algorithm:
    """Train on the harder part of each batch.

    A forward pass without gradients computes the loss of every example; several processes compute a part each. Out of
    N examples

        k = max(1, int(keep N))

    are drawn without replacement. The probability of the example of rank r (0 for the least loss) is

        p_r ~ ((r + 1/2) / N)^(1 / keep - 1)

    The method is active from `start` to `end` (fractions of the run), except in every `full_every`-th batch of an
    epoch, which is used completely.

    The loss of an example is the mean over its positions that count. If the model computes its own loss
    (`losses.ModelLoss`), examples are ranked by the cross entropy of the outputs' `logits` and the labels that
    `ModelLoss(labels=...)` names.

    Events: AFTER_DATALOADER, first (`Trait.SELECTS_EXAMPLES`); INIT, BATCH_START and AFTER_FORWARD, to check the loss,
    the batch and a model's outputs. Reads params, buffers and the batch; replaces the batch by the chosen examples, in
    the order in which they were drawn.

    Args:
        start: The fraction of the run at which the method becomes active, in [0, 1].
        end: The fraction of the run at which it ends, exclusive, in [0, 1], greater than `start`.
        keep: The share of examples to keep, in (0, 1]; with 1 the algorithm never matches.
        scale_factor: Factor in (0, 1] by which images (N, C, ...), with 1 to 3 dimensions after the channels, are
            shrunk for the extra pass. The model must accept inputs of that size; outputs (N, C, ...) for each position
            are enlarged to the size of the targets, such as masks.
        full_every: The number of batches of which one is used completely, counted in each epoch; 0 for none. With 1 the
            algorithm never matches.
        name: Name of the algorithm and of its draws.
        input_field: Field of the batch with the input; defaults to the state's input field.
        target_field: Field of the batch with the target; defaults to the state's target field. Ignored if
            `ModelLoss(labels=...)` names the labels.

    Raises:
        TypeError, ValueError: At INIT: a loss that has no `reduction`, or a `ModelLoss` without `labels`. In the first
            step: with `scale_factor` below 1, inputs that are not images; logits that are missing or do not fit the
            labels.
        KeyError: In the first step: the batch has no such input or target.

    Example:
        >>> selective_backprop(start=0.5, end=0.9, keep=0.5)
        selective_backprop(start=0.5, end=0.9, keep=0.5, scale_factor=1.0, full_every=2)
        >>> selective_backprop(keep=1).match
        never

    References:
        Angela H. Jiang et al.: Accelerating Deep Learning by Focusing on the Biggest Losers. 2019.
        https://arxiv.org/abs/1910.00762
    """
    if start >= end:
        raise ValueError(f"selective_backprop: expected start < end, got {start=}, {end=}; {_WINDOW_HINT}")
    fields = input_field, target_field
    active = on(Event.AFTER_DATALOADER) & between(start, end)
    if full_every:
        active = active & ~every(full_every, in_epoch=True)

    def apply(event: Event, state: State) -> State:
        own_loss = _own_loss(state)
        if event is Event.INIT:
            check_labelled(name, own_loss) if own_loss else losses.check_loss(state.context.loss, per_example=True)
            return state
        # In every batch, since the selection may begin late in a run: in the first one only would be one more schedule.
        if event is Event.AFTER_FORWARD:
            if own_loss:
                check_outputs(name, own_loss, state.outputs, state.batch)
            return state
        if event is Event.BATCH_START:
            inputs, _ = _members(state, *fields)
            if scale_factor != 1:
                _check_images(inputs, scale_factor)
            return state
        ranking_losses = state.per_example(partial(_losses_in_state, name, fields, scale_factor))
        chosen = choose_by_loss(state.rng(name), ranking_losses, keep=keep)
        return state.replace(batch=state.context.layout.take(state.batch, chosen))

    return Algorithm(
        name,
        NEVER if keep == 1 or full_every == 1 else on(Event.INIT, Event.BATCH_START, Event.AFTER_FORWARD) | active,
        apply,
        traits=frozenset({Trait.SELECTS_EXAMPLES}),
        runs_after=(Trait.LIMITS_BATCHES,),
    )


def _own_loss(state: State) -> losses.ModelLoss | None:
    """Return the loss if the model computes it, otherwise `None`."""
    return state.context.loss if isinstance(state.context.loss, losses.ModelLoss) else None


def _members(state: State, input_field: batches.Field | None, target_field: batches.Field | None) -> tuple[Any, Any]:
    """Return the batch's input and target, from the given fields or else the state's fields."""
    input_field, target_field = chosen_fields(state, input_field, target_field)
    own_loss = _own_loss(state)
    if own_loss is not None and own_loss.labels is not None:
        target_field = own_loss.labels
    return batches.get(state.batch, input_field), batches.get(state.batch, target_field)


def _losses_in_state(
    name: str, fields: tuple[batches.Field | None, batches.Field | None], scale_factor: float, state: State
) -> Tensor:
    """Return the loss of each example with the state's model, or a substitute if the model computes its own loss."""
    inputs, targets = _members(state, *fields)

    def forward_fn(scaled: Any) -> Any:
        # New buffers are dropped, so that BatchNorm's statistics include each batch only once.
        return state.run_model(scaled, train=True, rng_name=f"{name}.forward")[0]

    def example_losses(outputs: Any, targets: Any) -> Tensor:
        own_loss = _own_loss(state)
        if own_loss is None:
            return state.call_loss(lambda loss: losses.per_example(loss, outputs, targets), train=True)[0]
        return model_losses(name, own_loss, outputs, state.batch)  # the loss names its labels itself

    return _ranking_losses(forward_fn, example_losses, inputs, targets, scale_factor)


def _ranking_losses(
    forward_fn: Callable[[Any], Any],
    example_losses: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    scale_factor: float,
) -> Tensor:
    with torch.no_grad():
        outputs = forward_fn(_shrunk(inputs, scale_factor))
        if scale_factor != 1 and isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim in _MODES:
            size = targets.shape[2 - outputs.ndim :]  # maps, such as masks
            outputs = F.interpolate(outputs, size, mode=_MODES[outputs.ndim], align_corners=False)
        return example_losses(outputs, targets)


def _shrunk(inputs: Any, scale_factor: float) -> Any:
    if scale_factor == 1:
        return inputs
    _check_images(inputs, scale_factor)
    floating = inputs if inputs.is_floating_point() else inputs.float()
    size = [max(1, whole_part(scale_factor, length)) for length in inputs.shape[2:]]
    shrunk = F.interpolate(floating, size, mode=_MODES[inputs.ndim], align_corners=False)
    return shrunk if inputs.is_floating_point() else shrunk.round().to(inputs.dtype)


def _check_images(inputs: Any, scale_factor: float) -> None:
    if not isinstance(inputs, Tensor) or inputs.ndim not in _MODES:
        came = f"shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        raise ValueError(
            f"scale_factor={scale_factor} shrinks images, tensors (N, C, ...) with 3, 4 or 5 dims, but the "
            f"input is {came}; use scale_factor=1, or select the images with input_field="
        )


# Losses per example of a model that computes its own loss, such as a language model with labels in its inputs


def check_labelled(name: str, loss_fn: losses.ModelLoss) -> None:
    """Raise a `TypeError` if the labels of the model's loss are not named."""
    if loss_fn.labels is None:
        raise TypeError(
            f"{name}: expected a loss that gives losses per example, got {loss_fn!r}, one number for a whole batch; "
            "name the labels, as in losses.ModelLoss(labels='labels', shift=1) for a causal language model, or use a "
            "loss of outputs and targets, such as losses.cross_entropy"
        )


def check_outputs(name: str, loss_fn: losses.ModelLoss, outputs: Any, batch: Any) -> None:
    """Raise a `ValueError` unless outputs have losses per example, or logits (N, ..., C) that fit labels (N, ...).

    Only shapes are checked.
    """
    own = _member(outputs, loss_fn.key)
    if isinstance(own, Tensor) and own.ndim:
        return
    labels, logits = loss_fn.labels_of(batch), _member(outputs, "logits")
    assert labels is not None, "see check_labelled"
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        came = f"{tree.describe(logits)} there" if isinstance(logits, Tensor) else "none"
        raise ValueError(
            f"{name}: the model's own loss is one number, so losses per example are computed from logits: "
            f"expected a tensor (N, ..., C) called 'logits' for labels {tree.describe(labels)}, got "
            f"{type(outputs).__name__} with {came}; let forward return them, or a loss for each example"
        )


def model_losses(name: str, loss_fn: losses.ModelLoss, outputs: Any, batch: Any) -> Tensor:
    """Return a loss for each example, (N,): the mean over its labels that are not ignored, 0 if there is none.

    These are the losses that the model returns, if it returns more than one number; otherwise the cross entropy of its
    logits and the labels without the first `loss_fn.shift` ones.
    """
    check_outputs(name, loss_fn, outputs, batch)
    all_labels, own = loss_fn.labels_of(batch), _member(outputs, loss_fn.key)
    assert all_labels is not None, "see check_labelled"
    is_whole = not isinstance(own, Tensor) or own.ndim == 0
    if not is_whole and own.ndim == 1:
        return own
    labels = all_labels[..., loss_fn.shift :] if loss_fn.shift else all_labels
    counted = labels != loss_fn.ignore_index
    if not is_whole:
        if own.shape == all_labels.shape != labels.shape:
            own = own[..., : labels.shape[-1]]  # one loss for each input; the last inputs have no label
        if own.shape != labels.shape:
            return own.flatten(1).mean(1)
        return _row_means(own, counted)
    logits = _member(outputs, "logits").float()
    if loss_fn.shift:
        logits = logits[..., : -loss_fn.shift, :]
    flat = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten().long(), ignore_index=loss_fn.ignore_index, reduction="none"
    )
    return _row_means(flat.reshape(labels.shape), counted)


def _row_means(token_losses: Tensor, counted: Tensor) -> Tensor:
    num = len(token_losses)
    # where(), not a product with 0: losses that are not counted may be infinite.
    return torch.where(counted, token_losses, 0).reshape(num, -1).sum(1) / counted.reshape(num, -1).sum(1).clamp(min=1)


def _member(outputs: Any, key: str) -> Any:
    return outputs.get(key) if isinstance(outputs, Mapping) else getattr(outputs, key, None)
