"""Stochastic depth: skips branches of residual blocks at random, so that many shallower networks are trained."""

import copy
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.device import as_scalar
from purecompose.algorithms._parts.surgery import changed, warn_of_nothing
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn.layers.stochastic_depth import DropPath, StochasticDepth, drop_paths, residuals
from purecompose.schedule import Scalar, Schedule, collect, linear
from purecompose.schedule.declared import Within, checked
from purecompose.time import Time, TimeLike, TimeUnit
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on
from purecompose.time.units import named_point


Method = Literal["block", "sample"]
Distribution = Literal["uniform", "linear"]
RATE = Within(0, 1, hint="it is how often a branch is left out")


@checked
def stochastic_depth_rates(
    num_blocks: Annotated[int, Within(0)],
    drop_rate: Annotated[float | Tensor, RATE] = 0.2,
    drop_distribution: Distribution = "linear",
) -> list[Any]:
    """Return the drop rate of each block.

    Args:
        num_blocks: The number of blocks L.
        drop_rate: The rate p in [0, 1], a number or a 0-d tensor, whose value is not checked.
        drop_distribution: See `stochastic_depth`.

    Example:
        >>> stochastic_depth_rates(4, 0.5)
        [0.125, 0.25, 0.375, 0.5]
    """
    if drop_distribution == "uniform":
        return [drop_rate] * num_blocks
    return [drop_rate * ((place + 1) / num_blocks) for place in range(num_blocks)]


@checked
def stochastic_depth_rules(
    module: nn.Module,
    stochastic_method: Method = "block",
    drop_rate: Annotated[float, RATE] = 0.2,
    drop_distribution: Distribution = "linear",
) -> surgery.Rules:
    """Return the rules that replace each residual block of a network by `purecompose.nn.layers.StochasticDepth`.

    Args:
        module: The network; only its names and structure are read.
        stochastic_method, drop_rate, drop_distribution: See `stochastic_depth`; the rate is a number.

    Example:
        >>> from purecompose.nn import models
        >>> [kind.__name__ for kind in stochastic_depth_rules(models.resnet8(1, 10, width=4))]
        ['Module', 'StochasticDepth', 'DropPath']
    """
    names = _blocks(module)
    rates = dict(zip(names, stochastic_depth_rates(len(names), drop_rate, drop_distribution), strict=True))

    def block(module: nn.Module, site: surgery.Site) -> nn.Module | None:
        if site.name not in rates:
            return None
        if residuals(module):
            return StochasticDepth(module, stochastic_method, rates[site.name])
        rate = rates[site.name]
        return changed(module, None, **{name: DropPath(stochastic_method, rate) for name in drop_paths(module)})

    return {nn.Module: block, StochasticDepth: None, DropPath: None}


@checked
def apply_stochastic_depth(
    net: nn.Module,
    stochastic_method: Method = "block",
    drop_rate: Annotated[float, RATE] = 0.2,
    drop_distribution: Distribution = "linear",
) -> nn.Module:
    """Return a copy of a network whose residual blocks skip their branches at random; the network is not modified.

    The copy has separate weights, and is in the same mode (train or eval) as the network. Skipped branches are drawn
    from torch's global generator. Create the optimizer from the copy. Parts without trainable parameters are not
    changed, unless no part has any.

    Args:
        net: The network.
        stochastic_method, drop_rate, drop_distribution: See `stochastic_depth`; the rate is a number.

    Warns:
        UserWarning: The network has no supported residual block.

    Example:
        >>> from purecompose.nn.models import resnet8
        >>> net = apply_stochastic_depth(resnet8(3, 10), drop_rate=0.2)
        >>> sum(type(module).__name__ == "StochasticDepth" for module in net.modules())
        3
    """
    rules = stochastic_depth_rules(net, stochastic_method, drop_rate, drop_distribution)
    _check_blocks(net, "apply_stochastic_depth", stochastic_method)
    if not _blocks(net):
        return copy.deepcopy(net)
    changed_net = surgery.operate(net, rules, name="stochastic_depth", skips_frozen=True)[0]
    # A linear rate depends on the number of blocks that have been replaced.
    for buffer, rate in _rates(changed_net, drop_rate, drop_distribution).items():
        changed_net.get_buffer(buffer).fill_(rate)
    return changed_net


