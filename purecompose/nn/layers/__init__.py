"""The layers that methods put into networks, as plain `nn.Module`s, and activation checkpointing."""

from purecompose.nn.keyed.modules import checkpoint
from purecompose.nn.layers.convolutions import (
    BlurConv2d,
    BlurMaxPool2d,
    BlurPool2d,
    SqueezeExcite2d,
    SqueezeExciteConv2d,
    StandardizedConv1d,
    StandardizedConv2d,
    StandardizedConv3d,
    blur_2d,
    blurmax_pool2d,
    plain_conv,
    standardized,
    standardized_conv,
)
from purecompose.nn.layers.factorized import FactorizedConv2d, FactorizedLinear
from purecompose.nn.layers.no_op import NoOpModel
from purecompose.nn.layers.norms import GhostBatchNorm, LowPrecisionGroupNorm, LowPrecisionLayerNorm
from purecompose.nn.layers.stochastic_depth import DropPath, Residual, StochasticDepth, drop_paths, residuals
from purecompose.nn.layers.transformer import (
    AlibiAttention,
    ClassesSecond,
    FeedForward,
    GatedLinearUnit,
    NoPositions,
    PositionEmbedding,
    SelfAttention,
    alibi_bias,
    alibi_slopes,
)


__all__ = [
    "AlibiAttention",
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool2d",
    "ClassesSecond",
    "DropPath",
    "FactorizedConv2d",
    "FactorizedLinear",
    "FeedForward",
    "GatedLinearUnit",
    "GhostBatchNorm",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "NoOpModel",
    "NoPositions",
    "PositionEmbedding",
    "SelfAttention",
    "Residual",
    "SqueezeExcite2d",
    "SqueezeExciteConv2d",
    "StandardizedConv1d",
    "StandardizedConv2d",
    "StandardizedConv3d",
    "StochasticDepth",
    "alibi_bias",
    "alibi_slopes",
    "blur_2d",
    "blurmax_pool2d",
    "checkpoint",
    "drop_paths",
    "plain_conv",
    "residuals",
    "standardized",
    "standardized_conv",
]
