"""Lookahead: every k steps, moves the weights part of the way back to where they were k steps before."""

from collections.abc import Mapping
from typing import Annotated

from torch import Tensor

from purecompose.algorithms._ema import between
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within, checked
from purecompose.time import predicates
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


@checked
def pull_back(slow: Mapping[str, Tensor], fast: Mapping[str, Tensor], alpha: float | Tensor) -> dict[str, Tensor]:
    """Return interpolated weights: `slow + alpha * (fast - slow)`, element by element.

    Args:
        slow: Floating slow weights, by name.
        fast: Fast weights with at least the same names, of the same shapes and dtypes.
        alpha: A number or a 0-d tensor; 0 returns exactly the slow weights, 1 the fast weights.

    Returns:
        New tensors.

    Example:
        >>> import torch
        >>> pull_back({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 0.5)["w"]
        tensor([2.])
    """
    return between(slow, fast, alpha)


@factory
def lookahead(
    alpha: Annotated[Scalar, Within(0, 1, hint="it is the share of the way that is kept")] = 0.5,
    every: Annotated[int, Within(1, hint="it counts steps")] = 5,
    *,
    name: str = "lookahead",
) -> Algorithm:
    """Move the weights part of the way back, once in `every` steps.

        once in `every` steps:   slow <- slow + alpha (fast - slow),   fast <- slow

    with fast the weights that the optimizer updates, and slow the weights after the previous such step. The optimizer's
    state is not changed.

    Events: INIT; BATCH_END of one step in `every`, counted from 1. Reads and replaces: the parameters that were
    trainable at INIT and still are. The slot contains the slow weights, by name. Initially they are the weights at
    INIT, so load other weights before `step.init`.

    Args:
        alpha: The share of the way that is kept, in [0, 1]; with 1 the algorithm never matches. An `hparam` or a
            schedule may be given: the default of an hparam is checked; later values are not. 0.5 and 0.8 are common.
        every: k, the number of steps from one move back to the next; 5 and 10 are common.
        name: Name of the algorithm and of its slot.

    Example:
        >>> lookahead(0.8, every=10)
        lookahead(alpha=0.8, every=10)
        >>> lookahead(1.0).match
        never

    References:
        Michael R. Zhang et al.: Lookahead Optimizer: k Steps Forward, 1 Step Back. NeurIPS 2019.
        https://arxiv.org/abs/1907.08610
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            slow = {key: state.params[key].clone() for key in state.context.trainable}
            return state.replace(slots={**state.slots, name: slow})
        own, trained = state.slots[name], set(state.context.trainable)
        slow = {key: value for key, value in own.items() if key in trained}
        params = {**state.params, **pull_back(slow, state.params, state.scalar(alpha))}
        # Parameters frozen since INIT are not moved; their slow weights follow them in case they are trained again.
        return state.replace(params=params, slots={**state.slots, name: {key: params[key] for key in own}})

    return Algorithm(
        name,
        NEVER if alpha == 1 else on(Event.INIT) | on(Event.BATCH_END) & predicates.every(every),
        apply,
        runs_before=(Trait.AVERAGES_WEIGHTS,),
        runs_after=(Trait.REQUIRED_ON_LOAD, Trait.SETS_WEIGHTS),
    )
