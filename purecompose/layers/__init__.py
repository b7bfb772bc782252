"""The layers that methods put into networks: plain `nn.Module`s, which know nothing of the library."""

from purecompose.layers.attention import FeedForward, PositionEmbedding, SelfAttention
from purecompose.layers.blur import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d, blurmax_pool2d
from purecompose.layers.classes_second import ClassesSecond
from purecompose.layers.factorized import FactorizedConv2d, FactorizedLinear
from purecompose.layers.gated import GatedLinearUnit
from purecompose.layers.ghost_batchnorm import GhostBatchNorm
from purecompose.layers.low_precision import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from purecompose.layers.no_op import NoOpModel
from purecompose.layers.positions import AlibiAttention, NoPositions, alibi_bias, alibi_slopes
from purecompose.layers.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d
from purecompose.layers.standardized import (
    StandardizedConv1d,
    StandardizedConv2d,
    StandardizedConv3d,
    plain_conv,
    standardized,
    standardized_conv,
)
from purecompose.layers.stochastic_depth import DropPath, Residual, StochasticDepth, drop_paths, residuals


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
    "drop_paths",
    "plain_conv",
    "residuals",
    "standardized",
    "standardized_conv",
]
