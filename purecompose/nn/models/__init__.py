"""The networks of the tests, the examples and the command line, in one place: plain `nn.Module`s.

None of them depends on the library's core. Those for images take (batch, channels, height, width), the MLP any shape,
and return logits (batch, num_classes); the GPT takes tokens (batch, length) and returns logits (batch, length,
vocabulary). The convolutional ones end in an average over all positions, so that one set of weights works at several
image sizes; no activation works in place, so that any layer can be replaced by surgery.

A module draws its initial weights from torch's global generator. `build` draws them from a separate seed and
leaves that generator unchanged.
"""

from purecompose.nn.models.convolutional import (
    Bottleneck as Bottleneck,
    ResidualBlock as ResidualBlock,
    cnn as cnn,
    mlp as mlp,
    resnet as resnet,
    resnet8 as resnet8,
    resnet18 as resnet18,
    resnet20 as resnet20,
    resnet50 as resnet50,
)
from purecompose.nn.models.registry import (
    MODELS as MODELS,
    build as build,
    check_options as check_options,
    describe as describe,
)
from purecompose.nn.models.transformer import (
    GPT as GPT,
    TransformerBlock as TransformerBlock,
    VisionTransformer as VisionTransformer,
    gpt as gpt,
    vit as vit,
)
