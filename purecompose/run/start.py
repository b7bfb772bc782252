"""The start of a run: its arguments are checked, and its state gets a length and all memory."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from purecompose._support.checks import is_callable_with, shown
from purecompose._support.messages import warn
from purecompose.combinations import unsupported
from purecompose.core.algorithm import Trait
from purecompose.core.compose import Step
from purecompose.core.loop import eval_events
from purecompose.core.state import State
from purecompose.data.facts import check_batches, length_of
from purecompose.data.loaders import StateStream
from purecompose.run.evaluation import Evaluator, Observer, check_other_data
from purecompose.run.rules import Adjuster, Stopper, mode_of, with_memories, with_modes
from purecompose.run.saving.keeping import Checkpoints
from purecompose.time import RunLength, Time, TimeUnit
from purecompose.time.units import named_time
from purecompose.transforms.compilation import CompiledStep


class Settings(NamedTuple):
    """The settings of a run that decide by metrics or report them, after their checks."""

    evaluators: tuple[Evaluator, ...]
    observers: tuple[Observer, ...]
    stoppers: tuple[Stopper, ...]
    adjusters: tuple[Adjuster, ...]
    checkpoints: Checkpoints | None


def checked(
    step: Step, state: State, data: Any, evaluate: Any, observers: Any, stop: Any, adjust: Any, checkpoints: Any
) -> Settings:
    """Return the settings of a run as tuples, with the modes of their metrics; see `fit` for the arguments."""
    evaluators = evaluators_in(evaluate)
    stoppers = watchers_in(stop, "stop", "begin", 'EarlyStopping("eval/loss")')
    adjusters = watchers_in(adjust, "adjust", "init", 'ReduceOnPlateau("eval/loss")')
    if checkpoints is not None:
        if not isinstance(checkpoints, Checkpoints):
            raise TypeError(f"checkpoints: expected Checkpoints(folder), got {shown(checkpoints)}")
        check_other_data(evaluators, data)
    check_metrics(state, step, evaluators, stoppers, adjusters, checkpoints)
    reporters = (*evaluators, *step.algorithms)
    if checkpoints is not None and checkpoints.best is not None:
        checkpoints = replace(checkpoints, mode=mode_of(checkpoints.best, checkpoints.mode, reporters))
    if state.context.precision == "fp16" and not any(Trait.SCALES_LOSS in a.traits for a in step.algorithms):
        warn("precision='fp16' without loss scaling: small gradients become 0; add algorithms.loss_scaling()")
    observers = several(
        observers, "observers", "a function (event, state) -> None", lambda one: is_callable_with(one, 2)
    )
    return Settings(
        evaluators, observers, with_modes(stoppers, reporters), with_modes(adjusters, reporters), checkpoints
    )


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


def several(given: Any, role: str, example: str, is_right: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Return one or several objects, of which a function tells whether they are of the right kind, as a tuple."""
    if given is None:
        return ()
    # Batches in place of an evaluator are a common slip. They are not iterated, which might load a whole data set.
    is_many = isinstance(given, (Collection, Iterator)) and not isinstance(given, str) and not is_right(given)
    members = tuple(given) if is_many else (given,)
    for member in members:
        if isinstance(member, type) or not is_right(member):
            raise TypeError(f"{role}: expected {example}, or several, got {shown(member)}")
    return members


def evaluators_in(given: Any) -> tuple[Evaluator, ...]:
    """Return one or several evaluators as a tuple."""
    example = "Evaluator(data, metrics), such as Evaluator(test_batches, {'accuracy': pc.metrics.accuracy})"
    found = several(given, "evaluate", example, lambda one: isinstance(one, Evaluator))
    twice = [label for label, count in Counter(one.label for one in found).items() if count > 1]
    if twice:
        raise ValueError(
            f"evaluate: two evaluators are labelled {twice[0]!r}, so their metrics would be confused; give one of them "
            "another label, as in Evaluator(validation_batches, metrics, label='validation')"
        )
    return found


def watchers_in(given: Any, role: str, method: str, example: str) -> tuple[Any, ...]:
    """Return one or several objects, which need a metric and a method of this name, as a tuple."""
    return several(given, role, example, lambda one: hasattr(one, "metric") and callable(getattr(one, method, None)))


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
            raise unsupported("a population", "checkpoints chosen by a metric", "checkpoints: best")
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


def evaluation_step(step: Step) -> Step:
    """Return the step that evaluates for a training step; it is not compiled."""
    composed = step.step if isinstance(step, CompiledStep) else step
    return composed.replace(program=eval_events)


def start_of_run(
    step: Step,
    state: State,
    data: Any,
    stoppers: Iterable[Stopper] = (),
    adjusters: Iterable[Adjuster] = (),
    duration: Time | str | None = None,
) -> tuple[State, float]:
    """Return the state from which a run starts, with its length and all memory, and the budget in seconds.

    Args: see `fit`.
    """
    state, budget = _with_duration(state, duration)
    state = _with_epoch_length(state, data)
    if any(algorithm.name not in state.context.initialised for algorithm in step.algorithms):
        state = step.init(state)
    state = with_memories(state, tuple(stoppers))
    for adjuster in adjusters:
        state = adjuster.init(state)
    return state, budget


def _with_duration(state: State, duration: Time | str | None) -> tuple[State, float]:
    """Return the state with the run's length, and the budget of this call in seconds."""
    run = state.timestamp.run
    wanted = run.duration if duration is None else named_time(duration, "fit: duration")
    if wanted is None:
        raise ValueError("no duration: give State.create or fit one, such as duration='20ep'")
    if wanted.unit is TimeUnit.SECOND:
        return state, float(wanted.value)
    return with_run(state, RunLength(wanted, run.batches_per_epoch)), math.inf


def _with_epoch_length(state: State, data: Any) -> State:
    """Return the state with the epoch's length, taken from sized data if unknown, otherwise checked against them."""
    run = state.timestamp.run
    length = length_of(data)
    if length == 0:
        raise ValueError("the data has no batch: an epoch of length 0 would never end")
    if run.batches_per_epoch is None:
        if isinstance(data, StateStream) and run.duration is not None and run.duration.unit is TimeUnit.EPOCH:
            raise ValueError(
                f"the run is counted in epochs ({run}), and data.stream has none: give State.create(batches_per_epoch="
                '...), or a duration in batches, such as "1000ba"'
            )
        return with_run(state, RunLength(run.duration, length))
    if length is not None and length < run.batches_per_epoch:
        raise ValueError(
            f"the data has {length} batches, but the state's batches_per_epoch is {run.batches_per_epoch}; "
            "leave batches_per_epoch out, or make it at most the data's length"
        )
    return state


def with_run(state: State, run: RunLength) -> State:
    """Return the state with another length of its run; warn if that changes a schedule in the middle of the run."""
    now, later = state.timestamp, state.timestamp.replace(run=run)
    if now.batch > 0 and now.run.duration not in (None, run.duration):
        for schedule in state.context.schedules:
            before = after = 0.0
            with suppress(Exception):  # a list of rates may end with the run
                before, after = schedule(now), schedule(later)
            if not math.isclose(before, after, rel_tol=1e-6, abs_tol=1e-9):
                warn(
                    f"the run is {run.duration} long, and was {now.run.duration}: at batch {now.batch} {schedule!r} is "
                    f"{after:.4g}, and was {before:.4g}. It follows the run's length unless it is given one, as in "
                    f"schedule.cosine(t_max={str(now.run.duration)!r})"
                )
    return state if run == now.run else state.replace(timestamp=later)
