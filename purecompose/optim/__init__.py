"""Optimizers as values: a frozen dataclass with two pure functions, `init` and `update`.

    optimizer = optim.adamw(3e-4 * cosine(), groups={"*.bias": {"weight_decay": 0.0}})
    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(grads, opt_state, params)

Own ones need no base class: whatever keeps the `Optimizer` protocol serves.
"""

from purecompose.optim.adam import adam, adamw
from purecompose.optim.base import Optimizer, OptState, Value
from purecompose.optim.sgd import sgd


__all__ = ["OptState", "Optimizer", "Value", "adam", "adamw", "sgd"]
