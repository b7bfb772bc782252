"""Replacements for kernels of torch that lack derivatives, batching rules or tracing, or know one process only.

Batch normalisation over a batch of which several processes compute a part each adds up two numbers for each channel,
forward and backward. Attention of short sequences in half precision stores the attention weights: torch's fused kernel
for the CPU does not, and its products are too small to be efficient there.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from purecompose import tree
from purecompose._support.contexts import NOTHING, together
from purecompose._support.device import local, without_onednn
from purecompose._support.internals import is_fake, is_transforming
from purecompose.nn.differentiable import normalize, plain_operations, replaces_functions, wants_plain
from purecompose.nn.keyed.draws import shared_batch
from purecompose.nn.keyed.functions import past_dispatch
from purecompose.nn.skeleton import Skeleton


def kernels(
    params: Mapping[str, Tensor], inputs: Any, narrow: torch.dtype | None, device: str, *, skeleton: Skeleton
) -> AbstractContextManager[Any]:
    """Return a scope that replaces those of torch's kernels that do not work, or are slow, as the network now runs:
    under function transforms, traced, or plainly.
    """
    plain = plain_operations() if wants_plain(params, inputs) else NOTHING
    cumulative = _CumulativeNorms() if skeleton.has_cumulative_norms else NOTHING
    if is_transforming():
        narrowed = NOTHING if narrow is None else _Attention(narrow, device)
        norms = {} if narrow is None else dict.fromkeys(_NORMS, functools.partial(_widened, narrow))
        return together(plain, sdpa_kernel(SDPBackend.MATH), _Replacing(_TRANSFORMED | norms), narrowed, cumulative)
    is_slow = skeleton.may_attend and (device, narrow) in _ATTENTION
    attention = _Attention(narrow, device, by_products=True) if narrow is not None and is_slow else NOTHING
    shares = skeleton.has_batch_norms and shared_batch() is not None
    batch_norms = _Replacing({F.batch_norm: _batch_norm}) if shares else NOTHING
    if params and type(first := next(iter(params.values()))) is not Tensor and is_fake(local(first)):
        return together(_Replacing(_TRACED), batch_norms, attention, cumulative)
    group_norms = _Replacing(_OF_DATA) if skeleton.has_group_norms and torch.is_grad_enabled() else NOTHING
    return together(plain, group_norms, batch_norms, attention)


class _Replacing(TorchFunctionMode):
    """Mode that calls `handler(func, *args, **kwargs)` in place of functions."""

    def __init__(self, handlers: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._handlers = handlers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        return func(*args, **kwargs or {}) if handler is None else handler(func, *args, **kwargs or {})


_ATTENTION = {("cpu", torch.bfloat16): torch.float32}
"""Dtype of scaled dot product attention by device and dtype of autocast, where another than autocast's is faster.

`benchmarks/bf16.py` measures it. On an EPYC with avx512_bf16, bfloat16 takes 1.1 to 1.3 of float32's time forward and
1.4 to 5.7 backward; on a Xeon with AMX a backward call took 6.4 ms instead of 0.9. Small products, layer norm and
softmax are slower too, but by tens of microseconds. `short_attention` is faster than both.
"""


def _normalize(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Normalise into `out=`, as in spectral norm's power iteration, which has no batching rule."""
    return func(*args, **kwargs) if replaces_functions() else normalize(*args, **kwargs)


def _recurrent(func: Any, inputs: Tensor, hidden: Any, *rest: Any) -> Any:
    """Call a recurrent function with a state that is mapped by `vmap` as its inputs are.

    torch adds products of the inputs in place to those of the state, which for initial zeros are too small.
    """
    if isinstance(hidden, Tensor) and not hidden.is_floating_point():  # the batch sizes of packed sequences
        return func(inputs, hidden, *rest)
    zero = torch.zeros_like(inputs).sum()
    return func(inputs, tree.map(lambda part: part + zero.to(part.dtype), hidden), *rest)


