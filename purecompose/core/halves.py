"""The comparison of a loss of some examples with the mean over two halves of them.

The gradient with respect to each output of the network must be the same, times the weight of its half. It is computed
in double precision where the code permits it, at the network's outputs and at others, so that a term of any weight is
seen. Forward passes run once for it, and are then replaced by their outputs.
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
from purecompose._support.autograd import graph_of
from purecompose._support.functorch import is_transforming
from purecompose._support.messages import warn
from purecompose.core.means import part_of
from purecompose.core.state import State


class Variant(NamedTuple):
    """A variant of the network's outputs, which a run is given."""

    rows: range
    """The examples."""
    is_moved: bool
    """True for other outputs, such as the network might return."""
    is_double: bool
    """True for double precision."""

    def part(self, tensor: Tensor, num_examples: int) -> Tensor:
        """Return this part of outputs of all examples."""
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
    """Raise a `NotMeanError` unless the loss and its gradients are the means over two halves of the examples.

    Args:
        find: Function that evaluates the loss and its gradients, given a state with a part of the batch, and the
            variant of the network's outputs; it returns `None` if they cannot be compared.
        state: The state, with the examples that are compared.
        subject: Description of the loss, for errors.
        names: Parameters and buffers that take part, which are converted to double precision.

    Returns:
        True if they were compared.
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
                "how microbatches, several processes, gradient_accumulation and evaluation compute it. If it is a sum "
                "over examples, make it a mean (reduction='mean'); if it is a mean over some positions, let it report "
                "their number in a method num_terms(outputs, targets), or num_terms(state) of a stage; if it compares "
                "examples with each other, as contrastive losses do, write losses.over_batch(loss), also for a stage; "
                "if it adds means with different denominators, give it a method denominators(targets), or "
                "denominators(state) of a stage, or write losses.over_batch(loss). Stages draw by state.example_rng, "
                "and the outputs of a network have a row for each example"
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
    """

    def __init__(self, is_double: bool = False) -> None:
        super().__init__()
        self.is_double = is_double

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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


_Result = tuple[Any, dict[str, Tensor]]


class _Recorded(NamedTuple):
    """A forward pass that need not run again."""

    outputs: Any
    """The outputs, detached, with a row for each example."""
    has_grad: list[bool]
    """Whether each of their tensors required a gradient."""
    buffers: dict[str, Tensor]
    """The buffers after it."""
    inputs: list[Tensor]
    """The tensors of its inputs, in the last run on all examples."""


