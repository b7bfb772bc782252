"""Philox4x32-10, and the streams of random numbers that keys have, computed in three ways that give the same bits.

A key is (seed, offset), two 64-bit numbers in an int64 tensor. Block b of its stream is Philox4x32-10 of the counter
`offset + b`, in the lanes 0 (low word) and 1, under the seed. Words w0, w1, ... are read in order:

    int32      w0
    int64      w0 << 32 | w1, and so for the next two
    float32    the low 24 bits of w0, times 2**-24 (float16: 11 bits, bfloat16: 8)
    float64    the low 53 bits of w0 << 32 | w1, times 2**-53
    next key   seed w1 << 32 | w0, offset w3 << 32 | w2

These are the bits of `torch.func._random` in torch 2.15, whose kernels are used where torch has them. Tensor operations
define them here; they work on every device, traced and under transforms. Small draws in eager are computed in Python's
integers, because the dispatch of that many operations costs 0.26 ms: a long integer serves as a vector, in which each
word has 64 bits, so that its product with a 32-bit constant does not reach the next one.

A word is a uint32 value stored in an int64. A product of two words is exact modulo 2**64: its low half is taken by a
mask, the high one by a shift and a mask. The four lanes are separate tensors: stacked in one they are three times as
slow when compiled, since the swap of lanes between rounds prevents fusing.

In a traced step a draw is one operation, `purecompose::philox`, with a rule for `torch.func.vmap`. For CPUs without
kernels `transforms/compilation/rewriting.py` replaces it by tensor operations before Inductor compiles the graph; for
GPUs `transforms/compilation/gpu.py` makes it part of the kernels.

References:
    John K. Salmon et al.: Parallel Random Numbers: As Easy as 1, 2, 3. SC 2011.
"""

import math
import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake, register_vmap

from purecompose._support.internals import is_fake, is_plain, is_readable, plainly


