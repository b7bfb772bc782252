"""The identity of data: a description and a checksum, by which a resumed run detects that its data differ."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from purecompose._support.fingerprint import fingerprint
from purecompose.batch import tensors


_NUM_READ = 64
"""Number of a tensor's examples that the checksum reads: enough to tell data sets apart, at negligible cost."""


def describe_data(data: Any) -> dict[str, str]:
    """Return the facts about data that are known without reading a batch. Unknown facts are left out; nothing is
    raised.

    Args:
        data: Any data that `fit` accepts.

    Returns:
        Names to values; for data in memory this includes a checksum over evenly spaced examples. Empty for
        iterators, which differ each time.
    """
    if isinstance(data, Iterator):
        return {}
    reported = {"kind": type(data).__qualname__}
    if isinstance(data, list | tuple):
        content = _digest_of(data)
        return reported if content is None else {**reported, "content": f"{len(data)} batches {content}"}
    for name in ("batch_size", "shuffle", "drop_last"):
        value = _attribute(data, name)
        if isinstance(value, bool | int):
            reported[name] = str(value)
    for name in ("inputs", "targets"):
        if (words := _in_words(_attribute(data, name))) is not None:
            reported[name] = words
    if isinstance(data, DataLoader):
        reported["sampler"] = type(data.sampler).__qualname__
    dataset = _attribute(data, "dataset")
    if dataset is not None:
        reported["dataset"] = type(dataset).__qualname__ + _sized(dataset)
        if isinstance(dataset, TensorDataset):
            words = (_in_words(tensor) for tensor in dataset.tensors)
            reported |= {f"dataset.tensors[{i}]": text for i, text in enumerate(words) if text is not None}
    return reported


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each difference, including facts that only one side has; none if either side is empty."""
    if not saved or not now:
        return []
    return [
        f"data: {name}: {saved.get(name, 'nothing')} in the checkpoint, {now.get(name, 'nothing')} here"
        for name in dict.fromkeys((*saved, *now))
        if saved.get(name) != now.get(name)
    ]


# Data may be objects of any class. Errors in describing them are ignored, because training may work nevertheless.


def _attribute(data: Any, name: str) -> Any:
    try:
        return getattr(data, name, None)
    except Exception:
        return None


def _in_words(value: Any) -> str | None:
    """Return dtype, shape and checksum of examples in memory; `None` for anything else."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.ndim:
        return None
    try:
        count = len(value)
        chosen = torch.arange(0, count, max(1, count // _NUM_READ), device=value.device)
        content = repr(fingerprint(value.detach()[chosen])).encode()
    except Exception:  # a kind of tensor that cannot be read in this way
        return None
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {digest}"


def _digest_of(given: Sequence[Any]) -> str | None:
    """Return a checksum of the first examples of evenly spaced batches; `None` if they have no tensors."""
    try:
        chosen = given[:: max(1, len(given) // _NUM_READ)]
        content = [[fingerprint(tensor.detach()[:1]) for tensor in tensors(batch) if tensor.ndim] for batch in chosen]
    except Exception:  # see `_in_words`
        return None
    return hashlib.blake2b(repr(content).encode(), digest_size=6).hexdigest() if any(content) else None


def _sized(dataset: Any) -> str:
    try:
        return f" of {len(dataset)}"
    except Exception:
        return ""
