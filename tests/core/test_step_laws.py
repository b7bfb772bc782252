"""Laws of every step: pure, repeatable, independent of algorithms that do not act, with exact time."""

import pytest
import torch
from hypothesis import strategies as st

import purecompose as pc
from purecompose import Event, compose, every, loop_events, optim, schedule
from tests.helpers import assert_close, changing, counter, decay, make_batches, make_mlp, make_state, noise, run_steps


ALGORITHMS = {
    "noise": noise,
    "other": lambda: noise("other", 0.3),
    "decay": decay,
    "counter": counter,
    "rare": lambda: decay("rare", 0.5, when=every(3)),
}
lists = st.lists(st.sampled_from(sorted(ALGORITHMS)), unique=True).map(lambda names: [ALGORITHMS[n]() for n in names])


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
