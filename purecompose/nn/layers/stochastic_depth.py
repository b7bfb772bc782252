"""Stochastic depth: residual blocks whose branch is dropped at random in training.

`algorithms.stochastic_depth` has the formulas and the source.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from purecompose._support.specs import check_number, shown
from purecompose.nn.layers.replacing import has_hooks


# The branches of torchvision's residual networks, and of others with the same names.
_CONVOLUTIONS = (
    ("conv1", "bn1", "relu", "conv2", "bn2", "relu", "conv3", "bn3"),
    ("conv1", "bn1", "relu", "conv2", "bn2"),
)
_DROP_PATH = re.compile(r"drop_path\d*")
# The branches of a transformer's block, each followed by the dropout.
_BRANCHES = (("norm1", "attention"), ("norm2", "feed_forward"))


class Residual(NamedTuple):
    """Modules of one step act(F(x) + S(x)) of a block."""

    branch: tuple[nn.Module, ...]
    """Modules of F, applied one after the other."""
    shortcut: nn.Module | None
    """Module of S; `None` for the identity."""
    act: nn.Module | None
    """Activation; `None` for the identity."""


def residuals(block: nn.Module) -> tuple[Residual, ...]:
    """Return the steps of a residual block in order, recognized by the names of its children; `()` for other modules.

    Blocks of one step have either a `branch` and a `shortcut`, and optionally a `relu`, or the children of
    torchvision's `BasicBlock` (conv1, bn1, conv2, bn2, relu, downsample) or `Bottleneck` (also conv3, bn3), defined in
    this order, and no others.

    Blocks of two steps are x + dropout(attention(norm1(x))), then the same with norm2 and feed_forward, as in
    `purecompose.nn.models`: they have children of these names, dropout being optional, and no others, with each norm
    before the layer that follows it. The forwards of the block, the attention and the feed-forward part take one
    argument each.

    Blocks with their own parameters, buffers or hooks, or with a forward set on the instance, are not recognized.

    Args:
        block: A module.

    Example:
        >>> block = nn.Module()
        >>> block.branch, block.shortcut = nn.Linear(2, 2), nn.Identity()
        >>> residuals(block)
        (Residual(branch=(Linear(in_features=2, out_features=2, bias=True),), shortcut=None, act=None),)
    """
    own = (*block._parameters.values(), *block._buffers.values())
    if has_hooks(block) or any(tensor is not None for tensor in own):
        return ()
    steps = _steps(block._modules)
    callees = [block, *(block.get_submodule(name) for _, name in _BRANCHES)] if len(steps) > 1 else []
    return steps if all(map(_takes_one, callees)) else ()


def drop_paths(block: nn.Module) -> tuple[str, ...]:
    """Return the names of the attributes by which a block of timm or Hugging Face drops its branches.

    Such a block passes each branch through `self.drop_path`, or `drop_path1`, `drop_path2` and so on: a module of a
    class called `DropPath` (or `...DropPath`), or, where nothing is dropped, an `nn.Identity` or `None`.

    Args:
        block: A module.

    Example:
        >>> block = nn.Module()
        >>> block.drop_path1, block.drop_path2 = nn.Identity(), nn.Dropout()
        >>> drop_paths(block)
        ('drop_path1',)
    """
    attributes = {**vars(block), **block._modules}
    return tuple(name for name, value in attributes.items() if _DROP_PATH.fullmatch(name) and _is_drop_path(value))


def _is_drop_path(value: Any) -> bool:
    if isinstance(value, DropPath):
        return False
    return value is None or isinstance(value, nn.Identity) or type(value).__name__.endswith("DropPath")


class _Dropping(nn.Module):
    """Base of layers that drop branches at random, each for the whole batch or for single examples."""

    drop_rate: Tensor

    def __init__(self, method: str, drop_rate: float) -> None:
        super().__init__()
        where = type(self).__name__
        if method not in ("block", "sample"):
            raise ValueError(f"{where}: method: expected 'block' or 'sample', got {shown(method)}")
        check_number(drop_rate, f"{where}: drop_rate", 0, 1)
        self.method = method
        self.register_buffer("drop_rate", torch.tensor(float(drop_rate)), persistent=False)

    def _drawn(self, input: Tensor) -> Tensor:
        """Return whether a branch is kept, a bool: 0-d for the batch, or (N,)."""
        return torch.rand(input.shape[:1] if self.method == "sample" else (), device=input.device) >= self.drop_rate

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"method={self.method!r}"


def _kept(is_kept: Tensor, branch: Tensor) -> Tensor:
    return torch.where(is_kept.view(-1, *[1] * (branch.ndim - 1)) if is_kept.ndim else is_kept, branch, 0)


class DropPath(_Dropping):
    """Layer that drops a branch at random; it replaces a `drop_path` of timm or Hugging Face.

        in training      b x, with b = 1 with probability 1 - p, else 0
        in evaluation    (1 - p) x

    Args:
        method: "block" for one decision per batch, "sample" for one per example.
        drop_rate: p, in [0, 1].

    Attributes:
        drop_rate: p, a buffer, 0-d float32.

    Example:
        >>> DropPath("sample", 0.5).eval()(torch.ones(2, 1)).tolist()
        [[0.5], [0.5]]
    """

    def __init__(self, method: str = "block", drop_rate: float = 0.2) -> None:
        super().__init__(method, drop_rate)

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, ...) to the same shape."""
        if not self.training:
            return (1 - self.drop_rate).to(input.dtype) * input
        return _kept(self._drawn(input), input)


