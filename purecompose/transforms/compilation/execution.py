"""Execution of a plan: its parts are called in order, with host algorithms between them, and return a new state."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from purecompose._support.device import return_freed_memory
from purecompose.core.compose import Prepared
from purecompose.core.context import Static
from purecompose.core.operation import Carry
from purecompose.core.state import State
from purecompose.time import Timestamp
from purecompose.transforms.compilation.capture import state_of
from purecompose.transforms.compilation.graph_cache import GraphCache
from purecompose.transforms.compilation.parts import Entry, ExecutionPlan, Values
from purecompose.transforms.signature import (
    FIELDS,
    LASTING,
    Boundary,
    BufferLease,
    Signature,
    Source,
    StateBuffers,
    spec_of,
)


class Launch(NamedTuple):
    """The inputs of a step that is about to be executed; nothing has been changed yet."""

    buffers: StateBuffers
    entry: Entry
    state: State
    lease: BufferLease | None = None
    """The state's lease on `buffers`; `None` if these are new."""
    copies: list[tuple[Tensor, Tensor]] = []
    """Pairs (buffer, new value) for tensors that the user has replaced, to be copied into the buffers."""


_UNFINISHED = "was being written over by a step that has not finished"


def execute(graphs: GraphCache, launch: Launch, prepared: Prepared, batch: list[Tensor], plan: ExecutionPlan) -> State:
    buffers, state, lease = launch.buffers, launch.state, launch.lease
    if buffers.generation == 1:  # the second step: by now the state that was copied into the buffers has been freed
        return_freed_memory()
    own = BufferLease(buffers, None, ())
    if lease is not None:
        own.generation = lease.generation
    if launch.copies:
        own.spend(_UNFINISHED)
        for to, new in launch.copies:
            to.copy_(new)
    values: Values = {"key": [state.key], "loss": [] if state.loss is None else [state.loss], "batch": batch}
    if plan.plain is not None:
        # The usual step: one graph reads the buffers and the batch, and writes into the buffers.
        own.spend(_UNFINISHED)
        plan.plain.run(values, buffers, from_buffers=True)
        state = _finished(graphs, plan, state.static, own, values, prepared.later)
    else:
        with torch.no_grad():
            state = _through(graphs, own, state, prepared, values, plan)
    return state


def _through(
    graphs: GraphCache, own: BufferLease, state: State, prepared: Prepared, values: Values, plan: ExecutionPlan
) -> State:
    """Return the state after several parts, with host algorithms between them."""
    buffers, start = own.buffers, prepared.start()
    values = {**_EMPTY, **buffers.values, **values}
    if plan.takes_clock:
        values["clock"] = [start.clock.table]  # pyright: ignore[reportOptionalMemberAccess]
    static, from_buffers = start.static, True
    while True:
        for part in plan.parts:
            if plan.writes_buffers and part is plan.parts[-1]:
                own.spend(_UNFINISHED)
            part.run(values, buffers, from_buffers=from_buffers)
            from_buffers = False
        if plan.host is None:
            break
        next_stretch = plan.next_stretch
        plan, state, used = _host(graphs, plan, static, buffers, values, prepared.bits)
        if plan.is_refused:
            rest = graphs.operation(prepared.bits, next_stretch)
            return graphs.step.finish(rest(Carry(state, used), graphs.step.purpose()).state).unleased()
        static, from_buffers = state.static, False
    return _finished(graphs, plan, static, own, values, prepared.later)


def _finished(
    graphs: GraphCache, plan: ExecutionPlan, static: Static, own: BufferLease, values: Values, later: Timestamp
) -> State:
    """Return the state at the end, with a lease on the buffers of its donated fields."""
    assert plan.end is not None
    buffers, signatures, context, is_usual = own.buffers, plan.end.signatures, static.context.rested(), True
    if not buffers.is_donated:
        buffers = StateBuffers(
            {name: signatures[name] for name in LASTING}, {name: values[name] for name in LASTING}, is_donated=False
        )
    else:
        if not plan.writes_buffers:
            settled = _settled(signatures, own, values)
            is_usual = settled is buffers
            buffers = settled
        buffers.reason = later
    key, loss = values["key"][0], values["loss"][0] if values["loss"] else None
    exit_entry = plan.exit
    if exit_entry is None or not is_usual:
        exit_entry = graphs.entry(context, {**buffers.signatures, "key": signatures["key"], "loss": signatures["loss"]})
        plan.exit = exit_entry if is_usual else None
    state = object.__new__(State)
    state.__dict__.update(
        _IDLE_FIELDS,
        static=Static(context, later),
        key=key,
        loss=loss,
        metrics=signatures["metrics"].build(values["metrics"]) if "metrics" in values else {},
        _lease=BufferLease(buffers, exit_entry, (key, loss, context, graphs)),
    )
    return state


