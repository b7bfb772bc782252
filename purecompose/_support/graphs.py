"""Batches of graphs with the protocol of torch_geometric's `Batch`, which need not be installed.

The protocol: `num_graphs`, the number of examples; `apply(fn)`, which maps the tensors in place; `stores`, the parts
that hold them; `to_dict()`; and `copy.copy`, after which the stores are other ones.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor


_RECORDS = ("_slice_dict", "_inc_dict")
"""Where torch_geometric keeps the place of each graph's rows, on the host."""


def is_graphs(value: Any) -> bool:
    """Return whether a value is a batch of graphs."""
    return hasattr(type(value), "num_graphs") and callable(getattr(value, "apply", None))


def map_graphs(fn: Callable[[Tensor], Any], graphs: Any) -> Any:
    """Return a batch with `fn` applied to each tensor; everything else is shared."""
    return copy.copy(graphs).apply(lambda value: fn(value) if isinstance(value, Tensor) else value)


def graph_tensors(graphs: Any) -> list[Tensor]:
    """Return the tensors of a batch, in the order of `map_graphs`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_graphs(note, graphs)
    return found


def without_records(graphs: Any) -> Any:
    """Return a batch without the place of each graph's rows, which differs from batch to batch.

    The number of graphs then follows from the shape of `ptr`, the first node of each graph, if there is one.
    """
    bare = copy.copy(graphs)
    records = (*_RECORDS, "_num_graphs") if hasattr(graphs, "ptr") else _RECORDS
    for store in bare.stores:
        for name in records:
            vars(store).pop(name, None)
    return bare
