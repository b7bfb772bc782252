"""Comparison of processes that share a batch: they must have the same settings, states and batches."""

import re
import textwrap
import zlib
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.shards import is_shard
from purecompose.core.compose import Step
from purecompose.core.ranks import Ranks
from purecompose.core.state import State, fields_where


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
