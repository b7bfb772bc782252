"""Losses, and how they meet mixed targets.

A loss is any callable `(outputs, targets, reduction="mean")` with reduction "mean", "sum" or "none"; so
`torch.nn.functional.cross_entropy` is one as it stands. The losses here are frozen dataclasses: two of one
configuration are equal and hash alike, and a compiled step is found again.

`evaluate_loss` is the loss stage. A `Mixture` it resolves in one of two ways, which for cross entropy agree,
since that is linear in its targets:

    soft targets          loss(outputs, sum_k w_k onehot(t_k))
    interpolated losses   sum_k w_k loss(outputs, t_k)

A loss may say what its mean divides by, so that microbatches add up to the batch: by a method
`counted(outputs, targets)`, a bool tensor of the shape that reduction "none" gives, true where a position
enters the mean (padding does not); or by a method `num_terms(outputs, targets)`, the number itself, which
may be a sum of weights. A loss with neither is taken for a mean over all elements. Nothing here reads a value
back from the device.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose import batch as batches
from purecompose._support.checks import check_number, check_whole
from purecompose._support.device import as_scalar, sent
from purecompose.losses.targets import Mixture, has_index_targets, num_examples, one_hot, per_row, wide_dtype


__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Dice",
    "MeanSquaredError",
    "Mixture",
    "ModelLoss",
    "binary_cross_entropy",
    "check_loss",
    "counts_terms",
    "cross_entropy",
    "dice",
    "evaluate_loss",
    "has_index_targets",
    "model_loss",
    "mse",
    "num_examples",
    "num_terms",
    "one_hot",
    "per_example",
    "share_of_mean",
]


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross entropy, -sum_c weight_c t_c log softmax(outputs)_c, of index and dense targets.

    Called with outputs (N, C, ...), logits with classes in dim 1, and targets as indices (N, ...) or dense
    (N, C, ...). The mean is over the positions that count: left out are indices equal to `ignore_index` and
    dense rows of zeros, their dense form. Where nothing counts it is NaN, as torch's, and its gradient 0.

    With `weight` the mean divides by the sum of sum_c weight_c t_c over all positions. For indices that is torch's; for
    dense targets torch divides by the number of positions, which would give one-hot targets another mean than indices.

    Args:
        ignore_index: The index that stands for no class.
        weight: One weight per class, C numbers of 0 or more (a sequence or a tensor), kept as a tuple of floats; by
            default 1 for each.

    Raises:
        TypeError, ValueError: As `has_index_targets`; weights that are negative or not finite, or not C of them. An
            index of C or more raises torch's own error.

    Example:
        >>> outputs, targets = torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, -100])
        >>> round(cross_entropy(outputs, targets).item(), 4)
        0.1269
        >>> round(cross_entropy(outputs, one_hot(targets, outputs)).item(), 4)
        0.1269
        >>> outputs, targets = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
        >>> round(CrossEntropy(weight=[1.0, 3.0])(outputs, targets).item(), 4)
        1.6269
    """

    ignore_index: int = -100
    weight: Sequence[float] | Tensor | None = None

    def __post_init__(self) -> None:
        check_whole(self.ignore_index, "losses.CrossEntropy: ignore_index")
        if self.weight is None:
            return
        weight: Any = self.weight.tolist() if isinstance(self.weight, Tensor) else self.weight
        weight = weight.tolist() if hasattr(weight, "tolist") else weight  # an array of NumPy
        if not isinstance(weight, list | tuple):
            raise TypeError(f"losses.CrossEntropy: weight={self.weight!r}: expected a sequence of numbers or a tensor")
        checked = (check_number(value, f"losses.CrossEntropy: weight[{i}]", 0) for i, value in enumerate(weight))
        object.__setattr__(self, "weight", tuple(checked))

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        is_index = has_index_targets(outputs, targets)
        options: dict[str, Any] = {"ignore_index": self.ignore_index} if is_index else {}
        targets = targets.long() if is_index else self._dense(outputs, targets)
        if is_index and self.weight is None:
            return F.cross_entropy(outputs, targets, reduction=reduction, **options)
        weight = self._class_weights(outputs, outputs.dtype)
        if reduction != "mean":
            return F.cross_entropy(outputs, targets, weight=weight, reduction=reduction, **options)
        # torch divides dense targets by all rows, where the index form, which they have to equal, divides by those that
        # count; and of weights that add up to 0 its gradient is NaN.
        total = F.cross_entropy(outputs, targets, weight=weight, reduction="sum", **options)
        return _mean_of(total, self.num_terms(outputs, targets))

    def num_terms(self, outputs: Tensor, targets: Tensor | Mixture) -> Tensor:
        """0-d: how many positions enter the mean, int64; or the sum of their weights, float32 or wider."""
        weight = self._class_weights(outputs, wide_dtype(outputs))
        if weight is None:
            return self.counted(outputs, targets).sum()
        if isinstance(targets, Mixture):
            targets = targets.soft(outputs, ignore_index=self.ignore_index)
        elif has_index_targets(outputs, targets):
            is_counted = targets != self.ignore_index
            return (weight[targets.where(is_counted, 0).long()] * is_counted).sum()
        return (targets.to(weight.dtype).movedim(1, -1) * weight).sum()

    def counted(self, outputs: Tensor, targets: Tensor | Mixture) -> Tensor:
        """Bool, (N, ...): the positions that enter the mean; of a mixture, those where any term does."""
        if not isinstance(targets, Mixture):
            is_index = has_index_targets(outputs, targets)
            return targets != self.ignore_index if is_index else targets.any(dim=1)
        masks = []
        for term, weight in zip(targets.targets, targets.weights, strict=True):
            mask = self.counted(outputs, term)
            masks.append(mask & per_row(weight != 0, mask))
        return torch.stack(masks).any(dim=0)

    @staticmethod
    def _dense(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.ndim < 2:
            raise ValueError(
                f"expected outputs (N, C, ...), got shape {tuple(outputs.shape)}; keep the batch dim "
                "(`outputs.unsqueeze(0)`), or use binary_cross_entropy for one logit per example"
            )
        return targets if targets.dtype.is_floating_point else targets.to(wide_dtype(outputs))

    def _class_weights(self, outputs: Tensor, dtype: torch.dtype) -> Tensor | None:
        """(C,), on the outputs' device; `None` without weights."""
        if self.weight is None:
            return None
        weight = cast(tuple[float, ...], self.weight)
        if outputs.ndim > 1 and len(weight) != outputs.shape[1]:
            raise ValueError(
                f"losses.CrossEntropy: weight has {len(weight)} numbers, expected one for each of the "
                f"{outputs.shape[1]} classes of outputs of shape {tuple(outputs.shape)}"
            )
        return sent(weight, dtype, outputs.device)


@dataclass(frozen=True)
class MeanSquaredError:
    """(outputs - targets)^2, averaged over all elements. Shapes must be equal: nothing broadcasts.

    Raises:
        ValueError: Shapes differ.

    Example:
        >>> mse(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])).item()
        5.0
    """

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        if outputs.shape != targets.shape:
            # torch broadcasts (N, 1) against (N,) to (N, N), with a warning at most.
            raise ValueError(
                f"expected targets of the outputs' shape {tuple(outputs.shape)}, got "
                f"{tuple(targets.shape)}; reshape one of them (`targets.unsqueeze(1)` for outputs (N, 1))"
            )
        return F.mse_loss(outputs, targets, reduction=reduction)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Sigmoid cross entropy of logits, averaged over all elements or over examples.

        mean over elements   1 / (N C) sum_nc l(x_nc, t_nc)
        mean over examples   1 / N sum_nc l(x_nc, t_nc),   C times as large

    with l(x, t) = -t log sigmoid(x) - (1 - t) log(1 - sigmoid(x)). torch averages over elements; the published recipes
    (`purecompose.recipe`) and their learning rates were found with the mean over examples.

    Targets have the outputs' shape, with values in [0, 1]; or they are class indices (N, ...) for outputs
    (N, C, ...), C > 1, taken as one-hot. A negative index is an example of no class: it is not left out.

    Args:
        mean_over: "elements", or "examples" for sums over all outputs of an example; what reduction "none" gives is of
            the outputs' shape, or (N,).

    Raises:
        TypeError, ValueError: As `has_index_targets` and `one_hot`; another `mean_over`.

    Example:
        >>> outputs, targets = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
        >>> round(binary_cross_entropy(outputs, targets).item(), 4)
        0.6931
        >>> round(BinaryCrossEntropy(mean_over="examples")(outputs, targets).item(), 4)
        2.0794
    """

    mean_over: str = "elements"

    def __post_init__(self) -> None:
        if self.mean_over not in ("elements", "examples"):
            raise ValueError(f"BinaryCrossEntropy: mean_over={self.mean_over!r}: expected 'elements' or 'examples'")

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        if has_index_targets(outputs, targets):
            targets = one_hot(targets, outputs)
        elif not targets.dtype.is_floating_point:
            targets = targets.to(wide_dtype(outputs))
        if self.mean_over == "elements":
            return F.binary_cross_entropy_with_logits(outputs, targets, reduction=reduction)
        losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return _reduce(losses.reshape(len(losses), -1).sum(1), reduction)


@dataclass(frozen=True)
class Dice:
    """1 - the Dice coefficient of softmax probabilities p and targets t, for segmentation; a mean over examples.

        1 - mean_c (2 sum p_c t_c + smooth) / (sum p_c + sum t_c + smooth)

    The sums are over the positions of one example, so the loss of a batch is the mean of its examples', and does not
    depend on how they are cut into batches. Called with outputs (N, C, ...), logits with classes in dim 1, and targets
    as indices (N, ...) or dense (N, C, ...). Positions of index `ignore_index`, or of a dense row of zeros, are left
    out.

    Args:
        smooth: Gives classes that neither p nor t has a coefficient of 1; above 0.
        ignore_index: The index that stands for no class.

    Raises:
        TypeError, ValueError: As `has_index_targets` and `one_hot`; a `smooth` that is not above 0.

    Example:
        >>> round(dice(torch.zeros(1, 2, 4), torch.tensor([[0, 0, 1, 1]])).item(), 4)
        0.4

    References:
        Fausto Milletari, Nassir Navab, Seyed-Ahmad Ahmadi: V-Net. 3DV 2016. https://arxiv.org/abs/1606.04797
    """

    smooth: float = 1.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_number(self.smooth, "losses.Dice: smooth", 0, above=True)

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        if has_index_targets(outputs, targets):
            targets = one_hot(targets.where(targets != self.ignore_index, -1), outputs)
        probabilities = outputs.to(wide_dtype(outputs)).softmax(1) * targets.any(dim=1, keepdim=True)
        products, sums = (found.flatten(2).sum(2) for found in (probabilities * targets, probabilities + targets))
        coefficients = (2 * products + self.smooth) / (sums + self.smooth)
        return _reduce(1 - coefficients.mean(1), reduction)


@dataclass(frozen=True)
class ModelLoss:
    """The loss that the model computed itself: the outputs' entry or attribute `key`. Targets are not read.

    A scalar is taken for a mean, and is all there is; losses per example, (N, ...), reduce in every way.
    A scalar does not say how many terms it is the mean of. Where the batch has labels, microbatches are weighted by
    those that are not `ignore_index`, as a language model's loss over padded sentences is, so that k microbatches give
    the gradient of the whole batch; elsewhere by examples. The first eager step compares the count with `logits` among
    the outputs, if there are any.

    Args:
        key: The outputs' entry or attribute.
        labels: The batch's member (a key of `purecompose.batch`) that holds class indices; by default "labels", if the
            batch has it.
        ignore_index: The label that does not count.
        shift: How many labels at the start of the last dim the model leaves out: 1 for causal language models, which
            predict each label from those before it. By default 1 for those of transformers, which `State.create`
            recognizes, and 0 for other networks.

    Raises:
        ValueError: The outputs carry no such tensor; "sum" or "none" of a scalar.

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
        if self.shift is not None and (
            not isinstance(self.shift, int) or isinstance(self.shift, bool) or self.shift < 0
        ):
            raise ValueError(f"ModelLoss: shift={self.shift!r}: expected a number of labels, 0 or more")

    def of_network(self, net: nn.Module) -> ModelLoss:
        """This loss with the `shift` of a network, where none was given."""
        return self if self.shift is not None else replace(self, shift=int(_is_causal_language_model(net)))

    def __call__(self, outputs: Any, targets: Any, reduction: str = "mean") -> Tensor:
        del targets
        loss = _member(outputs, self.key)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"expected outputs that carry the model's loss as {self.key!r}, got "
                f"{type(outputs).__name__} with {type(loss).__name__} there; let forward return it (many "
                "models do so only when given the labels), or use another loss, such as losses.cross_entropy"
            )
        if loss.ndim:
            return _reduce(loss, reduction)
        if reduction != "mean":
            raise ValueError(
                f"the model's own loss is a scalar and has no reduction={reduction!r}; let the model return "
                "losses per example, or use a loss of outputs and targets, such as losses.cross_entropy"
            )
        return loss

    def num_terms(self, outputs: Any, batch: Any) -> int | Tensor:
        """Return how many labels of the batch count, 0-d int64; without labels the number of examples."""
        labels = self.labels_of(batch)
        if labels is None:
            return num_examples(outputs, None) if batch is None else batches.num_examples(batch)
        return (labels[..., self.shift or 0 :] != self.ignore_index).sum()

    def labels_of(self, batch: Any) -> Tensor | None:
        """Return the labels in a batch; `None` where they are not named and the batch has no class indices as "labels".

        Raises:
            KeyError, TypeError: The batch has no member of the name that was given, or one that is not a tensor.
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
            outputs: What the model returned, with logits (N, ..., C).
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
                f"batch {type(batch).__name__}; name the labels by losses.ModelLoss(labels=...), or use a function of "
                "(outputs, batch) for the metric"
            )
        if labels.ndim < 2:
            return logits, labels
        shift = self.shift or 0
        return logits[..., : labels.shape[-1] - shift, :].movedim(-1, 1), labels[..., shift:]

    def check(self, outputs: Any, batch: Any, *, reads_values: bool = True) -> None:
        """Raise where the labels that `num_terms` counts are not those that the model's loss is the mean over.

        Args:
            outputs: What the model returned.
            batch: The batch.
            reads_values: Compare numbers as well, which waits for the device: the loss with the cross entropy of the
                outputs' "logits" (N, ..., C) and the labels (N, ...), if there are such, with and without a shift.

        Raises:
            KeyError, TypeError: As `labels_of`.
            ValueError: The loss leaves out another number of labels at the start.
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
                f"would be weighted wrongly: write losses.ModelLoss(shift={1 - own})"
            )


