"""Layer freezing: stops training layer after layer, starting at the network's input, in the course of a run."""

import functools
import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import Annotated, TypeAlias

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from purecompose.algorithms._parts import Elapsed, Where, reported
from purecompose.core.algorithm import Algorithm, factory
from purecompose.core.state import State
from purecompose.nn.model import Model
from purecompose.optim.base import matched_or_raise
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, after, on


Start: TypeAlias = Annotated[float, Within(0, 1, hint="it is a share of the run")]
Level: TypeAlias = Annotated[float, Within(0, 1, hint="it is a share of the layers")]
NumStages: TypeAlias = Annotated[int | None, Within(2, hint="the last stage begins at the end of the run")]


@checked
def layers_of(module: nn.Module, frozen: Collection[str] | None = None) -> tuple[tuple[str, ...], ...]:
    """Return the names of the trainable parameters, layer by layer, in the order of definition of the layers.

    Args:
        module: A network.
        frozen: The names of frozen parameters; by default those with `requires_grad=False`.

    Returns:
        The names of the parameters of every layer, that is, of every module that directly has trainable parameters.
        A parameter shared by several modules has its first name and belongs to the last of them. The tensors from which
        a parametrized tensor is computed (as by `torch.nn.utils.parametrizations.weight_norm`) belong to the module
        that has the parametrized tensor.

    Example:
        >>> layers_of(nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.BatchNorm1d(2)))
        (('0.weight',), ('2.weight', '2.bias'))
    """
    names: dict[int, str] = {}
    place: dict[str, int] = {}
    for prefix, child, number in _numbered(module):
        for name, param in child.named_parameters(prefix, recurse=False):
            name = names.setdefault(id(param), name)
            if param.requires_grad if frozen is None else name not in frozen:
                place[name] = max(number, place.get(name, 0))
    layers: dict[int, list[str]] = {}
    for name, number in place.items():
        layers.setdefault(number, []).append(name)
    return tuple(tuple(layers[number]) for number in sorted(layers))


@checked
def frozen_layers(
    module: nn.Module,
    elapsed: Elapsed,
    *,
    freeze_start: Start = 0.5,
    freeze_level: Level = 1.0,
    num_stages: NumStages = 8,
) -> tuple[str, ...]:
    """Return the parameters to freeze at a point of a run.

    Args:
        module: A network. Parameters with `requires_grad=False` do not count as layers. So in your own loop, either
            exclude the returned names from the optimizer's update, or call `layers_of` before freezing anything.
        elapsed: The fraction of the run that is over, at least 0; above 1 if training continues.
        freeze_start, freeze_level, num_stages: See `layer_freezing`.

    Returns:
        The names, layer by layer.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        >>> frozen_layers(net, 0.8)
        ('0.weight', '0.bias')
    """
    share = _share(elapsed, freeze_start=freeze_start, freeze_level=freeze_level, num_stages=num_stages)
    return tuple(name for layer in _first(layers_of(module), share) for name in layer)


