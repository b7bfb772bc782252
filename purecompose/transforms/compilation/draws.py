"""Draws of a flat graph on a CPU without kernels: tensor operations, compiled once for draws that are alike.

A draw is 140 operations. A network with many dropouts draws many times in a few shapes, so that draws of one shape
share a subgraph, which the compiled code calls.
"""

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.random.emulation import emulated
from purecompose.random.native import has_kernels


_philox = torch.ops.purecompose.philox.default
_MOST_INLINED = 3
"""Most draws of one shape that get operations of their own, which compilers fuse with those around them."""


def open_draws(module: fx.GraphModule) -> dict[Any, Any]:
    """Return a decomposition of draws if a graph has some whose sizes are left open: a subgraph has fixed sizes."""
    draws = _without_kernels(module)
    return {_philox: emulated} if any(isinstance(size, fx.Node) for draw in draws for size in draw.args[1]) else {}


def replace_draws(module: fx.GraphModule, decompositions: Any) -> None:
    """Replace each `purecompose::philox` on a CPU without kernels by tensor operations.

    Args:
        module: A functional graph of fixed sizes, whose nodes carry fake tensors (`meta["val"]`).
        decompositions: The table of decompositions for the new operations.
    """
    alike: dict[Any, list[Any]] = defaultdict(list)
    for node in _without_kernels(module):
        key, shape, dtype = node.args[0].meta["val"], *node.args[1:]
        alike[key.device, key.shape, key.stride(), tuple(shape), dtype].append(node)
    for number, ((*_, shape, dtype), nodes) in enumerate(alike.items()):
        drawing = _drawing(nodes[0].args[0].meta["val"], shape, dtype, decompositions)
        is_shared = len(nodes) > _MOST_INLINED
        if is_shared:
            module.add_submodule(f"drawing_{number}", drawing)
        for node in nodes:
            with module.graph.inserting_before(node):
                if is_shared:
                    drawn = _called(module.graph, f"drawing_{number}", node)
                else:
                    drawn = _inserted(module.graph, drawing, node)
            node.replace_all_uses_with(drawn)
            module.graph.erase_node(node)
    module.recompile()


def _without_kernels(module: fx.GraphModule) -> list[Any]:
    draws: list[Any] = module.graph.find_nodes(op="call_function", target=_philox)
    devices = [draw.args[0].meta["val"].device.type for draw in draws]
    return [draw for draw, device in zip(draws, devices, strict=True) if device != "cuda" and not has_kernels(device)]


def _drawing(key: Tensor, shape: Sequence[int], dtype: torch.dtype, decompositions: Any) -> fx.GraphModule:
    return make_fx(lambda key: [emulated(key, shape, dtype)], decompositions)(key)


def _inserted(graph: fx.Graph, drawing: fx.GraphModule, draw: Any) -> fx.Node:
    """Insert the operations of a draw into a graph, and return their result."""
    (placeholder,) = drawing.graph.find_nodes(op="placeholder")
    results: Any = graph.graph_copy(drawing.graph, {placeholder: draw.args[0]})
    return results[0]


def _called(graph: fx.Graph, drawing: str, draw: Any) -> fx.Node:
    """Insert a call of a subgraph in place of a draw, and return its result."""
    subgraph = graph.get_attr(drawing)
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (subgraph, drawing, draw.args[0]))
    call.meta["val"] = (draw.meta["val"],)
    result = graph.call_function(operator.getitem, (call, 0))
    result.meta["val"] = draw.meta["val"]
    return result