def _member(outputs: Any, key: str) -> Any:
    return outputs.get(key) if isinstance(outputs, Mapping) else getattr(outputs, key, None)


def _shifted_cross_entropy(logits: Tensor, labels: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Return the mean cross entropy of labels and of the logits `shift` positions before them."""
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


cross_entropy = CrossEntropy()
mse = MeanSquaredError()
binary_cross_entropy = BinaryCrossEntropy()
dice = Dice()
model_loss = ModelLoss()


def check_loss(loss_fn: object, *, per_example: bool = False) -> None:
    """Raise early if this is not a loss or, with `per_example`, one that cannot give losses per example.

    Raises:
        TypeError: Not callable, a class in place of an instance, or no `reduction` parameter.
    """
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise TypeError(
            f'expected a loss, a callable (outputs, targets, reduction="mean"), got {loss_fn!r} '
            f"({type(loss_fn).__name__}); use losses.cross_entropy, torch.nn.functional.cross_entropy, or an "
            "instance where this is a class"
        )
    if per_example and (isinstance(loss_fn, ModelLoss) or not _takes_reduction(loss_fn)):
        raise TypeError(
            f'expected a loss that gives losses per example for reduction="none", got {loss_fn!r}, which '
            "does not; use one of purecompose.losses, a function such as torch.nn.functional.cross_entropy "
            "(in place of torch.nn.CrossEntropyLoss()), or give yours a `reduction` parameter"
        )


def evaluate_loss(loss_fn: Callable[..., Tensor], outputs: Any, targets: Any, reduction: str = "mean") -> Tensor:
    """Return the loss of plain or mixed targets: what the loss stage differentiates and logs.

    A mixture of one term is its plain target. Others become soft targets or, with `interpolate_loss`, a sum
    of the terms' losses per example; the mean of that is over the positions the loss counts (see the module).
    For "mean" the loss is called without `reduction`, so that a plain function of (outputs, targets) will do.

    Raises:
        TypeError: The loss cannot do what is asked (see `check_loss`); a mixture for a `ModelLoss`.
    """
    if not isinstance(targets, Mixture):
        return _call_loss(loss_fn, outputs, targets, reduction)
    if isinstance(loss_fn, ModelLoss):
        raise TypeError(
            "mixed targets cannot reach a loss that the model computed itself; use a loss of outputs and "
            "targets, such as losses.cross_entropy, or leave out the method that mixes"
        )
    if len(targets.targets) == 1:
        return _call_loss(loss_fn, outputs, targets.targets[0], reduction)
    if not targets.interpolate_loss:
        soft = targets.soft(outputs, ignore_index=getattr(loss_fn, "ignore_index", None))
        return _call_loss(loss_fn, outputs, soft, reduction)
    losses = _interpolated_losses(loss_fn, outputs, targets)
    if reduction == "mean" and hasattr(loss_fn, "counted"):
        return _mean_of(losses.sum(), num_terms(loss_fn, outputs, targets))
    return _reduce(losses, reduction)


def per_example(loss_fn: Callable[..., Tensor], outputs: Any, targets: Any) -> Tensor:
    """Return the loss of each example, (N,): the mean over its positions, or over those that the loss counts.

    An example in which nothing counts has loss 0.

    Raises:
        TypeError: The loss has no `reduction` parameter.
        ValueError: What it gives for "none" has no leading dim of N.
    """
    losses = evaluate_loss(loss_fn, outputs, targets, "none")
    _check_rows(loss_fn, losses, outputs, targets)
    if losses.ndim == 1:
        return losses
    counted = getattr(_counting(loss_fn), "counted", None)
    if counted is None:
        return losses.flatten(1).mean(1)
    return losses.flatten(1).sum(1) / counted(outputs, targets).flatten(1).sum(1).clamp(min=1)


def num_terms(loss_fn: Callable[..., Tensor], outputs: Any, targets: Any) -> int | Tensor:
    """Return how many terms the loss's mean divides by: the weight of one microbatch among others.

    The loss's own `num_terms(outputs, targets)` if it has one (0-d, whole or not), else the number of positions it
    counts (0-d, int64), else the number of examples. torch's cross entropy and negative log likelihood, as functions
    (also under functools.partial) and as modules, count as torch does, with `ignore_index` and `weight`. Not free:
    meant for steps of several microbatches.
    """
    counting = _counting(loss_fn)
    if hasattr(counting, "num_terms"):
        return counting.num_terms(outputs, targets)
    if hasattr(counting, "counted"):
        return counting.counted(outputs, targets).sum()
    return num_examples(outputs, targets)


def counts_terms(loss_fn: Callable[..., Tensor]) -> bool:
    """Return whether a loss says itself how many terms its mean divides by."""
    counting = _counting(loss_fn)
    return hasattr(counting, "num_terms") or hasattr(counting, "counted")


@dataclass(frozen=True)
class _TorchTerms:
    """What the mean of torch's cross entropy or negative log likelihood divides by."""

    ignore_index: int = -100
    weight: Tensor | None = None

    def counted(self, outputs: Tensor, targets: Tensor | Mixture) -> Tensor:
        """Bool, (N, ...): the positions that enter the mean, which for dense targets are all."""
        if isinstance(targets, Mixture) or targets.is_floating_point():
            return torch.ones_like(outputs[:, 0], dtype=torch.bool)
        return targets != self.ignore_index

    def num_terms(self, outputs: Tensor, targets: Tensor | Mixture) -> int | Tensor:
        """Return how many positions enter the mean, or the sum of their weights."""
        if isinstance(targets, Mixture) or targets.is_floating_point():
            return outputs[:, 0].numel()
        is_counted = self.counted(outputs, targets)
        if self.weight is None:
            return is_counted.sum()
        return (self.weight[targets.where(is_counted, 0).long()] * is_counted).sum()


def _counting(loss_fn: Any) -> Any:
    """Return the object that counts a loss's terms: the loss itself, or `_TorchTerms` for torch's losses."""
    if isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss):
        has_own_forward = type(loss_fn).forward not in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
        is_mean = loss_fn.reduction == "mean" and not has_own_forward
        return _TorchTerms(loss_fn.ignore_index, loss_fn.weight) if is_mean else loss_fn
    settings = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    function = loss_fn.func if isinstance(loss_fn, functools.partial) and not loss_fn.args else loss_fn
    if function is not F.cross_entropy and function is not F.nll_loss:
        return loss_fn
    given = {name: settings[name] for name in ("ignore_index", "weight") if name in settings}
    return _TorchTerms(**given) if settings.get("reduction", "mean") == "mean" else loss_fn


