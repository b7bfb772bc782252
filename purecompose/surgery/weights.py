"""The weights of a state: the live ones, and averages that methods keep in slots."""

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from purecompose import batch as batches
from purecompose.core.state import State, check_single
from purecompose.data.loaders import fixed_batches
from purecompose.nn import model as models
from purecompose.nn.layers.ghost_batchnorm import GhostBatchNorm
from purecompose.nn.skeleton import places


__all__ = [
    "Averages",
    "Statistics",
    "averages_in",
    "statistics_of",
    "to_module",
    "wide",
    "with_batch",
    "with_statistics",
    "with_weights",
]


class Averages(NamedTuple):
    """Averaged weights in a slot, beside the live ones."""

    params: dict[str, Tensor]
    """The averages of trainable parameters, by name; float32 for those in half precision."""
    buffers: dict[str, Tensor]
    """Those of floating buffers; others are the live ones."""
    num: Tensor
    """How many weights are in them, 0-d int64; of none, they count for nothing."""

    @classmethod
    def empty(cls, state: State) -> "Averages":
        """Average of nothing, with the form of a state's weights."""
        trained = {name: torch.zeros_like(wide(state.params[name])) for name in state.context.trainable}
        floating = {
            name: torch.zeros_like(wide(buffer)) for name, buffer in state.buffers.items() if buffer.is_floating_point()
        }
        return cls(trained, floating, torch.zeros((), dtype=torch.int64, device=state.device))


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 where it is in half precision: small changes would be lost there."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def averages_in(state: State, name: str) -> Averages:
    """Return the averages that an algorithm of this name keeps.

    Raises:
        ValueError: It keeps none.
    """
    found = _all_averages(state)
    if name not in found:
        known = f"there are {', '.join(found)}" if found else "no algorithm of this state keeps any"
        raise ValueError(f"weights={name!r}: expected the name of an algorithm that averages weights; {known}")
    return found[name]


def with_weights(state: State, name: str) -> State:
    """Return the state with averaged weights in the place of the live ones; the live ones as long as nothing is
    averaged.

    Everything else stays, so this is for looking and exporting; training from it begins at the averages.

    Args:
        state: A state, or a population's.
        name: That of the algorithm which averages, such as "ema".

    Raises:
        ValueError: It keeps no averages.
    """
    averages = averages_in(state, name)

    def chosen(live: Mapping[str, Tensor], averaged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: _of(averages.num, averaged[key], own) if key in averaged else own for key, own in live.items()}

    params, buffers = chosen(state.params, averages.params), chosen(state.buffers, averages.buffers)
    return state.replace(params=params, buffers=buffers)


def with_statistics(state: State, data: Iterable[Any], *, weights: str) -> State:
    """Return the state with BatchNorm's statistics of the averaged network beside the averages: means over all batches.

    Activations of averaged weights have other means and variances than those of the weights that the average is made
    of. Here the averaged network sees the data once, every module but BatchNorm in evaluation mode, and each batch
    counts the same. The live weights and their statistics stay as they were. A method that continues averaging
    replaces what was found when it next takes weights. A network without BatchNorm comes back as it is.

    Args:
        state: A single state, between steps.
        data: Batches of the form that training uses; some dozens are enough. A `DataLoader` without a generator draws
            by the run's key, so that the same call gives the same.
        weights: The name of the algorithm that averages, such as "swa".

    Raises:
        ValueError: The state is a population's, there are no such averages, nothing is averaged yet, or there is no
            batch.
    """
    check_single(state, "with_statistics(state, data)", "take the members of unstack_states(state) one by one")
    averages = averages_in(state, weights)
    if not averages.num:
        raise ValueError(f"with_statistics: {weights} has not averaged any weights yet; train on, to its start")
    found = statistics_of(state.model)
    if not found.names:
        return state
    buffers, num_batches = averages.buffers, 0
    for batch in fixed_batches(data, state.key):
        inputs = batches.get(batch, state.context.input_field)
        inputs = batches.map_tensors(lambda tensor: tensor.to(state.device), inputs)
        with torch.no_grad():
            buffers = with_batch(buffers, found.of(with_weights(state, weights), inputs), num_batches)
        num_batches += 1
    if not num_batches:
        raise ValueError("with_statistics: the data has no batch; is it an iterator used up?")
    return _with_averages(state, weights, averages._replace(buffers=buffers))


def to_module(state: State, *, weights: str | None = None) -> nn.Module:
    """Return a plain `nn.Module` with copies of the state's weights, in training mode; ties stay ties.

    Args:
        state: A single state.
        weights: The name of an algorithm whose averages are wanted, such as "ema"; by default the live weights.

    Raises:
        ValueError: The state is a population's, or there are no such averages.
    """
    check_single(state, "to_module(state)", "to_module(unstack_states(state)[0]) is the first one's")
    state = state if weights is None else with_weights(state, weights)
    return models.to_module(state.model, state.params, state.buffers)


class Statistics(NamedTuple):
    """How to find the statistics of single batches that BatchNorm takes."""

    model: models.Model
    """Only the network's BatchNorm in training mode, where its buffers become the statistics of the batch."""
    names: frozenset[str]
    """The buffers that hold statistics."""

    def of(self, state: State, inputs: Any) -> dict[str, Tensor]:
        """Return the statistics of the state's network for these inputs, by the buffers' names."""
        _, buffers = state.replace(model=self.model).run_model(inputs, train=True, rng_name=".statistics")
        return {name: buffers[name].detach() for name in sorted(self.names)}


@functools.lru_cache(maxsize=8)
def statistics_of(model: models.Model) -> Statistics:
    """Return how to find a network's statistics; those of modules that do not train, or keep none, are not part of
    them.

    Ghost batch normalisation takes those of whole batches, which are the same in expectation. Those of a layer that a
    pass calls more than once are means over its calls.
    """
    root = model.skeleton(train=True).blank_copy()
    norms = [module for module in root.modules() if isinstance(module, _BatchNorm) and module.training]
    norms = [norm for norm in norms if norm.running_mean is not None]
    root.eval()
    measuring = _Measuring()
    root.register_forward_pre_hook(measuring.begin)
    for norm in norms:
        norm.train()
        norm.track_running_stats = False  # the kernel's own step would go into what the hook has put there
        norm.register_forward_hook(measuring.measure, with_kwargs=True)
    for module in root.modules():
        if isinstance(module, GhostBatchNorm):
            module.ghost_batch_size = sys.maxsize
    names: dict[int, str] = {}
    for place in places(root):
        names.setdefault(id(place.tensor), place.name)
    held = [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var)]
    return Statistics(models.Model(root, names, model.param_names), frozenset(names[id(tensor)] for tensor in held))


class _Measuring:
    """Puts the statistics of layers' inputs into the layers' buffers.

    Not by their own momentum: the kernel does not say that it writes, and of a pass whose outputs are not read a
    compiler takes it out. One pass counts at a time: no other code runs a network while it has tensors in it.
    """

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        """How often each layer has been called in this pass, by its `id`."""

    def begin(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        """Before a pass."""
        del root, args
        self._calls.clear()

    def measure(self, norm: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> None:
        """After a layer's call."""
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
    """Buffers whose statistics are means over `num` batches, with one batch more in them.

    Of no batches they count for nothing, whatever they are.

    Example:
        >>> with_batch({"mean": torch.tensor([torch.nan])}, {"mean": torch.tensor([2.0])}, 0)
        {'mean': tensor([2.])}
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
    # In a population there is a number for each member.
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