class ForwardPasses:
    """The forward passes of a stage on a few examples, whose first run is recorded.

    In later runs each of them is replaced by rows of its outputs, as leaves of a graph, unless the outputs do not have
    a row for each example, the stage differentiates with respect to its inputs, or the stage computes its parameters.

    Attributes:
        are_replaced: False if a pass of the last run was not replaced.
        have_rows: False if outputs of a recorded pass seem to have a row for each example, but have a fixed number.
        leaves: The tensors that replaced outputs of passes, in the last run.
        grads: Gradients of the losses with respect to them.
        eps: Relative precision of the coarsest dtype on the way to the losses of all examples, in the last run.
    """

    def __init__(self, num_examples: int, stage: str = "", *, may_replace: bool = True) -> None:
        self._num, self._stage, self._may_replace = num_examples, stage, may_replace
        self._recorded: list[_Recorded | None] = []
        self.have_rows = True
        self.begin(None)

    def begin(self, given: Variant | None) -> None:
        """Begin a run: the first one, or one in which the outputs are given."""
        self._given, self._index, self.leaves = given, 0, list[Tensor]()
        self.are_replaced, self.grads, self.eps = self._may_replace, list[Tensor](), 0.0

    def compared(self) -> Comparison:
        """Return a scope in which a stage or a method runs."""
        return Comparison(self._given is not None and self._given.is_double)

    def run(self, call: Callable[..., _Result], inputs: Any, state: State) -> _Result:
        """Return the outputs of a forward pass, a function of its inputs, and the buffers after it."""
        if not self._may_replace or is_transforming():
            self.are_replaced = False
            return call(inputs)
        if self._given is None:
            self._recorded.append(self._record(call, inputs, state))
        found, self._index = self._recorded[self._index], self._index + 1
        if found is None:
            self.are_replaced = False
            return call(inputs)
        if self._given is not None:
            self._recorded[self._index - 1] = found = self._with_inputs(found, self._given, batches.tensors(inputs))
        has_grad = iter(found.has_grad)
        return batches.map_tensors(lambda tensor: self._leaf(tensor, next(has_grad)), found.outputs), found.buffers

    def differentiate(self, loss: Tensor) -> None:
        """Differentiate a loss with respect to the outputs that replaced passes."""
        if self._given is None:  # only the outputs are needed
            return
        if len(self._given.rows) == self._num:
            self.eps = max(self.eps, coarsest(loss))
        if self.leaves:
            self.grads += torch.autograd.grad(loss, self.leaves, retain_graph=True, materialize_grads=True)

    def _record(self, call: Callable[..., _Result], inputs: Any, state: State) -> _Recorded | None:
        given, known = batches.tensors(inputs), set(map(id, self.leaves))
        if any(one.requires_grad and one.is_leaf and id(one) not in known for one in given):
            return None
        if not all(param.is_leaf for param in state.params.values()):
            return None
        outputs, buffers = call(inputs)
        tensors = batches.tensors(outputs)
        if not tensors or not all(one.shape[:1] == (self._num,) for one in tensors):
            return None
        with torch.no_grad():
            draws = state.context.model.skeleton(train=True).draws
            self.have_rows &= (has_rows := self._compare_mixed(call, inputs, tensors, draws=bool(draws)))
        if not has_rows:
            return None
        outputs = batches.map_tensors(lambda tensor: tensor.detach(), outputs)
        return _Recorded(outputs, [one.requires_grad for one in tensors], buffers, given)

    def _compare_mixed(self, call: Callable[..., _Result], inputs: Any, ours: list[Tensor], *, draws: bool) -> bool:
        """Warn if outputs of the last examples change when two of them take the places of the others, or without these.

        Without the others, the batch is smaller and so rounded otherwise: only large changes count, as by a capacity.
        None count if the network draws, as it may draw for all examples in the shape that those of a few have.

        Returns:
            True; or False if outputs without the others are not fewer, such as those of the members of an ensemble.
        """
        num, half = self._num, -(-self._num // 2)
        rows = torch.arange(num, device=ours[0].device)
        rows[:half], rows[:half:2] = num - 1, half

        def run(rows: Tensor, **skipped: int) -> list[Tensor]:
            def taken(tensor: Tensor) -> Tensor:
                return tensor.index_select(0, rows) if tensor.shape[:1] == (num,) else tensor

            return batches.tensors(call(batches.map_tensors(taken, inputs), **skipped)[0])

        def is_mixed(theirs: list[Tensor], tolerance: float) -> bool:
            pairs = [(one[half:], other[half - num :]) for one, other in zip(ours, theirs, strict=True)]
            return any(
                is_differentiable(one) and largest(one - other) > tolerance * largest(our)
                for our, (one, other) in zip(ours, pairs, strict=True)
            )

        fewer = run(rows.new_tensor(range(half, num)), skipped=half)
        if not all(one.shape[:1] == (num - half,) for one in fewer):
            return False
        if is_mixed(run(rows), 1e-5) or (not draws and is_mixed(fewer, 0.05)):
            warn(
                "the network's outputs for an example depend on the other examples of the batch, and so differ in "
                "microbatches, on several processes and with gradient_accumulation. Let it compute them from the "
                "example itself (a capacity for each sequence, not for the batch); batch normalisation is an "
                "exception"
            )
        return True

    def _with_inputs(self, found: _Recorded, given: Variant, inputs: list[Tensor]) -> _Recorded:
        """Return the pass with its inputs if these are of all examples; otherwise compare them with recorded ones."""
        if len(given.rows) == self._num:
            return found._replace(inputs=[tensor.detach() for tensor in inputs])
        for whole, ours in zip(found.inputs, inputs, strict=True):
            theirs = whole[given.rows.start : given.rows.stop] if whole.shape[:1] == (self._num,) else whole
            if theirs.shape != ours.shape:  # such as of sequences that are cut to the longest of a batch
                raise RuntimeError("other shapes")
            if torch.equal(theirs, ours):
                continue
            tolerance = torch.finfo(ours.dtype).eps ** 0.5 * largest(theirs) if is_differentiable(ours) else 0
            if largest(ours - theirs if is_differentiable(ours) else (ours != theirs).float()) > tolerance:
                raise NotMeanError(
                    f"{self._stage} gives the network other inputs for an example when other examples are in "
                    "the batch, and so others in microbatches, on several processes and with gradient_accumulation: "
                    "let it compute them from the example itself, and draw by state.example_rng; or write "
                    "losses.over_batch(stage)"
                )
        return found

    def _leaf(self, tensor: Tensor, has_grad: bool) -> Tensor:
        if self._given is not None:
            tensor = self._given.part(tensor, self._num)
        if not has_grad:
            return tensor
        self.leaves.append(tensor.detach().requires_grad_())
        return self.leaves[-1]
