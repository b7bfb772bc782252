"""The check that a batch may be cut: examples do not reach each other, and the loss is the mean over parts of a batch.

Microbatches, several processes, gradient accumulation and evaluation compute means over parts. A few examples of the
batch are given to the loss together and in two halves, at the network's outputs and at others. The gradient with
respect to each output must be the same, times the weight of its half; and the network's outputs for an example must not
change with the other examples. Where outputs do not have a row for each example, or a stage of your own computes the
loss, gradients with respect to the parameters are compared instead. All this is in double precision where the code
permits it, so that a term of any weight is seen.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from purecompose import batch as batches, losses, tree
from purecompose._support.checks import shown
from purecompose._support.functorch import has_values, is_transforming
from purecompose._support.warnings import warn
from purecompose.core.coupling import targets_of_loss
from purecompose.core.cut import Cut
from purecompose.core.means import denominators, num_terms, part_of
from purecompose.core.operation import NO_PURPOSE, Carry, Lowered, Operation
from purecompose.core.state import State
from purecompose.nn.keyed.scope import DRAWS_OF_BATCH, is_under_foreign_checkpoint
from purecompose.random.keys import fold_in


Check: TypeAlias = Callable[[Carry, Iterable[Operation]], None]
"""A check of a scope, given the carry at its start, and operations that come first; see `check_scope`."""


def is_due(batch: int) -> bool:
    """Return whether the check is repeated in a batch, by its index in the run: in the 1st, 2nd, 4th, 8th, ..."""
    return batch & (batch + 1) == 0


def check_operations(ways: Iterable[Callable[[], Sequence[Lowered]]], start: State) -> None:
    """Check all scopes of a step that compute means over parts of the batch.

    Args:
        ways: Functions that return the step's operations, of which the first that do not fail count: without
            algorithms, and with those whose work the network or the loss needs.
        start: The state at the step's start.
    """
    if is_transforming() or not has_values(start.key) or is_under_foreign_checkpoint([]):
        return

    def check(operations: Sequence[Lowered]) -> None:
        earlier = [one.run for one in itertools.takewhile(lambda one: one.separable is None, operations)]
        for one in operations:
            if one.separable is not None:
                one.separable(Carry(start), earlier)

    _first_of([lambda way=way: check(way()) for way in ways], start)


def _first_of(attempts: Sequence[Callable[[], None]], state: State) -> None:
    """Make the first attempt at a check that does not fail; warn if all do, unless for lack of memory."""
    error: Exception | None = None
    with torch.inference_mode(False), torch.no_grad():
        for attempt in attempts:
            try:
                return attempt()
            except (_NotMeanError, Warning):
                raise
            except Exception as failure:
                error = failure
    if error is not None and not isinstance(error, torch.OutOfMemoryError):
        warn(
            f"it is not known whether {_subject(state)} is a mean over examples, because it fails on a few examples of "
            f"the batch: {type(error).__name__}: {str(error):.200}"
        )


def check_scope(
    body: Operation, until_loss: Operation | None, stage: str, cut: Cut, carry: Carry, earlier: Iterable[Operation] = ()
) -> None:
    """Raise a `ValueError` if the gradient that a scope computes is not the mean over parts of its batch.

    It warns if the network's outputs for an example depend on other examples.

    Args:
        body: The scope's body, which computes gradients.
        until_loss: The part of it before the stage that evaluates the state's loss; `None` if there is none.
        stage: The name of the last stage in it.
        cut: The number or size of slices: the check takes the memory of about one.
        carry: Start of the body.
        earlier: Operations before it.
    """
    state = carry.state
    layout, num = state.context.layout, state.num_examples
    if num < 2 or not layout.can_cut(state.batch) or state.whole_loss is not None:
        return
    most = min(2 * -(-num // cut.num_slices(num)), _MOST)
    if layout.has_rows(state.batch):
        few = batches.take(state.batch, _spread(state, most), num)
    else:
        few = layout.split(state.batch, -(-num // most))[0]
    carry = carry._replace(state=tree.map(_detached, state.replace(batch=few)))
    for operation in earlier:
        carry = operation(carry, NO_PURPOSE)
    state = carry.state
    if state.num_examples < 2:
        return
    is_model_loss = until_loss is not None and isinstance(state.context.loss, losses.ModelLoss)
    carry = carry._replace(state=state.replace(denominators=denominators(state)))
    if until_loss is not None and not is_model_loss and state.context.layout.has_rows(state.batch):
        with _FixedNorms():
            end = until_loss(carry, NO_PURPOSE).state
            if has_rows := _have_rows(end):
                _check_forward(until_loss, carry, end)
        if has_rows:
            _check_outputs(end)
            return
    if until_loss is not None and losses.couples_examples(state.context.loss):
        return
    token = DRAWS_OF_BATCH.set(True)
    try:
        _check_gradients(body, until_loss, stage, carry)
    except _NotMeanError as error:
        if not is_model_loss:  # for which there is no remedy but not to cut batches
            raise
        warn(str(error))
    finally:
        DRAWS_OF_BATCH.reset(token)


def _check_outputs(state: State, *, train: bool = True) -> None:
    """Raise a `ValueError` if the loss of a state's outputs is not the mean over two halves of its examples.

    Losses that draw or change buffers, that models compute themselves or that are declared by `losses.over_batch` are
    not compared, and neither are those of outputs without a row for each example.
    """
    context, num = state.context, state.num_examples
    if isinstance(context.loss, losses.ModelLoss) or losses.couples_examples(context.loss):
        return
    if num < 2 or not _have_rows(state) or torch.is_inference_mode_enabled():
        return
    spread = _spread(state, _MOST)
    if len(spread) < 2:
        return
    if len(spread) < num:
        outputs = batches.map_tensors(lambda rows: rows.index_select(0, spread), state.outputs)
        state, num = state.replace(batch=batches.take(state.batch, spread, num), outputs=outputs), len(spread)
    state = state.replace(denominators=denominators(state))
    if context.loss_scalars and state.clock is not None:  # the weight of a term often grows from 0, which hides it
        hparams = {name: torch.where(value == 0, 1.0, value) for name, value in state.hparams.items()}
        state = state.replace(clock=state.clock.without_zeros(), hparams=hparams)
    half = -(-num // 2)

    def moved(rows: Tensor) -> Tensor:
        """Return other outputs for the first half of the examples, such as the network might return."""
        if not _is_differentiable(rows):
            return rows
        scale = torch.linspace(0.25, 1, half, device=rows.device).reshape(-1, *[1] * (rows.ndim - 1))
        return torch.cat([rows.roll(1, 0)[:half] * scale.to(rows.dtype), rows[half:]])

    def compare(state: State) -> None:
        for outputs in (state.outputs, batches.map_tensors(moved, state.outputs)):
            states = [state.replace(outputs=outputs)]
            for part, own in zip(context.layout.split(state.batch, 2), (range(half), range(half, num)), strict=True):
                rows = batches.map_tensors(lambda rows, own=own: rows[own.start : own.stop], outputs)
                start, share = (state.first_example or 0) + own.start, part_of(state.denominators, len(own), num)
                states.append(state.replace(batch=part, outputs=rows, first_example=start, denominators=share))
            try:
                found = [one for state in states if (one := _of_outputs(state, train)) is not None]
            except Exception:
                if outputs is state.outputs:
                    raise
                return  # they are not such as the network might return
            if len(found) == len(states):
                _compare(found, state, _subject(state))

    _in_best_precision(compare, state, (*context.loss_param_names, *context.loss_buffer_names))


def check_evaluated(state: State) -> None:
    """Check the loss of a batch of an evaluation, which is a mean over batches."""
    _first_of([lambda: _check_outputs(state, train=False)], state)


class _Found(NamedTuple):
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


def _of_outputs(state: State, train: bool) -> _Found | None:
    """Differentiate the loss of a state's outputs; `None` if it draws, changes buffers, or has no gradient."""
    context = state.context
    given = [tensor.detach().requires_grad_(_is_differentiable(tensor)) for tensor in batches.tensors(state.outputs)]
    names = [name for name in context.trainable if name in context.loss_param_names]
    rows = [tensor for tensor in given if tensor.requires_grad]
    params = {name: state.params[name].detach().requires_grad_() for name in names}
    inner = state.replace(params={**state.params, **params}, outputs=batches.with_tensors(state.outputs, given))
    targets = targets_of_loss(state)

    def evaluate(state: State) -> tuple[Tensor, dict[str, Tensor]]:
        return state.call_loss(lambda fn: losses.evaluate_loss(fn, state.outputs, targets), train=train)

    with torch.enable_grad():
        loss, buffers = evaluate(inner)
    if loss.ndim or not loss.requires_grad:
        return None
    if context.loss_model is not None:
        again, _ = evaluate(state.replace(key=fold_in(state.key, 1)))
        is_kept = all(torch.equal(buffers[name], state.buffers[name]) for name in context.loss_buffer_names)
        if not is_kept or not torch.equal(again.nan_to_num(), loss.nan_to_num()):
            return None
    eps = _coarsest(loss)
    grads = torch.autograd.grad(loss, [*rows, *params.values()], allow_unused=True, materialize_grads=True)
    return _Found(loss.detach(), grads, len(rows), float(num_terms(inner)), eps, max(32 * eps, 1e-12))


