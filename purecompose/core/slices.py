"""Microbatches: a body run on slices of the batch, with averaged results."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from purecompose import batch as batches, losses, tree
from purecompose.core.context import Cut
from purecompose.core.means import (
    averaged,
    averaged_grads,
    denominators,
    gathered,
    has_mean,
    joined,
    part_of,
    part_of_loss,
    targets_of_loss,
)
from purecompose.core.operation import Carry, Operation, Purpose
from purecompose.core.ranks import SharedPart
from purecompose.core.state import State


class _Slice(NamedTuple):
    fields: dict[str, Any]
    """The fields in which a state at the start of the slice differs from that at the end of the slice before."""
    size: int


def _slices(state: State, cut: Cut, shared: SharedPart | None) -> Iterator[_Slice]:
    # A ragged last batch, or one that a method made smaller, may have fewer examples than slices.
    layout, num, offset = state.context.layout, state.num_examples, 0
    whole = denominators(state)
    for part in layout.split(state.batch, cut.num_slices(num) if shared is None else shared.num_slices(cut, num)):
        size = layout.num_examples(part)
        yield _Slice(
            {
                "batch": part,
                "first_example": offset if state.first_example is None else state.first_example + offset,
                "whole_loss": part_of_loss(state, offset, size, num),
                "denominators": part_of(whole, size, num),
                # Each slice computes these itself, and does not receive them from the slice before.
                "loss": None,
                "outputs": state.outputs,
                "grads": None,
                "metrics": state.metrics,
            },
            size,
        )
        offset += size


def in_slices(
    body: Operation, cut: Cut, to_whole_loss: tuple[Operation, Operation] | None, count: Callable[[State], Any] | None
) -> Operation:
    """Return the operation that runs a body on slices of the batch.

    Args:
        to_whole_loss: For a loss that couples examples, the part of the body before its loss, and the operation that
            sets `whole_loss` from all outputs; `None` if there is no such part.
        count: Function that returns the denominators of a stage in the body, if it has some.
    """

    def run(carry: Carry, purpose: Purpose) -> Carry:
        if count is not None:
            divided = carry.state.replace(denominators=denominators(carry.state, count))
            end = _run_slices(body, carry._replace(state=divided), purpose, cut)
            return end._replace(state=end.state.replace(denominators=carry.state.denominators))
        if not losses.couples_examples(carry.state.context.loss):
            return _run_slices(body, carry, purpose, cut)
        outer = carry.state.whole_loss
        end = _run_slices(body, _with_whole_loss(to_whole_loss, carry, purpose, cut), purpose, cut)
        return end._replace(state=end.state.replace(whole_loss=outer))

    return run


def _run_slices(body: Operation, carry: Carry, purpose: Purpose, cut: Cut) -> Carry:
    """Run the body on slices of the batch and average loss, gradients and metrics, weighted by each slice's terms."""
    state = carry.state
    current, total, num_slices = carry, 0, 0
    mean_loss: Tensor | None = None
    mean_grads: dict[str, Tensor] | None = None
    mean_metrics: dict[str, Tensor] = {}
    metric_totals: dict[str, Any] = {}  # a metric may be that of some slices only
    for fields, size in _slices(state, cut, purpose.part):
        try:
            current = body(Carry(current.state.replace(**fields), current.used), purpose)
        except (IndexError, RuntimeError) as error:
            _note_members(error, state.batch if purpose.part is None else purpose.part.batch, fields)
            raise
        after, weight = current.state, size if current.terms is None else current.terms
        total, num_slices = total + weight, num_slices + 1
        if after.loss is not None:
            mean_loss = averaged(mean_loss, after.loss, weight, total)
        if after.grads is not None:
            mean_grads = averaged_grads(mean_grads, after.grads, weight, total)
        if after.metrics is not state.metrics:
            for name, value in after.metrics.items():
                if has_mean(value) and value is not state.metrics.get(name):
                    metric_totals[name] = metric_totals.get(name, 0) + weight
                    mean_metrics[name] = averaged(mean_metrics.get(name), value, weight, metric_totals[name])
    means = {"loss": mean_loss, "grads": mean_grads, "metrics": {**current.state.metrics, **mean_metrics}}
    outer = {name: getattr(state, name) for name in ("batch", "first_example", "whole_loss", "denominators")}
    end = current.state.replace(**outer, **means)
    if num_slices > 1 and end.outputs is not state.outputs:
        end = end.replace(outputs=SealedOutputs(num_slices))
    # The total is used if this batch is itself a slice.
    return Carry(end, current.used, carry.terms if current.terms is None else total)


