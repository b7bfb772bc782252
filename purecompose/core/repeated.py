"""Parts of a step that run several times: a body on slices of the batch, with averaged results, and `state.gradient`.

`state.gradient` is the part that computes the gradient, run again at other parameters or of other losses.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, get_args

import torch
from torch import Tensor, nn

from purecompose import batch as batches, losses, tree
from purecompose._support.internals import is_transforming
from purecompose._support.specs import shown
from purecompose.combinations import unsupported
from purecompose.core.clock import check_reads, scalars_of
from purecompose.core.context import Context, Cut, Static
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
from purecompose.core.operation import Carry, Lowered, Node, Operation, Purpose, walk
from purecompose.core.ranks import Ranks, SharedPart, Sharing
from purecompose.core.separable import Check, check_operations
from purecompose.core.state import State
from purecompose.nn.keyed.draws import current_run
from purecompose.schedule import Hparam, Schedule, collect


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
        count: Function that returns the denominators of a stage in the body.
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
    """Set `whole_loss` to the loss of the outputs of all slices, for a loss that couples examples."""
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


def repeatable(
    run_once: Operation, body: Iterable[Node], ranks: Ranks | None = None, separable: Check | None = None
) -> Operation:
    """Return an operation that also provides `state.gradient`, which runs it again at other parameters."""
    has_loss = any(getattr(node, "sets_loss", False) for node in walk(body))

    def run(carry: Carry, purpose: Purpose) -> Carry:
        if carry.state.regrad is not None:  # the gradient of an earlier part is not available within this one
            carry = carry._replace(state=carry.state.replace(regrad=None))
        end, used, terms = run_once(carry, purpose)
        again = Again(run_once, carry.used, ranks, has_loss, separable, carry.state)
        return Carry(end.replace(batch=carry.state.batch, regrad=again), used, terms)

    return run


class Again:
    """The part of a step that computes the gradient; see `Regrad`.

    It is a pytree node containing the state at the start of that part, so that it can pass from one compiled part to
    the next, and through `vmap`.
    """

    def __init__(
        self,
        run_once: Operation,
        used: frozenset[str],
        ranks: Ranks | None,
        has_loss: bool,
        separable: Check | None,
        state: State,
    ) -> None:
        self.run_once, self.used, self.ranks, self.has_loss, self.state = run_once, used, ranks, has_loss, state
        self.separable = separable

    def __call__(self, params: dict[str, Tensor], sharing: Sharing = "all") -> tuple[dict[str, Tensor], Tensor]:
        return self._run(self.state, params, _purpose(sharing))

    def gradients(
        self, of: Sequence[Callable[..., Any]], params: dict[str, Tensor], sharing: Sharing
    ) -> list[tuple[dict[str, Tensor], Tensor]]:
        if not self.has_loss:
            raise unsupported("state.gradients(of=...)", "a loss in a stage of your own")
        found = []
        # The checks of a first run need a whole run for each loss, and a transform one graph for each.
        purpose = _purpose(sharing)
        if not purpose.is_first and not is_transforming():
            purpose = purpose._replace(forwards={})
        for loss_fn in of:
            if purpose.is_first:
                _check_reads(loss_fn, self.state)
            static = Static(_with_loss(self.state.context, loss_fn), self.state.static.timestamp)
            marks, state = _marks_of_buffers(loss_fn), self.state.replace(static=static)
            if purpose.is_first and self.separable is not None:
                check_operations([lambda: [Lowered(self.run_once, separable=self.separable)]], state)
            found.append(self._run(state, params, purpose))
            if _marks_of_buffers(loss_fn) != marks:
                raise ValueError(_not_in_state(loss_fn, "writes into its buffers"))
        names = dict.fromkeys(name for grads, _ in found for name in grads)
        return [
            ({name: grads[name] if name in grads else torch.zeros_like(params[name]) for name in names}, loss)
            for grads, loss in found
        ]

    def _run(self, state: State, params: dict[str, Tensor], purpose: Purpose) -> tuple[dict[str, Tensor], Tensor]:
        if purpose.sharing not in get_args(Sharing):
            raise ValueError(f"state.gradient: sharing={purpose.sharing!r}: expected 'all', 'own' or 'none'")
        carry = Carry(state.replace(params=params, grads=None), self.used)
        end = self.run_once(carry, purpose).state
        if end.grads is None or end.loss is None:
            raise RuntimeError("state.gradient(params): the program has no Grad with a loss")
        earlier = {*(state.grads or ())} - self.used - end.grads.keys()
        if earlier:
            raise RuntimeError(
                f"state.gradient(params): the gradients of {', '.join(sorted(earlier))} come from an earlier part of "
                "the program, which is not run again; apply them by an update before the last Grad"
            )
        return end.grads, end.loss


def _purpose(sharing: Sharing) -> Purpose:
    """Return the purpose of a gradient that is computed again, within the run that the caller belongs to."""
    outer = current_run()
    if outer is None:
        return Purpose(sharing, is_again=True)
    return Purpose(sharing, is_again=True, is_first=outer.is_first)


tree.register_node(
    Again,
    lambda again: (
        ("state",),
        (again.state,),
        (again.run_once, again.used, again.ranks, again.has_loss, again.separable),
    ),
    lambda names, children, static: Again(*static, *children),
)


def _check_reads(loss_fn: Any, state: State) -> None:
    """Raise if a loss of `state.gradients` reads what the state does not have."""
    if loss_fn is state.context.loss:
        return
    check_reads(loss_fn)
    scalars = tuple(scalars_of(loss_fn).values())
    unknown = [scalar for scalar in collect(scalars, Hparam) if scalar.name not in state.hparams]
    unknown += [schedule for schedule in collect(scalars, Schedule) if schedule not in state.context.schedules]
    if unknown:
        raise ValueError(
            f"state.gradients(of=...): the loss {shown(loss_fn)} reads {unknown[0]!r}, which is not in the state: let "
            f"the algorithm list it, as in Algorithm(..., config={{'weight': {unknown[0]!r}}}), and call step.init"
        )


def _with_loss(context: Context, loss_fn: Callable[..., Any]) -> Context:
    """Return the context with another loss, which has no parameters."""
    if loss_fn is context.loss:
        return context
    losses.check_loss(loss_fn)
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ValueError(_not_in_state(loss_fn, "has parameters"))
    return context.replace(loss=loss_fn, loss_model=None)


def _not_in_state(loss_fn: Any, what: str) -> str:
    return (
        f"state.gradients(of=...): {type(loss_fn).__name__} {what}, which are not in the state: only the state's own "
        "loss, state.context.loss, may do so"
    )


def _marks_of_buffers(loss_fn: Any) -> list[tuple[str, int, int]]:
    """Return the identity and version of each buffer of a loss, which change when it is written."""
    named = loss_fn.named_buffers() if isinstance(loss_fn, nn.Module) else ()
    return [(name, id(buffer), buffer._version) for name, buffer in named if not buffer.is_inference()]
