"""The check that a batch may be cut: examples do not reach each other, and the loss is the mean over parts of a batch.

A few examples of the batch are given to the loss together and in two halves, at the network's outputs and at others.
The gradient with respect to each output must be the same, times the weight of its half; and the network's outputs for
an example must not change with the other examples. Where a stage of your own computes the loss, or outputs do not have
a row for each example, gradients with respect to the parameters are compared. All this is in double precision where the
code permits it, so that a term of any weight is seen.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, losses, tree
from purecompose._support.internals import has_values, is_transforming
from purecompose._support.messages import warn
from purecompose._support.specs import shown
from purecompose.core.context import Cut
from purecompose.core.halves import (
    Comparison,
    Found,
    NotMeanError,
    Variant,
    check_halves,
    coarsest,
    is_differentiable,
    largest,
)
from purecompose.core.means import denominators, num_terms, targets_of_loss
from purecompose.core.operation import NO_PURPOSE, Carry, Lowered, Operation
from purecompose.core.state import State
from purecompose.nn.keyed.draws import is_under_foreign_checkpoint
from purecompose.random.keys import fold_in


Check: TypeAlias = Callable[[Carry, Iterable[Operation]], None]
"""A check of a scope, given the carry at its start, and operations that come first; see `check_scope`."""


def is_due(batch: int) -> bool:
    """Return whether the check is repeated in a batch, by its index in the run: in the 1st, 2nd, 4th, 8th, ..."""
    return batch & (batch + 1) == 0


def check_operations(ways: Iterable[Callable[[], Sequence[Lowered]]], start: State) -> None:
    """Check all scopes of a step that compute means over parts of the batch.

    The functions `ways` return its operations, without algorithms, and with those whose work the network or the loss
    needs; the first operations that can be run are checked.
    """
    if is_transforming() or not has_values(start.key) or is_under_foreign_checkpoint([]):
        return

    def check(operations: Sequence[Lowered]) -> None:
        first = [one.run for one in itertools.takewhile(lambda one: one.separable is None, operations)]
        for index, one in enumerate(operations):
            if one.separable is not None:
                try:
                    one.separable(Carry(start), first)
                except (NotMeanError, Warning):
                    raise
                except Exception:  # for example because it reads what an earlier scope has set
                    if index == len(first):
                        raise
                    one.separable(Carry(start), [earlier.run for earlier in operations[:index]])

    _first_of([lambda way=way: check(way()) for way in ways], start)


def _first_of(attempts: Sequence[Callable[[], Any]], state: State) -> None:
    """Attempt a check in several ways until one does not fail; warn if all do, unless for lack of memory."""
    error: Exception | None = None
    with torch.inference_mode(False), torch.no_grad():
        for attempt in attempts:
            try:
                attempt()
                return
            except (NotMeanError, Warning):
                raise
            except Exception as failure:
                error = failure
    if error is not None and not isinstance(error, torch.OutOfMemoryError):
        warn(
            f"it is not known whether {_subject(state)} is a mean over examples, because it fails on a few examples of "
            f"the batch: {type(error).__name__}: {str(error):.200}"
        )


def check_scope(
    body: Operation,
    until_loss: Operation | None,
    stage: str,
    count: Callable[[State], Any] | None,
    cut: Cut,
    carry: Carry,
    earlier: Iterable[Operation] = (),
    *,
    warns: bool = False,
) -> None:
    """Raise a `ValueError` if the gradient that a scope computes is not the mean over parts of its batch.

    It warns if the network's outputs for an example depend on other examples.

    Args:
        until_loss: What of it comes before the stage that evaluates the state's loss; `None` without one.
        stage: The stage of your own that computes the loss, or "".
        count: Returns the denominators of a stage in it.
        cut: The check takes the memory of about one slice.
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
    state = tree.map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, state.replace(batch=few))
    carry = carry._replace(state=state)
    for operation in earlier:
        carry = operation(carry, NO_PURPOSE)
    state = carry.state
    if state.num_examples < 2:
        return
    is_model_loss = until_loss is not None and isinstance(state.context.loss, losses.ModelLoss)
    carry = carry._replace(state=state.replace(denominators=denominators(state, count)))
    if until_loss is not None and not is_model_loss and layout.has_rows(state.batch):
        end = _run(until_loss, carry).state
        if _have_rows(end) and _compare_mixed(until_loss, carry, end):
            try:
                check_outputs(end)
                return
            except (NotMeanError, Warning):
                raise
            except Exception:  # for example because outputs are an object that keeps its size
                pass
    if until_loss is not None and losses.couples_examples(state.context.loss):
        return
    try:
        _check_stage(body, until_loss, stage, carry)
    except NotMeanError as error:
        if not is_model_loss and not warns:  # for a model's loss there is no remedy but not to cut batches
            raise
        warn(str(error))


