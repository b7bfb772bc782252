"""Memory layouts: the convolutions of a flat graph in channels-last.

Where Inductor computes convolutions in channels-last, it converts their arguments. Between convolutions it follows the
strides of the trace, which come from the contiguous filters of the state, so that results would be stored in both
layouts. Here filters and images are converted once, and the strides of what is computed from them are derived again.
"""

from typing import Any

import torch
from torch import Tensor, fx


_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.convolution.default, _aten.convolution_backward.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_REFUSING = (_aten.view_as_complex.default, _aten.view.dtype)
_STRIDED = (_aten.as_strided.default, _aten.as_strided_scatter.default)


def with_channels_last(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph that computes its two-dimensional convolutions in channels-last.

    Results keep the strides of the trace. A graph that needs other strides than these two layouts have, for results or
    for an operation such as `view_as_complex`, is returned unchanged.

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
