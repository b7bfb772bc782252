"""Gradient accumulation: one update for several batches, by the mean of their gradients.

    steps 1 ... k-1:   sum <- sum + n g,   and no update
    step k:            g <- (sum + n g) / (total of n),   the update, and the sum is 0 again

with g a batch's gradient and n its examples. k batches of n examples train as one of k n does, BatchNorm and draws
aside, in the memory of one. `compose(..., microbatches=k)` does that to a batch that the loader gives at once; this is
for batches that come one by one.

In a step without an update there are no gradients after AFTER_TRAIN_BATCH: the optimizer neither moves nor remembers.
Time counts batches, so schedules and intervals of other methods do, too. Batches after the last whole group of a run
are not applied; the next run from that state would finish the group, as a resumed one does.

Events: INIT; BATCH_START of each k-th step; AFTER_TRAIN_BATCH of every step, after what computes gradients anew and
before what clips them. Reads and replaces: the gradients. The slot holds the sum, as large as the parameters.

References:
    Priya Goyal et al.: Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour. 2017.
    https://arxiv.org/abs/1706.02677
"""

from typing import NamedTuple

import torch
from torch import Tensor

from purecompose._checks import check_whole
from purecompose.algorithm import Algorithm, Trait
from purecompose.event import Event
from purecompose.predicate import NEVER, every, on
from purecompose.state import State


__all__ = ["AccumulatedGradients", "gradient_accumulation"]


class AccumulatedGradients(NamedTuple):
    """What `gradient_accumulation` remembers."""

    sums: dict[str, Tensor]
    """Gradients of trainable parameters, each times its batch's examples."""
    num_examples: Tensor
    """Of how many examples, 0-d int64."""


class _Last(NamedTuple):
    """Within a step: the group ends with it."""

    own: AccumulatedGradients


def gradient_accumulation(num_steps: int, *, name: str = "gradient_accumulation") -> Algorithm:
    """Updates once for several batches; see `purecompose.algorithms.gradient_accumulation`.

    Args:
        num_steps: k, for how many batches; 1 never matches.
        name: Names its slot.

    Raises:
        TypeError, ValueError: A number that is none, or below 1.

    Example:
        >>> gradient_accumulation(4)
        gradient_accumulation(num_steps=4)
        >>> gradient_accumulation(1).match
        never
    """
    num_steps = check_whole(num_steps, "gradient_accumulation: num_steps", 1, hint="it counts batches")

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return state.replace(slots={**state.slots, name: _empty(state)})
        slot = state.slots[name]
        if event is Event.BATCH_START:
            return state.replace(slots={**state.slots, name: _Last(slot)})
        is_last = isinstance(slot, _Last)
        own, grads, num = slot.own if is_last else slot, state.grads or {}, state.num_examples
        sums = {key: total + num * grads[key] if key in grads else total for key, total in own.sums.items()}
        total = own.num_examples + num
        if not is_last:
            return state.replace(grads={}, slots={**state.slots, name: AccumulatedGradients(sums, total)})
        means = {key: (sums[key] / total).to(grad.dtype) for key, grad in grads.items()}
        return state.replace(grads=means, slots={**state.slots, name: _empty(state)})

    return Algorithm(
        name,
        NEVER if num_steps == 1 else on(Event.INIT, Event.AFTER_TRAIN_BATCH) | on(Event.BATCH_START) & every(num_steps),
        apply,
        runs_before=(Trait.CLIPS_GRADIENTS,),
        runs_after=(Trait.RENEWS_GRADIENTS, Trait.REQUIRED_ON_LOAD),
        config={"num_steps": num_steps},
    )


def _empty(state: State) -> AccumulatedGradients:
    sums = {key: torch.zeros_like(state.params[key]) for key in state.context.trainable}
    return AccumulatedGradients(sums, torch.zeros((), dtype=torch.int64, device=state.device))
