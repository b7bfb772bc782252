"""Methods on norm layers: ghost batch normalisation, and layer and group norms in half precision."""

from typing import Annotated

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from purecompose import surgery
from purecompose._support.device import AUTOCAST
from purecompose._support.messages import warn
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import surgery_method
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn.layers._forms import is_plain
from purecompose.nn.layers.norms import (
    GhostBatchNorm,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    check_momentum,
    is_known,
)
from purecompose.schedule.declared import Within
from purecompose.time.event import Event
from purecompose.time.predicates import on


@factory
def ghost_batchnorm(
    ghost_batch_size: Annotated[int, Within(1)] = 32, *, where: Where = None, name: str = "ghost_batchnorm"
) -> Algorithm:
    """Normalise each part of a batch separately.

    A batch of B examples is split into n = ceil(B / g) parts whose sizes differ by at most one, with g =
    `ghost_batch_size`. In training each part is normalised separately, and the running statistics r are updated for
    each part in order, with its mean or variance s:

        r <- (1 - m / n) r + m / n s        m: the momentum

    Evaluation is unchanged, except that a layer without running statistics also splits its batches there. With
    microbatches, each microbatch is split.

    timm's `BatchNormAct2d` is replaced as well, with its activation after the parts are joined. Other layers that
    override forward, or have hooks or parametrized tensors, and `nn.SyncBatchNorm` are not replaced.

    Events: INIT. Reads and replaces: the model and its parameters' names; there are no new parameters.

    Args:
        ghost_batch_size: The greatest number of examples that are normalised together, 16 to 64 in the papers.
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm.

    Raises:
        TypeError, ValueError: At INIT: a layer with `momentum=None`.

    Warns:
        UserWarning: At INIT: the network has no batch normalisation of one to three dimensions.

    Example:
        >>> ghost_batchnorm(16)
        ghost_batchnorm(ghost_batch_size=16)

    References:
        Elad Hoffer et al.: Train longer, generalize better. NeurIPS 2017. https://arxiv.org/abs/1705.08741
        Neofytos Dimitriou, Ognjen Arandjelovic: A New Look at Ghost Normalization. 2020.
        https://arxiv.org/abs/2007.08554
    """

    def norm(module: _BatchNorm, site: surgery.Site) -> nn.Module | None:
        if not is_known(module):
            return None
        # GhostBatchNorm checks this too, but its message cannot name the layer.
        check_momentum(module, f"ghost_batchnorm: {site.name or 'the network'}")
        return GhostBatchNorm(module, ghost_batch_size)

    rules = {nn.BatchNorm1d: norm, nn.BatchNorm2d: norm, nn.BatchNorm3d: norm, GhostBatchNorm: None}
    return surgery_method(name, rules, where)


@factory
def low_precision_layernorm(*, name: str = "low_precision_layernorm") -> Algorithm:
    """Compute layer norms in half precision.

        y = (x - mean) / sqrt(var + eps) * w + b,   over the normalised dimensions, with the biased variance

    Under autocast, torch converts the input of a layer norm to float32 and returns float32. Here input, weight, bias
    and result have autocast's dtype; mean and variance are still summed in float32. Names and values of parameters do
    not change, so weights can be exchanged with plain layer norms.

    Events: INIT, after all other methods. Reads and replaces: the model only. Under `precision="fp32"` and `"tf32"` it
    changes nothing, and warns. Parts of the network without trainable parameters are not changed.

    Args:
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no layer norms, or the forward pass is in full precision.

    Example:
        >>> low_precision_layernorm()
        low_precision_layernorm()

    References:
        Jimmy Lei Ba et al.: Layer Normalization. 2016. https://arxiv.org/abs/1607.06450
    """

    def norm(module: nn.LayerNorm, site: surgery.Site) -> nn.Module | None:
        del site
        return LowPrecisionLayerNorm.of(module) if is_plain(module, nn.LayerNorm) else None

    return _half_precision_method(name, {nn.LayerNorm: norm, LowPrecisionLayerNorm: None})


@factory
def low_precision_groupnorm(*, name: str = "low_precision_groupnorm") -> Algorithm:
    """Compute group norms in half precision.

        y = (x - mean) / sqrt(var + eps) * w + b,   for each example over a group's channels and all positions, with
                                                    the biased variance; w and b for each channel

    As in low-precision layer norm, input, weight and bias have autocast's dtype, and sums are in float32.

    Events: INIT, after all other methods, together with low-precision layer norm. Reads and replaces: the model only.
    Under `precision="fp32"` and `"tf32"` it changes nothing, and warns. Parts of the network without trainable
    parameters are not changed.

    Args:
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no group norms, or the forward pass is in full precision.

    Example:
        >>> low_precision_groupnorm()
        low_precision_groupnorm()

    References:
        Yuxin Wu, Kaiming He: Group Normalization. ECCV 2018. https://arxiv.org/abs/1803.08494
    """

    def norm(module: nn.GroupNorm, site: surgery.Site) -> nn.Module | None:
        del site
        return LowPrecisionGroupNorm.of(module) if is_plain(module, nn.GroupNorm) else None

    return _half_precision_method(name, {nn.GroupNorm: norm, LowPrecisionGroupNorm: None})


@factory
def fused_layernorm(*, name: str = "fused_layernorm") -> Algorithm:
    """Return `low_precision_layernorm` under its older name.

    Events: INIT, after all other methods. Reads and replaces: the model only.

    Args:
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: see `low_precision_layernorm`.

    Example:
        >>> fused_layernorm()
        fused_layernorm()
    """
    return low_precision_layernorm(name=name)


def _half_precision_method(name: str, rules: surgery.Rules) -> Algorithm:
    """Return a surgery at INIT that changes states with a half-precision forward pass, and warns about other states.

    It runs last, so that it finds layers that other methods have inserted.
    """

    def apply(event: Event, state: State) -> State:
        del event
        changed, report = surgery.operate(state, rules, name=name, skips_frozen=True)
        precision = state.context.precision
        if precision in AUTOCAST or not report.replaced:
            return changed
        warn(
            f"{name} has no effect under precision={precision!r}: torch's normalisations are single kernels already, "
            f"and only a forward pass in half precision has less to read and write. Give State.create "
            f"precision='bf16', or leave {name} out"
        )
        return state

    traits = frozenset({Trait.REQUIRED_ON_LOAD, Trait.FUSES_LAYERNORM, Trait.SKIPS_FROZEN_PARTS})
    return Algorithm(name, on(Event.INIT), apply, traits=traits)