def share_of_mean(loss: Tensor, terms: int | Tensor, total: int | Tensor) -> Tensor:
    """Return a microbatch's share of the batch's mean: loss * terms / total; the shares add up to the mean.

    A microbatch in which nothing counts (its mean is NaN) adds zero, to the loss and to the gradients.

    Counts given as tensors make the result float32 or wider, whatever the loss is.

    Args:
        loss: 0-d, the microbatch's mean.
        terms: Its `num_terms`.
        total: The sum of `num_terms` over the microbatches.

    Example:
        >>> share_of_mean(torch.tensor(6.0), 1, 3).item()
        2.0
    """
    if not isinstance(terms, Tensor) and not isinstance(total, Tensor):
        return loss * (terms / total)
    dtype = wide_dtype(loss)
    terms, total = (as_scalar(count, dtype, loss.device) for count in (terms, total))
    return torch.where(terms > 0, loss * (terms / torch.where(total > 0, total, 1)), 0)


def _call_loss(loss_fn: Callable[..., Tensor], outputs: Any, targets: Any, reduction: str) -> Tensor:
    if reduction == "mean":
        return loss_fn(outputs, targets)
    try:
        return loss_fn(outputs, targets, reduction=reduction)
    except TypeError:
        # Signatures are read only now: that costs as much as a small loss does.
        check_loss(loss_fn, per_example=True)
        raise


