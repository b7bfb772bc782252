"""A wrapper for language models that moves the classes of the logits to dimension 1, where losses expect them."""

from torch import Tensor, nn


class ClassesSecond(nn.Module):
    """Wrapper that moves the classes of a network's outputs from the last dim to the second: (N, L, C) to (N, C, L).

    The outputs then have the form that `losses.cross_entropy`, `metrics.accuracy` and methods on targets expect. The
    result is a view.

    Args:
        net: A network with logits `(N, ..., C)`; it becomes the submodule `net`.

    Example:
        >>> import torch
        >>> ClassesSecond(nn.Embedding(10, 7))(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 7, 5])
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the network's outputs with the classes in dim 1."""
        return self.net(inputs).movedim(-1, 1)
