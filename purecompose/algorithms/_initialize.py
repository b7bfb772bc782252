"""Initialize: new initial weights by pattern: convolutions that begin as the identity, branches that begin at zero."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from purecompose import random
from purecompose._support.messages import warn
from purecompose._support.shards import laid_as, whole
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import warn_of_nothing
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.base import match_or_raise, matched
from purecompose.time.event import Event
from purecompose.time.predicates import on


@factory
def initialize(
    how: Literal["dirac", "zeros", "orthogonal"], where: Where = None, *, name: str = "initialize"
) -> Algorithm:
    """Set initial weights by pattern, before the first step.

    * "dirac": convolutions begin as the identity: the filter of output channel i passes on input channel i, for as many
      channels as there are on both sides, in each group. Further output channels keep their drawn filters. The middle
      of a kernel of even size k is at k // 2.
    * "zeros": all elements are 0, such as those of the last layers of residual branches, which then begin as the
      identity.
    * "orthogonal": matrices with orthonormal rows, or columns if there are fewer, drawn with the state's key; filters
      count as matrices with a row for each output channel.

    Frozen parameters are not changed. A tied parameter has its first name, and changes wherever it is used. Biases are
    changed only by "zeros".

    Events: INIT, after methods that change the model and before those that copy weights. Reads and replaces: the
    parameters.

    Args:
        how: The kind of weights.
        where: Pattern or patterns (`fnmatch`) of the names of parameters. By default, for "dirac", the weights of all
            convolutions but the network's first, in the order of definition.
        name: Name of the algorithm and of its draws; a second one in a step needs another name.

    Raises:
        TypeError, ValueError: A setting of the wrong type, or no `where` for "zeros" and "orthogonal". At INIT: a
            pattern matches no trainable parameter that can have such weights.

    Warns:
        UserWarning: At INIT: there is no convolution after the first; or the run is not at its beginning, so that the
            weights are kept.

    Example:
        >>> initialize("zeros", "*.out.*")
        initialize(how='zeros', where=('*.out.*',))

    References:
        Keller Jordan: 94% on CIFAR-10 in 3.29 Seconds on a Single GPU. 2024. https://arxiv.org/abs/2404.00498
        Hongyi Zhang et al.: Fixup Initialization: Residual Learning Without Normalization. ICLR 2019.
        https://arxiv.org/abs/1901.09321
        Andrew M. Saxe et al.: Exact Solutions to the Nonlinear Dynamics of Learning in Deep Linear Neural Networks.
        2013. https://arxiv.org/abs/1312.6120
    """
    patterns = None if where is None else tuple(where)
    if patterns is None and how != "dirac":
        raise ValueError(
            f"initialize: where=None: expected patterns of the parameters to set to {how}, such as '*.out.*'"
        )

    def apply(event: Event, state: State) -> State:
        del event
        groups = _groups(state.model.module)
        names = _chosen(state, how, groups, patterns, name)
        if not names:
            return state
        if state.timestamp.batch:
            when = f"initial ones are set at the beginning of a run, and this one is at {state.timestamp.batch}ba"
            warn(f"{name} leaves the weights as they are: {when}")
            return state

        def new(key: str) -> Tensor:
            old = whole(state.params[key])
            if how == "dirac":
                return _as_identity(old, groups[key])
            return torch.zeros_like(old) if how == "zeros" else _orthogonal(state.rng(f"{name}.{key}"), old)

        made = {key: laid_as(new(key), state.params[key]) for key in names}
        return state.replace(params={**state.params, **made})

    return Algorithm(
        name, on(Event.INIT), apply, traits=frozenset({Trait.SETS_WEIGHTS}), runs_after=(Trait.REQUIRED_ON_LOAD,)
    )


def _groups(root: nn.Module) -> dict[str, int]:
    """Return the numbers of groups of the convolutions by the names of their weights, in the order of definition."""
    names = {id(param): name for name, param in root.named_parameters()}
    convs = (module for module in root.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d))
    weights = ((conv._parameters.get("weight"), conv.groups) for conv in convs)
    return {names[id(weight)]: groups for weight, groups in weights if weight is not None}


def _chosen(
    state: State, how: str, groups: dict[str, int], patterns: tuple[str, ...] | None, name: str
) -> tuple[str, ...]:
    """Return the names of the parameters to change."""
    fits = {"dirac": groups.__contains__, "orthogonal": lambda key: state.params[key].ndim > 1}.get(how, bool)
    names = tuple(key for key in state.context.trainable if fits(key))
    if patterns is None:
        found = tuple(key for key in names if key != next(iter(groups), None))
        if not found:
            warn_of_nothing(name, "convolutions after the first that train", state.model.module, "Leave it out")
        return found
    kinds = {"dirac": "trainable weight of a convolution", "orthogonal": "trainable parameter with two dimensions"}
    for pattern in patterns:
        match_or_raise(pattern, names, f"{name}: where: {pattern!r}", kinds.get(how, "trainable parameter"))
    chosen = matched(patterns, names)
    return tuple(key for key in names if key in chosen)


def _as_identity(weight: Tensor, groups: int) -> Tensor:
    """Return filters that pass on input channel i as output channel i of each group; further ones are kept."""
    identity = nn.init.dirac_(torch.empty_like(weight), groups)
    is_set = identity.flatten(1).any(1).view(-1, *[1] * (weight.ndim - 1))
    return torch.where(is_set, identity, weight)


def _orthogonal(rng: random.Rng, like: Tensor) -> Tensor:
    """Return a tensor of this shape with orthonormal rows or columns, uniformly distributed, in float64."""
    rows, columns = like.shape[0], math.prod(like.shape[1:])
    drawn = random.normal(rng, (max(rows, columns), min(rows, columns))).double()
    q, r = torch.linalg.qr(drawn)
    q = q * r.diagonal().sign()
    return (q.T if rows < columns else q).reshape(like.shape)
