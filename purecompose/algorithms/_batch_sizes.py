"""Gradient accumulation and batch size warm-up: larger batches from several, or smaller ones at first."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purecompose._support.internals import is_fake, is_readable, is_transforming
from purecompose._support.messages import warn
from purecompose.algorithms._parts import Elapsed, Where, reported
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.means import num_terms
from purecompose.core.state import State
from purecompose.optim import lists
from purecompose.optim.base import matched, matched_or_raise
from purecompose.optim.wrapping import Guarded, all_finite, chosen
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.weights import wide
from purecompose.time.event import Event, snapped
from purecompose.time.predicates import NEVER, Moment, Timed, before, every, on


class AccumulatedGradients(NamedTuple):
    """Slot of `gradient_accumulation`."""

    sums: dict[str, Tensor]
    """Sums over batches of gradient times number of terms, by parameter name; float32 for half-precision parameters."""
    num_terms: Tensor
    """Number of terms in `sums`, 0-d float64 (float32 without float64 support); not an integer if the loss has class
    weights."""
    current: Tensor
    """Number of terms of the running step so far, of the same dtype; 0 between steps."""
    is_counted: Tensor
    """True if terms have been counted in the running step, 0-d bool."""
    is_reached: Tensor
    """True for each parameter of `sums`, in their order, that has received a gradient from a batch; bool."""

    @classmethod
    def empty(cls, params: dict[str, Tensor]) -> "AccumulatedGradients":
        """Return the slot before any batch, for these parameters, or for sums of the same names and shapes."""
        device = next(iter(params.values())).device if params else None
        has_float64 = device is None or device.type != "mps"
        zero = torch.zeros((), dtype=torch.float64 if has_float64 else torch.float32, device=device)
        sums = {name: torch.zeros_like(wide(param)) for name, param in params.items()}
        is_reached = torch.zeros(len(sums), dtype=torch.bool, device=device)
        return cls(sums, zero, zero.clone(), torch.zeros_like(zero, dtype=torch.bool), is_reached)

    def counted(self, num: int | Tensor) -> "AccumulatedGradients":
        """Return the slot with `num` more terms in the running step."""
        return self._replace(current=self.current + num, is_counted=torch.ones_like(self.is_counted))

    def added(
        self, grads: dict[str, Tensor], num_examples: int, is_good: Tensor | None = None
    ) -> "AccumulatedGradients":
        """Return the slot after the running step, with its gradients added unless the 0-d bool `is_good` is False."""
        num = torch.where(self.is_counted, self.current, num_examples)
        if is_good is not None:
            num = torch.where(is_good, num, 0)
        names = [name for name in self.sums if name in grads]
        old = [self.sums[name] for name in names]
        added = lists.add(old, [grads[name].to(total.dtype) for name, total in zip(names, old, strict=True)], num)
        if not is_readable(num) or num.item() <= 0:  # the mean over no terms may be NaN
            added = [torch.where(num > 0, new, total) for new, total in zip(added, old, strict=True)]
        sums = self.sums | dict(zip(names, added, strict=True))
        reached = self._where(grads)
        is_reached = self.is_reached | (reached if is_good is None else reached & is_good)
        nothing = torch.zeros_like(self.current), torch.zeros_like(self.is_counted)
        return AccumulatedGradients(sums, self.num_terms + num, *nothing, is_reached)

    def emptied(self, waiting: Collection[str] = ()) -> "AccumulatedGradients":
        """Return the slot after an update, in which only the sums of waiting parameters are kept."""
        empty = AccumulatedGradients.empty(self.sums)
        if not waiting:
            return empty
        sums = {name: total if name in waiting else empty.sums[name] for name, total in self.sums.items()}
        return empty._replace(sums=sums, is_reached=self.is_reached & self._where(waiting))

    def _where(self, names: Collection[str]) -> Tensor:
        """Return which parameters of `sums` are among the names, without waiting for the device."""
        if len(names) == len(self.sums):
            return torch.ones_like(self.is_reached)
        return torch.tensor([name in names for name in self.sums]).to(self.is_reached.device, non_blocking=True)

    def mean(self, grads: dict[str, Tensor], of_nothing: float = 0.0) -> dict[str, Tensor]:
        """Return the mean gradients, with the names and dtypes of `grads`; without terms they are `of_nothing`."""
        total = torch.where(self.num_terms > 0, self.num_terms, 1)
        wide_means = lists.divide([self.sums[name] for name in grads], [total] * len(grads))
        means = {name: mean.to(grads[name].dtype) for name, mean in zip(grads, wide_means, strict=True)}
        if of_nothing == 0:  # the sums are 0 already
            return means
        return {name: torch.where(self.num_terms > 0, mean, of_nothing) for name, mean in means.items()}


class _Last(NamedTuple):
    """Slot during the last step of a group."""

    own: AccumulatedGradients


@factory
def gradient_accumulation(
    num_steps: Annotated[int, Within(1, hint="it counts batches")],
    *,
    where: Where = None,
    name: str = "gradient_accumulation",
) -> Algorithm:
    """Update once for several batches.

        steps 1 ... k-1:   sum <- sum + n g,   without an update
        step k:            g <- (sum + n g) / (total of n),   then the update, and the sum is reset to 0

    with g a batch's gradient and n the number of terms that its loss averages: examples or tokens that are not ignored.
    So k batches of n examples train like one of k n examples, except for BatchNorm and random draws.

    In a step without an update there are no gradients after AFTER_TRAIN_BATCH: neither the weights nor the optimizer's
    state change. A parameter is updated if any batch of the group has a gradient for it; in a compiled or mapped step,
    one without a gradient in the last batch waits for the next group's update. Time counts batches, unless it is given
    in updates, as "1000up". With `where`, the parameters that match move once in k batches, while all others move in
    every batch; an update is then a batch, also for times in updates.

    Groups continue from one epoch to the next. The last batch of a run of known length completes its group; otherwise
    the batches after the last complete group are not applied, with a warning at FIT_END.

    Events: INIT, FIT_END; BEFORE_TRAIN_BATCH of every k-th step, counted from 1, and of the last; AFTER_LOSS of every
    slice, to count its terms (in a program without it, batches are weighted by their examples); AFTER_TRAIN_BATCH of
    every step, once, after methods that compute gradients again and before methods that clip them. Reads and replaces:
    the gradients. The slot contains the sums, as large as the parameters; float32 for parameters in half precision.

    A batch whose gradients are not finite spoils its group, unless such steps are skipped: with `loss_scaling` or
    `skip_nonfinite` it is left out of the mean.

    Args:
        num_steps: k, the number of batches per update; with 1 the algorithm never matches.
        where: Pattern or patterns (`fnmatch`) of the names of parameters that wait; by default all.
        name: Name of the algorithm and of its slot.

    Raises:
        TypeError, ValueError: At INIT: a pattern that matches no trainable parameter.
        RuntimeError: In the step: a parameter is trained that was frozen at INIT.

    Example:
        >>> gradient_accumulation(4)
        gradient_accumulation(num_steps=4)
        >>> gradient_accumulation(1).match
        never

    References:
        Priya Goyal et al.: Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour. 2017.
        https://arxiv.org/abs/1706.02677
    """

    def with_slot(state: State, slot: AccumulatedGradients | _Last) -> State:
        return state.replace(slots={**state.slots, name: slot})

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            matched_or_raise(where or (), state.context.trainable, f"{name}: where", "trainable parameter")
            trained = {key: state.params[key] for key in state.context.trainable}
            return with_slot(state, AccumulatedGradients.empty(_waiting(where, trained)))
        if event is Event.FIT_END:
            warn(
                f"{name}: the run has ended within a group of {num_steps} batches, which is not applied: give it a "
                "known length (batches_per_epoch=..., or a duration in batches), whose last batch completes the group"
            )
            return state
        slot = state.slots[name]
        is_last = isinstance(slot, _Last)
        own = slot.own if is_last else slot
        if event is Event.BEFORE_TRAIN_BATCH:
            return with_slot(state, _Last(own))
        if event is Event.AFTER_LOSS:
            counted = own.counted(num_terms(state))
            return with_slot(state, _Last(counted) if is_last else counted)
        if state.grads is None:  # a program without a gradient so far
            return with_slot(state, own)
        grads = _waiting(where, state.grads)
        moving = {key: grad for key, grad in state.grads.items() if key not in grads}
        _check_known(name, own, grads)
        # If bad steps are skipped, leave out a bad batch, so that it does not spoil the other batches of its group.
        is_good = all_finite(state.grads.values()) if isinstance(state.optimizer, Guarded) else None
        own = own.added(grads, state.num_examples, is_good)
        if is_last:
            missing, waiting = _missing(own, state)
            moving |= own.mean({**grads, **missing}, of_nothing=0.0 if is_good is None else math.nan)
            # A bad step moves nothing: those that wait go on waiting.
            emptied = own.emptied(waiting)
            own = chosen(is_good, emptied, own) if where and is_good is not None else emptied
        if where and is_good is not None:
            moving = {key: torch.where(is_good, grad, math.nan) for key, grad in moving.items()}
        return with_slot(state.replace(grads=moving), own)

    at_end = _AtEnd(num_steps)
    ends = on(Event.BEFORE_TRAIN_BATCH) & (every(num_steps) | at_end) | on(Event.FIT_END) & at_end
    acts = on(Event.INIT, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH) | ends
    return Algorithm(
        name,
        NEVER if num_steps == 1 else acts,
        apply,
        traits=frozenset({Trait.COLLECTS_GRADIENTS}),
        runs_before=(Trait.CLIPS_GRADIENTS,),
        runs_after=(Trait.RENEWS_GRADIENTS, Trait.REQUIRED_ON_LOAD),
        batches_per_update=1 if where else num_steps,
    )


@dataclass(frozen=True)
class _AtEnd(Timed):
    """A predicate that is true at FIT_END if the run has ended within a group, else in the last batch of a run of known
    length, before the time advances."""

    num_steps: int

    def __call__(self, event: Event, state: Moment) -> bool:
        batch, total = state.timestamp.batch, state.timestamp.run.total_batches
        return batch % self.num_steps > 0 and batch != total if event is Event.FIT_END else batch + 1 == total

    def __repr__(self) -> str:
        return f"at_end({self.num_steps})"


def _waiting(where: Sequence[str] | None, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those parameters, or their gradients, that accumulate gradients."""
    names = matched(tuple(where or ("*",)), tuple(params))
    return {key: own for key, own in params.items() if key in names}


