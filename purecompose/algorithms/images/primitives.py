"""The augmentation primitives of RandAugment and AugMix: an operation, and its amount.

The amount depends on the severity S in [0, 10], and on a uniform number u in [0, 1) and a fair coin, which are drawn
for each image. With s = u S and I(x) = floor(s x / 10):

    autocontrast, equalize      in full
    posterize                   8 - I(4) bits
    solarize                    from level 256 - I(256) on
    rotate                      I(30) degrees, in either direction
    shear_x, shear_y            slope 0.3 s / 10, in either direction
    translate_x, translate_y    I(a third of the side) pixels, in either direction
    color, contrast, sharpness  factor 1 + u max(S - 1, 0) or 1 - 0.09 u S
    brightness                  factor 1 + 0.75 u max(S - 1, 0) or 1 - 0.09 u S
    *_original                  factor 0.1 + 1.8 s / 10

A severity of 0 leaves every image unchanged. An operation is a function `(levels (N, C, H, W), amount (N,)) -> levels`
within [0, 255], which agrees with Pillow's operation for uint8 to within one level.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose._support.internals import is_fake, only_maps
from purecompose._support.specs import frozen
from purecompose.losses.targets import per_row


_LUMA = (19595.0, 38470.0, 7471.0)  # weights of BT.601 times 65536, as in Pillow
_FAR = 3.0  # a grid position far outside the image, which ranges from -1 to 1


# Operations that do not move pixels


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


# Operations that move pixels, with Pillow's conventions: pixels are squares, the position of a pixel is that of its
# centre, measured from the image's corner, levels are interpolated linearly between pixels, and positions outside the
# image are black.


def rotate(levels: Tensor, degrees: Tensor) -> Tensor:
    """Rotate images counter-clockwise about their centre."""
    x, y = _middles(levels)
    radians = per_row(degrees, levels[:, 0]) * (math.pi / 180)
    cos, sin = torch.cos(radians), torch.sin(radians)
    half_height, half_width = levels.shape[2] / 2, levels.shape[3] / 2
    from_x = cos * (x - half_width) - sin * (y - half_height) + half_width
    from_y = sin * (x - half_width) + cos * (y - half_height) + half_height
    return _sampled(levels, from_x, from_y, degrees)


def shear_x(levels: Tensor, slope: Tensor) -> Tensor:
    """Shear horizontally: row y is taken from `slope * y` pixels to the right."""
    x, y = _middles(levels)
    from_x = x + per_row(slope, levels[:, 0]) * y
    return _sampled(levels, from_x, y.expand_as(from_x), slope)


def shear_y(levels: Tensor, slope: Tensor) -> Tensor:
    """Shear vertically: column x is taken from `slope * x` pixels below."""
    x, y = _middles(levels)
    from_y = y + per_row(slope, levels[:, 0]) * x
    return _sampled(levels, x.expand_as(from_y), from_y, slope)


def translate_x(levels: Tensor, pixels: Tensor) -> Tensor:
    """Shift horizontally: each pixel is taken from the given integer number of columns to its right."""
    return _shifted(levels, pixels, 3)


def translate_y(levels: Tensor, pixels: Tensor) -> Tensor:
    """Shift vertically: each pixel is taken from the given integer number of rows below it."""
    return _shifted(levels, pixels, 2)


def _middles(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the pixels' centres, x (1, W) and y (H, 1)."""
    height, width = levels.shape[2:]
    options = {"dtype": levels.dtype, "device": levels.device}
    return torch.arange(width, **options).view(1, -1) + 0.5, torch.arange(height, **options).view(-1, 1) + 0.5