def check_outputs(state: State, *, train: bool = True) -> bool:
    """Raise a `ValueError` if the loss of outputs is not the mean over two halves; return whether it was compared.

    Losses that draw or change buffers, that models compute themselves or that are declared by `losses.over_batch` are
    not compared, and neither are those of outputs without a row for each example.
    """
    context, num = state.context, state.num_examples
    if isinstance(context.loss, losses.ModelLoss) or losses.couples_examples(context.loss):
        return False
    if num < 2 or not _have_rows(state) or torch.is_inference_mode_enabled():
        return False
    spread = _spread(state, _MOST)
    if len(spread) < 2:
        return False
    if len(spread) < num:
        outputs = batches.map_tensors(lambda rows: rows.index_select(0, spread), state.outputs)
        state, num = state.replace(batch=batches.take(state.batch, spread, num), outputs=outputs), len(spread)
    state = state.replace(denominators=denominators(state))
    if context.loss_scalars and state.clock is not None:  # the weight of a term often grows from 0, which hides it
        hparams = {name: torch.where(value == 0, 1.0, value) for name, value in state.hparams.items()}
        state = state.replace(clock=state.clock.without_zeros(), hparams=hparams)

    def find(inner: State, given: Variant) -> Found | None:
        outputs = batches.map_tensors(lambda tensor: given.part(tensor, num), state.outputs)
        return _of_outputs(inner.replace(outputs=outputs), train, given.is_double)

    names = *context.loss_param_names, *context.loss_buffer_names
    return check_halves(find, state, _subject(state), names)


def check_evaluated(state: State) -> None:
    """Check the loss of a batch of an evaluation, which is a mean over batches."""
    _first_of([lambda: check_outputs(state, train=False)], state)


def _of_outputs(state: State, train: bool, is_double: bool) -> Found | None:
    """Differentiate the loss of a state's outputs; `None` if it draws, changes buffers, or has no gradient."""
    context = state.context
    given = [tensor.detach().requires_grad_(is_differentiable(tensor)) for tensor in batches.tensors(state.outputs)]
    names = [name for name in context.trainable if name in context.loss_param_names]
    rows = [tensor for tensor in given if tensor.requires_grad]
    params = {name: state.params[name].detach().requires_grad_() for name in names}
    inner = state.replace(params={**state.params, **params}, outputs=batches.with_tensors(state.outputs, given))
    targets = targets_of_loss(state)

    def evaluate(state: State) -> tuple[Tensor, dict[str, Tensor]]:
        with Comparison(is_double):
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
    eps = coarsest(loss)
    grads = torch.autograd.grad(loss, [*rows, *params.values()], materialize_grads=True)
    return Found(loss.detach(), grads, len(rows), float(num_terms(inner)), eps, max(32 * eps, 1e-12))


def _run(operation: Operation, carry: Carry) -> Carry:
    """Run a part of a step so that its results for different examples can be compared."""
    with Comparison():
        return operation(carry, _COMPARED)