def _missing(own: AccumulatedGradients, state: State) -> tuple[dict[str, Tensor], list[str]]:
    """Return the parameters with gradients only from earlier batches of the group, and the names of those that wait."""
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
            f"{name}: expected gradients of the parameters that were trainable at INIT, got one of {unknown[0]}, which "
            "has no sum: thaw parameters before step.init"
        )


_QUANTA = 8
"""Number of sizes into which a batch is divided if no multiple is given."""


Duration: TypeAlias = Annotated[float, Within(0, 1, hint="it is the warm-up's share of the run")]
Share: TypeAlias = Annotated[float, Within(0, 1, hint="it is a share of each batch")]
Multiple: TypeAlias = Annotated[int | None, Within(1, hint="it is a number of examples")]


@checked
def warmup_batch_size(
    elapsed: Elapsed,
    batch_size: Annotated[int, Within(1, hint="it is a number of examples")],
    *,
    duration: Duration = 0.3,
    initial_share: Share = 0.125,
    multiple: Multiple = None,
) -> int:
    """Return the number of examples to train on at a point of a run.

    Args:
        elapsed: The fraction of the run that is over, at least 0; above 1 if training continues.
        batch_size: The number of examples in the batch.
        duration, initial_share, multiple: See `batch_size_warmup`.

    Returns:
        A number in [1, batch_size], which never decreases as the run continues.

    Example:
        >>> [warmup_batch_size(elapsed / 10, 128) for elapsed in range(5)]
        [16, 48, 80, 128, 128]
    """
    if elapsed >= duration:
        return batch_size
    quantum = -(-batch_size // _QUANTA) if multiple is None else multiple
    share = initial_share + (1 - initial_share) * (elapsed / duration)
    # Snapped, so that a size begins exactly on time although, for example, 0.29 * 100 is less than 29.
    return min(max(1, math.floor(snapped(share * batch_size / quantum))) * quantum, batch_size)


@factory
def batch_size_warmup(
    duration: Duration = 0.3,
    initial_share: Share = 0.125,
    multiple: Multiple = None,
    *,
    name: str = "batch_size_warmup",
) -> Algorithm:
    """Train on a part of each batch that grows during the warm-up.

        s(t) = s0 + (1 - s0) t / d,   n = m max(1, floor(s(t) N / m))

    with t the fraction of the run that is over, d the warm-up's share of it, s0 the initial share of a batch, and m the
    `multiple`: the first n of N examples are used, and from t = d on all of them.

    Events: AFTER_DATALOADER, while t < d, before methods that choose or change examples (`Trait.SELECTS_EXAMPLES`).
    Reads and replaces: the batch. Reports in `metrics`, as a number: `f"{name}/batch_size"`, the number of examples
    used.

    **The other examples are dropped.** The number of steps and the schedules do not change, because time counts the
    whole batch. Examples must be in random order. The learning rate is not changed; a schedule with the same line
    scales it: `0.1 * schedule.linear(s0, 1.0, t_max="0.3dur")`.

    This is a host algorithm: a compiled step is compiled separately for each size. Everything else sees the reduced
    batch.

    Args:
        duration: The warm-up's share of the run, in [0, 1]; with 0 the algorithm never matches.
        initial_share: The share of each batch at the start, in [0, 1]; with 1 the algorithm never matches.
        multiple: Sizes are multiples of this number of examples; defaults to an eighth of the batch, rounded up. A
            batch with no more examples than that is not reduced.
        name: Name of the algorithm and of its metric.

    Raises:
        TypeError, ValueError: In the step: a run without a duration or with a duration in seconds.

    Example:
        >>> batch_size_warmup(0.2, multiple=32)
        batch_size_warmup(duration=0.2, initial_share=0.125, multiple=32)
        >>> batch_size_warmup(0).match
        never

    References:
        Samuel L. Smith et al.: Don't Decay the Learning Rate, Increase the Batch Size. ICLR 2018.
        https://arxiv.org/abs/1711.00489
        Sam McCandlish et al.: An Empirical Model of Large-Batch Training. 2018. https://arxiv.org/abs/1812.06162
        Tom B. Brown et al.: Language Models are Few-Shot Learners. NeurIPS 2020, appendix B.
        https://arxiv.org/abs/2005.14165
    """

    def apply(event: Event, state: State) -> State:
        del event
        elapsed, num = state.timestamp.elapsed(), state.num_examples
        assert elapsed is not None, "the predicate requires a duration"
        kept = warmup_batch_size(elapsed, num, duration=duration, initial_share=initial_share, multiple=multiple)
        if kept < num:
            # take() copies, unlike a slice: tensors of one shape share one variant, whatever their original size.
            first = torch.arange(kept, device=state.device)
            state = state.replace(batch=state.context.layout.take(state.batch, first))
        return reported(state, name, {"batch_size": kept})

    is_neutral = duration == 0 or initial_share == 1
    return Algorithm(
        name,
        NEVER if is_neutral else on(Event.AFTER_DATALOADER) & before(duration),
        apply,
        traits=frozenset({Trait.SELECTS_EXAMPLES, Trait.LIMITS_BATCHES}),
        host=True,
    )
