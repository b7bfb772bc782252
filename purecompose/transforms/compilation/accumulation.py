"""Sums of gradients: rows of an embedding's gradient are added to the other gradient of the same weight.

An embedding's gradient is zero except in the rows that the batch looks up. If the weight is also that of another layer,
such as the last one of a language model, the graph adds it to that layer's gradient, so that two tensors of the size
of the weight are in memory. Here the rows are added to the one that exists.
"""

from typing import Any

import torch
from torch import fx


_aten = torch.ops.aten
_PUT, _MASKED_PUT = _aten._unsafe_index_put.default, _aten._unsafe_masked_index_put_accumulate.default
"""The operations that end Inductor's decomposition of an embedding's gradient, in torch 2.11 and in later versions."""


def accumulate_rows(module: fx.GraphModule) -> None:
    """Replace `x + put(zeros, rows)` by `put(x, rows)`, where `put` adds rows at the places of indices.

    Rows with the same index are then added to `x` one after the other, so the last bits of the sum may differ.

    Args:
        module: A pure graph of operations that Inductor supports, whose nodes carry fake tensors (`meta["val"]`).
    """
    node: Any
    for node in module.graph.find_nodes(op="call_function", target=_aten.add.Tensor):
        x, put = node.args
        if not _is_put_into_zeros(put):
            x, put = put, x
        if x is put or node.kwargs or not _is_put_into_zeros(put) or not _are_alike(node, x, put):
            continue
        with module.graph.inserting_before(node):
            total = module.graph.call_function(put.target, (x, *put.args[1:]))
        total.meta.update(node.meta)
        node.replace_all_uses_with(total)
        module.graph.erase_node(node)
        module.graph.erase_node(put)
    module.recompile()


def _is_put_into_zeros(node: Any) -> bool:
    """Return whether a node adds rows to a tensor of zeros, and is used only once."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    if node.target is not _MASKED_PUT and not (node.target is _PUT and node.args[3:] == (True,)):
        return False
    target: Any = node.args[0]
    return target.target is _aten.full.default and target.args[1] == 0


def _are_alike(*nodes: Any) -> bool:
    """Return whether all are tensors of the same shape, strides and dtype."""
    if not all(isinstance(node, fx.Node) for node in nodes):
        return False
    first, *others = (node.meta["val"] for node in nodes)
    return all(
        (first.shape, first.stride(), first.dtype) == (other.shape, other.stride(), other.dtype) for other in others
    )
