"""Draws the pictures of the method cards: two photographs before, and what the methods make of them.

    python docs/images/make.py [NAME ...]

The photographs come with scikit-learn. Writes NAME.webp beside this file. What a picture shows, and with
which settings, stands on the method's card: change both together. docs/site/pictures.py makes a page of all of them.
"""

import pathlib
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

from purecompose import functional
from purecompose.random import key


FOLDER = pathlib.Path(__file__).parent
SIDE, GAP = 200, 8

Shown = list[Tensor]


def photographs() -> Tensor:
    """A flower and a pavilion, uint8 (2, 3, SIDE, SIDE)."""
    found = []
    for name, left in (("flower.jpg", 130), ("china.jpg", 60)):
        image = Image.fromarray(load_sample_image(name)).crop((left, 0, left + 427, 427)).resize((SIDE, SIDE))
        found.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(SIDE, SIDE, 3))
    return torch.stack(found).permute(0, 3, 1, 2)


def augmented(core: Callable[..., Tensor], **settings: object) -> Callable[[Tensor], Shown]:
    """The flower, and three results of different keys."""
    return lambda photos: [photos[0], *(core(key(seed), photos[:1], **settings)[0] for seed in (1, 2, 3))]


def mixed_up(photos: Tensor) -> Shown:
    """Both photographs, and mixtures with two shares."""
    targets, swapped = torch.tensor([0, 1]), torch.tensor([1, 0])
    mixtures = [
        functional.mixup_batch(None, photos / 255, targets, mixing=share, indices=swapped)[0][0] * 255
        for share in (0.2, 0.5)
    ]
    return [*photos, *mixtures]


def cut_and_mixed(photos: Tensor) -> Shown:
    """Both photographs, and one with a part of the other."""
    targets, swapped = torch.tensor([0, 1]), torch.tensor([1, 0])
    box = 149, 78, 249, 178  # half the side, of which the photograph's lower edge cuts a part
    pasted = functional.cutmix_batch(None, photos, targets, bbox=box, indices=swapped)[0]
    return [*photos, *pasted]


def resized(photos: Tensor) -> Shown:
    """The flower at growing scales, and cropped."""
    scaled = [functional.resize_batch(None, photos[:1], None, scale)[0][0] for scale in (0.5, 0.75)]
    cropped = functional.resize_batch(key(0), photos[:1], None, 0.5, mode="crop")[0][0]
    return [photos[0], *scaled, cropped]


def blurred(photos: Tensor) -> Shown:
    """The pavilion; what max poolings of stride 2 make of it, two of them one after the other, and smoothed ones."""
    photo = photos[1:] / 1.0
    plain = F.max_pool2d(F.max_pool2d(photo, 2), 2)
    smooth = functional.blurmax_pool2d(functional.blurmax_pool2d(photo, 2), 2)
    sharp, soft = (F.interpolate(small, size=(SIDE, SIDE))[0] for small in (plain, smooth))
    return [photo[0], sharp, soft]


PICTURES: dict[str, Callable[[Tensor], Shown]] = {
    "augmix": augmented(functional.augmix_batch, severity=5),
    "blurpool": blurred,
    "colout": augmented(functional.colout_batch, p_row=0.15, p_col=0.15),
    "cutmix": cut_and_mixed,
    "cutout": augmented(functional.cutout_batch, length=0.5),
    "mixup": mixed_up,
    "progressive_resizing": resized,
    "randaugment": augmented(functional.randaugment_batch, severity=6),
}


def row_of(shown: Shown) -> Image.Image:
    """The images beside each other, on nothing; smaller ones in the upper left of their place."""
    canvas = torch.zeros((4, SIDE, len(shown) * (SIDE + GAP) - GAP), dtype=torch.uint8)
    for place, image in enumerate(shown):
        left = place * (SIDE + GAP)
        pixels = image.round().clamp(0, 255).to(torch.uint8)
        canvas[:3, : image.shape[1], left : left + image.shape[2]] = pixels
        canvas[3, : image.shape[1], left : left + image.shape[2]] = 255
    return Image.fromarray(canvas.permute(1, 2, 0).numpy())


def main() -> None:
    """Writes the pictures that are named, or all."""
    photos = photographs()
    for name in sys.argv[1:] or PICTURES:
        row_of(PICTURES[name](photos)).save(FOLDER / f"{name}.webp", quality=85, method=6)


if __name__ == "__main__":
    main()
