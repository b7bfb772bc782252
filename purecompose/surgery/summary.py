"""Summaries of networks: layers, output shapes, parameters."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from purecompose import batch as batches, tree
from purecompose._support.tables import columns, fragment, note, table
from purecompose.core.state import State, check_single
from purecompose.surgery.weights import to_module


class Layer(NamedTuple):
    """Module that directly has parameters, or has no children."""

    name: str
    """Qualified name of the module."""
    kind: str
    """Name of the module's class."""
    output: str
    """Dtype and shape of the output, such as "float32[64, 10]"; comma-separated for several tensors, empty if the layer
    is not called."""
    num_params: int
    """Number of elements of the module's direct parameters; tied ones count at the first layer that has them."""
    num_trainable: int
    """Number of these elements that are not frozen."""


class Summary(NamedTuple):
    """Layers of a network in the order of the module tree; prints as a table."""

    layers: tuple[Layer, ...]
    num_params: int
    num_trainable: int
    num_bytes: int
    """Memory of parameters and buffers in bytes."""

    def __str__(self) -> str:
        return f"{table(_HEAD, self._table())}\n\n{self._total()}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return fragment(columns(_HEAD, self._table()), note(self._total()))

    def _table(self) -> list[list[str]]:
        return [
            [layer.name or "(root)", layer.kind, layer.output, f"{layer.num_params:,}", _share(layer)]
            for layer in self.layers
        ]

    def _total(self) -> str:
        return f"{self.num_params:,} parameters, {self.num_trainable:,} trainable, {_size(self.num_bytes)}"


_HEAD = ("layer", "kind", "output", "parameters", "trainable")


def summary(state: State, batch: Any) -> Summary:
    """Return the layers of a state's network, with the shapes of their outputs for a batch.

    The network is run once, in evaluation mode and without autocast, on copies of the weights. Surgery of methods is
    included after `step.init`.

    Args:
        state: A single state.
        batch: A batch in the form used in training; its targets are not read.

    Raises:
        TypeError: `state` is not a State.
        ValueError: The state is a population's.
        KeyError: The batch has no input at the state's `input_field`.

    Example:
        >>> from purecompose import losses, optim
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1)).replace(frozen=["0.*"])
        >>> print(summary(state, (torch.zeros(2, 4), None)))
        layer  kind    output         parameters  trainable
        -----  ------  -------------  ----------  ---------
        0      Linear  float32[2, 8]          40  none
        1      ReLU    float32[2, 8]           0  -
        2      Linear  float32[2, 3]          27  all
        <BLANKLINE>
        67 parameters, 27 trainable, 268 bytes
    """
    if not isinstance(state, State):
        raise TypeError(
            f"summary(state, batch): expected a State, got {type(state).__name__}; State.create(net, ...) makes one"
        )
    check_single(state, "summary(state, batch)", "summary(unstack_states(state)[0], batch) summarizes the first member")
    net, trainable = to_module(state).eval(), set(state.context.trainable)
    outputs: dict[str, str] = {}
    chosen = {name: module for name, module in net.named_modules() if module._parameters or not list(module.children())}
    for name, module in chosen.items():
        module.register_forward_hook(_noting(outputs, name))
    inputs = batches.get(batch, state.context.input_field)
    inputs = batches.map_tensors(lambda tensor: tensor.to(state.device), inputs)
    with torch.no_grad():
        if isinstance(inputs, Mapping):
            net(**inputs)
        else:
            net(*(inputs if isinstance(inputs, list) else [inputs]))
    layers = []
    for name, module in chosen.items():
        own = [f"{name}.{key}".lstrip(".") for key in module._parameters]
        sizes = {key: state.params[key].numel() for key in own if key in state.params}  # ties: first name only
        num_trainable = sum(size for key, size in sizes.items() if key in trainable)
        layers.append(Layer(name, type(module).__name__, outputs.get(name, ""), sum(sizes.values()), num_trainable))
    held = [*state.params.values(), *state.buffers.values()]
    total = sum(param.numel() for param in state.params.values())
    num_trainable = sum(state.params[name].numel() for name in trainable)
    return Summary(tuple(layers), total, num_trainable, sum(t.numel() * t.element_size() for t in held))


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"


def _noting(outputs: dict[str, str], name: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        outputs[name] = ", ".join(tree.describe(tensor) for tensor in batches.tensors(output))

    return hook


def _share(layer: Layer) -> str:
    if not layer.num_params:
        return "-"
    names = {0: "none", layer.num_params: "all"}
    return names.get(layer.num_trainable, f"{layer.num_trainable:,}")
