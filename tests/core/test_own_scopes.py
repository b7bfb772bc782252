"""Scopes of a user: a gradient averaged over several draws, and one that is clipped."""

import pickle

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import Event, State, algorithms as alg, compose, loop, optim
from purecompose.functional import clip_by_norm


# A state's fields may be `None`, which a body's loss and gradients are not.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false


class Averaged(loop.Scope):
    """Run the body `times` times, each with other draws, and average loss and gradients."""

    times: int

    def around(self, body, state):
        ends = [body(state.replace(grads=None)) for _ in range(self.times)]
        grads = {name: sum(end.grads[name] for end in ends) / self.times for name in ends[0].grads}
        return ends[-1].replace(grads=grads, loss=torch.stack([end.loss for end in ends]).mean())


class Clipped(loop.Scope):
    norm: float

    def around(self, body, state):
        state = body(state)
        return state.replace(grads=clip_by_norm(state.grads or {}, self.norm))


GRAD = loop.Grad(Event.BEFORE_FORWARD, loop.forward, Event.AFTER_FORWARD, loop.loss, Event.AFTER_LOSS)
AFTER = (Event.AFTER_TRAIN_BATCH, loop.update, loop.advance, Event.BATCH_END)
BATCH = torch.randn(8, 10, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
SCOPES = {
    "averaged": Averaged(GRAD, times=2),
    "averaged slices": Averaged(loop.Microbatches(GRAD, microbatches=2), times=2),
    "slices averaged": loop.Microbatches(Averaged(GRAD, times=2), microbatches=2),
    "clipped": Clipped(GRAD, norm=0.1),
    "clipped slices": loop.Microbatches(Clipped(GRAD, norm=0.1), microbatches=4),
}


def new_state(p=0.5):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 3))
    return State.create(net, loss=pc.losses.cross_entropy, optimizer=optim.sgd(0.1), key=1, duration="8ba")


CUT = pytest.mark.filterwarnings("ignore:the gradient of the loss .* as the mean over 2 slices:UserWarning")


def close(ours, theirs):
    torch.testing.assert_close(dict(ours.params), dict(theirs.params))


def test_without_draws_an_average_is_the_plain_step():
    close(
        compose([Averaged(GRAD, times=3), *AFTER])(new_state(0.0), BATCH),
        compose([GRAD, *AFTER])(new_state(0.0), BATCH),
    )


def test_the_draws_of_each_call_differ():
    one, two = (compose([Averaged(GRAD, times=n), *AFTER])(new_state(), BATCH) for n in (1, 2))
    close(one, compose([GRAD, *AFTER])(new_state(), BATCH))
    assert not torch.equal(one.params["0.weight"], two.params["0.weight"])
    assert torch.equal(two.key, new_state().key)


def test_no_two_turns_of_scopes_within_each_other_draw_the_same():
    drawn = []

    def draw(event, state):
        drawn.append(pc.random.uniform(state.rng("n"), ()).item())
        return state

    class Repeat(loop.Scope):
        n: int

        def around(self, body, state):
            for _ in range(self.n):
                state = body(state)
            return state.replace(key=state.key + 1)  # which the scope's end takes back

    draws = pc.Algorithm("draws", pc.on(Event.AFTER_TRAIN_BATCH), draw)
    body = GRAD, Event.AFTER_TRAIN_BATCH, loop.update
    compose([Repeat(Repeat(*body, n=3), n=2), *body, Repeat(*body, n=2), loop.advance], [draws])(new_state(), BATCH)
    assert len(set(drawn)) == len(drawn) == 9


def test_a_turn_may_be_repeated():
    class Same(loop.Scope):
        def around(self, body, state):
            losses = [body(state, **turn).loss.item() for turn in ({}, {"turn": 0}, {"turn": 1})]
            assert losses[0] == losses[1] != losses[2]
            return body(state, turn=0)

    step = compose([Same(GRAD), *AFTER])
    close(step(new_state(), BATCH), compose([GRAD, *AFTER])(new_state(), BATCH))


@CUT
@pytest.mark.parametrize("name", SCOPES)
def test_compiled_and_in_a_population(name):
    step, start = compose([SCOPES[name], *AFTER], [alg.gradient_clipping("norm", 1.0)]), new_state()
    state = compiled = step.init(start)
    fast = pc.compile(pickle.loads(pickle.dumps(step)), backend="eager", quiet=True)
    for _ in range(3):
        state, compiled = step(state, BATCH), fast(compiled, BATCH)
    close(compiled, state)
    for one in pc.unstack_states(pc.population(step, 2)(pc.stack_states([start, start]), BATCH)):
        close(one, step(start, BATCH))