class StochasticDepth(_Dropping):
    """A residual block whose branches are dropped at random; its children keep their names.

    Args:
        block: A block whose steps `residuals` recognizes.
        method: "block" for one decision per batch, "sample" for one per example; decisions differ between branches.
        drop_rate: p, in [0, 1].

    Attributes:
        drop_rate: p, a buffer, 0-d float32, which a surgery converts to the dtype of the block's parameters.

    Raises:
        TypeError: `block` is not such a block, or the rate is not a number.
        ValueError: The method is unknown, or the rate is out of range.

    Note:
        In training the branch is always computed, and before the shortcut. If "block" drops it, changes to its buffers
        (batch statistics) are undone. Gradients through a dropped branch are zeros if its values are finite, otherwise
        NaN.

    Example:
        >>> from purecompose.nn.models import ResidualBlock
        >>> StochasticDepth(ResidualBlock(4, 4), "block", 0.5)(torch.zeros(1, 4, 8, 8)).shape
        torch.Size([1, 4, 8, 8])
    """

    def __init__(self, block: nn.Module, method: str = "block", drop_rate: float = 0.2) -> None:
        super().__init__(method, drop_rate)
        if not residuals(block):
            raise TypeError(
                "StochasticDepth: expected a residual block with children of known names and without its own "
                f"parameters, buffers or hooks, got a {type(block).__name__}"
            )
        self._modules.update(block._modules)

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, ...) to the shape of the block's output."""
        steps = _steps(self._modules)
        assert steps
        for step in steps:
            input = self._stepped(step, input)
        return input

    def _stepped(self, step: Residual, input: Tensor) -> Tensor:
        act = step.act or nn.Identity()
        if not self.training:
            branch = _run(step.branch, input)
            by_pass = _shortcut(step, input)
            return act((1 - self.drop_rate).to(by_pass.dtype) * branch + by_pass)
        is_kept = self._drawn(input)
        if self.method == "sample":
            return act(_kept(is_kept, _run(step.branch, input)) + _shortcut(step, input))
        branch = _run_if(is_kept, step.branch, input)
        by_pass = _shortcut(step, input)
        if step.shortcut is None:
            return torch.where(is_kept, act(branch + by_pass), input)
        return act(_kept(is_kept, branch) + by_pass)


def _run(modules: Iterable[nn.Module], value: Tensor) -> Tensor:
    for module in modules:
        value = module(value)
    return value


def _run_if(is_kept: Tensor, modules: Iterable[nn.Module], value: Tensor) -> Tensor:
    """Run modules in order like `_run`, but change their buffers only if the result is kept."""
    for module in modules:
        buffers = dict(module.named_buffers())
        # The pass writes into copies, because tensors that autograd has saved must not change afterwards.
        own = {name: buffer.clone() for name, buffer in buffers.items()}
        value = torch.func.functional_call(module, own, (value,)) if own else module(value)
        for name, buffer in buffers.items():
            buffer.copy_(torch.where(is_kept, own[name], buffer))
    return value


def _steps(parts: Mapping[str, nn.Module | None]) -> tuple[Residual, ...]:
    """Return the steps, recognized by the names of the children."""
    branch, shortcut = parts.get("branch"), parts.get("shortcut")
    if branch is not None and shortcut is not None and parts.keys() <= {"branch", "shortcut", "relu"}:
        return (Residual((branch,), _unless_identity(shortcut), parts.get("relu")),)
    for names in _CONVOLUTIONS:
        modules = tuple(module for name in names if (module := parts.get(name)) is not None)
        defined, expected = ([name for name in some if name[-1].isdigit()] for some in (parts, names))
        if len(modules) == len(names) and parts.keys() <= {*names, "downsample"} and defined == expected:
            return (Residual(modules, _unless_identity(parts.get("downsample")), parts["relu"]),)
    return _transformer_steps(parts)


def _transformer_steps(parts: Mapping[str, nn.Module | None]) -> tuple[Residual, ...]:
    places = {name: place for place, (name, module) in enumerate(parts.items()) if module is not None}
    needed = {name for branch in _BRANCHES for name in branch}
    if not needed <= places.keys() or parts.keys() - needed - {"dropout"}:
        return ()
    if any(places[norm] > places[name] for norm, name in _BRANCHES):
        return ()
    branches = ([parts.get(name) for name in (*branch, "dropout")] for branch in _BRANCHES)
    return tuple(Residual(tuple(part for part in branch if part is not None), None, None) for branch in branches)


def _takes_one(module: nn.Module) -> bool:
    """Return whether a module's forward takes exactly one argument."""
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return len(kinds) == 1 and kinds[0] in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _shortcut(step: Residual, input: Tensor) -> Tensor:
    return input if step.shortcut is None else step.shortcut(input)


def _unless_identity(module: nn.Module | None) -> nn.Module | None:
    return None if isinstance(module, nn.Identity) else module
