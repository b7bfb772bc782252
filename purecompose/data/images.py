"""Small image sets, read from local files: nothing is downloaded.

`load` reads the digits in scikit-learn, `.npz` archives and folders of images.
The result always has the same form: inputs normalised per channel with the mean and the standard deviation of the
training images, targets as class indices.
"""

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose.data.arrays import split


_DIGITS_TEST_SIZE = 360
# Part of the definition of "digits": another seed would be another benchmark.
_DIGITS_SEED = 0

# The common names of the four arrays in an archive.
_NPZ_KEYS = (("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels"))
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
_TESTS = ("test", "val", "valid", "validation")


class ImageData(NamedTuple):
    """An image set with its fixed split."""

    train_inputs: Tensor
    """float32, shape `(num_train, channels, height, width)`; mean 0, standard deviation 1 in each channel."""
    train_targets: Tensor
    """int64, shape `(num_train,)`, in `[0, num_classes)`."""
    test_inputs: Tensor
    """float32, shape `(num_test, channels, height, width)`, normalised with the training set's moments."""
    test_targets: Tensor
    """int64, shape `(num_test,)`."""
    num_classes: int
    """One more than the largest label."""

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one input, `(channels, height, width)`."""
        return tuple(self.train_inputs.shape[1:])


def load(name_or_path: str | Path) -> ImageData:
    """Read an image set into memory, on the CPU.

    Args:
        name_or_path: One of

            * "digits": 1797 images of 8x8 from scikit-learn, split 1437/360, always in the same way;
            * a file ending in `.npz` with the arrays x_train, y_train, x_test, y_test (or train_images,
              train_labels, test_images, test_labels), images `(num, height, width)` or
              `(num, height, width, channels)`;
            * a folder with images of one size by class, `train/CLASS/*.png` and `test/CLASS/*.png` (or `val`), which
              requires pillow.

    Raises:
        ValueError: The name is unknown, or the content of a file does not match its format; the message names
            the file.
        FileNotFoundError: A folder lacks images for training or testing.
        ImportError: Scikit-learn, numpy or pillow is required and not installed.

    Example:
        >>> data = load("digits")
        >>> data.in_shape, len(data.train_inputs), len(data.test_inputs), data.num_classes
        ((1, 8, 8), 1437, 360, 10)
    """
    if isinstance(name_or_path, str) and name_or_path in _NAMED:
        return _NAMED[name_or_path]()
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _load_folders(path)
    if path.is_file() and path.suffix == ".npz":
        return _load_npz(path)
    if path.is_file():
        raise ValueError(f"data.load: {path} is neither an .npz archive nor a folder with images")
    raise ValueError(
        f"data.load: no data set is called {str(name_or_path)!r}, and no such file or folder exists. Known "
        f"are {', '.join(map(repr, _NAMED))}, the paths of .npz archives and of folders with images"
    )


def _load_digits() -> ImageData:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise _missing("scikit-learn", "the data set 'digits'") from error
    bunch: Any = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32).unsqueeze(1)
    parts = split(images, torch.from_numpy(bunch.target), _DIGITS_TEST_SIZE, seed=_DIGITS_SEED)
    return _image_data("digits", *parts)


_NAMED: dict[str, Callable[[], ImageData]] = {"digits": _load_digits}


def _load_npz(path: Path) -> ImageData:
    try:
        import numpy as np
    except ImportError as error:
        raise _missing("numpy", f"the archive {path}") from error
    try:
        # Without pickle, because reading data must not run code. The file is opened here, because numpy does not close
        # a file that it cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            present = [*archive]
            names = next((names for names in _NPZ_KEYS if {*names} <= {*present}), None)
            if names is None:
                wanted = " or ".join(", ".join(names) for names in _NPZ_KEYS)
                raise ValueError(f"expected {wanted}; found {', '.join(present) or 'nothing'}")
            stored = {name: archive[name] for name in names}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError) as error:
        raise ValueError(f"data.load: {path} cannot be read as an .npz archive of plain arrays: {error}") from error
    train, train_labels, test, test_labels = (_from_numpy(f"{path}[{name}]", array) for name, array in stored.items())
    return _image_data(str(path), _channels_first(path, train), train_labels, _channels_first(path, test), test_labels)


def _from_numpy(where: str, array: Any) -> Tensor:
    if array.dtype.kind not in "uif":
        raise ValueError(f"data.load: {where} holds {array.dtype}, expected integers or floating-point numbers")
    if array.dtype != "uint8":
        # torch does not support foreign byte orders or, in most operations, the wider unsigned types.
        array = array.astype("float32" if array.dtype.kind == "f" else "int64")
    return torch.from_numpy(array)


def _channels_first(path: Path, images: Tensor) -> Tensor:
    if images.ndim == 3:
        return images.unsqueeze(1)
    if images.ndim == 4 and images.shape[-1] <= 4:
        return images.permute(0, 3, 1, 2)
    raise ValueError(
        f"data.load: {path}: expected images of shape (num, height, width) or (num, height, width, channels) "
        f"with at most 4 channels, got {tuple(images.shape)}"
    )


def _load_folders(folder: Path) -> ImageData:
    """Read images in folders by class: `train/cat/1.png`, `train/dog/7.jpg`, ..., and likewise in `test` or `val`.

    Classes are numbered in the sorted order of their folders' names in `train`. Images have three channels, or one if
    none has colours.
    """
    test = next((folder / name for name in _TESTS if (folder / name).is_dir()), None)
    names = _classes(folder / "train") if (folder / "train").is_dir() else []
    if test is None or not names:
        raise FileNotFoundError(
            f"data.load: {folder}: expected images by class, train/CLASS/*.png, and {' or '.join(_TESTS)}/CLASS/*.png"
        )
    strange = sorted(set(_classes(test)) - set(names))
    if strange:
        raise ValueError(f"data.load: {test} has classes that {folder / 'train'} lacks: {', '.join(strange)}")
    parts = [_read_part(part, names) for part in (folder / "train", test)]
    mode = "L" if all(image.mode in ("L", "1") for images, _ in parts for image in images) else "RGB"
    (train, train_labels), (tests, test_labels) = (
        (torch.stack([_as_tensor(image, mode) for image in images]), labels) for images, labels in parts
    )
    return _image_data(str(folder), train, train_labels, tests, test_labels)


def _classes(folder: Path) -> list[str]:
    return sorted(found.name for found in folder.iterdir() if found.is_dir() and not found.name.startswith("."))


def _read_part(folder: Path, names: list[str]) -> tuple[list[Any], Tensor]:
    """Return the images of a part, of one size, and their labels."""
    images: dict[Path, Any] = {}
    labels: list[int] = []
    for label, name in enumerate(names):
        files = sorted(f for f in (folder / name).glob("*") if f.suffix.lower() in _SUFFIXES and f.is_file())
        if not files:
            raise ValueError(f"data.load: {folder / name} has no images ({', '.join(sorted(_SUFFIXES))})")
        images |= {file: _opened(file) for file in files}
        labels += [label] * len(files)
    first, first_image = next(iter(images.items()))
    for file, image in images.items():
        if image.size != first_image.size:
            raise ValueError(
                f"data.load: {file} is {image.size[0]} x {image.size[1]}, and {first} is {first_image.size[0]} x "
                f"{first_image.size[1]}: expected images of one size; resize them first"
            )
    return [*images.values()], torch.tensor(labels)


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


def _image_data(
    where: str, train_images: Tensor, train_labels: Tensor, test_images: Tensor, test_labels: Tensor
) -> ImageData:
    """Check the four arrays against each other and bring them into their final form."""
    for part, images, labels in (("train", train_images, train_labels), ("test", test_images, test_labels)):
        _check_part(f"data.load: {where}: the {part} set", images, labels)
    if train_images.shape[1:] != test_images.shape[1:]:
        raise ValueError(
            f"data.load: {where}: train images are {tuple(train_images.shape[1:])} and test images "
            f"{tuple(test_images.shape[1:])} (channels, height, width); expected one shape"
        )
    mean, scale = _channel_moments(train_images)
    return ImageData(
        train_inputs=((train_images - mean) / scale).contiguous(),
        train_targets=train_labels.to(torch.int64),
        test_inputs=((test_images - mean) / scale).contiguous(),
        test_targets=test_labels.to(torch.int64),
        num_classes=1 + int(max(train_labels.max(), test_labels.max())),
    )


def _check_part(where: str, images: Tensor, labels: Tensor) -> None:
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(f"{where} has labels {labels.dtype} {tuple(labels.shape)}; expected integers of shape (num,)")
    if len(images) != len(labels):
        raise ValueError(f"{where} has {len(images)} images and {len(labels)} labels; expected one label each")
    if images.numel() == 0:
        raise ValueError(f"{where} is empty: its images have the shape {tuple(images.shape)}")
    if not images.isfinite().all():
        raise ValueError(f"{where} has pixels that are not finite; one of them would spoil every input")
    if int(labels.min()) < 0:
        raise ValueError(f"{where} has the label {int(labels.min())}; expected class indices from 0")


def _channel_moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, float32 of shape (channels, 1, 1)."""
    variance, mean = torch.var_mean(images.to(torch.float32), dim=(0, 2, 3), correction=0, keepdim=True)
    # A constant channel becomes zeros, not NaN.
    scale = torch.where(variance > 0, variance.sqrt(), torch.ones_like(variance))
    return mean[0], scale[0]


def _missing(package: str, wanted_by: str) -> ImportError:
    return ImportError(f"data.load: {wanted_by} needs {package}; install it with `pip install 'purecompose[cli]'`")
