"""What the methods' tests share: a small classifier's state and its batches, made from seeds."""

from typing import Any

import torch
from torch import Tensor, nn

from purecompose import losses
from purecompose.optim import sgd
from purecompose.state import State


LR = 0.3


def make_state(
    net: nn.Module | None = None, *, loss: Any = losses.cross_entropy, num_classes: int = 4, **settings: Any
) -> State:
    """6 -> 8 -> classes unless a network is given; two epochs of ten batches, plain SGD."""
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, num_classes))
    return State.create(
        net, loss=loss, optimizer=sgd(LR), key=7, **{"duration": "2ep", "batches_per_epoch": 10, **settings}
    )


def make_batch(kind: str = "index", num: int = 10) -> tuple[Tensor, Tensor]:
    """Inputs (num, 6), and targets of four classes: indices, or dense with kind="soft"."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, 6, generator=generator)
    if kind == "index":
        return inputs, torch.randint(0, 4, (num,), generator=generator)
    return inputs, torch.softmax(torch.randn(num, 4, generator=generator), dim=1)
