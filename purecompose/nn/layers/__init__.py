"""The layers that methods put into networks, as plain `nn.Module`s, and activation checkpointing."""

from purecompose.nn.keyed.modules import checkpoint
from purecompose.nn.layers.attention import FeedForward, PositionEmbedding, SelfAttention
from purecompose.nn.layers.blur import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d, blurmax_pool2d
from purecompose.nn.layers.classes_second import ClassesSecond
from purecompose.nn.layers.factorized import FactorizedConv2d, FactorizedLinear
from purecompose.nn.layers.gated import GatedLinearUnit
from purecompose.nn.layers.ghost_batchnorm import GhostBatchNorm
from purecompose.nn.layers.low_precision import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from purecompose.nn.layers.no_op import NoOpModel
from purecompose.nn.layers.positions import AlibiAttention, NoPositions, alibi_bias, alibi_slopes
from purecompose.nn.layers.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d
from purecompose.nn.layers.standardized import (
    StandardizedConv1d,
    StandardizedConv2d,
    StandardizedConv3d,
    plain_conv,
    standardized,
    standardized_conv,
)
from purecompose.nn.layers.stochastic_depth import DropPath, Residual, StochasticDepth, drop_paths, residuals


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
