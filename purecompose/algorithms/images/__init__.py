"""The primitives of augmentation methods: operations on grey levels modelled on Pillow's, and their amounts.

A primitive of your own is a `Primitive` with a function `(levels (N, C, H, W), amounts (N,)) -> levels`, floats from 0
to 255, for `augmentation_set`. Nothing is changed in place. Operations can be traced, and mapped by `vmap`.
"""

from purecompose.algorithms.images.primitives import (
    PRIMITIVES as PRIMITIVES,
    SETS as SETS,
    Primitive as Primitive,
    Strength as Strength,
    chosen_primitives as chosen_primitives,
)
from purecompose.algorithms.images.samples import (
    Scale as Scale,
    ValueRange as ValueRange,
    check_value_range as check_value_range,
    on_levels as on_levels,
)
