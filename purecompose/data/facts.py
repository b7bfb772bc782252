"""What is known of data without reading a batch: whether they yield batches, how many, and what identifies them.

A resumed run detects by their description and checksum that its data differ.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from purecompose._support.checks import shown
from purecompose._support.fingerprint import fingerprint
from purecompose.batch import tensors


def check_batches(data: Any, where: str) -> None:
    """Raise if data do not yield batches: a data set of single examples, a pair of tensors, or not iterable.

    Streams (`IterableDataset`) may yield whole batches, and are accepted.

    Raises:
        TypeError: The data do not yield batches. The message begins with `where`, and names the remedy.
    """
    if callable(getattr(data, "epoch", None)):
        return
    is_hugging = type(data).__module__.startswith("datasets.") and hasattr(data, "column_names")
    if is_hugging or (isinstance(data, Dataset) and not isinstance(data, IterableDataset)):
        raise TypeError(
            f"{where}: expected batches, got the data set {type(data).__name__}, which gives single examples: wrap it "
            "in data.loader(dataset, batch_size=...)"
        )
    if isinstance(data, Tensor | Mapping) or _is_pair(data):
        came = shown(data) if isinstance(data, Tensor) else "inputs and targets" if _is_pair(data) else "a mapping"
        raise TypeError(
            f"{where}: expected batches, got {came}: wrap examples in data.arrays(inputs, targets, batch_size=...), "
            "and a single batch in a list, [batch]"
        )
    if isinstance(data, str | type) or not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        raise TypeError(
            f"{where}: expected batches, such as a DataLoader, a list of batches or data.arrays(...), got {shown(data)}"
        )


def _is_pair(data: Any) -> bool:
    """Return whether data are inputs and targets rather than two batches of the same form."""
    if type(data) not in (tuple, list) or len(data) != 2:
        return False
    if not all(isinstance(part, Tensor) and part.ndim for part in data) or len(data[0]) != len(data[1]):
        return False
    first, second = data
    # The tensors in a list of batches may have sequences of different lengths.
    have_one_form = first.shape == second.shape if type(data) is tuple else first.ndim == second.ndim
    return first.dtype != second.dtype or not have_one_form


def length_of(data: Any) -> int | None:
    """Return the number of batches, if known; the `__len__` of a `DataLoader` over a stream raises."""
    try:
        return len(data) if hasattr(data, "__len__") else None
    except (TypeError, NotImplementedError):
        return None


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
