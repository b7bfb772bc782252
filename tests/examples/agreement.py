"""What the tests of the examples share: batches and draws for plain PyTorch loops, and the comparison with them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from purecompose import State
from purecompose.nn.keyed.modules import keyed
from purecompose.time import Timestamp
from tests.helpers import assert_close, run_steps


__all__ = ["at_batch", "draws_of_forward", "repeated", "assert_agrees"]


def repeated(batches: Iterable[Any], num_batches: int) -> list[Any]:
    """Return this many batches, beginning again where there are fewer."""
    return list(islice(cycle(batches), num_batches))


def at_batch(state: State, number: int) -> State:
    """Return the state at the start of a step, whose `rng(name)` is that of the step."""
    return state.replace(timestamp=Timestamp(run=state.timestamp.run, batch=number))


def draws_of_forward(state: State, number: int, num_examples: int | None) -> AbstractContextManager[Any]:
    """Return a scope in which torch's random functions draw what the network's forward pass draws in a step."""
    return keyed(at_batch(state, number).rng(".forward"), num_examples=num_examples)


def assert_agrees(
    make: Callable[..., Any], plain_loop: Callable[..., dict[str, Tensor]], num_batches: int = 8, rtol: float = 1e-10
) -> None:
    """Assert that an example's step and a plain loop reach the same parameters in float64."""
    step, state, batches = make(num_batches, torch.float64)
    start, end = state.params, run_steps(step, state, repeated(batches, num_batches)).params
    assert not all(torch.equal(start[name], end[name]) for name in start), "nothing was trained"
    assert_close(end, plain_loop(num_batches, torch.float64), rtol=rtol, atol=rtol)
