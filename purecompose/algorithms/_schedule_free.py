"""Schedule-free training: an average in place of a schedule of the learning rate, at the same cost."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.checks import check_number
from purecompose._support.device import as_scalar
from purecompose._support.warnings import warn
from purecompose.algorithms._parts.averages import between
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.guarded import Guarded, all_finite, chosen
from purecompose.optim.nested import leaves, settings_of
from purecompose.surgery.weights import Averages, wide, with_weights
from purecompose.time.event import Event
from purecompose.time.predicates import on


__all__ = ["ScheduleFree", "schedule_free", "schedule_free_step"]


class ScheduleFree(NamedTuple):
    """What `schedule_free` remembers."""

    averages: Averages
    """x."""
    base: dict[str, Tensor]
    """z, by name; as the averages, float32 for parameters in half precision."""
    rate: Tensor
    """The learning rate of the step, 0-d float64; changes at AFTER_TRAIN_BATCH, as the others do at BATCH_END."""
    greatest_rate: Tensor
    """The greatest learning rate so far, 0-d float64."""
    total: Tensor
    """The sum of w, 0-d float64."""


def schedule_free_step(
    base: Mapping[str, Tensor],
    averages: Mapping[str, Tensor],
    moved: Mapping[str, Tensor],
    beta: float,
    share: float | Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the new z and x after an optimizer has moved y, and the next y.

    Args:
        base: z, by name, floating.
        averages: x, with the same names, shapes and dtypes.
        moved: `(1 - beta) z + beta x` after an optimizer's step, with the same names and shapes; in half precision it
            may stand beside z and x in float32.
        beta: How far y is towards x.
        share: c, how much the new z counts in x, in [0, 1]; a number or a 0-d tensor. 1 in the first step.

    Returns:
        New z, new x, and y between them, in the dtypes of `moved`.

    Raises:
        KeyError: A name is missing.

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
def schedule_free(beta: float = 0.9, *, name: str = "schedule_free") -> Algorithm:
    """Average in place of a schedule.

        y = (1 - beta) z + beta x            the weights whose gradient is taken: the state's parameters
        z <- z + (what the optimizer adds to y)
        x <- x + c (z - x),   c = w / (sum of w so far),   w = (greatest learning rate so far)^2

    x is what has been learned: a running mean of z, and what evaluation sees. The optimizer is the step's own. It wants
    no momentum, whose part beta plays: `sgd(lr)`, or `adamw(lr, betas=(0.0, 0.999))`; with momentum there is a warning,
    and both act. Its weight decay is taken at y. Its rate may warm up, and should not fall. The learning rate of w is
    the optimizer's own, not its groups'; where it has none, x is the plain mean.

    The slot holds z, and x as `Averages`. Evaluation and prediction with `step=` look at x, as `fit` does;
    `to_module(state, weights="schedule_free")` and `with_weights` give it to others. Statistics of BatchNorm are those
    of y, and wrong for x: `with_statistics(state, data, weights="schedule_free")` finds the right ones.

    A step whose gradients another method has kept for later, and one that is skipped, changes nothing; a parameter
    without a gradient, as of a frozen layer, stays, its average as well.

    Events: INIT; AFTER_TRAIN_BATCH, which notes the learning rate; BATCH_END; EVAL_START and PREDICT_START, where the
    state is one that is thrown away. Reads and replaces: the trainable parameters.

    What differs from the authors' paper: Adam's correction of its start is a part of Adam's step and not of the
    learning rate, so that w has no part in it, as in their later code.

    Args:
        beta: How far towards the average gradients are taken, in [0, 1); 0 for plain averaging of the iterates.
        name: Name of the algorithm, of its slot, and of the weights for `to_module`.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range.

    Warns:
        UserWarning: At INIT: the optimizer has momentum.

    Example:
        >>> schedule_free(0.95)
        schedule_free(beta=0.95)

    References:
        Aaron Defazio, Xingyu Alice Yang, Harsh Mehta, Konstantin Mishchenko, Ahmed Khaled, Ashok Cutkosky: The Road
        Less Scheduled. NeurIPS 2024. https://arxiv.org/abs/2405.15682
    """
    beta = check_number(beta, "schedule_free: beta", 0, 1, below=True)

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            _warn_of_momentum(name, state.optimizer)
            return state.replace(slots={**state.slots, name: _fresh(state)})
        if event in (Event.EVAL_START, Event.PREDICT_START):
            return with_weights(state, name)
        own = state.slots[name]
        if event is Event.AFTER_TRAIN_BATCH:
            # Here, since at BATCH_END schedules tell the next step's.
            rate = as_scalar(_rate(state), torch.float64, state.device)
            return state.replace(slots={**state.slots, name: own._replace(rate=rate)})
        if not state.grads:
            return state
        params, new = _moved(own, state, beta)
        if isinstance(state.optimizer, Guarded):  # which has left the update out, perhaps
            params, new = chosen(all_finite(state.grads.values()), (params, new), (state.params, own))
        return state.replace(params=params, slots={**state.slots, name: new})

    return Algorithm(
        name,
        on(Event.INIT, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EVAL_START, Event.PREDICT_START),
        apply,
        runs_before=(Trait.AVERAGES_WEIGHTS,),
        runs_after=(Trait.REQUIRED_ON_LOAD,),
        config={"beta": beta},
    )


def _moved(own: ScheduleFree, state: State, beta: float) -> tuple[dict[str, Tensor], ScheduleFree]:
    """Return parameters and memory after the optimizer has moved the parameters that have a gradient."""
    greatest = torch.maximum(own.greatest_rate, own.rate)
    total = own.total + greatest**2
    # Rates of 0 weigh nothing, all together too.
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


def _fresh(state: State) -> ScheduleFree:
    # Of each a tensor of its own: a compiled step writes its results over what it was given.
    x, z = ({key: wide(state.params[key]).clone() for key in state.context.trainable} for _ in range(2))
    rate, greatest, total = (torch.zeros((), dtype=torch.float64, device=state.device) for _ in range(3))
    return ScheduleFree(Averages.empty(state)._replace(params=x), z, rate, greatest, total)


def _rate(state: State) -> Any:
    """Return the learning rate now; 1 where none is to be found."""
    rate = settings_of(leaves(state.optimizer)[0]).get("lr")
    return 1.0 if rate is None else state.scalar(rate)


def _warn_of_momentum(name: str, optimizer: Any) -> None:
    """Warn of an optimizer with momentum, be it in one of its groups."""
    for leaf in leaves(optimizer):
        given = [settings_of(leaf), *[dict(options) for _, options in getattr(leaf, "groups", ())]]
        if any(settings.get("momentum") or (settings.get("betas") or (0,))[0] for settings in given):
            warn(
                f"{name}: beta plays the part of momentum, and {optimizer!r} has some of its own: it comes on top. "
                "Commonly it has none: sgd(lr), or adamw(lr, betas=(0.0, 0.999))"
            )
            return
