"""`train`: a step, a state and a run in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from purecompose._support.specs import check_keywords, suggests_keywords
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.core.loop import loop_events
from purecompose.core.state import State
from purecompose.metrics import GivenMetrics
from purecompose.observers import History
from purecompose.run.checking import as_observers
from purecompose.run.evaluation import Evaluator
from purecompose.run.fit import fit
from purecompose.time import Time


F = TypeVar("F", bound=Callable[..., Any])

_CALLS: tuple[Callable[..., Any], ...] = (compose, State.create, fit)
_OWN = {"program", "algorithms", "net", "loss", "optimizer", "duration", "step", "state", "data"}


def _settings_of(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments of a function that `train` passes on, all of them as keywords."""
    parameters = inspect.signature(call).parameters.items()
    return {name: one.replace(kind=one.KEYWORD_ONLY) for name, one in parameters if name not in _OWN}


def _with_settings(function: F) -> F:
    """Give a function the signature with all the arguments that it passes on in place of its `settings`."""
    own = inspect.signature(function)
    passed_on = {name: one for call in reversed(_CALLS) for name, one in _settings_of(call).items()}
    kept = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    vars(function)["__signature__"] = own.replace(parameters=[*kept, *passed_on.values()])
    return function


@suggests_keywords
@_with_settings
def train(
    net: nn.Module,
    data: Any,
    test: Any = None,
    *,
    loss: Callable[..., Any],
    optimizer: Any,
    duration: Time | str,
    methods: Iterable[Algorithm] = (),
    metrics: GivenMetrics = (),
    **settings: Any,
) -> tuple[State, History]:
    """Train a network, evaluate it after each epoch, and return the trained state and the history of the run.

    It is these three calls, with the same bits::

        step = compose(loop_events, methods)
        state = State.create(net, loss=loss, optimizer=optimizer, duration=duration)
        state = fit(step, state, data, evaluate=Evaluator(test, metrics), observers=[History()])

    Args:
        net: The network; it is copied and never changed. `to_module(state)` returns the trained one.
        data: Batches for training; see `fit`.
        test: Batches for evaluation after each epoch; by default nothing is evaluated. For more, give `evaluate=`
            instead.
        loss, optimizer: See `State.create`.
        duration: Length of the run, such as `"20ep"`.
        methods: The algorithms, as for `compose`.
        metrics: The metrics of `test`, as for `Evaluator`; by default the mean loss.
        settings: Other keyword arguments of `compose` (`microbatches`, `passes`, ...), of `State.create` (`key`,
            `device`, `precision`, ...) and of `fit` (`stop`, `checkpoints`, `observers`, `resume`, `result`, ...).
            `microbatches="auto"` is that of `fit`.

    Returns:
        The state that `fit` returns, and the records of the run: `history.series("loss")`,
        `history.series("eval/accuracy")`.

    Raises:
        TypeError: An argument is unknown; there is `evaluate` besides `test`; or there are `metrics` without `test`.
        TypeError, ValueError: See `compose`, `State.create` and `fit`.

    Example:
        >>> import torch
        >>> from purecompose import losses, optim
        >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
        >>> state, history = train(
        ...     torch.nn.Linear(2, 1), data, data, loss=losses.mse, optimizer=optim.sgd(0.1), duration="2ep"
        ... )
        >>> state.timestamp.batch, history.series("eval/loss")[0]
        (6, [3, 6])
    """
    check_keywords(settings, train)
    composed, created, fitted = _by_call(settings)
    history = History()
    fitted["observers"] = [history, *as_observers(fitted.get("observers"))]
    if metrics and test is None or "evaluate" in fitted and test is not None:
        raise TypeError(
            "train: metrics= are measured on the batches of test=; evaluate=Evaluator(batches, metrics) replaces both"
        )
    if test is not None:
        fitted["evaluate"] = Evaluator(test, metrics or {})
    step = compose(loop_events, methods, **composed)
    created |= {"loss": loss, "optimizer": optimizer, "duration": duration}
    return fit(step, State.create(net, **created), data, **fitted), history


def _by_call(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of each of the three functions; the first that has the argument takes it."""
    found: list[dict[str, Any]] = [{} for _ in _CALLS]
    for name, value in settings.items():
        takers = [own for own, call in zip(found, _CALLS, strict=True) if name in _settings_of(call)]
        is_of_run = isinstance(value, str) and value == "auto"  # microbatches, which a step has as a number
        takers[-1 if is_of_run else 0][name] = value
    return found
