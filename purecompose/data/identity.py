"""What data are, in words and a checksum: by it a run that goes on finds out that they are not those it began with."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from purecompose._fingerprint import fingerprint


__all__ = ["describe_data", "differences"]

_NUM_READ = 64
"""How many examples of a tensor the checksum reads: enough to tell data sets apart, few enough to cost nothing."""


def describe_data(data: Any) -> dict[str, str]:
    """What can be told of data without reading a batch of them.

    Args:
        data: Whatever `fit` takes.

    Returns:
        Names to values; for tensors in memory a checksum over examples spread evenly is among them. Empty for
        iterators, which are other ones each time.
    """
    if isinstance(data, Iterator):
        return {}
    told = {"kind": type(data).__qualname__}
    if isinstance(data, list | tuple):
        return told
    for name in ("batch_size", "shuffle", "drop_last"):
        value = getattr(data, name, None)
        if isinstance(value, bool | int):
            told[name] = str(value)
    for name in ("inputs", "targets"):
        if isinstance(value := getattr(data, name, None), Tensor):
            told[name] = _in_words(value)
    if isinstance(data, DataLoader):
        told["sampler"] = type(data.sampler).__qualname__
    dataset = getattr(data, "dataset", None)
    if dataset is not None:
        told["dataset"] = type(dataset).__qualname__ + _sized(dataset)
    return told


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Lines that say what is not the same; none where one of the two says nothing."""
    if not saved or not now:
        return []
    return [
        f"data: {name}: {saved.get(name, 'nothing')} in the checkpoint, {now.get(name, 'nothing')} here"
        for name in dict.fromkeys((*saved, *now))
        if saved.get(name) != now.get(name)
    ]


def _in_words(tensor: Tensor) -> str:
    count = len(tensor)
    chosen = torch.arange(0, count, max(1, count // _NUM_READ), device=tensor.device)
    content = repr(fingerprint(tensor.detach()[chosen])).encode()
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} {digest}"


def _sized(dataset: Any) -> str:
    try:
        return f" of {len(dataset)}"
    except (TypeError, NotImplementedError):
        return ""
