"""The draws of a key without torch's kernels: by tensor operations, and on the host for small ones.

A key is (seed, offset), two 64-bit numbers in an int64 tensor. Block b of its stream is Philox4x32-10 of the counter
`offset + b`, in the lanes 0 (low word) and 1, under the seed. Words w0, w1, ... are read in order:

    int32      w0
    int64      w0 << 32 | w1, and so for the next two
    float32    the low 24 bits of w0, times 2**-24 (float16: 11 bits, bfloat16: 8)
    float64    the low 53 bits of w0 << 32 | w1, times 2**-53
    next key   seed w1 << 32 | w0, offset w3 << 32 | w2

These are the bits of torch's own Philox kernels (2.15). The tensor operations work on every device, traced and under
transforms; they define the bits here, and every other path is tested against them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from purecompose.random.philox import WORD, Lanes, packed, philox_lanes, philox_on_host


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
