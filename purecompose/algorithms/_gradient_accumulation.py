"""Gradient accumulation: one update for several batches, by the mean of their gradients."""

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from purecompose._support.checks import check_whole
from purecompose._support.functorch import is_fake, is_transforming
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.gradient import num_terms
from purecompose.core.state import State
from purecompose.optim.guarded import Guarded, all_finite
from purecompose.surgery.weights import wide
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, every, on


__all__ = ["AccumulatedGradients", "gradient_accumulation"]


class AccumulatedGradients(NamedTuple):
    """What `gradient_accumulation` remembers."""

    sums: dict[str, Tensor]
    """Gradients of the trainable parameters, each times its batch's terms; float32 for those in half precision."""
    num_terms: Tensor
    """Of how many terms, 0-d float64 (float32 where there is none wider): a loss may weigh them, by classes."""
    current: Tensor
    """The terms of the running step so far, likewise; 0 between steps."""
    is_counted: Tensor
    """Whether anybody has counted terms in the running step, 0-d bool."""
    is_reached: Tensor
    """For each parameter of `sums`, in their order: whether a batch's loss has reached it; bool."""

    @classmethod
    def empty(cls, params: dict[str, Tensor]) -> "AccumulatedGradients":
        """Of no batch; for these parameters or, which is as good, for the sums of some."""
        device = next(iter(params.values())).device if params else None
        has_float64 = device is None or device.type != "mps"
        zero = torch.zeros((), dtype=torch.float64 if has_float64 else torch.float32, device=device)
        sums = {name: torch.zeros_like(wide(param)) for name, param in params.items()}
        is_reached = torch.zeros(len(sums), dtype=torch.bool, device=device)
        return cls(sums, zero, zero.clone(), torch.zeros_like(zero, dtype=torch.bool), is_reached)

    def counted(self, num: int | Tensor) -> "AccumulatedGradients":
        """With so many terms more in the running step."""
        return self._replace(current=self.current + num, is_counted=torch.ones_like(self.is_counted))

    def added(
        self, grads: dict[str, Tensor], num_examples: int, is_good: Tensor | None = None
    ) -> "AccumulatedGradients":
        """With the gradients of the running step, which is over; as it was where a given 0-d bool says no."""
        num = torch.where(self.is_counted, self.current, num_examples)
        if is_good is not None:
            num = torch.where(is_good, num, 0)

        def with_one(total: Tensor, grad: Tensor) -> Tensor:
            share = num.to(total.dtype) * grad.to(total.dtype)
            return total + torch.where(num > 0, share, 0)  # a mean of nothing may be NaN

        sums = {name: with_one(total, grads[name]) if name in grads else total for name, total in self.sums.items()}
        reached = self._where(grads)
        is_reached = self.is_reached | (reached if is_good is None else reached & is_good)
        nothing = torch.zeros_like(self.current), torch.zeros_like(self.is_counted)
        return AccumulatedGradients(sums, self.num_terms + num, *nothing, is_reached)

    def emptied(self, waiting: Collection[str] = ()) -> "AccumulatedGradients":
        """Return what remains after an update: the sums of the parameters that wait for another one."""
        empty = AccumulatedGradients.empty(self.sums)
        if not waiting:
            return empty
        sums = {name: total if name in waiting else empty.sums[name] for name, total in self.sums.items()}
        return empty._replace(sums=sums, is_reached=self.is_reached & self._where(waiting))

    def _where(self, names: Collection[str]) -> Tensor:
        """For each parameter of `sums` whether it is among the names; nothing waits for a device."""
        if len(names) == len(self.sums):
            return torch.ones_like(self.is_reached)
        return torch.tensor([name in names for name in self.sums]).to(self.is_reached.device, non_blocking=True)

    def mean(self, grads: dict[str, Tensor], of_nothing: float = 0.0) -> dict[str, Tensor]:
        """Return the means, for the parameters and in the dtypes of these gradients."""
        total = torch.where(self.num_terms > 0, self.num_terms, 1)
        means = {
            name: (self.sums[name] / total.to(self.sums[name].dtype)).to(grad.dtype) for name, grad in grads.items()
        }
        if of_nothing == 0:  # as the sums are
            return means
        return {name: torch.where(self.num_terms > 0, mean, of_nothing) for name, mean in means.items()}


class _Last(NamedTuple):
    """Within a step: the group ends with it."""

    own: AccumulatedGradients


