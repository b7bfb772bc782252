"""Operations on grey levels, applied to images of any scale in the way that augmentations do."""

from typing import Any

import torch
from torch import Tensor

from purecompose.algorithms.images import geometry, on_levels, tones


OPERATIONS: dict[str, Any] = {
    **{one.__name__: one for one in (tones.autocontrast, tones.equalize, tones.posterize, tones.solarize)},
    **{one.__name__: one for one in (geometry.rotate, geometry.shear_x, geometry.shear_y)},
    **{one.__name__: one for one in (geometry.translate_x, geometry.translate_y)},
    **{one.__name__: one for one in (tones.saturation, tones.contrast, tones.brightness, tones.sharpness)},
}


def applied(name: str, images: Tensor, amount: Any = 1.0, value_range: Any = None) -> Tensor:
    """Return images (N, C, H, W) or (C, H, W) after an operation with one amount, or one for each image."""

    def treated(stored: Tensor, scale: Any) -> Tensor:
        levels = scale.opened(stored)
        amounts = torch.as_tensor(amount, dtype=levels.dtype).expand(len(levels))
        return scale.settled(OPERATIONS[name](levels, amounts))

    return on_levels(images, treated, value_range, name)