def _check_gradients(body: Operation, until_loss: Operation | None, stage: str, carry: Carry) -> None:
    """Raise unless the gradient with respect to the parameters is the mean over two halves of the examples."""
    layout, num = carry.state.context.layout, carry.state.num_examples
    subject = f"the loss of the stage {stage}" if until_loss is None else _subject(carry.state)

    def found(state: State) -> _Found:
        precisions: list[float] = []
        purpose = NO_PURPOSE._replace(look=lambda loss: precisions.append(_coarsest(loss)))
        after, _, terms = body(carry._replace(state=state), purpose)
        assert after.loss is not None
        if terms is None:
            terms = state.num_examples if until_loss is None else num_terms(after.replace(batch=state.batch))
        grads = after.grads or {}
        named = [grads.get(name, torch.zeros_like(param)) for name, param in state.params.items()]
        return _Found(after.loss, named, 0, float(terms), max(precisions), max(precisions) ** 0.5)

    def compare(state: State) -> None:
        parts, first = [], 0
        for part in layout.split(state.batch, 2):
            share = part_of(state.denominators, layout.num_examples(part), num)
            parts.append(found(state.replace(batch=part, first_example=first, denominators=share)))
            first += layout.num_examples(part)
        _compare([found(state), *parts], state, subject)

    _in_best_precision(compare, carry.state, (*carry.state.params, *carry.state.buffers))


