"""The operations of a traced update: they compute what the optimizer does in eager code."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose import optim
from purecompose.transforms.compilation.updates import update_in_place


COUNT = 33


def leaves(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {str(i): torch.randn(3, 4, generator=draw).mT for i in range(COUNT)}


def traced(optimizer: Any, *arguments: Any) -> fx.GraphModule:
    """Return the graph of an update."""
    return make_fx(lambda *given: optimizer.update(*given), tracing_mode="fake")(*arguments)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("make", [optim.adam, optim.adamw, optim.decoupled_adamw])
def test_a_traced_update_is_one_operation_with_the_same_result(make, amsgrad: bool):
    optimizer = make(0.1, weight_decay=0.1, amsgrad=amsgrad)
    params, grads = leaves(0), leaves(1)
    opt_state = optimizer.update(leaves(2), optimizer.init(params), params)[1]
    with torch.no_grad():
        graph = traced(optimizer, grads, opt_state, params)
        found, expected = graph(grads, opt_state, params), optimizer.update(grads, opt_state, params)
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.purecompose.adam.default)) == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(new.stride() == old.stride() for new, old in zip(found[0].values(), params.values(), strict=True))


@pytest.mark.parametrize("shrinkage", [0.0, 0.1])
@pytest.mark.parametrize("num_averages", [2, 3])
def test_an_update_in_place_writes_what_the_other_returns(shrinkage: float, num_averages: int):
    params, grads = list(leaves(0).values()), [grad.contiguous() for grad in leaves(1).values()]
    steps = [torch.tensor(float(i)) for i in range(COUNT)]
    memory = [leaf.abs() for seed in range(num_averages) for leaf in leaves(2 + seed).values()]
    scalars = torch.tensor(0.1, dtype=torch.float64), torch.tensor(shrinkage, dtype=torch.float64), 0.9, 0.999, 1e-8
    expected = torch.ops.purecompose.adam(params, grads, steps, memory, *scalars)
    torch.ops.purecompose.adam_(params, grads, steps, memory, *scalars)
    torch.testing.assert_close([*params, *steps, *memory], expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_viewed", [False, True])
def test_an_update_that_is_copied_into_what_it_reads_is_done_in_place(is_viewed: bool):
    def update(params: list[Tensor], grads: list[Tensor], steps: list[Tensor], memory: list[Tensor]) -> None:
        old = [*params, *steps, *memory]
        viewed = [tensor.view(tensor.shape) if is_viewed else tensor for tensor in old]
        rate, decay = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
        groups = viewed[:2], grads, viewed[2:4], viewed[4:]
        for tensor, new in zip(old, torch.ops.purecompose.adam(*groups, rate, decay, 0.9, 0.999, 1e-8), strict=True):
            tensor.copy_(new)

    def made() -> tuple[list[Tensor], ...]:
        rows = [torch.arange(6.0).reshape(2, 3) + i for i in range(8)]
        return rows[:2], rows[2:4], [torch.tensor(1.0), torch.tensor(1.0)], rows[4:]

    graph = make_fx(update, tracing_mode="fake")(*made())
    update_in_place(graph)
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.purecompose.adam_.default)) == 1
    found, expected = made(), made()
    graph(*found)
    update(*expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("size, is_fused", [(3, False), (2**18, True)])
def test_few_small_tensors_are_traced_as_the_formula(size: int, is_fused: bool):
    optimizer = optim.adam(0.1)
    params = {"w": torch.ones(size)}
    with torch.no_grad():
        graph = traced(optimizer, params, optimizer.init(params), params)
    operations = graph.graph.find_nodes(op="call_function", target=torch.ops.purecompose.adam.default)
    assert len(operations) == is_fused
