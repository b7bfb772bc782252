"""A network with one parameter, for timing everything except the network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


_INDICES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FEWEST = 10
"""Smallest number of classes in scores; top-k metrics need several."""


class NoOpModel(nn.Module):
    """Network that multiplies targets by a weight, initially 1.5, in training, and returns them in evaluation.

    Args:
        has_classes: True to return integer targets, in evaluation, as scores of classes, 1 for the target's class and 0
            for others, which metrics of classification take.

    Attributes:
        weight: The only parameter, shape ().

    Example:
        >>> NoOpModel(has_classes=True).eval()(torch.tensor([3, 1])).argmax(dim=1)
        tensor([3, 1])
    """

    def __init__(self, has_classes: bool = False) -> None:
        super().__init__()
        self.has_classes = has_classes
        self.weight: nn.Parameter = nn.Parameter(torch.tensor(1.5))

    def forward(self, targets: Tensor) -> Tensor:
        """Map any shape and dtype to the same shape, floating in training; scores are (N, C, ...), floating.

        Raises:
            TypeError: The targets are not a tensor.
        """
        if not isinstance(targets, Tensor):
            raise TypeError(
                f"no_op_model: expected a tensor as target, got {type(targets).__name__}; select one with target_field "
                "of State.create, and leave out methods that mix targets"
            )
        if self.training:
            return targets * self.weight
        is_index = self.has_classes and targets.ndim > 0 and targets.dtype in _INDICES
        return self._scores(targets) if is_index else targets

    def _scores(self, targets: Tensor) -> Tensor:
        indices = targets.long().clamp(min=0)  # ignored targets are negative
        num = max(_FEWEST, int(indices.max()) + 1 if indices.numel() else 0)
        return F.one_hot(indices, num).movedim(-1, 1).to(self.weight)
