"""The user's own code on the command line: `my_module:name` for algorithms, networks and data.

Importing a module runs its code. A name in a file, such as a run's `config.toml`, is therefore imported only if the
command line names it too, or has `--allow-imports`.
"""

import argparse
import copy
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from purecompose._support import specs
from purecompose._support.device import building
from purecompose.cli.settings import UsageError
from purecompose.core.algorithm import Algorithm
from purecompose.data import ImageData, TextData
from purecompose.nn import layers


_SETTINGS = ("algorithms", "model", "data")


def is_own(name: str) -> bool:
    """Return whether a name refers to the user's own code, `my_module:name`."""
    return specs.OWN_NAME.fullmatch(name) is not None


def imported(name: str) -> Any:
    """Import `my_module:name`, also from the current folder."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:  # the console script does not search the current folder
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise specs.SpecError(f"{name}: there is no module {error.name!r} here") from error
    except Exception as error:
        raise specs.SpecError(f"{name}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(found, attribute):
        hint = specs.did_you_mean(attribute, [key for key in vars(found) if not key.startswith("_")])
        raise specs.SpecError(f"{name}: the module {module} has no {attribute!r};{hint or ' expected a name in it'}")
    return getattr(found, attribute)


class OwnToo(dict[str, Callable[..., Any]]):
    """Factories by name, including the user's own ones, which are imported on access."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_own(name))

    def __missing__(self, name: str) -> Callable[..., Any]:
        found = imported(name)
        return (lambda: found) if isinstance(found, Algorithm) else found


def allowed_by(options: argparse.Namespace) -> Collection[str] | None:
    """Return the names that may be imported: those on the command line itself; `None` for all."""
    if getattr(options, "allow_imports", False):
        return None
    given = {name: getattr(options, name, None) for name in _SETTINGS}
    given |= {text.partition("=")[0]: text.partition("=")[2] for text in getattr(options, "set", [])}
    return _names({name: value for name, value in given.items() if name in _SETTINGS and isinstance(value, str)})


def check_imports(settings: Mapping[str, Any], allowed: Collection[str] | None) -> None:
    """Raise a `UsageError` if settings name code that has not been allowed to run."""
    foreign = [] if allowed is None else sorted(_names(settings) - set(allowed))
    if foreign:
        raise UsageError(
            f"the settings in a file name code to import, {', '.join(foreign)}: if you trust the file, add "
            "--allow-imports (in Python allow_imports=True), or give the code on the command line too"
        )


def _names(settings: Mapping[str, Any]) -> set[str]:
    found = set()
    for name in _SETTINGS:
        text = settings.get(name) or ""
        if name == "data":
            found |= {text} if is_own(text) else set()
            continue
        try:
            found |= {call.name for call in specs.parse(text) if is_own(call.name)}
        except specs.SpecError:
            pass  # raises again, with a message, when the setting is used
    return found


def network_of(call: specs.Call, data: ImageData | TextData, seed: int) -> nn.Module:
    """Return the network that a call of the user's own code creates, with weights drawn from a seed.

    `timm:NAME` is a network of timm, `transformers:CLASS` one of transformers whose configuration has these options.
    Other functions and classes are called with `in_shape` and `num_classes` if they have such parameters.
    """
    with building(seed):
        made = _made(call, {"in_shape": data.in_shape, "num_classes": data.num_classes})
    if not isinstance(made, nn.Module):
        raise ValueError(f"{call.name} returned a {type(made).__name__}, expected a torch.nn.Module")
    return layers.ClassesSecond(made) if isinstance(data, TextData) else made


def _made(call: specs.Call, shape: Mapping[str, Any]) -> Any:
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
    whole = specs.Call(call.name, call.args, {**given, **call.kwargs})
    return specs.build(whole, {call.name: factory}, "model")


class _Logits(nn.Module):
    """A classification model of transformers, called with its inputs only, which returns its logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs).logits


def data_of(name: str) -> ImageData | TextData:
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
