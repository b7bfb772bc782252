"""Training metrics: the metrics of evaluation, computed from the outputs of training steps."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose.core.algorithm import Algorithm, factory
from purecompose.core.means import targets_of_metric
from purecompose.core.state import State
from purecompose.metrics import Metric, accuracy, as_metric, counting, of_loss, top_k
from purecompose.time import Time, TimeUnit
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on
from purecompose.time.units import named_time


NAMED: Mapping[str, Metric] = MappingProxyType({"accuracy": accuracy, "top_5": top_k(5)})
"""Map from names to the metrics that can be given by name, as on a command line."""

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
    metrics: Mapping[str, Metric | Callable[..., Tensor]] | Sequence[str] = ("accuracy",),
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
        metrics: Mapping from names to metrics or functions `(outputs, targets)`, as for `evaluate`; or a list of names
            in `NAMED`. If empty, the algorithm never matches.
        reset: The length of a period, in whole epochs or batches, such as `"1ep"` or `"100ba"`; `None` for the run.
        name: Name of the algorithm and of its slot.

    Raises:
        TypeError, ValueError: A setting of the wrong type, an unknown name, or a period of another unit.

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


def _chosen(metrics: Any) -> dict[str, Metric]:
    if isinstance(metrics, Mapping):
        chosen = {str(key): as_metric(metric) for key, metric in metrics.items()}
        for key, metric in chosen.items():
            if metric.takes_loss:
                raise ValueError(
                    f"training_metrics: {key}: the training loss of each step is state.loss, and its parts are in "
                    "state.metrics; give mean_loss the loss function to average it"
                )
        return chosen
    if isinstance(metrics, str) or not isinstance(metrics, Sequence) or not all(isinstance(m, str) for m in metrics):
        raise TypeError(
            "training_metrics: metrics: expected a mapping from names to metrics, such as {'accuracy': "
            f"metrics.accuracy}}, or a list of names, got {metrics!r} ({type(metrics).__name__})"
        )
    unknown = [key for key in metrics if key not in NAMED]
    if unknown:
        raise ValueError(
            f"training_metrics: metrics: expected names among {', '.join(NAMED)}, got {unknown[0]!r}; give others as "
            "a mapping, {name: metric}"
        )
    return {key: NAMED[key] for key in metrics}


def _begins(state: State, period: Time) -> Tensor:
    """Return whether a period begins with this batch, 0-d bool."""
    clock, length = state.clock, int(period.value)
    assert clock is not None
    if period.unit is TimeUnit.BATCH:
        return clock.batch % length == 0
    return (clock.epoch % length == 0) & (clock.batch_in_epoch == 0)
