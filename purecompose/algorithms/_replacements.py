"""Methods that replace norm layers, by ghost batch normalisation or layer and group norms in half precision, and
the whole network, by one number.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from purecompose import batch as batches, surgery
from purecompose._support.device import AUTOCAST
from purecompose._support.messages import warn
from purecompose.algorithms._parts import Where, surgery_method
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.context import Static
from purecompose.core.state import State
from purecompose.losses import CrossEntropy, ModelLoss
from purecompose.losses.targets import wide_dtype
from purecompose.losses.terms import ignore_index_of
from purecompose.nn.layers.replacing import (
    GhostBatchNorm,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    check_momentum,
    is_known,
    is_plain,
)
from purecompose.optim.wrapping import without_groups
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
            "and only a forward pass in half precision, State.create(precision='bf16'), has less to read and write"
        )
        return state

    traits = frozenset({Trait.REQUIRED_ON_LOAD, Trait.FUSES_LAYERNORM, Trait.SKIPS_FROZEN_PARTS})
    return Algorithm(name, on(Event.INIT), apply, traits=traits)


_INDICES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FEWEST = 10
"""Smallest number of classes in scores; top-k metrics need several."""


class NoOpModel(nn.Module):
    """Network that multiplies targets by a weight, initially 1.5, in training, and returns them in evaluation.

    Args:
        has_classes: True to return integer targets, in evaluation, as scores of classes, 1 for the target's class and 0
            for others, which metrics of classification take.
    """

    def __init__(self, has_classes: bool = False) -> None:
        super().__init__()
        self.has_classes = has_classes
        self.weight: nn.Parameter = nn.Parameter(torch.tensor(1.5))

    def forward(self, targets: Tensor) -> Tensor:
        """Map any shape and dtype to the same shape, floating in training; scores are (N, C, ...), floating."""
        if not isinstance(targets, Tensor):
            raise TypeError(
                f"no_op_model: expected a tensor as target, got {type(targets).__name__}; select one with target_field "
                "of State.create, and leave out methods that mix targets"
            )
        if self.training:
            return targets * self.weight
        if not self.has_classes or targets.ndim == 0 or targets.dtype not in _INDICES:
            return targets
        indices = targets.long().clamp(min=0)  # ignored targets are negative
        num = max(_FEWEST, int(indices.max()) + 1 if indices.numel() else 0)
        return F.one_hot(indices, num).movedim(-1, 1).to(self.weight)


@dataclass(frozen=True)
class NoOpLoss:
    """Squared error (outputs - targets)^2, averaged over the elements that are not ignored.

    Outputs have the targets' shape, or are class scores (N, C, ...), of which the argmax is used.
    """

    ignore_index: int | None = None

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        dtype = wide_dtype(outputs)
        values = outputs.argmax(dim=1) if outputs.ndim == targets.ndim + 1 else outputs
        losses = (values.to(dtype) - targets.to(dtype)).square() * self.counted(outputs, targets)
        if reduction == "none":
            return losses
        total = losses.sum()
        return total / self.counted(outputs, targets).sum().clamp(min=1) if reduction == "mean" else total

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return which elements are not ignored, bool, of the targets' shape."""
        del outputs
        if self.ignore_index is None or targets.is_floating_point():
            return torch.ones_like(targets, dtype=torch.bool)
        return targets != self.ignore_index


@factory
def no_op_model(*, name: str = "no_op_model") -> Algorithm:
    """Replace the network by a number.

        training      outputs = w y,   loss = mean((w y - y)^2),   dloss/dw = 2 (w - 1) mean(y^2)       w = 1.5 at first
        evaluation    outputs = y;   for class indices under a cross entropy, scores (N, C, ...) with the maximum at y

    The network's input is the target y; the batch's inputs are read, moved and prepared, but not used. Elements with
    the `ignore_index` of the state's loss are left out of the new loss. If the model computes its own loss, the target
    is the field that `ModelLoss.labels` names, by default "labels" if the batch has it, or else the state's
    `target_field`.

    Events: INIT, before all other methods. Replaces: the model, its parameters and buffers, the optimizer's state and
    its groups, the loss, and the fields of the model's input and of the target.

    The number of classes of the scores is read from the targets on the host, in evaluation only.

    Args:
        name: Name of the algorithm.

    Example:
        >>> no_op_model()
        no_op_model()
    """

    def apply(event: Event, state: State) -> State:
        del event
        if isinstance(state.model.module, NoOpModel):
            return state
        state = state.replace(optimizer=without_groups(state.optimizer))
        given = state.context.loss
        has_classes = isinstance(given, CrossEntropy) or given is F.cross_entropy

        def whole(module: nn.Module, site: surgery.Site) -> nn.Module | None:
            del module
            return NoOpModel(has_classes) if site.parent is None else None

        changed, _ = surgery.operate(state, {nn.Module: whole}, name=name)
        key = _target_field(state)
        loss = NoOpLoss(ignore_index_of(given))
        names = {*changed.context.loss_param_names, *changed.context.loss_buffer_names}
        context = changed.context.replace(
            loss=loss, loss_model=None, frozen=changed.context.frozen - names, input_field=key, target_field=key
        )
        params = {n: param for n, param in changed.params.items() if n not in names}
        buffers = {n: buffer for n, buffer in changed.buffers.items() if n not in names}
        changed = changed.replace(
            static=Static(context, changed.static.timestamp),
            params=params,
            buffers=buffers,
            opt_state=context.optimizer.init(params),
        )
        return changed.to(state.device)

    # Runs first: slots and surgery of other methods would otherwise refer to the network that is replaced.
    return Algorithm(name, on(Event.INIT), apply, traits=frozenset({Trait.REQUIRED_ON_LOAD}), runs_before=tuple(Trait))


@dataclass(frozen=True)
class _Labels:
    """Field of the labels of a model's own loss, where they are not named."""

    loss: ModelLoss
    target_field: batches.Field | None

    def __call__(self, batch: Any) -> Any:
        labels = self.loss.labels_of(batch)
        return batches.get(batch, self.target_field) if labels is None else labels


def _target_field(state: State) -> batches.Field | None:
    loss, own = state.context.loss, state.context.target_field
    if not isinstance(loss, ModelLoss):
        return own
    return _Labels(loss, own) if loss.labels is None else loss.labels
