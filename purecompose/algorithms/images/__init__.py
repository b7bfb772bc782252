"""Image operations on batches of tensors, modelled on Pillow's, and the primitives of augmentation methods.

Each operation is `fn(images, amount) -> images` for uint8 or floating images (N, C, H, W) or (C, H, W), with one amount
for all images or one for each. Nothing is changed in place; shape and dtype are kept. Operations can be traced, and
mapped by `vmap`.
"""

from purecompose.algorithms.images.levels import Scale, ValueRange, check_value_range, on_levels
from purecompose.algorithms.images.operations import (
    autocontrast,
    brightness,
    contrast,
    equalize,
    posterize,
    rotate,
    saturation,
    sharpness,
    shear_x,
    shear_y,
    solarize,
    translate_x,
    translate_y,
)
from purecompose.algorithms.images.primitives import PRIMITIVES, SETS, Primitive, Strength, chosen_primitives


__all__ = [
    "PRIMITIVES",
    "SETS",
    "Primitive",
    "Scale",
    "Strength",
    "ValueRange",
    "autocontrast",
    "brightness",
    "check_value_range",
    "chosen_primitives",
    "contrast",
    "equalize",
    "on_levels",
    "posterize",
    "rotate",
    "saturation",
    "sharpness",
    "shear_x",
    "shear_y",
    "solarize",
    "translate_x",
    "translate_y",
]
