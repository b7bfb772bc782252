"""Batch size warm-up: trains on small batches first, and gradually on larger ones."""

import math
from typing import Annotated, TypeAlias

import torch

from purecompose.algorithms._parts.checks import Elapsed, reported
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, before, on
from purecompose.time.units import snapped


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
    `multiple`: the first n of N examples are used, and from t = d on all of them. Early in a run the gradient is large
    relative to its noise, so a few examples estimate it well enough.

    Events: AFTER_DATALOADER, while t < d, before methods that choose or change examples (`Trait.SELECTS_EXAMPLES`).
    Reads and replaces: the batch. Reports in `metrics`, as a number: `f"{name}/batch_size"`, the number of examples
    used. After the warm-up the method does not act and reports nothing.

    **The other examples are dropped**: the run uses them only if the order of another epoch puts them first in a batch.
    The number of steps, the schedules and the run's length do not change, because time and `timestamp.sample` count the
    whole batch. Examples must be in random order, as from a shuffling loader; the first examples of a sorted batch are
    not a representative sample.

    The learning rate is not changed. To scale it with the batch size (the linear rule), give it a schedule with the
    same line: `0.1 * schedule.linear(s0, 1.0, t_max="0.3dur")`. If batches grow instead of a decay of the learning
    rate, leave out that decay.

    This is a host algorithm: sizes depend on time, and a compiled step is compiled separately for each size. Everything
    else sees the reduced batch: `state.num_examples`, microbatches, the loss, and draws for each example (which are the
    same as in the whole batch).

    Args:
        duration: The warm-up's share of the run, in [0, 1]; with 0 the algorithm never matches.
        initial_share: The share of each batch at the start, in [0, 1]; with 1 the algorithm never matches. 0 starts
            with one `multiple`.
        multiple: Sizes are multiples of this number of examples; defaults to an eighth of the batch, rounded up, so
            that there are at most eight sizes. A batch with no more examples than that is not reduced. A compiled step
            is compiled separately for every size; `compile` allows 32 by default.
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