def _compare_mixed(until_loss: Operation, carry: Carry, end: State) -> bool:
    """Warn if outputs of the last examples change when two of them take the places of the others, or without these.

    Without the others, the batch is smaller and so rounded otherwise: only large changes count, as by a capacity, and
    none if the network draws.

    Returns:
        True; or False if outputs without the others are not fewer, such as those of the members of an ensemble.
    """
    state, num = carry.state, carry.state.num_examples
    half = -(-num // 2)
    rows = torch.arange(num, device=state.device)
    rows[:half], rows[:half:2] = num - 1, half

    def run(rows: Tensor, first: int = 0) -> State:
        few = state.context.layout.take(state.batch, rows)
        changes = {"batch": few, "first_example": (state.first_example or 0) + first}
        return _run(until_loss, carry._replace(state=state.replace(**changes))).state

    def is_mixed(ours: Any, theirs: Any, tolerance: float) -> bool:
        pairs = zip(batches.tensors(ours), batches.tensors(theirs), strict=True)
        return any(
            is_differentiable(one) and largest(one[half:] - other[half - num :]) > tolerance * largest(one)
            for one, other in pairs
            if one.shape[:1] == (num,) and other.shape[:1] in ((num,), (num - half,))
        )

    fewer = run(torch.arange(half, num, device=state.device), half)
    if not all(one.shape[:1] == (num - half,) for one in batches.tensors(fewer.outputs)):
        return False
    draws, mixed = state.context.model.skeleton(train=True).draws, run(rows)
    # Stages before the loss may change the batch: what they draw is not rounded otherwise in a smaller one.
    if (
        is_mixed(end.outputs, mixed.outputs, 1e-5)
        or (not draws and is_mixed(end.outputs, fewer.outputs, 0.05))
        or is_mixed(end.batch, fewer.batch, 1e-5)
    ):
        warn(
            "the network's outputs for an example depend on the other examples of the batch, and so differ in "
            "microbatches, on several processes and with gradient_accumulation. Let the network, and stages before "
            "it, compute them from the example itself, with draws by state.example_rng; batch normalisation is an "
            "exception"
        )
    return True


def _check_stage(body: Operation, until_loss: Operation | None, stage: str, carry: Carry) -> None:
    """Raise unless the gradients that a body computes are the means over two halves of the examples."""
    state = carry.state
    subject = f"the loss of the stage {stage}" if stage else _subject(state)

    def find(inner: State, given: Variant) -> Found:
        if given.is_moved:
            moved = {name: param * 1.25 for name, param in inner.params.items() if is_differentiable(param)}
            inner = inner.replace(params={**inner.params, **moved})
        with Comparison(given.is_double) as mode:
            after, _, terms = body(carry._replace(state=inner), _COMPARED)
        assert after.loss is not None
        if terms is None:
            terms = inner.num_examples if until_loss is None else num_terms(after.replace(batch=inner.batch))
        grads = after.grads or {}
        named = [grads.get(name, torch.zeros_like(param)) for name, param in inner.params.items()]
        return Found(after.loss, named, 0, float(terms), mode.eps, mode.eps**0.5)

    check_halves(find, state, subject, (*state.params, *state.buffers))


def _have_rows(state: State) -> bool:
    found = batches.tensors(state.outputs)
    has_rows = all(tensor.shape[:1] == (state.num_examples,) for tensor in found)
    return has_rows and bool(found) and state.context.layout.has_rows(state.batch)


def _spread(state: State, most: int) -> Tensor:
    """Return the indices of a few examples from the first to the last, since batches may be sorted.

    They and their halves are not as many as the rows of a tensor that all examples share, which would be cut, too; nor,
    if possible, as the steps of sequences, which would be taken for them where they come first.
    """
    num, given = state.num_examples, batches.tensors(state.batch)
    shared = {one.shape[0] for one in given if one.ndim and one.shape[0] not in (1, num)}
    steps = {one.shape[1] for one in given if one.ndim > 2 or (one.ndim == 2 and not is_differentiable(one))}
    sizes = [size for size in range(2, min(num, most) + 1) if shared.isdisjoint((size, -(-size // 2), size // 2))]
    best = max(sizes, key=lambda size: (size not in steps, size), default=1)
    return torch.linspace(0, num - 1, best, device=state.device).long()


def _subject(state: State) -> str:
    return f"the loss {shown(state.context.loss)}"


_COMPARED = NO_PURPOSE._replace(is_compared=True)
_MOST = 7
"""Number of examples that are compared: a size that tables which all examples share rarely have."""
