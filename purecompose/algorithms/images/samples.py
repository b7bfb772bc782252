"""Images as grey levels: the scale from 0 (black) to 255 (white) on which image operations are defined; and batch
operations as transforms of a data set's samples, PIL images or tensors, one at a time.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, random, tree
from purecompose._support.device import constants
from purecompose._support.internals import is_fake, is_transforming
from purecompose._support.specs import check_keywords, frozen, is_number, shown
from purecompose.schedule.declared import checks_of


WHITE = 255.0
_SLACK = 1e-3  # tolerance for rounding in half precision, as a share of the range; far less than a level

Bound: TypeAlias = float | tuple[float, ...]
ValueRange: TypeAlias = tuple[Bound, Bound] | None
"""Values of black and white, a number for all channels or one for each; for `None` see `Scale.of`."""


class Scale(NamedTuple):
    """Conversion between the values of images and grey levels.

    Attributes:
        low: The value of black, a number or (C, 1, 1).
        high: The value of white, likewise.
        is_whole: True if levels are integers, for images of uint8.
    """

    low: float | Tensor
    high: float | Tensor
    is_whole: bool

    @classmethod
    def of(cls, images: Tensor, value_range: ValueRange = None) -> Scale:
        """Return the scale of a batch.

        Args:
            images: (..., C, H, W), uint8 or floating.
            value_range: The range of floats; the range of bytes is always 0 to 255. By default the least and the
                greatest value of each channel in the batch, so that the normalisation of images need not be known.
        """
        if images.dtype == torch.uint8:
            return cls(0.0, WHITE, True)
        if value_range is None:
            flat = _wide(images.detach()).movedim(-3, 0).flatten(1)
            # One pixel that is NaN must not turn the others into NaN.
            is_finite = flat.isfinite()
            low, high = (
                torch.where(is_finite, flat, torch.inf).amin(1),
                torch.where(is_finite, flat, -torch.inf).amax(1),
            )
            return cls(low.view(-1, 1, 1), high.view(-1, 1, 1), False)
        low, high = (_bound(bound, images) for bound in value_range)
        if isinstance(low, Tensor) != isinstance(high, Tensor):
            low, high = (
                bound if isinstance(bound, Tensor) else images.new_full((1, 1, 1), bound) for bound in (low, high)
            )
        return cls(low, high, False)

    def stored(self, images: Tensor) -> Tensor:
        """Return the levels in the form that is stored between operations: uint8 if they are integers, else floats."""
        if self.is_whole:
            return images
        wide = _wide(images)
        return ((wide - self.low) * (WHITE / self._extent(wide))).clamp(0, WHITE)

    def opened(self, stored: Tensor) -> Tensor:
        """Return the levels as floats, as operations expect them."""
        return stored.float() if self.is_whole else stored

    def settled(self, levels: Tensor) -> Tensor:
        """Return levels in the form that is stored, rounded to uint8 if they are integers."""
        return levels.round().to(torch.uint8) if self.is_whole else levels

    def values(self, stored: Tensor, before: Tensor, images: Tensor) -> Tensor:
        """Return the images with these levels; pixels whose level equals `before` keep their exact values."""
        if self.is_whole:
            return stored
        values = stored * (self._extent(stored) / WHITE) + self.low
        bounds: Any = (self.low, self.high)
        return torch.where(stored == before, images, values.clamp(*bounds).to(images.dtype))

    def _extent(self, like: Tensor) -> float | Tensor:
        extent: Any = self.high - self.low  # pyright: ignore[reportOperatorIssue]
        # A constant channel has extent 0; divide by 1 instead, so that its level is 0.
        return torch.where(extent > 0, extent, 1).to(like) if isinstance(extent, Tensor) else extent


def on_levels(images: Tensor, fn: Callable[[Tensor, Scale], Tensor], value_range: ValueRange, where: str) -> Tensor:
    """Apply a function `(levels (N, C, H, W), scale) -> levels` to images (N, C, H, W) or (C, H, W), uint8 or floating.

    Levels are in the form that the scale stores.
    """
    check_image_tensor(images, f"{where}: images", has_levels=True)
    check_value_range(value_range, f"{where}: value_range", images.shape[-3])
    batch = images if images.ndim == 4 else images.unsqueeze(0)
    if not batch.numel():
        return images
    scale = Scale.of(batch, value_range)
    stored = scale.stored(batch)
    changed = scale.values(fn(stored, scale), stored, batch)
    return changed if images.ndim == 4 else changed.squeeze(0)


def check_value_range(value_range: Any, where: str, channels: int | None = None) -> Any:
    """Require `None` or (black, white), each a number or one for each channel, and return it with tuples."""
    if value_range is None:
        return None
    if not isinstance(value_range, tuple | list) or len(value_range) != 2:
        raise TypeError(f"{where}: expected (black, white), such as (0.0, 1.0), or None, got {shown(value_range)}")
    low, high = (tuple(bound) if isinstance(bound, tuple | list) else (bound,) for bound in value_range)
    if not all(is_number(value) for value in (*low, *high)):
        raise TypeError(f"{where}: expected numbers, one or one for each channel, got {shown(value_range)}")
    counts = {len(low), len(high)} - {1}
    if len(counts) > 1 or (channels is not None and counts - {channels}):
        raise ValueError(
            f"{where}: expected one number, or one for each of {channels or 'the'} channels, got {shown(value_range)}"
        )
    longest = max(len(low), len(high))
    pairs = zip(low * (longest // len(low)), high * (longest // len(high)), strict=True)
    if not all(black < white for black, white in pairs):
        raise ValueError(f"{where}: expected black below white, got {shown(value_range)}")
    return frozen(value_range)


def check_in_range(images: Tensor, value_range: ValueRange, where: str) -> None:
    """Raise a `ValueError` for floats (..., C, H, W) outside the range, apart from NaN; this reads the values.

    Values outside would be clipped, and normalised images have many of them.
    """
    if value_range is None or not images.numel():
        return
    low, high = (_bound(bound, images) for bound in value_range)
    wide, slack = _wide(images.detach()), _SLACK * (high - low)
    if not ((wide < low - slack) | (wide > high + slack)).any():
        return
    finite = wide[~wide.isnan()]
    raise ValueError(
        f"{where}: expected floats from black to white, value_range={value_range}, got values from "
        f"{finite.min().item():.4g} to {finite.max().item():.4g}; apply it before Normalize, or give value_range="
    )


def _wide(images: Tensor) -> Tensor:
    return images if images.dtype == torch.float64 else images.float()


def _bound(bound: Bound, images: Tensor) -> Tensor:
    values = bound if isinstance(bound, tuple | list) else (bound,)
    return constants(values, torch.float32, images.device).view(-1, 1, 1)


def whole_part(share: float, size: int) -> int:
    """Return the integer part of `share * size`, without losing a pixel to rounding."""
    # The roundings of a decimal share, of 1 - share and of the product add up to less than twice the machine epsilon.
    return math.floor((share + 2 * sys.float_info.epsilon) * size)


def check_image_tensor(images: Any, where: str, *, has_levels: bool = False) -> None:
    """Raise a `TypeError` unless images are a tensor, and a `ValueError` unless it is (N, C, H, W) or (C, H, W)."""
    if not isinstance(images, Tensor):
        raise TypeError(f"{where}: expected a tensor of images, got {shown(images)}")
    if has_levels and images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"{where}: expected uint8 or a floating dtype, got {images.dtype}; use images.to(torch.uint8)")
    if images.ndim not in (3, 4):
        raise ValueError(f"{where}: expected (N, C, H, W) or (C, H, W), got shape {tuple(images.shape)}")


def can_read(tensor: Tensor) -> bool:
    """Return whether values can be read on the host without waiting for a device."""
    return not is_traced(tensor) and tensor.device.type == "cpu" and type(tensor) is Tensor


def is_traced(tensor: Tensor) -> bool:
    """Return whether code with this tensor is compiled, mapped or differentiated by torch.func."""
    return torch.compiler.is_compiling() or is_transforming() or is_fake(tensor)


_COLOURS = {"L": torch.uint8, "RGB": torch.uint8}
# Also modes whose pixels can be moved but not changed: labels, parts that are not light (such as hue), or unknown
# scales. There is no arithmetic on 16-bit pixels, so their sign does not matter.
_MOVABLE = {
    **dict.fromkeys(("L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "P"), torch.uint8),
    "I;16": torch.int16,
    "I": torch.int32,
    "F": torch.float32,
}


def sample_transform(
    core: Callable[..., Any],
    *,
    input_field: batches.Field | None = None,
    target_field: batches.Field | None = None,
    **settings: Any,
) -> SampleTransform:
    """Return a method's core as a transform of a data set's samples, for use in the loader's processes.

    Images are PIL images or tensors (C, H, W), and stay what they are. `colout_batch` also changes targets that are
    masks of their images: PIL images, and tensors (C, H, W); tensors (H, W) only with `resize_target=True`.

    Args:
        core: `randaugment_batch`, `augmix_batch`, `cutout_batch`, `colout_batch`, or a function of the same form.
        input_field: Field of the sample with the image; defaults to the sample itself, or the first member of a tuple
            or list.
        target_field: Field of the sample with the target; defaults to the second member of a tuple or list, if any.
        settings: Settings of the core. `value_range` is by default (0, 1). Floats outside the range are rejected: apply
            the transform before a normalisation, or pass their range.

    Returns:
        A function `(sample, rng=None) -> sample`, for `data.loader(..., transform=..., rng="key")` or any data set.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range, or a core that mixes examples. When applied
            to a sample: see `SampleTransform`.

    Example:
        >>> from purecompose.functional import randaugment_batch
        >>> augment = sample_transform(randaugment_batch, severity=9, depth=2, input_field="image")
        >>> sample = {"image": torch.zeros(3, 8, 8, dtype=torch.uint8), "label": 1}
        >>> augment(sample, random.key(0))["image"].shape
        torch.Size([3, 8, 8])
    """
    parameters, name = inspect.signature(core).parameters, getattr(core, "__name__", "the core")
    targets = parameters.get("targets")
    if targets is not None and targets.default is inspect.Parameter.empty:
        raise TypeError(f"sample_transform: {name} needs a whole batch; call it in the step or in your own loop")
    if "value_range" in parameters:
        settings["value_range"] = settings.get("value_range") or (0.0, 1.0)
    check_keywords(settings, core)
    for key, check in checks_of(core).items():
        if key in settings:
            settings[key] = check(settings[key], f"{name}: {key}")
    takes_target = targets is not None and settings.get("resize_target") is not False
    value_range = settings.get("value_range")
    return SampleTransform(partial(core, **settings), input_field, takes_target, target_field, value_range)


@dataclass(frozen=True)
class SampleTransform:
    """Function of a sample that applies a function of keyed images; `sample_transform` makes one.

    Args:
        core: A picklable function `(key, image (C, H, W)) -> image`, of any size.
        input_field, target_field: See `sample_transform`.
        takes_target: True if the core only moves pixels, and changes the target as well: `(key, image, target) ->
            (image, target)`. A target is any tree; PIL images in it are passed as tensors (C, H, W) and converted back.
        value_range: The values of black and white of floats; values outside are rejected. By default all are accepted.
    """

    core: Callable[..., Any]
    input_field: batches.Field | None = None
    takes_target: bool = False
    target_field: batches.Field | None = None
    value_range: ValueRange = None

    def __post_init__(self) -> None:
        for role in ("input_field", "target_field"):
            if (field := getattr(self, role)) is not None:
                batches.check_field(field, role)

    def __call__(self, sample: Any, rng: random.Rng | Tensor | torch.Generator | None = None) -> Any:
        """Return the sample with its image changed, of the same kind.

        Args:
            rng: The source of randomness: a key, as passed by `data.loader(..., rng="key")`, or a generator; with
                `None` torch's global one. To apply one method twice, use `rng.named(...)` for the second time.

        Raises:
            TypeError: There is no image, or `rng` is not a source of randomness.
            ValueError: Floats outside the range; checked only on a CPU, and not while tracing.
        """
        is_sequence = isinstance(sample, tuple | list)
        field, target_field = self.input_field, self.target_field
        if field is None:
            field = 0 if is_sequence else batches.WHOLE
        if target_field is None and is_sequence and len(sample) > 1:
            target_field = 1
        image = batches.get(sample, field)
        opened = as_tensor(image, is_moved=self.takes_target)
        if opened.is_floating_point() and can_read(opened):
            check_in_range(opened, self.value_range, f"sample_transform: {self._name()}")
        target = None if not self.takes_target or target_field is None else batches.get(sample, target_field)
        if target is None:
            return batches.put(sample, field, like_before(self.core(self._key(rng), opened), image))
        opened_target = tree.map(lambda one: as_tensor(one, is_moved=True) if _is_pil(one) else one, target)
        changed, changed_target = self.core(self._key(rng), opened, opened_target)
        sample = batches.put(sample, field, like_before(changed, image))
        if changed_target is opened_target:
            return sample
        assert target_field is not None
        return batches.put(sample, target_field, tree.map(like_before, changed_target, target))

    def _key(self, rng: Any) -> Tensor:
        """Return a key for this sample and this function, since several transforms may share one source."""
        if isinstance(rng, Tensor):
            return rng
        if isinstance(rng, random.Rng):
            # Draws for a whole batch, such as permutations, ignore the example's number, so it is put into the key.
            return random.bits(rng.named(self._name()), (2,))
        if rng is None or isinstance(rng, torch.Generator):
            return torch.randint(0, 2**32, (2,), dtype=torch.int64, generator=rng, device="cpu")
        raise TypeError(f"expected a key, a torch.Generator or None, got {shown(rng)}; use data.loader(..., rng='key')")

    def _name(self) -> str:
        core = getattr(self.core, "func", self.core)
        return getattr(core, "__qualname__", "transform")


def as_tensor(image: Any, *, is_moved: bool = False) -> Tensor:
    """Return a PIL image as a tensor (C, H, W), uint8 if its pixels are levels; a tensor as it is.

    Args:
        is_moved: True if pixels are only moved, so that palettes and modes of other dtypes are accepted.
    """
    if isinstance(image, Tensor):
        return image
    if not _is_pil(image):
        raise TypeError(
            f"expected an image, from PIL or as a tensor (C, H, W), got {shown(image)}; select it with input_field"
        )
    modes = _MOVABLE if is_moved else _COLOURS
    if image.mode not in modes:
        # One-bit pixels may be a mask's 0 and 1, so suggest "L"; colours would change the meaning of a mask.
        mode = "L" if image.mode == "1" else "RGB"
        raise TypeError(
            f"expected a PIL image of mode {', '.join(modes)}, got {image.mode!r}; use image.convert('{mode}')"
        )
    width, height = image.size
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=modes[image.mode])
    return pixels.view(height, width, len(image.getbands())).permute(2, 0, 1)


def like_before(changed: Any, image: Any) -> Any:
    """Return the changed tensor as a PIL image with the mode, palette and info of a PIL image; otherwise unchanged."""
    if not _is_pil(image):
        return changed
    _, height, width = changed.shape
    pixels = changed.permute(1, 2, 0).contiguous().flatten().view(torch.uint8)
    # Copy through a buffer: the only fast way to get bytes out of a tensor without numpy.
    buffer = bytearray(len(pixels))
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(pixels)
    result = image.crop((0, 0, width, height))  # a new image with the old one's attributes, of any size
    result.frombytes(bytes(buffer))
    return result


def _is_pil(image: Any) -> bool:
    return hasattr(image, "getbands") and hasattr(image, "tobytes")
