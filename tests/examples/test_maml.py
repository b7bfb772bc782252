"""MAML against a plain loop, which adapts to one task after the other."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from examples.maml import Adapted, make
from tests.examples.agreement import assert_agrees, repeated


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    _, _, batches = make(num_batches, dtype)
    torch.manual_seed(0)
    maml = Adapted().to(dtype)
    optimizer = torch.optim.Adam(maml.parameters(), lr=1e-3)
    for (x, y, places), values in repeated(batches, num_batches):
        optimizer.zero_grad()
        for task in range(len(x)):
            params = dict(maml.net.named_parameters())
            inner = F.mse_loss(maml.net(x[task]), y[task])
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            adapted = {name: param - maml.lr * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
            outer = F.mse_loss(functional_call(maml.net, adapted, places[task]), values[task])
            (outer / len(x)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in maml.named_parameters()}


def test_maml_agrees_with_a_plain_loop() -> None:
    assert_agrees(make, plain_loop)
