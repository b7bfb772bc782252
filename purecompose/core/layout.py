"""The layout of a batch: the dimension of its examples, how they are counted and split, and into how many slices."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field as attribute
from typing import Any, NamedTuple

from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.checks import check_whole, shown
from purecompose.batch import Splitter
from purecompose.batch.examples import is_list, is_rows


@dataclass(frozen=True)
class Layout:
    """The arrangement of the examples in a batch.

    Args:
        field: Field of the input, for batches whose tensors disagree; see `batch.num_examples`.
        dim: The dimension of the examples in the batch's tensors.
        splitter: Functions used instead of `field` and `dim`.
        token_counter: `batch -> int`, the number of tokens; by default the size of `input_ids`.
        target_field: Field of the target, for the same batches as `field`.
    """

    field: batches.Field | None = None
    dim: int = 0
    splitter: Splitter | None = None
    token_counter: Callable[[Any], int] | None = None
    target_field: batches.Field | None = None
    _kinds: dict[str, bool] = attribute(default_factory=dict, init=False, repr=False, compare=False)
    """Whether the tensors of batches that were cut have rows of examples, by path."""
    _seen: set[tuple[bool, ...]] = attribute(default_factory=set, init=False, repr=False, compare=False)
    """The results of `are_rows` that have been compared."""

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
            return batches.num_examples(batch, self.field, self.dim, self.target_field)
        return check_whole(self.splitter.num_examples(batch), "Splitter.num_examples(batch)", 0)

    def num_tokens(self, batch: Any) -> int:
        """Return the number of tokens in a batch, for the timestamp."""
        if self.token_counter is None:
            return batches.num_tokens(batch)
        return check_whole(self.token_counter(batch), "num_tokens(batch)", 0)

    def are_rows(self, batch: Any) -> list[bool]:
        """Return which of the batch's tensors have a row for each example, the others being shared by all examples.

        Raises:
            ValueError: One of them, or a list or array, is of the other kind in an earlier batch, so that its size is
                that of the batch by chance.
        """
        num = self.num_examples(batch)
        found = [is_rows(leaf, num, self.dim) for leaf in batches.tensors(batch)]
        kinds = (*found, *(is_rows(leaf, num, self.dim) for leaf in tree.leaves(batch, is_list)))
        if num > 1 and kinds not in self._seen:
            for path, leaf in tree.leaves_with_paths(batch, into_objects=True, is_leaf=is_list).items():
                is_row = is_rows(leaf, num, self.dim)
                shape = (len(leaf),) if is_list(leaf) else tuple(getattr(leaf, "shape", ()))
                if shape and not is_rows(leaf, 1, self.dim) and self._kinds.setdefault(path, is_row) != is_row:
                    here, there = ("cut with", "shared by") if is_row else ("shared by", "cut with")
                    raise ValueError(
                        f"batch{path} {shape} would be {here} the {num} examples of this batch, but was {there} those "
                        "of another: give what all examples share a leading dimension of 1 (a list: a named tuple), "
                        "and other batches a State.create(splitter=batch.Splitter(num_examples, part))"
                    )
            self._seen.add(kinds)
        return found

    def take(self, batch: Any, indices: Tensor) -> Any:
        """Return the chosen examples; see `batch.take`."""
        self.are_rows(batch)
        return batches.take(batch, indices, self.num_examples(batch))

    def split(self, batch: Any, num_parts: int) -> list[Any]:
        """Split the batch into consecutive parts of nearly equal size, larger ones first."""
        if num_parts == 1:  # the same tensors, so that it is known which of them have been cut
            return [batch]
        if self.splitter is None:
            self.are_rows(batch)
            return batches.split(batch, num_parts, self.num_examples(batch), self.dim)
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


class Cut(NamedTuple):
    """The number of slices of a batch: fixed, or as few as possible with at most `microbatch_size` examples each."""

    microbatches: int | None = None
    microbatch_size: int | None = None

    @classmethod
    def checked(cls, microbatches: Any, microbatch_size: Any, where: str) -> "Cut":
        """Return the cut described by two arguments of a function named `where`."""
        if microbatches is not None and microbatch_size is not None:
            raise ValueError(
                f"{where}: expected microbatches (how many slices) or microbatch_size (at most so many examples in "
                f"each), got both: microbatches={microbatches!r}, microbatch_size={microbatch_size!r}"
            )
        if microbatches is not None:
            microbatches = check_whole(microbatches, f"{where}: microbatches", 1)
        if microbatch_size is not None:
            hint = "it is the most examples in a slice"
            microbatch_size = check_whole(microbatch_size, f"{where}: microbatch_size", 1, hint=hint)
        return cls(microbatches, microbatch_size)

    @property
    def may_slice(self) -> bool:
        """True if there may be several slices."""
        return self.microbatch_size is not None or (self.microbatches or 1) > 1

    def num_slices(self, num_examples: int) -> int:
        """Return the number of slices for a batch of this many examples, at most one for each example."""
        if self.microbatch_size is not None:
            return max(1, -(-num_examples // self.microbatch_size))
        return min(self.microbatches or 1, num_examples)
