"""Skipping: a step whose loss or gradients are not finite changes nothing but the time."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.guarded import all_finite, check_guarded, chosen, guarded
from purecompose.time.event import Event
from purecompose.time.predicates import on


__all__ = ["SkipCount", "skip_nonfinite"]


class SkipCount(NamedTuple):
    """What `skip_nonfinite` remembers."""

    skipped: Tensor
    """0-d, int32: how many batches of the run were left out; changes at BATCH_END."""


class _Running(NamedTuple):
    """What is in the slot between BATCH_START and BATCH_END."""

    own: SkipCount
    buffers: dict[str, Tensor]
    """As they were when the step began."""
    is_good: Tensor
    """Whether loss and gradients have been finite so far, 0-d bool."""


@factory
def skip_nonfinite(*, name: str = "skip_nonfinite") -> Algorithm:
    """Skip steps whose loss or gradients are not finite.

        w, opt_state, buffers <- what the step makes of them   where the loss and all gradients are finite
                                 what they were                elsewhere

    One element that is inf or NaN is enough. Both outcomes are computed and one is chosen on the device: nothing waits.

    Events: INIT (the slot; the optimizer becomes one that skips), BATCH_START (remembers the buffers),
    AFTER_TRAIN_BATCH and BATCH_END. Reads the loss and the gradients; replaces buffers, and gradients of a bad step;
    adds `metrics[f"{name}/skipped"]`, 1 where the batch was left out, else 0. Remembers a `SkipCount` in `slots[name]`.

    At AFTER_TRAIN_BATCH it comes after what computes gradients again (`Trait.RENEWS_GRADIENTS`), such as `sam`, and
    before what collects or clips them, so that a bad batch is not part of a group's sum: where it is the last of one,
    the update is that of the others. A bad step's buffers, such as BatchNorm's statistics, are put back there, and one
    element that is not finite, in the loss or a gradient, makes all gradients NaN, so that no clipping behind it can
    make them look good. What reads weights at BATCH_END finds them as they were, wherever it is listed. Gradients that
    go bad after that are found by the optimizer, and their buffers put back at BATCH_END, before averages are taken.

    What others remember is theirs: an average of the weights takes those that stayed once more, `lookahead` goes back
    when it is due, a schedule moves on. The loss is reported as it was. A step in which no example counts (a batch of
    padding, whose mean loss is NaN) is skipped, too. With `loss_scaling` both skip the same steps; this one puts back
    the buffers.

    Args:
        name: Names its slot and its metric.

    Raises:
        RuntimeError: In the step: the optimizer has been replaced since INIT.

    Example:
        >>> skip_nonfinite()
        skip_nonfinite()
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return _initialised(state, name)
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
            slots={**state.slots, name: count},
            metrics={**state.metrics, f"{name}/skipped": skipped.to(torch.float32)},
        )

    return Algorithm(
        name,
        on(Event.INIT, Event.BATCH_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
        apply,
        traits=frozenset({Trait.SETS_BUFFERS}),
        runs_before=(Trait.COLLECTS_GRADIENTS, Trait.CLIPS_GRADIENTS, Trait.AVERAGES_WEIGHTS),
        runs_after=(Trait.RENEWS_GRADIENTS,),
    )


def _initialised(state: State, name: str) -> State:
    count = SkipCount(torch.zeros((), dtype=torch.int32, device=state.device))
    return state.replace(slots={**state.slots, name: count}, optimizer=guarded(state.optimizer))


def _restored(state: State, slot: Any, is_good: Tensor) -> State:
    """Return the state; of a bad step, with the buffers that it began with."""
    before: Mapping[str, Tensor] = slot.buffers if isinstance(slot, _Running) else {}
    return state.replace(buffers=chosen(is_good, state.buffers, before)) if before else state
