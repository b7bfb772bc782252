"""Operations on grey levels, applied to images of any scale in the way that augmentations do."""

from typing import Any

import torch
from torch import Tensor

from purecompose.algorithms.images import on_levels, primitives


NAMES = ("autocontrast", "equalize", "posterize", "solarize", "rotate", "shear_x", "shear_y", "translate_x")
NAMES += ("translate_y", "saturation", "contrast", "brightness", "sharpness")
OPERATIONS: dict[str, Any] = {name: getattr(primitives, name) for name in NAMES}


def applied(name: str, images: Tensor, amount: Any = 1.0, value_range: Any = None) -> Tensor:
    """Return images (N, C, H, W) or (C, H, W) after an operation with one amount, or one for each image."""

    def treated(stored: Tensor, scale: Any) -> Tensor:
        levels = scale.opened(stored)
        amounts = torch.as_tensor(amount, dtype=levels.dtype).expand(len(levels))
        return scale.settled(OPERATIONS[name](levels, amounts))

    return on_levels(images, treated, value_range, name)
