"""Monitors of single layers: the movement of parameters and the outputs of modules."""

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from purecompose import batch as batches
from purecompose.core.state import State
from purecompose.observers.recorder import Monitor
from purecompose.surgery.weights import to_module


def updates() -> Monitor:
    """Return a monitor of the change of each parameter since the last record: `update/NAME`, `update_ratio/NAME`.

    `update/0.weight` is the norm of the difference, `update_ratio/0.weight` that norm divided by the earlier norm of
    the parameter, or 0 if the parameter was all zeros. In a recorder with `every="1ba"` this is the update of the
    batch. There are no values in the first record, nor for a parameter whose shape changed. A population has a value
    for each member. The monitor keeps the parameters of the last record, which costs as much memory as they take.

    Example:
        >>> from purecompose import losses, optim
        >>> state = State.create(torch.nn.Linear(1, 1, bias=False), loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> monitor, one = updates(), state.replace(params={"weight": torch.tensor([[2.0]])})
        >>> monitor(one), monitor(one.replace(params={"weight": torch.tensor([[3.0]])}))
        ({}, {'update/weight': tensor(1.), 'update_ratio/weight': tensor(0.5000)})
    """
    return _Updates()


class _Updates:
    """The monitor of `updates`, with the parameters of the last record."""

    def __init__(self) -> None:
        self._before: Mapping[str, Tensor] = {}

    def __call__(self, state: State) -> dict[str, Tensor]:
        before, self._before = self._before, state.params
        num_dims = state.key.ndim - 1  # the members of a population come first
        found = {}
        for name, param in state.params.items():
            if name in before and before[name].shape == param.shape and param.is_floating_point():
                update, size = (_norm(value, num_dims) for value in (param - before[name], before[name]))
                found[f"update/{name}"] = update
                found[f"update_ratio/{name}"] = torch.where(size > 0, update / torch.where(size > 0, size, 1), 0)
        return found


def _norm(value: Tensor, num_dims: int) -> Tensor:
    return value.detach().reshape(*value.shape[:num_dims], -1).float().norm(dim=-1)


def activations(inputs: Any, layers: str = "*") -> Monitor:
    """Return a monitor of the outputs of the network's layers for given inputs, in evaluation mode.

    It reports, for each layer (a module without submodules), `activation_mean/NAME`, `activation_std/NAME`,
    `activation_max/NAME` (of absolute values) and `activation_zeros/NAME`, the fraction of exact zeros, which shows
    dead ReLU units. For a layer that is called several times, the last call counts; a layer that does not return a
    floating tensor is left out. Each record costs a forward pass with copies of the weights.

    Args:
        inputs: Inputs of the network: one argument, a list of arguments, or a mapping of keyword arguments.
        layers: Pattern (`fnmatch`) of the names of the layers.

    Raises:
        ValueError: At the first record: the state is a population's, or no layer has such a name.

    Example:
        >>> from purecompose import losses, optim
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU())
        >>> state = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> sorted(activations(torch.ones(3, 2), "1")(state))
        ['activation_max/1', 'activation_mean/1', 'activation_std/1', 'activation_zeros/1']
    """

    def monitor(state: State) -> dict[str, Tensor]:
        net = to_module(state).eval()
        chosen = {
            name: module
            for name, module in net.named_modules()
            if not list(module.children()) and fnmatch.fnmatchcase(name, layers)
        }
        if not chosen:
            raise ValueError(f"activations: no layer has a name like {layers!r}; see net.named_modules()")
        found: dict[str, Tensor] = {}
        for name, module in chosen.items():
            module.register_forward_hook(_remembering(found, name))
        given = batches.map_tensors(lambda tensor: tensor.to(state.device), inputs)
        with torch.no_grad():
            _call(net, given)
        return {
            f"activation_{what}/{name or '(root)'}": value
            for name, x in found.items()
            for what, value in _summary(x).items()
        }

    return monitor


def _remembering(found: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            found[name] = output

    return hook


def _call(net: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        net(**inputs)
    else:
        net(*(inputs if isinstance(inputs, list) else [inputs]))


def _summary(output: Tensor) -> dict[str, Tensor]:
    output = output.float()
    zeros = (output == 0).float().mean()
    return {"mean": output.mean(), "std": output.std(correction=0), "max": output.abs().max(), "zeros": zeros}