def _check_forward(until_loss: Operation, carry: Carry, end: State) -> None:
    """Warn if the outputs of the last examples change when one of them takes the place of each of the first ones."""
    state, num = carry.state, carry.state.num_examples
    half, indices = -(-num // 2), torch.arange(num, device=state.device)
    for other in dict.fromkeys((half, num - 1)):
        moved = batches.take(state.batch, torch.where(indices < half, other, indices), num)
        outputs = until_loss(carry._replace(state=state.replace(batch=moved)), NO_PURPOSE).state.outputs
        for ours, theirs in zip(batches.tensors(end.outputs), batches.tensors(outputs), strict=True):
            difference = _largest(ours[half:] - theirs[half:]) if _is_differentiable(ours) else 0.0
            if difference > 1e-5 * _largest(ours):
                warn(
                    "the network's outputs for an example depend on the other examples of the batch, and so differ in "
                    "microbatches, on several processes and with gradient_accumulation. Let it compute them from the "
                    "example itself (a capacity for each sequence, not for the batch); batch normalisation is an "
                    "exception"
                )
                return


class _NotMeanError(ValueError):
    """The loss of a batch is not the mean over its parts."""


def _compare(found: Sequence[_Found], state: State, subject: str) -> None:
    """Raise unless the first loss and its gradients are the means over the other two, weighted by their terms."""
    whole, first, second = found
    total = first.weight + second.weight
    if not total or not whole.loss.isfinite():
        return

    def shares(*tensors: Tensor) -> list[Tensor]:
        # The mean over a part in which nothing counts is NaN, and has no weight.
        weights = (first.weight / total, second.weight / total)
        return [t * share if share else torch.zeros_like(t) for t, share in zip(tensors, weights, strict=True)]

    pairs = [(one, shares(*parts)) for one, *parts in zip(whole.grads, first.grads, second.grads, strict=True)]
    scales = [max(map(_largest, (one, *parts))) for one, parts in pairs]
    compared = [
        (
            one,
            torch.cat(parts) if index < whole.num_rows else torch.stack(parts).sum(0),
            whole.tolerance * max(scale, _FLOOR * max(scales)),
        )
        for index, ((one, parts), scale) in enumerate(zip(pairs, scales, strict=True))
    ]
    parts = shares(first.loss, second.loss)
    compared.append((whole.loss, torch.stack(parts).sum(0), whole.eps**0.5 * max(map(_largest, (whole.loss, *parts)))))
    for one, mean, tolerance in compared:
        difference = (one - mean).abs()
        is_apart = (difference > tolerance) | (one.isfinite() != mean.isfinite())
        if is_apart.any():
            worst = int(torch.where(is_apart, difference.nan_to_num(torch.inf), -1).argmax())
            together, apart = (tensor.flatten()[worst].item() for tensor in (one, mean))
            raise _NotMeanError(
                f"{subject if one is whole.loss else f'the gradient of {subject}'} is {together:.6g} for "
                f"{state.num_examples} examples together, but {apart:.6g} as the mean over 2 slices of them, as which "
                "microbatches, several processes, gradient_accumulation and evaluation compute it. If it is a sum over "
                "examples, make it a mean (reduction='mean'); if it is a mean over some positions, let it report their "
                "number in a method num_terms(outputs, targets), or num_terms(state) of a stage; if it compares "
                "examples with each other, as contrastive losses do, write losses.over_batch(loss), also for a stage; "
                "if it adds means with different denominators, give it a method denominators(targets), or write "
                "losses.over_batch(loss). Stages draw by state.example_rng, and the outputs of a network have a row "
                "for each example"
            )


_FLOOR = 0.01
"""Gradients that are smaller than this part of the largest one may be zero but for rounding, such as that of a bias
before a softmax."""


def _in_best_precision(compare: Callable[[State], None], state: State, names: Collection[str]) -> None:
    """Compare in double precision or, where the code does not permit it, in its own.

    Args:
        compare: The comparison.
        state: The state.
        names: Its parameters and buffers that take part.
    """

    def doubled(tensor: Tensor) -> Tensor:
        return tensor.to(torch.promote_types(tensor.dtype, torch.float64)) if _is_differentiable(tensor) else tensor

    def with_double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: doubled(tensor) if name in names else tensor for name, tensor in tensors.items()}

    given = {name: batches.map_tensors(doubled, getattr(state, name)) for name in ("batch", "outputs", "denominators")}
    double = state.replace(params=with_double(state.params), buffers=with_double(state.buffers), **given)
    with _FixedNorms():
        try:
            with _InDouble():
                compare(double)
        except _NotMeanError:
            raise
        except Exception:  # for example because a constant is in single precision
            compare(state)


