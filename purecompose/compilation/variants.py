"""Variants: what has been compiled, as a table, and the error for too many."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from purecompose._table import table


__all__ = ["Variant", "VariantLimitError", "Variants", "too_many"]


class VariantLimitError(RuntimeError):
    """A step wants more compiled variants than its limit."""


@dataclass
class Variant:
    """One compiled part of a step, and what it cost."""

    segment: int
    """Which part of the step, from 0."""
    acting: tuple[str, ...]
    """Which algorithms act in it, as "name at event"."""
    batch: str
    """The shapes of the batch that comes in."""
    nodes: int = 0
    """Operations in its graph."""
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    hits: int = 0
    """How often it has run."""

    @property
    def title(self) -> str:
        """For an announcement."""
        acting = ", ".join(self.acting) or "no algorithm"
        return f"part {self.segment} of the step ({acting}; batch {self.batch or 'gone'})"


class Variants(tuple[Variant, ...]):
    """All variants of a compiled step; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "nothing is compiled yet"
        head = ["part", "batch", "operations", "trace s", "compile s", "hits", "acting"]
        return table(head, list(map(_row, self)))


def _row(variant: Variant) -> list[str]:
    seconds = [f"{variant.trace_seconds:.2f}", f"{variant.compile_seconds:.2f}"]
    acting = ", ".join(variant.acting) or "-"
    return [str(variant.segment), variant.batch, str(variant.nodes), *seconds, str(variant.hits), acting]


def too_many(variants: Sequence[Variant], limit: int) -> VariantLimitError:
    """The error for one variant more; it names what makes them."""
    # By segment: what one segment makes of the batch is another's, and no other batch.
    segments = [[v for v in variants if v.segment == number] for number in {v.segment for v in variants}]
    batches = max(({v.batch: None for v in segment} for segment in segments), key=len)
    by_batch, by_acting = len(batches), max(len({v.acting for v in segment}) for segment in segments)
    if by_batch >= by_acting:
        shown = "; ".join(batch or "()" for batch in list(batches)[:4])
        cause = (
            f"the batch came in {by_batch} forms ({shown}{'; ...' if by_batch > 4 else ''}), and each is compiled for "
            "itself: pad or crop batches to few sizes, keep what changes from batch to batch (ids, names, numbers) in "
            "tensors, or give compile(eager_below=...) for short last batches"
        )
    else:
        name, times = _busiest(variants)
        cause = (
            f"{name} is in {times} of them and not in others, as its match decides: let it match in coarser "
            "stretches, or always, choosing by torch.where inside apply"
        )
    return VariantLimitError(
        f"the step needs more than max_variants={limit} compiled variants: {cause}. step.variants() lists them"
    )


def _busiest(variants: Sequence[Variant]) -> tuple[str, int]:
    """The algorithm that divides the variants most evenly: in some of them and not in others."""
    names = Counter(place.split(" at ")[0] for variant in variants for place in set(variant.acting))
    return max(names.items(), key=lambda item: min(item[1], len(variants) - item[1]))
