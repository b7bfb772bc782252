"""Graphs that run operation by operation write into donated buffers early, and compute the same."""

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.core.ranks import Ranks
from purecompose.transforms.compilation.updates import write_early


def two_layers(first: Tensor, second: Tensor, mean: Tensor, inputs: Tensor) -> list[Tensor]:
    """Compute gradients of two layers, then new weights, then write these: as steps are traced."""
    hidden = inputs @ first
    new_mean = mean.clone()  # batch_norm writes into it, which its schema does not mention
    scaled = torch.native_batch_norm(hidden, None, None, new_mean, torch.ones(4), True, 0.5, 1e-5)[0]
    outputs = scaled @ second
    grad_second = scaled.t() @ outputs
    grad_first = inputs.t() @ (outputs @ second.t())
    new_first, new_second = first - grad_first, second - grad_second
    new_first.add_(1.0)  # the write below refers to the difference, not to this operation
    old = first.view(-1)[0].clone()
    first.copy_(new_first)
    second.copy_(new_second)
    mean.copy_(new_mean)
    return [outputs.sum(), old]


def inputs() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=draw) for shape in ((3, 4), (4, 2), (4,), (5, 3))]


def traced() -> fx.GraphModule:
    return make_fx(two_layers, tracing_mode="fake")(*inputs())


def test_the_last_layer_is_written_before_the_gradient_of_the_first():
    module = traced()
    write_early(module)
    nodes = list(module.graph.nodes)
    first, second, _, given = (node for node in nodes if node.op == "placeholder")
    writes = {node.args[0]: nodes.index(node) for node in nodes if node.target is torch.ops.aten.copy_.default}
    (transposed,) = (node for node in given.users if node.target is torch.ops.aten.t.default)
    (product,) = transposed.users
    assert writes[second] < nodes.index(product) < writes[first]


def test_results_and_writes_are_the_same_in_both_orders():
    expected, found = inputs(), inputs()
    module = traced()
    results = two_layers(*expected)
    write_early(module)
    torch.testing.assert_close(module(*found), results, rtol=0, atol=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_a_message_sends_is_written_after_the_message_has_arrived():
    def gathered(rows: Tensor, inputs: Tensor) -> list[Tensor]:
        whole = Ranks("a group", 0, 2).gather(rows)
        rows.copy_(inputs.sum(0))  # depends on the message only by what it writes into
        return [inputs @ whole]

    module = make_fx(gathered, tracing_mode="fake")(torch.ones(2, 4), torch.ones(3, 2, 4))
    write_early(module)
    names = [str(node.target).split(".")[1] for node in module.graph.nodes if node.op == "call_function"]
    assert names.index("wait_tensor") < names.index("copy_")
