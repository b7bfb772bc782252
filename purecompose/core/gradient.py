"""Gradients, computed in one place by two equivalent engines.

`torch.autograd.grad` over the functional call costs as much as an imperative loop, and records a graph if a leaf
requires an outer gradient. Under a transform of `torch.func` it runs within `torch.func.vjp`, without which gradients
of gradients would be wrong.

A parameter that the loss does not reach is absent from `state.grads`, and the update leaves it as it is: with a
gradient of zeros, weight decay, momentum and Adam would move it.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches
from purecompose._support.contexts import NOTHING
from purecompose._support.internals import (
    GradMode,
    allowing_requires_grad,
    gradients,
    is_tracked,
    is_transforming,
    only_maps,
)
from purecompose._support.messages import layer_of, line_of
from purecompose.core.operation import Carry, Operation, Purpose
from purecompose.core.state import State
from purecompose.core.values import fields_where
from purecompose.nn.differentiable import Once, OwnDerivatives, plain_operations
from purecompose.nn.keyed.draws import Part, running


def wants_outer_gradient(state: State, batch: Any) -> bool:
    """Return whether the step is differentiated through: a transform is active, or a leaf requires a gradient."""
    if is_transforming():
        return True
    if not torch.is_grad_enabled():
        return False
    for tensors in (state.params, state.hparams, state.buffers):
        for tensor in tensors.values():
            if tensor.requires_grad:
                return True
    if _requires_grad(state.opt_state):
        return True
    if state.slots and _requires_grad(state.slots):
        return True
    # Loops instead of any(...), which would cost more than the rest of this function, in every step.
    for member in batch if type(batch) is tuple else (batch,):
        if member.requires_grad if type(member) is Tensor else _is_any_required(member):
            return True
    return False


class Forward:
    """A forward pass that the gradients of several losses share: the leaves, and the carry after it."""

    def __init__(self) -> None:
        self.leaves: dict[str, Tensor] = {}
        self.after: Carry | None = None

    def run(self, forward: Operation, carry: Carry, purpose: Purpose) -> Carry:
        """Return the carry after the forward pass, with the loss of the given one."""
        self.after = forward(carry, purpose) if self.after is None else self.after
        return self.after._replace(state=self.after.state.replace(static=carry.state.static))


def differentiate(
    body: Operation,
    carry: Carry,
    names: tuple[str, ...],
    own: OwnDerivatives,
    purpose: Purpose,
    shared: Forward | None = None,
) -> Carry:
    """Run the body and add the gradients of its loss with respect to those named parameters that it reaches.

    Returns:
        The body's end with `grads`. Fields that the body set (loss, outputs, buffers, slots, ...) are detached from
        the graph unless the caller differentiates through the step.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "a step was called within torch.inference_mode, where torch records no gradients: call it outside, or use "
            "torch.no_grad, under which a step still takes its gradients"
        )
    if not names:
        raise ValueError("there is nothing to train: the model has no trainable parameter (all are frozen)")
    state = carry.state
    # A step turns grad mode off unless it is differentiated through; a population is not by being mapped.
    is_differentiated = torch.is_grad_enabled() or (is_transforming() and not only_maps())
    engine = _with_torch_func if is_transforming() else _with_autograd
    inner = functools.partial(own.run, body, is_watched=purpose.is_first)
    # Parameters stay in the skeleton for the whole scope: activation checkpointing runs forward again in it.
    kernels = Once()
    if is_differentiated:
        kernels = plain_operations(refuses=any(map(is_tracked, state.params.values())))
    # What the backward pass computes again is watched as in the forward pass.
    around = running(Part(".gradient", purpose)) if purpose.is_first else NOTHING
    with GradMode(True), state.model.skeleton(train=True).held(), kernels, around:
        try:
            end, values, grads = engine(inner, carry, names, is_differentiated, purpose, shared)
        except RuntimeError as error:
            if "nference tensor" not in str(error):
                raise
            raise RuntimeError(
                "the state or the batch holds tensors made within torch.inference_mode, which torch cannot "
                "differentiate: continue from state.copy(), and load data outside of inference mode"
            ) from error
    if state.grads:
        grads = {**state.grads, **grads}
    values |= {"params": state.params, "batch": state.batch, "grads": grads}
    return Carry(end.state.replace(**values), end.used, end.terms)


