"""What several processes compute of one batch, each for its own examples."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.checks import shown
from purecompose._support.scopes import during, together
from purecompose.core.ranks import Ranks
from purecompose.core.shared_part import SHARED_PART, SharedPart
from purecompose.nn.shared_batch import SHARED_BATCH


_WITH_WHOLE_BATCH: ContextVar[Ranks | None] = ContextVar("with_whole_batch", default=None)
"""The processes that all have the whole batch in the running part of a step; `None` if each has a part, or is alone."""


def sharing(batch: SharedPart | None, part: SharedPart | None) -> AbstractContextManager[Any]:
    """Return a scope with this process's part of the batch: where batch normalisation and the gradient look it up.

    Args:
        batch: The part for batch normalisation; `None` if that uses the statistics of what each process computes.
        part: The part for a gradient that needs its weight; see `SHARED_PART`.
    """
    return together(during(SHARED_BATCH, batch), during(SHARED_PART, part), during(_WITH_WHOLE_BATCH, None))


def with_whole_batch(operation: Callable[..., Any], ranks: Ranks) -> Callable[..., Any]:
    """Return an operation in which these processes all have the whole batch."""

    def run(carry: Any, purpose: Any) -> Any:
        held = [carry]  # so that nothing else holds what the operation drops, such as gradients during an update
        del carry
        with during(_WITH_WHOLE_BATCH, ranks):
            return operation(held.pop(), purpose)

    return run


def per_example(state: Any, fn: Callable[[Any], Any]) -> Any:
    """See `State.per_example`."""
    ranks, num = _WITH_WHOLE_BATCH.get(), state.num_examples
    with torch.no_grad():
        if ranks is None:
            return _checked(fn(state), num)
        share = ranks.share(state.batch, state.context.layout)
        part = SharedPart(ranks, share.num_examples, state.device)
        with sharing(part, None):
            first = share.first_example + (0 if state.first_example is None else state.first_example)
            own = fn(state.replace(batch=share.batch, first_example=first))
        own = _checked(own, max(share.num_examples, 1))
        bounds = batches.bounds(num, min(ranks.size, num))
        return tree.map(lambda rows: _joined(rows[: share.num_examples], bounds, ranks), own)


def _joined(own: Tensor, bounds: list[int], ranks: Ranks) -> Tensor:
    """Return the rows of all processes, one after the other; the first has the most."""
    most = bounds[1]
    padded = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])]) if len(own) < most else own
    rows = ranks.gather(padded).split(most)
    return torch.cat([part[: stop - start] for part, start, stop in zip(rows, bounds, bounds[1:], strict=False)])


def _checked(values: Any, num_examples: int) -> Any:
    for leaf in tree.leaves(values):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != num_examples:
            raise ValueError(
                f"state.per_example: expected tensors with one row for each of {num_examples} examples, got "
                f"{tree.describe(leaf) if isinstance(leaf, Tensor) else shown(leaf)}"
            )
    return values
