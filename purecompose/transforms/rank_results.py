"""Results of a step's parts, one for each rank, combined into those of the whole batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.internals import is_fake
from purecompose._support.messages import warn
from purecompose._support.shards import is_shard, local
from purecompose.core.means import has_mean
from purecompose.core.ranks import Ranks, scaled, scaled_with_statistics
from purecompose.core.state import State
from purecompose.nn.model import STATISTICS
from purecompose.optim.base import matched
from purecompose.transforms.rank_checks import digest


SumGradients: TypeAlias = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Function from a process's parts of gradients to their sums over all processes."""


def averaged(
    before: State,
    after: State,
    own: dict[str, Tensor] | None,
    names: Sequence[str],
    weight: int | Tensor,
    ranks: Ranks,
    sum_gradients: SumGradients | None,
    *,
    shares_statistics: bool,
) -> State:
    """Return the state with loss, gradients and new metrics averaged over the ranks.

    Args:
        before: The state before the ranks' parts.
        after: The state after this rank's part, without its gradients.
        own: These gradients; the dictionary is emptied.
        names: The parameters with respect to which the part differentiates, the same on all ranks.
        weight: The weight of this rank's part.
        ranks: The processes.
        sum_gradients: What sums gradients over the ranks, if not a message that all of them receive.
        shares_statistics: True if the network normalises by statistics of the whole batch, so that the gradient of a
            part whose loss does not count is one of other parts' losses.
    """
    # A part may reach parameters that others do not, and all ranks must send the same tensors. Traced steps have no
    # values for these flags and do not need them: all ranks have the same graph.
    flags, is_reached = None, True
    if own and not is_fake(before.key):
        order = dict.fromkeys([*names, *own])
        reached = [name in own for name in order]
        flags, is_reached = torch.tensor(reached).to(before.device, non_blocking=True), all(reached)
        own |= {name: torch.zeros_like(before.params[name]) for name in order if name not in own}
        own = {name: own.pop(name) for name in order}
    share, _, counts = ranks.weigh(weight, flags, device=before.device)
    after, grads = with_means(before, after, ranks, share), None
    if own is not None:
        scale = scaled_with_statistics if shares_statistics and isinstance(weight, Tensor) else scaled
        grads = _summed(own, lambda parts: scale(parts, share), ranks, sum_gradients)
    # If this rank's part reaches all of them, skip reading the flags, which would wait for the device.
    if grads is not None and counts is not None and not is_reached:
        grads = {name: grad for (name, grad), num in zip(grads.items(), counts.tolist(), strict=True) if num}
    return after.replace(grads=grads)


def with_means(before: State, after: State, ranks: Ranks, share: Tensor, grads: Mapping[str, Tensor] = {}) -> State:
    """Return the state with loss, new metrics and some of its gradients averaged over the ranks.

    Args:
        before: The state before the ranks' parts.
        after: The state after this rank's part.
        ranks: The processes.
        share: This rank's share in the means.
        grads: The gradients to be averaged.
    """
    new = {name: value for name, value in after.metrics.items() if value is not before.metrics.get(name)}
    found: dict[str, Any] = {"metrics": {name: value for name, value in new.items() if has_mean(value)}}
    found |= {"grads": dict(grads)} | ({} if after.loss is None else {"loss": after.loss})
    leaves, spec = tree.flatten(found)
    means = tree.unflatten(spec, ranks.reduced(scaled(leaves, share), "sum"))
    means["metrics"] = {**after.metrics, **means["metrics"]}
    means["grads"] = {**after.grads, **means["grads"]} if after.grads is not None else None
    return after.replace(**means)


def _summed(
    own: dict[str, Tensor],
    scale: Callable[[list[Tensor]], list[Tensor]],
    ranks: Ranks,
    sum_gradients: SumGradients | None,
) -> dict[str, Tensor]:
    """Return the sums of scaled gradients over the ranks; the dictionary of this rank's gradients is emptied."""
    names = tuple(own)
    if sum_gradients is not None:
        return sum_gradients(dict(zip(names, scale([*own.values()]), strict=True)))
    # In the order of the backward pass; each gradient is freed when its bucket has been sent.
    parts = (scale([own.popitem()[1]])[0] for _ in names)
    sums = dict(zip(reversed(names), ranks.reduced(parts, "sum"), strict=True))
    return {name: sums[name] for name in names}


