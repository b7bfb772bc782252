"""How a batch is cut into slices."""

from typing import NamedTuple


__all__ = ["Cut", "check_one_cut"]


class Cut(NamedTuple):
    """Into how many slices a batch is cut: a fixed number, or as few as hold at most `size` examples each."""

    k: int | None = None
    size: int | None = None

    @property
    def may_slice(self) -> bool:
        """Whether there may be several slices."""
        return self.size is not None or (self.k or 1) > 1

    def num_slices(self, num_examples: int) -> int:
        """Return into how many slices a batch of this many examples is cut, at most one for each example."""
        if self.size is not None:
            return max(1, -(-num_examples // self.size))
        return min(self.k or 1, num_examples)


def check_one_cut(k: int | None, size: int | None, where: str, names: tuple[str, str]) -> None:
    """Raise a `ValueError` where a number of slices and their size are both given.

    Args:
        k: The number of slices.
        size: The most examples in a slice.
        where: What was called, for the message.
        names: What the two arguments are called there.
    """
    if k is not None and size is not None:
        raise ValueError(
            f"{where}: expected {names[0]} (how many slices) or {names[1]} (at most so many examples in each), got "
            f"both: {names[0]}={k!r}, {names[1]}={size!r}"
        )
