"""Training metrics: the metrics of evaluation, computed from the outputs of training steps."""

from typing import Annotated, Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose.core.algorithm import Algorithm, factory
from purecompose.core.means import targets_of_metric
from purecompose.core.state import State
from purecompose.metrics import GivenMetrics, Metric, as_metrics, counting, of_loss
from purecompose.time import Time, TimeUnit
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on
from purecompose.time.units import named_time


_UNITS = (TimeUnit.EPOCH, TimeUnit.BATCH)


def _checked_period(reset: Any, where: str) -> Time | None:
    """Require whole epochs or batches, or `None`."""
    if reset is None:
        return None
    period = named_time(reset, where)
    if period.unit not in _UNITS or period.value < 1 or period.value != int(period.value):
        raise ValueError(f"{where}: expected whole epochs or batches, such as '1ep' or '100ba', or None, got {reset!r}")
    return period


@factory
def training_metrics(
    metrics: GivenMetrics = ("accuracy",),
    *,
    reset: Annotated[str | Time | None, _checked_period] = "1ep",
    name: str = "training_metrics",
) -> Algorithm:
    """Measure the outputs of training steps.

    Events: INIT (creates the slot), BATCH_START (resets at the beginning of a period), AFTER_BACKWARD (adds a slice's
    examples), BATCH_END (reports). Reads `outputs` and the batch; adds `metrics[f"train/{metric}"]`, the value over all
    examples since the beginning of the period. Remembers one accumulator for each metric in `slots[name]`. It does
    not wait for the device, unless targets are dense, or differ from outputs in dims of size 1.

    The outputs are those of the training pass, before the update: with dropout, and with mixed or augmented inputs and
    mixed targets; examples that a method has left out are not counted. So the values differ from an evaluation of the
    same examples.

    Args:
        metrics: Metrics by name, a list of them, or a single one, as for `evaluate`. If empty, the algorithm never
            matches.
        reset: The length of a period, in whole epochs or batches, such as `"1ep"` or `"100ba"`; `None` for the run.
        name: Name of the algorithm and of its slot.

    Raises:
        TypeError, ValueError: As for `metrics.as_metrics`; the loss of the state, or a period of another unit.

    Example:
        >>> training_metrics(["accuracy", "top_5"])
        training_metrics(metrics=('accuracy', 'top_5'), reset='1ep')
        >>> from purecompose.metrics import top_k
        >>> training_metrics({"top_3": top_k(3)}, reset="100ba").events[1].name
        'BATCH_START'
    """
    chosen = _chosen(metrics)
    period = None if reset is None else Time.of(reset)

    def fresh(state: State) -> dict[str, Any]:
        return {key: metric.init(state.device) for key, metric in chosen.items()}

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return state.replace(slots={**state.slots, name: fresh(state)})
        accs = state.slots[name]
        if event is Event.AFTER_BACKWARD:
            new = {}
            for key, metric in chosen.items():
                own = of_loss(metric, state.context.loss)
                targets, update = targets_of_metric(own, state), counting(own, state.num_examples)
                with torch.no_grad():
                    new[key] = update(accs[key], batches.map_tensors(Tensor.detach, state.outputs), targets)
            return state.replace(slots={**state.slots, name: new})
        if event is Event.BATCH_END:
            values = {f"train/{key}": metric.compute(accs[key]) for key, metric in chosen.items()}
            return state.replace(metrics={**state.metrics, **values})
        assert period is not None
        begins = _begins(state, period)
        new = tree.map(lambda zero, acc: torch.where(begins, zero, acc), fresh(state), accs)
        return state.replace(slots={**state.slots, name: new})

    events = [Event.INIT, Event.AFTER_BACKWARD, Event.BATCH_END, *([] if period is None else [Event.BATCH_START])]
    return Algorithm(
        name,
        on(*events) if chosen else NEVER,
        apply,
        config={"metrics": tuple(chosen), "reset": None if period is None else str(period)},
        reported={f"train/{key}": metric for key, metric in chosen.items()},
    )


def _chosen(given: Any) -> dict[str, Metric]:
    chosen = as_metrics(given)
    for key, metric in chosen.items():
        if metric.takes_loss:
            raise ValueError(
                f"training_metrics: {key}: the training loss of each step is state.loss, and its parts are in "
                "state.metrics; give mean_loss the loss function to average it"
            )
    return chosen


def _begins(state: State, period: Time) -> Tensor:
    """Return whether a period begins with this batch, 0-d bool."""
    clock, length = state.clock, int(period.value)
    assert clock is not None
    if period.unit is TimeUnit.BATCH:
        return clock.batch % length == 0
    return (clock.epoch % length == 0) & (clock.batch_in_epoch == 0)
