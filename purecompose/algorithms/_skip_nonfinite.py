"""Skipping: a step whose loss or gradients are not finite does not change the weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.wrapping import all_finite, check_guarded, chosen, guarded
from purecompose.time.event import Event
from purecompose.time.predicates import on


class SkipCount(NamedTuple):
    """Slot of `skip_nonfinite`."""

    skipped: Tensor
    """Number of batches of the run that were skipped, 0-d int32; changes at BATCH_END."""


class _Running(NamedTuple):
    """Content of the slot between BATCH_START and BATCH_END."""

    own: SkipCount
    buffers: dict[str, Tensor]
    """Buffers at the start of the step."""
    is_good: Tensor
    """True if loss and gradients have been finite so far, 0-d bool."""


@factory
def skip_nonfinite(*, name: str = "skip_nonfinite") -> Algorithm:
    """Skip steps whose loss or gradients are not finite.

        w, opt_state, buffers <- their new values   if the loss and all gradients are finite
                                 their old values   otherwise

    A step is bad if one element is inf or NaN. Both outcomes are computed and one is selected on the device, without
    waiting for it.

    Events: INIT (creates the slot and wraps the optimizer in one that can skip steps), BATCH_START (remembers the
    buffers), AFTER_TRAIN_BATCH and BATCH_END. Reads the loss and the gradients; replaces buffers, and gradients of a
    bad step; adds `metrics[f"{name}/skipped"]`, 1 if the batch was skipped, else 0. Remembers a `SkipCount` in
    `slots[name]`.

    At AFTER_TRAIN_BATCH it runs after methods that compute gradients again (`Trait.RENEWS_GRADIENTS`), such as `sam`,
    and before methods that collect or clip them, so that a bad batch is not part of a group's sum: if it is the last
    one of a group, the update uses the other batches. There, a bad step's buffers, such as BatchNorm's statistics, are
    restored, and one element that is not finite, in the loss or a gradient, makes all gradients NaN, so that later
    clipping cannot make them look good. At BATCH_END other methods read the unchanged weights, whatever their place in
    the list. Gradients that become bad after AFTER_TRAIN_BATCH are detected by the optimizer, and the buffers are
    restored at BATCH_END, before weights are averaged.

    Other methods still act in a skipped step: an average of the weights includes the unchanged ones once more,
    `lookahead` moves back when it is due, and schedules advance. The loss is reported unchanged. A step without terms
    in its loss (a batch of padding, whose mean loss is NaN) is also skipped. With `loss_scaling` both methods skip the
    same steps, and this one restores the buffers.

    Args:
        name: Name of the algorithm, of its slot and of its metric.

    Raises:
        RuntimeError: In the step: the optimizer has been replaced since INIT.

    Example:
        >>> skip_nonfinite()
        skip_nonfinite()
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            count = SkipCount(torch.zeros((), dtype=torch.int32, device=state.device))
            return state.replace(slots={**state.slots, name: count}, optimizer=guarded(state.optimizer))
        slot = state.slots[name]
        if event is Event.BATCH_START:
            good = torch.ones((), dtype=torch.bool, device=state.device)
            return state.replace(slots={**state.slots, name: _Running(slot, state.buffers, good)})
        grads = state.grads or {}
        if event is Event.AFTER_TRAIN_BATCH:
            check_guarded(state.optimizer, name)
            is_good = all_finite(grads.values() if state.loss is None else (state.loss, *grads.values()))
            marked = {key: torch.where(is_good, grad, torch.nan) for key, grad in grads.items()}
            if isinstance(slot, _Running):
                state = state.replace(slots={**state.slots, name: slot._replace(is_good=is_good.to(state.device))})
            return _restored(state.replace(grads=marked), slot, is_good)
        is_good = all_finite(grads.values()) if grads else torch.ones((), dtype=torch.bool, device=state.device)
        if isinstance(slot, _Running):
            is_good = is_good & slot.is_good
        skipped = ~is_good
        own = slot.own if isinstance(slot, _Running) else slot
        count = SkipCount(own.skipped + skipped.to(own.skipped.dtype))
        return _restored(state, slot, is_good).replace(
            slots={**state.slots, name: count}, metrics={**state.metrics, f"{name}/skipped": skipped.to(torch.float32)}
        )

    return Algorithm(
        name,
        on(Event.INIT, Event.BATCH_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
        apply,
        traits=frozenset({Trait.SETS_BUFFERS}),
        runs_before=(Trait.COLLECTS_GRADIENTS, Trait.CLIPS_GRADIENTS, Trait.AVERAGES_WEIGHTS),
        runs_after=(Trait.RENEWS_GRADIENTS,),
    )


def _restored(state: State, slot: Any, is_good: Tensor) -> State:
    """Return the state, in a bad step with the buffers from its start."""
    before: Mapping[str, Tensor] = slot.buffers if isinstance(slot, _Running) else {}
    return state.replace(buffers=chosen(is_good, state.buffers, before)) if before else state