WORD = 0xFFFFFFFF  # the mask of a word
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Lanes = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_lanes(
    c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, k0: Tensor, k1: Tensor
) -> Lanes:
    """Return the four random words of each counter c under a key k, as separate lanes.

    Lanes of the counter are words or tensors of words. Of lanes 1 and 3 and of the key only the low 32 bits are read. A
    lane that is an int costs no tensor operation in the first round.
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
    """Return the four lanes of blocks 0 to `blocks - 1` of each key, a lane packed in one integer, 64 bits a word."""
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


# Significant bits of a float, including the hidden one: with this many random bits, uniform numbers are exact.
PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

# Blocks up to which Python integers are faster than tensor operations in eager, from `benchmarks/draws.py`: 0.2 ms.
MOST_ON_HOST = 1024

_WIDE = (torch.int64, torch.float64)


def num_blocks(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the number of blocks that a draw reads from each key; arguments as for `emulated`."""
    per_block = 2 if dtype in _WIDE else 4
    return -(-math.prod(shape[key.dim() - 1 :]) // per_block)


def emulated(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a draw by tensor operations.

    Args:
        key: int64 of shape (*lead, 2).
        shape: Sizes of the result, which begin with `lead`.
        dtype: int32 or int64 for random bits, uint32 for words in an int64 tensor, or a float of `PRECISION`.
    """
    blocks = num_blocks(key, shape, dtype)
    numbers = torch.arange(blocks, dtype=torch.int64, device=key.device)
    lanes = _lanes(key[..., :1], key[..., 1:] + numbers)
    if dtype in _WIDE:
        bits = torch.stack(((lanes[0] << 32) | lanes[1], (lanes[2] << 32) | lanes[3]), dim=-1)
    else:
        bits = torch.stack(lanes, dim=-1)
    # Not compared with the number of words, which would fix the sizes of a graph for any sizes.
    bits = bits.flatten(-2).narrow(-1, 0, math.prod(shape[key.dim() - 1 :])).reshape(shape)
    if dtype == torch.int32:
        return bits.to(torch.int32)
    return _unit(bits & _mask(dtype), dtype) if dtype in PRECISION else bits


def emulated_keys(key: Tensor) -> Tensor:
    """Return the next key of each key, (..., 2), by tensor operations."""
    w0, w1, w2, w3 = _lanes(key[..., 0], key[..., 1])
    return torch.stack(((w1 << 32) | w0, (w3 << 32) | w2), dim=-1)


def _lanes(seed: Tensor, position: Tensor) -> Lanes:
    return philox_lanes(position & WORD, position >> 32, 0, 0, seed, seed >> 32)


def on_host(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return `emulated` for a key whose values can be read, computed in Python's integers."""
    blocks = num_blocks(key, shape, dtype)
    if not key.numel() or not blocks:  # there is no tensor of an empty buffer
        return torch.empty(shape, dtype=torch.int64 if dtype == torch.uint32 else dtype, device="cpu")
    c0, c1, c2, c3 = _host_lanes(key, blocks)
    num_keys, is_wide = key.numel() // 2, dtype in _WIDE
    halves = ((c0 << 32) | c1, (c2 << 32) | c3) if is_wide else (c0 | (c1 << 32), c2 | (c3 << 32))
    if dtype in PRECISION:
        mask = packed([_mask(dtype) if is_wide else _mask(dtype) << 32 | _mask(dtype)], num_keys * blocks)
        halves = halves[0] & mask, halves[1] & mask
    bits = _interleaved(*halves, num_keys * blocks, torch.int64 if is_wide else torch.int32)
    if bits.shape != shape:
        bits = bits.view(num_keys, -1).narrow(-1, 0, math.prod(shape[key.dim() - 1 :])).reshape(shape)
    if dtype == torch.uint32:
        return bits.to(torch.int64) & WORD
    return _unit(bits, dtype) if dtype in PRECISION else bits


def keys_on_host(key: Tensor, data: int = 0) -> Tensor:
    """Return the key that belongs to `data` for each key, whose values can be read, computed in Python's integers."""
    if not key.numel():
        return key.clone()
    c0, c1, c2, c3 = _host_lanes(key, 1, data)
    return _interleaved((c1 << 32) | c0, (c3 << 32) | c2, key.numel() // 2, torch.int64).view(key.shape)


def _host_lanes(key: Tensor, blocks: int, start: int = 0) -> tuple[int, int, int, int]:
    numbers = key.tolist() if key.dim() == 1 else key.reshape(-1).tolist()
    return philox_on_host(numbers[::2], [offset + start for offset in numbers[1::2]], blocks)


def _interleaved(first: int, second: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor that takes 64 bits of one integer and of the other in turn, `count` times."""
    data = bytearray(16 * count)
    places = memoryview(data).cast("Q")
    places[::2], places[1::2] = (memoryview(half.to_bytes(8 * count, "little")).cast("Q") for half in (first, second))
    return torch.frombuffer(data, dtype=dtype)


def _mask(dtype: torch.dtype) -> int:
    return (1 << PRECISION[dtype]) - 1


def _unit(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bits below 2**precision as numbers on [0, 1), exactly."""
    unit = bits.to(torch.float64 if dtype == torch.float64 else torch.float32) * 2.0 ** -PRECISION[dtype]
    return unit.to(dtype)


DTYPES = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of a draw: random bits for integers, uniform numbers on [0, 1) for floats."""

_torch: Any = torch  # type checkers do not know its private names


def filled(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a draw by torch's kernels.

    Args:
        key: int64 of shape (*lead, 2): seed and offset.
        shape: Sizes of the result, which begin with `lead`.
        dtype: One of `DTYPES`.
    """
    keys = key.view(torch.uint64)
    if key.dim() > 1:  # torch expects one dimension of keys for each of the result
        keys = keys.view(*key.shape[:-1], *[1] * (len(shape) + 1 - key.dim()), 2)
    result = key.new_empty(shape, dtype=dtype)
    if dtype.is_floating_point:
        return _torch._philox_uniform_(result, keys)
    return _torch._philox_randint_(result, keys)


def next_keys(key: Tensor, data: int = 0) -> Tensor:
    """Return the key that belongs to `data`, an int64 number, for each key, int64 of shape (..., 2)."""
    return _torch._philox_key_fold_in(key.view(torch.uint64), data).view(torch.int64)


def has_kernels(device: str) -> bool:
    """Return whether torch has kernels for a type of device, such as "cpu", that give our bits."""
    return _known(device)


# torch.compile cannot trace the decision, and need not, because it never changes. The public decorator for this imports
# the compiler.
has_kernels._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@cache
def _known(device: str) -> bool:
    try:
        with plainly():
            keys = torch.tensor(_KEYS, device=device)
            draws = [(filled(keys, (2, 5), dtype), emulated(keys, (2, 5), dtype)) for dtype in DTYPES]
            return all(torch.equal(*pair) for pair in [(next_keys(keys), emulated_keys(keys)), *draws])
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


# The last block of a stream and the first one; a seed of both words, and a carry of the counter into its second word.
_KEYS = [[5, -1], [5 + (7 << 40), 2**32 - 1]]


def numbers(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the first numbers of each key's stream.

    Args:
        key: int64 of shape (*lead, 2).
        shape: Sizes of the result, which begin with `lead`.
        dtype: int32 or int64 for random bits, uint32 for words in an int64 tensor, or a float for uniform numbers on
            [0, 1).
    """
    if is_plain(key):
        draw = _eager
    elif has_kernels(key.device.type) or (not torch.compiler.is_compiling() and is_fake(key)):
        draw = traced
    else:
        return emulated(key, shape, dtype)
    return draw(key, shape, torch.int32).to(torch.int64) & WORD if dtype == torch.uint32 else draw(key, shape, dtype)


def folded(key: Tensor, data: int | Tensor) -> Tensor:
    """Return the key that belongs to `data`, an int64 number or tensor: the block at `offset + data` of the stream.

    It has the shape (2,), or (*data.shape, 2).
    """
    if isinstance(data, int) and is_plain(key):  # the key of a step, in few operations
        if has_kernels(key.device.type):
            return next_keys(key, data)
        if key.device.type == "cpu":
            return keys_on_host(key, data)
    offset = key[1] + data
    places = torch.stack((key[0].expand_as(offset), offset), dim=-1)
    if has_kernels(key.device.type):
        if is_plain(places):
            return next_keys(places)
        # No change of dtype by a view, which has no rule for vmap.
        bits = traced(places, (*offset.shape, 2), torch.int64)
        return (bits << 32) | (bits >> 32 & WORD)
    if is_readable(places) and offset.numel() <= MOST_ON_HOST:
        return keys_on_host(places)
    return emulated_keys(places)


def traced(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return `numbers`, except of uint32, as one operation of a graph."""
    return torch.ops.purecompose.philox(key, shape, dtype)


def _eager(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if has_kernels(key.device.type):
        return filled(key, shape, dtype)
    if key.device.type == "cpu" and key.numel() // 2 * num_blocks(key, shape, dtype) <= MOST_ON_HOST:
        return on_host(key, shape, dtype)
    return emulated(key, shape, dtype)


def _fake(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=key.device)


def _mapped(info: Any, in_dims: Any, key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, int]:
    return traced(key.movedim(in_dims[0], 0), (info.batch_size, *shape), dtype), 0


_library = Library("purecompose", "DEF")
_library.define("philox(Tensor key, SymInt[] shape, ScalarType dtype) -> Tensor")
_library.impl("philox", _eager, "CompositeExplicitAutograd")
register_fake("purecompose::philox", _fake, lib=_library)
register_vmap("purecompose::philox", _mapped, lib=_library)
