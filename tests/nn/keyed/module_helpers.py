"""Helpers for the tests of keyed modules: seeded modules, inputs, and runs with keyed draws."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from purecompose.nn.keyed.modules import detect, keyed
from purecompose.random.keys import Rng, key


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


def run(fn: Fn, x: Tensor, rng: Rng | None = None, **place: Any) -> Tensor:
    rng = Rng(key(0)) if rng is None else rng
    with keyed(rng, **{"num_examples": len(x)} | place), detect():
        return fn(x)


MHA = seeded(lambda: nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True))
ENCODER = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.4, batch_first=True))
DECODER = seeded(lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.4, batch_first=True))
LSTM = seeded(lambda: nn.LSTM(8, 5, 3, dropout=0.4, batch_first=True, bidirectional=True, proj_size=3))
LSTM_SEQUENCE_FIRST = seeded(lambda: nn.LSTM(8, 5, 2, dropout=0.4))
GRU = seeded(lambda: nn.GRU(8, 5, 2, dropout=0.4, batch_first=True))
RNN = seeded(lambda: nn.RNN(8, 5, 2, dropout=0.4, batch_first=True, bias=False))
RELU_RNN = seeded(lambda: nn.RNN(8, 5, 2, dropout=0.4, batch_first=True, nonlinearity="relu"))
