"""Forms of targets, and `Mixture`: several weighted targets per example.

Class targets are indices (N, ...) or dense (N, C, ...), distinguished by shape. Mixing methods give each example more
than one target: a `Mixture` keeps them as terms, where example i has target t_k[i] with weight w_k[i], and converts
them to soft targets, sum_k w_k onehot(t_k), only if a loss needs them. No function here reads a value back from the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose.batch.examples import common_size, leading_sizes


def has_index_targets(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether targets are class indices (True) or dense (False), from their shapes.

    Args:
        outputs: (N, C, ...), classes in dim 1.
        targets: Indices (N, ...) of an integer dtype, or dense targets of the outputs' shape.

    Raises:
        TypeError: One of the two is not a tensor.
        ValueError: The targets fit neither form.

    Example:
        >>> outputs = torch.zeros(4, 3)
        >>> has_index_targets(outputs, torch.zeros(4, dtype=torch.int64)), has_index_targets(outputs, torch.zeros(4, 3))
        (True, False)
    """
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        remedy = (
            "pass `targets.soft(outputs)`, or call losses.evaluate_loss"
            if isinstance(targets, Mixture)
            else "let the loss pick the tensor out (as in `outputs.logits`), or use "
            "losses.model_loss where the model computes its own loss"
        )
        raise TypeError(
            f"expected outputs and targets as tensors, got {type(outputs).__name__} and {type(targets).__name__}; "
            f"{remedy}"
        )
    given, scores = targets.shape, outputs.shape
    if given == scores:
        return False
    if len(scores) != len(given) + 1 or (scores[0], *scores[2:]) != given:
        raise ValueError(_misfit(outputs, targets))
    if targets.dtype.is_floating_point or targets.dtype.is_complex or targets.dtype == torch.bool:
        raise ValueError(
            f"class indices need an integer dtype, got {targets.dtype} of shape {tuple(targets.shape)} for outputs of "
            f"shape {tuple(outputs.shape)}; use `targets.long()`, or to regress values `targets.unsqueeze(1)`"
        )
    return True


def check_classes(outputs: Tensor, name: str) -> None:
    """Raise an error unless outputs, (N, C, ...), have two classes or more: the softmax of one class is always 1."""
    if outputs.ndim < 2 or outputs.shape[1] < 2:
        raise ValueError(
            f"{name}: expected outputs (N, C, ...) with a batch dim and at least 2 classes, got shape "
            f"{tuple(outputs.shape)}; for one logit per example or pixel use losses.binary_cross_entropy, and as a "
            "metric metrics.binary_accuracy"
        )


def class_scores(outputs: Any, targets: Any) -> Any:
    """Return the tensor (N, C, ...) among a model's outputs whose shape tells the classes of these targets.

    Outputs that are a single tensor, and targets that are not one, are not examined.
    """
    if isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return outputs
    found = batches.tensors(outputs)
    if targets.is_floating_point():
        fitting = [scores for scores in found if scores.shape == targets.shape]
    else:
        fitting = [s for s in found if s.ndim == targets.ndim + 1 and s.shape[:1] + s.shape[2:] == targets.shape]
    if len({scores.shape for scores in fitting}) == 1:
        return fitting[0]
    shapes = ", ".join(str(tuple(scores.shape)) for scores in found)
    raise ValueError(
        f"cannot tell which of the outputs ({type(outputs).__name__} of shapes {shapes}) are the scores of the "
        f"classes in targets of shape {tuple(targets.shape)}: expected outputs (N, C, ...) of one shape that fits; "
        "mix losses in place of targets (interpolate_loss=True)"
    )


