"""Residual blocks whose branch is left out at random in training.

With a block act(F(x) + S(x)), F its branch and S its shortcut, and the rate p at which the branch is left out:

    "block", in training     act(b F(x) + S(x)), one b for the whole batch, 1 with probability 1 - p
                             where b = 0 and S is the identity: x itself
    "sample", in training    act(b_n F(x)_n + S(x)_n), one b_n for each example
    in evaluation            act((1 - p) F(x) + S(x))

References:
    Gao Huang, Yu Sun, Zhuang Liu, Daniel Sedra, Kilian Weinberger: Deep Networks with Stochastic Depth. ECCV 2016.
    https://arxiv.org/abs/1603.09382
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from purecompose._checks import check_number, shown
from purecompose.layers._forms import has_hooks


__all__ = ["Residual", "StochasticDepth", "residual"]

# The blocks of torchvision's residual networks, and of those that took them for a model.
_STEPS = (
    ("conv1", "bn1", "relu", "conv2", "bn2", "relu", "conv3", "bn3"),
    ("conv1", "bn1", "relu", "conv2", "bn2"),
)


class Residual(NamedTuple):
    """What a block act(F(x) + S(x)) consists of."""

    branch: tuple[nn.Module, ...]
    """F, one after the other."""
    shortcut: nn.Module | None
    """S; `None` for the identity."""
    act: nn.Module | None
    """`None` for the identity."""


def residual(block: nn.Module) -> Residual | None:
    """The parts of a residual block, known by the names of its children; `None` for other modules.

    Blocks have either a `branch` and a `shortcut`, and perhaps a `relu`, or the children of torchvision's `BasicBlock`
    (conv1, bn1, conv2, bn2, relu, downsample) or `Bottleneck` (and conv3, bn3), and no others. The steps of the latter
    two are defined in this order: where normalisation comes first, so it does in the forward, presumably.

    Blocks with parameters, buffers or hooks of their own, or with a forward put on the instance, are not known: what
    these do would be lost.

    Example:
        >>> block = nn.Module()
        >>> block.branch, block.shortcut = nn.Linear(2, 2), nn.Identity()
        >>> residual(block)
        Residual(branch=(Linear(in_features=2, out_features=2, bias=True),), shortcut=None, act=None)
    """
    own = (*block._parameters.values(), *block._buffers.values())
    if has_hooks(block) or any(tensor is not None for tensor in own):
        return None
    return _parts(block._modules)


class StochasticDepth(nn.Module):
    """A residual block whose branch is left out at random; its children have the names they had.

    Args:
        block: A block whose parts `residual` knows.
        method: "block" for one decision for the batch, "sample" for one for each example.
        drop_rate: p, in [0, 1].

    Attributes:
        drop_rate: p, a buffer, 0-d float32.

    Raises:
        TypeError: Not such a block, or a rate that is no number.
        ValueError: Another method, or a rate out of range.

    Note:
        In training the branch is always computed, and before the shortcut, which so gets what a branch that works in
        place has made of the input. Where "block" leaves it out, its gradients are zeros, and what it has
        done to its buffers (batch statistics) is taken back.
    """

    drop_rate: Tensor

    def __init__(self, block: nn.Module, method: str = "block", drop_rate: float = 0.2) -> None:
        super().__init__()
        if residual(block) is None:
            raise TypeError(
                "StochasticDepth: expected a residual block of known parts, without parameters, buffers or hooks of "
                f"its own, got a {type(block).__name__}"
            )
        if method not in ("block", "sample"):
            raise ValueError(f"StochasticDepth: method: expected 'block' or 'sample', got {shown(method)}")
        check_number(drop_rate, "StochasticDepth: drop_rate", 0, 1)
        self._modules.update(block._modules)
        self.method = method
        self.register_buffer("drop_rate", torch.tensor(float(drop_rate)))

    def forward(self, input: Tensor) -> Tensor:
        """(N, ...) to what the block gives."""
        parts = _parts(self._modules)
        assert parts is not None
        act = parts.act or nn.Identity()
        if not self.training:
            branch = _run(parts.branch, input)
            by_pass = _shortcut(parts, input)
            return act((1 - self.drop_rate).to(by_pass.dtype) * branch + by_pass)
        if self.method == "sample":
            rows = torch.rand(input.shape[0], device=input.device) >= self.drop_rate
            branch = _run(parts.branch, input)
            is_kept = rows.view(-1, *[1] * (branch.ndim - 1))
            return act(torch.where(is_kept, branch, 0) + _shortcut(parts, input))
        is_kept = torch.rand((), device=input.device) >= self.drop_rate
        branch = _run_if(is_kept, parts.branch, input)
        by_pass = _shortcut(parts, input)
        if parts.shortcut is None:
            return torch.where(is_kept, act(branch + by_pass), input)
        return act(torch.where(is_kept, branch, 0) + by_pass)

    def extra_repr(self) -> str:
        """The settings."""
        return f"method={self.method!r}"


def _run(modules: Iterable[nn.Module], value: Tensor) -> Tensor:
    for module in modules:
        value = module(value)
    return value


def _run_if(is_kept: Tensor, modules: Iterable[nn.Module], value: Tensor) -> Tensor:
    """As `_run`; the modules' buffers change only where the result is kept."""
    for module in modules:
        buffers = dict(module.named_buffers())
        # The pass writes into copies: what autograd has saved of them must not change afterwards.
        own = {name: buffer.clone() for name, buffer in buffers.items()}
        value = torch.func.functional_call(module, own, (value,)) if own else module(value)
        for name, buffer in buffers.items():
            buffer.copy_(torch.where(is_kept, own[name], buffer))
    return value


def _parts(parts: Mapping[str, nn.Module | None]) -> Residual | None:
    """The parts by the names of the children."""
    branch, shortcut = parts.get("branch"), parts.get("shortcut")
    if branch is not None and shortcut is not None and parts.keys() <= {"branch", "shortcut", "relu"}:
        return Residual((branch,), _unless_identity(shortcut), parts.get("relu"))
    for steps in _STEPS:
        modules = tuple(module for step in steps if (module := parts.get(step)) is not None)
        defined, expected = ([name for name in names if name[-1].isdigit()] for names in (parts, steps))
        if len(modules) == len(steps) and parts.keys() <= {*steps, "downsample"} and defined == expected:
            return Residual(modules, _unless_identity(parts.get("downsample")), parts["relu"])
    return None


def _shortcut(parts: Residual, input: Tensor) -> Tensor:
    return input if parts.shortcut is None else parts.shortcut(input)


def _unless_identity(module: nn.Module | None) -> nn.Module | None:
    return None if isinstance(module, nn.Identity) else module
