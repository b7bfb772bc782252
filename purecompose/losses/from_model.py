"""The loss of a model that computes its own, as the models of transformers do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose import batch as batches
from purecompose._support.specs import check_whole
from purecompose.losses.functions import reduced
from purecompose.losses.targets import num_examples


@dataclass(frozen=True)
class ModelLoss:
    """The loss that the model computed itself: the outputs' entry or attribute `key`. Targets are not read.

    A scalar is taken as a mean and supports no other reduction; losses per example, (N, ...), support all of them. If
    the batch has labels, microbatches are weighted by the number of labels that are not `ignore_index`; otherwise by
    their number of examples. The first eager step checks the count against the `logits` among the outputs, if there are
    any.

    Args:
        key: The outputs' entry or attribute.
        labels: The batch's member (a key of `purecompose.batch`) that holds class indices; by default "labels", if the
            batch has it.
        ignore_index: The label that does not count.
        shift: Number of labels at the start of the last dim that the model leaves out; by default 1 for the causal
            language models of transformers, and 0 for other networks.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value; the outputs contain no such tensor, or reduction
            "sum" or "none" is requested of a scalar.

    Example:
        >>> model_loss({"loss": torch.tensor(2.0), "logits": torch.zeros(4, 3)}, None).item()
        2.0
        >>> padded = {"labels": torch.tensor([[1, 2, -100], [3, -100, -100]])}
        >>> model_loss.num_terms(None, padded)
        tensor(3)
    """

    key: str = "loss"
    labels: batches.Field | None = None
    ignore_index: int = -100
    shift: int | None = None

    def __post_init__(self) -> None:
        if self.labels is not None:
            batches.check_field(self.labels, "ModelLoss: labels")
        if self.shift is not None:
            check_whole(self.shift, "ModelLoss: shift", 0, hint="it is a number of labels")

    def of_network(self, net: nn.Module) -> ModelLoss:
        """Return the loss with the `shift` for a network, unless one was given."""
        return self if self.shift is not None else replace(self, shift=int(_is_causal_language_model(net)))

    def __call__(self, outputs: Any, targets: Any, reduction: str = "mean") -> Tensor:
        del targets
        loss = _member(outputs, self.key)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"expected outputs that carry the model's loss as {self.key!r}, got "
                f"{type(outputs).__name__} with {type(loss).__name__} there; let forward return it (many "
                "models do so only when given the labels)"
            )
        if loss.ndim:
            return reduced(loss, reduction)
        if reduction != "mean":
            raise ValueError(
                f"the model's own loss is a scalar, without losses per example for reduction={reduction!r}; use a loss "
                "of outputs and targets, such as losses.cross_entropy"
            )
        return loss

    def num_terms(self, outputs: Any, batch: Any) -> int | Tensor:
        """Return the number of labels in the batch that count, 0-d int64; without labels, the number of examples."""
        labels = self.labels_of(batch)
        if labels is None:
            return num_examples(outputs, batch)
        return (labels[..., self.shift or 0 :] != self.ignore_index).sum()

    def labels_of(self, batch: Any) -> Tensor | None:
        """Return the labels in a batch; `None` if `labels` is not set and the batch has no class indices as "labels".

        Raises:
            KeyError, TypeError: The batch has no member with the given name, or the member is not a tensor.
        """
        if self.labels is None:
            labels = _member(batch, "labels")
            is_index = isinstance(labels, Tensor) and labels.ndim and not labels.is_floating_point()
            return labels if is_index else None
        labels = batches.get(batch, self.labels)
        if not isinstance(labels, Tensor):
            raise TypeError(f"{self!r}: expected a tensor of labels in the batch, got {type(labels).__name__}")
        return labels

    def logits_and_labels(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the outputs' "logits", (N, C, ...), and the labels that belong to them, (N, ...), for losses and
        metrics.

        Args:
            outputs: The model's outputs, with logits (N, ..., C).
            batch: The batch, or the labels themselves.

        Raises:
            TypeError: There are no logits or no labels.
        """
        logits = _member(outputs, "logits")
        labels = batch if isinstance(batch, Tensor) else self.labels_of(batch)
        if not isinstance(logits, Tensor) or labels is None:
            missing = "'logits' among the outputs" if labels is not None else "labels in the batch"
            raise TypeError(
                f"expected {missing} of a model that computes its own loss, got outputs {type(outputs).__name__} and a "
                f"batch {type(batch).__name__}; name the labels by losses.ModelLoss(labels=...)"
            )
        if labels.ndim < 2:
            return logits, labels
        shift = self.shift or 0
        return logits[..., : labels.shape[-1] - shift, :].movedim(-1, 1), labels[..., shift:]

    def check(self, outputs: Any, batch: Any, *, reads_values: bool = True) -> None:
        """Raise if the labels that `num_terms` counts are not the ones that the model's loss averages over.

        Args:
            outputs: The model's outputs.
            batch: The batch.
            reads_values: Compare numbers as well, which waits for the device: the loss is compared with the cross
                entropy of the outputs' "logits" (N, ..., C) and the labels (N, ...), if both exist, with and without a
                shift.

        Raises:
            KeyError, TypeError: As for `labels_of`.
            ValueError: The loss leaves out a different number of labels at the start.
        """
        labels, loss = self.labels_of(batch), self(outputs, None)
        logits = _member(outputs, "logits")
        if not reads_values or labels is None or labels.ndim < 2 or loss.ndim or not isinstance(logits, Tensor):
            return
        if logits.shape[:-1] != labels.shape or self.shift not in (None, 0, 1):
            return
        own = self.shift or 0
        found = [_shifted_cross_entropy(logits, labels, shift, self.ignore_index) for shift in (own, 1 - own)]
        is_own, is_other = (torch.isclose(loss.double(), mean, rtol=1e-5, atol=1e-8).item() for mean in found)
        if is_other and not is_own:
            raise ValueError(
                f"{self!r}: the model's loss is the mean over the labels without the first {1 - own}, so microbatches "
                f"would be weighted wrongly: use losses.ModelLoss(shift={1 - own})"
            )


model_loss: ModelLoss = ModelLoss()
"""The loss that the model computes itself, as those of Hugging Face do; `ModelLoss` with its defaults."""


def _member(outputs: Any, key: str) -> Any:
    return outputs.get(key) if isinstance(outputs, Mapping) else getattr(outputs, key, None)


def _shifted_cross_entropy(logits: Tensor, labels: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Return the mean cross entropy between the labels and the logits `shift` positions before them."""
    length = labels.shape[-1] - shift
    rows = logits[..., :length, :].flatten(0, -2).double()
    return F.cross_entropy(rows, labels[..., shift:].flatten().long(), ignore_index=ignore_index)


def _is_causal_language_model(net: nn.Module) -> bool:
    """Return whether the network is one of transformers' causal language models, wrapped or not."""
    kinds = ([kind.__name__ for kind in type(module).__mro__] for module in net.modules())
    names = next((names for names in kinds if "PreTrainedModel" in names), [])
    if not names or "transformers" not in sys.modules:
        return False
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return not {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}.isdisjoint(names)
