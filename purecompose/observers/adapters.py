"""The records of a run in other people's trackers: thin sinks behind the same recorder."""

import contextlib
import importlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from purecompose.observers.recorder import Monitor, Recorder
from purecompose.time import TimeLike


__all__ = ["MLflow", "TensorBoard", "flat", "module"]


class TensorBoard(Recorder):
    """Writes the records of a run as TensorBoard's scalars, at the number of batches.

    A run that goes on from batch b hides what the folder holds of later batches. Each member of a population has
    scalars of its own: `loss/0`, `loss/1`, ...

    Args:
        folder: Where the event files go; left out if a writer is given.
        every: How often a batch has a record: "10ba", "1ep", ...
        monitors: Functions `(state) -> dict`, or one.
        writer: A `SummaryWriter`, or anything with `add_scalar(name, value, step)`; it stays open.
        **options: `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: Neither tensorboard nor tensorboardX is installed.
        TypeError: Neither or both of a folder and a writer.
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
            raise TypeError("TensorBoard: expected a folder, or writer=SummaryWriter(...), one of the two")
        sink = _Scalars(writer) if folder is None else _Scalars(None, os.fspath(folder), _summary_writer())
        super().__init__(sink, every=every, monitors=monitors, **options)


class MLflow(Recorder):
    """Logs the records of a run as MLflow's metrics, at the number of batches as their step.

    Each member of a population has metrics of its own: `loss/0`, `loss/1`, ... Characters that MLflow does not take
    in names become `_`.

    Args:
        run_id: The MLflow run; without one, the active run, or a new one when training starts.
        every: How often a batch has a record: "10ba", "1ep", ...
        monitors: Functions `(state) -> dict`, or one.
        client: An `MlflowClient`; by default one for the tracking server that is set. Needs a `run_id`.
        **options: `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: mlflow is not installed.
        TypeError: A client without a `run_id`.
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
            raise TypeError("MLflow: a client needs to be told the run: give run_id=client.create_run(...).info.run_id")
        mlflow = module("mlflow", "MLflow", "mlflow")
        super().__init__(_Metrics(mlflow, run_id, client), every=every, monitors=monitors, **options)


class _Scalars:
    """TensorBoard's sink, around a writer or around what makes one."""

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
        for record in records:
            for name, value in flat(record):
                writer.add_scalar(name, value, record["batch"])
        getattr(writer, "flush", _nothing)()

    def close(self) -> None:
        if self._make is not None and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _ready(self) -> Any:
        if self._writer is None:
            # TensorBoard hides from this step on what the folder holds already. A run that starts anew hides nothing.
            self._writer = self._make(self._folder, purge_step=self._batch + 1 if self._batch else None)
        return self._writer


class _Metrics:
    """MLflow's sink. A server that fails is one that is tried again: MLflow's errors count as those of a disk."""

    # As many as the server takes in one request.
    most = 1000

    def __init__(self, mlflow: Any, run_id: str | None, client: Any) -> None:
        self._mlflow, self._run_id, self._client = mlflow, run_id, client
        self._owns_run = False

    def begin(self, batch: int) -> None:
        del batch
        with self._failing_as_disks_do():
            self._client = self._client or self._mlflow.MlflowClient()
            if self._run_id is None:
                active = self._mlflow.active_run()
                self._run_id = (active or self._mlflow.start_run()).info.run_id
                self._owns_run = active is None

    def write(self, records: list[dict[str, Any]]) -> None:
        self.begin(0)  # does nothing where that went well
        now = int(1000 * time.time())
        metrics = [
            self._mlflow.entities.Metric(re.sub(r"[^/\w.\- ]", "_", name), float(value), now, record["batch"])
            for record in records
            for name, value in flat(record)
        ]
        with self._failing_as_disks_do():
            for start in range(0, len(metrics), self.most):
                self._client.log_batch(self._run_id, metrics=metrics[start : start + self.most])

    def close(self) -> None:
        if self._owns_run:
            self._mlflow.end_run()
            self._run_id, self._owns_run = None, False

    @contextlib.contextmanager
    def _failing_as_disks_do(self) -> Iterator[None]:
        try:
            yield
        except self._mlflow.exceptions.MlflowException as error:
            raise OSError(f"MLflow: {error}") from error


def flat(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """A record's numbers without its batch, which is the step; a population's each under the member's number."""
    for name, value in record.items():
        if isinstance(value, list):
            yield from ((f"{name}/{member}", number) for member, number in enumerate(value))
        elif name != "batch":
            yield name, value


def _summary_writer() -> Any:
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(name).SummaryWriter
        except ImportError:
            continue
    raise ImportError("TensorBoard needs tensorboard; install it with `pip install 'purecompose[tensorboard]'`")


def module(name: str, needed_by: str, extra: str) -> Any:
    """An optional library.

    Raises:
        ImportError: It is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{needed_by} needs {name}; install it with `pip install 'purecompose[{extra}]'`") from error


def _nothing() -> None:
    pass
