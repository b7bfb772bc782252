"""Data sets read from local files: image sets, and text as tokens. Nothing is downloaded.

Images are normalised per channel with the mean and the standard deviation of the training images. A text is cut into
windows that do not overlap, with labels that are already shifted:

    input_ids[i, t] = tokens[i length + t],   labels[i, t] = tokens[i length + t + 1]
"""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.messages import required
from purecompose._support.specs import check_number, check_whole, shown
from purecompose.data.arrays import described, split


_NPZ_KEYS = (("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels"))
"""The common names of the four arrays in an archive."""
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

    def __repr__(self) -> str:
        return described(self)

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
    if name_or_path == "digits":
        return _load_digits()
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _load_folders(path)
    if path.is_file() and path.suffix == ".npz":
        return _load_npz(path)
    if path.is_file():
        raise ValueError(f"data.load: {path} is neither an .npz archive nor a folder with images")
    raise ValueError(
        f"data.load: no data set is called {str(name_or_path)!r}, and no such file or folder exists. Known "
        "are 'digits', the paths of .npz archives and of folders with images"
    )


def _load_digits() -> ImageData:
    bunch = required("the data set 'digits'", "'purecompose[cli]'", "sklearn.datasets").load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32).unsqueeze(1)
    # Size and seed are part of the definition of "digits": others would be another benchmark.
    return _image_data("digits", *split(images, torch.from_numpy(bunch.target), 360, seed=0))


def _load_npz(path: Path) -> ImageData:
    np = required(f"the archive {path}", "'purecompose[cli]'", "numpy")
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
    arrays = []
    for images, labels in parts:
        pixels = torch.frombuffer(
            bytearray().join(image.convert(mode).tobytes() for image in images), dtype=torch.uint8
        )
        width, height = images[0].size
        arrays += [pixels.reshape(len(images), height, width, len(mode)).permute(0, 3, 1, 2), labels]
    return _image_data(str(folder), *arrays)


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
    Image = required("a folder of images", "pillow", "PIL.Image")
    try:
        with Image.open(file) as image:
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"data.load: {file} cannot be read as an image: {error}") from error
    if image.mode.startswith(("I", "F")):  # Pillow would clip their values to 0 to 255
        raise ValueError(
            f"data.load: {file} has {'floats' if image.mode == 'F' else 'more than 8 bits'} for each pixel (mode "
            f"{image.mode}): put the images into an .npz archive, which may have any numbers"
        )
    return image


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
    variance, mean = torch.var_mean(train_images.to(torch.float32), dim=(0, 2, 3), correction=0, keepdim=True)
    scale = variance.sqrt().where(variance > 0, 1)  # a constant channel becomes zeros, not NaN
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


