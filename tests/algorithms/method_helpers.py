"""Helpers for the tests of methods: states and batches of small classifiers, made from seeds, and a recording step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from purecompose import losses
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.core.state import State
from purecompose.loop import loop_events
from purecompose.optim import sgd
from purecompose.testing.tasks import TASKS
from purecompose.time.event import Event
from purecompose.time.predicates import on


LR = 0.3


def make_state(
    net: nn.Module | None = None, *, loss: Any = losses.cross_entropy, num_classes: int = 4, **settings: Any
) -> State:
    """Return a state of two epochs of ten batches with plain SGD; the default network is 6 -> 8 -> classes."""
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, num_classes))
    return State.create(
        net, loss=loss, optimizer=sgd(LR), key=7, **{"duration": "2ep", "batches_per_epoch": 10, **settings}
    )


def make_batch(kind: str = "index", num: int = 10) -> tuple[Tensor, Tensor]:
    """Return inputs (num, 6), and targets of four classes: indices, or dense with kind="soft"."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, 6, generator=generator)
    if kind == "index":
        return inputs, torch.randint(0, 4, (num,), generator=generator)
    return inputs, torch.softmax(torch.randn(num, 4, generator=generator), dim=1)


def make_image_state(**options: Any) -> State:
    """Return a state of the testing suite's network for images; two epochs of four batches."""
    return TASKS["images"].make_state(0, duration="8ba", batches_per_epoch=4, **options)


def make_images(num: int = 12, channels: int = 3, size: int = 8, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return images (num, channels, size, size) of random levels; those of a floating dtype are from 0 to 1."""
    pixels = torch.randint(0, 256, (num, channels, size, size), generator=torch.Generator().manual_seed(num))
    return pixels.to(torch.uint8) if dtype == torch.uint8 else (pixels / 255).to(dtype)


def spy(seen: list[Any], *events: str | Event) -> Algorithm:
    """Return an algorithm that records the batches it sees."""
    return Algorithm("spy", on(*events), lambda _, state: seen.append(state.batch) or state)


def one_step(algorithms: Algorithm | Sequence[Algorithm], state: State, batch: Any, **settings: Any) -> State:
    """Return the state after INIT and one batch."""
    chosen = [algorithms] if isinstance(algorithms, Algorithm) else algorithms
    step = compose(loop_events, chosen, **settings)
    return step(step.init(state), batch)
