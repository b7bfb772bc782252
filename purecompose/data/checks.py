"""Data that are not loaders: streams made from the state of a run, and what is rejected with advice on wrapping it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from purecompose._support.checks import is_callable_with, shown


def check_batches(data: Any, where: str) -> None:
    """Raise if data do not yield batches: a data set of single examples, a pair of tensors, or not iterable.

    Streams (`IterableDataset`) may yield whole batches, and are accepted.

    Raises:
        TypeError: The data do not yield batches. The message begins with `where`, and names the remedy.
    """
    if callable(getattr(data, "epoch", None)):
        return
    is_hugging = type(data).__module__.startswith("datasets.") and hasattr(data, "column_names")
    if is_hugging or (isinstance(data, Dataset) and not isinstance(data, IterableDataset)):
        raise TypeError(
            f"{where}: expected batches, got the data set {type(data).__name__}, which gives single examples: wrap it "
            "in data.loader(dataset, batch_size=...)"
        )
    if isinstance(data, Tensor):
        raise TypeError(
            f"{where}: expected batches, got one tensor, {shown(data)}: a single batch goes into a list, [batch]; "
            "tensor.split(n) cuts it into batches of n"
        )
    if _is_pair(data):
        raise TypeError(
            f"{where}: expected batches, got inputs and targets, {shown(data[0])} and {shown(data[1])}: wrap them "
            "in data.arrays(inputs, targets, batch_size=...), or in a list for a single batch, [(inputs, targets)]"
        )
    if isinstance(data, Mapping):
        raise TypeError(
            f"{where}: expected batches, got a mapping of {', '.join(map(repr, data))}: a single batch goes into a "
            "list, [batch]"
        )
    if isinstance(data, str | type) or not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        raise TypeError(
            f"{where}: expected batches, such as a DataLoader, a list of batches or data.arrays(...), got {shown(data)}"
        )


def _is_pair(data: Any) -> bool:
    """Return whether data are inputs and targets rather than two batches of the same form."""
    if type(data) not in (tuple, list) or len(data) != 2:
        return False
    if not all(isinstance(part, Tensor) and part.ndim for part in data) or len(data[0]) != len(data[1]):
        return False
    first, second = data
    # The tensors in a list of batches may have sequences of different lengths.
    have_one_form = first.shape == second.shape if type(data) is tuple else first.ndim == second.ndim
    return first.dtype != second.dtype or not have_one_form


def length_of(data: Any) -> int | None:
    """Return the number of batches, if known; the `__len__` of a `DataLoader` over a stream raises."""
    try:
        return len(data) if hasattr(data, "__len__") else None
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True)
class StateStream:
    """Endless data, whose batches are made from the state; see `stream`.

    Attributes:
        fn: `state -> batch`.
    """

    fn: Callable[[Any], Any]

    def batch(self, state: Any) -> Any:
        """Return the batch for the next step from this state.

        Raises:
            TypeError: The function returned an iterator or `None`.
        """
        made = self.fn(state)
        if made is None or isinstance(made, Iterator):
            raise TypeError(
                f"data.stream: {shown(self.fn)} returned {shown(made)}: expected one batch for each call, the one for "
                "the next step; keep what serves several steps in an object, and give it to Checkpoints(extra=...)"
            )
        return made


def stream(fn: Callable[[Any], Any]) -> StateStream:
    """Return data for `fit` that are made from the state as the run proceeds, one batch before each step.

    Batches are not prefetched, so `fn` sees the weights that the batch will train. It draws from `state.rng(name)`, a
    different draw in each step. Data that it keeps between calls, such as an environment or a buffer, belong in
    `Checkpoints(extra=...)`; a resumed run then makes the same batches.

    A stream has no epochs: give the run's length in batches, samples, tokens or seconds, or
    `State.create(batches_per_epoch=...)`.

    Args:
        fn: `state -> batch`, called with the state before each step.

    Raises:
        TypeError: `fn` cannot be called with one argument.

    Example:
        >>> import torch
        >>> import purecompose as pc
        >>> def self_training(state):
        ...     x = pc.random.normal(state.rng("questions"), (8, 2))
        ...     return x, state.forward(x).sign()
        >>> state = pc.State.create(torch.nn.Linear(2, 1), loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1))
        >>> pc.fit(pc.compose(pc.loop_events), state, stream(self_training), duration="5ba").timestamp.batch
        5
    """
    if not callable(fn) or not is_callable_with(fn, 1):
        raise TypeError(f"data.stream: expected a function state -> batch, got {shown(fn)}")
    return StateStream(fn)
