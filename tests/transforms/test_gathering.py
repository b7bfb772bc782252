"""Parameters gathered layer by layer, in networks that compute with them without recording it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose._support.shards import whole
from purecompose.testing.simulated import simulated


class _Scaled(nn.Linear):
    """A layer whose weight is divided by what a function finds under `no_grad`."""

    def _scale(self) -> Tensor:
        return self.weight.abs().max()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        with torch.no_grad():
            scale = self._scale()
        return nn.functional.linear(input, self.weight / scale, self.bias)


class _ScaledByColumn(_Scaled):
    def _scale(self) -> Tensor:
        return self.weight.abs().mean(0)


class _Nearest(nn.Linear):
    """A codebook: each input is replaced by the nearest row."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        with torch.no_grad():
            nearest = torch.cdist(input, self.weight).argmin(1)
        return input + self.weight[nearest]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:  # noqa: A002
        ctx.save_for_backward(input, weight)
        return input @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors  # noqa: A001
        return grads[0] @ weight, grads[0].t() @ input


class _ByFunction(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return _Product.apply(input, self.weight) + self.bias  # pyright: ignore[reportOperatorIssue]


def _trained(kind: type[nn.Linear], mesh: Any = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(kind(4, 4), nn.Tanh(), nn.Linear(4, 4))
    state = pc.State.create(net, loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1), duration="3ba")
    step: Any = pc.compose(pc.loop_events)
    if mesh is not None:
        step, state = pc.fully_sharded(step, mesh, "layer"), pc.shard(state, mesh)
    batch = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(3):
        state = step(state, batch)
    return {name: whole(param).clone() for name, param in state.params.items()}


@pytest.mark.parametrize("kind", [_Scaled, _ScaledByColumn, _Nearest, _ByFunction])
def test_a_network_that_does_not_record_what_it_computes_gets_whole_parameters(kind: type[nn.Linear]) -> None:
    expected = _trained(kind)
    for found in simulated(2, lambda mesh: _trained(kind, mesh)):
        for name, param in expected.items():
            torch.testing.assert_close(found[name], param, rtol=0, atol=2e-7)
