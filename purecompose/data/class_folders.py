"""Images in folders by class: `train/cat/1.png`, `train/dog/7.jpg`, ..., and likewise in `test` or `val`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
_TESTS = ("test", "val", "valid", "validation")


def are_in(folder: Path) -> bool:
    """Return whether a folder has images by class, that is, a folder `train` that contains folders."""
    return (folder / "train").is_dir() and bool(_classes(folder / "train"))


def read(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (num, channels, height, width), uint8, and labels (num,), int64, for training and for testing.

    Classes are numbered in the sorted order of their folders' names in `train`. Images have three channels, or one if
    none has colours.

    Raises:
        FileNotFoundError: There is no folder for testing.
        ValueError: `train` lacks a class of the test images, a class has no images, a file cannot be read or has more
            than 8 bits for a value, or images have different sizes.
        ImportError: Pillow is not installed.
    """
    test = next((folder / name for name in _TESTS if (folder / name).is_dir()), None)
    if test is None:
        raise FileNotFoundError(f"data.load: {folder} has a folder train, and none of {', '.join(_TESTS)}")
    names = _classes(folder / "train")
    strange = sorted(set(_classes(test)) - set(names))
    if strange:
        raise ValueError(f"data.load: {test} has classes that {folder / 'train'} lacks: {', '.join(strange)}")
    parts = [_read_part(part, names) for part in (folder / "train", test)]
    modes = {mode for images, _ in parts for _, mode in images}
    mode = "L" if modes <= {"L", "1"} else "RGB"
    (train, train_labels), (tests, test_labels) = (
        (torch.stack([_as_tensor(image, mode) for image, _ in images]), labels) for images, labels in parts
    )
    return train, train_labels, tests, test_labels


def _classes(folder: Path) -> list[str]:
    return sorted(found.name for found in folder.iterdir() if found.is_dir() and not found.name.startswith("."))


def _read_part(folder: Path, names: list[str]) -> tuple[list[tuple[Any, str]], Tensor]:
    """Return the images of a part with their modes, and their labels."""
    images: list[tuple[Any, str]] = []
    labels: list[int] = []
    first: Path | None = None
    for label, name in enumerate(names):
        files = sorted(f for f in (folder / name).glob("*") if f.suffix.lower() in _SUFFIXES and f.is_file())
        if not files:
            raise ValueError(f"data.load: {folder / name} has no images ({', '.join(sorted(_SUFFIXES))})")
        for file in files:
            image = _opened(file)
            first = first or file
            if images and image.size != images[0][0].size:
                raise ValueError(
                    f"data.load: {file} is {image.size[0]} x {image.size[1]}, and {first} is {images[0][0].size[0]} x "
                    f"{images[0][0].size[1]}: expected images of one size; resize them first"
                )
            images.append((image, image.mode))
            labels.append(label)
    return images, torch.tensor(labels)


def _opened(file: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("data.load: folders of images need pillow; install it with `pip install pillow`") from error
    try:
        with Image.open(file) as image:
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"data.load: {file} cannot be read as an image: {error}") from error
    if image.mode.startswith(("I", "F")):  # Pillow would clip their values to 0 to 255
        raise ValueError(
            f"data.load: {file} has {'floats' if image.mode == 'F' else 'more than 8 bits'} for each pixel (mode "
            f"{image.mode}): convert the images to 8 bits, or put them into an .npz archive, which may have any numbers"
        )
    return image


def _as_tensor(image: Any, mode: str) -> Tensor:
    width, height = image.size
    values = torch.frombuffer(bytearray(image.convert(mode).tobytes()), dtype=torch.uint8)
    return values.reshape(height, width, len(mode)).permute(2, 0, 1)
