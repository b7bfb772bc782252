"""Layers that replace others: normalisations, and products of two thinner linear layers or convolutions.

Norms have the statistics of parts of a batch, or compute under autocast in the dtype of matrix products, with sums in
float32, where torch computes in float32. Their weights have the names and shapes of the layers that they replace.
Factorized layers are the closest to the given layer's weight.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from purecompose._support.specs import check_number, check_whole, shown
from purecompose.nn.keyed.draws import apart


M = TypeVar("M", bound=nn.Module)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module computes just what `kind` does with its settings, without side effects.

    This excludes modules whose class or instance has its own forward, and those with hooks or parametrized tensors.
    """
    is_inherited = isinstance(module, kind) and type(module).forward is kind.forward
    return is_inherited and not has_hooks(module) and not parametrize.is_parametrized(module)


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module's forward is that of the class `kind`; hooks are allowed, for changes that keep them."""
    return type(module).forward is kind.forward and "forward" not in vars(module)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call runs more than the class's forward: hooks, or a forward set on the instance."""
    return "forward" in vars(module) or any(getattr(module, table) for table in _HOOKS)


def is_tied(module: nn.Module, root: nn.Module) -> bool:
    """Return whether the module's weight is also a parameter of another module in the network."""
    weight = module._parameters["weight"]
    others = (other for other in root.modules() if other is not module)
    return any(param is weight for other in others for param in other._parameters.values())


def recast(module: nn.Module, kind: type[M]) -> M:
    """Return a module of class `kind` with the same attributes, parameters and submodules, in copied dictionaries."""
    new = kind.__new__(kind)
    new.__dict__ |= {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}
    return new


class Wrapping(nn.Module):
    """A module around another one, whose public attributes can be read here, such as its weight."""

    _held: ClassVar[str]
    """Name of the attribute that holds the other module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):  # special methods, as for copying or printing, must not be forwarded
                raise
            return getattr(super().__getattr__(self._held), name)


def check_latent(latent: Any, where: str) -> float:
    """Return a width as given in a setting: an integer of at least 1, or below 1 a fraction."""
    given = check_number(latent, where, 0, above=True)
    if given > 1 and given != int(given):
        raise ValueError(f"{where}: expected a whole number, or a share below 1, got {shown(latent)}")
    return latent


def latent_size(latent: float, full: int) -> int:
    """Return a width given as a number, or below 1 as a fraction of the full one, rounded down; at least 1."""
    # The small number corrects rounding: 0.29 * 100 is 28.999999999999996.
    return max(1, int(latent if latent >= 1 else latent * full + 1e-9))


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
        rest = mean, variance, norm.weight, norm.bias, True, step, norm.eps
        output = torch.cat([F.batch_norm(part, *rest) for part in input.tensor_split(num_parts)])
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
        return _in_low_precision(self, F.layer_norm, input, self.normalized_shape)


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
        return _in_low_precision(self, F.group_norm, input, self.num_groups)


def _in_low_precision(norm: Any, function: Callable[..., Tensor], input: Tensor, over: Any) -> Tensor:
    """Return the result of one of torch's functions for a norm, in autocast's dtype if autocast is on."""
    dtype = _low(input)
    if dtype is None:
        return function(input, over, norm.weight, norm.bias, norm.eps)
    with torch.autocast(input.device.type, enabled=False):
        weight, bias = (None if one is None else one.to(dtype) for one in (norm.weight, norm.bias))
        return function(input.to(dtype), over, weight, bias, norm.eps)


def _low(input: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast would use to multiply the input; `None` if it is off, and for float64."""
    kind = input.device.type
    if input.dtype is torch.float64 or not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def max_latent(module: nn.Linear | nn.Conv2d) -> int:
    """Return the greatest width between two factors with which they take fewer multiplications than the layer does."""
    out, fan_in = module.weight.shape[0], module.weight[0].numel()
    return math.ceil(fan_in * out / (fan_in + out) - 1)


