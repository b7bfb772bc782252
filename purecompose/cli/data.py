"""The data and the network of a run: shipped ones by name, or the user's own."""

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from purecompose import data as datasets
from purecompose._support import specs
from purecompose._support.device import building
from purecompose.cli.options import UsageError, reported_as
from purecompose.cli.own import imported, is_own
from purecompose.cli.settings import Settings
from purecompose.data import Arrays, CharacterVocabulary, ImageData, TextData
from purecompose.losses import metrics
from purecompose.nn import layers, models


Data: TypeAlias = ImageData | TextData

_LENGTH = 128
_FOLDERS = (Path(), Path("data"))
_EVAL_IMAGES, _EVAL_TOKENS = 1000, 2**14


class Kind(NamedTuple):
    """The properties of a kind of data that the command line uses."""

    noun: str
    """Plural noun for the examples."""
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


IMAGES = Kind("images", None, {"accuracy": metrics.accuracy}, decides="accuracy")
TEXT = Kind(
    "windows",
    ("input_ids", "labels"),
    {"perplexity": metrics.perplexity(), "accuracy": metrics.accuracy},
    decides="loss",
)
_TEXT_MODELS = ("gpt",)


def kind_of(data: Data) -> Kind:
    """Return the kind of the data."""
    return TEXT if isinstance(data, TextData) else IMAGES


def load_data(settings: Settings) -> tuple[Data, dict[str, Any]]:
    """Return the data that the settings name, and the settings that follow from the data.

    Raises:
        UsageError: There are no such data, or a setting for text is given with images.
        ImportError: A package that the data need is missing.
    """
    # The settings get an absolute path, because the run's folder may later be used from another working directory.
    with reported_as("--data"):
        if is_own(settings.data):
            return _own_data(settings.data), {}
        path = _text_file(settings.data)
        if path is not None:
            data = datasets.load_text(path, _length(settings), vocabulary=_vocabulary(settings))
            length, characters = data.train_inputs.shape[1], data.vocabulary.characters
            return data, {"data": str(path.resolve()), "length": length, "vocabulary": characters}
        name = str(Path(settings.data).resolve()) if Path(settings.data).exists() else settings.data
        try:
            images = datasets.load(name)
        except ValueError as error:
            is_named = not Path(name).is_dir() and not name.endswith(".npz")
            hint = " (A text's file ends in .txt; a name is looked for here and in a folder data)" if is_named else ""
            raise ValueError(f"{error}{hint}") from error
    for setting in ("length", "vocabulary"):
        if getattr(settings, setting) is not None:
            raise UsageError(f"--{setting}: {settings.data} holds images; --{setting} is for text")
    return images, {"data": name}


def _own_data(name: str) -> Data:
    """Return the data from a function of the user's own code.

    It returns `data.ImageData`, `data.TextData`, or four tensors: inputs and classes for training, then for testing.
    """
    found = imported(name)
    given = found() if callable(found) else found
    if isinstance(given, ImageData | TextData):
        return given
    if not isinstance(given, tuple | list) or len(given) != 4 or not all(isinstance(part, Tensor) for part in given):
        raise ValueError(
            f"{name} returned a {type(given).__name__}, expected data.ImageData, data.TextData or four tensors: inputs "
            "and classes for training, then for testing"
        )
    targets = [given[1], given[3]]
    if any(part.is_floating_point() or part.ndim != 1 for part in targets) or len(given[0]) != len(given[1]):
        raise ValueError(f"{name}: expected classes as whole numbers (N,), one for each input")
    return ImageData(*given, num_classes=1 + int(max(part.max().item() for part in targets)))


def _text_file(name: str) -> Path | None:
    """Return the text file that a name refers to, or None; a name that ends in .txt need not exist."""
    if name.lower().endswith(".txt"):
        return Path(name).expanduser()
    if name == Settings.data or Path(name).exists() or "/" in name:
        return None
    return next((folder / f"{name}.txt" for folder in _FOLDERS if (folder / f"{name}.txt").is_file()), None)


def _length(settings: Settings) -> int:
    length = _LENGTH if settings.length is None else settings.length
    if length < 1:
        raise UsageError(f"--length: {length}: expected a number of characters, at least 1")
    return length


def _vocabulary(settings: Settings) -> CharacterVocabulary | None:
    with reported_as("--vocabulary"):
        return None if settings.vocabulary is None else CharacterVocabulary(settings.vocabulary)


def make_network(text: str, data: Data, seed: int) -> nn.Module:
    """Return the network that a call names, with weights drawn from a seed; its outputs have the classes in dim 1.

    `timm:NAME` is a network of timm, `transformers:CLASS` one of transformers whose configuration has these options.
    Other functions and classes of the user's own code are called with `in_shape` and `num_classes` if they have such
    parameters.
    """
    call, is_text = specs.parse_one(text), isinstance(data, TextData)
    shape = {"in_shape": data.in_shape, "num_classes": data.num_classes}
    if is_own(call.name):
        with building(seed):
            made = _own_network(call, shape)
        if not isinstance(made, nn.Module):
            raise ValueError(f"{call.name} returned a {type(made).__name__}, expected a torch.nn.Module")
        return layers.ClassesSecond(made) if is_text else made
    specs.check_name(call.name, models.MODELS, "model")
    if call.args:
        raise ValueError(f"{call}: expected options by name, as in {models.describe(call.name)}")
    models.check_options(call.name, call.kwargs)  # otherwise they could collide with other arguments of build
    if is_text and call.name not in _TEXT_MODELS:
        raise ValueError(f"{call.name} is a network for images; for text there is {', '.join(_TEXT_MODELS)}")
    if not is_text and call.name in _TEXT_MODELS:
        raise ValueError(f"{call.name} is a network for text, but the data are images")
    net = models.build(call.name, **shape, seed=seed, **call.kwargs)
    return layers.ClassesSecond(net) if is_text else net


def _own_network(call: specs.Call, shape: Mapping[str, Any]) -> Any:
    library, _, name = call.name.partition(":")
    if library == "timm":
        create = imported("timm:create_model")
        options = {"in_chans": shape["in_shape"][0], "num_classes": shape["num_classes"], **call.kwargs}
        try:
            return create(name, *call.args, **options)
        except RuntimeError as error:  # an unknown name, among others
            raise ValueError(f"{call.name}: {error}") from error
    factory = imported(call.name)
    if hasattr(factory, "config_class"):
        options = {"num_labels": shape["num_classes"], **call.kwargs}
        return _Logits(factory(factory.config_class(*call.args, **options)))
    if isinstance(factory, nn.Module):
        return copy.deepcopy(factory)
    known = inspect.signature(factory).parameters if callable(factory) else {}
    given = {key: value for key, value in shape.items() if key in known and key not in call.kwargs}
    return specs.build(specs.Call(call.name, call.args, {**given, **call.kwargs}), {call.name: factory}, "model")


class _Logits(nn.Module):
    """A classification model of transformers, called with its inputs only, which returns its logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs).logits