@factory
def layer_freezing(
    freeze_start: Start = 0.5,
    freeze_level: Level = 1.0,
    *,
    num_stages: NumStages = 8,
    where: Where = None,
    name: str = "layer_freezing",
) -> Algorithm:
    """Stop training layer after layer, starting at the input.

        u = clip((t - a) / (1 - a), 0, 1),   f = L floor(S u) / S,   depth = floor(f n)

    with t the fraction of the run that is over, a the start, L the level, S the number of stages (or f = L u without
    stages), and n the number of layers minus one. The first `depth` layers have no gradient and no update: no momentum,
    no weight decay. The backward pass ends at the first layer that trains.

    A layer is a module that directly has trainable parameters; layers are in the order of definition, a module before
    its children. See `layers_of` for shared and parametrized ones. The last layer is never frozen.

    Events: BATCH_START, from the start on. Reads the time and the network; sets `paused`, the parameters that are not
    updated in the running step. Reports in `metrics`, as numbers: `f"{name}/layers_frozen"`, the depth, and
    `f"{name}/percentage_frozen"`, f. Nothing is remembered between steps.

    This is a host algorithm: a compiled step is compiled separately for each depth, of which there are at most S.

    A network of one layer is not changed. In a program of several players, an error is raised if all layers of one are
    frozen.

    Args:
        freeze_start: The time at which freezing begins, a share of the run in [0, 1]; with 1 the algorithm never
            matches.
        freeze_level: The share of the layers, excluding the last one, that is frozen at the end of the run, in [0, 1];
            with 0 the algorithm never matches.
        num_stages: The number of equal stages in which the share grows, at least 2; the first begins one stage length
            after `freeze_start`, and the last at the end of the run. With `None` the share follows every batch.
        where: Pattern or patterns (`fnmatch`) of the names of parameters that are frozen in turn, such as "backbone.*";
            by default all. n counts the layers that have such parameters.
        name: Name of the algorithm and prefix of its metrics.

    Raises:
        TypeError, ValueError: In the step: a run without a duration or with a duration in seconds, or a pattern that
            matches no trainable parameter.

    Example:
        >>> layer_freezing(0.6, num_stages=4)
        layer_freezing(freeze_start=0.6, freeze_level=1.0, num_stages=4)
        >>> layer_freezing(freeze_level=0).match
        never

    References:
        Maithra Raghu et al.: SVCCA: Singular Vector Canonical Correlation Analysis for Deep Learning Dynamics and
        Interpretability. NeurIPS 2017. https://arxiv.org/abs/1706.05806
        Andrew Brock et al.: FreezeOut: Accelerate Training by Progressively Freezing Layers. 2017.
        https://arxiv.org/abs/1706.04983
    """
    patterns = None if where is None else tuple(where)
    share_at = partial(_share, freeze_start=freeze_start, freeze_level=freeze_level, num_stages=num_stages)

    def apply(event: Event, state: State) -> State:
        del event
        elapsed = state.timestamp.elapsed()
        assert elapsed is not None, "the predicate requires a duration"
        share, context = share_at(elapsed), state.context
        layers = _first(_layers_of(context.model, context.frozen, patterns, f"{name}: where"), share)
        state = reported(state, name, {"layers_frozen": len(layers), "percentage_frozen": share})
        return state.replace(paused=context.paused.union(*layers))

    is_neutral = freeze_level == 0 or freeze_start == 1
    return Algorithm(name, NEVER if is_neutral else on(Event.BATCH_START) & after(freeze_start), apply, host=True)


def _share(elapsed: float, *, freeze_start: float, freeze_level: float, num_stages: int | None) -> float:
    """Return the share of layers to freeze at a point of a run."""
    if elapsed <= freeze_start:
        return 0.0
    gone = 1.0 if elapsed >= 1 else (elapsed - freeze_start) / (1 - freeze_start)
    return freeze_level * (gone if num_stages is None else _whole(num_stages * gone) / num_stages)


def _numbered(module: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield all modules with names and positions; parts of a parametrized tensor have its module's position."""
    places: dict[str, int] = {}
    parts: set[str] = set()
    for number, (prefix, child) in enumerate(module.named_modules(remove_duplicate=False)):
        parent = prefix.rpartition(".")[0]
        if parent in parts:
            parts.add(prefix)
            number = places[parent]
        elif isinstance(child, ParametrizationList):  # named "owner.parametrizations.tensor"
            parts.add(prefix)
            number = places.get(parent.rpartition(".")[0], number)
        places[prefix] = number
        yield prefix, child, number


@functools.lru_cache(maxsize=8)
def _layers_of(
    model: Model, frozen: frozenset[str], patterns: tuple[str, ...] | None, role: str
) -> tuple[tuple[str, ...], ...]:
    """Return cached layers: this is called in every step, and walking through a large network takes time."""
    layers = layers_of(model.module, frozen)
    if patterns is None:
        return layers
    chosen = matched_or_raise(patterns, [name for layer in layers for name in layer], role, "trainable parameter")
    return tuple(part for layer in layers if (part := tuple(name for name in layer if name in chosen)))


def _first(layers: tuple[tuple[str, ...], ...], share: float) -> tuple[tuple[str, ...], ...]:
    """Return the first layers, up to a share of all layers except the last one."""
    return layers[: _whole(share * max(0, len(layers) - 1))]


def _whole(value: float) -> int:
    """Return the integer part, rounding up values just below an integer, such as (0.7 - 0.6) / 0.4 * 4."""
    return math.floor(value + 1e-9)
