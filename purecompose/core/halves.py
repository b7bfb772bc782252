"""The comparison of a loss of some examples with the mean over two halves of them.

Its gradients must be the same, times the weights of the halves. They are computed in double precision where the code
permits it, at the network's outputs or parameters and at others, so that a term of any weight is seen.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from purecompose import batch as batches
from purecompose._support.internals import graph_of
from purecompose.core.means import part_of
from purecompose.core.state import State


class Variant(NamedTuple):
    """A variant of the network's outputs, or of its parameters, at which a loss is evaluated."""

    rows: range
    """The examples."""
    is_moved: bool
    """True for others than there are."""
    is_double: bool
    """True for double precision."""

    def part(self, tensor: Tensor, num_examples: int) -> Tensor:
        if is_differentiable(tensor):
            if self.is_moved:
                half = -(-num_examples // 2)
                scale = torch.linspace(0.25, 1, half, device=tensor.device).reshape(-1, *[1] * (tensor.ndim - 1))
                tensor = torch.cat([tensor.roll(1, 0)[:half] * scale.to(tensor.dtype), tensor[half:]])
            tensor = _doubled(tensor) if self.is_double else tensor
        return tensor[self.rows.start : self.rows.stop]


def check_halves(
    find: Callable[[State, Variant], "Found | None"], state: State, subject: str, names: Collection[str]
) -> bool:
    """Raise a `NotMeanError` unless loss and gradients are the means over two halves; return if they were compared.

    Args:
        find: Function that evaluates the loss and its gradients, given a state with a part of the batch, and the
            variant of the network's outputs; it returns `None` if they cannot be compared.
        names: Parameters and buffers that take part, which are converted to double precision.
    """

    def compare(state: State, is_double: bool) -> bool:
        for is_moved in (True, False):
            try:
                parts = [find(part, Variant(rows, is_moved, is_double)) for part, rows in with_halves(state)]
            except Exception as error:
                if is_moved and not isinstance(error, NotMeanError):
                    continue  # the others are not such as the network might return
                raise
            found = [one for one in parts if one is not None]
            if len(found) == len(parts) and found[0].loss.isfinite():
                _compare(found, state, subject)
                return True
        return False

    try:
        return compare(_in_double(state, names), True)
    except NotMeanError:
        raise
    except Exception:  # for example because a constant is in single precision
        return compare(state, False)


def with_halves(state: State) -> Iterator[tuple[State, range]]:
    """Yield the state, and with each half of its batch, each with its examples."""
    layout, num, first = state.context.layout, state.num_examples, 0
    yield state, range(num)
    for part in layout.split(state.batch, 2):
        rows = range(first, first := first + layout.num_examples(part))
        own = part_of(state.denominators, len(rows), num)
        yield state.replace(batch=part, first_example=(state.first_example or 0) + rows.start, denominators=own), rows


class Found(NamedTuple):
    """The loss of some examples, and its gradients."""

    loss: Tensor
    grads: Sequence[Tensor]
    num_rows: int
    """Number of gradients, the first ones, that have a row for each example."""
    weight: float
    eps: float
    """Relative precision of the coarsest dtype in which it was computed."""
    tolerance: float
    """Largest difference of gradients that is rounding, relative to the largest number."""


class NotMeanError(ValueError):
    """The loss of a batch is not the mean over its parts."""


def _compare(found: Sequence[Found], state: State, subject: str) -> None:
    """Raise unless the first loss and its gradients are the means over the other two, weighted by their terms."""
    whole, first, second = found
    total = first.weight + second.weight
    if not total:
        return

    def shares(*tensors: Tensor) -> list[Tensor]:
        # The mean over a part in which nothing counts is NaN, and has no weight.
        weights = (first.weight / total, second.weight / total)
        return [t * share if share else torch.zeros_like(t) for t, share in zip(tensors, weights, strict=True)]

    pairs = [(one, shares(*parts)) for one, *parts in zip(whole.grads, first.grads, second.grads, strict=True)]
    scales = [max(map(largest, (one, *parts))) for one, parts in pairs]
    compared = [
        (
            one,
            torch.cat(parts) if index < whole.num_rows else torch.stack(parts).sum(0),
            whole.tolerance * max(scale, _FLOOR * max(scales)),
        )
        for index, ((one, parts), scale) in enumerate(zip(pairs, scales, strict=True))
    ]
    parts = shares(first.loss, second.loss)
    compared.append((whole.loss, torch.stack(parts).sum(0), whole.eps**0.5 * max(map(largest, (whole.loss, *parts)))))
    for one, mean, tolerance in compared:
        difference = (one - mean).abs()
        is_apart = (difference > tolerance) | (one.isfinite() != mean.isfinite())
        if is_apart.any():
            worst = int(torch.where(is_apart, difference.nan_to_num(torch.inf), -1).argmax())
            together, apart = (tensor.flatten()[worst].item() for tensor in (one, mean))
            raise NotMeanError(
                f"{subject if one is whole.loss else f'the gradient of {subject}'} is {together:.6g} for "
                f"{state.num_examples} examples together, but {apart:.6g} as the mean over 2 slices of them, which is "
                "how microbatches, several processes, gradient_accumulation and evaluation compute it. A sum over "
                "examples is to be a mean (reduction='mean'). A mean over some positions reports their number by a "
                "method num_terms(outputs, targets), and a sum of means with different denominators these by a method "
                "denominators(targets); for a stage, they are functions of the state. A loss that compares examples, "
                "as contrastive ones do, is losses.over_batch(loss). Stages draw by state.example_rng, and the outputs "
                "of a network have a row for each example"
            )


_FLOOR = 0.01
"""Gradients that are smaller than this part of the largest one may be zero but for rounding, such as that of a bias
before a softmax."""


def _in_double(state: State, names: Collection[str]) -> State:
    def with_double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: _doubled(tensor) if name in names else tensor for name, tensor in tensors.items()}

    given = {name: batches.map_tensors(_doubled, getattr(state, name)) for name in ("batch", "denominators")}
    return state.replace(params=with_double(state.params), buffers=with_double(state.buffers), **given)


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64)) if is_differentiable(tensor) else tensor


