"""What the network of a run predicts for examples of known classes: the confusion matrix and the worst examples."""

import base64
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose.data.arrays import described


class Predictions(NamedTuple):
    """Outputs of a network for examples of known classes, to be shown in a report.

    Args:
        outputs: The logits, (N, C).
        targets: The classes, (N,), int64, from 0.
        inputs: The examples, (N, ...); those of one or three channels, (N, 1 or 3, H, W), are shown as images.
        names: The names of the classes; by default their numbers.

    Example:
        >>> found = Predictions(torch.tensor([[2.0, 1.0], [3.0, 1.0]]), torch.tensor([0, 1]))
        >>> found.confusion().tolist()
        [[1, 0], [1, 0]]
        >>> [one.number for one in found.worst()]
        [1]
    """

    outputs: Tensor
    targets: Tensor
    inputs: Tensor | None = None
    names: Sequence[str] = ()

    def __repr__(self) -> str:
        return described(self)

    def confusion(self) -> Tensor:
        """Return the number of examples of each class (row) that are predicted as each class (column), (C, C), int64.

        Raises:
            ValueError: The shapes do not fit, or a target is not one of the C classes.
        """
        outputs, targets = _checked(self)
        count = outputs.shape[1]
        pairs = targets * count + outputs.argmax(1)
        return torch.bincount(pairs.cpu(), minlength=count * count).reshape(count, count)

    def worst(self, count: int = 24) -> "list[Mistake]":
        """Return the wrongly classified examples with the highest loss, the worst one first.

        Args:
            count: Maximal number of examples.

        Raises:
            ValueError: The shapes do not fit, or a target is not one of the C classes.
        """
        outputs, targets = _checked(self)
        shares = outputs.detach().float().softmax(1)
        classes = shares.argmax(1)
        (wrong,) = (classes != targets).nonzero(as_tuple=True)
        of_target = shares[wrong, targets[wrong]].nan_to_num(0.0)
        order = wrong[of_target.argsort(stable=True)]
        return [
            Mistake(i, self.name(int(targets[i])), self.name(int(classes[i])), float(shares[i].max()), self._picture(i))
            for i in order[:count].tolist()
        ]

    def name(self, number: int) -> str:
        """Return the name of a class."""
        return str(self.names[number]) if self.names else str(number)

    def _picture(self, i: int) -> str:
        """Return an example as a PNG in a data URL; "" if it is not an image, or Pillow is missing."""
        if self.inputs is None or self.inputs.ndim != 4 or self.inputs.shape[1] not in (1, 3):
            return ""
        try:
            import PIL.Image
        except ImportError:
            return ""
        pixels = self.inputs[i].detach().cpu().float()
        low, high = pixels.amin(), pixels.amax()
        grey = ((pixels - low) / (high - low).clamp(min=1e-12) * 255).byte().expand(3, -1, -1).permute(1, 2, 0)
        buffer = io.BytesIO()
        PIL.Image.frombytes("RGB", (grey.shape[1], grey.shape[0]), bytes(grey.flatten().tolist())).save(buffer, "PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Mistake(NamedTuple):
    """A wrongly classified example."""

    number: int
    """Its place among the examples, from 0."""
    target: str
    """Its class."""
    predicted: str
    """The class with the highest output."""
    probability: float
    """The probability that the network gives to `predicted`."""
    picture: str = ""
    """The example as a data URL, if it is an image."""


def _checked(given: Any) -> tuple[Tensor, Tensor]:
    """Return outputs and targets, int64; narrower integers would overflow."""
    outputs, targets = given.outputs, given.targets
    if outputs.ndim != 2 or targets.shape != outputs.shape[:1] or targets.is_floating_point():
        raise ValueError(
            "Predictions: expected outputs (N, C) and classes (N,), whole numbers, got "
            f"{tuple(outputs.shape)} and {targets.dtype} {tuple(targets.shape)}"
        )
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[1]:
        raise ValueError(f"Predictions: expected targets from 0 to {outputs.shape[1] - 1}, got {int(targets.max())}")
    return outputs, targets.long()