def _group_norm_of_data(func: Any, input: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute group normalisation of inputs without gradient (images, or outputs of frozen layers) in the contiguous
    memory format.

    In channels last, torch's backward pass writes the gradient of such an input to unallocated memory, and the
    process crashes (torch 2.13, CPU).
    """
    return func(input if input.requires_grad else input.contiguous(), *args, **kwargs)


def _group_norm_traced(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute group normalisation of a single example in the contiguous memory format.

    In channels last its result has other strides when traced, so that the graph would contain views that the real
    result does not allow.
    """
    return func(input.contiguous() if input.shape[0] == 1 else input, *args, **kwargs)


def _lstm_traced(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an LSTM in plain operations, since the backward pass of oneDNN's lacks a workspace when traced."""
    with without_onednn():
        return func(*args, **kwargs)


def _mask_is_needed(func: Any, mask: Tensor) -> Any:
    """Answer a transformer of torch or transformers that reads its mask, which has no numbers now: False.

    torch asks if the mask is the causal one, transformers if it hides no padding, to choose a faster kernel. The answer
    False is always right: the mask is then applied as it is.
    """
    asks = any(
        frame.f_code is _DETECTS_CAUSAL_MASK
        or (frame.f_code.co_name in _IGNORES_MASK and frame.f_globals["__name__"] == "transformers.masking_utils")
        for frame, _ in traceback.walk_stack(None)
    )
    return False if asks else func(mask)


_DETECTS_CAUSAL_MASK = torch.nn.modules.transformer._detect_is_causal_mask.__code__
_IGNORES_MASK = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")  # in transformers.masking_utils


_OF_DATA = {F.group_norm: _group_norm_of_data}
_TRACED = {Tensor.__bool__: _mask_is_needed, F.group_norm: _group_norm_traced, torch.lstm: _lstm_traced}
_CELLS = (torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.lstm_cell)
_LAYERS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_TRANSFORMED = {
    F.normalize: _normalize,
    Tensor.__bool__: _mask_is_needed,
    **dict.fromkeys((*_LAYERS, *_CELLS), _recurrent),
}


class _CumulativeNorms(TorchFunctionMode):
    """Mode that computes the mean over all batches, of batch normalisation with `momentum=None`, by tensor operations.

    torch reads the factor of the running statistics, 1 / count, as a number, which tensors do not have here.
    """

    _count: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func is Tensor.__float__ or func is Tensor.item
        if is_read and any(f.f_code in _COUNTING for f, _ in traceback.walk_stack(sys._getframe())):
            self._count = args[0]
            return 1.0  # with this factor, the running statistics become those of the batch
        if func is not F.batch_norm or self._count is None:
            return func(*args, **kwargs or {})
        count, self._count = self._count, None
        of_batch = [running.clone() for running in args[1:3]]
        result = func(args[0], *of_batch, *args[3:], **kwargs or {})
        with torch.no_grad():
            for running, new in zip(args[1:3], of_batch, strict=True):
                running += (new - running) / count
        return result


_COUNTING = [norm.forward.__code__ for norm in (torch.nn.modules.batchnorm._BatchNorm, torch.nn.SyncBatchNorm)]

_NORMS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)


def _widened(narrow: torch.dtype, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a norm, which under transforms takes no half-precision inputs with float32 statistics."""
    others = (other for other in (*args, *kwargs.values()) if isinstance(other, Tensor))
    if input.dtype is narrow and any(other.dtype is not narrow for other in others):
        return func(input.float(), *args, **kwargs).to(narrow)
    return func(input, *args, **kwargs)


class _Attention(TorchFunctionMode):
    """Mode that runs attention in the dtype of `_ATTENTION`, or autocast's, and returns the result in autocast's.

    With `by_products` short sequences have products in autocast's dtype instead. Under transforms it is needed for any
    dtype: torch.func.grad records the operations of plain attention with the dtypes from before the cast.
    """

    def __init__(self, narrow: torch.dtype, device: str, *, by_products: bool = False) -> None:
        super().__init__()
        self._narrow, self._device, self._by_products = narrow, device, by_products
        self._dtype = _ATTENTION.get((device, narrow), narrow)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:  # a mode is off inside its own handler
                return past_dispatch(func)(*args, **kwargs)
        is_attention = func is F.scaled_dot_product_attention
        if not is_attention or not torch.is_autocast_enabled(self._device):
            return func(*args, **kwargs)
        with torch.autocast(self._device, enabled=False):
            given: dict[str, Any] = dict.fromkeys(("attn_mask", "dropout_p", "enable_gqa"))
            given |= dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            given |= kwargs
            mask, dropout, groups = (given.pop(name) for name in ("attn_mask", "dropout_p", "enable_gqa"))
            if self._by_products and mask is None and not dropout and not groups:
                if (result := short_attention(self._narrow, **given)) is not None:
                    return result
            result = func(*map(self._cast, args), **{name: self._cast(value) for name, value in kwargs.items()})
            return result.to(self._narrow) if result.dtype is self._dtype else result

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(self._dtype) if is_float else value


MAX_LENGTH = 256
"""The greatest number of queries and of keys. Up to it products take 0.44 to 0.63 of the kernel's time in float32
forward, and 0.33 to 0.37 backward (`benchmarks/bf16.py`, EPYC with avx512_bf16)."""


def short_attention(
    dtype: torch.dtype,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor | None:
    """Return `F.scaled_dot_product_attention` in bfloat16 or float16, its dimensions ordered in memory as torch's
    kernel does; `None` for long sequences and for tensors not of a floating dtype up to float32.

    Scores and weights are rounded to the dtype; the softmax is computed in float32.
    """
    tensors = (query, key, value)
    if any(x.is_nested or not x.is_floating_point() or x.dtype is torch.float64 for x in tensors):
        return None
    batch_shape, (num_queries, width), num_keys = query.shape[:-2], query.shape[-2:], key.shape[-2]
    if not batch_shape or max(num_queries, num_keys) > MAX_LENGTH or not query.numel() or not value.numel():
        return None
    if key.shape[:-2] != batch_shape or value.shape[:-2] != batch_shape:
        return None
    are_heads_inside = query.ndim == 4 and query.stride(1) < query.stride(2)  # a view of (N, L, H, D)
    query, key, value = (x.to(dtype).flatten(0, -3) for x in tensors)
    bias = query.new_zeros(())
    if is_causal:
        bias = query.new_full((num_queries, num_keys), float("-inf")).triu(1)
    scores = torch.baddbmm(bias, query, key.mT, alpha=width**-0.5 if scale is None else scale)
    result = torch.bmm(scores.softmax(-1), value).unflatten(0, batch_shape)
    return result.transpose(1, 2).contiguous().transpose(1, 2) if are_heads_inside else result


def _batch_norm(
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return what `torch.nn.functional.batch_norm` returns for the whole batch; running statistics are updated.

    `shared` is the `core.ranks.SharedPart` of the processes that share the batch.
    """
    shared = shared_batch()  # none for parts that are normalised on their own
    if not training or shared is None:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    wide = input if input.dtype == torch.float64 else input.float()
    mean, variance, count = _statistics(wide.detach(), shared, running_mean)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * count / (count - 1)).to(running_var.dtype), momentum)
    normed = _Normalised.apply(wide, mean, torch.rsqrt(variance + eps), count, shared)
    shape = (1, -1, *[1] * (input.ndim - 2))
    normed = normed if weight is None else normed * weight.view(shape)
    normed = normed if bias is None else normed + bias.view(shape)
    return normed.to(input.dtype)


