"""Schedule-free training: averaging instead of a schedule of the learning rate, at the same cost."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.device import as_scalar
from purecompose._support.messages import warn
from purecompose.algorithms._ema import between
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.wrapping import Guarded, all_finite, chosen, leaves, settings_of
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.weights import Averages, wide, with_weights
from purecompose.time.event import Event
from purecompose.time.predicates import on


class ScheduleFree(NamedTuple):
    """Slot of `schedule_free`, whose docstring defines x, z and w."""

    averages: Averages
    """Averages x."""
    base: dict[str, Tensor]
    """Iterates z, by name; like the averages, float32 for parameters in half precision."""
    rate: Tensor
    """Learning rate of the step, 0-d float64; changes at AFTER_TRAIN_BATCH, whereas other fields do at BATCH_END."""
    greatest_rate: Tensor
    """Greatest learning rate so far, 0-d float64."""
    total: Tensor
    """Sum of w, 0-d float64."""


@checked
def schedule_free_step(
    base: Mapping[str, Tensor],
    averages: Mapping[str, Tensor],
    moved: Mapping[str, Tensor],
    beta: float,
    share: float | Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the new z and x after an optimizer has moved y, and the next y.

    Args:
        base: The iterates z, floating, by name.
        averages: The averages x, with the same names, shapes and dtypes.
        moved: y = `(1 - beta) z + beta x` after an optimizer's step, with the same names and shapes; it may be in half
            precision while z and x are in float32.
        beta: The position of y between z (0) and x (1).
        share: The weight c of the new z in x, in [0, 1]; a number or a 0-d tensor. 1 in the first step.

    Returns:
        The new z, the new x, and the next y, which has the dtypes of `moved`.

    Example:
        >>> z, x, y = ({"w": torch.tensor([value])} for value in (1.0, 3.0, 2.0))
        >>> schedule_free_step(z, x, {"w": y["w"] - 1}, beta=0.5, share=0.5)
        ({'w': tensor([0.])}, {'w': tensor([1.5000])}, {'w': tensor([0.7500])})
    """

    def as_moved(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(moved[name].dtype) for name, value in values.items()}

    y = as_moved(between(base, averages, beta))
    z = {name: value + (moved[name].to(value.dtype) - y[name].to(value.dtype)) for name, value in base.items()}
    x = between(averages, z, share)
    return z, x, as_moved(between(z, x, beta))