@CUT
@pytest.mark.parametrize("name", SCOPES)
def test_a_gradient_that_is_taken_again_is_that_of_the_scope(name):
    near = compose([SCOPES[name], *AFTER], [alg.sam(1e-6)])
    plain, state = compose([SCOPES[name], *AFTER]), near.init(new_state())
    fast = pc.compile(near, backend="eager", quiet=True)
    for step in (near, fast):
        torch.testing.assert_close(
            dict(step(state, BATCH).params), dict(plain(new_state(), BATCH).params), rtol=1e-4, atol=1e-6
        )


def test_what_a_scope_does_to_each_slice_is_reported():
    with pytest.warns(UserWarning, match="the gradient of the loss CrossEntropy.* as the mean over 2 slices"):
        compose([SCOPES["clipped slices"], *AFTER])(new_state(), BATCH)


@pytest.mark.filterwarnings("ignore:gradient_accumulation acts at:UserWarning")
def test_what_acts_once_in_a_step_is_refused_in_a_scope():
    with pytest.raises(ValueError, match="put `advance` into the program once, outside"):
        compose([Clipped(GRAD, loop.update, loop.advance, norm=1.0)])
    body = GRAD, Event.AFTER_TRAIN_BATCH, loop.update
    with pytest.raises(ValueError, match="gradient_accumulation adds up one gradient of each step: .*outside of"):
        compose([Clipped(*body, norm=1.0), loop.advance], [alg.gradient_accumulation(2)])


def test_a_scope_with_an_update_may_run_several_times():
    class Twice(loop.Scope):
        def around(self, body, state):
            return body(body(state))

    once = [GRAD, loop.update]
    close(
        compose([Twice(*once), loop.advance])(new_state(0.0), BATCH),
        compose([*once, *once, loop.advance])(new_state(0.0), BATCH),
    )


def test_unknown_settings_missing_ones_and_results_are_errors():
    with pytest.raises(TypeError, match="Averaged: unknown setting 'time'; those annotated are times"):
        Averaged(GRAD, time=2)
    with pytest.raises(TypeError, match="Averaged: expected a value for 'times'; its settings are times"):
        Averaged(GRAD)

    class Forgetful(loop.Scope):
        def around(self, body, state):  # pyright: ignore[reportIncompatibleMethodOverride]
            body(state)

    with pytest.raises(pc.errors.ContractError, match=r"Forgetful.around must return a State, got NoneType \(is a"):
        compose([Forgetful(GRAD), *AFTER])(new_state(), BATCH)
    with pytest.raises(NotImplementedError, match="Scope must define around"):
        compose([loop.Scope(GRAD), *AFTER])(new_state(), BATCH)


@pytest.mark.parametrize("around", [lambda *body: Averaged(*body, times=1), lambda *body: Clipped(*body, norm=100.0)])
def test_a_loss_inside_is_checked_as_without_the_scope(around):
    def summed(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")

    state = State.create(nn.Linear(10, 3), loss=summed, optimizer=optim.sgd(0.1), key=1)
    with pytest.raises(ValueError, match="examples together, but"):
        compose([around(loop.Microbatches(GRAD, microbatches=2)), *AFTER])(state, BATCH)


def test_the_passes_of_a_scope_draw_other_numbers_and_writes_in_place_are_named():
    seen = []

    class Looking(loop.Scope):
        def around(self, body, state):
            outputs = [state.call(state.batch[0])[0] for _ in range(2)]
            seen.append((*outputs, pc.random.uniform(state.rng("n"), (3,))))
            return body(state)

    compose([Looking(), Looking(GRAD), *AFTER])(new_state(), BATCH)
    (first, second, drawn), (third, _, other) = seen
    assert not torch.equal(first, second) and not torch.equal(first, third) and not torch.equal(drawn, other)

    class Writing(loop.Scope):
        def around(self, body, state):
            state.batch[0].mul_(0.5)
            return body(state)

    batch = tuple(tensor.clone() for tensor in BATCH)
    with pytest.raises(pc.errors.InPlaceError, match="the scope Writing wrote in place into state.batch"):
        compose([Writing(GRAD), *AFTER])(new_state(), batch)
