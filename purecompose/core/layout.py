"""The layout of a batch: the dimension of its examples, and how they are counted and split."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from purecompose import batch as batches
from purecompose._support.checks import check_whole, shown
from purecompose.batch import Splitter


__all__ = ["Layout", "Splitter"]


@dataclass(frozen=True)
class Layout:
    """The arrangement of the examples in a batch.

    Args:
        field: Field of the input, for batches whose tensors disagree; see `batch.num_examples`.
        dim: The dimension of the examples in the batch's tensors.
        splitter: Functions used instead of `field` and `dim`.
        token_counter: `batch -> int`, the number of tokens; by default the size of `input_ids`.
    """

    field: batches.Field | None = None
    dim: int = 0
    splitter: Splitter | None = None
    token_counter: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        check_whole(self.dim, "batch_dim", 0, hint="1 for sequences (T, N, ...)")
        if self.splitter is not None and not isinstance(self.splitter, Splitter):
            raise TypeError(f"splitter: expected a purecompose.batch.Splitter, got {shown(self.splitter)}")
        if self.splitter is not None and self.dim:
            raise TypeError("expected a splitter or a batch_dim, got both")
        if self.token_counter is not None and not callable(self.token_counter):
            raise TypeError(f"num_tokens: expected a function (batch) -> int, got {shown(self.token_counter)}")

    def has_rows(self, batch: Any) -> bool:
        """Return whether the examples are the rows of the batch's tensors."""
        return self.dim == 0 and self.splitter is None and batches.reported_size(batch) is None

    def can_cut(self, batch: Any) -> bool:
        """Return whether a batch can be split."""
        return batches.reported_size(batch) is None if self.splitter is None else self.splitter.part is not None

    def describe(self, batch: Any) -> str:
        """Return what is special about a batch that has no rows or cannot be cut, for messages."""
        if self.splitter is not None:
            return repr(self.splitter)
        return f"batch_dim={self.dim}" if self.dim else "a batch of graphs or packed sequences"

    def num_examples(self, batch: Any) -> int:
        """Return the number of examples in a batch."""
        if self.splitter is None:
            return batches.num_examples(batch, self.field, self.dim)
        return check_whole(self.splitter.num_examples(batch), "Splitter.num_examples(batch)", 0)

    def num_tokens(self, batch: Any) -> int:
        """Return the number of tokens in a batch, for the timestamp."""
        if self.token_counter is None:
            return batches.num_tokens(batch)
        return check_whole(self.token_counter(batch), "num_tokens(batch)", 0)

    def split(self, batch: Any, num_parts: int) -> list[Any]:
        """Split the batch into consecutive parts of nearly equal size, larger ones first."""
        if num_parts == 1 and not self.can_cut(batch):
            return [batch]
        if self.splitter is None:
            return batches.split(batch, num_parts, self.field, self.dim)
        if self.splitter.part is None:
            raise ValueError(
                f"the batch cannot be cut into {num_parts} parts: {self.splitter!r} has no part; give it part=, a "
                "function (batch, start, stop) -> batch, or leave out microbatch_size"
            )
        bounds = batches.bounds(self.num_examples(batch), num_parts)
        parts = []
        for start, stop in itertools.pairwise(bounds):
            part = self.splitter.part(batch, start, stop)
            if self.num_examples(part) != stop - start:
                raise ValueError(
                    f"{self.splitter!r}: part(batch, {start}, {stop}) has {self.num_examples(part)} examples, "
                    f"expected {stop - start}"
                )
            parts.append(part)
        return parts