def with_slots(ranks: Ranks, before: Mapping[str, Any], after: Mapping[str, Any], *, counts: bool) -> dict[str, Any]:
    """Return slots with the changes of all ranks: each number changes by the sum of what the ranks added to it.

    A bool changes if it has changed on any rank.

    Args:
        ranks: The processes.
        before: The slots before the changes, the same on all ranks.
        after: This rank's slots.
        counts: True if this rank's changes count.
    """
    old, spec = tree.flatten(dict(before))
    new, new_spec = tree.flatten(dict(after))
    if spec != new_spec:
        slots = {**before, **after}
        names = [name for name in slots if tree.structure(before.get(name)) != tree.structure(after.get(name))]
        raise RuntimeError(
            f"data_parallel: the slots of {', '.join(names)} have another form after AFTER_BACKWARD than before "
            "BEFORE_FORWARD: what is remembered of a part of the batch must be numbers, to which each process adds"
        )
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if local(a) is not local(b)]
    if any(is_shard(old[i]) for i in changed):
        paths = [*tree.leaves_with_paths(dict(before))]
        raise RuntimeError(
            f"slots{next(paths[i] for i in changed if is_shard(old[i]))}, of which each process holds some rows, "
            "changed between BEFORE_FORWARD and AFTER_BACKWARD, where each sees its part of the batch: change it "
            "at AFTER_TRAIN_BATCH or later"
        )
    added = [_added(old[i], new[i]) for i in changed]
    sums = ranks.reduced([one if counts else torch.zeros_like(one) for one in added], "sum")
    for i, total in zip(changed, sums, strict=True):
        flips = old[i].dtype is torch.bool
        new[i] = old[i] ^ (total > 0) if flips else (old[i] + total).to(old[i].dtype)
    return tree.unflatten(spec, new)


def with_buffers(
    ranks: Ranks, before: Mapping[str, Tensor], after: Mapping[str, Tensor], num_examples: int
) -> dict[str, Tensor]:
    """Return buffers changed by the mean of what the ranks have added, each weighted by its number of examples.

    Buffers that are not floating numbers are the maximum over all ranks. Values that no rank has changed stay as
    they were.
    """
    changed = {name: buffer for name, buffer in after.items() if buffer is not before.get(name)}
    floating = [name for name, buffer in changed.items() if buffer.dtype in _FLOATING]
    counts = [name for name, buffer in changed.items() if buffer.dtype in _SENT_AS]
    added = [_added(before[name], changed[name]) for name in floating]
    share = ranks.weigh(num_examples, device=added[0].device if added else None).share
    for name, mean in zip(floating, ranks.reduced(scaled(added, share), "sum"), strict=True):
        changed[name] = torch.where(mean == 0, before[name], before[name] + mean)
    greatest = ranks.reduced([changed[name].to(_SENT_AS[changed[name].dtype]) for name in counts], "max")
    changed |= {name: most.to(changed[name].dtype) for name, most in zip(counts, greatest, strict=True)}
    return {**after, **changed}


_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_SENT_AS = {torch.bool: torch.uint8, torch.int16: torch.int32} | {
    dtype: dtype for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64)
}
"""Dtypes in which tensors that are not floating are sent, by their own dtype; buffers of other dtypes are not sent."""


def _added(old: Tensor, new: Tensor) -> Tensor:
    """Return the change from old to new: 0 where they are equal, infinities included; 1 for a bool that differs."""
    if old.dtype is torch.bool:
        return (old ^ new).int()
    added = torch.where(new == old, 0, new - old)
    return added.to(_SENT_AS.get(added.dtype, added.dtype))


def warn_of_different_buffers(before: State, after: State, ranks: Ranks) -> None:
    """Warn if the ranks have written different values into buffers whose mean may not be a valid value."""
    new = {name: buffer for name, buffer in after.buffers.items() if buffer is not before.buffers.get(name)}
    names = sorted(new.keys() - matched(STATISTICS, tuple(new)))
    if not names or is_fake(before.key):
        return
    alike = ranks.agree([digest([new[name]], before.device) for name in names])
    if differing := [name for name, is_alike in zip(names, alike, strict=True) if not is_alike]:
        warn(
            f"data_parallel: the processes have written different values into {', '.join(differing)}. The state keeps "
            "their mean, of integers the maximum, which is right for sums and running statistics only: change other "
            "buffers in an algorithm at AFTER_TRAIN_BATCH, where each process has the whole batch"
        )
