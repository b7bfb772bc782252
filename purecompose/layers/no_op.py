"""A network of one number, for timing all that is not the network."""

import torch
from torch import Tensor, nn


__all__ = ["NoOpModel"]


class NoOpModel(nn.Module):
    """Multiplies targets by a weight, which begins at 1.5; in evaluation it gives them back.

    Attributes:
        weight: (), the only parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, targets: Tensor) -> Tensor:
        """Any shape and dtype to the same shape, floating in training.

        Raises:
            TypeError: Targets that are no tensor.
        """
        if not isinstance(targets, Tensor):
            raise TypeError(
                f"no_op_model: expected a tensor as target, got {type(targets).__name__}; name one by target_key of "
                "State.create, and leave out methods that mix targets"
            )
        return targets * self.weight if self.training else targets
