"""The settings of a run, checked, and as `fit` needs them."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from purecompose._support.checks import is_callable_with, shown
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data.checks import StateStream, check_batches
from purecompose.run.evaluation import Evaluator, Observer, check_other_data
from purecompose.run.plateau import Adjuster
from purecompose.run.saving.settings import Checkpoints
from purecompose.run.stopping import Stopper


def check_arguments(step: Any, state: Any, data: Any, microbatches: Any, resume: Any) -> None:
    """Raise unless these are a step, a state, batches, a valid number of microbatches, and a place to resume from."""
    if not isinstance(step, Step) or not isinstance(state, State):
        came = f"{type(step).__name__}, {type(state).__name__}"
        raise TypeError(f"fit(step, state, data): expected a Step and a State, got {came}")
    if not step.has_advance:
        raise ValueError(
            "fit: the step's program has no `advance`, so time would stand still and training never end; "
            "put `advance` after `update` and before Event.BATCH_END, as loop_events does"
        )
    if not isinstance(data, StateStream):
        check_batches(data, "fit: data")
    if microbatches not in (None, "auto"):
        raise ValueError(f"microbatches={microbatches!r}: expected 'auto'; a number is given to compose")
    if resume is not None and not isinstance(resume, (str, Path)):
        raise TypeError(f"resume: expected 'auto' or the path of a checkpoint, got {shown(resume)}")


def as_evaluators(given: Any) -> tuple[Evaluator, ...]:
    """Return one or several evaluators as a tuple."""
    if given is None:
        return ()
    if isinstance(given, Evaluator):
        return (given,)
    # Test batches instead of an evaluator are a common slip. They are not iterated, which might load a whole data set.
    members: Iterable[Any] = given if isinstance(given, (Collection, Iterator)) else (given,)
    evaluators = []
    for member in members:
        if not isinstance(member, Evaluator):
            came = type(given).__name__ if member is given else f"{type(member).__name__} in a {type(given).__name__}"
            raise TypeError(
                f"evaluate: expected Evaluator(data, metrics), or several, got {came}; "
                "write evaluate=Evaluator(test_batches, {'accuracy': pc.metrics.accuracy})"
            )
        evaluators.append(member)
    twice = [label for label, count in Counter(one.label for one in evaluators).items() if count > 1]
    if twice:
        raise ValueError(
            f"evaluate: two evaluators are labelled {twice[0]!r}, so their metrics would be confused; give one "
            "of them another label, as in Evaluator(validation_batches, metrics, label='validation')"
        )
    return tuple(evaluators)


def as_watchers(given: Any, role: str, method: str, example: str) -> tuple[Any, ...]:
    """Return one or several objects, which need a metric and a method of this name, as a tuple."""
    if given is None:
        return ()
    members = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for member in members:
        if isinstance(member, type) or not (hasattr(member, "metric") and callable(getattr(member, method, None))):
            raise TypeError(f"{role}: expected an object such as {example}, got {shown(member)}")
    return members


def as_observers(given: Any) -> tuple[Observer, ...]:
    """Return one or several observers as a tuple."""
    given = () if given is None else given
    observers: tuple[Any, ...] = (given,) if callable(given) or not isinstance(given, Iterable) else tuple(given)
    for observer in observers:
        if isinstance(observer, type):
            raise TypeError(
                f"observers: expected an observer, got the class {observer.__name__}: make one, "
                f"{observer.__name__}(...)"
            )
        if not callable(observer):
            came = shown(given if isinstance(given, str) else observer)
            raise TypeError(f"observers: expected functions (event, state) -> None, got {came}")
        if not is_callable_with(observer, 2):
            raise TypeError(f"observers: {shown(observer)} cannot be called as observer(event, state)")
    return observers


def check_checkpoints(checkpoints: Any, evaluators: Iterable[Evaluator], data: Any) -> None:
    """Raise unless these are settings of checkpoints, and evaluators leave the training data where they are."""
    if not isinstance(checkpoints, Checkpoints):
        raise TypeError(f"checkpoints: expected Checkpoints(folder), got {shown(checkpoints)}")
    check_other_data(evaluators, data)


def check_metrics(
    state: State,
    step: Step,
    evaluators: Iterable[Evaluator],
    stoppers: Iterable[Stopper],
    adjusters: Iterable[Adjuster],
    checkpoints: Checkpoints | None,
) -> None:
    """Raise if a setting uses a metric that is not reported."""
    known = [name for one in evaluators for name in one.reported]
    wanted = {f"stop: {stopper.name.removeprefix('.')}": stopper.metric for stopper in stoppers}
    wanted |= {f"adjust: {adjuster.name.removeprefix('.')}": adjuster.metric for adjuster in adjusters}
    if checkpoints is not None and checkpoints.best is not None:
        if state.key.ndim > 1:
            raise ValueError("checkpoints: best: a population has no single best; keep=... counts the newest")
        wanted["checkpoints: best"] = checkpoints.best
    own = {"train", *(algorithm.name for algorithm in step.algorithms)}
    for where, metric in wanted.items():
        # The metrics that algorithms report are known only when the first are due.
        if metric not in known and metric.partition("/")[0] not in own:
            raise ValueError(f"{where}: no evaluator reports {metric!r}; there are {', '.join(known) or 'no metrics'}")


def check_ends_together(budget: float, microbatches: str | None) -> None:
    """Raise for settings with which one of several processes could continue or end without the others."""
    if microbatches:
        raise ValueError(
            "microbatches='auto': one process that tries again would leave the others waiting; give a number"
        )
    if budget < math.inf:
        raise ValueError(
            f"duration={budget:g}s: processes that share their batches must end after the same one, and clocks differ; "
            "give a number of batches or epochs"
        )
