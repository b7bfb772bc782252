"""Resuming of a run: the settings that it began with, and those that cannot change."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from purecompose._support import specs
from purecompose.cli.settings import SETTINGS, UsageError
from purecompose.cli.sources import read_config
from purecompose.nn.models import MODELS
from purecompose.run.saving import MismatchError


_CAUSES = {
    "duration": ("duration", "scale_schedule"),
    "batches_per_epoch": ("data", "length", "batch_size", "limit_batches", "validation"),
}
"""Settings that can cause a difference of a checkpoint, by the name of the difference; `_OF_STATE` for all others."""
_OF_STATE = ("data", "length", "vocabulary", "algorithms", "optimizer", "precision")
_MOST_LINES = 12


def earlier_settings(out: Path | None, *, is_asked: bool) -> dict[str, Any]:
    """Return the settings of the resumed run; empty if there is none."""
    if not is_asked:
        return {}
    if out is None:
        raise UsageError("--resume: give the folder of the run, --out FOLDER")
    config = out / "config.toml"
    return read_config(config, option="") if config.exists() else {}


def check_seed(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Raise a `UsageError` if a run is resumed with other seeds, because the keys of its draws cannot change."""
    for name in ("seed", "seeds"):
        if name in earlier and earlier[name] != settings[name]:
            raise UsageError(
                f"--{name}: the run continues with {earlier[name]}, as it began; for another one choose another --out"
            )


def check_model(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Raise a `UsageError` if a run is resumed with another network, even one that its tensors fit."""
    if "model" in earlier and _options(earlier["model"]) != _options(settings["model"]):
        raise UsageError(
            f"--model: {earlier['model']} in the run, {settings['model']} here; for another one choose another --out"
        )


def _options(model: str) -> tuple[str, dict[str, Any]]:
    """Return a network's name and all its options, including defaults."""
    call = specs.parse_one(model)
    parameters = inspect.signature(MODELS[call.name]).parameters.values() if call.name in MODELS else ()
    return call.name, {**{one.name: one.default for one in parameters}, **call.kwargs}


def changes(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[str]:
    """Return a line with the settings that differ from the resumed run's, in a list that is empty if none do."""
    changed = [name for name in SETTINGS if earlier and earlier.get(name) != settings[name]]
    reported = [f"{SETTINGS[name].option} {settings[name]} ({earlier.get(name, 'not set')} before)" for name in changed]
    return [f"  continues with {', '.join(reported)}"] if reported else []


@contextmanager
def reported_as_settings(settings: Mapping[str, Any], earlier: Mapping[str, Any], out: Path | None) -> Iterator[None]:
    """Name the settings that make a checkpoint unfit in the error, before the resulting differences of tensors."""
    try:
        yield
    except MismatchError as error:
        blamed = {name for line in error.differences for name in _CAUSES.get(line.partition(":")[0], _OF_STATE)}
        changed = [name for name in SETTINGS if name in blamed and earlier.get(name) != settings[name]]
        if not changed:
            raise
        lines = [f"{SETTINGS[name].option}: {earlier.get(name)} in the run, {settings[name]} here" for name in changed]
        found = error.differences[:_MOST_LINES]
        raise MismatchError(
            "\n  ".join([f"{out} cannot continue with other settings:", *lines])
            + "\nleave these options out, or choose another --out; "
            + "\n  ".join([f"differences, of {len(error.differences)} in all:", *found]),
            error.differences,
        ) from error
