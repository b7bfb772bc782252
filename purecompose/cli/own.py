"""The user's own code in settings, `my_module:name`, for algorithms, networks and data.

Importing a module runs its code. A name in a file, such as a run's `config.toml`, is therefore imported only if the
command line names it too, or has `--allow-imports`.
"""

import importlib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePath
from typing import Any

from purecompose._support import specs
from purecompose.algorithms import BY_NAME
from purecompose.cli.options import UsageError
from purecompose.core.algorithm import Algorithm


_WITH_CODE = ("algorithms", "model", "data")


def is_own(name: str) -> bool:
    """Return whether a name refers to the user's own code, `my_module:name`."""
    return specs.OWN_NAME.fullmatch(name) is not None


def imported(name: str) -> Any:
    """Import `my_module:name`, also from the current folder."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:  # the console script does not search the current folder
        sys.path.insert(0, os.getcwd())
    if module.endswith(".py"):
        stem = PurePath(module).stem
        raise specs.SpecError(f"{name}: expected a module's name, not a file's, such as {stem}:{attribute}")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
            raise specs.SpecError(f"{name}: {module} cannot be imported: {type(error).__name__}: {error}") from error
        missing = f"there is no module {error.name!r} in {os.getcwd()}, and none is installed"
        raise specs.SpecError(f"{name}: {missing}") from error
    if not hasattr(found, attribute):
        raise specs.SpecError(f"{name}: the module {module} has no {attribute!r}")
    return getattr(found, attribute)


class _OwnToo(dict[str, Callable[..., Any]]):
    """Factories by name, including the user's own ones, which are imported on access."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_own(name))

    def __missing__(self, name: str) -> Callable[..., Any]:
        found = imported(name)
        return (lambda: found) if isinstance(found, Algorithm) else found


ALGORITHMS: Mapping[str, Callable[..., Any]] = _OwnToo(BY_NAME)
"""The factories of algorithms by name, those in modules of the user among them."""


def allowed_by(given: Mapping[str, Any], allow_imports: bool) -> Collection[str] | None:
    """Return the names that may be imported: those in the settings on the command line; `None` for all."""
    return None if allow_imports else _names(given)


def check_imports(settings: Mapping[str, Any], allowed: Collection[str] | None) -> None:
    """Raise if settings name code that may not be imported; `None` allows all.

    A setting that is not on the command line is from a file, such as that of a run.
    """
    foreign = [] if allowed is None else sorted(_names(settings) - set(allowed))
    if foreign:
        raise UsageError(
            f"the settings in a file name code to import, {', '.join(foreign)}: if you trust the file, add "
            "--allow-imports (in Python allow_imports=True), or give the code on the command line too"
        )


def _names(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the user's own code in settings."""
    found = set()
    for name in _WITH_CODE:
        text = settings.get(name) or ""
        try:
            found |= {text} if name == "data" else set[str]().union(*(call.names for call in specs.parse(text)))
        except specs.SpecError:
            pass  # raises again, with a message, when the setting is used
    return {name for name in found if is_own(name)}
