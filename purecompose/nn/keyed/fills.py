"""Keyed fills: distributions of torch's random functions from (rng, shape, dtype, parameters).

The parameters have torch's order, names and defaults (`low` and `high` replace `from` and `to`, since `from` is a
keyword in Python). All dtypes that torch can fill are supported, including integers and complex numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from purecompose.random.distributions import exponential
from purecompose.random.draws import normal, randint, uniform
from purecompose.random.keys import Rng


Shape = tuple[int, ...]
Fill = Callable[..., Tensor]
"""`(rng, shape, dtype, *parameters) -> Tensor`."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that formulas are computed in: float64 for results in double precision, else float32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def fill_uniform(rng: Rng, shape: Shape, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(uniform(rng, (*shape, 2), dtype=wide_dtype(dtype), low=low, high=high)).to(dtype)
    if low == high:  # valid in torch, and needs no draw
        return torch.full(shape, low, dtype=dtype, device=rng.key.device)
    return uniform(rng, shape, low=low, high=high, dtype=dtype)


def fill_normal(rng: Rng, shape: Shape, dtype: torch.dtype, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    """Fill with normal numbers; for complex dtypes each part has half of the variance, as in torch."""
    if dtype.is_complex:
        parts = normal(rng, (*shape, 2), dtype=wide_dtype(dtype)) * math.sqrt(0.5)
        return (mean + std * torch.view_as_complex(parts)).to(dtype)
    standard = normal(rng, shape, dtype=wide_dtype(dtype))
    is_standard = isinstance(mean, (int, float)) and isinstance(std, (int, float)) and (mean, std) == (0, 1)
    return (standard if is_standard else mean + std * standard).to(dtype)


def fill_exponential(rng: Rng, shape: Shape, dtype: torch.dtype, lambd: float = 1.0) -> Tensor:
    return exponential(rng, shape, rate=lambd, dtype=wide_dtype(dtype)).to(dtype)


def fill_log_normal(rng: Rng, shape: Shape, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return normal(rng, shape, mean=mean, std=std, dtype=wide_dtype(dtype)).exp().to(dtype)


def fill_cauchy(rng: Rng, shape: Shape, dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return (median + sigma * torch.tan(math.pi * (uniform(rng, shape, dtype=wide_dtype(dtype)) - 0.5))).to(dtype)


def fill_geometric(rng: Rng, shape: Shape, dtype: torch.dtype, p: float) -> Tensor:
    """Return numbers of trials up to the first success, 1, 2, ..., each the ceiling of an exponential number."""
    if not 0 < p < 1:
        raise ValueError(f"geometric_ expects p in (0, 1), got {p}")
    trials = torch.log1p(-uniform(rng, shape, dtype=wide_dtype(dtype))) / math.log1p(-p)
    return trials.ceil().clamp_min(1).to(dtype)


def fill_integers(rng: Rng, shape: Shape, dtype: torch.dtype, low: int = 0, high: int | None = None) -> Tensor:
    """Return integers in [low, high); without `high`, up to the largest range that `dtype` represents exactly."""
    if high is None and dtype.is_floating_point:
        high = int(2 / torch.finfo(dtype).eps) + 1  # for float32 the largest value is 2**24
    elif high is None:
        # randint's range must stay below 2**63, so int64's greatest value is never drawn.
        high = 2 if dtype == torch.bool else min(torch.iinfo(dtype).max + 1, 2**63 - 1 + min(low, 0))
    return randint(rng, shape, low, high).to(dtype)
