"""Each image operation agrees with Pillow's to within one grey level."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from tests.algorithms.images.applying import applied


SIZES = [(32, 32), (17, 30), (3, 5), (64, 48)]


def affine(a: float, b: float, c: float, d: float, e: float, f: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.transform(
        image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), resample=Image.Resampling.BILINEAR
    )


CASES: list[tuple[str, float, Callable[[Image.Image], Image.Image]]] = [
    ("autocontrast", 1.0, ImageOps.autocontrast),
    ("equalize", 1.0, ImageOps.equalize),
    *[("posterize", bits, lambda image, bits=bits: ImageOps.posterize(image, bits)) for bits in (1, 4, 7, 8)],
    *[("solarize", at, lambda image, at=at: ImageOps.solarize(image, at)) for at in (0, 1, 100, 255, 256)],
    *[
        ("rotate", turn, lambda image, turn=turn: image.rotate(turn, resample=Image.Resampling.BILINEAR))
        for turn in (1, -7, 30, 45, 133.5)
    ],
    *[("shear_x", slope, affine(1, slope, 0, 0, 1, 0)) for slope in (0.1, -0.3)],
    *[("shear_y", slope, affine(1, 0, 0, slope, 1, 0)) for slope in (0.25, -0.05)],
    *[("translate_x", shift, affine(1, 0, shift, 0, 1, 0)) for shift in (1, -2, 10, -100)],
    *[("translate_y", shift, affine(1, 0, 0, 0, 1, shift)) for shift in (2, -1)],
    *[
        (ours, factor, lambda image, theirs=theirs, factor=factor: theirs(image).enhance(factor))
        for ours, theirs in (
            ("saturation", ImageEnhance.Color),
            ("contrast", ImageEnhance.Contrast),
            ("brightness", ImageEnhance.Brightness),
            ("sharpness", ImageEnhance.Sharpness),
        )
        for factor in (0.0, 0.1, 0.55, 1.0, 1.9, 9.0)
    ],
]


def pictures(height: int, width: int, channels: int) -> Tensor:
    """Return noise, a smooth picture of few levels, and a flat one."""
    generator = torch.Generator().manual_seed(height * width + channels)
    noise = torch.randint(0, 256, (channels, height, width), generator=generator)
    rows, columns = torch.arange(height).view(-1, 1), torch.arange(width)
    smooth = torch.stack([(60 + 3 * rows + (channel + 1) * columns) % 201 for channel in range(channels)])
    return torch.stack([noise, smooth, torch.full_like(noise, 77)]).to(torch.uint8)


def through_pillow(batch: Tensor, theirs: Callable[[Image.Image], Image.Image]) -> Tensor:
    results = []
    for picture in batch:
        array = picture.permute(1, 2, 0).numpy()
        image = Image.fromarray(array if array.shape[2] == 3 else array[..., 0])
        result = torch.from_numpy(np.array(theirs(image)))
        results.append(result.permute(2, 0, 1) if result.ndim == 3 else result.unsqueeze(0))
    return torch.stack(results)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("ours", "amount", "theirs"), CASES)
def test_within_one_level(ours: str, amount: float, theirs: Any, size: tuple[int, int], channels: int) -> None:
    batch = pictures(*size, channels)
    expected = through_pillow(batch, theirs).int()
    got = applied(ours, batch, amount)
    assert got.dtype == torch.uint8 and got.shape == batch.shape
    assert (got.int() - expected).abs().max() <= 1
    # The same images as floats, on another scale.
    loose = applied(ours, batch / 255, amount, (0.0, 1.0))
    assert loose.dtype == torch.float32
    assert (loose * 255 - expected).abs().max() <= 1.01
