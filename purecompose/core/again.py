"""`state.gradient`: the part of a step that computes its gradient, run again at other parameters or of other losses."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from purecompose import losses, tree
from purecompose._support.checks import shown
from purecompose._support.internals import is_transforming
from purecompose.combinations import unsupported
from purecompose.core.context import Context, Static
from purecompose.core.loss import check_reads, scalars_of
from purecompose.core.operation import Carry, Lowered, Node, Operation, Purpose, walk
from purecompose.core.ranks import Ranks, Sharing
from purecompose.core.separable import Check, check_operations
from purecompose.core.state import State
from purecompose.nn.keyed.draws import current_run
from purecompose.schedule import Hparam, Schedule, collect


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