class Comparison(TorchFunctionMode):
    """Mode of runs that are compared: batch normalisation, which mixes examples on purpose, has constant statistics.

    Args:
        is_double: True to leave out conversions from double precision.

    Attributes:
        eps: Relative precision of the coarsest dtype of what is differentiated.
    """

    def __init__(self, is_double: bool = False) -> None:
        super().__init__()
        self.is_double, self.eps = is_double, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._call(func, args, kwargs or {})
        if isinstance(result, Tensor) and is_differentiable(result) and result.requires_grad:
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is F.batch_norm:
            kwargs |= dict(zip(_BATCH_NORM, args, strict=False))
            size = kwargs["input"].shape[1]
            like = kwargs["input"] if kwargs.get("weight") is None else kwargs["weight"]
            fixed = {"running_mean": like.new_zeros(size), "running_var": like.new_ones(size), "training": False}
            return func(**{**kwargs, **fixed})
        result = func(*args, **kwargs)
        is_narrowed = self.is_double and func in (Tensor.float, Tensor.to) and args[0].dtype is torch.float64
        return args[0].to(result.device) if is_narrowed and is_differentiable(result) else result


_BATCH_NORM = tuple(inspect.signature(F.batch_norm).parameters)


def coarsest(loss: Tensor) -> float:
    """Return the relative precision of the coarsest dtype on the way from what is differentiated to a loss."""
    eps = torch.finfo(loss.dtype).eps
    for node in graph_of(loss):
        saved = (getattr(node, name) for name in _saved_by(type(node)))  # what it multiplies by or divides by
        numbers = [one for one in saved if isinstance(one, Tensor) and is_differentiable(one)]
        eps = max([eps, *(torch.finfo(form.dtype).eps for form in (*node._input_metadata, *numbers))])
    return eps


@functools.cache
def _saved_by(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]


def is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().nan_to_num(0, 0, 0).max()) if tensor.numel() else 0.0
