"""Rematerialization: a GPU computes cheap values again where it would otherwise store and read them.

A GPU's time is mostly that of moving bytes. Inductor computes a value that several kernels use in each of them, unless
it is made from more than four tensors: then it is stored. That counts the mean of a channel like a tensor of all
images. Here bytes are counted instead. Besides, the backward pass of a ReLU after a normalisation finds the signs from
the input of the normalisation, which it reads anyway, and not from the result of the ReLU.

For a ResNet-18 in bfloat16 this moves 0.94 of the bytes (`benchmarks/gpu_code`). On a CPU nothing is changed: its code
takes as long either way.
"""

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from purecompose.transforms.compilation.inductor import replaced


_aten = torch.ops.aten
_ALIAS = _aten.alias.default
_CONVERT = torch.ops.prims.convert_element_type.default
_LONGEST = 32
"""Number of operations up to which a chain is computed again."""


def recompute_signs(graph: fx.GraphModule) -> int:
    """Let comparisons of a ReLU with 0 read the argument of the ReLU, computed again from one tensor.

    The numbers of the graph stay the same: `relu(x) <= 0` where `x <= 0`, also for NaN. A fused kernel does not round
    the argument to half precision, so that the sign of a number next to 0 may be another. It is done where the tensor
    from which the argument is computed, by elementwise operations with small tensors, is in memory at that time anyway.

    Args:
        graph: A functional graph, whose nodes carry fake tensors (`meta["val"]`).

    Returns:
        The number of comparisons.
    """
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    num = 0
    for sign in graph.graph.find_nodes(op="call_function", target=_aten.le.Scalar):
        found: Any = sign.args[0]
        while found.target is _ALIAS:
            found = found.args[0]
        if sign.args[1] != 0 or found.target is not _aten.relu.default:
            continue
        argument = found.args[0]
        chain, sources = _chain(argument)
        large = [one for one in sources if _is_large(one, argument)]
        if len(chain) <= _LONGEST and len(large) == 1 and _is_used_after(large[0], order[sign], order):
            with graph.graph.inserting_before(sign):
                copies = _copied(graph.graph, sorted(chain, key=order.__getitem__))
            sign.args = (copies.get(argument, argument), 0)
            num += 1
    graph.recompile()
    return num


def _is_used_after(node: fx.Node, place: int, order: dict[fx.Node, int]) -> bool:
    if node.op == "placeholder":  # in memory during all of the step
        return True
    return any(
        _is_used_after(user, place, order) if user.target is _ALIAS else order.get(user, -1) > place
        for user in node.users
    )


def _copied(graph: fx.Graph, nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return copies of nodes, which use each other and otherwise what the nodes use."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda one: copies.get(one, one))
    return copies


def _chain(end: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the large elementwise operations from which a node is computed, with itself, and what these are given."""
    chain, sources, left = set[fx.Node](), set[fx.Node](), [end]
    while left and len(chain) <= _LONGEST:
        node = left.pop()
        if node in chain:
            continue
        target: Any = node.target
        is_elementwise = node.op == "call_function" and isinstance(target, torch._ops.OpOverload)
        is_elementwise = is_elementwise and (target is _CONVERT or target.is_view or torch.Tag.pointwise in target.tags)
        if is_elementwise and _is_large(node, end):
            chain.add(node)
            left += node.all_input_nodes
        else:
            sources.add(node)
    return chain, sources


def _is_large(node: fx.Node, other: fx.Node) -> bool:
    """Return whether reading a node takes long, compared with another one."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and 16 * value.numel() > other.meta["val"].numel()


def storing_by_bytes(ir: Any, graphs: Any) -> AbstractContextManager[None]:
    """Return a scope in which Inductor stores a value that several operations use if that moves fewer bytes.

    Args:
        ir: The module `torch._inductor.ir`.
        graphs: `torch._inductor.virtualized.V`, whose `graph` is the one being compiled.
    """

    def is_stored(plain: Any, self: Any, users: int, **options: Any) -> bool:
        is_asked = plain(self, users, **options)
        data = self.data
        if users < 2 or not isinstance(data, ir.Pointwise) or ir.is_cpu(data) or self.has_large_inner_fn():
            return is_asked
        try:
            size = math.prod(map(int, data.get_size()))
            buffers = [graphs.graph.try_get_buffer(name) for name in data.inner_fn_opcount().read_buffers]
            read = sum(
                min(size, math.prod(map(int, buffer.get_size()))) * buffer.get_dtype().itemsize for buffer in buffers
            )
        except (AttributeError, TypeError):  # sizes that are left open, or another form of this torch
            return is_asked
        written = size * data.get_dtype().itemsize
        return options.get("graph_reuse", True) and users * read > read + written + users * written

    return replaced(ir.StorageBox, "should_realize_on_reuse", is_stored)
