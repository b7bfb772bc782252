"""A whole run has no side effects on generators, torch's modes, the net or the data."""

import random
import sys

import torch

from purecompose import Evaluator, compose, evaluate, fit, loop_events, predict, traced
from tests.helpers import assert_same, copied, counter, make_batches, make_cnn, make_mlp, make_state, noise


def generators():
    """Return the states of all available global generators."""
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        random.getstate(),
        () if numpy is None else tuple(map(str, numpy.random.get_state())),
    )


def modes():
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_deterministic_algorithms_warn_only_enabled()


def whole_run(net, shape):
    step = compose(loop_events, [noise(), counter()], microbatches=2)
    data = make_batches(3, shape=shape)
    state = make_state(net)
    state = fit(step, state, data, evaluate=Evaluator(data, every="1ba"))
    evaluate(state, data, step=step)
    predict(state, data, step=step)
    return traced(step)(state, data[0])[0]


def test_the_net_the_modes_and_the_flags_are_unchanged():
    net = make_cnn().eval()
    before, attributes, mode = copied(dict(net.state_dict())), dict(net.__dict__), modes()
    whole_run(net, (2, 6, 6))
    assert_same(dict(net.state_dict()), before)
    assert net.__dict__.keys() == attributes.keys()
    assert not net.training and not any(module.training for module in net.modules())
    assert all(param.grad is None and param.requires_grad for param in net.parameters())
    assert modes() == mode


def test_a_failing_step_leaves_no_trace():
    def fail(outputs, targets, reduction="mean"):
        raise ArithmeticError("no loss today")

    good, bad = make_state(make_mlp(dropout=0.5)), make_state(make_mlp(dropout=0.5), loss=fail)
    step, (batch, *_) = compose(loop_events), make_batches(1)
    expected = step(good, batch)
    mode = modes()
    for _ in range(2):
        try:
            step(bad, batch)
        except ArithmeticError:
            pass
        else:
            raise AssertionError("the loss must fail")
        assert modes() == mode
        assert_same(step(good, batch), expected)
