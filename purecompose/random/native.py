"""torch's own Philox kernels, `torch.func._random`, where the installed torch has them for a device.

That module is private, so everything about it is in this file. Whether it can be used is decided once for each type of
device, by the answers for a few keys: if the operations are missing, or give other bits, draws are computed by tensor
operations instead (`emulation.py`), with the same bits.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from purecompose._support.functorch import plainly
from purecompose.random.emulation import emulated, emulated_keys


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
