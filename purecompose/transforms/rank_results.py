"""Processes that share a batch: what they must have in common, and their results combined into the batch's."""

import re
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.device import INTEGER_OF_SIZE, is_shard, local
from purecompose._support.internals import is_fake
from purecompose._support.messages import warn
from purecompose.core.compose import Step
from purecompose.core.means import has_mean
from purecompose.core.ranks import Ranks, scaled, scaled_with_statistics
from purecompose.core.state import State
from purecompose.core.values import fields_where
from purecompose.errors import RankTimeoutError
from purecompose.nn.model import STATISTICS
from purecompose.optim.base import matched


def check_alike(ranks: Ranks, step: Step, state: State, batch: Any) -> None:
    """Raise a `ValueError` if processes have different settings, states or batches, by sums of their bits."""
    context = state.context
    fields = {name: getattr(state, name) for name in ("key", *fields_where(keeps_form=True))}
    settings = (
        [(algorithm.name, dict(algorithm.config)) for algorithm in step.algorithms],
        *(step.microbatches, step.microbatch_size, state.optimizer, context.trainable, context.precision),
        *(context.model.evaluated_parts, state.timestamp.run, state.timestamp.batch),
    )
    forms = {path: tree.describe(leaf, with_device=False) for path, leaf in tree.leaves_with_paths(fields).items()}
    words = {
        "loss": context.loss,
        "network": (context.model.module, context.model.param_names, context.model.buffer_names),
        "program": step.program,
        "batch fields": (context.target_field, context.layout),
        # Settings come before forms: other frozen parameters also mean other memory of the optimizer.
        "settings": settings,
        "names, shapes or dtypes": forms,
    }
    words = {name: _printed(value) for name, value in words.items()}
    # Each process has rows of its own of what is divided.
    plain = {name: [leaf for leaf in tree.leaves(field) if not is_shard(leaf)] for name, field in fields.items()}
    parts = {"batch": batches.tensors(batch), **plain}
    found = [torch.tensor(zlib.crc32(text.encode()), device=state.device) for text in words.values()]
    found += [digest(leaves, state.device) for leaves in parts.values()]
    for name, agrees in zip([*words, *parts], ranks.agree(found), strict=True):
        if not agrees:
            own = f" (process {ranks.rank} has {textwrap.shorten(words[name], 80)})" if name in _SAME_CODE else ""
            remedy = "all must run the same code" if name in _SAME_CODE else _REMEDIES.get(name, _SAME_STATE)
            raise ValueError(f"data_parallel: the {ranks.size} processes differ in their {name}{own}: {remedy}")


def _printed(value: Any) -> str:
    """Return a text without what differs between equal processes: addresses, numbers of devices, the order of sets."""
    text = re.sub(r" at 0x[0-9a-f]+|(?<=\bcuda)(:\d+|', index=\d+)", "", repr(value))
    return re.sub(r"(?<=\{)[^{}:]*(?=\})", lambda members: ", ".join(sorted(members[0].split(", "))), text)


_SAME_CODE = ("loss", "network", "program", "batch fields")
_SAME_STATE = (
    "all must begin with the same state: seed torch before the network is made, and give State.create the same key; "
    "to continue a run, resume from the same checkpoint in each. If they were equal before, see "
    "torch.use_deterministic_algorithms"
)
SAME_BATCH = "give each the whole batch, in one order, and not a part (no DistributedSampler): the step divides it"
_REMEDIES = {
    "batch": SAME_BATCH,
    "key": "give State.create the same key in all",
    "settings": "algorithms, optimizer, frozen parameters, precision, microbatches and time must be the same in all",
}


def digest(leaves: list[Any], device: torch.device) -> Tensor:
    """Return a checksum of a list of tensors, 0-d int64."""
    total = torch.full((), len(leaves), dtype=torch.int64, device=device)
    for leaf in leaves:
        bits = (leaf if leaf.layout is torch.strided else leaf.to_dense()).detach().resolve_conj().resolve_neg()
        bits = (torch.view_as_real(bits) if bits.is_complex() else bits).contiguous()
        for part in bits.view(INTEGER_OF_SIZE[bits.element_size()]).flatten().split(2**20):
            places = 2 * torch.arange(part.numel(), device=part.device) + 1
            total = 31 * total + (part * places).sum().to(device)
        total = 31 * total + leaf.numel()
    return total


_GIVEN_UP = re.compile(r"[Tt]imed? ?out|[Cc]onnection (was )?(closed|reset)|[Bb]roken pipe")
_ROLL_CALL = 5.0
"""Seconds in which processes must report that they are running, once one has given up."""