def _sampled(levels: Tensor, from_x: Tensor, from_y: Tensor, amount: Tensor) -> Tensor:
    """Return the levels at positions (N, H, W); an image with amount 0 is returned exactly."""
    height, width = levels.shape[2:]
    is_inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    # Within half a pixel of the edge only the edge pixel is used; positions outside are moved far away, to black.
    x = torch.where(is_inside, from_x.clamp(0.5, width - 0.5) * (2 / width) - 1, _FAR)
    y = from_y.clamp(0.5, height - 0.5) * (2 / height) - 1
    # Stack x and y as planes instead of pairs: loops over planes use vector instructions.
    moved = sampled(levels, torch.stack((x, y), 1).permute(0, 2, 3, 1))
    return torch.where(per_row(amount, levels) != 0, moved, levels)


def _shifted(levels: Tensor, pixels: Tensor, dim: int) -> Tensor:
    length = levels.shape[dim]
    source = torch.arange(length, device=levels.device) + pixels.to(torch.int64).unsqueeze(1)
    shape = [len(levels), 1, 1, 1]
    shape[dim] = length
    source = source.view(shape)
    # Positions outside the image read a row or column of zeros that is appended.
    source = torch.where((source >= 0) & (source < length), source, length)
    padded = F.pad(levels, (0, 1) if dim == 3 else (0, 0, 0, 1))
    return padded.gather(dim, source.expand_as(levels))


def sampled(levels: Tensor, grid: Tensor) -> Tensor:
    """Return the levels (N, C, H, W) at positions x and y between pixels, (N, K, L, 2), as (N, C, K, L).

    -1 and 1 are the outer borders of the image, and positions outside are black.
    """
    is_traced = torch.compiler.is_compiling() or is_fake(levels) or is_fake(grid)
    # The operator is used for values only; gradients of all kinds use torch's function.
    needs_grad = torch.is_grad_enabled() and (levels.requires_grad or grid.requires_grad)
    is_forward = not needs_grad and only_maps()
    return (_operator if is_traced and is_forward and levels.device.type == "cpu" else _kernel)(levels, grid)


def _kernel(levels: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(levels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


# Inductor decomposes `grid_sample` into loops. On a GPU they fuse with neighbouring operations; on a CPU they take five
# times as long as the kernel, which gathers with vector instructions. There the kernel is a custom operator.
@torch.library.custom_op("purecompose::sampled", mutates_args=())
def _operator(levels: Tensor, grid: Tensor) -> Tensor:
    return _kernel(levels, grid)


@_operator.register_fake
def _(levels: Tensor, grid: Tensor) -> Tensor:
    return levels.new_empty((*levels.shape[:2], *grid.shape[1:3]))


@_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, int | None], levels: Tensor, grid: Tensor) -> tuple[Tensor, int]:
    rows = [
        value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
        for value, dim in zip((levels, grid), in_dims, strict=True)
    ]
    return _operator(*(value.flatten(0, 1) for value in rows)).unflatten(0, (info.batch_size, -1)), 0


# Amounts and sets


@dataclass(frozen=True)
class Strength:
    """Values that determine an operation's amount for each image.

    Attributes:
        severity: The severity S, a number or a 0-d tensor.
        share: The uniform numbers u, (N,).
        is_up: The coins, bool (N,).
        height: The height of the images in pixels.
        width: The width of the images in pixels.
    """

    severity: float | Tensor
    share: Tensor
    is_up: Tensor
    height: int
    width: int

    @property
    def fraction(self) -> Tensor:
        """The fraction s / 10, (N,)."""
        return self.share * self.severity / 10

    def either_way(self, amount: Tensor) -> Tensor:
        """Return the amount, or its negative where the coin is False."""
        return torch.where(self.is_up, amount, -amount)

    def factor(self, above: float = 1.0) -> Tensor:
        """Return a factor of at least 1 where the coin is True, else at most 1."""
        over = self.severity - 1
        over = over.clamp(min=0) if isinstance(over, Tensor) else max(over, 0.0)
        return torch.where(self.is_up, 1 + above * self.share * over, 1 - 0.09 * self.share * self.severity)

    def original_factor(self) -> Tensor:
        """Return a factor from 0.1 up, or 1 where s is 0."""
        return torch.where(self.fraction > 0, 0.1 + 1.8 * self.fraction, 1)


