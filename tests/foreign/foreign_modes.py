"""The ways in which the sweep runs a case, each compared with plain PyTorch."""

import copy
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, batch as batches, optim, tree
from purecompose.core.context import Layout
from purecompose.testing.process import played
from purecompose.transforms.population import stack_states, unstack_states
from tests.foreign.foreign_case import Batch, Case


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case in a mode."""

    kind: str
    """"match", "refused" by the error that the case names, "obscure" for any other error, or "wrong"."""
    detail: str = ""


@dataclass(frozen=True)
class Trained:
    """Result of training."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: list[float]


class Wrong(Exception):
    """Numbers differ, or an object of the caller was changed."""


def outcome_of(case: Case, mode: str) -> Outcome:
    """Run a case in a mode."""
    torch.set_default_dtype(case.dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            MODES[mode](case)
    except Wrong as error:
        return Outcome("wrong", str(error))
    except Exception as error:
        words = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        pattern = case.refusal(mode)
        return Outcome("obscure" if pattern is None or not re.search(pattern, words) else "refused", words)
    finally:
        torch.set_default_dtype(torch.float32)
    return Outcome("match")


# Plain PyTorch


def in_torch(case: Case, seed: int = 0, num_slices: int = 1) -> Trained:
    """Train by the reference, a plain loop; with slices, gradients are added up over them."""
    net, found = case.net(seed), []
    trained = [p for p in net.parameters() if p.requires_grad]
    if case.adam:
        optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    for batch in case.batches():
        optimizer.zero_grad()
        loss = 0.0
        for part in _slices(case, batch, num_slices):
            share = case.loss_of(net, part) / num_slices
            share.backward()
            loss += share.item()
        optimizer.step()
        found.append(loss)
    params = {name: p.detach() for name, p in net.named_parameters()}
    buffers = {name: b.detach() for name, b in net.named_buffers()}
    return Trained(params, buffers, found)


def _slices(case: Case, batch: Batch, num: int) -> list[Batch]:
    layout = Layout(case.options.get("input_field"), case.options.get("batch_dim", 0))
    return [batch] if num == 1 else layout.split(batch, num)


# The library


def make_state(case: Case, net: nn.Module, key: int = 0) -> State:
    """Return the initial state of a case."""
    optimizer = optim.adamw(0.01, weight_decay=0.1) if case.adam else optim.sgd(0.1, momentum=0.9)
    return State.create(net, loss=case.loss, optimizer=optimizer, key=key, **case.options)


def train(step: Callable[[State, Batch], State], state: State, case: Case) -> tuple[State, list[Any]]:
    """Return the state after all batches, and the losses."""
    found = []
    for batch in case.batches():
        given = copy.deepcopy(batch)
        state = step(state, batch)
        if not _is_same(given, batch):
            raise Wrong("the step has changed the caller's batch")
        assert state.loss is not None
        found.append(state.loss.tolist())
    return state, found


def _is_same(first: Batch, second: Batch) -> bool:
    pairs = zip(batches.tensors(first), batches.tensors(second), strict=True)
    return all(
        torch.equal(one.isnan() | (one == other), torch.ones_like(one, dtype=torch.bool)) for one, other in pairs
    )


def compare(case: Case, found: Trained, expected: Trained, what: str) -> None:
    """Raise if the results of training differ. A state has only one of several tied parameters."""
    for index, loss in enumerate(expected.losses):
        if not math.isclose(found.losses[index], loss, rel_tol=case.tolerance, abs_tol=1e-7):
            raise Wrong(f"{what}: loss {found.losses[index]} of batch {index}, expected {loss}")
    for kind in ("params", "buffers"):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        for name, value in theirs.items():
            own = mine[name] if name in mine else _tied(name, value, expected, mine)
            one, other = (torch.view_as_real(t) if t.is_complex() else t.double() for t in (own, value))
            if not torch.allclose(one, other, rtol=case.tolerance, atol=case.tolerance / 100, equal_nan=True):
                raise Wrong(f"{what}: {kind}[{name}] differs by {(one - other).abs().max().item():.3g}")


def _tied(name: str, value: Tensor, expected: Trained, mine: dict[str, Tensor]) -> Tensor:
    """Return the state's tensor for a tied tensor of the network that the state does not have under that name."""
    for other, tensor in {**expected.params, **expected.buffers}.items():
        if other in mine and tensor.data_ptr() == value.data_ptr():
            return mine[other]
    raise Wrong(f"the state has no {name}")


def _of(state: State, found: list[float]) -> Trained:
    return Trained(dict(state.params), dict(state.buffers), found)


def _expected(case: Case, seed: int = 0, num_slices: int = 1) -> Trained:
    if not case.draws:
        return in_torch(case, seed, num_slices)
    return _of(*train(pc.compose(pc.loop_events), make_state(case, case.net(seed)), case))


def eager(case: Case) -> None:
    """Run the composed step, and check that the caller's network is unchanged."""
    net = case.net()
    before = copy.deepcopy(net.state_dict()), [(n, m.training) for n, m in net.named_modules()]
    state, found = train(pc.compose(pc.loop_events), make_state(case, net), case)
    after = net.state_dict(), [(n, m.training) for n, m in net.named_modules()]
    if not tree.equal(_tensors(before[0]), _tensors(after[0])) or before[1] != after[1]:
        raise Wrong("the caller's network has changed")
    compare(case, _of(state, found), _expected(case), "eager")


def _tensors(values: Any) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def microbatches(case: Case) -> None:
    """Run batches in two slices."""
    state, found = train(pc.compose(pc.loop_events, microbatches=2), make_state(case, case.net()), case)
    num_slices = 2 if case.sliced and not case.draws else 1
    if case.draws and case.sliced:
        return
    compare(case, _of(state, found), _expected(case, num_slices=num_slices), "microbatches")


def compiled(case: Case, backend: str = "eager") -> None:
    """Run the traced step without further compilation."""
    step = pc.compile(pc.compose(pc.loop_events), backend=backend, quiet=True)
    state, found = train(step, make_state(case, case.net()), case)
    compare(case, _of(state, found), _expected(case), "compiled")


def inductor(case: Case) -> None:
    """Run the step compiled by Inductor."""
    compiled(case, "inductor")


def population(case: Case) -> None:
    """Run a population of two networks."""
    states = [make_state(case, case.net(seed)) for seed in (0, 1)]
    state, found = train(pc.population(pc.compose(pc.loop_events), 2), stack_states(states), case)
    for seed, member in enumerate(unstack_states(state)):
        compare(case, _of(member, [loss[seed] for loss in found]), _expected(case, seed), f"member {seed}")


def evaluation(case: Case) -> None:
    """Compute the loss in evaluation mode."""
    net, batch = case.net(), case.batches()[0]
    found = pc.evaluate(make_state(case, net), [batch])["loss"]
    net.eval()
    with torch.no_grad():
        expected = case.loss_of(net, batch).item()
    if not math.isclose(found, expected, rel_tol=case.tolerance, abs_tol=1e-7):
        raise Wrong(f"evaluation: loss {found}, expected {expected}")


def ranks(case: Case) -> None:
    """Run two processes that share each batch."""
    play, states = played(pc.compose(pc.loop_events), 2), [make_state(case, case.net())] * 2
    found = []
    for batch in case.batches():
        states = play(lambda step, state=states[0], batch=batch: step(state, batch))
        first, second = (_of(state, []) for state in states)
        if not tree.equal(first.params, second.params) or not tree.equal(first.buffers, second.buffers):
            raise Wrong("the processes have come apart")
        assert states[0].loss is not None
        found.append(states[0].loss.item())
    if not case.sliced:
        compare(case, _of(states[0], found), _expected(case), "ranks")


MODES: dict[str, Callable[[Case], None]] = {
    mode.__name__: mode for mode in (eager, microbatches, compiled, inductor, population, evaluation, ranks)
}