def _settled(signatures: dict[str, Signature], own: BufferLease, values: Values) -> StateBuffers:
    """Write the fields into the buffers after a final host algorithm; return new buffers if they do not fit."""
    buffers = own.buffers
    if not all(signatures[name].is_alike(buffers.signatures[name]) for name in LASTING):
        own.spend("was given to a step in which a host algorithm changed the structure, shapes or dtypes of the state")
        owned = {name: [tensor.detach().clone() for tensor in values[name]] for name in LASTING}
        return StateBuffers(
            {name: signatures[name].with_specs(map(spec_of, owned[name])) for name in LASTING}, owned, is_donated=True
        )
    moves = [
        (to, new)
        for name in LASTING
        for to, new in zip(buffers.values[name], values[name], strict=True)
        if new is not to
    ]
    if moves:
        own.spend(_UNFINISHED)
        # All reads precede all writes: one tensor's new value may be another's old one.
        for to, new in [(to, new.detach().clone()) for to, new in moves]:
            to.copy_(new)
    return buffers


def _host(
    graphs: GraphCache, plan: ExecutionPlan, static: Static, buffers: StateBuffers, values: Values, bits: int
) -> tuple[ExecutionPlan, State, frozenset[str]]:
    """Run a host algorithm on a plain state and find the plan from there; `values` is changed in place.

    Returns:
        The plan, the state that the algorithm returned, and the gradients that updates have applied by then.
    """
    assert plan.host is not None and plan.end is not None
    lease = BufferLease(buffers, None, ())
    is_own = {name: values[name] is buffers.values[name] for name in LASTING}
    # The algorithm may keep the tensors it sees, but the end of the step writes into the buffers: pass copies of
    # those that are buffers.
    others = [name for name in FIELDS if not is_own.get(name, False)]
    in_buffers = {id(t) for tensors in buffers.values.values() for t in tensors} if buffers.is_donated else frozenset()
    seen = {
        name: [t.clone() if id(t) in in_buffers and name != "regrad" else t for t in values[name]] for name in others
    }
    given = {name: plan.end.signatures[name].build(tensors) for name, tensors in seen.items()}
    state, used, _ = plan.host.run(Carry(state_of(static, lease, given), plan.end.used), graphs.step.purpose())
    signatures, fields = dict(plan.end.signatures), state.__dict__
    for name in FIELDS:
        if name not in fields or (name in given and fields[name] is given[name]):
            continue
        if is_own.get(name, False) and lease.untouched(name, fields[name]) is not None:
            continue
        signatures[name], values[name] = Signature.of(fields[name])
    boundary = Boundary(state.static, signatures, used)
    if buffers.is_donated:
        boundary = replace(boundary, donated=buffers.signatures, held=_held(buffers, values))
    plan_key = (state.context, state.context.schedules, *signatures.values(), frozenset(boundary.held.items()), used)
    if plan_key not in plan.after_host:
        if len(plan.after_host) == _MOST_KEPT:
            plan.after_host.pop(next(iter(plan.after_host)))
        plan.after_host[plan_key] = graphs.plan_or_eager(boundary, bits, plan.next_stretch)
    return plan.after_host[plan_key], state, used


def _held(buffers: StateBuffers, values: Values) -> dict[Source, Source]:
    """Return the places whose tensor is a donated buffer, with the place of that buffer."""
    in_buffers = {id(tensor): Source(name, i) for name in LASTING for i, tensor in enumerate(buffers.values[name])}
    places = ((Source(name, i), id(tensor)) for name in FIELDS for i, tensor in enumerate(values[name]))
    return {place: in_buffers[tensor] for place, tensor in places if tensor in in_buffers}


_MOST_KEPT = 64
"""Largest number of plans kept after a host algorithm, which needs one for each number that it puts into metrics."""
_EMPTY: Values = {name: [] for name in FIELDS}
_IDLE_FIELDS = dict.fromkeys(name for name in FIELDS if name not in LASTING)
