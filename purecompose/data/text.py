"""Text as tokens, one per character, cut into windows for language models: nothing is downloaded.

    input_ids[i, t] = tokens[i length + t],   labels[i, t] = tokens[i length + t + 1]

Windows do not overlap: every token is an input once and a label once per epoch, with three exceptions: the first token
is not a label, the token after the last window is not an input, and the remaining tokens at the end, fewer than
`length`, are neither. Labels are already shifted, so a network's output at a position belongs to that position's label.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from purecompose._support.checks import check_number, check_whole, shown


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
    if not isinstance(tokens, Tensor) or tokens.dtype.is_floating_point or tokens.dtype in (torch.bool,):
        came = f"{tokens.dtype}" if isinstance(tokens, Tensor) else shown(tokens)
        raise TypeError(f"text_windows: expected tokens as a tensor of integers, got {came}")
    if tokens.ndim != 1:
        raise ValueError(f"text_windows: expected tokens (num_tokens,), got shape {tuple(tokens.shape)}")
    num = (len(tokens) - 1) // length
    if num < 1:
        raise ValueError(
            f"text_windows: {len(tokens)} tokens are too few for a window of {length}, which takes {length + 1} with "
            "the label of its last one; shorten the windows"
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
        TypeError, ValueError: The length or the share is of the wrong kind or out of range; or the file is not UTF-8,
            is too short for a window in either part, or has characters that the vocabulary lacks.

    Example::

        text = load_text("book.txt", length=128)
        train = arrays(text.train_inputs, text.train_targets, 32)
    """
    check_whole(length, "load_text: length", 1, hint="it is a number of tokens")
    check_number(test_share, "load_text: test_share", 0, 1, above=True, below=True)
    text = _read(Path(path).expanduser())
    # The shorter part decides: it needs the tokens of a window and the label of the last one.
    num_test = round(test_share * len(text))
    if min(num_test, len(text) - num_test) <= length:
        raise ValueError(
            f"load_text: {path} is too short for windows of {length}: it has {len(text):,} characters, {num_test:,} of "
            f"them at the end for testing, and both parts need at least {length + 1}; use a longer text, or a "
            "shorter length"
        )
    words = CharacterVocabulary.of(text) if vocabulary is None else vocabulary
    try:
        tokens = words.encode(text)
    except ValueError as error:
        raise ValueError(f"load_text: {path}: {error}") from error
    parts = tokens[: len(text) - num_test], tokens[len(text) - num_test :]
    dropped = sum((len(part) - 1) % length for part in parts)
    return TextData(*text_windows(parts[0], length), *text_windows(parts[1], length), words, dropped)


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"load_text: there is no file {path}") from error
    except OSError as error:
        raise OSError(f"load_text: {path} cannot be read: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"load_text: {path} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}; save it as UTF-8, "
            "or give a text file"
        ) from error


def _code_points(text: str) -> Tensor:
    """Return the code points of a text, int64, `(len(text),)`."""
    # A bytearray, because torch warns about read-only memory. It does not accept an empty one.
    content = bytearray(text.encode("utf-32-le", errors="surrogatepass"))
    return torch.frombuffer(content, dtype=torch.int32).long() if content else torch.zeros(0, dtype=torch.int64)


def _listed(characters: list[str]) -> str:
    """Return a list of the first few characters as text."""
    more = f" and {len(characters) - 5} more" if len(characters) > 5 else ""
    return f"{', '.join(map(repr, characters[:5]))}{more}"
