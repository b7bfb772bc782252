"""Memory layouts: what is converted to channels-last in a graph; its values and results stay."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from purecompose.transforms.compilation.capture import fake_mode
from purecompose.transforms.compilation.rewriting import with_channels_last


aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class _Checked(fx.Interpreter):
    """An interpreter that requires the strides in `meta`, and channels-last for convolutions."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target in CONVOLUTIONS:
            images = [x for x in self.fetch_args_kwargs_from_env(n)[0] if isinstance(x, Tensor) and x.ndim == 4]
            assert all(x.is_contiguous(memory_format=torch.channels_last) for x in images)
        result = super().run_node(n)
        if isinstance(result, Tensor):
            assert result.stride() == n.meta["val"].stride(), n
        return result


def loss(x: Tensor, *filters: Tensor) -> Tensor:
    """Return the loss of a small network with a residual connection, pooling, and a view that needs a copy."""
    first, second, third = filters
    hidden = F.gelu(F.conv2d(x, first, padding=1))
    hidden = hidden + F.batch_norm(F.conv2d(hidden, second, padding=1), None, None, training=True)
    return F.conv_transpose2d(F.avg_pool2d(hidden, 2), third).view(len(x), -1).logsumexp(1).square().mean()


ARGS = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((5, 3, 6, 6), (4, 3, 3, 3))]
ARGS += [torch.randn(4, 4, 3, 3), torch.randn(4, 2, 2, 2)]


def traced(fn: Callable[..., Any], args: list[Tensor]) -> fx.GraphModule:
    mode = fake_mode()
    with mode:
        return make_fx(fn)(*[mode.from_tensor(arg, static_shapes=True) for arg in args])


def test_images_and_filters_are_converted_once() -> None:
    def step(*args: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            needs = [arg.detach().requires_grad_() for arg in args]
            return torch.autograd.grad(loss(*needs), needs)

    graph = traced(step, ARGS)
    assert sum(node.target in CONVOLUTIONS for node in graph.graph.nodes) == 6
    found = with_channels_last(graph)
    # The images, three filters, the gradient of the view, which is contiguous; and the four results.
    assert len(found.graph.find_nodes(op="call_function", target=aten.clone.default)) == 9
    for one, other in zip(_Checked(found).run(*ARGS), step(*ARGS), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_graph_that_refuses_other_strides_is_left_as_it_is() -> None:
    def step(x: Tensor, filters: Tensor) -> Tensor:
        return torch.view_as_complex(F.conv2d(x, filters)).abs().sum()

    graph = traced(step, [torch.randn(2, 3, 4, 2), torch.randn(3, 3, 1, 1)])
    assert with_channels_last(graph) is graph
