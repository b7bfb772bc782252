"""Optimizers keep memory only for parameters that train; thawing a part creates its memory."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State, compose, loop_events, losses, on, optim, tree
from purecompose.optim.wrapping import Guarded
from purecompose.schedule import number
from tests.helpers import changing, make_batch, make_batches, make_mlp, make_state, run_steps


@dataclasses.dataclass(frozen=True)
class Listed:
    """Momentum in a list, in the order of the parameters."""

    lr: float = 0.1

    def init(self, params: Any) -> list[Tensor]:
        return [torch.zeros_like(param) for param in params.values()]

    def update(self, grads: Any, opt_state: list[Tensor], params: Any, value: Any = number) -> Any:
        new = [0.9 * old + grads.get(name, 0.0) for old, name in zip(opt_state, params, strict=True)]
        moved = {name: params[name] - self.lr * own for name, own in zip(params, new, strict=True) if name in grads}
        return {**params, **moved}, new


BY_NAME = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, momentum=0.9, dampening=0.1),
    "adam": optim.adam(0.01, groups={"0.*": {"lr": 0.1}}),
    "adafactor": optim.adafactor(0.01),
    "by pattern": optim.by_pattern({"*.weight": optim.muon(0.02)}, optim.adamw(0.01)),
    "from torch": optim.from_torch(torch.optim.NAdam, lr=0.01),
    "guarded": Guarded(optim.lion(0.01)),
}


def with_memory(state: State) -> set[str]:
    """Return the names of the parameters for which the optimizer keeps anything."""
    paths = tree.leaves_with_paths(state.opt_state)
    return {name for name in state.params if any(repr(name) in path for path in paths)}


@pytest.mark.parametrize("optimizer", BY_NAME.values(), ids=BY_NAME)
def test_only_what_trains_has_memory(optimizer: Any) -> None:
    net = make_mlp()
    net[0].requires_grad_(False)
    state, whole = make_state(net, optimizer=optimizer), make_state(optimizer=optimizer)
    assert with_memory(state) == with_memory(whole) - {"0.weight", "0.bias"}
    assert tree.equal(whole.replace(frozen=["0.*"]).opt_state, state.opt_state)
    assert tree.equal(state.replace(frozen=[]).opt_state, whole.opt_state)
    step = compose(loop_events)
    later = step(step(state, make_batch(0)).replace(frozen=[]), make_batch(1))
    assert tree.structure(later.opt_state) == tree.structure(whole.opt_state)


def test_adapters_need_little_memory() -> None:
    net = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 2))
    net[0].requires_grad_(False)
    state = State.create(net, loss=losses.cross_entropy, optimizer=optim.adam(0.1))
    assert sum(leaf.numel() for leaf in tree.leaves(state.opt_state)) == 2 * 1026 + 2


def test_memory_in_another_form_is_kept_whole() -> None:
    net = make_mlp()
    net[0].requires_grad_(False)
    state = make_state(net, optimizer=Listed())
    assert [leaf.shape for leaf in state.opt_state] == [param.shape for param in net.parameters()]
    later = run_steps(compose(loop_events), state, make_batches(2))
    assert tree.equal(later.replace(frozen=[]).opt_state, later.opt_state)


def test_parameters_frozen_for_a_while_continue_with_their_memory_as_in_torch() -> None:
    net = make_mlp()
    state, reference = make_state(net), copy.deepcopy(net)
    sgd_of_torch = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    for frozen in (["3.*"], [], ["0.*"], []):
        state = state.replace(frozen=frozen)
        for name, param in reference.named_parameters():
            param.requires_grad_(name in state.context.trainable)
        for inputs, targets in make_batches(2):
            state = compose(loop_events)(state, (inputs, targets))
            sgd_of_torch.zero_grad()
            nn.functional.cross_entropy(reference(inputs), targets).backward()
            sgd_of_torch.step()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(state.params[name], param.detach())


@pytest.mark.parametrize("form", ["compiled", "population"])
def test_a_thawed_part_trains_alike_in_every_form(form: str) -> None:
    plain = compose(loop_events)
    step = pc.compile(plain, backend="eager") if form == "compiled" else pc.population(plain, 2)
    starts = [make_state(optimizer=optim.adam(0.01), key=key).replace(frozen=["0.*"]) for key in range(2)]
    state = starts[0] if form == "compiled" else pc.stack_states(starts)
    for frozen in (["0.*"], [], ["3.bias"]):
        starts = [run_steps(plain, start.replace(frozen=frozen), make_batches(2)) for start in starts]
        state = run_steps(step, state.replace(frozen=frozen), make_batches(2))
    ended = [state] if form == "compiled" else pc.unstack_states(state)
    for one, start in zip(ended, starts, strict=False):
        assert tree.structure(one.opt_state) == tree.structure(start.opt_state)
        torch.testing.assert_close(one.params, start.params)


@pytest.mark.parametrize("event", [Event.EPOCH_START, Event.BATCH_START])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_method_may_thaw_a_part(is_compiled: bool, event: Event) -> None:
    def thaw(event: Event, state: State) -> State:
        del event
        return state.replace(frozen=["0.*"] if state.timestamp.epoch < 1 else [])

    step = compose(loop_events, [Algorithm("thaw", on(event), thaw, host=True)])
    step = pc.compile(step, backend="eager") if is_compiled else step
    net = make_mlp()
    net[0].requires_grad_(False)
    start = make_state(net, optimizer=optim.adam(0.01))
    end = pc.fit(step, step.init(start), make_batches(2), duration="2ep")
    assert end.context.trainable == tuple(start.params) and with_memory(end) == {*start.params}


def test_gradients_of_frozen_parameters_are_named() -> None:
    def all_of_them(state: State) -> State:
        return state.replace(grads={name: torch.ones_like(param) for name, param in state.params.items()})

    step = compose(loop_events, [changing("all", Event.AFTER_TRAIN_BATCH, all_of_them)])
    with pytest.raises(KeyError) as caught:
        step(make_state().replace(frozen=["0.*"]), make_batch())
    assert any("gradients of frozen parameters" in note for note in caught.value.__notes__)
