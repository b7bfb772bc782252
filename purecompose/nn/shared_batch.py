"""Batch normalisation over a batch of which several processes compute a part each.

Each process computes mean and variance of its own values. From them two numbers for each channel follow. Their sums
over the processes give the statistics of the whole batch, by which all normalise, and which update the running
statistics as in one process. The backward pass adds up two numbers for each channel, too.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from purecompose.nn.keyed.parts import shared_batch


class SharedBatch(Protocol):
    """The processes that share a batch, within a forward and backward pass."""

    is_empty: bool
    """True if this process has no examples, and what it computes does not count."""

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over processes."""
        ...

    def gradient_share(self) -> Tensor:
        """Return the number by which this process's gradients are multiplied before they are summed, 0-d, not 0."""
        ...

    def counted(self, grad: Tensor) -> Tensor:
        """Return a gradient, without what comes from a loss that does not count."""
        ...


class SharedBatchNorms(TorchFunctionMode):
    """Mode in which batch normalisation in training mode uses the statistics of all processes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shared = shared_batch()
        if func is not torch.nn.functional.batch_norm or shared is None:
            return func(*args, **kwargs or {})
        return _batch_norm(func, shared, *args, **kwargs or {})


def _batch_norm(
    func: Any,
    shared: SharedBatch,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return what `torch.nn.functional.batch_norm` returns for the whole batch; running statistics are updated."""
    if not training:
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


def _statistics(values: Tensor, shared: SharedBatch, near: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of each channel over all processes, (C,), and the number of values, 0-d.

    Args:
        values: This process's values.
        shared: The processes.
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
    def forward(ctx: Any, values: Tensor, mean: Tensor, scale: Tensor, count: Tensor, shared: SharedBatch) -> Tensor:
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
