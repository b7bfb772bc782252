"""Programs, and their nodes that are neither events nor scopes: stages and the update.

A program is a tuple of nodes; each node lowers itself to operations (see `purecompose.core.operation`).
"""

import fnmatch
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.internals import is_fake, is_transforming
from purecompose._support.messages import warn
from purecompose.combinations import unsupported
from purecompose.core.contract import Contract
from purecompose.core.means import check_passes_agree, check_terms, denominators, num_terms
from purecompose.core.operation import Carry, Lowered, Node, Place, Purpose, lift, walk
from purecompose.core.state import State
from purecompose.errors import ContractError
from purecompose.losses.evaluation import check_pairs, dense_advice
from purecompose.time.event import Event


StateFn: TypeAlias = Callable[[State], State]
Program: TypeAlias = tuple[Node, ...]
"""The loop as data: events, stages and scopes, in order."""


@dataclass(frozen=True)
class Stage:
    """A named core part of a program: a pure function of the state."""

    name: str
    """Its name, as printed in programs and plans."""
    fn: StateFn
    """The function `State -> State`. One that sets `state.loss` to a mean over other terms than examples has an
    attribute `num_terms`, a function of the state after it. One that adds means with different denominators has an
    attribute `denominators`, a function of the state before it, and divides by `state.denominators`: these numbers, or
    in a slice their share. One that compares examples is `losses.over_batch(fn)`."""
    sets_loss: bool = False
    """True if it sets `state.loss` from the outputs and the batch, so that slices are weighted by its terms."""

    def __call__(self, state: State) -> State:
        return self.fn(state)

    def lower(self, place: Place) -> list[Lowered]:
        """Return the stage as an operation; a loss whose slices are weighted also counts its terms."""
        fn = self._run if self.denominators is None else self._run_divided
        run = lift(fn, place.pass_name(self.name), turn=place.turn(self.name), may_set_gradients=True)
        ops, own = [Lowered(run, sets_loss=self.sets_loss)], getattr(self.fn, "num_terms", None)
        if place.accumulates and own is not None:
            what = "a stage of your own with num_terms"
            raise unsupported("methods that take means over batches", what, f"the stage {self.name}")
        if place.is_weighted and (self.sets_loss or own is not None):
            ops.append(Lowered(functools.partial(_count_terms, own or num_terms)))
        return ops

    @property
    def denominators(self) -> Callable[[State], Any] | None:
        """The function that returns the numbers by which the stage's loss divides; `None` if it does not declare it."""
        return getattr(self.fn, "denominators", None)

    def _run_divided(self, state: State, watch: Contract | None) -> State:
        """Run a stage with `denominators`, which are those of the whole batch unless it is in a slice."""
        if state.denominators is not None:
            return self._run(state, watch)
        whole = state.replace(denominators=denominators(state, self.denominators))
        return self._run(whole, watch).replace(denominators=None)

    def _run(self, state: State, watch: Contract | None) -> State:
        try:
            new_state = self.fn(state) if watch is None else watch.run_stage(self, state)
            if watch is not None and getattr(new_state, "loss", None) is not state.loss:
                self._check_pairs(state)
        except Exception as error:
            given = {"batch": state.batch, "outputs": state.outputs}
            forms = [f"{name} {_form(value)}" for name, value in given.items() if value is not None]
            error.add_note(f"in the stage {self.name}, with {', '.join(forms)}")
            if state.outputs is None and (note := _dtype_advice(state)):
                error.add_note(note)
            if self.sets_loss and (note := dense_advice(_targets_if_any(state))):
                error.add_note(note)
            raise
        if not isinstance(new_state, State):
            is_factory = type(new_state).__name__ == "Algorithm"
            advice = f"call it, compose([{self.name}()])" if is_factory else "return state.replace(...)"
            raise ContractError(
                f"the stage {self.name} must return a State, got {type(new_state).__name__}"
                f"{' (is a return statement missing?)' if new_state is None else ''}; {advice}"
            )
        if watch is not None and self.sets_loss:
            check_terms(new_state)
            check_passes_agree(new_state)
        return new_state

    def _check_pairs(self, state: State) -> None:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor | None:
            return self.fn(state.replace(outputs=outputs, targets=targets, whole_loss=None)).loss

        check_pairs(loss, state.outputs, _targets_if_any(state), "the loss")

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Update:
    """The node that updates the parameters with the optimizer; `update(wrt=pattern)` updates only those that match.

    `update()` is the same as `update`.
    """

    wrt: str | None = None
    """Pattern of the parameters' names; `None` for all."""

    def __call__(self, *, wrt: str | None = None) -> "Update":
        return Update(wrt)

    def lower(self, place: Place) -> list[Lowered]:
        del place
        return [Lowered(self._run)]

    def _run(self, carry: Carry, purpose: Purpose) -> Carry:
        grads, editors = self._to_apply(carry), ""
        if purpose.watch is not None:
            editors = ", ".join(purpose.watch.unapplied)
            purpose.watch.unapplied.clear()
        if not grads:
            if purpose.watch is not None and carry.state.grads:
                found = ", ".join(list(carry.state.grads)[:3])
                warn(f"{self!r} updates nothing: the gradients at this place are of {found}, none of its parameters")
            return carry
        state, used, terms = carry
        used = used.union(grads)
        if purpose.frees_fields:
            state = state.replace(grads=None, outputs=None)
            del carry
        # Only the optimizer holds the gradients during its update: their memory is free as soon as it drops them.
        given = [grads]
        del grads
        try:
            more = _evaluation(state, given[0], editors, purpose)

            def update() -> Any:
                if more:
                    return state.optimizer.update(given.pop(), state.opt_state, state.params, state.scalar, **more)
                # Without `**`, for which Python would hold the arguments during the call.
                return state.optimizer.update(given.pop(), state.opt_state, state.params, state.scalar)

            params, opt_state = update() if purpose.watch is None else purpose.watch.run_update(state, update)
        except Exception as error:
            error.add_note(f"in the update of the optimizer {state.optimizer!r}")
            if frozen := [name for name in used if name in state.context.frozen]:
                error.add_note(
                    f"state.grads has gradients of frozen parameters, for which the optimizer has no memory: {frozen}; "
                    "take those of state.context.trainable only"
                )
            raise
        return Carry(state.replace(params=params, opt_state=opt_state), used, terms)

    def _to_apply(self, carry: Carry) -> dict[str, Tensor]:
        """Return the gradients that the update applies, in a new dictionary; empty if there is nothing to do."""
        state, used, _ = carry
        if state.grads is None:
            raise RuntimeError("the program's update comes before any Grad: there are no gradients")
        if not state.grads:  # a method has removed them all, for a later step
            return {}
        chosen: Iterable[str] = state.grads
        if self.wrt is not None:
            # Match all trainable names, because gradients that an earlier update has used are gone after the next Grad.
            chosen = matching_params(tuple(dict.fromkeys([*state.context.trainable, *state.grads])), self.wrt)
        grads = {name: state.grads[name] for name in chosen if name in state.grads and name not in used}
        if not grads and not used.isdisjoint(chosen):  # otherwise the loss does not reach them
            raise RuntimeError(
                f"{self!r} has nothing to apply: an earlier update has used every gradient of these parameters; put "
                "a Grad before it"
            )
        return grads

    def __repr__(self) -> str:
        return "update" if self.wrt is None else f"update(wrt={self.wrt!r})"


