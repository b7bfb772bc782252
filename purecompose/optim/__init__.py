"""Optimizers as values: a frozen dataclass with two pure functions, `init` and `update`.

    optimizer = optim.adamw(3e-4 * cosine(), groups={"*.bias": {"weight_decay": 0.0}})
    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(grads, opt_state, params)

Several of them for different parameters are one by `by_pattern`; what torch.optim has and this room has not comes
`from_torch`. Own ones need no base class: a frozen dataclass that keeps the `Optimizer` protocol serves.
"""

from purecompose.optim.adafactor import adafactor
from purecompose.optim.adam import adam, adamw, decoupled_adamw
from purecompose.optim.base import Optimizer, OptState, Value
from purecompose.optim.by_pattern import by_pattern
from purecompose.optim.from_torch import from_torch
from purecompose.optim.layerwise import layerwise
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
