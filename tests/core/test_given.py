"""What user code does to the values that it is given: in steps, evaluation, prediction and single passes."""

from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import State, compose, hparam, loop_events, losses, optim
from purecompose.transforms.compilation.step import CompiledStep
from tests.helpers import loss_of


class Force(nn.Module):
    """A network whose output contains its derivative with respect to the input, as forces do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x.requires_grad_()
        energy = self.net(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + slope.sum(1, keepdim=True)


def force_state(rate: Any = 0.1) -> State:
    torch.manual_seed(0)
    return State.create(Force(), loss=losses.mse, optimizer=optim.sgd(rate), key=0)


def force_batch():
    torch.manual_seed(1)
    return torch.randn(6, 2), torch.randn(6, 1)


def force_losses(num_steps):
    """Return the losses of a plain loop."""
    torch.manual_seed(0)
    net, (x, y), found = Force(), force_batch(), []
    plain = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(num_steps):
        loss = nn.functional.mse_loss(net(x), y)
        plain.zero_grad()
        loss.backward()
        plain.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_network_that_requires_gradients_of_its_input_leaves_no_flag(is_compiled):
    step, state, batch = compose(loop_events), force_state(), force_batch()
    step = pc.compile(step, backend="eager", quiet=True) if is_compiled else step
    for expected in force_losses(3):
        state = step(state, batch)
        assert loss_of(state).item() == pytest.approx(expected, rel=1e-5)
    assert not batch[0].requires_grad
    assert all(not one.requires_grad and one.grad_fn is None for one in pc.tree.leaves((state.params, state.loss)))
    assert not isinstance(step, CompiledStep) or len(step.variants()) == 1


@pytest.mark.parametrize("kind", ["dict", "list", "nested"])
def test_no_flag_is_left_on_batches_of_other_forms(kind):
    x, y = force_batch()
    batch, target = {"dict": ({"x": x, "y": y}, "y"), "list": ([x, y], 1), "nested": ((x, [y]), 1)}[kind]
    loss = (lambda outputs, targets: losses.mse(outputs, targets[0])) if kind == "nested" else losses.mse
    state = State.create(
        Force(),
        loss=loss,
        optimizer=optim.sgd(0.1),
        input_field="x" if kind == "dict" else 0,
        target_field=target,
    )
    compose(loop_events)(state, batch)
    assert not x.requires_grad


def test_gradients_with_respect_to_the_input_are_taken_in_evaluation():
    state, (x, y) = force_state(), force_batch()
    with torch.enable_grad():
        expected = pc.to_module(state)(x.clone())
    (outputs,) = pc.predict(state, [(x, y)])
    torch.testing.assert_close(outputs, expected.detach())
    assert not outputs.requires_grad and not x.requires_grad
    value = pc.evaluate(state, [(x, y)])["loss"]
    assert value == pytest.approx(nn.functional.mse_loss(expected, y).item(), rel=1e-5)


def test_hypergradients_pass_through_a_network_that_requires_gradients_of_its_input():
    state, batch, step = force_state(hparam("lr", 0.1)), force_batch(), compose(loop_events)

    def loss(rate):
        end = step.init(state).replace(hparams={"lr": rate})
        for _ in range(3):
            end = step(end, batch)
        return loss_of(end)

    rate = torch.tensor(0.1, requires_grad=True)
    (plain,) = torch.autograd.grad(loss(rate), rate)
    assert not batch[0].requires_grad
    functional = torch.func.grad(loss)(torch.tensor(0.1))
    assert not batch[0].requires_grad
    both = [loss(torch.tensor(0.1 + sign * 1e-3)) for sign in (1, -1)]
    assert plain.item() == pytest.approx(functional.item(), rel=1e-4)
    assert plain.item() == pytest.approx((both[0] - both[1]).item() / 2e-3, rel=2e-2)


def test_a_batch_that_requires_gradients_still_gets_them():
    state, (x, y), step = force_state(), force_batch(), compose(loop_events)
    x.requires_grad_()
    end = step(step(state, (x, y)), (x, y))
    assert torch.autograd.grad(loss_of(end), x)[0].abs().sum() > 0


def test_a_single_pass_leaves_no_flag():
    state, (x, _) = force_state(), force_batch()
    state.forward(x)
    assert not x.requires_grad
