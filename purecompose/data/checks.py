"""Reject data that are not batches, and say how to wrap them."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from purecompose._checks import shown


__all__ = ["check_batches"]


def check_batches(data: Any, where: str) -> None:
    """Raises where data give no batches: a data set of single examples, a pair of tensors, or nothing iterable.

    Streams (`IterableDataset`) may give whole batches, and pass.

    Raises:
        TypeError: The message opens with `where`, and gives the remedy.
    """
    if callable(getattr(data, "epoch", None)):
        return
    is_hugging = type(data).__module__.startswith("datasets.") and hasattr(data, "column_names")
    if is_hugging or (isinstance(data, Dataset) and not isinstance(data, IterableDataset)):
        raise TypeError(
            f"{where}: expected batches, got the data set {type(data).__name__}, which gives single examples: wrap it "
            "in data.loader(dataset, batch_size=...)"
        )
    if _is_pair(data):
        raise TypeError(
            f"{where}: expected batches, got a tuple of two tensors, {shown(data[0])} and {shown(data[1])}: wrap them "
            "in data.arrays(inputs, targets, batch_size=...), or in a list for a single batch"
        )
    if isinstance(data, Mapping):
        raise TypeError(
            f"{where}: expected batches, got a mapping of {', '.join(map(repr, data))}: a single batch goes into a "
            "list, [batch]"
        )
    if isinstance(data, str | type) or not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        raise TypeError(
            f"{where}: expected batches, such as a DataLoader, a list of batches or data.arrays(...), got {shown(data)}"
        )


def _is_pair(data: Any) -> bool:
    """Whether data are inputs and targets, and not two batches of one form."""
    if type(data) is not tuple or len(data) != 2 or not all(isinstance(part, Tensor) and part.ndim for part in data):
        return False
    first, second = data
    return len(first) == len(second) and (first.dtype, first.shape) != (second.dtype, second.shape)
