"""The numbers of a key, by the fastest of three ways that give the same bits.

torch's kernels where it has them (`native.py`); otherwise Python's integers for a small draw in eager, and tensor
operations for all others (`emulation.py`).

In a traced step a draw is one operation, `purecompose::philox`. It also has a rule for `torch.func.vmap`, which passes
the keys of all members to torch's operations at once; these have no such rule. For CPUs without kernels
`transforms/compilation/rewriting.py` replaces it by tensor operations before Inductor compiles the graph; for GPUs
`transforms/compilation/gpu_draws.py` makes it part of the kernels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake, register_vmap

from purecompose._support.functorch import is_fake, is_plain, is_readable
from purecompose.random.emulation import MOST_ON_HOST, emulated, emulated_keys, keys_on_host, num_blocks, on_host
from purecompose.random.native import filled, has_kernels, next_keys
from purecompose.random.philox import WORD


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
    """Return the key that belongs to `data`: the block at `offset + data` of the key's stream.

    Args:
        key: int64 of shape (2,).
        data: A number in [-2**63, 2**63), or int64 of any shape.

    Returns:
        int64 of shape (2,), or (*data.shape, 2).
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