@factory
def schedule_free(beta: Annotated[float, Within(0, 1, below=True)] = 0.9, *, name: str = "schedule_free") -> Algorithm:
    """Average the weights instead of using a schedule of the learning rate.

        y = (1 - beta) z + beta x            the weights at which gradients are taken: the state's parameters
        z <- z + (the optimizer's update of y)
        x <- x + c (z - x),   c = w / (sum of w so far),   w = (greatest learning rate so far)^2

    x, a running mean of z, is the result of training and is used in evaluation. The step's optimizer should not have
    momentum, since beta replaces it: use `sgd(lr)`, or `adamw(lr, betas=(0.0, 0.999))`. Its weight decay is applied at
    y. Its rate may warm up, but should not decrease. w uses the learning rate of the optimizer, not of its groups; if
    it has none, x is the plain mean.

    The slot contains z, and x as `Averages`. Evaluation and prediction with `step=` use x, as in `fit`;
    `to_module(state, weights="schedule_free")` and `with_weights` return it. BatchNorm's statistics are those of y, and
    wrong for x: `with_statistics(state, data, weights="schedule_free")` computes the right ones.

    A step that is skipped, or whose gradients another method keeps for later, changes nothing; a parameter without a
    gradient, such as in a frozen layer, is not changed, and neither is its average.

    Events: INIT; AFTER_TRAIN_BATCH, to store the learning rate; BATCH_END; EVAL_START and PREDICT_START, where x
    replaces the weights in a temporary state. Reads and replaces: the trainable parameters.

    Difference from the paper: Adam's bias correction is part of Adam's step and not of the learning rate, so it does
    not affect w, as in the authors' later code.

    Args:
        beta: The position between the iterates (0) and the averages (1) at which gradients are taken, in [0, 1); 0 for
            plain averaging of the iterates.
        name: Name of the algorithm, of its slot, and of the weights for `to_module`.

    Warns:
        UserWarning: At INIT: the optimizer has momentum.

    Example:
        >>> schedule_free(0.95)
        schedule_free(beta=0.95)

    References:
        Aaron Defazio et al.: The Road Less Scheduled. NeurIPS 2024. https://arxiv.org/abs/2405.15682
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            _warn_of_momentum(name, state.optimizer)
            # Separate copies for x and z: a compiled step overwrites the tensors of its arguments.
            x, z = ({key: wide(state.params[key]).clone() for key in state.context.trainable} for _ in range(2))
            zeros = (torch.zeros((), dtype=torch.float64, device=state.device) for _ in range(3))
            own = ScheduleFree(Averages.empty(state)._replace(params=x), z, *zeros)
            return state.replace(slots={**state.slots, name: own})
        if event in (Event.EVAL_START, Event.PREDICT_START):
            return with_weights(state, name)
        own = state.slots[name]
        if event is Event.AFTER_TRAIN_BATCH:
            # Read the rate here, since at BATCH_END schedules already have the value of the next step.
            given = settings_of(leaves(state.optimizer)[0]).get("lr")
            rate = as_scalar(1.0 if given is None else state.scalar(given), torch.float64, state.device)
            return state.replace(slots={**state.slots, name: own._replace(rate=rate)})
        if not state.grads:
            return state
        params, new = _moved(own, state, beta)
        if isinstance(state.optimizer, Guarded):  # may have skipped the update
            params, new = chosen(all_finite(state.grads.values()), (params, new), (state.params, own))
        return state.replace(params=params, slots={**state.slots, name: new})

    return Algorithm(
        name,
        on(Event.INIT, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EVAL_START, Event.PREDICT_START),
        apply,
        traits=frozenset({Trait.READS_OPTIMIZER}),
        runs_before=(Trait.AVERAGES_WEIGHTS,),
        runs_after=(Trait.REQUIRED_ON_LOAD, Trait.SETS_WEIGHTS),
    )


def _moved(own: ScheduleFree, state: State, beta: float) -> tuple[dict[str, Tensor], ScheduleFree]:
    """Return the parameters and the slot after the optimizer has updated the parameters that have a gradient."""
    greatest = torch.maximum(own.greatest_rate, own.rate)
    total = own.total + greatest**2
    # While all rates have been 0, total is 0, and x becomes z.
    share = torch.where(total > 0, greatest**2 / torch.where(total > 0, total, 1.0), 1.0)
    z, x, moved = (
        {key: value for key, value in held.items() if key in own.base and key in (state.grads or {})}
        for held in (own.base, own.averages.params, state.params)
    )
    base, average, params = schedule_free_step(z, x, moved, beta, share)
    buffers = {key: state.buffers[key].to(value.dtype) for key, value in own.averages.buffers.items()}
    averages = Averages({**own.averages.params, **average}, buffers, own.averages.num + 1)
    new = ScheduleFree(averages, {**own.base, **base}, own.rate, greatest, total)
    return {**state.params, **params}, new


def _warn_of_momentum(name: str, optimizer: Any) -> None:
    """Warn if the optimizer, or one of its groups, has momentum."""
    for leaf in leaves(optimizer):
        given = [settings_of(leaf), *[dict(options) for _, options in getattr(leaf, "groups", ())]]
        if any(settings.get("momentum") or (settings.get("betas") or (0,))[0] for settings in given):
            warn(
                f"{name}: beta takes the place of momentum, but {optimizer!r} also has momentum, and both act; "
                "use an optimizer without it: sgd(lr), or adamw(lr, betas=(0.0, 0.999))"
            )
            return
