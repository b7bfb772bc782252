"""Functions of torch whose gradients cannot be differentiated, replaced where a gradient is differentiated again.

torch's fused backward passes take statistics of the forward pass (means, deviations, norms) for constants, so that
their derivatives are wrong: the third one of normalisations, the second one of weight normalisation (torch 2.13).
Others are missing. Plain operations have all of them, and cost more time and memory.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from purecompose import batch as batches
from purecompose._support.contexts import during
from purecompose._support.internals import graph_of, is_tracked, is_transforming, levels


_OWN: ContextVar[str | None] = ContextVar("own_levels", default=None)
"""In the gradient of a step that is not differentiated: its `levels`, that of the gradient included. `_PLAIN` where
functions are replaced; otherwise `None`."""
_PLAIN = "plain"
T = TypeVar("T")


def wants_plain(*given: Any) -> bool:
    """Return whether functions of these tensors are to be replaced, because they may be differentiated twice or more.

    A step knows how often it differentiates them. Outside of it a graph is recorded for the caller's own derivatives.
    """
    own = _OWN.get()
    if own == _PLAIN:
        return False
    if is_transforming() and set(levels()[len(own or "") :]) - {"v"}:
        return True
    return own is None and torch.is_grad_enabled() and any(map(is_tracked, batches.tensors(given)))


def is_in_gradient() -> bool:
    """Return whether the caller is in the gradient of a step, or where functions are replaced."""
    return _OWN.get() is not None


def replaces_functions() -> bool:
    """Return whether functions are replaced around the caller."""
    return _OWN.get() == _PLAIN


class Once:
    """Context manager around a step's gradient that is not differentiated itself."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _OWN.set(levels() + "g" if is_transforming() else "")

    def __exit__(self, *error: Any) -> None:
        _OWN.reset(self._token)


@contextmanager
def plain_operations(*, refuses: bool = False) -> Iterator[None]:
    """Return a scope in which functions whose gradients cannot be differentiated are replaced by plain operations.

    Args:
        refuses: True to raise an error for functions whose derivatives would be wrong, as for a step whose parameters
            depend on what it is differentiated by. Torch raises errors for derivatives that it lacks.
    """
    # torch's fused attention has no second derivative.
    with during(_OWN, _PLAIN), sdpa_kernel(SDPBackend.MATH), _Plain(refuses):
        yield


class OwnDerivatives:
    """The derivatives that user code takes by `torch.autograd` within a function, such as a network or a loss."""

    need_plain: bool = False
    """True if a watched call has differentiated the gradient of a function that is to be replaced."""

    def run(self, function: Callable[..., T], *arguments: Any, is_watched: bool) -> T:
        """Return the result of the function, computed with plain operations if its derivatives need them."""
        if not (self.need_plain or is_watched):
            return function(*arguments)
        try:
            with plain_operations() if self.need_plain else _Watching():
                return function(*arguments)
        except _WrongDerivativeError:
            if is_transforming():
                raise
            self.need_plain = True
        return self.run(function, *arguments, is_watched=False)


class _WrongDerivativeError(RuntimeError):
    """A gradient is about to be differentiated that torch cannot differentiate."""


class _Watching(TorchFunctionMode):
    """Mode that raises an `_WrongDerivativeError` before `torch.autograd` differentiates such a gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, Tensor.backward) and kwargs.get("create_graph"):
            given = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            if found := [node.name() for node in graph_of(*given) if _UNSUPPORTED.search(node.name())]:
                raise _WrongDerivativeError(
                    f"torch cannot differentiate {found[0]}: in a population, take inner derivatives by "
                    "torch.func.grad, or step the members one after the other (unstack_states)"
                )
        return func(*args, **kwargs)


_UNSUPPORTED = re.compile("Norm.*BackwardBackward|WeightNorm|ScaledDotProduct|Cdist|Hardsigmoid|linear_cross_entropy")
"""Names of torch's nodes whose own derivatives are wrong or missing."""


class _Plain(TorchFunctionMode):
    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self._refuses = refuses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_iterated = func is F.normalize and kwargs.get("out") is not None
        if self._refuses and (advice := _wrong(func, is_iterated)):
            name = "spectral_norm" if is_iterated else func.__name__
            raise RuntimeError(f"{name} is part of a step that is differentiated, but {advice}")
        return (_REPLACED[func] if func in _REPLACED else func)(*args, **kwargs)


