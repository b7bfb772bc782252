"""What the observers' tests share: a linear network and four batches, the same in every test."""

import torch

from purecompose import State, losses, optim


def make_state(duration: str | None = "3ep") -> State:
    net = torch.nn.Linear(4, 3)
    with torch.no_grad():
        net.weight.copy_(torch.arange(12.0).reshape(3, 4) / 10)
        net.bias.zero_()
    return State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.5), duration=duration)


def make_batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]
