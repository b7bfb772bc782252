"""The weights of a state: the live ones, and averages that methods keep in slots; and summaries of networks."""

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from purecompose import batch as batches, tree
from purecompose._support.device import is_shard
from purecompose._support.messages import columns, fragment, note, table
from purecompose.core.state import State, check_single
from purecompose.data.loaders import fixed_batches
from purecompose.nn import model as models
from purecompose.nn.layers.replacing import GhostBatchNorm
from purecompose.optim.base import matched


class Averages(NamedTuple):
    """Averaged weights in a slot."""

    params: dict[str, Tensor]
    """Averages of trainable parameters, by name; float32 for parameters in half precision."""
    buffers: dict[str, Tensor]
    """Averages of floating buffers, by name, as a rule of running statistics; other buffers are not averaged."""
    num: Tensor
    """Number of weights in the averages, 0-d int64; if 0, the averages are ignored."""

    @classmethod
    def empty(
        cls, state: State, buffers: tuple[str, ...] = models.STATISTICS, where: tuple[str, ...] = ("*",)
    ) -> "Averages":
        """Return averages of no weights, with the names and shapes of a state's weights."""
        chosen = matched(where, (*state.context.trainable, *state.buffers))
        floating = tuple(name for name, one in state.buffers.items() if name in chosen and one.is_floating_point())
        params = {name: state.params[name] for name in state.context.trainable if name in chosen}
        chosen_buffers = matched(buffers, floating)
        averaged = {name: state.buffers[name] for name in floating if name in chosen_buffers}  # in the state's order
        trained, averaged = (
            {name: torch.zeros_like(wide(one)) for name, one in tensors.items()} for tensors in (params, averaged)
        )
        return cls(trained, averaged, torch.zeros((), dtype=torch.int64, device=state.device))


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 if it is in half precision, in which small changes would be lost."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def averages_in(state: State, name: str) -> Averages:
    """Return the averages in the slot of the algorithm of this name."""
    found = _all_averages(state)
    if name not in found:
        known = f"there are {', '.join(found)}" if found else "no algorithm of this state keeps any"
        raise ValueError(
            f"weights={name!r}: expected the name of an algorithm that averages weights; {known}; "
            "step=, if given, must be the step that trained the state"
        )
    return found[name]


def with_weights(state: State, name: str) -> State:
    """Return the state with averaged weights instead of the live ones, if any weights have been averaged yet.

    Everything else is unchanged, so this is meant for evaluation and export; training from it begins at the averages.

    Args:
        state: A state, or the state of a population.
        name: Name of the averaging algorithm, such as "ema".

    Example::

        evaluate(with_weights(state, "ema"), test)
    """
    averages = averages_in(state, name)

    def chosen(live: Mapping[str, Tensor], averaged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: _of(averages.num, averaged[key], own) if key in averaged else own for key, own in live.items()}

    params, buffers = chosen(state.params, averages.params), chosen(state.buffers, averages.buffers)
    return state.replace(params=params, buffers=buffers)


def with_statistics(state: State, data: Iterable[Any], *, weights: str) -> State:
    """Return the state with BatchNorm's statistics of the averages computed from data, as means over all batches.

    The averaged network processes the data once, with every module except BatchNorm in evaluation mode, and all batches
    have equal weight. The live weights and their statistics are unchanged. For a network without BatchNorm the state is
    returned unchanged.

    Args:
        state: A single state, between steps.
        data: Batches in the form used in training; a few dozen are enough. A `DataLoader` without a generator uses the
            run's key.
        weights: Name of the averaging algorithm, such as "swa".

    Raises:
        ValueError: The state is a population's, there are no such averages, nothing is averaged yet, the averages leave
            out BatchNorm's statistics, or there is no batch.

    Example::

        evaluate(with_statistics(with_weights(state, "swa"), train, "swa"), test)
    """
    check_single(state, "with_statistics(state, data)", "take the members of unstack_states(state) one by one")
    averages = averages_in(state, weights)
    if not averages.num:
        raise ValueError(f"with_statistics: {weights} has not averaged any weights yet; train until its start")
    found = statistics_of(state.model)
    if not found.names:
        return state
    if lacking := sorted(found.names - averages.buffers.keys()):
        raise ValueError(
            f"with_statistics: {weights} keeps no averages of {', '.join(lacking)}; let buffers match them"
        )
    buffers, num_batches = averages.buffers, 0
    for batch in fixed_batches(data, state.key):
        inputs = batches.get(batch, state.context.input_field)
        inputs = batches.map_tensors(lambda tensor: tensor.to(state.device), inputs)
        with torch.no_grad():
            buffers = with_batch(buffers, found.of(with_weights(state, weights), inputs), num_batches)
        num_batches += 1
    if not num_batches:
        raise ValueError("with_statistics: the data has no batch; is it an exhausted iterator?")
    return _with_averages(state, weights, averages._replace(buffers=buffers))


