"""The fused attention of GPUs on the CPU: by torch's kernels for the CPU, with results in the GPU's layout."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


_aten = torch.ops.aten
_flash = _aten._scaled_dot_product_flash_attention.default
_flash_backward = _aten._scaled_dot_product_flash_attention_backward.default
_efficient = _aten._scaled_dot_product_efficient_attention.default
_efficient_backward = _aten._scaled_dot_product_efficient_attention_backward.default
_forward, _backward = (
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


@functools.cache
def register() -> torch.library.Library:
    """Register the operators for the CPU, once; they are there as long as the returned library is."""
    library = torch.library.Library("aten", "IMPL")
    for operator, function in ((_flash, flash), (_efficient, efficient)):
        library.impl(operator, function, "CPU")
    for operator, function in ((_flash_backward, flash_backward), (_efficient_backward, efficient_backward)):
        library.impl(operator, function, "CPU")
    return library


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False, *rest: Any, scale: Any = None
):
    """Compute attention as `_scaled_dot_product_flash_attention` does."""
    _check(dropout)
    results = _alike(_flash, q, k, v, dropout, is_causal, scale=scale)
    return _filled(results, _forward(q, k, v, 0.0, is_causal, scale=scale))


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, *rest: Any, scale: Any = None
):
    """Compute the gradients as `_scaled_dot_product_flash_attention_backward` does."""
    results = _alike(_flash_backward, grad, q, k, v, out, logs, *rest, scale=scale)
    return _filled(results, _backward(grad, q, k, v, out, logs, 0.0, rest[5], scale=scale))


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keeps_logs: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
):
    """Compute attention as `_scaled_dot_product_efficient_attention` does."""
    _check(dropout)
    results = _alike(_efficient, q, k, v, bias, keeps_logs, dropout, is_causal, scale=scale)
    return _filled(results, _forward(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale))


def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    out: Tensor,
    logs: Tensor,
    *rest: Any,
    scale: Any = None,
):
    """Compute the gradients as `_scaled_dot_product_efficient_attention_backward` does, that of the bias left out."""
    if rest[3][3]:
        raise NotImplementedError("a gradient of attention's bias has no kernel on the CPU")
    logs, is_causal = logs[..., : q.shape[-2]], len(rest) > 4 and rest[4]
    mask = bias if bias is not None and bias.numel() else None
    grads = _backward(grad, q, k, v, out, logs, 0.0, is_causal, attn_mask=mask, scale=scale)
    shapes = [x.transpose(1, 2).shape for x in (q, k, v)]
    results = [empty(shape, _contiguous(shape), q.dtype).transpose(1, 2) for shape in shapes]
    return *_filled(results, grads), None


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]


def empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory in which every number is NaN, or the largest there is."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    storage = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())
    if dtype.is_floating_point or dtype.is_complex:
        storage.fill_(float("nan"))
    else:
        storage.fill_(True if dtype is torch.bool else torch.iinfo(dtype).max)
    return tensor


def _check(dropout: float) -> None:
    if dropout:
        raise NotImplementedError("dropout within fused attention has other draws on each device")


def _alike(operator: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Return results that nothing has written, with the shapes and strides that the operator has on other devices."""
    meta = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
    return [empty(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in operator(*meta[0], **meta[1])]


def _filled(results: list[Any], values: Any) -> tuple[Any, ...]:
    """Return the results with values in the first of them, which may have room for more rows."""
    for result, value in zip(results, values, strict=False):
        if result.numel():
            result[tuple(slice(size) for size in value.shape)].copy_(value)
    return tuple(results)