def _with_whole_loss(
    to_whole_loss: tuple[Operation, Operation] | None, carry: Carry, purpose: Purpose, cut: Cut
) -> Carry:
    """Set `whole_loss` to the loss of the outputs of all slices, for a loss that couples examples.

    Raises:
        ValueError: The scope has no loss stage or several, or outputs or targets are not per example.
    """
    state, shared = carry.state, purpose.part
    if state.whole_loss is not None:  # in a slice of a slice
        return carry
    if to_whole_loss is None or not state.context.layout.has_rows(state.batch):
        raise ValueError(
            "losses.over_batch: expected a Microbatches around one stage `loss`, without a scope of your own between "
            "them, and batches whose examples are along the first dimension (batch_dim=0, no splitter): otherwise the "
            "outputs of all slices cannot be put together; leave out microbatches"
        )
    until_loss, evaluate = to_whole_loss
    current = carry
    outputs, targets, sizes = [], [], []
    for fields, size in _slices(state, cut, shared):
        current = until_loss(Carry(current.state.replace(**fields), current.used), purpose._replace(watch=None))
        outputs.append(current.state.outputs)
        targets.append(targets_of_loss(current.state))
        sizes.append(size)
    given = (
        joined(outputs, sizes, "the network's outputs"),
        joined(targets, sizes, "the targets", state.batch if shared is None else shared.batch),
    )
    whole = state
    if shared is not None:
        given = gathered(given, shared)
        whole = state.replace(first_example=state.first_example - shared.start)
    whole = whole.replace(outputs=given[0], batch=given[1], loss=None, grads=None)
    whole = evaluate(carry._replace(state=whole), purpose).state
    if shared is not None:
        whole = whole.replace(whole_loss=part_of_loss(whole, shared.start, max(shared.size, 1), shared.total))
    return carry._replace(state=state.replace(whole_loss=whole.whole_loss, buffers=whole.buffers))


def _note_members(error: Exception, batch: Any, fields: dict[str, Any]) -> None:
    """Add a note to an error in a slice that may come from members of the batch that are not rows."""
    given = set(map(id, batches.tensors(batch)))
    kept = [tree.describe(own) for own in batches.tensors(fields["batch"]) if id(own) in given and own.shape[:1] > (1,)]
    if fields["batch"] is not batch and (kept or isinstance(error, IndexError)):
        error.add_note(
            f"in a slice of the batch, examples from {fields['first_example']} on, with all of {kept or 'nothing'}; "
            "if members of the batch point to its rows, as the edges of a graph do, or are concatenated, it cannot be "
            "cut into rows; use State.create(splitter=batch.Splitter(num_examples, part))"
        )


class SealedOutputs:
    """A placeholder for the outputs after a batch has run in several parts, of which the last part's would be left.

    It is a pytree node without leaves, so that it passes through transforms.
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts

    def _refuse(self, *unused: Any) -> NoReturn:
        raise RuntimeError(
            f"state.outputs was read after the batch has run in {self.num_parts} parts (slices or processes). Read it "
            "within each part, from AFTER_FORWARD to AFTER_BACKWARD; or run the network on the whole batch again, "
            "state.forward(state.inputs)"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that NumPy, copy and others look up before they read
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise for torch functions of sealed outputs, such as `torch.any(state.outputs)`."""
        given = tree.leaves((args, kwargs or {}), is_leaf=lambda node: isinstance(node, cls))
        next(leaf for leaf in given if isinstance(leaf, cls))._refuse()

    __bool__ = __float__ = __getitem__ = __iter__ = __len__ = __array__ = __eq__ = _refuse  # pyright: ignore
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __matmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = None  # pyright: ignore

    def __repr__(self) -> str:
        return f"SealedOutputs(num_parts={self.num_parts})"


tree.register_node(
    SealedOutputs, lambda sealed: ((), (), sealed.num_parts), lambda names, children, static: SealedOutputs(static)
)
