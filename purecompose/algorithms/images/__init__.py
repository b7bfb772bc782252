"""Image operations on batches of tensors, modelled on Pillow's, and the primitives of augmentation methods.

Each operation is `fn(images, amount) -> images` for uint8 or floating images (N, C, H, W) or (C, H, W), with one amount
for all images or one for each. Nothing is changed in place; shape and dtype are kept. Operations can be traced, and
mapped by `vmap`.
"""

from purecompose.algorithms.images.levels import (
    Scale as Scale,
    ValueRange as ValueRange,
    check_value_range as check_value_range,
    on_levels as on_levels,
)
from purecompose.algorithms.images.operations import (
    autocontrast as autocontrast,
    brightness as brightness,
    contrast as contrast,
    equalize as equalize,
    posterize as posterize,
    rotate as rotate,
    saturation as saturation,
    sharpness as sharpness,
    shear_x as shear_x,
    shear_y as shear_y,
    solarize as solarize,
    translate_x as translate_x,
    translate_y as translate_y,
)
from purecompose.algorithms.images.primitives import (
    PRIMITIVES as PRIMITIVES,
    SETS as SETS,
    Primitive as Primitive,
    Strength as Strength,
    chosen_primitives as chosen_primitives,
)
