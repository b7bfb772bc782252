"""Small image sets, read from local files: nothing is downloaded.

`load` reads the digits in scikit-learn, `.npz` archives, folders in the IDX format of MNIST, and folders of images.
The result always has the same form: inputs normalised per channel with the mean and the standard deviation of the
training images, targets as class indices.
"""

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from purecompose.data import class_folders
from purecompose.data.arrays import split


if TYPE_CHECKING:
    import numpy as np


_DIGITS_TEST_SIZE = 360
# Part of the definition of "digits": another seed would be another benchmark.
_DIGITS_SEED = 0

# The common names of the four arrays in an archive.
_NPZ_KEYS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
_IDX_STEMS = ("train-images", "train-labels", "t10k-images", "t10k-labels")
_IDX_UINT8 = 0x08
_PIECE = 2**20


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
            * a folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
              t10k-labels-idx1-ubyte, plain or with `.gz`;
            * a folder with images of one size by class, `train/CLASS/*.png` and `test/CLASS/*.png` (or `val`), which
              requires pillow.

    Raises:
        ValueError: The name is unknown, or the content of a file does not match its format; the message names
            the file.
        FileNotFoundError: A folder lacks one of the four files, or images for testing.
        ImportError: Scikit-learn, numpy or pillow is required and not installed.

    Example:
        >>> data = load("digits")
        >>> data.in_shape, len(data.train_inputs), len(data.test_inputs), data.num_classes
        ((1, 8, 8), 1437, 360, 10)
    """
    if isinstance(name_or_path, str) and name_or_path in _NAMED:
        return _NAMED[name_or_path]()
    path = Path(name_or_path).expanduser()
    if path.is_dir() and class_folders.are_in(path):
        return _image_data(str(path), *class_folders.read(path))
    if path.is_dir():
        return _load_idx(path)
    if path.is_file() and path.suffix == ".npz":
        return _load_npz(path)
    if path.is_file():
        raise ValueError(f"data.load: {path} is neither an .npz archive nor a folder with IDX files or images")
    close = get_close_matches(str(name_or_path), _NAMED, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"data.load: no data set is called {str(name_or_path)!r}, and no such file or folder exists. Known "
        f"are {', '.join(map(repr, _NAMED))}, the paths of .npz archives and of folders with IDX files or images.{hint}"
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
        names = _npz_keys(path)
        # Without pickle, because reading data must not run code. The file is opened here, because numpy does not close
        # a file that it cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            stored = {name: archive[name] for name in names}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise ValueError(f"data.load: {path} cannot be read as an .npz archive of plain arrays: {error}") from error
    images_train, labels_train, images_test, labels_test = (
        _from_numpy(f"{path}[{name}]", array) for name, array in stored.items()
    )
    return _image_data(
        str(path),
        _channels_first(path, images_train),
        labels_train,
        _channels_first(path, images_test),
        labels_test,
    )


def _npz_keys(path: Path) -> tuple[str, ...]:
    with zipfile.ZipFile(path) as archive:
        present = [name.removesuffix(".npy") for name in archive.namelist()]
    for keys in _NPZ_KEYS:
        if set(keys) <= set(present):
            return keys
    wanted = " or ".join(", ".join(keys) for keys in _NPZ_KEYS)
    raise ValueError(f"expected {wanted}; found {', '.join(present) or 'nothing'}")


def _from_numpy(where: str, array: "np.ndarray") -> Tensor:
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


def _load_idx(folder: Path) -> ImageData:
    train_images, train_labels, test_images, test_labels = (
        _read_idx(_find_idx(folder, stem, num_axes), num_axes)
        for stem, num_axes in zip(_IDX_STEMS, (3, 1, 3, 1), strict=True)
    )
    return _image_data(str(folder), train_images.unsqueeze(1), train_labels, test_images.unsqueeze(1), test_labels)


def _find_idx(folder: Path, stem: str, num_axes: int) -> Path:
    name = f"{stem}-idx{num_axes}-ubyte"
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"data.load: the folder {folder} has neither {name} nor {name}.gz")


def _read_idx(path: Path, num_axes: int) -> Tensor:
    """Read one IDX file: two zero bytes, a type, the number of axes, big-endian sizes, then the values."""
    try:
        with cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            shape = _read_idx_header(path, file, num_axes)
            # Reads at most one byte more than the header declares, since a small file may unpack to any size.
            values = _read_at_most(file, math.prod(shape) + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"data.load: {path} cannot be unpacked: {error}") from error
    if len(values) != math.prod(shape):
        found = len(values) if len(values) < math.prod(shape) else "more"
        raise ValueError(
            f"data.load: {path} should hold {' x '.join(map(str, shape))} = {math.prod(shape)} values, got {found}; "
            "the file is cut off or damaged"
        )
    if not values:
        raise ValueError(f"data.load: {path} holds no examples: its sizes are {' x '.join(map(str, shape))}")
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape)


def _read_idx_header(path: Path, file: IO[bytes], num_axes: int) -> list[int]:
    """Read the sizes of the axes."""
    header = file.read(4 + 4 * num_axes)
    if len(header) < 4 + 4 * num_axes:
        raise ValueError(f"data.load: {path} ends within its header: {len(header)} of {4 + 4 * num_axes} bytes")
    magic, *shape = struct.unpack(f">{1 + num_axes}I", header)
    expected = (_IDX_UINT8 << 8) + num_axes
    if magic != expected:
        raise ValueError(
            f"data.load: {path} starts with the magic number {magic}, expected {expected} "
            f"(unsigned bytes, {num_axes} axes)"
        )
    return shape


def _read_at_most(file: IO[bytes], num_bytes: int) -> bytearray:
    """Read at most `num_bytes`, in pieces, because a damaged header may declare more than fits into memory."""
    found = bytearray()  # torch accepts it without a warning, unlike bytes
    while len(found) < num_bytes and (piece := file.read(min(_PIECE, num_bytes - len(found)))):
        found += piece
    return found


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
