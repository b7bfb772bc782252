"""Trackers that log a run's numbers as they come: Weights & Biases, Comet and Neptune.

What they have in common is `Tracker`; each says how its own library makes a run, logs numbers, and ends the run. A
tracker of your own is a subclass with these three, or a sink for `Recorder`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from purecompose.observers.adapters import flat, module
from purecompose.observers.recorder import Monitor, Recorder
from purecompose.time import TimeLike


__all__ = ["Comet", "Neptune", "Tracker", "WandB"]


class Tracker(Recorder):
    """A recorder that logs to a run of a tracking service, at the number of batches as its step.

    A subclass names the `library`, and has three static methods: `start`, `log` and `finish`. Each member of a
    population has values of its own: `loss/0`, `loss/1`, ...

    Args:
        run: A run of the service; it stays open. Without one, it is made when training starts and finished when the
            recorder is closed.
        every: How often a batch has a record: "10ba", "1ep", ...
        monitors: Functions `(state) -> dict`, or one.
        settings: Arguments for the run that is made.
        **options: `group` and `seconds`; see `Recorder`.

    Raises:
        ImportError: There is no run, and the library is not installed.
        TypeError: Both a run and settings.

    Example:
        >>> class Printed(Tracker):
        ...     library = "builtins"
        ...     @staticmethod
        ...     def start(library, settings):
        ...         return library.print
        ...     @staticmethod
        ...     def log(run, numbers, step):
        ...         run(step, sorted(numbers))
        ...     @staticmethod
        ...     def finish(run):
        ...         run("finished")
        >>> import torch
        >>> from purecompose import State, compose, fit, loop_events, losses, optim
        >>> state = State.create(torch.nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ba")
        >>> with Printed() as tracker:
        ...     state = fit(compose(loop_events), state, [(torch.ones(4, 2), torch.ones(4, 1))], observers=tracker)
        1 ['epoch', 'loss', 'time/sample']
        finished
    """

    library: ClassVar[str]
    """The module that makes runs; the extra of the same name installs it."""

    def __init__(
        self,
        run: Any = None,
        *,
        every: TimeLike | int = "1ba",
        monitors: Monitor | Iterable[Monitor] = (),
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        if run is not None and settings is not None:
            raise TypeError(f"{name}: expected a run, or settings to make one, not both")
        library = module(self.library, name, self.library) if run is None else None
        super().__init__(_Run(type(self), run, library, settings or {}), every=every, monitors=monitors, **options)

    @staticmethod
    def start(library: Any, settings: Mapping[str, Any]) -> Any:
        """A new run."""
        raise NotImplementedError

    @staticmethod
    def log(run: Any, numbers: Mapping[str, float], step: int) -> None:
        """Logs a record's numbers by name."""
        raise NotImplementedError

    @staticmethod
    def finish(run: Any) -> None:
        """Ends a run that `start` has made."""
        raise NotImplementedError


class WandB(Tracker):
    """Logs the records of a run to Weights & Biases; see `Tracker` for the arguments.

    W&B's steps only increase: after resuming from an earlier batch, repeated steps are dropped. Settings are those of
    `wandb.init`, such as `{"project": "digits", "id": "run1", "resume": "allow"}`.
    """

    library = "wandb"

    @staticmethod
    def start(library: Any, settings: Mapping[str, Any]) -> Any:
        """What `wandb.init` returns."""
        return library.init(**settings)

    @staticmethod
    def log(run: Any, numbers: Mapping[str, float], step: int) -> None:
        """Logs to the run's history."""
        run.log(dict(numbers), step=step)

    @staticmethod
    def finish(run: Any) -> None:
        """Uploads what is left."""
        run.finish()


class Comet(Tracker):
    """Logs the records of a run to Comet; see `Tracker` for the arguments.

    Settings are those of `comet_ml.start`, such as `{"project_name": "digits", "experiment_key": "..."}`.
    """

    library = "comet_ml"

    @staticmethod
    def start(library: Any, settings: Mapping[str, Any]) -> Any:
        """What `comet_ml.start` returns."""
        return library.start(**settings)

    @staticmethod
    def log(run: Any, numbers: Mapping[str, float], step: int) -> None:
        """Logs metrics of the experiment."""
        run.log_metrics(dict(numbers), step=step)

    @staticmethod
    def finish(run: Any) -> None:
        """Uploads what is left."""
        run.end()


class Neptune(Tracker):
    """Logs the records of a run to Neptune, each name as a series; see `Tracker` for the arguments.

    Settings are those of `neptune.init_run`, such as `{"project": "me/digits", "with_id": "DIG-1"}`.
    """

    library = "neptune"

    @staticmethod
    def start(library: Any, settings: Mapping[str, Any]) -> Any:
        """What `neptune.init_run` returns."""
        return library.init_run(**settings)

    @staticmethod
    def log(run: Any, numbers: Mapping[str, float], step: int) -> None:
        """Appends each number to its series."""
        for name, value in numbers.items():
            run[name].append(value, step=step)

    @staticmethod
    def finish(run: Any) -> None:
        """Uploads what is left."""
        run.stop()


class _Run:
    """The sink of a tracker, around a run or around what makes one."""

    def __init__(self, tracker: type[Tracker], run: Any, library: Any, settings: Mapping[str, Any]) -> None:
        self._tracker, self._run, self._library, self._settings = tracker, run, library, settings

    def begin(self, batch: int) -> None:
        del batch
        if self._run is None:
            self._run = self._tracker.start(self._library, self._settings)

    def write(self, records: list[dict[str, Any]]) -> None:
        self.begin(0)  # no-op if the run has already started
        for record in records:
            self._tracker.log(self._run, dict(flat(record)), record["batch"])

    def close(self) -> None:
        if self._library is not None and self._run is not None:
            self._tracker.finish(self._run)
            self._run = None
