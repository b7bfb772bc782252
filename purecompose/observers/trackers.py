"""Recorders for tracking services: TensorBoard, Weights & Biases, MLflow, Comet and Neptune.

Each logs the numbers, texts and images of its records with the number of batches as the step. Members of a population
are logged separately: `loss/0`, `loss/1`, ... For another service, pass a sink to `Recorder`; see `Sink`.
"""

import contextlib
import importlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from purecompose._support.checks import shown
from purecompose.observers.recorder import Image, Monitor, Recorder
from purecompose.time import TimeLike


__all__ = ["Comet", "MLflow", "Neptune", "TensorBoard", "WandB"]


class TensorBoard(Recorder):
    """A recorder that writes the records of a run to TensorBoard.

    A run that is resumed at batch b hides later batches that are already in the folder.

    Args:
        folder: Folder of the event files; leave it out if a writer is given.
        every: Interval between the batches with a record: "10ba", "1ep", ...
        monitors: One or several functions `(state) -> dict`.
        writer: A `SummaryWriter`, or any object with `add_scalar(name, value, step)`, and `add_text` and `add_image`
            if monitors return texts and images; it stays open.
        **options: `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: Neither tensorboard nor tensorboardX is installed.
        TypeError: Neither or both of a folder and a writer are given.

    Example::

        with TensorBoard("runs/1", every="10ba") as tracker:
            fit(step, state, data, observers=tracker)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        every: TimeLike | int = "1ba",
        monitors: Monitor | Iterable[Monitor] = (),
        writer: Any = None,
        **options: Any,
    ) -> None:
        if (folder is None) == (writer is None):
            raise TypeError("TensorBoard: expected either a folder or writer=SummaryWriter(...)")
        sink = _EventFiles(writer) if folder is None else _EventFiles(None, os.fspath(folder), _summary_writer())
        super().__init__(sink, every=every, monitors=monitors, **options)


class MLflow(Recorder):
    """A recorder that logs the records of a run to MLflow: numbers as metrics, texts and images as artifacts.

    Characters that MLflow rejects in names become `_`.

    Args:
        run_id: The MLflow run; by default the active run, or a new one when training starts.
        every: Interval between the batches with a record: "10ba", "1ep", ...
        monitors: One or several functions `(state) -> dict`.
        client: An `MlflowClient`; by default one for the configured tracking server. Needs a `run_id`.
        **options: `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: MLflow is not installed.
        TypeError: A client is given without a `run_id`.

    Example::

        with MLflow(every="10ba") as tracker:
            fit(step, state, data, observers=tracker)
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        every: TimeLike | int = "1ba",
        monitors: Monitor | Iterable[Monitor] = (),
        client: Any = None,
        **options: Any,
    ) -> None:
        if client is not None and run_id is None:
            raise TypeError("MLflow: a client needs a run: pass run_id=client.create_run(...).info.run_id")
        super().__init__(
            _MlflowRun(_library("mlflow", "MLflow"), run_id, client), every=every, monitors=monitors, **options
        )


class _Service(NamedTuple):
    """The functions that create, log to and finish a run with a service's Python library."""

    library: str
    """Name of the module, and of the extra that installs it."""
    run_method: str
    """Name of a method by which the library's runs are recognised."""
    start: Callable[[Any, Mapping[str, Any]], Any]
    """Function `(library, settings) -> run`."""
    log: Callable[[Any, "_Values"], None]
    finish: Callable[[Any], None]


class _ServiceRecorder(Recorder):
    """Base of the recorders of `_Service`s."""

    _service: ClassVar[_Service]

    def __init__(
        self,
        run: Any = None,
        *,
        every: TimeLike | int = "1ba",
        monitors: Monitor | Iterable[Monitor] = (),
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        name, service = type(self).__name__, self._service
        if run is not None and settings is not None:
            raise TypeError(f"{name}: expected a run, or settings to make one, not both")
        if run is not None and not hasattr(run, service.run_method):
            raise TypeError(f"{name}: expected a run of {service.library} or settings={{...}}, got {shown(run)}")
        library = _library(service.library, name) if run is None else None
        super().__init__(_ServiceRun(service, run, library, settings or {}), every=every, monitors=monitors, **options)


class WandB(_ServiceRecorder):
    """A recorder that logs the records of a run to Weights & Biases.

    The steps of W&B only increase: after resuming from an earlier batch, repeated steps are dropped.

    Args:
        run: A run of `wandb`; it stays open. Without one, a run is created when training starts, and finished when the
            recorder is closed.
        every: Interval between the batches with a record: "10ba", "1ep", ...
        monitors: One or several functions `(state) -> dict`.
        settings: Arguments of `wandb.init` for a new run, such as
            `{"project": "digits", "id": "run1", "resume": "allow"}`.
        **options: `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: There is no run, and the library is not installed.
        TypeError: Both a run and settings, or a run of another kind.

    Example::

        with WandB(settings={"project": "digits"}, every="10ba") as tracker:
            fit(step, state, data, observers=tracker)
    """

    _service = _Service(
        library="wandb",
        run_method="log",
        start=lambda wandb, settings: wandb.init(**settings),
        log=lambda run, values: _log_to_wandb(run, values),
        finish=lambda run: run.finish(),
    )


class Comet(_ServiceRecorder):
    """A recorder that logs the records of a run to Comet.

    Args:
        run: A `comet_ml` experiment; it stays open. Without one, an experiment is created when training starts, and
            ended when the recorder is closed.
        every: Interval between the batches with a record: "10ba", "1ep", ...
        monitors: One or several functions `(state) -> dict`.
        settings: Arguments of `comet_ml.start` for a new experiment, such as
            `{"project_name": "digits", "experiment_key": "..."}`.
        **options: `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: There is no run, and the library is not installed.
        TypeError: Both a run and settings, or a run of another kind.

    Example::

        with Comet(settings={"project_name": "digits"}, every="10ba") as tracker:
            fit(step, state, data, observers=tracker)
    """

    _service = _Service(
        library="comet_ml",
        run_method="log_metrics",
        start=lambda comet, settings: comet.start(**settings),
        log=lambda run, values: _log_to_comet(run, values),
        finish=lambda run: run.end(),
    )


class Neptune(_ServiceRecorder):
    """A recorder that logs the records of a run to Neptune, each name as a series.

    Args:
        run: A run of `neptune`; it stays open. Without one, a run is created when training starts, and stopped when the
            recorder is closed.
        every: Interval between the batches with a record: "10ba", "1ep", ...
        monitors: One or several functions `(state) -> dict`.
        settings: Arguments of `neptune.init_run` for a new run, such as
            `{"project": "me/digits", "with_id": "DIG-1"}`.
        **options: `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: There is no run, and the library is not installed.
        TypeError: Both a run and settings, or a run of another kind.

    Example::

        with Neptune(settings={"project": "lab/digits"}, every="10ba") as tracker:
            fit(step, state, data, observers=tracker)
    """

    _service = _Service(
        library="neptune",
        run_method="stop",
        start=lambda neptune, settings: neptune.init_run(**settings),
        log=lambda run, values: _log_to_neptune(run, values),
        finish=lambda run: run.stop(),
    )


class _Values(NamedTuple):
    """The values of a record, grouped by kind."""

    step: int
    numbers: dict[str, float]
    texts: dict[str, str]
    images: dict[str, Image]


def _values_of(record: Mapping[str, Any]) -> _Values:
    values = _Values(record["batch"], {}, {}, {})
    for name, value in record.items():
        if isinstance(value, list):
            values.numbers.update({f"{name}/{member}": number for member, number in enumerate(value)})
        elif isinstance(value, str):
            values.texts[name] = value
        elif isinstance(value, Image):
            values.images[name] = value
        elif name != "batch":
            values.numbers[name] = value
    return values


def _log_to_wandb(run: Any, values: _Values) -> None:
    images = {name: _library("wandb", "WandB").Image(image.pixels.numpy()) for name, image in values.images.items()}
    run.log({**values.numbers, **values.texts, **images}, step=values.step)


def _log_to_comet(run: Any, values: _Values) -> None:
    run.log_metrics(values.numbers, step=values.step)
    for name, text in values.texts.items():
        run.log_text(text, step=values.step, metadata={"name": name})
    for name, image in values.images.items():
        run.log_image(image.pixels.numpy(), name=name, step=values.step)


def _log_to_neptune(run: Any, values: _Values) -> None:
    for name, value in {**values.numbers, **values.texts}.items():
        run[name].append(value, step=values.step)
    for name, image in values.images.items():
        file = _library("neptune", "Neptune").types.File.as_image(image.pixels.numpy())
        run[name].append(file, step=values.step)


class _ServiceRun:
    """The sink of a service, with a run, or with a library and settings to create one."""

    def __init__(self, service: _Service, run: Any, library: Any, settings: Mapping[str, Any]) -> None:
        self._service, self._run, self._library, self._settings = service, run, library, settings

    def begin(self, batch: int) -> None:
        del batch
        if self._run is None:
            self._run = self._service.start(self._library, self._settings)

    def write(self, records: list[dict[str, Any]]) -> None:
        self.begin(0)  # no-op if the run has already started
        for record in records:
            self._service.log(self._run, _values_of(record))

    def close(self) -> None:
        if self._library is not None and self._run is not None:
            self._service.finish(self._run)
            self._run = None


class _EventFiles:
    """The sink of TensorBoard, with a writer, or with a folder and a class to create one."""

    def __init__(self, writer: Any, folder: str = "", make: Any = None) -> None:
        self._writer, self._folder, self._make = writer, folder, make
        self._batch = 0

    def begin(self, batch: int) -> None:
        self._batch = batch
        if self._make is not None:
            self.close()
            self._ready()

    def write(self, records: list[dict[str, Any]]) -> None:
        writer = self._ready()
        for values in map(_values_of, records):
            for name, number in values.numbers.items():
                writer.add_scalar(name, number, values.step)
            for name, text in values.texts.items():
                writer.add_text(name, text, values.step)
            for name, image in values.images.items():
                writer.add_image(name, image.pixels, values.step, dataformats="HWC")
        getattr(writer, "flush", _nothing)()

    def close(self) -> None:
        if self._make is not None and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _ready(self) -> Any:
        if self._writer is None:
            # TensorBoard hides everything in the folder from this step on. A new run hides nothing.
            self._writer = self._make(self._folder, purge_step=self._batch + 1 if self._batch else None)
        return self._writer


class _MlflowRun:
    """The sink of MLflow. Its errors become OSErrors, so that records are sent again when the server is available."""

    # Maximal number of metrics that the server accepts in one request.
    most = 1000

    def __init__(self, mlflow: Any, run_id: str | None, client: Any) -> None:
        self._mlflow, self._run_id, self._client = mlflow, run_id, client
        self._owns_run = False

    def begin(self, batch: int) -> None:
        del batch
        with self._errors_as_os_errors():
            self._client = self._client or self._mlflow.MlflowClient()
            if self._run_id is None:
                active = self._mlflow.active_run()
                self._run_id = (active or self._mlflow.start_run()).info.run_id
                self._owns_run = active is None

    def write(self, records: list[dict[str, Any]]) -> None:
        self.begin(0)  # no-op if the run has already started
        now, client = int(1000 * time.time()), self._client
        with self._errors_as_os_errors():
            # Artifacts come first: if a write fails and is repeated, they are replaced, but metrics are added again.
            for values in map(_values_of, records):
                for name, text in values.texts.items():
                    client.log_text(self._run_id, text, f"{_mlflow_name(name)}/ba{values.step:08d}.txt")
                for name, image in values.images.items():
                    path = f"{_mlflow_name(name)}/ba{values.step:08d}.png"
                    client.log_image(self._run_id, image.pixels.numpy(), path)
            metrics = [
                self._mlflow.entities.Metric(_mlflow_name(name), float(number), now, values.step)
                for values in map(_values_of, records)
                for name, number in values.numbers.items()
            ]
            for start in range(0, len(metrics), self.most):
                client.log_batch(self._run_id, metrics=metrics[start : start + self.most])

    def close(self) -> None:
        if self._owns_run:
            self._mlflow.end_run()
            self._run_id, self._owns_run = None, False

    @contextlib.contextmanager
    def _errors_as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except self._mlflow.exceptions.MlflowException as error:
            raise OSError(f"MLflow: {error}") from error


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", name)


def _summary_writer() -> Any:
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(name).SummaryWriter
        except ImportError:
            continue
    raise ImportError("TensorBoard needs tensorboard; install it with `pip install 'purecompose[tensorboard]'`")


def _library(name: str, needed_by: str) -> Any:
    """Return an optional library; an `ImportError` names the extra that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{needed_by} needs {name}; install it with `pip install 'purecompose[{name}]'`") from error


def _nothing() -> None:
    pass