def split_weight(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return two factors whose product is the closest to a matrix among all of a given rank, by its singular values.

    Args:
        weight: (out, in), floating.
        rank: k, from 1 to min(out, in).

    Returns:
        (k, in) and (out, k), contiguous, each scaled by the square roots of the singular values. If a singular value is
        almost zero, the first factor has a row of the usual norm and only the second is small: if both were zero, they
        would have no gradient and would never train.
    """
    exact = weight.cpu().double() if weight.device.type == "mps" else weight.double()
    left, values, right = torch.linalg.svd(exact, full_matrices=False)
    values = values[:rank]
    is_there = values > 1e-6 * values[0]
    # For a matrix of zeros, the scale is that of a new layer's initial weights.
    usual = values[is_there].sqrt().mean() if is_there.any() else values.new_tensor(3**-0.5)
    scales = torch.where(is_there, values.sqrt(), usual)
    first, second = scales.unsqueeze(1) * right[:rank], left[:, :rank] * (values / scales)
    return first.to(weight).contiguous(), second.to(weight).contiguous()


class _Factorized(nn.Module):
    """A layer and a second one without kernel or stride, whose product is the closest one to a given layer.

    Args:
        first, second: The new layers, without bias and on meta, so that no values are drawn.
    """

    first: Any
    second: Any

    def __init__(self, layer: nn.Linear | nn.Conv2d, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        thin, wide = split_weight(layer.weight.detach().flatten(1), self.first.weight.shape[0])
        is_trained = layer.weight.requires_grad
        self.first.weight = nn.Parameter(thin.view(self.first.weight.shape), is_trained)
        self.second.weight = nn.Parameter(wide.view(self.second.weight.shape), is_trained)
        self.second.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The product of the factors, in the shape of the given layer's weight."""
        return (self.second.weight.flatten(1) @ self.first.weight.flatten(1)).view(-1, *self.first.weight.shape[1:])

    @property
    def bias(self) -> Tensor | None:
        """(out,), or `None`."""
        return self.second.bias

    def forward(self, input: Tensor) -> Tensor:
        """Map an input to the shape of the given layer's output."""
        return self.second(self.first(input))


class FactorizedLinear(_Factorized):
    """Layer from (..., in) to (..., k) to (..., out): the closest approximation of the given layer with rank k.

    `weight` is the factors' product, computed on access.

    Args:
        linear: The layer. Its bias is reused, its weight is read.
        latent_features: k, from 1 to the smaller side of the weight, at which the approximation is exact.

    Attributes:
        first: (in, k), without bias.
        second: (k, out), with the layer's bias.

    Raises:
        ValueError: k is out of range.

    Example:
        >>> linear = nn.Linear(64, 64)
        >>> sum(param.numel() for param in FactorizedLinear(linear, 8).parameters()), linear.weight.numel()
        (1088, 4096)
    """

    def __init__(self, linear: nn.Linear, latent_features: int) -> None:
        _check_rank(linear, latent_features, "FactorizedLinear: latent_features")
        sizes = (linear.in_features, latent_features), (latent_features, linear.out_features)
        first, second = (nn.Linear(*pair, bias=False, device="meta") for pair in sizes)
        super().__init__(linear, first, second)
        self.in_features: int = linear.in_features
        self.out_features: int = linear.out_features

    @property
    def latent_features(self) -> int:
        """k."""
        return self.first.out_features


class FactorizedConv2d(_Factorized):
    """A convolution to k channels and a 1x1 convolution to the original channels: the closest one with rank k.

    It has the public attributes of the given convolution; `weight` is the factors' product, computed on access.

    Args:
        conv: The convolution, with one group. Its bias is reused, its weight is read.
        latent_channels: k, from 1 to the smaller of the number of output channels and the size of a patch, at which
            the approximation is exact.

    Attributes:
        first: (in, k, h, w), without bias, with the given convolution's stride, padding and dilation.
        second: (k, out, 1, 1), with the given convolution's bias.

    Raises:
        NotImplementedError: The convolution has several groups.
        ValueError: k is out of range.

    Example:
        >>> conv = nn.Conv2d(8, 8, 3)
        >>> sum(param.numel() for param in FactorizedConv2d(conv, 2).parameters()), conv.weight.numel()
        (168, 576)
    """

    def __init__(self, conv: nn.Conv2d, latent_channels: int) -> None:
        if conv.groups != 1:
            raise NotImplementedError(f"FactorizedConv2d: expected a convolution with groups=1, got {conv.groups}")
        _check_rank(conv, latent_channels, "FactorizedConv2d: latent_channels")
        names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
        options: dict[str, Any] = {name: getattr(conv, name) for name in names}
        first = nn.Conv2d(conv.in_channels, latent_channels, **options, bias=False, device="meta")
        second = nn.Conv2d(latent_channels, conv.out_channels, 1, bias=False, device="meta")
        super().__init__(conv, first, second)
        for name in ("in_channels", "out_channels", "groups", *names):
            setattr(self, name, getattr(conv, name))

    @property
    def latent_channels(self) -> int:
        """k."""
        return self.first.out_channels


def _check_rank(layer: nn.Linear | nn.Conv2d, rank: Any, where: str) -> None:
    full = min(layer.weight.shape[0], layer.weight[0].numel())
    if not 1 <= rank <= full:
        raise ValueError(f"{where}: expected an int in [1, {full}], got {rank!r} ({type(rank).__name__})")
