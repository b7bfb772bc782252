"""The differences of two states, leaf by leaf, in numbers and in words."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from purecompose import tree
from purecompose._support.shards import whole


class MaxDifference(NamedTuple):
    """The largest difference of two states."""

    leaf: str
    """The leaf with the largest relative difference, such as `params['0.weight']`; empty if all values agree."""
    relative: float
    """The largest difference in it, divided by its largest magnitude; infinite if one of two values is not finite, or
    only one state has the leaf. NaNs in the same place count as equal."""
    absolute: float
    """The largest difference in it."""

    def __str__(self) -> str:
        return f"{self.relative:.2g} in {self.leaf}" if self.leaf else "none"


def max_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> MaxDifference:
    """Return the largest difference of floating tensors by name, relative to the magnitudes in the second mapping."""
    largest = MaxDifference("", 0.0, 0.0)
    for name in dict.fromkeys((*theirs, *ours)):
        if not all(one[name].is_floating_point() for one in (ours, theirs) if name in one):
            continue  # keys and counters have no magnitude
        found = MaxDifference(name, math.inf, math.inf)
        if name in ours and name in theirs and ours[name].shape == theirs[name].shape:
            found = _difference_of(name, *(whole(one).detach().cpu() for one in (ours[name], theirs[name])))
        if found.relative > largest.relative:
            largest = found
    return largest


def differing(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> Iterator[str]:
    """Yield a description of each leaf that differs, in the order of the first mapping.

    Args:
        ours: Tensors by name.
        theirs: The others.
        tolerance: See `tree.differences`.
    """
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in ours or name not in theirs:
            yield f"{name}: only in {'a' if name in ours else 'b'}"
            continue
        for found in tree.differences(ours[name], theirs[name], tolerance=tolerance):
            yield f"{name}{found}"


def _difference_of(name: str, ours: Tensor, theirs: Tensor) -> MaxDifference:
    ours, theirs = ours.double(), theirs.double()
    agree = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(agree.all()):
        return MaxDifference(name, 0.0, 0.0)
    absolute = float((ours - theirs).abs()[~agree].nan_to_num(math.inf).max())
    magnitudes = theirs.abs()
    is_finite = magnitudes.isfinite()
    scale = float(magnitudes[is_finite].max()) if bool(is_finite.any()) else 0.0
    return MaxDifference(name, absolute / scale if scale else math.inf, absolute)