@factory
def gradient_accumulation(num_steps: int, *, name: str = "gradient_accumulation") -> Algorithm:
    """Update once for several batches.

        steps 1 ... k-1:   sum <- sum + n g,   and no update
        step k:            g <- (sum + n g) / (total of n),   the update, and the sum is 0 again

    with g a batch's gradient and n the terms that its loss is a mean of: examples or, in a loss over tokens, those that
    are not ignored. So k batches of n examples train as one of k n does, BatchNorm and draws aside, in the memory of
    one. `compose(..., microbatches=k)` does that to a batch that the loader gives at once; this is for batches that
    come one by one.

    In a step without an update there are no gradients after AFTER_TRAIN_BATCH: the optimizer neither moves nor
    remembers. A parameter that some batch of the group reaches is updated, and one that none reaches is not. A compiled
    or mapped step cannot ask: there the gradient of a parameter that the last batch does not reach waits for the next
    group's update. Time counts batches, so schedules and intervals of other methods do, too. Batches after the last
    whole group of a run are not applied; a run resumed from its end finishes the group.

    Events: INIT; BATCH_START of each k-th step, counted from 1, without which nothing is ever updated; AFTER_LOSS of
    every slice, which counts its terms (in a program without it batches weigh their examples); AFTER_TRAIN_BATCH of
    every step, once, after what computes gradients again and before what clips them. Reads and replaces: the gradients.
    The slot holds the sum, as large as the parameters; float32 for those in half precision.

    A batch whose gradients are not finite spoils its group, unless steps like that are skipped: with `loss_scaling` or
    `skip_nonfinite` it is left out of the sum, and the group's mean is that of the others. Of a group without a good
    batch the update is left out.

    Args:
        num_steps: k, for how many batches; 1 never matches.
        name: Names its slot.

    Raises:
        TypeError, ValueError: A number that is not an int, or below 1. RuntimeError, in the step: a parameter is
            trained that was frozen at INIT.

    Example:
        >>> gradient_accumulation(4)
        gradient_accumulation(num_steps=4)
        >>> gradient_accumulation(1).match
        never

    References:
        Priya Goyal et al.: Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour. 2017.
        https://arxiv.org/abs/1706.02677
    """
    num_steps = check_whole(num_steps, "gradient_accumulation: num_steps", 1, hint="it counts batches")

    def with_slot(state: State, slot: AccumulatedGradients | _Last) -> State:
        return state.replace(slots={**state.slots, name: slot})

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            trained = {key: state.params[key] for key in state.context.trainable}
            return with_slot(state, AccumulatedGradients.empty(trained))
        slot = state.slots[name]
        is_last = isinstance(slot, _Last)
        own = slot.own if is_last else slot
        if event is Event.BATCH_START:
            return with_slot(state, _Last(own))
        if event is Event.AFTER_LOSS:
            counted = own.counted(num_terms(state))
            return with_slot(state, _Last(counted) if is_last else counted)
        if state.grads is None:  # a program without a gradient so far
            return with_slot(state, own)
        _check_known(name, own, state.grads)
        # Where bad steps are skipped, a bad batch is left out, and does not spoil the others of its group.
        is_guarded = isinstance(state.optimizer, Guarded)
        own = own.added(state.grads, state.num_examples, all_finite(state.grads.values()) if is_guarded else None)
        if not is_last:
            return with_slot(state.replace(grads={}), own)
        missing, waiting = _missing(own, state)
        mean = own.mean({**state.grads, **missing}, of_nothing=math.nan if is_guarded else 0.0)
        return with_slot(state.replace(grads=mean), own.emptied(waiting))

    acts = on(Event.INIT, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH) | on(Event.BATCH_START) & every(num_steps)
    return Algorithm(
        name,
        NEVER if num_steps == 1 else acts,
        apply,
        traits=frozenset({Trait.COLLECTS_GRADIENTS}),
        runs_before=(Trait.CLIPS_GRADIENTS,),
        runs_after=(Trait.RENEWS_GRADIENTS, Trait.REQUIRED_ON_LOAD),
        config={"num_steps": num_steps},
    )


def _missing(own: AccumulatedGradients, state: State) -> tuple[dict[str, Tensor], list[str]]:
    """Return the parameters that only earlier batches of a group reach, and those that wait."""
    grads, trainable = state.grads or {}, set(state.context.trainable)
    absent = [key for key in own.sums if key not in grads and key in trainable]
    if not absent or is_transforming() or is_fake(own.is_reached):
        return {}, absent
    reached = dict(zip(own.sums, own.is_reached.tolist(), strict=True))
    return {key: state.params[key] for key in absent if reached[key]}, []


def _check_known(name: str, own: AccumulatedGradients, grads: dict[str, Tensor]) -> None:
    unknown = [key for key in grads if key not in own.sums]
    if unknown:
        raise RuntimeError(
            f"{name}: expected gradients of what was trainable at INIT, got one of {unknown[0]}, which has no sum: "
            "thaw parameters before step.init"
        )
