"""The curve of a run: what its evaluations found, and after how many seconds of training."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import NamedTuple

import torch

from purecompose import Event, State


class Point(NamedTuple):
    """One evaluation. Seconds count from the first batch on, without evaluations before this one."""

    batch: int
    value: float
    seconds: float
    """Wall-clock time, compilation included."""
    compiling: float
    """How much of it was compilation."""
    cpu_seconds: float
    """Processor time of all threads, compilation included."""
    evaluation: float = 0.0
    """The seconds of this evaluation, which are not in the others."""


class Curve:
    """The clock of a run and its points.

    `start` is called when data and network are ready, `batch` after each batch, `evaluating` is the context of each
    evaluation, in which the clock stands still, and `add` notes the result. Whatever trains uses the same four, so that
    all sides are measured alike.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._steps: list[float] = []
        self._evaluation = 0.0
        self.start()

    def start(self) -> None:
        """Start the clock."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._last = self._wall

    def batch(self) -> None:
        """Note the end of a batch."""
        now = time.perf_counter()
        self._steps.append(now - self._last)
        self._last = now

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Stop the clock for the duration of the context."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self._wall, self._cpu, self._last = self._wall + wall, self._cpu + cpu, self._last + wall
        self._evaluation = wall

    def add(self, value: float) -> None:
        """Note the result of an evaluation; call it directly after `evaluating`."""
        seconds, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self.points.append(Point(len(self._steps), value, seconds, self._compiling(), cpu, self._evaluation))

    def _compiling(self) -> float:
        """Return the seconds of compilation: those by which a batch took longer than the next ones, if above 0.5 s."""
        usual = [median(self._steps[i + 1 : i + 6] or self._steps) for i in range(len(self._steps))]
        more = [seconds - own for seconds, own in zip(self._steps, usual, strict=True)]
        return sum(seconds for seconds in more if seconds > 0.5)


class Observer:
    """An observer of `fit` that draws the curve of a metric such as "eval/accuracy"."""

    def __init__(self, curve: Curve, metric: str) -> None:
        self._curve, self._metric = curve, metric
        self._value = float("nan")
        self._pause = ExitStack()

    def __call__(self, event: Event, state: State) -> None:
        if event is Event.BATCH_END:
            self._curve.batch()
        elif event is Event.EVAL_BEFORE_ALL:
            self._pause.enter_context(self._curve.evaluating())
        elif event is Event.EVAL_END:
            self._value = state.metrics[self._metric].item()
        elif event is Event.EVAL_AFTER_ALL:
            self._pause.close()
            self._curve.add(self._value)
