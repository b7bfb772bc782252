"""The layers that methods put into networks, as plain `nn.Module`s, and activation checkpointing."""

from purecompose._support import publish
from purecompose.nn.keyed.modules import checkpoint as checkpoint
from purecompose.nn.layers.convolutions import (
    BlurConv2d as BlurConv2d,
    BlurMaxPool2d as BlurMaxPool2d,
    SqueezeExcite2d as SqueezeExcite2d,
    SqueezeExciteConv2d as SqueezeExciteConv2d,
    StandardizedConv1d as StandardizedConv1d,
    StandardizedConv2d as StandardizedConv2d,
    StandardizedConv3d as StandardizedConv3d,
    blur_2d as blur_2d,
    blurmax_pool2d as blurmax_pool2d,
    standardized as standardized,
    standardized_conv as standardized_conv,
)
from purecompose.nn.layers.replacing import (
    FactorizedConv2d as FactorizedConv2d,
    FactorizedLinear as FactorizedLinear,
    GhostBatchNorm as GhostBatchNorm,
    LowPrecisionGroupNorm as LowPrecisionGroupNorm,
    LowPrecisionLayerNorm as LowPrecisionLayerNorm,
)
from purecompose.nn.layers.stochastic_depth import (
    DropPath as DropPath,
    Residual as Residual,
    StochasticDepth as StochasticDepth,
    drop_paths as drop_paths,
    residuals as residuals,
)
from purecompose.nn.layers.transformer import (
    AlibiAttention as AlibiAttention,
    ClassesSecond as ClassesSecond,
    FeedForward as FeedForward,
    GatedLinearUnit as GatedLinearUnit,
    HeadNorm as HeadNorm,
    NoPositions as NoPositions,
    PositionEmbedding as PositionEmbedding,
    SelfAttention as SelfAttention,
    SquaredReLU as SquaredReLU,
    alibi_bias as alibi_bias,
    alibi_slopes as alibi_slopes,
)


publish(__name__)