def value_and_grads(fn: Callable[[list[Tensor]], tuple[Tensor, Any]], leaves: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """Return the second result of a function, a pytree, and the gradients of the first, a loss; 0 if not reached."""

    def checked(leaves: list[Tensor]) -> tuple[Tensor, Any]:
        loss, rest = fn(leaves)
        _check_loss(loss)
        return loss, rest

    if torch.is_grad_enabled() or is_transforming():
        with plain_operations():
            loss, pullback, rest = torch.func.vjp(checked, leaves, has_aux=True)  # pyright: ignore[reportAssignmentType]
            return rest, pullback(torch.ones_like(loss))[0]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        loss, rest = checked(leaves)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return batches.map_tensors(_cut_off, rest), list(grads)


_BY_LEAVES = "differentiate by torch.autograd.grad with respect to settings or weights that require a gradient"

_Differentiated: TypeAlias = tuple[Carry, dict[str, Any], dict[str, Tensor]]
"""The body's end, the fields that it set (detached from the engine's graph), and the gradients."""


def _with_autograd(
    body: Operation,
    carry: Carry,
    names: tuple[str, ...],
    is_differentiated: bool,
    purpose: Purpose,
    shared: Forward | None,
) -> _Differentiated:
    state, used, terms = carry
    leaves = {} if shared is None else shared.leaves
    for name in names if not leaves else ():
        param = state.params[name]  # an outer gradient flows through a view to a parameter that asks for one
        keeps_graph = is_differentiated and param.requires_grad
        leaves[name] = param.view_as(param) if keeps_graph else param.detach().requires_grad_()
    end = body(Carry(state.replace(params={**state.params, **leaves}, loss=None), used, terms), purpose)
    if (part := purpose.part) is not None and end.terms is not None:
        # 0 as a function of the terms, on which later messages depend on the other ranks as well.
        part.weight = end.terms * 0 if part.is_empty else end.terms
    values = _set_by_body(state, end.state)
    if is_differentiated:
        return end, values, _grads(end.state.loss, leaves, _differentiable_gradients)
    grads = _grads(end.state.loss, leaves, gradients if shared is None else _retained_gradients)
    return end, {name: batches.map_tensors(_cut_off, value) for name, value in values.items()}, grads


def _with_torch_func(
    body: Operation,
    carry: Carry,
    names: tuple[str, ...],
    is_differentiated: bool,
    purpose: Purpose,
    shared: Forward | None,
) -> _Differentiated:
    del shared  # forward passes are shared outside of transforms only
    state, ends = carry.state, []

    def run(leaves: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        with allowing_requires_grad():
            end = body(carry._replace(state=state.replace(params={**state.params, **leaves}, loss=None)), purpose)
        grads = _grads(end.state.loss, leaves, _differentiable_gradients)
        ends.append(end)
        # Values may leave the transform only through its result, which must consist of tensors.
        return grads, tuple(batches.tensors(_set_by_body(state, end.state)))

    if state.clock is not None:
        _ = state.clock.values  # read now: if made within the transform, it would outlive it as a dead wrapper
    # vjp makes the leaves differentiable at a separate level. The gradient is taken inside, where torch.autograd
    # returns None for leaves that the loss does not reach; torch.func.grad would return zeros.
    leaves = {name: state.params[name] for name in names}
    with _explained() if is_differentiated else NOTHING:
        grads, _, tensors = torch.func.vjp(run, leaves, has_aux=True)  # pyright: ignore[reportAssignmentType]
    (end,) = ends
    return end, batches.with_tensors(_set_by_body(state, end.state), tensors), grads


_UNSUPPORTED = {
    "setup_context": f"torch.func needs setup_context in an autograd.Function or operator. Define it, or {_BY_LEAVES}",
    "data pointer of Tensor": f"torch.func cannot run packed sequences or NumPy. Pad sequences, or {_BY_LEAVES}",
    "forward AD|forward-mode": "an operation lacks forward mode: take gradients of gradients",
}
"""Meanings and remedies of torch's messages, by regular expressions."""


@contextmanager
def _explained() -> Iterator[None]:
    """Return a context manager in which errors of the transforms around a step name layer, line and remedy."""
    try:
        yield
    except RuntimeError as error:
        said = next((said for words, said in _UNSUPPORTED.items() if re.search(words, str(error))), None)
        if said is None:
            raise
        place = f"{line_of(error)}{layer_of(error)}"
        raise RuntimeError(f"a step is differentiated by torch.func, at {place}: {said}") from error


_retained_gradients = functools.partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
_differentiable_gradients = functools.partial(torch.autograd.grad, create_graph=True, allow_unused=True)


def _grads(
    loss: Any, leaves: dict[str, Tensor], engine: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor | None]]
) -> dict[str, Tensor]:
    """Return the gradients of the loss with respect to the leaves that it reaches; sparse ones become dense."""
    _check_loss(loss)
    named = zip(leaves, engine(loss, [*leaves.values()]), strict=True)
    return {n: grad if grad.layout is _STRIDED else grad.to_dense() for n, grad in named if grad is not None}


_STRIDED = torch.strided
_LEAVE_GRAD = fields_where(leaves_grad=True)


def _set_by_body(before: State, after: State) -> dict[str, Any]:
    """Return the fields that the body replaced: only these can be attached to its graph."""
    new = after.__dict__
    # A field that neither state has looked up yet (see `Values`) was not replaced.
    found = {name: new[name] for name in _LEAVE_GRAD if name in new and new[name] is not getattr(before, name)}
    found["loss"] = after.loss
    return found


def _cut_off(tensor: Tensor) -> Tensor:
    """Return the tensor without a graph: the same object if it has none, so that unchanged values are recognized."""
    return tensor.detach() if tensor.requires_grad else tensor


def _requires_grad(by_name: Any) -> bool:
    """Return whether a tensor among slots requires a gradient; quick for the usual dict of dicts of tensors."""
    for slot in by_name.values() if type(by_name) is dict else (by_name,):
        for tensor in slot.values() if type(slot) is dict else (slot,):
            if tensor.requires_grad if type(tensor) is Tensor else _is_any_required(tensor):
                return True
    return False


def _is_any_required(tree: Any) -> bool:
    return any(tensor.requires_grad for tensor in batches.tensors(tree))


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(
            f"Grad differentiates a scalar loss, got {shape}: the loss function must return the mean over the batch, "
            "a 0-d tensor (losses of examples only for reduction='none'), and a body without the stage `loss` must set "
            "state.loss"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on any parameter that Grad differentiates: it was computed under torch.no_grad, "
            "from detached tensors, or without the network's outputs"
        )
