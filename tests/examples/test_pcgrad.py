"""PCGrad: the example's step against a plain loop."""

import torch
from torch import Tensor, nn

import purecompose as pc
from examples import pcgrad


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    net = pcgrad.network().to(dtype)
    batches = [pcgrad.points(seed, dtype) for seed in range(20)]
    params = list(net.parameters())
    optimizer = torch.optim.Adam(params, lr=3e-3)
    for i in range(num_batches):
        inputs, targets = batches[i % len(batches)]
        losses = (net(inputs) - targets).square().mean(0)
        grads = [nn.utils.parameters_to_vector(torch.autograd.grad(one, params, retain_graph=True)) for one in losses]
        projected = [grad.clone() for grad in grads]
        for own, other in ((0, 1), (1, 0)):
            dot = projected[own] @ grads[other]
            if dot < 0:
                projected[own] -= dot / grads[other].square().sum() * grads[other]
        total = (projected[0] + projected[1]).split([param.numel() for param in params])
        for param, grad in zip(params, total, strict=True):
            param.grad = grad.view_as(param)
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_pcgrad_equals_a_plain_loop():
    step, start, batches = pcgrad.make(torch.float64)
    states = list(pc.training(step, start, batches, duration="25ba"))
    conflicts = sum(state.metrics["conflict"] for state in states)
    assert 0 < conflicts < 25
    torch.testing.assert_close(states[-1].params, plain_loop(25), rtol=1e-9, atol=1e-9)
