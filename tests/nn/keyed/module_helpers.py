"""Helpers for the tests of keyed modules: seeded modules and inputs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


Fn = Callable[[Tensor], Tensor]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a float64 module with the same weights in every run, without advancing the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def images(n: int = 6) -> Tensor:
    return torch.linspace(-2.0, 2.0, n * 4 * 36, dtype=torch.float64).sin().reshape(n, 4, 6, 6)


def sequences(x: Tensor) -> Tensor:
    """Return sequences (n, 18, 8) made from images."""
    return x.reshape(len(x), 18, 8)
