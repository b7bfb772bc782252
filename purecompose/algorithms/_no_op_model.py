"""No-op model: replaces the network by one number, for timing everything else."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose import batch as batches, surgery
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.context import Static
from purecompose.core.state import State
from purecompose.losses import CrossEntropy, ModelLoss
from purecompose.losses.targets import wide_dtype
from purecompose.losses.terms import ignore_index_of
from purecompose.optim.wrapping import without_groups
from purecompose.time.event import Event
from purecompose.time.predicates import on


_INDICES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FEWEST = 10
"""Smallest number of classes in scores; top-k metrics need several."""


class NoOpModel(nn.Module):
    """Network that multiplies targets by a weight, initially 1.5, in training, and returns them in evaluation.

    Args:
        has_classes: True to return integer targets, in evaluation, as scores of classes, 1 for the target's class and 0
            for others, which metrics of classification take.

    Example:
        >>> NoOpModel(has_classes=True).eval()(torch.tensor([3, 1])).argmax(dim=1)
        tensor([3, 1])
    """

    def __init__(self, has_classes: bool = False) -> None:
        super().__init__()
        self.has_classes = has_classes
        self.weight: nn.Parameter = nn.Parameter(torch.tensor(1.5))

    def forward(self, targets: Tensor) -> Tensor:
        """Map any shape and dtype to the same shape, floating in training; scores are (N, C, ...), floating.

        Raises:
            TypeError: The targets are not a tensor.
        """
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

    Example:
        >>> NoOpLoss(-100)(torch.tensor([3.0, -150.0]), torch.tensor([2, -100])).item()
        1.0
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
