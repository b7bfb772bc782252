"""Fused updates of an optimizer that write into donated buffers, instead of returning values to be copied there."""

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
            and all(map(_are_alike, params * (len(memory) // len(params)), memory))  # as the kernel requires
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


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    return one.meta["val"].stride() == other.meta["val"].stride()
