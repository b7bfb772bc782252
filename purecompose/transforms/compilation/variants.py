"""Variants: the table of compiled parts, and the error for too many of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from purecompose._support.tables import table
from purecompose.errors import VariantLimitError


@dataclass
class Variant:
    """One compiled part of a step, and its cost."""

    segment: int
    """Index of the part of the step, from 0."""
    acting: tuple[str, ...]
    """Algorithms that act in it, as "name at event"."""
    batch: str
    """Shapes of the incoming batch."""
    nodes: int = 0
    """Number of operations in its graph."""
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    hits: int = 0
    """Number of times it has run."""
    why_fixed: str = ""
    """Why its sizes could not be left open, if they were to be."""

    @property
    def seconds(self) -> float:
        """Seconds spent tracing and compiling it, for which the run waited."""
        return self.trace_seconds + self.compile_seconds

    @property
    def title(self) -> str:
        """Description for announcements."""
        acting = ", ".join(self.acting) or "no algorithm"
        return f"part {self.segment} of the step ({acting}; batch {self.batch or 'gone'})"


class Variants(tuple[Variant, ...]):
    """All variants of a compiled step; prints as a table."""

    @property
    def seconds(self) -> float:
        """Seconds spent tracing and compiling all of them, for which the run waited."""
        return sum(variant.seconds for variant in self)

    def __str__(self) -> str:
        if not self:
            return "nothing is compiled yet"
        return table(["part", "batch", "operations", "trace s", "compile s", "hits", "acting"], [*map(_row, self)])


def _row(variant: Variant) -> list[str]:
    seconds = f"{variant.trace_seconds:.2f}", f"{variant.compile_seconds:.2f}"
    acting = ", ".join(variant.acting) or "-"
    return [str(variant.segment), variant.batch, str(variant.nodes), *seconds, str(variant.hits), acting]


def too_many(variants: Sequence[Variant], refused: Variant, limit: int) -> VariantLimitError:
    """Return the error for one variant too many, which names the cause of the variants."""
    # Count by segment: a batch that a segment has changed is not a new form of batch, and each segment has at least
    # one variant.
    wanted = (*variants, refused)
    segments = [[v for v in wanted if v.segment == segment] for segment in dict.fromkeys(v.segment for v in wanted)]
    most = max(segments, key=lambda segment: (len(segment), segment[-1] is refused))
    batches, schedules = dict.fromkeys(v.batch for v in most), {v.acting for v in most}
    if len(batches) == len(schedules) == 1 < len(most):
        cause = (
            f"{len(most)} of them are for one form of batch ({next(iter(batches)) or '()'}) and the same algorithms, "
            "and differ in what shapes do not show: a Python value in the batch (ids, names, numbers: keep what "
            "changes from batch to batch in tensors), the form of another field of the state, or torch's settings"
        )
    elif len(batches) > len(schedules):
        shown = "; ".join(batch or "()" for batch in list(batches)[:4])
        cause = (
            f"the batch came in {len(batches)} forms ({shown}{'; ...' if len(batches) > 4 else ''}), and each is "
            "compiled for itself: pad or crop batches to few sizes, or give compile(eager_below=...) for short last "
            "batches, or compile(dynamic=True) for any number of examples, or compile(dynamic='all') for any sizes"
        )
        failed = next((variant.why_fixed for variant in most if variant.why_fixed), None)
        cause += f". Sizes could not be left open, because of {failed}" if failed else ""
    elif len(schedules) > 1:
        name, times = _busiest(most)
        cause = (
            f"{name} is in {times} of {len(most)} and not in the others, as its match decides: let it match in coarser "
            "stretches, or always, choosing by torch.where inside apply"
        )
    else:
        cause = f"it has {len(segments)} parts, and each needs one at least"
    return VariantLimitError(
        f"the step needs more than max_variants={limit} compiled variants: {cause}. step.variants() lists them"
    )


def _busiest(variants: Sequence[Variant]) -> tuple[str, int]:
    """Return the algorithm that divides the variants most evenly: in some of them and not in others."""
    names = Counter(place.split(" at ")[0] for variant in variants for place in set(variant.acting))
    return max(names.items(), key=lambda item: min(item[1], len(variants) - item[1]))
