"""Lion: steps of equal size, by the sign of an averaged gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from purecompose._support.checks import suggests_keywords
from purecompose.optim.base import Betas, ByGroup, GivenGroups, Rate, Value, read
from purecompose.optim.decay import decayed
from purecompose.optim.lists import add, lerp, sign
from purecompose.schedule import Scalar


@suggests_keywords(learning_rate="lr=0.1")
def lion(
    lr: Scalar = 1e-4,
    *,
    betas: tuple[Scalar, Scalar] = (0.9, 0.99),
    weight_decay: Scalar = 0.0,
    groups: GivenGroups = (),
) -> Lion:
    """Return Lion: each element moves by lr, up or down, and the state has one tensor per parameter.

    ::

        p <- p - lr * weight_decay * p
        p <- p - lr * sign(beta1 * m + (1 - beta1) * g)
        m <- beta2 * m + (1 - beta2) * g

    Compared with AdamW the paper uses a learning rate that is 3 to 10 times smaller and a weight decay that is larger
    by the same factor. An element whose average is exactly 0 moves only by its decay.

    Gradients flow through `update` to learning rate, decay and parameters. The sign has derivative 0, so neither
    the betas nor past gradients receive a gradient through it.

    Args:
        lr: The learning rate, >= 0.
        betas: Weight of the average in the sign's argument, and decay rate of the average; each in [0, 1).
        weight_decay: The factor of the decoupled decay, >= 0; it follows the learning rate and its schedule.
        groups: Options for parameters by a pattern of their names (`fnmatch`, first match wins), in place of
            the ones above: `{"*.bias": {"weight_decay": 0.0}}`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"exp_avg": {name: tensor}}`, of the parameters' shapes and dtypes.

    Raises:
        TypeError: A setting is of the wrong kind, or a group has an unknown option.
        ValueError: A setting is out of range.

    Example:
        >>> import torch
        >>> params = {"w": torch.tensor([1.0, 2.0, 3.0])}
        >>> optimizer = lion(0.5)
        >>> optimizer.update({"w": torch.tensor([1e-3, -70.0, 0.0])}, optimizer.init(params), params)[0]["w"]
        tensor([0.5000, 2.5000, 3.0000])

    References:
        Chen, Liang, Huang, Real, Wang, Liu, Pham, Dong, Luong, Hsieh, Lu and Le, Symbolic discovery of optimization
        algorithms, 2023, arXiv:2302.06675.
    """
    return Lion(lr, betas, weight_decay, groups)


@dataclasses.dataclass(frozen=True, repr=False)
class Lion(ByGroup):
    """Optimizer returned by `lion`; see there."""

    lr: Rate
    betas: Betas
    weight_decay: Rate
    groups: Any = ()
    is_elementwise = True

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def move(
        self, grads: list[Tensor], params: list[Tensor], slots: dict[str, list[Tensor]], value: Value
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        beta1, beta2 = (read(beta, value) for beta in self.betas)
        _, params = decayed("by rate", grads, params, self.weight_decay, self.lr, value)
        directions = sign(lerp(slots["exp_avg"], grads, 1 - beta1))
        return add(params, directions, -read(self.lr, value)), {"exp_avg": lerp(slots["exp_avg"], grads, 1 - beta2)}
