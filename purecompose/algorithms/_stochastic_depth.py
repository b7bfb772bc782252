"""Stochastic depth: skips branches of residual blocks at random, so that many shallower networks are trained."""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.device import as_scalar
from purecompose.algorithms._parts.surgery import changed, warn_of_nothing
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn.layers.stochastic_depth import DropPath, StochasticDepth, drop_paths, residuals
from purecompose.schedule import Scalar, Schedule, collect, linear
from purecompose.schedule.declared import Within
from purecompose.time import Time, TimeLike, TimeUnit
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on
from purecompose.time.units import named_point


Method = Literal["block", "sample"]
Distribution = Literal["uniform", "linear"]

_ADVICE = (
    "A block is recognized by its children: branch and shortcut (and relu), those of torchvision's BasicBlock or "
    "Bottleneck, or norm1, attention, norm2 and feed_forward (and dropout); or by a drop_path, as in timm. Use these "
    "names in the network, or leave the method out; a library may have its own setting for it, such as layerdrop in "
    "Hugging Face's Wav2Vec2 and BART"
)


@factory
def stochastic_depth(
    stochastic_method: Method = "block",
    drop_rate: Annotated[Scalar, Within(0, 1, hint="it is how often a branch is left out")] = 0.2,
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
        TypeError, ValueError: At INIT: the network already has blocks with the other `stochastic_method`.

    Warns:
        UserWarning: At INIT: the network has no supported residual block.

    Example:
        >>> stochastic_depth("sample", 0.1)
        stochastic_depth(stochastic_method='sample', drop_rate=0.1, drop_distribution='linear')
        >>> stochastic_depth(drop_rate=0.0).match
        never

    References:
        Gao Huang et al.: Deep Networks with Stochastic Depth. ECCV 2016. https://arxiv.org/abs/1603.09382
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
    """Return the state with its blocks replaced, which is done once; their rates are still to be written."""
    network = state.model.module
    done = {place: child for place, child in network.named_modules() if isinstance(child, (StochasticDepth, DropPath))}
    for place, child in done.items():
        if child.method != stochastic_method:
            raise ValueError(
                f"{name}: expected blocks with method {stochastic_method!r}, got {child.method!r} in "
                f"{place or 'the network'!r}, from an earlier stochastic depth; use the same method, or start from "
                "the original network"
            )
    if not any(residuals(child) or drop_paths(child) for child in network.modules()):
        if not done:
            warn_of_nothing(name, "residual blocks", network, _ADVICE)
        return state

    def block(module: nn.Module, site: surgery.Site) -> nn.Module | None:
        del site
        if residuals(module):
            return StochasticDepth(module, stochastic_method, 0.0)
        paths = {path: DropPath(stochastic_method, 0.0) for path in drop_paths(module)}
        return changed(module, None, **paths) if paths else None

    rules = {nn.Module: block, StochasticDepth: None, DropPath: None}
    return surgery.operate(state, rules, name=name, skips_frozen=True)[0]


def _with_rates(state: State, rate: float | Tensor, drop_distribution: Distribution) -> State:
    """Return the state with the rates of all blocks in their buffers."""
    # All drop paths of a block have the same rate.
    blocks = {
        f"{place}.drop_rate".lstrip("."): place if isinstance(child, StochasticDepth) else place.rpartition(".")[0]
        for place, child in state.model.module.named_modules()
        if isinstance(child, (StochasticDepth, DropPath))
    }
    places = list(dict.fromkeys(blocks.values()))
    new = {}
    for buffer, block in blocks.items():
        share = 1.0 if drop_distribution == "uniform" else (places.index(block) + 1) / len(places)
        new[buffer] = as_scalar(rate * share, state.buffers[buffer].dtype, state.device)
    return state.replace(buffers={**state.buffers, **new})
