"""Schedule-free training: an average in place of a schedule of the learning rate, at the same cost.

    y = (1 - beta) z + beta x            the weights whose gradient is taken: the state's parameters
    z <- z + (what the optimizer adds to y)
    x <- x + c (z - x),   c = w / (sum of w so far),   w = (greatest learning rate so far)^2

x is what has been learned: a running mean of z, and what evaluation sees. The optimizer is the step's own, without
momentum, which is beta's part: `sgd(lr)`, or `adamw(lr, betas=(0.0, 0.999))`. Its weight decay is taken at y. Its rate
may warm up, and should not fall.

The slot holds z, and x as `Averages`. Evaluation and prediction with `step=` look at x, as `fit` does;
`to_module(state, weights="schedule_free")` and `with_weights` give it to others. Statistics of BatchNorm are those of
y, so networks with BatchNorm do less well in evaluation than they could.

Events: INIT; BATCH_END; EVAL_START and PREDICT_START, where the state is one that is thrown away. Reads and replaces:
the trainable parameters.

References:
    Aaron Defazio, Xingyu Alice Yang, Harsh Mehta, Konstantin Mishchenko, Ahmed Khaled, Ashok Cutkosky: The Road Less
    Scheduled. NeurIPS 2024. https://arxiv.org/abs/2405.15682
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._checks import check_number
from purecompose.algorithm import Algorithm, Trait
from purecompose.algorithms._averages import as_scalar
from purecompose.algorithms.lookahead import pull_back
from purecompose.event import Event
from purecompose.predicate import on
from purecompose.state import State
from purecompose.weights import Averages, with_weights


__all__ = ["ScheduleFree", "schedule_free"]


class ScheduleFree(NamedTuple):
    """What `schedule_free` remembers."""

    averages: Averages
    """x."""
    base: dict[str, Tensor]
    """z, by name."""
    greatest_rate: Tensor
    """The greatest learning rate so far, 0-d float64."""
    weight: Tensor
    """The sum of w, 0-d float64."""


def schedule_free(beta: float = 0.9, *, name: str = "schedule_free") -> Algorithm:
    """Averages in place of a schedule; see `purecompose.algorithms.schedule_free`.

    Args:
        beta: How far towards the average gradients are taken, in [0, 1); 0 for plain averaging of the iterates.
        name: Names its slot, and the weights for `to_module`.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range. At INIT: an optimizer with momentum.

    Example:
        >>> schedule_free(0.95)
        schedule_free(beta=0.95)
    """
    beta = check_number(beta, "schedule_free: beta", 0, 1, below=True)

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            _check_momentum(name, state.optimizer)
            return state.replace(slots={**state.slots, name: _fresh(state)})
        if event is not Event.BATCH_END:
            return with_weights(state, name)
        averages, base, greatest, weight = state.slots[name]
        trained = {key: state.params[key] for key in base}
        before = pull_back(base, averages.params, beta)
        base = {key: value + (trained[key] - before[key]) for key, value in base.items()}
        rate = as_scalar(_rate(state), torch.float64, state.device)
        greatest = torch.maximum(greatest, rate)
        weight = weight + greatest**2
        share = torch.where(weight > 0, greatest**2 / torch.where(weight > 0, weight, 1.0), 1.0)
        average = pull_back(averages.params, base, share)
        buffers = {key: state.buffers[key].to(value.dtype) for key, value in averages.buffers.items()}
        new = ScheduleFree(Averages(average, buffers, averages.num + 1), base, greatest, weight)
        params = {**state.params, **pull_back(base, average, beta)}
        return state.replace(params=params, slots={**state.slots, name: new})

    return Algorithm(
        name,
        on(Event.INIT, Event.BATCH_END, Event.EVAL_START, Event.PREDICT_START),
        apply,
        runs_after=(Trait.REQUIRED_ON_LOAD,),
        config={"beta": beta},
    )


def _fresh(state: State) -> ScheduleFree:
    zero = torch.zeros((), dtype=torch.float64, device=state.device)
    trained = {key: state.params[key] for key in state.context.trainable}
    averages = Averages.empty(state)._replace(params={key: value.clone() for key, value in trained.items()})
    return ScheduleFree(averages, {key: value.clone() for key, value in trained.items()}, zero, zero.clone())


def _rate(state: State) -> Any:
    """The learning rate now, of the optimizer or of the one in it; 1 where none is to be found."""
    optimizer = state.optimizer
    while hasattr(optimizer, "inner"):
        optimizer = optimizer.inner
    return state.scalar(getattr(optimizer, "lr", 1.0))


def _check_momentum(name: str, optimizer: Any) -> None:
    while hasattr(optimizer, "inner"):
        optimizer = optimizer.inner
    has_momentum = getattr(optimizer, "momentum", 0) != 0 or (getattr(optimizer, "betas", None) or (0,))[0] != 0
    if has_momentum:
        raise ValueError(
            f"{name}: expected an optimizer without momentum, whose part beta plays, got {optimizer!r}; give "
            "sgd(lr) or adamw(lr, betas=(0.0, 0.999))"
        )
