"""Batch operations as transforms of a data set's samples: PIL images or tensors, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, random
from purecompose._checks import shown


__all__ = ["SampleTransform", "as_tensor", "like_before"]

_MODES = ("L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB")


@dataclass(frozen=True)
class SampleTransform:
    """A function of a sample, made of one of keyed batches of images.

    Args:
        core: `(key, image (C, H, W)) -> image`. A partial function of a module's own pickles, as workers want it.
        input_key: Names the image in a sample; by default the sample itself, or the first member of a tuple or list.

    Example:
        >>> from purecompose.images import rotate
        >>> turn = SampleTransform(lambda key, image: rotate(image, 90.0))
        >>> turn((torch.tensor([[[1, 2], [3, 4]]], dtype=torch.uint8), "label"), random.key(0))
        (tensor([[[2, 4],
                 [1, 3]]], dtype=torch.uint8), 'label')
    """

    core: Callable[[Tensor | random.Rng, Tensor], Tensor]
    input_key: batches.Key | None = None

    def __call__(self, sample: Any, rng: random.Rng | Tensor | torch.Generator | None = None) -> Any:
        """The sample with its image changed, of the same kind.

        Args:
            sample: As the data set has it.
            rng: Where the randomness comes from: a key, as `data.loader(..., rng="key")` gives it, or a generator; with
                `None` torch's global one, which loaders seed for each sample.

        Raises:
            TypeError: No image, or no source of randomness.
        """
        key = self.input_key
        if key is None:
            key = 0 if isinstance(sample, tuple | list) else batches.WHOLE
        image = batches.get(sample, key)
        changed = self.core(_key_from(rng), as_tensor(image))
        return batches.put(sample, key, like_before(changed, image))


def as_tensor(image: Any) -> Tensor:
    """A PIL image as uint8 (C, H, W); a tensor as it is.

    Raises:
        TypeError: Something else, or a PIL image whose pixels are not one or more bytes.
    """
    if isinstance(image, Tensor):
        return image
    if not hasattr(image, "getbands") or not hasattr(image, "tobytes"):
        raise TypeError(f"expected an image, a PIL one or a tensor (C, H, W), got {shown(image)}; name it by input_key")
    if image.mode not in _MODES:
        raise TypeError(
            f"expected a PIL image of mode {', '.join(_MODES)}, got {image.mode!r}; use image.convert('RGB')"
        )
    width, height = image.size
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, len(image.getbands())).permute(2, 0, 1)


def like_before(changed: Tensor, image: Any) -> Any:
    """The changed tensor as what the image was."""
    if isinstance(image, Tensor):
        return changed
    from PIL import Image  # it is there, since the image is one of its own

    _, height, width = changed.shape
    pixels = bytes(changed.permute(1, 2, 0).contiguous().flatten().tolist())
    return Image.frombytes(image.mode, (width, height), pixels)


def _key_from(rng: Any) -> Tensor | random.Rng:
    if isinstance(rng, random.Rng | Tensor):
        return rng
    if rng is None or isinstance(rng, torch.Generator):
        return torch.randint(0, 2**32, (2,), dtype=torch.int64, generator=rng)
    raise TypeError(f"expected a key, a torch.Generator or None, got {shown(rng)}; use data.loader(..., rng='key')")
