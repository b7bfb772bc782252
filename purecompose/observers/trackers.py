"""Recorders for tracking services: TensorBoard, Weights & Biases, MLflow, Comet and Neptune.

Each logs the numbers, texts and images of its records with the number of batches as the step. Members of a population
are logged separately: `loss/0`, `loss/1`, ... For another service, pass a sink to `Recorder`; see `Sink`.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from purecompose._support.checks import shown
from purecompose.observers.recorder import Monitor, Recorder
from purecompose.observers.sinks import (
    COMET,
    NEPTUNE,
    WANDB,
    EventFiles,
    MlflowRun,
    Service,
    ServiceRun,
    library_of,
    summary_writer,
)
from purecompose.time import TimeLike


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
        sink = EventFiles(writer) if folder is None else EventFiles(None, os.fspath(folder), summary_writer())
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
            MlflowRun(library_of("mlflow", "MLflow"), run_id, client), every=every, monitors=monitors, **options
        )


class _ServiceRecorder(Recorder):
    """Base of the recorders of `Service`s."""

    _service: ClassVar[Service]

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
        library = library_of(service.library, name) if run is None else None
        super().__init__(ServiceRun(service, run, library, settings or {}), every=every, monitors=monitors, **options)


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

    _service = WANDB


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

    _service = COMET


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

    _service = NEPTUNE