class _FixedNorms(TorchFunctionMode):
    """A mode with constants as the statistics of batch normalisation, since that is meant to mix examples."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        kwargs |= dict(zip(_BATCH_NORM, args, strict=False))
        size = kwargs["input"].shape[1]
        like = kwargs["input"] if kwargs.get("weight") is None else kwargs["weight"]
        fixed = {"running_mean": like.new_zeros(size), "running_var": like.new_ones(size), "training": False}
        return func(**{**kwargs, **fixed})


class _InDouble(TorchFunctionMode):
    """A mode without conversions from double precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_narrowed = func in (Tensor.float, Tensor.to) and args[0].dtype is torch.float64
        return args[0].to(result.device) if is_narrowed and _is_differentiable(result) else result


_BATCH_NORM = tuple(inspect.signature(F.batch_norm).parameters)


def _coarsest(loss: Tensor) -> float:
    """Return the relative precision of the coarsest dtype on the way from what is differentiated to a loss."""
    eps, known, waiting = torch.finfo(loss.dtype).eps, set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            saved = (getattr(node, name) for name in _saved_by(type(node)))  # what it multiplies by or divides by
            numbers = [one for one in saved if isinstance(one, Tensor) and _is_differentiable(one)]
            eps = max([eps, *(torch.finfo(form.dtype).eps for form in (*node._input_metadata, *numbers))])
            waiting += [following for following, _ in node.next_functions]
    return eps


@functools.cache
def _saved_by(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]


def _have_rows(state: State) -> bool:
    """Return whether all outputs have a row for each example."""
    found = batches.tensors(state.outputs)
    has_rows = all(tensor.shape[:1] == (state.num_examples,) for tensor in found)
    return has_rows and bool(found) and state.context.layout.has_rows(state.batch)


def _spread(state: State, most: int) -> Tensor:
    """Return the indices of a few examples from the first to the last, since batches may be sorted.

    They and their halves are not as many as the rows of a tensor that all examples share, which would be cut, too.
    """
    num = state.num_examples
    shared = {one.shape[0] for one in batches.tensors(state.batch) if one.ndim and one.shape[0] not in (1, num)}
    sizes = [size for size in range(2, min(num, most) + 1) if shared.isdisjoint((size, -(-size // 2), size // 2))]
    return torch.linspace(0, num - 1, sizes[-1] if sizes else 1, device=state.device).long()


def _subject(state: State) -> str:
    return f"the loss {shown(state.context.loss)}"


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().nan_to_num(0, 0, 0).max()) if tensor.numel() else 0.0


_MOST = 7
"""Number of examples that are compared: a size that tables which all examples share rarely have."""
