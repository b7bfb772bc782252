"""The number of terms that a loss's mean divides by, which weights microbatches, processes and evaluation batches."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose._support.device import as_scalar
from purecompose._support.specs import shown
from purecompose.losses.from_model import ModelLoss
from purecompose.losses.functions import CrossEntropy
from purecompose.losses.targets import Mixture, num_examples as count_examples, per_row, wide_dtype


def num_terms(
    loss_fn: Callable[..., Tensor], outputs: Any, targets: Any, num_examples: int | None = None
) -> int | Tensor:
    """Return the number of terms that the loss's mean divides by, the weight of one microbatch among others.

    This is the loss's own `num_terms(outputs, targets)` if it has one (0-d, integer or float), else the number of
    positions it counts (0-d, int64), else the number of examples. torch's cross entropy and negative log likelihood
    count as torch does, with `ignore_index` and `weight`.

    Args:
        loss_fn: A loss, `(outputs, targets, reduction="mean")`.
        outputs: The network's outputs.
        targets: The batch's targets, or a `Mixture` of them.
        num_examples: The batch's number of examples; by default `losses.num_examples(outputs, targets)`.

    Example:
        >>> from purecompose import losses
        >>> num_terms(losses.CrossEntropy(ignore_index=-1), torch.zeros(4, 3), torch.tensor([0, 2, -1, -1])).item()
        2
    """
    counting = counter_of(loss_fn)
    if num_examples is not None and isinstance(loss_fn, ModelLoss) and loss_fn.labels_of(targets) is None:
        return num_examples
    if isinstance(targets, Mixture) and targets.is_weighted:
        return _sum_of_weights(loss_fn, outputs, targets)
    if hasattr(counting, "num_terms"):
        return counting.num_terms(outputs, targets)
    if hasattr(counting, "counted"):
        return counting.counted(outputs, targets).sum()
    return count_examples(outputs, targets) if num_examples is None else num_examples


def _sum_of_weights(loss_fn: Any, outputs: Any, mixture: Mixture) -> Tensor:
    """Return the sum of the weights of examples over the positions that count, each times the weight of its class."""
    counting = counter_of(loss_fn)
    of = getattr(counting, "position_weights", getattr(counting, "counted", None))
    total = mixture.weights[0].new_zeros(())
    for targets, weight in zip(mixture.targets, mixture.weights, strict=True):
        own = weight if of is None else of(outputs, targets)
        total = total + (weight if of is None else own * per_row(weight, own)).sum()
    return total


def ignore_index_of(loss_fn: Any) -> int | None:
    """Return the class index that a loss leaves out; `None` if it declares none.

    It is declared once, by the loss: an attribute `ignore_index`, or an argument of functools.partial. torch's cross
    entropy and negative log likelihood have it as functions, too.
    """
    if isinstance(loss_fn, functools.partial):
        return loss_fn.keywords.get("ignore_index", ignore_index_of(loss_fn.func))
    if loss_fn is F.cross_entropy or loss_fn is F.nll_loss:
        return -100
    return getattr(loss_fn, "ignore_index", None)


def counts_terms(loss_fn: Callable[..., Tensor]) -> bool:
    """Return whether a loss itself reports how many terms its mean divides by.

    Args:
        loss_fn: A loss.

    Example:
        >>> from purecompose import losses
        >>> counts_terms(losses.cross_entropy), counts_terms(lambda outputs, targets: outputs.mean())
        (True, False)
    """
    counting = counter_of(loss_fn)
    return hasattr(counting, "num_terms") or hasattr(counting, "counted")


def has_denominators(loss_fn: Any) -> bool:
    """Return whether a loss declares what it divides by, in a method `denominators(targets)`."""
    # Looked up in the class: a module without it would search its tensors first, in every step.
    return callable(getattr(type(loss_fn), "denominators", None))


def denominators_of(loss_fn: Any, targets: Any) -> Any:
    """Return the numbers by which a loss with the method `denominators` divides for these targets, a pytree.

    Raises:
        TypeError: The targets are mixed, which only the outputs can resolve.
    """
    if isinstance(targets, Mixture):
        raise TypeError(
            f"the denominators of the loss {shown(loss_fn)} are those of plain targets, but a method has mixed them: "
            "declare the loss by losses.over_batch(loss), or leave out the method"
        )
    return loss_fn.denominators(targets)


def share_of_mean(loss: Tensor, terms: int | Tensor, total: int | Tensor) -> Tensor:
    """Return a microbatch's share of the batch's mean: loss * terms / total; the shares add up to the mean.

    A microbatch in which nothing counts (its mean is NaN) adds zero. Counts given as tensors make the result float32 or
    wider.

    Args:
        loss: The microbatch's mean, 0-d.
        terms: The microbatch's `num_terms`.
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


