"""A row of the table of shipped algorithms, and strategies that several rows share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from torch import nn

from purecompose.algorithms import FACTORIES
from purecompose.core.algorithm import Algorithm
from purecompose.schedule import Scalar, cosine, hparam, linear
from purecompose.testing.tasks import FULL_TASKS, TASKS, Task


__all__ = ["EVERY_TASK", "Row", "scalars"]

EVERY_TASK = FULL_TASKS
"""The names of all tasks in full precision."""

_SCHEDULES = (linear(), linear(0.0, 1.0, t_max="0.5dur"), cosine(), cosine(warmup="0.25dur"))


@dataclass(frozen=True)
class Row:
    """A shipped algorithm.

    Args:
        name: The factory's.
        examples: Source texts, as for `Subject.of`, on which all laws run.
        neutral: A source text with settings that change nothing; `None` where there are none.
        tasks: The names of the `TASKS` that it accepts in full precision; those in half precision only for a method
            that does nothing elsewhere. See `accepted`.
        settings: A function of a kind of inputs (see `tasks.KINDS`) that gives a strategy for valid keyword
            arguments, edge values among them; the simplest are the common ones.
        needs: Types of layers, one of which a network must hold; for methods that look for them.
        is_alone: Whether no other method goes with it, so that it is in no list of several.
    """

    name: str
    examples: tuple[str, ...]
    neutral: str | None
    tasks: tuple[str, ...]
    settings: Callable[[str], st.SearchStrategy[dict[str, Any]]]
    needs: tuple[type[nn.Module], ...] = ()
    is_alone: bool = False

    def algorithms(self, kind: str = "vectors") -> st.SearchStrategy[Algorithm]:
        """The algorithm with any valid settings for inputs of this kind; those for vectors serve every kind."""
        return self.settings(kind).map(lambda settings: FACTORIES[self.name](**settings))

    @property
    def accepted(self) -> tuple[str, ...]:
        """The names of all the `TASKS` that it accepts, on which laws are tried."""
        return tuple(name for name, task in TASKS.items() if self.accepts(task))

    def accepts(self, task: Task) -> bool:
        """Whether it takes tasks with inputs of this kind, acts in the precision, and finds what it needs there."""
        named = [TASKS[name] for name in self.tasks]
        if task.kind not in {one.kind for one in named}:
            return False
        if not task.is_half and all(one.is_half for one in named):
            return False
        return not self.needs or any(isinstance(module, self.needs) for module in task.make_net(0).modules())


def scalars(name: str, numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Scalar]:
    """Numbers, and what stands for one: hparams, schedules and their products."""
    defaults = st.sampled_from([0.25, 0.0, 1.0]) | st.floats(1e-6, 1)
    hparams = defaults.map(lambda default: hparam(name, default))
    schedules = st.sampled_from(_SCHEDULES)
    return st.one_of(
        numbers, hparams, schedules, st.builds(lambda h, s: h * s, hparams, schedules), schedules.map(lambda s: 0.5 * s)
    )
