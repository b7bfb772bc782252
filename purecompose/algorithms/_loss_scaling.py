"""Loss scaling: keeps small gradients above zero in a backward pass of half precision."""

from typing import NamedTuple

import torch
from torch import Tensor

from purecompose._support.checks import check_number, check_whole
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.guarded import all_finite, check_guarded, guarded
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


__all__ = ["LossScale", "loss_scaling", "next_scale"]

_LOWEST, _HIGHEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class LossScale(NamedTuple):
    """What loss scaling remembers."""

    scale: Tensor
    """0-d, float32: what the loss is multiplied by; changes at BATCH_END."""
    good_steps: Tensor
    """0-d, int32: how many steps in a row were finite since the scale last changed; changes at BATCH_END."""
    is_finite: Tensor
    """0-d, bool: whether all gradients of the running step have been finite so far; True between steps."""


class _Scaled(NamedTuple):
    """What is in the slot between BEFORE_BACKWARD and AFTER_BACKWARD."""

    own: LossScale
    loss: Tensor
    """The loss as it was: dividing the scaled one again could round it, or find inf."""


def next_scale(
    scale: Tensor,
    good_steps: Tensor,
    is_finite: Tensor,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> tuple[Tensor, Tensor]:
    """Return the scale for the next step, and the new count of good steps.

    Args:
        scale: 0-d, floating.
        good_steps: 0-d, of an integer dtype.
        is_finite: 0-d, bool: whether the step's gradients were finite.
        growth_factor: The scale is multiplied by it after `growth_interval` good steps in a row, unless that makes
            it infinite.
        backoff_factor: The scale is multiplied by it after a bad step.
        growth_interval: How many steps in a row have to be good.

    Returns:
        Both 0-d, of the dtypes that came in.

    Example:
        >>> next_scale(torch.tensor(8.0), torch.tensor(5), torch.tensor(False))
        (tensor(4.), tensor(0))
    """
    counted = good_steps + 1
    is_due = counted >= growth_interval
    grown = scale * growth_factor
    raised = torch.where(is_due & grown.isfinite(), grown, scale)
    lowered = (scale * backoff_factor).clamp(min=_LOWEST)
    return torch.where(is_finite, raised, lowered), torch.where(is_finite & ~is_due, counted, 0)


@factory
def loss_scaling(
    init_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    name: str = "loss_scaling",
) -> Algorithm:
    """Scale the loss for its gradient, and skips steps that overflow.

        g = d(s L)/dw / s

    float16 has no number between 0 and 6e-8, and what flows back through a network under `precision="fp16"` is often
    smaller. So the loss is multiplied by a scale s before the gradient, and the gradients are divided by it right
    after, slice by slice. Where that gives inf or NaN, the step is skipped and s falls; after many good steps in a row
    it rises. A scale that is a power of two rounds nothing.

    Events: INIT (the slot; the optimizer becomes one that skips), BEFORE_BACKWARD, AFTER_BACKWARD, BATCH_END. Replaces
    `loss` between the two, and `grads`; adds `metrics[f"{name}/scale"]`, the scale that the step has used, and
    `metrics[f"{name}/skipped"]`, 1 where its gradients were left out. Remembers a `LossScale` in `slots[name]`.

    Wherever it is listed, the default passes make it the last at BEFORE_BACKWARD, so that it scales all that others
    have added to the loss, and the first at AFTER_BACKWARD, so that no other method sees scaled gradients
    (`Trait.SCALES_LOSS`).

    A skipped step leaves `params` and `opt_state` as they were; with `gradient_accumulation` its batch is left out of
    the group, which may be updated by the others. Time moves on, and so does what the forward pass writes into buffers,
    as with `torch.amp.GradScaler`, whose schedule of scales this is. One gradient that is not finite makes all of them
    NaN at once, so that no clipping in between can make a bad step look good. The scale stays a normal float32, whose
    inverse is finite; torch's can fall to 0.

    Args:
        init_scale: The first scale, positive; powers of two round nothing.
        growth_factor: By what the scale rises, at least 1; 1 for a scale that does not.
        backoff_factor: By what it falls, in (0, 1]; 1 for a scale that does not.
        growth_interval: After how many good steps in a row it rises.
        name: Names its slot.

    A scale of 1 that neither rises nor falls never matches: then no step is skipped either.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range. RuntimeError, in the step: the optimizer
            has been replaced since INIT.

    Example:
        >>> loss_scaling(2.0**10)
        loss_scaling(init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)

    References:
        Paulius Micikevicius, Sharan Narang, Jonah Alben, Gregory Diamos, Erich Elsen, David Garcia, Boris Ginsburg,
        Michael Houston, Oleksii Kuchaiev, Ganesh Venkatesh, Hao Wu: Mixed Precision Training. ICLR 2018.
        https://arxiv.org/abs/1710.03740
    """
    init_scale = check_number(init_scale, "loss_scaling: init_scale", _LOWEST, _HIGHEST, hint="2.0**16 is common")
    settings = {
        "growth_factor": check_number(growth_factor, "loss_scaling: growth_factor", 1),
        "backoff_factor": check_number(backoff_factor, "loss_scaling: backoff_factor", 0, 1, above=True),
        "growth_interval": check_whole(growth_interval, "loss_scaling: growth_interval", 1, 2**31 - 1),
    }

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return _initialised(state, name, init_scale)
        if event is Event.BEFORE_BACKWARD:
            return _scaled(state, name)
        if event is Event.AFTER_BACKWARD:
            return _unscaled(state, name)
        own, grads = state.slots[name], state.grads or {}
        is_finite = own.is_finite & all_finite(grads.values()) if grads else own.is_finite
        scale, good_steps = next_scale(own.scale, own.good_steps, is_finite, **settings)
        new = LossScale(scale, good_steps, torch.ones_like(own.is_finite))
        metrics = {**state.metrics, f"{name}/scale": own.scale, f"{name}/skipped": (~is_finite).to(torch.float32)}
        return state.replace(slots={**state.slots, name: new}, metrics=metrics)

    is_neutral = init_scale == settings["growth_factor"] == settings["backoff_factor"] == 1
    return Algorithm(
        name,
        NEVER if is_neutral else on(Event.INIT, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.BATCH_END),
        apply,
        traits=frozenset({Trait.SCALES_LOSS}),
        runs_before=(Trait.CLIPS_GRADIENTS,),
        runs_after=(Trait.EDITS_LOSS,),
        config={"init_scale": init_scale, **settings},
    )


def _initialised(state: State, name: str, init_scale: float) -> State:
    own = LossScale(
        torch.full((), init_scale, dtype=torch.float32, device=state.device),
        torch.zeros((), dtype=torch.int32, device=state.device),
        torch.ones((), dtype=torch.bool, device=state.device),
    )
    return state.replace(slots={**state.slots, name: own}, optimizer=guarded(state.optimizer))


def _scaled(state: State, name: str) -> State:
    check_guarded(state.optimizer, name)
    own, loss = state.slots[name], state.loss
    assert loss is not None
    return state.replace(loss=loss * own.scale, slots={**state.slots, name: _Scaled(own, loss)})


def _unscaled(state: State, name: str) -> State:
    slot = state.slots[name]
    if not isinstance(slot, _Scaled) or not state.grads:  # a program that does not fire BEFORE_BACKWARD
        return state
    is_finite = all_finite(state.grads.values())
    scale = torch.where(is_finite, slot.own.scale, torch.nan)
    own = slot.own._replace(is_finite=slot.own.is_finite & is_finite)
    grads = {key: grad / scale for key, grad in state.grads.items()}
    return state.replace(loss=slot.loss, grads=grads, slots={**state.slots, name: own})