def _interpolated_losses(loss_fn: Callable[..., Tensor], outputs: Any, mixture: Mixture) -> Tensor:
    total = None
    for targets, weight in zip(mixture.targets, mixture.weights, strict=True):
        losses = _call_loss(loss_fn, outputs, targets, "none")
        _check_rows(loss_fn, losses, outputs, targets)
        term = per_row(weight.to(wide_dtype(losses)), losses) * losses
        total = term if total is None else total + term
    assert total is not None, "a mixture has at least one term"
    return total


def _check_rows(loss_fn: object, losses: Tensor, outputs: Any, targets: Any) -> None:
    expected = num_examples(outputs, targets)
    if losses.ndim == 0 or losses.shape[0] != expected:
        raise ValueError(
            f'expected one loss for each of {expected} examples from {loss_fn!r} with reduction="none", got '
            f'shape {tuple(losses.shape)}; keep the batch dim first and reduce nothing for "none"'
        )


def _takes_reduction(loss_fn: Callable[..., Any]) -> bool:
    # A module's __call__ takes anything; its forward tells.
    inner = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(inner).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature: let them try
        return True
    return "reduction" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _mean_of(total: Tensor, count: int | Tensor) -> Tensor:
    """total / count; where the count is zero, NaN with a gradient of zero (that of 0 / 0 is NaN)."""
    count = count if isinstance(count, Tensor) else torch.full((), count, device=total.device)
    return torch.where(count > 0, total / torch.where(count > 0, count, 1), torch.nan)


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f'expected reduction "mean", "sum" or "none", got {reduction!r}; choose one of them')
    return losses.mean() if reduction == "mean" else losses.sum()
