"""Sums of gradients of one weight: rows of an embedding are added to what exists, without a tensor of zeros."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from purecompose.transforms.compilation.rewriting import accumulate_rows


aten = torch.ops.aten
TOKENS = torch.tensor([[1, 3, 3], [5, 0, 3]])
WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def tied(weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of an embedding whose weight is that of the last layer."""
    return F.linear(F.embedding(tokens, weight, padding_idx=0).tanh(), weight).logsumexp(-1).sum()


def twice(weight: Tensor, tokens: Tensor) -> Tensor:
    """Return a loss that looks up different rows in two places."""
    return untied(weight, tokens) + F.embedding(tokens // 2, weight).sin().prod(-1).sum()


def untied(weight: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, weight).tanh().square().sum()


def traced(loss: Callable[[Tensor, Tensor], Tensor]) -> fx.GraphModule:
    """Return the graph of a loss's gradient."""

    def gradient(weight: Tensor, tokens: Tensor) -> Tensor:
        with torch.enable_grad():
            needs = weight.detach().requires_grad_()
            return torch.autograd.grad(loss(needs, tokens), needs)[0]

    decompositions: Any = get_decompositions([aten.embedding_dense_backward, aten.new_zeros])
    return make_fx(gradient, decomposition_table=decompositions, tracing_mode="fake")(WEIGHT, TOKENS)


def num_zeros(module: fx.GraphModule) -> int:
    """Return the number of tensors of zeros with the size of the weight."""
    module.graph.eliminate_dead_code()
    tensors = module.graph.find_nodes(op="call_function", target=aten.full.default)
    return sum(node.meta["val"].shape == WEIGHT.shape for node in tensors)


@pytest.mark.parametrize("loss, before, after", [(tied, 1, 0), (twice, 2, 1), (untied, 1, 1)])
def test_rows_are_added_to_the_other_gradient(
    loss: Callable[[Tensor, Tensor], Tensor], before: int, after: int
) -> None:
    module, weight = traced(loss), WEIGHT.clone().requires_grad_()
    assert num_zeros(module) == before
    accumulate_rows(module)
    assert num_zeros(module) == after
    (expected,) = torch.autograd.grad(loss(weight, TOKENS), weight)
    torch.testing.assert_close(module(WEIGHT, TOKENS), expected)
