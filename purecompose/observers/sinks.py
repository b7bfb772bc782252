"""Sinks of tracking services: TensorBoard, Weights & Biases, MLflow, Comet and Neptune; see `Sink`."""

import contextlib
import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from purecompose.observers.recorder import Image


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


class Service(NamedTuple):
    """The functions that create, log to and finish a run with a service's Python library."""

    library: str
    """Name of the module, and of the extra that installs it."""
    run_method: str
    """Name of a method by which the library's runs are recognised."""
    start: Callable[[Any, Mapping[str, Any]], Any]
    """Function `(library, settings) -> run`."""
    log: Callable[[Any, _Values], None]
    finish: Callable[[Any], None]


def _log_to_wandb(run: Any, values: _Values) -> None:
    images = {name: library_of("wandb", "WandB").Image(image.pixels.numpy()) for name, image in values.images.items()}
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
        file = library_of("neptune", "Neptune").types.File.as_image(image.pixels.numpy())
        run[name].append(file, step=values.step)


WANDB = Service(
    library="wandb",
    run_method="log",
    start=lambda wandb, settings: wandb.init(**settings),
    log=_log_to_wandb,
    finish=lambda run: run.finish(),
)
COMET = Service(
    library="comet_ml",
    run_method="log_metrics",
    start=lambda comet, settings: comet.start(**settings),
    log=_log_to_comet,
    finish=lambda run: run.end(),
)
NEPTUNE = Service(
    library="neptune",
    run_method="stop",
    start=lambda neptune, settings: neptune.init_run(**settings),
    log=_log_to_neptune,
    finish=lambda run: run.stop(),
)


class ServiceRun:
    """The sink of a service, with a run, or with a library and settings to create one."""

    def __init__(self, service: Service, run: Any, library: Any, settings: Mapping[str, Any]) -> None:
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


class EventFiles:
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
        getattr(writer, "flush", lambda: None)()

    def close(self) -> None:
        if self._make is not None and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _ready(self) -> Any:
        if self._writer is None:
            # TensorBoard hides everything in the folder from this step on. A new run hides nothing.
            self._writer = self._make(self._folder, purge_step=self._batch + 1 if self._batch else None)
        return self._writer


class MlflowRun:
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


def summary_writer() -> Any:
    """Return the class of TensorBoard's writers."""
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(name).SummaryWriter
        except ImportError:
            continue
    raise ImportError("TensorBoard needs tensorboard; install it with `pip install 'purecompose[tensorboard]'`")


def library_of(name: str, needed_by: str) -> Any:
    """Return an optional library; an `ImportError` names the extra that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{needed_by} needs {name}; install it with `pip install 'purecompose[{name}]'`") from error


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", name)
