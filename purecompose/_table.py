"""Plain-text tables for plans and traces."""

from collections.abc import Sequence


__all__ = ["table"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 120) -> str:
    """Columns under a header, the last one cut so that lines stay within `width`.

    Example:
        >>> print(table(["a", "b"], [["1", "x"], ["22", "y"]]))
        a   b
        --  -
        1   x
        22  y
    """
    lines = [list(head), *map(list, rows)]
    sizes = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * size for size in sizes])
    texts = ("  ".join(cell.ljust(size) for cell, size in zip(line, sizes, strict=True)) for line in lines)
    return "\n".join(_cut(text.rstrip(), width) for text in texts)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
