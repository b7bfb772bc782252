"""Updates of an optimizer in a graph: in place, and of the rows that a batch looks up.

Fused updates write into donated buffers, instead of returning values to be copied there. Those of a large table whose
gradient is that of an embedding are given the looked-up rows and their places, and the dense gradient is left out.
"""

from typing import Any, NamedTuple

import torch
from torch import fx

from purecompose.transforms.compilation.messages import drop_unread, memories


_aten, _ops = torch.ops.aten, torch.ops.purecompose


def update_in_place(module: fx.GraphModule) -> None:
    """Replace `purecompose::adam` by `adam_` and `rows_at` by `rows_at_`, where a graph copies results into the old.

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
    for node in [node for node in places if node.target in _UPDATES]:
        in_place, parts = _UPDATES[node.target]
        old, grads, is_possible = parts(node)
        new = {result.args[1]: result for result in node.users}
        copied: list[Any] = [copies.get(new.get(i)) for i in range(len(old))]
        written = {storage for tensor in old for storage in memories(tensor)}
        if (
            is_possible
            and len(set(old)) == len(old)
            and all(copy is not None and copy.args[0] is tensor for copy, tensor in zip(copied, old, strict=True))
            and all(last_read[storage] <= places[node] for storage in written)
            and written.isdisjoint(storage for grad in grads for storage in memories(grad))
        ):
            with module.graph.inserting_before(node):
                module.graph.call_function(in_place, node.args, node.kwargs)
            for i, (copy, tensor) in enumerate(zip(copied, old, strict=True)):
                module.graph.erase_node(copy)
                new[i].replace_all_uses_with(tensor)
                module.graph.erase_node(new[i])
            module.graph.erase_node(node)
    module.recompile()


def _parts_of_adam(node: Any) -> tuple[list[fx.Node], list[fx.Node], bool]:
    """Return what an update moves, its gradients, and whether it may be in place."""
    params, grads, steps, memory = (list(tensors) for tensors in node.args[:4])
    is_alike = _strides(params) * (len(memory) // len(params)) == _strides(memory)  # as the kernel requires
    return [*params, *steps, *memory], grads, is_alike


def _parts_of_rows(node: Any) -> tuple[list[fx.Node], list[fx.Node], bool]:
    return list(node.args[0]), [*node.args[1], *node.args[2]], True


_UPDATES: dict[Any, Any] = {
    _ops.adam.default: (_ops.adam_.default, _parts_of_adam),
    _ops.rows_at.default: (_ops.rows_at_.default, _parts_of_rows),
}
"""Updates that return new tensors, each with its form in place and a function that returns its parts."""


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


def look_up_rows(module: fx.GraphModule) -> None:
    """Replace `purecompose::rows` by `purecompose::rows_at` where its gradient is one of embeddings, and nothing else.

    Args:
        module: A graph as it was traced, whose nodes carry fake tensors (`meta["val"]`).
    """
    node: Any
    for node in module.graph.find_nodes(op="call_function", target=_ops.rows.default):
        tensors, grad, *scalars = node.args
        sources = _looked_up(grad)
        if sources is None:
            continue
        with module.graph.inserting_before(node):
            insert = _Inserting(module.graph, grad.meta["val"].fake_mode)
            rows, places = zip(*(_rows_and_places(insert, source) for source in sources), strict=True)
            new = module.graph.call_function(_ops.rows_at.default, (tensors, [*places], [*rows], *scalars))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        if not grad.users:
            drop_unread(module.graph)
    module.recompile()


def _looked_up(grad: Any) -> list[Any] | None:
    """Return the gradients of embeddings that a node adds, or is itself; `None` if it is something else."""
    if grad.target is _aten.add.Tensor and not grad.kwargs and all(isinstance(arg, fx.Node) for arg in grad.args):
        parts = [_looked_up(arg) for arg in grad.args]
        return None if None in parts else [one for part in parts for one in part or ()]
    if grad.target is _aten.embedding_dense_backward.default:
        return None if grad.args[4] else [grad]  # divided by the number of times that an index occurs
    if grad.target is not _aten._embedding_bag_backward.default:
        return None
    by_frequency, mode, _, weights = grad.args[7:11]
    is_fixed = type(grad.args[1].meta["val"].numel()) is int
    return [grad] if is_fixed and not by_frequency and mode in (_SUM, _MEAN) and weights is None else None


_SUM, _MEAN = 0, 1
"""torch's numbers of the modes of bags."""


class _Inserting(NamedTuple):
    """Inserts operations into a graph, with fake tensors as values."""

    graph: fx.Graph
    mode: Any

    def __call__(self, operation: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(operation, args, kwargs)
        values = fx.map_arg(args, lambda arg: arg.meta["val"])
        with self.mode:
            node.meta["val"] = operation(*values, **kwargs)
        return node


def _rows_and_places(insert: _Inserting, source: Any) -> tuple[fx.Node, fx.Node]:
    """Return the rows that an embedding's gradient consists of, and their places in the table."""
    if source.target is _aten.embedding_dense_backward.default:
        rows, places, _, padding, _ = source.args
    else:
        rows, places, offsets, _, sizes, *_ = source.args
        mode, padding = source.args[8], source.args[11] if len(source.args) > 11 else -1
        if mode == _MEAN:
            counts = insert(_aten.clamp_min.default, insert(_aten.unsqueeze.default, sizes, 1), 1)
            rows = insert(_aten.div.Tensor, rows, counts)
        numbers = insert(_aten.arange.default, places.meta["val"].numel(), device=places.meta["val"].device)
        ends = insert(_aten.searchsorted.Tensor, offsets, numbers, right=True)
        rows = insert(_aten.index_select.default, rows, 0, insert(_aten.sub.Tensor, ends, 1))
    if padding >= 0:
        is_padding = insert(_aten.unsqueeze.default, insert(_aten.eq.Scalar, places, padding), -1)
        rows = insert(_aten.masked_fill.Scalar, rows, is_padding, 0)
    return rows, places
