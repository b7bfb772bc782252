"""Checks of processes that share a batch: what they must have in common, and who does not answer."""

import re
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.shards import is_shard
from purecompose.core.compose import Step
from purecompose.core.ranks import Ranks
from purecompose.core.state import State
from purecompose.core.values import fields_where
from purecompose.errors import RankTimeoutError


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
    "to continue a run, resume from the same checkpoint in each. If they were equal before, kernels have given other "
    "bits in one of them: see torch.use_deterministic_algorithms"
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
        for part in bits.view(_BITS[bits.element_size()]).flatten().split(_CHUNK):
            places = 2 * torch.arange(part.numel(), device=part.device) + 1
            total = 31 * total + (part * places).sum().to(device)
        total = 31 * total + leaf.numel()
    return total


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**20


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