def for_mixtures(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the loss that takes a `Mixture`'s targets: the library's for torch's cross entropy, else the loss itself.

    torch's cross entropy refuses dense targets if `ignore_index` is 0 or more, and counts rows of zeros, which are the
    dense form of ignored positions.
    """
    settings = _torch_settings(loss_fn)
    if settings is None or settings.is_likelihood:
        return loss_fn
    return _MixedCrossEntropy(settings.ignore_index, settings.weight, settings.label_smoothing)


def counter_of(loss_fn: Any) -> Any:
    """Return the object that counts a loss's terms: the loss itself, or `_TorchTerms` for torch's losses."""
    settings = _torch_settings(loss_fn)
    return loss_fn if settings is None else _TorchTerms(settings.ignore_index, settings.weight)


class _TorchSettings(NamedTuple):
    """Settings of torch's cross entropy or negative log likelihood."""

    is_likelihood: bool
    ignore_index: int = -100
    weight: Tensor | None = None
    label_smoothing: float = 0.0


def _torch_settings(loss_fn: Any) -> _TorchSettings | None:
    """Return the settings of one of torch's losses, a function (also under functools.partial) or a module.

    `None` for any other loss, and for a reduction other than a mean.
    """
    if isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss):
        function = F.nll_loss if isinstance(loss_fn, nn.NLLLoss) else F.cross_entropy
        has_own_forward = type(loss_fn).forward not in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
        given = None if has_own_forward else {**loss_fn.__dict__, "weight": loss_fn.weight}
    else:
        is_partial = isinstance(loss_fn, functools.partial)
        function, given = (loss_fn.func, loss_fn.keywords) if is_partial else (loss_fn, {})
        if function not in (F.cross_entropy, F.nll_loss) or (is_partial and loss_fn.args):
            given = None
    if given is None or given.get("reduction", "mean") != "mean":
        return None
    settings = {name: given[name] for name in ("ignore_index", "weight", "label_smoothing") if name in given}
    return _TorchSettings(function is F.nll_loss, **settings)


@dataclass(frozen=True)
class _TorchTerms:
    """Terms that the mean of torch's cross entropy or negative log likelihood divides by."""

    ignore_index: int = -100
    weight: Tensor | None = None

    def counted(self, outputs: Tensor, targets: Tensor | Mixture) -> Tensor:
        """Return the mask of the positions that enter the mean, bool (N, ...): all of them for dense targets."""
        if isinstance(targets, Mixture):
            return self._of_mixtures.counted(outputs, targets)
        if targets.is_floating_point():
            return torch.ones_like(outputs[:, 0], dtype=torch.bool)
        return targets != self.ignore_index

    def num_terms(self, outputs: Tensor, targets: Tensor | Mixture) -> int | Tensor:
        """Return the number of positions that enter the mean, or the sum of their weights."""
        if isinstance(targets, Mixture):
            return self._of_mixtures.num_terms(outputs, targets)
        if targets.is_floating_point():
            return outputs[:, 0].numel()
        is_counted = self.counted(outputs, targets)
        if self.weight is None:
            return is_counted.sum()
        return (self.weight[targets.where(is_counted, 0).long()] * is_counted).sum()

    def position_weights(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what each position adds to the sum of weights, (N, ...)."""
        return self._of_mixtures.position_weights(outputs, targets)

    @property
    def _of_mixtures(self) -> CrossEntropy:
        return _MixedCrossEntropy(self.ignore_index, self.weight)


@dataclass(frozen=True)
class _MixedCrossEntropy(CrossEntropy):
    """torch's cross entropy for targets of a `Mixture`, in whose dense form rows of zeros do not count."""

    weight: Tensor | None = None

    def __post_init__(self) -> None:
        """Check nothing: torch does, and reading the weights would wait for the device."""

    def _class_weights(self, outputs: Tensor, dtype: torch.dtype) -> Tensor | None:
        return None if self.weight is None else self.weight.to(outputs.device, dtype)


Loss = TypeVar("Loss", bound=Callable[..., Any])


def over_batch(loss: Loss) -> Loss:
    """Declare that a loss couples examples: it is not a mean of losses of single examples.

    Contrastive losses and normalisation over the batch are such losses. In microbatches and on several processes, the
    outputs of all slices are computed first, the loss is that of all outputs together, and the gradient is propagated
    back slice by slice ("GradCache"), so that each slice passes forward twice. BatchNorm still uses the statistics of
    each slice. A class may set the attribute `couples_examples = True` instead.

    A sum of means with different denominators needs no second pass if the loss declares them; see `purecompose.losses`.

    Args:
        loss: `(outputs, targets) -> loss`, a function or module. The tensors in outputs and targets have the examples
            along their first dimension (`batch_dim` of `State.create`).

    Returns:
        The loss, marked; the argument is not changed.

    Raises:
        TypeError: It is not a function, or `losses.model_loss`, which is computed in the network.

    References:
        Luyu Gao et al.: Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup. 2021.
        https://arxiv.org/abs/2101.06983

    Example:
        >>> import torch
        >>> def info_nce(outputs, targets):
        ...     similarities = outputs["text"] @ outputs["image"].T
        ...     return torch.nn.functional.cross_entropy(similarities, torch.arange(len(similarities)))
        >>> couples_examples(info_nce), couples_examples(over_batch(info_nce))
        (False, True)
    """
    if not callable(loss) or isinstance(loss, (type, ModelLoss)):
        raise TypeError(f"losses.over_batch: expected a function (outputs, targets) -> loss, got {shown(loss)}")
    takes_mark = not inspect.isroutine(loss) and hasattr(loss, "__dict__")  # an object with __slots__ does not
    marked: Any = copy.copy(loss) if takes_mark else functools.partial(loss)
    object.__setattr__(marked, "couples_examples", True)
    return marked


def couples_examples(loss: Any) -> bool:
    """Return whether a loss declares that it couples examples; see `over_batch`.

    Args:
        loss: A loss.

    Example:
        >>> import torch
        >>> couples_examples(torch.nn.functional.mse_loss), couples_examples(over_batch(torch.nn.functional.mse_loss))
        (False, True)
    """
    return getattr(loss, "couples_examples", False)
