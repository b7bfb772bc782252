"""Writes into donated buffers, grouped so that one kernel of a GPU serves many small tensors.

Optimizers update lists of tensors. What else a step writes, it writes one by one: averages of buffers, sums of
gradients, and everything under `vmap`, for which torch has no operations on lists. A launch for each costs more than
the work of a small one.
"""

import operator
from typing import Any

import torch
from torch import fx


_aten = torch.ops.aten
_COPY, _COPY_ALL = _aten.copy_.default, _aten._foreach_copy_.default


def write_together(module: fx.GraphModule) -> None:
    """Replace copies into placeholders by copies of lists, of values that are computed alike.

    The blocks of one kernel run in any order. So no value of a list is computed from what another copy of the list
    writes, except through operations that are kernels of their own. Values that are computed from those of a list, as
    averages of new parameters are, stay out: their kernels are part of that list's.

    Args:
        module: A graph in which only copies write into placeholders, each into another one.
    """
    copies: list[Any] = [
        node for node in module.graph.find_nodes(op="call_function", target=_COPY) if node.args[0].op == "placeholder"
    ]
    reads = _reads(module.graph, [copy.args[0] for copy in copies])
    groups: dict[Any, list[list[Any]]] = {}
    for copy in copies:
        target, value = copy.args
        if not _is_elementwise(value) or any(_is_of_list(_seen_through(node)) for node in value.all_input_nodes):
            continue
        alike = groups.setdefault((_form(value), target.meta["val"].dtype), [])
        for group in alike:
            if all(not (reads[value] & reads[to] or reads[other] & reads[target]) for to, other in map(_args, group)):
                group.append(copy)
                break
        else:
            alike.append([copy])
    for group in [group for alike in groups.values() for group in alike if len(group) > 1]:
        with module.graph.inserting_before(group[-1]):
            targets, values = (list(nodes) for nodes in zip(*map(_args, group), strict=True))
            module.graph.call_function(_COPY_ALL, (targets, values))
        for copy in group:
            module.graph.erase_node(copy)
    module.recompile()


def _reads(graph: fx.Graph, targets: list[fx.Node]) -> dict[fx.Node, int]:
    """Return for each node the targets from which one kernel may compute it, as the bits of an integer."""
    bits = {target: 1 << index for index, target in enumerate(targets)}
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found[node] = bits.get(node, 0)
        if not _is_own_kernel(node.target):
            for needed in node.all_input_nodes:
                found[node] |= found[needed]
    return found


def _is_own_kernel(target: Any) -> bool:
    """Return whether an operation is never part of another one's kernel."""
    name = str(target)
    return name.startswith("purecompose.") or any(word in name for word in ("mm.", "convolution", "dot_product"))


def _is_elementwise(node: fx.Node) -> bool:
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_of_list(node: fx.Node) -> bool:
    return node.target is operator.getitem and "_foreach_" in str(node.args[0])


def _seen_through(node: Any) -> Any:
    """Return what a node is a view of, or a copy with other strides."""
    while getattr(node.target, "is_view", False) or node.target is _aten.clone.default:
        node = node.args[0]
    return node


def _form(node: Any, depth: int = 4) -> Any:
    """Return what a value is computed by: the last elementwise operations, without shapes and views."""
    node = _seen_through(node)
    if not depth or not _is_elementwise(node):
        return ""
    return str(node.target), *(_form(one, depth - 1) for one in node.all_input_nodes)


def _args(copy: Any) -> Any:
    return copy.args
