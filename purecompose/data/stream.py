"""Batches made from the state of the run: rollouts, self-play, active learning."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from purecompose._support.checks import is_callable_with, shown


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