@factory
def stochastic_depth(
    stochastic_method: Method = "block",
    drop_rate: Annotated[Scalar, RATE] = 0.2,
    drop_distribution: Distribution = "linear",
    drop_warmup: Annotated[TimeLike | float, named_point] = 0.0,
    *,
    name: str = "stochastic_depth",
) -> Algorithm:
    """Skip branches of residual blocks at random.

    With a block act(F(x) + S(x)), its branch F and shortcut S, and the rate p at which the branch is skipped:

        "block", in training     act(b F(x) + S(x)), one b for the whole batch, 1 with probability 1 - p
                                 if b = 0 and S is the identity: x itself
        "sample", in training    act(b_n F(x)_n + S(x)_n), one b_n for each example
        in evaluation            act((1 - p) F(x) + S(x))

    A transformer block consists of two of these in a row: its attention and its feed-forward part are branches with
    separate draws, both with the block's p.

    Block i of L, in the order of definition, has the rate p (uniform) or p (i + 1) / L (linear). With `drop_warmup` w
    all rates are multiplied by min(t / w, 1).

    Blocks are recognised by the names of their children. Blocks of `purecompose.nn.models` and of torchvision's
    residual networks are replaced, see `purecompose.nn.layers.residuals`, unless they directly have parameters, buffers
    or hooks, or a forward set on the instance. In blocks of timm and Hugging Face with a `drop_path` (see
    `purecompose.nn.layers.drop_paths`), of any rate, it is replaced by `purecompose.nn.layers.DropPath`: there, a
    skipped branch still updates its buffers, and the activation is still applied after it. The transformers of
    `torch.nn`, and those of Hugging Face without `drop_path` (BERT, GPT-2), are not changed, and neither are parts of
    the network without trainable parameters.

    Events: INIT, and BATCH_START if rates vary. Reads the clock; replaces the model, and writes the rates, a buffer of
    each block.

    Args:
        stochastic_method: "block" for one draw for the whole batch and branch, "sample" for one for each example.
        drop_rate: The probability that a branch is skipped, in [0, 1]; for "linear", in the last block. With the
            number 0 the algorithm never matches. An `hparam` or a schedule may be given: the default of an hparam is
            checked, later values are not.
        drop_distribution: "linear" for rates that rise with the depth, "uniform" for equal rates.
        drop_warmup: The time during which rates rise from 0: a share of the run, or a time such as "0.1dur", "2ep",
            "500ba".
        name: Name of the algorithm and of its metric.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range. At INIT: the network already has blocks with
            the other `stochastic_method`.

    Warns:
        UserWarning: At INIT: the network has no supported residual block.

    Example:
        >>> stochastic_depth("sample", 0.1)
        stochastic_depth(stochastic_method='sample', drop_rate=0.1, drop_distribution='linear')
        >>> stochastic_depth(drop_rate=0.0).match
        never

    References:
        Gao Huang, Yu Sun, Zhuang Liu, Daniel Sedra, Kilian Weinberger: Deep Networks with Stochastic Depth. ECCV 2016.
        https://arxiv.org/abs/1603.09382
        Minjia Zhang, Yuxiong He: Accelerating Training of Transformer-Based Language Models with Progressive Layer
        Dropping. NeurIPS 2020. https://arxiv.org/abs/2010.13369
    """
    warmup = Time.of(drop_warmup, TimeUnit.DURATION)
    rate = drop_rate * linear(0.0, 1.0, warmup) if warmup else drop_rate
    when = on(Event.INIT) if isinstance(rate, int | float) else on(Event.INIT, Event.BATCH_START)

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            state = _with_blocks(state, name, stochastic_method)
            # A schedule has no value before the first batch.
            return state if collect(rate, Schedule) else _with_rates(state, state.scalar(rate), drop_distribution)
        value = state.scalar(rate)
        metrics = {**state.metrics, f"{name}/drop_rate": as_scalar(value, torch.float32, state.device)}
        return _with_rates(state, value, drop_distribution).replace(metrics=metrics)

    settings = {
        "stochastic_method": stochastic_method,
        "drop_rate": rate,  # includes the warm-up, because schedules are evaluated at their place in the config
        "drop_distribution": drop_distribution,
    }
    return Algorithm(
        name,
        NEVER if drop_rate == 0 else when,
        apply,
        traits=frozenset({Trait.REQUIRED_ON_LOAD, Trait.SETS_BUFFERS, Trait.SKIPS_FROZEN_PARTS}),
        config=settings,
    )