@dataclass(frozen=True)
class Primitive:
    """An operation and its amount.

    Attributes:
        name: The name in the sets.
        operation: A function `(levels, amount) -> levels`.
        amount: A function from a `Strength` to the amounts (N,).
    """

    name: str
    operation: Callable[[Tensor, Tensor], Tensor]
    amount: Callable[[Strength], Tensor]

    def __call__(self, levels: Tensor, strength: Strength) -> Tensor:
        """Return the levels after the operation."""
        return self.operation(levels, self.amount(strength))

    @property
    def moves(self) -> bool:
        """Whether the operation is one of those that move pixels; False for other people's functions."""
        return self.operation in _MOVING


_MOVING = (rotate, shear_x, shear_y, translate_x, translate_y)
_ALL = (
    Primitive("autocontrast", autocontrast, lambda s: s.fraction),
    Primitive("equalize", equalize, lambda s: s.fraction),
    Primitive("posterize", posterize, lambda s: 8 - (s.fraction * 4).floor()),
    Primitive("rotate", rotate, lambda s: s.either_way((s.fraction * 30).floor())),
    Primitive("solarize", solarize, lambda s: 256 - (s.fraction * 256).floor()),
    Primitive("shear_x", shear_x, lambda s: s.either_way(s.fraction * 0.3)),
    Primitive("shear_y", shear_y, lambda s: s.either_way(s.fraction * 0.3)),
    Primitive("translate_x", translate_x, lambda s: s.either_way((s.fraction * (s.width / 3)).floor())),
    Primitive("translate_y", translate_y, lambda s: s.either_way((s.fraction * (s.height / 3)).floor())),
    Primitive("color", saturation, lambda s: s.factor()),
    Primitive("contrast", contrast, lambda s: s.factor()),
    Primitive("brightness", brightness, lambda s: s.factor(0.75)),
    Primitive("sharpness", sharpness, lambda s: s.factor()),
)
_ORIGINAL = tuple(
    Primitive(f"{primitive.name}_original", primitive.operation, Strength.original_factor) for primitive in _ALL[9:]
)

PRIMITIVES = {primitive.name: primitive for primitive in (*_ALL, *_ORIGINAL)}
"""Map from names to primitives."""

SETS = {"all": _ALL, "safe": _ALL[:9], "original": (*_ALL[:9], *_ORIGINAL)}
"""Map from names to sets; `safe` excludes operations that the corruptions of ImageNet-C and CIFAR-10-C are made of."""


def chosen_primitives(given: Any, where: str) -> tuple[Primitive, ...]:
    """Return the primitives of a set's name, or of a sequence of primitives and their names."""
    if isinstance(given, str):
        if given in PRIMITIVES:
            raise ValueError(f"{where}={given!r}: expected a set of operations, got one: write ({given!r},)")
        if given not in SETS:
            raise ValueError(f"{where}={given!r}: expected {', '.join(map(repr, SETS))}, or names of operations")
        return SETS[given]
    if not isinstance(given, Sequence):
        raise TypeError(f"{where}: expected a set's name or a sequence of operations' names, got {given!r:.80}")
    found = []
    for member in given:
        if not isinstance(member, Primitive | str):
            raise TypeError(f"{where}: expected names of operations, got {member!r:.80} ({type(member).__name__})")
        if not isinstance(member, Primitive) and member not in PRIMITIVES:
            raise ValueError(f"{where}: no operation is called {member!r}; there are {', '.join(PRIMITIVES)}")
        found.append(member if isinstance(member, Primitive) else PRIMITIVES[member])
    if not found:
        raise ValueError(f"{where}: expected one operation or more, got none")
    return tuple(found)


def check_augmentation_set(given: Any, where: str) -> Any:
    """Require a set's name, or a sequence of primitives and their names, and return it with a tuple."""
    chosen_primitives(given, where)
    return frozen(given)


AugmentationSet: TypeAlias = Annotated[str | Sequence[str | Primitive], check_augmentation_set]
