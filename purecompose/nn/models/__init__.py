"""The networks of the tests, the examples and the command line, in one place: plain `nn.Module`s.

None of them depends on the library's core. Those for images take (batch, channels, height, width), the MLP any shape,
and return logits (batch, num_classes); the GPT takes tokens (batch, length) and returns logits (batch, length,
vocabulary). The convolutional ones end in an average over all positions, so that one set of weights works at several
image sizes; no activation works in place, so that any layer can be replaced by surgery.

A module draws its initial weights from torch's global generator. `build` draws them from a separate seed and
leaves that generator unchanged.
"""

from purecompose.nn.models.convolutional import (
    Bottleneck,
    ResidualBlock,
    cnn,
    mlp,
    resnet,
    resnet8,
    resnet18,
    resnet20,
    resnet50,
)
from purecompose.nn.models.registry import MODELS, build, check_options, describe
from purecompose.nn.models.transformer import GPT, TransformerBlock, VisionTransformer, gpt, vit


__all__ = [
    "GPT",
    "MODELS",
    "Bottleneck",
    "ResidualBlock",
    "TransformerBlock",
    "VisionTransformer",
    "build",
    "check_options",
    "cnn",
    "describe",
    "gpt",
    "mlp",
    "resnet",
    "resnet8",
    "resnet18",
    "resnet20",
    "resnet50",
    "vit",
]
