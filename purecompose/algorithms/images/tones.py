"""Operations on grey levels that do not move pixels.

Each is a function `(levels (N, C, H, W), amount (N,)) -> levels`, within [0, 255], and agrees with Pillow's operation
for uint8 to within one level.
"""

import torch
from torch import Tensor

from purecompose.losses.targets import per_row


_LUMA = (19595.0, 38470.0, 7471.0)  # weights of BT.601 times 65536, as in Pillow


def autocontrast(levels: Tensor, amount: Tensor) -> Tensor:
    """Stretch each channel to the whole scale if the amount is not 0."""
    low, high = levels.amin((2, 3), keepdim=True), levels.amax((2, 3), keepdim=True)
    is_changed = (high > low) & (per_row(amount, levels) != 0)
    extent = torch.where(is_changed, high - low, 255)  # never 0, which would make the gradient NaN
    return (levels - torch.where(is_changed, low, 0)) * (255 / extent)


def equalize(levels: Tensor, amount: Tensor) -> Tensor:
    """Make the histogram of each channel as flat as possible if the amount is not 0."""
    # Clamp as integers, because NaN converts to an integer out of range. CPU loops gather fastest with 32-bit indices.
    index = levels.round().to(torch.int32).clamp(0, 255).flatten(2)
    counts = levels.new_zeros((*levels.shape[:2], 256)).scatter_add(2, index, levels.new_ones(()).expand(index.shape))
    # Integer arithmetic, as in Pillow; pixels of the brightest level are not counted in the width of a step.
    total = index.shape[2] - counts.gather(2, index.amax(2, keepdim=True))
    step = (total / 255).floor()
    table = (((step / 2).floor() + counts.cumsum(2) - counts) / step.clamp(min=1)).floor().clamp(max=255)
    flattened = table.gather(2, index).view_as(levels)
    return torch.where((step.unsqueeze(-1) > 0) & (per_row(amount, levels) != 0), flattened, levels)


def posterize(levels: Tensor, bits: Tensor) -> Tensor:
    """Keep the first `bits` of each level, 0 to 8."""
    bits = per_row(bits, levels)
    width = torch.exp2(8 - bits)
    return torch.where(bits < 8, (levels / width).floor() * width, levels)


def solarize(levels: Tensor, threshold: Tensor) -> Tensor:
    """Invert levels from the threshold on."""
    return torch.where(levels < per_row(threshold, levels), levels, 255 - levels)


def brightness(levels: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: factor 0 gives black, 1 the image."""
    return _blended(torch.zeros_like(levels), levels, factor)


def contrast(levels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean grey: factor 0 gives this grey, 1 the image."""
    mean = _grey(levels).mean((1, 2, 3), keepdim=True, dtype=torch.float64)
    return _blended((mean + 0.5).floor().to(levels.dtype).expand_as(levels), levels, factor)


def saturation(levels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image: factor 0 gives the grey image, 1 the image. Pillow calls it Color."""
    return _blended(_grey(levels).expand_as(levels), levels, factor) if levels.shape[1] > 1 else levels


def sharpness(levels: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image: factor 0 gives the smoothed, 1 the image. Pixels at the border are unchanged."""
    if min(levels.shape[2:]) < 3:
        return levels
    rows = levels[..., :-2] + levels[..., 1:-1] + levels[..., 2:]
    sums = rows[..., :-2, :] + rows[..., 1:-1, :] + rows[..., 2:, :]
    inner = levels[..., 1:-1, 1:-1]
    smooth = ((sums + 4 * inner) / 13).round()
    middle = torch.cat((levels[..., 1:-1, :1], _blended(smooth, inner, factor), levels[..., 1:-1, -1:]), 3)
    return torch.cat((levels[..., :1, :], middle, levels[..., -1:, :]), 2)


def _blended(origin: Tensor, levels: Tensor, factor: Tensor) -> Tensor:
    # lerp is exact for a factor of 1.
    return torch.lerp(origin, levels, per_row(factor, levels).to(levels.dtype)).clamp(0, 255)


def _grey(levels: Tensor) -> Tensor:
    """Return integer grey levels (N, 1, H, W): luma for three channels, otherwise the mean."""
    if levels.shape[1] == 3:
        red, green, blue = levels.split(1, 1)
        return ((red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2] + 32768) / 65536).floor()
    return (levels.mean(1, keepdim=True) + 0.5).floor()