def _wrong(func: Any, is_iterated: bool) -> str | None:
    """Return the remedy for a function whose derivatives are wrong in the way in which the caller is differentiated."""
    derivatives = levels().replace("v", "")
    if is_iterated and ("j" not in derivatives or derivatives.count("g") > 1):
        return (
            "takes the vectors of its power iteration, which depend on the weights, for constants: differentiate by "
            "torch.func.jacfwd, or call .eval() on the layer, which stops the iteration"
        )
    if func in _SOLVERS and "j" in derivatives[1:]:
        return (
            "torch's derivatives of it are wrong where forward mode is inside another derivative: use "
            "torch.func.hessian, or gradients of gradients"
        )
    return None


def _normalized(x: Tensor, dims: Sequence[int], eps: float, shape: Sequence[int], *learned: Tensor | None) -> Tensor:
    """Return a tensor of mean 0 and variance 1 over dimensions, times a weight and plus a bias of a shape."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    centred = wide - wide.mean(tuple(dims), keepdim=True)
    weight, bias = (None if tensor is None else tensor.view(*shape) for tensor in learned)
    normed = (centred * (centred.square().mean(tuple(dims), keepdim=True) + eps).rsqrt()).to(x.dtype)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    return _normalized(input, range(-len(normalized_shape), 0), eps, normalized_shape, weight, bias)


def _by_channel(func: Callable[..., Tensor], first: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return batch or instance normalisation; it is replaced where it uses statistics of the inputs."""
    signature = inspect.signature(func)

    def norm(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        x, mean, var, weight, bias, uses_inputs, momentum, eps = given.arguments.values()
        if not uses_inputs:
            return func(*args, **kwargs)
        with torch.no_grad():  # checks the shapes, and updates the running statistics
            func(x, mean, var, None, None, uses_inputs, momentum, eps)
        return _normalized(x, (*first, *range(2, x.ndim)), eps, (-1, *[1] * (x.ndim - 2)), weight, bias)

    return norm


def _reordered(norm: Callable[..., Tensor], flag: str) -> Callable[..., Tensor]:
    """Return a norm with the arguments of torch's own function, which `nn.functional` calls."""
    names = ("input", "weight", "bias", "running_mean", "running_var", flag, "momentum", "eps")
    return lambda *args, cudnn_enabled=None, **kwargs: norm(**dict(zip(names, args, strict=False)), **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    others = [other for other in range(v.ndim) if other != dim]
    return v * (g / v.square().sum(others, keepdim=dim != -1).sqrt())  # -1: one norm for the whole tensor


def normalize(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Return `F.normalize`, which has neither a derivative nor a batching rule with `out`."""
    normed = F.normalize(*args, **kwargs)
    return normed if out is None else out.copy_(normed)


def _mse_loss(input: Tensor, target: Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> Tensor:
    if reduction == "none" or args or any(value is not None for value in kwargs.values()):
        return F.mse_loss(input, target, *args, reduction=reduction, **kwargs)
    return getattr((input - target).square(), reduction)()


_batch_norm, _instance_norm = _by_channel(F.batch_norm, (0,)), _by_channel(F.instance_norm, ())
_REPLACED: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _reordered(_batch_norm, "training"),
    F.instance_norm: _instance_norm,
    torch.instance_norm: _reordered(_instance_norm, "use_input_stats"),
    torch._weight_norm: _weight_norm,  # pyright: ignore[reportPrivateImportUsage]
    F.normalize: normalize,
    F.hardsigmoid: lambda input, inplace=False: F.relu6(input + 3) / 6,
    F.mse_loss: _mse_loss,  # forward mode cannot differentiate its gradient
    torch.cdist: lambda x1, x2, p=2.0, compute_mode=None: torch.linalg.vector_norm(
        x1.unsqueeze(-2) - x2.unsqueeze(-3), ord=p, dim=-1
    ),
}
if hasattr(F, "linear_cross_entropy"):  # computed in chunks, it lacks second derivatives without a word
    _REPLACED[F.linear_cross_entropy] = lambda *args, **kwargs: F.linear_cross_entropy(
        *args, **{**kwargs, "options": None}
    )

_NAMES = "det logdet slogdet solve solve_ex tensorsolve householder_product eig eigvals".split()
_SOLVERS = frozenset(getattr(place, name) for place in (torch, torch.linalg) for name in _NAMES if hasattr(place, name))
