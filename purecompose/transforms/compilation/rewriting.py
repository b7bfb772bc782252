"""Operations of a graph that are replaced before it is compiled: convolutions, sums, gradients, draws.

In this folder graphs are functional, and their nodes carry fake tensors (`meta["val"]`).
"""

import operator
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.optim.lists import formula
from purecompose.random.philox import emulated, has_kernels


_aten, _ops = torch.ops.aten, torch.ops.purecompose


# Memory layouts: the convolutions of a flat graph in channels-last.
#
# Where Inductor computes convolutions in channels-last, it converts their arguments. Between convolutions it follows
# the strides of the trace, which come from the contiguous filters of the state, so that results would be stored in
# both layouts. Here filters and images are converted once, and the strides of what is computed from them are derived
# again.


_CONVOLUTIONS = (_aten.convolution.default, _aten.convolution_backward.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_REFUSING = (_aten.view_as_complex.default, _aten.view.dtype)
_STRIDED = (_aten.as_strided.default, _aten.as_strided_scatter.default)


def with_channels_last(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph that computes its two-dimensional convolutions in channels-last; results keep the strides of the
    trace.

    A graph that needs other strides than these two layouts have, for results or for an operation such as
    `view_as_complex`, is returned unchanged.

    Args:
        module: The graph, whose nodes carry fake tensors (`meta["val"]`). Pure except for `copy_` into placeholders,
            since what was a view may become a copy.
    """
    if any(node.target in _REFUSING for node in module.graph.nodes):
        return module
    try:
        return fx.GraphModule(module, _converted(module))
    except RuntimeError:  # of `_Layouts.as_traced`, or of a custom operation
        return module


def _converted(module: fx.GraphModule) -> fx.Graph:
    layouts, copies = _Layouts(), {}

    def value(node: fx.Node) -> Any:
        return getattr(module, str(node.target)) if node.op == "get_attr" else node.meta["val"]

    for node in module.graph.nodes:
        copy = copies[node] = layouts.graph.node_copy(node, copies.__getitem__)
        with layouts.graph.inserting_before(copy):
            if node.target in _CONVOLUTIONS:
                for x in copy.all_input_nodes:
                    if isinstance(value(x), Tensor) and value(x).ndim == 4:  # not a bias or a number of examples
                        copy.replace_input_with(x, layouts.in_format(x, torch.channels_last))
            elif node.target in _VIEWS:
                copy.target = _aten.reshape.default
            elif node.op == "output" or node.target in _STRIDED:
                for x in node.all_input_nodes:
                    copy.replace_input_with(copies[x], layouts.as_traced(copies[x], value(x)))
        if node.op == "call_function" and not layouts.changed.isdisjoint(copy.all_input_nodes):
            args, kwargs = fx.map_arg((copy.args, copy.kwargs), value)
            operation: Any = copy.target
            copy.meta["val"] = operation(*args, **kwargs)
            layouts.changed.add(copy)
    return layouts.graph


class _Layouts:
    """A new graph, and the conversions inserted into it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.changed: set[fx.Node] = set()
        """Nodes whose strides may differ from the trace."""
        self._conversions: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}

    def in_format(self, node: fx.Node, memory_format: torch.memory_format) -> fx.Node:
        """Return the node in a memory format; it is converted at most once."""
        value = node.meta["val"]
        if value.is_contiguous(memory_format=memory_format):
            return node
        if (node, memory_format) not in self._conversions:
            options: dict[str, Any] = {"memory_format": memory_format}
            clone = self.graph.call_function(_aten.clone.default, (node,), options)
            clone.meta["val"] = value.clone(**options)
            self._conversions[node, memory_format] = clone
            self.changed.add(clone)
        return self._conversions[node, memory_format]

    def as_traced(self, node: fx.Node, traced: Any) -> fx.Node:
        """Return the node with the strides of the trace."""
        if node not in self.changed or not isinstance(traced, Tensor) or node.meta["val"].stride() == traced.stride():
            return node
        for memory_format in (torch.contiguous_format, torch.channels_last):
            if traced.is_contiguous(memory_format=memory_format):
                return self.in_format(node, memory_format)
        raise RuntimeError(f"no memory format has the strides {tuple(traced.stride())}")


_MEAN = 1
"""torch's number of the reduction "mean"."""


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Return the gradient of `nll_loss`, or of `nll_loss2d`, with respect to its input, with the bits of torch's
    decomposition.

    That writes -1 into a tensor of zeros, as large as the logits, in a kernel of its own. A comparison with the number
    of each class becomes part of the kernel that uses it; on a CPU it is as fast only for 32 bits.
    """
    dim = 0 if self.dim() < 2 else 1
    if reduction == _MEAN:
        grad_output = grad_output / total_weight
    if self.dim() == 1 and target.dim() > 0:
        target = target[0]
    target = target.unsqueeze(dim)
    if self.dim() > grad_output.dim() > 0:
        grad_output = grad_output.unsqueeze(dim)
    of_classes = [-1 if i == dim else 1 for i in range(self.dim())]
    if weight is not None:
        grad_output = grad_output * weight.reshape(of_classes)
    is_counted = target != ignore_index
    classes = torch.arange(self.shape[dim], dtype=torch.int32, device=target.device).reshape(of_classes)
    place = torch.where(is_counted, target, 0).to(torch.int32)
    chosen = torch.where(classes == place, -1.0, torch.zeros_like(self))
    return chosen * torch.where(is_counted, grad_output, 0)


def foreach_lerp(starts: list[Tensor], ends: list[Tensor], weight: float) -> list[Tensor]:
    """Return `start + weight (end - start)` for each pair, as `_foreach_lerp` does, in operations over all pairs.

    Inductor's decomposition, from torch 2.14 on, makes a tensor of the weight on the host, which a step on a GPU would
    copy to the device each time: `torch.compile` folds it, in a pass over the joint graph.
    """
    wide = [torch.float64 if start.dtype == torch.float64 else torch.float32 for start in starts]
    wide_starts, wide_ends = ([x.to(dtype) for x, dtype in zip(xs, wide, strict=True)] for xs in (starts, ends))
    if torch.float64 not in wide:
        weight = struct.unpack("f", struct.pack("f", weight))[0]  # as the kernel rounds it
    differences = _aten._foreach_sub.List(wide_ends, wide_starts)
    if abs(weight) < 0.5:
        results = _aten._foreach_add.List(wide_starts, _aten._foreach_mul.Scalar(differences, weight))
    else:
        results = _aten._foreach_sub.List(wide_ends, _aten._foreach_mul.Scalar(differences, 1 - weight))
    return [x.to(start.dtype) for x, start in zip(results, starts, strict=True)]


DECOMPOSITIONS: dict[Any, Any] = {
    _aten.nll_loss_backward.default: nll_loss_backward,
    _aten.nll_loss2d_backward.default: nll_loss_backward,
    _aten._foreach_lerp.Scalar: foreach_lerp,
    _ops.rows.default: formula,
}
"""Decompositions in place of Inductor's."""


# Gradients of embeddings added row by row.
#
# An embedding's gradient is zero except in the rows that the batch looks up. If the weight is also that of another
# layer, such as the last one of a language model, the graph adds it to that layer's gradient, so that two tensors of
# the size of the weight are in memory. Here the rows are added to the one that exists.


_PUT, _MASKED_PUT = _aten._unsafe_index_put.default, _aten._unsafe_masked_index_put_accumulate.default
"""The operations that end Inductor's decomposition of an embedding's gradient, in torch 2.11 and in later versions."""


def accumulate_rows(module: fx.GraphModule) -> None:
    """Replace `x + put(zeros, rows)` by `put(x, rows)`, where `put` adds rows at the places of indices.

    Rows with the same index are then added to `x` one after the other, so the last bits of the sum may differ.
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


# Draws of a flat graph on a CPU without kernels: tensor operations, compiled once for draws that are alike.
#
# A draw is 140 operations. A network with many dropouts draws many times in a few shapes, so that draws of one shape
# share a subgraph, which the compiled code calls.


_philox = torch.ops.purecompose.philox.default
_MOST_INLINED = 3
"""Most draws of one shape that get operations of their own, which compilers fuse with those around them."""


def open_draws(module: fx.GraphModule) -> dict[Any, Any]:
    """Return a decomposition of draws if a graph has some whose sizes are left open: a subgraph has fixed sizes."""
    draws = _without_kernels(module)
    return {_philox: emulated} if any(isinstance(size, fx.Node) for draw in draws for size in draw.args[1]) else {}


def replace_draws(module: fx.GraphModule, decompositions: Any) -> None:
    """Replace each `purecompose::philox` on a CPU without kernels by tensor operations."""
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