def one_hot(targets: Tensor, outputs: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """Return the dense form of class indices, shaped like the outputs.

    Negative indices, and `ignore_index`, become rows of zeros, which `losses.CrossEntropy` leaves out. An
    index of C or more raises an `IndexError` on a CPU and trips torch's assertion on a GPU.

    Args:
        targets: (N, ...), integer dtype.
        outputs: (N, C, ...), C at least 2; only shape, dtype and device are used.
        ignore_index: Another index to leave out, such as 255 in segmentation.

    Returns:
        (N, C, ...), float32, or float64 if the outputs are: half precision would round the weights.

    Raises:
        TypeError, ValueError: As for `has_index_targets`; the targets are already dense; there is a single class.

    Example:
        >>> one_hot(torch.tensor([2, -100]), torch.zeros(2, 3)).tolist()
        [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """
    if not has_index_targets(outputs, targets):
        raise ValueError(
            f"expected class indices with one dim less than the outputs, got shape {tuple(targets.shape)}, "
            "as the outputs have; such targets are dense already and can be used as they are"
        )
    return _scatter_classes(targets, torch.ones_like(targets, dtype=wide_dtype(outputs)), outputs, ignore_index)


def num_examples(outputs: Any, targets: Any) -> int:
    """Return the number of examples in outputs and targets, pytrees of tensors: the leading size that they agree on.

    The rule is that of `batch.num_examples`. Outputs that have no size in common with the targets do not count.

    Args:
        outputs: The network's outputs.
        targets: The batch's targets.

    Raises:
        ValueError: Neither contains a tensor with a batch dim, or the number is ambiguous.

    Example:
        >>> prior, y = torch.ones(1, 3), torch.zeros(8)
        >>> num_examples(torch.zeros(8, 3), None), num_examples(torch.zeros(8, 3), {"prior": prior, "y": y})
        (8, 8)
    """
    if isinstance(targets, Tensor) and targets.ndim and targets.shape[0] != 1:
        return targets.shape[0]
    own, others = leading_sizes(targets), leading_sizes(outputs)
    found = common_size(others, own)
    found = common_size([], own) if found is None else found
    if found is None:
        raise ValueError(
            f"cannot tell the number of examples: the batch dims are {own} in the targets ({type(targets).__name__}) "
            f"and {others} in the outputs ({type(outputs).__name__}); give the loss a method num_terms(outputs, "
            "targets)"
        )
    return found


def per_row(weight: Tensor, like: Tensor) -> Tensor:
    """Return a weight per example, (N,), reshaped so that it multiplies `like`, (N, ...), row by row."""
    return weight if like.ndim == 1 else weight[(...,) + (None,) * (like.ndim - 1)]


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for a float64 tensor, else float32, because half precision is too coarse for weights."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Mixture:
    """Targets in several terms, with a weight per example. An immutable pytree that splits with the batch.

    Attributes:
        targets: One tensor (N, ...) per term: class indices, or dense targets of the outputs' shape.
        weights: One float tensor (N,) per term; over the terms they sum to 1, or to the weight of the example.
        interpolate_loss: True to mix the losses of the terms instead of their targets. Static. If several mixings of
            one batch differ in it, losses are interpolated.
        is_weighted: True if examples have weights, by which the mean of the losses divides. Static; see `weighted`.

    Example:
        >>> mixture = Mixture.of(torch.tensor([0, 1])).mixed_with(torch.tensor([1, 0]), 0.25)
        >>> mixture.soft(torch.zeros(2, 2)).tolist()
        [[0.75, 0.25], [0.25, 0.75]]
    """

    targets: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    interpolate_loss: bool = False
    is_weighted: bool = False

    @classmethod
    def weighted(cls, targets: Tensor, weights: Tensor) -> Mixture:
        """Return targets of examples with weights, whose losses are interpolated.

        The mean of the losses is sum_i w_i l_i / sum_i w_i. Mixing methods mix the weights with the targets.

        Args:
            targets: (N, ...), indices or dense.
            weights: (N,), at least 0 (not checked), of any real dtype.

        Raises:
            TypeError, ValueError: One of them is not a tensor, or they differ in N.

        Example:
            >>> Mixture.weighted(torch.tensor([0, 1]), torch.tensor([1, 3])).weights
            (tensor([1., 3.]),)
        """
        plain = cls.of(targets)
        if not isinstance(weights, Tensor) or weights.shape != plain.weights[0].shape:
            came = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(
                f"expected one weight for each example, a tensor of shape {tuple(plain.weights[0].shape)}, got {came}"
            )
        weights = weights.to(torch.promote_types(weights.dtype, plain.weights[0].dtype))  # sums need more than half
        return replace(plain, weights=(weights,), interpolate_loss=True, is_weighted=True)

    def unweighted(self) -> Tensor | Mixture:
        """Return the targets without the weights of examples, so that those of the terms sum to 1; a single target as a
        tensor."""
        if len(self.targets) == 1:
            return self.targets[0]
        total = torch.stack(self.weights).sum(0)
        weights = tuple(weight / total.where(total > 0, 1) for weight in self.weights)
        return replace(self, weights=weights, is_weighted=False)

    @classmethod
    def of(cls, targets: Tensor | Mixture) -> Mixture:
        """Return targets as a mixture of one term with weight 1 (float64 for float64 targets, else float32).

        A mixture is returned unchanged.

        Raises:
            TypeError: The targets are not a tensor with a batch dim.
        """
        if isinstance(targets, Mixture):
            return targets
        if not isinstance(targets, Tensor) or targets.ndim == 0:
            came = "a 0-d tensor" if isinstance(targets, Tensor) else type(targets).__name__
            raise TypeError(
                f"expected targets as a tensor with a leading batch dim, got {came}; "
                "select the target in the batch by its index, key or accessor"
            )
        return cls((targets,), (targets.new_full(targets.shape[:1], 1.0, dtype=wide_dtype(targets)),))

    def map(self, fn: Callable[[Tensor], Tensor]) -> Mixture:
        """Apply `fn` to the targets of each term.

        If `fn` is affine in dense targets, as label smoothing is, this equals `fn` of the mixed target.
        """
        return replace(self, targets=tuple(fn(targets) for targets in self.targets))

    def extended(self, num_terms: int, interpolate_loss: bool = False) -> Mixture:
        """Return the same targets with more terms: the first one again, with weight 0.

        Args:
            num_terms: The number of terms, at least that of the mixture.
            interpolate_loss: See the class.
        """
        more = num_terms - len(self.weights)
        zeros = torch.zeros_like(self.weights[0])
        return replace(
            self,
            targets=self.targets + self.targets[:1] * more,
            weights=self.weights + (zeros,) * more,
            interpolate_loss=self.interpolate_loss or interpolate_loss,
        )

    def mixed_with(self, permutation: Tensor, weight: Tensor | float, interpolate_loss: bool = False) -> Mixture:
        """Mix each example with a partner; this doubles the terms.

        Args:
            permutation: (N,), int64: the partner of example i is example permutation[i].
            weight: Weight of the partner, in [0, 1] (not checked); 0-d, or (N,) to differ by example.
            interpolate_loss: See the class.

        Raises:
            ValueError: The permutation or the weight has the wrong shape.
        """
        self._check_partners(permutation, weight.shape if isinstance(weight, Tensor) else ())
        partners = tuple(targets.index_select(0, permutation) for targets in self.targets)
        is_plain = len(self.weights) == 1 and not self.is_weighted  # a single term, of weights 1
        if is_plain and not isinstance(weight, Tensor):
            own = self.weights[0]
            weights = own.new_full(own.shape, 1 - weight), own.new_full(own.shape, weight)
        else:
            kept = tuple(own - own * weight for own in self.weights)
            weights = kept + tuple(own.index_select(0, permutation) * weight for own in self.weights)
        interpolates = self.interpolate_loss or interpolate_loss
        return replace(self, targets=self.targets + partners, weights=weights, interpolate_loss=interpolates)

    def pasted(self, permutation: Tensor, inside: Tensor) -> Mixture:
        """Give each example its partner's targets within a region, where targets are maps such as masks.

        With K terms, each is pasted into each, with weights w_k[i] w_l[permutation[i]], so every position keeps the
        weights of the example it comes from.

        Args:
            permutation: (N,), int64: the partner of example i is example permutation[i].
            inside: (N, H, W) or (1, H, W), bool; targets are (N, H, W) or (N, ..., H, W).

        Raises:
            ValueError: The permutation or a target has the wrong shape, or examples have weights.
        """
        self._check_partners(permutation)
        if self.is_weighted:
            raise ValueError("a map with parts of two examples has no single weight: leave out weight_field")
        for targets in self.targets:
            if targets.ndim < 3 or targets.shape[-2:] != inside.shape[1:]:
                raise ValueError(
                    f"expected targets (N, ..., {inside.shape[1]}, {inside.shape[2]}) for a region of that size, got "
                    f"shape {tuple(targets.shape)}; mix targets of other shapes with `mixed_with`"
                )
        partners = [(targets[permutation], weight[permutation]) for targets, weight in self._terms]
        terms = []
        for own, weight in self._terms:
            region = inside[(slice(None),) + (None,) * (own.ndim - 3)]  # broadcasts against (N, ..., H, W)
            terms += [(torch.where(region, partner, own), weight * its) for partner, its in partners]
        targets, weights = zip(*terms, strict=True)
        return replace(self, targets=targets, weights=weights)

    def soft(self, outputs: Any, *, ignore_index: int | None = None) -> Tensor:
        """Return dense targets sum_k w_k onehot(t_k), shaped like the outputs, float32 or float64.

        An index that is negative or `ignore_index` adds nothing to its row. Among several outputs the tensor that fits
        the targets is taken; see `class_scores`.

        Raises:
            TypeError, ValueError: As for `has_index_targets` and `one_hot`.
        """
        outputs = class_scores(outputs, self.targets[0])
        terms = list[Tensor]()
        for targets, weight in self._terms:
            row_weight = per_row(weight.to(wide_dtype(outputs)), targets)
            if has_index_targets(outputs, targets):
                terms.append(_scatter_classes(targets, row_weight, outputs, ignore_index))
            else:
                terms.append(row_weight * targets)
        return sum(terms[1:], terms[0])

    @property
    def _terms(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.targets, self.weights, strict=True)

    def _check_partners(self, permutation: Tensor, weight_shape: tuple[int, ...] = ()) -> None:
        batch = self.weights[0].shape
        if permutation.shape != batch or weight_shape not in ((), batch):
            raise ValueError(
                f"expected a permutation of shape {tuple(batch)} and a weight of shape () or {tuple(batch)}, "
                f"got {tuple(permutation.shape)} and {tuple(weight_shape)}; draw them for the whole batch"
            )


# Unflattening checks nothing, because transforms replace the leaves by placeholders that are not tensors.
tree.register_node(
    Mixture,
    lambda mixture: (
        ("targets", "weights"),
        (mixture.targets, mixture.weights),
        (mixture.interpolate_loss, mixture.is_weighted),
    ),
    lambda _, children, settings: Mixture(*children, *settings),
)


def _scatter_classes(targets: Tensor, values: Tensor, outputs: Tensor, ignore_index: int | None) -> Tensor:
    """Return zeros of the outputs' shape with `values`, which broadcast, at the classes `targets`, (N, ...)."""
    if outputs.shape[1] < 2:
        # With one logit per example, class 0 would silently become the target 1.
        raise ValueError(
            f"class indices need at least two classes, got outputs of shape {tuple(outputs.shape)}; for one "
            "logit per example give targets of the outputs' shape (`targets.unsqueeze(1).float()`)"
        )
    ignored = targets < 0
    if ignore_index is not None and ignore_index >= 0:
        ignored = ignored | (targets == ignore_index)
    # Scatter rather than a comparison with arange, so that an index that is too large raises instead of giving zeros.
    # Each element is written at most once, so the result does not depend on the order of threads.
    index = targets.long().masked_fill(ignored, 0).unsqueeze(1)
    zeros = torch.zeros_like(outputs, dtype=values.dtype, requires_grad=False)
    try:
        return zeros.scatter(1, index, values.masked_fill(ignored, 0).unsqueeze(1))
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise IndexError(
            f"expected class indices below {outputs.shape[1]} for outputs of shape {tuple(outputs.shape)}: {error}. If "
            "it marks positions that do not count, let the loss declare it: losses.CrossEntropy(ignore_index=...)"
        ) from error


def _misfit(outputs: Tensor, targets: Tensor) -> str:
    hint = "check that the targets belong to these outputs"
    if outputs.ndim > 2 and outputs.shape[:-1] == targets.shape:
        hint = "classes belong in dim 1 (`outputs.transpose(1, 2)` for (N, length, C))"
    elif outputs.ndim < 2:
        hint = "outputs need a batch dim and a class dim (`outputs.unsqueeze(0)`)"
    return (
        "expected class indices (N, ...) or dense targets (N, C, ...) for outputs (N, C, ...), got targets "
        f"of shape {tuple(targets.shape)} for outputs of shape {tuple(outputs.shape)}; {hint}"
    )
