"""The settings of a run from their sources: options, a recipe, a file, and a run's folder."""

import argparse
import dataclasses
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from purecompose._support import specs
from purecompose._support.files import read_whole
from purecompose.algorithms.recipes import recipe
from purecompose.cli.settings import KINDS, LOSSES, SETTINGS, UsageError
from purecompose.nn.models import MODELS, check_options


def chosen(options: argparse.Namespace, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that were chosen by `--set`, by an option or by a file. Defaults are left out."""
    found = dict(config or {})
    if options.config is not None:
        found |= read_config(Path(options.config))
    found |= {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    if options.recipe is not None:
        if options.algorithms is not None:
            raise UsageError(
                "--recipe: a recipe is a list of algorithms, as is --algorithms; give one of the two "
                "(docs/algorithms.md lists the recipes' methods)"
            )
        of_recipe = _recipe_settings(options.recipe)
        found |= {name: value for name, value in of_recipe.items() if getattr(options, name) is None}
    values, within = _set_values(options.set)
    return found | values | ({"within": within} if within else {})


def with_arguments(
    settings: dict[str, Any], factories: Mapping[str, Mapping[str, Callable[..., Any]]]
) -> dict[str, Any]:
    """Return the settings with the arguments of `--set NAME.ARGUMENT=VALUE` put into the calls.

    Args:
        settings: Complete settings, with the arguments to change under "within".
        factories: For the settings "algorithms", "optimizer" and "schedule", functions by name, whose signatures name
            positional arguments.
    """
    settings = dict(settings)
    for name, arguments in settings.pop("within", {}).items():
        try:
            if name in ("optimizer", "schedule", "model"):
                settings[name] = str(_set(name, specs.parse_one(settings[name]), arguments, factories.get(name, {})))
                continue
            calls = specs.parse(settings["algorithms"])
        except specs.SpecError as error:
            raise UsageError(f"--set: {name}: {error}") from error
        if name not in [call.name for call in calls]:
            known = ", ".join(["optimizer", "schedule", "model", *[call.name for call in calls]])
            raise UsageError(
                f"--set: {name}.{next(iter(arguments))}: there is no {name} in this run; there are {known}"
            )
        known = factories["algorithms"]
        changed = [_set(name, call, arguments, known) if call.name == name else call for call in calls]
        settings["algorithms"] = ", ".join(map(str, changed))
    return settings


def settings_of(run: Path) -> dict[str, Any]:
    """Return the settings in the folder of a run."""
    config = run / "config.toml"
    if not config.exists():
        why = "it has no config.toml" if run.exists() else "it does not exist"
        raise UsageError(f"{run} is not a run's folder: {why}; create one with train --out FOLDER")
    return read_config(config, option="")


def read_config(path: Path, *, option: str = "--config: ") -> dict[str, Any]:
    """Return the settings in a TOML file, at the top level or in a table [train].

    Args:
        path: The file.
        option: Beginning of the messages. If it is empty, the file is from a run's folder, which another person may
            have prepared: only a regular file of limited size is read.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8") if option else read_whole(path, 2**20).decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{option}{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{option}{path} is not valid TOML: {error}") from error
    content = content.get("train", content)
    if not isinstance(content, dict):
        raise UsageError(f"{option}{path}: expected settings such as duration = '5ep'")
    pairs = ((name.replace("-", "_"), value) for name, value in content.items())
    return {name: _checked(name, value, f"{option}{path}") for name, value in pairs}


def command_of(settings: Mapping[str, Any], out: str | None) -> str:
    """Return the command that repeats a run."""
    words = ["python", "-m", "purecompose", "train"]
    for name, value in settings.items():
        if name in SETTINGS and value is not None and value != SETTINGS[name].default:
            words += [SETTINGS[name].option] if value is True else [SETTINGS[name].option, str(value)]
    return shlex.join(words + ([] if out is None else ["--out", out]))


def _recipe_settings(name: str) -> dict[str, Any]:
    """Return the settings that a recipe determines."""
    made = recipe(name)
    found: dict[str, Any] = {
        "algorithms": ", ".join(map(repr, made.methods)) or "none",
        "loss": next(text for text, loss in LOSSES.items() if loss == made.loss),
        "duration": made.duration,
        "batch_size": made.batch_size,
        "precision": made.precision,
    }
    if made.optimizer is not None:
        found |= {"optimizer": f"recipe({name!r})", "schedule": "constant"}
    return {setting: value for setting, value in found.items() if value is not None}


def _checked(name: str, value: Any, where: str) -> Any:
    """Return a setting's value converted to its kind."""
    if name not in SETTINGS:
        hint = specs.did_you_mean(name, SETTINGS) or f" there are {', '.join(SETTINGS)}"
        raise UsageError(f"{where}: there is no setting {name!r};{hint}")
    kind = SETTINGS[name].kind
    if kind is str and name == "algorithms" and isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UsageError(f"{where}: {name}: expected {KINDS[kind]}, got {value!r}")
    return value


def _set_values(texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the settings of `--set`, and the arguments of calls, by the call's name."""
    found: dict[str, Any] = {}
    within: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set: {text}: expected KEY=VALUE, such as duration=5ep")
        name, dot, argument = key.strip().replace("-", "_").partition(".")
        if dot:
            within.setdefault(name, {})[argument] = _value(value)
        else:
            found[name] = _checked(name, _value(value), "--set")
    return found, within


def _value(text: str) -> Any:
    """Return the TOML value of a text, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _set(
    name: str, call: specs.Call, arguments: Mapping[str, Any], factories: Mapping[str, Callable[..., Any]]
) -> specs.Call:
    """Return a call with arguments of `--set`."""
    named = specs.by_name(call, factories)
    changed = dataclasses.replace(named, kwargs={**named.kwargs, **arguments})
    try:
        if name == "model" and call.name in MODELS:
            check_options(call.name, arguments)
        elif call.name in factories:
            specs.build(changed, factories, name)
    except (specs.SpecError, TypeError) as error:
        if name == "model" or _can_be_built(call, factories):  # otherwise the call's own option reports the error
            where = ", ".join(f"{name}.{argument}" for argument in arguments)
            raise UsageError(f"--set: {where}: {error}") from error
    return changed


def _can_be_built(call: specs.Call, factories: Mapping[str, Callable[..., Any]]) -> bool:
    try:
        specs.build(call, factories, "call")
    except specs.SpecError:
        return False
    return True
