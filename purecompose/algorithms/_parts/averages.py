"""Shared parts of methods that average weights: means, and the times at which they are updated."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from purecompose._support.device import as_scalar
from purecompose.time import Time, TimeLike, TimeUnit
from purecompose.time.timestamp import checked_interval
from purecompose.time.units import named_point


def between(low: Mapping[str, Tensor], high: Mapping[str, Tensor], share: float | Tensor) -> dict[str, Tensor]:
    """Return `low + share * (high - low)` element by element, in the dtypes of `low`; exact for shares of 0 and 1.

    The share, a number or a 0-d tensor, is rounded to each dtype as late as possible: pass a small share in float64.

    Raises:
        KeyError: `high` lacks a name.
    """
    kinds = dict.fromkeys((value.dtype, value.device) for value in low.values())
    shares = {kind: as_scalar(share, *kind) for kind in kinds}
    return {
        name: torch.lerp(value, high[name].to(value.dtype), shares[value.dtype, value.device])
        for name, value in low.items()
    }


def checked_period(period: Any, where: str) -> Time:
    """Require a positive time in a unit that can be counted in batches."""
    time = checked_interval(period, where, TimeUnit.BATCH)
    if time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION):
        raise ValueError(f"{where}={str(time)!r}: expected batches (ba), epochs (ep) or a share of the run (dur)")
    return time


Point: TypeAlias = Annotated[TimeLike | float, named_point]
Period: TypeAlias = Annotated[TimeLike, checked_period]
