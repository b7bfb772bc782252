"""The inputs of examples as pictures or text."""

import base64
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import tree


_MOST_WORDS, _MOST_NUMBERS = 200, 8


class Shown(NamedTuple):
    """An input or target in a report."""

    words: str
    """Text, numbers, or dtype and shape."""
    picture: str = ""
    """A PNG as a data URL, if it is an image."""


def shown_as(value: Any, decode: Callable[[Any], str] | None) -> Shown:
    """Return an input of one example for a report: images (C, H, W) with one or three channels as pictures.

    Args:
        value: The input, or `None`.
        decode: Function that returns it as text.
    """
    if decode is not None and value is not None:
        words = decode(value)
        return Shown(words if len(words) <= _MOST_WORDS else f"{words[: _MOST_WORDS - 3]}...")
    if not isinstance(value, Tensor):
        return Shown("")
    value = value.detach().cpu()
    if value.ndim == 3 and value.shape[0] in (1, 3) and value.numel() and not value.is_complex():
        return Shown(f"{tree.describe(value)}{_range(value)}", _png(_as_bytes(value)))
    if value.numel() <= _MOST_NUMBERS:
        return Shown(", ".join(f"{number:.4g}" for number in value.flatten().tolist()))
    if not value.is_floating_point() and value.ndim == 1:
        numbers = " ".join(map(str, value.tolist()))
        return Shown(numbers if len(numbers) <= _MOST_WORDS else f"{numbers[: _MOST_WORDS - 3]}...")
    return Shown(f"{tree.describe(value)}{_range(value)}")


def _range(value: Tensor) -> str:
    low, high = (float(one) for one in (value.min(), value.max()))
    return f" from {low:.3g} to {high:.3g}"


def _as_bytes(image: Tensor) -> Tensor:
    """Return an image (C, H, W) as (H, W, C), uint8, from its darkest to its brightest finite value."""
    if image.dtype is not torch.uint8:
        image = image.double()
        finite = image[image.isfinite()]
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
        image = (image.nan_to_num(low, high, low) - low) * (255 / (high - low) if high > low else 0)
        image = image.round().clamp(0, 255).to(torch.uint8)
    return image.permute(1, 2, 0).contiguous()


def _png(pixels: Tensor) -> str:
    """Return a PNG of gray or RGB pixels as a data URL (ISO/IEC 15948)."""
    height, width, channels = pixels.shape
    rows = torch.nn.functional.pad(pixels.reshape(height, -1), (1, 0))  # each row begins with its filter, 0 for none

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    content = zlib.compress(bytes(rows.flatten().tolist()))
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
