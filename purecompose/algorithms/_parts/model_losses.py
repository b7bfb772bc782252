"""Losses per example of a model that computes its own loss, such as a language model with labels in its inputs."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose import tree
from purecompose.losses import ModelLoss


def check_labelled(name: str, loss_fn: ModelLoss) -> None:
    """Raise a `TypeError` if the labels of the model's loss are not named."""
    if loss_fn.labels is None:
        raise TypeError(
            f"{name}: expected a loss that gives losses per example, got {loss_fn!r}, one number for a whole batch; "
            "name the labels, as in losses.ModelLoss(labels='labels', shift=1) for a causal language model (shift=0 "
            "if logits and labels are aligned), to compute them from the outputs' logits; or use a loss of outputs "
            "and targets, such as losses.cross_entropy"
        )


def check_outputs(name: str, loss_fn: ModelLoss, outputs: Any, batch: Any) -> None:
    """Raise a `ValueError` unless outputs have losses per example, or logits (N, ..., C) that fit labels (N, ...).

    Only shapes are checked.
    """
    own = _member(outputs, loss_fn.key)
    if isinstance(own, Tensor) and own.ndim:
        return
    labels, logits = loss_fn.labels_of(batch), _member(outputs, "logits")
    assert labels is not None, "see check_labelled"
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        came = f"{tree.describe(logits)} there" if isinstance(logits, Tensor) else "none"
        raise ValueError(
            f"{name}: the model's own loss is one number, so losses per example are computed from logits: "
            f"expected a tensor (N, ..., C) called 'logits' for labels {tree.describe(labels)}, got "
            f"{type(outputs).__name__} with {came}; let forward return them, or a loss for each example, or use a loss "
            "of outputs and targets"
        )


def model_losses(name: str, loss_fn: ModelLoss, outputs: Any, batch: Any) -> Tensor:
    """Return a loss for each example, (N,): the mean over its labels that are not ignored.

    These are the losses that the model returns, if it returns more than one number; otherwise the cross entropy of its
    logits and the labels without the first `loss_fn.shift` ones. An example without counted labels has loss 0.
    """
    check_outputs(name, loss_fn, outputs, batch)
    all_labels, own = loss_fn.labels_of(batch), _member(outputs, loss_fn.key)
    assert all_labels is not None, "see check_labelled"
    is_whole = not isinstance(own, Tensor) or own.ndim == 0
    if not is_whole and own.ndim == 1:
        return own
    labels = all_labels[..., loss_fn.shift :] if loss_fn.shift else all_labels
    counted = labels != loss_fn.ignore_index
    if not is_whole:
        if own.shape == all_labels.shape != labels.shape:
            own = own[..., : labels.shape[-1]]  # one loss for each input; the last inputs have no label
        if own.shape != labels.shape:
            return own.flatten(1).mean(1)
        return _row_means(own, counted)
    logits = _member(outputs, "logits").float()
    if loss_fn.shift:
        logits = logits[..., : -loss_fn.shift, :]
    flat = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten().long(), ignore_index=loss_fn.ignore_index, reduction="none"
    )
    return _row_means(flat.reshape(labels.shape), counted)


def _row_means(token_losses: Tensor, counted: Tensor) -> Tensor:
    num = len(token_losses)
    # where(), not a product with 0: losses that are not counted may be infinite.
    return torch.where(counted, token_losses, 0).reshape(num, -1).sum(1) / counted.reshape(num, -1).sum(1).clamp(min=1)


def _member(outputs: Any, key: str) -> Any:
    return outputs.get(key) if isinstance(outputs, Mapping) else getattr(outputs, key, None)
