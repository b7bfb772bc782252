"""Checks of the arguments of `fit`, before a run begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from purecompose._support.messages import warn
from purecompose._support.specs import is_callable_with, shown
from purecompose.combinations import unsupported
from purecompose.core.algorithm import Trait
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data.loaders import StateStream, check_batches
from purecompose.run.evaluation import Evaluator, Observer, check_other_data, warn_of_missing_terms
from purecompose.run.outer import Settings
from purecompose.run.rules import BestState, EarlyStopping, mode_of, with_modes
from purecompose.run.saving.selection import Checkpoints


def check_arguments(step: Step, state: State, data: Any, microbatches: Any, resume: Any) -> None:
    """Raise unless these are a step, a state, batches, a valid number of microbatches, and a place to resume from."""
    if not isinstance(step, Step) or not isinstance(state, State):
        came = f"{type(step).__name__}, {type(state).__name__}"
        raise TypeError(f"fit(step, state, data): expected a Step and a State, got {came}")
    if not step.has_advance:
        raise ValueError(
            "fit: the step's program has no `advance`, so training would never end; put `advance` after `update` and "
            "before Event.BATCH_END, as loop_events does"
        )
    if not isinstance(data, StateStream):
        check_batches(data, "fit: data")
    if microbatches not in (None, "auto"):
        raise ValueError(f"microbatches={microbatches!r}: expected 'auto'; a number is given to compose")
    if resume is not None and not isinstance(resume, (str, Path)):
        raise TypeError(f"resume: expected 'auto' or the path of a checkpoint, got {shown(resume)}")


def _several(given: Any, role: str, example: str, is_right: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Return one or several objects as a tuple, after a check of each; `example` is what was expected."""
    if given is None:
        return ()
    # Batches in place of an evaluator are a common slip. They are not iterated, which might load a whole data set.
    is_many = isinstance(given, (Collection, Iterator)) and not isinstance(given, str) and not is_right(given)
    members = tuple(given) if is_many else (given,)
    for member in members:
        if isinstance(member, type) or not is_right(member):
            raise TypeError(f"{role}: expected {example}, or several, got {shown(member)}")
    return members


def as_observers(given: Any) -> tuple[Observer, ...]:
    """Return one or several observers as a tuple."""
    return _several(given, "observers", "a function (event, state) -> None", lambda one: is_callable_with(one, 2))


_RULE = ("metric", "name", "init", "see")


def _is_rule(one: Any) -> bool:
    return all(hasattr(one, name) for name in _RULE)


def checked_settings(step: Step, state: State, evaluate: Any, observers: Any, stop: Any, adjust: Any) -> Settings:
    """Return the settings of a run as tuples, with the modes of their metrics; see `fit` for the arguments."""
    example = "Evaluator(data, metrics), such as Evaluator(test_batches, ['accuracy'])"
    evaluators = _several(evaluate, "evaluate", example, lambda one: isinstance(one, Evaluator))
    twice = [label for label, count in Counter(one.label for one in evaluators).items() if count > 1]
    if twice:
        raise ValueError(
            f"evaluate: two evaluators are labelled {twice[0]!r}; give one of them another label, as in "
            "Evaluator(validation_batches, metrics, label='validation')"
        )
    warn_of_missing_terms(evaluators, state, step)
    observers = as_observers(observers)
    example = f'EarlyStopping("eval/loss") or a rule with {", ".join(_RULE)} and is_over'
    stoppers = _several(stop, "stop", example, lambda one: _is_rule(one) and hasattr(one, "is_over"))
    if stoppers and state.key.ndim > 1:
        raise unsupported("a population", "stopping rules", "stop")
    names = [stopper.name for stopper in stoppers]
    if len(set(names)) < len(names):
        raise ValueError(f"stop: two stopping rules have the same name: {', '.join(names)}")
    example = f'ReduceOnPlateau("eval/loss") or a rule with {", ".join(_RULE)}, and without is_over, which is for stop='
    adjusters = _several(adjust, "adjust", example, lambda one: _is_rule(one) and not hasattr(one, "is_over"))
    for role, watchers in (("stop", stoppers), ("adjust", adjusters)):
        for one in watchers:
            _check_reported(one.metric, f"{role}: {one.name.removeprefix('.')}", evaluators, step)
    if state.context.precision == "fp16" and not any(Trait.SCALES_LOSS in a.traits for a in step.algorithms):
        warn("precision='fp16' without loss scaling: small gradients become 0; add algorithms.loss_scaling()")
    reporters = (*evaluators, *step.algorithms)
    return Settings(evaluators, observers, with_modes(stoppers, reporters), with_modes(adjusters, reporters))


def checked_checkpoints(given: Any, step: Step, state: State, data: Any, settings: Settings) -> Checkpoints | None:
    """Return the settings of the checkpoints, with the mode of the metric that decides which is the best."""
    if given is None:
        return None
    if not isinstance(given, Checkpoints):
        raise TypeError(f"checkpoints: expected Checkpoints(folder), got {shown(given)}")
    check_other_data(settings.evaluators, data)
    if given.best is None:
        return given
    if state.key.ndim > 1:
        raise unsupported("a population", "states chosen by a metric", "checkpoints: best")
    _check_reported(given.best, "checkpoints: best", settings.evaluators, step)
    return replace(given, mode=mode_of(given.best, given.mode, (*settings.evaluators, *step.algorithms)))


def checked_result(
    result: Any, checkpoints: Checkpoints | None, step: Step, state: State, settings: Settings
) -> BestState | None:
    """Return what keeps the best state, if the run is to return it; the mode of its metric is known."""
    if result not in ("last", "best"):
        raise ValueError(f"result={result!r}: expected 'last' or 'best'")
    if result == "last":
        return None
    if state.key.ndim > 1:
        raise unsupported("a population", "states chosen by a metric", "result='best'")
    modes = {one.metric: one.mode for one in settings.stoppers if isinstance(one, EarlyStopping)}
    if checkpoints is not None and checkpoints.best is not None:
        modes = {checkpoints.best: checkpoints.mode}
    elif not modes:
        modes = {name: None for one in settings.evaluators for name in one.reported}
    if len(modes) != 1:
        raise ValueError(
            f"result='best': by which metric? There are {', '.join(modes) or 'none'}; name one by "
            'checkpoints=Checkpoints(folder, best="eval/loss")'
        )
    [(metric, mode)] = modes.items()
    return BestState(metric, mode_of(metric, mode, (*settings.evaluators, *step.algorithms)))


def _check_reported(metric: str, where: str, evaluators: Iterable[Evaluator], step: Step) -> None:
    """Raise for a metric that nothing reports; those of algorithms are known only when the first are due."""
    known = [name for one in evaluators for name in one.reported]
    own = {"train", *(algorithm.name for algorithm in step.algorithms)}
    if metric not in known and metric.partition("/")[0] not in own:
        raise ValueError(f"{where}: no evaluator reports {metric!r}; there are {', '.join(known) or 'no metrics'}")
