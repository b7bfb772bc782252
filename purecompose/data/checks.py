"""Reject data that are not batches, with a message on how to wrap them."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from purecompose._support.checks import shown


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
    if isinstance(data, Tensor):
        raise TypeError(
            f"{where}: expected batches, got one tensor, {shown(data)}: a single batch goes into a list, [batch]; "
            "tensor.split(n) cuts it into batches of n"
        )
    if _is_pair(data):
        raise TypeError(
            f"{where}: expected batches, got inputs and targets, {shown(data[0])} and {shown(data[1])}: wrap them "
            "in data.arrays(inputs, targets, batch_size=...), or in a list for a single batch, [(inputs, targets)]"
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
