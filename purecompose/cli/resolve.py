"""Helpers of the commands that try laws. Imported only when one of them runs, because it needs Hypothesis."""

import importlib
import os
import pathlib
import pkgutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from hypothesis import configuration

from purecompose._support.specs import did_you_mean
from purecompose.algorithms import FACTORIES
from purecompose.cli.settings import UsageError
from purecompose.testing.subject import Subject


def subject(text: str) -> Subject:
    """Return the algorithm that a text names: `my_module:my_algorithm`, or a shipped one as a call."""
    _see_folder()
    module = text.partition(":")[0] if ":" in text.partition("(")[0] else None
    try:
        return Subject.of(text)
    except ModuleNotFoundError as error:
        if module is None or error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"{text}: {one_line(error)}{_place(error)}") from error
        raise UsageError(f"{text}: there is no module {error.name!r} here;{_module_hint(module)}") from error
    except Exception as error:
        raise UsageError(_explained(text, module, error)) from error


def listed(text: str | None) -> list[str] | None:
    """Return the entries of a list, separated by commas outside of parentheses; `None` for `None`.

    Example:
        >>> listed("mixup(0.2, name='a'), my_module:mine")
        ["mixup(0.2, name='a')", 'my_module:mine']
    """
    if text is None:
        return None
    entries: list[str] = []
    for part in text.split(","):
        if entries and entries[-1].count("(") > entries[-1].count(")"):
            entries[-1] += f",{part}"
        else:
            entries.append(part)
    return [entry.strip() for entry in entries if entry.strip()]


@contextmanager
def notes_elsewhere() -> Iterator[None]:
    """Let Hypothesis store its notes on modules in a temporary folder instead of the user's, unless one is set."""
    if "HYPOTHESIS_STORAGE_DIRECTORY" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(None)


def one_line(error: BaseException) -> str:
    """Return the message without line breaks."""
    return " ".join(str(error).split())


def _see_folder() -> None:
    """Make modules of the current folder importable, as with `python -m`; the console script does not search it."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())


def _explained(text: str, module: str | None, error: Exception) -> str:
    """Return the reason why a text does not name an algorithm."""
    said = one_line(error)
    if module is None:
        hint = "" if text.partition("(")[0] in FACTORIES else "; write your own as my_module:my_algorithm"
        return f"{said}{hint}"
    if isinstance(error, ValueError) and isinstance(error.__cause__, AttributeError):
        return f"{said}{_attribute_hint(module, text.partition(':')[2])}"
    if isinstance(error, ValueError) and said.startswith(text):
        return f"{said}{_place(error)}"
    return f"{text}: {type(error).__name__}: {said}{_place(error)}"


def _module_hint(module: str) -> str:
    if module.endswith(".py") or "/" in module or "\\" in module:
        stem = module.removesuffix(".py").replace("\\", "/").strip("./").replace("/", ".")
        return f" expected a module's name, not a file's, such as {stem}:my_algorithm"
    here = [found.name for found in pkgutil.iter_modules([os.getcwd()])]
    return did_you_mean(module, here) or f" expected one that can be imported from {os.getcwd()}"


def _attribute_hint(module: str, attribute: str) -> str:
    found = vars(sys.modules[module])
    names = [name for name, value in found.items() if not name.startswith("_") and not isinstance(value, ModuleType)]
    hint = did_you_mean(attribute, names)
    return f";{hint}" if hint else ""


def _place(error: BaseException) -> str:
    """Return the place in the user's code where an error was raised; empty if it was not raised there."""
    ours = (str(pathlib.Path(__file__).parents[1]), "<frozen", importlib.__file__ or "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
