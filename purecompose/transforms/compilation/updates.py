"""Changes of a traced step that save memory: updates in place, and gradients of embeddings added row by row.

Fused updates of an optimizer write into donated buffers, instead of returning values to be copied there.

An embedding's gradient is zero except in the rows that the batch looks up. If the weight is also that of another layer,
such as the last one of a language model, the graph adds it to that layer's gradient, so that two tensors of the size
of the weight are in memory. Here the rows are added to the one that exists.
"""

from typing import Any

import torch
from torch import fx

from purecompose.transforms.compilation.ordering import memories


_aten, _ops = torch.ops.aten, torch.ops.purecompose


def update_in_place(module: fx.GraphModule) -> None:
    """Replace `purecompose::adam` by `purecompose::adam_` where a graph copies its results into what it updates.

    That is the case in a step that donates, unless the old values are read afterwards, or are gradients as well.

    Args:
        module: A graph whose nodes carry fake tensors (`meta["val"]`).
    """
    _drop_idle_views(module.graph)
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    copies: dict[Any, Any] = {}
    """The copy of a value into a placeholder, if any."""
    last_read: dict[int, int] = {}
    """The place of the last node that reads a storage."""
    node: Any
    for node, place in places.items():
        reads = node.all_input_nodes
        if node.target is _aten.copy_.default and node.args[0].op == "placeholder":
            reads = [node.args[1]]
            copies[node.args[1]] = node
        for read in reads:
            last_read.update(dict.fromkeys(memories(read), place))
    for node in module.graph.find_nodes(op="call_function", target=_ops.adam.default):
        params, grads, steps, memory = (list(tensors) for tensors in node.args[:4])
        old, new = [*params, *steps, *memory], {result.args[1]: result for result in node.users}
        copied: list[Any] = [copies.get(new.get(i)) for i in range(len(old))]
        written = {storage for tensor in old for storage in memories(tensor)}
        if (
            len(set(old)) == len(old)
            and all(copy is not None and copy.args[0] is tensor for copy, tensor in zip(copied, old, strict=True))
            and all(last_read[storage] <= places[node] for storage in written)
            and written.isdisjoint(storage for grad in grads for storage in memories(grad))
            and _strides(params) * (len(memory) // len(params)) == _strides(memory)  # as the kernel requires
        ):
            with module.graph.inserting_before(node):
                module.graph.call_function(_ops.adam_.default, node.args, node.kwargs)
            for i, (copy, tensor) in enumerate(zip(copied, old, strict=True)):
                module.graph.erase_node(copy)
                new[i].replace_all_uses_with(tensor)
                module.graph.erase_node(new[i])
            module.graph.erase_node(node)
    module.recompile()


def _drop_idle_views(graph: fx.Graph) -> None:
    """Remove views that change nothing, such as those between a divided tensor and the rows of a process."""
    for node in graph.find_nodes(op="call_function", target=_aten.view.default):
        layout = _layout(node)
        if all(type(size) is int for size in layout[1:]) and layout == _layout(node.args[0]):  # no size is left open
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.dtype, value.storage_offset(), *value.shape, *value.stride()


def _strides(nodes: list[fx.Node]) -> list[tuple[int, ...]]:
    return [node.meta["val"].stride() for node in nodes]


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
