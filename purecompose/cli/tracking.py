"""The trackers of `train --tracker`: names, as on the command line, and the observers that they make."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from purecompose._support import specs
from purecompose.cli.options import reported_as
from purecompose.observers import CSV, MLflow, Recorder, TensorBoard, WandB, learning_rate, speed


def trackers_of(texts: Iterable[str], out: Path | None, settings: Mapping[str, Any]) -> list[Recorder]:
    """Return the trackers that calls name.

    Args:
        texts: Calls, such as "tensorboard", or several separated by commas.
        out: The folder of the run, for trackers that write files.
        settings: The settings of the run, which a service shows with it.

    Raises:
        UsageError: A call is wrong.
        ImportError: The library of a service is not installed.
    """
    made = {name: partial(factory, out, settings) for name, factory in _FACTORIES.items()}
    with reported_as("--tracker", TypeError, ValueError):
        calls = [call for text in texts for call in specs.parse(text)]
        return [specs.build(call, made, "tracker") for call in calls]


def _tensorboard(out: Path | None, _: Any, folder: str | None = None, *, every: str = "1ba") -> Recorder:
    return TensorBoard(_place("tensorboard", folder, out), every=every, monitors=_monitors())


def _csv(out: Path | None, _: Any, file: str | None = None, *, every: str = "1ba") -> Recorder:
    return CSV(_place("metrics.csv", file, out), every=every, monitors=_monitors())


def _wandb(out: Path | None, config: Mapping[str, Any], *, every: str = "1ba", **settings: Any) -> Recorder:
    named = {} if out is None else {"name": out.name}
    return WandB(settings={"config": dict(config), **named, **settings}, every=every, monitors=_monitors())


def _mlflow(out: Any, _: Any, run_id: str | None = None, *, every: str = "1ba") -> Recorder:
    del out
    return MLflow(run_id, every=every, monitors=_monitors())


_FACTORIES: Mapping[str, Callable[..., Recorder]] = {
    "csv": _csv,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
TRACKERS = tuple(_FACTORIES)
"""The names of trackers."""


def _monitors() -> list[Any]:
    return [learning_rate(), speed()]


def _place(name: str, given: str | None, out: Path | None) -> Path:
    """Return the place that a call names, or by default one in the run's folder."""
    if given is None and out is None:
        raise ValueError(f"give a path in the call, or the run's folder, --out FOLDER, for {name} in it")
    return Path(given) if given is not None else Path(out or ".", name)
