"""Draws of positions: permutations and choices.

They concern a whole batch: if an `Rng` is of several examples, these are ignored, so that each microbatch gets the same
order.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from purecompose._support.checks import shown
from purecompose._support.device import constants
from purecompose.random.draws import drawn, open_unit, randint, uniform
from purecompose.random.keys import Rng, as_rng


def permutation(key: Tensor | Rng, n: int | Tensor) -> Tensor:
    """Return a random order, by a stable sort of 64-bit keys: the same bits on every device.

    Args:
        key: A key or an `Rng`; the examples of one of several are ignored.
        n: Number of positions to order, or a tensor whose rows (dimension 0) are put in a random order.

    Returns:
        int64 of shape (n,), a permutation of 0 to n - 1; or the tensor's rows in such an order.

    Raises:
        TypeError: `key` is not a key, or `n` is not an int or a tensor.
        ValueError: `n` is negative, or a tensor without dimensions.

    Example:
        >>> from purecompose.random import key
        >>> sorted(permutation(key(0), 5).tolist())
        [0, 1, 2, 3, 4]
    """
    if isinstance(n, Tensor):
        if n.dim() == 0:
            raise ValueError("permutation: expected a tensor with rows, got one without dimensions; pass int(n)")
        return n.index_select(0, permutation(key, n.shape[0]).to(n.device))
    _check_size(n, "permutation: n")
    rng = _for_all(as_rng(key, "permutation"))
    return torch.sort(drawn(rng, n, torch.int64, "permutation"), stable=True).indices


def choice(
    key: Tensor | Rng,
    n: int,
    k: int,
    p: Tensor | Sequence[float] | None = None,
    *,
    replace: bool = False,
) -> Tensor:
    """Choose `k` of `n` positions, in the order of drawing.

    Without replacement, position i arrives after an exponential time of rate `p[i]` and the first k are
    taken, which has the same distribution as drawing one by one with renormalised weights. A position of weight 0
    comes last, and is taken only if there are fewer than `k` others (with replacement: never).

    Args:
        key: A key or an `Rng`; the examples of one of several are ignored.
        n: Number of positions.
        k: Number of positions to choose.
        p: Weights of the positions, of length n, not negative, with any sum; None for equal weights. A tensor's
            values are not checked. With weights the draw computes logarithms, and in rare cases may differ between
            devices.
        replace: True if a position may be drawn again.

    Returns:
        int64 of shape (k,), positions in [0, n).

    Raises:
        TypeError: `key` is not a key, or `n` or `k` is not an int.
        ValueError: `n` or `k` is negative, there are too few positions, or the weights do not fit.

    Example:
        >>> from purecompose.random import key
        >>> sorted(choice(key(0), 5, 3, p=[0.0, 1.0, 0.0, 1.0, 1.0]).tolist())
        [1, 3, 4]
    """
    _check_size(n, "choice: n")
    _check_size(k, "choice: k")
    if (k > n and not replace) or (k > 0 and n == 0):
        raise ValueError(
            f"choice: cannot choose k={k} of n={n} positions; choose fewer, or use replace=True with n > 0"
        )
    rng = _for_all(as_rng(key, "choice"))
    if p is None:
        return randint(rng, k, 0, max(n, 1)) if replace else permutation(rng, n)[:k]
    weights = _weights(p, n, k, replace, rng.key.device)
    if not replace:
        units = open_unit(rng, n, torch.float64, "choice", wide=torch.float64)
        return torch.sort(-torch.log(units) / weights, stable=True).indices[:k]
    totals = weights.cumsum(0)
    units = uniform(rng, k, dtype=torch.float64)
    return torch.searchsorted(totals, units * totals[-1:], right=True).clamp(max=n - 1)


def _for_all(rng: Rng) -> Rng:
    """Return the `Rng` of a draw for all examples, if it is of several."""
    return rng.per_example(None) if rng.examples is not None and rng.examples.ndim > 1 else rng


def _weights(p: Tensor | Sequence[float], n: int, k: int, replace: bool, device: torch.device) -> Tensor:
    if not isinstance(p, Tensor):
        values = [float(weight) for weight in p]
        if not all(0 <= weight < math.inf for weight in values):
            raise ValueError(f"choice: expected finite weights >= 0, got p={p}")
        positive = sum(weight > 0 for weight in values)
        if len(values) == n and positive < (min(k, 1) if replace else k):
            raise ValueError(f"choice: cannot choose k={k}, only {positive} of the weights are above 0")
        weights = constants(values, torch.float64, device)
    else:
        weights = p.detach().to(device=device, dtype=torch.float64)
    if weights.shape != (n,):
        raise ValueError(f"choice: expected {n} weights, one for each position, got p of shape {tuple(weights.shape)}")
    return weights


def _check_size(size: int, what: str) -> None:
    if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
        raise TypeError(f"{what}: expected an int, got {shown(size)}")
    if size < 0:
        raise ValueError(f"{what}: expected a number >= 0, got {size}")
