"""Helpers for the tests of observers: a linear network and four batches, the same in every test."""

from typing import Any

import pytest
import torch

from purecompose import State, losses, optim, stack_states


def make_state(duration: str | None = "3ep", optimizer: Any = None, key: int = 0) -> State:
    net = torch.nn.Linear(4, 3)
    with torch.no_grad():
        net.weight.copy_(torch.arange(12.0).reshape(3, 4) / 10)
        net.bias.zero_()
    return State.create(
        net, loss=losses.cross_entropy, optimizer=optimizer or optim.sgd(0.5), duration=duration, key=key
    )


def make_population(size: int = 3, optimizer: Any = None) -> State:
    """Return a population whose members differ in their weights."""
    states = [make_state(optimizer=optimizer, key=key) for key in range(size)]
    return stack_states(
        [s.replace(params={name: p * (i + 1) for name, p in s.params.items()}) for i, s in enumerate(states)]
    )


def make_batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


def at(state: State, batch: int, **changes: Any) -> State:
    """Return the state after `batch` batches of eight examples."""
    start = state.timestamp
    return state.replace(timestamp=type(start)(run=start.run).advance_by(batch, samples=8), **changes)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with every tensor whose value the host reads."""
    read: list[str] = []
    for name in ("item", "tolist"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, name=name, original=original: (read.append(name), original(self))[1]
        )
    return read


class Kept(list[dict[str, Any]]):
    """A sink that keeps the records."""

    def write(self, records: list[dict[str, Any]]) -> None:
        self.extend(records)
