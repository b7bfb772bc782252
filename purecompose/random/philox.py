"""Philox4x32-10: four random words from a counter and a key, in int64 tensor operations and in Python integers.

A word is a uint32 value stored in an int64. A product of two words is at most `(2**32 - 1)**2`, which int64
represents modulo 2**64, so both halves are exact: the low one by a mask, the high one by a shift and a mask.

The four lanes are separate tensors and the constants are Python numbers. Lanes stacked in one tensor need fewer
operations (0.10 ms instead of 0.14 for a small draw in eager), but the swap of lanes between rounds prevents the
compiler from fusing: compiled, separate lanes are three times as fast, and in eager they are faster for large draws.

A small draw in eager spends its time in the dispatch of operations, 0.26 ms. Python's long integers serve as vectors
there: each counter has 64 bits of them, so that the product with a 32-bit constant does not reach the next one.

References:
    John K. Salmon, Mark A. Moraes, Ron O. Dror, David E. Shaw: Parallel Random Numbers: As Easy as 1, 2, 3.
    SC 2011.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


WORD = 0xFFFFFFFF  # the mask of a word
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Lanes = tuple[Tensor, Tensor, Tensor, Tensor]


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
    return torch.stack(philox_lanes(c0, c1, c2, c3, *key.unbind(-1)), dim=-1)


def philox_lanes(
    c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, k0: Tensor, k1: Tensor
) -> Lanes:
    """Return the four lanes of `philox4x32` for lanes that are already words, without checks.

    A lane that is an int costs no tensor operation in the first round, and lanes of different shapes
    broadcast as late as possible.

    Args:
        c0: Lane 0 of the counter, a word or a tensor of words, as are lanes 1 to 3.
        c1: Lane 1; only the low 32 bits of this lane and of lane 3 are read.
        c2: Lane 2.
        c3: Lane 3.
        k0: Lane 0 of the key; only its low 32 bits are read.
        k1: Lane 1, likewise.
    """
    for key0, key1 in zip(_round_keys(k0, KEY_STEPS[0]), _round_keys(k1, KEY_STEPS[1]), strict=True):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0 = (high1 ^ (c1 ^ key0)) & WORD
        c2 = (high0 ^ (c3 ^ key1)) & WORD
        c1, c3 = low1, low0
    return c0, c1 & WORD, c2, c3 & WORD  # type: ignore[return-value]


def _round_keys(lane: Tensor, step: int) -> tuple[Tensor, ...]:
    """Return the key lane's word for each round; the mask of the round removes the carry above 32 bits."""
    steps = torch.arange(0, ROUNDS * step, step, dtype=torch.int64, device=lane.device)
    return (lane.unsqueeze(-1) + steps).unbind(-1)


def _multiply(word: Tensor | int, multiplier: int) -> tuple[Tensor | int, Tensor | int]:
    """Return the high and low half of a product, correct only in their low 32 bits; a round masks them at its end."""
    product = word * multiplier
    if isinstance(product, int):  # may exceed 2**63, which tensor operations do not accept
        return product >> 32, product & WORD
    return product >> 32, product


def philox_on_host(seeds: Sequence[int], offsets: Sequence[int], blocks: int) -> tuple[int, int, int, int]:
    """Return the four lanes of blocks 0 to `blocks - 1` of each key, a lane packed in one integer, 64 bits a word.

    Args:
        seeds: Seeds of the keys, read modulo 2**64.
        offsets: Offsets of the keys, likewise.
        blocks: Number of blocks of each key.
    """
    ones, numbers = _ones_and_numbers(len(seeds), blocks)
    mask = ones * WORD
    seed, offset = packed(seeds, blocks), packed(offsets, blocks)
    position = (offset & mask) + numbers
    k0, k1 = seed & mask, (seed >> 32) & mask
    c0, c1, c2, c3 = position & mask, (position >> 32 & mask) + (offset >> 32 & mask), 0, 0
    step0, step1 = (ones * step for step in KEY_STEPS)
    for _ in range(ROUNDS):
        # Lanes 1 and 3 and the key are correct only in their low 32 bits: the masks below drop the rest.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) ^ c1 ^ k0) & mask, product1
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & mask, product0
        k0 += step0
        k1 += step1
    return c0, c1 & mask, c2, c3 & mask


def packed(numbers: Sequence[int], times: int) -> int:
    """Return one integer that holds each number `times` times, in 64 bits each, the first in the lowest."""
    data = struct.pack(f"<{len(numbers)}Q", *[number & (1 << 64) - 1 for number in numbers])
    if len(numbers) == 1:
        data *= times
    elif times != 1:
        data = b"".join([data[start : start + 8] * times for start in range(0, len(data), 8)])
    return int.from_bytes(data, "little")


@lru_cache(maxsize=256)
def _ones_and_numbers(num_keys: int, blocks: int) -> tuple[int, int]:
    """Return ones and the numbers 0 to `blocks - 1`, packed, for each key."""
    return packed([1], num_keys * blocks), packed([*range(blocks)] * num_keys, 1)
