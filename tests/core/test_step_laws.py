"""Laws of every step: pure, repeatable, independent of algorithms that do not act, with exact time."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import purecompose as pc
from purecompose import Event, compose, every, loop_events, optim, schedule
from tests.helpers import (
    assert_close,
    assert_same,
    changing,
    copied,
    counter,
    decay,
    make_batches,
    make_mlp,
    make_state,
    noise,
    run_steps,
)


ALGORITHMS = {
    "noise": noise,
    "other": lambda: noise("other", 0.3),
    "decay": decay,
    "counter": counter,
    "rare": lambda: decay("rare", 0.5, when=every(3)),
}
lists = st.lists(st.sampled_from(sorted(ALGORITHMS)), unique=True).map(lambda names: [ALGORITHMS[n]() for n in names])


@settings(max_examples=15)
@given(algorithms=lists, seed=st.integers(0, 2**31), k=st.integers(1, 3))
def test_a_step_leaves_its_input_as_it_was_and_repeats_itself(algorithms, seed, k):
    step = compose(loop_events, algorithms, microbatches=k)
    state = step.init(make_state(make_mlp(seed, dropout=0.3), key=seed))
    for batch in make_batches(2):
        state_before, batch_before = copied(state), copied(batch)
        after = step(state, batch)
        assert_same(state, state_before)
        assert_same(batch, batch_before)
        assert_same(after, step(state, batch))
        assert after.timestamp.batch == state.timestamp.batch + 1
        state = after


@settings(max_examples=15)
@given(algorithms=lists, seed=st.integers(0, 2**31), place=st.integers(0, 4))
def test_an_algorithm_that_does_not_match_is_absent(algorithms, seed, place):
    absent = noise("absent", when=pc.after(1.0))
    with_absent = [*algorithms[:place], absent, *algorithms[place:]]
    plain, step = compose(loop_events, algorithms), compose(loop_events, with_absent)
    state = make_state(make_mlp(dropout=0.3), key=seed, batches_per_epoch=4)
    expected = run_steps(plain, plain.init(state), make_batches(3))
    assert_same(run_steps(step, step.init(state), make_batches(3)), expected)


def test_another_algorithm_does_not_change_the_draws():
    def seen_by(algorithms):
        seen = []

        def look(state):
            seen.append(pc.random.uniform(state.rng("look"), (3,)))
            return state

        looking = changing("look", Event.BATCH_START, look)
        run_steps(compose(loop_events, [*algorithms, looking]), make_state(key=3), make_batches(3))
        return seen

    alone = seen_by([])
    assert_same(seen_by([noise(), decay(), noise("third")]), alone)
    assert not torch.equal(alone[0], alone[1])


@pytest.mark.parametrize("k", [2, 3, 5])
def test_slices_draw_the_same_numbers_as_the_whole_batch(k):
    state = make_state(make_mlp(dropout=0.4))
    add = changing(
        "inner",
        Event.BEFORE_FORWARD,
        lambda s: s.replace(inputs=s.inputs + pc.random.normal(s.example_rng("inner"), tuple(s.inputs.shape))),
    )
    whole = run_steps(compose(loop_events, [add]), state, make_batches(3))
    sliced = run_steps(compose(loop_events, [add], microbatches=k), state, make_batches(3))
    assert_close(whole.params, sliced.params)


def test_time_rolls_over_at_the_epoch():
    state, times = make_state(batches_per_epoch=3), []
    step = compose(loop_events)
    for batch in make_batches(7, size=2):
        state = step(state, batch)
        times.append((state.timestamp.epoch, state.timestamp.batch_in_epoch, state.timestamp.sample_in_epoch))
    assert times == [(0, 1, 2), (0, 2, 4), (1, 0, 0), (1, 1, 2), (1, 2, 4), (2, 0, 0), (2, 1, 2)]
    assert (state.timestamp.batch, state.timestamp.sample) == (7, 14)


def test_a_learning_rate_schedule_is_evaluated_at_the_current_batch():
    ramp = schedule.linear(1.0, 0.0, t_max="4ba")
    state = make_state(optimizer=optim.sgd(0.2 * ramp))
    step = compose(loop_events)
    net = make_mlp()
    for t, (inputs, targets) in enumerate(make_batches(5)):
        state = step(state, (inputs, targets))
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), targets).backward()
        with torch.no_grad():
            for param in net.parameters():
                assert param.grad is not None
                param -= 0.2 * max(1 - t / 4, 0) * param.grad
    assert_close(state.params, dict(net.named_parameters()))
