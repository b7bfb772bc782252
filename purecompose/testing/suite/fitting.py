"""Laws of whole runs: `fit` with all its events, and memory over many steps."""

import dataclasses
import gc
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from purecompose import tree
from purecompose._support.references import read_by
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.losses.metrics import mean_loss
from purecompose.run.evaluation import Evaluator
from purecompose.run.fit import fit
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.outer import after_batch, begun
from purecompose.testing.process import elsewhere, ignoring_missing_terms, process_settings
from purecompose.testing.record import LASTING, Watched, check_equal, check_process, compare, snapshot
from purecompose.testing.subject import Subject
from purecompose.testing.suite.contract import watching_others
from purecompose.time.event import Event


_LABELS = ("in the first run", "in the second")
_MOST_BATCHES = 8


@define_law(
    "two runs of fit from one state end alike, bit for bit, and leave the state, what is frozen, others' slots and the "
    "process as they were",
    "remember in state.slots[name], made at INIT, also from one epoch to the next; at events outside the step, too, "
    "go over state.context.trainable, replace your own slot only, and leave global settings alone",
    exempt=never_acts,
    most_cases=8,
)
def fit_repeats(subject: Subject, case: Case) -> bool:
    """Train twice with `fit`, including evaluation, and compare the final states and all metrics that observers see.

    The second time the clocks, the global generators and the process's rank are different. A long run ends after a few
    batches.
    """
    watched = Watched(subject.algorithm, watching_others(subject))
    step = case.step(watched.algorithm)
    start = step.init(case.state())
    before = snapshot(start)
    first, second = (_fitted(step, start, case, seed) for seed in (1, 2))
    compare(before, start, ("before fit", "after it"))
    check_equal(first.metrics, second.metrics, _LABELS, "metrics seen by observers")
    compare(first.end, second.end, _LABELS)
    frozen = sorted(start.context.frozen & first.end.context.frozen & first.end.params.keys())
    ours, theirs = ({name: state.params[name] for name in frozen} for state in (start, first.end))
    check_equal(ours, theirs, ("before fit", "after it"), "params")
    return watched.acted


class _Fitted:
    """The final state of a run, and the metrics that it has shown to observers."""

    def __init__(self) -> None:
        self.end: State
        self.metrics: list[dict[str, Any]] = []

    def __call__(self, event: Event, state: State) -> None:
        self.metrics.append(dict(state.metrics))


def _fitted(step: Step, start: State, case: Case, seed: int) -> _Fitted:
    data, evaluator = _Data(case), Evaluator([case.batch(0)], {"loss": mean_loss()})
    total = case.epochs * case.batches_per_epoch
    duration = f"{case.start + _MOST_BATCHES}ba" if total - case.start > _MOST_BATCHES else None
    run = _Fitted()
    with ignoring_missing_terms(), elsewhere(seed):
        before = process_settings()
        run.end = fit(step, start, data, duration=duration, evaluate=evaluator, observers=run)
        check_process(before, ("before fit", "after it"))
    return run


class _Data:
    """A case's batches, epoch by epoch."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def epoch(self, key: Tensor, epoch: int, start: int, /) -> Iterable[Any]:
        """Return the batches of an epoch from batch `start` on."""
        del key
        first = epoch * self.case.batches_per_epoch - self.case.start
        return [self.case.batch(first + index) for index in range(start, self.case.batches_per_epoch)]


_STEPS, _MOST_GROWTH = 100, 50


@define_law(
    "what the algorithm keeps does not grow with the number of steps: neither slots and metrics nor memory on the host",
    "append to no list, dictionary or attribute from step to step; keep sums or the last few values in "
    "state.slots[name]; bound caches: functools.lru_cache(maxsize=...); leave histories to an observer",
    exempt=never_acts,
    most_cases=2,
)
def memory_bounded(subject: Subject, case: Case) -> bool:
    """Count tensors in memory, leaves of the state, and objects held by `apply` and `match`, after 100 and 200 steps.

    They hold the objects that can be reached from their closures, defaults, attributes and the globals that they name.
    """
    epochs = case.epochs + -(-2 * _STEPS // case.batches_per_epoch)
    case = dataclasses.replace(case, epochs=epochs, others=(), microbatches=1)
    watched, data = Watched(subject.algorithm), case.batches()
    step = case.step(watched.algorithm)
    state, counts, has_acted = begun(step, case.state()), [], False
    for number in range(2 * _STEPS):
        state = after_batch(step, state, data[number % len(data)])
        has_acted = has_acted or watched.acted
        watched.applications.clear()  # they contain states
        if (number + 1) % _STEPS == 0:
            counts.append(_counted(subject.algorithm, state))
    earlier, later = counts
    for what, count in earlier.items():
        if later[what] - count >= _MOST_GROWTH:
            labels = (f"after {_STEPS} steps", f"after {2 * _STEPS}")
            raise Broken(tree.Difference("", f"{what} grow from step to step", count, later[what]), labels)
    return has_acted


def _counted(algorithm: Algorithm, state: State) -> dict[str, int]:
    gc.collect()
    return {
        "leaves of the state": sum(len(tree.leaves(getattr(state, field))) for field in LASTING),
        "things that the algorithm holds": sum(_sizes([algorithm.apply, algorithm.match])),
        "tensors in memory": sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()),
    }


def _sizes(roots: Iterable[Any]) -> Iterator[int]:
    """Yield the sizes of all containers reachable from functions and objects, but not through modules and classes."""
    seen, waiting = set[int](), list(roots)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, (ModuleType, type, Tensor, CodeType, str)):
            continue
        seen.add(id(thing))
        if isinstance(thing, FunctionType):
            waiting += _held_by_function(thing)
            continue
        if isinstance(thing, (list, tuple, dict, set, frozenset, deque)):
            yield len(thing)
        waiting += gc.get_referents(thing)


def _held_by_function(function: FunctionType) -> list[Any]:
    """Return a function's closure, defaults and attributes, and its globals that are data or of its own module."""
    data, home, read = (list, dict, set, deque), function.__module__, [place.value for place in read_by(function)]
    own = [thing for thing in read if isinstance(thing, data) or getattr(thing, "__module__", None) == home]
    return [function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function), *own]