@contextmanager
def naming_late_ranks(ranks: Ranks, batch: int, words: str = "", *, is_new: bool = False) -> Iterator[None]:
    """Return a context manager in which unanswered messages raise an error with the ranks that are missing.

    `words`, if any, describe the step, and must be the same on all; if `is_new`, this is checked before any message.
    """
    start = time.monotonic()
    try:
        _announce(ranks, batch, words, is_new=is_new)
        yield
    except RuntimeError as error:
        if isinstance(error, RankTimeoutError) or not _GIVEN_UP.search(str(error)):
            raise
        seconds = time.monotonic() - start
        late = _late(ranks, batch)
        names = f"rank {', '.join(map(str, late))}" if late else "another process (could not determine which)"
        raise RankTimeoutError(
            f"data_parallel: in batch {batch} rank {ranks.rank} of {ranks.size} waited {seconds:.0f} s for {names}, "
            "which is stopped, hangs or has ended. How long to wait is the timeout of init_process_group(timeout=...)"
        ) from error


def _late(ranks: Ranks, batch: int) -> list[int]:
    """Return the ranks that do not answer a roll call in the group's store; raise if they run another step."""
    found: list[Any] = []

    def call() -> None:
        # The store belongs to the group's transport, not to the connections that have been given up.
        store: Any = dist.distributed_c10d._get_default_store()
        place = f"purecompose/{ranks.group}/{batch}"
        try:
            _is_common(ranks)
        except ValueError as error:
            return found.append(error)
        store.set(f"{place}/{ranks.rank}", "here")
        end = time.monotonic() + _ROLL_CALL
        others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        while time.monotonic() < end and (others := [r for r in others if not store.check([f"{place}/{r}"])]):
            time.sleep(0.1)
        found.extend(others)

    # In a thread, since the process that hosts the store may be the one that does not answer.
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(2 * _ROLL_CALL)
    if found and isinstance(found[0], ValueError):
        raise found[0]
    return found


def _announce(ranks: Ranks, batch: int, words: str, *, is_new: bool) -> None:
    """Write what this process runs into the group's store, where others read it while this one waits for messages.

    A process whose batch has a new form would send other messages than the others expect, or compute a part of another
    batch. It waits until all have announced the step, whether it is new to them or not.
    """
    number, *last = _ANNOUNCED.get(ranks, (0,))
    if not words or last == [batch, words] and not is_new:
        return  # a compiled step may enter the scope twice
    _ANNOUNCED[ranks] = number + 1, batch, words
    dist.distributed_c10d._get_default_store().set(_keys(ranks)[ranks.rank], f"{number + 1} {words}")
    pause, end = 1e-4, time.monotonic() + _ROLL_CALL
    while is_new and not _is_common(ranks) and time.monotonic() < end:  # those that come later compare as well
        time.sleep(pause := min(2 * pause, 0.1))


def _is_common(ranks: Ranks) -> bool:
    """Return whether all have announced this step; raise a `ValueError` if any has in other words."""
    store, keys, found = dist.distributed_c10d._get_default_store(), _keys(ranks), dict[str, list[str]]()
    if ranks not in _ANNOUNCED or not store.check(keys):
        return False
    own, announced = _ANNOUNCED[ranks][0], [value.decode().partition(" ") for value in store.multi_get(keys)]
    for rank, (number, _, words) in enumerate(announced):
        if int(number) == own:
            found.setdefault(words, []).append(str(rank))
    if len(found) > 1:
        each = "; ".join(f"rank {', '.join(ranks)} has {words}" for words, ranks in found.items())
        raise ValueError(f"data_parallel: the processes differ in their batch ({each}): {SAME_BATCH}")
    return all(int(number) >= own for number, _, _ in announced)


def _keys(ranks: Ranks) -> list[str]:
    return [f"purecompose/step/{ranks.group}/{rank}" for rank in range(ranks.size)]


_ANNOUNCED: dict[Ranks, Any] = {}
"""The last announced step of each group: its number, from 1, its batch and its words."""


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
        after: The state after this rank's part, without its gradients.
        own: These gradients; the dictionary is emptied.
        sum_gradients: What sums gradients over the ranks, if not a message that all of them receive.
        shares_statistics: True if a part whose loss does not count has gradients of other parts' losses; see
            `SharedPart`.
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
    """Return the state with loss, new metrics and some of its gradients averaged over the ranks."""
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