def to_module(state: State, *, weights: str | None = None) -> nn.Module:
    """Return a plain `nn.Module` with copies of the state's weights, in training mode; ties stay ties.

    Args:
        state: A single state.
        weights: Name of the algorithm whose averages are returned, such as "ema"; by default the live weights.

    Raises:
        ValueError: The state is a population's, its parameters are divided among processes, or there are no such
            averages.

    Example:
        >>> import torch
        >>> from purecompose import losses, optim
        >>> net = torch.nn.Linear(2, 1)
        >>> state = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> torch.equal(to_module(state).weight, net.weight)
        True
    """
    check_single(state, "to_module(state)", "to_module(unstack_states(state)[0]) returns the first member's")
    state = state if weights is None else with_weights(state, weights)
    if any(map(is_shard, state.params.values())):
        raise ValueError(
            "to_module(state): each process holds only some rows of the parameters; pc.whole(state), called by all "
            "processes, puts them together"
        )
    return models.to_module(state.model, state.params, state.buffers)


class Statistics(NamedTuple):
    """Model that computes BatchNorm's statistics of single batches."""

    model: models.Model
    """Network with only BatchNorm in training mode, where its buffers become the statistics of the batch."""
    names: frozenset[str]
    """Names of the buffers that contain statistics."""

    def of(self, state: State, inputs: Any) -> dict[str, Tensor]:
        """Return the statistics of the state's network for these inputs, by the buffers' names."""
        _, buffers = state.replace(model=self.model).run_model(inputs, train=True, rng_name=".statistics")
        return {name: buffers[name].detach() for name in sorted(self.names)}


@functools.lru_cache(maxsize=8)
def statistics_of(model: models.Model) -> Statistics:
    """Return the model that computes a network's statistics, for BatchNorm in training mode that keeps statistics.

    Ghost batch normalisation uses the statistics of whole batches. The statistics of a layer that is called several
    times in a pass are means over its calls.
    """
    root = model.skeleton(train=True).blank_copy()
    norms = [module for module in root.modules() if isinstance(module, _BatchNorm) and module.training]
    norms = [norm for norm in norms if norm.running_mean is not None]
    root.eval()
    measuring = _Measuring()
    root.register_forward_pre_hook(measuring.begin)
    for norm in norms:
        norm.train()
        norm.track_running_stats = False  # the kernel would update the tensors that the hook has set
        norm.register_forward_hook(measuring.measure, with_kwargs=True)
    for module in root.modules():
        if isinstance(module, GhostBatchNorm):
            module.ghost_batch_size = sys.maxsize
    held = {id(tensor) for norm in norms for tensor in (norm.running_mean, norm.running_var)}
    names = frozenset(name for name, buffer in root.named_buffers() if id(buffer) in held)
    return Statistics(models.of_skeleton(root), names)


class _Measuring:
    """Hooks that write the statistics of layers' inputs into the layers' buffers; only one pass may run at a time.

    The kernel does not declare its momentum update, so a compiler removes it from a pass whose outputs are not read.
    """

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        """Number of calls of each layer in this pass, by the layer's `id`."""

    def begin(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        del root, args
        self._calls.clear()

    def measure(self, norm: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> None:
        del output
        inputs = (*args, *kwargs.values())[0]
        inputs = inputs if inputs.dtype is torch.float64 else inputs.float()
        dims = [dim for dim in range(inputs.ndim) if dim != 1]
        variance, mean = torch.var_mean(inputs, dims, correction=1)
        calls = self._calls[id(norm)] = self._calls.get(id(norm), 0) + 1
        if calls > 1:
            mean, variance = norm.running_mean.lerp(mean, 1 / calls), norm.running_var.lerp(variance, 1 / calls)
        norm.running_mean, norm.running_var = mean, variance


def with_batch(buffers: Mapping[str, Tensor], found: Mapping[str, Tensor], num: int | Tensor) -> dict[str, Tensor]:
    """Return buffers whose statistics are means over `num` batches, updated with one more batch.

    With `num` 0 the old values are ignored, even NaN.
    """
    share = 1 / ((num.double() if isinstance(num, Tensor) else num) + 1)

    def mean(old: Tensor, new: Tensor) -> Tensor:
        new = new.to(old.dtype)
        if isinstance(share, Tensor):
            both = torch.lerp(old, new, share.to(dtype=old.dtype, device=old.device))
            return torch.where((share < 1).to(old.device), both, new)
        return torch.lerp(old, new, share) if num else new

    return {name: mean(old, found[name]) if name in found else old for name, old in buffers.items()}


def _of(num: Tensor, averaged: Tensor, live: Tensor) -> Tensor:
    # In a population, `num` has one value for each member.
    is_there = (num > 0).view((*num.shape, *[1] * (live.ndim - num.ndim)))
    return torch.where(is_there, averaged.to(live.dtype), live)


def _with_averages(state: State, name: str, averages: Averages) -> State:
    slot = state.slots[name]
    if not isinstance(slot, Averages):
        averages = type(slot)(*[averages if isinstance(part, Averages) else part for part in slot])
    return state.replace(slots={**state.slots, name: averages})


def _all_averages(state: State) -> dict[str, Averages]:
    found = {}
    for name, slot in state.slots.items():
        parts = (slot, *slot) if isinstance(slot, tuple) else ()
        averages = next((part for part in parts if isinstance(part, Averages)), None)
        if averages is not None:
            found[name] = averages
    return found


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
    inputs = batches.map_tensors(lambda tensor: tensor.to(state.device), batches.get(batch, state.context.input_field))
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
