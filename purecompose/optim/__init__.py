"""Optimizers as values: a frozen dataclass with two pure functions, `init` and `update`.

    optimizer = optim.adamw(3e-4 * cosine(), groups={"*.bias": {"weight_decay": 0.0}})
    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(grads, opt_state, params)

`by_pattern` combines several optimizers for different parameters into one; `from_torch` wraps optimizers of torch.optim
that this package lacks. Your own optimizer needs no base class: a frozen dataclass that follows the `Optimizer`
protocol suffices.
"""

from purecompose.optim.adafactor import adafactor
from purecompose.optim.adam import adam, adamw, decoupled_adamw
from purecompose.optim.base import Optimizer, OptState, Value
from purecompose.optim.by_pattern import by_pattern, layerwise
from purecompose.optim.from_torch import from_torch
from purecompose.optim.lion import lion
from purecompose.optim.muon import muon
from purecompose.optim.rmsprop import rmsprop
from purecompose.optim.sgd import decoupled_sgdw, sgd


__all__ = [
    "OptState",
    "Optimizer",
    "Value",
    "adafactor",
    "adam",
    "adamw",
    "by_pattern",
    "decoupled_adamw",
    "decoupled_sgdw",
    "from_torch",
    "layerwise",
    "lion",
    "muon",
    "rmsprop",
    "sgd",
]
