"""The layers that methods put into networks: plain `nn.Module`s, which know nothing of the library."""

from purecompose.layers.blur import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d, blurmax_pool2d
from purecompose.layers.factorized import FactorizedConv2d, FactorizedLinear
from purecompose.layers.gated import GatedLinearUnit
from purecompose.layers.ghost_batchnorm import GhostBatchNorm
from purecompose.layers.low_precision import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from purecompose.layers.positions import alibi_bias, alibi_slopes
from purecompose.layers.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d
from purecompose.layers.standardized import StandardizedConv1d, StandardizedConv2d, StandardizedConv3d, standardized


__all__ = [
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool2d",
    "FactorizedConv2d",
    "FactorizedLinear",
    "GatedLinearUnit",
    "GhostBatchNorm",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "SqueezeExcite2d",
    "SqueezeExciteConv2d",
    "StandardizedConv1d",
    "StandardizedConv2d",
    "StandardizedConv3d",
    "alibi_bias",
    "alibi_slopes",
    "blur_2d",
    "blurmax_pool2d",
    "standardized",
]