@dataclass(frozen=True)
class CharacterVocabulary:
    """Characters and their numbers: a character's token is its position.

    Args:
        characters: The characters, at least one, each of them once.

    Raises:
        TypeError: `characters` is not a string.
        ValueError: There are no characters, or one occurs twice.

    Example:
        >>> vocabulary = CharacterVocabulary.of("hello")
        >>> vocabulary.characters, len(vocabulary)
        ('ehlo', 4)
        >>> vocabulary.decode(vocabulary.encode("hole"))
        'hole'
    """

    characters: str

    def __post_init__(self) -> None:
        if not isinstance(self.characters, str):
            raise TypeError(f"CharacterVocabulary: expected a text, got {shown(self.characters)}")
        if not self.characters:
            raise ValueError("CharacterVocabulary: expected at least one character, got an empty text")
        if len(set(self.characters)) < len(self.characters):
            twice = sorted({one for one in self.characters if self.characters.count(one) > 1})
            raise ValueError(
                f"CharacterVocabulary: expected each character once, got these more often: {_listed(twice)}"
            )

    @classmethod
    def of(cls, text: str) -> "CharacterVocabulary":
        """Return the vocabulary of a text's characters, sorted by their code points."""
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text: int64, `(len(text),)`.

        Raises:
            ValueError: The text has characters that the vocabulary lacks; the message lists them.
        """
        known, found = _code_points(self.characters), _code_points(text)
        table = torch.full((int(known.max()) + 1,), -1)
        table[known] = torch.arange(len(known))
        tokens = torch.where(found < len(table), table[found.clamp(max=len(table) - 1)], -1)
        if bool((tokens < 0).any()):
            missing = sorted(set(text) - set(self.characters))
            raise ValueError(
                f"the text has {len(missing)} character{'s' * (len(missing) > 1)} that the vocabulary of {len(self)} "
                f"lacks: {_listed(missing)}; leave them out, or train with a vocabulary that has them"
            )
        return tokens

    def decode(self, tokens: Tensor) -> str:
        """Return the text of tokens, integers `(L,)`.

        Raises:
            IndexError: A token is negative, or not less than the vocabulary's size.
        """
        numbers = tokens.tolist()
        if wrong := [number for number in numbers if not 0 <= number < len(self)]:
            raise IndexError(f"expected tokens from 0 to {len(self) - 1}, got {wrong[0]}")
        return "".join(self.characters[number] for number in numbers)


class TextData(NamedTuple):
    """A text in windows, with a fixed split: its end is the test part."""

    train_inputs: Tensor
    """int64, shape `(num_train, length)`."""
    train_targets: Tensor
    """int64, shape `(num_train, length)`: the tokens that follow the inputs."""
    test_inputs: Tensor
    """int64, shape `(num_test, length)`."""
    test_targets: Tensor
    """int64, shape `(num_test, length)`."""
    vocabulary: CharacterVocabulary
    """The characters, and their numbers."""
    num_dropped: int
    """Number of tokens at the ends of the two parts that are not used as labels, because they fill no window."""

    def __repr__(self) -> str:
        return described(self)

    @property
    def num_classes(self) -> int:
        """The vocabulary's size."""
        return len(self.vocabulary)

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one input, `(length,)`."""
        return tuple(self.train_inputs.shape[1:])


def text_windows(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut tokens into windows that do not overlap, each with the labels that follow its tokens.

    Args:
        tokens: Integers `(num_tokens,)`.
        length: Number of tokens in a window, at least 1.

    Returns:
        Inputs and labels, both `(N, length)` with N = (num_tokens - 1) // length, of the tokens' dtype.

    Raises:
        TypeError: The tokens are not integers, or the length is not an integer.
        ValueError: The tokens have another shape, the length is below 1, or there are too few tokens for one window.

    Example:
        >>> inputs, labels = text_windows(torch.arange(8), 3)
        >>> inputs.tolist(), labels.tolist()
        ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """
    check_whole(length, "text_windows: length", 1, hint="it is a number of tokens")
    if not isinstance(tokens, Tensor) or tokens.dtype.is_floating_point or tokens.dtype is torch.bool:
        raise TypeError(f"text_windows: expected tokens as a tensor of integers, got {shown(tokens)}")
    if tokens.ndim != 1:
        raise ValueError(f"text_windows: expected tokens (num_tokens,), got shape {tuple(tokens.shape)}")
    num = (len(tokens) - 1) // length
    if num < 1:
        raise ValueError(
            f"text_windows: {len(tokens)} tokens are too few for a window of {length}, which takes {length + 1} with "
            "the label of its last one"
        )
    end = num * length
    return tokens[:end].reshape(num, length), tokens[1 : end + 1].reshape(num, length)


def load_text(
    path: str | Path, length: int = 128, *, vocabulary: CharacterVocabulary | None = None, test_share: float = 0.1
) -> TextData:
    """Read a text file into memory, on the CPU, as windows of characters.

    Args:
        path: A file in UTF-8. Line ends are kept; a byte order mark is left out.
        length: Number of tokens in a window.
        vocabulary: The characters and their numbers; by default the characters of the file, sorted.
        test_share: Fraction of the file, at its end, that is the test part, in (0, 1).

    Raises:
        OSError: The file does not exist or cannot be read.
        TypeError, ValueError: An argument is of the wrong kind or out of range; or the file is not UTF-8, is too short,
            or has characters that the vocabulary lacks.

    Example::

        text = load_text("book.txt", length=128)
        train = arrays(text.train_inputs, text.train_targets, 32)
    """
    check_whole(length, "load_text: length", 1, hint="it is a number of tokens")
    check_number(test_share, "load_text: test_share", 0, 1, above=True, below=True)
    content = Path(path).expanduser().read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"load_text: {path} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}; save it as UTF-8"
        ) from error
    # The shorter part decides: it needs the tokens of a window and the label of the last one.
    num_test = round(test_share * len(text))
    if min(num_test, len(text) - num_test) <= length:
        raise ValueError(
            f"load_text: {path} is too short for windows of {length}: it has {len(text):,} characters, {num_test:,} of "
            f"them at the end for testing, and both parts need at least {length + 1}"
        )
    words = CharacterVocabulary.of(text) if vocabulary is None else vocabulary
    try:
        tokens = words.encode(text)
    except ValueError as error:
        raise ValueError(f"load_text: {path}: {error}") from error
    parts = tokens[: len(text) - num_test], tokens[len(text) - num_test :]
    dropped = sum((len(part) - 1) % length for part in parts)
    return TextData(*text_windows(parts[0], length), *text_windows(parts[1], length), words, dropped)


def _code_points(text: str) -> Tensor:
    """Return the code points of a text, int64, `(len(text),)`."""
    # A bytearray, because torch warns about read-only memory. It does not accept an empty one.
    content = bytearray(text.encode("utf-32-le", errors="surrogatepass"))
    return torch.frombuffer(content, dtype=torch.int32).long() if content else torch.zeros(0, dtype=torch.int64)


def _listed(characters: list[str]) -> str:
    more = f" and {len(characters) - 5} more" if len(characters) > 5 else ""
    return f"{', '.join(map(repr, characters[:5]))}{more}"
