"""Optimizers as values: a frozen dataclass with two pure functions, `init` and `update`.

    optimizer = optim.adamw(3e-4 * cosine(), groups={"*.bias": {"weight_decay": 0.0}})
    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(grads, opt_state, params)

`by_pattern` combines several optimizers for different parameters into one; `from_torch` wraps optimizers of torch.optim
that this package lacks. Your own optimizer needs no base class: a frozen dataclass that follows the `Optimizer`
protocol suffices.
"""

from purecompose._support import publish
from purecompose.optim.adam import adam as adam, adamw as adamw, decoupled_adamw as decoupled_adamw, rmsprop as rmsprop
from purecompose.optim.by_pattern import by_pattern as by_pattern, layerwise as layerwise
from purecompose.optim.from_torch import from_torch as from_torch
from purecompose.optim.lbfgs import lbfgs as lbfgs
from purecompose.optim.matrices import adafactor as adafactor, muon as muon
from purecompose.optim.protocol import Optimizer as Optimizer, OptState as OptState, Value as Value
from purecompose.optim.sgd import (
    adagrad as adagrad,
    decoupled_sgdw as decoupled_sgdw,
    lion as lion,
    sgd as sgd,
    sparse_adam as sparse_adam,
)


publish(__name__)
