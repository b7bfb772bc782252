"""Recorders for tracking services, TensorBoard, Weights & Biases and MLflow, and for tables in files, CSV.

Each logs the numbers, texts and images of its records with the number of batches as the step. Members of a population
are logged separately: `loss/0`, `loss/1`, ... For another service, pass a sink to `Recorder`; see `Sink`.
"""

import contextlib
import csv
import io
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from purecompose._support.messages import required
from purecompose._support.specs import shown
from purecompose.observers.recorder import Image, Recorder


class TensorBoard(Recorder):
    """A recorder that writes the records of a run to TensorBoard.

    A run that is resumed at batch b hides later batches that are already in the folder.

    Args:
        folder: Folder of the event files; leave it out if a writer is given.
        writer: A `SummaryWriter`, or any object with `add_scalar(name, value, step)`, and `add_text` and `add_image`
            if monitors return texts and images; it stays open.
        **options: `every`, `monitors`, `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: Neither tensorboard nor tensorboardX is installed.
        TypeError: Neither or both of a folder and a writer are given.

    Example::

        with TensorBoard("runs/1", every="10ba") as tracker:
            fit(step, state, data, observers=tracker)
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, writer: Any = None, **options: Any) -> None:
        if (folder is None) == (writer is None):
            raise TypeError("TensorBoard: expected either a folder or writer=SummaryWriter(...)")
        super().__init__(_TensorBoardRun(writer, folder), **options)


class MLflow(Recorder):
    """A recorder that logs the records of a run to MLflow: numbers as metrics, texts and images as artifacts.

    Characters that MLflow rejects in names become `_`.

    Args:
        run_id: The MLflow run; by default the active run, or a new one when training starts.
        **options: `every`, `monitors`, `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: MLflow is not installed.

    Example::

        with MLflow(every="10ba") as tracker:
            fit(step, state, data, observers=tracker)
    """

    def __init__(self, run_id: str | None = None, **options: Any) -> None:
        super().__init__(_MlflowRun(run_id), **options)


class WandB(Recorder):
    """A recorder that logs the records of a run to Weights & Biases.

    The steps of W&B only increase: after resuming from an earlier batch, repeated steps are dropped.

    Args:
        run: A run of `wandb`; it stays open. Without one, a run is created when training starts, and finished when the
            recorder is closed.
        settings: Arguments of `wandb.init` for a new run, such as
            `{"project": "digits", "id": "run1", "resume": "allow"}`.
        **options: `every`, `monitors`, `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: There is no run, and the library is not installed.
        TypeError: Both a run and settings, or a run of another kind.

    Example::

        with WandB(settings={"project": "digits"}, every="10ba") as tracker:
            fit(step, state, data, observers=tracker)
    """

    def __init__(self, run: Any = None, *, settings: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(_WandbRun(run, settings), **options)


class CSV(Recorder):
    """A recorder that writes the numbers and texts of a run as a table, with a row for each record.

    A record of a batch and one of an evaluation have different columns; the others stay empty. A run that is resumed at
    batch b removes the rows of later batches, and one that starts from the beginning replaces the file.

    Args:
        path: The file; its folder is created if necessary.
        **options: `every`, `monitors`, `group` and `seconds`; see `Recorder`.

    Raises:
        TypeError, ValueError: An option has the wrong kind.

    Example:
        >>> import tempfile, torch
        >>> from purecompose import State, compose, fit, loop_events, losses, optim
        >>> state = State.create(torch.nn.Linear(3, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="2ep")
        >>> path = Path(tempfile.mkdtemp(), "metrics.csv")
        >>> with CSV(path) as table:
        ...     state = fit(compose(loop_events), state, [(torch.zeros(4, 3), torch.ones(4, 1))], observers=table)
        >>> [line.partition(",")[0] for line in path.read_text().splitlines()]
        ['batch', '1', '2']
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(_Table(Path(path).absolute()), **options)


class _Table:
    """A file of rows as a sink; a record with new columns rewrites it."""

    def __init__(self, path: Path) -> None:
        self._path, self._columns = path, ["batch"]

    def begin(self, batch: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = ["batch"]
        self._rewrite([row for row in self._rows() if int(row["batch"]) <= batch] if batch else [], [])

    def write(self, records: list[dict[str, Any]]) -> None:
        found = [_values_of(record) for record in records]
        rows = [{"batch": one.step, **one.numbers, **one.texts} for one in found]
        new = [name for row in rows for name in row if name not in self._columns]
        if new:
            self._rewrite(self._rows(), new)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerows(rows)

    def _rows(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8") as file:
            text = file.read()
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))  # the last row may be incomplete
        rows = list(reader)
        self._columns = list(reader.fieldnames or ["batch"])
        return rows

    def _rewrite(self, rows: list[dict[str, Any]], new: list[str]) -> None:
        self._columns = list(dict.fromkeys([*self._columns, *new]))
        part = self._path.with_name(f".{self._path.name}")  # complete or not at all, also if the process is killed
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        part.replace(self._path)


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


class _Run:
    """A sink that logs to a given run of a service, or to one that it opens when training starts and closes."""

    def __init__(self, given: Any) -> None:
        self._given = self._run = given
        self._batch = 0

    def begin(self, batch: int) -> None:
        self._batch = batch
        self._ready()

    def write(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            self._log(self._ready(), _values_of(record))

    def close(self) -> None:
        if self._given is None and self._run is not None:
            self._end(self._run)
            self._run = None

    def _ready(self) -> Any:
        """Return the run, opened if necessary."""
        if self._run is None:
            self._run = self._open()
        return self._run

    def _open(self) -> Any:
        raise NotImplementedError

    def _log(self, run: Any, values: _Values) -> None:
        raise NotImplementedError

    def _end(self, run: Any) -> None:
        raise NotImplementedError


class _TensorBoardRun(_Run):
    """Event files in a folder, or a given writer."""

    def __init__(self, writer: Any, folder: str | os.PathLike[str] | None) -> None:
        super().__init__(writer)
        self._folder = folder
        self._library = None
        if folder is not None:
            modules = "torch.utils.tensorboard", "tensorboardX"
            self._library = required("TensorBoard", "'purecompose[tensorboard]'", *modules)

    def begin(self, batch: int) -> None:
        self.close()
        super().begin(batch)

    def write(self, records: list[dict[str, Any]]) -> None:
        super().write(records)
        getattr(self._run, "flush", lambda: None)()

    def _open(self) -> Any:
        assert self._folder is not None and self._library is not None
        # TensorBoard hides everything in the folder from this step on. A new run hides nothing.
        purge_step = self._batch + 1 if self._batch else None
        return self._library.SummaryWriter(os.fspath(self._folder), purge_step=purge_step)

    def _log(self, run: Any, values: _Values) -> None:
        for name, number in values.numbers.items():
            run.add_scalar(name, number, values.step)
        for name, text in values.texts.items():
            run.add_text(name, text, values.step)
        for name, image in values.images.items():
            run.add_image(name, image.pixels, values.step, dataformats="HWC")

    def _end(self, run: Any) -> None:
        run.close()


class _WandbRun(_Run):
    """A run of wandb, given or made with settings."""

    def __init__(self, run: Any, settings: Mapping[str, Any] | None) -> None:
        if run is not None and settings is not None:
            raise TypeError("WandB: expected a run, or settings to make one, not both")
        if run is not None and not hasattr(run, "log"):
            raise TypeError(f"WandB: expected a run of wandb or settings={{...}}, got {shown(run)}")
        super().__init__(run)
        self._library: Any = _wandb() if run is None else None
        self._settings = settings or {}

    def _open(self) -> Any:
        return self._library.init(**self._settings)

    def _log(self, run: Any, values: _Values) -> None:
        images = {name: _wandb().Image(one.pixels.numpy()) for name, one in values.images.items()}
        run.log({**values.numbers, **values.texts, **images}, step=values.step)

    def _end(self, run: Any) -> None:
        run.finish()


class _MlflowRun(_Run):
    """A client and the id of a run, with whether it was started here.

    MLflow's errors become OSErrors, so that records are sent again when the server is available.
    """

    most = 1000
    """Maximal number of metrics that the server accepts in one request."""

    def __init__(self, run_id: str | None) -> None:
        super().__init__(None)
        self._mlflow, self._run_id = required("MLflow", "'purecompose[mlflow]'", "mlflow"), run_id

    def begin(self, batch: int) -> None:
        with self._errors_as_os_errors():
            super().begin(batch)

    def write(self, records: list[dict[str, Any]]) -> None:
        with self._errors_as_os_errors():
            (client, run_id, _), now = self._ready(), int(1000 * time.time())
            # Artifacts come first: if a write fails and is repeated, they are replaced, but metrics are added again.
            super().write(records)
            metrics = [
                self._mlflow.entities.Metric(_mlflow_name(name), float(number), now, values.step)
                for values in map(_values_of, records)
                for name, number in values.numbers.items()
            ]
            for start in range(0, len(metrics), self.most):
                client.log_batch(run_id, metrics=metrics[start : start + self.most])

    def _open(self) -> Any:
        client = self._mlflow.MlflowClient()
        if self._run_id is not None:
            return client, self._run_id, False
        active = self._mlflow.active_run()
        return client, (active or self._mlflow.start_run()).info.run_id, active is None

    def _log(self, run: Any, values: _Values) -> None:
        client, run_id, _ = run
        for name, text in values.texts.items():
            client.log_text(run_id, text, f"{_mlflow_name(name)}/ba{values.step:08d}.txt")
        for name, image in values.images.items():
            client.log_image(run_id, image.pixels.numpy(), f"{_mlflow_name(name)}/ba{values.step:08d}.png")

    def _end(self, run: Any) -> None:
        if run[2]:
            self._mlflow.end_run()

    @contextlib.contextmanager
    def _errors_as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except self._mlflow.exceptions.MlflowException as error:
            raise OSError(f"MLflow: {error}") from error


def _wandb() -> Any:
    return required("WandB", "'purecompose[wandb]'", "wandb")


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", name)
