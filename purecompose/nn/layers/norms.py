"""Normalisations with the statistics of parts of a batch, and in half precision where the network computes in it.

Under autocast torch runs layer and group normalisation in float32. The layers here compute in the dtype that autocast
uses for matrix products; their sums are still in float32. Their weights have the same names and shapes as in
the layers that they replace.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from purecompose._support.checks import check_whole, shown
from purecompose.nn.keyed.draws import apart
from purecompose.nn.layers._forms import Wrapping, is_plain, recast


_KINDS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


def check_momentum(batchnorm: _BatchNorm, where: str) -> None:
    """Reject running statistics that are means over all batches instead of exponential averages."""
    if batchnorm.momentum is None and batchnorm.track_running_stats:
        raise ValueError(
            f"{where}: expected a batch normalisation with a momentum, got momentum=None (a mean over all batches); "
            "give it one, such as 0.1"
        )


def is_known(module: nn.Module) -> bool:
    """Return whether this is torch's batch normalisation, or timm's with an activation after it."""
    return is_plain(module, _BatchNorm) or _has_act(module)


def _has_act(module: nn.Module) -> bool:
    """Return whether this is timm's act(drop(batchnorm(x))), found by name, since timm need not be installed."""
    wanted = ("timm.layers.norm_act", "BatchNormAct2d")
    kind = next((kind for kind in type(module).__mro__ if (kind.__module__, kind.__qualname__) == wanted), None)
    return kind is not None and is_plain(module, kind)


class GhostBatchNorm(Wrapping):
    """A batch normalisation that splits a batch into ceil(B / g) parts, whose sizes differ by at most one example.

    When the batch's own statistics are used, each part is normalised by its own, and the running ones are updated with
    momentum / parts for each part, in order. When running statistics are used, it is the wrapped batch normalisation,
    whose public attributes, such as `weight` and `num_features`, can be read here, too.

    Attributes:
        batchnorm: The given layer.
        ghost_batch_size: g, the greatest number of examples that are normalised together.

    Raises:
        TypeError: The layer is neither an `nn.BatchNorm1d`, `2d` or `3d` nor timm's `BatchNormAct2d`; or it has its own
            forward, hooks or parametrized tensors.
        ValueError: The size is below 1; or the layer has `momentum=None` and running statistics, which are then means
            over all batches.

    Example:
        >>> GhostBatchNorm(nn.BatchNorm1d(4), 16)(torch.randn(32, 4)).shape
        torch.Size([32, 4])
    """

    _held = "batchnorm"

    def __init__(self, batchnorm: _BatchNorm, ghost_batch_size: int = 32) -> None:
        super().__init__()
        check_whole(ghost_batch_size, "GhostBatchNorm: ghost_batch_size", 1)
        if not isinstance(batchnorm, _KINDS) or not is_known(batchnorm):
            raise TypeError(
                "GhostBatchNorm: expected an nn.BatchNorm1d, 2d or 3d without an overridden forward, hooks or "
                f"parametrized tensors, got {shown(batchnorm)}"
            )
        check_momentum(batchnorm, "GhostBatchNorm")
        self.batchnorm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d = batchnorm
        self.ghost_batch_size: int = ghost_batch_size
        self._has_act = _has_act(batchnorm)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, in the same shape."""
        if torch.compiler.is_dynamo_compiling():  # it cannot trace the scope, and no process shares a batch in it
            return self._normalised(input)
        with apart():
            return self._normalised(input)

    def _normalised(self, input: Tensor) -> Tensor:
        norm: Any = self.batchnorm
        num_parts = -(-input.shape[0] // self.ghost_batch_size)
        has_own = norm.training or norm.running_mean is None
        if not has_own or num_parts < 2:
            return norm(input)
        norm._check_input_dim(input)
        mean, variance, step = None, None, 0.0
        if norm.training and norm.track_running_stats:
            assert norm.momentum is not None  # __init__ has checked it
            mean, variance, step = norm.running_mean, norm.running_var, norm.momentum / num_parts
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(num_parts)
        parts = input.tensor_split(num_parts)
        output = torch.cat(
            [F.batch_norm(part, mean, variance, norm.weight, norm.bias, True, step, norm.eps) for part in parts]
        )
        return norm.act(norm.drop(output)) if self._has_act else output

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"ghost_batch_size={self.ghost_batch_size}"


class LowPrecisionLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that computes in autocast's dtype if autocast is on; otherwise plain `nn.LayerNorm`.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LowPrecisionLayerNorm(8)(torch.ones(2, 8)).dtype
        torch.bfloat16
    """

    @classmethod
    def of(cls, norm: nn.LayerNorm) -> "LowPrecisionLayerNorm":
        """Return a layer with the attributes of `norm`, including those of a subclass, and the same `Parameter`s."""
        return recast(norm, cls)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., normalized_shape) to the same shape."""
        dtype = _low(input)
        if dtype is None:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _as(self.weight, dtype), _as(self.bias, dtype)
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


class LowPrecisionGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` that computes in autocast's dtype if autocast is on; otherwise plain `nn.GroupNorm`.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LowPrecisionGroupNorm(2, 8)(torch.ones(2, 8)).dtype
        torch.bfloat16
    """

    @classmethod
    def of(cls, norm: nn.GroupNorm) -> "LowPrecisionGroupNorm":
        """Return a layer with the attributes of `norm`, including those of a subclass, and the same `Parameter`s."""
        return recast(norm, cls)

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, C, ...) to the same shape."""
        dtype = _low(input)
        if dtype is None:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _as(self.weight, dtype), _as(self.bias, dtype)
            return F.group_norm(input.to(dtype), self.num_groups, weight, bias, self.eps)


def _low(input: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast would use to multiply the input; `None` if it is off, and for float64."""
    kind = input.device.type
    if input.dtype is torch.float64 or not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
