"""The number of slices into which a batch is cut."""

from typing import Any, NamedTuple

from purecompose._support.checks import check_whole


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