def _evaluation(state: State, grads: dict[str, Tensor], editors: str, purpose: Purpose) -> dict[str, Any]:
    """Return the arguments of an optimizer that evaluates the loss; see `optim.Optimizer`."""
    if not getattr(state.optimizer, "evaluates", False):
        return {}
    if editors:  # which may have left these gradients as they were, unlike those of later steps
        raise unsupported("lbfgs", "methods that change gradients", editors)
    if purpose.watch is not None and not is_transforming() and not is_fake(state.key):
        found, _ = state.gradient(state.params)
        if not all(torch.allclose(grad, found[name], rtol=1e-3, equal_nan=True) for name, grad in grads.items()):
            raise unsupported("lbfgs", "methods that change gradients", repr(state.optimizer))
    return {"loss": state.loss, "gradient": state.gradient}


def as_nodes(given: Iterable[Any]) -> Program:
    """Return the nodes of a program, with names of events replaced by events and plain functions by stages."""
    return tuple(map(_as_node, given))


def events_in(program: Iterable[Node]) -> tuple[Event, ...]:
    """Return the events of a program in order, including those inside scopes, each once."""
    return tuple(dict.fromkeys(node for node in walk(program) if isinstance(node, Event)))


def matching_params(names: tuple[str, ...], wrt: str | None) -> tuple[str, ...]:
    """Return the names that match a pattern, or all names if it is `None`."""
    if wrt is None:
        return names
    found = tuple(name for name in names if fnmatch.fnmatchcase(name, wrt))
    if not found:
        raise ValueError(f"wrt={wrt!r} matches no trainable parameter; there are {', '.join(names) or 'none'}")
    return found


def _as_node(given: Any) -> Node:
    if isinstance(given, str):
        return Event(given)
    if not isinstance(given, type) and callable(getattr(given, "lower", None)):
        return given
    if not callable(given):
        hint = "; algorithms are the second argument, compose(loop_events, [...])" if hasattr(given, "apply") else ""
        raise TypeError(f"{given!r} is neither an event, a stage (a function State -> State), nor a scope{hint}")
    return Stage(_name_of(given), cast(StateFn, given))


def _name_of(fn: Any) -> str:
    """Return a stage's name, which keys its draws: without an address, which would differ in a resumed run."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", None) or type(fn).__name__


def _targets_if_any(state: State) -> Any:
    try:
        return state.targets
    except Exception:  # what is missing is reported already, or is not needed
        return None


def _dtype_advice(state: State) -> str:
    """Return a hint if the batch has a float64 or uint8 tensor, as NumPy and images give, and no parameter has."""
    known = {param.dtype for param in state.params.values()}
    for tensor in batches.tensors(state.batch):
        if tensor.dtype in (torch.float64, torch.uint8) and tensor.dtype not in known:
            scaled = " / 255" if tensor.dtype is torch.uint8 else ""
            return f"the batch has {tensor.dtype}, and no parameter has; to convert it, use tensor.float(){scaled}"
    return ""


def _form(value: Any) -> str:
    return f"{type(value).__name__}({', '.join(map(tree.describe, batches.tensors(value)))})"


def _count_terms(count: Callable[[State], int | Tensor], carry: Carry, purpose: Purpose) -> Carry:
    del purpose
    return carry._replace(terms=count(carry.state))
