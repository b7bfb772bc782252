"""Half precision and gradients that are not finite: loss scaling, and skipping such steps."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.wrapping import all_finite, check_guarded, chosen, guarded
from purecompose.schedule.declared import Within
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


_LOWEST, _HIGHEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class LossScale(NamedTuple):
    """Slot of `loss_scaling`."""

    scale: Tensor
    """Factor by which the loss is multiplied, 0-d float32; changes at BATCH_END."""
    good_steps: Tensor
    """Number of consecutive finite steps since the scale last changed, 0-d int32; changes at BATCH_END."""
    is_finite: Tensor
    """True if all gradients of the running step have been finite so far, 0-d bool; True between steps."""
    is_used: Tensor
    """True if the running step has scaled a loss, 0-d bool; False between steps."""


class _Scaled(NamedTuple):
    """Content of the slot between BEFORE_BACKWARD and AFTER_BACKWARD."""

    own: LossScale
    loss: Tensor
    """The unscaled loss, kept because dividing the scaled loss could round it, or return inf after an overflow."""


def next_scale(
    scale: Tensor,
    good_steps: Tensor,
    is_finite: Tensor,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> tuple[Tensor, Tensor]:
    """Return the scale for the next step, which stays finite, and the new count of consecutive good steps; both are
    0-d.
    """
    counted = good_steps + 1
    is_due = counted >= growth_interval
    grown = scale * growth_factor
    raised = torch.where(is_due & grown.isfinite(), grown, scale)
    lowered = (scale * backoff_factor).clamp(min=_LOWEST)
    return torch.where(is_finite, raised, lowered), torch.where(is_finite & ~is_due, counted, 0)


@factory
def loss_scaling(
    init_scale: Annotated[float, Within(_LOWEST, _HIGHEST, hint="2.0**16 is common")] = 2.0**16,
    *,
    growth_factor: Annotated[float, Within(1)] = 2.0,
    backoff_factor: Annotated[float, Within(0, 1, above=True)] = 0.5,
    growth_interval: Annotated[int, Within(1, 2**31 - 1)] = 2000,
    name: str = "loss_scaling",
) -> Algorithm:
    """Scale the loss for its gradient, and skip steps that overflow.

        g = d(s L)/dw / s

    Gradients under `precision="fp16"` are often smaller than float16's least number, 6e-8. So the loss is multiplied by
    a scale s before the gradient, and the gradients are divided by it right after, slice by slice. If the result is inf
    or NaN, the step is skipped and s decreases; after many consecutive good steps it increases.

    Events: INIT (creates the slot and wraps the optimizer in one that can skip steps), BEFORE_BACKWARD, AFTER_BACKWARD,
    BATCH_END. Replaces `loss` from BEFORE_BACKWARD to AFTER_BACKWARD, and `grads`; adds `metrics[f"{name}/scale"]`, the
    scale used in the step, 1 in a program without these events, and `metrics[f"{name}/skipped"]`, 1 if its gradients
    were skipped, else 0. Remembers a `LossScale` in `slots[name]`.

    No other method sees scaled gradients (`Trait.SCALES_LOSS`).

    A skipped step does not change `params` and `opt_state`; with `gradient_accumulation` its batch is left out of the
    group. Time advances, and buffers keep what the forward pass wrote, as with `torch.amp.GradScaler`, whose schedule
    of scales this is. One gradient that is not finite makes all gradients NaN. The scale stays a normal float32.

    Args:
        init_scale: The first scale, positive; powers of two do not cause rounding.
        growth_factor: Factor by which the scale increases, at least 1; with 1 it never increases.
        backoff_factor: Factor by which the scale decreases, in (0, 1]; with 1 it never decreases.
        growth_interval: The number of consecutive good steps after which the scale increases.
        name: Name of the algorithm and of its slot.

    With a scale of 1 and both factors 1 the algorithm never matches, and does not skip steps either.

    Raises:
        RuntimeError: In the step: the optimizer has been replaced since INIT.

    Example:
        >>> loss_scaling(2.0**10)
        loss_scaling(init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)

    References:
        Paulius Micikevicius et al.: Mixed Precision Training. ICLR 2018. https://arxiv.org/abs/1710.03740
    """
    following = partial(
        next_scale, growth_factor=growth_factor, backoff_factor=backoff_factor, growth_interval=growth_interval
    )

    def with_slot(state: State, slot: LossScale | _Scaled) -> State:
        return state.replace(slots={**state.slots, name: slot})

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            own = LossScale(
                torch.full((), init_scale, dtype=torch.float32, device=state.device),
                torch.zeros((), dtype=torch.int32, device=state.device),
                torch.ones((), dtype=torch.bool, device=state.device),
                torch.zeros((), dtype=torch.bool, device=state.device),
            )
            return with_slot(state.replace(optimizer=guarded(state.optimizer)), own)
        if event is Event.BEFORE_BACKWARD:
            check_guarded(state.optimizer, name)
            own, loss = state.slots[name], state.loss
            assert loss is not None
            return with_slot(state.replace(loss=loss * own.scale), _Scaled(own, loss))
        own, grads = state.slots[name], state.grads or {}
        if event is Event.AFTER_BACKWARD:
            if not isinstance(own, _Scaled) or not grads:  # a program that does not fire BEFORE_BACKWARD
                return state
            before, is_finite = own.own, all_finite(grads.values())
            scale = torch.where(is_finite, before.scale, torch.nan)
            state = state.replace(loss=own.loss, grads={key: grad / scale for key, grad in grads.items()})
            is_used = torch.ones_like(before.is_used)
            return with_slot(state, before._replace(is_finite=before.is_finite & is_finite, is_used=is_used))
        is_finite = own.is_finite & all_finite(grads.values()) if grads else own.is_finite
        scale, good_steps = following(own.scale, own.good_steps, is_finite)
        new = LossScale(scale, good_steps, torch.ones_like(own.is_finite), torch.zeros_like(own.is_used))
        used = torch.where(own.is_used, own.scale, 1.0)
        metrics = {**state.metrics, f"{name}/scale": used, f"{name}/skipped": (~is_finite).to(torch.float32)}
        return with_slot(state.replace(metrics=metrics), new)

    is_neutral = init_scale == growth_factor == backoff_factor == 1
    return Algorithm(
        name,
        NEVER if is_neutral else on(Event.INIT, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.BATCH_END),
        apply,
        traits=frozenset({Trait.SCALES_LOSS}),
        runs_before=(Trait.CLIPS_GRADIENTS,),
        runs_after=(Trait.EDITS_LOSS,),
    )


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

    A step is bad if an element of them is inf or NaN. Both outcomes are computed and one is selected on the device,
    without waiting for it.

    Events: INIT (creates the slot and wraps the optimizer in one that can skip steps), BATCH_START (remembers the
    buffers), AFTER_TRAIN_BATCH and BATCH_END. Reads the loss and the gradients; replaces buffers, and gradients of a
    bad step; adds `metrics[f"{name}/skipped"]`, 1 if the batch was skipped, else 0. Remembers a `SkipCount` in
    `slots[name]`.

    At AFTER_TRAIN_BATCH it runs after methods that compute gradients again (`Trait.RENEWS_GRADIENTS`), such as `sam`,
    and before methods that collect or clip them. There, a bad step's buffers, such as BatchNorm's statistics, are
    restored, and all its gradients become NaN. Gradients that become bad later are detected by the optimizer, and the
    buffers are restored at BATCH_END, before weights are averaged.

    Other methods still act in a skipped step, and schedules advance. The loss is reported unchanged. A step without
    terms in its loss (a batch of padding, whose mean loss is NaN) is also skipped.

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
