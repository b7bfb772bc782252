"""One step along its route: the links one after the other, host algorithms between them, and the new state."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from purecompose.core.compose import Prepared
from purecompose.core.context import Static
from purecompose.core.operation import NO_PURPOSE, Carry
from purecompose.core.state import State
from purecompose.time import Timestamp
from purecompose.transforms.compilation.capture import state_of
from purecompose.transforms.compilation.library import Library
from purecompose.transforms.compilation.links import EAGER, Entry, Route, Values
from purecompose.transforms.compilation.seam import FIELDS, Seam, Source
from purecompose.transforms.form import Form, spec_of
from purecompose.transforms.lease import LASTING, Lane, Lease


__all__ = ["Boarding", "fly"]


class Boarding(NamedTuple):
    """A state and the lane it travels on; nothing has been touched yet."""

    lane: Lane
    entry: Entry
    state: State
    copies: list[tuple[Tensor, Tensor]] = []
    """What the user has replaced, to be copied into the lane: (the lane's tensor, the new one)."""
    spends: Lane | None = None
    """An earlier lane, part of which lives on in this one."""


_UNFINISHED = "was being written over by a step that did not finish"


def fly(library: Library, boarding: Boarding, prepared: Prepared, batch: list[Tensor], route: Route) -> State:
    """The state after the step."""
    lane, state = boarding.lane, boarding.state
    if boarding.spends is not None:
        boarding.spends.spend(_UNFINISHED)
    if boarding.copies:
        lane.spend(_UNFINISHED)
        for to, new in boarding.copies:
            to.copy_(new)
    values: Values = {"key": [state.key], "loss": [] if state.loss is None else [state.loss], "batch": batch}
    if route.plain is not None:
        # The usual step: one graph from the lane and the batch, which writes into the lane.
        lane.spend(_UNFINISHED)
        route.plain.run(values, lane, is_first=True)
        state = _landed(library, route, state.static, lane, values, prepared.later)
    else:
        with torch.no_grad():
            state = _through(library, boarding, prepared, values, route)
    if boarding.spends is not None:
        boarding.spends.reason = prepared.later
    return state


def _through(library: Library, boarding: Boarding, prepared: Prepared, values: Values, route: Route) -> State:
    """The state after several links, with host algorithms between them."""
    lane, state = boarding.lane, boarding.state
    start = prepared.start()
    values = {**_EMPTY, **lane.values, **values}
    if route.takes_clock:
        values["clock"] = [start.clock.table]  # pyright: ignore[reportOptionalMemberAccess]
    static, is_start = start.static, True
    while True:
        for link in route.links:
            if route.writes_lane and link is route.links[-1]:
                lane.spend(_UNFINISHED)
            link.run(values, lane, is_first=is_start)
            is_start = False
        if route.host is None:
            break
        next_part = route.next_part
        route, state, used = _host(library, route, static, lane, values, prepared.bits)
        if route is EAGER:
            rest = library.operation(prepared.bits, next_part)
            return library.step.finish(rest(Carry(state, used), NO_PURPOSE).state).unleased()
        static, is_start = state.static, False
    return _landed(library, route, static, lane, values, prepared.later)


def _landed(library: Library, route: Route, static: Static, lane: Lane, values: Values, later: Timestamp) -> State:
    """The state at the end, with a lease on the lane that holds what lasts."""
    assert route.end is not None
    forms, context, is_usual = route.end.forms, static.context.rested(), True
    if not lane.is_donated:
        lane = Lane({name: forms[name] for name in LASTING}, {name: values[name] for name in LASTING}, is_donated=False)
    else:
        if not route.writes_lane:
            settled = _settled(forms, lane, values)
            is_usual = settled is lane
            lane = settled
        lane.reason = later
    key, loss = values["key"][0], values["loss"][0] if values["loss"] else None
    exit_entry = route.exit
    if exit_entry is None or not is_usual:
        exit_entry = library.entry(context, {**lane.forms, "key": forms["key"], "loss": forms["loss"]})
        route.exit = exit_entry if is_usual else None
    state = object.__new__(State)
    state.__dict__.update(
        _IDLE_FIELDS,
        static=Static(context, later),
        key=key,
        loss=loss,
        metrics=forms["metrics"].build(values["metrics"]) if "metrics" in values else {},
        _lease=Lease(lane, exit_entry, (key, loss, context, library)),
    )
    return state


def _settled(forms: dict[str, Form], lane: Lane, values: Values) -> Lane:
    """What lasts, written into the lane after a step that a host algorithm ended; a new lane if it does not fit."""
    if not all(forms[name].is_alike(lane.forms[name]) for name in LASTING):
        lane.spend("was given to a step in which a host algorithm gave the state another form")
        owned = {name: [tensor.detach().clone() for tensor in values[name]] for name in LASTING}
        return Lane(
            {name: forms[name].with_specs(map(spec_of, owned[name])) for name in LASTING}, owned, is_donated=True
        )
    moves = [
        (to, new) for name in LASTING for to, new in zip(lane.values[name], values[name], strict=True) if new is not to
    ]
    if moves:
        lane.spend(_UNFINISHED)
        # All reading comes before all writing: one tensor's new value may be another's old one.
        for to, new in [(to, new.detach().clone()) for to, new in moves]:
            to.copy_(new)
    return lane


def _host(
    library: Library, route: Route, static: Static, lane: Lane, values: Values, bits: int
) -> tuple[Route, State, frozenset[str]]:
    """Lets a host algorithm act on a plain state, and finds the route from there; `values` are changed in place.

    Returns:
        The route, the state that the algorithm left, and the gradients that are used up by then.
    """
    assert route.host is not None and route.end is not None
    lease = Lease(lane, None, ())
    is_own = {name: values[name] is lane.values[name] for name in LASTING}
    # It may keep what it sees, and the end of the step writes into the lane's tensors, wherever they are now.
    others = [name for name in FIELDS if not is_own.get(name, False)]
    in_lane = {id(t) for tensors in lane.values.values() for t in tensors} if lane.is_donated else frozenset()
    seen = {name: [t.clone() if id(t) in in_lane and name != "regrad" else t for t in values[name]] for name in others}
    given = {name: route.end.forms[name].build(tensors) for name, tensors in seen.items()}
    state, used, _ = route.host.run(Carry(state_of(static, lease, given), route.end.used), NO_PURPOSE)
    forms, fields = dict(route.end.forms), state.__dict__
    for name in FIELDS:
        if name not in fields or (name in given and fields[name] is given[name]):
            continue
        if is_own.get(name, False) and lease.untouched(name, fields[name]) is not None:
            continue
        forms[name], values[name] = Form.of(fields[name])
    seam = Seam(state.static, forms, used)
    if lane.is_donated:
        seam = replace(seam, lane=lane.forms, held=_held(lane, values))
    place = (state.context, state.context.schedules, *forms.values(), frozenset(seam.held.items()), used)
    if place not in route.after_host:
        if len(route.after_host) == _MOST_KEPT:
            route.after_host.pop(next(iter(route.after_host)))
        route.after_host[place] = library.route_or_eager(seam, bits, route.next_part)
    return route.after_host[place], state, used


def _held(lane: Lane, values: Values) -> dict[Source, Source]:
    """Which of these tensors are the lane's."""
    in_lane = {id(tensor): Source(name, i) for name in LASTING for i, tensor in enumerate(lane.values[name])}
    places = ((Source(name, i), id(tensor)) for name in FIELDS for i, tensor in enumerate(values[name]))
    return {place: in_lane[tensor] for place, tensor in places if tensor in in_lane}


_MOST_KEPT = 64
"""A host algorithm that puts another number into the metrics in every step makes a route of each."""
_EMPTY: Values = {name: [] for name in FIELDS}
_IDLE_FIELDS = dict.fromkeys(name for name in FIELDS if name not in LASTING)
