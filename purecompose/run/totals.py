"""The accumulators of an evaluation's metrics, over data of which several processes may compute a part each."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from purecompose import batch as batches, tree
from purecompose._support.scopes import NOTHING
from purecompose.core.contract import tensors_in
from purecompose.core.given import Marks, watched
from purecompose.core.ranks import Ranks, Share
from purecompose.core.state import State
from purecompose.losses import couples_examples
from purecompose.losses.metrics import Metric, counting, read_by
from purecompose.nn.keyed.modules import detect
from purecompose.transforms.members import mapped
from purecompose.transforms.rank_checks import digest, naming_late_ranks


class Totals:
    """The accumulators of one evaluation.

    Args:
        metrics: The metrics by name, adapted to the state's loss.
        state: The evaluated state.
        ranks: The processes that compute a part of each batch each; `None` if this one computes all of it.
        seen: The metrics whose first call has been watched.
    """

    def __init__(self, metrics: Mapping[str, Metric], state: State, ranks: Ranks | None, seen: set[str]) -> None:
        self._metrics, self._state, self._ranks, self._seen = metrics, state, ranks, seen
        self._totals = {} if ranks is not None else {name: self._empty(metric) for name, metric in metrics.items()}
        self._num_shares = 0

    @staticmethod
    def of(metrics: Mapping[str, Metric], state: State, ranks: Ranks | None, seen: set[str]) -> "Totals":
        """Return empty accumulators. The data are divided among processes if all the metrics are sums over examples."""
        takes_loss = any(metric.takes_loss for metric in metrics.values())
        is_divisible = all(metric.is_sum for metric in metrics.values()) and not (
            takes_loss and couples_examples(state.context.loss)
        )
        return Totals(metrics, state, ranks if is_divisible else None, seen)

    @property
    def num_ranks(self) -> int:
        """The number of processes among which the data are divided."""
        return 1 if self._ranks is None else self._ranks.size

    def guarded(self) -> AbstractContextManager[Any]:
        """Return a context manager that reports processes that do not answer."""
        return NOTHING if self._ranks is None else naming_late_ranks(self._ranks, self._state.timestamp.batch)

    def share(self, batch: Any) -> Share:
        """Return the part of a batch that this process computes.

        Raises:
            ValueError: The first batch differs between processes.
        """
        if self._ranks is None:
            return Share(batch, 0, 1)
        if not self._num_shares:
            self._check_same([digest(batches.tensors(batch), self._state.device)])
        self._num_shares += 1
        return self._ranks.share(batch, self._state.context.layout)

    def update(self, state: State, num_examples: int, *, counts: bool) -> None:
        """Add a batch, or this process's part of it.

        Args:
            state: A state with batch and outputs.
            num_examples: The number of its examples.
            counts: False for a process without a part, which has computed an example of another one.
        """
        for name, metric in self._metrics.items():
            if self._ranks is None:
                self._totals[name] = self._updated(name, self._totals[name], state, num_examples)
                continue
            added = self._updated(name, self._empty(metric), state, num_examples)
            added = added if counts else tree.map(torch.zeros_like, added)
            known = self._totals.get(name)
            self._totals[name] = added if known is None else tree.map(torch.add, known, added)

    def values(self) -> dict[str, Any]:
        """Return the values of the metrics, as "name", or "name/part" for one with several.

        Raises:
            ValueError: Processes that divide the data have had different numbers of batches.
        """
        totals = self._totals
        if self._ranks is not None:
            self._check_same([torch.tensor(self._num_shares, device=self._state.device)])
            leaves, spec = tree.flatten(totals)
            totals = tree.unflatten(spec, self._ranks.reduced(leaves, "sum"))
        found: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            value = self._each(metric.compute)(totals[name])
            parts = value if isinstance(value, dict) else {"": value}
            found |= {f"{name}{part and f'/{part}'}": own for part, own in parts.items()}
        return found

    def _check_same(self, numbers: list[torch.Tensor]) -> None:
        assert self._ranks is not None
        if not all(self._ranks.agree(numbers)):
            raise ValueError(
                f"evaluation: the {self._ranks.size} processes have different data: give each all batches, in one "
                "order, and not a part (no DistributedSampler): the evaluation divides each batch"
            )

    def _each(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one state's values; for stacked states it is mapped over the members."""
        return fn if self._state.key.ndim == 1 else mapped(fn)

    def _empty(self, metric: Metric) -> Any:
        return self._each(lambda key: metric.init(key.device))(self._state.key)

    def _updated(self, name: str, total: Any, state: State, num_examples: int) -> Any:
        """Return the accumulator of a metric, with the batch and the outputs of a state added."""
        metric, targets = self._metrics[name], read_by(self._metrics[name], state)
        update = counting(metric, num_examples)

        def with_loss(total: Any, one: State, targets: Any) -> Any:
            return one.call_loss(lambda loss: update(total, one.outputs, targets, loss_fn=loss), train=False)[0]

        def call() -> Any:
            if metric.takes_loss:
                return self._each(with_loss)(total, state, targets)
            return self._each(update)(total, state.outputs, targets)

        if name in self._seen:
            return call()
        self._seen.add(name)
        marks = Marks(lambda: tensors_in(state, "batch", "outputs"), with_values=True)
        with detect():
            return watched(call, "the loss" if metric.takes_loss else f"the metric {name!r}", [marks])
