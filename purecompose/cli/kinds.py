"""The kinds of data that the command line trains on, images and text, and their differences."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from purecompose import data as datasets
from purecompose.cli.own import data_of, is_own
from purecompose.cli.settings import SETTINGS, UsageError
from purecompose.data import Arrays, CharacterVocabulary, ImageData, TextData
from purecompose.losses import metrics
from purecompose.nn import layers


Data: TypeAlias = ImageData | TextData

_LENGTH = 128
_KNOWN_TEXTS = ("tinyshakespeare",)
"""Names of texts that must exist as a file NAME.txt; any other name with such a file is a text as well."""
_FOLDERS = (Path(), Path("data"))
_EVAL_IMAGES, _EVAL_TOKENS = 1000, 2**14


class Kind(NamedTuple):
    """The properties of a kind of data that the command line uses."""

    noun: str
    """Plural noun for the examples."""
    models: tuple[str, ...] | None
    """Names of the networks of `MODELS` for this kind; `None` for all that are not of another kind."""
    names: tuple[str, str] | None
    """Names of inputs and targets in a batch; `None` for pairs."""
    metrics: Mapping[str, Any]
    """Metrics that are evaluated in addition to the loss."""
    decides: str
    """Name of the metric that selects the best checkpoint."""

    def batches(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Arrays:
        """Return batches for training; a smaller last one is left out."""
        return datasets.arrays(inputs, targets, batch_size, drop_last=True, names=self.names)

    def stored(self, inputs: Tensor, targets: Tensor) -> Arrays:
        """Return batches for evaluation, in the stored order."""
        size = _EVAL_IMAGES if self.names is None else max(1, _EVAL_TOKENS // inputs.shape[1])
        return datasets.arrays(inputs, targets, size, shuffle=False, names=self.names)

    @property
    def state_options(self) -> dict[str, Any]:
        """Arguments of `State.create` that name the fields of inputs and targets."""
        return {} if self.names is None else {"input_field": self.names[0], "target_field": self.names[1]}

    def rating(self, value: float) -> float:
        """Return a value of the metric `decides` as a number that is greater for better values."""
        return -value if metrics.is_lower_better(self.decides, self.metrics.get(self.decides)) else value


IMAGES = Kind("images", None, None, {"accuracy": metrics.accuracy}, decides="accuracy")
TEXT = Kind(
    "windows",
    ("gpt",),
    ("input_ids", "labels"),
    {"perplexity": metrics.perplexity(), "accuracy": metrics.accuracy},
    decides="loss",
)


def kind_of(data: Data) -> Kind:
    """Return the kind of the data."""
    return TEXT if isinstance(data, TextData) else IMAGES


def load(settings: Mapping[str, Any]) -> tuple[Data, dict[str, Any]]:
    """Return the data that the settings name, and the settings that follow from the data.

    Raises:
        OSError, ValueError: There are no such data.
        UsageError: A setting for text is given, but the data are images.
        ImportError: A package that the data need is missing.
    """
    # The settings get an absolute path, because the run's folder may later be used from another working directory.
    if is_own(settings["data"]):
        return data_of(settings["data"]), {}
    path = _text_file(settings["data"])
    if path is not None:
        data = datasets.load_text(path, _length(settings), vocabulary=_vocabulary(settings))
        length, characters = data.train_inputs.shape[1], data.vocabulary.characters
        return data, {"data": str(path.resolve()), "length": length, "vocabulary": characters}
    name = settings["data"]
    name = str(Path(name).resolve()) if Path(name).exists() else name
    try:
        images = datasets.load(name)
    except ValueError as error:
        is_named = not Path(name).is_dir() and not name.endswith(".npz")
        raise ValueError(f"{error} (A text's file ends in .txt)" if is_named else str(error)) from error
    for setting in ("length", "vocabulary"):
        if settings[setting] is not None:
            raise UsageError(f"--{setting}: {settings['data']} holds images; --{setting} is for text")
    return images, {"data": name}


def fitting(name: str, net: nn.Module, data: Data) -> nn.Module:
    """Return a network of `MODELS` whose outputs have the classes in dim 1."""
    return layers.ClassesSecond(net) if name in (kind_of(data).models or ()) else net


def check_model(name: str, data: Data) -> None:
    """Raise a `ValueError` if a network of `MODELS` is for another kind of data."""
    wanted = kind_of(data).models
    if name in (TEXT.models or ()) and wanted is None:
        raise ValueError(f"{name} is a network for text, but the data are images")
    if wanted is not None and name not in wanted:
        raise ValueError(f"{name} is a network for images; for text there is {', '.join(wanted)}")


def follows(data: Data) -> bool:
    """Return whether a text's vocabulary follows from its file, so that a command need not contain it."""
    if not isinstance(data, TextData):
        return True
    found = torch.zeros(data.num_classes, dtype=torch.int64)
    for tokens in (data.train_inputs, data.train_targets, data.test_inputs, data.test_targets):
        found += torch.bincount(tokens.flatten(), minlength=data.num_classes)
    characters = data.vocabulary.characters
    return bool(found.all()) and characters == "".join(sorted(characters))


def _length(settings: Mapping[str, Any]) -> int:
    length = _LENGTH if settings["length"] is None else settings["length"]
    if length < 1:
        raise UsageError(f"--length: {length}: expected a number of characters, at least 1")
    return length


def _vocabulary(settings: Mapping[str, Any]) -> CharacterVocabulary | None:
    try:
        return None if settings["vocabulary"] is None else CharacterVocabulary(settings["vocabulary"])
    except ValueError as error:
        raise UsageError(f"--vocabulary: {error}") from error


def _text_file(name: str) -> Path | None:
    """Return the text file that a name refers to, or None; a name that ends in .txt need not exist."""
    if name.lower().endswith(".txt"):
        return Path(name).expanduser()
    if name == SETTINGS["data"].default or Path(name).exists() or "/" in name:
        return None
    for folder in _FOLDERS:
        if (folder / f"{name}.txt").is_file():
            return folder / f"{name}.txt"
    if name in _KNOWN_TEXTS:
        raise FileNotFoundError(
            f"there is no {name}.txt here or in a folder data; put the file there, or give its path"
        )
    return None