def _with_blocks(state: State, name: str, stochastic_method: Method) -> State:
    module = state.model.module
    _check_blocks(module, name, stochastic_method)
    if not _blocks(module):
        return state
    # The rates here are placeholders: only _with_rates writes rates, at INIT or in the first batch.
    rules = stochastic_depth_rules(module, stochastic_method, 0.0)
    return surgery.operate(state, rules, name=name, skips_frozen=True)[0]


def _check_blocks(module: nn.Module, name: str, stochastic_method: Method) -> None:
    """Warn of a network without blocks, and reject blocks with the other `stochastic_method`."""
    _check_no_others(module, name, stochastic_method)
    if _blocks(module) or any(isinstance(child, (StochasticDepth, DropPath)) for child in module.modules()):
        return
    advice = (
        "A block is recognized by its children: branch and shortcut (and relu), those of torchvision's BasicBlock or "
        "Bottleneck, or norm1, attention, norm2 and feed_forward (and dropout); or by a drop_path, as in timm. Use "
        "these names in the network, or leave the method out; a library may have its own setting for it, such as "
        "layerdrop in Hugging Face's Wav2Vec2 and BART"
    )
    warn_of_nothing(name, "residual blocks", module, advice)


def _check_no_others(module: nn.Module, name: str, stochastic_method: Method) -> None:
    """Raise a `ValueError` for blocks with the other method: they would be kept, but with new rates."""
    for place, child in module.named_modules():
        if isinstance(child, (StochasticDepth, DropPath)) and child.method != stochastic_method:
            raise ValueError(
                f"{name}: expected blocks with method {stochastic_method!r}, got {child.method!r} in "
                f"{place or 'the network'!r}, from an earlier stochastic depth; use the same method, or start from "
                "the original network"
            )


def _with_rates(state: State, rate: float | Tensor, drop_distribution: Distribution) -> State:
    """Return the state with the rates of all blocks in their buffers."""
    new = {
        buffer: as_scalar(value, state.buffers[buffer].dtype, state.device)
        for buffer, value in _rates(state.model.module, rate, drop_distribution).items()
    }
    return state.replace(buffers={**state.buffers, **new})


def _rates(module: nn.Module, rate: Any, drop_distribution: Distribution) -> dict[str, Any]:
    """Return the rates of all blocks that have been replaced, by the names of their buffers."""
    buffers = [(name, f"{name}.drop_rate".lstrip("."), child) for name, child in module.named_modules()]
    # All drop paths of a block have the same rate.
    blocks = {
        buffer: name if isinstance(child, StochasticDepth) else name.rpartition(".")[0]
        for name, buffer, child in buffers
        if isinstance(child, (StochasticDepth, DropPath))
    }
    names = list(dict.fromkeys(blocks.values()))
    rates = dict(zip(names, stochastic_depth_rates(len(names), rate, drop_distribution), strict=True))
    return {buffer: rates[block] for buffer, block in blocks.items()}


def _blocks(module: nn.Module) -> list[str]:
    """Return the names of outermost residual blocks, except blocks already replaced and blocks inside these."""
    found: list[str] = []
    done: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(f"{outer}.".lstrip(".")) for outer in (*found, *done)):
            continue
        if isinstance(child, StochasticDepth):
            done.append(name)
        elif residuals(child) or drop_paths(child):
            found.append(name)
    return found
