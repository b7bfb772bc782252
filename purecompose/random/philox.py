"""Philox4x32-10: four random words from a counter and a key, in int64 tensor operations.

A word is a uint32 value stored in an int64. A product of two words is at most `(2**32 - 1)**2`, which int64
represents modulo 2**64, so both halves are exact: the low one by a mask, the high one by a shift and a mask.

The four lanes are separate tensors and the constants are Python numbers. Lanes stacked in one tensor need fewer
operations (0.10 ms instead of 0.14 for a small draw in eager), but the swap of lanes between rounds prevents the
compiler from fusing: compiled, separate lanes are three times as fast, and in eager they are faster for large draws.

References:
    John K. Salmon, Mark A. Moraes, Ron O. Dror, David E. Shaw: Parallel Random Numbers: As Easy as 1, 2, 3.
    SC 2011.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


__all__ = ["WORD", "philox4x32", "philox_lanes"]

WORD = 0xFFFFFFFF  # the mask of a word
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Tensor | Sequence[Tensor | int], key: Tensor) -> Tensor:
    """Return the four random words of each counter under a key.

    Args:
        counter: int64 words of shape (..., 4), or the four lanes as tensors or ints that broadcast.
            Bits above the 32nd are dropped.
        key: int64 words of shape (..., 2); the leading dimensions broadcast with those of the counter.

    Returns:
        int64 words of shape (..., 4), each in [0, 2**32).

    Raises:
        ValueError: The counter does not have four lanes, or the key not two.

    Example:
        >>> zeros = torch.zeros(4, dtype=torch.int64)
        >>> [f"{word:08x}" for word in philox4x32(zeros, zeros[:2]).tolist()]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    lanes = counter.unbind(-1) if isinstance(counter, Tensor) else tuple(counter)
    if len(lanes) != 4:
        raise ValueError(f"philox4x32: expected a counter of 4 words, got {len(lanes)}; pass (..., 4) or four tensors")
    if key.shape[-1:] != (2,):
        raise ValueError(f"philox4x32: expected a key of shape (..., 2), got {tuple(key.shape)}")
    c0, c1, c2, c3 = (lane & WORD for lane in lanes)
    return philox_lanes(c0, c1, c2, c3, key)


def philox_lanes(c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, key: Tensor) -> Tensor:
    """Return `philox4x32` of four lanes that are already words, without checks; the draws use this function.

    A lane that is an int costs no tensor operation in the first round, and lanes of different shapes
    broadcast as late as possible: for ten thousand examples of three elements, 10 000 + 3 numbers are multiplied first.

    Args:
        c0: Lane 0, a word or a tensor of words, as are lanes 1 to 3.
        c1: Lane 1; only the low 32 bits of this lane and of lane 3 are read.
        c2: Lane 2.
        c3: Lane 3.
        key: int64 of shape (..., 2).

    Returns:
        int64 words of shape (..., 4).
    """
    for k0, k1 in zip(_round_keys(key, 0), _round_keys(key, 1), strict=True):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0 = (high1 ^ (c1 ^ k0)) & WORD
        c2 = (high0 ^ (c3 ^ k1)) & WORD
        c1, c3 = low1, low0
    return torch.stack((c0, c1 & WORD, c2, c3 & WORD), dim=-1)  # type: ignore[arg-type]


def _round_keys(key: Tensor, lane: int) -> tuple[Tensor, ...]:
    """Return the key lane's word for each round; the mask of the round removes the carry above 32 bits."""
    step = _KEY_STEPS[lane]
    steps = torch.arange(0, _ROUNDS * step, step, dtype=torch.int64, device=key.device)
    return (key[..., lane].unsqueeze(-1) + steps).unbind(-1)


def _multiply(word: Tensor | int, multiplier: int) -> tuple[Tensor | int, Tensor | int]:
    """Return the high and low half of a product, correct only in their low 32 bits; a round masks them at its end."""
    product = word * multiplier
    if isinstance(product, int):  # may exceed 2**63, which tensor operations do not accept
        return product >> 32, product & WORD
    return product >> 32, product