def _statistics(values: Tensor, shared: Any, near: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of each channel over all processes, (C,), and the number of values, 0-d.

    Args:
        near: Values near the means, the same on all processes: sums of squares around them lose few digits.
    """
    num_channels = values.shape[1]
    number = 0 if shared.is_empty else values.numel() // num_channels
    variance, mean = (part.double() for part in torch.var_mean(values, _all_but_channels(values), correction=0))
    near = torch.zeros_like(mean) if near is None else near.detach().double()
    count = torch.full((1,), number, dtype=torch.float64, device=values.device)
    sums = shared.sum(torch.cat([number * (mean - near), number * (variance + (mean - near).square()), count]))
    total = sums[-1]
    shift, square = (sums[:-1] / total).view(2, num_channels)
    variance = (square - shift.square()).clamp(min=0)
    return (near + shift).to(values.dtype), variance.to(values.dtype), total.to(values.dtype)


def _all_but_channels(values: Tensor) -> list[int]:
    return [0, *range(2, values.ndim)]


class _Normalised(torch.autograd.Function):
    """Inputs normalised by statistics that depend on the inputs of all processes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mean: Tensor, scale: Tensor, count: Tensor, shared: Any) -> Tensor:
        shape = (1, -1, *[1] * (values.ndim - 2))
        normed = (values - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normed, scale, count)
        ctx.shared, ctx.shape = shared, shape
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (normed, scale, count) = grads, ctx.saved_tensors
        dims = _all_but_channels(grad)
        share = ctx.shared.gradient_share()
        grad = ctx.shared.counted(grad)
        sums = ctx.shared.sum(share * torch.cat([grad.sum(dims), (grad * normed).sum(dims)]))
        # Gradients are multiplied by this process's share afterwards.
        by_sum, by_product = (part.view(ctx.shape) for part in (sums / (share * count)).chunk(2))
        return (grad - by_sum - normed * by_product) * scale.view(ctx.shape), None, None, None, None
