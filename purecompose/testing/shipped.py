"""One table of all shipped algorithms: what laws and property tests run them with.

A later algorithm joins by adding a row; a test compares the table with `purecompose.algorithms.FACTORIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st

from purecompose.algorithm import Algorithm
from purecompose.algorithms import FACTORIES
from purecompose.schedule import Scalar, cosine, hparam, linear
from purecompose.testing.tasks import TASKS, Task


__all__ = ["SHIPPED", "Row"]

_EVERY_TASK = tuple(TASKS)
_SCHEDULES = (linear(), linear(0.0, 1.0, t_max="0.5dur"), cosine(), cosine(warmup="0.25dur"))


@dataclass(frozen=True)
class Row:
    """A shipped algorithm.

    Args:
        name: The factory's.
        examples: Source texts, as for `Subject.of`, on which all laws run.
        neutral: A source text with settings that change nothing.
        tasks: The names of the `TASKS` that it accepts.
        settings: A function of a kind of inputs (see `tasks.KINDS`) that gives a strategy for valid keyword
            arguments, edge values among them; the simplest are the common ones.
    """

    name: str
    examples: tuple[str, ...]
    neutral: str
    tasks: tuple[str, ...]
    settings: Callable[[str], st.SearchStrategy[dict[str, Any]]]

    def algorithms(self, kind: str = "vectors") -> st.SearchStrategy[Algorithm]:
        """The algorithm with any valid settings for inputs of this kind; those for vectors serve every kind."""
        return self.settings(kind).map(lambda settings: FACTORIES[self.name](**settings))

    def accepts(self, task: Task) -> bool:
        """Whether it takes tasks with inputs of this kind."""
        return task.kind in {TASKS[name].kind for name in self.tasks}


def _scalars(name: str, numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Scalar]:
    """Numbers, and what stands for one: hparams, schedules and their products."""
    defaults = st.sampled_from([0.25, 0.0, 1.0]) | st.floats(1e-6, 1)
    hparams = defaults.map(lambda default: hparam(name, default))
    schedules = st.sampled_from(_SCHEDULES)
    return st.one_of(
        numbers, hparams, schedules, st.builds(lambda h, s: h * s, hparams, schedules), schedules.map(lambda s: 0.5 * s)
    )


def _mixup(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    # Numbers that float32 rounds to 0 are no parameters of a Beta distribution.
    numbers = st.sampled_from([0.2, 1, 0, 0.0]) | st.floats(1e-6, 1e6)
    required = {"alpha": _scalars("mixup/alpha", numbers)}
    return st.fixed_dictionaries(required, optional={"interpolate_loss": st.booleans()})


def _label_smoothing(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    numbers = st.sampled_from([0.1, 1, 0, 1.0, 0.0]) | st.floats(0, 1)
    return st.fixed_dictionaries({}, optional={"smoothing": _scalars("label_smoothing/smoothing", numbers)})


def _loss_scaling(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {
        # Not so large that a float32 gradient of a small network overflows.
        "init_scale": st.sampled_from([2.0**16, 2.0**10, 1.0, 3.0]) | st.floats(2.0**-20, 2.0**20),
        "growth_factor": st.sampled_from([2.0, 1.0, 1]) | st.floats(1, 4),
        "backoff_factor": st.sampled_from([0.5, 1.0, 1]) | st.floats(0.1, 1),
        "growth_interval": st.integers(1, 4) | st.just(2000),
    }
    return st.fixed_dictionaries({}, optional=optional)


def _training_metrics(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {
        "metrics": st.sampled_from([("accuracy",), ()]),  # the networks have too few classes for top_5
        "reset": st.sampled_from(["1ep", "2ep", "1ba", "3ba", None]),
    }
    return st.fixed_dictionaries({}, optional=optional)


def _gradient_norm(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    return st.fixed_dictionaries({}, optional={"total": st.booleans(), "each": st.booleans()})


def _selective_backprop(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    fractions = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(0, 1)
    windows = st.tuples(fractions, fractions).filter(lambda window: window[0] != window[1]).map(sorted)
    optional = {
        "keep": st.sampled_from([0.5, 1, 1.0]) | st.floats(0, 1, exclude_min=True),
        "interrupt": st.integers(0, 4),
    }
    if kind == "images":
        # The CNN takes images of half the size.
        optional["scale_factor"] = st.sampled_from([1.0, 0.5, 1]) | st.floats(0.5, 1)
    return st.builds(
        lambda window, settings: {"start": window[0], "end": window[1], **settings},
        st.just([0.0, 1.0]) | windows,
        st.fixed_dictionaries({}, optional=optional),
    )


SHIPPED: Mapping[str, Row] = MappingProxyType(
    {
        row.name: row
        for row in (
            Row(
                "gradient_norm",
                examples=("gradient_norm()", "gradient_norm(each=True)"),
                neutral="gradient_norm(total=False)",
                tasks=_EVERY_TASK,
                settings=_gradient_norm,
            ),
            Row(
                "label_smoothing",
                examples=("label_smoothing(0.1)", "label_smoothing(1)"),
                neutral="label_smoothing(0)",
                tasks=_EVERY_TASK,
                settings=_label_smoothing,
            ),
            Row(
                "loss_scaling",
                examples=("loss_scaling()", "loss_scaling(1024.0, growth_factor=4.0, growth_interval=1)"),
                neutral="loss_scaling(1.0, growth_factor=1.0, backoff_factor=1.0)",
                tasks=_EVERY_TASK,
                settings=_loss_scaling,
            ),
            Row(
                "mixup",
                examples=("mixup(0.2)", "mixup(0.3, interpolate_loss=True)"),
                neutral="mixup(0)",
                tasks=("vectors", "soft", "images", "frozen"),  # not tokens: ids cannot be mixed
                settings=_mixup,
            ),
            Row(
                "selective_backprop",
                examples=(
                    "selective_backprop(0, 1.0, interrupt=0)",
                    "selective_backprop(0, 1.0, keep=0.5, interrupt=2)",
                    "selective_backprop(0.5, 0.9, keep=0.3)",
                ),
                neutral="selective_backprop(keep=1)",
                tasks=_EVERY_TASK,
                settings=_selective_backprop,
            ),
            Row(
                "training_metrics",
                examples=("training_metrics()", "training_metrics(reset='2ba')"),
                neutral="training_metrics(())",
                tasks=_EVERY_TASK,
                settings=_training_metrics,
            ),
        )
    }
)
"""The rows by the factory's name."""
