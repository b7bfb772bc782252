"""The cases of the sweep: realistic networks and losses with batches, and the results of plain PyTorch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

from purecompose import losses


Batch = Any
MakeBatch = Callable[[Generator], Batch]
Loss = Callable[..., Tensor]

NUM_BATCHES = 3

READS = {"compiled": "a tensor's number is read", "population": "a number or the memory of a tensor is read"}
"""Pattern of the message for code that reads a number."""

SHAPES = {"compiled": "a result's shape depends on numbers", "population": "a result's shape depends on numbers"}
"""Pattern of the message for a shape that depends on numbers."""

WRITES = "forward wrote into the parameter"
FUNCTION = {"population": "an autograd.Function cannot be mapped as it is"}


def called(net: nn.Module, batch: Batch) -> Any:
    """Return the network's outputs for the batch's first member; a list of several inputs is unpacked."""
    inputs = batch[0]
    return net(*inputs) if isinstance(inputs, list) else net(inputs)


@dataclass(frozen=True)
class Case:
    """A network, a loss and batches of four examples.

    Attributes:
        name: Name of the case.
        make: Function that makes the network, with weights from torch's generator.
        make_batch: Function that makes a batch.
        loss: `(outputs, targets) -> 0-d`, a mean over examples.
        call: Function by which plain PyTorch calls the network with a batch.
        options: More arguments of `State.create`.
        adam: True to train by AdamW with weight decay, not by SGD with momentum.
        draws: True if it draws, so that the modes are compared with the eager step instead of plain PyTorch.
        sliced: Reason why slices of a batch differ from the whole batch, if they do. Then microbatches are
        compared with slices in plain PyTorch, and processes only with each other.
        inductor: True if it is compiled by Inductor as well.
        refused: Pattern of the message for each mode that refuses it, or one pattern for all modes.
        is_float: True to compute in float32, for operations without float64.
        rtol: Tolerance, for operations that round more than their dtype.
    """

    name: str
    make: Callable[[], nn.Module]
    make_batch: MakeBatch
    loss: Loss = losses.cross_entropy
    call: Callable[[nn.Module, Batch], Any] = called
    options: Mapping[str, Any] = field(default_factory=dict)
    adam: bool = False
    draws: bool = False
    sliced: str = ""
    inductor: bool = False
    refused: Mapping[str, str] | str = field(default_factory=dict)
    is_float: bool = False
    rtol: float = 0.0

    def refusal(self, mode: str) -> str | None:
        """Return the pattern of the message by which a mode refuses the case, if it does."""
        if isinstance(self.refused, str):
            return self.refused
        return self.refused.get("compiled" if mode == "inductor" else mode)

    @property
    def tolerance(self) -> float:
        """Relative tolerance of losses and parameters."""
        return self.rtol or (1e-3 if self.is_float else 1e-6)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that networks and batches are made in."""
        return torch.float32 if self.is_float else torch.float64

    def net(self, seed: int = 0) -> nn.Module:
        """Return a new network."""
        torch.manual_seed(seed)
        return self.make()

    def batches(self) -> list[Batch]:
        """Return the batches of a run."""
        return [self.make_batch(torch.Generator().manual_seed(100 + index)) for index in range(NUM_BATCHES)]

    def loss_of(self, net: nn.Module, batch: Batch) -> Tensor:
        """Return the loss in plain PyTorch."""
        target = batch[1] if isinstance(batch, tuple) else batch
        return self.loss(self.call(net, batch), target)


def mapped(make: MakeBatch, change: Callable[[Any, Any], Batch]) -> MakeBatch:
    """Make batches from the inputs and targets of others."""
    return lambda generator: change(*make(generator))


def classes(generator: Generator, *shape: int, num: int = 3) -> Tensor:
    """Class indices."""
    return torch.randint(num, shape, generator=generator)


def vectors(num_classes: int = 3, width: int = 6, size: int = 4) -> MakeBatch:
    """Vectors (N, width) and classes (N,)."""
    return lambda g: (torch.randn(size, width, generator=g), classes(g, size, num=num_classes))


def values(width: int = 3, size: int = 4) -> MakeBatch:
    """Vectors (N, 6) and values (N, width)."""
    return lambda g: (torch.randn(size, 6, generator=g), torch.randn(size, width, generator=g))


def images(side: int = 8, channels: int = 2, size: int = 4) -> MakeBatch:
    """Images (N, C, side, side) and classes (N,)."""
    return lambda g: (torch.randn(size, channels, side, side, generator=g), classes(g, size))


def tokens(length: int = 5, num: int = 7, size: int = 4) -> MakeBatch:
    """Ids (N, T) and classes (N,)."""
    return lambda g: (classes(g, size, length, num=num), classes(g, size))
